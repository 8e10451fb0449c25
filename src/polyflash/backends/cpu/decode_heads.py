"""Several kv heads side by side: device functions of the decode kernel of at most 8 rows.

Where the heads of a key lie together, as in the pages of a cache, a walk that finishes one head of a block
before it turns to the next reads memory in short pieces far apart. So K of a block is read key by key, the
heads of each together, and V in groups of keys, head after head; and V of one block and K of the next are
read by turns, so that memory has two places to read ahead from. The sums of a head are those of a walk by
itself, in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu import decode_arguments as d
from polyflash.backends.cpu import loading
from polyflash.backends.cpu.decode_configs import KEYS_PER_GROUP, MOST_HEADS

if TYPE_CHECKING:
    from polyflash.backends.cpu.decode_blocks import Stages
    from polyflash.backends.cpu.decode_configs import DecodeKey


def walk(key: DecodeKey, stage: Stages, list_rows: Any) -> Any:
    """A device function of 11 arguments: see `attend_heads`."""
    from numba import types

    from polyflash.backends.cpu import simd

    fill, online_softmax, touch = stage.fill, stage.online_softmax, stage.touch
    dots, scores_of_sums, weigh_group = stage.dots, stage.scores_of_sums, stage.weigh_group
    arg, least, device = simd.word, simd.least, loading.device
    ROWS, KEYS, PACK, VECTOR = key.rows, key.lanes // key.rows, key.pack, key.lanes * 4
    GROUP_KEYS, HEADS, LANES, MINUS_INF = KEYS_PER_GROUP, MOST_HEADS, key.lanes, 0xFF800000

    @device(5, types.int64)
    def list_at(args, scratch, tensor, i, block_n):  # type: ignore[no-untyped-def]
        """Where the rows of block i of K or V are listed."""
        place = i % 2 + (2 if tensor == a.V_BATCH else 0)
        return scratch + arg(args, a.T_STAGED) + place * (block_n + LANES) * 8

    @device(7)
    def list_block(args, scratch, src, tensor, i, block_n, beyond):  # type: ignore[no-untyped-def]
        """Lists block i as far as there are keys; rows of others are only read ahead, wherever they are."""
        first, last = i * block_n, least((i + 1) * block_n, beyond)
        if first < last:
            list_rows(args, scratch, src, tensor, list_at(args, scratch, tensor, i, block_n), first, last)

    @device(4, types.int64)
    def scores_at(args, scratch, i, block_n):  # type: ignore[no-untyped-def]
        """Of the first head of block i; behind those of a walk by itself."""
        return scratch + arg(args, a.T_S) + (1 + i % 2 * HEADS) * block_n * ROWS * 4

    @device(3, types.int64)
    def block_at(args, scratch, i):  # type: ignore[no-untyped-def]
        """The running maximum of block i, then alpha, of the first head."""
        return scratch + arg(args, a.T_BLOCK) + (2 + i % 2 * HEADS) * VECTOR

    @device(6)
    def attend_turns(args, scratch, i, block_n, state, does):  # type: ignore[no-untyped-def]
        """V of block i (does & 1), whose weights are made, and scores of block i + 1 (does & 2)."""
        v_rows = list_at(args, scratch, a.V_BATCH, i, block_n)
        k_rows = list_at(args, scratch, a.K_BATCH, i + 1, block_n)
        v_later = list_at(args, scratch, a.V_BATCH, i + 1, block_n)
        k_later = list_at(args, scratch, a.K_BATCH, i, block_n)
        p, s = scores_at(args, scratch, i, block_n), scores_at(args, scratch, i + 1, block_n)
        sums, s_tile = scratch + arg(args, a.T_P), block_n * ROWS * 4
        alpha, alpha_tile = block_at(args, scratch, i), VECTOR
        for group in range(0, block_n, GROUP_KEYS):
            if does & 1 != 0:
                weigh_group(
                    v_rows + 8 * group, p + group // PACK * ROWS * 4, s_tile, state + 2 * VECTOR,
                    arg(args, d.PARTIAL_BYTES), alpha, alpha_tile, v_later + 8 * group,
                )  # fmt: skip
                alpha, alpha_tile = scratch + arg(args, a.T_BLOCK) + VECTOR, 0  # ones
            if does & 2 != 0:
                for j in range(group, group + GROUP_KEYS):
                    at, q = sums + j % KEYS * ROWS * VECTOR, scratch + arg(args, a.T_Q)
                    dots(arg(k_rows, j), q, arg(args, d.Q_TILE), at, arg(k_later, j))
                    if (j + 1) % KEYS == 0:
                        at = s + (j + 1 - KEYS) * ROWS * 4
                        tops = block_at(args, scratch, i + 1)
                        scores_of_sums(sums, at, s_tile, tops, arg(args, d.FACTOR), arg(args, d.CAP))

    @device(11)
    def attend_heads(args, scratch, k, v, block_n, first, end, state, scored, ahead, beyond):  # type: ignore[no-untyped-def]
        """The blocks [first, end) of keys that every row sees. `scored` is 1 if the scores of the first stand
        there already, as those of block `end` do after a call with a larger `ahead`; keys end at `beyond`."""
        if scored == 0:
            list_block(args, scratch, k, a.K_BATCH, first, block_n, beyond)
        for i in range(first - 1 + scored, end):
            does = 0
            if i >= first:
                does = 1
                for i_h in range(HEADS):
                    online_softmax(
                        scores_at(args, scratch, i, block_n) + i_h * block_n * ROWS * 4, block_n // KEYS,
                        block_at(args, scratch, i) + i_h * VECTOR, state + i_h * arg(args, d.PARTIAL_BYTES),
                        arg(args, a.SCALE_LOG2),
                    )  # fmt: skip
            if i + 1 < ahead:
                does |= 2
                fill(block_at(args, scratch, i + 1), HEADS, MINUS_INF)
            list_block(args, scratch, k, a.K_BATCH, i + 2, block_n, beyond)
            list_block(args, scratch, v, a.V_BATCH, i + 1, block_n, beyond)
            touch(list_at(args, scratch, a.K_BATCH, i + 2, block_n), block_n)
            touch(list_at(args, scratch, a.V_BATCH, i + 1, block_n), block_n)
            attend_turns(args, scratch, i, block_n, state, does)

    return attend_heads
