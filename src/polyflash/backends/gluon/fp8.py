"""Attention forward on Hopper over e4m3 codes with a scale per head: three launches, two that make the
operands of the third, `fp8_sm90.attend_fp8`.

q (B, Hq, Sq, D) in 16 bits, k, v (B, Hkv, Sk, D) codes, out as q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from polyflash.backends.gluon import configs, shim
from polyflash.backends.gluon.forward import band_of, boxed, constants_of, is_boxed
from polyflash.backends.gluon.forward_sm90 import Constants, Numbers
from polyflash.backends.gluon.fp8_sm90 import Tensors, attend_fp8
from polyflash.backends.gluon.schedule import inverse_of
from polyflash.backends.gpu.numbers import LOG2E, scale_of
from polyflash.backends.gpu.views import View, operands_of
from polyflash.backends.triton import fp8_operands, runtime

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

_KEPT_CALLS = 256  # of different sizes, strides or numbers, per route
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # of a consumer


class Ready(NamedTuple):
    """State shared by calls of the same sizes, strides and numbers."""

    numbers: Numbers
    constants: Constants  # as constexprs
    rows: tuple[Any, Any]  # `n` and `c` for q
    kinds: tuple[Any, ...]  # what kernels are compiled for, beside alignment
    programs: int


class Prepared:
    """A route's memory between calls."""

    __slots__ = ("config", "cores", "kernels", "ready")

    def __init__(self, launch: Launch) -> None:
        self.config: configs.Fp8Config = launch.config
        self.cores = max(1, launch.target.cores)
        self.kernels = runtime.Kernels()
        self.ready: dict[Any, Ready] = {}

    def ready_for(self, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Ready:
        strides = q.stride(), v.stride(), args.k_scale.stride(), args.v_scale.stride()  # type: ignore[union-attr]
        numbers = args.scale, args.offset, args.window_left, args.window_right
        key = q.shape, k.shape, strides, numbers
        if key not in self.ready:
            if len(self.ready) >= _KEPT_CALLS:
                self.ready.clear()
            self.ready[key] = self._make(q, k, strides, args)
        return self.ready[key]

    def _make(self, q: Tensor, k: Tensor, strides: Any, args: Arguments) -> Ready:
        (batch, num_heads, seqlen_q, channels), seqlen_k = q.shape, k.shape[2]
        config, band = self.config, band_of(seqlen_q, seqlen_k, args)
        num_tiles, group = -(-seqlen_q // config.block_m), num_heads // k.shape[1]
        total = batch * num_heads * num_tiles
        sizes: dict[str, Any] = {"num_heads": num_heads, "group": group}
        sizes |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_tiles": num_tiles, "total": total}
        sizes["inverse"], sizes["shift"] = inverse_of(num_tiles)
        sizes |= {"offset": band.right, "left": band.left}
        numbers = Numbers(**dict.fromkeys(Numbers._fields) | sizes)
        box = 128 if channels <= 128 else 256
        constants = constants_of(config, q, k, band, args)._replace(D=box, REST=0, LEVEL=config.level)
        side = fp8_operands.Constants(box, channels)
        rows = fp8_operands.ROWS.value
        of_q = fp8_operands.Numbers(
            num_heads, group, seqlen_q, -(-seqlen_q // rows), None, scale_of(q.shape[3], args) * LOG2E
        )
        kinds = constants, tuple(map(runtime.signature, strides))
        programs = total if config.order == "tiles" else min(total, self.cores)
        of_rows = of_q, runtime.compiled_in(side)
        return Ready(numbers, runtime.compiled_in(constants), of_rows, kinds, programs)


def operands(prepared: Prepared, ready: Ready, q: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, ...]:
    """q in e4m3 with its factors, V with channels as rows, and which of its heads have a NaN."""
    (batch, num_heads, seqlen_q, _), (of_q, c) = q.shape, ready.rows
    codes = runtime.scratch(tuple(q.shape), q.device, torch.float8_e4m3fn)
    factors = runtime.scratch((batch, num_heads, seqlen_q), q.device)
    k_scale: Any = args.k_scale
    x = View(q, *q.stride())
    t = fp8_operands.Tensors(x, codes, View(k_scale, *k_scale.stride()), factors)
    grid, kinds = (batch * num_heads * of_q.tiles,), (*ready.kinds, runtime.aligned(q, k_scale))
    options, key = fp8_operands.OPTIONS, ("rows", *kinds)
    prepared.kernels.launch(fp8_operands.round_rows, grid, (t, of_q, c), options, key, q.device)
    return codes, factors, *fp8_operands.turned(v, prepared.kernels)


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fills out (B, Hq, Sq, D) and, if asked for, lse (B, Hq, Sq)."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
    k, v = boxed(k), boxed(v)
    q = q if q.stride(3) == 1 else q.contiguous()
    place = out if is_boxed(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    ready = prepared.ready_for(q, k, v, args)
    rows, c = lse if args.need_lse else None, ready.constants
    codes, factors, turned, odd = operands(prepared, ready, q, v, args)
    boxes = (
        shim.descriptor(codes, configs.ROWS, c.D.value),
        shim.descriptor(k, c.BLOCK_N.value, c.D.value),
        shim.descriptor(turned, c.D.value, c.BLOCK_N.value),
        shim.descriptor(place, configs.ROWS, c.D.value),
    )
    x, v_scale = operands_of(args, k), cast("Tensor", args.v_scale)
    requests = x.kv_lens, x.kv_starts, x.q_offset, x.sinks
    views = View(v_scale, *v_scale.stride()), odd, View(v, *v.stride())
    t = Tensors(rows, runtime.words(q.device), factors, *views, *requests)
    key = "attend", *ready.kinds, runtime.aligned(lse, v_scale), runtime.signature((rows, *requests))
    prepared.kernels.launch(
        attend_fp8, (ready.programs,), (t, ready.numbers, c, *boxes), _OPTIONS, key, q.device
    )
    if place is not out:
        out.copy_(place)
    return out, lse
