"""The codec's common schemes as one kernel: a block of tokens of one head is read once, and leaves as codes,
scale and shift; keys of a cache are turned by their positions on the way, and stored in their slots. Bits are
the codec's (quant/codec.py) and those of kvcache/rope.py, whose divisions and roundings these are.

A scale is one token's (or that of a block of its channels), or one channel's over a group of tokens. A group
that a cache has begun is read where it lies: old tokens in a tail, where new ones are kept, too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from polyflash.backends.gpu.views import View, view_of
from polyflash.backends.triton import interpreter, replay, runtime
from polyflash.quant import codec
from polyflash.quant.scheme import BORDERS, KINDS
from polyflash.storages import is_readable

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
    scale: View | None  # (batch, heads, blocks of tokens, blocks of channels), and so is shift
    shift: View | None
    mean: View | None
    lens: Any
    at: Any = None  # the slot of each token in pages, which codes and tables are then; -1: none
    # int64 (groups, 6), of a scheme by channel: the row of x that is its first new token, live tokens, those
    # of them from before, its slot in pages, the address of its values (layers, TOKENS, heads, D) or 0, more
    groups: Any = None
    layer: Any = None  # int64: of those values
    cos: Any = None  # float32 (tokens, half), and so is sin: rotary positions
    sin: Any = None
    end: Any = None  # see `runtime.compile`


class Numbers(NamedTuple):
    """`n` of `encode_block`."""

    num_heads: int
    seqlen: int
    blocks: int
    page_size: int = 1  # slots of a page
    half: int = 0


class Constants(NamedTuple):
    """`c` of `encode_block`."""

    DTYPE: Any = "int8"
    PACKED: Any = 1  # codes in a byte
    MOST: Any = 127.0  # or, of steps, how many there are
    STEPS: Any = False  # from the least value to the greatest
    BORDERS: Any = ()  # between the values of a table
    TOKENS: Any = _TOKENS  # of a program
    TILE: Any = _TOKENS  # as many, or the power of two above
    GROUPED: Any = False  # a scale per channel
    D: Any = 0
    WIDE: Any = 0  # channels, or the power of two above
    CHANNELS: Any = 0  # per scale
    TURNS: Any = 0  # 2 to the power of it channels are rotated together, times FACTOR
    FACTOR: Any = 1.0
    NARROW: Any = False  # tables of bfloat16
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
def rounded_up(x):
    """The least bfloat16 that is no less, of what is positive."""
    bits = (x.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


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
def nearest(b_y, c):
    """The codes of the nearest of 16 values: of two the lower, or of signed ones the even."""
    b_size = b_y if c.DTYPE == "nf4" else tl.abs(b_y)
    b_code = tl.zeros_like(b_y).to(tl.int32)
    for i in tl.static_range(len(c.BORDERS)):
        above = b_size > c.BORDERS[i]
        if c.DTYPE == "mxfp4" and i % 2 == 1:
            above = b_size >= c.BORDERS[i]
        b_code += above.to(tl.int32)
    if c.DTYPE == "mxfp4":
        b_code += tl.where(b_y < 0, 8, 0)
    return b_code


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
def rows_of(p, o_t, m_t, t, n, c):
    """Rows o_t of x from p on, float32, turned by their positions."""
    o_d, m = tl.arange(0, c.WIDE), m_t[:, None] & (tl.arange(0, c.WIDE) < c.D)[None, :]
    p = p + o_t[:, None].to(tl.int64) * t.x.s
    b_x = tl.load(p + o_d[None, :] * t.x.d, mask=m, other=0.0).to(tl.float32)
    if t.cos is not None:
        b_x = turned(b_x, p, o_t, m, t, n, c)
    return b_x


@triton.jit
def group_of(i_g, i_h, o_n, t, n, c):
    """The values of a group, its live tokens, and its slot; keeps the new ones beside those from before."""
    p_g, o_d = t.groups + i_g * 6, tl.arange(0, c.WIDE)
    first, tail = tl.load(p_g + 2), tl.load(p_g + 4)
    m_live, m_d = o_n < tl.load(p_g + 1), (o_d < c.D)[None, :]
    m_new, m_old = m_live & (o_n >= first), m_live & (o_n < first)
    b_x = rows_of(t.x.p + i_h * t.x.h, tl.load(p_g) + o_n - first, m_new, t, n, c)
    o_t = (tl.load(t.layer) * c.TOKENS + o_n) * n.num_heads + i_h
    p = tail.to(t.x.p.dtype) + o_t[:, None] * c.D + o_d[None, :]
    tl.store(p, b_x.to(t.x.p.dtype.element_ty), mask=(m_new & (tail != 0))[:, None] & m_d)
    b_old = tl.load(p, mask=m_old[:, None] & m_d, other=0.0).to(tl.float32)
    return tl.where(m_old[:, None], b_old, b_x), m_live, tl.load(p_g + 3)


@triton.jit
def encode_block(t, n, c):
    """One program per block of tokens of a head."""
    i_t, i_bh = tl.program_id(0) % n.blocks, tl.program_id(0) // n.blocks
    i_h, i_b = tl.cast(i_bh % n.num_heads, tl.int64), tl.cast(i_bh // n.num_heads, tl.int64)
    o_n = tl.arange(0, c.TILE)
    o_t, o_d = i_t * c.TOKENS + o_n, tl.arange(0, c.WIDE)
    m_t, m_d = o_n < c.TOKENS, o_d < c.D
    x, codes = t.x, t.codes
    if t.groups is not None:
        b_x, m_live, slot = group_of(i_b, i_h, o_n, t, n, c)
        i_b, i_t = slot // n.page_size, slot % n.page_size
        o_t = i_t * c.TOKENS + o_n
    else:
        m_t = m_t & (o_t < n.seqlen)
        b_x, m_live = rows_of(x.p + i_b * x.b + i_h * x.h, o_t, m_t, t, n, c), m_t
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
        if c.NARROW:
            shift = lo + (hi - lo) * 0.5 + rounded_up(scale) * 0.5
            shift = shift.to(tl.bfloat16).to(tl.float32)
            below = tl.math.div_rn(shift - lo, tl.full(hi.shape, MIDDLE + 0.5, tl.float32))
            above = tl.math.div_rn(hi - shift, tl.full(hi.shape, MIDDLE - 0.5, tl.float32))
            scale = tl.where(below > scale, below, scale)
            scale = rounded_up(tl.where(above > scale, above, scale))
            b_y = tl.math.div_rn(b_x - spread(shift, c), spread(scale, c))
            b_y = tl.where(b_y == b_y, b_y, 0.0) + 0.5
            b_size = (tl.minimum(tl.maximum(tl.abs(b_y) - 0.5, 0.0), MIDDLE - 1.0) + _MAGIC) - _MAGIC
            b_y = tl.where(b_y < 0, -1.0 - b_size, b_size)
        else:
            shift = lo + scale * MIDDLE + scale * 0.125
            b_y = tl.math.div_rn(b_x - spread(lo, c), spread(scale, c)) - 0.125
            b_y = tl.minimum(tl.maximum(tl.where(b_y == b_y, b_y, 0.0), 0.0), c.MOST * 1.0)
            b_y = (b_y + _MAGIC) - _MAGIC - MIDDLE
        store_table(t.shift, shift, i_b, i_h, i_t, o_s, m_t, c)
    else:
        scale = greatest(tl.abs(b_x), c)
        if c.DTYPE == "mxfp4":  # without its mantissa
            scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 0.25
        else:
            scale = tl.math.div_rn(scale, tl.full(scale.shape, c.MOST, tl.float32))
        if c.NARROW:
            scale = rounded_up(scale)
        scale = tl.where(odd, float("nan"), scale)
        b_y = tl.math.div_rn(b_x, spread(scale, c))
        b_y = tl.where(b_y == b_y, b_y, 0.0)
        if c.DTYPE == "int8":
            b_y = (tl.minimum(tl.maximum(b_y, -128.0), 127.0) + _MAGIC) - _MAGIC
        elif c.DTYPE == "int4":
            b_y = (tl.minimum(tl.maximum(b_y, -8.0), 7.0) + _MAGIC) - _MAGIC
        elif c.PACKED == 1:
            b_y = rounded(tl.minimum(tl.maximum(b_y, -c.MOST), c.MOST), c)
    store_table(t.scale, scale, i_b, i_h, i_t, o_s, m_t, c)
    b_y = tl.where(m_x, b_y, 0.0)
    p = (codes.p + i_h * codes.h + i_b * codes.b + o_s * codes.s)[:, None]
    if c.PACKED == 2:
        b_codes = b_y.to(tl.int32) + 8 if c.DTYPE == "int4" else nearest(b_y, c)
        even, uneven = tl.split(tl.reshape(b_codes, c.TILE, c.WIDE // 2, 2))
        o_d = tl.arange(0, c.WIDE // 2)
        b_codes = (even | (uneven << 4)).to(tl.uint8)
        tl.store(p + o_d[None, :] * codes.d, b_codes, mask=m_t[:, None] & (o_d * 2 < c.D)[None, :])
    else:
        b_codes = b_y.to(codes.p.dtype.element_ty)
        tl.store(p + o_d[None, :] * codes.d, b_codes, mask=m_t[:, None] & m_d[None, :])


@triton.jit
def turn_block(t, n, c):
    """One program per block of rows of a head, which are turned by their positions."""
    i_t, i_h = tl.program_id(0) % n.blocks, tl.cast(tl.program_id(0) // n.blocks, tl.int64)
    o_t, o_d = i_t * c.TOKENS + tl.arange(0, c.TILE), tl.arange(0, c.WIDE)
    b_x = rows_of(t.x.p + i_h * t.x.h, o_t, o_t < n.seqlen, t, n, c).to(t.codes.p.dtype.element_ty)
    p = t.codes.p + i_h * t.codes.h + o_t[:, None].to(tl.int64) * t.codes.s
    tl.store(p + o_d[None, :], b_x, mask=(o_t < n.seqlen)[:, None] & (o_d < c.D)[None, :])


_kernels = runtime.Kernels()
_turns, _writes = replay.Calls(), replay.Calls()


def encode(
    x: Tensor, mean: Tensor | None, scheme: Scheme, lens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes, scale and shift of x (batch, heads, seqlen, head_dim) as `codec.encode` gives them, which took
    the mean of a smoothed scheme, of rotated values; None of a scheme that has no kernel."""
    batch, heads, seqlen, head_dim = x.shape
    c = constants(scheme, x.dtype, head_dim)
    if c is None or not x.numel() or not is_readable(x):
        return None
    form = scheme.codes
    tables = (batch, heads, *form.scale.counts(seqlen, head_dim))
    stored = getattr(torch, KINDS[scheme.dtype].storage)
    codes = x.new_empty((*x.shape[:3], head_dim // form.packed), dtype=stored)
    scale = x.new_empty(tables, dtype=codec.table_dtype(form))
    shift = None if scheme.symmetric else torch.empty_like(scale)
    if lens is not None:
        lens = lens.to(x.device, torch.int32).contiguous()
    t = Tensors(view_of(x), view_of(codes), view_of(scale), view_of(shift), view_of(mean), lens)
    _launch(encode_block, t, Numbers(heads, seqlen, -(-seqlen // c.TOKENS)), c, batch)
    return codes, scale, mean if shift is None else shift


Factors = tuple[torch.Tensor, torch.Tensor, bool]  # cosines, sines, and whether pairs are neighbours


def turn(x: Tensor, factors: Factors) -> Tensor:
    """x (total, heads, head_dim) turned by factors that are not empty, float32 (total, rotary_dim / 2)."""
    (total, heads, head_dim), (cos, sin, neighbours) = x.shape, factors
    wide = triton.next_power_of_2(max(head_dim, 2))

    def make() -> tuple[Tensor]:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        t = Tensors(_tokens_of(x), _tokens_of(out), None, None, None, None, cos=cos, sin=sin)
        n = Numbers(heads, total, -(-total // _TOKENS), half=cos.shape[1])
        c = Constants(D=head_dim, WIDE=wide, CHANNELS=wide, NEIGHBOURS=neighbours)
        _launch(turn_block, t, n, c, 1)
        return (out,)

    return _turns((x, cos, sin), (x.dtype, x.device.index, neighbours), make)[0]  # type: ignore[no-any-return]


def write(x: Tensor, cache: QuantizedTensor, slots: Tensor, factors: Factors | None) -> bool:
    """Codes tokens x (total, heads, head_dim) in `slots`, int64 (total,), -1 for nowhere, of pages of codes
    by a scheme per token; False of a scheme that has no kernel. x is turned by `factors` first, float32
    (total, rotary_dim / 2)."""
    if not writes(cache.scheme, x.dtype, x.shape[2]) or cache.scheme.codes.scale.tokens != 1:
        return False
    if x.numel():
        Writes(x, cache, factors)(x, cache, factors, slots.contiguous())
    return True


def writes(scheme: Scheme, dtype: torch.dtype, head_dim: int) -> bool:
    """Does a kernel code such values in pages?"""
    return scheme.smoothing == "none" and constants(scheme, dtype, head_dim) is not None


class Writes:
    """Writes of new tokens x (total, heads, head_dim) to pages of codes by a scheme that it `writes`. Those
    of a step's layers differ in addresses alone, and are laid out once."""

    def __init__(
        self, x: Tensor, cache: QuantizedTensor, factors: Factors | None, groups: int | None = None
    ) -> None:
        """`groups`: how many, if tokens share scales."""
        total, heads, head_dim = x.shape
        c: Any = constants(cache.scheme, x.dtype, head_dim)
        cos, _, neighbours = (None, None, False) if factors is None else factors
        half, slots = 0 if cos is None else cos.shape[1], cache.codes.shape[2]
        blocks, page_size = (-(-total // c.TOKENS), slots) if groups is None else (1, slots // c.TOKENS)
        self._c, self._n = c._replace(NEIGHBOURS=neighbours), Numbers(heads, total, blocks, page_size, half)
        self._batch, self._form = 1 if groups is None else groups, (half, neighbours)
        self._kind = *x.shape, *x.stride(), x.dtype, groups
        tables = [y if y is None else y.stride() for y in (cache.scale, cache.shift)]
        place = x.device.index, cache.codes.shape, cache.codes.stride(), *tables
        self._key = self._c, self._n, *self._kind, *place

    def serves(self, x: Tensor, factors: Factors | None, groups: int | None) -> bool:
        """Does this write such values to other layers of the same pages, too?"""
        form = (0, False) if factors is None else (factors[0].shape[1], factors[2])
        return (*x.shape, *x.stride(), x.dtype, groups) == self._kind and form == self._form

    def __call__(self, x: Tensor, cache: QuantizedTensor, factors: Factors | None, *places: Tensor) -> None:
        """Codes x, turned by `factors` as in `write`, in slots, or in `Tensors.groups` of a `layer`."""
        cos, sin, _ = factors if self._n.half else (None, None, False)  # type: ignore[misc]
        given = x, cache.codes, cache.scale, cache.shift, cos, sin, *places

        def make() -> tuple[()]:
            codes, scale, shift = map(view_of, given[1:4])
            at: Any = dict(zip(("at",) if len(places) == 1 else ("groups", "layer"), places, strict=True))
            t = Tensors(_tokens_of(x), codes, scale, shift, None, None, cos=cos, sin=sin, **at)
            _launch(encode_block, t, self._n, self._c, self._batch)
            return ()

        _writes.by(self._key, given, make)


def _tokens_of(x: Tensor) -> View:
    token, head, channel = x.stride()
    return View(x, 0, head, token, channel)


@lru_cache(maxsize=256)
def constants(scheme: Scheme, dtype: torch.dtype, head_dim: int) -> Constants | None:
    """How the kernel codes such values, if it does."""
    kind, form = KINDS[scheme.dtype], scheme.codes
    grouped, wide = form.scale.channels == 1, triton.next_power_of_2(max(head_dim, 2))
    tokens = form.scale.tokens if grouped else _TOKENS
    channels = form.scale.channels or wide
    fits = 1 < tokens <= _MOST_TOKENS if grouped else form.scale.tokens == 1
    fits = fits and channels & (channels - 1) == 0 and channels <= wide <= _MOST_CHANNELS
    if not fits or dtype is torch.float64 or scheme.smoothing == "block_mean":
        return None
    steps = not scheme.symmetric
    tile, most = triton.next_power_of_2(tokens), kind.levels if steps else kind.most
    borders, packed = BORDERS.get(scheme.dtype, ()), form.packed
    c = Constants(scheme.dtype, packed, most, steps, borders, tokens, tile, grouped, head_dim, wide, channels)
    c = c._replace(NARROW=scheme.tables != "float32")
    if scheme.rotated_in_pass:
        size = head_dim & -head_dim
        c = c._replace(TURNS=size.bit_length() - 1, FACTOR=size**-0.5)
    return c


_compiled_in = lru_cache(maxsize=256)(runtime.compiled_in)
_kinds = lru_cache(maxsize=1024)(runtime.signature)


def _launch(kernel: Any, t: Tensors, n: Numbers, c: Constants, batch: int) -> None:
    options: dict[str, Any] = {"num_warps": 4}
    if c.TURNS or t.cos is not None:  # their products are rounded before what follows
        options["enable_fp_fusion"] = False
    views, others = [x for x in t[:5] if x is not None], t[5:-1]
    strides = [x if x is None else _kinds(x[1:]) for x in t[:5]]
    bits = runtime.aligned(*[x.p for x in views], *others)
    key = kernel, c, t.x.p.dtype, bits, *strides, *[x is None for x in others]
    arguments = t, n, _compiled_in(c)
    _kernels.launch(kernel, (batch * n.num_heads * n.blocks,), arguments, options, key, t.x.p.device)
