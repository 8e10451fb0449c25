"""First derivatives of the op, at any level of torch.func, and clear refusals of all others.

Plain eager calls have their own, cheaper node in `torch_ops`. Here are the nodes of the ops themselves, for
calls under a transform and for compiled and exported graphs."""

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
from polyflash.operands import DIFFERENTIABLE
from polyflash.spec import Arguments
from polyflash.transforms import N_FIRST

_DIFFERENTIABLE = (0, 1, 2, *(N_FIRST + Arguments._fields.index(name) for name in DIFFERENTIABLE))
_NEED_LSE = N_FIRST + Arguments._fields.index("need_lse")
_SLOPES = N_FIRST + Arguments._fields.index("alibi_slopes")

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


class _Node(_SingleLevelFunction):
    """The op's own node, for one level of torch.func or for plain autograd. Inputs are all those of the op,
    with `need_lse` on."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., tuple[Tensor, Tensor]], *inputs: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():  # the level of torch.func below has a graph of its own
            out, lse = below(*inputs)
        if ctx.needs_input_grad[1 + _SLOPES]:  # shows only here if they are mapped
            raise validate.constant_slopes()
        ctx.set_materialize_grads(False)
        ctx.tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.scalars = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(inputs[i] for i in ctx.tensors), out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        inputs = list(ctx.scalars)
        for i, x in zip(ctx.tensors, tensors, strict=True):
            inputs[i] = x
        needs = [ctx.needs_input_grad[1 + i] for i in _DIFFERENTIABLE]
        if dout is None:
            dout = torch.zeros_like(out)
        results = torch.ops.polyflash.attention_backward.default(
            dout, dlse, *inputs[:N_FIRST], out, lse, needs, *inputs[N_FIRST:]
        )
        gradients: list[Tensor | None] = [None] * len(inputs)
        for i, need, result in zip(_DIFFERENTIABLE, needs, results, strict=True):
            gradients[i] = result if need else None
        return None, *gradients


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


def node_of_forward(op: Any) -> Callable[..., Any]:
    """The kernel of `op` for the dispatcher's Autograd key. Without `need_lse` the lse is kept for the
    gradients and is no result."""

    def kernel(keyset: Any, *given: Any) -> tuple[Tensor, Tensor]:
        refuse_tangents(given)
        if not _is_differentiated(given):
            return _below(op, keyset)(*given)
        inputs = [*given, *Arguments()[len(given) - N_FIRST :]]
        refuse_inference_only(Arguments(*inputs[N_FIRST:]))
        wanted, inputs[_NEED_LSE] = inputs[_NEED_LSE], True
        out, lse = _enter(_Node, _below(op, keyset), inputs)
        return out, lse if wanted else given[0].new_empty(0)

    return kernel


def node_of_backward(op: Any) -> Callable[..., Any]:
    """The kernel of the backward op for the dispatcher's Autograd key."""

    def kernel(keyset: Any, *given: Any) -> tuple[Tensor, ...]:
        refuse_tangents(given)
        below = _below(op, keyset)
        return _enter(_LastNode, below, given) if _is_differentiated(given) else below(*given)

    return kernel


def _is_differentiated(inputs: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)


def _below(op: Any, keyset: Any) -> Callable[..., Any]:
    """`op` without autograd."""

    def redispatch(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    return redispatch


def _enter(node: Any, below: Callable[..., Any], inputs: Any) -> Any:
    if peek_interpreter_stack() is None:
        return node.apply(below, *inputs)
    with enable_single_level_autograd_function():  # the dispatcher is at one level of torch.func now
        return node.apply(below, *inputs)
