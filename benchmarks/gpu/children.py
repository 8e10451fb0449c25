"""Kernels that may hang or crash, tried in processes that can be killed, before anything is timed.

A request is {"arm", "case"}, its answer {"error": …}, the relative error of the slice, or {"reason": …}.
Several children work at once, which also fills the caches of compiled kernels; nothing is timed meanwhile.
Between the waves of a run the children wait.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.child import Child, serve
from benchmarks.gpu import arms as peers
from benchmarks.gpu.accuracy import error
from benchmarks.gpu.arms import (
    GpuArm,
    arms,
    forget_compiled,
    is_fatal,
    make_tensors,
    poison,
    prepared,
    why,
)
from benchmarks.gpu.cases import GpuCase, case_of

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
    _idle: list[Child] = field(default_factory=list)

    def tried(self, tasks: Sequence[Task], heard: Heard, *, until: float) -> None:
        """Tells every answer to `heard`, one at a time; tasks not begun `until` then (time.monotonic()) have
        none."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        one_at_a_time = threading.Lock()

        def told(task: Task, answer: dict[str, Any]) -> None:
            with one_at_a_time:
                heard(task, answer)

        count = min(self.workers, len(tasks))
        threads = [threading.Thread(target=self._work, args=(waiting, told, until)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def _work(self, waiting: queue.SimpleQueue[Task], told: Heard, until: float) -> None:
        child = None
        with contextlib.suppress(IndexError):
            child = self._idle.pop()
        while time.monotonic() < until:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                break
            if child is None:
                child = Child("benchmarks.gpu.children", self.settings, START)
            patience = min(self.patience or task.arm.patience, until - time.monotonic() + _OVERTIME)
            told(task, child.ask({"arm": task.arm.name, "case": task.case.plain()}, patience))
            if not child.alive:
                child = None
        if child is not None:
            self._idle.append(child)


def kernel_of(task: Task) -> tuple[Any, ...]:
    """What tasks of an arm share where each kernel is tried once."""
    c = task.case
    shape = (
        (c.name,)
        if task.arm.tried == "shape"
        else (c.part, c.dtype, c.head_dim, c.causal, c.kv_heads < c.heads)
    )
    return (task.arm.name, *shape)


def _trying(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The child: what tries a task."""
    peers.KERNELS = settings["kernels"]
    torch.set_num_threads(1)
    known = {arm.name: arm for arm in arms(settings["backend"], settings["variants"])}
    if settings["device"] != "cpu":
        torch.cuda.set_device(settings["device"])
    return lambda request: tried(known[request["arm"]], case_of(request["case"]), settings["device"])


def tried(arm: GpuArm, case: GpuCase, device: str) -> dict[str, Any]:
    """One call of an arm: its error, or why there is none; `fatal` if the device is lost to this process."""
    try:
        t = make_tensors(case, device, seed=0)
        (call,) = prepared(arm, case, [t])
        with arm.scope():
            poison(t)
            answer: dict[str, Any] = {"error": error(case, t, call())}
    except Exception as problem:  # whatever a kernel raises is why it has no figure
        answer = {"reason": why(problem)}
        if is_fatal(problem):
            answer["fatal"] = True
    call = t = None  # type: ignore[assignment]
    forget_compiled()
    gc.collect()
    if device != "cpu" and "fatal" not in answer:
        torch.cuda.empty_cache()
    return answer


if __name__ == "__main__":
    serve(_trying)
