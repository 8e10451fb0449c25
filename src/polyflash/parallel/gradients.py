"""Gradients of one block of rows and keys: the backward op, entered the cheapest way the moment allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyflash import torch_ops, validate
from polyflash.plan import Launch
from polyflash.routes import is_plain
from polyflash.spec import Arguments, Feature, Phase
from polyflash.storages import stored

_backward_op = torch.ops.polyflash.attention_backward.default


def launch_of(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Launch, Arguments]:
    """Launch that differentiates a call, and its arguments: gradients of 16-bit operands are float32 sums
    where the row hands over such."""
    launch = torch_ops._route(Phase.BACKWARD, q, k, v, args, args)
    if q.element_size() > 2 or Feature.WIDE_GRADIENTS not in launch.row.features:
        return launch, args
    args = args._replace(wide_gradients=True)
    return torch_ops._route(Phase.BACKWARD, q, k, v, args, args), args


def differentiate(
    results: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, args: Arguments, needs: tuple[bool, ...]
) -> tuple[Any, ...]:
    """Gradients of q, k, v, bias and sinks; `results` are dout, dlse, out and lse. The dispatcher is left out
    where it would do nothing: to hand it fifty arguments takes longer than a small call."""
    dout, dlse, out, lse = results
    launch, args = launch_of(q, k, v, args)
    plain = not torch.is_grad_enabled() and torch_ops._skips_dispatcher(q, k, v, args) and stored(*results)
    if not (plain and all(x is None or is_plain(x) for x in results) and out.numel() and k.shape[2]):
        return _backward_op(dout, dlse, q, k, v, out, lse, needs, *args)  # type: ignore[no-any-return]
    if launch.contents:
        args = validate.checked_contents(args, q, k)
    return torch_ops._differentiate(launch, dout, dlse, q, k, v, out, lse, args, needs)
