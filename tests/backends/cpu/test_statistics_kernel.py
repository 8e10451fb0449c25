"""The CPU's statistics of weights: narrower instruction sets, tiles, ranges, and what it may write."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from polyflash import column_sums, row_stats, target
from polyflash.backends.cpu import configs, statistics, statistics_configs, words
from polyflash.backends.cpu.configs import Config
from polyflash.reference import attention_reference
from polyflash.spec import Arguments
from tests.backends.cpu import keys as every
from tests.backends.cpu.test_isas import CASES, HERE, LINUX, randn
from tests.references import statistics_reference
from tests.rows_here import needs_cpu_engine

TARGETS = [target.parse("cpu:avx512+avx512_bf16"), *target.KNOWN[:4]]


def both(q, k, lse, **options):
    sums = column_sums(q, k, lse, backend="cpu", **{n: x for n, x in options.items() if n != "sinks"})
    return sums, *row_stats(q, k, lse, backend="cpu", **options)


@needs_cpu_engine
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isa, dtype", [("avx2", "float32"), ("generic", "bfloat16")])
def test_narrower_sets_run_here(isa, dtype, case):
    if isa not in configs._RUNS[HERE]:
        pytest.skip(f"{HERE} does not run {isa}")
    kind = getattr(torch, dtype)
    q, k = randn(2, 6, 77, 59).to(kind), randn(2, 2, 131, 59, seed=1).to(kind)
    lse = attention_reference(q, k, k, **CASES[case]).lse.float()
    got = both(q, k, lse, config=Config(64, 4, isa=isa), **CASES[case])
    for x, want in zip(got, statistics_reference(q, k, **CASES[case]), strict=True):
        torch.testing.assert_close(x.double(), want, atol=4e-5, rtol=4e-5)


@needs_cpu_engine
@pytest.mark.parametrize("rows", (5, 150))
def test_tiles_change_rounding_alone(rows):
    """Any block and any number of panels to a span."""
    q, k = randn(1, 2, rows, 32), randn(1, 2, 300, 32, seed=1)
    lse = attention_reference(q, k, k, causal=True).lse.float()
    want = both(q, k, lse, causal=True)
    for block_n, panels in ((16, 1), (48, 2), (256, 8)):
        config = Config(block_n, panels, isa=configs._RUNS[HERE][0])
        for x, y in zip(both(q, k, lse, causal=True, config=config), want, strict=True):
            torch.testing.assert_close(x, y, atol=5e-6, rtol=2e-6)


@needs_cpu_engine
def test_nothing_is_written_beyond_the_results():
    """Through the row itself, whose results lie in the middle of larger tensors."""
    for rows, keys in ((1, 1), (17, 33), (65, 129), (600, 21)):
        q, k = randn(1, 2, rows, 24), randn(1, 2, keys, 24, seed=1)
        lse = attention_reference(q, k, k).lse.float()
        wanted = both(q, k, lse)
        margin = 64
        places = [torch.full((x.numel() + 2 * margin,), 7.25) for x in wanted]
        views = [p[margin:-margin].view(x.shape) for p, x in zip(places, wanted, strict=True)]
        launch = _launch(q, k)
        statistics.run(launch, q, k, lse, (views[0], None, None), Arguments())
        statistics.run(launch, q, k, lse, (None, views[1], views[2]), Arguments())
        for place, view, want in zip(places, views, wanted, strict=True):
            assert torch.equal(view, want)
            assert (place[:margin] == 7.25).all() and (place[-margin:] == 7.25).all()


def _launch(q, k):
    from polyflash import backends, plan, torch_ops
    from polyflash.spec import Phase

    spec = torch_ops.spec_of(q, k, k, Arguments(), phase=Phase.STATISTICS)
    return plan.select(spec, target.detect("cpu"), backends.TABLE, backend="cpu", config="")


@needs_cpu_engine
def test_sums_end_with_the_keys(monkeypatch: pytest.MonkeyPatch):
    """The last block of keys overhangs its head's sums: what lies there may be another thread's. -0 would
    become 0 if anything were added."""
    places = []

    def zeros(copies: int, like: torch.Tensor) -> torch.Tensor:
        places.append(torch.full((copies * like.numel() + 64,), -0.0))
        place = places[-1][: copies * like.numel()]
        return place.zero_().view(copies, *like.shape)

    monkeypatch.setattr(statistics, "_zeros", zeros)
    for rows, keys in ((1, 1), (17, 33), (40, 129), (600, 50)):
        q, k = randn(1, 1, rows, 24), randn(1, 1, keys, 24, seed=1)
        column_sums(q, k, attention_reference(q, k, k).lse.float(), backend="cpu")
        assert torch.signbit(places[-1][-64:]).all()
    assert len(places) == 4


@needs_cpu_engine
def test_neighbours_of_a_packed_member_keep_their_sums():
    """A member's last block of keys overhangs into the next one's."""
    cu = torch.tensor([0, 3, 6, 9], dtype=torch.int32), torch.tensor([0, 17, 18, 50], dtype=torch.int32)
    q, k = randn(9, 1, 8), randn(50, 1, 8, seed=1)
    sums, lses = [], []
    for b in range(3):
        rows, keys = (slice(int(c[b]), int(c[b + 1])) for c in cu)
        one_q, one_k = q[None, rows], k[None, keys]
        sums.append(statistics_reference(one_q, one_k, layout="bshd")[0][0])
        lses.append(attention_reference(one_q, one_k, one_k, layout="bshd").lse[0])
    lse = torch.cat(lses, -1).float()
    got = column_sums(q, k, lse, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], backend="cpu")
    torch.testing.assert_close(got.double(), torch.cat(sums, -1), atol=1e-5, rtol=1e-5)


@needs_cpu_engine
def test_a_foreign_lse_gives_numbers():
    """Weights far above 1 or far below: nothing is NaN."""
    q, k = randn(1, 1, 20, 8), randn(1, 1, 30, 8, seed=1)
    for value in (-1e5, 1e5):
        for x in both(q, k, torch.full((1, 1, 20), value)):
            assert not x.isnan().any()


def test_ranges_cover_every_row_once():
    for lens in ([0], [1], [512], [513, 0, 9000], [100_000, 3]):
        for panel_rows in (16, 24, 64):
            entries, copies = statistics_configs.ranges(np.array(lens), panel_rows)
            assert copies <= statistics_configs.MOST_RANGES and entries.dtype == np.int32
            for b, rows in enumerate(lens):
                own = entries[entries[:, 0] == b]
                own = own[np.argsort(own[:, 1])]
                assert own[:, 3].tolist() == list(range(len(own)))
                bounds = [0, *own[:, 2].tolist()]
                assert own[:, 1].tolist() == bounds[:-1] and bounds[-1] == rows
                assert all(n % panel_rows == 0 for n in own[:, 1].tolist())


@pytest.mark.parametrize("known", TARGETS, ids=lambda t: t.name)
def test_keys_and_scratch(known):
    """Every kernel a plan can ask for is listed, and its tiles are apart."""
    keys = list(every.statistics(known))
    assert len(set(keys)) == len(keys) == len({k.name for k in keys})
    assert not {k.name for k in keys} & {k.name for k in every.forward(known)}
    for key in keys:
        assert re.fullmatch(r"statistics_[a-z0-9_]+", key.name)
        tiles = statistics_configs.scratch(key, 8, 128)
        assert tiles.total % 4096 == 0 and all(at % configs.LINE == 0 for at in tiles)
        assert tiles.s - tiles.v >= 128 * key.lanes * 4
        assert tiles.limits - tiles.stats >= 8 * key.panel_rows * 16


def test_words_follow_those_of_the_forward():
    """As functions are shared that know those of the forward alone; and no name stands for two words."""
    for layout in (words.BACKWARD, words.STATISTICS, words.DECODE):
        assert layout.begins_as(words.FORWARD) and not words.FORWARD.begins_as(layout)
        numbers = [n for n in vars(layout).values() if isinstance(n, int)]
        assert len(numbers) + len(set(layout.tiles.values())) == len(layout.words)
    assert words.BACKWARD_ITEM.begins_as(words.ITEM)


@pytest.mark.parametrize(
    "isa, triple, cpu",
    [
        ("neon", "aarch64-unknown-linux-gnu", "neoverse-n1"),
        ("avx2", LINUX, "haswell"),
        ("generic", LINUX, "x86-64"),
    ],
)
def test_no_stage_calls_a_library(isa, triple, cpu):
    llvm = pytest.importorskip("llvmlite.binding")
    from llvmlite import ir

    from polyflash.backends.cpu import intrinsics, statistics_blocks

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    key = statistics_configs.StatisticsKey(isa, "f32", "bfloat16", max(configs.ISAS[isa].group_keys), 64)
    for name, arity, emit, returns in intrinsics.emissions(statistics_blocks.StatisticsTile(key)):
        intrinsics.function_in(module, name, arity, emit, isa, returns).linkage = "external"
    parsed = llvm.parse_assembly(str(module))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    lines = [x.strip() for x in machine.emit_assembly(parsed).splitlines()]
    assert not [x for x in lines if re.match(r"(bl|callq?)\s", x) and "get_pc" not in x]
    assert len(lines) > 300
