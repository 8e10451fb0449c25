"""Clocks of the GPU suite: events on a device, the host's clock on a CPU; interleaved rounds on rotated
inputs. Times are seconds per call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.arms import Call, GpuArm
from polyflash.bench.timing import iqr, median

ROUNDS, CALLS, FEWEST_CALLS = 5, 20, 3
SETS = 3  # of inputs, rotated
_SAMPLE = 0.05  # seconds: calls of more than a twentieth of it are fewer than `CALLS`
_FLUSHED = 512 << 20  # bytes written between decode steps: ten times an H200's L2, and 0.1 ms in which the
# host gets ahead, so that no launch is on the clock
_GRAPH_CALLS = 20
_ORDER = random.Random(0)


@dataclass
class Timed:
    """One arm of a row: its calls, and the samples of every round, in seconds per call."""

    arm: GpuArm
    calls: Sequence[Call]
    repeats: int = CALLS
    samples: list[float] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return {
            "median_s": median(self.samples),
            "iqr_s": iqr(self.samples),
            "calls": self.repeats,
            "samples": self.samples,
        }


class Device:
    """The device under the suite: "cuda", "cuda:1", ..., or "cpu" to try the suite itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.while_busy: Callable[[], None] = lambda: None  # runs once work is queued, off the clock
        self.is_cuda = torch.device(name).type == "cuda"
        self._flush: torch.Tensor | None = None

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def flush(self) -> None:
        """Drives everything out of the L2."""
        if self.is_cuda:
            if self._flush is None:
                self._flush = torch.empty(_FLUSHED // 4, dtype=torch.int32, device=self.name)
            self._flush.zero_()

    def seconds(self, calls: Sequence[Call], repeats: int) -> float:
        """Per call, of `repeats` calls one after the other, taking the next of `calls` each time."""
        if not self.is_cuda:
            began = time.perf_counter()
            _run(calls, repeats)
            return (time.perf_counter() - began) / repeats
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        _run(calls, repeats)
        end.record()
        self.while_busy()
        end.synchronize()
        return begin.elapsed_time(end) / repeats / 1e3

    def cold_seconds(self, calls: Sequence[Call], repeats: int) -> float:
        """The median of calls that find nothing in the L2."""
        if not self.is_cuda:
            return self.seconds(calls, repeats)
        pairs = []
        for i in range(repeats):
            self.flush()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[i % len(calls)]()
            end.record()
            pairs.append((begin, end))
        self.while_busy()
        self.synchronize()
        return median([begin.elapsed_time(end) / 1e3 for begin, end in pairs])

    def host_seconds(self, calls: Sequence[Call], repeats: int) -> float:
        """Until a call returns, its work queued. Take fewer calls than a queue holds; the wait is untimed."""
        self.synchronize()
        began = time.perf_counter()
        _run(calls, repeats)
        taken = time.perf_counter() - began
        self.synchronize()
        return taken / repeats

    def graphed(self, calls: Sequence[Call]) -> Call:
        """A CUDA graph of `_GRAPH_CALLS` calls; on a CPU, as many calls."""
        if not self.is_cuda:
            return lambda: _run(calls, _GRAPH_CALLS)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _run(calls, len(calls))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _run(calls, _GRAPH_CALLS)
        return graph.replay


def _run(calls: Sequence[Call], repeats: int) -> None:
    for i in range(repeats):
        calls[i % len(calls)]()


def interleaved(
    timed: Sequence[Timed],
    clock: Callable[[Sequence[Call], int], float],
    *,
    rounds: int,
    repeats: int = 0,
) -> None:
    """Adds `rounds` samples to every arm, once each per round, in a random order: a device at its power limit
    is as quick as what ran before lets it be. Half a sample goes by unmeasured for the same reason.
    `repeats`: calls of a sample; 0: as many as fit `_SAMPLE`, at most `CALLS`."""
    for t in timed:
        with t.arm.scope():
            clock(t.calls, max(2, len(t.calls)))
            once = clock(t.calls, max(2, len(t.calls)))
        t.repeats = repeats or min(CALLS, max(FEWEST_CALLS, round(_SAMPLE / max(once, 1e-9))))
    for _ in range(rounds):
        for t in _ORDER.sample(list(timed), len(timed)):
            with t.arm.scope():
                clock(t.calls, max(1, t.repeats // 2))
                t.samples.append(clock(t.calls, t.repeats))


def replayed(device: Device) -> Callable[[Sequence[Call], int], float]:
    """A clock for graphs: seconds per call inside one."""

    def clock(graphs: Sequence[Call], repeats: int) -> float:
        return device.seconds(graphs, repeats) / _GRAPH_CALLS

    return clock
