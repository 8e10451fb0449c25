"""Attention forward on the CPU: O = softmax(scale·QKᵀ, mask)·V and lse, in one pass over the keys.

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), out (B, Hq, Sq, Dv), lse (B, Hq, Sq) float32.
One work item is a kv head, some query heads of its group and a block of query rows; its panels share one copy
of each K/V block. Nothing here imports a compiler until `build()`, which a cached kernel never needs.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from polyflash.backends.cpu import (
    arguments,
    configs,
    decode,
    decode_configs,
    packing,
    pool,
    runtime,
)  # fmt: skip
from polyflash.backends.cpu.words import Cut

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

KEPT_CUTS = 256  # per route


class _Cut(NamedTuple):
    """How a call of one shape is run: its kernel, items and scratch, and the end of its argument block."""

    kernel: int
    nv: int
    items: int
    scratch_bytes: int
    tail: bytes


class _Prepared:
    """A route's memory between calls: cuts by batch, lengths and threads. Entries are only added, or
    dropped all at once, so Python threads may share it."""

    __slots__ = ("cuts", "decode", "launch", "stages")

    def __init__(self, launch: Launch) -> None:
        configs.check_fits(launch.config, launch.spec, launch.target)
        self.launch = launch
        self.cuts: dict[tuple[int, ...], _Cut] = {}
        self.stages = runtime.Stages(launch.config.isa)
        self.decode: decode.Prepared | None = None

    def add(self, index: tuple[int, ...], cut: configs.Partition, nv: int) -> _Cut:
        """`cut.items` is a multiple of `cut.row_blocks`; `nv` is the width of the kernel's panels."""
        spec, config = self.launch.spec, self.launch.config
        key = configs.key_for(config, spec.dtype, max(spec.head_dim, spec.head_dim_v), nv)
        tiles = configs.scratch(key, cut.heads, cut.row_panels, config.block_n)
        others = cut.items // cut.row_blocks
        blocks = Cut(config.block_n, cut.heads, cut.chunks, cut.row_panels, cut.row_blocks, others, zero=0)
        tail = array("q", (*blocks, *tiles[:-1])).tobytes()
        if len(self.cuts) >= KEPT_CUTS:
            self.cuts = {}
        made = self.cuts[index] = _Cut(runtime.load(key), nv, cut.items, tiles.total, tail)
        return made

    def dense(self, batch: int, seqlen_q: int, threads: int) -> _Cut:
        index = batch, seqlen_q, threads
        found = self.cuts.get(index)
        if found is None:
            spec, config = self.launch.spec, self.launch.config
            nv = configs.panel_vectors(config.isa, seqlen_q)
            rows = nv * configs.ISAS[config.isa].lanes
            cut = configs.partition(
                batch, spec.num_kv_heads, spec.group, seqlen_q, rows, config.panels, threads
            )
            found = self.add(index, cut, nv)
        return found

    def listed(self, batch: int, seqlen_q: int, threads: int, args: Arguments) -> _Cut:
        """Items within the row blocks of interval lists; one head each if heads have lists of their own."""
        lists, rows = cast("Tensor", args.intervals), args.interval_rows
        index = batch, seqlen_q, threads, rows, lists.shape[1]
        found = self.cuts.get(index)
        if found is None:
            spec, config, count = self.launch.spec, self.launch.config, lists.shape[2]
            nv = configs.panel_vectors(config.isa, min(seqlen_q, rows))
            cut = configs.partition(
                batch * count, spec.num_kv_heads, spec.group, min(seqlen_q, rows),
                nv * configs.ISAS[config.isa].lanes, config.panels, threads,
                own_lists=lists.shape[1] > 1,
            )  # fmt: skip
            found = self.add(index, cut._replace(row_blocks=cut.row_blocks * count), nv)
        return found

    def decoder(self) -> decode.Prepared:
        """The kernel that runs members of few rows."""
        if self.decode is None:
            spec, target, config = self.launch.spec, self.launch.target, self.launch.config
            chosen = replace(decode_configs.choose(spec, target), compute=config.compute, isa=config.isa)
            self.decode = decode.Prepared(chosen, spec, target)
        return self.decode

    def packed(
        self, args: Arguments, lens_q: Any, lens_k: Any, threads: int, kept: list[Any]
    ) -> tuple[_Cut, int]:
        """Items of packed members, and the address of their table: the most work first."""
        spec, config = self.launch.spec, self.launch.config
        nv, cut = packing.pack_members(spec, config, lens_q, lens_k, threads, causal=args.causal)
        rows = nv * configs.ISAS[config.isa].lanes
        table = packing.member_table(lens_q, lens_k, rows, cut.row_panels, causal=args.causal)
        kept.append(table)
        others = spec.num_kv_heads * cut.chunks
        index = -1, nv, *cut[:3], len(table)
        found = self.cuts.get(index)
        if found is None:
            blocks = max(1, len(table))
            found = self.add(index, cut._replace(row_blocks=blocks, items=blocks * others), nv)
        return found._replace(items=len(table) * others), table.ctypes.data


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    """Fill `out` and, if asked for, `lse`. Sizes are positive; the argument block is this call's own. With a
    page table k and v are pools: (num_pages, num_kv_heads, page_size, D) and (..., Dv)."""
    prepared = launch.prepared
    if prepared is None:
        prepared = launch.prepared = _Prepared(launch)
    batch, _, seqlen_q, head_dim = q.shape
    _, _, seqlen_k, head_dim_v = v.shape
    keys = seqlen_k
    if args.page_table is not None:
        seqlen_k *= args.page_table.shape[1]
        keys = int(cast("Tensor", args.kv_lens).max())  # a table may have room for far more
    work_us = arguments.estimated_us(q.shape, keys, head_dim + head_dim_v, args)
    threads = arguments.threads_for(work_us)
    kept: list[Any] = []
    members = 0
    if args.cu_seqlens_q is not None:
        _hide_rows_beyond(out, lse, args)
        lens_q, lens_k = _decode_members(prepared, q, k, v, out, lse, args)
        if not lens_q.any():
            return out, lse
        cut, members = prepared.packed(args, lens_q, lens_k, threads, kept)
    elif args.intervals is not None:
        cut = prepared.listed(batch, seqlen_q, threads, args)
    else:
        cut = prepared.dense(batch, seqlen_q, threads)
    job = _job(prepared, cut, threads, work_us, q, k, v, out, lse, args, kept, members)
    pool.run(job.kernel, job.words.buffer_info()[0], *job[2:])
    return out, lse


def job_of(launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments) -> Job:
    """The job that `run` hands to the pool for a call without operands, which has been made before."""
    prepared: _Prepared = launch.prepared
    batch, _, seqlen_q, head_dim = q.shape
    work_us = arguments.estimated_us(q.shape, k.shape[2], head_dim + v.shape[3], args)
    threads = arguments.threads_for(work_us)
    cut = prepared.dense(batch, seqlen_q, threads)
    return _job(prepared, cut, threads, work_us, q, k, v, out, lse, args, [], 0)


def repeat(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """A runner for calls of these sizes, of which one has been made; None if there is nothing to run."""
    from polyflash.backends.cpu import forward_repeat

    return forward_repeat.Repeat(launch, args) if q.numel() and v.numel() and _is_bare(args) else None


def _is_bare(args: Arguments) -> bool:
    """Has the call no operand, and no page table?"""
    return not arguments.any_table(args) and args.page_table is None and args.sinks is None


class Job(NamedTuple):
    """Work for the pool: a kernel on the argument block `words`, and how it is shared out."""

    kernel: int
    words: array[int]
    items: int
    threads: int
    scratch_bytes: int
    wake: bool


def _job(
    prepared: _Prepared, cut: _Cut, threads: int, work_us: float, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, args: Arguments, kept: list[Any], members: int,
) -> Job:  # fmt: skip
    """Small tensors that must be copied first are put into `kept`, to live as long as the call; `members` is
    the address of the table of packed ones."""
    seqlen_k = v.shape[2] if args.page_table is None else v.shape[2] * args.page_table.shape[1]
    lse_at = lse.data_ptr() if args.need_lse else 0
    front = arguments.front(prepared.stages, cut.nv, q, k, v, out, lse_at, seqlen_k, args, kept, members)
    words = array("q", front + cut.tail)
    return Job(cut.kernel, words, cut.items, threads, cut.scratch_bytes, work_us >= arguments.WAKE_FROM_US)


def _decode_members(
    prepared: _Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Any, Any]:
    """Packed members of few rows are done. Rows and keys of every member, no rows of those that are done."""
    lens_q, lens_k = packing.member_lengths(args)
    for few in packing.members_of_few_rows(prepared.launch.spec, lens_q, lens_k):
        decode.run_members(prepared.decoder(), few, lens_q, lens_k, q, k, v, out, lse, args)
        lens_q[few] = 0
    return lens_q, lens_k


def _hide_rows_beyond(out: Tensor, lse: Tensor, args: Arguments) -> None:
    """Rows of no packed member: 0 and -inf."""
    end = int(cast("Tensor", args.cu_seqlens_q)[-1])
    if end < out.shape[2]:
        out[:, :, end:].zero_()
        if args.need_lse:
            lse[:, :, end:].fill_(-torch.inf)
