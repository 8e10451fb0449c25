"""What the compiler makes of the shipped Triton kernels, against the recorded file. Needs triton, but no GPU.

    python -m benchmarks.codegen [--every] [--only GLOB]                compares, and names what differs
    python -m benchmarks.codegen --record --reason "..." [--every] [--only GLOB]

The file is tests/backends/triton/codegen.json: per Triton version and kernel what is allowed. It changes with
a reason, which is kept in it. What is not as it should be (a spill, no matrix instruction) needs an exception
there, written by hand, that says why. Exit status 1: something differs, or has no exception.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import triton

from benchmarks import ROOT
from benchmarks.codegen import compiled as codegen
from benchmarks.codegen.cases import Case, default_cases, every_case, must_be_clean

FILE = ROOT / "tests" / "backends" / "triton" / "codegen.json"
PINNED = "3.6.0"  # the Triton of the tests
EXACT = ("spill_bytes", "spilled_registers", "stack_bytes", "shared_bytes")
AT_MOST = ("registers", "spilled_scalars")
TILE = ("block_m", "block_n", "num_warps", "num_stages")
SLACK = 1.1  # instructions: code may grow by a tenth
WITHOUT_PRODUCTS = frozenset(("center", "finish_dq", "merge_splits"))
ONCE = WITHOUT_PRODUCTS | {"make_dkv-2", "attend_sm90-2"}  # at head dim 128 alone: it says enough of them


def load() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def kernels(case: Case) -> Iterator[tuple[str, codegen.Report]]:
    """Compiles what the case launches; the id of its entry, and its report. A call's second launch of a
    kernel ends in -2."""
    times: Counter[str] = Counter()
    for kernel, arguments, options in case.launches():
        name = kernel.fn.__name__
        times[name] += 1
        name += f"-{times[name]}" if times[name] > 1 else ""
        if name not in ONCE or case.head_dim == 128:
            compiled = codegen.compile_for(kernel, arguments, options, case.target)
            yield f"{case.id}/{name}", codegen.report(compiled)


def faults(entry: str, found: codegen.Report, case: Case) -> dict[str, str]:
    """`codegen.faults`, less the matrix instructions of kernels that have no products."""
    fault = codegen.faults(found, case.target)
    if entry.rpartition("/")[2] in WITHOUT_PRODUCTS:
        fault.pop("matrix", None)
    return fault


def tile_of(config: Any) -> list[Any]:
    """Rows, keys, warps and stages, and how blocks are loaded if not by pointers."""
    loads = getattr(config, "loads", "pointer")
    return [*(getattr(config, name) for name in TILE), *([] if loads == "pointer" else [loads])]


def as_recorded(found: codegen.Report, case: Case, fault: Mapping[str, str]) -> dict[str, Any]:
    kept = {name: getattr(found, name) for name in (*EXACT, *AT_MOST, "instructions")}
    return {"tile": tile_of(case.config()), **kept, "matrix": sorted(found.matrix), "faults": sorted(fault)}


def exceptions(
    recorded: Mapping[str, Any], version: str, entry: str, fault: str, *, measured: bool = False
) -> list[Mapping[str, str]]:
    """Those that allow a fault with this Triton; one that names no version holds for all. measured: those
    that say what a clean kernel would cost."""
    return [
        e
        for e in recorded["exceptions"]
        if e["fault"] == fault
        and fnmatchcase(entry, e["entries"])
        and e.get("triton", version) == version
        and (not measured or e.get("measured"))
    ]


def complaints(
    recorded: Mapping[str, Any], version: str, entry: str, found: codegen.Report, case: Case
) -> list[str]:
    """How a kernel differs from what is recorded for this Triton; of one without a record, what has no
    exception."""
    fault = faults(entry, found, case)
    told = [
        f"{entry}: {text}"
        for name, text in fault.items()
        if name == "shared"
        or not exceptions(recorded, version, entry, name, measured=_must_be_measured(case, version, name))
    ]
    old = recorded["versions"].get(version, {}).get(entry)
    if old is None:
        return told
    new = as_recorded(found, case, fault)
    worse = [name for name in ("tile", "matrix", *EXACT) if new[name] != old[name]]
    worse += [name for name in AT_MOST if new[name] > old[name]]
    worse += ["instructions"] if new["instructions"] > old["instructions"] * SLACK else []
    return told + [f"{entry}: {name} {new[name]}, recorded {old[name]}" for name in worse]


def _must_be_measured(case: Case, version: str, fault: str) -> bool:
    return version == PINNED and must_be_clean(case) and fault in ("spills", "serial")


def record(
    recorded: dict[str, Any], version: str, compiled: Iterable[tuple[Case, str, codegen.Report]], reason: str
) -> list[str]:
    """Puts reports into `recorded`; returns what needs an exception that is not there."""
    entries, missing = dict(recorded["versions"].get(version, {})), []
    before = dict(entries)
    for case, entry, found in compiled:
        fault = faults(entry, found, case)
        entries[entry] = as_recorded(found, case, fault)
        missing += [f"{entry}: {fault[n]}" for n in fault if not exceptions(recorded, version, entry, n)]
    known = {case.id for case in every_case()}
    entries = {e: entries[e] for e in sorted(entries) if e.rpartition("/")[0] in known}
    if entries != before:
        recorded["versions"][version] = entries
        note = {"triton": version, "reason": reason}
        if recorded["reasons"][-1:] != [note]:
            recorded["reasons"].append(note)
    return missing


def write(recorded: Mapping[str, Any]) -> None:
    """One line per entry, so that a difference names what changed."""
    text = "{\n"
    for name in ("reasons", "exceptions"):
        lines = ",\n".join("  " + json.dumps(x) for x in recorded[name])
        text += f' "{name}": [\n{lines}\n ],\n'
    blocks = []
    for version, entries in sorted(recorded["versions"].items()):
        lines = ",\n".join(f"   {json.dumps(e)}: {json.dumps(x)}" for e, x in sorted(entries.items()))
        blocks.append(f"  {json.dumps(version)}: {{\n{lines}\n  }}")
    FILE.write_text(text + ' "versions": {\n' + ",\n".join(blocks) + "\n }\n}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--every", action="store_true", help="all kernels, not those of `make test` alone")
    add("--only", metavar="GLOB", default="*", help="cases whose id matches, such as 'backward/sm90/*'")
    add("--record", action="store_true", help="write what is found into the file")
    add("--reason", default="", help="why the file changes")
    asked = parser.parse_args()
    if asked.record and not asked.reason.strip():
        parser.error("--record needs --reason: the file changes for a reason, which it keeps")
    recorded, version, told = load(), triton.__version__, []
    compiled = []
    for case in every_case() if asked.every else default_cases():
        for entry, found in kernels(case) if fnmatchcase(case.id, asked.only) else ():
            compiled.append((case, entry, found))
            wrong = complaints(recorded, version, entry, found, case)
            told += wrong
            print(f"{'differs' if wrong else 'ok':8}{_line(entry, found)}", flush=True)
            if asked.record and len(compiled) == 20:  # what is killed half way has kept most
                record(recorded, version, compiled, asked.reason)
                write(recorded)
                compiled.clear()
    if asked.record:
        record(recorded, version, compiled, asked.reason)
        write(recorded)
        told = unexplained(recorded)
    print("\n".join(told))
    return 1 if told else 0


def unexplained(recorded: Mapping[str, Any]) -> list[str]:
    """Entries with a fault that no exception allows."""
    return [
        f"{version}: {entry}: {fault} without an exception"
        for version, entries in recorded["versions"].items()
        for entry, values in entries.items()
        for fault in values["faults"]
        if not exceptions(recorded, version, entry, fault)
    ]


def _line(entry: str, found: codegen.Report) -> str:
    spill = f"{found.spill_bytes} B spilled" if found.spills else "no spill"
    matrix = ", ".join(f"{n} {name}" for name, n in found.matrix.items())
    return f"{entry:56}{found.registers:4} registers, {spill}, {found.shared_bytes} B shared, {matrix}"


if __name__ == "__main__":
    sys.exit(main())
