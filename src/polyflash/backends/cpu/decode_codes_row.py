"""One row of Q that meets 4-bit codes as bytes by turns: of 16 keys of K, and of 16 of V of the block before.

Rows touch, so all lie at constants from where a turn begins. Each line is asked for AHEAD keys early.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from polyflash.backends.cpu.address_lists import PREFETCH_LEVEL
from polyflash.backends.cpu.decode_codes_blocks import CodesTile
from polyflash.backends.cpu.decode_codes_bytes import BytesTile
from polyflash.backends.cpu.decode_codes_configs import AHEAD, CodesKey
from polyflash.backends.cpu.decode_units import sums_of_lanes
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I16, I64, Emitter, Value


def tile_of(key: CodesKey) -> CodesTile:
    if not key.bytes:
        return CodesTile(key)
    return RowTile(key) if key.rows == 1 else BytesTile(key)


class RowTile(BytesTile):
    """Emissions for one key of one row."""

    @stage
    def weigh_and_score(
        self, e: Emitter, v, v_step, p, o, alpha, sums, k, k_step, q, q_step, s, top, w, turns, factor, cap
    ) -> None:
        """As that of products of 16 bits; steps are the bytes of a row."""
        key, b, keys, ((own, columns),) = self.key, e.b, self.key.turn, self._walks()
        (k_bytes, v_bytes), pair = key.row_bytes, key.value_groups * 4
        places = (v, v_bytes * keys), (k, k_bytes * keys), (p, pair * keys // key.joined)
        carried = {"acc": [e.ints(0)] * (2 * len(columns)), "top": e.load(e.pointer(top))}
        with e.walk(turns, *places, (s, 4 * keys), (w, 4 * keys), carried=carried) as turn:
            p_v, p_k, p_weights, p_s, p_scales = turn
            tile = e.at(e.pointer(q), b.mul(b.udiv(turn.index, I64(max(1, key.run // keys))), q_step))
            held = self._held_integers(e, e.at(tile, key.planes))
            score, change = self._score(e, tile), self._change(e, factor, cap)
            made = [self._products(e, row, held)[0] for row in self._rows_at(e, p_k, k_bytes)]
            x = change(score(self._sums_of_nibbles(e, made), p_scales))
            e.store(x, p_s)
            turn.top = e.maximum(x, turn.top)
            rows = list(self._rows_at(e, p_v, v_bytes))
            for n in range(0, keys, key.joined):
                weights = e.at(p_weights, n // key.joined * pair)
                turn.acc = self._weigh_keys(e, rows[n : n + key.joined], weights, turn.acc, own, columns)
        e.store(turn.top, e.pointer(top))
        self._add_values(e, turn.acc, o, alpha, sums, own, columns)

    def _rows_at(self, e: Emitter, p: Value, size: int) -> Iterator[Value]:
        """Rows of a turn, of one line each; a later one is prefetched."""
        for n in range(self.key.turn):
            e.prefetch(e.at(p, (n + AHEAD) * size), PREFETCH_LEVEL)
            yield e.at(p, n * size)

    def _sums_of_nibbles(self, e: Emitter, x: list[Value]) -> Value:
        """Lane i is the sum of all lanes of x[i]. A lane has at most 8 products of 15 and 127, so 16
        bits hold it, and two."""
        words = ir.VectorType(I16, 2 * self.lanes)
        ones = ir.Constant(words, [1] * words.count)
        while len(x) > 4:  # of every 128 bits the sums of neighbours in one, then of those in the other
            pairs = zip(x[::2], x[1::2], strict=True)
            both = (e.call("llvm.x86.avx512.packssdw.512", words, pair) for pair in pairs)
            x = [e.call("llvm.x86.avx512.pmaddw.d.512", e.vi, [y, ones]) for y in both]
        return sums_of_lanes(e, x)
