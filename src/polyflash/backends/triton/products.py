"""Dot products and their parts, sums that lose nothing, and values that may not be finite."""

from __future__ import annotations

import triton
import triton.language as tl

MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5·2^23: a sum with it is rounded to nearest even
PART: tl.constexpr = tl.constexpr(2.0**-7)  # of a float32 is the rest of its first eight bits at most


@triton.jit
def product(a, b, acc, PRODUCT: tl.constexpr):
    """acc + a @ b with float32 sums; a takes the dtype of b. PRODUCT is how float32 operands are multiplied:
    "ieee" by multiply-adds; "tf32x3" and "bf16x6" on matrix units as products of parts, which leave out less
    than float32 rounds; "tf32" with 11 bits of them."""
    if PRODUCT == "bf16x6":
        a0, a1, a2 = three_parts(a)
        b0, b1, b2 = three_parts(b)
        # small terms first; an infinity has no parts, so what they give is NaN, and its head says all
        b_low = tl.dot(a0, b2, out_dtype=tl.float32)
        b_low = tl.dot(a2, b0, b_low)
        b_low = tl.dot(a1, b1, b_low)
        b_low = tl.dot(a0, b1, b_low * PART)
        b_low = tl.dot(a1, b0, b_low)
        b_low = tl.where(b_low == b_low, b_low * PART, 0.0)
        acc += tl.dot(a0, b0, b_low)
    elif b.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision=PRODUCT)
    else:
        acc = tl.dot(a.to(b.dtype), b, acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def three_parts(x):
    """float32 as x0 + PART·x1 + PART²·x2 of bfloat16, cut and not rounded: no bit is lost of any
    normal number but the last two of the least, and none overflows. What is in parts stays."""
    if isinstance(x, tl.tensor):
        b_0 = cut(x)
        b_rest = (x - b_0) * 128.0
        b_1 = cut(b_rest)
        return b_0.to(tl.bfloat16), b_1.to(tl.bfloat16), ((b_rest - b_1) * 128.0).to(tl.bfloat16)
    else:
        return x


@triton.jit
def cut(b_x):
    """x with the bits that bfloat16 has."""
    return (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def turned(x):
    """A tile, or its parts, transposed."""
    if isinstance(x, tl.tensor):
        return tl.trans(x)
    else:
        x0, x1, x2 = x
        return tl.trans(x0), tl.trans(x1), tl.trans(x2)


@triton.jit
def cross(a, b, acc, WIDTH1: tl.constexpr, PRODUCT: tl.constexpr):
    """acc + a @ bᵀ over both channel blocks of a and b."""
    a0, a1 = a
    b0, b1 = b
    acc = product(a0, turned(b0), acc, PRODUCT)
    if WIDTH1 > 0:
        acc = product(a1, turned(b1), acc, PRODUCT)
    return acc


@triton.jit
def add(total, lost, x):
    """total + x, and what float32 lost of the sum, to be added with the next (Kahan): a row of thousands of
    keys has the error of one block."""
    x = x + lost
    more = total + x
    return more, x - (more - total)


@triton.jit
def accumulate(acc, lost, b_p, b_v, alpha, c):
    """acc, scaled already, + P·V. In float32 each block is summed by itself, and added without loss if what
    is lost is kept. So it is with a LEVEL of 1, as tensor cores keep few bits of sums of 8 bits; acc is then
    scaled here."""
    if b_v.dtype == tl.float32 or c.LEVEL == 1:
        b_o = product(b_p, b_v, tl.zeros(acc.shape, tl.float32), c.PRODUCT)
        if c.LEVEL == 1:
            acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), b_o)
        elif len(lost.shape) == 2:
            acc, lost = add(acc, lost * alpha[:, None], b_o)
        else:
            acc += b_o
    else:
        acc = product(b_p.to(b_v.dtype), b_v, acc, c.PRODUCT)
    return acc, lost


@triton.jit
def held(b_x, size):
    """x, any size being none below 0. What is loaded Triton multiplies out of shared memory, what is computed
    out of registers, so this computes what the compiler cannot know to be x."""
    BITS: tl.constexpr = tl.int32 if b_x.dtype == tl.float32 else tl.int16
    return (b_x.to(BITS, bitcast=True) ^ (size < 0).to(BITS)).to(b_x.dtype, bitcast=True)


@triton.jit
def largest(b_x):
    """The largest size in each row, NaN above infinity."""
    b_bits = b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(b_bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def rounded_codes(b_x, b_step, CODES: tl.constexpr):
    """Rows times a step each, rounded to "int8" or "fp8_e4m3"."""
    b_y = b_x.to(tl.float32) * b_step[:, None]
    return ((b_y + MAGIC) - MAGIC).to(tl.int8) if CODES == "int8" else b_y.to(tl.float8e4nv)


@triton.jit
def negated(b_x):
    return (-b_x.to(tl.float32)).to(b_x.dtype)


@triton.jit
def finite(b_x):
    """x with 0 for NaN and infinities."""
    b_wide = b_x.to(tl.float32)
    return tl.where(b_wide - b_wide == 0.0, b_wide, 0.0).to(b_x.dtype)


@triton.jit
def has_nonfinite(x):
    """Is any value NaN or infinite, as then its first part is?"""
    b_first = x if isinstance(x, tl.tensor) else x[0]
    b_wide = b_first.to(tl.float32)
    return tl.max(tl.max(tl.where(b_wide - b_wide == 0.0, 0, 1), 1), 0) > 0


@triton.jit
def nonfinite_only(b_x):
    """x with 0 for what is finite, float32."""
    b_wide = b_x.to(tl.float32)
    return tl.where(b_wide - b_wide == 0.0, 0.0, b_wide)
