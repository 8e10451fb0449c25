"""Sums and extremes of the weights in Triton: the backward's tiles without V.

    p = exp(s - lse)      column_sums_j = Σ_i p_ij      entropy_i = Σ_j p_ij·(lse_i - s_ij)      max_j s_ij

`sum_columns` owns blocks of keys and walks the rows that see them, `measure_rows` owns rows and walks keys. A
sink is one more outcome of its rows' distributions. No atomics: bits repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from polyflash.backends.triton import arguments, runtime
from polyflash.backends.triton.blocks import (
    LOG2E,
    block_range,
    change_scores,
    find_keys,
    find_rows,
    load_tile,
    product,
    row_limits,
    row_offsets,
    shifts,
    tile_ends,
    unravel,
    visible_pairs,
)
from polyflash.backends.triton.config_types import product_of
from polyflash.backends.triton.forward import element_masked
from polyflash.backends.triton.gradient_kernels import row_range
from polyflash.backends.triton.tiles import split_dim

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

_PER_CALL = ("batch", "seqlen_q", "seqlen_k", "num_tiles", "offset", "left", "right")


@triton.jit
def load_lse(lse, i_b, i_h, o_row, m_row):
    """+inf for rows that saw no key, so that their weights are exactly 0."""
    b_lse = tl.load(lse.p + row_offsets(lse, i_b, i_h, o_row), mask=m_row, other=float("inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit
def logits(
    b_q0, b_q1, b_k0, b_k1, o_i, o_h, o_n, m_n, b_lse, place, limits, x, scale, softcap,
    D1: tl.constexpr, MASKED: tl.constexpr, CHANGED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """Scores in natural units, -inf where hidden, and ln p, [BLOCK_M, BLOCK_N]."""
    i_b, rows, live, position = place
    b_s = product(b_q0, tl.trans(b_k0), tl.zeros([o_i.shape[0], o_n.shape[0]], tl.float32), PRODUCT)
    if D1 > 0:
        b_s = product(b_q1, tl.trans(b_k1), b_s, PRODUCT)
    if CHANGED:
        m_pair = (o_i < rows)[:, None] & m_n[None, :]
        b_s, _ = change_scores(b_s, x, i_b, o_i, o_h, o_n, m_pair, position, scale, softcap, SOFTCAP)
        b_x = b_s - b_lse[:, None]
    else:
        b_s = b_s * scale
        b_x = b_s - b_lse[:, None]
    if MASKED:
        start, lo_shift, hi_shift = limits
        o_lo, o_hi = row_limits(x, o_i, rows, start, live, lo_shift, hi_shift)
        b_seen = visible_pairs(x, i_b, o_i, o_h, o_n, o_lo, o_hi, m_n, rows, live)
        b_s, b_x = tl.where(b_seen, b_s, float("-inf")), tl.where(b_seen, b_x, float("-inf"))
    return b_s, b_x


@triton.jit
def walk_rows(
    m_lo, m_hi, acc, b_k0, b_k1, o_n, m_n, i_h, i_batch, first_q, place, limits, q, lse, x, scale, softcap,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr, NUM_STAGES: tl.constexpr,
    MASKED: tl.constexpr, CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] and the weights of row blocks [m_lo, m_hi)."""
    _i_b, rows, _live, _position = place
    for i_m in tl.range(m_lo, m_hi, num_stages=NUM_STAGES):
        o_i = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        o_h = o_i * 0 + i_h
        m_row = o_i < rows
        o_q = row_offsets(q, i_batch, i_h, first_q + o_i)
        b_q0 = load_tile(q.p, o_q, m_row, q.d, 0, D, D0, "")
        b_q1 = load_tile(q.p, o_q, m_row, q.d, D0, D, D1, "") if D1 > 0 else b_q0
        b_lse = load_lse(lse, i_batch, i_h, first_q + o_i, m_row)
        _, b_x = logits(
            b_q0, b_q1, b_k0, b_k1, o_i, o_h, o_n, m_n, b_lse, place, limits, x, scale, softcap, D1, MASKED,
            CHANGED, SOFTCAP, PRODUCT,
        )  # fmt: skip
        acc += tl.exp2(b_x * LOG2E)
    return acc


@triton.jit(do_not_specialize=_PER_CALL)
def sum_columns(
    q, k, lse, sums, x, batch, num_heads, group, seqlen_q, seqlen_k, num_tiles, offset, left, right, scale,
    softcap, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, PRODUCT: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
):  # fmt: skip
    """What one query head gives to each key of one block."""
    i_n, i_h, i_b = unravel(tl.program_id(0), num_tiles, num_heads)
    i_n, i_b, i_batch, keys, where = find_keys(
        i_n, i_b, x, batch, seqlen_q, seqlen_k, offset, HAS_OFFSET, BLOCK_N
    )
    first_q, first_k, rows, start, live, position = where
    j_0 = i_n * BLOCK_N
    if j_0 < keys:
        lo_shift, hi_shift = shifts(position, rows, live, left, right, HAS_LEFT, HAS_RIGHT)
        m_lo, m_hi, full_lo, full_hi = row_range(
            j_0, rows, start, live, lo_shift, hi_shift, 1, BLOCK_M, BLOCK_N, False
        )
        o_n = j_0 + tl.arange(0, BLOCK_N)
        m_n = o_n < live
        o_k = row_offsets(k, i_batch, i_h // group, first_k + o_n)
        b_k0 = load_tile(k.p, o_k, m_n, k.d, 0, D, D0, "")
        b_k1 = load_tile(k.p, o_k, m_n, k.d, D0, D, D1, "") if D1 > 0 else b_k0
        place, limits = (i_b, rows, live, position), (start, lo_shift, hi_shift)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if ALWAYS_MASKED:
            full_lo, full_hi = m_hi, m_hi
        acc = walk_rows(
            m_lo, full_lo, acc, b_k0, b_k1, o_n, m_n, i_h, i_batch, first_q, place, limits, q, lse, x,
            scale, softcap, D, D0, D1, BLOCK_M, NUM_STAGES, True, CHANGED, SOFTCAP, PRODUCT,
        )  # fmt: skip
        if not ALWAYS_MASKED:
            acc = walk_rows(
                full_lo, full_hi, acc, b_k0, b_k1, o_n, m_n, i_h, i_batch, first_q, place, limits, q, lse,
                x, scale, softcap, D, D0, D1, BLOCK_M, NUM_STAGES, False, CHANGED, SOFTCAP, PRODUCT,
            )  # fmt: skip
            acc = walk_rows(
                full_hi, m_hi, acc, b_k0, b_k1, o_n, m_n, i_h, i_batch, first_q, place, limits, q, lse, x,
                scale, softcap, D, D0, D1, BLOCK_M, NUM_STAGES, True, CHANGED, SOFTCAP, PRODUCT,
            )  # fmt: skip
        p = sums.p + row_offsets(sums, i_batch, i_h, first_k + o_n)
        tl.store(p, tl.sum(acc, 0), mask=o_n < keys)


@triton.jit
def walk_keys(
    n_lo, n_hi, state, b_q0, b_q1, b_lse, o_i, o_h, i_hkv, i_batch, first_k, place, limits, k, x, scale,
    softcap, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, MASKED: tl.constexpr, CHANGED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """Entropy and largest score over key blocks [n_lo, n_hi) too; a score that is NaN is no maximum."""
    b_entropy, b_top = state
    _i_b, _rows, live, _position = place
    for i_n in tl.range(n_lo, n_hi, num_stages=NUM_STAGES):
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = o_n < live
        o_k = row_offsets(k, i_batch, i_hkv, first_k + o_n)
        b_k0 = load_tile(k.p, o_k, m_n, k.d, 0, D, D0, "")
        b_k1 = load_tile(k.p, o_k, m_n, k.d, D0, D, D1, "") if D1 > 0 else b_k0
        b_s, b_x = logits(
            b_q0, b_q1, b_k0, b_k1, o_i, o_h, o_n, m_n, b_lse, place, limits, x, scale, softcap, D1, MASKED,
            CHANGED, SOFTCAP, PRODUCT,
        )  # fmt: skip
        b_p = tl.exp2(b_x * LOG2E)
        b_entropy -= tl.sum(tl.where(b_p == 0.0, 0.0, b_p * b_x), 1)
        b_nan = b_s != b_s
        b_tile = tl.max(tl.where(b_nan, float("-inf"), b_s), 1)
        b_tile += tl.sum(tl.where(b_nan, b_s, 0.0), 1)
        b_top = tl.where((b_tile > b_top) | (b_tile != b_tile), b_tile, b_top)
    return b_entropy, b_top


@triton.jit(do_not_specialize=_PER_CALL)
def measure_rows(
    q, k, lse, entropy, max_logit, x, batch, num_heads, group, seqlen_q, seqlen_k, num_tiles, offset, left,
    right, scale, softcap,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    CHANGED: tl.constexpr, SOFTCAP: tl.constexpr, PRODUCT: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
):  # fmt: skip
    """Entropy and largest score of the rows of one tile of one query head."""
    i_m, i_h, i_b = unravel(tl.program_id(0), num_tiles, num_heads)
    i_m, i_b, i_batch, where = find_rows(
        i_m, i_b, x, num_tiles, batch, seqlen_q, seqlen_k, 1, offset, False, HAS_OFFSET, BLOCK_M, False
    )  # fmt: skip
    first_q, first_k, rows, start, live, position = where
    if i_m * BLOCK_M < rows:
        o_i = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        o_h = o_i * 0 + i_h
        m_row = o_i < rows
        lo_shift, hi_shift = shifts(position, rows, live, left, right, HAS_LEFT, HAS_RIGHT)
        o_lo, o_hi = row_limits(x, o_i, rows, start, live, lo_shift, hi_shift)
        i_first, i_last = tile_ends(i_m, rows, 1, BLOCK_M, False)
        n_lo, n_hi, full_lo, full_hi = block_range(
            x, i_first, i_last, o_i, o_lo, o_hi, rows, start, live, lo_shift, hi_shift, BLOCK_N
        )
        o_q = row_offsets(q, i_batch, i_h, first_q + o_i)
        b_q0 = load_tile(q.p, o_q, m_row, q.d, 0, D, D0, "")
        b_q1 = load_tile(q.p, o_q, m_row, q.d, D0, D, D1, "") if D1 > 0 else b_q0
        b_lse = load_lse(lse, i_batch, i_h, first_q + o_i, m_row)
        place, limits = (i_b, rows, live, position), (start, lo_shift, hi_shift)
        state = (tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32))
        if ALWAYS_MASKED:
            full_lo, full_hi = n_hi, n_hi
        state = walk_keys(
            n_lo, full_lo, state, b_q0, b_q1, b_lse, o_i, o_h, i_h // group, i_batch, first_k, place,
            limits, k, x, scale, softcap, D, D0, D1, BLOCK_N, NUM_STAGES, True, CHANGED, SOFTCAP, PRODUCT,
        )  # fmt: skip
        if not ALWAYS_MASKED:
            state = walk_keys(
                full_lo, full_hi, state, b_q0, b_q1, b_lse, o_i, o_h, i_h // group, i_batch, first_k, place,
                limits, k, x, scale, softcap, D, D0, D1, BLOCK_N, NUM_STAGES, False, CHANGED, SOFTCAP,
                PRODUCT,
            )  # fmt: skip
            state = walk_keys(
                full_hi, n_hi, state, b_q0, b_q1, b_lse, o_i, o_h, i_h // group, i_batch, first_k, place,
                limits, k, x, scale, softcap, D, D0, D1, BLOCK_N, NUM_STAGES, True, CHANGED, SOFTCAP, PRODUCT,
            )  # fmt: skip
        b_entropy, b_top = state
        if x.sinks is not None:
            b_x = tl.load(x.sinks + i_h).to(tl.float32) - b_lse
            b_p = tl.exp2(b_x * LOG2E)
            b_entropy -= tl.where(b_p == 0.0, 0.0, b_p * b_x)
        b_entropy = tl.where(b_entropy < 0.0, 0.0, b_entropy)
        o_row = first_q + o_i
        tl.store(entropy.p + row_offsets(entropy, i_batch, i_h, o_row), b_entropy, mask=m_row)
        tl.store(max_logit.p + row_offsets(max_logit, i_batch, i_h, o_row), b_top, mask=m_row)


class Prepared:
    """What a route keeps between calls: its kernels, and for each set of flags the constants they have."""

    __slots__ = ("config", "constants", "kernels", "product")

    def __init__(self, launch: Launch) -> None:
        self.config: Any = launch.config
        self.kernels = runtime.Kernels()
        self.product = product_of(launch.config, launch.spec, launch.target)
        self.constants: dict[Any, dict[str, Any]] = {}

    def constants_for(self, flags: arguments.Flags, head_dim: int, masked: bool) -> dict[str, Any]:
        """Constexprs and options of both kernels."""
        found = self.constants.get((flags, masked))
        if found is None:
            c, (d0, d1) = self.config, split_dim(head_dim)
            found = self.constants[flags, masked] = {
                "D": head_dim, "D0": d0, "D1": d1, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n,
                "NUM_STAGES": c.num_stages, "HAS_OFFSET": flags.HAS_OFFSET, "HAS_LEFT": flags.HAS_LEFT,
                "HAS_RIGHT": flags.HAS_RIGHT, "CHANGED": flags.CHANGED, "SOFTCAP": flags.SOFTCAP,
                "PRODUCT": self.product, "ALWAYS_MASKED": masked, "num_warps": c.num_warps,
                "num_stages": c.num_stages,
                "enable_fp_fusion": False,  # scores are rounded as in the forward
            }  # fmt: skip
        return found


def run(
    launch: Launch, q: Tensor, k: Tensor, lse: Tensor, column_sums: Tensor | None, entropy: Tensor | None,
    max_logit: Tensor | None, args: Arguments,
) -> None:  # fmt: skip
    """Fills column_sums (B, Hq, Sk), or entropy and max_logit (B, Hq, Sq), from q (B, Hq, Sq, D),
    k (B, Hkv, Sk, D) and lse (B, Hq, Sq); any strides. What belongs to no packed member is 0, and -inf."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
    q, k = arguments.reachable(q, k)
    if column_sums is not None:
        _start(prepared, sum_columns, k.shape[2], prepared.config.block_n, q, k, lse, (column_sums,), args)
    if entropy is not None and max_logit is not None:
        results = (entropy, max_logit)
        _start(prepared, measure_rows, q.shape[2], prepared.config.block_m, q, k, lse, results, args)


def _start(
    prepared: Prepared, kernel: Any, positions: int, block: int, q: Tensor, k: Tensor, lse: Tensor,
    results: tuple[Tensor, ...], args: Arguments,
) -> None:  # fmt: skip
    """One program per block of `positions`, query head and request."""
    flags, n = arguments.flags(q, args), arguments.scalars(q, k, args)
    x = arguments.operands(args, k)
    num_heads, group = q.shape[1], q.shape[1] // k.shape[1]
    constants = prepared.constants_for(flags, q.shape[3], element_masked(args))
    num_tiles, requests = -(-positions // block), n.batch
    if args.cu_seqlens_q is not None:  # members find their tiles; one more for what belongs to nobody
        num_tiles, requests = positions // block + n.batch + 1, 1
    views = (arguments.view(q), arguments.view(k), *(arguments.rows(t) for t in (lse, *results)))
    everything = (
        *views, x, n.batch, num_heads, group, n.seqlen_q, n.seqlen_k, num_tiles, n.offset, n.left, n.right,
        n.scale, n.softcap,
    )  # fmt: skip
    key = (
        kernel.__name__, id(constants), *(w[1:] for w in views), num_heads, group,
        runtime.aligned(q, k, lse, *results), runtime.signature(x),
    )  # fmt: skip
    prepared.kernels.launch(kernel, (num_tiles * num_heads * requests,), everything, constants, key, q.device)
