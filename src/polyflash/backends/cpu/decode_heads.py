"""Several kv heads side by side: device functions of the decode kernel of at most 8 rows.

Where the heads of a key lie together, as in the pages of a cache, a walk that finishes one head of a block
before it turns to the next reads memory in short pieces far apart. So K of a block is read key by key, the
heads of each together, and V in groups of keys, head after head; and V of one block and K of the next are
read by turns, so that memory has two places to read ahead from. The sums of a head are those of a walk by
itself, in their order.
"""

from __future__ import annotations

from typing import Any

from polyflash.backends.cpu.decode_configs import KEYS_PER_GROUP, MOST_HEADS, DecodeKey
from polyflash.backends.cpu.intrinsics import least, word
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import DECODE, K_BATCH, V_BATCH

device = Blocks(DECODE).device


def walk(key: DecodeKey, stage: Any, list_rows: Any) -> Any:
    """A device function of 11 arguments: see `attend_heads`."""
    ROWS, KEYS, PACK, VECTOR = key.rows, key.lanes // key.rows, key.pack, key.lanes * 4
    GROUP_KEYS, HEADS, LANES, MINUS_INF = KEYS_PER_GROUP, MOST_HEADS, key.lanes, 0xFF800000

    @device
    def list_at(tile, tensor, i, block_n):
        """Address of the list of rows of block i of K or V."""
        place = i % 2 + (2 if tensor == V_BATCH else 0)
        return tile.addresses + place * (block_n + LANES) * 8

    @device
    def list_block(tile, src, tensor, i, block_n, beyond):
        """Lists block i as far as there are keys; rows of others are only read ahead, wherever they are."""
        first, last = i * block_n, least((i + 1) * block_n, beyond)
        if first < last:
            list_rows(tile, src, tensor, list_at(tile, tensor, i, block_n), first, last)

    @device
    def scores_at(tile, i, block_n):
        """Scores of the first head of block i; behind those of a walk by itself."""
        return tile.s + (1 + i % 2 * HEADS) * block_n * ROWS * 4

    @device
    def block_at(tile, i):
        """The running maximum of block i, then alpha, of the first head."""
        return tile.block + (2 + i % 2 * HEADS) * VECTOR

    @device
    def attend_turns(tile, i, block_n, state, does):
        """V of block i (does & 1), whose weights are made, and scores of block i + 1 (does & 2)."""
        args = tile.args
        v_rows = list_at(tile, V_BATCH, i, block_n)
        k_rows = list_at(tile, K_BATCH, i + 1, block_n)
        v_later = list_at(tile, V_BATCH, i + 1, block_n)
        k_later = list_at(tile, K_BATCH, i, block_n)
        p, s = scores_at(tile, i, block_n), scores_at(tile, i + 1, block_n)
        sums, s_tile = tile.p, block_n * ROWS * 4
        alpha, alpha_tile = block_at(tile, i), VECTOR
        for group in range(0, block_n, GROUP_KEYS):
            if does & 1 != 0:
                v, weights = v_rows + 8 * group, p + group // PACK * ROWS * 4
                o, o_tile, later = state + 2 * VECTOR, args.partial_bytes, v_later + 8 * group
                stage.weigh_group(v, weights, s_tile, o, o_tile, alpha, alpha_tile, later)
                alpha, alpha_tile = tile.block + VECTOR, 0  # ones
            if does & 2 != 0:
                for j in range(group, group + GROUP_KEYS):
                    at, q = sums + j % KEYS * ROWS * VECTOR, tile.q
                    stage.dots(word(k_rows, j), q, args.q_tile, at, word(k_later, j))
                    if (j + 1) % KEYS == 0:
                        at = s + (j + 1 - KEYS) * ROWS * 4
                        tops = block_at(tile, i + 1)
                        stage.scores_of_sums(sums, at, s_tile, tops, args.score_factor, args.score_cap)

    @device
    def attend_heads(tile, k, v, block_n, first, end, state, scored, ahead, beyond):
        """The blocks [first, end) of keys that every row sees. `scored` is 1 if the scores of the first stand
        there already, as those of block `end` do after a call with a larger `ahead`; keys end at `beyond`."""
        args = tile.args
        if scored == 0:
            list_block(tile, k, K_BATCH, first, block_n, beyond)
        for i in range(first - 1 + scored, end):
            does = 0
            if i >= first:
                does = 1
                for i_h in range(HEADS):
                    s, vectors = scores_at(tile, i, block_n) + i_h * block_n * ROWS * 4, block_n // KEYS
                    block, stats = block_at(tile, i) + i_h * VECTOR, state + i_h * args.partial_bytes
                    stage.online_softmax(s, vectors, block, stats, args.scale_log2)
            if i + 1 < ahead:
                does |= 2
                stage.fill(block_at(tile, i + 1), HEADS, MINUS_INF)
            list_block(tile, k, K_BATCH, i + 2, block_n, beyond)
            list_block(tile, v, V_BATCH, i + 1, block_n, beyond)
            stage.touch(list_at(tile, K_BATCH, i + 2, block_n), block_n)
            stage.touch(list_at(tile, V_BATCH, i + 1, block_n), block_n)
            attend_turns(tile, i, block_n, state, does)

    return attend_heads
