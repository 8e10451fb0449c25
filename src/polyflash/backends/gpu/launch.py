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


def streaming_size(config: Any, walks: int, keys: int, cores: int, uneven: bool = False) -> int:
    """Keys per split of a call that waits for memory, for `walks` = batch * heads * row tiles, over `keys`
    keys each. Where walks are few one program per core, as each costs a start and a merge. Where they are
    many, or uneven, half of split_keys while the device has idle cores, down to two blocks, and twice as many
    while there are four programs per core: so long walks have more than short ones."""
    size: int = config.split_keys
    parts = cores // max(1, walks)
    if parts > 1 and not uneven:
        return max(1, -(-keys // (parts * config.block_n))) * int(config.block_n)
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
    batch. A negative size is that of the longest request there may be: of a shorter one they are equal parts,
    which kernels find out."""
    if not config.split_keys or args.cu_seqlens_q is not None:
        return 0, 1
    batch, num_heads, rows, _ = q.shape
    keys = k.shape[2] if args.page_table is None else args.page_table.shape[1] * k.shape[2]
    if config.pack_gqa:
        num_heads, rows = k.shape[1], rows * (num_heads // k.shape[1])
    walks = batch * num_heads * -(-rows // config.block_m)
    if args.batch_invariant:
        return config.split_keys, -(-keys // config.split_keys)
    bounded = not (args.page_table is args.kv_lens is args.kv_starts is args.window_left is None)
    uneven = bounded and batch > 1
    if args.page_table is not None and k.shape[2] % config.block_n and not uneven:
        cores *= 2  # the other program of a core reads while one waits for its table
    size = config.split_size(walks, keys, cores, uneven)
    even = bounded and batch == 1 and not getattr(config, "fixed_splits", True)
    return -size if even else size, -(-keys // size)
