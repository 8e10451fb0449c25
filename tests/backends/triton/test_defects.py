"""The five classes of defects that published kernels had and their tests missed, on the Triton forward and
decode: a gate that can never fire, sub-tiles without a common maximum, outputs that nobody writes, masks by
local index, tiles that overrun. scripts/mutants.toml plants each."""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import Mask, env
from polyflash.quant import Scheme, quantize
from polyflash.workloads import Workload, make
from tests import device
from tests.conformance.pages import hidden_pages
from tests.conformance.rows import ints, qkv
from tests.memory import PATTERN, check_guarded, check_hidden, guard
from tests.tolerance import same_bits

if not env.TRITON_INTERPRET.is_set() and device.DEVICE.type == "cpu":
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

from polyflash.backends.triton import backward, forward, forward_kernel, merge, places, products, ptx, scores
from polyflash.backends.triton.configs import BackwardConfig, DecodeConfig, ForwardConfig
from polyflash.backends.triton.interpreter import INTERPRET
from tests.backends.triton.direct import SPLITS, TILE, Config, call, close, hold, launch_of, operands, oracle

NAN = math.nan
HEAVY = replace(TILE, order="heavy_first", pack_gqa=True)
DESCRIPTOR = replace(TILE, loads="descriptor")
CONFIGS = {"plain": TILE, "heavy-packed": HEAVY, "descriptor": DESCRIPTOR, "splits": SPLITS}
WITHOUT_SPLITS = {name: config for name, config in CONFIGS.items() if config is not SPLITS}
SIZES = (7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16, 48)))
DROPOUT = {"dropout_p": 0.4, "dropout_seed": 2**40 + 3}


def each(names: str, cases: dict[str, Any], configs: dict[str, Config] = CONFIGS) -> pytest.MarkDecorator:
    """Every case with every config; by default a case has one config, each in its turn."""
    found = []
    for turn, (word, case) in enumerate(cases.items()):
        values = case if isinstance(case, tuple) else (case,)
        for place, (name, config) in enumerate(configs.items()):
            marks = () if place == turn % len(configs) else (pytest.mark.slow,)
            found.append(pytest.param(config, *values, id=f"{name}-{word}", marks=marks))
    return pytest.mark.parametrize(("config", *names.split(", ")), found)


def sizes(*cases: Any) -> dict[str, Any]:
    return {"-".join(map(str, case)) if isinstance(case, tuple) else str(case): case for case in cases}


MEMBERS = {
    "mixed": ((17, 20), (0, 0), (16, 30), (1, 0), (0, 5)),
    "one": ((0, 3), (0, 0), (33, 9)),
    "steps": ((1, 1),) * 19,
    "none": ((0, 0),),
}
LATER = {
    "causal": {"causal": True},
    "offset": {"causal": True, "q_offset": 21},
    "negative-offset": {"causal": True, "q_offset": -18},
    "offsets": {"causal": True, "q_offset": ints(0, 35)},
    "lengths": {"causal": True, "kv_lens": ints(53, 35)},
    "window": {"window": (3, 2), "q_offset": ints(3, 20)},
    "window-starts": {"window": (18, None), "causal": True, "kv_starts": ints(0, 19)},
    "starts-lengths": {"kv_starts": ints(17, 33), "kv_lens": ints(18, 50)},
    "mask": {"mask": torch.ones(35, 53).tril(4).bool()},
    "bias": {"bias": torch.arange(35.0)[:, None] * torch.arange(53.0) / 99},
    "alibi": {"alibi_slopes": torch.tensor([[0.1, 0.5], [1.0, 0.2]]), "causal": True},
    "segments": {
        "mask": Mask.segments(
            (torch.arange(35) // 9).expand(2, -1).int(), (torch.arange(53) // 11).expand(2, -1).int()
        )
    },
    "intervals": {
        "mask": Mask.intervals(ints(0, 20, 33, 48)[:, None], ints(17, 33, 40, 99)[:, None], rows=9)
    },
}


def packed(
    members: tuple[tuple[int, int], ...], tail: int = 0, heads: tuple[int, int] = (2, 1), dims: Any = (24, 24)
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v and bounds of `members` (rows, keys), with rows and keys of nobody behind them."""
    rows, keys = (sum(sizes) + tail for sizes in zip(*members, strict=True))
    w = Workload("", frozenset(), 1, *heads, rows, keys, *dims, members=members)
    return make(w, seed=3)


def paged(
    lens: tuple[int, ...], page_size: int, rows: tuple[int, ...] = (), tail: int = 3, heads: Any = (4, 2)
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Likewise over shuffled pages; without `rows` one token per request."""
    members = tuple(zip(rows, lens, strict=True)) if rows else ()
    total = sum(rows) + tail if rows else 1
    w = Workload(
        "", frozenset(), 1 if rows else len(lens), *heads, total, max(lens), 24, kv_lens=lens,
        members=members, page_size=page_size,
    )  # fmt: skip
    return make(w, seed=4)


class TestAGateThatCanNeverFire:
    """The heuristics' own branches: tests/null/test_triton_configs.py."""

    @pytest.mark.parametrize("kind", (ForwardConfig, DecodeConfig), ids=lambda kind: kind.__name__)
    def test_every_technique_changes_what_is_compiled(self, kind: type):
        """Or, of those that only a launch knows, how many programs of which size there are."""
        q, k, v = qkv(1, (4, 2), 3, 70, 32)
        *exact, args = operands(q, k, v, {"causal": True})
        changed = {
            **{"block_m": 32, "block_n": 32, "num_warps": 8, "num_stages": 3, "base2": False},
            **{"loads": "descriptor", "cache_kv": ".cg", "pack_gqa": kind is ForwardConfig},
            **{"split_exp": 1, "hold_q": True, "mask_by": "add", "order": "heavy_first", "persistent": True},
            **{"max_registers": 168, "lazy_rescale": True, "late_sum": True, "precision": "bf16x6"},
            **{"compensate": False, "level": 0},
        }
        coded = args._replace(codes=",".join(["fp8_e4m3/0x0*fp8"] * 2))
        base = (
            ForwardConfig(16, 64, 4, 2, split_exp=2)
            if kind is ForwardConfig
            else DecodeConfig(16, 64, 4, 2, 64)
        )

        def compiled(config: Config) -> list[Any]:
            found = []
            half = [x.half() for x in exact]
            for (q, k, v), of in ((exact, args), (half, args), (half, coded)):  # some are of one kind alone
                prepared = forward.Prepared(launch_of(config))
                ready = prepared.ready_for(q, k, v, torch.empty_like(q), None, of, False)
                found.append((ready.constants, prepared.options, ready.described, ready.num_heads))
            return found

        for name in (f.name for f in fields(kind) if f.name not in ("split_keys", "fixed_splits")):
            assert compiled(replace(base, **{name: changed[name]})) != compiled(base), name

    def test_every_feature_changes_what_is_compiled(self):
        """A flag per feature that no tensor carries; both of its values are compiled for some call."""
        q, k, v = qkv(1, 2, 5, 9, 16)
        flags: dict[str, set[Any]] = {}
        calls: tuple[dict[str, Any], ...] = (
            *(
                {},
                {"causal": True},
                {"window": (3, None)},
                {"q_offset": 4},
                {"scale": -1.0},
                {"softcap": 2.0},
            ),
            *(DROPOUT, {"mask": torch.ones(5, 9, dtype=torch.bool)}),
        )
        for options, split in [(options, split) for options in calls for split in (False, True)]:
            prepared = forward.Prepared(launch_of(TILE))
            ready = prepared.ready_for(
                *operands(q, k, v, options)[:3], q, None, operands(q, k, v, options)[3], split
            )
            for name, value in ready.constants._asdict().items():
                flags.setdefault(name, set()).add(value)
        both = {name for name, values in flags.items() if values == {False, True}}
        assert both == {
            *("HAS_OFFSET", "HAS_LEFT", "HAS_RIGHT", "NEGATIVE", "CHANGED", "SOFTCAP", "DROPOUT"),
            *("ALWAYS_MASKED", "BELOW", "SPLIT"),
        }

    @pytest.mark.skipif(not INTERPRET, reason="what a GPU runs cannot be traced")
    def test_every_line_of_the_kernels_runs_for_some_call(self):
        """Branches on constants, on presence and on values alike."""
        ran: set[tuple[str, str, int]] = set()
        modules = {m.__file__: m for m in (places, products, scores, forward_kernel, merge)}

        def trace(frame: Any, event: str, _: Any) -> Any:
            code = frame.f_code
            if code.co_filename not in modules:
                return None
            if event == "line":
                ran.add((code.co_filename, code.co_name, frame.f_lineno))
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run_everything()
        finally:
            sys.settrace(before)
        for function in reached(forward.attend, merge.merge_splits):
            lines = {
                n for f, own, n in ran if (f, own) == (inspect.getsourcefile(function), function.__name__)
            }
            missing = sorted(lines_of(function) - lines)
            assert not missing, f"{function.__name__}: lines {missing} run for no call"


def reached(*kernels: Any) -> list[Any]:
    """The Python functions of kernels and of all that they call of ours."""
    found = [kernel.fn for kernel in kernels]
    for function in found:
        called = [getattr(function.__globals__.get(name), "fn", None) for name in function.__code__.co_names]
        found += [x for x in called if x and x.__module__.startswith("polyflash.") and x not in found]
    found = [x for x in found if x.__module__ != ptx.__name__]  # what the interpreter cannot run
    return found


def lines_of(function: Any) -> set[int]:
    """Lines of a kernel that a trace reports, less its signature and its docstring."""
    source, first = inspect.getsourcelines(function)
    end = next(i for i, line in enumerate(source) if line.partition("#")[0].rstrip().endswith(":"))
    found = {line for _, _, line in function.__code__.co_lines() if line is not None and line > first + end}
    if function.__doc__:
        found.discard(min(found, default=0))
    return found


def run_everything() -> None:
    """Calls that take every branch of the forward and decode kernels; others show that they are right."""
    q, k, v = qkv(1, (2, 1), 4, 20, 24)
    v[0, 0, 3, 17] = math.inf
    everything = {
        "causal": True,
        "window": (15, None),
        "kv_lens": ints(19),
        "kv_starts": ints(1),
        "bias": torch.randn(2, 4, 20),
        "alibi_slopes": torch.rand(2),
        "softcap": 4.0,
        "sinks": torch.randn(2),
        "mask": torch.rand(4, 20) < 0.8,
    }
    call(TILE, q, k, v, **everything)
    v = v.nan_to_num(0, 0, 0)
    call(replace(TILE, hold_q=True), q, k, v, scale=-0.2, q_offset=5, causal=True, **DROPOUT)
    call(replace(HEAVY, persistent=True, mask_by="add"), q, k, v, causal=True)
    call(replace(DESCRIPTOR, block_n=32, split_exp=2, base2=False), q, k, v)
    call(replace(DESCRIPTOR, block_n=32, split_exp=2), q, k, v)
    call(TILE, *qkv(1, 1, 4, 40, 16, 24), window=(9, 3), q_offset=ints(4))
    whole = qkv(1, 1, 4, 2 * TILE.block_n, 16, dtype=torch.bfloat16)
    call(TILE, *whole)
    call(replace(TILE, precision="bf16x6", compensate=False), *qkv(1, 1, 4, 40, 16, 24))
    call(TILE, *(1e6 * x for x in whole[:2]), whole[2])  # scores of which one multiply-add loses too much
    call(TILE, *(1e6 * x for x in whole[:2]), whole[2], causal=True)
    call(replace(TILE, lazy_rescale=True, late_sum=True), *(1e6 * x for x in whole[:2]), whole[2])
    segments = Mask.segments(torch.zeros(1, 4).int(), torch.arange(20)[None].int() // 13)
    starts = torch.tensor([[0, 15], [5, 18]]).int()
    call(TILE, q.half(), k.half(), v.half(), mask=segments)
    *tensors, args = operands(q, k, v, {"causal": True, **DROPOUT})
    part = args._replace(dropout_row=3, dropout_key=5, dropout_heads=4)
    forward.run(launch_of(TILE), *tensors, torch.empty_like(q), torch.empty(q.shape[:3]), part)
    q, k, v, args = operands(q, k, v, {"mask": Mask.intervals(starts, starts + 3, rows=2)})
    counts, lse = torch.empty(9).int(), torch.empty(q.shape[:3])
    forward.attend_call(forward.Prepared(launch_of(TILE)), q, k, v, q, lse, args, visits=counts)
    for members in (packed(((3, 20), (0, 4), (2, 0)), tail=2), paged((20, 3), 8, rows=(2, 1))):
        call(TILE, *members[:3], **members[3], causal=True, sinks=torch.randn(members[0].shape[1]))
    for page_size in (8, 64):  # the second holds whole blocks
        q, k, v, options = paged((20, 3), page_size)
        call(HEAVY, q, k, v, **options)
    call(SPLITS, *qkv(1, 2, 1, 70, 24), sinks=torch.randn(2), batch_invariant=True)
    call(SPLITS, *qkv(1, 2, 1, 70, 24), batch_invariant=True)
    q, k, v, args = operands(*qkv(1, 1, 4, 20, 16), {})
    bounds = torch.stack((torch.arange(4), torch.arange(4) + 15), 1).int()
    forward.run(launch_of(TILE), q, k, v, q, torch.empty(q.shape[:3]), args._replace(row_bounds=bounds))
    per_head, mean = {"granularity": "head"}, {"smoothing": "mean"}
    coded_calls: tuple[tuple[int, dict[str, Any], dict[str, Any]], ...] = (
        *((48, mean, {}), (16, {}, {"softcap": 4.0}), (16, per_head, {"scale": -0.2})),
        *((16, {}, {"config": DESCRIPTOR}), (16, per_head | mean, {})),
    )
    for d, how, options in coded_calls:
        x, y, z = qkv(1, 1, 16, 40, d, dtype=torch.float16)
        coded = quantize(y, Scheme(compute="int8", **how))
        polyflash.attention(x, coded, z, backend="triton", **options)
    eights = Scheme(dtype="fp8_e4m3", granularity="head", compute="fp8")
    for d, odd, options in (
        (48, 3, {}),
        (16, 7, {"config": replace(DESCRIPTOR, block_n=32)}),
        (16, 0, {"softcap": 4.0}),
    ):
        x, y, z = qkv(1, 1, 40, 40, d, dtype=torch.float16)
        values = quantize(z, eights)
        values.codes.view(torch.uint8)[..., :odd] = 0x7F
        polyflash.attention(x, quantize(y, eights), values, backend="triton", **options)
    pools = [y.view(5, 8, 1, 16) for y in qkv(1, 1, 40, 40, 16, dtype=torch.float16)[1:]]
    coded = quantize(pools[0], Scheme(compute="int8"), layout="bshd")
    given = x[0].transpose(0, 1), coded, pools[1], ints(4, 0, 1)[None], ints(20)
    polyflash.attention_paged(*given, cu_seqlens_q=ints(0, 16), batch_invariant=True, backend="triton")
    in_parts = launch_of(BackwardConfig(16, 32, 4, 1, 32, 16, 4, 1, precision="bf16x6"))  # of products
    lse, needs = torch.zeros(q.shape[:3]), (True, True, True, False, False)
    backward.run(in_parts, q, None, q, k, v, q, lse, args, needs)


class TestSubTilesWithoutACommonMaximum:
    def problem(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The largest score of row i stands in chunk i % 8 of a block of 128 keys, 8 to 60 above the others;
        a chunk that took its own maximum as the row's would weigh as much as the one that has it."""
        q, k, v = qkv(1, 1, 24, 256, 32, dtype=dtype)
        rows = torch.arange(24)
        q, k = q * 0.1, k * 0.1
        q[0, 0] += 0
        q[0, 0, :, :8] = torch.nn.functional.one_hot(rows % 8, 8) * (3.0 + rows[:, None] / 4)
        k[0, 0, :, :8] = 0
        for chunk in range(8):
            k[0, 0, 128 + 16 * chunk + chunk, chunk] = 16.0
        return q.to(dtype), k.to(dtype), v

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
    @pytest.mark.parametrize("options", ({}, {"softcap": 50.0}, {"causal": True}), ids=str)
    def test_the_maximum_may_stand_in_any_chunk(self, dtype: torch.dtype, options: dict[str, Any]):
        q, k, v = self.problem(dtype)
        whole = replace(TILE, block_n=128)
        want = call(whole, q, k, v, scale=1.0, **options)
        exact = oracle(q, k, v, {"scale": 1.0, **options})
        close(want, exact, bound=3e-6 if dtype is torch.float32 else 1e-2)
        for parts in (2, 4, 8):
            got = call(replace(whole, split_exp=parts), q, k, v, scale=1.0, **options)
            for name, a, b in zip(("out", "lse"), got, want, strict=True):
                same_bits(a, b, f"{name} in {parts} chunks")

    @pytest.mark.parametrize("options", ({}, {"causal": True}), ids=str)
    def test_scores_beyond_what_one_multiply_add_keeps(self, options: dict[str, Any]):
        """Scores near 2^35, where the rounded product with log2 e is off by more than an exponent holds."""
        q, k, v = qkv(1, 1, 4, 2 * TILE.block_n, 32, dtype=torch.bfloat16)
        q, k = q.sign() * 2.0**16, k.sign() * 2.0**16
        out, lse = call(TILE, q, k, v, **options)
        want = oracle(q, k, v, options)
        close((out, lse), want, bound=1e-2)

    @pytest.mark.parametrize("worst", (math.nan, math.inf, 2.0**30))
    @pytest.mark.parametrize("options", ({}, {"causal": True}), ids=str)
    @pytest.mark.parametrize("deferred", (False, True))
    def test_scores_of_a_row_change_no_bit_of_another(
        self, options: dict[str, Any], worst: float, deferred: bool
    ):
        tile = replace(TILE, lazy_rescale=deferred, late_sum=deferred)
        q, k, v = qkv(1, 1, 4, 6 * TILE.block_n, 32, dtype=torch.bfloat16)
        q *= 2.0  # so that maxima grow
        out, lse = call(tile, q, k, v, **options)
        q[0, 0, 2, 3] = worst
        other, other_lse = call(tile, q, k, v, **options)
        rows = [0, 1, 3]
        same_bits(other[:, :, rows], out[:, :, rows])
        same_bits(other_lse[:, :, rows], lse[:, :, rows])

    def test_splits_are_merged_under_one_maximum(self):
        """Denominators of splits that neither fit float32 without it, nor are alike."""
        q, k, v = self.problem(torch.float32)
        hold(SPLITS, q[:, :, :5], k, v, scale=4.0, batch_invariant=True)
        hold(SPLITS, q[:, :, :5], k, v, scale=4.0, batch_invariant=True, sinks=torch.tensor([200.0]))


class TestOutputsThatNobodyWrites:
    """`call` hands out NaN, and `close` names the first one that is left."""

    @each("d, dv", sizes((1, 3), (16, 40), (40, 24), (80, 17), (24, 96)))
    def test_every_channel(self, config: Config, d: int, dv: int):
        hold(config, *qkv(1, (2, 1), 5, 40, d, dv), batch_invariant=True)

    @each("rows", sizes(33, 1, 15, 17, 16))
    def test_every_row_and_its_lse(self, config: Config, rows: int):
        hold(config, *qkv(2, (3, 1), rows, 37, 16), causal=True, batch_invariant=True)

    @each("members", {name: (members,) for name, members in MEMBERS.items()}, WITHOUT_SPLITS)
    @pytest.mark.parametrize("tail", (0, 1, 18))
    def test_rows_of_members_and_of_nobody(self, config: Config, members: Any, tail: int):
        if not sum(rows for rows, _ in members) + tail:
            tail = 2
        q, k, v, options = packed(members, tail)
        hold(config, q, k, v, **options, sinks=torch.tensor([0.5, -0.5]))

    def test_without_lse_only_out_is_written(self):
        q, k, v = qkv(1, 2, 20, 37, 16)
        for config in (TILE, SPLITS):
            want = call(config, q, k, v, batch_invariant=True)
            out, lse = call(config, q, k, v, batch_invariant=True, return_lse=False)
            assert lse.isnan().all()
            same_bits(out, want[0], str(config))


class TestMasksByLocalIndex:
    """Rows and keys of the second and later tiles, whose places in the tile are not those in the sequence."""

    @each("options", LATER)
    def test_rows_and_keys_of_later_tiles(self, config: Config, options: dict[str, Any]):
        hold(config, *qkv(2, (2, 1), 35, 53, 16), **options, batch_invariant=True)

    @each("causal", sizes(False, True), WITHOUT_SPLITS)
    def test_dropout_counts_from_the_sequence(self, config: Config, causal: bool):
        hold(config, *qkv(2, (2, 1), 35, 53, 16), causal=causal, **DROPOUT)

    @each(
        "more",
        {"causal": {}, "window": {"window": (9, None)}, "offsets": {"q_offset": ints(1, 0, 9, 20)}},
        WITHOUT_SPLITS,
    )
    def test_members_count_from_their_own_first(self, config: Config, more: dict[str, Any]):
        q, k, v, options = packed(((5, 18), (20, 3), (19, 40), (17, 17)), tail=3)
        hold(config, q, k, v, **options, causal=True, **more)

    @pytest.mark.parametrize("page_size", SIZES)
    def test_keys_of_later_pages(self, page_size: int):
        q, k, v, options = paged((53, 1, 0, 18), page_size)
        for config in (TILE, SPLITS):
            hold(config, q, k, v, **options, window=(20, None), causal=True, batch_invariant=True)
        q, k, v, options = paged((53, 1, 0, 38), page_size, rows=(3, 1, 0, 36))
        hold(HEAVY, q, k, v, **options, causal=True)

    def test_packed_heads_share_a_row_and_no_position(self):
        """Groups that divide no tile: the rows of one query row lie in two tiles."""
        for group in (3, 5):
            for config in (HEAVY, SPLITS):
                q, k, v = qkv(1, (2 * group, 2), 12, 37, 16)
                hold(
                    config,
                    q,
                    k,
                    v,
                    causal=True,
                    window=(17, None),
                    alibi_slopes=torch.rand(2 * group),
                    batch_invariant=True,
                )

    def test_query_heads_of_a_group_are_neighbours(self):
        for config in (TILE, HEAVY, DESCRIPTOR):
            hold(config, *qkv(2, (6, 3), 3, 20, 16))

    def test_interval_lists_of_packed_heads_are_their_own(self):
        starts = torch.tensor([[[0], [20]], [[33], [3]], [[15], [16]], [[1], [52]]]).int()
        structured = Mask.intervals(starts[None], starts[None] + 7, rows=11)
        hold(HEAVY, *qkv(1, (4, 2), 22, 53, 16), mask=structured)


class TestTilesThatOverrun:
    def guarded(self, config: Config, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        """Every operand and both results inside guard bands: none is written, no bit hangs on one."""
        shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else q.shape[:3]
        if q.ndim == 3:
            shape = (1, *shape) if "cu_seqlens_q" in options else (q.shape[0], q.shape[1], 1)

        def within(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
            lse = guard(torch.zeros(shape))
            lse.fill_guards(PATTERN)
            found = call(config, q, k, v, lse=lse.view, **given)
            lse.assert_intact(PATTERN, "lse")
            return found

        check_guarded(within, q, k, v, options)

    @each("rows, keys, d, dv", sizes((17, 33, 24, 40), (5, 48, 16, 80), (1, 1, 3, 17), (2, 49, 24, 40)))
    def test_nothing_beside_the_tensors(self, config: Config, rows: int, keys: int, d: int, dv: int):
        options = {
            "kv_lens": ints(keys, keys - 1),
            "bias": torch.randn(2, 1, rows, keys),
            "batch_invariant": True,
        }
        self.guarded(config, *qkv(2, (2, 1), rows, keys, d, dv), options)

    @each("tail", sizes(4, 0), WITHOUT_SPLITS)
    def test_members_leave_their_neighbours_alone(self, config: Config, tail: int):
        """Short members in one tile's reach of each other, written in rising and in falling order."""
        q, k, v, options = packed(((3, 5), (18, 2), (1, 30), (0, 7), (2, 2)), tail)
        self.guarded(config, q, k, v, options)
        hold(config, q, k, v, **options)

    def test_pages_and_tables(self):
        for config in (TILE, SPLITS):
            q, k, v, options = paged((37, 1, 20), 5)
            self.guarded(config, q, k, v, {**options, "batch_invariant": True})

    @each("fill", sizes("nan", "inf", "bits", "65504"))
    def test_keys_beyond_lengths_are_not_there(self, config: Config, fill: str):
        options = {"kv_lens": ints(19, 33), "kv_starts": ints(2, 17), "causal": True, "batch_invariant": True}
        check_hidden(partial(call, config), *qkv(2, (2, 1), 5, 53, 24), options, fills=(fill,))

    @each("fill", sizes("nan", "inf", "bits"), WITHOUT_SPLITS)
    def test_keys_of_other_members_are_not_there(self, config: Config, fill: str):
        q, k, v, options = packed(((3, 19), (18, 2), (1, 30), (0, 7), (2, 0)), tail=4)
        options |= {"kv_lens": ints(18, 2, 17, 0, 0), "causal": True}
        check_hidden(partial(call, config), q, k, v, options, fills=(fill,))

    @pytest.mark.parametrize("page_size", SIZES)
    def test_slots_and_pages_of_nobody_are_not_there(self, page_size: int):
        for config, rows in ((TILE, ()), (SPLITS, ()), (HEAVY, (3, 17, 1))):
            q, k, v, options = paged((37, 20, 0), page_size, rows)
            want = call(config, q, k, v, **options, batch_invariant=True)
            for fill in ("nan", "inf", "bits"):
                q2, k2, v2, options2 = hidden_pages(q, k, v, options, fill)
                got = call(config, q2, k2, v2, **options2, batch_invariant=True)
                for name, a, b in zip(("out", "lse"), got, want, strict=True):
                    same_bits(a, b, f"{name} with {fill}")

    @each("keys", sizes(53, 40))
    def test_what_is_visible_reaches_those_that_see_it_alone(self, config: Config, keys: int):
        """NaN at one key: rows that see it, and no others."""
        q, k, v = qkv(1, (2, 1), 18, keys, 24)
        v[0, 0, 33, 5] = NAN
        out, lse = call(config, q, k, v, causal=True, batch_invariant=True)
        seen = torch.arange(18) + keys - 18 >= 33
        assert out[..., 5].isnan().eq(seen).all() and out[..., :5].isfinite().all() and lse.isfinite().all()
