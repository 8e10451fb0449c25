"""Libraries that torch compiles from text, and launches of their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from polyflash import compilation
from polyflash.backends.gpu.numbers import Flags, flags_of
from polyflash.backends.gpu.views import Operands, operands_of
from polyflash.backends.metal import render
from polyflash.backends.metal.configs import check_memory, padded
from polyflash.backends.metal.render import TYPES, Constants
from polyflash.backends.metal.uniforms import Factors, Numbers, channels_of, factors_for, words
from polyflash.quant.scheme import KINDS, codes_of
from polyflash.results import converted
from polyflash.spec import CODE_TABLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

LANES = 32  # of a simdgroup
_libraries: dict[tuple[str, Constants], Any] = {}


def compiled(source: str) -> Any:
    """A library; its kernels are attributes, called with tensors, numbers, `threads` and `group_size`."""
    return torch.mps.compile_shader(source)


def library(kernel: str, c: Constants) -> Any:
    """The library of these constants, compiled once per process."""
    found = _libraries.get((kernel, c))
    if found is None:
        with compilation.timed(f"metal/{kernel} {c.T} {c.DIM}/{c.DIM_V}", "metal"):
            found = _libraries[kernel, c] = compiled(render.source(kernel, c))
    return found


class Call:
    """One call's operands in the form kernels take, and what is compiled in for them."""

    def __init__(self, launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> None:
        if launch.prepared is None:  # an explicit config may be too large
            check_memory(launch.config, launch.spec)
            launch.prepared = True
        self.config: Any = launch.config
        slopes, sinks = _narrow(args.alibi_slopes), _narrow(args.sinks)
        self.args = _with_wide_tables(args)._replace(alibi_slopes=slopes, sinks=sinks)
        self.x: Operands = operands_of(self.args, k)
        self.flags: Flags = flags_of(q, args)
        self.factors: Factors = factors_for(q, k, args, self.flags, self.config.base2)
        self.any = q
        x, flags = self.x, self.flags
        self.constants = Constants(
            T=_type(q),
            OUT=_type(q),
            BIAS="float" if x.bias is None else _type(x.bias.p),
            DIM=padded(q.shape[3]),
            DIM_V=padded(channels_of(v, args)),
            EXACT=q.dtype is torch.float32,
            BASE2=self.config.base2,
            SKIP=self.config.skip,
            **{name: getattr(flags, name) for name in _FLAGS},
            HAS_KV_LENS=x.kv_lens is not None,
            HAS_KV_STARTS=x.kv_starts is not None,
            HAS_Q_OFFSET=x.q_offset is not None,
            HAS_MASK=x.mask is not None,
            HAS_BIAS=x.bias is not None,
            HAS_SLOPES=x.alibi_slopes is not None,
            HAS_SINKS=x.sinks is not None,
            HAS_SEGMENTS=x.q_segments is not None,
            VARLEN=x.cu_seqlens_q is not None,
            PAGED=x.page_table is not None,
            **codes_constants(args.codes),
        )

    def launch(
        self,
        kernel: str,
        c: Constants,
        n: Numbers,
        tensors: Sequence[Tensor | None],
        groups: tuple[int, int, int],
        simdgroups: int,
    ) -> None:
        """Enqueues `groups` threadgroups of so many simdgroups each."""
        x, threads = self.x, LANES * simdgroups
        views = (x.mask, x.bias, x.alibi_slopes, x.q_segments, x.k_segments, x.page_table)
        mask, bias, slopes, q_ids, k_ids, table = (view and view.p for view in views)
        places = (x.kv_lens, x.kv_starts, x.q_offset)
        given = (*places, mask, bias, slopes, x.sinks, q_ids, k_ids, x.cu_seqlens_q, x.cu_seqlens_k, table)
        slots = (self.any if t is None else t for t in given)
        rest = (self.any if t is None else t for t in tensors)
        arguments = (*slots, words(n), list(self.factors), *rest)
        size, (across, *others) = (threads, 1, 1), groups
        getattr(library(kernel, c), kernel)(*arguments, threads=(across * threads, *others), group_size=size)


_FLAGS = ("HAS_LEFT", "HAS_RIGHT", "HAS_OFFSET", "NEGATIVE", "CHANGED", "SOFTCAP", "DROPOUT")


def codes_constants(text: str) -> dict[str, Any]:
    """Constants of a kernel that reads `codes`, the op's text."""
    found: dict[str, Any] = {}
    for name, codes in zip("KV", codes_of(text) if text else (None, None), strict=True):
        if codes is None:
            continue
        found |= {f"{name}_BITS": KINDS[codes.dtype].bits}
        for place, block in (("", codes.scale), ("SHIFT_", codes.shift)):
            if block is not None:
                found |= {f"{name}_{place}TOKENS": block.tokens, f"{name}_{place}CHANNELS": block.channels}
    return found


def _with_wide_tables(args: Arguments) -> Arguments:
    """Tables of codes in float32, as kernels read them."""
    tables: dict[str, Any] = {name: _narrow(getattr(args, name)) for name in CODE_TABLES}
    return args._replace(**tables) if args.codes else args


def _narrow(x: Tensor | None) -> Tensor | None:
    return x if x is None else converted(x, torch.float32)


def _type(x: Tensor) -> str:
    return TYPES[str(x.dtype).removeprefix("torch.")]


def side_by_side(x: Tensor) -> Tensor:
    """The tensor, copied where its channels do not lie next to each other."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def loads_vectors(*tensors: Tensor) -> bool:
    """Do 4 channels from a multiple of 4 on lie in one aligned piece of memory, in every row? Allocations are
    aligned to more."""
    return all(
        x.stride(3) == 1 and not any(n % 4 for n in (x.shape[3], x.storage_offset(), *x.stride()[:3]))
        for x in tensors
    )
