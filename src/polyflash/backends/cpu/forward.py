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
    loading,
    packing,
    pool,
    runtime,
    tiles,
)  # fmt: skip
from polyflash.backends.cpu.configs import DropoutKey
from polyflash.backends.cpu.words import CHANGE_SCORES, FORWARD, PLAIN, START_BLOCK, START_ITEM, UNSEEN, Cut

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.cpu.configs import KernelKey
    from polyflash.plan import Launch
    from polyflash.spec import Arguments

KEPT_CUTS = 256  # per route


def build(key: KernelKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    from polyflash.backends.cpu import blocks, simd
    from polyflash.backends.cpu.simd import greatest, least, load_i8, load_i32
    from polyflash.backends.cpu.structs import Blocks

    stage, block = blocks.stages(key), Blocks(FORWARD)
    shared, device, tiles_at = loading.loaders(key, stage), block.device, block.tiles()
    loads = tiles.tiles(key, stage, shared)
    call_pass, call_dropout = simd.call_native(9), simd.call_native(7)

    LANES, NR, NV, MR, PACK, STEP = key.lanes, key.panel_rows, key.nv, key.group_keys, key.pack, configs.STEP
    Q_PANEL, O_PANEL = key.q_panel_bytes, key.o_panel_bytes
    K_BYTES, V_BYTES = key.k_row_bytes, key.v_row_bytes
    WIDE_BYTES = key.bucket * 4 + configs.LINE
    KEYS_PER_TRIP = min(4, MR // PACK) * PACK
    MINUS_INF = 0xFF800000

    @device
    def start_panel(tile, src, row, row_end, panel):
        """Q^T of one panel, and its O^T, m_i and l_i at their first values."""
        args = tile.args
        flip = args.sign | (args.sign >> 16 if PACK == 2 else 0)
        stage_rows, q_panel = tile.stage, tile.q + panel * Q_PANEL
        stride, vectors = args.q_row, (args.head_dim + PACK * LANES - 1) // (PACK * LANES)
        for lane in range(0, NR, LANES):
            rows = least(LANES, row_end - row - lane)
            if rows > 0:
                first, count = src + (row + lane) * stride, args.head_dim
                shared.load_tile(tile, first, stride, args.q_dim, rows, count, stage_rows)
                stage.pack_query(stage_rows, vectors, q_panel + lane * 4, flip)
        channels = (args.head_dim_v + STEP - 1) // STEP * STEP
        stage.fill(tile.o + panel * O_PANEL, channels * NV, args.zero)
        stats = tile.stats + panel * NR * 8
        stage.fill(stats, NV, MINUS_INF)
        stage.fill(stats + NR * 4, NV, args.zero)

    @device
    def masked_scores(tile, panel, limits, n, begin, end, inner_begin, inner_end):
        """S^T of keys n + [begin, end), and their part of the running maximum; every row sees all of
        [inner_begin, inner_end)."""
        args = tile.args
        k, s = tile.k, tile.s
        q, bmax = tile.q + panel * Q_PANEL, tile.block + NR * 4
        trips = (args.head_dim + 4 * PACK - 1) // (4 * PACK)
        if inner_begin > begin:
            groups = (inner_begin - begin) // MR
            stage.scores_bounded(
                k + begin * K_BYTES, q, s + begin * NR * 4, bmax, trips, groups, limits, n + begin
            )
        if inner_end > inner_begin:
            groups = (inner_end - inner_begin) // MR
            stage.scores(k + inner_begin * K_BYTES, q, s + inner_begin * NR * 4, bmax, trips, groups)
        if end > inner_end:
            groups = (end - inner_end) // MR
            stage.scores_bounded(
                k + inner_end * K_BYTES, q, s + inner_end * NR * 4, bmax, trips, groups, limits, n + inner_end
            )

    @device
    def finalize_panel(tile, dst, lse, head, row, row_end, panel):
        args = tile.args
        o, stats = (
            tile.o + panel * O_PANEL,
            tile.stats + panel * NR * 8,
        )
        stride, sink = args.out_row, MINUS_INF
        if args.sinks != 0:
            sink = load_i32(args.sinks + 4 * head)
        for lane in range(0, NR, LANES):
            rows = least(LANES, row_end - row - lane)
            if rows > 0:
                at = stats + lane * 4
                if lse != 0 or args.sinks != 0:
                    stage.finish_stats(at, args.scale, sink)
                if args.drop != 0:
                    stage.scale_divisor(at, args.drop_kept)
                stage.finalize(o + lane * 4, at, dst + (row + lane) * stride, stride, rows, args.head_dim_v)
                if lse != 0:
                    stage.store_lse(at, lse + (row + lane) * 4, rows)

    @device
    def attend_block(tile, v, panels, heads, n, first, last):
        """One key block, loaded, against every panel of the item that it touches."""
        args = tile.args
        item, changes = tile.item, args.score_pass
        row_0, row_end, head = item.row, item.row_end, item.head
        start, live = item.start, item.live
        lo_shift, hi_shift = item.lo_shift, item.hi_shift
        plane_0 = item.batch * args.num_kv_heads * args.group
        bad = loads.load_values(tile, v, first, last)
        for i_p in range(panels):
            row = row_0 + i_p * NR
            end_row = least(row + NR, row_end) - 1
            # block_range: groups of keys some row sees, and inside them those that every row sees
            lo, hi = greatest(first, row + lo_shift) - n, least(last, end_row + hi_shift) - n
            if hi <= lo:
                continue
            seen_by_all = greatest(start, end_row + lo_shift) - n
            all_end = least(live, row + hi_shift) - n
            lane_limits = tile.limits + i_p * NR * 8
            for i_h in range(heads):
                panel, kind = i_h * panels + i_p, PLAIN
                if changes != 0:
                    kind = load_i8(tile.kinds + panel)
                if kind == UNSEEN:
                    continue
                step = MR if kind == PLAIN else STEP
                begin, end = lo // step * step, (hi + step - 1) // step * step
                top = tile.block + NR * 4
                stage.fill(top, NV, MINUS_INF)
                if kind == PLAIN:
                    inner_begin = least(greatest((seen_by_all + MR - 1) // MR * MR, begin), end)
                    inner_end = least(greatest(all_end // MR * MR, inner_begin), end)
                    masked_scores(tile, panel, lane_limits, n, begin, end, inner_begin, inner_end)
                else:
                    masked_scores(tile, panel, lane_limits, n, begin, end, begin, end)
                    stage.fill(top, NV, MINUS_INF)
                    bounded = 1 if begin < seen_by_all or end > all_end else 0
                    call_pass(changes, args, tile, CHANGE_SCORES, head + i_h, i_p, n, begin, end, bounded)
                s, block = tile.s + begin * NR * 4, tile.block
                p = tile.p + begin // PACK * NR * 4
                stats = tile.stats + panel * NR * 8
                stage.online_softmax(s, p, (end - begin) // 4, block, stats, args.scale_log2)
                if args.drop != 0:
                    plane = plane_0 + head + i_h
                    call_dropout(args.drop, args, p, plane, row, n + begin, end - begin, PACK)
                o = tile.o + panel * O_PANEL
                values = tile.v + begin // PACK * V_BYTES
                trips, channels = (end - begin) // KEYS_PER_TRIP, (args.head_dim_v + MR - 1) // MR
                stage.accumulate(values, p, trips, o, block, channels)
                if bad != 0:
                    bad_begin, bad_end = greatest(begin, first - n), least(end, last - n)
                    loads.add_bad_rows(tile, v, head + i_h, i_p, panel, n, bad_begin, bad_end)

    @device
    def limit_rows(tile, panels, start, live):
        """The limits of the item's rows within the keys [start, live)."""
        item, limits = tile.item, tile.limits
        row_0, row_end = item.row, item.row_end
        lo_shift, hi_shift = item.lo_shift, item.hi_shift
        item.start = start
        item.live = live
        for i_p in range(panels):
            stage.fill_limits(
                limits + i_p * NR * 8, row_0 + i_p * NR, row_end - 1, lo_shift, hi_shift, start, live
            )

    @device
    def attend_interval(tile, k, v, panels, heads, start, live):
        """The keys [start, live) of the item, block by block."""
        args = tile.args
        item, block_n = tile.item, args.block_n
        limit_rows(tile, panels, start, live)
        key_lo = greatest(start, item.row + item.lo_shift)
        key_hi = least(live, item.row_end - 1 + item.hi_shift)
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            n = i_n * block_n
            first, last = greatest(n, key_lo), least(n + block_n, key_hi)
            if last <= first:
                continue
            item.key = n
            if args.page_table != 0:
                found = loads.find_pages(tile, first, last)
                if found < last:
                    last = key_hi = found
                    limit_rows(tile, panels, start, found)
                    if last <= first:
                        continue
            if args.score_pass != 0:
                item.first = first
                item.last = last
                call_pass(args.score_pass, args, tile, START_BLOCK, 0, 0, 0, 0, 0, 0)
                if item.any_seen == 0:
                    continue
            loads.load_keys(tile, k, first, last)
            attend_block(tile, v, panels, heads, n, first, last)

    @block.kernel
    def kernel(args, number, scratch):
        tile = tiles_at(args, scratch)
        others, chunks, hkv = args.others, args.chunks, args.num_kv_heads
        group = args.group
        rest = number % others
        i_hkv, i_b, i_m = (
            rest // chunks % hkv,
            rest // chunks // hkv,
            args.row_blocks - 1 - number // others,
        )
        # The last rows see the most keys; packed members come with a table, the most work first.
        entry = 0
        if args.members != 0:
            entry = args.members + number // others * 12
            i_b = load_i32(entry)
        i_t, first_q, first_k, seqlen_q, start, live = shared.stand(tile, i_b)
        head = i_hkv * group + rest % chunks * args.heads
        heads = least(args.heads, (i_hkv + 1) * group - head)
        # Row blocks of interval lists are cut again into items, so that an item has one list.
        span = args.row_panels * NR
        row_0, row_end, i_r = i_m * span, seqlen_q, 0
        if args.intervals != 0:
            per_list = (args.interval_rows + span - 1) // span
            i_r = i_m // per_list
            row_0 = i_r * args.interval_rows + i_m % per_list * span
            row_end = least(seqlen_q, (i_r + 1) * args.interval_rows)
        row_end = least(row_0 + span, row_end)
        if args.members != 0:
            row_0, row_end = load_i32(entry + 4), least(load_i32(entry + 8), seqlen_q)
        if row_end <= row_0:
            return
        panels = (row_end - row_0 + NR - 1) // NR

        stage.fill(tile.zero, WIDE_BYTES // (LANES * 4), args.zero)
        item = tile.item
        item.head = head
        item.heads = heads
        item.row = row_0
        item.panels = panels
        item.row_end = row_end
        q = args.q + i_t * args.q_batch + first_q * args.q_row
        for i_p in range(panels):
            for i_h in range(heads):
                q_head = q + (head + i_h) * args.q_head
                start_panel(tile, q_head, row_0 + i_p * NR, row_end, i_h * panels + i_p)
        if args.score_pass != 0:
            call_pass(args.score_pass, args, tile, START_ITEM, 0, 0, 0, 0, 0, 0)

        k, v = shared.key_rows(args, i_t, i_hkv, first_k)
        pairs, count = args.intervals, 1
        if pairs != 0:
            count = args.interval_count
            pairs += i_b * args.intervals_batch + head * args.intervals_head
            pairs += i_r * args.intervals_block
        for t in range(count):
            begin, end = start, live
            if pairs != 0:
                begin, end = (
                    greatest(start, load_i32(pairs + 8 * t)),
                    least(live, load_i32(pairs + 8 * t + 4)),
                )
            if begin < end:
                attend_interval(tile, k, v, panels, heads, begin, end)

        out = args.out + i_t * args.out_batch + first_q * args.out_row
        lse_row = args.lse + 4 * (i_t * args.lse_batch + first_q)
        for i_p in range(panels):
            for i_h in range(heads):
                lse = lse_row + (head + i_h) * args.lse_head * 4 if args.lse != 0 else 0
                dst = out + (head + i_h) * args.out_head
                finalize_panel(tile, dst, lse, head + i_h, row_0 + i_p * NR, row_end, i_h * panels + i_p)

    return kernel


class _Cut(NamedTuple):
    """How a call of one shape is run: its kernel, items and scratch, and the end of its argument block."""

    kernel: int
    nv: int
    items: int
    scratch_bytes: int
    tail: bytes


class _Prepared:
    """What a route keeps between calls: cuts by batch, lengths and threads. Entries are only added, or
    dropped all at once, so Python threads may share it."""

    __slots__ = ("cuts", "decode", "drops", "launch", "passes")

    def __init__(self, launch: Launch) -> None:
        configs.check_fits(launch.config, launch.spec, launch.target)
        self.launch = launch
        self.cuts: dict[tuple[int, ...], _Cut] = {}
        self.passes: dict[int, int] = {}
        self.drops: dict[int, int] = {}
        self.decode: decode.Prepared | None = None

    def score_pass(self, nv: int) -> int:
        """The address of the pass over scores for panels of `nv` vectors."""
        found = self.passes.get(nv)
        if found is None:
            found = self.passes[nv] = runtime.load(configs.ScoreKey(self.launch.config.isa, nv))
        return found

    def dropout(self, nv: int) -> int:
        """The address of what drops weights, for panels of `nv` vectors."""
        found = self.drops.get(nv)
        if found is None:
            found = self.drops[nv] = runtime.load(DropoutKey(self.launch.config.isa, nv))
        return found

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
        """What runs members of few rows."""
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
    left, right = arguments.window_sides(args)
    keys = seqlen_k
    if args.page_table is not None:
        seqlen_k *= args.page_table.shape[1]
        keys = int(cast("Tensor", args.kv_lens).max())  # a table may have room for far more
    work_us = arguments.estimated_us(q.shape, keys, head_dim + head_dim_v, left, right, args)
    threads = 1 if work_us < arguments.LEND_FROM_US else torch.get_num_threads()
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
    """What `run` hands to the pool for a call without operands, which has been made before."""
    prepared: _Prepared = launch.prepared
    batch, _, seqlen_q, head_dim = q.shape
    left, right = arguments.window_sides(args)
    work_us = arguments.estimated_us(q.shape, k.shape[2], head_dim + v.shape[3], left, right, args)
    threads = 1 if work_us < arguments.LEND_FROM_US else torch.get_num_threads()
    cut = prepared.dense(batch, seqlen_q, threads)
    return _job(prepared, cut, threads, work_us, q, k, v, out, lse, args, [], 0)


def repeat(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """What runs calls of these sizes, of which one has been made; None if there is nothing to run."""
    from polyflash.backends.cpu import forward_repeat

    return forward_repeat.Repeat(launch, args) if q.numel() and v.numel() and _is_bare(args) else None


def _is_bare(args: Arguments) -> bool:
    """Has the call no operand, and no page table?"""
    return not arguments.any_table(args) and args.page_table is None and args.sinks is None


class Job(NamedTuple):
    """What the pool runs: a kernel on the argument block `words`, and how it is shared out."""

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
    scale = q.shape[3] ** -0.5 if args.scale is None else args.scale
    does = arguments.passes(args, scale)
    sinks, score_pass = arguments.sinks_address(args.sinks, kept), prepared.score_pass(cut.nv) if does else 0
    lse_at = lse.data_ptr() if args.need_lse else 0
    head = arguments.head(q, k, v, out, lse_at, seqlen_k, args, scale, does, sinks, score_pass)
    middle = arguments.NO_OPERANDS
    if does or arguments.any_table(args):
        drop = prepared.dropout(cut.nv) if args.dropout_p else 0
        middle = arguments.operands(args, scale, does, kept, members, drop, k)
    words = array("q", head + middle + cut.tail)
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
