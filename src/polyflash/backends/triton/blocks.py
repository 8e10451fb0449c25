"""The stages of a tile, shared by every kernel of this backend.

A tile is BLOCK_M packed rows against BLOCK_N keys. With PACK the query heads of one key/value head are rows
of one tile, the head the faster: packed row r is row r // group of head r % group. Scores are [rows, keys].
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyflash.backends.triton import interpreter
from polyflash.backends.triton.ptx import multiply_unless_one

interpreter.prepare()
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # of finite float32
TOO_FAR: tl.constexpr = tl.constexpr(2.0**12)  # from here on m is rounded about as much as a float16 weight
SLACK: tl.constexpr = tl.constexpr(8.0)  # powers of two that a lazy m may lie below its row's maximum
PART: tl.constexpr = tl.constexpr(2.0**-7)  # of a float32 is the rest of its first eight bits at most
SUMS: tl.constexpr = tl.constexpr(
    8
)  # of a row that is added up late: each of every 8th key, as threads hold them


@triton.jit
def product(a, b, acc, PRODUCT: tl.constexpr):
    """acc + a @ b with float32 sums. PRODUCT is how float32 operands are multiplied: "ieee" by multiply-adds;
    "tf32x3" and "bf16x6" on matrix units as products of parts, which leave out less than float32 rounds;
    "tf32" with 11 bits of them."""
    if a.dtype == tl.float32 and PRODUCT == "bf16x6":
        a0, a1, a2 = three_parts(a)
        b0, b1, b2 = three_parts(b)
        # small terms first; an infinity has no parts, so what they give is NaN, and its head says all
        b_low = tl.dot(a0, b2, out_dtype=tl.float32)
        b_low = tl.dot(a2, b0, b_low)
        b_low = tl.dot(a1, b1, b_low)
        b_low = tl.dot(a0, b1, b_low * PART)
        b_low = tl.dot(a1, b0, b_low)
        b_low = tl.where(b_low == b_low, b_low * PART, 0.0)
        acc += tl.dot(a0, b0, b_low)
    elif a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision=PRODUCT)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def three_parts(b_x):
    """float32 as x0 + PART·x1 + PART²·x2 of bfloat16, cut and not rounded: no bit is lost of any
    normal number but the last two of the least, and none overflows."""
    b_0 = cut(b_x)
    b_rest = (b_x - b_0) * 128.0
    b_1 = cut(b_rest)
    return b_0.to(tl.bfloat16), b_1.to(tl.bfloat16), ((b_rest - b_1) * 128.0).to(tl.bfloat16)


@triton.jit
def cut(b_x):
    """x with the bits that bfloat16 has."""
    return (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


# where a tile stands
@triton.jit
def find_member(i_t, cu_seqlens_q, members, seqlen_q, group, BLOCK_M: tl.constexpr):
    """Which packed member tile i_t belongs to, and which of its tiles it is. Member b has room for its tiles
    from cu[b]·group // BLOCK_M + b on; what lies behind the last member counts as one more."""
    lo, hi = 0, members
    while lo < hi:
        middle = (lo + hi + 1) // 2
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + middle), 0), seqlen_q)
        if first * group // BLOCK_M + middle <= i_t:
            lo = middle
        else:
            hi = middle - 1
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + lo), 0), seqlen_q)
    return lo, i_t - (first * group // BLOCK_M + lo)


@triton.jit
def span(cu_seqlens, i_b, members, total):
    """First position and length of a member; bounds that fall or leave the tensor make it shorter."""
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_b), 0), total)
    end = total
    if i_b < members:
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_b + 1), first), total)
    return first, end - first


@triton.jit
def stand(x, i_b, batch, seqlen_q, seqlen_k, offset, HAS_OFFSET: tl.constexpr):
    """Of request i_b: first row and key in the tensors, its rows, its first live key and the end of them, and
    the position of its row 0 (int64)."""
    first_q, first_k, start = 0, 0, 0
    rows, live = seqlen_q, seqlen_k
    if x.cu_seqlens_q is not None:
        first_q, rows = span(x.cu_seqlens_q, i_b, batch, seqlen_q)
        if x.page_table is None:
            first_k, live = span(x.cu_seqlens_k, i_b, batch, seqlen_k)
            live = tl.where(i_b < batch, live, 0)
    owned = i_b < batch
    if x.kv_lens is not None:
        live = tl.minimum(tl.maximum(tl.load(x.kv_lens + i_b, mask=owned, other=0), 0), live)
    elif x.cu_seqlens_q is not None:
        live = tl.where(owned, live, 0)
    if x.kv_starts is not None:
        start = tl.maximum(tl.load(x.kv_starts + i_b, mask=owned, other=0), 0)
    if x.q_offset is not None:
        position = tl.load(x.q_offset + i_b, mask=owned, other=0).to(tl.int64)
    elif HAS_OFFSET:
        position = tl.cast(offset, tl.int64)
    else:
        position = tl.cast(live - rows, tl.int64)
    return first_q, first_k, rows, start, live, position


@triton.jit
def unravel(i_t, num_tiles, num_heads):
    """Tile, head and request of program i_t; tiles are the fastest."""
    i_bh = i_t // num_tiles
    return i_t % num_tiles, i_bh % num_heads, i_bh // num_heads


@triton.jit
def find_rows(
    i_m, i_b, x, num_tiles, batch, seqlen_q, seqlen_k, group, offset,
    HEAVY_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr, BLOCK_M: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Where a tile of request i_b stands: its number in the request, the request, its index into the tensors'
    batch, and what `stand` says of it."""
    if HEAVY_FIRST:
        i_m = num_tiles - 1 - i_m
    i_batch = i_b
    if x.cu_seqlens_q is not None:
        G = group if PACK else 1
        i_b, i_m = find_member(i_m, x.cu_seqlens_q, batch, seqlen_q, G, BLOCK_M)
        i_batch = i_b * 0
    place = stand(x, i_b, batch, seqlen_q, seqlen_k, offset, HAS_OFFSET)
    return i_m, i_b, i_batch, place


@triton.jit
def find_keys(
    i_n, i_b, x, batch, seqlen_q, seqlen_k, offset, HAS_OFFSET: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Likewise of a tile of keys, with the keys of its request, live or not."""
    i_batch, keys = i_b, seqlen_k
    if x.cu_seqlens_k is not None:
        i_b, i_n = find_member(i_n, x.cu_seqlens_k, batch, seqlen_k, 1, BLOCK_N)
        i_batch = i_b * 0
        _, keys = span(x.cu_seqlens_k, i_b, batch, seqlen_k)
    place = stand(x, i_b, batch, seqlen_q, seqlen_k, offset, HAS_OFFSET)
    return i_n, i_b, i_batch, keys, place


@triton.jit
def shifts(position, rows, live, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Row i sees keys [i + lo, i + hi), as far as order and distance go; both fit int32."""
    lo, hi = position * 0 - rows, position * 0 + live
    if HAS_LEFT:
        lo = tl.minimum(tl.maximum(position - left, -rows), live)
    if HAS_RIGHT:
        hi = tl.minimum(tl.maximum(position + right + 1, -rows), live)
    return tl.cast(lo, tl.int32), tl.cast(hi, tl.int32)


@triton.jit
def packed_rows(i_m, group, BLOCK_M: tl.constexpr, PACK: tl.constexpr):
    """Row and head of the group of every row of a tile."""
    o_r = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACK:
        return o_r // group, o_r % group
    else:
        return o_r, o_r * 0


@triton.jit
def row_limits(x, o_i, rows, start, live, lo_shift, hi_shift):
    """First and end key of each row; a row that is none ends at key 0, so it sees none."""
    # [BLOCK_M]
    o_lo = tl.maximum(o_i + lo_shift, start)
    o_hi = tl.minimum(o_i + hi_shift, live)
    m_row = o_i < rows
    if x.row_bounds is not None:
        p = x.row_bounds.p + o_i.to(tl.int64) * x.row_bounds.s
        o_lo = tl.maximum(o_lo, tl.load(p, mask=m_row, other=0))
        o_hi = tl.minimum(o_hi, tl.load(p + x.row_bounds.e, mask=m_row, other=0))
    return o_lo, tl.where(m_row, tl.maximum(o_hi, o_lo), 0)


@triton.jit
def tile_ends(i_m, rows, group, BLOCK_M: tl.constexpr, PACK: tl.constexpr):
    """First and last row of a tile, of those that are rows."""
    G = group if PACK else 1
    return i_m * BLOCK_M // G, tl.minimum((i_m * BLOCK_M + BLOCK_M - 1) // G, rows - 1)


@triton.jit
def block_range(
    x, i_first, i_last, o_i, o_lo, o_hi, rows, start, live, lo_shift, hi_shift, BLOCK_N: tl.constexpr
):
    """Key blocks [n_lo, n_hi) that some row of [i_first, i_last] visits, and inside them [full_lo, full_hi)
    that every row sees whole. Only bounds of single rows need a look at every one."""
    if x.row_bounds is not None:
        some = o_lo < o_hi
        lo = tl.min(tl.where(some, o_lo, live))
        hi = tl.max(tl.where(some, o_hi, 0))
        # rows that are none must not narrow what is whole, those that see nothing must
        all_lo = tl.max(tl.where(o_i < rows, o_lo, 0))
        all_hi = tl.min(tl.where(o_i < rows, o_hi, live))
    else:
        lo, hi = tl.maximum(i_first + lo_shift, start), tl.minimum(i_last + hi_shift, live)
        all_lo, all_hi = tl.maximum(i_last + lo_shift, start), tl.minimum(i_first + hi_shift, live)
    lo = tl.maximum(lo, 0)
    hi = tl.maximum(hi, lo)
    n_lo, n_hi = lo // BLOCK_N, (hi + BLOCK_N - 1) // BLOCK_N
    n_hi = tl.where(hi > lo, n_hi, n_lo)
    full_lo = (tl.maximum(all_lo, lo) + BLOCK_N - 1) // BLOCK_N
    full_hi = tl.maximum(tl.minimum(all_hi, hi), 0) // BLOCK_N
    full_lo = tl.minimum(tl.maximum(full_lo, n_lo), n_hi)
    return n_lo, n_hi, full_lo, tl.minimum(tl.maximum(full_hi, full_lo), n_hi)


# loads and stores
@triton.jit
def row_offsets(x, i_b, i_h, o_r):
    """Element offsets of rows o_r of one head, int64."""
    return tl.cast(i_b, tl.int64) * x.b + tl.cast(i_h, tl.int64) * x.h + o_r.to(tl.int64) * x.s


@triton.jit
def key_offsets(x, k, i_b, i_t, i_h, first_k, o_n, live):
    """Element offsets of keys o_n of one key/value head, int64, and which of them are there."""
    m_n = o_n < live
    if x.page_table is None:
        o_k = row_offsets(k, i_t, i_h, first_k + o_n)
    else:
        table = x.page_table
        p = table.p + tl.cast(i_b, tl.int64) * table.b + (o_n // table.size) * table.c
        o_page = tl.load(p, mask=m_n, other=0)
        m_n = m_n & (o_page >= 0) & (o_page < table.pages)
        o_page = tl.where(m_n, o_page, 0).to(tl.int64)
        o_k = o_page * k.b + tl.cast(i_h, tl.int64) * k.h + (o_n % table.size).to(tl.int64) * k.s
    return o_k, m_n


@triton.jit
def load_tile(p, o_r, m_r, stride_d, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              CACHE: tl.constexpr):  # fmt: skip
    """Channels [FIRST, FIRST + BLOCK_D) of rows at offsets o_r; 0 where m_r says no and beyond DIM."""
    o_d = FIRST + tl.arange(0, BLOCK_D)
    m = m_r[:, None]
    if FIRST + BLOCK_D > DIM:
        m = m & (o_d < DIM)[None, :]
    # [rows, BLOCK_D]
    return tl.load(p + o_r[:, None] + o_d[None, :] * stride_d, mask=m, other=0.0, cache_modifier=CACHE)


@triton.jit
def load_turned(p, o_r, m_r, stride_d, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                CACHE: tl.constexpr):  # fmt: skip
    """Likewise as [BLOCK_D, rows]."""
    o_d = FIRST + tl.arange(0, BLOCK_D)
    m = m_r[None, :]
    if FIRST + BLOCK_D > DIM:
        m = m & (o_d < DIM)[:, None]
    return tl.load(p + o_r[None, :] + o_d[:, None] * stride_d, mask=m, other=0.0, cache_modifier=CACHE)


@triton.jit
def held(b_x, size):
    """x, any size being none below 0. What is loaded Triton multiplies out of shared memory, what is computed
    out of registers, so this computes what the compiler cannot know to be x."""
    BITS: tl.constexpr = tl.int32 if b_x.dtype == tl.float32 else tl.int16
    return (b_x.to(BITS, bitcast=True) ^ (size < 0).to(BITS)).to(b_x.dtype, bitcast=True)


@triton.jit
def store_tile(p, o_r, m_r, stride_d, b_x, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes a [rows, BLOCK_D] tile in the dtype of its tensor."""
    o_d = FIRST + tl.arange(0, BLOCK_D)
    m = m_r[:, None]
    if FIRST + BLOCK_D > DIM:
        m = m & (o_d < DIM)[None, :]
    tl.store(p + o_r[:, None] + o_d[None, :] * stride_d, b_x.to(p.dtype.element_ty), mask=m)


# scores
@triton.jit
def change_scores(b_s, x, i_b, o_i, o_h, o_n, m_pair, position, scale, softcap, SOFTCAP: tl.constexpr):
    """scale·s, capped, with bias and ALiBi: natural units. Returns also the capped score over its cap (0
    without a cap), of which gradients need the square."""
    # [BLOCK_M, BLOCK_N]
    b_s = b_s * scale
    b_cap = 0.0
    if SOFTCAP:
        b_cap = tanh(b_s / softcap)
        b_s = b_cap * softcap
    if x.bias is not None:
        p = x.bias.p + tl.cast(i_b, tl.int64) * x.bias.b + o_h.to(tl.int64)[:, None] * x.bias.h
        p += o_i.to(tl.int64)[:, None] * x.bias.q + o_n.to(tl.int64)[None, :] * x.bias.k
        b_s += tl.load(p, mask=m_pair, other=0.0).to(tl.float32)
    if x.alibi_slopes is not None:
        p = x.alibi_slopes.p + tl.cast(i_b, tl.int64) * x.alibi_slopes.b + o_h * x.alibi_slopes.h
        b_slope = tl.load(p).to(tl.float32)
        b_far = tl.abs((o_i.to(tl.int64) + position)[:, None] - o_n.to(tl.int64)[None, :])
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
def visible_pairs(x, i_b, o_i, o_h, o_n, o_lo, o_hi, m_n, rows, seqlen_k):
    """Which row of a tile sees which key, bool [BLOCK_M, BLOCK_N]. Without o_lo rows begin at key 0."""
    b_seen = o_n[None, :] < o_hi[:, None]
    if o_lo is not None:
        b_seen = b_seen & (o_n[None, :] >= o_lo[:, None])
    if x.page_table is not None:
        b_seen = b_seen & m_n[None, :]
    if x.q_segments is not None:
        p_q = x.q_segments.p + tl.cast(i_b, tl.int64) * x.q_segments.b + o_i.to(tl.int64) * x.q_segments.s
        p_k = x.k_segments.p + tl.cast(i_b, tl.int64) * x.k_segments.b + o_n.to(tl.int64) * x.k_segments.s
        b_q = tl.load(p_q, mask=o_i < rows, other=0)
        b_k = tl.load(p_k, mask=o_n < seqlen_k, other=0)
        b_seen = b_seen & (b_q[:, None] == b_k[None, :])
    if x.intervals is not None:
        p = x.intervals.p + tl.cast(i_b, tl.int64) * x.intervals.b + o_h.to(tl.int64) * x.intervals.h
        p += (o_i // x.intervals.rows).to(tl.int64) * x.intervals.r
        b_listed = b_seen & False
        for i in range(0, x.intervals.count):
            o_start = tl.load(p + i * x.intervals.n, mask=o_i < rows, other=0)
            o_end = tl.load(p + i * x.intervals.n + x.intervals.e, mask=o_i < rows, other=0)
            b_listed = b_listed | ((o_n[None, :] >= o_start[:, None]) & (o_n[None, :] < o_end[:, None]))
        b_seen = b_seen & b_listed
    if x.mask is not None:
        p = x.mask.p + tl.cast(i_b, tl.int64) * x.mask.b + o_h.to(tl.int64)[:, None] * x.mask.h
        p += o_i.to(tl.int64)[:, None] * x.mask.q + o_n.to(tl.int64)[None, :] * x.mask.k
        b_seen = b_seen & (tl.load(p, mask=b_seen, other=0) != 0)
    if x.bias is not None:  # only a bias that was -inf hides a key
        p = x.bias.p + tl.cast(i_b, tl.int64) * x.bias.b + o_h.to(tl.int64)[:, None] * x.bias.h
        p += o_i.to(tl.int64)[:, None] * x.bias.q + o_n.to(tl.int64)[None, :] * x.bias.k
        b_seen = b_seen & (tl.load(p, mask=b_seen, other=0.0) != float("-inf"))
    return b_seen


@triton.jit
def touched(x, i_b, o_i, o_h, rows, j_0, BLOCK_N: tl.constexpr):
    """Does an interval of some row's list reach into the keys of a block?"""
    p = x.intervals.p + tl.cast(i_b, tl.int64) * x.intervals.b + o_h.to(tl.int64) * x.intervals.h
    p += (o_i // x.intervals.rows).to(tl.int64) * x.intervals.r
    b_touched = o_i < 0
    for i in range(0, x.intervals.count):
        o_start = tl.load(p + i * x.intervals.n, mask=o_i < rows, other=0)
        o_end = tl.load(p + i * x.intervals.n + x.intervals.e, mask=o_i < rows, other=0)
        b_touched = b_touched | ((o_start < j_0 + BLOCK_N) & (o_end > j_0) & (o_start < o_end))
    return tl.max(b_touched.to(tl.int32), 0) > 0


@triton.jit
def add(total, lost, x):
    """total + x, and what float32 lost of the sum, to be added with the next (Kahan): a row of thousands of
    keys has the error of one block."""
    x = x + lost
    more = total + x
    return more, x - (more - total)


@triton.jit
def accumulate(acc, lost, b_p, b_v, alpha, PRODUCT: tl.constexpr):
    """acc, scaled already, + P·V. In float32 each block is summed by itself, and added without loss if what
    is lost is kept."""
    if b_v.dtype == tl.float32:
        b_o = product(b_p, b_v, tl.zeros(acc.shape, tl.float32), PRODUCT)
        if len(lost.shape) == 2:
            acc, lost = add(acc, lost * alpha[:, None], b_o)
        else:
            acc += b_o
    else:
        acc = product(b_p.to(b_v.dtype), b_v, acc, PRODUCT)
    return acc, lost


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
def weights(b_s, b_m, factor, far, BASE2: tl.constexpr, PARTS: tl.constexpr, FUSED: tl.constexpr):
    """exp(scale·s - m). `factor` is scale·log2 e, or scale without BASE2; scale is 1 for changed scores.
    FUSED takes one multiply-add, and m in units of the exponent: all weights of a row have the same factor
    next to 1, which l has too, while m is below TOO_FAR. Otherwise, and in the rows that `far` says, m is in
    units of s and leaves it first: the largest weight is exactly 1, however large the scores."""
    if FUSED:
        b_after = b_m
        if far is not None:
            b_s = b_s - tl.where(far, b_m, 0.0)[:, None]
            b_after = tl.where(far, 0.0, b_m)
        b_factor = tl.full(b_s.shape, factor, tl.float32)
        b_x = tl.fma(b_s, b_factor, tl.broadcast_to(-b_after[:, None], b_s.shape))
    else:
        b_x = (b_s - b_m[:, None]) * factor
    if BASE2:
        b_p = exp2_in_parts(b_x, PARTS)
    else:
        b_p = tl.exp(b_x)
    return b_p


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
def online_softmax(
    b_s, m_i, l_i, lost, factor, far, BASE2: tl.constexpr, PARTS: tl.constexpr, FUSED: tl.constexpr,
    EXACT: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """Weights of a tile under the new maximum, the new m, l and what l lost, and the factor for older sums.
    m begins at LOWEST and is finite, so hidden scores weigh 0 and no weight is inf - inf. Every part of a
    tile has the maximum of the whole. A LAZY m follows the maximum once that is SLACK ahead (as in
    FlashAttention-4), so that older sums are seldom scaled; weights are then 2^SLACK at most."""
    b_top = in_units(tl.max(b_s, 1), factor, far, FUSED)
    if LAZY and FUSED:
        b_slack = SLACK if BASE2 else SLACK * LN2
        if far is not None:
            b_slack = tl.where(far, 0.0, b_slack)
        m_new = tl.where(b_top - m_i > b_slack, b_top, m_i)
    else:
        m_new = tl.maximum(m_i, b_top)
    b_p = weights(b_s, m_new, factor, far, BASE2, PARTS, FUSED)
    b_older = m_i - m_new
    if not FUSED:
        b_older = b_older * factor
    elif far is not None:
        b_older = tl.where(far, b_older * factor, b_older)
    alpha = tl.exp2(b_older) if BASE2 else tl.exp(b_older)
    if EXACT:
        l_i, lost = add(l_i * alpha, lost * alpha, tl.sum(b_p, 1))
    elif len(l_i.shape) == 2:
        b_sums = tl.sum(b_p.reshape(b_p.shape[0], b_p.shape[1] // SUMS, SUMS), 1)
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
def keep(i_plane, o_i, j_0, seed_lo, seed_hi, drop_below, BLOCK_N: tl.constexpr):
    """Which weights dropout keeps: Philox4x32-10 of (key // 4, row, head + num_q_heads·batch, 0), one word
    per key; kept iff it is at least `drop_below`. bool [BLOCK_M, BLOCK_N]; j_0 is a multiple of 4."""
    o_quad = (j_0 // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)
    c0 = o_quad[None, :] + (o_i * 0).to(tl.uint32)[:, None]
    c1 = o_i.to(tl.uint32)[:, None] + (o_quad * 0)[None, :]
    c2 = i_plane.to(tl.uint32)[:, None] + (o_quad * 0)[None, :]
    k0, k1 = seed_lo.to(tl.uint32, bitcast=True), seed_hi.to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, c2, c2 * 0, k0, k1, 10)
    b_words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(o_i.shape[0], BLOCK_N)
    return b_words >= drop_below.to(tl.uint32, bitcast=True)


# values that may not be finite
@triton.jit
def finite(b_x):
    """x with 0 for NaN and infinities."""
    b_wide = b_x.to(tl.float32)
    return tl.where(b_wide - b_wide == 0.0, b_wide, 0.0).to(b_x.dtype)


@triton.jit
def has_nonfinite(b_x):
    b_wide = b_x.to(tl.float32)
    return tl.max(tl.max(tl.where(b_wide - b_wide == 0.0, 0, 1), 1), 0) > 0


@triton.jit
def nonfinite_only(b_x):
    """x with 0 for what is finite, float32."""
    b_wide = b_x.to(tl.float32)
    return tl.where(b_wide - b_wide == 0.0, 0.0, b_wide)


@triton.jit
def load_values(v, x, place, o_n, o_d, DV: tl.constexpr):
    """Any keys and channels of V by pointers, and which of the keys there are."""
    i_b, i_t, i_hkv, first_k, _, live, _, _ = place
    o_v, m_n = key_offsets(x, v, i_b, i_t, i_hkv, first_k, o_n, live)
    p_v = v.p + o_v[:, None] + o_d[None, :] * v.d
    return tl.load(p_v, mask=m_n[:, None] & (o_d < DV)[None, :], other=0.0), m_n


@triton.jit
def add_nonfinite(
    out, o_out, b_none, n_lo, n_hi, rows_of_tile, place, v, x, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds the NaN and infinities of V to the rows that see them, to what is stored already: a rare way,
    which must not cost the usual one registers, so it goes WIDTH channels at a time, and key by key where a
    block has such values."""
    o_i, o_h, o_lo, o_hi = rows_of_tile
    i_b, rows, live = place[0], place[4], place[5]
    tl.debug_barrier()  # other threads wrote what is read here
    for d in range(0, DV, WIDTH):
        o_d = d + tl.arange(0, WIDTH)
        # [BLOCK_M, WIDTH]
        p_out = out.p + o_out[:, None] + o_d[None, :] * out.d
        m_out = (o_i < rows)[:, None] & (o_d < DV)[None, :]
        b_out = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
        for j_0 in range(n_lo * BLOCK_N, n_hi * BLOCK_N, BLOCK_N):
            b_block, _ = load_values(v, x, place, j_0 + tl.arange(0, BLOCK_N), o_d, DV)
            if has_nonfinite(b_block):
                for j in range(j_0, j_0 + BLOCK_N):
                    o_n = j + tl.arange(0, 1)
                    b_v, m_n = load_values(v, x, place, o_n, o_d, DV)  # [1, WIDTH]
                    b_seen = visible_pairs(x, i_b, o_i, o_h, o_n, o_lo, o_hi, m_n, rows, live)
                    b_out += tl.where(b_seen & (b_none == 0)[:, None], nonfinite_only(b_v), 0.0)
        tl.store(p_out, b_out.to(out.p.dtype.element_ty), mask=m_out)


@triton.jit
def turned_sign(b_x):
    return (-b_x.to(tl.float32)).to(b_x.dtype)
