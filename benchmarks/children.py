"""One peer in one process, side by side with ours: the parent's end and the child's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.child import Child, serve
from benchmarks.peers import PEERS, Peer
from benchmarks.problem import Problem
from benchmarks.suite import measure
from polyflash.bench.peak import calibrate, usable_cpus
from polyflash.target import detect
from polyflash.workloads import Workload

_START, _PER_ROW = 120.0, 60.0  # seconds a child may take to start, and for a row beyond its timing


def answers(name: str, cases: Sequence[Case], *, seconds: float, peer: Peer | None = None) -> Iterator[dict]:
    """What the peer's process says of each case, in order: {"row": …} as `tables.row` makes it, or {"name":
    …, "reason": …}. Never raises: a peer that is absent, refuses, crashes or hangs gives reasons."""
    peer = peer or PEERS[name]
    if peer.absent:
        yield from ({"name": case.name, "reason": peer.absent} for case in cases)
        return
    settings = {"prepare": peer.prepare, "seconds": seconds, "threads": torch.get_num_threads()}
    child = Child("benchmarks.children", settings, _START)
    try:
        for case in cases:
            answer = child.ask(_plain(case), _PER_ROW + 2 * seconds)
            yield answer if "row" in answer else {"name": case.name, **answer}
    finally:
        child.end()


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


def _measuring(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The child: what measures a case."""
    from benchmarks.tables import row

    threads = settings["threads"]
    torch.set_num_threads(threads)
    _confine(threads)
    module, _, function = settings["prepare"].partition(":")
    prepare: Callable[..., Any] = getattr(import_module(module), function)
    calibration = calibrate(detect("cpu"))

    def peer(problem: Problem) -> Any:
        ours = problem.ours
        return prepare(ours.q, ours.k, ours.v, bool(ours.options.get("causal")), threads)

    def answer(plain: dict[str, Any]) -> dict[str, Any]:
        try:
            measured = measure(_case(plain), seconds=settings["seconds"], calibration=calibration, peer=peer)
            return {"row": row(measured)}
        except Exception as error:  # whatever a peer raises is why it has no row
            return {"reason": f"{type(error).__name__}: {_first_line(error)}"}

    return answer


def _confine(threads: int) -> None:
    """As many CPUs as threads: some peers take their thread count from nothing else."""
    cpus = usable_cpus()
    if threads < len(cpus) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus[:threads])


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")[:200]


if __name__ == "__main__":
    serve(_measuring)
