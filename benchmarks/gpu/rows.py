"""One row of the GPU suite: its arms prepared, their outputs checked, then timed by turns."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.accuracy import error
from benchmarks.gpu.arms import (
    OURS,
    SLICE_TOLERANCE,
    Call,
    GpuArm,
    Tensors,
    applicable,
    forget_compiled,
    is_fatal,
    make_tensors,
    poison,
    prepared,
    why,
)
from benchmarks.gpu.cases import BACKWARD, DECODE, GRAPH, HOST, GpuCase
from benchmarks.gpu.machine import Sensors
from benchmarks.gpu.timing import SETS, Device, Timed, interleaved, replayed

_GRAPH_SETS = 20  # together beyond the L2, so that a graph of as many calls reads memory
_HOST_CALLS = 100
_SHARE = 0.4  # of the device's memory, for all sets of inputs


class DeviceLost(Exception):
    """The device answers this process no more; a new one may go on. `arm`: by whom, "" if that is unknown."""

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(f"{arm or 'unknown'}: {reason}")
        self.arm, self.reason = arm, reason


def tolerance(case: GpuCase, arm: GpuArm) -> float:
    """Largest relative L2 error of the checked slice. Gradients sum twice as many rounded products."""
    return SLICE_TOLERANCE[case.dtype] * arm.loosened * (2 if case.part == BACKWARD else 1)


def verdict(case: GpuCase, arm: GpuArm, found: dict[str, Any]) -> str:
    """Why an arm whose answer is `found` is not timed; empty if it is."""
    if "reason" in found:
        return str(found["reason"])
    if not found["error"] <= tolerance(case, arm):
        return f"wrong: error {found['error']:.1e}, at most {tolerance(case, arm):.1e}"
    return ""


def measure(
    case: GpuCase,
    every: Sequence[GpuArm],
    device: Device,
    *,
    rounds: int,
    sensors: Sensors,
    excused: dict[str, str],
) -> dict[str, Any]:
    """The row as plain data. `excused`: arms that are not to be started, with the reason.

    Raises:
        DeviceLost: by a kernel that was caught in an illegal access, or the like."""
    forget_compiled()
    absent = {arm.name: excused[arm.name] for arm in applicable(every, case) if arm.name in excused}
    errors: dict[str, float] = {}
    timed: list[Timed] = []
    sets: list[Tensors] = []
    try:
        sets = _sets(case, device)
        for arm in applicable(every, case):
            if arm.name not in absent:
                reason, calls = _checked(case, arm, sets, device, errors)
                if reason:
                    absent[arm.name] = reason
                else:
                    timed.append(Timed(arm, calls))
        if timed:
            interleaved(
                timed, _clock(case, device), rounds=rounds, repeats=_HOST_CALLS if case.part == HOST else 0
            )
    except torch.cuda.OutOfMemoryError as problem:
        absent |= {arm.name: why(problem) for arm in applicable(every, case) if arm.name not in absent}
        timed = []
    except Exception as problem:
        if is_fatal(problem):
            raise DeviceLost("", why(problem)) from problem
        raise
    row = _about(case) | {
        "sets": len(sets),
        "arms": {t.arm.name: t.plain() for t in timed if t.samples},
        "errors": errors,
        "absent": absent,
        "sensors": sensors.taken(),
    }
    timed, sets = [], []
    gc.collect()
    if device.is_cuda:
        torch.cuda.empty_cache()
    return row


def _about(case: GpuCase) -> dict[str, Any]:
    return {
        "kind": "row",
        "name": case.name,
        "case": case.plain(),
        "flops": case.work.flops,
        "bytes": case.work.bytes,
        "key_bytes": case.key_bytes,
    }


def left_out(case: GpuCase, reason: str) -> dict[str, Any]:
    """The row of a case that is not measured."""
    return _about(case) | {"sets": 0, "arms": {}, "errors": {}, "absent": {OURS: reason}, "sensors": {}}


def _sets(case: GpuCase, device: Device) -> list[Tensors]:
    """As many sets of inputs as rotate, fewer if they are large."""
    wanted = _GRAPH_SETS if case.part == GRAPH else SETS
    if device.is_cuda:
        memory = torch.cuda.get_device_properties(device.name).total_memory * _SHARE
        wanted = min(wanted, max(1, int(memory / max(1.0, case.work.bytes))))
    return [make_tensors(case, device.name, seed) for seed in range(wanted)]


def _checked(
    case: GpuCase, arm: GpuArm, sets: Sequence[Tensors], device: Device, errors: dict[str, float]
) -> tuple[str, list[Call]]:
    """(why it is not timed or "", its calls). The output of its first call is checked here, in the process
    that times it."""
    try:
        calls = prepared(arm, case, sets)
        with arm.scope():
            poison(sets[0])
            found = error(case, sets[0], calls[0]())
            errors[arm.name] = found if math.isfinite(found) else -1.0
            reason = verdict(case, arm, {"error": found})
            if case.part == GRAPH and not reason:
                calls = [device.graphed(calls)]
        return reason, calls
    except torch.cuda.OutOfMemoryError as problem:
        return why(problem), []
    except Exception as problem:  # whatever a peer raises is why it has no figure
        if is_fatal(problem):
            raise DeviceLost(arm.name, why(problem)) from problem
        return why(problem), []


def _clock(case: GpuCase, device: Device) -> Callable[[Sequence[Call], int], float]:
    if case.part == DECODE:
        return device.cold_seconds
    if case.part == GRAPH:
        return replayed(device)
    return device.host_seconds if case.part == HOST else device.seconds


def is_mismatch(row: dict[str, Any]) -> bool:
    """Whether polyflash itself was wrong."""
    return str(row["absent"].get(OURS, "")).startswith("wrong")
