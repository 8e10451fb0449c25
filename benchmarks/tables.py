"""Tables of measured rows: how values are written, and which columns a table has, said once for the terminal
and the page; and measurements made earlier: JSON documents joined, printed again, and written as a Markdown
page. Bytes of decode rows are those of the keys and values that a call reads at least, once each;
GB/s is 10⁹ of them per second."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks import cases
from benchmarks.cases import DECODE, PEER_SUITE, SHARES
from benchmarks.decode import problems as decode
from benchmarks.decode.problems import AMAX, IN_ORDER, PAGES, PLACES, between
from benchmarks.problem import AFTER, PLAIN, Row
from polyflash.bench.command import SCHEMA
from polyflash.bench.suite import MARKS, OURS, SDPA
from polyflash.bench.timing import median
from polyflash.errors import SpecError

T = TypeVar("T")
TAIL = "## What the tables do not show"  # from here on a page is written by hand and kept
_INTRO = """\
Ratio is the peer's median over ours: torch SDPA's, unless the table is named after another peer, which then
ran in a process of its own, alternating with ours. Rows marked "contended" ran while cores were away: do
not quote them. "on" is the kernel row that ran our call."""
Cells = dict[str, Callable[[Row], str]]
_READERS = {IN_ORDER: "order", PLACES: "places", AMAX: "amax"}  # what only reads, and its word in a table
_NOTICED = 1e-3  # seconds: shorter calls stay on the caller, whom no spinning thread disturbs
COLUMNS = {
    "×plain": "×plain: our time over that of our own plain call, without mask, bias or window",
    "rate": "rate: our rate per visible pair over that of our own dense call of about the same work",
}


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """The items by their key, in the order in which keys are met first."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def short(x: float) -> str:
    """Three figures in four characters."""
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def thousands(n: Any) -> str:
    """65536 -> 64k."""
    return f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)


def heads(r: Row) -> str:
    """8 heads: "h8"; over 2 key/value heads: "h8/2"; in a batch of 4: "h4×8"."""
    batch = f"{r['batch']}×" if r["batch"] > 1 else ""
    over = "" if r["num_q_heads"] == r["num_kv_heads"] else f"/{r['num_kv_heads']}"
    return f"h{batch}{r['num_q_heads']}{over}"


_percent = "{:.0%}".format


def _marked(r: Row, text: str) -> str:
    """A ratio with the sign of the row's mark."""
    if "mismatch" in r["marks"]:
        return "! —"
    return ("~" if "contended" in r["marks"] else "?" if r["marks"] else "") + text


def _median(r: Row, arm: str | None) -> Any:
    """Seconds; None of an arm that the row has not."""
    return r["arms"].get(arm, {}).get("median_s")


def _ms(arm: str | None, r: Row) -> str:
    """The median of an arm."""
    ms = 1e3 * (_median(r, arm) or 0.0)
    text = f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}" if ms >= 0.1 else f"{ms:.4f}"
    return text if arm in r["arms"] else ""


def _spread(arm: str | None, r: Row) -> str:
    """The interquartile range in percent of the median."""
    middle = _median(r, arm)
    if middle is None:
        return ""
    spread = r["arms"][arm]["iqr_s"] / middle if middle else 0.0
    return _percent(spread) if spread < 10 else ">9×"


def _value(name: str, text: Callable[[float], str] = short) -> Callable[[Row], str]:
    return lambda r: "" if r.get(name) is None else text(r[name])


def _ratio(r: Row) -> str:
    return "" if r["ratio"] is None and "mismatch" not in r["marks"] else _marked(r, short(r["ratio"] or 0.0))


def _times(arm: str, text: Callable[[float], str] = short) -> Callable[[Row], str]:
    """The time of another arm over ours; none is made from a wrong output."""
    return lambda r: _marked(r, text(_median(r, arm) / _median(r, OURS))) if arm in r["arms"] else ""


def _over(arm: str) -> Callable[[Row], str]:
    return _times(arm, lambda x: short(1 / x))


def _after(arm: str) -> Callable[[Row], str]:
    """The time of another arm over ours, both right behind operators of torch."""
    behind = between(arm)
    return lambda r: _marked(r, short(_median(r, behind) / _median(r, AFTER))) if behind in r["arms"] else ""


def _of_fastest(r: Row, ours: str = OURS, named: Callable[[str], str] = str) -> str:
    """Our rate in percent of that of the fastest reader, of the arms that `named` makes of their names."""
    times = [x for reader in _READERS if (x := _median(r, named(reader))) is not None]
    if not times or ours not in r["arms"] or "mismatch" in r["marks"]:
        return ""
    return _marked(r, _percent(min(times) / _median(r, ours)))


def _fastest(r: Row) -> str:
    times = {x: word for arm, word in _READERS.items() if (x := _median(r, arm)) is not None}
    return times[min(times)] if times else ""


_HEADS: Cells = {"heads": lambda r: f"{r['num_q_heads']}/{r['num_kv_heads']}"}
_ROWS: Cells = {"rows": lambda r: f"q{r['seqlen_q']}"}
_KEYS: Cells = {"keys": lambda r: thousands(r["seqlen_k"])}
_REQUESTS: Cells = {"requests": lambda r: f"{r['batch']}×"}
_RATE: Cells = {"GB/s": lambda r: short(r["bytes"] / _median(r, OURS) / 1e9), "stream": _of_fastest}
_ERROR: Cells = {"error": lambda r: f"{r['errors'][OURS]:.1e}" if "errors" in r else ""}
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
        | {"prefix": lambda r: thousands(r["seqlen_k"] - r["private"])}
        | {"private": lambda r: f"+{r['private']}"},
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


PARTS |= {
    cases.CODES: Part(
        _HEADS | _KEYS | {"codes": lambda r: r["laid"]},
        {
            "16 b": _times(PLAIN),
            "after": _after(PLAIN),
            "reads": lambda r: _of_fastest(r),
            "ggml": _times(decode.GGML),
        }
        | {"onnx": _times(decode.ONNX)}
        | _ERROR,
        (
            "16 b: our step over bfloat16 in our time; after: the same, both right behind operators of torch;"
            " reads: the fastest reader of bfloat16 keys and values in percent of it; ggml, onnx: their steps"
            " over values of as many bits; error: relative L2, of the codes and of the kernel",
        ),
    ),
    cases.PREFILL: Part(
        _HEADS | _KEYS | {"kind": lambda r: r["kind"], "head_dim": lambda r: f"d{r['head_dim']}"},
        _TORCH | {"×floats": _over(PLAIN)} | _ERROR,
        ("×floats: our time by integer products over that by floats, which get the values of the codes",),
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


def table(rows: Sequence[Row], title: str) -> list[str]:
    """Lines for the terminal, one per row: times in ms with their interquartile range, and everything needed
    to doubt the ratio."""
    cells, width = columns(rows), max(len(r["kind"]) for r in rows)
    made = ([problem(r, width), *(cell(r) for cell in cells.values())] for r in rows)
    return [title, *aligned([["problem", *map(str.strip, cells)], *made])]


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns of words: the first and the last to the left, numbers between them to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        " ".join((f"{line[0]:<{widths[0]}}", *map(str.rjust, line[1:-1], widths[1:-1]), line[-1])).rstrip()
        for line in lines
    ]


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
    split = [r for r in rows if r["after_torch"] and r["threads"] > 1 and _median(r, OURS) >= _NOTICED]
    if slowed := [r["after_torch"] for r in split]:
        typical, worst = median(slowed), max(slowed)
        lines.append(f"right after a torch operation: {typical:.2f} of our time here, {worst:.2f} at worst")
    for r in (r for r in rows if "mismatch" in r["marks"]):
        other = {SDPA: "torch's", None: "our torch row's"}.get(r["peer"], f"{r['peer']}'s")
        one, exact = ("inf" if x is None else f"{x:.1e}" for x in (r["difference"], r["error"]["ours"]))
        lines.append(f"{r['name']}: worst row differs by {one} from {other}, by {exact} from float64")
    return lines


def absences(absent: Sequence[Row]) -> list[str]:
    """Which peers have no row, and why: one line per section and reason."""
    reasons = grouped(absent, lambda a: (a["section"], a["reason"])).items()
    return [f"{title}: {', '.join(a['name'] for a in some)}: {reason}" for (title, reason), some in reasons]


def by_section(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return grouped(rows, lambda r: r["section"])


def cell(text: str) -> str:
    """The text as Markdown has it in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table of a heading and lines of cells."""
    head, *rest = ("| " + " | ".join(map(cell, line)) + " |" for line in lines)
    return [head, "|" + "---|" * len(lines[0]), *rest]


def facts(about: dict[str, str]) -> list[str]:
    """A table without a heading: what is said of what."""
    return ["| | |", "|---|---|", *markdown([("", ""), *about.items()])[2:]]


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


def written(file: Path) -> str:
    """The page that is there; empty if there is none."""
    return file.read_text(encoding="utf-8") if file.exists() else ""


def kept(before: str) -> str:
    """What of an older page stays: all that follows `TAIL`, which is written by hand."""
    mark, after = before.partition(TAIL)[1:]
    return f"\n{mark}{after}" if mark else ""


def page_of(content: dict[str, Any], before: str = "") -> str:
    """A page of results. `before` is the page it replaces: its title, and what follows `TAIL`, are kept."""
    machine, rows = content["machine"], content["rows"]
    first = before.partition("\n")[0]
    title = f"# {datetime.date.today().isoformat()}, {machine.get('gpu') or machine['cpu']}"
    about = conditions(machine) | {"commands": "; ".join(f"`{text}`" for text in content["commands"])}
    about["protocol"] = "[measuring](../measuring.md): interleaved in one process, medians of quiet rounds,"
    about["protocol"] += " outputs checked"
    lines = [first if first.startswith("# ") else title, "", *facts(about), "", _INTRO]
    if after := [r["after_torch"] for r in rows if r["after_torch"] and r["threads"] > 1]:
        lines += [
            f"Right after a torch matrix product our calls take {median(after):.2f} times as long"
            f" (median over rows; {max(after):.2f} at worst)."
        ]
    has_plain = any(r["plain"] and r["suite"] != DECODE for r in rows)
    if told := legend(rows, tuple(COLUMNS) if has_plain else ()):
        lines += ["", *(f"- {text}" for text in told)]
    for name, part in by_section(rows).items():
        lines += ["", f"### {name}", "", *_page_table(part)]
    if content["absent"]:
        lines += ["", "### Not run", ""]
        lines += [f"- {cell(line)}" for line in absences(content["absent"])]
    return "\n".join(lines) + "\n" + kept(before)


def conditions(m: dict[str, Any]) -> dict[str, str]:
    """What a figure is quoted with, of the machine that made it."""
    target = "+".join((m["target"], *m["features"]))
    at = f" at {m['commit']}" if m.get("commit") else ""
    versions = [
        f"polyflash {m['polyflash']}{at}",
        m["system"],
        f"Python {m['python']}",
        f"torch {m['torch']}",
    ]
    if "gpu" in m:
        machine = f"{m['gpu']}, {m['cores']} multiprocessors, {target}, launched by {m['cpu']}"
        versions += [f"driver {m['driver']}", f"CUDA {m['cuda']}"]
        product, copy = (m["ceilings"][name] for name in ("matmul_tflops", "copy_gbs"))
        peaks = [f"product of bfloat16: {product:.0f} TFLOP/s", f"copy {copy:.0f} GB/s"]
    else:
        machine = f"{m['cpu']}, {m['cores']} cores, {target}"
        peaks = [f"{p['kind']} {p['gflops_per_thread']:.0f} GF/s per thread" for p in m["peaks"]]
        peaks += [f"{p['kind']} {p['gflops_together']:.0f} on {p['threads']}" for p in m["peaks"]]
    versions += [f"{name} {version}" for name, version in m["packages"].items() if version]
    about = {"machine": machine, "software": ", ".join(versions)}
    about |= {} if "gpu" in m else {"threads": str(m["threads"])}
    about |= {"huge pages": m["huge_pages"]} if m.get("huge_pages") else {}
    return about | {"measured peak": ", ".join(peaks) or "none: llvmlite is not installed"}


def _page_table(rows: Sequence[Row]) -> list[str]:
    of: Cells = {
        "dtype": lambda r: r["dtype"],
        "problem": lambda r: r["kind"],
        "seqlen": lambda r: str(r["seqlen_q"]),
        "head_dim": lambda r: str(r["head_dim"]),
        "heads": lambda r: heads(r).removeprefix("h"),
    }
    if rows[0]["suite"] == DECODE:
        of = PARTS[rows[0].get("part", "")].problem
    elif len({r["dtype"] for r in rows}) == 1:
        del of["dtype"]
    cells = {**of, **columns(rows), "marks": lambda r: ", ".join(r["marks"])}
    return markdown([[name.strip() for name in cells], *([f(r) for f in cells.values()] for r in rows)])
