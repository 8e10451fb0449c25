"""The pass over one panel's scores, between the two products: everything that changes a score.

    x = scale·s;  x = softcap·tanh(x / softcap);  x += bias;  x -= slope·|i + offset - j|;  x = -inf if unseen

One object per instruction set and panel width serves every forward kernel, which calls it through a pointer:
dtype and head_dim have no part in it, and a kernel without these features pays nothing. A square of scores,
`lanes` keys by `lanes` rows, is changed in registers; bias and mask come with rows along the vector and are
transposed. Each operand is a branch per square, not per score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from llvmlite import ir

from polyflash.backends.cpu import arguments as a
from polyflash.backends.cpu.configs import ScoreKey
from polyflash.backends.cpu.simd import F32, I1, I8, I16, I32, I64, Emitter, Value, natives

MINUS_INF = float("-inf")
# Words of a column, from I_COLUMN on.
(
    C_SCORES, C_FULL, C_CUT, C_REST, C_BIAS, C_BIAS_ROW, C_BIAS_KIND, C_ROWS, C_SLOPE, C_PLACE, C_Q_IDS,
    C_K_IDS, C_MASK, C_MASK_ROW, C_LIMITS, C_KEY, C_BOUNDED, C_TOP,
) = range(18)  # fmt: skip


class _Square:
    """Emissions for one key: a column is `lanes` rows of a panel, a square as many keys of it."""

    def __init__(self, key: ScoreKey) -> None:
        self.lanes, self.nv, self.nr = key.lanes, key.nv, key.panel_rows

    def change_column(self, e: Emitter, args: Value, column: Value) -> None:
        """All squares of a column: those whose keys can all be read, then those the end of the keys cuts."""
        b = e.b
        words = e.pointer(column)
        self.args, self.column = e.pointer(args), words
        does = e.load(self.args, 8 * a.PASS_DOES, I64)

        def has(bit: int) -> Value:
            return b.icmp_signed("!=", b.and_(does, I64(bit)), I64(0))

        self.has = {
            bit: has(bit)
            for bit in (a.DOES_MASK, a.DOES_BIAS, a.DOES_ALIBI, a.DOES_SOFTCAP, a.DOES_SEGMENTS, a.DOES_SCALE)
        }
        start = [self._word(e, C_SCORES), I64(0), e.load(e.pointer(self._word(e, C_TOP)))]
        last = b.sub(self._word(e, C_ROWS), I64(1))
        self.rows = [e.smin(I64(r), last) for r in range(self.lanes)]
        out = e.loop(self._word(e, C_FULL), start, lambda i, x: self._square(e, x, None))
        rest = self._word(e, C_REST)

        def cut(i: Value, x: list[Value]) -> list[Value]:
            return self._square(e, x, e.first_lanes(b.sub(rest, b.mul(i, I64(self.lanes)))))

        out = e.loop(self._word(e, C_CUT), out, cut)
        e.store(out[2], e.pointer(self._word(e, C_TOP)))

    def _word(self, e: Emitter, index: int) -> Value:
        return e.load(self.column, 8 * index, I64)

    def _float(self, e: Emitter, word: Value) -> Value:
        return e.splat(e.float_bits(word))

    def _arg(self, e: Emitter, index: int) -> Value:
        return self._float(e, e.load(self.args, 8 * index, I64))

    def _square(self, e: Emitter, vals: list[Value], inside: Value | None) -> list[Value]:
        """One square at `done` keys from the column's first; lanes outside `inside` are no keys."""
        b, n, has = e.b, self.lanes, self.has
        scores, done, top = vals
        p_s = e.pointer(scores)
        added = e.where(has[a.DOES_BIAS], [e.floats(0)] * n, lambda x: self._bias(e, done, inside))
        ones = ir.Constant(e.vb, [1] * n)
        allowed = e.where(has[a.DOES_MASK], [ones] * n, lambda x: self._mask(e, done, inside))
        x = [e.load(p_s, r * self.nr * 4) for r in range(n)]
        x = e.where(has[a.DOES_SCALE], x, lambda x: self._scaled(e, x))

        def add_bias(x: list[Value]) -> list[Value]:
            hidden = e.floats(MINUS_INF)  # also where the score is NaN or +inf
            return [
                b.select(b.fcmp_ordered("==", t, hidden), hidden, b.fadd(s, t))
                for s, t in zip(x, added, strict=True)
            ]

        x = e.where(has[a.DOES_BIAS], x, add_bias)
        x = e.where(has[a.DOES_ALIBI], x, lambda x: self._alibi(e, x, done))
        x = e.where(has[a.DOES_SEGMENTS], x, lambda x: self._segments(e, x, done))

        def hide(x: list[Value]) -> list[Value]:
            zero = ir.Constant(e.vb, None)
            return [
                b.select(b.icmp_unsigned("!=", m, zero), s, e.floats(MINUS_INF))
                for s, m in zip(x, allowed, strict=True)
            ]

        x = e.where(has[a.DOES_MASK], x, hide)
        bounded = b.icmp_signed("!=", self._word(e, C_BOUNDED), I64(0))
        x = e.where(bounded, x, lambda x: self._bounded(e, x, done))
        for r in range(n):
            e.store(x[r], p_s, r * self.nr * 4)
            top = e.maximum(x[r], top)
        return [b.add(scores, I64(n * self.nr * 4)), b.add(done, I64(n)), top]

    def _scaled(self, e: Emitter, x: list[Value]) -> list[Value]:
        def capped(x: list[Value]) -> list[Value]:
            to_cap, cap = self._arg(e, a.TO_CAP), self._arg(e, a.CAP)
            return [e.b.fmul(cap, e.tanh(e.b.fmul(s, to_cap))) for s in x]

        def plain(x: list[Value]) -> list[Value]:
            scale = self._arg(e, a.PASS_SCALE)
            return [e.b.fmul(s, scale) for s in x]

        soft = self.has[a.DOES_SOFTCAP]
        return e.where(e.b.not_(soft), e.where(soft, x, capped), plain)

    def _pointers(self, e: Emitter, base: int, stride: int, size: int, done: Value) -> list[Value]:
        """Row by row, where the square's keys begin; rows past the last are the last again."""
        b = e.b
        first = e.at(e.pointer(self._word(e, base)), b.mul(done, I64(size)))
        step = self._word(e, stride)
        return [e.at(first, b.mul(r, step)) for r in self.rows]

    def _load(self, e: Emitter, p: Value, kind: ir.Type, inside: Value | None) -> Value:
        return e.load(p, 0, kind) if inside is None else e.masked_load(p, inside, kind)

    def _bias(self, e: Emitter, done: Value, inside: Value | None) -> list[Value]:
        b, n = e.b, self.lanes
        kind = self._word(e, C_BIAS_KIND)

        def rows(size: int, vector: ir.Type, widen: Any, _: list[Value]) -> list[Value]:
            pointers = self._pointers(e, C_BIAS, C_BIAS_ROW, size, done)
            block = b.mul(e.load(self.args, 8 * a.BLOCK_N, I64), I64(size))
            # Of the next key block: so many rows are too many streams for the CPU to follow.
            for p in pointers:
                e.prefetch(e.at(p, block))
            return [widen(self._load(e, p, vector, inside)) for p in pointers]

        x = [e.floats(0)] * n
        for code, size, vector, widen in (
            (0, 4, e.vf, lambda x: x),
            (1, 2, e.vh, e.from_bf16),
            (2, 2, e.vh, e.from_f16),
        ):
            chosen = b.icmp_signed("==", kind, I64(code))
            x = e.where(chosen, x, partial(rows, size, vector, widen))
        return e.transpose(x)

    def _mask(self, e: Emitter, done: Value, inside: Value | None) -> list[Value]:
        pointers = self._pointers(e, C_MASK, C_MASK_ROW, 1, done)
        return e.transpose([self._load(e, p, e.vb, inside) for p in pointers])

    def _alibi(self, e: Emitter, x: list[Value], done: Value) -> list[Value]:
        b = e.b
        slope = b.fneg(self._float(e, self._word(e, C_SLOPE)))
        place = b.trunc(b.sub(self._word(e, C_PLACE), done), I32)
        distance = b.add(e.splat(place), e.lane_index())
        out = []
        for r, s in enumerate(x):
            d = b.sub(distance, e.ints(r))
            d = e.smax(d, b.neg(d))
            out.append(e.fma(slope, b.sitofp(d, e.vf), s))
        return out

    def _segments(self, e: Emitter, x: list[Value], done: Value) -> list[Value]:
        b = e.b
        rows = e.load(e.pointer(self._word(e, C_Q_IDS)), 0, e.vi)
        keys = e.at(e.pointer(self._word(e, C_K_IDS)), b.mul(done, I64(4)))
        return [
            b.select(b.icmp_signed("==", rows, e.splat(e.load(keys, 4 * r, I32))), s, e.floats(MINUS_INF))
            for r, s in enumerate(x)
        ]

    def _bounded(self, e: Emitter, x: list[Value], done: Value) -> list[Value]:
        b = e.b
        limits = e.pointer(self._word(e, C_LIMITS))
        lo, width = e.load(limits, 0, e.vi), e.load(limits, self.nr * 4, e.vi)
        key = b.sub(e.splat(b.trunc(b.add(self._word(e, C_KEY), done), I32)), lo)
        return [
            b.select(b.icmp_unsigned("<", b.add(key, e.ints(r)), width), s, e.floats(MINUS_INF))
            for r, s in enumerate(x)
        ]

    def scan_mask(self, e: Emitter, src: Value, stride: Value, rows: Value, keys: Value) -> Value:
        """UNSEEN if all bytes are 0, PLAIN if none is, else CHANGED."""
        b, n = e.b, 4 * self.lanes
        kind, flags = ir.VectorType(I8, n), ir.VectorType(I1, n)
        zero, none = ir.Constant(kind, None), ir.Constant(flags, [0] * n)
        full, rest = b.udiv(keys, I64(n)), b.urem(keys, I64(n))
        some = b.zext(b.icmp_signed(">", rest, I64(0)), I64)

        def step(x: list[Value], inside: Value | None) -> list[Value]:
            found = self._load(e, x[0], kind, inside)
            seen, hidden = b.icmp_unsigned("!=", found, zero), b.icmp_unsigned("==", found, zero)
            if inside is not None:
                hidden = b.and_(hidden, inside)
            return [e.at(x[0], n), b.or_(x[1], seen), b.or_(x[2], hidden)]

        def row(i: Value, x: list[Value]) -> list[Value]:
            e.prefetch(e.at(x[0], keys))  # of the next key block
            out = e.loop(full, x, lambda j, y: step(y, None))
            out = e.loop(some, out, lambda j, y: step(y, e.first_lanes(rest, n)))
            return [e.at(x[0], stride), *out[1:]]

        _, seen, hidden = e.loop(rows, [e.pointer(src), none, none], row)
        whole = ir.IntType(n)
        any_seen = b.icmp_unsigned("!=", b.bitcast(seen, whole), whole(0))
        any_hidden = b.icmp_unsigned("!=", b.bitcast(hidden, whole), whole(0))
        kinds = b.select(any_hidden, I64(a.CHANGED), I64(a.PLAIN))
        return b.select(any_seen, kinds, I64(a.UNSEEN))

    def store_as_float(self, e: Emitter, src: Value, kind: Value, dst: Value) -> None:
        """One bias element of any kind, as float32."""
        b, p, q = e.b, e.pointer(src), e.pointer(dst)

        def when(code: int, value: Any) -> None:
            with b.if_then(b.icmp_signed("==", kind, I64(code))):
                e.store(value(), q)

        when(0, lambda: e.load(p, 0, F32))
        when(1, lambda: e.from_bf16(e.load(p, 0, I16)))
        when(2, lambda: e.from_f16(e.load(p, 0, I16)))
        when(3, lambda: self._from_f64(e, b.load(p, typ=ir.DoubleType(), align=8)))

    def _from_f64(self, e: Emitter, x: Value) -> Value:
        """What is finite stays finite."""
        b, kind = e.b, ir.DoubleType()
        for sign, beyond in ((1.0, ">"), (-1.0, "<")):
            limit = ir.Constant(kind, sign * a.FLT_MAX)
            infinite = b.fcmp_ordered("==", x, ir.Constant(kind, sign * float("inf")))
            held = b.and_(b.fcmp_ordered(beyond, x, limit), b.not_(infinite))
            x = b.select(held, limit, x)
        return b.fptrunc(x, F32)


def emissions(key: ScoreKey) -> Iterator[tuple[str, int, Callable[..., Any], bool]]:
    """Name, number of arguments, emission and whether it returns a value, of every stage."""
    square = _Square(key)
    yield "change_column", 2, square.change_column, False
    yield "scan_mask", 4, square.scan_mask, True
    yield "store_as_float", 3, square.store_as_float, False


def build(key: ScoreKey) -> Any:
    """Compile the pass of `key`: a numba cfunc.

    `void(args, scratch, what, head, i_p, n, begin, end, bounded)`, all int64."""
    from numba import cfunc, types

    from polyflash.backends.cpu import loading, simd

    change_column, scan_mask, store_as_float = natives(key.name, key.isa, emissions(key)).values()
    arg, load_i32, load_i8, store_i8 = simd.word, simd.load_i32, simd.load_i8, simd.store_i8
    store_i64, store_i32, least, greatest = simd.store_i64, simd.store_i32, simd.least, simd.greatest
    LANES, NV, NR = key.lanes, key.nv, key.panel_rows
    FAR = (1 << 31) - (1 << 16)  # distances stay within int32

    device = loading.device

    @device(2)
    def start_item(args, scratch):  # type: ignore[no-untyped-def]
        """Segments of the item's rows; rows past the last repeat it."""
        item, dst = scratch + arg(args, a.T_ITEM), scratch + arg(args, a.T_Q_IDS)
        src = arg(args, a.Q_IDS) + arg(item, a.I_BATCH) * arg(args, a.Q_IDS_BATCH)
        last = arg(item, a.I_ROW_END) - 1
        for r in range(arg(item, a.I_PANELS) * NR):
            row = least(arg(item, a.I_ROW) + r, last)
            store_i32(dst + 4 * r, load_i32(src + row * arg(args, a.Q_IDS_ROW)))

    @device(3, types.int64)
    def segments_kind(args, scratch, i_p):  # type: ignore[no-untyped-def]
        """By the ranges of ids alone: disjoint ones do not meet, two single ones that meet are equal."""
        item = scratch + arg(args, a.T_ITEM)
        rows, keys = scratch + arg(args, a.T_Q_IDS) + i_p * NR * 4, scratch + arg(args, a.T_K_IDS)
        row_lo = row_hi = load_i32(rows)
        for r in range(1, NR):
            found = load_i32(rows + 4 * r)
            row_lo, row_hi = least(row_lo, found), greatest(row_hi, found)
        begin, end = arg(item, a.I_FIRST) - arg(item, a.I_KEY), arg(item, a.I_LAST) - arg(item, a.I_KEY)
        key_lo = key_hi = load_i32(keys + 4 * begin)
        for j in range(begin + 1, end):
            found = load_i32(keys + 4 * j)
            key_lo, key_hi = least(key_lo, found), greatest(key_hi, found)
        if row_lo > key_hi or key_lo > row_hi:
            return a.UNSEEN
        return a.PLAIN if row_lo == row_hi and key_lo == key_hi else a.CHANGED

    @device(4, types.int64)
    def mask_kind(args, scratch, head, i_p):  # type: ignore[no-untyped-def]
        item = scratch + arg(args, a.T_ITEM)
        row = arg(item, a.I_ROW) + i_p * NR
        src = (
            arg(args, a.MASK) + arg(item, a.I_BATCH) * arg(args, a.MASK_BATCH) + head * arg(args, a.MASK_HEAD)
        )
        src += row * arg(args, a.MASK_ROW) + arg(item, a.I_FIRST) * arg(args, a.MASK_KEY)
        rows = least(NR, arg(item, a.I_ROW_END) - row) if arg(args, a.MASK_ROW) != 0 else 1
        if arg(args, a.MASK_KEY) == 0:
            return scan_mask(src, arg(args, a.MASK_ROW), rows, 1)
        if arg(args, a.MASK_KEY) == 1:
            return scan_mask(src, arg(args, a.MASK_ROW), rows, arg(item, a.I_LAST) - arg(item, a.I_FIRST))
        return a.CHANGED

    @device(2)
    def start_block(args, scratch):  # type: ignore[no-untyped-def]
        """How the key block touches each panel, and whether it touches any."""
        item, kinds = scratch + arg(args, a.T_ITEM), scratch + arg(args, a.T_KINDS)
        does, panels, heads = arg(args, a.PASS_DOES), arg(item, a.I_PANELS), arg(item, a.I_HEADS)
        if does & a.DOES_SEGMENTS:
            src = arg(args, a.K_IDS) + arg(item, a.I_BATCH) * arg(args, a.K_IDS_BATCH)
            dst = scratch + arg(args, a.T_K_IDS) - 4 * arg(item, a.I_KEY)
            for j in range(arg(item, a.I_FIRST), arg(item, a.I_LAST)):
                store_i32(dst + 4 * j, load_i32(src + j * arg(args, a.K_IDS_KEY)))
        plain = a.CHANGED if does & a.DOES_SCALE else a.PLAIN
        touched = 0
        for i_p in range(panels):
            segments = a.PLAIN
            if does & a.DOES_SEGMENTS:
                segments = segments_kind(args, scratch, i_p)
            found = a.PLAIN
            for i_h in range(heads):
                if does & a.DOES_MASK and (i_h == 0 or arg(args, a.MASK_HEAD) != 0):
                    found = mask_kind(args, scratch, arg(item, a.I_HEAD) + i_h, i_p)
                kind = least(plain, least(segments, found))
                store_i8(kinds + i_h * panels + i_p, kind)
                touched |= kind
        store_i64(item + 8 * a.I_ANY, touched)

    @device(7)
    def stage_bias(args, scratch, src, row, rows, begin, end):  # type: ignore[no-untyped-def]
        """Bias of a column whose keys are no unit stride apart, or float64, as float32 rows in scratch."""
        dst, width = scratch + arg(args, a.T_STAGED), arg(args, a.BLOCK_N) * 4
        for r in range(rows):
            for j in range(end - begin):
                at = src + (row + r) * arg(args, a.BIAS_ROW) + (begin + j) * arg(args, a.BIAS_KEY)
                store_as_float(at, arg(args, a.BIAS_KIND), dst + r * width + 4 * j)

    @device(7)
    def stage_mask(args, scratch, src, row, rows, begin, end):  # type: ignore[no-untyped-def]
        width = arg(args, a.BLOCK_N)
        dst = scratch + arg(args, a.T_STAGED) + LANES * width * 4
        for r in range(rows):
            for j in range(end - begin):
                at = src + (row + r) * arg(args, a.MASK_ROW) + (begin + j) * arg(args, a.MASK_KEY)
                store_i8(dst + r * width + j, load_i8(at))

    @device(7)
    def change_scores(args, scratch, head, i_p, n, begin, end):  # type: ignore[no-untyped-def]
        """Keys n + [begin, end) of one panel; the limits are compared if some row does not see them all."""
        item, does = scratch + arg(args, a.T_ITEM), arg(args, a.PASS_DOES)
        column = item + 8 * a.I_COLUMN
        i_b, row, key = arg(item, a.I_BATCH), arg(item, a.I_ROW) + i_p * NR, n + begin
        readable = least(arg(item, a.I_SEQLEN_K) - key, end - begin)
        chunks = (end - begin) // LANES
        full = readable // LANES
        store_i64(column + 8 * C_FULL, full)
        store_i64(column + 8 * C_CUT, chunks - full)
        store_i64(column + 8 * C_REST, readable - full * LANES)
        store_i64(column + 8 * C_KEY, key)
        store_i64(column + 8 * C_K_IDS, scratch + arg(args, a.T_K_IDS) + 4 * begin)
        store_i64(column + 8 * C_BIAS_KIND, arg(args, a.BIAS_KIND))
        store_i64(column + 8 * C_BIAS_ROW, arg(args, a.BIAS_ROW))
        store_i64(column + 8 * C_MASK_ROW, arg(args, a.MASK_ROW))
        if does & a.DOES_ALIBI:
            slope = arg(args, a.SLOPES) + i_b * arg(args, a.SLOPES_BATCH) + head * arg(args, a.SLOPES_HEAD)
            store_i64(column + 8 * C_SLOPE, load_i32(slope))
        limits = scratch + arg(args, a.T_LIMITS) + i_p * NR * 8
        bias = arg(args, a.BIAS) + i_b * arg(args, a.BIAS_BATCH) + head * arg(args, a.BIAS_HEAD)
        mask = arg(args, a.MASK) + i_b * arg(args, a.MASK_BATCH) + head * arg(args, a.MASK_HEAD)
        bias_size = 4 if arg(args, a.BIAS_KIND) == 0 else 2
        for v in range(NV):
            at = v * LANES
            rows = least(LANES, arg(item, a.I_ROW_END) - row - at)
            if rows <= 0:
                break
            store_i64(column + 8 * C_ROWS, rows)
            store_i64(column + 8 * C_SCORES, scratch + arg(args, a.T_S) + (begin * NR + at) * 4)
            store_i64(column + 8 * C_TOP, scratch + arg(args, a.T_BLOCK) + (NR + at) * 4)
            store_i64(column + 8 * C_LIMITS, limits + at * 4)
            place = row + at + arg(item, a.I_OFFSET) - key
            store_i64(column + 8 * C_PLACE, least(greatest(place, -FAR), FAR))
            store_i64(column + 8 * C_Q_IDS, scratch + arg(args, a.T_Q_IDS) + (i_p * NR + at) * 4)
            if does & a.DOES_BIAS:
                source = bias + (row + at) * arg(args, a.BIAS_ROW) + key * arg(args, a.BIAS_KEY)
                if arg(args, a.BIAS_KEY) != bias_size:
                    stage_bias(args, scratch, bias, row + at, rows, key, key + readable)
                    source = scratch + arg(args, a.T_STAGED)
                    store_i64(column + 8 * C_BIAS_ROW, arg(args, a.BLOCK_N) * 4)
                    store_i64(column + 8 * C_BIAS_KIND, 0)
                store_i64(column + 8 * C_BIAS, source)
            if does & a.DOES_MASK:
                source = mask + (row + at) * arg(args, a.MASK_ROW) + key
                if arg(args, a.MASK_KEY) != 1:
                    stage_mask(args, scratch, mask, row + at, rows, key, key + readable)
                    source = scratch + arg(args, a.T_STAGED) + LANES * arg(args, a.BLOCK_N) * 4
                    store_i64(column + 8 * C_MASK_ROW, arg(args, a.BLOCK_N))
                store_i64(column + 8 * C_MASK, source)
            change_column(args, column)

    @device(5)
    def mark_seen(args, scratch, head, i_p, key):  # type: ignore[no-untyped-def]
        """Which rows of a panel see `key` as far as mask, segments and bias go; rare, so row by row."""
        item, does = scratch + arg(args, a.T_ITEM), arg(args, a.PASS_DOES)
        i_b, row = arg(item, a.I_BATCH), arg(item, a.I_ROW) + i_p * NR
        seen, staged = scratch + arg(args, a.T_SEEN), scratch + arg(args, a.T_STAGED)
        bias = arg(args, a.BIAS) + i_b * arg(args, a.BIAS_BATCH) + head * arg(args, a.BIAS_HEAD)
        mask = arg(args, a.MASK) + i_b * arg(args, a.MASK_BATCH) + head * arg(args, a.MASK_HEAD)
        q_ids = scratch + arg(args, a.T_Q_IDS) + i_p * NR * 4
        k_id = 0
        if does & a.DOES_SEGMENTS:
            k_id = load_i32(scratch + arg(args, a.T_K_IDS) + (key - arg(item, a.I_KEY)) * 4)
        for r in range(NR):
            i, yes = least(row + r, arg(item, a.I_ROW_END) - 1), 1
            if (
                does & a.DOES_MASK
                and load_i8(mask + i * arg(args, a.MASK_ROW) + key * arg(args, a.MASK_KEY)) == 0
            ):
                yes = 0
            if does & a.DOES_SEGMENTS and load_i32(q_ids + 4 * r) != k_id:
                yes = 0
            if does & a.DOES_BIAS:
                at = bias + i * arg(args, a.BIAS_ROW) + key * arg(args, a.BIAS_KEY)
                store_as_float(at, arg(args, a.BIAS_KIND), staged)
                if load_i32(staged) == -0x800000:  # the bits of -inf
                    yes = 0
            store_i8(seen + r, yes)

    @cfunc(types.void(*[types.int64] * 9), error_model="numpy", forceinline=True)
    def score_pass(args, scratch, what, head, i_p, n, begin, end, bounded):  # type: ignore[no-untyped-def]
        if what == a.CHANGE_SCORES:
            store_i64(scratch + arg(args, a.T_ITEM) + 8 * (a.I_COLUMN + C_BOUNDED), bounded)
            change_scores(args, scratch, head, i_p, n, begin, end)
        elif what == a.START_BLOCK:
            start_block(args, scratch)
        elif what == a.START_ITEM:
            if arg(args, a.PASS_DOES) & a.DOES_SEGMENTS:
                start_item(args, scratch)
        else:
            mark_seen(args, scratch, head, i_p, n)

    return score_pass
