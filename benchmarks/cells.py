"""How measured values are written in tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def short(x: float) -> str:
    """Three figures in four characters."""
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def ms(arm: Row) -> str:
    """The median of an arm."""
    found = arm["median_s"] * 1e3
    return f"{found:.0f}" if found >= 1000 else f"{found:.3g}" if found >= 0.1 else f"{found:.4f}"


def spread(arm: Row) -> str:
    """The interquartile range in percent of the median."""
    found = arm["iqr_s"] / arm["median_s"] if arm["median_s"] else 0.0
    return f"{found:.0%}" if found < 10 else ">9×"


def or_blank(x: float | None, text: Callable[[float], str]) -> str:
    return "" if x is None else text(x)


def marked(r: Row, text: str) -> str:
    """A ratio with the sign of the row's mark."""
    if "mismatch" in r["marks"]:
        return "! —"
    return ("~" if "contended" in r["marks"] else "?" if r["marks"] else "") + text
