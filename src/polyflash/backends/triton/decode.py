"""Decode in Triton: few query rows against many keys. The forward kernel over splits of the keys, then their
merge.

    lse = ln Σ_s exp(lse_s)        out = Σ_s exp(lse_s - lse)·out_s          in the order of the splits

All query heads of a key/value head are rows of one tile, so keys are read once. Partial outputs are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from polyflash.backends.triton import arguments, configs, runtime
from polyflash.backends.triton.blocks import LN2, LOG2E, load_tile, store_tile
from polyflash.backends.triton.forward import Prepared, attend_call
from polyflash.backends.triton.tiles import split_dim

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

MERGED_ROWS = 16  # of a program of the merge


@triton.jit(do_not_specialize=("batch", "members", "seqlen_q", "num_tiles", "num_splits"))
def merge_splits(
    parts, part_lse, out, lse, sinks, cu_seqlens_q,
    batch, members, num_heads, seqlen_q, num_tiles, num_splits,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program per block of rows of one head: the sum over its splits."""
    i_m, i_bh = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    i_h, i_b = tl.cast(i_bh % num_heads, tl.int64), tl.cast(i_bh // num_heads, tl.int64)
    o_i = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_i < seqlen_q
    o_row = o_i.to(tl.int64)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks is not None:
        end = seqlen_q
        if cu_seqlens_q is not None:  # rows of nobody have no sink
            end = tl.load(cu_seqlens_q + members)
        m_i = tl.where(o_i < end, tl.load(sinks + i_h).to(tl.float32), m_i)
    b_m = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_i = tl.exp2((m_i - b_m) * LOG2E)
    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1], tl.float32) if DV1 > 0 else acc0
    for i_s in range(0, num_splits):
        i_part = i_b + tl.cast(i_s, tl.int64) * batch
        p_lse = part_lse.p + i_part * part_lse.b + i_h * part_lse.h + o_row * part_lse.s
        b_lse = tl.load(p_lse, mask=m_row, other=float("-inf"))
        m_new = tl.maximum(m_i, b_lse)
        b_m = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, b_share = tl.exp2((m_i - b_m) * LOG2E), tl.exp2((b_lse - b_m) * LOG2E)
        l_i, m_i = l_i * alpha + b_share, m_new
        o_part = i_part * parts.b + i_h * parts.h + o_row * parts.s
        acc0 = acc0 * alpha[:, None] + b_share[:, None] * load_tile(
            parts.p, o_part, m_row, parts.d, 0, DV, DV0, ""
        )
        if DV1 > 0:
            acc1 = acc1 * alpha[:, None] + b_share[:, None] * load_tile(
                parts.p, o_part, m_row, parts.d, DV0, DV, DV1, ""
            )
    b_none = l_i == 0.0
    b_l = tl.where(b_none, 1.0, l_i)
    if lse is not None:
        b_m = tl.where(m_i == float("-inf"), 0.0, m_i)
        b_lse = tl.where(b_none, float("-inf"), b_m + tl.log2(b_l) * LN2)
        tl.store(lse.p + i_b * lse.b + i_h * lse.h + o_row * lse.s, b_lse, mask=m_row)
    o_out = i_b * out.b + i_h * out.h + o_row * out.s
    store_tile(out.p, o_out, m_row, out.d, acc0 / b_l[:, None], 0, DV, DV0)
    if DV1 > 0:
        store_tile(out.p, o_out, m_row, out.d, acc1 / b_l[:, None], DV0, DV, DV1)


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fills out and, if asked for, lse, as the forward's `run` does."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
    config = prepared.config
    batch, num_q_heads, seqlen_q, head_dim_v = out.shape
    keys = k.shape[2] if args.page_table is None else args.page_table.shape[1] * k.shape[2]
    rows = seqlen_q * (num_q_heads // k.shape[1] if config.pack_gqa else 1)
    walks = batch * (k.shape[1] if config.pack_gqa else num_q_heads) * -(-rows // config.block_m)
    size = configs.split_size(config, walks, keys, prepared.cores, fixed=args.batch_invariant)
    num_splits = -(-keys // size)
    if num_splits == 1:
        attend_call(prepared, q, k, v, out, lse if args.need_lse else None, args)
        return out, lse
    parts = torch.empty(
        (num_splits * batch, num_q_heads, seqlen_q, head_dim_v), dtype=torch.float32, device=q.device
    )
    part_lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
    attend_call(prepared, q, k, v, parts, part_lse, args, split_keys=size, num_splits=num_splits)
    merge(prepared, parts, part_lse, out, lse if args.need_lse else None, args, num_splits)
    return out, lse


def merge(
    prepared: Prepared, parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None, args: Arguments,
    num_splits: int,
) -> None:  # fmt: skip
    """The splits' outputs as one; the sinks join here."""
    batch, num_heads, seqlen_q, head_dim_v = out.shape
    first, second = split_dim(head_dim_v)
    num_tiles = -(-seqlen_q // MERGED_ROWS)
    x = arguments.operands(args, parts)
    members = 0 if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0] - 1
    views = arguments.view(parts), arguments.rows(part_lse), arguments.view(out)
    rows = None if lse is None else arguments.rows(lse)
    everything = (
        *views, rows, x.sinks, x.cu_seqlens_q, batch, members, num_heads, seqlen_q, num_tiles, num_splits
    )  # fmt: skip
    constants = {"DV": head_dim_v, "DV0": first, "DV1": second, "BLOCK_M": MERGED_ROWS, "num_warps": 4}
    key = (
        "merge", *(w[1:] for w in views), None if rows is None else rows[1:], num_heads,
        runtime.aligned(parts, part_lse, out, lse), runtime.signature((x.sinks, x.cu_seqlens_q)),
    )  # fmt: skip
    programs = num_tiles * num_heads * batch
    prepared.kernels.launch(merge_splits, programs, everything, constants, key, out.device)
