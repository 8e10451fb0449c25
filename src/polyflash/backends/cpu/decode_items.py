"""Device functions that both decode kernels share: which part of a call an item is, and what its rows see."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import decode_arguments as d
from polyflash.backends.cpu import loading


class Items(NamedTuple):
    """Callables for numba code; every argument is an int64."""

    # (args, number, tiles) -> its entry, request, tile, first split, the tile's splits and their first, and
    # the number of its first partial
    find: Any
    row_keys: Any  # (args, scratch, i, start, live) -> first and end key that query row i sees


def items() -> Items:
    from numba import types

    from polyflash.backends.cpu import simd

    arg, load_i32, least, greatest = simd.word, simd.load_i32, simd.least, simd.greatest
    device = loading.device

    @device(3, types.UniTuple(types.int64, 7))
    def find(args, number, tiles):  # type: ignore[no-untyped-def]
        """The tiles of one split follow each other: where heads lie side by side, they share its pages of
        memory."""
        first_split, splits = arg(args, d.FIRST_SPLIT), arg(args, d.NUM_SPLITS)
        together = arg(args, d.SPLITS_PER_ITEM)
        items = tiles * ((splits + together - 1) // together)
        i_e = i_b = number // greatest(items, 1)
        first_item, first_partial = i_e * items, i_e * tiles * splits
        if arg(args, d.ENTRIES) != 0:
            i_e, beyond = 0, arg(args, d.NUM_ENTRIES)
            while beyond - i_e > 1:
                middle = (i_e + beyond) // 2
                if arg(arg(args, d.ENTRIES), middle * d.ENTRY_WORDS) <= number:
                    i_e = middle
                else:
                    beyond = middle
            entry = arg(args, d.ENTRIES) + i_e * d.ENTRY_WORDS * 8
            first_item, i_b = arg(entry, d.E_FIRST_ITEM), arg(entry, d.E_REQUEST)
            first_split, splits = arg(entry, d.E_FIRST_SPLIT), arg(entry, d.E_NUM_SPLITS)
            first_partial = arg(entry, d.E_FIRST_PARTIAL)
        i_tile, i_s = (number - first_item) % tiles, (number - first_item) // tiles * together
        return i_e, i_b, i_tile, i_s, splits, first_split, first_partial + i_s * tiles + i_tile

    @device(5, types.UniTuple(types.int64, 2))
    def row_keys(args, scratch, i, start, live):  # type: ignore[no-untyped-def]
        item, bounds = scratch + arg(args, a.T_ITEM), arg(args, d.ROW_BOUNDS)
        lo, hi = greatest(start, i + arg(item, a.I_LO_SHIFT)), least(live, i + arg(item, a.I_HI_SHIFT))
        if bounds != 0:
            pair = bounds + i * arg(args, d.ROW_BOUNDS_ROW)
            lo = greatest(lo, load_i32(pair))
            hi = least(hi, load_i32(pair + arg(args, d.ROW_BOUNDS_SIDE)))
        return lo, greatest(lo, hi)

    return Items(find, row_keys)
