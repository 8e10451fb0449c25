"""One row of the GPU suite: its arms prepared, their outputs checked, then timed by turns on rotated inputs,
by events of the device, or by the host's clock on a CPU. Times are seconds per call.

Outputs and gradients are held to plain torch in float64 (float32 where that is too large) on a slice.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.child import why
from benchmarks.gpu import arms as gpu_arms
from benchmarks.gpu.arms import OURS, Call, GpuArm, Tensors, applicable, is_fatal
from benchmarks.gpu.cases import BACKWARD, DECODE, GRAPH, HOST, GpuCase
from polyflash.bench.timing import iqr, median

SLICE_TOLERANCE = {"bfloat16": 1.2e-2, "float16": 3e-3, "float32": 2e-5}  # relative L2 of a slice
ROWS = 128  # query rows of a sampled head
_WIDE = 4096  # most keys of a whole head in float64: one matrix of weights is then 128 MiB
ROUNDS, CALLS, FEWEST_CALLS = 5, 20, 3
SETS, _GRAPH_SETS = 3, 20  # of inputs, rotated; those of a graph, which reads memory, are beyond the L2
_SHARE = 0.4  # of the device's memory, for all sets of inputs
_SAMPLE = 0.05  # seconds: calls of more than a twentieth of it are fewer than `CALLS`
_FLUSHED = 512 << 20  # bytes written between decode steps: ten times an H200's L2, and 0.1 ms in which the
# host gets ahead, so that no launch is on the clock
_GRAPH_CALLS, _HOST_CALLS = 20, 100
_ORDER = random.Random(0)
Clock = Callable[[Sequence[Call], int], float]


class DeviceLost(Exception):
    """The device answers this process no more; a new one may go on. `arm`: by whom, "" if that is unknown."""

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(f"{arm or 'unknown'}: {reason}")
        self.arm, self.reason = arm, reason


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


class Device:
    """The device under the suite: "cuda", "cuda:1", ..., or "cpu" to try the suite itself."""

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
        if self.is_cuda:
            if self._flush is None:
                self._flush = torch.empty(_FLUSHED // 4, dtype=torch.int32, device=self.name)
            self._flush.zero_()

    def seconds(self, calls: Sequence[Call], repeats: int) -> float:
        """Per call, of `repeats` calls one after the other, taking the next of `calls` each time."""
        if not self.is_cuda:
            return self.host_seconds(calls, repeats)
        ends = _events(lambda: _run(calls, repeats))
        self.while_busy()
        self.synchronize()
        return ends[0].elapsed_time(ends[1]) / repeats / 1e3

    def cold_seconds(self, calls: Sequence[Call], repeats: int) -> float:
        """The median of calls that find nothing in the L2."""
        if not self.is_cuda:
            return self.host_seconds(calls, repeats)
        pairs = []
        for i in range(repeats):
            self.flush()
            pairs.append(_events(calls[i % len(calls)]))
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

    def replayed_seconds(self, graphs: Sequence[Call], repeats: int) -> float:
        """Per call inside a graph."""
        return self.seconds(graphs, repeats) / _GRAPH_CALLS

    def graphed(self, calls: Sequence[Call], count: int = _GRAPH_CALLS) -> Call:
        """A CUDA graph of so many calls; on a CPU, as many calls."""
        if not self.is_cuda:
            return lambda: _run(calls, count)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _run(calls, len(calls))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _run(calls, count)
        return graph.replay

    def clock(self, part: str) -> Clock:
        clocks = {DECODE: self.cold_seconds, GRAPH: self.replayed_seconds, HOST: self.host_seconds}
        return clocks.get(part, self.seconds)


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


def interleaved(timed: Sequence[Timed], clock: Clock, *, rounds: int, repeats: int = 0) -> None:
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
    case: GpuCase, every: Sequence[GpuArm], device: Device, *, rounds: int, sensors: Any,
    excused: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """The row as plain data. `excused`: arms that are not to be started, with the reason.

    Raises:
        DeviceLost: by a kernel that was caught in an illegal access, or the like."""
    gpu_arms.forget_compiled()
    here = applicable(every, case)
    absent = {arm.name: excused[arm.name] for arm in here if arm.name in excused}
    errors: dict[str, float] = {}
    timed: list[Timed] = []
    sets: list[Tensors] = []
    try:
        sets = _sets(case, device)
        for arm in here:
            if arm.name not in absent:
                reason, calls = _checked(case, arm, sets, device, errors)
                if reason:
                    absent[arm.name] = reason
                else:
                    timed.append(Timed(arm, calls))
        repeats = _HOST_CALLS if case.part == HOST else 0
        interleaved(timed, device.clock(case.part), rounds=rounds, repeats=repeats)
    except torch.cuda.OutOfMemoryError as problem:
        absent |= {arm.name: why(problem) for arm in here if arm.name not in absent}
        timed = []
    except Exception as problem:
        if is_fatal(problem):
            raise DeviceLost("", why(problem)) from problem
        raise
    row = left_out(case, "") | {
        "sets": len(sets), "arms": {t.arm.name: t.plain() for t in timed if t.samples}, "errors": errors,
        "absent": absent, "sensors": sensors.taken(),
    }  # fmt: skip
    timed, sets = [], []
    gc.collect()
    if device.is_cuda:
        torch.cuda.empty_cache()
    return row


def left_out(case: GpuCase, reason: str) -> dict[str, Any]:
    """The row of a case that is not measured."""
    work = {"flops": case.work.flops, "bytes": case.work.bytes, "key_bytes": case.key_bytes}
    about = {"kind": "row", "name": case.name, "case": case.plain(), **work}
    return about | {"sets": 0, "arms": {}, "errors": {}, "absent": {OURS: reason}, "sensors": {}}


def _sets(case: GpuCase, device: Device) -> list[Tensors]:
    """As many sets of inputs as rotate, fewer if they are large."""
    wanted = _GRAPH_SETS if case.part == GRAPH else SETS
    if device.is_cuda:
        memory = torch.cuda.get_device_properties(device.name).total_memory * _SHARE
        wanted = min(wanted, max(1, int(memory / max(1.0, case.work.bytes))))
    return [gpu_arms.make_tensors(case, device.name, seed) for seed in range(wanted)]


def _checked(
    case: GpuCase, arm: GpuArm, sets: Sequence[Tensors], device: Device, errors: dict[str, float]
) -> tuple[str, list[Call]]:
    """(why it is not timed or "", its calls). The output of its first call is checked here, in the process
    that times it."""
    try:
        calls, found = first_call(case, arm, sets)
        errors[arm.name] = found if math.isfinite(found) else -1.0
        reason = verdict(case, arm, {"error": found})
        if case.part == GRAPH and not reason:
            with arm.scope():
                calls = [device.graphed(calls)]
        return reason, calls
    except torch.cuda.OutOfMemoryError as problem:
        return why(problem), []
    except Exception as problem:  # whatever a peer raises is why it has no figure
        if is_fatal(problem):
            raise DeviceLost(arm.name, why(problem)) from problem
        return why(problem), []


def first_call(case: GpuCase, arm: GpuArm, sets: Sequence[Tensors]) -> tuple[list[Call], float]:
    """An arm's calls, and the error of the first one's result, in memory that held NaN."""
    calls = gpu_arms.prepared(arm, case, sets)
    with arm.scope():
        gpu_arms.poison(sets[0])
        return calls, error(case, sets[0], calls[0]())


def is_mismatch(row: dict[str, Any]) -> bool:
    """Whether polyflash itself was wrong."""
    return str(row["absent"].get(OURS, "")).startswith("wrong")


def error(case: GpuCase, t: Tensors, result: Any) -> float:
    """Relative L2 error of the slice, of the worst gradient in the part backward; inf if any element of the
    whole result is not finite, as one that nobody wrote may not be."""
    parts = result if case.part == BACKWARD else (result,)
    if not all(bool(torch.isfinite(x).all()) for x in parts):
        return math.inf
    if case.part == BACKWARD:
        pairs = list(zip(_of_one_head(case, *parts), _gradients(case, t), strict=True))
    else:  # the first and the last head: offsets are largest there
        pairs = [_rows(case, t, result, b, h) for b, h in {(0, 0), (case.batch - 1, case.heads - 1)}]
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def _rows(case: GpuCase, t: Tensors, out: Tensor, b: int, h: int) -> tuple[Tensor, Tensor]:
    """(found, wanted) of rows spread over one head."""
    count = min(ROWS, case.seqlen_q)
    i = torch.linspace(0, case.seqlen_q - 1, count, device=out.device).round().long()
    head = h // (case.heads // case.kv_heads)
    with torch.no_grad():
        q, k, v = t.q[b, h, i].double(), t.k[b, head].double(), t.v[b, head].double()
        return out[b, h, i].double(), _attention(case, q, k, v, i)


def _gradients(case: GpuCase, t: Tensors) -> Sequence[Tensor]:
    """dq, dk, dv of the last key/value head of the last request, with its query heads, by autograd."""
    kind = torch.float64 if case.seqlen_k <= _WIDE else torch.float32
    q, k, v, dout = (x.detach().to(kind) for x in _of_one_head(case, t.q, t.k, t.v, t.dout))
    for x in (q, k, v):
        x.requires_grad_()
    every = torch.arange(case.seqlen_q, device=q.device)
    return torch.autograd.grad(_attention(case, q, k, v, every), (q, k, v), dout)


def _attention(case: GpuCase, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Plain attention of the rows by these numbers."""
    scores = q @ k.mT / math.sqrt(case.head_dim)
    if case.causal:
        seen = torch.arange(case.seqlen_k, device=q.device) <= rows[:, None] + case.seqlen_k - case.seqlen_q
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


def _of_one_head(case: GpuCase, q: Any, k: Any, v: Any, *more: Any) -> list[Tensor]:
    """The last key/value head of the last request: q and `more` (group, seqlen_q, head_dim), k and v
    (1, seqlen_k, head_dim)."""
    group = case.heads // case.kv_heads
    return [q[-1, -group:], k[-1, -1:], v[-1, -1:], *(x[-1, -group:] for x in more)]
