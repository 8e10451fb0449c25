"""One process that may hang or crash: JSON requests on its input, one JSON answer to each on its output.

Whatever libraries print goes to stderr, whose last line is the reason if the process dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, TextIO

from benchmarks import environment


class Child:
    """The parent's end. `python -m module` gets `settings` first, and its first answer says that it is ready.
    `alive` is False once it was killed or died; it then has no more answers."""

    def __init__(self, module: str, settings: dict[str, Any], patience: float) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, encoding="utf-8", env=environment(),
        )  # fmt: skip
        self.alive = True
        self._refusal = str(self.ask(settings, patience).get("reason", ""))

    def ask(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        """Its answer; if none comes in so many seconds, or it dies, {"reason": …}, and it is not alive."""
        process = self._process
        if not self.alive or process.stdin is None or process.stdout is None:
            return {"reason": self._refusal}
        alarm = threading.Timer(patience, process.kill)
        alarm.daemon = True
        alarm.start()
        with contextlib.suppress(OSError):  # dead before it read: its last words say why
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        ran_out = not alarm.is_alive()
        alarm.cancel()
        if line.endswith("\n"):
            answer = json.loads(line)
            if answer.pop("fatal", False):
                self.end()
            return dict(answer)
        code = process.wait()
        self._refusal = f"hung: no answer in {patience:.0f} s" if ran_out else self._last_words(code)
        self.end()
        return {"reason": self._refusal}

    def end(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _last_words(self, code: int) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"its process ended with code {code}" + (f": {lines[-1][:200]}" if lines else "")


def serve(prepare: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """The child's end: what `prepare(settings)` returns answers every request. An answer that is "fatal" is
    the last one."""
    source, sink = sys.stdin, _own_output()
    answer = prepare(json.loads(source.readline()))
    for reply in _replies(source, answer):
        print(json.dumps(reply), file=sink, flush=True)
        if reply.get("fatal"):
            return


def _replies(source: TextIO, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield {}
    for line in source:
        yield answer(json.loads(line))


def _own_output() -> TextIO:
    """The pipe to the parent; file descriptor 1 becomes stderr, for libraries that print."""
    sys.stdout.flush()
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return sink
