"""Does the suite notice planted defects? Plants those of mutants.toml one by one and demands that tests fail.

    python scripts/mutants.py [--only ID ...] [--list] [--jobs N]

A mutant is one place of src/polyflash: `old`, which must occur exactly once, becomes `new`; `stands_for` is
the mistake it repeats. `workloads` (accuracy tests of the CPU engine), `gradients` (gradient tests of the
backend the place belongs to, else of torch) and `tests` (pytest nodes) must kill it, each mutant in a copy of
src with a kernel cache of its own. Killed means that a test's own assertion failed: an import error, any
other exception and a timeout do not count, the death of the interpreter only with `crash = true`. Before
that, every selection must pass on the sources as they are. Tests of Triton's kernels run in its interpreter.
Exit status 0: all are killed; 1: some survive; 2: the table or the unmutated suite is wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
TIMEOUT_S, BASELINE_TIMEOUT_S = 300, 1800
INTERPRETED = re.compile(r"tests/backends/triton/|.*(\[triton-.*|-triton)\]$")  # with TRITON_INTERPRET set
X86 = platform.machine() in ("x86_64", "AMD64")
EMULATED = re.compile("tests/backends/cpu/test_decode_codes")  # where the CPU has no AVX-512
KILLING = ("AssertionError", "assert ", "Failed: ")


@dataclass(frozen=True)
class Mutant:
    id: str
    file: str  # below src/polyflash
    stands_for: str
    old: str
    new: str
    workloads: tuple[str, ...] = ()  # names of polyflash.workloads, float32 or "name/dtype"
    gradients: tuple[str, ...] = ()  # likewise, for the gradients of the backend that `file` belongs to
    tests: tuple[str, ...] = ()
    crash: bool = False

    @property
    def interpreted(self) -> bool:
        return any(map(INTERPRETED.match, self.tests))

    @property
    def emulated(self) -> bool:
        return any(map(EMULATED.match, self.tests))

    def selection(self) -> tuple[str, ...]:
        backend = self.file.split("/")[1] if self.file.startswith("backends/") else "torch"
        gradients = (_gradient_node_of(name, backend) for name in self.gradients)
        return (*map(_node_of, self.workloads), *gradients, *self.tests)

    def applied(self, text: str) -> str:
        """`text` with the defect; ValueError if it does not have exactly one place for it."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.id}: its old text occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def _node_of(workload: str) -> str:
    name, _, dtype = workload.partition("/")
    test = "test_varlen.py::test_members" if name.startswith("packed") else "test_accuracy.py::test_workload"
    return f"tests/conformance/{test}[cpu-forward-{name}-{dtype or 'float32'}]"


def _gradient_node_of(workload: str, backend: str) -> str:
    name, _, dtype = workload.partition("/")
    files = {"packed": "test_varlen.py", "intervals": "test_intervals.py"}
    file = files.get(name.partition("-")[0], "test_gradients.py")
    return f"tests/conformance/{file}::test_gradients[{backend}-backward-{name}-{dtype or 'float32'}]"


def table() -> list[Mutant]:
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    lists = ("workloads", "gradients", "tests")
    return [Mutant(**{**entry, **{n: tuple(entry.get(n, ())) for n in lists}}) for entry in entries]


def misplaced(mutant: Mutant) -> str:
    """Why the sources have no place for a mutant, or ""."""
    try:
        mutant.applied((ROOT / "src" / "polyflash" / mutant.file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"stale entry: {error}"
    return ""


def run_tests(source: Path, cache: Path, nodes: Sequence[str], timeout_s: int, report: Path) -> str:
    """ "passed", "killed: <test>", or what else happened, of one pytest run over a copy of src."""
    kept = {n: x for n, x in os.environ.items() if not n.startswith(("POLYFLASH_", "TRITON_INTERPRET"))}
    env = {
        **kept,
        "PYTHONPATH": str(source),
        "POLYFLASH_CACHE_DIR": str(cache),
        "PYTHONDONTWRITEBYTECODE": "1",
        **({"POLYFLASH_WEBGPU_CPU": "1"} if any("webgpu" in node for node in nodes) else {}),
        **({"TRITON_INTERPRET": "1"} if any(map(INTERPRETED.match, nodes)) else {}),
        **({"POLYFLASH_TEST_ISA": "avx512"} if any(map(EMULATED.match, nodes)) and X86 else {}),
    }
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "",
        "-k", "not torch-forward", f"--junitxml={report}", *nodes,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, timeout=timeout_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"timeout after {timeout_s} s"
    if not report.exists():
        if done.returncode in range(6):
            return f"error: pytest did not start: {done.stdout.strip()[-300:]}"
        return f"crashed: {done.returncode}"
    return outcome(ET.parse(report).getroot())


def outcome(suites: ET.Element) -> str:
    cases = list(suites.iter("testcase"))
    for case in cases:
        failure = case.find("failure")
        if failure is not None:
            message = failure.get("message", "").strip()
            how = "killed" if message.startswith(KILLING) else "error"
            return f"{how}: {case.get('name')}" + ("" if how == "killed" else f": {message[:120]}")
        if case.find("error") is not None:
            return f"error: {case.get('name')}: not a test's own failure"
    ran = sum(case.find("skipped") is None for case in cases)
    return "passed" if ran else "error: no test ran"


def plant(mutant: Mutant, folder: Path, sound: Path) -> tuple[Path, Path]:
    """A copy of the sound sources with the defect, and its cache: empty, unless the kernels are the same."""
    source, cache = folder / "src", folder / "cache"
    shutil.copytree(sound / "src", source)
    place = source / "polyflash" / mutant.file
    place.write_text(mutant.applied(place.read_text(encoding="utf-8")), encoding="utf-8")
    if (sound / "cache").exists() and not mutant.file.startswith("backends/cpu/"):
        shutil.copytree(sound / "cache", cache)
    return source, cache


def hunt(mutant: Mutant, sound: Path) -> tuple[bool, str, float]:
    """Whether a mutant is killed, by what, and after how many seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="polyflash-mutant-") as name:
        source, cache = plant(mutant, Path(name), sound)
        result = run_tests(source, cache, mutant.selection(), TIMEOUT_S, Path(name) / "report.xml")
    killed = result.startswith("killed") or (mutant.crash and result.startswith("crashed"))
    return killed, result, time.perf_counter() - start


def baseline(chosen: Sequence[Mutant], folder: Path) -> tuple[str, list[Mutant]]:
    """Copies the sources, which may change meanwhile, and runs every selection on them. Returns what is
    wrong, or "", and the mutants whose tests run here: some need an instruction set."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    where = "import polyflash; print(polyflash.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=folder, env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if not Path(found.strip()).is_relative_to(source):
        return f"polyflash is imported from {found.strip()}, not from the copy", []
    ran: set[str] = set()
    for interpreted, emulated in product((False, True), repeat=2):
        mutants = [m for m in chosen if m.interpreted is interpreted and m.emulated is emulated]
        nodes = list(dict.fromkeys(node for mutant in mutants for node in mutant.selection()))
        if not nodes or (interpreted and find_spec("triton") is None):
            continue
        report = folder / "report.xml"
        result = run_tests(source, folder / "cache", nodes, BASELINE_TIMEOUT_S, report)
        if result != "passed":
            return f"the sources as they are: {result}", []
        cases = ET.parse(report).getroot().iter("testcase")
        ran |= {_plain_name(case) for case in cases if case.find("skipped") is None}
    return "", [m for m in chosen if any(_runs(node, ran) for node in m.selection())]


def _plain_name(case: ET.Element) -> str:
    """A test as pytest selects it: its file, classes and name."""
    parts = case.get("classname", "").split(".")
    module = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(("/".join(parts[: module + 1]) + ".py", *parts[module + 1 :], case.get("name", "")))


def _runs(node: str, ran: set[str]) -> bool:
    return any(name == node or name.startswith((f"{node}[", f"{node}::")) for name in ran)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", metavar="ID", help="these mutants alone; a word matches part of an id"
    )
    parser.add_argument("--list", action="store_true", help="print the table and stop")
    jobs = min(4, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"mutants at a time (default {jobs})")
    options = parser.parse_args()
    chosen = [m for m in table() if not options.only or any(re.search(word, m.id) for word in options.only)]
    if not chosen:
        parser.error(f"no mutant matches {options.only}")
    if options.list:
        for m in chosen:
            print(f"{m.id:<34} {m.file:<28} {m.stands_for}")
        return 0
    stale = [found for found in map(misplaced, chosen) if found]
    if stale:
        print("\n".join(stale))
        return 2
    with tempfile.TemporaryDirectory(prefix="polyflash-mutants-") as name:
        print(f"{len(chosen)} mutants; first their tests on the sources as they are", flush=True)
        wrong, able = baseline(chosen, Path(name))
        if wrong:
            print(wrong)
            return 2
        for m in chosen:
            if m not in able:
                print(f"{m.id:<34}     -    not on this machine: its tests are skipped")
        survivors = []
        with ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda m: hunt(m, Path(name)), able)
            for m, (killed, result, seconds) in zip(able, results, strict=True):
                print(
                    f"{m.id:<34} {seconds:5.0f} s  {result if killed else 'NOT KILLED: ' + result}",
                    flush=True,
                )
                survivors += [] if killed else [m.id]
    print(f"{len(able) - len(survivors)} of {len(able)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
