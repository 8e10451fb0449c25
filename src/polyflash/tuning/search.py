"""The search for a quicker config of one kernel row, for problems that share an entry of the tuned file.

Each candidate is checked before it is timed, then raced against the incumbent: shortly, and if that was
promising, again at length. The winner is the incumbent of the next race. What is known is kept after every
candidate, so that a search that is interrupted has lost nothing and the next one goes on behind it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from polyflash.tuning.store import Entry, kind_of
from polyflash.tuning.trial import Trial, attempt, difference_of

Call = Callable[[], object]
# Seconds per call (a median) of calls that take turns; the number says how long, 1 being a short look.
Race = Callable[[Mapping[str, Call], float], Mapping[str, float]]
INCUMBENT, CHALLENGER = "incumbent", "challenger"
SHORT, LONG = 1.0, 4.0
QUICKER, CONTENDED = "quicker", "contended"
MARGIN = 0.02  # a challenger must be quicker by this share, or the noise of the clock would choose


class ContendedError(Exception):
    """A race decides nothing: the machine was busy with something else; the text says how that was seen."""


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one candidate: `ratio` is its time over the incumbent's, nan if it was not timed."""

    name: str
    number: int
    of: int
    outcome: str
    ratio: float = math.nan


def tune(
    trials: Sequence[Trial],
    race: Race,
    *,
    start: Entry | None = None,
    keep: Callable[[Entry], object],
    tell: Callable[[Step], None] = lambda step: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Entry:
    """The best config for `trials`, problems of one row, one entry and hence the same candidates: the last
    entry given to `keep`, which is called after every candidate, as `tell` is with what came of it. Its times
    are geometric means over the problems. `start` is the entry of a search that was interrupted.

    `race` times calls that take turns, or raises ContendedError: no candidate wins such a race, and the next
    search begins at the first that was in one. If the first race of all says nothing, nothing is kept."""
    untuned, *others = trials[0].candidates()
    incumbent, first = untuned, 0
    if start is not None and start.of == len(others):
        kept = [c for c in others if (kind_of(type(c)), asdict(c)) == (start.kind, start.values)]
        incumbent, first = (*kept, untuned)[0], start.tried
    for trial in trials:
        _check(trial, untuned)

    def entry(tried: int) -> Entry:
        when = now().isoformat(timespec="seconds")
        return Entry(kind_of(type(incumbent)), asdict(incumbent), *times, when, tried, len(others))

    times = _times(trials, race, incumbent, untuned)
    sure = len(others)  # candidates before the first whose race was contended
    for number, config in enumerate(others[first:], first + 1):
        outcome, ratio = _contest(trials, race, incumbent, config)
        if outcome == QUICKER:
            incumbent = config
            times = (times[0] * ratio, times[1])
        elif outcome.startswith(CONTENDED):
            sure = min(sure, number - 1)
        keep(entry(min(number, sure)))
        tell(Step(difference_of(untuned, config), number, len(others), outcome, ratio))
    with contextlib.suppress(ContendedError):  # every link of the chain was seen without contention
        times = _times(trials, race, incumbent, untuned)
    if times[0] > times[1]:  # a chain of narrow wins that does not hold
        incumbent = untuned
        times = (times[1], times[1])
    keep(entry(sure))
    return entry(sure)


def _check(trial: Trial, untuned: Any) -> None:
    error = trial.error(trial.run(untuned)())
    if not error <= trial.tolerance:
        raise ArithmeticError(
            f"{trial.launch.row.name} is wrong by {error:.1e} on {trial.workload.name}, and rounding explains"
            f" {trial.tolerance:.0e} of it: nothing is tuned"
        )


def _contest(trials: Sequence[Trial], race: Race, incumbent: Any, config: Any) -> tuple[str, float]:
    """(QUICKER, "slower", "even", "wrong: ...", "fails: ..." or "contended: ...", ratio of times)."""
    for trial in trials:
        _, error, why = attempt(trial, config)
        if not error <= trial.tolerance:
            return why or f"wrong: {error:.1e} on {trial.workload.name}", math.nan
    try:
        for length in (SHORT, LONG):
            before, now = _times(trials, race, incumbent, config, length)
            ratio = now / before
            if ratio > 1 - MARGIN:
                return "slower" if length == SHORT and ratio > 1 + MARGIN else "even", ratio
    except ContendedError as busy:
        return f"{CONTENDED}: {busy}", math.nan
    return QUICKER, ratio


def _times(
    trials: Sequence[Trial], race: Race, best: Any, other: Any, length: float = LONG
) -> tuple[float, float]:
    """Seconds of both configs, geometric means over the problems."""
    logs = [0.0, 0.0]
    for trial in trials:
        arms = {INCUMBENT: trial.run(best)}
        if best != other:
            arms[CHALLENGER] = trial.run(other)
        taken = race(arms, length)
        logs[0] += math.log(taken[INCUMBENT])
        logs[1] += math.log(taken.get(CHALLENGER, taken[INCUMBENT]))
    return math.exp(logs[0] / len(trials)), math.exp(logs[1] / len(trials))
