"""A call of the kernels and its oracle, for tests that look inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyflash.backends.webgpu.calls import sizes_of
from polyflash.backends.webgpu.configs import ROW, TILE, Variant
from polyflash.backends.webgpu.device import Device
from polyflash.backends.webgpu.forward import Plan, launch_forward, prepare
from polyflash.backends.webgpu.tensor import GpuTensor
from polyflash.reference import attention_reference
from polyflash.spec import Arguments

TEMPLATES = {
    "tile": Variant(TILE, 4, 8, 4, 2),
    "tile of 8 lanes": Variant(TILE, 8, 8, 4, 1),
    "tile of subgroups": Variant(TILE, 4, 8, 4, 1, subgroups=True),
    "row": Variant(ROW, 64, rn4=4),
    "4 lanes, 4 rows": Variant(ROW, 64, rm=4, rn4=2, subgroups=True, lanes=4),
    "2 lanes, 4 rows": Variant(ROW, 32, rm=4, rn4=2, subgroups=True, lanes=2),
    "4 lanes, 2 rows": Variant(ROW, 32, rm=2, rn4=4, subgroups=True, lanes=4),
    "tile of 8 rows and keys": Variant(TILE, 4, 4, 8, 2, subgroups=True),
}
GRADIENTS = {
    "row": Variant(ROW, 64, rn4=4),
    "4 lanes, 2 rows": Variant(ROW, 64, rm=2, rn4=2, subgroups=True, lanes=4),
    "2 lanes, 4 rows": Variant(ROW, 32, rm=4, rn4=3, subgroups=True, lanes=2),
    "8 lanes, 8 rows": Variant(ROW, 64, rm=8, rn4=2, subgroups=True, lanes=8),
}


def qkv(
    rows: int = 77,
    keys: int = 131,
    heads: int = 4,
    dims: tuple[int, int] = (64, 48),
    dtype: Any = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q (2, heads, rows, ·), k and v (2, 2, keys, ·)."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, rows, dims[0]), (2, 2, keys, dims[0]), (2, 2, keys, dims[1])
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def attend(
    on: Device, variant: Variant, tensors: tuple[Tensor, ...], args: Arguments, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of one variant, with nothing between."""
    q, k, v = (GpuTensor.of(x) for x in tensors)
    args = args._replace(need_lse=True)
    sizes = sizes_of(q, k, v, args)
    out, lse = launch_forward(q, k, v, prepare(on, sizes, q.dtype, args, plan or Plan(variant)))
    assert lse is not None
    return out.torch(), lse.torch()


def off(got: Tensor, tensors: tuple[Tensor, ...], **options: Any) -> float:
    """The largest error of an output; infinite for a NaN."""
    error = (got.double() - attention_reference(*tensors, **options).out).abs().max()
    return float(error) if bool(error.isfinite()) else float("inf")
