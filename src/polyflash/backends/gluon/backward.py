"""Attention gradients on Hopper: the launches of `center`, `differentiate_sm90` and `finish_dq`, and of the
Triton engine's kernels for values that are not finite, which do nothing where all are.

q, dout (B, Hq, Sq, D), k, v (B, Hkv, Sk, D). Calls that differ in addresses alone are replayed. Operands that
TMA does not take are copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.backends.gluon import configs, gradient_passes, shim
from polyflash.backends.gluon.backward_sm90 import Constants, Numbers, Tensors, differentiate_sm90
from polyflash.backends.gluon.forward import band_of, bounds_of, boxed, position_of
from polyflash.backends.gluon.gradient_passes import center, finish_dq
from polyflash.backends.gluon.schedule import heads_of, inverse_of
from polyflash.backends.gpu.launch import tile_count
from polyflash.backends.gpu.numbers import LOG2E, SOFTCAPS, scale_of, sizes_of
from polyflash.backends.gpu.views import NO_OPERANDS, operands_of, rows_of, view_of
from polyflash.backends.triton import backward as triton_backward
from polyflash.backends.triton import configs as triton_configs
from polyflash.backends.triton import replay, runtime
from polyflash.results import empty_in_order_of

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

ROWS, KEYS = configs.ROWS, 2 * configs.ROWS  # of a block, and of a program
_LARGE_CAP = 256.0  # beyond, rounding of a part of it shows in a weight
_LEAST_CAP = 2.0**-100  # below, scores are 0 as well, but its inverse may not be finite
_PASS = {"num_warps": 4, "enable_fp_fusion": False}


class Prepared:
    """A route's memory between calls."""

    __slots__ = ("config", "constants", "gradients", "kernels", "rare")

    def __init__(self, launch: Launch) -> None:
        self.config: configs.BackwardConfig = launch.config
        self.kernels = runtime.Kernels()
        self.constants: dict[Any, Any] = {}
        self.gradients = replay.Calls()
        rare = triton_configs.choose_backward(launch.spec, launch.target)
        self.rare = triton_backward.Prepared(launch, rare)


class Scratch(NamedTuple):
    """Memory of one call between its kernels: see `gradient_passes.Tensors`."""

    row_lse: Tensor
    delta: Tensor
    stats: Tensor
    sums: Tensor
    added: Tensor
    words: Tensor
    row_blocks: int  # of a head


def scratch_for(q: Tensor, k: Tensor, channels: int, ordered: bool, args: Arguments) -> Scratch:
    (batch, num_heads, seqlen_q, _), num_kv_heads = q.shape, k.shape[1]
    row_blocks = blocks_of(q, k, seqlen_q, ROWS, args)
    blocks, rows = batch * num_heads * row_blocks, (batch, num_kv_heads, seqlen_q * num_heads // num_kv_heads)
    sums = runtime.scratch((blocks * 2 * channels, 32), q.device, zero=not ordered)
    return Scratch(
        row_lse=triton_backward.padded_rows(rows, q.device),
        delta=triton_backward.padded_rows(rows, q.device),
        stats=runtime.scratch((blocks * 2 * ROWS,), q.device),
        sums=sums,
        added=runtime.scratch((blocks,), q.device, torch.int32),
        words=runtime.scratch((2,), q.device, torch.int32),
        row_blocks=row_blocks,
    )


def run(
    launch: Launch, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, args: Arguments, needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dq, dk, dv, all three made whatever `needs` says, None for bias, which this row does not take, and
    dsinks."""
    prepared: Prepared | None = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
        launch.again = prepared.gradients.again
    given = q, k, v, out, dout, lse, dlse
    if needs[4] and args.sinks is not None:
        made, delta = differentiate(prepared, given, args)
        dsinks = triton_backward.sink_gradient(args.sinks, lse, delta).to(args.sinks.dtype)
    else:
        make = lambda: differentiate(prepared, given, args)[0]  # noqa: E731
        made, dsinks = prepared.gradients(given, args, make, needs), None
    found = (x if need else None for x, need in zip(made, needs[:3], strict=True))
    return *found, None, dsinks  # type: ignore[return-value]


def differentiate(
    prepared: Prepared, given: tuple[Any, ...], args: Arguments
) -> tuple[tuple[Tensor, ...], Tensor]:
    """dq, dk and dv of q, k, v, out, dout, lse and dlse; delta by packed row."""
    q, k, v, _ = read = tuple(map(boxed, (*given[:3], given[4])))
    results = given[3], *given[5:]
    dq, dk, dv = made = tuple(empty_in_order_of(x, x.shape[3]) for x in (q, k, v))
    device = q.device
    channels = configs.box_of(q.shape[3])
    space = scratch_for(q, k, channels, prepared.config.ordered, args)
    arguments, key = passes(prepared, read, (*results, dq), space, args)
    row_programs = (space.added.numel(),)
    launch = prepared.kernels.launch
    launch(center, row_programs, arguments, _PASS, ("center", *key), device)
    programs, fused, c = fusion(prepared, read, made, space, args)
    launch(differentiate_sm90, (programs,), fused, _PASS, c, device)
    launch(finish_dq, row_programs, arguments, _PASS, ("finish_dq", *key), device)
    centered = space.row_lse, space.delta, space.words, read
    rare = triton_backward.prepare_call(prepared.rare, q, k, v, centered, args)
    triton_backward.launch_again(rare, dq, dk, dv)
    return made, space.delta


def blocks_of(q: Tensor, k: Tensor, positions: int, block: int, args: Arguments) -> int:
    """Blocks of so many positions of one head, rows or keys."""
    return tile_count(positions, block, sizes_of(q, k, args)[0], args.cu_seqlens_q is not None)[0]


def passes(
    prepared: Prepared, read: tuple[Tensor, ...], results: tuple[Any, ...], space: Scratch, args: Arguments
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of `center` and `finish_dq`, and all that tells their kernels from others."""
    (q, k, _, dout), (out, lse, dlse, dq) = read, results
    views = *map(view_of, (out, dout)), *map(rows_of, (lse, dlse, space.row_lse, space.delta)), view_of(dq)
    places = space.stats, space.sums, space.added, space.words
    t = gradient_passes.Tensors(*views, *places, operands_of(args, k).cu_seqlens_q)  # type: ignore[call-arg]
    batch, num_heads, seqlen_q, head_dim = q.shape
    n = gradient_passes.Numbers(
        batch=batch,
        num_heads=num_heads,
        group=num_heads // k.shape[1],
        seqlen_q=seqlen_q,
        row_blocks=space.row_blocks,
        members=sizes_of(q, k, args)[0],
        scale=scale_of(q.shape[3], args),
    )
    c = gradient_passes.Constants(DIM=head_dim, D=configs.box_of(head_dim), ORDERED=prepared.config.ordered)
    aligned = runtime.aligned(out, dout, lse, dlse, dq, t.cu_seqlens_q)
    key = c, *(x and x[1:] for x in views), aligned, t.cu_seqlens_q is None
    return (t, n, compiled_in(prepared, c)), key


def fusion(
    prepared: Prepared, read: tuple[Tensor, ...], made: tuple[Tensor, ...], space: Scratch, args: Arguments
) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
    """Programs and arguments of `differentiate_sm90`, and all that tells its kernel from others."""
    config, (q, k, v, dout), (_, dk, dv) = prepared.config, read, made
    num_kv_heads, seqlen_k, channels = *k.shape[1:3], configs.box_of(q.shape[3])
    planes, key_tiles = k.shape[0] * num_kv_heads, blocks_of(q, k, seqlen_k, KEYS, args)
    (inverse, shift), scale = inverse_of(key_tiles), scale_of(q.shape[3], args)
    band, alibi = band_of(q.shape[2], seqlen_k, args), args.alibi_slopes is not None
    near, rest = position_of(q.shape[2], seqlen_k, args)
    n = Numbers(
        num_kv_heads=num_kv_heads,
        group=q.shape[1] // num_kv_heads,
        heads=heads_of(planes, configs.turns(q.shape[2] * q.shape[1] // num_kv_heads, channels, config)),
        seqlen_q=q.shape[2],
        seqlen_k=seqlen_k,
        row_blocks=space.row_blocks,
        num_tiles=key_tiles,
        inverse=inverse,
        shift=shift,
        offset=band.right,
        left=band.left,
        members=sizes_of(q, k, args)[0] if args.cu_seqlens_q is not None else None,
        **factors_of(scale, args),
        scale=scale,
        position=near if alibi else None,
        rest=rest if alibi else None,
    )
    c = Constants(
        D=channels,
        CHANNELS=q.shape[3],
        STAGES=config.num_stages,
        **bounds_of(band, k, KEYS, args),
        SOFTCAP=args.softcap != 0.0,
        LARGE_CAP=args.softcap > _LARGE_CAP,
        ALIBI=alibi,
        GROUPED=q.shape[1] != num_kv_heads,
        AHEAD=config.ahead,
        ORDERED=config.ordered,
    )
    read_boxes = [shim.descriptor(x, ROWS, channels) for x in (q, dout, k, v)]
    flat_boxes = shim.flat_descriptor(space.stats, 2 * ROWS), shim.flat_descriptor(space.sums, channels, 32)
    boxes = *read_boxes, *flat_boxes, *(shim.descriptor(x, ROWS, channels) for x in (dk, dv))
    x = operands_of(args, k)
    requests = x.kv_lens, x.kv_starts, x.q_offset, x.cu_seqlens_q, x.cu_seqlens_k, x.alibi_slopes
    views = (view_of(dk), view_of(dv)) if c.PACKED else (None, None)
    t = Tensors(space.words, space.added, *requests, *views)
    key = c, None if x == NO_OPERANDS else runtime.signature((*requests, *views))
    return planes * key_tiles, (t, n, compiled_in(prepared, c), *boxes), key


def factors_of(scale: float, args: Arguments) -> dict[str, float | None]:
    """Factors of scores on their way into an exponent of 2: see `backward_scores.change_scores`."""
    softcap = min(max(args.softcap, _LEAST_CAP), SOFTCAPS[1])
    if not args.softcap:
        return {"factor": scale * LOG2E, "into_cap": None}
    if args.softcap > _LARGE_CAP:
        return {"factor": softcap * LOG2E, "into_cap": scale / softcap}
    return {"factor": -2.0 * softcap * LOG2E, "into_cap": 2.0 * LOG2E * scale / softcap}


def compiled_in(prepared: Prepared, c: Any) -> Any:
    """`c` as constants of a kernel."""
    key = type(c), c
    if key not in prepared.constants:
        prepared.constants[key] = runtime.compiled_in(c)
    return prepared.constants[key]
