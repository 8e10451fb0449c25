"""Scores of a tile, [rows, keys]: changes, masks, the online softmax, dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from polyflash.backends.triton.products import add
from polyflash.backends.triton.ptx import multiply_unless_one

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # of finite float32
TOO_FAR: tl.constexpr = tl.constexpr(2.0**12)  # from here on m is rounded about as much as a float16 weight
SLACK: tl.constexpr = tl.constexpr(8.0)  # powers of two that a lazy m may lie below its row's maximum
MOST_FP8: tl.constexpr = tl.constexpr(448.0)  # the largest e4m3
TOP: tl.constexpr = tl.constexpr(8.807354922057604)  # its log2
SUMS: tl.constexpr = tl.constexpr(8)  # of a row added up late: each of every 8th key, as threads hold them


class Sums(NamedTuple):
    """A tile's online softmax: maximum and sum of the weights of each row, both channel blocks of the output,
    and what the three sums have lost."""

    m_i: Any
    l_i: Any
    acc0: Any
    acc1: Any
    l_lost: Any
    lost0: Any
    lost1: Any


@triton.jit
def pair_pointers(x, place, rows, o_n):
    """Pointers to a plane's elements for each row and key."""
    p = x.p + tl.cast(place.i_b, tl.int64) * x.b + rows.o_h.to(tl.int64)[:, None] * x.h
    p += rows.o_i.to(tl.int64)[:, None] * x.q + o_n.to(tl.int64)[None, :] * x.k
    return p


@triton.jit
def list_pointers(x, place, rows):
    """Pointers to the beginning of each row's interval list."""
    p = x.p + tl.cast(place.i_b, tl.int64) * x.b + rows.o_h.to(tl.int64) * x.h
    p += (rows.o_i // x.rows).to(tl.int64) * x.r
    return p


@triton.jit
def change_scores(b_s, x, place, rows, keys, n, SOFTCAP: tl.constexpr):
    """scale·s, capped, with bias and ALiBi: natural units. Returns also the capped score over its cap (0
    without a cap), of which gradients need the square."""
    m_pair = rows.m_row[:, None] & keys.m_n[None, :]
    # [BLOCK_M, BLOCK_N]
    b_s = b_s * n.scale
    b_cap = 0.0
    if SOFTCAP:
        b_cap = tanh(b_s / n.softcap)
        b_s = b_cap * n.softcap
    if x.bias is not None:
        p = pair_pointers(x.bias, place, rows, keys.o_n)
        b_s += tl.load(p, mask=m_pair, other=0.0).to(tl.float32)
    if x.alibi_slopes is not None:
        p = x.alibi_slopes.p + tl.cast(place.i_b, tl.int64) * x.alibi_slopes.b + rows.o_h * x.alibi_slopes.h
        b_slope = tl.load(p).to(tl.float32)
        b_far = tl.abs((rows.o_i.to(tl.int64) + place.position)[:, None] - keys.o_n.to(tl.int64)[None, :])
        b_s -= b_slope[:, None] * b_far.to(tl.float32)
    return b_s, b_cap


@triton.jit
def tanh(b_x):
    """From exp2, exact at 0 and at both ends; relative error of a few units in the last place."""
    b_far = 1.0 - 2.0 / (tl.exp2(tl.abs(b_x) * (2 * LOG2E)) + 1.0)
    b_x2 = b_x * b_x
    # Below, the quotient cancels; x - x³/3 + 2x⁵/15 - 17x⁷/315 + 62x⁹/2835 has what float32 can hold.
    b_near = 0.021869488 * b_x2 - 0.053968254
    b_near = (b_near * b_x2 + 0.13333334) * b_x2 - 0.33333334
    b_near = b_near * b_x2 * b_x + b_x
    return tl.where(tl.abs(b_x) < 0.3, b_near, tl.where(b_x < 0, -b_far, b_far))


@triton.jit
def visible_pairs(x, place, rows, keys, BELOW: tl.constexpr):
    """Rows of a tile and keys they see, bool [BLOCK_M, BLOCK_N]. Unless BELOW all rows begin at key 0."""
    o_n = keys.o_n
    b_seen = o_n[None, :] < rows.o_hi[:, None]
    if BELOW:
        b_seen = b_seen & (o_n[None, :] >= rows.o_lo[:, None])
    if x.page_table is not None:
        b_seen = b_seen & keys.m_n[None, :]
    if x.q_segments is not None:
        i_b = tl.cast(place.i_b, tl.int64)
        p_q = x.q_segments.p + i_b * x.q_segments.b + rows.o_i.to(tl.int64) * x.q_segments.s
        p_k = x.k_segments.p + i_b * x.k_segments.b + o_n.to(tl.int64) * x.k_segments.s
        b_q = tl.load(p_q, mask=rows.m_row, other=0)
        b_k = tl.load(p_k, mask=o_n < place.live, other=0)
        b_seen = b_seen & (b_q[:, None] == b_k[None, :])
    if x.intervals is not None:
        p = list_pointers(x.intervals, place, rows)
        b_listed = b_seen & False
        for i in range(0, x.intervals.count):
            o_start = tl.load(p + i * x.intervals.n, mask=rows.m_row, other=0)
            o_end = tl.load(p + i * x.intervals.n + x.intervals.e, mask=rows.m_row, other=0)
            b_listed = b_listed | ((o_n[None, :] >= o_start[:, None]) & (o_n[None, :] < o_end[:, None]))
        b_seen = b_seen & b_listed
    if x.mask is not None:
        b_seen = b_seen & (tl.load(pair_pointers(x.mask, place, rows, o_n), mask=b_seen, other=0) != 0)
    if x.bias is not None:  # only a bias that was -inf hides a key
        p = pair_pointers(x.bias, place, rows, o_n)
        b_seen = b_seen & (tl.load(p, mask=b_seen, other=0.0) != float("-inf"))
    return b_seen


@triton.jit
def touched(j_0, x, place, rows, BLOCK_N: tl.constexpr):
    """Does an interval of some row's list reach into the keys of a block?"""
    p = list_pointers(x.intervals, place, rows)
    b_touched = rows.o_i < 0
    for i in range(0, x.intervals.count):
        o_start = tl.load(p + i * x.intervals.n, mask=rows.m_row, other=0)
        o_end = tl.load(p + i * x.intervals.n + x.intervals.e, mask=rows.m_row, other=0)
        b_touched = b_touched | ((o_start < j_0 + BLOCK_N) & (o_end > j_0) & (o_start < o_end))
    return tl.max(b_touched.to(tl.int32), 0) > 0


@triton.jit
def apply_mask(b_s, b_seen, value, ADD: tl.constexpr):
    """`value` at invisible pairs, whatever was there; by addition only scores that are finite."""
    if ADD:
        b_s = b_s + tl.where(b_seen, 0.0, value)
    else:
        b_s = tl.where(b_seen, b_s, value)
    return b_s


@triton.jit
def exp2_in_parts(b_x, PARTS: tl.constexpr):
    """2^x of a tile, PARTS column ranges one after the other: the same bits, fewer values alive at once."""
    if PARTS == 1:
        b_y = tl.exp2(b_x)
    else:
        ROWS: tl.constexpr = b_x.shape[0]
        COLUMNS: tl.constexpr = b_x.shape[1]
        b_lo, b_hi = b_x.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        b_lo, b_hi = exp2_in_parts(b_lo, PARTS // 2), exp2_in_parts(b_hi, PARTS // 2)
        b_y = tl.join(b_lo, b_hi).permute(0, 2, 1).reshape(ROWS, COLUMNS)
    return b_y


@triton.jit
def weights(b_s, b_m, factor, far, c):
    """exp(scale·s - m). `factor` is scale·log2 e, or scale without BASE2; scale is 1 for changed scores.
    FUSED takes one multiply-add, and m in units of the exponent: all weights of a row have the same factor
    next to 1, which l has too, while m is below TOO_FAR. Otherwise, and in the rows that `far` says, m is in
    units of s and leaves it first: the largest weight is exactly 1, however large the scores. Weights that
    become P_CODES are 448 times as large, as is then their sum."""
    TIMES: tl.constexpr = (TOP if c.BASE2 else TOP * LN2) if c.P_CODES != "" else 0.0
    if c.FUSED:
        b_after = b_m
        if far is not None:
            b_s = b_s - tl.where(far, b_m, 0.0)[:, None]
            b_after = tl.where(far, 0.0, b_m)
        if c.P_CODES != "":
            b_after = b_after - TIMES
        if c.K_CODES == "":
            b_factor = tl.full(b_s.shape, factor, tl.float32)
        else:  # of each row
            b_factor = tl.broadcast_to(factor[:, None], b_s.shape)
        b_x = tl.fma(b_s, b_factor, tl.broadcast_to(-b_after[:, None], b_s.shape))
    else:
        b_x = (b_s - b_m[:, None]) * factor
        if c.P_CODES != "":
            b_x = b_x + TIMES
    return exp2_in_parts(b_x, c.SPLIT_EXP) if c.BASE2 else tl.exp(b_x)


@triton.jit
def in_units(b_x, factor, far, FUSED: tl.constexpr):
    """Row values in units of s in those of m."""
    b_y = b_x
    if FUSED:
        b_y = b_x * factor
        if far is not None:
            b_y = tl.where(far, b_x, b_y)
    return b_y


@triton.jit
def online_softmax(b_s, sums, factor, far, c):
    """Weights of a tile under the new maximum, its m, l and what l lost, and the factor for older sums.
    m begins at LOWEST and is finite, so hidden scores weigh 0 and no weight is inf - inf. Every part of a
    tile has the maximum of the whole. A LAZY m follows the maximum once that is SLACK ahead (as in
    FlashAttention-4), so that older sums are seldom scaled; weights are then 2^SLACK at most."""
    l_i, lost = sums.l_i, sums.l_lost
    b_top = in_units(tl.max(b_s, 1), factor, far, c.FUSED)
    if c.LAZY:
        b_slack = SLACK if c.BASE2 else SLACK * LN2
        if far is not None:
            b_slack = tl.where(far, 0.0, b_slack)
        m_new = tl.where(b_top - sums.m_i > b_slack, b_top, sums.m_i)
    else:
        m_new = tl.maximum(sums.m_i, b_top)
    b_p = weights(b_s, m_new, factor, far, c)
    b_older = sums.m_i - m_new
    if not c.FUSED:
        b_older = b_older * factor
    elif far is not None:
        b_older = tl.where(far, b_older * factor, b_older)
    alpha = tl.exp2(b_older) if c.BASE2 else tl.exp(b_older)
    if c.EXACT:
        l_i, lost = add(l_i * alpha, lost * alpha, tl.sum(b_p, 1))
    elif len(l_i.shape) == 2:
        LATE: tl.constexpr = l_i.shape[1]
        b_sums = tl.sum(b_p.reshape(b_p.shape[0], b_p.shape[1] // LATE, LATE), 1)
        l_i = tl.fma(l_i, tl.broadcast_to(alpha[:, None], l_i.shape), b_sums)
    else:
        l_i = tl.fma(l_i, alpha, tl.sum(b_p, 1))
    return b_p, m_new, l_i, lost, alpha


@triton.jit
def rescale(acc, alpha, LAZY: tl.constexpr, THREADS: tl.constexpr):
    """acc·alpha. With a lazy m alpha is 1 but for few rows, and a warp that has none of them does nothing.
    THREADS: of a program on NVIDIA, else 0."""
    COUNT: tl.constexpr = acc.shape[0] * acc.shape[1] // THREADS if THREADS > 0 else 0  # values of a thread
    b_alpha = tl.broadcast_to(alpha[:, None], acc.shape)
    return multiply_unless_one(acc, b_alpha, COUNT) if LAZY and COUNT > 0 else acc * b_alpha


@triton.jit
def keep(rows, j_0, n, c):
    """Mask of the weights dropout keeps: Philox4x32-10 of (key // 4, row, head + num_q_heads·batch, 0), one
    word per key; kept iff it is at least `drop_below`. bool [BLOCK_M, BLOCK_N]; j_0 is a multiple of 4. A
    part of a call counts from its first row, key and head there, and draws four words for each key."""
    i_plane, o_i = rows.i_plane + rows.o_h, rows.o_i
    if c.DROPOUT_START:
        i_plane += n.drop_head + rows.i_plane // n.num_q_heads * (n.drop_heads - n.num_q_heads)
        o_i += n.drop_row
        o_key = n.drop_key + j_0 + tl.arange(0, c.BLOCK_N)
        o_quad = (o_key // 4).to(tl.uint32)
    else:
        o_quad = (j_0 // 4 + tl.arange(0, c.BLOCK_N // 4)).to(tl.uint32)
    c0 = o_quad[None, :] + (o_i * 0).to(tl.uint32)[:, None]
    c1 = o_i.to(tl.uint32)[:, None] + (o_quad * 0)[None, :]
    c2 = i_plane.to(tl.uint32)[:, None] + (o_quad * 0)[None, :]
    k0, k1 = n.seed_lo.to(tl.uint32, bitcast=True), n.seed_hi.to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, c2, c2 * 0, k0, k1, 10)
    if c.DROPOUT_START:
        o_word = (o_key % 4)[None, :]
        b_words = tl.where(o_word < 2, tl.where(o_word == 0, w0, w1), tl.where(o_word == 2, w2, w3))
    else:
        b_words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(o_i.shape[0], c.BLOCK_N)
    return b_words >= n.drop_below.to(tl.uint32, bitcast=True)


@triton.jit
def recompute(b_s, b_lse, scale, c):
    """exp(scale·s - lse); b_lse broadcasts to b_s. The product is rounded as the forward rounds the maximum,
    so that the weight of an only key is 1 however large its score; hence no fused multiply-add."""
    b_x = b_s - b_lse if c.CHANGED else b_s * scale - b_lse
    return tl.exp2(b_x * LOG2E) if c.BASE2 else tl.exp(b_x)
