"""The tensors of a call as the kernels take them: named tuples of a pointer and element strides.

A broadcast dimension has stride 0. What a call does not have is None, and the code for it is not compiled.
Scalars that change from call to call are arguments of their own, so that no value of theirs is compiled in.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from polyflash.results import converted

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.spec import Arguments

SOFTCAPS = (2.0**-126, 1e30)  # beyond, float32 loses the quotient or the product; scores are 0, or not capped
FAR = 2**31 - 1  # as good as infinite for positions, which end before it
LOG2E = 1.4426950408889634


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
    """What broadcasts to (batch, query heads, rows, keys)."""

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


NO_OPERANDS = Operands()


class Numbers(NamedTuple):
    """`n` of a kernel: plain numbers of one call, none of which is compiled in; None: not taken."""

    batch: int  # entries, members or requests
    seqlen_q: int  # rows of the q tensor
    seqlen_k: int  # keys of the k tensor, or of a full row of the page table
    num_tiles: Any = None
    num_splits: Any = None
    split_keys: Any = None
    total: Any = None  # tiles of all heads and requests
    offset: Any = None
    left: Any = None
    right: Any = None
    scale: Any = None
    softcap: Any = None
    factor: Any = None  # of scores in the exponent
    seed_lo: Any = None  # the bits of 32-bit words as signed numbers: a type of their own would
    seed_hi: Any = None  # compile anew
    drop_below: Any = None  # words below it drop a weight
    keep_scale: Any = None


class Constants(NamedTuple):
    """`c` of a kernel: what is compiled in."""

    D: int = 0  # channels, in blocks of powers of two
    D0: int = 0
    D1: int = 0
    DV: int = 0
    DV0: int = 0
    DV1: int = 0
    BLOCK_M: int = 0  # rows of a tile, and keys
    BLOCK_N: int = 0
    NUM_STAGES: int = 1
    AGAIN_STAGES: int = 1  # of a second pass
    PACK: bool = False  # the query heads of a key/value head are rows of one tile
    HAS_OFFSET: bool = False  # an int; else rows end where the keys end
    HAS_LEFT: bool = False
    HAS_RIGHT: bool = False
    NEGATIVE: bool = False  # scale < 0: Q is turned round
    CHANGED: bool = False  # scores are changed before the softmax, so they are scaled one by one
    SOFTCAP: bool = False
    DROPOUT: bool = False
    BELOW: bool = True  # some row may begin behind key 0
    ALWAYS_MASKED: bool = False  # any pair of a block may be hidden, whatever lengths and distances say
    WHOLE: bool = False  # rows see every key of every block
    EXACT: bool = False  # float32
    FINITE: bool = True
    FUSED: bool = False  # see `weights`
    BASE2: bool = True
    PRODUCT: str = "ieee"
    SPLIT_EXP: int = 1
    LAZY: bool = False
    LATE_SUM: bool = False
    COMPENSATE: bool = True
    THREADS: int = 0  # of a program on NVIDIA
    HOLD_Q: bool = False
    MASK_ADD: bool = False
    HEAVY_FIRST: bool = False
    DESCRIPTOR: bool = False
    CACHE: str = ""
    SPLIT: bool = False
    PERSISTENT: bool = False
    LINEAR: bool = False  # a grid of one dimension
    OVER_ROWS: bool = False  # sums of a bias
    OVER_KEYS: bool = False
    LAYOUT: int = 0  # of the tuples: another is another kernel


class Flags(NamedTuple):
    """Constants that the numbers of a call decide."""

    HAS_OFFSET: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    NEGATIVE: bool
    CHANGED: bool
    SOFTCAP: bool
    DROPOUT: bool


def view(x: Tensor | None) -> Any:
    return None if x is None else tuple.__new__(View, (x, *x.stride()))


def rows(x: Tensor | None) -> Any:
    return None if x is None else tuple.__new__(Rows, (x, *x.stride()))


def plane(x: Tensor) -> Plane:
    """Dimensions in front are added, and those of size 1 get stride 0."""
    x = x[(None,) * (4 - x.ndim)]
    if x.dtype is torch.bool:
        x = x.view(torch.int8)
    strides = (0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
    return Plane(x, *strides)


def operands(args: Arguments, k: Tensor) -> Operands:
    """The optional tensors of a call; float operands keep their dtype."""
    slopes, lists, table, bounds = args.alibi_slopes, args.intervals, args.page_table, args.row_bounds
    return Operands(
        kv_lens=_dense(args.kv_lens),
        kv_starts=_dense(args.kv_starts),
        q_offset=_dense(args.q_offset),
        mask=None if args.mask is None else plane(args.mask),
        bias=None if args.bias is None else plane(_narrow(args.bias)),
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


def sizes(q: Tensor, k: Tensor, args: Arguments) -> tuple[int, int, int]:
    """batch, seqlen_q and seqlen_k, the first of `Numbers`."""
    batch, seqlen_k = q.shape[0], k.shape[2]
    if args.cu_seqlens_q is not None:
        batch = args.cu_seqlens_q.shape[0] - 1
    if args.page_table is not None:
        seqlen_k *= args.page_table.shape[1]
    return batch, q.shape[2], seqlen_k


def scalars(q: Tensor, k: Tensor, args: Arguments) -> Numbers:
    """The numbers of a call that say nothing of its grid."""
    seed = 0 if args.dropout_seed is None else int(args.dropout_seed)
    return Numbers(
        *sizes(q, k, args),
        offset=_near(args.offset),
        left=_near(args.window_left),
        right=0 if args.causal else _near(args.window_right),
        scale=scale_of(q, args),
        softcap=min(max(args.softcap, SOFTCAPS[0]), SOFTCAPS[1]) if args.softcap else 0.0,
        seed_lo=_signed(seed),
        seed_hi=_signed(seed >> 32),
        drop_below=_signed(math.floor(args.dropout_p * 2.0**32)),  # of p = 1 nothing: what is kept counts 0
        keep_scale=1.0 / (1.0 - args.dropout_p) if args.dropout_p < 1.0 else 0.0,
    )


def _near(x: int | None) -> int:
    return 0 if x is None else max(-FAR, min(x, FAR))


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def scale_of(q: Tensor, args: Arguments) -> float:
    return 1.0 / math.sqrt(q.shape[3]) if args.scale is None else args.scale


def flags(q: Tensor, args: Arguments) -> Flags:
    scale = scale_of(q, args)
    changed = args.softcap != 0.0 or args.bias is not None or args.alibi_slopes is not None
    return Flags(
        HAS_OFFSET=args.offset is not None,
        HAS_LEFT=args.window_left is not None,
        HAS_RIGHT=args.causal or args.window_right is not None,
        NEGATIVE=scale < 0 and not changed,
        CHANGED=changed or scale == 0.0,
        SOFTCAP=args.softcap != 0.0,
        DROPOUT=args.dropout_p != 0.0,
    )


def describable(x: Tensor) -> bool:
    """May blocks of rows be loaded by tensor descriptor, if the tensor starts at 16 bytes? Rows must be dense
    and multiples of that apart, less than the 40 bits that the hardware's have."""
    size = x.element_size()
    return x.stride(3) == 1 and all(0 < s * size < 1 << 40 and s * size % 16 == 0 for s in x.stride()[:3])


def descriptors(x: Tensor, rows: int, first: int, second: int) -> tuple[Any, Any]:
    """Of both channel blocks of (batch, heads, seqlen, channels): boxes of `rows` rows; what lies outside
    is 0. `describable` has checked what their class would check again in every call."""
    shape, strides = list(x.shape), list(x.stride())
    return (
        _descriptor(x, shape, strides, [1, 1, rows, first]),
        _descriptor(x, shape, strides, [1, 1, rows, second]) if second else None,
    )


def _descriptor(x: Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape, made.padding = x, shape, strides, box, "zero"
    return made
