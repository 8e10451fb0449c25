"""Times of functions taken in turns in one process, and a probe that tells when the cores were shared."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

SLOW_PROBE = 1.25  # a probe this many times the run's best means that something else used the cores
WIDE_SPREAD = 0.25  # an interquartile range above this share of the median is noise, not a time


@dataclass
class Row:
    """Seconds of each arm and of the probe, one per round; arms of one round ran within one short window."""

    seconds: dict[str, list[float]]
    probes: list[float] = field(default_factory=list)

    def median(self, arm: str) -> float:
        return statistics.median(self.seconds[arm])

    def quartiles(self, arm: str) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds[arm], n=4, method="inclusive")
        return low, high

    def ratio(self, slower: str, faster: str) -> float:
        return self.median(slower) / self.median(faster)

    def contended(self, best_probe: float) -> bool:
        """Were the cores shared, or the times too unsteady to be called times?"""
        spreads = [
            (high - low) / self.median(arm) for arm in self.seconds for low, high in [self.quartiles(arm)]
        ]
        return statistics.median(self.probes) > SLOW_PROBE * best_probe or max(spreads) > WIDE_SPREAD


def in_turns(
    arms: dict[str, Callable[[], object]], *, budget_s: float, min_rounds: int = 5, max_rounds: int = 25
) -> Row:
    """Every arm once per round, the order reversed each round, until `budget_s` seconds have gone by."""
    for arm in arms.values():
        arm()  # first calls compile and allocate
    row = Row({name: [] for name in arms})
    names = list(arms)
    end = time.perf_counter() + budget_s
    while len(row.probes) < min_rounds or (time.perf_counter() < end and len(row.probes) < max_rounds):
        row.probes.append(probe())
        for name in names:
            start = time.perf_counter()
            arms[name]()
            row.seconds[name].append(time.perf_counter() - start)
        names.reverse()
    return row


def probe() -> float:
    """Seconds of a matrix product that keeps every core busy for a few milliseconds: the better of two."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        torch.mm(_PROBE, _PROBE)
        times.append(time.perf_counter() - start)
    return min(times)


_PROBE = torch.ones(512, 512)


def machine() -> str:
    """Processor and threads, in one line."""
    name = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    elif platform.system() == "Darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
    name = name or platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def versions(*more: str) -> str:
    """polyflash with its commit, torch, Python and `more`, in one line."""
    import polyflash

    here = Path(__file__).resolve().parent
    commit = _output("git", "-C", str(here), "rev-parse", "--short", "HEAD")
    changed = (
        "+changes" if _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no") else ""
    )
    ours = f"polyflash {polyflash.__version__}" + (f" ({commit}{changed})" if commit else "")
    return ", ".join((ours, f"torch {torch.__version__}", f"Python {platform.python_version()}", *more))


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
