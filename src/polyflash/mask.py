"""Structured masks: which keys a query row sees, as one interval per row, and segment ids.

Row i of a request stands at position i + offset. It sees the keys j of one interval [lo, hi):

    lo = max(kv_start, i + offset - left)                   hi = min(kv_len, i + offset + 1 if causal, i +
    offset + right + 1)

and, with segments, only those whose id equals its own; with interval lists, only those of the listed
intervals of its row block. Loop bounds (`block_range`) and element masks (`visible`) are separate functions:
a kernel skips whole blocks by the first and compares lanes by the second."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyflash.errors import described, spec_error

if TYPE_CHECKING:
    from torch import Tensor, device

FAR_SIDE, FAR_OFFSET = 1 << 61, 1 << 60  # as good as infinite, and sums of them stay 64-bit

Window = tuple[int | None, int | None]
Interval = Callable[[int], tuple[int, int]]  # keys [lo, hi) of a row


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A composable mask, accepted as `mask=`: `Mask.causal() & Mask.window(128, 0) & Mask.segments(q_ids,
    k_ids)`.

    `kv_lens`, `kv_starts` (int32 or int64 (batch,)) and `q_ids`, `k_ids` (int32 (batch, seqlen)) may be torch
    tensors on any device; they are kept as given. `bounds` holds interval lists as the op takes them."""

    alignment: str | None = None  # "bottom_right" or "top_left": causal; None: not causal
    left: int | None = None
    right: int | None = None
    kv_lens: Any = None
    kv_starts: Any = None
    q_ids: Any = None
    k_ids: Any = None
    bounds: Any = None  # int32 (batch or 1, num_q_heads or 1, row blocks, intervals, 2)
    rows: int | None = None  # query rows of a row block of `bounds`

    def __post_init__(self) -> None:
        _check_alignment(self.alignment)
        if self.left is not None or self.right is not None:
            checked_window((self.left, self.right))
        if (self.rows is None) != (self.bounds is None):
            got = "rows without bounds" if self.bounds is None else "bounds without rows"
            raise spec_error("intervals", got, "both or neither", "Use Mask.intervals().")
        if self.rows is not None:
            _positive("rows", self.rows)

    def __repr__(self) -> str:
        """Shows the parts as they are written, tensors by their shapes."""
        parts = []
        if self.alignment is not None:
            parts.append(f"causal({self.alignment!r})" if self.alignment != "bottom_right" else "causal()")
        if self.left is not None or self.right is not None:
            parts.append(f"window({self.left}, {self.right})")
        if self.kv_lens is not None or self.kv_starts is not None:
            parts.append(f"lengths({_size(self.kv_lens)}, {_size(self.kv_starts)})")
        if self.q_ids is not None or self.k_ids is not None:
            parts.append(f"segments({_size(self.q_ids)}, {_size(self.k_ids)})")
        if self.bounds is not None:
            parts.append(f"intervals({_size(self.bounds)}, rows={self.rows})")
        return " & ".join(f"Mask.{part}" for part in parts) or "Mask()"

    @staticmethod
    def causal(alignment: str = "bottom_right") -> Mask:
        """Key j is visible to row i iff j <= i + (seqlen_k - seqlen_q), or j <= i for "top_left"."""
        _check_alignment("" if alignment is None else alignment)
        return Mask(alignment=alignment)

    @staticmethod
    def window(left: int | None, right: int | None) -> Mask:
        """`left` and `right` neighbours of a row's own position, itself not counted; None is unbounded."""
        left, right = checked_window((left, right))
        return Mask(left=left, right=right)

    @staticmethod
    def lengths(kv_lens: Any = None, kv_starts: Any = None) -> Mask:
        """Keys [kv_starts[b], kv_lens[b]) of request b are live; both int32 or int64 (batch,)."""
        return Mask(kv_lens=kv_lens, kv_starts=kv_starts)

    @staticmethod
    def segments(q_ids: Any, k_ids: Any) -> Mask:
        """Equal ids see each other; int32 (batch, seqlen_q) and (batch, seqlen_k)."""
        for name, x in (("q_ids", q_ids), ("k_ids", k_ids)):
            if x is None:
                raise spec_error(f"segments {name}", "None", "an int32 tensor", "Give both, or no segments.")
        return Mask(q_ids=q_ids, k_ids=k_ids)

    @staticmethod
    def intervals(starts: Tensor, ends: Tensor, *, rows: int) -> Mask:
        """Query rows [r·rows, (r+1)·rows) see keys of [starts[..., r, n], ends[..., r, n]).

        Args:
            starts: int32 (row_blocks, intervals), (batch or 1, row_blocks, intervals) or (batch or 1,
                num_q_heads or 1, row_blocks, intervals); row_blocks is ceil(seqlen_q / rows).
            ends: like starts. The intervals of a row block rise and are disjoint; an empty one
                (start == end) may stand anywhere, and an end may overhang seqlen_k.
            rows: query rows per list, 1 or more. Keys between the intervals are never read where whole tiles
                of them are hidden.

        Raises:
            SpecError: no int32 tensors of one such shape and device, or no positive number of rows."""
        from torch import stack

        _check_bounds(starts, ends)
        bounds = stack((starts, ends), -1)
        if bounds.shape[-2] == 0:
            bounds = bounds.new_zeros((*bounds.shape[:-2], 1, 2))
        return Mask(bounds=_with_heads(bounds), rows=_positive("rows", rows))

    @staticmethod
    def blocks(visible: Tensor, *, rows: int, keys: int) -> Mask:
        """Row block r (of `rows` query rows) sees key block c (of `keys` keys) iff visible[..., r, c].

        `visible` is bool (row_blocks, key_blocks), with batch, or batch and heads (or 1), in front. It
        becomes interval lists, neighbouring blocks joined; keys beyond the last key block are hidden. On a
        device, and under torch.compile, lists have room for every possible run, since counting the runs
        would synchronise.

        Raises:
            SpecError: no bool tensor of 2 to 4 dimensions, or no positive block sizes."""
        import torch

        strided = isinstance(visible, torch.Tensor) and is_strided(visible)
        if not strided or visible.dtype is not torch.bool or visible.ndim not in (2, 3, 4):
            wanted = "a bool tensor (row_blocks, key_blocks), batch and heads in front or not"
            raise spec_error("blocks", described(visible), wanted, "True = attend.")
        rows, keys = _positive("rows", rows), _positive("keys", keys)
        return Mask(bounds=_with_heads(_runs_of(visible, keys)), rows=rows)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            change = "Pass a tensor as mask=, with causal=, window=, kv_lens=, kv_starts= beside it."
            raise spec_error("mask &", described(other), "a polyflash.Mask", change)
        names = ("kv_lens", "kv_starts", "q_ids", "k_ids", "bounds", "rows")
        return Mask(
            _only("alignment", self.alignment, other.alignment),
            _smaller(self.left, other.left),
            _smaller(self.right, other.right),
            *[_only(name, getattr(self, name), getattr(other, name)) for name in names],
        )

    __rand__ = __and__

    def to(self, device: device | str | int, *, non_blocking: bool = False) -> Mask:
        """Moves every tensor that the mask holds to `device`; no copy of those that are there already.

        Raises:
            SpecError: no device. The dtypes of a mask are fixed, so it takes none."""
        from torch import Tensor
        from torch import device as device_of

        try:
            place = device_of(device)
        except (RuntimeError, TypeError):
            change = "Name a device such as 'cpu' or 'cuda:0'."
            raise spec_error("device", described(device), "a torch device", change) from None

        def moved(x: Any) -> Any:
            return x.to(place, non_blocking=non_blocking) if isinstance(x, Tensor) else x

        q_ids = moved(self.q_ids)
        k_ids = q_ids if self.k_ids is self.q_ids else moved(self.k_ids)
        lens, starts, bounds = moved(self.kv_lens), moved(self.kv_starts), moved(self.bounds)
        return Mask(self.alignment, self.left, self.right, lens, starts, q_ids, k_ids, bounds, self.rows)

    @property
    def window_sides(self) -> Window:
        return self.left, self.right

    def visible(self, i: int, j: int, *, seqlen_q: int, seqlen_k: int, batch: int = 0, head: int = 0) -> bool:
        """May row i of request `batch` and query head `head` see key j? For reading and for tests; kernels
        compare intervals."""
        live = seqlen_k if self.kv_lens is None else int(self.kv_lens[batch])
        start = 0 if self.kv_starts is None else int(self.kv_starts[batch])
        offset = 0 if self.alignment == "top_left" else live - seqlen_q
        causal, sides = self.alignment is not None, self.window_sides
        lo, hi = row_interval(i, seqlen_k=live, offset=offset, causal=causal, window=sides, kv_start=start)
        same = self.q_ids is None or int(self.q_ids[batch][i]) == int(self.k_ids[batch][j])
        return lo <= j < hi and same and self._listed(i, j, batch, head)

    def _listed(self, i: int, j: int, batch: int, head: int) -> bool:
        if self.bounds is None or self.rows is None:
            return True
        entries, heads = self.bounds.shape[:2]
        lists = self.bounds[batch if entries > 1 else 0, head if heads > 1 else 0, i // self.rows]
        return any(start <= j < end for start, end in lists.tolist())


def _size(x: Any) -> str:
    return "None" if x is None else str(list(getattr(x, "shape", ())))


def _check_bounds(starts: Any, ends: Any) -> None:
    import torch

    for name, x in (("starts", starts), ("ends", ends)):
        if not isinstance(x, torch.Tensor) or x.dtype is not torch.int32 or not is_strided(x):
            wanted = "an int32 tensor (row_blocks, intervals), batch and heads in front or not"
            raise spec_error(f"intervals {name}", described(x), wanted, "Use .to(torch.int32).")
    if starts.ndim not in (2, 3, 4):
        wanted = "(row_blocks, intervals), (batch, row_blocks, intervals) or (batch, heads, row_blocks, ...)"
        change = "Use unsqueeze() where a dimension is missing."
        raise spec_error("intervals starts", tuple(starts.shape), wanted, change)
    if starts.shape != ends.shape or starts.device != ends.device:
        wanted, change = f"{tuple(starts.shape)} on {starts.device}", "Each interval has both bounds."
        raise spec_error("intervals ends", f"{tuple(ends.shape)} on {ends.device}", wanted, change)


def _positive(name: str, value: Any) -> int:
    number = integer(value)
    if number is None or not 1 <= number < 2**63:
        change = "It is a number of positions per block."
        raise spec_error(f"intervals {name}", described(value), "a 64-bit int, 1 or more", change)
    return number


def _check_alignment(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value in ("bottom_right", "top_left")):
        raise spec_error("alignment", described(value), "'bottom_right' or 'top_left'", "Name one.")


def is_strided(x: Tensor) -> bool:
    """Says whether a tensor is an ordinary one, with an address and a stride per dimension."""
    import torch

    return x.layout is torch.strided and not x.is_nested


def integer(value: Any) -> int | None:
    """An int, or what stands for one while torch.compile traces; None of a bool, a tensor and all else."""
    if type(value) is int:
        return value
    import torch

    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, (bool, torch.Tensor)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _with_heads(x: Tensor) -> Tensor:
    """(batch, heads, row_blocks, intervals, 2), from fewer leading dimensions."""
    return x[None, None] if x.ndim == 3 else x.unsqueeze(1) if x.ndim == 4 else x


def _runs_of(visible: Tensor, keys: int) -> Tensor:
    """Runs of True along the last dimension as int32 intervals in keys, (..., runs, 2); spare: (0, 0)."""
    import torch

    # 1 where a run starts, -1 where it ends
    edges = torch.nn.functional.pad(visible.int(), (1, 1)).diff(dim=-1)
    spare = (visible.shape[-1] + 1) // 2
    countable = type(visible) is torch.Tensor and visible.device.type == "cpu"
    if countable and visible.numel() and not torch.compiler.is_compiling():
        spare = int((edges == 1).sum(-1).max())
    spare = max(1, spare)
    far = 2**31 - 1  # an end may overhang, and no start beyond it is a key
    at = torch.arange(edges.shape[-1], device=visible.device) * min(keys, far)
    at = at.clamp(max=far).int()
    sides = []
    for sign in (1, -1):
        hit = edges == sign
        place = torch.where(hit, hit.cumsum(-1) - 1, spare)  # what is no edge goes to a slot that is cut off
        side = at.new_zeros((*visible.shape[:-1], spare + 1))
        sides.append(side.scatter_(-1, place, at.expand(hit.shape))[..., :spare])
    return torch.stack(sides, -1)


def checked_window(window: Window) -> Window:
    """Checks a window; a `SpecError` teaches the convention."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise spec_error("window", described(window), "(left, right)", "Use None for an unbounded side.")
    sides: list[int | None] = []
    for side, value in zip(("left", "right"), window, strict=True):
        if value is None:
            sides.append(None)
            continue
        number = integer(value)
        if number is None:
            change = "Use None for an unbounded side."
            raise spec_error(f"window {side}", described(value), "an int or None", change)
        if not 0 <= number < 2**63:
            change = "Use None for unbounded."
            raise spec_error(f"window {side}", described(value), "a 64-bit int >= 0, or None", change)
        sides.append(min(number, FAR_SIDE))
    left, right = sides
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


def block_range(first_row: int, last_row: int, block_n: int, interval: Interval) -> tuple[int, int]:
    """Key blocks [n_lo, n_hi) that rows first_row..last_row (inclusive) visit: bounds rise with the row.
    `interval` is `row_interval` but for the row."""
    lo, hi = interval(first_row)[0], interval(last_row)[1]
    return (lo // block_n, -(-hi // block_n)) if lo < hi else (0, 0)


def visible_pairs(
    seqlen_q: int, seqlen_k: int, *, offset: int, causal: bool, window: Window = (None, None)
) -> int:
    """Counts the visible (query, key) pairs in closed form: a sum over rows of clamped linear bounds."""
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
    same = a is b or (isinstance(a, (str, int)) and a == b)  # tensors by identity: == would read them
    if a is not None and b is not None and not same:
        change = "Masks joined by & and the arguments beside mask= hold together: make one of the two."
        raise spec_error(name, f"two different {name}", "one", change)
    return b if a is None else a
