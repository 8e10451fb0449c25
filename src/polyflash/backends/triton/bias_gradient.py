"""The gradient of a bias: ds = p·(dp - delta), summed over every dimension along which the bias broadcasts.

A program owns what no other sums: a tile of the bias if it has rows and keys of its own, walking the batch
entries and heads that share it; else, for one batch entry and head, a block of keys (walking rows) or of rows
(walking keys), whose sums are few enough to be stored and summed once more. No atomics, order fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from polyflash.backends.triton import tiles
from polyflash.backends.triton.blocks import (
    block_range,
    load_tile,
    row_limits,
    row_offsets,
    shifts,
    stand,
    tile_ends,
)
from polyflash.backends.triton.gradient_kernels import (
    differentiate_tile,
    head_offsets,
    packed_base,
    row_range,
)

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.triton.backward import Call

_PER_CALL = (
    *("batch", "seqlen_q", "seqlen_k", "row_tiles", "key_tiles"),
    *("kept_heads", "walked_batch", "walked_heads"),
    *("offset", "left", "right", "seed_lo", "seed_hi", "drop_below"),
)


@triton.jit
def bias_tile(
    i_m, i_n, i_b, i_h, group, q, k, v, dout, lse, delta, x, numbers, bounds,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, BASE2: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """ds of one tile, [BLOCK_M, BLOCK_N]."""
    rows, start, live, position, lo_shift, hi_shift, i_plane = bounds
    i_hkv = i_h // group
    o_i = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_h = o_i * 0 + i_h
    m_n = o_n < live
    o_lo, o_hi = row_limits(x, o_i, rows, start, live, lo_shift, hi_shift)
    o_w = packed_base(lse, i_b, i_hkv, 0, group) + o_i.to(tl.int64) * group + i_h % group
    b_lse = tl.load(lse.p + o_w, mask=o_i < rows, other=float("inf"))
    b_delta = tl.load(delta.p + o_w, mask=o_i < rows, other=0.0)
    m_live = (o_i < rows) & (b_lse != float("inf"))
    o_q, o_do = head_offsets(q, i_b, o_h, o_i), head_offsets(dout, i_b, o_h, o_i)
    o_k, o_v = row_offsets(k, i_b, i_hkv, o_n), row_offsets(v, i_b, i_hkv, o_n)
    b_q0 = load_tile(q.p, o_q, m_live, q.d, 0, D, D0, "")
    b_k0 = load_tile(k.p, o_k, m_n, k.d, 0, D, D0, "")
    b_do0 = load_tile(dout.p, o_do, m_live, dout.d, 0, DV, DV0, "")
    b_v0 = load_tile(v.p, o_v, m_n, v.d, 0, DV, DV0, "")
    b_q1, b_k1, b_do1, b_v1 = b_q0, b_k0, b_do0, b_v0
    if D1 > 0:
        b_q1 = load_tile(q.p, o_q, m_live, q.d, D0, D, D1, "")
        b_k1 = load_tile(k.p, o_k, m_n, k.d, D0, D, D1, "")
    if DV1 > 0:
        b_do1 = load_tile(dout.p, o_do, m_live, dout.d, DV0, DV, DV1, "")
        b_v1 = load_tile(v.p, o_v, m_n, v.d, DV0, DV, DV1, "")
    tile = (o_i, o_h, o_lo, o_hi)
    place = (i_b, i_b, i_hkv, 0, rows, live, position, i_plane)
    return differentiate_tile(
        b_q0, b_q1, b_k0, b_k1, b_v0, b_v1, b_do0, b_do1, b_lse, b_delta, tile, place, i_n * BLOCK_N, o_n,
        m_n, True, x, numbers, D1, DV1, BLOCK_M, BLOCK_N, True, True, SOFTCAP, DROPOUT, BASE2, PRODUCT, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=_PER_CALL)
def make_dbias(
    q, k, v, dout, lse, delta, sums, x,
    batch, num_heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles, kept_heads, walked_batch, walked_heads,
    offset, left, right, scale, softcap, seed_lo, seed_hi, drop_below, keep_scale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    BASE2: tl.constexpr, PRODUCT: tl.constexpr, OVER_ROWS: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Sums of ds over batch entries and heads [walked], and over rows or keys if OVER_ROWS or OVER_KEYS."""
    i_t = tl.program_id(0)
    i_n, i_t = i_t % key_tiles, i_t // key_tiles
    i_m, i_t = i_t % row_tiles, i_t // row_tiles
    i_kept_h, i_kept_b = i_t % kept_heads, i_t // kept_heads
    # [BLOCK_M, BLOCK_N]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    numbers = (scale, softcap, seed_lo, seed_hi, drop_below, keep_scale)
    for i_w in range(0, walked_batch * walked_heads):
        i_b, i_h = i_kept_b + i_w // walked_heads, i_kept_h + i_w % walked_heads
        _, _, rows, start, live, position = stand(x, i_b, batch, seqlen_q, seqlen_k, offset, HAS_OFFSET)
        lo_shift, hi_shift = shifts(position, rows, live, left, right, HAS_LEFT, HAS_RIGHT)
        bounds = (rows, start, live, position, lo_shift, hi_shift, i_b * num_heads)
        if OVER_KEYS:
            o_i = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
            o_lo, o_hi = row_limits(x, o_i, rows, start, live, lo_shift, hi_shift)
            i_first, i_last = tile_ends(i_m, rows, 1, BLOCK_M, False)
            lo, hi, _, _ = block_range(
                x, i_first, i_last, o_i, o_lo, o_hi, rows, start, live, lo_shift, hi_shift, BLOCK_N
            )
        else:
            lo, hi, _, _ = row_range(
                i_n * BLOCK_N, rows, start, live, lo_shift, hi_shift, 1, BLOCK_M, BLOCK_N, False
            )
            if not OVER_ROWS:
                lo, hi = tl.maximum(lo, i_m), tl.minimum(hi, i_m + 1)
        for i_x in range(lo, hi):
            i_row = i_m if OVER_KEYS else i_x
            i_key = i_x if OVER_KEYS else i_n
            acc += bias_tile(
                i_row, i_key, i_b, i_h, group, q, k, v, dout, lse, delta, x, numbers, bounds,
                D, D0, D1, DV, DV0, DV1, BLOCK_M, BLOCK_N, SOFTCAP, DROPOUT, BASE2, PRODUCT,
            )  # fmt: skip
    o_i = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    p = sums.p + tl.cast(i_kept_b, tl.int64) * sums.b + tl.cast(i_kept_h, tl.int64) * sums.h
    if OVER_KEYS:
        tl.store(p + o_i.to(tl.int64) * sums.s, tl.sum(acc, 1), mask=o_i < seqlen_q)
    elif OVER_ROWS:
        tl.store(p + o_n.to(tl.int64) * sums.d, tl.sum(acc, 0), mask=o_n < seqlen_k)
    else:
        p += o_i.to(tl.int64)[:, None] * sums.s + o_n.to(tl.int64)[None, :] * sums.d
        tl.store(p, acc, mask=(o_i < seqlen_q)[:, None] & (o_n < seqlen_k)[None, :])


def run(call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The gradient, with the shape and dtype of the bias as given."""
    batch, num_heads, seqlen_q = q.shape[:3]
    seqlen_k, config = k.shape[2], call.prepared.config
    shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    over_keys = shape[3] == 1 and seqlen_k > 1
    over_rows = not over_keys and shape[2] == 1 and seqlen_q > 1
    alone = over_keys or over_rows  # one batch entry and head per program
    kept_batch, kept_heads = (batch, num_heads) if alone else shape[:2]
    sums = torch.empty(
        (kept_batch, kept_heads, 1 if over_rows else seqlen_q, 1 if over_keys else seqlen_k),
        dtype=torch.float32, device=q.device,
    )  # fmt: skip
    block_m, block_n = config.dq_block_m, config.dq_block_n
    row_tiles = 1 if over_rows else -(-seqlen_q // block_m)
    key_tiles = 1 if over_keys else -(-seqlen_k // block_n)
    constants = _constants(call, q.shape[3], v.shape[3], over_rows, over_keys)
    sizes = (
        batch, num_heads, call.group, seqlen_q, seqlen_k, row_tiles, key_tiles, kept_heads,
        batch // kept_batch, num_heads // kept_heads,
    )  # fmt: skip
    programs = row_tiles * key_tiles * kept_heads * kept_batch
    call.launch(make_dbias, programs, (sums,), (call.x,), sizes, constants)
    over = [d for d in range(4) if shape[d] == 1 and sums.shape[d] != 1]
    total = sums.sum(over, keepdim=True) if over else sums
    return total.to(bias.dtype).reshape(bias.shape)


def _constants(
    call: Call, head_dim: int, head_dim_v: int, over_rows: bool, over_keys: bool
) -> dict[str, object]:
    """Constexprs and options of `make_dbias`: the dQ kernel's tile, as it too holds a tile of scores."""
    found = call.prepared.bias_constants
    key = (call.flags, over_rows, over_keys)
    if key not in found:
        (d0, d1), (dv0, dv1) = tiles.split_dim(head_dim), tiles.split_dim(head_dim_v)
        config, flags = call.prepared.config, call.flags
        found[key] = {
            "D": head_dim, "D0": d0, "D1": d1, "DV": head_dim_v, "DV0": dv0, "DV1": dv1,
            "BLOCK_M": config.dq_block_m, "BLOCK_N": config.dq_block_n, "HAS_OFFSET": flags.HAS_OFFSET,
            "HAS_LEFT": flags.HAS_LEFT, "HAS_RIGHT": flags.HAS_RIGHT, "SOFTCAP": flags.SOFTCAP,
            "DROPOUT": flags.DROPOUT, "BASE2": config.base2, "PRODUCT": call.prepared.product,
            "OVER_ROWS": over_rows, "OVER_KEYS": over_keys,
            "num_warps": config.dq_num_warps, "num_stages": config.dq_num_stages,
        }  # fmt: skip
    return found[key]
