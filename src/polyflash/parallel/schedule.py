"""Context parallelism on paper: who holds which rows, and which of them each rank needs of the others.

A sequence of N rows is cut into n chunks, chunk i being rows [i·N // n, (i + 1)·N // n). "contiguous" gives
rank r of W chunk r of W; "zigzag" gives it chunks r and 2W - 1 - r of 2W, so that every rank has the same
work under a causal mask. Of packed members "zigzag" cuts as few as balance the ranks, the longest ones, and
of two ranks a single one into one part each where that does; all others are an early chunk that is whole. A
rank holds the chunks of one member and then those of the next. A call is W steps: in step t rank r reads keys
of rank r - t, which it asked for one step earlier. Keys that no row sees are in no step: they are neither
sent nor computed with.

Source: Liu et al., Ring Attention with Blockwise Transformers (2023); Brandon et al., Striped Attention
(2023); the zigzag order of zhuzilin's ring-flash-attention (2024)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from polyflash.mask import visible_pairs

ORDERS = ("zigzag", "contiguous")
Span = tuple[int, int]  # [start, end)
_NONE: Span = (0, 0)
MOST_WORK = 1.02  # of the busiest rank beside the mean, where packed members are dealt
ONE_MORE = 0.99  # of it, for which one more member may be cut
TILE = 128  # keys that a kernel takes at a time
TWO_PARTS = 8, 9, 7, 10, 6, 11, 5, 12, 4, 13, 3, 14, 2  # sixteenths of a member that one of two ranks has


class Chunk(NamedTuple):
    """Neighbouring rows of every member: `starts` and `ends` are positions in the member, `first` is where
    they begin in the shard, or in what is sent of it; int64 (members,)."""

    starts: np.ndarray
    ends: np.ndarray
    first: np.ndarray

    @property
    def lens(self) -> np.ndarray:
        return self.ends - self.starts

    @property
    def span(self) -> Span:
        """From the first row to the last; of packed members those of others may lie between."""
        known = _spans.get(id(self))
        if known is None:
            held, span = self.lens > 0, _NONE
            if held.any():
                span = int(self.first[held].min()), int((self.first + self.lens)[held].max())
            if len(_spans) >= _KEPT_SPANS:
                _spans.clear()
            known = _spans[id(self)] = self, span
        return known[1]


_KEPT_SPANS = 4096
_spans: dict[int, tuple[Chunk, Span]] = {}  # every layer of a model asks; what is kept has one id


@dataclass(frozen=True, eq=False)
class Runs:
    """Rows [start, end) of a shard, run for run as they are sent, int64; neighbours are one run."""

    starts: np.ndarray
    ends: np.ndarray

    @cached_property
    def rows(self) -> int:
        """How many there are."""
        return int((self.ends - self.starts).sum())

    @cached_property
    def first(self) -> int:
        """The first of them."""
        return int(self.starts[0]) if len(self.starts) else 0

    @cached_property
    def slice(self) -> slice | None:
        """The rows, if they are one run or none."""
        if len(self.starts) > 1:
            return None
        return slice(self.first, self.first + self.rows)


@dataclass(frozen=True)
class Shards:
    """A sequence, or packed members, of `lengths` rows in `count` shards, each of them held in `pieces` by as
    many ranks: rank r holds piece r % pieces of shard r // pieces."""

    lengths: tuple[int, ...]
    count: int
    order: str = "zigzag"
    pieces: int = 1

    @property
    def rows(self) -> int:
        """Rows of all ranks."""
        return sum(self.lengths)

    def chunks(self, shard: int) -> tuple[Chunk, ...]:
        """The chunks of a shard in the order in which its rows stand."""
        return _chunks(self, shard)

    def held(self, rank: int) -> int:
        """How many rows a rank holds."""
        start, end = self._piece(rank, _held(self, rank // self.pieces))
        return end - start

    def _piece(self, rank: int, whole: int) -> Span:
        i = rank % self.pieces
        return i * whole // self.pieces, (i + 1) * whole // self.pieces

    def positions(self, rank: int) -> np.ndarray:
        """The number of each row of a rank among all rows, int64."""
        bases, chunks = np.cumsum((0, *self.lengths))[:-1], self.chunks(rank // self.pieces)
        rows = np.empty(sum(int(chunk.lens.sum()) for chunk in chunks), np.int64)
        for chunk in chunks:
            rows[rows_of(chunk.first, chunk.lens)] = rows_of(bases + chunk.starts, chunk.lens)
        return rows[slice(*self._piece(rank, len(rows)))]

    def natural(self) -> tuple[np.ndarray, np.ndarray]:
        """The rank of each of all rows, and its place there, int64."""
        ranks = range(self.count * self.pieces)
        rows = [self.positions(rank) for rank in ranks]
        order = np.argsort(np.concatenate(rows))
        who = np.repeat(np.arange(len(ranks)), [len(x) for x in rows])
        return who[order], np.concatenate([np.arange(len(x)) for x in rows])[order]


@lru_cache(maxsize=1024)
def _chunks(shards: Shards, shard: int) -> tuple[Chunk, ...]:
    held = [shard, 2 * shards.count - 1 - shard]
    if shards.order == "contiguous" or shards.count == 1:
        held = [shard]
    cuts = _cuts(shards.lengths, shards.count, shards.order)
    own = sum(cuts[i + 1] - cuts[i] for i in held)
    chunks, first = [], np.cumsum(own) - own
    for i in held:
        chunks.append(Chunk(cuts[i], cuts[i + 1], first))
        first = first + cuts[i + 1] - cuts[i]
    return tuple(chunks)


@lru_cache(maxsize=1024)
def _held(shards: Shards, shard: int) -> int:
    return sum(int(chunk.lens.sum()) for chunk in _chunks(shards, shard))


@lru_cache(maxsize=64)
def _cuts(lengths: tuple[int, ...], count: int, order: str) -> np.ndarray:
    """The first row of each chunk of every member, and the end of the last, int64 (chunks + 1, members)."""
    sizes = np.array(lengths, np.int64)
    n = count if order == "contiguous" or count == 1 else 2 * count
    even: np.ndarray = np.arange(n + 1)[:, None] * sizes // n
    if n == count or np.count_nonzero(sizes) < 2:
        return even
    by_length, best, least, halves = np.argsort(-sizes, kind="stable"), even, np.inf, even
    longest = int(by_length[0])
    for given, cut in _tries(even, longest, count):
        cuts, busiest = _dealt(given, by_length, cut, count)
        if busiest < least:
            best, least, halves = cuts, busiest, given
        if least <= MOST_WORK * (sizes.astype(np.float64) ** 2).sum() / count:
            break
    for given in _finer(halves, longest) if halves is not even else ():
        cuts, busiest = _dealt(given, by_length, 1, count)
        if busiest < (least if _times_cut(cuts) <= _times_cut(best) else ONE_MORE * least):
            best, least = cuts, busiest
    return best


def _times_cut(cuts: np.ndarray) -> int:
    """Members that several chunks have rows of."""
    return int(((np.diff(cuts, axis=0) > 0).sum(0) > 1).sum())


def _tries(even: np.ndarray, longest: int, count: int) -> Iterator[tuple[np.ndarray, int]]:
    """Chunks of the longest members, and how many of these are cut: none; of two ranks the longest one, its
    first rows going to one of them and all others to the other; 1, 2, 4, ... of them, into even chunks."""
    yield even, 0
    rows = int(even[-1, longest])
    for share in TWO_PARTS if count == 2 else ():
        yield from ((parts, 1) for parts in _two_parts(even, longest, rows * share // 16))
    members = even.shape[1]
    yield from ((even, cut) for cut in (*(1 << i for i in range(members.bit_length())), members))


def _two_parts(even: np.ndarray, longest: int, first: int) -> list[np.ndarray]:
    """Chunks of which the longest member's are so many rows and all others, if a rank can hold such."""
    parts, rows = even.copy(), even[-1, longest]
    parts[1:, longest] = first, rows, rows, rows
    return [parts] if 2 * max(first, rows - first) <= even[-1].sum() else []


def _finer(parts: np.ndarray, longest: int) -> Iterator[np.ndarray]:
    """The same with a little more or less in the first part, in whole tiles of keys."""
    first, rows = (int(parts[i, longest]) for i in (1, -1))
    for turn in (-1, 1, -2, 2, -3, 3, -4, 4):
        if 0 < (near := first + turn * max(TILE, rows // (64 * TILE) * TILE)) < rows:
            yield from _two_parts(parts, longest, near)


def _dealt(given: np.ndarray, by_length: np.ndarray, cut: int, count: int) -> tuple[np.ndarray, float]:
    """Chunks of which the `cut` longest members have given ones, while each other member is the early chunk
    of the rank with the least causal work among those with room for it, and where none has, those of several
    ranks; and the work of the busiest rank, in squares of rows."""
    cuts, sizes = given.copy(), given[-1]
    work, held = np.zeros(count), np.zeros(count, np.int64)
    for rank in range(count):
        for i in (rank, 2 * count - 1 - rank):
            start, end = given[i, by_length[:cut]].astype(np.float64), given[i + 1, by_length[:cut]]
            work[rank] += (end**2.0 - start**2).sum()
            held[rank] += int((end - start).sum())
    room = (np.arange(count) + int(sizes.sum())) // count - held
    for member in by_length[cut:]:
        left = int(sizes[member])
        fits = np.flatnonzero(room >= left)
        ranks = fits[np.argmin(work[fits])][None] if len(fits) else np.argsort(-room, kind="stable")
        taken = np.zeros(count, np.int64)
        for rank in ranks:
            taken[rank] = min(left, max(0, room[rank]))
            left -= taken[rank]
        ends = np.cumsum(taken)
        work += ends.astype(np.float64) ** 2 - (ends - taken).astype(np.float64) ** 2
        room -= taken
        cuts[1 : count + 1, member], cuts[count + 1 :, member] = ends, sizes[member]
    return cuts, float(work.max())


@dataclass(frozen=True, eq=False)
class Segments:
    """Ids of all rows and keys, int (batch, rows) and (batch, keys): those with the same see each other."""

    q_ids: np.ndarray
    k_ids: np.ndarray


@dataclass(frozen=True, eq=False)
class Lists:
    """From which key on, up to which one, the rows of each block of rows see some, int64 (row blocks,)."""

    first: np.ndarray
    end: np.ndarray


class Sight(NamedTuple):
    """Knowledge of the host about who sees whom: a row at position p sees keys [p - left, p + right] of its
    member, None being all. Row i of member m stands at i + offsets[m]; None if only the device knows."""

    left: int | None = None
    right: int | None = None  # 0 under a causal mask
    offsets: tuple[int, ...] | None = (0,)
    segments: Segments | None = None
    joins: bool = True  # may blocks that are seen entirely be joined: does nothing else follow positions?
    lists: Lists | None = None
    list_rows: int = 0  # of a row block


class Block(NamedTuple):
    """Rows and keys of which some see each other: chunks of q and of k, cut down to those that may. `full`:
    every row sees every key, by order and distance."""

    q: Chunk
    k: Chunk
    full: bool

    @property
    def places(self) -> tuple[slice, slice]:
        """Positions of the rows and of the keys of the one member."""
        return slice(int(self.q.starts[0]), int(self.q.ends[0])), slice(
            int(self.k.starts[0]), int(self.k.ends[0])
        )

    @property
    def pairs(self) -> int:
        return int((self.q.lens * self.k.lens).sum())


class Step(NamedTuple):
    """Work of a rank at one time: the keys of `owner` that it reads, and for which rows, blocks counting keys
    within these; and which of its own keys `reader` reads of it in the same step."""

    owner: int
    keys: Runs
    blocks: tuple[Block, ...]
    reader: int
    lent: Runs


@lru_cache(maxsize=128)
def steps(q: Shards, k: Shards, rank: int, sight: Sight) -> tuple[Step, ...]:
    """The steps of a rank, its own keys first: these where they are, without gaps; of others, those that are
    seen."""
    made = []
    for t in range(q.count):
        owner, reader = (rank - t) % q.count, (rank + t) % q.count
        own = blocks(q, k, rank, owner, sight)
        keys, first = _sent(own) if t else _hull(own)
        moved = [b._replace(k=b.k._replace(first=b.k.first - first)) for b in own]
        lent = _sent(blocks(q, k, reader, rank, sight))[0] if t else keys
        made.append(Step(owner, keys, tuple(moved), reader, lent))
    return tuple(made)


def _hull(found: tuple[Block, ...]) -> tuple[Runs, np.ndarray]:
    """From the first key that a block reads to the last, and how far they move towards its begin."""
    if not found:
        none = np.zeros(0, np.int64)
        return Runs(none, none), none
    starts, ends = zip(*(block.k.span for block in found), strict=True)
    first = np.array([min(starts)])
    return Runs(first, np.array([max(ends)])), first


def _sent(found: tuple[Block, ...]) -> tuple[Runs, np.ndarray]:
    """The keys that blocks read, of each member from the first to the last, and how far those of each move
    when these follow one another."""
    if not found:
        return _hull(found)
    far = np.iinfo(np.int64).max
    chunks = [block.k for block in found]
    start = np.min([np.where(x.lens > 0, x.first, far) for x in chunks], axis=0)
    end = np.max([np.where(x.lens > 0, x.first + x.lens, 0) for x in chunks], axis=0)
    read = start < end
    start, end = np.where(read, start, 0), np.where(read, end, 0)
    moves = start - (np.cumsum(end - start) - (end - start))
    start, end = start[read], end[read]
    apart = start[1:] != end[:-1]
    return Runs(start[np.concatenate(([True], apart))], end[np.concatenate((apart, [True]))]), moves


def rows_of(first: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """first, first + 1, ... of each run of so many rows, one run behind the other, int64."""
    return np.repeat(first - (np.cumsum(lens) - lens), lens) + np.arange(int(lens.sum()))


@lru_cache(maxsize=1024)
def blocks(q: Shards, k: Shards, q_shard: int, k_shard: int, sight: Sight) -> tuple[Block, ...]:
    """Blocks of keys that the rows of a shard see of the keys of another."""
    return blocks_of(product(q.chunks(q_shard), k.chunks(k_shard)), sight)


def blocks_of(pairs: Iterable[tuple[Chunk, Chunk]], sight: Sight) -> tuple[Block, ...]:
    """Chunks of rows and of keys as blocks, as few as can be."""
    joined: list[Block] = []
    for block in (_block(a, b, sight) for a, b in pairs):
        while (
            sight.joins
            and block is not None
            and joined
            and (one := _joined(joined[-1], block, sight)) is not None
        ):
            joined.pop()
            block = one
        if block is not None:
            joined.append(block)
    return tuple(joined)


def _joined(a: Block, b: Block, sight: Sight) -> Block | None:
    """Two blocks as one, where the rows or keys of each member stand side by side in the shard. Between rows
    and keys that all see each other positions do not matter, so the first keys or rows take those in front of
    the others, which follow them under no other bound than a right one."""
    if not (sight.left is None or (a.full and b.full)):
        return None
    alone, fits, full = (
        (a.q.lens == 0) | (b.q.lens == 0),
        _follows(a.q, b.q) & (a.k.first == b.k.first),
        b.full,
    )
    rows, keys = Chunk(b.q.starts - a.q.lens, b.q.ends, a.q.first), b.k
    if a.full and (alone | (a.q.first == b.q.first) & (a.q.lens == b.q.lens) & _follows(a.k, b.k)).all():
        rows, keys = b.q, Chunk(b.k.starts - a.k.lens, b.k.ends, a.k.first)
        fits = ~alone
    elif a.full and b.full:
        fits &= a.k.lens == b.k.lens
    elif a.full or b.full or sight.right is None or sight.offsets is None:
        return None
    else:
        beyond = a.q.ends + np.array(sight.offsets, np.int64) + sight.right > a.k.ends
        fits &= ~beyond  # rows of `a` see none of the other keys
        fits &= rows.starts - keys.starts == a.q.starts - a.k.starts
    if not (alone | fits).all():
        return None
    return Block(_either(rows, a.q, b.q), _either(keys, a.k, b.k), full)


def _follows(a: Chunk, b: Chunk) -> np.ndarray:
    """Does `b` begin where `a` ends, bool (members,)?"""
    follows: np.ndarray = a.first + a.lens == b.first
    return follows


def _either(both: Chunk, a: Chunk, b: Chunk) -> Chunk:
    """`both` of members that `a` and `b` have rows of, else the one that has."""
    of_a, of_b = b.lens == 0, a.lens == 0
    return Chunk(*(np.where(of_a, x, np.where(of_b, y, z)) for x, y, z in zip(a, b, both, strict=True)))


def _block(a: Chunk, b: Chunk, sight: Sight) -> Block | None:
    """Rows `a` and keys `b` cut down to those that may see each other."""
    left, right, offsets = sight[:3]
    seen, full = (a.lens > 0) & (b.lens > 0), left is None and right is None
    if not seen.any():
        return None
    if not full and offsets is not None:
        off, there = np.array(offsets, np.int64), seen
        k0 = b.starts if left is None else np.maximum(b.starts, a.starts + off - left)
        k1 = b.ends if right is None else np.minimum(b.ends, a.ends + off + right)
        q0 = a.starts if right is None else np.maximum(a.starts, b.starts - right - off)
        q1 = a.ends if left is None else np.minimum(a.ends, b.ends + left - off)
        seen = there & (k0 < k1) & (q0 < q1)
        if not seen.any():
            return None
        above = right is None or (a.starts + off + right >= b.ends - 1)[there].all()
        full = bool(above) and bool(left is None or (a.ends - 1 + off - left <= b.starts)[there].all())
        if not full:
            a, b = _cut(a, q0, q1), _cut(b, k0, k1)
    a, b = (_cut(x, x.starts, np.where(seen, x.ends, x.starts)) for x in (a, b))
    block: Block | None = Block(a, b, full)
    if sight.segments is not None:
        block = _of_segments(a, b, sight.segments)
    if block is not None and sight.lists is not None:
        block = _of_lists(block.q, block.k, sight.lists, sight.list_rows)
    return block


def _of_segments(a: Chunk, b: Chunk, segments: Segments) -> Block | None:
    """A block cut down to the rows and keys whose ids the others have."""
    rows = segments.q_ids[:, int(a.starts[0]) : int(a.ends[0])]
    keys = segments.k_ids[:, int(b.starts[0]) : int(b.ends[0])]
    seen = np.any([np.isin(x, y) for x, y in zip(keys, rows, strict=True)], axis=0)
    seeing = np.any([np.isin(x, y) for x, y in zip(rows, keys, strict=True)], axis=0)
    if not (len(rows) and seen.any()):
        return None
    (q_at,), (k_at,) = np.nonzero(seeing), np.nonzero(seen)
    a, b = (_cut(x, x.starts + at[0], x.starts + at[-1] + 1) for x, at in ((a, q_at), (b, k_at)))
    return Block(a, b, False)


def _of_lists(a: Chunk, b: Chunk, lists: Lists, rows: int) -> Block | None:
    """A block cut down to the keys from the first to the last that its rows' lists name, and to these."""
    begin = int(a.starts[0]) // rows
    first, end = (x[begin : -(-int(a.ends[0]) // rows)] for x in (lists.first, lists.end))
    (at,) = np.nonzero((first < b.ends[0]) & (end > b.starts[0]))
    if not len(at):
        return None
    q0, q1 = (begin + at[:1]) * rows, (begin + at[-1:] + 1) * rows
    a = _cut(a, np.maximum(a.starts, q0), np.minimum(a.ends, q1))
    b = _cut(b, np.maximum(b.starts, first[at].min()), np.minimum(b.ends, end[at].max()))
    return Block(a, b, False)


def _cut(chunk: Chunk, start: np.ndarray, end: np.ndarray) -> Chunk:
    """Rows [start, end) of each member of a chunk."""
    return Chunk(start, end, chunk.first + start - chunk.starts)


def covers(spans: list[Span], rows: int) -> bool:
    """Are all of so many rows in a span?"""
    end = 0
    for start, until in sorted(spans):
        if start > end:
            return False
        end = max(end, until)
    return end >= rows


def pairs_of(found: tuple[Block, ...], sight: Sight) -> int:
    """Counts the visible pairs of blocks, by order and distance; those of segments as if ids were equal."""
    total = 0
    for block in found:
        if block.full or sight.offsets is None:
            total += block.pairs
            continue
        shifts = block.q.starts - block.k.starts + np.array(sight.offsets, np.int64)
        for rows, keys, shift in zip(block.q.lens, block.k.lens, shifts, strict=True):
            window = sight.left, sight.right
            sizes = int(rows), int(keys)
            total += visible_pairs(*sizes, offset=int(shift), causal=False, window=window)
    return total


def lengths_of(bounds: list[int]) -> tuple[int, ...]:
    """Lengths of packed members, of their bounds."""
    return tuple(end - start for start, end in pairwise(bounds))
