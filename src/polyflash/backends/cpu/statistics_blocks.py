"""The stages of one tile of weights whose sums are wanted, as vector functions on the tiles of `blocks.py`.

    ln p = scale·S - lse        lanes are queries

A column sum is one vector of lanes per key, added to by every panel of a span and reduced once.
"""

from __future__ import annotations

from polyflash.backends.cpu.blocks import Tile
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I64, Emitter, Value

MINUS_INF, INF, NAN = float("-inf"), float("inf"), float("nan")
LOG2E, LOG2E_LOW = 1.4426950216293335, 1.92596298909109e-08
LEAST_LOG, MOST_LOG = -7000.0, 87.0  # the weights of an lse that is not theirs stay numbers


class StatisticsTile(Tile):
    """Emissions for one key. A panel's stats are four rows of its lanes: lse, Σ p·ln p, the largest raw
    score, and 0 or NaN."""

    @stage
    def start_rows(self, e: Emitter, lse, rows, stats) -> None:
        """+inf stands for a row without weights: an empty one, or none at all."""
        b, p, row = e.b, e.pointer(stats), self.nr * 4
        inside = e.first_lanes(rows)
        given = e.load(e.pointer(lse), inside=inside)
        own = b.select(b.fcmp_ordered("==", given, e.floats(INF)), e.floats(NAN), given)
        none = b.or_(b.fcmp_ordered("==", given, e.floats(MINUS_INF)), b.not_(inside))
        e.store(b.select(none, e.floats(INF), own), p)
        for slot, value in ((1, 0.0), (2, MINUS_INF), (3, 0.0)):
            e.store(e.floats(value), p, slot * row)

    def _weight(self, e: Emitter, s: Value, lse: Value, scale: Value) -> tuple[Value, Value]:
        """p and ln p of a vector of scores; both 0 where invisible. The scaled score is rounded as the
        forward pass did and lse has no factor: a row of huge scores has finite weights."""
        b = e.b
        x = b.fsub(b.fmul(s, scale), lse)
        x = b.select(b.fcmp_ordered("<", x, e.floats(LEAST_LOG)), e.floats(LEAST_LOG), x)
        x = b.select(b.fcmp_ordered(">", x, e.floats(MOST_LOG)), e.floats(MOST_LOG), x)
        none = b.fcmp_ordered("==", lse, e.floats(INF))
        hidden = b.or_(none, b.fcmp_ordered("==", s, e.floats(MINUS_INF)))
        weight = e.exp2_scaled(x, e.floats(LOG2E), e.floats(LOG2E_LOW), self.degree)
        return b.select(hidden, e.floats(0), weight), b.select(hidden, e.floats(0), x)

    def _rows(self, e: Emitter, stats: Value, scale_bits: Value) -> tuple[list[Value], Value]:
        """lse of every vector of lanes, and the scale."""
        return [e.load(stats, v * e.bytes) for v in range(self.nv)], e.splat(e.float_bits(scale_bits))

    @stage
    def add_to_columns(self, e: Emitter, s, stats, scale_bits, keys, columns) -> None:
        lse, scale = self._rows(e, e.pointer(stats), scale_bits)
        with e.walk(keys, (s, self.nr * 4), (columns, e.bytes)) as (scores, column):
            total = e.load(column)
            for v in range(self.nv):
                weight, _ = self._weight(e, e.load(scores, v * e.bytes), lse[v], scale)
                total = e.b.fadd(total, weight)
            e.store(total, column)

    @stage
    def add_to_rows(self, e: Emitter, s, stats, scale_bits, fours) -> None:
        """Σ p·ln p restarts at every block and in four sums: many equal terms all round the same way."""
        b, row, p_stats = e.b, self.nr * 4, e.pointer(stats)
        lse, scale = self._rows(e, p_stats, scale_bits)

        for v in range(self.nv):
            total, top, nan = (slot * row + v * e.bytes for slot in (1, 2, 3))
            carried = {"top": e.load(p_stats, top), "nan": e.load(p_stats, nan), "sums": [e.floats(0)] * 4}
            with e.walk(fours, (s, 4 * row), carried=carried) as walk:
                (scores,) = walk
                for j in range(4):
                    x = e.load(scores, j * row + v * e.bytes)
                    weight, log = self._weight(e, x, lse[v], scale)
                    walk.sums[j] = e.fma(weight, log, walk.sums[j])
                    walk.top = e.maximum(x, walk.top)
                    walk.nan = b.select(b.fcmp_unordered("uno", x, x), x, walk.nan)
            e.store(walk.top, p_stats, top)
            e.store(walk.nan, p_stats, nan)
            e.store(b.fadd(e.load(p_stats, total), e.summed(walk.sums)), p_stats, total)

    @stage
    def reduce_columns(self, e: Emitter, columns, keys, dst, count) -> None:
        """Adds the lanes of each key to `dst`, in pairs; keys from `count` on are left alone."""
        b, n = e.b, self.lanes

        with e.walk(b.udiv(keys, I64(n)), (columns, n * e.bytes), (dst, e.bytes)) as walk:
            square, place = walk
            total = e.summed(e.transpose([e.load(square, r * e.bytes) for r in range(n)]))
            inside = e.first_lanes(b.sub(count, b.mul(walk.index, I64(n))))
            e.store(b.fadd(e.load(place, inside=inside), total), place, inside=inside)

    @stage
    def finish_rows(self, e: Emitter, stats, entropy, max_logit, rows, scale_bits, sink_bits) -> None:
        b, p, row = e.b, e.pointer(stats), self.nr * 4
        lse, total, top, nan = (e.load(p, slot * row) for slot in range(4))
        weight, log = self._weight(e, e.splat(e.float_bits(sink_bits)), lse, e.floats(1))
        nats = b.fneg(e.fma(weight, log, total))
        nats = b.select(b.fcmp_ordered("<", nats, e.floats(0)), e.floats(0), nats)
        inside = e.first_lanes(rows)
        e.store(b.fadd(nats, nan), e.pointer(entropy), inside=inside)
        top = b.fadd(b.fmul(top, e.splat(e.float_bits(scale_bits))), nan)
        e.store(top, e.pointer(max_logit), inside=inside)
