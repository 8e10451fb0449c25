"""Choices of the Triton engine: pure, fitting, and none that no problem reaches."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from types import CodeType
from typing import Any

import pytest

from polyflash.backends.gpu.launch import UNSPLIT
from polyflash.backends.triton import configs, tables, tiles
from polyflash.backends.triton.configs import (
    BackwardConfig,
    DecodeConfig,
    ForwardConfig,
    StatisticsConfig,
)
from polyflash.backends.triton.tables import Tile
from polyflash.errors import SpecError
from polyflash.spec import MANY_KEYS, MOST_POSITIONS, AttentionSpec, Feature, Phase, length_class
from polyflash.target import Target
from tests.chosen import of_each

DIMS = ((32, 32), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512))
KINDS = (frozenset(), frozenset({Feature.BIAS}))
PLAIN = AttentionSpec(Phase.FORWARD, "bfloat16", "cuda", 1, 8, 8, 2048, 2048, 128, 128, frozenset())


def gpu(arch: str, **given: Any) -> Target:
    return Target(f"{'cuda' if arch.startswith('sm') else 'hip'}:{arch}", cores=132, **given)


GPUS = tuple(map(gpu, tables.ARCHS))
UNKNOWN = (
    gpu("sm75", shared_bytes=64 << 10),
    gpu("sm70", shared_bytes=96 << 10),
    gpu("sm60"),
    gpu("gfx900"),
)
INTERPRETER = Target("cpu:avx512", cores=8)
H200 = gpu("sm90")


def problems() -> Iterator[tuple[AttentionSpec, Target]]:
    """The shape grid: every architecture, dtype, head dim and weight; and on a few of them lengths, groups,
    heads and features on both sides of each threshold."""
    for target, dtype, (d, dv), kind, rows, phase in itertools.product(
        (*GPUS, *UNKNOWN, INTERPRETER), ("bfloat16", "float32"), DIMS, KINDS, (1, 2048, 4096), Phase
    ):
        yield (
            replace(PLAIN, phase=phase, dtype=dtype, head_dim=d, head_dim_v=dv, features=kind, seqlen_q=rows),
            target,
        )
    found = (frozenset(), *(frozenset({f}) for f in (Feature.VARLEN, Feature.INTERVALS)))
    for target, rows, keys, heads, kind, phase in itertools.product(
        (H200, gpu("gfx942")), (0, 1, 2, 16, 17, 32, 33), (MANY_KEYS - 1, MANY_KEYS),
        ((8, 8), (32, 8), (1, 1), (256, 256)), (*found, frozenset({Feature.BATCH_INVARIANT})), Phase,
    ):  # fmt: skip
        one = replace(PLAIN, phase=phase, num_q_heads=heads[0], num_kv_heads=heads[1], seqlen_q=rows)
        yield replace(one, seqlen_k=keys, features=kind, causal=rows > 1), target
    for longest in (None, 1, 40):
        packed = frozenset({Feature.VARLEN})
        yield replace(PLAIN, features=packed, members=4, max_seqlen_q=longest), H200
    for d in (600, 1024):  # beyond every class
        yield from ((replace(PLAIN, phase=p, head_dim=d, head_dim_v=d), H200) for p in Phase)


GRID = tuple(problems())


def tile_of(config: Any) -> Tile:
    return Tile(config.block_m, config.block_n, config.num_warps, config.num_stages)


def entry_of(spec: AttentionSpec, target: Target, table: dict) -> Any:
    """The entry that the problem's architecture, dtype and head dim name, found without `configs`."""
    arch = tables.ARCHS.get(target.arch)
    widest = max(spec.head_dim, spec.head_dim_v)
    heads = [c for c in tables.CLASSES if widest <= c]
    size = 4 if spec.dtype == "float32" else 2
    return table[arch.family, size][heads[0]] if arch and heads else None


@of_each((1, 2, 15, *range(16, 577)))
def test_a_head_dim_is_two_powers_of_two_with_little_padding(d: int):
    first, second = configs.split_dim(d)
    for n in filter(None, (first, second)):
        assert n >= 16 and n & (n - 1) == 0
    assert first >= second and d <= first + second
    assert first + second < max(2 * d, 33) and (second == 0) is (d <= first)


def test_head_dims_of_models_are_split_as_documented():
    wanted = {40: (32, 16), 64: (64, 0), 80: (64, 16), 96: (64, 32), 112: (64, 64), 160: (128, 32)}
    wanted |= {192: (128, 64), 256: (256, 0), 576: (512, 64), 512: (512, 0), 8: (16, 0)}
    assert {d: configs.split_dim(d) for d in wanted} == wanted
    with pytest.raises(SpecError, match="head_dim"):
        configs.split_dim(0)


class TestReachability:
    def test_every_forward_entry_is_chosen_whole_on_every_architecture_of_its_family(self):
        chosen = set()
        for spec, target in GRID:
            found = entry_of(spec, target, tables.FORWARD)
            if spec.phase is Phase.FORWARD and spec.seqlen_q == 2048 and found and not spec.members:
                want = found.heavy if Feature.BIAS in spec.features else found.plain
                config = configs.choose(spec, target)
                assert tile_of(config) == want, (target.name, spec.dtype, spec.head_dim, config)
                chosen.add((target.arch, spec.dtype, spec.head_dim, want is found.heavy))
        assert len(chosen) == len(tables.ARCHS) * 2 * len(DIMS) * 2

    def test_rows_are_held_for_the_problems_that_the_table_names_and_no_others(self):
        def held(spec: AttentionSpec, target: Target = H200) -> bool:
            return configs.choose(spec, target).hold_q

        for (family, size), found in tables.HELD.items():
            arch = next(a for a, known in tables.ARCHS.items() if known.family == family)
            dtype = next(n for n, bytes_ in tiles.ELEMENT_BYTES.items() if bytes_ == size)
            for head in tables.CLASSES:
                whole = replace(PLAIN, dtype=dtype, head_dim=head, head_dim_v=head)
                causal = replace(whole, features=frozenset({Feature.CAUSAL}), causal=True)
                assert held(whole, gpu(arch)) == (head in found.whole)
                assert held(causal, gpu(arch)) == (head in found.hiding)
                assert not held(replace(whole, features=frozenset({Feature.MASK})), gpu(arch))
                assert not held(replace(whole, seqlen_q=16), gpu(arch))  # another tile
            assert found.hiding | found.whole <= set(tables.CLASSES)
        assert not held(PLAIN, gpu("sm80"))
        narrow = replace(PLAIN, head_dim=64, head_dim_v=64)
        for version, holds in (("3.6.0", True), ("3.9.0", False)):
            assert held(narrow, gpu("sm90", packages=(("triton", version),))) is holds
            assert held(PLAIN, gpu("sm90", packages=(("triton", version),)))

    def test_what_is_deferred_is_what_the_table_names(self):
        for head in tables.CLASSES:
            spec = replace(PLAIN, head_dim=head, head_dim_v=head)
            for changed, wanted in (
                (spec, head in tables.DEFERRED["hopper", 2]),
                (replace(spec, seqlen_q=9000), head in tables.DEFERRED["hopper", 2]),
                (replace(spec, features=frozenset({Feature.MASK})), False),
                (replace(spec, features=frozenset({Feature.SOFTCAP})), False),
                (replace(spec, features=frozenset({Feature.ALIBI})), False),
                (replace(spec, dtype="float32"), False),
            ):
                chosen = configs.choose(changed, H200)
                assert chosen.lazy_rescale == chosen.late_sum == wanted
                assert any("grown by 2^8" in note for note in chosen.notes(changed)) == wanted
        assert not configs.choose(PLAIN, gpu("sm80")).late_sum

    def test_long_problems_and_no_others_have_the_tiles_of_long_ones(self):
        for (family, size), found in tables.LONG.items():
            arch = next(a for a, known in tables.ARCHS.items() if known.family == family)
            dtype = next(n for n, bytes_ in tiles.ELEMENT_BYTES.items() if bytes_ == size)
            for (head, hides), (least, tile) in found.items():
                hiding = {Feature.CAUSAL} if hides else set()
                spec = replace(PLAIN, dtype=dtype, head_dim=head, head_dim_v=head)
                spec = replace(spec, seqlen_q=least, seqlen_k=9000, features=frozenset(hiding))
                chosen = configs.choose(spec, gpu(arch))
                assert tile_of(chosen) == tile != tables.FORWARD[family, size][head].plain
                assert not chosen.hold_q
                for changed in (
                    replace(spec, seqlen_q=least - 1),
                    replace(spec, features=spec.features | {Feature.BATCH_INVARIANT}),
                    replace(spec, features=spec.features | {Feature.MASK}),
                    replace(spec, features=spec.features | {Feature.VARLEN}),  # of unknown lengths
                ):
                    assert tile_of(configs.choose(changed, gpu(arch))) != tile

    def test_every_backward_entry_is_chosen_whole_on_every_architecture_of_its_family(self):
        for spec, target in GRID:
            pair = entry_of(spec, target, tables.BACKWARD)
            if spec.phase is Phase.BACKWARD and pair and not spec.features:
                config = configs.choose(spec, target)
                dq = (config.dq_block_m, config.dq_block_n, config.dq_num_warps, config.dq_num_stages)
                least = tiles.least_stages(target)
                want = tuple(t._replace(num_stages=max(least, t.num_stages)) for t in pair[:2])
                assert (tile_of(config), dq) == want, (target.name, spec)

    def test_every_class_of_every_table_has_a_head_dim_in_the_grid(self):
        classes = {next(c for c in tables.CLASSES if max(dims) <= c) for dims in DIMS}
        assert classes == set(tables.CLASSES)
        for table in (tables.FORWARD, tables.BACKWARD, tables.DECODE):
            assert all(tuple(entries) == tables.CLASSES for entries in table.values())
        families = {arch.family for arch in tables.ARCHS.values()}
        assert {family for family, _ in tables.FORWARD} == {f for f, _ in tables.BACKWARD} == families

    def test_every_decode_entry_is_chosen_whole_somewhere(self):
        seen = set()
        for spec, target in GRID:
            if spec.phase is Phase.DECODE and target.kind != "cpu":
                config = configs.choose(spec, target)
                seen.add((target.kind, spec.dtype, config.block_n, config.num_warps, config.num_stages))
        for (kind, size), entries in tables.DECODE.items():
            for entry in entries.values():
                assert (kind, "float32" if size == 4 else "bfloat16", *entry) in seen

    def test_every_safe_tile_is_chosen(self):
        chosen = {tile_of(configs.choose(s, t)) for s, t in GRID if s.phase is Phase.FORWARD and t in UNKNOWN}
        whole = {t for t in chosen if t.block_m > 16}
        assert whole == set(tables.SAFE) - {tables.SAFE[-1]} and tables.SAFE[-1] in chosen

    def test_every_line_of_every_choice_runs_for_some_problem(self):
        """A branch that no problem takes is a gate that can never fire."""
        modules = {configs.__file__, tiles.__file__}
        ran: set[tuple[str, int]] = set()

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in modules:
                return None
            if event == "line":
                ran.add((frame.f_code.co_name, frame.f_lineno))
            return trace

        sys.settrace(trace)
        try:
            for spec, target in GRID:
                configs.choose(spec, target)
            cramped = gpu("sm90", shared_bytes=24 << 10)
            for phase in Phase:  # an entry cut in every way there is
                configs.choose(replace(PLAIN, phase=phase, dtype="float32"), cramped)
            for codes in ("int8/1x0,int8/1x0", "int4/64x1+64x1,int4/1x0+1x0"):
                coded = replace(PLAIN, phase=Phase.DECODE, seqlen_q=1, codes=codes)
                for target in (cramped, gpu("sm90")):
                    configs.choose(coded, target)
            configs.choose(replace(PLAIN, codes=",".join(["fp8_e4m3/0x0*fp8"] * 2)), gpu("sm90"))
        finally:
            sys.settrace(None)
        functions = [
            *(getattr(configs, f"choose_{name}") for name in ("forward", "decode", "backward", "statistics")),
            *(configs.most_rows, configs.packs, configs._filled, configs._narrowed, configs._forward_tile),
            *(configs._safe, configs._split_keys, tiles.fitted, tiles._smaller, tiles.fitted_backward),
            *(tiles.shared_bytes, tiles.backward_shared_bytes, tiles.shared_limit, tiles.entry_key),
            tiles.coded_tile,
        ]
        for function in functions:
            missing = sorted(lines_of(function.__code__) - {n for f, n in ran if f == function.__name__})
            assert not missing, f"{function.__name__}: lines {missing} run for no problem of the grid"


def lines_of(code: CodeType) -> set[int]:
    """Lines of a function that a trace reports, its own first line and docstring left out."""
    source, first = inspect.getsourcelines(code)
    assert source
    return {line for _, _, line in code.co_lines() if line is not None and line > first}


class TestThresholds:
    @pytest.mark.parametrize("low", tables.CLASSES[:-1])
    def test_a_head_dim_one_above_a_class_is_of_the_next(self, low: int):
        here, above = (replace(PLAIN, head_dim=d, head_dim_v=d) for d in (low, low + 1))
        assert tiles.entry_key(here, H200)[1] == low < tiles.entry_key(above, H200)[1]

    def test_beyond_the_last_class_the_safe_default_is_taken(self):
        last = replace(PLAIN, head_dim=576, head_dim_v=576)
        assert tiles.has_table(last, H200) and not tiles.has_table(replace(last, head_dim=577), H200)
        assert not tiles.has_table(PLAIN, UNKNOWN[0]) and not tiles.has_table(PLAIN, INTERPRETER)
        assert not tiles.has_table(replace(PLAIN, dtype="float64"), H200)

    @pytest.mark.parametrize(
        ("rows", "block_m"), ((1, 16), (2, 16), (16, 16), (17, 32), (32, 32), (33, 128), (2048, 128))
    )
    def test_few_rows_have_a_narrow_tile(self, rows: int, block_m: int):
        wide = replace(PLAIN, seqlen_q=rows, head_dim=192, head_dim_v=192)
        config = configs.choose(wide, H200)
        assert config.block_m == block_m and (config.num_warps == 4) is (rows <= 32)
        causal = replace(PLAIN, seqlen_q=rows, causal=True, features=frozenset({Feature.CAUSAL}))
        assert configs.choose(causal, H200).block_m == min(64, block_m)

    def test_blocks_come_by_descriptor_where_that_was_measured(self):
        paged = replace(PLAIN, features=PLAIN.features | {Feature.PAGED}, page_size=16)
        assert configs.choose(PLAIN, H200).loads == "descriptor"
        assert configs.choose(paged, H200).loads == "pointer"
        assert configs.choose(PLAIN, gpu("sm80")).loads == "pointer"

    @pytest.mark.parametrize(
        ("rows", "keys", "packed"),
        (
            (1, 4096, True),
            (32, 4096, True),
            (33, MANY_KEYS - 1, True),
            (33, MANY_KEYS, False),
            (4096, 4096, False),
        ),
    )
    def test_heads_are_packed_where_a_tile_of_one_is_badly_filled(self, rows: int, keys: int, packed: bool):
        grouped = replace(PLAIN, num_q_heads=32, seqlen_q=rows, seqlen_k=keys)
        assert configs.choose(grouped, H200).pack_gqa is packed
        assert not configs.choose(replace(grouped, num_q_heads=8), H200).pack_gqa

    def test_the_share_that_decides_is_nine_tenths(self):
        """32 rows fill 32/36 = 0.89 of a tile of 36, and 32/35 = 0.91 of one of 35; packed ones are full."""
        full = replace(PLAIN, num_kv_heads=1, seqlen_q=32)
        assert configs.packs(replace(full, num_q_heads=9), 36)
        assert not configs.packs(replace(full, num_q_heads=35), 35)

    def test_features_that_decide_packing_by_themselves(self):
        grouped = replace(PLAIN, num_q_heads=32)
        for feature, packed in (
            (Feature.VARLEN, True),
            (Feature.BATCH_INVARIANT, True),
            (Feature.ALIBI, False),
        ):
            assert configs.packs(replace(grouped, features=frozenset({feature})), 128) is packed
        lists = replace(grouped, seqlen_q=1, features=frozenset({Feature.INTERVALS}))
        assert not configs.packs(lists, 16)

    def test_order_follows_the_mask(self):
        assert configs.choose(replace(PLAIN, causal=True), H200).order == "heavy_first"
        assert configs.choose(PLAIN, H200).order == "plain"

    def test_a_table_entry_is_cut_to_what_the_device_has(self):
        causal = replace(PLAIN, causal=True, features=frozenset({Feature.CAUSAL}))
        whole = tile_of(configs.choose(causal, H200))
        need = tiles.shared_bytes(whole, causal, H200)
        assert tile_of(configs.choose(causal, gpu("sm90", shared_bytes=need))) == whole
        cut = tile_of(configs.choose(causal, gpu("sm90", shared_bytes=need - 1)))
        assert cut == whole._replace(num_stages=whole.num_stages - 1)


class TestPurity:
    @pytest.mark.parametrize("phase", Phase)
    @pytest.mark.parametrize("target", (H200, gpu("gfx942"), INTERPRETER), ids=lambda t: t.name)
    def test_a_choice_depends_on_what_a_route_knows_and_on_no_batch(self, phase: Phase, target: Target):
        """Otherwise the first call of a route would choose for all later ones."""
        lengths = (1, 2, 15, 16, 17, 32, 33, 1023, 1024, 4095, 4096, 8191, 8192, 16384)
        grouped = replace(PLAIN, phase=phase, num_q_heads=32, causal=True)
        found: dict[Any, set[Any]] = {}
        for rows, keys, batch in itertools.product(lengths, lengths, (1, 7, 512)):
            spec = replace(grouped, seqlen_q=rows, seqlen_k=keys, batch=batch)
            key = (length_class(rows), keys >= MANY_KEYS)
            found.setdefault(key, set()).add(configs.choose(spec, target))
        assert len(found) == 12 and all(len(each) == 1 for each in found.values())

    @pytest.mark.parametrize("phase", Phase)
    def test_with_batch_invariant_no_length_decides(self, phase: Phase):
        fixed = replace(PLAIN, phase=phase, num_q_heads=32, features=frozenset({Feature.BATCH_INVARIANT}))
        lengths = itertools.product((1, 16, 33, 4096), (1, 1023, 1024, 9999), (1, 64))
        specs = [replace(fixed, seqlen_q=m, seqlen_k=n, batch=b) for m, n, b in lengths]
        assert len({configs.choose(spec, H200) for spec in specs}) == 1

    def test_the_bound_on_rows_is_that_of_route_classes(self):
        bounds: dict[int, set[int]] = {}
        for n in (*range(1, 2000), 4095, 4096, 8191, 8192, 16384):
            bounds.setdefault(length_class(n), set()).add(configs.most_rows(replace(PLAIN, seqlen_q=n)))
        assert all(len(each) == 1 for each in bounds.values())
        assert {1: {1}, 2: {16}, 3: {32}, 4: {0}, 5: {0}, 6: {0}} == bounds


class TestSplits:
    @pytest.mark.parametrize(
        ("kv_heads", "keys"),
        ((1, 256), (8, 256), (32, 512), (33, 1024), (128, 2048), (264, 4096), (2048, 4096)),
    )
    def test_fewer_heads_have_smaller_splits(self, kv_heads: int, keys: int):
        spec = replace(PLAIN, phase=Phase.DECODE, seqlen_q=1, num_q_heads=kv_heads, num_kv_heads=kv_heads)
        assert configs.choose(spec, H200).split_keys == keys

    def test_more_rows_have_larger_splits_as_partial_outputs_are_written(self):
        spec = replace(PLAIN, phase=Phase.DECODE, seqlen_q=1, num_kv_heads=1)
        sizes = [configs.choose(replace(spec, num_q_heads=n), H200).split_keys for n in (16, 32, 64)]
        assert sizes == [256, 512, 1024]

    def test_float32_of_one_head_has_the_least_split(self):
        spec = replace(PLAIN, phase=Phase.DECODE, seqlen_q=1, num_q_heads=1, num_kv_heads=1, dtype="float32")
        assert configs.choose(spec, H200).split_keys == configs.LEAST_SPLIT

    def test_one_request_of_many_keys_fills_the_device(self):
        for kv_heads in (1, 2, 4, 8, 16, 64):
            spec = replace(PLAIN, phase=Phase.DECODE, seqlen_q=1, num_q_heads=kv_heads, num_kv_heads=kv_heads)
            config = configs.choose(spec, H200)
            size = config.split_size(kv_heads, 1 << 16, H200.cores)
            assert 0.9 * H200.cores < kv_heads * -(-(1 << 16) // size) <= H200.cores

    def test_launches_shrink_grow_or_keep_splits(self):
        config = DecodeConfig(16, 64, 4, 3, 256)
        assert config.split_size(8, 1 << 16, 132) == 4096  # 128 programs of equal walks
        assert config.split_size(8, 1 << 16, 132, True) == 512  # 4 a core and more, of walks of any length
        assert config.split_size(8, 8192, 132, True) == 256  # 256 programs
        assert config.split_size(8, 2048, 132, True) == 128  # 64 programs would leave half idle
        assert config.split_size(1, 2048, 132, True) == 128  # never below two blocks
        assert config.split_size(1, 2048, 132) == 64  # never below one
        assert config.split_size(512, 8192, 132) == 8192 // 2  # 4 programs a core are plenty
        assert config.split_size(4096, 8192, 132) == 8192
        turned = replace(config, block_m=8)
        assert turned.split_size(8, 2048, 528) == 64  # 32 parts
        assert turned.split_size(8, 4096, 528) == 128  # and no more of few blocks
        assert turned.split_size(8, 8192, 528) == 256
        assert turned.split_size(8, 1 << 15, 528) == turned.split_size(4, 1 << 15, 528) == 512
        assert turned.split_size(8, 1 << 17, 528) == 2048
        for heads, keys in ((1, 2048), (8, 8192), (4096, 8192), (1, 1 << 20)):
            assert replace(config, fixed_splits=True).split_size(heads, keys, 132) == 256
            assert replace(config, split_keys=UNSPLIT).split_size(heads, keys, 132) == UNSPLIT

    def test_a_forward_launch_splits_keys_where_tiles_leave_cores_idle(self):
        config = ForwardConfig(128, 128, 8, 2, split_keys=256)
        assert config.split_size(8, 4096, 132) == 256  # 16 splits of 8 tiles
        assert config.split_size(32, 4096, 132) == 1024  # one program per core
        assert config.split_size(8, 1500, 132) == 384  # of 256 keys or more
        assert config.split_size(8, 1024, 132) == UNSPLIT  # the merge costs what is spared
        assert config.split_size(67, 65536, 132) == UNSPLIT  # no core is free for a second one
        assert configs.choose(replace(PLAIN, seqlen_q=128), H200).split_keys == 256
        for feature in (Feature.BATCH_INVARIANT, Feature.VARLEN):
            assert configs.choose(replace(PLAIN, features=frozenset({feature})), H200).split_keys == 0

    @pytest.mark.parametrize("heads", (1, 7, 8, 64, 132, 1000))
    @pytest.mark.parametrize("keys", (1, 100, 1024, 4095, 65536, MOST_POSITIONS))
    def test_a_split_is_whole_blocks_whatever_the_launch(self, heads: int, keys: int):
        for config in (
            DecodeConfig(16, 64, 4, 3, 256),
            DecodeConfig(64, 128, 8, 1, 128),
            ForwardConfig(128, 64, 8, 2, split_keys=256),
        ):
            size = config.split_size(heads, keys, 132)
            assert size % config.block_n == 0 and size >= config.block_n


GOOD = {
    ForwardConfig: ForwardConfig(64, 64, 4, 2),
    DecodeConfig: DecodeConfig(16, 64, 4, 2, 256),
    BackwardConfig: BackwardConfig(64, 64, 4, 2, 64, 64, 4, 2),
    StatisticsConfig: StatisticsConfig(64, 64, 4, 2),
}
BAD = {
    "block_m": (0, 8, 24, 512, True, 64.0, "64"),
    "block_n": (0, 8, 24, 512, None),
    "num_warps": (0, 3, 32, False),
    "num_stages": (0, 9, True, 2.0),
    "split_keys": (0, 32, 300, "256", True),
    "loads": ("", "tma", None, True),
    "cache_kv": (".cs", None, "cg"),
    "split_exp": (0, 3, 16, True, 8),
    "mask_by": ("", "multiply"),
    "order": ("", "reversed"),
    "max_registers": (8, 100, 256, True, "168"),
    **{name: (0, 1, None, "yes") for name in ("pack_gqa", "base2", "hold_q", "persistent", "fused")},
    "apart": (3, -1, True, None, "1"),
    **{name: (0, 1, None, "yes") for name in ("lazy_rescale", "late_sum", "compensate", "fixed_splits")},
    "precision": ("", "tf32", "fp32", None),
    "level": (2, -1, True, None),
    **{f"dq_{name}": (0, 3, 1000) for name in ("block_m", "block_n", "num_warps")},
    "dq_num_stages": (0, 9),
}


class TestConfigs:
    @pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
    def test_a_config_proves_itself(self, kind: type):
        names = [f.name for f in fields(kind)]
        assert set(names) <= set(BAD)
        for name in names:
            for value in BAD[name]:
                if (kind, name, value) in ((ForwardConfig, "split_keys", 0), (DecodeConfig, "block_m", 8)):
                    continue  # never splits; over codes
                with pytest.raises(SpecError, match=f"^{name}: got "):
                    replace(GOOD[kind], **{name: value})

    @pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
    def test_a_config_is_frozen_and_hashable(self, kind: type):
        with pytest.raises(FrozenInstanceError):
            GOOD[kind].block_m = 128
        assert hash(GOOD[kind]) == hash(replace(GOOD[kind]))

    def test_every_choice_has_notes_and_few_are_different(self):
        for spec, target in GRID[::7]:
            notes = configs.choose(spec, target).notes(spec)
            assert notes and all(isinstance(note, str) and note for note in notes)
        assert len({configs.choose(spec, target) for spec, target in GRID}) < 300

    def test_the_interpreter_has_tiny_tiles(self):
        for spec, target in GRID:
            if target is INTERPRETER:
                config = configs.choose(spec, target)
                assert max(config.block_n, config.block_m if spec.phase is not Phase.DECODE else 0) <= 32

    @pytest.mark.parametrize("phase", Phase)
    @pytest.mark.parametrize("target", (*GPUS, UNKNOWN[0]), ids=lambda t: t.name)
    def test_candidates_begin_with_the_choice_are_distinct_and_fit(self, phase: Phase, target: Target):
        for dtype, (d, dv), rows in itertools.product(("bfloat16", "float32"), DIMS, (1, 4096)):
            spec = replace(PLAIN, phase=phase, dtype=dtype, head_dim=d, head_dim_v=dv, seqlen_q=rows)
            found = configs.candidates(spec, target)
            assert found[0] == configs.choose(spec, target) and len(set(found)) == len(found)
            for config in found[1:] if phase is not Phase.BACKWARD else ():
                if tile_of(config) == tile_of(found[0]):
                    continue  # a technique beside it
                assert tiles.shared_bytes(tile_of(config), spec, target) <= tiles.shared_limit(target)
            for config in found[1:] if phase is Phase.BACKWARD else ():
                assert not config.fused
                dq = Tile(config.dq_block_m, config.dq_block_n, config.dq_num_warps, config.dq_num_stages)
                sizes = [
                    tiles.backward_shared_bytes(tile, owns_rows, spec, target)
                    for tile, owns_rows in ((tile_of(config), False), (dq, True))
                    if tile not in (tile_of(found[0]), dq_of(found[0]))
                ]
                assert all(size <= tiles.shared_limit(target) for size in sizes)

    def test_no_forward_loop_for_sm90_is_without_a_pipeline(self):
        """Triton 3.6 makes wrong code of one: seen on an H200."""
        for spec, target in GRID:
            if target.name == "cuda:sm90" and spec.phase is not Phase.BACKWARD:
                every = (*configs.candidates(spec, target), *configs.switches(spec, target))
                assert all(config.num_stages >= 2 for config in every), spec

    def test_switches_change_one_thing_each_and_name_every_technique(self):
        for phase, wanted in SWITCHED.items():
            spec = replace(PLAIN, phase=phase, num_q_heads=32, seqlen_q=1 if phase is Phase.DECODE else 4096)
            chosen, changed = configs.choose(spec, H200), []
            for config in configs.switches(spec, H200):
                odd = [f.name for f in fields(config) if getattr(config, f.name) != getattr(chosen, f.name)]
                assert len(odd) == 1
                changed += odd
            assert set(changed) == wanted, phase
        exps = {c.split_exp for c in configs.switches(PLAIN, H200)}
        assert exps == {1, 2, 4}  # 64 keys have no eight chunks of 16


SWITCHED = {
    Phase.FORWARD: {
        *(
            "base2",
            "split_exp",
            "num_stages",
            "max_registers",
            "loads",
            "cache_kv",
            "mask_by",
            "order",
            "split_keys",
            "persistent",
            "hold_q",
            "lazy_rescale",
            "late_sum",
        ),
        "pack_gqa",
    },
    Phase.DECODE: {
        *("base2", "num_stages", "max_registers", "loads", "cache_kv", "fixed_splits", "split_keys"),
        "pack_gqa",
    },
    Phase.BACKWARD: {"base2", "fused", "apart", "num_stages", "dq_num_stages"},
    Phase.STATISTICS: {"num_stages"},
}


def dq_of(config: BackwardConfig) -> Tile:
    return Tile(config.dq_block_m, config.dq_block_n, config.dq_num_warps, config.dq_num_stages)
