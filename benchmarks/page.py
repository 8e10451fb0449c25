"""Measurements made earlier: JSON documents joined, printed again, and written as a Markdown page."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks import tables
from benchmarks.cases import DECODE
from benchmarks.suite import Row
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
    first, *others = ({**c["machine"], "peaks": None, "ceilings": None} for c in contents)
    for other in others:
        if differing := [key for key in first if first[key] != other.get(key)]:
            got = f"files whose machines differ in {', '.join(differing)}"
            raise SpecError(f"from: got {got}, wanted one machine")
    rows = {r["name"]: r for c in contents for r in c["rows"]}
    absent = {a["name"]: a for c in contents for a in c["absent"] if a["name"] not in rows}
    commands = dict.fromkeys(command for c in contents for command in c["commands"])
    plain = {"rows": list(rows.values()), "absent": list(absent.values()), "commands": list(commands)}
    return {"schema": SCHEMA, **plain, "machine": contents[-1]["machine"]}


def print_tables(console: Console, content: dict[str, Any]) -> None:
    for title, rows in tables.by_section(content["rows"]).items():
        console.print(tables.table(rows, title), "")
    for line in (*tables.absences(content["absent"]), *tables.notes(content["rows"])):
        console.print(escape(line), style="dim")


def kept(before: str) -> str:
    """What of an older page stays: all that follows `TAIL`, which is written by hand."""
    mark, after = before.partition(TAIL)[1:]
    return f"\n{mark}{after}" if mark else ""


def markdown(content: dict[str, Any], before: str = "") -> str:
    """A page of results. `before` is the page it replaces: its title, and what follows `TAIL`, are kept."""
    machine, rows = content["machine"], content["rows"]
    first = before.partition("\n")[0]
    title = f"# {datetime.date.today().isoformat()}, {machine.get('gpu') or machine['cpu']}"
    after = [r["after_torch"] for r in rows if r["after_torch"] and r["threads"] > 1]
    lines = [first if first.startswith("# ") else title, "", *_about(content), "", _INTRO]
    if after:
        lines[-1] += (
            f"\nRight after a torch matrix product our calls take {median(after):.2f} times as long"
            f" (median over rows; {max(after):.2f} at worst)."
        )
    has_plain = any(r["plain"] and r["suite"] != DECODE for r in rows)
    if legend := tables.legend(rows, tuple(tables.COLUMNS) if has_plain else ()):
        lines += ["", *(f"- {text}" for text in legend)]
    for name, part in tables.by_section(rows).items():
        lines += ["", f"### {name}", "", *_table(part)]
    if content["absent"]:
        lines += ["", "### Not run", ""]
        lines += [f"- {tables.cell(line)}" for line in tables.absences(content["absent"])]
    return "\n".join(lines) + "\n" + kept(before)


def _about(content: dict[str, Any]) -> list[str]:
    m, target = content["machine"], "+".join((content["machine"]["target"], *content["machine"]["features"]))
    versions = [f"polyflash {m['polyflash']}", m["system"], f"Python {m['python']}", f"torch {m['torch']}"]
    packages = [f"{name} {version}" for name, version in m["packages"].items() if version]
    protocol = (
        "[measuring](../measuring.md): interleaved in one process, medians of quiet rounds, outputs checked"
    )
    about = {"machine": f"{m['cpu']}, {m['cores']} cores, {target}"}
    if "gpu" in m:
        about["machine"] = f"{m['gpu']}, {m['cores']} multiprocessors, {target}, launched by {m['cpu']}"
        versions += [f"driver {m['driver']}", f"CUDA {m['cuda']}"]
        product, copy = (m.get("ceilings", {})[name] for name in ("matmul_tflops", "copy_gbs"))
        peak = f"product of bfloat16 {product:.0f} TFLOP/s, copy {copy:.0f} GB/s"
    else:
        peaks = [f"{p['kind']} {p['gflops_per_thread']:.0f} GF/s per thread" for p in m["peaks"]]
        peaks += [f"{p['kind']} {p['gflops_together']:.0f} on {p['threads']}" for p in m["peaks"]]
        peak = ", ".join(peaks) or "none: llvmlite is not installed"
    about["software"] = ", ".join((*versions, *packages))
    about |= {} if "gpu" in m else {"threads": str(m["threads"])}
    about |= {"huge pages": m["huge_pages"]} if m.get("huge_pages") else {}
    about |= {"measured peak": peak, "commands": "; ".join(f"`{text}`" for text in content["commands"])}
    return ["| | |", "|---|---|", *tables.markdown([("", ""), *(about | {"protocol": protocol}).items()])[2:]]


def _table(rows: Sequence[Row]) -> list[str]:
    problem: tables.Cells = {
        "dtype": lambda r: r["dtype"],
        "problem": lambda r: r["kind"],
        "seqlen": lambda r: str(r["seqlen_q"]),
        "head_dim": lambda r: str(r["head_dim"]),
        "heads": lambda r: tables.heads(r).removeprefix("h"),
    }
    if rows[0]["suite"] == DECODE:
        problem = tables.PARTS[rows[0].get("part", "")].problem
    elif len({r["dtype"] for r in rows}) == 1:
        del problem["dtype"]
    cells = {**problem, **tables.columns(rows), "marks": lambda r: ", ".join(r["marks"])}
    head = [name.strip() for name in cells]
    return tables.markdown([head, *([cell(r) for cell in cells.values()] for r in rows)])
