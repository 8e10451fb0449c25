"""Places of tiles: their request, its rows and keys, which of them meet, and how to load and store them.

A tile is BLOCK_M packed rows against BLOCK_N keys. With PACK the query heads of one key/value head are rows
of one tile, the head the faster: packed row r is row r // group of head r % group.

Kernels take `t`, tensors and what else is compiled in, `n`, the numbers of a call, and `c`, constants.
Two blocks of channels are WIDTH0 and WIDTH1 wide (0: none); a block of BLOCK_D begins at channel FIRST.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from polyflash.backends.triton import interpreter

interpreter.prepare()


class Place(NamedTuple):
    """A request, and where it lies in the tensors."""

    i_b: Any
    i_batch: Any  # its index into the tensors' batch
    first_q: Any  # its first row and first key there
    first_k: Any
    rows: Any  # that it has
    start: Any  # its first live key, and the end of them
    live: Any
    position: Any  # of its row 0, int64


class Band(NamedTuple):
    """Row i sees keys [i + lo, i + hi), as far as order and distance go."""

    lo: Any
    hi: Any


class Rows(NamedTuple):
    """The rows of a tile: their key/value head, number and query head, and the keys [o_lo, o_hi) of each."""

    i_hkv: Any
    i_plane: Any  # of head 0 of the request
    o_i: Any
    o_h: Any
    o_lo: Any
    o_hi: Any
    m_row: Any  # which are rows


class Keys(NamedTuple):
    """The keys of a block from j_0 on, and which of them are there."""

    j_0: Any
    o_n: Any
    m_n: Any


class Blocks(NamedTuple):
    """Blocks [lo, hi), of which [full_lo, full_hi) hide nothing."""

    lo: Any
    hi: Any
    full_lo: Any
    full_hi: Any


@triton.jit
def find_member(i_t, cu_seqlens_q, members, seqlen_q, group, BLOCK_M: tl.constexpr):
    """Finds the packed member tile i_t belongs to, and which of its tiles it is. Member b has room for its
    tiles from cu[b]·group // BLOCK_M + b on; what lies behind the last member counts as one more."""
    lo, hi = 0, members
    while lo < hi:
        middle = (lo + hi + 1) // 2
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + middle), 0), seqlen_q)
        if first * group // BLOCK_M + middle <= i_t:
            lo = middle
        else:
            hi = middle - 1
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + lo), 0), seqlen_q)
    return lo, i_t - (first * group // BLOCK_M + lo)


@triton.jit
def span(cu_seqlens, i_b, members, total):
    """First position and length of a member; bounds that fall or leave the tensor make it shorter."""
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_b), 0), total)
    end = total
    if i_b < members:
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_b + 1), first), total)
    return first, end - first


@triton.jit
def stand(i_b, i_batch, x, n, c):
    """The place of request i_b."""
    first_q, first_k, start = 0, 0, 0
    rows, live = n.seqlen_q, n.seqlen_k
    if x.cu_seqlens_q is not None:
        first_q, rows = span(x.cu_seqlens_q, i_b, n.batch, n.seqlen_q)
        if x.page_table is None:
            first_k, live = span(x.cu_seqlens_k, i_b, n.batch, n.seqlen_k)
            live = tl.where(i_b < n.batch, live, 0)
    owned = i_b < n.batch
    if x.kv_lens is not None:
        live = tl.minimum(tl.maximum(tl.load(x.kv_lens + i_b, mask=owned, other=0), 0), live)
    elif x.cu_seqlens_q is not None:
        live = tl.where(owned, live, 0)
    if x.kv_starts is not None:
        start = tl.maximum(tl.load(x.kv_starts + i_b, mask=owned, other=0), 0)
    if x.q_offset is not None:
        position = tl.load(x.q_offset + i_b, mask=owned, other=0).to(tl.int64)
    elif c.HAS_OFFSET:
        position = tl.cast(n.offset, tl.int64)
    else:
        position = tl.cast(live - rows, tl.int64)
    return Place(i_b, i_batch, first_q, first_k, rows, start, live, position)


@triton.jit
def unravel(i_t, num_tiles, num_heads):
    """Tile, head and request of program i_t; tiles are the fastest."""
    i_bh = i_t // num_tiles
    return i_t % num_tiles, i_bh % num_heads, i_bh // num_heads


@triton.jit
def find_rows(i_m, i_b, t, n, c):
    """The number of tile i_m of rows in its request, and the request's place."""
    if c.HEAVY_FIRST:
        i_m = n.num_tiles - 1 - i_m
    i_batch = i_b
    if t.x.cu_seqlens_q is not None:
        G = t.group if c.PACK else 1
        i_b, i_m = find_member(i_m, t.x.cu_seqlens_q, n.batch, n.seqlen_q, G, c.BLOCK_M)
        i_batch = i_b * 0
    return i_m, stand(i_b, i_batch, t.x, n, c)


@triton.jit
def find_keys(i_n, i_b, t, n, c):
    """The number of tile i_n of keys in its request, how many keys that has, live or not, and its place."""
    i_batch, keys = i_b, n.seqlen_k
    if t.x.cu_seqlens_k is not None:
        i_b, i_n = find_member(i_n, t.x.cu_seqlens_k, n.batch, n.seqlen_k, 1, c.BLOCK_N)
        i_batch = i_b * 0
        _, keys = span(t.x.cu_seqlens_k, i_b, n.batch, n.seqlen_k)
    return i_n, keys, stand(i_b, i_batch, t.x, n, c)


@triton.jit
def find_band(place, n, c):
    """The band that causal order and the window leave a request's rows. Both ends fit int32."""
    lo, hi = place.position * 0 - place.rows, place.position * 0 + place.live
    if c.HAS_LEFT:
        lo = tl.minimum(tl.maximum(place.position - n.left, -place.rows), place.live)
    if c.HAS_RIGHT:
        hi = tl.minimum(tl.maximum(place.position + n.right + 1, -place.rows), place.live)
    return Band(tl.cast(lo, tl.int32), tl.cast(hi, tl.int32))


@triton.jit
def packed_rows(i_m, group, BLOCK_M: tl.constexpr, PACK: tl.constexpr):
    """Row and head of the group of every row of a tile."""
    o_r = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACK:
        return o_r // group, o_r % group
    else:
        return o_r, o_r * 0


@triton.jit
def row_limits(o_i, x, place, band):
    """First and end key of each row; a row that is none ends at key 0, so it sees none."""
    # [BLOCK_M]
    o_lo = tl.maximum(o_i + band.lo, place.start)
    o_hi = tl.minimum(o_i + band.hi, place.live)
    m_row = o_i < place.rows
    if x.row_bounds is not None:
        p = x.row_bounds.p + o_i.to(tl.int64) * x.row_bounds.s
        o_lo = tl.maximum(o_lo, tl.load(p, mask=m_row, other=0))
        o_hi = tl.minimum(o_hi, tl.load(p + x.row_bounds.e, mask=m_row, other=0))
    return o_lo, tl.where(m_row, tl.maximum(o_hi, o_lo), 0)


@triton.jit
def block_range(i_m, o_i, o_lo, o_hi, place, band, t, c):
    """Key blocks that some row of tile i_m visits, full where every row sees them whole. Only bounds of
    single rows need a look at every one."""
    G = t.group if c.PACK else 1
    i_first = i_m * c.BLOCK_M // G
    i_last = tl.minimum((i_m * c.BLOCK_M + c.BLOCK_M - 1) // G, place.rows - 1)
    start, live = place.start, place.live
    if t.x.row_bounds is not None:
        some = o_lo < o_hi
        lo = tl.min(tl.where(some, o_lo, live))
        hi = tl.max(tl.where(some, o_hi, 0))
        # rows that are none must not narrow what is whole, those that see nothing must
        all_lo = tl.max(tl.where(o_i < place.rows, o_lo, 0))
        all_hi = tl.min(tl.where(o_i < place.rows, o_hi, live))
    else:
        lo, hi = tl.maximum(i_first + band.lo, start), tl.minimum(i_last + band.hi, live)
        all_lo, all_hi = tl.maximum(i_last + band.lo, start), tl.minimum(i_first + band.hi, live)
    lo = tl.maximum(lo, 0)
    hi = tl.maximum(hi, lo)
    n_lo, n_hi = lo // c.BLOCK_N, (hi + c.BLOCK_N - 1) // c.BLOCK_N
    n_hi = tl.where(hi > lo, n_hi, n_lo)
    full_lo = (tl.maximum(all_lo, lo) + c.BLOCK_N - 1) // c.BLOCK_N
    full_hi = tl.maximum(tl.minimum(all_hi, hi), 0) // c.BLOCK_N
    full_lo = tl.minimum(tl.maximum(full_lo, n_lo), n_hi)
    return Blocks(n_lo, n_hi, full_lo, tl.minimum(tl.maximum(full_hi, full_lo), n_hi))


@triton.jit
def row_range(j_0, place, band, t, c):
    """Row blocks of which some row sees a key of the block at j_0, full where every row sees it whole: the
    inverse of `block_range`."""
    first, end = tl.maximum(j_0, place.start), tl.minimum(j_0 + c.BLOCK_N, place.live)
    i_lo = tl.maximum(first - band.hi + 1, 0)
    i_hi = tl.minimum(end - band.lo, place.rows)
    i_hi = tl.where(end > first, tl.maximum(i_hi, i_lo), i_lo)
    whole = (j_0 >= place.start) & (j_0 + c.BLOCK_N <= place.live)
    all_lo = tl.where(whole, tl.maximum(j_0 + c.BLOCK_N - band.hi, i_lo), i_lo)
    all_hi = tl.where(whole, tl.minimum(j_0 - band.lo + 1, i_hi), i_lo)
    G = t.group if c.PACK else 1
    m_lo = i_lo * G // c.BLOCK_M
    m_hi = tl.where(i_hi > i_lo, (i_hi * G + c.BLOCK_M - 1) // c.BLOCK_M, m_lo)
    full_lo = tl.where(whole, tl.minimum((all_lo * G + c.BLOCK_M - 1) // c.BLOCK_M, m_hi), m_lo)
    full_hi = tl.maximum(all_hi, 0) * G // c.BLOCK_M
    return Blocks(m_lo, m_hi, full_lo, tl.minimum(tl.maximum(full_hi, full_lo), m_hi))


@triton.jit
def tile_rows(i_m, i_head, place, t, n, c):
    """The rows of tile i_m, and the key blocks that they visit. `i_head` counts key/value heads with PACK,
    query heads without."""
    o_i, o_g = packed_rows(i_m, t.group, c.BLOCK_M, c.PACK)
    i_hkv = i_head if c.PACK else i_head // t.group
    o_h = i_head * t.group + o_g if c.PACK else i_head + o_g
    band = find_band(place, n, c)
    o_lo, o_hi = row_limits(o_i, t.x, place, band)
    blocks = block_range(i_m, o_i, o_lo, o_hi, place, band, t, c)
    i_plane = place.i_b * (t.num_heads * t.group if c.PACK else t.num_heads)
    return Rows(i_hkv, i_plane, o_i, o_h, o_lo, o_hi, o_i < place.rows), blocks


@triton.jit
def row_offsets(x, i_b, i_h, o_r):
    """Element offsets of rows o_r of one head, int64."""
    return tl.cast(i_b, tl.int64) * x.b + tl.cast(i_h, tl.int64) * x.h + o_r.to(tl.int64) * x.s


@triton.jit
def head_offsets(x, i_b, o_h, o_row):
    """Element offsets of rows that belong to heads of their own, int64."""
    return tl.cast(i_b, tl.int64) * x.b + o_h.to(tl.int64) * x.h + o_row.to(tl.int64) * x.s


@triton.jit
def narrowed(rows, place, t, n, c):
    """The place with only the keys that its one row sees."""
    if t.x.row_bounds is None:
        band = find_band(place, n, c)
        start = tl.maximum(band.lo, place.start)
        live = tl.where(place.rows > 0, tl.minimum(band.hi, place.live), 0)
    else:
        start = tl.min(tl.where(rows.m_row, rows.o_lo, place.live), 0)
        live = tl.max(rows.o_hi, 0)
    x = place
    return Place(x.i_b, x.i_batch, x.first_q, x.first_k, x.rows, start, live, x.position)


@triton.jit
def key_offsets(o_n, k, x, i_hkv, place, PAGE: tl.constexpr = 0):
    """Element offsets of keys o_n of one key/value head, int64, and which of them are there. PAGE: keys of a
    page, if that is compiled in."""
    m_n = o_n < place.live
    if x.page_table is None:
        o_k = row_offsets(k, place.i_batch, i_hkv, place.first_k + o_n)
    else:
        table, size = x.page_table, PAGE if PAGE > 0 else x.page_table.size
        p = table.p + tl.cast(place.i_b, tl.int64) * table.b + (o_n // size) * table.c
        o_page = tl.load(p, mask=m_n, other=0)
        m_n = m_n & (o_page >= 0) & (o_page < table.pages)
        o_page = tl.where(m_n, o_page, 0).to(tl.int64)
        o_k = o_page * k.b + tl.cast(i_hkv, tl.int64) * k.h + (o_n % size).to(tl.int64) * k.s
    return o_k, m_n


@triton.jit
def block_offsets(j_0, k, x, i_hkv, place, c):
    """`key_offsets` of the block from key j_0 on. One that lies in a page asks the table once."""
    o_n = j_0 + tl.arange(0, c.BLOCK_N)
    if c.PAGE > 0 and c.PAGE % c.BLOCK_N == 0:
        table = x.page_table
        i_page = tl.load(table.p + tl.cast(place.i_b, tl.int64) * table.b + (j_0 // c.PAGE) * table.c)
        is_page = (i_page >= 0) & (i_page < table.pages)
        i_page = tl.where(is_page, i_page, 0).to(tl.int64)
        o_k = i_page * k.b + tl.cast(i_hkv, tl.int64) * k.h + (o_n % c.PAGE).to(tl.int64) * k.s
        return o_k, (o_n < place.live) & is_page
    else:
        return key_offsets(o_n, k, x, i_hkv, place, c.PAGE)


@triton.jit
def table_rows(o_n, table, TOKENS: tl.constexpr, rows, place, t, c):
    """Element offsets of the entries of keys o_n in a table of scales or shifts, int64; of TOKENS = 0 all
    have the same."""
    if t.x.page_table is None:
        i_b, o_t = tl.cast(place.i_batch, tl.int64) + o_n * 0, place.first_k + o_n
    else:
        pages, size = t.x.page_table, c.PAGE if c.PAGE > 0 else t.x.page_table.size
        p = pages.p + tl.cast(place.i_b, tl.int64) * pages.b + (o_n // size) * pages.c
        i_b, o_t = tl.load(p, mask=o_n < place.live, other=0), o_n % size
        i_b = tl.where((i_b >= 0) & (i_b < pages.pages), i_b, 0).to(tl.int64)
    o_table = i_b * table.b + tl.cast(rows.i_hkv, tl.int64) * table.h
    if TOKENS > 0:
        o_table += (o_t // TOKENS).to(tl.int64) * table.s
    return o_table


@triton.jit
def of_keys(keys, table, TOKENS: tl.constexpr, rows, place, t, c):
    """The entry of each key of a block."""
    o_table = table_rows(keys.o_n, table, TOKENS, rows, place, t, c)
    return tl.load(table.p + o_table, mask=keys.m_n, other=0.0)


@triton.jit
def load_tile(
    x,
    o_r,
    m_r,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CACHE: tl.constexpr,
    ALIGNED: tl.constexpr = 1,
):
    """Channels [FIRST, FIRST + BLOCK_D) of rows at offsets o_r; 0 where m_r says no and beyond DIM. ALIGNED
    divides the offsets: Triton itself sees 16 or nothing, and loads rows of 40 elements one by one."""
    o_d = FIRST + tl.arange(0, BLOCK_D)
    m = m_r[:, None]
    if FIRST + BLOCK_D > DIM:
        m = m & (o_d < DIM)[None, :]
    o_x = o_r[:, None]
    if ALIGNED > 1:
        o_x = tl.multiple_of(o_x, [ALIGNED, ALIGNED])
    # [rows, BLOCK_D]
    return tl.load(x.p + o_x + o_d[None, :] * x.d, mask=m, other=0.0, cache_modifier=CACHE)


@triton.jit
def load_pair(x, o_r, m_r, DIM: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, c):
    """Both channel blocks of rows, the first twice if there is no other."""
    b_0 = load_tile(x, o_r, m_r, 0, DIM, WIDTH0, "", c.ALIGNED)
    b_1 = load_tile(x, o_r, m_r, WIDTH0, DIM, WIDTH1, "", c.ALIGNED) if WIDTH1 > 0 else b_0
    return b_0, b_1


@triton.jit
def load_turned(
    x,
    o_r,
    m_r,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CACHE: tl.constexpr,
    ALIGNED: tl.constexpr = 1,
):
    """A tile as [BLOCK_D, rows]."""
    o_d = FIRST + tl.arange(0, BLOCK_D)
    m = m_r[None, :]
    if FIRST + BLOCK_D > DIM:
        m = m & (o_d < DIM)[:, None]
    o_x = o_r[None, :]
    if ALIGNED > 1:
        o_x = tl.multiple_of(o_x, [ALIGNED, ALIGNED])
    return tl.load(x.p + o_x + o_d[:, None] * x.d, mask=m, other=0.0, cache_modifier=CACHE)


@triton.jit
def store_tile(x, o_r, m_r, b_x, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes a [rows, BLOCK_D] tile in the dtype of its tensor."""
    o_d = FIRST + tl.arange(0, BLOCK_D)
    m = m_r[:, None]
    if FIRST + BLOCK_D > DIM:
        m = m & (o_d < DIM)[None, :]
    tl.store(x.p + o_r[:, None] + o_d[None, :] * x.d, b_x.to(x.p.dtype.element_ty), mask=m)


@triton.jit
def store_pair(x, o_r, m_r, b_0, b_1, DIM: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr):
    """Both channel blocks of rows."""
    store_tile(x, o_r, m_r, b_0, 0, DIM, WIDTH0)
    if WIDTH1 > 0:
        store_tile(x, o_r, m_r, b_1, WIDTH0, DIM, WIDTH1)
