"""The backward kernel: sums of dq, dk, dv and dbias in one pass over the tiles of scores.

One work item is a kv head and a range of its keys, whose dK and dV are its own; the query heads of the group
pass by in spans of rows that are packed once.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import backward_blocks, configs, intrinsics, words
from polyflash.backends.cpu.backward_configs import BackwardKey
from polyflash.backends.cpu.intrinsics import (
    call_native,
    greatest,
    least,
    load_i8,
    load_i32,
    namespace,
    store_i8,
)
from polyflash.backends.cpu.kernels import walk
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import BACKWARD, BACKWARD_ITEM

EMPTY, ONES = -0x800000, 0xFFFFFFFF  # bits of -inf; all bits

BLOCK = Blocks(BACKWARD, BACKWARD_ITEM)
device = BLOCK.device


def loads(key: BackwardKey, stage: Any, shared: Any) -> Any:
    """Make what brings rows and keys into scratch: load_panel, load_keys."""
    LANES, NR, PACK, STEP = key.lanes, key.panel_rows, key.pack, configs.STEP
    SIZE, PANEL, ROWS = configs.STORAGE_BYTES[key.storage], key.q_panel_bytes, NR // PACK * key.v_row_bytes
    K_BYTES, V_BYTES, VECTOR, ATOM_LANES = key.k_row_bytes, key.v_row_bytes, LANES * 4, PACK * LANES

    @device
    def stage_rows(tile, src, stride, dim_stride, rows, count):
        """Rows as the products take them; those beyond `rows` are zero."""
        if rows < LANES:
            stage.fill(tile.stage, LANES * K_BYTES // VECTOR, tile.args.zero)
        shared.load_tile(tile, src, stride, dim_stride, rows, count, tile.stage)

    @device
    def load_panel(tile, i_p):
        """Q and dO of one panel of the span, packed and as rows; lse and delta of its rows."""
        args, item = tile.args, tile.item
        i_t, head, row_end = item.tensor, item.head, item.row_end
        row, first_q = item.row + i_p * NR, item.first_q
        flip = args.sign | (args.sign >> 16 if PACK == 2 else 0)
        count, count_v = args.head_dim, args.head_dim_v
        vectors, vectors_v = (count + ATOM_LANES - 1) // ATOM_LANES, (count_v + ATOM_LANES - 1) // ATOM_LANES
        q_row, do_row, out_row = args.q_row, args.do_row, args.out_row
        q = args.q + i_t * args.q_batch + head * args.q_head
        do = args.do + i_t * args.do_batch + head * args.do_head
        out = args.out + i_t * args.out_batch + head * args.out_head
        stats_at = 4 * (i_t * args.lse_batch + head * args.lse_head + first_q)
        staged, out_rows = tile.stage, tile.out_stage
        bad = 0
        for lane in range(0, NR, LANES):
            rows, at = greatest(least(LANES, row_end - row - lane), 0), first_q + row + lane
            atom, packed = i_p * ROWS + lane // PACK * V_BYTES, i_p * PANEL + lane * 4
            stage_rows(tile, q + at * q_row, q_row, args.q_dim, rows, count)
            stage.pack_query(staged, vectors, tile.q + packed, flip)
            stage.finite_rows(staged, LANES // PACK, vectors, tile.q_rows + atom)
            stage_rows(tile, do + at * do_row, do_row, SIZE, rows, count_v)
            lse = args.lse + stats_at + 4 * (row + lane)
            for r in range(rows):
                if load_i32(lse + 4 * r) == EMPTY:  # no gradient comes from a row that sees no key
                    stage.fill(staged + r * K_BYTES, K_BYTES // VECTOR, args.zero)
            stage.pack_query(staged, vectors_v, tile.do + packed, 0)
            bad |= stage.finite_rows(staged, LANES // PACK, vectors_v, tile.do_rows + atom)
            shared.load_tile(tile, out + at * out_row, out_row, SIZE, rows, count_v, out_rows)
            stats = tile.stats + i_p * NR * 8 + lane * 4
            stage.row_dots(staged, out_rows, vectors_v, stats)
            dlse = args.dlse + stats_at + 4 * (row + lane) if args.dlse != 0 else 0
            stage.start_stats(stats, lse, stats, dlse, rows)
        store_i8(tile.bad + i_p, bad)

    @device
    def load_keys(tile, k, v, first, last):
        """K and V rows [first, last) of the key block, and zeros up to whole steps. Returns where K can be
        read without what is not finite."""
        args, n = tile.args, tile.item.key
        zero, k_tile, v_tile = args.zero, tile.k, tile.v
        begin, end = first // STEP * STEP - n, (last + STEP - 1) // STEP * STEP - n
        before, after = first - n, last - n
        for rows in (k_tile, v_tile):
            stage.fill(rows + begin * K_BYTES, (before - begin) * (K_BYTES // VECTOR), zero)
            stage.fill(rows + after * K_BYTES, (end - after) * (K_BYTES // VECTOR), zero)
        count, count_v, k_row, v_row = args.head_dim, args.head_dim_v, args.k_row, args.v_row
        k_dst, v_dst = k_tile + before * K_BYTES, v_tile + before * K_BYTES
        shared.load_tile(tile, k + first * k_row, k_row, args.k_dim, last - first, count, k_dst)
        shared.load_tile(tile, v + first * v_row, v_row, args.v_dim, last - first, count_v, v_dst)
        if args.needs & words.NEEDS_DQ == 0:
            return k_tile
        rows, at = tile.k_rows, begin // PACK * V_BYTES
        vectors, atoms = (count + ATOM_LANES - 1) // ATOM_LANES, (end - begin) // PACK
        bad = stage.finite_rows(k_tile + begin * K_BYTES, atoms, vectors, rows + at)
        return rows if PACK == 2 or bad != 0 else k_tile

    return namespace(load_panel, load_keys)


def weights(key: BackwardKey, stage: Any) -> Any:
    """Make what turns S and dP of a tile into P and dS: weigh."""
    call_dropout, call_bias = call_native(7), call_native(8)
    NR, NV, PACK = key.panel_rows, key.nv, key.pack
    S_ROW, P_ROW = NR * 4, NR * 4 // PACK

    @device
    def weigh_keys(tile, i_p, lo, hi, limits):
        """Keys [lo, hi) of a plain tile; `limits` is 0 where every row sees them all."""
        if lo < hi:
            s, dp, p = tile.s + lo * S_ROW, tile.dp + lo * S_ROW, tile.p + lo * P_ROW
            ds, pairs, stats = tile.ds + lo * P_ROW, tile.ds_pairs + lo // PACK * S_ROW, i_p * NR * 8
            stats, scale, n = tile.stats + stats, tile.args.scale, tile.item.key
            if limits == 0:
                stage.weights(s, dp, p, ds, pairs, stats, scale, hi - lo)
            else:
                stage.weights_bounded(s, dp, p, ds, pairs, stats, scale, hi - lo, limits, n + lo)

    @device
    def weigh_changed(tile, i_p, begin, end, kind):
        """Keys [begin, end) of a tile whose scores the pass, or whose weights dropout, changes."""
        args, item = tile.args, tile.item
        n, keys, vectors, at = item.key, end - begin, (end - begin) * NV, begin * S_ROW
        row, head, row_end = item.row + i_p * NR, item.head, item.row_end
        stats, limits = tile.stats + i_p * NR * 8, tile.limits + i_p * NR * 8
        s, dp, keep = tile.s + at, tile.dp + at, tile.keep + at
        if args.drop != 0:
            plane = item.batch * args.num_kv_heads * args.group + head
            stage.fill(keep, vectors, ONES)
            call_dropout(args.drop, args, keep, plane, row, n + begin, keys, 1)
            stage.drop_grad(dp, keep, vectors, args.drop_scale)
        stage.weights_changed(s, dp, stats, args.scale, keys, limits, n + begin)
        if args.add_bias != 0:
            call_bias(args.add_bias, args, dp, item.batch, head, row, row_end, n + begin, n + end)
        if args.pass_does & words.DOES_SOFTCAP and kind != words.PLAIN:
            stage.scale_by(dp, tile.factor + at, vectors)
        if args.drop != 0:
            stage.keep_only(s, keep, vectors)
        p, ds = tile.p + begin * P_ROW, tile.ds + begin * P_ROW
        stage.narrow(s, dp, p, ds, tile.ds_pairs + begin // PACK * S_ROW, keys)

    @device
    def weigh(tile, i_p, kind, begin, end, inner_begin, inner_end):
        """P and dS of keys [begin, end) of one panel; every row sees all of [inner_begin, inner_end)."""
        if kind == words.PLAIN and tile.args.drop == 0:
            limits = tile.limits + i_p * NR * 8
            weigh_keys(tile, i_p, begin, inner_begin, limits)
            weigh_keys(tile, i_p, inner_begin, inner_end, 0)
            weigh_keys(tile, i_p, inner_end, end, limits)
        else:
            weigh_changed(tile, i_p, begin, end, kind)

    return namespace(weigh)


def products(key: BackwardKey, stage: Any, shared: Any) -> Any:
    """Make what adds one tile to the gradients: differentiate."""
    weigh = weights(key, stage).weigh
    LANES, NR, NV, MR, PACK = key.lanes, key.panel_rows, key.nv, key.group_keys, key.pack
    PANEL, WIDE_PANEL, ROWS = key.q_panel_bytes, key.o_panel_bytes, NR // PACK * key.v_row_bytes
    K_BYTES, V_BYTES, S_ROW, P_ROW = key.k_row_bytes, key.v_row_bytes, NR * 4, NR * 4 // PACK
    KEYS_PER_TRIP, QUERIES_PER_TRIP = min(4, MR // PACK) * PACK, min(4, NR // 4) * PACK

    @device
    def make_scores(tile, i_p, kind, begin, end, inner_begin, inner_end):
        """S^T, and dP^T where some gradient needs it."""
        args, at, groups = tile.args, begin * S_ROW, (end - begin) // MR
        s, needs_ds = tile.s + at, args.needs & words.NEEDS_DS
        trips = (args.head_dim + 4 * PACK - 1) // (4 * PACK)
        stage.product(tile.k + begin * K_BYTES, tile.q + i_p * PANEL, s, trips, groups)
        if kind != words.PLAIN:
            if needs_ds != 0 and args.pass_does & words.DOES_SOFTCAP:
                stage.cap_factor(s, tile.factor + at, (end - begin) * NV, args.to_cap)
            shared.change_scores(tile, tile.item.head, i_p, begin, end, inner_begin, inner_end)
        if needs_ds != 0:
            trips = (args.head_dim_v + 4 * PACK - 1) // (4 * PACK)
            stage.product(tile.v + begin * K_BYTES, tile.do + i_p * PANEL, tile.dp + at, trips, groups)

    @device
    def multiply(tile, i_p, k_rows, begin, end):
        """dV, dK and dQ of one panel from P and dS of keys [begin, end) of the block."""
        args = tile.args
        needs, groups = args.needs, (end - begin) // MR
        trips = NR // QUERIES_PER_TRIP
        at, row_at, panel = begin * V_BYTES, begin * P_ROW, i_p * ROWS
        vectors, vectors_v = (args.head_dim + LANES - 1) // LANES, (args.head_dim_v + LANES - 1) // LANES
        if needs & words.NEEDS_DV:
            p, do_rows = tile.p + row_at, tile.do_rows + panel
            stage.outer(p, do_rows, tile.dv + at, trips, groups, vectors_v)
        if needs & words.NEEDS_DK:
            ds, q_rows = tile.ds + row_at, tile.q_rows + panel
            stage.outer(ds, q_rows, tile.dk + at, trips, groups, vectors)
        if needs & words.NEEDS_DQ:
            pairs, dq = tile.ds_pairs + begin // PACK * S_ROW, tile.o + i_p * WIDE_PANEL
            trips, channels = (end - begin) // KEYS_PER_TRIP, (args.head_dim + MR - 1) // MR
            stage.accumulate_grad(k_rows + begin // PACK * V_BYTES, pairs, trips, dq, channels)

    @device
    def add_bad_rows(tile, i_p, begin, end):
        """To dV, what of this panel's dO is not finite."""
        args, item = tile.args, tile.item
        count, row, buffer = args.head_dim_v, item.row + i_p * NR, tile.out_stage
        do = args.do + item.tensor * args.do_batch + item.head * args.do_head
        do += (item.first_q + row) * args.do_row
        p, dv = tile.p + begin * P_ROW, tile.dv + begin * V_BYTES
        for r in range(least(NR, item.row_end - row)):
            stage.load_float_row(do + r * args.do_row, count, buffer)
            stage.add_nonfinite(p + r * 4 // PACK, buffer, (count + LANES - 1) // LANES, dv, end - begin)

    @device
    def differentiate(tile, i_p, k_rows):
        """One tile: a panel of the span against the key block."""
        kind = shared.panel_kind(tile, i_p)
        begin, end, inner_begin, inner_end = shared.block_range(tile, i_p, kind)
        if end <= begin:
            return
        make_scores(tile, i_p, kind, begin, end, inner_begin, inner_end)
        weigh(tile, i_p, kind, begin, end, inner_begin, inner_end)
        multiply(tile, i_p, k_rows, begin, end)
        if load_i8(tile.bad + i_p) != 0 and tile.args.needs & words.NEEDS_DV:
            add_bad_rows(tile, i_p, begin, end)

    return namespace(differentiate)


def spans(key: BackwardKey, stage: Any, shared: Any) -> Any:
    """Make what a span of rows adds to the gradients: attend_span."""
    load, tiles = loads(key, stage, shared), products(key, stage, shared)
    LANES, NR, NV, STEP = key.lanes, key.panel_rows, key.nv, configs.STEP
    WIDE_PANEL, V_BYTES = key.o_panel_bytes, key.v_row_bytes
    ROW_VECTORS = V_BYTES // (LANES * 4)

    @device
    def attend_interval(tile, k, v, start, live):
        """The keys [start, live) of the item, against the span, block by block."""
        args, item = tile.args, tile.item
        block_n, needs, dk, dv = args.block_n, args.needs, tile.dk, tile.dv
        shared.row_limits(tile, start, live)
        key_lo, key_hi = shared.key_span(tile)
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            first, last = shared.block_keys(tile, i_n, key_lo, key_hi)
            if last <= first or shared.begin_block(tile, first, last) == 0:
                continue
            n, k_rows = item.key, load.load_keys(tile, k, v, first, last)
            begin, end = (first - n) // STEP * STEP, (last - n + STEP - 1) // STEP * STEP
            stage.fill(dk + begin * V_BYTES, (end - begin) * ROW_VECTORS, args.zero)
            stage.fill(dv + begin * V_BYTES, (end - begin) * ROW_VECTORS, args.zero)
            for i_p in range(item.panels):
                tiles.differentiate(tile, i_p, k_rows)
            rows, at = last - first, (first - n) * V_BYTES
            if needs & words.NEEDS_DK:
                stride, scale = args.dk_row, args.grad_scale
                stage.add_rows(dk + at, item.dk + first * stride, stride, rows, args.head_dim, scale)
            if needs & words.NEEDS_DV:
                stride, scale = args.dv_row, args.drop_scale
                stage.add_rows(dv + at, item.dv + first * stride, stride, rows, args.head_dim_v, scale)

    @device
    def add_queries(tile, dst, begin, end):
        """dQ^T of the span onto its rows, where some row sees a key of [begin, end); it becomes 0."""
        args, item, stride = tile.args, tile.item, tile.args.dq_row
        row_0, row_end, lo_shift, hi_shift = item.row, item.row_end, item.lo_shift, item.hi_shift
        for i_p in range(item.panels):
            row = row_0 + i_p * NR
            if least(row + NR, row_end) - 1 + hi_shift <= begin or row + lo_shift >= end:
                continue
            panel = tile.o + i_p * WIDE_PANEL
            for lane in range(0, NR, LANES):
                rows = least(LANES, row_end - row - lane)
                if rows > 0:
                    at = dst + (row + lane) * stride
                    count, scale = args.head_dim, args.grad_scale
                    stage.add_transposed(panel + lane * 4, at, stride, rows, count, scale)

    @device
    def attend_span(tile, k, v, dq, pairs):
        """One span of rows against the item's keys [begin, end), chunk by chunk of dQ."""
        args, item = tile.args, tile.item
        channels = (args.head_dim + STEP - 1) // STEP * STEP
        for i_p in range(item.panels):
            load.load_panel(tile, i_p)
            stage.fill(tile.o + i_p * WIDE_PANEL, channels * NV, args.zero)
        shared.start_pass(tile)
        chunk, key_begin, key_end = item.chunk, item.begin, item.end
        for c in range(key_begin // chunk, (key_end + chunk - 1) // chunk):
            first, last = greatest(key_begin, c * chunk), least(key_end, c * chunk + chunk)
            for t in range(args.interval_count if pairs != 0 else 1):
                begin, end = shared.interval(pairs, t, first, last)
                if begin < end:
                    attend_interval(tile, k, v, begin, end)
            if args.needs & words.NEEDS_DQ:
                add_queries(tile, dq, first, last)

    return namespace(attend_span)


def build(key: BackwardKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    stage = intrinsics.stages(key, backward_blocks.BackwardTile(key))
    shared, tiles_at = walk.tools(key, stage), BLOCK.tiles()
    span_of, NR, V_BYTES, VECTOR = spans(key, stage, shared), key.panel_rows, key.v_row_bytes, key.lanes * 4

    @device
    def start_item(tile, entry, i_t, i_hkv, first_q, first_k):
        """The item's place among rows and keys; returns where K and V of its first key lie."""
        args, item = tile.args, tile.item
        stage.fill(tile.zero, V_BYTES // VECTOR, args.zero)
        item.heads = 1
        item.tensor = i_t
        item.first_q = first_q
        item.chunk = load_i32(entry + 16)
        k_head, v_head = i_t * args.k_batch, i_t * args.v_batch
        k = args.k + k_head + i_hkv * args.k_head + first_k * args.k_row
        v = args.v + v_head + i_hkv * args.v_head + first_k * args.v_row
        dk = args.dk + i_t * args.dk_batch + i_hkv * args.dk_head
        dv = args.dv + i_t * args.dv_batch + i_hkv * args.dv_head
        item.dk = dk + first_k * args.dk_row
        item.dv = dv + first_k * args.dv_row
        return k, v

    @BLOCK.kernel
    def kernel(args, number, scratch):
        tile = tiles_at(args, scratch)
        here, group, item = args.heads_here, args.group, tile.item
        entry, i_hkv = args.entries + number // here * 20, args.first_head + number % here
        i_b = load_i32(entry)
        i_t, first_q, first_k, seqlen_q, start, live = shared.stand(tile, i_b)
        begin, end = greatest(load_i32(entry + 4), start), least(load_i32(entry + 8), live)
        first_row = greatest(begin - item.hi_shift + 1, 0)
        last_row = least(end - item.lo_shift, seqlen_q)
        if end <= begin or last_row <= first_row:
            return
        k, v = start_item(tile, entry, i_t, i_hkv, first_q, first_k)
        item.begin = begin
        item.end = end

        # A span lies within one row block of interval lists.
        span, block_rows = args.row_panels * NR, seqlen_q
        if args.intervals != 0:
            block_rows = args.interval_rows
        for head in range(i_hkv * group, i_hkv * group + group):
            dq = args.dq + load_i32(entry + 12) * args.dq_part
            dq += i_t * args.dq_batch + head * args.dq_head + first_q * args.dq_row
            item.head = head
            for i_r in range(first_row // block_rows, (last_row + block_rows - 1) // block_rows):
                pairs = shared.interval_list(args, i_b, head, i_r)
                limit = least(last_row, (i_r + 1) * block_rows)
                for i_s in range((limit - i_r * block_rows + span - 1) // span):
                    base = i_r * block_rows + i_s * span
                    row = base + greatest(first_row - base, 0) // NR * NR
                    row_end = least(base + span, limit)
                    if row < row_end:
                        item.row = row
                        item.row_end = row_end
                        item.panels = (row_end - row + NR - 1) // NR
                        span_of.attend_span(tile, k, v, dq, pairs)

    return kernel
