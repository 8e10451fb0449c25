"""One process that may hang or crash: JSON requests on its input, one JSON answer to each on its output.

Whatever libraries print goes to stderr, whose last line is the reason if the process dies. A peer of the CPU
suites lives in such a process, side by side with ours; `gpu.children` tries kernels in several.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import IO, Any

import torch

from benchmarks import environment
from benchmarks.cases import Case
from benchmarks.peers import PEERS, Peer
from polyflash.bench.peak import calibrate, usable_cpus
from polyflash.target import detect
from polyflash.workloads import Workload

Answer = Callable[[dict[str, Any]], dict[str, Any]]
_START, _PER_ROW = 120.0, 60.0  # seconds a peer may take to start, and for a row beyond its timing


class Child:
    """The parent's end. `python -m module` gets `settings` first, and its first answer says that it is ready.
    `alive` is False once it was killed or died; it then has no more answers."""

    def __init__(self, module: str, settings: dict[str, Any], patience: float) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, encoding="utf-8", env=environment(),
        )  # fmt: skip
        self.alive = True
        self._refusal = str(self.ask(settings, patience).get("reason", ""))

    def ask(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        """Its answer; if none comes in so many seconds, or it dies, {"reason": …}, and it is not alive."""
        process = self._process
        if not self.alive or process.stdin is None or process.stdout is None:
            return {"reason": self._refusal}
        alarm = threading.Timer(patience, process.kill)
        alarm.daemon = True
        alarm.start()
        with contextlib.suppress(OSError):  # dead before it read: its last words say why
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        ran_out = not alarm.is_alive()
        alarm.cancel()
        if line.endswith("\n"):
            answer = json.loads(line)
            if answer.pop("fatal", False):
                self.end()
            return dict(answer)
        code = process.wait()
        self._refusal = f"hung: no answer in {patience:.0f} s" if ran_out else self._last_words(code)
        self.end()
        return {"reason": self._refusal}

    def end(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _last_words(self, code: int) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"its process ended with code {code}" + (f": {lines[-1][:200]}" if lines else "")


def serve(prepare: Callable[[dict[str, Any]], Answer]) -> None:
    """The child's end: what `prepare(settings)` returns answers every request. An answer that is "fatal" is
    the last one. The pipe to the parent is its alone: file descriptor 1 becomes stderr, for libraries that
    print."""
    sys.stdout.flush()
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer = prepare(json.loads(sys.stdin.readline()))
    reply: dict[str, Any] = {}
    print(json.dumps(reply), file=sink, flush=True)
    for line in sys.stdin:
        reply = answer(json.loads(line))
        print(json.dumps(reply), file=sink, flush=True)
        if reply.get("fatal"):
            return


def why(error: BaseException) -> str:
    """The reason for a table: the kind of an error and its first line."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line.strip()[:160]}"


def answers(name: str, some: Sequence[Case], *, seconds: float, peer: Peer | None = None) -> Iterator[dict]:
    """What the peer's process says of each case, in order: {"row": …}, or {"name": …, "reason": …}. Never
    raises: a peer that is absent, refuses, crashes or hangs gives reasons."""
    peer = peer or PEERS[name]
    if peer.absent:
        yield from ({"name": case.name, "reason": peer.absent} for case in some)
        return
    settings = {"prepare": peer.prepare, "seconds": seconds, "threads": torch.get_num_threads()}
    child = Child("benchmarks.child", settings, _START)
    try:
        for case in some:
            answer = child.ask(plain(case), _PER_ROW + 2 * seconds)
            yield answer if "row" in answer else {"name": case.name, **answer}
    finally:
        child.end()


def plain(case: Case) -> dict[str, Any]:
    """The case as JSON has it; `case_of` is the inverse."""
    made = asdict(case)
    for name in ("workload", "dense"):
        if made[name]:
            made[name]["tags"] = sorted(made[name]["tags"])
    return made


def case_of(given: dict[str, Any]) -> Case:
    return Case(**given | {name: _workload(given[name]) for name in ("workload", "dense") if given[name]})


def _workload(given: dict[str, Any]) -> Workload:
    fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}
    return Workload(**{**fields, "tags": frozenset(given["tags"])})


def _measuring(settings: dict[str, Any]) -> Answer:
    """The child: what measures a case, on as many CPUs as threads: some peers take their thread count from
    nothing else."""
    from benchmarks.suite import measure

    threads, cpus = settings["threads"], usable_cpus()
    torch.set_num_threads(threads)
    if threads < len(cpus) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus[:threads])
    module, _, function = settings["prepare"].partition(":")
    prepare: Callable[..., Any] = getattr(import_module(module), function)
    calibration = calibrate(detect("cpu"))

    def peer(problem: Any) -> Any:
        ours = problem.ours
        return prepare(ours.q, ours.k, ours.v, bool(ours.options.get("causal")), threads)

    def answer(given: dict[str, Any]) -> dict[str, Any]:
        try:
            case = case_of(given)
            return {"row": measure(case, seconds=settings["seconds"], calibration=calibration, peer=peer)}
        except Exception as error:  # whatever a peer raises is why it has no row
            return {"reason": why(error)}

    return answer


if __name__ == "__main__":
    serve(_measuring)
