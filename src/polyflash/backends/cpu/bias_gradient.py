"""Adds a tile of dS to the gradient of an additive bias: dBias = Σ dS where it broadcasts.

One object per instruction set and panel width serves every backward kernel, which calls it through a pointer.
A square of `lanes` keys by `lanes` rows is turned in registers, or summed over its rows or its keys.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import intrinsics
from polyflash.backends.cpu.backward_configs import BiasGradientKey
from polyflash.backends.cpu.intrinsics import least, stage
from polyflash.backends.cpu.simd import I64, Emitter, Value
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import BACKWARD


class BiasTile:
    """Emissions for one key. dS of what is no key and no row is 0."""

    def __init__(self, key: BiasGradientKey) -> None:
        self.lanes, self.nr = key.lanes, key.panel_rows

    def _load(self, e: Emitter, ds: Value) -> list[Value]:
        return [e.load(e.pointer(ds), r * self.nr * 4) for r in range(self.lanes)]

    def _add(self, e: Emitter, x: Value, at: Value, inside: Value) -> None:
        e.store(e.b.fadd(x, e.load(at, inside=inside)), at, inside=inside)

    @stage
    def add_square(self, e: Emitter, ds, dst, stride, rows, keys) -> None:
        """Row r onto dst + r·stride."""
        b, inside = e.b, e.first_lanes(keys)
        for r, part in enumerate(e.transpose(self._load(e, ds))):
            mask = b.and_(inside, e.splat(b.icmp_signed("<", I64(r), rows)))
            self._add(e, part, e.at(e.pointer(dst), b.mul(I64(r), stride)), mask)

    @stage
    def add_over_rows(self, e: Emitter, ds, dst, keys) -> None:
        turned = e.transpose(self._load(e, ds))
        self._add(e, e.summed(turned), e.pointer(dst), e.first_lanes(keys))

    @stage
    def add_over_keys(self, e: Emitter, ds, dst, rows) -> None:
        self._add(e, e.summed(self._load(e, ds)), e.pointer(dst), e.first_lanes(rows))


def build(key: BiasGradientKey) -> Any:
    """Compile the sum of `key`: a numba cfunc `void(args, ds, i_b, head, row, row_end, key, end)`, all int64.

    Adds the tile at `ds`, [key][row], of keys [key, end) and of rows [row, row_end); keys come in whole
    squares, of which those from seqlen_k on are none."""
    stage, block = intrinsics.stages(key, BiasTile(key)), Blocks(BACKWARD)
    LANES, NV, S_ROW = key.lanes, key.nv, key.panel_rows * 4

    @block.kernel
    def add(args, ds, i_b, head, row, row_end, key, end):
        total = args.dbias + i_b * args.dbias_batch + head * args.dbias_head
        row_stride, key_stride = args.dbias_row, args.dbias_key
        if key_stride == 0:
            total += key // args.chunk * args.dbias_chunk
        for v in range(NV):
            first = row + v * LANES
            rows = least(LANES, row_end - first)
            if rows <= 0:
                break
            for j in range(key, end, LANES):
                part = ds + (j - key) * S_ROW + v * LANES * 4
                keys, at = args.seqlen_k - j, total + first * row_stride + j * key_stride
                if key_stride == 0:
                    stage.add_over_keys(part, at, rows)
                elif row_stride == 0:
                    stage.add_over_rows(part, at, keys)
                else:
                    stage.add_square(part, at, row_stride, rows, keys)

    return add
