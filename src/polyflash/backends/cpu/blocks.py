"""The stages of one attention tile as vector functions.

    S^T[key][query] = K[key][:] · Q^T[:][query]
    O^T[channel][query] = alpha·O^T + Σ_key V[key][channel]·P^T[key][query]

Lanes are queries, so softmax has no operation across lanes. Both products are one loop over 32-bit atoms,
`acc[r][v] += broadcast(A + r·row + k·step) · B[k][v]`: an atom is one float32 or two bfloat16.
Tiles live in scratch: Q^T and O^T as [atom][lane], K as rows, V as rows (bf16dot: of interleaved key pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from polyflash.backends.cpu.configs import ISAS, STORAGE_BYTES, KernelKey
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import F32, I1, I16, I32, I64, BFloatType, Emitter, Value

Meanwhile = Callable[
    [Value], Callable[[Value], None] | None
]  # of a group: what each of its trips does besides
ROWS_AHEAD = 8  # how many rows before its use K or V is prefetched


class Tile:
    """Emissions for one key. Methods named as the stages they emit."""

    def __init__(self, key: KernelKey) -> None:
        self.key = key
        self.nv, self.nr, self.mr, self.lanes = key.nv, key.panel_rows, key.group_keys, key.lanes
        self.dot = key.compute == "bf16dot"
        self.size = STORAGE_BYTES[key.storage]
        self.atom = I32 if self.dot else F32
        self.raw = self.dot or key.storage == "float32"  # q and k rows are copied as they are
        self.degree = 5 if key.storage == "float32" else 4

    # bringing rows in
    @stage
    def fill(self, e: Emitter, dst: Value, vectors: Value, bits: Value) -> None:
        value = e.splat(e.float_bits(bits))
        with e.walk(vectors, (dst, e.bytes)) as (p,):
            e.store(value, p)

    @stage
    def row_limits(self, e: Emitter, dst, first, last, lo_shift, hi_shift, start, live) -> None:
        """First visible key and number of visible keys per lane; lanes past the last row copy its limits."""
        b, p = e.b, e.pointer(dst)
        lane = e.lane_index()
        first, last, lo_shift, hi_shift, start, live = (
            e.splat(b.trunc(x, I32)) for x in (first, last, lo_shift, hi_shift, start, live)
        )
        for v in range(self.nv):
            row = e.smin(b.add(first, b.add(lane, e.ints(v * self.lanes))), last)
            lo = e.smax(b.add(row, lo_shift), start)
            hi = e.smin(b.add(row, hi_shift), live)
            e.store(lo, p, v * e.bytes)
            e.store(e.smax(b.sub(hi, lo), e.ints(0)), p, (self.nv + v) * e.bytes)

    @stage
    def gather_row(self, e: Emitter, src, stride, count, dst) -> None:
        kind = I32 if self.size == 4 else I16
        with e.walk(count, (src, stride), (dst, self.size)) as (element, place):
            e.store(e.load(element, 0, kind), place)

    def _row(
        self, e: Emitter, src: Value, dst: Value, count: Value, flag: Value | None, raw: bool, ahead: Value
    ) -> Value | None:
        """Copy or convert `count` elements; the last vector is masked, so no byte past the row is touched.

        What lies `ahead` bytes on is prefetched: the CPU's own prefetcher stops at the end of a page, and
        rows of (seqlen, heads, head_dim) tensors are often a page apart."""
        per = self.lanes * 4 // self.size if raw else self.lanes  # elements per step
        kind = e.vf if raw and self.size == 4 else ir.VectorType(I16, per)

        def step(p: list[Value], mask: Value | None) -> list[Value]:
            e.prefetch(e.at(p[0], ahead))
            x = e.load(p[0], 0, kind, mask)
            x = x if raw else e.widen(x, self.key.storage)
            e.store(x, p[1])
            carried = [] if flag is None else [e.fma(x, e.floats(0), p[2])]  # 0·x: NaN if x is not finite
            return [e.at(p[0], per * self.size), e.at(p[1], e.bytes), *carried]

        out = e.each_vector(count, per, [src, dst] if flag is None else [src, dst, flag], step)
        return None if flag is None else out[2]

    @stage
    def load_rows(self, e: Emitter, src, stride, rows, count, dst) -> None:
        ahead = e.b.mul(stride, I64(ROWS_AHEAD))
        with e.walk(rows, (src, stride), (dst, self.key.loaded_row_bytes)) as (row, place):
            self._row(e, row, place, count, None, self.raw, ahead)

    @stage
    def load_float_row(self, e: Emitter, src, count, dst) -> None:
        self._row(e, e.pointer(src), e.pointer(dst), count, None, self.size == 4, I64(0))

    @stage
    def load_value_rows(self, e: Emitter, src0, src1, step, rows, count, dst) -> Value:
        if self.dot:
            return self._load_value_pairs(e, src0, src1, step, rows, count, dst)
        ahead = e.b.mul(step, I64(ROWS_AHEAD))

        with e.walk(rows, (src0, step), (dst, self.key.v_row_bytes), carried={"flag": e.floats(0)}) as walk:
            row, place = walk
            walk.flag = self._row(e, row, place, count, walk.flag, self.raw, ahead)
        return e.b.zext(e.any_lane(e.b.fcmp_unordered("uno", walk.flag, walk.flag)), I64)

    def _load_value_pairs(self, e: Emitter, src0, src1, step, pairs, count, dst) -> Value:
        b, n = e.b, 2 * self.lanes
        kind = ir.VectorType(I16, n)
        ahead = b.mul(step, I64(ROWS_AHEAD // 2))

        def columns(p: list[Value], mask: Value | None) -> list[Value]:
            for q in p[:2]:
                e.prefetch(e.at(q, ahead))
            x, y = (e.load(q, 0, kind, mask) for q in p[:2])
            for h, part in enumerate(e.interleave(x, y)):
                e.store(part, p[2], h * e.bytes)
            bad = b.or_(e.not_finite(x), e.not_finite(y))
            return [e.at(p[0], 2 * n), e.at(p[1], 2 * n), e.at(p[2], 2 * e.bytes), b.or_(p[3], bad)]

        places = (src0, step), (src1, step), (dst, self.key.v_row_bytes)
        with e.walk(pairs, *places, carried={"flag": ir.Constant(ir.VectorType(I1, n), [0] * n)}) as walk:
            walk.flag = e.each_vector(count, n, [*walk, walk.flag], columns)[3]
        return b.zext(e.any_lane(walk.flag), I64)

    @stage
    def pack_query(self, e: Emitter, rows, vectors, dst, sign) -> None:
        """Staged rows into their lanes of a panel; `sign` flips the bits of a negative scale, exactly."""
        flip = e.splat(e.b.trunc(sign, I32))
        with e.walk(vectors, (rows, e.bytes), (dst, self.lanes * self.nr * 4)) as (atoms, panel):
            x = [e.load(atoms, r * self.key.k_row_bytes, e.vi) for r in range(self.lanes)]
            for j, atom in enumerate(e.transpose(x)):
                e.store(e.b.xor(atom, flip), panel, j * self.nr * 4)

    # the two products
    def _product(
        self,
        e: Emitter,
        a,
        row: int,
        step: int,
        b,
        trips,
        unroll: int,
        *,
        stride=0,
        nv=0,
        each=None,
        first=(),
    ) -> list[list[Value]]:
        """acc[r][v] = Σ_k broadcast(a + r·row + k·step) · b[k][v] over trips·unroll atoms; b's rows are
        `stride` bytes apart (0: a panel's) and `nv` vectors wide (0: a panel's). `each` is emitted in every
        trip, with its number; `first` are the sums of the rows before, if they are not 0."""
        nv, mr, stride = nv or self.nv, self.mr, stride or self.nr * 4

        start = [x for x in first or [e.floats(0)] * mr for _ in range(nv)]
        with e.walk(trips, (a, unroll * step), (b, unroll * stride), carried={"acc": start}) as walk:
            (p_a, p_b), acc = walk, walk.acc
            if each is not None:
                each(walk.index)
            for u in range(unroll):
                b_row = [e.load(p_b, u * stride + v * e.bytes) for v in range(nv)]
                for r in range(mr):
                    atom = e.splat(e.load(p_a, r * row + u * step, self.atom))
                    for v in range(nv):
                        acc[r * nv + v] = self._multiply_add(e, acc[r * nv + v], b_row[v], atom)
        return [walk.acc[r * nv : r * nv + nv] for r in range(mr)]

    def _multiply_add(self, e: Emitter, acc: Value, vector: Value, atom: Value) -> Value:
        return e.dot_bf16(acc, vector, atom) if self.dot else e.fma(vector, atom, acc)

    def _scores(self, e: Emitter, k, q, s, bmax, trips, groups, bounds: tuple[Value, Value] | None) -> None:
        b, nv, mr = e.b, self.nv, self.mr
        p_q, p_max = e.pointer(q), e.pointer(bmax)
        if bounds:
            limits, key = e.pointer(bounds[0]), e.splat(b.trunc(bounds[1], I32))

        largest = [e.load(p_max, v * e.bytes) for v in range(nv)]
        with e.walk(groups, (k, mr * self.key_step), (s, mr * self.nr * 4), carried={"top": largest}) as walk:
            p_k, p_s = walk
            acc = self._key_products(e, walk.index, p_k, p_q, trips)
            if bounds:
                first = b.add(key, e.splat(b.mul(b.trunc(walk.index, I32), I32(mr))))
                lo = [e.load(limits, v * e.bytes, e.vi) for v in range(nv)]
                width = [e.load(limits, (nv + v) * e.bytes, e.vi) for v in range(nv)]
            for r in range(mr):
                for v in range(nv):
                    x = acc[r][v]
                    if bounds:
                        x = e.apply_mask(x, b.sub(b.add(first, e.ints(r)), lo[v]), width[v])
                    walk.top[v] = e.maximum(x, walk.top[v])
                    e.store(x, p_s, (r * nv + v) * e.bytes)
        for v in range(nv):
            e.store(walk.top[v], p_max, v * e.bytes)

    @property
    def key_step(self) -> int:
        """Bytes from one key to the next in what `scores` reads."""
        return self.key.k_row_bytes

    def _key_products(self, e: Emitter, i: Value, p_k: Value, p_q: Value, trips: Value) -> list[list[Value]]:
        """[key][vector] of the products of group i of keys."""
        return self._product(e, p_k, self.key.k_row_bytes, 4, p_q, trips, 4)

    @stage
    def scores(self, e: Emitter, k, q, s, bmax, trips, groups) -> None:
        self._scores(e, k, q, s, bmax, trips, groups, None)

    @stage
    def scores_bounded(self, e: Emitter, k, q, s, bmax, trips, groups, limits, key) -> None:
        """Scores of keys from `key` on; outside a lane's limits they are -inf before the maximum."""
        self._scores(e, k, q, s, bmax, trips, groups, (limits, key))

    @stage
    def accumulate(self, e: Emitter, v, p, trips, o, alpha, groups) -> None:
        """O^T = alpha·O^T + V·P. The sum restarts at every block: one chain loses a digit over 8192 keys."""
        self._accumulate(e, v, p, trips, o, alpha, groups, lambda i: None)

    def _accumulate(self, e: Emitter, v, p, trips, o, alpha, groups, meanwhile: Meanwhile) -> None:
        """`meanwhile(group)` is what every trip of a group does besides."""
        nv, mr = self.nv, self.mr
        p_p, p_alpha = e.pointer(p), e.pointer(alpha)

        with e.walk(groups, (v, mr * 4), (o, mr * self.nr * 4)) as walk:
            values, sums = walk
            acc = self._value_products(e, values, p_p, trips, p_alpha, meanwhile(walk.index))
            scale = [e.load(p_alpha, c * e.bytes) for c in range(nv)]
            for r in range(mr):
                for c in range(nv):
                    at = (r * nv + c) * e.bytes
                    e.store(e.fma(scale[c], e.load(sums, at), acc[r][c]), sums, at)

    def _value_products(
        self, e: Emitter, p_v: Value, p_p: Value, trips: Value, p_alpha: Value, each: Any
    ) -> list[list[Value]]:
        """[channel][vector] of the products of a group of channels with the weights."""
        return self._product(e, p_v, 4, self.key.v_row_bytes, p_p, trips, self.unroll_keys, each=each)

    @property
    def unroll_keys(self) -> int:
        return min(4, self.mr // self.key.pack)

    # the online softmax
    @stage
    def online_softmax(self, e: Emitter, s, p, fours, block, stats, scale_bits):
        """alpha = 2**((m_old - m_i)·scale_log2); P = 2**((S - m_i)·scale_log2); l_i = alpha·l_i + Σ P.

        The maximum is kept in raw scores and subtracted before scaling: the largest weight is exactly 1, so
        a row of one visible key is its V row bit for bit, and rounding grows with the distance from the
        maximum only, not with the score. `scale_bits` holds scale·log2(e) as two floats. Two sums share the
        weights: many equal ones that join a large one all round the same way.
        """
        b, nv = e.b, self.nv
        p_block, p_stats = e.pointer(block), e.pointer(stats)
        power = self.scaled_power(e, scale_bits)

        def rescale(v: int) -> tuple[Value, Value]:
            """m_safe and alpha of vector v; m_i and alpha are stored."""
            m_old = e.load(p_stats, v * e.bytes)
            m_new = e.maximum(e.load(p_block, (nv + v) * e.bytes), m_old)
            m_safe = b.select(b.fcmp_ordered("==", m_new, e.floats(float("-inf"))), e.floats(0), m_new)
            alpha = kept(e, power(b.fsub(m_old, m_safe), 6))
            e.store(m_new, p_stats, v * e.bytes)
            e.store(alpha, p_block, v * e.bytes)
            return m_safe, alpha

        def weight(row: Value, at: int, v: int, m_safe: Value) -> Value:
            return power(b.fsub(e.load(row, at + v * e.bytes), m_safe), self.degree)

        def columns(chosen: Sequence[int]) -> None:
            found = [rescale(v) for v in chosen]
            row = self.nr * 4

            places = (s, 4 * row), (p, (2 if self.dot else 4) * row)
            with e.walk(fours, *places, carried={"l_i": [e.floats(0)] * (2 * len(chosen))}) as walk:
                (scores, place), l_i = walk, walk.l_i
                for c, v in enumerate(chosen):
                    for pair in range(2):
                        x, y = (weight(scores, (2 * pair + h) * row, v, found[c][0]) for h in range(2))
                        l_i[2 * c + pair] = b.fadd(l_i[2 * c + pair], b.fadd(x, y))
                        if self.dot:
                            e.store(self._pair(e, x, y), place, pair * row + v * e.bytes)
                        else:
                            e.store(x, place, 2 * pair * row + v * e.bytes)
                            e.store(y, place, (2 * pair + 1) * row + v * e.bytes)
            for c, v in enumerate(chosen):
                block_sum = b.fadd(walk.l_i[2 * c], walk.l_i[2 * c + 1])
                l_i = e.fma(found[c][1], e.load(p_stats, (nv + v) * e.bytes), block_sum)
                e.store(l_i, p_stats, (nv + v) * e.bytes)

        self._side_by_side(columns)

    def _side_by_side(self, columns: Callable[[Sequence[int]], None]) -> None:
        """Emits `columns` of all vectors of a panel at once, if the registers hold them."""
        if ISAS[self.key.isa].registers < 32:  # the constants of one vector's chain fill 16 registers
            for v in range(self.nv):
                columns([v])
        else:
            columns(range(self.nv))

    def scaled_power(self, e: Emitter, scale_bits: Value) -> Callable[[Value, int], Value]:
        """(d, degree) -> 2**(d·scale_log2) for d <= 0."""
        scale = e.splat(e.float_bits(scale_bits))
        if self.key.storage != "float32":
            return lambda d, degree: e.exp2(e.b.fmul(d, scale), degree)
        low = e.splat(e.float_bits(e.b.lshr(scale_bits, I64(32))))
        return lambda d, degree: e.exp2_scaled(d, scale, low, degree)

    def _pair(self, e: Emitter, x: Value, y: Value) -> Value:
        """Two float32 vectors as one of interleaved bfloat16 pairs, x low."""
        kind = ir.VectorType(BFloatType(), 2 * self.lanes)
        both = e.call(f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * self.lanes}", kind, [y, x])
        both = e.b.bitcast(both, ir.VectorType(I16, 2 * self.lanes))
        return e.shuffle(both, both, (j // 2 + self.lanes * (j & 1) for j in range(2 * self.lanes)))

    @stage
    def add_seen(self, e: Emitter, p, odd, row, count, o, limits, key, seen) -> None:
        """O^T += P·V for one key whose V is not finite, in lanes that see it: 0·NaN must not reach others."""
        b = e.b

        def weight(p_p: Value, v: int) -> Value:
            if not self.dot:
                return e.load(p_p, v * e.bytes)
            shift = e.splat(b.shl(b.sub(I32(1), b.trunc(odd, I32)), I32(4)))
            bits = b.and_(b.shl(e.load(p_p, v * e.bytes, e.vi), shift), e.ints(-0x10000))
            return b.bitcast(bits, e.vf)

        self._add_weighed(e, weight, p, row, count, o, limits, key, seen)

    def _add_weighed(
        self, e: Emitter, weight: Callable[[Value, int], Value], p, row, count, o, limits, key, seen
    ) -> None:
        """`add_seen`; `weight(p, v)` are the weights of vector v."""
        b, nv = e.b, self.nv
        p_limits, p_p, p_seen = e.pointer(limits), e.pointer(p), e.pointer(seen)
        at, zero = e.splat(b.trunc(key, I32)), ir.Constant(e.vb, None)
        weights, adding = [], []
        for v in range(nv):
            lo, width = e.load(p_limits, v * e.bytes, e.vi), e.load(p_limits, (nv + v) * e.bytes, e.vi)
            inside = b.icmp_unsigned("<", b.sub(at, lo), width)
            allowed = b.icmp_unsigned("!=", e.load(p_seen, v * self.lanes, e.vb), zero)
            adding.append(b.and_(inside, allowed))
            weights.append(weight(p_p, v))
            # A weight too small to keep is not 0, which would turn an infinity into NaN.
            least = b.bitcast(e.ints(1), e.vf)
            weights[v] = b.select(b.fcmp_ordered("==", weights[v], e.floats(0)), least, weights[v])
        with e.walk(count, (row, 4), (o, self.nr * 4)) as (element, channel):
            value = e.splat(e.load(element, 0, F32))
            for v in range(nv):
                old = e.load(channel, v * e.bytes)
                e.store(b.select(adding[v], e.fma(weights[v], value, old), old), channel, v * e.bytes)

    # finalize
    @stage
    def scale_divisor(self, e: Emitter, stats, bits) -> None:
        """The divisor of O of a vector of rows, times the share of weights that dropout keeps."""
        p = e.pointer(stats)
        l_i = e.load(p, self.nr * 4)
        e.store(e.b.fmul(l_i, e.splat(e.float_bits(bits))), p, self.nr * 4)

    @stage
    def finalize(self, e: Emitter, o, stats, dst, stride, rows, count) -> None:
        """O^T / l_i of a vector of lanes back to rows in the storage dtype; an empty row (l_i = 0) is 0."""
        base = e.pointer(dst)
        p_rows = [e.at(base, e.b.mul(I64(r), stride)) for r in range(self.lanes)]
        self.store_lanes(e, o, stats, p_rows, rows, count)

    def store_lanes(self, e: Emitter, o, stats, p_rows: list[Value], rows, count) -> None:
        """`finalize` to where the first `rows` of the pointers lead."""
        b = e.b
        l_i = e.load(e.pointer(stats), self.nr * 4)
        empty = b.fcmp_ordered("==", l_i, e.floats(0))
        inverse = b.fdiv(e.floats(1), l_i)

        squares = b.udiv(b.add(count, I64(self.lanes - 1)), I64(self.lanes))
        with e.walk(squares, (o, self.lanes * self.nr * 4)) as walk:
            (square,) = walk
            done = b.mul(walk.index, I64(self.lanes))
            inside = e.first_lanes(b.sub(count, done))
            channels = (e.load(square, j * self.nr * 4) for j in range(self.lanes))
            x = [b.select(empty, e.floats(0), b.fmul(channel, inverse)) for channel in channels]
            for r, row in enumerate(e.transpose(x)):
                valid = e.splat(b.icmp_signed("<", I64(r), rows))
                at = e.at(p_rows[r], b.mul(done, I64(self.size)))
                e.store(e.narrow(row, self.key.storage), at, inside=b.and_(inside, valid))

    @stage
    def finish_stats(self, e: Emitter, stats, scale_bits, sink_bits) -> None:
        """m_i, l_i of one vector of rows become lse and the divisor of O; a sink joins the denominator only.

        lse = M + ln l', l' = l_i·2**(m - M) + 2**(sink - M), M = max(m, sink), and O is divided by
        l'·2**(M - m). Without a sink (-inf) that is m + ln l_i and l_i. An empty row keeps l_i = 0.
        """
        self.join_sinks(e, stats, scale_bits, e.splat(e.float_bits(sink_bits)))

    def join_sinks(self, e: Emitter, stats: Value, scale_bits: Value, sink: Value) -> None:
        """`finish_stats` with a sink per lane."""
        b, p = e.b, e.pointer(stats)
        minus_inf, log2e = e.floats(float("-inf")), e.floats(1.4426950408889634)
        l_i = e.load(p, self.nr * 4)
        m = b.fmul(e.load(p), e.splat(e.float_bits(scale_bits)))
        empty = b.fcmp_ordered("==", l_i, e.floats(0))
        for sign, beyond in ((1.0, ">"), (-1.0, "<")):  # so that m - m is 0
            limit = e.floats(sign * (2.0 - 2.0**-23) * 2.0**127)
            m = b.select(b.fcmp_ordered(beyond, m, limit), limit, m)
        m = b.select(empty, minus_inf, m)
        top = b.select(b.fcmp_ordered(">", sink, m), sink, m)
        base = b.select(b.fcmp_ordered("==", top, minus_inf), e.floats(0), top)
        own = kept(e, e.exp2(b.fmul(b.fsub(m, base), log2e), 6, -126), -126)
        total = e.fma(l_i, own, e.exp2(b.fmul(b.fsub(sink, base), log2e), 6, -126))
        lse = b.fadd(base, e.log(total))
        lse = b.select(b.fcmp_ordered(">", total, e.floats(0)), lse, e.floats(float("nan")))
        lse = b.select(b.fcmp_ordered("==", total, e.floats(0)), minus_inf, lse)
        e.store(lse, p)
        e.store(b.select(empty, l_i, b.fdiv(total, own)), p, self.nr * 4)

    @stage
    def store_lse(self, e: Emitter, stats, dst, rows) -> None:
        e.store(e.load(e.pointer(stats)), e.pointer(dst), inside=e.first_lanes(rows))


def kept(e: Emitter, share: Value, floor: int = -100) -> Value:
    """The share that older sums keep, never 0: times an infinity among them that would be NaN."""
    return e.b.select(e.b.fcmp_ordered("==", share, e.floats(0)), e.floats(2.0**floor), share)
