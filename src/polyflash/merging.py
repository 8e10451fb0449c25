"""(out, lse) ⊕ (out, lse): attention over two disjoint key sets from attention over each of them.

    lse = ln(e^lse_a + e^lse_b)          out = out_a·σ(lse_a - lse_b) + out_b·σ(lse_b - lse_a)

The one formula behind split keys, shared prefixes and ring steps. Weights come from the difference of two
logarithms through a sigmoid, so no exponential can overflow, at any distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, reduce
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from polyflash.errors import described, spec_error
from polyflash.mask import is_strided

_ONE_PASS = "polyflash.backends.triton.merge"
_LEAST = 2.0**-126  # of float32
_DIMS = {"bhsd": 4, "bshd": 4, "thd": 3}


class AttentionOutput(NamedTuple):
    """`out` in the layout of q; `lse`, ln of the softmax denominator, (batch, heads, seqlen)."""

    out: Tensor
    lse: Tensor


@overload
def merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, layout: str = ...
) -> AttentionOutput: ...
@overload
def merge(parts: Sequence[tuple[Tensor, Tensor]], /, *, layout: str = ...) -> AttentionOutput: ...
def merge(
    out_a: Any, lse_a: Any = None, out_b: Any = None, lse_b: Any = None, *, layout: str = "bhsd"
) -> AttentionOutput:
    """Merges partial results over disjoint keys; a sink must have been given to exactly one of them.

        merge(out_a, lse_a, out_b, lse_b)
        merge([(out_a, lse_a), (out_b, lse_b), (out_c, lse_c)])      # one or more, from left to right

    out: (batch, heads, seqlen, head_dim_v), "bshd" (batch, seqlen, heads, head_dim_v), or "thd"
    (total_q, heads, head_dim_v); lse: (batch, heads, seqlen), for "thd" (heads, total_q). Any float dtypes;
    the result is float32, or float64 if an input is. Exact up to rounding; commutative bitwise; lse = -inf
    (no key seen) is the identity, whatever its out holds; empty states alone give (0, -inf). Differentiable.

    Raises:
        SpecError: unknown layout, or shapes or devices that do not belong together; a list of no parts, or of
            others than pairs."""
    if isinstance(out_a, Sequence):
        pairs = _pairs(out_a, (lse_a, out_b, lse_b))
        names = [(f"parts[{i}].out", f"parts[{i}].lse") for i in range(len(pairs))]
    else:
        pairs, names = [(out_a, lse_a), (out_b, lse_b)], [("out_a", "lse_a"), ("out_b", "lse_b")]
    _check(pairs, names, layout)
    double = any(x.dtype is torch.float64 for pair in pairs for x in pair)
    kind = torch.float64 if double else torch.float32
    parts = [AttentionOutput(out.to(kind), lse.to(kind)) for out, lse in pairs]
    if len(parts) == 1:  # its empty rows become 0, as beside others
        out, lse = parts[0]
        parts.append(AttentionOutput(torch.zeros_like(out), torch.full_like(lse, -torch.inf)))
    return reduce(lambda one, other: _merged(one, other, layout), parts)


def _merged(one: AttentionOutput, other: AttentionOutput, layout: str) -> AttentionOutput:
    """Two parts of one dtype, checked."""
    (out_a, lse_a), (out_b, lse_b) = one, other
    empty_a, empty_b = lse_a == -torch.inf, lse_b == -torch.inf
    either = empty_a | empty_b
    # Replaced before use: -inf - -inf and 0·NaN would poison the gradients of the other state.
    a, b = lse_a.masked_fill(either, 0.0), lse_b.masked_fill(either, 0.0)
    lse = torch.where(empty_b, lse_a, torch.where(empty_a, lse_b, torch.logaddexp(a, b)))
    weight_a, weight_b, no_a, no_b = (
        _beside_out(x, layout) for x in (_share(a - b), _share(b - a), empty_a, empty_b)
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
    out = (a.out * _share(apart)).add_(b.out * _share(-apart))
    return out, torch.logaddexp(a.lse, b.lse) if need_lse else None


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """`merge` without gradients into the first of two states, layout "bhsd", in few passes over memory. Rows
    without keys must hold zeros in both, as results of calls do; `other_out` may be of a narrower dtype. A
    first state of 16 bits is rounded where it is written."""
    if out.device.type == "cuda" and out.dtype is not torch.float64 and _has_triton():
        import_module(_ONE_PASS).merge_into(out, lse, other_out, other_lse)
        return
    # On a CPU torch rounds otherwise in the last elements of a tensor: bits would follow the batch.
    a, b = (x.double() if x.device.type == "cpu" else x for x in (lse, other_lse))
    apart = torch.where(b == -torch.inf, -torch.inf, b - a)  # also of two empty rows
    lse.copy_(torch.logaddexp(a, b))
    kind = torch.promote_types(out.dtype, torch.float32)
    one, other = (_share(x).to(kind).unsqueeze(-1) for x in (-apart, apart))
    scaled = out * one if out.element_size() < 4 else out.mul_(one)
    torch.addcmul(scaled, other_out, other, out=out)


def add_into(into: Tensor, parts: Sequence[Tensor]) -> None:
    """Writes the sum of one to three parts (batch, heads, rows, channels), made in float32, of which one may
    be where it is written, all of 16 bits or wider."""
    if len(parts) > 1 and into.device.type == "cuda" and into.numel() and _has_triton():
        import_module(_ONE_PASS).add_into(into, parts)
        return
    total = parts[0]
    for x in parts[1:-1]:
        total = total.to(torch.promote_types(into.dtype, torch.float32)) + x
    torch.add(total, parts[-1], out=into)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _share(apart: Tensor) -> Tensor:
    """σ, but never 0: times an infinity that would be NaN."""
    return torch.sigmoid(apart).clamp(min=_LEAST)


def _beside_out(x: Tensor, layout: str) -> Tensor:
    """A tensor of lse's shape, broadcastable against out."""
    return (x if layout == "bhsd" else x.transpose(-1, -2)).unsqueeze(-1)


def _pairs(parts: Sequence[Any], others: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    change = "Pass what return_lse=True gave: merge([(out, lse), ...]), or merge(out_a, lse_a, out_b, lse_b)."
    pairs = [part for part in parts if isinstance(part, Sequence) and len(part) == 2]
    if not pairs or len(pairs) < len(parts) or any(x is not None for x in others):
        got = f"{described(parts)}{' and more arguments' * any(x is not None for x in others)}"
        raise spec_error("parts", got, "one pair (out, lse) or more", change)
    return [(out, lse) for out, lse in pairs]


def _check(pairs: list[tuple[Any, Any]], names: list[tuple[str, str]], layout: str) -> None:
    first, at = pairs[0][0], names[0][0]
    for pair, named in zip(pairs, names, strict=True):
        for name, x in zip(named, pair, strict=True):
            if not isinstance(x, Tensor) or not is_strided(x) or not x.is_floating_point():
                raise spec_error(name, described(x), "a tensor of floats", "Pass what return_lse=True gave.")
            if x.device != first.device:
                change = "Move it with .to()."
                raise spec_error(f"{name} device", x.device, f"{first.device}, as {at}", change)
    if not isinstance(layout, str) or layout not in _DIMS:
        raise spec_error("layout", described(layout), "'bhsd', 'bshd' or 'thd'", "Name the layout of out.")
    if first.ndim != _DIMS[layout]:
        change = "Pass layout= that fits out."
        raise spec_error(at, tuple(first.shape), f"{_DIMS[layout]} dimensions for layout {layout!r}", change)
    rows = tuple(first.shape[:-1])
    of_lse = rows if layout == "bhsd" else (*rows[:-2], rows[-1], rows[-2])
    for (out, lse), (out_name, lse_name) in zip(pairs, names, strict=True):
        if out.shape != first.shape:
            change = "Merge results of the same queries."
            raise spec_error(out_name, tuple(out.shape), tuple(first.shape), change)
        if tuple(lse.shape) != of_lse:
            form = "(heads, total_q)" if layout == "thd" else "(batch, heads, seqlen)"
            raise spec_error(lse_name, tuple(lse.shape), of_lse, f"For layout {layout!r} lse is {form}.")
