"""The codec's common schemes as one kernel: a block of tokens of one head is read once, and leaves as codes,
scale and shift; keys of a cache are turned by their positions on the way, and stored in their slots. Bits are
the codec's (quant/codec.py) and those of kvcache/rope.py, whose divisions and roundings these are.

A scale is one token's (or that of a block of its channels), or one channel's over a group of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from polyflash.backends.gpu.views import View, view_of
from polyflash.backends.triton import interpreter, runtime
from polyflash.quant.scheme import KINDS

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.quant.scheme import Scheme
    from polyflash.quant.tensor import QuantizedTensor

interpreter.prepare()

_TOKENS, _MOST_TOKENS, _MOST_CHANNELS = 16, 256, 1024  # of a tile; its channels
_MAGIC = tl.constexpr(12582912.0)  # 1.5·2^23: a sum with it has no fraction, rounded to nearest even


class Tensors(NamedTuple):
    """`t` of `encode_block`."""

    x: View
    codes: View
    scale: View  # (batch, heads, blocks of tokens, blocks of channels), and so is shift
    shift: View | None
    mean: View | None
    lens: Any
    at: Any = None  # the slot of each token in pages, which codes and tables are then; -1: none
    cos: Any = None  # float32 (tokens, half), and so is sin: rotary positions
    sin: Any = None
    end: Any = None  # see `runtime.compile`


class Numbers(NamedTuple):
    """`n` of `encode_block`."""

    num_heads: int
    seqlen: int
    blocks: int
    page_size: int = 1
    half: int = 0


class Constants(NamedTuple):
    """`c` of `encode_block`."""

    DTYPE: Any = "int8"
    MOST: Any = 127.0  # or, of steps, how many there are
    STEPS: Any = False  # from the least value to the greatest
    TOKENS: Any = _TOKENS  # of a program
    TILE: Any = _TOKENS  # as many, or the power of two above
    GROUPED: Any = False  # a scale per channel
    D: Any = 0
    WIDE: Any = 0  # channels, or the power of two above
    CHANNELS: Any = 0  # per scale
    TURNS: Any = 0  # 2 to the power of it channels are rotated together, times FACTOR
    FACTOR: Any = 1.0
    NEIGHBOURS: Any = False  # pairs that turn are channels 2i and 2i + 1
    LAYOUT: Any = 0


@triton.jit
def spread(x, c):
    """One number per scale, as one per element of the tile."""
    if c.GROUPED:
        wide = tl.broadcast_to(x[None, :], c.TILE, c.WIDE)
    else:
        wide = tl.broadcast_to(x[:, :, None], c.TILE, c.WIDE // c.CHANNELS, c.CHANNELS)
    return tl.reshape(wide, c.TILE, c.WIDE)


@triton.jit
def greatest(b_x, c):
    """The greatest value under each scale."""
    if c.GROUPED:
        top = tl.max(b_x, 0)
    else:
        top = tl.max(tl.reshape(b_x, c.TILE, c.WIDE // c.CHANNELS, c.CHANNELS), 2)
    return top


@triton.jit
def store_table(table, b_x, i_b, i_h, i_t, o_t, m_t, c):
    """Stores one number per scale."""
    p = table.p + i_h * table.h
    if c.GROUPED:
        o_d = tl.arange(0, c.WIDE)
        tl.store(p + i_b * table.b + i_t * table.s + o_d * table.d, b_x, mask=o_d < c.D)
    else:
        o_c = tl.arange(0, c.WIDE // c.CHANNELS)
        p_t = p + i_b * table.b + o_t * table.s
        m = m_t[:, None] & (o_c * c.CHANNELS < c.D)[None, :]
        tl.store(p_t[:, None] + o_c[None, :] * table.d, b_x, mask=m)


@triton.jit
def rounded(b_y, c):
    """Values as a float of 8 bits holds them, to nearest even, zeros with their sign."""
    MANTISSA: tl.constexpr = 3 if c.DTYPE == "fp8_e4m3" else 2
    LEAST: tl.constexpr = (127 - 6 if c.DTYPE == "fp8_e4m3" else 127 - 14) << 23
    exponent = tl.maximum(b_y.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)
    magic = (exponent + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True) * 1.5
    sign = b_y.to(tl.int32, bitcast=True) & -0x80000000
    return (((b_y + magic) - magic).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def turned(b_x, p_x, o_t, m_x, t, n, c):
    """Channels turned by their tokens' positions and rounded to the dtype of x (kvcache/rope.py)."""
    o_d, half = tl.arange(0, c.WIDE), n.half
    if c.NEIGHBOURS:
        first, o_r, o_p = o_d % 2 == 0, o_d // 2, o_d ^ 1
    else:
        first = o_d < half
        o_r, o_p = tl.where(first, o_d, o_d - half), tl.where(first, o_d + half, o_d - half)
    m = m_x & (o_d < 2 * half)[None, :]
    b_p = tl.load(p_x + o_p[None, :] * t.x.d, mask=m, other=0.0).to(tl.float32)
    o_r = o_t[:, None].to(tl.int64) * half + o_r[None, :]
    b_cos, b_sin = tl.load(t.cos + o_r, mask=m, other=1.0), tl.load(t.sin + o_r, mask=m, other=0.0)
    b_p = b_p * b_sin
    b_y = b_x * b_cos + tl.where(first[None, :], -b_p, b_p)
    return tl.where(m, b_y.to(t.x.p.dtype.element_ty).to(tl.float32), b_x)


@triton.jit
def rotated(b_x, c):
    """Blocks of 2^TURNS channels times a Hadamard matrix: the sums and differences of `codec.rotate`."""
    for i in tl.static_range(c.TURNS):
        pairs = tl.reshape(b_x, c.TILE, c.WIDE >> (i + 1), 2, 1 << i)
        a, b = tl.split(tl.permute(pairs, 0, 1, 3, 2))
        b_x = tl.reshape(tl.permute(tl.join(a + b, a - b), 0, 1, 3, 2), c.TILE, c.WIDE)
    return b_x * c.FACTOR


@triton.jit
def encode_block(t, n, c):
    """One program per block of tokens of a head."""
    i_t, i_bh = tl.program_id(0) % n.blocks, tl.program_id(0) // n.blocks
    i_h, i_b = tl.cast(i_bh % n.num_heads, tl.int64), tl.cast(i_bh // n.num_heads, tl.int64)
    o_n = tl.arange(0, c.TILE)
    o_t, o_d = i_t * c.TOKENS + o_n, tl.arange(0, c.WIDE)
    m_t = (o_n < c.TOKENS) & (o_t < n.seqlen)
    m_d = o_d < c.D
    x, codes = t.x, t.codes
    p = x.p + i_b * x.b + i_h * x.h + o_t[:, None].to(tl.int64) * x.s
    b_x = tl.load(p + o_d[None, :] * x.d, mask=m_t[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    if t.cos is not None:
        b_x = turned(b_x, p, o_t, m_t[:, None] & m_d[None, :], t, n, c)
    m_live = m_t
    if t.lens is not None:
        m_live = m_live & (o_t < tl.load(t.lens + i_b))
    m_x = m_live[:, None] & m_d[None, :]
    b_x = tl.where(m_x, b_x, 0.0)
    if c.TURNS > 0:
        b_x = rotated(b_x, c)
    if t.mean is not None:
        b_mean = tl.load(t.mean.p + i_b * t.mean.b + i_h * t.mean.h + o_d * t.mean.d, mask=m_d, other=0.0)
        b_x = tl.where(m_x, b_x - b_mean[None, :], 0.0)
    o_s = o_t.to(tl.int64)
    if t.at is not None:
        slot = tl.load(t.at + o_t, mask=m_t, other=-1)
        m_t = m_t & (slot >= 0)
        slot = tl.where(m_t, slot, 0)
        i_b, o_s = slot // n.page_size, slot % n.page_size
    odd = greatest((b_x != b_x).to(tl.int32), c) > 0  # a NaN, which maxima pass over
    if c.STEPS:
        hi = greatest(tl.where(m_x, b_x, float("-inf")), c)
        lo = -greatest(tl.where(m_x, -b_x, float("-inf")), c)
        empty = lo > hi
        hi, lo = tl.where(empty, 0.0, hi), tl.where(empty, 0.0, lo)
        hi, lo = tl.where(odd, float("nan"), hi), tl.where(odd, float("nan"), lo)
        scale = tl.math.div_rn(hi - lo, tl.full(hi.shape, c.MOST + 0.25, tl.float32))
        MIDDLE: tl.constexpr = (c.MOST + 1) // 2
        # By powers of two: whether a product is rounded before its sum makes no difference.
        store_table(t.shift, lo + scale * MIDDLE + scale * 0.125, i_b, i_h, i_t, o_s, m_t, c)
        b_y = tl.math.div_rn(b_x - spread(lo, c), spread(scale, c)) - 0.125
        b_y = tl.minimum(tl.maximum(tl.where(b_y == b_y, b_y, 0.0), 0.0), c.MOST * 1.0)
        b_y = (b_y + _MAGIC) - _MAGIC - MIDDLE
    else:
        scale = tl.where(odd, float("nan"), greatest(tl.abs(b_x), c))
        scale = tl.math.div_rn(scale, tl.full(scale.shape, c.MOST, tl.float32))
        b_y = tl.math.div_rn(b_x, spread(scale, c))
        b_y = tl.where(b_y == b_y, b_y, 0.0)
        if c.DTYPE == "int8":
            b_y = (tl.minimum(tl.maximum(b_y, -128.0), 127.0) + _MAGIC) - _MAGIC
        elif c.DTYPE == "int4":
            b_y = (tl.minimum(tl.maximum(b_y, -8.0), 7.0) + _MAGIC) - _MAGIC
        else:
            b_y = rounded(tl.minimum(tl.maximum(b_y, -c.MOST), c.MOST), c)
    store_table(t.scale, scale, i_b, i_h, i_t, o_s, m_t, c)
    b_y = tl.where(m_x, b_y, 0.0)
    p = (codes.p + i_h * codes.h + i_b * codes.b + o_s * codes.s)[:, None]
    if c.DTYPE == "int4":
        even, uneven = tl.split(tl.reshape(b_y.to(tl.int32) + 8, c.TILE, c.WIDE // 2, 2))
        o_d = tl.arange(0, c.WIDE // 2)
        b_codes = (even | (uneven << 4)).to(tl.uint8)
        tl.store(p + o_d[None, :] * codes.d, b_codes, mask=m_t[:, None] & (o_d * 2 < c.D)[None, :])
    else:
        b_codes = b_y.to(codes.p.dtype.element_ty)
        tl.store(p + o_d[None, :] * codes.d, b_codes, mask=m_t[:, None] & m_d[None, :])


_kernels = runtime.Kernels()


def encode(
    x: Tensor, mean: Tensor | None, scheme: Scheme, lens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes, scale and shift of x (batch, heads, seqlen, head_dim) as `codec.encode` gives them, which took
    the mean of a smoothed scheme, of rotated values; None of a scheme that has no kernel."""
    c = _constants(x, scheme)
    if c is None:
        return None
    batch, heads, seqlen, head_dim = x.shape
    form = scheme.codes
    tables = (batch, heads, *form.scale.counts(seqlen, head_dim))
    stored = getattr(torch, KINDS[scheme.dtype].storage)
    codes = x.new_empty((*x.shape[:3], head_dim // form.packed), dtype=stored)
    scale = x.new_empty(tables, dtype=torch.float32)
    shift = None if scheme.symmetric else torch.empty_like(scale)
    if lens is not None:
        lens = lens.to(x.device, torch.int32).contiguous()
    t = Tensors(view_of(x), view_of(codes), view_of(scale), view_of(shift), view_of(mean), lens)
    _launch(t, Numbers(heads, seqlen, -(-seqlen // c.TOKENS)), c, batch, x.device)
    return codes, scale, mean if shift is None else shift


def write(x: Tensor, cache: QuantizedTensor, slots: Tensor, turn: tuple[Tensor, Tensor, bool] | None) -> bool:
    """Codes tokens x (total, heads, head_dim) in `slots`, int64 (total,), -1 for nowhere, of pages of codes
    by a scheme per token; False of a scheme that has no kernel. `turn`: cosines and sines, float32 (total,
    rotary_dim / 2), by which x is turned first, and whether pairs are neighbours."""
    x, scheme = x.transpose(0, 1)[None], cache.scheme
    c = _constants(x, scheme)
    if c is None or c.GROUPED or scheme.smoothing != "none":
        return False
    cos, sin, neighbours = (None, None, False) if turn is None or not turn[0].numel() else turn
    codes, scale, shift = map(view_of, (cache.codes, cache.scale, cache.shift))
    t = Tensors(view_of(x), codes, scale, shift, None, None, slots.contiguous(), cos, sin)
    _, heads, seqlen, _ = x.shape
    half = 0 if cos is None else cos.shape[1]
    n = Numbers(heads, seqlen, -(-seqlen // c.TOKENS), cache.codes.shape[2], half)
    _launch(t, n, c._replace(NEIGHBOURS=neighbours), 1, x.device)
    return True


def _constants(x: Tensor, scheme: Scheme) -> Constants | None:
    """How the kernel codes such values, if it does."""
    kind, form, head_dim = KINDS[scheme.dtype], scheme.codes, x.shape[3]
    grouped, wide = form.scale.channels == 1, triton.next_power_of_2(max(head_dim, 2))
    tokens = form.scale.tokens if grouped else _TOKENS
    channels = form.scale.channels or wide
    fits = scheme.dtype in ("int8", "int4", "fp8_e4m3", "fp8_e5m2") and scheme.smoothing != "block_mean"
    fits = fits and (1 < tokens <= _MOST_TOKENS if grouped else form.scale.tokens == 1)
    fits = fits and channels & (channels - 1) == 0 and channels <= wide <= _MOST_CHANNELS
    if not fits or x.dtype is torch.float64 or not x.numel():
        return None
    steps = not scheme.symmetric
    tile, most = triton.next_power_of_2(tokens), kind.levels if steps else kind.most
    c = Constants(scheme.dtype, most, steps, tokens, tile, grouped, head_dim, wide, channels)
    if scheme.rotated_in_pass:
        size = head_dim & -head_dim
        c = c._replace(TURNS=size.bit_length() - 1, FACTOR=size**-0.5)
    return c


def _launch(t: Tensors, n: Numbers, c: Constants, batch: int, device: torch.device) -> None:
    options: dict[str, Any] = {"num_warps": 4}
    if c.TURNS or t.cos is not None:  # their products are rounded before what follows
        options["enable_fp_fusion"] = False
    arguments = t, n, runtime.compiled_in(c)
    key = c, runtime.signature(tuple(t))
    _kernels.launch(encode_block, (batch * n.num_heads * n.blocks,), arguments, options, key, device)
