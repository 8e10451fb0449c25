"""Codes written in place by the CPU's quantiser: new values are read where the caller has them, those of
unfinished groups where their tails are, and codes, scales and shifts go to their slots in the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyflash.quant import codec

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def quantiser_of(scheme: Scheme, values: Tensor) -> int:
    """Address of what quantises such values as they lie; 0 if they have to be made ready first."""
    kernels = codec.one_pass("cpu") if values.is_cpu else None
    if kernels is None or not kernels.is_readable(values):
        return 0
    return kernels.kernel_for(scheme, values.dtype)  # type: ignore[no-any-return]


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
    before (tokens, values (num_layers, group size, num_kv_heads, channels)): all new values of those are kept
    beside these. The codes of groups that are `known` are those of their values: they stay where no scale
    changes."""

    def __init__(
        self,
        pools: CodePools,
        groups: Any,
        live: Any,
        begun: dict[int, tuple[int, Tensor | None]],
        known: Sequence[int],
    ) -> None:
        self.pools, self._layers = pools, dict[int, int]()
        codes, table = pools.stores[0][:2]
        per_page = codes.shape[1] // pools.group
        self._begun = sorted(begun)
        first = np.zeros_like(groups)
        first[self._begun] = [begun[at][0] for at in self._begun]
        # Values that are known by their codes alone, of a group that this step fills, get room.
        self.buffers = {at: pools.room() if (x := begun[at][1]) is None else x for at in self._begun}
        self._bases = np.array([self.buffers[at].data_ptr() for at in self._begun], np.int64)
        new = live - first
        self._rows = new.cumsum() - new
        page, place = divmod(groups, per_page)
        at_table = page * table.stride(0) + place * table.stride(1)
        of_codes = page * codes.stride(0) + place * pools.group * codes.stride(1)
        zeros = np.zeros_like(groups)
        self._known = list(known)
        columns = zeros, live, zeros, first, of_codes, 4 * at_table, zeros, self._rows
        self._table = np.stack(columns, 1)

    def write(self, kernel: int, layer: int, values: Tensor, turn: Turn | None) -> None:
        """Quantises the new tokens of a layer, (total, num_kv_heads, channels), turned on their way."""
        angles = (0, 0, 0, False)
        if turn is not None:
            cos, sin, neighbours = turn.factors(values)
            angles = cos.data_ptr(), sin.data_ptr(), cos.shape[1], neighbours
        if values.stride(2) != 1 or self._begun:  # tails are dense
            values = values.contiguous()
        size, table = values.element_size(), self._table.copy()
        table[:, 0] = values.data_ptr() + self._rows * (values.stride(0) * size)
        if self._begun:
            table[self._begun, 2] = table[self._begun, 0]
            table[self._begun, 0] = self._of_layer(layer)
        if layer not in self._layers:  # else codes are those of what this step wrote before
            table[self._known, 6] = table[self._known, 3]
        self._launch(kernel, layer, table, (values.stride(1) * size, values.stride(0) * size), angles)
        self._layers[layer] = kernel

    def rollback(self) -> None:
        """Makes the codes of groups that were there what they were, of the values that are known."""
        table = self._table[self._begun]
        were = table[:, 3] > 0
        table[:, 1] = table[:, 3]
        for layer, kernel in self._layers.items() if were.any() else ():
            _, _, heads, channels = self.buffers[self._begun[0]].shape
            size = self.pools.dtype.itemsize * channels
            table[:, 0] = self._of_layer(layer)
            self._launch(kernel, layer, table[were], (size, size * heads))

    def _of_layer(self, layer: int) -> Any:
        buffer = self.buffers[self._begun[0]]
        return self._bases + layer * buffer.stride(0) * buffer.element_size()

    def _launch(self, kernel: int, layer: int, table: Any, strides: tuple[int, int], *angles: Any) -> None:
        pools = self.pools
        codes, scale, *shifts = pools.stores[layer]
        shift = shifts[0].data_ptr() if shifts else 0
        heads = codes.stride(2), codes.stride(1), scale.data_ptr(), shift, 4 * scale.stride(2)
        kernels = codec.one_pass("cpu")
        places = kernels.Places(codes.data_ptr(), *heads, 4 * scale.stride(1))
        sizes = codes.shape[2], pools.group, pools.layers[0].shape[3]
        kernels.launch(kernel, pools.scheme, table, sizes, strides, places, 0, *angles)
