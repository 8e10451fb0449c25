"""What this process compiled: one line on stderr for a person, and seconds for `polyflash.counters()`.

A kernel that a cache already has is loaded, not compiled, and leaves no trace here."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from polyflash import env

compiled: dict[str, float] = {}  # kernel and target -> seconds


def shown() -> bool:
    """Would a person see it: stderr is a terminal, or the log is asked for?"""
    stream = sys.stderr
    return stream is not None and (env.LOG.is_set() or stream.isatty())


def note(kernel: str, target: str, seconds: float) -> None:
    """Says that `kernel` was compiled for `target`, as one line."""
    name = f"{kernel} for {target}"
    compiled[name] = compiled.get(name, 0.0) + seconds
    if shown():
        with contextlib.suppress(OSError, ValueError):  # a closed stream stops no call
            sys.stderr.write(f"polyflash: compiled {name} in {seconds:.1f} s\n")
            sys.stderr.flush()


@contextlib.contextmanager
def timed(kernel: str, target: str) -> Iterator[None]:
    """Notes what is compiled within, if it ends well."""
    began = time.perf_counter()
    yield
    note(kernel, target, time.perf_counter() - began)
