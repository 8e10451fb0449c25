"""Structured masks: which keys a query row sees, as one interval per row, and segment ids.

Row i of a request stands at position i + offset. It sees the keys j of one interval [lo, hi):

    lo = max(kv_start, i + offset - left)                   hi = min(kv_len, i + offset + 1 if causal, i +
    offset + right + 1)

and, with segments, only those whose id equals its own. Loop bounds (`block_range`) and element masks
(`visible`) are separate functions: a kernel skips whole blocks by the first and compares lanes by the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from polyflash.errors import SpecError, spec_error

FAR_SIDE, FAR_OFFSET = 1 << 61, 1 << 60  # as good as infinite, and sums of them stay 64-bit

Window = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A composable mask, accepted as `mask=`: `Mask.causal() & Mask.window(128, 0) & Mask.segments(q_ids,
    k_ids)`.

    `kv_lens`, `kv_starts` (int32 (batch,)) and `q_ids`, `k_ids` (int32 (batch, seqlen)) may be torch tensors
    on any device; they are kept as given."""

    alignment: str | None = None  # "bottom_right" or "top_left": causal; None: not causal
    left: int | None = None
    right: int | None = None
    kv_lens: Any = None
    kv_starts: Any = None
    q_ids: Any = None
    k_ids: Any = None

    @staticmethod
    def causal(alignment: str = "bottom_right") -> Mask:
        """Key j is visible to row i iff j <= i + offset; offset is seqlen_k - seqlen_q, or 0 for
        "top_left"."""
        if alignment not in ("bottom_right", "top_left"):
            raise spec_error(
                "alignment", got=repr(alignment), wanted="'bottom_right' or 'top_left'", change="Name one."
            )
        return Mask(alignment=alignment)

    @staticmethod
    def window(left: int | None, right: int | None) -> Mask:
        """`left` and `right` neighbours of a row's own position, itself not counted; None is unbounded."""
        left, right = checked_window((left, right))
        return Mask(left=left, right=right)

    @staticmethod
    def lengths(kv_lens: Any = None, kv_starts: Any = None) -> Mask:
        """Keys [kv_starts[b], kv_lens[b]) of request b are live; both int32 (batch,)."""
        return Mask(kv_lens=kv_lens, kv_starts=kv_starts)

    @staticmethod
    def segments(q_ids: Any, k_ids: Any) -> Mask:
        """Equal ids see each other; int32 (batch, seqlen_q) and (batch, seqlen_k)."""
        return Mask(q_ids=q_ids, k_ids=k_ids)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        merged = replace(
            self,
            alignment=_only("alignment", self.alignment, other.alignment),
            left=_smaller(self.left, other.left),
            right=_smaller(self.right, other.right),
        )
        for name in ("kv_lens", "kv_starts", "q_ids", "k_ids"):
            merged = replace(merged, **{name: _only(name, getattr(self, name), getattr(other, name))})
        return merged

    @property
    def window_sides(self) -> Window:
        return self.left, self.right

    def visible(self, i: int, j: int, *, seqlen_q: int, seqlen_k: int, batch: int = 0) -> bool:
        """May row i of request `batch` see key j? For reading and for tests; kernels compare intervals."""
        live = seqlen_k if self.kv_lens is None else int(self.kv_lens[batch])
        start = 0 if self.kv_starts is None else int(self.kv_starts[batch])
        offset = 0 if self.alignment == "top_left" else live - seqlen_q
        lo, hi = row_interval(
            i,
            seqlen_k=live,
            offset=offset,
            causal=self.alignment is not None,
            window=self.window_sides,
            kv_start=start,
        )
        same = self.q_ids is None or int(self.q_ids[batch][i]) == int(self.k_ids[batch][j])
        return lo <= j < hi and same


def checked_window(window: Window) -> Window:
    """The same window, or a `SpecError` that teaches the convention."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise spec_error(
            "window", got=repr(window), wanted="(left, right)", change="Use None for an unbounded side."
        )
    for side, value in zip(("left", "right"), window, strict=True):
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise spec_error(
                f"window {side}",
                got=repr(value),
                wanted="an int or None",
                change="Use None for an unbounded side.",
            )
        if value is not None and not 0 <= value < 2**63:
            raise spec_error(
                f"window {side}", got=value, wanted="0 or more, or None", change="Use None for unbounded."
            )
    left, right = (None if side is None else min(side, FAR_SIDE) for side in window)
    return left, right


def row_interval(
    i: int, *, seqlen_k: int, offset: int, causal: bool, window: Window = (None, None), kv_start: int = 0
) -> tuple[int, int]:
    """Keys [lo, hi) visible to row i; lo >= hi means none. `seqlen_k` is the live length."""
    left, right = window
    lo, hi = kv_start, seqlen_k
    if causal:
        hi = min(hi, i + offset + 1)
    if right is not None:
        hi = min(hi, i + offset + right + 1)
    if left is not None:
        lo = max(lo, i + offset - left)
    return max(lo, 0), max(hi, 0)


def block_range(
    first_row: int,
    last_row: int,
    *,
    block_n: int,
    seqlen_k: int,
    offset: int,
    causal: bool,
    window: Window = (None, None),
    kv_start: int = 0,
) -> tuple[int, int]:
    """Key blocks [n_lo, n_hi) that rows first_row..last_row (inclusive) visit: bounds rise with the row."""
    lo, _ = row_interval(
        first_row, seqlen_k=seqlen_k, offset=offset, causal=causal, window=window, kv_start=kv_start
    )
    _, hi = row_interval(
        last_row, seqlen_k=seqlen_k, offset=offset, causal=causal, window=window, kv_start=kv_start
    )
    if hi <= lo:
        return 0, 0
    return lo // block_n, -(-hi // block_n)


def visible_pairs(
    seqlen_q: int, seqlen_k: int, *, offset: int, causal: bool, window: Window = (None, None)
) -> int:
    """How many (query, key) pairs are visible, in closed form: a sum over rows of clamped linear bounds."""
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    below = _clamped_sum(seqlen_q, offset + 1 + right, seqlen_k) if right is not None else seqlen_q * seqlen_k
    if left is None:
        return below
    return below - _clamped_sum(seqlen_q, offset - left, seqlen_k)


def _clamped_sum(rows: int, first: int, top: int) -> int:
    """Sum over i in [0, rows) of min(max(first + i, 0), top)."""
    start = min(max(-first, 0), rows)  # rows before it count 0
    full = min(max(top - first, start), rows)  # rows from it on count top
    n = full - start
    return n * (first + start) + n * (n - 1) // 2 + (rows - full) * top


def _smaller(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _only(name: str, a: Any, b: Any) -> Any:
    same = a is b or (isinstance(a, str) and a == b)  # tensors are compared by identity: == would read them
    if a is not None and b is not None and not same:
        raise SpecError(f"mask: two different {name} in one conjunction. Combine them into one before `&`")
    return b if a is None else a
