"""Lengths, head dims, head ratios, zero sizes: every awkward shape against the oracle."""

from __future__ import annotations

import math

import pytest
import torch

import polyflash
from tests.conformance.rows import ALL_OF, DTYPES, EDGES, HEAD_DIMS, Runner, ints, qkv
from tests.tolerance import Figures, same_bits


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dim(run: Runner, head_dim: int):
    """Also D_v ≠ D: the next and the previous entry of the list."""
    at = HEAD_DIMS.index(head_dim)
    for dim_v in {head_dim, HEAD_DIMS[at - 1], HEAD_DIMS[(at + 5) % len(HEAD_DIMS)]}:
        for dtype in DTYPES:
            q, k, v = qkv(1, (2, 1), 37, 70, head_dim, dim_v, dtype=dtype, seed=at)
            if (run.row.backend, run.row.phase) not in ALL_OF or not run.reasons(q, k, v, causal=True):
                run.checked(q, k, v, causal=True, label=f"{head_dim}/{dim_v} {dtype}")


@pytest.mark.parametrize("seqlen_q", EDGES)
def test_lengths(run: Runner, seqlen_q: int):
    """Every pair of edge lengths, full and causal: all residues of the tiles, M above and below N
    (B-cau-11)."""
    pool = Figures()
    for seqlen_k in EDGES:
        q, k, v = qkv(1, 1, seqlen_q, seqlen_k, 64, seed=seqlen_q)
        for causal in (False, True):
            run.checked(q, k, v, causal=causal, label=f"{seqlen_q}x{seqlen_k} causal={causal}", pool=pool)
    pool.hold(torch.float32, f"{seqlen_q} rows")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_key_count_to_130(run: Runner, dtype: torch.dtype):
    """B-wg-02: a loop that strides over more keys than it handles."""
    pool = Figures()
    for seqlen_k in range(1, 131):
        q, k, v = qkv(1, 1, 3, seqlen_k, 16, 8, dtype=dtype, seed=seqlen_k)
        run.checked(q, k, v, label=f"{seqlen_k} keys", pool=pool)
    pool.hold(dtype, "1 to 130 keys")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residues(run: Runner, dtype: torch.dtype):
    """B-cau-11: diagonal tile pairs at every residue, in the low dtypes too."""
    for seqlen_q, seqlen_k in ((97, 161), (112, 113), (145, 146), (130, 100), (191, 193), (66, 320)):
        q, k, v = qkv(1, 1, seqlen_q, seqlen_k, 32, dtype=dtype, seed=seqlen_k)
        run.checked(q, k, v, causal=True, label=f"{seqlen_q}x{seqlen_k}")


@pytest.mark.parametrize("group", (1, 2, 3, 5, 6, 7, 8, 12))
def test_group(run: Runner, group: int):
    """M25, B-gqa-02, B-gqa-05: head h reads kv head h // group, at prefill, chunk and decode lengths."""
    for dtype in DTYPES:
        for seqlen_q in (1, 5, 40):
            q, k, v = qkv(2, (2 * group, 2), seqlen_q, 75, 32, dtype=dtype, seed=group)
            run.checked(q, k, v, causal=True, label=f"group {group} {dtype} rows {seqlen_q}")


@pytest.mark.parametrize(
    "sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 0, 0, 0)], ids=str
)
def test_zero_sizes(run: Runner, sizes: tuple[int, int, int, int]):
    """Batch, heads, queries or keys of 0: right shapes, zeros, -inf, no launch."""
    run.skip_unless_here()
    batch, heads, seqlen_q, seqlen_k = sizes
    for causal in (False, True):
        for dtype in DTYPES:
            q, k, v = qkv(batch, heads, seqlen_q, seqlen_k, 16, 24, dtype=dtype)
            out, lse = run(q, k, v, causal=causal)
            assert out.shape == (batch, heads, seqlen_q, 24) and out.dtype is dtype
            assert lse.shape == (batch, heads, seqlen_q) and lse.dtype is torch.float32
            assert (out == 0).all() and (lse == -math.inf).all()


def test_head_dim_zero_is_a_spec_error():
    for shape in ((7, 9, 4, 0), (0, 0, 2, 0)):
        x = torch.zeros(shape)
        with pytest.raises(polyflash.SpecError):
            polyflash.attention(x, x, x)


def test_wrong_head_ratio():
    """B-gqa-01."""
    for heads in ((33, 2), (3, 2), (1, 2), (4, 0)):
        q, k, v = qkv(1, heads, 4, 4, 8)
        with pytest.raises(polyflash.SpecError, match="heads"):
            polyflash.attention(q, k, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_rows(run: Runner, dtype: torch.dtype):
    """Every way for a row to see no key: out exactly 0, lse exactly -inf, its neighbours right."""
    q, k, v = qkv(2, (4, 2), 40, 50, 32, dtype=dtype)
    mask = torch.ones(2, 1, 40, 50, dtype=torch.bool)
    mask[0, :, 7] = False
    mask[1] = False
    cases = {
        "mask": ({"mask": mask}, lambda out: (out[0, :, 7], out[1])),
        "kv_lens 0": ({"kv_lens": ints(0, 50)}, lambda out: (out[0],)),
        "kv_starts at the end": ({"kv_starts": ints(50, 0)}, lambda out: (out[0],)),
        "starts above lens": ({"kv_lens": ints(9, 50), "kv_starts": ints(20, 0)}, lambda out: (out[0],)),
        "causal, live length below rows": (
            {"kv_lens": ints(10, 50), "causal": True},
            lambda out: (out[0, :, :30],),
        ),
        "offset far left": ({"q_offset": -60, "causal": True}, lambda out: (out,)),
        "window right of the keys": ({"q_offset": 100, "window": (3, 3)}, lambda out: (out,)),
    }
    for name, (options, empty) in cases.items():
        got = run.checked(q, k, v, label=name, **options)
        for part in empty(got.out):
            assert (part == 0).all(), name
        for part in empty(got.lse):
            assert (part == -math.inf).all(), name


def test_positive_zero(run: Runner):
    """An empty row is +0, bit for bit."""
    for dtype in DTYPES:
        q, k, v = qkv(1, 1, 20, 5, 16, dtype=dtype)
        out, _ = run(q, k, -v.abs(), causal=True)
        same_bits(out[:, :, :15], torch.zeros(1, 1, 15, 16, dtype=dtype))


@pytest.mark.parametrize("heads", ((1, 1), (5, 1), (16, 16)))
def test_batches(run: Runner, heads: tuple[int, int]):
    for batch in (1, 2, 3, 7):
        q, k, v = qkv(batch, heads, 19, 45, 16, seed=batch)
        run.checked(q, k, v, causal=True, label=f"batch {batch}")
