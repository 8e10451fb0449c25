"""First derivatives of the op, at any level of torch.func, and clear refusals of all others.

Plain eager calls make the op's node themselves, in `torch_ops`. Here the dispatcher makes it: for calls under
a transform, and in compiled and exported graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from polyflash import validate
from polyflash.errors import UnsupportedError
from polyflash.spec import Arguments

HIGHEST = (
    "second derivatives: polyflash has first ones only, its backward pass is not differentiable. Drop "
    "create_graph=True or the outer torch.func transform, or use torch SDPA's math backend there"
)
FORWARD_MODE = (
    "forward-mode AD: polyflash has reverse-mode gradients only. Use torch.autograd.grad, or torch.func.vjp "
    "and jacrev in the place of jvp and jacfwd"
)

INFERENCE_ONLY = (
    "has no gradients: it is for inference. Use torch.no_grad() or .detach(); to train, call attention() or "
    "attention_varlen() on contiguous keys"
)


class _LastNode(_SingleLevelFunction):
    """The node of the backward op: whoever differentiates it is refused."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return below(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(HIGHEST)


def refuse_tangents(inputs: Iterable[Any]) -> None:
    """Raises if a tensor carries a tangent of forward-mode AD, which would be lost."""
    if forward_ad._current_level >= 0:
        for x in inputs:
            if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                raise UnsupportedError(FORWARD_MODE)


def refuse_inference_only(args: Arguments) -> None:
    """Raises for a call that needs a gradient and has operands of inference alone."""
    if args.page_table is not None:
        raise UnsupportedError(f"paged attention {INFERENCE_ONLY}")
    if args.row_bounds is not None:
        raise UnsupportedError(f"attention_groups {INFERENCE_ONLY}")


def node_of_forward(op: Any, node: Any) -> Callable[..., Any]:
    """The kernel of `op` for the dispatcher's Autograd key, with `node` in the graph. Without `need_lse` the
    lse is kept for the gradients and is no result."""

    def kernel(keyset: Any, *given: Any) -> tuple[Tensor, Tensor]:
        refuse_tangents(given)
        below = _below(op, keyset)
        if not _is_differentiated(given):
            return below(*given)
        q, k, v, *rest = given
        args = Arguments(*rest)
        refuse_inference_only(args)
        if args.alibi_slopes is not None and args.alibi_slopes.requires_grad:  # shows only here if mapped
            raise validate.constant_slopes()
        with_lse = args._replace(need_lse=True)
        out, lse = _enter(node, q, k, v, args.bias, args.sinks, with_lse, below, None, False, True)
        return out, lse if args.need_lse else q.new_empty(0)

    return kernel


def node_of_backward(op: Any) -> Callable[..., Any]:
    """The kernel of the backward op for the dispatcher's Autograd key."""

    def kernel(keyset: Any, *given: Any) -> tuple[Tensor, ...]:
        refuse_tangents(given)
        below = _below(op, keyset)
        return _enter(_LastNode, below, *given) if _is_differentiated(given) else below(*given)

    return kernel


def _is_differentiated(inputs: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)


def _below(op: Any, keyset: Any) -> Callable[..., Any]:
    """`op` without autograd at this level of torch.func; the one below has a graph of its own."""

    def redispatch(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    return redispatch


def _enter(node: Any, *inputs: Any) -> Any:
    if peek_interpreter_stack() is None:
        return node.apply(*inputs)
    with enable_single_level_autograd_function():  # the dispatcher is at one level of torch.func now
        return node.apply(*inputs)
