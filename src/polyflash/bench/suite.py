"""`polyflash bench` without its laboratory: dense, windowed and small problems against torch SDPA.

A case is timed only after its outputs were compared. Every other suite lives in `benchmarks/` of a checkout,
which is built on these cases and clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from polyflash.bench.check import Accuracy, sampled_error
from polyflash.bench.peak import Calibration, GpuCalibration, Peak, kind_of
from polyflash.bench.timing import FEWEST, LOW_SCALING, QUIET, Arm, Comparison, compared
from polyflash.compare import TOLERANCE, finite, worst_row
from polyflash.errors import SpecError
from polyflash.workloads import Workload, make, workloads

SDPA, OURS, ALONE = "torch SDPA", "polyflash", "polyflash, 1 thread"
SUITES = ("dense", "windows", "small")
SPLITS = 2e-3  # seconds on one thread from which a call is expected to use them all
_LONGEST = {"quick": 512, "": 2048, "long": 8192}
_SMALL = (  # batch, heads, seqlen, causal: where the cost of a call matters as much as the kernel
    *((1, 1, 16, False), (1, 2, 128, False), (1, 2, 128, True), (1, 8, 128, False), (1, 8, 256, True)),
    *((8, 12, 64, False), (1, 1, 32, False), (1, 2, 64, False), (1, 4, 256, False), (1, 2, 512, False)),
    (1, 2, 512, True),
)
MARKS = {
    "mismatch": "! results differ by more than rounding: no ratio",
    "contended": f"~ contended: fewer than {FEWEST} rounds ran at {QUIET:.0%} of full speed; all count",
    "low scaling": "? low scaling: cores were away during the calls, or the work was split badly",
}


@dataclass(frozen=True)
class Case:
    """A case: a problem, and its suite and kind. `plain`: our call without its window is worth timing too."""

    suite: str
    kind: str
    workload: Workload
    plain: bool = False


def cases(suite: str, size: str = "") -> list[Case]:
    """The cases of a suite. `size` is "quick", "" or "long"."""
    return {"dense": _dense, "windows": _windows, "small": _small}[suite](size)


def _dense(size: str) -> list[Case]:
    """The catalogue's plain problems, with 8 and with 2 key/value heads."""
    listed = []
    for w in workloads("bench"):
        if w.window is None and w.kv_heads == w.heads and w.seqlen_q <= _LONGEST[size]:
            kind = "causal" if w.causal else "full"
            listed.append(Case("dense", kind, w))
            listed.append(Case("dense", kind, replace(w, name=f"{w.name}-gqa", kv_heads=2)))
    return listed


def _windows(size: str) -> list[Case]:
    """The catalogue's causal windows, and windows to both sides."""
    listed = [Case("windows", "window", w, True) for w in workloads("bench") if w.window]
    listed = [] if size == "quick" else listed
    seqlen, side = (512, 32) if size == "quick" else (2048, 128)
    for dtype in ("float32", "bfloat16", "float16"):
        name = f"window-both-{dtype}-{seqlen}-d128"
        w = Workload(name, frozenset({"bench"}), 1, 8, 8, seqlen, seqlen, 128, dtype=dtype)
        listed.append(Case("windows", "both", replace(w, window=(side, side)), True))
    return listed


def _small(size: str) -> list[Case]:
    listed = []
    for dtype in ("float32", "bfloat16"):
        for batch, heads, n, causal in _SMALL:
            kind = "causal" if causal else "full"
            name = f"small-{kind}-{dtype}-{n}-b{batch}-h{heads}"
            w = Workload(name, frozenset({"bench"}), batch, heads, heads, n, n, 64, 0, dtype, causal)
            listed.append(Case("small", kind, w))
    return listed


def selected(listed: Sequence[Any], *, names: str = "", words: str = "") -> tuple[Any, ...]:
    """Cases by exact name (comma-separated), and those whose name has every one of `words`."""
    wanted = [n for n in names.split(",") if n]
    unknown = [n for n in wanted if n not in {c.workload.name for c in listed}]
    if unknown:
        raise SpecError(f"rows: got {', '.join(unknown)}, wanted names from `polyflash bench --list`")
    parts = words.lower().replace(",", " ").split()
    kept = [c for c in listed if not wanted or c.workload.name in wanted]
    kept = [c for c in kept if all(part in c.workload.name.split("-") for part in parts)]
    if not kept:
        raise SpecError(f"filter: got {words!r}, which no row has. See `polyflash bench --list`")
    return tuple(kept)


def band(rows: int, keys: int, causal: bool, window: tuple[int | None, int | None] | None) -> Tensor:
    """The keys that rows of a causal or windowed self-attention see, as a bool tensor."""
    left, right = window or (None, None)
    right = 0 if causal else right
    distance = torch.arange(keys) - torch.arange(rows)[:, None]
    above = distance >= -left if left is not None else distance == distance
    return above if right is None else above & (distance <= right)


def measured(
    case: Case, seconds: float, calibration: Calibration | GpuCalibration | None, device: str
) -> dict[str, Any]:
    """One case, timed and checked."""
    w = case.workload
    q, k, v, options = make(w, device=device)
    mask = band(w.seqlen_q, w.seqlen_k, bool(w.causal), w.window).to(device) if w.window else None
    grouped, causal = w.heads != w.kv_heads, bool(w.causal) and mask is None

    def ours() -> Tensor:
        return polyflash.attention(q, k, v, **options)

    def theirs() -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    with torch.no_grad():
        difference = worst_row(ours(), theirs())
        error, other = (sampled_error(q, k, v, out, None, options) for out in (ours(), theirs()))
        threads = torch.get_num_threads() if device == "cpu" else 1
        arms = [Arm(OURS, ours), Arm(SDPA, theirs), *([Arm(ALONE, ours, threads=1)] if threads > 1 else [])]
        found = compared(arms, device, seconds, calibration.speed if calibration else None)
    plan = polyflash.explain(q, k, v, **options)
    peak = calibration.peak(kind_of(w.dtype, plan.target)) if calibration else None
    flops = plan.work.flops
    row = row_of(case, plan.backend or "", found, difference, error, other, flops, peak, threads)
    return {"section": f"{case.suite}, {w.dtype}", **row, "plain": False}


def row_of(
    case: Case,
    backend: str,
    found: Comparison,
    difference: float,
    ours: Accuracy,
    theirs: Accuracy,
    flops: float,
    peak: Peak | None,
    threads: int,
    *,
    peer: str = SDPA,
    reads: bool = False,
) -> dict[str, Any]:
    """One case as plain data, every round in it, so that medians can be made again. No ratio is made without
    a peer or from results that differ. `reads`: the call is held against memory, most of whose rate one core
    may use, so that scaling says nothing."""
    w, summaries = case.workload, found.summaries()
    matches = max(difference, ours.weighted) <= TOLERANCE[w.dtype]
    scaling = found.ratio(ALONE, OURS) if threads > 1 else None
    slow = scaling is not None and summaries[ALONE].median >= SPLITS and scaling < LOW_SCALING * threads
    failing = {"mismatch": not matches, "contended": found.contended}
    failing["low scaling"] = slow and not found.contended and not reads
    gflops = flops / summaries[OURS].median / 1e9
    return {
        **{"name": w.name, "suite": case.suite, "kind": case.kind, "timed": "forward", "part": ""},
        **{"peer": peer or None, "dtype": w.dtype, "batch": w.batch},
        **{"num_q_heads": w.heads, "num_kv_heads": w.kv_heads, "seqlen_q": w.seqlen_q},
        **{"seqlen_k": w.seqlen_k, "head_dim": w.head_dim, "head_dim_v": w.dim_v, "causal": w.causal},
        **{"window": w.window, "backend": backend, "threads": threads, "flops": flops},
        "ratio": found.ratio(peer, OURS) if peer and matches else None,
        **{"plain": case.plain, "over_plain": None, "rate_of_plain": None, "after_torch": None},
        **{"gflops": gflops, "of_peak": gflops / peak.total if peak else None, "scaling": scaling},
        "marks": [mark for mark, on in failing.items() if on],
        "difference": finite(difference),
        "error": {"ours": finite(ours.relative), "peer": finite(theirs.relative), "rows": ours.rows},
        "arms": {
            name: {"median_s": s.median, "iqr_s": s.iqr, "rounds": s.rounds, "of": s.of}
            for name, s in summaries.items()
        },
        "rounds": [{"speed": r.speed, "seconds": r.seconds} for r in found.rounds],
    }
