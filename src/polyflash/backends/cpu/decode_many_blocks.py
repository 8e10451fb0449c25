"""The stages of decode with lanes as rows: the forward's, and those that cap scores, read ahead and merge.

A partial result is, for every panel, m and l as [m or l][vector][lane], then for every panel O^T as
[channel][lane]. Merging is lane by lane, so it has no operation across lanes.
"""

from __future__ import annotations

from collections.abc import Callable

from polyflash.backends.cpu.address_lists import PREFETCH_LEVEL, AddressLists
from polyflash.backends.cpu.blocks import Tile, kept
from polyflash.backends.cpu.decode_many_configs import ManyKey
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I32, I64, Emitter, Value

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

        zeros = [e.floats(0)] * (self.mr * self.nv)
        with e.walk(trips, carried={"at": I64(0), "b": p_q, "acc": zeros}) as walk:
            self._read_ahead(e, i, trips, walk.index, self.key.lines_of_keys)
            for u in range(4):
                b_row = [e.load(walk.b, u * self.nr * 4 + v * e.bytes) for v in range(self.nv)]
                for r, row in enumerate(rows):
                    atom = e.splat(e.load(e.at(row, walk.at), u * 4, self.atom))
                    for v in range(self.nv):
                        n = r * self.nv + v
                        walk.acc[n] = self._multiply_add(e, walk.acc[n], b_row[v], atom)
            walk.at, walk.b = e.b.add(walk.at, I64(16)), e.at(walk.b, 4 * self.nr * 4)
        return [walk.acc[r * self.nv : (r + 1) * self.nv] for r in range(self.mr)]

    @stage
    def change_scores(self, e: Emitter, s, keys, limits, key, top, factor, cap) -> None:
        """x = factor·s, then cap·tanh(x) if cap is not 0; -inf outside a lane's limits; the maximum."""
        b, nv, p_top, p_limits = e.b, self.nv, e.pointer(top), e.pointer(limits)
        grow, shrink = e.splat(e.float_bits(cap)), e.splat(e.float_bits(factor))
        capped = b.icmp_signed("!=", cap, I64(0))
        lo = [e.load(p_limits, v * e.bytes, e.vi) for v in range(nv)]
        width = [e.load(p_limits, (nv + v) * e.bytes, e.vi) for v in range(nv)]

        largest = [e.load(p_top, v * e.bytes) for v in range(nv)]
        with e.walk(keys, (s, self.nr * 4), carried={"top": largest}) as walk:
            (scores,) = walk
            at = e.splat(b.trunc(b.add(key, walk.index), I32))
            for v in range(nv):
                x = b.fmul(e.load(scores, v * e.bytes), shrink)
                (x,) = e.where(capped, [x], lambda y: [b.fmul(grow, e.tanh(y[0]))])
                x = e.apply_mask(x, b.sub(at, lo[v]), width[v])
                walk.top[v] = e.maximum(x, walk.top[v])
                e.store(x, scores, v * e.bytes)
        for v in range(nv):
            e.store(walk.top[v], p_top, v * e.bytes)

    @stage
    def copy_vectors(self, e: Emitter, src, dst, vectors) -> None:
        with e.walk(vectors, (src, e.bytes), (dst, e.bytes)) as (vector, place):
            e.store(e.load(vector), place)

    @stage
    def merge_stats(self, e: Emitter, partials, stride, count, stats, scale_bits) -> None:
        """(m, l) of every split become its share 2**((m - M)·scale_log2) and, in `stats`, M and the sum of
        shares times l, added in the order of the splits."""
        power, p_stats = self.scaled_power(e, scale_bits), e.pointer(stats)
        for v in range(self.nv):
            m_at, l_at = v * e.bytes, (self.nv + v) * e.bytes
            m, l_i = joined(e, partials, stride, count, m_at, l_at, power)
            e.store(m, p_stats, m_at)
            e.store(l_i, p_stats, l_at)

    @stage
    def merge_outputs(self, e: Emitter, partials, stride, count, offset, o, steps) -> None:
        """O^T = the sum of every split's share times its O^T, in the order of the splits."""
        nv = self.nv
        vectors = self.channels_at_once * nv

        with e.walk(steps, (o, vectors * e.bytes), carried={"offset": offset}) as channels:
            (place,) = channels
            with e.walk(count, (partials, stride), carried={"sums": [e.floats(0)] * vectors}) as walk:
                (split,) = walk
                shares, p_o = [e.load(split, v * e.bytes) for v in range(nv)], e.at(split, channels.offset)
                walk.sums = [
                    e.fma(shares[c % nv], e.load(p_o, c * e.bytes), x) for c, x in enumerate(walk.sums)
                ]
            for c, total in enumerate(walk.sums):
                e.store(total, place, c * e.bytes)
            channels.offset = e.b.add(channels.offset, I64(vectors * e.bytes))

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


def joined(
    e: Emitter, partials, stride, count, m_at: int, l_at: int, power: Callable[..., Value]
) -> tuple[Value, Value]:
    """M and the joined l of a vector of rows, whose m in every split becomes its share."""
    b = e.b

    def highest(i: Value, x: list[Value]) -> list[Value]:
        return [e.at(x[0], stride), e.maximum(e.load(x[0], m_at), x[1])]

    m = e.loop(count, [e.pointer(partials), e.floats(MINUS_INF)], highest)[1]
    m_safe = b.select(b.fcmp_ordered("==", m, e.floats(MINUS_INF)), e.floats(0), m)

    def share(i: Value, x: list[Value]) -> list[Value]:
        w = kept(e, power(b.fsub(e.load(x[0], m_at), m_safe), 6))
        e.store(w, x[0], m_at)
        return [e.at(x[0], stride), e.fma(w, e.load(x[0], l_at), x[1])]

    return m, e.loop(count, [e.pointer(partials), e.floats(0)], share)[1]
