"""The ops under the statistics of weights: schema, fake tensors and routes, as `torch_ops` has for attention.

They take the lse of an attention call and make its weights again, tile by tile; no gradient flows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyflash import routes, torch_ops, validate
from polyflash.errors import UnsupportedError, spec_error
from polyflash.mask import is_strided
from polyflash.plan import Launch
from polyflash.spec import Arguments, Phase
from polyflash.storages import check_storages

_LIB = torch.library.Library("polyflash", "FRAGMENT")
_LIB.define(f"column_sums(Tensor q, Tensor k, Tensor lse, {torch_ops.ARGUMENTS}) -> Tensor")
_LIB.define(
    f"row_stats(Tensor q, Tensor k, Tensor lse, {torch_ops.ARGUMENTS}) -> (Tensor entropy, Tensor max_logit)"
)
_column_sums = torch.ops.polyflash.column_sums.default
_row_stats = torch.ops.polyflash.row_stats.default


def column_sums(q: Tensor, k: Tensor, lse: Tensor, args: Arguments) -> Tensor:
    """The op on (batch, heads, seqlen, head_dim) and lse (batch, num_q_heads, seqlen_q); returns (batch,
    num_q_heads, seqlen_k)."""
    _refuse_transforms("column_sums")
    with torch.no_grad():
        return _column_sums(q, k, lse, *args)


def row_stats(q: Tensor, k: Tensor, lse: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """Likewise; returns entropy and largest score, both (batch, num_q_heads, seqlen_q)."""
    _refuse_transforms("row_stats")
    with torch.no_grad():
        return _row_stats(q, k, lse, *args)


def _refuse_transforms(name: str) -> None:
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(f"polyflash.{name} has no rule for torch.func: call it outside the transform")


def _check_lse(q: Tensor, lse: Tensor) -> None:
    wanted = torch.float64 if q.dtype is torch.float64 else torch.float32
    shape = tuple(q.shape[:3])
    strided = is_strided(lse)
    if not strided or tuple(lse.shape) != shape or lse.dtype is not wanted or lse.device != q.device:
        raise spec_error(
            "lse",
            got=f"{tuple(lse.shape)} {lse.dtype} on {lse.device}" if strided else f"a {lse.layout} tensor",
            wanted=f"(batch, num_q_heads, seqlen_q) = {shape} {wanted} on {q.device}",
            change="Pass the lse that attention(..., return_lse=True) returned for these rows.",
        )


def _settled(q: Tensor, k: Tensor, lse: Tensor, rest: tuple[Any, ...]) -> tuple[Launch, Arguments]:
    """The launch of a call, and its arguments under the backend in use now."""
    args = Arguments(*rest)
    args = args._replace(backend=routes.requested_backend(args))
    launch = torch_ops._route(Phase.STATISTICS, q, k, k, args, tuple(args))
    _check_lse(q, lse)
    check_storages({"lse": lse})
    return launch, validate.checked_contents(args, q, k) if launch.contents else args


def _column_sums_here(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    launch, args = _settled(q, k, lse, rest)
    sums = _room(lse, k)
    if sums.numel() == 0 or lse.numel() == 0:
        return sums.zero_()
    torch_ops.launched(launch, q, k, lse, sums, None, None, args)
    return sums


def _row_stats_here(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    launch, args = _settled(q, k, lse, rest)
    entropy, max_logit = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    if lse.numel() == 0 or k.shape[2] == 0:
        return entropy.zero_(), max_logit.fill_(-torch.inf)
    torch_ops.launched(launch, q, k, lse, None, entropy, max_logit, args)
    return entropy, max_logit


def _room(lse: Tensor, k: Tensor) -> Tensor:
    return lse.new_empty((lse.shape[0], lse.shape[1], k.shape[2]))


def _checked_statically(q: Tensor, k: Tensor, lse: Tensor, rest: tuple[Any, ...]) -> None:
    args = torch_ops._validated(q, k, k, rest)
    torch_ops._refuse_statically(Phase.STATISTICS, q, k, k, args)
    _check_lse(q, lse)


def _fake_column_sums(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    _checked_statically(q, k, lse, rest)
    return _room(lse, k)


def _fake_row_stats(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _checked_statically(q, k, lse, rest)
    return lse.new_empty(lse.shape), lse.new_empty(lse.shape)


for _name, _body, _fake in (
    ("column_sums", _column_sums_here, _fake_column_sums),
    ("row_stats", _row_stats_here, _fake_row_stats),
):
    _LIB.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"polyflash::{_name}", _fake, lib=_LIB)
