"""Measurements made earlier: JSON documents joined, printed again, and written as a Markdown page."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks.cases import DECODE
from benchmarks.decode import tables as decode_tables
from benchmarks.tables import COLUMNS, Row, absences, columns, heads, notes, table
from polyflash.bench.command import SCHEMA
from polyflash.bench.timing import median
from polyflash.errors import SpecError

TAIL = "## What the tables do not show"  # from here on a page is written by hand and kept
_INTRO = """\
Ratio is the peer's median over ours: torch SDPA's, unless the table is named after another peer, which then
ran in a process of its own, alternating with ours. Rows marked "contended" ran while cores were away: do
not quote them. "on" is the kernel row that ran our call."""


def read(file: str) -> dict[str, Any]:
    """A document that `polyflash bench --json` wrote."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not content.get("rows"):
        raise SpecError(f"from: got {file}, wanted a file with rows from `polyflash bench --json`")
    return content


def merged(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document of several: a row measured again replaces the older one in its place, and the machine must
    be the same."""
    machines = [{**c["machine"], "peaks": None, "ceilings": None} for c in contents]
    for other in machines[1:]:
        differing = [key for key in machines[0] if machines[0][key] != other.get(key)]
        if differing:
            raise SpecError(
                f"from: got files whose machines differ in {', '.join(differing)}, wanted one machine"
            )
    rows = {r["name"]: r for c in contents for r in c["rows"]}
    absent = {a["name"]: a for c in contents for a in c["absent"] if a["name"] not in rows}
    commands = dict.fromkeys(command for c in contents for command in c["commands"])
    return {
        "schema": SCHEMA,
        "rows": list(rows.values()),
        "absent": list(absent.values()),
        "commands": list(commands),
        "machine": contents[-1]["machine"],
    }


def print_tables(console: Console, content: dict[str, Any]) -> None:
    for title, rows in by_section(content["rows"]).items():
        console.print(table(rows, title), "")
    for line in (*absences(content["absent"]), *notes(content["rows"])):
        console.print(escape(line), style="dim")


def markdown(content: dict[str, Any], before: str = "") -> str:
    """A page of results. `before` is the page it replaces: its title, and what follows `TAIL`, are kept."""
    machine, rows = content["machine"], content["rows"]
    first = before.partition("\n")[0]
    title = (
        first
        if first.startswith("# ")
        else f"# {datetime.date.today().isoformat()}, {machine.get('gpu') or machine['cpu']}"
    )
    after = [r["after_torch"] for r in rows if r["after_torch"] and r["threads"] > 1]
    lines = [title, "", *_about(content), "", _INTRO]
    if after:
        lines[-1] += (
            f"\nRight after a torch matrix product our calls take {median(after):.2f} times as long"
            f" (median over rows; {max(after):.2f} at worst)."
        )
    legend = list(COLUMNS.values()) if any(r["plain"] and r["suite"] != DECODE for r in rows) else []
    legend += decode_tables.legend(rows)
    if legend:
        lines += ["", *(f"- {text}" for text in legend)]
    for name, part in by_section(rows).items():
        lines += ["", f"### {name}", "", *_table(part)]
    if content["absent"]:
        lines += ["", "### Not run", "", *(f"- {_cell(line)}" for line in absences(content["absent"]))]
    mark, kept = before.partition(TAIL)[1:]
    return "\n".join(lines) + "\n" + (f"\n{mark}{kept}" if mark else "")


def _about(content: dict[str, Any]) -> list[str]:
    m = content["machine"]
    packages = [f"{name} {version}" for name, version in m["packages"].items() if version]
    peaks = [f"{p['kind']} {p['gflops_per_thread']:.0f} GF/s per thread" for p in m["peaks"]]
    peaks += [f"{p['kind']} {p['gflops_together']:.0f} on {p['threads']}" for p in m["peaks"]]
    target = "+".join((m["target"], *m["features"]))
    on_gpu = "gpu" in m
    found = m.get("ceilings", {})
    about = {
        "machine": f"{m['gpu']}, {m['cores']} multiprocessors, {target}, launched by {m['cpu']}"
        if on_gpu
        else f"{m['cpu']}, {m['cores']} cores, {target}",
        "software": ", ".join(
            (
                f"polyflash {m['polyflash']}",
                m["system"],
                f"Python {m['python']}",
                f"torch {m['torch']}",
                *([f"driver {m['driver']}", f"CUDA {m['cuda']}"] if on_gpu else []),
                *packages,
            )
        ),
        **({} if on_gpu else {"threads": str(m["threads"])}),
        **({"huge pages": m["huge_pages"]} if m.get("huge_pages") else {}),
        "measured peak": f"product of bfloat16 {found['matmul_tflops']:.0f} TFLOP/s, copy"
        f" {found['copy_gbs']:.0f} GB/s"
        if on_gpu
        else ", ".join(peaks) or "none: llvmlite is not installed",
        "commands": "; ".join(f"`{command}`" for command in content["commands"]),
        "protocol": "[measuring](../measuring.md): interleaved in one process, medians of quiet rounds,"
        " outputs checked",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in about.items())]


def _table(rows: Sequence[Row]) -> list[str]:
    problem = {
        "dtype": lambda r: r["dtype"],
        "problem": lambda r: r["kind"],
        "seqlen": lambda r: str(r["seqlen_q"]),
        "head_dim": lambda r: str(r["head_dim"]),
        "heads": lambda r: heads(r).removeprefix("h"),
    }
    if rows[0]["suite"] == DECODE:
        problem = decode_tables.problem(rows[0])
    elif len({r["dtype"] for r in rows}) == 1:
        del problem["dtype"]
    cells = {**problem, **columns(rows), "marks": lambda r: ", ".join(r["marks"])}
    lines = [" | ".join(name.strip() for name in cells), "|".join("---" for _ in cells)]
    lines += [" | ".join(_cell(cell(r)) for cell in cells.values()) for r in rows]
    return [f"| {lines[0]} |", f"|{lines[1]}|", *(f"| {line} |" for line in lines[2:])]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def by_section(rows: Sequence[Row]) -> dict[str, list[Row]]:
    parts: dict[str, list[Row]] = {}
    for r in rows:
        parts.setdefault(r["section"], []).append(r)
    return parts
