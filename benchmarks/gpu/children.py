"""Kernels that may hang or crash, tried in processes that can be killed, before anything is timed.

A request is {"arm", "case"}, its answer {"error": …}, the relative error of the slice, or {"reason": …}.
Several children work at once, which also fills the caches of compiled kernels; nothing is timed meanwhile.
Between the waves of a run the children wait.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.child import Answer, Child, serve, why
from benchmarks.gpu import arms as gpu_arms
from benchmarks.gpu.arms import GpuArm
from benchmarks.gpu.cases import GpuCase
from benchmarks.gpu.rows import first_call

START = 120.0  # seconds in which a child has imported everything
_OVERTIME = 10.0  # seconds that a task may go on after the end of its wave


@dataclass(frozen=True)
class Task:
    """One arm on one case."""

    arm: GpuArm
    case: GpuCase


Heard = Callable[[Task, dict[str, Any]], None]


@dataclass
class Children:
    """Up to `workers` processes. `settings`: device, backend, variants, and the module of peer kernels."""

    workers: int
    settings: dict[str, Any]
    patience: float = 0.0  # seconds for any answer, if not 0; else the arm's own
    _idle: queue.SimpleQueue[Child] = field(default_factory=queue.SimpleQueue)
    _one_at_a_time: Any = field(default_factory=threading.Lock)

    def tried(self, tasks: Sequence[Task], heard: Heard, *, until: float) -> None:
        """Tells every answer to `heard`, one at a time; tasks not begun `until` then (time.monotonic()) have
        none."""
        with ThreadPoolExecutor(max(1, min(self.workers, len(tasks)))) as pool:
            for done in [pool.submit(self._ask, task, heard, until) for task in tasks]:
                done.result()

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().end()

    def _ask(self, task: Task, heard: Heard, until: float) -> None:
        if time.monotonic() >= until:
            return
        try:
            child = self._idle.get_nowait()
        except queue.Empty:
            child = Child("benchmarks.gpu.children", self.settings, START)
        patience = min(self.patience or task.arm.patience, until - time.monotonic() + _OVERTIME)
        answer = child.ask({"arm": task.arm.name, "case": task.case.plain()}, patience)
        if child.alive:
            self._idle.put(child)
        with self._one_at_a_time:
            heard(task, answer)


def kernel_of(task: Task) -> tuple[Any, ...]:
    """What tasks of an arm share where each kernel is tried once."""
    c = task.case
    if task.arm.tried == "shape":
        return task.arm.name, c.name
    return task.arm.name, c.part, c.dtype, c.head_dim, c.causal, c.kv_heads < c.heads


def _trying(settings: dict[str, Any]) -> Answer:
    """The child: what tries a task."""
    gpu_arms.KERNELS = settings["kernels"]
    torch.set_num_threads(1)
    known = {arm.name: arm for arm in gpu_arms.arms(settings["backend"], settings["variants"])}
    if settings["device"] != "cpu":
        torch.cuda.set_device(settings["device"])
    return lambda request: tried(known[request["arm"]], GpuCase(**request["case"]), settings["device"])


def tried(arm: GpuArm, case: GpuCase, device: str) -> dict[str, Any]:
    """One call of an arm: its error, or why there is none; `fatal` if the device is lost to this process."""
    try:
        answer: dict[str, Any] = {"error": first_call(case, arm, [gpu_arms.make_tensors(case, device, 0)])[1]}
    except Exception as problem:  # whatever a kernel raises is why it has no figure
        answer = {"reason": why(problem), **({"fatal": True} if gpu_arms.is_fatal(problem) else {})}
    gpu_arms.forget_compiled()
    gc.collect()
    if device != "cpu" and "fatal" not in answer:
        torch.cuda.empty_cache()
    return answer


if __name__ == "__main__":
    serve(_trying)
