"""Keys of two ranks as one run of each member: rows that see them take one call instead of one per rank.

A ring of two has one exchange. Where order alone hides keys, those that arrive and own ones are put in the
order of their positions, and no results are merged: rows of a chunk see all their keys at once.

    rank 0, chunks 0 and 3 of 4        own: rows 0 · keys 0                then: rows 3 · keys 0 1 2 3
    rank 1, chunks 1 and 2                                                 then: rows 1 2 · keys 0 1 2

A batch of one takes a single call for both, as packed members (0 · 0) and (3 · 0 1 2 3), with a copy of keys
0: two calls leave cores idle at the end of each. On a GPU nothing is computed before the exchange is over: a
kernel that fills it would hold up this rank's half, and the other one's rows with it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from polyflash.parallel import schedule
from polyflash.parallel.schedule import Block, Chunk, Runs, Shards, Sight, Step

MOST_PIECES = 16  # that are put in order, run by run
MOST_KEYS = 1 << 17  # of both ranks: more were not timed, and results are merged
MOST_KEPT = 1 / 3  # of q, k, v and out, that joined keys may add to what stays for the backward pass


class Piece(NamedTuple):
    """Keys of one rank that stand side by side: their place among joined ones, from which on they are in the
    shard of this rank, if they are its `own`, or in what arrived; and how many there are."""

    own: bool
    at: int
    first: int
    rows: int


class Join(NamedTuple):
    """Own keys, with the blocks that read no others, which may be none; `pieces` of joined keys, so many
    `keys` in all, with the blocks that read them. No row is in two blocks."""

    own: Step
    pieces: tuple[Piece, ...]
    keys: int
    blocks: tuple[Block, ...]

    @property
    def arriving(self) -> Piece | None:
        """Those that arrive, if they follow one another."""
        first, *more = (x for x in self.pieces if not x.own)
        return None if more else first

    @property
    def mine(self) -> slice | None:
        """The place of own keys among joined ones, if they follow one another there."""
        first, *more = (x for x in self.pieces if x.own)
        return None if more else slice(first.at, first.at + first.rows)


@lru_cache(maxsize=128)
def join(q: Shards, k: Shards, rank: int, sight: Sight, alone: bool = False) -> Join | None:
    """How a rank of two joins keys; None where they are read step by step, many, or none arrive. `alone`:
    there is one batch entry."""
    if k.count != 2 or k.rows > MOST_KEYS:
        return None
    if not sight.joins or sight.left is not None or sight.offsets is None:
        return None
    q, k = replace(q, pieces=1), replace(k, pieces=1)
    arriving = schedule.steps(q, k, rank, sight)[1].keys
    theirs = k.positions(1 - rank)[schedule.rows_of(arriving.starts, arriving.ends - arriving.starts)]
    mine = k.positions(rank)
    at = np.concatenate((mine, theirs))
    order = np.argsort(at)
    breaks = (order[1:] != order[:-1] + 1) | (order[1:] == len(mine))
    starts = np.flatnonzero(np.concatenate(([True], breaks)))
    if not len(theirs) or len(starts) > MOST_PIECES:
        return None
    chunk = _chunk_of(at[order], k)
    blocks = () if chunk is None else schedule.blocks_of([(x, chunk) for x in q.chunks(rank)], sight)
    spans = sorted(block.q.span for block in blocks)
    if chunk is None or any(a[1] > b[0] for a, b in pairwise(spans)):
        return None
    pieces = []
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        first = int(order[start])
        own = first < len(mine)
        pieces.append(Piece(own, int(start), first - (0 if own else len(mine)), int(end - start)))
    apart: list[Block] = []
    others: list[Block] = []
    one = _together(blocks, pieces, len(theirs), sight) if alone and len(q.lengths) == 1 else None
    if one is not None:
        pieces, others, blocks = *one, ()
    for block in blocks:
        begin, until = block.k.span
        piece = next((x for x in pieces if x.own and x.at <= begin and until <= x.at + x.rows), None)
        if piece is None:
            others.append(block)
        else:
            apart.append(block._replace(k=block.k._replace(first=block.k.first + piece.first - piece.at)))
    held = Runs(np.array([0]), np.array([len(mine)]))
    own_step = Step(rank, held, tuple(apart), rank, held)
    return Join(own_step, tuple(pieces), sum(x.rows for x in pieces), tuple(others))


def _together(
    blocks: tuple[Block, ...], pieces: list[Piece], arriving: int, sight: Sight
) -> tuple[list[Piece], list[Block]] | None:
    """Blocks of one member as members of a packed call, each with keys of its own; None for a single one,
    where a row would stand elsewhere, or where keys that arrive would be there twice."""
    parts = sorted(blocks, key=lambda block: block.q.span)
    offset = (sight.offsets or (0,))[0]
    if len(parts) < 2 or any(int(x.q.ends[0]) + offset != int(x.k.ends[0]) for x in parts):
        return None
    made: list[Piece] = []
    firsts: list[int] = []
    at = 0
    for block in parts:
        begin, until = block.k.span
        firsts.append(at)
        for x in pieces:
            start, end = max(x.at, begin), min(x.at + x.rows, until)
            if start < end:
                made.append(Piece(x.own, at + start - begin, x.first + start - x.at, end - start))
        at += until - begin
    if sum(x.rows for x in made if not x.own) != arriving:
        return None
    sides = [block.q for block in parts], [block.k for block in parts]
    rows, keys = (Chunk(*map(np.concatenate, zip(*side, strict=True))) for side in sides)
    return made, [Block(rows, keys._replace(first=np.array(firsts)), False)]


def _chunk_of(at: np.ndarray, k: Shards) -> Chunk | None:
    """Positions among all keys, rising, as one run of each member, if they are such runs."""
    bases = np.cumsum((0, *k.lengths))
    edges = np.searchsorted(at, bases)
    first, lens = edges[:-1], np.diff(edges)
    starts = np.where(lens > 0, at[np.minimum(first, len(at) - 1)] - bases[:-1], 0)
    lasts = at[np.maximum(edges[1:] - 1, 0)] - bases[:-1]
    if ((lens > 0) & (lasts - starts + 1 != lens)).any():
        return None
    return Chunk(starts, starts + lens, first)


@lru_cache(maxsize=128)
def stay(q: Shards, k: Shards, sight: Sight, alone: bool, group: int) -> bool:
    """Do joined keys of both ranks stay for the backward pass, in place of own ones? They do where they are
    not many beside what stays in any case; there are `group` query heads for each head of keys."""
    q, k = replace(q, pieces=1), replace(k, pieces=1)
    found = [join(q, k, rank, sight, alone) for rank in range(2)]
    for rank, one in enumerate(found):
        if one is None:
            fits = not schedule.steps(q, k, rank, sight)[1].keys.rows
        else:
            held, readable = k.held(rank), one.mine is not None or not one.own.blocks
            fits = readable and one.keys - held <= MOST_KEPT * (q.held(rank) * group + held)
        if not fits:
            return False
    return any(found)
