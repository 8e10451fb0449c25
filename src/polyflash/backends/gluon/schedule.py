"""The tiles of a program and the keys of a tile: arithmetic of scalars alone, so that Python runs it too
(`function.fn`), and a test visits every tile of a grid of shapes.

Tiles stand in an order: groups of `heads` heads, whose keys stay in the L2 cache; in a group the rows of one
place of all heads side by side, with a causal mask those with the most keys first. `heads_of` says how many.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS: gl.constexpr = gl.constexpr(128)  # of a program that makes gradients, 64 per consumer
ROWS: gl.constexpr = gl.constexpr(64)  # of a block that it walks over


def heads_of(planes: int, most: int) -> int:
    """Heads of a group, so many at most, that divide them all: so a tile's place takes one division."""
    return next(heads for heads in range(most, 0, -1) if planes % heads == 0)


def inverse_of(num_tiles: int) -> tuple[int, int]:
    """A factor and a shift that divide what is below 2^30 by num_tiles (Granlund and Montgomery 1994): the
    division itself takes a consumer as long as a tenth of a key block."""
    shift = 30 + (num_tiles - 1).bit_length()
    return -(-(1 << shift) // num_tiles), shift


@gluon.jit
def tile_of(i_t, n, heads, CAUSAL: gl.constexpr):
    """Plane (batch and head) and tile of tile i_t."""
    i_r = i_t // heads
    i_g = gl.cast((gl.cast(i_r, gl.int64) * n.inverse) >> n.shift, gl.int32)
    i_m = i_r - i_g * n.num_tiles
    if CAUSAL:
        i_m = n.num_tiles - 1 - i_m
    return i_g * heads + i_t % heads, i_m


@gluon.jit
def fixed_tile(i_round, i_p, programs):
    """The tile of a program in one round of a fixed schedule: from one end in even rounds, from the other in
    odd ones, so that the longest tiles meet the shortest."""
    place = i_p
    if i_round % 2 == 1:
        place = programs - 1 - i_p
    return i_round * programs + place


@gluon.jit
def band(position, live, n, c):
    """Row i of a request whose row 0 stands at `position` sees keys from i + low on, up to i + high."""
    low, high = position * 0, position * 0 + live
    if c.HAS_LEFT:
        low = min(max(position + n.left, -n.seqlen_q), live)
    if c.HAS_RIGHT:
        high = min(max(position + n.offset, -n.seqlen_q), live)
    return low, high


@gluon.jit
def key_blocks(i_row, least, place, c, ROWS: gl.constexpr):
    """Blocks of keys that ROWS rows from i_row on walk: the end of the last one, from which they walk down,
    and how many; of them so many at first hide keys from a row, and all behind the last number. One at
    least, not below number `least`, whose mask shows that there is nothing to see."""
    live, masked = place.live, 1
    if i_row >= place.rows:
        live = 0
    end = (live + c.BLOCK_N - 1) // c.BLOCK_N
    if c.HAS_RIGHT:
        seen = i_row + place.high + 1  # keys of the first row
        end = min(end, (max(seen + ROWS - 1, 0) + c.BLOCK_N - 1) // c.BLOCK_N)
    end = max(end, least + 1)
    if c.HAS_RIGHT:
        whole = min(max(seen, 0), place.live) // c.BLOCK_N
        masked = max(end - whole, 1)
    count, bare = end, end
    if c.BELOW:
        first, every = place.start, place.start  # keys from which on some row sees, and every row
        if c.HAS_LEFT:
            low = i_row + place.low
            first, every = max(first, low), max(every, low + ROWS - 1)
        count = end - min(first // c.BLOCK_N, end - 1)
        masked = min(masked, count)
        bare = min(max(end - (every + c.BLOCK_N - 1) // c.BLOCK_N, masked), count)
    return end, count, masked, bare


@gluon.jit
def row_blocks(j_0, place, c):
    """Row blocks that see some of KEYS keys from j_0 on: the first; from which and up to which every row sees
    all; the end."""
    end = (place.rows + ROWS - 1) // ROWS
    first, last = max(j_0, place.start), min(j_0 + KEYS, place.live) - 1
    start, whole, bare = 0, 0, end
    if c.HAS_RIGHT:
        start = min(max(first - place.high, 0) // ROWS, end)
        whole = min(max((max(j_0 + KEYS - 1 - place.high, 0) + ROWS - 1) // ROWS, start), end)
    if c.HAS_LEFT:
        end = min((max(last - place.low + 1, 0) + ROWS - 1) // ROWS, end)
        bare = min(max(j_0 - place.low + 1, 0) // ROWS, end)
        start = min(start, end)
    if c.SHORT or c.BELOW:  # noqa: SIM102  a branch of the compiler, then one of the kernel
        if last < first:
            end = start
    if j_0 + KEYS > place.live or j_0 < place.start or whole > bare:
        whole, bare = end, end
    return start, whole, bare, end


@gluon.jit
def first_tile(i_m, place, c):
    """The first key tile of which row block i_m sees something: each up to its last one does."""
    first = place.start
    if c.HAS_LEFT:
        first = max(first, i_m * ROWS + place.low)
    return first // KEYS
