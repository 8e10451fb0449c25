"""Attention gradients in Metal: the launches of kernels/backward.metal.

delta once per row; then dK and dV by threadgroups that own keys, dQ by threadgroups that own rows, dBias by
threadgroups that own a tile of it. dK and dV of a group of query heads are summed in float32 where they are
made. No atomics: bits repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from polyflash.backends.gpu.launch import tile_count
from polyflash.backends.gpu.views import view_of
from polyflash.backends.metal.configs import ROWS
from polyflash.backends.metal.runtime import Call, loads_vectors, side_by_side
from polyflash.backends.metal.uniforms import numbers_for
from polyflash.results import empty_in_order_of

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments


def center(
    call: Call, given: tuple[Tensor, ...], out: Tensor, lse: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """lse, +inf where a row saw nothing, and delta; float32 (B, Hq, Sq), dense."""
    q, k, v, dout = given
    row_lse, delta = (torch.empty(lse.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    n = numbers_for(
        q, k, v, call.args, call.x, call.config, {"out": out, "dout": dout, "lse": lse, "dlse": dlse}
    )
    c = call.constants._replace(HAS_DLSE=dlse is not None)
    groups = n.seqlen_q, n.num_heads, out.shape[0]
    call.launch("center", c, n, (out, dout, lse, dlse, row_lse, delta), groups, 1)
    return row_lse, delta


def differentiate(
    call: Call, given: tuple[Tensor, ...], rows: tuple[Tensor, Tensor], grad: Tensor, dv: Tensor | None
) -> None:
    """Fills dk and dv, or with dv=None dq."""
    (q, k, v, dout), config = given, call.config
    n = numbers_for(q, k, v, call.args, call.x, config, {"dout": dout, "grad": grad, "dv": dv})
    own, walk, positions, heads = config.dq_block_m, config.dq_block_n, n.seqlen_q, n.num_heads
    if dv is not None:
        own, walk, positions, heads = config.block_n, config.block_m, n.seqlen_k, k.shape[1]
    c = call.constants._replace(
        OWN=own, WALK=walk, OWNS_KEYS=dv is not None, VECTOR=loads_vectors(q, k, v, dout)
    )
    tiles, requests = tile_count(positions, own, n.batch, call.args.cu_seqlens_q is not None)
    groups = tiles, heads, requests
    call.launch("differentiate", c, n, (q, k, v, dout, *rows, grad, dv), groups, own // ROWS)


def bias_gradient(call: Call, given: tuple[Tensor, ...], rows: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
    """The gradient of a bias that broadcasts to (B, Hq, Sq, Sk), in its shape and dtype."""
    (q, k, v, dout), config = given, call.config
    n = numbers_for(q, k, v, call.args, call.x, config, {"dout": dout})
    kept = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    sizes, own, walk = (n.batch, n.num_heads, n.seqlen_q, n.seqlen_k), config.dq_block_m, config.dq_block_n
    shared = [have == 1 and size > 1 for have, size in zip(kept, sizes, strict=True)]
    over_rows, over_keys = shared[2], shared[3] and not shared[2]
    walks = not (over_rows or over_keys)
    walked = [size if walks and together else 1 for size, together in zip(sizes[:2], shared, strict=False)]
    batch, heads = (size // many for size, many in zip(sizes[:2], walked, strict=True))
    shape = batch, heads, own if over_rows else n.seqlen_q, walk if over_keys else n.seqlen_k
    sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    n = n._replace(grad=view_of(sums), walked_batch=walked[0], walked_heads=walked[1])
    c = call.constants._replace(
        OWN=own, WALK=walk, OVER_ROWS=over_rows, OVER_KEYS=over_keys, VECTOR=loads_vectors(q, k, v, dout)
    )
    groups = -(-shape[3] // walk), -(-shape[2] // own), batch * heads
    call.launch("differentiate_bias", c, n, (q, k, v, dout, *rows, sums), groups, own // ROWS)
    again = [d for d in range(4) if kept[d] == 1 and shape[d] > 1]
    return (sums.sum(again) if again else sums).reshape(bias.shape).to(bias.dtype)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sinks' own weights times -delta, summed over batch entries and rows."""
    return -(torch.exp(sinks.float()[None, :, None] - lse) * delta).sum((0, 2))


def run(
    launch: Launch,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: Arguments,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv, dbias, dsinks, each with its operand's shape and dtype; None where `needs` is False."""
    q, k, v, out, dout = map(side_by_side, (q, k, v, out, dout))
    call, given = Call(launch, q, k, v, args), (q, k, v, dout)
    rows = center(call, given, out, lse, dlse)
    dq = dk = dv = dsinks = None
    if needs[0]:
        dq = empty_in_order_of(q, q.shape[3])
        differentiate(call, given, rows, dq, None)
    if needs[1] or needs[2]:
        dk, dv = (empty_in_order_of(x, x.shape[3]) for x in (k, v))
        differentiate(call, given, rows, dk, dv)
    if needs[4] and args.sinks is not None:
        dsinks = sink_gradient(args.sinks, *rows).to(args.sinks.dtype)
    dbias = bias_gradient(call, given, rows, args.bias) if needs[3] and args.bias is not None else None
    return dq, dk if needs[1] else None, dv if needs[2] else None, dbias, dsinks
