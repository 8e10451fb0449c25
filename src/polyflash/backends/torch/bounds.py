"""Bounds of single rows, looked at one score tile at a time: row i sees keys of [bounds[i, 0], bounds[i, 1]).

Bounds on a device are not read by the host: every tile is visited there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def narrowed(
    bounds: Tensor, i0: int, rows: int, blocks: tuple[int, int], block_n: int, seqlen_q: int
) -> tuple[int, int]:
    """Narrows key blocks [n_lo, n_hi) to those of which rows i0.. of a tile may see a key."""
    if bounds.device.type != "cpu":
        return blocks
    own = bounds[max(i0, 0) : min(i0 + rows, seqlen_q)].long().clamp(min=0)
    own = own[own[:, 0] < own[:, 1]]
    if own.shape[0] == 0:
        return blocks[0], blocks[0]
    lo, hi = int(own[:, 0].min()), int(own[:, 1].max())
    return max(blocks[0], lo // block_n), min(blocks[1], -(-hi // block_n))


def within(bounds: Tensor, i0: int, rows: int, j0: int, keys: int, seqlen_q: int) -> Tensor | None:
    """Finds the pairs of a tile that the bounds allow, bool (rows, keys); None if all. Rows outside the
    tensor have those of its first or last row."""
    at = torch.arange(i0, i0 + rows, device=bounds.device).clamp(0, seqlen_q - 1)
    starts, ends = bounds.index_select(0, at).long().unsqueeze(1).unbind(-1)
    if bounds.device.type == "cpu" and bool(((starts <= j0) & (ends >= j0 + keys)).all()):
        return None
    j = torch.arange(j0, j0 + keys, device=bounds.device)
    return (j >= starts) & (j < ends)
