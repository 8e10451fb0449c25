"""The stages that are others where codes meet Q and the weights by bytes.

One instruction multiplies four neighbouring unsigned bytes with four signed ones and adds them up in 32 bits.
A word of 16 bits is a byte here: of 8-bit codes it holds one, of 4-bit ones two; of V four keys lie side by
side. `compute="int8"` asks for Q and weights that are bytes themselves:

    S[key][row] = scale·Σ code·q8 + Σ q·shift         q8: signed, q times the scales of channels
    O[row][channel] += scale·Σ p8·code + Σ p·shift    p8: unsigned, p times the scale of its key

Codes of K are the unsigned side, more than their value by a middle; those of V the signed one. Else 16-bit
integers are multiplied as two bytes, 2⁸·Σ code·high + Σ code·low, of which the high one is signed and the low
one is not. The sums are those of 16-bit products to the bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from polyflash.backends.cpu.decode_codes_blocks import CodesTile
from polyflash.backends.cpu.decode_codes_configs import CodesKey
from polyflash.backends.cpu.decode_codes_turns import CodesTurns
from polyflash.backends.cpu.decode_codes_weights import ByteWeights
from polyflash.backends.cpu.simd import I8, I16, Emitter, Value
from polyflash.quant.scheme import Codes

MIDDLES, VALUE_MIDDLES = {"int8": (128,), "int4": (8,)}, {"int8": (0,), "int4": (8, 0)}
HALVES_MIDDLES = {"int8": (128 << 8,), "int4": (8,)}  # of 8 bits the high byte's alone
VALUE_UNITS = {"int8": (1,), "int4": (1, 16)}  # the high code of a byte of V stays where it is, signed
MOST, MOST_WEIGHT = 127.0, 255.0  # in steps of a scale


def tile_of(key: CodesKey) -> CodesTile:
    return BytesTile(key) if key.bytes else HalvesTile(key) if key.halves else CodesTile(key)


class Bytes(CodesTile):
    """Emissions of tiles whose products are of bytes."""

    def __init__(self, key: CodesKey) -> None:
        super().__init__(key)
        self.words, self.halves = ir.VectorType(I8, 4 * self.lanes), ir.VectorType(I16, 2 * self.lanes)

    def _dot(self, e: Emitter, acc: Value, x: Value, y: Value) -> Value:
        """acc + Σ x·y, of unsigned bytes and signed ones."""
        return e.dot_bytes(acc, e.b.bitcast(x, e.vi), e.b.bitcast(y, e.vi))

    def _every(self, byte: int) -> Value:
        return ir.Constant(self.words, [byte] * self.words.count)

    def _nibbles(self, e: Emitter, x: Value, n: int) -> Value:
        return e.b.lshr(x, self._every(4)) if n else e.b.and_(x, self._every(15))  # each one instruction

    def _value_parts(self, e: Emitter, x: Value, n: int) -> list[Value]:
        """The n-th code of V of every byte, for each piece of a weight."""
        return self._parts(e, x, self.key.v, n)

    def _add_value_dots(
        self, e: Emitter, sums: list[Value], parts: list[Value], weights: list[Value]
    ) -> list[Value]:
        return self._add_dots(e, sums, parts, weights)

    def _weigh_keys(
        self, e: Emitter, keys: list[Value], p_weights: Value, acc: list[Value], rows: range, columns: Any
    ) -> list[Value]:
        """Add the values of four keys to the sums; a column is some codes of one half of 128 bits."""
        codes, step, b = self.key.v, self._step(self.key.v), e.b
        for u in sorted({u for u, _ in columns}):
            x = [self._words(e, row, codes, self.key.head_dim_v, u) for row in keys]
            weights = [self._pieces(e, p_weights, u, r) for r in rows]
            for half in sorted({c // step for own, c in columns if own == u}):
                pairs = [e.interleave_blocks(x[j], x[j + 1], half) for j in (0, 2)]
                for quarter in (0, 1):
                    low, high = (b.bitcast(z, self.halves) for z in pairs)
                    y = e.interleave_blocks(low, high, quarter)
                    for at, (own, c) in enumerate(columns):
                        if own != u or c // step != half:
                            continue
                        parts = self._value_parts(e, b.bitcast(y, self.words), c % step)
                        for m, weight in enumerate(weights):
                            first = ((at * 2 + quarter) * len(rows) + m) * self.pieces
                            sums = slice(first, first + self.pieces)
                            acc[sums] = self._add_value_dots(e, acc[sums], parts, weight)
        return acc

    def _narrow(self, e: Emitter, x: list[Value]) -> Value:
        """A unit of O, [half of 128 bits][part of a byte][half of that][lane], as channels in their order."""
        step, n = self._step(self.key.v), self.lanes
        y = self._joined(e, [e.narrow(part, self.key.storage) for part in x])
        order = []
        for channel in range(len(x) * n):
            byte, part = divmod(channel, step)
            block, place = divmod(byte, 16)
            vector = 2 * (place // 8 * step + part) + place // 4 % 2
            order.append(vector * n + 4 * block + place % 4)
        return e.shuffle(y, y, order)


class BytesTile(Bytes, ByteWeights):
    """Emissions for one key whose Q and weights are bytes."""

    def __init__(self, key: CodesKey) -> None:
        super().__init__(key)
        self.most, self.most_weight = MOST, MOST_WEIGHT
        self.middles, self.value_middles = MIDDLES[key.k.dtype], VALUE_MIDDLES[key.v.dtype]
        self.value_units = [1 / n for n in VALUE_UNITS[key.v.dtype]]

    def _part(self, e: Emitter, x: Value, codes: Codes, n: int) -> Value:
        """The n-th code of every byte, more than its value by its middle."""
        if codes.dtype == "int8":
            return e.b.xor(x, self._every(0x80))
        if n:  # LLVM shifts bytes by `vgf2p8affineqb`, which takes units of Zen's that products need
            halves = e.b.bitcast(x, self.halves)
            halves = e.b.lshr(halves, ir.Constant(self.halves, [4] * self.halves.count))
            x = e.b.bitcast(halves, self.words)
        return self._nibbles(e, x, 0)

    def _counted(self, e: Emitter, total: Value, whole: list[Value], parts: list[Value]) -> Value:
        for part in parts:
            total = self._dot(e, total, self._every(1), part)
        return total

    def _value_parts(self, e: Emitter, x: Value, n: int) -> list[Value]:
        """The n-th code of every byte in steps of a 16th of `value_units`, one instruction each."""
        if self.key.v.dtype == "int8":
            return [x]
        return [e.b.and_(e.b.xor(x, self._every(0x80)), self._every(0xF0)) if n else self._nibbles(e, x, 0)]

    def _add_value_dots(
        self, e: Emitter, sums: list[Value], parts: list[Value], weights: list[Value]
    ) -> list[Value]:
        return [self._dot(e, sums[0], weights[0], parts[0])]


class HalvesTile(Bytes, CodesTurns):
    """Emissions for one key whose Q and weights are 16-bit integers, of two bytes: low and high."""

    pieces = 2

    def __init__(self, key: CodesKey) -> None:
        super().__init__(key)
        self.value_units = [1.0]
        self.middles, self.value_middles = (HALVES_MIDDLES[x.dtype] for x in (key.k, key.v))

    def _parts(self, e: Emitter, x: Value, codes: Codes, n: int) -> list[Value]:
        """The n-th code of every byte: signed for the low bytes, for the high ones unsigned."""
        if codes.dtype == "int8":
            return [x, e.b.xor(x, self._every(0x80))]
        return [self._nibbles(e, x, n)] * 2

    def _add_dots(
        self, e: Emitter, sums: list[Value], parts: list[Value], rounded: list[Value]
    ) -> list[Value]:
        return [self._dot(e, sums[0], rounded[0], parts[0]), self._dot(e, sums[1], parts[1], rounded[1])]

    def _whole(self, e: Emitter, sums: list[Value]) -> Value:
        return e.b.add(sums[0], e.b.shl(sums[1], e.ints(8)))

    def _counts(self, e: Emitter, whole: Value, codes: Codes) -> Value:
        x = super()._counts(e, whole, codes)
        return e.b.ashr(x, e.ints(8)) if codes.dtype == "int8" else x

    # Q: the planes of low bytes, and those of high ones
    def _query(self, e: Emitter, planes: Value, place: int) -> list[Value]:
        return [e.load(planes, place + i * self.key.finer // 2, self.words) for i in (0, 1)]

    def _store_planes(
        self, e: Emitter, planes: Value, unit: int, row: int, whole: list[Value]
    ) -> list[Value]:
        high = [e.b.lshr(x, e.ints(8)) for x in whole]
        parts = super()._store_planes(e, planes, unit, row, whole)
        return parts + super()._store_planes(e, e.at(planes, self.key.finer // 2), unit, row, high)

    # weights: four low bytes, then four high ones
    def _in_words(self, e: Emitter, x: list[Value]) -> Value:
        y = super()._in_words(e, x)
        y = e.b.bitcast(y, ir.VectorType(I8, 2 * y.type.count))
        return e.shuffle(y, y, [i // 8 * 8 + i % 4 * 2 + i % 8 // 4 for i in range(y.type.count)])
