"""The words of the decode kernels' argument block that follow those of `arguments.py`."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from polyflash.backends.cpu import arguments as a

if TYPE_CHECKING:
    from polyflash.spec import Arguments

_next = count(a.T_STAGED + 1).__next__
SPLIT_KEYS, FIRST_SPLIT, NUM_SPLITS = (_next() for _ in range(3))
# Requests that differ: rows of int64 (first item, request, first split, number of splits, first partial); 0:
# all are alike.
ENTRIES, NUM_ENTRIES = (_next() for _ in range(2))
# What each split of HEADS kv heads leaves at PARTIALS + number·HEADS·PARTIAL_BYTES, the tiles of a split one
# after the other, and how many splits of a tile are done; 0 if all items have one head and all its keys.
PARTIALS, PARTIAL_BYTES, DONE = (_next() for _ in range(3))
# What scales scores before the softmax (bit 32 set, float32 bits below) and caps them (float32 bits); or 0.
FACTOR, CAP = (_next() for _ in range(2))
Q_TILE = _next()  # bytes of the Q of one kv head
GATHERED_ROW, ZERO_VECTORS = (_next() for _ in range(2))  # bytes of a gathered row, vectors of a row of zeros
ROW_BOUNDS, ROW_BOUNDS_ROW, ROW_BOUNDS_SIDE = (_next() for _ in range(3))  # int32 (start, end) of a query row
SPLITS_PER_ITEM = _next()  # consecutive ones, at most
SIDE_BY_SIDE = _next()  # whether keys are read with all heads of an item, see decode_heads.py

E_FIRST_ITEM, E_REQUEST, E_FIRST_SPLIT, E_NUM_SPLITS, E_FIRST_PARTIAL = range(5)  # of an entry
ENTRY_WORDS = 5


def scaling(args: Arguments, scale: float, does: int) -> tuple[int, int]:
    """FACTOR and CAP of a call whose scores leave unscaled unless `does` says so."""
    if does & a.DOES_SOFTCAP:
        # A softcap that no float32 holds is the least one, as 0 is none.
        return 1 << 32 | a.float_bits(abs(scale) / args.softcap), max(1, a.float_bits(args.softcap))
    return (1 << 32 | a.float_bits(abs(scale)), 0) if does & a.DOES_TINY_SCALE else (0, 0)
