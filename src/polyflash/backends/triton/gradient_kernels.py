"""The device side of the backward pass: `center`, `make_dkv` and `make_dq`. What they compute stands in
backward.py; their tiles are [BLOCK_N, BLOCK_M] where a program owns keys and [BLOCK_M, BLOCK_N] where it owns
rows, as first operands of what is summed. What `center` writes as `t.row_lse` the others read as `t.lse`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from polyflash.backends.triton.places import (
    Blocks,
    Keys,
    Rows,
    find_band,
    find_keys,
    find_rows,
    head_offsets,
    load_tile,
    packed_rows,
    row_limits,
    row_offsets,
    row_range,
    store_pair,
    store_tile,
    tile_rows,
    unravel,
)
from polyflash.backends.triton.products import (
    cross,
    finite,
    has_nonfinite,
    nonfinite_only,
    product,
    three_parts,
    turned,
)
from polyflash.backends.triton.scores import change_scores, keep, recompute, visible_pairs

PAD: tl.constexpr = tl.constexpr(256)  # rows that a block may reach beyond the last one, read without a mask


class Own(NamedTuple):
    """Parts of a tile of rows that are read once, before keys go by."""

    q: Any  # pairs of channel blocks
    dout: Any
    lse: Any
    delta: Any


@triton.jit
def packed_base(x, i_b, i_hkv, first_q, group):
    """Offset at which the rows of a request begin in what `center` wrote, in the order of `packed_rows` and
    end to end, so that a block of them needs one address and not one per row."""
    return tl.cast(i_b, tl.int64) * x.b + tl.cast(i_hkv, tl.int64) * x.h + tl.cast(first_q, tl.int64) * group


@triton.jit
def look_over(x, parts, i_b, i_h, o_r, m_r, DIM: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, c):
    """Is something in rows o_r of a head NaN or infinite? Writes their `parts`, if there are such."""
    nonfinite = look_at(x, parts, i_b, i_h, o_r, m_r, 0, DIM, WIDTH0, c)
    if WIDTH1 > 0:
        nonfinite |= look_at(x, parts, i_b, i_h, o_r, m_r, WIDTH0, DIM, WIDTH1, c)
    return nonfinite


@triton.jit
def look_at(x, parts, i_b, i_h, o_r, m_r, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, c):
    """`look_over` of the BLOCK_D channels from FIRST on. The three parts of a row stand side by side."""
    b_x = load_tile(x, row_offsets(x, i_b, i_h, o_r), m_r, FIRST, DIM, BLOCK_D, "", c.ALIGNED)
    if parts is not None:
        o_p = row_offsets(parts, i_b, i_h, o_r)
        b_0, b_1, b_2 = three_parts(tl.where(b_x == b_x, b_x, float("nan")))  # some NaN are cut to infinity
        store_tile(parts, o_p, m_r, b_0, FIRST, DIM, BLOCK_D)
        store_tile(parts, o_p + part_width(DIM), m_r, b_1, FIRST, DIM, BLOCK_D)
        store_tile(parts, o_p + 2 * part_width(DIM), m_r, b_2, FIRST, DIM, BLOCK_D)
    return has_nonfinite(b_x)


@triton.constexpr_function
def part_width(dim):
    """Channels from one part of a row to the next: a multiple of 16 bytes, so that loads are wide."""
    return -(-dim // 16) * 16


@triton.jit
def load_block(x, o_r, m_r, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, c):
    """Channels of rows as `load_tile`, of them in "bf16x6" the three parts that `center` wrote."""
    b_0 = load_tile(x, o_r, m_r, FIRST, DIM, BLOCK_D, "", c.ALIGNED)
    if c.PRODUCT == "bf16x6":
        b_1 = load_tile(x, o_r + part_width(DIM), m_r, FIRST, DIM, BLOCK_D, "", c.ALIGNED)
        b_2 = load_tile(x, o_r + 2 * part_width(DIM), m_r, FIRST, DIM, BLOCK_D, "", c.ALIGNED)
        return b_0, b_1, b_2
    else:
        return b_0


@triton.jit
def load_blocks(x, o_r, m_r, DIM: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, c):
    """Both channel blocks of rows, the first twice if there is no other."""
    b_0 = load_block(x, o_r, m_r, 0, DIM, WIDTH0, c)
    b_1 = b_0
    if WIDTH1 > 0:
        b_1 = load_block(x, o_r, m_r, WIDTH0, DIM, WIDTH1, c)
    return b_0, b_1


@triton.jit
def finite_block(x, PRODUCT: tl.constexpr):
    """A block with 0 for NaN and infinities; of those no part is finite but for the first."""
    if PRODUCT == "bf16x6":
        x0, x1, x2 = x
        return finite(x0), finite(x1), finite(x2)
    else:
        return finite(x)


@triton.jit
def center(t, n, c):
    """delta = Σ_d do·out - dlse, and lse with +inf for rows that saw no key (their delta is 0), both in the
    order of packed rows; whether a q, k, v, do or delta is not finite; and the `parts` of q, k, v and do. The
    first programs have BLOCK_M rows of one query head each, the others keys of one key/value head."""
    i_t = tl.program_id(0)
    row_programs = n.row_tiles * t.num_heads * n.batch
    if i_t < row_programs:
        i_m, i_h, i_b = unravel(i_t, n.row_tiles, t.num_heads)
        o_i = i_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
        m_row = o_i < n.seqlen_q
        b_lse = tl.load(t.lse.p + row_offsets(t.lse, i_b, i_h, o_i), mask=m_row, other=float("-inf"))
        m_live = b_lse != float("-inf")
        o_out, o_do = row_offsets(t.out, i_b, i_h, o_i), row_offsets(t.dout, i_b, i_h, o_i)
        b_out = load_tile(t.out, o_out, m_live, 0, c.DV, c.DV0, "", c.ALIGNED).to(tl.float32)
        b_do = load_tile(t.dout, o_do, m_live, 0, c.DV, c.DV0, "", c.ALIGNED).to(tl.float32)
        b_delta = tl.sum(b_do * b_out, 1)
        if c.DV1 > 0:
            b_out = load_tile(t.out, o_out, m_live, c.DV0, c.DV, c.DV1, "", c.ALIGNED).to(tl.float32)
            b_do = load_tile(t.dout, o_do, m_live, c.DV0, c.DV, c.DV1, "", c.ALIGNED).to(tl.float32)
            b_delta += tl.sum(b_do * b_out, 1)
        if t.dlse is not None:
            b_delta -= tl.load(t.dlse.p + row_offsets(t.dlse, i_b, i_h, o_i), mask=m_live, other=0.0)
        o_w = packed_base(t.row_lse, i_b, i_h // t.group, 0, t.group)
        o_w = o_w + o_i.to(tl.int64) * t.group + i_h % t.group
        tl.store(t.row_lse.p + o_w, tl.where(m_live, b_lse, float("inf")), mask=m_row)
        tl.store(t.delta.p + o_w, b_delta, mask=m_row)
        nonfinite = look_over(t.q, t.q_parts, i_b, i_h, o_i, m_row, c.D, c.D0, c.D1, c)
        nonfinite |= look_over(t.dout, t.dout_parts, i_b, i_h, o_i, m_row, c.DV, c.DV0, c.DV1, c)
        nonfinite |= tl.max(tl.where(b_delta - b_delta == 0.0, 0, 1), 0) > 0  # of scores, out or dlse
        tl.store(t.nonfinite, 1, mask=nonfinite)
        if i_t == 0:  # what blocks read behind the last row
            o_pad = tl.cast(n.batch, tl.int64) * t.row_lse.b + tl.arange(0, PAD)
            tl.store(t.row_lse.p + o_pad, tl.full([PAD], float("inf"), tl.float32))
            tl.store(t.delta.p + o_pad, tl.zeros([PAD], tl.float32))
    else:
        i_t -= row_programs
        i_n, i_h, i_b = unravel(i_t, n.key_tiles, t.num_heads // t.group)
        live = n.seqlen_k
        if t.kv_lens is not None:
            live = tl.minimum(tl.load(t.kv_lens + i_b), n.seqlen_k)
        o_n = i_n * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
        nonfinite = look_over(t.k, t.k_parts, i_b, i_h, o_n, o_n < live, c.D, c.D0, c.D1, c)
        nonfinite |= look_over(t.v, t.v_parts, i_b, i_h, o_n, o_n < live, c.DV, c.DV0, c.DV1, c)
        tl.store(t.nonfinite, 1, mask=nonfinite)


@triton.jit
def add_nonfinite_rows(
    acc, blocks, i_hkv, keys, place, band, t, c, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Adds the NaN and infinities of dO to the dV of keys that their rows see, row by row: rare."""
    o_w = packed_base(t.lse, place.i_batch, i_hkv, place.first_q, t.group)
    for i_r in range(blocks.lo * c.BLOCK_M, blocks.hi * c.BLOCK_M):
        o_i, o_g = packed_rows(i_r, t.group, 1, c.PACK)
        o_h, m_row = i_hkv * t.group + o_g, o_i < place.rows
        b_lse = tl.load(t.lse.p + o_w + i_r + tl.arange(0, 1))
        m_live = m_row & (b_lse != float("inf"))
        o_lo, o_hi = row_limits(o_i, t.x, place, band)
        o_do = head_offsets(t.dout, place.i_batch, o_h, place.first_q + o_i)
        # [1, BLOCK_D]
        b_do = nonfinite_only(load_tile(t.dout, o_do, m_live, FIRST, DIM, BLOCK_D, "", c.ALIGNED))
        rows = Rows(i_hkv, 0, o_i, o_h, o_lo, o_hi, m_row)
        b_seen = visible_pairs(t.x, place, rows, keys, c.BELOW)
        acc += tl.where(tl.trans(b_seen), b_do, 0.0)
    return acc


@triton.jit
def walk_rows(blocks, state, b_k, b_v, i_hkv, keys, place, band, t, n, c):
    """Adds what row blocks give to dk and dv of one key block. All blocks in one loop, which masks those that
    are not full: keys that several loops read would stay in registers between them."""
    dk0, dk1, dv0, dv1 = state
    b_k0, b_k1 = b_k
    b_v0, b_v1 = b_v
    o_w = packed_base(t.lse, place.i_batch, i_hkv, place.first_q, t.group)
    i_plane = place.i_b * t.num_heads * t.group
    heads = i_hkv * t.group
    nonfinite = blocks.lo < 0  # False, as a tensor: has dO shown anything that is not finite?
    for i_m in tl.range(blocks.lo, blocks.hi, num_stages=c.NUM_STAGES):
        o_i, o_g = packed_rows(i_m, t.group, c.BLOCK_M, c.PACK)
        m_row = o_i < place.rows
        rows = Rows(i_hkv, i_plane, o_i, heads + o_g, None, None, m_row)
        o_q = head_offsets(t.q, place.i_batch, rows.o_h, place.first_q + o_i)
        o_do = head_offsets(t.dout, place.i_batch, rows.o_h, place.first_q + o_i)
        i_w = o_w + tl.cast(i_m, tl.int64) * c.BLOCK_M
        b_lse = tl.load(t.lse.p + i_w + tl.arange(0, c.BLOCK_M))  # blocks with rows of none are masked
        b_q0 = load_block(t.q, o_q, m_row, 0, c.D, c.D0, c)
        b_q1 = b_q0
        # [BLOCK_N, BLOCK_M]
        b_st = product(b_k0, turned(b_q0), tl.zeros([c.BLOCK_N, c.BLOCK_M], tl.float32), c.PRODUCT)
        if c.D1 > 0:
            b_q1 = load_block(t.q, o_q, m_row, c.D0, c.D, c.D1, c)
            b_st = product(b_k1, turned(b_q1), b_st, c.PRODUCT)
        b_cap = 0.0
        if c.CHANGED:
            b_s, b_cap = change_scores(tl.trans(b_st), t.x, place, rows, keys, n, c.SOFTCAP)
            b_st = tl.trans(b_s)
        b_pt = recompute(b_st, b_lse[None, :], n.scale, c)
        b_seen = keys.m_n[:, None]  # this and `b_kept` are read only where they are set anew
        if c.ALWAYS_MASKED or not c.FINITE:
            b_seen = turned_pairs(b_lse, rows, keys, place, band, t.x, c)
            b_pt = tl.where(b_seen, b_pt, 0.0)
        elif (i_m < blocks.full_lo) | (i_m >= blocks.full_hi):
            b_seen_here = turned_pairs(b_lse, rows, keys, place, band, t.x, c)
            b_pt = tl.where(b_seen_here, b_pt, 0.0)
        b_kept = b_seen
        if c.DROPOUT:
            b_kept = tl.trans(keep(rows, keys.j_0, n, c))
        b_do0, b_do1 = load_blocks(t.dout, o_do, m_row, c.DV, c.DV0, c.DV1, c)
        if t.dv is not None:
            b_w = b_pt
            if c.DROPOUT:
                b_w = tl.where(b_kept, b_pt * n.keep_scale, 0.0)
            if not c.FINITE:
                nonfinite |= has_nonfinite(b_do0)
                dv0 = product(b_w, finite_block(b_do0, c.PRODUCT), dv0, c.PRODUCT)
            else:
                dv0 = product(b_w, b_do0, dv0, c.PRODUCT)
            if c.DV1 > 0:
                if not c.FINITE:
                    nonfinite |= has_nonfinite(b_do1)
                    dv1 = product(b_w, finite_block(b_do1, c.PRODUCT), dv1, c.PRODUCT)
                else:
                    dv1 = product(b_w, b_do1, dv1, c.PRODUCT)
        if t.dk is not None or t.dq_sum is not None:
            b_delta = tl.load(t.delta.p + i_w + tl.arange(0, c.BLOCK_M))
            b_dpt = tl.zeros([c.BLOCK_N, c.BLOCK_M], tl.float32)
            if not c.DROPOUT:  # the product starts where it has to end up: no register keeps delta meanwhile
                b_dpt -= b_delta[None, :]
            b_dpt = cross((b_v0, b_v1), (b_do0, b_do1), b_dpt, c.DV1, c.PRODUCT)
            if c.DROPOUT:
                b_dpt = tl.where(b_kept, b_dpt * n.keep_scale, 0.0) - b_delta[None, :]
            b_dst = b_pt * b_dpt
            if c.SOFTCAP:
                b_dst *= 1.0 - tl.trans(b_cap * b_cap)
            if not c.FINITE:
                b_dst = tl.where(b_seen, b_dst, 0.0)
                b_q0 = finite_block(b_q0, c.PRODUCT)
                if c.D1 > 0:
                    b_q1 = finite_block(b_q1, c.PRODUCT)
            if t.dk is not None:
                dk0 = product(b_dst, b_q0, dk0, c.PRODUCT)
                if c.D1 > 0:
                    dk1 = product(b_dst, b_q1, dk1, c.PRODUCT)
            if t.dq_sum is not None:
                o_dq = head_offsets(t.dq_sum, place.i_batch, rows.o_h, place.first_q + o_i)
                add_atomically(t.dq_sum, o_dq, m_row, tl.trans(b_dst), b_k0, 0, c.D, c.D0, c)
                if c.D1 > 0:
                    add_atomically(t.dq_sum, o_dq, m_row, tl.trans(b_dst), b_k1, c.D0, c.D, c.D1, c)
    if t.dv is not None and not c.FINITE:
        if nonfinite:
            dv0 = add_nonfinite_rows(dv0, blocks, i_hkv, keys, place, band, t, c, 0, c.DV, c.DV0)
            if c.DV1 > 0:
                dv1 = add_nonfinite_rows(dv1, blocks, i_hkv, keys, place, band, t, c, c.DV0, c.DV, c.DV1)
    return dk0, dk1, dv0, dv1


@triton.jit
def turned_pairs(b_lse, rows, keys, place, band, x, c):
    """`visible_pairs` as [BLOCK_N, BLOCK_M]; a row of no weight sees nothing, whatever stands in it."""
    o_lo, o_hi = row_limits(rows.o_i, x, place, band)
    if not c.FINITE:
        o_hi = tl.where(b_lse == float("inf"), o_lo, o_hi)
    limited = Rows(rows.i_hkv, rows.i_plane, rows.o_i, rows.o_h, o_lo, o_hi, rows.m_row)
    return tl.trans(visible_pairs(x, place, limited, keys, c.BELOW))


@triton.jit
def add_atomically(
    dq_sum, o_dq, m_row, b_ds, b_k, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, c
):
    """Adds ds @ k to float32 sums that all key blocks share, in whatever order they come."""
    b_dq = product(b_ds, finite_block(b_k, c.PRODUCT), tl.zeros([c.BLOCK_M, BLOCK_D], tl.float32), c.PRODUCT)
    o_d = FIRST + tl.arange(0, BLOCK_D)
    m = m_row[:, None] & (o_d < DIM)[None, :]
    tl.atomic_add(dq_sum.p + o_dq[:, None] + o_d[None, :] * dq_sum.d, b_dq, mask=m, sem="relaxed")


@triton.jit
def dkv_tile(i_t, t, n, c):
    """dk and dv of a key block of one of `num_heads` key/value heads, over rows of all its query heads."""
    i_n, i_hkv, i_b = unravel(i_t, n.num_tiles, t.num_heads)
    i_n, num_keys, place = find_keys(i_n, i_b, t, n, c)
    j_0 = i_n * c.BLOCK_N
    if j_0 < num_keys:
        band = find_band(place, n, c)
        blocks = row_range(j_0, place, band, t, c)
        if t.visits is not None:
            tl.store(t.visits + i_t, blocks.hi - blocks.lo)
        o_n = j_0 + tl.arange(0, c.BLOCK_N)
        keys = Keys(j_0, o_n, o_n < place.live)
        o_k = row_offsets(t.k, place.i_batch, i_hkv, place.first_k + o_n)
        o_v = row_offsets(t.v, place.i_batch, i_hkv, place.first_k + o_n)
        b_k = load_blocks(t.k, o_k, keys.m_n, c.D, c.D0, c.D1, c)
        b_v = load_blocks(t.v, o_v, keys.m_n, c.DV, c.DV0, c.DV1, c)
        # [BLOCK_N, head_dim], [BLOCK_N, head_dim_v]
        dk0, dv0 = tl.zeros([c.BLOCK_N, c.D0], tl.float32), tl.zeros([c.BLOCK_N, c.DV0], tl.float32)
        dk1 = tl.zeros([c.BLOCK_N, c.D1], tl.float32) if c.D1 > 0 else dk0
        dv1 = tl.zeros([c.BLOCK_N, c.DV1], tl.float32) if c.DV1 > 0 else dv0
        state = (dk0, dk1, dv0, dv1)
        dk0, dk1, dv0, dv1 = walk_rows(blocks, state, b_k, b_v, i_hkv, keys, place, band, t, n, c)
        m_key = o_n < num_keys
        if t.dk is not None:
            o_k = row_offsets(t.dk, place.i_batch, i_hkv, place.first_k + o_n)
            store_pair(t.dk, o_k, m_key, dk0 * n.scale, dk1 * n.scale, c.D, c.D0, c.D1)
        if t.dv is not None:
            o_v = row_offsets(t.dv, place.i_batch, i_hkv, place.first_k + o_n)
            store_pair(t.dv, o_v, m_key, dv0, dv1, c.DV, c.DV0, c.DV1)


@triton.jit
def over_tiles(make_tile: tl.constexpr, t, n, c):
    """Makes all tiles or none: two forms are launched, and what `center` found says which works. FINITE has a
    program per tile; of the other, rare and with hidden pairs kept out of every sum, a few walk over all."""
    if c.FINITE:
        if tl.load(t.nonfinite) == 0:
            make_tile(tl.program_id(0), t, n, c)
    else:
        if tl.load(t.nonfinite) != 0:
            for i_t in range(tl.program_id(0), n.total, tl.num_programs(0)):
                make_tile(i_t, t, n, c)


@triton.jit
def make_dkv(t, n, c):
    """dk and dv of all key blocks."""
    over_tiles(dkv_tile, t, n, c)


@triton.jit
def walk_keys(blocks, state, own, rows, place, t, n, c, MASKED: tl.constexpr):
    """Adds what key blocks give to dq of one row tile. Blocks that are not full hide pairs; MASKED all may,
    and what is behind them may be anything."""
    dq0, dq1 = state
    for i_n in tl.range(blocks.lo, blocks.hi, num_stages=c.NUM_STAGES):
        o_n = i_n * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
        keys = Keys(i_n * c.BLOCK_N, o_n, o_n < place.live)
        o_k = row_offsets(t.k, place.i_batch, rows.i_hkv, place.first_k + o_n)
        o_v = row_offsets(t.v, place.i_batch, rows.i_hkv, place.first_k + o_n)
        b_k = load_blocks(t.k, o_k, keys.m_n, c.D, c.D0, c.D1, c)
        b_v = load_blocks(t.v, o_v, keys.m_n, c.DV, c.DV0, c.DV1, c)
        hides = (i_n < blocks.full_lo) | (i_n >= blocks.full_hi)
        # [BLOCK_M, BLOCK_N]
        b_ds = differentiate_tile(own, b_k, b_v, hides, rows, keys, place, t.x, n, c, MASKED, True)
        b_k0, b_k1 = b_k
        if MASKED:
            b_k0 = finite_block(b_k0, c.PRODUCT)
            if c.D1 > 0:
                b_k1 = finite_block(b_k1, c.PRODUCT)
        dq0 = product(b_ds, b_k0, dq0, c.PRODUCT)
        if c.D1 > 0:
            dq1 = product(b_ds, b_k1, dq1, c.PRODUCT)
    return dq0, dq1


@triton.jit
def differentiate_tile(
    own, b_k, b_v, hides, rows, keys, place, x, n, c, MASKED: tl.constexpr, BELOW_CAP: tl.constexpr
):
    """ds of one tile, [BLOCK_M, BLOCK_N], 0 for hidden pairs if the block `hides` any or is MASKED; with
    BELOW_CAP of the scores before the softcap."""
    b_s = cross(own.q, b_k, tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32), c.D1, c.PRODUCT)
    b_cap = 0.0
    if c.CHANGED:
        b_s, b_cap = change_scores(b_s, x, place, rows, keys, n, c.SOFTCAP)
    b_p = recompute(b_s, own.lse[:, None], n.scale, c)
    b_dp = cross(own.dout, b_v, tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32), c.DV1, c.PRODUCT)
    if c.DROPOUT:
        b_dp = tl.where(keep(rows, keys.j_0, n, c), b_dp * n.keep_scale, 0.0)
    b_ds = b_p * (b_dp - own.delta[:, None])
    if c.SOFTCAP and BELOW_CAP:
        b_ds *= 1.0 - b_cap * b_cap
    if MASKED:
        b_ds = hide(b_ds, own.lse, rows, keys, place, x, c)
    else:
        if hides:
            b_ds = hide(b_ds, own.lse, rows, keys, place, x, c)
    return b_ds


@triton.jit
def hide(b_ds, b_lse, rows, keys, place, x, c):
    """ds with 0 for hidden pairs and for rows of no weight."""
    b_seen = visible_pairs(x, place, rows, keys, c.BELOW)
    return tl.where(b_seen & (b_lse != float("inf"))[:, None], b_ds, 0.0)


@triton.jit
def load_own(o_q, o_do, o_w, m_row, t, c):
    """Rows of Q and dO, lse and delta. Rows of no weight are 0."""
    b_lse = tl.load(t.lse.p + o_w, mask=m_row, other=float("inf"))
    b_delta = tl.load(t.delta.p + o_w, mask=m_row, other=0.0)
    m_live = m_row & (b_lse != float("inf"))
    b_q = load_blocks(t.q, o_q, m_live, c.D, c.D0, c.D1, c)
    b_do = load_blocks(t.dout, o_do, m_live, c.DV, c.DV0, c.DV1, c)
    return Own(b_q, b_do, b_lse, b_delta)


@triton.jit
def dq_tile(i_t, t, n, c):
    """dq of one tile of rows of one query head, with PACK of all query heads of one key/value head;
    `num_heads` counts either. One loop over the key blocks if all operands are finite, and one that looks at
    every pair if not."""
    i_m, i_head, i_b = unravel(i_t, n.num_tiles, t.num_heads)
    i_m, place = find_rows(i_m, i_b, t, n, c)
    if i_m * c.BLOCK_M < place.rows * (t.group if c.PACK else 1):
        rows, blocks = tile_rows(i_m, i_head, place, t, n, c)
        if t.visits is not None:
            tl.store(t.visits + i_t, blocks.hi - blocks.lo)
        m_row, o_row = rows.m_row, place.first_q + rows.o_i
        o_q = head_offsets(t.q, place.i_batch, rows.o_h, o_row)
        o_do = head_offsets(t.dout, place.i_batch, rows.o_h, o_row)
        o_w = packed_base(t.lse, place.i_batch, rows.i_hkv, place.first_q, t.group)
        own = load_own(o_q, o_do, o_w + i_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M), m_row, t, c)
        # [BLOCK_M, head_dim]
        dq0 = tl.zeros([c.BLOCK_M, c.D0], tl.float32)
        dq1 = tl.zeros([c.BLOCK_M, c.D1], tl.float32) if c.D1 > 0 else dq0
        state = (dq0, dq1)
        hiding = Blocks(blocks.lo, blocks.hi, blocks.lo, blocks.lo)
        if c.PRODUCT == "bf16x6":
            if c.ALWAYS_MASKED or not c.FINITE:
                blocks = hiding
            state = walk_keys(blocks, state, own, rows, place, t, n, c, not c.FINITE)
        elif c.ALWAYS_MASKED or not c.FINITE:
            state = walk_keys(hiding, state, own, rows, place, t, n, c, True)
        elif tl.load(t.nonfinite) == 0:
            state = walk_keys(blocks, state, own, rows, place, t, n, c, False)
        else:
            state = walk_keys(hiding, state, own, rows, place, t, n, c, True)
        dq0, dq1 = state
        o_q = head_offsets(t.dq, place.i_batch, rows.o_h, o_row)
        store_pair(t.dq, o_q, m_row, dq0 * n.scale, dq1 * n.scale, c.D, c.D0, c.D1)


@triton.jit
def make_dq(t, n, c):
    """One program per tile of rows, with both loops; in "bf16x6" such a kernel would spill, and each loop is
    a form of its own, as of `make_dkv`."""
    if c.PRODUCT == "bf16x6":
        over_tiles(dq_tile, t, n, c)
    else:
        dq_tile(tl.program_id(0), t, n, c)


@triton.jit
def make_again(t, n, c):
    """dk, dv and dq in one launch, for an engine whose own may not be finite. Tiles that there are not do
    nothing."""
    over_tiles(dkv_tile, t, n, c)
    over_tiles(dq_tile, t, n, c)
