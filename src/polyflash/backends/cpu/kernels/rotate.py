"""Rows times a Hadamard matrix, with the bits of quant/codec.py: queries of a step over rotated keys."""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import intrinsics
from polyflash.backends.cpu.configs import ISAS, STORAGE_BYTES
from polyflash.backends.cpu.quantize_configs import RotateKey
from polyflash.backends.cpu.row_blocks import RowTile


def build(key: RotateKey) -> Any:
    """Compile the rotation: a numba cfunc `void(src, dst, rows, channels, size, factor)`, all int64."""
    from numba import cfunc, types

    from polyflash.backends.cpu.compilers import KERNEL

    stage = intrinsics.stages(key, RowTile(key.storage, ISAS[key.isa].lanes))
    SIZE = STORAGE_BYTES[key.storage]

    @cfunc(types.void(*[types.int64] * 6), error_model="numpy", **KERNEL)
    def rotate(src, dst, rows, channels, size, factor):
        stage.rotate_rows(src, channels * SIZE, dst, rows, channels, size, factor)

    return rotate
