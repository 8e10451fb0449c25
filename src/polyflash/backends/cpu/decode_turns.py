"""Emissions of the decode kernel of at most 8 rows where keys of MOST_HEADS heads are read side by side, see
decode_heads.py, or V of a block and K of the next by turns, see decode_row.py."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyflash.backends.cpu.address_lists import NEAR_LEVEL, PREFETCH_LEVEL
from polyflash.backends.cpu.configs import LINE
from polyflash.backends.cpu.decode_configs import KEYS_PER_GROUP, MOST_HEADS, NARROW, WIDTH
from polyflash.backends.cpu.decode_units import Later, Units, far, sums_of_lanes
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I64, Emitter, Value

MEMORY_PAGE = 4096  # bytes of the smallest there are


class Turns(Units):
    """Emissions of a tile that has those for a head by itself; every row sees all of the keys."""

    _change: Any  # (e, factor, cap) -> what scales and caps a vector of scores
    _dots: Any  # (e, row, row read next, q, channels, spread) -> a vector of partial sums per row of Q
    online_softmax: Any  # a stage
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
            for r, x in enumerate(self._dots(e, key, far(next_key), p_q, WIDTH, None)):
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

            def rows_of(n: Value) -> tuple[Value, Later]:
                row = e.load(e.pointer(v_rows), e.b.mul(n, I64(8)), I64)
                return e.at(e.pointer(row), at), far(e.at(e.pointer(next_row), e.b.mul(n, I64(row_bytes))))

            self._weigh(e, of_head, rows_of, WIDTH, None, False)

    @stage
    def weigh_and_score(
        self, e: Emitter, v, v_step, p, o, block, k, k_step, q, s, top, n, groups, dims, factor, cap, m, scale
    ) -> None:
        """`online_softmax`, then accumulates like `accumulate`, and before V of each group scores like
        `scores` as many keys of K, which every row sees; both are of `dims` channels, `v_step` or `k_step`
        bytes apart. So for `n` blocks of `groups`; `p` and `s`, `block` and `top` change places each time.
        What says where the next lines are stays in registers. Every instruction reads on by a row at a time,
        through no list of addresses, and lines are asked for `bytes_ahead` of the key before their turn.
        Weights of 16-bit keys are made behind the first K: it was quicker, and for float32 slower. `m` is
        where the statistics stand."""
        b, change = e.b, self._change(e, factor, cap)
        p_o, p_q = e.pointer(o), e.pointer(q)
        halves = max(1, self.keys // KEYS_PER_GROUP)  # groups that fill a vector of scores
        p_sums = b.alloca(e.vf, size=halves * KEYS_PER_GROUP)
        by_key = [i % self.rows * self.keys + i // self.rows for i in range(e.lanes)]

        def scored(p_s: Value, largest: Value) -> Value:
            for n in range(halves * KEYS_PER_GROUP // self.keys):
                parts = [e.load(p_sums, (n * self.keys + m) * e.bytes) for m in range(self.keys)]
                by_row = sums_of_lanes(e, parts, self.keys if self.rows > 1 else 0)
                score = change(e.shuffle(by_row, by_row, by_key))
                e.store(score, p_s, n * e.bytes)
                largest = e.maximum(score, largest)
            return largest

        def turn(width: int, first: Any, i: Value, x: list[Value]) -> list[Value]:
            p_alpha, weights = first or (None, None)
            p_v, p_k, p_p, p_s, largest = x
            held, row_bytes = self._held(e, p_q, width), width * self.size
            asked = [*zip(self.key.bytes_ahead, (PREFETCH_LEVEL, NEAR_LEVEL), strict=True)]

            def later(row: Value, step: Value) -> Later:
                return [(e.at(row, b.mul(step, I64(n // row_bytes))), level) for n, level in asked if n]

            for half in range(halves):

                def v_row(n: Value, p_v: Value = p_v) -> tuple[Value, Later]:
                    row = e.at(p_v, b.mul(n, v_step))
                    return row, later(row, v_step)

                # Rows of a key are folded while lines of the next are under way: later it would cost time.
                sums = e.at(p_sums, half * KEYS_PER_GROUP * e.bytes)
                with e.walk(KEYS_PER_GROUP, (p_k, k_step), (sums, e.bytes), rolled=True) as rows:
                    dots = self._dots_of(e, rows[0], held, later(rows[0], k_step))
                    e.store(sums_of_lanes(e, dots), rows[1])
                p_k = rows[0]
                if self.size == 2 and weights and half == 0:
                    weights()
                for start, step in ((p_v, v_step), (p_k, k_step)):
                    self._ask_early(e, start, step, row_bytes)
                largest = scored(p_s, largest) if half + 1 == halves else largest
                # Two rows, whose sums over a row of V fit the registers. More of eight, and of bfloat16: V is
                # widened less often.
                at_once = max(2, self.rows // 2)
                if self.key.storage == "bfloat16":
                    at_once = 4 if self.dot else 8
                at_once = min(at_once, self.rows)
                self._weigh(e, [p_p, p_alpha, p_o], v_row, width, None, False, at_once)
                p_v = e.at(p_v, b.mul(v_step, I64(KEYS_PER_GROUP)))
                p_p, p_alpha = e.at(p_p, self.group_weights), None
            return [p_v, p_k, p_p, e.at(p_s, halves * KEYS_PER_GROUP * self.rows * 4), largest]

        vectors = b.udiv(b.mul(groups, I64(KEYS_PER_GROUP)), I64(self.keys))

        def one(width: int, i: Value, x: list[Value]) -> list[Value]:
            at_v, at_k, at_p, at_s, at_block, at_top = x
            weights = partial(self.online_softmax, e, at_p, vectors, at_block, m, scale)
            if self.size == 4:
                weights()
            # Alpha is for the first group: of others O is added to, which does not wait for the multipliers.
            start = [at_v, at_k, *map(e.pointer, (at_p, at_s)), e.floats(float("-inf"))]
            after = turn(width, (e.pointer(at_block), weights), I64(0), start)
            after = e.loop(b.sub(b.udiv(groups, I64(halves)), I64(1)), after, partial(turn, width, None))
            e.store(after[-1], e.pointer(at_top))
            return [*after[:2], at_s, at_p, at_top, at_block]

        for width in (NARROW, WIDTH) if self.rows == 1 else (WIDTH,):
            start = [*map(e.pointer, (v, k)), p, s, block, top]
            e.loop(b.select(b.icmp_signed("==", dims, I64(width)), n, I64(0)), start, partial(one, width))

    def _ask_early(self, e: Emitter, start: Value, step: Value, row_bytes: int) -> None:
        """Prefetches the first rows of what a turn that begins with this row would ask for line by line."""
        first = e.at(start, e.b.mul(step, I64(self.key.bytes_ahead[0] // row_bytes)))
        for n in range(self.key.bytes_early // row_bytes):
            row = e.at(first, e.b.mul(step, I64(n)))
            for byte in range(0, row_bytes, LINE):
                e.prefetch(e.at(row, byte), PREFETCH_LEVEL)

    def _held(self, e: Emitter, p_q: Value, width: int = WIDTH) -> list[list[list[Value]]]:
        """Q in registers, as far as there are: by unit, part and row. Each load of Q beside K would take the
        place of a line of K that could be under way."""

        def vector(u: int, part: int, r: int) -> Value:
            return e.load(p_q, (u * self.rows + r) * self.query_bytes(e) + part * e.bytes)

        counts = (width // self.unit, 1 if self.dot else self.parts, self.rows)
        units, parts, rows = (range(n) for n in counts)
        return [[[vector(u, part, r) for r in rows] for part in parts] for u in units]

    def _dots_of(self, e: Emitter, row: Value, held: list[list[list[Value]]], later: Later) -> list[Value]:
        """A vector of partial sums of one key for every row of Q, summed as `_dots` does."""
        sums, add = [e.floats(0)] * self.rows, e.dot_bf16 if self.dot else None
        for u, unit in enumerate(held):
            at = I64(u * self.unit * self.size)
            self._prefetch(e, later, at, 1, None)
            x = self._raw(e, row, at, None)
            for part, ys in zip([x] if self.dot else self._split(e, x), unit, strict=True):
                pairs = zip(ys, sums, strict=True)
                sums = [add(total, part, y) if add else e.fma(part, y, total) for y, total in pairs]
        return sums
