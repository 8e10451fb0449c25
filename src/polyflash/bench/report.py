"""Runs the chosen rows and prints them, as tables for people; the same as one JSON document for programs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import polyflash
from polyflash import target
from polyflash.bench import children, decode, gpu_machine
from polyflash.bench.calls import TOTAL, stages
from polyflash.bench.cases import DECODE, PEER_SUITE, Case
from polyflash.bench.page import SCHEMA, by_section
from polyflash.bench.peak import Calibration, Peak
from polyflash.bench.stream import huge_pages
from polyflash.bench.suite import measure
from polyflash.bench.tables import NOTES, absences, notes, plain_table, row, section, table
from polyflash.bench.timing import QUIET
from polyflash.target import Target

if TYPE_CHECKING:
    from polyflash.bench.gpu_machine import GpuCalibration

CALLS_SCHEMA = "polyflash.calls/1"


def machine(here: Target, peaks: Sequence[Peak]) -> dict[str, Any]:
    """What the figures depend on: CPU, instruction set, versions, threads, measured peaks. No names, no
    paths."""
    return {
        "cpu": cpu_model(),
        "target": here.name,
        "features": sorted(here.features),
        "cores": here.cores,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "polyflash": polyflash.__version__,
        "torch": torch.__version__,
        "packages": dict(here.packages),
        "huge_pages": huge_pages(),
        "peaks": [
            {
                "kind": p.kind,
                "gflops_per_thread": p.per_thread,
                "gflops_together": p.together,
                "threads": p.threads,
                "cores": p.cores,
                "scaling": p.scaling,
            }
            for p in peaks
        ],
    }


def gpu(device: str, calibration: GpuCalibration) -> dict[str, Any]:
    """`machine` of a GPU, and its ceilings; "cpu" is the one that launches."""
    here = target.detect(torch.device(device).type, torch.device(device).index or 0)
    facts = gpu_machine.facts(gpu_machine.Device(device))
    about = {"gpu": facts["device"], "driver": facts.get("driver"), "cuda": facts.get("cuda")}
    return {**machine(here, ()), **about, "ceilings": calibration.ceilings}


def print_gpu(console: Console, about: dict[str, Any]) -> None:
    found = about["ceilings"]
    console.print(
        f"polyflash {about['polyflash']} against torch SDPA {about['torch']} on {about['gpu']}"
        f" ({about['target']}), driver {about['driver']}, CUDA {about['cuda']}\n"
        f"  product of bfloat16: {found['matmul_tflops']:.0f} TFLOP/s; copy: {found['copy_gbs']:.0f} GB/s\n"
    )


def cpu_model() -> str:
    """The CPU's own name for itself, as far as the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def print_machine(console: Console, here: Target, peaks: Sequence[Peak]) -> None:
    features = "+".join(sorted(here.features))
    console.print(
        f"polyflash {polyflash.__version__} against torch SDPA {torch.__version__} on {cpu_model()}"
        f" ({here.name}{'+' + features if features else ''}), {torch.get_num_threads()} threads"
    )
    for p in peaks:
        console.print(
            f"  {p.kind} peak: {p.per_thread:.0f} GFLOP/s per thread,"
            f" {p.together:.0f} measured on {p.threads} (×{p.scaling:.2f}"
            f"{': cores are away' if p.together < QUIET * p.total else ''})"
        )
    if not peaks:
        console.print("  peak: not measured, as llvmlite is not installed; contended windows go unmarked")
    console.print()


def measured(
    console: Console,
    chosen: Sequence[Case],
    seconds: float,
    calibration: Calibration | GpuCalibration | None,
    *,
    quiet: bool,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measures the rows and prints each table as soon as it is whole; progress on a terminal only. Returns
    the document: every row, and every row that a peer has not, with its reason; "stopped" is what ended it
    early: Ctrl-C, or a reader that left."""
    rows: list[dict[str, Any]] = []
    absent: list[dict[str, Any]] = []
    columns = (
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(20),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    hidden = quiet or not console.is_terminal
    # No refresh by a thread of its own: drawing during a sample would be measured.
    printed = 0
    stopped: type[BaseException] | None = None
    progress = Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False)
    try:
        progress.start()
        task = progress.add_task("", total=len(chosen))
        for title, cases in sections(chosen).items():
            had = len(rows), len(absent)
            progress.update(task, description=title, refresh=True)
            for answer in _answers(cases, seconds, calibration, device):
                if "row" in answer:
                    rows.append({"section": title, **answer["row"]})
                else:
                    absent.append({"section": title, **answer})
                progress.update(task, advance=1, refresh=True)
            printed = len(rows)
            if rows[had[0] :]:
                console.print(table(rows[had[0] :], title), "")
            for line in absences(absent[had[1] :]):
                console.print(escape(line), "", style="dim")
        progress.stop()
        for line in notes(rows):
            console.print(escape(line), style="dim")
    except (KeyboardInterrupt, BrokenPipeError) as stop:
        stopped = type(stop)
        if stopped is KeyboardInterrupt:
            progress.stop()
            for title, part in by_section(rows[printed:]).items():
                console.print(table(part, title), "")
    return {"schema": SCHEMA, "rows": rows, "absent": absent, **({"stopped": stopped} if stopped else {})}


def _answers(
    cases: Sequence[Case], seconds: float, calibration: Any, device: str
) -> Iterator[dict[str, Any]]:
    """Of one section, whose rows have one peer: in this process, or in the peer's own."""
    if cases[0].suite == PEER_SUITE:
        yield from children.answers(cases[0].peer, cases, seconds=seconds)
        return
    measured_by = decode.measure if cases[0].suite == DECODE else partial(measure, device=device)
    for case in cases:
        yield {"row": row(measured_by(case, seconds=seconds, calibration=calibration))}


def sections(chosen: Sequence[Case]) -> dict[str, list[Case]]:
    """The rows by the table they stand in."""
    parts: dict[str, list[Case]] = {}
    for case in chosen:
        parts.setdefault(section(case), []).append(case)
    return parts


def calls(console: Console, seconds: float, calibration: Calibration | None) -> dict[str, Any]:
    """Measures and prints the stages of one tiny call; the same as plain data."""
    made, rounds = stages(seconds=seconds, speed=calibration.speed if calibration else None)
    shown = plain_table("S = 16, one head, no gradient")
    shown.add_column("stage", no_wrap=True)
    for name in ("µs", "budget"):
        shown.add_column(name, justify="right", no_wrap=True)
    for stage in made:
        over = stage.budget is not None and stage.microseconds > stage.budget
        us = f"{stage.microseconds:.1f}"
        shown.add_row(
            stage.name,
            f"[yellow]{us}[/]" if over else us,
            "" if stage.budget is None else f"{stage.budget:.0f}",
            style="bold" if stage.name == TOTAL else None,
        )
    console.print(shown, "")
    if rounds.contended:
        console.print(NOTES["contended"], style="dim")
    return {
        "schema": CALLS_SCHEMA,
        "contended": rounds.contended,
        "rounds": len(rounds.rounds),
        "stages": [{"name": s.name, "microseconds": s.microseconds, "budget": s.budget} for s in made],
    }
