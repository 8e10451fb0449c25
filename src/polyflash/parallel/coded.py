"""Codes of K and V as rows of bytes, which travel as any rows do: of each token its codes, scales and shifts.

Scales that tokens share are repeated for each of them; where that takes as many bytes as values do, values
travel. Whoever reads rows decodes them first."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyflash.quant import codec
from polyflash.quant.scheme import KINDS, Block, Codes
from polyflash.quant.tensor import KV, QuantizedTensor


class Rows(NamedTuple):
    """How to read a token's bytes: `codes` has a scale per token, `stored` bytes of codes, then `scales` and
    `shifts` in the dtype of tables. `kind` is the dtype of `width` values."""

    codes: Codes
    stored: int
    scales: int
    shifts: int
    kind: torch.dtype
    width: int

    @property
    def bytes(self) -> int:
        """Bytes of a token of one head."""
        return self.stored + codec.table_dtype(self.codes).itemsize * (self.scales + self.shifts)


def as_rows(x: KV, kind: torch.dtype) -> tuple[Tensor, Rows | None]:
    """(batch, heads, seqlen, bytes), uint8, and how to read it; values as they are, those of codes in `kind`
    where codes are no shorter."""
    if not isinstance(x, QuantizedTensor):
        return x, None
    form, (_, _, tokens, stored) = x.form, x.codes.shape
    tables = []
    for table, block in ((x.scale, form.scale), (x.shift, form.shift)):
        if table is not None and block is not None:
            each = codec.spread(table, Block(block.tokens, 1), (0, 0, tokens, 0))
            tables.append(each.expand(-1, -1, tokens, -1))
    per_token = form._replace(
        scale=Block(1, form.scale.channels),
        shift=None if form.shift is None else Block(1, form.shift.channels),
    )
    counts = [table.shape[3] for table in tables]
    rows = Rows(per_token, stored, counts[0], sum(counts[1:]), kind, stored * form.packed)
    if rows.bytes >= rows.width * kind.itemsize:
        return x.values(kind), None
    parts = (y.contiguous().view(torch.uint8) for y in (x.codes, *tables))
    return torch.cat(list(parts), 3), rows


def values_of(x: Tensor, rows: Rows | None) -> Tensor:
    """The values of rows as they travelled, (batch, heads, seqlen, head_dim)."""
    if rows is None:
        return x
    kind = codec.table_dtype(rows.codes)
    sizes = rows.stored, kind.itemsize * rows.scales, kind.itemsize * rows.shifts
    code, scale, shift = (part.contiguous() for part in x.split(sizes, 3))
    code = code.view(getattr(torch, KINDS[rows.codes.dtype].storage))
    shifts = shift.view(kind) if rows.shifts else None
    return codec.decode(code, scale.view(kind), shifts, rows.codes, rows.kind)
