"""Calls in chunks of batch entries and kv heads, where a tensor is larger than a binding may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.backends.webgpu.calls import entries_of, needed_pages, sizes_of
from polyflash.backends.webgpu.configs import Limits
from polyflash.backends.webgpu.tensor import nbytes_of
from polyflash.errors import UnsupportedError
from polyflash.quant.scheme import codes_of
from polyflash.spec import CODE_TABLES

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.spec import Arguments


class Chunk(NamedTuple):
    """Batch entries [b0, b1), of packed calls all, and kv heads [h0, h1); of pools the pages of these."""

    b0: int
    b1: int
    h0: int
    h1: int
    group: int
    packed: bool
    heads: int  # query heads of the call
    table: Tensor | None = None  # the page numbers of all entries, -1 where nobody looks

    def _own_pages(self) -> tuple[Tensor, Tensor] | None:
        """The pages that these entries need, rising, and their table of places among those."""
        own = self._entries(self.table)
        if own is None:
            return None
        found = own[own >= 0].unique()
        found = found if len(found) else torch.zeros(1, dtype=torch.int64)  # no binding is empty
        return found, torch.searchsorted(found, own.clamp(min=0)).int()

    def of_q(self, x: Tensor) -> Tensor:
        """This chunk's part of a tensor (batch, query heads, ...)."""
        return x[self.b0 : self.b1, self.h0 * self.group : self.h1 * self.group]

    def of_k(self, x: Tensor) -> Tensor:
        x, pages = x[:, self.h0 : self.h1], self._own_pages()
        return x[self.b0 : self.b1] if pages is None else x[pages[0]]

    def _entries(self, x: Tensor | None) -> Tensor | None:
        """This chunk's part of a tensor (batch, ...)."""
        return x if x is None or self.packed else x[self.b0 : self.b1]

    def _heads(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x[..., self.h0 * self.group : self.h1 * self.group]

    def plane(self, x: Tensor) -> Tensor:
        """This chunk's part of what broadcasts to (batch, query heads, rows, keys), as a view of four
        dimensions."""
        x = x[(None,) * (4 - x.ndim)]
        x = x if x.shape[0] == 1 else x[self.b0 : self.b1]
        return x if x.shape[1] == 1 else x[:, self.h0 * self.group : self.h1 * self.group]

    def arguments(self, args: Arguments) -> Arguments:
        slopes = args.alibi_slopes
        own: dict[str, Any] = {
            name: self._entries(getattr(args, name))
            for name in ("kv_lens", "kv_starts", "q_offset", "q_segments", "k_segments")
        }
        planes = (("mask", args.mask), ("bias", args.bias))
        own |= {name: x if x is None else self.plane(x) for name, x in planes}
        own |= {"sinks": self._heads(args.sinks)}
        pages = self._own_pages()
        own |= {} if pages is None else {"page_table": pages[1]}
        tables = ((name, getattr(args, name)) for name in CODE_TABLES)
        own |= {name: x if x is None else self.of_k(x) for name, x in tables}
        own |= {
            "alibi_slopes": self._heads(
                slopes if slopes is None or slopes.ndim == 1 else self._entries(slopes)
            )
        }
        own |= {"dropout_head": self.b0 * self.heads + self.h0 * self.group, "dropout_heads": self.heads}
        return args._replace(**own)


def chunks(q: Tensor, k: Tensor, v: Tensor, args: Arguments, limits: Limits) -> Iterator[Chunk]:
    """The whole call, or its halves' halves until every tensor fits a binding; UnsupportedError if one head
    of one entry does not."""
    group, packed = q.shape[1] // k.shape[1], args.cu_seqlens_q is not None
    whole = Chunk(0, q.shape[0], 0, k.shape[1], group, packed, q.shape[1])
    if args.page_table is not None:
        sizes = sizes_of(q, k, v, args)
        whole = whole._replace(table=needed_pages(sizes, args, entries_of(sizes, args)).long())
    yield from _halved(whole, q, k, v, args, limits)


def _halved(part: Chunk, q: Tensor, k: Tensor, v: Tensor, args: Arguments, limits: Limits) -> Iterator[Chunk]:
    if _fits(part, q, k, v, args, limits):
        yield part
        return
    b, h = (part.b0 + part.b1) // 2, (part.h0 + part.h1) // 2
    if part.b1 - part.b0 > 1:
        halves = part._replace(b1=b), part._replace(b0=b)
    elif part.h1 - part.h0 > 1:
        halves = part._replace(h1=h), part._replace(h0=h)
    else:
        why = f"size: one head of one entry is larger than the {limits.binding_bytes} bytes of a binding"
        change = "Split the rows with q_offset=, or leave backend=None."
        raise UnsupportedError(f"webgpu cannot run this call: {why}. {change}", (("webgpu", (why,)),))
    for half in halves:
        yield from _halved(half, q, k, v, args, limits)


def _fits(part: Chunk, q: Tensor, k: Tensor, v: Tensor, args: Arguments, limits: Limits) -> bool:
    own_q, own_k, own_v = part.of_q(q), *(part.of_k(x.to("meta")) for x in (k, v))
    sizes = [nbytes_of(tuple(x.shape), x.dtype) for x in (own_q, own_k, own_v)]
    coded = codes_of(args.codes)[1] if args.codes else None
    channels = v.shape[3] * (1 if coded is None else coded.packed)
    sizes.append(nbytes_of((*own_q.shape[:3], channels), q.dtype))
    operands = part.arguments(args)
    planes = (operands.mask, operands.bias)
    sizes.append(sum(x.numel() * (4 if x.is_floating_point() else 1) for x in planes if x is not None))
    sizes += [4 * sum(0 if x is None else x.numel() for x in both) for both in _tables_of(operands)]
    most = max(own_q.shape[0], own_q.shape[1])
    return max(sizes) <= limits.binding_bytes and most <= limits.workgroups


def _tables_of(args: Arguments) -> tuple[tuple[Tensor | None, Tensor | None], ...]:
    """The tables of k's codes, and of v's: each pair lies in one buffer."""
    return (args.k_scale, args.k_shift), (args.v_scale, args.v_shift)
