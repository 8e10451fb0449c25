"""How far an output is from the right one: a sample of its rows against float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from polyflash.compare import largest, worst_error, worst_row
from polyflash.reference import attention_reference

EMPTY: Mapping[str, Any] = MappingProxyType({})
_SAMPLE_SCORES = 1 << 22  # scores the float64 oracle stores for one sample


@dataclass(frozen=True)
class Accuracy:
    """Error of a sample of rows against float64: the worst row's relative L2, the largest difference, that of
    lse. `weighted` is the worst row relative to the same attention over |v|: rounding is in proportion to
    that even where values cancel, so it is what a tolerance is for."""

    relative: float = 0.0
    weighted: float = 0.0
    largest: float = 0.0
    lse: float = 0.0
    heads: int = 0
    rows: int = 0

    def __or__(self, other: Accuracy) -> Accuracy:
        """The worse errors of both samples, and all rows; the heads of a packed batch are the same ones."""
        worse = map(max, zip(astuple(self), astuple(other), strict=True))
        return replace(Accuracy(*worse), rows=self.rows + other.rows)


def sampled_error(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: Mapping[str, Any] = EMPTY
) -> Accuracy:
    """Error against the float64 oracle on the first, middle and last rows of the first and last head of each
    end of the batch: bounded work at any length. q, k, v, out are (batch, heads, seqlen, head_dim); `options`
    as of `attention`, the mask a bool tensor, `alibi_slopes` (num_q_heads,)."""
    batch, heads, seqlen_q, _ = q.shape
    num_kv_heads, seqlen_k = k.shape[1], k.shape[2]
    if not out.numel() or not seqlen_k:
        return Accuracy()
    count = min(seqlen_q, 32, max(1, _SAMPLE_SCORES // seqlen_k // 12))
    starts = sorted({0, (seqlen_q - count) // 2, seqlen_q - count})
    places = sorted({(b, h) for b in (0, batch - 1) for h in (0, heads - 1)})
    found = Accuracy()
    for b, h in places:
        kv, head = slice(h * num_kv_heads // heads, h * num_kv_heads // heads + 1), slice(h, h + 1)
        for start in starts:
            at = slice(start, start + count)
            values = v[b : b + 1, kv]
            exact, exact_lse = attention_reference(
                q[b : b + 1, head, at],
                k[b : b + 1, kv],
                torch.cat((values, values.abs()), -1),
                **_seen_by(options, b, head, at, seqlen_k - seqlen_q),
            )
            exact, magnitude = exact.chunk(2, -1)
            got, wanted = _without_shared_nonfinite(out[b : b + 1, head, at], exact)
            weighted = worst_error(got - wanted, magnitude.masked_fill(~magnitude.isfinite(), 0.0))
            off_lse = 0.0
            if lse is not None:
                pair = _without_shared_nonfinite(lse[b : b + 1, head, at], exact_lse)
                off_lse = largest(pair[0] - pair[1])
            found |= Accuracy(worst_row(got, wanted), weighted, largest(got - wanted), off_lse, len(places))
    return found | Accuracy(rows=len(starts) * count)


def _seen_by(options: Mapping[str, Any], b: int, head: slice, rows: slice, offset: int) -> dict[str, Any]:
    """The options of a call as `rows` of one head have them."""
    seen = {name: x for name, x in options.items() if x is not None}
    seen["q_offset"] = (0 if seen.get("causal") == "top_left" else offset) + rows.start
    for name in ("mask", "bias"):
        if name in seen:
            seen[name] = part_of(seen[name], slice(b, b + 1), head, rows)
    for name in ("alibi_slopes", "sinks"):
        if name in seen:
            seen[name] = seen[name][head]
    return seen


def part_of(x: Tensor, *places: slice) -> Tensor:
    """The part of an operand that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
    x = x[(None,) * (4 - x.ndim)]
    for dim, at in enumerate(places):
        if x.shape[dim] > 1:
            x = x[(slice(None),) * dim + (at,)]
    return x


def _without_shared_nonfinite(got: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, with 0 where they agree on NaN or on an infinity: inputs may hold those."""
    got = got.double()
    agree = ~wanted.isfinite() & ((got == wanted) | (got.isnan() & wanted.isnan()))
    return got.masked_fill(agree, 0.0), wanted.masked_fill(agree, 0.0)
