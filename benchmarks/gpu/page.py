"""What the GPU suite has measured: lines for the terminal, a Markdown page, pictures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.arms import OURS
from benchmarks.gpu.cases import BACKWARD, DECODE, FORWARD, GRAPH, HOST, GpuCase, case_of
from benchmarks.tables import short
from polyflash.bench.timing import median

Row = dict[str, Any]
_COLORS = ("#08306b", "#d94801", "#31a354", "#756bb1", "#e7298a", "#66a61e", "#a6761d", "#666666", "#1b9e77")


def seconds(row: Row, arm: str) -> float | None:
    found = row["arms"].get(arm)
    return found["median_s"] if found else None


def rate(row: Row, arm: str) -> float | None:
    """TFLOP/s on visible pairs; of decode steps GB/s of keys and values; of graphs and host times µs."""
    s = seconds(row, arm)
    if not s:
        return None
    part = row["case"]["part"]
    if part in (FORWARD, BACKWARD):
        return row["flops"] / s / 1e12
    return row["key_bytes"] / s / 1e9 if part == DECODE else s * 1e6


def ratio(row: Row, peer: str) -> float | None:
    """How many times quicker we are; None without both."""
    ours, theirs = seconds(row, OURS), seconds(row, peer)
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
            of_part = [(x, r) for r in rows if r["case"]["part"] == part and (x := ratio(r, peer))]
            if of_part:
                lowest, where = min(of_part, key=lambda pair: pair[0])
                ahead = sum(x >= 1 for x, _ in of_part)
                middle = median([x for x, _ in of_part])
                lines.append(
                    f"{part}: {ahead} of {len(of_part)} rows at least as quick as {peer};"
                    f" median {middle:.2f}, lowest {lowest:.2f} ({where['name']})"
                )
    lines += _decode_summary(content)
    lines += [f"{r['name']}: ours: {r['absent'][OURS]}" for r in rows if OURS in r["absent"]]
    lines += [f"{x['name']}: device lost by {x['arm'] or 'whom?'}: {x['reason']}" for x in content["losts"]]
    return lines


def _decode_summary(content: dict[str, Any]) -> Iterator[str]:
    copy = _ceiling(content, "copy_gbs")
    full = [
        (x / copy, r)
        for r in content["rows"]
        if r["case"]["part"] == DECODE
        and r["case"]["batch"] * r["case"]["kv_heads"] >= 64
        and r["case"]["seqlen_k"] >= 8192
        and (x := rate(r, OURS))
        and copy
    ]
    if full:
        lowest, where = min(full, key=lambda pair: pair[0])
        yield (
            f"decode, 64 heads and 8k keys or more: median {median([x for x, _ in full]):.0%} of the copy's"
            f" {copy:.0f} GB/s, lowest {lowest:.0%} ({where['name']})"
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
    kept = ""
    if file.exists():
        _, mark, after = file.read_text(encoding="utf-8").partition("\n## What the tables do not show")
        kept = mark + after
    pictures = _pictures(content, file)
    file.write_text("\n".join(markdown(content, file.stem, pictures)) + "\n" + kept, encoding="utf-8")


def markdown(content: dict[str, Any], title: str, pictures: Sequence[str] = ()) -> list[str]:
    run: dict[str, Any] = content["runs"][-1] if content["runs"] else {"machine": {}, "titles": {}}
    m = run["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in m.get("packages", {}).items())
    facts = {
        "device": f"{m.get('device', '')} {m.get('arch', '')}, {m.get('cores', '')} SMs,"
        f" {m.get('memory_bytes', 0) / 2**30:.0f} GiB",
        "software": f"polyflash {m.get('polyflash', '')} at {m.get('commit') or 'an unknown commit'},"
        f" {versions}, Python {m.get('python', '')}, driver {m.get('driver', '')}, CUDA {m.get('cuda', '')},"
        f" cuDNN {m.get('cudnn', '')}",
        "measured ceilings": f"bfloat16 product of 8192³ {_ceiling(content, 'matmul_tflops'):.0f} TFLOP/s,"
        f" copy {_ceiling(content, 'copy_gbs'):.0f} GB/s read and written",
        "commands": "; ".join(dict.fromkeys(f"`{r['command']}`" for r in content["runs"])),
        "protocol": "interleaved in one process, CUDA events, median of the rounds, inputs rotated, outputs"
        " checked against float64 on a slice",
    }
    lines = [f"# {title}", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts.items()), ""]
    lines += [_LEGEND, "", *(f"- {x}" for x in summary(content)), ""]
    lines += [f"![{name}]({name})" for name in pictures]
    tables: dict[str, list[Row]] = {}
    for r in content["rows"]:
        tables.setdefault(r["case"]["table"], []).append(r)
    for name, rows in tables.items():
        lines += ["", f"### {name}", "", *_table(rows, content, run["titles"])]
    return [*lines, *_absences(content["rows"])]


_LEGEND = (
    "FLOPs count visible pairs alone. Forward and backward in TFLOP/s, decode in GB/s of keys and values"
    " (none of them in the L2), the others in µs per call. *peak*: of the measured ceiling, the product's or"
    " the copy's. *×best*: the time of the quickest peer over ours; *×name* likewise. *error*: relative L2 of"
    " our slice. *MHz*, *W*: SM clock and power during the row."
)


def _table(rows: Sequence[Row], content: dict[str, Any], titles: dict[str, str]) -> Iterator[str]:
    part = rows[0]["case"]["part"]
    names = list(dict.fromkeys(name for r in rows for name in (*r["arms"], *r["absent"])))
    peers = [n for n in names if n != OURS and any(n in r["arms"] for r in rows)]
    ceiling = {FORWARD: "matmul_tflops", BACKWARD: "matmul_tflops", DECODE: "copy_gbs"}.get(part, "")
    peak = _ceiling(content, ceiling) if ceiling else 0.0
    heads = ["problem", "ours", "±", *(["peak"] if peak else [])]
    heads += [titles.get(n, n) for n in peers] + ["×best", *(f"×{n}" for n in peers[:4]), "error", "MHz", "W"]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for r in sorted(rows, key=_order):
        x = rate(r, OURS)
        best = best_peer(r)
        arm = r["arms"].get(OURS)
        cells = [
            problem(case_of(r["case"])),
            _cell(x),
            f"{arm['iqr_s'] / arm['median_s']:.0%}" if arm else "",
        ]
        cells += [f"{x / peak:.0%}" if x else ""] if peak else []
        cells += [_cell(rate(r, n)) for n in peers]
        cells += [_cell(ratio(r, best) if best else None), *(_cell(ratio(r, n)) for n in peers[:4])]
        cells += [f"{r['errors'][OURS]:.1e}" if OURS in r["errors"] else ""]
        cells += [f"{r['sensors'][k]:.0f}" if k in r["sensors"] else "" for k in ("sm_mhz", "watts")]
        yield "| " + " | ".join(cells) + " |"


def problem(case: GpuCase) -> str:
    heads = f"{case.heads}" if case.heads == case.kv_heads else f"{case.heads}/{case.kv_heads}"
    kind = "" if case.part in (DECODE, GRAPH) else "causal, " if case.causal else "full, "
    length = f"{case.seqlen_k}" if case.seqlen_q in (1, case.seqlen_k) else f"{case.seqlen_q}×{case.seqlen_k}"
    return f"{kind}{length} keys, {case.batch}×{heads} heads, d{case.head_dim}"


def _order(r: Row) -> tuple[Any, ...]:
    c = r["case"]
    return c["head_dim"], c["causal"], c["seqlen_k"], c["batch"]


def _absences(rows: Sequence[Row]) -> Iterator[str]:
    """Who has no figure where, and why: one line per arm and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        for name, reason in r["absent"].items():
            reasons.setdefault((name, reason), []).append(r["name"])
    if reasons:
        yield from ("", "### Without a figure", "")
    for (name, reason), where in reasons.items():
        shown = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        yield f"- {name}: {reason} ({shown})".replace("|", "/")


def _cell(x: float | None) -> str:
    return "" if x is None else short(x)


def _pictures(content: dict[str, Any], page: Path) -> list[str]:
    """Names of the files written."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    drawn = []
    for part, unit in ((FORWARD, "TFLOP/s"), (BACKWARD, "TFLOP/s"), (DECODE, "GB/s of keys and values")):
        rows = [r for r in content["rows"] if r["case"]["part"] == part and r["arms"]]
        if rows:
            name = f"{page.stem}-{part}.png"
            _draw(rows, part, unit, page.parent / name)
            drawn.append(name)
    return drawn


def _panel_of(part: str) -> Callable[[Row], tuple[Any, ...]]:
    if part == DECODE:
        return lambda r: (r["case"]["heads"], r["case"]["batch"])
    return lambda r: (r["case"]["table"], r["case"]["head_dim"], r["case"]["causal"])


def _draw(rows: Sequence[Row], part: str, unit: str, file: Path) -> None:
    """One panel per table, head_dim and mask (decode: heads and batch); a line per arm over the keys."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    key = _panel_of(part)
    panels = sorted({key(r) for r in rows if sum(key(x) == key(r) for x in rows) > 1}) or [key(rows[0])]
    names = list(dict.fromkeys(name for r in rows for name in r["arms"]))
    wide = min(4, len(panels))
    high = -(-len(panels) // wide)
    figure, axes = pyplot.subplots(
        high, wide, squeeze=False, figsize=(4.2 * wide + 2, 3.2 * high), layout="constrained"
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name, color in zip(names, _COLORS, strict=False):
            points = sorted(
                (r["case"]["seqlen_k"], x)
                for r in rows
                if key(r) == panel and (x := rate(r, name)) is not None
            )
            axis.plot(*zip(*points, strict=True) if points else ((), ()), "o-", label=name, color=color, ms=3)
        words = ("heads {}, batch {}",) if part == DECODE else ("{}\nd{}, {}",)
        shown = panel if part == DECODE else (*panel[:2], "causal" if panel[2] else "full")
        axis.set_title(words[0].format(*shown), loc="left", fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, None)
        axis.grid(color="#e6e6e6")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("keys", fontsize=8)
    for unused in axes.flat[len(panels) :]:
        unused.remove()
    for line_of_axes in axes:
        line_of_axes[0].set_ylabel(unit)
    found = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found.keys(), loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
