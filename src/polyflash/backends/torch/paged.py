"""Keys in pages, gathered one tile at a time: the memory is that of a tile, however long the requests are.

Key j of batch entry b stands in page table[b, j // page_size], slot j % page_size. A tile of gathered keys is
the tile that contiguous keys would give, so the results have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys or values of some batch entries, where others have a tensor (b, Hkv, seqlen_k, channels)."""

    pool: Tensor  # (num_pages, Hkv, page_size, channels), any strides
    table: Tensor  # int32 (b, max_pages)
    live: int | None = (
        None  # entries of the table beyond so many keys are not looked at; None: not known here
    )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        _, num_kv_heads, page_size, channels = self.pool.shape
        entries, max_pages = self.table.shape
        return entries, num_kv_heads, max_pages * page_size, channels

    def of(self, first: int, entries: int, kv_len: int | Tensor) -> Pages:
        """The pages of batch entries [first, first + entries), of which each has `kv_len` live keys."""
        live = kv_len if isinstance(kv_len, int) else None
        return replace(self, table=self.table[first : first + entries], live=live)

    def tile(self, start: int, size: int, kind: torch.dtype) -> Tensor:
        """Keys [start, start + size), contiguous (b, Hkv, size, channels) of `kind`; zeros where no live key
        is, and the keys of some page where an entry is outside the pool."""
        entries, num_kv_heads, seqlen_k, channels = self.shape
        lo, hi = max(start, 0), min(start + size, seqlen_k if self.live is None else self.live)
        if hi <= lo or self.pool.shape[0] == 0:
            return self.pool.new_zeros((entries, num_kv_heads, size, channels), dtype=kind)
        ids, begin = self._ids(lo, hi)
        pages = self.pool[ids.clamp(0, self.pool.shape[0] - 1)]
        keys = pages.transpose(1, 2).flatten(2, 3)[:, :, lo - begin : hi - begin]
        return F.pad(keys.to(kind), (0, 0, lo - start, start + size - hi)).contiguous()

    def mapped(self, start: int, size: int) -> Tensor | None:
        """Finds which of the keys [start, start + size) stand in a page of the pool, (b, 1, 1, 1, size); None
        if all do. Those that no request has live count as mapped."""
        lo, hi = max(start, 0), min(start + size, self.shape[2] if self.live is None else self.live)
        if hi <= lo:
            return None
        ids, begin = self._ids(lo, hi)
        inside = (ids >= 0) & (ids < self.pool.shape[0])
        if ids.device.type == "cpu" and bool(inside.all()):
            return None
        keys = inside.repeat_interleave(self.pool.shape[2], 1)[:, lo - begin : hi - begin]
        keys = F.pad(keys, (lo - start, start + size - hi), value=True)
        return keys[:, None, None, None, :]

    def _ids(self, lo: int, hi: int) -> tuple[Tensor, int]:
        """The table's entries, int64 (b, pages), for keys [lo, hi), and the first key of the first page."""
        page_size = self.pool.shape[2]
        first, end = lo // page_size, -(-hi // page_size)
        return self.table[:, first:end].long(), first * page_size
