"""Interleaved timing: every arm once per round, in alternating order, with the machine's own speed beside
each round.

A round whose calibration ran below `QUIET` of the machine's full speed is contended: it is kept and counted,
and no median includes it. Times are seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

QUIET = 0.8  # of the full calibration rate: one of two cores absent gives 0.5
FEWEST = 3  # quiet rounds below which a result is marked contended
LOW_SCALING = 0.85  # of the thread count
_SAMPLE = 1e-3  # a sample repeats its call for at least this long
_WOKEN = 0.1  # calls below it are sampled behind an untimed one, which wakes the arm's own threads
SETTLE = 12e-3  # libgomp's threads spin for 7 ms after torch's last operation and would be measured with us
_MOST_ROUNDS = 200


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

    rounds: tuple[Round, ...] = field(default=())

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
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = p * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def compare(
    arms: Sequence[Arm], *, seconds: float = 2.0, fewest: int = 5, speed: Callable[[], float] | None = None,
    settle: float = SETTLE, clock: Callable[[], float] = time.perf_counter,
) -> Comparison:  # fmt: skip
    """Times the arms against each other in this process.

    Args:
        arms: what to time; each is called before the clock starts, so that compiling and first touches are
        out. seconds: how long to go on, at least `fewest` rounds; twice as long if too few of them were
        quiet. fewest: quiet rounds wanted.
        speed: the machine's present speed, 1 being full; asked around every round. None: always quiet.
        settle: seconds of sleep before each sample, so that threads of the arm before have stopped spinning.
        clock: seconds, monotonic."""
    threads = torch.get_num_threads()
    try:
        once = {arm.name: _once(arm, threads, clock) for arm in arms}
        rounds: list[Round] = []
        began = clock()
        before = speed() if speed else 1.0
        while not enough(rounds, clock() - began, seconds, fewest):
            taken = {}
            for arm in arms if len(rounds) % 2 == 0 else reversed(arms):
                torch.set_num_threads(arm.threads or threads)
                time.sleep(settle)
                taken[arm.name] = _sample(arm, once[arm.name], clock)
            torch.set_num_threads(threads)
            after = speed() if speed else 1.0
            rounds.append(Round(taken, min(before, after)))
            before = after
    finally:
        torch.set_num_threads(threads)
    return Comparison(tuple(rounds))


def enough(rounds: Sequence[Round], elapsed: float, seconds: float, fewest: int) -> bool:
    """May a comparison end: with `fewest` quiet rounds after `seconds`, or with few after twice as long?"""
    quiet = sum(r.quiet for r in rounds)
    if len(rounds) >= _MOST_ROUNDS or (rounds and elapsed >= 2 * seconds and len(rounds) >= FEWEST):
        return True
    return quiet >= fewest and elapsed >= seconds


def _once(arm: Arm, threads: int, clock: Callable[[], float]) -> float:
    """Seconds of one warm call, roughly."""
    torch.set_num_threads(arm.threads or threads)
    arm.call()
    return min(_timed(arm.call, 1, clock) for _ in range(3))


def _sample(arm: Arm, once: float, clock: Callable[[], float]) -> float:
    """Seconds per call: of one call as long as a sample, of thousands of microseconds each. A stalled machine
    ends a sample early: eight stalls say as much as a thousand."""
    repeats = max(1, round(_SAMPLE / max(once, 1e-7)))
    if arm.before is not None:
        arm.before()
    elif once < _WOKEN:
        arm.call()
    part = max(1, repeats // 8)
    done, taken = 0, 0.0
    while done < repeats and taken < 20 * _SAMPLE:
        taken += _timed(arm.call, part, clock)
        done += part
    return taken / done


def _timed(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(repeats):
        call()
    return clock() - began
