"""The numbers and the optional operands of a call, as kernels read them: a uniform `n`, and one buffer of
words with whatever is not q, k, v. WebGPU promises eight buffers per kernel, and the gradients need seven."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from polyflash.backends.gpu.numbers import SOFTCAPS, dropout_of, scale_of
from polyflash.backends.gpu.views import plane_of
from polyflash.backends.webgpu import codes
from polyflash.backends.webgpu.render import ENTRY_WORDS
from polyflash.results import converted
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = Arguments()
_FAR = 1 << 30  # beyond any position: a sum with one stays within 32 bits
_PLANES = tuple(f"{x}{end}" for x in ("mask", "bias") for end in ("", "_b", "_h", "_q", "_k"))
_COUNTS = ("batch", "group", "q_rows", "k_rows", "rows_total", "stride_y", "tile0", "z0", "num_splits")
_BROADCAST = ("kv_heads", "dbias_b", "dbias_h", "dbias_q", "dbias_k")
_PLACES = ("slopes", "slopes_b", "sinks", "q_ids", "k_ids", "minus_infinity")
_CODES = ("k_scale", "v_scale", "k_shift", "v_shift", "k_values", "v_values")
_INTEGERS = (*_COUNTS, *_PLANES, *_BROADCAST, *_PLACES, *_CODES)
PARAMS = (*((name, "u32") for name in _INTEGERS), ("scale", "f32"), ("softcap", "f32"))
_DROPS = ("drop_below", "seed_lo", "seed_hi", "drop_head", "drop_heads")
_DROPOUT = (*((name, "u32") for name in _DROPS), ("keep_scale", "f32"))


def params_of(flags: dict[str, int]) -> tuple[tuple[str, str], ...]:
    """Fields of the uniform of a kernel with these constants."""
    return (*PARAMS, *_DROPOUT) if flags.get("DROPOUT") else PARAMS


def stages_of(flags: dict[str, int]) -> tuple[str, ...]:
    """The files of what such a kernel shares with others."""
    return ("stages.wgsl", "dropout.wgsl") if flags.get("DROPOUT") else ("stages.wgsl",)


class Sizes(NamedTuple):
    """The shapes of q (batch, num_q_heads, seqlen_q, ·) and k; of packed members batch is 1. Of keys in pages
    seqlen_k is the longest request's, and the pools are (num_pages, num_kv_heads, page_size, ·)."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    num_pages: int = 0
    page_size: int = 0

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads


class Call(NamedTuple):
    """Everything a kernel needs to know of a call beside q, k, v."""

    words: np.ndarray  # uint32
    numbers: dict[str, Any]  # fields of PARAMS; those left out are 0
    flags: dict[str, int]  # constants of its text
    entries: int  # batch entries or members
    rows: int  # of the longest entry

    def params(self, more: dict[str, int]) -> bytes:
        """The uniform of a launch; `more` are numbers of its own."""
        values, fields = self.numbers | more, params_of(self.flags)
        kinds = "".join("I" if kind == "u32" else "f" for _, kind in fields)
        data = struct.pack(kinds, *(values.get(name, 0) for name, _ in fields))
        return data.ljust(-(-len(data) // 16) * 16, b"\0")


def sizes_of(q: Any, k: Any, v: Any, args: Arguments = _PLAIN) -> Sizes:
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    sizes = Sizes(batch, num_q_heads, k.shape[1], seqlen_q, k.shape[2], head_dim, v.shape[3])
    if args.page_table is None or args.kv_lens is None:
        return sizes
    longest = max(1, *args.kv_lens.tolist())
    return sizes._replace(seqlen_k=longest, num_pages=k.shape[0], page_size=k.shape[2])


def call_of(sizes: Sizes, args: Arguments) -> Call:
    """Packs the operands of a call; its tensors are on the CPU."""
    entries = entries_of(sizes, args)
    buffer = _Words(entries.to(torch.int32).numpy())
    if args.page_table is not None:  # as `k_base` of the entries says, right behind them
        buffer.add(needed_pages(sizes, args, entries).clamp(min=0).numpy())
    numbers: dict[str, Any] = {
        "batch": len(entries),
        "group": sizes.group,
        "kv_heads": sizes.num_kv_heads,
        "q_rows": sizes.seqlen_q,
        "k_rows": sizes.page_size or sizes.seqlen_k,
        "rows_total": sizes.batch * sizes.num_q_heads * sizes.seqlen_q,
        "minus_infinity": 0xFF800000,
        "scale": scale_of(sizes.head_dim, args),
        "softcap": min(max(args.softcap, SOFTCAPS[0]), SOFTCAPS[1]) if args.softcap else 0.0,
    }
    for name, x in (("mask", args.mask), ("bias", _float(args.bias))):
        if x is not None:
            plane = plane_of(x.contiguous())
            at = buffer.add(plane.p.numpy())
            strides = {f"{name}_{d}": getattr(plane, d) for d in "bhqk"}
            numbers |= {name: at, **strides}
    slopes, sinks = _float(args.alibi_slopes), _float(args.sinks)
    if slopes is not None:
        numbers |= {"slopes": buffer.add(slopes.contiguous().numpy())}
        numbers |= {"slopes_b": sizes.num_q_heads if slopes.ndim == 2 else 0}
    if sinks is not None:
        numbers["sinks"] = buffer.add(sinks.contiguous().numpy())
    for name, ids in (("q_ids", args.q_segments), ("k_ids", args.k_segments)):
        if ids is not None:
            numbers[name] = buffer.add(ids.contiguous().numpy())
    flags = _flags(args) | ({"PAGE": sizes.page_size} if sizes.page_size else {})
    if args.dropout_p:
        drops = dropout_of(args, sizes.num_q_heads)
        numbers |= {name: drops[name] % 2**32 for name in _DROPS} | {"keep_scale": drops["keep_scale"]}
        flags |= {"DROPOUT": 1}
    if args.codes:
        numbers |= codes.numbers_of(sizes, args.codes)
        numbers |= {name: buffer.add(x) for name, x in codes.values_of(args.codes).items()}
        flags |= codes.constants_of(sizes, args.codes)
    return Call(
        buffer.joined(), numbers, flags, len(entries), int(entries[:, 2].max()) if len(entries) else 0
    )


def _flags(args: Arguments) -> dict[str, int]:
    has = {
        "MASK": args.mask is not None,
        "BIAS": args.bias is not None,
        "SEGMENTS": args.q_segments is not None,
        "SOFTCAP": args.softcap != 0.0,
        "ALIBI": args.alibi_slopes is not None,
        "SINKS": args.sinks is not None,
    }
    has["ELEMENTS"] = has["MASK"] or has["BIAS"] or has["SEGMENTS"]
    has["CHANGED"] = has["BIAS"] or has["SOFTCAP"] or has["ALIBI"]
    return {name: int(on) for name, on in has.items()}


class _Words:
    """Arrays one after the other, each from a whole word on."""

    def __init__(self, first: np.ndarray) -> None:
        self.parts: list[np.ndarray] = []
        self.count = 0
        self.add(first)

    def add(self, x: np.ndarray) -> int:
        """Appends an array; returns the word it begins at."""
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        if data.nbytes % 4:
            data = np.concatenate((data, np.zeros(-data.nbytes % 4, np.uint8)))
        at = self.count
        self.parts.append(data.view(np.uint32))
        self.count += len(data) // 4
        return at

    def joined(self) -> np.ndarray:
        return np.concatenate(self.parts) if len(self.parts) > 1 else self.parts[0]


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else converted(x.detach(), torch.float32)


def entries_of(sizes: Sizes, args: Arguments) -> Tensor:
    """int64 (entries, ENTRY_WORDS): what `Place` reads. Row i of an entry stands at i + offset and sees keys
    of [kv_start, kv_end) from i + lower to i + upper."""
    if args.cu_seqlens_q is None:
        b = torch.arange(sizes.batch)
        q_base, rows = b * sizes.num_q_heads * sizes.seqlen_q, torch.full_like(b, sizes.seqlen_q)
    else:
        q_base, rows = _members(args.cu_seqlens_q, sizes.seqlen_q)
        b = torch.arange(len(rows))
    if args.page_table is not None:
        columns = args.page_table.shape[1]
        k_base, keys = len(b) * ENTRY_WORDS + b * columns, torch.full_like(b, columns * sizes.page_size)
    elif args.cu_seqlens_k is not None:
        k_base, keys = _members(args.cu_seqlens_k, sizes.seqlen_k)
    else:
        k_base, keys = b * sizes.num_kv_heads * sizes.seqlen_k, torch.full_like(b, sizes.seqlen_k)
    live = keys if args.kv_lens is None else torch.minimum(args.kv_lens.long().clamp(min=0), keys)
    start = torch.zeros_like(keys) if args.kv_starts is None else args.kv_starts.long().clamp(min=0)
    offset = live - rows
    if args.q_offset is not None:
        offset = args.q_offset.long()
    elif args.offset is not None:
        offset = torch.full_like(keys, args.offset)
    right = 0 if args.causal else args.window_right
    lower, upper = torch.full_like(keys, -_FAR), torch.full_like(keys, _FAR)
    if args.window_left is not None:
        lower = offset - args.window_left
    if right is not None:
        upper = offset + right
    near = (x.clamp(-_FAR, _FAR) for x in (start, live, lower, upper, offset))
    return torch.stack((q_base, k_base, rows, keys, *near), 1)


def needed_pages(sizes: Sizes, args: Arguments, entries: Tensor) -> Tensor:
    """The page table, -1 where a page has no key that a row of its request sees, or is none of the pool."""
    table = cast("Tensor", args.page_table)
    _, _, rows, _, start, live, lower, upper, _ = (x[:, None] for x in entries.unbind(1))
    first, end = torch.maximum(start, lower), torch.minimum(live, rows + upper)
    at = torch.arange(table.shape[1]) * sizes.page_size
    seen = (rows > 0) & (first < end) & (at + sizes.page_size > first) & (at < end)
    return table.where(seen & (table >= 0) & (table < sizes.num_pages), -1)


def _members(bounds: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """First row and number of rows of packed members; bounds that fall or leave the tensor make members
    shorter."""
    at = bounds.long().clamp(0, total).cummax(0).values
    return at[:-1], at.diff()
