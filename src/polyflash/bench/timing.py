"""Interleaved timing by the clock of a device: every arm once per round, in alternating order, with the
machine's own speed beside each round.

A round whose calibration ran below `QUIET` of the machine's full speed is contended: it is kept and counted,
and no median includes it. Times are seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

QUIET = 0.8  # of the full calibration rate: one of two cores absent gives 0.5
FEWEST = 3  # quiet rounds below which a result is marked contended
LOW_SCALING = 0.85  # of the thread count
_SAMPLE = 1e-3  # a sample repeats its call for at least this long
_WOKEN = 0.1  # calls below it are sampled behind an untimed one, which wakes the arm's own threads
SETTLE = 12e-3  # libgomp's threads spin for 7 ms after torch's last operation and would be measured with us
_MOST_ROUNDS = 200
_ROUNDS = 5  # quiet ones of `compared`
_QUEUED = 10e-3  # seconds of calls between two events of a GPU
_COPIED = 256 << 20  # bytes that are read and written to see how quick a GPU is: 0.1 ms of an H200

Speed = Callable[[], float]  # the machine's present one, 1 being full
Clock = Callable[[Callable[[], object], int], float]  # seconds per call of so many calls


@dataclass(frozen=True)
class Arm:
    """One thing to time. `threads` is torch's thread count while it runs; 0 leaves it as it is. `before` runs
    untimed right before each sample; without one, the sample begins on settled cores behind a waking call."""

    name: str
    call: Callable[[], object]
    threads: int = 0
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Round:
    """Seconds per call of every arm, and the machine's speed around them, 1 being full speed."""

    seconds: dict[str, float]
    speed: float

    @property
    def quiet(self) -> bool:
        return self.speed >= QUIET


@dataclass(frozen=True)
class Summary:
    """Median and interquartile range of one arm, in seconds per call, over `rounds` `of` so many rounds."""

    median: float
    iqr: float
    rounds: int
    of: int

    @property
    def spread(self) -> float:
        return self.iqr / self.median if self.median else 0.0


@dataclass(frozen=True)
class Comparison:
    """The rounds of one measurement."""

    rounds: tuple[Round, ...] = ()

    @property
    def quiet(self) -> int:
        return sum(r.quiet for r in self.rounds)

    @property
    def contended(self) -> bool:
        """Too few quiet rounds to quote: the medians below are then of all rounds."""
        return self.quiet < FEWEST

    def summary(self, arm: str) -> Summary:
        used = [r.seconds[arm] for r in self.rounds if r.quiet or self.contended]
        return Summary(median(used), iqr(used), len(used), len(self.rounds))

    def summaries(self) -> dict[str, Summary]:
        """The summary of every arm."""
        return {name: self.summary(name) for name in self.rounds[0].seconds}

    def ratio(self, slower: str, quicker: str) -> float:
        """Ratio of medians: how many times quicker `quicker` is."""
        return self.summary(slower).median / self.summary(quicker).median


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def iqr(values: Sequence[float]) -> float:
    """Interquartile range: the width of the middle half."""
    return quantile(values, 0.75) - quantile(values, 0.25)


def quantile(values: Sequence[float], p: float) -> float:
    """By linear interpolation between order statistics; nan of nothing."""
    return float(np.quantile(values, p)) if values else float("nan")


def compare(
    arms: Sequence[Arm],
    *,
    seconds: float = 2.0,
    fewest: int = 5,
    speed: Speed | None = None,
    settle: float = SETTLE,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Times the arms against each other in this process.

    Args:
        arms: what to time; each is called before the clock starts, so that compiling and first touches are
        out. seconds: how long to go on, at least `fewest` rounds; twice as long if too few of them were
        quiet. fewest: quiet rounds wanted.
        speed: asked around every round. None: always quiet.
        settle: seconds of sleep before each sample, so that threads of the arm before have stopped spinning.
        clock: seconds, monotonic."""
    threads = torch.get_num_threads()

    def timed(call: Callable[[], object], repeats: int) -> float:
        began = clock()
        for _ in range(repeats):
            call()
        return clock() - began

    def once(arm: Arm) -> float:
        """Seconds of one warm call, roughly."""
        torch.set_num_threads(arm.threads or threads)
        arm.call()
        return min(timed(arm.call, 1) for _ in range(3))

    def sample(arm: Arm) -> float:
        """Seconds per call: of one call as long as a sample, of thousands of microseconds each. A stalled
        machine ends a sample early: eight stalls say as much as a thousand."""
        torch.set_num_threads(arm.threads or threads)
        time.sleep(settle)
        if arm.before is not None:
            arm.before()
        elif lengths[arm.name] < _WOKEN:
            arm.call()
        repeats = max(1, round(_SAMPLE / max(lengths[arm.name], 1e-7)))
        part = max(1, repeats // 8)
        done, taken = 0, 0.0
        while done < repeats and taken < 20 * _SAMPLE:
            taken += timed(arm.call, part)
            done += part
        torch.set_num_threads(threads)
        return taken / done

    try:
        lengths = {arm.name: once(arm) for arm in arms}
        torch.set_num_threads(threads)
        began = clock()
        return _interleaved(arms, sample, speed, lambda made: enough(made, clock() - began, seconds, fewest))
    finally:
        torch.set_num_threads(threads)


def compared(
    arms: Iterable[Arm] | Mapping[str, Callable[[], object]],
    device: str,
    seconds: float,
    speed: Speed | None = None,
) -> Comparison:
    """The arms, or calls by name, against each other, by the clock of their device; for about `seconds`, five
    quiet rounds if they take no more than twice as long, and FEWEST in any case. A GPU's calls are queued
    between events, so launches overlap as in a model; threads and `before` of an arm are of CPUs."""
    if isinstance(arms, Mapping):
        arms = [Arm(name, call, torch.get_num_threads()) for name, call in arms.items()]
    if torch.device(device).type != "cuda":
        return compare([*arms], seconds=seconds, fewest=_ROUNDS, speed=speed)
    with torch.cuda.device(device):
        return queued_rounds([*arms], seconds, queued, speed or GpuSpeed(device))


def queued_rounds(arms: Sequence[Arm], seconds: float, clock: Clock, speed: Speed) -> Comparison:
    """The rounds of a comparison by `clock`, in samples of as many calls as take _QUEUED together."""
    repeats = {}
    for arm in arms:
        arm.call()  # compiles
        once = min(clock(arm.call, 1) for _ in range(3))
        repeats[arm.name] = max(1, min(200, round(_QUEUED / max(once, 1e-7))))
    spent = 0.0

    def sample(arm: Arm) -> float:
        nonlocal spent
        taken = clock(arm.call, repeats[arm.name])
        spent += taken * repeats[arm.name]
        return taken

    return _interleaved(arms, sample, speed, lambda made: enough(made, spent, seconds, _ROUNDS))


def _interleaved(
    arms: Sequence[Arm],
    sample: Callable[[Arm], float],
    speed: Speed | None,
    done: Callable[[Sequence[Round]], bool],
) -> Comparison:
    """Every arm once per round, in an order that turns round, until `done`."""
    rounds: list[Round] = []
    before = speed() if speed else 1.0
    while not done(rounds):
        taken = {arm.name: sample(arm) for arm in (arms if len(rounds) % 2 == 0 else reversed(arms))}
        after = speed() if speed else 1.0
        rounds.append(Round(taken, min(before, after)))
        before = after
    return Comparison(tuple(rounds))


def enough(rounds: Sequence[Round], elapsed: float, seconds: float, fewest: int) -> bool:
    """May a comparison end: with `fewest` quiet rounds after `seconds`, or with few after twice as long?"""
    quiet = sum(r.quiet for r in rounds)
    if len(rounds) >= _MOST_ROUNDS or (elapsed >= 2 * seconds and len(rounds) >= FEWEST):
        return True
    return quiet >= fewest and elapsed >= seconds


def queued(call: Callable[[], object], repeats: int) -> float:
    """Seconds per call by a GPU's clock."""
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
