"""The int64 argument block of the CPU kernels: what each word is, and how a call fills it.

Addresses and strides are in bytes; an operand that is absent has address 0. The kernel of a tile and the
pass over its scores are compiled apart and meet in this block, in the tiles of the scratch and in an item's
words.
"""

from __future__ import annotations

import math
import struct
from array import array
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import torch

from polyflash.mask import FAR_OFFSET, FAR_SIDE

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.spec import Arguments

FLOPS_PER_US = 100_000  # of one core, low on purpose: what the thread decision assumes
LEND_FROM_US = 25  # work below this many microseconds stays on the caller
WAKE_FROM_US = 40  # below this, only threads that already spin share it: waking one takes as long as the work
LOG2E = math.log2(math.e)
FLT_MIN, FLT_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127

_next = count().__next__
Q, K, V, OUT, LSE = (_next() for _ in range(5))
Q_BATCH, Q_HEAD, Q_ROW, Q_DIM = (_next() for _ in range(4))
K_BATCH, K_HEAD, K_ROW, K_DIM = (_next() for _ in range(4))
V_BATCH, V_HEAD, V_ROW, V_DIM = (_next() for _ in range(4))
OUT_BATCH, OUT_HEAD, OUT_ROW, LSE_BATCH, LSE_HEAD = (_next() for _ in range(5))  # of lse in elements
NUM_KV_HEADS, GROUP, SEQLEN_Q, SEQLEN_K, HEAD_DIM, HEAD_DIM_V = (_next() for _ in range(6))
# Of the softmax; 1 where the pass has scaled. SCALE_LOG2: float32 bits of |scale|·log2(e) and, above them, of
# what they miss; SCALE: of |scale|; SIGN: the sign bit of a negative scale.
SCALE_LOG2, SCALE, SIGN, LEFT, RIGHT, HAS_OFFSET, OFFSET, SINKS, PASS = (_next() for _ in range(9))

# Each table's stride follows its address.
Q_OFFSET, Q_OFFSET_STRIDE, KV_LENS, KV_LENS_STRIDE, KV_STARTS, KV_STARTS_STRIDE = (_next() for _ in range(6))
# Of the pass over scores: what it does, float32 bits of scale, scale/softcap and softcap, its operands.
PASS_DOES, PASS_SCALE, TO_CAP, CAP = (_next() for _ in range(4))
MASK, MASK_BATCH, MASK_HEAD, MASK_ROW, MASK_KEY = (_next() for _ in range(5))
BIAS, BIAS_BATCH, BIAS_HEAD, BIAS_ROW, BIAS_KEY, BIAS_KIND = (_next() for _ in range(6))
SLOPES, SLOPES_BATCH, SLOPES_HEAD = (_next() for _ in range(3))
Q_IDS, Q_IDS_BATCH, Q_IDS_ROW, K_IDS, K_IDS_BATCH, K_IDS_KEY = (_next() for _ in range(6))
# Row block r sees INTERVAL_COUNT pairs of int32 (start, end). Packed members: an item's (member, row, end).
INTERVALS, INTERVALS_BATCH, INTERVALS_HEAD, INTERVALS_BLOCK, INTERVAL_COUNT, INTERVAL_ROWS = (
    _next() for _ in range(6)
)
MEMBERS, CU_Q, CU_K = (_next() for _ in range(3))
# Philox's key, floor(p·2^32), the address of the stage (0: no dropout), float32 bits of 1 - p (1 if p is 1).
DROP_SEED, DROP_THRESHOLD, DROP, DROP_KEPT = (_next() for _ in range(4))
# 0: keys are contiguous. Else K_BATCH and V_BATCH lie between pages.
PAGE_TABLE, PAGE_TABLE_BATCH, PAGE_TABLE_ENTRY, PAGE_SIZE, NUM_PAGES = (_next() for _ in range(5))

# HEADS x ROW_PANELS is an item, CHUNKS items make a group, OTHERS items share a row block. ZERO is 0, read at
# run time: a fill with a known zero would become a call of memset.
BLOCK_N, HEADS, CHUNKS, ROW_PANELS, ROW_BLOCKS, OTHERS, ZERO = (_next() for _ in range(7))
# Scratch offsets, in the order of configs.Scratch.
T_Q, T_O, T_K, T_V, T_S, T_P, T_STAGE, T_STATS, T_LIMITS, T_BLOCK, T_ZERO, T_GATHER, T_BAD = (
    _next() for _ in range(13)
)
T_SEEN, T_ITEM, T_KINDS, T_Q_IDS, T_K_IDS, T_STAGED = (_next() for _ in range(6))

# Words of an item at T_ITEM: which rows of what it is, then what the pass tells of a key block.
(
    I_BATCH, I_HEAD, I_HEADS, I_ROW, I_PANELS, I_ROW_END, I_SEQLEN_K, I_OFFSET, I_LO_SHIFT, I_HI_SHIFT,
    I_START, I_LIVE, I_KEY, I_FIRST, I_LAST, I_ANY,
) = range(16)  # fmt: skip
I_COLUMN = 16  # from here on: the operands of one column of the pass

DOES_MASK, DOES_BIAS, DOES_ALIBI, DOES_SOFTCAP, DOES_SEGMENTS, DOES_TINY_SCALE = 1, 2, 4, 8, 16, 32
DOES_SCALE = DOES_BIAS | DOES_ALIBI | DOES_SOFTCAP | DOES_TINY_SCALE  # scores leave the pass scaled
# What the pass is called for.
START_ITEM, START_BLOCK, CHANGE_SCORES, MARK_SEEN = range(4)
# How a key block touches a panel.
UNSEEN, CHANGED, PLAIN = range(3)

BIAS_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

_N_OPERANDS = NUM_PAGES + 1 - Q_OFFSET
NO_OPERANDS = bytes(8 * _N_OPERANDS)
pack_head = struct.Struct(f"{PASS + 1}q").pack
_ONE = (
    struct.unpack("<q", struct.pack("<ff", LOG2E, LOG2E - struct.unpack("<f", struct.pack("<f", LOG2E))[0]))
)[0]


def passes(args: Arguments, scale: float) -> int:
    """What the pass over scores has to do for a call; 0: there is none."""
    does = DOES_MASK if args.mask is not None else 0
    if args.bias is not None:
        does |= DOES_BIAS
    if args.alibi_slopes is not None:
        does |= DOES_ALIBI
    if args.softcap and abs(scale) / args.softcap >= FLT_MIN:  # a larger softcap changes no float32
        does |= DOES_SOFTCAP
    if abs(scale) < FLT_MIN:  # the kernel divides by its scale
        does |= DOES_TINY_SCALE
    return does | DOES_SEGMENTS if args.q_segments is not None else does


def any_table(args: Arguments) -> bool:
    """Whether an operand that the pass has no part in fills a word from Q_OFFSET to NUM_PAGES."""
    absent = args.kv_lens is args.kv_starts is args.q_offset is args.intervals is args.cu_seqlens_q is None
    return not absent or args.dropout_p != 0.0


def softmax_scale(scale: float, does: int) -> tuple[int, int, int]:
    """SCALE_LOG2, SCALE and SIGN."""
    log2, plain, sign = scale_bits(scale)
    return (_ONE, float_bits(1.0), sign) if does & DOES_SCALE else (log2, plain, sign)


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
    """Of the nearest finite float32 to `x` >= 0."""
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
    """Q_OFFSET to NUM_PAGES. Small tensors that must be copied first are put into `kept`, to live as long as
    the call. `drop` is the address of the dropout stage if dropout_p is not 0, `k` the pool of K if there is
    a page table."""
    words = [*_table(args.q_offset), *_table(args.kv_lens), *_table(args.kv_starts)]
    if does & DOES_SOFTCAP:
        caps = float_bits(abs(scale) / args.softcap), float_bits(args.softcap)
    else:
        caps = 0, 0
    words += [does, float_bits(abs(scale)), *caps]
    words += _scores_shaped(args.mask)
    words += _scores_shaped(args.bias)
    words.append(0 if args.bias is None else BIAS_KINDS[args.bias.dtype])
    words += _per_head(args.alibi_slopes, kept)
    words += [*_ids(args.q_segments), *_ids(args.k_segments)]
    if args.intervals is None:
        words += [0] * 6
    else:
        lists = args.intervals if args.intervals[0, 0, 0].is_contiguous() else args.intervals.contiguous()
        kept.append(lists)
        strides = [0 if n == 1 else 4 * s for n, s in zip(lists.shape[:2], lists.stride()[:2], strict=True)]
        words += [lists.data_ptr(), *strides, 4 * lists.stride(2), lists.shape[3], args.interval_rows]
    words.append(members)
    for cu in (args.cu_seqlens_q, args.cu_seqlens_k):
        if cu is not None:
            cu = cu.contiguous()
            kept.append(cu)
        words.append(0 if cu is None else cu.data_ptr())
    words += _dropout(args, drop)
    words += _pages(args.page_table, k)
    return array("q", words).tobytes()


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
    """What is finite stays finite."""
    if x.dtype is torch.float64:
        x = torch.where(x.isfinite(), x.clamp(-FLT_MAX, FLT_MAX), x)
    return x.to(torch.float32)


def _table(per_batch: Tensor | None) -> tuple[int, int]:
    return (0, 0) if per_batch is None else (per_batch.data_ptr(), 4 * per_batch.stride(0))


def _dropout(args: Arguments, address: int) -> tuple[int, int, int, int]:
    p = args.dropout_p
    if p == 0.0:
        return 0, 0, 0, 0
    seed = 0 if args.dropout_seed is None else int(args.dropout_seed)
    return seed, math.floor(p * 2.0**32), address, float_bits(1.0 - p if p < 1.0 else 1.0)


def _pages(table: Tensor | None, k: Tensor | None) -> tuple[int, ...]:
    if table is None or k is None:
        return 0, 0, 0, 0, 0
    return (table.data_ptr(), *(4 * s for s in table.stride()), k.shape[2], k.shape[0])


def _ids(ids: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if ids is None else (ids.data_ptr(), 4 * ids.stride(0), 4 * ids.stride(1))


def _per_head(slopes: Tensor | None, kept: list[Tensor]) -> tuple[int, int, int]:
    if slopes is None:
        return 0, 0, 0
    slopes = _as_float32(slopes)
    kept.append(slopes)
    return slopes.data_ptr(), 4 * slopes.stride(0) if slopes.ndim == 2 else 0, 4 * slopes.stride(-1)


def _scores_shaped(x: Tensor | None) -> tuple[int, ...]:
    """Address and byte strides over (batch, head, row, key); a broadcast dimension has stride 0."""
    if x is None:
        return 0, 0, 0, 0, 0
    size = x.element_size()
    strides = [0 if n == 1 else size * s for n, s in zip(x.shape, x.stride(), strict=True)]
    return (x.data_ptr(), *[0] * (4 - len(strides)), *strides)


def estimated_us(shape: torch.Size, seqlen_k: int, dims: int, left: int, right: int, args: Arguments) -> int:
    """Work of a call on one core; reads no tensor."""
    batch, heads, seqlen_q, _ = shape
    keys = min(seqlen_k, left + 1 + right)
    half = 1 if right == 0 and keys == seqlen_k else 2
    work = dims * half * batch * heads * seqlen_q * keys // FLOPS_PER_US
    if args.cu_seqlens_q is not None:
        return work // max(1, args.cu_seqlens_q.shape[0] - 1)
    return work
