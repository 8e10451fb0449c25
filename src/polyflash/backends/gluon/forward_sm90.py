"""Attention forward for Hopper in Gluon: warp-specialised, as FlashAttention-3 has it.

    producer, one warp                        consumer, a warpgroup of 64 rows
        for tile, for key block:                  s = q @ kᵀ(j)      issued
            K, Q (once), V into free slots        acc += p(j-1) @ v(j-1)   issued
                                                  p(j), m_i, l_i, alpha = online_softmax(s)   meanwhile
                                                  acc = acc·alpha
        tell the next tile                    out = acc / l_i      lse = m_i + ln l_i

q (B, Hq, Sq, D), k, v (B, Hkv, Sk, D), out as q, by tensor descriptors: what lies outside is read as 0 and
not written. Keys are walked from the last block to the first, each at a multiple of BLOCK_N, so that blocks
that hide keys come first, in a loop of their own.

A program first takes every value as it comes, and marks rows that this does not do for: whose scores are so
large that rounding their maximum would show in weights (FAR), or whose output is not finite, as a weight of
0 times a hidden NaN is (SPOILED). Then, MENDING, it makes those of its tiles that have a mark once more, of V
the finite values alone and with exact weights in FAR rows, and adds what is not finite to rows that see it;
bits of other rows are the same again. Without a mark it ends instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
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
    rows_number,
    slot_of,
    slots,
    take_turn,
    tell,
    told,
    told_member,
    values_of,
)
from polyflash.backends.gluon.mending import (
    clean_barrier,
    clean_values,
    find_marked,
    first_clean,
    is_any_marked,
    marks_of,
    pass_blocks,
    store_marks,
)
from polyflash.backends.gluon.parts import awaited, finish, no_sums, rescale, scores_of, weighted
from polyflash.backends.gluon.places import (
    BELOW,
    BOTH,
    NONE,
    apply_mask,
    member_of,
    place_in,
    place_of,
    rows_seen,
    tile_in,
)
from polyflash.backends.gluon.schedule import fixed_tile, key_blocks, tile_of
from polyflash.backends.gluon.scores import change_scores
from polyflash.backends.gluon.shim import accumulator, held, packed, pinned, stored
from polyflash.backends.gluon.softmax import LOWEST, SUMS, new_maxima, online_softmax, store_lse

NEXT, LEFT = gl.constexpr(0), gl.constexpr(1)  # of `words`


class Tensors(NamedTuple):
    """`t` of `attend_sm90`: lse (B, Hq, Sq) or None; marks, int8 (B·Hq, row tiles, BLOCK_M); words, int32, 0
    between calls: the next tile, and programs that have none left; V, of whose rows channels stand side by
    side; own, int32: of every tile the one before it in its program, and of every program its last tile and
    whether it has marked a row."""

    lse: Any
    marks: Any
    words: Any
    v_view: Any
    own: Any
    kv_lens: Any = None  # int32 (B,), as those that follow
    kv_starts: Any = None
    q_offset: Any = None
    cu_seqlens_q: Any = None  # int32 (members + 1,); then B is 1, and what is of a request is of a member
    cu_seqlens_k: Any = None
    out_view: Any = None
    sinks: Any = None  # float (Hq,)
    slopes: Any = None  # of ALiBi
    end: None = None  # see `runtime.compile` of the Triton engine


class Numbers(NamedTuple):
    """`n`: none is compiled in."""

    num_heads: Any  # of queries
    group: Any  # query heads per key/value head
    seqlen_q: Any
    seqlen_k: Any
    num_tiles: Any  # row tiles of a plane; what divides by them, see schedule.py
    inverse: Any
    shift: Any
    total: Any  # tiles of all planes
    offset: Any  # row i sees keys up to i + offset; from -seqlen_q to seqlen_k, but with OWN
    left: Any  # and from i + left on; None without HAS_LEFT
    factor: Any  # of scores in an exponent of 2
    members: Any  # packed; else None
    into_cap: Any  # what makes a product of q and k a part of softcap; None without one
    softcap: Any
    position: Any  # of row 0 among the keys, as far as they reach, and how much further; None without ALIBI
    rest: Any
    scale: Any


class Constants(NamedTuple):
    """`c`: what is compiled in."""

    D: int = 0  # channels of a box
    REST: int = 0  # of a second one beside it, if there is one
    CHANNELS: int = 0  # so many are there
    BLOCK_M: int = 0  # rows of a tile, 64 per consumer
    BLOCK_N: int = 0
    STAGES: int = 2
    CONSUMERS: int = 2
    HAS_RIGHT: bool = False  # causal, or a window's right side
    HAS_LEFT: bool = False
    BELOW: bool = False  # some row may begin behind key 0
    OWN: bool = False  # rows of a request have a place of their own: `offset` and `left` are distances
    SHORT: bool = False  # requests have lengths of their own, maybe 0
    PACKED: bool = False
    SOFTCAP: bool = False  # products are capped first, and natural scores then
    ALIBI: bool = False  # and so they are less what distance costs
    WHOLE: bool = False  # rows see every key of every block
    COUNTED: bool = False  # the next tile comes from a counter in global memory
    EARLY: bool = False  # consumers find the next tile beside the last product of this one
    HEADS: int = 4  # see schedule.py
    TURNS: bool = True
    PINNED: str = ""  # what is complete before the product beside it is waited for
    LATE_SUM: bool = False  # weights of a row are added up across threads behind the last block
    LAZY: bool = False  # older sums are scaled once the maximum has grown by 2^SLACK
    SHARED_OUT: bool = False  # the output leaves through the memory of Q
    ROW_SLOTS: int = 2  # of 64 rows of Q: one or two per consumer, and one ahead where the output takes them
    FIRST: bool = True  # a launch makes every tile
    MENDS: bool = True  # and, or alone, those that have marks again
    LEVEL: int = 0  # blocks whose sums stay in tensor cores, of products of 8 bits
    LAYOUT: int = 0  # of the tuples: another is another kernel


@gluon.jit
def first_tile(t, n, MENDING: gl.constexpr, c):
    """The program's first tile; with MENDING its last one that has a mark."""
    i_t = gl.program_id(0)
    if MENDING:
        i_t = find_marked(gl.load(t.own + n.total + i_t), t, n, c)
    return i_t


@gluon.jit
def take_tile(i_round, board, t, n, c):
    """Producer: the tile of the round after this one."""
    if c.COUNTED:
        i_t = gl.atomic_add(t.words + NEXT, 1, sem="relaxed") + gl.num_programs(0)
        tell(board, i_round, i_t)
    else:
        i_t = fixed_tile(i_round + 1, gl.program_id(0), gl.num_programs(0))
    return i_t


@gluon.jit
def take_member(i_round, board, t, n, c):
    """The same with its packed member; tiles without rows are nobody's."""
    i_t = gl.atomic_add(t.words + NEXT, 1, sem="relaxed") + gl.num_programs(0)
    member = member_of(i_t, t, n, c)
    while (i_t < n.total) and is_empty(i_t, member, n, c):
        i_t = gl.atomic_add(t.words + NEXT, 1, sem="relaxed") + gl.num_programs(0)
        member = member_of(i_t, t, n, c)
    tell(board, i_round, i_t, member)
    return i_t, member


@gluon.jit
def is_empty(i_t, member, n, c):
    _, i_m = tile_of(i_t, n, c.HEADS, c.HAS_RIGHT)
    return tile_in(i_m, member, c) * c.BLOCK_M >= member[2]


@gluon.jit
def next_tile(i_t, i_round, board, t, n, c, MENDING: gl.constexpr):
    """The same for a consumer; with MENDING for the producer too."""
    if MENDING:
        i_t = find_marked(gl.load(t.own + i_t), t, n, c)
    elif c.COUNTED:
        i_t = told(board, i_round)
    else:
        i_t = fixed_tile(i_round + 1, gl.program_id(0), gl.num_programs(0))
    return i_t


@gluon.jit
def load_all(q, k, v, ring, rows, board, done, t, n, c):
    """Producer: all tiles, then those that have marks."""
    i_n, i_round = gl.to_tensor(0), gl.to_tensor(0)
    if c.FIRST:
        i_n, i_round = load_tiles(q, k, v, ring, rows, board, t, n, c, i_n, i_round, False)
    if c.COUNTED:
        leave(t.words + LEFT, t.words + NEXT)
    if c.MENDS:  # noqa: SIM102  a branch of the compiler, then one of the kernel
        if is_any_marked(done, t, n, c):
            load_tiles(q, k, v, ring, rows, board, t, n, c, i_n, i_round, True)


@gluon.jit
def attend_all(out, ring, rows, board, done, t, n, c, WG: gl.constexpr):
    """Consumer: the same."""
    first_turn(WG, c)
    i_n, i_round = gl.to_tensor(0), gl.to_tensor(0)
    if c.FIRST:
        i_n, i_round = attend_tiles(out, ring, rows, board, t, n, c, i_n, i_round, WG, False)
    if c.MENDS:  # noqa: SIM102  a branch of the compiler, then one of the kernel
        if is_any_marked(done, t, n, c):
            attend_tiles(out, ring, rows, board, t, n, c, i_n, i_round, WG, True)


@gluon.jit
def load_tiles(q, k, v, ring, rows, board, t, n, c, i_n, i_round, MENDING: gl.constexpr):
    """Producer: K and V of every block into the ring, and Q of every tile once its first keys are asked
    for."""
    EARLY: gl.constexpr = c.EARLY and not MENDING
    KNOWN: gl.constexpr = EARLY and c.PACKED
    i_last = n.total
    i_t = first_tile(t, n, MENDING, c)
    if KNOWN:
        member = member_of(i_t, t, n, c)
    while i_t < n.total:
        if not MENDING:
            gl.store(t.own + i_t, i_last)
            i_last = i_t
        i_bh, i_m = tile_of(i_t, n, c.HEADS, c.HAS_RIGHT)
        place = place_in(i_m, member, t, n, c) if KNOWN else place_of(i_bh, i_m, t, n, c)
        end, count, _, _ = key_blocks(place.i_m * c.BLOCK_M, 0, place, c, c.BLOCK_M)
        i_b, i_h = i_bh // n.num_heads, i_bh % n.num_heads
        for j in range(count):
            slot, at = i_n % c.STAGES, (i_b, i_h // n.group, place.first_k + (end - 1 - j) * c.BLOCK_N)
            acquire_keys(i_n, c)
            load_slot(k, at, ring.k_full.index(slot), ring.k, slot, c)
            if j == 0:
                for i in gl.static_range(c.CONSUMERS):
                    i_q = rows_number(i_round, i, c)
                    i_slot = i_q % c.ROW_SLOTS
                    mbarrier.wait(rows.free.index(i_slot), phase(i_q, c.ROW_SLOTS) ^ 1)
                    at_q = i_b, i_h, place.first_q + place.i_m * c.BLOCK_M + i * 64
                    load_slot(q, at_q, rows.full.index(i_slot), rows.q, i_slot, c)
            if EARLY:  # noqa: SIM102  a branch of the compiler, then one of the kernel
                if j == count - 1:
                    if KNOWN:
                        i_t, member = take_member(i_round, board, t, n, c)
                    else:
                        i_t = take_tile(i_round, board, t, n, c)
            acquire_values(i_n, c)
            load_slot(v, at, ring.v_full.index(slot), ring.v, slot, c)
            i_n += 1
        if MENDING:
            i_t = next_tile(i_t, i_round, board, t, n, c, MENDING)
        elif not EARLY:
            i_t = take_tile(i_round, board, t, n, c)
        i_round += 1
    if not MENDING:
        gl.store(t.own + n.total + gl.program_id(0), i_last)
    return i_n, i_round


@gluon.jit
def leave(p_left, p_word):
    """The last program that leaves puts both words back to 0, for the next call."""
    if gl.atomic_add(p_left, 1) == gl.num_programs(0) - 1:
        gl.store(p_left, 0)
        gl.store(p_word, 0)


@gluon.jit
def first_block(q, ring, seen, i_n, j_0, n, c, WG: gl.constexpr, MENDING: gl.constexpr):
    """Scores and weights of a tile's first block, the only one that may reach behind the last key; there is
    no output to add to yet."""
    scores: gl.constexpr = accumulator(c.BLOCK_N)
    sums: gl.constexpr = accumulator(SUMS)
    b_k = keys_of(ring, i_n, c)
    take_turn(WG, c)
    b_s = scores_of(q, b_k, c)
    pass_turn(WG, c)
    b_s = warpgroup_mma_wait(0, [b_s])
    free_keys(i_n, c)
    b_s = change_scores(b_s, seen, j_0, n, c)
    if MENDING or not c.WHOLE:
        b_s = apply_mask(b_s, seen, j_0, c, BOTH)
    m_i = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, scores))
    if c.LATE_SUM:
        l_i = gl.zeros([64, SUMS], gl.float32, sums)
    else:
        l_i = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores))
    m_new = new_maxima(b_s, m_i, seen.far, n.factor, c, MENDING)
    b_p, l_i, _ = online_softmax(b_s, m_new, m_i, l_i, seen.far, n.factor, c, MENDING)
    return b_p, m_new, l_i


@gluon.jit
def attend_block(
    q, ring, sums, seen, i_n, j_0, n, c, WG: gl.constexpr, MASKED: gl.constexpr, MENDING: gl.constexpr
):
    """One more key block: its scores and weights, and the share in the output of the block before, whose
    product runs during the softmax. Nothing between issue and wait may branch."""
    acc, b_pairs, m_i, l_i = sums
    b_k = keys_of(ring, i_n, c)
    take_turn(WG, c)
    b_s = scores_of(q, b_k, c)
    pass_turn(WG, c)
    acc = weighted(acc, b_pairs, values_of(ring, i_n - 1, c), c)
    b_s = warpgroup_mma_wait(1 if c.REST == 0 else 2, [b_s])
    free_keys(i_n, c)
    b_s = change_scores(b_s, seen, j_0, n, c)
    if MASKED != NONE:
        b_s = apply_mask(b_s, seen, j_0, c, MASKED)
    m_new = new_maxima(b_s, m_i, seen.far, n.factor, c, MENDING)
    if c.PINNED == "softmax":
        b_p, l_i, alpha = online_softmax(b_s, m_new, m_i, l_i, seen.far, n.factor, c, MENDING)
        l_i = pinned(l_i)
    acc = awaited(acc, c)
    free_values(i_n - 1, c)
    if c.PINNED != "softmax":
        b_p, l_i, alpha = online_softmax(b_s, m_new, m_i, l_i, seen.far, n.factor, c, MENDING)
    return rescale(acc, alpha, c), packed(b_p, q[0].dtype), m_new, l_i


@gluon.jit
def attend_blocks(
    q, ring, sums, seen, at, first, end, n, c, WG: gl.constexpr, MASKED: gl.constexpr, MENDING: gl.constexpr
):
    """The tile's blocks from number `first` up to `end`, behind block `at`: its number, and its first key."""
    i_n, j_0 = at
    for _ in range(first, end):
        if MENDING:
            clean_values(ring, i_n - 1, c, WG)
        j_0 -= c.BLOCK_N
        sums = attend_block(q, ring, sums, seen, i_n, j_0, n, c, WG, MASKED, MENDING)
        i_n += 1
    return sums, (i_n, j_0)


@gluon.jit
def attend_tiles(out, ring, rows, board, t, n, c, i_n, i_round, WG: gl.constexpr, MENDING: gl.constexpr):
    """Consumer: 64 rows of every tile of the program."""
    row: gl.constexpr = gl.SliceLayout(1, accumulator(c.BLOCK_N))
    DTYPE: gl.constexpr = out[0].dtype
    EARLY: gl.constexpr = c.EARLY and not MENDING
    KNOWN: gl.constexpr = EARLY and c.PACKED
    first_clean(ring, i_n, MENDING)
    i_t = first_tile(t, n, MENDING, c)
    i_bh, i_m = tile_of(i_t, n, c.HEADS, c.HAS_RIGHT)
    if KNOWN:
        member = member_of(i_t, t, n, c)
    while i_t < n.total:
        if not EARLY:
            i_bh, i_m = tile_of(i_t, n, c.HEADS, c.HAS_RIGHT)
        place = place_in(i_m, member, t, n, c) if KNOWN else place_of(i_bh, i_m, t, n, c)
        first = place.i_m * c.BLOCK_M
        i_row = first + WG * 64
        tile_end, tile_count, _, _ = key_blocks(first, 0, place, c, c.BLOCK_M)
        end, count, masked, bare = key_blocks(i_row, tile_end - tile_count, place, c, 64)
        o_row = i_row + gl.arange(0, 64, layout=row)
        p_marks = t.marks + i_bh.to(gl.int64) * n.num_tiles * c.BLOCK_M + o_row
        if c.PACKED:
            p_marks += (i_m - place.i_m) * c.BLOCK_M
        seen = rows_seen(o_row, p_marks, i_bh % n.num_heads, place, t, n, c, MENDING)
        i_q = rows_number(i_round, WG, c)
        i_slot = i_q % c.ROW_SLOTS
        mbarrier.wait(rows.full.index(i_slot), phase(i_q, c.ROW_SLOTS))
        q = slot_of(rows.q, i_slot, 64, c)
        i_n = pass_blocks(ring, i_n, tile_end - end, c, WG, MENDING)
        j_0 = (end - 1) * c.BLOCK_N
        b_p, m_i, l_i = first_block(q, ring, seen, i_n, j_0, n, c, WG, MENDING)
        sums = no_sums(c), packed(b_p, DTYPE), m_i, l_i
        walk = i_n + 1, j_0
        if MENDING:
            masked, bare = count, count
        if c.HAS_RIGHT or MENDING:
            sums, walk = attend_blocks(q, ring, sums, seen, walk, 1, masked, n, c, WG, BOTH, MENDING)
        if not MENDING:
            sums, walk = attend_blocks(q, ring, sums, seen, walk, masked, bare, n, c, WG, NONE, MENDING)
            if c.BELOW:
                sums, walk = attend_blocks(q, ring, sums, seen, walk, bare, count, n, c, WG, BELOW, MENDING)
        i_n, j_0 = walk
        acc, b_pairs, m_i, l_i = sums
        if not c.SHARED_OUT:
            mbarrier.arrive(rows.free.index(i_slot), count=1)
        if MENDING:
            clean_values(ring, i_n - 1, c, WG)
        acc = weighted(acc, b_pairs, values_of(ring, i_n - 1, c), c)
        if EARLY:  # no branch, so beside a product
            if KNOWN:
                i_t, member = told_member(board, i_round)
            else:
                i_t = next_tile(i_t, i_round, board, t, n, c, MENDING)
            i_next = tile_of(i_t, n, c.HEADS, c.HAS_RIGHT)
        i_b = held(i_bh // n.num_heads)
        at = i_b, i_bh - i_b * n.num_heads
        if c.LATE_SUM:
            l_i = gl.convert_layout(gl.sum(l_i, 1), row)
        b_share = store_lse(m_i, l_i, (i_bh, o_row), place, seen, t, n, c, MENDING)
        tma.store_wait(0)  # the output of the tile before has left
        acc = awaited(acc, c)
        free_values(i_n - 1, c)
        if c.BELOW:
            i_n = pass_blocks(ring, i_n, tile_count - (tile_end - end) - count, c, WG, MENDING)
        if not MENDING:
            b_mark = marks_of(acc, m_i, l_i, seen, c)
        tile = b_share, l_i, at, i_row, (j_0, min(end * c.BLOCK_N, place.live))
        i_out = i_slot if c.SHARED_OUT else WG
        finish(acc[0], out[0], rows.out[0].index(i_out), tile, place, seen, t, n, c, 0, MENDING)
        if c.REST > 0:
            finish(acc[1], out[1], rows.out[1].index(i_out), tile, place, seen, t, n, c, c.D, MENDING)
        if c.SHARED_OUT:
            tma.store_wait(0)
            mbarrier.arrive(rows.free.index(i_slot), count=1)
        if not MENDING:
            store_marks(b_mark, p_marks, t, n)  # the fence before the output leaves waits for earlier stores
        if EARLY:
            i_bh, i_m = i_next
        else:
            i_t = next_tile(i_t, i_round, board, t, n, c, MENDING)
        i_round += 1
    stored()  # before it is stored again
    return i_n, i_round


@gluon.jit
def attend_sm90(t, n, c, q, k, v, out, q_rest, k_rest, v_rest, out_rest):
    """A program per core that walks over tiles, or one per tile."""
    q, k, v, out = (q,), (k,), (v,), (out,)
    if c.REST > 0:
        q, k, v, out = (q[0], q_rest), (k[0], k_rest), (v[0], v_rest), (out[0], out_rest)
    if c.FIRST:
        gl.store(t.own + n.total + gl.num_programs(0) + gl.program_id(0), 0)
        start_roles(q, k, v, out, t, n, c)
    elif is_any_marked(None, t, n, c):  # nothing is set up for nothing
        start_roles(q, k, v, out, t, n, c)


@gluon.jit
def start_roles(q, k, v, out, t, n, c):
    b_q = slots(q, c.ROW_SLOTS, 64, c)
    b_out = b_q if c.SHARED_OUT else slots(q, c.CONSUMERS, 64, c)
    rows = Rows(b_q, b_out, barriers(c.ROW_SLOTS, 1), barriers(c.ROW_SLOTS, 1))
    b_k, b_v = slots(k, c.STAGES, c.BLOCK_N, c), slots(v, c.STAGES, c.BLOCK_N, c)
    ring = Ring(b_k, b_v, barriers(c.STAGES, 1), barriers(c.STAGES, 1), clean_barrier(c))
    if c.COUNTED:
        board = board_of(6 if c.EARLY and c.PACKED else 1, c)
    else:
        board = Board(ring.k_full, ring.k_full, ring.k_full)
    done = ring.k_full
    if c.FIRST and c.MENDS:
        done = barriers(1, c.CONSUMERS + 1)
    fence_async_shared()
    if c.CONSUMERS == 2:
        gl.warp_specialize([
            (attend_all, (out, ring, rows, board, done, t, n, c, 0)),
            (attend_all, (out, ring, rows, board, done, t, n, c, 1)),
            (load_all, (q, k, v, ring, rows, board, done, t, n, c)),
        ], [4, 1], [240, 24])  # fmt: skip
    elif c.CONSUMERS == 4:
        gl.warp_specialize([
            (attend_all, (out, ring, rows, board, done, t, n, c, 0)),
            (attend_all, (out, ring, rows, board, done, t, n, c, 1)),
            (attend_all, (out, ring, rows, board, done, t, n, c, 2)),
            (attend_all, (out, ring, rows, board, done, t, n, c, 3)),
            (load_all, (q, k, v, ring, rows, board, done, t, n, c)),
        ], [4, 4, 4, 1], [112, 112, 112, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (attend_all, (out, ring, rows, board, done, t, n, c, 0)),
            (attend_all, (out, ring, rows, board, done, t, n, c, 1)),
            (attend_all, (out, ring, rows, board, done, t, n, c, 2)),
            (load_all, (q, k, v, ring, rows, board, done, t, n, c)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
