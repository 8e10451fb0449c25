"""Dropout of one tile of weights: Philox4x32-10 (Salmon et al., SC11) with lanes along the queries.

    key = (seed lo, seed hi)
    counter = (key index // 4, query index, head + num_q_heads·batch, 0)
    word = key index % 4

A weight is kept iff its 32-bit word is at least floor(p·2^32), else its bits are cleared; none is rescaled.
One object per instruction set and panel width serves forward and backward kernels, which call it through a
pointer. Key index and head are the same in all lanes, so of the ten rounds the first is scalar, half of the
next two as well, and what depends on the query alone is computed once per vector of rows.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir

from polyflash.backends.cpu import intrinsics
from polyflash.backends.cpu.configs import DropoutKey
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I32, I64, Block, Emitter, Value
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import FORWARD

ROUNDS = 10
MULTIPLY = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


class _Words:
    """32-bit words of one vector of queries: an int64 where all lanes agree, else a list of vectors.

    On x86 a multiplication reads the even 32-bit halves of its operands: two vectors of int64 hold the even
    and the odd lanes through all rounds, and their upper halves are never cleared. NEON multiplies packed
    halves: there one vector of int32 is widened for each product."""

    def __init__(self, e: Emitter) -> None:
        self.e, self.packed = e, e.isa == "neon"
        self.kind = e.vi if self.packed else ir.VectorType(I64, e.lanes // 2)

    def queries(self, row: Value) -> list[Value]:
        """row + lane."""
        e, b = self.e, self.e.b
        if self.packed:
            return [b.add(e.splat(b.trunc(row, I32)), e.lane_index())]
        half = self.e.lanes // 2
        first = e.splat(row, half)
        return [b.add(first, ir.Constant(self.kind, [2 * j + odd for j in range(half)])) for odd in (0, 1)]

    def multiply(self, x: Any, factor: int) -> tuple[Any, Any]:
        """High and low word of x·factor; of an int64 or a wide lane, the low word is its lower half."""
        b = self.e.b
        if not isinstance(x, list):
            product = b.mul(b.and_(x, I64(_LOW)), I64(factor))
            return b.lshr(product, I64(32)), b.and_(product, I64(_LOW))
        wide = ir.VectorType(I64, self.e.lanes) if self.packed else self.kind
        factors, halves, below = (ir.Constant(wide, [n] * wide.count) for n in (factor, 32, _LOW))
        if self.packed:
            high = b.trunc(b.lshr(b.mul(b.zext(x[0], wide), factors), halves), self.kind)
            return [high], [b.mul(x[0], ir.Constant(self.kind, [factor] * self.kind.count))]
        products = [b.mul(b.and_(part, below), factors) for part in x]
        return [b.lshr(product, halves) for product in products], products

    def xor(self, *values: Any) -> Any:
        xor = self.e.b.xor
        alike = reduce(xor, (x for x in values if not isinstance(x, list)))
        vectors = [x for x in values if isinstance(x, list)]
        if not vectors:
            return alike
        return [reduce(xor, parts, self.splat(alike)) for parts in zip(*vectors, strict=True)]

    def splat(self, x: Value) -> Value:
        return self.e.splat(self.e.b.trunc(x, I32) if self.packed else x, self.kind.count)

    def lanes(self, x: list[Value]) -> Value:
        """One vector of int32, lane by lane."""
        if self.packed:
            return x[0]
        n = self.e.lanes
        even, odd = (self.e.b.bitcast(part, self.e.vi) for part in x)
        return self.e.shuffle(even, odd, (j + (n - 1 if j & 1 else 0) for j in range(n)))


class DropoutTile:
    """Emissions for one key: all keys of a tile, with one weight or two to a word."""

    def __init__(self, key: DropoutKey) -> None:
        self.nv, self.lanes, self.row_bytes = key.nv, key.lanes, key.panel_rows * 4  # of keys or pairs

    @stage
    def drop_words(self, e: Emitter, args, tile, head, row, key, keys) -> None:
        self._drop(e, args, tile, head, row, key, keys, 1)

    @stage
    def drop_pairs(self, e: Emitter, args, tile, head, row, key, keys) -> None:
        self._drop(e, args, tile, head, row, key, keys, 2)

    def _drop(self, e: Emitter, args, tile, head, row, key, keys, pack: int) -> None:
        """Four keys at a time from the multiple of 4 at or before `key`; those outside are left alone."""
        b, words = e.b, _Words(e)
        block = Block(e, args, FORWARD)
        seed, threshold = block.drop_seed, block.drop_threshold
        round_keys = [
            [b.and_(b.add(part, I64(turn * step & _LOW)), I64(_LOW)) for turn in range(ROUNDS)]
            for part, step in zip((seed, b.lshr(seed, I64(32))), WEYL, strict=True)
        ]
        least = e.splat(b.trunc(threshold, I32))
        some = e.splat(b.icmp_signed("<=", threshold, I64(_LOW)))  # p = 1 keeps nothing
        first = b.ashr(key, I64(2))
        quads = b.sub(b.ashr(b.add(b.add(key, keys), I64(3)), I64(2)), first)
        for v in range(self.nv):
            queries = words.queries(b.add(row, I64(v * self.lanes)))

            def quad(i: Value, p: list[Value], queries: list[Value] = queries) -> list[Value]:
                bits = self._rounds(words, b.add(first, i), queries, head, round_keys)
                keep = [b.and_(b.icmp_unsigned(">=", words.lanes(x), least), some) for x in bits]
                self._clear(e, p[0], p[1], keys, keep, pack)
                return [e.at(p[0], 4 // pack * self.row_bytes), b.add(p[1], I64(4))]

            done = b.sub(b.mul(first, I64(4)), key)  # <= 0: where the first four keys begin
            start = e.at(e.pointer(tile), b.add(b.mul(done, I64(self.row_bytes // pack)), I64(v * e.bytes)))
            e.loop(quads, [start, done], quad)

    def _rounds(self, words: _Words, quad: Value, queries: Any, head: Value, round_keys: Any) -> list[Any]:
        c0, c1, c2, c3 = quad, queries, head, I64(0)
        for k0, k1 in zip(*round_keys, strict=True):
            (x_high, x_low), (y_high, y_low) = (
                words.multiply(c, factor) for c, factor in zip((c0, c2), MULTIPLY, strict=True)
            )
            c0, c1, c2, c3 = words.xor(y_high, c1, k0), y_low, words.xor(x_high, c3, k1), x_low
        return [c0, c1, c2, c3]

    def _clear(self, e: Emitter, p: Value, done: Value, keys: Value, keep: list[Value], pack: int) -> None:
        """The weights of four keys, of which the first is the tile's key `done`."""
        b = e.b
        for at in range(4 // pack):
            bits = b.sext(keep[at * pack], e.vi)
            if pack == 2:
                low, high = b.and_(bits, e.ints(0xFFFF)), b.sext(keep[at * pack + 1], e.vi)
                bits = b.or_(low, b.shl(high, e.ints(16)))
            inside = b.icmp_unsigned("<", b.add(done, I64(at * pack)), keys)
            with b.if_then(inside):
                weights = e.load(p, at * self.row_bytes, e.vi)
                e.store(b.and_(weights, bits), p, at * self.row_bytes)


def build(key: DropoutKey) -> Any:
    """Compile the dropout of `key`: a numba cfunc `void(args, weights, head, row, key, keys, pack)`, all
    int64.

    It clears the dropped ones of the tile at address `weights`: those of `keys` keys from key index `key` on
    and of panel_rows queries from query index `row` on, both of the member itself; `head` is head +
    num_q_heads·batch. pack 1: words [key][query]. pack 2: [key pair][query], the even key in the low half of
    a word; `key` is even then."""
    stage, block = intrinsics.stages(key, DropoutTile(key)), Blocks(FORWARD)

    @block.kernel
    def drop(args, weights, head, row, key, keys, pack):
        if pack == 2:
            stage.drop_pairs(args, weights, head, row, key, keys)
        else:
            stage.drop_words(args, weights, head, row, key, keys)

    return drop
