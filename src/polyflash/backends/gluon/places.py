"""Places of tiles on Hopper: which keys the rows of a request see, as far as order, distance and lengths go,
and what of a block is hidden."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from polyflash.backends.gluon.schedule import band, tile_of
from polyflash.backends.gluon.shim import accumulator, keep_where

NONE, BELOW, BOTH = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # ends that a block may hide
FAR: gl.constexpr = gl.constexpr(2)  # bit of a mark: see `forward_sm90`


class Place(NamedTuple):
    """A tile's place: its request, which of its tiles it is, where the request's rows and keys begin in the
    tensors, and how many rows it has. Row i sees the keys from i + low and `start` on, up to i + high and
    before `live`."""

    i_b: Any
    i_m: Any
    first_q: Any
    first_k: Any
    rows: Any
    live: Any
    start: Any
    low: Any  # 0 where not compiled in
    high: Any
    position: Any  # of row 0 among the keys, as far as they reach, and how much further (ALIBI)
    rest: Any


class Seen(NamedTuple):
    """Keys from `first` on (BELOW; else all) and before `limit` are seen by a row; `col` numbers the keys of
    a block; `far` rows (MENDING)."""

    col: Any
    first: Any
    limit: Any
    far: Any
    at: Any  # position of a row, and how much further, as `Place` has it, and the head's slope (ALIBI)
    rest: Any
    slope: Any


@gluon.jit
def find_member(i_t, cu_seqlens, total, n, BLOCK: gl.constexpr):
    """Finds the packed member of tile i_t, and which of its tiles that is. Member b has room for its tiles
    from cu[b] // BLOCK + b on; what lies behind the last member counts as one more."""
    lo, hi = 0, n.members
    while lo < hi:
        middle = (lo + hi + 1) // 2
        first = min(max(gl.load(cu_seqlens + middle), 0), total)
        if first // BLOCK + middle <= i_t:
            lo = middle
        else:
            hi = middle - 1
    first = min(max(gl.load(cu_seqlens + lo), 0), total)
    return lo, i_t - (first // BLOCK + lo)


@gluon.jit
def span(cu_seqlens, i_b, total, n):
    """First position and length of a member; bounds that fall or leave the tensor make it shorter."""
    first, end = min(max(gl.load(cu_seqlens + i_b), 0), total), total
    if i_b < n.members:
        end = min(max(gl.load(cu_seqlens + i_b + 1), first), total)
    return first, end - first


@gluon.jit
def load_own(p, i_b, n, c):
    """A value of request i_b; 0 of what belongs to nobody."""
    return gl.load(p, mask=i_b < n.members, other=0) if c.PACKED else gl.load(p)


@gluon.jit
def spans(i_b, t, n):
    """First row and rows of a member, first key and keys."""
    first_q, rows = span(t.cu_seqlens_q, i_b, n.seqlen_q, n)
    first_k, live = span(t.cu_seqlens_k, i_b, n.seqlen_k, n)
    if i_b == n.members:  # of nobody
        live = 0
    return first_q, rows, first_k, live


@gluon.jit
def member_of(i_t, t, n, c):
    """The packed member of tile i_t of all, and its spans."""
    _, i_m = tile_of(i_t, n, c.HEADS, c.HAS_RIGHT)
    i_b, _ = find_member(i_m, t.cu_seqlens_q, n.seqlen_q, n, c.BLOCK_M)
    first_q, rows, first_k, live = spans(i_b, t, n)
    return i_b, first_q, rows, first_k, live


@gluon.jit
def tile_in(i_m, member, c):
    """Number of a plane's tile i_m among those of its member: see `find_member`."""
    return i_m - (member[1] // c.BLOCK_M + member[0])


@gluon.jit
def place_of(i_bh, i_m, t, n, c):
    """Place of row tile i_m of a plane."""
    i_b = i_bh // n.num_heads
    if c.PACKED:
        i_b, i_m = find_member(i_m, t.cu_seqlens_q, n.seqlen_q, n, c.BLOCK_M)
    return stand(i_b, i_m, i_m * c.BLOCK_M, t, n, c)


@gluon.jit
def place_in(i_m, member, t, n, c):
    """The same of a tile whose member is known."""
    i_m = tile_in(i_m, member, c)
    i_b, first_q, rows, first_k, live = member
    return stand_in(i_b, i_m, i_m * c.BLOCK_M, (first_q, rows, first_k, live), t, n, c)


@gluon.jit
def stand(i_b, i_m, i_row, t, n, c):
    """Place of request i_b's tile i_m, whose first row is i_row."""
    found = spans(i_b, t, n) if c.PACKED else (0, n.seqlen_q, 0, n.seqlen_k)
    return stand_in(i_b, i_m, i_row, found, t, n, c)


@gluon.jit
def stand_in(i_b, i_m, i_row, found, t, n, c):
    """The same of a request with these spans. With OWN rows stand at an offset of their request's, or end
    where its keys do."""
    first_q, rows, first_k, live = found
    start, high = 0, n.offset
    low = n.left if c.HAS_LEFT else 0
    at, rest = n.position if c.ALIBI else 0, n.rest if c.ALIBI else 0.0
    if t.kv_lens is not None:
        live = min(max(load_own(t.kv_lens + i_b, i_b, n, c), 0), live)
    if t.kv_starts is not None:
        start = min(max(load_own(t.kv_starts + i_b, i_b, n, c), 0), live)
    if c.OWN:
        position = gl.cast(live - rows, gl.int64)
        if t.q_offset is not None:
            position = gl.cast(load_own(t.q_offset + i_b, i_b, n, c), gl.int64)
        low, high = band(position, live, n, c)
        low, high = gl.cast(low, gl.int32), gl.cast(high, gl.int32)
        near = min(max(position, -n.seqlen_q), n.seqlen_k)
        at, rest = gl.cast(near, gl.int32), gl.cast(position - near, gl.float32)
    if c.PACKED:  # noqa: SIM102  a branch of the compiler, then one of the kernel
        if i_row >= rows:  # a tile without rows
            live = 0
    return Place(i_b, i_m, first_q, first_k, rows, live, start, low, high, at, rest)


@gluon.jit
def rows_seen(o_row, p_marks, i_h, place, t, n, c, MENDING: gl.constexpr):
    """Limits of what the rows of a tile see, and which of them are far."""
    col = gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(0, accumulator(c.BLOCK_N)))
    limit = o_row * 0 + place.live
    if c.HAS_RIGHT:
        limit = gl.minimum(limit, o_row + place.high + 1)
    if c.PACKED:
        limit = gl.where(o_row < place.rows, limit, 0)
    first = o_row * 0
    if c.BELOW:
        first += place.start
    if c.HAS_LEFT:
        first = gl.maximum(first, o_row + place.low)
    far = o_row < 0
    if MENDING:
        far = (gl.load(p_marks).to(gl.int32) & FAR) != 0
    at, slope = o_row + place.position, 0.0
    if c.ALIBI:
        i_own = place.i_b.to(gl.int64) * t.slopes.b
        slope = load_own(t.slopes.p + i_h * t.slopes.h + i_own, place.i_b, n, c).to(gl.float32)
    return Seen(col, first, limit, far, at, place.rest, slope)


@gluon.jit
def apply_mask(b_s, seen, j_0, c, ENDS: gl.constexpr):
    """-inf at keys that a row does not see, whatever was there, at these ends of what it sees."""
    if ENDS == BOTH:
        b_s = keep_where(b_s, seen.limit - j_0, "gt")
    if c.BELOW:
        b_s = keep_where(b_s, seen.first - 1 - j_0, "lt")
    return b_s


@gluon.jit
def store_rows(x, i_h, i_row, b_out, count, c, FROM: gl.constexpr):
    """Writes the first `count` of 64 packed rows alone, channels behind FROM."""
    o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, b_out.type.layout))[:, None]
    o_d = FROM + gl.arange(0, b_out.shape[1], layout=gl.SliceLayout(0, b_out.type.layout))[None, :]
    p = x.p + i_h.to(gl.int64) * x.h + (i_row + o_r).to(gl.int64) * x.s
    gl.store(p + o_d, b_out, mask=(o_r < count) & (o_d < c.CHANNELS))
