"""Counts of what ran: calls per row of the table, and calls that went to torch, with the reason.

A `Tally` stands for all calls of a row, or for all that went to torch for one reason. It outlives the routes
that point to it, so an evicted route loses no count. Increments of an attribute and of a list's entry are
exact under the GIL, which changes hands at calls and jumps only; so nothing here takes a lock."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from polyflash import backends, compilation
from polyflash.target import remedy

if TYPE_CHECKING:
    from polyflash.plan import Launch

OURS = "polyflash"  # left a call to torch: the plan, not an integration
_MOST_TALLIES = 512  # a reason may name a size
_OTHER = "other reasons"
_STACK = "polyflash.watch"  # torch shows this thread's entry to threads of autograd that work for it
_tallies: dict[tuple[str, str, str], Tally] = {}
_baseline: Counter[Tally] = Counter()  # what was counted before the last reset
_warned: set[str] = set()
_open: list[watch] = []  # of all threads: while there is none, nobody looks further
# Every thread's list, twice: torch 2.11 takes no reference to what it is given, yet drops one in the end.
_kept: list[tuple[list[watch], list[watch]]] = []


class Tally:
    """Calls of a row, "" for none of ours; with a reason `why`, those that `who` left to torch for it."""

    __slots__ = ("calls", "row", "who", "why")

    def __init__(self, row: str, who: str, why: str) -> None:
        self.row, self.who, self.why, self.calls = row, who, why, 0

    def count(self) -> None:
        """Counts one call. Every launch passes here."""
        self.calls += 1
        if _open:
            for watching in _watching():
                watching._note(self)


def tally_of(launch: Launch, backend: str) -> Tally:
    """The tally of a new route's calls; `backend` is the one asked for by name, or ""."""
    why = ""
    if launch.row.backend == "torch":
        why = "asked for by name" if backend else _why_no_engine(launch)
        if not backend and "packages: numba" in why:
            _warn_once(launch)
    return _tally(launch.row.name, OURS, why)


def _tally(row: str, who: str, why: str) -> Tally:
    if (row, who, why) not in _tallies and len(_tallies) >= _MOST_TALLIES:
        why = why and _OTHER
    return _tallies.setdefault((row, who, why), Tally(row, who, why))


def _warn_once(launch: Launch) -> None:
    """Says what is missing, and the remedy: every call of this process is slower for it."""
    if "numba" not in _warned:
        _warned.add("numba")
        told = f"numba: {launch.target.why_no_package('numba')}, so calls on a CPU run on the torch row."
        warnings.warn(f"{told} Remedy: {remedy('numba')}", RuntimeWarning, stacklevel=2)


def _why_no_engine(launch: Launch) -> str:
    """Why the torch row runs a call that nobody gave it by name, as the engine that came closest says it."""
    spec, target = launch.spec, launch.target
    rows = [
        row
        for row in backends.TABLE
        if row.serves(spec.phase) and row.backend != "torch" and target.name.startswith(row.targets)
    ]
    reasons = [(row.name, row.reasons_against(spec, target, by_name=False)) for row in rows]
    if not reasons:
        return f"no engine has kernels for {target.name}"
    name, why = min(reasons, key=lambda found: len(found[1]))
    return f"{name}: {'; '.join(why)}"


def leave(by: str, why: str) -> None:
    """Counts a call that the integration `by` leaves to torch's own function. A compiled function makes that
    choice, and is counted, once: when it is compiled."""
    if torch.compiler.is_compiling():
        _leave_when_compiled(by, why)
    else:
        _leave(by, why)


def _leave(by: str, why: str) -> None:
    _tally("", by, " ".join(why.split())).count()


def _leave_when_compiled(by: str, why: str) -> None:
    _leave(by, f"{why} (compiled: counted once)")


_leave_when_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced


def counters(*, reset: bool = False) -> dict[str, Any]:
    """The calls this process ran since it began, or since the last `counters(reset=True)`, in every thread.

    A call is one launch of a row: `attention_groups` may make several, an empty call makes none, and a replay
    of a CUDA graph is not seen. Costs a call a fraction of a microsecond, and cannot be turned off.

    Args:
        reset: begin anew after this answer.

    Returns:
        "calls": {"cpu/forward": 12, ...}, by row as `explain` names it: backend/phase. "left_to_torch":
        {who: {reason: calls}}: under "polyflash" calls of the torch row (also among "calls"), under the name
        of an integration calls of torch's own function. "compiled": {kernel: seconds}."""
    global _baseline
    now = Counter({tally: tally.calls for tally in list(_tallies.values())})
    found = _arranged({tally: n - _baseline[tally] for tally, n in now.items()}, dict(compilation.compiled))
    if reset:
        _baseline = now
        compilation.compiled.clear()
    return found


def _arranged(counts: dict[Tally, int], compiled: dict[str, float]) -> dict[str, Any]:
    calls: Counter[str] = Counter()
    left: dict[str, Counter[str]] = {}
    for tally, n in counts.items():
        if n and tally.row:
            calls[tally.row] += n
        if n and tally.why:
            left.setdefault(tally.who, Counter())[tally.why] += n
    return {
        "calls": dict(sorted(calls.items())),
        "left_to_torch": {who: dict(whys.most_common()) for who, whys in sorted(left.items())},
        "compiled": compiled,
    }


class watch:
    """A context that collects what runs in it, and prints it as a table on stderr at its end.

        with polyflash.watch() as w:
            model(x)
        print(w)                # the table again
        w.counters()            # the same as `polyflash.counters()` says of the process

    It sees calls of its own thread, and gradients that autograd computes for it in other threads. Threads
    started within it are not seen: open one in each, or ask `counters()`. It nests: calls within an inner
    one are of the outer one too.

    Args:
        quiet: print nothing at the end."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._counts: dict[Tally, list[int]] = {}
        self._before: dict[str, float] = {}
        self._compiled: dict[str, float] | None = None  # until the end, what was compiled so far

    def __enter__(self) -> watch:
        self._before = dict(compilation.compiled)
        _open.append(self)
        if not torch._C._is_key_in_tls(_STACK):
            mine: list[watch] = []
            _kept.append((mine, mine))
            torch._C._stash_obj_in_tls(_STACK, mine)
        _watching().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watching().remove(self)
        _open.remove(self)
        self._compiled = self._compiled_since()
        if not self.quiet and sys.stderr is not None:
            print(self, file=sys.stderr)

    def counters(self) -> dict[str, Any]:
        """The calls that ran within, arranged as by `polyflash.counters()`. "compiled" is of every thread."""
        compiled = self._compiled_since() if self._compiled is None else self._compiled
        return _arranged({tally: cell[0] for tally, cell in list(self._counts.items())}, compiled)

    def _compiled_since(self) -> dict[str, float]:
        now = dict(compilation.compiled)
        return {name: seconds for name, seconds in now.items() if self._before.get(name) != seconds}

    def _note(self, tally: Tally) -> None:
        self._counts.setdefault(tally, [0])[0] += 1

    def __str__(self) -> str:
        found = self.counters()
        lines = [f"  {row:<18}{calls:>10}" for row, calls in found["calls"].items()] or ["  no call"]
        for who, reasons in found["left_to_torch"].items():
            lines.append(f"left to torch by {who}:")
            lines.extend(f"  {n:>6}  {why}" for why, n in reasons.items())
        if found["compiled"]:
            lines.append("compiled:")
            lines.extend(f"  {seconds:>6.1f} s  {kernel}" for kernel, seconds in found["compiled"].items())
        return "\n".join((f"polyflash: {'row':<7}{'calls':>19}", *lines))


def _watching() -> list[watch]:
    """The watches of this thread, or of the thread that autograd works for in this one."""
    return torch._C._get_obj_in_tls(_STACK) if torch._C._is_key_in_tls(_STACK) else []
