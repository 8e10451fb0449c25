"""`Storage`: pools of pages for every layer, the requests that own them, and what is given back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Self

import torch
from torch import Tensor

from polyflash.errors import described, spec_error
from polyflash.kvcache.handles import Counts, Request, Requests, Snapshot, checked_count, listed, numbers
from polyflash.kvcache.layout import (
    PoolLayout,
    check_pools,
    empty_pool,
    ints,
    layers_of,
    moved,
    read_slots,
    slots_of,
    write_slots,
)
from polyflash.kvcache.occupancy import CacheStats, occupancy, survivors
from polyflash.kvcache.pages import Pages
from polyflash.kvcache.shared_prefix import Tables

Pools = Tensor | Sequence[Tensor]  # of every layer


class Storage:
    """A `KVCache` without steps and attention."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        num_layers: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        scrub: bool = False,
    ) -> None:
        width_v = head_dim if head_dim_v is None else head_dim_v
        checked_count("num_pages", num_pages, 0, 2**31 - 1)
        sizes = {"page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in (sizes | {"num_layers": num_layers, "head_dim_v": width_v}).items():
            checked_count(name, size, 1, 2**31 - 1)
        shape = (num_layers, num_pages, page_size, num_kv_heads)
        k, v = (empty_pool((*shape, width), dtype, device) for width in (head_dim, width_v))
        self._adopt(layers_of("k_pages", k, "NHD"), layers_of("v_pages", v, "NHD"), scrub)

    @classmethod
    def over(cls, k_pages: Pools, v_pages: Pools, *, layout: PoolLayout = "NHD", scrub: bool = False) -> Self:
        """Makes a cache over pools that exist already, all of whose pages it may use; nothing is copied.

        A pool is (num_pages, page_size, num_kv_heads, head_dim) as in vLLM and flash-attn, or with
        layout="HND" (num_pages, num_kv_heads, page_size, head_dim); any strides. Several layers: a sequence
        of pools, or one tensor with the layer first. Of FlashInfer's (num_pages, 2, ...) pass `kv[:, 0]` and
        `kv[:, 1]`, of vLLM's (2, num_blocks, ...) `kv[0]` and `kv[1]`.

        Raises:
            SpecError: pools that do not fit each other, or whose elements share addresses."""
        cache = cls.__new__(cls)
        k, v = layers_of("k_pages", k_pages, layout), layers_of("v_pages", v_pages, layout)
        cache._adopt(k, v, scrub)
        return cache

    def _adopt(self, k: tuple[Tensor, ...], v: tuple[Tensor, ...], scrub: bool) -> None:
        check_pools(k, v)
        self._k, self._v, self.num_layers, self._scrub = k, v, len(k), scrub
        self.num_pages, self.page_size = k[0].shape[:2]
        self._pages = Pages(self.num_pages, self.page_size)
        self.dtype, self.device = k[0].dtype, k[0].device
        self._like = (self.dtype, self.device, k[0].shape, v[0].shape)
        self._last: tuple[tuple[Request, ...], int, Tables] | None = None

    def __repr__(self) -> str:
        """Sizes and numbers, no keys."""
        k, v = self.k_pages[0], self.v_pages[0]
        widths = " and ".join(dict.fromkeys(str(x.shape[3]) for x in (k, v)))
        pools = f"{self.num_pages} pages of {self.page_size} tokens, {self.num_layers} layers"
        heads = f"{k.shape[2]} kv heads, head_dim {widths}, {self.dtype}, {self.device}"
        state = f"{len(self.requests())} requests, {self.num_free_pages} pages free"
        return f"{type(self).__name__}({pools}, {heads}; {state})"

    @property
    def k_pages(self) -> tuple[Tensor, ...]:
        """Per layer (num_pages, page_size, num_kv_heads, head_dim)."""
        return self._k

    @property
    def v_pages(self) -> tuple[Tensor, ...]:
        """Per layer (num_pages, page_size, num_kv_heads, head_dim_v)."""
        return self._v

    @property
    def num_free_pages(self) -> int:
        """Pages that a step may take: those nobody owns, and those that are only remembered (`remember`)."""
        return self._pages.num_free

    def requests(self) -> tuple[Request, ...]:
        """Every living request."""
        return self._pages.requests()

    def add(self, count: int = 1) -> tuple[Request, ...]:
        """Makes requests without tokens."""
        return self._pages.add(count)

    def fork(self, request: Request, count: int = 1) -> tuple[Request, ...]:
        """Makes requests that begin with all tokens of `request` and share its pages."""
        return self._pages.fork(request, count)

    def length(self, request: Request) -> int:
        return self._pages.length(request)

    def truncate(self, requests: Requests, lengths: Counts) -> None:
        """Keeps only the first `lengths[b]` tokens of each request, as after a rejected speculation."""
        with self._pages.lock:
            self._zero(self._pages.truncate(requests, lengths))

    def start(self, request: Request) -> int:
        """The first token that `free_left` has not given back."""
        return self._pages.entries([request])[0].start

    def position(self, request: Request) -> int:
        """Position of the next token: those there were before it, evicted ones included."""
        (entry,) = self._pages.entries([request])
        return entry.length + entry.evicted

    def stats(self) -> CacheStats:
        """Pages, tokens and bytes in use, and how full the pages are."""
        return occupancy(self._pages, sum(pool.nbytes for pool in (*self.k_pages, *self.v_pages)))

    def pages_needed(self, requests: Requests = (), counts: Counts = 1, *, new: Sequence[int] = ()) -> int:
        """Pages that `reserve(requests, counts)` would take now, copies of shared ones included; with
        requests that are not there yet, of `new[b]` tokens each. At most `num_free_pages` can be had.

        Raises:
            SpecError: what `reserve` refuses, but for too few pages."""
        return self._pages.needed(requests, counts, new)

    def free_left(self, requests: Requests, left: int) -> None:
        """Gives back the pages that no row from each request's last token on sees through a window of `left`
        neighbours: all tokens in them stand more than `left` before it.

        Lengths, places and positions stay, and the table has -1 there. From here on `attend` of such a
        request takes a window that ends before those tokens, and no `q_offset` or `kv_lens`."""
        with self._pages.lock:
            self._zero(self._pages.free_left(requests, left))

    def evict(self, request: Request, keep: Tensor) -> None:
        """Keeps only the tokens at the places `keep`, in their order, and moves them together.

        What a kept token is stays, bit for bit: its key is rotated to the position it had. What counts places
        counts the tokens that are left: `length`, causal order (every one is before the next token), windows,
        ALiBi, `kv_lens`, `kv_starts`, `truncate` (not below what was kept). Later tokens are rotated to the
        positions they would have had (`position`).

        Args:
            keep: rising int32 or int64 places, (kept,), (num_layers, kept) or (num_layers, num_kv_heads,
                kept): as many in every layer. Read, so on a device it synchronises.

        Raises:
            OutOfPages: others own pages that would be written, and too few are free; nothing was changed.
            SpecError: a step is open, or no such places."""
        with self._pages.lock:
            first, length = self.start(request), self.length(request)
            places, same = survivors(keep, self.num_layers, self.k_pages[0].shape[2], first, length)
            slots = self.slot_mapping(request, first)
            heads = torch.arange(places.shape[1], device=self.device)
            rows = []
            for layer, of_layer in enumerate(places.to(self.device)):
                at = slots[of_layer.transpose(0, 1) - first]
                page, slot = at // self.page_size, at % self.page_size
                rows.append([pool[page, slot, heads] for pool in self.pools(layer)])
            begin, left = self._pages.compact(request, places.shape[2], same)
            self._zero(left)
            slots = self.slot_mapping(request, begin)
            for layer, values in enumerate(rows):
                for pool, kept in zip(self.pools(layer), values, strict=True):
                    write_slots(pool, kept[begin:], slots)

    def remember(self, request: Request, tokens: Sequence[int] | Tensor, *, key: Hashable = None) -> int:
        """Makes the request's full pages findable by `begin`, also after the request has ended, until a
        step needs pages and none is free: then those that were unused for longest go.

        Args:
            tokens: the ids whose keys the request holds, from its first token on.
            key: whatever else its keys depend on, such as an adapter or an image; found with the same alone.

        Returns:
            Tokens in pages that can be found.

        Raises:
            SpecError: more tokens than the request has, or one of which some were evicted or given back."""
        return self._pages.remember(request, tokens, key)

    def cached_tokens(self, tokens: Sequence[int] | Tensor, *, key: Hashable = None) -> int:
        """Counts the tokens that a request of `begin(tokens, key=key)` would have now."""
        return len(self._pages.found(tokens, key)) * self.page_size

    def begin(self, tokens: Sequence[int] | Tensor, *, key: Hashable = None) -> Request:
        """Makes a request that shares the pages of the longest remembered prefix of `tokens`, without the
        last one, whose row is yet to be computed: append tokens[length(request):]."""
        return self._pages.begin(tokens, key)

    def forget(self) -> None:
        """Forgets all prefixes, as after a change of the weights."""
        with self._pages.lock:
            self._zero(self._pages.forget())

    def free(self, requests: Requests) -> None:
        """Ends the requests. Pages that others share stay theirs.

        Raises:
            SpecError: one of them is freed already, or named twice; none is freed then."""
        with self._pages.lock:
            self._zero(self._pages.free(requests))

    def page_table(self, requests: Requests) -> Tensor:
        """int32 (batch, max_pages) on the pool's device, -1 beyond a request's pages; later steps do not
        change it."""
        return self._tables(requests).page_table.clone()

    def kv_lens(self, requests: Requests) -> Tensor:
        """int32 (batch,) on the pool's device."""
        return self._tables(requests).kv_lens.clone()

    def slot_mapping(self, requests: Requests, starts: Counts = 0) -> Tensor:
        """int64 (total,) on the pool's device: slots of the tokens of each request from `starts[b]` on.

        Raises:
            SpecError: tokens that were given back, or more than there are."""
        tables = self._tables(requests)
        first = numbers("starts", starts, tables.lengths)
        for start, least, length in zip(first, tables.starts, tables.lengths, strict=True):
            checked_count("starts", start, least, length)
        rest = [length - start for start, length in zip(first, tables.lengths, strict=True)]
        return moved(slots_of(tables.host_table, self.page_size, first, rest)[0], self.device)

    def read(self, request: Request, *, layer: int = 0, start: int = 0) -> tuple[Tensor, Tensor]:
        """Copies a request's keys and values from the token `start` on, (tokens, num_kv_heads, head_dim)
        and (..., head_dim_v).

        Raises:
            SpecError: `free_left` has given some of them back."""
        slots = self.slot_mapping(request, start)
        k_pool, v_pool = self.pools(layer)
        return read_slots(k_pool, slots), read_slots(v_pool, slots)

    def snapshot(self) -> Snapshot:
        """Records every request as it is now. Holds its pages until `release`: the next append to each
        request copies its last page first, so that `restore` gives back the same bits."""
        return self._pages.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Makes every request what it was at the snapshot, which stays; those made since are gone."""
        with self._pages.lock:
            self._zero(self._pages.restore(snapshot))

    def release(self, snapshot: Snapshot) -> None:
        """Ends a snapshot."""
        with self._pages.lock:
            self._zero(self._pages.release(snapshot))

    def check(self) -> None:
        """Counts every page's owners anew.

        Raises:
            RuntimeError: an invariant is broken, which no sequence of calls may bring about."""
        self._pages.check()

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the pools of one layer, which must be what they were when the cache was made.

        Raises:
            SpecError: no such layer, or a pool has another dtype, device or shape by now."""
        checked_count("layer", layer, 0, self.num_layers - 1)
        k, v = self.k_pages[layer], self.v_pages[layer]
        if (k.dtype, k.device, k.shape, v.shape) != self._like or v.dtype is not k.dtype:
            wanted = f"{self.dtype} {tuple(self._like[2])} and {tuple(self._like[3])} on {self.device}"
            change = "Make a new cache instead."
            raise spec_error("k_pages, v_pages", f"{described(k)} and {described(v)}", wanted, change)
        return k, v

    def _tables(self, requests: Requests) -> Tables:
        """Tables of the committed state; those of the last call if nothing has moved since."""
        key = listed(requests)
        with self._pages.lock:
            last, version = self._last, self._pages.version
            if last is not None and last[0] == key and last[1] == version:
                return last[2]
            made = Tables.of(self._pages.entries(key), self.page_size, self.device)
            self._last = (key, version, made)
            return made

    def _zero(self, pages: list[int]) -> None:
        """Scrubs pages that are free; under the allocator's lock, before anyone can take them."""
        if not self._scrub or not pages:
            return
        ids = ints(pages, self.device, torch.int64)
        for pool in (*self.k_pages, *self.v_pages):
            pool.index_fill_(0, ids, 0)
