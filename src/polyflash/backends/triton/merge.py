"""Merge of the splits of a call whose keys were cut up.

    m = max_s m_s        l = Σ_s exp(scale·(m_s - m))·l_s        out = Σ_s exp(scale·(m_s - m))·l_s·out_s / l

in the order of the splits. Partial outputs are float32. A split hands over m and l and not its lse, whose
rounding is that of the scores: at 10,000 it would be a thousandth of the weights.

Two calls over disjoint keys have nothing but their lse: `merge_into` is `merging.merge_into` in one pass.
`add_into` adds up gradients of several calls in one.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from polyflash.backends.gpu.views import Rows, View, operands_of, rows_of, view_of
from polyflash.backends.triton import runtime
from polyflash.backends.triton.config_types import DecodeConfig
from polyflash.backends.triton.constants import Constants
from polyflash.backends.triton.places import load_tile, store_pair
from polyflash.backends.triton.scores import LN2, LOG2E
from polyflash.backends.triton.tiles import LEAST as LEAST_ROWS
from polyflash.backends.triton.tiles import split_dim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polyflash.spec import Arguments

# Splits whose outputs one step reads, and warps. Of few rows with many splits, and of many rows with few.
FEW_ROWS, MANY_PARTS, MANY_ROWS = (16, 4), (32, 4), (4, 1)
LEAST = tl.constexpr(2.0**-126)  # share of a part: 0 times an infinity would be NaN


class Tensors(NamedTuple):
    """`t` of `merge_splits`."""

    parts: Any  # (splits · rows, head_dim_v), dense; rows in the order of (batch, heads, seqlen_q)
    part_m: Any  # (splits, rows), and behind it l as large
    out: Any
    lse: Any
    sinks: Any
    end: Any = None  # see `runtime.compile`


class Numbers(NamedTuple):
    """`n` of `merge_splits`."""

    num_heads: int
    seqlen_q: int
    num_rows: int
    num_splits: int
    unit: float  # m times it is natural
    factor: float  # and in units of the exponent


class Splits(NamedTuple):
    """The results of splits, as the forward wrote them."""

    out: Tensor
    m: Tensor
    number: int
    unit: float  # of m, a natural number
    how: tuple[int, int]  # FEW_ROWS, MANY_PARTS or MANY_ROWS, which sums follow


@triton.jit
def merge_splits(t, n, c):
    """One program per row."""
    AT_ONCE: tl.constexpr = c.BLOCK_N
    i_row = tl.program_id(0)
    i_i, i_bh = i_row % n.seqlen_q, i_row // n.seqlen_q
    i_h, i_b = tl.cast(i_bh % n.num_heads, tl.int64), tl.cast(i_bh // n.num_heads, tl.int64)
    out, lse, part_m = t.out, t.lse, t.part_m
    o_s = tl.arange(0, AT_ONCE)
    part_l = part_m + tl.cast(n.num_splits, tl.int64) * n.num_rows
    # [AT_ONCE]
    b_top = tl.full([AT_ONCE], float("-inf"), tl.float32)
    for i_s in range(0, n.num_splits, AT_ONCE):
        p = part_m + (i_s + o_s).to(tl.int64) * n.num_rows + i_row
        b_top = tl.maximum(b_top, tl.load(p, mask=i_s + o_s < n.num_splits, other=float("-inf")))
    m_i = tl.max(b_top, 0)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_i = 0.0
    acc0 = tl.zeros([c.DV0], tl.float32)
    acc1 = tl.zeros([c.DV1], tl.float32) if c.DV1 > 0 else acc0
    for i_s in range(0, n.num_splits, AT_ONCE):
        m_s = i_s + o_s < n.num_splits
        o_part = (i_s + o_s).to(tl.int64) * n.num_rows + i_row
        b_l = tl.load(part_l + o_part, mask=m_s, other=0.0)
        b_share = tl.exp2((tl.load(part_m + o_part, mask=m_s, other=float("-inf")) - m_i) * n.factor)
        b_share = tl.where(b_share < LEAST, LEAST, b_share)
        b_share = tl.where(b_l == 0.0, 0.0, b_share * b_l)
        l_i += tl.sum(b_share, 0)
        b_part = load_tile(t.parts, o_part * c.DV, m_s, 0, c.DV, c.DV0, "")
        acc0 += tl.sum(b_share[:, None] * b_part, 0)
        if c.DV1 > 0:
            b_part = load_tile(t.parts, o_part * c.DV, m_s, c.DV0, c.DV, c.DV1, "")
            acc1 += tl.sum(b_share[:, None] * b_part, 0)
    b_m = m_i * n.unit
    if t.sinks is not None:
        b_sink = tl.load(t.sinks + i_h).to(tl.float32)
        b_top = tl.maximum(tl.where(l_i == 0.0, float("-inf"), b_m), b_sink)
        b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_older = tl.exp2((b_m - b_top) * LOG2E)
        b_older = tl.where(l_i == 0.0, 0.0, tl.where(b_older < LEAST, LEAST, b_older))
        l_i = l_i * b_older + tl.exp2((b_sink - b_top) * LOG2E)
        acc0, acc1, b_m = acc0 * b_older, acc1 * b_older, b_top
    b_l = tl.where(l_i == 0.0, 1.0, l_i)
    if lse is not None:
        b_lse = tl.where(l_i == 0.0, float("-inf"), tl.fma(tl.log2(b_l), LN2, b_m))  # as without splits
        tl.store(lse.p + i_b * lse.b + i_h * lse.h + i_i * lse.s, b_lse)
    o_out = i_b * out.b + i_h * out.h + tl.cast(i_i, tl.int64) * out.s + tl.arange(0, 1)
    m_row = o_out >= 0
    store_pair(out, o_out, m_row, (acc0 / b_l)[None, :], (acc1 / b_l)[None, :], c.DV, c.DV0, c.DV1)


class Pair(NamedTuple):
    """`t` of `merge_pair`: the state, which becomes the result, and what joins it."""

    out: View
    lse: Rows
    other: View
    other_lse: Rows
    end: Any = None  # see `runtime.compile`


class Sizes(NamedTuple):
    """`n` of `merge_pair`."""

    num_heads: int
    seqlen: int
    blocks: int


class Tile(NamedTuple):
    """`c` of `merge_pair`."""

    ROWS: Any = 32
    D: Any = 0
    WIDE: Any = 0  # channels, or the power of two above
    LAYOUT: Any = 0


@triton.jit
def merge_pair(t, n, c):
    """One program per block of rows of a head."""
    out, lse, other, other_lse = t.out, t.lse, t.other, t.other_lse
    i_t, i_bh = tl.program_id(0) % n.blocks, tl.program_id(0) // n.blocks
    i_h, i_b = tl.cast(i_bh % n.num_heads, tl.int64), tl.cast(i_bh // n.num_heads, tl.int64)
    o_r, o_d = tl.cast(i_t, tl.int64) * c.ROWS + tl.arange(0, c.ROWS), tl.arange(0, c.WIDE)
    m_r, m_d = o_r < n.seqlen, o_d < c.D
    p_lse = lse.p + i_b * lse.b + i_h * lse.h + o_r * lse.s
    b_one = tl.load(p_lse, mask=m_r, other=0.0)
    p_other_lse = other_lse.p + i_b * other_lse.b + i_h * other_lse.h + o_r * other_lse.s
    NONE: tl.constexpr = float("-inf")
    b_other = tl.load(p_other_lse, mask=m_r, other=NONE)
    if tl.sum((b_other != NONE).to(tl.int32), 0) > 0:  # else rows of packed members that see no key there
        apart = tl.where(b_other == NONE, NONE, b_other - b_one)  # also of two empty rows
        top = tl.where(b_other > b_one, b_other, b_one)
        tl.debug_barrier()  # every warp reads all of the rows' lse, one writes it
        tl.store(p_lse, top + tl.log(1.0 + tl.exp(-tl.abs(apart))), mask=m_r)
        m = m_r[:, None] & m_d[None, :]
        p_out = out.p + i_b * out.b + i_h * out.h + o_r[:, None] * out.s + o_d[None, :] * out.d
        b_one, b_two = 1.0 / (1.0 + tl.exp(apart)), 1.0 / (1.0 + tl.exp(-apart))
        b_one, b_two = tl.where(b_one < LEAST, LEAST, b_one), tl.where(b_two < LEAST, LEAST, b_two)
        b_out = tl.load(p_out, mask=m, other=0.0).to(tl.float32) * b_one[:, None]
        p_other = other.p + i_b * other.b + i_h * other.h + o_r[:, None] * other.s + o_d[None, :] * other.d
        b_x = tl.load(p_other, mask=m, other=0.0).to(tl.float32)
        b_out += b_x * b_two[:, None]
        tl.store(p_out, b_out.to(out.p.dtype.element_ty), mask=m)


_pairs, _sums = runtime.Kernels(), runtime.Kernels()


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges the second of two states, float32 or 16 bits, into the first one."""
    batch, heads, seqlen, head_dim = out.shape
    t = Pair(view_of(out), rows_of(lse), view_of(other_out), rows_of(other_lse))
    c = Tile(D=head_dim, WIDE=triton.next_power_of_2(max(head_dim, 2)))
    n = Sizes(heads, seqlen, -(-seqlen // c.ROWS))
    key, options = (c, runtime.signature(tuple(t))), {"num_warps": 4}
    grid = (batch * heads * n.blocks,)
    _pairs.launch(merge_pair, grid, (t, n, runtime.compiled_in(c)), options, key, out.device)


class Parts(NamedTuple):
    """`t` of `add_parts`: the sum, and its two or three parts."""

    into: View
    one: View
    two: View
    three: View | None = None
    end: Any = None  # see `runtime.compile`


@triton.jit
def load_part(x, i_b, i_h, o_r, o_d, m):
    p = x.p + i_b * x.b + i_h * x.h + o_r[:, None] * x.s + o_d[None, :] * x.d
    return tl.load(p, mask=m, other=0.0).to(tl.float32)


@triton.jit
def add_parts(t, n, c):
    """One program per block of rows of a head; in float32, rounded once."""
    i_t, i_bh = tl.program_id(0) % n.blocks, tl.program_id(0) // n.blocks
    i_h, i_b = tl.cast(i_bh % n.num_heads, tl.int64), tl.cast(i_bh // n.num_heads, tl.int64)
    o_r, o_d = tl.cast(i_t, tl.int64) * c.ROWS + tl.arange(0, c.ROWS), tl.arange(0, c.WIDE)
    m = (o_r < n.seqlen)[:, None] & (o_d < c.D)[None, :]
    b_sum = load_part(t.one, i_b, i_h, o_r, o_d, m) + load_part(t.two, i_b, i_h, o_r, o_d, m)
    if t.three is not None:
        b_sum += load_part(t.three, i_b, i_h, o_r, o_d, m)
    p_into = t.into.p + i_b * t.into.b + i_h * t.into.h + o_r[:, None] * t.into.s + o_d[None, :] * t.into.d
    tl.store(p_into, b_sum.to(t.into.p.dtype.element_ty), mask=m)


def add_into(into: Tensor, parts: Sequence[Tensor]) -> None:
    """Writes the sum of two or three parts, of which one may be where it is written."""
    batch, heads, seqlen, head_dim = into.shape
    t = Parts(*map(view_of, (into, *parts)))
    c = Tile(D=head_dim, WIDE=triton.next_power_of_2(max(head_dim, 2)))
    n = Sizes(heads, seqlen, -(-seqlen // c.ROWS))
    key, options = (c, runtime.signature(tuple(t))), {"num_warps": 4}
    grid = (batch * heads * n.blocks,)
    _sums.launch(add_parts, grid, (t, n, runtime.compiled_in(c)), options, key, into.device)


def how_of(config: Any, number: int, args: Arguments) -> tuple[int, int]:
    """By config and number of splits; of batch_invariant by the config alone. H100, head_dim 128: turned
    codes of one request had 0.95 to 0.98 of the time with more parts at once, of 16 parts 1.02 to 1.03."""
    if not isinstance(config, DecodeConfig):
        return MANY_ROWS
    many = config.block_m < LEAST_ROWS and number > FEW_ROWS[0] and not args.batch_invariant
    return MANY_PARTS if many else FEW_ROWS


@cache
def _constants(head_dim: int, at_once: int) -> Any:
    dv0, dv1 = split_dim(head_dim)
    return runtime.compiled_in(Constants(DV=head_dim, DV0=dv0, DV1=dv1, BLOCK_N=at_once))


def merge(kernels: runtime.Kernels, of: Splits, out: Tensor, lse: Tensor | None, args: Arguments) -> None:
    """The splits' outputs as one; the sinks join here."""
    at_once, num_warps = of.how
    batch, num_heads, seqlen_q, head_dim_v = out.shape
    sinks = None if args.sinks is None else operands_of(args, of.out).sinks
    rows = rows_of(lse)
    t = Tensors(View(of.out, None, None, None, 1), of.m, view_of(out), rows, sinks)
    num_rows = batch * num_heads * seqlen_q
    n = Numbers(num_heads, seqlen_q, num_rows, of.number, of.unit, of.unit * LOG2E.value)
    strides = runtime.signature(t.out[1:]), None if rows is None else runtime.signature(rows[1:])
    key = strides, runtime.aligned(out, lse, sinks), at_once
    c, options = _constants(head_dim_v, at_once), {"num_warps": num_warps}
    kernels.launch(merge_splits, (num_rows,), (t, n, c), options, key, out.device)
