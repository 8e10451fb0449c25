"""The gradient of a bias: ds = p·(dp - delta), summed over every dimension along which the bias broadcasts.

A program owns what no other sums: a tile of the bias if it has rows and keys of its own, walking the batch
entries and heads that share it; else, for one batch entry and head, a block of keys (walking rows) or of rows
(walking keys), whose sums are few enough to be stored and summed once more. No atomics, order fixed.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from polyflash.backends.gpu import numbers
from polyflash.backends.triton import runtime
from polyflash.backends.triton.constants import Constants
from polyflash.backends.triton.gradient_kernels import differentiate_tile, load_blocks, load_own, packed_base
from polyflash.backends.triton.places import (
    Keys,
    Rows,
    block_range,
    find_band,
    head_offsets,
    row_limits,
    row_offsets,
    row_range,
    stand,
)
from polyflash.backends.triton.tiles import LEAST, channel_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.triton.backward import Call


_CUT = ("row_tiles", "key_tiles", "kept_heads", "walked_batch", "walked_heads")
Numbers = namedtuple("Numbers", (*numbers.Numbers._fields, *_CUT))  # type: ignore[misc]


@triton.jit
def bias_tile(i_m, i_n, i_h, place, band, t, n, c):
    """ds of one tile, [BLOCK_M, BLOCK_N]."""
    i_hkv = i_h // t.group
    o_i = i_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    o_n = i_n * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
    o_lo, o_hi = row_limits(o_i, t.x, place, band)
    rows = Rows(i_hkv, place.i_b * t.num_heads, o_i, o_i * 0 + i_h, o_lo, o_hi, o_i < place.rows)
    keys = Keys(i_n * c.BLOCK_N, o_n, o_n < place.live)
    o_w = packed_base(t.lse, place.i_b, i_hkv, 0, t.group) + o_i.to(tl.int64) * t.group + i_h % t.group
    o_q, o_do = head_offsets(t.q, place.i_b, rows.o_h, o_i), head_offsets(t.dout, place.i_b, rows.o_h, o_i)
    own = load_own(o_q, o_do, o_w, rows.m_row, t, c)
    o_k, o_v = row_offsets(t.k, place.i_b, i_hkv, o_n), row_offsets(t.v, place.i_b, i_hkv, o_n)
    b_k = load_blocks(t.k, o_k, keys.m_n, c.D, c.D0, c.D1, c)
    b_v = load_blocks(t.v, o_v, keys.m_n, c.DV, c.DV0, c.DV1, c)
    return differentiate_tile(own, b_k, b_v, True, rows, keys, place, t.x, n, c, True, False)


@triton.jit
def make_dbias(t, n, c):
    """Sums of ds over batch entries and heads [walked], and over rows or keys if OVER_ROWS or OVER_KEYS."""
    i_t = tl.program_id(0)
    i_n, i_t = i_t % n.key_tiles, i_t // n.key_tiles
    i_m, i_t = i_t % n.row_tiles, i_t // n.row_tiles
    i_kept_h, i_kept_b = i_t % n.kept_heads, i_t // n.kept_heads
    # [BLOCK_M, BLOCK_N]
    acc = tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32)
    for i_w in range(0, n.walked_batch * n.walked_heads):
        i_b, i_h = i_kept_b + i_w // n.walked_heads, i_kept_h + i_w % n.walked_heads
        place = stand(i_b, i_b, t.x, n, c)
        band = find_band(place, n, c)
        if c.OVER_KEYS:
            o_i = i_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
            o_lo, o_hi = row_limits(o_i, t.x, place, band)
            blocks = block_range(i_m, o_i, o_lo, o_hi, place, band, t, c)
            lo, hi = blocks.lo, blocks.hi
        else:
            blocks = row_range(i_n * c.BLOCK_N, place, band, t, c)
            lo, hi = blocks.lo, blocks.hi
            if not c.OVER_ROWS:
                lo, hi = tl.maximum(lo, i_m), tl.minimum(hi, i_m + 1)
        for i_x in range(lo, hi):
            i_row = i_m if c.OVER_KEYS else i_x
            i_key = i_x if c.OVER_KEYS else i_n
            acc += bias_tile(i_row, i_key, i_h, place, band, t, n, c)
    o_i = i_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    o_n = i_n * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
    sums = t.dbias
    p = sums.p + tl.cast(i_kept_b, tl.int64) * sums.b + tl.cast(i_kept_h, tl.int64) * sums.h
    if c.OVER_KEYS:
        tl.store(p + o_i.to(tl.int64) * sums.s, tl.sum(acc, 1), mask=o_i < n.seqlen_q)
    elif c.OVER_ROWS:
        tl.store(p + o_n.to(tl.int64) * sums.d, tl.sum(acc, 0), mask=o_n < n.seqlen_k)
    else:
        p += o_i.to(tl.int64)[:, None] * sums.s + o_n.to(tl.int64)[None, :] * sums.d
        tl.store(p, acc, mask=(o_i < n.seqlen_q)[:, None] & (o_n < n.seqlen_k)[None, :])


def run(call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The gradient, with the shape and dtype of the bias as given."""
    batch, num_heads, seqlen_q = q.shape[:3]
    seqlen_k, config = k.shape[2], call.prepared.config
    shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    over_keys = shape[3] == 1 and seqlen_k > 1
    over_rows = not over_keys and shape[2] == 1 and seqlen_q > 1
    alone = over_keys or over_rows  # one batch entry and head per program
    kept_batch, kept_heads = (batch, num_heads) if alone else shape[:2]
    kept = kept_batch, kept_heads, 1 if over_rows else seqlen_q, 1 if over_keys else seqlen_k
    sums = torch.empty(kept, dtype=torch.float32, device=q.device)
    block_m, block_n = tile_of(call)
    row_tiles = 1 if over_rows else -(-seqlen_q // block_m)
    key_tiles = 1 if over_keys else -(-seqlen_k // block_n)
    walked = batch // kept_batch, num_heads // kept_heads
    n = Numbers._make((*call.n, row_tiles, key_tiles, kept_heads, *walked))
    key = call.flags, over_rows, over_keys
    c = call.prepared.constants.get(key)
    if c is None:
        c = call.prepared.constants[key] = _constants(call, q.shape[3], v.shape[3], over_rows, over_keys)
    options = {"num_warps": config.dq_num_warps, "num_stages": config.dq_num_stages}
    programs = row_tiles * key_tiles * kept_heads * kept_batch
    call.launch(make_dbias, programs, n, (c, options), num_heads, {"dbias": sums})
    over = [d for d in range(4) if shape[d] == 1 and sums.shape[d] != 1]
    total = sums.sum(over, keepdim=True) if over else sums
    return total.to(bias.dtype).reshape(bias.shape)


def tile_of(call: Call) -> tuple[int, int]:
    """Rows and keys: the dQ kernel's, as that too holds a tile of scores; half of them in parts, whose
    pipelines hold all operands."""
    config = call.prepared.config
    if call.prepared.product != "bf16x6":
        return config.dq_block_m, config.dq_block_n
    return max(LEAST, config.dq_block_m // 2), min(32, config.dq_block_n)


def _constants(call: Call, head_dim: int, head_dim_v: int, over_rows: bool, over_keys: bool) -> Any:
    config, (block_m, block_n) = call.prepared.config, tile_of(call)
    constants = Constants(
        **channel_blocks(head_dim, head_dim_v),
        **call.flags._asdict(),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BASE2=config.base2,
        PRODUCT=call.prepared.product,
        OVER_ROWS=over_rows,
        OVER_KEYS=over_keys,
    )
    return runtime.compiled_in(constants)
