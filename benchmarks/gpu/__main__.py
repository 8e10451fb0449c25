"""The GPU suite: polyflash and its peers on one device, in a time budget, every row kept as it is measured.

    python -m benchmarks.gpu --budget 540 --json build/gpu.jsonl --page docs/results/page.md

Rows come in waves, the most telling first. Before a wave, every kernel that is compiled here is tried in
child processes that are killed if they hang; then the arms of each row are checked again and timed by turns
in one process. A supervisor starts that process anew, for the rest of the budget, if it dies or stops
writing. The file of JSON lines is the memory of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import machine as gpu_machine
from benchmarks.gpu import page as gpu_page
from benchmarks.gpu.arms import DEFAULT, KERNELS, OURS, GpuArm, applicable, arms
from benchmarks.gpu.cases import PARTS, GpuCase
from benchmarks.gpu.children import Children, Task, kernel_of
from benchmarks.gpu.rows import ROUNDS, Device, DeviceLost, is_mismatch, left_out, measure, verdict
from polyflash.bench.peak import ceilings

LOST = 75  # exit code of a measuring process whose device is gone; a new process may have it back
_ATTEMPTS = 2  # at a row, before it is left out
_SILENCE = 150.0  # seconds without a line after which a measuring process is taken for hung
_WAVE = 0.4  # of the time left, at most, for the trials of a wave
_RESERVE = 12.0  # seconds kept for the last row and the page


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add, names = made.add_argument, "NAME,NAME"
    flag: Any = {"action": "store_true"}
    variant = "one more arm of ours, fields of its configuration replaced; repeatable"
    add("--json", default="build/gpu.jsonl", metavar="FILE", help="rows, one JSON line each")
    add("--page", metavar="FILE", help="write the tables as Markdown, and pictures beside them")
    add("--budget", type=float, default=540.0, metavar="SECONDS", help="of wall time; 540")
    add("--device", default="cuda", help="cuda, cuda:1, or cpu to try the suite itself")
    add("--backend", default="triton", help="which backend of ours; triton")
    add("--arms", default=",".join(DEFAULT), help="who is timed", metavar=names)
    add("--variant", action="append", default=[], metavar="FIELD=VALUE,...", help=variant)
    add("--parts", default="", help=f"of {', '.join(PARTS)}; all", metavar=names)
    add("--filter", nargs="+", default=[], metavar="WORD", help="rows with every word: causal d128")
    add("--tiny", help="a few small rows, whose figures mean nothing", **flag)
    add("--rounds", type=int, default=ROUNDS, help=f"per row; {ROUNDS}")
    add("--workers", type=int, default=6, help="child processes that try kernels; 0: try none")
    add("--resume", help="keep the rows that FILE has, measure the others", **flag)
    add("--commit", default="", help="of the sources, where git cannot say")
    add("--list", help="print the names of the rows and stop", **flag)
    add("--page-only", help="measure nothing: the page of what the file has", **flag)
    add("--until", type=float, default=0.0, help=argparse.SUPPRESS)  # set: be the measuring process
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite. Returns 1 if an output of ours was wrong or nothing was measured."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    options.device = "cuda:0" if options.device == "cuda" else options.device
    if options.list:
        print("\n".join(f"{case.tier} {case.name}" for case in _chosen(options)))
        return 0
    file = Path(options.json)
    file.parent.mkdir(parents=True, exist_ok=True)
    if options.until:
        return _measuring(options, file)
    if not options.page_only:
        if not options.resume:
            file.unlink(missing_ok=True)
        with contextlib.suppress(KeyboardInterrupt):  # what is measured is in the file
            _supervised(options, words, file, (sys.executable, "-m", "benchmarks.gpu"))
    content = read(file)
    if options.page:
        gpu_page.write(content, Path(options.page))
    print("\n".join(gpu_page.summary(content)))
    return 1 if not content["rows"] or any(map(is_mismatch, content["rows"])) else 0


def _chosen(options: argparse.Namespace) -> list[GpuCase]:
    every = gpu_cases.tiny() if options.tiny else gpu_cases.rows()
    parts = [name for name in options.parts.split(",") if name]
    return gpu_cases.selected(every, words=options.filter, parts=parts)


def read(file: Path) -> dict[str, Any]:
    """The lines of a file: `runs`, `rows` (a later one in the place of an earlier of its name), how often
    each row was `begun`, answers of children by the names of arm and row (`tried`), `ends` and `losts`. A
    line that was cut off is dropped."""
    found: dict[str, Any] = {"runs": [], "begun": Counter(), "tried": {}, "ends": [], "losts": []}
    rows: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            item = json.loads(line)
        except json.JSONDecodeError:
            continue
        match item["kind"]:
            case "row":
                rows[item["name"]] = item
            case "begin":
                found["begun"][item["name"]] += 1
            case "tried":
                found["tried"][item["arm"], item["name"]] = item["answer"]
            case "run" | "end" | "lost" as kind:
                found[f"{kind}s"].append(item)
    return found | {"rows": list(rows.values())}


def _supervised(
    options: argparse.Namespace, words: Sequence[str], file: Path, program: Sequence[str]
) -> None:
    """Starts measuring processes until one is through or the budget is spent."""
    until = time.time() + options.budget
    while time.time() < until - _RESERVE:
        begun = read(file)["begun"]
        command = [*program, *words, "--until", str(until)]
        child = subprocess.Popen(command, env=environment(), process_group=0 if os.name == "posix" else None)
        try:
            code = _watched(child, file, until)
        finally:
            _end(child)
        if code == 0 or read(file)["begun"] == begun:  # through, or it would end there again
            return


def _end(child: subprocess.Popen[bytes]) -> None:
    """The process and, where there are process groups, the children it may have left in a hung kernel."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()


def _watched(child: subprocess.Popen[bytes], file: Path, until: float) -> int | None:
    """Its exit code; None if it was silent for too long or the budget ran out."""
    size, since = -1, time.time()
    while time.time() < until:
        try:
            return child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            now = file.stat().st_size if file.exists() else 0
            if now != size:
                size, since = now, time.time()
            if time.time() - since > _SILENCE:
                return None
    return None


def _measuring(options: argparse.Namespace, file: Path) -> int:
    """The process that measures, until `options.until` (time.time())."""
    device = Device(options.device)
    if device.is_cuda and not torch.cuda.is_available():
        print(f"no CUDA device that torch {torch.__version__} can use", file=sys.stderr)
        return 1
    suite = _Suite(options, file, device)
    try:
        suite.run()
    except DeviceLost as lost:
        suite.say("lost", arm=lost.arm, name=suite.begun, reason=lost.reason)
        return LOST
    finally:
        suite.children.close()
    return 0


def _command() -> str:
    """As typed, without the clock time that a supervisor gives to a measuring process."""
    words = sys.argv[1:]
    words = words[: words.index("--until")] if "--until" in words else words
    return shlex.join(["python", "-m", "benchmarks.gpu", *words])


class _Suite:
    """State of a measuring process."""

    def __init__(self, options: argparse.Namespace, file: Path, device: Device) -> None:
        self.options, self.file, self.device = options, file, device
        settings = {"device": options.device, "backend": options.backend, "variants": options.variant}
        self.children = Children(options.workers, {**settings, "kernels": KERNELS})
        chosen = {*options.arms.split(","), *(f"{OURS}[{text}]" for text in options.variant)}
        self.arms = [arm for arm in arms(options.backend, options.variant) if arm.name in chosen]
        self.answers: dict[tuple[Any, ...], dict[str, Any]] = {}  # by kernel, of all waves
        self.known: dict[str, Any] = read(file)  # what earlier processes left
        self.lost = {(x["arm"], x["name"]): x["reason"] for x in self.known["losts"]}  # took the device along
        self.begun = ""  # the row that was begun last
        self.longest = 2.0  # seconds of a row so far
        self.sensors = gpu_machine.Sensors.of(device)
        device.while_busy = self.sensors.read

    def say(self, kind: str, **item: Any) -> None:
        """One line, on disk before this returns to measuring."""
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"kind": kind, **item}) + "\n")

    @property
    def left(self) -> float:
        return self.options.until - _RESERVE - time.time()

    def run(self) -> None:
        done = {row["name"] for row in self.known["rows"]}
        cases = [c for c in _chosen(self.options) if c.name not in done]
        if self.device.is_cuda:
            torch.cuda.set_device(self.options.device)
        machine = gpu_machine.facts(self.device)
        machine["commit"] = self.options.commit or machine["commit"]
        self.say(
            "run", machine=machine, ceilings=self._ceilings(), sensors=self.sensors.taken(),
            command=_command(), titles={arm.name: arm.title for arm in self.arms},
        )  # fmt: skip
        for tier in sorted({case.tier for case in cases}):
            wave = []
            for case in (c for c in cases if c.tier == tier):
                if self.known["begun"][case.name] < _ATTEMPTS:
                    wave.append(case)
                else:
                    self.say(**left_out(case, f"the process ended {_ATTEMPTS} times during this row"))
            self._try(wave)
            for case in wave:
                if self.left < self.longest:
                    self.say("note", text=f"out of time before {case.name}")
                    return
                self._row(case)
        self.say("end", ceilings=self._ceilings())

    def _ceilings(self) -> dict[str, float]:
        return ceilings(self.device.name, lambda call, repeats: self.device.seconds([call], repeats))

    def _try(self, wave: Sequence[GpuCase]) -> None:
        tasks: dict[tuple[Any, ...], Task] = {}
        for task in (Task(arm, case) for case in wave for arm in applicable(self.arms, case)):
            kernel, at = kernel_of(task), (task.arm.name, task.case.name)
            if at in self.known["tried"]:
                self.answers.setdefault(kernel, self.known["tried"][at])
            elif task.arm.tried and kernel not in self.answers:
                tasks.setdefault(kernel, task)
        if not tasks or not self.options.workers:
            return
        # Peers that compile once per kernel take longest; ours come next, in the order of the rows.
        ordered = sorted(
            tasks.values(), key=lambda t: (t.arm.tried != "kernel", not t.arm.name.startswith(OURS))
        )
        self.children.tried(ordered, self._heard, until=time.monotonic() + _WAVE * max(self.left, 0.0))

    def _heard(self, task: Task, answer: dict[str, Any]) -> None:
        self.answers[kernel_of(task)] = answer
        self.say("tried", arm=task.arm.name, name=task.case.name, answer=answer)

    def _row(self, case: GpuCase) -> None:
        excused = {arm.name: reason for arm in self.arms if (reason := self._reason(arm, case))}
        self.begun = case.name
        self.say("begin", name=case.name)
        began, rounds = time.monotonic(), self.options.rounds
        row = measure(case, self.arms, self.device, rounds=rounds, sensors=self.sensors, excused=excused)
        self.say(**row)
        self.longest = max(self.longest, time.monotonic() - began)
        print(gpu_page.line(row), flush=True)

    def _reason(self, arm: GpuArm, case: GpuCase) -> str:
        """Why an arm is not to be started; empty if it is."""
        if (arm.name, case.name) in self.lost:
            return self.lost[arm.name, case.name]
        if not arm.tried or not self.options.workers:
            return ""
        answer = self.answers.get(kernel_of(Task(arm, case)))
        if answer is None:
            return "no time to try it first"
        crowded = str(answer.get("reason", "")).startswith("OutOfMemoryError")  # several are tried at once
        return "" if crowded else verdict(case, arm, answer)


if __name__ == "__main__":
    sys.exit(main())
