"""Lists of the addresses of K and V rows, which the decode kernels read through: one kernel for whole
tensors, pages and gathered rows. A list is filled in whole vectors, so it has room for one more."""

from __future__ import annotations

from llvmlite import ir

from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import I32, I64, Emitter, Value

# Into the second-level cache, a phase ahead: in the first the rows would push each other out. From there into
# the first shortly before they are read, so that loads do not wait behind those lines: `NEAR_LEVEL`.
PREFETCH_LEVEL, NEAR_LEVEL = 2, 3


class AddressLists:
    """Emissions of the stages that make a list; a tile of a decode kernel has them among its own."""

    lanes: int  # float32 lanes of a vector; half as many addresses

    @stage
    def fill_addresses(self, e: Emitter, dst: Value, first: Value, stride: Value, count: Value) -> None:
        """`count` addresses, rounded up to whole vectors."""
        b, n = e.b, self.lanes // 2
        kind = ir.VectorType(I64, n)
        steps = b.mul(e.splat(stride, n), ir.Constant(kind, list(range(n))))
        start, ahead = b.add(e.splat(first, n), steps), e.splat(b.mul(stride, I64(n)), n)
        self._fill(e, e.pointer(dst), start, ahead, count)

    def _fill(self, e: Emitter, dst: Value, start: Value, ahead: Value, count: Value) -> None:
        """`count` addresses, a vector at a time, each `ahead` of the one before."""
        n = self.lanes // 2
        vectors = e.b.udiv(e.b.add(count, I64(n - 1)), I64(n))

        def body(i: Value, p: list[Value]) -> list[Value]:
            e.store(p[1], p[0])
            return [e.at(p[0], 8 * n), e.b.add(p[1], ahead)]

        e.loop(vectors, [dst, start], body)

    @stage
    def fill_pages(
        self, e: Emitter, dst, entries, stride, count, src, page_stride, row_stride, size, num, zero
    ) -> None:
        """Addresses of the rows of `count` whole pages of `size` keys, each rounded up to whole vectors.
        Table entries were checked before the call; should another thread have written one that names none of
        the `num` pages, it is zeros."""
        b, n = e.b, self.lanes // 2
        lane = ir.Constant(ir.VectorType(I64, n), list(range(n)))
        with e.walk(count, (entries, stride), (dst, b.mul(size, I64(8)))) as (entry, place):
            number = b.sext(e.load(entry, 0, I32), I64)
            real = b.icmp_unsigned("<", number, num)
            step = b.select(real, row_stride, I64(0))
            row = b.select(real, b.add(src, b.mul(number, page_stride)), zero)
            rows = b.add(e.splat(row, n), b.mul(e.splat(step, n), lane))
            self._fill(e, place, rows, e.splat(b.mul(step, I64(n)), n), size)

    @stage
    def add_addresses(self, e: Emitter, src, dst, distance, count, kept) -> None:
        """At `dst` the `count` addresses at `src`, rounded up to whole vectors, a distance on; one that is
        `kept` stays."""
        n, kind = self.lanes // 2, ir.VectorType(I64, self.lanes // 2)
        further, same = e.splat(distance, n), e.splat(kept, n)
        with e.walk(e.b.udiv(e.b.add(count, I64(n - 1)), I64(n)), (src, 8 * n), (dst, 8 * n)) as (old, p):
            x = e.load(old, 0, kind)
            e.store(e.b.select(e.b.icmp_signed("==", x, same), x, e.b.add(x, further)), p)
