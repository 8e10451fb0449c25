"""Messages between the warp that loads and the warpgroups that multiply, through shared memory.

The ring holds blocks of K and V in STAGES slots each. A barrier in memory says that a slot is full, as
bytes arrive; a named barrier of the hardware, on which consumers arrive and the producer waits, that it is
free. Blocks are numbered over all tiles of a program, so slots and phases follow from the number. The board
carries the next tile from the producer to the consumers.

What has the channels of a head, boxes, slots or sums, is a tuple: of the first D, and with REST of so many
more, as boxes and products have powers of two.

Every barrier in memory that is initialised is waited for: the memory of others counts as free, and what the
compiler puts there loses tiles where programs are preempted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from polyflash.backends.gluon.shim import bytes_of, load_box, named_barrier

# Named barriers of hardware: 0 up to this one, and one more per consumer, are the compiler's.
RESERVED: gl.constexpr = gl.constexpr(4)


class Ring(NamedTuple):
    """Slots (STAGES, 1, 1, BLOCK_N, channels) of K and V, and their barriers; where tiles are mended, that of
    consumers who have put 0 for what is not finite in a block of V."""

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    clean: Any = None


class Rows(NamedTuple):
    """Slots (ROW_SLOTS, 1, 1, 64, channels) of Q, those of the output, and when Q is there and no longer
    read."""

    q: Any
    out: Any
    full: Any
    free: Any


class Board(NamedTuple):
    """Two places for the number of the next tile, and with it what is known of its packed member. Of a word
    each lane of the producer has copies of its own, where memory is left, so that what is read was written by
    the lane that says it is there: racecheck follows no order by way of bar.warp.sync."""

    tile: Any
    full: Any
    free: Any


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def slots(box, COUNT: gl.constexpr, ROWS: gl.constexpr, c):
    """Memory for COUNT boxes."""
    first = gl.allocate_shared_memory(box[0].dtype, [COUNT, 1, 1, ROWS, c.D], box[0].layout)
    return (
        (first, gl.allocate_shared_memory(box[1].dtype, [COUNT, 1, 1, ROWS, c.REST], box[1].layout))
        if c.REST > 0
        else (first,)
    )


@gluon.jit
def slot_of(x, i, ROWS: gl.constexpr, c):
    """Slot i as [ROWS, channels]."""
    first = x[0].index(i).reshape([ROWS, c.D])
    return (first, x[1].index(i).reshape([ROWS, c.REST])) if c.REST > 0 else (first,)


@gluon.jit
def load_slot(box, at, full, x, i, c):
    """Asks for the box at (batch, head, row) into slot i, of whose arrival `full` is the barrier."""
    if c.REST > 0:
        load_box(box[0], [at[0], at[1], at[2], 0], full, x[0].index(i), 1, bytes_of(box[1].block_type))
        load_box(box[1], [at[0], at[1], at[2], c.D], full, x[1].index(i), 0)
    else:
        load_box(box[0], [at[0], at[1], at[2], 0], full, x[0].index(i))


@gluon.jit
def phase(i, COUNT: gl.constexpr):
    """Phase that the barrier of the i-th use of COUNT places completes."""
    return (i // COUNT) & 1


@gluon.jit
def free_keys(i_n, c):
    """Consumer: the slot of block i_n of K is no longer read."""
    named_barrier("bar.arrive", RESERVED + c.CONSUMERS + i_n % c.STAGES, c.CONSUMERS * 128 + 32)


@gluon.jit
def free_values(i_n, c):
    named_barrier("bar.arrive", RESERVED + c.CONSUMERS + c.STAGES + i_n % c.STAGES, c.CONSUMERS * 128 + 32)


@gluon.jit
def rows_number(i_round, WG: gl.constexpr, c):
    """The rows of a consumer in a round, counted over all that the program has."""
    return i_round * c.CONSUMERS + WG


@gluon.jit
def acquire_keys(i_n, c):
    """Producer: waits until the slot of block i_n of K is free, as all are at first."""
    if i_n >= c.STAGES:
        named_barrier("bar.sync", RESERVED + c.CONSUMERS + i_n % c.STAGES, c.CONSUMERS * 128 + 32)


@gluon.jit
def acquire_values(i_n, c):
    if i_n >= c.STAGES:
        named_barrier("bar.sync", RESERVED + c.CONSUMERS + c.STAGES + i_n % c.STAGES, c.CONSUMERS * 128 + 32)


@gluon.jit
def keys_of(ring, i_n, c):
    """Block i_n of K, [channels, BLOCK_N], once it is there."""
    mbarrier.wait(ring.k_full.index(i_n % c.STAGES), phase(i_n, c.STAGES))
    b_k = slot_of(ring.k, i_n % c.STAGES, c.BLOCK_N, c)
    found = (b_k[0].permute((1, 0)),)
    if c.REST > 0:
        found = found[0], b_k[1].permute((1, 0))
    return found


@gluon.jit
def values_of(ring, i_n, c):
    """Block i_n of V, [BLOCK_N, channels], once it is there."""
    mbarrier.wait(ring.v_full.index(i_n % c.STAGES), phase(i_n, c.STAGES))
    return slot_of(ring.v, i_n % c.STAGES, c.BLOCK_N, c)


@gluon.jit
def take_turn(WG: gl.constexpr, c):
    """Consumers issue the products of scores by turns, so that one multiplies while another exponentiates."""
    if c.TURNS:
        named_barrier("bar.sync", RESERVED + c.CONSUMERS + 2 * c.STAGES + WG, 256)


@gluon.jit
def pass_turn(WG: gl.constexpr, c):
    if c.TURNS:
        NEXT: gl.constexpr = RESERVED + c.CONSUMERS + 2 * c.STAGES + (WG + 1) % c.CONSUMERS
        named_barrier("bar.arrive", NEXT, 256)


@gluon.jit
def first_turn(WG: gl.constexpr, c):
    """The last consumer gives the first one its first turn."""
    if WG == c.CONSUMERS - 1:
        pass_turn(WG, c)


@gluon.jit
def board_of(WORDS: gl.constexpr, c):
    COPIES: gl.constexpr = 64 if WORDS == 1 or c.D < 256 else 1  # two of each lane, as one would make STSM
    tile = gl.allocate_shared_memory(gl.int32, [2 * WORDS, COPIES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Board(tile, barriers(2, 1), barriers(2, c.CONSUMERS))


@gluon.jit
def tell(board, i_round, i_t, member=None):
    """Producer: the tile of the next round, for every consumer. Lanes store, meet, and the first arrives."""
    WORDS: gl.constexpr = board.tile.shape[0] // 2
    COPIES: gl.constexpr = board.tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([max(COPIES // 32, 1)], [32], [1], [0])
    mbarrier.wait(board.free.index(i_round % 2), phase(i_round, 2) ^ 1)
    board.tile.index(i_round % 2 * WORDS).store(gl.full([COPIES], i_t, gl.int32, layout))
    for i in gl.static_range(1, WORDS):
        word = gl.full([COPIES], member[i - 1], gl.int32, layout)
        board.tile.index(i_round % 2 * WORDS + i).store(word)
    mbarrier.arrive(board.full.index(i_round % 2), count=1)


@gluon.jit
def told(board, i_round):
    mbarrier.wait(board.full.index(i_round % 2), phase(i_round, 2))
    i_t = word_of(board, i_round, 0)
    mbarrier.arrive(board.free.index(i_round % 2), count=1)
    return i_t


@gluon.jit
def told_member(board, i_round):
    """The same with its member."""
    mbarrier.wait(board.full.index(i_round % 2), phase(i_round, 2))
    i_t, i_b = word_of(board, i_round, 0), word_of(board, i_round, 1)
    first_q, rows = word_of(board, i_round, 2), word_of(board, i_round, 3)
    first_k, live = word_of(board, i_round, 4), word_of(board, i_round, 5)
    mbarrier.arrive(board.free.index(i_round % 2), count=1)
    return i_t, (i_b, first_q, rows, first_k, live)


@gluon.jit
def word_of(board, i_round, AT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    WORDS: gl.constexpr = board.tile.shape[0] // 2
    return gl.max(board.tile.index(i_round % 2 * WORDS + AT).slice(0, 1).load(layout), 0)
