"""`polyflash ablate`: what each named technique of a kernel is worth on this device, losses included.

Every switch is one change from the config that the row chooses. Its results are compared with those of that
config, and with the reference, before anything is timed; all arms then take turns."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyflash.bench.command import laboratory, needs_laboratory, target_of
from polyflash.bench.timing import compared
from polyflash.compare import finite, worst_row
from polyflash.errors import spec_error
from polyflash.spec import Phase
from polyflash.tuning.command import device_of, problems, switches_of_problems
from polyflash.tuning.trial import OFF_ROW, Trial, attempt, trial
from polyflash.workloads import Workload

CHOSEN = "as chosen"
SCHEMA = "polyflash.ablation/1"


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """One named switch of a kernel at a time against the config it chooses: outputs compared, calls timed in
    turns. Returns 1 if a switch changed a result by more than rounding."""
    chosen = problems(options)
    if options.list:
        print("\n".join(w.name for w in chosen))
        return 0
    device = device_of(options)
    rows: list[dict[str, Any]] = []
    try:
        for trial in _trials(options, chosen, device):
            rows.append(measured(trial, device, options.seconds, options.switch))
            if not options.quiet:
                out.print(_table(rows[-1]), "")
    except (KeyboardInterrupt, BrokenPipeError) as stop:
        kept = options.json if options.json and rows else "no file"
        raise type(stop)(f": {len(rows)} problems were measured and are in {kept}") from None
    finally:
        content = {"schema": SCHEMA, "target": target_of(device).name, "rows": rows}
        if options.json and rows:
            text = json.dumps(content, indent=1, allow_nan=False) + "\n"
            Path(options.json).write_text(text, encoding="utf-8")
    if options.page:
        Path(options.page).write_text(markdown(content), encoding="utf-8")
    return 1 if any("differs" in s["mark"] for row in rows for s in row["switches"]) else 0


def _trials(options: argparse.Namespace, chosen: Sequence[Workload], device: str) -> Iterator[Any]:
    """The problems as `Trial`s, or as those of `benchmarks/group_trial.py`; a name of no switch is refused
    before anything runs."""
    known = {"fused_groups"} if options.groups else switches_of_problems(chosen, options, device)
    if unknown := [name for name in options.switch if name not in known]:
        names = sorted({name.partition("=")[0] for name in known})
        wanted = f"some of {', '.join(names) or 'no switch: these kernels have none'}"
        change = "A value may be named too, as ablate prints it."
        raise spec_error("switch", ", ".join(unknown), wanted, change)
    groups: Any = laboratory("group_trial") if options.groups else None
    if options.groups and groups is None:
        raise needs_laboratory("--groups")
    if options.groups and options.phase != ["forward"]:
        raise spec_error("phase", ",".join(options.phase), "forward beside --groups", "Leave --phase out.")
    for count in options.groups:
        for workload in chosen:
            yield groups.group_trial(workload, count, options.backend or "", device=device)
    for phase in () if options.groups else options.phase:
        for workload in chosen:
            yield trial(workload, Phase(phase), options.backend or "", device=device)


def measured(trial: Trial, device: str, seconds: float, only: Sequence[str] = ()) -> dict[str, Any]:
    """One problem's switches as plain data: time over that of the chosen config, both medians, how far the
    results are from it and from the reference; "mark" says why a switch was not timed."""
    chosen = trial.untuned
    expected = trial.run(chosen)()
    arms = {CHOSEN: trial.run(chosen)}
    switches = []
    for name, config in trial.switches().items():
        if only and not {name, name.partition("=")[0]} & {*only}:
            continue
        found: dict[str, Any] = {"name": name, "mark": "", "difference": None, "error": None, "ratio": None}
        switches.append(found)
        results, error, found["mark"] = attempt(trial, config)
        if found["mark"]:
            continue
        pairs = zip(results, expected, strict=True)
        found["difference"] = finite(max(worst_row(a, b, floor=OFF_ROW) for a, b in pairs))
        found["error"] = finite(error)
        if not error <= trial.tolerance:
            found["mark"] = "differs by more than rounding"
            continue
        arms[name] = trial.run(config)
    summaries = compared(arms, device, seconds * len(arms)).summaries()
    times = {
        name: {"median_s": x.median, "iqr_s": x.iqr, "rounds": x.rounds} for name, x in summaries.items()
    }
    for found in switches:
        if found["name"] in times:
            found |= times[found["name"]]
            found["ratio"] = found["median_s"] / times[CHOSEN]["median_s"]
    return {
        **{"problem": trial.workload.name, "row": trial.row_name, "target": trial.device.name},
        **{"config": asdict(chosen), "error": finite(trial.error(expected))},
        **{CHOSEN: times[CHOSEN], "switches": switches},
    }


_COLUMNS = ("switch", "ms", "±", "time", "difference")


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The chosen config, then switches: what helps first."""
    ordered = sorted(row["switches"], key=lambda s: (s["ratio"] is None, s["ratio"] or 0.0))
    for found in ({"name": CHOSEN, "mark": "", "difference": None, **row[CHOSEN]}, *ordered):
        x = found["difference"]
        difference = "" if x is None else "same bits" if x == 0 else f"{x:.1e}"
        if found["mark"]:
            yield found["name"], "", "", found["mark"], difference
            continue
        ms = found["median_s"] * 1e3
        shown = f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}" if ms >= 0.1 else f"{ms:.4f}"
        time = f"×{found['ratio']:.3f}" if "ratio" in found else "×1"
        yield found["name"], shown, f"{found['iqr_s'] / found['median_s']:.0%}", time, difference


def _head(row: dict[str, Any]) -> str:
    config = ", ".join(f"{name}={value}" for name, value in row["config"].items())
    return f"{row['problem']} on {row['row']}, {row['target']}: {config}"


def _table(row: dict[str, Any]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, title=escape(_head(row)), title_justify="left", title_style="bold")
    for column in _COLUMNS:
        made.add_column(column, justify="right" if column in ("ms", "±") else "left", overflow="fold")
    for cells in _lines(row):
        made.add_row(*map(escape, cells))
    return made


def markdown(content: dict[str, Any]) -> str:
    """The tables of a document as a page."""
    parts = [
        f"# Ablation on {content['target']}",
        "",
        "Time is a switch's median over that of the chosen config, in the same rounds: above 1 it costs.",
    ]
    for row in content["rows"]:
        parts += ["", f"**{row['problem']}**, `{row['row']}`", "", f"`{_head(row).partition(': ')[2]}`", ""]
        parts += [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
        parts += [f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in _lines(row)]
    return "\n".join(parts) + "\n"
