"""Attention over the pages of several requests: in one call, or with their shared pages read once for all.

    out = merge(attention(all rows, shared pages), attention(rows of b, pages of b alone))

The rows of all requests are one tall tile over the shared pages, which are read once instead of once per
request (Juravsky et al., Hydragen, 2024; cascade inference of FlashInfer, 2024)."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from polyflash.api import attention_paged
from polyflash.arguments import Causal, int32_of
from polyflash.errors import described, spec_error
from polyflash.kvcache.handles import Entry
from polyflash.kvcache.layout import ints, moved
from polyflash.mask import checked_window
from polyflash.merging import AttentionOutput, merge_rows
from polyflash.quant.tensor import KV
from polyflash.results import outputs
from polyflash.spec import PACKED_ROWS
from polyflash.validate import check_out


@dataclass(frozen=True, eq=False)
class Tables:
    """The pages of some requests: int32 `page_table` (batch, max_pages) and `kv_lens` (batch,) on the pool's
    device, and the same on the host."""

    host_table: Tensor
    lengths: tuple[int, ...]
    page_size: int
    device: torch.device
    starts: tuple[int, ...] = ()  # first tokens that were not given back
    plans: dict[tuple[object, ...], AttendPlan] = field(default_factory=dict)  # of calls on these tables
    _bounds: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _parts: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(entries: Sequence[Entry], page_size: int, device: torch.device) -> Tables:
        """The tables of what is known of some requests."""
        longest = max((len(entry.pages) for entry in entries), default=0)
        pages = array("i")
        for entry in entries:
            pages += entry.pages + array("i", (-1,)) * (longest - len(entry.pages))
        table = ints(pages, torch.device("cpu")).view(len(entries), longest)
        lengths, starts = tuple(e.length for e in entries), tuple(e.start for e in entries)
        return Tables(table, lengths, page_size, device, starts)

    @cached_property
    def page_table(self) -> Tensor:
        return moved(self.host_table, self.device)

    @cached_property
    def kv_lens(self) -> Tensor:
        return ints(self.lengths, self.device)

    def bounds(self, counts: Sequence[int]) -> Tensor:
        """int32 (len(counts) + 1,) on the device: where the rows of each begin, made once for all layers."""
        found = self._bounds.get(key := tuple(counts))
        if found is None:
            found = self._bounds[key] = ints([0, *itertools.accumulate(key)], self.device)
        return found

    def parted(self, pages: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tables and lengths of the first `pages` of the first request, and of all requests' other pages:
        made once for all layers."""
        parts = self._parts.get(pages)
        if parts is None:
            keys, table = pages * self.page_size, self.page_table
            length = torch.full((1,), keys, dtype=torch.int32, device=self.device)
            parts = table[:1, :pages], length, table[:, pages:], self.kv_lens - keys
            self._parts[pages] = parts
        return parts

    @cached_property
    def common_pages(self) -> int:
        """Leading pages that stand at the same place in every request's table, full or not."""
        if not self.lengths:
            return 0
        fewest = -(-min(self.lengths) // self.page_size)
        same = (self.host_table[:, :fewest] == self.host_table[:1, :fewest]).all(0)
        return fewest if bool(same.all()) else int(same.int().argmin())


@dataclass(frozen=True)
class AttendPlan:
    """A description of what `KVCache.attend` does for a call. It prints itself.

    `shared_keys` are the keys in the `shared_pages` that are read once for all requests; `keys` are those
    read per key/value head, shared ones once."""

    requests: int
    rows: int
    cascade: bool
    shared_pages: int
    shared_keys: int
    keys: int
    reason: str

    def __str__(self) -> str:
        if not self.cascade:
            return f"one call: {self.rows} rows of {self.requests} requests, {self.keys} keys. {self.reason}"
        own = self.keys - self.shared_keys
        return (
            f"cascade: {self.rows} rows over {self.shared_keys} keys in {self.shared_pages} shared pages, "
            f"then {own} keys of {self.requests} requests, merged. {self.reason}"
        )


def planned(
    tables: Tables, counts: Sequence[int], cascade: bool, causal: Causal, given: dict[str, object]
) -> AttendPlan:
    """The plan of a call; `given` are the arguments beside which nothing can be shared, None if absent. Reads
    host numbers only."""
    if type(causal) is not bool and causal not in ("bottom_right", "top_left"):
        change = "True aligns a request's last row with its last key."
        raise spec_error("causal", described(causal), "True, False, 'bottom_right' or 'top_left'", change)
    if any(tables.starts):
        _check_seen(tables, counts, causal, given)
    present = [name for name, x in given.items() if x is not None and x != (None, None)]
    key = (*counts, bool(cascade), causal, *present)
    if key not in tables.plans:
        pages, reason = _shared(tables, counts, cascade, causal, present)
        batch, shared = len(tables.lengths), pages * tables.page_size
        keys = sum(tables.lengths) - shared * max(0, batch - 1)
        tables.plans[key] = AttendPlan(batch, sum(counts), pages > 0, pages, shared, keys, reason)
    return tables.plans[key]


def _check_seen(tables: Tables, counts: Sequence[int], causal: Causal, given: dict[str, object]) -> None:
    """Checks that no row sees a token that was given back."""
    far = [name for name in ("q_offset", "kv_lens") if given[name] is not None]
    if far or causal == "top_left":
        name, change = (far or ["causal"])[0], "Their rows stand at the end of each request."
        raise spec_error(name, "one", "none after free_left()", change)
    window: Any = given["window"]
    left = None if window is None else checked_window(window)[0]
    for start, length, rows in zip(tables.starts, tables.lengths, counts, strict=True):
        if start and rows and (left is None or length - rows - left < start):
            got, change = left, f"free_left() gave the first {start} tokens of the request back."
            raise spec_error("window", got, f"at most {length - rows - start} neighbours on the left", change)


def _shared(
    tables: Tables, counts: Sequence[int], cascade: bool, causal: Causal, present: list[str]
) -> tuple[int, str]:
    """Counts the leading pages to read once, which every row of every request sees whole, and says why."""
    if not cascade:
        return 0, "cascade was not asked for."
    if len(tables.lengths) < 2:
        return 0, "Fewer than two requests."
    seen = [n - rows + 1 if causal and rows else n for n, rows in zip(tables.lengths, counts, strict=True)]
    pages = min(tables.common_pages, max(0, min(seen)) // tables.page_size)
    if not pages:
        return 0, "No full page is shared by all requests and seen by all rows."
    if causal == "top_left":
        return 0, "top_left counts from a request's first key, so rows do not see all of a prefix."
    if present:
        return 0, f"{present[0]} counts from a request's own keys, so no row is like another."
    return pages, f"All of them share their first {pages} pages."


Pools = tuple[KV, KV]  # of keys and of values
_OF_BOTH_PARTS = ("softcap", "scale", "batch_invariant", "backend", "checked")


def attend(
    q: Tensor, pools: Pools, tables: Tables, counts: Sequence[int], plan: AttendPlan, options: dict[str, Any]
) -> Tensor | AttentionOutput:
    """Attention of q (rows, num_q_heads, head_dim), `counts[b]` rows of each request concatenated, over its
    pages, as `plan` says. `options` are the arguments of `KVCache.attend` that `attention_paged` takes
    too."""
    bounds, most = None, None
    if any(n != 1 for n in counts):
        bounds, most = tables.bounds(counts), max(counts)
    rows: dict[str, Any] = {"cu_seqlens_q": bounds, "max_seqlen_q": most}
    if not plan.cascade:
        lens = _shortened(tables.kv_lens, options["kv_lens"], options["checked"])
        rows |= {name: x for name, x in options.items() if name != "kv_lens"}
        return cast("Tensor", attention_paged(q, *pools, tables.page_table, lens, **rows))
    out, return_lse, channels = options["out"], options["return_lse"], pools[1].shape[3]
    if out is not None:  # nothing is launched for a place that cannot take the result
        if not isinstance(out, Tensor) or out.ndim != 3:
            wanted = f"a tensor ({q.shape[0]}, {q.shape[1]}, {channels})"
            raise spec_error("out", described(out), wanted, "Use torch.empty().")
        check_out(out.transpose(0, 1)[None], q.transpose(0, 1)[None], channels)
    rows |= {name: options[name] for name in ("causal", "sinks")}  # of this part alone: sinks count once
    common = {name: options[name] for name in _OF_BOTH_PARTS}
    shared_table, shared_length, own_table, own_lens = tables.parted(plan.shared_pages)
    prefix = _over_prefix(q, pools, shared_table, shared_length, tables, common)
    rows |= common
    rest: AttentionOutput = attention_paged(q, *pools, own_table, own_lens, return_lse=True, **rows)
    merged, lse = merge_rows(prefix, rest, need_lse=return_lse)
    if out is None:
        like = q.to(pools[1].dtype).transpose(0, 1)[None]
        out = outputs(like, pools[1].shape[3], False)[0][0].transpose(0, 1)
    result = out.copy_(merged)
    return AttentionOutput(result, cast("Tensor", lse)) if return_lse else result


def _shortened(lens: Tensor, kv_lens: object, checked: bool) -> Tensor:
    """The lengths of requests, or the caller's where they are shorter: what no length reaches is not read."""
    if kv_lens is None:
        return lens
    given = int32_of("kv_lens", kv_lens, checked) if isinstance(kv_lens, Tensor) else kv_lens
    if not isinstance(given, Tensor) or given.shape != lens.shape or given.dtype != lens.dtype:
        change = "One length per request."
        raise spec_error("kv_lens", described(given), f"int32 or int64 ({lens.shape[0]},)", change)
    return torch.minimum(lens, given)


def _over_prefix(
    q: Tensor, pools: Pools, table: Tensor, length: Tensor, tables: Tables, options: dict[str, Any]
) -> AttentionOutput:
    """Attends all rows to the keys of one table, int32 (1, pages), `length` (1,). Every row sees every key,
    so a few rows are as good as query heads of one token, whose kernel walks the keys once at memory
    speed."""
    rows, heads, head_dim = q.shape
    group = heads // max(1, pools[0].shape[2])
    if rows * group > PACKED_ROWS:
        options = options | {"cu_seqlens_q": tables.bounds((rows,)), "max_seqlen_q": rows}
        packed: AttentionOutput = attention_paged(q, *pools, table, length, return_lse=True, **options)
        return packed
    one = q.transpose(0, 1).reshape(1, heads * rows, head_dim)
    out, lse = attention_paged(one, *pools, table, length, return_lse=True, **options)
    return AttentionOutput(out.view(heads, rows, -1).transpose(0, 1), lse.view(heads, rows))
