"""Attention forward for Hopper over codes of 8 bits: both products in e4m3, at twice the rate of 16 bits.

The roles and their order are those of `forward_sm90`. What differs: q is there in e4m3 with a factor per
row, V with channels as rows and keys in the order of a product's registers (`fp8_operands.py`), weights go
into their product as e4m3 of 448·exp(s - m), and their sum is of float32.

Tensor cores add products of 8 bits up with 13 bits behind the binary point of the largest, and drop what
lies below: a sum over many keys loses more and more. So after every LEVEL blocks what they hold is added to
`total`, float32 in shared memory, and they begin anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from polyflash.backends.gluon.channel import (
    Board,
    Ring,
    Rows,
    acquire_keys,
    acquire_values,
    barriers,
    board_of,
    first_turn,
    free_keys,
    free_values,
    keys_of,
    load_slot,
    pass_turn,
    phase,
    slot_of,
    slots,
    take_turn,
    tell,
    told,
)
from polyflash.backends.gluon.forward_sm90 import LEFT, NEXT, leave
from polyflash.backends.gluon.mending import add_nonfinite
from polyflash.backends.gluon.parts import scaled, store_tile
from polyflash.backends.gluon.places import BELOW, BOTH, NONE, apply_mask, place_of, rows_seen
from polyflash.backends.gluon.schedule import fixed_tile, key_blocks, tile_of
from polyflash.backends.gluon.shim import accumulator, load_box, narrowed, pinned, products, row_max
from polyflash.backends.gluon.softmax import LOWEST, SUMS, online_softmax, store_lse

SLACK: gl.constexpr = gl.constexpr(2.0)  # powers of two that a lazy m may lie below its row's maximum
TOP: gl.constexpr = gl.constexpr(8.807354922057604)  # log2 of 448, the largest e4m3


class Tensors(NamedTuple):
    """`t` of `attend_fp8`: beside those of `forward_sm90`, float32 factors (B, Hq, Sq) that make a product of
    codes an exponent of 2, the scale of a head's V, and whether its codes have a NaN, int32 (B, Hkv)."""

    lse: Any
    words: Any
    factors: Any
    v_scale: Any
    odd: Any
    v_view: Any
    kv_lens: Any = None
    kv_starts: Any = None
    q_offset: Any = None
    sinks: Any = None
    end: None = None  # see `runtime.compile` of the Triton engine


@gluon.jit
def next_tile(i_round, board, c):
    """The tile of the round after this one."""
    if c.COUNTED:  # noqa: SIM108
        i_t = told(board, i_round)
    else:
        i_t = fixed_tile(i_round + 1, gl.program_id(0), gl.num_programs(0))
    return i_t


@gluon.jit
def load_tiles(q, k, v, ring, rows, board, t, n, c):
    """Producer: as that of `forward_sm90`; keys are the columns of V."""
    i_n, i_round, i_t = 0, 0, gl.program_id(0)
    while i_t < n.total:
        i_bh, i_m = tile_of(i_t, n, c.HEADS, c.HAS_RIGHT)
        place = place_of(i_bh, i_m, t, n, c)
        end, count, _, _ = key_blocks(i_m * c.BLOCK_M, 0, place, c, c.BLOCK_M)
        i_b, i_h = i_bh // n.num_heads, i_bh % n.num_heads
        for j in range(count):
            slot, i_k, j_0 = i_n % c.STAGES, i_h // n.group, (end - 1 - j) * c.BLOCK_N
            acquire_keys(i_n, c)
            load_slot(k, (i_b, i_k, j_0), ring.k_full.index(slot), ring.k, slot, c)
            if j == 0:
                for i in gl.static_range(c.CONSUMERS):
                    mbarrier.wait(rows.free.index(i), phase(i_round, 1) ^ 1)
                    at_q = i_b, i_h, i_m * c.BLOCK_M + i * 64
                    load_slot(q, at_q, rows.full.index(i), rows.q, i, c)
            acquire_values(i_n, c)
            load_box(v, [i_b, i_k, 0, j_0], ring.v_full.index(slot), ring.v.index(slot))
            i_n += 1
        if c.COUNTED:
            i_t = gl.atomic_add(t.words + NEXT, 1) + gl.num_programs(0)
            tell(board, i_round, i_t)
        else:
            i_t = next_tile(i_round, board, c)
        i_round += 1
    if c.COUNTED:
        leave(t.words + LEFT, t.words + NEXT)


@gluon.jit
def values_of(ring, i_n, c):
    """Block i_n of V, [BLOCK_N, channels], once it is there."""
    mbarrier.wait(ring.v_full.index(i_n % c.STAGES), phase(i_n, c.STAGES))
    return ring.v.index(i_n % c.STAGES).reshape([c.D, c.BLOCK_N]).permute((1, 0))


@gluon.jit
def scores_of(q, ring, i_n, c, WG: gl.constexpr):
    """Issues the product of Q and block i_n of K."""
    b_k = keys_of(ring, i_n, c)[0]
    b_s = gl.zeros([64, c.BLOCK_N], gl.float32, products(c.BLOCK_N))
    take_turn(WG, c)
    b_s = warpgroup_mma(q, b_k, b_s, use_acc=False, is_async=True)
    pass_turn(WG, c)
    return b_s


@gluon.jit
def weighted(acc, b_w, b_v, c):
    """Issues the product of weights and their block of V: a sum of its own, or added to what is there."""
    ALONE: gl.constexpr = c.LEVEL == 1
    if ALONE:
        acc = gl.zeros([64, c.D], gl.float32, products(c.D))
    return warpgroup_mma(b_w, b_v, acc, use_acc=not ALONE, is_async=True)


@gluon.jit
def new_maxima(b_s, m_i, factor, c):
    """m such that no weight, exp2(factor·s - m), is above 448."""
    if c.LAZY:
        b_top = gl.fma(row_max(b_s), factor, SLACK - TOP)
        m_new = gl.where(b_top > m_i + SLACK, b_top, m_i)
    else:
        m_new = gl.maximum(m_i, gl.fma(row_max(b_s), factor, -TOP))
    return m_new if c.PINNED != "maxima" else pinned(m_new)


@gluon.jit
def weigh(b_s, m_i, l_i, seen, factor, i_n, j_0, c, MASKED: gl.constexpr):
    """Weights of a block whose scores are complete: its keys may go."""
    free_keys(i_n, c)
    b_s = gl.convert_layout(b_s, accumulator(c.BLOCK_N), assert_trivial=True)
    if MASKED != NONE:
        b_s = apply_mask(b_s, seen, j_0, c, MASKED)
    m_new = new_maxima(b_s, m_i, factor, c)
    b_p, l_i, alpha = online_softmax(b_s, m_new, m_i, l_i, seen.far, factor[:, None], c, False)
    return b_p, m_new, l_i, alpha


@gluon.jit
def attend_blocks(
    q, ring, sums, total, rows, i_n, j_0, first, end, c, WG: gl.constexpr, MASKED: gl.constexpr
):
    """The tile's blocks from number `first` up to `end`, by LEVEL; the sums of as many go to `total`."""
    if c.LEVEL < 2:
        sums, i_n, j_0 = attend_level(q, ring, sums, rows, i_n, j_0, first, end, c, WG, MASKED)
    else:
        i = gl.to_tensor(first)
        while i < end:
            stop = min(end, (i // c.LEVEL + 1) * c.LEVEL)
            sums, i_n, j_0 = attend_level(q, ring, sums, rows, i_n, j_0, i, stop, c, WG, MASKED)
            if stop % c.LEVEL == 0:
                sums = move_sums(sums, total, stop, c)
            i = stop
    return sums, i_n, j_0


@gluon.jit
def attend_level(q, ring, sums, rows, i_n, j_0, first, end, c, WG: gl.constexpr, MASKED: gl.constexpr):
    """Scores and weights of each block, and the share in the output of the block before, whose product runs
    during the softmax. Nothing between issue and wait may branch. `b_last`: see `move_sums`; with a LEVEL of
    1 what older sums are multiplied with first."""
    acc, b_p, m_i, l_i, b_last = sums
    seen, factor = rows
    for _ in range(first, end):
        j_0 -= c.BLOCK_N
        b_w = narrowed(b_p, gl.DotOperandLayout(0, products(c.D), 4))
        b_s = scores_of(q, ring, i_n, c, WG)
        b_o = weighted(acc, b_w, values_of(ring, i_n - 1, c), c)
        b_s = warpgroup_mma_wait(1, [b_s])
        b_p, m_i, l_i, alpha = weigh(b_s, m_i, l_i, seen, factor, i_n, j_0, c, MASKED)
        if c.PINNED == "softmax":
            l_i = pinned(l_i)
        b_o = warpgroup_mma_wait(0, [b_o])
        free_values(i_n - 1, c)
        if c.LEVEL == 1:
            acc = added(b_o, acc, b_last)
            b_last = alpha
        else:
            acc = scaled(b_o, alpha, c)
        i_n += 1
    return (acc, b_p, m_i, l_i, b_last), i_n, j_0


@gluon.jit
def added(acc, b_total, beta):
    """Sums of tensor cores, and older ones, times beta of their row."""
    b_beta = gl.convert_layout(beta, gl.SliceLayout(1, acc.type.layout))
    return gl.fma(b_total, b_beta[:, None], acc)


@gluon.jit
def move_sums(sums, total, count, c):
    """Adds what tensor cores hold to `total`, whose maximum was b_last; `count`: blocks so far."""
    acc, b_p, m_i, l_i, b_last = sums
    tma.store_wait(0)  # the memory was the output's
    if count > c.LEVEL:
        acc = added(acc, total.load(acc.type.layout), gl.exp2(b_last - m_i))
    total.store(acc)
    return gl.zeros([64, c.D], gl.float32, products(c.D)), b_p, m_i, l_i, m_i


@gluon.jit
def pass_blocks(ring, i_n, count, c, WG: gl.constexpr):
    """Lets blocks go by that other rows of the tile see, and none of these. Gives the number of the next."""
    for _ in range(count):
        keys_of(ring, i_n, c)
        take_turn(WG, c)
        pass_turn(WG, c)
        free_keys(i_n, c)
        values_of(ring, i_n, c)
        free_values(i_n, c)
        i_n += 1
    return i_n


@gluon.jit
def attend_tiles(out, ring, rows, board, t, n, c, WG: gl.constexpr):
    """Consumer: 64 rows of every tile of the program."""
    row: gl.constexpr = gl.SliceLayout(1, accumulator(c.BLOCK_N))
    sums_of: gl.constexpr = accumulator(SUMS)
    total = rows.out.index(WG)
    first_turn(WG, c)
    i_n, i_round, i_t = 0, 0, gl.program_id(0)
    while i_t < n.total:
        i_bh, i_m = tile_of(i_t, n, c.HEADS, c.HAS_RIGHT)
        place = place_of(i_bh, i_m, t, n, c)
        i_row = i_m * c.BLOCK_M + WG * 64
        tile_end, tile_count, _, _ = key_blocks(i_m * c.BLOCK_M, 0, place, c, c.BLOCK_M)
        end, count, masked, bare = key_blocks(i_row, tile_end - tile_count, place, c, 64)
        o_row = i_row + gl.arange(0, 64, layout=row)
        seen = rows_seen(o_row, o_row, i_bh % n.num_heads, place, t, n, c, False)
        p_factor = t.factors + i_bh.to(gl.int64) * n.seqlen_q + o_row
        factor = gl.load(p_factor, mask=o_row < n.seqlen_q, other=1.0)
        mbarrier.wait(rows.full.index(WG), phase(i_round, 1))
        q = slot_of(rows.q, WG, 64, c)[0]
        i_n = pass_blocks(ring, i_n, tile_end - end, c, WG)
        j_0 = (end - 1) * c.BLOCK_N
        b_s = warpgroup_mma_wait(0, [scores_of(q, ring, i_n, c, WG)])
        m_i = gl.full([64], LOWEST, gl.float32, row)
        l_i = gl.zeros([64, SUMS], gl.float32, sums_of) if c.LATE_SUM else gl.zeros([64], gl.float32, row)
        b_p, m_i, l_i, _ = weigh(b_s, m_i, l_i, seen, factor, i_n, j_0, c, NONE if c.WHOLE else BOTH)
        acc = gl.zeros([64, c.D], gl.float32, products(c.D))
        b_last = gl.full([64], 1.0, gl.float32, row) if c.LEVEL == 1 else m_i
        sums, of_rows = (acc, b_p, m_i, l_i, b_last), (seen, factor)
        i_n += 1
        if c.HAS_RIGHT:
            sums, i_n, j_0 = attend_blocks(q, ring, sums, total, of_rows, i_n, j_0, 1, masked, c, WG, BOTH)
        sums, i_n, j_0 = attend_blocks(q, ring, sums, total, of_rows, i_n, j_0, masked, bare, c, WG, NONE)
        if c.BELOW:
            sums, i_n, j_0 = attend_blocks(q, ring, sums, total, of_rows, i_n, j_0, bare, count, c, WG, BELOW)
        acc, b_p, m_i, l_i, b_last = sums
        mbarrier.arrive(rows.free.index(WG), count=1)
        b_w = narrowed(b_p, gl.DotOperandLayout(0, products(c.D), 4))
        b_o = weighted(acc, b_w, values_of(ring, i_n - 1, c), c)
        if c.LATE_SUM:
            l_i = gl.convert_layout(gl.sum(l_i, 1), row)
        b_share = store_lse(m_i, l_i, (i_bh, o_row), place, seen, t, n, c, False)
        tma.store_wait(0)  # the output of the tile before has left
        b_o = warpgroup_mma_wait(0, [b_o])
        free_values(i_n - 1, c)
        if c.BELOW:
            i_n = pass_blocks(ring, i_n, tile_count - (tile_end - end) - count, c, WG)
        if c.LEVEL == 1:
            b_o = added(b_o, acc, b_last)
        elif c.LEVEL > 1:  # noqa: SIM102  a branch of the compiler, then one of the kernel
            if count >= c.LEVEL:
                b_o = added(b_o, total.load(b_o.type.layout), gl.exp2(b_last - m_i))
        tile = b_share, l_i, i_bh, i_row, j_0, min(end * c.BLOCK_N, place.live)
        finish(b_o, out, tile, total, seen, t, n, c)
        i_t = next_tile(i_round, board, c)
        i_round += 1
    tma.store_wait(0)


@gluon.jit
def finish(acc, out, tile, total, seen, t, n, c):
    """Writes 64 rows of the output, through the memory of `total`."""
    b_share, l_i, i_bh, i_row, begin, end = tile
    i_b, i_k = i_bh // n.num_heads, i_bh % n.num_heads // n.group
    scale = gl.load(t.v_scale.p + i_b.to(gl.int64) * t.v_scale.b + i_k.to(gl.int64) * t.v_scale.h)
    b_share = gl.where(l_i == 0.0, 0.0, b_share * scale)  # the scale may be NaN
    b_out = gl.convert_layout(acc, accumulator(c.D), assert_trivial=True)
    b_out *= gl.convert_layout(b_share, gl.SliceLayout(1, b_out.type.layout))[:, None]
    if gl.load(t.odd + i_b * (n.num_heads // n.group) + i_k) != 0:
        b_out = add_nonfinite(b_out, l_i, (i_b, i_k, 0), (begin, end), seen, t.v_view, c, 0)
    slot = total._reinterpret(out.dtype, [1, 1, 64, c.D], out.layout)
    store_tile(out, (i_b, i_bh % n.num_heads), i_row, b_out.to(out.dtype), slot, 0)


@gluon.jit
def attend_fp8(t, n, c, q, k, v, out):
    """Starts the roles: a program per core that walks over tiles."""
    ring_v = gl.allocate_shared_memory(v.dtype, [c.STAGES, 1, 1, c.D, c.BLOCK_N], v.layout)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    total = gl.allocate_shared_memory(gl.float32, [c.CONSUMERS, 64, c.D], swizzled)
    rows = Rows(slots((q,), c.CONSUMERS, 64, c), total, barriers(c.CONSUMERS, 1), barriers(c.CONSUMERS, 1))
    b_k = slots((k,), c.STAGES, c.BLOCK_N, c)
    ring = Ring(b_k, ring_v, barriers(c.STAGES, 1), barriers(c.STAGES, 1))
    board = board_of(1, c) if c.COUNTED else Board(ring.k_full, ring.k_full, ring.k_full)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend_tiles, (out, ring, rows, board, t, n, c, 0)),
            (attend_tiles, (out, ring, rows, board, t, n, c, 1)),
            (load_tiles, ((q,), (k,), v, ring, rows, board, t, n, c)),
        ],
        [4, 1],
        [240, 24],
    )
