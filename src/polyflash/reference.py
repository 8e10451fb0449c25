"""The oracle: every operand of the public functions, in float64, as formulas with einsum strings.

    out = softmax(softcap(scale·QKᵀ) + bias + ALiBi, mask) · V          lse = ln Σ e^score, sinks included

Written from docs/concepts alone and independent of every kernel and of `mask.py`'s intervals. It stores all
seqlen_q × seqlen_k scores, so it is for small problems. Absent means absent: every invisible operand is
replaced by a `where` before it is used, never multiplied by 0. Differentiable; pass float64 leaves, or
gradients are rounded to the dtype of the leaf. A score of -inf has weight 0 wherever it comes from; a row of
such scores is an empty row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyflash.mask import Mask
from polyflash.merging import AttentionOutput

_INF = float("inf")


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None, mask: Mask | Tensor | None = None,
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, scale: float | None = None, kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None, q_offset: int | Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None, layout: str = "bhsd", first_batch: int = 0,
    row_bounds: Tensor | None = None,
) -> AttentionOutput:  # fmt: skip
    """The arguments of `polyflash.attention`; q, k, v of any float dtype. Returns float64 out in q's layout
    and float64 lse (batch, num_q_heads, seqlen_q). `first_batch` is the index of batch entry 0 in dropout's
    counter; `row_bounds` int (seqlen_q, 2): row i sees keys [row_bounds[i, 0], row_bounds[i, 1]) only."""
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s, visible = _masked_scores(
        q, k, causal, window, mask, bias, alibi_slopes, softcap, scale, kv_lens, kv_starts, q_offset,
        row_bounds,
    )  # fmt: skip
    p, lse, _ = _softmax(s, visible, sinks)
    if dropout_p:
        keep = dropout_keep(p.shape, dropout_p, int(dropout_seed or 0), first_batch)
        p = torch.where(torch.from_numpy(keep).to(q.device), p / max(1.0 - dropout_p, 2.0**-53), 0.0)
    v = v.double().repeat_interleave(p.shape[1] // max(1, v.shape[1]), 1)
    out = _weighted_sum(p, v, visible)
    return AttentionOutput(out.transpose(1, 2) if layout == "bshd" else out, lse)


def dropout_keep(shape: tuple[int, ...], p: float, seed: int, first_batch: int = 0) -> np.ndarray:
    """Draws which weights survive, bool (batch, num_q_heads, seqlen_q, seqlen_k): the same on every backend.

    Word key % 4 of Philox4x32-10 with key = the seed's two halves and counter = (key // 4, query, head +
    Hq·batch, 0) is kept iff it is at least floor(p·2^32)."""
    batch, heads, seqlen_q, seqlen_k = shape
    quads = -(-seqlen_k // 4)
    planes = np.arange(batch * heads, dtype=np.uint64) + np.uint64(first_batch * heads)
    c2, c1, c0 = np.meshgrid(planes, np.arange(seqlen_q), np.arange(quads), indexing="ij")
    words = philox([c0, c1, c2, np.zeros_like(c0)], seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    bits = np.stack(words, -1).reshape(batch, heads, seqlen_q, quads * 4)
    return bits[..., :seqlen_k] >= np.uint64(math.floor(p * 2.0**32))


def philox(counter: list[np.ndarray], key_lo: int, key_hi: int) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al., SC11) of four arrays of 32-bit counter words; returns four uint64 arrays
    < 2^32."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) & low for c in counter)
    for turn in range(10):
        k0 = np.uint64((key_lo + turn * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64((key_hi + turn * 0xBB67AE85) & 0xFFFFFFFF)
        x, y = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        shift = np.uint64(32)
        c0, c1, c2, c3 = (y >> shift) ^ c1 ^ k0, y & low, (x >> shift) ^ c3 ^ k1, x & low
    return [c0, c1, c2, c3]


def _masked_scores(
    q: Tensor, k: Tensor, causal: bool | str, window: tuple[int | None, int | None] | None,
    mask: Mask | Tensor | None, bias: Tensor | None, alibi_slopes: Tensor | None, softcap: float,
    scale: float | None, kv_lens: Tensor | None, kv_starts: Tensor | None, q_offset: int | Tensor | None,
    row_bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores (batch, num_q_heads, seqlen_q, seqlen_k) as they enter the softmax, -inf where invisible, and
    what is visible."""
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    _, num_kv_heads, seqlen_k, _ = k.shape
    group = num_q_heads // max(1, num_kv_heads)
    q, k = q.double(), k.double().repeat_interleave(group, 1)
    rules = mask if isinstance(mask, Mask) else Mask()
    live, start = _live_keys(batch, seqlen_k, rules, kv_lens, kv_starts, q.device)
    position = _positions(seqlen_q, live, (causal, rules.alignment), q_offset)
    j = torch.arange(seqlen_k, device=q.device)
    visible = _visible(position, j, causal, window, rules) & (j >= start) & (j < live)
    if rules.bounds is not None and rules.rows is not None:
        visible = visible & _listed(rules.bounds.to(q.device), rules.rows, seqlen_q, j)
    if isinstance(mask, Tensor):
        visible = visible & mask
    if row_bounds is not None:
        visible = visible & (row_bounds[:, :1] <= j) & (j < row_bounds[:, 1:])
    if bias is not None:
        visible = visible & (bias != -_INF)
    visible = visible.expand(batch, num_q_heads, seqlen_q, seqlen_k)

    scale = 1.0 / math.sqrt(max(1, head_dim)) if scale is None else scale
    s = torch.where(visible, _scores(q, k) * scale, 0.0)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.double()
    if alibi_slopes is not None:
        slopes = alibi_slopes.double().reshape(-1, num_q_heads, 1, 1)
        s = s - slopes * (position - j).abs()
    return torch.where(visible, s, -_INF), visible


def _softmax(s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, lse and the sink's weight per row; lse (batch, num_q_heads, seqlen_q)."""
    column = s.new_full((s.shape[1],), -_INF) if sinks is None else sinks.double()
    column = column[None, :, None, None].expand(*s.shape[:3], 1)
    m = torch.cat([s, column], -1).amax(-1, keepdim=True).detach()
    m = torch.where(m == -_INF, 0.0, m)
    e = torch.where(visible, torch.exp(s - m), 0.0)
    total = e.sum(-1, keepdim=True) + torch.exp(column - m)
    empty = total == 0.0
    total = torch.where(empty, 1.0, total)
    p = torch.where(visible, e / total, 0.0)
    lse = torch.where(empty, -_INF, m + torch.log(total)).squeeze(-1)
    return p, lse, torch.where(empty, 0.0, torch.exp(column - m) / total)


def _live_keys(
    batch: int, seqlen_k: int, rules: Mask, lens: Tensor | None, starts: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Live length and first live key, int64 (batch, 1, 1, 1)."""
    live = torch.full((batch,), seqlen_k, device=device)
    start = torch.zeros_like(live)
    for x in (lens, rules.kv_lens):
        live = live if x is None else torch.minimum(live, torch.as_tensor(x, device=device).long())
    for x in (starts, rules.kv_starts):
        start = start if x is None else torch.maximum(start, torch.as_tensor(x, device=device).long())
    return live.view(-1, 1, 1, 1), start.view(-1, 1, 1, 1)


def _positions(
    seqlen_q: int, live: Tensor, alignments: tuple[bool | str | None, ...], q_offset: int | Tensor | None
) -> Tensor:
    """Position of each row among the keys, int64 (batch, 1, seqlen_q, 1)."""
    if q_offset is not None:
        offset = torch.as_tensor(q_offset, device=live.device).long().reshape(-1, 1, 1, 1).expand_as(live)
    elif "top_left" in alignments:
        offset = torch.zeros_like(live)
    else:
        offset = live - seqlen_q
    return offset + torch.arange(seqlen_q, device=live.device).view(1, 1, -1, 1)


def _visible(
    position: Tensor, j: Tensor, causal: bool | str, window: tuple[int | None, int | None] | None, rules: Mask
) -> Tensor:
    """Tells which key j a row at `position` may see by order, distance and segment; bool (batch, 1, ...)."""
    visible = torch.ones_like(position - j, dtype=torch.bool)
    if causal or rules.alignment:
        visible = visible & (j <= position)
    for left, right in (window or (None, None), (rules.left, rules.right)):
        if left is not None:
            visible = visible & (position - j <= left)
        if right is not None:
            visible = visible & (j - position <= right)
    if rules.q_ids is not None and rules.k_ids is not None:
        q_ids, k_ids = (torch.as_tensor(x, device=j.device) for x in (rules.q_ids, rules.k_ids))
        visible = visible & (q_ids[:, None, :, None] == k_ids[:, None, None, :])
    return visible


def _listed(bounds: Tensor, rows: int, seqlen_q: int, j: Tensor) -> Tensor:
    """Tells which key j an interval list of a row's block of `rows` rows holds; bool (batch or 1, heads or 1,
    seqlen_q, keys)."""
    inside = (bounds[..., :1] <= j) & (j < bounds[..., 1:])
    return inside.any(-2).repeat_interleave(rows, -2)[..., :seqlen_q, :]


class _Finite(torch.autograd.Function):
    """x with 0 for NaN and infinities; its gradient is that of x, so a bad operand still gets one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.where(torch.isfinite(x), x, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _finite(x: Tensor) -> Tensor:
    return x if bool(torch.isfinite(x).all()) else _Finite.apply(x)  # type: ignore[no-untyped-call]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q·k per pair; non-finite ones are added as constants, so gradients multiply finite operands only."""
    raw = torch.einsum("bhid,bhjd->bhij", q.detach(), k.detach())
    s = torch.einsum("bhid,bhjd->bhij", _finite(q), _finite(k))
    return s + torch.where(torch.isfinite(raw), 0.0, raw)


def _weighted_sum(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Σ_j p·v over visible keys; the non-finite values of v are summed pair by pair, where visible."""
    out = torch.einsum("bhij,bhjd->bhid", p, _finite(v))
    finite = torch.isfinite(v)
    odd = (~finite).flatten(0, 1).any(-1).any(0)
    if not bool(odd.any()):
        return out
    seen = visible[..., odd].unsqueeze(-1) & ~finite[:, :, odd].unsqueeze(2)
    terms = torch.where(seen, v.detach()[:, :, odd].unsqueeze(2), 0.0)
    return out + torch.einsum("bhij,bhijd->bhid", p[..., odd], terms)
