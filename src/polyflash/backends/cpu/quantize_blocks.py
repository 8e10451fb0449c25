"""The stages of a block of values that becomes codes: extremes, scale, codes. Bits are those of the codec,
whose divisions and roundings these are.

Extremes are those of integers that are in order as the floats are: a NaN lies beyond the infinities, and
makes the scale NaN. Lanes are channels.
"""

from __future__ import annotations

from llvmlite import ir

from polyflash.backends.cpu.configs import STORAGE_BYTES
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.quantize_configs import QuantizeKey
from polyflash.backends.cpu.row_blocks import RowTile
from polyflash.backends.cpu.simd import I8, I64, Emitter, Value
from polyflash.quant.scheme import BORDERS, KINDS

SIZE_BITS, INFINITE = 0x7FFFFFFF, 0x7F800000
LEAST = -(1 << 31)


class QuantizeTile(RowTile):
    """Emissions for one key."""

    def __init__(self, key: QuantizeKey) -> None:
        super().__init__(key.storage, key.lanes)
        self.key, self.kind, self.size = key, KINDS[key.dtype], STORAGE_BYTES[key.coded]
        self.table_size, self.narrow = STORAGE_BYTES[key.tables], key.tables != "float32"

    @stage
    def encode_block(
        self, e: Emitter, x, x_step, kept, live, rest, channels, mean, codes, codes_step, scale, shift, zero
    ) -> None:
        """`live` tokens and `channels` channels, all under one scale or each channel under its own; then
        `rest` tokens that are none, which get the code of zero. Of the first `kept` tokens the codes are
        there, made without those that follow: they stay where the extremes do."""
        self.zero, self.centred = e.b.trunc(zero, I8), e.b.icmp_signed("!=", mean, I64(0))
        rest = e.b.select(e.b.icmp_signed(">", kept, I64(0)), I64(0), rest)
        rows = (kept, live, rest, e.pointer(x), x_step, e.pointer(codes), codes_step)
        if self.key.by_channel:
            self._by_channel(e, rows, channels, mean, scale, shift)
        else:
            self._together(e, rows, channels, mean, scale, shift)

    def _by_channel(self, e: Emitter, rows, channels, mean, scale, shift) -> None:
        kept, live, _, x, x_step, codes, _ = rows

        def vector(p: list[Value], inside: Value | None) -> list[Value]:
            def extend(i: Value, values: list[Value]) -> list[Value]:
                source, *tops = values
                return [e.at(source, x_step), *self._extended(e, self._loaded(e, source, p[4], inside), tops)]

            found = e.loop(kept, [p[0], *self._none(e)], extend)
            _, *tops = e.loop(e.b.sub(live, kept), found, extend)
            low, factor = self._tables(e, tops, p[2], p[3], inside)
            self._column(e, rows, p, inside, low, factor, self._standing(e, kept, found[1:], tops))
            return self._next(e, p)

        start = [x, codes, e.pointer(scale), e.pointer(shift), e.pointer(mean)]
        e.each_vector(channels, self.lanes, start, vector)

    def _standing(self, e: Emitter, kept: Value, before: list[Value], after: list[Value]) -> Value:
        """How many of the first tokens need no codes: all `kept` if no extreme has moved, else none."""
        moved = e.ints(0)
        for x, y in zip(before, after, strict=True):
            moved = e.b.or_(moved, e.b.xor(x, y))
        return e.b.select(e.any_lane(e.b.icmp_signed("!=", moved, e.ints(0))), I64(0), kept)

    def _column(self, e: Emitter, rows, p, inside, low, factor, first) -> None:
        """The codes of a vector of channels, token by token from the `first` on."""
        _, live, rest, _, x_step, _, codes_step = rows

        places = [
            (e.at(q, e.b.mul(first, step)), step) for q, step in zip(p, (x_step, codes_step), strict=False)
        ]
        with e.walk(e.b.sub(live, first), *places) as walk:
            source, place = walk
            code = self._codes(e, self._loaded(e, source, p[4], inside), low, factor)
            self._stored(e, code, place, inside)
        self._fill(e, rest, walk.pointers[1], codes_step, inside)

    def _together(self, e: Emitter, rows, channels, mean, scale, shift) -> None:
        kept, live, rest, x, x_step, codes, codes_step = rows
        b, means = e.b, e.pointer(mean)

        def extend_row(i: Value, values: list[Value]) -> list[Value]:
            def extend(p: list[Value], inside: Value | None) -> list[Value]:
                found = self._extended(e, self._loaded(e, p[0], p[1], inside), p[2:], inside)
                return [e.at(p[0], self.lanes * self.size), e.at(p[1], e.bytes), *found]

            _, _, *tops = e.each_vector(channels, self.lanes, [values[0], means, *values[1:]], extend)
            return [e.at(values[0], x_step), *tops]

        found = e.loop(kept, [x, *self._none(e)], extend_row)
        _, *tops = e.loop(b.sub(live, kept), found, extend_row)
        standing = self._standing(e, kept, found[1:], tops)
        tops = [e.splat(e.greatest_lane(top)) for top in tops]
        first = e.first_lanes(I64(1))
        low, factor = self._tables(e, tops, e.pointer(scale), e.pointer(shift), first)

        def code(p: list[Value], inside: Value | None) -> list[Value]:
            values = self._codes(e, self._loaded(e, p[0], p[2], inside), low, factor)
            self._stored(e, values, p[1], inside)
            steps = self.lanes * self.size, self.lanes // self.key.packed, e.bytes
            return [e.at(y, step) for y, step in zip(p, steps, strict=True)]

        places = [(e.at(p, b.mul(standing, step)), step) for p, step in ((x, x_step), (codes, codes_step))]
        with e.walk(b.sub(live, standing), *places) as walk:
            e.each_vector(channels, self.lanes, [*walk, means], code)
        end = walk.pointers[1]

        def fill(p: list[Value], inside: Value | None) -> list[Value]:
            self._fill(e, rest, p[0], codes_step, inside)
            return [e.at(p[0], self.lanes // self.key.packed)]

        some = b.zext(b.icmp_signed(">", rest, I64(0)), I64)
        e.loop(some, [], lambda i, _: e.each_vector(channels, self.lanes, [end], fill)[:0])

    def _next(self, e: Emitter, p: list[Value]) -> list[Value]:
        table = self.lanes * self.table_size
        steps = (self.lanes * self.size, self.lanes // self.key.packed, table, table, e.bytes)
        return [e.at(y, step) for y, step in zip(p, steps, strict=True)]

    def _loaded(self, e: Emitter, x: Value, mean: Value, inside: Value | None) -> Value:
        """A vector of values as float32, less their means if there are any; 0 outside."""
        value = self.values(e, x, inside, self.key.coded)
        if self.key.affine:
            return value

        def centre(values: list[Value]) -> list[Value]:  # a load of no lane, where nothing is, takes long
            return [e.b.fsub(values[0], e.load(mean, inside=inside))]

        return e.where(self.centred, [value], centre)[0]

    def _none(self, e: Emitter) -> list[Value]:
        """Extremes of no value: of sizes, or of values and of those upside down."""
        return [e.ints(LEAST)] * 2 if self.key.affine else [e.ints(0)]

    def _extended(self, e: Emitter, x: Value, tops: list[Value], inside: Value | None = None) -> list[Value]:
        b, bits = e.b, e.b.bitcast(x, e.vi)
        if not self.key.affine:
            return [e.smax(tops[0], b.and_(bits, e.ints(SIZE_BITS)))]
        order = self._ordered(e, bits)
        values = [order, b.not_(order)]
        if inside is not None:
            values = [b.select(inside, y, e.ints(LEAST)) for y in values]
        return [e.smax(top, y) for top, y in zip(tops, values, strict=True)]

    def _ordered(self, e: Emitter, bits: Value) -> Value:
        """Floats as integers of the same order, and back."""
        b = e.b
        return b.xor(bits, b.and_(b.ashr(bits, e.ints(31)), e.ints(SIZE_BITS)))

    def _tables(self, e: Emitter, tops: list[Value], scale: Value, shift: Value, inside: Value | None):
        """Stores scales and shifts; the least values, the shifts that are not float32 or None, and scales."""
        b, kind, low = e.b, self.kind, None
        if self.key.affine:
            none = b.icmp_signed("==", tops[0], e.ints(LEAST))
            hi, low = (b.bitcast(self._ordered(e, x), e.vf) for x in (tops[0], b.not_(tops[1])))
            hi, low = (b.select(none, e.floats(0), x) for x in (hi, low))
            factor = b.fdiv(b.fsub(hi, low), e.floats(kind.levels + 0.25))
            half = (kind.levels + 1) // 2
            if self.narrow:
                centre = b.fadd(low, b.fmul(b.fsub(hi, low), e.floats(0.5)))
                zero = b.fadd(centre, b.fmul(self._rounded_up(e, factor), e.floats(0.5)))
                stored = e.narrow(zero, self.key.tables)
                zero = e.widen(stored, self.key.tables)
                for room, steps in ((b.fsub(zero, low), half + 0.5), (b.fsub(hi, zero), half - 0.5)):
                    least = b.fdiv(room, e.floats(steps))
                    factor = b.select(b.fcmp_ordered(">", least, factor), least, factor)
                low = zero
            else:
                middle = b.fmul(factor, e.floats(half))
                stored = b.fadd(b.fadd(low, middle), b.fmul(factor, e.floats(0.125)))
            e.store(stored, shift, inside=inside)
        elif self.key.dtype == "mxfp4":
            power = b.bitcast(b.and_(tops[0], e.ints(INFINITE)), e.vf)
            nan = b.icmp_signed(">", tops[0], e.ints(INFINITE))
            factor = b.select(nan, b.bitcast(tops[0], e.vf), b.fmul(power, e.floats(0.25)))
        else:
            factor = b.fdiv(b.bitcast(tops[0], e.vf), e.floats(kind.most))
        factor = self._rounded_up(e, factor) if self.narrow else factor
        e.store(e.narrow(factor, self.key.tables), scale, inside=inside)
        return low, factor

    def _rounded_up(self, e: Emitter, x: Value) -> Value:
        """The least bfloat16 that is no less, of what is positive."""
        b = e.b
        up = b.and_(b.add(b.bitcast(x, e.vi), e.ints(0xFFFF)), e.ints(-0x10000))
        return b.select(b.fcmp_unordered("uno", x, x), x, b.bitcast(up, e.vf))

    def _codes(self, e: Emitter, x: Value, low: Value | None, factor: Value) -> Value:
        """Codes of a vector, int32, of which the lowest bits count."""
        b, kind, dtype = e.b, self.kind, self.key.dtype
        x = b.fdiv(x if low is None else b.fsub(x, low), factor)
        if low is not None and not self.narrow:
            x = b.fsub(x, e.floats(0.125))
        x = b.select(b.fcmp_unordered("uno", x, x), e.floats(0), x)
        if dtype in ("int8", "int4"):
            ends = (-(1 << kind.bits - 1), (1 << kind.bits - 1) - 1)
            middle, below = 8 if kind.bits == 4 else 0, None
            if low is not None and self.narrow:
                x = b.fadd(x, e.floats(0.5))
                below = b.ashr(b.bitcast(x, e.vi), e.ints(31))
                x = b.fsub(b.bitcast(b.and_(b.bitcast(x, e.vi), e.ints(SIZE_BITS)), e.vf), e.floats(0.5))
                ends = (0, ends[1])
            elif low is not None:
                ends, middle = (0, kind.levels), middle - (kind.levels + 1) // 2
            whole = b.fptosi(e.rounded(self._held(e, x, *ends)), e.vi)
            whole = whole if below is None else b.xor(whole, below)
            return b.add(whole, e.ints(middle)) if middle else whole
        if kind.bits == 8:
            return self._float_of_8_bits(e, self._held(e, x, -kind.most, kind.most))
        if dtype == "nf4":
            return self._above(e, x, [(border, ">") for border in BORDERS[dtype]])
        size = b.bitcast(b.and_(b.bitcast(x, e.vi), e.ints(SIZE_BITS)), e.vf)
        borders = [(border, ">=" if i % 2 else ">") for i, border in enumerate(BORDERS[dtype])]
        below = b.select(b.fcmp_ordered("<", x, e.floats(0)), e.ints(8), e.ints(0))
        return b.add(self._above(e, size, borders), below)

    def _held(self, e: Emitter, x: Value, least: float, most: float) -> Value:
        x = e.b.select(e.b.fcmp_ordered("<", x, e.floats(least)), e.floats(least), x)
        return e.b.select(e.b.fcmp_ordered(">", x, e.floats(most)), e.floats(most), x)

    def _above(self, e: Emitter, x: Value, borders: list[tuple[float, str]]) -> Value:
        """How many borders lie below x."""
        count = e.ints(0)
        for border, how in borders:
            count = e.b.sub(count, e.b.sext(e.b.fcmp_ordered(how, x, e.floats(border)), e.vi))
        return count

    def _float_of_8_bits(self, e: Emitter, x: Value) -> Value:
        """Rounded to nearest even; small ones by the rounding of a sum."""
        b, (mantissa, bias) = e.b, self.key.float_form
        bits, cut = b.bitcast(x, e.vi), 23 - mantissa
        size = b.and_(bits, e.ints(SIZE_BITS))
        odd = b.and_(b.lshr(size, e.ints(cut)), e.ints(1))
        normal = b.add(b.add(size, odd), e.ints(((bias - 127) << 23) + (1 << cut - 1) - 1))
        magic = e.ints((127 - bias + cut + 1) << 23)
        tiny = b.bitcast(b.fadd(b.bitcast(size, e.vf), b.bitcast(magic, e.vf)), e.vi)
        least = e.ints((128 - bias) << 23)
        code = b.select(b.icmp_signed("<", size, least), b.sub(tiny, magic), b.lshr(normal, e.ints(cut)))
        return b.or_(code, b.and_(b.lshr(bits, e.ints(24)), e.ints(0x80)))

    def _stored(self, e: Emitter, code: Value, place: Value, inside: Value | None) -> None:
        b = e.b
        if self.key.packed == 2:
            n = self.lanes // 2
            pairs = b.bitcast(code, ir.VectorType(I64, n))
            pairs = b.or_(pairs, b.lshr(pairs, ir.Constant(pairs.type, [28] * n)))
            e.store(b.trunc(pairs, ir.VectorType(I8, n)), place, inside=self._of_bytes(e, inside))
        else:
            e.store(b.trunc(code, e.vb), place, inside=inside)

    def _of_bytes(self, e: Emitter, inside: Value | None) -> Value | None:
        """Those bytes that codes of a mask lie in."""
        if inside is None or self.key.packed == 1:
            return inside
        return e.shuffle(inside, inside, range(0, self.lanes, 2))

    def _fill(self, e: Emitter, rows: Value, place: Value, step: Value, inside: Value | None) -> None:
        """The code of zero for some tokens of a vector of channels."""
        n = self.lanes // self.key.packed
        value, mask = e.splat(self.zero, n), self._of_bytes(e, inside)
        with e.walk(rows, (place, step)) as (p,):
            e.store(value, p, inside=mask)
