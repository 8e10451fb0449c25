"""FLOPs and bytes of a spec, counting visible pairs only.

Forward: 4 FLOPs per visible (query, key) pair and channel (a multiply and an add in each of the two
products), 2·(head_dim + head_dim_v) per pair in general; the backward pass does 2.5 times that."""

from __future__ import annotations

from dataclasses import dataclass

from polyflash.dtypes import BY_NAME
from polyflash.mask import visible_pairs
from polyflash.spec import AttentionSpec, Feature, Phase


@dataclass(frozen=True, slots=True)
class Work:
    """`flops` and `bytes` (inputs read once, outputs written once) of one call."""

    flops: float
    bytes: float


def work_of(spec: AttentionSpec) -> Work:
    """Lengths, masks, segments, interval lists and bounds of packed members are tensors and not read: such a
    call is counted as if all keys were live, and members as `_packed_pairs` says."""
    if Feature.VARLEN in spec.features:
        pairs = _packed_pairs(spec)
    else:
        offset = spec.seqlen_k - spec.seqlen_q if spec.offset is None else spec.offset
        pairs = visible_pairs(
            spec.seqlen_q, spec.seqlen_k, offset=offset, causal=spec.causal, window=spec.window
        )
    heads = spec.batch * spec.num_q_heads
    flops = 2.0 * (spec.head_dim + spec.head_dim_v) * heads * pairs
    queries = spec.batch * spec.num_q_heads * spec.seqlen_q
    keys = spec.batch * spec.num_kv_heads * spec.seqlen_k
    elements = (queries + keys) * (spec.head_dim + spec.head_dim_v)
    size = BY_NAME[spec.dtype].bytes
    if spec.phase is Phase.BACKWARD:
        return Work(2.5 * flops, 2.0 * elements * size)
    return Work(flops, float(elements * size))


def _packed_pairs(spec: AttentionSpec) -> int:
    """The most visible pairs that members of these totals and of at most these lengths can have: every row
    sees the longest member's keys, or its whole window."""
    rows, keys = spec.seqlen_q, spec.seqlen_k
    longest_q = rows if spec.max_seqlen_q is None else min(spec.max_seqlen_q, rows)
    longest_k = keys if spec.max_seqlen_k is None else min(spec.max_seqlen_k, keys)
    left, right = spec.window
    right = 0 if spec.causal else right
    width = longest_k if left is None or right is None else min(longest_k, left + right + 1)
    return min(rows * width, keys * longest_q)
