"""Weights as bytes, made in one pass over the scores: what softmax stores is what V's codes meet.

y[key][row] = exp(score - m)·scale of the key     p8 = y in 255ths of the largest y of its row and block
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from polyflash.backends.cpu.decode_codes_blocks import CodesTile
from polyflash.backends.cpu.decode_codes_integers import ROUNDED
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I8, I16, I32, I64, Emitter, Value

# 2**f on [0, 1) as 1 + f*(c1 + f*(c2 + f*c3)), as in simd.py; it errs by 8.6e-5, a byte by 2e-3
EXP2_OF_BYTES = (0.69511682, 0.22764482, 0.0770672)
FLOOR = -64.0  # the exponent from which on a weight is not 0
DOWN = 9  # of a `vreduceps`: to the integer below, quietly


class ByteWeights(CodesTile):
    """Emissions of a tile whose weights are bytes."""

    @stage
    def weigh_scores(
        self,
        e: Emitter,
        s,
        floats,
        pairs,
        sums,
        vectors,
        scales,
        shifts,
        block,
        stats,
        scale_bits,
        later,
    ) -> Value:
        """`online_softmax` and `weigh_codes` of the weights that are positive; returns whether any is not.
        Those are left at `floats`. With every vector some rows of V that are read later are prefetched."""
        b, live, shifted = e.b, self.key.live_groups, self.key.v.shift is not None
        alpha, m_safe = self._new_maximum(e, block, stats, scale_bits)
        scale, step = e.splat(e.float_bits(scale_bits)), 4 * self.keys * live

        def scaled(i: Value, x: list[Value]) -> list[Value]:
            p_later, p_s, p_held, p_scale, p_shift, total, *tops = x
            p_later = self._ask_weighing(e, p_later)
            d = b.fmul(b.fsub(e.load(p_s), m_safe), scale)
            seen = b.fcmp_unordered(">", d, e.floats(FLOOR))
            weight = self._power_of_seen(e, d, seen)
            most, least, totals = tops[:live], tops[live : 2 * live], tops[2 * live :]
            for g in range(live):
                y = b.select(seen, b.fmul(weight, self._of_keys(e, p_scale, g, live)), e.floats(0))
                e.store(y, p_held, g * e.bytes)
                bits = b.bitcast(y, e.vi)
                most[g] = e.smax(most[g], bits)
                least[g] = b.select(b.icmp_unsigned(">", bits, least[g]), bits, least[g])
                if shifted:
                    moved = e.fma(weight, self._of_keys(e, p_shift, g, live), totals[g])
                    totals[g] = b.select(seen, moved, totals[g])
            further = [
                p_later,
                e.at(p_s, e.bytes),
                e.at(p_held, live * e.bytes),
                e.at(p_scale, step),
            ]
            return [*further, e.at(p_shift, step), b.fadd(total, weight), *most, *least, *totals]

        zeros, none = [e.ints(0)] * (2 * live), [e.floats(0)] * live
        start = [*(e.pointer(x) for x in (later, s, floats, scales, shifts)), e.floats(0), *zeros, *none]
        l_new, *tops = e.loop(vectors, start, scaled)[5:]
        p_stats = e.pointer(stats)
        e.store(e.fma(alpha, e.load(p_stats, e.bytes), l_new), p_stats, e.bytes)
        totals = [self._across_keys(e, x, b.fadd) for x in tops[2 * live :]]
        self._round_weights(e, floats, pairs, sums, vectors, tops[:live], totals, 0)
        others = tops[live]
        for x in tops[live + 1 : 2 * live]:
            others = b.or_(others, x)
        any_other = e.call(f"llvm.vector.reduce.smin.v{self.lanes}i32", I32, [others])
        return b.zext(b.icmp_signed("<", any_other, I32(0)), I64)

    def _power_of_seen(self, e: Emitter, d: Value, seen: Value) -> Value:
        """2**d, 0 where nothing is seen."""
        undefined, every = ir.Constant(e.vf, ir.Undefined), ir.Constant(I16, -1)
        f = e.call("llvm.x86.avx512.mask.reduce.ps.512", e.vf, [d, I32(DOWN), undefined, every, I32(4)])
        p = e.fma(e.polynomial(EXP2_OF_BYTES, f), f, e.floats(1))
        args = [p, d, e.floats(0), e.b.bitcast(seen, I16), I32(4)]
        return e.call("llvm.x86.avx512.mask.scalef.ps.512", e.vf, args)

    @stage
    def weigh_others(self, e: Emitter, floats, pairs, sums, vectors) -> None:
        """`weigh_scores` of the weights that are negative, which it left; what is added counts no more."""
        b, live, sign = e.b, self.key.live_groups, e.ints(-(1 << 31))

        def flipped(i: Value, x: list[Value]) -> list[Value]:
            p, *tops = x
            for g in range(live):
                bits = b.xor(e.load(p, g * e.bytes, e.vi), sign)
                e.store(bits, p, g * e.bytes)
                tops[g] = e.smax(tops[g], bits)
            return [e.at(p, live * e.bytes), *tops]

        tops = e.loop(vectors, [e.pointer(floats), *[e.ints(0)] * live], flipped)[1:]
        self._round_weights(e, floats, pairs, sums, vectors, tops, [e.floats(0)] * live, -(1 << 31))

    def _round_weights(
        self, e: Emitter, floats, pairs, sums, vectors, tops: list[Value], totals: list[Value], flip: int
    ) -> None:
        """The floats that are positive as bytes, [four keys][row][group], and what sums need of them."""
        b, groups, live = e.b, self.key.value_groups, self.key.live_groups
        known = [self._steps(e, self._across_keys(e, top, e.smax), self.most_weight) for top in tops]
        alone, least = groups == 1, e.ints(ROUNDED)
        together = min(4, self.rows) if alone else max(1, self.key.joined // self.keys)
        ones = ir.Constant(ir.VectorType(I8, 4 * self.lanes), [1] * 4 * self.lanes)

        def rounded(i: Value, x: list[Value]) -> list[Value]:
            made, counts = [], x[2:]
            for m in range(together):
                places = ((m * live + g) * e.bytes for g in range(live))
                whole = [
                    self._rounded(e, e.load(x[0], place), by)
                    for place, (_, by) in zip(places, known, strict=True)
                ]
                if not alone:
                    whole = [e.smax(y, least) for y in whole]
                    counts = [b.add(n, b.sub(y, least)) for n, y in zip(counts, whole, strict=True)]
                made += whole + whole[-1:] * (groups - live)
            if alone:
                words = self._packed(e, made)
                counts = [self._dot(e, counts[0], words, ones)]
            else:
                words = self._in_words(e, made)
            size = together * groups * self.lanes
            some = e.shuffle(words, words, range(size)) if alone else words
            e.store(some, x[1])
            return [e.at(x[0], together * live * e.bytes), e.at(x[1], size), *counts]

        start = [e.pointer(floats), e.pointer(pairs), *[e.ints(0)] * live]
        counts = e.loop(b.udiv(vectors, I64(together)), start, rounded)[2:]
        for g in range(live):
            count = self._across_keys(e, counts[g], b.add)
            added = [b.mul(count, e.ints(middle)) for middle in self.value_middles]
            unit = b.xor(b.bitcast(known[g][0], e.vi), e.ints(flip))
            for n, x in enumerate((unit, totals[g], *added)):
                e.store(x, e.pointer(sums), (g * self.key.value_stats + n) * e.bytes)

    def _packed(self, e: Emitter, x: Sequence[Value]) -> Value:
        """The low 16 bits of up to four vectors of weights, held to unsigned bytes, as [four keys][row][key];
        zeros behind them."""
        n, words = self.lanes, ir.VectorType(I16, 2 * self.lanes)
        zero = e.ints(0)
        x = [*x, *[zero] * (4 - len(x))]
        order = [
            2 * (key // self.keys * n + key % self.keys * self.rows + row)
            for first in range(0, 2 * self.keys, min(4, 2 * self.keys))
            for row in range(self.rows)
            for key in range(first, first + 4)
        ]
        low, high = (
            e.shuffle(e.b.bitcast(u, words), e.b.bitcast(v, words), order) for u, v in (x[:2], x[2:])
        )
        packed = e.call("llvm.x86.avx512.packuswb.512", ir.VectorType(I8, 4 * n), [low, high])
        eights = e.b.bitcast(packed, ir.VectorType(I64, n // 2))
        eights = e.shuffle(eights, eights, [*range(0, n // 2, 2), *range(1, n // 2, 2)])
        return e.b.bitcast(eights, ir.VectorType(I8, 4 * n))
