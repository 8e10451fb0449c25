"""Sums of what several calls have for the same rows: made in float32, rounded once, few passes over memory.

Parts are kept as they come, in 16 bits where a kernel hands over such, and added up where the sum is read: of
two ranks most elements have one part or two, and then no float32 copy of them is ever made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from polyflash.merging import add_into
from polyflash.parallel.comm import in_words
from polyflash.parallel.schedule import Span

MOST_PARTS = 3


def sums_of(q: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


class Sum:
    """A sum over parts that have some heads and rows of (batch, heads, rows, head_dim) each, in the order in
    which they came; 0 where there is none. Up to `most` that meet in an element are kept as they come."""

    def __init__(self, like: Tensor, most: int = MOST_PARTS) -> None:
        self._like, self._most = like, most
        self._total: Tensor | None = None
        self._parts: list[tuple[Tensor, Span, Span]] = []

    def add(self, part: Tensor, head: int = 0, row: int = 0) -> None:
        """Adds a part, whose first head and row are given. It is kept, and not to be written to any more."""
        heads, rows = (head, head + part.shape[1]), (row, row + part.shape[2])
        if self._total is not None:
            self._total[:, slice(*heads), slice(*rows)] += part
            return
        deep = sum(_meet(heads, h) and _meet(rows, r) for _, h, r in self._parts)
        self._parts.append((part, heads, rows))
        if deep >= self._most:
            like, parts = self._like, self._parts
            total = like.new_zeros(like.shape, dtype=sums_of(like))
            for x, of_heads, of_rows in parts:
                total[:, slice(*of_heads), slice(*of_rows)] += x
            self._total, self._parts = total, [(total, (0, like.shape[1]), (0, like.shape[2]))]

    def read(self, into: Tensor, head: int = 0, row: int = 0) -> None:
        """Writes the sum of as many heads and rows as `into` has, from given ones on; it may be a part."""
        heads, rows = (head, head + into.shape[1]), (row, row + into.shape[2])
        parts = sorted(self._parts, key=lambda part: part[0] is not into)
        for h0, h1 in pairwise(_cuts(heads, [part[1] for part in parts])):
            for r0, r1 in pairwise(_cuts(rows, [part[2] for part in parts])):
                found = [
                    x[:, h0 - h[0] : h1 - h[0], r0 - r[0] : r1 - r[0]]
                    for x, h, r in parts
                    if h[0] <= h0 < h1 <= h[1] and r[0] <= r0 < r1 <= r[1]
                ]
                place = into[:, h0 - head : h1 - head, r0 - row : r1 - row]
                _add(found, place, bool(parts) and parts[0][0] is into)

    def part(self, row: int, count: int) -> Tensor | None:
        """So many rows of a part that has all heads of them, where they are the sum."""
        met = [(x, h, r) for x, h, r in self._parts if _meet(r, (row, row + count))]
        whole = (0, self._like.shape[1])
        if len(met) != 1 or met[0][1] != whole or met[0][0].dtype is not self._like.dtype:
            return None
        x, _, (start, end) = met[0]
        return x.narrow(2, row - start, count) if start <= row and row + count <= end else None

    @property
    def is_narrow(self) -> bool:
        """Does no element have two parts, and none one of a wider dtype than what this is like?"""
        parts = self._parts
        alike = self._total is None and all(x.dtype is self._like.dtype for x, _, _ in parts)
        return alike and not any(
            _meet(h, other_h) and _meet(r, other_r)
            for i, (_, h, r) in enumerate(parts)
            for _, other_h, other_r in parts[:i]
        )

    def finish(self) -> None:
        """Writes the whole sum into what it is like, and keeps no part."""
        self.read(self._like)
        self._parts.clear()

    def whole(self) -> Tensor:
        """The sum, of the dtype of what it is like, in the memory of a part that has all heads and rows, if
        there is one; a single part may be most of what lies there."""
        like = self._like
        if len(self._parts) == 1 and self._parts[0][0].shape == like.shape:
            only = self._parts[0][0]
            if only.dtype is like.dtype and only.nbytes * 4 >= only.untyped_storage().nbytes() * 3:
                return only
        alike = (x for x, _, _ in self._parts if x.shape == like.shape and x.dtype is like.dtype)
        into = next((x for x in alike if x.nbytes == x.untyped_storage().nbytes()), None)
        into = torch.empty_like(like) if into is None else into
        self.read(into)
        return into

    def pour(self, into: Sum, head: int, row: int, rows: Span | None = None) -> None:
        """Adds all parts, or these rows of them, to a sum whose `head` and `row` are the first ones here."""
        for part, (h, _), (start, end) in self._parts:
            first, last = (start, end) if rows is None else (max(start, rows[0]), min(end, rows[1]))
            if first < last:
                at = row + first - (0 if rows is None else rows[0])
                into.add(part[:, :, first - start : last - start], head + h, at)


def _meet(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _cuts(span: Span, others: Sequence[Span]) -> list[int]:
    """The bounds of a span, and those of others within it."""
    return sorted({*span, *(x for other in others for x in other if span[0] < x < span[1])})


def _add(parts: list[Tensor], into: Tensor, inside: bool) -> None:
    """Their sum, rounded where it is written; `inside`: that is where the first of them is."""
    if len(parts) < 2 or into.element_size() > 2:
        if not parts:
            into.zero_()
        elif not inside:
            alike = parts[0].dtype is into.dtype and into.stride(1) > into.stride(2)
            place, part = in_words([into, parts[0]]) if alike else (into, parts[0])
            place.copy_(part)
        for x in parts[1:]:
            into += x
        return
    add_into(into, parts)
