"""Draws problems with an open seed until the time is up: forward passes, gradients, odd calls, on every row;
and calls between guard pages, of `tests/conformance/guarded.py`, alone, one after another and in 8 threads.

    python scripts/fuzz.py [--minutes M] [--draws N] [--seed N] [--only forward|lists|packed|pages|gradients|
        calls|guarded-dense|guarded-pages|guarded-packed|guarded-known|guarded-threads ...]

A draw that fails is made small and stored under tests/data/draws, which the suite replays: commit it with its
repair. So is one that kills the interpreter or never ends, as it is: a process of its own does the drawing.
Exit status 0: nothing failed; 1: draws were stored.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GUARDED = tuple(f"guarded-{kind}" for kind in ("dense", "pages", "packed", "known", "threads"))
TARGETS = ("forward", "lists", "packed", "pages", "gradients", "calls", *GUARDED)
ROUND = 40  # draws of a target before the next one has its turn
LONGEST_S, LATE_S = (
    600,
    60,
)  # seconds of one draw, kernels compiled in it; beyond the end for the draw at work


class TimeIsUp(KeyboardInterrupt):
    """Hypothesis lets it through, as it does Ctrl-C."""


def strategies() -> dict[str, tuple[Any, Any]]:
    """How each target is drawn and checked."""
    from tests.conformance import calls, draws, guarded

    kinds = {
        "forward": draws.problems,
        "lists": draws.listed_problems,
        "packed": draws.packed_problems,
        "pages": draws.paged_problems,
    }
    found: dict[str, tuple[Any, Any]] = {
        name: (draws.forward_draws(source()), draws.check_draw) for name, source in kinds.items()
    }
    found["gradients"] = draws.gradient_draws(), draws.check_draw
    found["calls"] = calls.calls(), calls.check_call
    for target in GUARDED:
        found[target] = guarded.draws(target.partition("-")[2]), guarded.check
    return found


def one_round(target: str, seed: int, end: float, current: Path) -> tuple[int, str, str]:
    """Up to ROUND draws. Returns how many, and the smallest failing one as text with its error, or ""."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    strategy, check = strategies()[target]
    failing: list[tuple[int, str, str]] = []
    count = 0

    @seeded(seed)
    @settings(
        max_examples=ROUND, database=None, deadline=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def body(drawn: Any) -> None:
        nonlocal count
        if time.time() > end:
            raise TimeIsUp
        text = drawn.text()
        current.write_text(f"{target}\n{text}", encoding="utf-8")
        count += 1
        try:
            check(drawn)
        except Exception as error:
            failing.append((len(text), text, f"{type(error).__name__}: {error}"))
            raise

    try:
        body()
    except TimeIsUp:
        pass
    except BaseException:
        if not failing:
            raise
    smallest = min(failing, default=(0, "", ""))
    return count, smallest[1], smallest[2]


def store(target: str, text: str, folder: Path) -> Path:
    """Writes a failing draw under a name that follows from it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
    path.write_text(text, encoding="utf-8")
    return path


def draw_until(
    end: float, seed: int, only: list[str], current: Path, folder: Path, most: int = 1 << 60
) -> int:
    """The child: rounds of every target in turn, until it has `most` draws. A target that failed has no
    further turn."""
    import torch
    from tests.memory import poisoned

    torch.set_num_threads(1)
    left, turn, counts = list(only), 0, dict.fromkeys(only, 0)
    with poisoned():
        while left and time.time() < end:
            for target in tuple(left):
                torch.set_num_threads(1 + turn % 2)
                count, text, error = one_round(target, seed + turn, end, current)
                counts[target] += count
                if text:
                    print(f"{store(target, text, folder)}: {error[:400]}", flush=True)
                if text or counts[target] >= most:
                    left.remove(target)
            turn += 1
            print(f"drawn {sum(counts.values())}", flush=True)
    print(", ".join(f"{target} {count}" for target, count in counts.items()), file=sys.stderr, flush=True)
    return 0


def watch(command: list[str], end: float, current: Path, folder: Path) -> tuple[int, list[str]]:
    """Runs the child. Returns how many draws it made and what failed, its own death included."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    last, since, late = "", time.time(), False
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said)
        while child.poll() is None:
            time.sleep(0.2)
            now = current.read_text(encoding="utf-8") if current.exists() else ""
            if now != last:
                last, since = now, time.time()
            late = time.time() > end + LATE_S and time.time() - since < LONGEST_S
            if late or time.time() - since > LONGEST_S:
                child.kill()
                child.wait()
        said.seek(0)
        lines = said.read().splitlines()
    drawn = [int(line.split()[1]) for line in lines if line.startswith("drawn ")]
    failed = [line for line in lines if not line.startswith("drawn ")]
    if child.returncode and not late:
        target, _, text = last.partition("\n")
        where = store(target, text, folder) if text else "before the first draw"
        failed.append(f"{where}: the process ended with status {child.returncode}")
    return max(drawn, default=0), failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument(
        "--draws", type=int, default=1 << 60, help="of each target, at least; then it is done"
    )
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument(
        "--store", type=Path, default=ROOT / "tests" / "data" / "draws", help=argparse.SUPPRESS
    )
    parser.add_argument("--child", nargs=2, metavar=("END", "CURRENT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        faulthandler.enable()
        end, current = float(options.child[0]), Path(options.child[1])
        return draw_until(end, options.seed, options.only, current, options.store, options.draws)
    start = time.time()
    end = start + 60 * options.minutes
    print(f"seed {options.seed}, {options.minutes:g} minutes: {', '.join(options.only)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="polyflash-fuzz-") as name:
        current = Path(name) / "draw"
        command = [
            sys.executable, str(Path(__file__).resolve()), "--seed", str(options.seed),
            "--draws", str(options.draws), "--only", *options.only, "--store", str(options.store),
            "--child", str(end), str(current),
        ]  # fmt: skip
        drawn, failed = watch(command, end, current, options.store)
    for line in failed:
        print(line)
    minutes = (time.time() - start) / 60
    verdict = f"{len(failed)} failed and are stored" if failed else "nothing failed"
    print(f"fuzz: {drawn} draws in {minutes:.1f} minutes, seed {options.seed}: {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
