"""The error that schemes cost a call, and the choice of the cheapest scheme that holds a bound.

    error² ≈ Σ_d E[(scale·q_d)²]·Var[δk_d]  +  ‖δv‖² / ‖v‖²

δk and δv are what the round trip through codes does to k and v. For channels that are alike the first term is
σ_S²·ε_K², the spread of the scores times the relative error of k. It is right for rows that spread over many
keys and too high for others, so a choice is checked on a sample of rows against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from polyflash.compare import worst_row
from polyflash.errors import described, spec_error
from polyflash.quant.scheme import NAMED, Scheme
from polyflash.quant.tensor import dequantize, quantize

Pair = tuple[Scheme, Scheme]
_TURNED = replace(NAMED["int4"][0], rotation="hadamard")
# What `report` shows: the named pairs, and the best for K that has wide channels.
REPORTED: dict[str, Pair] = {
    **NAMED,
    "int8-affine": (Scheme(granularity="channel", tokens=64, symmetric=False), Scheme(channels=32)),
    "int8-rotated": (Scheme(smoothing="mean", rotation="hadamard"), Scheme()),
    "int4-rotated": (_TURNED, NAMED["int4"][1]),
}
# Schemes for K and for V that a choice is made from, any with any.
FOR_K = tuple(dict.fromkeys(k for k, _ in REPORTED.values()))
FOR_V = tuple(dict.fromkeys(v for _, v in REPORTED.values()))
_HEADS, _ROWS, _SCORES, _VALUES = 6, 64, 1 << 22, 1 << 24  # most of a sample: rows are those of a head
_TRUST = 4.0  # a prediction that misses the bound by more is believed
_MARGIN = 0.95  # of the bound: rows that were not sampled may be worse


class Error(NamedTuple):
    """How far one output is from another: relative L2 over all elements; the same with the mean row of the
    other taken off both, which a large mean of v would hide; relative L2 of the worst row; cosine; largest
    difference in units of the other's standard deviation."""

    relative: float
    centred: float
    worst_row: float
    cosine: float
    largest: float


def error_of(found: Tensor, exact: Tensor) -> Error:
    """The error of `found` (..., rows, channels)."""
    a, b = found.double(), exact.double()
    off = (a - b).norm()
    if off == 0:
        return Error(0.0, 0.0, 0.0, 1.0, 0.0)
    centre = (b - b.mean(-2, keepdim=True)).norm()
    cosine = (a * b).sum() / (a.norm() * b.norm())
    largest = (a - b).abs().max() / b.std(correction=0)
    return Error(float(off / b.norm()), float(off / centre), worst_row(a, b), float(cosine), float(largest))


class Sample(NamedTuple):
    """Some rows (heads, group, rows, head_dim) with the keys and values (heads, 1, seqlen_k, ...) of their
    heads; `seen` (rows, seqlen_k) is None where rows see every key."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor | None
    scale: float

    def attend(self, k: Scheme | None = None, v: Scheme | None = None) -> Tensor:
        """Attention in float64 over the values that codes of k and v stand for, or over them as they are."""
        keys, values = (_through(x, s).double() for x, s in ((self.k, k), (self.v, v)))
        scores = self.q.double() @ keys.mT * self.scale
        if self.seen is not None:
            scores = scores.masked_fill(~self.seen, -math.inf)
        return scores.softmax(-1) @ values

    def predicted_of_k(self, scheme: Scheme) -> float:
        """Error by the formula of this module, of codes for k."""
        off = (_through(self.k, scheme) - self.k.float()).var(2, correction=0)  # (heads, 1, head_dim)
        weight = (self.q.float() * self.scale).square().mean(2)  # (heads, group, head_dim)
        return float((weight * off).sum(-1).mean().sqrt())

    def predicted_of_v(self, scheme: Scheme) -> float:
        """Error by the formula of this module, of codes for v."""
        values = self.v.float()
        return float((_through(self.v, scheme) - values).norm() / values.norm().clamp_min(1e-30))


def _through(x: Tensor, scheme: Scheme | None) -> Tensor:
    return x.float() if scheme is None else dequantize(quantize(x, scheme), torch.float32)


def sample_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | str, scale: float | None = None, rows: int = _ROWS
) -> Sample:
    """Rows of a few heads: of the heads whose outliers are the worst, and of others evenly spread."""
    heads, keys, last = k.shape[0] * k.shape[1], k.shape[2], q.shape[2] - 1
    worst = torch.cat([_outliers(x).argmax(1) for x in (k, v)]).tolist()
    even = torch.linspace(0, heads - 1, min(heads, _HEADS)).long().tolist()
    most = max(1, min(_HEADS, _VALUES // (keys * k.shape[3])))
    at = torch.tensor(list(dict.fromkeys([*worst, *even]))[:most], device=k.device)
    of_head = q.unflatten(1, (k.shape[1], -1)).flatten(0, 1)[at]
    count = max(1, min(last + 1, rows, _SCORES // (len(at) * of_head.shape[1] * keys)))
    places = torch.linspace(last, 0, count, device=q.device).long()  # the last row sees most: it is one
    seen = None
    if causal:
        until = places + (0 if causal == "top_left" else keys - 1 - last)
        seen = torch.arange(keys, device=q.device) <= until[:, None]
        places, seen = places[until >= 0], seen[until >= 0]
    k, v = (x.flatten(0, 1)[at][:, None] for x in (k, v))
    return Sample(of_head[:, :, places], k, v, seen, q.shape[3] ** -0.5 if scale is None else scale)


class Outliers(NamedTuple):
    """How a tensor differs from normal values, in the worst of its heads: `mean`, the largest mean of a
    channel over the usual spread of one; `channel`, the largest spread of a channel over the usual one;
    `kurtosis` of channels about their means, 3 of normal values."""

    mean: float
    channel: float
    kurtosis: float

    def __str__(self) -> str:
        return (
            f"channel means to {self.mean:.1f} x the spread, channels to {self.channel:.1f} x the usual one,"
            f" kurtosis to {self.kurtosis:.1f}"
        )


def _outliers(x: Tensor) -> Tensor:
    """The three figures of `Outliers` of every head: (3, batch * heads)."""
    x = x.flatten(0, 1).float()
    mean = x.mean(1)
    x = x - mean[:, None]
    spread = x.square().mean(1).sqrt().clamp_min(1e-30)
    usual = spread.median(1).values
    return torch.stack(
        (mean.abs().amax(1) / usual, spread.amax(1) / usual, (x / spread[:, None]).pow(4).mean((1, 2)))
    )


@dataclass(frozen=True)
class Recommendation:
    """Result of `recommend_scheme`.

    `scheme` is a pair, for k and for v; None if none holds the bound. `error` is the relative L2 of the
    sampled rows, `predicted` what the formula says, `bits` those per value of k and v together: of this pair,
    or of the nearest one. `reason` says it in words; `outliers` are those of k and of v."""

    scheme: Pair | None
    reason: str
    error: float
    predicted: float
    bits: float
    outliers: tuple[Outliers, ...]


def recommend_scheme(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    error: float = 1e-2,
    *,
    causal: bool | str = False,
    scale: float | None = None,
) -> Recommendation:
    """Recommends, for k and v, the schemes of fewest bits whose error holds a bound on these tensors.

    It looks at all tokens of up to six key/value heads, those with the worst outliers among them, and at up
    to 64 query rows of each. What else the model computes it cannot know: pass tensors of a typical input,
    and let a `Guard` watch.

    Args:
        q: float (batch, num_q_heads, seqlen_q, head_dim).
        k, v: float (batch, num_kv_heads, seqlen_k, ...), without padding.
        error: largest relative L2 of the output against float64 attention over k and v as they are.
        causal, scale: as of `attention`.

    Returns:
        A `Recommendation`: `.scheme`, a pair for `quantize(k, scheme[0])` and `quantize(v, scheme[1])`, or
        None; `.reason`.

    Raises:
        SpecError: tensors of other shapes, empty or not finite; a bound that is no positive number."""
    if not isinstance(error, (int, float)) or not 0 < error < math.inf:
        raise spec_error("error", described(error), "a positive number", "1e-2 is one per cent.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        right = isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point() and x.numel()
        if not right or x.shape[0] != q.shape[0] or q.shape[1] % x.shape[1]:
            change = "Pass q, k and v as attention() takes them, before they are quantised."
            raise spec_error(name, described(x), "a float tensor (batch, heads, seqlen, head_dim)", change)
        if odd := int((~x.isfinite()).sum()):
            change = "No error can be told of them: pass tensors of a step that has none."
            raise spec_error(name, f"{odd} values that are not finite", "finite values", change)
    with torch.no_grad():
        outliers = (Outliers(*_outliers(x).amax(1).tolist()) for x in (k, v))
        return _chosen(sample_of(q, k, v, causal, scale), float(error), *outliers)


def candidates(k: Tensor, v: Tensor) -> dict[Pair, float]:
    """Pairs that these tensors can have, with their bits per value of k and v together; fewest first."""
    fit = [[s for s in which if x.shape[3] % s.codes.packed == 0] for which, x in ((FOR_K, k), (FOR_V, v))]
    pairs = {(a, b): bits_of((a, b), k.shape, v.shape) for a in fit[0] for b in fit[1]}
    return dict(sorted(pairs.items(), key=lambda item: item[1]))


def bits_of(pair: Pair, *shapes: Sequence[int]) -> float:
    """Bits per value of k and v (..., seqlen_k, channels) together."""
    bits = (s.bits_per_value(*shape[-2:]) * shape[-1] for s, shape in zip(pair, shapes, strict=True))
    return sum(bits) / sum(shape[-1] for shape in shapes)


def _chosen(sample: Sample, bound: float, *outliers: Outliers) -> Recommendation:
    """Walks over the pairs by their bits. What codes of k or v cost alone is found once for each scheme."""
    exact = sample.attend()
    cost = cache(lambda k, v: error_of(sample.attend(k, v), exact).relative)
    of_k, of_v = cache(sample.predicted_of_k), cache(sample.predicted_of_v)
    pairs = candidates(sample.k, sample.v)

    def said(pair: Pair, holds: bool) -> Recommendation:
        error, predicted = cost(*pair), math.hypot(of_k(pair[0]), of_v(pair[1]))
        reason = (
            f"{'' if holds else f'No scheme holds {bound:.1e}. Nearest: '}{text_of(pair)}:"
            f" {pairs[pair]:.2f} bits per value, error {error:.1e} ({predicted:.1e} predicted) of"
            f" {exact[..., 0].numel()} rows against float64. K: {outliers[0]}. V: {outliers[1]}."
        )
        return Recommendation(pair if holds else None, reason, error, predicted, pairs[pair], outliers)

    for k, v in pairs:
        if math.hypot(of_k(k), of_v(v)) > _TRUST * bound:
            continue
        if math.hypot(cost(k, None), cost(None, v)) <= 1.1 * bound and cost(k, v) <= _MARGIN * bound:
            return said((k, v), True)
    return said(min(pairs, key=lambda pair: math.hypot(cost(pair[0], None), cost(None, pair[1]))), False)


def text_of(pair: Pair) -> str:
    """Two schemes in a few words: their codes as kernels read them, and what is done before."""
    k, v = (f"{s.codes}{' rotated' if s.rotation != 'none' else ''}" for s in pair)
    return f"K {k}, V {v}"
