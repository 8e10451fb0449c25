"""Context parallelism on paper: who holds which rows, and which of them each rank needs of the others.

A sequence of N rows is cut into n chunks, chunk i being rows [i·N // n, (i + 1)·N // n). "contiguous" gives
rank r of W chunk r of W; "zigzag" gives it chunks r and 2W - 1 - r of 2W, so that every rank has the same
work under a causal mask. Packed members are cut each for itself; a rank holds the first chunks of all members
and then their second ones. A call is W steps: in step t rank r reads keys of rank r - t, which it asked for
one step earlier. Keys that no row sees are in no step: they are neither sent nor computed with.

Source: Liu et al., Ring Attention with Blockwise Transformers (2023); Brandon et al., Striped Attention
(2023); the zigzag order of zhuzilin's ring-flash-attention (2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from polyflash.mask import visible_pairs

ORDERS = ("zigzag", "contiguous")
Span = tuple[int, int]  # [start, end)
_NONE: Span = (0, 0)


class Chunk(NamedTuple):
    """Neighbouring rows of every member: `starts` and `ends` are positions in the member, int64 (members,);
    `first` is where they begin in the shard."""

    starts: np.ndarray
    ends: np.ndarray
    first: int

    @property
    def lens(self) -> np.ndarray:
        return self.ends - self.starts

    @property
    def span(self) -> Span:
        return self.first, self.first + int(self.lens.sum())


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

    def chunks(self, shard: int) -> list[Chunk]:
        """The chunks of a shard in the order in which its rows stand."""
        held, n = [shard, 2 * self.count - 1 - shard], 2 * self.count
        if self.order == "contiguous" or self.count == 1:
            held, n = [shard], self.count
        chunks, first, lengths = [], 0, np.array(self.lengths, np.int64)
        for i in held:
            chunks.append(Chunk(i * lengths // n, (i + 1) * lengths // n, first))
            first = chunks[-1].span[1]
        return chunks

    def held(self, rank: int) -> int:
        """How many rows a rank holds."""
        whole = self.chunks(rank // self.pieces)[-1].span[1]
        start, end = self._piece(rank, whole)
        return end - start

    def _piece(self, rank: int, whole: int) -> Span:
        i = rank % self.pieces
        return i * whole // self.pieces, (i + 1) * whole // self.pieces

    def positions(self, rank: int) -> np.ndarray:
        """The number of each row of a rank among all rows, int64."""
        bases = np.cumsum((0, *self.lengths))[:-1]
        runs = []
        for chunk in self.chunks(rank // self.pieces):
            before = np.cumsum(chunk.lens) - chunk.lens
            runs.append(np.repeat(bases + chunk.starts - before, chunk.lens) + np.arange(chunk.lens.sum()))
        rows = np.concatenate(runs)
        return rows[slice(*self._piece(rank, len(rows)))]

    def natural(self) -> tuple[np.ndarray, np.ndarray]:
        """The rank of each of all rows, and its place there, int64."""
        ranks = range(self.count * self.pieces)
        rows = [self.positions(rank) for rank in ranks]
        order = np.argsort(np.concatenate(rows))
        who = np.repeat(np.arange(len(ranks)), [len(x) for x in rows])
        return who[order], np.concatenate([np.arange(len(x)) for x in rows])[order]


@dataclass(frozen=True, eq=False)
class Segments:
    """Ids of all rows and keys, int (batch, rows) and (batch, keys): those with the same see each other."""

    q_ids: np.ndarray
    k_ids: np.ndarray


class Sight(NamedTuple):
    """Knowledge of the host about who sees whom: a row at position p sees keys [p - left, p + right] of its
    member, None being all. Row i of member m stands at i + offsets[m]; None if only the device knows."""

    left: int | None = None
    right: int | None = None  # 0 under a causal mask
    offsets: tuple[int, ...] | None = (0,)
    segments: Segments | None = None
    joins: bool = True  # may blocks that are seen entirely be joined: does nothing else follow positions?


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
    """Work of a rank at one time: the keys [start, end) of `owner` that it reads, and for which rows; and
    which of its own keys `reader` reads of it in the same step."""

    owner: int
    keys: Span
    blocks: tuple[Block, ...]
    reader: int
    lent: Span


@lru_cache(maxsize=128)
def steps(q: Shards, k: Shards, rank: int, sight: Sight) -> tuple[Step, ...]:
    """The steps of a rank, its own keys first."""
    made = []
    for t in range(q.count):
        owner, reader = (rank - t) % q.count, (rank + t) % q.count
        own = blocks(q, k, rank, owner, sight)
        lent = own if t == 0 else blocks(q, k, reader, rank, sight)
        made.append(Step(owner, _hull(own), own, reader, _hull(lent)))
    return tuple(made)


def _hull(found: tuple[Block, ...]) -> Span:
    """From the first key that a block reads to the last."""
    spans = [block.k.span for block in found]
    return (min(start for start, _ in spans), max(end for _, end in spans)) if spans else _NONE


@lru_cache(maxsize=1024)
def blocks(q: Shards, k: Shards, q_shard: int, k_shard: int, sight: Sight) -> tuple[Block, ...]:
    """Blocks of keys that the rows of a shard see of the keys of another."""
    pairs = product(q.chunks(q_shard), k.chunks(k_shard))
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
    """Two blocks of one member as one, where their rows or keys stand side by side in the shard. Between
    rows and keys that all see each other positions do not matter, so the first keys or rows take those in
    front of the others, which follow them under no other bound than a right one."""
    if len(a.q.starts) > 1 or not (sight.left is None or (a.full and b.full)):
        return None
    if a.q.span == b.q.span and a.k.span[1] == b.k.span[0] and a.full:
        return Block(b.q, Chunk(b.k.starts - a.k.lens, b.k.ends, a.k.first), b.full)
    if a.q.span[1] != b.q.span[0] or a.k.first != b.k.first:
        return None
    rows = Chunk(b.q.starts - a.q.lens, b.q.ends, a.q.first)
    if a.full and b.full:
        return Block(rows, b.k, True) if a.k.span == b.k.span else None
    if a.full or b.full or sight.right is None or sight.offsets is None:
        return None
    beyond = a.q.ends + sight.offsets[0] + sight.right > a.k.ends  # else rows of `a` see none of the others
    apart = rows.starts - b.k.starts != a.q.starts - a.k.starts
    return None if (beyond | apart)[0] else Block(rows, b.k, False)


def _block(a: Chunk, b: Chunk, sight: Sight) -> Block | None:
    """Rows `a` and keys `b` cut down to those that may see each other: exact for one member, by whole chunks
    for packed ones."""
    left, right, offsets, segments, _ = sight
    if not (((a.lens > 0) & (b.lens > 0)).any()):
        return None
    full = left is None and right is None
    if not full and offsets is not None:
        off = np.array(offsets, np.int64)
        k0 = b.starts if left is None else np.maximum(b.starts, a.starts + off - left)
        k1 = b.ends if right is None else np.minimum(b.ends, a.ends + off + right)
        q0 = a.starts if right is None else np.maximum(a.starts, b.starts - right - off)
        q1 = a.ends if left is None else np.minimum(a.ends, b.ends + left - off)
        seen = (k0 < k1) & (q0 < q1)
        if not seen.any():
            return None
        above = right is None or (a.starts + off + right >= b.ends - 1)[seen].all()
        full = bool(seen[(a.lens > 0) & (b.lens > 0)].all() and above)
        full = full and bool(left is None or (a.ends - 1 + off - left <= b.starts)[seen].all())
        if len(seen) == 1 and not full:
            a, b = _cut(a, int(q0[0]), int(q1[0])), _cut(b, int(k0[0]), int(k1[0]))
    return Block(a, b, full) if segments is None else _of_segments(a, b, segments)


def _of_segments(a: Chunk, b: Chunk, segments: Segments) -> Block | None:
    """A block cut down to the rows and keys whose ids the others have."""
    rows = segments.q_ids[:, int(a.starts[0]) : int(a.ends[0])]
    keys = segments.k_ids[:, int(b.starts[0]) : int(b.ends[0])]
    seen = np.any([np.isin(x, y) for x, y in zip(keys, rows, strict=True)], axis=0)
    seeing = np.any([np.isin(x, y) for x, y in zip(rows, keys, strict=True)], axis=0)
    if not (len(rows) and seen.any()):
        return None
    (q_at,), (k_at,) = np.nonzero(seeing), np.nonzero(seen)
    q0, k0 = int(a.starts[0]), int(b.starts[0])
    a, b = _cut(a, q0 + q_at[0], q0 + q_at[-1] + 1), _cut(b, k0 + k_at[0], k0 + k_at[-1] + 1)
    return Block(a, b, False)


def _cut(chunk: Chunk, start: int, end: int) -> Chunk:
    """Rows [start, end) of the one member of a chunk."""
    return Chunk(np.array([start]), np.array([end]), chunk.first + start - int(chunk.starts[0]))


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
