"""Shards and blocks as a device needs them: rows in their order, bounds of packed members, positions.

Every layer of a model asks for the same tables. They are made once and stay on the device: to copy one there
would hold the host until all that was launched before is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyflash.mask import FAR_OFFSET
from polyflash.parallel.schedule import Block, Shards, Sight

_KEPT = 1024
_tables: dict[tuple[int, torch.device], tuple[Block, dict[str, Any]]] = {}  # a block that is kept has one id


def in_order(shards: Shards, parts: Sequence[Tensor]) -> Tensor:
    """All rows in their order, along dimension 2, of the rows that each shard has, or more."""
    if len(shards.lengths) > 1:
        rows = torch.cat([x[:, :, : shards.held(i)] for i, x in enumerate(parts)], 2)
        return rows.index_select(2, _order(shards, rows.device))
    pairs = [(chunk, part) for i, part in enumerate(parts) for chunk in shards.chunks(i)]
    pairs.sort(key=lambda pair: int(pair[0].starts[0]))
    return torch.cat([part[:, :, slice(*chunk.span)] for chunk, part in pairs], 2)


def of_shard(shards: Shards, x: Tensor, shard: int) -> Tensor:
    """The way back: the rows of one shard, along dimension 2, of all rows in their order."""
    if len(shards.lengths) > 1:
        return x.index_select(2, _positions(shards, shard, x.device))
    chunks = shards.chunks(shard)
    return torch.cat([x[:, :, int(chunk.starts[0]) : int(chunk.ends[0])] for chunk in chunks], 2)


@lru_cache(maxsize=64)
def _order(shards: Shards, device: torch.device) -> Tensor:
    """Places of all rows when shards follow one another."""
    order = np.concatenate([shards.positions(shard) for shard in range(shards.count)])
    return torch.from_numpy(np.argsort(order)).to(device)


@lru_cache(maxsize=64)
def _positions(shards: Shards, shard: int, device: torch.device) -> Tensor:
    return torch.from_numpy(shards.positions(shard)).to(device)


def packed_bounds(block: Block, device: torch.device) -> dict[str, Any]:
    """The arguments of a packed call that say which rows and keys of a block are whose."""
    return _table_of(block, device)["bounds"]  # type: ignore[no-any-return]


def keys_of(block: Block, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first key of a block in its member, and how many there are, int64 (members,)."""
    return _table_of(block, device)["keys"]  # type: ignore[no-any-return]


def apart(block: Block, device: torch.device) -> Tensor:
    """How far rows of a block stand behind its keys, int64 (members,), without what offsets add."""
    return _table_of(block, device)["apart"]  # type: ignore[no-any-return]


def offsets(block: Block, sight: Sight, device: torch.device) -> Tensor:
    """The position of the first row of a block among its keys, int32 (members,), where the host knows it."""
    table = _table_of(block, device)
    if sight.offsets not in table:
        near = _apart(block) + np.array(sight.offsets, np.int64)
        table[sight.offsets] = _sent(near.clip(-FAR_OFFSET, FAR_OFFSET), device).int()
    return table[sight.offsets]  # type: ignore[no-any-return]


def is_aligned(block: Block, sight: Sight) -> bool:
    """Does the last row of every member stand at its last key, as a call has it that names no offset?"""
    if sight.offsets is None:
        return False
    ends = _apart(block) + np.array(sight.offsets, np.int64) == block.k.lens - block.q.lens
    return bool((ends | (block.q.lens == 0) | (block.k.lens == 0)).all())


def _apart(block: Block) -> np.ndarray:
    return block.q.starts - block.k.starts


def _table_of(block: Block, device: torch.device) -> dict[Any, Any]:
    key = id(block), device
    if key not in _tables:
        if len(_tables) >= _KEPT:
            _tables.clear()
        q, k = block.q.lens, block.k.lens
        bounds = {f"cu_seqlens_{x}": _bounds(n, device) for x, n in (("q", q), ("k", k))}
        longest = {f"max_seqlen_{x}": int(n.max()) for x, n in (("q", q), ("k", k))}
        keys = _sent(block.k.starts, device), _sent(k, device)
        _tables[key] = (
            block,
            {"bounds": bounds | longest, "keys": keys, "apart": _sent(_apart(block), device)},
        )
    return _tables[key][1]


def _sent(x: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(x.copy()).to(device)


def _bounds(lens: np.ndarray, device: torch.device) -> Tensor:
    return _sent(np.cumsum((0, *lens)), device).int()
