"""Sums that the CPU backward engine makes outside its kernel: the gradients of a bias and of sinks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyflash.backends.cpu import backward_configs
from polyflash.results import empty_in_order_of

SUMMED_ALIKE = 1 << 14  # elements, half of what torch gives one thread
OWN_SUMS_BYTES = 64 << 20  # up to here every head and batch entry has a bias gradient of its own


class BiasSums(NamedTuple):
    """The sums of a bias's gradient: float32 `sums` with byte strides over batch, head, row, key and
    chunk; whether entries that share a sum, of the batch or of kv heads, must run one after another."""

    sums: Tensor
    strides: tuple[int, int, int, int, int]
    one_batch: bool
    one_head: bool

    def words(self) -> tuple[int, ...]:
        """dbias to dbias_chunk."""
        return (self.sums.data_ptr(), *self.strides)

    def total(self, like: Tensor) -> Tensor:
        x = self.sums.sum(0) if self.sums.ndim == 5 else self.sums
        for d, size in enumerate((1,) * (4 - like.ndim) + like.shape):
            if size == 1 and x.shape[d] != 1:
                x = _sum(x, d).unsqueeze(d)
        return x.reshape(like.shape).to(like.dtype)


def zeros_in_order_of(x: Tensor, parts: int) -> Tensor:
    """float32 sums shaped and laid out as the gradient of `x`; (parts, *x.shape) if there are several."""
    if x.is_contiguous():
        return torch.zeros(x.shape if parts == 1 else (parts, *x.shape), device="cpu")
    strides = empty_in_order_of(x, x.shape[3]).stride()
    if parts == 1:
        return torch.zeros(x.numel(), device="cpu").as_strided(x.shape, strides)
    return torch.zeros(parts, x.numel(), device="cpu").as_strided((parts, *x.shape), (x.numel(), *strides))


def bias_sums(bias: Tensor, batch: int, heads: tuple[int, int], seqlens: tuple[int, int]) -> BiasSums:
    """Small sums are one per head and batch entry, and per chunk of keys if there is one key; large ones have
    the shape of the bias."""
    num_q_heads, num_kv_heads = heads
    seqlen_q, seqlen_k = seqlens
    b, h, rows, keys = (1,) * (4 - bias.ndim) + bias.shape
    if keys == 1:
        chunks = -(-seqlen_k // backward_configs.chunk_keys(seqlen_k))
        sums = torch.zeros(chunks, batch, num_q_heads, seqlen_q, 1, device="cpu")
        chunk, of_batch, of_head, of_row, _ = (4 * s for s in sums.stride())
        return BiasSums(sums, (of_batch, of_head, of_row, 0, chunk), False, False)
    if rows == 1:
        sums = torch.zeros(batch, num_q_heads, 1, seqlen_k, device="cpu")
        of_batch, of_head = (4 * s for s in sums.stride()[:2])
        return BiasSums(sums, (of_batch, of_head, 0, 4, 0), False, False)
    shared = (b < batch, h < num_q_heads)
    if any(shared) and 4 * batch * num_q_heads * rows * keys <= OWN_SUMS_BYTES:
        b, h = batch, num_q_heads
    sums = torch.zeros(b, h, rows, keys, device="cpu")
    of_batch, of_head, of_row = (
        0 if n == 1 else 4 * s for n, s in zip((b, h, 0), sums.stride(), strict=False)
    )
    return BiasSums(sums, (of_batch, of_head, of_row, 4, 0), b < batch, h == 1 and num_kv_heads > 1)


def _sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one dimension, in parts: torch cuts a longer sum to one element by its number of threads."""
    parts = [part.sum(dim) for part in x.split(SUMMED_ALIKE, dim)]
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """float32 -Σ exp(sink - lse)·delta over batch entries and rows; a row of no member has lse = -inf and no
    part."""
    delta = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sinks.float()[:, None] - lse)
    lost = (share * delta).masked_fill_(lse == -torch.inf, 0.0)
    return -_sum(_sum(lost, 2), 0)
