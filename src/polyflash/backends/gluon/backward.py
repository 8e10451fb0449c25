"""Attention gradients on Hopper: the launches of `center`, `differentiate_sm90` and `finish_dq`, and of the
Triton engine's kernels for values that are not finite, which do nothing where all are.

q, dout (B, Hq, Sq, D), k, v (B, Hkv, Sk, D). What calls of the same sizes and strides share is worked out
once. Operands that TMA does not take are copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.backends.gluon import configs, gradient_passes, shim
from polyflash.backends.gluon.backward_sm90 import Constants, Numbers, Tensors, differentiate_sm90
from polyflash.backends.gluon.forward import boxed
from polyflash.backends.gluon.gradient_passes import center, finish_dq
from polyflash.backends.gpu.numbers import LOG2E, scale_of
from polyflash.backends.gpu.views import rows_of, view_of
from polyflash.backends.triton import backward as triton_backward
from polyflash.backends.triton import configs as triton_configs
from polyflash.backends.triton import runtime
from polyflash.backends.triton.gradient_kernels import PAD
from polyflash.results import empty_in_order_of

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

ROWS, KEYS = configs.ROWS, 2 * configs.ROWS  # of a block, and of a program
_PASS = {"num_warps": 4, "enable_fp_fusion": False}


class Prepared:
    """A route's memory between calls."""

    __slots__ = ("config", "constants", "kernels", "passes", "rare")

    def __init__(self, launch: Launch) -> None:
        self.config: configs.BackwardConfig = launch.config
        self.kernels = runtime.Kernels()
        self.constants: dict[Any, Any] = {}
        rare = triton_configs.choose_backward(launch.spec, launch.target)
        self.rare = triton_backward.Prepared(launch, rare)


class Scratch(NamedTuple):
    """Memory of one call between its kernels: see `gradient_passes.Tensors`."""

    row_lse: Tensor
    delta: Tensor
    stats: Tensor
    sums: Tensor
    added: Tensor
    odd: Tensor
    started: Tensor


def scratch_for(q: Tensor, k: Tensor, channels: int, ordered: bool) -> Scratch:
    (batch, num_heads, seqlen_q, _), num_kv_heads = q.shape, k.shape[1]
    number, blocks = batch * num_heads * seqlen_q, batch * num_heads * -(-seqlen_q // ROWS)
    pad = PAD.value
    room = q.new_empty((2, -(-number // pad) * pad + pad), dtype=torch.float32)
    packed = room[:, :number].view(2, batch, num_kv_heads, number // (batch * num_kv_heads))
    words = q.new_zeros(2, dtype=torch.int32)
    sums = q.new_empty((blocks * 2 * channels, 32), dtype=torch.float32)
    return Scratch(
        row_lse=packed[0],
        delta=packed[1],
        stats=q.new_empty(blocks * 2 * ROWS, dtype=torch.float32),
        sums=sums if ordered else sums.zero_(),
        added=q.new_empty(blocks, dtype=torch.int32),
        odd=words[:1],
        started=words[1:],
    )


def run(
    launch: Launch, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, args: Arguments, needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dq, dk, dv, and None for bias and sinks, which this row does not take. All three are made, whatever
    `needs` says."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
    read = boxed(q), boxed(k), boxed(v), boxed(dout)
    made = tuple(empty_in_order_of(x, x.shape[3]) for x in read[:3])
    launch_all(prepared, read, (out, lse, dlse), made, args)
    found = (x if need else None for x, need in zip(made, needs[:3], strict=True))
    return *found, None, None  # type: ignore[return-value]


def launch_all(
    prepared: Prepared, read: tuple[Tensor, ...], results: tuple[Any, ...], made: tuple[Tensor, ...],
    args: Arguments,
) -> None:  # fmt: skip
    """`read` are q, k, v and dout, `results` out, lse and dlse of the forward pass, `made` dq, dk and dv."""
    (q, k, v, _), (dq, dk, dv), device = read, made, read[0].device
    channels = configs.box_of(q.shape[3])
    space = scratch_for(q, k, channels, prepared.config.ordered)
    arguments, key = passes(prepared, channels, read, results, dq, space, args)
    row_programs = (space.added.numel(),)
    launch = prepared.kernels.launch
    launch(center, row_programs, arguments, _PASS, ("center", *key), device)
    programs, fused, c = fusion(prepared, channels, read, made, space, args)
    launch(differentiate_sm90, (programs,), fused, _PASS, c, device)
    launch(finish_dq, row_programs, arguments, _PASS, ("finish_dq", *key), device)
    centered = space.row_lse, space.delta, space.odd, read
    rare = triton_backward.prepare_call(prepared.rare, q, k, v, centered, args)
    triton_backward.launch_dkv(rare, dk, dv)
    triton_backward.launch_dq(rare, dq)


def passes(
    prepared: Prepared, channels: int, read: tuple[Tensor, ...], results: tuple[Any, ...], dq: Tensor,
    space: Scratch, args: Arguments,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Arguments of `center` and `finish_dq`, and all that tells their kernels from others."""
    (q, k, _, dout), (out, lse, dlse) = read, results
    views = *map(view_of, (out, dout)), *map(rows_of, (lse, dlse, space.row_lse, space.delta)), view_of(dq)
    t = gradient_passes.Tensors(*views, space.stats, space.sums, space.added, space.odd)  # type: ignore[call-arg]
    batch, num_heads, seqlen_q, head_dim = q.shape
    n = gradient_passes.Numbers(
        batch=batch,
        num_heads=num_heads,
        group=num_heads // k.shape[1],
        seqlen_q=seqlen_q,
        row_blocks=-(-seqlen_q // ROWS),
        offset=offset_of(q, k, args),
        scale=scale_of(q, args),
    )
    c = gradient_passes.Constants(DIM=head_dim, D=channels, HAS_RIGHT=args.causal)
    key = c, *(x and x[1:] for x in views), runtime.aligned(out, dout, lse, dlse, dq)
    return (t, n, compiled_in(prepared, c)), key


def fusion(
    prepared: Prepared, channels: int, read: tuple[Tensor, ...], made: tuple[Tensor, ...], space: Scratch,
    args: Arguments,
) -> tuple[int, tuple[Any, ...], Constants]:  # fmt: skip
    """Programs and arguments of `differentiate_sm90`, and all that tells its kernel from others."""
    config, (q, k, v, dout), (_, dk, dv) = prepared.config, read, made
    num_kv_heads, seqlen_k = k.shape[1:3]
    planes, key_tiles = k.shape[0] * num_kv_heads, -(-seqlen_k // KEYS)
    scale = scale_of(q, args)
    n = Numbers(
        num_kv_heads=num_kv_heads,
        group=q.shape[1] // num_kv_heads,
        planes=planes,
        heads=configs.turns(q.shape[2] * q.shape[1] // num_kv_heads, channels, config),
        seqlen_q=q.shape[2],
        seqlen_k=seqlen_k,
        row_blocks=-(-q.shape[2] // ROWS),
        key_tiles=key_tiles,
        offset=offset_of(q, k, args),
        factor=scale * LOG2E,
        scale=scale,
    )
    c = Constants(
        D=channels,
        STAGES=config.num_stages,
        HAS_RIGHT=args.causal,
        WHOLE=not args.causal and seqlen_k % KEYS == 0,
        AHEAD=config.ahead,
        ORDERED=config.ordered,
    )
    boxes = (
        *(shim.descriptor(x, ROWS, channels) for x in (q, dout, k, v)),
        shim.flat_descriptor(space.stats, 2 * ROWS), shim.flat_descriptor(space.sums, channels, 32),
        *(shim.descriptor(x, ROWS, channels) for x in (dk, dv)),
    )  # fmt: skip
    t = Tensors(space.odd, space.started, space.added)
    return planes * key_tiles, (t, n, compiled_in(prepared, c), *boxes), c


def offset_of(q: Tensor, k: Tensor, args: Arguments) -> int:
    """The key at which row 0 stands; no row or every row may see all keys beyond the limits."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    offset = seqlen_k - seqlen_q if args.offset is None else args.offset
    return min(max(offset, -seqlen_q), seqlen_k)


def compiled_in(prepared: Prepared, c: Any) -> Any:
    """`c` as constants of a kernel."""
    key = type(c), c
    if key not in prepared.constants:
        prepared.constants[key] = runtime.compiled_in(c)
    return prepared.constants[key]
