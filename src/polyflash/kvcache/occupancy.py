"""Occupancy of a cache in numbers, and the choice of tokens that a request keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from polyflash.errors import described, spec_error
from polyflash.kvcache.handles import checked_count, is_ints
from polyflash.kvcache.pages import Pages


@dataclass(frozen=True)
class CacheStats:
    """A cache at one moment.

    Attributes:
        requests: living ones.
        tokens: of all requests, shared ones counted for each.
        stored_tokens: slots that hold a token of a request, a snapshot or a remembered prefix.
        pages: of the pool, `used_pages` + `remembered_pages` + `free_pages`.
        used_pages: of requests, snapshots and open steps.
        shared_pages: of two requests or more.
        remembered_pages: of remembered prefixes alone; a step takes them when no page is free.
        free_pages: nobody's.
        num_bytes: of the pools of all layers.
        used_bytes: of the used pages.
        tail_bytes: of the values that unfinished groups of codes keep beside the pools.
        fragmentation: share of slots in used pages that hold no token.
        evictions: remembered pages that were taken, ever."""

    requests: int
    tokens: int
    stored_tokens: int
    pages: int
    used_pages: int
    shared_pages: int
    remembered_pages: int
    free_pages: int
    num_bytes: int
    used_bytes: int
    tail_bytes: int
    fragmentation: float
    evictions: int


def occupancy(pages: Pages, num_bytes: int, tail_bytes: int) -> CacheStats:
    """Counts what an allocator holds, whose pages take `num_bytes` in all."""
    entries, snapshots, remembered, free, idle = pages.contents()
    filled: dict[int, int] = dict.fromkeys(remembered, pages.page_size)
    owners = Counter(page for entry in entries for page in entry.owned)
    for entry in (*entries, *snapshots):
        for column, page in enumerate(entry.pages):
            if page >= 0:
                held = min(entry.length - column * pages.page_size, pages.page_size)
                filled[page] = max(filled.get(page, 0), held)
    used = pages.num_pages - free - idle
    stored = sum(filled.values())
    empty = 1.0 - (stored - idle * pages.page_size) / (used * pages.page_size) if used else 0.0
    return CacheStats(
        requests=len(entries),
        tokens=sum(entry.length - entry.start for entry in entries),
        stored_tokens=stored,
        pages=pages.num_pages,
        used_pages=used,
        shared_pages=sum(n > 1 for n in owners.values()),
        remembered_pages=idle,
        free_pages=free,
        num_bytes=num_bytes,
        used_bytes=num_bytes // max(1, pages.num_pages) * used,
        tail_bytes=tail_bytes,
        fragmentation=empty,
        evictions=pages.evictions,
    )


def survivors(keep: Tensor, layers: int, heads: int, first: int, length: int) -> tuple[Tensor, int]:
    """Expands `keep` to int64 (num_layers, num_kv_heads, tokens), and counts the tokens that stay in place.

    Raises:
        SpecError: other shapes; places that do not rise, or are not those of tokens that are there."""
    forms = "(kept,), (num_layers, kept) or (num_layers, num_kv_heads, kept)"
    if not is_ints(keep) or not 1 <= keep.ndim <= 3 or keep.shape[:-1] != (layers, heads)[: keep.ndim - 1]:
        change = f"The cache has {layers} layers and {heads} kv heads."
        raise spec_error("keep", described(keep), f"int32 or int64 {forms}", change)
    places = keep.long()
    if keep.shape[-1]:
        low, high = (int(x) for x in places.aminmax())
        if low < first or high >= length or not bool((places.diff(dim=-1) > 0).all()):
            change = "Sort them; each token stays or goes."
            raise spec_error("keep", "others", f"places from {first} to {length - 1} that rise", change)
    moved = places != torch.arange(keep.shape[-1], device=keep.device)
    while moved.ndim > 1:
        moved = moved.any(0)
    same = int(moved.int().argmax()) if bool(moved.any()) else keep.shape[-1]
    places = places.view(*places.shape[:-1], *(1,) * (3 - keep.ndim), keep.shape[-1])
    return places.expand(layers, heads, -1), same


def heavy_hitters(sums: Tensor, keep: int, *, recent: int = 0) -> Tensor:
    """Picks the places to `keep` of each row of `sums` (..., tokens): the `recent` last ones, and of the
    others those that received most attention; int64 (..., keep), rising. Of equal ones the earlier stay.

    `sums` are `polyflash.column_sums`, added up over steps; for one per kv head sum its query heads.

    Raises:
        SpecError: no tensor of floats, more to keep than there are, or more recent ones than are kept."""
    if not isinstance(sums, Tensor) or not sums.is_floating_point() or sums.ndim < 1:
        raise spec_error("sums", described(sums), "floats (..., tokens)", "Pass what column_sums() gave.")
    tokens = sums.shape[-1]
    checked_count("keep", keep, 0, tokens)
    checked_count("recent", recent, 0, keep)
    ranked = sums[..., : tokens - recent].argsort(dim=-1, descending=True, stable=True)[..., : keep - recent]
    last = torch.arange(tokens - recent, tokens, device=sums.device).expand(*sums.shape[:-1], recent)
    return torch.cat((ranked.sort(-1).values, last), -1)
