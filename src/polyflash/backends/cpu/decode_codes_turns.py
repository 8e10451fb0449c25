"""V of a block of codes and K of the next by turns, STEP keys of each: emissions for one row.

Memory has two places to read ahead from then. The machine does so by itself, and requests of ours only get in
its way. The sums are those of a walk over K and then V.
"""

from __future__ import annotations

from polyflash.backends.cpu.configs import STEP
from polyflash.backends.cpu.decode_codes_blocks import CodesTile
from polyflash.backends.cpu.decode_units import sums_of_lanes
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import Emitter, Value


class CodesTurns(CodesTile):
    """The stage of a tile whose key has `by_turns`."""

    @stage
    def add_and_score(
        self, e: Emitter, v, v_step, pairs, o, sums, k, k_step, q, s, scales, block, vectors, factor, cap
    ) -> None:
        """`accumulate_codes` of a block of V, whose alpha is at `block`, and by turns `scores_of_codes` of as
        many keys, all seen, whose largest is left there. Rows are `v_step` and `k_step` bytes apart."""
        b, key, fours = e.b, self.key, STEP // 4
        ((rows, columns),) = self._walks()  # one, see CodesKey.by_turns
        score, change = self._score(e, e.pointer(q)), self._change_all(e, factor, cap)
        planes, weights = e.at(e.pointer(q), key.planes), key.value_groups * key.joined * key.rounded_bytes
        p_sums = b.alloca(e.vi, size=fours)
        acc = [e.ints(0)] * (2 * len(columns) * self.pieces)
        carried = {"k": k, "v": v, "acc": acc, "top": e.floats(float("-inf"))}
        places = (pairs, fours * weights), (s, e.bytes), (scales, 4 * STEP)
        with e.walk(vectors, *places, rolled=True, carried=carried) as turn:
            p_weights, p_s, p_scales = turn

            def four(first: Value, step: Value) -> tuple[list[Value], Value]:
                """Rows from the first on, and the one behind them."""
                at = [first]
                for _ in range(4):
                    at.append(b.add(at[-1], step))
                return [e.pointer(x) for x in at[:4]], at[4]

            with e.walk(fours, (p_sums, e.bytes), rolled=True, carried={"k": turn.k}) as keys:
                k_rows, keys.k = four(keys.k, k_step)
                e.store(self._of_fours(e, k_rows, planes, [])[0], keys.pointers[0])
            turn.k = keys.k
            total = sums_of_lanes(e, [e.load(p_sums, n * e.bytes, e.vi) for n in range(fours)])
            (x,) = change([score(total, p_scales)])
            e.store(x, p_s)
            turn.top = e.maximum(x, turn.top)
            carried = {"v": turn.v, "acc": turn.acc}
            with e.walk(fours, (p_weights, weights), rolled=True, carried=carried) as values:
                v_rows, values.v = four(values.v, v_step)
                values.acc = self._weigh_keys(e, v_rows, values.pointers[0], values.acc, rows, columns)
            turn.v, turn.acc = values.v, values.acc
        self._add_values(e, turn.acc, o, block, sums, rows, columns)
        e.store(turn.top, e.pointer(block))
