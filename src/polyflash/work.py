"""FLOPs and bytes of a spec, counting visible pairs only.

Each product of a pass costs 2 FLOPs, a multiply and an add, per visible (query, key) pair and channel.
Forward: QKᵀ and PV. Backward: QKᵀ again, dO·Vᵀ, PᵀdO, dS·K and dSᵀQ, 2.5 times the forward pass where
head_dim_v = head_dim. Statistics: QKᵀ."""

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


_PRODUCTS = {  # products over head_dim, and over head_dim_v
    Phase.FORWARD: (1, 1),
    Phase.DECODE: (1, 1),
    Phase.BACKWARD: (3, 2),
    Phase.STATISTICS: (1, 0),
}


def flops_per_pair(phase: Phase, head_dim: int, head_dim_v: int) -> float:
    """FLOPs of one pass per visible pair and head; of all three gradients in the backward pass."""
    qk, pv = _PRODUCTS[phase]
    return 2.0 * (qk * head_dim + pv * head_dim_v)


def work_of(spec: AttentionSpec) -> Work:
    """Lengths, masks, segments, interval lists and bounds of rows or packed members are tensors and not
    read: such a call is counted as if all keys were live, those of whole rows of a page table if there is
    one, and members as `_packed_pairs` says. A backward pass reads q, k, v, out, dout and lse, and writes
    dq, dk and dv."""
    if Feature.VARLEN in spec.features:
        pairs = _packed_pairs(spec)
    else:
        offset = spec.seqlen_k - spec.seqlen_q if spec.offset is None else spec.offset
        pairs = visible_pairs(
            spec.seqlen_q, spec.seqlen_k, offset=offset, causal=spec.causal, window=spec.window
        )
    heads = spec.batch * spec.num_q_heads
    flops = flops_per_pair(spec.phase, spec.head_dim, spec.head_dim_v) * heads * pairs
    queries = spec.batch * spec.num_q_heads * spec.seqlen_q
    keys = _keys(spec) * spec.num_kv_heads
    elements = (queries + keys) * (spec.head_dim + spec.head_dim_v)
    size = BY_NAME[spec.dtype]
    if spec.phase is Phase.BACKWARD:
        return Work(flops, float(2 * elements * size + queries * (8 if spec.dtype == "float64" else 4)))
    return Work(flops, float(elements * size))


def _keys(spec: AttentionSpec) -> int:
    """Keys per head, of all requests."""
    return (spec.members if spec.page_size and spec.members else spec.batch) * spec.seqlen_k


def _packed_pairs(spec: AttentionSpec) -> int:
    """The most visible pairs that members of these totals and of at most these lengths can have: every row
    sees the longest member's keys, or its whole window."""
    rows, keys = spec.seqlen_q, spec.seqlen_k
    longest_q = rows if spec.max_seqlen_q is None else min(spec.max_seqlen_q, rows)
    longest_k = keys if spec.max_seqlen_k is None else min(spec.max_seqlen_k, keys)
    left, right = spec.window
    right = 0 if spec.causal else right
    width = longest_k if left is None or right is None else min(longest_k, left + right + 1)
    return min(rows * width, _keys(spec) * longest_q)
