"""Operations of AVX-512 on words of 16 bits, two to a lane, in vectors of int32."""

from __future__ import annotations

from llvmlite import ir

from polyflash.backends.cpu.simd import I16, Emitter, Value

POWERS = tuple(round(32767 * 2 ** (-j / 64)) for j in range(64))


def _constant(e: Emitter, words: tuple[int, ...] | list[int]) -> Value:
    return ir.Constant(ir.VectorType(I16, 2 * e.lanes), words)


def _call(e: Emitter, name: str, *args: Value) -> Value:
    kind = ir.VectorType(I16, 2 * e.lanes)
    return e.b.bitcast(
        e.call(f"llvm.x86.avx512.{name}.512", kind, [e.b.bitcast(x, kind) for x in args]), e.vi
    )


def _right(e: Emitter, x: Value, count: int) -> Value:
    counts = _constant(e, [count] * 2 * e.lanes)
    return e.b.bitcast(e.b.lshr(e.b.bitcast(x, counts.type), counts), e.vi)


def add_pairs(e: Emitter, acc: Value, x: Value) -> Value:
    """acc + both words of each lane, signed."""
    return e.call("llvm.x86.avx512.vpdpwssd.512", e.vi, [acc, x, e.ints(0x10001)])


def low_halves(e: Emitter, x: Value, y: Value) -> Value:
    """The low words of the lanes of `x`, and above them those of `y`."""
    return e.b.or_(e.b.and_(x, e.ints(0xFFFF)), e.b.shl(y, e.ints(16)))


def high_halves(e: Emitter, x: Value, y: Value) -> Value:
    """The high words of the lanes of `x`, and above them those of `y`."""
    return e.b.or_(e.b.lshr(x, e.ints(16)), e.b.and_(y, e.ints(-0x10000)))


def product_high(e: Emitter, x: Value, y: Value) -> Value:
    """The high halves of products of unsigned words."""
    return _call(e, "pmulhu.w", x, y)


def power(e: Emitter, x: Value) -> Value:
    """32767 · 2**(-x / 64) of unsigned words, cut to integers."""
    n = 2 * e.lanes
    low, high = (_constant(e, POWERS[i : i + n]) for i in (0, n))
    return _call(e, "psrlv.w", _call(e, "vpermi2var.hi", low, x, high), _right(e, x, 6))


def as_bytes(e: Emitter, x: Value, y: Value) -> Value:
    """Words of 128ths as bytes, rounded: of `x` the even ones of a lane, of `y` the odd ones."""
    half = e.ints(64 << 16 | 64)  # no word of the sum overflows
    low, high = (e.b.add(part, half) for part in (x, y))
    return e.b.or_(_right(e, low, 7), e.b.and_(e.b.shl(high, e.ints(1)), e.ints(-0xFF0100)))
