"""Gradients and vmap of the op, where the dispatcher or torch.func transforms it.

First derivatives exist at any level of torch.func and in graphs; all others are refused. Plain eager calls
make the op's node themselves, in `torch_ops`. Under vmap the mapped dimension becomes part of the batch, one
launch, where every operand may have an entry per request. Packed members, pages, bounds of rows, sinks of
their own and dropout (whose counter knows the batch index) are run sample by sample. Both give what a loop
over the samples gives."""

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
from polyflash.operands import BY_NAME, DIFFERENTIABLE, OPERANDS, TENSORS, differentiable
from polyflash.quant.calls import in_op
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
        raise UnsupportedError(f"a call with row_bounds {INFERENCE_ONLY}")


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
        if args.codes:
            k, v, args, _ = in_op(q, k, v, args)
        if args.alibi_slopes is not None and args.alibi_slopes.requires_grad:  # shows only here if mapped
            raise validate.constant_slopes()
        with_lse = args._replace(need_lse=True)
        out, lse = _enter(node, q, k, v, args.bias, args.sinks, (with_lse, below, None, False, True))
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


# vmap

N_FIRST = 3  # q, k, v come before Arguments
_N_FIRST_BACKWARD = 8  # dout, dlse, q, k, v, out, lse, needs

Dims = tuple[Any, ...]
Mapped = tuple[tuple[Tensor, ...], tuple[int | None, ...]]  # results, and their mapped dimensions


def map_forward(info: Any, in_dims: Dims, *inputs: Any) -> Mapped:
    """vmap of the op over `info.batch_size` samples."""
    size, apply = info.batch_size, torch.ops.polyflash.attention.default
    args, dims = _arguments(inputs[N_FIRST:], in_dims[N_FIRST:])
    if _sample_by_sample(args, dims):
        return _loop(size, in_dims, inputs, apply)
    batch = _without(inputs[0], in_dims[0])[0]
    first = [_fold(x, dim, size) for x, dim in zip(inputs[:N_FIRST], in_dims, strict=False)]
    out, lse = apply(*first, *_fold_arguments(args, dims, size, batch))
    if not args.need_lse:
        return (out.unflatten(0, (size, batch)), lse), (0, None)
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


def map_backward(info: Any, in_dims: Dims, *inputs: Any) -> Mapped:
    """vmap of the backward op: every gradient asked for is one per sample, of shared operands too."""
    size, apply = info.batch_size, torch.ops.polyflash.attention_backward.default
    q, k, v, needs = *inputs[2:5], inputs[7]
    args, dims = _arguments(inputs[_N_FIRST_BACKWARD:], in_dims[_N_FIRST_BACKWARD:])
    batch = _without(q, in_dims[2])[0]
    one_by_one = _sample_by_sample(args, dims)
    for name, need in zip(DIFFERENTIABLE, needs[N_FIRST:], strict=True):
        x, dim, operand = getattr(args, name), getattr(dims, name), BY_NAME[name]
        if x is None or not need:
            continue
        shape = _without(x, dim)
        per_request = batch == 1 or (len(shape) == len(operand.axes) and shape[0] == batch)
        if operand.vmap != "batch" or not per_request:
            one_by_one = True
        elif dim is None:  # every sample has a gradient of its own
            args = args._replace(**{name: x.unsqueeze(0).expand(size, *x.shape)})
            dims = dims._replace(**{name: 0})
    if one_by_one:
        return _loop(size, in_dims, inputs, apply)
    given = zip(inputs[:7], in_dims[:7], strict=True)
    first = [None if x is None else _fold(x, dim, size) for x, dim in given]
    results = apply(*first, needs, *_fold_arguments(args, dims, size, batch))
    likes = differentiable(q, k, v, args)
    of_likes = (*in_dims[2:5], *differentiable(None, None, None, dims)[N_FIRST:])
    return (
        tuple(
            x.reshape(size, *_without(like, dim)) if need and like is not None else x
            for x, like, dim, need in zip(results, likes, of_likes, needs, strict=True)
        ),
        tuple(0 if need and like is not None else None for like, need in zip(likes, needs, strict=True)),
    )


def _arguments(given: tuple[Any, ...], dims: Dims) -> tuple[Arguments, Any]:
    """The arguments of a call, and the mapped dimension of each."""
    args = Arguments(*given)
    return args, Arguments._make((*dims, *(None,) * len(args))[: len(args)])


def _sample_by_sample(args: Arguments, dims: Any) -> bool:
    """Is there an operand that one launch cannot have an entry of per sample?"""
    return any(
        (x.vmap == "loop" and x.given(value)) or (x.vmap == "loop if mapped" and dim is not None)
        for x, value, dim in zip(OPERANDS, args, dims, strict=True)
    )


def _without(x: Tensor, dim: int | None) -> list[int]:
    """The shape of one sample."""
    return [n for d, n in enumerate(x.shape) if dim is None or d != dim % x.ndim]


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(batch, ...) per sample or for all -> (size·batch, ...)."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _fold_arguments(args: Arguments, dims: Any, size: int, batch: int) -> Arguments:
    folded: dict[str, Any] = {}
    for operand in TENSORS:
        x = getattr(args, operand.name)
        if operand.vmap == "batch" and x is not None:
            rank = len(operand.axes)
            folded[operand.name] = _fold_broadcast(x, getattr(dims, operand.name), size, batch, rank)
    return args._replace(**folded)


def _fold_broadcast(x: Tensor, dim: int | None, size: int, batch: int, rank: int) -> Tensor:
    """An operand of `rank` dimensions whose first, the batch, may be 1 or missing: it stays so if all samples
    share it."""
    if dim is None:
        shared = x.ndim < rank or x.shape[0] != batch
        return x if shared else _fold(x, None, size)
    x = x.movedim(dim, 0)
    x = x[(slice(None), *(None,) * (rank + 1 - x.ndim))]
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


def _loop(size: int, in_dims: Dims, inputs: tuple[Any, ...], apply: Callable[..., Any]) -> Mapped:
    """Sample by sample; results stacked along a first dimension."""
    dims = (*in_dims, *(None,) * len(inputs))[: len(inputs)]

    def sample(part: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, ...]:
        pairs = zip(inputs, dims, strict=True)
        return apply(*(part(x, dim) if isinstance(dim, int) else x for x, dim in pairs))

    if size == 0:  # the shapes of one of zeros
        one = sample(lambda x, dim: x.new_zeros(_without(x, dim)))
        return tuple(x.new_empty((0, *x.shape)) for x in one), (0,) * len(one)
    samples = [sample(lambda x, dim: x.select(dim, n)) for n in range(size)]  # noqa: B023
    return tuple(torch.stack(column) for column in zip(*samples, strict=True)), (0,) * len(samples[0])
