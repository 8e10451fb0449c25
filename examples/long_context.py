"""Attention over 512 to 8192 tokens, torch SDPA and polyflash in turns, checked equal and drawn as a plot.

Writes build/demo/long_context.png, or the path given as the only argument.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from polyflash.bench import Arm, Calibration, Comparison, calibrate, compare
from polyflash.bench.timing import quantile
from polyflash.target import cpu_model, detect

BATCH, HEADS, HEAD_DIM = 1, 8, 64
LENGTHS = (512, 1024, 2048, 4096, 8192)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # relative L2 of the difference; bf16 holds 8 bits
SECONDS = 1.5  # of measuring per point, twice that if the cores are shared
WIDE = 0.25  # a middle half wider than this share of the median is no time to quote
PLOT = Path(__file__).resolve().parent.parent / "build" / "demo" / "long_context.png"

COLORS = {
    "torch": "#D55E00",
    "polyflash": "#0072B2",
}  # Okabe and Ito's set: told apart with any colour vision
NEUTRAL = "#333333"
STYLES = {"fp32": ("-", "o"), "bf16": ("--", "s")}


@dataclass
class Point:
    """One length. `flops` counts visible pairs; `difference` is relative L2 between the two results."""

    dtype: str
    causal: bool
    seqlen: int
    flops: float
    difference: float
    comparison: Comparison

    def gflops(self, arm: str, share: float = 0.5) -> float:
        """GFLOP/s at the time that `share` of the rounds did not exceed; by default the median."""
        rounds = [r for r in self.comparison.rounds if r.quiet or self.comparison.contended]
        return self.flops / quantile([r.seconds[arm] for r in rounds], share) / 1e9

    @property
    def ratio(self) -> float:
        return self.comparison.ratio("torch", "polyflash")

    @property
    def contended(self) -> bool:
        """Too few quiet rounds, or times that spread too widely to be called times."""
        return not steady(self.comparison)

    @property
    def equal(self) -> bool:
        return self.difference <= TOLERANCE[self.dtype]


def steady(comparison: Comparison) -> bool:
    """Were the cores ours alone, and the middle half of every arm's times narrow?"""
    spreads = [comparison.summary(arm).spread for arm in COLORS]
    return not comparison.contended and max(spreads) <= WIDE


def measured(dtype: str, causal: bool, seqlen: int, calibration: Calibration | None) -> Point:
    generator = torch.Generator().manual_seed(seqlen)
    shape = (BATCH, HEADS, seqlen, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(3))
    theirs = Arm("torch", lambda: scaled_dot_product_attention(q, k, v, is_causal=causal))
    ours = Arm("polyflash", lambda: polyflash.attention(q, k, v, causal=causal))
    with torch.inference_mode():
        want, got = (torch.as_tensor(arm.call()).double() for arm in (theirs, ours))
        difference = float((got - want).norm() / want.norm())
        speed = calibration.speed if calibration else None
        comparison = compare([theirs, ours], seconds=SECONDS, speed=speed)
    flops = polyflash.explain(q, k, v, causal=causal).work.flops
    return Point(dtype, causal, seqlen, flops, difference, comparison)


def draw(points: list[Point], path: Path) -> None:
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
            for arm in COLORS:
                _draw_rates(rate, chosen, arm)
            _draw_ratios(ratio, chosen)
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
    axes[1, 0].set_ylim(0, 1.2 * max(p.ratio for p in points))
    last = [p for p in points if p.causal and p.seqlen == LENGTHS[-1]]
    _label_ends(
        axes[0, 1], [(p.gflops(arm), f"{arm} {p.dtype}", COLORS[arm]) for p in last for arm in COLORS]
    )
    _label_ends(axes[1, 1], [(p.ratio, p.dtype, NEUTRAL) for p in last])
    figure.suptitle("polyflash and torch SDPA over long contexts", x=0.01, ha="left", fontsize=14)
    figure.supxlabel(caption(points), x=0.01, ha="left", fontsize=8, color="#444444")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_rates(axis: Any, points: list[Point], arm: str) -> None:
    x = [p.seqlen for p in points]
    y = [p.gflops(arm) for p in points]
    bars = [
        [p.gflops(arm) - p.gflops(arm, 0.75) for p in points],
        [p.gflops(arm, 0.25) - p.gflops(arm) for p in points],
    ]
    line, _ = STYLES[points[0].dtype]
    color = COLORS[arm]
    axis.errorbar(x, y, bars, color=color, linestyle=line, linewidth=1.8, elinewidth=1, capsize=2)
    _draw_marks(axis, points, y, color)


def _draw_ratios(axis: Any, points: list[Point]) -> None:
    line, _ = STYLES[points[0].dtype]
    axis.plot(
        [p.seqlen for p in points], [p.ratio for p in points], color=NEUTRAL, linestyle=line, linewidth=1.8
    )
    _draw_marks(axis, points, [p.ratio for p in points], NEUTRAL)
    for p in points:
        dy = -15 if p.dtype == "fp32" else 8  # the lower line's labels below, the upper line's above
        place: dict[str, Any] = {
            "xytext": (0, dy),
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 8,
        }
        place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.annotate(f"{p.ratio:.2f}", (p.seqlen, p.ratio), **place)


def _draw_marks(axis: Any, points: list[Point], y: Sequence[float], color: str) -> None:
    fill = ["white" if p.contended else color for p in points]
    _, marker = STYLES[points[0].dtype]
    x = [p.seqlen for p in points]
    axis.scatter(x, y, s=34, c=fill, marker=marker, edgecolors=color, linewidths=1.5, zorder=3)


def _label_ends(axis: Any, ends: list[tuple[float, str, str]]) -> None:
    """Name every line at its right end; `ends` are (y, text, colour), kept apart by a line of text."""
    gap = 0.05 * axis.get_ylim()[1]
    lowest = -gap
    for y, text, color in sorted(ends):
        lowest = max(y, lowest + gap)
        beside = {"xytext": (10, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(text, (LENGTHS[-1], lowest), **beside, color=color, annotation_clip=False)


def caption(points: list[Point]) -> str:
    rounds = [len(p.comparison.rounds) for p in points]
    return (
        f"{about()}\n"
        f"batch {BATCH}, {HEADS} heads, head_dim {HEAD_DIM}, normal random inputs. Medians and middle halves "
        f"of {min(rounds)} to {max(rounds)} rounds taken in turns in one process; visible pairs counted.\n"
        "Hollow marks: contended, the cores were shared or the times spread widely, so they mean little."
    )


def about() -> str:
    """Processor, threads, versions and commit, in one line."""
    here = str(Path(__file__).resolve().parent)
    commit = _output("git", "-C", here, "rev-parse", "--short", "HEAD")
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    at = f" ({commit}{' with changes' if changed else ''})" if commit else ""
    return (
        f"{cpu_model()}, {torch.get_num_threads()} threads. polyflash {polyflash.__version__}{at}, "
        f"torch {torch.__version__}, Python {platform.python_version()}."
    )


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def main(console: Console, path: Path = PLOT) -> bool:
    """True if both arms agree at every point."""
    calibration = calibrate(detect("cpu"))
    cases = [(d, c, n) for d in DTYPES for c in (False, True) for n in LENGTHS]
    points = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(cases))
        for dtype, causal, seqlen in cases:
            points.append(measured(dtype, causal, seqlen, calibration))
            progress.advance(task)
    _print_points(console, points)
    draw(points, path)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    console.print(f"plot: {shown}", highlight=False)
    return all(p.equal for p in points)


def _print_points(console: Console, points: list[Point]) -> None:
    titles = ("", "", "tokens", "torch ms", "ours ms", "ratio", "GFLOP/s", "differ by", "")
    table = Table(*titles, box=None, pad_edge=False)
    for column in table.columns[2:8]:
        column.justify = "right"
    for p in points:
        torch_ms, our_ms = (p.comparison.summary(arm).median * 1e3 for arm in ("torch", "polyflash"))
        table.add_row(
            p.dtype,
            "causal" if p.causal else "full",
            str(p.seqlen),
            f"{torch_ms:.1f}",
            f"{our_ms:.1f}",
            f"{p.ratio:.2f}",
            f"{p.gflops('polyflash'):.0f}",
            f"{p.difference:.0e}",
            "" if p.equal and not p.contended else "contended" if p.equal else "[red]NOT EQUAL[/red]",
        )
    console.print(table)
    limits = ", ".join(f"{dtype} {limit:.0e}" for dtype, limit in TOLERANCE.items())
    console.print(f"differ by: relative L2 between both results; allowed: {limits}", highlight=False)
    if any(p.contended for p in points):
        console.print("[yellow]contended: shared cores or widely spread times; they mean little[/yellow]")
    if not find_spec("llvmlite"):
        console.print("[yellow]without llvmlite nothing tells whether the cores were shared[/yellow]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plot", nargs="?", type=Path, default=PLOT, help="the picture to write")
    sys.exit(not main(Console(), parser.parse_args().plot))
