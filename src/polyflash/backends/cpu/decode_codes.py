"""Keys and values as codes, of at most 8 rows: device functions of the decode kernel.

A block of keys is walked in a phase of K and one of V, and in each the rows of the next block are prefetched.
Scales of channels of K are folded into Q, anew for every run of keys that share them, each prepared a run
ahead; those of keys are copied, through pages too, and join scores and weights a vector at a time.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.decode_codes_configs import CodesKey, FloatsKey
from polyflash.backends.cpu.intrinsics import greatest, least, load_i32, quotient, word
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import DECODE, K_BATCH, V_BATCH
from polyflash.quant.scheme import Codes

device = Blocks(DECODE).device

BEYOND = 1 << 40  # more keys than there are
KEYS_AHEAD = 512  # of one head, whose scales and shifts are prefetched
KEYS_TOGETHER = 32  # whose weighted values are summed in registers


def walk(key: CodesKey, stage: Any, list_rows: Any) -> Any:
    """A device function of 11 arguments, see `attend_split`."""
    K_SCALE, K_SHIFT, V_SCALE, V_SHIFT = DECODE.k_scale, DECODE.k_shift, DECODE.v_scale, DECODE.v_shift
    ROWS, KEYS, STEP, VECTOR = key.rows, key.lanes // key.rows, configs.STEP, key.lanes * 4
    LANES, MINUS_INF, ONE = key.lanes, 0xFF800000, 0x3F800000
    BYTES, JOINED, TWICE = key.bytes, key.joined, key.bytes or key.split
    KEY_SCALES = not key.scaled
    K_TOKENS, V_TOKENS = key.k.scale.tokens, key.v.scale.tokens
    SHIFT_TOKENS = 0 if key.k.shift is None else key.k.shift.tokens
    CHANNEL_SCALES, SHIFTED, V_SHIFTED = key.scaled, key.k.shift is not None, key.v.shift is not None
    FLOATS, KEY_WIDTH = isinstance(key, FloatsKey), key.key_groups  # scales of a key
    RUN, LENT, NEAR, FOLDED = key.run, key.lent, key.near, CHANNEL_SCALES or SHIFTED
    WIDTH = key.live_groups  # of V, scales of a key

    entry_at = entries()
    copy_keys, copy_values = (_copying(stage, entry_at, codes) for codes in (key.k, key.v))

    @device
    def list_both(tile, k, v, place, first, last):
        """The rows of K and V of a block and the first head; in two slots, that at hand and the next."""
        list_rows(tile, k, K_BATCH, tile.k_rows + place, first, last)
        list_rows(tile, v, V_BATCH, tile.v_rows + place, first, last)

    @device
    def scale(tile, q, j, i_h, ahead):
        """Prepare at `q` the next `fold`, of the keys that share j's scales of channels."""
        scales = later = tile.zero
        if CHANNEL_SCALES:
            last = tile.item.live - 1
            scales = entry_at(tile, K_SCALE, K_TOKENS, least(j, last), i_h)
            later = entry_at(tile, K_SCALE, K_TOKENS, least(j + ahead, last), i_h)
        stage.scale_query(q, scales, later)

    @device
    def fold(tile, q, j, i_h, ahead):
        """At `q` the rows of Q for the keys that share with j what is folded into Q."""
        shift = later = tile.zero
        if SHIFTED:
            shift = entry_at(tile, K_SHIFT, SHIFT_TOKENS, j, i_h)
            later = entry_at(tile, K_SHIFT, SHIFT_TOKENS, least(j + ahead, tile.item.live - 1), i_h)
        stage.fold_query(q, shift, later)

    @device
    def score_block(tile, q, first, last, begin, i_h, k_rows, later, top, v_later, ahead):
        """Scores of a block and head, run by run of keys that share what is folded into Q. `v_later` are rows
        of V to be asked for meanwhile."""
        args, s, j, run = tile.args, tile.s, first, BEYOND
        if RUN > 0:
            run = RUN
        elif args.page_table != 0:
            run = args.page_size
        if KEY_SCALES:
            at = tile.stage + (first - begin) * KEY_WIDTH * 4
            copy_keys(tile, K_SCALE, K_TOKENS, at, first, last, i_h, KEY_WIDTH, ahead)
        while j < last:
            end = least(last, (quotient(j, run) + 1) * run) if run < BEYOND else last
            if FOLDED:
                fold(tile, q, j, i_h, ahead)
            if CHANNEL_SCALES:  # after the fold, which takes what the last one left
                scale(tile, q, end, i_h, ahead)
            at = j // STEP * STEP
            vectors, far = ((end + STEP - 1) // STEP * STEP - at) // KEYS, (at - begin) * 8
            s_at, scales = s + (at - begin) * ROWS * 4, tile.stage + (at - begin) * KEY_WIDTH * 4
            keys, values = (k_rows + far, q, s_at, top, vectors), v_later + far * LENT // STEP
            seen, change = (tile.limits, at), (args.score_factor, args.score_cap)
            stage.scores_of_codes(*keys, *seen, *change, scales, later + far, values)
            j = end

    @device
    def copy_scales(tile, first, last, begin, i_h, ahead):
        """Copies V's scales and shifts of a block; returns where its first are, and bytes between both."""
        block_n = tile.args.block_n
        scales, size = tile.stage + block_n * KEY_WIDTH * 4, block_n * WIDTH * 4
        at = scales + (first - begin) * WIDTH * 4
        copy_values(tile, V_SCALE, V_TOKENS, at, first, last, i_h, WIDTH, ahead)
        if V_SHIFTED:
            copy_values(tile, V_SHIFT, V_TOKENS, at + size, first, last, i_h, WIDTH, ahead)
        return scales, size

    weigh_block = _weighing(key, stage, copy_scales)
    add_values = _adding(key, stage) if FLOATS else None

    @device
    def attend_split(tile, k, v, key_lo, key_hi, all_lo, all_hi, state, heads, ready, beyond):
        """The keys [key_lo, key_hi) of `heads` kv heads, block by block, whatever all rows see of them; while
        one is read, the next rows of K and V are prefetched. `ready` is 1 or 2 if the rows of the first are
        listed, in slot 0 or 1, as those after key_hi are afterwards, as far as there are keys before
        `beyond`."""
        args = tile.args
        block, block_n, slot_bytes = tile.block, args.block_n, (args.block_n + NEAR + LANES) * 8
        ahead = greatest(KEYS_AHEAD // heads, block_n)
        for i_h in range(heads):
            q = tile.q + i_h * args.q_tile
            scale(tile, q, key_lo, i_h, ahead)
            if not FOLDED:
                fold(tile, q, key_lo, i_h, ahead)
        i_n, end_n = key_lo // block_n, (key_hi + block_n - 1) // block_n
        while i_n < end_n:
            first, last = greatest(i_n * block_n, key_lo), least((i_n + 1) * block_n, key_hi)
            begin, end = first // STEP * STEP, (last + STEP - 1) // STEP * STEP
            vectors = (end - begin) // KEYS
            if ready == 0:
                list_both(tile, k, v, 0, first, last)
                ready = 1
            for i_h in range(heads):
                slot, stats = ready - 1, state + i_h * args.partial_bytes
                own, later = slot * slot_bytes, (1 - slot) * slot_bytes
                k_rows, v_rows = tile.k_rows, tile.v_rows
                own_k, own_v, later_k, later_v = k_rows + own, v_rows + own, k_rows + later, v_rows + later
                if i_h + 1 < heads:
                    stage.add_addresses(own_k, later_k, word(args, K_BATCH + 1), end - begin, tile.zero)
                    stage.add_addresses(own_v, later_v, word(args, V_BATCH + 1), end - begin, tile.zero)
                elif last < beyond:
                    list_both(tile, k, v, later, last, least((last // block_n + 1) * block_n, beyond))
                if NEAR > 0:  # behind each list the first rows of the next, for requests that run ahead of it
                    stage.add_addresses(own_v, own_k + (end - begin) * 8, 0, NEAR, tile.zero)
                    stage.add_addresses(later_k, own_v + (end - begin) * 8, 0, NEAR, tile.zero)
                stage.fill(block, 1, MINUS_INF)
                q, unasked = tile.q + i_h * args.q_tile, (end - begin) // STEP * (STEP - LENT) * 8
                score_block(tile, q, first, last, begin, i_h, own_k, later_k, block, own_v + unasked, ahead)
                others = weigh_block(tile, block, first, last, begin, vectors, i_h, stats, later_v, ahead)
                o, sums, count = stats + 2 * VECTOR, block + 2 * VECTOR, (end - begin) // JOINED
                if FLOATS:
                    add_values(tile, own_v, o, block, vectors, later_v, all_lo < all_hi)
                else:
                    later_v += vectors * 8 if BYTES else 0
                    stage.accumulate_codes(own_v, tile.p, o, block, sums, count, later_v)
                if TWICE and others != 0:
                    stage.weigh_others(tile.addresses, tile.p, sums, vectors)
                    stage.fill(block, 1, ONE)
                    stage.accumulate_codes(own_v, tile.p, o, block, sums, count, own_v)
                ready = 2 - slot
            i_n += 1
        return ready

    return attend_split


def _weighing(key: CodesKey, stage: Any, copy_scales: Any) -> Any:
    """A device function of 10 arguments that makes the scores of a block weights of its codes; it returns
    whether it leaves others: of the other sign, if weights are bytes, or parts of steps. Bytes prefetch rows
    of V that are read `later`."""
    VECTOR, BYTES, SPLIT, FLOATS = key.lanes * 4, key.bytes, int(key.split), isinstance(key, FloatsKey)

    @device
    def weigh_block(tile, block, first, last, begin, vectors, i_h, stats, later, ahead):
        s, p, held, sums = tile.s, tile.p, tile.addresses, tile.block + 2 * VECTOR
        scale = tile.args.scale_log2
        scales, size = copy_scales(tile, first, last, begin, i_h, ahead)
        if BYTES:
            shifts = scales + size
            return stage.weigh_scores(s, held, p, sums, vectors, scales, shifts, block, stats, scale, later)
        stage.online_softmax(s, vectors, block, stats, scale)
        if FLOATS:
            return 0
        stage.weigh_codes(s, held, p, sums, vectors, scales, scales + size)
        return SPLIT

    return weigh_block


def _adding(key: CodesKey, stage: Any) -> Any:
    """A device function of 7 arguments that adds the weighted values of a block to O, some keys at a time, as
    longer sums round more often. Unless all is `seen` by all rows, every weight is looked at."""
    KEYS, ROWS, WIDTH = key.lanes // key.rows, key.rows, key.live_groups
    KEY_WIDTH, TOGETHER, ONE = key.key_groups, KEYS_TOGETHER * key.rows // key.lanes, 0x3F800000

    @device
    def add_values(tile, v_rows, o, alpha, vectors, later, seen):
        weights, scales = tile.s, tile.stage + tile.args.block_n * KEY_WIDTH * 4
        while vectors > 0:
            some = least(vectors, TOGETHER)
            if seen:
                stage.accumulate_values(v_rows, weights, scales, o, alpha, some, later)
            else:
                stage.accumulate_seen_values(v_rows, weights, scales, o, alpha, some, later)
            stage.fill(alpha, 1, ONE)
            keys, vectors = some * KEYS, vectors - some
            v_rows, later = v_rows + keys * 8, later + keys * 8
            weights, scales = weights + keys * ROWS * 4, scales + keys * WIDTH * 4

    return add_values


def entries() -> Any:
    """A device function of 5 arguments, over tables of scales or shifts."""

    @device
    def entry_at(tile, table, tokens, j, i_h):
        """Address of what a table has for key j of head i_h of the item; of a page that is none, zeros."""
        args, head = tile.args, tile.item.head + i_h
        at = word(args, table) + head * word(args, table + 2)
        if args.page_table == 0:
            at += tile.item.batch * word(args, table + 1)
        else:
            row = args.page_table + tile.item.batch * args.page_table_batch
            i_page = quotient(j, args.page_size)
            page = load_i32(row + i_page * args.page_table_entry)
            if page < 0 or page >= args.num_pages:
                return tile.zero
            at += page * word(args, table + 1)
            j -= i_page * args.page_size
        return at if tokens == 0 else at + j // tokens * word(args, table + 3)

    return entry_at


def _copying(stage: Any, entry_at: Any, codes: Codes) -> Any:
    """A device function of 9 arguments, over the tables of such codes."""
    copied = stage.copy_entries if codes.tables == "float32" else stage.widen_entries

    @device
    def copy_entries(tile, table, tokens, dst, first, last, i_h, width, ahead):
        """`width` entries of each of the keys [first, last), as float32."""
        args, j = tile.args, first
        while j < last:
            end = last
            if args.page_table != 0:
                end = least(last, (quotient(j, args.page_size) + 1) * args.page_size)
            src = entry_at(tile, table, tokens, j, i_h)
            step = word(args, table + 3)
            if tokens == 0 or src == tile.zero:
                step = 0
            later = entry_at(tile, table, tokens, least(j + ahead, tile.item.live - 1), i_h)
            copied(src, step, end - j, dst + (j - first) * width * 4, width, later)
            j = end

    return copy_entries
