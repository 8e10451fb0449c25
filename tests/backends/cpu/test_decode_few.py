"""Decode of at most 8 rows: how many splits an item walks changes no bit."""

from __future__ import annotations

import math

import pytest

from polyflash.backends.cpu import pool
from tests.backends.cpu.test_decode_many import decode
from tests.backends.cpu.test_forward_kernel import HERE, randn
from tests.backends.cpu.test_paged_kernel import DTYPES, ints, paged
from tests.tolerance import same_bits

pytestmark = pytest.mark.skipif(HERE.arch != "avx512", reason="the kernel needs AVX-512")
KEYS, SPLIT = 1100, 128  # nine splits, the last of them short


def same_for_any_splits(monkeypatch, q, k, v, label, **options):
    """`decode` with items of one split, and the same bits from fewer items."""
    from polyflash.backends.cpu import decode as host

    counts, launch = [], pool.run

    def count(kernel, block, items, *more):
        counts.append(items)
        launch(kernel, block, items, *more)

    monkeypatch.setattr(pool, "run", count)
    monkeypatch.setattr(host, "ITEMS_PER_THREAD", 0.01)
    monkeypatch.setattr(
        host, "_heads_per_item", lambda k, splits, threads: 1 if k.stride(1) > k.stride(2) else 2
    )
    monkeypatch.setattr(host, "MOST_SPLITS", 1)
    want = decode(q, k, v, split=SPLIT, **options)
    for most in (2, 4, 9):
        monkeypatch.setattr(host, "MOST_SPLITS", most)
        got = decode(q, k, v, split=SPLIT, **options)
        for x, y, name in zip(got, want, ("out", "lse"), strict=True):
            same_bits(x, y, f"{name} of {label}, {most} splits")
    assert counts == sorted(counts, reverse=True) and counts[-1] * 4 < counts[0], (label, counts)
    return want


@pytest.mark.parametrize("layout", ("heads first", "keys first"))
@pytest.mark.parametrize(
    "dims", (40, 128)
)  # blocks of 96 keys cross the borders of splits, blocks of 32 do not
@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_per_item_change_no_bit(monkeypatch, dtype, dims, layout):
    q = randn(2, 6, 1, dims, dtype=dtype)
    k, v = (randn(2, 3, KEYS, dims, dtype=dtype, seed=n) for n in (1, 2))
    if layout == "keys first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    v[0, :, 777, 3], v[1, 1, 130] = math.nan, math.inf
    for more in ({}, {"window_left": 500, "window_right": 0}, {"kv_lens": ints(1090, 513), "softcap": 3.0}):
        out, _ = same_for_any_splits(monkeypatch, q, k, v, more, **more)
        assert out[0, :, :, 3].isnan().all() and out[0, :, :, :3].isfinite().all(), more


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_per_item_of_rows_that_see_different_keys(monkeypatch, dtype):
    q = randn(2, 4, 3, 64, dtype=dtype)
    k, v = (randn(2, 2, KEYS, 64, dtype=dtype, seed=n) for n in (1, 2))
    v[:, :, 1098:, 5], v[:, :, 770, 9] = math.nan, math.nan
    want = same_for_any_splits(monkeypatch, q, k, v, "causal", causal=True)
    assert want[0][:, :, 0, 5].isfinite().all() and want[0][:, :, 2, 5].isnan().all()
    lens = ints(1100, 260)
    k_pool, table = paged(k, 7)
    v_pool, _ = paged(v, 7, gap=1)
    want = decode(q, k, v, split=SPLIT, kv_lens=lens, causal=True)
    got = same_for_any_splits(
        monkeypatch, q, k_pool, v_pool, "pages", kv_lens=lens, page_table=table, causal=True
    )
    for x, y, name in zip(got, want, ("out", "lse"), strict=True):
        same_bits(x, y, name)


def test_items_stay_enough():
    from polyflash.backends.cpu import decode as host

    for splits, threads in (
        (1, 1),
        (15, 1),
        (16, 1),
        (31, 2),
        (48, 2),
        (63, 2),
        (64, 2),
        (4096, 2),
        (100, 64),
    ):
        together = host._splits_per_item(splits, threads)
        assert 1 <= together <= host.MOST_SPLITS
        enough = host.ITEMS_PER_THREAD * threads
        assert together == 1 or splits // together >= enough
        assert together == host.MOST_SPLITS or splits // (together + 1) < enough
