"""The GPU suite on a machine without one: its rows, checks, clocks, children, supervisor, resumption and
tables."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import peers
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import arms as gpu_arms
from benchmarks.gpu import device as gpu_device
from benchmarks.gpu import page as gpu_page
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu.arms import (
    BACKWARD,
    CODES,
    DECODE,
    FORWARD,
    GRAPH,
    HOST,
    OURS,
    ROWS,
    GpuArm,
    GpuCase,
    arms,
    make_tensors,
)
from benchmarks.gpu.rows import Children, Task
from tests import processes

ROOT = Path(__file__).parents[2]
ONE_THREAD = "OMP_NUM_THREADS", "1"  # two would wait for a core of the other tests, at full speed
TINY = {c.part: c for c in reversed(gpu_arms.tiny())}
CAUSAL = gpu_arms.tiny()[1]
MATH = next(arm for arm in arms("torch") if arm.name == "math")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """Processes begin with torch imported."""
    monkeypatch.setattr(peers, "_SPAWN", processes.forking())


def test_rows_cover_what_is_promised():
    rows = gpu_arms.rows()
    assert len({c.name for c in rows}) == len(rows)
    assert [c.tier for c in rows] == sorted(c.tier for c in rows)
    lengths = {1024, 2048, 4096, 8192, 16384}
    for part, dims in ((FORWARD, (64, 128, 256)), (BACKWARD, (64, 128))):
        for dim in dims:
            for causal in (False, True):
                found = [
                    c
                    for c in rows
                    if (c.part, c.head_dim, c.causal, c.dtype) == (part, dim, causal, "bfloat16")
                ]
                papers = [c for c in found if c.batch * c.seqlen_q == 16384 and c.heads * c.head_dim == 2048]
                assert {c.seqlen_k for c in papers} == lengths
    assert {c.seqlen_k for c in rows if (c.batch, c.heads, c.part) == (4, 48, FORWARD)} == lengths - {16384}
    decode = [c for c in rows if c.part == DECODE]
    assert {1, 128} <= {c.batch for c in decode} and {1024, 262144} <= {c.seqlen_k for c in decode}
    assert {(c.heads, c.kv_heads) for c in decode} == {(32, 8), (8, 8)}
    assert max(c.key_bytes for c in decode) * 3 < 40 << 30
    assert {c.part for c in rows} == {*gpu_arms.PARTS, *gpu_arms.ASKED}
    few = {(c.heads, c.seqlen_q, c.seqlen_k) for c in rows if c.part == ROWS and c.causal}
    assert {(8, 65, 1000), (32, 512, 4096), (64, 1, 64)} <= few
    codes = [c for c in rows if c.part == CODES]
    assert {(c.head_dim, c.seqlen_k) for c in codes} == set(product((64, 128, 256), lengths - {1024}))


def test_work_counts_visible_pairs_and_keys_once():
    full = GpuCase(FORWARD, "t", 0, "bfloat16", 2, 16, 16, 1024, 1024, 128)
    assert full.work.flops == 4 * 2 * 16 * 1024 * 1024 * 128
    assert replace(full, causal=True).work.flops == full.work.flops * 1025 / 2048
    assert replace(full, part=BACKWARD).work.flops == 2.5 * full.work.flops
    step = GpuCase(DECODE, "t", 0, "bfloat16", 2, 32, 8, 1, 1024, 128)
    assert step.key_bytes == 2 * 2 * 8 * 1024 * 128 * 2


def test_a_case_survives_json():
    for case in gpu_arms.tiny():
        assert GpuCase(**json.loads(json.dumps(vars(case)))) == case


def test_filters():
    chosen = gpu_arms.selected(gpu_arms.rows(), words=["causal", "d64"], parts=[BACKWARD])
    assert chosen and {(c.causal, c.head_dim, c.part) for c in chosen} == {(True, 64, BACKWARD)}
    assert {c.part for c in gpu_arms.selected(gpu_arms.rows())} == set(gpu_arms.PARTS)


@pytest.mark.parametrize("case", gpu_arms.tiny(), ids=lambda c: c.name)
def test_our_calls_pass_the_check_and_wrong_ones_do_not(case: GpuCase):
    ours = arms("torch")[0]
    t = make_tensors(case, "cpu", 0)
    (call,) = ours.prepared(case, [t])
    result = call()
    assert gpu_rows.error(case, t, result) < gpu_rows.tolerance(case, ours)
    parts = list(result) if case.part == BACKWARD else [result]
    for i, part in enumerate(parts):
        for spoil in (lambda x: x.mul_(1.1), lambda x: x[-1, -1, -1, -1].fill_(torch.nan)):
            wrong = part.clone()
            spoil(wrong)
            spoiled = [wrong if j == i else x for j, x in enumerate(parts)]
            found = gpu_rows.error(case, t, tuple(spoiled) if case.part == BACKWARD else spoiled[0])
            assert gpu_rows.verdict(case, ours, {"error": found}).startswith("wrong")


def test_an_error_that_is_no_number_is_wrong():
    assert gpu_rows.verdict(CAUSAL, MATH, {"error": float("nan")}).startswith("wrong")
    assert gpu_rows.verdict(CAUSAL, MATH, {"error": 1e-7}) == ""
    assert gpu_rows.verdict(CAUSAL, MATH, {"reason": "hung"}) == "hung"


def test_peers_and_variants():
    named = {arm.name: arm for arm in arms("torch", ["num_stages=4,loads=descriptor,base2=false"])}
    assert set(gpu_arms.DEFAULT) <= set(named) and next(iter(named)) == OURS
    assert named[f"{OURS}[num_stages=4,loads=descriptor,base2=false]"].tried == "shape"
    assert gpu_arms.fields("a=4,b=descriptor,c=false") == (("a", 4), ("b", "descriptor"), ("c", False))
    coded = {a.name: a for a in arms("torch", ["int8-k:num_stages=4"])}
    assert coded["int8-k[num_stages=4]"].parts == (CODES,)
    assert coded[OURS].chosen(CAUSAL, make_tensors(CAUSAL, "cpu", 0)) == "torch/forward"
    assert coded["kv-int4"].parts == (gpu_arms.STEPS,)
    step = replace(TINY[gpu_arms.STEPS], head_dim=64, dtype="bfloat16")
    given = make_tensors(step, "cpu", 0)
    products = gpu_arms.Ours("torch", (gpu_arms.TOKEN, gpu_arms.TOKEN))
    assert 1e-3 < gpu_rows.error(step, given, products(step, given)()) < 3e-2
    with pytest.raises(ValueError, match="no kernel of triton reads these codes"):
        coded["fp8-triton"].prepare(TINY[CODES], make_tensors(TINY[CODES], "cpu", 0))
    t = make_tensors(TINY[DECODE], "cpu", 0)
    (call,) = [named["folded"].prepare(TINY[DECODE], t)]
    assert torch.allclose(call(), scaled_dot_product_attention(t.q, t.k, t.v, enable_gqa=True), atol=1e-5)
    assert "folded" not in {a.name for a in gpu_arms.applicable(list(named.values()), TINY[GRAPH])}


def test_sets_differ_and_calls_rotate_over_them():
    assert not torch.equal(make_tensors(CAUSAL, "cpu", 0).q, make_tensors(CAUSAL, "cpu", 1).q)
    taken: list[int] = []
    gpu_device.Device("cpu").seconds([lambda i=i: taken.append(i) for i in range(3)], 7)
    assert taken == [0, 1, 2, 0, 1, 2, 0]


def test_rounds_are_interleaved_in_any_order(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    inside: list[str] = []

    @contextmanager
    def scope():
        inside.append("in")
        yield
        inside.append("out")

    def timed(name: str) -> gpu_rows.Timed:
        return gpu_rows.Timed(GpuArm(name, name, (FORWARD,), None, scope=scope), [lambda: order.append(name)])  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_rows, "_ORDER", random.Random(3))
    both = [timed("a"), timed("b")]
    gpu_rows.interleaved(both, lambda calls, n: calls[0]() or float(n), rounds=3, repeats=4)
    rounds = [order[i : i + 4] for i in range(4, 16, 4)]  # each sample after as many calls unmeasured
    assert order[:4] == ["a", "a", "b", "b"] and all(sorted(r) == ["a", "a", "b", "b"] for r in rounds)
    assert {r[0] for r in rounds} == {"a", "b"} and all(r[0] == r[1] for r in rounds)
    assert both[0].samples == [4.0, 4.0, 4.0] and both[0].plain()["calls"] == 4
    assert inside[0] == "in" and inside[-1] == "out" and inside.count("in") == 8


def test_long_calls_are_fewer():
    for once, repeats in ((1e-4, gpu_rows.CALLS), (5e-3, 10), (1.0, gpu_rows.FEWEST_CALLS)):
        arm = gpu_rows.Timed(MATH, [lambda: None])
        gpu_rows.interleaved([arm], lambda _, n, once=once: once, rounds=1)
        assert arm.repeats == repeats


class FakeCuda:
    """Events on a clock of its own: a flush takes 150 ms of it, a call 2 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.busy = 0.0, 0
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(gpu_device.Device, "flush", lambda _: self.wait(150.0))

    def wait(self, milliseconds: float) -> None:
        self.now += milliseconds

    def device(self) -> gpu_device.Device:
        made = gpu_device.Device("cpu")
        made.is_cuda = True

        def watched() -> None:
            self.busy += 1

        made.while_busy = watched
        return made


def test_device_clocks(monkeypatch):
    fake = FakeCuda(monkeypatch)
    device, calls = fake.device(), [lambda: fake.wait(2.0)]
    assert device.seconds(calls, 5) == pytest.approx(2e-3)
    assert device.cold_seconds(calls, 5) == pytest.approx(2e-3)  # the flush is not on the clock
    assert fake.busy == 2
    assert device.host_seconds(calls, 5) < 1e-3


def test_graphs_are_captured_behind_a_warm_up_on_a_side_stream(monkeypatch):
    fake, log = FakeCuda(monkeypatch), []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            log.append("wait")

    class Graph:
        def replay(self) -> None:
            fake.wait(2.0 * 20)

    @contextmanager
    def capture(graph: Any):
        log.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    device = fake.device()
    capture_of = device.graphed(GRAPH)
    assert capture_of is not None
    replay = capture_of([lambda: log.append("call")] * 3)
    assert log == ["wait"] + ["call"] * 3 + ["wait", "capture"] + ["call"] * 20
    assert device.clock(GRAPH)([replay], 4) == pytest.approx(2e-3)
    assert device.graphed(FORWARD) is None and len(replay.calls) == 3


def measured(case: GpuCase, chosen: list[GpuArm], excused: dict[str, str] | None = None) -> dict[str, Any]:
    return gpu_rows.measure(
        case, chosen, gpu_device.Device("cpu"), gpu_device.Sensors(), rounds=1, excused=excused or {}
    )


def test_a_row_has_figures_or_reasons():
    def raises(case: GpuCase, t: Any) -> Any:
        raise ImportError("no such peer\nand more lines")

    def wrong(case: GpuCase, t: Any) -> Any:
        return lambda: 2 * scaled_dot_product_attention(t.q, t.k, t.v, is_causal=case.causal)

    def dies(case: GpuCase, t: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ours = arms("torch")[0]
    peers = [GpuArm(f.__name__, f.__name__, (FORWARD,), f) for f in (raises, wrong)]
    row = json.loads(json.dumps(measured(CAUSAL, [ours, MATH, *peers], {"math": "hung"})))
    assert set(row["arms"]) == {OURS} and row["arms"][OURS]["median_s"] > 0 and row["sets"] == 3
    assert row["absent"]["math"] == "hung" and row["absent"]["raises"] == "ImportError: no such peer"
    assert row["absent"]["wrong"].startswith("wrong: error") and not gpu_rows.is_mismatch(row)
    assert gpu_rows.is_mismatch(measured(CAUSAL, [replace(ours, prepare=wrong)]))
    with pytest.raises(gpu_rows.DeviceLost, match=r"^dies: RuntimeError: CUDA error"):
        measured(CAUSAL, [ours, GpuArm("dies", "dies", (FORWARD,), dies)])


FAKE_KERNELS = """
import os, sys, time
import torch

def tutorial(q, k, v, causal):
    print("libraries print here", flush=True)
    if causal:
        time.sleep(100)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)

def single_loop(q, k, v, causal):
    if causal:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    sys.stderr.write("last words\\n")
    sys.stderr.flush()
    os._exit(3)
"""


def test_children_answer_hang_die_and_are_replaced(tmp_path, monkeypatch):
    (tmp_path / "fake_kernels.py").write_text(FAKE_KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    named = {arm.name: arm for arm in arms("torch")}
    full = gpu_arms.tiny()[0]
    settings = "cpu", "torch", [], "fake_kernels"
    heard: dict[tuple[str, bool], dict[str, Any]] = {}
    children = Children(1, settings, patience=3.0)
    order = [("tutorial", full), ("flag", CAUSAL), ("tutorial", CAUSAL), ("flag", full), (OURS, CAUSAL)]
    tasks = [Task(named[name], case) for name, case in order]
    began = time.monotonic()
    try:
        children.tried(
            tasks, lambda t, a: heard.__setitem__((t.arm.name, t.case.causal), a), until=began + 100
        )
    finally:
        children.close()
    assert heard["tutorial", False]["error"] < 1e-5 and heard[OURS, True]["error"] < 1e-5
    assert "illegal memory access" in heard["flag", True]["reason"]
    assert heard["tutorial", True]["reason"] == "hung: no answer in 3 s"
    assert heard["flag", False]["reason"] == "its process ended with code 3: last words"


def test_no_task_begins_after_the_end_of_its_wave():
    heard: list[Any] = []
    Children(1, ()).tried([Task(MATH, CAUSAL)], lambda t, a: heard.append(a), until=time.monotonic() - 1)
    assert heard == []


def test_peers_that_compile_once_share_a_trial():
    named = {arm.name: arm for arm in arms("torch")}
    short, long = (GpuCase(FORWARD, "t", 0, "bfloat16", 1, 2, 2, n, n, 64) for n in (1024, 2048))
    first = Task(named["tutorial"], short)
    assert first.kernel == Task(named["tutorial"], long).kernel
    assert first.kernel != Task(named["tutorial"], replace(long, causal=True)).kernel
    assert Task(named[OURS], short).kernel != Task(named[OURS], long).kernel


DYING = """
import os, pathlib, time
import torch

DEATHS = pathlib.Path(__file__).with_name("deaths")

def tutorial(q, k, v, causal):
    before = len(DEATHS.read_text()) if DEATHS.exists() else 0
    if causal and before < LEAST:
        DEATHS.write_text("x" * (before + 1))
        END
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
"""


@pytest.mark.parametrize(
    ("deaths", "end", "starts", "reason"),
    [pytest.param(0, "", 1, "", marks=pytest.mark.slow), (1, "os._exit(3)", 2, "code 3"),
     (9, "os._exit(3)", 2, "code 3"),
     pytest.param(1, "time.sleep(100)", 2, "hung: no answer in 6 s", marks=pytest.mark.slow),
     (1, "raise RuntimeError('CUDA error: lost')", 2, "RuntimeError: CUDA error: lost")],
)  # fmt: skip
def test_the_suite_goes_on_behind_a_process_that_ended(tmp_path, monkeypatch, deaths, end, starts, reason):
    """Which is started anew; a row that two of them did not survive is left out."""
    monkeypatch.setenv(*ONE_THREAD)
    source = DYING.replace("LEAST", str(deaths)).replace("END", end or "pass")
    (tmp_path / f"dying_{tmp_path.name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu_arms, "KERNELS", f"dying_{tmp_path.name}")
    monkeypatch.setattr(gpu, "_SILENCE", 6.0)
    asked = words(tmp_path, "--arms", "polyflash,tutorial", "--parts", "forward", "--workers", "0")
    assert gpu.main(asked) == 0
    found = gpu.read(tmp_path / "rows.jsonl")
    full, causal = found["rows"]
    assert OURS in full["arms"] and "tutorial" in full["arms"] and len(found["runs"]) == starts
    assert all(reason in x["reason"] and x["name"] == causal["name"] for x in found["losts"])
    assert len(found["losts"]) == min(deaths, 2)
    told = causal["absent"].get(OURS if deaths == 9 else "tutorial", "")
    if deaths == 9:
        assert told == "the process ended 2 times during this row" and not causal["arms"]
    elif end.startswith("raise"):  # it is known who took the device along
        assert told == "RuntimeError: CUDA error: lost" and OURS in causal["arms"]
    else:
        assert OURS in causal["arms"] and "tutorial" in causal["arms"] and not told


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    file = tmp_path / "rows.jsonl"
    first, again = ({"kind": "row", "name": "a", "x": x} for x in (1, 2))
    tried = {"kind": "tried", "arm": "flex", "name": "b", "answer": {"reason": "hung"}}
    lines = [json.dumps(x) for x in (first, tried, again)]
    file.write_text("\n".join([*lines, lines[0][:-5]]))
    found = gpu.read(file)
    assert [r["x"] for r in found["rows"]] == [2]
    assert found["tried"] == {("flex", "b"): {"reason": "hung"}}


def words(tmp_path: Path, *more: str) -> list[str]:
    plain = ["--device", "cpu", "--backend", "torch", "--tiny", "--rounds", "1"]
    return [*plain, "--json", str(tmp_path / "rows.jsonl"), *more]


def run(tmp_path: Path, *more: str) -> Any:
    environment = dict([*os.environ.items(), ("PYTHONPATH", str(ROOT / "src")), ONE_THREAD])
    return processes.begun(["-m", "benchmarks.gpu", *words(tmp_path, *more)], env=environment, cwd=ROOT)


def test_one_command_measures_resumes_and_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(*ONE_THREAD)
    page, file = tmp_path / "2026-01-02-cpu.md", tmp_path / "rows.jsonl"
    asked = words(tmp_path, "--arms", "polyflash,math", "--parts", "forward", "--workers", "0")
    assert gpu.main(asked) == 0
    before = gpu.read(file)["rows"]
    kept = [x for x in file.read_text().splitlines() if not ('"row"' in x and "forward-causal" in x)]
    file.write_text("\n".join(kept) + "\n")
    page.write_text("# an older page\n\n## What the tables do not show\n\nThis stays.\n")
    capsys.readouterr()
    asked = words(tmp_path, "--arms", "polyflash,math", "--workers", "1", "--resume", "--page", str(page))
    assert gpu.main(asked) == 0
    said = capsys.readouterr().out
    assert "\nforward-full" not in "\n" + said and "forward-causal" in said
    content = gpu.read(file)
    assert content["rows"][0] == before[0] and content["rows"][1] != before[1]
    assert all(r["on"][OURS].startswith("torch/") for r in content["rows"])
    assert {r["case"]["part"] for r in content["rows"]} == {FORWARD, BACKWARD, DECODE, GRAPH, HOST}
    assert all({OURS, "math"} <= set(r["arms"]) for r in content["rows"])
    assert content["ends"] and len(content["runs"]) == 2
    text = page.read_text()
    assert "### tiny backward" in text and text.endswith("## What the tables do not show\n\nThis stays.\n")
    assert "python -m benchmarks.gpu --device cpu" in text and str(ROOT) not in text


def test_no_device_is_an_answer(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = run(tmp_path, "--device", "cuda", "--budget", "60")
    assert done.returncode == 1 and "no CUDA device" in done.stderr and "Traceback" not in done.stderr


def row(case: GpuCase, seconds: dict[str, float], absent: dict[str, str] | None = None) -> dict[str, Any]:
    figures = {n: {"median_s": s, "iqr_s": s / 100, "calls": 20, "samples": [s]} for n, s in seconds.items()}
    about = gpu_rows.left_out(case, "")
    return {**about, "arms": figures, "absent": absent or {}, "errors": {OURS: 1e-3}}


def content() -> dict[str, Any]:
    paper = GpuCase(FORWARD, "forward", 0, "bfloat16", 2, 16, 16, 8192, 8192, 128)
    step = GpuCase(DECODE, "decode", 0, "bfloat16", 64, 32, 8, 1, 8192, 128)
    rows = [
        row(paper, {OURS: 4.4e-3, "flash": 6.6e-3, "cudnn": 3.3e-3}, {"flex": "hung: no answer in 60 s"}),
        row(
            replace(paper, causal=True), {OURS: 4.4e-3, "flash": 2.2e-3}, {"flex": "hung: no answer in 60 s"}
        ),
        row(step, {OURS: step.key_bytes / 3.6e12, "flash": step.key_bytes / 1.8e12}),
        row(replace(step, batch=4), {"flash": 1e-3}, {OURS: "wrong: error 1.0, at most 0.01"}),
        row(GpuCase(GRAPH, "graph", 0, "bfloat16", 1, 8, 8, 1, 1024, 128), {OURS: 11.5e-6}),
    ]
    run = {"machine": {}, "ceilings": {"matmul_tflops": 800.0, "copy_gbs": 4500.0},
           "command": "python -m benchmarks.gpu", "titles": {"flash": "SDPA flash"}}  # fmt: skip
    return {
        "runs": [run],
        "ends": [],
        "losts": [{"arm": "flag", "name": "a", "reason": "gone"}],
        "rows": rows,
        "tried": {},
    }


def test_tables_and_summary():
    found = content()
    full, causal, step, *_ = found["rows"]
    assert gpu_page.rate(full, OURS) == pytest.approx(4 * 2 * 16 * 8192**2 * 128 / 4.4e-3 / 1e12)
    assert gpu_page.ratio(full, "flash") == pytest.approx(1.5) and gpu_page.best_peer(full) == "cudnn"
    assert gpu_page.rate(step, OURS) == pytest.approx(3600)
    lines = gpu_page.summary(found)
    name = causal["name"]
    assert f"forward: 1 of 2 rows at least as quick as flash; median 1.00, lowest 0.50 ({name})" in lines
    assert any("median 80% of the copy's 4500 GB/s, lowest 80%" in x for x in lines)
    assert any("11.5 µs" in x for x in lines) and any("ours: wrong: error 1.0" in x for x in lines)
    assert "a: device lost by flag: gone" in lines
    text = "\n".join(gpu_page.markdown(found, "page"))
    line = next(x for x in text.splitlines() if x.startswith("| full, 8192 keys, 2×16 heads, d128 |"))
    cells = [c.strip() for c in line.split("|")[1:-1]]
    assert cells[1:4] == ["250", "1%", "31%"] and cells[6] == "0.75", cells
    assert "- flex: hung: no answer in 60 s (" in text and "SDPA flash" in text
    assert text.count("hung: no answer") == 1


def test_pictures_if_matplotlib_is_here(tmp_path):
    gpu_page.write(content(), tmp_path / "page.md")
    drawn = {x.name for x in tmp_path.glob("*.png")}
    here = importlib.util.find_spec("matplotlib") is not None
    assert drawn == ({"page-forward.png", "page-decode.png"} if here else set())
    assert all(f"]({name})" in (tmp_path / "page.md").read_text() for name in drawn)


def test_an_empty_file_makes_a_page(tmp_path):
    gpu_page.write(gpu.read(tmp_path / "none"), tmp_path / "page.md")
    assert "0 rows" in (tmp_path / "page.md").read_text()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="wants triton")
def test_peer_kernels_are_right_in_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    code = (
        "import torch; from benchmarks.gpu import kernels as g\n"
        "for causal in (False, True):\n"
        "    q, k, v = (torch.randn(2, 2, 48, 32) for _ in range(3))\n"
        "    w = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)\n"
        "    for f in (g.tutorial, g.single_loop):\n"
        "        print(float((f(q, k, v, causal)() - w).norm() / w.norm()))\n"
        "print(len(g.tutorial_grid(128, False)), len(g.tutorial_grid(64, True)))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = processes.begun(["-c", code], env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *errors, counts = done.stdout.splitlines()
    assert len(errors) == 4 and all(float(x) < 1e-5 for x in errors)
    assert counts == "21 12"


def test_checks_run_here_or_are_skipped_with_a_reason():
    script = str(ROOT / "scripts" / "gpu_check.py")
    command = [script, "--device", "cpu", "--backend", "torch", "--quick", "far-gradients", "graph"]
    done = processes.begun(command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stdout + done.stderr
    assert {x.split()[0] + " " + x.split()[1] for x in done.stdout.splitlines()} == {
        "ok far-gradients",
        "skip graph",
    }
