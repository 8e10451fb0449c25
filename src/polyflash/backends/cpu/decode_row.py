"""A single row over one kv head of whole tensors: device functions of the decode kernel of at most 8 rows.

V of a block and K of the next are read key by key by turns, and each line is prefetched a little before its
turn. So memory has two places to read ahead from, and the machine's own prefetchers follow both; a phase of K
and then one of V have one. The sums are those of the walk in phases, in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyflash.backends.cpu.configs import STORAGE_BYTES
from polyflash.backends.cpu.decode_configs import BYTES_AHEAD, KEYS_PER_GROUP, TURN_WIDTHS
from polyflash.backends.cpu.words import DECODE

if TYPE_CHECKING:
    from polyflash.backends.cpu.decode_configs import DecodeKey


def walk(key: DecodeKey, stage: Any, list_rows: Any) -> tuple[Any, Any]:
    """Two device functions of 4 and 9 arguments: see `find_blocks` and `attend_row`."""
    from polyflash.backends.cpu.intrinsics import least, word
    from polyflash.backends.cpu.structs import Blocks

    device = Blocks(DECODE).device
    K_BATCH, V_BATCH = DECODE.k_batch, DECODE.v_batch
    NARROW, WIDE = TURN_WIDTHS
    KEYS, VECTOR, SIZE, MINUS_INF = key.lanes, key.lanes * 4, STORAGE_BYTES[key.storage], 0xFF800000

    @device
    def find_blocks(args, lo, hi, block_n):
        """First and end of the blocks of keys [lo, hi) that can be read by turns; none of pages, of other
        widths than TURN_WIDTHS or of channels with a stride."""
        steps = word(args, K_BATCH + 3) == SIZE and word(args, V_BATCH + 3) == SIZE
        width, same = args.head_dim, args.head_dim == args.head_dim_v
        if args.page_table != 0 or not steps or not same or (width != NARROW and width != WIDE):
            return 0, 0
        return (lo + block_n - 1) // block_n, hi // block_n

    @device
    def attend_row(tile, k, v, block_n, first, end, stats, listed, beyond):
        """The blocks [first, end) of keys, all of which the row sees. `listed` is 1 if K of the first is, as
        that of block `end` is afterwards, as far as there are keys before `beyond`."""
        args, s, block, k_rows, v_rows = tile.args, tile.s, tile.block, tile.k_rows, tile.v_rows
        vectors, groups, o = block_n // KEYS, block_n // KEYS_PER_GROUP, stats + 2 * VECTOR
        channels, ahead = args.head_dim, BYTES_AHEAD // (args.head_dim * SIZE)
        k_ahead, v_ahead = ahead * word(args, K_BATCH + 2), ahead * word(args, V_BATCH + 2)
        alpha, ones = block, block + VECTOR
        if listed == 0:
            list_rows(tile, k, K_BATCH, k_rows, first * block_n, (first + 1) * block_n)
        for i in range(first, end):
            begin, last = i * block_n, (i + 1) * block_n
            list_rows(tile, v, V_BATCH, v_rows, begin, last)
            stage.fill(block, 1, MINUS_INF)
            if i == first:
                q, limits, factor, cap = tile.q, tile.limits, args.score_factor, args.score_cap
                stage.scores(k_rows, q, s, block, vectors, channels, limits, begin, factor, cap, v_rows, 1)
            else:
                stage.scores_of_dots(tile.p, s, block, vectors, args.score_factor, args.score_cap)
            stage.online_softmax(s, vectors, block, stats, args.scale_log2)
            if last < beyond:
                list_rows(tile, k, K_BATCH, k_rows, last, least(last + block_n, beyond))
            if i + 1 < end:
                stage.weigh_and_dot(
                    v_rows, s, o, alpha, ones, groups, channels, v_ahead, k_rows, tile.q, tile.p, k_ahead
                )
            else:
                stage.accumulate(v_rows, s, o, alpha, ones, groups, channels, k_rows, 1)

    return find_blocks, attend_row
