"""Vector instructions: an emitter of LLVM IR. Inline assembly is not an option: numba's JIT has no parser for
it and aborts the process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from polyflash.backends.cpu.configs import ISAS

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()
POINTER = ir.PointerType()
Value = Any  # an LLVM value

# exp2 on [-1/2, 1/2] as 1 + f*(c1 + f*(c2 + ...)): least maximum relative error with p(0) = 1 held, by
# Lawson's reweighted least squares in 80-bit arithmetic; the errors are 2.8e-6, 9.1e-8 and 2.0e-9.
EXP2 = {
    4: (0.6931241934, 0.2402409861, 0.05590642483, 0.009582852935),
    5: (0.6931469776, 0.2402224209, 0.05550733743, 0.00967151264, 0.00132647272),
    6: (0.6931472029, 0.2402264791, 0.05550332471, 0.009618437358, 0.001339887442, 0.0001535336181),
}


class BFloatType(ir.Type):
    """llvmlite has no bfloat."""

    null = "0.0"
    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


class _Turn:
    """One turn of a loop: its number, the values it starts from, those of the next turn, and the last."""

    def __init__(self, index: Value, values: list[Value]) -> None:
        self.index, self.values = index, values
        self.next: Sequence[Value] = ()
        self.last: list[Value] = []


class Walk(SimpleNamespace):
    """One turn of a walk: its number, its pointers, which it yields, and by name what is carried from turn to
    turn, a value or a list: what is assigned there is carried on. Behind the walk it has the last of all."""

    def __iter__(self) -> Iterator[Value]:
        return iter(self.pointers)

    def __getitem__(self, place: int) -> Value:
        return self.pointers[place]

    def hold(self, names: dict[str, Any], values: Iterable[Value]) -> None:
        """Names values, as many as `names` has."""
        left = iter(values)
        for name, old in names.items():
            setattr(self, name, [next(left) for _ in old] if isinstance(old, list) else next(left))


def _flat(values: Iterable[Any]) -> list[Value]:
    return [x for value in values for x in (value if isinstance(value, list) else [value])]


class Block:
    """The words of a block in an emission: `args.cap` loads that word. `layout` numbers them, as words.py."""

    def __init__(self, e: Emitter, address: Value, layout: Any) -> None:
        self._e, self._pointer, self._layout = e, e.pointer(address), layout

    def __getattr__(self, word: str) -> Value:
        return self._e.load(self._pointer, 8 * getattr(self._layout, word), I64)


class Emitter:
    """Operations on vectors of an isa's 32-bit lanes on one builder. `vf`, `vi`: float and int vectors."""

    def __init__(self, builder: ir.IRBuilder, isa: str) -> None:
        self.b, self.isa, self.lanes = builder, isa, ISAS[isa].lanes
        lanes = self.lanes
        self.vf, self.vi = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        self.vh, self.vb = ir.VectorType(I16, lanes), ir.VectorType(I8, lanes)
        self.vbits = ir.VectorType(I1, lanes)
        self.bytes = 4 * lanes

    def call(self, name: str, result: ir.Type, args: Sequence[Value]) -> Value:
        kind = ir.FunctionType(result, [a.type for a in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def in_turn(self, values: Sequence[Value]) -> list[Value]:
        """The values themselves, through an empty inline assembly (of x86): LLVM, which orders instructions
        anew, leaves what makes them in front of what takes them."""
        kind, n = ir.LiteralStructType([x.type for x in values]), len(values)
        places = ",".join(["=v"] * n + [str(i) for i in range(n)])
        made = self.b.asm(ir.FunctionType(kind, kind.elements), "", places, values, True)
        return [self.b.extract_value(made, i) for i in range(n)]

    # memory
    def pointer(self, address: Value) -> Value:
        return self.b.inttoptr(address, POINTER)

    def at(self, pointer: Value, offset: int | Value = 0) -> Value:
        if isinstance(offset, int):
            if offset == 0:
                return pointer
            offset = I64(offset)
        return self.b.gep(pointer, [offset], source_etype=I8)

    def load(self, pointer: Value, offset: int | Value = 0, kind: Any = None, inside: Value = None) -> Value:
        """Lanes outside the mask `inside` are zero and their memory is not touched. Alignment is the
        element's: scratch and tensors alike may start anywhere an element may."""
        kind, place = kind or self.vf, self.at(pointer, offset)
        if inside is None:
            return self.b.load(place, typ=kind, align=_alignment(kind))
        name = f"llvm.masked.load.{_mangled(kind)}.p0"
        return self.call(name, kind, [place, I32(_alignment(kind)), inside, ir.Constant(kind, None)])

    def store(self, value: Value, pointer: Value, offset: int | Value = 0, inside: Value = None) -> None:
        place, align = self.at(pointer, offset), _alignment(value.type)
        if inside is None:
            self.b.store(value, place, align=align)
        else:
            name = f"llvm.masked.store.{_mangled(value.type)}.p0"
            self.call(name, ir.VoidType(), [value, place, I32(align), inside])

    def prefetch(self, pointer: Value, locality: int = 3) -> None:
        """Never faults, wherever the pointer leads. Into every cache; at locality 2 from the second level."""
        args = [pointer, I32(0), I32(locality), I32(1)]  # read, data
        self.call("llvm.prefetch.p0", ir.VoidType(), args)

    # values
    def splat(self, scalar: Value, count: int | None = None) -> Value:
        count = count or self.lanes
        undefined = ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined)
        first = self.b.insert_element(undefined, scalar, I32(0))
        return self.shuffle(first, undefined, [0] * count)

    def shuffle(self, x: Value, y: Value, order: Iterable[int]) -> Value:
        """The lanes of `x` and then of `y` with these numbers."""
        lanes = list(order)
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

    def floats(self, value: float) -> Value:
        return ir.Constant(self.vf, [float(value)] * self.lanes)

    def ints(self, value: int) -> Value:
        return ir.Constant(self.vi, [int(value)] * self.lanes)

    def lane_index(self, count: int | None = None) -> Value:
        count = count or self.lanes
        return ir.Constant(ir.VectorType(I32, count), list(range(count)))

    def first_lanes(self, count: Value, lanes: int | None = None) -> Value:
        """Mask of the lanes below `count` (int64, any value)."""
        lanes = lanes or self.lanes
        limit = self.smin(self.smax(count, I64(0)), I64(lanes))
        return self.b.icmp_signed("<", self.lane_index(lanes), self.splat(self.b.trunc(limit, I32), lanes))

    def float_bits(self, word: Value) -> Value:
        """The float32 whose bits are the low half of an int64."""
        return self.b.bitcast(self.b.trunc(word, I32), F32)

    def smin(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def smax(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call(f"llvm.fmuladd.v{self.lanes}f32", self.vf, [a, b, c])

    def maximum(self, a: Value, b: Value) -> Value:
        """`a` where it is greater, else `b`: a NaN in `a` never enters a running maximum `b`."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def apply_mask(self, x: Value, distance: Value, width: Value) -> Value:
        """-inf where a key is none of its row's: `distance` keys behind their first, of `width`."""
        seen = self.b.icmp_unsigned("<", distance, width)
        return self.b.select(seen, x, self.floats(float("-inf")))

    def dot_bf16(self, acc: Value, a: Value, b: Value) -> Value:
        """acc + a[2i]*b[2i] + a[2i+1]*b[2i+1] per lane, bfloat16 pairs into float32."""
        pairs = ir.VectorType(BFloatType(), 2 * self.lanes)
        operands = [acc, self.b.bitcast(a, pairs), self.b.bitcast(b, pairs)]
        return self.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}", self.vf, operands)

    def as_bf16(self, x: Value) -> Value:
        """A vector of float32 rounded to bfloat16, as words, by AVX-512 BF16."""
        kind = ir.VectorType(BFloatType(), self.lanes)
        half = self.call(f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * self.lanes}", kind, [x])
        return self.b.bitcast(half, self.vh)

    # AVX-512 alone: products of bytes and what they need
    def dot_bytes(self, acc: Value, a: Value, b: Value) -> Value:
        """acc + Σ a[4i + j]·b[4i + j] over j < 4 per lane: `a` of unsigned bytes, `b` of signed ones."""
        return self.call("llvm.x86.avx512.vpdpbusd.512", self.vi, [acc, a, b])

    def nearest_ints(self, x: Value) -> Value:
        """Rounded to even; what no int32 holds, NaN too, becomes the least of them."""
        undefined = ir.Constant(self.vi, ir.Undefined)
        args = [x, undefined, ir.Constant(I16, -1), I32(4)]
        return self.call("llvm.x86.avx512.mask.cvtps2dq.512", self.vi, args)

    def as_bytes(self, x: Sequence[Value]) -> Value:
        """Four vectors of int32 as one of int8, a lane's four side by side; held to what these hold."""
        b, n = self.b, 4 * self.lanes
        words = ir.VectorType(I16, n // 2)
        pairs = [self.call("llvm.x86.avx512.packssdw.512", words, x[i : i + 2]) for i in (0, 2)]
        packed = self.call("llvm.x86.avx512.packsswb.512", ir.VectorType(I8, n), pairs)
        order = [i // 16 * 16 + i % 4 * 4 + i % 16 // 4 for i in range(n)]
        return b.bitcast(self.shuffle(packed, packed, order), self.vi)

    def greatest_lane(self, x: Value) -> Value:
        """The largest int32 of a vector."""
        return self.call(f"llvm.vector.reduce.smax.v{self.lanes}i32", I32, [x])

    def rounded(self, x: Value) -> Value:
        """To the nearest integer, as a float; without an instruction for it, right below 2**22 and close
        enough for an exponent beyond."""
        if self.isa != "generic":
            return self.call(f"llvm.rint.v{self.lanes}f32", self.vf, [x])
        shift = self.floats(1.5 * 2**23)
        return self.b.fsub(self.b.fadd(x, shift), shift)

    def from_bf16(self, x: Value) -> Value:
        """float32 of a vector, or one, of 16-bit words."""
        wide, every = self._words_like(x)
        return self._as_float(self.b.shl(self.b.zext(x, wide), every(16)))

    def from_f16(self, x: Value) -> Value:
        """Likewise; without an instruction LLVM would call a runtime library."""
        b = self.b
        wide, every = self._words_like(x)
        if self.isa != "generic":
            half, whole = (F16, F32) if wide == I32 else (ir.VectorType(F16, self.lanes), self.vf)
            return b.fpext(b.bitcast(x, half), whole)
        bits = b.zext(x, wide)
        size = b.and_(bits, every(0x7FFF))
        rebiased = F32(2.0**112) if wide == I32 else self.floats(2.0**112)
        value = b.bitcast(b.fmul(self._as_float(b.shl(size, every(13))), rebiased), wide)
        top = b.or_(value, every(0x7F800000))  # infinities and NaN
        value = b.select(b.icmp_signed(">", size, every(0x7BFF)), top, value)
        return self._as_float(b.or_(value, b.shl(b.and_(bits, every(0x8000)), every(16))))

    def widen(self, x: Value, storage: str) -> Value:
        """float32 of a vector, or one, of elements of this dtype."""
        if storage == "float32":
            return x
        return self.from_bf16(x) if storage == "bfloat16" else self.from_f16(x)

    def narrow(self, x: Value, storage: str) -> Value:
        """A vector of float32 as elements of this dtype."""
        if storage == "float32":
            return x
        return self.to_bf16_bits(x) if storage == "bfloat16" else self.to_f16_bits(x)

    def _words_like(self, x: Value) -> tuple[ir.Type, Callable[[int], Value]]:
        """The type of a vector of 32-bit words, or of one, as `x` is of narrower ones; and its constants."""
        return (self.vi, self.ints) if isinstance(x.type, ir.VectorType) else (I32, I32)

    def _as_float(self, x: Value) -> Value:
        return self.b.bitcast(x, F32 if x.type == I32 else self.vf)

    def exp2(self, x: Value, degree: int, floor: int = -64) -> Value:
        """2**x for x <= 0; exactly 1 at 0, exactly 0 below 2**floor; NaN stays NaN.

        At -64 so small a weight is lost beside the largest, which is 1, and its products would soon be
        subnormal, for which some CPUs take a hundred times as long."""
        whole = self.rounded(x)
        return self._exp2_of_parts(whole, self.b.fsub(x, whole), degree, floor)

    def exp2_scaled(self, d: Value, scale: Value, low: Value, degree: int) -> Value:
        """2**(d·(scale + low)) for d <= 0, with the product unrounded: its rounding error, as large as the
        exponent's own, would be the same for every key of one score."""
        whole = self.rounded(self.b.fmul(d, scale))
        f = self.fma(d, low, self.fma(d, scale, self.b.fneg(whole)))
        return self._exp2_of_parts(whole, f, degree)

    def _exp2_of_parts(self, whole: Value, f: Value, degree: int, floor: int = -64) -> Value:
        b, p = self.b, self.fma(self._exp2_minus_1(f, degree), f, self.floats(1))
        tiny = b.fcmp_ordered("<", whole, self.floats(floor))
        if self.isa == "avx512":
            undefined = ir.Constant(self.vf, ir.Undefined)
            args = [p, whole, undefined, ir.Constant(I16, -1), I32(4)]  # all lanes; rounding as set
            power = self.call("llvm.x86.avx512.mask.scalef.ps.512", self.vf, args)
        else:
            held = b.select(b.fcmp_ordered(">", whole, self.floats(floor)), whole, self.floats(floor))
            n = b.fptosi(held, self.vi)  # a NaN is held too, and comes back with p
            power = b.fmul(p, b.bitcast(b.shl(b.add(n, self.ints(127)), self.ints(23)), self.vf))
        return b.select(tiny, self.floats(0), power)

    def _exp2_minus_1(self, f: Value, degree: int) -> Value:
        """(2**f - 1) / f."""
        return self.polynomial(EXP2[degree], f)

    def polynomial(self, coefficients: Sequence[float], x: Value) -> Value:
        """By Horner's rule; the constant term comes first."""
        *rest, last = map(self.floats, coefficients)
        return reduce(lambda p, c: self.fma(p, x, c), reversed(rest), last)

    def tanh(self, x: Value) -> Value:
        """t / (t + 2) with t = exp(2x) - 1 = (2**n - 1) + 2**n·(2**f - 1): few ulps for small x too."""
        b = self.b
        x = b.select(b.fcmp_ordered(">", x, self.floats(16)), self.floats(16), x)
        x = b.select(b.fcmp_ordered("<", x, self.floats(-16)), self.floats(-16), x)
        z = b.fmul(x, self.floats(2.8853900817779268))  # 2·log2(e)
        whole = self.rounded(z)
        f = self.fma(x, self.floats(2.8853900817779268), b.fneg(whole))
        n = b.fptosi(b.select(b.fcmp_unordered("uno", x, x), self.floats(0), whole), self.vi)
        power = b.bitcast(b.shl(b.add(n, self.ints(127)), self.ints(23)), self.vf)
        t = self.fma(power, b.fmul(self._exp2_minus_1(f, 6), f), b.fsub(power, self.floats(1)))
        return b.fdiv(t, b.fadd(t, self.floats(2)))

    def log(self, x: Value) -> Value:
        """Natural logarithm of normal positive lanes: exponent·ln2 + 2·atanh((m-1)/(m+1)), m in [√½, √2)."""
        b = self.b
        bits = b.bitcast(x, self.vi)
        exponent = b.ashr(b.sub(bits, self.ints(0x3F3504F3)), self.ints(23))  # 0x3F3504F3: √½
        m = b.bitcast(b.sub(bits, b.shl(exponent, self.ints(23))), self.vf)
        z = b.fdiv(b.fsub(m, self.floats(1)), b.fadd(m, self.floats(1)))
        square = b.fmul(z, z)
        p = self.polynomial((2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9), square)
        return self.fma(b.sitofp(exponent, self.vf), self.floats(0.6931471805599453), b.fmul(p, z))

    def to_bf16_bits(self, x: Value) -> Value:
        """Round to nearest even; without AVX-512 BF16 LLVM would call a runtime library."""
        b = self.b
        bits = b.bitcast(x, self.vi)
        odd = b.and_(b.lshr(bits, self.ints(16)), self.ints(1))
        rounded = b.lshr(b.add(bits, b.add(odd, self.ints(0x7FFF))), self.ints(16))
        return b.trunc(b.select(b.fcmp_unordered("uno", x, x), self.ints(0x7FC0), rounded), self.vh)

    def to_f16_bits(self, x: Value) -> Value:
        """Round to nearest even, as `from_f16` without a library; below 2**-14 by the rounding of a sum."""
        b = self.b
        if self.isa != "generic":
            return b.bitcast(b.fptrunc(x, ir.VectorType(F16, self.lanes)), self.vh)
        bits = b.bitcast(x, self.vi)
        size = b.and_(bits, self.ints(0x7FFFFFFF))
        odd = b.and_(b.lshr(size, self.ints(13)), self.ints(1))
        normal = b.lshr(b.add(b.sub(size, self.ints(112 << 23)), b.add(odd, self.ints(0xFFF))), self.ints(13))
        tiny = b.bitcast(b.fadd(b.bitcast(size, self.vf), self.floats(0.5)), self.vi)
        subnormal = b.sub(tiny, self.ints(126 << 23))
        half = b.select(b.icmp_signed("<", size, self.ints(113 << 23)), subnormal, normal)
        infinite = b.icmp_signed(">", size, self.ints(0x477FEFFF))  # from 65520
        half = b.select(infinite, self.ints(0x7C00), half)
        half = b.select(b.icmp_signed(">", size, self.ints(0x7F800000)), self.ints(0x7E00), half)
        return b.trunc(b.or_(half, b.lshr(b.and_(bits, self.ints(-0x80000000)), self.ints(16))), self.vh)

    def interleave(self, x: Value, y: Value) -> list[Value]:
        """The lanes of two vectors by turns: two vectors again, of their low and of their high halves."""
        n = x.type.count
        orders = ([h * (n // 2) + j // 2 + (n if j & 1 else 0) for j in range(n)] for h in (0, 1))
        return [self.shuffle(x, y, order) for order in orders]

    def interleave_blocks(self, x: Value, y: Value, half: int) -> Value:
        """The lanes of two vectors by turns, of the low or high half of every 128 bits."""
        n = x.type.count
        per = 4 * n // self.lanes  # in 128 bits
        order = (j // per * per + half * per // 2 + j % per // 2 + (n if j & 1 else 0) for j in range(n))
        return self.shuffle(x, y, order)

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """n vectors of n lanes, transposed in log2(n) interleaving steps."""
        n, x = len(rows), list(rows)
        for _ in range(n.bit_length() - 1):
            x = [z for u, v in zip(x[: n // 2], x[n // 2 :], strict=True) for z in self.interleave(u, v)]
        return x

    def summed(self, x: Sequence[Value]) -> Value:
        """The sum of a power of two of vectors, in pairs of neighbours."""
        while len(x) > 1:
            x = [self.b.fadd(u, v) for u, v in zip(x[::2], x[1::2], strict=True)]
        return x[0]

    def any_lane(self, flags: Value) -> Value:
        """Whether a flag of a vector is set."""
        whole = ir.IntType(flags.type.count)
        return self.b.icmp_unsigned("!=", self.b.bitcast(flags, whole), whole(0))

    def not_finite(self, x: Value) -> Value:
        """Flags of the lanes of float32, or of the 16-bit words of bfloat16, that are infinite or NaN."""
        if x.type == self.vf:
            return self.b.fcmp_unordered("uno", self.b.fsub(x, x), self.floats(0))
        exponent = ir.Constant(x.type, [0x7F80] * x.type.count)
        return self.b.icmp_unsigned("==", self.b.and_(x, exponent), exponent)

    # control
    @contextmanager
    def _repeated(self, count: Value | int, start: Sequence[Value], rolled: bool) -> Iterator[_Turn]:
        """Run what is emitted within `count` times (0 too); it says what the values are next."""
        b, count = self.b, I64(count) if isinstance(count, int) else count
        before, inside, after = b.block, b.append_basic_block("body"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", count, I64(0)), inside, after)
        b.position_at_end(inside)
        index = b.phi(I64)
        index.add_incoming(I64(0), before)
        turn = _Turn(index, [b.phi(v.type) for v in start])
        yield turn
        following, end = b.add(index, I64(1)), b.block
        index.add_incoming(following, end)
        again = b.cbranch(b.icmp_signed("<", following, count), inside, after)
        if rolled:
            disable = b.module.add_metadata([ir.MetaDataString(b.module, "llvm.loop.unroll.disable")])
            own = ir.values.MDValue(b.module, (disable,), name=str(len(b.module.metadata)))
            own.operands = (own, disable)  # a loop's metadata name themselves, so that no two are one
            again.set_metadata("llvm.loop", own)
        b.position_at_end(after)
        turn.last = [b.phi(v.type) for v in start]
        for phis in (turn.values, turn.last):
            for phi, first, next_value in zip(phis, start, turn.next, strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(next_value, end)

    def loop(
        self, count: Value, start: Sequence[Value], body: Callable[[Value, list[Value]], list[Value]]
    ) -> list[Value]:
        """Run `body(index, values) -> values` `count` times (0 too); returns the last values."""
        with self._repeated(count, start, False) as turn:
            turn.next = body(turn.index, list(turn.values))
        return turn.last

    @contextmanager
    def walk(
        self, count: Value | int, *places: tuple[Value, Any], carried: Any = None, rolled: bool = False
    ) -> Iterator[Walk]:
        """Pointers for what is emitted within, which runs `count` times (0 too): each place is where one of
        them begins and by how many bytes it goes on every time; `carried` names values, or lists of them.

        One that is `rolled` the compiler leaves a loop: every key's row is then read by the same
        instructions, a step apart, one after the other. That is what the machine's prefetchers follow."""
        carried = carried or {}
        start, n = [self.pointer(place) if place.type == I64 else place for place, _ in places], len(places)
        with self._repeated(count, [*start, *_flat(carried.values())], rolled) as turn:
            walk = Walk(index=turn.index, pointers=turn.values[:n])
            walk.hold(carried, turn.values[n:])
            yield walk
            steps = [self.at(p, step) for p, (_, step) in zip(walk, places, strict=True)]
            turn.next = [*steps, *_flat(getattr(walk, name) for name in carried)]
        walk.pointers = turn.last[:n]
        walk.hold(carried, turn.last[n:])

    def each_vector(
        self,
        count: Value,
        per: int,
        start: Sequence[Value],
        step: Callable[[list[Value], Value | None], list[Value]],
    ) -> list[Value]:
        """Run `step(values, inside) -> values` for `count` elements, `per` at a time. `inside` is the mask of
        the last ones, which fill no vector, else None."""
        full, rest = self.b.udiv(count, I64(per)), self.b.urem(count, I64(per))
        values = self.loop(full, start, lambda i, x: step(x, None))
        some = self.b.zext(self.b.icmp_signed(">", rest, I64(0)), I64)
        return self.loop(some, values, lambda i, x: step(x, self.first_lanes(rest, per)))

    def where(
        self, condition: Value, values: Sequence[Value], body: Callable[[list[Value]], list[Value]]
    ) -> list[Value]:
        """`body(values)` if the condition holds, else the values themselves; one branch, not a select."""
        b, before = self.b, self.b.block
        inside, after = b.append_basic_block("then"), b.append_basic_block("after")
        b.cbranch(condition, inside, after)
        b.position_at_end(inside)
        changed, end = body(list(values)), b.block
        b.branch(after)
        b.position_at_end(after)
        merged = [b.phi(v.type) for v in values]
        for phi, old, new in zip(merged, values, changed, strict=True):
            phi.add_incoming(old, before)
            phi.add_incoming(new, end)
        return list(merged)


def _alignment(kind: ir.Type) -> int:
    """Bytes of an element, float16 or float32 if it is no integer."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    if isinstance(element, ir.IntType):
        return element.width // 8
    return 2 if isinstance(element, ir.HalfType) else 4


def _mangled(kind: ir.VectorType) -> str:
    element = kind.element
    letter = f"i{element.width}" if isinstance(element, ir.IntType) else "f32"
    return f"v{kind.count}{letter}"
