"""Attention forward in Triton: the launch of `forward_kernel.attend`. What calls of a route share is worked
out once; a call adds its tensors, lengths and the grid. Where few programs would leave the device idle, the
keys are cut into splits, which are merged afterwards.

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) of any strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from polyflash.backends.triton import arguments, configs, merge, runtime, tiles
from polyflash.backends.triton.config_types import product_of
from polyflash.backends.triton.forward_kernel import attend

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

_MOST_OF_A_GRID = 65535  # in its second and third dimension
_KEPT_CALLS = 256  # of different strides or numbers, per route
_ROWS, _KEYS_AND_VALUES = 0b10000, 0b01100  # their bits of `runtime.aligned`


class Ready(NamedTuple):
    """What calls of the same strides and numbers share."""

    group: int
    num_heads: int  # that the grid runs over
    strides: tuple[tuple[int, ...], ...]  # of q, k, v, out
    rows: tuple[int, ...]  # of lse
    numbers: arguments.Scalars
    factor: float
    plain: bool  # no operands
    sees_all: bool  # every row every key, unless an operand says otherwise
    described: bool  # do strides let keys and values be loaded by descriptor, and rows?
    rows_described: bool
    constants: dict[str, Any]
    variants: dict[tuple[bool, bool, bool], dict[str, Any]]
    kernels: runtime.Kernels

    def variant(self, described: bool, whole: bool, linear: bool) -> dict[str, Any]:
        """The constants of calls that differ in length or alignment alone."""
        key = described, whole, linear
        found = self.variants.get(key)
        if found is None:
            changes = {"DESCRIPTOR": described, "WHOLE": whole, "LINEAR": linear}
            found = self.variants[key] = self.constants | changes
        return found


class Prepared:
    """What a route keeps between calls."""

    __slots__ = ("config", "cores", "kernels", "least", "merges", "product", "ready", "target")

    def __init__(self, launch: Launch) -> None:
        self.config: Any = launch.config
        self.cores = max(1, launch.target.cores)
        self.ready: dict[Any, Ready] = {}
        self.kernels: dict[Any, runtime.Kernels] = {}  # by flags and kinds of strides: a cache that grows
        self.merges = runtime.Kernels()  # of the splits
        self.least = tiles.least_channels(launch.target, launch.config.block_m)
        self.target = launch.target
        self.product = product_of(launch.config, launch.spec, launch.target)
        tiles.check_stages(launch.target, self.config.num_stages)

    def ready_for(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, args: Arguments, split: bool
    ) -> Ready:
        key = (
            q.stride(), k.stride(), v.stride(), out.stride(), lse if lse is None else lse.stride(), split,
            args.scale, args.softcap, args.dropout_p, args.window_left, args.window_right, args.offset,
        )  # fmt: skip
        found = self.ready.get(key)
        if found is None:
            if len(self.ready) >= _KEPT_CALLS:
                self.ready.clear()
            found = self.ready[key] = self._make(q, k, v, out, lse, args, split)
        return found

    def _make(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, args: Arguments, split: bool
    ) -> Ready:
        config, flags, n = self.config, arguments.flags(q, args), arguments.scalars(q, k, args)
        factor = (1.0 if flags.CHANGED else abs(n.scale)) * (arguments.LOG2E if config.base2 else 1.0)
        constants = self._constants(flags, q, v, element_masked(args), split)
        described = config.loads == "descriptor" and args.page_table is None
        described = described and arguments.describable(k) and arguments.describable(v)
        x = arguments.operands(args, k)
        strides = q.stride(), k.stride(), v.stride(), out.stride()
        rows = () if lse is None else lse.stride()
        compiled = flags, split, runtime.signature(strides), runtime.signature(rows)
        return Ready(
            group=q.shape[1] // k.shape[1],
            num_heads=k.shape[1] if config.pack_gqa else q.shape[1],
            strides=strides,
            rows=rows,
            numbers=n,
            factor=factor,
            plain=x == arguments.NO_OPERANDS,
            sees_all=not (flags.HAS_LEFT or flags.HAS_RIGHT),
            described=described,
            rows_described=described and not config.pack_gqa and arguments.describable(q),
            variants={},
            constants=constants,
            kernels=self.kernels.setdefault(compiled, runtime.Kernels()),
        )

    def _constants(
        self, flags: arguments.Flags, q: Tensor, v: Tensor, masked: bool, split: bool
    ) -> dict[str, Any]:
        """Constexprs and options of the kernel; a decode config leaves the techniques it lacks off."""
        config, head_dim, head_dim_v = self.config, q.shape[3], v.shape[3]
        (d0, d1), (dv0, dv1) = tiles.split_dim(head_dim), tiles.split_dim(head_dim_v, self.least)
        return {
            "D": head_dim, "D0": d0, "D1": d1, "DV": head_dim_v, "DV0": dv0, "DV1": dv1,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "NUM_STAGES": config.num_stages,
            "AGAIN_STAGES": tiles.again_stages(
                self.target, config.num_stages, q.element_size(), max(head_dim, head_dim_v)
            ),
            "PACK": config.pack_gqa, **flags._asdict(), "BASE2": config.base2, "PRODUCT": self.product,
            "SPLIT_EXP": getattr(config, "split_exp", 1),
            "LAZY": getattr(config, "lazy_rescale", False) and not flags.DROPOUT,
            "LATE_SUM": getattr(config, "late_sum", False),
            "COMPENSATE": getattr(config, "compensate", True),
            "THREADS": 32 * config.num_warps if self.target.name.startswith("cuda") else 0,
            "HOLD_Q": getattr(config, "hold_q", False),
            "MASK_ADD": getattr(config, "mask_by", "compare") == "add",
            "HEAVY_FIRST": getattr(config, "order", "plain") == "heavy_first", "DESCRIPTOR": False,
            "CACHE": config.cache_kv, "SPLIT": split, "ALWAYS_MASKED": masked, "WHOLE": False,
            "PERSISTENT": getattr(config, "persistent", False), "LINEAR": False,
            "num_warps": config.num_warps, "num_stages": config.num_stages,
            # sums are what is written here, whatever stands around them; products keep their multiply-add
            "enable_fp_fusion": False,
            **({"maxnreg": most} if (most := getattr(config, "max_registers", 0)) else {}),
        }  # fmt: skip


def element_masked(args: Arguments) -> bool:
    """May any pair of a block be hidden, whatever lengths and distances say?"""
    return not (args.mask is args.bias is args.q_segments is args.intervals is None)


def attend_call(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, args: Arguments,
    *, split_keys: int = 0, num_splits: int = 1, visits: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches `attend`. With `split_keys` out and lse are those of the splits, (splits·batch, ...)."""
    config = prepared.config
    ready = prepared.ready_for(q, k, v, out, lse, args, split_keys > 0)
    n, x = ready.numbers, arguments.NO_OPERANDS
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[2], k.shape[2]
    if not ready.plain:
        x, n = arguments.operands(args, k), arguments.scalars(q, k, args)
        batch, seqlen_k = n.batch, n.seqlen_k
    elif args.dropout_p:
        n = arguments.scalars(q, k, args)  # a seed of its own
    tile_rows = seqlen_q * (ready.group if config.pack_gqa else 1)
    num_tiles, requests = -(-tile_rows // config.block_m), batch
    if x.cu_seqlens_q is not None:  # members find their tiles; one more for rows of nobody
        num_tiles, requests = tile_rows // config.block_m + batch + 1, 1
    total = num_tiles * ready.num_heads * requests * num_splits
    aligned = runtime.aligned(q, k, v, out, lse)
    described = ready.described and aligned & _KEYS_AND_VALUES == _KEYS_AND_VALUES
    linear = split_keys > 0 or ready.constants["PERSISTENT"]
    linear = linear or max(ready.num_heads, requests) > _MOST_OF_A_GRID
    whole = ready.plain and ready.sees_all and seqlen_k % config.block_n == 0
    constants = ready.variant(described, whole, linear)
    s_q, s_k, s_v, s_out = ready.strides
    v_v, q_tiles = arguments.View(v, *s_v), (None, None)
    k_tiles, v_tiles = (arguments.View(k, *s_k), None), (v_v, None)
    if described:
        k_tiles = arguments.descriptors(k, config.block_n, constants["D0"], constants["D1"])
        v_tiles = arguments.descriptors(v, config.block_n, constants["DV0"], constants["DV1"])
        if ready.rows_described and aligned & _ROWS:
            q_tiles = arguments.descriptors(q, config.block_m, constants["D0"], constants["D1"])
    everything = (
        arguments.View(q, *s_q), *q_tiles, *k_tiles, *v_tiles, v_v, arguments.View(out, *s_out),
        None if lse is None else arguments.Rows(lse, *ready.rows), x, visits,
        batch, ready.num_heads, ready.group, seqlen_q, seqlen_k, num_tiles, num_splits, split_keys,
        total, n.offset, n.left, n.right, n.scale, n.softcap, ready.factor, n.seed_lo, n.seed_hi,
        n.drop_below, n.keep_scale,
    )  # fmt: skip
    grid: tuple[int, ...] = (num_tiles, ready.num_heads, requests)
    if linear:
        grid = (min(total, prepared.cores) if constants["PERSISTENT"] else total,)
    key = aligned, described, linear, whole, visits is None, None if ready.plain else runtime.signature(x)
    ready.kernels.launch(attend, grid, everything, constants, key, q.device)


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fills out (B, Hq, Sq, Dv) and, if asked for, lse (B, Hq, Sq); q (B, Hq, Sq, D), k (B, Hkv, Sk, D),
    v (B, Hkv, Sk, Dv), any strides. With a page table k and v are pools (num_pages, Hkv, page_size, ·)."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
    q, k, v = arguments.reachable(q, k, v)
    size, num_splits = _splits(prepared, q, k, args)
    rows = lse if args.need_lse else None
    if num_splits == 1:
        attend_call(prepared, q, k, v, out, rows, args)
        return out, lse
    batch, num_heads, seqlen_q, head_dim_v = out.shape
    parts = runtime.scratch((num_splits * batch, num_heads, seqlen_q, head_dim_v), q.device)
    part_m = runtime.scratch((2 * num_splits * batch, num_heads, seqlen_q), q.device)
    attend_call(prepared, q, k, v, parts, part_m, args, split_keys=size, num_splits=num_splits)
    unit = 1.0 if arguments.flags(q, args).CHANGED else abs(arguments.scale_of(q, args))
    merge.merge(prepared.merges, parts, part_m, out, rows, args, num_splits, unit)
    return out, lse


def _splits(prepared: Prepared, q: Tensor, k: Tensor, args: Arguments) -> tuple[int, int]:
    """Keys of a split, and how many splits there are."""
    config = prepared.config
    if not config.split_keys or args.cu_seqlens_q is not None:
        return 0, 1
    batch, num_heads, rows, _ = q.shape
    keys = k.shape[2] if args.page_table is None else args.page_table.shape[1] * k.shape[2]
    if config.pack_gqa:
        num_heads, rows = k.shape[1], rows * (num_heads // k.shape[1])
    walks = batch * num_heads * -(-rows // config.block_m)
    size = configs.split_size(config, walks, keys, prepared.cores, fixed=args.batch_invariant)
    return size, -(-keys // size)


def repeat(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """What runs calls of these sizes, of which one has been made; None if there is nothing to run."""
    from polyflash.backends.triton import replay  # imports what only a GPU needs

    bare = q.is_cuda and q.numel() and v.numel() and not args.checked
    return replay.Repeat(launch, args) if bare else None
