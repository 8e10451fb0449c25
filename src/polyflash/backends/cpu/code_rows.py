"""Rows of codes of any scheme become values, channel by channel: the codec's, bit for bit."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from polyflash.backends.cpu.address_lists import PREFETCH_LEVEL
from polyflash.backends.cpu.configs import LINE, STORAGE_BYTES
from polyflash.backends.cpu.decode_codes_floats import HALVES, TIMES, chosen, every, halves_of
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.quantize_configs import ValuesKey
from polyflash.backends.cpu.simd import F32, I8, I16, Emitter, Value
from polyflash.quant.scheme import KINDS, TABLES, Block, Codes


class CodeRows:
    """Emissions of rows of codes as float32."""

    lanes: int

    def put(self, e: Emitter, x: Value, place: Value, own: range) -> None:
        """Stores a vector of which these channels are live, in a row that has room for whole vectors."""
        e.store(x, place, own.start * 4)

    def decode(self, e: Emitter, codes: Codes, channels: int, count: Value, places: Any) -> None:
        """`count` rows; `places` are where codes, values, scales, shifts and what is prefetched begin, each
        with the bytes from one row to the next."""
        b, n = e.b, self.lanes
        with e.walk(count, *places) as (row, place, scale, shift, later):
            for byte in range(0, channels * KINDS[codes.dtype].bits // 8, LINE):
                e.prefetch(e.at(later, byte), PREFETCH_LEVEL)
            known: dict[Any, Value] = {}
            for first in range(0, channels, 2 * n):
                units = self._units_of_scale(e, row, codes.dtype, first, min(2 * n, channels - first))
                for at, x in zip(range(first, channels, n), units, strict=False):
                    own = range(at, min(at + n, channels))
                    x = b.fmul(x, self._entries(e, scale, codes.tables, codes.scale, own, known))
                    if codes.shift is not None:
                        x = b.fadd(x, self._entries(e, shift, codes.tables, codes.shift, own, known))
                    self.put(e, x, place, own)

    def _entries(
        self, e: Emitter, table: Value, storage: str, block: Block, channels: range, known: dict[Any, Value]
    ) -> Value:
        """Scales or shifts of a row for some channels; `known` are those that it has loaded."""
        own = [channel // block.channels if block.channels else 0 for channel in channels]
        place, width = (table, own[0], own[-1]), own[-1] - own[0] + 1
        if place not in known:
            size, kind = (4, F32) if storage == "float32" else (2, I16)
            if width == 1:
                x = e.splat(e.load(table, own[0] * size, kind))
            else:
                x = e.load(table, own[0] * size, ir.VectorType(kind, width))
                own += own[-1:] * (self.lanes - len(own))
                x = e.shuffle(x, x, (entry - own[0] for entry in own))
            known[place] = e.widen(x, storage)
        return known[place]

    def _units_of_scale(self, e: Emitter, row: Value, dtype: str, first: int, count: int) -> list[Value]:
        """Two vectors of the `count` codes from `first` on, as float32; any behind them."""
        b, n, bits = e.b, self.lanes, KINDS[dtype].bits
        x = e.load(row, first * bits // 8, ir.VectorType(I8, -(-count * bits // 8)))
        x = e.shuffle(x, x, (min(i, x.type.count - 1) for i in range(2 * n * bits // 8)))
        if bits == 4:  # a byte each, in their order
            x = e.shuffle(x, x, (i // 2 for i in range(2 * n)))
            high = ir.Constant(x.type, [4 * (i % 2) for i in range(2 * n)])
            x = b.and_(b.lshr(x, high), every(x.type, 15))
        if dtype in HALVES:
            words = ir.VectorType(I16, 2 * n)
            x = halves_of(e, b.shl(b.zext(x, words), every(words, 8)), dtype)
        halves = [e.shuffle(x, x, range(i, i + n)) for i in (0, n)]
        if dtype in HALVES:
            times = e.floats(TIMES.get(dtype, 1.0))
            return [b.fmul(e.from_f16(y), times) for y in halves]
        if dtype in TABLES:
            return [chosen(e, TABLES[dtype], b.zext(y, e.vi)) for y in halves]
        if dtype == "int4":
            return [b.sitofp(b.sub(b.zext(y, e.vi), e.ints(8)), e.vf) for y in halves]
        return [b.sitofp(b.sext(y, e.vi), e.vf) for y in halves]


class ValuesTile(CodeRows):
    """Emissions for one key."""

    def __init__(self, key: ValuesKey) -> None:
        self.key, self.lanes = key, key.lanes

    def put(self, e: Emitter, x: Value, place: Value, own: range) -> None:
        x = e.narrow(x, self.key.storage)
        x = e.shuffle(x, x, range(len(own))) if len(own) < self.lanes else x
        e.store(x, place, own.start * STORAGE_BYTES[self.key.storage])

    @stage
    def decode_rows(
        self, e: Emitter, src, step, count, dst, width, scale, scale_step, shift, shift_step, ahead
    ) -> None:
        """See `DecodedTile.decode_keys`."""
        places = (src, step), (dst, width), (scale, scale_step), (shift, shift_step), (ahead, step)
        self.decode(e, self.key.codes, self.key.head_dim, count, places)
