"""Heads for rows: every rank gives away its rows of most heads for all rows of a few, and back.

    to_heads:  (batch, heads, own rows, head_dim) -> (batch, own heads, rows of all ranks, head_dim)

Query heads are dealt in equal runs. Key heads follow the query heads that read them; where they are fewer
than ranks, or their number does not divide, one goes to several ranks, and its gradients are added up in
float32 in the order of ranks. Rows come in their order, or in that of ranks with pieces of a shard.

Source: Jacobs et al., DeepSpeed Ulysses (2023)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyflash.errors import spec_error
from polyflash.parallel import places
from polyflash.parallel.comm import Team
from polyflash.parallel.schedule import Shards
from polyflash.parallel.sums import sums_of

Dealt = Sequence[Sequence[int]]  # the heads that each rank gets


def deal(num_q_heads: int, num_kv_heads: int, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """The query heads and the key heads of each rank, those of keys so often that query head h of a rank
    reads key head h // (query heads / key heads) of it."""
    if num_q_heads % ranks:
        change = "Use method='ring' or 'all_gather', or fewer ranks that share heads."
        wanted = f"a multiple of {ranks}, the ranks that share heads"
        raise spec_error("q heads", num_q_heads, wanted, change)
    each, group = num_q_heads // ranks, num_q_heads // max(1, num_kv_heads)
    of_q = [list(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]
    of_k = []
    for heads in of_q:
        read = [h // max(1, group) for h in heads]
        runs = [len(list(same)) for _, same in groupby(read)]
        of_k.append(read[:: gcd(*runs)] if runs else [])
    return of_q, of_k


class Turn(NamedTuple):
    """How heads and rows change hands: the heads dealt to each rank of a team, the rows that each holds,
    their order where all rows are wanted in it, else they follow one another, and how they travel."""

    team: Team
    dealt: Dealt
    rows: Sequence[int]
    shards: Shards | None
    packed: bool


def to_heads(x: Tensor, turn: Turn) -> Tensor:
    """Own rows of all heads, as all rows of the heads dealt to this rank."""
    return _Turn.apply(x, turn, False)  # type: ignore[no-any-return, no-untyped-call]


def to_rows(x: Tensor, turn: Turn) -> Tensor:
    """The way back of a result."""
    return _Turn.apply(x, turn, True)  # type: ignore[no-any-return, no-untyped-call]


class _Turn(torch.autograd.Function):
    """Either way; the gradient goes the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Turn, back: bool) -> Tensor:
        heads = x.shape[1] if not back else 1 + max((h for run in turn.dealt for h in run), default=-1)
        ctx.how, ctx.back = (turn, heads), back
        return _collect(x, turn, heads) if back else _spread(x, turn, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_spread if ctx.back else _collect)(grad, *ctx.how), None, None


def _spread(x: Tensor, turn: Turn, heads: int) -> Tensor:
    team, dealt, packed = turn.team, turn.dealt, turn.packed
    parts = [
        torch.cat([x[:, h : h + 1] for h in run], 1) if _repeats(run) else x[:, _span(run)] for run in dealt
    ]
    shapes = [_shape(x, len(dealt[team.rank]), n, packed) for n in turn.rows]
    got = team.swap([places.wire(part, packed) for part in parts], shapes, "gave rows for heads")()
    if turn.shards is not None:
        return places.in_order(turn.shards, got, packed)
    return places.wire(places.along(got, 1 + (not packed)), packed)


def _collect(x: Tensor, turn: Turn, heads: int) -> Tensor:
    team, dealt, packed = turn.team, turn.dealt, turn.packed
    if turn.shards is None:
        given = [places.wire(part, packed) for part in x.split(list(turn.rows), 2)]
    else:
        given = places.of_shards(turn.shards, x, packed)
    own = turn.rows[team.rank]
    parts = team.swap(given, [_shape(x, len(run), own, packed) for run in dealt], "gave heads for rows")()
    if sum(map(len, dealt)) == heads:  # none went to several ranks
        return places.wire(places.along(parts, 1 + packed), packed)
    total = x.new_zeros((x.shape[0], heads, own, x.shape[3]), dtype=sums_of(x))
    for run, part in zip(dealt, parts, strict=True):
        for i, head in enumerate(run):
            total[:, head] += places.wire(part, packed)[:, i]
    return total.to(x.dtype)


def _shape(x: Tensor, heads: int, rows: int, packed: bool) -> tuple[int, ...]:
    """So many rows of so many heads as they travel."""
    return (x.shape[0], rows, heads, x.shape[3]) if packed else (x.shape[0], heads, rows, x.shape[3])


def _repeats(run: Sequence[int]) -> bool:
    return len(set(run)) < len(run)


def _span(run: Sequence[int]) -> slice:
    """Heads that stand side by side."""
    return slice(run[0], run[-1] + 1) if run else slice(0, 0)
