"""How the CPU's statistics of weights are cut up: kernel keys, items and scratch. Pure arithmetic, no DSL.

An item is one query head and a range of its rows. Ranges follow from the length alone, and each adds to a
copy of the column sums of its own; the copies are added in order, so no bit depends on the number of threads.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import KernelKey, Scratch
from polyflash.backends.cpu.packing import numbered

RANGE_ROWS = 512  # least rows of a range
MOST_RANGES = 16  # as many copies of the column sums are held at once


class StatisticsKey(KernelKey):
    """The key of one compiled statistics kernel; fields as the forward's."""

    __slots__ = ()
    kind = "statistics"
    builder = "polyflash.backends.cpu.kernels.statistics"


@lru_cache(maxsize=256)
def scratch(key: StatisticsKey, row_panels: int, block_n: int) -> Scratch:
    """The layout for spans of `row_panels` panels and key blocks of `block_n`. In the place of V: a vector of
    sums per key; stats: four numbers of every row (statistics_blocks.py)."""
    absent = dict.fromkeys(("o", "p", "zero", "bad", "seen"), 0)
    own = {"v": block_n * key.lanes * 4, "stats": row_panels * key.panel_rows * 16}
    sizes = configs.tile_bytes(key, 1, row_panels, block_n) | absent | own
    return Scratch._make(configs.placed(sizes.values()))


def ranges(lens_q: Any, panel_rows: int) -> tuple[Any, int]:
    """int32 (entries, 4): batch entry, first and end row, number of its copy of the column sums; later rows,
    which see more keys, first. And the number of copies."""
    least = np.maximum(RANGE_ROWS, -(-lens_q // MOST_RANGES))
    rows = -(-least // panel_rows) * panel_rows
    pieces = -(-lens_q // rows)
    entry, number = numbered(pieces)
    begin = number * rows[entry]
    end = np.minimum(begin + rows[entry], lens_q[entry])
    order = np.argsort(-number, kind="stable")
    table = np.stack([entry, begin, end, number], 1)[order]
    return np.ascontiguousarray(table.astype(np.int32)), int(pieces.max(initial=1))
