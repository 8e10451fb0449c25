"""The forward kernel on pages: where a row is read from changes, and no bit of what is made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from polyflash.backends.cpu.configs import Config
from tests.backends.cpu.test_forward_kernel import HERE, at_page_end, attend, randn
from tests.tolerance import same_bits

pytestmark = pytest.mark.skipif(HERE.arch != "avx512", reason="the kernel needs AVX-512")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE_SIZES = (1, 2, 3, 7, 16, 100, 128, 1000)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def paged(x, page_size, gap=0, unused=math.nan):
    """(pool, table) of x (batch, heads, keys, D): pages shuffled, with `gap` rows between them, and what no
    key stands in filled with `unused`."""
    batch, heads, keys, dims = x.shape
    rows = -(-keys // page_size)
    order = torch.randperm(batch * rows + 3, generator=torch.Generator().manual_seed(page_size))
    table = order[: batch * rows].reshape(batch, rows).int()
    pool = torch.full((len(order), page_size + gap, heads, dims), unused, dtype=x.dtype)[:, :page_size]
    for b in range(batch):
        for j in range(keys):
            pool[table[b, j // page_size], j % page_size] = x[b, :, j]
    return pool.transpose(1, 2), table


def inputs(dtype, rows, keys, dims, dims_v, batch=2):
    q = randn(batch, 4, rows, dims, dtype=dtype)
    return q, *(randn(batch, 2, keys, n, dtype=dtype, seed=n) for n in (dims, dims_v))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_change_no_bit(dtype, page_size):
    q, k, v = inputs(dtype, 70, 301, 40, 24)
    v[:, :, 5::17, 3], v[0, 1, 299, 1] = math.inf, math.nan
    lens = ints(301, 130)
    k_pool, table = paged(k, page_size)
    v_pool, _ = paged(v, page_size, gap=1)
    slopes = torch.tensor([0.5, 0.1, 0.2, 0.4])
    for more in (
        {"causal": True},
        {"window_left": 30, "window_right": 2},
        {"kv_starts": ints(3, 45), "softcap": 3.0},
        {"alibi_slopes": slopes, "sinks": slopes, "q_offset": ints(231, 7)},
    ):
        want = attend(q, k, v, kv_lens=lens, **more)
        got = attend(q, k_pool, v_pool, kv_lens=lens, page_table=table, **more)
        for x, y, name in zip(got, want, ("out", "lse"), strict=True):
            same_bits(x, y, f"{name} of {more}")


@pytest.mark.parametrize("page_size", (3, 64))
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_pools_and_table(dtype, page_size):
    q, k, v = inputs(dtype, 5, 77, 64, 64)
    want, _ = attend(q, k, v, kv_lens=ints(77, 50))
    k_pool, table = paged(k, page_size)
    v_pool, _ = paged(v, page_size)
    fused = torch.stack([k_pool, v_pool], -1)  # channels a stride apart
    spread = torch.full((*table.shape, 3), -7, dtype=torch.int32)
    spread[..., 1] = table
    got, _ = attend(q, fused[..., 0], fused[..., 1], kv_lens=ints(77, 50), page_table=spread[..., 1])
    same_bits(got, want, "channels a stride apart")
    fused = torch.cat([k_pool, v_pool], 1)  # K and V heads in one page
    got, _ = attend(q, fused[:, :2], fused[:, 2:], kv_lens=ints(77, 50), page_table=spread[..., 1])
    same_bits(got, want, "one pool")


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_of_paged_requests(dtype, causal):
    lens_q, lens_k = (40, 0, 65, 130, 11), (50, 30, 1, 290, 300)
    cu_q, cu_k = (ints(0, *np.cumsum(n)) for n in (lens_q, lens_k))
    rows = sum(lens_q) + 2
    q, (k, v) = randn(1, 4, rows, 64, dtype=dtype), inputs(dtype, 1, 300, 64, 64, batch=5)[1:]
    flat = [torch.cat([x[b, :, :n] for b, n in enumerate(lens_k)], 1)[None] for x in (k, v)]
    want = attend(q, *flat, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for page_size in (1, 16, 100):
        (k_pool, table), (v_pool, _) = paged(k, page_size), paged(v, page_size)
        more = {"kv_lens": ints(*lens_k), "page_table": table}
        got = attend(q, k_pool, v_pool, causal=causal, cu_seqlens_q=cu_q, **more)
        for x, y in zip(got, want, strict=True):
            same_bits(x, y, f"pages of {page_size}")


def test_entries_beyond_the_live_length_are_any_bits():
    q, k, v = inputs(torch.bfloat16, 20, 300, 64, 64)
    (k_pool, table), (v_pool, _) = paged(k, 16), paged(v, 16)
    want, _ = attend(q, k, v, kv_lens=ints(97, 0))
    table[0, 7:], table[1] = 2**31 - 1, -(2**31)
    got, _ = attend(q, k_pool, v_pool, kv_lens=ints(97, 0), page_table=table)
    same_bits(got, want, "out")


@pytest.mark.parametrize("page", (-1, -(2**31), 2**31 - 1, None))
@pytest.mark.parametrize("page_size", (1, 3, 100, 128))
def test_an_entry_that_names_no_page_ends_the_keys(page_size, page):
    """Such an entry is refused before the call, so another thread must have written it: no byte outside the
    pool is read, and the keys from there on are not seen."""
    q, k, v = inputs(torch.bfloat16, 70, 301, 40, 40)
    (k_pool, table), (v_pool, _) = (paged(x, page_size, unused=0.0) for x in (k, v))
    for entry in (0, 150 // page_size, 299 // page_size):
        broken = table.clone()
        broken[1, entry] = len(k_pool) if page is None else page
        for more in ({}, {"causal": True, "offset": 240}):
            want, lse = attend(q, k, v, kv_lens=ints(301, entry * page_size), **more)
            pools = at_page_end(k_pool), at_page_end(v_pool)
            got, got_lse = attend(q, *pools, kv_lens=ints(301, 301), page_table=broken, **more)
            if more:  # the offset is given, so that nothing else depends on the length
                same_bits(got, want, f"entry {entry}")
                same_bits(got_lse, lse, f"lse, entry {entry}")
            else:
                assert torch.allclose(got_lse, lse, atol=1e-4)


def test_a_narrower_set_reads_pages():
    q, k, v = inputs(torch.float32, 5, 77, 40, 40)
    (k_pool, table), (v_pool, _) = paged(k, 7), paged(v, 7)
    config = Config(64, 2, "f32", "avx2")
    want, _ = attend(q, k, v, config, kv_lens=ints(77, 40))
    got, _ = attend(q, k_pool, v_pool, config, kv_lens=ints(77, 40), page_table=table)
    same_bits(got, want, "avx2")


@pytest.mark.parametrize("dtype", DTYPES)
def test_members_of_few_rows_are_decoded_whatever_their_neighbours(dtype):
    lens_q, lens_k = (1, 1, 0, 40, 3, 1, 4, 2), (700, 1, 7, 300, 9, 0, 650, 130)
    cu_q, cu_k = (ints(0, *np.cumsum(n)) for n in (lens_q, lens_k))
    q = randn(1, 4, sum(lens_q) + 1, 64, dtype=dtype)
    k, v = (randn(1, 2, sum(lens_k), 64, dtype=dtype, seed=i) for i in (1, 2))
    more = {"causal": True, "softcap": 5.0}
    got = attend(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **more)
    for b, (rows, keys) in enumerate(zip(lens_q, lens_k, strict=True)):
        if not rows * keys:
            continue
        mine = slice(int(cu_q[b]), int(cu_q[b + 1]))
        x, *kv = q[:, :, mine], *(y[:, :, int(cu_k[b]) : int(cu_k[b + 1])] for y in (k, v))
        alone = attend(x, *kv, cu_seqlens_q=ints(0, rows), cu_seqlens_k=ints(0, keys), **more)
        for y, z in zip(got, alone, strict=True):
            same_bits(y[:, :, mine], z, f"member {b}")
        want, lse = attend(x, *kv, **more)
        assert torch.allclose(alone[0].float(), want.float(), atol=1e-5 if dtype.itemsize == 4 else 1e-2)
        assert torch.allclose(alone[1], lse, atol=1e-4)
