"""Sums and extremes of the weights on the CPU: column sums, or entropy and largest score of every row.

    p = exp(S - lse)      column_sums_j = Σ_i p_ij      entropy_i = -Σ_j p_ij·ln p_ij      max_j S_ij

One more pass over the tiles of scores, without V. One work item is a query head and a range of its rows,
which pass over the keys in spans; all sums are float32 in an order that no thread changes.
"""

from __future__ import annotations

from array import array
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import configs, loading, packing, pool, runtime, statistics_configs

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.cpu.configs import Scratch
    from polyflash.backends.cpu.statistics_configs import StatisticsKey
    from polyflash.plan import Launch
    from polyflash.spec import Arguments

_next = count(a.T_STAGED + 1).__next__
# The table of entries; column sums (0: not wanted), copies of them COLUMNS_COPY bytes apart; entropy and
# largest score (0: not wanted), with the strides of lse.
ENTRIES, COLUMNS, COLUMNS_COPY, COLUMNS_BATCH, COLUMNS_HEAD, ENTROPY, MAX_LOGIT = (_next() for _ in range(7))


def build(key: StatisticsKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    from numba import cfunc, types

    from polyflash.backends.cpu import simd, statistics_blocks

    stage: Any = statistics_blocks.stages(key)
    fill, fill_limits, pack_query = stage.fill, stage.fill_limits, stage.pack_query
    scores, scores_bounded, start_rows = stage.scores, stage.scores_bounded, stage.start_rows
    add_to_columns, add_to_rows = stage.add_to_columns, stage.add_to_rows
    reduce_columns, finish_rows = stage.reduce_columns, stage.finish_rows
    arg, load_i32, load_i8 = simd.word, simd.load_i32, simd.load_i8
    store_i64, least, greatest, call_pass = simd.store_i64, simd.least, simd.greatest, simd.call_native(9)
    shared = loading.loaders(key, stage)
    load_tile, stand = shared.load_tile, shared.stand
    device = loading.device

    LANES, NR, MR, PACK, STEP = key.lanes, key.panel_rows, key.group_keys, key.pack, configs.STEP
    PANEL, K_BYTES = key.q_panel_bytes, key.k_row_bytes
    MINUS_INF = 0xFF800000

    @device(5)
    def start_panel(args, scratch, q, lse, i_p):  # type: ignore[no-untyped-def]
        """Q^T of one panel of the span, and the stats of its rows at their first values."""
        item = scratch + arg(args, a.T_ITEM)
        row, row_end = arg(item, a.I_ROW) + i_p * NR, arg(item, a.I_ROW_END)
        flip = arg(args, a.SIGN) | (arg(args, a.SIGN) >> 16 if PACK == 2 else 0)
        stage_rows, q_panel = scratch + arg(args, a.T_STAGE), scratch + arg(args, a.T_Q) + i_p * PANEL
        stats, stride, dim = (
            scratch + arg(args, a.T_STATS) + i_p * NR * 16,
            arg(args, a.Q_ROW),
            arg(args, a.Q_DIM),
        )
        channels = arg(args, a.HEAD_DIM)
        vectors = (channels + PACK * LANES - 1) // (PACK * LANES)
        for lane in range(0, NR, LANES):
            rows = greatest(least(LANES, row_end - row - lane), 0)
            start_rows(lse + (row + lane) * 4, rows, stats + lane * 4)
            if rows > 0:
                load_tile(args, scratch, q + (row + lane) * stride, stride, dim, rows, channels, stage_rows)
                pack_query(stage_rows, vectors, q_panel + lane * 4, flip)

    @device(7)
    def tile_scores(args, scratch, i_p, n, begin, end, bounded):  # type: ignore[no-untyped-def]
        """S^T of keys n + [begin, end) of one panel, -inf outside the limits of a row if `bounded`."""
        if end <= begin:
            return
        k, s = scratch + arg(args, a.T_K) + begin * K_BYTES, scratch + arg(args, a.T_S) + begin * NR * 4
        q, top = scratch + arg(args, a.T_Q) + i_p * PANEL, scratch + arg(args, a.T_BLOCK) + NR * 4
        trips, groups = (arg(args, a.HEAD_DIM) + 4 * PACK - 1) // (4 * PACK), (end - begin) // MR
        if bounded != 0:
            limits = scratch + arg(args, a.T_LIMITS) + i_p * NR * 8
            scores_bounded(k, q, s, top, trips, groups, limits, n + begin)
        else:
            scores(k, q, s, top, trips, groups)

    @device(4)
    def measure(args, scratch, i_p, n):  # type: ignore[no-untyped-def]
        """One tile: a panel of the span against the key block."""
        item, changes = scratch + arg(args, a.T_ITEM), arg(args, a.PASS)
        first, last = arg(item, a.I_FIRST), arg(item, a.I_LAST)
        lo_shift, hi_shift = arg(item, a.I_LO_SHIFT), arg(item, a.I_HI_SHIFT)
        row = arg(item, a.I_ROW) + i_p * NR
        end_row = least(row + NR, arg(item, a.I_ROW_END)) - 1
        # block_range: groups of keys some row sees, and inside them those that every row sees
        lo, hi = greatest(first, row + lo_shift) - n, least(last, end_row + hi_shift) - n
        kind = a.PLAIN
        if changes != 0:
            kind = load_i8(scratch + arg(args, a.T_KINDS) + i_p)
        if hi <= lo or kind == a.UNSEEN:
            return
        step = MR if kind == a.PLAIN else STEP
        begin, end = lo // step * step, (hi + step - 1) // step * step
        seen_by_all = greatest(arg(item, a.I_START), end_row + lo_shift) - n
        all_end = least(arg(item, a.I_LIVE), row + hi_shift) - n
        if kind == a.PLAIN:
            inner_begin = least(greatest((seen_by_all + MR - 1) // MR * MR, begin), end)
            inner_end = least(greatest(all_end // MR * MR, inner_begin), end)
            tile_scores(args, scratch, i_p, n, begin, inner_begin, 1)
            tile_scores(args, scratch, i_p, n, inner_begin, inner_end, 0)
            tile_scores(args, scratch, i_p, n, inner_end, end, 1)
        else:
            tile_scores(args, scratch, i_p, n, begin, end, 0)
            bounded = 1 if begin < seen_by_all or end > all_end else 0
            head = arg(item, a.I_HEAD)
            call_pass(changes, args, scratch, a.CHANGE_SCORES, head, i_p, n, begin, end, bounded)
        s, stats = scratch + arg(args, a.T_S) + begin * NR * 4, scratch + arg(args, a.T_STATS) + i_p * NR * 16
        if arg(args, COLUMNS) != 0:
            columns = scratch + arg(args, a.T_V) + begin * LANES * 4
            add_to_columns(s, stats, arg(args, a.SCALE), end - begin, columns)
        else:
            add_to_rows(s, stats, arg(args, a.SCALE), (end - begin) // 4)

    @device(5)
    def measure_interval(args, scratch, k, columns, start):  # type: ignore[no-untyped-def]
        """The keys [start, I_LIVE) of the span, block by block."""
        item, block_n = scratch + arg(args, a.T_ITEM), arg(args, a.BLOCK_N)
        row_0, row_end, live = arg(item, a.I_ROW), arg(item, a.I_ROW_END), arg(item, a.I_LIVE)
        lo_shift, hi_shift, panels = arg(item, a.I_LO_SHIFT), arg(item, a.I_HI_SHIFT), arg(item, a.I_PANELS)
        limits, sums = scratch + arg(args, a.T_LIMITS), scratch + arg(args, a.T_V)
        for i_p in range(panels):
            fill_limits(limits + i_p * NR * 8, row_0 + i_p * NR, row_end - 1, lo_shift, hi_shift, start, live)
        key_lo, key_hi = greatest(start, row_0 + lo_shift), least(live, row_end - 1 + hi_shift)
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            n = i_n * block_n
            first, last = greatest(n, key_lo), least(n + block_n, key_hi)
            if last <= first:
                continue
            store_i64(item + 8 * a.I_KEY, n)
            store_i64(item + 8 * a.I_FIRST, first)
            store_i64(item + 8 * a.I_LAST, last)
            if arg(args, a.PASS) != 0:
                call_pass(arg(args, a.PASS), args, scratch, a.START_BLOCK, 0, 0, 0, 0, 0, 0)
                if arg(item, a.I_ANY) == 0:
                    continue
            tile, k_row = scratch + arg(args, a.T_K) + (first - n) * K_BYTES, arg(args, a.K_ROW)
            dim, channels = arg(args, a.K_DIM), arg(args, a.HEAD_DIM)
            load_tile(args, scratch, k + first * k_row, k_row, dim, last - first, channels, tile)
            begin, end = (first - n) // STEP * STEP, (last - n + STEP - 1) // STEP * STEP
            if columns != 0:
                fill(sums + begin * LANES * 4, end - begin, arg(args, a.ZERO))
            for i_p in range(panels):
                measure(args, scratch, i_p, n)
            if columns != 0:
                dst, readable = columns + (n + begin) * 4, arg(item, a.I_SEQLEN_K) - n - begin
                reduce_columns(sums + begin * LANES * 4, end - begin, dst, readable)

    @device(9)
    def measure_span(args, scratch, q, k, stats_at, columns, pairs, start, live):  # type: ignore[no-untyped-def]
        """The rows [I_ROW, I_ROW_END) against the keys of [start, live) that they see. `pairs`: their list of
        intervals, or 0. `stats_at`: where their lse and results begin, in bytes."""
        item = scratch + arg(args, a.T_ITEM)
        row_0, row_end, head = arg(item, a.I_ROW), arg(item, a.I_ROW_END), arg(item, a.I_HEAD)
        panels = (row_end - row_0 + NR - 1) // NR
        store_i64(item + 8 * a.I_PANELS, panels)
        for i_p in range(panels):
            start_panel(args, scratch, q, arg(args, a.LSE) + stats_at, i_p)
        if arg(args, a.PASS) != 0:
            call_pass(arg(args, a.PASS), args, scratch, a.START_ITEM, 0, 0, 0, 0, 0, 0)
        lists = arg(args, a.INTERVAL_COUNT) if pairs != 0 else 1
        for t in range(lists):
            begin, end = start, live
            if pairs != 0:
                begin, end = (
                    greatest(start, load_i32(pairs + 8 * t)),
                    least(live, load_i32(pairs + 8 * t + 4)),
                )
            if begin < end:
                store_i64(item + 8 * a.I_START, begin)
                store_i64(item + 8 * a.I_LIVE, end)
                measure_interval(args, scratch, k, columns, begin)
        if arg(args, ENTROPY) != 0:
            sink = MINUS_INF
            if arg(args, a.SINKS) != 0:
                sink = load_i32(arg(args, a.SINKS) + 4 * head)
            entropy, top = arg(args, ENTROPY) + stats_at, arg(args, MAX_LOGIT) + stats_at
            for i_p in range(panels):
                for lane in range(0, NR, LANES):
                    row = row_0 + i_p * NR + lane
                    rows = least(LANES, row_end - row)
                    if rows > 0:
                        at = scratch + arg(args, a.T_STATS) + i_p * NR * 16 + lane * 4
                        finish_rows(at, entropy + row * 4, top + row * 4, rows, arg(args, a.SCALE), sink)

    @cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy", forceinline=True)
    def kernel(args, number, scratch):  # type: ignore[no-untyped-def]
        group = arg(args, a.GROUP)
        heads = group * arg(args, a.NUM_KV_HEADS)
        entry, head = arg(args, ENTRIES) + number // heads * 16, number % heads
        i_b = load_i32(entry)
        item = scratch + arg(args, a.T_ITEM)
        i_t, first_q, first_k, seqlen_q, start, live = stand(args, scratch, i_b)
        store_i64(item + 8 * a.I_HEAD, head)
        store_i64(item + 8 * a.I_HEADS, 1)

        q = arg(args, a.Q) + i_t * arg(args, a.Q_BATCH) + head * arg(args, a.Q_HEAD)
        q += first_q * arg(args, a.Q_ROW)
        k = arg(args, a.K) + i_t * arg(args, a.K_BATCH) + head // group * arg(args, a.K_HEAD)
        k += first_k * arg(args, a.K_ROW)
        stats_at = 4 * (i_t * arg(args, a.LSE_BATCH) + head * arg(args, a.LSE_HEAD) + first_q)
        columns = arg(args, COLUMNS)
        if columns != 0:
            columns += load_i32(entry + 12) * arg(args, COLUMNS_COPY) + i_t * arg(args, COLUMNS_BATCH)
            columns += head * arg(args, COLUMNS_HEAD) + first_k * 4

        # A span lies within one row block of interval lists.
        first_row, last_row = load_i32(entry + 4), least(load_i32(entry + 8), seqlen_q)
        span, block_rows, lists = arg(args, a.ROW_PANELS) * NR, greatest(seqlen_q, 1), arg(args, a.INTERVALS)
        if lists != 0:
            block_rows = arg(args, a.INTERVAL_ROWS)
        for i_r in range(first_row // block_rows, (last_row + block_rows - 1) // block_rows):
            pairs = 0
            if lists != 0:
                pairs = lists + i_b * arg(args, a.INTERVALS_BATCH) + head * arg(args, a.INTERVALS_HEAD)
                pairs += i_r * arg(args, a.INTERVALS_BLOCK)
            base, limit = greatest(first_row, i_r * block_rows), least(last_row, (i_r + 1) * block_rows)
            for i_s in range((limit - base + span - 1) // span):
                row = base + i_s * span
                store_i64(item + 8 * a.I_ROW, row)
                store_i64(item + 8 * a.I_ROW_END, least(row + span, limit))
                measure_span(args, scratch, q, k, stats_at, columns, pairs, start, live)

    return kernel


class _Prepared:
    """What a route keeps between calls; entries are only added, so Python threads may share it."""

    __slots__ = ("kernels", "launch", "passes")

    def __init__(self, launch: Launch) -> None:
        configs.check_fits(launch.config, launch.spec, launch.target)
        self.launch = launch
        self.passes: dict[int, int] = {}
        self.kernels: dict[tuple[int, int], tuple[int, Scratch]] = {}

    def score_pass(self, nv: int) -> int:
        """The address of the pass over scores for panels of `nv` vectors."""
        found = self.passes.get(nv)
        if found is None:
            found = self.passes[nv] = runtime.load(configs.ScoreKey(self.launch.config.isa, nv))
        return found

    def kernel(self, nv: int, row_panels: int) -> tuple[int, Scratch]:
        """The kernel with panels of `nv` vectors, and its scratch for spans of `row_panels`."""
        found = self.kernels.get((nv, row_panels))
        if found is None:
            spec, config = self.launch.spec, self.launch.config
            key = statistics_configs.key_for(config, spec.dtype, spec.head_dim, nv)
            tiles = statistics_configs.scratch(key, row_panels, config.block_n)
            found = self.kernels[nv, row_panels] = runtime.load(key), tiles
        return found


def run(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    column_sums: Tensor | None,
    entropy: Tensor | None,
    max_logit: Tensor | None,
    args: Arguments,
) -> None:
    """Fills column_sums (B, Hq, Sk), or entropy and max_logit (B, Hq, Sq), all contiguous, from
    q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and lse (B, Hq, Sq). What belongs to no packed member is 0, and
    -inf."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = _Prepared(launch)
    config, (batch, num_q_heads, seqlen_q, head_dim) = launch.config, q.shape
    if args.cu_seqlens_q is None:
        lens_q = np.full(batch, seqlen_q)
    else:
        lens_q, _ = packing.member_lengths(args)
        for x, value in ((entropy, 0.0), (max_logit, -torch.inf)):
            if x is not None:
                x.fill_(value)
    nv = configs.panel_vectors(config.isa, int(lens_q.max(initial=1)))
    rows = nv * configs.ISAS[config.isa].lanes
    row_panels = min(config.panels, max(1, -(-int(lens_q.max(initial=1)) // rows)))
    kernel, tiles = prepared.kernel(nv, row_panels)
    entries, copies = statistics_configs.ranges(lens_q, rows)
    sums = None if column_sums is None else _zeros(copies, column_sums)
    lse = lse.contiguous()
    left, right = a.window_sides(args)
    work_us = a.estimated_us(q.shape, k.shape[2], head_dim, left, right, args)
    threads = 1 if work_us < a.LEND_FROM_US else torch.get_num_threads()
    kept: list[Any] = []
    scale = head_dim**-0.5 if args.scale is None else args.scale
    does = a.passes(args, scale)
    words = array("q", (
        *_tensor_words(q, k, lse),
        *a.softmax_scale(scale, does),
        *(left, right, args.offset is not None, a.far_offset(args.offset)),
        *(a.sinks_address(args.sinks, kept), prepared.score_pass(nv) if does else 0),
        *array("q", a.operands(args, scale, does, kept, 0)),
        *(config.block_n, 1, 1, row_panels, 1, 1, 0),
        *tiles[:-1],
        entries.ctypes.data,
        *((0,) * 4 if sums is None else (sums.data_ptr(), *(4 * s for s in sums.stride()[:3]))),
        *(0 if x is None else x.data_ptr() for x in (entropy, max_logit)),
    ))  # fmt: skip
    items = len(entries) * num_q_heads
    if items:
        address = words.buffer_info()[0]
        pool.run(kernel, address, items, threads, tiles.total, work_us >= a.WAKE_FROM_US)
    if column_sums is not None and sums is not None:
        for copy in sums[1:]:
            sums[0] += copy
        column_sums.copy_(sums[0])


def _zeros(copies: int, like: Tensor) -> Tensor:
    return like.new_zeros((copies, *like.shape))


def _tensor_words(q: Tensor, k: Tensor, lse: Tensor) -> tuple[int, ...]:
    """Q to HEAD_DIM_V; there are no V and no out."""
    (_, num_q_heads, seqlen_q, head_dim), (_, num_kv_heads, seqlen_k, _) = q.shape, k.shape
    size, strides = q.element_size(), []
    for x in (q, k):
        strides += [s * size for s in x.stride()[:3]] + [size if head_dim == 1 else x.stride(3) * size]
    return (
        *(q.data_ptr(), k.data_ptr(), 0, 0, lse.data_ptr()),
        *(*strides, 0, 0, 0, 0),
        *(0, 0, 0, num_q_heads * seqlen_q, seqlen_q),
        *(num_kv_heads, num_q_heads // num_kv_heads, seqlen_q, seqlen_k, head_dim, 0),
    )
