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

import triton
import triton.language as tl

from polyflash.backends.triton.blocks import (
    LN2,
    LOG2E,
    LOWEST,
    SUMS,
    TOO_FAR,
    accumulate,
    add_nonfinite,
    apply_mask,
    block_range,
    change_scores,
    find_rows,
    finite,
    held,
    keep,
    key_offsets,
    load_tile,
    load_turned,
    online_softmax,
    packed_rows,
    product,
    rescale,
    row_limits,
    shifts,
    store_tile,
    tile_ends,
    touched,
    turned_sign,
    unravel,
    visible_pairs,
)


@triton.jit
def load_block(
    x, x1, i_t, i_h, first_k, j_0, o_x, m_n, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, TURNED: tl.constexpr, DESCRIPTOR: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Channels of a block of keys or values, [BLOCK_N, BLOCK_D], or turned."""
    if DESCRIPTOR:
        d = x if FIRST == 0 else x1
        b_x = d.load([i_t, i_h, first_k + j_0, FIRST]).reshape(BLOCK_N, BLOCK_D)
        if TURNED:
            b_x = b_x.T
    elif TURNED:
        b_x = load_turned(x.p, o_x, m_n, x.d, FIRST, DIM, BLOCK_D, CACHE)
    else:
        b_x = load_tile(x.p, o_x, m_n, x.d, FIRST, DIM, BLOCK_D, CACHE)
    return b_x


@triton.jit
def attend_block(
    i_n, full_lo, full_hi, far, m_i, sums, lost, b_q0, b_q1, rows_of_tile, place, k, k1, v, v1, x, numbers,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr, FUSED: tl.constexpr,
    CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, BASE2: tl.constexpr,
    PRODUCT: tl.constexpr,
    SPLIT_EXP: tl.constexpr, LAZY: tl.constexpr, THREADS: tl.constexpr, MASK_ADD: tl.constexpr,
    DESCRIPTOR: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """One key block: its scores, their weights, their share of the output. Blocks in [full_lo, full_hi) hide
    nothing, unless MASKED. With CLEAN of the finite values alone. `far`: rows of large scores, or None."""
    o_i, o_h, o_lo, o_hi = rows_of_tile
    i_b, i_t, i_hkv, first_k, rows, live, position, i_plane = place
    scale, softcap, factor, seed_lo, seed_hi, drop_below, keep_scale = numbers
    j_0 = i_n * BLOCK_N
    o_n = j_0 + tl.arange(0, BLOCK_N)
    o_k, m_n = o_n, o_n < live
    if not DESCRIPTOR:
        o_k, m_n = key_offsets(x, k, i_b, i_t, i_hkv, first_k, o_n, live)
    # [BLOCK_M, BLOCK_N]
    b_s = tl.zeros([o_i.shape[0], BLOCK_N], tl.float32)
    b_k = load_block(k, k1, i_t, i_hkv, first_k, j_0, o_k, m_n, 0, D, D0, BLOCK_N, True, DESCRIPTOR, CACHE)
    b_s = product(b_q0, b_k, b_s, PRODUCT)
    if D1 > 0:
        b_k = load_block(
            k, k1, i_t, i_hkv, first_k, j_0, o_k, m_n, D0, D, D1, BLOCK_N, True, DESCRIPTOR, CACHE
        )
        b_s = product(b_q1, b_k, b_s, PRODUCT)
    if CHANGED:
        m_pair = (o_i < rows)[:, None] & m_n[None, :]
        b_s, _ = change_scores(b_s, x, i_b, o_i, o_h, o_n, m_pair, position, scale, softcap, SOFTCAP)
    if x.page_table is not None:  # an entry that names no page hides its keys
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
    if WHOLE:
        pass
    elif MASKED:
        b_seen = visible_pairs(x, i_b, o_i, o_h, o_n, o_lo, o_hi, m_n, rows, live)
        b_s = apply_mask(b_s, b_seen, float("-inf"), MASK_ADD)
    elif i_n < full_lo or i_n >= full_hi:
        b_seen = visible_pairs(x, i_b, o_i, o_h, o_n, o_lo, o_hi, m_n, rows, live)
        b_s = apply_mask(b_s, b_seen, float("-inf"), MASK_ADD)
    l_i, acc0, acc1 = sums
    l_lost, lost0, lost1 = lost
    EXACT: tl.constexpr = b_q0.dtype == tl.float32
    b_p, m_i, l_i, l_lost, alpha = online_softmax(
        b_s, m_i, l_i, l_lost, factor, far, BASE2, SPLIT_EXP, FUSED, EXACT, LAZY
    )
    if DROPOUT:
        b_kept = keep(i_plane + o_h, o_i, j_0, seed_lo, seed_hi, drop_below, BLOCK_N)
        b_p = tl.where(b_kept, b_p * keep_scale, 0.0)
    # Before the wait for V, so that all this fills the gaps between the exponentials.
    b_p = b_p.to(b_q0.dtype)
    acc0 = rescale(acc0, alpha, LAZY and FUSED, THREADS)
    if DV1 > 0:
        acc1 = rescale(acc1, alpha, LAZY and FUSED, THREADS)
    o_v = o_k
    if not DESCRIPTOR:
        o_v, m_n = key_offsets(x, v, i_b, i_t, i_hkv, first_k, o_n, live)
    # Both blocks are loaded before either product: Triton 3.6 let the second take the place of the first
    # while an asynchronous product was still reading it.
    b_v0 = load_block(
        v, v1, i_t, i_hkv, first_k, j_0, o_v, m_n, 0, DV, DV0, BLOCK_N, False, DESCRIPTOR, CACHE
    )
    b_v1 = b_v0
    if DV1 > 0:
        b_v1 = load_block(
            v, v1, i_t, i_hkv, first_k, j_0, o_v, m_n, DV0, DV, DV1, BLOCK_N, False, DESCRIPTOR, CACHE
        )
    if CLEAN:
        b_v0 = finite(b_v0)
        if DV1 > 0:
            b_v1 = finite(b_v1)
    acc0, lost0 = accumulate(acc0, lost0, b_p, b_v0, alpha, PRODUCT)
    if DV1 > 0:
        acc1, lost1 = accumulate(acc1, lost1, b_p, b_v1, alpha, PRODUCT)
    return m_i, (l_i, acc0, acc1), (l_lost, lost0, lost1)


@triton.jit
def attend_blocks(
    n_lo, n_hi, full_lo, full_hi, far, state, b_q0, b_q1, rows_of_tile, place, k, k1, v, v1, x, numbers,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr, FUSED: tl.constexpr,
    CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, BASE2: tl.constexpr,
    PRODUCT: tl.constexpr,
    SPLIT_EXP: tl.constexpr, LAZY: tl.constexpr, THREADS: tl.constexpr, MASK_ADD: tl.constexpr,
    DESCRIPTOR: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """The online softmax over key blocks [n_lo, n_hi), less those that no interval list touches."""
    m_i, sums, lost = state
    for i_n in tl.range(n_lo, n_hi, num_stages=NUM_STAGES):
        if x.intervals is None or touched(
            x, place[0], rows_of_tile[0], rows_of_tile[1], place[4], i_n * BLOCK_N, BLOCK_N
        ):
            m_i, sums, lost = attend_block(
                i_n, full_lo, full_hi, far, m_i, sums, lost, b_q0, b_q1, rows_of_tile, place, k, k1, v, v1, x,
                numbers, D, D0, D1, DV, DV0, DV1, BLOCK_N, WHOLE, MASKED, CLEAN, FUSED, CHANGED,
                SOFTCAP, DROPOUT, BASE2, PRODUCT, SPLIT_EXP, LAZY, THREADS, MASK_ADD, DESCRIPTOR, CACHE,
            )  # fmt: skip
    return m_i, sums, lost


@triton.jit
def attend_tile(
    i_m, i_head, i_b, i_s, q, q0, q1, k, k1, v, v1, values, out, lse, x, numbers, sizes,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    AGAIN_STAGES: tl.constexpr, PACK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, NEGATIVE: tl.constexpr, CHANGED: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, BASE2: tl.constexpr, PRODUCT: tl.constexpr, SPLIT_EXP: tl.constexpr,
    LAZY: tl.constexpr,
    LATE_SUM: tl.constexpr, COMPENSATE: tl.constexpr, THREADS: tl.constexpr, HOLD_Q: tl.constexpr,
    MASK_ADD: tl.constexpr,
    HEAVY_FIRST: tl.constexpr, DESCRIPTOR: tl.constexpr, CACHE: tl.constexpr,
    SPLIT: tl.constexpr, ALWAYS_MASKED: tl.constexpr, WHOLE: tl.constexpr, visits,
):  # fmt: skip
    """One query tile of one head (or group), over all its keys or over those of one split."""
    batch, num_heads, group, seqlen_q, seqlen_k = sizes[:5]
    num_tiles, num_splits, split_keys, offset, left, right = sizes[5:]
    i_t = ((i_b * num_heads + i_head) * num_tiles + i_m) * num_splits + i_s
    i_m, i_b, i_batch, where = find_rows(
        i_m, i_b, x, num_tiles, batch, seqlen_q, seqlen_k, group, offset, HEAVY_FIRST, HAS_OFFSET, BLOCK_M,
        PACK,
    )  # fmt: skip
    first_q, first_k, rows, start, live, position = where
    G = group if PACK else 1
    if i_m * BLOCK_M < rows * G:
        o_i, o_g = packed_rows(i_m, group, BLOCK_M, PACK)
        i_hkv = i_head if PACK else i_head // group
        o_h = i_head * group + o_g if PACK else i_head + o_g
        lo_shift, hi_shift = shifts(position, rows, live, left, right, HAS_LEFT, HAS_RIGHT)
        o_lo, o_hi = row_limits(x, o_i, rows, start, live, lo_shift, hi_shift)
        i_first, i_last = tile_ends(i_m, rows, group, BLOCK_M, PACK)
        n_lo, n_hi, full_lo, full_hi = block_range(
            x, i_first, i_last, o_i, o_lo, o_hi, rows, start, live, lo_shift, hi_shift, BLOCK_N
        )
        if WHOLE:
            n_lo, n_hi, full_lo, full_hi = 0, seqlen_k // BLOCK_N, 0, seqlen_k // BLOCK_N
        if SPLIT:
            s_lo, s_hi = i_s * (split_keys // BLOCK_N), (i_s + 1) * (split_keys // BLOCK_N)
            n_lo, n_hi = tl.minimum(tl.maximum(n_lo, s_lo), s_hi), tl.minimum(tl.maximum(n_hi, s_lo), s_hi)
            full_lo = tl.minimum(tl.maximum(full_lo, n_lo), n_hi)
            full_hi = tl.minimum(tl.maximum(full_hi, full_lo), n_hi)
        if visits is not None:
            count = n_hi - n_lo
            if x.intervals is not None:
                count = 0
                for i_n in range(n_lo, n_hi):
                    count += touched(x, i_b, o_i, o_h, rows, i_n * BLOCK_N, BLOCK_N).to(tl.int32)
            tl.store(visits + i_t, count)

        m_row = o_i < rows
        o_q = tl.cast(i_batch, tl.int64) * q.b + o_h.to(tl.int64) * q.h + (first_q + o_i).to(tl.int64) * q.s
        if q0 is not None:
            b_q0 = q0.load([i_batch, i_head, first_q + i_m * BLOCK_M, 0]).reshape(BLOCK_M, D0)
            b_q1 = b_q0
            if D1 > 0:
                b_q1 = q1.load([i_batch, i_head, first_q + i_m * BLOCK_M, D0]).reshape(BLOCK_M, D1)
        else:
            b_q0 = load_tile(q.p, o_q, m_row, q.d, 0, D, D0, "")
            b_q1 = load_tile(q.p, o_q, m_row, q.d, D0, D, D1, "") if D1 > 0 else b_q0
        if NEGATIVE:
            b_q0, b_q1 = turned_sign(b_q0), turned_sign(b_q1)
        if HOLD_Q:
            b_q0, b_q1 = held(b_q0, seqlen_q), held(b_q1, seqlen_q)
        m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        # [BLOCK_M, head_dim_v]
        acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
        acc1 = tl.zeros([BLOCK_M, DV1], tl.float32) if DV1 > 0 else acc0
        EXACT: tl.constexpr = q.p.dtype.element_ty == tl.float32
        lost = (l_i, acc0, acc1) if EXACT and COMPENSATE else (l_i, l_i, l_i)  # without planes none is kept
        if LATE_SUM and not EXACT:
            l_i = tl.zeros([BLOCK_M, SUMS], tl.float32)
        fresh = (m_i, (l_i, acc0, acc1), lost)
        BELOW: tl.constexpr = HAS_LEFT or x.kv_starts is not None or x.row_bounds is not None
        tile, place = (o_i, o_h, o_lo if BELOW else None, o_hi), (
            i_b, i_batch, i_hkv, first_k, rows, live, position, i_b * (num_heads * G if PACK else num_heads),
        )  # fmt: skip
        # Splits are merged by their maxima, so those are units of s, which no rounding has touched.
        FUSED: tl.constexpr = not (EXACT or CHANGED or SPLIT)
        state = attend_blocks(
            n_lo, n_hi, full_lo, full_hi, None, fresh, b_q0, b_q1, tile, place, k, k1, v, v1, x, numbers,
            D, D0, D1, DV, DV0, DV1, BLOCK_N, NUM_STAGES, WHOLE, ALWAYS_MASKED, False, FUSED, CHANGED,
            SOFTCAP, DROPOUT, BASE2, PRODUCT, SPLIT_EXP, LAZY, THREADS, MASK_ADD, DESCRIPTOR, CACHE,
        )  # fmt: skip
        state = summed(state)
        units = numbers[0]
        far = far_rows(state) if FUSED else None
        spoiled = is_spoiled(state, far, WHOLE, DV1)
        if FUSED or not WHOLE:
            if spoiled:  # once more, of V the finite values alone
                state = attend_blocks(
                    n_lo, n_hi, n_lo, n_lo, far, fresh, b_q0, b_q1, tile, place, k, k1, v, v1, x, numbers,
                    D, D0, D1, DV, DV0, DV1, BLOCK_N, AGAIN_STAGES, WHOLE, not WHOLE, not WHOLE, FUSED,
                    CHANGED, SOFTCAP, DROPOUT, BASE2, PRODUCT, SPLIT_EXP, LAZY, THREADS, MASK_ADD,
                    DESCRIPTOR, CACHE,
                )  # fmt: skip
                state = summed(state)
        if FUSED:
            ONE: tl.constexpr = LN2 if BASE2 else 1.0
            units = tl.where(far, numbers[2] * ONE, ONE)
        elif CHANGED:
            units = 1.0
        elif NEGATIVE:
            units = -units
        o_out, b_none = finalize(
            state, out, lse, x, i_b, i_batch, batch, i_s, num_splits, o_h, first_q + o_i, m_row, units, DV,
            DV0, DV1, SPLIT, EXACT,
        )  # fmt: skip
        if not WHOLE:
            if spoiled:
                add_nonfinite(out, o_out, b_none, n_lo, n_hi, tile, place, values, x, DV, BLOCK_N, 16)


@triton.jit
def summed(state):
    """With l of whole rows."""
    m_i, sums, lost = state
    l_i, acc0, acc1 = sums
    if len(l_i.shape) == 2:
        l_i = tl.sum(l_i, 1)
    return m_i, (l_i, acc0, acc1), lost


@triton.jit
def far_rows(state):
    """Rows whose scores are so large, or not finite, that their weights are not those of one multiply-add."""
    m_i, sums, _ = state
    l_i, _, _ = sums
    return ((tl.abs(m_i) > TOO_FAR) & (m_i != LOWEST)) | (l_i - l_i != 0.0)


@triton.jit
def is_spoiled(state, far, WHOLE: tl.constexpr, DV1: tl.constexpr):
    """Is a row far, or a sum not finite? A weight of 0 times a hidden NaN is NaN."""
    _, sums, _ = state
    _, acc0, acc1 = sums
    spoiled = False
    if not WHOLE:
        # flat, because on sm_100 a row's sum of what tensor memory holds ends Triton 3.6
        total = tl.sum(tl.ravel(acc0, can_reorder=True), 0)
        if DV1 > 0:
            total += tl.sum(tl.ravel(acc1, can_reorder=True), 0)
        spoiled = total - total != 0.0
    if far is not None:
        spoiled = spoiled | (tl.max(far.to(tl.int32), 0) > 0)
    return spoiled


@triton.jit
def finalize(
    state, out, lse, x, i_b, i_batch, batch, i_s, num_splits, o_h, o_row, m_row, units,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """out = acc / l and lse; of one split out, m and, `num_splits` further on, l,
    to which no sink belongs yet.
    A row that saw no key is 0 and -inf. m times `units`, of the tile or of each row, is natural. Returns
    where the rows of out are, and which have no weights."""
    m_i, sums, lost = state
    l_i, acc0, acc1 = sums
    if EXACT:  # so that a block of which a row sees nothing changes no bit of it
        l_lost, lost0, lost1 = lost
        l_i = l_i + l_lost
        if len(lost0.shape) == 2:
            acc0, acc1 = acc0 + lost0, acc1 + lost1
    b_m = tl.where(l_i == 0.0, float("-inf"), m_i if SPLIT else m_i * units)
    if not SPLIT and x.sinks is not None:
        b_sink = tl.load(x.sinks + o_h, mask=m_row & (i_b < batch), other=float("-inf")).to(tl.float32)
        b_top = tl.maximum(b_m, b_sink)
        b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_share = tl.exp2((b_m - b_top) * LOG2E)
        l_i = l_i * b_share + tl.exp2((b_sink - b_top) * LOG2E)
        acc0, acc1 = acc0 * b_share[:, None], acc1 * b_share[:, None]
        b_m = b_top
    b_none = l_i == 0.0
    b_l = tl.where(b_none, 1.0, l_i)
    if lse is not None:
        o_lse = tl.cast(i_batch + i_s * batch if SPLIT else i_batch, tl.int64) * lse.b
        p_lse = lse.p + o_lse + o_h.to(tl.int64) * lse.h + o_row.to(tl.int64) * lse.s
        if SPLIT:
            tl.store(p_lse, b_m, mask=m_row)
            tl.store(p_lse + tl.cast(num_splits * batch, tl.int64) * lse.b, l_i, mask=m_row)
        else:
            tl.store(p_lse, tl.where(b_none, float("-inf"), tl.fma(tl.log2(b_l), LN2, b_m)), mask=m_row)
    o_out = tl.cast(i_batch + i_s * batch if SPLIT else i_batch, tl.int64) * out.b
    o_out += o_h.to(tl.int64) * out.h + o_row.to(tl.int64) * out.s
    if EXACT:
        acc0, acc1 = acc0 / b_l[:, None], acc1 / b_l[:, None]
    else:
        acc0, acc1 = acc0 * (1.0 / b_l)[:, None], acc1 * (1.0 / b_l)[:, None]
    store_tile(out.p, o_out, m_row, out.d, acc0, 0, DV, DV0)
    if DV1 > 0:
        store_tile(out.p, o_out, m_row, out.d, acc1, DV0, DV, DV1)
    return o_out, b_none


_PER_CALL = (
    *("batch", "seqlen_q", "seqlen_k", "num_tiles", "num_splits", "split_keys", "total"),
    *("offset", "left", "right", "seed_lo", "seed_hi", "drop_below"),
)


@triton.jit(do_not_specialize=_PER_CALL)
def attend(
    q, q0, q1, k, k1, v, v1, values, out, lse, x, visits,
    batch, num_heads, group, seqlen_q, seqlen_k, num_tiles, num_splits, split_keys, total, offset, left,
    right, scale, softcap, factor, seed_lo, seed_hi, drop_below, keep_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    AGAIN_STAGES: tl.constexpr, PACK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, NEGATIVE: tl.constexpr, CHANGED: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, BASE2: tl.constexpr, PRODUCT: tl.constexpr, SPLIT_EXP: tl.constexpr,
    LAZY: tl.constexpr,
    LATE_SUM: tl.constexpr, COMPENSATE: tl.constexpr, THREADS: tl.constexpr, HOLD_Q: tl.constexpr,
    MASK_ADD: tl.constexpr,
    HEAVY_FIRST: tl.constexpr, DESCRIPTOR: tl.constexpr, CACHE: tl.constexpr,
    SPLIT: tl.constexpr, ALWAYS_MASKED: tl.constexpr, WHOLE: tl.constexpr, PERSISTENT: tl.constexpr,
    LINEAR: tl.constexpr,
):  # fmt: skip
    """One program per tile, in a grid (tiles, heads, requests) or with LINEAR of one dimension, splits the
    fastest; or with PERSISTENT a few that walk over all tiles. WHOLE: rows see every key of every block."""
    sizes = (
        batch, num_heads, group, seqlen_q, seqlen_k, num_tiles, num_splits, split_keys, offset, left, right,
    )  # fmt: skip
    numbers = (scale, softcap, factor, seed_lo, seed_hi, drop_below, keep_scale)
    if PERSISTENT:
        for i_t in range(tl.program_id(0), total, tl.num_programs(0)):
            i_m, i_head, i_b = unravel(i_t // num_splits, num_tiles, num_heads)
            i_s = i_t % num_splits
            attend_tile(
                i_m, i_head, i_b, i_s, q, q0, q1, k, k1, v, v1, values, out, lse, x, numbers, sizes,
                D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, NUM_STAGES, AGAIN_STAGES, PACK, HAS_OFFSET,
                HAS_LEFT, HAS_RIGHT, NEGATIVE, CHANGED, SOFTCAP, DROPOUT, BASE2, PRODUCT, SPLIT_EXP, LAZY,
                LATE_SUM, COMPENSATE,
                THREADS, HOLD_Q, MASK_ADD, HEAVY_FIRST, DESCRIPTOR, CACHE, SPLIT, ALWAYS_MASKED, WHOLE,
                visits,
            )  # fmt: skip
    else:
        i_m, i_head, i_b, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2), 0
        if LINEAR:
            i_s = i_m % num_splits
            i_m, i_head, i_b = unravel(i_m // num_splits, num_tiles, num_heads)
        attend_tile(
            i_m, i_head, i_b, i_s, q, q0, q1, k, k1, v, v1, values, out, lse, x, numbers, sizes,
            D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, NUM_STAGES, AGAIN_STAGES, PACK, HAS_OFFSET, HAS_LEFT,
            HAS_RIGHT, NEGATIVE, CHANGED, SOFTCAP, DROPOUT, BASE2, PRODUCT, SPLIT_EXP, LAZY, LATE_SUM,
            COMPENSATE,
            THREADS, HOLD_Q,
            MASK_ADD, HEAVY_FIRST, DESCRIPTOR, CACHE, SPLIT, ALWAYS_MASKED, WHOLE, visits,
        )  # fmt: skip
