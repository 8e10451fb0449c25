"""The words of the backward kernels' argument block that follow those of `arguments.py`."""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

from polyflash.backends.cpu import arguments as a

if TYPE_CHECKING:
    from torch import Tensor

_next = count(a.T_STAGED + 1).__next__
# Scratch offsets, in the order of backward_configs.BackwardScratch.
T_DO, T_Q_ROWS, T_DO_ROWS, T_OUT_STAGE, T_DP, T_DS, T_DS_PAIRS, T_K_ROWS, T_DK, T_DV, T_FACTOR, T_KEEP = (
    _next() for _ in range(12)
)
DO, DO_BATCH, DO_HEAD, DO_ROW, DLSE = (_next() for _ in range(5))  # dlse has the strides of lse
# float32 sums, rows with unit stride; DQ_PART bytes lie between the partial sums of dQ.
DQ, DQ_PART, DQ_BATCH, DQ_HEAD, DQ_ROW = (_next() for _ in range(5))
DK, DK_BATCH, DK_HEAD, DK_ROW, DV, DV_BATCH, DV_HEAD, DV_ROW = (_next() for _ in range(8))
# float32 sums of the bias gradient; strides of 0 where it broadcasts, a sum per chunk if it has one key; and
# what adds a tile to it.
DBIAS, DBIAS_BATCH, DBIAS_HEAD, DBIAS_ROW, DBIAS_KEY, DBIAS_CHUNK, ADD_BIAS, CHUNK = (
    _next() for _ in range(8)
)
# Which products are needed; float32 bits of the signed scale and of 1 / (1 - dropout_p).
NEEDS, GRAD_SCALE, DROP_SCALE = (_next() for _ in range(3))
# Items: entry = item // HEADS_HERE of the table (batch entry, first key, end key, partial, keys per chunk),
# kv head = FIRST_HEAD + item % HEADS_HERE.
ENTRIES, FIRST_HEAD, HEADS_HERE = (_next() for _ in range(3))

# Words of an item after those of the pass: index into the tensors, first row of a packed member, the rows of
# dK and dV, its keys and how many make a chunk.
I_TENSOR, I_FIRST_Q, I_DK, I_DV, I_BEGIN, I_END, I_CHUNK = range(36, 43)

NEEDS_DQ, NEEDS_DK, NEEDS_DV, NEEDS_DBIAS = 1, 2, 4, 8
NEEDS_DS = NEEDS_DQ | NEEDS_DK | NEEDS_DBIAS


def tensor_words(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[int, ...]:
    """Q to HEAD_DIM_V. The last dimension of out has unit stride, lse is contiguous."""
    (_, num_q_heads, seqlen_q, head_dim), (_, num_kv_heads, seqlen_k, head_dim_v) = q.shape, v.shape
    size = q.element_size()
    return (
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()),
        *(*_row_strides(q), (1 if head_dim == 1 else q.stride(3)) * size),
        *(*_row_strides(k), (1 if head_dim == 1 else k.stride(3)) * size),
        *(*_row_strides(v), (1 if head_dim_v == 1 else v.stride(3)) * size),
        *(*_row_strides(out), num_q_heads * seqlen_q, seqlen_q),
        *(num_kv_heads, num_q_heads // num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v),
    )


def sum_words(
    dout: Tensor, dlse: Tensor | None, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None
) -> tuple[int, ...]:
    """DO to DV_ROW; dq is q-shaped, or (parts, *q.shape)."""
    of_dq: tuple[int, ...] = (0,) * 5
    of_dk = of_dv = (0,) * 4
    if dq is not None:
        of_dq = dq.data_ptr(), 4 * dq.stride(0), *(4 * n for n in dq.stride()[-4:-1])
    if dk is not None:
        of_dk = dk.data_ptr(), *_row_strides(dk)
    if dv is not None:
        of_dv = dv.data_ptr(), *_row_strides(dv)
    row = dout.data_ptr(), *_row_strides(dout), 0 if dlse is None else dlse.data_ptr()
    return *row, *of_dq, *of_dk, *of_dv


@lru_cache(maxsize=64)
def gradient_scales(scale: float, dropout_p: float) -> tuple[int, int]:
    """GRAD_SCALE and DROP_SCALE; if all is dropped, nothing is left to scale."""
    (signed,) = struct.unpack("<I", struct.pack("<f", max(-a.FLT_MAX, min(scale, a.FLT_MAX))))
    return signed, a.float_bits(1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)


def _row_strides(x: Tensor) -> tuple[int, int, int]:
    """In bytes, over (batch, head, row)."""
    size = x.element_size()
    batch, head, row, _ = x.stride()
    return batch * size, head * size, row * size
