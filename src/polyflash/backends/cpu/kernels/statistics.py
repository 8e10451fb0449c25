"""The statistics kernel: column sums of the weights, or entropy and largest score of every row.

One more pass over the tiles of scores, without V. One work item is a query head and a range of its rows,
which pass over the keys in spans.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import configs, intrinsics, statistics_blocks
from polyflash.backends.cpu.intrinsics import greatest, least, load_i32, namespace
from polyflash.backends.cpu.kernels import walk
from polyflash.backends.cpu.statistics_configs import StatisticsKey
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import STATISTICS

BLOCK = Blocks(STATISTICS)
device = BLOCK.device


def spans(key: StatisticsKey, stage: Any, shared: Any) -> Any:
    """Make what measures one span of rows: measure_span."""
    LANES, NR, STEP, K_BYTES = key.lanes, key.panel_rows, configs.STEP, key.k_row_bytes

    @device
    def start_panel(tile, q, lse, i_p):
        """Q^T of one panel of the span, and the stats of its rows at their first values."""
        item, stats = tile.item, tile.stats + i_p * NR * 16
        row, row_end = item.row + i_p * NR, item.row_end
        for lane in range(0, NR, LANES):
            rows = greatest(least(LANES, row_end - row - lane), 0)
            stage.start_rows(lse + (row + lane) * 4, rows, stats + lane * 4)
        shared.pack_panel(tile, q, row, row_end, i_p)

    @device
    def measure(tile, i_p):
        """One tile: a panel of the span against the key block."""
        args, kind = tile.args, shared.panel_kind(tile, i_p)
        begin, end, inner_begin, inner_end = shared.block_range(tile, i_p, kind)
        if end <= begin:
            return
        shared.make_scores(tile, i_p, tile.item.head, i_p, kind, begin, end, inner_begin, inner_end)
        s, stats = tile.s + begin * NR * 4, tile.stats + i_p * NR * 16
        if args.columns != 0:
            columns = tile.column_sums + begin * LANES * 4
            stage.add_to_columns(s, stats, args.scale, end - begin, columns)
        else:
            stage.add_to_rows(s, stats, args.scale, (end - begin) // 4)

    @device
    def measure_interval(tile, k, columns, start, live):
        """The keys [start, live) of the span, block by block."""
        args, item = tile.args, tile.item
        block_n, sums, k_row = args.block_n, tile.column_sums, args.k_row
        shared.row_limits(tile, start, live)
        key_lo, key_hi = shared.key_span(tile)
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            first, last = shared.block_keys(tile, i_n, key_lo, key_hi)
            if last <= first or shared.begin_block(tile, first, last) == 0:
                continue
            n = item.key
            k_tile = tile.k + (first - n) * K_BYTES
            shared.load_tile(tile, k + first * k_row, k_row, args.k_dim, last - first, args.head_dim, k_tile)
            begin, end = (first - n) // STEP * STEP, (last - n + STEP - 1) // STEP * STEP
            if columns != 0:
                stage.fill(sums + begin * LANES * 4, end - begin, args.zero)
            for i_p in range(item.panels):
                measure(tile, i_p)
            if columns != 0:
                dst, readable = columns + (n + begin) * 4, item.seqlen_k - n - begin
                stage.reduce_columns(sums + begin * LANES * 4, end - begin, dst, readable)

    @device
    def measure_span(tile, q, k, stats_at, columns, pairs, start, live):
        """The rows [row, row_end) of the item against the keys of [start, live) that they see. `pairs`: their
        list of intervals, or 0. `stats_at`: where their lse and results begin, in bytes."""
        args, item = tile.args, tile.item
        panels = (item.row_end - item.row + NR - 1) // NR
        item.panels = panels
        for i_p in range(panels):
            start_panel(tile, q, args.lse + stats_at, i_p)
        shared.start_pass(tile)
        for t in range(args.interval_count if pairs != 0 else 1):
            begin, end = shared.interval(pairs, t, start, live)
            if begin < end:
                measure_interval(tile, k, columns, begin, end)
        if args.entropy != 0:
            sink = shared.sink_bits(args, item.head)
            entropy, top = args.entropy + stats_at, args.max_logit + stats_at
            for lane in range(0, panels * NR, LANES):
                row, at = item.row + lane, tile.stats + lane // NR * NR * 16 + lane % NR * 4
                rows = least(LANES, item.row_end - row)
                if rows > 0:
                    stage.finish_rows(at, entropy + row * 4, top + row * 4, rows, args.scale, sink)

    return namespace(measure_span)


def build(key: StatisticsKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    stage, NR = intrinsics.stages(key, statistics_blocks.StatisticsTile(key)), key.panel_rows
    shared, tiles_at = walk.tools(key, stage), BLOCK.tiles()
    span_of = spans(key, stage, shared)

    @BLOCK.kernel
    def kernel(args, number, scratch):
        tile, group = tiles_at(args, scratch), args.group
        heads = group * args.num_kv_heads
        entry, head = args.entries + number // heads * 16, number % heads
        i_b, item = load_i32(entry), tile.item
        i_t, first_q, first_k, seqlen_q, start, live = shared.stand(tile, i_b)
        item.head = head
        item.heads = 1

        q = args.q + i_t * args.q_batch + head * args.q_head + first_q * args.q_row
        k = args.k + i_t * args.k_batch + head // group * args.k_head + first_k * args.k_row
        stats_at = 4 * (i_t * args.lse_batch + head * args.lse_head + first_q)
        columns = args.columns
        if columns != 0:
            columns += load_i32(entry + 12) * args.columns_copy + i_t * args.columns_batch
            columns += head * args.columns_head + first_k * 4

        # A span lies within one row block of interval lists.
        first_row, last_row = load_i32(entry + 4), least(load_i32(entry + 8), seqlen_q)
        span, block_rows = args.row_panels * NR, greatest(seqlen_q, 1)
        if args.intervals != 0:
            block_rows = args.interval_rows
        for i_r in range(first_row // block_rows, (last_row + block_rows - 1) // block_rows):
            pairs = shared.interval_list(args, i_b, head, i_r)
            base, limit = greatest(first_row, i_r * block_rows), least(last_row, (i_r + 1) * block_rows)
            for i_s in range((limit - base + span - 1) // span):
                row = base + i_s * span
                item.row = row
                item.row_end = least(row + span, limit)
                span_of.measure_span(tile, q, k, stats_at, columns, pairs, start, live)

    return kernel
