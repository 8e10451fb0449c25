"""The stages of a tile of at most 8 query rows whose K and V are codes: integer products, exact but for the
rounding of one side to 16 bits; decode_codes_bytes.py has those of CPUs that add up products of bytes.

    S[key][row] = scale·Σ code·q16 + Σ q·shift        q16: q times the scales of channels, in steps of `scale`
    O[row][channel] += scale·Σ p16·code + Σ p·shift   p16: p times the scale of its key, likewise

A vector of codes is looked at as 16-bit words. A word holds two codes of 8 bits, or four of 4; shifts make of
it as many vectors of integers, `parts`, without moving a channel from its word. Products of pairs of 16-bit
integers, summed to 32 bits, are one instruction: of K the pairs are neighbouring words of Q and K, of V two
keys, whose words are interleaved. A scale belongs to a row and as many keys as share scales of K's channels,
or to a row, block and scale of V's channels. The denominator sums the weights before they are rounded.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from polyflash.backends.cpu.address_lists import PREFETCH_LEVEL
from polyflash.backends.cpu.configs import LINE
from polyflash.backends.cpu.decode_codes_integers import PARTS
from polyflash.backends.cpu.decode_codes_scores import Scores
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import F32, I32, I64, Emitter, Value
from polyflash.quant.scheme import per_word

ROWS_AT_ONCE, SUMS = 4, 16  # rows that share a walk over V, and their sums in registers


class CodesTile(Scores):
    """Emissions for one key. Methods named as the stages they emit."""

    # weights
    @stage
    def copy_entries(self, e: Emitter, src, step, count, dst, width, later) -> None:
        """`width` floats of each of `count` keys, `step` bytes apart, one behind the other; as many `later`
        ones are prefetched."""
        self._copy_entries(e, (src, step, count, dst, width, later), "float32")

    @stage
    def widen_entries(self, e: Emitter, src, step, count, dst, width, later) -> None:
        """`copy_entries` of bfloat16, as floats."""
        self._copy_entries(e, (src, step, count, dst, width, later), "bfloat16")

    def _copy_entries(self, e: Emitter, places: Any, storage: str) -> None:
        (src, step, count, dst, width, later), b = places, e.b
        kind, size = (e.vf, 4) if storage == "float32" else (e.vh, 2)
        touch = b.icmp_signed("==", step, b.mul(width, I64(size)))

        def floats(p: list[Value], inside: Value | None) -> list[Value]:
            e.prefetch(p[2], PREFETCH_LEVEL)
            e.store(e.widen(e.load(p[0], 0, kind, inside), storage), p[1], inside=inside)
            return [e.at(x, n * self.lanes) for x, n in zip(p, (size, 4, size), strict=True)]

        together = b.select(touch, b.mul(count, width), I64(0))
        e.each_vector(together, self.lanes, [e.pointer(x) for x in (src, dst, later)], floats)
        apart = b.select(touch, I64(0), count)
        with (
            e.walk(apart, (src, step), (dst, b.mul(width, I64(4)))) as (p, place),
            e.walk(width, (p, size), (place, 4)) as (entry, to),
        ):
            e.store(e.widen(e.load(entry, 0, kind.element), storage), to)

    @stage
    def weigh_codes(self, e: Emitter, weights, floats, pairs, sums, vectors, scales, shifts, later) -> None:
        """Weights of V's codes: of every group of channels, those of the keys times their scales, as pairs of
        integers [two keys][row][group]; and at `sums` vectors of their steps, of what is added to all
        channels, and of what the middles of codes add to sums. Some rows of V that are read later are
        prefetched."""
        b, live = e.b, self.key.live_groups
        step, shifted = 4 * self.keys * live, self.key.v.shift is not None
        zeros = [e.ints(0)] * live

        def scaled(i: Value, x: list[Value]) -> list[Value]:
            p_later, p_w, p_held, p_scale, p_shift, *tops = x
            w = e.load(p_w)
            unseen, totals = b.icmp_signed("<", b.bitcast(w, e.vi), e.ints(0)), tops[live:]
            for g in range(live):
                y = b.select(unseen, e.floats(0), b.fmul(w, self._of_keys(e, p_scale, g, live)))
                e.store(y, p_held, g * e.bytes)
                tops[g] = e.smax(tops[g], self._bits_of_size(e, y))
                if shifted:
                    moved = b.select(unseen, e.floats(0), self._of_keys(e, p_shift, g, live))
                    totals[g] = e.fma(w, moved, totals[g])
            p_shift = e.at(p_shift, step) if shifted else p_shift
            further = [e.at(p_w, e.bytes), e.at(p_held, live * e.bytes), e.at(p_scale, step)]
            return [self._ask_weighing(e, p_later), *further, p_shift, *tops[:live], *totals]

        start = [e.pointer(x) for x in (later, weights, floats, scales, shifts)]
        out = e.loop(vectors, [*start, *zeros, *[e.floats(0)] * live], scaled)[5:]
        known = [self._steps(e, self._across_keys(e, top, e.smax), self.most_weight) for top in out[:live]]
        added = [self._across_keys(e, x, b.fadd) for x in out[live:]]
        self._in_integers(e, (floats, pairs, sums, vectors), known, added, self.key.split)

    @stage
    def weigh_others(self, e: Emitter, floats, pairs, sums, vectors) -> None:
        """`weigh_codes` of what it left of weights, in parts of its steps; what is added counts no more."""
        known = []
        for g in range(self.key.live_groups):
            unit = e.load(e.pointer(sums), g * self.key.value_stats * e.bytes)
            known.append((e.b.fmul(unit, e.floats(1 / PARTS)), e.b.fdiv(e.floats(PARTS), unit)))
        none = [e.floats(0)] * len(known)
        self._in_integers(e, (floats, pairs, sums, vectors), known, none, False)

    def _in_integers(
        self, e: Emitter, places: Any, known: list[tuple[Value, Value]], added: list[Value], keep: bool
    ) -> None:
        """Weights as integers of steps, by them and their inverses, and what sums need; `keep`: what is left
        of weights takes their places."""
        (floats, pairs, sums, vectors), b = places, e.b
        groups, live = self.key.value_groups, self.key.live_groups
        known += known[-1:] * (groups - live)

        together = max(1, self.key.joined // self.keys)

        def rounded(i: Value, x: list[Value]) -> list[Value]:
            made, counts = [], x[2:]
            for m in range(together):
                places = [(m * live + g) * e.bytes for g in range(live)]
                values = [e.load(x[0], place) for place in places]
                whole = [self._rounded(e, y, by) for y, (_, by) in zip(values, known, strict=False)]
                if keep:
                    for place, y, n, (unit, _) in zip(places, values, whole, known, strict=False):
                        e.store(self._left(e, y, n, unit), x[0], place)
                more = [self._counts(e, y, self.key.v) for y in whole]
                counts = [b.add(n, y) for n, y in zip(counts, more, strict=True)]
                made += whole + whole[-1:] * (groups - live)
            e.store(self._in_words(e, made), x[1])
            size = together * groups * self.lanes * self.key.rounded_bytes
            return [e.at(x[0], together * live * e.bytes), e.at(x[1], size), *counts]

        trips = b.udiv(vectors, I64(together)) if together > 1 else vectors
        counts = e.loop(trips, [e.pointer(floats), e.pointer(pairs), *[e.ints(0)] * live], rounded)[2:]
        for g in range(live):
            count = self._across_keys(e, counts[g], b.add)
            middles = [b.mul(count, e.ints(middle)) for middle in self.value_middles]
            for i, x in enumerate((known[g][0], added[g], *middles)):
                e.store(x, e.pointer(sums), (g * self.key.value_stats + i) * e.bytes)

    def _in_words(self, e: Emitter, x: list[Value]) -> Value:
        """Vectors of integers, one of each group of channels of some keys, in words [joined keys][row][group]
        of as many keys."""
        groups, joined = self.key.value_groups, self.key.joined
        keys = len(x) // groups * self.keys
        while len(x) & (len(x) - 1):
            x = [*x, x[-1]]
        y = self._joined(e, [self._integers(e, z) for z in x])
        order = [
            (key // self.keys * groups + g) * self.lanes + key % self.keys * self.rows + row
            for first in range(0, keys, joined)
            for row in range(self.rows)
            for g in range(groups)
            for key in range(first, first + joined)
        ]
        return e.shuffle(y, y, order)

    # O = alpha·O + P·V
    @stage
    def accumulate_codes(self, e: Emitter, v_rows, pairs, o, alpha, sums, count, later, further) -> None:
        """`count` times as many keys as are joined, whose sums are made apart and then added. Meanwhile the
        `later` rows are prefetched, and of some rows a line `further` bytes on."""
        self._all_columns(e, (v_rows, pairs, o, alpha, sums, count, later), further, self._walks())

    @stage
    def accumulate_whole_rows(self, e: Emitter, v_rows, pairs, o, alpha, sums, count, later, further) -> None:
        """`accumulate_codes` with twice as many sums in a walk: see `whole_rows` of the key."""
        walks = self._walks(2 * SUMS)
        self._all_columns(e, (v_rows, pairs, o, alpha, sums, count, later), further, walks)

    def _all_columns(self, e: Emitter, args: Any, further: Value, walks: Any) -> None:
        """`accumulate_codes` in these walks over the keys."""
        rows_later, of_row = range(self.key.rows_later), self._lines(self.key.v, self.key.head_dim_v)
        lines, read = [(j, byte) for j in rows_later for byte in of_row], set[int]()
        for n, (own, some) in enumerate(walks):
            near = {u * e.bytes // LINE * LINE for u, _ in some} - read
            read |= near
            self._some_columns(
                e, own, some, args, lines[n :: len(walks)], sorted(near), None if n else further
            )

    def _some_columns(
        self, e: Emitter, rows: range, columns: Any, args: Any, lines: Any, near: Any, further: Value | None
    ) -> None:
        """One walk over the keys, for some rows and parts of units. It prefetches `lines` of keys that are
        read a block later, and those `near`, by their first bytes, of keys that are read soon; the first walk
        asks `further`, too."""
        v_rows, pairs, o, alpha, sums, count, later = args
        n = self.key.joined
        weights = self.key.value_groups * self.rows * n * self.key.rounded_bytes
        places = (v_rows, 8 * n), (pairs, weights), (later, 8 * self.key.rows_later)
        zeros = [e.ints(0)] * (2 * len(columns) * len(rows) * self.pieces)
        with e.walk(count, *places, rolled=True, carried={"acc": zeros}) as walk:
            p_rows, p_weights, p_later = walk
            keys = [e.pointer(e.load(p_rows, 8 * j, I64)) for j in range(n)]
            ahead = [(p_later, j, byte, PREFETCH_LEVEL) for j, byte in lines]
            ahead += [] if further is None else self._further(p_rows, range(n), further)
            self._ask_lines(e, ahead + self._near(p_rows, range(n), near))
            walk.acc = self._weigh_keys(e, keys, p_weights, walk.acc, rows, columns)
        self._add_values(e, walk.acc, o, alpha, sums, rows, columns)

    def _weigh_keys(
        self, e: Emitter, keys: list[Value], p_weights: Value, acc: list[Value], rows: range, columns: Any
    ) -> list[Value]:
        """Add the values of two keys to the sums."""
        key, weights = self.key, {}
        units = sorted({u for u, _ in columns})
        words = [{u: self._words(e, row, key.v, key.head_dim_v, u) for u in units} for row in keys]
        for c, (u, n) in enumerate(columns):
            parts = [self._part(e, words[j][u], key.v, n) for j in (0, 1)]
            for half in (0, 1):
                y = e.interleave_blocks(parts[0], parts[1], half)
                for m, r in enumerate(rows):
                    if (u, r) not in weights:
                        weights[u, r] = self._pieces(e, p_weights, u, r)[0]
                    at = (c * 2 + half) * len(rows) + m
                    acc[at] = self._dot(e, acc[at], y, weights[u, r])
        return acc

    def _add_values(
        self, e: Emitter, acc: list[Value], o: Value, alpha: Value, sums: Value, rows: range, columns: Any
    ) -> None:
        """O of a block from the sums of its integers."""
        p_o = e.pointer(o)
        for m, r in enumerate(rows):
            shrink = e.splat(e.load(e.pointer(alpha), r * 4, F32))
            for c, (u, n) in enumerate(columns):
                unit, added = (self._of_channels(e, sums, u, r, i) for i in (0, 1))
                own = n % len(self.value_middles)
                more = e.b.bitcast(self._of_channels(e, sums, u, r, 2 + own), e.vi)
                unit = e.b.fmul(unit, e.floats(self.value_units[own]))
                for half in (0, 1):
                    at = ((c * 2 + half) * len(rows) + m) * self.pieces
                    x = self._whole(e, acc[at : at + self.pieces])
                    x = e.b.sub(x, more) if self.value_middles[own] else x
                    x = e.fma(e.b.sitofp(x, e.vf), unit, added)
                    place = (u * self.rows + r) * self.parts * e.bytes + (2 * n + half) * e.bytes
                    e.store(e.fma(shrink, e.load(p_o, place), x), p_o, place)

    def _walks(self, most: int = SUMS) -> list[tuple[range, list[tuple[int, int]]]]:
        """Rows, and units and parts of V's words, whose sums are made in one walk over the keys."""
        units, rows = self._units_of(self.key.v, self.key.head_dim_v), min(self.rows, ROWS_AT_ONCE)
        columns = [(u, n) for u in units for n in range(per_word(self.key.v))]
        many = min(len(columns), max(1, most // (2 * rows * self.pieces)))
        firsts = [(row, at) for row in range(0, self.rows, rows) for at in range(0, len(columns), many)]
        return [(range(row, row + rows), columns[at : at + many]) for row, at in firsts]

    def _lane_groups(self, unit: int) -> list[int]:
        """The group of channels of every lane of a sum of a unit."""
        channels = self.key.v.scale.channels
        if not channels:
            return [0] * self.lanes
        per_lane = 8 * per_word(self.key.v)  # channels of 128 bits
        return [(unit * self.key.unit + lane // 4 * per_lane) // channels for lane in range(self.lanes)]

    def _pieces(self, e: Emitter, weights: Value, unit: int, row: int) -> list[Value]:
        """The weights of a row and of the keys that are joined for every lane of a sum, each piece apart."""
        groups, n = self._lane_groups(unit), self.pieces
        first, place = min(groups), (row * self.key.value_groups + min(groups)) * 4 * n
        if self.key.value_groups == 1:
            made = [e.splat(e.load(weights, place + 4 * i, I32)) for i in range(n)]
        else:
            count = n << max(groups[-1] - first, 0).bit_length()
            x = e.load(weights, place, ir.VectorType(I32, count))
            made = [e.shuffle(x, x, (n * (g - first) + i for g in groups)) for i in range(n)]
        return [e.b.bitcast(x, self.words) for x in made]

    def _of_channels(self, e: Emitter, sums: Value, unit: int, row: int, which: int) -> Value:
        """A word at `sums`, of a row, for every lane of a sum."""
        groups = self._lane_groups(unit)
        p, x = e.pointer(sums), None
        groups = [min(g, self.key.live_groups - 1) for g in groups]
        for g in sorted(set(groups)):
            own = e.splat(e.load(p, ((g * self.key.value_stats + which) * self.lanes + row) * 4, F32))
            mine = ir.Constant(e.vbits, [other == g for other in groups])
            x = own if x is None else e.b.select(mine, own, x)
        return x

    def _narrow(self, e: Emitter, x: list[Value]) -> Value:
        """A unit of O, [part of a word][half of 128 bits][lane], as channels in their order."""
        step, n = self.parts // 2, self.lanes
        y = self._joined(e, [e.narrow(part, self.key.storage) for part in x])
        order = []
        for channel in range(step * 2 * n):
            word, part = divmod(channel, step)
            block, place = divmod(word, 8)
            order.append((2 * part + place // 4) * n + 4 * block + place % 4)
        return e.shuffle(y, y, order)
