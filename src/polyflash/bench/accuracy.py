"""How far an output is from the right one: every row against a peer's, a sample of rows against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyflash.reference import attention_reference

# Largest relative L2 error of a row of the output that rounding explains. One wrong row must not hide among
# thousands of right ones, so rows are judged alone.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
_SAMPLE_SCORES = 1 << 22  # scores the float64 oracle stores for one sample


@dataclass(frozen=True)
class Accuracy:
    """Error of a sample of rows against float64: the worst row's relative L2, the largest difference, that of
    lse. `weighted` is the worst row relative to the same attention over |v|: rounding is in proportion to
    that even where values cancel, so it is what a tolerance is for."""

    relative: float
    weighted: float
    largest: float
    lse: float
    heads: int
    rows: int

    def __or__(self, other: Accuracy) -> Accuracy:
        """Of both samples: the worse errors, all rows; the heads of a packed batch are the same ones."""
        return Accuracy(
            max(self.relative, other.relative),
            max(self.weighted, other.weighted),
            max(self.largest, other.largest),
            max(self.lse, other.lse),
            max(self.heads, other.heads),
            self.rows + other.rows,
        )


def worst_row(out: Tensor, expected: Tensor, room: Tensor | None = None) -> float:
    """The largest L2 difference of any row, relative to that row and its `room`; inf if one is not finite
    where the other is."""
    wide = torch.float64 if expected.dtype is torch.float64 else torch.float32
    return _worst(out.to(wide) - expected.to(wide), expected.to(wide), room)


def _worst(error: Tensor, expected: Tensor, room: Tensor | None = None) -> float:
    if not error.numel():
        return 0.0
    size = torch.linalg.vector_norm(expected, dim=-1)
    size = size if room is None else size + torch.linalg.vector_norm(room.to(size.dtype), dim=-1)
    error = torch.linalg.vector_norm(error, dim=-1)
    relative = torch.where(error == 0, 0.0, error / size)
    return float(relative.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def sampled_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Accuracy:
    """Error against the float64 oracle on the first, middle and last rows of the first and last head of each
    end of the batch: bounded work at any length. q, k, v, out are (batch, heads, seqlen, head_dim); operands
    as in `attention`, `alibi_slopes` (num_q_heads,)."""
    batch, heads, seqlen_q, _ = q.shape
    num_kv_heads, seqlen_k = k.shape[1], k.shape[2]
    if not out.numel() or not seqlen_k:
        return Accuracy(0.0, 0.0, 0.0, 0.0, 0, 0)
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    count = min(seqlen_q, 32, max(1, _SAMPLE_SCORES // seqlen_k // 12))
    starts = sorted({0, (seqlen_q - count) // 2, seqlen_q - count})
    places = sorted({(b, h) for b in (0, batch - 1) for h in (0, heads - 1)})
    relative = weighted = largest = lse_error = 0.0
    for b, h in places:
        kv, head = slice(h * num_kv_heads // heads, h * num_kv_heads // heads + 1), slice(h, h + 1)
        for start in starts:
            at = slice(start, start + count)
            values = v[b : b + 1, kv]
            expected, expected_lse = attention_reference(
                q[b : b + 1, head, at], k[b : b + 1, kv], torch.cat((values, values.abs()), -1),
                causal=causal, window=window, scale=scale, q_offset=offset + start, softcap=softcap,
                mask=_part(mask, b, h, at), bias=_part(bias, b, h, at),
                alibi_slopes=None if alibi_slopes is None else alibi_slopes[head],
                sinks=None if sinks is None else sinks[head],
            )  # fmt: skip
            exact, magnitude = expected.chunk(2, -1)
            got, wanted = _without_shared_nonfinite(out[b : b + 1, head, at], exact)
            relative = max(relative, worst_row(got, wanted))
            weighted = max(weighted, _worst(got - wanted, magnitude.masked_fill(~magnitude.isfinite(), 0.0)))
            largest = max(largest, _largest(got - wanted))
            if lse is not None:
                got, wanted = _without_shared_nonfinite(lse[b : b + 1, head, at], expected_lse)
                lse_error = max(lse_error, _largest(got - wanted))
    return Accuracy(relative, weighted, largest, lse_error, len(places), len(starts) * count)


def _part(x: Any, b: int, h: int, rows: slice) -> Any:
    """What one head's rows see of an operand that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
    if x is None:
        return None
    x = x[(None,) * (4 - x.ndim)]
    for dim, at in enumerate((slice(b, b + 1), slice(h, h + 1), rows)):
        if x.shape[dim] > 1:
            x = x[(slice(None),) * dim + (at,)]
    return x


def _without_shared_nonfinite(got: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, with 0 where they agree on NaN or on an infinity: inputs may hold those."""
    got = got.double()
    agree = ~wanted.isfinite() & ((got == wanted) | (got.isnan() & wanted.isnan()))
    return got.masked_fill(agree, 0.0), wanted.masked_fill(agree, 0.0)


def _largest(difference: Tensor) -> float:
    return float(difference.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max())
