"""`polyflash bench`: its arguments and what it does with them."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from polyflash import target


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    """Adds the command to the subparsers `commands`."""
    bench = commands.add_parser(
        "bench", parents=parents, help="this machine against torch SDPA", description=run.__doc__
    )
    bench.add_argument("--rows", default="", metavar="NAME,NAME", help="these rows alone")
    bench.add_argument(
        "--filter",
        nargs="+",
        default=[],
        metavar="WORD",
        help="rows whose name has every word: causal bfloat16 d64",
    )
    bench.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    size = bench.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="short rows, short times")
    size.add_argument("--long", action="store_true", help="8192 keys too: some 10 minutes")
    bench.add_argument("--calls", action="store_true", help="where the time of one tiny call goes")
    bench.add_argument("--seconds", type=_seconds, help="per row; 2, or 0.5 with --quick")
    bench.add_argument("--json", metavar="FILE", help="write every round to FILE")
    bench.set_defaults(command=run)


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """This machine against torch SDPA."""
    from polyflash.bench import calibrate, kind_of, report, suite

    chosen = suite.selected(
        suite.rows(long=options.long, quick=options.quick), names=options.rows, words=" ".join(options.filter)
    )
    if options.list:
        print("\n".join(w.name for w in chosen))
        return 0
    device = target.detect("cpu")
    calibration = calibrate(device)
    if calibration and not options.calls:
        for kind in dict.fromkeys(kind_of(w.dtype, device) for w in chosen):
            calibration.peak(kind)
    peaks = calibration.measured if calibration else ()
    if not options.quiet:
        report.print_machine(out, device, peaks)
    seconds = options.seconds or (0.5 if options.quick else 2.0)
    if options.calls:
        content, wrong = report.calls(out, seconds, calibration), False
    else:
        results = report.measured(out, chosen, seconds, calibration, quiet=options.quiet)
        content, wrong = report.document(results), any("mismatch" in r.marks for r in results)
    if options.json:
        content["machine"] = report.machine(device, peaks)
        Path(options.json).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a positive number")
    return seconds
