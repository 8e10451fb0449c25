"""Checks of a call, with messages that teach. Runs before any launch, on real and on fake tensors alike.

A call whose route is known pays for none of the checks of shapes, only for those of operands it has."""

from __future__ import annotations

import math
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polyflash.dtypes import BY_NAME
from polyflash.errors import SpecError, spec_error
from polyflash.mask import FAR_SIDE, checked_window, is_strided
from polyflash.operands import BATCH, HEADS, KEYS, OPERANDS, ROWS, SCORES, TENSORS, Operand
from polyflash.quant import tensor as quantized
from polyflash.quant.scheme import KINDS, codes_of
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = frozenset(getattr(torch, name) for name in BY_NAME)


def check_shapes(q: Any, k: Any, v: Any, paged: bool = False, codes: str = "") -> None:
    """Layouts, ranks, dtypes, devices of q, k, v, and how their sizes fit. If `paged`, k and v are pools
    (num_pages, heads, page_size, head_dim); `codes` say which of them are codes."""
    of_k, of_v = codes_of(codes) if codes else (None, None)
    kinds = {"q": None, "k": of_k, "v": of_v}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise spec_error(name, type(x).__name__, "a torch.Tensor", "Use torch.as_tensor().")
        check_layout(name, x)
        if x.ndim != 4:
            wanted = "4: (batch, heads, seqlen, head_dim), or (batch, seqlen, heads, head_dim) under bshd"
            change = "Use unsqueeze() or view()."
            raise spec_error(name, f"{x.ndim} dimensions {tuple(x.shape)}", wanted, change)
        if kinds[name] is None and x.dtype not in _DTYPES:
            raise spec_error(f"{name} dtype", x.dtype, ", ".join(BY_NAME), "Use .to() before the call.")
    for name, x in (("k", k), ("v", v)):
        coded = kinds[name]
        if coded is not None:
            stored = getattr(torch, KINDS[coded.dtype].storage)
            if x.dtype is not stored:
                raise spec_error(f"{name} dtype", x.dtype, f"{stored} for {coded}", "quantize() makes codes.")
        elif x.dtype is not q.dtype:
            change = "Cast all three to one dtype, or run under torch.autocast."
            raise spec_error(f"{name} dtype", x.dtype, f"{q.dtype}, as q", change)
        if x.device != q.device:
            raise spec_error(f"{name} device", x.device, f"{q.device}, as q", "Move it with .to().")
        if x.shape[0] != q.shape[0] and not paged:
            change = "Expand it: K and V may have batch stride 0."
            raise spec_error(f"{name} batch", x.shape[0], f"{q.shape[0]}, as q", change)
    length = ("v seqlen", "K and V need one length; mask unused keys with kv_lens.")
    if paged:
        length = ("v page_size", "A key and its value stand in the same slot.")
    pages = ("v pages", "A page has one number in both pools.")
    for at, (name, change) in enumerate((pages, ("v heads", "K and V need the same heads."), length)):
        if k.shape[at] != v.shape[at]:
            raise spec_error(name, v.shape[at], f"{k.shape[at]}, as k", change)
    head_dim_k = k.shape[3] * (of_k.packed if of_k else 1)
    if q.shape[3] != head_dim_k:
        change = "Only v may have another head_dim."
        raise spec_error("k head_dim", head_dim_k, f"{q.shape[3]}, as q", change)
    for name, x in (("q", q), ("v", v)):
        if x.shape[3] == 0:
            raise spec_error(f"{name} head_dim", 0, "1 or more", "Drop the call: it has no channels.")
    num_q_heads, num_kv_heads = q.shape[1], k.shape[1]
    if num_q_heads % num_kv_heads if num_kv_heads else num_q_heads:
        got = f"{num_q_heads} query heads over {num_kv_heads} key/value heads"
        wanted = "a whole number of query heads per key/value head"
        change = "Query head h reads key/value head h // (num_q_heads / num_kv_heads)."
        raise spec_error("heads", got, wanted, change)


def check_layout(name: str, x: Tensor) -> None:
    """A tensor has an address and strides: it is neither sparse nor nested."""
    if not is_strided(x):
        got, change = str(x.layout), "Use .to_dense() before the call."
        if x.is_nested:
            got, change = "a nested tensor", "Concatenate members for attention_varlen()."
        raise spec_error(f"{name} layout", got, "torch.strided", change)


def check_layouts(q: Any, k: Any, v: Any, rest: tuple[Any, ...], out: Any = None) -> None:
    """Refuses sparse and nested tensors. `rest` are `Arguments`, or the first of them. Who knows that all are
    ordinary tensors skips this."""
    for at, x in enumerate((q, k, v, out, *rest)):
        if isinstance(x, torch.Tensor):
            check_layout(("q", "k", "v", "out", *Arguments._fields)[at], x)


def check_operands(q: Tensor, k: Tensor, args: Arguments) -> int:
    """Shapes, dtypes and devices of the optional operands; ranges of the scalars. Returns the keys of a
    request, which are those of a whole table row if there are pages."""
    batch, num_q_heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    if args.page_table is not None:
        batch, seqlen_k = _check_table(q, k, args)
    elif args.cu_seqlens_q is not None or args.cu_seqlens_k is not None:
        batch = _check_packing(q, args)
    elif args.max_seqlen_q is not None or args.max_seqlen_k is not None:
        change = "Drop it: the lengths of unpacked calls are those of q and k."
        raise spec_error("max_seqlen", "no cu_seqlens", "packed members", change)
    if args.intervals is not None:
        _check_intervals(args.intervals, args.interval_rows, (batch, num_q_heads, seqlen_q), q.device)
    if args.scale is not None and not math.isfinite(args.scale):
        raise spec_error("scale", args.scale, "a finite number", "None means 1/sqrt(head_dim).")
    if not (0.0 <= args.softcap < math.inf):
        raise spec_error("softcap", args.softcap, "a finite number >= 0", "0 turns it off.")
    if not (0.0 <= args.dropout_p < 1.0):
        raise spec_error("dropout_p", args.dropout_p, "0 <= p < 1", "0 turns it off.")
    checked_window((args.window_left, args.window_right))
    if (args.q_segments is None) != (args.k_segments is None):
        raise spec_error("segments", "ids of one side", "q_ids and k_ids", "Use Mask.segments(q, k).")
    sizes: dict[Any, Any] = {}
    for operand, x in zip(_SHAPED_BY_SIZES, _shaped_by_sizes(args), strict=True):
        if x is not None:
            sizes = sizes or {BATCH: batch, HEADS: num_q_heads, ROWS: seqlen_q, KEYS: seqlen_k}
            check = _check_scores if operand.axes == SCORES else _check_vector
            check(operand, x, tuple(sizes.get(n, n) for n in operand.axes), q.device)
    if args.alibi_slopes is not None and torch.is_grad_enabled() and args.alibi_slopes.requires_grad:
        raise constant_slopes()
    return seqlen_k


# Operands whose shape follows from those of q and k; others have checks of their own.
_SHAPED_BY_SIZES = tuple(x for x in TENSORS if {n for n in x.axes if isinstance(n, str)} <= set(SCORES))
_shaped_by_sizes = attrgetter(*(x.name for x in _SHAPED_BY_SIZES))


def constant_slopes() -> SpecError:
    """ALiBi slopes have no gradient."""
    return spec_error("alibi_slopes", "requires_grad=True", "a constant", "Use .detach(), or train a bias.")


def _check_packing(q: Tensor, args: Arguments) -> int:
    """The operands of a packed call; returns the number of its members."""
    for operand in OPERANDS:
        if not operand.beside_packed and operand.given(getattr(args, operand.name)):
            change = "Its shape belongs to a padded batch; give causal, window, kv_lens or kv_starts."
            raise spec_error(operand.name, "one", "none beside cu_seqlens", change)
    members = _members("q", args.cu_seqlens_q, args.max_seqlen_q, q)
    members_k = _members("k", args.cu_seqlens_k, args.max_seqlen_k, q)
    if members != members_k:
        wanted = f"{members} members, as cu_seqlens_q"
        change = "A member without rows or keys has equal neighbours in its list."
        raise spec_error("cu_seqlens_k", f"{members_k} members", wanted, change)
    return members


def _members(side: str, x: Any, longest: int | None, q: Tensor) -> int:
    """The number of packed members by the bounds `x` of one side."""
    if q.shape[0] != 1:
        change = "Packed members stand one behind the other in one row of heads."
        raise spec_error("q batch", q.shape[0], "1 beside cu_seqlens", change)
    change = "Put a 0 before torch.cumsum(lengths, 0, dtype=torch.int32)."
    _check_int32(f"cu_seqlens_{side}", x, 1, "(members + 1,)", change, q.device)
    if longest is not None and longest < 0:
        raise spec_error(f"max_seqlen_{side}", longest, "0 or more, or None", "None asks for no bound.")
    return x.shape[0] - 1


def _check_table(q: Tensor, k: Tensor, args: Arguments) -> tuple[int, int]:
    """The operands of a call over pages; returns its requests, and the keys that a row of the table holds."""
    x: Any = args.page_table
    change = "Use .to(torch.int32), and one row of page numbers per request."
    _check_int32("page_table", x, 2, "(batch, max_pages)", change, q.device)
    for operand in OPERANDS:
        value = getattr(args, operand.name)
        if operand.beside_pages or not operand.given(value):
            continue
        if operand.default is not None:
            change = "Paged attention is for inference."
            raise spec_error(operand.name, value, f"{operand.default:g} beside page_table", change)
        change = "Pages take causal, window, kv_starts, alibi_slopes, softcap and sinks."
        raise spec_error(operand.name, "one", "none beside page_table", change)
    if args.kv_lens is None:
        change = "Give the live keys of each request, int32 (batch,)."
        raise spec_error("kv_lens", "None", "one beside page_table", change)
    page_size = k.shape[2]
    if page_size == 0:
        raise spec_error("page_size", 0, "1 or more", "A page holds the keys of so many positions.")
    batch, of = q.shape[0], "q, which has one token of each (more need cu_seqlens_q)"
    if args.cu_seqlens_q is not None:
        batch, of = _members("q", args.cu_seqlens_q, args.max_seqlen_q, q), "cu_seqlens_q"
    elif args.max_seqlen_q is not None:
        change = "Drop it: every request has the rows of q."
        raise spec_error("max_seqlen_q", "no cu_seqlens_q", "packed members", change)
    if x.shape[0] != batch:
        change = "Give each request a row of page numbers."
        raise spec_error("page_table rows", x.shape[0], f"{batch}, the requests of {of}", change)
    return batch, x.shape[1] * page_size


def _check_intervals(x: Tensor, rows: int, sizes: tuple[int, int, int], device: torch.device) -> None:
    batch, num_q_heads, seqlen_q = sizes
    change = "Use Mask.intervals(starts, ends, rows=...) or Mask.blocks(visible, rows=..., keys=...)."
    wanted = "(batch or 1, num_q_heads or 1, row_blocks, intervals, 2)"
    _check_int32("intervals", x, 5, wanted, change, device, "Use Mask.to().")
    if rows < 1:
        raise spec_error("interval_rows", rows, "1 or more rows per row block", change)
    row_blocks = (seqlen_q + rows - 1) // rows
    if x.shape[2] != row_blocks:
        wanted = f"{row_blocks}: ceil(seqlen_q / rows) = ceil({seqlen_q} / {rows})"
        change = "Give one list per row block, the last one included if it is cut short."
        raise spec_error("intervals row blocks", x.shape[2], wanted, change)
    if x.shape[0] not in (1, batch) or x.shape[1] not in (1, num_q_heads) or x.shape[3] == 0:
        got, wanted = tuple(x.shape), f"({batch} or 1, {num_q_heads} or 1, {row_blocks}, 1 or more, 2)"
        raise spec_error("intervals shape", got, wanted, "Size 1 stands for every batch entry or query head.")


def _check_int32(
    name: str,
    x: Any,
    ndim: int,
    axes: str,
    change: str,
    device: torch.device,
    move: str = "Move it with .to().",
) -> None:
    """A table of numbers on the device of q; a list has a bound at least, and intervals are pairs."""
    fits = isinstance(x, torch.Tensor) and x.dtype is torch.int32 and x.ndim == ndim
    if not (fits and {1: x.shape[0] > 0, 5: x.shape[-1] == 2}.get(ndim, True)):
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise spec_error(name, got, f"int32 tensor {axes}", change)
    if x.device != device:
        raise spec_error(f"{name} device", x.device, f"{device}, as q", move)


def check_tables(k: Tensor, v: Tensor, args: Arguments) -> None:
    """Scales and shifts of codes: one entry for each block of them."""
    k_form, v_form = codes_of(args.codes)
    quantized.check_tables("k_", args.k_scale, args.k_shift, k_form, k)
    quantized.check_tables("v_", args.v_scale, args.v_shift, v_form, v)


def has_contents(args: Arguments) -> bool:
    """Does a call have operands whose values say which memory is read?"""
    return any(x.contents and value is not None for x, value in zip(OPERANDS, args, strict=True))


_BOUNDS_OF_MEMORY = tuple(x.name for x in TENSORS if x.dtype == "int32" and len(x.axes) == 1)


def checked_contents(args: Arguments, q: Tensor, k: Tensor) -> Arguments:
    """`args` with lengths, starts, offsets and member bounds of its own, checked where they can be: another
    thread may write the caller's meanwhile. Pages and intervals kernels hold to the keys themselves."""
    if not (q.device.type == "cpu" or args.checked):
        return args
    given = {name: getattr(args, name) for name in _BOUNDS_OF_MEMORY}
    own = {n: x.clone(memory_format=torch.contiguous_format) for n, x in given.items() if x is not None}
    args = args._replace(**own)
    check_contents(args, q.shape[2], k)
    return args


def check_contents(args: Arguments, seqlen_q: int, k: Tensor) -> None:
    """The values of length tensors, member bounds, page tables and interval lists, for `seqlen_q` rows and
    the keys or pages k; reads them, so on a device it synchronises."""
    keys: list[int] | None = None
    rows: int | list[int] = seqlen_q
    seqlen_k = k.shape[2] if args.page_table is None else k.shape[2] * args.page_table.shape[1]
    if args.cu_seqlens_q is not None:
        rows = _check_bounds("q", args.cu_seqlens_q, args.max_seqlen_q, seqlen_q)
    if args.cu_seqlens_k is not None:
        keys = _check_bounds("k", args.cu_seqlens_k, args.max_seqlen_k, seqlen_k)
    for name in ("kv_lens", "kv_starts"):
        lengths = getattr(args, name)
        if lengths is None:
            continue
        values = lengths.tolist()  # a list is read and compared faster than a small tensor
        if keys is None:
            if not values or (min(values) >= 0 and max(values) <= seqlen_k):
                continue
            keys = [seqlen_k] * len(values)
        for request, (value, top) in enumerate(zip(values, keys, strict=True)):
            if not 0 <= value <= top:
                change = f"A length counts keys of its request, which has {top}."
                raise spec_error(name, f"{value} for request {request}", f"values in [0, {top}]", change)
    if args.intervals is not None:
        _check_rising(args.intervals)
    if args.page_table is not None and args.kv_lens is not None:
        _check_pages(args, args.page_table, args.kv_lens, np.asarray(rows), k)


def _check_pages(args: Arguments, page_table: Tensor, kv_lens: Tensor, rows: np.ndarray, k: Tensor) -> None:
    """Each page that holds a key some row can see is one of the pool k."""
    num_pages, page_size = k.shape[0], k.shape[2]
    live = kv_lens.numpy(force=True).astype(np.int64)
    table = page_table.numpy(force=True)[:, : -(-int(live.max(initial=0)) // page_size)]
    pages = table.view(np.uint32)  # what is negative is high
    if not pages.size or int(pages.max()) < num_pages:
        return
    first, end = _seen(args, rows, live)
    starts = np.arange(table.shape[1]) * page_size
    wrong = (starts + page_size > first[:, None]) & (starts < end[:, None]) & (pages >= num_pages)
    if wrong.any():
        request, column = np.unravel_index(int(wrong.argmax()), wrong.shape)
        got = f"page {table[request, column]} for request {request} in column {column}"
        change = f"The {live[request]} live keys of the request reach into it; what lies beyond is not read."
        raise spec_error("page_table", got, f"pages in [0, {num_pages})", change)


def _seen(args: Arguments, rows: np.ndarray, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per request the first key that one of its `rows` rows sees and the one after the last, int64 (batch,);
    an empty range if no row sees a key."""
    offset = live - rows if args.offset is None else np.full_like(live, args.offset)
    if args.q_offset is not None:
        offset = args.q_offset.numpy(force=True).astype(np.int64)
    first, end = np.zeros_like(live), live
    if args.kv_starts is not None:
        first = args.kv_starts.numpy(force=True).astype(np.int64)
    if args.window_left is not None:
        first = np.maximum(first, offset - min(args.window_left, FAR_SIDE))
    right = 0 if args.causal else args.window_right
    if right is not None:
        end = np.minimum(end, offset + rows + min(right, FAR_SIDE))
    return first, np.where((rows > 0) & (first < end), end, 0)


def _check_bounds(side: str, cu_seqlens: Tensor, longest: int | None, total: int) -> list[int]:
    """The bounds of packed members; returns their lengths."""
    name, unit = f"cu_seqlens_{side}", "rows" if side == "q" else "keys"
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    change = "Put a 0 before torch.cumsum(lengths, 0, dtype=torch.int32)."
    if bounds[0] != 0:
        raise spec_error(name, f"{bounds[0]} first", "0 first", change)
    if lengths and min(lengths) < 0:
        at = lengths.index(min(lengths))
        wanted = "bounds that never fall"
        raise spec_error(name, f"{bounds[at + 1]} after {bounds[at]} (member {at})", wanted, change)
    if bounds[-1] > total:
        raise spec_error(name, f"{bounds[-1]} last", f"at most {total}, the {unit} of {side}", change)
    if longest is not None and lengths and longest < max(lengths):
        change = "Give the longest member's length, or None."
        raise spec_error(f"max_seqlen_{side}", longest, f"{max(lengths)} or more", change)
    return lengths


def _check_rising(intervals: Tensor) -> None:
    """Each list rises and is disjoint; empty intervals are skipped."""
    starts, ends = intervals.unbind(-1)
    reached = torch.where(starts < ends, ends, 0).cummax(-1).values  # int32: the highest end so far
    before = torch.nn.functional.pad(reached[..., :-1], (1, 0))
    wrong = (starts < 0) | (ends < starts) | ((starts < ends) & (starts < before))
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        pair = f"[{int(starts[at])}, {int(ends[at])}) at (batch, head, row block, interval) {at}"
        got = pair if int(before[at]) == 0 else f"{pair} after an end of {int(before[at])}"
        wanted = "intervals with 0 <= start <= end that rise and are disjoint"
        raise spec_error("intervals", got, wanted, "Sort and join those of a row block.")


def check_like(name: str, x: Tensor, shape: tuple[int, ...], dtype: Any, q: Any, change: str) -> None:
    """Shape and dtype of a tensor that goes with q, on its device."""
    check_layout(name, x)
    if tuple(x.shape) != shape or x.dtype is not dtype or x.device != q.device:
        got, wanted = f"{tuple(x.shape)} {x.dtype} on {x.device}", f"{shape} {dtype} on {q.device}"
        raise spec_error(name, got, wanted, change)


def check_out(out: Tensor, q: Tensor, head_dim_v: int) -> None:
    """`out` has the result's shape (batch, num_q_heads, seqlen_q, head_dim_v), each element its place."""
    check_like("out", out, (*q.shape[:3], head_dim_v), q.dtype, q, "Allocate it like the result.")
    if overlaps(out):
        got = f"strides {out.stride()}: elements share memory"
        raise spec_error("out", got, "a place for each element", "Use torch.empty_like().")


def overlaps(x: Tensor) -> bool:
    """May two elements share an address? Right for every tensor whose strides nest."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def check_results(q: Tensor, v: Tensor, results: dict[str, Tensor | None]) -> None:
    """Checks operands that a forward pass gave, and gradients of them, by name: dout and out like the output,
    dlse and lse like the lse. None is absent."""
    rows = tuple(q.shape[:3])
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    change = "Pass what attention(..., return_lse=True) returned for these rows."
    for name, x in results.items():
        shape, kind = (rows, wide) if name.endswith("lse") else ((*rows, v.shape[3]), q.dtype)
        if x is not None:
            check_like(name, x, shape, kind, q, change)


def _check_scores(operand: Operand, x: Tensor, scores: tuple[int, ...], device: torch.device) -> None:
    """A mask or a bias, broadcastable to the scores."""
    name, shape = operand.name, tuple(x.shape)
    if operand.dtype == "float" and x.dtype not in _DTYPES:
        raise spec_error(f"{name} dtype", x.dtype, ", ".join(BY_NAME), "Pass a bool mask as mask=.")
    if operand.dtype == "bool" and x.dtype is not torch.bool:
        change = "True = attend. Add scores with bias= instead."
        raise spec_error(f"{name} dtype", x.dtype, "torch.bool or a Mask", change)
    fits = len(shape) <= 4 and all(a in (1, b) for a, b in zip(shape[::-1], scores[::-1], strict=False))
    if not fits:
        wanted = f"broadcastable to (batch, num_q_heads, seqlen_q, seqlen_k) = {scores}"
        change = "Use unsqueeze() where a dimension is missing; it is never expanded in memory."
        raise spec_error(f"{name} shape", shape, wanted, change)
    if x.device != device:
        raise spec_error(f"{name} device", x.device, f"{device}, as q", "Move it with .to().")


def _check_vector(operand: Operand, x: Tensor, shape: tuple[Any, ...], device: torch.device) -> None:
    """Numbers per request, row or head. Floats per request may be the same for all."""
    name, ints, per_request = operand.name, operand.dtype == "int32", operand.axes[0] == BATCH
    shapes = (shape[1:], shape) if per_request and not ints else (shape,)
    wanted = " or ".join(map(str, shapes))
    if ints and x.dtype is not torch.int32:
        raise spec_error(name, x.dtype, f"int32 tensor of shape {wanted}", "Use .to(torch.int32).")
    if not ints and x.dtype not in _DTYPES:
        raise spec_error(name, x.dtype, f"tensor of {', '.join(BY_NAME)} of shape {wanted}", "Cast it.")
    if tuple(x.shape) not in shapes or x.device != device:
        change = f"One entry per {'request' if per_request else 'row'}."
        if not ints:
            change = "One value per query head."
        elif x.device != device:
            change = "Use .to(), or Mask.to() for a mask."
        raise spec_error(name, f"{tuple(x.shape)} on {x.device}", f"{wanted} on {device}", change)
