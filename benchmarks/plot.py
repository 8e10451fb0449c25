"""Pictures of measurements: panels of lines over the keys or rows. Those of a document are its decode steps,
rates beside what memory gives; or, if it has none, times of few rows over their number."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import DECODE, FEW_ROWS, STEPS, Case
from benchmarks.decode.problems import AMAX, FOLDED, IN_ORDER, PLACES
from benchmarks.problem import Row
from benchmarks.tables import grouped, thousands
from polyflash.bench.suite import OURS, SDPA
from polyflash.errors import SpecError

_OURS = (("#08306b", "o"), ("#2171b5", "s"), ("#6baed6", "^"), ("#9ecae1", "D"))  # by query rows, few to many
_LETTERS = 10  # points
_NO_STEPS = "plot: got no decode steps. Use --suite decode, or --from a file that has them"
_KEYS = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#d94801", "#08519c", "#08306b")  # 1000 stands out
_TORCH, _MEMORY = "#d94801", "#777777"


def possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_possible(chosen: Sequence[Case] | None) -> None:
    """Said before a long measurement, not after it; of rows that are measured already, None."""
    if not possible():
        raise SpecError("plot: matplotlib is not installed. Use pip install 'polyflash[bench]'")
    if chosen is not None and not any(c.suite == DECODE and c.part in (STEPS, FEW_ROWS) for c in chosen):
        raise SpecError(_NO_STEPS)


def figure_of(
    panels: Sequence[Any], wide: int, draw: Callable[[Any, Any], str], file: Path, labels: tuple[str, str],
    *, title: str = "", size: int = 9, **options: Any,
) -> None:  # fmt: skip
    """Writes a picture of `panels`, so many in a line: `draw(axis, panel)` draws one and gives its title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    high = -(-len(panels) // wide)
    figure, axes = pyplot.subplots(
        high, wide, squeeze=False, layout="constrained", figsize=(2 + 3.6 * wide, 1 + 2.9 * high), **options
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_title(draw(axis, panel), loc="left", fontsize=size)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e6e6e6")
    for unused in axes.flat[len(panels) :]:
        unused.remove()
    for axis in axes[-1]:
        axis.set_xlabel(labels[0])
    for line in axes:
        line[0].set_ylabel(labels[1])
    named = [pair for axis in axes.flat for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    found = {label: handle for handle, label in named}
    figure.legend(found.values(), found.keys(), loc="outside right center", frameon=False, fontsize=size)
    if title:
        # A letter is up to two thirds as wide as it is high.
        letters = int(figure.get_figwidth() * 72 / (_LETTERS * 2 / 3))
        figure.suptitle(textwrap.fill(title, letters), x=0.01, ha="left", fontsize=_LETTERS)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def steps(content: dict[str, Any]) -> list[Row]:
    """The decode steps of a document, or its few rows, of the largest head_dim among them."""
    parts = grouped((r for r in content.get("rows", ()) if r["suite"] == DECODE), lambda r: r["part"])
    rows = parts.get(STEPS) or parts.get(FEW_ROWS)
    if not rows:
        raise SpecError(_NO_STEPS)
    widest = max(r["head_dim"] for r in rows)
    return [r for r in rows if r["head_dim"] == widest and "mismatch" not in r["marks"]]


def rate(r: Row, *arms: str) -> float:
    """GB/s at which the quickest of these arms went through the row's keys and values."""
    return r["bytes"] / min(r["arms"][arm]["median_s"] for arm in arms if arm in r["arms"]) / 1e9


def draw(content: dict[str, Any], file: str) -> None:
    """Writes the picture: one panel per dtype and head counts."""
    rows, machine = steps(content), content["machine"]
    few = rows[0]["part"] == FEW_ROWS
    dtypes = dict.fromkeys(r["dtype"] for r in rows)
    heads = dict.fromkeys((r["num_q_heads"], r["num_kv_heads"]) for r in rows)
    title = (
        f"{'Few rows' if few else 'One decode step'}, head_dim {rows[0]['head_dim']}: {machine['cpu']},"
        f" {machine['threads']} threads. Hollow marks: contended"
    )
    of = grouped(rows, lambda r: (r["num_q_heads"], r["num_kv_heads"], r["dtype"]))

    def panel(axis: Any, key: tuple[Any, ...]) -> str:
        if key in of:
            (_panel_of_rows if few else _panel)(axis, of[key])
        return f"{key[2]}, {key[0]} heads over {key[1]}"

    labels = ("rows per key/value head", "ms") if few else ("keys", "GB/s of keys and values")
    panels = [(*pair, dtype) for pair in heads for dtype in dtypes]
    figure_of(panels, len(dtypes), panel, Path(file), labels, title=title, sharex=True, sharey=True)


def _panel(axis: Any, rows: Sequence[Row]) -> None:
    counted = sorted(grouped(rows, lambda r: r["seqlen_q"]).items())
    for (count, some), (color, marker) in zip(counted, (*_OURS, *_OURS[-1:] * len(counted)), strict=False):
        _line(axis, some, lambda r: rate(r, OURS), color, f"ours, q{count}", marker=marker)
    count, fewest = counted[0]
    _line(axis, fewest, lambda r: rate(r, SDPA, FOLDED), _TORCH, f"torch SDPA, q{count}", marker="X")
    for arm, style in ((IN_ORDER, "-"), (PLACES, ":"), (AMAX, "--")):
        if all(arm in r["arms"] for r in fewest):
            _line(axis, fewest, lambda r, arm=arm: rate(r, arm), _MEMORY, arm, style, "P")
    keys = sorted({r["seqlen_k"] for r in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(keys, [thousands(n) for n in keys])
    axis.set_ylim(0, None)


def _panel_of_rows(axis: Any, rows: Sequence[Row]) -> None:
    per_head = [{**r, "at": r["seqlen_q"] * r["num_q_heads"] // r["num_kv_heads"]} for r in rows]
    for (n, some), color in zip(
        sorted(grouped(per_head, lambda r: r["seqlen_k"]).items()), _KEYS, strict=False
    ):
        _line(axis, some, lambda r: 1e3 * r["arms"][OURS]["median_s"], color, f"{thousands(n)} keys", at="at")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [1 << n for n in range(8)]
    axis.set_xticks(ticks, [str(n) for n in ticks])


def _line(
    axis: Any, rows: Sequence[Row], height: Any, color: str, label: str, style: str = "-", marker: str = "o",
    at: str = "seqlen_k",
) -> None:  # fmt: skip
    ordered = sorted(rows, key=lambda r: r[at])
    x, y = [r[at] for r in ordered], [height(r) for r in ordered]
    axis.plot(x, y, style, color=color, label=label, linewidth=1.6, marker=marker, markersize=5)
    fill = ["white" if "contended" in r["marks"] else color for r in ordered]
    axis.scatter(x, y, s=28, c=fill, edgecolors=color, marker=marker, zorder=3)
