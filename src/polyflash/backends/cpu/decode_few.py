"""Decode on the CPU, at most 8 rows per kv head: one walk over the keys at memory speed.

An item is one request, one kv head, one tile of its rows and some consecutive splits of its keys. It leaves
(m, l, O) of each split; who finishes the last split of a tile merges all of them, in the order of the splits
(Dao et al., Flash-Decoding, 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import configs, decode_heads, decode_items, loading
from polyflash.backends.cpu import decode_arguments as d
from polyflash.backends.cpu.decode_configs import BLOCK_BYTES, KEYS_PER_GROUP, MOST_HEADS

if TYPE_CHECKING:
    from polyflash.backends.cpu.decode_configs import DecodeKey


def build(key: DecodeKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    from numba import cfunc, types

    from polyflash.backends.cpu import blocks, decode_blocks, pool_kernel, simd

    stage = decode_blocks.stages(key)
    fill, gather_row = stage.fill, stage.gather_row
    fill_addresses, fill_pages, add_addresses = stage.fill_addresses, stage.fill_pages, stage.add_addresses
    load_query, scores, online_softmax = stage.load_query, stage.scores, stage.online_softmax
    accumulate, accumulate_seen, has_nan = stage.accumulate, stage.accumulate_seen, stage.has_nan
    merge_stats, merge_outputs = stage.merge_stats, stage.merge_outputs
    row_stats, store_row = stage.row_stats, stage.store_row
    arg, load_i32, store_i32 = simd.word, simd.load_i32, simd.store_i32
    store_i64, least, greatest, arrive = simd.store_i64, simd.least, simd.greatest, pool_kernel.add
    device = loading.device
    shared = loading.loaders(key.row_key, blocks.stages(key.row_key))
    gathered, stand, key_rows = shared.gathered, shared.stand, shared.key_rows
    items = decode_items.items()
    find, row_keys = items.find, items.row_keys

    ROWS, KEYS, STEP = key.rows, key.lanes // key.rows, configs.STEP
    VECTOR, UNIT, SIZE = key.lanes * 4, key.unit, configs.STORAGE_BYTES[key.storage]
    PARTS, PACK = key.unit // key.lanes, key.pack
    PAIRS = key.compute == "bf16dot"
    QUERY_BYTES = VECTOR if PAIRS else VECTOR * PARTS
    GROUP_KEYS = KEYS_PER_GROUP
    MINUS_INF, ONE = 0xFF800000, 0x3F800000
    LISTED, SCORED = 1, 2  # of the keys that are walked next

    @device(3, types.int64)
    def table_at(args, scratch, j):  # type: ignore[no-untyped-def]
        """Where the table entry of key j lies."""
        row = arg(scratch + arg(args, a.T_ITEM), a.I_BATCH) * arg(args, a.PAGE_TABLE_BATCH)
        return arg(args, a.PAGE_TABLE) + row + j // arg(args, a.PAGE_SIZE) * arg(args, a.PAGE_TABLE_ENTRY)

    @device(6, types.int64)
    def row_at(args, scratch, src, page_stride, row_stride, j):  # type: ignore[no-untyped-def]
        """Where key j lies; 0 if its table entry names no page."""
        if arg(args, a.PAGE_TABLE) == 0:
            return src + j * row_stride
        page = load_i32(table_at(args, scratch, j))
        if page < 0 or page >= arg(args, a.NUM_PAGES):
            return 0
        return src + page * page_stride + j % arg(args, a.PAGE_SIZE) * row_stride

    @device(7)
    def list_rows(args, scratch, src, tensor, dst, first, last):  # type: ignore[no-untyped-def]
        """At `dst` the addresses of the rows of keys [first, last) in whole steps, with a row of zeros for
        every key around them. `tensor` is K_BATCH or V_BATCH. Rows whose channels have a stride are gathered
        first."""
        page_stride, row_stride, dim_stride = arg(args, tensor), arg(args, tensor + 2), arg(args, tensor + 3)
        zero, size = scratch + arg(args, a.T_ZERO), arg(args, a.PAGE_SIZE)
        j = first
        fill_addresses(dst, zero, 0, first % STEP)
        dst += (first % STEP - first) * 8
        if dim_stride != SIZE:
            width, channels = arg(args, d.GATHERED_ROW), arg(args, a.HEAD_DIM)
            rows = scratch + arg(args, a.T_STAGE)
            if tensor == a.V_BATCH:
                rows, channels = rows + arg(args, a.BLOCK_N) * width, arg(args, a.HEAD_DIM_V)
            for j in range(first, last):
                row, gathered_row = row_at(args, scratch, src, page_stride, row_stride, j), zero
                if row != 0:
                    gathered_row = rows + (j - first) * width
                    gather_row(row, dim_stride, channels, gathered_row)
                fill_addresses(dst + j * 8, gathered_row, 0, 1)
        elif arg(args, a.PAGE_TABLE) == 0:
            fill_addresses(dst + first * 8, src + first * row_stride, row_stride, last - first)
        else:
            if first % size != 0:  # the rest of a page whose first keys belong to the block before
                j = least(last, (first // size + 1) * size)
                row = row_at(args, scratch, src, page_stride, row_stride, first)
                fill_addresses(
                    dst + first * 8, row if row != 0 else zero, row_stride if row != 0 else 0, j - first
                )
            whole = (last - j) // size
            entries, stride = table_at(args, scratch, j), arg(args, a.PAGE_TABLE_ENTRY)
            pages = arg(args, a.NUM_PAGES)
            fill_pages(dst + j * 8, entries, stride, whole, src, page_stride, row_stride, size, pages, zero)
            j += whole * size
            if j < last:
                row = row_at(args, scratch, src, page_stride, row_stride, j)
                fill_addresses(
                    dst + j * 8, row if row != 0 else zero, row_stride if row != 0 else 0, last - j
                )
        fill_addresses(dst + last * 8, zero, 0, -last % STEP)

    @device(8)
    def next_head(args, scratch, src, tensor, dst, first, last, i_h):  # type: ignore[no-untyped-def]
        """`list_rows` of head i_h after `src`: its keys lie where those of the head before do, a head on, but
        for rows of zeros."""
        stride, zero = arg(args, tensor + 1), scratch + arg(args, a.T_ZERO)
        if i_h == 0 or arg(args, tensor + 3) != SIZE:
            list_rows(args, scratch, src + i_h * stride, tensor, dst, first, last)
        else:
            dst += first % STEP * 8
            add_addresses(dst, stride, last - first, zero)
            fill_addresses(dst + (last - first) * 8, zero, 0, -last % STEP)

    @device(6, types.UniTuple(types.int64, 4))
    def limit_rows(args, scratch, rows, row_0, seqlen_q, start):  # type: ignore[no-untyped-def]
        """First key and number of keys of every row, by lanes; a row that is none sees none. Returns the keys
        that some row sees and, inside them, those that every row sees."""
        live = arg(scratch + arg(args, a.T_ITEM), a.I_LIVE)
        some_lo, some_hi, all_lo, all_hi = live, 0, 0, live
        for r in range(ROWS):
            lo, hi = 0, 0
            if r < rows:
                lo, hi = row_keys(args, scratch, (row_0 + r) % seqlen_q, start, live)
                if lo < hi:
                    some_lo, some_hi = least(some_lo, lo), greatest(some_hi, hi)
                all_lo, all_hi = greatest(all_lo, lo), least(all_hi, hi)
            for j in range(KEYS):
                at = scratch + arg(args, a.T_LIMITS) + (j * ROWS + r) * 4
                store_i32(at, lo)
                store_i32(at + VECTOR, hi - lo)
        return some_lo, some_hi, all_lo, all_hi

    @device(8)
    def start_tile(args, scratch, q, dst, i_hkv, row_0, rows, seqlen_q):  # type: ignore[no-untyped-def]
        """Q of the tile's rows: all query heads of the kv head, and of each all query rows."""
        flip = arg(args, a.SIGN) | (arg(args, a.SIGN) >> 16 if PAIRS else 0)
        channels = arg(args, a.HEAD_DIM)
        for r in range(ROWS):
            row, head = scratch + arg(args, a.T_ZERO), i_hkv * arg(args, a.GROUP) + (row_0 + r) // seqlen_q
            if r < rows:
                row = q + head * arg(args, a.Q_HEAD) + (row_0 + r) % seqlen_q * arg(args, a.Q_ROW)
                row = gathered(scratch + arg(args, a.T_GATHER), row, arg(args, a.Q_DIM), channels)
            load_query(row, channels, dst + r * QUERY_BYTES, flip)

    @device(7)
    def weigh_values(args, scratch, o, begin, end, whole, rest):  # type: ignore[no-untyped-def]
        """O of one head and key block, whose rows of V and of what is read next are listed. Every row sees
        [whole, rest) of its keys [begin, end): there no weight needs a look."""
        block, v_rows = scratch + arg(args, a.T_BLOCK), scratch + arg(args, a.T_V)
        p, later, channels = scratch + arg(args, a.T_S), scratch + arg(args, a.T_K), arg(args, a.HEAD_DIM_V)
        alpha, ones, runs = block, block + VECTOR, arg(args, a.PAGE_TABLE) == 0
        if whole > begin:
            accumulate_seen(v_rows, p, o, alpha, ones, (whole - begin) // GROUP_KEYS, channels, later, runs)
            alpha = ones
        if rest > whole:
            at, p_at = (whole - begin) * 8, p + (whole - begin) // PACK * ROWS * 4
            groups = (rest - whole) // GROUP_KEYS
            accumulate(v_rows + at, p_at, o, alpha, ones, groups, channels, later + at, runs)
            alpha = ones
        if end > rest:
            at, p_at = (rest - begin) * 8, p + (rest - begin) // PACK * ROWS * 4
            groups = (end - rest) // GROUP_KEYS
            accumulate_seen(v_rows + at, p_at, o, alpha, ones, groups, channels, later + at, runs)

    attend_heads = decode_heads.walk(key, stage, list_rows)

    @device(12, types.int64)
    def attend_split(args, scratch, k, v, key_lo, key_hi, all_lo, all_hi, state, heads, ready, beyond):  # type: ignore[no-untyped-def]
        """The keys [key_lo, key_hi) of `heads` kv heads, block by block; every row sees [all_lo, all_hi).
        While K of a block is read its V is prefetched, and meanwhile the next K: memory never waits for
        arithmetic. The walk goes on to `beyond`: the first K after key_hi are left LISTED and prefetched, or
        SCORED; returns which, as the caller says what of this split's is `ready`."""
        s, block = scratch + arg(args, a.T_S), scratch + arg(args, a.T_BLOCK)
        k_rows, v_rows = scratch + arg(args, a.T_K), scratch + arg(args, a.T_V)
        block_n = greatest(BLOCK_BYTES // (arg(args, a.HEAD_DIM) * SIZE) // 32, 1) * 32
        block_n = least(block_n, arg(args, a.BLOCK_N))
        fill(block + VECTOR, 1, ONE)
        together = together_end = ahead = 0
        if arg(args, d.SIDE_BY_SIDE) != 0 and heads == MOST_HEADS:
            together = (greatest(key_lo, all_lo) + block_n - 1) // block_n
            together_end = ahead = least(key_hi, all_hi) // block_n
            if key_hi % block_n == 0 and (together_end + 1) * block_n <= least(beyond, all_hi):
                ahead += 1  # to the next split
        i_n, end_n = key_lo // block_n, (key_hi + block_n - 1) // block_n
        while i_n < end_n:
            if together <= i_n and i_n < together_end:
                attend_heads(
                    args, scratch, k, v, block_n, i_n, together_end, state, ready // SCORED, ahead, beyond
                )
                i_n, ready = together_end, SCORED if ahead > together_end else 0
                continue
            first, last = greatest(i_n * block_n, key_lo), least((i_n + 1) * block_n, key_hi)
            begin, end = first // STEP * STEP, (last + STEP - 1) // STEP * STEP
            whole = least(greatest((all_lo + GROUP_KEYS - 1) // GROUP_KEYS * GROUP_KEYS, begin), end)
            rest = least(greatest(all_hi // GROUP_KEYS * GROUP_KEYS, whole), end)
            if ready != LISTED:
                list_rows(args, scratch, k, a.K_BATCH, k_rows, first, last)
            for i_h in range(heads):
                stats = state + i_h * arg(args, d.PARTIAL_BYTES)
                q = scratch + arg(args, a.T_Q) + i_h * arg(args, d.Q_TILE)
                next_head(args, scratch, v, a.V_BATCH, v_rows, first, last, i_h)
                fill(block, 1, MINUS_INF)
                vectors = (end - begin) // KEYS
                scores(
                    k_rows, q, s, block, vectors, arg(args, a.HEAD_DIM), scratch + arg(args, a.T_LIMITS),
                    begin, arg(args, d.FACTOR), arg(args, d.CAP), v_rows, arg(args, a.PAGE_TABLE) == 0,
                )  # fmt: skip
                online_softmax(s, vectors, block, stats, arg(args, a.SCALE_LOG2))
                if i_h + 1 < heads:
                    next_head(args, scratch, k, a.K_BATCH, k_rows, first, last, i_h + 1)
                elif last < beyond:
                    end_next = least((last // block_n + 1) * block_n, beyond)
                    list_rows(args, scratch, k, a.K_BATCH, k_rows, last, end_next)
                weigh_values(args, scratch, stats + 2 * VECTOR, begin, end, whole, rest)
            i_n, ready = i_n + 1, LISTED
        return ready

    @device(9)
    def finish_tile(args, scratch, stats, out, lse, i_hkv, row_0, rows, seqlen_q):  # type: ignore[no-untyped-def]
        """Rows and lse of a tile whose m, l and O stand at `stats`."""
        o, row_stat = stats + 2 * VECTOR, scratch + arg(args, a.T_STATS)
        for r in range(rows):
            head, i = i_hkv * arg(args, a.GROUP) + (row_0 + r) // seqlen_q, (row_0 + r) % seqlen_q
            sink = MINUS_INF
            if arg(args, a.SINKS) != 0:
                sink = load_i32(arg(args, a.SINKS) + 4 * head)
            row_stats(stats, r, row_stat, arg(args, a.SCALE), sink)
            dst = out + head * arg(args, a.OUT_HEAD) + i * arg(args, a.OUT_ROW)
            store_row(o + r * PARTS * VECTOR, row_stat, dst, arg(args, a.HEAD_DIM_V))
            if lse != 0:
                store_i32(lse + 4 * (head * arg(args, a.LSE_HEAD) + i), load_i32(row_stat))

    @cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy", forceinline=True)
    def kernel(args, number, scratch):  # type: ignore[no-untyped-def]
        chunks, hkv = arg(args, a.CHUNKS), arg(args, a.NUM_KV_HEADS)
        heads = arg(args, a.HEADS)
        tiles = (hkv + heads - 1) // heads * chunks
        i_e, i_b, i_tile, i_s, splits, first_split, partial = find(args, number, tiles)
        splits_here = least(arg(args, d.SPLITS_PER_ITEM), splits - i_s)
        i_hkv, row_0 = i_tile // chunks * heads, i_tile % chunks * ROWS
        heads_here = least(heads, hkv - i_hkv)
        i_t, first_q, first_k, seqlen_q, start, live = stand(args, scratch, i_b)
        rows = least(arg(args, a.GROUP) * seqlen_q - row_0, ROWS)
        if rows <= 0:
            return
        store_i64(scratch + arg(args, a.T_ITEM) + 8 * a.I_LIVE, live)
        some_lo, some_hi, all_lo, all_hi = limit_rows(args, scratch, rows, row_0, seqlen_q, start)
        fill(scratch + arg(args, a.T_ZERO), arg(args, d.ZERO_VECTORS), arg(args, a.ZERO))

        width, units = arg(args, d.PARTIAL_BYTES), (arg(args, a.HEAD_DIM_V) + UNIT - 1) // UNIT
        stride, state = tiles * heads * width, arg(args, d.PARTIALS) + partial * heads * width
        if arg(args, d.PARTIALS) == 0:
            state = scratch + arg(args, a.T_O)
        q = arg(args, a.Q) + i_t * arg(args, a.Q_BATCH) + first_q * arg(args, a.Q_ROW)
        for i_h in range(heads_here):
            q_tile = scratch + arg(args, a.T_Q) + i_h * arg(args, d.Q_TILE)
            start_tile(args, scratch, q, q_tile, i_hkv + i_h, row_0, rows, seqlen_q)
        k, v = key_rows(args, i_t, i_hkv, first_k)
        split_lo, ready = (first_split + i_s) * arg(args, d.SPLIT_KEYS), 0
        beyond = least(split_lo + splits_here * arg(args, d.SPLIT_KEYS), some_hi)
        for i in range(splits_here):
            key_lo, key_hi = greatest(split_lo, some_lo), least(split_lo + arg(args, d.SPLIT_KEYS), beyond)
            seen_lo, seen_hi, at = all_lo, all_hi, state + i * stride
            for careful in range(2):
                if careful != 0:
                    seen_lo, seen_hi, ready = key_lo, key_lo, 0  # look at every weight
                bad = 0
                for i_h in range(heads_here):
                    fill(at + i_h * width, 1, MINUS_INF)
                    fill(at + i_h * width + VECTOR, width // VECTOR - 1, arg(args, a.ZERO))
                if key_lo < key_hi:
                    ready = attend_split(
                        args, scratch, k, v, key_lo, key_hi, seen_lo, seen_hi, at, heads_here, ready, beyond
                    )
                for i_h in range(heads_here):
                    bad |= has_nan(at + i_h * width + 2 * VECTOR, units * ROWS * PARTS)
                if bad == 0:
                    break
            split_lo += arg(args, d.SPLIT_KEYS)

        # The last to arrive sees what all the others have written.
        if splits > splits_here:
            before = arrive(arg(args, d.DONE) + 8 * (i_e * tiles + i_tile), splits_here)
            if before != splits - splits_here:
                return
        out = arg(args, a.OUT) + i_t * arg(args, a.OUT_BATCH) + first_q * arg(args, a.OUT_ROW)
        lse = arg(args, a.LSE)
        if lse != 0:
            lse += 4 * (i_t * arg(args, a.LSE_BATCH) + first_q)
        for i_h in range(heads_here):
            stats = state + i_h * width
            if splits > 1:
                partials, stats = stats - i_s * stride, scratch + arg(args, a.T_O)
                merge_stats(partials, stride, splits, stats, arg(args, a.SCALE_LOG2))
                merge_outputs(partials, stride, splits, 2 * VECTOR, stats + 2 * VECTOR, units)
            finish_tile(args, scratch, stats, out, lse, i_hkv + i_h, row_0, rows, seqlen_q)

    return kernel
