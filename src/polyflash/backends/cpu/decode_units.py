"""Units, in which the decode kernel of at most 8 rows reads rows of K, Q and V, and writes those of O.

A unit is what one load brings: a vector of float32 or float16 elements, or two of bfloat16. Without a dot the
halves of bfloat16 pairs become float32 by a shift and a mask, so a unit is its even channels, then its odd
ones, until `_narrow`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any, TypeAlias

from llvmlite import ir

from polyflash.backends.cpu.address_lists import PREFETCH_LEVEL
from polyflash.backends.cpu.configs import LINE, STORAGE_BYTES
from polyflash.backends.cpu.decode_configs import WIDTH, DecodeKey
from polyflash.backends.cpu.simd import I16, I64, Emitter, Value

Later: TypeAlias = Sequence[tuple[Value, int]]  # rows to be prefetched, and the level of the cache for each
TOUCHING = 16  # rows that lie behind each other, for a machine to read on by itself


class Units:
    """Emissions that the stages of a tile of one key share."""

    def __init__(self, key: DecodeKey) -> None:
        self.key, self.lanes, self.rows = key, key.lanes, key.rows
        self.dot = key.compute == "bf16dot"
        self.pairs = key.pack == 2  # of keys, whose V are interleaved and meet pairs of weights
        self.size = STORAGE_BYTES[key.storage]  # bytes of an element
        self.unit = key.unit  # elements
        self.parts = self.unit // self.lanes  # vectors of O per unit and row

    @property
    def steps(self) -> tuple[int, ...]:
        """Units of a row that are read at once. A unit of float16 is half as long as one of bfloat16, and
        where only every fourth line is prefetched four lines have to be in one step; by turns all channels
        have to be."""
        eight = self.key.storage == "float16" or (self.key.by_turns and 8 * self.unit == WIDTH)
        return (8, 4, 2, 1) if eight else (4, 2, 1)

    def units_at_once(self, rows: int) -> list[int]:
        """Unit counts: as many as have the sums of so many rows in registers, then fewer."""
        room = (16 if self.key.registers == 32 else 8) // (rows * self.parts)
        return [units for units in self.steps if units <= max(1, room)]

    def query_bytes(self, e: Emitter) -> int:
        """Bytes of one row of one unit of Q."""
        return e.bytes * (1 if self.dot else self.parts)

    def _units(
        self,
        e: Emitter,
        channels: Value | int,
        start: Sequence[Value],
        step: Callable[[Value, list[Value], Value | None, int], list[Value]],
        at_once: Sequence[int] = (1,),
    ) -> list[Value]:
        """`step(byte offset, values, mask, units)` for every unit of a row, as many at once as `at_once`
        says in turn; the mask of whole ones is None. Where the compiler knows the channels, and they are
        whole units, no loop is left."""
        if isinstance(channels, int):
            values, count = list(start), next(n for n in at_once if n * self.unit <= channels)
            for first in range(0, channels, count * self.unit):
                values = step(I64(first * self.size), values, None, count)
            return values
        b, values, at, left = e.b, list(start), I64(0), channels
        for units in at_once:
            many, width = b.udiv(left, I64(units * self.unit)), units * self.unit * self.size

            def whole(i: Value, x: list[Value], units: int = units, width: int = width) -> list[Value]:
                return [b.add(x[0], I64(width)), *step(x[0], x[1:], None, units)]

            at, *values = e.loop(many, [at, *values], whole)
            left = b.sub(left, b.mul(many, I64(units * self.unit)))
        some = b.zext(b.icmp_signed(">", left, I64(0)), I64)
        mask = e.first_lanes(left, self.unit)
        return e.loop(some, values, lambda i, x: step(at, x, mask, 1))

    def _spread(self, e: Emitter, later: Value, channels: Value, runs: Value) -> Value | None:
        """Whether the rows that are read next lie apart, or None if every line is to be prefetched anyway.
        Where a single row of queries reads narrow rows that touch, the machine's own prefetchers bring more
        than a core may ask for, once some lines are asked for; not so across pages."""
        if self.rows > 1 or self.size == 4:
            return None
        first, another = (e.load(e.pointer(later), 8 * row, I64) for row in (0, TOUCHING))
        apart = e.b.icmp_signed("!=", e.b.sub(another, first), e.b.mul(channels, I64(TOUCHING * self.size)))
        return e.b.or_(apart, e.b.icmp_signed("==", runs, I64(0)))

    def _prefetch(self, e: Emitter, later: Later, at: Value, units: int, spread: Value | None) -> None:
        """Lines of `units` units of rows that are read later."""
        lines = range(0, units * self.unit * self.size, LINE)
        some = lines if spread is None else lines[::4]

        def asked(values: list[Value], those: Sequence[int]) -> list[Value]:
            for (row, level), byte in product(later, those):
                e.prefetch(e.at(e.at(row, at), byte), level)
            return values

        asked([], some)
        if spread is not None:
            others = sorted(set(lines) - set(some))
            e.where(spread, [], lambda values: asked(values, others))

    def _raw(self, e: Emitter, row: Value, at: Value, mask: Value | None) -> Value:
        kind = e.vf if self.size == 4 else ir.VectorType(I16, self.unit)
        return e.load(row, at, kind, mask)

    def _split(self, e: Emitter, x: Value) -> list[Value]:
        """The float32 vectors of a unit."""
        if self.key.storage != "bfloat16":
            return [e.widen(x, self.key.storage)]
        b, pairs = e.b, e.b.bitcast(x, e.vi)
        return [
            b.bitcast(b.shl(pairs, e.ints(16)), e.vf),
            b.bitcast(b.and_(pairs, e.ints(-0x10000)), e.vf),
        ]

    def _narrow(self, e: Emitter, x: list[Value]) -> Value:
        if self.key.storage != "bfloat16":
            return e.narrow(x[0], self.key.storage)
        if self.pairs:
            low, high = (e.to_bf16_bits(part) for part in x)
            return e.shuffle(low, high, range(self.unit))
        even, odd = (e.b.zext(e.to_bf16_bits(part), e.vi) for part in x)
        both = e.b.or_(even, e.b.shl(odd, e.ints(16)))
        return e.b.bitcast(both, ir.VectorType(I16, self.unit))


def far(row: Value) -> Later:
    """A row that is read a phase later."""
    return [(row, PREFETCH_LEVEL)]


class Fold:
    """Sums over lanes: of each `many` vectors one, whose lane i is the sum of all lanes of the i-th. A step
    folds two vectors into one: of each lane pair a distance apart, one vector's sum goes to the lower and the
    other's to the upper. With fewer vectors than lanes a lane is a sum of some of theirs, which a second fold
    `within` so many lanes completes.

    Each step waits for the last. Behind products they would fill the core's scheduler, and the products
    of what follows, which need not wait, would come late: so they may be taken among those."""

    def __init__(self, e: Emitter, x: Sequence[Value], many: int, within: int = 0) -> None:
        self.e, self.x, self.many = e, list[Value | None](x), many
        steps = _steps(e.lanes, many, within or e.lanes)
        self.steps = [(i + u, i + v, by) for i in range(0, len(x), many) for u, v, by in steps]

    def made(self) -> list[Value]:
        """The vector of every `many`, by the steps that are left."""
        while self.steps:
            self._step()
        return self.x[:: self.many]

    def among(self, products: list[Value]) -> list[Value]:
        """A step, if one is left, and `products`, which LLVM leaves where they are emitted."""
        if self.steps:
            self._step()
        live = [i for i, x in enumerate(self.x) if x is not None]
        held = self.e.in_turn([*products, *(self.x[i] for i in live)])
        for i, x in zip(live, held[len(products) :], strict=True):
            self.x[i] = x
        return held[: len(products)]

    def _step(self) -> None:
        (u, v, orders), *self.steps = self.steps
        own, other = (self.e.shuffle(self.x[u], self.x[v], order) for order in orders)
        add = self.e.b.fadd if own.type == self.e.vf else self.e.b.add
        self.x[u], self.x[v] = add(own, other), None


def sums_of_lanes(e: Emitter, x: list[Value], within: int = 0) -> Value:
    """One vector of all, see `Fold`."""
    return Fold(e, x, len(x), within).made()[0]


@cache
def _steps(lanes: int, many: int, distance: int) -> list[tuple[int, int, Any]]:
    """Steps of `many` vectors: the two that each folds, into the first, and the lanes of both it adds up."""

    def blocks(*chosen: int) -> list[int]:
        return [4 * block + lane for block in chosen for lane in range(4)]

    places, orders = list(range(many)), []
    if distance == 16 and many in (4, 16):
        # Shuffles of 512 bits whose orders are part of an instruction, not read from memory; of vectors in an
        # order by which the lanes come to stand as by the others.
        low = [4 * block + lane + half for block in range(4) for lane in (0, 1) for half in (0, 16)]
        orders = [(blocks(0, 1, 4, 5), blocks(2, 3, 6, 7)), (blocks(0, 2, 4, 6), blocks(1, 3, 5, 7))]
        orders += [(low, [lane + 2 for lane in low])] * (2 if many == 16 else 0)
        places = [quarter * many // 4 + i for quarter in (0, 2, 1, 3) for i in range(many // 4)]
    while 2 ** len(orders) < many:
        distance //= 2
        own = [lane if lane & distance == 0 else lanes + lane for lane in range(lanes)]
        other = [(lane ^ distance) + (lanes if lane & distance else 0) for lane in range(lanes)]
        orders.append((own, other))
    steps = []
    for by in orders:
        half = len(places) // 2
        steps += [(u, v, by) for u, v in zip(places[:half], places[half:], strict=True)]
        places = places[:half]
    return steps
