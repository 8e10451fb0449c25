"""Keys and values as codes, in tiles of at most 8 rows: device functions of the decode kernel.

A block of keys is walked in a phase of K and one of V, and in each the rows of the next block are prefetched;
or, of one row, V of a block and K of the next are read by turns, see decode_codes_turns.py.
Scales of channels of K are folded into Q, anew for every run of keys that share them, each prepared a run
ahead; those of keys are copied, through pages too, and join scores and weights a vector at a time.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.decode_codes_configs import CodesKey, FloatsKey
from polyflash.backends.cpu.decode_configs import SHORT
from polyflash.backends.cpu.intrinsics import greatest, least, load_i32, quotient, word
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import DECODE, K_BATCH, V_BATCH
from polyflash.quant.scheme import Codes

device = Blocks(DECODE).device

STEP, MINUS_INF, ONE = configs.STEP, 0xFF800000, 0x3F800000  # bits of float32
MADE = 3  # what `ready` is if the scores of the first block are made; no rows are listed then
BEYOND = 1 << 40  # more keys than there are
KEYS_AHEAD = 512  # of one head, whose scales and shifts are prefetched
KEYS_TOGETHER = 32  # whose weighted values are summed in registers


def walk(key: CodesKey, stage: Any, list_rows: Any) -> Any:
    """A device function of 11 arguments, see `attend_split`."""
    KEYS, VECTOR, JOINED = key.lanes // key.rows, key.lanes * 4, key.joined
    NEAR, SPARE = key.near, key.spare
    FLOATS, TWICE, entry_at = isinstance(key, FloatsKey), key.bytes or key.split, entries()
    TURNS, RUN, WHOLE, WEIGHING = key.by_turns, key.run, key.whole_rows, key.rows_weighing
    start_head, score_block, prepare_block = _scoring(key, stage, entry_at)
    weigh_block = _weighing(key, stage, entry_at)
    add_values = _adding(key, stage) if FLOATS else None

    @device
    def list_both(tile, k, v, k_rows, v_rows, first, last):
        """The rows of K and V of a block and the first head."""
        list_rows(tile, k, K_BATCH, k_rows, first, last)
        list_rows(tile, v, V_BATCH, v_rows, first, last)

    @device
    def lists(tile, ready):
        """Lists of K and V at hand, and of those that are read next: two slots by turns."""
        size, k_rows, v_rows = (tile.args.block_n + SPARE) * 8, tile.k_rows, tile.v_rows
        own, later = (ready - 1) * size, (2 - ready) * size
        return k_rows + own, v_rows + own, k_rows + later, v_rows + later

    @device
    def attend_split(tile, k, v, key_lo, key_hi, all_lo, all_hi, state, heads, ready, beyond):
        """The keys [key_lo, key_hi) of `heads` kv heads, block by block, whatever all rows see of them; while
        one is read, the next rows of K and V are prefetched. `ready` is 1 or 2 if the rows of the first are
        listed, in slot 0 or 1, or MADE, as those after key_hi are afterwards, as far as there are keys
        before `beyond`. Short blocks that one row sees whole, as it does the next, are read by turns, and
        nothing is prefetched or listed for those that follow."""
        args, block, block_n = tile.args, tile.block, tile.args.block_n
        ahead = greatest(KEYS_AHEAD // heads, block_n)
        k_row, v_row = word(args, K_BATCH + 2), word(args, V_BATCH + 2)
        whole, turns, k_step, v_step = 0, 0, 0, 0
        if args.page_table == 0 and heads == 1:
            whole = least(key_hi, beyond - block_n) // block_n  # below it: whole, as is the one behind
            k_step, v_step = block_n * k_row, block_n * v_row
            if TURNS and block_n <= SHORT and RUN % block_n == 0:
                turns = whole
        for i_h in range(heads):
            if ready != MADE:
                start_head(tile, i_h, key_lo, ahead)
        i_n, end_n = key_lo // block_n, (key_hi + block_n - 1) // block_n
        while i_n < end_n:
            first, last = greatest(i_n * block_n, key_lo), least((i_n + 1) * block_n, key_hi)
            begin, end = first // STEP * STEP, (last + STEP - 1) // STEP * STEP
            vectors, scored = (end - begin) // KEYS, ready == MADE
            by_turns = i_n < turns and first == i_n * block_n
            if ready == 0 or (scored and not by_turns):
                list_both(tile, k, v, tile.k_rows, tile.v_rows, first, last)
                ready = 1
            for i_h in range(heads):
                stats, (own_k, own_v, later_k, later_v) = state + i_h * args.partial_bytes, lists(tile, ready)
                if TURNS and by_turns:
                    later_k, later_v = own_k, own_v  # no list goes on: requests are for rows at hand, or any
                elif i_n < whole and first == i_n * block_n:
                    stage.list_next(own_k, later_k, k_step, own_v, later_v, v_step, block_n)
                else:
                    if i_h + 1 < heads:
                        stage.add_addresses(own_k, later_k, word(args, K_BATCH + 1), end - begin, tile.zero)
                        stage.add_addresses(own_v, later_v, word(args, V_BATCH + 1), end - begin, tile.zero)
                    elif last < beyond:
                        end_next = least((last // block_n + 1) * block_n, beyond)
                        list_both(tile, k, v, later_k, later_v, last, end_next)
                    if NEAR > 0:  # as `list_next`
                        stage.add_addresses(own_v, own_k + (end - begin) * 8, 0, NEAR, tile.zero)
                        stage.add_addresses(later_k, own_v + (end - begin) * 8, 0, NEAR, tile.zero)
                if not (TURNS and scored):
                    stage.fill(block, 1, MINUS_INF)
                    score_block(tile, first, last, begin, i_h, own_k, later_k, 2 * k_step, ahead)
                others = weigh_block(tile, block, first, last, begin, vectors, i_h, stats, later_v, ahead)
                o, sums, count = stats + 2 * VECTOR, block + 2 * VECTOR, (end - begin) // JOINED
                if TURNS and by_turns:
                    prepare_block(tile, last, last + block_n, ahead)
                    of_v = (v + first * v_row, v_row, tile.p, o, sums)
                    of_k = (k + last * k_row, k_row, tile.q, tile.s, tile.stage)
                    stage.add_and_score(*of_v, *of_k, block, vectors, args.score_factor, args.score_cap)
                elif FLOATS:
                    add_values(tile, own_v, o, block, vectors, later_v, all_lo < all_hi)
                else:
                    later_v += vectors * 8 * WEIGHING
                    if WHOLE and block_n > SHORT:
                        stage.accumulate_whole_rows(own_v, tile.p, o, block, sums, count, later_v, 2 * v_step)
                    else:
                        stage.accumulate_codes(own_v, tile.p, o, block, sums, count, later_v, 2 * v_step)
                if TWICE and others != 0:
                    stage.weigh_others(tile.addresses, tile.p, sums, vectors)
                    stage.fill(block, 1, ONE)
                    stage.accumulate_codes(own_v, tile.p, o, block, sums, count, own_v, 0)
                ready = MADE if by_turns else 3 - ready
            i_n += 1
        return ready

    return attend_split


def _scoring(key: CodesKey, stage: Any, entry_at: Any) -> tuple[Any, Any, Any]:
    """Three device functions of 4, 9 and 4 arguments: see `start_head`, `score_block`, `prepare_block`."""
    K_SCALE, K_SHIFT, K_TOKENS = DECODE.k_scale, DECODE.k_shift, key.k.scale.tokens
    ROWS, KEYS, WIDTH = key.rows, key.lanes // key.rows, key.key_groups
    CHANNEL_SCALES, SHIFTED, RUN = key.scaled, key.k.shift is not None, key.run
    SHIFT_TOKENS, FOLDED = 0 if key.k.shift is None else key.k.shift.tokens, CHANNEL_SCALES or SHIFTED
    copy_keys = _copying(stage, entry_at, key.k)

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
    def prepare_run(tile, q, first, last, i_h, ahead):
        """At `q` the rows of Q for the keys [first, last), which share what is folded into them."""
        if FOLDED:
            fold(tile, q, first, i_h, ahead)
        if CHANNEL_SCALES:  # after the fold, which takes what the last one left
            scale(tile, q, last, i_h, ahead)

    @device
    def score_block(tile, first, last, begin, i_h, k_rows, later, further, ahead):
        """Scores of a block and head, run by run of keys that share what is folded into Q."""
        args, s, j, run = tile.args, tile.s, first, BEYOND
        q, top = tile.q + i_h * args.q_tile, tile.block
        if RUN > 0:
            run = RUN
        elif args.page_table != 0:
            run = args.page_size
        if not CHANNEL_SCALES:
            at = tile.stage + (first - begin) * WIDTH * 4
            copy_keys(tile, K_SCALE, K_TOKENS, at, first, last, i_h, WIDTH, ahead)
        while j < last:
            end = least(last, (quotient(j, run) + 1) * run) if run < BEYOND else last
            prepare_run(tile, q, j, end, i_h, ahead)
            at = j // STEP * STEP
            vectors, far = ((end + STEP - 1) // STEP * STEP - at) // KEYS, (at - begin) * 8
            s_at, scales = s + (at - begin) * ROWS * 4, tile.stage + (at - begin) * WIDTH * 4
            keys, seen = (k_rows + far, q, s_at, top, vectors), (tile.limits, at)
            change = (args.score_factor, args.score_cap)
            stage.scores_of_codes(*keys, *seen, *change, scales, later + far, further)
            j = end

    @device
    def prepare_block(tile, first, last, ahead):
        """Q, and scales of keys, of a whole block and one head, whose keys share what is folded into Q."""
        if not CHANNEL_SCALES:
            copy_keys(tile, K_SCALE, K_TOKENS, tile.stage, first, last, 0, WIDTH, ahead)
        prepare_run(tile, tile.q, first, last, 0, ahead)

    @device
    def start_head(tile, i_h, j, ahead):
        """Q of a head, before the first of its keys, j."""
        q = tile.q + i_h * tile.args.q_tile
        scale(tile, q, j, i_h, ahead)
        if not FOLDED:
            fold(tile, q, j, i_h, ahead)

    return start_head, score_block, prepare_block


def _weighing(key: CodesKey, stage: Any, entry_at: Any) -> Any:
    """A device function of 10 arguments that makes the scores of a block weights of its codes; it returns
    whether it leaves others: of the other sign, if weights are bytes, or parts of steps. Rows of V that are
    read `later` are prefetched."""
    VECTOR, BYTES, SPLIT, FLOATS = key.lanes * 4, key.bytes, int(key.split), isinstance(key, FloatsKey)
    V_SCALE, V_SHIFT, V_TOKENS = DECODE.v_scale, DECODE.v_shift, key.v.scale.tokens
    WIDTH, KEY_WIDTH, SHIFTED = key.live_groups, key.key_groups, key.v.shift is not None
    copy_values = _copying(stage, entry_at, key.v)

    @device
    def copy_scales(tile, first, last, begin, i_h, ahead):
        """Copies V's scales and shifts of a block; returns where its first are, and bytes between both."""
        block_n = tile.args.block_n
        scales, size = tile.stage + block_n * KEY_WIDTH * 4, block_n * WIDTH * 4
        at = scales + (first - begin) * WIDTH * 4
        copy_values(tile, V_SCALE, V_TOKENS, at, first, last, i_h, WIDTH, ahead)
        if SHIFTED:
            copy_values(tile, V_SHIFT, V_TOKENS, at + size, first, last, i_h, WIDTH, ahead)
        return scales, size

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
        stage.weigh_codes(s, held, p, sums, vectors, scales, scales + size, later)
        return SPLIT

    return weigh_block


def _adding(key: CodesKey, stage: Any) -> Any:
    """A device function of 7 arguments that adds the weighted values of a block to O, some keys at a time, as
    longer sums round more often. Unless all is `seen` by all rows, every weight is looked at."""
    KEYS, ROWS, WIDTH = key.lanes // key.rows, key.rows, key.live_groups
    KEY_WIDTH, TOGETHER = key.key_groups, KEYS_TOGETHER * key.rows // key.lanes

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
