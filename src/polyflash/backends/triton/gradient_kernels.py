"""The device side of the backward pass: `center`, `make_dkv` and `make_dq`. What they compute stands in
backward.py; their tiles are [BLOCK_N, BLOCK_M] where a program owns keys and [BLOCK_M, BLOCK_N] where it owns
rows, so that what is summed is the first operand's rows."""

from __future__ import annotations

import triton
import triton.language as tl

from polyflash.backends.triton.blocks import (
    LOG2E,
    block_range,
    change_scores,
    find_keys,
    find_rows,
    finite,
    has_nonfinite,
    keep,
    load_tile,
    nonfinite_only,
    packed_rows,
    product,
    row_limits,
    row_offsets,
    shifts,
    store_tile,
    tile_ends,
    unravel,
    visible_pairs,
)


@triton.jit
def row_range(j_0, rows, start, live, lo_shift, hi_shift, group, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, PACK: tl.constexpr):  # fmt: skip
    """Row blocks [m_lo, m_hi) of which some row sees a key of the block at j_0, and inside them
    [full_lo, full_hi) of which every row sees the whole block: the inverse of `block_range`."""
    first, end = tl.maximum(j_0, start), tl.minimum(j_0 + BLOCK_N, live)
    # row i sees keys [i + lo_shift, i + hi_shift)
    i_lo = tl.maximum(first - hi_shift + 1, 0)
    i_hi = tl.minimum(end - lo_shift, rows)
    i_hi = tl.where(end > first, tl.maximum(i_hi, i_lo), i_lo)
    whole = (j_0 >= start) & (j_0 + BLOCK_N <= live)
    all_lo = tl.where(whole, tl.maximum(j_0 + BLOCK_N - hi_shift, i_lo), i_lo)
    all_hi = tl.where(whole, tl.minimum(j_0 - lo_shift + 1, i_hi), i_lo)
    G = group if PACK else 1
    m_lo = i_lo * G // BLOCK_M
    m_hi = tl.where(i_hi > i_lo, (i_hi * G + BLOCK_M - 1) // BLOCK_M, m_lo)
    full_lo = tl.where(whole, tl.minimum((all_lo * G + BLOCK_M - 1) // BLOCK_M, m_hi), m_lo)
    full_hi = tl.maximum(all_hi, 0) * G // BLOCK_M
    return m_lo, m_hi, full_lo, tl.minimum(tl.maximum(full_hi, full_lo), m_hi)


@triton.jit
def head_offsets(x, i_b, o_h, o_row):
    """Element offsets of rows that belong to heads of their own, int64."""
    return tl.cast(i_b, tl.int64) * x.b + o_h.to(tl.int64) * x.h + o_row.to(tl.int64) * x.s


@triton.jit
def packed_base(x, i_b, i_hkv, first_q, group):
    """Where the packed rows of a request begin in what `center` wrote: as they are one behind the other, a
    block of them needs one address and not one per row."""
    return tl.cast(i_b, tl.int64) * x.b + tl.cast(i_hkv, tl.int64) * x.h + tl.cast(first_q, tl.int64) * group


@triton.jit
def recompute(b_s, b_lse, scale, CHANGED: tl.constexpr, BASE2: tl.constexpr):
    """exp(scale·s - lse); b_lse broadcasts to b_s. The product is rounded as the forward rounds the maximum,
    so that the weight of an only key is 1 however large its score; hence no fused multiply-add."""
    b_x = b_s - b_lse if CHANGED else b_s * scale - b_lse
    return tl.exp2(b_x * LOG2E) if BASE2 else tl.exp(b_x)


@triton.jit
def has_odd(x, o_x, m_x, DIM: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Is something in rows at offsets o_x NaN or infinite?"""
    odd = has_nonfinite(load_tile(x.p, o_x, m_x, x.d, 0, DIM, FIRST, ""))
    if SECOND > 0:
        odd = odd | has_nonfinite(load_tile(x.p, o_x, m_x, x.d, FIRST, DIM, SECOND, ""))
    return odd


@triton.jit(do_not_specialize=("batch", "seqlen_q", "seqlen_k", "row_tiles", "key_tiles"))
def center(
    q, k, v, out, dout, lse, dlse, row_lse, delta, odd, kv_lens,
    batch, num_heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """delta = Σ_d do·out - dlse, and lse with +inf for rows that saw no key (their delta is 0), both in the
    order of packed rows; and whether a q, k, v, do or delta is not finite. The first programs have
    BLOCK_M rows of one query head each, the others keys of one key/value head."""
    i_t = tl.program_id(0)
    row_programs = row_tiles * num_heads * batch
    if i_t < row_programs:
        i_m, i_bh = i_t % row_tiles, i_t // row_tiles
        i_h, i_b = i_bh % num_heads, i_bh // num_heads
        o_i = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        m_row = o_i < seqlen_q
        b_lse = tl.load(lse.p + row_offsets(lse, i_b, i_h, o_i), mask=m_row, other=float("-inf"))
        m_live = b_lse != float("-inf")
        o_out, o_do = row_offsets(out, i_b, i_h, o_i), row_offsets(dout, i_b, i_h, o_i)
        b_out = load_tile(out.p, o_out, m_live, out.d, 0, DV, DV0, "").to(tl.float32)
        b_do = load_tile(dout.p, o_do, m_live, dout.d, 0, DV, DV0, "").to(tl.float32)
        b_delta = tl.sum(b_do * b_out, 1)
        if DV1 > 0:
            b_out = load_tile(out.p, o_out, m_live, out.d, DV0, DV, DV1, "").to(tl.float32)
            b_do = load_tile(dout.p, o_do, m_live, dout.d, DV0, DV, DV1, "").to(tl.float32)
            b_delta += tl.sum(b_do * b_out, 1)
        if dlse is not None:
            b_delta -= tl.load(dlse.p + row_offsets(dlse, i_b, i_h, o_i), mask=m_live, other=0.0)
        o_w = packed_base(row_lse, i_b, i_h // group, 0, group) + o_i.to(tl.int64) * group + i_h % group
        tl.store(row_lse.p + o_w, tl.where(m_live, b_lse, float("inf")), mask=m_row)
        tl.store(delta.p + o_w, b_delta, mask=m_row)
        found = has_odd(q, row_offsets(q, i_b, i_h, o_i), m_row, D, D0, D1)
        found = found | has_odd(dout, o_do, m_row, DV, DV0, DV1)
        found = found | (tl.max(tl.where(b_delta - b_delta == 0.0, 0, 1), 0) > 0)  # of scores, out or dlse
        tl.store(odd, 1, mask=found)
        if i_t == 0:  # what blocks read behind the last row
            o_pad = tl.cast(batch, tl.int64) * row_lse.b + tl.arange(0, PAD)
            tl.store(row_lse.p + o_pad, tl.full([PAD], float("inf"), tl.float32))
            tl.store(delta.p + o_pad, tl.zeros([PAD], tl.float32))
    else:
        i_t -= row_programs
        i_n, i_bh = i_t % key_tiles, i_t // key_tiles
        num_kv_heads = num_heads // group
        i_h, i_b = i_bh % num_kv_heads, i_bh // num_kv_heads
        live = seqlen_k
        if kv_lens is not None:
            live = tl.minimum(tl.load(kv_lens + i_b), seqlen_k)
        o_n = i_n * BLOCK_M + tl.arange(0, BLOCK_M)
        found = has_odd(k, row_offsets(k, i_b, i_h, o_n), o_n < live, D, D0, D1)
        found = found | has_odd(v, row_offsets(v, i_b, i_h, o_n), o_n < live, DV, DV0, DV1)
        tl.store(odd, 1, mask=found)


@triton.jit
def add_nonfinite_rows(
    acc, m_lo, m_hi, heads, group, o_n, m_n, place, limits, dout, lse, x,
    FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Adds the NaN and infinities of dO to the dV of keys that their rows see, row by row: rare."""
    i_b, i_batch, first_q, o_w, rows, live, _position, _i_plane = place
    for i_r in range(m_lo * BLOCK_M, m_hi * BLOCK_M):
        o_i, o_g = packed_rows(i_r, group, 1, PACK)
        o_h = heads + o_g
        m_row = o_i < rows
        b_lse = tl.load(lse.p + o_w + i_r + tl.arange(0, 1))
        m_row = m_row & (b_lse != float("inf"))
        start, lo_shift, hi_shift = limits
        o_lo, o_hi = row_limits(x, o_i, rows, start, live, lo_shift, hi_shift)
        o_do = head_offsets(dout, i_batch, o_h, first_q + o_i)
        # [1, BLOCK_D]
        b_do = nonfinite_only(load_tile(dout.p, o_do, m_row, dout.d, FIRST, DIM, BLOCK_D, ""))
        b_seen = visible_pairs(x, i_b, o_i, o_h, o_n, o_lo, o_hi, m_n, rows, live)
        acc += tl.where(tl.trans(b_seen), b_do, 0.0)
    return acc


@triton.jit
def walk_rows(
    m_lo, m_hi, full_lo, full_hi, state, b_k0, b_k1, b_v0, b_v1, heads, group, j_0, o_n, m_n, place, limits,
    q, dout, lse, delta, dq_sum, x, numbers,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    PACK: tl.constexpr, ALWAYS_MASKED: tl.constexpr, FINITE: tl.constexpr, CHANGED: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, BASE2: tl.constexpr, PRODUCT: tl.constexpr,
    DK: tl.constexpr, DVS: tl.constexpr,
):  # fmt: skip
    """Adds what row blocks [m_lo, m_hi) give to dk and dv of one key block. One loop, in which blocks outside
    [full_lo, full_hi) are masked: keys that several loops read would stay in registers between them."""
    dk0, dk1, dv0, dv1 = state
    i_b, i_batch, first_q, o_w, rows, live, position, i_plane = place
    scale, softcap, seed_lo, seed_hi, drop_below, keep_scale = numbers
    odd = m_lo < 0  # is there anything in dO that is not finite?
    for i_m in tl.range(m_lo, m_hi, num_stages=NUM_STAGES):
        o_i, o_g = packed_rows(i_m, group, BLOCK_M, PACK)
        o_h = heads + o_g
        m_row = o_i < rows
        o_q = head_offsets(q, i_batch, o_h, first_q + o_i)
        o_do = head_offsets(dout, i_batch, o_h, first_q + o_i)
        i_w = o_w + tl.cast(i_m, tl.int64) * BLOCK_M
        b_lse = tl.load(lse.p + i_w + tl.arange(0, BLOCK_M))
        # [BLOCK_N, BLOCK_M]
        b_q0 = load_tile(q.p, o_q, m_row, q.d, 0, D, D0, "")
        b_q1 = b_q0
        b_st = product(b_k0, tl.trans(b_q0), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRODUCT)
        if D1 > 0:
            b_q1 = load_tile(q.p, o_q, m_row, q.d, D0, D, D1, "")
            b_st = product(b_k1, tl.trans(b_q1), b_st, PRODUCT)
        b_cap = 0.0
        if CHANGED:
            m_pair = m_row[:, None] & m_n[None, :]
            b_s, b_cap = change_scores(
                tl.trans(b_st), x, i_b, o_i, o_h, o_n, m_pair, position, scale, softcap, SOFTCAP
            )
            b_st = tl.trans(b_s)
        b_pt = recompute(b_st, b_lse[None, :], scale, CHANGED, BASE2)
        b_seen = m_n[:, None]
        if ALWAYS_MASKED or not FINITE:
            b_seen = turned_pairs(x, i_b, o_i, o_h, o_n, m_n, b_lse, rows, live, limits, FINITE)
            b_pt = tl.where(b_seen, b_pt, 0.0)
        elif (i_m < full_lo) | (i_m >= full_hi):
            b_seen_here = turned_pairs(x, i_b, o_i, o_h, o_n, m_n, b_lse, rows, live, limits, FINITE)
            b_pt = tl.where(b_seen_here, b_pt, 0.0)
        b_kept = b_seen
        if DROPOUT:
            b_kept = tl.trans(keep(i_plane + o_h, o_i, j_0, seed_lo, seed_hi, drop_below, BLOCK_N))
        b_do0 = load_tile(dout.p, o_do, m_row, dout.d, 0, DV, DV0, "")
        b_do1 = b_do0
        if DV1 > 0:
            b_do1 = load_tile(dout.p, o_do, m_row, dout.d, DV0, DV, DV1, "")
        if DVS:
            b_w = b_pt
            if DROPOUT:
                b_w = tl.where(b_kept, b_pt * keep_scale, 0.0)
            b_w = b_w.to(b_do0.dtype)
            if not FINITE:
                odd = odd | has_nonfinite(b_do0)
                dv0 = product(b_w, finite(b_do0), dv0, PRODUCT)
            else:
                dv0 = product(b_w, b_do0, dv0, PRODUCT)
            if DV1 > 0:
                if not FINITE:
                    odd = odd | has_nonfinite(b_do1)
                    dv1 = product(b_w, finite(b_do1), dv1, PRODUCT)
                else:
                    dv1 = product(b_w, b_do1, dv1, PRODUCT)
        if DK or dq_sum is not None:
            b_delta = tl.load(delta.p + i_w + tl.arange(0, BLOCK_M))
            b_dpt = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            if not DROPOUT:  # the product starts where it has to end up: no register keeps delta meanwhile
                b_dpt -= b_delta[None, :]
            b_dpt = product(b_v0, tl.trans(b_do0), b_dpt, PRODUCT)
            if DV1 > 0:
                b_dpt = product(b_v1, tl.trans(b_do1), b_dpt, PRODUCT)
            if DROPOUT:
                b_dpt = tl.where(b_kept, b_dpt * keep_scale, 0.0) - b_delta[None, :]
            b_dst = b_pt * b_dpt
            if SOFTCAP:
                b_dst *= 1.0 - tl.trans(b_cap * b_cap)
            if not FINITE:
                b_dst = tl.where(b_seen, b_dst, 0.0)
                b_q0 = finite(b_q0)
                if D1 > 0:
                    b_q1 = finite(b_q1)
            b_dst = b_dst.to(b_q0.dtype)
            if DK:
                dk0 = product(b_dst, b_q0, dk0, PRODUCT)
                if D1 > 0:
                    dk1 = product(b_dst, b_q1, dk1, PRODUCT)
            if dq_sum is not None:
                o_dq = head_offsets(dq_sum, i_batch, o_h, first_q + o_i)
                add_atomically(dq_sum, o_dq, m_row, tl.trans(b_dst), b_k0, 0, D, D0, BLOCK_M, PRODUCT)
                if D1 > 0:
                    add_atomically(dq_sum, o_dq, m_row, tl.trans(b_dst), b_k1, D0, D, D1, BLOCK_M, PRODUCT)
    if DVS and not FINITE:
        if odd:
            dv0 = add_nonfinite_rows(
                dv0, m_lo, m_hi, heads, group, o_n, m_n, place, limits, dout, lse, x, 0, DV, DV0, BLOCK_M,
                PACK,
            )  # fmt: skip
            if DV1 > 0:
                dv1 = add_nonfinite_rows(
                    dv1, m_lo, m_hi, heads, group, o_n, m_n, place, limits, dout, lse, x,
                    DV0, DV, DV1, BLOCK_M, PACK,
                )  # fmt: skip
    return dk0, dk1, dv0, dv1


@triton.jit
def turned_pairs(x, i_b, o_i, o_h, o_n, m_n, b_lse, rows, live, limits, FINITE: tl.constexpr):
    """`visible_pairs` as [BLOCK_N, BLOCK_M]; a row of no weight sees nothing, whatever stands in it."""
    start, lo_shift, hi_shift = limits
    o_lo, o_hi = row_limits(x, o_i, rows, start, live, lo_shift, hi_shift)
    if not FINITE:
        o_hi = tl.where(b_lse == float("inf"), o_lo, o_hi)
    return tl.trans(visible_pairs(x, i_b, o_i, o_h, o_n, o_lo, o_hi, m_n, rows, live))


@triton.jit
def add_atomically(dq_sum, o_dq, m_row, b_ds, b_k, FIRST: tl.constexpr, DIM: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PRODUCT: tl.constexpr):  # fmt: skip
    """Adds ds @ k to float32 sums that all key blocks share, in whatever order they come."""
    b_dq = product(b_ds, finite(b_k), tl.zeros([BLOCK_M, BLOCK_D], tl.float32), PRODUCT)
    o_d = FIRST + tl.arange(0, BLOCK_D)
    m = m_row[:, None] & (o_d < DIM)[None, :]
    tl.atomic_add(dq_sum.p + o_dq[:, None] + o_d[None, :] * dq_sum.d, b_dq, mask=m, sem="relaxed")


_PER_CALL = (
    *("batch", "seqlen_q", "seqlen_k", "num_tiles", "total", "offset", "left", "right"),
    *("seed_lo", "seed_hi", "drop_below"),
)


@triton.jit
def dkv_tile(
    i_t, q, k, v, dout, lse, delta, dk, dv, dq_sum, x, visits, sizes, numbers,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    PACK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, BASE2: tl.constexpr,
    PRODUCT: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key block of one key/value head, over all rows of all its query heads that see it."""
    batch, num_kv_heads, group, seqlen_q, seqlen_k, num_tiles, offset, left, right = sizes
    scale, _softcap, _seed_lo, _seed_hi, _drop_below, _keep_scale = numbers
    i_n, i_hkv, i_b = unravel(i_t, num_tiles, num_kv_heads)
    i_n, i_b, i_batch, keys, where = find_keys(
        i_n, i_b, x, batch, seqlen_q, seqlen_k, offset, HAS_OFFSET, BLOCK_N
    )
    first_q, first_k, rows, start, live, position = where
    j_0 = i_n * BLOCK_N
    if j_0 < keys:
        lo_shift, hi_shift = shifts(position, rows, live, left, right, HAS_LEFT, HAS_RIGHT)
        m_lo, m_hi, full_lo, full_hi = row_range(
            j_0, rows, start, live, lo_shift, hi_shift, group, BLOCK_M, BLOCK_N, PACK
        )
        if visits is not None:
            tl.store(visits + i_t, m_hi - m_lo)
        o_n = j_0 + tl.arange(0, BLOCK_N)
        m_n = o_n < live
        o_k = row_offsets(k, i_batch, i_hkv, first_k + o_n)
        o_v = row_offsets(v, i_batch, i_hkv, first_k + o_n)
        b_k0 = load_tile(k.p, o_k, m_n, k.d, 0, D, D0, "")
        b_k1 = load_tile(k.p, o_k, m_n, k.d, D0, D, D1, "") if D1 > 0 else b_k0
        b_v0 = load_tile(v.p, o_v, m_n, v.d, 0, DV, DV0, "")
        b_v1 = load_tile(v.p, o_v, m_n, v.d, DV0, DV, DV1, "") if DV1 > 0 else b_v0
        DK: tl.constexpr = dk is not None
        DVS: tl.constexpr = dv is not None
        # [BLOCK_N, head_dim], [BLOCK_N, head_dim_v]
        dk0, dv0 = tl.zeros([BLOCK_N, D0], tl.float32), tl.zeros([BLOCK_N, DV0], tl.float32)
        dk1 = tl.zeros([BLOCK_N, D1], tl.float32) if D1 > 0 else dk0
        dv1 = tl.zeros([BLOCK_N, DV1], tl.float32) if DV1 > 0 else dv0
        state = (dk0, dk1, dv0, dv1)
        limits = (start, lo_shift, hi_shift)
        o_w = packed_base(lse, i_batch, i_hkv, first_q, group)
        place = (i_b, i_batch, first_q, o_w, rows, live, position, i_b * num_kv_heads * group)
        state = walk_rows(
            m_lo, m_hi, full_lo, full_hi, state, b_k0, b_k1, b_v0, b_v1, i_hkv * group, group, j_0, o_n, m_n,
            place, limits, q, dout, lse, delta, dq_sum, x, numbers, D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N,
            NUM_STAGES, PACK, ALWAYS_MASKED, FINITE, CHANGED, SOFTCAP, DROPOUT, BASE2, PRODUCT, DK, DVS,
        )  # fmt: skip
        dk0, dk1, dv0, dv1 = state
        m_key = o_n < keys
        if DK:
            o_k = row_offsets(dk, i_batch, i_hkv, first_k + o_n)
            store_tile(dk.p, o_k, m_key, dk.d, dk0 * scale, 0, D, D0)
            if D1 > 0:
                store_tile(dk.p, o_k, m_key, dk.d, dk1 * scale, D0, D, D1)
        if DVS:
            o_v = row_offsets(dv, i_batch, i_hkv, first_k + o_n)
            store_tile(dv.p, o_v, m_key, dv.d, dv0, 0, DV, DV0)
            if DV1 > 0:
                store_tile(dv.p, o_v, m_key, dv.d, dv1, DV0, DV, DV1)


@triton.jit(do_not_specialize=_PER_CALL)
def make_dkv(
    q, k, v, dout, lse, delta, dk, dv, dq_sum, odd, x, visits,
    batch, num_kv_heads, group, seqlen_q, seqlen_k, num_tiles, total, offset, left, right,
    scale, softcap, seed_lo, seed_hi, drop_below, keep_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    PACK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, BASE2: tl.constexpr,
    PRODUCT: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """One program per key block; does nothing unless all operands are finite. Without FINITE the same for
    those that are not: a few programs walk over all key blocks,
    and hidden pairs are kept out of every sum."""
    sizes = (batch, num_kv_heads, group, seqlen_q, seqlen_k, num_tiles, offset, left, right)
    numbers = (scale, softcap, seed_lo, seed_hi, drop_below, keep_scale)
    if FINITE:
        if tl.load(odd) == 0:
            dkv_tile(
                tl.program_id(0), q, k, v, dout, lse, delta, dk, dv, dq_sum, x, visits, sizes, numbers,
                D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, NUM_STAGES,
                PACK, HAS_OFFSET, HAS_LEFT, HAS_RIGHT, CHANGED, SOFTCAP, DROPOUT, BASE2, PRODUCT,
                ALWAYS_MASKED, True,
            )  # fmt: skip
    else:
        if tl.load(odd) != 0:
            for i_t in range(tl.program_id(0), total, tl.num_programs(0)):
                dkv_tile(
                    i_t, q, k, v, dout, lse, delta, dk, dv, dq_sum, x, visits, sizes, numbers,
                    D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, NUM_STAGES,
                    PACK, HAS_OFFSET, HAS_LEFT, HAS_RIGHT, CHANGED, SOFTCAP, DROPOUT, BASE2, PRODUCT,
                    ALWAYS_MASKED,
                    False,
                )  # fmt: skip


@triton.jit
def walk_keys(
    n_lo, n_hi, full_lo, full_hi, state, b_q0, b_q1, b_do0, b_do1, b_lse, b_delta, rows_of_tile, place, k, v,
    x, numbers,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    MASKED: tl.constexpr, CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    BASE2: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Adds what key blocks [n_lo, n_hi) give to dq of one row tile. Blocks outside [full_lo, full_hi) hide
    pairs; MASKED all may, and what is behind them may be anything."""
    dq0, dq1 = state
    _o_i, _o_h, _o_lo, _o_hi = rows_of_tile
    _i_b, i_batch, i_hkv, first_k, _rows, live, _position, _i_plane = place
    for i_n in tl.range(n_lo, n_hi, num_stages=NUM_STAGES):
        j_0 = i_n * BLOCK_N
        o_n = j_0 + tl.arange(0, BLOCK_N)
        m_n = o_n < live
        o_k = row_offsets(k, i_batch, i_hkv, first_k + o_n)
        o_v = row_offsets(v, i_batch, i_hkv, first_k + o_n)
        b_k0 = load_tile(k.p, o_k, m_n, k.d, 0, D, D0, "")
        b_k1 = load_tile(k.p, o_k, m_n, k.d, D0, D, D1, "") if D1 > 0 else b_k0
        b_v0 = load_tile(v.p, o_v, m_n, v.d, 0, DV, DV0, "")
        b_v1 = load_tile(v.p, o_v, m_n, v.d, DV0, DV, DV1, "") if DV1 > 0 else b_v0
        # [BLOCK_M, BLOCK_N]
        b_ds = differentiate_tile(
            b_q0, b_q1, b_k0, b_k1, b_v0, b_v1, b_do0, b_do1, b_lse, b_delta, rows_of_tile, place, j_0, o_n,
            m_n, (i_n < full_lo) | (i_n >= full_hi), x, numbers, D1, DV1, BLOCK_M, BLOCK_N, MASKED, CHANGED,
            SOFTCAP, DROPOUT, BASE2, PRODUCT, True,
        )  # fmt: skip
        if MASKED:
            b_k0 = finite(b_k0)
            if D1 > 0:
                b_k1 = finite(b_k1)
        b_ds = b_ds.to(b_k0.dtype)
        dq0 = product(b_ds, b_k0, dq0, PRODUCT)
        if D1 > 0:
            dq1 = product(b_ds, b_k1, dq1, PRODUCT)
    return dq0, dq1


@triton.jit
def differentiate_tile(
    b_q0, b_q1, b_k0, b_k1, b_v0, b_v1, b_do0, b_do1, b_lse, b_delta, rows_of_tile, place, j_0, o_n, m_n,
    hides, x, numbers,
    D1: tl.constexpr, DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, BASE2: tl.constexpr,
    PRODUCT: tl.constexpr,
    BELOW_CAP: tl.constexpr,
):  # fmt: skip
    """ds of one tile, [BLOCK_M, BLOCK_N], 0 for hidden pairs if the block `hides` any or is MASKED; with
    BELOW_CAP of the scores before the softcap."""
    o_i, o_h, _o_lo, _o_hi = rows_of_tile
    i_b, _i_batch, _i_hkv, _first_k, rows, _live, position, i_plane = place
    scale, softcap, seed_lo, seed_hi, drop_below, keep_scale = numbers
    b_s = product(b_q0, tl.trans(b_k0), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRODUCT)
    if D1 > 0:
        b_s = product(b_q1, tl.trans(b_k1), b_s, PRODUCT)
    b_cap = 0.0
    if CHANGED:
        m_pair = (o_i < rows)[:, None] & m_n[None, :]
        b_s, b_cap = change_scores(b_s, x, i_b, o_i, o_h, o_n, m_pair, position, scale, softcap, SOFTCAP)
    b_p = recompute(b_s, b_lse[:, None], scale, CHANGED, BASE2)
    b_dp = product(b_do0, tl.trans(b_v0), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRODUCT)
    if DV1 > 0:
        b_dp = product(b_do1, tl.trans(b_v1), b_dp, PRODUCT)
    if DROPOUT:
        b_kept = keep(i_plane + o_h, o_i, j_0, seed_lo, seed_hi, drop_below, BLOCK_N)
        b_dp = tl.where(b_kept, b_dp * keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])
    if SOFTCAP and BELOW_CAP:
        b_ds *= 1.0 - b_cap * b_cap
    if MASKED:
        b_ds = hide(b_ds, b_lse, rows_of_tile, place, o_n, m_n, x)
    else:
        if hides:
            b_ds = hide(b_ds, b_lse, rows_of_tile, place, o_n, m_n, x)
    return b_ds


@triton.jit
def hide(b_ds, b_lse, rows_of_tile, place, o_n, m_n, x):
    """ds with 0 for hidden pairs and for rows of no weight."""
    o_i, o_h, o_lo, o_hi = rows_of_tile
    b_seen = visible_pairs(x, place[0], o_i, o_h, o_n, o_lo, o_hi, m_n, place[4], place[5])
    return tl.where(b_seen & (b_lse != float("inf"))[:, None], b_ds, 0.0)


@triton.jit(do_not_specialize=_PER_CALL)
def make_dq(
    q, k, v, dout, lse, delta, dq, odd, x, visits,
    batch, num_heads, group, seqlen_q, seqlen_k, num_tiles, total, offset, left, right,
    scale, softcap, seed_lo, seed_hi, drop_below, keep_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    PACK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, BASE2: tl.constexpr,
    PRODUCT: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
):  # fmt: skip
    """dq of one tile of rows of one query head, with PACK of all query heads of one key/value head;
    `num_heads` counts either. One loop over the key blocks if all operands are finite, and one that looks at
    every pair if not."""
    i_m, i_head, i_b = unravel(tl.program_id(0), num_tiles, num_heads)
    # rows that see the most keys first
    i_m, i_b, i_batch, where = find_rows(
        i_m, i_b, x, num_tiles, batch, seqlen_q, seqlen_k, group, offset, HAS_RIGHT, HAS_OFFSET, BLOCK_M, PACK
    )
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
        if visits is not None:
            tl.store(visits + tl.program_id(0), n_hi - n_lo)
        m_row = o_i < rows
        o_row = first_q + o_i
        o_q, o_do = head_offsets(q, i_batch, o_h, o_row), head_offsets(dout, i_batch, o_h, o_row)
        o_w = packed_base(lse, i_batch, i_hkv, first_q, group) + i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        b_lse = tl.load(lse.p + o_w, mask=m_row, other=float("inf"))
        b_delta = tl.load(delta.p + o_w, mask=m_row, other=0.0)
        m_live = m_row & (b_lse != float("inf"))
        b_q0 = load_tile(q.p, o_q, m_live, q.d, 0, D, D0, "")
        b_q1 = load_tile(q.p, o_q, m_live, q.d, D0, D, D1, "") if D1 > 0 else b_q0
        b_do0 = load_tile(dout.p, o_do, m_live, dout.d, 0, DV, DV0, "")
        b_do1 = load_tile(dout.p, o_do, m_live, dout.d, DV0, DV, DV1, "") if DV1 > 0 else b_do0
        # [BLOCK_M, head_dim]
        dq0 = tl.zeros([BLOCK_M, D0], tl.float32)
        dq1 = tl.zeros([BLOCK_M, D1], tl.float32) if D1 > 0 else dq0
        state = (dq0, dq1)
        numbers = (scale, softcap, seed_lo, seed_hi, drop_below, keep_scale)
        tile, place = (o_i, o_h, o_lo, o_hi), (
            i_b, i_batch, i_hkv, first_k, rows, live, position, i_b * num_heads * G,
        )  # fmt: skip
        if ALWAYS_MASKED:
            state = walk_keys(
                n_lo, n_hi, n_lo, n_lo, state, b_q0, b_q1, b_do0, b_do1, b_lse, b_delta, tile, place, k, v, x,
                numbers, D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, NUM_STAGES, True, CHANGED, SOFTCAP,
                DROPOUT, BASE2, PRODUCT,
            )  # fmt: skip
        elif tl.load(odd) == 0:
            state = walk_keys(
                n_lo, n_hi, full_lo, full_hi, state, b_q0, b_q1, b_do0, b_do1, b_lse, b_delta, tile, place, k,
                v, x, numbers, D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, NUM_STAGES, False, CHANGED, SOFTCAP,
                DROPOUT, BASE2, PRODUCT,
            )  # fmt: skip
        else:
            state = walk_keys(
                n_lo, n_hi, n_lo, n_lo, state, b_q0, b_q1, b_do0, b_do1, b_lse, b_delta, tile, place, k, v, x,
                numbers, D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, NUM_STAGES, True, CHANGED, SOFTCAP,
                DROPOUT, BASE2, PRODUCT,
            )  # fmt: skip
        dq0, dq1 = state
        o_q = head_offsets(dq, i_batch, o_h, o_row)
        store_tile(dq.p, o_q, m_row, dq.d, dq0 * scale, 0, D, D0)
        if D1 > 0:
            store_tile(dq.p, o_q, m_row, dq.d, dq1 * scale, D0, D, D1)
