"""PTX that kernels hold where Triton has no word for it: NVIDIA alone, and not in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _multiply(count: int) -> str:
    """`count` float32 $0.. times as many factors, unless those of a whole warp are 1. Four at a time, because
    ptxas sees that comparisons of a product's rows repeat every four registers, and keeps one of each."""
    factors = range(2 * count, 3 * count)
    lines = [".reg .pred some, four, vote;"]
    for first in factors[::4]:
        lines.append(f"setp.neu.f32 four, ${first}, 0f3F800000;")
        rest = range(first + 1, min(first + 4, factors.stop))
        lines += [f"setp.neu.or.f32 four, ${i}, 0f3F800000, four;" for i in rest]
        lines.append("mov.pred some, four;" if first == factors.start else "or.pred some, some, four;")
    lines.append("vote.sync.any.pred vote, some, 0xffffffff; @!vote bra.uni DONE;")
    lines += [f"mul.rn.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return "{ " + " ".join(lines) + " DONE: }"


@triton.constexpr_function
def _in_place(count: int) -> str:
    """Constraints of `count` float32 results: each in the register of its first operand, beside a second."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@triton.jit
def multiply_unless_one(b_x, b_factor, COUNT: tl.constexpr):
    """x·factor of float32 tiles of one shape; a warp whose factors are all 1 skips it. COUNT, which divides
    the number of values of a thread, are looked at together."""
    return tl.inline_asm_elementwise(
        _multiply(COUNT), _in_place(COUNT), [b_x, b_factor], tl.float32, True, COUNT
    )


@triton.constexpr_function
def _unpack(number: int, codes: str) -> str:
    """Class `number` of two words of codes as two bfloat16. Integers are put below the bits of 128, which is
    then taken off again; small floats become those of bfloat16 by way of float16, or by a product."""
    bits = 8 if codes in ("int8", "fp8_e4m3", "fp8_e5m2") else 4
    lines = [".reg .b32 x, a, b, c; .reg .b16 lo, hi; .reg .f32 f, g;", f"shr.u32 x, $1, {bits * number};"]
    if codes == "int8":
        lines += ["lop3.b32 a, x, 0x007F007F, 0x43004300, 0xEA;", "mov.b32 c, 0x3F803F80;"]
        lines += ["lop3.b32 b, x, 0x00800080, 0xC300C300, 0xEA;"]
    elif codes == "int4+136":
        lines += ["lop3.b32 $0, x, 0x000F000F, 0x43004300, 0xEA;"]
        return "{ " + " ".join(lines) + " }"
    elif codes == "int4":
        lines += ["lop3.b32 a, x, 0x000F000F, 0x43004300, 0xEA;", "mov.b32 c, 0x3F803F80;"]
        lines += ["mov.b32 b, 0xC308C308;"]
    elif codes == "mxfp4":
        size = ("shl.b32 b, $1, 6;", "shl.b32 b, $1, 2;", "shr.u32 b, $1, 2;", "shr.u32 b, $1, 6;")[number]
        lines += [f"shl.b32 a, $1, {12 - bits * number};", size]
        lines += ["and.b32 a, a, 0x80008000; lop3.b32 a, b, 0x01C001C0, a, 0xEA;"]
        lines += ["mov.b32 c, 0x7E807E80;", "mov.b32 b, 0x80008000;"]
    else:
        kind = codes.removeprefix("fp8_")
        lines += ["prmt.b32 a, x, 0, 0x4420; mov.b32 {lo, hi}, a;", f"cvt.rn.f16x2.{kind}x2 a, lo;"]
        lines += ["mov.b32 {lo, hi}, a; cvt.f32.f16 f, lo; cvt.f32.f16 g, hi;", "cvt.rn.bf16x2.f32 $0, g, f;"]
        return "{ " + " ".join(lines) + " }"
    return "{ " + " ".join((*lines, "fma.rn.bf16x2 $0, a, c, b;")) + " }"


@triton.jit
def unpacked(b_w, CLASS: tl.constexpr, CODES: tl.constexpr):
    """The codes of a class of channels of 16-bit words, bfloat16."""
    return tl.inline_asm_elementwise(_unpack(CLASS, CODES), "=r,r", [b_w], tl.bfloat16, True, 2)


@triton.constexpr_function
def _unpack_bytes(codes: str) -> str:
    """Both classes of two words of bytes as two float16 each; int8 are put below the bits of 1024."""
    if codes == "int8":
        lines = [".reg .b32 x, a, b;", "xor.b32 x, $2, 0x80808080; mov.b32 b, 0xE480E480;"]
        lines += ["prmt.b32 a, x, 0x64646464, 0x4240; add.rn.f16x2 $0, a, b;"]
        lines += ["prmt.b32 a, x, 0x64646464, 0x4341; add.rn.f16x2 $1, a, b;"]
    else:
        kind = codes.removeprefix("fp8_")
        lines = [".reg .b32 x; .reg .b16 lo, hi;", "prmt.b32 x, $2, 0, 0x3120; mov.b32 {lo, hi}, x;"]
        lines += [f"cvt.rn.f16x2.{kind}x2 $0, lo; cvt.rn.f16x2.{kind}x2 $1, hi;"]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def unpacked_bytes(b_w, CODES: tl.constexpr):
    """The codes of both classes of channels of 16-bit words, float16."""
    kinds: tl.constexpr = (tl.float16, tl.float16)
    return tl.inline_asm_elementwise(_unpack_bytes(CODES), "=r,=r,r", [b_w], kinds, True, 2)


_HALVES: tl.constexpr = tl.constexpr(
    "{ .reg .b32 x, y; cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 x, $0, 16; and.b32 y, $0, 0xFFFF0000;"
    " sub.rn.f32 x, $2, x; sub.rn.f32 y, $3, y; cvt.rn.bf16x2.f32 $1, y, x; }"
)


@triton.jit
def halves(b_x):
    """float32 as a sum of two bfloat16."""
    kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16)
    return tl.inline_asm_elementwise(_HALVES, "=&r,=r,r,r", [b_x], kinds, True, 2)


_PRODUCT_HALVES: tl.constexpr = tl.constexpr(
    "{ .reg .b32 x; mov.b32 x, 0x80008000; fma.rn.bf16x2 $0, $2, $3, x; xor.b32 x, $0, x;"
    " fma.rn.bf16x2 $1, $2, $3, x; }"
)


@triton.jit
def product_halves(b_x, b_y):
    """x·y of bfloat16 as a sum of two bfloat16: a quarter of the instructions of `halves`."""
    kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16)
    return tl.inline_asm_elementwise(_PRODUCT_HALVES, "=&r,=r,r,r", [b_x, b_y], kinds, True, 2)


@triton.jit
def multiply_add(b_x, b_y, b_z):
    """x·y + z of bfloat16, rounded once."""
    asm: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", [b_x, b_y, b_z], tl.bfloat16, True, 2)
