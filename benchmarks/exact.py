"""Errors of results against plain attention in float64, on a slice that any problem has room for.

Tensors are (batch, heads, seqlen, head_dim), of any dtype and device, lse without the last dim; a causal row
sees the keys up to its own place, the last row all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROWS = 128  # query rows of a head that are looked at
_WIDE = 4096  # most keys of a whole head in float64: one matrix of weights is then 128 MiB


def relative(found: Tensor, wanted: Tensor) -> float:
    """Relative L2; inf if any element found is not finite, as one that nobody wrote may not be."""
    if not bool(torch.isfinite(found).all()):
        return math.inf
    return float((found.detach().double() - wanted).norm() / wanted.double().norm().clamp_min(1e-30))


def forward_error(qkv: Sequence[Tensor], out: Tensor, causal: bool, lse: Tensor | None = None) -> float:
    """The worst of rows spread over the first and the last head, where offsets are largest; of a result whose
    elements are all finite, else inf."""
    q, k, v = qkv
    batch, heads, seqlen_q, _ = q.shape
    rows = torch.linspace(0, seqlen_q - 1, min(ROWS, seqlen_q), device=q.device).round().long()
    errors = [0.0 if bool(torch.isfinite(out).all()) else math.inf]
    for b, h in {(0, 0), (batch - 1, heads - 1)}:
        kv = h * k.shape[1] // heads
        head = [x.double() for x in (q[b, h, rows], k[b, kv], v[b, kv])]
        with torch.no_grad():
            wanted, sums = _attention(head, rows, causal)
        errors.append(relative(out[b, h, rows], wanted))
        errors += [relative(lse[b, h, rows], sums)] if lse is not None else []
    return max(errors)


def gradient_error(qkv: Sequence[Tensor], dout: Tensor, found: Sequence[Tensor], causal: bool) -> float:
    """The worst of dq, dk and dv of the last key/value head of the last request, with its query heads, by
    autograd, in float32 where float64 is too large; the whole of them is finite, else inf."""
    q, k, _ = qkv
    group, rows = q.shape[1] // k.shape[1], torch.arange(q.shape[2], device=q.device)
    kind = torch.float64 if k.shape[2] <= _WIDE else torch.float32
    part = slice(-group, None), slice(-1, None), slice(-1, None)
    leaves = [x.detach()[-1, at].to(kind).requires_grad_() for x, at in zip(qkv, part, strict=True)]
    with torch.enable_grad():
        out = _attention(leaves, rows, causal)[0]
        wanted = torch.autograd.grad(out, leaves, dout[-1, -group:].to(kind))
    pairs = zip(found, part, wanted, strict=True)
    whole = all(bool(torch.isfinite(x).all()) for x in found)
    return max(relative(x[-1, at], right) for x, at, right in pairs) if whole else math.inf


def _attention(qkv: Sequence[Tensor], rows: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Plain attention of one head, of rows by these numbers up to its last, and their log-sum-exps."""
    q, k, v = qkv
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        first = k.shape[-2] - 1 - rows[-1]
        seen = torch.arange(k.shape[-2], device=k.device) <= rows[:, None] + first
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
