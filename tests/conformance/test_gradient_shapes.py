"""Gradients over sizes: tile borders, head dims, groups, few heads over many keys; without a reference."""

from __future__ import annotations

import itertools

import pytest
import torch

import polyflash
from tests.conformance.gradients import check_identities, checked, cotangents, gradients
from tests.conformance.rows import DTYPES, EDGES, HEAD_DIMS, ints, qkv
from tests.tolerance import same_bits

FAR = EDGES[::-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
def test_lengths(backend: str, causal: bool, dtype: torch.dtype):
    """B-wg-02, B-cau-11: every length around a tile border, as rows and as keys, square, tall and wide."""
    for shift in (0, 4, 9):
        for rows, keys in zip(EDGES, (*FAR[shift:], *FAR[:shift]), strict=True):
            q, k, v = qkv(1, (2, 1), rows, keys, 24, dtype=dtype, seed=rows)
            checked(q, k, v, backend=backend, causal=causal, label=f"{rows}x{keys}")


# The others above 256 are slow: each is a kernel to compile, and a large one.
WIDE = ((320, torch.bfloat16),)


@pytest.mark.parametrize(
    ("dim", "dtype"), (*itertools.product(HEAD_DIMS, DTYPES), *WIDE), ids=lambda x: str(x)
)
def test_head_dims(backend: str, dim: int, dtype: torch.dtype):
    """B-dim-01 to B-dim-05: odd, small and large; D_v alike, smaller and larger."""
    check_head_dim(backend, dim, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", (320, 512, 576))
def test_wide_head_dims(backend: str, dim: int, dtype: torch.dtype):
    check_head_dim(backend, dim, dtype)


def check_head_dim(backend: str, dim: int, dtype: torch.dtype) -> None:
    top = next(n for n in (64, 128, 256, 576) if dim <= n)
    for dim_v in dict.fromkeys((dim, max(1, dim // 2 - 1), min(top, dim + 33))):
        q, k, v = qkv(1, (2, 1), 37, 70, dim, dim_v, dtype=dtype, seed=dim)
        checked(q, k, v, backend=backend, causal=True, label=f"{dim}/{dim_v}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", (1, 2, 3, 4, 5, 6, 7, 8))
def test_groups(backend: str, group: int, dtype: torch.dtype):
    """P8: heads of 1, 2 and 3 groups, decode rows and prefill."""
    for kv_heads, rows, keys in ((1, 1, 130), (2, 17, 65), (3, 70, 70)):
        q, k, v = qkv(2, (kv_heads * group, kv_heads), rows, keys, 32, dtype=dtype, seed=group)
        checked(q, k, v, backend=backend, causal=True, label=f"{kv_heads}×{group} {rows}x{keys}")


FEW_HEADS: tuple[tuple[int, int, dict[str, object]], ...] = (
    (1, 3001, {}),
    (5, 2100, {"causal": True}),
    (70, 2050, {"window": (700, 0)}),
    (70, 2050, {"kv_lens": ints(1900), "kv_starts": ints(77), "causal": True}),
    (600, 90, {}),
    (600, 700, {"causal": True}),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(len(FEW_HEADS)))
def test_few_heads_many_keys(backend: str, case: int, dtype: torch.dtype):
    """Fewer heads than threads: what is then split along the keys is summed in a fixed order."""
    torch.set_num_threads(2)
    rows, keys, options = FEW_HEADS[case]
    heads = (1, 1) if case % 2 else (3, 1)
    q, k, v = qkv(1, heads, rows, keys, 32, 24, dtype=dtype, seed=keys)
    checked(q, k, v, backend=backend, label=f"{heads} {rows}x{keys} {list(options)}", **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_entries(backend: str, dtype: torch.dtype):
    """More entries than threads, a few rows each."""
    q, k, v = qkv(9, (6, 3), 7, 19, 16, dtype=dtype)
    checked(q, k, v, backend=backend, causal=True)
    checked(q, k, v, backend=backend, kv_lens=ints(*range(0, 18, 2)), label="lens")


def without_reference(backend: str, rows: int, keys: int, dtype: torch.dtype, **options: object) -> None:
    """G1 to G4 on sizes whose scores are never stored, and G11: the slope along a direction, by float64
    forward passes of the torch row."""
    q, k, v = qkv(1, (2, 1), rows, keys, 64, dtype=dtype)
    dout, dlse = cotangents(q, v)
    got = gradients(q, k, v, dout, dlse, backend=backend, **options)
    check_identities(got, q, k, v, dout, dlse, options, f"{rows}x{keys}")
    generator = torch.Generator().manual_seed(1)
    ways = {
        n: torch.randn(x.shape, generator=generator).double() for n, x in zip("qkv", (q, k, v), strict=True)
    }

    def loss(step: float) -> float:
        moved = [x.double() + step * u for x, u in zip((q, k, v), ways.values(), strict=True)]
        out, lse = polyflash.attention(*moved, return_lse=True, backend="torch", **options)
        return float((out * dout.double()).sum() + (lse * dlse.double()).sum())

    terms = torch.cat([(got[n].double() * u).flatten() for n, u in ways.items()])
    numeric, size = (loss(1e-4) - loss(-1e-4)) / 2e-4, float(terms.norm())
    limit = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    assert abs(numeric - float(terms.sum())) <= limit * size, (numeric, float(terms.sum()), size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_without_a_reference(backend: str, dtype: torch.dtype):
    without_reference(backend, 1500, 2100, dtype, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_sizes_without_a_reference(backend: str, dtype: torch.dtype):
    without_reference(backend, 9000, 16001, dtype, causal=True)
    without_reference(backend, 16001, 16001, dtype, window=(1000, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_larger_call_first(backend: str, dtype: torch.dtype):
    """§3.5.4, "passes alone, fails in sequence": reused scratch of a larger call holds NaN."""
    small = qkv(1, (2, 1), 17, 33, 24, dtype=dtype)
    dout, dlse = cotangents(small[0], small[2])
    want = gradients(*small, dout, dlse, backend=backend, causal=True)
    large = [torch.full_like(x, torch.nan) for x in qkv(2, (8, 2), 200, 300, 128, dtype=dtype)]
    gradients(*large, large[0], backend=backend)
    got = gradients(*small, dout, dlse, backend=backend, causal=True)
    for name in "qkv":
        same_bits(got[name], want[name], name)
