"""How a launch is cut up: tiles and splits of the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.spec import Arguments

LEAST_SPLIT = 128  # keys
UNSPLIT = 1 << 30  # as split_keys: all keys of a request in one program, however many (for `ablate`)


def tile_count(rows: int, block: int, batch: int, packed: bool) -> tuple[int, int]:
    """Tiles of `rows` positions and requests that each have as many. Packed members find their own tiles;
    one more is for what belongs to nobody."""
    return (rows // block + batch + 1, 1) if packed else (-(-rows // block), batch)


def split_size(config: Any, walks: int, keys: int, cores: int, *, fixed: bool) -> int:
    """Keys per split at launch, for `walks` = batch * heads * row tiles, over `keys` keys each.

    fixed (batch_invariant), fixed_splits or UNSPLIT: config.split_keys, whatever the batch. Else half as many
    while the device has idle cores, down to two blocks; twice as many while there are four programs per core,
    as each costs a start and a merge.
    """
    size = config.split_keys
    if fixed or size == UNSPLIT or getattr(config, "fixed_splits", False):
        return size
    least = max(2 * config.block_n, LEAST_SPLIT // 2)
    while size // 2 >= least and walks * -(-keys // size) < cores:
        size //= 2
    while size < keys and walks * -(-keys // (2 * size)) >= 4 * cores:
        size *= 2
    return size


def splits(config: Any, q: Tensor, k: Tensor, args: Arguments, cores: int) -> tuple[int, int]:
    """Keys of a split, and how many splits a call has."""
    if not config.split_keys or args.cu_seqlens_q is not None:
        return 0, 1
    batch, num_heads, rows, _ = q.shape
    keys = k.shape[2] if args.page_table is None else args.page_table.shape[1] * k.shape[2]
    if config.pack_gqa:
        num_heads, rows = k.shape[1], rows * (num_heads // k.shape[1])
    walks = batch * num_heads * -(-rows // config.block_m)
    size = split_size(config, walks, keys, cores, fixed=args.batch_invariant)
    return size, -(-keys // size)
