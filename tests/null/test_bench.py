"""The benchmark's arithmetic: statistics, contended rounds, alternation, checks of outputs. Nothing here is
timed."""

from __future__ import annotations

import math
from itertools import count

import pytest
import torch

from benchmarks import cases, command, problem, tables
from benchmarks.cases import SDPA, Case
from polyflash import compare as comparing
from polyflash import target
from polyflash.bench import check, peak, timing
from polyflash.bench import suite as plain
from polyflash.bench.timing import Arm, Comparison, Round, compare, iqr, median
from polyflash.errors import SpecError
from polyflash.workloads import Workload

PLAIN = Case("dense", "full", Workload("plain", frozenset(), 1, 2, 2, 16, 16, 8))
SOUND = check.Accuracy(1e-7, 1e-7, 1e-7, 0.0, 2, 16)


def rounds(*values: tuple[float, float, float, float]) -> Comparison:
    """From (ours, torch, ours on 1 thread, speed) per round."""
    return Comparison(
        tuple(
            Round({plain.OURS: a, SDPA: b, plain.ALONE: c, command.AFTER: 1.5 * a}, speed)
            for a, b, c, speed in values
        )
    )


def result(
    comparison: Comparison,
    *,
    case: Case = PLAIN,
    difference: float = 1e-7,
    ours: check.Accuracy = SOUND,
    backend: str = "cpu",
) -> dict:
    best = peak.Peak("fp32", per_thread=100.0, together=190.0, threads=2, cores=2)
    return command.row(case, backend, comparison, difference, ours, SOUND, 1e9, 4e9, best, 2)


class Clock:
    """Time that only advances when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float):
        def call() -> None:
            self.now += seconds

        return call


def test_median_and_range_interpolate():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert iqr([0.0, 1.0, 2.0, 3.0, 4.0]) == 2.0
    assert iqr([5.0]) == 0.0
    assert math.isnan(median([]))


def test_a_median_ignores_contended_rounds():
    quiet = [(1.0, 2.0, 2.0, 1.0)] * 3
    half_speed = [(2.0, 9.0, 4.0, 0.5)] * 5
    made = rounds(*quiet, *half_speed)
    assert made.quiet == 3
    assert not made.contended
    assert made.summary(plain.OURS) == timing.Summary(1.0, 0.0, rounds=3, of=8)
    assert made.ratio(SDPA, plain.OURS) == 2.0


def test_too_few_quiet_rounds_are_marked_and_all_are_counted():
    made = rounds((1.0, 2.0, 2.0, 1.0), (1.0, 2.0, 2.0, 0.81), (3.0, 6.0, 3.0, 0.79), (3.0, 6.0, 3.0, 0.5))
    assert made.quiet == 2
    assert made.contended
    assert made.summary(plain.OURS).rounds == 4
    assert result(made)["marks"] == ["contended"]


def test_a_ratio_is_of_medians_not_a_median_of_ratios():
    made = rounds((1.0, 1.0, 1.0, 1.0), (2.0, 8.0, 1.0, 1.0), (3.0, 3.0, 1.0, 1.0))
    assert made.ratio(SDPA, plain.OURS) == 3.0 / 2.0


def test_percent_of_peak_and_scaling():
    r = result(rounds(*[(0.01, 0.02, 0.019, 1.0)] * 3))
    assert r["gflops"] == pytest.approx(100.0)
    assert r["of_peak"] == pytest.approx(0.5)
    assert r["scaling"] == pytest.approx(1.9)
    assert r["after_torch"] == pytest.approx(1.5)
    assert any("1.50" in line for line in tables.notes([r]))
    assert r["marks"] == []


def test_low_scaling_is_marked_where_the_call_is_long_enough_to_split():
    assert result(rounds(*[(0.01, 0.02, 0.012, 1.0)] * 3))["marks"] == ["low scaling"]
    assert result(rounds(*[(1e-5, 2e-5, 1e-5, 1.0)] * 3))["marks"] == []


@pytest.mark.parametrize(
    "wrong", [{"difference": 1e-4}, {"ours": check.Accuracy(1e-7, 1e-3, 1.0, 0.0, 2, 16)}]
)
def test_outputs_that_differ_have_no_ratio(wrong):
    r = result(rounds(*[(1.0, 2.0, 2.0, 1.0)] * 3), **wrong)
    assert r["ratio"] is None and r["marks"] == ["mismatch"]
    assert any("mismatch" in mark or "worst row" in mark for mark in tables.notes([r]))


def test_one_wrong_row_is_seen_among_thousands():
    expected = torch.randn(1, 8, 512, 64)
    got = expected.clone()
    assert comparing.worst_row(got, expected) == 0.0
    got[0, 3, 77] *= 1.001
    assert comparing.worst_row(got, expected) == pytest.approx(1e-3, rel=1e-2)
    got[0, 3, 77] = torch.nan
    assert comparing.worst_row(got, expected) == math.inf


def test_empty_rows_agree():
    assert comparing.worst_row(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)) == 0.0
    assert comparing.worst_row(torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)) == math.inf


def test_rounds_alternate_their_order_and_stop_in_time():
    clock, order = Clock(), []

    def arm(name: str, seconds: float) -> Arm:
        step = clock.takes(seconds)
        return Arm(name, lambda: (order.append(name), step()))

    made = compare([arm("a", 0.125), arm("b", 0.25)], seconds=1.5, fewest=3, clock=clock, settle=0)
    assert order[-4:] in (["a", "b", "b", "a"], ["b", "a", "a", "b"])
    assert len(made.rounds) == 4
    assert made.summary("b").median == 0.25


def test_contended_rounds_are_waited_for_but_not_for_ever():
    clock = Clock()
    speeds = [1.0, 0.5, 0.5, 0.5, 1.0, *[1.0] * 50]
    made = compare(
        [Arm("a", clock.takes(0.25))], seconds=0.75, fewest=3, speed=iter(speeds).__next__, clock=clock
    )
    assert [r.quiet for r in made.rounds] == [False] * 4 + [True] * 2
    never = compare([Arm("a", clock.takes(0.25))], seconds=0.75, fewest=3, speed=lambda: 0.5, clock=clock)
    assert len(never.rounds) == 6 and never.contended


def test_short_calls_are_repeated_and_a_stalled_one_is_not():
    clock, calls = Clock(), count()

    def call() -> None:
        clock.now += 1e-5 if next(calls) < 10 else 1.0

    stalled = compare([Arm("a", call)], seconds=0.1, clock=clock)
    assert next(calls) < 100
    assert stalled.summary("a").median == pytest.approx(1.0)
    quick = compare([Arm("b", clock.takes(1e-5))], seconds=0.1, clock=clock)
    assert quick.summary("b").median == pytest.approx(1e-5)


def test_a_sample_begins_right_behind_its_before():
    clock, order = Clock(), []

    def call() -> None:
        order.append("call")
        clock.now += 0.25

    compare(
        [Arm("a", call, before=lambda: order.append("before"))], seconds=0.5, fewest=2, clock=clock, settle=0
    )
    assert order == ["call"] * 4 + ["before", "call"] * 2
    order.clear()
    quick = Arm("b", lambda: (order.append("call"), clock.takes(2**-10)()))
    compare([quick], seconds=2**-9, fewest=1, clock=clock, settle=0)
    assert order == ["call"] * 4 + ["call", "call"]  # a waking call, then the timed one


def test_thread_counts_are_put_back():
    before = torch.get_num_threads()
    seen = []
    clock = Clock()

    def call() -> None:
        seen.append(torch.get_num_threads())
        clock.now += 0.1

    compare([Arm("one", call, threads=1)], seconds=0.3, clock=clock)
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_a_raising_arm_leaves_the_thread_count():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        compare([Arm("one", lambda: 1 / 0, threads=1)], seconds=0.1)
    assert torch.get_num_threads() == before


def test_the_rows_cover_the_speed_promise():
    every = cases.rows(size="long")
    problems = {c.workload for c in every}
    names = {(w.dtype, w.head_dim, bool(w.causal), w.seqlen_q, w.kv_heads) for w in problems}
    for dtype in ("float32", "bfloat16", "float16"):
        for head_dim in (64, 128):
            for causal in (False, True):
                for seqlen in (512, 2048, 8192):
                    for kv_heads in (8, 2):
                        assert (dtype, head_dim, causal, seqlen, kv_heads) in names
    assert any(w.window for w in problems)
    assert max(c.workload.seqlen_q for c in cases.rows(size="quick")) == 512


def test_rows_are_chosen_by_name_and_by_words():
    every = cases.rows()
    assert {c.workload.head_dim for c in plain.selected(every, words="causal d64 bfloat16")} == {64}
    assert [c.name for c in plain.selected(every, names=every[3].name)] == [every[3].name]
    with pytest.raises(SpecError, match="--list"):
        plain.selected(every, words="d65")
    with pytest.raises(SpecError, match="nothing-of-this-name"):
        plain.selected(every, names="nothing-of-this-name")


@pytest.mark.parametrize(
    "causal, window", [(False, None), (True, None), (False, (3, 5)), (True, (4, None)), (True, (4, 9))]
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_peer_and_the_sample_agree_with_the_oracle(causal, window, kv_heads):
    q, k, v = (torch.randn(2, h, 100, 8, dtype=torch.float64) for h in (4, kv_heads, kv_heads))
    out = problem.sdpa(q, k, v, {"causal": causal, "window": window})()
    seen = check.sampled_error(q, k, v, out, None, {"causal": causal, "window": window})
    assert seen.relative < 1e-13
    assert (seen.heads, seen.rows) == (4, 96)
    out[-1, -1, -1] += 1.0
    assert check.sampled_error(q, k, v, out, None, {"causal": causal, "window": window}).relative > 0.1


def test_the_sample_is_bounded_and_reaches_the_ends():
    q, k, v = torch.randn(1, 2, 4096, 8), torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    lse = (q @ k.transpose(-1, -2) / 8**0.5).logsumexp(-1)
    seen = check.sampled_error(q, k, v, out, lse)
    assert seen.rows == 96 and seen.relative < 1e-5 and seen.lse < 1e-5
    lse[0, 1, -1] += 0.5
    assert check.sampled_error(q, k, v, out, lse).lse == pytest.approx(0.5, rel=1e-3)


def test_values_that_cancel_are_no_mismatch():
    q, k = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 64, 4)
    v = (1e3 * (1 - 2 * (torch.arange(64) % 2)) + torch.arange(64) / 64)[:, None].expand(1, 1, 64, 4).half()
    exact = v.double().mean(2, keepdim=True).expand(1, 1, 4, 4)
    seen = check.sampled_error(q.half(), k.half(), v, exact.half() + 0.2, None)
    assert seen.relative > 0.1
    assert seen.weighted == pytest.approx(2e-4, rel=0.1)


def test_shared_nan_is_no_error_and_a_lone_one_is():
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    v[0, 0, 2, 1] = torch.nan
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert check.sampled_error(q, k, v, expected, None).relative < 1e-5
    assert check.sampled_error(q, k, v, expected.nan_to_num(), None).relative == math.inf


def test_kinds_of_arithmetic():
    dot, plain = target.parse("cpu:avx512+avx512_bf16"), target.parse("cpu:avx512")
    assert peak.kind_of("bfloat16", dot) == "bf16"
    assert peak.kind_of("bfloat16", plain) == "fp32"
    assert peak.kind_of("float16", dot) == "fp32"
    assert peak.kind_of("float64", dot) == "fp64"


@pytest.mark.parametrize("kind, bits", [("fp32", 512), ("fp32", 128), ("fp64", 256), ("bf16", 512)])
def test_the_peak_loop_is_one_instruction_per_accumulator(kind, bits):
    text = peak._text(kind, bits)
    assert text.count(" = call ") == peak._CHAINS[bits]
    assert text.count("load ") == 2
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.parse_assembly(text).verify()


def test_a_process_that_starts_in_a_bad_window_knows_it():
    calibration = object.__new__(peak.Calibration)
    calibration._peaks = {"fp32": peak.Peak("fp32", 100.0, together=101.0, threads=2, cores=2)}
    calibration._best, calibration._target = 0.0, target.parse("cpu:avx512")
    calibration._together = lambda loop, turns: 100.0
    try:
        peak._loop("fp32", 512)
    except ImportError:
        pytest.skip("llvmlite is not installed")
    assert calibration.speed() < timing.QUIET


def test_tables_fit_80_columns():
    slow = rounds((1.30689, 16.1234, 2.6, 0.5), (0.3, 4.0, 2.6, 0.5), (9.9, 99.0, 5.6, 0.5))
    assert slow.summary(plain.OURS).spread > 1
    wide = Case("dense", "causal", Workload("w", frozenset(), 8, 12, 12, 8192, 8192, 128, causal=True))
    assert max(map(len, tables.table([result(slow, case=c) for c in (wide, PLAIN)], "float32"))) <= 80
