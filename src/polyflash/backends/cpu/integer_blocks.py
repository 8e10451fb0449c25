"""The stages that are others where K and V are codes and the products are of bytes (compute "int8dot").

    S[key][query] = (Σ q8·k8)·k_scale[key] + q·shift / q_scale[query]          in units of q_scale
    P = 2**-(j / 64), j the nearest integer        cut to 32767ths; l_i is their sum
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
from collections.abc import Callable

from llvmlite import ir

from polyflash.backends.cpu import simd_words
from polyflash.backends.cpu.blocks import Tile, kept
from polyflash.backends.cpu.configs import KernelKey
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import F32, I8, I32, I64, Emitter, Value

LEAST_ROW = 1e-35  # largest size of a row of Q, below which its codes are coarser: 127 / it is finite
LEAST_SCALE = 2.0**-110  # of V, below which its weights are coarser: TOP_PART / it is finite
TOP_PART = 65282  # of the largest of V's scales: 32767 times it is 255 · 2**23
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
            e.store(b.xor(e.as_bytes(x), middle), codes)

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
    def prefetch_codes(self, e: Emitter, src, stride, rows, count) -> None:
        """Into the second level of the caches: a block of keys lasts longer than the first keeps it."""
        lines = e.b.udiv(e.b.add(count, I64(e.bytes - 1)), I64(e.bytes))
        with e.walk(rows, (src, stride)) as (row,), e.walk(lines, (row, e.bytes)) as (line,):
            e.prefetch(line, 2)

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
    def most_scale(self, e: Emitter, scales, keys, q, parts) -> None:
        """The largest of V's scales, for rows that see all these keys; their parts of it, as words."""
        b = e.b

        def step(p: list[Value], inside: Value | None) -> list[Value]:
            x = e.load(p[0], 0, e.vi, inside)
            return [e.at(p[0], e.bytes), e.smax(x, p[1])]  # as bits: none is negative

        top = e.each_vector(keys, self.lanes, [e.pointer(scales), e.ints(0)], step)[1]
        most = b.bitcast(e.splat(e.greatest_lane(top)), e.vf)
        for v in range(self.nv):
            e.store(most, e.pointer(q), self.most + v * e.bytes)
        share = b.fdiv(e.floats(TOP_PART), e.maximum(most, e.floats(LEAST_SCALE)))
        vectors = b.udiv(b.add(keys, I64(self.lanes - 1)), I64(self.lanes))
        with e.walk(vectors, (scales, e.bytes), (parts, e.bytes // 2)) as (of_key, place):
            words = b.trunc(e.nearest_ints(b.fmul(e.load(of_key), share)), e.vh)
            order = [i // 4 * 4 + (0, 2, 1, 3)[i % 4] for i in range(self.lanes)]
            e.store(e.shuffle(words, words, order), place)

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
    def weigh(self, e: Emitter, s, p, fours, block, stats, scale_bits, parts, q) -> None:
        """alpha, m_i and l_i as `online_softmax` leaves them; P8, and beta in place of the block's maximum.
        `parts`: what `most_scale` left."""

        def parts_of(place: Value, shares: list[Value]) -> Callable[[int, int], Value]:
            of_pair = [e.splat(e.load(place, 4 * h, I32)) for h in range(2)]
            return lambda h, v: of_pair[h]

        self._weigh(e, s, p, fours, block, stats, scale_bits, (parts, 8), q, parts_of)

    @stage
    def weigh_seen(self, e: Emitter, s, p, fours, block, stats, scale_bits, scales, q) -> None:
        """`weigh` of rows that each see keys of their own: V's scales become parts of each row's largest."""

        def parts_of(place: Value, shares: list[Value]) -> Callable[[int, int], Value]:
            of_key = [e.splat(e.load(place, 4 * h, F32)) for h in range(4)]

            def pair(h: int, v: int) -> Value:
                x, y = (e.nearest_ints(e.b.fmul(of_key[i], shares[v])) for i in (h, 2 + h))
                return simd_words.low_halves(e, x, y)

            return pair

        self._weigh(e, s, p, fours, block, stats, scale_bits, (scales, 16), q, parts_of)

    def _weigh(
        self,
        e: Emitter,
        s,
        p,
        fours,
        block,
        stats,
        scale_bits,
        parts: tuple[Value, int],
        q,
        parts_of: Callable[[Value, list[Value]], Callable[[int, int], Value]],
    ) -> None:
        """Weights are words of 32767ths; `parts_of` gives their keys' factors, two and two as weights are."""
        b, nv = e.b, self.nv
        p_block, p_stats, panel = e.pointer(block), e.pointer(stats), e.pointer(q)
        power, scale = self.scaled_power(e, scale_bits), e.splat(e.float_bits(scale_bits))
        none, zero, limit = e.floats(float("-inf")), e.floats(0), e.floats(2.0**100)
        top, steps, alpha, own, shares = [], [], [], [], []
        for v in range(nv):
            m_old, highest = e.load(p_stats, v * e.bytes), e.load(p_block, (nv + v) * e.bytes)
            unit = e.load(panel, self.unit + v * e.bytes)
            m_block = b.fmul(highest, unit)
            m_new = e.maximum(m_block, m_old)
            m_safe = b.select(b.fcmp_ordered("==", m_new, none), zero, m_new)
            most = e.maximum(e.load(panel, self.most + v * e.bytes), e.floats(LEAST_SCALE))
            shares.append(b.fdiv(e.floats(TOP_PART), most))
            top.append(b.select(b.fcmp_ordered("==", highest, none), zero, highest))
            steps.append(b.fmul(unit, scale))
            alpha.append(kept(e, power(b.fsub(m_old, m_safe), 6)))
            own.append(power(b.fsub(m_block, m_safe), 6))
            e.store(m_new, p_stats, v * e.bytes)
            e.store(alpha[v], p_block, v * e.bytes)
            e.store(b.fmul(own[v], b.fmul(most, e.floats(1 / 255))), p_block, (nv + v) * e.bytes)
        held = (b.select(b.fcmp_ordered(">", x, limit), limit, x) for x in steps)
        step = [b.fmul(x, e.floats(64 * 65536)) for x in held]

        places = (s, 4 * self.row), (p, self.row), parts
        carried = {"sums": [e.ints(0)] * nv, "far": e.ints(0)}
        with e.walk(fours, *places, carried=carried) as walk:
            p_s, p_p, place = walk
            part = parts_of(place, shares)
            for v in range(nv):
                d = [b.fsub(top[v], e.load(p_s, h * self.row + v * e.bytes)) for h in range(4)]
                z = [e.nearest_ints(e.fma(y, step[v], e.floats(32768))) for y in d]
                codes = []
                for h in range(2):
                    x = simd_words.high_halves(e, z[h], z[2 + h])
                    walk.far = b.or_(walk.far, x)
                    x = simd_words.power(e, x)
                    walk.sums[v] = simd_words.add_pairs(e, walk.sums[v], x)
                    codes.append(simd_words.product_high(e, x, part(h, v)))
                e.store(simd_words.as_bytes(e, *codes), p_p, v * e.bytes)
        bad = self._not_numbers(e, walk.far, s, fours, top)
        for v, total in enumerate(walk.sums):
            x = b.fmul(b.sitofp(total, e.vf), e.floats(1 / 32767))
            x = b.fadd(e.fma(x, own[v], b.fmul(steps[v], zero)), bad[v])
            l_i = e.fma(alpha[v], e.load(p_stats, (nv + v) * e.bytes), x)
            e.store(l_i, p_stats, (nv + v) * e.bytes)

    def _not_numbers(self, e: Emitter, far: Value, s, fours, top: list[Value]) -> list[Value]:
        """NaN in lanes that have such a score, else 0. Its weight is 0, as of one too far below the maximum
        for a word: without a word that says so there is none."""
        b, size = e.b, e.ints(0x7FFFFFFF)

        def check(values: list[Value]) -> list[Value]:
            worst = {"worst": [e.ints(0)] * self.nv}
            with e.walk(b.mul(fours, I64(4)), (s, self.row), carried=worst) as walk:
                for v in range(self.nv):
                    d = b.fsub(top[v], e.load(walk[0], v * e.bytes))
                    walk.worst[v] = e.smax(b.and_(b.bitcast(d, e.vi), size), walk.worst[v])
            nan = (b.icmp_signed(">", x, e.ints(INFINITE)) for x in walk.worst)
            return [b.select(x, e.floats(float("nan")), old) for x, old in zip(nan, values, strict=True)]

        some = e.any_lane(b.icmp_signed("!=", b.and_(far, e.ints(-0x7FFF8000)), e.ints(0)))
        return e.where(some, [e.floats(0)] * self.nv, check)

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
