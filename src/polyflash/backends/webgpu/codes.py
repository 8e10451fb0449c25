"""Quantised keys and values on the device: how `read.wgsl` finds them, as constants and numbers of a call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from polyflash.backends.webgpu import configs
from polyflash.backends.webgpu import device as devices
from polyflash.backends.webgpu.configs import fours
from polyflash.backends.webgpu.tensor import GpuTensor, array_of, nbytes_of, unstored
from polyflash.errors import described, spec_error
from polyflash.quant import codec
from polyflash.quant.scheme import KINDS, Block, Codes, codes_of
from polyflash.quant.tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.webgpu.calls import Sizes
    from polyflash.backends.webgpu.device import Device
    from polyflash.spec import Arguments

_MIDDLES = {"int8": 128, "int4": 8}


class GpuCodes:
    """Quantised keys or values (batch, heads, seqlen, channels) on the WebGPU device: k or v of
    `polyflash.webgpu.attention`. `shape` counts channels, also of codes that lie in pairs."""

    __slots__ = ("block", "form", "shape", "stored", "tables")

    def __init__(self, codes: Tensor, scale: Tensor, shift: Tensor | None, form: Codes) -> None:
        on, self.form = devices.current(), form._replace(tables="float32")
        self.stored, self.shape = codes.dtype, (*codes.shape[:3], codes.shape[3] * form.packed)
        self.block = on.empty(nbytes_of(tuple(codes.shape), codes.dtype))
        on.write(self.block, array_of(codes))
        parts = (x for x in (scale, shift) if x is not None)
        self.tables = on.upload(np.concatenate([x.float().contiguous().view(-1).numpy() for x in parts]))

    def __repr__(self) -> str:
        return f"GpuCodes({self.form}, shape={self.shape}, device={self.device.name!r})"

    @classmethod
    def of(cls, x: QuantizedTensor) -> GpuCodes:
        """A copy of a CPU QuantizedTensor on the device. SpecError if it is none, or if its scheme rotates:
        then q and the result have to be rotated too, which calls on CPU tensors do."""
        if not isinstance(x, QuantizedTensor) or x.device.type != "cpu":
            got = str(x.device) if isinstance(x, QuantizedTensor) else described(x)
            raise spec_error("x", got, "a QuantizedTensor on the CPU", "quantize(x, scheme) makes one.")
        if x.scheme.rotation != "none":
            change = "Use a scheme without one, or polyflash.attention(..., backend='webgpu')."
            raise spec_error("x rotation", x.scheme.rotation, "'none'", change)
        return cls(x.codes, x.scale, x.shift, x.form)

    @property
    def device(self) -> Device:
        return self.block.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.block.nbytes + self.tables.nbytes

    def like(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tensors without memory, of the shapes and dtypes of the codes, the scales and the shifts."""
        batch, heads, tokens, channels = self.shape

        def table(block: Block) -> Tensor:
            return unstored((batch, heads, *block.counts(tokens, channels)), torch.float32)

        codes = unstored((batch, heads, tokens, channels // self.form.packed), self.stored)
        shift = None if self.form.shift is None else table(self.form.shift)
        return codes, table(self.form.scale), shift


KV = GpuTensor | GpuCodes


def held_on_device(k: Tensor, v: Tensor, args: Arguments) -> tuple[KV, KV]:
    """k and v of a call on CPU tensors, either of which may be codes."""
    of_k, of_v = codes_of(args.codes) if args.codes else (None, None)
    return _held(k, of_k, args.k_scale, args.k_shift), _held(v, of_v, args.v_scale, args.v_shift)


def _held(x: Tensor, form: Codes | None, scale: Tensor | None, shift: Tensor | None) -> KV:
    return GpuTensor.of(x) if form is None or scale is None else GpuCodes(x, scale, shift, form)


def without_tables(args: Arguments) -> Arguments:
    """The arguments of a call whose tables lie beside its codes."""
    return args._replace(k_scale=None, k_shift=None, v_scale=None, v_shift=None) if args.codes else args


def constants_of(sizes: Sizes, text: str) -> dict[str, int]:
    """Constants of a kernel that reads `codes`, the op's text."""
    found: dict[str, int] = {"PRODUCTS": int(configs.multiplies(text, sizes.page_size))}
    for side, codes, dim in _sides(sizes, text):
        if codes is None:
            continue
        bits, middle = KINDS[codes.dtype].bits, _MIDDLES.get(codes.dtype, 0)
        own = {"CODES": 1, "FOUR_BITS": int(bits == 4), "MIDDLE": middle, "TABLED": int(not middle)}
        own |= {"WORDS": -(-fours(dim) * bits // 8), "DIM": dim, "RAGGED": int(dim % 4 != 0)}
        for name, block in (("SCALE", codes.scale), ("SHIFT", codes.shift)):
            if block is not None:
                own |= {name: 1, f"{name}_TOKENS": block.tokens, f"{name}_CHANNELS": block.channels}
                own |= {f"{name}_WIDTH": block.counts(1, dim)[1]}
                own |= {f"{name}_SHARED": int(block.channels % 4 == 0)}
        found |= {f"{side.upper()}_{name}": value for name, value in own.items()}
    return found


def numbers_of(sizes: Sizes, text: str) -> dict[str, int]:
    """Numbers of such a kernel: the places of shifts, which lie behind the scales."""
    found: dict[str, int] = {}
    for side, codes, dim in _sides(sizes, text):
        if codes is not None and codes.shift is not None:
            heads = (sizes.num_pages or sizes.batch) * sizes.num_kv_heads
            blocks = codes.scale.counts(sizes.page_size or sizes.seqlen_k, dim)
            found[f"{side}_shift"] = heads * math.prod(blocks)
    return found


def values_of(text: str) -> dict[str, np.ndarray]:
    """The value of each code, of those that are no integers."""
    found: dict[str, np.ndarray] = {}
    for side, codes in zip("kv", codes_of(text), strict=True):
        if codes is not None and codes.dtype not in _MIDDLES:
            bits = KINDS[codes.dtype].bits
            code = torch.arange(256 if bits == 8 else 16, dtype=torch.uint8).view(1, 1, -1, 1)
            code = code.view(getattr(torch, KINDS[codes.dtype].storage))
            form = Codes(codes.dtype, Block())
            values = codec.decode(code, torch.ones(1, 1, 1, 1), None, form)
            found[f"{side}_values"] = values[..., 0].contiguous().view(-1).numpy()
    return found


def _sides(sizes: Sizes, text: str) -> tuple[tuple[str, Codes | None, int], ...]:
    k, v = codes_of(text)
    return ("k", k, sizes.head_dim), ("v", v, sizes.head_dim_v)
