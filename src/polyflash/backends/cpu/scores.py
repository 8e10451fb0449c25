"""The pass over one panel's scores, between the two products: everything that changes a score.

    x = scale·s;  x = softcap·tanh(x / softcap);  x += bias;  x -= slope·|i + offset - j|;  x = -inf if unseen

One object per instruction set and panel width serves every forward kernel, which calls it through a pointer:
dtype and head_dim have no part in it, and a kernel without these features pays nothing. A square of scores,
`lanes` keys by `lanes` rows, is changed in registers; bias and mask come with rows along the vector and are
transposed. Each operand is a branch per square, not per score.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from polyflash.backends.cpu import intrinsics, words
from polyflash.backends.cpu.arguments import FLT_MAX
from polyflash.backends.cpu.configs import ScoreKey
from polyflash.backends.cpu.intrinsics import (
    greatest,
    least,
    load_i8,
    load_i32,
    namespace,
    stage,
    store_i8,
    store_i32,
)
from polyflash.backends.cpu.simd import F32, I1, I8, I16, I32, I64, Block, Emitter, Value
from polyflash.backends.cpu.structs import Blocks
from polyflash.backends.cpu.words import COLUMN, FORWARD

MINUS_INF = float("-inf")

BLOCK = Blocks(FORWARD)
device = BLOCK.device


class ScoreTile:
    """Emissions for one key: a column is `lanes` rows of a panel, a square as many keys of it."""

    def __init__(self, key: ScoreKey) -> None:
        self.lanes, self.nv, self.nr = key.lanes, key.nv, key.panel_rows

    @stage
    def change_column(self, e: Emitter, args: Value, column: Value) -> None:
        """All squares of a column: those whose keys can all be read, then those the end of the keys cuts."""
        b = e.b
        self.args, self.column = Block(e, args, FORWARD), Block(e, column, COLUMN)
        does = self.args.pass_does
        self.has = {
            bit: b.icmp_signed("!=", b.and_(does, I64(bit)), I64(0))
            for bit in (
                words.DOES_MASK,
                words.DOES_BIAS,
                words.DOES_ALIBI,
                words.DOES_SOFTCAP,
                words.DOES_SEGMENTS,
                words.DOES_SCALE,
            )
        }
        start = [self.column.scores, I64(0), e.load(e.pointer(self.column.top))]
        last = b.sub(self.column.rows, I64(1))
        self.rows = [e.smin(I64(r), last) for r in range(self.lanes)]
        out = e.loop(self.column.full, start, lambda i, x: self._square(e, x, None))
        rest = self.column.rest

        def cut(i: Value, x: list[Value]) -> list[Value]:
            return self._square(e, x, e.first_lanes(b.sub(rest, b.mul(i, I64(self.lanes)))))

        out = e.loop(self.column.cut, out, cut)
        e.store(out[2], e.pointer(self.column.top))

    def _float(self, e: Emitter, word: Value) -> Value:
        return e.splat(e.float_bits(word))

    def _square(self, e: Emitter, vals: list[Value], inside: Value | None) -> list[Value]:
        """One square at `done` keys from the column's first; lanes outside `inside` are no keys."""
        b, n, has = e.b, self.lanes, self.has
        scores, done, top = vals
        p_s = e.pointer(scores)
        added = e.where(has[words.DOES_BIAS], [e.floats(0)] * n, lambda x: self._bias(e, done, inside))
        ones = ir.Constant(e.vb, [1] * n)
        allowed = e.where(has[words.DOES_MASK], [ones] * n, lambda x: self._mask(e, done, inside))
        x = [e.load(p_s, r * self.nr * 4) for r in range(n)]
        x = e.where(has[words.DOES_SCALE], x, lambda x: self._scaled(e, x))

        def add_bias(x: list[Value]) -> list[Value]:
            hidden = e.floats(MINUS_INF)  # also where the score is NaN or +inf
            return [
                b.select(b.fcmp_ordered("==", t, hidden), hidden, b.fadd(s, t))
                for s, t in zip(x, added, strict=True)
            ]

        x = e.where(has[words.DOES_BIAS], x, add_bias)
        x = e.where(has[words.DOES_ALIBI], x, lambda x: self._alibi(e, x, done))
        x = e.where(has[words.DOES_SEGMENTS], x, lambda x: self._segments(e, x, done))

        def hide(x: list[Value]) -> list[Value]:
            zero = ir.Constant(e.vb, None)
            return [
                b.select(b.icmp_unsigned("!=", m, zero), s, e.floats(MINUS_INF))
                for s, m in zip(x, allowed, strict=True)
            ]

        x = e.where(has[words.DOES_MASK], x, hide)
        bounded = b.icmp_signed("!=", self.column.bounded, I64(0))
        x = e.where(bounded, x, lambda x: self._bounded(e, x, done))
        for r in range(n):
            e.store(x[r], p_s, r * self.nr * 4)
            top = e.maximum(x[r], top)
        return [b.add(scores, I64(n * self.nr * 4)), b.add(done, I64(n)), top]

    def _scaled(self, e: Emitter, x: list[Value]) -> list[Value]:
        def capped(x: list[Value]) -> list[Value]:
            to_cap, cap = self._float(e, self.args.to_cap), self._float(e, self.args.cap)
            return [e.b.fmul(cap, e.tanh(e.b.fmul(s, to_cap))) for s in x]

        def plain(x: list[Value]) -> list[Value]:
            scale = self._float(e, self.args.pass_scale)
            return [e.b.fmul(s, scale) for s in x]

        soft = self.has[words.DOES_SOFTCAP]
        return e.where(e.b.not_(soft), e.where(soft, x, capped), plain)

    def _pointers(self, e: Emitter, base: Value, step: Value, size: int, done: Value) -> list[Value]:
        """Row by row, where the square's keys begin; rows past the last are the last again."""
        b = e.b
        first = e.at(e.pointer(base), b.mul(done, I64(size)))
        return [e.at(first, b.mul(r, step)) for r in self.rows]

    def _bias(self, e: Emitter, done: Value, inside: Value | None) -> list[Value]:
        b, n = e.b, self.lanes
        kind = self.column.bias_kind

        def rows(size: int, vector: ir.Type, widen: Any, _: list[Value]) -> list[Value]:
            pointers = self._pointers(e, self.column.bias, self.column.bias_row, size, done)
            block = b.mul(self.args.block_n, I64(size))
            # Of the next key block: so many rows are too many streams for the CPU to follow.
            for p in pointers:
                e.prefetch(e.at(p, block))
            return [widen(e.load(p, 0, vector, inside)) for p in pointers]

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
        pointers = self._pointers(e, self.column.mask, self.column.mask_row, 1, done)
        return e.transpose([e.load(p, 0, e.vb, inside) for p in pointers])

    def _alibi(self, e: Emitter, x: list[Value], done: Value) -> list[Value]:
        b = e.b
        slope = b.fneg(self._float(e, self.column.slope))
        place = b.trunc(b.sub(self.column.place, done), I32)
        distance = b.add(e.splat(place), e.lane_index())
        out = []
        for r, s in enumerate(x):
            d = b.sub(distance, e.ints(r))
            d = e.smax(d, b.neg(d))
            out.append(e.fma(slope, b.sitofp(d, e.vf), s))
        return out

    def _segments(self, e: Emitter, x: list[Value], done: Value) -> list[Value]:
        b = e.b
        rows = e.load(e.pointer(self.column.q_ids), 0, e.vi)
        keys = e.at(e.pointer(self.column.k_ids), b.mul(done, I64(4)))
        return [
            b.select(b.icmp_signed("==", rows, e.splat(e.load(keys, 4 * r, I32))), s, e.floats(MINUS_INF))
            for r, s in enumerate(x)
        ]

    def _bounded(self, e: Emitter, x: list[Value], done: Value) -> list[Value]:
        b = e.b
        limits = e.pointer(self.column.limits)
        lo, width = e.load(limits, 0, e.vi), e.load(limits, self.nr * 4, e.vi)
        key = b.sub(e.splat(b.trunc(b.add(self.column.key, done), I32)), lo)
        return [e.apply_mask(s, b.add(key, e.ints(r)), width) for r, s in enumerate(x)]

    @stage
    def scan_mask(self, e: Emitter, src: Value, stride: Value, rows: Value, keys: Value) -> Value:
        """words.UNSEEN if all bytes are 0, words.PLAIN if none is, else words.CHANGED."""
        b, n = e.b, 4 * self.lanes
        kind, flags = ir.VectorType(I8, n), ir.VectorType(I1, n)
        zero, none = ir.Constant(kind, None), ir.Constant(flags, [0] * n)

        def step(x: list[Value], inside: Value | None) -> list[Value]:
            found = e.load(x[0], 0, kind, inside)
            seen, hidden = b.icmp_unsigned("!=", found, zero), b.icmp_unsigned("==", found, zero)
            if inside is not None:
                hidden = b.and_(hidden, inside)
            return [e.at(x[0], n), b.or_(x[1], seen), b.or_(x[2], hidden)]

        def row(i: Value, x: list[Value]) -> list[Value]:
            e.prefetch(e.at(x[0], keys))  # of the next key block
            return [e.at(x[0], stride), *e.each_vector(keys, n, x, step)[1:]]

        _, seen, hidden = e.loop(rows, [e.pointer(src), none, none], row)
        any_seen, any_hidden = e.any_lane(seen), e.any_lane(hidden)
        kinds = b.select(any_hidden, I64(words.CHANGED), I64(words.PLAIN))
        return b.select(any_seen, kinds, I64(words.UNSEEN))

    @stage
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
        """Converts so that finite values stay finite."""
        b, kind = e.b, ir.DoubleType()
        for sign, beyond in ((1.0, ">"), (-1.0, "<")):
            limit = ir.Constant(kind, sign * FLT_MAX)
            infinite = b.fcmp_ordered("==", x, ir.Constant(kind, sign * float("inf")))
            held = b.and_(b.fcmp_ordered(beyond, x, limit), b.not_(infinite))
            x = b.select(held, limit, x)
        return b.fptrunc(x, F32)


def kinds(key: ScoreKey, stage: Any) -> Any:
    """Make what says which tiles of a block some row sees: start_item, start_block."""
    NR = key.panel_rows

    @device
    def start_item(tile):
        """Segments of the item's rows; rows past the last repeat it."""
        args = tile.args
        item, dst = tile.item, tile.q_ids
        src = args.q_ids + item.batch * args.q_ids_batch
        last = item.row_end - 1
        for r in range(item.panels * NR):
            row = least(item.row + r, last)
            store_i32(dst + 4 * r, load_i32(src + row * args.q_ids_row))

    @device
    def segments_kind(tile, i_p):
        """By the ranges of ids alone: disjoint ones do not meet, two single ones that meet are equal."""
        item = tile.item
        rows, keys = tile.q_ids + i_p * NR * 4, tile.k_ids
        row_lo = row_hi = load_i32(rows)
        for r in range(1, NR):
            found = load_i32(rows + 4 * r)
            row_lo, row_hi = least(row_lo, found), greatest(row_hi, found)
        begin, end = item.first - item.key, item.last - item.key
        key_lo = key_hi = load_i32(keys + 4 * begin)
        for j in range(begin + 1, end):
            found = load_i32(keys + 4 * j)
            key_lo, key_hi = least(key_lo, found), greatest(key_hi, found)
        if row_lo > key_hi or key_lo > row_hi:
            return words.UNSEEN
        return words.PLAIN if row_lo == row_hi and key_lo == key_hi else words.CHANGED

    @device
    def mask_kind(tile, head, i_p):
        args, item = tile.args, tile.item
        row = item.row + i_p * NR
        src = args.mask + item.batch * args.mask_batch + head * args.mask_head
        src += row * args.mask_row + item.first * args.mask_key
        rows = least(NR, item.row_end - row) if args.mask_row != 0 else 1
        if args.mask_key == 0:
            return stage.scan_mask(src, args.mask_row, rows, 1)
        if args.mask_key == 1:
            return stage.scan_mask(src, args.mask_row, rows, item.last - item.first)
        return words.CHANGED

    @device
    def start_block(tile):
        """How the key block touches each panel, and whether it touches any."""
        args = tile.args
        item, kinds = tile.item, tile.kinds
        does, panels, heads = args.pass_does, item.panels, item.heads
        if does & words.DOES_SEGMENTS:
            src = args.k_ids + item.batch * args.k_ids_batch
            dst = tile.k_ids - 4 * item.key
            for j in range(item.first, item.last):
                store_i32(dst + 4 * j, load_i32(src + j * args.k_ids_key))
        plain = words.CHANGED if does & words.DOES_SCALE else words.PLAIN
        touched = 0
        for i_p in range(panels):
            segments = words.PLAIN
            if does & words.DOES_SEGMENTS:
                segments = segments_kind(tile, i_p)
            found = words.PLAIN
            for i_h in range(heads):
                if does & words.DOES_MASK and (i_h == 0 or args.mask_head != 0):
                    found = mask_kind(tile, item.head + i_h, i_p)
                kind = least(plain, least(segments, found))
                store_i8(kinds + i_h * panels + i_p, kind)
                touched |= kind
        item.any_seen = touched

    return namespace(start_item, start_block)


def changes(key: ScoreKey, stage: Any) -> Any:
    """Make what changes a tile, and what says which rows see one key: change_scores, mark_seen."""
    LANES, NV, NR = key.lanes, key.nv, key.panel_rows
    FAR = (1 << 31) - (1 << 16)  # distances stay within int32

    @device
    def stage_bias(tile, src, row, rows, begin, end):
        """Bias of a column whose keys are no unit stride apart, or float64, as float32 rows in scratch."""
        args = tile.args
        dst, width = tile.pass_stage, args.block_n * 4
        for r in range(rows):
            for j in range(end - begin):
                at = src + (row + r) * args.bias_row + (begin + j) * args.bias_key
                stage.store_as_float(at, args.bias_kind, dst + r * width + 4 * j)

    @device
    def stage_mask(tile, src, row, rows, begin, end):
        args = tile.args
        width = args.block_n
        dst = tile.pass_stage + LANES * width * 4
        for r in range(rows):
            for j in range(end - begin):
                at = src + (row + r) * args.mask_row + (begin + j) * args.mask_key
                store_i8(dst + r * width + j, load_i8(at))

    @device
    def change_scores(tile, head, i_p, n, begin, end):
        """Keys n + [begin, end) of one panel; the limits are compared if some row does not see them all."""
        args = tile.args
        item, does = tile.item, args.pass_does
        column = tile.column
        i_b, row, key = item.batch, item.row + i_p * NR, n + begin
        readable = least(item.seqlen_k - key, end - begin)
        chunks = (end - begin) // LANES
        full = readable // LANES
        column.full = full
        column.cut = chunks - full
        column.rest = readable - full * LANES
        column.key = key
        column.k_ids = tile.k_ids + 4 * begin
        column.bias_kind = args.bias_kind
        column.bias_row = args.bias_row
        column.mask_row = args.mask_row
        if does & words.DOES_ALIBI:
            slope = args.slopes + i_b * args.slopes_batch + head * args.slopes_head
            column.slope = load_i32(slope)
        limits = tile.limits + i_p * NR * 8
        bias = args.bias + i_b * args.bias_batch + head * args.bias_head
        mask = args.mask + i_b * args.mask_batch + head * args.mask_head
        bias_size = 4 if args.bias_kind == 0 else 2
        for v in range(NV):
            at = v * LANES
            rows = least(LANES, item.row_end - row - at)
            if rows <= 0:
                break
            column.rows = rows
            column.scores = tile.s + (begin * NR + at) * 4
            column.top = tile.block + (NR + at) * 4
            column.limits = limits + at * 4
            place = row + at + item.offset - key
            column.place = least(greatest(place, -FAR), FAR)
            column.q_ids = tile.q_ids + (i_p * NR + at) * 4
            if does & words.DOES_BIAS:
                source = bias + (row + at) * args.bias_row + key * args.bias_key
                if args.bias_key != bias_size:
                    stage_bias(tile, bias, row + at, rows, key, key + readable)
                    source = tile.pass_stage
                    column.bias_row = args.block_n * 4
                    column.bias_kind = 0
                column.bias = source
            if does & words.DOES_MASK:
                source = mask + (row + at) * args.mask_row + key
                if args.mask_key != 1:
                    stage_mask(tile, mask, row + at, rows, key, key + readable)
                    source = tile.pass_stage + LANES * args.block_n * 4
                    column.mask_row = args.block_n
                column.mask = source
            stage.change_column(args, column)

    @device
    def mark_seen(tile, head, i_p, key):
        """Marks the rows of a panel that see `key` as far as mask, segments and bias go; rare, so row by
        row."""
        args = tile.args
        item, does = tile.item, args.pass_does
        i_b, row = item.batch, item.row + i_p * NR
        seen, staged = tile.seen, tile.pass_stage
        bias = args.bias + i_b * args.bias_batch + head * args.bias_head
        mask = args.mask + i_b * args.mask_batch + head * args.mask_head
        q_ids = tile.q_ids + i_p * NR * 4
        k_id = 0
        if does & words.DOES_SEGMENTS:
            k_id = load_i32(tile.k_ids + (key - item.key) * 4)
        for r in range(NR):
            i, yes = least(row + r, item.row_end - 1), 1
            if does & words.DOES_MASK and load_i8(mask + i * args.mask_row + key * args.mask_key) == 0:
                yes = 0
            if does & words.DOES_SEGMENTS and load_i32(q_ids + 4 * r) != k_id:
                yes = 0
            if does & words.DOES_BIAS:
                at = bias + i * args.bias_row + key * args.bias_key
                stage.store_as_float(at, args.bias_kind, staged)
                if load_i32(staged) == -0x800000:  # the bits of -inf
                    yes = 0
            store_i8(seen + r, yes)

    return namespace(change_scores, mark_seen)


def build(key: ScoreKey) -> Any:
    """Compile the pass of `key`: a numba cfunc.

    `void(tile, what, head, i_p, n, begin, end, bounded)`, all int64."""
    stage, tiles_at = intrinsics.stages(key, ScoreTile(key)), BLOCK.tiles()
    kind, change = kinds(key, stage), changes(key, stage)

    @BLOCK.kernel
    def score_pass(args, scratch, what, head, i_p, n, begin, end, bounded):
        tile = tiles_at(args, scratch)
        if what == words.CHANGE_SCORES:
            tile.column.bounded = bounded
            change.change_scores(tile, head, i_p, n, begin, end)
        elif what == words.START_BLOCK:
            kind.start_block(tile)
        elif what == words.START_ITEM:
            if args.pass_does & words.DOES_SEGMENTS:
                kind.start_item(tile)
        else:
            change.mark_seen(tile, head, i_p, n)

    return score_pass
