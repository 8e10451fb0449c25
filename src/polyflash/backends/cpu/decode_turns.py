"""Emissions of the decode kernel of at most 8 rows where keys of MOST_HEADS heads are read side by side, see
decode_heads.py, or V of a block and K of the next by turns, see decode_row.py."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyflash.backends.cpu.address_lists import PREFETCH_LEVEL
from polyflash.backends.cpu.decode_configs import KEYS_PER_GROUP, MOST_HEADS, NARROW, ROWS_AT_ONCE, WIDTH
from polyflash.backends.cpu.decode_units import Units, sums_of_lanes
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I64, Emitter, Value

MEMORY_PAGE = 4096  # bytes of the smallest there are


class Turns(Units):
    """Emissions of a tile that has those for a head by itself; every row sees all of the keys."""

    _change: Any  # (e, factor, cap) -> what scales and caps a vector of scores
    _dots: Any  # (e, row, row read next, q, channels, spread) -> a vector of partial sums per row of Q
    _weigh: Any  # (e, places, rows, channels, spread, bounded, at_once): one group of keys of one head
    keys: int  # of a vector of scores
    group_weights: int  # bytes

    @stage
    def dots(self, e: Emitter, row, q, q_tile, sums, later) -> None:
        """A vector of partial sums of one key for every row of Q of every head; the sums of a head lie
        `lanes` vectors apart."""
        p_q, p_sums = e.pointer(q), e.pointer(sums)
        for h in range(MOST_HEADS):
            key, next_key = (e.at(e.pointer(x), h * WIDTH * self.size) for x in (row, later))
            for r, x in enumerate(self._dots(e, key, next_key, p_q, WIDTH, None)):
                e.store(x, p_sums, r * e.bytes)
            p_q, p_sums = e.at(p_q, q_tile), e.at(p_sums, self.lanes * e.bytes)

    @stage
    def touch(self, e: Emitter, rows, keys) -> None:
        """Asks for one line of every page of memory that the listed rows of so many keys lie in: where they
        are is looked up for all of them at once, before their other lines are asked for one by one."""
        apart = max(1, MEMORY_PAGE // (MOST_HEADS * WIDTH * self.size))  # keys

        with e.walk(e.b.udiv(keys, I64(apart)), (rows, 8 * apart)) as (row,):
            e.prefetch(e.pointer(e.load(row, 0, I64)), PREFETCH_LEVEL)

    @stage
    def scores_of_sums(self, e: Emitter, sums, s, s_tile, top, factor, cap) -> None:
        """Scores like `scores`, of one vector of keys of every head whose partial sums are made."""
        change = self._change(e, factor, cap)

        places = (sums, self.lanes * e.bytes), (s, s_tile), (top, e.bytes)
        with e.walk(MOST_HEADS, *places, rolled=True) as (parts, scores, largest):
            x = change(sums_of_lanes(e, [e.load(parts, n * e.bytes) for n in range(self.lanes)]))
            e.store(x, scores)
            e.store(e.maximum(x, e.load(largest)), largest)

    @stage
    def weigh_group(self, e: Emitter, v_rows, p, p_tile, o, o_tile, alpha, alpha_tile, later) -> None:
        """Accumulates like `accumulate`, for one group of every head; what is a head's lies so many bytes
        apart. Meanwhile as many keys are prefetched, one for each head."""
        row_bytes = WIDTH * self.size

        places = (p, p_tile), (alpha, alpha_tile), (o, o_tile), (later, 8)
        with e.walk(MOST_HEADS, *places, rolled=True) as walk:
            *of_head, p_later = walk
            next_row = e.load(p_later, 0, I64)
            at = e.b.mul(walk.index, I64(row_bytes))

            def rows_of(n: Value) -> tuple[Value, Value]:
                row = e.load(e.pointer(v_rows), e.b.mul(n, I64(8)), I64)
                return e.at(e.pointer(row), at), e.at(e.pointer(next_row), e.b.mul(n, I64(row_bytes)))

            self._weigh(e, of_head, rows_of, WIDTH, None, False)

    @stage
    def weigh_and_dot(
        self, e: Emitter, v_rows, p, o, alpha, ones, groups, channels, v_ahead, k_rows, q, sums, k_ahead
    ) -> None:
        """Accumulates like `accumulate`, for one row of Q; and before V of each key partial sums of the
        score of one key of K. Meanwhile what lies so many bytes ahead of either is prefetched."""
        p_ones, p_o, p_q = (e.pointer(x) for x in (ones, o, q))
        start = [e.pointer(x) for x in (v_rows, k_rows, p, alpha, sums)]

        def group(width: int, i: Value, x: list[Value]) -> list[Value]:
            p_v, p_k, p_p, p_alpha, p_sums = x

            def rows_of(n: Value) -> tuple[Value, Value]:
                at = e.b.mul(n, I64(8))
                v_row, k_row = (e.pointer(e.load(e.at(rows, at), 0, I64)) for rows in (p_v, p_k))
                (dots,) = self._dots(e, k_row, e.at(k_row, k_ahead), p_q, width, None)
                e.store(dots, e.at(p_sums, e.b.mul(n, I64(e.bytes))))
                return v_row, e.at(v_row, v_ahead)

            self._weigh(e, [p_p, p_alpha, p_o], rows_of, width, None, False)
            p_v, p_k, p_p, p_sums = (
                e.at(p, KEYS_PER_GROUP * step)
                for p, step in ((p_v, 8), (p_k, 8), (p_p, 4), (p_sums, e.bytes))
            )
            return [p_v, p_k, p_p, p_ones, p_sums]

        for width in (NARROW, WIDTH):
            turns = e.b.select(e.b.icmp_signed("==", channels, I64(width)), groups, I64(0))
            e.loop(turns, start, partial(group, width))

    @stage
    def scores_of_dots(self, e: Emitter, sums, s, top, groups, factor, cap) -> None:
        """Scores like `scores`, of keys that the one row sees and whose partial sums are made."""
        change, p_top = self._change(e, factor, cap), e.pointer(top)

        def group(i: Value, p: list[Value]) -> list[Value]:
            x = change(sums_of_lanes(e, [e.load(p[0], n * e.bytes) for n in range(self.lanes)]))
            e.store(x, p[1])
            return [e.at(p[0], self.lanes * e.bytes), e.at(p[1], e.bytes), e.maximum(x, p[2])]

        e.store(e.loop(groups, [e.pointer(sums), e.pointer(s), e.load(p_top)], group)[2], p_top)

    @stage
    def weigh_and_score(
        self, e: Emitter, v, v_step, p, o, alpha, k, k_step, q, s, top, groups, factor, cap
    ) -> None:
        """Accumulates like `accumulate`, and after V of each group scores like `scores` as many keys of K,
        which every row sees; all are of WIDTH channels, `v_step` or `k_step` bytes apart. Every instruction
        reads on by a row at a time, through no list of addresses, and nothing is prefetched: the machine's
        own prefetchers follow both places, and do so better undisturbed."""
        change, p_top = self._change(e, factor, cap), e.pointer(top)
        p_o, p_q = e.pointer(o), e.pointer(q)
        p_sums = e.b.alloca(e.vf, size=KEYS_PER_GROUP)
        by_key = [i % self.rows * self.keys + i // self.rows for i in range(e.lanes)]

        def group(p_alpha: Value | None, i: Value, x: list[Value]) -> list[Value]:
            p_v, p_k, p_p, p_s, largest = x

            def v_row(n: Value) -> tuple[Value, None]:
                return e.at(p_v, e.b.mul(n, v_step)), None

            held = self._held(e, p_q)

            # The rows of a key are folded while lines of the next are under way: later it would cost time.
            with e.walk(KEYS_PER_GROUP, (p_k, k_step), (p_sums, e.bytes), rolled=True) as rows:
                e.store(sums_of_lanes(e, self._dots_of(e, rows[0], held)), rows[1])
            p_k = rows[0]
            for n in range(KEYS_PER_GROUP // self.keys):
                parts = [e.load(p_sums, (n * self.keys + m) * e.bytes) for m in range(self.keys)]
                by_row = sums_of_lanes(e, parts, self.keys)
                score = change(e.shuffle(by_row, by_row, by_key))
                e.store(score, p_s, n * e.bytes)
                largest = e.maximum(score, largest)
            self._weigh(e, [p_p, p_alpha, p_o], v_row, WIDTH, None, False, ROWS_AT_ONCE)
            p_v = e.at(p_v, e.b.mul(v_step, I64(KEYS_PER_GROUP)))
            p_p = e.at(p_p, self.group_weights)
            return [p_v, p_k, p_p, e.at(p_s, KEYS_PER_GROUP * self.rows * 4), largest]

        # Alpha is for the first group: of others O is added to, which does not wait for the multipliers.
        first = group(e.pointer(alpha), I64(0), [*(e.pointer(x) for x in (v, k, p, s)), e.load(p_top)])
        e.store(e.loop(e.b.sub(groups, I64(1)), first, partial(group, None))[-1], p_top)

    def _held(self, e: Emitter, p_q: Value, width: int = WIDTH) -> list[list[list[Value]]]:
        """Q in registers, as far as there are: by unit, part and row. Each load of Q beside K would take the
        place of a line of K that could be under way."""

        def vector(u: int, part: int, r: int) -> Value:
            return e.load(p_q, (u * self.rows + r) * self.query_bytes(e) + part * e.bytes)

        counts = (width // self.unit, 1 if self.dot else self.parts, self.rows)
        units, parts, rows = (range(n) for n in counts)
        return [[[vector(u, part, r) for r in rows] for part in parts] for u in units]

    def _dots_of(self, e: Emitter, row: Value, held: list[list[list[Value]]]) -> list[Value]:
        """A vector of partial sums of one key for every row of Q, summed as `_dots` does without a dot."""
        sums = [e.floats(0)] * self.rows
        for u, unit in enumerate(held):
            x = self._split(e, self._raw(e, row, I64(u * self.unit * self.size), None))
            for part, ys in zip(x, unit, strict=True):
                sums = [e.fma(part, y, total) for y, total in zip(ys, sums, strict=True)]
        return sums
