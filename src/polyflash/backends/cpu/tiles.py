"""Device functions of one tile of scores, lanes as rows: K and V of a key block brought into scratch, and
what of V is not finite. Shared by the kernels that walk over key blocks this way.

K and V are contiguous, or pools of pages: then a block's pages are found once, at T_K_IDS, and rows are read
run by run, a run being the keys of the block that lie in one page. A page table changes where a row is read
from and nothing else, so it changes no bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import configs, loading

if TYPE_CHECKING:
    from polyflash.backends.cpu.blocks import Stages
    from polyflash.backends.cpu.configs import KernelKey


class Tiles(NamedTuple):
    """Callables for numba code; every argument is an int64. `k` and `v` are where key 0 of the kv head lies,
    in page 0 if there are pages; I_KEY holds n, the first key of the block."""

    find_pages: Any  # (args, scratch, first, last) -> end of the keys found
    row_at: Any  # (args, scratch, src, page_stride, row_stride, j) -> where key j of the block lies
    run_end: Any  # (args, j, last) -> end of the keys that follow key j in its page
    load_keys: Any  # (args, scratch, k, first, last)
    load_values: Any  # (args, scratch, v, first, last) -> some are not finite
    add_bad_rows: Any  # (args, scratch, v, head, i_p, panel, n, begin, end)


def tiles(key: KernelKey, stage: Stages, shared: loading.Loaders) -> Tiles:
    """For kernels of `key`'s tiles."""
    from numba import types

    from polyflash.backends.cpu import simd

    load_value_rows, load_float_row = stage.load_value_rows, stage.load_float_row
    add_seen = stage.add_seen
    gathered, load_tile = shared.gathered, shared.load_tile
    arg, load_i32, load_i8, store_i8 = simd.word, simd.load_i32, simd.load_i8, simd.store_i8
    store_i32, least, greatest, call_pass = simd.store_i32, simd.least, simd.greatest, simd.call_native(9)
    device = loading.device

    NR, PACK, STEP = key.panel_rows, key.pack, configs.STEP
    SIZE = configs.STORAGE_BYTES[key.storage]
    O_PANEL = key.o_panel_bytes
    K_BYTES, V_BYTES = key.k_row_bytes, key.v_row_bytes
    WIDE_BYTES = key.bucket * 4 + configs.LINE

    @device(4, types.int64)
    def find_pages(args, scratch, first, last):  # type: ignore[no-untyped-def]
        """The pages of keys [first, last) of the block. Entries were checked before the call; should another
        thread have written one that names no page, the keys found end there."""
        item, size = scratch + arg(args, a.T_ITEM), arg(args, a.PAGE_SIZE)
        row = arg(args, a.PAGE_TABLE) + arg(item, a.I_BATCH) * arg(args, a.PAGE_TABLE_BATCH)
        found = scratch + arg(args, a.T_K_IDS) - 4 * (arg(item, a.I_KEY) // size)
        for i in range(first // size, (last - 1) // size + 1):
            page = load_i32(row + i * arg(args, a.PAGE_TABLE_ENTRY))
            if page < 0 or page >= arg(args, a.NUM_PAGES):
                return greatest(i * size, first)
            store_i32(found + 4 * i, page)
        return last

    @device(6, types.int64)
    def row_at(args, scratch, src, page_stride, row_stride, j):  # type: ignore[no-untyped-def]
        """Where key j of the block lies."""
        if arg(args, a.PAGE_TABLE) == 0:
            return src + j * row_stride
        item, size = scratch + arg(args, a.T_ITEM), arg(args, a.PAGE_SIZE)
        i = j // size
        page = load_i32(scratch + arg(args, a.T_K_IDS) + 4 * (i - arg(item, a.I_KEY) // size))
        return src + page * page_stride + (j - i * size) * row_stride

    @device(3, types.int64)
    def run_end(args, j, last):  # type: ignore[no-untyped-def]
        """The end, at most `last`, of the keys that follow key j in its page."""
        if arg(args, a.PAGE_TABLE) == 0:
            return last
        return least(last, (j // arg(args, a.PAGE_SIZE) + 1) * arg(args, a.PAGE_SIZE))

    @device(4, types.int64)
    def value_at(args, scratch, v, j):  # type: ignore[no-untyped-def]
        return row_at(args, scratch, v, arg(args, a.V_BATCH), arg(args, a.V_ROW), j)

    @device(5)
    def load_keys(args, scratch, k, first, last):  # type: ignore[no-untyped-def]
        """K rows [first, last) of the block."""
        n, stride = arg(scratch + arg(args, a.T_ITEM), a.I_KEY), arg(args, a.K_ROW)
        dim, count, tile = arg(args, a.K_DIM), arg(args, a.HEAD_DIM), scratch + arg(args, a.T_K)
        j = first
        while j < last:
            end = run_end(args, j, last)
            src = row_at(args, scratch, k, arg(args, a.K_BATCH), stride, j)
            load_tile(args, scratch, src, stride, dim, end - j, count, tile + (j - n) * K_BYTES)
            j = end

    @device(8, types.int64)
    def load_value_atoms(args, scratch, v, begin, end, first, last, skip_bad):  # type: ignore[no-untyped-def]
        """V rows [begin, end) of the block, one atom at a time; outside [first, last) or bad: zero."""
        count, dim_stride = arg(args, a.HEAD_DIM_V), arg(args, a.V_DIM)
        n, dst = arg(scratch + arg(args, a.T_ITEM), a.I_KEY), scratch + arg(args, a.T_V)
        row0 = row1 = zero = scratch + arg(args, a.T_ZERO)  # names need a type before the loop
        bad, gather = scratch + arg(args, a.T_BAD) - n, scratch + arg(args, a.T_GATHER)
        found = 0
        for j in range(begin, end, PACK):
            row0 = row1 = zero
            if first <= j < last and not (skip_bad and load_i8(bad + j) != 0):
                row0 = gathered(gather, value_at(args, scratch, v, j), dim_stride, count)
            if PACK == 2 and first <= j + 1 < last and not (skip_bad and load_i8(bad + j + 1) != 0):
                row1 = gathered(gather + WIDE_BYTES, value_at(args, scratch, v, j + 1), dim_stride, count)
            found |= load_value_rows(row0, row1, 0, 1, count, dst + (j - n) // PACK * V_BYTES)
        return found

    @device(5, types.int64)
    def load_values(args, scratch, v, first, last):  # type: ignore[no-untyped-def]
        """V rows [first, last) of the block, zero up to whole steps. Returns whether some are not finite:
        those are marked and zeroed, and `add_bad_rows` adds them."""
        count, stride = arg(args, a.HEAD_DIM_V), arg(args, a.V_ROW)
        n, tile = arg(scratch + arg(args, a.T_ITEM), a.I_KEY), scratch + arg(args, a.T_V)
        begin, end = first // STEP * STEP, (last + STEP - 1) // STEP * STEP
        found, done, j = 0, begin, first
        if arg(args, a.V_DIM) != SIZE:
            j = last
        while j < last:
            stop = run_end(args, j, last)
            whole, rest = (j + PACK - 1) // PACK * PACK, stop // PACK * PACK
            if whole < rest:
                found |= load_value_atoms(args, scratch, v, done, whole, first, last, False)
                source, dst = value_at(args, scratch, v, whole), tile + (whole - n) // PACK * V_BYTES
                pairs = (rest - whole) // PACK
                found |= load_value_rows(source, source + stride, stride * PACK, pairs, count, dst)
                done = rest
            j = stop
        found |= load_value_atoms(args, scratch, v, done, end, first, last, False)
        if found != 0:
            row, zero = scratch + arg(args, a.T_GATHER), scratch + arg(args, a.T_ZERO)
            for j in range(first, last):
                source = gathered(row, value_at(args, scratch, v, j), arg(args, a.V_DIM), count)
                bad = load_value_rows(source, zero, 0, 1, count, scratch + arg(args, a.T_STAGE))
                store_i8(scratch + arg(args, a.T_BAD) + j - n, bad)
            load_value_atoms(args, scratch, v, begin, end, first, last, True)
        return found

    @device(9)
    def add_bad_rows(args, scratch, v, head, i_p, panel, n, begin, end):  # type: ignore[no-untyped-def]
        """The contributions of V rows n + [begin, end) that are not finite, to the rows that see them."""
        count, row = arg(args, a.HEAD_DIM_V), scratch + arg(args, a.T_STAGE)
        limits, seen = scratch + arg(args, a.T_LIMITS) + i_p * NR * 8, scratch + arg(args, a.T_SEEN)
        for j in range(begin, end):
            if load_i8(scratch + arg(args, a.T_BAD) + j) != 0:
                for r in range(NR):
                    store_i8(seen + r, 1)
                if arg(args, a.PASS) != 0:
                    call_pass(arg(args, a.PASS), args, scratch, a.MARK_SEEN, head, i_p, n + j, 0, 0, 0)
                source = value_at(args, scratch, v, n + j)
                load_float_row(
                    gathered(scratch + arg(args, a.T_GATHER), source, arg(args, a.V_DIM), count), count, row
                )
                p = scratch + arg(args, a.T_P) + j // PACK * NR * 4
                add_seen(
                    p, j % PACK, row, count, scratch + arg(args, a.T_O) + panel * O_PANEL, limits, n + j, seen
                )

    return Tiles(find_pages, row_at, run_end, load_keys, load_values, add_bad_rows)
