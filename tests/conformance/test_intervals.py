"""Interval lists and block grids: holes stay holes, alone and together with every other rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import polyflash
from polyflash import Mask, torch_ops
from polyflash.spec import Arguments
from polyflash.workloads import make, random_mask
from tests.catalogue import named, with_dtype, workloads
from tests.conformance.gradients import checked, gradients
from tests.conformance.rows import DTYPES, NAMES, Runner, ints, qkv
from tests.memory import check_guarded, check_hidden, guard, guard_value
from tests.tolerance import Figures, check, expect, near, same_bits, visible

LISTED = tuple(w.name for w in workloads("ci") if w.intervals)
REORDERED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def lists(*row_blocks: tuple[tuple[int, int], ...], rows: int) -> Mask:
    """One list for all requests and heads, padded with empty intervals."""
    n = max(map(len, row_blocks))
    padded = torch.tensor([(*block, *((0, 0),) * (n - len(block))) for block in row_blocks])
    return Mask.intervals(*padded.int().unbind(-1), rows=rows)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("name", LISTED)
def test_lists_equal_their_written_out_mask(run: Runner, name: str, dtype: str):
    """M35: the same row with the bool mask of the same pairs."""
    workload = with_dtype(named(name), dtype)
    run.skip_unless(workload)
    q, k, v, options = make(workload)
    got = run.checked(q, k, v, label=name, **options)
    dense = run(q, k, v, mask=visible(q, k, **options))
    assert torch.equal(got.lse == -torch.inf, dense.lse == -torch.inf)
    near(got.out, dense.out, REORDERED[q.dtype], name)


@pytest.mark.parametrize("rows", (1, 5, 16, 17, 64, 100, 128, 300))
def test_rows_of_a_block(run: Runner, rows: int):
    """Row blocks smaller and larger than tiles, dividing seqlen_q or not."""
    pool = Figures()
    for seqlen_q in (1, 33, 64, 100, 200):
        q, k, v = qkv(2, (4, 2), seqlen_q, 260, 16, seed=rows)
        blocks = -(-seqlen_q // rows)
        generator = torch.Generator().manual_seed(seqlen_q)
        for shape in ((blocks,), (2, blocks), (2, 4, blocks), (1, 4, blocks)):
            grid = torch.rand(*shape, 9, generator=generator) < 0.5
            mask = Mask.blocks(grid, rows=rows, keys=32)
            run.checked(q, k, v, mask=mask, label=f"{rows} {seqlen_q} {shape}", pool=pool)
    pool.hold(torch.float32, f"blocks of {rows} rows")


@pytest.mark.parametrize("keys", (1, 16, 48, 64, 128, 1000))
def test_blocks_are_their_grid(run: Runner, keys: int):
    q, k, v = qkv(1, (4, 2), 100, 300, 16)
    grid = torch.rand(1, 4, 4, -(-300 // keys), generator=torch.Generator().manual_seed(keys)) < 0.6
    written = grid.repeat_interleave(32, 2)[:, :, :100].repeat_interleave(keys, 3)[..., :300]
    got = run.checked(q, k, v, mask=Mask.blocks(grid, rows=32, keys=keys), label=f"{keys}")
    near(got.out, run(q, k, v, mask=written).out, REORDERED[torch.float32])


def test_one_hot_values_show_the_holes(run: Runner):
    """Read off V = I: exactly the listed keys, clamped to the last one."""
    mask = lists(((0, 3), (5, 6), (40, 999)), ((7, 7), (9, 20)), ((0, 0),), rows=2)
    q, k, v = torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 50, 8), torch.eye(50)[None, None]
    out, lse = run(q, k, v, mask=mask)
    want = torch.zeros(5, 50, dtype=torch.bool)
    want[:2, 0:3] = want[:2, 5:6] = want[:2, 40:] = want[2:4, 9:20] = True
    assert torch.equal(out[0, 0] > 0, want)
    assert lse[0, 0, 4] == -math.inf and (out[0, 0, 4] == 0).all()
    for i in range(5):
        for j in range(50):
            assert mask.visible(i, j, seqlen_q=5, seqlen_k=50) == bool(want[i, j])


def test_one_key_at_a_tile_edge(run: Runner):
    """A list of one key: the first or last of a tile, whatever its size, is not skipped with the tile."""
    keys = (0, 1, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 513, 1023, 1024, 1099)
    q, k, v = qkv(1, 1, len(keys), 1100, 16)
    got = run(q, k, v, mask=lists(*(((n, n + 1),) for n in keys), rows=1))
    near(got.out, v[:, :, list(keys)], REORDERED[torch.float32])
    for n in keys:
        alone = run(q, k, v, mask=lists(((n, n + 1),), rows=64))
        near(alone.out, v[:, :, n : n + 1].expand_as(q), REORDERED[torch.float32], f"key {n}")
    both = run(q, k, v, mask=lists(tuple((n, n + 1) for n in keys), rows=64))
    near(both.out, run(q, k[:, :, list(keys)], v[:, :, list(keys)]).out, REORDERED[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_holes(run: Runner, dtype: torch.dtype):
    """P5: holes within a visited tile, whole tiles, and what stands beyond the last interval."""
    q, k, v = qkv(1, (4, 2), 100, 400, 32, dtype=dtype)
    mask = lists(((3, 70), (75, 76), (200, 330)), ((60, 61), (63, 64), (320, 330)), ((64, 128),), rows=40)
    hole = ~visible(q, k, mask=mask)[0, 0].any(0)
    assert int(hole.sum()) > 100
    want = run.checked(q, k, v, mask=mask)
    for value in (math.nan, math.inf, 65504.0):
        bad = [torch.where(hole[:, None], value, x).to(dtype) for x in (k, v)]
        got = run(q, *bad, mask=mask)
        same_bits(got.out, want.out)
        same_bits(got.lse, want.lse)
    for key, rows in ((75, (*range(40), *range(80, 100))), (60, range(80)), (100, range(80, 100))):
        bad_v = v.clone()
        bad_v[:, :, key] = math.nan
        got = run(q, k, bad_v, mask=mask)
        assert got.out.isnan().all(-1)[0, 0].nonzero().flatten().tolist() == list(rows), key


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("name", LISTED)
def test_invisible_bits(run: Runner, name: str, dtype: str):
    workload = with_dtype(named(name), dtype)
    run.skip_unless(workload)
    check_hidden(run, *make(workload, seed=2))


@pytest.mark.parametrize("name", LISTED)
def test_guard_bands(run: Runner, name: str):
    """q, k, v, out and the lists themselves stand between guards."""
    workload = named(name)
    run.skip_unless(workload)
    q, k, v, options = make(workload, seed=1)
    check_guarded(run, q, k, v, options)
    mask = options.pop("mask")
    want = run(q, k, v, mask=mask, **options)
    for turn in (0, 1):
        box = guard(mask.bounds)
        box.fill_guards(guard_value(torch.int32, turn))
        got = run(q, k, v, mask=Mask(bounds=box.view, rows=mask.rows), **options)
        same_bits(got.out, want.out)
        box.assert_intact(guard_value(torch.int32, turn), f"lists, run {turn}")


def test_lists_and_other_rules(run: Runner):
    """ANDed with causal, window, lengths and segments, in every head ratio."""
    generator = torch.Generator().manual_seed(0)
    others: tuple[dict[str, Any], ...] = (
        {"causal": True},
        {"causal": "top_left"},
        {"causal": True, "q_offset": 33},
        {"window": (50, 3)},
        {"causal": True, "window": (70, None)},
        {"kv_lens": ints(260, 70), "kv_starts": ints(10, 0)},
        {"causal": True, "kv_lens": ints(0, 130)},
    )
    pool = Figures()
    for heads in ((4, 4), (4, 1), (6, 2)):
        q, k, v = qkv(2, heads, 130, 260, 16)
        for options in others:
            for shape in ((2, 1), (1, heads[0])):
                grid = torch.rand(*shape, 9, 11, generator=generator) < 0.5
                mask = Mask.blocks(grid, rows=16, keys=24)
                run.checked(q, k, v, mask=mask, label=f"{heads} {shape} {options}", pool=pool, **options)
                both = mask & Mask.window(30, 30)
                run.checked(q, k, v, mask=both, label=f"{heads} {shape} window", pool=pool)
    pool.hold(torch.float32, "lists and other rules")
    ids = torch.arange(130).div(40, rounding_mode="floor").int().expand(2, 130)
    k_ids = torch.arange(260).div(70, rounding_mode="floor").int().expand(2, 260)
    run.checked(q, k, v, mask=mask & Mask.segments(ids, k_ids) & Mask.causal())


def test_lists_and_a_bool_mask(run: Runner):
    """Both at once, as the op takes them."""
    q, k, v = qkv(2, (4, 2), 100, 200, 16)
    rules = Mask.blocks(
        torch.rand(2, 4, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.5, rows=16, keys=32
    )
    for shape in ((2, 4, 100, 200), (2, 1, 1, 200), (100, 200), (1, 4, 100, 1)):
        mask = random_mask(shape, torch.Generator().manual_seed(0))
        run(q, k, v, mask=rules), run(q, k, v, mask=mask)  # skips where the row has either not
        args = Arguments(
            need_lse=True,
            mask=mask,
            intervals=rules.bounds,
            interval_rows=rules.rows,
            backend=run.row.backend,
        )
        out, lse = torch_ops.call(q, k, v, args)
        check(out, lse, expect(q, k, v, mask=visible(q, k, mask=rules) & mask), label=f"{shape}")


def test_lists_and_sinks_bias_softcap(run: Runner):
    q, k, v = qkv(2, (4, 2), 70, 130, 16)
    mask = lists(((5, 20), (100, 101)), ((0, 0),), rows=40)
    options = {
        "sinks": torch.randn(4),
        "bias": torch.randn(70, 130),
        "softcap": 5.0,
        "alibi_slopes": torch.rand(4),
    }
    for name, value in options.items():
        got = run.checked(q, k, v, mask=mask, label=name, **{name: value})
        assert (got.out[:, :, 40:] == 0).all()


def test_empty_intervals_anywhere(run: Runner):
    """Empty intervals before, between and behind; equal bits with the list without them."""
    q, k, v = qkv(1, 2, 60, 200, 16)
    want = run(q, k, v, mask=lists(((10, 50), (60, 90)), ((70, 200), (200, 200)), rows=32))
    for one, two in (
        (((0, 0), (10, 50), (55, 55), (60, 90)), ((70, 70), (70, 200), (3, 3), (0, 0))),
        (((10, 50), (0, 0), (60, 90), (999, 999)), ((0, 0), (0, 0), (0, 0), (70, 300))),
    ):
        got = run(q, k, v, mask=lists(one, two, rows=32))
        same_bits(got.out, want.out)
        same_bits(got.lse, want.lse)
    nothing = run(q, k, v, mask=Mask.blocks(torch.zeros(2, 4, dtype=torch.bool), rows=32, keys=64))
    assert (nothing.out == 0).all() and (nothing.lse == -math.inf).all()
    none = torch.zeros(2, 0, dtype=torch.int32)
    assert (run(q, k, v, mask=Mask.intervals(none, none, rows=32)).out == 0).all()
    whole = run(q, k, v, mask=Mask.blocks(torch.ones(2, 4, dtype=torch.bool), rows=32, keys=64))
    near(whole.out, run(q, k, v).out, REORDERED[torch.float32])


def test_touching_intervals_are_one(run: Runner):
    q, k, v = qkv(1, 2, 60, 200, 16)
    one = run(q, k, v, mask=lists(((10, 150),), ((0, 200),), rows=32))
    two = run(q, k, v, mask=lists(((10, 70), (70, 150)), ((0, 1), (1, 200)), rows=32))
    near(two.out, one.out, REORDERED[torch.float32])


def test_zero_sizes(run: Runner):
    for seqlen_q, seqlen_k in ((0, 9), (9, 0), (0, 0)):
        q, k, v = qkv(2, 2, seqlen_q, seqlen_k, 16)
        grid = torch.ones(-(-seqlen_q // 4), -(-seqlen_k // 4), dtype=torch.bool)
        out, lse = run(q, k, v, mask=Mask.blocks(grid, rows=4, keys=4))
        assert out.shape == q.shape and (lse == -math.inf).all()


def test_a_head_has_its_own_lists(run: Runner):
    """Every head and request differs; each equals the call on it alone."""
    q, k, v = qkv(2, (4, 2), 50, 130, 16)
    grid = torch.rand(2, 4, 4, 9, generator=torch.Generator().manual_seed(5)) < 0.4
    got = run(q, k, v, mask=Mask.blocks(grid, rows=16, keys=16))
    for b in range(2):
        for h in range(4):
            one = run(
                q[b : b + 1, h : h + 1], k[b : b + 1, h // 2 : h // 2 + 1], v[b : b + 1, h // 2 : h // 2 + 1],
                mask=Mask.blocks(grid[b, h], rows=16, keys=16),
            )  # fmt: skip
            near(got.out[b : b + 1, h : h + 1], one.out, REORDERED[torch.float32], f"{b} {h}")


@pytest.mark.parametrize("dtype", (*NAMES, "float64"))
@pytest.mark.parametrize("name", LISTED)
def test_gradients(backend: str, name: str, dtype: str):
    q, k, v, options = make(with_dtype(named(name), dtype), seed=3)
    got = checked(q, k, v, backend=backend, label=name, **options)
    seen = visible(q, k, **options).unflatten(1, (k.shape[1], -1)).any(2).any(2)
    assert (got["k"][~seen] == 0).all() and (got["v"][~seen] == 0).all()


def test_gradients_ignore_nan_in_holes(backend: str):
    q, k, v = qkv(1, (4, 2), 100, 400, 32)
    mask = lists(((3, 70), (200, 330)), ((60, 61), (320, 330)), rows=64)
    dout = torch.randn_like(q)
    want = gradients(q, k, v, dout, backend=backend, mask=mask)
    hole = ~visible(q, k, mask=mask)[0, 0].any(0)[:, None]
    poisoned = (torch.where(hole, math.nan, x) for x in (k, v))
    got = gradients(q, *poisoned, dout, backend=backend, mask=mask)
    for n in "qkv":
        same_bits(got[n], want[n], n)


def test_dense_lists_need_no_more_memory_than_a_tile():
    """Many intervals per list: what is looked up is one tile's pairs."""
    q, k, v = (x.to(torch.float32) for x in qkv(1, 1, 64, 4096, 16))
    starts = torch.arange(0, 4096, 2, dtype=torch.int32)[None]
    got = polyflash.attention(q, k, v, mask=Mask.intervals(starts, starts + 1, rows=64), backend="torch")
    want = polyflash.attention(q, k[:, :, ::2], v[:, :, ::2], backend="torch")
    near(got, want, 1e-6)


def test_runs_are_joined():
    grid = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    mask = Mask.blocks(grid, rows=8, keys=10)
    assert mask.bounds.dtype is torch.int32 and mask.bounds.shape == (1, 1, 2, 2, 2)
    assert mask.bounds[0, 0].tolist() == [[[0, 20], [30, 60]], [[70, 80], [0, 0]]]
