"""Codes written in place by a quantiser: new values are read where the caller has them, those of unfinished
groups where their tails are, and codes, scales and shifts go to their slots in the pool."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyflash.kvcache.layout import moved
from polyflash.quant import codec
from polyflash.storages import is_readable

if TYPE_CHECKING:
    from polyflash.kvcache.code_pools import CodePools
    from polyflash.kvcache.rope import Rope
    from polyflash.quant.scheme import Scheme


class Turn:
    """Rotary positions of a step's new tokens, of which a kernel takes the cosines and sines."""

    def __init__(self, rope: Rope, positions: Tensor) -> None:
        self.rope, self.positions = rope, positions
        self._factors: dict[Any, tuple[Tensor, Tensor]] = {}

    def serves(self, rope: Rope) -> bool:
        """Does another layer turn its keys by the same factors? Tables may have changed meanwhile."""
        mine, other = ((x.base, x.rotary_dim, x.interleaved) for x in (self.rope, rope))
        return rope.cos is None and self.rope.cos is None and mine == other

    def of(self, values: Tensor) -> Tensor:
        """The values turned, (total, heads, channels)."""
        cos, sin, neighbours = self.factors(values)
        kernels = on_device(values) if cos.dtype is torch.float32 and cos.numel() else None
        if kernels is not None:
            return kernels.turn(values, (cos, sin, neighbours))  # type: ignore[no-any-return]
        return self.rope.turned(values, cos, sin)

    def factors(self, values: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Cosines and sines that turn such values, (total, rotary_dim / 2), float32 or those of float64; are
        pairs neighbours? Made once for all layers."""
        like = isinstance(values, Tensor) and (*values.shape[::2], values.dtype, values.device)
        key = like, getattr(values, "ndim", 0)
        found = self._factors.get(key)
        if found is None:
            cos, sin = self.rope.factors(values, self.positions)
            found = self._factors[key] = cos.contiguous(), sin.contiguous()
        return *found, self.rope.interleaved


def quantiser_of(scheme: Scheme, values: Tensor, before: Any = None) -> int:
    """Address of what quantises such values as they lie, that of a write before of the same dtype; 0 if they
    have to be made ready first."""
    kernels = codec.one_pass("cpu") if values.is_cpu else None
    if kernels is None or not is_readable(values):
        return 0
    return kernels.kernel_for(scheme, values.dtype) if before is None else before.kernel  # type: ignore[no-any-return]


def on_device(values: Tensor) -> Any:
    """The module that quantises such values on a GPU, or None."""
    if not values.is_cuda or torch.compiler.is_compiling() or not is_readable(values):
        return None
    return codec.one_pass("cuda")


def codes_on_device(scheme: Scheme, values: Tensor, before: Any = None) -> bool:
    """Does a GPU's quantiser code such values, whose dtype is that of a write before?"""
    kernels = on_device(values)
    if kernels is None or before is not None:
        return kernels is not None
    return kernels.writes(scheme, values.dtype, values.shape[2])  # type: ignore[no-any-return]


def written_at_once(pools: CodePools, slots: Tensor, values: Tensor) -> bool:
    """Codes new tokens of a scheme per token, (total, num_kv_heads, channels), in `slots` (total,) of one
    layer by a GPU's quantiser; -1 is nowhere. False if it has none of them: nothing was done then."""
    kernels = on_device(values)
    return kernels is not None and kernels.write(values, pools.layers[0], slots, None)


class Groups:
    """The groups of a step: their slots and live tokens (int64 numpy), and by number what is there of some
    before (tokens, values (num_layers, group size, num_kv_heads, channels)), beside which all new ones are
    kept. Codes of `known` groups are those of their values."""

    def __init__(
        self, pools: CodePools, groups: Any, live: Any, begun: dict[int, Any], known: list[int]
    ) -> None:
        self.pools, own = pools, sorted(begun)
        self.layers: set[int] = set()  # torch 2.11's Dynamo calls no set[int]()
        # Values that are known by their codes alone, of a group that this step fills, get room.
        self.buffers = {at: pools.room() if (x := begun[at][1]) is None else x for at in own}
        self.groups, self.live, self.known = groups, live, known
        self.first, self.tails = np.zeros_like(groups), np.zeros_like(groups)
        self.first[own] = [begun[at][0] for at in own]
        self.tails[own] = [x.data_ptr() for x in self.buffers.values()]
        new = live - self.first
        self.rows = new.cumsum() - new


class OnDevice:
    """Tokens of a step that have scales of their own, in their slots, by a GPU's quantiser."""

    def __init__(self, pools: CodePools, slots: Tensor) -> None:
        self.pools, self.slots = pools, slots
        self.layers: set[int] = set()

    def write(self, layer: int, values: Tensor, turn: Turn | None) -> None:
        """Quantises the new tokens of a layer, (total, num_kv_heads, channels), turned on their way."""
        self._code(layer, values, turn, self.slots)

    def rollback(self) -> None:
        """Leaves them where no length reaches."""

    def _code(self, layer: int, values: Tensor, turn: Turn | None, *places: Tensor) -> None:
        factors = None if turn is None else turn.factors(values)
        pools, groups = self.pools, None if self.pools.group == 1 else len(places[0])
        cache, writes = pools.layers[layer], pools.writes  # those of the layer before
        if writes is None or not writes.serves(values, factors, groups):
            writes = pools.writes = codec.one_pass("cuda").Writes(values, cache, factors, groups)
        writes(values, cache, factors, *places)


class GroupsOnDevice(OnDevice, Groups):
    """Groups of a step by a GPU's quantiser."""

    def __init__(self, *groups: Any) -> None:
        Groups.__init__(self, *groups)

    @cached_property
    def _table(self) -> Tensor:
        return self._made(self.live)

    def _made(self, live: Any, at: Any = slice(None)) -> Tensor:
        """The groups as the quantiser takes them."""
        columns = self.rows, live, self.first, self.groups, self.tails, self.tails
        table = np.stack([x[at] for x in columns], 1)
        return moved(torch.from_numpy(table), self.pools.layers[0].device)

    def write(self, layer: int, values: Tensor, turn: Turn | None) -> None:
        self.layers.add(layer)
        self._code(layer, values, turn, self._table, self.pools.numbers[layer])

    def rollback(self) -> None:
        table = self._made(self.first, self.known)
        for layer in self.layers if self.known else ():
            values = self.buffers[self.known[0]][layer]  # none of it is new
            self._code(layer, values, None, table, self.pools.numbers[layer])


class InPlace(Groups):
    """By the CPU's quantiser. Codes of known groups stay where no scale changes. From layer to layer only
    addresses change, so all else is laid out once."""

    def __init__(self, kernel: int, *groups: Any) -> None:
        """`groups`: as `Groups` takes them."""
        super().__init__(*groups)
        pools, live, known, self.kernel = self.pools, self.live, self.known, kernel
        codes, table = pools.stores[0][:2]
        self._token = next((x.stride(1) * x.element_size() for x in self.buffers.values()), 0)
        page, place = divmod(self.groups, codes.shape[1] // pools.group)
        at_table = table.element_size() * (page * table.stride(0) + place * table.stride(1))
        of_codes = page * codes.stride(0) + place * pools.group * codes.stride(1)
        kept = np.zeros_like(live)
        kept[known] = self.first[known]
        self._table = np.stack((live, live, self.tails, self.first, of_codes, at_table, kept, self.rows), 1)
        self._like: Any = None  # strides and angles that `_prepared` was made for

    def write(self, layer: int, values: Tensor, turn: Turn | None) -> None:
        """Quantises the new tokens of a layer, (total, num_kv_heads, channels), turned on their way."""
        angles = (0, 0, 0, False)
        if turn is not None:
            cos, sin, neighbours = turn.factors(values)
            angles = cos.data_ptr(), sin.data_ptr(), cos.shape[1], neighbours
        if self.buffers or values.stride(2) != 1:  # tails are dense
            values = values.contiguous()
        token, head, _ = (values.element_size() * s for s in values.stride())
        token = self._token or token  # torch calls a lone token dense, whatever its stride
        if (like := (head, token, angles)) != self._like:
            self._table[:, 0] = self.rows * token
            self._like, self._prepared = like, self._made(self._table, *like)
        if layer in self.layers:  # codes are those of an earlier write of this step
            self._table[:, 6] = 0
        self.layers.add(layer)
        self._launch(layer, values.data_ptr(), *self._prepared)

    def rollback(self) -> None:
        """Makes the codes of groups that were there what they were, of the values that are known."""
        table = self._table[self.known]
        table[:, 0], table[:, 1] = table[:, 2], table[:, 3]
        table[:, 2] = table[:, 6] = 0
        head = self._token // self.pools.stores[0][0].shape[2]
        for layer in self.layers if len(table) else ():
            self._launch(layer, layer * self.pools.group * self._token, *self._made(table, head, self._token))

    def _made(self, table: Any, head: int, token: int, *angles: Any) -> Any:
        pools, kernels = self.pools, codec.one_pass("cpu")
        codes, scale, *_ = pools.stores[0]
        sizes = codes.shape[2], pools.group, pools.layers[0].shape[3]
        places = *codes.stride()[2:0:-1], *(scale.element_size() * s for s in scale.stride()[2:0:-1])
        strides = kernels.Strides(head, token, *places)
        return kernels.prepared(self.kernel, pools.scheme, table, sizes, strides, 0, *angles)

    def _launch(self, layer: int, values: int, words: Any, how: Any) -> None:
        bases = (x.data_ptr() for x in self.pools.stores[layer])
        codec.one_pass("cpu").launch(words, how, values, layer * self.pools.group * self._token, *bases)
