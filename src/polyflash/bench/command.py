"""`polyflash bench`: the suites of the wheel, or in a checkout its laboratory, which has every suite."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import polyflash
from polyflash import target
from polyflash.bench import suite
from polyflash.bench.peak import GpuCalibration, Peak, calibrate, kind_of
from polyflash.bench.suite import MARKS, OURS, SDPA
from polyflash.errors import UnsupportedError
from polyflash.options import device_here
from polyflash.reports import columns
from polyflash.target import Target

SCHEMA = "polyflash.bench/1"


def laboratory(module: str) -> Any:
    """A module of `benchmarks/`, None outside a checkout."""
    root = Path(polyflash.__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__init__.py").exists():
        return None
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(f"benchmarks.{module}")


def needs_laboratory(what: str) -> UnsupportedError:
    """The refusal of what only a checkout has."""
    return UnsupportedError(
        f"{what}: got no laboratory here, wanted the folder benchmarks/ of polyflash's sources. Clone them"
        " and `pip install -e .` there"
    )


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """This machine against torch SDPA and, in a checkout, the other attention implementations found on it."""
    if found := laboratory("command"):
        return int(found.run(options, out, err))
    for name in ("peers", "calls", "plot", "sources", "page"):
        if getattr(options, name):
            raise needs_laboratory("--from" if name == "sources" else f"--{name}")
    if beyond := [name for name in options.suite if name not in suite.SUITES]:
        raise needs_laboratory(f"--suite {','.join(beyond)}")
    listed = [case for name in options.suite or suite.SUITES for case in suite.cases(name, options.size)]
    chosen = suite.selected(listed, names=options.rows, words=" ".join(options.filter))
    if options.list:
        print("\n".join(case.workload.name for case in chosen))
        return 0
    device = device_here(options.device)
    rows: list[dict[str, Any]] = []
    about, calibration = calibrated(device, [case.workload.dtype for case in chosen])
    try:
        if not options.quiet:
            out.print(" ".join(f"{name} {about[name]}" for name in ("polyflash", "torch", "cpu", "threads")))
        for case in chosen:
            seconds = options.seconds or (0.5 if options.size == "quick" else 2.0)
            rows.append(suite.measured(case, seconds, calibration, device))
        print(text_of(rows))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f": {len(rows)} rows were measured") from None
    finally:
        if options.json and rows:
            document = {"schema": SCHEMA, "rows": rows, "absent": [], "commands": [], "machine": about}
            Path(options.json).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", "utf-8")
    return 1 if any("mismatch" in row["marks"] for row in rows) else 0


def target_of(device: str) -> Target:
    """The target of a torch device."""
    return target.detect(torch.device(device).type, torch.device(device).index or 0)


def calibrated(device: str, dtypes: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """The conditions of a measurement, and a device's calibration for the arithmetic of these dtypes."""
    here = target_of(device)
    if device != "cpu":
        gpu = GpuCalibration(device)
        return {**machine(here, ()), **gpu.facts}, gpu
    if (cpu := calibrate(here)) is None:
        return machine(here, ()), None
    for dtype in dtypes:
        cpu.peak(kind_of(dtype, here))
    return machine(here, cpu.measured), cpu


def machine(here: Target, peaks: Sequence[Peak]) -> dict[str, Any]:
    """The conditions of a measurement: CPU, instruction set, versions, threads, peaks. No names, no paths."""
    return {
        "cpu": target.cpu_name(),
        **{"target": here.name, "features": sorted(here.features), "cores": here.cores},
        **{"threads": torch.get_num_threads(), "python": platform.python_version()},
        "system": f"{platform.system()} {platform.machine()}",
        **{"polyflash": polyflash.__version__, "torch": torch.__version__, "packages": dict(here.packages)},
        "huge_pages": huge_pages(),
        "peaks": [
            {"kind": p.kind, "gflops_per_thread": p.per_thread, "gflops_together": p.together}
            | {"threads": p.threads, "cores": p.cores, "scaling": p.scaling}
            for p in peaks
        ],
    }


def huge_pages() -> str:
    """The setting of transparent huge pages: always, madvise, never; empty if the system does not say."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """One line per case: medians in ms with their middle half, the ratio, and what to doubt it by."""
    seen = {mark for row in rows for mark in row["marks"]}
    lines = [("case", "ours ms", "±", "torch ms", "ratio", "GF/s", "peak", "scaling", "on")]
    for row in rows:
        ours, theirs = row["arms"][OURS], row["arms"][SDPA]
        sign = next((MARKS[mark][0] for mark in row["marks"]), "")
        times = f"{1e3 * ours['median_s']:.3g}", f"{ours['iqr_s'] / ours['median_s']:.0%}"
        ratio = "! —" if row["ratio"] is None else f"{sign}{row['ratio']:.2f}"
        of_peak = "" if row["of_peak"] is None else f"{row['of_peak']:.0%}"
        scaling = "" if row["scaling"] is None else f"{row['scaling']:.2f}"
        others = f"{1e3 * theirs['median_s']:.3g}", ratio, f"{row['gflops']:.0f}", of_peak, scaling
        lines.append((row["name"], *times, *others, row["backend"]))
    return "\n".join((columns(lines), *(text for mark, text in MARKS.items() if mark in seen)))
