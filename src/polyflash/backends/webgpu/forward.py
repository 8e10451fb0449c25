"""Attention forward in WGSL: the launch of `forward_tile` and `forward_row`, and of `merge` where the keys
were cut into splits.

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), or pools of pages (pages, Hkv, page size, ·); CPU
tensors of any strides, or GpuTensors."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from polyflash.backends.webgpu import configs, device
from polyflash.backends.webgpu.calls import PARAMS, Call, Sizes, call_of, params_of, sizes_of, stages_of
from polyflash.backends.webgpu.chunks import chunks
from polyflash.backends.webgpu.codes import KV, GpuCodes, held_on_device, without_tables
from polyflash.backends.webgpu.configs import ROW, Config, Variant, fours
from polyflash.backends.webgpu.device import Block, Command, Device, DeviceError
from polyflash.backends.webgpu.render import Buffer, Kernel
from polyflash.backends.webgpu.tensor import GpuTensor, nbytes_of
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch

# Floating-point operations of one dispatch on a graphics card: under 0.3 s at 1 TFLOP/s, as systems reset a
# device that is silent for longer (2 s on Windows).
_MOST_WORK = 3e11
_REPEATS = 32
READ = ("read_table.wgsl", "read.wgsl")
_TESTED = Sizes(1, 2, 1, 40, 72, 16, 16)  # by a device's first call, on every template


class Plan(NamedTuple):
    """How a call is run: the variant, and in how many splits of the keys that a tile sees."""

    variant: Variant
    packed: bool = False
    num_splits: int = 1


class Prepared(NamedTuple):
    """A call but for its q, k and v: its words on the device, its commands, the shapes of its results."""

    words: Block
    walks: tuple[Command, ...]
    merge: Command | None  # of splits
    shape: tuple[int, ...]
    out_bytes: int
    rows: int  # of lse, 0 if it is not asked for
    parts_bytes: tuple[int, int]  # of splits: sums, and (m_i, l_i) of rows


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
    return launch_forward(q, k, v, prepared_of(q, k, v, args, config, few_rows))


def prepared_of(q: GpuTensor, k: KV, v: KV, args: Arguments, config: Config, few_rows: bool) -> Prepared:
    """A call that is bound once; equal ones get the same, if they have no tensors beside q, k, v."""
    on, sizes = q.device, sizes_of(q, k, v, args)
    key = None if any(type(x) is torch.Tensor for x in args) else (sizes, q.dtype, args, config, few_rows)
    prepared = None if key is None else on.calls.get(key)
    if prepared is None:
        prepared = prepare(on, sizes, q.dtype, args, plan_of(on, sizes, args, config, few_rows))
        if key is not None:
            on.keep(key, prepared)
    return prepared


def plan_of(on: Device, sizes: Sizes, args: Arguments, config: Config, few_rows: bool) -> Plan:
    dims = fours(sizes.head_dim), fours(sizes.head_dim_v)
    rows = sizes.seqlen_q * sizes.group if few_rows else 0
    variant, keys = trusted(on, config, dims, rows), sizes.seqlen_k
    if few_rows:
        tiles = sizes.batch * sizes.num_kv_heads * -(-rows // variant.rows)
        groups = configs.FEW_GROUPS[on.limits.kind][dims[0] > configs.SHORT]
        return Plan(variant, True, configs.splits(tiles, keys, groups))
    if args.batch_invariant or args.cu_seqlens_q is not None:
        return Plan(variant)
    tiles = sizes.batch * sizes.num_q_heads * -(-sizes.seqlen_q // variant.rows)
    return Plan(variant, False, configs.filling(tiles, keys, on.limits.kind))


def prepare(on: Device, sizes: Sizes, dtype: torch.dtype, args: Arguments, plan: Plan) -> Prepared:
    """Binds a call to a plan."""
    call = call_of(sizes, args)
    shape = (sizes.batch, sizes.num_q_heads, sizes.seqlen_q, sizes.head_dim_v)
    rows, split = math.prod(shape[:3]), plan.num_splits > 1
    walks = tuple(walk(on, sizes, call, plan, dtype, args.need_lse or split))
    merge = _merge(on, sizes, call, plan, dtype, args.need_lse) if split else None
    total = plan.num_splits * rows
    parts = total * fours(shape[3]) * 16, total * 8
    out_bytes, kept = nbytes_of(shape, dtype), rows if args.need_lse else 0
    return Prepared(on.upload(call.words), walks, merge, shape, out_bytes, kept, parts)


def launch_forward(q: GpuTensor, k: KV, v: KV, prepared: Prepared) -> tuple[GpuTensor, GpuTensor | None]:
    words, walks, merge, shape, out_bytes, kept, parts_bytes = prepared
    on = words.device
    out, lse = GpuTensor(on.empty(out_bytes, True), shape, q.dtype), None
    given = (words, q.block, k.block, v.block, *(x.tables for x in (k, v) if isinstance(x, GpuCodes)))
    results: tuple[Block, ...] = (out.block,)
    if kept:
        lse = GpuTensor(on.empty(4 * kept, True), shape[:3], torch.float32)
        results += (lse.block,)
    if merge is None:
        for command in walks:
            on.record(command, given + results)
        return out, lse
    parts = tuple(on.empty(x, True) for x in parts_bytes)
    for command in walks:
        on.record(command, given + parts)
    on.record(merge, (words, *parts, *results))
    return out, lse


def kernel_of(
    sizes: Sizes, flags: dict[str, int], plan: Plan, kind: str, need_lse: bool, unrolled: int
) -> Kernel:
    """The kernel of a walk over keys: no length is in it."""
    variant, split = plan.variant, plan.num_splits > 1
    d4, dv4 = fours(sizes.head_dim), fours(sizes.head_dim_v)
    flags = {"PACK": int(plan.packed), "SPLIT": int(split), "LSE": int(need_lse), **flags}
    products = flags.pop("PRODUCTS", 0) and variant.template == ROW and not plan.packed
    flags |= {"PRODUCTS": 1} if products else {}
    constants = flags | configs.constants(variant, d4, dv4)
    out = "sums" if split else kind
    rows = "vec2<f32>" if split else "f32"
    buffers = [Buffer("q", kind)]
    buffers += [Buffer(x, "u32" if flags.get(f"{x.upper()}_CODES") else kind) for x in "kv"]
    buffers += [Buffer(f"{x}_tables", "f32") for x in "kv" if flags.get(f"{x.upper()}_CODES")]
    buffers.append(Buffer("out", out, True))
    if split or need_lse:
        buffers.append(Buffer("lse", rows, True))
    name = f"forward_{variant.template}"
    tile = ("lanes.wgsl", "load_tile.wgsl") if variant.template == ROW else ()
    own = ("products.wgsl",) if products else ()
    files = (*stages_of(flags), *READ, "finalize.wgsl", *tile, *own, f"{name}.wgsl")
    return Kernel(name, files, tuple(buffers), tuple(constants.items()), params_of(flags), unrolled)


def walk(
    on: Device, sizes: Sizes, call: Call, plan: Plan, dtype: torch.dtype, need_lse: bool
) -> Iterator[Command]:
    """The dispatches of a walk over keys."""
    kernel = kernel_of(sizes, call.flags, plan, stored(dtype, on), need_lse, on.limits.unrolled)
    heads = sizes.num_kv_heads if plan.packed else sizes.num_q_heads
    rows = call.rows * (sizes.group if plan.packed else 1)
    tiles = -(-rows // plan.variant.rows)
    width = 4.0 * (sizes.head_dim + sizes.head_dim_v) / 2
    work = width * plan.variant.rows * sizes.seqlen_k * heads * call.entries
    for start, grid in dispatches(on, tiles, heads * plan.num_splits, call.entries, work):
        yield on.command(kernel, call.params(start | {"num_splits": plan.num_splits}), grid)


def dispatches(
    on: Device, tiles: int, heads: int, depth: int, work: float
) -> Iterator[tuple[dict[str, int], tuple[int, int, int]]]:
    """First tile and entry of each dispatch, and its grid: heads, tiles, depth. `work` is that of a tile in
    all of the rest."""
    most = on.limits.workgroups
    wide = most if on.limits.kind == "cpu" else min(most, max(1, int(_MOST_WORK / max(1.0, work))))
    for z in range(0, depth, most):
        for first in range(0, tiles, wide):
            yield {"tile0": first, "z0": z}, (heads, min(wide, tiles - first), min(most, depth - z))


def flat_grid(on: Device, items: int) -> tuple[tuple[int, int, int], int]:
    """A grid of one item per thread of workgroups of 64, and the items of a row of it."""
    groups = -(-items // 64)
    wide = min(groups, on.limits.workgroups)
    return (wide, -(-groups // wide), 1), wide * 64


def _merge(on: Device, sizes: Sizes, call: Call, plan: Plan, dtype: torch.dtype, need_lse: bool) -> Command:
    buffers = [Buffer("parts", "vec4<f32>"), Buffer("parts_lse", "vec2<f32>")]
    buffers.append(Buffer("out", stored(dtype, on), True))
    if need_lse:
        buffers.append(Buffer("lse", "f32", True))
    dv4 = fours(sizes.head_dim_v)
    constants = (("DV4", dv4), ("BN", 4), ("BM", 4), ("LSE", int(need_lse)))
    kernel = Kernel("merge", ("stages.wgsl", "merge.wgsl"), tuple(buffers), constants, PARAMS)
    grid, stride = flat_grid(on, call.numbers["rows_total"] * dv4)
    return on.command(kernel, call.params({"num_splits": plan.num_splits, "stride_y": stride}), grid)


def trusted(on: Device, config: Config, dims: tuple[int, int], few_rows: int) -> Variant:
    """The variant of a config. Without one, the first of the ranking that passed the self-test: drivers have
    compiled right kernels wrong."""
    if config.template != configs.AUTO or config.variant:
        return configs.resolve(config, dims, on.limits, few_rows)
    failed: list[str] = []
    for variant in configs.variants(dims, on.limits, few_rows):
        known = variant.name in on.trusted
        if _is_right(on, variant):
            if failed:
                what = f"kernels {', '.join(failed)} are wrong on {on.name} and are not used"
                warnings.warn(f"polyflash: {what}; {variant.name} is right", RuntimeWarning, stacklevel=2)
            return variant
        failed += [] if known else [variant.name]
    raise DeviceError(f"{on.name}: no kernel passed its self-test ({', '.join(on.trusted)})")


@contextlib.contextmanager
def tried() -> Iterator[None]:
    """While configs are compared on a graphics card, a kernel runs often enough to outweigh copies."""
    on = device.current()
    on.repeats = 1 if on.limits.kind == "cpu" else _REPEATS
    try:
        yield
    finally:
        on.repeats = 1


def _is_right(on: Device, variant: Variant) -> bool:
    if variant.name not in on.trusted:
        on.trusted[variant.name] = _passes(on, variant)
    return on.trusted[variant.name]


def trusted_limits(on: Device) -> configs.Limits:
    """Limits for kernels that share rows among lanes: without subgroups if those give wrong rows."""
    probe = Variant(ROW, 32, rm=4, rn4=1, subgroups=True, lanes=4)
    fits = on.limits.subgroup >= probe.lanes and _is_right(on, probe)
    return on.limits if fits else on.limits._replace(subgroup=0)


def _passes(on: Device, variant: Variant) -> bool:
    """A small causal problem of grouped heads against float64."""
    generator = np.random.default_rng(0)
    s = _TESTED._replace(head_dim=max(16, 4 * variant.lanes), head_dim_v=max(16, 4 * variant.lanes))
    q, k, v = (
        generator.standard_normal((s.batch, heads, rows, s.head_dim)).astype(np.float32)
        for heads, rows in ((s.num_q_heads, s.seqlen_q), (1, s.seqlen_k), (1, s.seqlen_k))
    )
    args = Arguments(causal=True)
    try:
        held = (GpuTensor.of(q), GpuTensor.of(k), GpuTensor.of(v))
        out, _ = launch_forward(*held, prepare(on, s, torch.float32, args, Plan(variant)))
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
