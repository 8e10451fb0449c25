"""The AVX-512 kernels on an x86 CPU without it: `pytest --isa avx512`.

LLVM cuts vectors of 512 bits for any CPU; the instructions that have no portable form are emitted as several
others here, with the same results to the bit. What a CPU says it can do is changed as well, so that plans and
tests choose those kernels. Their time means nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from polyflash import target
from polyflash.backends.cpu.simd import I8, I16, I32, I64, Emitter, Value

FLAGS = target._AVX512 | {"avx512_vnni"}
F32, F64 = ir.FloatType(), ir.DoubleType()


def install() -> None:
    """Before test modules ask what the CPU can do; nothing where it has all of it."""
    if target.cpu_flags() >= FLAGS:
        return
    folder = os.environ.get("POLYFLASH_CACHE_DIR", "build")
    if not folder.endswith("avx512"):  # as that of workers does
        os.environ["POLYFLASH_CACHE_DIR"] = os.path.join(folder, "avx512")
    flags, call = target.cpu_flags(), Emitter.call
    target.cpu_flags = lambda: flags | FLAGS
    target.host_arch.cache_clear()

    def emulated(e: Emitter, name: str, result: ir.Type, args: Sequence[Value]) -> Value:
        emit = INSTRUCTIONS.get(name.removeprefix("llvm.x86.avx512."))
        return call(e, name, result, args) if emit is None else e.b.bitcast(emit(e, *args), result)

    Emitter.call, Emitter.in_turn = emulated, lambda e, values: list(values)  # an order changes no value


def _wide(kind: ir.Type, n: int) -> ir.VectorType:
    return ir.VectorType(kind, n)


def _every(kind: ir.VectorType, value: Any) -> Value:
    return ir.Constant(kind, [value] * kind.count)


def _added(e: Emitter, acc: Value, products: Value) -> Value:
    """Those of as many neighbours as a lane has, for every lane."""
    n = products.type.count // 16
    for first in range(n):
        acc = e.b.add(acc, e.shuffle(products, products, range(first, 16 * n, n)))
    return acc


def dot_bytes(e: Emitter, acc: Value, x: Value, y: Value) -> Value:
    x, y, wide = *(e.b.bitcast(z, _wide(I8, 64)) for z in (x, y)), _wide(I32, 64)
    return _added(e, acc, e.b.mul(e.b.zext(x, wide), e.b.sext(y, wide)))


def dot_words(e: Emitter, acc: Value, x: Value, y: Value) -> Value:
    x, y = (e.b.sext(e.b.bitcast(z, _wide(I16, 32)), _wide(I32, 32)) for z in (x, y))
    return _added(e, acc, e.b.mul(x, y))


def pair_products(e: Emitter, x: Value, y: Value) -> Value:
    return dot_words(e, e.ints(0), x, y)


def logic(e: Emitter, x: Value, y: Value, z: Value, table: Value) -> Value:
    made = e.ints(0)
    for n in range(8):
        if table.constant >> n & 1:
            bits = [v if n >> at & 1 else e.b.not_(v) for at, v in ((2, x), (1, y), (0, z))]
            made = e.b.or_(made, e.b.and_(e.b.and_(bits[0], bits[1]), bits[2]))
    return made


def _packed(kind: ir.IntType, least: int, most: int) -> Callable[..., Value]:
    """What narrows two vectors, 128 bits of either by turns, and holds values to these."""

    def packed(e: Emitter, x: Value, y: Value) -> Value:
        n = x.type.count // 4  # in 128 bits
        order = [
            at + i + (4 * n if second else 0)
            for at in range(0, 4 * n, n)
            for second in (0, 1)
            for i in range(n)
        ]
        z = e.shuffle(x, y, order)
        for bound, than in ((least, "<"), (most, ">")):
            held = _every(z.type, bound)
            z = e.b.select(e.b.icmp_signed(than, z, held), held, z)
        return e.b.trunc(z, _wide(kind, z.type.count))

    return packed


def _floor(e: Emitter, x: Value) -> Value:
    return e.call("llvm.floor.v16f32", e.vf, [x])


def fraction(e: Emitter, x: Value, control: Value, *_: Value) -> Value:
    """Of what is left above the integer below."""
    assert control.constant == 9
    left = e.b.fsub(x, _floor(e, x))
    size = e.call("llvm.fabs.v16f32", e.vf, [x])
    return e.b.select(e.b.fcmp_ordered("==", size, e.floats(float("inf"))), e.floats(0), left)


def scaled(e: Emitter, x: Value, power: Value, _: Value, mask: Value, __: Value) -> Value:
    """x·2**floor(power), rounded once; 0 where the mask has none."""
    b, n = e.b, _floor(e, power)
    for bound, than in ((-400.0, "<"), (400.0, ">")):
        n = b.select(b.fcmp_ordered(than, n, e.floats(bound)), e.floats(bound), n)
    known = b.select(b.fcmp_unordered("uno", n, n), e.floats(0), n)
    bits = b.shl(
        b.add(b.fptosi(known, _wide(I64, 16)), _every(_wide(I64, 16), 1023)), _every(_wide(I64, 16), 52)
    )
    product = b.fmul(b.fpext(x, _wide(F64, 16)), b.bitcast(bits, _wide(F64, 16)))
    made = b.select(b.fcmp_unordered("uno", n, n), n, b.fptrunc(product, e.vf))
    return b.select(b.bitcast(mask, e.vbits), made, e.floats(0))


def nearest(e: Emitter, x: Value, *_: Value) -> Value:
    b, whole = e.b, e.call("llvm.rint.v16f32", e.vf, [x])
    inside = b.and_(
        b.fcmp_ordered(">=", whole, e.floats(-(2.0**31))), b.fcmp_ordered("<", whole, e.floats(2.0**31))
    )
    known = b.select(inside, whole, e.floats(0))
    return b.select(inside, b.fptosi(known, e.vi), e.ints(-(1 << 31)))


def permuted(e: Emitter, x: Value, order: Value) -> Value:
    made = ir.Constant(e.vf, ir.Undefined)
    for lane in range(16):
        at = e.b.and_(e.b.extract_element(order, I32(lane)), I32(15))
        made = e.b.insert_element(made, e.b.extract_element(x, at), I32(lane))
    return made


INSTRUCTIONS: dict[str, Callable[..., Value]] = {
    "vpdpbusd.512": dot_bytes,
    "vpdpwssd.512": dot_words,
    "pmaddw.d.512": pair_products,
    "pternlog.d.512": logic,
    "packuswb.512": _packed(I8, 0, 255),
    "packsswb.512": _packed(I8, -128, 127),
    "packssdw.512": _packed(I16, -(1 << 15), (1 << 15) - 1),
    "mask.reduce.ps.512": fraction,
    "mask.scalef.ps.512": scaled,
    "mask.cvtps2dq.512": nearest,
    "permvar.sf.512": permuted,
}
