"""Heads for rows: every rank gives away its rows of most heads for all rows of a few, and back.

    to_heads:  (batch, heads, own rows, head_dim) -> (batch, own heads, rows of all ranks, head_dim)

Query heads are dealt in equal runs. Key heads follow the query heads that read them; where they are fewer
than ranks, or their number does not divide, one goes to several ranks, and its gradients are added up in
float32 in the order of ranks. Rows come in the order of ranks.

Source: Jacobs et al., DeepSpeed Ulysses (2023)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyflash.errors import spec_error
from polyflash.parallel.comm import Team

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


def to_heads(team: Team, x: Tensor, dealt: Dealt, rows: Sequence[int]) -> Tensor:
    """`rows` that each rank holds of all heads, as all rows of the heads dealt to this one."""
    return _Turn.apply(x, team, dealt, rows, False)  # type: ignore[no-any-return, no-untyped-call]


def to_rows(team: Team, x: Tensor, dealt: Dealt, rows: Sequence[int]) -> Tensor:
    """The way back of a result."""
    return _Turn.apply(x, team, dealt, rows, True)  # type: ignore[no-any-return, no-untyped-call]


class _Turn(torch.autograd.Function):
    """Either way; the gradient goes the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, dealt: Dealt, rows: Sequence[int], back: bool) -> Tensor:
        heads = x.shape[1] if not back else 1 + max((h for run in dealt for h in run), default=-1)
        ctx.how, ctx.back = (team, dealt, rows, heads), back
        return _collect(x, *ctx.how) if back else _spread(x, *ctx.how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_spread if ctx.back else _collect)(grad, *ctx.how), None, None, None, None


def _spread(x: Tensor, team: Team, dealt: Dealt, rows: Sequence[int], heads: int) -> Tensor:
    shapes = [(x.shape[0], len(dealt[team.rank]), n, x.shape[3]) for n in rows]
    parts = [
        torch.cat([x[:, h : h + 1] for h in run], 1) if _repeats(run) else x[:, _span(run)] for run in dealt
    ]
    return torch.cat(team.swap(parts, shapes, "gave rows for heads")(), 2)


def _collect(x: Tensor, team: Team, dealt: Dealt, rows: Sequence[int], heads: int) -> Tensor:
    own = rows[team.rank]
    shapes = [(x.shape[0], len(run), own, x.shape[3]) for run in dealt]
    parts = team.swap(x.split(list(rows), 2), shapes, "gave heads for rows")()
    if sum(map(len, dealt)) == heads:  # none went to several ranks
        return torch.cat(parts, 1)
    sums = torch.float64 if x.dtype is torch.float64 else torch.float32
    total = x.new_zeros((x.shape[0], heads, own, x.shape[3]), dtype=sums)
    for run, part in zip(dealt, parts, strict=True):
        for i, head in enumerate(run):
            total[:, head] += part[:, i]
    return total.to(x.dtype)


def _repeats(run: Sequence[int]) -> bool:
    return len(set(run)) < len(run)


def _span(run: Sequence[int]) -> slice:
    """Heads that stand side by side."""
    return slice(run[0], run[-1] + 1) if run else slice(0, 0)
