"""Device functions of one tile of scores, lanes as rows: K and V of a key block brought into scratch, and
what of V is not finite. Shared by the kernels that walk over key blocks this way.

K and V are contiguous, or pools of pages: then a block's pages are found once, and rows are read
run by run, a run being the keys of the block that lie in one page. A page table changes where a row is read
from and nothing else, so it changes no bit.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import KernelKey
from polyflash.backends.cpu.intrinsics import (
    call_native,
    greatest,
    least,
    load_i8,
    load_i32,
    namespace,
    store_i8,
    store_i32,
)
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import FORWARD, MARK_SEEN

device = Blocks(FORWARD).device


def tiles(key: KernelKey, stage: Any, shared: Any) -> Any:
    """Make what loads K and V for kernels of `key`'s tiles. `k` and `v` are where key 0 of the kv head lies,
    in page 0 if there are pages; `item.key`, here n, is the first of the block."""
    call_pass = call_native(9)
    NR, PACK, STEP = key.panel_rows, key.pack, configs.STEP
    SIZE = configs.STORAGE_BYTES[key.storage]
    O_PANEL = key.o_panel_bytes
    K_BYTES, V_BYTES = key.k_row_bytes, key.v_row_bytes
    WIDE_BYTES = key.bucket * 4 + configs.LINE

    @device
    def find_pages(tile, first, last):
        """The pages of keys [first, last) of the block. Entries were checked before the call; should another
        thread have written one that names no page, the keys found end there."""
        args = tile.args
        item, size = tile.item, args.page_size
        row = args.page_table + item.batch * args.page_table_batch
        found = tile.pages - 4 * (item.key // size)
        for i in range(first // size, (last - 1) // size + 1):
            page = load_i32(row + i * args.page_table_entry)
            if page < 0 or page >= args.num_pages:
                return greatest(i * size, first)
            store_i32(found + 4 * i, page)
        return last

    @device
    def row_at(tile, src, page_stride, row_stride, j):
        """Address of key j of the block."""
        args = tile.args
        if args.page_table == 0:
            return src + j * row_stride
        item, size = tile.item, args.page_size
        i = j // size
        page = load_i32(tile.pages + 4 * (i - item.key // size))
        return src + page * page_stride + (j - i * size) * row_stride

    @device
    def run_end(args, j, last):
        """The end, at most `last`, of the keys that follow key j in its page."""
        if args.page_table == 0:
            return last
        return least(last, (j // args.page_size + 1) * args.page_size)

    @device
    def value_at(tile, v, j):
        args = tile.args
        return row_at(tile, v, args.v_batch, args.v_row, j)

    @device
    def load_keys(tile, k, first, last):
        """K rows [first, last) of the block."""
        args = tile.args
        n, stride = tile.item.key, args.k_row
        dim, count, k_tile = args.k_dim, args.head_dim, tile.k
        j = first
        while j < last:
            end = run_end(args, j, last)
            src = row_at(tile, k, args.k_batch, stride, j)
            shared.load_tile(tile, src, stride, dim, end - j, count, k_tile + (j - n) * K_BYTES)
            j = end

    @device
    def load_value_atoms(tile, v, begin, end, first, last, skip_bad):
        """V rows [begin, end) of the block, one atom at a time; outside [first, last) or bad: zero."""
        args = tile.args
        count, dim_stride = args.head_dim_v, args.v_dim
        n, dst = tile.item.key, tile.v
        row0 = row1 = zero = tile.zero  # names need a type before the loop
        bad, gather = tile.bad - n, tile.gather
        found = 0
        for j in range(begin, end, PACK):
            row0 = row1 = zero
            if first <= j < last and not (skip_bad and load_i8(bad + j) != 0):
                row0 = shared.gathered(gather, value_at(tile, v, j), dim_stride, count)
            if PACK == 2 and first <= j + 1 < last and not (skip_bad and load_i8(bad + j + 1) != 0):
                row1 = shared.gathered(gather + WIDE_BYTES, value_at(tile, v, j + 1), dim_stride, count)
            found |= stage.load_value_rows(row0, row1, 0, 1, count, dst + (j - n) // PACK * V_BYTES)
        return found

    @device
    def load_values(tile, v, first, last):
        """V rows [first, last) of the block, zero up to whole steps. Returns whether some are not finite:
        those are marked and zeroed, and `add_bad_rows` adds them."""
        args = tile.args
        count, stride = args.head_dim_v, args.v_row
        n, v_tile = tile.item.key, tile.v
        begin, end = first // STEP * STEP, (last + STEP - 1) // STEP * STEP
        found, done, j = 0, begin, first
        if args.v_dim != SIZE:
            j = last
        while j < last:
            stop = run_end(args, j, last)
            whole, rest = (j + PACK - 1) // PACK * PACK, stop // PACK * PACK
            if whole < rest:
                found |= load_value_atoms(tile, v, done, whole, first, last, False)
                source, dst = value_at(tile, v, whole), v_tile + (whole - n) // PACK * V_BYTES
                pairs = (rest - whole) // PACK
                found |= stage.load_value_rows(source, source + stride, stride * PACK, pairs, count, dst)
                done = rest
            j = stop
        found |= load_value_atoms(tile, v, done, end, first, last, False)
        if found != 0:
            row, zero = tile.gather, tile.zero
            for j in range(first, last):
                source = shared.gathered(row, value_at(tile, v, j), args.v_dim, count)
                bad = stage.load_value_rows(source, zero, 0, 1, count, tile.stage)
                store_i8(tile.bad + j - n, bad)
            load_value_atoms(tile, v, begin, end, first, last, True)
        return found

    @device
    def add_bad_rows(tile, v, head, i_p, panel, n, begin, end):
        """The contributions of V rows n + [begin, end) that are not finite, to the rows that see them."""
        args = tile.args
        count, row = args.head_dim_v, tile.stage
        limits, seen = tile.limits + i_p * NR * 8, tile.seen
        for j in range(begin, end):
            if load_i8(tile.bad + j) != 0:
                for r in range(NR):
                    store_i8(seen + r, 1)
                if args.score_pass != 0:
                    call_pass(args.score_pass, args, tile, MARK_SEEN, head, i_p, n + j, 0, 0, 0)
                source = value_at(tile, v, n + j)
                stage.load_float_row(shared.gathered(tile.gather, source, args.v_dim, count), count, row)
                p = tile.p + j // PACK * NR * 4
                stage.add_seen(p, j % PACK, row, count, tile.o + panel * O_PANEL, limits, n + j, seen)

    return namespace(find_pages, row_at, run_end, load_keys, load_values, add_bad_rows)
