"""How far gradients are from the right ones: those of sampled heads against autograd through the float64
oracle, in blocks of rows, so that memory is bounded at any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyflash.bench.check import Accuracy
from polyflash.compare import worst_row
from polyflash.reference import attention_reference

_BLOCK_SCORES = 1 << 22  # scores that the oracle stores for one block of rows


def sampled_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    options: dict[str, Any],
    room: dict[str, Tensor],
    found: Sequence[dict[str, Tensor]],
) -> list[Accuracy]:
    """Errors of each of `found`, gradients by the names of their operands, for one key/value head and the
    query heads that share it, or for all heads if a bias broadcasts over them; relative to their rows and
    those of `room`. q, k, v, dout are (batch, heads, seqlen, head_dim); operands as in `attention`, its mask
    a bool tensor."""
    batch, num_kv_heads, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    bias, dropout = options.get("bias"), options.get("dropout_p", 0.0)
    whole = bias is not None and bias[(None,) * (4 - bias.ndim)].shape[:2] != q.shape[:2]
    # The counter of dropout begins at the first entry and head.
    last = 0 if dropout else num_kv_heads - 1
    entries = slice(0, batch) if whole else slice(0, 1) if dropout else slice(batch - 1, batch)
    kv = slice(0, num_kv_heads) if whole else slice(last, last + 1)
    at = entries, slice(kv.start * group, kv.stop * group)
    exact = _oracle(q[at], k[entries, kv], v[entries, kv], dout[at], _of_heads(options, *at))
    errors = []
    for gradients in found:
        relative = largest = 0.0
        for name, right in exact.items():
            place = (at[1],) if name == "sinks" else (entries, kv) if name in ("k", "v") else at
            got, slack = (_part(x[name], *place) for x in (gradients, room))
            relative = max(relative, worst_row(got.double(), right, slack))
            wrong = (got - right).abs().nan_to_num(torch.inf, torch.inf, torch.inf)
            largest = max(largest, float(wrong.max()))
        heads = at[1].stop - at[1].start
        errors.append(Accuracy(relative, relative, largest, 0.0, heads, q.shape[2]))
    return errors


def _oracle(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    """Float64 gradients of the oracle, block by block of rows; of all rows at once with dropout, whose
    counter begins at the first one."""
    given = {"q": q, "k": k, "v": v} | {n: options[n] for n in ("bias", "sinks") if n in options}
    leaves = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    rest = {n: x for n, x in options.items() if n not in ("mask", "bias", "sinks")}
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    scores = q.shape[0] * q.shape[1] * seqlen_k
    rows = seqlen_q if "dropout_p" in options else max(1, _BLOCK_SCORES // scores)
    totals = {name: torch.zeros_like(x) for name, x in leaves.items()}
    every = slice(None)
    for start in range(0, seqlen_q, rows):
        block = slice(start, start + rows)
        out, _ = attention_reference(
            leaves["q"][:, :, block], leaves["k"], leaves["v"],
            q_offset=seqlen_k - seqlen_q + start, mask=_part(options.get("mask"), every, every, block),
            bias=_part(leaves.get("bias"), every, every, block), sinks=leaves.get("sinks"), **rest,
        )  # fmt: skip
        parts = torch.autograd.grad(out, tuple(leaves.values()), dout[:, :, block].double())
        for total, part in zip(totals.values(), parts, strict=True):
            total += part
    return totals


def _of_heads(options: dict[str, Any], entries: slice, heads: slice) -> dict[str, Any]:
    """The operands as some entries and query heads have them."""
    kept = dict(options)
    for name in ("mask", "bias"):
        if name in kept:
            kept[name] = _part(kept[name], entries, heads)
    for name in ("alibi_slopes", "sinks"):
        if name in kept:
            kept[name] = kept[name][heads]
    return kept


def _part(x: Any, *at: slice) -> Any:
    """What slices of the leading dimensions leave of an operand that broadcasts to four; of a vector."""
    if x is None:
        return None
    x = x[(None,) * (4 - x.ndim)] if x.ndim > 1 else x
    return x[tuple(part if size > 1 else slice(None) for part, size in zip(at, x.shape, strict=False))]
