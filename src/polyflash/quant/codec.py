"""The codec of every scheme in torch operations, on any device: codes of a kernel equal these bit for bit.

    symmetric    scale = max|x| / most                  code = round(x / scale)
    affine       scale = (max - min) / (levels + 1/4)   code = round((x - min) / scale - 1/8) - ⌈levels / 2⌉
                 shift = min + ⌈levels / 2⌉·scale + scale / 8
    float        scale = max|x| / most                  code = x / scale in the small dtype, saturated
    nf4          scale = max|x|                         code = the nearest of 16 values, of two the lower
    mxfp4        scale = 2^(⌊log₂ max|x|⌋ - 2), normal  code = the nearest of 15 values, ties to even codes

With tables of bfloat16 a scale is rounded up to it before codes are made, and that of an affine scheme is no
less than what keeps all values within half a step of a code by the shift that is stored:

    affine       scale as above, rounded up      shift = min + (max - min) / 2 + scale / 2, to nearest
                 or the greater of (shift - min) / (half + 1/2) and (max - shift) / (half - 1/2), if that is
                 greater, rounded up             half = ⌈levels / 2⌉
                 y = (x - shift) / scale + 1/2   code = round(|y| - 1/2), of y < 0 its complement

Borders between codes then often are values of 16 bits: rounded alike on both sides of the middle of the
range, errors have no mean that a sum over many keys would keep.

The ends of an affine range lie an eighth of a step beyond the outermost codes: no error grows beyond half a
step, and steps are smaller. All arithmetic is float32, divisions are divisions, rounding is to nearest even.
A block of zeros, or of one value that its tables hold, has scale 0 and loses nothing. What is not finite
makes its block NaN, and so does an affine range, or a scale, that its tables do not hold.

Sources: Liu et al., KIVI (2024): K per channel, V per token; Zhang et al., SageAttention (2024): smoothing;
Ashkboos et al., QuaRot (2024): rotation."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from polyflash.errors import spec_error
from polyflash.quant.scheme import KINDS, SMOOTHED_TOKENS, TABLES, Block, Codes, Scheme

# The same in one pass, by device type.
_KERNELS = {"cuda": "polyflash.backends.triton.quantize", "cpu": "polyflash.backends.cpu.quantize"}
_loaded = cache(import_module)  # which looks up slowly
_CHUNK = 1 << 22  # elements that are decoded at a time
_MANY = 1 << 18  # codes, from which on a kernel that may have to be compiled is worth it on a CPU
_INF = float("inf")


def encode(x: Tensor, scheme: Scheme, lens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scale and shift of x (batch, heads, seqlen, head_dim), float.

    Codes have x's shape, those of 4 bits half its head_dim; scale and shift are (batch, heads, blocks of
    tokens, blocks of channels) in the dtype of the scheme's tables, means float32. `lens` (batch,) are the
    live tokens: what lies beyond enters no scale and no mean, and gets code 0 of int8 or its like."""
    kind, codes, tables = KINDS[scheme.dtype], scheme.codes, table_dtype(scheme.codes)
    narrow = tables is not torch.float32
    x = x.detach()
    if x.shape[3] % codes.packed:
        change = "Codes of 4 bits lie in pairs of channels: pad to an even head_dim, or use 8 bits."
        raise spec_error("head_dim", x.shape[3], "an even number", change)
    if scheme.rotation != "none" and not scheme.rotated_in_pass:
        x = rotate(x.float())
    dead = None
    if lens is not None:
        alive = torch.arange(x.shape[2], device=x.device) < lens.to(x.device).view(-1, 1)
        dead = ~alive[:, None, :, None]
    mean = None if scheme.smoothing == "none" else _mean(x.float(), scheme.smoothing, dead)
    kernels = None if torch.compiler.is_compiling() else one_pass(x.device.type)
    if kernels is not None:
        made = kernels.encode(x, mean, scheme, lens)
        if made is not None:
            return made  # type: ignore[no-any-return]
    if scheme.rotated_in_pass:
        x = rotate(x.float())
    x = x.float() if dead is None else x.float().masked_fill(dead, 0.0)
    if mean is not None:
        x = x - spread(mean, codes.shift, x.shape)
        if dead is not None:
            x = x.masked_fill(dead, 0.0)
    if not scheme.symmetric:
        lo, hi = _extremes(x, codes.scale, dead)
        middle = (kind.levels + 1) // 2
        scale = _divided(hi - lo, kind.levels + 0.25)
        if narrow:
            shift = (lo + (hi - lo) / 2 + _rounded_up(scale) / 2).bfloat16().float()
            for least in (_divided(shift - lo, middle + 0.5), _divided(hi - shift, middle - 0.5)):
                scale = torch.where(least > scale, least, scale)
            scale = _rounded_up(scale)
            steps = (x - spread(shift, codes.scale, x.shape)) / spread(scale, codes.scale, x.shape)
            y = torch.nan_to_num(steps) + 0.5
            size = (y.abs() - 0.5).round().clamp(0, middle - 1)
            code = torch.where(y < 0, -1 - size, size)
        else:
            shift = lo + middle * scale + scale / 8
            steps = (x - spread(lo, codes.scale, x.shape)) / spread(scale, codes.scale, x.shape) - 0.125
            code = torch.nan_to_num(steps).round().clamp(0, kind.levels) - middle
        return _stored(code, scheme.dtype, dead), scale.to(tables), shift.to(tables)
    lo, hi = _extremes(x, codes.scale, dead)
    most = torch.maximum(hi, -lo)
    if scheme.granularity == "tensor":
        most = most.amax().expand_as(most) if most.numel() else most
    if scheme.dtype == "mxfp4":
        power = (most.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)  # without a mantissa
        scale = torch.where(most.isnan(), most, power / 4)
    else:
        scale = _divided(most, kind.most)
    scale = _rounded_up(scale) if narrow else scale
    units = torch.nan_to_num(x / spread(scale, codes.scale, x.shape))
    return _stored(units, scheme.dtype, dead), scale.to(tables), mean


def table_dtype(codes: Codes) -> torch.dtype:
    """The dtype of scales and shifts."""
    return getattr(torch, codes.tables)  # type: ignore[no-any-return]


def _rounded_up(x: Tensor) -> Tensor:
    """The least bfloat16 that is no less, of what is positive."""
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isnan(), x, ((bits + 0xFFFF) & -0x10000).view(torch.float32))


def _divided(x: Tensor, number: float) -> Tensor:
    """A division: by a number that is no tensor a GPU multiplies with its inverse."""
    return x / x.new_full((), number)


def one_pass(device: str) -> Any:
    """The module that quantises in one pass on devices of this type, or None."""
    return _loaded(_KERNELS[device]) if device in _KERNELS else None


def decode(
    code: Tensor, scale: Tensor, shift: Tensor | None, codes: Codes, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values (batch, heads, seqlen, head_dim) that codes stand for, in `dtype`; decoded head by head
    where that saves memory. float64 is decoded in float64."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    batch, heads, tokens, stored = code.shape
    channels = stored * codes.packed

    def values(*some: slice) -> Tensor:
        x = _values(code[some], codes.dtype, wide)
        x = x * spread(scale[some].to(wide), codes.scale, x.shape)
        if shift is not None and codes.shift is not None:
            x += spread(shift[some].to(wide), codes.shift, x.shape)
        return x

    if "Vmap" in transforms():  # which writes into nothing that it does not map
        return values(slice(None)).to(dtype)
    if code.device.type == "cpu" and code.numel() >= _MANY and not torch.compiler.is_compiling():
        kernels = one_pass("cpu")
        made = kernels and kernels.decode(code, scale, shift, codes, dtype)
        if made is not None:
            return made  # type: ignore[no-any-return]
    out = torch.empty((batch, heads, tokens, channels), dtype=dtype, device=code.device)
    step = max(1, _CHUNK // max(1, tokens * channels))  # heads at a time, of one entry or of several
    entries = max(1, step // max(1, heads))
    for b, h in product(range(0, batch, entries), range(0, heads, step)):
        part = slice(b, b + entries), slice(h, h + step)
        if codes.dtype == "int8" and shift is None and wide is not dtype:  # in one pass, rounded once too
            torch.mul(code[part], spread(scale[part].to(wide), codes.scale, code.shape), out=out[part])
        else:
            out[part] = values(*part)
    return out


def transforms() -> str:
    """The transforms of torch.func that what is called is in, from the outermost on: Grad, Vmap, Jvp, …"""
    return " ".join(level.key().name for level in torch._C._functorch.get_interpreter_stack() or ())


# What torch.compiler.assume_constant_result does, which imports Dynamo.
transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def spread(table: Tensor, block: Block | None, shape: Any) -> Tensor:
    """One entry of `table` per block, as one per element of `shape`; broadcastable."""
    for dim, step in ((2, block.tokens), (3, block.channels)) if block is not None else ():
        if step > 1:
            table = table.repeat_interleave(step, dim).narrow(dim, 0, shape[dim])
    return table


def _extremes(x: Tensor, block: Block, dead: Tensor | None) -> tuple[Tensor, Tensor]:
    """Least and greatest live value of every block; 0 of a block without one."""
    lo = hi = x
    if dead is not None:
        lo, hi = x.masked_fill(dead, _INF), x.masked_fill(dead, -_INF)
    lo, hi = _reduced(lo, block, _INF, "amin"), _reduced(hi, block, -_INF, "amax")
    if dead is None:
        return lo, hi
    empty = lo > hi
    return lo.masked_fill(empty, 0.0), hi.masked_fill(empty, 0.0)


def _reduced(x: Tensor, block: Block, pad: float, how: str) -> Tensor:
    """`how` ("amin", "amax" or "sum") over every block of x."""
    for dim, step in ((2, block.tokens), (3, block.channels)):
        size = x.shape[dim]
        if step == 1 or size == 0:
            continue
        step = step or size
        if size % step:
            room = (0, 0) * (3 - dim) + (0, step - size % step)
            x = torch.nn.functional.pad(x, room, value=pad)
        x = getattr(x.unflatten(dim, (-1, step)), how)(dim + 1)
    return x


def _mean(x: Tensor, smoothing: str, dead: Tensor | None) -> Tensor:
    """The mean of the live tokens of every channel, or of every 64 tokens of it."""
    block = Block(0 if smoothing == "mean" else SMOOTHED_TOKENS, 1)
    if dead is not None:
        x = x.masked_fill(dead, 0.0)
    live = torch.ones_like(x[..., :1]) if dead is None else (~dead).expand(*x.shape[:3], 1).float()
    return _reduced(x, block, 0.0, "sum") / _reduced(live, block, 0.0, "sum").clamp(min=1)


def _stored(units: Tensor, dtype: str, dead: Tensor | None) -> Tensor:
    """Values in units of their scale as codes."""
    kind = KINDS[dtype]
    if dead is not None:
        units = units.masked_fill(dead, 0.0)
    if dtype == "int8":
        return units.round().clamp(-128, 127).to(torch.int8)
    if dtype == "int4":
        return _packed(units.round().clamp(-8, 7).to(torch.int16) + 8)
    if kind.bits == 8:
        return units.clamp(-kind.most, kind.most).to(getattr(torch, kind.storage))
    if dtype == "nf4":
        values = torch.tensor(TABLES["nf4"], device=units.device)
        return _packed(torch.bucketize(units.contiguous(), (values[1:] + values[:-1]) / 2))
    top = torch.tensor(TABLES["mxfp4"][:8], device=units.device)
    borders, size = (top[1:] + top[:-1]) / 2, units.abs().contiguous()
    near = torch.bucketize(size, borders)  # of two as near the lower
    tie = (near < 7) & (size == borders[near.clamp(max=6)]) & (near % 2 == 1)
    return _packed(near + tie + 8 * (units < 0))


def _packed(codes: Tensor) -> Tensor:
    """Codes 0 to 15 in pairs, the even channel in the low half."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def _values(code: Tensor, dtype: str, wide: torch.dtype) -> Tensor:
    """The values of codes in units of their scale."""
    if KINDS[dtype].bits == 8:
        return code.to(wide)
    halves = torch.stack((code & 15, code >> 4), -1).flatten(-2)
    if dtype == "int4":
        return halves.to(wide) - 8
    plain = type(code) is Tensor and not torch.compiler.is_compiling()
    return (_table if plain else _table.__wrapped__)(dtype, wide, code.device)[halves.int()]


@cache
def _table(dtype: str, wide: torch.dtype, device: torch.device) -> Tensor:
    """Kept, as a graph that is captured copies nothing from the host."""
    with torch.inference_mode(False):
        return torch.tensor(TABLES[dtype], dtype=wide, device=device)


def rotate(x: Tensor) -> Tensor:
    """x (..., channels) times a normalised Hadamard matrix, block by block of the largest power of two that
    divides the channels. It is its own inverse; products of rotated rows are those of the rows."""
    n, width = x.shape[-1] & -x.shape[-1], 1
    y = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32).unflatten(-1, (-1, n))
    while width < n:
        a, b = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y, width = torch.stack((a + b, a - b), -2).flatten(-3), 2 * width
    return (y * n**-0.5).flatten(-2).to(x.dtype)  # a product: some devices divide by one more rounding
