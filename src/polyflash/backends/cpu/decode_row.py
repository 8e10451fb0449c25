"""The rows of one kv head of whole tensors by turns: device functions of the decode kernel of at most 8 rows.

V of a block and K of the next are read by turns, a group of keys at a time, each line prefetched a little
before its turn. So memory has two places to read ahead from, and the machine's own prefetchers follow both; a
phase of K and then one of V have one. The sums are those of the walk in phases, in their order.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu import decode_configs as configs
from polyflash.backends.cpu.configs import STORAGE_BYTES
from polyflash.backends.cpu.decode_configs import KEYS_PER_GROUP, LISTED, SCORED, WIDTH, DecodeKey
from polyflash.backends.cpu.intrinsics import least, word
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import DECODE, K_BATCH, V_BATCH

MINUS_INF = 0xFF800000

device = Blocks(DECODE).device


def walk(key: DecodeKey, stage: Any, list_rows: Any) -> tuple[Any, Any]:
    """Two device functions of 5 and 10 arguments: see `find_blocks` and `attend_rows`."""
    SIZE, NARROW = STORAGE_BYTES[key.storage], configs.NARROW if key.rows == 1 else WIDTH

    @device
    def find_blocks(args, lo, hi, beyond, block_n):
        """First and end of the blocks of keys [lo, hi) that can be read by turns, and the end of those whose
        K can be, before `beyond`; none of pages, of other widths or of channels with a stride."""
        steps = word(args, K_BATCH + 3) == SIZE and word(args, V_BATCH + 3) == SIZE
        width, same = args.head_dim, args.head_dim == args.head_dim_v
        if args.page_table != 0 or not steps or not same or (width != WIDTH and width != NARROW):
            return 0, 0, 0
        end, more = hi // block_n, 0
        if hi % block_n == 0 and hi + block_n <= beyond:
            more = 1  # of the next split
        return (lo + block_n - 1) // block_n, end, end + more

    return find_blocks, _attend(key, stage, list_rows)


def _attend(key: DecodeKey, stage: Any, list_rows: Any) -> Any:
    ROWS, KEYS, VECTOR = key.rows, key.lanes // key.rows, key.lanes * 4

    @device
    def attend_rows(tile, k, v, block_n, first, end, stats, ready, ahead, beyond):
        """The blocks [first, end) of keys, all of which every row sees; of block `end` the scores too if
        `ahead` is larger. `ready` is what of the first is, as LISTED or SCORED of block `end` is afterwards,
        as far as there are keys before `beyond`."""
        args, k_rows, v_rows = tile.args, tile.k_rows, tile.v_rows
        vectors, groups, o = block_n // KEYS, block_n // KEYS_PER_GROUP, stats + 2 * VECTOR
        channels, factor, cap = args.head_dim, args.score_factor, args.score_cap
        q, limits, ones = tile.q, tile.limits, tile.block + VECTOR
        k_step, v_step = word(args, K_BATCH + 2), word(args, V_BATCH + 2)
        odd, begin, last = first % 2, first * block_n, (first + 1) * block_n
        s, s_next = tile.s + odd * block_n * ROWS * 4, tile.s + (1 - odd) * block_n * ROWS * 4
        block, block_next = tile.block + 2 * odd * VECTOR, tile.block + 2 * (1 - odd) * VECTOR
        if ready != SCORED:
            if ready != LISTED:
                list_rows(tile, k, K_BATCH, k_rows, begin, last)
            list_rows(tile, v, V_BATCH, v_rows, begin, last)
            stage.fill(block, 1, MINUS_INF)
            stage.scores(k_rows, q, s, block, vectors, channels, limits, begin, factor, cap, v_rows, 1)
        blocks = least(end, ahead - 1) - first
        if blocks > 0:
            v_at, k_at, m, scale = v + begin * v_step, k + last * k_step, stats, args.scale_log2
            values, keys = (v_at, v_step, s, o, block), (k_at, k_step, q, s_next, block_next)
            stage.weigh_and_score(*values, *keys, blocks, groups, channels, factor, cap, m, scale)
            begin, last = begin + blocks * block_n, last + blocks * block_n
            if blocks % 2 != 0:
                s, block = s_next, block_next
        if last <= end * block_n:
            stage.online_softmax(s, vectors, block, stats, args.scale_log2)
            list_rows(tile, v, V_BATCH, v_rows, begin, last)
            if last < beyond:
                list_rows(tile, k, K_BATCH, k_rows, last, least(last + block_n, beyond))
            stage.accumulate(v_rows, s, o, block, ones, groups, channels, k_rows, 1)

    return attend_rows
