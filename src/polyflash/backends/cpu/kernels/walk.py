"""Device functions of a walk over key blocks: which keys each row sees, and which of a block's keys a panel
must look at. The forward, statistics and backward kernels share them; so does what they do to a tile of
scores, the pass over them (scores.py) included.

A panel is `panel_rows` rows of one head. The item says which rows and keys stand at hand: rows
[row, row_end), keys [start, live) of one interval, and of these [first, last) in the block that begins at
`key`.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import configs, loading
from polyflash.backends.cpu.configs import KernelKey
from polyflash.backends.cpu.intrinsics import (
    call_native,
    greatest,
    least,
    load_i8,
    load_i32,
    merged,
    namespace,
)
from polyflash.backends.cpu.kernels import integer
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import CHANGE_SCORES, FORWARD, PLAIN, START_BLOCK, START_ITEM, UNSEEN

MINUS_INF = 0xFF800000  # bits of float32

device = Blocks(FORWARD).device


def tools(key: KernelKey, stage: Any) -> Any:
    """All that the kernels of `key`'s tiles share: the walk, its panels and `loading`."""
    shared = loading.loaders(key, stage)
    walk = walks(key, stage)
    made = panels(key, stage, shared, walk)
    return merged(shared, walk, integer.panels(key, stage, made) if key.integer else made)


def words_of(key: KernelKey) -> Blocks:
    """The words of a forward call of `key`."""
    return integer.BLOCK if key.integer else Blocks(FORWARD)


def walks(key: KernelKey, stage: Any) -> Any:
    """Make the functions of the walk, down to one tile."""
    call_pass = call_native(9)
    NR, MR, STEP = key.panel_rows, key.group_keys, configs.STEP

    @device
    def row_limits(tile, start, live):
        """Every row's first key and number of keys, of keys [start, live); a lane past the last row has those
        of the last."""
        item, limits = tile.item, tile.limits
        row_0, row_end, lo_shift, hi_shift = item.row, item.row_end, item.lo_shift, item.hi_shift
        item.start = start
        item.live = live
        for i_p in range(item.panels):
            panel_limits, row = limits + i_p * NR * 8, row_0 + i_p * NR
            stage.row_limits(panel_limits, row, row_end - 1, lo_shift, hi_shift, start, live)

    @device
    def key_span(tile):
        """First and end of the interval's keys that some row of the item sees."""
        item = tile.item
        return (
            greatest(item.start, item.row + item.lo_shift),
            least(item.live, item.row_end - 1 + item.hi_shift),
        )

    @device
    def block_keys(tile, i_n, key_lo, key_hi):
        """Begins key block i_n; returns the first and end of its keys within [key_lo, key_hi)."""
        item, block_n = tile.item, tile.args.block_n
        n = i_n * block_n
        item.key = n
        return greatest(n, key_lo), least(n + block_n, key_hi)

    @device
    def start_pass(tile):
        """Tells the pass over scores, if there is one, that an item begins."""
        args = tile.args
        if args.score_pass != 0:
            call_pass(args.score_pass, args, tile, START_ITEM, 0, 0, 0, 0, 0, 0)

    @device
    def begin_block(tile, first, last):
        """Settles the block's keys; returns 0 if the pass over scores lets no row see any."""
        args, item = tile.args, tile.item
        item.first = first
        item.last = last
        if args.score_pass == 0:
            return 1
        call_pass(args.score_pass, args, tile, START_BLOCK, 0, 0, 0, 0, 0, 0)
        return item.any_seen

    @device
    def panel_kind(tile, panel):
        """How the block touches a panel, as the pass says: UNSEEN, CHANGED, or PLAIN if no score changes."""
        return load_i8(tile.kinds + panel) if tile.args.score_pass != 0 else PLAIN

    @device
    def block_range(tile, i_p, kind):
        """Range of keys of the block that the rows of panel i_p look at, counted from its start and in
        whole groups: some row sees a key of [begin, end), every row sees all of [inner_begin, inner_end)."""
        item = tile.item
        n, row = item.key, item.row + i_p * NR
        end_row = least(row + NR, item.row_end) - 1
        lo = greatest(item.first, row + item.lo_shift) - n
        hi = least(item.last, end_row + item.hi_shift) - n
        if hi <= lo or kind == UNSEEN:
            return 0, 0, 0, 0
        step = MR if kind == PLAIN else STEP
        begin, end = lo // step * step, (hi + step - 1) // step * step
        seen_by_all = greatest(item.start, end_row + item.lo_shift) - n
        all_end = least(item.live, row + item.hi_shift) - n
        inner_begin = least(greatest((seen_by_all + MR - 1) // MR * MR, begin), end)
        inner_end = least(greatest(all_end // MR * MR, inner_begin), end)
        return begin, end, inner_begin, inner_end

    @device
    def change_scores(tile, head, i_p, begin, end, inner_begin, inner_end):
        """The pass over a tile whose scores stand in scratch."""
        args, n = tile.args, tile.item.key
        bounded = 1 if inner_end - inner_begin < end - begin else 0
        call_pass(args.score_pass, args, tile, CHANGE_SCORES, head, i_p, n, begin, end, bounded)

    @device
    def interval_list(args, i_b, head, i_r):
        """Address of the intervals of row block i_r; 0: its rows see all keys."""
        if args.intervals == 0:
            return 0
        batch = args.intervals + i_b * args.intervals_batch
        return batch + head * args.intervals_head + i_r * args.intervals_block

    @device
    def interval(pairs, t, start, live):
        """First and end of interval t of a list, within the keys [start, live)."""
        if pairs == 0:
            return start, live
        return greatest(start, load_i32(pairs + 8 * t)), least(live, load_i32(pairs + 8 * t + 4))

    keys = row_limits, key_span, block_keys, block_range, interval_list, interval
    scores = start_pass, begin_block, panel_kind, change_scores
    return namespace(*keys, *scores)


def panels(key: KernelKey, stage: Any, shared: Any, walk: Any) -> Any:
    """Make those that bring Q in and multiply it: of the forward and statistics kernels."""
    LANES, NR, NV, MR, PACK = key.lanes, key.panel_rows, key.nv, key.group_keys, key.pack
    INTEGER, Q_PANEL, K_BYTES = key.integer, key.q_panel_bytes, key.k_row_bytes
    PER_VECTOR = LANES if key.integer else PACK * LANES  # elements of a staged row
    device = words_of(key).device
    floats_at = integer.places(key) if key.integer else None

    @device
    def pack_panel(tile, src, row, row_end, panel):
        """Q^T of the rows from `row` on of the head whose row 0 is at `src`."""
        args = tile.args
        flip = args.sign | (args.sign >> 16 if PACK == 2 else 0)
        staged, q_panel = tile.stage, tile.q + panel * Q_PANEL
        stride, count = args.q_row, args.head_dim
        vectors = (count + PER_VECTOR - 1) // PER_VECTOR
        for lane in range(0, NR, LANES):
            rows = least(LANES, row_end - row - lane)
            if rows > 0:
                shared.load_tile(tile, src + (row + lane) * stride, stride, args.q_dim, rows, count, staged)
                if INTEGER:
                    floats = floats_at(tile, panel) + lane * 4
                    stage.quantize_query(staged, vectors, q_panel + lane * 4, floats, flip)
                else:
                    stage.pack_query(staged, vectors, q_panel + lane * 4, flip)

    @device
    def key_products(tile, panel, limits, begin, end):
        """S^T of keys [begin, end) of the block, and their part of its maximum; outside a row's limits scores
        are -inf, before the maximum is taken, unless `limits` is 0."""
        if begin < end:
            args = tile.args
            k, q, s = tile.k + begin * K_BYTES, tile.q + panel * Q_PANEL, tile.s + begin * NR * 4
            top, trips = tile.block + NR * 4, (args.head_dim + 4 * PACK - 1) // (4 * PACK)
            if limits != 0:
                n = tile.item.key
                stage.scores_bounded(k, q, s, top, trips, (end - begin) // MR, limits, n + begin)
            else:
                stage.scores(k, q, s, top, trips, (end - begin) // MR)

    multiply = integer.products(key, stage) if key.integer else key_products

    @device
    def make_scores(tile, panel, head, i_p, kind, begin, end, inner_begin, inner_end):
        """The scores of one tile, as softmax takes them, and their maximum per row."""
        top = tile.block + NR * 4
        stage.fill(top, NV, MINUS_INF)
        if kind == PLAIN:
            limits = tile.limits + i_p * NR * 8
            multiply(tile, panel, limits, begin, inner_begin)
            multiply(tile, panel, 0, inner_begin, inner_end)
            multiply(tile, panel, limits, inner_end, end)
        else:
            multiply(tile, panel, 0, begin, end)
            if INTEGER:
                stage.scale_scores(tile.s + begin * NR * 4, end - begin, tile.q + panel * Q_PANEL)
            stage.fill(top, NV, MINUS_INF)  # that of raw scores; the pass takes that of changed, bounded ones
            walk.change_scores(tile, head, i_p, begin, end, inner_begin, inner_end)

    return namespace(pack_panel, make_scores)
