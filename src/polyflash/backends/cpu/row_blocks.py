"""The stages of rows of values on their way to a quantiser: copied, turned by their positions
(kvcache/rope.py), rotated by a Hadamard matrix (quant/codec.py). Bits are those of these modules."""

from __future__ import annotations

from llvmlite import ir

from polyflash.backends.cpu.configs import STORAGE_BYTES
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I64, Emitter, Value


class RowTile:
    """Emissions for values of one dtype."""

    def __init__(self, storage: str, lanes: int) -> None:
        self.storage, self.lanes, self.row_size = storage, lanes, STORAGE_BYTES[storage]

    def values(self, e: Emitter, place: Value, inside: Value | None, storage: str) -> Value:
        """A vector as float32; 0 outside."""
        kind = e.vf if storage == "float32" else e.vh
        return e.widen(e.load(place, 0, kind, inside), storage)

    def _put_values(self, e: Emitter, x: Value, place: Value, inside: Value | None) -> None:
        """Rounds a vector of float32 to the dtype of the rows."""
        e.store(e.narrow(x, self.storage), place, inside=inside)

    def _copy(self, e: Emitter, row: list[Value], channels: Value) -> None:
        kind = e.vf if self.row_size == 4 else e.vh

        def vector(p: list[Value], inside: Value | None) -> list[Value]:
            e.store(e.load(p[0], 0, kind, inside), p[1], inside=inside)
            return [e.at(x, self.lanes * self.row_size) for x in p]

        e.each_vector(channels, self.lanes, row, vector)

    @stage
    def copy_rows(self, e: Emitter, src, src_step, dst, dst_step, rows, channels) -> None:
        with e.walk(rows, (src, src_step), (dst, dst_step)) as walk:
            self._copy(e, walk.pointers, channels)

    @stage
    def turn_halves(self, e: Emitter, src, src_step, dst, dst_step, rows, channels, cos, sin, half) -> None:
        """Pairs are channels i and i + `half`; `cos` and `sin` have `half` float32 for each row."""
        far = e.b.mul(half, I64(self.row_size))

        def pairs(p: list[Value], inside: Value | None) -> list[Value]:
            both = [self.values(e, e.at(p[0], x), inside, self.storage) for x in (0, far)]
            for x, at in zip(self._turned(e, both, p, inside), (0, far), strict=True):
                self._put_values(e, x, e.at(p[1], at), inside)
            return self._beyond(e, p, self.lanes)

        self._turn(e, (src, src_step), (dst, dst_step), (rows, channels), (cos, sin, half), pairs)

    @stage
    def turn_neighbours(
        self, e: Emitter, src, src_step, dst, dst_step, rows, channels, cos, sin, half
    ) -> None:
        """Pairs are channels 2i and 2i + 1."""
        n = self.lanes
        orders = [range(k, 2 * n, 2) for k in (0, 1)]

        def pairs(p: list[Value], inside: Value | None) -> list[Value]:
            masks = [None, None] if inside is None else e.interleave(inside, inside)
            steps = 0, n * self.row_size
            x, y = (self.values(e, e.at(p[0], n), m, self.storage) for n, m in zip(steps, masks, strict=True))
            both = [e.shuffle(x, y, order) for order in orders]
            turned = e.interleave(*self._turned(e, both, p, inside))
            for x, at, mask in zip(turned, steps, masks, strict=True):
                self._put_values(e, x, e.at(p[1], at), mask)
            return self._beyond(e, p, 2 * n)

        self._turn(e, (src, src_step), (dst, dst_step), (rows, channels), (cos, sin, half), pairs)

    def _turn(self, e: Emitter, src, dst, sizes, angles, pairs) -> None:
        """Turns `pairs` of every row, and copies the channels beyond them."""
        (rows, channels), (cos, sin, half) = sizes, angles
        table, width = e.b.mul(half, I64(4)), e.b.mul(half, I64(2))
        with e.walk(rows, src, dst, (cos, table), (sin, table)) as walk:
            e.each_vector(half, self.lanes, walk.pointers, pairs)
            rest = [e.at(x, e.b.mul(width, I64(self.row_size))) for x in walk.pointers[:2]]
            self._copy(e, rest, e.b.sub(channels, width))

    def _turned(self, e: Emitter, both: list[Value], p: list[Value], inside: Value | None) -> list[Value]:
        """A pair of vectors; every product is rounded before its sum."""
        b, (first, second) = e.b, both
        cos, sin = (self.values(e, x, inside, "float32") for x in p[2:])
        x = b.fsub(b.fmul(first, cos), b.fmul(second, sin))
        return [x, b.fadd(b.fmul(second, cos), b.fmul(first, sin))]

    def _beyond(self, e: Emitter, p: list[Value], channels: int) -> list[Value]:
        step = channels * self.row_size
        return [e.at(x, n) for x, n in zip(p, (step, step, e.bytes, e.bytes), strict=True)]

    @stage
    def rotate_rows(self, e: Emitter, src, src_step, dst, rows, channels, size, factor) -> None:
        """Blocks of `size` channels, a power of two, times a Hadamard matrix and `factor` (bits of a
        float32), as float32 without gaps."""
        b, lanes = e.b, self.lanes
        narrow = b.icmp_signed("<=", size, I64(lanes))
        whole, one = e.splat(e.float_bits(factor)), e.floats(1)

        def within(p: list[Value], inside: Value | None) -> list[Value]:
            x, width = self.values(e, p[0], inside, self.storage), 1
            while width < lanes:
                minus = ir.Constant(e.vbits, [bool(i & width) for i in range(lanes)])
                sums = b.fadd(
                    e.shuffle(x, x, (i ^ width for i in range(lanes))), b.select(minus, b.fneg(x), x)
                )
                x, width = b.select(b.icmp_signed("<", I64(width), size), sums, x), 2 * width
            e.store(b.fmul(x, b.select(narrow, whole, one)), p[1], inside=inside)
            return [e.at(p[0], lanes * self.row_size), e.at(p[1], e.bytes)]

        vectors = b.udiv(channels, I64(lanes))

        def across(i: Value, values: list[Value]) -> list[Value]:
            """Vectors `values[1]` apart, of one row."""
            row, apart = values
            twice = b.shl(apart, I64(1))
            scaled = b.select(b.icmp_signed("<", b.mul(twice, I64(lanes)), size), one, whole)

            def pair(j: Value, _: list[Value]) -> list[Value]:
                low = b.and_(j, b.sub(apart, I64(1)))
                at = e.at(row, b.mul(b.add(b.shl(b.sub(j, low), I64(1)), low), I64(e.bytes)))
                far = e.at(at, b.mul(apart, I64(e.bytes)))
                x, y = e.load(at), e.load(far)
                e.store(b.fmul(b.fadd(x, y), scaled), at)
                e.store(b.fmul(b.fsub(x, y), scaled), far)
                return []

            e.loop(b.lshr(vectors, I64(1)), [], pair)
            return [row, twice]

        turns = b.udiv(size, I64(lanes))  # a power of two, or 0
        turns = b.sub(I64(63), b.ctlz(b.or_(turns, I64(1)), ir.Constant(ir.IntType(1), 1)))
        with e.walk(rows, (src, src_step), (dst, b.mul(channels, I64(4)))) as row:
            e.each_vector(channels, lanes, row.pointers, within)
            e.loop(turns, [row[1], I64(1)], across)
