"""Codes written in place by the CPU's quantiser: new values are read where the caller has them, those of
unfinished groups where their tails are, and codes, scales and shifts go to their slots in the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyflash.quant import codec

if TYPE_CHECKING:
    from polyflash.kvcache.code_pools import CodePools
    from polyflash.kvcache.rope import Rope
    from polyflash.quant.scheme import Scheme


class Turn:
    """Rotary positions of a step's new tokens, of which a kernel takes the cosines and sines."""

    def __init__(self, rope: Rope, positions: Tensor) -> None:
        self.rope, self.positions = rope, positions
        self._factors: list[Tensor] = []

    def serves(self, rope: Rope) -> bool:
        """Does another layer turn its keys by the same factors? Tables may have changed meanwhile."""
        mine, other = ((x.base, x.rotary_dim, x.interleaved) for x in (self.rope, rope))
        return rope.cos is None and self.rope.cos is None and mine == other

    def of(self, values: Tensor) -> Tensor:
        """The values turned, (total, num_kv_heads, channels)."""
        return self.rope.rotate(values, self.positions)

    def factors(self, values: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Cosines and sines that turn float32 values or narrower ones, float32 (total, rotary_dim / 2); are
        pairs neighbours?"""
        if not self._factors:
            self._factors = [x.contiguous() for x in self.rope.factors(values, self.positions)]
        cos, sin = self._factors
        return cos, sin, self.rope.interleaved


def quantiser_of(scheme: Scheme, values: Tensor, before: InPlace | None = None) -> int:
    """Address of what quantises such values as they lie, that of a write before of the same dtype; 0 if they
    have to be made ready first."""
    kernels = codec.one_pass("cpu") if values.is_cpu else None
    if kernels is None or not kernels.is_readable(values):
        return 0
    return kernels.kernel_for(scheme, values.dtype) if before is None else before.kernel  # type: ignore[no-any-return]


def written_at_once(
    pools: CodePools, layer: int, slots: Tensor, values: Tensor, turn: Turn | None = None
) -> bool:
    """Codes new tokens of a scheme per token, (total, num_kv_heads, channels), in `slots` (total,) by a GPU's
    quantiser, turned on their way; -1 is nowhere. False if it has none of them: nothing was done then."""
    kernels = codec.one_pass("cuda") if values.is_cuda and not torch.compiler.is_compiling() else None
    if kernels is None or values.dtype is torch.float64:
        return False
    factors = None if turn is None else turn.factors(values)
    return kernels.write(values, pools.layers[layer], slots, factors)  # type: ignore[no-any-return]


class InPlace:
    """The groups of a step: their slots and live tokens (int64 numpy), and by number what is there of some
    before (tokens, values (num_layers, group size, num_kv_heads, channels)), beside which all new ones are
    kept. Codes of `known` groups are those of their values: they stay where no scale changes. From layer to
    layer only addresses change, so all else is laid out once."""

    def __init__(
        self, pools: CodePools, kernel: int, groups: Any, live: Any, begun: dict[int, Any], known: list[int]
    ) -> None:
        self.pools, self.kernel, self.layers = pools, kernel, set[int]()
        codes, table = pools.stores[0][:2]
        per_page, own = codes.shape[1] // pools.group, sorted(begun)
        first = np.zeros_like(groups)
        first[own] = [begun[at][0] for at in own]
        # Values that are known by their codes alone, of a group that this step fills, get room.
        self.buffers = {at: pools.room() if (x := begun[at][1]) is None else x for at in own}
        self._token = next((x.stride(1) * x.element_size() for x in self.buffers.values()), 0)
        new = live - first
        self._rows = new.cumsum() - new
        page, place = divmod(groups, per_page)
        at_table = 4 * (page * table.stride(0) + place * table.stride(1))
        of_codes = page * codes.stride(0) + place * pools.group * codes.stride(1)
        tails, kept, self._known = np.zeros_like(groups), np.zeros_like(groups), known
        tails[own], kept[known] = [x.data_ptr() for x in self.buffers.values()], first[known]
        self._table = np.stack((live, live, tails, first, of_codes, at_table, kept, self._rows), 1)
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
            self._table[:, 0] = self._rows * token
            self._like, self._prepared = like, self._made(self._table, *like)
        if layer in self.layers:  # codes are those of an earlier write of this step
            self._table[:, 6] = 0
        self.layers.add(layer)
        self._launch(layer, values.data_ptr(), *self._prepared)

    def rollback(self) -> None:
        """Makes the codes of groups that were there what they were, of the values that are known."""
        table = self._table[self._known]
        table[:, 0], table[:, 1] = table[:, 2], table[:, 3]
        table[:, 2] = table[:, 6] = 0
        head = self._token // self.pools.stores[0][0].shape[2]
        for layer in self.layers if len(table) else ():
            self._launch(layer, layer * self.pools.group * self._token, *self._made(table, head, self._token))

    def _made(self, table: Any, head: int, token: int, *angles: Any) -> Any:
        pools, kernels = self.pools, codec.one_pass("cpu")
        codes, scale, *_ = pools.stores[0]
        sizes = codes.shape[2], pools.group, pools.layers[0].shape[3]
        places = codes.stride(2), codes.stride(1), 4 * scale.stride(2), 4 * scale.stride(1)
        strides = kernels.Strides(head, token, *places)
        return kernels.prepared(self.kernel, pools.scheme, table, sizes, strides, 0, *angles)

    def _launch(self, layer: int, values: int, words: Any, how: Any) -> None:
        bases = (x.data_ptr() for x in self.pools.stores[layer])
        codec.one_pass("cpu").launch(words, how, values, layer * self.pools.group * self._token, *bases)
