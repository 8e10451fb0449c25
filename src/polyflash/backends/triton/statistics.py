"""Sums and extremes of the weights in Triton: the backward's tiles without V.

    p = exp(s - lse)      column_sums_j = Σ_i p_ij      entropy_i = Σ_j p_ij·(lse_i - s_ij)      max_j s_ij

`sum_columns` owns blocks of keys and walks the rows that see them, `measure_rows` owns rows and walks keys. A
sink is one more outcome of its rows' distributions. No atomics: bits repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from polyflash.backends.gpu.launch import tile_count
from polyflash.backends.gpu.numbers import Flags, Numbers, flags_of, numbers_of
from polyflash.backends.gpu.views import element_masked, operands_of, reachable, rows_of, view_of
from polyflash.backends.triton import runtime
from polyflash.backends.triton.config_types import product_of
from polyflash.backends.triton.constants import Constants
from polyflash.backends.triton.places import (
    Keys,
    Rows,
    find_band,
    find_keys,
    find_rows,
    load_pair,
    row_limits,
    row_offsets,
    row_range,
    tile_rows,
    unravel,
)
from polyflash.backends.triton.products import cross
from polyflash.backends.triton.scores import LOG2E, change_scores, visible_pairs
from polyflash.backends.triton.tiles import split_dim

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.results import Room
    from polyflash.spec import Arguments


class Tensors(NamedTuple):
    """`t` of both kernels; results of the other are None."""

    q: Any
    k: Any
    lse: Any
    sums: Any
    entropy: Any
    max_logit: Any
    x: Any
    num_heads: Any
    group: Any
    end: Any = None  # see `runtime.compile`


@triton.jit
def load_lse(lse, i_b, i_h, o_row, m_row):
    """+inf for rows that saw no key, so that their weights are exactly 0."""
    b_lse = tl.load(lse.p + row_offsets(lse, i_b, i_h, o_row), mask=m_row, other=float("inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit
def logits(b_q, b_k, b_lse, rows, keys, place, band, x, n, c, MASKED: tl.constexpr):
    """Scores in natural units, -inf where hidden, and ln p, [BLOCK_M, BLOCK_N]."""
    b_s = cross(b_q, b_k, tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32), c.D1, c.PRODUCT)
    if c.CHANGED:
        b_s, _ = change_scores(b_s, x, place, rows, keys, n, c.SOFTCAP)
    else:
        b_s = b_s * n.scale
    b_x = b_s - b_lse[:, None]
    if MASKED:
        o_lo, o_hi = row_limits(rows.o_i, x, place, band)
        limited = Rows(rows.i_hkv, rows.i_plane, rows.o_i, rows.o_h, o_lo, o_hi, rows.m_row)
        b_seen = visible_pairs(x, place, limited, keys, c.BELOW)
        b_s, b_x = tl.where(b_seen, b_s, float("-inf")), tl.where(b_seen, b_x, float("-inf"))
    return b_s, b_x


@triton.jit
def walk_rows(m_lo, m_hi, acc, b_k, i_h, keys, place, band, t, n, c, MASKED: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N] and the weights of row blocks [m_lo, m_hi)."""
    for i_m in tl.range(m_lo, m_hi, num_stages=c.NUM_STAGES):
        o_i = i_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
        m_row = o_i < place.rows
        rows = Rows(i_h // t.group, 0, o_i, o_i * 0 + i_h, None, None, m_row)
        o_q = row_offsets(t.q, place.i_batch, i_h, place.first_q + o_i)
        b_q = load_pair(t.q, o_q, m_row, c.D, c.D0, c.D1, c)
        b_lse = load_lse(t.lse, place.i_batch, i_h, place.first_q + o_i, m_row)
        _, b_x = logits(b_q, b_k, b_lse, rows, keys, place, band, t.x, n, c, MASKED)
        acc += tl.exp2(b_x * LOG2E)
    return acc


@triton.jit
def sum_columns(t, n, c):
    """Sums that one query head gives to each key of one block."""
    i_n, i_h, i_b = unravel(tl.program_id(0), n.num_tiles, t.num_heads)
    i_n, num_keys, place = find_keys(i_n, i_b, t, n, c)
    j_0 = i_n * c.BLOCK_N
    if j_0 < num_keys:
        band = find_band(place, n, c)
        blocks = row_range(j_0, place, band, t, c)
        o_n = j_0 + tl.arange(0, c.BLOCK_N)
        keys = Keys(j_0, o_n, o_n < place.live)
        o_k = row_offsets(t.k, place.i_batch, i_h // t.group, place.first_k + o_n)
        b_k = load_pair(t.k, o_k, keys.m_n, c.D, c.D0, c.D1, c)
        acc = tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32)
        full_lo, full_hi = blocks.full_lo, blocks.full_hi
        if c.ALWAYS_MASKED:
            full_lo, full_hi = blocks.hi, blocks.hi
        acc = walk_rows(blocks.lo, full_lo, acc, b_k, i_h, keys, place, band, t, n, c, True)
        if not c.ALWAYS_MASKED:
            acc = walk_rows(full_lo, full_hi, acc, b_k, i_h, keys, place, band, t, n, c, False)
            acc = walk_rows(full_hi, blocks.hi, acc, b_k, i_h, keys, place, band, t, n, c, True)
        p = t.sums.p + row_offsets(t.sums, place.i_batch, i_h, place.first_k + o_n)
        tl.store(p, tl.sum(acc, 0), mask=o_n < num_keys)


@triton.jit
def walk_keys(n_lo, n_hi, state, b_q, b_lse, rows, place, t, n, c, MASKED: tl.constexpr):
    """Entropy and largest score over key blocks [n_lo, n_hi) too; a score that is NaN is no maximum."""
    b_entropy, b_top = state
    band = find_band(place, n, c)
    for i_n in tl.range(n_lo, n_hi, num_stages=c.NUM_STAGES):
        o_n = i_n * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
        keys = Keys(i_n * c.BLOCK_N, o_n, o_n < place.live)
        o_k = row_offsets(t.k, place.i_batch, rows.i_hkv, place.first_k + o_n)
        b_k = load_pair(t.k, o_k, keys.m_n, c.D, c.D0, c.D1, c)
        b_s, b_x = logits(b_q, b_k, b_lse, rows, keys, place, band, t.x, n, c, MASKED)
        b_p = tl.exp2(b_x * LOG2E)
        b_entropy -= tl.sum(tl.where(b_p == 0.0, 0.0, b_p * b_x), 1)
        b_nan = b_s != b_s
        b_tile = tl.max(tl.where(b_nan, float("-inf"), b_s), 1)
        b_tile += tl.sum(tl.where(b_nan, b_s, 0.0), 1)
        b_top = tl.where((b_tile > b_top) | (b_tile != b_tile), b_tile, b_top)
    return b_entropy, b_top


@triton.jit
def measure_rows(t, n, c):
    """Entropy and largest score of the rows of one tile of one query head."""
    i_m, i_h, i_b = unravel(tl.program_id(0), n.num_tiles, t.num_heads)
    i_m, place = find_rows(i_m, i_b, t, n, c)
    if i_m * c.BLOCK_M < place.rows:
        rows, blocks = tile_rows(i_m, i_h, place, t, n, c)
        m_row, o_row = rows.m_row, place.first_q + rows.o_i
        o_q = row_offsets(t.q, place.i_batch, i_h, o_row)
        b_q = load_pair(t.q, o_q, m_row, c.D, c.D0, c.D1, c)
        b_lse = load_lse(t.lse, place.i_batch, i_h, o_row, m_row)
        state = (tl.zeros([c.BLOCK_M], tl.float32), tl.full([c.BLOCK_M], float("-inf"), tl.float32))
        full_lo, full_hi = blocks.full_lo, blocks.full_hi
        if c.ALWAYS_MASKED:
            full_lo, full_hi = blocks.hi, blocks.hi
        state = walk_keys(blocks.lo, full_lo, state, b_q, b_lse, rows, place, t, n, c, True)
        if not c.ALWAYS_MASKED:
            state = walk_keys(full_lo, full_hi, state, b_q, b_lse, rows, place, t, n, c, False)
            state = walk_keys(full_hi, blocks.hi, state, b_q, b_lse, rows, place, t, n, c, True)
        b_entropy, b_top = state
        if t.x.sinks is not None:
            b_x = tl.load(t.x.sinks + i_h).to(tl.float32) - b_lse
            b_p = tl.exp2(b_x * LOG2E)
            b_entropy -= tl.where(b_p == 0.0, 0.0, b_p * b_x)
        b_entropy = tl.where(b_entropy < 0.0, 0.0, b_entropy)
        tl.store(t.entropy.p + row_offsets(t.entropy, place.i_batch, i_h, o_row), b_entropy, mask=m_row)
        tl.store(t.max_logit.p + row_offsets(t.max_logit, place.i_batch, i_h, o_row), b_top, mask=m_row)


class Prepared:
    """A route's memory between calls: its kernels, and for each set of flags the constants they have."""

    __slots__ = ("config", "constants", "kernels", "options", "product")

    def __init__(self, launch: Launch) -> None:
        self.config: Any = launch.config
        self.kernels = runtime.Kernels()
        self.product = product_of(launch.config, launch.spec, launch.target)
        self.constants: dict[Any, Any] = {}
        self.options = {
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
            "enable_fp_fusion": False,  # scores are rounded as in the forward
        }

    def constants_for(self, flags: Flags, head_dim: int, masked: bool) -> Any:
        found = self.constants.get((flags, masked))
        if found is None:
            c, (d0, d1) = self.config, split_dim(head_dim)
            tile = {"BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "NUM_STAGES": c.num_stages}
            constants = Constants(D=head_dim, D0=d0, D1=d1, **tile, **flags._asdict())
            constants = constants._replace(PRODUCT=self.product, ALWAYS_MASKED=masked)
            found = self.constants[flags, masked] = runtime.compiled_in(constants)
        return found


def run(launch: Launch, q: Tensor, k: Tensor, lse: Tensor, room: Room, args: Arguments) -> None:
    """Fills column_sums (B, Hq, Sk), or entropy and max_logit (B, Hq, Sq), from q (B, Hq, Sq, D),
    k (B, Hkv, Sk, D) and lse (B, Hq, Sq); any strides. What belongs to no packed member is 0, and -inf."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
    q, k = reachable(q, k)
    column_sums, entropy, max_logit = room
    if column_sums is not None:
        _start(prepared, args, sum_columns, q, k, lse, column_sums, None, None)
    if entropy is not None and max_logit is not None:
        _start(prepared, args, measure_rows, q, k, lse, None, entropy, max_logit)


def _start(
    prepared: Prepared,
    args: Arguments,
    kernel: Any,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *results: Tensor | None,
) -> None:
    """One program per block of keys or rows, query head and request."""
    by_keys, config = kernel is sum_columns, prepared.config
    positions, block = (k.shape[2], config.block_n) if by_keys else (q.shape[2], config.block_m)
    c = prepared.constants_for(flags_of(q, args), q.shape[3], element_masked(args))
    n, num_heads, group = numbers_of(q, k, args), q.shape[1], q.shape[1] // k.shape[1]
    num_tiles, requests = tile_count(positions, block, n.batch, args.cu_seqlens_q is not None)
    views = view_of(q), view_of(k), *map(rows_of, (lse, *results))
    t = Tensors(*views, operands_of(args, k), num_heads, group)  # type: ignore[call-arg]
    kinds = runtime.aligned(q, k, lse, *results), runtime.signature(t.x)
    key = kernel.__name__, id(c), *(w and w[1:] for w in views), num_heads, group, *kinds
    n = Numbers(*n[:3], num_tiles, *n[4:])
    programs = num_tiles * num_heads * requests
    prepared.kernels.launch(kernel, (programs,), (t, n, c), prepared.options, key, q.device)
