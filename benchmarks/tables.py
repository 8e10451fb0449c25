"""Measured rows as plain data, and the columns of their tables: one definition for the terminal, the page and
the JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from benchmarks.cases import DECODE, PEER_SUITE, SHARES, STEP, Case
from benchmarks.cells import Row, marked, ms, or_blank, short, spread
from benchmarks.decode import tables as decode_tables
from benchmarks.peers import PEERS
from benchmarks.suite import Result
from polyflash.bench.suite import MARKS, OURS, SDPA
from polyflash.bench.timing import median

_NOTICED = 1e-3  # seconds: shorter calls stay on the caller, whom no spinning thread disturbs
_TITLES = {"dense": "", "small": "small calls, "}  # other suites by their names
_STEP = "forward + backward, "
COLUMNS = {
    "×plain": "×plain: our time over that of our own plain call, without mask, bias or window",
    "rate": "rate: our rate per visible pair over that of our own dense call of about the same work",
}


def row(r: Result) -> Row:
    """The whole measurement; every round is in it, so that medians can be made again."""
    w = r.case.workload
    arms = {name: r.comparison.summary(name) for name in r.comparison.rounds[0].seconds}
    beyond = decode_tables.fields(r) if r.case.suite == DECODE else {}
    return {
        "name": r.case.name,
        "suite": r.case.suite,
        "kind": r.case.kind,
        "timed": r.case.timed,
        "part": r.case.part,
        "peer": r.case.peer or None,
        "dtype": w.dtype,
        "batch": w.batch,
        "num_q_heads": w.heads,
        "num_kv_heads": w.kv_heads,
        "seqlen_q": w.seqlen_q,
        "seqlen_k": w.seqlen_k,
        "head_dim": w.head_dim,
        "head_dim_v": w.dim_v,
        "causal": w.causal,
        "window": w.window,
        "backend": r.backend,
        "threads": r.threads,
        "flops": r.flops,
        "ratio": r.ratio,
        "plain": r.case.plain,
        "over_plain": r.over_plain,
        "rate_of_plain": r.rate_of_plain,
        "gflops": r.gflops,
        "of_peak": r.of_peak,
        "scaling": r.scaling,
        "after_torch": r.after,
        "marks": list(r.marks),
        **beyond,
        "difference": _finite(r.difference),
        "error": {"ours": _finite(r.ours.relative), "peer": _finite(r.peer.relative), "rows": r.ours.rows},
        "arms": {
            name: {"median_s": s.median, "iqr_s": s.iqr, "rounds": s.rounds, "of": s.of}
            for name, s in arms.items()
        },
        "rounds": [{"speed": round_.speed, "seconds": round_.seconds} for round_ in r.comparison.rounds],
    }


def section(case: Case) -> str:
    """The title of the table a row stands in."""
    if case.suite == PEER_SUITE:
        peer = PEERS[case.peer]
        return peer.title if peer.absent else f"{peer.title} {peer.version}"
    title = _STEP if case.timed == STEP else _TITLES.get(case.suite, f"{case.suite}, ")
    return title + (f"{case.part}, " if case.part else "") + case.workload.dtype


def by_rate(r: Row) -> bool:
    """Is the row's plain call another problem, so that rates compare and times do not?"""
    return r["plain"] and (r["suite"] == "varlen" or r.get("part") == SHARES)


def columns(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """Heading -> cell, for the rows of one section; the problem itself is not among them."""
    first, threads = rows[0], rows[0]["threads"]
    if first["suite"] == DECODE:
        return decode_tables.columns(first)
    theirs = "peer ms" if first["suite"] == PEER_SUITE else "torch ms"
    made: dict[str, Callable[[Row], str]] = {
        "ours ms": lambda r: ms(r["arms"][OURS]),
        "±": lambda r: spread(r["arms"][OURS]),
        theirs: lambda r: ms(r["arms"][r["peer"]]) if r["peer"] else "",
    }
    made["± "] = lambda r: spread(r["arms"][r["peer"]]) if r["peer"] else ""
    made["ratio"] = _ratio
    if by_rate(first):
        made["rate"] = lambda r: or_blank(r["rate_of_plain"], "{:.0%}".format)
    elif first["plain"]:
        made["×plain"] = lambda r: or_blank(r["over_plain"], short)
    else:
        made["GF/s"] = lambda r: f"{r['gflops']:.0f}"
        made["peak"] = lambda r: or_blank(r["of_peak"], "{:.0%}".format)
    if threads > 1:
        made[f"1→{threads}"] = lambda r: or_blank(r["scaling"], short)
    made["on"] = lambda r: r["backend"]
    return made


def table(rows: Sequence[Row], title: str) -> Table:
    """One line per row: times in ms with their interquartile range, and everything needed to doubt the
    ratio."""
    made = plain_table(title)
    made.title_style, made.header_style = "italic", "bold"
    made.add_column("problem", no_wrap=True)
    cells = columns(rows)
    for name in cells:
        made.add_column(name.strip(), justify="left" if name == "on" else "right", no_wrap=True)
    width = max(len(r["kind"]) for r in rows)
    for r in rows:
        texts = {name: cell(r) for name, cell in cells.items()}
        if "mismatch" in r["marks"] and "ratio" in texts:
            texts["ratio"] = f"[bold red]{texts['ratio']}[/]"
        elif r["ratio"] is not None and "ratio" in texts:
            texts["ratio"] = f"[{'green' if r['ratio'] >= 1 else 'yellow'}]{texts['ratio']}[/]"
        if "torch" in r["backend"]:
            texts["on"] = f"[yellow]{texts['on']}[/]"
        made.add_row(problem(r, width), *texts.values(), style="dim" if "contended" in r["marks"] else None)
    return made


def plain_table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """Legend of the marks and columns that occur, and what has no column."""
    lines = [text for mark, text in MARKS.items() if any(mark in r["marks"] for r in rows)]
    shown = {"rate" if by_rate(r) else "×plain" for r in rows if r["plain"] and r["suite"] != DECODE}
    lines += [text for name, text in COLUMNS.items() if name in shown]
    lines += decode_tables.legend(rows)
    slowed = [
        r["after_torch"]
        for r in rows
        if r["after_torch"] and r["threads"] > 1 and r["arms"][OURS]["median_s"] >= _NOTICED
    ]
    if slowed:
        typical, worst = median(slowed), max(slowed)
        lines.append(f"right after a torch operation: {typical:.2f} of our time here, {worst:.2f} at worst")
    for r in rows:
        if "mismatch" in r["marks"]:
            other = {SDPA: "torch's", None: "our torch row's"}.get(r["peer"], f"{r['peer']}'s")
            lines.append(
                f"{r['name']}: worst row differs by {_error(r['difference'])} from {other},"
                f" by {_error(r['error']['ours'])} from float64"
            )
    return lines


def absences(absent: Sequence[Row]) -> list[str]:
    """Which peers have no row, and why: one line per section and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for a in absent:
        reasons.setdefault((a["section"], a["reason"]), []).append(a["name"])
    return [f"{title}: {', '.join(names)}: {reason}" for (title, reason), names in reasons.items()]


def problem(r: Row, width: int) -> str:
    if r["suite"] == DECODE:
        return " ".join(cell(r) for cell in decode_tables.problem(r).values())
    dtype = f" {r['dtype']}" if r["suite"] == PEER_SUITE else ""
    return f"{r['kind']:<{width}} {r['seqlen_q']:>4} d{r['head_dim']:<3} {heads(r)}{dtype}"


def heads(r: Row) -> str:
    """8 heads: "h8"; over 2 key/value heads: "h8/2"; in a batch of 4: "h4×8"."""
    batch = f"{r['batch']}×" if r["batch"] > 1 else ""
    grouped = "" if r["num_q_heads"] == r["num_kv_heads"] else f"/{r['num_kv_heads']}"
    return f"h{batch}{r['num_q_heads']}{grouped}"


def _ratio(r: Row) -> str:
    if r["ratio"] is None and "mismatch" not in r["marks"]:
        return ""
    return marked(r, short(r["ratio"] or 0.0))


def _error(x: float | None) -> str:
    return "inf" if x is None else f"{x:.1e}"


def _finite(x: float) -> float | None:
    """JSON has no infinity."""
    return x if math.isfinite(x) else None
