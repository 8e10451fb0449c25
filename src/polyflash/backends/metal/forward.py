"""Attention forward in Metal: the launch of `attend` in kernels/forward.metal, and of `merge` where the keys
are cut into splits.

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) of any strides; k and v may be codes, or pools of
pages (pages, Hkv, page size, ·).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyflash.backends.gpu.launch import splits, tile_count
from polyflash.backends.metal.configs import ROWS
from polyflash.backends.metal.runtime import Call, loads_vectors, side_by_side
from polyflash.backends.metal.uniforms import numbers_for
from polyflash.spec import CODE_TABLES

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

WAITING = 4  # threadgroups of a split call that a core should have: while one waits for memory, others go on


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fills out (B, Hq, Sq, Dv) and, if asked for, lse (B, Hq, Sq)."""
    q, k, v = map(side_by_side, (q, k, v))
    call = Call(launch, q, k, v, args)
    size, num_splits = splits(call.config, q, k, args, WAITING * launch.target.cores)
    rows = lse if args.need_lse else None
    if num_splits == 1:
        attend(call, q, k, v, out, rows)
        return out, lse
    batch, num_heads, seqlen_q, head_dim_v = out.shape
    parts = q.new_empty((num_splits * batch, num_heads, seqlen_q, head_dim_v), dtype=torch.float32)
    part_m = parts.new_empty((2 * num_splits * batch, num_heads, seqlen_q))
    attend(call, q, k, v, parts, part_m, size, num_splits)
    merge(call, q, k, v, (parts, part_m, num_splits), out, rows)
    return out, lse


def attend(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    split_keys: int = 0,
    num_splits: int = 1,
) -> None:
    """Launches the walk over the keys. With `split_keys` out and lse are those of the splits."""
    config, args = call.config, call.args
    tables = {name: getattr(args, name) for name in CODE_TABLES}
    n = numbers_for(q, k, v, args, call.x, config, {"out": out, "lse": lse, **tables})
    n = n._replace(split_keys=split_keys, num_splits=num_splits)
    c = call.constants._replace(
        OUT="float" if split_keys else call.constants.T,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        SPLIT_EXP=config.split_exp,
        SPLIT=split_keys != 0,
        VECTOR=loads_vectors(k, v),
        NEED_LSE=lse is not None,
    )
    packed = args.cu_seqlens_q is not None
    tiles, requests = tile_count(n.seqlen_q * n.pack, config.block_m, n.batch, packed)
    groups = tiles, n.num_heads // n.pack, requests * num_splits
    call.launch("attend", c, n, (q, k, v, out, lse, *tables.values()), groups, config.block_m // ROWS)


def merge(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of: tuple[Tensor, Tensor, int],
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """The outputs, maxima and sums of so many splits as one; the sinks join here."""
    parts, part_m, num_splits = of
    n = numbers_for(q, k, v, call.args, call.x, call.config, {"out": out, "lse": lse})._replace(
        num_splits=num_splits
    )
    c = call.constants._replace(NEED_LSE=lse is not None)
    rows = n.batch * n.num_heads * n.seqlen_q
    call.launch("merge", c, n, (parts, part_m, out, lse), (rows, 1, 1), 1)
