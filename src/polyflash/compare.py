"""How far a result may be from the right one: one tolerance and one measure for doctor, tune and bench.

The tests have a judge of their own (`tests/tolerance.py`), so that a mistake here cannot hide one there."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Largest relative L2 error of a row of the output that rounding explains: sums in another order; one rounding
# of the weights and one of the results in 16 bits. One wrong row must not hide among thousands of right ones,
# so rows are judged alone.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2.5e-3, "bfloat16": 2e-2}


def worst_row(found: Tensor, expected: Tensor, room: Tensor | None = None, *, floor: float = 0.0) -> float:
    """The largest L2 difference of any row, relative to that row and its `room`, or to the share `floor` of
    the largest row where that is more; inf if one is finite where the other is not."""
    wide = torch.float64 if torch.float64 in (found.dtype, expected.dtype) else torch.float32
    a, b = found.to(wide), expected.to(wide)
    same = a == b  # infinities of rows that see nothing
    return worst_error(torch.where(same, 0.0, a - b), b.masked_fill(~b.isfinite(), 0.0), room, floor=floor)


def worst_error(error: Tensor, expected: Tensor, room: Tensor | None = None, *, floor: float = 0.0) -> float:
    """`worst_row` of differences made already."""
    if not error.numel():
        return 0.0
    size = torch.linalg.vector_norm(expected, dim=-1)
    if room is not None:
        size = size + torch.linalg.vector_norm(room.to(size.dtype), dim=-1)
    if floor:
        size = size.clamp_min(floor * float(size.max()))
    error = torch.linalg.vector_norm(error, dim=-1)
    return largest(torch.where(error == 0, 0.0, error / size))


def largest(x: Tensor) -> float:
    """The largest magnitude; inf if one is no number."""
    return float(x.abs().nan_to_num(math.inf, math.inf, math.inf).max()) if x.numel() else 0.0


def finite(x: float) -> float | None:
    """JSON has no infinity."""
    return x if math.isfinite(x) else None
