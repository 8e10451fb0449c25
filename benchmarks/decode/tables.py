"""The tables of the suite "decode": what names a row, and its figures. Bytes are those of the keys and values
that a call reads at least, once each; GB/s is 10⁹ of them per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cases import DECODE
from benchmarks.cells import Row, marked, ms, or_blank, short, spread
from benchmarks.decode import cases as decode_cases
from benchmarks.decode import problems as decode
from benchmarks.decode.keys import AMAX, IN_ORDER, PAGES, PLACES, between
from benchmarks.suite import AFTER, PLAIN, Result
from polyflash.bench.suite import OURS, SDPA

_READERS = {IN_ORDER: "order", PLACES: "places", AMAX: "amax"}  # what only reads, and its word in a table
Cells = dict[str, Callable[[Row], str]]
_LEGEND = {
    decode_cases.STEPS: (
        "stream: our rate in percent of the fastest reader of the same keys and values: our loop in order or"
        " at four places at once, on the same pool, or torch's amax; by: which. after: both right behind"
        " operators of torch, as in a model, each with the fastest reader there",
        "torch: SDPA as it is called, with enable_gqa; folded: the ratio to SDPA given the query heads of a"
        " key/value head as rows, which its users can write themselves",
    ),
    decode_cases.PAGED: (
        "of pages: our rate in percent of a loop that only reads the pages, in the order of the table",
        "×one: our time over that of our own call on a page that holds all keys, in the same order"
        " inside; ×whole: on whole tensors (heads, keys)",
    ),
    decode_cases.RAGGED: ("of one: our rate over that of one request that has the keys of all",),
    decode_cases.CASCADE: (
        "ratio: time of one table walk per request over ours; copies: the same, if each request has pages of"
        " its own for the prefix",
    ),
    decode_cases.GROUPS: ("ratio: time of one call per group over that of one walk for all groups",),
    decode_cases.INVARIANCE: (
        "×best: our time over that of the split size that is best for this call; ×prefill: time with"
        " batch_invariant=True over ours",
    ),
}


def fields(r: Result) -> Row:
    """What a row of this suite has beyond others."""
    case = r.case
    return {
        "laid": case.laid,
        "page_size": case.page_size,
        "private": case.private,
        "ranks": case.ranks,
        "rank": case.rank,
        "bytes": r.bytes,
        **r.chosen,
    }


def problem(first: Row) -> Cells:
    """Heading -> cell of what names a row, for the table that `first` stands in."""
    part = first.get("part", "")
    heads: Cells = {"heads": lambda r: f"{r['num_q_heads']}/{r['num_kv_heads']}"}
    requests: Cells = {"requests": lambda r: f"{r['batch']}×"}
    rows: Cells = {"rows": lambda r: f"q{r['seqlen_q']}"}
    keys: Cells = {"keys": lambda r: thousands(r["seqlen_k"])}
    if part == decode_cases.STEPS:
        return {**heads, **rows, **keys, "head_dim": lambda r: f"d{r['head_dim']}"}
    if part == decode_cases.FEW_ROWS:
        return {**heads, **rows, **keys}
    if part == decode_cases.PAGED:
        return {**heads, **rows, **keys, "pages": lambda r: r["laid"]}
    if part == decode_cases.RAGGED:
        return {**heads, **requests, "lengths": lambda r: f"{r['laid']} to {thousands(r['seqlen_k'])}"}
    if part == decode_cases.CASCADE:
        prefix: Cells = {"prefix": lambda r: thousands(r["seqlen_k"] - r["private"])}
        return {**heads, **requests, **prefix, "private": lambda r: f"+{r['private']}"}
    if part == decode_cases.GROUPS:
        return {"groups": _groups, "rows": lambda r: f"r{r['seqlen_q']}", **keys}
    return {**heads, **requests, **rows, **keys}


def _groups(r: Row) -> str:
    return f"{r['laid']} W{r['ranks']}"


def columns(first: Row) -> Cells:
    """Heading -> cell of the figures, for the table that `first` stands in."""
    part = first.get("part", "")
    made: Cells = {"ours ms": lambda r: ms(r["arms"][OURS]), "±": lambda r: spread(r["arms"][OURS])}
    rate: Cells = {
        "GB/s": lambda r: short(r["bytes"] / r["arms"][OURS]["median_s"] / 1e9),
        "stream": lambda r: _of_fastest(r, OURS, str),
    }
    if part == decode_cases.STEPS:
        made |= rate | {
            "by": _fastest,
            "after": lambda r: _of_fastest(r, AFTER, between),
            "torch ms": _ms(SDPA),
            "ratio": _times(SDPA),
            "folded": _times(decode.FOLDED),
        }
    elif part == decode_cases.FEW_ROWS:
        made |= {"torch ms": _ms(SDPA), "ratio": _times(SDPA)}
    elif part == decode_cases.PAGED:
        made |= rate | {"of pages": _percent(PAGES), "×one": _over(decode.ONE_PAGE), "×whole": _over(PLAIN)}
    elif part == decode_cases.RAGGED:
        made |= rate | {"one ms": _ms(PLAIN), "of one": _percent(PLAIN)}
    elif part == decode_cases.CASCADE:
        made |= {"each ms": _ms(PLAIN), "ratio": _times(PLAIN), "copies": _times(decode.OWN_COPIES)}
    elif part == decode_cases.GROUPS:
        made |= {"each ms": _ms(PLAIN), "ratio": _times(PLAIN), "taken": _taken}
    else:
        cost = _over(decode.BEST_SPLIT)
        made |= {
            "GB/s": rate["GB/s"],
            "stream": rate["stream"],
            "split": lambda r: or_blank(r.get("split_keys"), thousands),
            "×best": cost,
            "×prefill": _times(decode.INVARIANT),
        }
    return made | {"on": lambda r: r["backend"]}


def legend(rows: Sequence[Row]) -> list[str]:
    """What the headings of the tables of this suite mean, of those that occur."""
    parts = {r.get("part", "") for r in rows if r["suite"] == DECODE}
    return [text for part, texts in _LEGEND.items() if part in parts for text in texts]


def ratio(r: Row, other: str) -> float | None:
    """The time of another arm over ours; none is made from a wrong output."""
    if other not in r["arms"] or "mismatch" in r["marks"]:
        return None
    return r["arms"][other]["median_s"] / r["arms"][OURS]["median_s"]


def thousands(n: Any) -> str:
    """65536 -> 64k."""
    return f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)


def _ms(arm: str) -> Callable[[Row], str]:
    return lambda r: ms(r["arms"][arm]) if arm in r["arms"] else ""


def _times(arm: str) -> Callable[[Row], str]:
    return lambda r: _cell(r, arm, short)


def _over(arm: str) -> Callable[[Row], str]:
    return lambda r: _cell(r, arm, lambda x: short(1 / x))


def _percent(arm: str) -> Callable[[Row], str]:
    return lambda r: _cell(r, arm, "{:.0%}".format)


def _of_fastest(r: Row, ours: str, named: Callable[[str], str]) -> str:
    """Our rate in percent of that of the fastest reader, of the arms that `named` makes of their names."""
    times = [r["arms"][named(x)]["median_s"] for x in _READERS if named(x) in r["arms"]]
    if not times or ours not in r["arms"] or "mismatch" in r["marks"]:
        return ""
    return marked(r, f"{min(times) / r['arms'][ours]['median_s']:.0%}")


def _fastest(r: Row) -> str:
    times = {word: r["arms"][x]["median_s"] for x, word in _READERS.items() if x in r["arms"]}
    return min(times, key=lambda word: times[word]) if times else ""


def _cell(r: Row, arm: str, text: Callable[[float], str]) -> str:
    if arm not in r["arms"]:
        return ""
    found = ratio(r, arm)
    return marked(r, "" if found is None else text(found))


def _taken(r: Row) -> str:
    fuses = r.get("fuses")
    return "" if fuses is None else "one walk" if fuses else "each"
