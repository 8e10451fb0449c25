"""The codec's schemes on the CPU in one pass: values are read where they lie and leave as codes, scales and
shifts, bit for bit those of quant/codec.py.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyflash import target
from polyflash.backends.cpu import arguments, pool, quantize_configs, runtime
from polyflash.backends.cpu.configs import STORAGE_BYTES
from polyflash.backends.cpu.decode_codes_configs import MOST_CHANNELS
from polyflash.backends.cpu.quantize_configs import RotateKey, ValuesKey
from polyflash.backends.cpu.words import Group, Quantize, Values
from polyflash.errors import UnsupportedError
from polyflash.quant import codec
from polyflash.quant.scheme import KINDS, Codes, Scheme
from polyflash.storages import empty_of_keys, is_readable, near

VALUES_PER_US = 1500  # that one core makes codes of: what the thread decision assumes
PART_VALUES = 1 << 13  # of a unit, about
UNITS_PER_THREAD = 8  # at least, before an item takes several
BASES = Quantize._fields[:5]  # what `launch` fills in
_ZERO = {"int4": 0x88, "nf4": 0x77}  # bytes of codes that stand for 0
# Bytes between heads, tokens and blocks of tokens, of values, of codes (groups, heads, tokens, bytes) and of
# tables (groups, heads, blocks of tokens, blocks of channels).
Strides = namedtuple("Strides", "x_head x_token codes_head codes_token table_head table_block")


@lru_cache(maxsize=256)
def kernel_for(scheme: Scheme, dtype: torch.dtype) -> int:
    """Address of the quantiser of values of `dtype`; 0 if the codec alone has the scheme, or no compiler of
    this machine imports: bits are the same."""
    key = quantize_configs.key_for(scheme, str(dtype).removeprefix("torch."), target.detect("cpu"))
    return 0 if key is None else _address(key)


def _address(key: runtime.Key) -> int:
    try:
        return runtime.load(key)
    except UnsupportedError:
        return 0


def encode(
    x: Tensor, mean: Tensor | None, scheme: Scheme, lens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes, scale and shift of x (batch, heads, seqlen, head_dim) as `codec.encode` gives them, which took
    the mean of a smoothed scheme; None of what has no kernel."""
    x = x.float() if x.dtype is torch.float64 else x
    kernel = kernel_for(scheme, x.dtype) if x.numel() and x.is_cpu and is_readable(x) else 0
    if not kernel:
        return None
    form = scheme.codes
    batch, heads, seqlen, head_dim = x.shape
    x = near(x if x.stride(3) == 1 or head_dim == 1 else x.contiguous())
    codes = empty_of_keys((*x.shape[:3], head_dim // form.packed), torch.uint8, x.device)
    entries = batch, heads, *form.scale.counts(seqlen, head_dim)
    tables = codec.table_dtype(form)
    scale = empty_of_keys(entries, tables, x.device)
    shift = None if scheme.symmetric else empty_of_keys(entries, tables, x.device)
    number = np.arange(batch, dtype=np.int64)
    groups = np.zeros((batch, len(Group._fields)), dtype=np.int64)
    groups[:, 0] = number * x.stride(0) * x.itemsize
    groups[:, 1] = seqlen if lens is None else lens.cpu().numpy().clip(0, seqlen)
    groups[:, 4], groups[:, 5] = number * codes.stride(0), number * scale.stride(0) * tables.itemsize
    means = None if mean is None else mean.contiguous()
    strides = Strides(
        *(x.itemsize * s for s in x.stride()[1:3]),
        *codes.stride()[1:3],
        *(tables.itemsize * s for s in scale.stride()[1:3]),
    )
    mean_at = 0 if means is None else means.data_ptr()
    words, how = prepared(kernel, scheme, groups, x.shape[1:], strides, mean_at)
    launch(words, how, x.data_ptr(), 0, *(y.data_ptr() for y in (codes, scale, shift) if y is not None))
    stored_as = getattr(torch, KINDS[scheme.dtype].storage)
    return codes.view(stored_as), scale, mean if shift is None else shift


@lru_cache(maxsize=256)
def _values_kernel(codes: Codes, head_dim: int, dtype: torch.dtype) -> int:
    """Address of what makes values of `dtype` of such codes; 0 if the codec alone does."""
    storage, here = str(dtype).removeprefix("torch."), target.detect("cpu")
    if storage not in STORAGE_BYTES or head_dim > MOST_CHANNELS or not here.has_package("numba"):
        return 0
    return _address(ValuesKey(here.arch, storage, codes._replace(compute="float"), head_dim))


def decode(
    code: Tensor, scale: Tensor, shift: Tensor | None, codes: Codes, dtype: torch.dtype
) -> Tensor | None:
    """The values of codes as `codec.decode` gives them; None of what has no kernel."""
    batch, heads, tokens, stored = code.shape
    if shift is None or codes.shift is None:
        shift, codes = None, codes._replace(shift=None)
    given = [x for x in (code, scale, shift) if x is not None]
    apart = code.stride(3) == 1 and all(x.stride(3) == 1 or x.shape[3] == 1 for x in given[1:])
    if not (apart and all(x.is_cpu and is_readable(x) for x in given)):
        return None
    head_dim = stored * codes.packed
    kernel = _values_kernel(codes, head_dim, dtype)
    if not kernel:
        return None
    out = empty_of_keys((batch, heads, tokens, head_dim), dtype, code.device)
    strides = [[s * x.element_size() for s in x.stride()[:3]] for x in given] + [[0] * 3]
    part = max(1, PART_VALUES // head_dim)
    parts = -(-tokens // part)
    addresses = [x.data_ptr() for x in given] + [0]
    sizes = addresses[0], out.data_ptr(), *addresses[1:3], heads, tokens, part, parts
    words = array("q", Values(*sizes, *strides[0], *strides[1], *strides[2]))
    work_us = out.numel() // VALUES_PER_US
    wake = work_us >= arguments.WAKE_FROM_US
    pool.run(kernel, words.buffer_info()[0], batch * heads * parts, arguments.threads_for(work_us), 0, wake)
    return out


@lru_cache(maxsize=64)
def _hadamard(channels: int) -> tuple[int, int]:
    """How many channels are rotated together, and the factor of their sums: bits of a float32."""
    size = channels & -channels
    return size, int(np.float32(size**-0.5).view(np.int32))


@lru_cache(maxsize=8)
def _rotation(dtype: torch.dtype) -> Callable[..., None] | None:
    """(rows, their results in float32, how many, channels, channels rotated together, factor), or None."""
    key = RotateKey(target.detect("cpu").arch, str(dtype).removeprefix("torch."))
    address = _address(key)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(address) if address else None


def rotate(x: Tensor) -> Tensor:
    """`codec.rotate` of few rows, of which there are some. They are contiguous, stored and `is_readable`."""
    kernel = _rotation(x.dtype)
    if kernel is None or not x.data_ptr():  # a tensor around another has none
        return codec.rotate(x)
    out, channels = torch.empty_like(x, dtype=torch.float32), x.shape[-1]
    kernel(x.data_ptr(), out.data_ptr(), x.numel() // channels, channels, *_hadamard(channels))
    return out.to(x.dtype)


def prepared(
    kernel: int,
    scheme: Scheme,
    groups: Any,
    sizes: Sequence[int],
    strides: Strides,
    mean: int = 0,
    turn: tuple[int, int, int, bool] = (0, 0, 0, False),
) -> tuple[array[int], tuple[Any, ...]]:
    """All that `launch` takes to quantise `groups`, rows of `Group` (int64 numpy, which the caller keeps), of
    `sizes` = (heads, tokens, channels) each, channels of values side by side. `mean` is the address of
    float32 (groups, heads, channels); `turn` are those of cosines and sines, their columns, and whether pairs
    are neighbours: rotary positions of new values (`Rope.factors`)."""
    heads, tokens, channels = sizes
    shared, count = scheme.codes.scale, len(groups)
    block = shared.tokens or tokens
    part = max(1, PART_VALUES // (block * channels))
    parts = -(-tokens // (block * part))
    total = count * heads * parts
    work_us = int(groups[:, 1].sum()) * heads * channels // VALUES_PER_US
    threads = arguments.threads_for(work_us)
    units = max(1, total // (UNITS_PER_THREAD * threads))
    hadamard, factor = _hadamard(channels)
    turned = block * channels * 4 if scheme.rotated_in_pass else 0
    words = Quantize(
        groups=groups.ctypes.data,
        num_groups=count,
        heads=heads,
        tokens=tokens,
        block=block,
        part=part,
        parts=parts,
        units=units,
        channels=channels,
        shared=shared.channels or channels,
        mean=mean,
        **dict.fromkeys(BASES, 0),
        **strides._asdict(),
        zero=_ZERO.get(scheme.dtype, 0),
        hadamard=hadamard,
        factor=factor,
        cos=turn[0],
        sin=turn[1],
        half=turn[2],
        neighbours=turn[3],
        turned=turned,
    )
    scratch = turned + (block * channels * 4 if turn[0] else 0)
    items, wake = -(-total // units), work_us >= arguments.WAKE_FROM_US
    return array("q", words), (kernel, items, threads, scratch, wake)


def launch(words: array[int], how: tuple[Any, ...], *bases: int) -> None:
    """Quantises what was `prepared`, from and to these addresses: `BASES`, maybe without that of shifts."""
    words[: len(bases)] = array("q", bases)
    pool.run(how[0], words.buffer_info()[0], *how[1:])
