"""How a call fills the words of the backward kernels' argument block that follow those of the forward."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from polyflash.backends.cpu.arguments import FLT_MAX, float_bits, row_strides
from polyflash.backends.cpu.words import Sums

if TYPE_CHECKING:
    from torch import Tensor


def sums(dout: Tensor, dlse: Tensor | None, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> Sums:
    """dq is q-shaped, or (parts, *q.shape)."""
    return Sums._make((
        *(dout.data_ptr(), *row_strides(dout), 0 if dlse is None else dlse.data_ptr()),
        *((0,) * 5 if dq is None else (dq.data_ptr(), *(4 * dq.stride(d) for d in (0, -4, -3, -2)))),
        *((0,) * 4 if dk is None else (dk.data_ptr(), *row_strides(dk))),
        *((0,) * 4 if dv is None else (dv.data_ptr(), *row_strides(dv))),
    ))  # fmt: skip


@lru_cache(maxsize=64)
def gradient_scales(scale: float, dropout_p: float) -> tuple[int, int]:
    """grad_scale and drop_scale; if all is dropped, nothing is left to scale."""
    (signed,) = struct.unpack("<I", struct.pack("<f", max(-FLT_MAX, min(scale, FLT_MAX))))
    return signed, float_bits(1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)
