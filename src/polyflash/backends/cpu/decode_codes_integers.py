"""Codes and rows of Q as vectors of 16-bit integers, for the stages of decode_codes_scores.py
and decode_codes_blocks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any, TypeAlias

from llvmlite import ir

from polyflash.backends.cpu.address_lists import NEAR_LEVEL, PREFETCH_LEVEL
from polyflash.backends.cpu.configs import LINE, STEP
from polyflash.backends.cpu.decode_blocks import DecodeTile
from polyflash.backends.cpu.decode_codes_configs import CodesKey
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I8, I16, I32, I64, Emitter, Value
from polyflash.quant.scheme import KINDS, Codes, per_word

MOST = 32767.0  # in steps of a scale
MIDDLES = {"int8": (128, 0), "int4": (8,)}  # of parts by turns: the integer that stands for 0
ROUNDED = 0x4B400000  # the bits of 1.5·2²³, beyond which a float32 counts in ones
PARTS = 65000.0  # of a step: half of one is less than 2^15 of them
CHOSEN = 0xCA  # of a `vpternlogd`: bits of the second where the first has ones, else of the third
# A list of addresses, an entry of it, a byte of its row, and the level of the cache that it is for.
Line: TypeAlias = tuple[Value, int, int | Value, int]
LEAST = 1e-34  # of a largest value, below which all are 0: the inverse of its scale is finite


class Integers(DecodeTile):
    """Emissions that the stages of a tile over codes share."""

    key: CodesKey
    pieces = 1  # sums in registers that make one

    def __init__(self, key: CodesKey) -> None:
        super().__init__(key)
        self.words = ir.VectorType(I16, 2 * self.lanes)
        self.most = self.most_weight = MOST
        self.middles, self.value_middles = MIDDLES[key.k.dtype], MIDDLES[key.v.dtype]
        self.value_units = [1.0] * len(self.value_middles)  # of what stands for 1 in a code of V
        self.parts = key.unit // self.lanes
        self.fours = 2 if key.joined == 4 and self.rows == 4 else 1  # of keys whose scores are made at once

    # codes
    def _step(self, codes: Codes) -> int:
        """Codes in an integer."""
        return 2 * per_word(codes) // self.key.joined

    def _integers(self, e: Emitter, x: Value) -> Value:
        """The low bits of 32-bit ones."""
        return e.b.trunc(x, ir.VectorType(ir.IntType(8 * self.key.rounded_bytes), self.lanes))

    def _units_of(self, codes: Codes, channels: int) -> range:
        return range(-(-channels // self.key.unit_of(codes)))

    def _words(self, e: Emitter, row: Value, codes: Codes, channels: int, unit: int) -> Value:
        """A vector of codes of the row at `row`; what lies past the row is 0."""
        size = channels * KINDS[codes.dtype].bits // 8 - unit * e.bytes
        if size >= e.bytes:
            return e.load(e.at(row, unit * e.bytes), 0, self.words)
        kind = ir.VectorType(I8, e.bytes)
        if e.isa == "avx512":
            mask = ir.Constant(ir.VectorType(ir.IntType(1), e.bytes), [n < size for n in range(e.bytes)])
            x = e.load(row, unit * e.bytes, kind, mask)
        else:  # has no such mask
            x = e.load(row, unit * e.bytes, ir.VectorType(I8, size))
            x = e.shuffle(x, ir.Constant(x.type, None), (min(n, size) for n in range(e.bytes)))
        return e.b.bitcast(x, self.words)

    def _part(self, e: Emitter, x: Value, codes: Codes, n: int) -> Value:
        """The n-th code of every word as a 16-bit integer, more than its value by its middle."""
        b, bits = e.b, KINDS[codes.dtype].bits
        by, low, middle = (
            ir.Constant(self.words, [w] * self.words.count) for w in (n * bits, 2**bits - 1, 0x80)
        )
        if codes.dtype == "int8":
            return b.ashr(x, by) if n else b.and_(b.xor(x, middle), low)
        moved = b.lshr(x, by) if n else x
        return b.and_(moved, low) if (n + 1) * bits < 16 else moved

    def _dot(self, e: Emitter, acc: Value, x: Value, y: Value) -> Value:
        """acc + x[2i]·y[2i] + x[2i+1]·y[2i+1] per lane, of 16-bit integers into 32 bits."""
        b, n = e.b, self.lanes
        names = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd"}
        if n in names:
            return b.add(acc, e.call(names[n], e.vi, [x, y]))
        wide = ir.VectorType(I32, 2 * n)
        z = b.mul(b.sext(x, wide), b.sext(y, wide))
        for half in (0, 1):
            acc = b.add(acc, e.shuffle(z, z, range(half, 2 * n, 2)))
        return acc

    def _query(self, e: Emitter, planes: Value, place: int) -> list[Value]:
        """A vector of rounded q, a piece each."""
        return [e.load(planes, place, self.words)]

    def _parts(self, e: Emitter, x: Value, codes: Codes, n: int) -> list[Value]:
        """The n-th code of every integer, for each piece of what it meets."""
        return [self._part(e, x, codes, n)]

    def _add_dots(
        self, e: Emitter, sums: list[Value], parts: list[Value], rounded: list[Value]
    ) -> list[Value]:
        """Add the products of codes and rounded q or weights to the pieces of a sum."""
        return [self._dot(e, sums[0], parts[0], rounded[0])]

    def _whole(self, e: Emitter, sums: list[Value]) -> Value:
        """A sum of its pieces."""
        return sums[0]

    @stage
    def list_next(self, e: Emitter, own_k, later_k, k_step, own_v, later_v, v_step, count) -> None:
        """Lists as `later` rows those a step behind `count` own ones; and behind each list of those at hand
        the first rows of what is read after it, for requests that run ahead. (If they are more than `count`,
        any addresses.)"""
        b, n, kind = e.b, self.lanes // 2, ir.VectorType(I64, self.lanes // 2)
        k_step, v_step = e.splat(k_step, n), e.splat(v_step, n)
        p_k, p_v, end = e.pointer(own_k), e.pointer(own_v), b.mul(count, I64(8))
        for place in range(0, self.key.near * 8, n * 8):
            behind = b.add(end, I64(place))
            first_k, first_v = (e.load(p, place, kind) for p in (p_k, p_v))
            e.store(first_v, e.at(p_k, behind))
            e.store(b.add(first_k, k_step), e.at(p_v, behind))
        places = ((x, STEP * 8) for x in (own_k, later_k, own_v, later_v))
        with e.walk(b.udiv(count, I64(STEP)), *places) as (from_k, to_k, from_v, to_v):
            for place in range(0, STEP * 8, n * 8):
                e.store(b.add(e.load(from_k, place, kind), k_step), to_k, place)
                e.store(b.add(e.load(from_v, place, kind), v_step), to_v, place)

    # rounding
    def _bits_of_size(self, e: Emitter, x: Value) -> Value:
        """|x| as an integer, by which a NaN is the largest of all."""
        return e.b.and_(e.b.bitcast(x, e.vi), e.ints(0x7FFFFFFF))

    def _steps(self, e: Emitter, top: Value, most: float, *, power: bool = False) -> tuple[Value, Value]:
        """A scale of which |x| with these bits is `most` steps, and its inverse; NaN and 0 of none. If it is
        a power of two, values in 16 bits that are not small beside the largest lose nothing."""
        b, bits, top = e.b, top, e.b.bitcast(top, e.vf)
        unit, inverse = b.fmul(top, e.floats(1 / most)), b.fdiv(e.floats(most), top)
        if power:
            unit_bits = b.sub(b.and_(bits, e.ints(0x7F800000)), e.ints(14 << 23))
            unit = b.bitcast(unit_bits, e.vf)
            inverse = b.bitcast(b.sub(e.ints(254 << 23), unit_bits), e.vf)
        least = e.floats(LEAST * 2.0 ** (14 if power else 16 if self.key.split else 0))
        inverse = b.select(b.fcmp_ordered(">", top, least), inverse, e.floats(0))
        return e.fma(top, e.floats(0), unit), inverse

    def _rounded(self, e: Emitter, x: Value, inverse: Value) -> Value:
        """Steps of a scale: 32-bit integers that are those of ROUNDED more, 16-bit ones in their low halves.
        What is not a number becomes any."""
        return e.b.bitcast(e.fma(x, inverse, e.floats(1.5 * 2**23)), e.vi)

    def _left(self, e: Emitter, x: Value, whole: Value, unit: Value) -> Value:
        """The rest of x behind whole steps, as `_rounded` gives them."""
        steps = e.b.fsub(e.floats(1.5 * 2**23), e.b.bitcast(whole, e.vf))
        return e.fma(steps, unit, x)

    @stage
    def load_query(self, e: Emitter, src: Value, channels: Value, dst: Value, sign: Value) -> None:
        """One row as float32, zeros up to a whole unit; `sign` flips the bits of a negative scale."""
        b, flip, n = e.b, e.splat(e.b.trunc(sign, I32)), self.lanes
        row, place, kind = e.pointer(src), e.pointer(dst), e.vf if self.size == 4 else e.vh
        for first in range(0, self.key.query_row // 4, n):
            there = ir.Constant(e.vbits, [first + m < self.key.head_dim for m in range(n)])
            x = e.widen(e.load(row, first * self.size, kind, there), self.key.storage)
            e.store(b.bitcast(b.xor(b.bitcast(x, e.vi), flip), e.vf), place, first * 4)

    @stage
    def scale_query(self, e: Emitter, q, scale, later) -> None:
        """Prepare the next `fold_query`, as a largest value and its inverse are long in coming: the rows of Q
        at `q` times the scales of channels at `scale`, if K has those, and their steps. The `later` scales
        are prefetched."""
        key, tile, tops = self.key, e.pointer(q), [e.ints(0)] * self.rows
        scales = self._entries(e, scale, later) if key.scaled else None
        for first in self._vectors():
            for r in range(self.rows):
                place = r * key.query_row + first * 4
                x = e.load(tile, place)
                if scales is not None:
                    x = e.b.fmul(x, scales(first))
                    e.store(x, tile, key.products + place)
                tops[r] = e.smax(tops[r], self._bits_of_size(e, x))
        self._store_steps(e, tile, tops)

    def _store_steps(self, e: Emitter, tile: Value, tops: list[Value]) -> None:
        """Store those of rows whose largest |x| `tops` have, lane by lane."""
        power = not (self.key.scaled or self.key.bytes or self.key.split)  # float32 may have 2^15 steps
        for i, x in enumerate(self._steps(e, self._of_rows(e, tops, e.smax), self.most, power=power)):
            e.store(x, tile, self.key.next_steps + i * e.bytes)

    @stage
    def fold_query(self, e: Emitter, q, shift, later) -> None:
        """At `q` integers of the rows that `scale_query` left there, and the product of Q with the shifts, if
        K has any. The `later` shifts are prefetched."""
        b, key, rows, tile, channels = e.b, self.key, range(self.rows), e.pointer(q), self._vectors()
        unit, inverse = (e.load(tile, key.next_steps + i * e.bytes) for i in (0, 1))
        totals = self._moved(e, tile, shift, later)
        sums, finer, per = [e.ints(0)] * self.rows, [e.ints(0)] * self.rows, 2 * per_word(key.k)
        units, steps = ([e.shuffle(x, x, [r] * self.lanes) for r in rows] for x in (unit, inverse))
        for u in range(0, len(channels), per):
            for r in rows:
                whole, rest = [], []
                for first in channels[u : u + per]:
                    x = self._product(e, tile, r, first)
                    whole.append(self._rounded(e, x, steps[r]))
                    if key.split:
                        left = self._left(e, x, whole[-1], units[r])
                        rest.append(self._rounded(e, left, b.fmul(steps[r], e.floats(PARTS))))
                parts = self._store_planes(e, e.at(tile, key.planes), u // per, r, whole)
                sums[r] = self._counted(e, sums[r], whole, parts)
                if key.split:
                    parts = self._store_planes(e, e.at(tile, key.planes + key.finer), u // per, r, rest)
                    finer[r] = self._counted(e, finer[r], rest, parts)
        middle = ir.Constant(e.vi, [self.middles[m % len(self.middles)] for m in range(self.lanes)])
        more = [self._of_rows(e, [b.mul(x, middle) for x in y], b.add) for y in (sums, finer)]
        for i, x in enumerate((unit, totals, *more[: 1 + key.split])):
            e.store(x, tile, key.query_stats + i * e.bytes)

    def _vectors(self) -> range:
        """The first channels of a row's vectors."""
        return range(0, self.key.query_row // 4, self.lanes)

    def _product(self, e: Emitter, tile: Value, r: int, first: int) -> Value:
        """A vector of row r of Q, times K's scales if they are those of channels."""
        return e.load(tile, self.key.products + r * self.key.query_row + first * 4)

    def _moved(self, e: Emitter, tile: Value, shift: Value, later: Value) -> Value:
        """The products of the rows of Q with K's shifts, in the lanes of a row; 0 if it has none."""
        totals = [e.floats(0)] * self.rows
        if self.key.k.shift is not None:
            shifts = self._entries(e, shift, later)
            for r, first in product(range(self.rows), self._vectors()):
                x = e.load(tile, r * self.key.query_row + first * 4)
                totals[r] = e.fma(x, shifts(first), totals[r])
        return self._of_rows(e, totals, e.b.fadd)

    def _entries(self, e: Emitter, table: Value, later: Value) -> Callable[[int], Value]:
        """Make what gives a vector of a table of channels as floats; the `later` one is prefetched."""
        size, kind = (4, e.vf) if self.key.k.tables == "float32" else (2, e.vh)
        for first in self._vectors()[:: max(1, LINE // (self.lanes * size))]:
            e.prefetch(e.at(e.pointer(later), first * size), PREFETCH_LEVEL)

        @cache
        def entries(first: int) -> Value:
            there = ir.Constant(e.vbits, [first + m < self.key.head_dim for m in range(self.lanes)])
            return e.widen(e.load(e.pointer(table), first * size, kind, there), self.key.k.tables)

        return entries

    def _of_rows(self, e: Emitter, x: list[Value], combine: Any) -> Value:
        """One vector of those of all rows: in a row's lanes what `combine` makes of all lanes of its own."""
        n, distance = self.lanes, self.lanes
        while distance > 1:
            distance //= 2
            other, (u, v) = [lane ^ distance for lane in range(n)], (x[: len(x) // 2], x[len(x) // 2 :])
            if len(x) == 1:
                x = [combine(x[0], e.shuffle(x[0], x[0], other))]
                continue
            mine = [lane + (n if lane & distance else 0) for lane in range(n)]
            other = [(lane ^ distance) + (n if lane & distance else 0) for lane in range(n)]
            x = [combine(e.shuffle(y, z, mine), e.shuffle(y, z, other)) for y, z in zip(u, v, strict=True)]
        return e.shuffle(x[0], x[0], [lane % self.rows * (n // self.rows) for lane in range(n)])

    def _counted(self, e: Emitter, total: Value, whole: list[Value], parts: list[Value]) -> Value:
        """Lanes of a total, plus what meets the middle of codes of the integers `whole`, which `parts` hold
        too."""
        for x in whole:
            total = e.b.add(total, self._counts(e, x, self.key.k))
        return total

    def _counts(self, e: Emitter, whole: Value, codes: Codes) -> Value:
        """Integers of which each adds the middle of codes once."""
        return e.b.sub(whole, e.ints(ROUNDED))

    def _store_planes(
        self, e: Emitter, planes: Value, unit: int, row: int, whole: list[Value]
    ) -> list[Value]:
        """Store them as [unit][part][row][word], so that a part of K meets its channels; for four keys at
        once as [unit][column][part][row], of which every 128 bits repeat one of their four columns. Returns
        the parts, with their words in some order."""
        step, joined = self._step(self.key.k), self.key.joined
        groups = self.lanes // step
        beside = [self._beside(e, whole[i : i + joined]) for i in range(0, len(whole), joined)]
        parts = [e.b.bitcast(x, self.words) for x in self._turned(e, beside)]  # [group of lanes][whole]
        order = [word % groups * len(whole) + word // groups for word in range(self.words.count)]
        for n, part in enumerate(parts):
            part = e.shuffle(part, part, order)
            if not self.key.by_fours:
                e.store(part, planes, ((unit * step + n) * self.rows + row) * e.bytes)
                continue
            part = e.b.bitcast(part, e.vi)
            for j in range(4):
                y = e.shuffle(part, part, (lane // 4 * 4 + j for lane in range(self.lanes)))
                e.store(y, planes, (((unit * step + n) * 4 + j) * self.rows + row) * e.bytes)
        return parts

    def _beside(self, e: Emitter, x: list[Value]) -> Value:
        """The low bits of each lane of all vectors, side by side in a lane."""
        b, width, made = e.b, 32 // len(x), x[0]
        for n, y in enumerate(x[1:], 1):
            low, y = e.ints((1 << n * width) - 1), b.shl(y, e.ints(n * width))
            if e.isa == "avx512":  # LLVM would make slower shuffles of bytes
                made = e.call("llvm.x86.avx512.pternlog.d.512", e.vi, [low, made, y, I32(CHOSEN)])
            else:
                made = b.or_(b.and_(made, low), y)
        return made

    def _turned(self, e: Emitter, x: list[Value]) -> list[Value]:
        """Transposes 1, 2 or 4 vectors: all their square blocks of as many lanes."""
        v = self.lanes  # where the second vector's lanes begin
        if len(x) == 2:
            return [e.shuffle(x[0], x[1], [at + m for at in range(n, v, 2) for m in (0, v)]) for n in (0, 1)]
        return self._transposed(e, x) if len(x) == 4 else x

    def _transposed(self, e: Emitter, x: list[Value]) -> list[Value]:
        """Four vectors, every 4x4 lanes of theirs transposed."""
        v, blocks = self.lanes, range(0, self.lanes, 4)  # v: where the second vector's lanes begin
        for orders in (((0, v, 1, v + 1), (2, v + 2, 3, v + 3)), ((0, 1, v, v + 1), (2, 3, v + 2, v + 3))):
            pairs = (x[0], x[1]), (x[2], x[3])
            if orders[0][1] == 1:
                pairs = (x[0], x[2]), (x[1], x[3])
            x = [
                e.shuffle(*pair, [lane + at for at in blocks for lane in order])
                for pair in pairs
                for order in orders
            ]
        return x

    def _joined(self, e: Emitter, x: list[Value]) -> Value:
        """One vector of all lanes of a power of two of vectors, one behind the other."""
        while len(x) > 1:
            x = [e.shuffle(u, v, range(2 * u.type.count)) for u, v in zip(x[::2], x[1::2], strict=True)]
        return x[0]

    def _far(self, rows: Value, entries: Sequence[int], lines: Sequence[int]) -> list[Line]:
        """Lines of listed rows that are read a block later."""
        return [(rows, n, byte, PREFETCH_LEVEL) for n in entries for byte in lines]

    def _near(self, rows: Value, entries: Sequence[int], lines: Sequence[int]) -> list[Line]:
        """Lines of rows that are read soon behind these entries of a list."""
        near = self.key.near
        return [(rows, n + near, byte, NEAR_LEVEL) for n in entries for byte in lines if near]

    def _further(self, rows: Value, entries: Sequence[int], distance: Value) -> list[Line]:
        """A line of the first of rows read at once, a distance on, behind those that `_far` asks for: the
        machine's own prefetchers seem to go on from there. Other kernels lost by it, or were not timed."""
        wanted = self.key.whole_rows or (self.rows == 1 and self.key.near and self.key.by_fours)
        return [(rows, n, distance, PREFETCH_LEVEL) for n in entries[:1] if wanted]

    def _ask_weighing(self, e: Emitter, later: Value) -> Value:
        """Prefetch the rows of V that go with one vector of weights; returns where the next are listed."""
        many = self.key.rows_weighing
        self._ask_lines(e, self._far(later, range(many), self._lines(self.key.v, self.key.head_dim_v)))
        return e.at(later, 8 * many)

    def _ask_lines(self, e: Emitter, lines: Sequence[Line]) -> None:
        """Prefetches lines of rows in lists of addresses."""
        for rows, n, byte, level in lines:
            e.prefetch(e.at(e.pointer(e.load(rows, 8 * n, I64)), byte), level)

    def _lines(self, codes: Codes, channels: int) -> range:
        return range(0, channels * KINDS[codes.dtype].bits // 8, LINE)
