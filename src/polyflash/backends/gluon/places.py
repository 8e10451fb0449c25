"""Places of tiles on Hopper: which keys the rows of a request see, as far as order, distance and lengths go,
and what of a block is hidden."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from polyflash.backends.gluon.schedule import band
from polyflash.backends.gluon.shim import accumulator, keep_less

NONE, BELOW, BOTH = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # ends that a block may hide
FAR: gl.constexpr = gl.constexpr(2)  # bit of a mark: see `forward_sm90`


class Place(NamedTuple):
    """Row i of a request sees the keys from i + low and `start` on, up to i + high and before `live`."""

    live: Any
    start: Any
    low: Any  # 0 where not compiled in
    high: Any


class Seen(NamedTuple):
    """Keys from `first` on (BELOW; else all) and before `limit` are seen by a row; `col` numbers the keys of
    a block; `far` rows (MENDING)."""

    col: Any
    first: Any
    limit: Any
    far: Any


@gluon.jit
def place_of(i_b, t, n, c):
    """Place of request i_b. With OWN its rows stand at an offset of its own, or end where its keys do."""
    live, start, high = n.seqlen_k, 0, n.offset
    low = n.left if c.HAS_LEFT else 0
    if t.kv_lens is not None:
        live = min(max(gl.load(t.kv_lens + i_b), 0), live)
    if t.kv_starts is not None:
        start = min(max(gl.load(t.kv_starts + i_b), 0), live)
    if c.OWN:
        position = (live - n.seqlen_q).to(gl.int64)
        if t.q_offset is not None:
            position = gl.load(t.q_offset + i_b).to(gl.int64)
        low, high = band(position, live, n, c)
        low, high = low.to(gl.int32), high.to(gl.int32)
    return Place(live, start, low, high)


@gluon.jit
def rows_seen(o_row, p_marks, place, c):
    """Limits of what the rows of a tile see, and which of them are far."""
    col = gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(0, accumulator(c.BLOCK_N)))
    limit = o_row * 0 + place.live
    if c.HAS_RIGHT:
        limit = gl.minimum(limit, o_row + place.high + 1)
    first = o_row * 0
    if c.BELOW:
        first += place.start
    if c.HAS_LEFT:
        first = gl.maximum(first, o_row + place.low)
    far = o_row < 0
    if c.MENDING:
        far = (gl.load(p_marks).to(gl.int32) & FAR) != 0
    return Seen(col, first, limit, far)


@gluon.jit
def apply_mask(b_s, seen, j_0, c, ENDS: gl.constexpr):
    """-inf at keys that a row does not see, whatever was there, at these ends of what it sees."""
    if ENDS == BOTH:
        b_s = keep_less(b_s, seen.col[None, :], (seen.limit - j_0)[:, None])
    if c.BELOW:
        b_s = keep_less(b_s, (seen.first - 1 - j_0)[:, None], seen.col[None, :])
    return b_s
