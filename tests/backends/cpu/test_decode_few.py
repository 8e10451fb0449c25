"""Decode of at most 8 rows: how many splits an item walks changes no bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

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
    monkeypatch.setattr(host, "_heads_per_item", lambda num_kv_heads, splits, threads: 2)
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


@pytest.mark.parametrize(("rows", "channels"), ((1, 64), (1, 128), (2, 128), (4, 128), (8, 128)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_by_turns_changes_no_bit(monkeypatch, dtype, rows, channels, target=HERE):
    """Of whole tensors K and V are read by turns, across splits too, of pages block after block."""
    q = randn(2, 3, rows, channels, dtype=dtype)
    k, v = (randn(2, 3, KEYS, channels, dtype=dtype, seed=n) for n in (1, 2))
    v[0, 2, 777, 3], v[1, 1, 130] = math.nan, math.inf
    k_pool, v_pool, table = paged(k, 16)[0], *paged(v, 16)
    for more in (
        {},
        {"window_left": 700, "window_right": 0},
        {"kv_lens": ints(1090, 513), "softcap": 3.0},
        {"kv_starts": ints(45, 300), "scale": -0.2},
    ):
        more = {"kv_lens": ints(KEYS, KEYS), "target": target, **more}
        want = decode(q, k_pool, v_pool, split=SPLIT, page_table=table, **more)
        got = same_for_any_splits(monkeypatch, q, k, v, f"whole tensors, {more}", **more)
        for x, y, name in zip(got, want, ("out", "lse"), strict=True):
            same_bits(x, y, name)


@pytest.mark.parametrize("rows", (4, 8))
def test_nor_by_turns_without_dots(monkeypatch, rows):
    """bfloat16 on a CPU whose dots are slower, or that has none."""
    without = replace(HERE, features=HERE.features - {"avx512_bf16"})
    test_reading_by_turns_changes_no_bit(monkeypatch, torch.bfloat16, rows, 128, without)


@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_side_by_side_change_no_bit(monkeypatch, dtype, rows):
    """Of pages of 128 channels, 8 heads of a key are read before the next key; of whole tensors, heads."""
    from polyflash.backends.cpu import decode as host

    taken, decides = [], host._side_by_side
    monkeypatch.setattr(host, "_side_by_side", lambda *x: taken.append(decides(*x)) or taken[-1])
    monkeypatch.setattr(host, "ITEMS_PER_THREAD", 0.01)
    q = randn(2, 16, rows, 128, dtype=dtype)
    k, v = (randn(2, 16, KEYS, 128, dtype=dtype, seed=n) for n in (1, 2))
    v[0, :, 777, 3], v[1, 9, 130] = math.nan, math.inf
    pools = [(paged(k, size)[0], *paged(v, size)) for size in (16, 7)]
    sinks = randn(16, seed=4)
    for more in (
        {},
        {"window_left": 700, "window_right": 0},
        {"kv_lens": ints(1090, 513), "softcap": 3.0},
        {"kv_starts": ints(45, 300), "causal": True, "sinks": sinks},
    ):
        more = {"kv_lens": ints(KEYS, KEYS), **more}
        want = decode(q, k, v, split=SPLIT, **more)
        for k_pool, v_pool, table in pools:
            for most in (1, 4):
                monkeypatch.setattr(host, "MOST_SPLITS", most)
                taken.clear()
                got = decode(q, k_pool, v_pool, split=SPLIT, page_table=table, **more)
                assert taken == [True], more
                for x, y, name in zip(got, want, ("out", "lse"), strict=True):
                    same_bits(x, y, f"{name} of {more}, {most} splits, pages of {k_pool.shape[2]}")


def test_heads_lie_side_by_side_in_pages_only():
    from polyflash.backends.cpu import decode as host
    from polyflash.spec import Arguments

    x = randn(6, 16, 8, 128).transpose(1, 2)
    pages = Arguments(page_table=ints(3, 1)[None])
    assert host._side_by_side(pages, x, x)
    assert not host._side_by_side(Arguments(), x, x)
    apart = randn(6, 16, 9, 128)[:, :, ::2].transpose(1, 2)
    for other in (x.contiguous(), apart, randn(6, 16, 8, 96).transpose(1, 2)):
        assert not host._side_by_side(pages, x, other)
        assert not host._side_by_side(pages, other, x)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_key_of_zeros_has_all_heads(dtype):
    from polyflash.backends.cpu import configs, decode_configs

    key = decode_configs.DecodeKey("avx512", "f32", dtype, 1)
    tiles = decode_configs.scratch(key, 128, 128, 128)
    row = decode_configs.WIDTH * configs.STORAGE_BYTES[dtype]
    assert tiles.gather - tiles.zero >= decode_configs.MOST_HEADS * row


def test_a_table_that_changes_under_the_walk_reads_zeros(monkeypatch):
    """An entry that names no page, as another thread may write one after the check."""
    from polyflash.backends.cpu import decode as host

    monkeypatch.setattr(host, "ITEMS_PER_THREAD", 0.01)
    q, k, v = (randn(1, 8, n, 128, seed=n) for n in (1, 512, 512))
    k_pool, table = paged(k, 16)
    v_pool, _ = paged(v, 16)
    table[0, 5], table[0, 20] = len(k_pool), -1
    k[:, :, 80:96], v[:, :, 80:96], k[:, :, 320:336], v[:, :, 320:336] = 0, 0, 0, 0
    got, want = decode(q, k_pool, v_pool, page_table=table, kv_lens=ints(512)), decode(q, k, v)
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
        enough = 2 * host.ITEMS_PER_THREAD * threads
        together = host._splits_per_item(splits, enough)
        assert 1 <= together <= host.MOST_SPLITS
        assert together == 1 or splits // together >= enough
        assert together == host.MOST_SPLITS or splits // (together + 1) < enough


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (64, 128, 256))
def test_heads_of_long_pages_are_walked_one_by_one(monkeypatch, dtype, size):
    """Where the tokens of a head lie together in a page; the bits are those of whole tensors."""
    from polyflash.backends.cpu import decode as host

    heads, decides = [], host._heads_per_item
    monkeypatch.setattr(host, "_heads_per_item", lambda *x: heads.append(decides(*x)) or heads[-1])
    q = randn(2, 8, 1, 128, dtype=dtype)
    k, v = (randn(2, 4, KEYS, 128, dtype=dtype, seed=n) for n in (1, 2))
    lens = ints(KEYS, 700)
    want = decode(q, k, v, split=SPLIT, kv_lens=lens)
    heads.clear()
    (k_pool, table), (v_pool, _) = paged(k, size), paged(v, size)
    for by_head in (True, False):
        by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_pool, v_pool)]
        pools = [x.contiguous() for x in by_token] if by_head else by_token
        got = decode(q, *pools, split=SPLIT, kv_lens=lens, page_table=table)
        assert len(heads) == (0 if by_head and size >= host.LONG_PAGE else 1), (size, by_head)
        heads.clear()
        for x, y, name in zip(got, want, ("out", "lse"), strict=True):
            same_bits(x, y, name)
