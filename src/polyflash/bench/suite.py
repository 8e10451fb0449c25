"""The benchmark's rows: polyflash against torch SDPA on the same tensors, outputs compared before any ratio
is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from polyflash.bench.peak import Calibration, Peak, kind_of
from polyflash.bench.timing import LOW_SCALING, Arm, Comparison, compare
from polyflash.reference import attention_reference
from polyflash.target import detect
from polyflash.work import work_of
from polyflash.workloads import Workload, make, workloads

# Largest relative L2 error of a row of the output that rounding explains. One wrong row must not hide among
# thousands of right ones, so rows are judged alone.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
OURS, PEER, ALONE, WHOLE = "polyflash", "torch SDPA", "polyflash, 1 thread", "polyflash, no window"
AFTER = "polyflash, right after a torch operation"
_LONGEST = 2048  # without --long
_SPLITS = 2e-3  # seconds on one thread from which a call is expected to use them all
_SAMPLE_SCORES = 1 << 22  # scores the float64 oracle stores for one sample
_SMALL = (  # batch, heads, seqlen, causal: where the cost of a call matters as much as the kernel
    (1, 1, 16, False),
    (1, 2, 128, False),
    (1, 2, 128, True),
    (1, 8, 128, False),
    (1, 8, 256, True),
    (8, 12, 64, False),
)


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


@dataclass(frozen=True)
class Result:
    """One measured row. Times are seconds per call; `peak` is None where the machine could not be
    calibrated."""

    workload: Workload
    backend: str
    comparison: Comparison
    difference: float  # between the two outputs: the worst row's relative L2
    ours: Accuracy
    peer: Accuracy
    flops: float
    peak: Peak | None
    threads: int

    @property
    def matches(self) -> bool:
        tolerance = TOLERANCE[self.workload.dtype]
        return self.difference <= tolerance and self.ours.weighted <= tolerance

    @property
    def ratio(self) -> float | None:
        """torch's median over ours; none is made from outputs that differ."""
        return self.comparison.ratio(PEER, OURS) if self.matches else None

    @property
    def gflops(self) -> float:
        return self.flops / self.comparison.summary(OURS).median / 1e9

    @property
    def of_peak(self) -> float | None:
        return self.gflops / self.peak.total if self.peak else None

    @property
    def scaling(self) -> float | None:
        """Our time on one thread over our time on all of them."""
        return self.comparison.ratio(ALONE, OURS) if self.threads > 1 else None

    @property
    def whole(self) -> float | None:
        """Time of the same call without its window over the time with it."""
        return self.comparison.ratio(WHOLE, OURS) if self.workload.window else None

    @property
    def after(self) -> float:
        """Our time right after a parallel torch operation over our time on settled cores."""
        return self.comparison.ratio(AFTER, OURS)

    @property
    def marks(self) -> tuple[str, ...]:
        """Why this row must not be quoted as it stands."""
        marks = []
        if not self.matches:
            marks.append("mismatch")
        if self.comparison.contended:
            marks.append("contended")
        elif self.scaling is not None and self.comparison.summary(ALONE).median >= _SPLITS:
            marks.extend(["low scaling"] if self.scaling < LOW_SCALING * self.threads else [])
        return tuple(marks)


def rows(*, long: bool = False, quick: bool = False) -> tuple[Workload, ...]:
    """The plain rows of the catalogue with 8 and with 2 key/value heads, its windows, and small shapes."""
    longest = 512 if quick else 8192 if long else _LONGEST
    catalogue = workloads("bench")
    chosen = []
    for w in catalogue:
        if w.window is None and w.kv_heads == w.heads and w.seqlen_q <= longest:
            chosen += [w, replace(w, name=f"{w.name}-gqa", kv_heads=2)]
    if not quick:
        chosen += [w for w in catalogue if w.window is not None]
    tag = frozenset({"bench"})
    for dtype in ("float32", "bfloat16"):
        for batch, heads, seqlen, causal in _SMALL:
            name = f"small-{'causal' if causal else 'full'}-{dtype}-{seqlen}-b{batch}-h{heads}"
            chosen.append(
                Workload(name, tag, batch, heads, heads, seqlen, seqlen, 64, dtype=dtype, causal=causal)
            )
    return tuple(chosen)


def selected(chosen: Sequence[Workload], *, names: str = "", words: str = "") -> tuple[Workload, ...]:
    """Rows by exact name (comma-separated), and those whose name has every one of `words`."""
    wanted = [n for n in names.split(",") if n]
    unknown = [n for n in wanted if n not in {w.name for w in chosen}]
    if unknown:
        raise polyflash.SpecError(
            f"rows: got {', '.join(unknown)}, wanted names from `polyflash bench --list`"
        )
    parts = words.lower().replace(",", " ").split()
    kept = [
        w for w in chosen if (not wanted or w.name in wanted) and all(p in w.name.split("-") for p in parts)
    ]
    if not kept:
        raise polyflash.SpecError(f"filter: got {words!r}, which no row has. See `polyflash bench --list`")
    return tuple(kept)


def measure(workload: Workload, *, seconds: float, calibration: Calibration | None) -> Result:
    """Times one row and checks it: against torch everywhere, against float64 on a sample."""
    q, k, v, options = make(workload)
    ours, peer = _ours(q, k, v, options), _peer(q, k, v, options)
    threads = torch.get_num_threads()
    x = torch.randn(512, 512)
    arms = [Arm(OURS, ours), Arm(PEER, peer), Arm(AFTER, ours, before=lambda: x @ x)]
    if threads > 1:
        arms.append(Arm(ALONE, ours, threads=1))
    if workload.window:
        arms.append(Arm(WHOLE, _ours(q, k, v, {**options, "window": None})))
    with torch.no_grad():
        out, expected = ours(), peer()
        plan = polyflash.explain(q, k, v, **options)
        comparison = compare(arms, seconds=seconds, speed=calibration.speed if calibration else None)
        return Result(
            workload=workload,
            backend=plan.backend or "",
            comparison=comparison,
            difference=worst_row(out, expected),
            ours=sampled_error(q, k, v, out, None, causal=workload.causal, window=workload.window),
            peer=sampled_error(q, k, v, expected, None, causal=workload.causal, window=workload.window),
            flops=work_of(plan.spec).flops,
            peak=calibration.peak(kind_of(workload.dtype, detect("cpu"))) if calibration else None,
            threads=threads,
        )


def _ours(q: Tensor, k: Tensor, v: Tensor, options: dict) -> Callable[[], Tensor]:
    causal, window = options.get("causal", False), options.get("window")
    return lambda: polyflash.attention(q, k, v, causal=causal, window=window)


def _peer(q: Tensor, k: Tensor, v: Tensor, options: dict) -> Callable[[], Tensor]:
    """torch SDPA on the same call; a window is a bool mask there."""
    grouped = q.shape[1] != k.shape[1]
    causal, mask = options.get("causal", False), None
    if options.get("window"):
        left, right = options["window"]
        right = 0 if causal else right
        distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        above = distance >= -left if left is not None else distance == distance
        mask = above if right is None else above & (distance <= right)
        causal = False
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def worst_row(out: Tensor, expected: Tensor) -> float:
    """The largest relative L2 difference of any row; inf if one is not finite where the other is."""
    wide = torch.float64 if expected.dtype is torch.float64 else torch.float32
    return _worst(out.to(wide) - expected.to(wide), expected.to(wide))


def _worst(error: Tensor, expected: Tensor) -> float:
    if not error.numel():
        return 0.0
    size = torch.linalg.vector_norm(expected, dim=-1)
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
) -> Accuracy:
    """Error against the float64 oracle on the first, middle and last rows of the first and last head of each
    end of the batch: bounded work at any length. q, k, v, out are (batch, heads, seqlen, head_dim)."""
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
        kv = slice(h * num_kv_heads // heads, h * num_kv_heads // heads + 1)
        for start in starts:
            at = slice(start, start + count)
            values = v[b : b + 1, kv]
            expected, expected_lse = attention_reference(
                q[b : b + 1, h : h + 1, at], k[b : b + 1, kv], torch.cat((values, values.abs()), -1),
                causal=causal, window=window, scale=scale, q_offset=offset + start,
            )  # fmt: skip
            exact, magnitude = expected.chunk(2, -1)
            got, wanted = _without_shared_nonfinite(out[b : b + 1, h : h + 1, at], exact)
            relative = max(relative, worst_row(got, wanted))
            weighted = max(weighted, _worst(got - wanted, magnitude.masked_fill(~magnitude.isfinite(), 0.0)))
            largest = max(largest, _largest(got - wanted))
            if lse is not None:
                got, wanted = _without_shared_nonfinite(lse[b : b + 1, h : h + 1, at], expected_lse)
                lse_error = max(lse_error, _largest(got - wanted))
    return Accuracy(relative, weighted, largest, lse_error, len(places), len(starts) * count)


def _without_shared_nonfinite(got: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, with 0 where they agree on NaN or on an infinity: inputs may hold those."""
    got = got.double()
    agree = ~wanted.isfinite() & ((got == wanted) | (got.isnan() & wanted.isnan()))
    return got.masked_fill(agree, 0.0), wanted.masked_fill(agree, 0.0)


def _largest(difference: Tensor) -> float:
    return float(difference.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max())
