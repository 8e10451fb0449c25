"""The stages of a tile of at most 8 query rows whose K and V are codes that become float32 in registers:

    S[key][row] = scale·Σ value·q + Σ q·shift       q: times the scales of channels, if K has those
    O[row][channel] += Σ (p·scale)·value

Values are those of codes with scale 1, products and sums those of float32, so nothing is rounded but where
float32 rounds. A vector of codes becomes as many vectors of values as a shift and a mask, or a look into a
table, make of it without moving a code from its word; Q, and O until it is stored, lie in that order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from llvmlite import ir

from polyflash.backends.cpu.decode_blocks import DecodeTile
from polyflash.backends.cpu.decode_codes_blocks import CodesTile
from polyflash.backends.cpu.decode_codes_configs import FloatsKey
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import F32, I8, I16, I32, I64, Emitter, Value
from polyflash.quant.scheme import TABLES, Codes

PERMUTES = {"avx512": "llvm.x86.avx512.permvar.sf.512", "avx2": "llvm.x86.avx2.permps"}
# A float of 8 bits in the high half of a word becomes a float16 by a shift to the right, which copies its
# sign, and this mask; its value is so many times that one's.
HALVES = {"fp8_e4m3": (1, 0xBF80), "fp8_e5m2": (0, 0xFF00)}
TIMES = {"fp8_e4m3": 2.0**8}


class FloatsTile(CodesTile):
    """Emissions for one key."""

    key: FloatsKey

    def __init__(self, key: FloatsKey) -> None:
        DecodeTile.__init__(self, key)
        self.words, self.fours = ir.VectorType(I16, 2 * self.lanes), 1
        self.parts = key.unit // self.lanes

    # codes
    def _values(self, e: Emitter, x: Value, dtype: str) -> list[Value]:
        """The values of a vector of codes, in parts of `TIMES`; channels lie where `_place` says."""
        if dtype in TABLES:
            return looked_up(e, TABLES[dtype], e.b.bitcast(x, e.vi))
        n, made = self.lanes, []
        for part in (e.b.shl(x, every(x.type, 8)), x):
            half = halves_of(e, part, dtype)
            made += [e.from_f16(e.shuffle(half, half, range(i, i + n))) for i in (0, n)]
        return made

    def _place(self, dtype: str, channel: int) -> tuple[int, int]:
        """The vector of a unit's values, and its lane, that a channel is in."""
        if dtype in TABLES:
            return place_of_nibble(self.key.isa, channel)
        word, part = divmod(channel, 2)
        return 2 * part + word // self.lanes, word % self.lanes

    def _of_token(self, e: Emitter, p_scales: Value, codes: Codes, channels: int, unit: int) -> Value:
        """The scales of a token for the lanes of its values; of 4 bits a lane has those of one block."""
        block = codes.scale.channels
        if not block:
            return e.splat(e.load(p_scales, 0, F32))
        first, last = unit * self.key.unit_of(codes) // block, (channels - 1) // block
        own = [min(first + 8 * lane // block, last) - first for lane in range(self.lanes)]
        x = e.load(p_scales, first * 4, ir.VectorType(F32, own[-1] + 1))
        return e.shuffle(x, x, own)

    # S = K·Q
    def _store_steps(self, e: Emitter, tile: Value, tops: list[Value]) -> None:
        """Store none: nothing is rounded."""

    @stage
    def fold_query(self, e: Emitter, q, shift, later) -> None:
        """At `q` the rows that `scale_query` left there in the order of K's values, and the product of Q with
        the shifts, if K has any. The `later` shifts are prefetched."""
        key, tile, unit = self.key, e.pointer(q), self.key.unit_of(self.key.k)
        per, order = unit // self.lanes, [0] * unit
        for channel in range(unit):
            i, lane = self._place(key.k.dtype, channel)
            order[i * self.lanes + lane] = channel
        for u in self._units_of(key.k, key.head_dim):
            for r in range(self.rows):
                firsts = range(u * unit, (u + 1) * unit, self.lanes)
                x = self._joined(e, [self._product(e, tile, r, first) for first in firsts])
                for i in range(per):
                    y = e.shuffle(x, x, order[i * self.lanes : (i + 1) * self.lanes])
                    e.store(y, tile, key.planes + ((u * per + i) * self.rows + r) * e.bytes)
        e.store(self._moved(e, tile, shift, later), tile, key.query_stats)

    def _score(self, e: Emitter, tile: Value) -> Callable[..., Value]:
        b, codes = e.b, self.key.k
        moved, times = e.load(tile, self.key.query_stats), TIMES.get(codes.dtype, 1.0)

        def score(x: Value, p_scales: Value) -> Value:
            x = x if times == 1 else b.fmul(x, e.floats(times))
            if not codes.scale.channels:
                x = b.fmul(x, self._of_keys(e, p_scales))
            return x if codes.shift is None else b.fadd(x, moved)

        return score

    def _sums(self, e: Emitter) -> ir.Type:
        return e.vf

    def _products(self, e: Emitter, row: Value, planes: Value, scales: Value) -> list[Value]:
        codes, dims, rows = self.key.k, self.key.head_dim, range(self.rows)
        sums, several = [e.floats(0)] * self.rows, codes.scale.channels > 1
        for u in self._units_of(codes, dims):
            x = self._values(e, self._words(e, row, codes, dims, u), codes.dtype)
            own = [e.floats(0)] * self.rows if several else sums
            for i, y in enumerate(x):
                for r in rows:
                    place = ((u * len(x) + i) * self.rows + r) * e.bytes
                    own[r] = e.fma(y, e.load(planes, place), own[r])
            if several:
                scale = self._of_token(e, scales, codes, dims, u)
                sums = [e.fma(y, scale, total) for y, total in zip(own, sums, strict=True)]
        return sums

    # O = alpha·O + P·V
    @stage
    def accumulate_values(self, e: Emitter, v_rows, weights, scales, o, alpha, vectors, later) -> None:
        """The keys of so many vectors of weights, whose sums are made apart and then added; meanwhile rows
        that are read `later` are prefetched."""
        self._all_values(e, v_rows, weights, scales, o, alpha, vectors, later, False)

    @stage
    def accumulate_seen_values(self, e: Emitter, v_rows, weights, scales, o, alpha, vectors, later) -> None:
        """The same, whatever the values are of keys that a row does not see."""
        self._all_values(e, v_rows, weights, scales, o, alpha, vectors, later, True)

    def _all_values(
        self, e: Emitter, v_rows, weights, scales, o, alpha, vectors, later, careful: bool
    ) -> None:
        count, walks = e.b.mul(vectors, I64(self.keys)), self._walks()
        lines = self._lines(self.key.v, self.key.head_dim_v)
        places = (v_rows, 8), (weights, self.rows * 4), (scales, 4 * self.key.live_groups), (later, 8)
        for n, (rows, columns) in enumerate(walks):
            zeros = [e.floats(0)] * (2 * len(columns) * len(rows))
            with e.walk(count, *places, rolled=True, carried={"acc": zeros}) as walk:
                p_row, p_weights, p_scales, p_later = walk
                self._ask_lines(e, self._far(p_later, range(1), lines[n :: len(walks)]))
                row = e.pointer(e.load(p_row, 0, I64))
                walk.acc = self._weighed(e, row, p_weights, p_scales, walk.acc, rows, columns, careful)
            self._add_floats(e, walk.acc, o, alpha, rows, columns)

    def _weighed(
        self,
        e: Emitter,
        row: Value,
        weights: Value,
        scales: Value,
        acc: list[Value],
        rows: range,
        columns: Sequence[tuple[int, int]],
        careful: bool,
    ) -> list[Value]:
        """Add the values of a key to the sums."""
        b, codes, dims = e.b, self.key.v, self.key.head_dim_v
        made: list[Value] = []
        seen = [b.icmp_signed(">=", e.load(weights, r * 4, I32), I32(0)) for r in rows]
        for u in sorted({u for u, _ in columns}):
            x = self._values(e, self._words(e, row, codes, dims, u), codes.dtype)
            scale = self._of_token(e, scales, codes, dims, u)
            own = [2 * n + half for other, n in columns if other == u for half in (0, 1)]
            for r, there in zip(rows, seen, strict=True):
                w = b.fmul(e.splat(e.load(weights, r * 4, F32)), scale)
                w = b.select(there, w, e.floats(0))
                for i in own:
                    y = b.select(there, x[i], e.floats(0)) if careful else x[i]
                    made.append(e.fma(w, y, acc[len(made)]))
        return made

    def _add_floats(
        self, e: Emitter, acc: list[Value], o, alpha, rows: range, columns: Sequence[tuple[int, int]]
    ) -> None:
        """O of a block from its sums, which lie as [unit][row][part]."""
        p_o, sums, times = e.pointer(o), iter(acc), TIMES.get(self.key.v.dtype, 1.0)
        shrink = {r: e.splat(e.load(e.pointer(alpha), r * 4, F32)) for r in rows}
        for u in sorted({u for u, _ in columns}):
            for r in rows:
                for i in (2 * n + half for other, n in columns if other == u for half in (0, 1)):
                    place = ((u * self.rows + r) * self.parts + i) * e.bytes
                    x = next(sums) if times == 1 else e.b.fmul(next(sums), e.floats(times))
                    e.store(e.fma(shrink[r], e.load(p_o, place), x), p_o, place)

    def _narrow(self, e: Emitter, x: list[Value]) -> Value:
        """A unit of O as channels in their order."""
        y = self._joined(e, [e.narrow(part, self.key.storage) for part in x])
        places = (self._place(self.key.v.dtype, channel) for channel in range(self.key.unit))
        return e.shuffle(y, y, (vector * self.lanes + lane for vector, lane in places))


def halves_of(e: Emitter, x: Value, dtype: str) -> Value:
    """Words with a float of 8 bits in their high halves as float16, of which a value is `TIMES` one."""
    b, (back, mask), kind = e.b, HALVES[dtype], x.type
    x = b.and_(b.ashr(x, every(kind, back)) if back else x, every(kind, mask))
    if dtype == "fp8_e4m3":  # whose NaN is a number of float16: 480 / 256
        x = b.or_(x, b.and_(b.add(x, every(kind, 0x80)), every(kind, 0x4000)))
    return x


def looked_up(e: Emitter, values: Sequence[float], x: Value) -> list[Value]:
    """The values of a vector of 4-bit codes, whose channels lie where `place_of_nibble` says."""
    if e.isa == "avx2":
        return _looked_up_in_bytes(e, values, x)
    return [chosen(e, values, e.b.lshr(x, e.ints(4 * i)) if i else x) for i in range(8)]


def place_of_nibble(isa: str, channel: int) -> tuple[int, int]:
    """The vector, and its lane, that the values of a channel are in."""
    if isa != "avx2":
        return channel % 8, channel // 8
    byte, high = divmod(channel, 2)
    return 4 * high + byte % 16 // 4, byte // 16 * 4 + byte % 4


def chosen(e: Emitter, values: Sequence[float], index: Value) -> Value:
    """Those of 2^n values that the low n bits of lanes name."""
    if len(values) == 1:
        return e.floats(values[0])
    if len(values) == e.lanes and e.isa in PERMUTES:
        return e.call(PERMUTES[e.isa], e.vf, [ir.Constant(e.vf, list(values)), index])
    half = len(values) // 2
    low, high = (chosen(e, x, index) for x in (values[:half], values[half:]))
    return e.b.select(e.b.icmp_signed("!=", e.b.and_(index, e.ints(half)), e.ints(0)), high, low)


def _looked_up_in_bytes(e: Emitter, values: Sequence[float], x: Value) -> list[Value]:
    """Byte by byte of float32, in every 128 bits from a table of 16: those with 8 lanes are slower."""
    b, kind, n = e.b, ir.VectorType(I8, e.bytes), e.bytes
    columns = [*zip(*(struct.pack("<f", value) for value in values), strict=True)]  # bytes of all
    tables = [ir.Constant(kind, list(column) * (n // 16)) for column in columns]
    made = []
    for nibbles in (x, b.lshr(x, e.ints(4))):
        index = b.and_(b.bitcast(nibbles, kind), every(kind, 15))
        planes = [
            e.call("llvm.x86.avx2.pshuf.b", kind, [table, index]) if any(column) else every(kind, 0)
            for table, column in zip(tables, columns, strict=True)
        ]
        for half in (0, 1):
            pairs = (e.interleave_blocks(planes[i], planes[i + 1], half) for i in (0, 2))
            low, high = (b.bitcast(x, ir.VectorType(I16, n // 2)) for x in pairs)
            made += [b.bitcast(e.interleave_blocks(low, high, quarter), e.vf) for quarter in (0, 1)]
    return made


def every(kind: ir.VectorType, value: int) -> Value:
    return ir.Constant(kind, [value] * kind.count)
