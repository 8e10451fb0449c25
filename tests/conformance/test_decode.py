"""Few query rows over many keys: every row that runs them, against the oracle and by identities."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import repeats, torch_ops
from polyflash.spec import MOST_SHARED_ROWS, PACKED_ROWS, Feature, Phase
from tests import device
from tests.catalogue import named, with_dtype, workloads
from tests.conformance.draws import LAYOUTS, laid_out
from tests.conformance.rows import DTYPES, NAMES, ROUNDING, USUAL, Runner, expected, ints, qkv
from tests.families import FAMILIES, make
from tests.memory import check_guarded, check_hidden
from tests.tolerance import check_backstop, near, same_bits

DECODE = workloads("decode")
ROTATING = tuple(name for name in FAMILIES if name not in ("normal", "huge", "subnormal", "nanrow"))
KEYS = (
    1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 509, 511, 513, 1023, 1024, 1025,
    1537, 2047, 2049, 3001, 4097, 5000,
)  # fmt: skip
# What a decode row promises: one that loses a feature must fail here instead of skipping its tests.
PROMISED = {
    Feature.CAUSAL, Feature.WINDOW, Feature.Q_OFFSET, Feature.KV_LENS, Feature.KV_STARTS, Feature.SOFTCAP,
    Feature.SINKS, Feature.GQA, Feature.HEAD_DIM_V, Feature.LSE, Feature.PAGED,
    Feature.ROW_BOUNDS,
}  # fmt: skip


@pytest.mark.parametrize("dtype", (*NAMES, "float64"))
@pytest.mark.parametrize("number", range(len(DECODE)), ids=[w.name for w in DECODE])
def test_workload(step: Runner, number: int, dtype: str):
    workload = with_dtype(DECODE[number], dtype)
    step.skip_unless(workload)
    others = () if dtype == "float64" else (ROTATING[(number + len(dtype)) % len(ROTATING)],)
    for family in ("normal", *others):
        q, k, v, options = make(workload, seed=number, family=family)
        step.checked(q, k, v, label=f"{workload.name} {dtype} {family}", **options)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(step: Runner, family: str, dtype: str):
    for name in ("step-group-2", "step-rows-2", "step-group-3"):
        workload = with_dtype(named(name), dtype)
        step.skip_unless(workload)
        q, k, v, options = make(workload, seed=3, family=family)
        step.checked(q, k, v, label=f"{name} {dtype} {family}", **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_keys(step: Runner, dtype: torch.dtype):
    """B-spl-01, B-msk-11, B-spl-11: the last tile and the last split are of every length."""
    for heads, rows in (((2, 2), 1), ((4, 1), 1), ((4, 1), 2)):
        for keys in KEYS if rows == 1 else KEYS[::3]:
            q, k, v = qkv(1, heads, rows, keys, 64, dtype=dtype, seed=keys)
            step.checked(q, k, v, causal=True, label=f"{heads} heads, {rows} rows, {keys} keys")


@pytest.mark.parametrize("keys", (70, 1030))
@pytest.mark.parametrize("group", (1, 2, 3, 5, 7, 8))
def test_any_rows_and_group(step: Runner, group: int, keys: int):
    """B-gqa-05: rows of a tile are (query head of the group, query row), of every count."""
    for rows in range(1, 9):
        dtype = DTYPES[(rows + group) % 3]
        q, k, v = qkv(1, (2 * group, 2), rows, keys, 32, dtype=dtype, seed=rows)
        step.checked(q, k, v, causal=True, label=f"group {group}, {rows} rows")


# (head_dim, head_dim_v) of one kernel each.
HEAD_DIMS = {
    64: (1, 2, 3, 8, 16, 17, 40, 59, (64, 1)),
    128: ((40, 96), 80, (96, 40), 111, 128),
    256: ((3, 256), 160, (192, 128), 255, 256),
}


def check_head_dims(step: Runner, widest: int, dtype: torch.dtype) -> None:
    for dims in HEAD_DIMS[widest]:
        for rows, heads in ((1, (4, 2)), (4, (4, 1))):
            head_dim, head_dim_v = dims if isinstance(dims, tuple) else (dims, dims)
            q, k, v = qkv(1, heads, rows, 131, head_dim, head_dim_v, dtype=dtype)
            step.checked(q, k, v, causal=True, label=f"head_dim {head_dim}/{head_dim_v}, {rows} rows")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_head_dim(step: Runner, dtype: torch.dtype):
    check_head_dims(step, 64, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widest", (128, 256))
def test_any_wide_head_dim(step: Runner, widest: int, dtype: torch.dtype):
    check_head_dims(step, widest, dtype)


@pytest.mark.parametrize("dtype", NAMES)
def test_backstop(step: Runner, dtype: str):
    for name in ("step", "step-rows-2"):
        for family in ("normal", "kbias", "qkbias"):
            q, k, v, options = make(with_dtype(named(name), dtype), seed=5, family=family)
            got = step(q, k, v, **options)
            check_backstop(got.out, expected(q, k, v, options), family=family, label=f"{name} {family}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(step: Runner, layout: str, dtype: torch.dtype):
    """M28, M29: the bits of contiguous copies; q, K and V each laid out alone and together."""
    for rows in (1, 4):
        q, k, v = qkv(2, (4, 2), rows, 300, 64, dtype=dtype)
        want = step(q, k, v, causal=True)
        for which in ("k", "v", "qkv"):
            views = (laid_out(x, layout) if n in which else x for n, x in (("q", q), ("k", k), ("v", v)))
            got = step(*views, causal=True)
            same_bits(got.out.contiguous(), want.out, f"{layout} {which}")
            same_bits(got.lse, want.lse, f"{layout} {which}")


def test_expanded_padded_and_overlapping_keys(step: Runner):
    """Strides of 0 and keys that share memory; a cache whose rows are longer than what is passed of it."""
    for dtype in DTYPES:
        q, k, v = qkv(2, (4, 2), 2, 300, 64, dtype=dtype)
        wide = torch.full((2, 2, 400, 80), math.nan, dtype=dtype)
        wide[:, :, :300, :64] = k
        views = (
            (k[:1].expand_as(k), v[:, :1].expand_as(v)),
            (k[:, :, :1].expand_as(k), v),
            (wide[:, :, :300, :64], v),
            (k.flatten()[: 2 * 364].as_strided(k.shape, (0, 0, 1, 1)), v),
        )
        for a, b in views:
            got = step(q, a, b, causal=True)
            want = step(q, a.contiguous(), b.contiguous(), causal=True)
            same_bits(got.out, want.out, str(a.stride()))
            same_bits(got.lse, want.lse, str(a.stride()))


GUARDED = tuple(w.name for w in DECODE if w.head_dim <= 256)


@pytest.mark.parametrize("number", range(len(GUARDED)), ids=GUARDED)
def test_guard_bands_and_invisible_bits(step: Runner, number: int):
    """B-str-06, B-spl-01, P5: nothing beside out and lse is written, nothing beside the operands is read, and
    what no row sees changes no bit."""
    workload = with_dtype(named(GUARDED[number]), NAMES[number % 3])
    step.skip_unless(workload)
    problem = make(workload, seed=1)
    check_guarded(step, *problem)
    check_hidden(step, *problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_nonfinite_values(step: Runner, dtype: torch.dtype):
    """P6: NaN and ±Inf of V reach the rows and the channel that see them, of K the rows; at every place."""
    for rows, keys in ((1, 700), (4, 300)):
        q, k, v = qkv(1, (4, 2), rows, keys, 32, dtype=dtype)
        clean = step(q, k, v, causal=True)
        for at in (0, 63, 255, keys - rows):
            for value, test in (
                (math.nan, torch.isnan),
                (math.inf, torch.isposinf),
                (-math.inf, torch.isneginf),
            ):
                spoiled = v.clone()
                spoiled[0, 1, at, 5] = value
                got = step(q, k, spoiled, causal=True)
                assert test(got.out[0, 2:, :, 5]).all(), f"{value} at {at}"
                others = torch.arange(32) != 5
                same_bits(got.out[:, :2], clean.out[:, :2], "other heads")
                near(got.out[..., others], clean.out[..., others], ROUNDING[dtype])
                same_bits(got.lse, clean.lse)
        for value in (math.nan, math.inf, -math.inf):
            spoiled = k.clone()
            spoiled[0, 1, keys - 1, 3] = value
            step.checked(q, spoiled, v, causal=True, label=f"{value} in the last key")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_values_far_below_the_maximum(step: Runner, dtype: torch.dtype):
    """A part of the keys that weighs nothing beside another, in their block, their split or another one, or
    beside a sink: its infinity is still one, and not 0 times that. WGSL has no weight below 2**-126."""
    distances = (50.0, 75.0) if step.row.backend == "webgpu" else (50.0, 120.0, 300.0)
    for rows, keys in ((1, 700), (12, 700)):
        q, k, v = qkv(1, (4, 2), rows, keys, 32, dtype=dtype)
        q[..., 0], k[..., 0] = 8.0, 0.0
        for odd, high in ((3, keys - 1), (keys - 1, 3), (3, 100), (100, 3), (3, 5)):
            for far in distances:
                k2, v2 = k.clone(), v.clone()
                k2[:, :, high, 0] = far * math.sqrt(32) / 8
                v2[:, 1, odd, 5], v2[:, 1, odd, 7] = math.inf, -math.inf
                step.checked(q, k2, v2, label=f"{odd} {high} {far}")
        v[:, 1, 3, 5] = math.inf
        step.checked(q, k, v, sinks=torch.tensor([0.0, 1.0, 0.0, 1.0]) * distances[-1], label=f"sink {rows}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_keys(step: Runner, dtype: torch.dtype):
    """P3, B-msk-17, B-msk-18: out 0 and lse -inf, or the sink; into memory that held NaN."""
    q, k, v = qkv(5, (8, 2), 3, 700, 64, dtype=dtype)
    lens = ints(0, 700, 0, 1, 300)
    for options in ({}, {"causal": True}, {"sinks": torch.randn(8)}, {"kv_starts": ints(0, 700, 0, 1, 299)}):
        out = torch.full(q.shape, math.nan, dtype=dtype)
        got = step(q, k, v, kv_lens=lens, out=out, **options)
        step.checked(q, k, v, kv_lens=lens, label=f"{options}", **options)
        assert got.out is out and (out[0] == 0).all() and (out[2] == 0).all() and not out.isnan().any()
        empty = (
            torch.full((8, 3), -math.inf)
            if "sinks" not in options
            else options["sinks"][:, None].expand(8, 3)
        )
        torch.testing.assert_close(got.lse[0], empty)
    got = step(q, k, v, kv_lens=ints(0, 0, 0, 0, 0), causal=True)
    assert (got.out == 0).all() and (got.lse == -math.inf).all()
    none = step(q[:0], k[:0], v[:0])
    assert none.out.shape == (0, 8, 3, 64) and none.lse.shape == (0, 8, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_scores(step: Runner, dtype: torch.dtype):
    """Scores beyond float16, equal ones, one key that takes all, keys of score -inf in most splits."""
    for rows in (1, 4):
        q, k, v = qkv(1, (4, 2), rows, 700, 64, dtype=dtype)
        huge = step(q.sign() * 3e3, k.sign() * 3e3, v)
        assert torch.isfinite(huge.out).all() and torch.isfinite(huge.lse).all()
        for scale in (0.0, -0.125, 30.0, 1e-30):
            step.checked(q, k, v, scale=scale, label=f"scale {scale}")
        q, k = torch.ones_like(q), torch.zeros_like(k)
        k[:, :, :650] = -math.inf
        got = step(q, k, v)
        mean = v[:, :, 650:].float().mean(2, keepdim=True).to(dtype)
        near(got.out, mean.repeat_interleave(2, 1).expand_as(got.out), 2 * ROUNDING[dtype])
        torch.testing.assert_close(got.lse, torch.full_like(got.lse, math.log(50)), rtol=0, atol=1e-5)
        k[:] = -math.inf
        k[:, :, 600:601] = 0
        same_bits(step(q, k, v).out, v[:, :, 600:601].repeat_interleave(2, 1).expand_as(q).contiguous())


def test_any_out(step: Runner):
    """B-str-04, B-str-06: out of any strides, guards beside it intact, the bits of a fresh one."""
    for dtype in DTYPES:
        for rows in (1, 3):
            q, k, v = qkv(3, (4, 2), rows, 300, 64, 40, dtype=dtype)
            want = step(q, k, v, causal=True)
            wide = torch.full((3, rows, 4, 99), 7.0, dtype=dtype)
            turned = torch.full((40, rows, 4, 3), 7.0, dtype=dtype)
            every = torch.full((3, 4, rows, 80), 7.0, dtype=dtype)
            for out in (wide[..., 8:48].transpose(1, 2), turned.permute(3, 2, 1, 0), every[..., ::2]):
                got = step(q, k, v, causal=True, out=out)
                assert got.out is out
                same_bits(out.contiguous(), want.out)
                same_bits(got.lse, want.lse)
            assert (
                (wide[..., :8] == 7).all() and (wide[..., 48:] == 7).all() and (every[..., 1::2] == 7).all()
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_M22_keys_in_parts_are_merged(step: Runner, dtype: torch.dtype):
    """M22, B-spl-02, B-spl-03: any cut of the keys, empty parts among them, merged by the public lse."""
    for rows, scale in ((1, None), (4, 3.0), (2, 0.01)):
        q, k, v = qkv(2, (4, 2), rows, 1100, 64, dtype=dtype)
        whole = step(q, k, v, scale=scale)
        for cuts in ((0, 1, 1100), (0, 64, 64, 500, 1099, 1100), (0, 256, 512, 1100)):
            parts = [step(q, k[:, :, a:b], v[:, :, a:b], scale=scale) for a, b in itertools.pairwise(cuts)]
            merged = parts[0]
            for part in parts[1:]:
                merged = polyflash.merge(*merged, *part)
            near(merged.out.to(dtype), whole.out, 2 * ROUNDING[dtype], f"{cuts}")
            torch.testing.assert_close(merged.lse, whole.lse, rtol=2e-6, atol=2e-5)


def test_B_spl_04_weights_sum_to_one(step: Runner):
    """V = 1 gives 1 whatever the split: no key is counted twice and none is left out."""
    for keys in (1, 257, 1025, 4097):
        for rows, dtype in ((1, torch.float32), (4, torch.bfloat16)):
            q, k, v = qkv(1, (4, 2), rows, keys, 64, dtype=dtype)
            got = step(q, k, torch.ones_like(v))
            torch.testing.assert_close(got.out, torch.ones_like(got.out), rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", (2, 3, 5, 7, 8, 12))
def test_M25_groups_are_expanded_keys(step: Runner, group: int, dtype: torch.dtype):
    """B-gqa-02: query head h reads key/value head h // group."""
    for rows in (1, 3):
        q, k, v = qkv(2, (2 * group, 2), rows, 300, 32, dtype=dtype)
        got = step(q, k, v, causal=True)
        one = step(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), causal=True)
        near(got.out, one.out, ROUNDING[dtype])
        torch.testing.assert_close(got.lse, one.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ("plain", "window", "sinks", "softcap"))
def test_M24_step_by_step_is_prefill(step: Runner, name: str, dtype: torch.dtype):
    """B-cau-06, B-cau-12: one row over a growing cache is that row of the whole prefill; so are chunks."""
    options: dict[str, Any] = {
        "plain": {}, "window": {"window": (50, None)}, "sinks": {"sinks": torch.randn(4)},
        "softcap": {"softcap": 4.0},
    }[name]  # fmt: skip
    q, k, v = qkv(2, (4, 2), 150, 150, 32, dtype=dtype)
    with torch.no_grad():
        whole = polyflash.attention(q, k, v, causal=True, return_lse=True, **options)
    for at in (0, 1, 2, 63, 64, 100, 149):
        one = step(q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1], causal=True, **options)
        near(one.out, whole.out[:, :, at : at + 1], ROUNDING[dtype], f"{name} {at}")
        torch.testing.assert_close(one.lse, whole.lse[:, :, at : at + 1], rtol=1e-5, atol=1e-5)
        cache = step(q[:, :, at : at + 1], k, v, causal=True, kv_lens=ints(at + 1, at + 1), **options)
        near(cache.out, one.out, ROUNDING[dtype], f"{name} {at} of a longer cache")
    for start, end in ((0, 3), (60, 68), (141, 149)):
        rows = slice(start, end)
        some = step(q[:, :, rows], k[:, :, :end], v[:, :, :end], causal=True, **options)
        near(some.out, whole.out[:, :, rows], ROUNDING[dtype], f"{name} rows {start} to {end}")


def test_a_decode_row_has_what_it_promises():
    rows = [row for row in USUAL if row.phase is Phase.DECODE]
    for row in rows:
        assert row.features >= PROMISED, f"{row.name} lost {PROMISED - row.features}"
        assert Feature.BATCH_INVARIANT not in row.features and Feature.DROPOUT not in row.features
        assert row.dtypes >= set(NAMES) and row.max_head_dim >= 256


def test_few_rows_take_the_decode_row():
    """By themselves, and no others; batch_invariant=True and gradients leave them to the forward row."""
    q, k, v, _ = make(named("step-group-2"))
    for row in USUAL:
        if row.phase is not Phase.DECODE:
            continue

        def chosen(q: Tensor, k: Tensor, v: Tensor, row: Any = row, **options: Any) -> Any:
            plan = polyflash.explain(q, k, v, backend=row.backend, **options)
            assert {verdict.row.phase for verdict in plan.verdicts} <= {Phase.DECODE, Phase.FORWARD}
            return plan.chosen

        assert chosen(q, k, v) is row and chosen(q, k, v, causal=True, window=(9, 0)) is row
        assert chosen(q, k, v, batch_invariant=True).phase is Phase.FORWARD
        assert chosen(q.clone().requires_grad_(), k, v).phase is Phase.FORWARD
        many, short, long = q.expand(3, 4, 9, 64), k[:, :, :20], k[:, :, :1].expand(3, 2, 1024, 64)
        assert chosen(many, short, short).phase is Phase.FORWARD
        assert chosen(many, long, long) is row
        most = MOST_SHARED_ROWS if device.DEVICE.type == "cpu" else PACKED_ROWS
        assert chosen(q.expand(3, 4, most // 2, 64), long, long) is row
        assert chosen(q.expand(3, 4, most // 2 + 1, 64), long, long).phase is Phase.FORWARD


def test_spy_sees_the_row(step: Runner, monkeypatch: pytest.MonkeyPatch):
    """The module that the plan names is the one that is called, once per call."""
    from importlib import import_module

    step.skip_unless_here()
    module = import_module(step.row.module)
    calls = []
    original = module.run

    def spied(launch: Any, *args: Any) -> Any:
        calls.append(launch.row)
        return original(launch, *args)

    monkeypatch.setattr(module, "run", spied)
    monkeypatch.setattr(torch_ops, "_routes", {})
    monkeypatch.setattr(repeats, "_known", {})
    monkeypatch.setattr(repeats, "learn", lambda *x: None)  # each call is run by its route
    q, k, v, options = make(named("step-group-2"))
    step(q, k, v, **options)
    step(q, k, v, **options)
    assert calls == [step.row, step.row]


@pytest.mark.parametrize("softcap", (5e-324, 6e-46, 1e-40, 1e30, 1e39))
@pytest.mark.parametrize("rows, dtype", [(1, "float32"), (3, "bfloat16"), (40, "float32")])
def test_a_softcap_that_float32_does_not_hold(step: Runner, softcap: float, rows: int, dtype: str):
    """Scores are ±0 then, or as they were; never NaN where a score is 0."""
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(1, 4, rows, 8, generator=generator) * 3
    k, v = (torch.randn(1, 2, 37, 8, generator=generator) for _ in range(2))
    q[:, 1] = 0.0
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    got = step(q, k, v, softcap=softcap)
    same = step(q, k, v, scale=0.0) if softcap < 1 else step(q, k, v)
    near(got.out, same.out.double(), ROUNDING[q.dtype])
    near(got.lse, same.lse.double(), 1e-6)
