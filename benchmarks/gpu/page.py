"""What the GPU suite has measured: lines for the terminal, a Markdown page, pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import page, plot, tables
from benchmarks.gpu.arms import OURS
from benchmarks.gpu.cases import BACKWARD, DECODE, FORWARD, GRAPH, HOST
from benchmarks.tables import short
from polyflash.bench.timing import median

Row = dict[str, Any]
_COLORS = ("#08306b", "#d94801", "#31a354", "#756bb1", "#e7298a", "#66a61e", "#a6761d", "#666666", "#1b9e77")
_LEGEND = (
    "FLOPs count visible pairs alone. Forward and backward in TFLOP/s, decode in GB/s of keys and values"
    " (none of them in the L2), the others in µs per call. *peak*: of the measured ceiling, the product's or"
    " the copy's. *×best*: the time of the quickest peer over ours; *×name* likewise. *error*: relative L2 of"
    " our slice. *MHz*, *W*: SM clock and power during the row."
)
_UNITS = {FORWARD: "TFLOP/s", BACKWARD: "TFLOP/s", DECODE: "GB/s of keys and values"}


def rate(row: Row, arm: str) -> float | None:
    """TFLOP/s on visible pairs; of decode steps GB/s of keys and values; of graphs and host times µs."""
    if arm not in row["arms"]:
        return None
    part, s = row["case"]["part"], row["arms"][arm]["median_s"]
    if part in (FORWARD, BACKWARD):
        return row["flops"] / s / 1e12
    return row["key_bytes"] / s / 1e9 if part == DECODE else s * 1e6


def ratio(row: Row, peer: str | None) -> float | None:
    """How many times quicker we are; None without both."""
    ours, theirs = (row["arms"].get(arm, {}).get("median_s") for arm in (OURS, peer))
    return theirs / ours if ours and theirs else None


def best_peer(row: Row) -> str | None:
    """The quickest arm that is not ours."""
    others = {n: a["median_s"] for n, a in row["arms"].items() if not n.startswith(OURS)}
    return min(others, key=others.__getitem__) if others else None


def line(row: Row) -> str:
    """One row as it is measured."""
    cells = [f"{name} {_cell(rate(row, name))}" for name in row["arms"]]
    cells += [f"{name} -" for name in row["absent"]]
    return f"{row['name']}: " + ", ".join(cells)


def summary(content: dict[str, Any]) -> list[str]:
    """How the rows stand to what is asked of this engine, and which of ours have no figure."""
    rows = content["rows"]
    lines = [f"{len(rows)} rows"]
    for part in (FORWARD, BACKWARD):
        for peer in ("flash", "cudnn", "tutorial", "flag", "flex"):
            found = {r["name"]: x for r in rows if r["case"]["part"] == part and (x := ratio(r, peer))}
            if found:
                ahead, where = sum(x >= 1 for x in found.values()), min(found, key=found.__getitem__)
                lines.append(
                    f"{part}: {ahead} of {len(found)} rows at least as quick as {peer};"
                    f" median {median(list(found.values())):.2f}, lowest {found[where]:.2f} ({where})"
                )
    lines += _decode_summary(content)
    lines += [f"{r['name']}: ours: {r['absent'][OURS]}" for r in rows if OURS in r["absent"]]
    lines += [f"{x['name']}: device lost by {x['arm'] or 'whom?'}: {x['reason']}" for x in content["losts"]]
    return lines


def _decode_summary(content: dict[str, Any]) -> Iterator[str]:
    copy, full = _ceiling(content, "copy_gbs"), {}
    for r in content["rows"]:
        c, x = r["case"], rate(r, OURS)
        if c["part"] == DECODE and c["batch"] * c["kv_heads"] >= 64 and c["seqlen_k"] >= 8192 and x and copy:
            full[r["name"]] = x / copy
    if full:
        where = min(full, key=full.__getitem__)
        yield (
            f"decode, 64 heads and 8k keys or more: median {median(list(full.values())):.0%} of the copy's"
            f" {copy:.0f} GB/s, lowest {full[where]:.0%} ({where})"
        )
    for r in content["rows"]:
        if r["case"]["part"] in (GRAPH, HOST) and (x := rate(r, OURS)):
            yield f"{r['name']}: {x:.1f} µs"


def _ceiling(content: dict[str, Any], name: str) -> float:
    """The median of all measurements of a ceiling; 0 without one."""
    found = [x["ceilings"][name] for x in (*content["runs"], *content["ends"])]
    return median(found) if found else 0.0


def write(content: dict[str, Any], file: Path) -> None:
    """The page, and beside it the pictures, if matplotlib is here. What stands in the page from its heading
    "What the tables do not show" on stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    text = "\n".join(markdown(content, file.stem, _pictures(content, file)))
    file.write_text(text + "\n" + page.kept(before), encoding="utf-8")


def markdown(content: dict[str, Any], title: str, pictures: Sequence[str] = ()) -> list[str]:
    run: dict[str, Any] = content["runs"][-1] if content["runs"] else {"machine": {}, "titles": {}}
    m, names = run["machine"], ("device", "arch", "cores", "polyflash", "python", "driver", "cuda", "cudnn")
    device, arch, cores, version, python, driver, cuda, cudnn = (m.get(name, "") for name in names)
    packages = ", ".join(f"{k} {v}" for k, v in m.get("packages", {}).items())
    product, copy = (_ceiling(content, name) for name in ("matmul_tflops", "copy_gbs"))
    facts = {
        "device": f"{device} {arch}, {cores} SMs, {m.get('memory_bytes', 0) / 2**30:.0f} GiB",
        "software": f"polyflash {version} at {m.get('commit') or 'an unknown commit'}, {packages},"
        f" Python {python}, driver {driver}, CUDA {cuda}, cuDNN {cudnn}",
        "measured ceilings": f"bfloat16 product of 8192³ {product:.0f} TFLOP/s, copy {copy:.0f} GB/s read and"
        " written",
        "commands": "; ".join(dict.fromkeys(f"`{r['command']}`" for r in content["runs"])),
        "protocol": "interleaved in one process, CUDA events, median of the rounds, inputs rotated, outputs"
        " checked against float64 on a slice",
    }
    lines = [f"# {title}", "", "| | |", "|---|---|", *tables.markdown([("", ""), *facts.items()])[2:], ""]
    lines += [_LEGEND, "", *(f"- {x}" for x in summary(content)), ""]
    lines += [f"![{name}]({name})" for name in pictures]
    by_table: dict[str, list[Row]] = {}
    for r in content["rows"]:
        by_table.setdefault(r["case"]["table"], []).append(r)
    for name, rows in by_table.items():
        lines += ["", f"### {name}", "", *_table(rows, content, run["titles"])]
    return [*lines, *_absences(content["rows"])]


def _table(rows: Sequence[Row], content: dict[str, Any], titles: dict[str, str]) -> list[str]:
    part = rows[0]["case"]["part"]
    names = list(dict.fromkeys(name for r in rows for name in (*r["arms"], *r["absent"])))
    peers = [n for n in names if n != OURS and any(n in r["arms"] for r in rows)]
    ceiling = {FORWARD: "matmul_tflops", BACKWARD: "matmul_tflops", DECODE: "copy_gbs"}.get(part, "")
    peak = _ceiling(content, ceiling) if ceiling else 0.0
    heads = ["problem", "ours", "±", *(["peak"] if peak else [])]
    heads += [titles.get(n, n) for n in peers] + ["×best", *(f"×{n}" for n in peers[:4]), "error", "MHz", "W"]
    lines = [heads]
    for r in sorted(rows, key=lambda r: [r["case"][n] for n in ("head_dim", "causal", "seqlen_k", "batch")]):
        x, arm = rate(r, OURS), r["arms"].get(OURS)
        cells = [problem(r["case"]), _cell(x), f"{arm['iqr_s'] / arm['median_s']:.0%}" if arm else ""]
        cells += [f"{x / peak:.0%}" if x else ""] if peak else []
        cells += [_cell(rate(r, n)) for n in peers]
        cells += [_cell(ratio(r, n)) for n in (best_peer(r), *peers[:4])]
        cells += [f"{r['errors'][OURS]:.1e}" if OURS in r["errors"] else ""]
        cells += [f"{r['sensors'][k]:.0f}" if k in r["sensors"] else "" for k in ("sm_mhz", "watts")]
        lines.append(cells)
    return tables.markdown(lines)


def problem(c: dict[str, Any]) -> str:
    heads = f"{c['heads']}" if c["heads"] == c["kv_heads"] else f"{c['heads']}/{c['kv_heads']}"
    kind = "" if c["part"] in (DECODE, GRAPH) else "causal, " if c["causal"] else "full, "
    rows = "" if c["seqlen_q"] in (1, c["seqlen_k"]) else f"{c['seqlen_q']}×"
    return f"{kind}{rows}{c['seqlen_k']} keys, {c['batch']}×{heads} heads, d{c['head_dim']}"


def _absences(rows: Sequence[Row]) -> Iterator[str]:
    """Who has no figure where, and why: one line per arm and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        for pair in r["absent"].items():
            reasons.setdefault(pair, []).append(r["name"])
    if reasons:
        yield from ("", "### Without a figure", "")
    for (name, reason), where in reasons.items():
        shown = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        yield f"- {name}: {reason} ({shown})".replace("|", "/")


def _cell(x: float | None) -> str:
    return "" if x is None else short(x)


def _pictures(content: dict[str, Any], file: Path) -> list[str]:
    """Names of the files written."""
    drawn = []
    for part, unit in _UNITS.items() if plot.possible() else ():
        rows = [r for r in content["rows"] if r["case"]["part"] == part and r["arms"]]
        if rows:
            drawn.append(f"{file.stem}-{part}.png")
            _draw(rows, part, unit, file.parent / drawn[-1])
    return drawn


def _draw(rows: Sequence[Row], part: str, unit: str, file: Path) -> None:
    """One panel per table, head_dim and mask (decode: heads and batch); a line per arm over the keys."""
    fields = ("heads", "batch") if part == DECODE else ("table", "head_dim", "causal")
    keys = [tuple(r["case"][name] for name in fields) for r in rows]
    panels = sorted({key for key in keys if keys.count(key) > 1}) or keys[:1]
    names = list(dict.fromkeys(name for r in rows for name in r["arms"]))

    def panel(axis: Any, of: tuple[Any, ...]) -> str:
        here = [r for r, key in zip(rows, keys, strict=True) if key == of]
        for name, color in zip(names, _COLORS, strict=False):
            points = sorted((r["case"]["seqlen_k"], x) for r in here if (x := rate(r, name)) is not None)
            axis.plot(*zip(*points, strict=True) if points else ((), ()), "o-", label=name, color=color, ms=3)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, None)
        if part == DECODE:
            return f"heads {of[0]}, batch {of[1]}"
        return f"{of[0]}\nd{of[1]}, {'causal' if of[2] else 'full'}"

    plot.figure_of(panels, min(4, len(panels)), panel, file, ("keys", unit), size=8)
