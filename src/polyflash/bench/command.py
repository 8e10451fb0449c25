"""`polyflash bench`: what it does with its arguments."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from polyflash import target
from polyflash.errors import SpecError
from polyflash.options import device_here


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """This machine against torch SDPA and the other attention implementations found on it."""
    from polyflash.bench import page

    device_here(options.device)
    if options.page and options.calls:
        raise SpecError("page: got --calls, whose stages have no page. Use --json, or leave --calls out")
    if options.plot:
        from polyflash.bench import plot

        plot.check_possible(None if options.sources else () if options.calls else _chosen(options))
    if options.sources:
        content = page.merged([page.read(file) for file in options.sources])
        if options.list:
            print("\n".join(r["name"] for r in content["rows"] if r["marks"]))
            return 0
        if not options.quiet:
            page.print_tables(out, content)
    else:
        if options.list:
            print("\n".join(case.name for case in _chosen(options)))
            return 0
        content = _measured(options, out)
    if options.json:
        Path(options.json).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if options.page:
        file = Path(options.page)
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        file.write_text(page.markdown(content, before), encoding="utf-8")
    if options.plot:
        plot.draw(content, options.plot)
    return 1 if any("mismatch" in r["marks"] for r in content.get("rows", ())) else 0


def _measured(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """The document of a measurement made now."""
    from polyflash.bench import calibrate, kind_of, report

    chosen = _chosen(options)
    device = target.detect("cpu")
    calibration = calibrate(device)
    if calibration and not options.calls:
        for kind in dict.fromkeys(kind_of(c.workload.dtype, device) for c in chosen):
            calibration.peak(kind)
    peaks = calibration.measured if calibration else ()
    if not options.quiet:
        report.print_machine(out, device, peaks)
    seconds = options.seconds or (0.5 if options.size == "quick" else 2.0)
    if options.calls:
        content = report.calls(out, seconds, calibration)
    else:
        content = report.measured(out, chosen, seconds, calibration, quiet=options.quiet)
        content["commands"] = [_command(options)]
    return {**content, "machine": report.machine(device, peaks)}


def _chosen(options: argparse.Namespace) -> Sequence[Any]:
    from polyflash.bench import cases

    suites = options.suite or ([cases.PEER_SUITE] if options.peers else [])
    suites = cases.SUITES if "all" in suites else list(dict.fromkeys(suites))
    if options.peers and cases.PEER_SUITE not in suites:
        suites = [*suites, cases.PEER_SUITE]
    every = cases.rows(suites, size=options.size, peers=options.peers)
    return cases.selected(every, names=options.rows, words=" ".join(options.filter))


def _command(options: argparse.Namespace) -> str:
    """The command that measures this again; files, which say nothing about the figures, left out."""
    words = ["polyflash bench"]
    words += [f"--suite {','.join(options.suite)}"] if options.suite else []
    words += [f"--peers {','.join(options.peers)}"] if options.peers else []
    words += [f"--rows {options.rows}"] if options.rows else []
    words += [f"--filter {' '.join(options.filter)}"] if options.filter else []
    words += [f"--{options.size}"] if options.size else []
    words += [f"--seconds {options.seconds:g}"] if options.seconds else []
    return " ".join(words)
