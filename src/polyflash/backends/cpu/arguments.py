"""How a call fills the argument block of the CPU kernels, whose words are those of words.py."""

from __future__ import annotations

import math
import struct
from array import array
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from polyflash.backends.cpu import words
from polyflash.backends.cpu.configs import DropoutKey, ScoreKey
from polyflash.backends.cpu.runtime import stage_address
from polyflash.backends.cpu.words import Operands, Softmax, Tensors
from polyflash.mask import FAR_OFFSET, FAR_SIDE
from polyflash.spec import Arguments

Views = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and out

FLOPS_PER_US = 100_000  # of one core, low on purpose: what the thread decision assumes
LEND_FROM_US = 25  # work below this many microseconds stays on the caller
WAKE_FROM_US = 40  # below this, only threads that already spin share it: waking one takes as long as the work
LOG2E = math.log2(math.e)
FLT_MIN, FLT_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127

BIAS_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

_ABSENT = tuple((0,) * (1 + axes) for axes in range(6))
NO_OPERANDS = bytes(8 * len(Operands._fields))
_pack_head = struct.Struct(f"{len(Tensors._fields) + len(Softmax._fields)}q").pack


def passes(args: Arguments, scale: float) -> int:
    """The work of the pass over scores for a call, as bits; 0: there is none."""
    does = words.DOES_MASK if args.mask is not None else 0
    if args.bias is not None:
        does |= words.DOES_BIAS
    if args.alibi_slopes is not None:
        does |= words.DOES_ALIBI
    if args.softcap and abs(scale) / args.softcap >= FLT_MIN:  # a larger softcap changes no float32
        does |= words.DOES_SOFTCAP
    if abs(scale) < FLT_MIN:  # the kernel divides by its scale
        does |= words.DOES_TINY_SCALE
    return does | words.DOES_SEGMENTS if args.q_segments is not None else does


def any_table(args: Arguments) -> bool:
    """Whether an operand that the pass has no part in fills a word of `Operands`."""
    absent = args.kv_lens is args.kv_starts is args.q_offset is args.intervals is args.cu_seqlens_q is None
    return not absent or args.dropout_p != 0.0


def head(
    views: Views, lse: int, seqlen_k: int, args: Arguments, scale: float, does: int, *stages: int
) -> bytes:
    """`Tensors` and `Softmax`, packed as plain numbers: to name them takes microseconds of every call. The
    last dimension of out has unit stride, lse is contiguous. Addresses, or 0: lse; `stages` are sinks and
    score_pass."""
    q, k, v, out = views
    (_, num_q_heads, seqlen_q, head_dim), num_kv_heads, head_dim_v = q.shape, v.shape[1], out.shape[3]
    size, k_size, v_size = q.element_size(), k.element_size(), v.element_size()
    q_batch, q_head, q_row, q_dim = q.stride()
    k_batch, k_head, k_row, k_dim = k.stride()
    v_batch, v_head, v_row, v_dim = v.stride()
    out_batch, out_head, out_row, _ = out.stride()
    if head_dim == 1:
        q_dim = k_dim = 1
    if head_dim_v == 1:
        v_dim = 1
    log2, plain, sign = scale_bits(scale)
    if does & words.DOES_SCALE:
        log2, plain, _ = scale_bits(1.0)
    left, right = window_sides(args)
    return _pack_head(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse),
        *(q_batch * size, q_head * size, q_row * size, q_dim * size),
        *(k_batch * k_size, k_head * k_size, k_row * k_size, k_dim * k_size),
        *(v_batch * v_size, v_head * v_size, v_row * v_size, v_dim * v_size),
        *(out_batch * size, out_head * size, out_row * size, num_q_heads * seqlen_q, seqlen_q),
        *(num_kv_heads, num_q_heads // num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v),
        *(log2, plain, sign, left, right, args.offset is not None, far_offset(args.offset)),
        *stages,
    )


def front(
    isa: str, nv: int, views: Views, lse: int, seqlen_k: int, args: Arguments, kept: list[Any], members: int
) -> bytes:
    """`Tensors`, `Softmax` and `Operands` of a kernel of panels of `nv` vectors. Small
    tensors that must be copied first are put into `kept`, to live as long as the call."""
    scale = score_scale(views[0], args)
    does = passes(args, scale)
    score_pass = stage_address(ScoreKey, isa, nv) if does else 0
    sinks = sinks_address(args.sinks, kept)
    words = head(views, lse, seqlen_k, args, scale, does, sinks, score_pass)
    if not (does or any_table(args)):
        return words + NO_OPERANDS
    drop = stage_address(DropoutKey, isa, nv) if args.dropout_p else 0
    return words + operands(args, scale, does, kept, members, drop, views[1])


def score_scale(q: Tensor, args: Arguments) -> float:
    return q.shape[3] ** -0.5 if args.scale is None else args.scale


def decode_scaling(args: Arguments, scale: float, does: int) -> tuple[int, int]:
    """score_factor and score_cap of a decode call whose scores leave unscaled unless `does` says so."""
    if does & words.DOES_SOFTCAP:
        # A softcap that no float32 holds is the least one, as 0 is none.
        return 1 << 32 | float_bits(abs(scale) / args.softcap), max(1, float_bits(args.softcap))
    return (1 << 32 | float_bits(abs(scale)), 0) if does & words.DOES_TINY_SCALE else (0, 0)


def row_strides(x: Tensor) -> tuple[int, int, int]:
    """In bytes, over (batch, head, row)."""
    size = x.element_size()
    batch, head, row, _ = x.stride()
    return batch * size, head * size, row * size


@lru_cache(maxsize=64)
def scale_bits(scale: float) -> tuple[int, int, int]:
    """|scale|·log2(e) as two float32 (the high one in the low bits), |scale| as one, and the sign bit.

    Held to the normal range: smaller scales are the pass's."""
    size = min(max(abs(scale), FLT_MIN), FLT_MAX)
    exact = min(size * LOG2E, FLT_MAX)
    (high,) = struct.unpack("<f", struct.pack("<f", exact))
    both, plain = struct.unpack("<qI", struct.pack("<fff", high, exact - high, size))
    return both, plain, 0x80000000 if scale < 0 else 0


def float_bits(x: float) -> int:
    """The bits of the nearest finite float32 to `x` >= 0."""
    (bits,) = struct.unpack("<I", struct.pack("<f", min(x, FLT_MAX)))
    return bits


def operands(
    args: Arguments,
    scale: float,
    does: int,
    kept: list[Tensor],
    members: int,
    drop: int = 0,
    k: Tensor | None = None,
) -> bytes:
    """`Operands` as bytes. Small tensors that must be copied first are put into `kept`, to live as long as
    the call. `drop` is the address of the dropout stage if dropout_p is not 0, `k` the pool of K if there is
    a page table."""
    caps = (0, 0)
    if does & words.DOES_SOFTCAP:
        caps = float_bits(abs(scale) / args.softcap), float_bits(args.softcap)
    cu_q, cu_k = args.cu_seqlens_q, args.cu_seqlens_k
    if cu_q is not None:
        cu_q = cu_q.contiguous()
        kept.append(cu_q)
    if cu_k is not None:
        cu_k = cu_k.contiguous()
        kept.append(cu_k)
    values = (
        *(*_table(args.q_offset), *_table(args.kv_lens), *_table(args.kv_starts)),
        *(does, float_bits(abs(scale)), *caps),
        *_placed(args.mask, 4),
        *(*_placed(args.bias, 4), 0 if args.bias is None else BIAS_KINDS[args.bias.dtype]),
        *_per_head(args.alibi_slopes, kept),
        *(*_placed(args.q_segments, 2), *_placed(args.k_segments, 2)),
        *_intervals(args.intervals, args.interval_rows, kept),
        *(members, 0 if cu_q is None else cu_q.data_ptr(), 0 if cu_k is None else cu_k.data_ptr()),
        *_dropout(args, drop),
        *(_ABSENT[4] if k is None or args.page_table is None else _pages(args.page_table, k)),
    )
    return array("q", values).tobytes()


def _table(per_batch: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if per_batch is None else (per_batch.data_ptr(), 4 * per_batch.stride(0))


def _per_head(slopes: Tensor | None, kept: list[Tensor]) -> tuple[int, ...]:
    if slopes is None:
        return _ABSENT[2]
    slopes = _as_float32(slopes)
    kept.append(slopes)
    return slopes.data_ptr(), 4 * slopes.stride(0) if slopes.ndim == 2 else 0, 4 * slopes.stride(-1)


def _placed(x: Tensor | None, axes: int) -> tuple[int, ...]:
    """Address of an operand and its byte strides over so many axes, the last ones its own; 0 where it
    broadcasts, or if there is none."""
    if x is None:
        return _ABSENT[axes]
    size = x.element_size()
    strides = [0 if n == 1 else size * s for n, s in zip(x.shape, x.stride(), strict=True)]
    return (x.data_ptr(), *[0] * (axes - len(strides)), *strides)


def _intervals(lists: Tensor | None, rows: int, kept: list[Tensor]) -> tuple[int, ...]:
    if lists is None:
        return _ABSENT[5]
    lists = lists if lists[0, 0, 0].is_contiguous() else lists.contiguous()
    kept.append(lists)
    return *_placed(lists, 5)[:3], 4 * lists.stride(2), lists.shape[3], rows


def _dropout(args: Arguments, address: int) -> tuple[int, int, int, int]:
    p = args.dropout_p
    if p == 0.0:
        return 0, 0, 0, 0
    seed = 0 if args.dropout_seed is None else int(args.dropout_seed)
    return seed, math.floor(p * 2.0**32), address, float_bits(1.0 - p if p < 1.0 else 1.0)


def _pages(table: Tensor, k: Tensor) -> tuple[int, ...]:
    return *_placed(table, 2), k.shape[2], k.shape[0]


def tables(args: Arguments, kept: list[Tensor]) -> list[tuple[int, ...]]:
    """Address and strides over (batch, head, block of tokens) of each table of codes."""
    words: list[tuple[int, ...]] = []
    for x in (args.k_scale, args.k_shift, args.v_scale, args.v_shift):
        if x is not None and x.shape[3] > 1 and x.stride(3) != 1:
            x = x.contiguous()
            kept.append(x)
        words.append((0,) * 4 if x is None else (x.data_ptr(), *row_strides(x)))
    return words


def far_offset(offset: int | None) -> int:
    return 0 if offset is None else max(-FAR_OFFSET, min(offset, FAR_OFFSET))


def window_sides(args: Arguments) -> tuple[int, int]:
    left = FAR_SIDE if args.window_left is None else min(args.window_left, FAR_SIDE)
    right = FAR_SIDE if args.window_right is None else min(args.window_right, FAR_SIDE)
    return left, min(right, 0) if args.causal else right


def sinks_address(sinks: Tensor | None, kept: list[Tensor]) -> int:
    if sinks is None:
        return 0
    kept.append(_as_float32(sinks.detach()).contiguous())
    return kept[-1].data_ptr()


def _as_float32(x: Tensor) -> Tensor:
    """Converts so that finite values stay finite."""
    if x.dtype is torch.float64:
        x = torch.where(x.isfinite(), x.clamp(-FLT_MAX, FLT_MAX), x)
    return x.to(torch.float32)


def threads_for(work_us: float) -> int:
    return 1 if work_us < LEND_FROM_US else torch.get_num_threads()


def estimated_us(shape: torch.Size, seqlen_k: int, dims: int, args: Arguments) -> int:
    """Work of a call on one core; reads no tensor."""
    left, right = window_sides(args)
    batch, heads, seqlen_q, _ = shape
    keys = min(seqlen_k, left + 1 + right)
    half = 1 if right == 0 and keys == seqlen_k else 2
    work = dims * half * batch * heads * seqlen_q * keys // FLOPS_PER_US
    if args.cu_seqlens_q is not None:
        return work // max(1, args.cu_seqlens_q.shape[0] - 1)
    return work
