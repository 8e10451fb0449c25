"""First derivatives of the op, at any level of torch.func, and clear refusals of all others.

Plain eager calls have their own, cheaper node in `torch_ops`. Here are the two forms torch.func knows: an
autograd Function with `setup_context` and `vmap`, which an eager call under a transform takes, and the nodes
of the ops themselves, which compiled and exported graphs take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from polyflash import transforms, validate
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


def call(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """The op while a torch.func transform is active. The lse is always made: that a tensor needs a gradient
    does not show on the outside of a mapped one."""
    return _Attention.apply(q, k, v, *args._replace(need_lse=True))


def _refuse_highest(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(HIGHEST)


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise UnsupportedError(FORWARD_MODE)


class _Attention(torch.autograd.Function):
    """`polyflash::attention` as torch.func takes it."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.polyflash.attention.default(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        save(ctx, inputs, *output, ctx.needs_input_grad)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients(ctx, dout, dlse, _AttentionBackward.apply)

    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return transforms.map_forward(info.batch_size, in_dims, inputs, _Attention.apply)


class _AttentionBackward(torch.autograd.Function):
    """`polyflash::attention_backward` as torch.func takes it."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return torch.ops.polyflash.attention_backward.default(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to save."""

    backward = staticmethod(_refuse_highest)
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return transforms.map_backward(info.batch_size, in_dims, inputs, _AttentionBackward.apply)


class _Node(_SingleLevelFunction):
    """The op's own node, for one level of torch.func or for plain autograd. Inputs are all those of the op,
    with `need_lse` on."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., tuple[Tensor, Tensor]], *inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = below(*inputs)
        save(ctx, inputs, out, lse, ctx.needs_input_grad[1:])
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        op = torch.ops.polyflash.attention_backward.default
        return None, *gradients(ctx, dout, dlse, op, ctx.needs_input_grad[1:])


class _LastNode(_SingleLevelFunction):
    """The node of the backward op: whoever differentiates it is refused."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:
        return below(*inputs)

    backward = staticmethod(_refuse_highest)


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


def save(ctx: Any, inputs: tuple[Any, ...], out: Tensor, lse: Tensor, needed: tuple[bool, ...]) -> None:
    """Keeps the op's inputs and results for `gradients`, tensors where autograd sees them. That slopes need a
    gradient shows only here if they are mapped."""
    if needed[_SLOPES]:
        raise validate.constant_slopes()
    if any(needed):
        refuse_inference_only(Arguments(*inputs[N_FIRST:]))
    tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(inputs[i] for i in tensors), out, lse)
    ctx.tensors = tensors
    ctx.scalars = [None if isinstance(x, Tensor) else x for x in inputs]


def gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, apply: transforms.Apply,
    needed: tuple[bool, ...] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """One gradient or None per input of the op, by its backward op."""
    *tensors, out, lse = ctx.saved_tensors
    inputs = list(ctx.scalars)
    for i, x in zip(ctx.tensors, tensors, strict=True):
        inputs[i] = x
    needed = ctx.needs_input_grad if needed is None else needed
    needs = [bool(needed[i]) for i in _DIFFERENTIABLE]
    if dout is None:
        dout = torch.zeros_like(out)
    results = apply(dout, dlse, *inputs[:N_FIRST], out, lse, needs, *inputs[N_FIRST:])
    found: list[Tensor | None] = [None] * len(inputs)
    for i, need, result in zip(_DIFFERENTIABLE, needs, results, strict=True):
        if need:
            found[i] = result
    return tuple(found)
