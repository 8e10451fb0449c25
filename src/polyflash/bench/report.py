"""The benchmark's output: one table per dtype for people, one JSON document for programs."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import polyflash
from polyflash.bench.calls import TOTAL, stages
from polyflash.bench.peak import Calibration, Peak
from polyflash.bench.suite import OURS, PEER, Result, measure
from polyflash.bench.timing import FEWEST, QUIET, Summary, median
from polyflash.target import Target
from polyflash.workloads import Workload

SCHEMA, CALLS_SCHEMA = "polyflash.bench/1", "polyflash.calls/1"
_NOTICED = 1e-3  # seconds: shorter calls stay on the caller, whom no spinning thread disturbs
_NOTES = {
    "mismatch": "! outputs differ by more than rounding: no ratio",
    "contended": f"~ contended: fewer than {FEWEST} rounds ran at {QUIET:.0%} of full speed; all count",
    "low scaling": "? low scaling: cores were away during the calls, or the work was split badly",
}


def machine(target: Target, peaks: Sequence[Peak]) -> dict[str, Any]:
    """What the figures depend on: CPU, instruction set, versions, threads, measured peaks. No names, no
    paths."""
    return {
        "cpu": cpu_model(),
        "target": target.name,
        "features": sorted(target.features),
        "cores": target.cores,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "polyflash": polyflash.__version__,
        "torch": torch.__version__,
        "packages": dict(target.packages),
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


def print_machine(console: Console, target: Target, peaks: Sequence[Peak]) -> None:
    features = "+".join(sorted(target.features))
    console.print(
        f"polyflash {polyflash.__version__} against torch SDPA {torch.__version__} on {cpu_model()}"
        f" ({target.name}{'+' + features if features else ''}), {torch.get_num_threads()} threads"
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
    chosen: Sequence[Workload],
    seconds: float,
    calibration: Calibration | None,
    *,
    quiet: bool,
) -> list[Result]:
    """Measures the rows and prints each table as soon as it is whole; progress on a terminal only."""
    results: list[Result] = []
    columns = (
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(20),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    hidden = quiet or not console.is_terminal
    # No refresh by a thread of its own: drawing during a sample would be measured.
    with Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(chosen))
        for title, group in sections(chosen).items():
            part = []
            for workload in group:
                progress.update(task, description=workload.name, refresh=True)
                part.append(measure(workload, seconds=seconds, calibration=calibration))
                progress.advance(task)
            console.print(table(part, title), "")
            results += part
    for line in notes(results):
        console.print(line, style="dim")
    return results


def sections(chosen: Sequence[Workload]) -> dict[str, list[Workload]]:
    """The rows by the table they stand in."""
    parts: dict[str, list[Workload]] = {}
    for w in chosen:
        kind = "small calls, " if w.name.startswith("small") else "windows, " if w.window else ""
        parts.setdefault(f"{kind}{w.dtype}", []).append(w)
    return parts


def table(results: Sequence[Result], title: str) -> Table:
    """One line per row: times in ms with their interquartile range, and everything needed to doubt the
    ratio."""
    made = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    threads = results[0].threads if results else 1
    made.add_column("problem", no_wrap=True)
    for name in ("ours ms", "±", "torch ms", "±", "ratio", "GF/s", "peak", f"1→{threads}"):
        made.add_column(name, justify="right", no_wrap=True)
    for r in results:
        ours, peer = r.comparison.summary(OURS), r.comparison.summary(PEER)
        made.add_row(
            _problem(r), _ms(ours), _spread(ours), _ms(peer), _spread(peer), _ratio(r), f"{r.gflops:.0f}",
            "" if r.of_peak is None else f"{r.of_peak:.0%}", "" if r.scaling is None else _short(r.scaling),
            style="dim" if "contended" in r.marks else None,
        )  # fmt: skip
    return made


def notes(results: Sequence[Result]) -> list[str]:
    """Legend of the marks that occur, and what has no column."""
    lines = [text for mark, text in _NOTES.items() if any(mark in r.marks for r in results)]
    slowed = [r.after for r in results if r.threads > 1 and r.comparison.summary(OURS).median >= _NOTICED]
    if slowed:
        typical, worst = median(slowed), max(slowed)
        lines.append(f"right after a torch operation: {typical:.2f} of our time here, {worst:.2f} at worst")
    for r in results:
        if "mismatch" in r.marks:
            lines.append(
                f"{r.workload.name}: worst row differs by {r.difference:.1e} from torch's,"
                f" by {r.ours.relative:.1e} from float64"
            )
        if r.whole is not None:
            lines.append(f"{r.workload.name}: {r.whole:.1f} times quicker than without the window")
        if r.backend != "cpu":
            lines.append(f"{r.workload.name}: ran on the {r.backend} row")
    return lines


def document(results: Sequence[Result]) -> dict[str, Any]:
    """The whole measurement as plain data; every round is in it, so that medians can be made again."""
    return {"schema": SCHEMA, "rows": [_row(r) for r in results]}


def calls(console: Console, seconds: float, calibration: Calibration | None) -> dict[str, Any]:
    """Measures and prints the stages of one tiny call; the same as plain data."""
    made, rounds = stages(seconds=seconds, speed=calibration.speed if calibration else None)
    shown = _plain_table("S = 16, one head, no gradient")
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
        console.print(_NOTES["contended"], style="dim")
    return {
        "schema": CALLS_SCHEMA,
        "contended": rounds.contended,
        "rounds": len(rounds.rounds),
        "stages": [{"name": s.name, "microseconds": s.microseconds, "budget": s.budget} for s in made],
    }


def _row(r: Result) -> dict[str, Any]:
    w = r.workload
    arms = {name: r.comparison.summary(name) for name in r.comparison.rounds[0].seconds}
    return {
        "name": w.name,
        "dtype": w.dtype,
        "batch": w.batch,
        "num_q_heads": w.heads,
        "num_kv_heads": w.kv_heads,
        "seqlen_q": w.seqlen_q,
        "seqlen_k": w.seqlen_k,
        "head_dim": w.head_dim,
        "head_dim_v": w.dim_v,
        "causal": w.causal,
        "window": w.window,
        "backend": r.backend,
        "flops": r.flops,
        "ratio": r.ratio,
        "gflops": r.gflops,
        "of_peak": r.of_peak,
        "scaling": r.scaling,
        "whole_over_window": r.whole,
        "after_torch": r.after,
        "marks": list(r.marks),
        "difference": _finite(r.difference),
        "error": {"ours": _finite(r.ours.relative), "peer": _finite(r.peer.relative), "rows": r.ours.rows},
        "arms": {
            name: {"median_s": s.median, "iqr_s": s.iqr, "rounds": s.rounds, "of": s.of}
            for name, s in arms.items()
        },
        "rounds": [{"speed": round_.speed, "seconds": round_.seconds} for round_ in r.comparison.rounds],
    }


def _plain_table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def _problem(r: Result) -> str:
    w = r.workload
    kind = "window" if w.window else "causal" if w.causal else "full"
    batch = f"{w.batch}×" if w.batch > 1 else ""
    heads = f"{batch}{w.heads}" if w.heads == w.kv_heads else f"{batch}{w.heads}/{w.kv_heads}"
    return f"{kind:<6} {w.seqlen_q:>4} d{w.head_dim:<3} h{heads}"


def _ms(s: Summary) -> str:
    ms = s.median * 1e3
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}" if ms >= 0.1 else f"{ms:.4f}"


def _spread(s: Summary) -> str:
    return f"{s.spread:.0%}" if s.spread < 10 else ">9×"


def _ratio(r: Result) -> str:
    if r.ratio is None:
        return "[bold red]! —[/]"
    mark = "~" if "contended" in r.marks else "?" if r.marks else ""
    colour = "green" if r.ratio >= 1 else "yellow"
    return f"{mark}[{colour}]{_short(r.ratio)}[/]"


def _short(x: float) -> str:
    """Three figures in four characters."""
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def _finite(x: float) -> float | None:
    return x if x < float("inf") else None
