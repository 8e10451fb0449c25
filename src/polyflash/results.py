"""Tensors for the results of the op: fresh ones in q's stride order, and the answers to zero sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyflash.operands import DIFFERENTIABLE
from polyflash.spec import Arguments
from polyflash.storages import span

# Room for the statistics of a call, None for what was not asked for: column_sums, entropy, max_logit.
Room = tuple[Tensor | None, Tensor | None, Tensor | None]


def empty_in_order_of(like: Tensor, head_dim: int, kind: torch.dtype | None = None) -> Tensor:
    """An empty (batch, heads, seqlen, head_dim) in the dense stride order of `like`, if it has one, and in
    its dtype or in `kind`."""
    batch, heads, seqlen, _ = like.shape
    kind = kind or like.dtype
    if like.is_contiguous():
        return like.new_empty((batch, heads, seqlen, head_dim), dtype=kind)
    strides = like.stride()
    if strides[3] != 1 or 0 in strides:
        return like.new_empty((batch, heads, seqlen, head_dim), dtype=kind)
    order = sorted(range(3), key=lambda d: strides[d], reverse=True)
    dense = like.new_empty((*(like.shape[d] for d in order), head_dim), dtype=kind)
    return dense.permute(*(order.index(d) for d in range(3)), 3)


def empty_of(device: torch.device) -> Callable[..., Tensor]:
    """Makes an empty tensor of a shape, strides and a dtype on `device`, which is current, as compiled graphs
    do: `torch.empty_strided` passes the dispatcher and takes twice as long."""
    found = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if found is not None:
        return found  # type: ignore[no-any-return]
    return lambda shape, strides, kind: torch.empty_strided(shape, strides, dtype=kind, device=device)


NO_LSE = torch.empty(0, device="cpu")  # of any device's calls; whatever the default device is now


def outputs(q: Tensor, head_dim_v: int, need_lse: bool) -> tuple[Tensor, Tensor]:
    """Room for out (batch, num_q_heads, seqlen_q, head_dim_v) and its lse; `NO_LSE` if unwanted."""
    same = q.shape[3] == head_dim_v and q.is_contiguous()
    out = torch.empty_like(q) if same else empty_in_order_of(q, head_dim_v)
    if not need_lse:
        return out, NO_LSE
    if q.dtype is torch.float32 or q.dtype is torch.float64:
        return out, q.new_empty(q.shape[:3])
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def apart(out: Tensor, others: Iterable[Any]) -> bool:
    """Does no byte between the first and the last of `out` lie between those of another tensor? Storages
    would not tell: one buffer may stand behind several (numpy, DLPack)."""
    first = out.data_ptr()
    end = first + span(out)
    for x in others:
        if isinstance(x, Tensor):
            start, size = x.data_ptr(), span(x)
            if start < end and first < start + size and size > 0:
                return False
    return True


def converted(x: Tensor, kind: torch.dtype) -> Tensor:
    """`x` in another float dtype; what is finite stays finite."""
    result = x.to(kind)
    if x.dtype is torch.float64 and kind is torch.float32:
        top = torch.finfo(kind).max
        return torch.where(x.isfinite(), result.clamp(-top, top), result)
    return result


def no_keys(out: Tensor, lse: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """Zero sizes: every row is empty. A sink, if there is one, is the whole denominator of a row that belongs
    to a request."""
    out.zero_()
    if args.need_lse:
        lse.fill_(-torch.inf)
        if args.sinks is not None:
            lse.copy_(converted(args.sinks, lse.dtype)[None, :, None].expand_as(lse))
            lse.masked_fill_(~owned(args, lse.shape[2], lse.device), -torch.inf)
    return out, lse


def without_pages(k: Tensor, args: Arguments) -> bool:
    """Has a paged call an empty pool, or a table without columns?"""
    return args.page_table is not None and (k.shape[0] == 0 or args.page_table.shape[1] == 0)


def owned(args: Arguments, rows: int, device: torch.device) -> Tensor:
    """A mask of the rows that belong to a request: all but those beyond the last packed member."""
    if args.cu_seqlens_q is None:
        return torch.ones(rows, dtype=torch.bool, device=device)
    return torch.arange(rows, device=device) < args.cu_seqlens_q[-1]


_SUMMED = (0, 1, 2, 3 + DIFFERENTIABLE.index("sinks"))  # operands that several calls may share


def gradient_kinds(likes: tuple[Any, ...], args: Arguments) -> tuple[torch.dtype | None, ...]:
    """The dtype of the gradient of each differentiable operand: its own; with `wide_gradients` that of q,
    k, v and sinks is no narrower than their sums."""
    sums = torch.float64 if likes[0].dtype is torch.float64 else torch.float32
    kinds = [None if x is None else x.dtype for x in likes]
    for i in _SUMMED if args.wide_gradients else ():
        if (kind := kinds[i]) is not None:
            kinds[i] = torch.promote_types(kind, sums)
    return tuple(kinds)


def empty_gradients(likes: tuple[Any, ...], args: Arguments, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """One fresh tensor per differentiable operand; those not asked for have no elements."""
    fresh = []
    kinds = gradient_kinds(likes, args)
    for i, (like, kind, need) in enumerate(zip(likes, kinds, needs, strict=True)):
        if like is None or not need:
            fresh.append(torch.empty(0, device=likes[0].device))
        elif i < 3:
            fresh.append(empty_in_order_of(like, like.shape[3], kind))
        else:
            fresh.append(like.new_empty(like.shape, dtype=kind))
    return tuple(fresh)


def no_gradients(
    likes: tuple[Any, ...], dlse: Tensor | None, args: Arguments, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The gradients of zero sizes: those of the lse reach the sinks, which are the whole denominator."""
    results = empty_gradients(likes, args, needs)
    for result in results:
        result.zero_()
    at = _SUMMED[-1]
    if needs[at] and args.sinks is not None and dlse is not None:
        dlse = dlse.masked_fill(~owned(args, dlse.shape[2], dlse.device), 0.0)
        results[at].copy_(dlse.sum(dim=(0, 2)))
    return results


def settled(
    gradients: tuple[Tensor | None, ...], likes: tuple[Any, ...], args: Arguments, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    """A row's gradients with the strides the op promises, copied where it chose others."""
    promised = empty_gradients(tuple(x.to("meta") if x is not None else x for x in likes), args, needs)
    results = []
    for gradient, need, like, x in zip(gradients, needs, likes, promised, strict=True):
        if not need or like is None or gradient is None:
            gradient = torch.empty(0, device=likes[0].device)
        elif gradient.stride() != x.stride() or gradient.dtype is not x.dtype:
            gradient = torch.empty_like(x, device=gradient.device).copy_(gradient)
        results.append(gradient)
    return tuple(results)
