"""The forward kernel: O = softmax(scale·QKᵀ, mask)·V and lse, in one pass over the keys.

One work item is a kv head, some query heads of its group and a block of query rows; its panels share one copy
of each K/V block. `i_p` counts the panels of one head, `panel` those of all heads of the item.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import blocks, configs, integer_blocks, intrinsics, tiles
from polyflash.backends.cpu.configs import KernelKey
from polyflash.backends.cpu.intrinsics import call_native, greatest, least, load_i32, namespace
from polyflash.backends.cpu.kernels import integer, walk
from polyflash.backends.cpu.kernels.walk import MINUS_INF


def ends(key: KernelKey, stage: Any, shared: Any) -> Any:
    """Make the functions at the two ends of an item: start_item, finalize."""
    device = walk.words_of(key).device
    LANES, NR, NV, STEP, O_PANEL = key.lanes, key.panel_rows, key.nv, configs.STEP, key.o_panel_bytes
    WIDE_BYTES = key.bucket * 4 + configs.LINE

    @device
    def start_item(tile, q):
        """Q^T of every panel, and its O^T, m_i and l_i at their first values; `q`: row 0 of query head 0."""
        args, item = tile.args, tile.item
        channels = (args.head_dim_v + STEP - 1) // STEP * STEP
        stage.fill(tile.zero, WIDE_BYTES // (LANES * 4), args.zero)
        for i_p in range(item.panels):
            for i_h in range(item.heads):
                panel, src = i_h * item.panels + i_p, q + (item.head + i_h) * args.q_head
                shared.pack_panel(tile, src, item.row + i_p * NR, item.row_end, panel)
                stage.fill(tile.o + panel * O_PANEL, channels * NV, args.zero)
                stats = tile.stats + panel * NR * 8
                stage.fill(stats, NV, MINUS_INF)
                stage.fill(stats + NR * 4, NV, args.zero)
        shared.start_pass(tile)

    @device
    def finalize_panel(tile, dst, lse, head, row, panel):
        args, row_end = tile.args, tile.item.row_end
        o, stats, stride = tile.o + panel * O_PANEL, tile.stats + panel * NR * 8, args.out_row
        for lane in range(0, NR, LANES):
            rows, at = least(LANES, row_end - row - lane), stats + lane * 4
            if rows > 0:
                if lse != 0 or args.sinks != 0:
                    stage.finish_stats(at, args.scale, shared.sink_bits(args, head))
                if args.drop != 0:
                    stage.scale_divisor(at, args.drop_kept)
                stage.finalize(o + lane * 4, at, dst + (row + lane) * stride, stride, rows, args.head_dim_v)
                if lse != 0:
                    stage.store_lse(at, lse + (row + lane) * 4, rows)

    @device
    def finalize(tile, out, lse_row):
        """The item's rows of out and lse; `out`, `lse_row`: row 0 of query head 0."""
        args, item = tile.args, tile.item
        for i_p in range(item.panels):
            for i_h in range(item.heads):
                head, panel = item.head + i_h, i_h * item.panels + i_p
                lse = lse_row + head * args.lse_head * 4 if args.lse != 0 else 0
                finalize_panel(tile, out + head * args.out_head, lse, head, item.row + i_p * NR, panel)

    made = namespace(start_item, finalize)
    return integer.ends(key, stage, made) if key.integer else made


def blocks_of(key: KernelKey, stage: Any, shared: Any) -> Any:
    """Make what attends to the key blocks of an interval: attend_interval."""
    call_dropout, device = call_native(7), walk.words_of(key).device
    loads = tiles.tiles(key, stage, shared)
    if key.integer:
        loads = integer.tiles(key, stage, loads)
    NR, MR, PACK = key.panel_rows, key.group_keys, key.pack
    INTEGER, O_PANEL, V_BYTES, KEYS_PER_TRIP = (
        key.integer,
        key.o_panel_bytes,
        key.v_row_bytes,
        min(4, MR // PACK) * PACK,
    )

    @device
    def attend_tile(tile, v, i_h, i_p, bad):
        """One key block, loaded, against one panel of the item; `bad`: some of V is not finite."""
        args, item = tile.args, tile.item
        n, head, panel = item.key, item.head + i_h, i_h * item.panels + i_p
        kind = shared.panel_kind(tile, panel)
        begin, end, inner_begin, inner_end = shared.block_range(tile, i_p, kind)
        if end <= begin:
            return
        shared.make_scores(tile, panel, head, i_p, kind, begin, end, inner_begin, inner_end)
        p, stats = tile.p + begin // PACK * NR * 4, tile.stats + panel * NR * 8
        keys, block = end - begin, tile.block
        if INTEGER:
            shared.weigh(tile, panel, p, begin, keys, stats, kind, inner_end - inner_begin)
        else:
            stage.online_softmax(tile.s + begin * NR * 4, p, keys // 4, block, stats, args.scale_log2)
        if args.drop != 0:
            plane = item.batch * args.num_kv_heads * args.group + head
            call_dropout(args.drop, args, p, plane, item.row + i_p * NR, n + begin, keys, PACK)
        values, o = tile.v + begin // PACK * V_BYTES, tile.o + panel * O_PANEL
        stage.accumulate(values, p, keys // KEYS_PER_TRIP, o, block, (args.head_dim_v + MR - 1) // MR)
        if bad != 0:
            bad_begin, bad_end = greatest(begin, item.first - n), least(end, item.last - n)
            loads.add_bad_rows(tile, v, head, i_p, panel, n, bad_begin, bad_end)

    @device
    def attend_interval(tile, k, v, start, live):
        """The keys [start, live) of the item, block by block."""
        args, item = tile.args, tile.item
        block_n = args.block_n
        shared.row_limits(tile, start, live)
        key_lo, key_hi = shared.key_span(tile)
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            first, last = shared.block_keys(tile, i_n, key_lo, key_hi)
            if last <= first:
                continue
            if args.page_table != 0:
                found = loads.find_pages(tile, first, last)
                if found < last:
                    last = key_hi = found
                    shared.row_limits(tile, start, found)
                    if last <= first:
                        continue
            if shared.begin_block(tile, first, last) == 0:
                continue
            loads.load_keys(tile, k, first, last)
            bad = loads.load_values(tile, v, first, last)
            for i_p in range(item.panels):
                for i_h in range(item.heads):
                    attend_tile(tile, v, i_h, i_p, bad)

    return namespace(attend_interval)


def build(key: KernelKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(args, number, scratch)` that runs one item."""
    tile = integer_blocks.IntegerTile(key) if key.integer else blocks.Tile(key)
    stage, NR, INTEGER, words = intrinsics.stages(key, tile), key.panel_rows, key.integer, walk.words_of(key)
    shared, tiles_at, device = walk.tools(key, stage), words.tiles(), words.device
    item_ends, attend = ends(key, stage, shared), blocks_of(key, stage, shared)

    @device
    def find_rows(tile, number, i_m, seqlen_q):
        """First and end row of an item, and which list of intervals they have."""
        args = tile.args
        if args.members != 0:
            entry = args.members + number // args.others * 12
            return load_i32(entry + 4), least(load_i32(entry + 8), seqlen_q), 0
        span = args.row_panels * NR
        row_0, row_end, i_r = i_m * span, seqlen_q, 0
        # Row blocks of interval lists are cut again into items, so that an item has one list.
        if args.intervals != 0:
            per_list = (args.interval_rows + span - 1) // span
            i_r = i_m // per_list
            row_0 = i_r * args.interval_rows + i_m % per_list * span
            row_end = least(seqlen_q, (i_r + 1) * args.interval_rows)
        return row_0, least(row_0 + span, row_end), i_r

    @words.kernel
    def kernel(args, number, scratch):
        tile = tiles_at(args, scratch)
        others, chunks, hkv, group = args.others, args.chunks, args.num_kv_heads, args.group
        rest = number % others
        i_hkv, i_b = rest // chunks % hkv, rest // chunks // hkv
        # `number` counts, the fastest first: chunks of a group, kv heads, batch entries, row blocks. The last
        # rows come first, as they see the most keys; packed members have a table, the most work first.
        if args.members != 0:
            i_b = load_i32(args.members + number // others * 12)
        i_t, first_q, first_k, seqlen_q, start, live = shared.stand(tile, i_b)
        row_0, row_end, i_r = find_rows(tile, number, args.row_blocks - 1 - number // others, seqlen_q)
        if row_end <= row_0:
            return
        item = tile.item
        head = i_hkv * group + rest % chunks * args.heads
        item.head = head
        item.heads = least(args.heads, (i_hkv + 1) * group - head)
        item.row = row_0
        item.panels = (row_end - row_0 + NR - 1) // NR
        item.row_end = row_end
        item_ends.start_item(tile, args.q + i_t * args.q_batch + first_q * args.q_row)

        k, v = shared.key_rows(args, i_t, i_hkv, first_k)
        if INTEGER:
            item_ends.find_tables(tile, i_t, i_hkv, first_k)
        pairs = shared.interval_list(args, i_b, head, i_r)
        for t in range(args.interval_count if pairs != 0 else 1):
            begin, end = shared.interval(pairs, t, start, live)
            if begin < end:
                attend.attend_interval(tile, k, v, begin, end)

        out = args.out + i_t * args.out_batch + first_q * args.out_row
        item_ends.finalize(tile, out, args.lse + 4 * (i_t * args.lse_batch + first_q))

    return kernel
