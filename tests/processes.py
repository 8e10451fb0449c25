"""New processes in which torch is imported already: forked from one that did only that, in milliseconds.

For tests of what a process does, not of what it imports. A child begins like `python -c CODE`: with its own
environment, folder, arguments and output, one thread, and nothing of polyflash. What reads variables before
a line of Python runs, or imports, is given a fresh interpreter by `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

_BETWEEN = """
import gc, json, os, runpy, sys
import torch
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.environ.clear()
os.environ.update(job["env"])
os.chdir(job["cwd"])
for stream, file in enumerate((os.devnull, *job["files"])):
    os.dup2(os.open(file, os.O_RDWR), stream)
sys.path[1:1] = filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep))
first, *rest = job["words"]
sys.argv = [first, *rest[first in ("-c", "-m"):]]
if first == "-m":
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
elif first == "-c":
    exec(rest[0], {"__name__": "__main__", "__builtins__": __builtins__})
else:
    sys.path[0] = os.path.dirname(first)
    runpy.run_path(first, run_name="__main__")
"""


@functools.cache
def _between() -> Any:
    """The process whose children the others are; it ends with this one."""
    plain = {n: x for n, x in os.environ.items() if n != "PYTHONPATH"}
    command, pipe = [sys.executable, "-c", _BETWEEN], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=plain)

    def end() -> None:
        process.stdin.close()
        process.wait()

    atexit.register(end)
    return process


def forking() -> Any:
    """A context of multiprocessing for what spawns processes: forked from one that has imported torch and has
    one thread."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "benchmarks.command", "benchmarks.gpu.rows"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context


def begun(
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Runs `python *words` to its end: -c CODE, -m MODULE or a script. It is killed after `timeout`
    seconds."""
    if not hasattr(os, "fork"):
        about: Any = {"env": env, "cwd": cwd, "timeout": timeout}
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, **about)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        for file in files:
            file.touch()
        job = {"words": list(words), "env": dict(env or os.environ), "cwd": str(cwd or Path.cwd())}
        host = _between()
        host.stdin.write(json.dumps({**job, "files": list(map(str, files))}) + "\n")
        host.stdin.flush()
        patience = threading.Timer(timeout, os.kill, (int(host.stdout.readline()), signal.SIGKILL))
        patience.start()
        code = int(host.stdout.readline())
        patience.cancel()
        said = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return subprocess.CompletedProcess([sys.executable, *words], code, *said)
