"""The question: the operands of one attention call, and the frozen spec that planning reads.

`Arguments` carries tensors and travels to the kernel; `AttentionSpec` carries none and travels to the
planner."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

SMALL_ROWS = 16  # at most this many query rows: one vector of lanes on a 512-bit CPU
LONG_ROWS, LONGEST_ROWS = 4096, 8192  # from so many query rows on, a call runs a GPU into its power limit
MANY_KEYS = 512  # from this many keys on, a call is worth splitting or streaming
DECODE_ROWS = 8  # at most this many rows per key/value head: one pass over the keys at memory speed
PACKED_ROWS = 64  # as many rows share a block of keys while it is read, if the keys are many
MOST_SHARED_ROWS = 128  # on a CPU; see keys_to_share
MOST_POSITIONS = 2**31 - 2**20  # rows and keys together that 32-bit positions reach, with room for a tile


class Phase(str, Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    DECODE = "decode"
    STATISTICS = "statistics"  # of the weights: sums per key, entropy and largest score per row


class Feature(str, Enum):
    """A need of a call beyond dense self-attention. A capability row lists those its kernel has."""

    CAUSAL = "causal"
    WINDOW = "window"
    Q_OFFSET = "q_offset"
    KV_LENS = "kv_lens"
    KV_STARTS = "kv_starts"
    MASK = "bool mask"
    BIAS = "bias"
    ALIBI = "alibi_slopes"
    SOFTCAP = "softcap"
    SINKS = "sinks"
    SEGMENTS = "segments"
    INTERVALS = "interval lists"
    VARLEN = "varlen"
    PAGED = "paged keys"
    ROW_BOUNDS = "row bounds"
    CODES = "quantised keys"
    WIDE_GRADIENTS = "wide gradients"
    DROPOUT = "dropout"
    DROPOUT_START = "dropout of a part of a call"
    GQA = "grouped heads"
    HEAD_DIM_V = "head_dim_v != head_dim"
    LSE = "return_lse"
    BATCH_INVARIANT = "batch_invariant"


def mean_sizes(
    batch: int, members: int, seqlen_q: int, seqlen_k: int, longest: int | None = None
) -> tuple[int, int, int]:
    """Requests, and how many rows and keys each has: of packed members, if there are any, the mean. Where the
    `longest` is known, the mean over keys, Σn²/Σn, is no less than its square over all keys: a long member
    has most of the work beside short ones."""
    if not members:
        return batch, seqlen_q, seqlen_k
    if longest:
        members = min(members, max(1, -(-(seqlen_k**2) // longest**2)))
    return members, -(-seqlen_q // members), -(-seqlen_k // members)


CODE_TABLES = "k_scale", "k_shift", "v_scale", "v_shift"  # of Arguments


class Arguments(NamedTuple):
    """Everything beyond q, k, v, in the order of the op's schema; the rarer, the later.

    Layout is always (batch, heads, seqlen, head_dim) here; mask and bias broadcast to
    (batch, num_q_heads, seqlen_q, seqlen_k) and are not expanded. `offset` is the int form of `q_offset`
    (row i stands at position i + offset); None with no `q_offset` tensor means seqlen_k_live - seqlen_q."""

    causal: bool = False
    scale: float | None = None
    need_lse: bool = False
    window_left: int | None = None
    window_right: int | None = None
    offset: int | None = None
    kv_lens: Tensor | None = None  # int32 (batch,)
    kv_starts: Tensor | None = None  # int32 (batch,)
    q_offset: Tensor | None = None  # int32 (batch,)
    mask: Tensor | None = None  # bool, True = attend
    bias: Tensor | None = None  # any float dtype
    alibi_slopes: Tensor | None = None  # float (num_q_heads,) or (batch, num_q_heads)
    sinks: Tensor | None = None  # float (num_q_heads,)
    q_segments: Tensor | None = None  # int32 (batch, seqlen_q)
    k_segments: Tensor | None = None  # int32 (batch, seqlen_k)
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None  # int64 (), on the CPU
    batch_invariant: bool = False
    checked: bool = False
    backend: str = ""
    config: str = ""
    # Row block r = rows [r*interval_rows, (r+1)*interval_rows) sees the union of its intervals [start, end):
    # int32 (batch or 1, num_q_heads or 1, row blocks, intervals, 2), in rising order, disjoint, maybe empty.
    intervals: Tensor | None = None
    interval_rows: int = 0
    # Packed members: q (1, num_q_heads, total_q, head_dim), k and v likewise; member b is rows
    # [cu_seqlens_q[b], cu_seqlens_q[b+1]) of q and keys [cu_seqlens_k[b], ...) of k. "batch" above is then
    # the number of members.
    cu_seqlens_q: Tensor | None = None  # int32 (members + 1,)
    cu_seqlens_k: Tensor | None = None  # int32 (members + 1,)
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    # Paged keys: k (num_pages, num_kv_heads, page_size, head_dim) and v likewise are pools, and key j of
    # request b is slot j % page_size of page page_table[b, j // page_size]. "batch" is then the number of
    # requests and "seqlen_k" is max_pages * page_size; kv_lens is given, cu_seqlens_k is not. Entries of
    # pages beyond the live length are any bits; an entry outside the pool hides its keys.
    page_table: Tensor | None = None  # int32 (batch, max_pages)
    # Row i sees keys [row_bounds[i, 0], row_bounds[i, 1]) only, in every batch entry and head; clamped to
    # [0, seqlen_k].
    row_bounds: Tensor | None = None  # int32 (seqlen_q, 2)
    # k or v, or both, are codes: `Codes` of quant/scheme.py, of K and of V, as text. Scales and shifts are
    # (batch or pages of k or v, num_kv_heads, blocks of tokens, blocks of channels) in the dtype it names.
    codes: str = ""
    k_scale: Tensor | None = None
    k_shift: Tensor | None = None
    v_scale: Tensor | None = None
    v_shift: Tensor | None = None
    # Of the backward op: dk, dv and dsinks come in the dtype of their sums, float32 (float64 of float64), for
    # whoever adds those of several calls, and not rounded to that of their operands.
    wide_gradients: bool = False
    # Dropout of a part of a larger call: its first row, key and head there, and how many heads that has, 0
    # being as many as here.
    dropout_row: int = 0
    dropout_key: int = 0
    dropout_head: int = 0
    dropout_heads: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One problem, without tensors: what planning, work counting and `explain()` read. Sizes in elements."""

    phase: Phase
    dtype: str
    device: str
    batch: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    features: frozenset[Feature]
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    offset: int | None = None  # None: seqlen_k - seqlen_q
    scale: float | None = None
    needs_grad: bool = False
    tf32: bool = False  # does torch's switch let float32 products of this call have 11 bits?
    # Packed members: batch is 1, seqlen_q and seqlen_k are the totals, and these are all that is known.
    members: int = 0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    page_size: int = 0  # keys per page; 0: contiguous ones. seqlen_k is then that of the longest table row
    codes: str = ""  # as in Arguments

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_q_heads // max(1, self.num_kv_heads)


def length_class(n: int) -> int:
    """0, 1, up to 16 rows, up to 32, more, long, longest: what routes and tuned entries tell apart."""
    if n > 2 * SMALL_ROWS:
        return 6 if n >= LONGEST_ROWS else 5 if n >= LONG_ROWS else 4
    return 3 if n > SMALL_ROWS else 2 if n > 1 else n


def is_decode(
    num_q_heads: int, num_kv_heads: int, seqlen_q: int, seqlen_k: int, bounded: bool = False, device: str = ""
) -> bool:
    """Is a call of unpacked rows for `Phase.DECODE`: so few rows per key/value head that reading the keys is
    what takes time? Rows with bounds of their own are: each walk over the keys serves all of them."""
    if not (num_q_heads and num_kv_heads):
        return False
    group = num_q_heads // num_kv_heads
    rows = seqlen_q * group
    if bounded or rows <= DECODE_ROWS:
        return True
    if device == "cpu":
        return rows <= MOST_SHARED_ROWS and (seqlen_q == 1 or seqlen_k >= keys_to_share(rows, group))
    # of one token a neighbour's keys, which pad, decide nothing
    return rows <= PACKED_ROWS and (seqlen_q == 1 or seqlen_k >= MANY_KEYS)


def keys_to_share(rows: Any, group: int) -> Any:
    """From so many keys on, one walk for all rows of a kv head is as quick on a CPU as the forward kernel,
    whose tiles are rows of one query head: measured, as the results of few rows have it. Takes arrays too."""
    return rows if group >= 8 else rows * (8 if group == 1 else 2) + 1
