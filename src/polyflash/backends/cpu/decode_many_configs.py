"""How decode of more than 8 rows per kv head is cut up: kernel keys, tiles and partial results. Pure
arithmetic, no DSL.

Lanes are rows, as in the forward kernel: all query heads of one kv head times all query rows, one per lane.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import ISAS, LINE, STEP, STORAGE_BYTES, KernelKey
from polyflash.backends.cpu.decode_configs import DecodeConfig
from polyflash.backends.cpu.packing import NARROW_COST

ITEM_ROWS = 256  # at most so many rows share a copy of each key block


class ManyKey(KernelKey):
    """The key of one compiled kernel; fields as the forward's."""

    __slots__ = ()
    kind = "decode"
    builder = "polyflash.backends.cpu.kernels.decode_many"

    @property
    def lines_of_keys(self) -> int:
        """Cache lines of V that come in while one trip of K·Q works: as many as it reads itself."""
        return max(1, STORAGE_BYTES[self.storage] * self.group_keys * 4 * self.pack // LINE)

    @property
    def trip_keys(self) -> int:
        """Keys of one trip of V·P."""
        return min(4, self.group_keys // self.pack) * self.pack

    @property
    def lines_of_values(self) -> int:
        """Cache lines of the next K that come in while one trip of V·P works."""
        return max(1, STORAGE_BYTES[self.storage] * self.group_keys * self.trip_keys // LINE)

    def partial_bytes(self, panels: int, head_dim_v: int) -> int:
        """Bytes that one split leaves: m, l and O of every panel."""
        channels = -(-head_dim_v // STEP) * STEP
        return (panels * self.panel_rows * (8 + 4 * channels) + LINE - 1) // LINE * LINE


class Shape(NamedTuple):
    """The rows of a kv head are `chunks` tiles of at most `panels` panels of `nv` vectors."""

    nv: int
    panels: int
    chunks: int


@lru_cache(maxsize=256)
def shape(isa: str, rows: int) -> Shape:
    """The width of least work for `rows` rows, counting those of the last panel that are none."""
    widths, lanes = sorted(ISAS[isa].group_keys, reverse=True), ISAS[isa].lanes
    cost = {nv: -(-rows // (nv * lanes)) * nv * part for nv, part in zip(widths, NARROW_COST, strict=True)}
    nv = min(widths, key=lambda nv: cost[nv])
    panels = -(-rows // (nv * lanes))
    chunks = -(-panels // (ITEM_ROWS // (nv * lanes)))
    panels = -(-panels // chunks)
    return Shape(nv, panels, -(-rows // (panels * nv * lanes)))


def key_for(config: DecodeConfig, dtype: str, widest: int, nv: int) -> ManyKey:
    """The kernel for a call; `widest` is the larger head dimension."""
    return configs.key_of(ManyKey, config, dtype, widest, nv)


def scratch(key: ManyKey, panels: int, block_n: int) -> configs.Scratch:
    """The forward's layout. In the place of q_ids: the bounds of every panel, four int32. Of pass_stage: the
    addresses of zeros, one line's worth, then of the K rows of a block, then of cache lines to read ahead."""
    tiles = configs.scratch(key, 1, panels, block_n)
    addresses = LINE // 8 + block_n + LINE // 8 + block_n * (key.bucket // STEP + 1) + LINE
    return tiles._replace(total=(tiles.pass_stage + addresses * 8 + 4095) // 4096 * 4096)
