"""`Storage`: pools of pages for every layer, the requests that own them, and what is given back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from polyflash.errors import described, spec_error
from polyflash.kvcache.code_pools import CodePools, Quant, schemes_of
from polyflash.kvcache.handles import Counts, Request, Requests, Snapshot, checked_count, listed, numbers
from polyflash.kvcache.layout import (
    PoolLayout,
    check_pools,
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
from polyflash.likeness import Likeness
from polyflash.quant.tensor import KV, QuantizedTensor, dequantize
from polyflash.storages import empty_of_keys

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
        quant: Quant | None = None,
    ) -> None:
        width_v = head_dim if head_dim_v is None else head_dim_v
        checked_count("num_pages", num_pages, 0, 2**31 - 1)
        sizes = {"page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in (sizes | {"num_layers": num_layers, "head_dim_v": width_v}).items():
            checked_count(name, size, 1, 2**31 - 1)
        shape = (num_layers, num_pages, page_size, num_kv_heads)
        if quant is not None:
            parts = zip("KV", schemes_of(quant), (head_dim, width_v), strict=True)
            codes = tuple(CodePools(name, x, (*shape, width), dtype, device) for name, x, width in parts)
            self._adopt(codes[0].layers, codes[1].layers, scrub, codes)
            return
        k, v = (empty_of_keys((*shape, width), dtype, device) for width in (head_dim, width_v))
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

    def _adopt(
        self, k: tuple[KV, ...], v: tuple[KV, ...], scrub: bool, codes: tuple[CodePools, ...] = ()
    ) -> None:
        if not codes:
            check_pools(k, v)  # type: ignore[arg-type]
        self.codes, self._grouped = codes, any(x.group > 1 for x in codes)
        self._k, self._v, self.num_layers, self._scrub = k, v, len(k), scrub
        self.num_pages, self.page_size = k[0].shape[:2]
        self._pages = Pages(self.num_pages, self.page_size)
        self.dtype, self.device = k[0].dtype, k[0].device
        self._like = (self.dtype, self.device, k[0].shape, v[0].shape)
        self._last: tuple[tuple[Request, ...], int, Tables] | None = None
        self.writes = Likeness()  # of new tokens

    def __repr__(self) -> str:
        """Sizes and numbers, no keys."""
        k, v = self.k_pages[0], self.v_pages[0]
        widths = " and ".join(dict.fromkeys(str(x.shape[3]) for x in (k, v)))
        pools = f"{self.num_pages} pages of {self.page_size} tokens, {self.num_layers} layers"
        schemes = dict.fromkeys(f"{x.scheme.dtype} per {x.scheme.granularity}" for x in self.codes)
        kind = f"{self.dtype}{' as ' * bool(schemes)}{' and '.join(schemes)}"
        heads = f"{k.shape[2]} kv heads, head_dim {widths}, {kind}, {self.device}"
        heads += f", {self.bytes_per_token:.10g} bytes per token"
        state = f"{len(self.requests())} requests, {self.num_free_pages} pages free"
        return f"{type(self).__name__}({pools}, {heads}; {state})"

    @property
    def k_pages(self) -> tuple[Any, ...]:
        """Per layer (num_pages, page_size, num_kv_heads, head_dim): tensors, of codes `QuantizedTensor`s."""
        return self._k

    @property
    def v_pages(self) -> tuple[Any, ...]:
        """Per layer (num_pages, page_size, num_kv_heads, head_dim_v)."""
        return self._v

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in all layers: keys and values, or their codes and its part of the scales."""
        stores = (x for layer in range(self.num_layers) for x in self.stores(layer))
        return sum(x.element_size() * x.shape[1:].numel() for x in stores) / self.page_size

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
        with self._pages.lock:
            self._settled(request)
            return self._pages.fork(request, count)

    def length(self, request: Request) -> int:
        return self._pages.length(request)

    def truncate(self, requests: Requests, lengths: Counts) -> None:
        """Keeps only the first `lengths[b]` tokens of each request, as after a rejected speculation.

        In a cache of codes, those of a group that was full keep their codes; the next append to it codes them
        anew, from what the codes stand for."""
        with self._pages.lock:
            self._zero(self._pages.truncate(requests, lengths))
            for entry in self._pages.entries(listed(requests)) if self._grouped else ():
                if entry.length and self._pages.owners(entry.pages[-1]) == 1:
                    for pools in self.codes:
                        pools.shortened(entry.pages[-1], entry.length % self.page_size)

    def start(self, request: Request) -> int:
        """The first token that `free_left` has not given back."""
        return self._pages.entries([request])[0].start

    def position(self, request: Request) -> int:
        """Position of the next token: those there were before it, evicted ones included."""
        (entry,) = self._pages.entries([request])
        return entry.length + entry.evicted

    def stats(self) -> CacheStats:
        """Pages, tokens and bytes in use, and how full the pages are."""
        pools, tails = (*self.k_pages, *self.v_pages), sum(x.tail_bytes for x in self.codes)
        return occupancy(self._pages, sum(pool.nbytes for pool in pools), tails)

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
            SpecError: a step is open, or no such places; or tokens share scales, which would change."""
        if self._grouped:
            change = "Use schemes per token."
            raise spec_error("evict", "tokens that share scales", "a scale for each, to move it", change)
        with self._pages.lock:
            first, length = self.start(request), self.length(request)
            places, same = survivors(keep, self.num_layers, self.k_pages[0].shape[2], first, length)
            slots = self.slot_mapping(request, first)
            heads = torch.arange(places.shape[1], device=self.device)
            rows = []
            for layer, of_layer in enumerate(places.to(self.device)):
                at = slots[of_layer.transpose(0, 1) - first]
                page, slot = at // self.page_size, at % self.page_size
                rows.append([pool[page, slot, heads] for pool in self.stores(layer)])
            begin, left = self._pages.compact(request, places.shape[2], same)
            self._zero(left)
            slots = self.slot_mapping(request, begin)
            for layer, values in enumerate(rows):
                for pool, kept in zip(self.stores(layer), values, strict=True):
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
        return moved(slots_of(tables.host_table.numpy(), self.page_size, first, rest)[0], self.device)

    def read(self, request: Request, *, layer: int = 0, start: int = 0) -> tuple[Tensor, Tensor]:
        """Copies a request's keys and values from the token `start` on, (tokens, num_kv_heads, head_dim)
        and (..., head_dim_v); of codes what they stand for.

        Raises:
            SpecError: `free_left` has given some of them back."""
        slots = self.slot_mapping(request, start)
        k, v = self.pools(layer)
        if self.codes:
            first = start // self.page_size * self.page_size
            k, v = (dequantize(x)[0, start - first :] for x in self.read_codes(request, layer, first))
            return k, v
        return read_slots(k, slots), read_slots(v, slots)

    def read_codes(self, request: Request, layer: int = 0, start: int = 0) -> tuple[QuantizedTensor, ...]:
        """Copies a request's codes of keys and values from the token `start`, the first of a page, on:
        `QuantizedTensor`s (1, tokens, num_kv_heads, channels) of a cache made with `quant=`."""
        self._settled(request)
        checked_count("layer", layer, 0, self.num_layers - 1)
        tables, found = self._tables(request), []
        tokens = tables.lengths[0] - checked_count("start", start, tables.starts[0], tables.lengths[0])
        for pools in self.codes:
            size, number = pools.group, -(-tokens // pools.group)
            at, _ = slots_of(tables.host_table.numpy(), self.page_size // size, [start // size], [number])
            found.append(pools.sequence(pools.take(layer, moved(at, self.device)), tokens))
        return tuple(found)

    def snapshot(self) -> Snapshot:
        """Records every request as it is now. Holds its pages until `release`: the next append to each
        request copies its last page first, so that `restore` gives back the same bits."""
        with self._pages.lock:
            self._settled(self.requests())
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

    def pools(self, layer: int) -> tuple[Any, Any]:
        """Returns the pools of one layer, which must be what they were when the cache was made.

        Raises:
            SpecError: no such layer, or a pool has another dtype, device or shape by now."""
        checked_count("layer", layer, 0, self.num_layers - 1)
        k, v = self.k_pages[layer], self.v_pages[layer]
        if self.codes:  # are the cache's own
            return k, v
        if (k.dtype, k.device, k.shape, v.shape) != self._like or v.dtype is not k.dtype:
            wanted = f"{self.dtype} {tuple(self._like[2])} and {tuple(self._like[3])} on {self.device}"
            change = "Make a new cache instead."
            raise spec_error("k_pages, v_pages", f"{described(k)} and {described(v)}", wanted, change)
        return k, v

    def stores(self, layer: int) -> tuple[Tensor, ...]:
        """The tensors that hold one layer, (num_pages, slots, num_kv_heads, width) each: of codes also those
        of scales and shifts."""
        if self.codes:
            return tuple(x for pools in self.codes for x in pools.stores[layer])
        return self.pools(layer)

    def _settled(self, requests: Requests) -> None:
        """Checks that no step is writing codes of these requests' tokens anew."""
        if self._grouped:
            self._pages.check_settled(listed(requests))

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
        for pools in self.codes:
            pools.forget(pages)
        if not self._scrub or not pages:
            return
        ids = ints(pages, self.device, torch.int64)
        for pool in (x for layer in range(self.num_layers) for x in self.stores(layer)):
            pool.index_fill_(0, ids, 0)
