"""`KVCache`: pools of pages for every layer, and the requests whose keys and values stand in them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from polyflash.arguments import Causal
from polyflash.errors import UnsupportedError, described, spec_error
from polyflash.kvcache import shared_prefix
from polyflash.kvcache.code_pools import Writer, stacked
from polyflash.kvcache.code_writes import Turn
from polyflash.kvcache.handles import Counts, Request, Requests, Reservation, checked_count, listed, numbers
from polyflash.kvcache.layout import check_tokens, copy_pages, ints, moved, slots_of, write_slots
from polyflash.kvcache.rope import Rope
from polyflash.kvcache.shared_prefix import AttendPlan, Tables
from polyflash.kvcache.storage import Storage
from polyflash.merging import AttentionOutput
from polyflash.quant.tensor import KV

if TYPE_CHECKING:
    from polyflash.keywords import OfCache


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
        self._turn: Turn | None = None
        self.tables = tables  # those of the requests with the new tokens
        self.requests, self.counts = reservation.requests, reservation.counts
        where = [e.pages for e in reservation.entries], tables.page_size, reservation.starts, self.counts
        slots, positions = slots_of(*where)
        evicted = [entry.evicted for entry in reservation.entries]
        if any(evicted):
            ahead, each = (torch.tensor(x, device="cpu") for x in (evicted, self.counts))
            positions = positions + ahead.repeat_interleave(each)
        self.slot_mapping, self._positions, self._total = moved(slots, tables.device), positions, len(slots)
        self.writers = tuple(Writer(pools, self.slot_mapping, where) for pools in cache.codes)

    @cached_property
    def positions(self) -> Tensor:
        """int64 (total,): those of the new tokens."""
        return moved(self._positions, self.tables.device)

    @property
    def open(self) -> bool:
        return self._reservation.open

    def has_written(self, layer: int) -> bool:
        """Says whether this layer has written its tokens."""
        return layer in self._written or not self._total

    def write(
        self,
        k: Tensor,
        v: Tensor,
        *,
        layer: int = 0,
        rope: Rope | None = None,
        positions: Tensor | None = None,
        q: Tensor | None = None,
    ) -> Tensor | None:
        """Writes the new tokens of one layer to their slots: k (total, num_kv_heads, head_dim) and v (total,
        num_kv_heads, head_dim_v), of the pool's dtype.

        With `rope`, k is rotated as it is written, and q (total, num_q_heads, head_dim) is returned rotated.
        `positions`, int32 or int64 (total,), are those to rotate by; default the tokens' places in their
        requests, and what was evicted before them. q without `rope` comes back as it is.

        Raises:
            SpecError: the step has ended, there is no such layer, or a tensor does not fit.
            UnsupportedError: a tensor needs a gradient, which ends at the pool."""
        self._check_open()
        given = (k, v) if q is None else (k, v, q)
        layers = self.cache.num_layers
        known = type(layer) is int and 0 <= layer < layers and self.cache.writes.told(self._total, *given)
        if not known:
            self._check(layer, *given)
        if rope is None and known and self.writers:  # nothing of theirs needs a gradient
            self._put(layer, k, v, None, True)
        else:
            with torch.no_grad():
                turn = None if rope is None else self._turn_by(rope, positions)
                q = q if q is None or turn is None else turn.of(q)
                self._put(layer, k, v, turn, known)
        self._written.add(layer)
        return q

    def _put(self, layer: int, k: Tensor, v: Tensor, turn: Turn | None, known: bool) -> None:
        if self.writers:
            for writer, x, way in zip(self.writers, (k, v), (turn, None), strict=True):
                writer.write(layer, x, way, known)
        else:
            k_pool, v_pool = self.cache.pools(layer)
            write_slots(k_pool, k if turn is None else turn.of(k), self.slot_mapping)
            write_slots(v_pool, v, self.slot_mapping)

    def _check(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None) -> None:
        """Checks what a layer writes, and has more of the like found quickly."""
        for name, x, pool in zip("kv", (k, v), self.cache.pools(layer), strict=True):
            check_tokens(name, x, pool, self._total)
        given = [x for x in (k, v, q) if x is not None]
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in given):
            told = "a cache is for inference, and one needs a gradient. Use no_grad()"
            raise UnsupportedError(f"k, v, q: {told}")
        self.cache.writes.keep(self._total, *given)

    def _turn_by(self, rope: Rope, positions: Tensor | None) -> Turn:
        """The turn of this write; that of an earlier one, if it has the same factors."""
        if not isinstance(rope, Rope):
            raise spec_error("rope", described(rope), "a Rope", "Make one of base or tables.")
        if positions is not None:
            return Turn(rope, positions)
        if self._turn is None or not self._turn.serves(rope):
            self._turn = Turn(rope, self.positions)
        return self._turn

    def load(self, swapped: Sequence[SwappedRequest]) -> None:
        """Writes the codes of requests that were swapped out, in every layer."""
        for writer, name, tail in zip(self.writers, "kv", (0, 1), strict=True):
            writer.load([getattr(x, name) for x in swapped], [x.tails[tail] for x in swapped])
        self._written.update(range(self.cache.num_layers))

    def commit(self) -> None:
        """Makes the tokens part of their requests.

        Raises:
            SpecError: the step has ended, or a layer has not written its tokens; the step stays open then."""
        self._check_open()
        missing = [n for n in range(self.cache.num_layers) if not self.has_written(n)]
        if missing:
            change = "Call write() once for every layer."
            raise spec_error("commit", f"nothing from layer {missing[0]}", "tokens of every layer", change)
        self.cache.end_step(self._reservation, self.tables, self.writers)

    def rollback(self) -> None:
        """Takes the step back and frees its pages. A step that has ended stays as it is."""
        if self.open:
            self.cache.end_step(self._reservation, None, self.writers)

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


@dataclass(frozen=True, eq=False)
class SwappedRequest:
    """Tokens of a request that left the pool for the CPU, from the token `start` on: k (num_layers, tokens,
    num_kv_heads, head_dim) and v likewise; `evicted` and `kept` are what `KVCache.evict` left behind. Codes
    come with the values of their last group, if it is not full."""

    k: KV
    v: KV
    start: int = 0
    evicted: int = 0
    kept: int = 0
    tails: tuple[Tensor | None, ...] = ()

    @property
    def length(self) -> int:
        return self.start + int(self.k.shape[1])

    def __repr__(self) -> str:
        layers, tokens, heads, width = self.k.shape
        sizes = f"{tokens} tokens, {layers} layers, {heads} kv heads, head_dim {width}"
        return f"SwappedRequest({sizes}, {self.k.dtype})"


def _kind(x: KV) -> tuple[object, ...]:
    return (*x.shape[2:], x.dtype, getattr(x, "scheme", "values"))


class KVCache(Storage):
    """Keys and values of many requests in pages of one pool per layer, on any device (default: torch's own).

        cache = KVCache(1024, 16, num_kv_heads=8, head_dim=128, num_layers=32, dtype=torch.bfloat16)
        (request,) = cache.add()
        with cache.reserve(request, 1) as step:
            for layer in range(32):
                q, k, v = ...                            # (1, heads, head_dim) each
                q = step.write(k, v, layer=layer, rope=Rope(), q=q)
                out = cache.attend(q, step, layer=layer)

    Requests may share pages (`fork`); a page that others read is copied before the first write. Every method
    changes all it says or nothing, and may be called from any thread, also at the same time for different
    requests. On a device, the current stream orders the work, as for any torch op; order several by events.

    `scrub=True` fills pages that nobody owns any more with zeros. Without it their bits stay until they are
    written again; no attention can see them.

    `quant="int8"`, another name of `polyflash.quant.NAMED`, or `(scheme of K, scheme of V)` keeps codes of
    what is written, in `dtype`; attention reads the codes. Where tokens share scales, a request whose step is
    open can be read through the step alone, and neither forked nor recorded by `snapshot`."""

    def reserve(self, requests: Requests, counts: Counts = 1) -> Step:
        """Reserves room for `counts[b]` more tokens of each request (one number: of every one), or for none.

        Shared pages that will be written are copied here, in every layer.

        Raises:
            OutOfPages: too few free pages; nothing was changed.
            SpecError: a request twice, one that is freed or has a step open, or no such count."""
        with self._pages.lock:
            made = self._pages.reserve(requests, counts)
            try:
                self._zero(list(made.reused))
                tables = Tables.of(made.entries, self.page_size, self.device)
                if made.copies:
                    pairs = zip(*((copy.source, copy.target) for copy in made.copies), strict=True)
                    sources, targets = (ints(x, self.device, torch.int64) for x in pairs)
                    for layer in range(self.num_layers):
                        for pool in self.stores(layer):
                            copy_pages(pool, sources, targets)
                    for pools, copy in itertools.product(self.codes, made.copies):
                        pools.copied(*copy)
                return Step(self, made, tables)
            except BaseException:
                self.end_step(made, None)
                raise

    def append(
        self, requests: Requests, k: Tensor, v: Tensor, *, counts: Counts = 1, rope: Rope | None = None,
        positions: Tensor | None = None, q: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Appends `counts[b]` tokens to each request of a cache of one layer; returns q as `Step.write` does.

        k (total, num_kv_heads, head_dim) and v (total, num_kv_heads, head_dim_v): the tokens of all requests,
        concatenated.

        Raises:
            OutOfPages: too few free pages. As after every exception, the cache is as before.
            SpecError: several layers (use `reserve`), or what `reserve` and `Step.write` refuse."""
        if self.num_layers != 1:
            change = "Use reserve(), and Step.write() for each layer."
            raise spec_error("append", f"{self.num_layers} layers", "1", change)
        with self.reserve(requests, counts) as step:
            return step.write(k, v, rope=rope, positions=positions, q=q)

    @overload
    def attend(
        self, q: Tensor, requests: Requests | Step, *, return_lse: Literal[False] = ..., **x: Unpack[OfCache]
    ) -> Tensor: ...
    @overload
    def attend(
        self, q: Tensor, requests: Requests | Step, *, return_lse: Literal[True], **x: Unpack[OfCache]
    ) -> AttentionOutput: ...
    def attend(
        self, q: Tensor, requests: Requests | Step, *, layer: int = 0, counts: Counts | None = None,
        causal: Causal = True, cascade: bool = False, window: tuple[int | None, int | None] | None = None,
        alibi_slopes: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
        scale: float | None = None, kv_starts: Tensor | None = None, kv_lens: Tensor | None = None,
        q_offset: int | Tensor | None = None, return_lse: bool = False, out: Tensor | None = None,
        batch_invariant: bool | None = None, backend: str | None = None, checked: bool = False,
    ) -> Tensor | AttentionOutput:  # fmt: skip
        """`attention_paged` of q over the requests' tokens in one layer.

        Args:
            q: (total, num_q_heads, head_dim): `counts[b]` rows of each request, concatenated; the last of
                them stands at the request's last token.
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
            SpecError, UnsupportedError: as `attention_paged`; or counts that do not add up to q's rows."""
        tables, rows = self._call(requests, counts)
        pools = self.pools(layer)
        if isinstance(requests, Step) and not requests.has_written(layer):
            got = f"a step that layer {layer} has not written"
            raise spec_error("requests", got, "its tokens in their slots", "Call write() first.")
        if not isinstance(q, Tensor) or q.ndim != 3 or q.shape[0] != sum(rows):
            change = "counts= says how many rows each request has."
            raise spec_error("q", described(q), f"({sum(rows)}, num_q_heads, head_dim)", change)
        apart: dict[str, object] = {"window": window, "alibi_slopes": alibi_slopes, "q_offset": q_offset}
        apart |= {"kv_starts": kv_starts, "kv_lens": kv_lens}
        plan = shared_prefix.planned(tables, rows, cascade, causal, apart)
        options = apart | {"causal": causal, "softcap": softcap, "sinks": sinks, "scale": scale}
        options |= {"batch_invariant": batch_invariant, "backend": backend, "checked": checked}
        options |= {"return_lse": return_lse, "out": out}
        return shared_prefix.attend(q, pools, tables, rows, plan, options)

    def explain_attend(
        self, requests: Requests | Step, *, counts: Counts | None = None, causal: Causal = True,
        cascade: bool = False, window: tuple[int | None, int | None] | None = None,
        alibi_slopes: Tensor | None = None, kv_starts: Tensor | None = None, kv_lens: Tensor | None = None,
        q_offset: int | Tensor | None = None,
    ) -> AttendPlan:  # fmt: skip
        """Says what `attend` would do with these arguments, and why; launches nothing."""
        tables, rows = self._call(requests, counts)
        apart: dict[str, object] = {"window": window, "alibi_slopes": alibi_slopes, "q_offset": q_offset}
        apart |= {"kv_starts": kv_starts, "kv_lens": kv_lens}
        return shared_prefix.planned(tables, rows, cascade, causal, apart)

    def swap_out(self, requests: Requests) -> list[SwappedRequest]:
        """Copies the requests to the CPU and frees them. Pages that others share stay theirs."""
        who = listed(requests)
        with self._pages.lock:
            found = []
            for request, entry in zip(who, self._pages.entries(who), strict=True):
                read = self.read_codes if self.codes else self.read
                layers = [read(request, layer=n, start=entry.start) for n in range(self.num_layers)]
                k, v = (
                    (stacked if self.codes else torch.stack)(x).to("cpu") for x in zip(*layers, strict=True)
                )
                last = entry.pages[-1] if entry.pages else -1
                tails = tuple(x.held(last, entry.length % self.page_size) for x in self.codes)
                found.append(SwappedRequest(k, v, entry.start, entry.evicted, entry.kept, tails))
            self.free(who)
            return found

    def swap_in(self, swapped: Sequence[SwappedRequest]) -> tuple[Request, ...]:
        """Makes requests of the tokens that `swap_out` gave, in whatever pages are free: all or none."""
        for one in swapped:
            change = "Swap it into a cache like the one it came from."
            if one.k.shape[0] != self.num_layers:
                raise spec_error("swapped", f"{one.k.shape[0]} layers", f"{self.num_layers}", change)
            kinds = [_kind(x) for x in (one.k, one.v, *self.pools(0))]
            if kinds[:2] != kinds[2:]:
                raise spec_error(
                    "swapped", f"{kinds[0]} and {kinds[1]}", f"{kinds[2]} and {kinds[3]}", change
                )
        made = self.add(len(swapped))
        try:
            for request, one in zip(made, swapped, strict=True):
                self._pages.place(request, one.start, one.evicted, one.kept)
            with self.reserve(made, [x.length - x.start for x in swapped]) as step:
                if self.codes:
                    step.load(swapped)
                for layer in range(self.num_layers if swapped and not self.codes else 0):
                    pairs: Any = zip(*((one.k, one.v) for one in swapped), strict=True)
                    k, v = (torch.cat([x[layer] for x in given]).to(self.device) for given in pairs)
                    step.write(k, v, layer=layer)
        except BaseException:
            self.free(made)
            raise
        return made

    def end_step(
        self, reservation: Reservation, committed: Tables | None, writers: Sequence[Writer] = ()
    ) -> None:
        """Ends a step: `Step.commit` gives the tables that hold from now on, `Step.rollback` None."""
        with self._pages.lock:
            if committed is None:
                for writer in writers:
                    writer.rollback()
                self._zero(self._pages.rollback(reservation))
                return
            self._zero(self._pages.commit(reservation))
            for writer in writers:
                writer.commit()
            self._last = (reservation.requests, self._pages.version, committed)

    def _call(self, requests: Requests | Step, counts: Counts | None) -> tuple[Tables, list[int]]:
        if isinstance(requests, Step):
            if not requests.open or requests.cache is not self:
                got = "a step that has ended or is of another cache"
                raise spec_error("requests", got, "an open step of this cache", "Pass the requests instead.")
            tables, usual = requests.tables, requests.counts
        else:
            self._settled(requests)
            tables = self._tables(requests)
            usual = (1,) * len(tables.lengths)
        if counts is None:
            return tables, list(usual)
        rows = numbers("counts", counts, tables.lengths)
        for n in rows:
            checked_count("counts", n, 0, 2**31 - 1)
        return tables, rows
