"""`polyflash bench`: what it does with its arguments."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from polyflash import target
from polyflash.bench.command import calibrated
from polyflash.bench.peak import kind_of
from polyflash.bench.suite import selected
from polyflash.errors import SpecError
from polyflash.options import device_here


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """This machine against torch SDPA and the other attention implementations found on it."""
    from benchmarks import page

    _check_files(options)
    if options.page and options.calls:
        raise SpecError("page: got --calls, whose stages have no page. Use --json, or leave --calls out")
    if options.plot:
        from benchmarks.decode import plot

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


def _measured(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """The document of a measurement made now."""
    from benchmarks import report

    chosen = _chosen(options)
    seconds = options.seconds or (0.5 if options.size == "quick" else 2.0)
    device = device_here(options.device)
    here = target.detect(torch.device(device).type, torch.device(device).index or 0)
    kinds = [] if options.calls else [kind_of(c.workload.dtype, here) for c in chosen]
    about, calibration = calibrated(device, tuple(dict.fromkeys(kinds)))
    if not options.quiet:
        report.print_machine(out, about, here)
    if options.calls:
        content = report.calls(out, seconds, calibration)
    else:
        content = report.measured(out, chosen, seconds, calibration, quiet=options.quiet, device=device)
        content["commands"] = [_command(options)]
    return {**content, "machine": about}


def is_gpu(options: argparse.Namespace) -> bool:
    return bool(options.device) and options.device != "cpu"


def _check_files(options: argparse.Namespace) -> None:
    """Refuses before a long measurement what would lose it, and what a GPU does not measure."""
    for name in ("json", "page", "plot"):
        file = getattr(options, name)
        if file and name != "plot" and not Path(file).absolute().parent.is_dir():
            raise SpecError(f"{name}: got {file}, wanted a file in a folder that is there")
    if not is_gpu(options) or options.sources:
        return
    device_here(options.device)
    if options.calls or options.plot:
        got = "--calls" if options.calls else "--plot"
        raise SpecError(f"{got.strip('-')}: got {got} on a GPU, wanted it on a CPU. See `make bench-gpu`")


def _chosen(options: argparse.Namespace) -> Sequence[Any]:
    from benchmarks import cases

    suites = options.suite or ([cases.PEER_SUITE] if options.peers else [])
    here = [s for s in cases.SUITES if not is_gpu(options) or s not in cases.OF_CPUS]
    suites = here if "all" in suites else list(dict.fromkeys(suites))
    absent = [s for s in suites if s in cases.OF_CPUS and is_gpu(options)]
    if absent:
        wanted = f"some of {', '.join(here)}. `make bench-gpu` has decode and peers of GPUs"
        raise SpecError(f"suite: got {', '.join(absent)} on a GPU, wanted {wanted}")
    if options.peers and cases.PEER_SUITE not in suites:
        suites = [*suites, cases.PEER_SUITE]
    every = cases.rows(suites, size=options.size, peers=options.peers)
    return selected(every, names=options.rows, words=" ".join(options.filter))


def _command(options: argparse.Namespace) -> str:
    """The command that measures this again; files, which say nothing about the figures, left out."""
    words = ["polyflash bench"]
    words += [f"--device {options.device}"] if is_gpu(options) else []
    words += [f"--suite {','.join(options.suite)}"] if options.suite else []
    words += [f"--peers {','.join(options.peers)}"] if options.peers else []
    words += [f"--rows {options.rows}"] if options.rows else []
    words += [f"--filter {' '.join(options.filter)}"] if options.filter else []
    words += [f"--{options.size}"] if options.size else []
    words += [f"--seconds {options.seconds:g}"] if options.seconds else []
    return " ".join(words)
