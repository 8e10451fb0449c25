"""One row of the benchmark measured: times interleaved, results compared before any ratio is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import gradients
from benchmarks.cases import FORWARD, Case
from benchmarks.problem import Problem, build
from polyflash.bench.check import Accuracy
from polyflash.bench.peak import Calibration, Peak, kind_of
from polyflash.bench.race import GpuCalibration, compared
from polyflash.bench.suite import ALONE, OURS, SPLITS
from polyflash.bench.timing import LOW_SCALING, Arm, Comparison
from polyflash.compare import TOLERANCE
from polyflash.target import detect

PLAIN, AFTER = "polyflash, plain", "polyflash, right after a torch operation"


@dataclass(frozen=True)
class Result:
    """One measured row. Times are seconds per call; `peak` is None where the machine could not be
    calibrated. The arm of a peer has the name of `case.peer`. `bytes` are those that our call reads at least,
    of a row that is held against memory; `chosen` is what such a row was found to use."""

    case: Case
    backend: str
    comparison: Comparison
    difference: float  # between our results and the peer's: the worst row's relative L2
    ours: Accuracy
    peer: Accuracy
    flops: float
    plain_flops: float
    peak: Peak | None
    threads: int
    bytes: int = 0
    chosen: dict[str, Any] = field(default_factory=dict)

    @property
    def matches(self) -> bool:
        tolerance = TOLERANCE[self.case.workload.dtype]
        return self.difference <= tolerance and self.ours.weighted <= tolerance

    @property
    def ratio(self) -> float | None:
        """The peer's median over ours; none is made without a peer or from outputs that differ."""
        return self.comparison.ratio(self.case.peer, OURS) if self.case.peer and self.matches else None

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
    def over_plain(self) -> float | None:
        """Our time over that of our own plain call; none is made from a wrong output."""
        return self.comparison.ratio(OURS, PLAIN) if self.case.plain and self.matches else None

    @property
    def rate_of_plain(self) -> float | None:
        """Our rate per visible pair over that of our own plain call."""
        return None if self.over_plain is None else self.flops / self.plain_flops / self.over_plain

    @property
    def after(self) -> float | None:
        """Our time right after a parallel torch operation over our time on settled cores."""
        timed = self.comparison.rounds[0].seconds
        return self.comparison.ratio(AFTER, OURS) if AFTER in timed else None

    @property
    def marks(self) -> tuple[str, ...]:
        """Why this row must not be quoted as it stands. One core may use most of the memory's rate, so
        scaling says nothing about rows that read."""
        marks = []
        if not self.matches:
            marks.append("mismatch")
        if self.comparison.contended:
            marks.append("contended")
        elif self.scaling is not None and not self.bytes and self.comparison.summary(ALONE).median >= SPLITS:
            marks.extend(["low scaling"] if self.scaling < LOW_SCALING * self.threads else [])
        return tuple(marks)


def measure(
    case: Case,
    *,
    seconds: float,
    calibration: Calibration | GpuCalibration | None,
    peer: Callable[[Problem], Callable[[], Tensor]] | None = None,
    device: str = "cpu",
) -> Result:
    """Times one row and checks it: every row of the results against the peer's (against our torch row where
    there is no peer), a sample against float64. `peer` makes the call that torch SDPA's stands for else, of a
    row that is timed forward. On a GPU `calibration` is its own, and threads do not count."""
    problem = build(case).to(device)
    if peer:
        problem = replace(problem, torch=peer(problem))
    timed = problem if case.timed == FORWARD else gradients.differentiated(problem, case.timed)
    ours = timed.ours
    with torch.set_grad_enabled(case.timed != FORWARD):
        difference, error, peer_error = timed.check()
        here = detect("cpu") if device == "cpu" else detect("cuda", torch.device(device).index or 0)
        threads = torch.get_num_threads() if device == "cpu" else 1
        arms = [Arm(OURS, ours)]
        if timed.torch:
            arms.append(Arm(case.peer, timed.torch))
        if device == "cpu":
            x = torch.randn(512, 512)
            arms.append(Arm(AFTER, ours, before=lambda: x @ x))
        if threads > 1:
            arms.append(Arm(ALONE, ours, threads=1))
        if timed.plain:
            arms.append(Arm(PLAIN, timed.plain))
        comparison = compared(arms, device, seconds, calibration.speed if calibration else None)
        return Result(
            case=case,
            backend=ours.backend,
            comparison=comparison,
            difference=difference,
            ours=error,
            peer=peer_error,
            flops=timed.flops,
            plain_flops=timed.plain_flops,
            peak=calibration.peak(kind_of(case.workload.dtype, here)) if calibration else None,
            threads=threads,
        )
