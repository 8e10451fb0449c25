"""One row measured: what is to be timed, interleaved, after its results were compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks import gradients
from benchmarks.cases import DECODE, FORWARD, STEPS, Case
from benchmarks.decode import problems as decode
from benchmarks.decode import stream
from benchmarks.decode.keys import READERS, between
from benchmarks.problem import PLAIN, Problem, build, moved
from polyflash.bench import suite as plain
from polyflash.bench.peak import Calibration, GpuCalibration, kind_of
from polyflash.bench.suite import ALONE, OURS
from polyflash.bench.timing import Arm, Comparison, compared
from polyflash.target import detect

AFTER = "polyflash, right after a torch operation"
Row = dict[str, Any]


def measure(
    case: Case,
    *,
    seconds: float,
    calibration: Calibration | GpuCalibration | None,
    peer: Callable[[Problem], Callable[[], Tensor]] | None = None,
    device: str = "cpu",
) -> Row:
    """Times one row and checks it: every row of the results against the peer's (against our torch row where
    there is no peer), a sample against float64. `peer` makes the call that torch SDPA's stands for else, of a
    row that is timed forward. On a GPU `calibration` is its own, and threads do not count."""
    with torch.set_grad_enabled(case.timed != FORWARD):
        timed = _timed(case, peer, device)
        difference, error, other = timed.check()
        here = detect("cpu") if device == "cpu" else detect("cuda", torch.device(device).index or 0)
        threads = torch.get_num_threads() if device == "cpu" else 1
        arms = [Arm(name, call) for name, call in timed.arms.items()]
        ours = arms[0].call
        if device == "cpu" and (case.suite != DECODE or case.part == STEPS):
            arms.append(Arm(AFTER, ours, before=_operators()))
            arms += [Arm(between(a.name), a.call, before=_operators()) for a in arms if a.name in READERS]
        if threads > 1:
            arms.append(Arm(ALONE, ours, threads=1))
        speed, peak = calibration.speed if calibration else None, None
        if calibration and not timed.bytes:
            peak = calibration.peak(kind_of(case.workload.dtype, here))
        elif isinstance(calibration, Calibration):
            speed = stream.MemorySpeed(calibration) if stream.available() else None
        found = compared(arms, device, seconds, speed)
    return row(
        case, timed.backend, found, difference, error, other, timed.flops, timed.plain_flops, peak, threads,
        bytes=timed.bytes, chosen=timed.chosen,
    )  # fmt: skip


def _timed(case: Case, peer: Callable[[Problem], Callable[[], Tensor]] | None, device: str) -> Any:
    """What a row times and checks."""
    if case.suite == DECODE:
        return decode.build(case)
    problem = build(case)
    problem = problem if device == "cpu" else moved(problem, device)
    if case.timed != FORWARD:
        return gradients.differentiated(problem, case.timed, case.peer)
    return problem.timed(case.peer, peer(problem) if peer else None)


@lru_cache(maxsize=1)
def _operators() -> Callable[[], object]:
    """What torch does between the steps of a model: a matrix product and elementwise work, on its threads."""
    x, w, y = torch.randn(256, 1024), torch.randn(1024, 1024), torch.randn(256, 1024)
    return lambda: torch.nn.functional.silu(x @ w) * y


def row(
    case: Case, backend: str, found: Comparison, difference: float, ours: Any, theirs: Any, flops: float,
    plain_flops: float, peak: Any, threads: int, *, bytes: int = 0, chosen: dict[str, Any] | None = None,
) -> Row:  # fmt: skip
    """The whole measurement as plain data; `ours` and `theirs` are errors against float64."""
    made = plain.row_of(
        case, backend, found, difference, ours, theirs, flops, peak, threads, peer=case.peer, reads=bytes > 0
    )
    arms = found.rounds[0].seconds
    over = found.ratio(OURS, PLAIN) if case.plain and "mismatch" not in made["marks"] else None
    made |= {"timed": case.timed, "part": case.part, "over_plain": over}
    made["rate_of_plain"] = over and flops / plain_flops / over
    made["after_torch"] = found.ratio(AFTER, OURS) if AFTER in arms else None
    if case.suite != DECODE:
        return made
    names = ("laid", "page_size", "private", "ranks", "rank")
    return made | {name: getattr(case, name) for name in names} | {"bytes": bytes, **(chosen or {})}
