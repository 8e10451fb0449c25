"""How a call on packed members is cut up: the panel width for their lengths, and a table of items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import Config, Partition
from polyflash.spec import DECODE_ROWS, MOST_SHARED_ROWS, Arguments, AttentionSpec, keys_to_share

if TYPE_CHECKING:
    from torch import Tensor

# Time per row of the widest panel, the next and the narrowest: Zen 4, fp32, 2048 keys, the worse of D64 and
# D128 within 2 % (1.04 and 1.04; 1.07 and 1.10).
NARROW_COST = (1.0, 1.04, 1.09)


def member_lengths(args: Arguments) -> tuple[Any, Any]:
    """Rows and keys of every packed member, int64 numpy; of paged keys the live ones."""
    lens_q = np.diff(cast("Tensor", args.cu_seqlens_q).numpy())
    if args.cu_seqlens_k is None:
        lens_k = np.maximum(cast("Tensor", args.kv_lens).numpy(), 0)
    else:
        lens_k = np.diff(args.cu_seqlens_k.numpy())
    return lens_q.astype(np.int64), lens_k.astype(np.int64)


def members_of_few_rows(spec: AttentionSpec, lens_q: Any, lens_k: Any) -> list[Any]:
    """The numbers of the members that the decode kernels run, by the width of their tiles: what a neighbour
    asks for changes no bit."""
    rows = lens_q * spec.group
    shared = (rows <= MOST_SHARED_ROWS) & (lens_k >= keys_to_share(rows, spec.group))
    few = (rows > 0) & ((rows <= DECODE_ROWS) | shared)
    if not (few.any() and configs.decodes_members(spec)):
        return []
    widths = np.where(few, np.ceil(np.log2(np.maximum(1, rows))), -1)
    return [np.flatnonzero(widths == width) for width in np.unique(widths[few])]


def pack_members(
    spec: AttentionSpec, config: Config, lens_q: Any, lens_k: Any, threads: int, *, causal: bool
) -> tuple[int, Partition]:
    """Panel width and cut of packed members: the width of least work, counting the rows of a member's last
    panel that are none and, if causal, the keys that only the last row of each panel sees."""
    isa = configs.ISAS[config.isa]
    widths = sorted(isa.group_keys, reverse=True)
    rows = {nv: nv * isa.lanes for nv in widths}
    cost = {
        nv: factor * _work(lens_q, lens_k, rows[nv], causal)
        for nv, factor in zip(widths, NARROW_COST, strict=True)
    }
    nv = min(cost, key=lambda nv: cost[nv])
    typical = max(1, int(lens_q.mean())) if len(lens_q) else 1
    members = max(1, int((lens_q > 0).sum()))
    panels = config.panels * widths[0] // nv  # as many rows share a copy of K and V as in the widest panels
    return nv, configs.partition(members, spec.num_kv_heads, spec.group, typical, rows[nv], panels, threads)


def _work(lens_q: Any, lens_k: Any, panel_rows: int, causal: bool) -> float:
    """Pairs that panels of `panel_rows` compute: of a causal member on average half its keys and half a panel
    more."""
    panels = -(-lens_q // panel_rows)
    keys = (
        np.minimum(lens_k, (lens_k + panel_rows) / 2 + np.maximum(0, lens_k - lens_q) / 2)
        if causal
        else lens_k
    )
    return float((panels * panel_rows * keys).sum())


def numbered(pieces: Any) -> tuple[Any, Any]:
    """For things cut into so many pieces each: of every piece, its thing and its number in it."""
    things = np.repeat(np.arange(len(pieces)), pieces)
    return things, np.arange(len(things)) - np.repeat(np.cumsum(pieces) - pieces, pieces)


def member_table(lens_q: Any, lens_k: Any, panel_rows: int, panels: int, *, causal: bool) -> Any:
    """int32 (items, 3): member, first row and end row of each item, the most work first. A member's panels
    are shared out evenly over as few items of at most `panels` as hold them."""
    in_member = -(-lens_q // panel_rows)
    items = -(-in_member // panels)
    member, number = numbered(items)
    begin = number * in_member[member] // np.maximum(1, items[member]) * panel_rows
    end = (number + 1) * in_member[member] // np.maximum(1, items[member]) * panel_rows
    end = np.minimum(end, lens_q[member])
    keys = lens_k[member]
    if causal:
        keys = np.clip(end + keys - lens_q[member], 0, keys)
    order = np.argsort(-(keys * (end - begin)), kind="stable")
    return np.stack([member[order], begin[order], end[order]], 1).astype(np.int32)
