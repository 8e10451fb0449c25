"""Launch of the forward pass on the CPU: cuts a call into the work items of kernels/forward.py, fills its
argument block and hands both to the pool.

q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), out (B, Hq, Sq, Dv), lse (B, Hq, Sq) float32.
Nothing here imports a compiler: `runtime.load` does, for a kernel that no cache has.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from polyflash.backends.cpu import (
    arguments,
    configs,
    decode,
    decode_configs,
    integer_configs,
    packing,
    pool,
    runtime,
)
from polyflash.backends.cpu.words import FORWARD, Cut
from polyflash.results import outputs
from polyflash.spec import Arguments
from polyflash.storages import near

if TYPE_CHECKING:
    from polyflash.plan import Launch

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

    __slots__ = ("cuts", "decode", "launch")

    def __init__(self, launch: Launch) -> None:
        configs.check_fits(launch.config, launch.spec, launch.target)
        self.launch = launch
        self.cuts: dict[tuple[int, ...], _Cut] = {}
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

    def unpacked(self, batch: int, seqlen_q: int, threads: int, args: Arguments) -> _Cut:
        """Items of equal lengths, within the row blocks of interval lists if there are any: one head each if
        heads have lists of their own."""
        lists, rows, blocks, own_lists = args.intervals, seqlen_q, 1, False
        if lists is not None:
            rows, blocks, own_lists = min(seqlen_q, args.interval_rows), lists.shape[2], lists.shape[1] > 1
        index = batch, rows, blocks, own_lists, threads
        found = self.cuts.get(index)
        if found is None:
            spec, config = self.launch.spec, self.launch.config
            nv = configs.panel_vectors(config.isa, rows)
            panel_rows, heads = nv * configs.ISAS[config.isa].lanes, (spec.num_kv_heads, spec.group)
            cut = configs.partition(
                batch * blocks, *heads, rows, panel_rows, config.panels, threads, own_lists=own_lists
            )
            found = self.add(index, cut._replace(row_blocks=cut.row_blocks * blocks), nv)
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
    job = _job(launch, q, k, v, out, lse, args)
    if job is not None:
        job.run(job.words)
    return out, lse


class _Job(NamedTuple):
    """Work for the pool: a kernel on the argument block `words`, and how it is shared out."""

    kernel: int
    words: array[int]
    items: int
    threads: int
    scratch_bytes: int
    wake: bool
    work_us: int
    kept: list[Any]  # tensors whose addresses are in the block

    def run(self, words: array[int]) -> None:
        """On a block laid out like the job's own."""
        address, _ = words.buffer_info()
        pool.run(self.kernel, address, *self[2:6])


def _job(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> _Job | None:
    """The job of a call; None if the decode kernels have done all its members."""
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
            return None
        cut, members = prepared.packed(args, lens_q, lens_k, threads, kept)
    else:
        cut = prepared.unpacked(batch, seqlen_q, threads, args)
    lse_at = lse.data_ptr() if args.need_lse else 0
    isa = launch.config.isa
    if args.codes:  # which the kernel reads in order
        k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
        kept += k, v
    front = arguments.front(isa, cut.nv, (q, k, v, out), lse_at, seqlen_k, args, kept, members)
    tables = integer_configs.words(args, kept) if args.codes else b""
    words, wake = array("q", front + cut.tail + tables), work_us >= arguments.WAKE_FROM_US
    return _Job(cut.kernel, words, cut.items, threads, cut.scratch_bytes, wake, work_us, kept)


def repeat(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """A runner for calls of these sizes, of which one has been made; None if it has an operand, a page table,
    or nothing to run."""
    bare = not arguments.any_table(args) and args.page_table is None and args.sinks is None
    return Repeat(launch, args) if bare and q.numel() and v.numel() else None


class Repeat:
    """Fast path for repeated calls without operands: an argument block, laid out by the first of them, and
    anew for another number of threads, at the addresses of this one."""

    def __init__(self, launch: Launch, args: Arguments) -> None:
        self.launch, self.args, self.need_lse = launch, args, args.need_lse
        self.job: _Job | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        out, lse = outputs(q, v.shape[3], self.need_lse)
        job = self.job
        if job is None or job.threads != arguments.threads_for(job.work_us):
            operands = near(q), near(k), near(v), near(out)
            job = self.job = cast(_Job, _job(self.launch, *operands, lse, self.args))
        words = job.words[:]
        words[FORWARD.q], words[FORWARD.k], words[FORWARD.v] = at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        words[FORWARD.out] = out.data_ptr()
        if 0 in at:  # of a tensor around another one
            return None
        if self.need_lse:
            words[FORWARD.lse] = lse.data_ptr()
        job.run(words)
        return out, lse


def _decode_members(
    prepared: _Prepared, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Any, Any]:
    """Packed members of few rows are done. Rows and keys of every member, no rows of those that are done."""
    lens_q, lens_k = packing.member_lengths(args)
    for few in packing.members_of_few_rows(prepared.launch.spec, lens_q, lens_k):
        group = q.shape[1] // v.shape[1]
        cut, walks = decode.of_members(prepared.decoder(), few, lens_q, lens_k, group, args)
        decode.launched(cut, walks, q, k, v, out, lse, args)
        lens_q[few] = 0
    return lens_q, lens_k


def _hide_rows_beyond(out: Tensor, lse: Tensor, args: Arguments) -> None:
    """Rows of no packed member: 0 and -inf."""
    end = int(cast("Tensor", args.cu_seqlens_q)[-1])
    if end < out.shape[2]:
        out[:, :, end:].zero_()
        if args.need_lse:
            lse[:, :, end:].fill_(-torch.inf)
