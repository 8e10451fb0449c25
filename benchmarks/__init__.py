"""The laboratory: suites of problems against peers, clocks and checks, written as JSON lines and as pages.

Built on `polyflash.bench` (clocks, peaks, checks, the plain cases) and no part of the wheel.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Shape(NamedTuple):
    """A problem as commands name it: batch x heads/kv heads x keys x head_dim, "4x32/8x8192x128"."""

    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int

    @staticmethod
    def of(text: str) -> Shape:
        """ValueError for what is none."""
        if not (found := re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)x(\d+)", text)):
            raise ValueError(
                f"got {text!r}, wanted batch x heads/kv heads x keys x head_dim: 4x32/8x8192x128"
            )
        batch, heads, kv_heads, seqlen, head_dim = found.groups()
        return Shape(*map(int, (batch, heads, kv_heads or heads, seqlen, head_dim)))

    def __str__(self) -> str:
        over = "" if self.heads == self.kv_heads else f"/{self.kv_heads}"
        return f"{self.batch}x{self.heads}{over}x{self.seqlen}x{self.head_dim}"
