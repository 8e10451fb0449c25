"""Decode on the CPU, at most 8 rows per kv head: one walk over the keys at memory speed.

An item is one request, one kv head, one tile of its rows and some consecutive splits of its keys. It leaves
(m, l, O) of each split; who finishes the last split of a tile merges all of them, in the order of the splits
(Dao et al., Flash-Decoding, 2023).
"""

from __future__ import annotations

import functools
from typing import Any

from polyflash.backends.cpu import (
    blocks,
    configs,
    decode_codes,
    decode_codes_bytes,
    decode_codes_floats,
    decode_codes_rows,
    decode_heads,
    decode_items,
    decode_row,
    intrinsics,
    loading,
)
from polyflash.backends.cpu.decode_blocks import DecodeTile
from polyflash.backends.cpu.decode_codes_configs import CodesKey, DecodedKey, FloatsKey
from polyflash.backends.cpu.decode_configs import (
    BLOCK_BYTES,
    KEYS_PER_GROUP,
    LISTED,
    MOST_HEADS,
    SCORED,
    DecodeKey,
)
from polyflash.backends.cpu.intrinsics import greatest, least, load_i32, quotient, store_i32, word
from polyflash.backends.cpu.pool_kernel import add as arrive
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import DECODE, K_BATCH, V_BATCH

MINUS_INF, ONE = 0xFF800000, 0x3F800000  # bits of float32

TILES: dict[type[DecodeKey], Any] = {
    CodesKey: decode_codes_bytes.tile_of,
    FloatsKey: decode_codes_floats.FloatsTile,
    DecodedKey: decode_codes_rows.DecodedTile,
}

BLOCK = Blocks(DECODE)
device = BLOCK.device


def build(key: DecodeKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    CAREFUL = type(key) is not CodesKey  # whose values are all numbers
    tile_of = TILES.get(type(key), DecodeTile)
    stage, items = intrinsics.stages(key, tile_of(key)), decode_items.items()
    shared = loading.loaders(key.row_key, intrinsics.stages(key.row_key, blocks.Tile(key.row_key)))
    tiles_at = BLOCK.tiles()
    ROWS, KEYS, VECTOR, UNIT = key.rows, key.lanes // key.rows, key.lanes * 4, key.unit
    PARTS, PAIRS = key.unit // key.lanes, key.compute == "bf16dot"
    QUERY_BYTES = key.query_row if isinstance(key, CodesKey) else VECTOR if PAIRS else VECTOR * PARTS

    @device
    def limit_rows(tile, rows, row_0, seqlen_q, start):
        """First key and number of keys of every row, by lanes; a row that is none sees none. Returns the keys
        that some row sees and, inside them, those that every row sees."""
        live = tile.item.live
        some_lo, some_hi, all_lo, all_hi = live, 0, 0, live
        for r in range(ROWS):
            lo, hi = 0, 0
            if r < rows:
                lo, hi = items.row_keys(tile, (row_0 + r) % seqlen_q, start, live)
                if lo < hi:
                    some_lo, some_hi = least(some_lo, lo), greatest(some_hi, hi)
                all_lo, all_hi = greatest(all_lo, lo), least(all_hi, hi)
            for j in range(KEYS):
                at = tile.limits + (j * ROWS + r) * 4
                store_i32(at, lo)
                store_i32(at + VECTOR, hi - lo)
        return some_lo, some_hi, all_lo, all_hi

    @device
    def start_tile(tile, q, dst, i_hkv, row_0, rows, seqlen_q):
        """Q of the tile's rows: all query heads of the kv head, and of each all query rows."""
        args = tile.args
        flip, channels = args.sign | (args.sign >> 16 if PAIRS else 0), args.head_dim
        for r in range(ROWS):
            row, head = tile.zero, i_hkv * args.group + (row_0 + r) // seqlen_q
            if r < rows:
                row = q + head * args.q_head + (row_0 + r) % seqlen_q * args.q_row
                row = shared.gathered(tile.gather, row, args.q_dim, channels)
            stage.load_query(row, channels, dst + r * QUERY_BYTES, flip)

    table_at, row_at = _addresses()
    if isinstance(key, DecodedKey):
        attend_split = _walk(key.walked, stage, *decode_codes_rows.listers(key, stage, row_at), False)
    else:
        list_rows = _lister(key, stage, table_at, row_at)
        if isinstance(key, CodesKey):
            attend_split = decode_codes.walk(key, stage, list_rows)
        else:
            attend_split = _walk(key, stage, list_rows, _next_head(key, stage, list_rows), True)

    @device
    def finish_tile(tile, stats, out, lse, i_hkv, row_0, rows, seqlen_q):
        """Rows and lse of a tile whose m, l and O stand at `stats`."""
        args = tile.args
        o, row_stat = stats + 2 * VECTOR, tile.stats
        for r in range(rows):
            head, i = i_hkv * args.group + (row_0 + r) // seqlen_q, (row_0 + r) % seqlen_q
            sink = MINUS_INF
            if args.sinks != 0:
                sink = load_i32(args.sinks + 4 * head)
            stage.row_stats(stats, r, row_stat, args.scale, sink)
            dst = out + head * args.out_head + i * args.out_row
            stage.store_row(o + r * PARTS * VECTOR, row_stat, dst, args.head_dim_v)
            if lse != 0:
                store_i32(lse + 4 * (head * args.lse_head + i), load_i32(row_stat))

    @BLOCK.kernel
    def kernel(args, number, scratch):
        tile = tiles_at(args, scratch)
        chunks, hkv, heads = args.chunks, args.num_kv_heads, args.heads
        tiles = (hkv + heads - 1) // heads * chunks
        i_e, i_b, i_tile, i_s, splits, first_split, partial = items.find(args, number, tiles)
        splits_here = least(args.splits_per_item, splits - i_s)
        i_hkv, row_0 = i_tile // chunks * heads, i_tile % chunks * ROWS
        heads_here = least(heads, hkv - i_hkv)
        i_t, first_q, first_k, seqlen_q, start, live = shared.stand(tile, i_b)
        rows = least(args.group * seqlen_q - row_0, ROWS)
        if rows <= 0:
            return
        tile.item.live = live
        tile.item.head = i_hkv
        some_lo, some_hi, all_lo, all_hi = limit_rows(tile, rows, row_0, seqlen_q, start)
        stage.fill(tile.zero, args.zero_vectors, args.zero)

        width, units = args.partial_bytes, (args.head_dim_v + UNIT - 1) // UNIT
        stride, state = tiles * heads * width, args.partials + partial * heads * width
        if args.partials == 0:
            state = tile.o
        q = args.q + i_t * args.q_batch + first_q * args.q_row
        for i_h in range(heads_here):
            q_tile = tile.q + i_h * args.q_tile
            start_tile(tile, q, q_tile, i_hkv + i_h, row_0, rows, seqlen_q)
        k, v = shared.key_rows(args, i_t, i_hkv, first_k)
        split_lo, ready = (first_split + i_s) * args.split_keys, 0
        beyond = least(split_lo + splits_here * args.split_keys, some_hi)
        for i in range(splits_here):
            key_lo, key_hi = greatest(split_lo, some_lo), least(split_lo + args.split_keys, beyond)
            seen_lo, seen_hi, at = all_lo, all_hi, state + i * stride
            for careful in range(2):
                if careful != 0:
                    seen_lo, seen_hi, ready = key_lo, key_lo, 0  # look at every weight
                bad = 0
                for i_h in range(heads_here):
                    stage.fill(at + i_h * width, 1, MINUS_INF)
                    stage.fill(at + i_h * width + VECTOR, width // VECTOR - 1, args.zero)
                if key_lo < key_hi:
                    ready = attend_split(
                        tile, k, v, key_lo, key_hi, seen_lo, seen_hi, at, heads_here, ready, beyond
                    )
                if not CAREFUL:
                    break
                for i_h in range(heads_here):
                    bad |= stage.has_nan(at + i_h * width + 2 * VECTOR, units * ROWS * PARTS)
                if bad == 0:
                    break
            split_lo += args.split_keys

        # The last to arrive sees what all the others have written.
        if splits > splits_here:
            before = arrive(args.done + 8 * (i_e * tiles + i_tile), splits_here)
            if before != splits - splits_here:
                return
        out = args.out + i_t * args.out_batch + first_q * args.out_row
        lse = args.lse
        if lse != 0:
            lse += 4 * (i_t * args.lse_batch + first_q)
        for i_h in range(heads_here):
            stats = state + i_h * width
            if splits > 1:
                partials, stats = stats - i_s * stride, tile.o
                stage.merge_stats(partials, stride, splits, stats, args.scale_log2)
                stage.merge_outputs(partials, stride, splits, 2 * VECTOR, stats + 2 * VECTOR, units)
            finish_tile(tile, stats, out, lse, i_hkv + i_h, row_0, rows, seqlen_q)

    return kernel


@functools.cache
def _addresses() -> tuple[Any, Any]:
    """Two device functions of 2 and 5 arguments, over pages and whole tensors."""

    @device
    def table_at(tile, j):
        """Address of the table entry of key j."""
        args = tile.args
        row = tile.item.batch * args.page_table_batch
        return args.page_table + row + quotient(j, args.page_size) * args.page_table_entry

    @device
    def row_at(tile, src, page_stride, row_stride, j):
        """Address of key j; 0 if its table entry names no page."""
        args = tile.args
        if args.page_table == 0:
            return src + j * row_stride
        page = load_i32(table_at(tile, j))
        if page < 0 or page >= args.num_pages:
            return 0
        return src + page * page_stride + (j - quotient(j, args.page_size) * args.page_size) * row_stride

    return table_at, row_at


def _lister(key: DecodeKey, stage: Any, table_at: Any, row_at: Any) -> Any:
    """A device function of 6 arguments, see `list_rows`."""
    STEP, SIZE, CODES = configs.STEP, configs.STORAGE_BYTES[key.storage], isinstance(key, CodesKey)

    @device
    def list_rows(tile, src, tensor, dst, first, last):
        """At `dst` the addresses of the rows of keys [first, last) in whole steps, with a row of zeros for
        every key around them. `tensor` is K_BATCH or V_BATCH. Rows whose channels have a stride are gathered
        first."""
        args = tile.args
        page_stride = word(args, tensor)
        row_stride, dim_stride = word(args, tensor + 2), word(args, tensor + 3)
        zero, size = tile.zero, args.page_size
        j = first
        if first % STEP != 0:
            stage.fill_addresses(dst, zero, 0, first % STEP)
        dst += (first % STEP - first) * 8
        if dim_stride != SIZE and not CODES:
            width, channels = args.gathered_row, args.head_dim
            rows = tile.stage
            if tensor == V_BATCH:
                rows, channels = rows + args.block_n * width, args.head_dim_v
            for j in range(first, last):
                row, gathered_row = row_at(tile, src, page_stride, row_stride, j), zero
                if row != 0:
                    gathered_row = rows + (j - first) * width
                    stage.gather_row(row, dim_stride, channels, gathered_row)
                stage.fill_addresses(dst + j * 8, gathered_row, 0, 1)
        elif args.page_table == 0:
            stage.fill_addresses(dst + first * 8, src + first * row_stride, row_stride, last - first)
        else:
            begun = quotient(first, size) * size
            if first != begun:  # the rest of a page whose first keys belong to the block before
                j = least(last, begun + size)
                row = row_at(tile, src, page_stride, row_stride, first)
                stage.fill_addresses(
                    dst + first * 8, row if row != 0 else zero, row_stride if row != 0 else 0, j - first
                )
            whole = quotient(last - j, size)
            entries, stride = table_at(tile, j), args.page_table_entry
            pages = args.num_pages
            stage.fill_pages(
                dst + j * 8, entries, stride, whole, src, page_stride, row_stride, size, pages, zero
            )
            j += whole * size
            if j < last:
                row = row_at(tile, src, page_stride, row_stride, j)
                stage.fill_addresses(
                    dst + j * 8, row if row != 0 else zero, row_stride if row != 0 else 0, last - j
                )
        if last % STEP != 0:
            stage.fill_addresses(dst + last * 8, zero, 0, -last % STEP)

    return list_rows


def _next_head(key: DecodeKey, stage: Any, list_rows: Any) -> Any:
    """A device function of 7 arguments."""
    STEP, SIZE = configs.STEP, configs.STORAGE_BYTES[key.storage]

    @device
    def next_head(tile, src, tensor, dst, first, last, i_h):
        """`list_rows` of head i_h after `src`: its keys lie where those of the head before do, a head on, but
        for rows of zeros."""
        args = tile.args
        stride, zero = word(args, tensor + 1), tile.zero
        if i_h == 0 or word(args, tensor + 3) != SIZE:
            list_rows(tile, src + i_h * stride, tensor, dst, first, last)
        else:
            dst += first % STEP * 8
            stage.add_addresses(dst, dst, stride, last - first, zero)
            stage.fill_addresses(dst + (last - first) * 8, zero, 0, -last % STEP)

    return next_head


def _walk(key: DecodeKey, stage: Any, list_rows: Any, next_head: Any, in_place: bool) -> Any:
    """A device function of 11 arguments, see `attend_split`. `in_place`: whether rows stay where they are."""
    ROWS, KEYS, STEP = key.rows, key.lanes // key.rows, configs.STEP
    VECTOR, SIZE, PACK = key.lanes * 4, configs.STORAGE_BYTES[key.storage], key.pack
    GROUP_KEYS, HEADS, BY_TURNS = KEYS_PER_GROUP, in_place, key.by_turns and in_place

    @device
    def weigh_values(tile, o, begin, end, whole, rest):
        """O of one head and key block, whose rows of V and of what is read next are listed. Every row sees
        [whole, rest) of its keys [begin, end): there no weight needs a look."""
        args, block, v_rows = tile.args, tile.block, tile.v_rows
        p, later, channels = tile.s, tile.k_rows, args.head_dim_v
        alpha, ones, runs = block, block + VECTOR, args.page_table == 0
        if whole > begin:
            stage.accumulate_seen(
                v_rows, p, o, alpha, ones, (whole - begin) // GROUP_KEYS, channels, later, runs
            )
            alpha = ones
        if rest > whole:
            at, p_at = (whole - begin) * 8, p + (whole - begin) // PACK * ROWS * 4
            groups = (rest - whole) // GROUP_KEYS
            stage.accumulate(v_rows + at, p_at, o, alpha, ones, groups, channels, later + at, runs)
            alpha = ones
        if end > rest:
            at, p_at = (rest - begin) * 8, p + (rest - begin) // PACK * ROWS * 4
            groups = (end - rest) // GROUP_KEYS
            stage.accumulate_seen(v_rows + at, p_at, o, alpha, ones, groups, channels, later + at, runs)

    attend_heads = decode_heads.walk(key, stage, list_rows) if HEADS else None
    find_blocks, attend_row = decode_row.walk(key, stage, list_rows) if BY_TURNS else (None, None)

    @device
    def attend_split(tile, k, v, key_lo, key_hi, all_lo, all_hi, state, heads, ready, beyond):
        """The keys [key_lo, key_hi) of `heads` kv heads, block by block; every row sees [all_lo, all_hi).
        While K of a block is read its V is prefetched, and meanwhile the next K: memory never waits for
        arithmetic. The walk goes on to `beyond`: the first K after key_hi are left LISTED and prefetched, or
        SCORED; returns which, as the caller says what of this split's is `ready`."""
        args = tile.args
        s, block, k_rows, v_rows = tile.s, tile.block, tile.k_rows, tile.v_rows
        block_n = greatest(BLOCK_BYTES // (args.head_dim * SIZE) // 32, 1) * 32
        block_n = least(block_n, args.block_n)
        stage.fill(block + VECTOR, 1, ONE)
        together = together_end = ahead = 0
        if HEADS and args.side_by_side != 0 and heads == MOST_HEADS:
            together = (greatest(key_lo, all_lo) + block_n - 1) // block_n
            together_end = ahead = least(key_hi, all_hi) // block_n
            if key_hi % block_n == 0 and (together_end + 1) * block_n <= least(beyond, all_hi):
                ahead += 1  # to the next split
        turns = turns_end = turns_ahead = 0
        if BY_TURNS and heads == 1:
            lo, hi, seen = greatest(key_lo, all_lo), least(key_hi, all_hi), least(beyond, all_hi)
            turns, turns_end, turns_ahead = find_blocks(args, lo, hi, seen, block_n)
        i_n, end_n = key_lo // block_n, (key_hi + block_n - 1) // block_n
        while i_n < end_n:
            if HEADS and together <= i_n and i_n < together_end:
                attend_heads(tile, k, v, block_n, i_n, together_end, state, ready // SCORED, ahead, beyond)
                i_n, ready = together_end, SCORED if ahead > together_end else 0
                continue
            if BY_TURNS and turns <= i_n and i_n < turns_end:
                attend_row(tile, k, v, block_n, i_n, turns_end, state, ready, turns_ahead, beyond)
                i_n, ready = turns_end, SCORED if turns_ahead > turns_end else LISTED
                continue
            first, last = greatest(i_n * block_n, key_lo), least((i_n + 1) * block_n, key_hi)
            begin, end = first // STEP * STEP, (last + STEP - 1) // STEP * STEP
            whole = least(greatest((all_lo + GROUP_KEYS - 1) // GROUP_KEYS * GROUP_KEYS, begin), end)
            rest = least(greatest(all_hi // GROUP_KEYS * GROUP_KEYS, whole), end)
            if ready != LISTED:
                list_rows(tile, k, K_BATCH, k_rows, first, last)
            for i_h in range(heads):
                stats = state + i_h * args.partial_bytes
                q = tile.q + i_h * args.q_tile
                next_head(tile, v, V_BATCH, v_rows, first, last, i_h)
                stage.fill(block, 1, MINUS_INF)
                vectors = (end - begin) // KEYS
                channels, limits = args.head_dim, tile.limits
                factor, cap, runs = args.score_factor, args.score_cap, args.page_table == 0
                stage.scores(k_rows, q, s, block, vectors, channels, limits, begin, factor, cap, v_rows, runs)
                stage.online_softmax(s, vectors, block, stats, args.scale_log2)
                if i_h + 1 < heads:
                    next_head(tile, k, K_BATCH, k_rows, first, last, i_h + 1)
                elif last < beyond:
                    end_next = least((last // block_n + 1) * block_n, beyond)
                    list_rows(tile, k, K_BATCH, k_rows, last, end_next)
                weigh_values(tile, stats + 2 * VECTOR, begin, end, whole, rest)
            i_n, ready = i_n + 1, LISTED
        return ready

    return attend_split
