"""Operands of products of 8 bits: q rounded to e4m3 with a factor per row, and V with its channels as rows.

A product of 8 bits takes the keys of 32 in another order than scores have them: of 16, those of registers of
one thread side by side. V lies in memory in that order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from polyflash.backends.gpu.views import View
from polyflash.backends.triton import interpreter, runtime

if TYPE_CHECKING:
    from torch import Tensor

interpreter.prepare()

KEYS = 32  # whose order a product of 8 bits changes
OPTIONS = {"num_warps": 4}
ROWS, WORDS = tl.constexpr(64), tl.constexpr(32)  # of q in a program; of V, four keys each
TOP = tl.constexpr(448.0)  # the largest e4m3
LEAST = tl.constexpr(2.0**-126)  # below, a factor would be no normal number, and -inf times 0 is NaN


class Tensors(NamedTuple):
    """`t` of `round_rows` and `turn_values`, which take q or V, as `x`, and write e4m3, as int32 of four keys
    where it is V's: (B, Hkv, D, keys / 4)."""

    x: Any
    codes: Any
    k_scale: Any = None
    factors: Any = None  # float32 (B, Hq, Sq), of products: what makes them exponents of 2
    odd: Any = None  # int32 (B, Hkv): becomes 1 where codes have a NaN
    end: None = None  # see `runtime.compile` of the Triton engine


class Numbers(NamedTuple):
    """`n`: `length` is of rows of q, or of keys; `stride` of V's channels among the words."""

    num_heads: Any
    group: Any
    length: Any
    tiles: Any
    stride: Any
    scale: Any


class Constants(NamedTuple):
    """`c`."""

    D: int = 0
    CHANNELS: int = 0
    LAYOUT: int = 0


@triton.jit
def round_rows(t, n, c):
    """64 rows of q. A row with a value that is not finite is NaN; signs of scales go into the codes."""
    i_bh, i_t = tl.program_id(0) // n.tiles, tl.program_id(0) % n.tiles
    i_b, i_h = (i_bh // n.num_heads).to(tl.int64), (i_bh % n.num_heads).to(tl.int64)
    o_r, o_d = i_t * ROWS + tl.arange(0, ROWS), tl.arange(0, c.D)
    m_x = (o_r < n.length)[:, None] & (o_d < c.CHANNELS)[None, :]
    p_x = t.x.p + i_b * t.x.b + i_h * t.x.h + o_r[:, None].to(tl.int64) * t.x.s + o_d[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_top = tl.max(tl.where(b_x - b_x == 0.0, tl.abs(b_x), 0.0), 1)
    b_top = tl.where(b_top < LEAST * TOP, 0.0, b_top)
    scale = tl.load(t.k_scale.p + i_b * t.k_scale.b + i_h // n.group * t.k_scale.h) * n.scale
    b_factor = b_top * (tl.abs(scale) / TOP)
    b_step = tl.where(scale < 0.0, -TOP, TOP) / tl.where(b_top == 0.0, TOP, b_top)
    b_step = tl.where(b_factor < LEAST, 0.0, b_step)
    b_step = tl.where(b_factor == b_factor, b_step, float("nan"))
    b_factor = tl.where(b_factor >= LEAST, b_factor, 1.0)
    b_x = tl.where(b_x - b_x == 0.0, b_x, float("nan")) * b_step[:, None]
    p = i_bh.to(tl.int64) * n.length + o_r
    tl.store(t.codes + p[:, None] * c.CHANNELS + o_d[None, :], b_x.to(tl.float8e4nv), mask=m_x)
    tl.store(t.factors + p, b_factor, mask=o_r < n.length)


@triton.jit
def byte(b_w, i):
    """Byte i of words; a NaN is 0."""
    b_x = (b_w >> (8 * i)) & 0xFF
    return tl.where((b_x & 0x7F) == 0x7F, 0, b_x)


@triton.jit
def has_nan(b_w):
    """Words one of whose bytes has seven low bits: the sum with 1 carries into the eighth."""
    return (((b_w & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80) != 0


@triton.jit
def load_words(p, o_n, stride, length, o_w, c):
    """Four channels of a key per word."""
    m = (o_n < length)[:, None] & (o_w < c.CHANNELS // 4)[None, :]
    return tl.load(p + o_n[:, None].to(tl.int64) * stride + o_w[None, :], mask=m, other=0)


@triton.jit
def turn_values(t, n, c):
    """Four keys of each of V's channels per word: keys 2i, 2i + 1, 2i + 8, 2i + 9 of each 16."""
    i_bh, i_t = tl.program_id(0) // n.tiles, tl.program_id(0) % n.tiles
    i_b, i_h = (i_bh // n.num_heads).to(tl.int64), (i_bh % n.num_heads).to(tl.int64)
    o_q, o_w = i_t * WORDS + tl.arange(0, WORDS), tl.arange(0, c.D // 4)
    o_n = o_q // 4 * 16 + o_q % 4 * 2
    p = t.x.p + i_b * t.x.b + i_h * t.x.h
    b_0 = load_words(p, o_n, t.x.s, n.length, o_w, c)
    b_1 = load_words(p, o_n + 1, t.x.s, n.length, o_w, c)
    b_2 = load_words(p, o_n + 8, t.x.s, n.length, o_w, c)
    b_3 = load_words(p, o_n + 9, t.x.s, n.length, o_w, c)
    b_odd = has_nan(b_0) | has_nan(b_1) | has_nan(b_2) | has_nan(b_3)
    odd = tl.max(tl.max(b_odd.to(tl.int32), 1), 0)
    tl.store(t.odd + i_bh, 1, mask=odd != 0)
    m = (o_q < n.stride)[:, None] & (o_w < c.CHANNELS // 4)[None, :]
    for i in tl.static_range(4):
        b_x = byte(b_0, i) | (byte(b_1, i) << 8) | (byte(b_2, i) << 16) | (byte(b_3, i) << 24)
        p_x = t.codes + (i_bh.to(tl.int64) * c.CHANNELS + 4 * o_w[None, :] + i) * n.stride + o_q[:, None]
        tl.store(p_x, b_x, mask=m)


def turned(v: Tensor, kernels: runtime.Kernels) -> tuple[Tensor, Tensor]:
    """Codes of V (B, Hkv, S, D), D a multiple of 4, as (B, Hkv, D, S up to a multiple of
    KEYS), in the order of products, 0 for NaN; and int32 (B, Hkv): is there a NaN?"""
    if v.stride(3) != 1 or any(n % 4 for n in (*v.stride()[:3], v.storage_offset(), v.data_ptr())):
        v = v.contiguous()
    (batch, kv_heads, keys, channels), words = v.shape, v.view(torch.int32)
    stride = -(-keys // KEYS) * KEYS // 4
    made = runtime.scratch((batch, kv_heads, channels, stride), v.device, torch.int32)
    odd = runtime.scratch((batch, kv_heads), v.device, torch.int32, zero=True)
    n = Numbers(kv_heads, None, keys, -(-stride // WORDS.value), stride, None)
    c = runtime.compiled_in(Constants(1 << (channels - 1).bit_length(), channels))
    t = Tensors(View(words, *words.stride()), made, odd=odd)
    key = "values", channels, runtime.signature(words.stride()), runtime.aligned(words)
    kernels.launch(turn_values, (batch * kv_heads * n.tiles,), (t, n, c), OPTIONS, key, v.device)
    return made.view(torch.float8_e4m3fn), odd
