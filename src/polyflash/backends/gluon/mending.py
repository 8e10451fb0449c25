"""Mending on Hopper (see the head of `forward_sm90.py`): marks of rows, tiles that have some, and values of V
that are not finite, which are taken out of shared memory and added to rows that see them."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from polyflash.backends.gluon.channel import (
    barriers,
    free_keys,
    free_values,
    keys_of,
    pass_turn,
    take_turn,
    values_of,
)
from polyflash.backends.gluon.places import FAR
from polyflash.backends.gluon.schedule import tile_of
from polyflash.backends.gluon.shim import accumulator, row_sum
from polyflash.backends.gluon.softmax import LOWEST

TOO_FAR: gl.constexpr = gl.constexpr(2.0**12)  # from here on m is rounded about as much as a float16 weight
SPOILED: gl.constexpr = gl.constexpr(1)  # bit of a mark, beside FAR
NEVER: gl.constexpr = gl.constexpr(2**31 - 1)  # a key behind all others


@gluon.constexpr_function
def by_channel() -> Any:
    """Layout of 16 rows of V, a channel or two in a thread."""
    return gl.BlockedLayout([16, 1], [1, 32], [1, 4], [1, 0])


@gluon.jit
def is_marked(i_t, t, n, c):
    """Has a row of the tile a mark?"""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i_bh, i_m = tile_of(i_t, n, c.HEADS, c.HAS_RIGHT)
    p = t.marks + (i_bh.to(gl.int64) * n.num_tiles + i_m) * c.BLOCK_M
    found = 0
    for i in gl.static_range(c.CONSUMERS):
        found += gl.max(gl.load(p + 64 * i + gl.arange(0, 64, layout=layout)).to(gl.int32), 0)
    return found > 0


@gluon.jit
def find_marked(i_t, t, n, c):
    """The tile itself, or the next one that has a mark on the way to the program's first."""
    while (i_t < n.total) and not is_marked(min(i_t, n.total - 1), t, n, c):
        i_t = gl.load(t.own + i_t)
    return i_t


@gluon.jit
def is_any_marked(done, t, n, c):
    """Has the program marked a row? Once all its warps ask, of a launch of every tile."""
    if c.FIRST:
        mbarrier.arrive(done.index(0), count=1)
        mbarrier.wait(done.index(0), 0)
    return gl.load(t.own + n.total + gl.num_programs(0) + gl.program_id(0), volatile=True) != 0


@gluon.jit
def marks_of(acc, m_i, l_i, seen, c):
    """Marks of rows that need mending: see the head of this file."""
    b_far = ((gl.abs(m_i) > TOO_FAR) & (m_i != LOWEST)) | (l_i - l_i != 0.0)
    b_some = seen.limit > gl.maximum(seen.first, 0) if c.BELOW else seen.limit > 0
    b_far = b_far | ((l_i == 0.0) & b_some)  # scores below every maximum
    b_sum = gl.convert_layout(row_sum(acc[0]), m_i.type.layout)
    if c.REST > 0:
        b_sum += gl.convert_layout(row_sum(acc[1]), m_i.type.layout)
    return gl.where(b_far, FAR, 0) | gl.where(b_sum - b_sum != 0.0, SPOILED, 0)


@gluon.jit
def store_marks(b_mark, p_marks, t, n):
    gl.store(p_marks, b_mark.to(gl.int8))
    p_any = t.own + n.total + gl.num_programs(0) + gl.program_id(0)
    gl.store(p_any + b_mark * 0, 1, mask=b_mark != 0)


@gluon.jit
def load_values(p_head, j_0, end, x, c, FROM: gl.constexpr, WIDTH: gl.constexpr):
    """16 keys of V from j_0 on, of WIDTH channels behind FROM, and their numbers; 0 from `end` on."""
    layout: gl.constexpr = by_channel()
    o_d = FROM + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    o_n = (j_0 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout)))[:, None]
    m_x = o_n < end
    if c.CHANNELS < FROM + WIDTH:
        m_x = m_x & (o_d < c.CHANNELS)[None, :]
    return gl.load(p_head + o_n.to(gl.int64) * x.s + o_d[None, :], mask=m_x, other=0.0).to(gl.float32), o_n


@gluon.jit
def find_nonfinite(p_head, end, x, c, FROM: gl.constexpr, WIDTH: gl.constexpr):
    """The first keys before `end`, of each channel of V, of a NaN, an infinity and one below 0."""
    layout: gl.constexpr = by_channel()
    nan = gl.full([WIDTH], NEVER, gl.int32, gl.SliceLayout(0, layout))
    above, below = nan, nan
    for j_0 in range(0, end, 16):
        b_x, o_n = load_values(p_head, j_0, end, x, c, FROM, WIDTH)
        nan = gl.minimum(nan, gl.min(gl.where(b_x != b_x, o_n, NEVER), 0))
        above = gl.minimum(above, gl.min(gl.where(b_x == float("inf"), o_n, NEVER), 0))
        below = gl.minimum(below, gl.min(gl.where(b_x == float("-inf"), o_n, NEVER), 0))
    return nan, above, below


@gluon.jit
def pass_blocks(ring, i_n, count, c, WG: gl.constexpr, MENDING: gl.constexpr):
    """Lets blocks go by that other rows of the tile see, and none of these. Gives the number of the next."""
    for _ in range(count):
        keys_of(ring, i_n, c)
        take_turn(WG, c)
        pass_turn(WG, c)
        free_keys(i_n, c)
        if MENDING:
            clean_values(ring, i_n, c, WG)
        else:
            values_of(ring, i_n, c)
        free_values(i_n, c)
        i_n += 1
    return i_n


@gluon.jit
def clean_barrier(c):
    """Barrier of consumers that have cleaned their parts of a block of V."""
    found = None
    if c.MENDS:
        found = barriers(1, c.CONSUMERS).index(0)
    return found


@gluon.jit
def first_clean(ring, i_n, MENDING: gl.constexpr):
    """Block i_n is the first to be mended: its phase is that of its number from here on."""
    if MENDING:  # noqa: SIM102  a branch of the compiler, then one of the kernel
        if i_n % 2 == 1:
            mbarrier.arrive(ring.clean, count=1)
            mbarrier.wait(ring.clean, 0)


@gluon.jit
def clean_values(ring, i_n, c, WG: gl.constexpr):
    """Puts 0 for what is not finite in block i_n of V, in its slot: each consumer in its part, and then all
    wait for one another."""
    b_v = values_of(ring, i_n, c)
    clean(b_v[0], c, WG)
    if c.REST > 0:
        clean(b_v[1], c, WG)
    fence_async_shared()
    mbarrier.arrive(ring.clean, count=1)
    mbarrier.wait(ring.clean, i_n % 2)


@gluon.jit
def clean(b_v, c, WG: gl.constexpr):
    for i in gl.static_range(16 * WG, c.BLOCK_N, 16 * c.CONSUMERS):
        b_x = b_v.slice(i, 16).load(by_channel()).to(gl.float32)
        b_v.slice(i, 16).store(gl.where(b_x - b_x == 0.0, b_x, 0.0).to(b_v.dtype))


@gluon.jit
def add_nonfinite(b_out, l_i, at, keys, seen, x, c, FROM: gl.constexpr):
    """Adds the NaN and infinities of V among `keys` to the rows that see them and have weights, in b_out's
    channels, those behind FROM. `at`: batch, head and row of key 0 in V."""
    WIDTH: gl.constexpr = b_out.shape[1]
    row: gl.constexpr = gl.SliceLayout(1, accumulator(WIDTH))
    i_b, i_h, i_row = at
    begin, end = keys
    p_head = x.p + i_b.to(gl.int64) * x.b + i_h.to(gl.int64) * x.h + gl.to_tensor(i_row).to(gl.int64) * x.s
    b_end = gl.convert_layout(gl.where(l_i == 0.0, 0, seen.limit), row)[:, None]
    if c.BELOW:
        b_first = gl.convert_layout(seen.first, row)[:, None]
        for j_0 in range(begin, end, 16):
            b_x, _ = load_values(p_head, j_0, end, x, c, FROM, WIDTH)
            if gl.max(gl.max(gl.where(b_x - b_x == 0.0, 0, 1), 1), 0) > 0:
                for j in range(j_0, min(j_0 + 16, end)):
                    b_out = add_key(b_out, j, (b_first <= j) & (j < b_end), p_head, x, c, FROM)
    else:  # the first such key of a channel tells for every row
        b_out = add_first(b_out, b_end, find_nonfinite(p_head, end, x, c, FROM, WIDTH))
    return b_out


@gluon.jit
def add_key(b_out, j, b_seen, p_head, x, c, FROM: gl.constexpr):
    """Adds what is not finite of key j of V where it is seen."""
    o_d = FROM + gl.arange(0, b_out.shape[1], layout=gl.SliceLayout(0, b_out.type.layout))
    b_x = gl.load(p_head + j.to(gl.int64) * x.s + o_d, mask=o_d < c.CHANNELS, other=0.0).to(gl.float32)
    return b_out + gl.where(b_seen & (b_x - b_x != 0.0)[None, :], b_x[None, :], 0.0)


@gluon.jit
def add_first(b_out, b_end, nonfinite):
    """Adds what is not finite to rows that end behind the first such keys of each channel."""
    channel: gl.constexpr = gl.SliceLayout(0, b_out.type.layout)
    nan, above, below = nonfinite
    b_out += gl.where(gl.convert_layout(above, channel)[None, :] < b_end, float("inf"), 0.0)
    b_out += gl.where(gl.convert_layout(below, channel)[None, :] < b_end, float("-inf"), 0.0)
    b_out += gl.where(gl.convert_layout(nan, channel)[None, :] < b_end, float("nan"), 0.0)
    return b_out
