"""What the GPU suite has measured: lines for the terminal, a Markdown page, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot, tables
from benchmarks.gpu.arms import BACKWARD, CODED, CODES, DECODE, FORWARD, GRAPH, HOST, OURS, ROWS, STEPS
from benchmarks.tables import grouped, short
from polyflash.bench.timing import median

Row = dict[str, Any]
_COLORS = ("#08306b", "#d94801", "#31a354", "#756bb1", "#e7298a", "#66a61e", "#a6761d", "#666666", "#1b9e77")
_LEGEND = (
    "FLOPs count visible pairs alone. Forward and backward in TFLOP/s, decode in GB/s of keys and values"
    " (none of them in the L2), codes in TFLOP/s of calls in a CUDA graph, the others in µs per call. *peak*:"
    " of the measured ceiling, the product's or the copy's. *×best*: the time of the quickest peer over ours;"
    " *×name* likewise. *error*: relative L2 of our slice, of codes that of each arm of ours by turns, beside"
    " values without codes. *on*: our kernel row. *MHz*, *W*: SM clock and power during the row."
)
_UNITS = {FORWARD: "TFLOP/s", BACKWARD: "TFLOP/s", CODES: "TFLOP/s", DECODE: "GB/s of keys and values"}
_OWN = (OURS, *CODED)
_CEILINGS = {part: "copy_gbs" if part == DECODE else "matmul_tflops" for part in _UNITS}


def rate(row: Row, arm: str) -> float | None:
    """TFLOP/s on visible pairs; of decode steps GB/s of keys and values; of graphs and host times µs."""
    if arm not in row["arms"]:
        return None
    part, s = row["case"]["part"], row["arms"][arm]["median_s"]
    if part in (FORWARD, BACKWARD, CODES):
        return float(row["flops"] / s / 1e12)
    return float(row["key_bytes"] / s / 1e9 if part == DECODE else s * 1e6)


def ratio(row: Row, peer: str | None) -> float | None:
    """How many times quicker we are; None without both."""
    ours, theirs = (row["arms"].get(arm, {}).get("median_s") for arm in (OURS, peer))
    return theirs / ours if ours and theirs else None


def best_peer(row: Row) -> str | None:
    """The quickest arm that is not ours."""
    others = {n: a["median_s"] for n, a in row["arms"].items() if n.partition("[")[0] not in _OWN}
    return min(others, key=others.__getitem__) if others else None


def line(row: Row) -> str:
    """One row as it is measured."""
    cells = [f"{name} {_cell(rate(row, name))}" for name in row["arms"]]
    return f"{row['name']}: " + ", ".join((*cells, *(f"{name} -" for name in row["absent"])))


def _middle(found: dict[str, float], form: str, of: str = "") -> str:
    """The median, and the lowest with its row."""
    where = min(found, key=found.__getitem__)
    return f"median {median(list(found.values())):{form}}{of}, lowest {found[where]:{form}} ({where})"


def summary(content: dict[str, Any]) -> list[str]:
    """How the rows stand to what is asked of this engine, and which of ours have no figure."""
    rows, copy, full = content["rows"], _ceiling(content, "copy_gbs"), {}
    lines = [f"{len(rows)} rows"]
    for part in (FORWARD, BACKWARD):
        for peer in ("flash", "cudnn", "tutorial", "flag", "flex"):
            found = {r["name"]: x for r in rows if r["case"]["part"] == part and (x := ratio(r, peer))}
            if found:
                ahead = (
                    f"{part}: {sum(x >= 1 for x in found.values())} of {len(found)} rows at least as quick"
                )
                lines.append(f"{ahead} as {peer}; {_middle(found, '.2f')}")
    for r in rows:
        c, x = r["case"], rate(r, OURS)
        if c["part"] == DECODE and c["batch"] * c["kv_heads"] >= 64 and c["seqlen_k"] >= 8192 and x and copy:
            full[r["name"]] = x / copy
    if full:
        of = f" of the copy's {copy:.0f} GB/s"
        lines.append(f"decode, 64 heads and 8k keys or more: {_middle(full, '.0%', of)}")
    small = [(r["name"], rate(r, OURS)) for r in rows if r["case"]["part"] in (GRAPH, HOST)]
    lines += [f"{name}: {us:.1f} µs" for name, us in small if us]
    lines += [f"{r['name']}: ours: {r['absent'][OURS]}" for r in rows if OURS in r["absent"]]
    lost = "{name}: device lost by {arm}: {reason}".format
    return lines + [lost(**{**x, "arm": x["arm"] or "whom?"}) for x in content["losts"]]


def _ceiling(content: dict[str, Any], name: str) -> float:
    """The median of all measurements of a ceiling; 0 without one."""
    found = [x["ceilings"][name] for x in (*content["runs"], *content["ends"])]
    return median(found) if found else 0.0


def write(content: dict[str, Any], file: Path) -> None:
    """The page, and beside it the pictures, if matplotlib is here. What stands in the page from its heading
    "What the tables do not show" on stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    by_part = grouped((r for r in content["rows"] if r["arms"]), lambda r: r["case"]["part"])
    drawn = {part: f"{file.stem}-{part}.png" for part in _UNITS if plot.possible() and part in by_part}
    for part, name in drawn.items():
        _draw(by_part[part], part, _UNITS[part], file.with_name(name))
    text = "\n".join(markdown(content, file.stem, [*drawn.values()]))
    file.write_text(text + "\n" + tables.kept(tables.written(file)), encoding="utf-8")


def markdown(content: dict[str, Any], title: str, pictures: Sequence[str] = ()) -> list[str]:
    run: dict[str, Any] = content["runs"][-1] if content["runs"] else {"machine": {}, "titles": {}}
    ceilings = {name: _ceiling(content, name) for name in ("matmul_tflops", "copy_gbs")}
    machine = run["machine"] | {"ceilings": ceilings}
    is_old = "target" not in machine  # files before this key have others
    facts = {n: str(x) for n, x in machine.items()} if is_old else tables.conditions(machine)
    facts |= {
        "commands": "; ".join(dict.fromkeys(f"`{r['command']}`" for r in content["runs"])),
        "protocol": "interleaved in one process, CUDA events, median of the rounds, inputs rotated, outputs"
        " checked against float64 on a slice",
    }
    lines = [f"# {title}", "", *tables.facts(facts), "", _LEGEND, ""]
    lines += [*(f"- {x}" for x in summary(content)), "", *(f"![{name}]({name})" for name in pictures)]
    for name, rows in grouped(content["rows"], lambda r: r["case"]["table"]).items():
        lines += ["", f"### {name}", "", *_table(rows, content, run["titles"])]
    absent = [(*pair, r["name"]) for r in content["rows"] for pair in r["absent"].items()]
    lines += ["", "### Without a figure", ""] if absent else []
    for (name, reason), some in grouped(absent, lambda x: x[:2]).items():  # one line per arm and reason
        where = [x[2] for x in some]
        shown = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        lines.append(f"- {name}: {reason} ({shown})".replace("|", "/"))
    return lines


def _table(rows: Sequence[Row], content: dict[str, Any], titles: dict[str, str]) -> list[str]:
    part = rows[0]["case"]["part"]
    names = dict.fromkeys(name for r in rows for name in (*r["arms"], *r["absent"]))
    peers = [n for n in names if n != OURS and any(n in r["arms"] for r in rows)]
    peak = _ceiling(content, _CEILINGS[part]) if part in _CEILINGS else 0.0
    heads = ["problem", "ours", "±", *(["peak"] if peak else []), *(titles.get(n, n) for n in peers)]
    lines = [[*heads, "×best", *(f"×{n}" for n in peers[:4]), "error", "on", "MHz", "W"]]
    order = "head_dim", "causal", "seqlen_k", "batch", "seqlen_q"
    for r in sorted(rows, key=lambda r: [r["case"][n] for n in order]):
        x, arm = rate(r, OURS), r["arms"].get(OURS)
        cells = [problem(r["case"]), _cell(x), f"{arm['iqr_s'] / arm['median_s']:.0%}" if arm else ""]
        cells += [f"{x / peak:.0%}" if x else ""] if peak else []
        cells += [_cell(rate(r, n)) for n in peers]
        cells += [_cell(ratio(r, n)) for n in (best_peer(r), *peers[:4])]
        errors = [x for n, x in r["errors"].items() if n in (_OWN if part in (CODES, STEPS) else (OURS,))]
        cells += [" · ".join(f"{x:.1e}" for x in errors), r.get("on", {}).get(OURS, "")]
        cells += [f"{r['sensors'][k]:.0f}" if k in r["sensors"] else "" for k in ("sm_mhz", "watts")]
        lines.append(cells)
    return tables.markdown(lines)


def problem(c: dict[str, Any]) -> str:
    heads = f"{c['heads']}" if c["heads"] == c["kv_heads"] else f"{c['heads']}/{c['kv_heads']}"
    kind = "" if c["part"] in (DECODE, GRAPH, STEPS) else "causal, " if c["causal"] else "full, "
    rows = "" if c["part"] != ROWS and c["seqlen_q"] in (1, c["seqlen_k"]) else f"{c['seqlen_q']}×"
    return f"{kind}{rows}{c['seqlen_k']} keys, {c['batch']}×{heads} heads, d{c['head_dim']}"


def _cell(x: float | None) -> str:
    return "" if x is None else short(x)


def _draw(rows: Sequence[Row], part: str, unit: str, file: Path) -> None:
    """One panel per table, head_dim and mask (decode: heads and batch); a line per arm over the keys."""
    fields = ("heads", "batch") if part == DECODE else ("table", "head_dim", "causal")
    of = grouped(rows, lambda r: tuple(r["case"][name] for name in fields))
    panels = sorted(key for key, some in of.items() if len(some) > 1) or [*of][:1]
    names = list(dict.fromkeys(name for r in rows for name in r["arms"]))

    def panel(axis: Any, key: tuple[Any, ...]) -> str:
        for name, color in zip(names, _COLORS, strict=False):
            points = sorted((r["case"]["seqlen_k"], x) for r in of[key] if (x := rate(r, name)) is not None)
            axis.plot(*zip(*points, strict=True) if points else ((), ()), "o-", label=name, color=color, ms=3)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, None)
        if part == DECODE:
            return f"heads {key[0]}, batch {key[1]}"
        return f"{key[0]}\nd{key[1]}, {'causal' if key[2] else 'full'}"

    plot.figure_of(panels, min(4, len(panels)), panel, file, ("keys", unit), size=8)
