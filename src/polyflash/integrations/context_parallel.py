"""torch's experimental `context_parallel` region over `polyflash.parallel`: models that call
`scaled_dot_product_attention` run with their sequence spread over a mesh, on CPUs too.

    from polyflash.integrations.context_parallel import context_parallel

    with context_parallel(mesh, buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        loss = model(tokens, labels)        # its rows alone
        loss.backward()

Names and arguments are torch's (`torch.distributed.tensor.experimental`); `order` and `method` are ours."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from polyflash import parallel
from polyflash.errors import UnsupportedError, spec_error
from polyflash.integrations.sdpa import Override
from polyflash.parallel.api import Method, Order


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Collection[Tensor] = (),
    order: Order = "zigzag",
    method: Method | None = None,
) -> Iterator[None]:
    """A region in which buffers hold this rank's rows and attention is that of the whole sequence.

    Every `torch.nn.functional.scaled_dot_product_attention` of this thread becomes a call of
    `polyflash.parallel.attention`. `is_causal` is aligned top-left, as torch has it. Run the backward pass
    inside, as checkpoints call attention there.

    Args:
        mesh: a DeviceMesh; see `polyflash.parallel.attention`.
        buffers: tensors without gradient, whole on every rank: each becomes its shard in place.
        buffer_seq_dims: the dimension of the rows of each.
        no_restore_buffers: those of `buffers` that need not be whole again after the region.

    Raises:
        SpecError: not one dimension per buffer; a buffer that needs a gradient.
        UnsupportedError: in the region, for attn_mask, whose shape would be a square of the whole sequence,
            and `nn.MultiheadAttention`, which builds such masks. Dropout draws its seed on every rank, whose
            generators must stand alike."""
    if len(buffers) != len(buffer_seq_dims):
        wanted = f"{len(buffers)}, one per buffer"
        raise spec_error("buffer_seq_dims", len(buffer_seq_dims), wanted, "Give the dimension of the rows.")
    for x in buffers:
        if x.requires_grad:
            change = "Shard activations by polyflash.parallel.split()."
            raise spec_error("buffers", "requires_grad=True", "tensors without gradient", change)
    kept = {id(x) for x in no_restore_buffers}
    whole = [None if id(x) in kept else x.clone() for x in buffers]
    for x, dim in zip(buffers, buffer_seq_dims, strict=True):
        own = parallel.split(x, mesh=mesh, dim=dim, order=order)
        x.resize_(own.shape).copy_(own)
    try:
        with _Region(partial(_attend, mesh, order, method)):
            yield
    finally:
        for x, before in zip(buffers, whole, strict=True):
            if before is not None:
                x.resize_(before.shape).copy_(before)


class _Region(Override):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.multi_head_attention_forward:
            text = "context_parallel: nn.MultiheadAttention takes masks of whole sequences"
            raise UnsupportedError(f"{text}. Call scaled_dot_product_attention() in its place")
        return super().__torch_function__(func, types, args, kwargs)


def _attend(
    mesh: Any,
    order: Order,
    method: Method | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None:
        text = "context_parallel: attn_mask belongs to the rows of one device"
        raise UnsupportedError(f"{text}. Call polyflash.parallel.attention() with window= or a Mask")
    how: dict[str, Any] = {"mesh": mesh, "order": order, "method": method, "scale": scale}
    how |= {"dropout_p": dropout_p, "causal": "top_left" if is_causal else False}
    return over_ranks(query, key, value, enable_gqa, how)


def over_ranks(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, how: dict[str, Any]) -> Tensor:
    """`polyflash.parallel.attention` with the options `how`; heads are grouped only if that is said."""
    heads = 2 if how.get("layout") == "bshd" else 1
    if q.shape[heads] != k.shape[heads] and not enable_gqa:
        change = "enable_gqa=True groups query heads."
        raise spec_error("key heads", k.shape[heads], q.shape[heads], change)
    out = parallel.attention(q, k, v, **how)
    return out if isinstance(out, Tensor) else out.out


__all__ = ("context_parallel",)
