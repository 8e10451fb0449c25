"""Attention forward on Hopper: the launches of `forward_sm90.attend_sm90`. What calls of the same sizes and
strides share is worked out once. Calls that a route cannot tell from others, but that this kernel is not for,
go to the Triton engine's kernel: see `takes`.

q (B, Hq, Sq, D), k, v (B, Hkv, Sk, D); rows dense and 16 bytes apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyflash.backends.gluon import configs, shim
from polyflash.backends.gluon.forward_sm90 import Constants, Numbers, Tensors, attend_sm90
from polyflash.backends.gpu.numbers import LOG2E, scale_of
from polyflash.backends.gpu.views import View
from polyflash.backends.triton import configs as triton_configs
from polyflash.backends.triton import forward as triton_forward
from polyflash.backends.triton import runtime
from polyflash.backends.triton.constants import describable

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

_KEPT_CALLS = 256  # of different sizes, strides or numbers, per route
_ALIGNED = 16  # bytes
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a consumer's; sums are what is written


class Ready(NamedTuple):
    """State shared by calls of the same sizes, strides and numbers."""

    numbers: Numbers
    constants: Constants  # as constexprs, of both launches
    mending: Constants
    kinds: tuple[Any, ...]  # what kernels are compiled for, beside alignment
    marks: tuple[int, ...]  # their shape
    programs: int


class Prepared:
    """A route's memory between calls."""

    __slots__ = ("config", "cores", "kernels", "named", "other", "ready")

    def __init__(self, launch: Launch) -> None:
        self.config: configs.ForwardConfig = launch.config
        self.cores = max(1, launch.target.cores)
        self.kernels = runtime.Kernels()
        self.named = getattr(launch, "named", True)
        self.other: Any = None  # the Triton engine's launch
        self.ready: dict[Any, Ready | None] = {}

    def ready_for(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, args: Arguments
    ) -> Ready | None:
        """None: not for this kernel."""
        key = (
            q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.stride(),
            lse if lse is None else lse.stride(), args.scale, args.offset,
        )  # fmt: skip
        if key not in self.ready:
            if len(self.ready) >= _KEPT_CALLS:
                self.ready.clear()
            found = takes(q, k, v, out, lse, args)
            batch, num_heads, seqlen_q, _ = q.shape
            if found and not self.named:
                found = configs.is_worth(self.config, batch * num_heads, seqlen_q, k.shape[2], self.cores)
            self.ready[key] = self._make(q, k, v, lse, args) if found else None
        return self.ready[key]

    def _make(self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None, args: Arguments) -> Ready:
        config = self.config
        batch, num_heads, seqlen_q, head_dim = q.shape
        num_kv_heads, seqlen_k = k.shape[1:3]
        num_tiles = -(-seqlen_q // config.block_m)
        total = batch * num_heads * num_tiles
        offset = seqlen_k - seqlen_q if args.offset is None else args.offset
        numbers = Numbers(
            num_heads=num_heads,
            group=num_heads // num_kv_heads,
            planes=batch * num_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_tiles=num_tiles,
            total=total,
            offset=min(max(offset, -seqlen_q), seqlen_k),
            factor=scale_of(q, args) * LOG2E,
        )
        constants = Constants(
            D=head_dim,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.num_stages,
            CONSUMERS=config.consumers,
            HAS_RIGHT=args.causal,
            WHOLE=not args.causal and seqlen_k % config.block_n == 0,
            COUNTED=config.order == "counter",
            HEADS=config.heads,
            TURNS=config.turns,
            PINNED=config.pinned,
            LATE_SUM=config.late_sum,
            LAZY=config.lazy_rescale,
            SHARED_OUT=config.shared_out,
        )
        mending = constants._replace(MENDING=True, COUNTED=False, WHOLE=False)
        return Ready(
            numbers=numbers,
            constants=runtime.compiled_in(constants),
            mending=runtime.compiled_in(mending),
            kinds=(constants, runtime.signature(v.stride()), lse is None),
            marks=(batch * num_heads, num_tiles, config.block_m),
            programs=total if config.order == "tiles" else min(total, self.cores),
        )


def takes(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, args: Arguments) -> bool:
    """Is a call of this row one for its kernel? The scale is positive, there is something of everything, and
    TMA takes the strides."""
    return (
        scale_of(q, args) > 0.0
        and all(map(describable, (q, k, v, out)))
        and min(*q.shape, *k.shape) > 0
        and (lse is None or lse.is_contiguous())
    )


def attend_call(
    prepared: Prepared, ready: Ready, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None
) -> None:
    """Launches the kernel, and the second one that mends rows that the first marked."""
    config, n = prepared.config, ready.numbers
    marks = runtime.scratch(ready.marks, q.device, torch.int8)
    words = runtime.words(q.device)
    boxes = (
        shim.descriptor(q, configs.ROWS), shim.descriptor(k, config.block_n),
        shim.descriptor(v, config.block_n), shim.descriptor(out, configs.ROWS),
    )  # fmt: skip
    kinds = (*ready.kinds, runtime.aligned(lse))
    t = Tensors(lse, marks, words)
    prepared.kernels.launch(
        attend_sm90, (ready.programs,), (t, n, ready.constants, *boxes), _OPTIONS, (*kinds, False), q.device
    )
    t = Tensors(lse, marks, words, View(v, *v.stride()))
    grid = (min(n.total, prepared.cores),)
    prepared.kernels.launch(
        attend_sm90, grid, (t, n, ready.mending, *boxes), _OPTIONS, (*kinds, True), q.device
    )


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fills out (B, Hq, Sq, D) and, if asked for, lse (B, Hq, Sq)."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = Prepared(launch)
    rows = lse if args.need_lse else None
    ready = prepared.ready_for(q, k, v, out, rows, args)
    if ready is None or any(x.data_ptr() % _ALIGNED for x in (q, k, v, out)):
        if prepared.other is None:
            config = triton_configs.choose_forward(launch.spec, launch.target)
            prepared.other = replace(launch, config=config, prepared=None)
        return triton_forward.run(prepared.other, q, k, v, out, lse, args)
    attend_call(prepared, ready, q, k, v, out, rows)
    return out, lse


def repeat(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """A runner for calls of these sizes, of which one has been made; None if there is nothing to run."""
    return triton_forward.repeat(launch, q, k, v, args)
