"""Attention forward in WGSL: the launch of `forward_tile` and `forward_row`, and of `merge` where the keys
were cut into splits.

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); CPU tensors of any strides, or GpuTensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from polyflash.backends.webgpu import configs, device
from polyflash.backends.webgpu.calls import PARAMS, Call, Sizes, call_of, sizes_of
from polyflash.backends.webgpu.chunks import chunks
from polyflash.backends.webgpu.codes import KV, GpuCodes, held_on_device, without_tables
from polyflash.backends.webgpu.configs import ROW, Config, Variant, fours
from polyflash.backends.webgpu.device import Block, Device, DeviceError
from polyflash.backends.webgpu.render import Buffer, Kernel
from polyflash.backends.webgpu.tensor import GpuTensor
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch

# Floating-point operations of one dispatch on a graphics card: under 0.3 s at 1 TFLOP/s, as systems reset a
# device that is silent for longer (2 s on Windows).
_MOST_WORK = 3e11
_KEPT_CALLS = 256
READ = ("read_table.wgsl", "read.wgsl")
_TESTED = Sizes(1, 2, 1, 40, 72, 16, 16)  # by a device's first call, on every template


class Plan(NamedTuple):
    """How a call is run: the variant, and in how many splits of how many keys."""

    variant: Variant
    packed: bool = False
    split_keys: int = 0
    num_splits: int = 1


class Prepared(NamedTuple):
    """A call but for its q, k and v: its numbers, its words on the device, its plan."""

    call: Call
    words: Block
    plan: Plan


def stored(dtype: torch.dtype, on: Device) -> str:
    """How four channels of a dtype lie in a buffer; see `render.STORED`."""
    name = str(dtype).removeprefix("torch.")
    return "float16 of the device" if name == "float16" and on.limits.float16 else name


def attend(
    q: GpuTensor,
    k: KV,
    v: KV,
    args: Arguments,
    config: Config,
    few_rows: bool = False,
) -> tuple[GpuTensor, GpuTensor | None]:
    """out (B, Hq, Sq, Dv) and, if asked for, lse (B, Hq, Sq), on the device; nothing waits."""
    on, sizes = q.device, sizes_of(q, k, v)
    key = None if any(type(x) is torch.Tensor for x in args) else (sizes, args, config, few_rows)
    prepared = None if key is None else on.calls.get(key)
    if prepared is None:
        prepared = _prepare(on, sizes, args, config, few_rows)
        if key is not None:
            if len(on.calls) >= _KEPT_CALLS:
                on.calls.clear()
            on.calls[key] = prepared
    return launch_forward(q, k, v, prepared, args.need_lse)


def _prepare(on: Device, sizes: Sizes, args: Arguments, config: Config, few_rows: bool) -> Prepared:
    dims = fours(sizes.head_dim), fours(sizes.head_dim_v)
    variant = trusted(on, config, dims, few_rows)
    plan = Plan(variant)
    if few_rows:
        cores = 4 if on.limits.kind == "cpu" else 64
        tiles = sizes.batch * sizes.num_kv_heads * -(-sizes.seqlen_q * sizes.group // variant.rows)
        plan = Plan(variant, True, *configs.splits(tiles, sizes.seqlen_k, variant.keys, cores))
    call = call_of(sizes, args)
    return Prepared(call, on.upload(call.words), plan)


def launch_forward(
    q: GpuTensor, k: KV, v: KV, prepared: Prepared, need_lse: bool
) -> tuple[GpuTensor, GpuTensor | None]:
    on, sizes, (call, words, plan) = q.device, sizes_of(q, k, v), prepared
    shape = (*q.shape[:3], sizes.head_dim_v)
    out = GpuTensor.empty(shape, q.dtype)
    lse = GpuTensor.empty(shape[:3]) if need_lse else None
    given = (words, q.block, k.block, v.block, *(x.tables for x in (k, v) if isinstance(x, GpuCodes)))
    if plan.num_splits == 1:
        rows = lse.block if lse is not None else words
        _walk(on, (*given, out.block, rows), sizes, call, plan, q.dtype, need_lse)
        return out, lse
    total = plan.num_splits * math.prod(shape[:3])
    parts, rows = on.empty(total * fours(shape[3]) * 16), on.empty(total * 8)
    _walk(on, (*given, parts, rows), sizes, call, plan, q.dtype, True)
    _merge(
        on,
        (words, parts, rows, out.block, lse.block if lse is not None else None),
        sizes,
        call,
        plan,
        q.dtype,
    )
    return out, lse


def kernel_of(
    sizes: Sizes, flags: dict[str, int], plan: Plan, kind: str, need_lse: bool, unrolled: int
) -> Kernel:
    """The kernel of a walk over keys: no length is in it."""
    variant, split = plan.variant, plan.num_splits > 1
    d4, dv4 = fours(sizes.head_dim), fours(sizes.head_dim_v)
    constants = {
        **flags,
        **{"D4": d4, "DV4": dv4, "NT": variant.threads, "BN": variant.keys, "K_FOURS": d4, "V_FOURS": dv4},
        **{"PACK": int(plan.packed), "SPLIT": int(split), "LSE": int(need_lse)},
    }
    if variant.template != ROW:
        constants |= {"TX": variant.tx, "RM": variant.rm, "RN4": variant.rn4, "BM": variant.rows, "FOUR": 4}
        constants |= {"BN4": variant.keys // 4, "DC": -(-dv4 // variant.tx), "WIDEST4": max(d4, dv4)}
        constants |= {"SHARED": int(not variant.subgroups), "SUBGROUPS": int(variant.subgroups)}
    out = "sums" if split else kind
    rows = "vec2<f32>" if split else "f32"
    buffers = [Buffer("q", kind)]
    buffers += [Buffer(x, "u32" if flags.get(f"{x.upper()}_CODES") else kind) for x in "kv"]
    buffers += [Buffer(f"{x}_tables", "f32") for x in "kv" if flags.get(f"{x.upper()}_CODES")]
    buffers.append(Buffer("out", out, True))
    if split or need_lse:
        buffers.append(Buffer("lse", rows, True))
    name = f"forward_{variant.template}"
    tile = ("load_tile.wgsl",) if variant.template == ROW else ()
    files = ("stages.wgsl", *READ, "finalize.wgsl", *tile, f"{name}.wgsl")
    return Kernel(name, files, tuple(buffers), tuple(constants.items()), PARAMS, unrolled)


def _walk(
    on: Device,
    blocks: tuple[Block, ...],
    sizes: Sizes,
    call: Call,
    plan: Plan,
    dtype: torch.dtype,
    need_lse: bool,
) -> None:
    unrolled = configs.UNROLLED[on.limits.kind]
    kernel = kernel_of(sizes, call.flags, plan, stored(dtype, on), need_lse, unrolled)
    heads = sizes.num_kv_heads if plan.packed else sizes.num_q_heads
    rows = call.rows * (sizes.group if plan.packed else 1)
    tiles = -(-rows // plan.variant.rows)
    given = {"num_splits": plan.num_splits, "split_keys": plan.split_keys}
    width = 4.0 * (sizes.head_dim + sizes.head_dim_v) / 2
    work = width * plan.variant.rows * sizes.seqlen_k * heads * call.entries
    own = blocks[: len(kernel.buffers) + 1]
    for start, grid in dispatches(on, (tiles, heads, call.entries * plan.num_splits), work):
        on.launch(kernel, call.params(start | given), own, grid)


def dispatches(
    on: Device, grid: tuple[int, int, int], work: float
) -> Iterator[tuple[dict[str, int], tuple[int, int, int]]]:
    """First tile and entry of each dispatch of a grid, and its own grid; `work` is that of a tile in all of
    the rest."""
    tiles, heads, depth = grid
    most = on.limits.workgroups
    wide = most if on.limits.kind == "cpu" else min(most, max(1, int(_MOST_WORK / max(1.0, work))))
    for z in range(0, depth, most):
        for first in range(0, tiles, wide):
            yield {"tile0": first, "z0": z}, (min(wide, tiles - first), heads, min(most, depth - z))


def flat_grid(on: Device, items: int) -> tuple[tuple[int, int, int], int]:
    """A grid of one item per thread of workgroups of 64, and the items of a row of it."""
    groups = -(-items // 64)
    wide = min(groups, on.limits.workgroups)
    return (wide, -(-groups // wide), 1), wide * 64


def _merge(
    on: Device,
    blocks: tuple[Block | None, ...],
    sizes: Sizes,
    call: Call,
    plan: Plan,
    dtype: torch.dtype,
) -> None:
    kind, given = stored(dtype, on), [block for block in blocks if block is not None]
    buffers = [Buffer("parts", "vec4<f32>"), Buffer("parts_lse", "vec2<f32>"), Buffer("out", kind, True)]
    if len(given) == 5:
        buffers.append(Buffer("lse", "f32", True))
    dv4 = fours(sizes.head_dim_v)
    constants = (("DV4", dv4), ("BN", 4), ("LSE", int(len(given) == 5)))
    kernel = Kernel("merge", ("stages.wgsl", "merge.wgsl"), tuple(buffers), constants, PARAMS)
    grid, stride = flat_grid(on, call.numbers["rows_total"] * dv4)
    on.launch(kernel, call.params({"num_splits": plan.num_splits, "stride_y": stride}), given, grid)


def trusted(on: Device, config: Config, dims: tuple[int, int], few_rows: bool) -> Variant:
    """The variant of a config. Without one, the first of the ranking that passed the self-test: drivers have
    compiled right kernels wrong."""
    if config.template != configs.AUTO:
        return configs.resolve(config, dims, on.limits, few_rows)
    failed = []
    for variant in configs.variants(dims, on.limits, few_rows):
        if variant.name not in on.trusted:
            on.trusted[variant.name] = _passes(on, variant)
            if not on.trusted[variant.name]:
                failed.append(variant.name)
        if on.trusted[variant.name]:
            if failed:
                what = f"kernels {', '.join(failed)} are wrong on {on.name} and are not used"
                warnings.warn(f"polyflash: {what}; {variant.name} is right", RuntimeWarning, stacklevel=2)
            return variant
    raise DeviceError(f"{on.name}: no kernel passed its self-test ({', '.join(on.trusted)})")


def _passes(on: Device, variant: Variant) -> bool:
    """A small causal problem of grouped heads against float64."""
    fitted = variant
    if variant.template == ROW:
        fitted = configs.fitted_row(variant, 4, 4, on.limits)
    generator = np.random.default_rng(0)
    s = _TESTED
    q, k, v = (
        generator.standard_normal((s.batch, heads, rows, s.head_dim)).astype(np.float32)
        for heads, rows in ((s.num_q_heads, s.seqlen_q), (1, s.seqlen_k), (1, s.seqlen_k))
    )
    args = Arguments(causal=True)
    try:
        held = (GpuTensor.of(q), GpuTensor.of(k), GpuTensor.of(v))
        call = call_of(s, args)
        out, _ = launch_forward(
            held[0], held[1], held[2], Prepared(call, on.upload(call.words), Plan(fitted)), False
        )
        got = out.numpy()
    except DeviceError:
        return False
    scores = np.einsum("bhid,bgjd->bhij", q, k, dtype=np.float64) / math.sqrt(s.head_dim)
    hidden = np.arange(s.seqlen_k)[None] > np.arange(s.seqlen_q)[:, None] + s.seqlen_k - s.seqlen_q
    weights = np.exp(np.where(hidden, -np.inf, scores))
    want = weights @ v.astype(np.float64) / weights.sum(-1, keepdims=True)
    return bool(np.abs(got - want).max() < 1e-4)


def run(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: Arguments,
    few: bool = False,
) -> tuple[Tensor, Tensor]:
    """Fills out (B, Hq, Sq, Dv) and, if asked for, lse (B, Hq, Sq) from CPU tensors, k and v perhaps codes, a
    chunk at a time where one would be larger than a binding may be."""
    on = device.current()
    for part in chunks(q, k, v, args, on.limits):
        own_q, own_k, own_v, own = part.of_q(q), part.of_k(k), part.of_k(v), part.arguments(args)
        held_k, held_v = held_on_device(own_k, own_v, own)
        own = without_tables(own)
        results: tuple[Any, Any] = attend(GpuTensor.of(own_q), held_k, held_v, own, launch.config, few)
        results[0].copy_to(part.of_q(out))
        if args.need_lse:
            results[1].copy_to(part.of_q(lse))
    if args.cu_seqlens_q is not None:
        end = int(args.cu_seqlens_q[-1])
        out[:, :, end:] = 0.0
        if args.need_lse:
            lse[:, :, end:] = -math.inf
    return out, lse
