"""The stages that are others where K and V are codes and the products are of bytes (compute "int8dot").

    S[key][query] = (Σ q8·k8)·k_scale[key] + q·shift / q_scale[query]          in units of q_scale
    P8 = round(255·P·v_scale[key] / most)          most: the largest v_scale of the keys that the query sees
    O = alpha·O + beta·Σ v8·P8

An atom is four int8. Q is quantised per row: a panel holds u8 = q8 + 128, so every sum begins at
-128·Σ k8; behind the codes lie rows of q_scale, q·shift, most, and the unit of the tile at hand: 1 after the
pass over scores, which takes them as they are. Weights of a key block are relative to its own maximum, so
that the largest of a row is 255 wherever it stands: beta brings them to the row's. A scale that no byte can
carry, NaN for one, leaves its key to `add_seen_codes`.
"""

from __future__ import annotations

import struct

from llvmlite import ir

from polyflash.backends.cpu.blocks import Tile, kept
from polyflash.backends.cpu.configs import KernelKey
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import F32, I8, I32, I64, Emitter, Value

LEAST_ROW = 1e-35  # largest size of a row of Q, below which its codes are coarser: 127 / it is finite
LEAST_SCALE = (
    2.0**-112
)  # of V, below which its weights are coarser: 128 weights of 255 / it have a finite sum
INFINITE = 0x7F800000  # bits


class IntegerTile(Tile):
    """Emissions for one key."""

    def __init__(self, key: KernelKey) -> None:
        super().__init__(key)
        self.atom = I32
        self.row, self.q_scale = self.nr * 4, key.bucket * self.nr
        self.q_shift, self.most, self.unit = (self.q_scale + i * self.row for i in (1, 2, 3))

    # bringing rows in
    @stage
    def quantize_query(self, e: Emitter, rows, vectors, dst, floats, sign) -> None:
        """Staged rows, float32, into their lanes of a panel: turned, then as codes."""
        b, p, flip = e.b, e.pointer(dst), e.splat(e.b.trunc(sign, I32))

        least = struct.unpack("<i", struct.pack("<f", LEAST_ROW))[0]
        places = (rows, e.bytes), (floats, self.lanes * self.row)
        with e.walk(vectors, *places, carried={"top": e.ints(least)}) as walk:
            src, out = walk
            x = [e.load(src, r * self.key.loaded_row_bytes, e.vi) for r in range(self.lanes)]
            for j, channel in enumerate(e.transpose(x)):
                e.store(b.xor(channel, flip), out, j * self.row)
                walk.top = e.smax(walk.top, b.and_(channel, e.ints(0x7FFFFFFF)))  # NaN is above infinity
        top = b.bitcast(walk.top, e.vf)
        e.store(b.fdiv(top, e.floats(127)), p, self.q_scale)
        e.store(e.floats(0), p, self.q_shift)
        inverse, middle = b.fdiv(e.floats(127), top), e.ints(-0x7F7F7F80)
        with e.walk(b.mul(vectors, I64(4)), (floats, 4 * self.row), (dst, self.row)) as (channels, codes):
            x = [e.nearest_ints(b.fmul(e.load(channels, j * self.row), inverse)) for j in range(4)]
            e.store(b.xor(e.as_bytes(x, signed=True), middle), codes)

    @stage
    def load_codes(self, e: Emitter, src, stride, rows, count, scales, step, dst) -> None:
        """K's rows; behind each where its sums begin, and its scale."""
        b, kind = e.b, ir.VectorType(I8, 4 * self.lanes)
        ones = e.ints(0x01010101)
        with e.walk(rows, (src, stride), (scales, step), (dst, self.key.k_row_bytes)) as (row, scale, place):

            def copy(p: list[Value], inside: Value | None) -> list[Value]:
                x = e.load(p[0], 0, kind, inside)
                e.store(x, p[1])
                total = e.dot_bytes(p[2], ones, b.bitcast(x, e.vi))
                return [e.at(p[0], e.bytes), e.at(p[1], e.bytes), total]

            total = e.each_vector(count, e.bytes, [row, place, e.ints(0)], copy)[2]
            total = e.call(f"llvm.vector.reduce.add.v{self.lanes}i32", I32, [total])
            e.store(b.mul(total, I32(-128)), place, self.key.bucket)
            e.store(e.load(scale, 0, F32), place, self.key.bucket + 4)

    @stage
    def load_value_codes(self, e: Emitter, src0, src1, src2, src3, count, dst) -> None:
        """The rows of four keys as atoms."""
        kind = ir.VectorType(I8, 4 * self.lanes)

        def step(p: list[Value], inside: Value | None) -> list[Value]:
            x = [e.load(q, 0, kind, inside) for q in p[:4]]
            halves = zip(e.interleave(*x[:2]), e.interleave(*x[2:]), strict=True)
            words = ir.VectorType(ir.IntType(16), 2 * self.lanes)
            for h, pair in enumerate(halves):
                for g, part in enumerate(e.interleave(*(e.b.bitcast(y, words) for y in pair))):
                    e.store(part, p[4], (2 * h + g) * e.bytes)
            return [*(e.at(q, e.bytes) for q in p[:4]), e.at(p[4], 4 * e.bytes)]

        start = [e.pointer(x) for x in (src0, src1, src2, src3, dst)]
        e.each_vector(count, 4 * self.lanes, start, step)

    @stage
    def load_scales(self, e: Emitter, src, step, keys, dst, bad) -> Value:
        """V's scales of some keys; 0 and a mark where one is none. Returns whether there was such."""
        b = e.b

        def one(i: Value, vals: list[Value]) -> list[Value]:
            bits = e.load(vals[0], 0, I32)
            none = b.icmp_unsigned(">=", bits, I32(INFINITE))  # infinite, NaN, or negative
            e.store(b.select(none, I32(0), bits), vals[1])
            e.store(b.zext(none, I8), vals[2])
            return [
                e.at(vals[0], step),
                e.at(vals[1], 4),
                e.at(vals[2], 1),
                b.or_(vals[3], b.zext(none, I64)),
            ]

        return e.loop(keys, [e.pointer(src), e.pointer(dst), e.pointer(bad), I64(0)], one)[3]

    @stage
    def load_coded_row(self, e: Emitter, src, count, scale, dst) -> None:
        """One row of V as float32."""
        by = e.float_bits(scale)
        with e.walk(count, (src, 1), (dst, 4)) as (code, place):
            e.store(e.b.fmul(e.b.sitofp(e.load(code, 0, I8), F32), by), place)

    # the two products
    def _multiply_add(self, e: Emitter, acc: Value, vector: Value, atom: Value) -> Value:
        return e.dot_bytes(acc, e.b.bitcast(vector, e.vi), atom)

    def _key_products(self, e: Emitter, i: Value, p_k: Value, p_q: Value, trips: Value) -> list[list[Value]]:
        b, step, behind = e.b, self.key.k_row_bytes, self.key.bucket
        first = [e.splat(e.load(p_k, r * step + behind, I32)) for r in range(self.mr)]
        sums = self._product(e, p_k, step, 4, p_q, trips, 4, first=first)
        shift = [e.load(p_q, self.q_shift + v * e.bytes) for v in range(self.nv)]
        scales = [e.splat(e.load(p_k, r * step + behind + 4, F32)) for r in range(self.mr)]
        return [
            [e.fma(b.sitofp(x, e.vf), of_key, shift[v]) for v, x in enumerate(row)]
            for row, of_key in zip(sums, scales, strict=True)
        ]

    def _value_products(
        self, e: Emitter, p_v: Value, p_p: Value, trips: Value, p_alpha: Value, each: object
    ) -> list[list[Value]]:
        first = [e.ints(0)] * self.mr
        sums = self._product(e, p_v, 4, self.key.v_row_bytes, p_p, trips, self.unroll_keys, first=first)
        beta = [e.load(p_alpha, (self.nv + v) * e.bytes) for v in range(self.nv)]
        return [[e.b.fmul(e.b.sitofp(x, e.vf), beta[v]) for v, x in enumerate(row)] for row in sums]

    @stage
    def multiply_shift(self, e: Emitter, q, floats, shift, count) -> None:
        """q·shift of every row of a panel, where `scores` adds it."""
        panel = e.pointer(q)

        with e.walk(count, (floats, self.row), (shift, 4), carried={"acc": [e.floats(0)] * self.nv}) as walk:
            channel, entry = walk
            by = e.splat(e.load(entry, 0, F32))
            walk.acc = [e.fma(e.load(channel, v * e.bytes), by, x) for v, x in enumerate(walk.acc)]
        for v, x in enumerate(walk.acc):
            scale = e.load(panel, self.q_scale + v * e.bytes)
            e.store(e.b.fdiv(x, scale), panel, self.q_shift + v * e.bytes)

    @stage
    def scale_scores(self, e: Emitter, s, keys, q) -> None:
        """Scores for the pass, which knows no unit."""
        scale = [e.load(e.pointer(q), self.q_scale + v * e.bytes) for v in range(self.nv)]
        with e.walk(keys, (s, self.row)) as (p_s,):
            for v in range(self.nv):
                e.store(e.b.fmul(e.load(p_s, v * e.bytes), scale[v]), p_s, v * e.bytes)

    @stage
    def set_unit(self, e: Emitter, q, plain) -> None:
        p, own = e.pointer(q), e.b.icmp_signed("!=", plain, I64(0))
        for v in range(self.nv):
            scale = e.b.select(own, e.load(p, self.q_scale + v * e.bytes), e.floats(1))
            e.store(scale, p, self.unit + v * e.bytes)

    # the online softmax
    @stage
    def most_scale(self, e: Emitter, scales, keys, q) -> None:
        """The largest of V's scales, for rows that see all these keys."""

        def step(p: list[Value], inside: Value | None) -> list[Value]:
            x = e.load(p[0], 0, e.vi, inside)
            return [e.at(p[0], e.bytes), e.smax(x, p[1])]  # as bits: none is negative

        top = e.each_vector(keys, self.lanes, [e.pointer(scales), e.ints(0)], step)[1]
        most = e.splat(e.greatest_lane(top))
        for v in range(self.nv):
            e.store(most, e.pointer(q), self.most + v * e.bytes)

    @stage
    def most_seen_scale(self, e: Emitter, s, scales, keys, q) -> None:
        """The largest of V's scales, row by row of the keys that it sees: no other may change its weights."""
        b, hidden = e.b, e.floats(float("-inf"))

        with e.walk(keys, (s, self.row), (scales, 4), carried={"top": [e.ints(0)] * self.nv}) as walk:
            scores, scale = walk
            x = e.splat(e.load(scale, 0, I32))
            seen = (b.fcmp_unordered("!=", e.load(scores, v * e.bytes), hidden) for v in range(self.nv))
            walk.top = [b.select(yes, e.smax(x, t), t) for yes, t in zip(seen, walk.top, strict=True)]
        for v, top in enumerate(walk.top):
            e.store(top, e.pointer(q), self.most + v * e.bytes)

    @stage
    def weigh(self, e: Emitter, s, p, fours, block, stats, scale_bits, scales, q) -> None:
        """alpha, m_i and l_i as `online_softmax` leaves them; P8, and beta in place of the block's maximum.

        255 / most joins the exponent, so that a weight becomes its byte by one product with its key's scale;
        l_i is the sum before that rounding, and beta takes the factor out of both again."""
        b, nv = e.b, self.nv
        p_block, p_stats, panel = e.pointer(block), e.pointer(stats), e.pointer(q)
        power, scale = self.scaled_power(e, scale_bits), e.splat(e.float_bits(scale_bits))
        none, zero = e.floats(float("-inf")), e.floats(0)
        top, lift, step, alpha, beta = [], [], [], [], []
        for v in range(nv):
            m_old, highest = e.load(p_stats, v * e.bytes), e.load(p_block, (nv + v) * e.bytes)
            unit = e.load(panel, self.unit + v * e.bytes)
            m_block = b.fmul(highest, unit)
            m_new = e.maximum(m_block, m_old)
            m_safe = b.select(b.fcmp_ordered("==", m_new, none), zero, m_new)
            most = e.load(panel, self.most + v * e.bytes)
            most = e.maximum(most, e.floats(LEAST_SCALE))
            lift.append(b.fmul(e.log(b.fdiv(e.floats(255), most)), e.floats(1.4426950408889634)))
            top.append(b.select(b.fcmp_ordered("==", highest, none), zero, highest))
            step.append(b.fmul(unit, scale))
            alpha.append(kept(e, power(b.fsub(m_old, m_safe), 6)))
            beta.append(b.fmul(power(b.fsub(m_block, m_safe), 6), e.power_of_two(b.fneg(lift[v]), 5)))
            e.store(m_new, p_stats, v * e.bytes)
            e.store(alpha[v], p_block, v * e.bytes)
            e.store(beta[v], p_block, (nv + v) * e.bytes)

        places = (s, 4 * self.row), (p, self.row), (scales, 16)
        with e.walk(fours, *places, carried={"sums": [zero] * nv}) as walk:
            p_s, p_p, p_w = walk
            of_key = [e.splat(e.load(p_w, 4 * h, F32)) for h in range(4)]
            for v in range(nv):
                d = [b.fsub(e.load(p_s, h * self.row + v * e.bytes), top[v]) for h in range(4)]
                x = [e.power_of_two(e.fma(y, step[v], lift[v]), 3) for y in d]
                walk.sums[v] = b.fadd(walk.sums[v], e.summed(x))
                codes = [e.nearest_ints(b.fmul(y, w)) for y, w in zip(x, of_key, strict=True)]
                e.store(e.as_bytes(codes, signed=False), p_p, v * e.bytes)
        for v, total in enumerate(walk.sums):
            l_i = e.fma(alpha[v], e.load(p_stats, (nv + v) * e.bytes), b.fmul(total, beta[v]))
            e.store(l_i, p_stats, (nv + v) * e.bytes)

    @stage
    def add_seen_codes(self, e: Emitter, s, stats, q, scale_bits, row, count, o, limits, key, seen) -> None:
        """`add_seen` of one key, with its weights as float32."""
        p_stats, p_q, power = e.pointer(stats), e.pointer(q), self.scaled_power(e, scale_bits)

        def weight(p_s: Value, v: int) -> Value:
            score = e.b.fmul(e.load(p_s, v * e.bytes), e.load(p_q, self.unit + v * e.bytes))
            return power(e.b.fsub(score, e.load(p_stats, v * e.bytes)), 6)

        self._add_weighed(e, weight, s, row, count, o, limits, key, seen)

    # finalize
    @stage
    def scale_channels(self, e: Emitter, o, scales, count) -> None:
        """O^T times a scale per channel of V."""
        with e.walk(count, (o, self.row), (scales, 4)) as (channel, scale):
            by = e.splat(e.load(scale, 0, F32))
            for v in range(self.nv):
                e.store(e.b.fmul(e.load(channel, v * e.bytes), by), channel, v * e.bytes)
