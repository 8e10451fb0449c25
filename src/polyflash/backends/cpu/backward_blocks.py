"""The stages of one gradient tile as vector functions: five products over the tiles of `blocks.py`.

    S^T = K·Q^T                     dP^T = V·dO^T                          lanes are queries
    P = exp(scale·S - lse)           dS = P·(dP - delta)
    dV += P^T·dO                    dK += dS^T·Q                           lanes are channels
    dQ^T += K^T·dS^T                                                       lanes are queries

P and dS replace S and dP in scratch. With bf16dot they are stored as bfloat16: rows of queries for dV and dK,
dS also as interleaved key pairs for dQ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain

from llvmlite import ir

from polyflash.backends.cpu.backward_configs import BackwardKey
from polyflash.backends.cpu.blocks import Tile
from polyflash.backends.cpu.intrinsics import stage
from polyflash.backends.cpu.simd import F32, I1, I16, I32, I64, Emitter, Value

MINUS_INF, INF, NAN = float("-inf"), float("inf"), float("nan")
LOG2E, LOG2E_REST = 1.44269502162933349609375, 1.925963033500011e-08  # of float32, and what it misses


class BackwardTile(Tile):
    """Emissions for one key. Methods named as the stages they emit."""

    key: BackwardKey

    @property
    def _weight_row(self) -> int:
        """Bytes of one key's weights, as `outer` reads them."""
        return self.nr * 4 // self.key.pack

    # load_tile
    @stage
    def finite_rows(self, e: Emitter, src, atoms, vectors, dst) -> Value:
        """Staged rows as the natural operand of a product: what is not finite becomes 0, as a weight of 0
        must hide it. With bf16dot, rows 2i and 2i+1 are interleaved."""
        b, rows = e.b, 2 if self.dot else 1
        n = self.lanes * rows
        kind = ir.VectorType(I16, n) if self.dot else e.vf

        def columns(j: Value, p: list[Value]) -> list[Value]:
            x = [e.load(p[0], r * self.key.k_row_bytes, kind) for r in range(rows)]
            bad = [e.not_finite(z) for z in x]
            x = [b.select(f, ir.Constant(kind, None), z) for f, z in zip(bad, x, strict=True)]
            for r, part in enumerate(e.interleave(*x) if self.dot else x):
                e.store(part, p[1], r * e.bytes)
            return [e.at(p[0], e.bytes), e.at(p[1], rows * e.bytes), reduce(b.or_, bad, p[2])]

        def atom(i: Value, p: list[Value]) -> list[Value]:
            bad = e.loop(vectors, p, columns)[2]
            return [e.at(p[0], rows * self.key.k_row_bytes), e.at(p[1], self.key.v_row_bytes), bad]

        none = ir.Constant(ir.VectorType(I1, n), [0] * n)
        return b.zext(e.any_lane(e.loop(atoms, [e.pointer(src), e.pointer(dst), none], atom)[2]), I64)

    @stage
    def row_dots(self, e: Emitter, x, y, vectors, dst) -> None:
        """Σ x·y of `lanes` staged rows, one per lane; rows of another stage are turned, so no sum crosses
        lanes."""
        b, row = e.b, self.key.k_row_bytes

        def parts(z: Value) -> list[Value]:
            if not self.dot:
                return [z]
            bits = b.bitcast(z, e.vi)
            return [b.bitcast(x, e.vf) for x in (b.and_(bits, e.ints(-0x10000)), b.shl(bits, e.ints(16)))]

        sums = []
        for r in range(self.lanes):
            places = [(e.at(e.pointer(z), r * row), e.bytes) for z in (x, y)]
            with e.walk(vectors, *places, carried={"acc": e.floats(0)}) as walk:
                for u, v in zip(*(parts(e.load(p)) for p in walk), strict=True):
                    walk.acc = e.fma(u, v, walk.acc)
            sums.append(walk.acc)
        e.store(e.summed(e.transpose(sums)), e.pointer(dst))

    @stage
    def start_stats(self, e: Emitter, stats, lse, delta, dlse, rows) -> None:
        """lse and delta of a vector of rows. An empty row and a lane past the last have weights of 0
        (lse = inf); a row whose scores are not finite has NaN."""
        b, p = e.b, e.pointer(stats)
        inside = e.first_lanes(rows)
        x = e.load(e.pointer(lse), inside=inside)
        empty = b.or_(b.fcmp_ordered("==", x, e.floats(MINUS_INF)), b.not_(inside))
        x = b.select(b.fcmp_ordered("==", x, e.floats(INF)), e.floats(NAN), x)
        sums = e.load(e.pointer(delta))

        def less(x: list[Value]) -> list[Value]:
            return [b.fsub(x[0], e.load(e.pointer(dlse), inside=inside))]

        sums = e.where(b.icmp_signed("!=", dlse, I64(0)), [sums], less)[0]
        e.store(b.select(empty, e.floats(INF), x), p)
        e.store(b.select(empty, e.floats(0), sums), p, self.nr * 4)

    # the products
    @stage
    def product(self, e: Emitter, a, panel, dst, trips, groups) -> None:
        row = self.key.k_row_bytes
        with e.walk(groups, (a, self.mr * row), (dst, self.mr * self.nr * 4)) as (keys, tile):
            acc = self._product(e, keys, row, 4, e.pointer(panel), trips, 4)
            for i, x in enumerate(chain.from_iterable(acc)):
                e.store(x, tile, i * e.bytes)

    @stage
    def outer(self, e: Emitter, a, b, c, trips, groups, vectors) -> None:
        """Channels in groups as wide as a panel, the rest in one narrower group."""
        row, step = self.key.v_row_bytes, self._weight_row

        def columns(p: list[Value], nv: int) -> list[Value]:
            with e.walk(groups, (a, self.mr * step), (p[1], self.mr * row)) as (weights, sums):
                acc = self._product(e, weights, step, 4, p[0], trips, min(4, self.nr // 4), stride=row, nv=nv)
                for r in range(self.mr):
                    for v in range(nv):
                        at = r * row + v * e.bytes
                        e.store(e.b.fadd(acc[r][v], e.load(sums, at)), sums, at)
            return [e.at(p[0], nv * e.bytes), e.at(p[1], nv * e.bytes)]

        whole, rest = e.b.udiv(vectors, I64(self.nv)), e.b.urem(vectors, I64(self.nv))
        p = e.loop(whole, [e.pointer(b), e.pointer(c)], lambda i, p: columns(p, self.nv))
        for nv in range(1, self.nv):
            with e.b.if_then(e.b.icmp_signed("==", rest, I64(nv))):
                columns(p, nv)

    @stage
    def accumulate_grad(self, e: Emitter, k, ds, trips, dq, groups) -> None:
        with e.walk(groups, (k, self.mr * 4), (dq, self.mr * self.nr * 4)) as (keys, sums):
            acc = self._product(e, keys, 4, self.key.v_row_bytes, e.pointer(ds), trips, self.unroll_keys)
            for i, x in enumerate(chain.from_iterable(acc)):
                e.store(e.b.fadd(x, e.load(sums, i * e.bytes)), sums, i * e.bytes)

    # weights
    def _gradient(
        self, e: Emitter, s, dp, stats, scale_bits, keys, *, narrow=None, bounds=None, changed=False
    ) -> None:
        """P and dS of every key and lane, in place of S and dP, or to the addresses `narrow` as bfloat16.
        Both are 0 outside `bounds` (limits, first key), and if `changed` where the score is -inf."""
        b, row, scale = e.b, self.nr * 4, e.splat(e.float_bits(scale_bits))
        p_stats, step = e.pointer(stats), 2 if narrow else 1

        def columns(chosen: Sequence[int]) -> None:
            lse = {v: b.fneg(e.load(p_stats, v * e.bytes)) for v in chosen}
            delta = {v: e.load(p_stats, row + v * e.bytes) for v in chosen}
            if bounds:
                limits, first = e.pointer(bounds[0]), e.splat(b.trunc(bounds[1], I32))
                # A lane past the last row, whose Q is 0, has a score of NaN beside a hidden NaN in K.
                none = {v: b.fcmp_ordered("==", lse[v], e.floats(MINUS_INF)) for v in chosen}
                lo = {v: e.load(limits, v * e.bytes, e.vi) for v in chosen}
                width = {v: e.load(limits, row + v * e.bytes, e.vi) for v in chosen}

            places = [(s, step * row), (dp, step * row), *((x, row) for x in narrow or ())]
            with e.walk(b.udiv(keys, I64(step)), *places) as walk:
                p = list(walk)
                if bounds:
                    key = b.add(first, e.splat(b.mul(b.trunc(walk.index, I32), I32(step))))
                for v in chosen:
                    found = []
                    for r in range(step):
                        at = r * row + v * e.bytes
                        x = e.load(p[0], at)
                        w = self._weight(e, x, scale, lse[v])
                        g = b.fmul(w, b.fsub(e.load(p[1], at), delta[v]))
                        if bounds:
                            seen = b.icmp_unsigned("<", b.sub(b.add(key, e.ints(r)), lo[v]), width[v])
                            if changed:
                                hidden = b.fcmp_ordered("==", x, e.floats(MINUS_INF))
                                seen = b.and_(seen, b.not_(b.or_(hidden, none[v])))
                            w, g = (b.select(seen, y, e.floats(0)) for y in (w, g))
                        found.append((w, g))
                        if not narrow:
                            e.store(w, p[0], at)
                            e.store(g, p[1], at)
                    if narrow:
                        self._store_narrow(e, p[2:], v, found)

        self._side_by_side(columns)

    def _weight(self, e: Emitter, x: Value, scale: Value, lse: Value) -> Value:
        """exp(x·scale + lse), of a negated lse. The scaled score is rounded as the forward pass did: the
        weight of a row's only key is exactly 1, and a row of huge scores has finite weights."""
        distance = e.b.fadd(e.b.fmul(x, scale), lse)
        if self.key.storage != "float32":
            return e.exp2(e.b.fmul(distance, e.floats(LOG2E)), self.degree)
        return e.exp2_scaled(distance, e.floats(LOG2E), e.floats(LOG2E_REST), self.degree)

    def _store_narrow(self, e: Emitter, p: list[Value], v: int, found: list[tuple[Value, Value]]) -> None:
        """P and dS of two keys as bfloat16: rows of P, rows of dS, pairs of dS."""
        for r, pair in enumerate(found):
            for place, x in zip(p[:2], pair, strict=True):
                e.store(e.as_bf16(x), place, r * self.nr * 2 + v * e.bytes // 2)
        e.store(self._pair(e, found[0][1], found[1][1]), p[2], v * e.bytes)

    @stage
    def weights(self, e: Emitter, s, dp, p, ds, pairs, stats, scale_bits, keys) -> None:
        self._gradient(e, s, dp, stats, scale_bits, keys, narrow=(p, ds, pairs) if self.dot else None)

    @stage
    def weights_bounded(self, e: Emitter, s, dp, p, ds, pairs, stats, scale_bits, keys, limits, key) -> None:
        narrow = (p, ds, pairs) if self.dot else None
        self._gradient(e, s, dp, stats, scale_bits, keys, narrow=narrow, bounds=(limits, key))

    @stage
    def weights_changed(self, e: Emitter, s, dp, stats, scale_bits, keys, limits, key) -> None:
        """Converts weights to float32 in place, for what still changes them."""
        self._gradient(e, s, dp, stats, scale_bits, keys, bounds=(limits, key), changed=True)

    @stage
    def narrow(self, e: Emitter, s, dp, p, ds, pairs, keys) -> None:
        """Converts what `weights_changed` left to the form the products read."""
        if not self.dot:
            return
        row, pairs_of_keys = self.nr * 4, e.b.udiv(keys, I64(2))
        places = (s, 2 * row), (dp, 2 * row), (p, row), (ds, row), (pairs, row)
        with e.walk(pairs_of_keys, *places) as (weights, gradients, *narrowed):
            for v in range(self.nv):
                at = v * e.bytes, row + v * e.bytes
                self._store_narrow(e, narrowed, v, [(e.load(weights, x), e.load(gradients, x)) for x in at])

    def _each(
        self, e: Emitter, vectors: Value, places: tuple[Value, ...], body: Callable[..., Value]
    ) -> None:
        """The first place becomes `body(vector of each place)`."""
        with e.walk(vectors, *((place, e.bytes) for place in places)) as p:
            e.store(body(*map(e.load, p)), p[0])

    @stage
    def cap_factor(self, e: Emitter, s, dst, vectors, to_cap) -> None:
        scale = e.splat(e.float_bits(to_cap))

        def factor(_: Value, x: Value) -> Value:
            t = e.tanh(e.b.fmul(x, scale))
            return e.fma(e.b.fneg(t), t, e.floats(1))

        self._each(e, vectors, (dst, s), factor)

    @stage
    def scale_by(self, e: Emitter, dst, factor, vectors) -> None:
        """A gradient of 0 stays 0, whatever its score was."""
        zero = e.floats(0)

        def scaled(x: Value, f: Value) -> Value:
            return e.b.select(e.b.fcmp_ordered("==", x, zero), zero, e.b.fmul(x, f))

        self._each(e, vectors, (dst, factor), scaled)

    def _kept(self, e: Emitter, x: Value, keep: Value) -> Value:
        return e.b.bitcast(e.b.and_(e.b.bitcast(x, e.vi), e.b.bitcast(keep, e.vi)), e.vf)

    @stage
    def drop_grad(self, e: Emitter, dp, keep, vectors, scale_bits) -> None:
        scale = e.splat(e.float_bits(scale_bits))
        self._each(e, vectors, (dp, keep), lambda x, k: e.b.fmul(self._kept(e, x, k), scale))

    @stage
    def keep_only(self, e: Emitter, p, keep, vectors) -> None:
        self._each(e, vectors, (p, keep), lambda x, k: self._kept(e, x, k))

    # results
    @stage
    def add_rows(self, e: Emitter, src, dst, stride, rows, count, scale_bits) -> None:
        """float32 rows of scratch, scaled, onto float32 rows."""
        b, scale = e.b, e.splat(e.float_bits(scale_bits))
        full, rest = b.udiv(count, I64(self.lanes)), b.urem(count, I64(self.lanes))
        tail = e.first_lanes(rest)

        with e.walk(rows, (src, self.key.v_row_bytes), (dst, stride)) as row:
            with e.walk(full, *((p, e.bytes) for p in row)) as walk:
                part, sums = walk
                e.store(e.fma(e.load(part), scale, e.load(sums)), sums)
            part, sums = walk
            old = e.load(sums, inside=tail)
            e.store(e.fma(e.load(part), scale, old), sums, inside=tail)

    @stage
    def add_transposed(self, e: Emitter, panel, dst, stride, rows, count, scale_bits) -> None:
        """A vector of a panel's lanes, scaled, onto as many float32 rows; the panel becomes 0. Rounded before
        the sum, as where the rows are a partial sum."""
        b, base, scale = e.b, e.pointer(dst), e.splat(e.float_bits(scale_bits))
        p_rows = [e.at(base, b.mul(I64(r), stride)) for r in range(self.lanes)]

        squares = b.udiv(b.add(count, I64(self.lanes - 1)), I64(self.lanes))
        with e.walk(squares, (panel, self.lanes * self.nr * 4)) as walk:
            (square,) = walk
            done = b.mul(walk.index, I64(self.lanes))
            inside = e.first_lanes(b.sub(count, done))
            x = [e.load(square, j * self.nr * 4) for j in range(self.lanes)]
            for j in range(self.lanes):
                e.store(e.floats(0), square, j * self.nr * 4)
            for r, part in enumerate(e.transpose(x)):
                mask = b.and_(inside, e.splat(b.icmp_signed("<", I64(r), rows)))
                at = e.at(p_rows[r], b.mul(done, I64(4)))
                total = b.fadd(b.fmul(part, scale), e.load(at, inside=mask))
                e.store(total, at, inside=mask)

    @stage
    def add_nonfinite(self, e: Emitter, p, row, vectors, dst, keys) -> None:
        """dst[key] += p[key]·row where that row of dO is not finite and the weight is not 0."""
        b = e.b
        with e.walk(keys, (p, self._weight_row), (dst, self.key.v_row_bytes)) as (weights, sums):
            raw = e.load(weights, 0, I16 if self.dot else F32)
            weight = e.splat(e.from_bf16(raw) if self.dot else raw)
            used = b.fcmp_unordered("!=", weight, e.floats(0))
            with e.walk(vectors, (row, e.bytes), (sums, e.bytes)) as (channels, sum_at):
                value, old = e.load(channels), e.load(sum_at)
                bad = b.and_(used, e.not_finite(value))
                e.store(b.select(bad, e.fma(weight, value, old), old), sum_at)
