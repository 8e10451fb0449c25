"""Dropout bits in torch integer ops: Philox4x32-10 (Salmon et al., SC11), the same mask as on every backend.

    key = (seed lo, seed hi)
    counter = (key index // 4, query index, head + num_q_heads·batch, 0)
    word = key index % 4

A weight is kept iff its 32-bit word is at least floor(p·2^32).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words per counter; int64 tensors that hold 32-bit unsigned values and broadcast."""
    c0, c1, c2, c3 = counter
    key_lo, key_hi = seed & _LOW, (seed >> 32) & _LOW
    for turn in range(10):
        k0, k1 = (key_lo + turn * _WEYL[0]) & _LOW, (key_hi + turn * _WEYL[1]) & _LOW
        # 64-bit products wrap into the sign; shifting then masking still yields their two halves.
        x, y = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (y >> 32 & _LOW) ^ c1 ^ k0, y & _LOW, (x >> 32 & _LOW) ^ c3 ^ k1, x & _LOW
    return c0, c1, c2, c3


def kept(planes: Tensor, i0: int, rows: int, j0: int, keys: int, *, p: float, seed: int) -> Tensor:
    """Draws which weights of one tile survive, bool (*planes, rows, keys). `planes` (int64) is head +
    num_q_heads·batch; rows start at query i0, keys at key j0."""
    device = planes.device
    quads = torch.arange(j0 // 4, -(-(j0 + keys) // 4), device=device)
    queries = torch.arange(i0, i0 + rows, device=device)[:, None] & _LOW
    words = philox((quads, queries, planes[..., None, None], torch.zeros_like(quads)), seed)
    bits = torch.stack(words, -1).flatten(-2)[..., j0 % 4 : j0 % 4 + keys]
    return bits >= math.floor(p * 2.0**32)
