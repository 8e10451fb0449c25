"""What the documentation of xFormers and FlashInfer says, in plain torch operations: neither runs on a CPU.

Only what docs/migrate.md calls. Sources: the "equivalent pytorch code" of `memory_efficient_attention` and
the masks of xformers/ops/fmha/attn_bias.py (xformers bed3978b); flashinfer/prefill.py, flashinfer/decode.py
and the KV layout tutorial (flashinfer fb28d724), whose LSE is of base 2 (attention/cascade.cuh).
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor


class LowerTriangularMask:
    """A query cannot attend to a key farther from the first key than the query is from the first query."""

    def materialize(self, rows: int, keys: int) -> Tensor:
        return torch.ones(rows, keys, dtype=torch.bool).tril().log()


class LowerTriangularFromBottomRightMask:
    """The same, counted from the last key and the last query; `window_size` counts the query's own key."""

    def __init__(self, window_size: int | None = None) -> None:
        self.window_size = window_size

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightMask:
        return LowerTriangularFromBottomRightMask(window_size)

    def materialize(self, rows: int, keys: int) -> Tensor:
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        if self.window_size is not None:
            seen = seen.triu(keys - rows - self.window_size + 1)
        return seen.log()


class BlockDiagonalMask:
    def __init__(self, lengths: list[int], causal: bool = False) -> None:
        self.lengths, self.causal = lengths, causal

    @classmethod
    def from_seqlens(cls, q_seqlen: list[int]) -> BlockDiagonalMask:
        return cls(q_seqlen)

    def make_causal(self) -> BlockDiagonalMask:
        return BlockDiagonalMask(self.lengths, True)

    def materialize(self, rows: int, keys: int) -> Tensor:
        assert rows == keys == sum(self.lengths)
        blocks = (torch.ones(n, n) for n in self.lengths)
        seen = torch.block_diag(*(block.tril() if self.causal else block for block in blocks))
        return seen.log()


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):  # type: ignore[no-untyped-def]
    """The equivalent code of its docstring, over all axes between sequence and channels."""
    assert p == 0.0
    q, k, v = (x.movedim(1, -2) for x in (query, key, value))
    scores = q * (query.shape[-1] ** -0.5 if scale is None else scale) @ k.mT
    if attn_bias is not None:
        scores = scores + attn_bias.materialize(query.shape[1], key.shape[1])
    return (scores.softmax(-1) @ v).movedim(-2, 1)


def single_prefill_with_kv_cache(q, k, v, *, causal=False, window_left=-1, return_lse=False):  # type: ignore[no-untyped-def]
    """q (qo_len, num_qo_heads, head_dim); out likewise, lse of base 2 (qo_len, num_qo_heads)."""
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q, k) / math.sqrt(q.shape[-1])
    at = torch.arange(rows)[:, None] + keys - rows
    seen = torch.ones(rows, keys, dtype=torch.bool) if not causal else torch.arange(keys) <= at
    if window_left >= 0:
        seen = seen & (torch.arange(keys) >= at - window_left)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    out = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
    return (out, scores.logsumexp(-1) / math.log(2)) if return_lse else out


def single_decode_with_kv_cache(q, k, v):  # type: ignore[no-untyped-def]
    return single_prefill_with_kv_cache(q[None], k, v)[0]


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, causal=False
    ):  # type: ignore[no-untyped-def]
        self.rows, self.pages = qo_indptr.tolist(), indptr.tolist()
        self.indices, self.last, self.page_size, self.causal = (
            indices,
            last_page_len.tolist(),
            page_size,
            causal,
        )

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        outs = []
        for b, last in enumerate(self.last):
            mine = self.indices[self.pages[b] : self.pages[b + 1]].long()
            length = (len(mine) - 1) * self.page_size + last
            k, v = (paged_kv_cache[mine, part].flatten(0, 1)[:length] for part in (0, 1))
            rows = q[self.rows[b] : self.rows[b + 1]]
            outs.append(single_prefill_with_kv_cache(rows, k, v, causal=self.causal))
        return torch.cat(outs)


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def plan(self, indptr, *args):  # type: ignore[no-untyped-def]
        super().plan(torch.arange(len(indptr)), indptr, *args)


def modules() -> dict[str, ModuleType]:
    """What `import xformers.ops` and `import flashinfer` find."""
    xformers, ops, fmha, biases = (
        ModuleType(name)
        for name in ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
    )
    xformers.ops, ops.fmha, fmha.attn_bias = ops, fmha, biases
    ops.memory_efficient_attention, ops.LowerTriangularMask = memory_efficient_attention, LowerTriangularMask
    biases.LowerTriangularFromBottomRightMask = LowerTriangularFromBottomRightMask
    biases.BlockDiagonalMask = BlockDiagonalMask
    flashinfer = ModuleType("flashinfer")
    for thing in (
        single_prefill_with_kv_cache,
        single_decode_with_kv_cache,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper,
    ):
        setattr(flashinfer, thing.__name__, thing)
    return {m.__name__: m for m in (xformers, ops, fmha, biases, flashinfer)}
