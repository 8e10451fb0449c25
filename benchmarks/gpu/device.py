"""The device under the GPU suite: its clocks, what it is, and how it does while it works."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from benchmarks import ROOT
from benchmarks.gpu.arms import CODES, DECODE, GRAPH, HOST, ROWS, STEPS, Call
from polyflash.bench.command import machine, target_of
from polyflash.bench.timing import median

_FLUSHED = 512 << 20  # bytes written between decode steps: ten times an H200's L2, and 0.1 ms in which the
# host gets ahead, so that no launch is on the clock
GRAPHED = {GRAPH: 20, ROWS: 20, CODES: 0, STEPS: 0}  # parts whose calls are captured, and how many as a graph
_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "sageattention")
Clock = Callable[[Sequence[Call], int], float]


@dataclass(frozen=True)
class Captured:
    """So many calls as one. It keeps them and what they read: the graph itself holds no tensor of theirs."""

    replay: Call
    count: int
    calls: Sequence[Call]

    def __call__(self) -> None:
        self.replay()


class Device:
    """ "cuda", "cuda:1", ..., or "cpu" to try the suite itself. Times are seconds per call, of `repeats`
    calls one after the other, taking the next of `calls` each time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.while_busy: Callable[[], None] = lambda: None  # runs once work is queued, off the clock
        self.is_cuda = torch.device(name).type == "cuda"
        self._flush: Tensor | None = None

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def flush(self) -> None:
        """Drives everything out of the L2."""
        if self._flush is None:
            self._flush = torch.empty(_FLUSHED // 4, dtype=torch.int32, device=self.name)
        self._flush.zero_()

    def seconds(self, calls: Sequence[Call], repeats: int) -> float:
        """By the device's own clock."""
        if not self.is_cuda:
            return self.host_seconds(calls, repeats)
        return self._between([_events(lambda: _run(calls, repeats))])[0] / repeats

    def cold_seconds(self, calls: Sequence[Call], repeats: int) -> float:
        """The median of calls that find nothing in the L2."""
        if not self.is_cuda:
            return self.host_seconds(calls, repeats)
        pairs = []
        for i in range(repeats):
            self.flush()
            pairs.append(_events(calls[i % len(calls)]))
        return median(self._between(pairs))

    def _between(self, pairs: Sequence[tuple[Any, Any]]) -> list[float]:
        self.while_busy()
        self.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    def host_seconds(self, calls: Sequence[Call], repeats: int) -> float:
        """Until a call returns, its work queued. Take fewer calls than a queue holds; the wait is untimed."""
        self.synchronize()
        began = time.perf_counter()
        _run(calls, repeats)
        taken = time.perf_counter() - began
        self.synchronize()
        return taken / repeats

    def graphed(self, part: str) -> Callable[[Sequence[Call]], Call] | None:
        """What captures the calls of a part; None of one whose calls are made one by one."""
        return partial(self.captured, GRAPHED[part]) if part in GRAPHED else None

    def captured(self, count: int, calls: Sequence[Call]) -> Captured:
        """A CUDA graph of so many calls, 0: of each one; on a CPU, as many calls."""
        count = count or len(calls)
        if not self.is_cuda:
            return Captured(lambda: _run(calls, count), count, calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _run(calls, len(calls))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _run(calls, count)
        return Captured(graph.replay, count, calls)

    def clock(self, part: str) -> Clock:
        """Seconds per call; of a graph, per call inside it."""
        if part in GRAPHED:
            return lambda graphs, repeats: self.seconds(graphs, repeats) / graphs[0].count  # type: ignore[attr-defined]
        return {DECODE: self.cold_seconds, HOST: self.host_seconds}.get(part, self.seconds)

    def facts(self) -> dict[str, Any]:
        """Everything a figure must be quoted with."""
        found = machine(target_of(self.name), ()) | {"commit": commit()}
        for name in _PACKAGES:
            with suppress(metadata.PackageNotFoundError):
                found["packages"][name] = metadata.version(name)
        if self.is_cuda:
            p, cuda = torch.cuda.get_device_properties(self.name), torch.version.cuda or torch.version.hip
            found |= {
                "gpu": p.name,
                "memory_bytes": p.total_memory,
                "l2_bytes": getattr(p, "L2_cache_size", 0),
            }
            found |= {"cuda": cuda, "driver": _smi("driver_version")}
        return found


def _run(calls: Sequence[Call], repeats: int) -> None:
    for i in range(repeats):
        calls[i % len(calls)]()


def _events(call: Call) -> tuple[Any, Any]:
    """Recorded before and behind a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    return begin, end


def commit() -> str:
    """Of the checkout this runs from, with a + if files differ; "" without git or outside a checkout."""
    if not (ROOT / ".git").exists():
        return ""
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    return _said([*git, "describe", "--always", "--exclude=*", "--dirty=+"])


def _said(command: list[str]) -> str:
    """The output of a program, without its last newline; "" if it fails, hangs or is not there."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return ""


def _smi(fields: str) -> str:
    lines = _said(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    return lines.partition("\n")[0].strip()


@dataclass
class Sensors:
    """SM clock (MHz), power (W) and temperature (°C) of a GPU, read while work is queued: through torch if
    Python has NVML, else nvidia-smi, else nothing."""

    device: Any = None
    readings: list[tuple[float, ...]] = field(default_factory=list)
    _smi_alone: bool = False

    def read(self) -> None:
        if self.device is None or (self._smi_alone and self.readings):
            return  # a program of its own takes a tenth of a second: once a row
        if not self._smi_alone:
            try:
                cuda, at = torch.cuda, self.device
                found = cuda.clock_rate(at), cuda.power_draw(at) / 1e3, cuda.temperature(at)
                self.readings.append(tuple(map(float, found)))
            except Exception:  # NVML may be absent, broken or forbidden
                self._smi_alone = True
        if self._smi_alone:
            with suppress(ValueError):
                told = _smi("clocks.sm,power.draw,temperature.gpu").split(",")
                self.readings.append(tuple(map(float, told)))

    def taken(self) -> dict[str, float]:
        """Medians since the last call of this; {} without readings."""
        found, self.readings = self.readings, []
        names = ("sm_mhz", "watts", "celsius")
        return {name: median(x) for name, x in zip(names, zip(*found, strict=True), strict=False)}
