"""Calls that take turns, by the clock of their device: cases of `bench`, races of `tune` and `ablate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from polyflash.bench.peak import Peak
from polyflash.bench.timing import Arm, Comparison, Round, Summary, compare, enough, median

ROUNDS = 5
_SAMPLE = 10e-3  # seconds of calls between two events of a GPU
_COPIED = 256 << 20  # bytes that are read and written to see how quick a GPU is: 0.1 ms of an H200

Clock = Callable[[Callable[[], object], int], float]  # seconds per call of so many calls


def race(arms: Mapping[str, Callable[[], object]], device: str, seconds: float) -> dict[str, Summary]:
    """Median and spread of every arm of `compared`."""
    every = [Arm(name, call, torch.get_num_threads()) for name, call in arms.items()]
    found = compared(every, device, seconds)
    return {name: found.summary(name) for name in arms}


def compared(
    arms: Sequence[Arm], device: str, seconds: float, speed: Callable[[], float] | None = None
) -> Comparison:
    """The arms against each other, each once per round in an order that turns round; for about `seconds`,
    ROUNDS quiet rounds if they take no more than twice as long, and FEWEST of `timing` in any case. A GPU's
    calls are queued between events, so launches overlap as in a model; threads and `before` of an arm are of
    CPUs. `speed`: the machine's present speed, as in `compare`."""
    if torch.device(device).type != "cuda":
        return compare(arms, seconds=seconds, fewest=ROUNDS, speed=speed)
    with torch.cuda.device(device):
        return queued_rounds(arms, seconds, queued, speed or GpuSpeed(device))


def queued_rounds(
    arms: Sequence[Arm], seconds: float, clock: Clock, speed: Callable[[], float]
) -> Comparison:
    """The rounds of a comparison by `clock`."""
    repeats = {arm.name: _repeats(arm.call, clock) for arm in arms}
    rounds: list[Round] = []
    spent, before = 0.0, speed()
    while not enough(rounds, spent, seconds, ROUNDS):
        taken = {}
        for arm in arms if len(rounds) % 2 == 0 else reversed(arms):
            taken[arm.name] = clock(arm.call, repeats[arm.name])
            spent += taken[arm.name] * repeats[arm.name]
        after = speed()
        rounds.append(Round(taken, min(before, after)))
        before = after
    return Comparison(tuple(rounds))


def _repeats(call: Callable[[], object], clock: Clock) -> int:
    """Calls that take _SAMPLE together, after one that compiles."""
    call()
    once = min(clock(call, 1) for _ in range(3))
    return max(1, min(200, round(_SAMPLE / max(once, 1e-7))))


def queued(call: Callable[[], object], repeats: int) -> float:
    """Seconds per call by the device's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats / 1e3


class GpuSpeed:
    """The GPU's present speed as a fraction of the best it has shown: that of a copy, which no power limit
    slows. Half of it is away while another process has its turn."""

    def __init__(self, device: str, clock: Clock = queued) -> None:
        source = torch.zeros(_COPIED // 4, dtype=torch.int32, device=device)
        target = torch.empty_like(source)
        self._copy, self._clock, self._best = lambda: target.copy_(source), clock, 0.0
        clock(self._copy, 20)  # clocks of an idle GPU are low

    def __call__(self) -> float:
        rate = 1 / self._clock(self._copy, 4)
        self._best = max(self._best, rate)
        return rate / self._best


class GpuCalibration:
    """The counterpart of `peak.Calibration` on a GPU: the rate of a large product, and the present speed."""

    def __init__(self, device: str) -> None:
        self.device, self.ceilings, self.speed = device, ceilings(device), GpuSpeed(device)

    def peak(self, kind: str) -> Peak | None:
        """The rate of 16-bit products; others have none."""
        rate = self.ceilings["matmul_tflops"] * 1e3
        return Peak(kind, rate, rate, 1, 1) if kind in ("bfloat16", "float16") else None

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts to quote beside every figure of this GPU."""
        from polyflash.tuning.store import gpu_driver

        cuda = torch.version.cuda or torch.version.hip
        name = torch.cuda.get_device_name(self.device)
        return {"gpu": name, "driver": gpu_driver(), "cuda": cuda, "ceilings": self.ceilings}


def ceilings(device: str, clock: Clock | None = None) -> dict[str, float]:
    """`matmul_tflops`: a product of 8192³ on normal bfloat16 values. `copy_gbs`: a copy of 2 GiB, bytes read
    and written. Medians of five; small ones on a CPU, to try the rest."""
    is_cuda = torch.device(device).type == "cuda"
    n, size = (8192, 1 << 31) if is_cuda else (256, 1 << 20)
    kind, clock = torch.bfloat16 if is_cuda else torch.float32, clock or queued
    a, b, out = (torch.randn(n, n, device=device).to(kind) for _ in range(3))
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def rate(work: float, call: Callable[[], object]) -> float:
        clock(call, 5)
        return work / median([clock(call, 10) for _ in range(5)])

    product = rate(2 * n**3 / 1e12, lambda: torch.mm(a, b, out=out))
    return {"matmul_tflops": product, "copy_gbs": rate(2 * size / 1e9, lambda: target.copy_(source))}
