"""Keys, scratch and partitions of the CPU forward engine: arithmetic that needs no compiler."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from polyflash.backends.cpu import capabilities, configs, decode_configs, packing
from polyflash.backends.cpu.configs import BUCKETS, Config, KernelKey
from polyflash.errors import SpecError
from polyflash.spec import MANY_KEYS, AttentionSpec, Feature, Phase
from polyflash.target import parse
from tests import processes
from tests.backends.cpu import keys as every
from tests.chosen import of_each

WITH_DOT, WITHOUT_DOT = parse("cpu:avx512+avx512_bf16"), parse("cpu:avx512")
TARGETS = (WITH_DOT, WITHOUT_DOT, parse("cpu:avx2"), parse("cpu:neon"), parse("cpu:generic"))


def spec_of(dtype: str = "float32", seqlen: int = 2048, head_dim: int = 64) -> AttentionSpec:
    return AttentionSpec(
        Phase.FORWARD, dtype, "cpu", 1, 8, 8, seqlen, seqlen, head_dim, head_dim, frozenset()
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_keys_are_few_distinct_and_named_apart(target):
    keys = list(every.forward(target))
    assert 0 < len(keys) <= 64
    assert len(set(keys)) == len({key.name for key in keys}) == len(keys)


def test_bfloat16_dot_only_where_the_target_has_it():
    with_dot, without = (
        [k for k in every.forward(t) if isinstance(k, KernelKey)] for t in (WITH_DOT, WITHOUT_DOT)
    )
    assert {k.compute for k in with_dot if k.storage == "bfloat16"} == {"bf16dot"}
    assert {k.compute for k in without} == {"f32"}
    with pytest.raises(SpecError):
        KernelKey("avx512", "bf16dot", "float16", 4, 64)
    with pytest.raises(SpecError):
        KernelKey("avx2", "bf16dot", "bfloat16", 3, 64)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_scratch_stays_below_two_megabytes(target):
    for key in every.forward(target):
        if not isinstance(key, KernelKey):
            continue
        config = configs.choose(spec_of(head_dim=key.bucket), target)
        for group in (1, 2, 3, 5, 7, 8, 12, 64, 71):
            for rows in (1, 17, 333, 1 << 20):
                cut = configs.partition(2, 1, group, rows, key.panel_rows, config.panels, 2)
                tiles = configs.scratch(key, cut.heads, cut.row_panels, config.block_n)
                assert cut.heads * cut.row_panels <= config.panels
                assert tiles.total <= 2 << 20
                assert all(offset % 64 == 0 for offset in tiles)


@of_each(product((1, 2, 3, 5, 7, 8, 12, 71), (1, 63, 64, 65, 257, 5000), (1, 2, 7, 64)))
def test_a_partition_covers_every_row_of_every_head_once(sizes):
    group, rows, threads = sizes
    cut = configs.partition(3, 2, group, rows, 64, 4, threads)
    panels = -(-rows // 64)
    assert cut.items == 3 * 2 * cut.chunks * cut.row_blocks
    assert (cut.chunks - 1) * cut.heads < group <= cut.chunks * cut.heads
    assert (cut.row_blocks - 1) * cut.row_panels < panels <= cut.row_blocks * cut.row_panels


def test_more_threads_never_make_fewer_items():
    items = [configs.partition(1, 1, 4, 512, 64, 4, threads).items for threads in (1, 2, 4, 8, 64)]
    assert items == sorted(items)
    assert items[-1] > items[0]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512, 576])
def test_key_blocks_do_not_depend_on_lengths(target, head_dim):
    """A chunk of one row and a prefill cut a row's sums at the same keys: batch invariance."""
    for dtype in configs.STORAGE_BYTES:
        specs = [spec_of(dtype, seqlen, head_dim) for seqlen in (1, 16, 17, 33, 4096)]
        assert len({configs.choose(spec, target).block_n for spec in specs}) == 1


def test_configs_prove_themselves():
    for block_n, panels in ((64.0, 4), (64, "4"), (64, True), (0, 4), (24, 4), (512, 4), (128, 0), (128, 65)):
        with pytest.raises(SpecError):
            Config(block_n, panels)
    with pytest.raises(SpecError):
        Config(128, 4, isa="mmx")
    for target in TARGETS:
        for bucket in BUCKETS:
            spec = spec_of(head_dim=bucket)
            assert isinstance(configs.choose(spec, target), Config)
            assert configs.choose(spec, target) in configs.candidates(spec, target)
    with pytest.raises(SpecError):
        Config(128, 4, "int8")


def test_a_plan_says_what_bfloat16_becomes():
    spec = spec_of("bfloat16")
    assert any("avx512_bf16" in note for note in configs.choose(spec, WITH_DOT).notes(spec))
    assert any("converted to float32" in note for note in configs.choose(spec, WITHOUT_DOT).notes(spec))


def test_the_row_yields_bfloat16_to_amx():
    row = next(r for r in capabilities.CAPABILITIES if r.phase is Phase.FORWARD)
    amx = parse("cpu:avx512+avx512_bf16+amx_bf16")
    assert row.accepts(spec_of("float32"), amx, by_name=False)
    assert not row.accepts(spec_of("bfloat16"), amx, by_name=False)
    assert row.accepts(spec_of("bfloat16"), amx, by_name=True)
    assert row.accepts(spec_of("bfloat16"), WITH_DOT, by_name=False)
    few, enough = (replace(spec_of("bfloat16"), seqlen_k=n) for n in (MANY_KEYS - 1, MANY_KEYS))
    assert row.accepts(few, amx, by_name=False) and not row.accepts(enough, amx, by_name=False)
    masked = replace(spec_of("bfloat16"), features=frozenset({Feature.MASK}))
    assert row.accepts(masked, amx, by_name=False)  # torch's AMX kernel would not get it either


def test_tables_and_launcher_import_no_compiler():
    code = (
        "import sys; import polyflash.backends.cpu.configs, polyflash.backends.cpu.capabilities;"
        "import polyflash.backends.cpu.forward, polyflash.backends.cpu.backward;"
        "assert not {'numba', 'llvmlite.ir'} & set(sys.modules), sorted(sys.modules)"
    )
    done = processes.begun(["-c", code])
    assert done.returncode == 0, done.stderr


def test_a_config_of_another_instruction_set_runs_only_where_it_can():
    spec = spec_of()
    configs.check_fits(Config(64, 4, isa="avx2"), spec, WITH_DOT)
    for config, target in (
        (Config(64, 4, isa="avx512"), parse("cpu:avx2")),
        (Config(64, 4, isa="neon"), WITH_DOT),
        (Config(64, 4, "bf16dot", "avx512"), WITH_DOT),
    ):
        with pytest.raises(SpecError):
            configs.check_fits(config, spec, target)


def test_the_table_of_packed_members_names_every_row_once_the_most_work_first():
    lens_q, lens_k = np.array([0, 5, 200, 64, 1]), np.array([7, 5, 300, 0, 9])
    for causal in (False, True):
        table = packing.member_table(lens_q, lens_k, 64, 3, causal=causal)
        rows = sorted((b, row) for b, begin, end in table.tolist() for row in range(begin, end))
        assert rows == [(b, row) for b, n in enumerate(lens_q) for row in range(n)]
        assert table[0].tolist() == [2, 0, 128]
        assert all(end - begin <= 3 * 64 and begin % 64 == 0 for _, begin, end in table.tolist())


def test_narrow_panels_for_short_members():
    def width(*lengths: int, causal: bool = False) -> int:
        lens = np.array(lengths)
        return packing.pack_members(spec_of(), Config(128, 8), lens, lens, 2, causal=causal)[0]

    assert width(*[16] * 40) == 1
    assert width(*[1024] * 40) == 4
    assert width(*[512] * 40) == 4 and width(*[512] * 40, causal=True) == 2  # the diagonal is cut finer


def test_blocks_of_wide_keys_of_8_bits_are_shorter_where_that_is_quicker():
    """It decides bits, as weights are rounded block by block: all calls of that width have it."""
    int8, mixed, amx = "int8/1x0*int8,int8/1x0*int8", "int8/1x0,int4/1x0", "cpu:avx512+avx512_bf16+amx_bf16"
    for head_dim, codes, short in (
        (128, int8, True),
        (192, int8, True),
        (64, int8, False),
        (128, mixed, False),
    ):
        for seqlen_q, seqlen_k in ((1, 100), (4, 70_000)):
            sizes = 1, 8, 8, seqlen_q, seqlen_k, head_dim, head_dim, frozenset()
            spec = AttentionSpec(Phase.DECODE, "bfloat16", "cpu", *sizes, codes=codes)
            assert decode_configs.choose(spec, WITH_DOT).block_n == (64 if short else 128)
            assert decode_configs.choose(replace(spec, dtype="float32"), WITH_DOT).block_n == 128
            for target in (parse(amx), *TARGETS[1:]):
                assert decode_configs.choose(spec, target).block_n == 128
