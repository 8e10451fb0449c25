"""Passes before and behind `differentiate_sm90`, in Triton: `center` reads out and dO once, `finish_dq`
turns sums, in the order in which threads had them, into dq."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from polyflash.backends.gluon.schedule import ROWS
from polyflash.backends.triton.gradient_kernels import PAD
from polyflash.backends.triton.places import find_member, load_tile, row_offsets, span, store_tile, unravel
from polyflash.backends.triton.products import has_nonfinite
from polyflash.backends.triton.scores import LOG2E

TOO_FAR: tl.constexpr = tl.constexpr(2.0**12)  # lse·log2 e, from here on rounded as a float16 weight is


class Tensors(NamedTuple):
    """`t` of both kernels. row_lse, delta (B, Hkv, Sq·G) and PAD more: as `center` of the Triton engine
    writes them. stats (B·Hq, row blocks, 2, 64): -lse·log2 e and delta. added (B·Hq, row blocks). odd (2):
    see `backward_sm90.Tensors`."""

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    row_lse: Any
    delta: Any
    dq: Any
    stats: Any
    sums: Any
    added: Any
    odd: Any
    cu_seqlens_q: Any = None  # of packed members
    end: Any = None  # see `runtime.compile`


class Numbers(NamedTuple):
    """`n`: none is compiled in."""

    batch: Any
    num_heads: Any
    group: Any
    seqlen_q: Any
    row_blocks: Any
    members: Any
    scale: Any


class Constants(NamedTuple):
    """`c`: the head dim, and the channels of a box; is dq added to in order?"""

    DIM: int = 0
    D: int = 0
    ORDERED: bool = True
    LAYOUT: int = 0


@triton.jit
def find_block(i_t, t, n):
    """Row block i_t's batch entry and head, its first row, and which of its 64 rows are its request's."""
    i_m, i_h, i_b = unravel(i_t, n.row_blocks, n.num_heads)
    first, rows = 0, n.seqlen_q
    if t.cu_seqlens_q is not None:
        i_own, i_m = find_member(i_m, t.cu_seqlens_q, n.members, n.seqlen_q, 1, ROWS)
        first, rows = span(t.cu_seqlens_q, i_own, n.members, n.seqlen_q)
    o_i = i_m * ROWS + tl.arange(0, ROWS)
    return i_b, i_h, first + o_i, o_i < rows


@triton.jit
def center(t, n, c):
    """delta and lse of a block of rows. A row with a score so large that lse is too coarse for weights has
    no number as delta for the next kernel, so all is made anew. Before it `odd` and what follows are 0."""
    i_t = tl.program_id(0)
    i_b, i_h, o_i, m_row = find_block(i_t, t, n)
    b_lse = tl.load(t.lse.p + row_offsets(t.lse, i_b, i_h, o_i), mask=m_row, other=float("-inf"))
    m_live = b_lse != float("-inf")
    b_out = load_tile(t.out, row_offsets(t.out, i_b, i_h, o_i), m_live, 0, c.DIM, c.D, "").to(tl.float32)
    b_do = load_tile(t.dout, row_offsets(t.dout, i_b, i_h, o_i), m_live, 0, c.DIM, c.D, "").to(tl.float32)
    b_delta = tl.sum(b_do * b_out, 1)
    if t.dlse is not None:
        b_delta -= tl.load(t.dlse.p + row_offsets(t.dlse, i_b, i_h, o_i), mask=m_live, other=0.0)
    b_far = b_lse * LOG2E
    m_odd = m_live & ~(tl.abs(b_far) < TOO_FAR)
    p_stats = t.stats + i_t.to(tl.int64) * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(p_stats, tl.where(m_live, -b_far, float("-inf")))
    tl.store(p_stats + ROWS, tl.where(m_odd, float("nan"), b_delta))
    tl.store(t.added + i_t, 0)
    o_w = row_offsets(t.row_lse, i_b, i_h // n.group, o_i * n.group + i_h % n.group)
    tl.store(t.row_lse.p + o_w, tl.where(m_live, b_lse, float("inf")), mask=m_row)
    tl.store(t.delta.p + o_w, b_delta, mask=m_row)
    if i_t == 0:
        tl.store(t.odd + tl.arange(0, 2), 0)
        o_pad = tl.cast(n.batch, tl.int64) * t.row_lse.b + tl.arange(0, PAD)
        tl.store(t.row_lse.p + o_pad, tl.full([PAD], float("inf"), tl.float32))
        tl.store(t.delta.p + o_pad, tl.zeros([PAD], tl.float32))


@triton.jit
def finish_dq(t, n, c):
    """dq (B, Hq, Sq, D) of the sums; 0 where nobody has added. `odd` if one is not finite."""
    i_t = tl.program_id(0)
    i_b, i_h, o_i, m_row = find_block(i_t, t, n)
    o_r, o_d = tl.arange(0, ROWS)[:, None], tl.arange(0, c.D)[None, :]
    o_c = o_d % (c.D // 2)
    o_x = (((o_c // 8 * 4 + o_r // 16) * 8 + o_r % 8) * 4 + o_c % 8 // 2) * 4 + o_r // 8 % 2 * 2 + o_c % 2
    p = t.sums + i_t.to(tl.int64) * (ROWS * c.D) + o_d // (c.D // 2) * (ROWS * c.D // 2) + o_x
    m_live = m_row
    if c.ORDERED:
        m_live = m_row & (tl.load(t.added + i_t) > 0)
    b_dq = tl.load(p, mask=m_live[:, None], other=0.0) * n.scale
    tl.store(t.odd, 1, mask=has_nonfinite(b_dq))
    store_tile(t.dq, row_offsets(t.dq, i_b, i_h, o_i), m_row, b_dq, 0, c.DIM, c.D)
