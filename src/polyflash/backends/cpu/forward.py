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

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import configs, decode, decode_configs, loading, packing, pool, runtime, tiles
from polyflash.backends.cpu.configs import DropoutKey

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.backends.cpu.configs import KernelKey
    from polyflash.plan import Launch
    from polyflash.spec import Arguments

KEPT_CUTS = 256  # per route


def build(key: KernelKey) -> Any:
    """Compile the kernel of `key`: a numba cfunc `void(int64 args, int64 item, int64 scratch)`."""
    from numba import cfunc, types

    from polyflash.backends.cpu import blocks, simd

    stage = blocks.stages(key)
    fill, fill_limits, pack_query = stage.fill, stage.fill_limits, stage.pack_query
    online_softmax, accumulate = stage.online_softmax, stage.accumulate
    finish_stats, scale_divisor = stage.finish_stats, stage.scale_divisor
    finalize, store_lse = stage.finalize, stage.store_lse
    arg, load_i32, load_i8 = simd.word, simd.load_i32, simd.load_i8
    store_i64, least, greatest = simd.store_i64, simd.least, simd.greatest
    call_pass, call_dropout = simd.call_native(9), simd.call_native(7)

    LANES, NR, NV, MR, PACK, STEP = key.lanes, key.panel_rows, key.nv, key.group_keys, key.pack, configs.STEP
    Q_PANEL, O_PANEL = key.q_panel_bytes, key.o_panel_bytes
    K_BYTES, V_BYTES = key.k_row_bytes, key.v_row_bytes
    WIDE_BYTES = key.bucket * 4 + configs.LINE
    KEYS_PER_TRIP = min(4, MR // PACK) * PACK
    MINUS_INF = 0xFF800000

    shared = loading.loaders(key, stage)
    load_tile, stand, key_rows = shared.load_tile, shared.stand, shared.key_rows
    tile = tiles.tiles(key, stage, shared)
    find_pages, load_keys, load_values = tile.find_pages, tile.load_keys, tile.load_values
    add_bad_rows, scores, scores_bounded = tile.add_bad_rows, stage.scores, stage.scores_bounded
    device = loading.device

    @device(6)
    def start_panel(args, scratch, src, row, row_end, panel):  # type: ignore[no-untyped-def]
        """Q^T of one panel, and its O^T, m_i and l_i at their first values."""
        flip = arg(args, a.SIGN) | (arg(args, a.SIGN) >> 16 if PACK == 2 else 0)
        stage_rows, q_panel = scratch + arg(args, a.T_STAGE), scratch + arg(args, a.T_Q) + panel * Q_PANEL
        stride, vectors = arg(args, a.Q_ROW), (arg(args, a.HEAD_DIM) + PACK * LANES - 1) // (PACK * LANES)
        for lane in range(0, NR, LANES):
            rows = least(LANES, row_end - row - lane)
            if rows > 0:
                first, count = src + (row + lane) * stride, arg(args, a.HEAD_DIM)
                load_tile(args, scratch, first, stride, arg(args, a.Q_DIM), rows, count, stage_rows)
                pack_query(stage_rows, vectors, q_panel + lane * 4, flip)
        channels = (arg(args, a.HEAD_DIM_V) + STEP - 1) // STEP * STEP
        fill(scratch + arg(args, a.T_O) + panel * O_PANEL, channels * NV, arg(args, a.ZERO))
        stats = scratch + arg(args, a.T_STATS) + panel * NR * 8
        fill(stats, NV, MINUS_INF)
        fill(stats + NR * 4, NV, arg(args, a.ZERO))

    @device(9)
    def masked_scores(args, scratch, panel, limits, n, begin, end, inner_begin, inner_end):  # type: ignore[no-untyped-def]
        """S^T of keys n + [begin, end), and their part of the running maximum; every row sees all of
        [inner_begin, inner_end)."""
        k, s = scratch + arg(args, a.T_K), scratch + arg(args, a.T_S)
        q, bmax = scratch + arg(args, a.T_Q) + panel * Q_PANEL, scratch + arg(args, a.T_BLOCK) + NR * 4
        trips = (arg(args, a.HEAD_DIM) + 4 * PACK - 1) // (4 * PACK)
        if inner_begin > begin:
            groups = (inner_begin - begin) // MR
            scores_bounded(k + begin * K_BYTES, q, s + begin * NR * 4, bmax, trips, groups, limits, n + begin)
        if inner_end > inner_begin:
            groups = (inner_end - inner_begin) // MR
            scores(k + inner_begin * K_BYTES, q, s + inner_begin * NR * 4, bmax, trips, groups)
        if end > inner_end:
            groups = (end - inner_end) // MR
            scores_bounded(
                k + inner_end * K_BYTES, q, s + inner_end * NR * 4, bmax, trips, groups, limits, n + inner_end
            )

    @device(8)
    def finalize_panel(args, scratch, dst, lse, head, row, row_end, panel):  # type: ignore[no-untyped-def]
        o, stats = (
            scratch + arg(args, a.T_O) + panel * O_PANEL,
            scratch + arg(args, a.T_STATS) + panel * NR * 8,
        )
        stride, sink = arg(args, a.OUT_ROW), MINUS_INF
        if arg(args, a.SINKS) != 0:
            sink = load_i32(arg(args, a.SINKS) + 4 * head)
        for lane in range(0, NR, LANES):
            rows = least(LANES, row_end - row - lane)
            if rows > 0:
                at = stats + lane * 4
                if lse != 0 or arg(args, a.SINKS) != 0:
                    finish_stats(at, arg(args, a.SCALE), sink)
                if arg(args, a.DROP) != 0:
                    scale_divisor(at, arg(args, a.DROP_KEPT))
                finalize(o + lane * 4, at, dst + (row + lane) * stride, stride, rows, arg(args, a.HEAD_DIM_V))
                if lse != 0:
                    store_lse(at, lse + (row + lane) * 4, rows)

    @device(8)
    def attend_block(args, scratch, v, panels, heads, n, first, last):  # type: ignore[no-untyped-def]
        """One key block, loaded, against every panel of the item that it touches."""
        item, changes = scratch + arg(args, a.T_ITEM), arg(args, a.PASS)
        row_0, row_end, head = arg(item, a.I_ROW), arg(item, a.I_ROW_END), arg(item, a.I_HEAD)
        start, live = arg(item, a.I_START), arg(item, a.I_LIVE)
        lo_shift, hi_shift = arg(item, a.I_LO_SHIFT), arg(item, a.I_HI_SHIFT)
        plane_0 = arg(item, a.I_BATCH) * arg(args, a.NUM_KV_HEADS) * arg(args, a.GROUP)
        bad = load_values(args, scratch, v, first, last)
        for i_p in range(panels):
            row = row_0 + i_p * NR
            end_row = least(row + NR, row_end) - 1
            # block_range: groups of keys some row sees, and inside them those that every row sees
            lo, hi = greatest(first, row + lo_shift) - n, least(last, end_row + hi_shift) - n
            if hi <= lo:
                continue
            seen_by_all = greatest(start, end_row + lo_shift) - n
            all_end = least(live, row + hi_shift) - n
            lane_limits = scratch + arg(args, a.T_LIMITS) + i_p * NR * 8
            for i_h in range(heads):
                panel, kind = i_h * panels + i_p, a.PLAIN
                if changes != 0:
                    kind = load_i8(scratch + arg(args, a.T_KINDS) + panel)
                if kind == a.UNSEEN:
                    continue
                step = MR if kind == a.PLAIN else STEP
                begin, end = lo // step * step, (hi + step - 1) // step * step
                top = scratch + arg(args, a.T_BLOCK) + NR * 4
                fill(top, NV, MINUS_INF)
                if kind == a.PLAIN:
                    inner_begin = least(greatest((seen_by_all + MR - 1) // MR * MR, begin), end)
                    inner_end = least(greatest(all_end // MR * MR, inner_begin), end)
                    masked_scores(args, scratch, panel, lane_limits, n, begin, end, inner_begin, inner_end)
                else:
                    masked_scores(args, scratch, panel, lane_limits, n, begin, end, begin, end)
                    fill(top, NV, MINUS_INF)
                    bounded = 1 if begin < seen_by_all or end > all_end else 0
                    call_pass(
                        changes, args, scratch, a.CHANGE_SCORES, head + i_h, i_p, n, begin, end, bounded
                    )
                s, block = scratch + arg(args, a.T_S) + begin * NR * 4, scratch + arg(args, a.T_BLOCK)
                p = scratch + arg(args, a.T_P) + begin // PACK * NR * 4
                stats = scratch + arg(args, a.T_STATS) + panel * NR * 8
                online_softmax(s, p, (end - begin) // 4, block, stats, arg(args, a.SCALE_LOG2))
                if arg(args, a.DROP) != 0:
                    plane = plane_0 + head + i_h
                    call_dropout(arg(args, a.DROP), args, p, plane, row, n + begin, end - begin, PACK)
                o = scratch + arg(args, a.T_O) + panel * O_PANEL
                values = scratch + arg(args, a.T_V) + begin // PACK * V_BYTES
                trips, channels = (end - begin) // KEYS_PER_TRIP, (arg(args, a.HEAD_DIM_V) + MR - 1) // MR
                accumulate(values, p, trips, o, block, channels)
                if bad != 0:
                    bad_begin, bad_end = greatest(begin, first - n), least(end, last - n)
                    add_bad_rows(args, scratch, v, head + i_h, i_p, panel, n, bad_begin, bad_end)

    @device(5)
    def limit_rows(args, scratch, panels, start, live):  # type: ignore[no-untyped-def]
        """The limits of the item's rows within the keys [start, live)."""
        item, limits = scratch + arg(args, a.T_ITEM), scratch + arg(args, a.T_LIMITS)
        row_0, row_end = arg(item, a.I_ROW), arg(item, a.I_ROW_END)
        lo_shift, hi_shift = arg(item, a.I_LO_SHIFT), arg(item, a.I_HI_SHIFT)
        store_i64(item + 8 * a.I_START, start)
        store_i64(item + 8 * a.I_LIVE, live)
        for i_p in range(panels):
            fill_limits(limits + i_p * NR * 8, row_0 + i_p * NR, row_end - 1, lo_shift, hi_shift, start, live)

    @device(8)
    def attend_interval(args, scratch, k, v, panels, heads, start, live):  # type: ignore[no-untyped-def]
        """The keys [start, live) of the item, block by block."""
        item, block_n = scratch + arg(args, a.T_ITEM), arg(args, a.BLOCK_N)
        limit_rows(args, scratch, panels, start, live)
        key_lo = greatest(start, arg(item, a.I_ROW) + arg(item, a.I_LO_SHIFT))
        key_hi = least(live, arg(item, a.I_ROW_END) - 1 + arg(item, a.I_HI_SHIFT))
        for i_n in range(key_lo // block_n, (key_hi + block_n - 1) // block_n):
            n = i_n * block_n
            first, last = greatest(n, key_lo), least(n + block_n, key_hi)
            if last <= first:
                continue
            store_i64(item + 8 * a.I_KEY, n)
            if arg(args, a.PAGE_TABLE) != 0:
                found = find_pages(args, scratch, first, last)
                if found < last:
                    last = key_hi = found
                    limit_rows(args, scratch, panels, start, found)
                    if last <= first:
                        continue
            if arg(args, a.PASS) != 0:
                store_i64(item + 8 * a.I_FIRST, first)
                store_i64(item + 8 * a.I_LAST, last)
                call_pass(arg(args, a.PASS), args, scratch, a.START_BLOCK, 0, 0, 0, 0, 0, 0)
                if arg(item, a.I_ANY) == 0:
                    continue
            load_keys(args, scratch, k, first, last)
            attend_block(args, scratch, v, panels, heads, n, first, last)

    @cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy", forceinline=True)
    def kernel(args, number, scratch):  # type: ignore[no-untyped-def]
        others, chunks, hkv = arg(args, a.OTHERS), arg(args, a.CHUNKS), arg(args, a.NUM_KV_HEADS)
        group = arg(args, a.GROUP)
        rest = number % others
        i_hkv, i_b, i_m = (
            rest // chunks % hkv,
            rest // chunks // hkv,
            arg(args, a.ROW_BLOCKS) - 1 - number // others,
        )
        # The last rows see the most keys; packed members come with a table, the most work first.
        entry = 0
        if arg(args, a.MEMBERS) != 0:
            entry = arg(args, a.MEMBERS) + number // others * 12
            i_b = load_i32(entry)
        i_t, first_q, first_k, seqlen_q, start, live = stand(args, scratch, i_b)
        head = i_hkv * group + rest % chunks * arg(args, a.HEADS)
        heads = least(arg(args, a.HEADS), (i_hkv + 1) * group - head)
        # Row blocks of interval lists are cut again into items, so that an item has one list.
        span = arg(args, a.ROW_PANELS) * NR
        row_0, row_end, i_r = i_m * span, seqlen_q, 0
        if arg(args, a.INTERVALS) != 0:
            per_list = (arg(args, a.INTERVAL_ROWS) + span - 1) // span
            i_r = i_m // per_list
            row_0 = i_r * arg(args, a.INTERVAL_ROWS) + i_m % per_list * span
            row_end = least(seqlen_q, (i_r + 1) * arg(args, a.INTERVAL_ROWS))
        row_end = least(row_0 + span, row_end)
        if arg(args, a.MEMBERS) != 0:
            row_0, row_end = load_i32(entry + 4), least(load_i32(entry + 8), seqlen_q)
        if row_end <= row_0:
            return
        panels = (row_end - row_0 + NR - 1) // NR

        fill(scratch + arg(args, a.T_ZERO), WIDE_BYTES // (LANES * 4), arg(args, a.ZERO))
        item = scratch + arg(args, a.T_ITEM)
        store_i64(item + 8 * a.I_HEAD, head)
        store_i64(item + 8 * a.I_HEADS, heads)
        store_i64(item + 8 * a.I_ROW, row_0)
        store_i64(item + 8 * a.I_PANELS, panels)
        store_i64(item + 8 * a.I_ROW_END, row_end)
        q = arg(args, a.Q) + i_t * arg(args, a.Q_BATCH) + first_q * arg(args, a.Q_ROW)
        for i_p in range(panels):
            for i_h in range(heads):
                q_head = q + (head + i_h) * arg(args, a.Q_HEAD)
                start_panel(args, scratch, q_head, row_0 + i_p * NR, row_end, i_h * panels + i_p)
        if arg(args, a.PASS) != 0:
            call_pass(arg(args, a.PASS), args, scratch, a.START_ITEM, 0, 0, 0, 0, 0, 0)

        k, v = key_rows(args, i_t, i_hkv, first_k)
        pairs, count = arg(args, a.INTERVALS), 1
        if pairs != 0:
            count = arg(args, a.INTERVAL_COUNT)
            pairs += i_b * arg(args, a.INTERVALS_BATCH) + head * arg(args, a.INTERVALS_HEAD)
            pairs += i_r * arg(args, a.INTERVALS_BLOCK)
        for t in range(count):
            begin, end = start, live
            if pairs != 0:
                begin, end = (
                    greatest(start, load_i32(pairs + 8 * t)),
                    least(live, load_i32(pairs + 8 * t + 4)),
                )
            if begin < end:
                attend_interval(args, scratch, k, v, panels, heads, begin, end)

        out = arg(args, a.OUT) + i_t * arg(args, a.OUT_BATCH) + first_q * arg(args, a.OUT_ROW)
        lse_row = arg(args, a.LSE) + 4 * (i_t * arg(args, a.LSE_BATCH) + first_q)
        for i_p in range(panels):
            for i_h in range(heads):
                lse = lse_row + (head + i_h) * arg(args, a.LSE_HEAD) * 4 if arg(args, a.LSE) != 0 else 0
                dst = out + (head + i_h) * arg(args, a.OUT_HEAD)
                finalize_panel(
                    args, scratch, dst, lse, head + i_h, row_0 + i_p * NR, row_end, i_h * panels + i_p
                )

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
        blocks = (config.block_n, cut.heads, cut.chunks, cut.row_panels, cut.row_blocks)
        tail = array("q", (*blocks, cut.items // cut.row_blocks, 0, *tiles[:-1])).tobytes()
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
    left, right = a.window_sides(args)
    keys = seqlen_k
    if args.page_table is not None:
        seqlen_k *= args.page_table.shape[1]
        keys = int(cast("Tensor", args.kv_lens).max())  # a table may have room for far more
    work_us = a.estimated_us(q.shape, keys, head_dim + head_dim_v, left, right, args)
    threads = 1 if work_us < a.LEND_FROM_US else torch.get_num_threads()
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
    left, right = a.window_sides(args)
    work_us = a.estimated_us(q.shape, k.shape[2], head_dim + v.shape[3], left, right, args)
    threads = 1 if work_us < a.LEND_FROM_US else torch.get_num_threads()
    cut = prepared.dense(batch, seqlen_q, threads)
    return _job(prepared, cut, threads, work_us, q, k, v, out, lse, args, [], 0)


def repeat(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """What runs calls of these sizes, of which one has been made; None if there is nothing to run."""
    from polyflash.backends.cpu import forward_repeat

    return forward_repeat.Repeat(launch, args) if q.numel() and v.numel() and _is_bare(args) else None


def _is_bare(args: Arguments) -> bool:
    """Has the call no operand, and no page table?"""
    return not a.any_table(args) and args.page_table is None and args.sinks is None


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
    _, num_q_heads, seqlen_q, head_dim = q.shape
    _, num_kv_heads, seqlen_k, head_dim_v = v.shape
    left, right = a.window_sides(args)
    if args.page_table is not None:
        seqlen_k *= args.page_table.shape[1]
    size = q.element_size()
    q_b, q_h, q_r, q_d = q.stride()
    k_b, k_h, k_r, k_d = k.stride()
    v_b, v_h, v_r, v_d = v.stride()
    o_b, o_h, o_r, _ = out.stride()
    if head_dim == 1:
        q_d = k_d = 1
    if head_dim_v == 1:
        v_d = 1
    scale = head_dim**-0.5 if args.scale is None else args.scale
    does = a.passes(args, scale)
    head = a.pack_head(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr() if args.need_lse else 0,
        *(q_b * size, q_h * size, q_r * size, q_d * size),
        *(k_b * size, k_h * size, k_r * size, k_d * size),
        *(v_b * size, v_h * size, v_r * size, v_d * size),
        *(o_b * size, o_h * size, o_r * size, num_q_heads * seqlen_q, seqlen_q),
        *(num_kv_heads, num_q_heads // num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v),
        *a.softmax_scale(scale, does),
        *(left, right, args.offset is not None, a.far_offset(args.offset)),
        a.sinks_address(args.sinks, kept),
        prepared.score_pass(cut.nv) if does else 0,
    )
    middle = a.NO_OPERANDS
    if does or a.any_table(args):
        drop = prepared.dropout(cut.nv) if args.dropout_p else 0
        middle = a.operands(args, scale, does, kept, members, drop, k)
    words = array("q", head + middle + cut.tail)
    return Job(cut.kernel, words, cut.items, threads, cut.scratch_bytes, work_us >= a.WAKE_FROM_US)


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
