"""Attention backward on the CPU: dq, dk, dv, dbias and dsinks in one pass over the tiles of scores.

    P = exp(S - lse)    dP = dO·Vᵀ    delta = Σ dO·out - dlse    dS = P·(dP - delta)
    dV = Pᵀ·dO    dK = scale·dSᵀ·Q    dQ = scale·dS·K             (FlashAttention-2, algorithm 2)

One work item is a kv head and a range of its keys, whose dK and dV are its own; the query heads of the group
pass by in spans of rows that are packed once. Sums are float32 in an order that no thread changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from polyflash.backends.cpu import (
    arguments,
    backward_arguments,
    backward_configs,
    configs,
    loading,
    packing,
    pool,
    runtime,
)  # fmt: skip
from polyflash.backends.cpu.backward_configs import BiasGradientKey
from polyflash.backends.cpu.backward_sums import BiasSums, bias_sums, sink_gradient, zeros_in_order_of
from polyflash.backends.cpu.configs import DropoutKey
from polyflash.backends.cpu.words import (
    BACKWARD,
    BACKWARD_ITEM,
    CHANGE_SCORES,
    DOES_SOFTCAP,
    NEEDS_DBIAS,
    NEEDS_DK,
    NEEDS_DQ,
    NEEDS_DS,
    NEEDS_DV,
    PLAIN,
    START_BLOCK,
    START_ITEM,
    UNSEEN,
    BiasGradient,
    Cut,
    Entries,
    Gradients,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.cpu.backward_configs import BackwardKey
    from polyflash.plan import Launch
    from polyflash.spec import Arguments

KEPT_CUTS = 256  # per route
Needs = tuple[bool, bool, bool, bool, bool]  # dq, dk, dv, dbias, dsinks


def build(key: BackwardKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    from polyflash.backends.cpu import backward_blocks, simd
    from polyflash.backends.cpu.simd import greatest, least, load_i8, load_i32, store_i8
    from polyflash.backends.cpu.structs import Blocks

    stage, block = backward_blocks.stages(key), Blocks(BACKWARD, BACKWARD_ITEM)
    shared, device, tiles_at = loading.loaders(key, stage), block.device, block.tiles()
    call_pass, call_dropout, call_bias = simd.call_native(9), simd.call_native(7), simd.call_native(8)

    LANES, NR, NV, MR, PACK, STEP = key.lanes, key.panel_rows, key.nv, key.group_keys, key.pack, configs.STEP
    SIZE = configs.STORAGE_BYTES[key.storage]
    PANEL, WIDE_PANEL, ROWS = key.q_panel_bytes, key.o_panel_bytes, NR // PACK * key.v_row_bytes
    K_BYTES, V_BYTES = key.k_row_bytes, key.v_row_bytes
    S_ROW, P_ROW = NR * 4, NR * 4 // PACK
    KEYS_PER_TRIP, QUERIES_PER_TRIP = min(4, MR // PACK) * PACK, min(4, NR // 4) * PACK
    ALL, EMPTY, ONES = key.lanes * 4, -0x800000, 0xFFFFFFFF  # bytes of a vector; bits of -inf; all bits

    @device
    def load_panel(tile, i_p):
        """Q and dO of one panel of the span, packed and as rows; lse and delta of its rows."""
        args = tile.args
        item, zero = tile.item, args.zero
        i_t, head, row_end = item.tensor, item.head, item.row_end
        row, first_q = item.row + i_p * NR, item.first_q
        stage_rows, out_rows = tile.stage, tile.out_stage
        flip = args.sign | (args.sign >> 16 if PACK == 2 else 0)
        count, count_v = args.head_dim, args.head_dim_v
        vectors, vectors_v = (
            (count + PACK * LANES - 1) // (PACK * LANES),
            (count_v + PACK * LANES - 1) // (PACK * LANES),
        )
        q_row, do_row, out_row = args.q_row, args.do_row, args.out_row
        q = args.q + i_t * args.q_batch + head * args.q_head
        do = args.do + i_t * args.do_batch + head * args.do_head
        out = args.out + i_t * args.out_batch + head * args.out_head
        stats_at = 4 * (i_t * args.lse_batch + head * args.lse_head + first_q)
        q_panel, do_panel = tile.q, tile.do
        q_rows, do_rows = tile.q_rows, tile.do_rows
        bad = 0
        for lane in range(0, NR, LANES):
            rows, at = greatest(least(LANES, row_end - row - lane), 0), first_q + row + lane
            atom = i_p * ROWS + lane // PACK * V_BYTES
            if rows < LANES:
                stage.fill(stage_rows, LANES * K_BYTES // ALL, zero)
            shared.load_tile(tile, q + at * q_row, q_row, args.q_dim, rows, count, stage_rows)
            stage.pack_query(stage_rows, vectors, q_panel + i_p * PANEL + lane * 4, flip)
            stage.finite_rows(stage_rows, LANES // PACK, vectors, q_rows + atom)
            if rows < LANES:
                stage.fill(stage_rows, LANES * K_BYTES // ALL, zero)
            shared.load_tile(tile, do + at * do_row, do_row, SIZE, rows, count_v, stage_rows)
            lse = args.lse + stats_at + 4 * (row + lane)
            for r in range(rows):
                if load_i32(lse + 4 * r) == EMPTY:  # no gradient comes from a row that sees no key
                    stage.fill(stage_rows + r * K_BYTES, K_BYTES // ALL, zero)
            stage.pack_query(stage_rows, vectors_v, do_panel + i_p * PANEL + lane * 4, 0)
            bad |= stage.finite_rows(stage_rows, LANES // PACK, vectors_v, do_rows + atom)
            shared.load_tile(tile, out + at * out_row, out_row, SIZE, rows, count_v, out_rows)
            stats = tile.stats + i_p * NR * 8 + lane * 4
            stage.row_dots(stage_rows, out_rows, vectors_v, stats)
            dlse = 0
            if args.dlse != 0:
                dlse = args.dlse + stats_at + 4 * (row + lane)
            stage.start_stats(stats, lse, stats, dlse, rows)
        store_i8(tile.bad + i_p, bad)

    @device
    def load_keys(tile, k, v, n, first, last):
        """K and V rows [first, last) of key block n, and zeros up to whole steps. Returns where K can be
        read without what is not finite."""
        args = tile.args
        zero, k_tile, v_tile = args.zero, tile.k, tile.v
        begin, end = first // STEP * STEP - n, (last + STEP - 1) // STEP * STEP - n
        before, after = first - n, last - n
        for rows in (k_tile, v_tile):
            stage.fill(rows + begin * K_BYTES, (before - begin) * (K_BYTES // ALL), zero)
            stage.fill(rows + after * K_BYTES, (end - after) * (K_BYTES // ALL), zero)
        count, k_row, v_row = args.head_dim, args.k_row, args.v_row
        k_dst, v_dst = k_tile + before * K_BYTES, v_tile + before * K_BYTES
        shared.load_tile(tile, k + first * k_row, k_row, args.k_dim, last - first, count, k_dst)
        shared.load_tile(tile, v + first * v_row, v_row, args.v_dim, last - first,
            args.head_dim_v, v_dst,
        )  # fmt: skip
        if args.needs & NEEDS_DQ == 0:
            return k_tile
        rows = tile.k_rows
        vectors = (count + PACK * LANES - 1) // (PACK * LANES)
        at = begin // PACK * V_BYTES
        bad = stage.finite_rows(k_tile + begin * K_BYTES, (end - begin) // PACK, vectors, rows + at)
        return rows if PACK == 2 or bad != 0 else k_tile

    @device
    def weigh(tile, i_p, n, begin, end, inner_begin, inner_end, kind):
        """P and dS of keys n + [begin, end) of one panel from S and dP; every row sees all of
        [inner_begin, inner_end) if the tile is plain."""
        args = tile.args
        stats = tile.stats + i_p * NR * 8
        limits = tile.limits + i_p * NR * 8
        s, dp = tile.s, tile.dp
        p, ds, pairs = (
            tile.p,
            tile.ds,
            tile.ds_pairs,
        )
        scale = args.scale
        if kind == PLAIN and args.drop == 0:
            for part in range(3):
                lo = begin if part == 0 else inner_begin if part == 1 else inner_end
                hi = inner_begin if part == 0 else inner_end if part == 1 else end
                if hi <= lo:
                    continue
                s_at, row_at, pair_at = lo * S_ROW, lo * P_ROW, lo // PACK * S_ROW
                if part == 1:
                    stage.weights(
                        s + s_at, dp + s_at, p + row_at, ds + row_at, pairs + pair_at, stats, scale, hi - lo
                    )
                else:
                    stage.weights_bounded(
                        s + s_at, dp + s_at, p + row_at, ds + row_at, pairs + pair_at, stats, scale, hi - lo,
                        limits, n + lo,
                    )  # fmt: skip
            return
        item, keys, vectors = tile.item, end - begin, (end - begin) * NV
        at, row_end = begin * S_ROW, item.row_end
        row, head = item.row + i_p * NR, item.head
        keep, factor = tile.keep + at, tile.factor + at
        if args.drop != 0:
            plane = item.batch * args.num_kv_heads * args.group + head
            stage.fill(keep, vectors, ONES)
            call_dropout(args.drop, args, keep, plane, row, n + begin, keys, 1)
            stage.drop_grad(dp + at, keep, vectors, args.drop_scale)
        stage.weights_changed(s + at, dp + at, stats, scale, keys, limits, n + begin)
        if args.add_bias != 0:
            i_b, end_key = item.batch, n + end
            call_bias(args.add_bias, args, dp + at, i_b, head, row, row_end, n + begin, end_key)
        if args.pass_does & DOES_SOFTCAP and kind != PLAIN:
            stage.scale_by(dp + at, factor, vectors)
        if args.drop != 0:
            stage.keep_only(s + at, keep, vectors)
        stage.narrow(
            s + at, dp + at, p + begin * P_ROW, ds + begin * P_ROW, pairs + begin // PACK * S_ROW, keys
        )

    @device
    def multiply(tile, i_p, k_rows, begin, end):
        """dV, dK and dQ of one panel from P and dS of keys [begin, end) of the block."""
        args = tile.args
        needs, groups = args.needs, (end - begin) // MR
        trips = NR // QUERIES_PER_TRIP
        at, row_at, panel = begin * V_BYTES, begin * P_ROW, i_p * ROWS
        vectors, vectors_v = (
            (args.head_dim + LANES - 1) // LANES,
            (args.head_dim_v + LANES - 1) // LANES,
        )
        if needs & NEEDS_DV:
            p, do_rows = tile.p + row_at, tile.do_rows + panel
            stage.outer(p, do_rows, tile.dv + at, trips, groups, vectors_v)
        if needs & NEEDS_DK:
            ds, q_rows = tile.ds + row_at, tile.q_rows + panel
            stage.outer(ds, q_rows, tile.dk + at, trips, groups, vectors)
        if needs & NEEDS_DQ:
            pairs = tile.ds_pairs + begin // PACK * S_ROW
            dq = tile.o + i_p * WIDE_PANEL
            channels = (args.head_dim + MR - 1) // MR
            trips = (end - begin) // KEYS_PER_TRIP
            stage.accumulate_grad(k_rows + begin // PACK * V_BYTES, pairs, trips, dq, channels)

    @device
    def add_bad_rows(tile, i_p, begin, end):
        """To dV, what of this panel's dO is not finite."""
        args = tile.args
        item, count = tile.item, args.head_dim_v
        row, buffer = item.row + i_p * NR, tile.out_stage
        do = args.do + item.tensor * args.do_batch
        do += item.head * args.do_head
        do += (item.first_q + row) * args.do_row
        p, dv = tile.p + begin * P_ROW, tile.dv + begin * V_BYTES
        for r in range(least(NR, item.row_end - row)):
            stage.load_float_row(do + r * args.do_row, count, buffer)
            stage.add_nonfinite(p + r * 4 // PACK, buffer, (count + LANES - 1) // LANES, dv, end - begin)

    @device
    def differentiate(tile, i_p, n, k_rows):
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
        inner_begin = least(greatest((seen_by_all + MR - 1) // MR * MR, begin), end)
        inner_end = least(greatest(all_end // MR * MR, inner_begin), end)
        groups, at = (end - begin) // MR, begin * S_ROW
        s, dp = tile.s + at, tile.dp + at
        trips = (args.head_dim + 4 * PACK - 1) // (4 * PACK)
        k_tile, v_tile = tile.k + begin * K_BYTES, tile.v
        stage.product(k_tile, tile.q + i_p * PANEL, s, trips, groups)
        needs_ds = args.needs & NEEDS_DS
        if kind != PLAIN:
            if needs_ds != 0 and args.pass_does & DOES_SOFTCAP:
                factor = tile.factor + at
                stage.cap_factor(s, factor, (end - begin) * NV, args.to_cap)
            bounded = 1 if begin < seen_by_all or end > all_end else 0
            head = item.head
            call_pass(changes, args, tile, CHANGE_SCORES, head, i_p, n, begin, end, bounded)
        if needs_ds != 0:
            trips = (args.head_dim_v + 4 * PACK - 1) // (4 * PACK)
            do_panel = tile.do + i_p * PANEL
            stage.product(v_tile + begin * K_BYTES, do_panel, dp, trips, groups)
        weigh(tile, i_p, n, begin, end, inner_begin, inner_end, kind)
        multiply(tile, i_p, k_rows, begin, end)
        if load_i8(tile.bad + i_p) != 0 and args.needs & NEEDS_DV:
            add_bad_rows(tile, i_p, begin, end)

    @device
    def walk(tile, k, v, panels):
        """The keys [start, live) of the item, against the span, block by block."""
        args = tile.args
        item, block_n, needs = tile.item, args.block_n, args.needs
        row_0, row_end = item.row, item.row_end
        start, live = item.start, item.live
        lo_shift, hi_shift = item.lo_shift, item.hi_shift
        limits = tile.limits
        for i_p in range(panels):
            stage.fill_limits(
                limits + i_p * NR * 8, row_0 + i_p * NR, row_end - 1, lo_shift, hi_shift, start, live
            )
        key_lo, key_hi = greatest(start, row_0 + lo_shift), least(live, row_end - 1 + hi_shift)
        dk, dv = tile.dk, tile.dv
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
            k_rows = load_keys(tile, k, v, n, first, last)
            begin, end = (first - n) // STEP * STEP, (last - n + STEP - 1) // STEP * STEP
            vectors, at = (end - begin) * (V_BYTES // ALL), begin * V_BYTES
            stage.fill(dk + at, vectors, args.zero)
            stage.fill(dv + at, vectors, args.zero)
            for i_p in range(panels):
                differentiate(tile, i_p, n, k_rows)
            rows, at = last - first, (first - n) * V_BYTES
            if needs & NEEDS_DK:
                stride, scale = args.dk_row, args.grad_scale
                stage.add_rows(dk + at, item.dk + first * stride, stride, rows, args.head_dim, scale)
            if needs & NEEDS_DV:
                stride, scale = args.dv_row, args.drop_scale
                stage.add_rows(dv + at, item.dv + first * stride, stride, rows, args.head_dim_v, scale)

    @device
    def add_queries(tile, dst, begin, end):
        """dQ^T of the span onto its rows, where some row sees a key of [begin, end); it becomes 0."""
        args = tile.args
        item, stride = tile.item, args.dq_row
        row_0, row_end = item.row, item.row_end
        lo_shift, hi_shift = item.lo_shift, item.hi_shift
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
    def attend_span(tile, k, v, dq, lists):
        """One span of rows against the item's keys [begin, end), chunk by chunk of dQ."""
        args, item = tile.args, tile.item
        panels = item.panels
        channels = (args.head_dim + STEP - 1) // STEP * STEP
        for i_p in range(panels):
            load_panel(tile, i_p)
            stage.fill(tile.o + i_p * WIDE_PANEL, channels * NV, args.zero)
        if args.score_pass != 0:
            call_pass(args.score_pass, args, tile, START_ITEM, 0, 0, 0, 0, 0, 0)
        chunk, key_begin, key_end = item.chunk, item.begin, item.end
        count = 1 if lists == 0 else args.interval_count
        for c in range(key_begin // chunk, (key_end + chunk - 1) // chunk):
            first, last = greatest(key_begin, c * chunk), least(key_end, c * chunk + chunk)
            for t in range(count):
                begin, end = first, last
                if lists != 0:
                    begin, end = (
                        greatest(first, load_i32(lists + 8 * t)),
                        least(last, load_i32(lists + 8 * t + 4)),
                    )
                if begin < end:
                    item.start = begin
                    item.live = end
                    walk(tile, k, v, panels)
            if args.needs & NEEDS_DQ:
                add_queries(tile, dq, first, last)

    @block.kernel
    def kernel(args, number, scratch):
        tile = tiles_at(args, scratch)
        here, group = args.heads_here, args.group
        entry, i_hkv = args.entries + number // here * 20, args.first_head + number % here
        i_b = load_i32(entry)
        item = tile.item
        i_t, first_q, first_k, seqlen_q, start, live = shared.stand(tile, i_b)
        lo_shift, hi_shift = item.lo_shift, item.hi_shift
        begin, end = greatest(load_i32(entry + 4), start), least(load_i32(entry + 8), live)
        first_row, last_row = greatest(begin - hi_shift + 1, 0), least(end - lo_shift, seqlen_q)
        if end <= begin or last_row <= first_row:
            return
        stage.fill(tile.zero, V_BYTES // ALL, args.zero)
        item.heads = 1
        item.tensor = i_t
        item.first_q = first_q
        item.begin = begin
        item.end = end
        item.chunk = load_i32(entry + 16)
        k_head, v_head = i_t * args.k_batch, i_t * args.v_batch
        k = args.k + k_head + i_hkv * args.k_head + first_k * args.k_row
        v = args.v + v_head + i_hkv * args.v_head + first_k * args.v_row
        dk = args.dk + i_t * args.dk_batch + i_hkv * args.dk_head
        dv = args.dv + i_t * args.dv_batch + i_hkv * args.dv_head
        item.dk = dk + first_k * args.dk_row
        item.dv = dv + first_k * args.dv_row

        # A span lies within one row block of interval lists.
        span, block_rows, lists = args.row_panels * NR, seqlen_q, args.intervals
        if lists != 0:
            block_rows = args.interval_rows
        for head in range(i_hkv * group, i_hkv * group + group):
            dq = args.dq + load_i32(entry + 12) * args.dq_part
            dq += i_t * args.dq_batch + head * args.dq_head + first_q * args.dq_row
            item.head = head
            for i_r in range(first_row // block_rows, (last_row + block_rows - 1) // block_rows):
                pairs = 0
                if lists != 0:
                    pairs = lists + i_b * args.intervals_batch + head * args.intervals_head
                    pairs += i_r * args.intervals_block
                limit = least(last_row, (i_r + 1) * block_rows)
                for i_s in range((limit - i_r * block_rows + span - 1) // span):
                    base = i_r * block_rows + i_s * span
                    row = base + greatest(first_row - base, 0) // NR * NR
                    row_end = least(base + span, limit)
                    if row < row_end:
                        item.row = row
                        item.row_end = row_end
                        item.panels = (row_end - row + NR - 1) // NR
                        attend_span(tile, k, v, dq, pairs)

    return kernel


class _Cut(NamedTuple):
    """How a call of one shape is run: its kernel and scratch, its items, and the words that say so."""

    kernel: int
    nv: int
    table: Any
    parts: int  # partial sums of dQ
    scratch_bytes: int
    words: bytes  # of Cut and BackwardScratch


class _Prepared:
    """What a route keeps between calls; entries are only added, or dropped all at once, so Python threads
    may share it."""

    __slots__ = ("addresses", "cuts", "launch")

    def __init__(self, launch: Launch) -> None:
        configs.check_fits(launch.config, launch.spec, launch.target)
        self.launch = launch
        self.addresses: dict[Any, int] = {}
        self.cuts: dict[tuple[int, ...], _Cut] = {}

    def load(self, kind: Any, nv: int) -> int:
        """The address of a stage for panels of `nv` vectors."""
        found = self.addresses.get((kind, nv))
        if found is None:
            found = self.addresses[kind, nv] = runtime.load(kind(self.launch.config.isa, nv))
        return found

    def dense(self, batch: int, seqlen_q: int, seqlen_k: int, heads: int, at_once: int, threads: int) -> _Cut:
        """`at_once` batch entries of `heads` heads run together."""
        index = batch, seqlen_q, seqlen_k, heads, at_once, threads
        found = self.cuts.get(index)
        if found is None:
            if len(self.cuts) >= KEPT_CUTS:
                self.cuts = {}
            lens = np.full(batch, seqlen_q), np.full(batch, seqlen_k)
            made = backward_configs.entry_table(*lens, heads, threads, at_once)
            found = self.cuts[index] = self._cut(seqlen_q, *made)
        return found

    def packed(self, args: Arguments, heads: int, threads: int) -> _Cut:
        """Items of packed members."""
        lens = packing.member_lengths(args)
        made = backward_configs.entry_table(*lens, heads, threads)
        return self._cut(int(lens[0].max(initial=1)), *made)

    def _cut(self, longest: int, table: Any, parts: int) -> _Cut:
        config, spec = self.launch.config, self.launch.spec
        nv = configs.panel_vectors(config.isa, longest)
        key = backward_configs.key_for(config, spec, nv)
        row_panels = min(config.row_panels, -(-longest // key.panel_rows))
        tiles = backward_configs.scratch(key, row_panels, config.block_n)
        words = array("q", (*Cut(config.block_n, 1, 1, row_panels, 1, 1, zero=0), *tiles[:-1])).tobytes()
        return _Cut(runtime.load(key), nv, table, parts, tiles.total, words)


def _launches(table: Any, heads: int, bias: BiasSums | None) -> Iterator[tuple[Any, int, int]]:
    """Entries, first kv head and number of heads of every launch: all at once, unless they share sums."""
    tables = [table]
    if bias is not None and bias.one_batch:
        tables = [np.ascontiguousarray(table[table[:, 0] == b]) for b in np.unique(table[:, 0])]
    apart = bias is not None and bias.one_head
    for entries in tables if len(table) else ():
        for head in range(heads) if apart else (0,):
            yield entries, head, 1 if apart else heads


def _differentiate(
    launch: Launch,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: Arguments,
    needs: Needs,
    bias: BiasSums | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """float32 dq, dk and dv where they are asked for; the sums of `bias` are filled."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = _Prepared(launch)
    (batch, _, seqlen_q, head_dim), (_, num_kv_heads, seqlen_k, head_dim_v) = q.shape, v.shape
    left, right = arguments.window_sides(args)
    work_us = 5 * arguments.estimated_us(q.shape, seqlen_k, head_dim + head_dim_v, left, right, args) // 2
    threads = 1 if work_us < arguments.LEND_FROM_US else torch.get_num_threads()
    heads = 1 if bias is not None and bias.one_head else num_kv_heads
    if args.cu_seqlens_q is None:
        at_once = 1 if bias is not None and bias.one_batch else batch
        cut = prepared.dense(batch, seqlen_q, seqlen_k, heads, at_once, threads)
    else:
        cut = prepared.packed(args, heads, threads)
    kept: list[Any] = []
    scale = head_dim**-0.5 if args.scale is None else args.scale
    does = arguments.passes(args, scale)
    dq = zeros_in_order_of(q, cut.parts) if needs[0] else None
    dk, dv = (zeros_in_order_of(x, 1) if need else None for x, need in ((k, needs[1]), (v, needs[2])))
    score_pass = prepared.load(configs.ScoreKey, cut.nv) if does else 0
    head = arguments.head(q, k, v, out, lse.data_ptr(), seqlen_k, args, scale, does, 0, score_pass)
    block = array("q", head)
    if does or arguments.any_table(args):
        drop = prepared.load(DropoutKey, cut.nv) if args.dropout_p else 0
        block.frombytes(arguments.operands(args, scale, does, kept, 0, drop))
    else:
        block.frombytes(arguments.NO_OPERANDS)
    block.frombytes(cut.words)
    block.extend(backward_arguments.sums(dout, dlse, dq, dk, dv))
    add_bias = 0 if bias is None else prepared.load(BiasGradientKey, cut.nv)
    block.extend((0,) * 7 if bias is None else BiasGradient._make((*bias.words(), add_bias)))
    wanted = sum(1 << i for i in range(3) if needs[i]) | (0 if bias is None else NEEDS_DBIAS)
    scales = backward_arguments.gradient_scales(scale, args.dropout_p)
    block.extend(Gradients(backward_configs.chunk_keys(seqlen_k), wanted, *scales))
    wake = work_us >= arguments.WAKE_FROM_US
    for entries, first, here in _launches(cut.table, num_kv_heads, bias):
        words = block + array("q", Entries(entries.ctypes.data, first, here))
        address = words.buffer_info()[0]
        pool.run(cut.kernel, address, len(entries) * here, threads, cut.scratch_bytes, wake)
    if dq is None or cut.parts == 1:
        return dq, dk, dv
    for part in range(1, cut.parts):
        dq[0] += dq[part]
    return dq[0], dk, dv


def run(
    launch: Launch,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: Arguments,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv, dbias, dsinks, each with its operand's shape and dtype; None where `needs` is False."""
    dbias = dsinks = None
    bias: BiasSums | None = None
    dout, out = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (dout, out))
    dlse, lse = None if dlse is None else dlse.contiguous(), lse.contiguous()
    if needs[4] and args.sinks is not None:
        dsinks = sink_gradient(dout, dlse, out, lse, args.sinks.detach())
    if not any(needs[:4]):
        return None, None, None, None, dsinks
    if needs[3] and args.bias is not None:
        heads, seqlens = (q.shape[1], k.shape[1]), (q.shape[2], k.shape[2])
        bias = bias_sums(args.bias, q.shape[0], heads, seqlens)
    sums = _differentiate(launch, dout, dlse, q, k, v, out, lse, args, needs, bias)
    dq, dk, dv = sums if q.dtype is torch.float32 else (None if x is None else x.to(q.dtype) for x in sums)
    if bias is not None:
        dbias = bias.total(cast("Tensor", args.bias))
    return dq, dk, dv, dbias, dsinks
