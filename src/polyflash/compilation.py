"""Record of what this process compiled: one line on stderr for a person, and seconds for
`polyflash.counters()`.

A kernel that a cache already has is loaded, not compiled, and leaves no trace here."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from polyflash import env

compiled: dict[str, float] = {}  # kernel and target -> seconds


def note(kernel: str, target: str, seconds: float) -> None:
    """Says that `kernel` was compiled for `target`, in one line: on a terminal, or if a log is asked for."""
    name = f"{kernel} for {target}"
    compiled[name] = compiled.get(name, 0.0) + seconds
    _say(f"polyflash: compiled {name} in {seconds:.1f} s\n", log=env.LOG.is_set())


@contextlib.contextmanager
def timed(kernel: str, target: str) -> Iterator[None]:
    """Notes what is compiled within, if it ends well. A terminal shows meanwhile what it waits for."""
    began = time.perf_counter()
    _say(f"polyflash: compiling {kernel} for {target} ...", log=False)
    try:
        yield
    finally:
        _say("\r\x1b[2K", log=False)
    note(kernel, target, time.perf_counter() - began)


def _say(text: str, *, log: bool) -> None:
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError):  # a closed stream stops no call
        if stream is not None and (log or stream.isatty()):
            stream.write(text)
            stream.flush()
