"""Decode on the CPU, more than 8 rows per kv head: lanes are rows, and while a key block is worked on the
next one is read.

Items, splits, partial results and who merges them: as in decode_few.py. The rows of a tile are all query
heads of the kv head times all query rows, head by head, so K and V are brought into scratch once for all.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import configs, decode_items, intrinsics, loading, tiles
from polyflash.backends.cpu.decode_many_blocks import ManyTile
from polyflash.backends.cpu.decode_many_configs import ManyKey
from polyflash.backends.cpu.intrinsics import greatest, least, load_i32, namespace, store_i32, store_i64, word
from polyflash.backends.cpu.kernels.walk import MINUS_INF
from polyflash.backends.cpu.pool_kernel import add as arrive
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import DECODE, K_BATCH, V_BATCH

ROWS_AT = configs.LINE  # addresses of zeros come first

BLOCK = Blocks(DECODE)
device = BLOCK.device


def panel_ends(key: ManyKey, stage: Any, shared: Any) -> Any:
    """Make the functions at the two ends of a panel: start_panel, finish_panel."""
    LANES, NR, NV, PACK, STEP = key.lanes, key.panel_rows, key.nv, key.pack, configs.STEP
    Q_PANEL, O_PANEL, STATS = key.q_panel_bytes, key.o_panel_bytes, key.panel_rows * 8
    K_BYTES, VECTOR = key.k_row_bytes, key.lanes * 4

    @device
    def start_panel(tile, q, i_hkv, row_0, rows):
        """Q^T of the panel at row_0 of the item's `rows`, and its O^T, m and l at their first values."""
        args = tile.args
        seqlen_q, panel = tile.item.row_end, row_0 // NR
        flip = args.sign | (args.sign >> 16 if PACK == 2 else 0)
        stage_rows, count = tile.stage, args.head_dim
        vectors = (count + PACK * LANES - 1) // (PACK * LANES)
        first = tile.item.row + row_0
        for lane in range(0, NR, LANES):
            if rows - row_0 - lane < LANES:
                stage.fill(stage_rows, LANES * K_BYTES // VECTOR, args.zero)
            for r in range(least(LANES, rows - row_0 - lane)):
                row = first + lane + r
                head = i_hkv * args.group + row // seqlen_q
                src = q + head * args.q_head + row % seqlen_q * args.q_row
                shared.load_tile(tile, src, 0, args.q_dim, 1, count, stage_rows + r * K_BYTES)
            stage.pack_query(stage_rows, vectors, tile.q + panel * Q_PANEL + lane * 4, flip)
        channels = (args.head_dim_v + STEP - 1) // STEP * STEP
        stage.fill(tile.o + panel * O_PANEL, channels * NV, args.zero)
        stats = tile.stats + panel * STATS
        stage.fill(stats, NV, MINUS_INF)
        stage.fill(stats + NR * 4, NV, args.zero)

    @device
    def finish_panel(tile, out, lse, i_hkv, row_0, rows):
        """Rows and lse of the panel at row_0 of the item's `rows`, whose m, l and O^T stand in scratch."""
        args = tile.args
        seqlen_q, panel = tile.item.row_end, row_0 // NR
        o, stats = tile.o + panel * O_PANEL, tile.stats + panel * STATS
        sinks, addresses = tile.block, tile.gather
        first = tile.item.row + row_0
        for lane in range(0, NR, LANES):
            count = least(LANES, rows - row_0 - lane)
            if count <= 0:
                break
            for r in range(LANES):
                row = first + lane + least(r, count - 1)
                head, i = i_hkv * args.group + row // seqlen_q, row % seqlen_q
                store_i32(sinks + 4 * r, shared.sink_bits(args, head))
                store_i64(addresses + 8 * r, out + head * args.out_head + i * args.out_row)
            at = stats + lane * 4
            stage.finish_lanes(at, args.scale, sinks)
            stage.store_rows(o + lane * 4, at, addresses, count, args.head_dim_v)
            if lse != 0:
                for r in range(count):
                    row = first + lane + r
                    head, i = i_hkv * args.group + row // seqlen_q, row % seqlen_q
                    store_i32(lse + 4 * (head * args.lse_head + i), load_i32(at + 4 * r))

    return namespace(start_panel, finish_panel)


def key_lists(key: ManyKey, stage: Any, loads: Any) -> Any:
    """Make what says where keys lie and which of them rows see: limit_rows, list_keys, list_lines."""
    items = decode_items.items()
    NR, PACK, STEP, STATS = key.panel_rows, key.pack, configs.STEP, key.panel_rows * 8
    SIZE, LINE, K_BYTES = configs.STORAGE_BYTES[key.storage], configs.LINE, key.k_row_bytes
    IN_PLACE = key.compute == "bf16dot" or key.storage == "float32"

    @device
    def limit_rows(tile, rows, live):
        """First key and number of keys of every lane; one that is no row sees none. The bounds of a panel:
        keys that some row sees and, inside them, keys that every row sees. Returns the bounds of all."""
        item = tile.item
        seqlen_q, start, first_row = item.row_end, item.start, item.row
        lowest, highest = live, 0
        for i_p in range((rows + NR - 1) // NR):
            some_lo, some_hi, all_lo, all_hi = live, 0, 0, live
            limits = tile.limits + i_p * STATS
            for lane in range(NR):
                lo, hi = 0, 0
                if i_p * NR + lane < rows:
                    i = (first_row + i_p * NR + lane) % seqlen_q
                    lo, hi = items.row_keys(tile, i, start, live)
                    if lo < hi:
                        some_lo, some_hi = least(some_lo, lo), greatest(some_hi, hi)
                    all_lo, all_hi = greatest(all_lo, lo), least(all_hi, hi)
                store_i32(limits + 4 * lane, lo)
                store_i32(limits + NR * 4 + 4 * lane, hi - lo)
            at = tile.bounds + 16 * i_p
            store_i32(at, some_lo)
            store_i32(at + 4, some_hi)
            store_i32(at + 8, all_lo)
            store_i32(at + 12, all_hi)
            lowest, highest = least(lowest, some_lo), greatest(highest, some_hi)
        return lowest, highest

    @device
    def list_keys(tile, k, first, last):
        """Addresses, from ROWS_AT on, of K rows [first, last) of the block, and of zeros around them up to
        whole steps. Rows that are not as the products read them are copied."""
        args = tile.args
        n = tile.item.key
        rows, zero = tile.addresses + ROWS_AT - 8 * n, tile.zero
        begin, end, stride = first // STEP * STEP, (last + STEP - 1) // STEP * STEP, args.k_row
        # Each count is rounded up to whole vectors, so what comes later is written later.
        stage.fill_addresses(rows + 8 * begin, zero, 0, first - begin)
        if IN_PLACE and args.k_dim == SIZE and args.head_dim % (4 * PACK) == 0:
            j = first
            while j < last:
                stop = loads.run_end(args, j, last)
                src = loads.row_at(tile, k, args.k_batch, stride, j)
                stage.fill_addresses(rows + 8 * j, src, stride, stop - j)
                j = stop
        else:
            loads.load_keys(tile, k, first, last)
            tile_row = tile.k + (first - n) * K_BYTES
            stage.fill_addresses(rows + 8 * first, tile_row, K_BYTES, last - first)
        stage.fill_addresses(rows + 8 * last, zero, 0, end - last)

    @device
    def list_lines(tile, src, page_stride, first, last, channels, wanted):
        """The cache lines of K or V rows [first, last), then zeros up to `wanted` addresses; their place."""
        args = tile.args
        dst, zero = tile.addresses + ROWS_AT + LINE, tile.zero
        dst += 8 * args.block_n
        stride, lines, count = word(args, page_stride + 2), (channels * SIZE + LINE - 1) // LINE, last - first
        done, j = 0, first
        if word(args, page_stride + 3) == SIZE and count > 0:
            done = lines * count
            for line in range(lines):
                j = first
                while j < last:
                    stop, at = last, src + j * stride
                    if args.page_table != 0:
                        size = args.page_size
                        i, row = j // size, tile.item.batch
                        stop = least(last, (i + 1) * size)
                        page = args.page_table + row * args.page_table_batch
                        page = load_i32(page + i * args.page_table_entry)
                        at = src + page * word(args, page_stride) + (j - i * size) * stride
                    stage.fill_addresses(
                        dst + 8 * (line * count + j - first), at + line * LINE, stride, stop - j
                    )
                    j = stop
        if wanted > done:
            stage.fill_addresses(dst + 8 * done, zero, 0, wanted - done)
        return dst

    return namespace(limit_rows, list_keys, list_lines)


def splits_of(key: ManyKey, stage: Any, loads: Any, lists: Any) -> Any:
    """Make what attends to the keys of one split: attend_split."""
    NR, NV, MR, PACK, STATS = key.panel_rows, key.nv, key.group_keys, key.pack, key.panel_rows * 8
    Q_PANEL, O_PANEL, V_BYTES = key.q_panel_bytes, key.o_panel_bytes, key.v_row_bytes
    KEYS_PER_TRIP, K_LINES, V_LINES = key.trip_keys, key.lines_of_keys, key.lines_of_values
    UNREAD = -1  # V of the block is not yet loaded

    @device
    def masked_scores(tile, i_p, n, begin, end, inner_begin, inner_end, ahead, step):
        """S^T of keys n + [begin, end) of one panel, and their part of the running maximum; every row sees
        all of [inner_begin, inner_end)."""
        args = tile.args
        s, top = tile.s, tile.block + NR * 4
        q, limits = tile.q + i_p * Q_PANEL, tile.limits + i_p * STATS
        trips = (args.head_dim + 4 * PACK - 1) // (4 * PACK)
        for part in range(3):
            lo = begin if part == 0 else inner_begin if part == 1 else inner_end
            hi = inner_begin if part == 0 else inner_end if part == 1 else end
            if hi > lo:
                rows, at = tile.addresses + ROWS_AT + 8 * lo, s + lo * NR * 4
                groups, lines = (hi - lo) // MR, ahead + (lo - begin) // MR * trips * step
                if part == 1:
                    stage.scores(rows, q, at, top, trips, groups, lines, step)
                else:
                    stage.scores_bounded(rows, q, at, top, trips, groups, limits, n + lo, lines, step)

    @device
    def attend_panel(tile, k, v, i_p, first, last, next_last, bad):
        """One key block against one panel; the first brings V in between. While K is multiplied V is read
        ahead, and while V is, keys up to next_last of the next block. Returns whether V is not finite."""
        args = tile.args
        n = tile.item.key
        bounds = tile.bounds + 16 * i_p
        lo, hi = greatest(first, load_i32(bounds)) - n, least(last, load_i32(bounds + 4)) - n
        if hi <= lo:
            return bad
        begin, end = lo // MR * MR, (hi + MR - 1) // MR * MR
        block, s = tile.block, tile.s + begin * NR * 4
        inner_begin, inner_end = begin, end
        changes = args.score_factor  # scores are scaled and perhaps capped before they are bounded
        if changes == 0:
            all_lo, all_hi = load_i32(bounds + 8) - n, load_i32(bounds + 12) - n
            inner_begin = least(greatest((all_lo + MR - 1) // MR * MR, begin), end)
            inner_end = least(greatest(all_hi // MR * MR, inner_begin), end)
        top, ahead, step = block + NR * 4, tile.addresses, 0
        channels = args.head_dim_v
        if bad == UNREAD:
            trips = (args.head_dim + 4 * PACK - 1) // (4 * PACK)
            wanted = (end - begin) // MR * trips * K_LINES
            ahead, step = lists.list_lines(tile, v, V_BATCH, first, last, channels, wanted), 8 * K_LINES
        stage.fill(top, NV, MINUS_INF)
        masked_scores(tile, i_p, n, begin, end, inner_begin, inner_end, ahead, step)
        if changes != 0:
            stage.fill(top, NV, MINUS_INF)
            limits = tile.limits + i_p * STATS
            stage.change_scores(s, end - begin, limits, n + begin, top, changes, args.score_cap)
        p, stats = tile.p + begin // PACK * NR * 4, tile.stats + i_p * STATS
        stage.online_softmax(s, p, (end - begin) // 4, block, stats, args.scale_log2)
        values, o = tile.v + begin // PACK * V_BYTES, tile.o + i_p * O_PANEL
        trips, groups = (end - begin) // KEYS_PER_TRIP, (channels + MR - 1) // MR
        ahead, step = tile.addresses, 0
        if bad == UNREAD:
            bad = loads.load_values(tile, v, first, last)
            following, count = n + args.block_n, args.head_dim
            wanted, step = trips * groups * V_LINES, 8 * V_LINES
            ahead = lists.list_lines(tile, k, K_BATCH, following, next_last, count, wanted)
        stage.accumulate(values, p, trips, o, block, groups, ahead, step)
        if bad != 0:
            loads.add_bad_rows(tile, v, 0, i_p, i_p, n, greatest(begin, first - n), least(end, last - n))
        return bad

    @device
    def attend_split(tile, k, v, rows, key_lo, key_hi):
        """The keys [key_lo, key_hi), block by block."""
        args = tile.args
        item, block_n = tile.item, args.block_n
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            n = i_n * block_n
            first, last = greatest(n, key_lo), least(n + block_n, key_hi)
            if last <= first:
                continue
            item.key = n
            if args.page_table != 0:
                found = loads.find_pages(tile, first, last)
                if found < last:
                    last = key_hi = found
                    lists.limit_rows(tile, rows, found)
                    if last <= first:
                        continue
            lists.list_keys(tile, k, first, last)
            bad, next_last = UNREAD, least(n + 2 * block_n, key_hi)
            for i_p in range((rows + NR - 1) // NR):
                bad = attend_panel(tile, k, v, i_p, first, last, next_last, bad)

    return namespace(attend_split)


def build(key: ManyKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    own = ManyTile(key)
    stage, items = intrinsics.stages(key, own), decode_items.items()
    shared, tiles_at = loading.loaders(key, stage), BLOCK.tiles()
    loads, ends = tiles.tiles(key, stage, shared), panel_ends(key, stage, shared)
    lists = key_lists(key, stage, loads)
    attend = splits_of(key, stage, loads, lists)
    NR, NV, STEP, LINE, VECTOR = key.panel_rows, key.nv, configs.STEP, configs.LINE, key.lanes * 4
    O_PANEL, STATS, WIDE_BYTES = key.o_panel_bytes, key.panel_rows * 8, key.bucket * 4 + configs.LINE
    MERGED = own.channels_at_once

    @BLOCK.kernel
    def kernel(args, number, scratch):
        tile = tiles_at(args, scratch)
        chunks, hkv = args.chunks, args.num_kv_heads
        tiles = hkv * chunks
        i_e, i_b, i_tile, i_s, splits, first_split, i_partial = items.find(args, number, tiles)
        held = args.row_panels * NR
        i_hkv, first_row = i_tile // chunks, i_tile % chunks * held
        i_t, first_q, first_k, seqlen_q, start, live = shared.stand(tile, i_b)
        rows = least(args.group * seqlen_q - first_row, held)
        if rows <= 0:
            return
        item, panels = tile.item, (rows + NR - 1) // NR
        item.row = first_row
        item.row_end = seqlen_q
        item.start = start
        lowest, highest = lists.limit_rows(tile, rows, live)
        key_lo = (first_split + i_s) * args.split_keys
        key_hi = least(key_lo + args.split_keys, highest)
        key_lo = greatest(key_lo, lowest)
        k, v = shared.key_rows(args, i_t, i_hkv, first_k)
        stage.fill(tile.zero, WIDE_BYTES // VECTOR, args.zero)
        stage.fill_addresses(tile.addresses, tile.zero, 0, LINE // 8)
        q = args.q + i_t * args.q_batch + first_q * args.q_row
        for i_p in range(panels):
            ends.start_panel(tile, q, i_hkv, i_p * NR, rows)
        if key_lo < key_hi:
            attend.attend_split(tile, k, v, rows, key_lo, key_hi)

        if splits > 1:
            channels = (args.head_dim_v + STEP - 1) // STEP * STEP
            stride = tiles * args.partial_bytes
            partial = args.partials + i_partial * args.partial_bytes
            first_o, bytes_o = args.row_panels * STATS, channels * NR * 4
            stage.copy_vectors(tile.stats, partial, panels * 2 * NV)
            for i_p in range(panels):
                o = tile.o + i_p * O_PANEL
                stage.copy_vectors(o, partial + first_o + i_p * bytes_o, channels * NV)
            # The last to arrive sees what all the others have written.
            if arrive(args.done + 8 * (i_e * tiles + i_tile), 1) != splits - 1:
                return
            partial -= i_s * stride
            for i_p in range(panels):
                at, offset = partial + i_p * STATS, first_o + i_p * (bytes_o - STATS)
                stats = tile.stats + i_p * STATS
                stage.merge_stats(at, stride, splits, stats, args.scale_log2)
                o = tile.o + i_p * O_PANEL
                stage.merge_outputs(at, stride, splits, offset, o, channels // MERGED)
        out = args.out + i_t * args.out_batch + first_q * args.out_row
        lse = args.lse
        if lse != 0:
            lse += 4 * (i_t * args.lse_batch + first_q)
        for i_p in range(panels):
            ends.finish_panel(tile, out, lse, i_hkv, i_p * NR, rows)

    return kernel
