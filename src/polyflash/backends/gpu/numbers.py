"""The numbers of a call as the kernels of every GPU engine take them, and which of them matter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from polyflash.backends.gpu.views import FAR

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.spec import Arguments

SOFTCAPS = (2.0**-126, 1e30)  # beyond, float32 loses the quotient or the product; scores are 0, or not capped
LOG2E = 1.4426950408889634


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
    drop_row: Any = None  # where a part begins in the call whose dropout it has
    drop_key: Any = None
    drop_head: Any = None
    drop_heads: Any = None  # of that call
    num_q_heads: Any = None  # of this one


class Flags(NamedTuple):
    """Constants that the numbers of a call decide."""

    HAS_OFFSET: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    NEGATIVE: bool
    CHANGED: bool
    SOFTCAP: bool
    DROPOUT: bool
    DROPOUT_START: bool


def sizes_of(q: Tensor, k: Tensor, args: Arguments) -> tuple[int, int, int]:
    """batch, seqlen_q and seqlen_k, the first of `Numbers`."""
    batch, seqlen_k = q.shape[0], k.shape[2]
    if args.cu_seqlens_q is not None:
        batch = args.cu_seqlens_q.shape[0] - 1
    if args.page_table is not None:
        seqlen_k *= args.page_table.shape[1]
    return batch, q.shape[2], seqlen_k


def numbers_of(q: Tensor, k: Tensor, args: Arguments) -> Numbers:
    """The numbers of a call that say nothing of its grid."""
    return Numbers(
        *sizes_of(q, k, args),
        offset=_near(args.offset),
        left=_near(args.window_left),
        right=0 if args.causal else _near(args.window_right),
        scale=scale_of(q.shape[3], args),
        softcap=min(max(args.softcap, SOFTCAPS[0]), SOFTCAPS[1]) if args.softcap else 0.0,
        num_q_heads=q.shape[1],
        **dropout_of(args, q.shape[1]),
    )


def dropout_of(args: Arguments, num_q_heads: int) -> dict[str, Any]:
    """Numbers of dropout: its seed, words that drop a weight, and where a part begins in its call."""
    seed = 0 if args.dropout_seed is None else int(args.dropout_seed)
    return {
        "seed_lo": _signed(seed),
        "seed_hi": _signed(seed >> 32),
        "drop_below": _signed(math.floor(args.dropout_p * 2.0**32)),  # of p = 1 none: what is kept counts 0
        "keep_scale": 1.0 / (1.0 - args.dropout_p) if args.dropout_p < 1.0 else 0.0,
        "drop_row": args.dropout_row,
        "drop_key": args.dropout_key,
        "drop_head": args.dropout_head,
        "drop_heads": args.dropout_heads or num_q_heads,
    }


def _near(x: int | None) -> int:
    return 0 if x is None else max(-FAR, min(x, FAR))


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def scale_of(head_dim: int, args: Arguments) -> float:
    return 1.0 / math.sqrt(head_dim) if args.scale is None else args.scale


def starts_elsewhere(args: Arguments) -> bool:
    """Is a call a part of one that has dropout?"""
    return any((args.dropout_row, args.dropout_key, args.dropout_head, args.dropout_heads))


def flags_of(q: Tensor, args: Arguments) -> Flags:
    scale = scale_of(q.shape[3], args)
    changed = args.softcap != 0.0 or args.bias is not None or args.alibi_slopes is not None
    return Flags(
        HAS_OFFSET=args.offset is not None,
        HAS_LEFT=args.window_left is not None,
        HAS_RIGHT=args.causal or args.window_right is not None,
        NEGATIVE=scale < 0 and not changed,
        CHANGED=changed or scale == 0.0,
        SOFTCAP=args.softcap != 0.0,
        DROPOUT=args.dropout_p != 0.0,
        DROPOUT_START=starts_elsewhere(args),
    )
