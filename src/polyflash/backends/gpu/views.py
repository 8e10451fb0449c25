"""The tensors of a call as the kernels of every GPU engine take them: named tuples of a pointer and element
strides.

A broadcast dimension has stride 0. What a call does not have is None, and the code for it is not compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.results import converted

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.spec import Arguments

FAR = 2**31 - 1  # as far as the 32 bits of offsets inside a row reach


class View(NamedTuple):
    """(batch, heads, seqlen, channels); pages are the batch of a pool."""

    p: Any
    b: Any
    h: Any
    s: Any
    d: Any


class Rows(NamedTuple):
    """One float32 per row: (batch, heads, seqlen)."""

    p: Any
    b: Any
    h: Any
    s: Any


class Plane(NamedTuple):
    """An operand that broadcasts to (batch, query heads, rows, keys)."""

    p: Any
    b: Any
    h: Any
    q: Any
    k: Any


class Ids(NamedTuple):
    """int32 (batch, seqlen)."""

    p: Any
    b: Any
    s: Any


class Slopes(NamedTuple):
    """(batch, query heads); stride 0 if they are the same for every request."""

    p: Any
    b: Any
    h: Any


class Lists(NamedTuple):
    """Interval lists: int32 (batch, query heads, row blocks, intervals, 2)."""

    p: Any
    b: Any
    h: Any
    r: Any
    n: Any
    e: Any
    count: Any  # intervals per row block
    rows: Any  # query rows per row block


class Table(NamedTuple):
    """int32 (requests, columns): which page of the pool holds these keys."""

    p: Any
    b: Any
    c: Any
    pages: Any  # of the pool
    size: Any  # keys per page


class Bounds(NamedTuple):
    """int32 (rows, 2): first and end key of single rows."""

    p: Any
    s: Any
    e: Any


class Operands(NamedTuple):
    """Everything optional that is a tensor."""

    kv_lens: Any = None
    kv_starts: Any = None
    q_offset: Any = None
    mask: Plane | None = None
    bias: Plane | None = None
    alibi_slopes: Slopes | None = None
    sinks: Any = None
    q_segments: Ids | None = None
    k_segments: Ids | None = None
    intervals: Lists | None = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    page_table: Table | None = None
    row_bounds: Bounds | None = None
    end: None = None  # see `runtime.compile` of Triton


NO_OPERANDS = Operands()


def view_of(x: Tensor | None) -> Any:
    return None if x is None else tuple.__new__(View, (x, *x.stride()))


def rows_of(x: Tensor | None) -> Any:
    return None if x is None else tuple.__new__(Rows, (x, *x.stride()))


def plane_of(x: Tensor) -> Plane:
    """Dimensions in front are added, and those of size 1 get stride 0."""
    x = x[(None,) * (4 - x.ndim)]
    if x.dtype is torch.bool:
        x = x.view(torch.int8)
    strides = (0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
    return Plane(x, *strides)


def operands_of(args: Arguments, k: Tensor) -> Operands:
    """The optional tensors of a call; float operands keep their dtype."""
    slopes, lists, table, bounds = args.alibi_slopes, args.intervals, args.page_table, args.row_bounds
    return Operands(
        kv_lens=_dense(args.kv_lens),
        kv_starts=_dense(args.kv_starts),
        q_offset=_dense(args.q_offset),
        mask=None if args.mask is None else plane_of(args.mask),
        bias=None if args.bias is None else plane_of(_narrow(args.bias)),
        alibi_slopes=None if slopes is None else _slopes(_narrow(slopes)),
        sinks=None if args.sinks is None else _narrow(args.sinks).contiguous(),
        q_segments=None if args.q_segments is None else Ids(args.q_segments, *args.q_segments.stride()),
        k_segments=None if args.k_segments is None else Ids(args.k_segments, *args.k_segments.stride()),
        intervals=None if lists is None else _lists(lists, args.interval_rows),
        cu_seqlens_q=_dense(args.cu_seqlens_q),
        cu_seqlens_k=_dense(args.cu_seqlens_k),
        page_table=None if table is None else _table(table, k),
        row_bounds=None if bounds is None else Bounds(bounds, *bounds.stride()),
    )


def _table(x: Tensor, k: Tensor) -> Table:
    return Table(x, x.stride(0), x.stride(1), k.shape[0], k.shape[2])


def _dense(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.contiguous()


def _narrow(x: Tensor) -> Tensor:
    """Kernels compute in float32; what is finite stays finite."""
    return converted(x, torch.float32) if x.dtype is torch.float64 else x


def _slopes(x: Tensor) -> Slopes:
    return Slopes(x, 0, x.stride(0)) if x.ndim == 1 else Slopes(x, *x.stride())


def _lists(x: Tensor, rows_per_block: int) -> Lists:
    b, h, r, n, e = x.stride()
    entries, heads = x.shape[:2]
    return Lists(x, b if entries > 1 else 0, h if heads > 1 else 0, r, n, e, x.shape[3], rows_per_block)


def reachable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, copied where channels lie too far apart for the 32 bits that offsets inside a row have."""
    return tuple(x if abs(x.stride(3)) * x.shape[3] <= FAR else x.contiguous() for x in tensors)


def element_masked(args: Arguments) -> bool:
    """May any pair of a block be hidden, whatever lengths and distances say?"""
    return not (args.mask is args.bias is args.q_segments is args.intervals is None)
