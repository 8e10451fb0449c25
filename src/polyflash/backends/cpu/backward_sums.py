"""What the CPU backward engine sums outside its kernel: the gradients of a bias and of sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from polyflash.backends.cpu import backward_configs

if TYPE_CHECKING:
    from torch import Tensor


class BiasSums(NamedTuple):
    """Where the gradient of a bias is summed: float32 `sums` with byte strides over batch, head, row, key and
    chunk; whether entries that share a sum, of the batch or of kv heads, must run one after another."""

    sums: Tensor
    strides: tuple[int, int, int, int, int]
    one_batch: bool
    one_head: bool

    def words(self) -> tuple[int, ...]:
        """DBIAS to DBIAS_CHUNK."""
        return (self.sums.data_ptr(), *self.strides)

    def total(self, like: Tensor) -> Tensor:
        x = self.sums.sum(0) if self.sums.ndim == 5 else self.sums
        shape = (1,) * (4 - like.ndim) + like.shape
        over = [d for d in range(4) if shape[d] == 1 and x.shape[d] != 1]
        return (x.sum(over, keepdim=True) if over else x).reshape(like.shape).to(like.dtype)


def bias_sums(bias: Tensor, batch: int, heads: tuple[int, int], seqlens: tuple[int, int]) -> BiasSums:
    """Small gradients have a sum per head and batch entry, and per chunk of keys if they have one key; large
    ones their own shape."""
    num_q_heads, num_kv_heads = heads
    seqlen_q, seqlen_k = seqlens
    b, h, rows, keys = (1,) * (4 - bias.ndim) + bias.shape
    if keys == 1:
        chunks = -(-seqlen_k // backward_configs.chunk_keys(seqlen_k))
        sums = torch.zeros(chunks, batch, num_q_heads, seqlen_q, 1)
        chunk, of_batch, of_head, of_row, _ = (4 * s for s in sums.stride())
        return BiasSums(sums, (of_batch, of_head, of_row, 0, chunk), False, False)
    if rows == 1:
        sums = torch.zeros(batch, num_q_heads, 1, seqlen_k)
        of_batch, of_head = (4 * s for s in sums.stride()[:2])
        return BiasSums(sums, (of_batch, of_head, 0, 4, 0), False, False)
    sums = torch.zeros(b, h, rows, keys)
    of_batch, of_head, of_row = (
        0 if n == 1 else 4 * s for n, s in zip((b, h, 0), sums.stride(), strict=False)
    )
    return BiasSums(sums, (of_batch, of_head, of_row, 4, 0), b < batch, h == 1 and num_kv_heads > 1)


def sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """-Σ exp(sink - lse)·delta over batch entries and rows; a row of no member has lse = -inf and no part."""
    delta = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sinks.float()[:, None] - lse)
    return -(share * delta).masked_fill_(lse == -torch.inf, 0.0).sum((0, 2)).to(sinks.dtype)
