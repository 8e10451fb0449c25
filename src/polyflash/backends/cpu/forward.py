"""Attention forward on the CPU: O = softmax(scale·QKᵀ, mask)·V and lse, in one pass over the keys.

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), out (B, Hq, Sq, Dv), lse (B, Hq, Sq) float32.
One work item is a kv head, some query heads of its group and a block of query rows; its panels share one copy
of each K/V block. Nothing here imports a compiler until `build()`, which a cached kernel never needs.
"""

from __future__ import annotations

import math
import struct
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash import mask as masks
from polyflash.backends.cpu import configs, pool, runtime
from polyflash.errors import spec_error

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.cpu.configs import KernelKey
    from polyflash.plan import Launch
    from polyflash.spec import Arguments

LOG2E = math.log2(math.e)
FLT_MIN, FLT_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
UNBOUNDED = masks.FAR_SIDE
FLOPS_PER_US = 100_000  # of one core, low on purpose: what the thread decision assumes
KEPT_CUTS = 256  # per route
LEND_FROM_US = 25  # work below this many microseconds stays on the caller
WAKE_FROM_US = 40  # below this, only threads that already spin share it: waking one takes as long as the work


# The int64 argument block. Strides are in bytes; a missing tensor is address 0.
Q, K, V, OUT, LSE = range(0, 5)
Q_BATCH, Q_HEAD, Q_ROW, Q_DIM = range(5, 9)
K_BATCH, K_HEAD, K_ROW, K_DIM = range(9, 13)
V_BATCH, V_HEAD, V_ROW, V_DIM = range(13, 17)
OUT_BATCH, OUT_HEAD, OUT_ROW = range(17, 20)
NUM_KV_HEADS, GROUP, SEQLEN_Q, SEQLEN_K, HEAD_DIM, HEAD_DIM_V = range(20, 26)
SCALE_LOG2, SCALE, SIGN, LEFT, RIGHT, HAS_OFFSET, OFFSET = range(26, 33)
Q_OFFSET, Q_OFFSET_STRIDE, KV_LENS, KV_LENS_STRIDE, KV_STARTS, KV_STARTS_STRIDE = range(33, 39)
MASK, MASK_BATCH, MASK_HEAD, MASK_ROW, MASK_KEY = range(39, 44)
BLOCK_N, HEADS, CHUNKS, ROW_PANELS, ROW_BLOCKS, OTHERS, ZERO = range(44, 51)
# SCALE_LOG2: float32 bits of |scale|·log2(e) and, above them, of what they miss; SCALE: of |scale|; SIGN is
# the sign bit of a negative scale.
# HEADS x ROW_PANELS is an item, CHUNKS items make a group, OTHERS items share a row block. ZERO is 0, read at
# run time: a fill with a known zero would become a call of memset.
TILES = 51  # first of the scratch offsets, in the order of configs.Scratch
T_Q, T_O, T_K, T_V, T_S, T_P, T_STAGE, T_STATS, T_LIMITS, T_BLOCK, T_ZERO, T_GATHER, T_BAD, T_MASK = range(
    TILES, TILES + 14
)

_pack_head = struct.Struct("33q").pack
_NO_OPERANDS = bytes(8 * (MASK_KEY + 1 - Q_OFFSET))


def build(key: KernelKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    from numba import cfunc, njit, types

    from polyflash.backends.cpu import blocks, simd

    stage = blocks.stages(key)
    fill, fill_limits, gather_row, pack_query = (
        stage.fill,
        stage.fill_limits,
        stage.gather_row,
        stage.pack_query,
    )
    load_rows, load_value_rows, load_float_row = stage.load_rows, stage.load_value_rows, stage.load_float_row
    scores, scores_bounded, load_mask, apply_mask = (
        stage.scores, stage.scores_bounded, stage.load_mask, stage.apply_mask,
    )  # fmt: skip
    online_softmax, accumulate, add_seen = stage.online_softmax, stage.accumulate, stage.add_seen
    finalize, store_lse = stage.finalize, stage.store_lse
    arg, load_i32, load_i8, store_i8 = simd.word, simd.load_i32, simd.load_i8, simd.store_i8
    least, greatest = simd.least, simd.greatest

    LANES, NR, NV, MR, PACK = configs.LANES, key.panel_rows, key.nv, key.group_keys, key.pack
    SIZE, MASKED = configs.STORAGE_BYTES[key.storage], key.masked
    Q_PANEL, O_PANEL = key.q_panel_bytes, key.o_panel_bytes
    K_BYTES, V_BYTES = key.k_row_bytes, key.v_row_bytes
    WIDE_BYTES = key.bucket * 4 + configs.LINE
    KEYS_PER_TRIP = min(4, MR // PACK) * PACK
    MINUS_INF = 0xFF800000

    def device(arity, result=types.void):  # type: ignore[no-untyped-def]
        """int64 arguments; inlined, so nothing is seen to raise and the object needs no Python symbol."""
        options = {
            "error_model": "numpy",
            "forceinline": True,
            "no_cpython_wrapper": True,
            "no_cfunc_wrapper": True,
        }
        return njit(result(*[types.int64] * arity), **options)

    @device(4, types.int64)
    def gathered(scratch_row, src, stride, count):  # type: ignore[no-untyped-def]
        """Where the row at `src` can be read with unit stride."""
        if stride == SIZE:
            return src
        gather_row(src, stride, count, scratch_row)
        return scratch_row

    @device(7)
    def load_tile(args, scratch, src, row_stride, dim_stride, rows, dst):  # type: ignore[no-untyped-def]
        """`rows` rows of q or k into scratch rows, zero beyond head_dim."""
        count = arg(args, HEAD_DIM)
        if dim_stride == SIZE:
            load_rows(src, row_stride, rows, count, dst)
        else:
            row = scratch + arg(args, T_GATHER)
            for r in range(rows):
                gather_row(src + r * row_stride, dim_stride, count, row)
                load_rows(row, 0, 1, count, dst + r * K_BYTES)

    @device(9, types.int64)
    def load_value_atoms(args, scratch, src, begin, end, first, last, n, skip_bad):  # type: ignore[no-untyped-def]
        """V rows [begin, end) of key block n, one atom at a time; outside [first, last) or bad: zero."""
        count, stride, dim_stride = arg(args, HEAD_DIM_V), arg(args, V_ROW), arg(args, V_DIM)
        bad, dst = scratch + arg(args, T_BAD) - n, scratch + arg(args, T_V)
        row0 = row1 = zero = scratch + arg(args, T_ZERO)
        gather = scratch + arg(args, T_GATHER)
        found = 0
        for j in range(begin, end, PACK):
            row0 = row1 = zero
            if first <= j < last and not (skip_bad and load_i8(bad + j) != 0):
                row0 = gathered(gather, src + j * stride, dim_stride, count)
            if PACK == 2 and first <= j + 1 < last and not (skip_bad and load_i8(bad + j + 1) != 0):
                row1 = gathered(gather + WIDE_BYTES, src + (j + 1) * stride, dim_stride, count)
            found |= load_value_rows(row0, row1, 0, 1, count, dst + (j - n) // PACK * V_BYTES)
        return found

    @device(6, types.int64)
    def load_value_tile(args, scratch, src, first, last, n):  # type: ignore[no-untyped-def]
        """V rows [first, last) of key block n, zero up to whole groups. Returns whether some are not finite:
        those are marked and zeroed, and `add_bad_rows` adds them."""
        count, stride = arg(args, HEAD_DIM_V), arg(args, V_ROW)
        begin, end = first // MR * MR, (last + MR - 1) // MR * MR
        whole, rest = (first + PACK - 1) // PACK * PACK, last // PACK * PACK
        if arg(args, V_DIM) != SIZE or rest <= whole:
            whole = rest = end
        dst = scratch + arg(args, T_V) + (whole - n) // PACK * V_BYTES
        source = src + whole * stride
        found = load_value_atoms(args, scratch, src, begin, whole, first, last, n, False)
        found |= load_value_rows(source, source + stride, stride * PACK, (rest - whole) // PACK, count, dst)
        found |= load_value_atoms(args, scratch, src, rest, end, first, last, n, False)
        if found != 0:
            row, zero = scratch + arg(args, T_GATHER), scratch + arg(args, T_ZERO)
            for j in range(first, last):
                source = gathered(row, src + j * stride, arg(args, V_DIM), count)
                bad = load_value_rows(source, zero, 0, 1, count, scratch + arg(args, T_STAGE))
                store_i8(scratch + arg(args, T_BAD) + j - n, bad)
            load_value_atoms(args, scratch, src, begin, end, first, last, n, True)
        return found

    @device(7)
    def load_mask_tile(args, scratch, src, row, begin, end, dst):  # type: ignore[no-untyped-def]
        """Mask bytes of one panel from query row `row` on, keys [begin, end), as [key][lane] at `dst`."""
        row_stride, key_stride, seqlen_q = arg(args, MASK_ROW), arg(args, MASK_KEY), arg(args, SEQLEN_Q)
        for lane in range(0, NR, LANES):
            rows = least(LANES, greatest(1, seqlen_q - row - lane))
            source = src + least(row + lane, seqlen_q - 1) * row_stride + begin * key_stride
            if key_stride == 1:
                load_mask(source, row_stride, rows, end - begin, dst + lane)
            else:
                for j in range(end - begin):
                    for i in range(LANES):
                        byte = load_i8(source + least(i, rows - 1) * row_stride + j * key_stride)
                        store_i8(dst + j * NR + lane + i, byte)

    @device(3, types.int64)
    def offset_of(args, i_b, live):  # type: ignore[no-untyped-def]
        if arg(args, Q_OFFSET) != 0:
            return load_i32(arg(args, Q_OFFSET) + i_b * arg(args, Q_OFFSET_STRIDE))
        return arg(args, OFFSET) if arg(args, HAS_OFFSET) != 0 else live - arg(args, SEQLEN_Q)

    @device(4, types.int64)
    def table_entry(args, slot, i_b, default):  # type: ignore[no-untyped-def]
        return load_i32(arg(args, slot) + i_b * arg(args, slot + 1)) if arg(args, slot) != 0 else default

    @device(5)
    def start_panel(args, scratch, src, row, panel):  # type: ignore[no-untyped-def]
        """Q^T of one panel, and its O^T, m_i and l_i at their first values."""
        flip = arg(args, SIGN) | (arg(args, SIGN) >> 16 if PACK == 2 else 0)
        stage_rows, q_panel = scratch + arg(args, T_STAGE), scratch + arg(args, T_Q) + panel * Q_PANEL
        stride, vectors = arg(args, Q_ROW), (arg(args, HEAD_DIM) + PACK * LANES - 1) // (PACK * LANES)
        for lane in range(0, NR, LANES):
            rows = least(LANES, arg(args, SEQLEN_Q) - row - lane)
            if rows > 0:
                load_tile(
                    args, scratch, src + (row + lane) * stride, stride, arg(args, Q_DIM), rows, stage_rows
                )
                pack_query(stage_rows, vectors, q_panel + lane * 4, flip)
        channels = (arg(args, HEAD_DIM_V) + LANES - 1) // LANES * LANES
        fill(scratch + arg(args, T_O) + panel * O_PANEL, channels * NV, arg(args, ZERO))
        stats = scratch + arg(args, T_STATS) + panel * NR * 8
        fill(stats, NV, MINUS_INF)
        fill(stats + NR * 4, NV, arg(args, ZERO))

    @device(9)
    def masked_scores(args, scratch, panel, limits, n, begin, end, inner_begin, inner_end):  # type: ignore[no-untyped-def]
        """S^T of keys n + [begin, end); every row sees all of [inner_begin, inner_end)."""
        k, s = scratch + arg(args, T_K), scratch + arg(args, T_S)
        q, bmax = scratch + arg(args, T_Q) + panel * Q_PANEL, scratch + arg(args, T_BLOCK) + NR * 4
        trips = (arg(args, HEAD_DIM) + 4 * PACK - 1) // (4 * PACK)
        fill(bmax, NV, MINUS_INF)
        if inner_begin > begin:
            groups = (inner_begin - begin) // MR
            scores_bounded(k + begin * K_BYTES, q, s + begin * NR * 4, bmax, trips, groups, limits, n + begin)
        if inner_end > inner_begin:
            groups = (inner_end - inner_begin) // MR
            scores(k + inner_begin * K_BYTES, q, s + inner_begin * NR * 4, bmax, trips, groups)
        if end > inner_end:
            groups = (end - inner_end) // MR
            scores_bounded(
                k + inner_end * K_BYTES, q, s + inner_end * NR * 4, bmax, trips, groups, limits, n + inner_end
            )

    @device(8)
    def add_bad_rows(args, scratch, src, panel, limits, n, begin, end):  # type: ignore[no-untyped-def]
        """The contributions of V rows n + [begin, end) that are not finite, to the rows that see them."""
        count, row = arg(args, HEAD_DIM_V), scratch + arg(args, T_STAGE)
        for j in range(begin, end):
            if load_i8(scratch + arg(args, T_BAD) + j) != 0:
                source = src + (n + j) * arg(args, V_ROW)
                load_float_row(
                    gathered(scratch + arg(args, T_GATHER), source, arg(args, V_DIM), count), count, row
                )
                p = scratch + arg(args, T_P) + j // PACK * NR * 4
                o, mask = scratch + arg(args, T_O) + panel * O_PANEL, scratch + arg(args, T_MASK) + j * NR
                add_seen(p, j % PACK, row, count, o, limits, n + j, mask)

    @device(6)
    def finalize_panel(args, scratch, dst, lse, row, panel):  # type: ignore[no-untyped-def]
        o, stats = scratch + arg(args, T_O) + panel * O_PANEL, scratch + arg(args, T_STATS) + panel * NR * 8
        stride = arg(args, OUT_ROW)
        for lane in range(0, NR, LANES):
            rows = least(LANES, arg(args, SEQLEN_Q) - row - lane)
            if rows > 0:
                at = row + lane
                finalize(
                    o + lane * 4, stats + lane * 4, dst + at * stride, stride, rows, arg(args, HEAD_DIM_V)
                )
                if lse != 0:
                    store_lse(stats + lane * 4, lse + at * 4, rows, arg(args, SCALE))

    @cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy", forceinline=True)
    def kernel(args, item, scratch):  # type: ignore[no-untyped-def]
        others, chunks, hkv, group = (
            arg(args, OTHERS),
            arg(args, CHUNKS),
            arg(args, NUM_KV_HEADS),
            arg(args, GROUP),
        )
        i_m, rest = (
            arg(args, ROW_BLOCKS) - 1 - item // others,
            item % others,
        )  # the last rows see the most keys
        i_hkv, i_b = rest // chunks % hkv, rest // chunks // hkv
        head = i_hkv * group + rest % chunks * arg(args, HEADS)
        heads = least(arg(args, HEADS), (i_hkv + 1) * group - head)
        seqlen_q, seqlen_k, block_n = arg(args, SEQLEN_Q), arg(args, SEQLEN_K), arg(args, BLOCK_N)
        row_0 = i_m * arg(args, ROW_PANELS) * NR
        panels = least(arg(args, ROW_PANELS), (seqlen_q - row_0 + NR - 1) // NR)

        # Row i sees keys [max(start, i + lo_shift), min(live, i + hi_shift)); clamped, shifts fit 32 bits.
        live, start = table_entry(args, KV_LENS, i_b, seqlen_k), table_entry(args, KV_STARTS, i_b, 0)
        offset = offset_of(args, i_b, live)
        lo_shift = least(greatest(offset - arg(args, LEFT), -seqlen_q), seqlen_k)
        hi_shift = least(greatest(offset + arg(args, RIGHT) + 1, -seqlen_q), seqlen_k)
        limits = scratch + arg(args, T_LIMITS)
        fill(scratch + arg(args, T_ZERO), WIDE_BYTES // (LANES * 4), arg(args, ZERO))
        q = arg(args, Q) + i_b * arg(args, Q_BATCH)
        for i_p in range(panels):
            row = row_0 + i_p * NR
            fill_limits(limits + i_p * NR * 8, row, seqlen_q - 1, lo_shift, hi_shift, start, live)
            for i_h in range(heads):
                start_panel(args, scratch, q + (head + i_h) * arg(args, Q_HEAD), row, i_h * panels + i_p)

        k = arg(args, K) + i_b * arg(args, K_BATCH) + i_hkv * arg(args, K_HEAD)
        v = arg(args, V) + i_b * arg(args, V_BATCH) + i_hkv * arg(args, V_HEAD)
        mask = arg(args, MASK) + i_b * arg(args, MASK_BATCH) + head * arg(args, MASK_HEAD)
        key_lo = greatest(start, row_0 + lo_shift)
        key_hi = least(live, least(row_0 + panels * NR, seqlen_q) - 1 + hi_shift)
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            n = i_n * block_n
            first, last = greatest(n, key_lo), least(n + block_n, key_hi)
            k_tile = scratch + arg(args, T_K) + (first - n) * K_BYTES
            load_tile(
                args,
                scratch,
                k + first * arg(args, K_ROW),
                arg(args, K_ROW),
                arg(args, K_DIM),
                last - first,
                k_tile,
            )
            bad = load_value_tile(args, scratch, v, first, last, n)
            for i_p in range(panels):
                row = row_0 + i_p * NR
                end_row = least(row + NR, seqlen_q) - 1
                # block_range: groups of keys some row sees, and inside them those that every row sees
                begin = (greatest(first, row + lo_shift) - n) // MR * MR
                end = (least(last, end_row + hi_shift) - n + MR - 1) // MR * MR
                if end <= begin:
                    continue
                inner_begin = least(
                    greatest((greatest(start, end_row + lo_shift) - n + MR - 1) // MR * MR, begin), end
                )
                inner_end = least(greatest((least(live, row + hi_shift) - n) // MR * MR, inner_begin), end)
                lane_limits = limits + i_p * NR * 8
                for i_h in range(heads):
                    panel = i_h * panels + i_p
                    masked_scores(args, scratch, panel, lane_limits, n, begin, end, inner_begin, inner_end)
                    s, block = scratch + arg(args, T_S) + begin * NR * 4, scratch + arg(args, T_BLOCK)
                    p = scratch + arg(args, T_P) + begin // PACK * NR * 4
                    if MASKED:
                        tile = scratch + arg(args, T_MASK) + begin * NR
                        source = mask + i_h * arg(args, MASK_HEAD)
                        load_mask_tile(args, scratch, source, row, n + begin, least(n + end, seqlen_k), tile)
                        apply_mask(s, tile, end - begin, block + NR * 4)
                    stats = scratch + arg(args, T_STATS) + panel * NR * 8
                    online_softmax(s, p, (end - begin) // 4, block, stats, arg(args, SCALE_LOG2))
                    o = scratch + arg(args, T_O) + panel * O_PANEL
                    values = scratch + arg(args, T_V) + begin // PACK * V_BYTES
                    trips, channels = (end - begin) // KEYS_PER_TRIP, (arg(args, HEAD_DIM_V) + MR - 1) // MR
                    accumulate(values, p, trips, o, block, channels)
                    if bad != 0:
                        add_bad_rows(
                            args,
                            scratch,
                            v,
                            panel,
                            lane_limits,
                            n,
                            greatest(begin, first - n),
                            least(end, last - n),
                        )

        out = arg(args, OUT) + i_b * arg(args, OUT_BATCH)
        lse_head = (i_b * hkv * group + head) * seqlen_q * 4
        for i_p in range(panels):
            for i_h in range(heads):
                lse = arg(args, LSE) + lse_head + i_h * seqlen_q * 4 if arg(args, LSE) != 0 else 0
                dst = out + (head + i_h) * arg(args, OUT_HEAD)
                finalize_panel(args, scratch, dst, lse, row_0 + i_p * NR, i_h * panels + i_p)

    return kernel


class _Cut(NamedTuple):
    """How a call of one shape is run: its kernel, items and scratch, and the end of its argument block."""

    kernel: int
    items: int
    scratch_bytes: int
    tail: bytes


class _Prepared:
    """What a route keeps between calls: cuts by batch, length, threads and mask presence. Entries are only
    added, or dropped all at once, so Python threads may share it."""

    __slots__ = ("cuts", "launch")

    def __init__(self, launch: Launch) -> None:
        compute = configs.compute_for(launch.spec.dtype, launch.target)
        if launch.config.compute != compute:
            change = "Take the compute of explain(...).config."
            raise spec_error("config.compute", got=launch.config.compute, wanted=compute, change=change)
        self.launch = launch
        self.cuts: dict[tuple[int, int, int, bool], _Cut] = {}

    def add(self, index: tuple[int, int, int, bool]) -> _Cut:
        batch, seqlen_q, threads, masked = index
        spec, config = self.launch.spec, self.launch.config
        key = configs.key_for(
            spec.dtype, seqlen_q, max(spec.head_dim, spec.head_dim_v), masked, config.compute
        )
        cut = configs.partition(
            batch, spec.num_kv_heads, spec.group, seqlen_q, key.panel_rows, config.panels, threads
        )
        tiles = configs.scratch(key, cut.heads, cut.row_panels, config.block_n)
        blocks = (config.block_n, cut.heads, cut.chunks, cut.row_panels, cut.row_blocks)
        tail = array("q", (*blocks, cut.items // cut.row_blocks, 0, *tiles)).tobytes()
        if len(self.cuts) >= KEPT_CUTS:
            self.cuts = {}
        made = self.cuts[index] = _Cut(runtime.load(key), cut.items, tiles.total, tail)
        return made


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fill `out` and, if asked for, `lse`. Sizes are positive; the argument block is this call's own."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = _Prepared(launch)
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    _, num_kv_heads, seqlen_k, head_dim_v = v.shape
    mask, causal = args.mask, args.causal
    left = UNBOUNDED if args.window_left is None else min(args.window_left, UNBOUNDED)
    right = UNBOUNDED if args.window_right is None else min(args.window_right, UNBOUNDED)
    if causal:
        right = min(right, 0)
    dims = head_dim + head_dim_v
    work_us = _estimated_us(batch * num_q_heads, seqlen_q, seqlen_k, dims, left, right)
    threads = 1 if work_us < LEND_FROM_US else torch.get_num_threads()
    index = batch, seqlen_q, threads, mask is not None
    cut = prepared.cuts.get(index) or prepared.add(index)
    size = q.element_size()
    q_b, q_h, q_r, q_d = q.stride()
    k_b, k_h, k_r, k_d = k.stride()
    v_b, v_h, v_r, v_d = v.stride()
    o_b, o_h, o_r, _ = out.stride()
    if head_dim == 1:
        q_d = k_d = 1
    if head_dim_v == 1:
        v_d = 1
    scale, plain_scale, sign = _scale_bits(head_dim**-0.5 if args.scale is None else args.scale)
    offset = None if args.offset is None else max(-masks.FAR_OFFSET, min(args.offset, masks.FAR_OFFSET))
    head = _pack_head(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr() if args.need_lse else 0,
        *(q_b * size, q_h * size, q_r * size, q_d * size),
        *(k_b * size, k_h * size, k_r * size, k_d * size),
        *(v_b * size, v_h * size, v_r * size, v_d * size),
        *(o_b * size, o_h * size, o_r * size),
        *(num_kv_heads, num_q_heads // num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v),
        *(scale, plain_scale, sign, left, right, offset is not None, offset or 0),
    )
    block = array("q", head + _operands(args) + cut.tail)
    pool.run(
        cut.kernel, block.buffer_info()[0], cut.items, threads, cut.scratch_bytes, work_us >= WAKE_FROM_US
    )
    return out, lse


def _operands(args: Arguments) -> bytes:
    """Q_OFFSET to MASK_KEY: addresses and byte strides of the optional tensors."""
    q_offset, kv_lens, kv_starts, mask = args.q_offset, args.kv_lens, args.kv_starts, args.mask
    if q_offset is None and kv_lens is None and kv_starts is None and mask is None:
        return _NO_OPERANDS
    slots = (*_table(q_offset), *_table(kv_lens), *_table(kv_starts), *_mask_slots(mask))
    return array("q", slots).tobytes()


def _estimated_us(heads: int, seqlen_q: int, seqlen_k: int, dims: int, left: int, right: int) -> int:
    """Work of a call on one core; reads no tensor."""
    keys = min(seqlen_k, left + 1 + right)
    half = 1 if right == 0 and keys == seqlen_k else 2
    return dims * half * heads * seqlen_q * keys // FLOPS_PER_US


@lru_cache(maxsize=64)
def _scale_bits(scale: float) -> tuple[int, int, int]:
    """|scale|·log2(e) as two float32 (the high one in the low bits), |scale| as one, and the sign bit.

    Scale 0 is the least normal number: scores up to 1e30 become equal, and -inf stays -inf.
    """
    size = min(max(abs(scale), FLT_MIN), FLT_MAX)
    exact = min(size * LOG2E, FLT_MAX)
    (high,) = struct.unpack("<f", struct.pack("<f", exact))
    both, plain = struct.unpack("<qI", struct.pack("<fff", high, exact - high, size))
    return both, plain, 0x80000000 if scale < 0 else 0


def _table(per_batch: Tensor | None) -> tuple[int, int]:
    return (0, 0) if per_batch is None else (per_batch.data_ptr(), 4 * per_batch.stride(0))


def _mask_slots(mask: Tensor | None) -> tuple[int, ...]:
    """Address and byte strides over (batch, head, row, key); a broadcast dimension has stride 0."""
    if mask is None:
        return 0, 0, 0, 0, 0
    strides = [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)]
    return (mask.data_ptr(), *[0] * (4 - len(strides)), *strides)
