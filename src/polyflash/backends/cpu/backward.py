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

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import backward_arguments as g
from polyflash.backends.cpu import backward_configs, configs, loading, packing, pool, runtime
from polyflash.backends.cpu.backward_configs import BiasGradientKey
from polyflash.backends.cpu.backward_sums import BiasSums, bias_sums, sink_gradient, zeros_in_order_of
from polyflash.backends.cpu.configs import DropoutKey

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.cpu.backward_configs import BackwardKey
    from polyflash.plan import Launch
    from polyflash.spec import Arguments

KEPT_CUTS = 256  # per route
Needs = tuple[bool, bool, bool, bool, bool]  # dq, dk, dv, dbias, dsinks


def build(key: BackwardKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    from numba import cfunc, types

    from polyflash.backends.cpu import backward_blocks, simd

    stage = backward_blocks.stages(key)
    fill, fill_limits, load_float_row, pack_query = (
        stage.fill, stage.fill_limits, stage.load_float_row, stage.pack_query,
    )  # fmt: skip
    finite_rows, row_dots, start_stats = stage.finite_rows, stage.row_dots, stage.start_stats
    product, outer, accumulate_grad = stage.product, stage.outer, stage.accumulate_grad
    weights, weights_bounded, weights_changed = stage.weights, stage.weights_bounded, stage.weights_changed
    cap_factor, scale_by, drop_grad, keep_only = (
        stage.cap_factor, stage.scale_by, stage.drop_grad, stage.keep_only,
    )  # fmt: skip
    narrow, add_rows, add_transposed, add_nonfinite = (
        stage.narrow, stage.add_rows, stage.add_transposed, stage.add_nonfinite,
    )  # fmt: skip
    arg, load_i32, load_i8, store_i8 = simd.word, simd.load_i32, simd.load_i8, simd.store_i8
    store_i64, least, greatest = simd.store_i64, simd.least, simd.greatest
    call_pass, call_dropout, call_bias = simd.call_native(9), simd.call_native(7), simd.call_native(8)
    shared = loading.loaders(key, stage)
    load_tile, stand = shared.load_tile, shared.stand
    device = loading.device

    LANES, NR, NV, MR, PACK, STEP = key.lanes, key.panel_rows, key.nv, key.group_keys, key.pack, configs.STEP
    SIZE = configs.STORAGE_BYTES[key.storage]
    PANEL, WIDE_PANEL, ROWS = key.q_panel_bytes, key.o_panel_bytes, NR // PACK * key.v_row_bytes
    K_BYTES, V_BYTES = key.k_row_bytes, key.v_row_bytes
    S_ROW, P_ROW = NR * 4, NR * 4 // PACK
    KEYS_PER_TRIP, QUERIES_PER_TRIP = min(4, MR // PACK) * PACK, min(4, NR // 4) * PACK
    ALL, EMPTY, ONES = key.lanes * 4, -0x800000, 0xFFFFFFFF  # bytes of a vector; bits of -inf; all bits

    @device(3)
    def load_panel(args, scratch, i_p):  # type: ignore[no-untyped-def]
        """Q and dO of one panel of the span, packed and as rows; lse and delta of its rows."""
        item, zero = scratch + arg(args, a.T_ITEM), arg(args, a.ZERO)
        i_t, head, row_end = arg(item, g.I_TENSOR), arg(item, a.I_HEAD), arg(item, a.I_ROW_END)
        row, first_q = arg(item, a.I_ROW) + i_p * NR, arg(item, g.I_FIRST_Q)
        stage_rows, out_rows = scratch + arg(args, a.T_STAGE), scratch + arg(args, g.T_OUT_STAGE)
        flip = arg(args, a.SIGN) | (arg(args, a.SIGN) >> 16 if PACK == 2 else 0)
        count, count_v = arg(args, a.HEAD_DIM), arg(args, a.HEAD_DIM_V)
        vectors, vectors_v = (
            (count + PACK * LANES - 1) // (PACK * LANES),
            (count_v + PACK * LANES - 1) // (PACK * LANES),
        )
        q_row, do_row, out_row = arg(args, a.Q_ROW), arg(args, g.DO_ROW), arg(args, a.OUT_ROW)
        q = arg(args, a.Q) + i_t * arg(args, a.Q_BATCH) + head * arg(args, a.Q_HEAD)
        do = arg(args, g.DO) + i_t * arg(args, g.DO_BATCH) + head * arg(args, g.DO_HEAD)
        out = arg(args, a.OUT) + i_t * arg(args, a.OUT_BATCH) + head * arg(args, a.OUT_HEAD)
        stats_at = 4 * (i_t * arg(args, a.LSE_BATCH) + head * arg(args, a.LSE_HEAD) + first_q)
        q_panel, do_panel = scratch + arg(args, a.T_Q), scratch + arg(args, g.T_DO)
        q_rows, do_rows = scratch + arg(args, g.T_Q_ROWS), scratch + arg(args, g.T_DO_ROWS)
        bad = 0
        for lane in range(0, NR, LANES):
            rows, at = greatest(least(LANES, row_end - row - lane), 0), first_q + row + lane
            atom = i_p * ROWS + lane // PACK * V_BYTES
            if rows < LANES:
                fill(stage_rows, LANES * K_BYTES // ALL, zero)
            load_tile(args, scratch, q + at * q_row, q_row, arg(args, a.Q_DIM), rows, count, stage_rows)
            pack_query(stage_rows, vectors, q_panel + i_p * PANEL + lane * 4, flip)
            finite_rows(stage_rows, LANES // PACK, vectors, q_rows + atom)
            if rows < LANES:
                fill(stage_rows, LANES * K_BYTES // ALL, zero)
            load_tile(args, scratch, do + at * do_row, do_row, SIZE, rows, count_v, stage_rows)
            lse = arg(args, a.LSE) + stats_at + 4 * (row + lane)
            for r in range(rows):
                if load_i32(lse + 4 * r) == EMPTY:  # no gradient comes from a row that sees no key
                    fill(stage_rows + r * K_BYTES, K_BYTES // ALL, zero)
            pack_query(stage_rows, vectors_v, do_panel + i_p * PANEL + lane * 4, 0)
            bad |= finite_rows(stage_rows, LANES // PACK, vectors_v, do_rows + atom)
            load_tile(args, scratch, out + at * out_row, out_row, SIZE, rows, count_v, out_rows)
            stats = scratch + arg(args, a.T_STATS) + i_p * NR * 8 + lane * 4
            row_dots(stage_rows, out_rows, vectors_v, stats)
            dlse = 0
            if arg(args, g.DLSE) != 0:
                dlse = arg(args, g.DLSE) + stats_at + 4 * (row + lane)
            start_stats(stats, lse, stats, dlse, rows)
        store_i8(scratch + arg(args, a.T_BAD) + i_p, bad)

    @device(7, types.int64)
    def load_keys(args, scratch, k, v, n, first, last):  # type: ignore[no-untyped-def]
        """K and V rows [first, last) of key block n, and zeros up to whole steps. Returns where K can be
        read without what is not finite."""
        zero, k_tile, v_tile = arg(args, a.ZERO), scratch + arg(args, a.T_K), scratch + arg(args, a.T_V)
        begin, end = first // STEP * STEP - n, (last + STEP - 1) // STEP * STEP - n
        before, after = first - n, last - n
        for tile in (k_tile, v_tile):
            fill(tile + begin * K_BYTES, (before - begin) * (K_BYTES // ALL), zero)
            fill(tile + after * K_BYTES, (end - after) * (K_BYTES // ALL), zero)
        count, k_row, v_row = arg(args, a.HEAD_DIM), arg(args, a.K_ROW), arg(args, a.V_ROW)
        k_dst, v_dst = k_tile + before * K_BYTES, v_tile + before * K_BYTES
        load_tile(args, scratch, k + first * k_row, k_row, arg(args, a.K_DIM), last - first, count, k_dst)
        load_tile(
            args, scratch, v + first * v_row, v_row, arg(args, a.V_DIM), last - first,
            arg(args, a.HEAD_DIM_V), v_dst,
        )  # fmt: skip
        if arg(args, g.NEEDS) & g.NEEDS_DQ == 0:
            return k_tile
        rows = scratch + arg(args, g.T_K_ROWS)
        vectors = (count + PACK * LANES - 1) // (PACK * LANES)
        at = begin // PACK * V_BYTES
        bad = finite_rows(k_tile + begin * K_BYTES, (end - begin) // PACK, vectors, rows + at)
        return rows if PACK == 2 or bad != 0 else k_tile

    @device(9)
    def weigh(args, scratch, i_p, n, begin, end, inner_begin, inner_end, kind):  # type: ignore[no-untyped-def]
        """P and dS of keys n + [begin, end) of one panel from S and dP; every row sees all of
        [inner_begin, inner_end) if the tile is plain."""
        stats = scratch + arg(args, a.T_STATS) + i_p * NR * 8
        limits = scratch + arg(args, a.T_LIMITS) + i_p * NR * 8
        s, dp = scratch + arg(args, a.T_S), scratch + arg(args, g.T_DP)
        p, ds, pairs = (
            scratch + arg(args, a.T_P),
            scratch + arg(args, g.T_DS),
            scratch + arg(args, g.T_DS_PAIRS),
        )
        scale = arg(args, a.SCALE)
        if kind == a.PLAIN and arg(args, a.DROP) == 0:
            for part in range(3):
                lo = begin if part == 0 else inner_begin if part == 1 else inner_end
                hi = inner_begin if part == 0 else inner_end if part == 1 else end
                if hi <= lo:
                    continue
                s_at, row_at, pair_at = lo * S_ROW, lo * P_ROW, lo // PACK * S_ROW
                if part == 1:
                    weights(
                        s + s_at, dp + s_at, p + row_at, ds + row_at, pairs + pair_at, stats, scale, hi - lo
                    )
                else:
                    weights_bounded(
                        s + s_at, dp + s_at, p + row_at, ds + row_at, pairs + pair_at, stats, scale, hi - lo,
                        limits, n + lo,
                    )  # fmt: skip
            return
        item, keys, vectors = scratch + arg(args, a.T_ITEM), end - begin, (end - begin) * NV
        at, row_end = begin * S_ROW, arg(item, a.I_ROW_END)
        row, head = arg(item, a.I_ROW) + i_p * NR, arg(item, a.I_HEAD)
        keep, factor = scratch + arg(args, g.T_KEEP) + at, scratch + arg(args, g.T_FACTOR) + at
        if arg(args, a.DROP) != 0:
            plane = arg(item, a.I_BATCH) * arg(args, a.NUM_KV_HEADS) * arg(args, a.GROUP) + head
            fill(keep, vectors, ONES)
            call_dropout(arg(args, a.DROP), args, keep, plane, row, n + begin, keys, 1)
            drop_grad(dp + at, keep, vectors, arg(args, g.DROP_SCALE))
        weights_changed(s + at, dp + at, stats, scale, keys, limits, n + begin)
        if arg(args, g.ADD_BIAS) != 0:
            i_b, end_key = arg(item, a.I_BATCH), n + end
            call_bias(arg(args, g.ADD_BIAS), args, dp + at, i_b, head, row, row_end, n + begin, end_key)
        if arg(args, a.PASS_DOES) & a.DOES_SOFTCAP and kind != a.PLAIN:
            scale_by(dp + at, factor, vectors)
        if arg(args, a.DROP) != 0:
            keep_only(s + at, keep, vectors)
        narrow(s + at, dp + at, p + begin * P_ROW, ds + begin * P_ROW, pairs + begin // PACK * S_ROW, keys)

    @device(6)
    def multiply(args, scratch, i_p, k_rows, begin, end):  # type: ignore[no-untyped-def]
        """dV, dK and dQ of one panel from P and dS of keys [begin, end) of the block."""
        needs, groups = arg(args, g.NEEDS), (end - begin) // MR
        trips = NR // QUERIES_PER_TRIP
        at, row_at, panel = begin * V_BYTES, begin * P_ROW, i_p * ROWS
        vectors, vectors_v = (
            (arg(args, a.HEAD_DIM) + LANES - 1) // LANES,
            (arg(args, a.HEAD_DIM_V) + LANES - 1) // LANES,
        )
        if needs & g.NEEDS_DV:
            p, do_rows = scratch + arg(args, a.T_P) + row_at, scratch + arg(args, g.T_DO_ROWS) + panel
            outer(p, do_rows, scratch + arg(args, g.T_DV) + at, trips, groups, vectors_v)
        if needs & g.NEEDS_DK:
            ds, q_rows = scratch + arg(args, g.T_DS) + row_at, scratch + arg(args, g.T_Q_ROWS) + panel
            outer(ds, q_rows, scratch + arg(args, g.T_DK) + at, trips, groups, vectors)
        if needs & g.NEEDS_DQ:
            pairs = scratch + arg(args, g.T_DS_PAIRS) + begin // PACK * S_ROW
            dq = scratch + arg(args, a.T_O) + i_p * WIDE_PANEL
            channels = (arg(args, a.HEAD_DIM) + MR - 1) // MR
            trips = (end - begin) // KEYS_PER_TRIP
            accumulate_grad(k_rows + begin // PACK * V_BYTES, pairs, trips, dq, channels)

    @device(5)
    def add_bad_rows(args, scratch, i_p, begin, end):  # type: ignore[no-untyped-def]
        """To dV, what of this panel's dO is not finite."""
        item, count = scratch + arg(args, a.T_ITEM), arg(args, a.HEAD_DIM_V)
        row, buffer = arg(item, a.I_ROW) + i_p * NR, scratch + arg(args, g.T_OUT_STAGE)
        do = arg(args, g.DO) + arg(item, g.I_TENSOR) * arg(args, g.DO_BATCH)
        do += arg(item, a.I_HEAD) * arg(args, g.DO_HEAD)
        do += (arg(item, g.I_FIRST_Q) + row) * arg(args, g.DO_ROW)
        p, dv = scratch + arg(args, a.T_P) + begin * P_ROW, scratch + arg(args, g.T_DV) + begin * V_BYTES
        for r in range(least(NR, arg(item, a.I_ROW_END) - row)):
            load_float_row(do + r * arg(args, g.DO_ROW), count, buffer)
            add_nonfinite(p + r * 4 // PACK, buffer, (count + LANES - 1) // LANES, dv, end - begin)

    @device(5)
    def differentiate(args, scratch, i_p, n, k_rows):  # type: ignore[no-untyped-def]
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
        inner_begin = least(greatest((seen_by_all + MR - 1) // MR * MR, begin), end)
        inner_end = least(greatest(all_end // MR * MR, inner_begin), end)
        groups, at = (end - begin) // MR, begin * S_ROW
        s, dp = scratch + arg(args, a.T_S) + at, scratch + arg(args, g.T_DP) + at
        trips = (arg(args, a.HEAD_DIM) + 4 * PACK - 1) // (4 * PACK)
        k_tile, v_tile = scratch + arg(args, a.T_K) + begin * K_BYTES, scratch + arg(args, a.T_V)
        product(k_tile, scratch + arg(args, a.T_Q) + i_p * PANEL, s, trips, groups)
        needs_ds = arg(args, g.NEEDS) & g.NEEDS_DS
        if kind != a.PLAIN:
            if needs_ds != 0 and arg(args, a.PASS_DOES) & a.DOES_SOFTCAP:
                factor = scratch + arg(args, g.T_FACTOR) + at
                cap_factor(s, factor, (end - begin) * NV, arg(args, a.TO_CAP))
            bounded = 1 if begin < seen_by_all or end > all_end else 0
            head = arg(item, a.I_HEAD)
            call_pass(changes, args, scratch, a.CHANGE_SCORES, head, i_p, n, begin, end, bounded)
        if needs_ds != 0:
            trips = (arg(args, a.HEAD_DIM_V) + 4 * PACK - 1) // (4 * PACK)
            do_panel = scratch + arg(args, g.T_DO) + i_p * PANEL
            product(v_tile + begin * K_BYTES, do_panel, dp, trips, groups)
        weigh(args, scratch, i_p, n, begin, end, inner_begin, inner_end, kind)
        multiply(args, scratch, i_p, k_rows, begin, end)
        if load_i8(scratch + arg(args, a.T_BAD) + i_p) != 0 and arg(args, g.NEEDS) & g.NEEDS_DV:
            add_bad_rows(args, scratch, i_p, begin, end)

    @device(5)
    def walk(args, scratch, k, v, panels):  # type: ignore[no-untyped-def]
        """The keys [I_START, I_LIVE) of the span, block by block."""
        item, block_n, needs = scratch + arg(args, a.T_ITEM), arg(args, a.BLOCK_N), arg(args, g.NEEDS)
        row_0, row_end = arg(item, a.I_ROW), arg(item, a.I_ROW_END)
        start, live = arg(item, a.I_START), arg(item, a.I_LIVE)
        lo_shift, hi_shift = arg(item, a.I_LO_SHIFT), arg(item, a.I_HI_SHIFT)
        limits = scratch + arg(args, a.T_LIMITS)
        for i_p in range(panels):
            fill_limits(limits + i_p * NR * 8, row_0 + i_p * NR, row_end - 1, lo_shift, hi_shift, start, live)
        key_lo, key_hi = greatest(start, row_0 + lo_shift), least(live, row_end - 1 + hi_shift)
        dk, dv = scratch + arg(args, g.T_DK), scratch + arg(args, g.T_DV)
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
            k_rows = load_keys(args, scratch, k, v, n, first, last)
            begin, end = (first - n) // STEP * STEP, (last - n + STEP - 1) // STEP * STEP
            vectors, at = (end - begin) * (V_BYTES // ALL), begin * V_BYTES
            fill(dk + at, vectors, arg(args, a.ZERO))
            fill(dv + at, vectors, arg(args, a.ZERO))
            for i_p in range(panels):
                differentiate(args, scratch, i_p, n, k_rows)
            rows, at = last - first, (first - n) * V_BYTES
            if needs & g.NEEDS_DK:
                stride, scale = arg(args, g.DK_ROW), arg(args, g.GRAD_SCALE)
                add_rows(
                    dk + at, arg(item, g.I_DK) + first * stride, stride, rows, arg(args, a.HEAD_DIM), scale
                )
            if needs & g.NEEDS_DV:
                stride, scale = arg(args, g.DV_ROW), arg(args, g.DROP_SCALE)
                add_rows(
                    dv + at, arg(item, g.I_DV) + first * stride, stride, rows, arg(args, a.HEAD_DIM_V), scale
                )

    @device(5)
    def add_queries(args, scratch, dst, begin, end):  # type: ignore[no-untyped-def]
        """dQ^T of the span onto its rows, where some row sees a key of [begin, end); it becomes 0."""
        item, stride = scratch + arg(args, a.T_ITEM), arg(args, g.DQ_ROW)
        row_0, row_end = arg(item, a.I_ROW), arg(item, a.I_ROW_END)
        lo_shift, hi_shift = arg(item, a.I_LO_SHIFT), arg(item, a.I_HI_SHIFT)
        for i_p in range(arg(item, a.I_PANELS)):
            row = row_0 + i_p * NR
            if least(row + NR, row_end) - 1 + hi_shift <= begin or row + lo_shift >= end:
                continue
            panel = scratch + arg(args, a.T_O) + i_p * WIDE_PANEL
            for lane in range(0, NR, LANES):
                rows = least(LANES, row_end - row - lane)
                if rows > 0:
                    at = dst + (row + lane) * stride
                    count, scale = arg(args, a.HEAD_DIM), arg(args, g.GRAD_SCALE)
                    add_transposed(panel + lane * 4, at, stride, rows, count, scale)

    @device(6)
    def attend_span(args, scratch, k, v, dq, lists):  # type: ignore[no-untyped-def]
        """One span of rows against the item's keys [begin, end), chunk by chunk of dQ."""
        item = scratch + arg(args, a.T_ITEM)
        panels = arg(item, a.I_PANELS)
        channels = (arg(args, a.HEAD_DIM) + STEP - 1) // STEP * STEP
        for i_p in range(panels):
            load_panel(args, scratch, i_p)
            fill(scratch + arg(args, a.T_O) + i_p * WIDE_PANEL, channels * NV, arg(args, a.ZERO))
        if arg(args, a.PASS) != 0:
            call_pass(arg(args, a.PASS), args, scratch, a.START_ITEM, 0, 0, 0, 0, 0, 0)
        chunk, key_begin, key_end = arg(item, g.I_CHUNK), arg(item, g.I_BEGIN), arg(item, g.I_END)
        count = 1 if lists == 0 else arg(args, a.INTERVAL_COUNT)
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
                    store_i64(item + 8 * a.I_START, begin)
                    store_i64(item + 8 * a.I_LIVE, end)
                    walk(args, scratch, k, v, panels)
            if arg(args, g.NEEDS) & g.NEEDS_DQ:
                add_queries(args, scratch, dq, first, last)

    @cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy", forceinline=True)
    def kernel(args, number, scratch):  # type: ignore[no-untyped-def]
        here, group = arg(args, g.HEADS_HERE), arg(args, a.GROUP)
        entry, i_hkv = arg(args, g.ENTRIES) + number // here * 20, arg(args, g.FIRST_HEAD) + number % here
        i_b = load_i32(entry)
        item = scratch + arg(args, a.T_ITEM)
        i_t, first_q, first_k, seqlen_q, start, live = stand(args, scratch, i_b)
        lo_shift, hi_shift = arg(item, a.I_LO_SHIFT), arg(item, a.I_HI_SHIFT)
        begin, end = greatest(load_i32(entry + 4), start), least(load_i32(entry + 8), live)
        first_row, last_row = greatest(begin - hi_shift + 1, 0), least(end - lo_shift, seqlen_q)
        if end <= begin or last_row <= first_row:
            return
        fill(scratch + arg(args, a.T_ZERO), V_BYTES // ALL, arg(args, a.ZERO))
        store_i64(item + 8 * a.I_HEADS, 1)
        store_i64(item + 8 * g.I_TENSOR, i_t)
        store_i64(item + 8 * g.I_FIRST_Q, first_q)
        store_i64(item + 8 * g.I_BEGIN, begin)
        store_i64(item + 8 * g.I_END, end)
        store_i64(item + 8 * g.I_CHUNK, load_i32(entry + 16))
        k_head, v_head = i_t * arg(args, a.K_BATCH), i_t * arg(args, a.V_BATCH)
        k = arg(args, a.K) + k_head + i_hkv * arg(args, a.K_HEAD) + first_k * arg(args, a.K_ROW)
        v = arg(args, a.V) + v_head + i_hkv * arg(args, a.V_HEAD) + first_k * arg(args, a.V_ROW)
        dk = arg(args, g.DK) + i_t * arg(args, g.DK_BATCH) + i_hkv * arg(args, g.DK_HEAD)
        dv = arg(args, g.DV) + i_t * arg(args, g.DV_BATCH) + i_hkv * arg(args, g.DV_HEAD)
        store_i64(item + 8 * g.I_DK, dk + first_k * arg(args, g.DK_ROW))
        store_i64(item + 8 * g.I_DV, dv + first_k * arg(args, g.DV_ROW))

        # A span lies within one row block of interval lists.
        span, block_rows, lists = arg(args, a.ROW_PANELS) * NR, seqlen_q, arg(args, a.INTERVALS)
        if lists != 0:
            block_rows = arg(args, a.INTERVAL_ROWS)
        for head in range(i_hkv * group, i_hkv * group + group):
            dq = arg(args, g.DQ) + load_i32(entry + 12) * arg(args, g.DQ_PART)
            dq += i_t * arg(args, g.DQ_BATCH) + head * arg(args, g.DQ_HEAD) + first_q * arg(args, g.DQ_ROW)
            store_i64(item + 8 * a.I_HEAD, head)
            for i_r in range(first_row // block_rows, (last_row + block_rows - 1) // block_rows):
                pairs = 0
                if lists != 0:
                    pairs = lists + i_b * arg(args, a.INTERVALS_BATCH) + head * arg(args, a.INTERVALS_HEAD)
                    pairs += i_r * arg(args, a.INTERVALS_BLOCK)
                limit = least(last_row, (i_r + 1) * block_rows)
                for i_s in range((limit - i_r * block_rows + span - 1) // span):
                    base = i_r * block_rows + i_s * span
                    row = base + greatest(first_row - base, 0) // NR * NR
                    row_end = least(base + span, limit)
                    if row < row_end:
                        store_i64(item + 8 * a.I_ROW, row)
                        store_i64(item + 8 * a.I_ROW_END, row_end)
                        store_i64(item + 8 * a.I_PANELS, (row_end - row + NR - 1) // NR)
                        attend_span(args, scratch, k, v, dq, pairs)

    return kernel


class _Cut(NamedTuple):
    """How a call of one shape is run: its kernel and scratch, its items, and the words that say so."""

    kernel: int
    nv: int
    table: Any
    parts: int  # partial sums of dQ
    scratch_bytes: int
    words: bytes  # BLOCK_N to T_KEEP


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
        words = array("q", (config.block_n, 1, 1, row_panels, 1, 1, 0, *tiles[:-1])).tobytes()
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
    left, right = a.window_sides(args)
    work_us = 5 * a.estimated_us(q.shape, seqlen_k, head_dim + head_dim_v, left, right, args) // 2
    threads = 1 if work_us < a.LEND_FROM_US else torch.get_num_threads()
    heads = 1 if bias is not None and bias.one_head else num_kv_heads
    if args.cu_seqlens_q is None:
        at_once = 1 if bias is not None and bias.one_batch else batch
        cut = prepared.dense(batch, seqlen_q, seqlen_k, heads, at_once, threads)
    else:
        cut = prepared.packed(args, heads, threads)
    kept: list[Any] = []
    scale = head_dim**-0.5 if args.scale is None else args.scale
    does = a.passes(args, scale)
    dq = zeros_in_order_of(q, cut.parts) if needs[0] else None
    dk, dv = (zeros_in_order_of(x, 1) if need else None for x, need in ((k, needs[1]), (v, needs[2])))
    block = array(
        "q",
        (
            *g.tensor_words(q, k, v, out, lse),
            *a.softmax_scale(scale, does),
            *(left, right, args.offset is not None, a.far_offset(args.offset)),
            *(0, prepared.load(configs.ScoreKey, cut.nv) if does else 0),
        ),
    )
    if does or a.any_table(args):
        drop = prepared.load(DropoutKey, cut.nv) if args.dropout_p else 0
        block.frombytes(a.operands(args, scale, does, kept, 0, drop))
    else:
        block.frombytes(a.NO_OPERANDS)
    block.frombytes(cut.words)
    block.extend(g.sum_words(dout, dlse, dq, dk, dv))
    block.extend((0,) * 7 if bias is None else (*bias.words(), prepared.load(BiasGradientKey, cut.nv)))
    wanted = sum(1 << i for i in range(3) if needs[i]) | (0 if bias is None else g.NEEDS_DBIAS)
    block.extend((backward_configs.chunk_keys(seqlen_k), wanted, *g.gradient_scales(scale, args.dropout_p)))
    wake = work_us >= a.WAKE_FROM_US
    for entries, first, here in _launches(cut.table, num_kv_heads, bias):
        words = block + array("q", (entries.ctypes.data, first, here))
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
