"""Tables of measured rows: how values are written, and which columns a table has, said once for the terminal
and the page. Bytes of decode rows are those of the keys and values that a call reads at least, once each;
GB/s is 10⁹ of them per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from benchmarks import cases
from benchmarks.cases import DECODE, PEER_SUITE, SHARES
from benchmarks.decode import problems as decode
from benchmarks.decode.keys import AMAX, IN_ORDER, PAGES, PLACES, between
from benchmarks.problem import PLAIN
from benchmarks.suite import AFTER, Row
from polyflash.bench.suite import MARKS, OURS, SDPA
from polyflash.bench.timing import median

Cells = dict[str, Callable[[Row], str]]
_READERS = {IN_ORDER: "order", PLACES: "places", AMAX: "amax"}  # what only reads, and its word in a table
_NOTICED = 1e-3  # seconds: shorter calls stay on the caller, whom no spinning thread disturbs
COLUMNS = {
    "×plain": "×plain: our time over that of our own plain call, without mask, bias or window",
    "rate": "rate: our rate per visible pair over that of our own dense call of about the same work",
}


def short(x: float) -> str:
    """Three figures in four characters."""
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def thousands(n: Any) -> str:
    """65536 -> 64k."""
    return f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)


def heads(r: Row) -> str:
    """8 heads: "h8"; over 2 key/value heads: "h8/2"; in a batch of 4: "h4×8"."""
    batch = f"{r['batch']}×" if r["batch"] > 1 else ""
    grouped = "" if r["num_q_heads"] == r["num_kv_heads"] else f"/{r['num_kv_heads']}"
    return f"h{batch}{r['num_q_heads']}{grouped}"


def _percent(x: float) -> str:
    return f"{x:.0%}"


def _marked(r: Row, text: str) -> str:
    """A ratio with the sign of the row's mark."""
    if "mismatch" in r["marks"]:
        return "! —"
    return ("~" if "contended" in r["marks"] else "?" if r["marks"] else "") + text


def _ms(arm: str | None, r: Row) -> str:
    """The median of an arm."""
    if arm not in r["arms"]:
        return ""
    ms = r["arms"][arm]["median_s"] * 1e3
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}" if ms >= 0.1 else f"{ms:.4f}"


def _spread(arm: str | None, r: Row) -> str:
    """The interquartile range in percent of the median."""
    if arm not in r["arms"]:
        return ""
    of = r["arms"][arm]
    spread = of["iqr_s"] / of["median_s"] if of["median_s"] else 0.0
    return f"{spread:.0%}" if spread < 10 else ">9×"


def _value(name: str, text: Callable[[float], str] = short) -> Callable[[Row], str]:
    return lambda r: "" if r.get(name) is None else text(r[name])


def _ratio(r: Row) -> str:
    return "" if r["ratio"] is None and "mismatch" not in r["marks"] else _marked(r, short(r["ratio"] or 0.0))


def _times(arm: str, text: Callable[[float], str] = short) -> Callable[[Row], str]:
    """The time of another arm over ours; none is made from a wrong output."""

    def cell(r: Row) -> str:
        if arm not in r["arms"]:
            return ""
        return _marked(r, text(r["arms"][arm]["median_s"] / r["arms"][OURS]["median_s"]))

    return cell


def _over(arm: str) -> Callable[[Row], str]:
    return _times(arm, lambda x: short(1 / x))


def _of_fastest(r: Row, ours: str, named: Callable[[str], str]) -> str:
    """Our rate in percent of that of the fastest reader, of the arms that `named` makes of their names."""
    times = [r["arms"][named(x)]["median_s"] for x in _READERS if named(x) in r["arms"]]
    if not times or ours not in r["arms"] or "mismatch" in r["marks"]:
        return ""
    return _marked(r, _percent(min(times) / r["arms"][ours]["median_s"]))


def _fastest(r: Row) -> str:
    times = {word: r["arms"][x]["median_s"] for x, word in _READERS.items() if x in r["arms"]}
    return min(times, key=lambda word: times[word]) if times else ""


_HEADS: Cells = {"heads": lambda r: f"{r['num_q_heads']}/{r['num_kv_heads']}"}
_ROWS: Cells = {"rows": lambda r: f"q{r['seqlen_q']}"}
_KEYS: Cells = {"keys": lambda r: thousands(r["seqlen_k"])}
_REQUESTS: Cells = {"requests": lambda r: f"{r['batch']}×"}
_RATE: Cells = {
    "GB/s": lambda r: short(r["bytes"] / r["arms"][OURS]["median_s"] / 1e9),
    "stream": lambda r: _of_fastest(r, OURS, str),
}
_TORCH: Cells = {"torch ms": lambda r: _ms(SDPA, r), "ratio": _times(SDPA)}
_EACH: Cells = {"each ms": lambda r: _ms(PLAIN, r), "ratio": _times(PLAIN)}


class Part(NamedTuple):
    """A table of the suite "decode": what names a row, its figures, and what their headings mean."""

    problem: Cells
    figures: Cells
    legend: tuple[str, ...] = ()


PARTS = {
    cases.STEPS: Part(
        _HEADS | _ROWS | _KEYS | {"head_dim": lambda r: f"d{r['head_dim']}"},
        _RATE
        | {"by": _fastest, "after": lambda r: _of_fastest(r, AFTER, between)}
        | _TORCH
        | {"folded": _times(decode.FOLDED)},
        (
            "stream: our rate in percent of the fastest reader of the same keys and values: our loop in order"
            " or at four places at once, on the same pool, or torch's amax; by: which. after: both right"
            " behind operators of torch, as in a model, each with the fastest reader there",
            "torch: SDPA as it is called, with enable_gqa; folded: the ratio to SDPA given the query heads of"
            " a key/value head as rows, which its users can write themselves",
        ),
    ),
    cases.FEW_ROWS: Part(_HEADS | _ROWS | _KEYS, _TORCH),
    cases.PAGED: Part(
        _HEADS | _ROWS | _KEYS | {"pages": lambda r: r["laid"]},
        _RATE | {"of pages": _times(PAGES, _percent), "×one": _over(decode.ONE_PAGE), "×whole": _over(PLAIN)},
        (
            "of pages: our rate in percent of a loop that only reads the pages, in the order of the table",
            "×one: our time over that of our own call on a page that holds all keys, in the same order"
            " inside; ×whole: on whole tensors (heads, keys)",
        ),
    ),
    cases.RAGGED: Part(
        _HEADS | _REQUESTS | {"lengths": lambda r: f"{r['laid']} to {thousands(r['seqlen_k'])}"},
        _RATE | {"one ms": lambda r: _ms(PLAIN, r), "of one": _times(PLAIN, _percent)},
        ("of one: our rate over that of one request that has the keys of all",),
    ),
    cases.CASCADE: Part(
        _HEADS
        | _REQUESTS
        | {
            "prefix": lambda r: thousands(r["seqlen_k"] - r["private"]),
            "private": lambda r: f"+{r['private']}",
        },
        _EACH | {"copies": _times(decode.OWN_COPIES)},
        (
            "ratio: time of one table walk per request over ours; copies: the same, if each request has"
            " pages of its own for the prefix",
        ),
    ),
    cases.GROUPS: Part(
        {"groups": lambda r: f"{r['laid']} W{r['ranks']}", "rows": lambda r: f"r{r['seqlen_q']}"} | _KEYS,
        _EACH | {"taken": _value("fuses", lambda fuses: "one walk" if fuses else "each")},
        ("ratio: time of one call per group over that of one walk for all groups",),
    ),
    cases.INVARIANCE: Part(
        _HEADS | _REQUESTS | _ROWS | _KEYS,
        _RATE
        | {"split": _value("split_keys", thousands), "×best": _over(decode.BEST_SPLIT)}
        | {"×prefill": _times(decode.INVARIANT)},
        (
            "×best: our time over that of the split size that is best for this call; ×prefill: time with"
            " batch_invariant=True over ours",
        ),
    ),
}


def by_rate(r: Row) -> bool:
    """Is the row's plain call another problem, so that rates compare and times do not?"""
    return r["plain"] and (r["suite"] == "varlen" or r.get("part") == SHARES)


def columns(rows: Sequence[Row]) -> Cells:
    """Heading -> cell, for the rows of one section; the problem itself is not among them."""
    first, threads = rows[0], rows[0]["threads"]
    made: Cells = {"ours ms": lambda r: _ms(OURS, r), "±": lambda r: _spread(OURS, r)}
    on: Cells = {"on": lambda r: r["backend"]}
    if first["suite"] == DECODE:
        return made | PARTS[first.get("part", "")].figures | on
    made["peer ms" if first["suite"] == PEER_SUITE else "torch ms"] = lambda r: _ms(r["peer"], r)
    made |= {"± ": lambda r: _spread(r["peer"], r), "ratio": _ratio}
    if by_rate(first):
        made["rate"] = _value("rate_of_plain", _percent)
    elif first["plain"]:
        made["×plain"] = _value("over_plain")
    else:
        made |= {"GF/s": _value("gflops", "{:.0f}".format), "peak": _value("of_peak", _percent)}
    return made | ({f"1→{threads}": _value("scaling")} if threads > 1 else {}) | on


def problem(r: Row, width: int) -> str:
    if r["suite"] == DECODE:
        return " ".join(cell(r) for cell in PARTS[r.get("part", "")].problem.values())
    dtype = f" {r['dtype']}" if r["suite"] == PEER_SUITE else ""
    return f"{r['kind']:<{width}} {r['seqlen_q']:>4} d{r['head_dim']:<3} {heads(r)}{dtype}"


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
        title=title, title_justify="left", title_style="bold", header_style="", box=box.SIMPLE_HEAD,
        padding=0, pad_edge=False, show_edge=False,
    )  # fmt: skip


def legend(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """What these columns mean, and the headings of the decode tables that occur."""
    parts = {r.get("part", "") for r in rows if r["suite"] == DECODE}
    lines = [text for name, text in COLUMNS.items() if name in names]
    return lines + [text for part, made in PARTS.items() if part in parts for text in made.legend]


def notes(rows: Sequence[Row]) -> list[str]:
    """Legend of the marks and columns that occur, and what has no column."""
    lines = [text for mark, text in MARKS.items() if any(mark in r["marks"] for r in rows)]
    plain = [r for r in rows if r["plain"] and r["suite"] != DECODE]
    lines += legend(rows, ["rate" if by_rate(r) else "×plain" for r in plain])
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
            found = ["inf" if x is None else f"{x:.1e}" for x in (r["difference"], r["error"]["ours"])]
            lines.append(
                f"{r['name']}: worst row differs by {found[0]} from {other}, by {found[1]} from float64"
            )
    return lines


def absences(absent: Sequence[Row]) -> list[str]:
    """Which peers have no row, and why: one line per section and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for a in absent:
        reasons.setdefault((a["section"], a["reason"]), []).append(a["name"])
    return [f"{title}: {', '.join(names)}: {reason}" for (title, reason), names in reasons.items()]


def by_section(rows: Sequence[Row]) -> dict[str, list[Row]]:
    parts: dict[str, list[Row]] = {}
    for r in rows:
        parts.setdefault(r["section"], []).append(r)
    return parts


def cell(text: str) -> str:
    """The text as Markdown has it in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table of a heading and lines of cells."""
    head, *rest = ("| " + " | ".join(map(cell, line)) + " |" for line in lines)
    return [head, "|" + "---|" * len(lines[0]), *rest]
