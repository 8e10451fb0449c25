"""Attention backward on the CPU: dq, dk, dv, dbias and dsinks in one pass over the tiles of scores.

    P = exp(S - lse)    dP = dO·Vᵀ    delta = Σ dO·out - dlse    dS = P·(dP - delta)
    dV = Pᵀ·dO    dK = scale·dSᵀ·Q    dQ = scale·dS·K             (FlashAttention-2, algorithm 2)

One work item is a kv head and a range of its keys, whose dK and dV are its own; the query heads of the group
pass by in spans of rows that are packed once. Sums are float32 in an order that no thread changes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from polyflash.backends.cpu import arguments, backward_configs, configs, packing, pool, runtime
from polyflash.backends.cpu.arguments import Views
from polyflash.backends.cpu.backward_configs import BiasGradientKey
from polyflash.backends.cpu.backward_sums import BiasSums, bias_sums, sink_gradient, zeros_in_order_of
from polyflash.backends.cpu.words import NEEDS_DBIAS, BiasGradient, Cut, Entries, Gradients, Sums
from polyflash.results import gradient_kinds
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from polyflash.plan import Launch

Given = tuple[Tensor, Tensor | None, Tensor]  # dout, dlse and lse

KEPT_CUTS = 256  # per route
Needs = tuple[bool, bool, bool, bool, bool]  # dq, dk, dv, dbias, dsinks


class _Cut(NamedTuple):
    """How a call of one shape is run: its kernel and scratch, its items, and the words that say so."""

    kernel: int
    nv: int
    table: Any
    parts: int  # partial sums of dQ
    scratch_bytes: int
    words: bytes  # of Cut and BackwardScratch


class _Prepared:
    """A route's memory between calls; entries are only added, or dropped all at once, so Python threads
    may share it."""

    __slots__ = ("cuts", "launch")

    def __init__(self, launch: Launch) -> None:
        configs.check_fits(launch.config, launch.spec, launch.target)
        self.launch = launch
        self.cuts: dict[tuple[int, ...], _Cut] = {}

    def dense(self, batch: int, seqlen_q: int, seqlen_k: int, heads: int, at_once: int, threads: int) -> _Cut:
        """`at_once` batch entries of `heads` heads run together."""
        index = batch, seqlen_q, seqlen_k, heads, at_once, threads
        found = self.cuts.get(index)
        if found is None:
            if len(self.cuts) >= KEPT_CUTS:
                self.cuts = {}
            lens = np.full(batch, seqlen_q), np.full(batch, seqlen_k)
            made = backward_configs.entry_table(*lens, heads, threads, at_once)
            found = self.cuts[index] = self._cut(seqlen_q, *made)
        return found

    def packed(self, args: Arguments, heads: int, threads: int) -> _Cut:
        """Items of packed members."""
        lens = packing.member_lengths(args)
        made = backward_configs.entry_table(*lens, heads, threads)
        return self._cut(int(lens[0].max(initial=1)), *made)

    def _cut(self, longest: int, table: Any, parts: int) -> _Cut:
        config, spec = self.launch.config, self.launch.spec
        nv = configs.panel_vectors(config.isa, longest)
        key = backward_configs.key_for(config, spec, nv)
        row_panels = min(config.row_panels, -(-longest // key.panel_rows))
        tiles = backward_configs.scratch(key, row_panels, config.block_n)
        words = array("q", (*Cut(config.block_n, 1, 1, row_panels, 1, 1, zero=0), *tiles[:-1])).tobytes()
        return _Cut(runtime.load(key), nv, table, parts, tiles.total, words)


def _launches(table: Any, heads: int, bias: BiasSums | None) -> Iterator[tuple[Any, int, int]]:
    """Entries, first kv head and number of heads of every launch: all at once, unless they share sums."""
    tables = [table]
    if bias is not None and bias.one_batch:
        tables = [np.ascontiguousarray(table[table[:, 0] == b]) for b in np.unique(table[:, 0])]
    apart = bias is not None and bias.one_head
    for entries in tables if len(table) else ():
        for head in range(heads) if apart else (0,):
            yield entries, head, 1 if apart else heads


def _differentiate(
    launch: Launch, views: Views, given: Given, args: Arguments, needs: Needs, bias: BiasSums | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """float32 dq, dk and dv where they are asked for; the sums of `bias` are filled."""
    (q, k, v, _), (dout, dlse, lse) = views, given
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = _Prepared(launch)
    (batch, _, seqlen_q, head_dim), (_, num_kv_heads, seqlen_k, head_dim_v) = q.shape, v.shape
    work_us = 5 * arguments.estimated_us(q.shape, seqlen_k, head_dim + head_dim_v, args) // 2
    threads = arguments.threads_for(work_us)
    heads = 1 if bias is not None and bias.one_head else num_kv_heads
    if args.cu_seqlens_q is None:
        at_once = 1 if bias is not None and bias.one_batch else batch
        cut = prepared.dense(batch, seqlen_q, seqlen_k, heads, at_once, threads)
    else:
        cut = prepared.packed(args, heads, threads)
    kept: list[Any] = []
    dq = zeros_in_order_of(q, cut.parts) if needs[0] else None
    dk, dv = (zeros_in_order_of(x, 1) if need else None for x, need in ((k, needs[1]), (v, needs[2])))
    plain, isa = args._replace(sinks=None), launch.config.isa  # lse holds their share
    front = arguments.front(isa, cut.nv, views, lse.data_ptr(), seqlen_k, plain, kept, 0)
    block = array("q", front + cut.words)
    block.extend(_sums(dout, dlse, dq, dk, dv))
    add_bias = 0 if bias is None else runtime.stage_address(BiasGradientKey, isa, cut.nv)
    block.extend((0,) * 7 if bias is None else BiasGradient._make((*bias.words(), add_bias)))
    wanted = sum(1 << i for i in range(3) if needs[i]) | (0 if bias is None else NEEDS_DBIAS)
    scales = _scales(arguments.score_scale(q, args), args.dropout_p)
    block.extend(Gradients(backward_configs.chunk_keys(seqlen_k), wanted, *scales))
    wake = work_us >= arguments.WAKE_FROM_US
    for entries, first, here in _launches(cut.table, num_kv_heads, bias):
        words = block + array("q", Entries(entries.ctypes.data, first, here))
        address = words.buffer_info()[0]
        pool.run(cut.kernel, address, len(entries) * here, threads, cut.scratch_bytes, wake)
    if dq is None or cut.parts == 1:
        return dq, dk, dv
    for part in range(1, cut.parts):
        dq[0] += dq[part]
    return dq[0], dk, dv


def _sums(dout: Tensor, dlse: Tensor | None, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> Sums:
    """dq is q-shaped, or (parts, *q.shape)."""
    words = (
        *(dout.data_ptr(), *arguments.row_strides(dout), 0 if dlse is None else dlse.data_ptr()),
        *((0,) * 5 if dq is None else (dq.data_ptr(), *(4 * dq.stride(d) for d in (0, -4, -3, -2)))),
        *((0,) * 4 if dk is None else (dk.data_ptr(), *arguments.row_strides(dk))),
        *((0,) * 4 if dv is None else (dv.data_ptr(), *arguments.row_strides(dv))),
    )
    return Sums._make(words)


@lru_cache(maxsize=64)
def _scales(scale: float, dropout_p: float) -> tuple[int, int]:
    """grad_scale and drop_scale; if all is dropped, nothing is left to scale."""
    (signed,) = struct.unpack("<I", struct.pack("<f", max(-arguments.FLT_MAX, min(scale, arguments.FLT_MAX))))
    return signed, arguments.float_bits(1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)


def run(
    launch: Launch,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: Arguments,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv, dbias, dsinks, each with its operand's shape and the dtype of `gradient_kinds`; None where
    `needs` is False."""
    kinds = gradient_kinds((q, k, v, args.bias, args.sinks), args)
    dbias = dsinks = None
    bias: BiasSums | None = None
    dout, out = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (dout, out))
    dlse, lse = None if dlse is None else dlse.contiguous(), lse.contiguous()
    if needs[4] and args.sinks is not None:
        dsinks = sink_gradient(dout, dlse, out, lse, args.sinks.detach()).to(kinds[4])
    if not any(needs[:4]):
        return None, None, None, None, dsinks
    if needs[3] and args.bias is not None:
        heads, seqlens = (q.shape[1], k.shape[1]), (q.shape[2], k.shape[2])
        bias = bias_sums(args.bias, q.shape[0], heads, seqlens)
    sums = _differentiate(launch, (q, k, v, out), (dout, dlse, lse), args, needs, bias)
    dq, dk, dv = (None if x is None else x.to(kind) for x, kind in zip(sums, kinds[:3], strict=True))
    if bias is not None:
        dbias = bias.total(cast("Tensor", args.bias))
    return dq, dk, dv, dbias, dsinks
