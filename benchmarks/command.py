"""`polyflash bench`: runs the chosen rows and prints them, as tables for people, as one JSON document for
programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import cases, child, page, plot, tables
from benchmarks.calls import TOTAL, stages
from benchmarks.cases import Case
from benchmarks.suite import Row, measure
from polyflash.bench.command import SCHEMA, calibrated
from polyflash.bench.peak import Calibration
from polyflash.bench.suite import MARKS, selected
from polyflash.bench.timing import QUIET
from polyflash.errors import SpecError
from polyflash.options import device_here

CALLS_SCHEMA = "polyflash.calls/1"


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """This machine against torch SDPA and the other attention implementations found on it."""
    _check(options)
    if options.sources:
        content = page.merged([page.read(file) for file in options.sources])
        if options.list:
            print("\n".join(r["name"] for r in content["rows"] if r["marks"]))
            return 0
        if not options.quiet:
            page.print_tables(out, content)
    elif options.list:
        print("\n".join(case.name for case in _chosen(options)))
        return 0
    else:
        content = _measured(options, out)
    stopped = content.pop("stopped", None)
    if options.json and (content.get("rows") or not stopped):
        Path(options.json).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if stopped:
        kept = options.json if options.json and content["rows"] else "no file"
        raise stopped(f": {len(content['rows'])} rows were measured and are in {kept}")
    if options.page:
        file = Path(options.page)
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        file.write_text(page.markdown(content, before), encoding="utf-8")
    if options.plot:
        plot.draw(content, options.plot)
    return 1 if any("mismatch" in r["marks"] for r in content.get("rows", ())) else 0


def is_gpu(options: argparse.Namespace) -> bool:
    return bool(options.device) and options.device != "cpu"


def _check(options: argparse.Namespace) -> None:
    """Refuses before a long measurement what would lose it, and what a GPU does not measure."""
    if is_gpu(options) and not options.sources:
        device_here(options.device)
        if options.calls or options.plot:
            name = "calls" if options.calls else "plot"
            raise SpecError(f"{name}: got --{name} on a GPU, wanted it on a CPU. See `make bench-gpu`")
    if options.page and options.calls:
        raise SpecError("page: got --calls, whose stages have no page. Use --json, or leave --calls out")
    if options.plot:
        plot.check_possible(None if options.sources else () if options.calls else _chosen(options))


def _chosen(options: argparse.Namespace) -> Sequence[Case]:
    suites = options.suite or ([cases.PEER_SUITE] if options.peers else [])
    here = [s for s in cases.SUITES if not is_gpu(options) or s not in cases.OF_CPUS]
    suites = here if "all" in suites else list(dict.fromkeys(suites))
    if absent := [s for s in suites if s in cases.OF_CPUS and is_gpu(options)]:
        wanted = f"some of {', '.join(here)}. `make bench-gpu` has decode and peers of GPUs"
        raise SpecError(f"suite: got {', '.join(absent)} on a GPU, wanted {wanted}")
    if options.peers and cases.PEER_SUITE not in suites:
        suites = [*suites, cases.PEER_SUITE]
    every = cases.rows(suites, size=options.size, peers=options.peers)
    return selected(every, names=options.rows, words=" ".join(options.filter))


def _command(options: argparse.Namespace) -> str:
    """The command that measures this again; files, which say nothing about the figures, left out."""
    words = {
        f"--device {options.device}": is_gpu(options),
        f"--suite {','.join(options.suite)}": options.suite,
        f"--peers {','.join(options.peers)}": options.peers,
        f"--rows {options.rows}": options.rows,
        f"--filter {' '.join(options.filter)}": options.filter,
        f"--{options.size}": options.size,
        f"--seconds {options.seconds or 0:g}": options.seconds,
    }
    return " ".join(("polyflash bench", *(text for text, given in words.items() if given)))


def _measured(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """The document of a measurement made now."""
    chosen = _chosen(options)
    seconds = options.seconds or (0.5 if options.size == "quick" else 2.0)
    device = device_here(options.device)
    about, calibration = calibrated(device, [] if options.calls else [c.workload.dtype for c in chosen])
    if not options.quiet:
        _print_machine(out, about)
    if options.calls:
        return {**calls(out, seconds, calibration), "machine": about}
    content = _rows(out, chosen, seconds, calibration, device, options.quiet)
    return {**content, "commands": [_command(options)], "machine": about}


def _print_machine(console: Console, about: dict[str, Any]) -> None:
    """The head of a measurement: what runs against what, and the scale of its figures."""
    head = f"polyflash {about['polyflash']} against torch SDPA {about['torch']} on"
    if "gpu" in about:
        product, copy = (about["ceilings"][name] for name in ("matmul_tflops", "copy_gbs"))
        console.print(
            f"{head} {about['gpu']} ({about['target']}), driver {about['driver']}, CUDA {about['cuda']}\n"
            f"  product of bfloat16: {product:.0f} TFLOP/s; copy: {copy:.0f} GB/s\n"
        )
        return
    features = "+".join((about["target"], *about["features"]))
    console.print(f"{head} {about['cpu']} ({features}), {about['threads']} threads")
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


def _rows(
    console: Console, chosen: Sequence[Case], seconds: float, calibration: Any, device: str, quiet: bool
) -> dict[str, Any]:
    """Measures the rows and prints each table as soon as it is whole; progress on a terminal only. Returns
    every row, and every row that a peer has not, with its reason; "stopped" is what ended it early: Ctrl-C,
    or a reader that left."""
    rows: list[Row] = []
    absent: list[Row] = []
    made: dict[str, Any] = {"schema": SCHEMA, "rows": rows, "absent": absent}
    bars = (
        TextColumn("{task.completed}/{task.total}"), BarColumn(20), TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    hidden = quiet or not console.is_terminal
    printed = 0
    # No refresh by a thread of its own: drawing during a sample would be measured.
    progress = Progress(*bars, console=console, transient=True, disable=hidden, auto_refresh=False)
    try:
        progress.start()
        task = progress.add_task("", total=len(chosen))
        for title, some in sections(chosen).items():
            had = len(absent)
            progress.update(task, description=title, refresh=True)
            for answer in _answers(some, seconds, calibration, device):
                if "row" in answer:
                    rows.append({"section": title, **answer["row"]})
                else:
                    absent.append({"section": title, **answer})
                progress.update(task, advance=1, refresh=True)
            new, printed = rows[printed:], len(rows)
            if new:
                console.print(tables.table(new, title), "")
            for line in tables.absences(absent[had:]):
                console.print(escape(line), "", style="dim")
        progress.stop()
        for line in tables.notes(rows):
            console.print(escape(line), style="dim")
    except (KeyboardInterrupt, BrokenPipeError) as stop:
        made["stopped"] = type(stop)
        if isinstance(stop, KeyboardInterrupt):
            progress.stop()
            for title, part in tables.by_section(rows[printed:]).items():
                console.print(tables.table(part, title), "")
    return made


def _answers(some: Sequence[Case], seconds: float, calibration: Any, device: str) -> Iterator[dict[str, Any]]:
    """Of one section, whose rows have one peer: in this process, or in the peer's own."""
    if some[0].suite == cases.PEER_SUITE:
        yield from child.answers(some[0].peer, some, seconds=seconds)
        return
    for case in some:
        yield {"row": measure(case, seconds=seconds, calibration=calibration, device=device)}


def sections(chosen: Sequence[Case]) -> dict[str, list[Case]]:
    """The rows by the table they stand in."""
    parts: dict[str, list[Case]] = {}
    for case in chosen:
        parts.setdefault(cases.section(case), []).append(case)
    return parts


def calls(console: Console, seconds: float, calibration: Calibration | None) -> dict[str, Any]:
    """Measures and prints the stages of one tiny call; the same as plain data."""
    made, rounds = stages(seconds=seconds, speed=calibration.speed if calibration else None)
    shown = tables.plain_table("S = 16, one head, no gradient")
    shown.add_column("stage", no_wrap=True)
    for name in ("µs", "budget"):
        shown.add_column(name, justify="right", no_wrap=True)
    for stage in made:
        us, budget = f"{stage.microseconds:.1f}", stage.budget
        us = f"[yellow]{us}[/]" if budget is not None and stage.microseconds > budget else us
        style = "bold" if stage.name == TOTAL else None
        shown.add_row(stage.name, us, "" if budget is None else f"{budget:.0f}", style=style)
    console.print(shown, "")
    if rounds.contended:
        console.print(MARKS["contended"], style="dim")
    return {
        "schema": CALLS_SCHEMA, "contended": rounds.contended, "rounds": len(rounds.rounds),
        "stages": [vars(stage) for stage in made],
    }  # fmt: skip
