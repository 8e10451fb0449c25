"""Kernels that may hang or crash, tried in processes that can be killed, before anything is timed.

The parent writes JSON lines {"arm", "case"} to a child's input and reads one answer to each: {"error": …},
the relative error of the slice, or {"reason": …}. Several children work at once, which also fills the caches
of compiled kernels; nothing is timed meanwhile. Between the waves of a run the children wait.
"""

from __future__ import annotations

import contextlib
import gc
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TextIO

import torch

from polyflash.bench.children import own_output
from polyflash.bench.gpu_accuracy import error
from polyflash.bench.gpu_arms import (
    GpuArm,
    arms,
    forget_compiled,
    is_fatal,
    make_tensors,
    poison,
    prepared,
    why,
)
from polyflash.bench.gpu_cases import GpuCase, case_of

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
    """Up to `workers` processes. `settings`: device, backend, variants, and paths to import from."""

    workers: int
    settings: dict[str, Any]
    patience: float = 0.0  # seconds for any answer, if not 0; else the arm's own
    _idle: list[_Child] = field(default_factory=list)

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
                child = _Child(self.settings)
            patience = min(self.patience or task.arm.patience, until - time.monotonic() + _OVERTIME)
            told(task, child.ask({"arm": task.arm.name, "case": task.case.plain()}, patience))
            if not child.alive:
                child = None
        if child is not None:
            self._idle.append(child)


class _Child:
    """One process. Its first answer says that it is ready."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, encoding="utf-8",
        )  # fmt: skip
        self.alive = True
        self._refusal = self._exchange(settings, START).get("reason", "")

    def ask(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        """Its answer; if none comes in time, or it dies, the reason, and it is no longer alive."""
        if self._refusal:
            return {"reason": self._refusal}
        answer = self._exchange(request, patience)
        if answer.pop("fatal", False):
            self.end()
        return answer

    def end(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _exchange(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        process = self._process
        if process.stdin is None or process.stdout is None:
            return {"reason": "its process has no pipes"}
        alarm = threading.Timer(patience, process.kill)
        alarm.daemon = True
        alarm.start()
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        ran_out = not alarm.is_alive()
        alarm.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        code = process.wait()
        reason = f"hung: no answer in {patience:.0f} s" if ran_out else self._last_words(code)
        self.end()
        return {"reason": reason}

    def _last_words(self, code: int) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"its process ended with code {code}" + (f": {lines[-1][:160]}" if lines else "")


def kernel_of(task: Task) -> tuple[Any, ...]:
    """What tasks of an arm share where each kernel is tried once."""
    c = task.case
    shape = (
        (c.name,)
        if task.arm.tried == "shape"
        else (c.part, c.dtype, c.head_dim, c.causal, c.kv_heads < c.heads)
    )
    return (task.arm.name, *shape)


def serve(source: TextIO, sink: TextIO) -> None:
    """The child: settings first, then tasks until its input ends."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=sink, flush=True)

    settings = json.loads(source.readline())
    sys.path[:0] = settings["path"]
    torch.set_num_threads(1)
    known = {arm.name: arm for arm in arms(settings["backend"], settings["variants"])}
    if settings["device"] != "cpu":
        torch.cuda.set_device(settings["device"])
    say({})
    for line in source:
        request = json.loads(line)
        answer = tried(known[request["arm"]], case_of(request["case"]), settings["device"])
        say(answer)
        if answer.get("fatal"):
            return


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
    serve(sys.stdin, own_output())
