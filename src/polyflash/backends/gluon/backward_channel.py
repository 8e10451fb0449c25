"""Messages of the backward pass, through shared memory: from the warp that loads to the warpgroups that
multiply, from these to one another, and to the warps that add dq in memory. Barriers as in channel.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from polyflash.backends.gluon.channel import RESERVED, phase
from polyflash.backends.gluon.schedule import ROWS
from polyflash.backends.gluon.shim import accumulator, named_barrier

STATS: gl.constexpr = gl.constexpr(128)  # floats of a block: -lse·log2 e, delta
# Named barriers: ds of each consumer, even and odd blocks; slots of rows; dq is there, for each adder.
# At each one warp or warpgroup waits, as bar.sync promises that all who do stand at one place of the code.
READY: gl.constexpr = gl.constexpr(RESERVED.value + 2)
SLOT: gl.constexpr = gl.constexpr(RESERVED.value + 6)
FULL: gl.constexpr = gl.constexpr(RESERVED.value + 9)


class Ring(NamedTuple):
    """Slots of Q and dO (STAGES, 1, 1, 64, D), of their statistics, and when they are there."""

    q: Any
    dout: Any
    stats: Any
    q_full: Any
    dout_full: Any


class Held(NamedTuple):
    """K and V (2, 1, 1, 64, D) of the program; ds (4 or 8, 64, 64) of two or four blocks and both consumers;
    dq of each consumer (2, D, 32), in the order of `in_fragments`, and when it has left."""

    k: Any
    v: Any
    ds: Any
    dq: Any
    full: Any
    dq_free: Any


@gluon.jit
def part(stats, WHICH: gl.constexpr):
    """One of the statistics of the 64 rows of a block."""
    return stats.slice(WHICH * ROWS, ROWS).load(gl.SliceLayout(0, accumulator(64)))


@gluon.jit
def slot_of_ds(i, held):
    """First slot of ds of block i."""
    return i % (held.ds.shape[0] // 2) * 2


@gluon.jit
def announce(b_ds, i, held, WG: gl.constexpr):
    """ds of this consumer's keys in block i, for both."""
    held.ds.index(slot_of_ds(i, held) + WG).store(b_ds)
    fence_async_shared()
    named_barrier("bar.arrive", READY + 2 * WG + i % 2, 256)


@gluon.jit
def await_ds(i, WG: gl.constexpr):
    """Waits for ds of the other consumer in block i."""
    named_barrier("bar.sync", READY + 2 * (1 - WG) + i % 2, 256)


@gluon.jit
def meet(i, WG: gl.constexpr):
    """Waits for the other consumer behind the last of i blocks, as if for another one."""
    named_barrier("bar.arrive", READY + 2 * WG + i % 2, 256)
    await_ds(i, WG)


@gluon.jit
def in_fragments(b_x, c):
    """[64, D / 2] with the values of a thread side by side: a store without conflicts."""
    HALF: gl.constexpr = c.D // 2
    return b_x.reshape([4, 2, 8, HALF // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([c.D, 32])


@gluon.jit
def hand_over(b_dq, i, held, c, WG: gl.constexpr):
    """dq of block i, for the adder."""
    mbarrier.wait(held.dq_free.index(WG), phase(i, 1) ^ 1)
    held.dq.index(WG).store(in_fragments(b_dq, c))
    fence_async_shared()
    named_barrier("bar.arrive", FULL + i % 2, 288)


@gluon.jit
def take_rows(WHICH: gl.constexpr):
    """Adder: waits for dq of a block, of both consumers."""
    named_barrier("bar.sync", FULL + WHICH, 288)


@gluon.jit
def free_rows(held):
    """Adder: the memory of dq is no longer read."""
    for WG in gl.static_range(2):
        mbarrier.arrive(held.dq_free.index(WG), count=1)
