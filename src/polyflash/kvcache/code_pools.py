"""Pools of codes: K or V of every layer, quantised as it is written.

A group is the tokens that share scales: one, or those of a scheme per channel. Values of a group that is not
full stay beside its page in a tail, and every step writes its codes anew from them: so codes are those of
`quantize` over the whole sequence, in whatever pieces it came."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyflash.errors import described, spec_error
from polyflash.kvcache.code_writes import (
    GroupsOnDevice,
    InPlace,
    OnDevice,
    Turn,
    codes_on_device,
    quantiser_of,
    written_at_once,
)
from polyflash.kvcache.layout import ints, moved, read_slots, slots_of, write_slots
from polyflash.quant.codec import table_dtype
from polyflash.quant.scheme import KINDS, NAMED, Scheme
from polyflash.quant.tensor import QuantizedTensor, dequantize, quantize
from polyflash.storages import empty_of_keys

Where = tuple[Any, int, Sequence[int], Sequence[int]]  # what `slots_of` takes
Quant = str | tuple[Scheme, Scheme]  # a name of `quant.NAMED`, or schemes for K and V


class Tail(NamedTuple):
    """Values of a page's unfinished group, (num_layers, group size, num_kv_heads, channels)."""

    group: int  # of the page
    values: Tensor


class CodePools:
    """K or V of every layer. Groups are addressed by slots of their own: page · groups of a page + group.

    Parts of n groups are their codes, uint8 (n, group size, num_kv_heads, bytes), scales and maybe shifts
    (n, num_kv_heads, blocks of channels)."""

    def __init__(
        self, name: str, scheme: Scheme, shape: Sequence[int], dtype: torch.dtype | None, device: Any
    ) -> None:
        layers, pages, page_size, heads, width = shape
        form, self.scheme, self.dtype = scheme.codes, scheme, dtype or torch.get_default_dtype()
        _check(name, scheme, self.dtype, page_size, width)
        self.group = form.scale.tokens
        self._storage = getattr(torch, KINDS[scheme.dtype].storage)
        # A CPU reads a head at a time: 64 bytes of every 512 would cost it a quarter more than whole pages.
        by_head = torch.empty(0, device=device).is_cpu
        rows = (heads, page_size) if by_head else (page_size, heads)
        codes = empty_of_keys((layers, pages, *rows, width // form.packed), torch.uint8, device)
        codes = codes.transpose(2, 3) if by_head else codes
        sizes = [(layers, pages, heads, *x.counts(page_size, width)) for x in (form.scale, form.shift) if x]
        tables = [empty_of_keys(size, table_dtype(form), device) for size in sizes]
        # by layer, (num_pages, tokens or groups of a page, num_kv_heads, width) each
        self.stores = [(codes[n], *(x[n].transpose(1, 2) for x in tables)) for n in range(layers)]
        views = [(c.view(self._storage).transpose(1, 2), *x) for c, *x in zip(codes, *tables, strict=True)]
        self.layers = tuple(self._tensor(*view) for view in views)
        self.tails: dict[int, Tail] = {}  # by page
        self.writes: Any = None  # the last `Writes` of a GPU's quantiser

    @classmethod
    def over(cls, cache: QuantizedTensor) -> CodePools:
        """One layer whose codes exist already, of a scheme per token: pages or batch entries first."""
        pools = cls.__new__(cls)
        pools.scheme, pools.dtype, pools.group = cache.scheme, cache.dtype, 1
        pools._storage, pools.layers, pools.tails = cache.codes.dtype, (cache,), {}
        tables = [x for x in (cache.scale, cache.shift) if x is not None]
        pools.stores = [tuple(x.transpose(1, 2) for x in (cache.codes.view(torch.uint8), *tables))]
        return pools

    def _tensor(self, codes: Tensor, scale: Tensor, shift: Tensor | None = None) -> QuantizedTensor:
        return QuantizedTensor(codes, scale, shift, self.scheme, self.dtype, "bshd")

    def _grouped(self, layer: int) -> tuple[Tensor, ...]:
        codes, *tables = self.stores[layer]
        return codes.unflatten(1, (-1, self.group)), *tables

    @torch.inference_mode(False)  # else steps outside of the mode could not write to it
    def room(self) -> Tensor:
        """Room for the values of a group, (num_layers, group size, num_kv_heads, channels)."""
        like = self.layers[0]
        shape = (len(self.layers), self.group, *like.shape[2:])
        return torch.empty(shape, dtype=self.dtype, device=like.device)

    @cached_property
    def numbers(self) -> tuple[Tensor, ...]:
        """The number of each layer where kernels read it, aligned as they ask: int64 (2,), twice."""
        with torch.inference_mode(False):
            count = torch.arange(len(self.layers), device=self.layers[0].device)
            return count[:, None].repeat(1, 2).unbind()

    def take(self, layer: int, groups: Tensor) -> list[Tensor]:
        """Copies the parts of some groups."""
        return [read_slots(x, groups) for x in self._grouped(layer)]

    def put(self, layer: int, groups: Tensor, parts: Sequence[Tensor]) -> None:
        for store, part in zip(self._grouped(layer), parts, strict=True):
            write_slots(store, part, groups)

    def write_tokens(self, pages: Tensor, slots: Tensor, values: Tensor) -> None:
        """Codes tokens (total, num_kv_heads, channels), by a scheme per token, in slots of one layer's pages.
        On a device what is outside is an error of it, or written nowhere: no contents are read."""
        codes, *tables = self.stores[0]
        if not len(values):
            return
        plain = all(x.stride(3) == 1 or x.shape[3] == 1 for x in self.stores[0])
        plain = plain and len({x.stride() for x in tables}) == 1
        kernel = quantiser_of(self.scheme, values) if plain else 0
        size, places = codes.shape[1], pages * codes.shape[1] + slots
        if kernel:
            each = np.ones(len(slots), np.int64)
            InPlace(kernel, self, places.numpy(), each, {}, []).write(0, values, None)
            return
        inside = (pages.clamp(0, len(codes) - 1) == pages) & (slots.clamp(0, size - 1) == slots)
        if not written_at_once(self, torch.where(inside, places, -1), values):
            for store, part in self.placed(values):
                store[pages, slots] = part

    def placed(self, values: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """The tensors that hold one layer, by page and slot, and what becomes of such tokens in each."""
        return zip(self._grouped(0), self.encode(values[:, None]), strict=True)

    def encode(self, x: Tensor, lens: Tensor | None = None) -> list[Tensor]:
        """The parts of groups of values (n, group size, num_kv_heads, channels), of which `lens` live."""
        x = x.transpose(0, 1) if self.group == 1 else x
        made = quantize(x, self.scheme, layout="bshd", lens=lens)
        codes = made.codes.transpose(1, 2).view(torch.uint8).flatten(0, 1).unflatten(0, (-1, self.group))
        return [codes, *(t.transpose(1, 2).flatten(0, 1) for t in (made.scale, made.shift) if t is not None)]

    def sequence(self, parts: Sequence[Tensor], tokens: int) -> QuantizedTensor:
        """The first `tokens` tokens of groups, as (1, tokens, num_kv_heads, channels)."""
        codes, *tables = parts
        codes = codes.flatten(0, 1)[:tokens].view(self._storage).transpose(0, 1)[None]
        return self._tensor(codes, *(x.transpose(0, 1)[None] for x in tables))

    def parts(self, x: QuantizedTensor) -> list[Tensor]:
        """The parts of such tokens, the rest of their last group zeros."""
        codes = x.codes[0].transpose(0, 1).view(torch.uint8)
        room = (0, 0, 0, 0, 0, -len(codes) % self.group)
        codes = torch.nn.functional.pad(codes, room).unflatten(0, (-1, self.group))
        return [codes, *(t[0].transpose(0, 1) for t in (x.scale, x.shift) if t is not None)]

    def tail(self, page: int, tokens: int) -> Tail | None:
        """The values of the unfinished group of a page's first `tokens` tokens, where they are known."""
        found = self.tails.get(page) if tokens % self.group else None
        return found if found is not None and found.group == tokens // self.group else None

    def held(self, page: int, tokens: int) -> Tensor | None:
        """A copy of these values on the CPU."""
        tail = self.tail(page, tokens)
        return None if tail is None else tail.values[:, : tokens % self.group].to("cpu", copy=True)

    def copied(self, source: int, target: int, tokens: int) -> None:
        """Has the copy of a page go on as the page does."""
        tail = self.tail(source, tokens)
        if tail is not None:
            self.tails[target] = tail._replace(values=self.room().copy_(tail.values))

    def shortened(self, page: int, tokens: int) -> None:
        """Codes the unfinished group of a page anew, of which only these tokens are left. Of a group that had
        been full the values are gone, and its codes stay."""
        tail = self.tail(page, tokens)
        if tail is None:
            self.tails.pop(page, None)
            return
        layers, groups_of_page = tail.values.shape[0], self.stores[0][0].shape[1] // self.group
        at = ints([page * groups_of_page + tail.group], tail.values.device, torch.int64)
        made = self.encode(tail.values, ints([tokens % self.group] * layers, tail.values.device))
        for layer in range(layers):
            self.put(layer, at, [part[layer : layer + 1] for part in made])

    def forget(self, pages: Sequence[int]) -> None:
        """Drops the tails of pages that are free."""
        for page in pages:
            self.tails.pop(page, None)

    @property
    def tail_bytes(self) -> int:
        return sum(tail.values.nbytes for tail in [*self.tails.values()])


class Begun(NamedTuple):
    """A group with tokens from before the step."""

    at: int  # among the groups of the step
    tokens: int
    values: Tensor | None  # its tail's; None if they are known by their codes alone


class Left(NamedTuple):
    """A group that the step leaves unfinished: `tail` gets its tokens [first, end)."""

    at: int
    page: int
    tail: Tail
    first: int
    end: int


class Writer:
    """One step's writes to one `CodePools`. Made while the allocator is locked."""

    def __init__(self, pools: CodePools, slots: Tensor, where: Where) -> None:
        (rows, page_size, starts, counts), size = where, pools.group
        self.pools, self._starts, self._counts = pools, starts, counts
        self.begun: list[Begun] = []
        self.left: list[Left] = []
        self.pages: list[int] = []  # whose tails the step replaces
        self._saved: dict[int, list[Tensor]] = {}
        self._in_place: Any = None  # `Groups`, once a quantiser has had values of the step
        self._device = slots.device
        if size == 1:
            self.groups, self._places, self._live = slots, slots, np.ones(len(slots), np.int64)
            return
        ends = [s + n for s, n in zip(starts, counts, strict=True)]
        spans = [-(-e // size) - s // size if e > s else 0 for s, e in zip(starts, ends, strict=True)]
        firsts = [s // size for s in starts]
        self._places, _ = slots_of(rows, page_size // size, firsts, spans)
        bases = self._bases = [*itertools.accumulate(spans, initial=0)]
        each = zip(firsts, spans, ends, strict=True)
        live = [min(end - n * size, size) for at, span, end in each for n in range(at, at + span)]
        self._live = np.array(live, np.int64)
        for row, base, span, start, end in zip(rows, bases, spans, starts, ends, strict=False):
            if start < end:
                self._add(row, page_size, base, span, start, end)

    @cached_property
    def groups(self) -> Tensor:
        """Slots of the groups."""
        return moved(self._places, self._device)

    @cached_property
    def _whole(self) -> tuple[Tensor, ...]:
        """Places of the new tokens among those of all groups, and the live tokens of each."""
        size, each = self.pools.group, zip(self._counts, self._bases, self._starts, strict=False)
        rows = np.concatenate((np.arange(0), *(np.arange(n) + b * size + s % size for n, b, s in each)))
        return tuple(moved(torch.from_numpy(x), self._device) for x in (rows, self._live))

    @cached_property
    def _first(self) -> Tensor:
        """Slots of the groups that are begun."""
        return self.groups[ints([x.at for x in self.begun], self._device, torch.int64)]

    def _add(self, row: Sequence[int], page_size: int, base: int, span: int, start: int, end: int) -> None:
        pools, size = self.pools, self.pools.group
        tail = pools.tail(row[start // page_size], start % page_size)
        self.pages.append(row[start // page_size])
        if start % size:
            self.begun.append(Begun(base, start % size, None if tail is None else tail.values))
        if end % size:
            first = start % size
            if tail is None or span > 1:
                tail, first = Tail(end % page_size // size, pools.room()), 0
            self.left.append(Left(base + span - 1, row[end // page_size], tail, first, end % size))

    def write(self, layer: int, values: Tensor, turn: Turn | None = None, known: bool = False) -> None:
        """Codes the new tokens of a layer, (total, num_kv_heads, channels), turned by their positions;
        `known`: they are like others, which were readable."""
        pools, size = self.pools, self.pools.group
        if not len(values):
            return
        groups = (known and self._in_place) or self._groups_for(values)
        if groups is not None:
            self._write_in_place(groups, layer, values, turn)
            return
        values = values if turn is None else turn.of(values)
        if size == 1:
            pools.put(layer, self.groups, pools.encode(values[:, None]))
            return
        rows, lens = self._whole
        x = values.new_zeros((len(self.groups) * size, *values.shape[1:]))
        x = x.index_copy_(0, rows, values).unflatten(0, (-1, size))
        if self.begun:
            saved = self._saved.setdefault(layer, pools.take(layer, self._first))
            places = [x[at, :n] for at, n, _ in self.begun]
            torch._foreach_copy_(places, [self._old(layer, i, saved) for i in range(len(places))])
        pools.put(layer, self.groups, pools.encode(x, lens))
        if self.left:
            tails = [tail.values[layer, first:end] for _, _, tail, first, end in self.left]
            torch._foreach_copy_(tails, [x[at, first:end] for at, _, _, first, end in self.left])

    def _groups_for(self, values: Tensor) -> Any:
        """Finds what writes such values by a quantiser, laid out once for all layers, or None."""
        pools, known = self.pools, self._in_place
        kernel = quantiser_of(pools.scheme, values, known)
        if not (kernel or codes_on_device(pools.scheme, values, known)):
            return None
        if known is None and pools.group == 1 and not kernel:
            known = self._in_place = OnDevice(pools, self.groups)
        elif known is None:
            begun = {x.at: (x.tokens, x.values) for x in self.begun}
            begun |= {x.at: (begun.get(x.at, (0, None))[0], x.tail.values) for x in self.left}
            same = [x.at for x in self.begun if x.values is not None]
            groups = pools, self._places.numpy(), self._live, begun, same
            known = self._in_place = InPlace(kernel, *groups) if kernel else GroupsOnDevice(*groups)
        return known

    def _write_in_place(self, groups: Any, layer: int, values: Tensor, turn: Turn | None) -> None:
        groups.layers.update(self._saved)  # those that this step has written otherwise too
        unknown = [i for i, x in enumerate(self.begun) if x.values is None]
        if unknown:
            saved = self._saved.setdefault(layer, self.pools.take(layer, self._first))
            for i in unknown:
                at, tokens, _ = self.begun[i]
                groups.buffers[at][layer, :tokens] = self._old(layer, i, saved)
        groups.write(layer, values, turn)

    def _old(self, layer: int, i: int, saved: list[Tensor]) -> Tensor:
        """The values that a group had before the step, (tokens, num_kv_heads, channels)."""
        _, tokens, values = self.begun[i]
        if values is not None:
            return values[layer, :tokens]
        return dequantize(self.pools.sequence([part[i : i + 1] for part in saved], tokens))[0]

    def load(self, given: Sequence[QuantizedTensor], tails: Sequence[Tensor | None]) -> None:
        """Writes requests that begin with this step, of every layer (num_layers, tokens, num_kv_heads,
        channels) each, and the values of their unfinished groups."""
        device = self._device
        for layer in range(len(self.pools.layers) if given else 0):
            at = torch.tensor([layer], device="cpu")
            parts = zip(*(self.pools.parts(x.pages(at)) for x in given), strict=True)
            self.pools.put(layer, self.groups, [torch.cat(x).to(device) for x in parts])
        unfinished = [t for x, t in zip(given, tails, strict=True) if x.shape[1] % self.pools.group]
        found = [(left, t) for left, t in zip(self.left, unfinished, strict=True) if t is not None]
        for left, values in found:
            left.tail.values[:, : left.end] = values.to(device)
        self.left = [left for left, _ in found]

    def commit(self) -> None:
        self.pools.forget(self.pages)
        self.pools.tails |= {left.page: left.tail for left in self.left}

    def rollback(self) -> None:
        """Brings back the codes of groups that were there."""
        for layer, saved in self._saved.items():
            self.pools.put(layer, self._first, saved)
        if self._in_place is not None:  # last: it may have written before these were saved
            self._in_place.rollback()


def schemes_of(quant: object) -> tuple[Scheme, Scheme]:
    """K's scheme and V's."""
    pair = NAMED.get(quant) if isinstance(quant, str) else quant
    if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, Scheme) for x in pair):
        return pair
    change = "polyflash.quant.Scheme makes one."
    raise spec_error("quant", described(quant), f"one of {', '.join(NAMED)}, or schemes of K and V", change)


def _check(name: str, scheme: Scheme, dtype: torch.dtype, page_size: int, width: int) -> None:
    group, size = scheme.codes.scale.tokens, scheme.codes.packed
    if not dtype.is_floating_point:
        change = "It is that of the keys and values that are written."
        raise spec_error("dtype", dtype, "a float", change)
    if scheme.smoothing != "none":
        change = "A mean is known when all tokens are. Per channel with symmetric=False a shift does as much."
        raise spec_error(f"quant of {name}", f"smoothing={scheme.smoothing!r}", "'none'", change)
    if not group:
        change = "Tokens that come later would change the codes of earlier ones: set tokens=, or use 'token'."
        raise spec_error(
            f"quant of {name}", f"scales over all tokens ({scheme.granularity})", "groups", change
        )
    if page_size % group:
        wanted, change = (
            f"a multiple of {group}, the tokens that share a scale",
            "A group stands in one page.",
        )
        raise spec_error("page_size", page_size, wanted, change)
    if width % size:
        change = "Codes of 4 bits lie in pairs of channels."
        raise spec_error("head_dim", width, "an even number", change)


def stacked(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Those of several layers as one, with the layer first."""
    first = tensors[0]
    shift = None if first.shift is None else torch.cat([x.shift for x in tensors if x.shift is not None])
    codes, scale = torch.cat([x.codes for x in tensors]), torch.cat([x.scale for x in tensors])
    return replace(first, codes=codes, scale=scale, shift=shift)
