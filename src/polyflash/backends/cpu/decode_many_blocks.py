"""The stages of decode with lanes as rows: the forward's, and those that cap scores, read ahead and merge.

A partial result is, for every panel, m and l as [m or l][vector][lane], then for every panel O^T as
[channel][lane]. Merging is lane by lane, so it has no operation across lanes.
"""

from __future__ import annotations

from collections.abc import Callable

from polyflash.backends.cpu.address_lists import PREFETCH_LEVEL, AddressLists
from polyflash.backends.cpu.blocks import Tile
from polyflash.backends.cpu.decode_many_configs import ManyKey
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import F32, I32, I64, Emitter, Value

MINUS_INF = float("-inf")
ADDRESS = 8  # bytes
MERGED_AT_ONCE = 8  # vectors of O^T that are summed over the splits side by side


class ManyTile(Tile, AddressLists):
    """Emissions for one key. Methods named as the stages they emit. The products take a list of cache lines
    and by how many bytes every trip goes on in it (0: not at all): they prefetch them on the way."""

    key: ManyKey
    ahead: tuple[Value, Value]

    @property
    def key_step(self) -> int:
        return ADDRESS

    @stage
    def scores(self, e: Emitter, rows, q, s, bmax, trips, groups, ahead, step) -> None:  # type: ignore[override]
        self.ahead = ahead, step
        self._scores(e, rows, q, s, bmax, trips, groups, None)

    @stage
    def scores_bounded(  # type: ignore[override]
        self, e: Emitter, rows, q, s, bmax, trips, groups, limits, key, ahead, step
    ) -> None:
        self.ahead = ahead, step
        self._scores(e, rows, q, s, bmax, trips, groups, (limits, key))

    @stage
    def accumulate(self, e: Emitter, v, p, trips, o, alpha, groups, ahead, step) -> None:  # type: ignore[override]
        self.ahead = ahead, step
        lines = self.key.lines_of_values

        def meanwhile(i: Value) -> Callable[[Value], None]:
            return lambda j: self._read_ahead(e, i, trips, j, lines)

        self._accumulate(e, v, p, trips, o, alpha, groups, meanwhile)

    def _read_ahead(self, e: Emitter, i: Value, trips: Value, j: Value, lines: int) -> None:
        """Prefetches the next `lines` of the listed cache lines, in trip j of group i."""
        b, (first, step) = e.b, self.ahead
        at = e.pointer(b.add(first, b.mul(b.add(b.mul(i, trips), j), step)))
        for n in range(lines):
            e.prefetch(e.pointer(e.load(at, n * ADDRESS, I64)), PREFETCH_LEVEL)

    def _key_products(self, e: Emitter, i: Value, p_k: Value, p_q: Value, trips: Value) -> list[list[Value]]:
        rows = [e.pointer(e.load(p_k, ADDRESS * r, I64)) for r in range(self.mr)]

        def body(j: Value, vals: list[Value]) -> list[Value]:
            at, p_b, acc = vals[0], vals[1], vals[2:]
            self._read_ahead(e, i, trips, j, self.key.lines_of_keys)
            for u in range(4):
                b_row = [e.load(p_b, u * self.nr * 4 + v * e.bytes) for v in range(self.nv)]
                for r, row in enumerate(rows):
                    atom = e.splat(e.load(e.at(row, at), u * 4, I32 if self.dot else F32))
                    for v in range(self.nv):
                        old = acc[r * self.nv + v]
                        acc[r * self.nv + v] = (
                            e.dot_bf16(old, b_row[v], atom) if self.dot else e.fma(b_row[v], atom, old)
                        )
            return [e.b.add(at, I64(16)), e.at(p_b, 4 * self.nr * 4), *acc]

        start = [I64(0), p_q, *[e.floats(0)] * (self.mr * self.nv)]
        out = e.loop(trips, start, body)[2:]
        return [out[r * self.nv : (r + 1) * self.nv] for r in range(self.mr)]

    @stage
    def change_scores(self, e: Emitter, s, keys, limits, key, top, factor, cap) -> None:
        """x = factor·s, then cap·tanh(x) if cap is not 0; -inf outside a lane's limits; the maximum."""
        b, nv, p_top, p_limits = e.b, self.nv, e.pointer(top), e.pointer(limits)
        grow, shrink = e.splat(e.float_bits(cap)), e.splat(e.float_bits(factor))
        capped = b.icmp_signed("!=", cap, I64(0))
        lo = [e.load(p_limits, v * e.bytes, e.vi) for v in range(nv)]
        width = [e.load(p_limits, (nv + v) * e.bytes, e.vi) for v in range(nv)]

        def body(i: Value, values: list[Value]) -> list[Value]:
            at, largest = e.splat(b.trunc(b.add(key, i), I32)), values[1:]
            for v in range(nv):
                x = b.fmul(e.load(values[0], v * e.bytes), shrink)
                (x,) = e.where(capped, [x], lambda y: [b.fmul(grow, e.tanh(y[0]))])
                seen = b.icmp_unsigned("<", b.sub(at, lo[v]), width[v])
                x = b.select(seen, x, e.floats(MINUS_INF))
                largest[v] = e.maximum(x, largest[v])
                e.store(x, values[0], v * e.bytes)
            return [e.at(values[0], self.nr * 4), *largest]

        start = [e.load(p_top, v * e.bytes) for v in range(nv)]
        out = e.loop(keys, [e.pointer(s), *start], body)
        for v in range(nv):
            e.store(out[1 + v], p_top, v * e.bytes)

    @stage
    def copy_vectors(self, e: Emitter, src, dst, vectors) -> None:
        def body(i: Value, p: list[Value]) -> list[Value]:
            e.store(e.load(p[0]), p[1])
            return [e.at(p[0], e.bytes), e.at(p[1], e.bytes)]

        e.loop(vectors, [e.pointer(src), e.pointer(dst)], body)

    @stage
    def merge_stats(self, e: Emitter, partials, stride, count, stats, scale_bits) -> None:
        """(m, l) of every split become its share 2**((m - M)·scale_log2) and, in `stats`, M and the sum of
        shares times l, added in the order of the splits."""
        b, power, p_stats = e.b, self.scaled_power(e, scale_bits), e.pointer(stats)
        for v in range(self.nv):
            m_at, l_at = v * e.bytes, (self.nv + v) * e.bytes

            def highest(i: Value, x: list[Value], at: int = m_at) -> list[Value]:
                return [e.at(x[0], stride), e.maximum(e.load(x[0], at), x[1])]

            m = e.loop(count, [e.pointer(partials), e.floats(MINUS_INF)], highest)[1]
            m_safe = b.select(b.fcmp_ordered("==", m, e.floats(MINUS_INF)), e.floats(0), m)

            def share(
                i: Value, x: list[Value], m_at: int = m_at, l_at: int = l_at, m_safe: Value = m_safe
            ) -> list[Value]:
                w = power(b.fsub(e.load(x[0], m_at), m_safe), 6)
                e.store(w, x[0], m_at)
                return [e.at(x[0], stride), e.fma(w, e.load(x[0], l_at), x[1])]

            l_i = e.loop(count, [e.pointer(partials), e.floats(0)], share)[1]
            e.store(m, p_stats, m_at)
            e.store(l_i, p_stats, l_at)

    @stage
    def merge_outputs(self, e: Emitter, partials, stride, count, offset, o, steps) -> None:
        """O^T = the sum of every split's share times its O^T, in the order of the splits."""
        nv = self.nv
        vectors = self.channels_at_once * nv

        def channels(i: Value, x: list[Value]) -> list[Value]:
            def split(j: Value, y: list[Value]) -> list[Value]:
                shares, p_o = [e.load(y[0], v * e.bytes) for v in range(nv)], e.at(y[0], x[0])
                sums = [e.fma(shares[c % nv], e.load(p_o, c * e.bytes), y[1 + c]) for c in range(vectors)]
                return [e.at(y[0], stride), *sums]

            sums = e.loop(count, [e.pointer(partials), *[e.floats(0)] * vectors], split)[1:]
            for c, total in enumerate(sums):
                e.store(total, x[1], c * e.bytes)
            return [e.b.add(x[0], I64(vectors * e.bytes)), e.at(x[1], vectors * e.bytes)]

        e.loop(steps, [offset, e.pointer(o)], channels)

    @property
    def channels_at_once(self) -> int:
        """Channels of one step of `merge_outputs`: they divide the 16 that outputs are padded to."""
        return MERGED_AT_ONCE // (1 << (self.nv - 1).bit_length())

    @stage
    def finish_lanes(self, e: Emitter, stats, scale_bits, sinks) -> None:
        self.join_sinks(e, stats, scale_bits, e.load(e.pointer(sinks)))

    @stage
    def store_rows(self, e: Emitter, o, stats, addresses, rows, count) -> None:
        p = e.pointer(addresses)
        p_rows = [e.pointer(e.load(p, 8 * r, I64)) for r in range(self.lanes)]
        self.store_lanes(e, o, stats, p_rows, rows, count)
