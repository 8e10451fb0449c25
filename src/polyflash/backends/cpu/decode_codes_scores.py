"""The stage of scores of a tile whose K and V are codes: S = K·Q, see decode_codes_blocks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeAlias

from llvmlite import ir

from polyflash.backends.cpu.decode_codes_integers import PARTS, Integers, Line
from polyflash.backends.cpu.decode_units import Fold
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import F32, I32, I64, Emitter, Value

# Of the rows of some keys, of later rows, and of the scales; and how many bytes on those read after them are.
Places: TypeAlias = tuple[Value, Value, Value, Value]


class Scores(Integers):
    """Emissions for one key. Methods named as the stages they emit."""

    @stage
    def scores_of_codes(
        self,
        e: Emitter,
        k_rows,
        q,
        s,
        top,
        groups,
        limits,
        key,
        factor,
        cap,
        scales,
        later,
        further,
    ) -> None:
        """`scores` of the integers of Q at `q`; `scales` are those of keys, if K has any. Meanwhile the
        `later` rows of K are prefetched, and of some rows a line `further` bytes on."""
        b, p_limits, planes = e.b, e.pointer(limits), e.at(e.pointer(q), self.key.planes)
        lo, width = e.load(p_limits, 0, e.vi), e.load(p_limits, e.bytes, e.vi)
        in_group = ir.Constant(e.vi, [lane // self.rows for lane in range(self.lanes)])
        first = b.add(e.splat(b.trunc(key, I32)), in_group)
        last = b.add(first, e.splat(b.trunc(b.mul(b.sub(groups, I64(1)), I64(self.keys)), I32)))
        hidden = (b.icmp_unsigned(">=", b.sub(x, lo), width) for x in (first, last))
        careful = e.any_lane(b.or_(*hidden))
        score, change = self._score(e, e.pointer(q)), self._change_all(e, factor, cap)
        by_fours, woven = self.key.by_fours, self.key.woven
        together = max(1, 4 * self.fours // self.keys) if by_fours else 1  # vectors of scores
        sums_of = self._sums_by_fours if by_fours else self._sums_by_key(e)
        keys, per_key = together * self.keys, 4 * self.key.key_groups

        def folding(sums: list[Value]) -> Fold:
            return Fold(e, sums, self.lanes // 4 if by_fours else self.lanes)

        def read(places: list[Value], fold: Fold | None) -> tuple[list[Value], list[Value]]:
            """Sums of some keys, whose lanes are still to be added, and the places of the next."""
            made = sums_of(e, (*places, further), planes, fold)
            steps = (8 * keys, 8 * keys, per_key * keys)
            return made, [e.at(p, step) for p, step in zip(places, steps, strict=True)]

        def finish(fold: Fold, places: list[Value]) -> list[Value]:
            """The scores of some keys, stored, and the places of the next."""
            p_s, p_scales, at, largest = places
            by_vector = enumerate(self._by_set(e, fold.made()))
            made = [score(*x, e.at(p_scales, j * self.keys * per_key)) for j, x in by_vector]
            ids = [b.add(at, e.ints(j * self.keys)) for j in range(together)]

            def masked(x: list[Value]) -> list[Value]:
                return [e.apply_mask(y, b.sub(n, lo), width) for y, n in zip(x, ids, strict=True)]

            for j, x in enumerate(e.where(careful, change(made), masked)):
                e.store(x, p_s, j * e.bytes)
                largest = e.maximum(x, largest)
            p_s, p_scales = e.at(p_s, together * e.bytes), e.at(p_scales, per_key * keys)
            return [p_s, p_scales, b.add(at, e.ints(keys)), largest]

        def group(i: Value, values: list[Value]) -> list[Value]:
            before = folding(values[7:]) if woven else None
            sums, places = read(values[:3], before)
            ends = finish(before or folding(sums), values[3:7])
            return [*places, *ends, *(sums if woven else [])]

        p_top, count, sums = e.pointer(top), b.udiv(groups, I64(together)), list[Value]()
        places = [e.pointer(x) for x in (k_rows, later, scales)]
        ends = [e.pointer(s), places[2], first, e.load(p_top)]
        if woven:
            (sums, places), count = read(places, None), b.sub(count, I64(1))
        ends = e.loop(count, [*places, *ends, *sums], group)[3:]
        if woven:
            ends = finish(folding(ends[4:]), ends[:4])
        e.store(ends[3], p_top)

    def _score(self, e: Emitter, tile: Value) -> Callable[..., Value]:
        """Make what gives scores of the integers of a vector and of the scales of its keys."""
        b, key = e.b, self.key
        unit, shift = (e.load(tile, key.query_stats + i * e.bytes) for i in range(2))
        more = [e.load(tile, key.query_stats + i * e.bytes, e.vi) for i in range(2, 3 + key.split)]

        def score(*sums_and_scales: Value) -> Value:
            *sums, p_scales = sums_and_scales
            x, *rest = (b.sitofp(b.sub(y, z), e.vf) for y, z in zip(sums, more, strict=True))
            x, factor = e.fma(rest[0], e.floats(1 / PARTS), x) if rest else x, unit
            if key.k.scale.channels == 0:
                factor = b.fmul(unit, self._of_keys(e, p_scales))
            return b.fmul(x, factor) if key.k.shift is None else e.fma(x, factor, shift)

        return score

    def _sums_by_key(self, e: Emitter) -> Callable[..., list[Value]]:
        """Make what gives the sums of a vector of scores, key by key: all by steps of Q, then by parts."""
        sets, kind, width = 1 + self.key.split, self._sums(e), 4 * self.key.key_groups
        p_sums = e.b.alloca(kind, size=self.lanes * sets) if self.rows == 1 else None

        def sums_of(e: Emitter, of_keys: Places, planes: Value, fold: Fold | None) -> list[Value]:
            p_rows, p_later, p_scales, _ = of_keys
            sums: list[Value] = []
            if self.rows == 1:
                places = (p_rows, 8), (p_later, 8), (p_sums, sets * e.bytes), (p_scales, width)
                with e.walk(self.keys, *places, rolled=True) as (p_row, p_next, p_sum, scales):
                    self._ask_lines(e, self._keys_ahead(p_row, p_next, range(1)))
                    row = e.pointer(e.load(p_row, 0, I64))
                    for i, x in enumerate(self._products(e, row, planes, scales)):
                        e.store(x, p_sum, i * e.bytes)
                sums = [e.load(p_sums, n * e.bytes, kind) for n in range(self.lanes * sets)]
            for j in range(self.keys if self.rows > 1 else 0):
                self._ask_lines(e, self._keys_ahead(p_rows, p_later, [j]))
                row = e.pointer(e.load(p_rows, 8 * j, I64))
                sums += self._products(e, row, planes, e.at(p_scales, j * width))
            each = self.rows * sets
            return [x for i in range(sets) for n, x in enumerate(sums) if n % each // self.rows == i]

        return sums_of

    def _keys_ahead(self, rows: Value, later: Value, entries: Sequence[int]) -> list[Line]:
        """Lines of K to be prefetched with these entries of a list."""
        lines = self._lines(self.key.k, self.key.head_dim)
        return self._far(later, entries, lines) + self._near(rows, entries, lines)

    def _sums(self, e: Emitter) -> ir.Type:
        return e.vi

    def _sums_by_fours(self, e: Emitter, of_keys: Places, planes: Value, fold: Fold | None) -> list[Value]:
        """`_of_fours` by whole steps of Q, then by parts; of one row as often as fills a vector of scores."""
        p_rows, p_later, _, further = of_keys
        key_lines, many = self._lines(self.key.k, self.key.head_dim), 4 * self.fours
        sets: list[list[Value]] = [[] for _ in range(1 + self.key.split)]
        for first in range(0, max(many, self.keys), many):
            keys = range(first, first + many)
            soon, late = self._near(p_rows, keys, key_lines), self._further(p_rows, keys, further)
            lines = evenly(self._far(p_later, keys, key_lines), soon, late)
            rows = [e.pointer(e.load(p_rows, 8 * j, I64)) for j in keys]
            for i, made in enumerate(sets):
                made += self._of_fours(e, rows, e.at(planes, i * self.key.finer), [] if i else lines, fold)
        return [x for made in sets for x in made]

    def _by_set(self, e: Emitter, x: list[Value]) -> list[tuple[Value, ...]]:
        """Vectors of scores [key][row], of whole steps of Q and of parts. Fours of keys of several rows have
        them as [row][key]."""
        sets, per_four = 1 + self.key.split, 4 * self.rows // self.lanes
        if self.key.by_fours and per_four:
            x = [y for i in range(0, len(x), per_four) for y in self._by_key_and_row(e, x[i : i + per_four])]
        size = len(x) // sets
        return [*zip(*(x[i * size : (i + 1) * size] for i in range(sets)), strict=True)]

    def _of_fours(
        self, e: Emitter, rows: list[Value], planes: Value, lines: list[Line], fold: Fold | None = None
    ) -> list[Value]:
        """The integers of the scores of four keys or eight, by fours and rows. The 32-bit columns of every
        128 bits of theirs are transposed, so that a lane sums products of one key: only lanes of a key 128
        bits apart are left to be added, of each row once for the four. `lines` are prefetched among the
        products, as far as LLVM leaves them there: in front of them the rows at hand would wait behind what
        comes from memory. Steps of `fold` are taken among the products, too."""
        codes, step = self.key.k, self._step(self.key.k)
        fours, units = range(self.fours), self._units_of(self.key.k, self.key.head_dim)
        sums = [[[e.ints(0)] * self.pieces] * self.rows for _ in fours]
        turns = len(units) * 4 * step

        def words_of(u: int) -> list[Value]:
            return [self._words(e, row, codes, self.key.head_dim, u) for row in rows]

        words = words_of(0)
        for u in units:
            x = words or words_of(u)
            early = u + 1 < len(units) and not self.key.woven  # woven: no registers are left
            words = words_of(u + 1) if early else []  # in front of this unit's prefetches
            turned = [
                self._transposed(e, [e.b.bitcast(y, e.vi) for y in x[4 * f : 4 * f + 4]]) for f in fours
            ]
            for j, n in product(range(4), range(step)):
                done = (u * 4 + j) * step + n
                parts = [self._parts(e, e.b.bitcast(turned[f][j], self.words), codes, n) for f in fours]
                for r in range(self.rows):
                    place = (((u * step + n) * 4 + j) * self.rows + r) * e.bytes
                    y = self._query(e, planes, place)
                    for f in fours:
                        sums[f][r] = self._add_dots(e, sums[f][r], parts[f], y)
                self._ask_lines(e, lines[len(lines) * done // turns : len(lines) * (done + 1) // turns])
                if fold:
                    flat = fold.among([x for four in sums for (x,) in four])
                    sums = [[[x] for x in flat[i : i + self.rows]] for i in range(0, len(flat), self.rows)]
        return [self._whole(e, x) for some in sums for x in some]

    def _by_key_and_row(self, e: Emitter, x: list[Value]) -> list[Value]:
        """Vectors of scores [key][row] of four keys; those of x are [row][key]."""
        n, blocks, both = self.lanes, self.lanes // 4, self._joined(e, x)
        places = [(key, row) for key in range(4) for row in range(self.rows)]
        order = [row // blocks * n + row % blocks * 4 + key for key, row in places]
        return [e.shuffle(both, both, order[i : i + n]) for i in range(0, len(order), n)]

    def _of_keys(self, e: Emitter, p: Value, group: int = 0, groups: int = 1) -> Value:
        """The floats of as many keys as a vector of scores has, each in the lanes of its key; of the `groups`
        of each key, one."""
        x = e.load(p, 0, ir.VectorType(F32, self.keys * groups))
        return e.shuffle(x, x, [lane // self.rows * groups + group for lane in range(self.lanes)])

    def _products(self, e: Emitter, row: Value, planes: Value, scales: Value) -> list[Value]:
        """A vector of partial sums of one key for every row of Q; then those by parts of a step."""
        codes, step, sets = self.key.k, self._step(self.key.k), range(1 + self.key.split)
        sums = [[e.ints(0)] * self.pieces] * (self.rows * len(sets))
        for u in self._units_of(codes, self.key.head_dim):
            x = self._words(e, row, codes, self.key.head_dim, u)
            for n in range(step):
                parts = self._parts(e, x, codes, n)
                for i, r in product(sets, range(self.rows)):
                    at = ((u * step + n) * self.rows + r) * e.bytes + i * self.key.finer
                    own = i * self.rows + r
                    sums[own] = self._add_dots(e, sums[own], parts, self._query(e, planes, at))
        return [self._whole(e, x) for x in sums]


def evenly(*lists: list[Line]) -> list[Line]:
    """All of some lists in one, each spread over the whole of it."""
    placed = [(i / len(some), x) for some in lists for i, x in enumerate(some)]
    return [x for _, x in sorted(placed, key=lambda y: y[0])]
