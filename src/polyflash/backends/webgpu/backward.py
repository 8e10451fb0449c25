"""Gradients in WGSL: `delta`, then `backward_dq` with a query row per thread and `backward_dkv` with a key
per thread. Every sum has one owner and one order: bits repeat, without atomics.

    p = exp(s - lse)     delta = Σ_d do·out - dlse     dp = do·vᵀ     ds = p·(dp - delta)
    of dropout dp, and p of dv, have lost what was dropped
    ds' = ds·(1 - tanh²) if soft-capped     dbias = Σ ds     dsinks = -Σ_i exp(sink - lse)·delta
    dq = scale·Σ_j ds'·k        dk = scale·Σ_i ds'ᵀ·q        dv = Σ_i pᵀ·do
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from polyflash.backends.webgpu import configs, device
from polyflash.backends.webgpu.calls import PARAMS, Call, Sizes, call_of, params_of, sizes_of, stages_of
from polyflash.backends.webgpu.chunks import Chunk, chunks
from polyflash.backends.webgpu.configs import Config, fours
from polyflash.backends.webgpu.device import Block
from polyflash.backends.webgpu.forward import READ, dispatches, flat_grid, stored, tried, trusted_limits
from polyflash.backends.webgpu.render import Buffer, Kernel
from polyflash.backends.webgpu.tensor import GpuTensor

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

__all__ = ("Needs", "kernels_of", "run", "tried", "walk")
Needs = tuple[bool, bool, bool, bool, bool]  # dq, dk, dv, dbias, dsinks


def kernels_of(
    sizes: Sizes,
    flags: dict[str, int],
    kind: str,
    limits: configs.Limits,
    variants: tuple[configs.Variant, configs.Variant],
) -> tuple[Kernel, Kernel, Kernel, Kernel]:
    """delta, dq, dkv and dbias: no length is in them."""
    d4, dv4 = fours(sizes.head_dim), fours(sizes.head_dim_v)
    constants, of_keys = (tuple({**flags, **configs.constants(x, d4, dv4)}.items()) for x in variants)
    unrolled = limits.unrolled
    q, k, v, dout = (Buffer(name, kind) for name in ("q", "k", "v", "dout"))
    rows, walk = Buffer("rows", "vec2<f32>"), (*stages_of(flags), "gradient.wgsl")
    lanes, params = (*walk, "lanes.wgsl"), params_of(flags)
    delta = Kernel(
        "delta",
        ("stages.wgsl", "backward_delta.wgsl"),
        (Buffer("result", kind), dout, rows._replace(name="given"), rows._replace(written=True)),
        (("DV4", dv4), ("BN", 4), ("BM", 4)),
        PARAMS,
    )
    dq = Kernel(
        "backward_dq",
        (*lanes, *READ, "load_tile.wgsl", "backward_dq.wgsl"),
        (q, k, v, dout, rows, Buffer("dq", kind, True)),
        constants,
        params,
        unrolled,
    )
    dkv = Kernel(
        "backward_dkv",
        (*lanes, "backward_dkv.wgsl"),
        (q, k, v, dout, rows, Buffer("dk", kind, True), Buffer("dv", kind, True)),
        of_keys,
        params,
        unrolled,
    )
    dbias = Kernel(
        "backward_dbias",
        (*walk, "backward_dbias.wgsl"),
        (q, k, v, dout, rows, Buffer("dbias", "f32", True)),
        constants,
        params,
    )
    return delta, dq, dkv, dbias


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
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dbias, dsinks, each with its operand's shape and dtype; None where `needs` is False. Rows
    and keys of no packed member get zeros."""
    with torch.no_grad():
        likes = zip((q, k, v, args.bias, args.sinks), needs, strict=True)
        totals = [None if x is None or not need else _zeros(x, i) for i, (x, need) in enumerate(likes)]
        for part in chunks(q, k, v, args, device.current().limits):
            of, own_dlse = part.of_q, None if dlse is None else part.of_q(dlse)
            given = Given(of(q), of(dout), of(out), of(lse), own_dlse)
            rows = _differentiate(part, given, part.of_k(k), part.of_k(v), args, launch.config, totals)
            if totals[4] is not None:
                _add_sinks(part, rows, args, totals[4])
    finished = zip(totals, (q, k, v, args.bias, args.sinks), strict=True)
    return tuple(x if x is None or like is None else x.to(like.dtype) for x, like in finished)


def _zeros(like: Tensor, place: int) -> Tensor:
    """Room for a gradient; sums over chunks are float32."""
    return torch.zeros(like.shape, dtype=like.dtype if place < 3 else torch.float32)


class Given(NamedTuple):
    """The rows of a chunk: q, the results of the forward pass, and their gradients."""

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None


def _differentiate(
    part: Chunk,
    given: Given,
    k: Tensor,
    v: Tensor,
    args: Arguments,
    config: Config,
    totals: list[Tensor | None],
) -> Tensor:
    """Adds a chunk's dq, dk, dv and dbias to `totals`; returns its (lse, delta) per row, (batch, query heads,
    rows, 2)."""
    held = [GpuTensor.of(x) for x in (given.q, k, v, given.dout)]
    on, sizes = held[0].device, sizes_of(held[0], held[1], held[2])
    call = call_of(sizes, part.arguments(args))
    dims = fours(sizes.head_dim), fours(sizes.head_dim_v)
    variants = configs.gradient_variants(dims, trusted_limits(on), config)
    made_of = sizes, call.flags, stored(given.q.dtype, on), on.limits, variants
    delta, dq, dkv, dbias = kernels_of(*made_of)
    zero = torch.zeros_like(given.lse) if given.dlse is None else given.dlse
    before = on.upload(np.ascontiguousarray(torch.stack((given.lse, zero), -1).float().numpy()))
    rows = on.empty(before.nbytes)
    words = on.upload(call.words)
    blocks = [words, *(x.block for x in held), rows]
    own_bias = None if totals[3] is None else part.plane(totals[3])
    made = [_room(x, args.cu_seqlens_q is not None) for x in held[:3]]
    if own_bias is not None:
        made.append(GpuTensor.empty((own_bias.numel(),)))
    with on.batch():
        grid, stride = flat_grid(on, call.numbers["rows_total"])
        own = [words, GpuTensor.of(given.out).block, held[3].block, before, rows]
        on.launch(delta, call.params({"stride_y": stride}), own, grid)
        if totals[0] is not None:
            walk(dq, call.rows, sizes.num_q_heads, [*blocks, made[0].block], sizes, call)
        if totals[1] is not None or totals[2] is not None:
            outputs = [made[1].block, made[2].block]
            walk(dkv, _most_keys(sizes, args), sizes.num_kv_heads, [*blocks, *outputs], sizes, call)
        if own_bias is not None:
            grid, stride = flat_grid(on, own_bias.numel())
            shape = dict(zip(("dbias_b", "dbias_h", "dbias_q", "dbias_k"), own_bias.shape, strict=True))
            params = call.params(shape | {"stride_y": stride})
            on.launch(dbias, params, [*blocks, made[3].block], grid)
    for total, x, of in zip(totals, made, (part.of_q, part.of_k, part.of_k), strict=False):
        if total is not None:
            x.copy_to(of(total))
    if own_bias is not None:
        own_bias += made[3].torch().view(own_bias.shape)
    return torch.from_numpy(on.read(rows).view(np.float32)).view(*given.lse.shape, 2)


def _room(like: GpuTensor, packed: bool) -> GpuTensor:
    """Room for a gradient. Rows and keys of no packed member are written by nobody."""
    if packed:
        return GpuTensor.of(torch.zeros(like.shape, dtype=like.dtype))
    return GpuTensor.empty(like.shape, like.dtype)


def _most_keys(sizes: Sizes, args: Arguments) -> int:
    """Keys of the longest entry."""
    if args.cu_seqlens_k is None:
        return sizes.seqlen_k
    return int(args.cu_seqlens_k.diff().max()) if len(args.cu_seqlens_k) > 1 else 0


def walk(kernel: Kernel, items: int, heads: int, blocks: list[Block], sizes: Sizes, call: Call) -> None:
    """Launches a kernel with a row, or a key, per thread."""
    on, threads = blocks[0].device, dict(kernel.constants)["BM"]
    others = max(sizes.seqlen_q, sizes.seqlen_k) * sizes.num_q_heads * call.entries
    work = 10.0 * threads * others * max(sizes.head_dim, sizes.head_dim_v)
    for start, grid in dispatches(on, -(-items // threads), heads, call.entries, work):
        on.launch(kernel, call.params(start), blocks, grid)


def _add_sinks(part: Chunk, rows: Tensor, args: Arguments, dsinks: Tensor) -> None:
    """The sink's own weight times -delta, summed over entries and rows."""
    heads = slice(part.h0 * part.group, part.h1 * part.group)
    lse, delta = rows.unbind(-1)
    if args.cu_seqlens_q is not None:
        end = int(args.cu_seqlens_q[-1])
        lse, delta = lse[:, :, :end], delta[:, :, :end]
    sinks = args.sinks
    if sinks is not None:
        weight = torch.exp(sinks[heads].float()[None, :, None] - lse)
        dsinks[heads] -= (weight * delta).sum((0, 2))
