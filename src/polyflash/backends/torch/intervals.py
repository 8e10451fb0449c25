"""Interval lists of row blocks, looked at one score tile at a time.

A key is listed iff more intervals started up to it than ended: one running sum per row block, whatever the
number of intervals, so the memory is that of the tile."""

from __future__ import annotations

import torch
from torch import Tensor


def lists_of(intervals: Tensor, i0: int, rows: int, seqlen_q: int, interval_rows: int) -> tuple[Tensor, int]:
    """The lists (..., row blocks, intervals, 2) that rows i0.. of a tile read, and the first one's block."""
    first = max(i0, 0) // interval_rows
    last = (min(i0 + rows, seqlen_q) - 1) // interval_rows
    return intervals[..., first : last + 1, :, :], first


def touches(lists: Tensor, j0: int, keys: int) -> bool:
    """Says whether a list has a key of the tile. On a device nothing is read, and the answer is yes."""
    if lists.device.type != "cpu":
        return True
    starts, ends = lists.unbind(-1)
    return bool(((starts < ends) & (starts < j0 + keys) & (ends > j0)).any())


def listed(intervals: Tensor, i0: int, rows: int, j0: int, keys: int, seqlen_q: int, of: int) -> Tensor:
    """Finds the pairs of a tile that the lists of row blocks of `of` rows allow, bool (..., rows, keys)."""
    lists, first = lists_of(intervals, i0, rows, seqlen_q, of)
    starts, ends = (lists.long() - j0).clamp(0, keys).unbind(-1)
    counted = (starts < ends).to(torch.int32)  # unchecked lists may hold ends before starts
    change = counted.new_zeros((*lists.shape[:-2], keys + 1))
    change.scatter_add_(-1, starts, counted).scatter_add_(-1, ends, -counted)
    seen = change[..., :keys].cumsum(-1) > 0
    block = torch.arange(i0, i0 + rows, device=lists.device).clamp(0, seqlen_q - 1) // of - first
    return seen.index_select(-2, block)
