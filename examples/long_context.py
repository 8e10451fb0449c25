"""Attention over 512 to 8192 tokens, torch SDPA and polyflash in turns, checked equal and drawn as a plot.

Writes build/demo/long_context.png, or the path given as the only argument.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import measure
import polyflash

BATCH, HEADS, HEAD_DIM = 1, 8, 64
LENGTHS = (512, 1024, 2048, 4096, 8192)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # relative L2 of the difference; bf16 holds 8 bits
BUDGET_S = 1.5  # per point
PLOT = Path(__file__).resolve().parent.parent / "build" / "demo" / "long_context.png"

COLORS = {
    "torch": "#D55E00",
    "polyflash": "#0072B2",
}  # Okabe and Ito's set: told apart with any colour vision
NEUTRAL = "#333333"
STYLES = {"fp32": ("-", "o"), "bf16": ("--", "s")}


@dataclass
class Point:
    """One length: `flops` counts visible (query, key) pairs only."""

    dtype: str
    causal: bool
    seqlen: int
    flops: float
    difference: float
    row: measure.Row

    def gflops(self, arm: str) -> tuple[float, float, float]:
        """GFLOP/s at the median time, and at the slower and the faster quartile."""
        fast, slow = self.row.quartiles(arm)
        return self.flops / self.row.median(arm) / 1e9, self.flops / slow / 1e9, self.flops / fast / 1e9

    @property
    def equal(self) -> bool:
        return self.difference <= TOLERANCE[self.dtype]


def measured(dtype: str, causal: bool, seqlen: int) -> Point:
    generator = torch.Generator().manual_seed(seqlen)
    shape = (BATCH, HEADS, seqlen, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(3))
    arms = {
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "polyflash": lambda: polyflash.attention(q, k, v, causal=causal),
    }
    with torch.inference_mode():
        theirs, ours = arms["torch"]().double(), arms["polyflash"]().double()
        difference = float((ours - theirs).norm() / theirs.norm())
        row = measure.in_turns(arms, budget_s=BUDGET_S)
    flops = polyflash.explain(q, k, v, causal=causal).work.flops
    return Point(dtype, causal, seqlen, flops, difference, row)


def draw(points: list[Point], best_probe: float, path: Path) -> None:
    """Rates above, ratios below; full attention left, causal right; hollow marks are contended points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(
        2, 2, figsize=(10, 7.2), sharex=True, sharey="row", height_ratios=(1.6, 1), layout="constrained"
    )
    for (rate, ratio), causal in zip(axes.T, (False, True), strict=True):
        rate.set_title("causal attention" if causal else "full attention", loc="left", fontweight="bold")
        for dtype in DTYPES:
            chosen = [p for p in points if p.causal is causal and p.dtype == dtype]
            filled = [not p.row.contended(best_probe) for p in chosen]
            for arm in COLORS:
                _draw_rates(rate, chosen, filled, arm)
            _draw_ratios(ratio, chosen, filled)
        ratio.axhline(1, color="#999999", linewidth=1)
        ratio.set_xscale("log", base=2)
        ratio.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        ratio.set_xlabel("sequence length (tokens)")
        for axis in (rate, ratio):
            axis.grid(color="#e6e6e6")
            axis.set_axisbelow(True)
    axes[0, 0].set_ylabel("GFLOP/s, higher is better")
    axes[0, 0].set_ylim(0, None)
    axes[1, 0].set_ylabel("time of torch / polyflash")
    axes[1, 0].set_ylim(0, 1.2 * max(p.row.ratio("torch", "polyflash") for p in points))
    last = [p for p in points if p.causal and p.seqlen == LENGTHS[-1]]
    _label_ends(
        axes[0, 1], [(p.gflops(arm)[0], f"{arm} {p.dtype}", COLORS[arm]) for p in last for arm in COLORS]
    )
    _label_ends(axes[1, 1], [(p.row.ratio("torch", "polyflash"), p.dtype, NEUTRAL) for p in last])
    figure.suptitle("polyflash and torch SDPA over long contexts", x=0.01, ha="left", fontsize=14)
    figure.supxlabel(caption(points), x=0.01, ha="left", fontsize=8, color="#444444")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_rates(axis: Any, points: list[Point], filled: list[bool], arm: str) -> None:
    x = [p.seqlen for p in points]
    y, low, high = (np.array(column) for column in zip(*(p.gflops(arm) for p in points), strict=True))
    line, marker = STYLES[points[0].dtype]
    color = COLORS[arm]
    bars = [y - low, high - y]
    axis.errorbar(x, y, bars, color=color, linestyle=line, linewidth=1.8, elinewidth=1, capsize=2)
    fill = [color if full else "white" for full in filled]
    axis.scatter(x, y, 34, fill, marker, edgecolors=color, linewidths=1.5, zorder=3)


def _draw_ratios(axis: Any, points: list[Point], filled: list[bool]) -> None:
    x = [p.seqlen for p in points]
    y = [p.row.ratio("torch", "polyflash") for p in points]
    line, marker = STYLES[points[0].dtype]
    axis.plot(x, y, color=NEUTRAL, linestyle=line, linewidth=1.8)
    fill = [NEUTRAL if full else "white" for full in filled]
    axis.scatter(x, y, 34, fill, marker, edgecolors=NEUTRAL, linewidths=1.5, zorder=3)
    for at, value in zip(x, y, strict=True):
        above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 8}
        axis.annotate(f"{value:.2f}", (at, value), **above)


def _label_ends(axis: Any, ends: list[tuple[float, str, str]]) -> None:
    """Name every line at its right end; `ends` are (y, text, colour), kept apart by a line of text."""
    gap = 0.05 * axis.get_ylim()[1]
    lowest = -gap
    for y, text, color in sorted(ends):
        lowest = max(y, lowest + gap)
        beside = {"xytext": (10, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(text, (LENGTHS[-1], lowest), **beside, color=color, annotation_clip=False)


def caption(points: list[Point]) -> str:
    rounds = [len(p.row.probes) for p in points]
    return (
        f"{measure.machine()}. {measure.versions()}.\n"
        f"batch {BATCH}, {HEADS} heads, head_dim {HEAD_DIM}, normal random inputs. Medians and quartiles of "
        f"{min(rounds)} to {max(rounds)} rounds taken in turns in one process; visible pairs counted.\n"
        "Hollow marks: something else used the cores meanwhile, so the time means little."
    )


def main(console: Console, path: Path = PLOT) -> bool:
    """True if both arms agree at every point."""
    cases = [(d, c, n) for d in DTYPES for c in (False, True) for n in LENGTHS]
    points = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(cases))
        for case in cases:
            points.append(measured(*case))
            progress.advance(task)
    best_probe = min(min(p.row.probes) for p in points)
    table = Table("dtype", "kind", "tokens", "torch ms", "polyflash ms", "ratio", "GFLOP/s", "difference", "",
                  box=None, pad_edge=False)  # fmt: skip
    for column in table.columns[2:8]:
        column.justify = "right"
    for p in points:
        torch_ms, our_ms = p.row.median("torch") * 1e3, p.row.median("polyflash") * 1e3
        remark = "contended" if p.row.contended(best_probe) else ""
        table.add_row(
            p.dtype, "causal" if p.causal else "full", str(p.seqlen), f"{torch_ms:.1f}", f"{our_ms:.1f}",
            f"{torch_ms / our_ms:.2f}", f"{p.gflops('polyflash')[0]:.0f}", f"{p.difference:.0e}",
            remark if p.equal else "NOT EQUAL",
        )  # fmt: skip
    console.print(table)
    limits = ", ".join(f"{limit:.0e} for {dtype}" for dtype, limit in TOLERANCE.items())
    console.print(f"difference: relative L2 between the two results; equal means at most {limits}")
    if any(p.row.contended(best_probe) for p in points):
        console.print("[yellow]contended: something else used the cores, so that time means little[/yellow]")
    draw(points, best_probe, path)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    console.print(f"plot: {shown}")
    return all(p.equal for p in points)


if __name__ == "__main__":
    sys.exit(not main(Console(), Path(sys.argv[1]) if len(sys.argv) > 1 else PLOT))
