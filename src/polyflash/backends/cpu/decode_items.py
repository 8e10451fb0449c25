"""Device functions that both decode kernels share: which part of a call an item is, and what its rows see."""

from __future__ import annotations

import functools
from typing import Any

from polyflash.backends.cpu.intrinsics import greatest, least, load_i32, namespace, word
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import DECODE, ENTRY

block = Blocks(DECODE)
device = block.device


@functools.cache
def items() -> Any:
    """For all decode kernels: find, row_keys."""
    entry_at, ENTRY_WORDS = block.words(ENTRY), len(ENTRY.words)  # the first of them is the first item

    @device
    def find(args, number, tiles):
        """Entry, request, tile and first split of an item, the tile's splits and their first, and the number
        of its first partial. The tiles of one split follow each other: where heads lie side by side, they
        share its pages of memory."""
        first_split, splits = args.first_split, args.num_splits
        together = args.splits_per_item
        items = tiles * ((splits + together - 1) // together)
        i_e = i_b = number // greatest(items, 1)
        first_item, first_partial = i_e * items, i_e * tiles * splits
        if args.entries != 0:
            i_e, beyond = 0, args.num_entries
            while beyond - i_e > 1:
                middle = (i_e + beyond) // 2
                if word(args.entries, middle * ENTRY_WORDS) <= number:
                    i_e = middle
                else:
                    beyond = middle
            entry = entry_at(args.entries + i_e * ENTRY_WORDS * 8)
            first_item, i_b = entry.first_item, entry.request
            first_split, splits = entry.first_split, entry.num_splits
            first_partial = entry.first_partial
        i_tile, i_s = (number - first_item) % tiles, (number - first_item) // tiles * together
        return i_e, i_b, i_tile, i_s, splits, first_split, first_partial + i_s * tiles + i_tile

    @device
    def row_keys(tile, i, start, live):
        """First and end key that query row i sees."""
        args = tile.args
        item, bounds = tile.item, args.row_bounds
        lo, hi = greatest(start, i + item.lo_shift), least(live, i + item.hi_shift)
        if bounds != 0:
            pair = bounds + i * args.row_bounds_row
            lo = greatest(lo, load_i32(pair))
            hi = least(hi, load_i32(pair + args.row_bounds_side))
        return lo, greatest(lo, hi)

    return namespace(find, row_keys)
