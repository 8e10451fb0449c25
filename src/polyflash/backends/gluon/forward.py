"""Attention forward on Hopper: the launches of `forward_sm90.attend_sm90`. What calls of the same sizes and
strides share is worked out once. TMA takes rows that are dense and multiples of 16 bytes apart, and the
kernel a positive scale: what is otherwise is copied first, so that bits follow neither.

q (B, Hq, Sq, D), k, v (B, Hkv, Sk, D).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.backends.gluon import configs, shim
from polyflash.backends.gluon.forward_sm90 import Constants, Numbers, Tensors, attend_sm90
from polyflash.backends.gluon.schedule import heads_of, inverse_of
from polyflash.backends.gpu.launch import tile_count
from polyflash.backends.gpu.numbers import LOG2E, SOFTCAPS, scale_of, sizes_of
from polyflash.backends.gpu.views import FAR, NO_OPERANDS, View, operands_of
from polyflash.backends.triton import forward as triton_forward
from polyflash.backends.triton import replay, runtime
from polyflash.backends.triton.constants import describable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

_KEPT_CALLS = 256  # of different sizes, strides or numbers, per route
_ALIGNED = 16  # bytes
_LEAST_SCALE = 2.0**-126  # below, a float32 factor would be no normal number, and -inf times 0 is NaN
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a consumer's; sums are what is written


class Ready(NamedTuple):
    """State shared by calls of the same sizes, strides and numbers."""

    numbers: Numbers
    launches: tuple[Any, ...]  # constants of each, as constexprs
    kinds: tuple[Any, ...]  # what kernels are compiled for, beside alignment
    marks: tuple[int, ...]  # their shape
    programs: int
    widths: tuple[int, ...]  # channels of a box, or of two
    boxed: tuple[bool, ...]  # can TMA reach q, k, v and out where they are?
    plain: bool  # no operands


class Prepared:
    """A route's memory between calls."""

    __slots__ = ("calls", "config", "cores", "kernels", "ready")

    def __init__(self, launch: Launch) -> None:
        self.config: configs.ForwardConfig = launch.config
        self.cores = max(1, launch.target.cores)
        self.kernels = runtime.Kernels()
        self.calls = replay.Calls()
        self.ready: dict[Any, Ready] = {}

    def ready_for(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, args: Arguments
    ) -> Ready:
        strides = q.stride(), k.stride(), v.stride(), out.stride(), lse if lse is None else lse.stride()
        numbers = args.scale, args.softcap, args.offset, args.window_left, args.window_right
        bounds = args.cu_seqlens_q if args.cu_seqlens_q is None else args.cu_seqlens_q.shape
        key = q.shape, k.shape, strides, runtime.aligned(q, k, v, out), numbers, bounds
        if key not in self.ready:
            if len(self.ready) >= _KEPT_CALLS:
                self.ready.clear()
            self.ready[key] = self._make(q, k, v, out, lse, args)
        return self.ready[key]

    def _make(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, args: Arguments
    ) -> Ready:
        batch, num_heads, seqlen_q, _ = q.shape
        members, packed = sizes_of(q, k, args)[0], args.cu_seqlens_q is not None
        band, plain = band_of(seqlen_q, k.shape[2], args), operands_of(args, k) == NO_OPERANDS
        config = self.config
        num_tiles, _ = tile_count(seqlen_q, config.block_m, members, packed)
        total, (inverse, shift) = batch * num_heads * num_tiles, inverse_of(num_tiles)
        softcap, alibi = min(max(args.softcap, SOFTCAPS[0]), SOFTCAPS[1]), args.alibi_slopes is not None
        near, rest = position_of(seqlen_q, k.shape[2], args)
        numbers = Numbers(
            num_heads=num_heads,
            group=num_heads // k.shape[1],
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[2],
            num_tiles=num_tiles,
            inverse=inverse,
            shift=shift,
            total=total,
            offset=band.right,
            left=band.left,
            factor=LOG2E if args.softcap or alibi else scale_of(q.shape[3], args) * LOG2E,
            members=members if packed else None,
            into_cap=scale_of(q.shape[3], args) / softcap if args.softcap else None,
            softcap=softcap if args.softcap else None,
            position=near if alibi else None,
            rest=rest if alibi else None,
            scale=scale_of(q.shape[3], args) if alibi else None,
        )
        constants = constants_of(config, q, k, band, args)
        launches: tuple[Constants, ...] = (constants,)
        if config.apart:
            again = constants._replace(FIRST=False, COUNTED=False, EARLY=False)
            launches = constants._replace(MENDS=False), again
        reached = tuple(map(is_boxed, (q, k, v, out)))
        v_strides = (v if reached[2] else torch.empty(v.shape, device="meta")).stride()
        return Ready(
            numbers=numbers,
            launches=tuple(runtime.compiled_in(c) for c in launches),
            kinds=(constants, runtime.signature(v_strides), lse is None),
            marks=(batch * num_heads, num_tiles, config.block_m),
            programs=total if config.order == "tiles" else min(total, self.cores),
            widths=configs.parts_of(q.shape[3]),
            boxed=reached,
            plain=plain,
        )


def constants_of(config: Any, q: Tensor, k: Tensor, band: Band, args: Arguments) -> Constants:
    """Constants of a call's kernel."""
    first, *rest = configs.parts_of(q.shape[3])
    bounds = bounds_of(band, k, config.block_n, args)
    counted = config.order == "counter"
    return Constants(
        D=first,
        REST=sum(rest),
        CHANNELS=q.shape[3],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        CONSUMERS=config.consumers,
        **bounds,
        SOFTCAP=args.softcap != 0.0,
        ALIBI=args.alibi_slopes is not None,
        COUNTED=counted,
        EARLY=config.shared_out or (bounds["SHORT"] and counted and config.consumers == 2),
        HEADS=heads_of(q.shape[0] * q.shape[1], configs.side_by_side(config, k.shape[2])),
        TURNS=config.turns,
        PINNED=config.pinned,
        LATE_SUM=config.late_sum,
        LAZY=config.lazy_rescale,
        SHARED_OUT=config.shared_out,
        ROW_SLOTS=config.consumers * (1 + config.rows_ahead) + config.shared_out,
    )


def bounds_of(band: Band, k: Tensor, block_n: int, args: Arguments) -> dict[str, bool]:
    """Constants that say what bounds the keys of a row; WHOLE: nothing, and blocks of block_n hold them."""
    packed, left = args.cu_seqlens_q is not None, args.window_left is not None
    short, below = packed or args.kv_lens is not None, left or args.kv_starts is not None
    whole = not (band.bounded or below or short) and k.shape[2] % block_n == 0
    found = {"HAS_RIGHT": band.bounded, "HAS_LEFT": left, "BELOW": below, "OWN": band.own}
    return found | {"SHORT": short, "PACKED": packed, "WHOLE": whole}


def position_of(seqlen_q: int, seqlen_k: int, args: Arguments) -> tuple[int, float]:
    """Position of row 0 among the keys, as far as they reach, and how much further it is."""
    position = seqlen_k - seqlen_q if args.offset is None else args.offset
    near = min(max(position, -seqlen_q), seqlen_k)
    return near, float(position - near)


class Band(NamedTuple):
    """How far rows see: up to i + right, if that bounds them, and from i + left on, if not None; with `own`
    from where rows of a request stand, which the kernel finds out."""

    own: bool
    bounded: bool
    left: int | None
    right: int


def band_of(seqlen_q: int, seqlen_k: int, args: Arguments) -> Band:
    """The band of causal order and the window."""
    left, right = args.window_left, 0 if args.causal else args.window_right
    own_ends = not (args.kv_lens is args.cu_seqlens_q is None)
    moved = args.q_offset is not None or (args.offset is None and own_ends)
    if moved and not (left is right is args.alibi_slopes is None):
        far = None if left is None else -min(left, FAR)
        return Band(True, right is not None, far, min(right or 0, FAR))
    position = seqlen_k - seqlen_q if args.offset is None else args.offset
    end = min(max(position + (right or 0), -seqlen_q), seqlen_k)
    first = None if left is None else min(max(position - left, -seqlen_q), seqlen_k)
    return Band(False, right is not None, first, end)


def is_boxed(x: Tensor) -> bool:
    """Can TMA read and write it where it is?"""
    return describable(x, repeated=True) and x.data_ptr() % _ALIGNED == 0


def boxed(x: Tensor) -> Tensor:
    """`x`, or a copy that TMA can read."""
    return x if is_boxed(x) else x.clone(memory_format=torch.contiguous_format)


def with_positive_scale(q: Tensor, args: Arguments) -> tuple[Tensor, Arguments]:
    """q and arguments of the same scores whose scale is positive. With none, q times 0: scores are 0, or NaN
    where they are not finite."""
    scale = scale_of(q.shape[3], args)
    if abs(scale) < _LEAST_SCALE:
        return q * 0.0, args._replace(scale=1.0)
    return (q, args) if scale > 0.0 else (q.neg(), args._replace(scale=-scale))


def attend_call(
    prepared: Prepared, ready: Ready, qkv: Sequence[Tensor], out: Tensor, lse: Tensor | None, args: Arguments
) -> None:
    """Launches the kernel, and the second one that mends rows that the first marked."""
    (q, k, v), config, n = qkv, prepared.config, ready.numbers
    marks = runtime.scratch(ready.marks, q.device, torch.int8)
    words = runtime.words(q.device)
    of_rows, of_keys = configs.ROWS, config.block_n
    sides = (q, of_rows), (k, of_keys), (v, of_keys), (out, of_rows)
    boxes = [shim.descriptor(x, side, width) for width in ready.widths for x, side in sides]
    boxes += [None] * (8 - len(boxes))
    x = NO_OPERANDS if ready.plain else operands_of(args, k)
    view = None if x.cu_seqlens_q is None else View(out, *out.stride())
    requests = (
        x.kv_lens,
        x.kv_starts,
        x.q_offset,
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        view,
        x.sinks,
        x.alibi_slopes,
    )
    kinds = (*ready.kinds, runtime.aligned(lse), None if ready.plain else runtime.signature(requests))
    own = runtime.scratch((n.total + 2 * ready.programs,), q.device, torch.int32)
    t = Tensors(lse, marks, words, View(v, *v.stride()), own, *requests)
    for c in ready.launches:
        given = t, n, c, *boxes
        prepared.kernels.launch(
            attend_sm90, (ready.programs,), given, _OPTIONS, (*kinds, c.FIRST.value), q.device
        )


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fills out (B, Hq, Sq, D) and, if asked for, lse (B, Hq, Sq)."""
    prepared: Prepared | None = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
    rows = lse if args.need_lse else None

    def make() -> tuple[()]:
        attend(prepared, q, k, v, out, rows, args)
        return ()

    given = dict(
        zip((replay.Q, replay.K, replay.V, replay.OUT, replay.LSE), (q, k, v, out, rows), strict=True)
    )
    prepared.calls(tuple(given.get(i) for i in range(replay.LSE + 1)), args, make)
    return out, lse


def attend(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor | None, args: Arguments
) -> None:
    """The call, operands copied where TMA does not reach them."""
    q, args = with_positive_scale(q, args)
    ready, place = prepared.ready_for(q, k, v, out, rows, args), out
    if not all(ready.boxed):
        q, k, v = map(boxed, (q, k, v))
        place = out if ready.boxed[3] else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    attend_call(prepared, ready, (q, k, v), place, rows, args)
    if place is not out:
        out.copy_(place)


def repeat(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """A runner for calls of these sizes, of which one has been made; None if there is nothing to run."""
    return triton_forward.repeat(launch, q, k, v, args)
