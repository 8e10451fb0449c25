"""Shards and blocks as a device needs them: rows in their order, bounds of packed members, positions.

Every layer of a model asks for the same tables. They are made once and stay on the device: to copy one there
would hold the host until all that was launched before is done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyflash.mask import FAR_OFFSET
from polyflash.parallel import schedule
from polyflash.parallel.comm import flat, in_words
from polyflash.parallel.joins import Piece
from polyflash.parallel.schedule import Block, Runs, Shards, Sight

FEW_RUNS = 4  # that are added one by one
_KEPT = 1024
_tables: dict[Any, tuple[Any, dict[Any, Any]]] = {}  # what is kept has one id


def wire(x: Tensor, packed: bool) -> Tensor:
    """(batch, heads, rows, head_dim) as it travels, and the way back: rows of packed members stay whole."""
    return x.transpose(1, 2) if packed else x


def in_order(shards: Shards, parts: Sequence[Tensor], packed: bool) -> Tensor:
    """All rows in their order, along dimension 2, of those of each shard, and more, as they travel."""
    if packed:
        rows = flat(parts).view(-1, *parts[0].shape[2:])
        order = _order(shards, tuple(x.shape[1] for x in parts), rows.device)
        return wire(rows.index_select(0, order)[None], packed)
    chunks = [(chunk, part) for i, part in enumerate(parts) for chunk in shards.chunks(i)]
    chunks.sort(key=lambda pair: int(pair[0].starts[0]))
    return torch.cat([part[:, :, slice(*chunk.span)] for chunk, part in chunks], 2)


def along(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Contiguous tensors one behind the other along `dim`, where they are if they lie so."""
    if math.prod(parts[0].shape[:dim]) != 1:
        return torch.cat(list(parts), dim)
    return flat(parts).view(*parts[0].shape[:dim], -1, *parts[0].shape[dim + 1 :])


def of_shards(shards: Shards, x: Tensor, packed: bool) -> list[Tensor]:
    """The way back: the rows of each shard, as they travel, side by side in memory."""
    if packed:
        rows = wire(x, packed).index_select(1, _positions(shards, x.device))
        return list(rows.split([shards.held(i) for i in range(shards.count)], 1))
    parts = room_for(shards, x, x.dtype)
    for i, part in enumerate(parts):
        spans = [slice(int(chunk.starts[0]), int(chunk.ends[0])) for chunk in shards.chunks(i)]
        torch.cat([x[:, :, span] for span in spans], 2, out=part)
    return parts


def room_for(shards: Shards, like: Tensor, kind: torch.dtype) -> list[Tensor]:
    """Room for the rows of each shard, as dense rows travel, side by side in memory."""
    batch, heads, _, dim = like.shape
    held = [shards.held(i) for i in range(shards.count)]
    room = like.new_empty(batch * heads * sum(held) * dim, dtype=kind)
    parts = room.split([batch * heads * rows * dim for rows in held])
    return [part.view(batch, heads, rows, dim) for part, rows in zip(parts, held, strict=True)]


def laid(pieces: Sequence[Piece], own: Tensor) -> Tensor:
    """Room for joined rows, as dense ones travel, own ones in their places."""
    room = own.new_empty((*own.shape[:2], sum(x.rows for x in pieces), own.shape[3]))
    return lay(pieces, own, True, room)


def lay(pieces: Sequence[Piece], x: Tensor, own: bool, room: Tensor) -> Tensor:
    """Puts own rows, or those that arrived, in their places among joined ones."""
    for piece in pieces:
        if piece.own is own:
            parts = room.narrow(2, piece.at, piece.rows), x.narrow(2, piece.first, piece.rows)
            into, part = in_words(parts)
            into.copy_(part)
    return room


def joined(
    pieces: Sequence[Piece], own: Tensor, arrived: Tensor, room: Tensor | None, packed: bool
) -> Tensor:
    """Own rows and those that arrived, as they travel, in their order; in the room where own ones are."""
    if room is not None:
        return lay(pieces, arrived, False, room)
    mine = wire(own, packed)
    parts = [(mine if x.own else arrived).narrow(1 + (not packed), x.first, x.rows) for x in pieces]
    parts = parts if packed else in_words(parts)
    return wire(torch.cat(parts, 1 + (not packed)).view(own.dtype), packed)


def lent(x: Tensor, runs: Runs, packed: bool) -> Tensor:
    """The rows of some runs, as they travel."""
    if (rows := runs.slice) is not None:
        return wire(x[:, :, rows], packed)
    return wire(x, packed).index_select(1 + (not packed), rows_of(runs, x.device))


def returned(x: Tensor, runs: Runs, rows: int, packed: bool) -> list[tuple[Tensor, int]]:
    """The way back of `lent`, into a shard of so many rows: tensors, and the first row of each there."""
    if len(runs.starts) <= FEW_RUNS:
        parts = wire(x, packed).split((runs.ends - runs.starts).tolist(), 2)
        return list(zip(parts, runs.starts.tolist(), strict=True))
    dim = 1 + (not packed)
    whole = x.new_zeros((*x.shape[:dim], rows, *x.shape[dim + 1 :]))
    return [(wire(whole.index_copy_(dim, rows_of(runs, x.device), x), packed), 0)]


@lru_cache(maxsize=64)
def _order(shards: Shards, rooms: tuple[int, ...], device: torch.device) -> Tensor:
    """Places of all rows when shards follow one another, each in a room for so many rows."""
    who, at = shards.natural()
    return torch.from_numpy((np.cumsum(rooms) - rooms)[who] + at).to(device)


@lru_cache(maxsize=64)
def _positions(shards: Shards, device: torch.device) -> Tensor:
    order = np.concatenate([shards.positions(shard) for shard in range(shards.count)])
    return torch.from_numpy(order).to(device)


def rows_of(runs: Runs, device: torch.device) -> Tensor:
    """The place in its shard of every row of some runs, int64."""
    table = _table_of(runs, device)
    if "rows" not in table:
        table["rows"] = _sent(schedule.rows_of(runs.starts, runs.ends - runs.starts), device)
    return table["rows"]  # type: ignore[no-any-return]


class Entries(NamedTuple):
    """A block as members of a packed call: its rows and keys of each member, and between them rows without
    keys and keys without rows, which are others' of the same shards; `member` is -1 there. int64."""

    member: np.ndarray
    q_lens: np.ndarray
    k_lens: np.ndarray

    def of_members(self, x: np.ndarray) -> np.ndarray:
        """A value per member as one per entry; 0 where it is none's."""
        return np.where(self.member < 0, 0, x[self.member])


def entries_of(block: Block) -> Entries:
    """The entries of a block of packed members, in their order from its first row and key on."""
    (held,) = np.nonzero((block.q.lens > 0) & (block.k.lens > 0))
    lens, gaps = [], []
    for chunk in (block.q, block.k):
        first, own = chunk.first[held], chunk.lens[held]
        lens.append(own)
        gaps.append(np.concatenate(([0], first[1:] - first[:-1] - own[:-1])))
    none = np.zeros(len(held), np.int64)
    columns = [(none - 1, none - 1, held), (gaps[0], none, lens[0]), (none, gaps[1], lens[1])]
    member, q_lens, k_lens = (np.stack(x, 1).reshape(-1) for x in columns)
    some = (q_lens > 0) | (k_lens > 0)
    return Entries(member[some], q_lens[some], k_lens[some])


def packed_bounds(block: Block, device: torch.device) -> dict[str, Any]:
    """The arguments of a packed call that say which rows and keys of a block are whose."""
    return _table_of(block, device)["bounds"]  # type: ignore[no-any-return]


def of_entries(block: Block, x: Tensor) -> Tensor:
    """A value per member as one per entry of a block."""
    return x.index_select(0, _table_of(block, x.device)["member"])


def keys_of(block: Block, device: torch.device, packed: bool) -> tuple[Tensor, Tensor]:
    """The first key of a block in its member, and how many there are, int64 (members,), or (entries,)."""
    return _table_of(block, device, packed)["keys"]  # type: ignore[no-any-return]


def apart(block: Block, device: torch.device, packed: bool) -> Tensor:
    """How far rows of a block stand behind its keys, int64 (members,) or (entries,), without what offsets
    add."""
    return _table_of(block, device, packed)["apart"]  # type: ignore[no-any-return]


def offsets(block: Block, sight: Sight, device: torch.device) -> Tensor:
    """The position of the first row of each entry among its keys, int32, where the host knows it."""
    table = _table_of(block, device)
    if sight.offsets not in table:
        near = entries_of(block).of_members(_apart(block) + np.array(sight.offsets, np.int64))
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


def _table_of(of: Block | Runs, device: torch.device, packed: bool = True) -> dict[Any, Any]:
    key = id(of), device, packed  # a call of one member may have the blocks of one without any
    if key not in _tables:
        if len(_tables) >= _KEPT:
            _tables.clear()
        _tables[key] = of, _table(of, device, packed) if isinstance(of, Block) else {}
    return _tables[key][1]


def _table(block: Block, device: torch.device, packed: bool) -> dict[Any, Any]:
    if not packed:
        keys = _sent(block.k.starts, device), _sent(block.k.lens, device)
        return {"keys": keys, "apart": _sent(_apart(block), device)}
    entries = entries_of(block)
    bounds: dict[str, Any] = {}
    for x, n in (("q", entries.q_lens), ("k", entries.k_lens)):
        bounds |= {
            f"cu_seqlens_{x}": _sent(np.cumsum((0, *n)), device).int(),
            f"max_seqlen_{x}": int(n.max()),
        }
    keys = _sent(entries.of_members(block.k.starts), device), _sent(entries.k_lens, device)
    member = _sent(entries.member.clip(0), device)
    return {
        "bounds": bounds,
        "keys": keys,
        "apart": _sent(entries.of_members(_apart(block)), device),
        "member": member,
    }


def _sent(x: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(x.copy()).to(device)
