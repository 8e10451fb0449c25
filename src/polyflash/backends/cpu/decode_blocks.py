"""The stages of a tile of at most 8 query rows as vector functions: lanes are channels, so that K and V are
read in place, each once, in the order they lie in memory.

    S[key][row] = K[key][:] · Q[row][:]           a tree of additions finishes one vector of scores at a time
    O[row][channel] = alpha·O + Σ_key P[key][row]·V[key][channel]

Q and O stand in scratch as [unit][row][part][lane], a unit being what one load brings, see decode_units.py.
With a dot, two keys' V are interleaved in registers and meet pairs of weights; a single row needs no dot for
V and reads it key by key. A vector of scores is [key][row], the row the faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from polyflash.backends.cpu.address_lists import AddressLists
from polyflash.backends.cpu.blocks import Tile, kept
from polyflash.backends.cpu.configs import STEP
from polyflash.backends.cpu.decode_configs import KEYS_PER_GROUP, NARROW, WIDTH, DecodeKey
from polyflash.backends.cpu.decode_many_blocks import joined
from polyflash.backends.cpu.decode_turns import Turns
from polyflash.backends.cpu.decode_units import Later, far, sums_of_lanes
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import F32, I32, I64, Emitter, Value

UNSEEN = -0.0  # the weight of a key that a row does not see; one too small to keep is +0.0


class DecodeTile(AddressLists, Turns):
    """Emissions for one key. Methods named as the stages they emit."""

    def __init__(self, key: DecodeKey) -> None:
        super().__init__(key)
        self.keys = self.lanes // self.rows  # of one vector of scores
        self.atom = I32 if self.pairs else F32  # of weights
        self.degree = 5 if key.storage == "float32" else 4
        self.whole = Tile(key.row_key)
        self.group_weights = KEYS_PER_GROUP // key.pack * key.rows * 4  # bytes

    @stage
    def fill(self, e: Emitter, dst: Value, vectors: Value, bits: Value) -> None:
        self.whole.fill(e, dst, vectors, bits)

    @stage
    def gather_row(self, e: Emitter, src: Value, stride: Value, count: Value, dst: Value) -> None:
        self.whole.gather_row(e, src, stride, count, dst)

    @stage
    def load_query(self, e: Emitter, src: Value, channels: Value, dst: Value, sign: Value) -> None:
        """One row into its place of every unit; `sign` flips the bits of a negative scale, exactly."""
        b, flip = e.b, e.splat(e.b.trunc(sign, I32))
        row = e.pointer(src)

        def step(at: Value, p: list[Value], mask: Value | None, units: int) -> list[Value]:
            x = self._raw(e, row, at, mask)
            for c, part in enumerate([x] if self.dot else self._split(e, x)):
                e.store(b.xor(b.bitcast(part, e.vi), flip), p[0], c * e.bytes)
            return [e.at(p[0], self.rows * self.query_bytes(e))]

        self._units(e, channels, [e.pointer(dst)], step)

    # S = K·Q
    @stage
    def scores(
        self, e: Emitter, k_rows, q, s, top, groups, channels, limits, key, factor, cap, later, runs
    ) -> None:
        """Scores of `groups` vectors of keys from `key` on, -inf outside a row's limits, and their running
        maximum. If `factor` is not 0 its low half scales them, and if `cap` is not, they are
        cap·tanh(factor·s)."""
        b, p_limits, p_q = e.b, e.pointer(limits), e.pointer(q)
        p_sums = b.alloca(e.vf, size=self.lanes) if self.rows == 1 else None
        spread = self._spread(e, later, channels, runs)
        lo, width = e.load(p_limits, 0, e.vi), e.load(p_limits, e.bytes, e.vi)
        in_group = ir.Constant(e.vi, [lane // self.rows for lane in range(self.lanes)])
        first = b.add(e.splat(b.trunc(key, I32)), in_group)
        change = self._change(e, factor, cap)

        def group(channels: Value | int, q: Any, i: Value, values: list[Value]) -> list[Value]:
            p_rows, p_s, largest, at, p_later = values
            sums: list[Value] = []
            if self.rows > 1:
                for j in range(self.keys):
                    row, next_row = (e.pointer(e.load(p, 8 * j, I64)) for p in (p_rows, p_later))
                    sums += self._dots(e, row, far(next_row), q, channels, spread)
            else:
                places = (p_rows, 8), (p_later, 8), (p_sums, e.bytes)
                with e.walk(self.keys, *places, rolled=True) as (*listed, p_sum):
                    row, next_row = (e.pointer(e.load(x, 0, I64)) for x in listed)
                    e.store(self._dots(e, row, far(next_row), q, channels, spread)[0], p_sum)
                sums = [e.load(p_sums, n * e.bytes) for n in range(self.lanes)]
            x = e.apply_mask(change(sums_of_lanes(e, sums)), b.sub(at, lo), width)
            e.store(x, p_s)
            ahead, p_later = e.at(p_rows, 8 * self.keys), e.at(p_later, 8 * self.keys)
            return [ahead, e.at(p_s, e.bytes), e.maximum(x, largest), b.add(at, e.ints(self.keys)), p_later]

        def groups_of(channels: Value | int, q: Any, groups: Value) -> None:
            start = [e.pointer(k_rows), e.pointer(s), e.load(p_top), first, e.pointer(later)]
            e.store(e.loop(groups, start, partial(group, channels, q))[2], p_top)

        # Few rows of pairs are held: a load of Q beside each line of K costs as much as a dot.
        p_top, left = e.pointer(top), groups
        for known in (NARROW, WIDTH) if self.dot and 1 < self.rows <= 4 else ():
            mine = b.icmp_signed("==", channels, I64(known))

            def held(_: list[Value], known: int = known) -> list[Value]:
                groups_of(known, self._held(e, p_q, known), groups)
                return []

            e.where(mine, [], held)
            left = b.select(mine, I64(0), left)
        groups_of(channels, p_q, left)

    def _change(self, e: Emitter, factor: Value, cap: Value) -> Callable[[Value], Value]:
        change = self._change_all(e, factor, cap)
        return lambda x: change([x])[0]

    def _change_all(self, e: Emitter, factor: Value, cap: Value) -> Callable[[list[Value]], list[Value]]:
        """The change of several vectors, which no branch parts."""
        b = e.b
        scaled, capped = (b.icmp_signed("!=", word, I64(0)) for word in (factor, cap))
        shrink, grow = e.splat(e.float_bits(factor)), e.splat(e.float_bits(cap))

        def changed(x: list[Value]) -> list[Value]:
            x = e.where(scaled, x, lambda v: [b.fmul(y, shrink) for y in v])
            return e.where(capped, x, lambda v: [b.fmul(grow, e.tanh(y)) for y in v])

        return changed

    def _dots(
        self,
        e: Emitter,
        row: Value,
        later: Later,
        q: Value | list[list[list[Value]]],
        channels: Value | int,
        spread: Value | None,
    ) -> list[Value]:
        """A vector of partial sums of one key for every row of Q, which is an address or `_held`."""
        width, unit_bytes = self.query_bytes(e), self.unit * self.size
        held = q if isinstance(q, list) else None

        def step(at: Value, values: list[Value], mask: Value | None, units: int) -> list[Value]:
            p_q, sums = values[0], values[1:]
            self._prefetch(e, later, at, units, spread)
            for u in range(units):
                x = self._raw(e, e.at(row, u * unit_bytes), at, mask)
                for c, part in enumerate([x] if self.dot else self._split(e, x)):
                    for r in range(self.rows):
                        y = held[u][c][r] if held else e.load(p_q, (u * self.rows + r) * width + c * e.bytes)
                        sums[r] = e.dot_bf16(sums[r], part, y) if self.dot else e.fma(part, y, sums[r])
            return [p_q if held else e.at(p_q, units * self.rows * width), *sums]

        start = [I64(0) if held else q, *[e.floats(0)] * self.rows]
        return self._units(e, channels, start, step, self.steps)[1:]

    # online_softmax
    @stage
    def online_softmax(self, e: Emitter, s, vectors, block, stats, scale_bits) -> None:
        """m_i, l_i and alpha of every row; S becomes P, with a dot as bfloat16 pairs [two keys][row]. l_i
        stays spread over the lanes of a row. As in the forward kernel the maximum is subtracted before
        scaling, so the largest weight is exactly 1."""
        b, p_stats, minus_inf = e.b, e.pointer(stats), e.floats(float("-inf"))
        alpha, m_safe = self._new_maximum(e, block, stats, scale_bits)

        def body(i: Value, values: list[Value]) -> list[Value]:
            weights = []
            for n in range(together):
                x = e.load(values[0], n * e.bytes)
                weight = self._power(e, b.fsub(x, m_safe), scale_bits, self.degree)
                weight = b.select(b.fcmp_ordered("==", x, minus_inf), e.floats(UNSEEN), weight)
                e.store(self._pairs(e, weight) if self.pairs else weight, values[1], n * stored)
                weights.append(weight)
            total = e.summed(weights)  # equal weights that join a large sum one by one all round the same way
            ahead = [e.at(values[0], together * e.bytes), e.at(values[1], together * stored)]
            return [*ahead, b.fadd(values[2], total)]

        together, stored = min(8, STEP // self.keys), e.bytes // self.key.pack
        trips = b.udiv(vectors, I64(together))
        l_new = e.loop(trips, [e.pointer(s), e.pointer(s), e.floats(0)], body)[2]
        e.store(e.fma(alpha, e.load(p_stats, e.bytes), l_new), p_stats, e.bytes)

    def _new_maximum(self, e: Emitter, block: Value, stats: Value, scale_bits: Value) -> tuple[Value, Value]:
        """m_i and alpha of every row, from the largest scores at `block`; returns alpha and what scores are
        less."""
        b, p_block, p_stats = e.b, e.pointer(block), e.pointer(stats)
        top = self._across_keys(e, e.load(p_block), e.maximum)
        m_old = e.load(p_stats)
        m_new = e.maximum(top, m_old)
        m_safe = b.select(b.fcmp_ordered("==", m_new, e.floats(float("-inf"))), e.floats(0), m_new)
        alpha = kept(e, self._power(e, b.fsub(m_old, m_safe), scale_bits, 6))
        e.store(m_new, p_stats)
        e.store(alpha, p_block)
        return alpha, m_safe

    def _power(self, e: Emitter, d: Value, scale_bits: Value, degree: int) -> Value:
        scale = e.splat(e.float_bits(scale_bits))
        if self.key.storage == "float32":
            return e.exp2_scaled(d, scale, e.splat(e.float_bits(e.b.lshr(scale_bits, I64(32)))), degree)
        return e.exp2(e.b.fmul(d, scale), degree)

    def _pairs(self, e: Emitter, weight: Value) -> Value:
        """A vector of weights as bfloat16, two keys of a row side by side."""
        order = [
            ((2 * pair + half) * self.rows + row)
            for pair in range(self.keys // 2)
            for row in range(self.rows)
            for half in (0, 1)
        ]
        bits = e.as_bf16(weight)
        return e.shuffle(bits, bits, order)

    def _across_keys(
        self, e: Emitter, x: Value, combine: Callable[[Value, Value], Value], rows: int = 0
    ) -> Value:
        """Every lane of a row gets what `combine` makes of all of them; of `rows` rows, if it is not 0."""
        distance = self.lanes // 2
        while distance >= (rows or self.rows):
            x = combine(x, e.shuffle(x, x, (lane ^ distance for lane in range(self.lanes))))
            distance //= 2
        return x

    # O = alpha·O + P·V
    @stage
    def accumulate(self, e: Emitter, v_rows, p, o, alpha, ones, groups, channels, later, runs) -> None:
        """`groups` of KEYS_PER_GROUP keys. Each group's sum is made apart and then added: a chain over all
        keys would lose digits, and O is loaded and stored once per group."""
        self._accumulate(e, v_rows, p, o, alpha, ones, groups, channels, later, runs, bounded=False)

    @stage
    def accumulate_seen(self, e: Emitter, v_rows, p, o, alpha, ones, groups, channels, later, runs) -> None:
        self._accumulate(e, v_rows, p, o, alpha, ones, groups, channels, later, runs, bounded=True)

    def _accumulate(
        self, e: Emitter, v_rows, p, o, alpha, ones, groups, channels, later, runs, *, bounded: bool
    ) -> None:
        spread = self._spread(e, later, channels, runs)
        p_ones, p_o = e.pointer(ones), e.pointer(o)

        def group(i: Value, values: list[Value]) -> list[Value]:
            p_rows, p_p, p_alpha, p_later = values
            self._weigh(e, [p_p, p_alpha, p_o], (p_rows, p_later), channels, spread, bounded)
            p_next = e.at(p_p, self.group_weights)
            return [e.at(p_rows, 8 * KEYS_PER_GROUP), p_next, p_ones, e.at(p_later, 8 * KEYS_PER_GROUP)]

        e.loop(groups, [e.pointer(v_rows), e.pointer(p), e.pointer(alpha), e.pointer(later)], group)

    def _weigh(self, e: Emitter, places, listed, channels, spread, bounded, at_once: int = 0) -> None:
        """One group of keys; `places` are of weights, alpha (None if it is 1) and O, `listed` the lists of V
        rows and of rows that are read next, or what gives those of a key. `at_once` query rows share a walk
        over the keys of the group, all of them if it is 0."""
        pack, unit_bytes, step_bytes = self.key.pack, self.unit * self.size, self.rows * self.parts * e.bytes
        (p_p, p_alpha, p_o), trips, at_once = places, KEYS_PER_GROUP // pack, at_once or self.rows

        def units(at: Value, p: list[Value], mask: Value | None, count: int) -> list[Value]:
            for first in range(0, self.rows, at_once):
                some_rows(at, p, mask, count, first)
            return [e.at(p[0], count * step_bytes)]

        def some_rows(at: Value, p: list[Value], mask: Value | None, count: int, first: int) -> None:
            def weighed(pairs: list[tuple[Value, Later]], p_weights: Value, sums: list[Value]) -> None:
                for _, later in pairs:
                    self._prefetch(e, later, at, count, spread)
                whole_rows = [
                    [self._raw(e, e.at(row, u * unit_bytes), at, mask) for u in range(count)]
                    for row, _ in pairs
                ]
                raw = [list(unit) for unit in zip(*whole_rows, strict=True)]
                for r in range(at_once):
                    weight = e.splat(e.load(p_weights, (first + r) * 4, self.atom))
                    self._add_keys(e, sums, r, weight, raw, bounded)

            places = [] if callable(listed) else [(p, 8 * pack) for p in listed]
            zeros = [e.floats(0)] * (at_once * count * self.parts)
            with e.walk(trips, *places, (p_p, 4 * self.rows), rolled=True, carried={"sums": zeros}) as walk:
                *lists, p_weights = walk
                if callable(listed):
                    n = e.b.mul(walk.index, I64(pack))
                    pairs = [listed(e.b.add(n, I64(j))) for j in range(pack)]
                else:
                    rows = [[e.pointer(e.load(p, 8 * j, I64)) for j in range(pack)] for p in lists]
                    pairs = [(row, far(later)) for row, later in zip(*rows, strict=True)]
                weighed(pairs, p_weights, walk.sums)
            for r in range(at_once):
                shrink = None if p_alpha is None else e.splat(e.load(p_alpha, (first + r) * 4, F32))
                for c in range(count * self.parts):
                    u, part = divmod(c, self.parts)
                    place = u * step_bytes + ((first + r) * self.parts + part) * e.bytes
                    before, more = e.load(p[0], place), walk.sums[r * count * self.parts + c]
                    total = e.b.fadd(before, more) if shrink is None else e.fma(shrink, before, more)
                    e.store(total, p[0], place)

        self._units(e, channels, [p_o], units, (1,) if bounded else self.units_at_once(at_once))

    def _add_keys(
        self, e: Emitter, sums: list[Value], r: int, weight: Value, raw: list[list[Value]], bounded: bool
    ) -> None:
        """Row r's sums of a group, plus the V of one key (with a dot: of two) times its weight."""
        b, bits = e.b, e.b.bitcast(weight, e.vi)
        signs = (b.shl(bits, e.ints(16)), bits) if self.pairs else (bits,)
        if bounded:
            weight = self._kept(e, bits)
        loaded = []
        for unit in raw:
            if bounded:
                unit = [self._where_seen(e, sign, x) for sign, x in zip(signs, unit, strict=True)]
            loaded += e.interleave(*unit) if self.pairs else self._split(e, unit[0])
        for c, x in enumerate(loaded):
            at = r * len(loaded) + c
            sums[at] = e.dot_bf16(sums[at], x, weight) if self.pairs else e.fma(weight, x, sums[at])

    def _kept(self, e: Emitter, bits: Value) -> Value:
        """Weights of which none is 0, which would turn an infinity of V into NaN."""
        b = e.b
        if not self.pairs:
            return b.bitcast(b.select(b.icmp_signed("==", bits, e.ints(0)), e.ints(1), bits), e.vf)
        for half in (0xFFFF, -0x10000):  # a dot takes what is subnormal for 0
            least = e.ints(0x00800080 & half)
            bits = b.select(
                b.icmp_signed("==", b.and_(bits, e.ints(half)), e.ints(0)), b.or_(bits, least), bits
            )
        return bits

    def _where_seen(self, e: Emitter, weight: Value, x: Value) -> Value:
        """`x`, or zeros if the sign of the weight's bits says UNSEEN."""
        unseen = e.b.icmp_signed("<", e.b.extract_element(weight, I32(0)), I32(0))
        return e.b.select(unseen, ir.Constant(x.type, None), x)

    @stage
    def has_nan(self, e: Emitter, o: Value, vectors: Value) -> Value:
        def body(i: Value, x: list[Value]) -> list[Value]:
            return [e.at(x[0], e.bytes), e.b.fadd(x[1], e.b.fmul(e.load(x[0]), e.floats(0)))]

        total = e.loop(vectors, [e.pointer(o), e.floats(0)], body)[1]
        return e.b.zext(e.any_lane(e.b.fcmp_unordered("uno", total, total)), I64)

    # merge
    @stage
    def merge_stats(self, e: Emitter, partials, stride, count, stats, scale_bits) -> None:
        """Shares of splits, as in decode_many_blocks.py."""

        def power(d: Value, degree: int) -> Value:
            return self._power(e, d, scale_bits, degree)

        p_stats, (m, l_i) = e.pointer(stats), joined(e, partials, stride, count, 0, e.bytes, power)
        e.store(m, p_stats)
        e.store(l_i, p_stats, e.bytes)

    @stage
    def merge_outputs(self, e: Emitter, partials, stride, count, offset, o, units) -> None:
        """O = the sum of every split's share times its O, in the order of the splits."""
        vectors = self.rows * self.parts

        with e.walk(units, (o, vectors * e.bytes), carried={"offset": offset}) as unit:
            (place,) = unit
            with e.walk(count, (partials, stride), carried={"sums": [e.floats(0)] * vectors}) as walk:
                (split,) = walk
                p_o = e.at(split, unit.offset)
                walk.sums = [
                    e.fma(e.splat(e.load(split, c // self.parts * 4, F32)), e.load(p_o, c * e.bytes), x)
                    for c, x in enumerate(walk.sums)
                ]
            for c, total in enumerate(walk.sums):
                e.store(total, place, c * e.bytes)
            unit.offset = e.b.add(unit.offset, I64(vectors * e.bytes))

    # finalize
    @stage
    def row_stats(self, e: Emitter, stats, row, dst, scale_bits, sink_bits) -> None:
        """(lse, divisor of O) of one row, each as a vector."""
        p, p_dst = e.pointer(stats), e.pointer(dst)
        l_i = self._across_keys(e, e.load(p, e.bytes), e.b.fadd)
        e.store(l_i, p_dst, e.bytes)  # so that a lane of the row can be read
        at = e.b.mul(row, I64(4))
        m, total = e.load(p, at, F32), e.load(p_dst, e.b.add(at, I64(e.bytes)), F32)
        e.store(e.splat(m), p_dst)
        e.store(e.splat(total), p_dst, e.bytes)
        self.whole.finish_stats(e, dst, scale_bits, sink_bits)

    @stage
    def store_row(self, e: Emitter, o, stats, dst, channels) -> None:
        """O / divisor of one row, narrowed; a row that sees no key is 0."""
        row, divided = e.pointer(dst), self._divided(e, stats)

        def step(at: Value, p: list[Value], mask: Value | None, units: int) -> list[Value]:
            x = [divided(e.load(p[0], c * e.bytes)) for c in range(self.parts)]
            e.store(self._narrow(e, x), row, at, mask)
            return [e.at(p[0], self.rows * self.parts * e.bytes)]

        self._units(e, channels, [e.pointer(o)], step)

    def _divided(self, e: Emitter, stats: Value) -> Callable[[Value], Value]:
        b, divisor = e.b, e.load(e.pointer(stats), e.bytes)
        empty = b.fcmp_ordered("==", divisor, e.floats(0))
        inverse = b.fdiv(e.floats(1), divisor)
        return lambda x: b.select(empty, e.floats(0), b.fmul(x, inverse))
