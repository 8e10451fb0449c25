"""Tensors whose data stay on the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polyflash.backends.webgpu import device as devices
from polyflash.backends.webgpu.configs import fours
from polyflash.errors import described, spec_error

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.webgpu.device import Block, Device

# dtype -> bytes of an element, and what numpy sees of it (bfloat16 it does not know)
DTYPES = {
    torch.float32: (4, np.float32),
    torch.float16: (2, np.float16),
    torch.bfloat16: (2, np.int16),
}


class GpuTensor:
    """A dense tensor on the WebGPU device. Of 4-dimensional ones, (batch, heads, seqlen, channels), rows are
    padded with zeros to a multiple of four channels; `shape` does not count those."""

    __slots__ = ("block", "dtype", "shape")

    def __init__(self, block: Block, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.block, self.shape, self.dtype = block, tuple(shape), dtype

    def __repr__(self) -> str:
        return f"GpuTensor(shape={self.shape}, dtype={self.dtype}, device={self.device.name!r})"

    @property
    def device(self) -> Device:
        return self.block.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return nbytes_of(self.shape, self.dtype)

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> GpuTensor:
        """Room for a tensor, of any content. SpecError if the dtype is none of float32, float16, bfloat16."""
        if dtype not in DTYPES:
            wanted = "float32, float16 or bfloat16"
            raise spec_error("dtype", str(dtype).removeprefix("torch."), wanted, "Use x.float().")
        return cls(devices.current().empty(nbytes_of(shape, dtype)), shape, dtype)

    @classmethod
    def of(cls, x: Any) -> GpuTensor:
        """A copy of a CPU tensor of torch, or a numpy array, on the device. Waits for nothing."""
        if isinstance(x, np.ndarray):
            x = torch.from_numpy(np.ascontiguousarray(x))
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            got = str(x.device) if isinstance(x, torch.Tensor) else described(x)
            raise spec_error("x", got, "a CPU tensor or a numpy array", "Use x.cpu().")
        tensor = cls.empty(tuple(x.shape), x.dtype)
        tensor.device.write(tensor.block, array_of(x))
        return tensor

    def like(self) -> tuple[Tensor, None, None]:
        """A tensor without memory, of this shape and dtype, and that it has no scales and no shifts."""
        return unstored(self.shape, self.dtype), None, None

    def torch(self) -> Tensor:
        """A CPU tensor with this one's data. Waits until it is there."""
        result = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.copy_to(result)
        return result

    def numpy(self) -> np.ndarray:
        """A numpy array with this tensor's data, float32 for bfloat16. Waits until it is there."""
        x = self.torch()
        return (x.float() if self.dtype is torch.bfloat16 else x).numpy()

    def copy_to(self, out: Tensor) -> None:
        """Fills a CPU tensor of this shape and dtype."""
        if not math.prod(self.shape):
            return
        size, kind = DTYPES[self.dtype]
        if out.is_contiguous() and self.nbytes == math.prod(self.shape) * size:
            place = (out.view(torch.int16) if self.dtype is torch.bfloat16 else out).detach().numpy()
            self.device.read(self.block, place.reshape(-1).view(np.uint8))
            return
        data = self.device.read(self.block).view(kind).reshape(padded(self.shape))
        whole = torch.from_numpy(data)
        whole = whole.view(torch.bfloat16) if self.dtype is torch.bfloat16 else whole
        out.copy_(whole[..., : self.shape[-1]])

    def write_rows(self, start: int, rows: Any, page: int | None = None) -> None:
        """Writes rows [start, start + n) of every head from a CPU tensor (batch, heads, n, channels), as a
        cache of keys grows; with `page` those of that batch entry alone, from (1, heads, n, channels). Calls
        made before see the old ones. SpecError if they do not fit."""
        pages, heads, seqlen, channels = self.shape
        first, batch = (0, pages) if page is None else (page, 1)
        fits = rows.ndim == 4 and (*rows.shape[:2], rows.shape[3]) == (batch, heads, channels)
        if not fits or not (0 <= start <= seqlen - rows.shape[2] and 0 <= first <= pages - batch):
            wanted = f"({batch}, {heads}, n, {channels}) within {seqlen} rows of {pages} entries"
            got = f"{tuple(rows.shape)} at {start}" + (f" of page {page}" if page is not None else "")
            raise spec_error("rows", got, wanted, "Make a larger tensor.")
        device, per_row = self.device, fours(channels) * 4 * DTYPES[self.dtype][0]
        data = array_of(rows.to(self.dtype)).reshape(batch * heads, -1)
        with device.lock:
            device.flush()
            for i, part in enumerate(data, first * heads):
                at = self.block.offset + (i * seqlen + start) * per_row
                device.put(self.block.buffer, at, part)


def unstored(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A CPU tensor of any shape in the memory of one element."""
    return torch.empty((1,), dtype=dtype, device="cpu").expand(shape)


def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:3], 4 * fours(shape[3])) if len(shape) == 4 else shape


def nbytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(padded(shape)) * dtype.itemsize


def array_of(x: Tensor) -> np.ndarray:
    """A contiguous array of a tensor's padded rows."""
    x = x.detach()
    x = x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # codes
    if tuple(x.shape) != padded(tuple(x.shape)):
        x = torch.nn.functional.pad(x, (0, -x.shape[3] % 4))
    x = x.contiguous()
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()
