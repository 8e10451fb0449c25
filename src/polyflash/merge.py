"""(out, lse) ⊕ (out, lse): attention over two disjoint key sets from attention over each of them.

    lse = ln(e^lse_a + e^lse_b)          out = out_a·σ(lse_a - lse_b) + out_b·σ(lse_b - lse_a)

The one formula behind split keys, shared prefixes and ring steps. Weights come from the difference of two
logarithms through a sigmoid, so no exponential can overflow, at any distance."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from polyflash.errors import described, spec_error
from polyflash.mask import is_strided

_DIMS = {"bhsd": 4, "bshd": 4, "thd": 3}


class AttentionOutput(NamedTuple):
    """`out` in the layout of q; `lse`, the natural logarithm of the softmax denominator, (batch, heads,
    seqlen)."""

    out: Tensor
    lse: Tensor


def merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, layout: str = "bhsd"
) -> AttentionOutput:
    """Merges two partial results over disjoint keys; a sink must have been given to exactly one of them.

    out: (batch, heads, seqlen, head_dim_v), "bshd" (batch, seqlen, heads, head_dim_v), or "thd"
    (total_q, heads, head_dim_v); lse: (batch, heads, seqlen), for "thd" (heads, total_q). Any float dtypes;
    the result is float32, or float64 if an input is. Exact up to rounding; commutative bitwise; lse = -inf
    (no key seen) is the identity, whatever its out holds; two empty states give (0, -inf). Differentiable.

    Raises:
        SpecError: unknown layout, or shapes or devices that do not belong together.
    """
    _check(out_a, lse_a, out_b, lse_b, layout)
    double = torch.float64 in (out_a.dtype, lse_a.dtype, out_b.dtype, lse_b.dtype)
    kind = torch.float64 if double else torch.float32
    out_a, lse_a, out_b, lse_b = (x.to(kind) for x in (out_a, lse_a, out_b, lse_b))
    empty_a, empty_b = lse_a == -torch.inf, lse_b == -torch.inf
    either = empty_a | empty_b
    # Replaced before use: -inf - -inf and 0·NaN would poison the gradients of the other state.
    a, b = lse_a.masked_fill(either, 0.0), lse_b.masked_fill(either, 0.0)
    lse = torch.where(empty_b, lse_a, torch.where(empty_a, lse_b, torch.logaddexp(a, b)))
    weight_a, weight_b, no_a, no_b = (
        _beside_out(x, layout) for x in (torch.sigmoid(a - b), torch.sigmoid(b - a), empty_a, empty_b)
    )
    out_a, out_b = out_a.masked_fill(no_a, 0.0), out_b.masked_fill(no_b, 0.0)
    mixed = out_a * weight_a + out_b * weight_b
    return AttentionOutput(torch.where(no_b, out_a, torch.where(no_a, out_b, mixed)), lse)


def merge_rows(
    a: AttentionOutput, b: AttentionOutput, *, need_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`merge` of results made here without gradients, layout "thd": the same bits, in half the operations
    where a CPU sees that every row saw a key in both."""
    apart = a.lse - b.lse
    # A sum that is finite has no summand that is not.
    if apart.device.type != "cpu" or not math.isfinite(float(apart.sum())):
        return merge(a.out, a.lse, b.out, b.lse, layout="thd")
    apart = _beside_out(apart, "thd")
    out = (a.out * torch.sigmoid(apart)).add_(b.out * torch.sigmoid(-apart))
    return out, torch.logaddexp(a.lse, b.lse) if need_lse else None


def _beside_out(x: Tensor, layout: str) -> Tensor:
    """A tensor of lse's shape, broadcastable against out."""
    return (x if layout == "bhsd" else x.transpose(-1, -2)).unsqueeze(-1)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, layout: str) -> None:
    for name, x in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(x, Tensor) or not is_strided(x) or not x.is_floating_point():
            change = "Pass what return_lse=True gave."
            raise spec_error(name, got=described(x), wanted="a tensor of floats", change=change)
        if x.device != out_a.device:
            wanted = f"{out_a.device}, as out_a"
            raise spec_error(f"{name} device", got=x.device, wanted=wanted, change="Move it with .to().")
    if not isinstance(layout, str) or layout not in _DIMS:
        wanted = "'bhsd', 'bshd' or 'thd'"
        raise spec_error("layout", got=described(layout), wanted=wanted, change="Name the layout of out.")
    if out_a.ndim != _DIMS[layout]:
        wanted = f"{_DIMS[layout]} dimensions for layout {layout!r}"
        raise spec_error("out_a", got=tuple(out_a.shape), wanted=wanted, change="Pass layout= that fits out.")
    if out_b.shape != out_a.shape:
        raise spec_error(
            "out_b",
            got=tuple(out_b.shape),
            wanted=tuple(out_a.shape),
            change="Merge results of the same queries.",
        )
    rows = tuple(out_a.shape[:-1])
    of_lse = rows if layout == "bhsd" else (*rows[:-2], rows[-1], rows[-2])
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(lse.shape) != of_lse:
            form = "(heads, total_q)" if layout == "thd" else "(batch, heads, seqlen)"
            change = f"For layout {layout!r} lse is {form}."
            raise spec_error(name, got=tuple(lse.shape), wanted=of_lse, change=change)
