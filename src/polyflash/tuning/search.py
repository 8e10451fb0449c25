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
from polyflash.tuning.trial import Trial, difference_of

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
    trials: Sequence[Trial], race: Race, *, start: Entry | None = None, keep: Callable[[Entry], object],
    tell: Callable[[Step], None] = lambda step: None, now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Entry:  # fmt: skip
    """The best config for `trials`, problems of one row, one entry and hence the same candidates.

    Args:
        race: times calls that take turns, or raises ContendedError: no candidate wins such a race, and the
            next search begins at the first that was in one. start: the entry of a search that was
            interrupted.
        keep: called with the entry after every candidate. tell: called with what came of it.

    Returns the last entry kept: its times are geometric means over the problems.

    Raises:
        ContendedError: not even the first race said anything, so nothing was kept."""
    untuned, *others = trials[0].candidates()
    incumbent, first = untuned, 0
    if start is not None and start.of == len(others):
        incumbent, first = _resumed(start, [untuned, *others]), start.tried
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


def _resumed(start: Entry, known: Sequence[Any]) -> Any:
    """The incumbent of an entry, if it is still a candidate; else the untuned config."""
    return next((c for c in known if kind_of(type(c)) == start.kind and asdict(c) == start.values), known[0])


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
        try:
            error = trial.error(trial.run(config)())
        except Exception as raised:  # a compiler's or a driver's, of any class: the candidate is out
            return (
                f"fails: {type(raised).__name__}: {str(raised).strip().partition(chr(10))[0][:120]}",
                math.nan,
            )
        if not error <= trial.tolerance:
            return f"wrong: {error:.1e} on {trial.workload.name}", math.nan
    try:
        ratio = _ratio(trials, race, incumbent, config, SHORT)
        if ratio > 1 - MARGIN:
            return "slower" if ratio > 1 + MARGIN else "even", ratio
        ratio = _ratio(trials, race, incumbent, config, LONG)
    except ContendedError as busy:
        return f"{CONTENDED}: {busy}", math.nan
    return QUICKER if ratio < 1 - MARGIN else "even", ratio


def _ratio(trials: Sequence[Trial], race: Race, incumbent: Any, config: Any, length: float) -> float:
    """Time of `config` over that of `incumbent`, the geometric mean over the problems."""
    total = 0.0
    for trial in trials:
        taken = race({INCUMBENT: trial.run(incumbent), CHALLENGER: trial.run(config)}, length)
        total += math.log(taken[CHALLENGER] / taken[INCUMBENT])
    return math.exp(total / len(trials))


def _times(trials: Sequence[Trial], race: Race, best: Any, untuned: Any) -> tuple[float, float]:
    """Seconds of both configs, geometric means over the problems."""
    logs = [0.0, 0.0]
    for trial in trials:
        arms = {INCUMBENT: trial.run(best)}
        if best != untuned:
            arms[CHALLENGER] = trial.run(untuned)
        taken = race(arms, LONG)
        logs[0] += math.log(taken[INCUMBENT])
        logs[1] += math.log(taken.get(CHALLENGER, taken[INCUMBENT]))
    return math.exp(logs[0] / len(trials)), math.exp(logs[1] / len(trials))
