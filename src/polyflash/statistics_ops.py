"""The ops under the statistics of weights: schema, fake tensors and routes, as `torch_ops` has for attention.

They take the lse of an attention call and make its weights again, tile by tile; no gradient flows."""

from __future__ import annotations

from collections.abc import Callable
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
_INPUTS = f"Tensor q, Tensor k, Tensor lse, {torch_ops.ARGUMENTS}"
_LIB.define(f"column_sums({_INPUTS}) -> Tensor")
_LIB.define(f"row_stats({_INPUTS}) -> (Tensor entropy, Tensor max_logit)")


def call(name: str, q: Tensor, k: Tensor, lse: Tensor, args: Arguments) -> tuple[Tensor, ...]:
    """The op on (batch, heads, seqlen, head_dim) and lse (batch, num_q_heads, seqlen_q). Returns the sums,
    (batch, num_q_heads, seqlen_k), or entropy and largest score, both shaped as lse."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(f"polyflash.{name} has no rule for torch.func: call it outside the transform")
    with torch.no_grad():
        results = getattr(torch.ops.polyflash, name).default(q, k, lse, *args)
    return (results,) if isinstance(results, Tensor) else results


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


def _column_sums(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    launch, args = _settled(q, k, lse, rest)
    sums = _room_of_sums(k, lse)
    if sums.numel() == 0 or lse.numel() == 0:
        return sums.zero_()
    torch_ops.launched(launch, q, k, lse, sums, None, None, args)
    return sums


def _row_stats(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    launch, args = _settled(q, k, lse, rest)
    entropy, max_logit = _room_of_stats(k, lse)
    if lse.numel() == 0 or k.shape[2] == 0:
        return entropy.zero_(), max_logit.fill_(-torch.inf)
    torch_ops.launched(launch, q, k, lse, None, entropy, max_logit, args)
    return entropy, max_logit


def _room_of_sums(k: Tensor, lse: Tensor) -> Tensor:
    return lse.new_empty((lse.shape[0], lse.shape[1], k.shape[2]))


def _room_of_stats(k: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return lse.new_empty(lse.shape), lse.new_empty(lse.shape)


def _fake(room: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def fake(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> Any:
        args = torch_ops._validated(q, k, k, rest)
        torch_ops._refuse_statically(Phase.STATISTICS, q, k, k, args)
        _check_lse(q, lse)
        return room(k, lse)

    return fake


for _name, _body, _room in (
    ("column_sums", _column_sums, _room_of_sums),
    ("row_stats", _row_stats, _room_of_stats),
):
    _LIB.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"polyflash::{_name}", _fake(_room), lib=_LIB)
