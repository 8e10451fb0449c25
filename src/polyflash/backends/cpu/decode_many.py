"""Decode on the CPU, more than 8 rows per kv head: lanes are rows, and while a key block is worked on the
next one is read.

Items, splits, partial results and who merges them: as in decode_few.py. The rows of a tile are all query
heads of the kv head times all query rows, head by head, so K and V are brought into scratch once for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import configs, decode_items, loading, tiles
from polyflash.backends.cpu import decode_arguments as d

if TYPE_CHECKING:
    from polyflash.backends.cpu.decode_many_configs import ManyKey


def build(key: ManyKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    from numba import cfunc, types

    from polyflash.backends.cpu import decode_many_blocks, pool_kernel, simd

    stage: Any = decode_many_blocks.stages(key)
    fill, pack_query, online_softmax, accumulate = (
        stage.fill, stage.pack_query, stage.online_softmax, stage.accumulate,
    )  # fmt: skip
    change_scores, copy_vectors, fill_addresses = (
        stage.change_scores, stage.copy_vectors, stage.fill_addresses,
    )  # fmt: skip
    scores, scores_bounded = stage.scores, stage.scores_bounded
    merge_stats, merge_outputs = stage.merge_stats, stage.merge_outputs
    finish_lanes, store_rows = stage.finish_lanes, stage.store_rows
    arg, load_i32, store_i32, store_i64 = simd.word, simd.load_i32, simd.store_i32, simd.store_i64
    least, greatest, arrive = simd.least, simd.greatest, pool_kernel.add
    device = loading.device
    shared = loading.loaders(key, stage)
    load_tile, stand, key_rows = shared.load_tile, shared.stand, shared.key_rows
    items = decode_items.items()
    find, row_keys = items.find, items.row_keys
    tile = tiles.tiles(key, stage, shared)
    find_pages, load_keys, load_values = tile.find_pages, tile.load_keys, tile.load_values
    row_at, run_end, add_bad_rows = tile.row_at, tile.run_end, tile.add_bad_rows

    LANES, NR, NV, MR, PACK, STEP = key.lanes, key.panel_rows, key.nv, key.group_keys, key.pack, configs.STEP
    SIZE, VECTOR, LINE = configs.STORAGE_BYTES[key.storage], key.lanes * 4, configs.LINE
    Q_PANEL, O_PANEL, STATS = key.q_panel_bytes, key.o_panel_bytes, key.panel_rows * 8
    K_BYTES, V_BYTES, WIDE_BYTES = key.k_row_bytes, key.v_row_bytes, key.bucket * 4 + configs.LINE
    KEYS_PER_TRIP, K_LINES, V_LINES = key.trip_keys, key.lines_of_keys, key.lines_of_values
    ROWS_AT, UNREAD = configs.LINE, -1  # addresses of zeros come first; V of the block is not yet loaded
    IN_PLACE = key.compute == "bf16dot" or key.storage == "float32"
    MERGED = decode_many_blocks.ManyTile(key).channels_at_once
    MINUS_INF = 0xFF800000

    @device(6)
    def start_panel(args, scratch, q, i_hkv, row_0, rows):  # type: ignore[no-untyped-def]
        """Q^T of the panel at row_0 of the item's `rows`, and its O^T, m and l at their first values."""
        seqlen_q, panel = arg(scratch + arg(args, a.T_ITEM), a.I_ROW_END), row_0 // NR
        flip = arg(args, a.SIGN) | (arg(args, a.SIGN) >> 16 if PACK == 2 else 0)
        stage_rows, count = scratch + arg(args, a.T_STAGE), arg(args, a.HEAD_DIM)
        vectors = (count + PACK * LANES - 1) // (PACK * LANES)
        first = arg(scratch + arg(args, a.T_ITEM), a.I_ROW) + row_0
        for lane in range(0, NR, LANES):
            if rows - row_0 - lane < LANES:
                fill(stage_rows, LANES * K_BYTES // VECTOR, arg(args, a.ZERO))
            for r in range(least(LANES, rows - row_0 - lane)):
                row = first + lane + r
                head = i_hkv * arg(args, a.GROUP) + row // seqlen_q
                src = q + head * arg(args, a.Q_HEAD) + row % seqlen_q * arg(args, a.Q_ROW)
                load_tile(args, scratch, src, 0, arg(args, a.Q_DIM), 1, count, stage_rows + r * K_BYTES)
            pack_query(stage_rows, vectors, scratch + arg(args, a.T_Q) + panel * Q_PANEL + lane * 4, flip)
        channels = (arg(args, a.HEAD_DIM_V) + STEP - 1) // STEP * STEP
        fill(scratch + arg(args, a.T_O) + panel * O_PANEL, channels * NV, arg(args, a.ZERO))
        stats = scratch + arg(args, a.T_STATS) + panel * STATS
        fill(stats, NV, MINUS_INF)
        fill(stats + NR * 4, NV, arg(args, a.ZERO))

    @device(4, types.UniTuple(types.int64, 2))
    def limit_rows(args, scratch, rows, live):  # type: ignore[no-untyped-def]
        """First key and number of keys of every lane; one that is no row sees none. The bounds of a panel:
        keys that some row sees and, inside them, keys that every row sees. Returns the bounds of all."""
        item = scratch + arg(args, a.T_ITEM)
        seqlen_q, start, first_row = arg(item, a.I_ROW_END), arg(item, a.I_START), arg(item, a.I_ROW)
        lowest, highest = live, 0
        for i_p in range((rows + NR - 1) // NR):
            some_lo, some_hi, all_lo, all_hi = live, 0, 0, live
            limits = scratch + arg(args, a.T_LIMITS) + i_p * STATS
            for lane in range(NR):
                lo, hi = 0, 0
                if i_p * NR + lane < rows:
                    i = (first_row + i_p * NR + lane) % seqlen_q
                    lo, hi = row_keys(args, scratch, i, start, live)
                    if lo < hi:
                        some_lo, some_hi = least(some_lo, lo), greatest(some_hi, hi)
                    all_lo, all_hi = greatest(all_lo, lo), least(all_hi, hi)
                store_i32(limits + 4 * lane, lo)
                store_i32(limits + NR * 4 + 4 * lane, hi - lo)
            at = scratch + arg(args, a.T_Q_IDS) + 16 * i_p
            store_i32(at, some_lo)
            store_i32(at + 4, some_hi)
            store_i32(at + 8, all_lo)
            store_i32(at + 12, all_hi)
            lowest, highest = least(lowest, some_lo), greatest(highest, some_hi)
        return lowest, highest

    @device(5)
    def list_keys(args, scratch, k, first, last):  # type: ignore[no-untyped-def]
        """Addresses, from ROWS_AT on, of K rows [first, last) of the block, and of zeros around them up to
        whole steps. Rows that are not as the products read them are copied."""
        n = arg(scratch + arg(args, a.T_ITEM), a.I_KEY)
        rows, zero = scratch + arg(args, a.T_STAGED) + ROWS_AT - 8 * n, scratch + arg(args, a.T_ZERO)
        begin, end, stride = first // STEP * STEP, (last + STEP - 1) // STEP * STEP, arg(args, a.K_ROW)
        # Each count is rounded up to whole vectors, so what comes later is written later.
        fill_addresses(rows + 8 * begin, zero, 0, first - begin)
        if IN_PLACE and arg(args, a.K_DIM) == SIZE and arg(args, a.HEAD_DIM) % (4 * PACK) == 0:
            j = first
            while j < last:
                stop = run_end(args, j, last)
                src = row_at(args, scratch, k, arg(args, a.K_BATCH), stride, j)
                fill_addresses(rows + 8 * j, src, stride, stop - j)
                j = stop
        else:
            load_keys(args, scratch, k, first, last)
            tile_row = scratch + arg(args, a.T_K) + (first - n) * K_BYTES
            fill_addresses(rows + 8 * first, tile_row, K_BYTES, last - first)
        fill_addresses(rows + 8 * last, zero, 0, end - last)

    @device(8, types.int64)
    def list_lines(args, scratch, src, page_stride, first, last, channels, wanted):  # type: ignore[no-untyped-def]
        """The cache lines of K or V rows [first, last), then zeros up to `wanted` addresses; their place."""
        dst, zero = scratch + arg(args, a.T_STAGED) + ROWS_AT + LINE, scratch + arg(args, a.T_ZERO)
        dst += 8 * arg(args, a.BLOCK_N)
        stride, lines, count = arg(args, page_stride + 2), (channels * SIZE + LINE - 1) // LINE, last - first
        done, j = 0, first
        if arg(args, page_stride + 3) == SIZE and count > 0:
            done = lines * count
            for line in range(lines):
                j = first
                while j < last:
                    stop, at = last, src + j * stride
                    if arg(args, a.PAGE_TABLE) != 0:
                        size = arg(args, a.PAGE_SIZE)
                        i, row = j // size, arg(scratch + arg(args, a.T_ITEM), a.I_BATCH)
                        stop = least(last, (i + 1) * size)
                        page = arg(args, a.PAGE_TABLE) + row * arg(args, a.PAGE_TABLE_BATCH)
                        page = load_i32(page + i * arg(args, a.PAGE_TABLE_ENTRY))
                        at = src + page * arg(args, page_stride) + (j - i * size) * stride
                    fill_addresses(dst + 8 * (line * count + j - first), at + line * LINE, stride, stop - j)
                    j = stop
        if wanted > done:
            fill_addresses(dst + 8 * done, zero, 0, wanted - done)
        return dst

    @device(10)
    def masked_scores(args, scratch, i_p, n, begin, end, inner_begin, inner_end, ahead, step):  # type: ignore[no-untyped-def]
        """S^T of keys n + [begin, end) of one panel, and their part of the running maximum; every row sees
        all of [inner_begin, inner_end)."""
        s, top = scratch + arg(args, a.T_S), scratch + arg(args, a.T_BLOCK) + NR * 4
        q, limits = scratch + arg(args, a.T_Q) + i_p * Q_PANEL, scratch + arg(args, a.T_LIMITS) + i_p * STATS
        trips = (arg(args, a.HEAD_DIM) + 4 * PACK - 1) // (4 * PACK)
        for part in range(3):
            lo = begin if part == 0 else inner_begin if part == 1 else inner_end
            hi = inner_begin if part == 0 else inner_end if part == 1 else end
            if hi > lo:
                rows, at = scratch + arg(args, a.T_STAGED) + ROWS_AT + 8 * lo, s + lo * NR * 4
                groups, lines = (hi - lo) // MR, ahead + (lo - begin) // MR * trips * step
                if part == 1:
                    scores(rows, q, at, top, trips, groups, lines, step)
                else:
                    scores_bounded(rows, q, at, top, trips, groups, limits, n + lo, lines, step)

    @device(9, types.int64)
    def attend_panel(args, scratch, k, v, i_p, first, last, next_last, bad):  # type: ignore[no-untyped-def]
        """One key block against one panel; the first brings V in between. While K is multiplied V is read
        ahead, and while V is, keys up to next_last of the next block. Returns whether V is not finite."""
        n = arg(scratch + arg(args, a.T_ITEM), a.I_KEY)
        bounds = scratch + arg(args, a.T_Q_IDS) + 16 * i_p
        lo, hi = greatest(first, load_i32(bounds)) - n, least(last, load_i32(bounds + 4)) - n
        if hi <= lo:
            return bad
        begin, end = lo // MR * MR, (hi + MR - 1) // MR * MR
        block, s = scratch + arg(args, a.T_BLOCK), scratch + arg(args, a.T_S) + begin * NR * 4
        inner_begin, inner_end = begin, end
        changes = arg(args, d.FACTOR)  # scores are scaled and perhaps capped before they are bounded
        if changes == 0:
            all_lo, all_hi = load_i32(bounds + 8) - n, load_i32(bounds + 12) - n
            inner_begin = least(greatest((all_lo + MR - 1) // MR * MR, begin), end)
            inner_end = least(greatest(all_hi // MR * MR, inner_begin), end)
        top, ahead, step = block + NR * 4, scratch + arg(args, a.T_STAGED), 0
        channels = arg(args, a.HEAD_DIM_V)
        if bad == UNREAD:
            trips = (arg(args, a.HEAD_DIM) + 4 * PACK - 1) // (4 * PACK)
            wanted = (end - begin) // MR * trips * K_LINES
            ahead, step = list_lines(args, scratch, v, a.V_BATCH, first, last, channels, wanted), 8 * K_LINES
        fill(top, NV, MINUS_INF)
        masked_scores(args, scratch, i_p, n, begin, end, inner_begin, inner_end, ahead, step)
        if changes != 0:
            fill(top, NV, MINUS_INF)
            limits = scratch + arg(args, a.T_LIMITS) + i_p * STATS
            change_scores(s, end - begin, limits, n + begin, top, changes, arg(args, d.CAP))
        p, stats = (
            scratch + arg(args, a.T_P) + begin // PACK * NR * 4,
            scratch + arg(args, a.T_STATS) + i_p * STATS,
        )
        online_softmax(s, p, (end - begin) // 4, block, stats, arg(args, a.SCALE_LOG2))
        values, o = (
            scratch + arg(args, a.T_V) + begin // PACK * V_BYTES,
            scratch + arg(args, a.T_O) + i_p * O_PANEL,
        )
        trips, groups = (end - begin) // KEYS_PER_TRIP, (channels + MR - 1) // MR
        ahead, step = scratch + arg(args, a.T_STAGED), 0
        if bad == UNREAD:
            bad = load_values(args, scratch, v, first, last)
            following, count = n + arg(args, a.BLOCK_N), arg(args, a.HEAD_DIM)
            wanted, step = trips * groups * V_LINES, 8 * V_LINES
            ahead = list_lines(args, scratch, k, a.K_BATCH, following, next_last, count, wanted)
        accumulate(values, p, trips, o, block, groups, ahead, step)
        if bad != 0:
            add_bad_rows(args, scratch, v, 0, i_p, i_p, n, greatest(begin, first - n), least(end, last - n))
        return bad

    @device(7)
    def attend_split(args, scratch, k, v, rows, key_lo, key_hi):  # type: ignore[no-untyped-def]
        """The keys [key_lo, key_hi), block by block."""
        item, block_n = scratch + arg(args, a.T_ITEM), arg(args, a.BLOCK_N)
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            n = i_n * block_n
            first, last = greatest(n, key_lo), least(n + block_n, key_hi)
            if last <= first:
                continue
            store_i64(item + 8 * a.I_KEY, n)
            if arg(args, a.PAGE_TABLE) != 0:
                found = find_pages(args, scratch, first, last)
                if found < last:
                    last = key_hi = found
                    limit_rows(args, scratch, rows, found)
                    if last <= first:
                        continue
            list_keys(args, scratch, k, first, last)
            bad, next_last = UNREAD, least(n + 2 * block_n, key_hi)
            for i_p in range((rows + NR - 1) // NR):
                bad = attend_panel(args, scratch, k, v, i_p, first, last, next_last, bad)

    @device(7)
    def finish_panel(args, scratch, out, lse, i_hkv, row_0, rows):  # type: ignore[no-untyped-def]
        """Rows and lse of the panel at row_0 of the item's `rows`, whose m, l and O^T stand in scratch."""
        seqlen_q, panel = arg(scratch + arg(args, a.T_ITEM), a.I_ROW_END), row_0 // NR
        o, stats = (
            scratch + arg(args, a.T_O) + panel * O_PANEL,
            scratch + arg(args, a.T_STATS) + panel * STATS,
        )
        sinks, addresses = scratch + arg(args, a.T_BLOCK), scratch + arg(args, a.T_GATHER)
        first = arg(scratch + arg(args, a.T_ITEM), a.I_ROW) + row_0
        for lane in range(0, NR, LANES):
            count = least(LANES, rows - row_0 - lane)
            if count <= 0:
                break
            for r in range(LANES):
                row = first + lane + least(r, count - 1)
                head, i = i_hkv * arg(args, a.GROUP) + row // seqlen_q, row % seqlen_q
                sink = MINUS_INF
                if arg(args, a.SINKS) != 0:
                    sink = load_i32(arg(args, a.SINKS) + 4 * head)
                store_i32(sinks + 4 * r, sink)
                store_i64(addresses + 8 * r, out + head * arg(args, a.OUT_HEAD) + i * arg(args, a.OUT_ROW))
            at = stats + lane * 4
            finish_lanes(at, arg(args, a.SCALE), sinks)
            store_rows(o + lane * 4, at, addresses, count, arg(args, a.HEAD_DIM_V))
            if lse != 0:
                for r in range(count):
                    row = first + lane + r
                    head, i = i_hkv * arg(args, a.GROUP) + row // seqlen_q, row % seqlen_q
                    store_i32(lse + 4 * (head * arg(args, a.LSE_HEAD) + i), load_i32(at + 4 * r))

    @cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy", forceinline=True)
    def kernel(args, number, scratch):  # type: ignore[no-untyped-def]
        chunks, hkv = arg(args, a.CHUNKS), arg(args, a.NUM_KV_HEADS)
        tiles = hkv * chunks
        i_e, i_b, i_tile, i_s, splits, first_split, i_partial = find(args, number, tiles)
        held = arg(args, a.ROW_PANELS) * NR
        i_hkv, first_row = i_tile // chunks, i_tile % chunks * held
        i_t, first_q, first_k, seqlen_q, start, live = stand(args, scratch, i_b)
        rows = least(arg(args, a.GROUP) * seqlen_q - first_row, held)
        if rows <= 0:
            return
        item, panels = scratch + arg(args, a.T_ITEM), (rows + NR - 1) // NR
        store_i64(item + 8 * a.I_ROW, first_row)
        store_i64(item + 8 * a.I_ROW_END, seqlen_q)
        store_i64(item + 8 * a.I_START, start)
        lowest, highest = limit_rows(args, scratch, rows, live)
        key_lo = (first_split + i_s) * arg(args, d.SPLIT_KEYS)
        key_hi = least(key_lo + arg(args, d.SPLIT_KEYS), highest)
        key_lo = greatest(key_lo, lowest)
        k, v = key_rows(args, i_t, i_hkv, first_k)
        fill(scratch + arg(args, a.T_ZERO), WIDE_BYTES // VECTOR, arg(args, a.ZERO))
        fill_addresses(scratch + arg(args, a.T_STAGED), scratch + arg(args, a.T_ZERO), 0, LINE // 8)
        q = arg(args, a.Q) + i_t * arg(args, a.Q_BATCH) + first_q * arg(args, a.Q_ROW)
        for i_p in range(panels):
            start_panel(args, scratch, q, i_hkv, i_p * NR, rows)
        if key_lo < key_hi:
            attend_split(args, scratch, k, v, rows, key_lo, key_hi)

        if splits > 1:
            channels = (arg(args, a.HEAD_DIM_V) + STEP - 1) // STEP * STEP
            stride = tiles * arg(args, d.PARTIAL_BYTES)
            partial = arg(args, d.PARTIALS) + i_partial * arg(args, d.PARTIAL_BYTES)
            first_o, bytes_o = arg(args, a.ROW_PANELS) * STATS, channels * NR * 4
            copy_vectors(scratch + arg(args, a.T_STATS), partial, panels * 2 * NV)
            for i_p in range(panels):
                o = scratch + arg(args, a.T_O) + i_p * O_PANEL
                copy_vectors(o, partial + first_o + i_p * bytes_o, channels * NV)
            # The last to arrive sees what all the others have written.
            if arrive(arg(args, d.DONE) + 8 * (i_e * tiles + i_tile), 1) != splits - 1:
                return
            partial -= i_s * stride
            for i_p in range(panels):
                at, offset = partial + i_p * STATS, first_o + i_p * (bytes_o - STATS)
                stats = scratch + arg(args, a.T_STATS) + i_p * STATS
                merge_stats(at, stride, splits, stats, arg(args, a.SCALE_LOG2))
                o = scratch + arg(args, a.T_O) + i_p * O_PANEL
                merge_outputs(at, stride, splits, offset, o, channels // MERGED)
        out = arg(args, a.OUT) + i_t * arg(args, a.OUT_BATCH) + first_q * arg(args, a.OUT_ROW)
        lse = arg(args, a.LSE)
        if lse != 0:
            lse += 4 * (i_t * arg(args, a.LSE_BATCH) + first_q)
        for i_p in range(panels):
            finish_panel(args, scratch, out, lse, i_hkv, i_p * NR, rows)

    return kernel
