"""One step: room for new tokens, which every layer writes before the lengths of requests advance."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyflash.errors import UnsupportedError, described, spec_error
from polyflash.kvcache.handles import Reservation
from polyflash.kvcache.layout import check_tokens, moved, slots_of, write_slots
from polyflash.kvcache.rope import Rope
from polyflash.kvcache.shared_prefix import Tables

if TYPE_CHECKING:
    from polyflash.kvcache.cache import KVCache


class Step:
    """`counts[b]` new tokens of `requests[b]`, reserved but not there yet.

    Tokens of all requests are concatenated: total = sum(counts) rows of k, v and q. Used as a context, a step
    commits at the end of the block. If an exception leaves the block, the cache is as before: what was
    written lies where no length reaches. Until the step ends, its requests can be read (as before the step)
    and forked, but not changed. One thread at a time may use a step."""

    def __init__(self, cache: KVCache, reservation: Reservation, tables: Tables) -> None:
        self.cache = cache
        self._reservation = reservation
        self._written: set[int] = set()
        self.tables = tables  # those of the requests with the new tokens
        self.requests, self.counts = reservation.requests, reservation.counts
        starts, counts = reservation.starts, reservation.counts
        slots, positions = slots_of(tables.host_table, tables.page_size, starts, counts)
        if any(reservation.evicted):
            ahead, each = (torch.tensor(x, device="cpu") for x in (reservation.evicted, counts))
            positions = positions + ahead.repeat_interleave(each)
        self.slot_mapping = moved(slots, tables.device)
        self.positions = moved(positions, tables.device)

    @property
    def open(self) -> bool:
        return self._reservation.open

    def has_written(self, layer: int) -> bool:
        """Says whether this layer has written its tokens."""
        return layer in self._written or not self.slot_mapping.shape[0]

    def write(
        self, k: Tensor, v: Tensor, *, layer: int = 0, rope: Rope | None = None,
        positions: Tensor | None = None, q: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Writes the new tokens of one layer to their slots: k (total, num_kv_heads, head_dim) and v (total,
        num_kv_heads, head_dim_v), of the pool's dtype.

        With `rope`, k is rotated as it is written, and q (total, num_q_heads, head_dim) is returned rotated.
        `positions`, int32 or int64 (total,), are those to rotate by; default the tokens' places in their
        requests, and what was evicted before them. q without `rope` comes back as it is.

        Raises:
            SpecError: the step has ended, there is no such layer, or a tensor does not fit.
            UnsupportedError: a tensor needs a gradient, which ends at the pool."""
        self._check_open()
        k_pool, v_pool = self.cache.pools(layer)
        total = int(self.slot_mapping.shape[0])
        check_tokens("k", k, k_pool, total)
        check_tokens("v", v, v_pool, total)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (k, v, q)):
            told = "a cache is for inference, and one needs a gradient. Use no_grad()"
            raise UnsupportedError(f"k, v, q: {told}")
        with torch.no_grad():
            if rope is not None:
                if not isinstance(rope, Rope):
                    raise spec_error("rope", described(rope), "a Rope", "Make one of base or tables.")
                at = self.positions if positions is None else positions
                q = None if q is None else rope.rotate(q, at)
                k = rope.rotate(k, at)
            write_slots(k_pool, k, self.slot_mapping)
            write_slots(v_pool, v, self.slot_mapping)
        self._written.add(layer)
        return q

    def commit(self) -> None:
        """Makes the tokens part of their requests.

        Raises:
            SpecError: the step has ended, or a layer has not written its tokens; the step stays open then."""
        self._check_open()
        missing = [n for n in range(self.cache.num_layers) if not self.has_written(n)]
        if missing:
            change = "Call write() once for every layer."
            raise spec_error("commit", f"nothing from layer {missing[0]}", "tokens of every layer", change)
        self.cache.end_step(self._reservation, self.tables)

    def rollback(self) -> None:
        """Takes the step back and frees its pages. A step that has ended stays as it is."""
        if self.open:
            self.cache.end_step(self._reservation, None)

    def __enter__(self) -> Step:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.open:
                self.commit()
        finally:
            self.rollback()

    def _check_open(self) -> None:
        if not self.open:
            change = "Call reserve() for the next tokens."
            raise spec_error("step", "one that has ended", "an open one", change)
