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


def streaming_size(config: Any, walks: int, keys: int, cores: int) -> int:
    """Keys per split of a call that waits for memory, for `walks` = batch * heads * row tiles, over `keys`
    keys each: half as many while the device has idle cores, down to two blocks; twice as many while there are
    four programs per core, as each costs a start and a merge."""
    size: int = config.split_keys
    least = max(2 * config.block_n, LEAST_SPLIT // 2)
    while size // 2 >= least and walks * -(-keys // size) < cores:
        size //= 2
    while size < keys and walks * -(-keys // (2 * size)) >= 4 * cores:
        size *= 2
    return size


def filling_size(config: Any, walks: int, keys: int, cores: int) -> int:
    """Keys per split of a call whose tiles leave cores idle: one program per core, of `split_keys` keys or
    more. UNSPLIT where that spares a program less time than partial outputs and a merge take."""
    parts = max(1, min(cores // max(1, walks), keys // config.split_keys))
    size = -(-keys // (parts * config.block_n)) * config.block_n
    return size if keys - size > 4 * config.split_keys else UNSPLIT


def splits(config: Any, q: Tensor, k: Tensor, args: Arguments, cores: int) -> tuple[int, int]:
    """Keys of a split, and how many splits a call has. Of batch_invariant they are split_keys, whatever the
    batch."""
    if not config.split_keys or args.cu_seqlens_q is not None:
        return 0, 1
    batch, num_heads, rows, _ = q.shape
    keys = k.shape[2] if args.page_table is None else args.page_table.shape[1] * k.shape[2]
    if config.pack_gqa:
        num_heads, rows = k.shape[1], rows * (num_heads // k.shape[1])
    walks = batch * num_heads * -(-rows // config.block_m)
    size = config.split_keys if args.batch_invariant else config.split_size(walks, keys, cores)
    return size, -(-keys // size)
