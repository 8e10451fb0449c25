"""`KVCache`: pools of pages for every layer, and the requests whose keys and values stand in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from polyflash.arguments import Causal
from polyflash.errors import described, spec_error
from polyflash.kvcache import shared_prefix
from polyflash.kvcache.layout import (
    PoolLayout,
    check_pools,
    copy_pages,
    empty_pool,
    ints,
    layers_of,
    moved,
    read_slots,
    slots_of,
)
from polyflash.kvcache.pages import (
    Counts,
    Pages,
    Request,
    Requests,
    Reservation,
    Snapshot,
    checked_count,
    listed,
    numbers,
)
from polyflash.kvcache.rope import Rope
from polyflash.kvcache.shared_prefix import AttendPlan, Tables
from polyflash.kvcache.step import Step
from polyflash.merging import AttentionOutput


@dataclass(frozen=True, eq=False)
class SwappedRequest:
    """The tokens of a request outside of the pool, on the CPU: k (num_layers, tokens, num_kv_heads, head_dim)
    and v likewise."""

    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return int(self.k.shape[1])


class KVCache:
    """Keys and values of many requests in pages of one pool per layer, on any device (default: torch's own).

        cache = KVCache(1024, 16, num_kv_heads=8, head_dim=128, num_layers=32, dtype=torch.bfloat16)
        (request,) = cache.add()
        with cache.reserve(request, 1) as step:
            for layer in range(32):
                q, k, v = ...                            # (1, heads, head_dim) each
                q = step.write(k, v, layer=layer, rope=Rope(), q=q)
                out = cache.attend(q, step, layer=layer)

    Requests may share pages (`fork`); whoever writes to a page that others read gets a copy first. Every
    method changes all it says or nothing, and may be called from any thread, for different requests at the
    same time. On a device, work is ordered by the current stream as that of any torch op; who uses several
    streams orders them by events.

    `scrub=True` fills pages that nobody owns any more with zeros. Without it their bits stay until they are
    written again; no attention can see them.
    """

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
        sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "num_layers": num_layers}
        for name, size in (*sizes.items(), ("head_dim_v", head_dim if head_dim_v is None else head_dim_v)):
            checked_count(name, size, 1, 2**31 - 1)
        pages = Pages(num_pages, page_size)
        shape = (num_layers, num_pages, page_size, num_kv_heads)
        k, v = (empty_pool((*shape, head_dim if n is None else n), dtype, device) for n in (None, head_dim_v))
        self._adopt(pages, layers_of("k_pages", k, "NHD"), layers_of("v_pages", v, "NHD"), scrub)

    @classmethod
    def over(
        cls,
        k_pages: Tensor | Sequence[Tensor],
        v_pages: Tensor | Sequence[Tensor],
        *,
        layout: PoolLayout = "NHD",
        scrub: bool = False,
    ) -> KVCache:
        """A cache over pools that exist already, all of whose pages it may use; nothing is copied.

        A pool is (num_pages, page_size, num_kv_heads, head_dim) as in vLLM and flash-attn, or with
        layout="HND" (num_pages, num_kv_heads, page_size, head_dim); any strides. Several layers: a sequence
        of pools, or one tensor with the layer first. Of FlashInfer's (num_pages, 2, ...) pass `kv[:, 0]` and
        `kv[:, 1]`, of vLLM's (2, num_blocks, ...) `kv[0]` and `kv[1]`.

        Raises:
            SpecError: pools that do not fit each other, or whose elements share addresses.
        """
        k, v = layers_of("k_pages", k_pages, layout), layers_of("v_pages", v_pages, layout)
        check_pools(k, v)
        cache = cls.__new__(cls)
        cache._adopt(Pages(k[0].shape[0], k[0].shape[1]), k, v, scrub)
        return cache

    def _adopt(self, pages: Pages, k: tuple[Tensor, ...], v: tuple[Tensor, ...], scrub: bool) -> None:
        check_pools(k, v)
        self._pages = pages
        self._k, self._v = k, v
        self._like = (k[0].dtype, k[0].device, k[0].shape, v[0].shape)
        self._scrub = scrub
        self._last: tuple[tuple[Request, ...], int, Tables] | None = None

    @property
    def k_pages(self) -> tuple[Tensor, ...]:
        """Per layer (num_pages, page_size, num_kv_heads, head_dim)."""
        return self._k

    @property
    def v_pages(self) -> tuple[Tensor, ...]:
        """Per layer (num_pages, page_size, num_kv_heads, head_dim_v)."""
        return self._v

    @property
    def num_layers(self) -> int:
        return len(self._k)

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def page_size(self) -> int:
        return self._pages.page_size

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    @property
    def dtype(self) -> torch.dtype:
        return self._like[0]

    @property
    def device(self) -> torch.device:
        return self._like[1]

    def requests(self) -> tuple[Request, ...]:
        """Every living request."""
        return self._pages.requests()

    def add(self, count: int = 1) -> tuple[Request, ...]:
        """New requests without tokens."""
        return self._pages.add(count)

    def fork(self, request: Request, count: int = 1) -> tuple[Request, ...]:
        """New requests that begin with all tokens of `request` and share its pages."""
        return self._pages.fork(request, count)

    def length(self, request: Request) -> int:
        return self._pages.length(request)

    def truncate(self, requests: Requests, lengths: Counts) -> None:
        """Only the first `lengths[b]` tokens of each request remain, as after a rejected speculation."""
        who = listed(requests)
        with self._pages.lock:
            self._zero(self._pages.truncate(who, numbers("lengths", lengths, who)))

    def free(self, requests: Requests) -> None:
        """Ends the requests. Pages that others share stay theirs.

        Raises:
            SpecError: one of them is freed already, or named twice; none is freed then.
        """
        with self._pages.lock:
            self._zero(self._pages.free(listed(requests)))

    def reserve(self, requests: Requests, counts: Counts = 1) -> Step:
        """Room for `counts[b]` more tokens of each request (one number: of every request), for all or none.

        Shared pages that will be written are copied here, in every layer.

        Raises:
            OutOfPages: too few free pages; nothing was changed.
            SpecError: a request twice, one that is freed or has a step open, or no such count.
        """
        who = listed(requests)
        with self._pages.lock:
            made = self._pages.reserve(who, numbers("counts", counts, who))
            try:
                tables = self._tables_of(who, made)
                if made.copies:
                    self._copy_shared(made)
                return Step(self, made, tables)
            except BaseException:
                self.end_step(made, None)
                raise

    def append(
        self,
        requests: Requests,
        k: Tensor,
        v: Tensor,
        *,
        counts: Counts = 1,
        rope: Rope | None = None,
        positions: Tensor | None = None,
        q: Tensor | None = None,
    ) -> Tensor | None:
        """`counts[b]` more tokens of each request of a cache with one layer; returns q, as `Step.write` does.

        k (total, num_kv_heads, head_dim) and v (total, num_kv_heads, head_dim_v): the tokens of all requests,
        one request behind the other.

        Raises:
            OutOfPages: too few free pages. As after every exception, the cache is as before.
            SpecError: several layers (use `reserve`), or what `reserve` and `Step.write` refuse.
        """
        if self.num_layers != 1:
            change = "Use reserve(), and Step.write() for each layer."
            raise spec_error("append", got=f"{self.num_layers} layers", wanted="1", change=change)
        with self.reserve(requests, counts) as step:
            return step.write(k, v, rope=rope, positions=positions, q=q)

    def page_table(self, requests: Requests) -> Tensor:
        """int32 (batch, max_pages) on the pool's device, -1 beyond a request's pages; later steps do not
        change it."""
        return self._tables(listed(requests)).page_table.clone()

    def kv_lens(self, requests: Requests) -> Tensor:
        """int32 (batch,) on the pool's device."""
        return self._tables(listed(requests)).kv_lens.clone()

    def slot_mapping(self, requests: Requests, starts: Counts = 0) -> Tensor:
        """int64 (total,) on the pool's device: slots of the tokens of each request from `starts[b]` on."""
        who = listed(requests)
        tables = self._tables(who)
        first = numbers("starts", starts, who)
        for start, length in zip(first, tables.lengths, strict=True):
            checked_count("starts", start, 0, length)
        rest = [length - start for start, length in zip(first, tables.lengths, strict=True)]
        return moved(slots_of(tables.host_table, self.page_size, first, rest)[0], self.device)

    def read(self, request: Request, *, layer: int = 0) -> tuple[Tensor, Tensor]:
        """A copy of a request's keys and values, (tokens, num_kv_heads, head_dim) and (..., head_dim_v)."""
        slots = self.slot_mapping(request)
        k_pool, v_pool = self.pools(layer)
        return read_slots(k_pool, slots), read_slots(v_pool, slots)

    @overload
    def attend(
        self, q: Tensor, requests: Requests | Step, *, layer: int = ..., counts: Counts | None = ...,
        causal: Causal = ..., cascade: bool = ..., window: tuple[int | None, int | None] | None = ...,
        alibi_slopes: Tensor | None = ..., softcap: float = ..., sinks: Tensor | None = ...,
        scale: float | None = ..., kv_starts: Tensor | None = ..., kv_lens: Tensor | None = ...,
        q_offset: int | Tensor | None = ..., return_lse: Literal[False] = ..., out: Tensor | None = ...,
        batch_invariant: bool | None = ..., backend: str | None = ..., checked: bool = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attend(
        self, q: Tensor, requests: Requests | Step, *, layer: int = ..., counts: Counts | None = ...,
        causal: Causal = ..., cascade: bool = ..., window: tuple[int | None, int | None] | None = ...,
        alibi_slopes: Tensor | None = ..., softcap: float = ..., sinks: Tensor | None = ...,
        scale: float | None = ..., kv_starts: Tensor | None = ..., kv_lens: Tensor | None = ...,
        q_offset: int | Tensor | None = ..., return_lse: Literal[True], out: Tensor | None = ...,
        batch_invariant: bool | None = ..., backend: str | None = ..., checked: bool = ...,
    ) -> AttentionOutput: ...  # fmt: skip
    def attend(
        self,
        q: Tensor,
        requests: Requests | Step,
        *,
        layer: int = 0,
        counts: Counts | None = None,
        causal: Causal = True,
        cascade: bool = False,
        window: tuple[int | None, int | None] | None = None,
        alibi_slopes: Tensor | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        scale: float | None = None,
        kv_starts: Tensor | None = None,
        kv_lens: Tensor | None = None,
        q_offset: int | Tensor | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        batch_invariant: bool | None = None,
        backend: str | None = None,
        checked: bool = False,
    ) -> Tensor | AttentionOutput:
        """`attention_paged` of q over the requests' tokens in one layer.

        Args:
            q: (total, num_q_heads, head_dim): `counts[b]` rows of each request, one request behind the other;
                the last of them stands at the request's last token.
            requests: or an open step, whose new tokens are seen too once the layer has written them.
            counts: rows of each request; default 1, or those of the step.
            cascade: read full pages that all requests share at their beginning once for all of them, and
                merge. Equal up to rounding: each part is rounded to q's dtype before the merge. Without
                shared pages, or with any of the arguments below, one plain call; `explain_attend` says.
            window, alibi_slopes: as in `attention_paged`.
            kv_starts: int32 (batch,): first live token of each request (left padding).
            kv_lens: int32 (batch,): live tokens of each request, if fewer than it has (right padding).
            q_offset: position of a request's first row, int or int32 (batch,).

        The other arguments and the results are those of `attention_paged`; sinks count once.

        Raises:
            SpecError, UnsupportedError: as `attention_paged`; or counts that do not add up to q's rows.
        """
        tables, rows = self._call(requests, counts)
        k_pool, v_pool = self.pools(layer)
        if isinstance(requests, Step) and not requests.has_written(layer):
            got, change = f"a step that layer {layer} has not written", "Call write() first."
            raise spec_error("requests", got=got, wanted="its tokens in their slots", change=change)
        if not isinstance(q, Tensor) or q.ndim != 3 or q.shape[0] != sum(rows):
            wanted = f"({sum(rows)}, num_q_heads, head_dim)"
            change = "counts= says how many rows each request has."
            raise spec_error("q", got=described(q), wanted=wanted, change=change)
        given = {"window": window, "alibi_slopes": alibi_slopes, "kv_starts": kv_starts, "kv_lens": kv_lens}
        plan = shared_prefix.planned(tables, rows, cascade, causal, given | {"q_offset": q_offset})
        return shared_prefix.attend(
            q, k_pool, v_pool, tables, rows, plan, causal=causal, window=window, alibi_slopes=alibi_slopes,
            softcap=softcap, sinks=sinks, scale=scale, kv_starts=kv_starts, kv_lens=kv_lens,
            q_offset=q_offset, return_lse=return_lse, out=out, batch_invariant=batch_invariant,
            backend=backend, checked=checked,
        )  # fmt: skip

    def explain_attend(
        self,
        requests: Requests | Step,
        *,
        counts: Counts | None = None,
        causal: Causal = True,
        cascade: bool = False,
        window: tuple[int | None, int | None] | None = None,
        alibi_slopes: Tensor | None = None,
        kv_starts: Tensor | None = None,
        kv_lens: Tensor | None = None,
        q_offset: int | Tensor | None = None,
    ) -> AttendPlan:
        """What `attend` would do with these arguments, and why; launches nothing."""
        tables, rows = self._call(requests, counts)
        given = {"window": window, "alibi_slopes": alibi_slopes, "kv_starts": kv_starts, "kv_lens": kv_lens}
        return shared_prefix.planned(tables, rows, cascade, causal, given | {"q_offset": q_offset})

    def swap_out(self, requests: Requests) -> list[SwappedRequest]:
        """Copies the requests to the CPU and frees them. Pages that others share stay theirs."""
        who = listed(requests)
        with self._pages.lock:
            found = []
            for request in who:
                slots = self.slot_mapping(request)
                k, v = (torch.stack([read_slots(x, slots) for x in pools]) for pools in (self._k, self._v))
                found.append(SwappedRequest(k.cpu(), v.cpu()))
            self.free(who)
            return found

    def swap_in(self, swapped: Sequence[SwappedRequest]) -> tuple[Request, ...]:
        """New requests with the tokens that `swap_out` gave, in whatever pages are free: all or none."""
        for one in swapped:
            if one.k.shape[0] != self.num_layers:
                got, change = f"{one.k.shape[0]} layers", "Swap it into a cache like the one it came from."
                raise spec_error("swapped", got=got, wanted=f"{self.num_layers}", change=change)
        made = self.add(len(swapped))
        try:
            with self.reserve(made, [x.length for x in swapped]) as step:
                for layer in range(self.num_layers if swapped else 0):
                    k, v = (
                        torch.cat([part[layer] for part in parts]).to(self.device)
                        for parts in ([x.k for x in swapped], [x.v for x in swapped])
                    )
                    step.write(k, v, layer=layer)
        except BaseException:
            self.free(made)
            raise
        return made

    def snapshot(self) -> Snapshot:
        """Every request as it is now. Holds its pages until `release`: the next append to each request copies
        its last page first, so that `restore` gives back the same bits."""
        return self._pages.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Every request is what it was at the snapshot, which may be used again; requests made since are
        gone."""
        with self._pages.lock:
            self._zero(self._pages.restore(snapshot))

    def release(self, snapshot: Snapshot) -> None:
        """Ends a snapshot."""
        with self._pages.lock:
            self._zero(self._pages.release(snapshot))

    def check(self) -> None:
        """Counts every page's owners anew.

        Raises:
            RuntimeError: an invariant is broken, which no sequence of calls may bring about.
        """
        self._pages.check()

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """The pools of one layer, which must be what they were when the cache was made.

        Raises:
            SpecError: no such layer, or a pool has another dtype, device or shape by now.
        """
        checked_count("layer", layer, 0, self.num_layers - 1)
        k, v = self._k[layer], self._v[layer]
        if (k.dtype, k.device, k.shape, v.shape) != self._like or v.dtype is not k.dtype:
            got, change = f"{described(k)} and {described(v)}", "Make a new cache instead."
            wanted = f"{self.dtype} {tuple(self._like[2])} and {tuple(self._like[3])} on {self.device}"
            raise spec_error("k_pages, v_pages", got=got, wanted=wanted, change=change)
        return k, v

    def end_step(self, reservation: Reservation, committed: Tables | None) -> None:
        """What `Step.commit`, with the tables that hold from now on, and `Step.rollback` do to the cache."""
        with self._pages.lock:
            if committed is None:
                self._zero(self._pages.rollback(reservation))
                return
            self._zero(self._pages.commit(reservation))
            self._last = (reservation.requests, self._pages.version, committed)

    def _call(self, requests: Requests | Step, counts: Counts | None) -> tuple[Tables, list[int]]:
        if isinstance(requests, Step):
            if not requests.open or requests.cache is not self:
                got, change = "a step that has ended or is of another cache", "Pass the requests instead."
                raise spec_error("requests", got=got, wanted="an open step of this cache", change=change)
            tables, usual = requests.tables, requests.counts
        else:
            who = listed(requests)
            tables, usual = self._tables(who), (1,) * len(who)
        if counts is None:
            return tables, list(usual)
        rows = numbers("counts", counts, tables.lengths)
        for n in rows:
            checked_count("counts", n, 0, 2**31 - 1)
        return tables, rows

    def _tables(self, requests: Sequence[Request]) -> Tables:
        """Tables of the committed state; those of the last call if nothing has moved since."""
        key = tuple(requests)
        with self._pages.lock:
            last, version = self._last, self._pages.version
            if last is not None and last[0] == key and last[1] == version:
                return last[2]
            made = self._tables_of(key, None)
            self._last = (key, version, made)
            return made

    def _tables_of(self, requests: Sequence[Request], reserved: Reservation | None) -> Tables:
        """Tables of the requests, with what is reserved for them."""
        rows = [self._pages.pages(request) for request in requests]
        lengths = self._pages.lengths(requests)
        if reserved is not None:
            lengths = [n + more for n, more in zip(lengths, reserved.counts, strict=True)]
            for row, tail, fresh in zip(rows, reserved.tails, reserved.fresh, strict=True):
                if tail is not None:
                    row[-1] = tail
                row.extend(fresh)
        longest = max(map(len, rows), default=0)
        table = torch.full((len(rows), longest), -1, dtype=torch.int32, device="cpu")
        for into, row in zip(table, rows, strict=True):
            if row:
                into[: len(row)] = torch.frombuffer(row, dtype=torch.int32)
        return Tables(table, tuple(lengths), self.page_size, self.device)

    def _copy_shared(self, reservation: Reservation) -> None:
        sources = ints([c.source for c in reservation.copies], self.device, torch.int64)
        targets = ints([c.target for c in reservation.copies], self.device, torch.int64)
        for layer in range(self.num_layers):
            for pool in self.pools(layer):
                copy_pages(pool, sources, targets)

    def _zero(self, pages: list[int]) -> None:
        """Scrubs pages that are free; under the allocator's lock, before anyone can take them."""
        if not self._scrub or not pages:
            return
        ids = ints(pages, self.device, torch.int64)
        for pool in (*self._k, *self._v):
            pool.index_fill_(0, ids, 0)
