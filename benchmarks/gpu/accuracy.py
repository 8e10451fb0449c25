"""Outputs and gradients of a GPU arm against plain torch in float64 (float32 where that is too large), on a
slice of the problem."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.arms import Tensors
from benchmarks.gpu.cases import BACKWARD, GpuCase

ROWS = 128  # query rows of a sampled head
_WIDE = 4096  # most keys of a whole head in float64: one matrix of weights is then 128 MiB


def error(case: GpuCase, t: Tensors, result: Any) -> float:
    """Relative L2 error of the slice, of the worst gradient in the part backward; inf if any element of the
    whole result is not finite, as one that nobody wrote may not be."""
    parts = result if case.part == BACKWARD else (result,)
    if not all(bool(torch.isfinite(x).all()) for x in parts):
        return math.inf
    if case.part == BACKWARD:
        wanted = _gradients(case, t)
        found = _of_one_head(case, *parts)
        return max(_relative(a, b) for a, b in zip(found, wanted, strict=True))
    return max(_relative(*_rows(case, t, result, b, h)) for b, h in _sampled(case))


def _sampled(case: GpuCase) -> list[tuple[int, int]]:
    """The first and the last head: offsets are largest there."""
    return list(dict.fromkeys([(0, 0), (case.batch - 1, case.heads - 1)]))


def _rows(case: GpuCase, t: Tensors, out: Tensor, b: int, h: int) -> tuple[Tensor, Tensor]:
    """(found, wanted) of rows spread over one head."""
    count = min(ROWS, case.seqlen_q)
    i = torch.linspace(0, case.seqlen_q - 1, count, device=out.device).round().long()
    head = h // (case.heads // case.kv_heads)
    with torch.no_grad():
        q, k, v = t.q[b, h, i].double(), t.k[b, head].double(), t.v[b, head].double()
        scores = q @ k.T / math.sqrt(case.head_dim)
        if case.causal:
            offset = case.seqlen_k - case.seqlen_q
            j = torch.arange(case.seqlen_k, device=out.device)
            scores.masked_fill_(j > i[:, None] + offset, -math.inf)
        return out[b, h, i].double(), scores.softmax(-1) @ v


def _gradients(case: GpuCase, t: Tensors) -> list[Tensor]:
    """dq, dk, dv of the last key/value head of the last request, with its query heads, by autograd."""
    kind = torch.float64 if case.seqlen_k <= _WIDE else torch.float32
    if t.dout is None:
        raise ValueError("dout: got none, wanted the gradient of the output")
    q, k, v, dout = (x.detach().to(kind) for x in _of_one_head(case, t.q, t.k, t.v, t.dout))
    for x in (q, k, v):
        x.requires_grad_()
    scores = q @ k.mT / math.sqrt(case.head_dim)
    if case.causal:
        ones = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(ones.triu(case.seqlen_k - case.seqlen_q + 1), -math.inf)
    return list(torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), dout))


def _of_one_head(case: GpuCase, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> list[Tensor]:
    """The last key/value head of the last request: q and `more` (group, seqlen_q, head_dim), k and v
    (1, seqlen_k, head_dim)."""
    group = case.heads // case.kv_heads
    return [q[-1, -group:], k[-1, -1:], v[-1, -1:], *(x[-1, -group:] for x in more)]


def _relative(found: Tensor, wanted: Tensor) -> float:
    difference = (found.double() - wanted.double()).norm() / wanted.double().norm()
    return float(difference)
