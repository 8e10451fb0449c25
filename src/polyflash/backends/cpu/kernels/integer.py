"""Device functions of the kernels that multiply codes, where these differ from those of floats: where the
tables of codes lie, what comes with K and V, and which scales a row sees. The walk, masks and ends are those
of all."""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import KernelKey
from polyflash.backends.cpu.intrinsics import (
    call_native,
    least,
    load_i8,
    load_i32,
    merged,
    namespace,
    store_i8,
)
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import CODED, CODED_ITEM, MARK_SEEN, PLAIN

BLOCK = Blocks(CODED, CODED_ITEM)
device = BLOCK.device


def places(key: KernelKey) -> Any:
    """Make floats_at."""
    Q_PANEL, O_PANEL = key.q_panel_bytes, key.o_panel_bytes

    @device
    def floats_at(tile, panel):
        """Address of a panel of Q^T as float32: one place for all, unless they are needed again."""
        args = tile.args
        first = tile.q + args.heads * args.row_panels * Q_PANEL
        return first + panel * O_PANEL if args.k_shift != 0 else first

    return floats_at


def products(key: KernelKey, stage: Any) -> Any:
    """Make key_products, which adds q·shift in runs of keys that share a shift."""
    NR, MR, PACK = key.panel_rows, key.group_keys, key.pack
    Q_PANEL, K_BYTES, floats_at = key.q_panel_bytes, key.k_row_bytes, places(key)

    @device
    def add_shift(tile, panel, j, end):
        """The shift of key j of the block goes to the panel; returns the end of the keys that share it."""
        args, n = tile.args, tile.item.key
        shift, first, size = tile.item.k_shifts, 0, 0
        if args.page_table != 0:
            size = args.page_size
            i = (n + j) // size
            first = i * size
            shift += load_i32(tile.pages + 4 * (i - n // size)) * args.k_shift_batch
            end = least(end, first + size - n)
        group = (n + j - first) // args.shift_tokens
        q, floats = tile.q + panel * Q_PANEL, floats_at(tile, panel)
        stage.multiply_shift(q, floats, shift + group * args.k_shift_token, args.head_dim)
        return least(end, first + (group + 1) * args.shift_tokens - n)

    @device
    def key_products(tile, panel, limits, begin, end):
        args, n = tile.args, tile.item.key
        q, top = tile.q + panel * Q_PANEL, tile.block + NR * 4
        trips = (args.head_dim + 4 * PACK - 1) // (4 * PACK)
        j = begin
        while j < end:
            stop = end
            if args.k_shift != 0:
                stop = add_shift(tile, panel, j, end)
            k, s, groups = tile.k + j * K_BYTES, tile.s + j * NR * 4, (stop - j) // MR
            if limits != 0:
                stage.scores_bounded(k, q, s, top, trips, groups, limits, n + j)
            else:
                stage.scores(k, q, s, top, trips, groups)
            j = stop

    return key_products


def panels(key: KernelKey, stage: Any, base: Any) -> Any:
    """`base`, which knows which scales of V its rows see, and makes weights bytes."""
    NR, Q_PANEL = key.panel_rows, key.q_panel_bytes

    @device
    def weigh(tile, panel, p, begin, keys, stats, kind, free):
        """`free`: how many of the keys no limit hides from a row."""
        args, block = tile.args, tile.block
        s, q, scales = tile.s + begin * NR * 4, tile.q + panel * Q_PANEL, tile.bad + args.block_n + 4 * begin
        stage.set_unit(q, 1 if kind == PLAIN else 0)
        if kind == PLAIN and free == keys:
            parts = tile.bad + 5 * args.block_n
            stage.most_scale(scales, keys, q, parts)
            stage.weigh(s, p, keys // 4, block, stats, args.scale_log2, parts, q)
        else:
            stage.most_seen_scale(s, scales, keys, q)
            stage.weigh_seen(s, p, keys // 4, block, stats, args.scale_log2, scales, q)

    return merged(base, namespace(weigh))


def tiles(key: KernelKey, stage: Any, base: Any) -> Any:
    """`base`, which brings codes and their scales in."""
    call_pass = call_native(9)
    NR, PACK, STEP, LANES = key.panel_rows, key.pack, configs.STEP, key.lanes
    Q_PANEL, O_PANEL, K_BYTES, V_BYTES = (
        key.q_panel_bytes,
        key.o_panel_bytes,
        key.k_row_bytes,
        key.v_row_bytes,
    )
    row_at, run_end = base.row_at, base.run_end

    @device
    def prefetch(tile, rows, stride, count, scales, step, last):
        """Rows of the block behind key `last`, and their scales."""
        args = tile.args
        n = least(args.block_n, tile.item.live - last)
        if args.page_table == 0 and n > 0:
            stage.prefetch_codes(rows + last * stride, stride, n, count)
            stage.prefetch_codes(scales + last * step, step * 16, (n + 15) // 16, 1)

    @device
    def load_keys(tile, k, first, last):
        args, n = tile.args, tile.item.key
        step, count = args.k_scale_token, args.head_dim
        j = first
        while j < last:
            end = run_end(args, j, last)
            src = row_at(tile, k, args.k_batch, args.k_row, j)
            scales = row_at(tile, tile.item.k_scales, args.k_scale_batch, step, j)
            stage.load_codes(src, args.k_row, end - j, count, scales, step, tile.k + (j - n) * K_BYTES)
            j = end
        prefetch(tile, k, args.k_row, count, tile.item.k_scales, step, last)

    @device
    def value_at(tile, v, j, first, last):
        """Row j of V, or zeros."""
        args = tile.args
        return row_at(tile, v, args.v_batch, args.v_row, j) if first <= j < last else tile.zero

    @device
    def scale_at(tile, j):
        args = tile.args
        return row_at(tile, tile.item.v_scales, args.v_scale_batch, args.v_scale_token, j)

    @device
    def load_values(tile, v, first, last):
        """Returns whether some scales carry no weight."""
        args, n = tile.args, tile.item.key
        begin, end = first // STEP * STEP, (last + STEP - 1) // STEP * STEP
        scales, found, j = tile.bad + args.block_n - 4 * n, 0, first
        stage.fill(scales + 4 * begin, (end - begin) // LANES, args.zero)
        while j < last:
            stop = run_end(args, j, last)
            dst, bad = scales + 4 * j, tile.bad + j - n
            found |= stage.load_scales(scale_at(tile, j), args.v_scale_token, stop - j, dst, bad)
            j = stop
        for j in range(begin, end, PACK):
            row0, row1 = value_at(tile, v, j, first, last), value_at(tile, v, j + 1, first, last)
            row2, row3 = value_at(tile, v, j + 2, first, last), value_at(tile, v, j + 3, first, last)
            dst = tile.v + (j - n) // PACK * V_BYTES
            stage.load_value_codes(row0, row1, row2, row3, args.head_dim_v, dst)
        prefetch(tile, v, args.v_row, args.head_dim_v, tile.item.v_scales, args.v_scale_token, last)
        return found

    @device
    def add_bad_rows(tile, v, head, i_p, panel, n, begin, end):
        args, count, row = tile.args, tile.args.head_dim_v, tile.stage
        limits, seen, stats = tile.limits + i_p * NR * 8, tile.seen, tile.stats + panel * NR * 8
        for j in range(begin, end):
            if load_i8(tile.bad + j) != 0:
                for r in range(NR):
                    store_i8(seen + r, 1)
                if args.score_pass != 0:
                    call_pass(args.score_pass, args, tile, MARK_SEEN, head, i_p, n + j, 0, 0, 0)
                source = row_at(tile, v, args.v_batch, args.v_row, n + j)
                stage.load_coded_row(source, count, load_i32(scale_at(tile, n + j)), row)
                s, o = tile.s + j * NR * 4, tile.o + panel * O_PANEL
                q = tile.q + panel * Q_PANEL
                stage.add_seen_codes(s, stats, q, args.scale_log2, row, count, o, limits, n + j, seen)

    return merged(base, namespace(load_keys, load_values, add_bad_rows))


def ends(key: KernelKey, stage: Any, base: Any) -> Any:
    """`base`, which knows the item's tables and scales the channels of its result."""
    O_PANEL = key.o_panel_bytes
    finalize_floats = base.finalize

    @device
    def find_tables(tile, i_t, i_hkv, first_k):
        args, item = tile.args, tile.item
        k_scales = args.k_scale + i_hkv * args.k_scale_head
        v_scales = args.v_scale + i_hkv * args.v_scale_head
        k_shifts = args.k_shift + i_hkv * args.k_shift_head
        if args.page_table == 0:
            k_scales += i_t * args.k_scale_batch + first_k * args.k_scale_token
            v_scales += i_t * args.v_scale_batch + first_k * args.v_scale_token
            k_shifts += i_t * args.k_shift_batch
        item.k_scales = k_scales
        item.v_scales = v_scales
        item.k_shifts = k_shifts
        channels = args.v_channels + i_t * args.v_channels_batch + i_hkv * args.v_channels_head
        item.v_channel_scales = channels if args.v_channels != 0 else 0

    @device
    def finalize(tile, out, lse_row):
        item = tile.item
        if item.v_channel_scales != 0:
            for panel in range(item.panels * item.heads):
                o = tile.o + panel * O_PANEL
                stage.scale_channels(o, item.v_channel_scales, tile.args.head_dim_v)
        finalize_floats(tile, out, lse_row)

    return merged(base, namespace(find_tables, finalize))
