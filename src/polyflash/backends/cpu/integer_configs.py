"""Calls whose codes the forward kernel multiplies as integers, and the words of their tables. No DSL."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, cast

from polyflash.backends.cpu.configs import STEP
from polyflash.quant.scheme import Block, Codes, codes_of
from polyflash.spec import SMALL_ROWS, Arguments, AttentionSpec, Feature, Phase
from polyflash.target import Target

if TYPE_CHECKING:
    from torch import Tensor

TOKEN, WHOLE, CHANNEL = Block(1, 0), Block(), Block(0, 1)
NO_GROUPS = 1 << 40  # tokens that share a shift if all do


def refuses(spec: AttentionSpec, target: Target) -> str:
    """Why a call over codes does not run on integer products; "" if it does, or has no codes."""
    if not spec.codes:
        return ""
    k, v = codes_of(spec.codes)
    if not (k and v and k.compute == v.compute == "int8" and k.dtype == v.dtype == "int8"):
        return f'codes: needs compute="int8" of k and v in int8, asked for {spec.codes}'
    if not k.tables == v.tables == "float32":
        return f"codes: integer products have tables of float32, asked for {spec.codes}"
    if "avx512_vnni" not in target.features or target.arch != "avx512":
        return "codes: needs avx512_vnni for integer products"
    few = spec.seqlen_q <= SMALL_ROWS or Feature.ROW_BOUNDS in spec.features
    if spec.phase is Phase.DECODE and few and Feature.BATCH_INVARIANT not in spec.features:
        return f"codes: up to {SMALL_ROWS} query rows are read in the walk of decode"
    if Feature.DROPOUT in spec.features:
        return "codes: integer products have no dropout"
    wanted = "scales per token, head or tensor, of v or per channel; of k a mean; no groups in packed members"
    return "" if _fits(spec, k, v) else f"codes: has {wanted}; asked for {spec.codes}"


def _fits(spec: AttentionSpec, k: Codes, v: Codes) -> bool:
    paged, groups = bool(spec.page_size), k.shift.tokens if k.shift else 0
    if k.scale not in (TOKEN, WHOLE) or v.scale not in (TOKEN, WHOLE, CHANNEL) or v.shift is not None:
        return False
    if k.shift is None:
        return not (paged and v.scale == CHANNEL)
    apart = groups % STEP == 0 and spec.page_size % STEP == 0  # no group of keys of a product has two shifts
    packed = Feature.VARLEN in spec.features and groups > 0
    return k.shift.channels == 1 and apart and not packed and not (paged and v.scale == CHANNEL)


def words(args: Arguments, kept: list[Tensor]) -> bytes:
    """`Tables` of a call. Small tensors that must be copied first are put into `kept`."""
    import torch

    from polyflash.backends.cpu import arguments  # needs torch, which a table of rows does without

    k, v = codes_of(args.codes)
    of_k_scale, of_k_shift, of_v, _ = arguments.tables(args, kept)
    if k is None or k.scale != TOKEN:
        of_k_scale = (*of_k_scale[:3], 0)
    channels: tuple[int, ...] = (0, 0, 0)
    if v is not None and v.scale == CHANNEL:
        channels, one = of_v[:3], torch.ones(1)
        kept.append(one)
        of_v = (one.data_ptr(), 0, 0, 0)
    elif v is not None and v.scale != TOKEN:
        of_v = (*of_v[:3], 0)
    groups = (cast("Codes", k).shift or WHOLE).tokens or NO_GROUPS
    return array("q", (*of_k_scale, *of_k_shift, *of_v, *channels, groups)).tobytes()
