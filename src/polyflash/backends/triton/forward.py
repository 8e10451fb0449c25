"""Attention forward in Triton: the launch of `forward_kernel.attend`. What calls of a route share is worked
out once; a call adds its tensors, lengths and the grid. Where few programs would leave the device idle, the
keys are cut into splits, which are merged afterwards.

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) of any strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.backends.gpu.launch import splits, tile_count
from polyflash.backends.gpu.numbers import (
    LOG2E,
    Flags,
    Numbers,
    flags_of,
    numbers_of,
    scale_of,
    sizes_of,
    starts_elsewhere,
)
from polyflash.backends.gpu.views import (
    NO_OPERANDS,
    Rows,
    View,
    element_masked,
    operands_of,
    reachable,
    view_of,
)
from polyflash.backends.triton import fp8_operands, merge, runtime, tiles
from polyflash.backends.triton.config_types import product_of
from polyflash.backends.triton.constants import Constants, describable, descriptors, entries
from polyflash.backends.triton.forward_kernel import NO_BOXES, Boxes, Tensors, attend
from polyflash.quant.scheme import codes_of

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

new = tuple.__new__  # a NamedTuple as the call of its class would make it, in a third of the time
HALVED = 256  # channels
_MOST_OF_A_GRID = 65535  # in its second and third dimension
_OF_A_GRID = 7  # the first of `Numbers`
_KEPT_CALLS = 256  # of different strides or numbers, per route
_ROWS, _KEYS_AND_VALUES = 0b10000, 0b01100  # their bits of `runtime.aligned`


class Ready(NamedTuple):
    """State shared by calls of the same strides and numbers."""

    group: int
    num_heads: int  # that the grid runs over
    strides: tuple[tuple[int, ...], ...]  # of q, k, v, out
    rows: tuple[int, ...]  # of lse
    flags: Flags
    numbers: tuple[Any, ...]  # but for those of the grid, which come first
    plain: bool  # no operands
    sees_all: bool  # every row every key, unless an operand says otherwise
    described: bool  # do strides let keys and values be loaded by descriptor, and rows?
    rows_described: bool
    constants: Constants
    variants: dict[tuple[bool, bool, bool], Constants]  # as constexprs
    kernels: runtime.Kernels

    def variant(self, described: bool, whole: bool, linear: bool) -> Constants:
        """The constants of calls that differ in length or alignment alone."""
        key = described, whole, linear
        found = self.variants.get(key)
        if found is None:
            c = self.constants._replace(DESCRIPTOR=described, WHOLE=whole, LINEAR=linear)
            if c.K_SCALE == "box" and not described:
                c = c._replace(K_SCALE="key")
            found = self.variants[key] = runtime.compiled_in(c)
        return found


class Prepared:
    """A route's memory between calls."""

    __slots__ = ("config", "cores", "kernels", "least", "merges", "options", "product", "ready", "target")

    def __init__(self, launch: Launch) -> None:
        self.config: Any = launch.config
        self.cores = max(1, launch.target.cores)
        self.ready: dict[Any, Ready] = {}
        self.kernels: dict[Any, runtime.Kernels] = {}  # by flags and kinds of strides: a cache that grows
        self.merges = runtime.Kernels()  # of the splits
        self.least = tiles.least_channels(launch.target, launch.config.block_m)
        self.target = launch.target
        self.product = product_of(launch.config, launch.spec, launch.target)
        # sums are what is written here, whatever stands around them; products keep their multiply-add
        self.options = {
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
            "enable_fp_fusion": False,
        }
        if most := getattr(self.config, "max_registers", 0):
            self.options["maxnreg"] = most
        tiles.check_stages(launch.target, self.config.num_stages)
        tiles.check_rows(launch.target, self.config.block_m, launch.spec)

    def ready_for(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, args: Arguments, split: bool
    ) -> Ready:
        strides = q.stride(), k.stride(), v.stride(), out.stride(), lse if lse is None else lse.stride()
        changes = args.scale, args.softcap, args.dropout_p, starts_elsewhere(args)
        key = strides, split, changes, args.window_left, args.window_right, args.offset, _page_of(k, args)
        found = self.ready.get(key)
        if found is None:
            if len(self.ready) >= _KEPT_CALLS:
                self.ready.clear()
            found = self.ready[key] = self._make(q, k, v, out, lse, args, split)
        return found

    def _make(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, args: Arguments, split: bool
    ) -> Ready:
        config, x, flags = self.config, operands_of(args, k), flags_of(q, args)
        constants = self._constants(q, v, args, flags, split)._replace(PAGE=_page_of(k, args))
        constants = constants._replace(**_of_codes(config, q.shape[3], args))
        if constants.P_CODES and constants.DV0 == HALVED:  # of which two sums fill the registers
            constants = constants._replace(DV0=HALVED // 2, DV1=HALVED // 2)
        described = config.loads == "descriptor" and args.page_table is None
        described = described and describable(k) and (constants.P_CODES != "" or describable(v))
        strides = q.stride(), k.stride(), v.stride(), out.stride()
        rows = () if lse is None else lse.stride()
        compiled = constants, runtime.signature(strides), runtime.signature(rows)
        return Ready(
            group=q.shape[1] // k.shape[1],
            num_heads=k.shape[1] if config.pack_gqa else q.shape[1],
            strides=strides,
            rows=rows,
            flags=flags,
            numbers=self.numbers(q, k, args, flags),
            plain=x == NO_OPERANDS,
            sees_all=not (constants.HAS_LEFT or constants.HAS_RIGHT),
            described=described,
            rows_described=described and not config.pack_gqa and describable(q),
            constants=constants,
            variants={},
            kernels=self.kernels.setdefault(compiled, runtime.Kernels()),
        )

    def numbers(self, q: Tensor, k: Tensor, args: Arguments, flags: Flags) -> tuple[Any, ...]:
        """Those that the grid has no say in."""
        n, base = numbers_of(q, k, args), LOG2E if self.config.base2 else 1.0
        scale = 1.0 if flags.CHANGED else abs(scale_of(q.shape[3], args))
        return n._replace(factor=scale * base)[_OF_A_GRID:]

    def _constants(self, q: Tensor, v: Tensor, args: Arguments, flags: Flags, split: bool) -> Constants:
        """A decode config leaves the techniques that it lacks off."""
        config, head_dim, head_dim_v = self.config, q.shape[3], v.shape[3]
        size, wide = q.element_size(), max(head_dim, head_dim_v)
        exact = q.dtype == torch.float32
        # splits are merged by their maxima, so those are units of s, which no rounding has touched
        fused = not (exact or flags.CHANGED or split)
        return Constants(
            **tiles.channel_blocks(head_dim, head_dim_v, tiles.LEAST, self.least),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            NUM_STAGES=config.num_stages,
            AGAIN_STAGES=tiles.again_stages(self.target, config.num_stages, size, wide),
            PACK=config.pack_gqa,
            **flags._asdict(),
            BELOW=flags.HAS_LEFT or not (args.kv_starts is args.row_bounds is None),
            ALWAYS_MASKED=element_masked(args),
            EXACT=exact,
            FUSED=fused,
            BASE2=config.base2,
            PRODUCT=self.product,
            SPLIT_EXP=getattr(config, "split_exp", 1),
            LAZY=fused and getattr(config, "lazy_rescale", False) and not flags.DROPOUT,
            LATE_SUM=not exact and getattr(config, "late_sum", False),
            COMPENSATE=exact and getattr(config, "compensate", True),
            THREADS=32 * config.num_warps if self.target.name.startswith("cuda") else 0,
            HOLD_Q=getattr(config, "hold_q", False),
            MASK_ADD=getattr(config, "mask_by", "compare") == "add",
            HEAVY_FIRST=getattr(config, "order", "plain") == "heavy_first",
            CACHE=config.cache_kv,
            SPLIT=split,
            PERSISTENT=getattr(config, "persistent", False),
        )


def _of_codes(config: Any, head_dim: int, args: Arguments) -> dict[str, Any]:
    """Constants of products of codes, if K is codes: instructions take twice the channels."""
    k, v = codes_of(args.codes) if args.codes else (None, None)
    if k is None:
        return {}
    d0, d1 = tiles.split_dim(head_dim, tiles.LEAST_CODED)
    place = "key" if k.scale.tokens or args.page_table is not None else "head"
    if k.scale.tokens == 1 and args.k_scale is not None and describable(args.k_scale[..., 0]):
        place = "box"
    side: dict[str, Any] = {"K_CODES": k.dtype, "K_SCALE": place, "K_TOKENS": k.scale.tokens}
    if v is not None:
        tiles.check_keys(config.block_n)
        side |= {"P_CODES": v.dtype, "LEVEL": getattr(config, "level", 0)}
        side |= {"PRODUCT": "ieee", "LAZY": False, "COMPENSATE": False}
    return {**side, "K_SHIFT": "" if k.shift is None else "channel", "D0": d0, "D1": d1, "HOLD_Q": False}


def _page_of(k: Tensor, args: Arguments) -> int:
    """See `Constants.PAGE`."""
    size: int = 0 if args.page_table is None else k.shape[2]
    return size if size & (size - 1) == 0 else 0


def attend_call(
    prepared: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    args: Arguments,
    *,
    split_keys: int = 0,
    num_splits: int = 1,
    visits: Tensor | None = None,
) -> None:
    """Launches `attend`. With `split_keys` out and lse are those of the splits, (splits·batch, ...)."""
    config = prepared.config
    ready = prepared.ready_for(q, k, v, out, lse, args, split_keys != 0)
    numbers, x = ready.numbers, NO_OPERANDS
    batch, seqlen_q, seqlen_k = sizes_of(q, k, args)
    if not ready.plain:
        x = operands_of(args, k)
    if args.dropout_p:  # a seed of its own
        numbers = prepared.numbers(q, k, args, ready.flags)
    tile_rows = seqlen_q * (ready.group if config.pack_gqa else 1)
    num_tiles, requests = tile_count(tile_rows, config.block_m, batch, args.cu_seqlens_q is not None)
    total = num_tiles * ready.num_heads * requests * num_splits
    aligned = runtime.aligned(q, k, v, out, lse)
    described = ready.described and aligned & _KEYS_AND_VALUES == _KEYS_AND_VALUES
    if ready.constants.K_SCALE == "box":
        described = described and runtime.aligned(args.k_scale) == 1
    linear = split_keys != 0 or ready.constants.PERSISTENT
    linear = linear or max(ready.num_heads, requests) > _MOST_OF_A_GRID
    whole = ready.plain and ready.sees_all and seqlen_k % config.block_n == 0
    s_q, s_k, s_v, s_out = ready.strides
    v_view = new(View, (v, *s_v))
    turned = odd = None
    if ready.constants.P_CODES:
        turned, found = fp8_operands.turned(v, prepared.kernels.setdefault("v", runtime.Kernels()))
        odd = found[..., None, None]
    values = v_view if turned is None else view_of(turned.mT)
    pointed: tuple[Any, Any] = new(View, (k, *s_k)), values
    boxes = NO_BOXES
    if described:
        c, pointed, q_boxes = ready.constants, (None, None), (None, None)
        if ready.rows_described and aligned & _ROWS:
            q_boxes = descriptors(q, config.block_m, c.D0, c.D1)
        k_boxes = descriptors(k, config.block_n, c.D0, c.D1)
        v_boxes = descriptors(v, config.block_n, c.DV0, c.DV1, turned)
        boxes = Boxes(*q_boxes, *k_boxes, *v_boxes)
        if c.K_SCALE == "box" and args.k_scale is not None:
            boxes = boxes._replace(entries=entries(args.k_scale, config.block_n))
    rows = None if lse is None else new(Rows, (lse, *ready.rows))
    views = new(View, (q, *s_q)), *pointed, v_view, new(View, (out, *s_out))
    tables = tuple(view_of(x) for x in (args.k_scale, args.k_shift, args.v_scale, odd))
    t = new(Tensors, (*views, rows, x, visits, ready.num_heads, ready.group, *tables, None))
    n = new(Numbers, (batch, seqlen_q, seqlen_k, num_tiles, num_splits, split_keys, total, *numbers))
    grid: tuple[int, ...] = (num_tiles, ready.num_heads, requests)
    if linear:
        grid = (min(total, prepared.cores) if ready.constants.PERSISTENT else total,)
    of_codes = runtime.signature((tables, values)) if args.codes else None
    kinds = None if ready.plain else runtime.signature(x), of_codes
    key = aligned, described, linear, whole, visits is None, kinds
    ready.kernels.launch(
        attend, grid, (t, n, ready.variant(described, whole, linear), *boxes), prepared.options, key, q.device
    )


def run(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: Arguments,
    kind: Any = Prepared,
    call: Any = None,
) -> tuple[Tensor, Tensor]:
    """Fills out (B, Hq, Sq, Dv) and, if asked for, lse (B, Hq, Sq); q (B, Hq, Sq, D), k (B, Hkv, Sk, D),
    v (B, Hkv, Sk, Dv), any strides. With a page table k and v are pools (num_pages, Hkv, page_size, ·).
    `call` launches the walk, with what a route keeps in a `kind`."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = kind(launch)
    q, k, v = reachable(q, k, v)
    size, num_splits = splits(prepared.config, q, k, args, prepared.cores)
    rows = lse if args.need_lse else None
    if num_splits == 1:
        (call or attend_call)(prepared, q, k, v, out, rows, args)
        return out, lse
    batch, num_heads, seqlen_q, head_dim_v = out.shape
    parts = runtime.scratch((num_splits * batch, num_heads, seqlen_q, head_dim_v), q.device)
    part_m = runtime.scratch((2 * num_splits * batch, num_heads, seqlen_q), q.device)
    (call or attend_call)(prepared, q, k, v, parts, part_m, args, split_keys=size, num_splits=num_splits)
    unit = 1.0 if flags_of(q, args).CHANGED else abs(scale_of(q.shape[3], args))
    how = merge.how_of(prepared.config, num_splits, args)
    merge.merge(prepared.merges, merge.Splits(parts, part_m, num_splits, unit, how), out, rows, args)
    return out, lse


def repeat(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """A runner for calls of these sizes, of which one has been made; None if there is nothing to run."""
    from polyflash.backends.triton import replay  # imports what only a GPU needs

    bare = q.is_cuda and q.numel() and v.numel() and not args.checked
    return replay.Repeat(launch, args) if bare else None
