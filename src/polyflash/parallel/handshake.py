"""The handshake: one small message in which ranks compare what they are about to do, before any bulk is sent.

Every rank learns what all others said, so all of them end with the same error, or none does."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyflash.dtypes import BY_NAME
from polyflash.errors import SpecError, spec_error
from polyflash.operands import OPERANDS
from polyflash.parallel.comm import Team
from polyflash.parallel.schedule import ORDERS
from polyflash.spec import Arguments

KINDS = ("attention", "attention_varlen", "backward", "restore", "merge")
METHODS = ("by size", "all_gather", "ring", "ulysses", "ulysses+ring")
_WORDS = {"function": KINDS, "method": METHODS, "order": ORDERS, "dtype": tuple(BY_NAME)}
_FLOATS = ("scale", "softcap", "dropout_p")
_FIELDS = (
    *("refused", "function", "number of the call", "version", "method", "order", "dtype", "batch"),
    *("num_q_heads", "num_kv_heads", "head_dim", "head_dim_v", "gradients", "seqlens", "causal"),
    *("window left", "window right", "offset", *_FLOATS, "dropout_seed", "operands"),
    *("contents of operands", "codes"),
    *("rows of q", "rows of k", "parts of 16 bits"),
)
_OWN = ("rows of q", "rows of k", "parts of 16 bits")  # each rank's own
_SHARED = len(_FIELDS) - len(_OWN)
Held = list[list[int]]  # of each shard: its rows of q and of k, and whether its gradients travel as they are
Agreed = Callable[[], Any]  # ends a handshake that is under way: returns, or raises, before anything is sent


NUMBER = _FIELDS.index("number of the call")


def words_of(said: Mapping[str, int]) -> list[int]:
    """A rank's words as numbers, those that are missing being 0."""
    return [said.get(name, 0) for name in _FIELDS]


def nothing() -> None:
    """Ranks that compare nothing have agreed."""


def begin(team: Team, words: Sequence[int]) -> Callable[[], Held]:
    """Starts to compare what the ranks say; call the result for the rows of q, and of k, of each. On a
    device's own backend this waits for earlier exchanges, not for what is computed beside them.

    Raises:
        SpecError: from that call, on every rank alike, with the first field that differs and who said it."""
    with team.aside():
        sent = torch.tensor(words, dtype=torch.int64, device=team.device)
        wait = team.gather(sent, "compared its call with those of the others")

    def compared() -> Held:
        with team.aside():
            table = wait().tolist()
        shared = table[0][:_SHARED]
        if shared[0] or any(row[:_SHARED] != shared for row in table):
            _refuse(table)
        return [list(column) for column in zip(*(row[_SHARED:] for row in table), strict=True)]

    return compared


def _refuse(table: list[list[int]]) -> None:
    """Raises what differs, in the words of every rank."""
    columns = dict(zip(_FIELDS, zip(*table, strict=True), strict=True))
    refused = [rank for rank, flag in enumerate(columns["refused"]) if flag]
    if refused:
        ranks = ", ".join(map(str, refused))
        raise SpecError(f"parallel: rank {ranks} refused its arguments, for the reason in its own error")
    for name, column in columns.items():
        if name not in _OWN and len(set(column)) > 1:
            said_by: dict[int, list[str]] = {}
            for rank, value in enumerate(column):
                said_by.setdefault(value, []).append(str(rank))
            got = "; ".join(f"{_worded(name, x)} on rank {', '.join(who)}" for x, who in said_by.items())
            change = "Ranks of a group make the same calls in the same order."
            raise spec_error(f"parallel {name}", got, "the same on every rank", change)


def _worded(name: str, value: int) -> Any:
    if name in _FLOATS:
        return struct.unpack("d", struct.pack("q", value))[0]
    if name in _WORDS:
        return _WORDS[name][value]
    return {-1: "none"}.get(value, value)


def said_of(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> dict[str, int]:
    """A rank's words about its call; q, k, v are (batch, heads, rows, head_dim)."""
    given = sum(1 << i for i, x in enumerate(OPERANDS) if x.given(getattr(args, x.name)))
    tensors = [x for x in args if isinstance(x, Tensor)]
    contents = 0
    for x in tensors:
        contents = zlib.crc32(repr((x.dtype, tuple(x.shape))).encode(), contents)
        if x.device.type == "cpu" and not x.is_floating_point():
            contents = zlib.crc32(bytes(x.contiguous().view(-1).view(torch.uint8).numpy()), contents)
    bits = {name: _bits(getattr(args, name)) for name in _FLOATS}
    inputs = [x for x in (q, k, v, args.bias, args.sinks) if x is not None]
    return {
        **bits,
        "version": zlib.crc32(sys.modules["polyflash"].__version__.encode()),
        "dtype": list(BY_NAME).index(str(q.dtype).removeprefix("torch.")),
        **dict(zip(("batch", "num_q_heads"), q.shape[:2], strict=True)),
        **{"num_kv_heads": k.shape[1], "head_dim": q.shape[3], "head_dim_v": v.shape[3]},
        "gradients": int(torch.is_grad_enabled() and any(x.requires_grad for x in inputs)),
        "causal": int(args.causal),
        "window left": -1 if args.window_left is None else args.window_left,
        "window right": -1 if args.window_right is None else args.window_right,
        "offset": 0 if args.offset is None else args.offset,
        "dropout_seed": 0 if args.dropout_seed is None else int(args.dropout_seed),
        **{"operands": given, "contents of operands": contents},
        **{"rows of q": q.shape[2], "rows of k": k.shape[2]},
    }


def _bits(x: float | None) -> int:
    return struct.unpack("q", struct.pack("d", float("nan") if x is None else x))[0]
