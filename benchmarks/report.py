"""Runs the chosen rows and prints them, as tables for people; the same as one JSON document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import children
from benchmarks.calls import TOTAL, stages
from benchmarks.cases import DECODE, PEER_SUITE, Case
from benchmarks.decode import problems as decode
from benchmarks.page import by_section
from benchmarks.suite import measure
from benchmarks.tables import absences, notes, plain_table, row, section, table
from polyflash.bench.command import SCHEMA
from polyflash.bench.peak import Calibration
from polyflash.bench.race import GpuCalibration
from polyflash.bench.suite import MARKS
from polyflash.bench.timing import QUIET
from polyflash.target import Target

CALLS_SCHEMA = "polyflash.calls/1"


def print_machine(console: Console, about: dict[str, Any], here: Target) -> None:
    """The head of a measurement: what runs against what, and the scale of its figures."""
    if "gpu" in about:
        found = about["ceilings"]
        console.print(
            f"polyflash {about['polyflash']} against torch SDPA {about['torch']} on {about['gpu']}"
            f" ({about['target']}), driver {about['driver']}, CUDA {about['cuda']}\n"
            f"  product of bfloat16: {found['matmul_tflops']:.0f} TFLOP/s; copy:"
            f" {found['copy_gbs']:.0f} GB/s\n"
        )
        return
    console.print(
        f"polyflash {about['polyflash']} against torch SDPA {about['torch']} on {about['cpu']}"
        f" ({'+'.join((here.name, *about['features']))}), {about['threads']} threads"
    )
    for p in about["peaks"]:
        away = p["gflops_together"] < QUIET * p["gflops_per_thread"] * p["cores"]
        console.print(
            f"  {p['kind']} peak: {p['gflops_per_thread']:.0f} GFLOP/s per thread,"
            f" {p['gflops_together']:.0f} measured on {p['threads']} (×{p['scaling']:.2f}"
            f"{': cores are away' if away else ''})"
        )
    if not about["peaks"]:
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
        console.print(MARKS["contended"], style="dim")
    return {
        "schema": CALLS_SCHEMA,
        "contended": rounds.contended,
        "rounds": len(rounds.rounds),
        "stages": [{"name": s.name, "microseconds": s.microseconds, "budget": s.budget} for s in made],
    }
