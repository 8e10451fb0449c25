"""Attention forward in Triton: softmax(scale·QKᵀ + bias, mask)·V with an online softmax (FlashAttention-2).

    for n in block_range(i_m):
        b_s = load_tile(q) @ load_tile(k)ᵀ                   [BLOCK_M, BLOCK_N]
        b_s = apply_mask(b_s)                                boundary blocks only
        b_p, m_i, l_i, alpha = online_softmax(b_s, m_i, l_i)
        acc = acc·alpha + b_p @ load_tile(v)                 [BLOCK_M, head_dim_v]
    out = acc / l_i      lse = m_i + ln l_i

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) of any strides. A head dimension is two power-of-two
blocks, D0 + D1, so that 80 costs 64 + 16 channels and not 128. Key blocks are visited in rising order, each
at a multiple of BLOCK_N, so a row's bits do not depend on the rows around it. The decode phase is this kernel
with the keys cut into splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from polyflash.backends.triton.places import (
    Blocks,
    Keys,
    block_offsets,
    find_rows,
    head_offsets,
    key_offsets,
    load_pair,
    load_tile,
    load_turned,
    of_keys,
    store_pair,
    table_rows,
    tile_rows,
    unravel,
)
from polyflash.backends.triton.products import (
    accumulate,
    finite,
    has_nonfinite,
    held,
    largest,
    negated,
    nonfinite_only,
    product,
    rounded_codes,
)
from polyflash.backends.triton.scores import (
    LN2,
    LOG2E,
    LOWEST,
    MOST_FP8,
    SUMS,
    TOO_FAR,
    Sums,
    apply_mask,
    change_scores,
    keep,
    online_softmax,
    rescale,
    touched,
    visible_pairs,
)

LEAST_ROW = tl.constexpr(1e-35)  # largest size of a row of Q, below which its codes are coarser
LEAST_FACTOR = tl.constexpr(2.0**-126)


class Boxes(NamedTuple):
    """Tensor descriptors of blocks of rows and keys, for both channel blocks; None: loads by pointers."""

    q0: Any = None
    q1: Any = None
    k0: Any = None
    k1: Any = None
    v0: Any = None
    v1: Any = None
    entries: Any = None  # of keys' scales


NO_BOXES = Boxes()


class Tensors(NamedTuple):
    """`t` of `attend`. Strides and heads are compiled for, as far as Triton does."""

    q: Any
    k: Any  # None: loaded by descriptor
    v: Any
    v_view: Any  # again, for what is not finite: addresses in common would cost the usual way registers
    out: Any
    lse: Any
    x: Any
    visits: Any  # blocks that each tile visits
    num_heads: Any  # that the grid runs over
    group: Any
    k_scale: Any = None  # tables of K's codes, as (batch or pages, heads, blocks of tokens, of channels)
    k_shift: Any = None
    v_scale: Any = None  # of V's codes likewise, and int32 as those: is one a NaN?
    v_odd: Any = None
    boxes: Any = None


class Queries(NamedTuple):
    """Q of a tile, both channel blocks, and the factor of its scores in the exponent. Against codes of K it
    is codes too: where scores stay in units of those, each row has a `factor`; `unit` makes them whole, and
    `shift` in such units is what K's means add."""

    b_q0: Any
    b_q1: Any
    factor: Any
    unit: Any
    shift: Any


@triton.jit
def load_block(
    x, o_x, m_n, at, c, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TURNED: tl.constexpr
):
    """Channels of a block of keys or values, [BLOCK_N, BLOCK_D], or turned, as codes of V lie already."""
    if c.DESCRIPTOR:
        i_t, i_h, i_row = at
        if c.P_CODES != "" and not TURNED:
            b_x = x.load([i_t, i_h, FIRST, i_row]).reshape(BLOCK_D, c.BLOCK_N).T
        else:
            b_x = x.load([i_t, i_h, i_row, FIRST]).reshape(c.BLOCK_N, BLOCK_D)
        if TURNED:
            b_x = b_x.T
    elif TURNED:
        b_x = load_turned(x, o_x, m_n, FIRST, DIM, BLOCK_D, c.CACHE, c.ALIGNED)
    else:
        b_x = load_tile(x, o_x, m_n, FIRST, DIM, BLOCK_D, c.CACHE, c.ALIGNED)
    return b_x


@triton.jit
def attend_block(
    i_n, blocks, far, sums, b_q, rows, place, t, n, c, MASKED: tl.constexpr, CLEAN: tl.constexpr
):
    """One key block: its scores, their weights, their share of the output. Blocks that are not full hide
    keys, and any may if MASKED. With CLEAN of the finite values alone. `far`: rows of large scores."""
    j_0 = i_n * c.BLOCK_N
    o_n = j_0 + tl.arange(0, c.BLOCK_N)
    o_k, m_n = o_n, o_n < place.live
    if not c.DESCRIPTOR:
        o_k, m_n = block_offsets(j_0, t.k, t.x, rows.i_hkv, place, c)
    keys, at = Keys(j_0, o_n, m_n), (place.i_batch, rows.i_hkv, place.first_k + j_0)
    # [BLOCK_M, BLOCK_N]
    PRODUCT: tl.constexpr = c.PRODUCT if c.K_CODES == "" else "ieee"  # of integers there is but one
    b_s = tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.int32 if c.K_CODES == "int8" else tl.float32)
    b_k = load_block(t.boxes.k0 if c.DESCRIPTOR else t.k, o_k, m_n, at, c, 0, c.D, c.D0, True)
    b_s = product(b_q.b_q0, b_k, b_s, PRODUCT)
    if c.D1 > 0:
        k1 = t.boxes.k1 if c.DESCRIPTOR else t.k
        b_k = load_block(k1, o_k, m_n, at, c, c.D0, c.D, c.D1, True)
        b_s = product(b_q.b_q1, b_k, b_s, PRODUCT)
    if c.K_CODES != "":
        b_s = scaled_sums(b_s, b_q, keys, rows, place, t, c)
    if c.CHANGED:
        b_s, _ = change_scores(b_s, t.x, place, rows, keys, n, c.SOFTCAP)
    if t.x.page_table is not None:  # an entry that names no page hides its keys
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
    if c.WHOLE:
        pass
    elif MASKED:
        b_s = apply_mask(b_s, visible_pairs(t.x, place, rows, keys, c.BELOW), float("-inf"), c.MASK_ADD)
    elif i_n < blocks.full_lo or i_n >= blocks.full_hi:
        b_s = apply_mask(b_s, visible_pairs(t.x, place, rows, keys, c.BELOW), float("-inf"), c.MASK_ADD)
    b_p, m_i, l_i, l_lost, alpha = online_softmax(b_s, sums, b_q.factor, far, c)
    if c.DROPOUT:
        b_p = tl.where(keep(rows, j_0, n, c), b_p * n.keep_scale, 0.0)
    # Before the wait for V, so that all this fills the gaps between the exponentials.
    b_p = b_p.to(t.v_view.p.dtype.element_ty)
    if c.P_CODES != "":  # keys as V has them
        b_p = b_p.reshape(c.BLOCK_M, c.BLOCK_N // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
        b_p = b_p.reshape(c.BLOCK_M, c.BLOCK_N)
    acc0, acc1, lost0, lost1 = sums.acc0, sums.acc1, sums.lost0, sums.lost1
    if c.LEVEL != 1:
        acc0 = rescale(acc0, alpha, c.LAZY, c.THREADS)
        if c.DV1 > 0:
            acc1 = rescale(acc1, alpha, c.LAZY, c.THREADS)
    o_v = o_k
    if not c.DESCRIPTOR:
        o_v, m_n = block_offsets(j_0, t.v, t.x, rows.i_hkv, place, c)
        if c.P_CODES != "":  # those between the last and the end of its group are 0
            m_n = o_n < t.v.d
    # Both blocks are loaded before either product: Triton 3.6 let the second take the place of the first
    # while an asynchronous product was still reading it.
    b_v0 = load_block(t.boxes.v0 if c.DESCRIPTOR else t.v, o_v, m_n, at, c, 0, c.DV, c.DV0, False)
    b_v1 = b_v0
    if c.DV1 > 0:
        v1 = t.boxes.v1 if c.DESCRIPTOR else t.v
        b_v1 = load_block(v1, o_v, m_n, at, c, c.DV0, c.DV, c.DV1, False)
    if CLEAN and c.P_CODES == "":
        b_v0 = finite(b_v0)
        if c.DV1 > 0:
            b_v1 = finite(b_v1)
    acc0, lost0 = accumulate(acc0, lost0, b_p, b_v0, alpha, c)
    if c.DV1 > 0:
        acc1, lost1 = accumulate(acc1, lost1, b_p, b_v1, alpha, c)
    return Sums(m_i, l_i, acc0, acc1, l_lost, lost0, lost1)


@triton.jit
def attend_blocks(blocks, far, sums, b_q, rows, place, t, n, c, AGAIN: tl.constexpr):
    """The online softmax over key blocks, less those that no interval list touches. AGAIN: of V the finite
    values alone."""
    CLEAN: tl.constexpr = AGAIN and not c.WHOLE
    MASKED: tl.constexpr = CLEAN or (c.ALWAYS_MASKED and not AGAIN)
    STAGES: tl.constexpr = c.AGAIN_STAGES if AGAIN else c.NUM_STAGES
    for i_n in tl.range(blocks.lo, blocks.hi, num_stages=STAGES):
        if t.x.intervals is None or touched(i_n * c.BLOCK_N, t.x, place, rows, c.BLOCK_N):
            sums = attend_block(i_n, blocks, far, sums, b_q, rows, place, t, n, c, MASKED, CLEAN)
    l_i = sums.l_i
    if len(l_i.shape) == 2:  # of late sums
        l_i = tl.sum(l_i, 1)
    return Sums(sums.m_i, l_i, sums.acc0, sums.acc1, sums.l_lost, sums.lost0, sums.lost1)


@triton.jit
def attend_tile(i_m, i_head, i_b, i_s, t, n, c):
    """One query tile of one head (or group), over all its keys or over those of one split."""
    i_t = ((i_b * t.num_heads + i_head) * n.num_tiles + i_m) * n.num_splits + i_s
    i_m, place = find_rows(i_m, i_b, t, n, c)
    if i_m * c.BLOCK_M < place.rows * (t.group if c.PACK else 1):
        rows, blocks = tile_rows(i_m, i_head, place, t, n, c)
        if c.WHOLE:
            blocks = Blocks(0, n.seqlen_k // c.BLOCK_N, 0, n.seqlen_k // c.BLOCK_N)
        if c.SPLIT:
            blocks = of_split(i_s, blocks, n, c)
        if t.visits is not None:
            count = blocks.hi - blocks.lo
            if t.x.intervals is not None:
                count = 0
                for i_n in range(blocks.lo, blocks.hi):
                    count += touched(i_n * c.BLOCK_N, t.x, place, rows, c.BLOCK_N).to(tl.int32)
            tl.store(t.visits + i_t, count)
        b_q = load_rows(i_m, i_head, rows, place, t, n, c)
        fresh = no_sums(c)
        sums = attend_blocks(blocks, None, fresh, b_q, rows, place, t, n, c, False)
        units = n.scale
        far = far_rows(sums) if c.FUSED else None
        spoiled = is_spoiled(sums, far, c)
        if c.FUSED or not c.WHOLE:
            if spoiled:
                hiding = Blocks(blocks.lo, blocks.hi, blocks.lo, blocks.lo)
                sums = attend_blocks(hiding, far, fresh, b_q, rows, place, t, n, c, True)
        if c.FUSED:
            ONE: tl.constexpr = LN2 if c.BASE2 else 1.0
            units = tl.where(far, b_q.factor * ONE, ONE)
        elif c.CHANGED:
            units = 1.0
        elif c.NEGATIVE:
            units = -units
        if c.P_CODES != "":
            sums = whole_sums(sums, rows, place, t, c)
            spoiled = tl.load(t.v_odd.p + table_rows(0, t.v_odd, 0, rows, place, t, c)) != 0
        o_out, b_none = finalize(i_s, sums, units, rows, place, t, n, c)
        if c.P_CODES != "" or not c.WHOLE:
            if spoiled:
                add_nonfinite(o_out, b_none, blocks, rows, place, t, c, 16)


@triton.jit
def whole_sums(sums, rows, place, t, c):
    """Sums of weights and of values from those of codes. A scale may be NaN where no key is seen."""
    scale = tl.load(t.v_scale.p + table_rows(0, t.v_scale, 0, rows, place, t, c))
    b_scale = tl.where(sums.l_i == 0.0, 0.0, scale * (1.0 / MOST_FP8))[:, None]
    acc0, acc1 = sums.acc0 * b_scale, sums.acc1 * b_scale
    l_i, lost = sums.l_i * (1.0 / MOST_FP8), sums.l_lost * (1.0 / MOST_FP8)
    return Sums(sums.m_i, l_i, acc0, acc1, lost, sums.lost0, sums.lost1)


@triton.jit
def of_split(i_s, blocks, n, c):
    """The blocks that lie in one split; those of a negative size are equal parts of what is visited."""
    part = (blocks.hi - blocks.lo + n.num_splits - 1) // n.num_splits
    size = tl.where(n.split_keys < 0, part, n.split_keys // c.BLOCK_N)
    s_lo = tl.where(n.split_keys < 0, blocks.lo, 0) + i_s * size
    s_hi = s_lo + size
    lo = tl.minimum(tl.maximum(blocks.lo, s_lo), s_hi)
    hi = tl.minimum(tl.maximum(blocks.hi, s_lo), s_hi)
    full_lo = tl.minimum(tl.maximum(blocks.full_lo, lo), hi)
    return Blocks(lo, hi, full_lo, tl.minimum(tl.maximum(blocks.full_hi, full_lo), hi))


@triton.jit
def load_rows(i_m, i_head, rows, place, t, n, c):
    """Both channel blocks of Q."""
    if t.boxes.q0 is not None:
        i_row = place.first_q + i_m * c.BLOCK_M
        b_q0 = t.boxes.q0.load([place.i_batch, i_head, i_row, 0]).reshape(c.BLOCK_M, c.D0)
        b_q1 = b_q0
        if c.D1 > 0:
            b_q1 = t.boxes.q1.load([place.i_batch, i_head, i_row, c.D0]).reshape(c.BLOCK_M, c.D1)
    else:
        o_q = head_offsets(t.q, place.i_batch, rows.o_h, place.first_q + rows.o_i)
        b_q0, b_q1 = load_pair(t.q, o_q, rows.m_row, c.D, c.D0, c.D1, c)
    if c.NEGATIVE:
        b_q0, b_q1 = negated(b_q0), negated(b_q1)
    if c.HOLD_Q:
        b_q0, b_q1 = held(b_q0, n.seqlen_q), held(b_q1, n.seqlen_q)
    if c.K_CODES != "":
        b_q = coded_rows(b_q0, b_q1, rows, place, t, n, c)
    else:
        b_q = Queries(b_q0, b_q1, n.factor, n.factor, n.factor)
    return b_q


@triton.jit
def coded_rows(b_q0, b_q1, rows, place, t, n, c):
    """Q as codes such as K's, of a scale per row. A row with a value that is not finite is NaN."""
    b_top = largest(b_q0)
    if c.D1 > 0:
        b_other = largest(b_q1)
        b_top = tl.where(b_other <= b_top, b_top, b_other)
    b_top = tl.where(b_top < LEAST_ROW, LEAST_ROW, b_top)
    b_most = tl.full(b_top.shape, 127.0 if c.K_CODES == "int8" else MOST_FP8, tl.float32)
    b_step, b_unit = tl.math.div_rn(b_most, b_top), tl.math.div_rn(b_top, b_most)
    b_unit = tl.where(b_top == float("inf"), float("nan"), b_unit)
    b_shift = b_unit * 0.0
    if c.K_SHIFT != "":
        b_shift = times_shift(b_q0, 0, c.D0, rows, place, t, c)
        if c.D1 > 0:
            b_shift += times_shift(b_q1, c.D0, c.D1, rows, place, t, c)
        b_shift = b_shift / b_unit
    elif c.K_SCALE == "head":  # its size goes to the rows, its sign to their codes
        scale = tl.load(t.k_scale.p + table_rows(place.live * 0, t.k_scale, 0, rows, place, t, c))
        b_unit, b_step = b_unit * tl.abs(scale), tl.where(scale < 0.0, -b_step, b_step)
    b_factor = n.factor * b_unit
    if c.FUSED:  # 0 times a hidden -inf would be NaN; scores of such rows are 0
        tiny = b_factor < LEAST_FACTOR
        b_factor, b_step = tl.where(tiny, 1.0, b_factor), tl.where(tiny, 0.0, b_step)
        b_shift = tl.where(tiny, 0.0, b_shift)
    else:
        b_factor = n.factor
    b_q0, b_q1 = rounded_codes(b_q0, b_step, c.K_CODES), rounded_codes(b_q1, b_step, c.K_CODES)
    return Queries(b_q0, b_q1, b_factor, b_unit, b_shift)


@triton.jit
def times_shift(b_x, FIRST: tl.constexpr, WIDTH: tl.constexpr, rows, place, t, c):
    """Rows of Q times the mean of K that its codes lack, over a block of channels."""
    o_d = FIRST + tl.arange(0, WIDTH)
    p = t.k_shift.p + table_rows(o_d * 0, t.k_shift, 0, rows, place, t, c) + o_d * t.k_shift.d
    return tl.sum(b_x.to(tl.float32) * tl.load(p, mask=o_d < c.D, other=0.0)[None, :], 1)


@triton.jit
def scaled_sums(b_s, b_q, keys, rows, place, t, c):
    """Scores from sums of codes, in units of a row's codes or whole."""
    b_s = b_s.to(tl.float32)
    if c.K_SCALE == "box":
        b_scale = t.boxes.entries.load([place.i_batch, rows.i_hkv, place.first_k + keys.j_0]).reshape(
            1, c.BLOCK_N
        )
    elif c.K_SCALE == "key":
        b_scale = of_keys(keys, t.k_scale, c.K_TOKENS, rows, place, t, c)[None, :]
    elif c.K_SHIFT != "":
        b_scale = tl.load(t.k_scale.p + table_rows(keys.o_n * 0, t.k_scale, 0, rows, place, t, c))[None, :]
    if c.K_SHIFT != "":
        b_s = tl.fma(b_s, tl.broadcast_to(b_scale, b_s.shape), tl.broadcast_to(b_q.shift[:, None], b_s.shape))
    elif c.K_SCALE != "head":
        b_s = b_s * b_scale
    return b_s if c.FUSED else b_s * b_q.unit[:, None]


@triton.jit
def no_sums(c):
    """The state with which the online softmax begins."""
    m_i = tl.full([c.BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([c.BLOCK_M], tl.float32)
    # [BLOCK_M, head_dim_v]
    acc0 = tl.zeros([c.BLOCK_M, c.DV0], tl.float32)
    acc1 = tl.zeros([c.BLOCK_M, c.DV1], tl.float32) if c.DV1 > 0 else acc0
    if c.COMPENSATE:
        sums = Sums(m_i, l_i, acc0, acc1, l_i, acc0, acc1)
    else:
        late = tl.zeros([c.BLOCK_M, SUMS], tl.float32) if c.LATE_SUM else l_i
        sums = Sums(m_i, late, acc0, acc1, l_i, l_i, l_i)  # without planes none is kept
    return sums


@triton.jit
def far_rows(sums):
    """Rows whose scores are so large, or not finite, that their weights are not those of one multiply-add."""
    return ((tl.abs(sums.m_i) > TOO_FAR) & (sums.m_i != LOWEST)) | (sums.l_i - sums.l_i != 0.0)


@triton.jit
def is_spoiled(sums, far, c):
    """Is a row far, or a sum not finite? A weight of 0 times a hidden NaN is NaN."""
    spoiled = False
    if not c.WHOLE:
        # flat, because on sm_100 a row's sum of what tensor memory holds ends Triton 3.6
        total = tl.sum(tl.ravel(sums.acc0, can_reorder=True), 0)
        if c.DV1 > 0:
            total += tl.sum(tl.ravel(sums.acc1, can_reorder=True), 0)
        spoiled = total - total != 0.0
    if far is not None:
        spoiled = spoiled | (tl.max(far.to(tl.int32), 0) > 0)
    return spoiled


@triton.jit
def finalize(i_s, sums, units, rows, place, t, n, c):
    """out = acc / l and lse; of one split out, m and, `num_splits` further on, l, to which no sink belongs
    yet. A row that saw no key is 0 and -inf. m times `units`, of the tile or of each row, is natural. Returns
    where the rows of out are, and which have no weights."""
    m_i, l_i, acc0, acc1, l_lost, lost0, lost1 = sums
    out, lse = t.out, t.lse
    o_h, o_row, m_row = rows.o_h, place.first_q + rows.o_i, rows.m_row
    if c.EXACT:  # so that a block of which a row sees nothing changes no bit of it
        l_i = l_i + l_lost
        if len(lost0.shape) == 2:
            acc0, acc1 = acc0 + lost0, acc1 + lost1
    b_m = tl.where(l_i == 0.0, float("-inf"), m_i if c.SPLIT else m_i * units)
    if not c.SPLIT and t.x.sinks is not None:
        m_sink = m_row & (place.i_b < n.batch)
        b_sink = tl.load(t.x.sinks + o_h, mask=m_sink, other=float("-inf")).to(tl.float32)
        b_top = tl.maximum(b_m, b_sink)
        b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_share = tl.exp2((b_m - b_top) * LOG2E)
        l_i = l_i * b_share + tl.exp2((b_sink - b_top) * LOG2E)
        acc0, acc1 = acc0 * b_share[:, None], acc1 * b_share[:, None]
        b_m = b_top
    b_none = l_i == 0.0
    b_l = tl.where(b_none, 1.0, l_i)
    i_part = place.i_batch + i_s * n.batch if c.SPLIT else place.i_batch
    if lse is not None:
        p_lse = lse.p + tl.cast(i_part, tl.int64) * lse.b
        p_lse = p_lse + o_h.to(tl.int64) * lse.h + o_row.to(tl.int64) * lse.s
        if c.SPLIT:
            tl.store(p_lse, b_m, mask=m_row)
            tl.store(p_lse + tl.cast(n.num_splits * n.batch, tl.int64) * lse.b, l_i, mask=m_row)
        else:
            tl.store(p_lse, tl.where(b_none, float("-inf"), tl.fma(tl.log2(b_l), LN2, b_m)), mask=m_row)
    o_out = tl.cast(i_part, tl.int64) * out.b
    o_out += o_h.to(tl.int64) * out.h + o_row.to(tl.int64) * out.s
    if c.EXACT:
        acc0, acc1 = acc0 / b_l[:, None], acc1 / b_l[:, None]
    else:
        acc0, acc1 = acc0 * (1.0 / b_l)[:, None], acc1 * (1.0 / b_l)[:, None]
    store_pair(out, o_out, m_row, acc0, acc1, c.DV, c.DV0, c.DV1)
    return o_out, b_none


@triton.jit
def load_values(o_n, o_d, rows, place, t, DV: tl.constexpr):
    """Any keys and channels of V by pointers, and which of the keys there are."""
    o_v, m_n = key_offsets(o_n, t.v_view, t.x, rows.i_hkv, place)
    p_v = t.v_view.p + o_v[:, None] + o_d[None, :] * t.v_view.d
    return tl.load(p_v, mask=m_n[:, None] & (o_d < DV)[None, :], other=0.0), m_n


@triton.jit
def add_nonfinite(o_out, b_none, blocks, rows, place, t, c, WIDTH: tl.constexpr):
    """Adds the NaN and infinities of V to the rows that see them, to what is stored already: a rare way,
    which must not cost the usual one registers, so it goes WIDTH channels at a time, and key by key where a
    block has such values."""
    out = t.out
    tl.debug_barrier()  # other threads wrote what is read here
    for d in range(0, c.DV, WIDTH):
        o_d = d + tl.arange(0, WIDTH)
        # [BLOCK_M, WIDTH]
        p_out = out.p + o_out[:, None] + o_d[None, :] * out.d
        m_out = rows.m_row[:, None] & (o_d < c.DV)[None, :]
        b_out = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
        for j_0 in range(blocks.lo * c.BLOCK_N, blocks.hi * c.BLOCK_N, c.BLOCK_N):
            b_block, _ = load_values(j_0 + tl.arange(0, c.BLOCK_N), o_d, rows, place, t, c.DV)
            if has_nonfinite(b_block):
                for j in range(j_0, j_0 + c.BLOCK_N):
                    o_n = j + tl.arange(0, 1)
                    b_v, m_n = load_values(o_n, o_d, rows, place, t, c.DV)  # [1, WIDTH]
                    b_seen = visible_pairs(t.x, place, rows, Keys(j, o_n, m_n), c.BELOW)
                    b_out += tl.where(b_seen & (b_none == 0)[:, None], nonfinite_only(b_v), 0.0)
        tl.store(p_out, b_out.to(out.p.dtype.element_ty), mask=m_out)


@triton.jit
def attend(t, n, c, q0, q1, k0, k1, v0, v1, entries):
    """One program per tile, in a grid (tiles, heads, requests) or with LINEAR of one dimension, splits the
    fastest; or with PERSISTENT a few that walk over all tiles. Descriptors come by themselves: Triton 3.6
    starts no kernel that has them in a tuple."""
    boxes = Boxes(q0, q1, k0, k1, v0, v1, entries)
    views = t.q, t.k, t.v, t.v_view, t.out, t.lse, t.x
    t = Tensors(*views, t.visits, t.num_heads, t.group, t.k_scale, t.k_shift, t.v_scale, t.v_odd, boxes)
    if c.PERSISTENT:
        for i_t in range(tl.program_id(0), n.total, tl.num_programs(0)):
            i_m, i_head, i_b = unravel(i_t // n.num_splits, n.num_tiles, t.num_heads)
            attend_tile(i_m, i_head, i_b, i_t % n.num_splits, t, n, c)
    else:
        i_m, i_head, i_b, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2), 0
        if c.LINEAR:
            i_s = i_m % n.num_splits
            i_m, i_head, i_b = unravel(i_m // n.num_splits, n.num_tiles, t.num_heads)
        attend_tile(i_m, i_head, i_b, i_s, t, n, c)
