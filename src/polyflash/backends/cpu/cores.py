"""How many cores this process may keep busy: the CPU quota of its control groups, and its affinity mask.

A process above its quota is stopped for the rest of a period, tens of milliseconds, at whatever instruction
its threads are: two threads under a quota of one core stand still half of the time. So the quota is rounded
down: 1.5 cores are one thread that never stops, not two that do.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

UNLIMITED = 1 << 20


@lru_cache(maxsize=1)
def quota_threads() -> int:
    """Threads that the CPU quota lets run without a stop, at least 1; `UNLIMITED` without one. Read once."""
    cores = quota()
    return UNLIMITED if cores is None else max(1, int(cores))


def allowed() -> int:
    """Cores in the affinity mask of the calling thread; all cores where there are no masks."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def present() -> int:
    """Cores of the machine, allowed or not."""
    return os.cpu_count() or 1


def quota(proc: str = "/proc/self") -> float | None:
    """Cores' worth of time that the control groups of this process allow: the least over each of its groups
    and those above; None if nothing limits it. `proc` is the process's own folder.

    Source: the kernel's pages on control groups, cpu.max (version 2) and cpu.cfs_quota_us (version 1).
    """
    try:
        groups = _lines(f"{proc}/cgroup")
        mounts = _lines(f"{proc}/mountinfo")
    except OSError:
        return None
    found: list[float] = []
    for group in groups:
        _, controllers, path = (*group.split(":", 2), "", "")[:3]
        version = 2 if not controllers else 1 if "cpu" in controllers.split(",") else 0
        for place, root in _mounted(mounts, version):
            top = root.rstrip("/") + "/"
            inside = path[len(top) :] if f"{path}/".startswith(top) else ""
            folders = [place]
            for name in (name for name in inside.split("/") if name not in ("", ".", "..")):
                folders.append(os.path.join(folders[-1], name))
            found.extend(cores for cores in map(_limit_of, folders) if cores is not None)
    return min(found, default=None)


def _mounted(mounts: list[str], version: int) -> list[tuple[str, str]]:
    """Mount points of the cpu controller, and which group each of them shows at its top."""
    found = []
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        second = version == 2 and kind[0] == "cgroup2"
        if second or (version == 1 and kind[0] == "cgroup" and "cpu" in kind[-1].split(",")):
            found.append((_plain(fields[4]), _plain(fields[3])))
    return found


def _limit_of(folder: str) -> float | None:
    try:
        limit, period = _lines(f"{folder}/cpu.max")[0].split()
    except (OSError, ValueError, IndexError):
        try:
            limit, period = (_lines(f"{folder}/cpu.cfs_{name}_us")[0] for name in ("quota", "period"))
        except (OSError, IndexError):
            return None
    if not (limit.isdecimal() and period.isdecimal() and int(limit) and int(period)):
        return None  # "max", -1
    return int(limit) / int(period)


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().splitlines()


def _plain(text: str) -> str:
    r"""mountinfo writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
