"""Packed members as batches: views of the members' rows and keys, nothing copied.

Neighbouring members of equal lengths are one batch, so a decode step costs one pass and not one per member.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from polyflash.spec import Arguments


class Run(NamedTuple):
    """`members` neighbours from `first` on: `rows` query rows each, from row `i0` on, and `keys` keys each,
    from key `j0` on."""

    first: int
    members: int
    i0: int
    rows: int
    j0: int
    keys: int

    def rows_of(self, x: Tensor) -> Tensor:
        """The members' part of (1, heads, total_q, ...), as a view (members, heads, rows, ...)."""
        return _batch(x, self.i0, self.members, self.rows)

    def keys_of(self, x: Tensor) -> Tensor:
        """The members' part of (1, heads, total_k, ...), as a view (members, heads, keys, ...)."""
        return _batch(x, self.j0, self.members, self.keys)

    def arguments(self, args: Arguments) -> Arguments:
        """The arguments of an unpacked call on these members."""
        own = slice(self.first, self.first + self.members)
        slopes = args.alibi_slopes
        return args._replace(
            kv_lens=None if args.kv_lens is None else args.kv_lens[own],
            kv_starts=None if args.kv_starts is None else args.kv_starts[own],
            q_offset=None if args.q_offset is None else args.q_offset[own],
            alibi_slopes=slopes if slopes is None or slopes.ndim == 1 else slopes[own],
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            max_seqlen_q=None,
            max_seqlen_k=None,
        )


def runs(args: Arguments, total_q: int, total_k: int) -> Iterator[Run]:
    """The members that have rows, in order. Bounds on a device are read, and clamped to the tensors."""
    if args.cu_seqlens_q is None:
        return
    rows = _spans(args.cu_seqlens_q.tolist(), total_q)
    # Keys in pages are packed nowhere: a member finds them by its line of the table.
    keys = [(0, 0)] * len(rows) if args.cu_seqlens_k is None else _spans(args.cu_seqlens_k.tolist(), total_k)
    run: Run | None = None
    for b, ((i0, i1), (j0, j1)) in enumerate(zip(rows, keys, strict=True)):
        if run is not None and (i1 - i0, j1 - j0) == (run.rows, run.keys):
            run = run._replace(members=run.members + 1)
            continue
        if run is not None and run.rows:
            yield run
        run = Run(b, 1, i0, i1 - i0, j0, j1 - j0)
    if run is not None and run.rows:
        yield run


def _spans(bounds: list[int], total: int) -> list[tuple[int, int]]:
    """Start and end of each member; bounds that fall or leave the tensor make members shorter."""
    spans, at = [], min(max(bounds[0], 0), total)
    for bound in bounds[1:]:
        end = min(max(bound, at), total)
        spans.append((at, end))
        at = end
    return spans


def _batch(x: Tensor, start: int, members: int, size: int) -> Tensor:
    part = x[0].narrow(1, start, members * size)
    return part.unflatten(1, (members, size)).transpose(0, 1)
