"""One peer in one process, side by side with ours: the parent's end and the child's.

The parent writes one JSON request to the child's input. The child answers with JSON lines on its output: per
row either {"row": …} as `tables.row` makes it, or {"name": …, "reason": …} if the peer refuses it. Whatever
libraries print goes to stderr, whose last line is the reason if the child dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any, TextIO

import torch

from polyflash.bench.cases import Case
from polyflash.bench.peak import calibrate, usable_cpus
from polyflash.bench.peers import PEERS, Peer
from polyflash.bench.problem import Problem
from polyflash.bench.suite import measure
from polyflash.target import detect
from polyflash.workloads import Workload

_START, _PER_ROW = 120.0, 60.0  # seconds a child may take to start, and for a row beyond its timing


def answers(name: str, cases: Sequence[Case], *, seconds: float, peer: Peer | None = None) -> Iterator[dict]:
    """What the peer's process says of each case, in order: {"row": …} or {"name": …, "reason": …}. Never
    raises: a peer that is absent, refuses, crashes or hangs gives reasons."""
    peer = peer or PEERS[name]
    reason = peer.absent
    unanswered = [case.name for case in cases]
    if not reason:
        limit = _START + len(cases) * (_PER_ROW + 2 * seconds)
        request = {
            "prepare": peer.prepare,
            "seconds": seconds,
            "threads": torch.get_num_threads(),
            "cases": [_plain(case) for case in cases],
        }
        reason = yield from _ask(request, limit, unanswered)
    for left in unanswered:
        yield {"name": left, "reason": reason}


def _ask(request: dict, limit: float, unanswered: list[str]) -> Generator[dict, None, str]:
    """Yields a child's answers, each taken off `unanswered`; returns why the rest have none."""
    command = [sys.executable, "-P", "-m", __name__]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        )
        alarm = threading.Timer(limit, child.kill)
        alarm.daemon = True
        alarm.start()
        try:
            yield from _answered(child, request, unanswered)
        finally:
            ran_out = not alarm.is_alive()
            alarm.cancel()
            child.kill()
            code = child.wait()
        errors.seek(0)
        return f"no answer in {limit:.0f} s" if ran_out else _last_words(errors, code)


def _answered(child: subprocess.Popen[str], request: dict, unanswered: list[str]) -> Iterator[dict]:
    if child.stdin is None or child.stdout is None:
        return
    with contextlib.suppress(BrokenPipeError), child.stdin:  # dead before it read: its last words say why
        json.dump(request, child.stdin)
    with child.stdout:
        for line in child.stdout:
            if line.endswith("\n"):
                answer = json.loads(line)
                unanswered.remove(answer["row"]["name"] if "row" in answer else answer["name"])
                yield answer
    child.wait()  # for its own exit code; if it hangs, the alarm ends it


def _last_words(errors: TextIO, code: int) -> str:
    lines = [line.strip() for line in errors if line.strip()]
    return f"its process ended with code {code}" + (f": {lines[-1][:200]}" if lines else "")


def _plain(case: Case) -> dict[str, Any]:
    plain = asdict(case)
    for name in ("workload", "dense"):
        if plain[name]:
            plain[name]["tags"] = sorted(plain[name]["tags"])
    return plain


def _case(plain: dict[str, Any]) -> Case:
    workloads = {name: _workload(plain[name]) for name in ("workload", "dense") if plain[name]}
    return Case(**{**plain, **workloads})


def _workload(plain: dict[str, Any]) -> Workload:
    fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in plain.items()}
    return Workload(**{**fields, "tags": frozenset(plain["tags"])})


def serve(source: TextIO, sink: TextIO) -> None:
    """The child: measures every case of the request on `source`."""
    from polyflash.bench.tables import row

    request = json.load(source)
    threads = request["threads"]
    torch.set_num_threads(threads)
    _confine(threads)
    module, _, function = request["prepare"].partition(":")
    prepare: Callable[..., Any] = getattr(import_module(module), function)
    calibration = calibrate(detect("cpu"))

    def peer(problem: Problem) -> Any:
        ours = problem.ours
        return prepare(ours.q, ours.k, ours.v, bool(ours.options.get("causal")), threads)

    for case in map(_case, request["cases"]):
        try:
            result = measure(case, seconds=request["seconds"], calibration=calibration, peer=peer)
            answer: dict[str, Any] = {"row": row(result)}
        except Exception as error:  # whatever a peer raises is why it has no row
            answer = {"name": case.name, "reason": f"{type(error).__name__}: {_first_line(error)}"}
        print(json.dumps(answer), file=sink, flush=True)


def _confine(threads: int) -> None:
    """As many CPUs as threads: some peers take their thread count from nothing else."""
    cpus = usable_cpus()
    if threads < len(cpus) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus[:threads])


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")[:200]


def own_output() -> TextIO:
    """The pipe to the parent; file descriptor 1 becomes stderr, for libraries that print."""
    sys.stdout.flush()
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return sink


if __name__ == "__main__":
    serve(sys.stdin, own_output())
