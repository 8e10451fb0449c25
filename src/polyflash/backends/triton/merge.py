"""Merge of the splits of a call whose keys were cut up.

    m = max_s m_s        l = Σ_s exp(scale·(m_s - m))·l_s        out = Σ_s exp(scale·(m_s - m))·l_s·out_s / l

in the order of the splits. Partial outputs are float32. A split hands over m and l and not its lse, whose
rounding is that of the scores: at 10,000 it would be a thousandth of the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from polyflash.backends.triton import arguments, runtime
from polyflash.backends.triton.blocks import LN2, LOG2E, load_tile, store_tile
from polyflash.backends.triton.tiles import split_dim

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.spec import Arguments

AT_ONCE = 16  # splits whose outputs one step of the merge reads


@triton.jit(do_not_specialize=("num_heads", "seqlen_q", "num_rows", "num_splits"))
def merge_splits(
    parts, part_m, out, lse, sinks, num_heads, seqlen_q, num_rows, num_splits, unit, factor,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per row: `parts` (splits, rows, head_dim_v) and `part_m` (splits, rows), behind which is l
    as large, are dense, rows in the order of (batch, heads, seqlen_q). m times `unit` is natural, times
    `factor` in units of the exponent."""
    i_row = tl.program_id(0)
    i_i, i_bh = i_row % seqlen_q, i_row // seqlen_q
    i_h, i_b = tl.cast(i_bh % num_heads, tl.int64), tl.cast(i_bh // num_heads, tl.int64)
    o_s = tl.arange(0, AT_ONCE)
    part_l = part_m + tl.cast(num_splits, tl.int64) * num_rows
    # [AT_ONCE]
    b_top = tl.full([AT_ONCE], float("-inf"), tl.float32)
    for i_s in range(0, num_splits, AT_ONCE):
        p = part_m + (i_s + o_s).to(tl.int64) * num_rows + i_row
        b_top = tl.maximum(b_top, tl.load(p, mask=i_s + o_s < num_splits, other=float("-inf")))
    m_i = tl.max(b_top, 0)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_i = 0.0
    acc0 = tl.zeros([DV0], tl.float32)
    acc1 = tl.zeros([DV1], tl.float32) if DV1 > 0 else acc0
    for i_s in range(0, num_splits, AT_ONCE):
        m_s = i_s + o_s < num_splits
        o_part = (i_s + o_s).to(tl.int64) * num_rows + i_row
        b_l = tl.load(part_l + o_part, mask=m_s, other=0.0)
        b_share = tl.exp2((tl.load(part_m + o_part, mask=m_s, other=float("-inf")) - m_i) * factor)
        b_share = tl.where(b_l == 0.0, 0.0, b_share * b_l)
        l_i += tl.sum(b_share, 0)
        acc0 += tl.sum(b_share[:, None] * load_tile(parts, o_part * DV, m_s, 1, 0, DV, DV0, ""), 0)
        if DV1 > 0:
            acc1 += tl.sum(b_share[:, None] * load_tile(parts, o_part * DV, m_s, 1, DV0, DV, DV1, ""), 0)
    b_m = m_i * unit
    if sinks is not None:
        b_sink = tl.load(sinks + i_h).to(tl.float32)
        b_top = tl.maximum(tl.where(l_i == 0.0, float("-inf"), b_m), b_sink)
        b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_older = tl.where(l_i == 0.0, 0.0, tl.exp2((b_m - b_top) * LOG2E))
        l_i = l_i * b_older + tl.exp2((b_sink - b_top) * LOG2E)
        acc0, acc1, b_m = acc0 * b_older, acc1 * b_older, b_top
    b_l = tl.where(l_i == 0.0, 1.0, l_i)
    if lse is not None:
        b_lse = tl.where(l_i == 0.0, float("-inf"), tl.fma(tl.log2(b_l), LN2, b_m))  # as without splits
        tl.store(lse.p + i_b * lse.b + i_h * lse.h + i_i * lse.s, b_lse)
    o_out = i_b * out.b + i_h * out.h + tl.cast(i_i, tl.int64) * out.s + tl.arange(0, 1)
    m_row = o_out >= 0
    store_tile(out.p, o_out, m_row, out.d, (acc0 / b_l)[None, :], 0, DV, DV0)
    if DV1 > 0:
        store_tile(out.p, o_out, m_row, out.d, (acc1 / b_l)[None, :], DV0, DV, DV1)


def merge(
    kernels: runtime.Kernels, parts: Tensor, part_m: Tensor, out: Tensor, lse: Tensor | None, args: Arguments,
    num_splits: int, unit: float,
) -> None:  # fmt: skip
    """The splits' outputs as one; the sinks join here. Their m in units of `unit`, a natural number."""
    batch, num_heads, seqlen_q, head_dim_v = out.shape
    first, second = split_dim(head_dim_v)
    sinks = None if args.sinks is None else arguments.operands(args, parts).sinks
    v_out, rows = arguments.view(out), None if lse is None else arguments.rows(lse)
    num_rows = batch * num_heads * seqlen_q
    everything = (
        parts, part_m, v_out, rows, sinks, num_heads, seqlen_q, num_rows, num_splits, unit,
        unit * arguments.LOG2E,
    )  # fmt: skip
    constants = {"DV": head_dim_v, "DV0": first, "DV1": second, "AT_ONCE": AT_ONCE, "num_warps": 4}
    strides = runtime.signature(v_out[1:]), rows if rows is None else runtime.signature(rows[1:])
    key = strides, runtime.aligned(out, lse, sinks)
    kernels.launch(merge_splits, (num_rows,), everything, constants, key, out.device)
