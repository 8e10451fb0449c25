"""Sums and extremes of the weights on the CPU: column sums, or entropy and largest score of every row.

    p = exp(S - lse)      column_sums_j = Σ_i p_ij      entropy_i = -Σ_j p_ij·ln p_ij      max_j S_ij

One more pass over the tiles of scores, without V. One work item is a query head and a range of its rows,
which pass over the keys in spans; all sums are float32 in an order that no thread changes.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polyflash.backends.cpu import (
    arguments,
    configs,
    loading,
    packing,
    pool,
    runtime,
    statistics_configs,
)  # fmt: skip
from polyflash.backends.cpu.words import (
    CHANGE_SCORES,
    PLAIN,
    START_BLOCK,
    START_ITEM,
    STATISTICS,
    UNSEEN,
    Cut,
    Statistics,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.cpu.configs import Scratch
    from polyflash.backends.cpu.statistics_configs import StatisticsKey
    from polyflash.plan import Launch
    from polyflash.spec import Arguments


def build(key: StatisticsKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    from polyflash.backends.cpu import simd, statistics_blocks
    from polyflash.backends.cpu.simd import greatest, least, load_i8, load_i32
    from polyflash.backends.cpu.structs import Blocks

    stage, block = statistics_blocks.stages(key), Blocks(STATISTICS)
    shared, device, tiles_at, call_pass = (
        loading.loaders(key, stage),
        block.device,
        block.tiles(),
        simd.call_native(9),
    )

    LANES, NR, MR, PACK, STEP = key.lanes, key.panel_rows, key.group_keys, key.pack, configs.STEP
    PANEL, K_BYTES = key.q_panel_bytes, key.k_row_bytes
    MINUS_INF = 0xFF800000

    @device
    def start_panel(tile, q, lse, i_p):
        """Q^T of one panel of the span, and the stats of its rows at their first values."""
        args, item = tile.args, tile.item
        row, row_end = item.row + i_p * NR, item.row_end
        flip = args.sign | (args.sign >> 16 if PACK == 2 else 0)
        stage_rows, q_panel = tile.stage, tile.q + i_p * PANEL
        stats, stride, dim = (
            tile.stats + i_p * NR * 16,
            args.q_row,
            args.q_dim,
        )
        channels = args.head_dim
        vectors = (channels + PACK * LANES - 1) // (PACK * LANES)
        for lane in range(0, NR, LANES):
            rows = greatest(least(LANES, row_end - row - lane), 0)
            stage.start_rows(lse + (row + lane) * 4, rows, stats + lane * 4)
            if rows > 0:
                shared.load_tile(tile, q + (row + lane) * stride, stride, dim, rows, channels, stage_rows)
                stage.pack_query(stage_rows, vectors, q_panel + lane * 4, flip)

    @device
    def tile_scores(tile, i_p, n, begin, end, bounded):
        """S^T of keys n + [begin, end) of one panel, -inf outside the limits of a row if `bounded`."""
        args = tile.args
        if end <= begin:
            return
        k, s = tile.k + begin * K_BYTES, tile.s + begin * NR * 4
        q, top = tile.q + i_p * PANEL, tile.block + NR * 4
        trips, groups = (args.head_dim + 4 * PACK - 1) // (4 * PACK), (end - begin) // MR
        if bounded != 0:
            limits = tile.limits + i_p * NR * 8
            stage.scores_bounded(k, q, s, top, trips, groups, limits, n + begin)
        else:
            stage.scores(k, q, s, top, trips, groups)

    @device
    def measure(tile, i_p, n):
        """One tile: a panel of the span against the key block."""
        args = tile.args
        item, changes = tile.item, args.score_pass
        first, last = item.first, item.last
        lo_shift, hi_shift = item.lo_shift, item.hi_shift
        row = item.row + i_p * NR
        end_row = least(row + NR, item.row_end) - 1
        # block_range: groups of keys some row sees, and inside them those that every row sees
        lo, hi = greatest(first, row + lo_shift) - n, least(last, end_row + hi_shift) - n
        kind = PLAIN
        if changes != 0:
            kind = load_i8(tile.kinds + i_p)
        if hi <= lo or kind == UNSEEN:
            return
        step = MR if kind == PLAIN else STEP
        begin, end = lo // step * step, (hi + step - 1) // step * step
        seen_by_all = greatest(item.start, end_row + lo_shift) - n
        all_end = least(item.live, row + hi_shift) - n
        if kind == PLAIN:
            inner_begin = least(greatest((seen_by_all + MR - 1) // MR * MR, begin), end)
            inner_end = least(greatest(all_end // MR * MR, inner_begin), end)
            tile_scores(tile, i_p, n, begin, inner_begin, 1)
            tile_scores(tile, i_p, n, inner_begin, inner_end, 0)
            tile_scores(tile, i_p, n, inner_end, end, 1)
        else:
            tile_scores(tile, i_p, n, begin, end, 0)
            bounded = 1 if begin < seen_by_all or end > all_end else 0
            head = item.head
            call_pass(changes, args, tile, CHANGE_SCORES, head, i_p, n, begin, end, bounded)
        s, stats = tile.s + begin * NR * 4, tile.stats + i_p * NR * 16
        if args.columns != 0:
            columns = tile.column_sums + begin * LANES * 4
            stage.add_to_columns(s, stats, args.scale, end - begin, columns)
        else:
            stage.add_to_rows(s, stats, args.scale, (end - begin) // 4)

    @device
    def measure_interval(tile, k, columns, start):
        """The keys [start, live) of the span, block by block."""
        args = tile.args
        item, block_n = tile.item, args.block_n
        row_0, row_end, live = item.row, item.row_end, item.live
        lo_shift, hi_shift, panels = item.lo_shift, item.hi_shift, item.panels
        limits, sums = tile.limits, tile.column_sums
        for i_p in range(panels):
            stage.fill_limits(
                limits + i_p * NR * 8, row_0 + i_p * NR, row_end - 1, lo_shift, hi_shift, start, live
            )
        key_lo, key_hi = greatest(start, row_0 + lo_shift), least(live, row_end - 1 + hi_shift)
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            n = i_n * block_n
            first, last = greatest(n, key_lo), least(n + block_n, key_hi)
            if last <= first:
                continue
            item.key = n
            item.first = first
            item.last = last
            if args.score_pass != 0:
                call_pass(args.score_pass, args, tile, START_BLOCK, 0, 0, 0, 0, 0, 0)
                if item.any_seen == 0:
                    continue
            k_tile, k_row = tile.k + (first - n) * K_BYTES, args.k_row
            dim, channels = args.k_dim, args.head_dim
            shared.load_tile(tile, k + first * k_row, k_row, dim, last - first, channels, k_tile)
            begin, end = (first - n) // STEP * STEP, (last - n + STEP - 1) // STEP * STEP
            if columns != 0:
                stage.fill(sums + begin * LANES * 4, end - begin, args.zero)
            for i_p in range(panels):
                measure(tile, i_p, n)
            if columns != 0:
                dst, readable = columns + (n + begin) * 4, item.seqlen_k - n - begin
                stage.reduce_columns(sums + begin * LANES * 4, end - begin, dst, readable)

    @device
    def measure_span(tile, q, k, stats_at, columns, pairs, start, live):
        """The rows [row, row_end) of the item against the keys of [start, live) that they see. `pairs`: their
        list of intervals, or 0. `stats_at`: where their lse and results begin, in bytes."""
        args, item = tile.args, tile.item
        row_0, row_end, head = item.row, item.row_end, item.head
        panels = (row_end - row_0 + NR - 1) // NR
        item.panels = panels
        for i_p in range(panels):
            start_panel(tile, q, args.lse + stats_at, i_p)
        if args.score_pass != 0:
            call_pass(args.score_pass, args, tile, START_ITEM, 0, 0, 0, 0, 0, 0)
        lists = args.interval_count if pairs != 0 else 1
        for t in range(lists):
            begin, end = start, live
            if pairs != 0:
                begin, end = (
                    greatest(start, load_i32(pairs + 8 * t)),
                    least(live, load_i32(pairs + 8 * t + 4)),
                )
            if begin < end:
                item.start = begin
                item.live = end
                measure_interval(tile, k, columns, begin)
        if args.entropy != 0:
            sink = MINUS_INF
            if args.sinks != 0:
                sink = load_i32(args.sinks + 4 * head)
            entropy, top = args.entropy + stats_at, args.max_logit + stats_at
            for i_p in range(panels):
                for lane in range(0, NR, LANES):
                    row = row_0 + i_p * NR + lane
                    rows = least(LANES, row_end - row)
                    if rows > 0:
                        at = tile.stats + i_p * NR * 16 + lane * 4
                        stage.finish_rows(at, entropy + row * 4, top + row * 4, rows, args.scale, sink)

    @block.kernel
    def kernel(args, number, scratch):
        tile = tiles_at(args, scratch)
        group = args.group
        heads = group * args.num_kv_heads
        entry, head = args.entries + number // heads * 16, number % heads
        i_b = load_i32(entry)
        item = tile.item
        i_t, first_q, first_k, seqlen_q, start, live = shared.stand(tile, i_b)
        item.head = head
        item.heads = 1

        q = args.q + i_t * args.q_batch + head * args.q_head
        q += first_q * args.q_row
        k = args.k + i_t * args.k_batch + head // group * args.k_head
        k += first_k * args.k_row
        stats_at = 4 * (i_t * args.lse_batch + head * args.lse_head + first_q)
        columns = args.columns
        if columns != 0:
            columns += load_i32(entry + 12) * args.columns_copy + i_t * args.columns_batch
            columns += head * args.columns_head + first_k * 4

        # A span lies within one row block of interval lists.
        first_row, last_row = load_i32(entry + 4), least(load_i32(entry + 8), seqlen_q)
        span, block_rows, lists = args.row_panels * NR, greatest(seqlen_q, 1), args.intervals
        if lists != 0:
            block_rows = args.interval_rows
        for i_r in range(first_row // block_rows, (last_row + block_rows - 1) // block_rows):
            pairs = 0
            if lists != 0:
                pairs = lists + i_b * args.intervals_batch + head * args.intervals_head
                pairs += i_r * args.intervals_block
            base, limit = greatest(first_row, i_r * block_rows), least(last_row, (i_r + 1) * block_rows)
            for i_s in range((limit - base + span - 1) // span):
                row = base + i_s * span
                item.row = row
                item.row_end = least(row + span, limit)
                measure_span(tile, q, k, stats_at, columns, pairs, start, live)

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
    left, right = arguments.window_sides(args)
    work_us = arguments.estimated_us(q.shape, k.shape[2], head_dim, left, right, args)
    threads = 1 if work_us < arguments.LEND_FROM_US else torch.get_num_threads()
    kept: list[Any] = []
    scale = head_dim**-0.5 if args.scale is None else args.scale
    does = arguments.passes(args, scale)
    sinks, score_pass = arguments.sinks_address(args.sinks, kept), prepared.score_pass(nv) if does else 0
    lse_at, seqlen_k = lse.data_ptr(), k.shape[2]
    head = arguments.head(q, k, k, q, lse_at, seqlen_k, args, scale, does, sinks, score_pass)  # no V, no out
    columns = (0,) * 4 if sums is None else (sums.data_ptr(), *(4 * s for s in sums.stride()[:3]))
    results = (0 if x is None else x.data_ptr() for x in (entropy, max_logit))
    words = array("q", head + arguments.operands(args, scale, does, kept, 0))
    words.extend((*Cut(config.block_n, 1, 1, row_panels, 1, 1, zero=0), *tiles[:-1]))
    words.extend(Statistics(entries.ctypes.data, *columns, *results))
    items = len(entries) * num_q_heads
    if items:
        address = words.buffer_info()[0]
        pool.run(kernel, address, items, threads, tiles.total, work_us >= arguments.WAKE_FROM_US)
    if column_sums is not None and sums is not None:
        for copy in sums[1:]:
            sums[0] += copy
        column_sums.copy_(sums[0])


def _zeros(copies: int, like: Tensor) -> Tensor:
    return like.new_zeros((copies, *like.shape))
