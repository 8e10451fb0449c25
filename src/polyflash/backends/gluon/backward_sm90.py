"""Attention gradients for Hopper in Gluon, one pass: a program owns 128 keys and walks over rows.

    producer, one warp                  consumer, a warpgroup of 64 keys; in block j of rows
        K, V once                           dq(j-1) = ds(j-1) @ k       issued, all keys, half of the channels
        for each head of each row block:    sᵀ = k @ qᵀ                  issued
            Q, dO, lse, delta               dq(j-1) into shared memory
            into free slots                 dpᵀ = v @ doᵀ                issued
    adder, one warp                         pᵀ = exp2(factor·sᵀ - lse)
        for row block of each head:         dv += pᵀ @ do                issued
            waits for its turn              dsᵀ = pᵀ·(dpᵀ - delta)       into shared memory, for both
            dq(j) added in memory           dk += dsᵀ @ q

q, dout (B, Hq, Sq, D), k, v, dk, dv (B, Hkv, Sk, D) by tensor descriptors: what lies outside is read as 0 and
not written. The rows of a block of all query heads of a group follow one another, so dk and dv are summed in
float32 where they are made. dq is one block late: nobody waits for the ds of the other consumer in the same
block.

Bits repeat: programs add to the dq of a row block in the order of their keys, the first of them stores, and a
number per row block says how many have. Rows are walked from the last one back, so a program is one block
behind the one before it, and with a causal mask, where those of later keys are shorter, the next head's find
the cores free in that very order. Programs are numbered as they start: who waits, waits for one that runs.
Heads take turns in starting one, so nobody waits long.

`center` of gradient_passes.py comes before, and `finish_dq` behind. Where a result is not finite, as of a
weight of 0 times a hidden NaN, or a score too large, all is made anew by the Triton engine: `odd` says so.
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

from polyflash.backends.gluon.backward_channel import (
    SLOT,
    STATS,
    Held,
    Ring,
    announce,
    await_ds,
    free_rows,
    hand_over,
    meet,
    part,
    slot_of_ds,
    take_rows,
)
from polyflash.backends.gluon.backward_scores import change_scores, slope_of, through_cap
from polyflash.backends.gluon.channel import barriers, phase
from polyflash.backends.gluon.places import find_member, span, stand, store_rows
from polyflash.backends.gluon.schedule import KEYS, ROWS, first_tile, row_blocks, tile_of
from polyflash.backends.gluon.shim import (
    accumulator,
    add_box,
    await_number,
    keep_less,
    load_box,
    named_barrier,
    release_number,
    store_box,
    stored,
    tile_layout,
)


class Tensors(NamedTuple):
    """`t` of `differentiate_sm90`, int32: not 0 if all has to be made anew, and how many programs have
    started; how many have added to each row block (B·Hq, row blocks). With `cu_seqlens` members are packed,
    whose keys dk and dv are stored through views."""

    odd: Any
    added: Any
    kv_lens: Any = None  # int32, per request, like what follows
    kv_starts: Any = None
    q_offset: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    slopes: Any = None  # of ALiBi
    dk_view: Any = None
    dv_view: Any = None
    end: None = None  # see `runtime.compile` of the Triton engine


class Numbers(NamedTuple):
    """`n`: none is compiled in."""

    num_kv_heads: Any
    group: Any  # query heads per key/value head
    heads: Any  # planes that start their programs by turns
    seqlen_q: Any
    seqlen_k: Any
    row_blocks: Any  # of a head
    num_tiles: Any  # of the keys of a plane; what divides by them, see schedule.py
    inverse: Any
    shift: Any
    offset: Any  # see `forward.band_of`
    left: Any
    members: Any  # packed; else None
    factor: Any  # of scores in an exponent of 2
    scale: Any
    into_cap: Any = None  # see `backward.factors_of`; what follows as in `forward_sm90`
    position: Any = None
    rest: Any = None


class Constants(NamedTuple):
    """`c`: what is compiled in."""

    D: int = 0
    CHANNELS: int = 0  # of them there are so many
    STAGES: int = 2
    HAS_RIGHT: bool = False  # as in `forward_sm90`
    HAS_LEFT: bool = False
    BELOW: bool = False
    OWN: bool = False
    SHORT: bool = False
    PACKED: bool = False
    SOFTCAP: bool = False
    LARGE_CAP: bool = False  # see backward_scores.py
    ALIBI: bool = False
    WHOLE: bool = False  # rows see every key of every program
    GROUPED: bool = False  # a key/value head has more query heads than one
    AHEAD: bool = False  # see `differentiate_ahead`
    ORDERED: bool = True  # else dq, 0 at first, is added to in whatever order
    LAYOUT: int = 0  # of the tuples: another is another kernel


class Place(NamedTuple):
    """Place of a program: its key tile, first key, batch entry and key/value head, the row blocks from start
    to end that see its keys, from whole to bare every row every key; its request's (`places.Place`), which
    has so many keys, live or not, and whose row blocks begin at i_w."""

    i_n: Any
    j_0: Any
    i_b: Any
    i_h: Any
    start: Any
    whole: Any
    bare: Any
    end: Any
    own: Any
    keys: Any
    i_w: Any


class Step(NamedTuple):
    """A block of rows: how many the consumer has had before, its number, and its head's slope (ALIBI)."""

    i: Any
    i_m: Any
    slope: Any


@gluon.jit
def find_place(i_t, t, n, c):
    """The place of the i_t-th program to start."""
    i_bh, i_n = tile_of(i_t, n, n.heads, False)
    i_b, i_h = i_bh // n.num_kv_heads, i_bh % n.num_kv_heads
    i_own, keys, i_w = i_b, n.seqlen_k, 0
    if c.PACKED:
        i_own, i_n = find_member(i_n, t.cu_seqlens_k, n.seqlen_k, n, KEYS)
        _, keys = span(t.cu_seqlens_k, i_own, n.seqlen_k, n)
    own = stand(i_own, 0, 0, t, n, c)
    if c.PACKED:
        i_w = own.first_q // ROWS + i_own
    start, whole, bare, end = row_blocks(i_n * KEYS, own, c)
    return Place(i_n, i_n * KEYS, i_b, i_h, start, whole, bare, end, own, keys, i_w)


@gluon.jit
def find_rows(i, place, n, c):
    """Query head and number of the i-th block of rows of a program. Divisions take the single warps longer
    than they have where products are small."""
    i_h, i_m = place.i_h, place.end - 1 - i
    if c.GROUPED:
        i_h, i_m = place.i_h * n.group + i % n.group, place.end - 1 - i // n.group
    return i_h, i_m


@gluon.jit
def step_at(i, place, t, n, c):
    i_h, i_m = find_rows(i, place, n, c)
    return Step(i, i_m, slope_of(i_h, place.own, t, n, c))


@gluon.jit
def load_rows(q, dout, k, v, stats, ring, held, place, n, c):
    """Producer: K and V, then Q, dO and their statistics of every row block of every head of the group."""
    for i_k in gl.static_range(2):
        at = [place.i_b, place.i_h, place.own.first_k + place.j_0 + 64 * i_k, 0]
        load_box(k, at, held.full, held.k.index(i_k), 4 if i_k == 0 else 0)
        load_box(v, at, held.full, held.v.index(i_k), 0)
    for i in range((place.end - place.start) * n.group):
        slot = i % c.STAGES
        i_h, i_m = find_rows(i, place, n, c)
        i_w = (place.i_b * n.num_kv_heads * n.group + i_h) * n.row_blocks + place.i_w + i_m
        if i >= c.STAGES:
            named_barrier("bar.sync", SLOT + slot, 288)
        at = [place.i_b, i_h, place.own.first_q + i_m * ROWS, 0]
        load_box(q, at, ring.q_full.index(slot), ring.q.index(slot), 1, STATS * 4)
        load_box(stats, [i_w * STATS], ring.q_full.index(slot), ring.stats.index(slot), 0)
        load_box(dout, at, ring.dout_full.index(slot), ring.dout.index(slot))


@gluon.jit
def add_rows(dq, held, place, t, n, c, WHICH: gl.constexpr):
    """Adder: dq of every other row block, once those of earlier keys are there. Two take turns, as waiting
    for memory takes longer than a block."""
    count = (place.end - place.start) * n.group
    skipped = 0
    if c.AHEAD:
        skipped = 1  # zeros, of no block
        if WHICH == 0 and count > 0:
            take_rows(WHICH)
            free_rows(held)
    for i in range((WHICH + skipped) % 2, count, 2):
        i_h, i_m = find_rows(i, place, n, c)
        i_row = (place.i_b * n.num_kv_heads * n.group + i_h) * n.row_blocks + place.i_w + i_m
        before = place.i_n - first_tile(i_m, place.own, c)
        if c.ORDERED:
            await_number(t.added + i_row, before)
        take_rows(WHICH)
        for WG in gl.static_range(2):
            at = [(i_row * 2 + WG) * c.D, 0]
            if c.ORDERED and before == 0:
                store_box(dq, at, held.dq.index(WG))
            else:
                add_box(dq, at, held.dq.index(WG))
        tma.store_wait(0)
        free_rows(held)
        if c.ORDERED:
            stored()
            release_number(t.added + i_row, before + 1)


@gluon.jit
def issue_dq(held, i, c, WG: gl.constexpr):
    """dq of the rows of block i, this consumer's half of the channels, over all keys."""
    HALF: gl.constexpr = c.D // 2
    b_dq = gl.zeros([64, HALF], gl.float32, accumulator(HALF))
    for j in gl.static_range(2):
        b_k = held.k.index(j).reshape([64, c.D]).slice(WG * HALF, HALF, dim=1)
        b_ds = held.ds.index(slot_of_ds(i, held) + j).permute((1, 0))
        b_dq = warpgroup_mma(b_ds, b_k, b_dq, use_acc=j > 0, is_async=True)
    return b_dq


@gluon.jit
def scores(b_x, b_y):
    """Issues a product of 64 keys and 64 rows in shared memory, [keys, rows]."""
    b_none = gl.zeros([64, 64], gl.float32, accumulator(64))
    return warpgroup_mma(b_x, b_y.permute((1, 0)), b_none, use_acc=False, is_async=True)


@gluon.jit
def apply_mask(b_x, i_m, j_0, own, c):
    """-inf at pairs that do not see each other; [keys, rows]."""
    tile: gl.constexpr = accumulator(64)
    o_n = j_0 + gl.arange(0, 64, layout=gl.SliceLayout(1, tile))
    o_m = i_m * ROWS + gl.arange(0, 64, layout=gl.SliceLayout(0, tile))
    b_end = o_m * 0 + own.live
    if c.HAS_RIGHT:
        b_end = gl.minimum(b_end, o_m + own.high + 1)
    b_x = keep_less(b_x, o_n[:, None], b_end[None, :])
    if c.BELOW:
        b_first = o_m * 0 + own.start
        if c.HAS_LEFT:
            b_first = gl.maximum(b_first, o_m + own.low)
        b_x = keep_less(b_x, (b_first - 1)[None, :], o_n[:, None])
    return b_x


@gluon.jit
def differentiate_block(
    ring, held, sums, step, place, n, c, WG: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr
):
    """One more row block, and the dq of the one before; the FIRST makes what later ones add to. Nothing
    between issue and wait may branch; products in flight at the end of a loop would be serialised."""
    b_dk, b_dv = sums
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator(c.D), 2)
    slot, arrived = step.i % c.STAGES, phase(step.i, c.STAGES)
    q, dout = ring.q.index(slot).reshape([64, c.D]), ring.dout.index(slot).reshape([64, c.D])
    stats = ring.stats.index(slot)
    if not FIRST:
        await_ds(step.i - 1, WG)
        b_dq = issue_dq(held, step.i - 1, c, WG)
    mbarrier.wait(ring.q_full.index(slot), arrived)
    b_s = scores(held.k.index(WG).reshape([64, c.D]), q)
    b_less = part(stats, 0)
    if not FIRST:
        b_dq = warpgroup_mma_wait(1, [b_dq])
        hand_over(b_dq, step.i - 1, held, c, WG)
    mbarrier.wait(ring.dout_full.index(slot), arrived)
    b_dp = scores(held.v.index(WG).reshape([64, c.D]), dout)
    b_s = warpgroup_mma_wait(1, [b_s])
    b_x, b_cap = change_scores(b_s, b_less, place.j_0 + WG * 64, step, place.own, n, c)
    if MASKED:
        b_x = apply_mask(b_x, step.i_m, place.j_0 + WG * 64, place.own, c)
    b_p = gl.exp2(b_x)
    b_w = gl.convert_layout(b_p.to(q.dtype), operand)
    b_p = through_cap(b_p, b_cap, c)
    b_dv = warpgroup_mma(b_w, dout, b_dv, use_acc=not FIRST, is_async=True)
    b_dp = warpgroup_mma_wait(1, [b_dp])
    b_ds = (b_p * (b_dp - part(stats, 1)[None, :])).to(q.dtype)
    announce(b_ds, step.i, held, WG)
    b_dk = warpgroup_mma(gl.convert_layout(b_ds, operand), q, b_dk, use_acc=not FIRST, is_async=True)
    b_dk, b_dv = warpgroup_mma_wait(0, [b_dk, b_dv])
    named_barrier("bar.arrive", SLOT + slot, 288)
    return b_dk, b_dv


@gluon.jit
def first_products(ring, held, c, WG: gl.constexpr):
    """Scores and dp of the first row block."""
    mbarrier.wait(ring.q_full.index(0), 0)
    b_s = scores(held.k.index(WG).reshape([64, c.D]), ring.q.index(0).reshape([64, c.D]))
    mbarrier.wait(ring.dout_full.index(0), 0)
    b_dp = scores(held.v.index(WG).reshape([64, c.D]), ring.dout.index(0).reshape([64, c.D]))
    return warpgroup_mma_wait(0, [b_s, b_dp])


@gluon.jit
def differentiate_ahead(
    ring, held, sums, step, place, n, c, WG: gl.constexpr, MASKED: gl.constexpr, LAST: gl.constexpr
):
    """Adds a block as `differentiate_block` does, in two parts: first weights and ds, of scores and dp that
    are there, then all products at once, those of the next block too. Consumers take turns in the first part,
    so one has the tensor cores while the other computes; a product issued there would wait in their queue."""
    b_dk, b_dv, b_s, b_dp = sums
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator(c.D), 2)
    slot, later = step.i % c.STAGES, (step.i + 1) % c.STAGES
    q, dout = ring.q.index(slot).reshape([64, c.D]), ring.dout.index(slot).reshape([64, c.D])
    stats = ring.stats.index(slot)
    await_ds(step.i + 1 + WG, WG)  # of the block before, by parity; consumer 1: of this block
    b_x, b_cap = change_scores(b_s, part(stats, 0), place.j_0 + WG * 64, step, place.own, n, c)
    if MASKED:
        b_x = apply_mask(b_x, step.i_m, place.j_0 + WG * 64, place.own, c)
    b_p = gl.exp2(b_x)
    b_w = gl.convert_layout(b_p.to(q.dtype), operand)
    b_p = through_cap(b_p, b_cap, c)
    b_ds = (b_p * (b_dp - part(stats, 1)[None, :])).to(q.dtype)
    announce(b_ds, step.i, held, WG)
    b_dq = issue_dq(held, step.i + 3, c, WG)  # of the block before, by slot
    b_dv = warpgroup_mma(b_w, dout, b_dv, is_async=True)
    b_dk = warpgroup_mma(gl.convert_layout(b_ds, operand), q, b_dk, is_async=True)
    b_dq = warpgroup_mma_wait(2, [b_dq])
    hand_over(b_dq, step.i, held, c, WG)
    if LAST:
        b_dk, b_dv = warpgroup_mma_wait(0, [b_dk, b_dv])
    else:
        arrived = phase(step.i + 1, c.STAGES)
        mbarrier.wait(ring.q_full.index(later), arrived)
        b_s = scores(held.k.index(WG).reshape([64, c.D]), ring.q.index(later).reshape([64, c.D]))
        mbarrier.wait(ring.dout_full.index(later), arrived)
        b_dp = scores(held.v.index(WG).reshape([64, c.D]), ring.dout.index(later).reshape([64, c.D]))
        b_dk, b_dv, b_s, b_dp = warpgroup_mma_wait(0, [b_dk, b_dv, b_s, b_dp])
    named_barrier("bar.arrive", SLOT + slot, 288)
    return b_dk, b_dv, b_s, b_dp


@gluon.jit
def differentiate_keys(dk, dv, ring, held, place, t, n, c, WG: gl.constexpr):
    """Consumer: 64 of the program's keys."""
    b_dk = gl.zeros([64, c.D], gl.float32, accumulator(c.D))
    b_dv = b_dk
    mbarrier.wait(held.full, 0)
    if place.end > place.start:
        if c.AHEAD:
            b_dk, b_dv = walk_ahead(ring, held, (b_dk, b_dv), place, t, n, c, WG)
        else:
            b_dk, b_dv = walk_rows(ring, held, (b_dk, b_dv), place, t, n, c, WG)
    store_keys(b_dk * n.scale, b_dv, (dk, dv), held, place, t, n, c, WG)


@gluon.jit
def walk_rows(ring, held, sums, place, t, n, c, WG: gl.constexpr):
    """All row blocks, from the last one on, each of every head; those that hide keys come last, and with a
    window first."""
    HIDES: gl.constexpr = c.HAS_RIGHT or not c.WHOLE
    step = Step(0, place.end - 1, slope_of(place.i_h * n.group, place.own, t, n, c))
    sums = differentiate_block(ring, held, sums, step, place, n, c, WG, HIDES, True)
    first = 1  # is done
    if c.HAS_LEFT:
        bare = (place.end - place.bare) * n.group
        for i in range(first, bare):
            step = step_at(i, place, t, n, c)
            sums = differentiate_block(ring, held, sums, step, place, n, c, WG, True, False)
        first = max(first, bare)
    whole, end = (place.end - place.whole) * n.group, (place.end - place.start) * n.group
    for i in range(first, whole):
        step = step_at(i, place, t, n, c)
        sums = differentiate_block(ring, held, sums, step, place, n, c, WG, False, False)
    if HIDES:
        for i in range(max(first, whole), end):
            step = step_at(i, place, t, n, c)
            sums = differentiate_block(ring, held, sums, step, place, n, c, WG, True, False)
    await_ds(end - 1, WG)
    b_dq = warpgroup_mma_wait(0, [issue_dq(held, end - 1, c, WG)])
    hand_over(b_dq, end - 1, held, c, WG)
    return sums


@gluon.jit
def walk_ahead(ring, held, sums, place, t, n, c, WG: gl.constexpr):
    """`walk_rows` by `differentiate_ahead`. The first dq that is handed over is of a block of zeros."""
    HIDES: gl.constexpr = c.HAS_RIGHT or not c.WHOLE
    announce(gl.zeros([64, 64], gl.float32, accumulator(64)).to(held.k.dtype), 3, held, WG)
    if WG == 1:
        await_ds(3, WG)
    b_s, b_dp = first_products(ring, held, c, WG)
    sums = sums[0], sums[1], b_s, b_dp
    first, last = 0, (place.end - place.start) * n.group - 1
    if c.HAS_LEFT:
        bare = min((place.end - place.bare) * n.group, last)
        for i in range(first, bare):
            step = step_at(i, place, t, n, c)
            sums = differentiate_ahead(ring, held, sums, step, place, n, c, WG, True, False)
        first = bare
    whole = min((place.end - place.whole) * n.group, last)
    for i in range(first, whole):
        step = step_at(i, place, t, n, c)
        sums = differentiate_ahead(ring, held, sums, step, place, n, c, WG, False, False)
    if HIDES:
        for i in range(whole, last):
            step = step_at(i, place, t, n, c)
            sums = differentiate_ahead(ring, held, sums, step, place, n, c, WG, True, False)
    step = Step(last, place.start, slope_of((place.i_h + 1) * n.group - 1, place.own, t, n, c))
    sums = differentiate_ahead(ring, held, sums, step, place, n, c, WG, HIDES, True)
    if WG == 0:
        await_ds(last, WG)
    b_dq = warpgroup_mma_wait(0, [issue_dq(held, last, c, WG)])
    hand_over(b_dq, last + 1, held, c, WG)
    return sums[0], sums[1]


@gluon.jit
def store_keys(b_dk, b_dv, boxes, held, place, t, n, c, WG: gl.constexpr):
    """dk and dv leave through the memory of K and V, which both consumers have read. `odd` if one is not
    finite."""
    meet(max(place.end - place.start, 0) * n.group, WG)
    b_sum = gl.sum(b_dk, 1) + gl.sum(b_dv, 1)
    b_odd = b_sum - b_sum != 0.0
    gl.store(t.odd + b_odd.to(gl.int32) * 0, 1, mask=b_odd)
    s_dk, s_dv = held.k.index(WG), held.v.index(WG)
    s_dk.reshape([64, c.D]).store(b_dk.to(s_dk.dtype))
    s_dv.reshape([64, c.D]).store(b_dv.to(s_dv.dtype))
    fence_async_shared()
    dk, dv = boxes
    i_k = place.j_0 + WG * 64
    at = [place.i_b, place.i_h, place.own.first_k + i_k, 0]
    if not c.PACKED or i_k + 64 <= place.keys:
        store_box(dk, at, s_dk)
        store_box(dv, at, s_dv)
    else:  # the keys behind are another member's
        store_rows(t.dk_view, place.i_h, place.own.first_k + i_k, b_dk.to(s_dk.dtype), place.keys - i_k, c, 0)
        store_rows(t.dv_view, place.i_h, place.own.first_k + i_k, b_dv.to(s_dv.dtype), place.keys - i_k, c, 0)
    tma.store_wait(0)


@gluon.jit
def differentiate_sm90(t, n, c, q, dout, k, v, stats, dq, dk, dv):
    """A program per 128 keys of a key/value head."""
    DTYPE: gl.constexpr = q.dtype
    b_q = gl.allocate_shared_memory(DTYPE, [c.STAGES, 1, 1, 64, c.D], q.layout)
    b_do = gl.allocate_shared_memory(DTYPE, [c.STAGES, 1, 1, 64, c.D], dout.layout)
    b_stats = gl.allocate_shared_memory(gl.float32, [c.STAGES, STATS], stats.layout)
    ring = Ring(b_q, b_do, b_stats, barriers(c.STAGES, 1), barriers(c.STAGES, 1))
    b_k = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, c.D], k.layout)
    b_v = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, c.D], v.layout)
    b_ds = gl.allocate_shared_memory(DTYPE, [8 if c.AHEAD else 4, 64, 64], tile_layout(DTYPE))
    b_dq = gl.allocate_shared_memory(gl.float32, [2, c.D, 32], dq.layout)
    held = Held(b_k, b_v, b_ds, b_dq, barriers(1, 1).index(0), barriers(2, 1))
    i_t = gl.program_id(0)
    if c.ORDERED:
        i_t = gl.atomic_add(t.odd + 1, 1)
        gl.thread_barrier()  # all have the number before a warp writes what roles are given into its memory
    place = find_place(i_t, t, n, c)
    fence_async_shared()
    gl.warp_specialize([
        (differentiate_keys, (dk, dv, ring, held, place, t, n, c, 0)),
        (differentiate_keys, (dk, dv, ring, held, place, t, n, c, 1)),
        (load_rows, (q, dout, k, v, stats, ring, held, place, n, c)),
        (add_rows, (dq, held, place, t, n, c, 0)),
        (add_rows, (dq, held, place, t, n, c, 1)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
