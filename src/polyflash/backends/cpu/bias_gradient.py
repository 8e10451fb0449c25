"""Adds a tile of dS to the gradient of an additive bias: dBias = Σ dS where it broadcasts.

One object per instruction set and panel width serves every backward kernel, which calls it through a pointer.
A square of `lanes` keys by `lanes` rows is turned in registers, or summed over its rows or its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import backward_arguments as g
from polyflash.backends.cpu.backward_configs import BiasGradientKey
from polyflash.backends.cpu.simd import I64, Emitter, Value, natives


class _Square:
    """Emissions for one key. dS of what is no key and no row is 0."""

    def __init__(self, key: BiasGradientKey) -> None:
        self.lanes, self.nr = key.lanes, key.panel_rows

    def _load(self, e: Emitter, ds: Value) -> list[Value]:
        return [e.load(e.pointer(ds), r * self.nr * 4) for r in range(self.lanes)]

    def _sum(self, e: Emitter, x: list[Value]) -> Value:
        while len(x) > 1:
            x = [e.b.fadd(u, v) for u, v in zip(x[::2], x[1::2], strict=True)]
        return x[0]

    def _add(self, e: Emitter, x: Value, at: Value, inside: Value) -> None:
        e.masked_store(e.b.fadd(x, e.masked_load(at, inside, e.vf)), at, inside)

    def add_square(self, e: Emitter, ds, dst, stride, rows, keys) -> None:  # type: ignore[no-untyped-def]
        """Row r onto dst + r·stride."""
        b, inside = e.b, e.first_lanes(keys)
        for r, part in enumerate(e.transpose(self._load(e, ds))):
            mask = b.and_(inside, e.splat(b.icmp_signed("<", I64(r), rows)))
            self._add(e, part, e.at(e.pointer(dst), b.mul(I64(r), stride)), mask)

    def add_over_rows(self, e: Emitter, ds, dst, keys) -> None:  # type: ignore[no-untyped-def]
        turned = e.transpose(self._load(e, ds))
        self._add(e, self._sum(e, turned), e.pointer(dst), e.first_lanes(keys))

    def add_over_keys(self, e: Emitter, ds, dst, rows) -> None:  # type: ignore[no-untyped-def]
        self._add(e, self._sum(e, self._load(e, ds)), e.pointer(dst), e.first_lanes(rows))


def emissions(key: BiasGradientKey) -> Iterator[tuple[str, int, Callable[..., Any], bool]]:
    """Name, number of arguments, emission and whether it returns a value, of every stage."""
    square = _Square(key)
    yield "add_square", 5, square.add_square, False
    yield "add_over_rows", 3, square.add_over_rows, False
    yield "add_over_keys", 3, square.add_over_keys, False


def build(key: BiasGradientKey) -> Any:
    """Compile the sum of `key`: a numba cfunc `void(args, ds, i_b, head, row, row_end, key, end)`, all int64.

    Adds the tile at `ds`, [key][row], of keys [key, end) and of rows [row, row_end); keys come in whole
    squares, of which those from seqlen_k on are none."""
    from numba import cfunc, types

    from polyflash.backends.cpu import simd

    add_square, add_over_rows, add_over_keys = natives(key.name, key.isa, emissions(key)).values()
    arg, least = simd.word, simd.least
    LANES, NV, S_ROW = key.lanes, key.nv, key.panel_rows * 4

    @cfunc(types.void(*[types.int64] * 8), error_model="numpy", forceinline=True)
    def add(args, ds, i_b, head, row, row_end, key, end):  # type: ignore[no-untyped-def]
        total = arg(args, g.DBIAS) + i_b * arg(args, g.DBIAS_BATCH) + head * arg(args, g.DBIAS_HEAD)
        row_stride, key_stride = arg(args, g.DBIAS_ROW), arg(args, g.DBIAS_KEY)
        if key_stride == 0:
            total += key // arg(args, g.CHUNK) * arg(args, g.DBIAS_CHUNK)
        for v in range(NV):
            first = row + v * LANES
            rows = least(LANES, row_end - first)
            if rows <= 0:
                break
            for j in range(key, end, LANES):
                tile = ds + (j - key) * S_ROW + v * LANES * 4
                keys, at = arg(args, a.SEQLEN_K) - j, total + first * row_stride + j * key_stride
                if key_stride == 0:
                    add_over_keys(tile, at, rows)
                elif row_stride == 0:
                    add_over_rows(tile, at, keys)
                else:
                    add_square(tile, at, row_stride, rows, keys)

    return add
