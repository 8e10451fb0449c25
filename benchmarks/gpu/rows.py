"""One row of the GPU suite: its kernels tried, its arms prepared, their outputs checked, then timed by turns
on rotated inputs.

Kernels that may hang or crash are tried before anything is timed, in processes that can be killed. Several
work at once, which also fills the caches of compiled kernels; nothing is timed meanwhile. Between the waves
of a run they wait. An answer is {"error": …}, the relative error of the slice, or {"reason": …}.
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.exact import forward_error, gradient_error
from benchmarks.gpu import arms as gpu_arms
from benchmarks.gpu.arms import (
    BACKWARD,
    GRAPH,
    HOST,
    OURS,
    ROWS,
    STEPS,
    Call,
    GpuArm,
    GpuCase,
    Tensors,
    applicable,
)
from benchmarks.gpu.device import Clock, Device, Sensors
from benchmarks.peers import Answer, Child, why
from polyflash.bench.peak import ceilings
from polyflash.bench.timing import iqr, median

SLICE_TOLERANCE = {"bfloat16": 1.2e-2, "float16": 3e-3, "float32": 2e-5}  # relative L2 of a slice
ROUNDS, CALLS, FEWEST_CALLS = 5, 20, 3
SETS = 3  # of inputs, rotated
_SETS = {GRAPH: 20, ROWS: 1, STEPS: 64}  # graphs that read memory have them beyond the L2, few rows in it
_BEYOND = 256 << 20  # bytes that no L2 holds, of codes neither
_SHARE = 0.4  # of the device's memory, for all sets of inputs
_SAMPLE = 0.05  # seconds: calls of more than a twentieth of it are fewer than `CALLS`
_HOST_CALLS = 100
_ORDER = random.Random(0)
START = 120.0  # seconds in which a child has imported everything
_OVERTIME = 10.0  # seconds that a task may go on after the end of its wave


class DeviceLost(Exception):
    """The device answers this process no more; a new one may go on. `arm`: by whom, "" if that is unknown."""

    def __init__(self, arm: str, reason: str) -> None:
        self.arm, self.reason = arm, reason
        super().__init__(f"{arm or 'unknown'}: {reason}")


@dataclass
class Timed:
    """One arm of a row: its calls, and the samples of every round, in seconds per call."""

    arm: GpuArm
    calls: Sequence[Call]
    repeats: int = CALLS
    samples: list[float] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        middle, spread = median(self.samples), iqr(self.samples)
        return {"median_s": middle, "iqr_s": spread, "calls": self.repeats, "samples": self.samples}


def interleaved(timed: Sequence[Timed], clock: Clock, *, rounds: int, repeats: int = 0) -> None:
    """Adds `rounds` samples to every arm, once each per round, in a random order: a device at its power limit
    is as quick as what ran before lets it be. Half a sample goes by unmeasured for the same reason.
    `repeats`: calls of a sample; 0: as many as fit `_SAMPLE`, at most `CALLS`."""
    for t in timed:
        with t.arm.scope():
            _, once = (clock(t.calls, max(2, len(t.calls))) for _ in range(2))
        t.repeats = repeats or min(CALLS, max(FEWEST_CALLS, round(_SAMPLE / max(once, 1e-9))))
    for _ in range(rounds):
        for t in _ORDER.sample(list(timed), len(timed)):
            with t.arm.scope():
                clock(t.calls, max(1, t.repeats // 2))
                t.samples.append(clock(t.calls, t.repeats))


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
    case: GpuCase, every: Sequence[GpuArm], device: Device, sensors: Sensors, rounds: int,
    excused: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """The row as plain data. `excused`: arms that are not to be started, with the reason.

    Raises:
        DeviceLost: by a kernel that was caught in an illegal access, or the like."""
    here = applicable(every, case)
    absent = {arm.name: excused[arm.name] for arm in here if arm.name in excused}
    errors: dict[str, float] = {}
    on: dict[str, str] = {}
    timed: list[Timed] = []
    sets: list[Tensors] = []
    wanted = _SETS.get(case.part, SETS)
    wanted = min(wanted, 1 + _BEYOND // case.key_bytes) if case.part == STEPS else wanted
    if device.is_cuda:  # fewer if they are large
        memory = torch.cuda.get_device_properties(device.name).total_memory * _SHARE
        wanted = min(wanted, max(1, int(memory / max(1.0, case.work.bytes))))
    try:
        sets = [gpu_arms.make_tensors(case, device.name, seed) for seed in range(wanted)]
        for arm in (arm for arm in here if arm.name not in absent):
            calls, answer = first_call(case, arm, sets, device.graphed(case.part))
            if "fatal" in answer:
                raise DeviceLost(arm.name, answer["reason"])
            on |= {arm.name: answer["on"]} if answer.get("on") else {}
            if "error" in answer:
                errors[arm.name] = answer["error"] if math.isfinite(answer["error"]) else -1.0
            if reason := verdict(case, arm, answer):
                absent[arm.name] = reason
            else:
                timed.append(Timed(arm, calls))
        repeats = _HOST_CALLS if case.part == HOST else 0
        interleaved(timed, device.clock(case.part), rounds=rounds, repeats=repeats)
    except torch.cuda.OutOfMemoryError as problem:
        absent |= {arm.name: why(problem) for arm in here if arm.name not in absent}
        timed = []
    except Exception as problem:
        if gpu_arms.is_fatal(problem) and not isinstance(problem, DeviceLost):
            raise DeviceLost("", why(problem)) from problem
        raise
    row = left_out(case, "") | {"sets": len(sets), "errors": errors, "on": on, "absent": absent}
    row |= {"arms": {t.arm.name: t.plain() for t in timed if t.samples}, "sensors": sensors.taken()}
    timed, sets, calls = [], [], []
    gpu_arms.forget()
    return row


def left_out(case: GpuCase, reason: str) -> dict[str, Any]:
    """The row of a case that is not measured."""
    work = {"flops": case.work.flops, "bytes": case.work.bytes, "key_bytes": case.key_bytes}
    about = {"kind": "row", "name": case.name, "case": vars(case), **work}
    return about | {"sets": 0, "arms": {}, "errors": {}, "on": {}, "absent": {OURS: reason}, "sensors": {}}


def first_call(
    case: GpuCase,
    arm: GpuArm,
    sets: Sequence[Tensors],
    graphed: Callable[[Sequence[Call]], Call] | None = None,
) -> tuple[list[Call], dict[str, Any]]:
    """An arm's calls, as a graph by `graphed` if its output is right, and the answer: the error of the first
    call's result, in memory that held NaN, or why there is none; `fatal` if the device is lost to it."""
    answer: dict[str, Any] = {}
    try:
        calls = arm.prepared(case, sets)
        with arm.scope():
            gpu_arms.poison(sets[0])
            answer["error"] = error(case, sets[0], calls[0]())
            answer["on"] = arm.chosen(case, sets[0])
            if graphed and not verdict(case, arm, answer):
                calls = [graphed(calls)]
        return calls, answer
    except Exception as problem:  # whatever a peer raises is why it has no figure
        crowded = isinstance(problem, torch.cuda.OutOfMemoryError)
        lost = {"fatal": True} if not crowded and gpu_arms.is_fatal(problem) else {}
        return [], {**answer, "reason": why(problem), **lost}


def is_mismatch(row: dict[str, Any]) -> bool:
    """Whether polyflash itself was wrong."""
    return str(row["absent"].get(OURS, "")).startswith("wrong")


def error(case: GpuCase, t: Tensors, result: Any) -> float:
    """Relative L2 error of a slice; inf if any element of the whole result is not finite."""
    if case.part == BACKWARD:
        assert t.dout is not None
        return gradient_error((t.q, t.k, t.v), t.dout, result, case.causal)
    return forward_error((t.q, t.k, t.v), result, case.causal)


class Task(NamedTuple):
    """One arm on one case."""

    arm: GpuArm
    case: GpuCase

    @property
    def kernel(self) -> tuple[Any, ...]:
        """What tasks of an arm share where each kernel is tried once."""
        c = self.case
        once = c.part, c.dtype, c.head_dim, c.causal, c.kv_heads < c.heads
        return (self.arm.name, c.name) if self.arm.tried == "shape" else (self.arm.name, *once)


class Children:
    """Up to `workers` processes. `settings`: device, backend, variants, and the module of peer kernels.
    `patience`: seconds for any answer, if not 0; else the arm's own."""

    def __init__(self, workers: int, settings: Sequence[Any], patience: float = 0.0) -> None:
        self.workers, self.settings, self.patience = workers, settings, patience
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._one_at_a_time = threading.Lock()

    def tried(
        self, tasks: Sequence[Task], heard: Callable[[Task, dict[str, Any]], None], *, until: float
    ) -> None:
        """Tells every answer to `heard`, one at a time; tasks not begun `until` then (time.monotonic()) have
        none."""

        def ask(task: Task) -> None:
            if time.monotonic() >= until:
                return
            try:
                child = self._idle.get_nowait()
            except queue.Empty:
                child = Child(_trying, self.settings, START)
            patience = min(self.patience or task.arm.patience, until - time.monotonic() + _OVERTIME)
            answer = child.ask((task.arm.name, task.case), patience)
            if child.alive:
                self._idle.put(child)
            with self._one_at_a_time:
                heard(task, answer)

        with ThreadPoolExecutor(max(1, min(self.workers, len(tasks)))) as pool:
            list(pool.map(ask, tasks))

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().end()


def _arms(device: str, backend: str, variants: Sequence[str], kernels: str) -> dict[str, GpuArm]:
    """Every arm by its name, in a process that is to run them."""
    gpu_arms.KERNELS = kernels
    if device != "cpu":
        torch.cuda.set_device(device)
    return {arm.name: arm for arm in gpu_arms.arms(backend, variants)}


def _trying(*settings: Any) -> Answer:
    """The child: what tries an arm, by its name, on a case."""
    torch.set_num_threads(1)
    known, device = _arms(*settings), settings[0]

    def answer(task: tuple[str, GpuCase]) -> dict[str, Any]:
        name, case = task
        told = first_call(case, known[name], [gpu_arms.make_tensors(case, device, 0)])[1]
        if "fatal" not in told:
            gpu_arms.forget()
        return told

    return answer


def measuring(*settings: Any) -> Answer:
    """The process that measures arms: what answers a case and who is excused from it, or None, with the
    machine and its ceilings. The last settings are the names of the arms, and how many rounds."""
    *given, names, rounds = settings
    chosen = [arm for name, arm in _arms(*given).items() if name in names]
    here, device = Device(given[0]), given[0]
    sensors = Sensors(torch.device(device) if here.is_cuda else None)
    here.while_busy = sensors.read

    def answer(request: tuple[GpuCase, dict[str, str]] | None) -> dict[str, Any]:
        if request is None:
            found = ceilings(device, lambda call, repeats: here.seconds([call], repeats))
            return {"machine": here.facts(), "ceilings": found, "sensors": sensors.taken()}
        try:
            return {"row": measure(request[0], chosen, here, sensors, rounds, request[1])}
        except DeviceLost as lost:
            return {"arm": lost.arm, "reason": lost.reason, "fatal": True}

    return answer
