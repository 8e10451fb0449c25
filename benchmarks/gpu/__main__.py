"""The GPU suite: polyflash and its peers on one device, in a time budget, every row kept as it is measured.

    python -m benchmarks.gpu --budget 540 --json build/gpu.jsonl --page docs/results/page.md

Rows come in waves, the most telling first. Before a wave, every kernel that is compiled here is tried in
child processes that are killed if they hang; then the arms of each row are checked again and timed by turns
in one process, which is killed and started anew if it dies or does not answer. What they answer stands in the
file of JSON lines before anything else is asked of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import arms as gpu_arms
from benchmarks.gpu import page as gpu_page
from benchmarks.gpu.arms import OURS, PARTS, GpuArm, GpuCase, applicable
from benchmarks.gpu.rows import ROUNDS, START, Children, Task, is_mismatch, left_out, measuring, verdict
from benchmarks.peers import Child

_ATTEMPTS = 2  # at a row, before it is left out
_SILENCE = 150.0  # seconds after which the measuring process is taken for hung
_WAVE = 0.4  # of the time left, at most, for the trials of a wave
_RESERVE = 12.0  # seconds kept for the last row and the page


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add, names = made.add_argument, "NAME,NAME"
    flag: Any = {"action": "store_true"}
    variant = (
        "one more arm of ours, or of int8, fp8-triton ..., fields of its configuration replaced; repeatable"
    )
    parts = f"of {', '.join(PARTS)}, all by default; or {' and '.join(gpu_arms.ASKED)}, which must be named"
    add("--json", type=Path, default=Path("build/gpu.jsonl"), metavar="FILE", help="rows, one JSON line each")
    add("--page", type=Path, metavar="FILE", help="write the tables as Markdown, and pictures beside them")
    add("--budget", type=float, default=540.0, metavar="SECONDS", help="of wall time; 540")
    add("--device", default="cuda", help="cuda, cuda:1, or cpu to try the suite itself")
    add("--backend", default="triton", help="of ours, or free; triton")
    add("--arms", default=",".join(gpu_arms.DEFAULT), help="who is timed", metavar=names)
    add("--variant", action="append", default=[], metavar="[ARM:]FIELD=VALUE,...", help=variant)
    add("--parts", default="", help=parts, metavar=names)
    add("--filter", nargs="+", default=[], metavar="WORD", help="rows with every word: causal d128")
    add("--tiny", help="a few small rows, whose figures mean nothing", **flag)
    add("--rounds", type=int, default=ROUNDS, help=f"per row; {ROUNDS}")
    add("--workers", type=int, default=6, help="child processes that try kernels; 0: try none")
    add("--resume", help="keep the rows that FILE has, measure the others", **flag)
    add("--commit", default="", help="of the sources, where git cannot say")
    add("--list", help="print the names of the rows and stop", **flag)
    add("--page-only", help="measure nothing: the page of what the file has", **flag)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite. Returns 1 if an output of ours was wrong or nothing was measured."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    options.device = "cuda:0" if options.device == "cuda" else options.device
    if options.list:
        print("\n".join(f"{case.tier} {case.name}" for case in _chosen(options)))
        return 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    if not options.page_only:
        if not options.resume:
            options.json.unlink(missing_ok=True)
        if options.device != "cpu" and not torch.cuda.is_available():
            print(f"no CUDA device that torch {torch.__version__} can use", file=sys.stderr)
        else:
            suite = _Suite(options, shlex.join(["python", "-m", "benchmarks.gpu", *words]))
            try:
                with contextlib.suppress(KeyboardInterrupt):  # what is measured is in the file
                    suite.run()
            finally:
                suite.close()
    content = read(options.json)
    if options.page:
        gpu_page.write(content, options.page)
    print("\n".join(gpu_page.summary(content)))
    return 1 if not content["rows"] or any(map(is_mismatch, content["rows"])) else 0


def _chosen(options: argparse.Namespace) -> list[GpuCase]:
    every = gpu_arms.tiny() if options.tiny else gpu_arms.rows()
    parts = [name for name in options.parts.split(",") if name]
    return gpu_arms.selected(every, words=options.filter, parts=parts)


def read(file: Path) -> dict[str, Any]:
    """The lines of a file: `runs`, `rows` (a later one in the place of an earlier of its name), answers of
    children by the names of arm and row (`tried`), `ends` and `losts`. A line that was cut off is dropped."""
    found: dict[str, Any] = {"runs": [], "tried": {}, "ends": [], "losts": []}
    rows: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        item: dict[str, Any] = {"kind": ""}
        with suppress(json.JSONDecodeError):
            item = json.loads(line)
        match item["kind"]:
            case "row":
                rows[item["name"]] = item
            case "tried":
                found["tried"][item["arm"], item["name"]] = item["answer"]
            case "run" | "end" | "lost" as kind:
                found[f"{kind}s"].append(item)
    return found | {"rows": list(rows.values())}


class _Suite:
    """The state of a run; nothing of it touches the device itself."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options, self.command = options, command
        self.until = time.monotonic() + options.budget
        self.settings = options.device, options.backend, options.variant, gpu_arms.KERNELS
        self.children = Children(options.workers, self.settings)
        self.measuring: Child | None = None
        every, names = gpu_arms.arms(options.backend, options.variant), options.arms.split(",")
        self.arms = [arm for arm in every if arm.name in names or arm.name.endswith("]")]
        self.answers: dict[tuple[Any, ...], dict[str, Any]] = {}  # by kernel, of all waves
        self.known = read(options.json)  # what earlier runs left
        self.lost = {(x["arm"], x["name"]): x["reason"] for x in self.known["losts"]}  # took the device along
        self.longest = 2.0  # seconds of a row so far

    def close(self) -> None:
        self.children.close()
        if self.measuring:
            self.measuring.end()

    def say(self, kind: str, **item: Any) -> None:
        """One line, on disk before anything else is asked of the device."""
        with self.options.json.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"kind": kind, **item}) + "\n")

    @property
    def left(self) -> float:
        return self.until - _RESERVE - time.monotonic()

    def run(self) -> None:
        done = {row["name"] for row in self.known["rows"]}
        cases = [c for c in _chosen(self.options) if c.name not in done]
        for tier in sorted({case.tier for case in cases}):
            wave = [case for case in cases if case.tier == tier]
            self._try(wave)
            for case in wave:
                if self.left < self.longest:
                    self.say("note", text=f"out of time before {case.name}")
                    return
                began, row = time.monotonic(), self._row(case)
                self.say(**row)
                self.longest = max(self.longest, time.monotonic() - began)
                print(gpu_page.line(row), flush=True)
        if self.measuring and self.measuring.alive:
            self.say("end", ceilings=self.measuring.ask(None, _SILENCE).get("ceilings", {}))

    def _try(self, wave: Sequence[GpuCase]) -> None:
        tasks: dict[tuple[Any, ...], Task] = {}
        for task in (Task(arm, case) for case in wave for arm in applicable(self.arms, case)):
            at = task.arm.name, task.case.name
            if at in self.known["tried"]:
                self.answers.setdefault(task.kernel, self.known["tried"][at])
            elif task.arm.tried and task.kernel not in self.answers:
                tasks.setdefault(task.kernel, task)
        if not tasks or not self.options.workers:
            return
        # Peers that compile once per kernel take longest; ours come next, in the order of the rows.
        ordered = sorted(
            tasks.values(), key=lambda t: (t.arm.tried != "kernel", not t.arm.name.startswith(OURS))
        )
        self.children.tried(ordered, self._heard, until=time.monotonic() + _WAVE * max(self.left, 0.0))

    def _heard(self, task: Task, answer: dict[str, Any]) -> None:
        self.answers[task.kernel] = answer
        self.say("tried", arm=task.arm.name, name=task.case.name, answer=answer)

    def _row(self, case: GpuCase) -> dict[str, Any]:
        """By the measuring process, as often as it may die or hang at it; else left out."""
        names = [arm.name for arm in self.arms]
        for _ in range(_ATTEMPTS):
            if self.measuring is None or not self.measuring.alive:
                self.measuring = Child(measuring, (*self.settings, names, self.options.rounds), START)
                about = self.measuring.ask(None, _SILENCE)
                if "machine" in about:
                    about["machine"]["commit"] = self.options.commit or about["machine"]["commit"]
                    titles = {arm.name: arm.title for arm in self.arms}
                    self.say("run", **about, command=self.command, titles=titles)
            excused = {arm.name: reason for arm in self.arms if (reason := self._reason(arm, case))}
            answer = self.measuring.ask((case, excused), min(_SILENCE, max(self.left, 0.0) + _RESERVE))
            if "row" in answer:
                return dict(answer["row"])
            lost = {"arm": answer.get("arm", ""), "name": case.name, "reason": answer["reason"]}
            self.lost[lost["arm"], case.name] = lost["reason"]
            self.say("lost", **lost)
        return left_out(case, f"the process ended {_ATTEMPTS} times during this row")

    def _reason(self, arm: GpuArm, case: GpuCase) -> str:
        """Why an arm is not to be started; empty if it is."""
        if (arm.name, case.name) in self.lost:
            return str(self.lost[arm.name, case.name])
        if not arm.tried or not self.options.workers:
            return ""
        answer = self.answers.get(Task(arm, case).kernel)
        if answer is None:
            return "no time to try it first"
        crowded = str(answer.get("reason", "")).startswith("OutOfMemoryError")  # several are tried at once
        return "" if crowded else verdict(case, arm, answer)


if __name__ == "__main__":
    sys.exit(main())
