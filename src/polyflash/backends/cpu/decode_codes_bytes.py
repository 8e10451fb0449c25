"""The stages that are others where codes meet Q and the weights as bytes, which `compute="int8"` asks for.

    S[key][row] = scale·Σ code·q8 + Σ q·shift         q8: signed, q times the scales of channels
    O[row][channel] += scale·Σ p8·code + Σ p·shift    p8: unsigned, p times the scale of its key

One instruction multiplies four neighbouring unsigned bytes with four signed ones and adds them up in 32 bits.
Codes of K are the unsigned side, more than their value by a middle; those of V the signed one, of four keys
side by side. A word of 16 bits is a byte here: of 8-bit codes it holds one, of 4-bit ones two.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from polyflash.backends.cpu.decode_codes_blocks import CodesTile
from polyflash.backends.cpu.decode_codes_configs import CodesKey
from polyflash.backends.cpu.decode_codes_weights import ByteWeights
from polyflash.backends.cpu.simd import I8, I16, Emitter, Value
from polyflash.quant.scheme import Codes

MIDDLES, VALUE_MIDDLES = {"int8": (128,), "int4": (8,)}, {"int8": (0,), "int4": (8, 0)}
VALUE_UNITS = {"int8": (1,), "int4": (1, 16)}  # the high code of a byte of V stays where it is, signed
MOST, MOST_WEIGHT = 127.0, 255.0  # in steps of a scale


def tile_of(key: CodesKey) -> CodesTile:
    return BytesTile(key) if key.bytes else CodesTile(key)


class BytesTile(ByteWeights):
    """Emissions for one key whose products are of bytes."""

    def __init__(self, key: CodesKey) -> None:
        super().__init__(key)
        self.words, self.halves = ir.VectorType(I8, 4 * self.lanes), ir.VectorType(I16, 2 * self.lanes)
        self.most, self.most_weight = MOST, MOST_WEIGHT
        self.middles, self.value_middles = MIDDLES[key.k.dtype], VALUE_MIDDLES[key.v.dtype]
        self.value_units = [1 / n for n in VALUE_UNITS[key.v.dtype]]

    def _dot(self, e: Emitter, acc: Value, x: Value, y: Value) -> Value:
        return e.dot_bytes(acc, e.b.bitcast(x, e.vi), e.b.bitcast(y, e.vi))

    def _part(self, e: Emitter, x: Value, codes: Codes, n: int) -> Value:
        """The n-th code of every byte, more than its value by its middle."""
        if codes.dtype == "int8":
            return e.b.xor(x, ir.Constant(self.words, [0x80] * self.words.count))
        return self._nibbles(e, x, n)

    def _counted(self, e: Emitter, total: Value, whole: list[Value], parts: list[Value]) -> Value:
        for part in parts:
            total = self._dot(e, total, ir.Constant(self.words, [1] * self.words.count), part)
        return total

    def _nibbles(self, e: Emitter, x: Value, n: int) -> Value:
        low, by = (ir.Constant(self.words, [bits] * self.words.count) for bits in (15, 4))
        return e.b.lshr(x, by) if n else e.b.and_(x, low)  # a byte's shift is one instruction of GFNI

    def _value_nibbles(self, e: Emitter, x: Value, n: int) -> Value:
        """The n-th code of every byte in steps of a 16th of `value_units`, one instruction each."""
        if not n:
            return self._nibbles(e, x, 0)
        signs, high = (ir.Constant(self.words, [bits] * self.words.count) for bits in (0x80, 0xF0))
        return e.b.and_(e.b.xor(x, signs), high)

    def _weigh_keys(
        self, e: Emitter, keys: list[Value], p_weights: Value, acc: list[Value], rows: range, columns: Any
    ) -> list[Value]:
        """Add the values of four keys to the sums; a column is some codes of one half of 128 bits."""
        codes, step, b = self.key.v, self._step(self.key.v), e.b
        for u in sorted({u for u, _ in columns}):
            x = [self._words(e, row, codes, self.key.head_dim_v, u) for row in keys]
            weights = [self._weight(e, p_weights, u, r) for r in rows]
            for half in sorted({c // step for own, c in columns if own == u}):
                pairs = [e.interleave_blocks(x[j], x[j + 1], half) for j in (0, 2)]
                for quarter in (0, 1):
                    low, high = (b.bitcast(z, self.halves) for z in pairs)
                    y = e.interleave_blocks(low, high, quarter)
                    for at, (own, c) in enumerate(columns):
                        if own != u or c // step != half:
                            continue
                        bits = b.bitcast(y, self.words)
                        part = bits if codes.dtype == "int8" else self._value_nibbles(e, bits, c % step)
                        for m, weight in enumerate(weights):
                            place = (at * 2 + quarter) * len(rows) + m
                            acc[place] = self._dot(e, acc[place], weight, part)
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
