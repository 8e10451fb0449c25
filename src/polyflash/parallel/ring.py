"""The exchange loops, forward and backward: keys of all ranks step by step, or gathered heads by heads.

    ring:        in step t rank r reads keys of rank r - t, sent while it computed step t - 1; partial
                 results of the steps are merged by their lse. Gradients of keys return to their owner. Two
                 ranks put the keys of both in order instead, where they can (`joins`), and merge nothing.
    all_gather:  whole K and V of some heads at a time, one call per chunk of rows; gradients of keys go to
                 their owners, who add them in the order of ranks.

Both passes compute a block of rows and keys as one call of the op, whose masks are moved to where the block
stands. The backward pass asks for the keys again, and gives every block the final out and lse of its rows, so
that weights are those of the whole softmax. All sums are float32 (float64 for float64 inputs), in an order
that no timing changes. A kernel rounds a block's result to its operands' dtype: on a CPU operands of 16 bits
are widened wherever results of blocks are added up, so that this rounding happens once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyflash import torch_ops
from polyflash.arguments import int32_of
from polyflash.mask import FAR_OFFSET
from polyflash.merging import merge_into
from polyflash.parallel import joins, places, schedule, works
from polyflash.parallel.coded import Rows, values_of
from polyflash.parallel.comm import ALIGNED, Team
from polyflash.parallel.cost import GATHERED_BYTES
from polyflash.parallel.handshake import KINDS, Agreed, begin, nothing, words_of
from polyflash.parallel.joins import Join
from polyflash.parallel.schedule import Block, Shards, Sight, Span, Step
from polyflash.parallel.sums import MOST_PARTS, Sum, sums_of
from polyflash.parallel.works import Work, attend, differentiate, empty, of_heads, tile, widened
from polyflash.routes import saved_hooks
from polyflash.spec import Arguments

NARROW = "narrow"  # of `Call.known`: has no gradient that this rank sent been more than one part of 16 bits?
_KEPT_BLOCKS = 256


class Source(NamedTuple):
    """Keys that are there, of `heads`, and the blocks that read them."""

    k: Tensor
    v: Tensor
    blocks: tuple[Block, ...]
    heads: Span
    step: Step | None = None
    join: Join | None = None  # what keys they are, if they were put in order


Piece = tuple[Callable[[], Callable[[], list[Tensor]]], Callable[[list[Tensor]], Source]]
"""Starts an exchange of K and V; what waits for it returns both as they travel; and makes them a source."""


@dataclass(frozen=True)
class Call:
    """One rank's part of a call: `args` are those of the whole of it, for the heads that this rank has.
    `base` is the position of row 0 where only the device knows it, int64 (batch or members,)."""

    team: Team
    args: Arguments
    q: Shards
    k: Shards
    sight: Sight
    base: Tensor | None = None
    first_head: int = 0  # of the query heads that this rank has, of `num_q_heads`
    num_q_heads: int = 0
    gathers: bool = False
    alone: bool = False  # is there one batch entry?
    forms: tuple[Rows | None, Rows | None] = (None, None)  # of codes that travel
    known: dict[Any, Any] = field(default_factory=dict, compare=False)  # works of blocks

    @property
    def packed(self) -> bool:
        """Are there packed members?"""
        return self.args.cu_seqlens_q is not None

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of a ring."""
        return schedule.steps(self.q, self.k, self.team.rank, self.sight)

    @cached_property
    def join(self) -> Join | None:
        """How keys of two ranks are put in order, if they are."""
        return self._join(self.team.rank)

    def _join(self, rank: int) -> Join | None:
        return None if self.gathers else joins.join(self.q, self.k, rank, self.sight, self.alone)

    @cached_property
    def meets(self) -> bool:
        """Does one of two ranks wait for the keys of the other before it computes? Then the other does so
        too: on a GPU its kernels might leave no room for its half of the exchange until they end."""
        return self.team.size == 2 and not (self._join(0) is self._join(1) is None)

    @property
    def whole(self) -> bool:
        """Do rows see all their keys in one call?"""
        return self.gathers or self.join is not None

    def kept(self, q: Tensor) -> torch.dtype:
        """The dtype in which results are kept until they are whole: that of sums where any may be merged more
        than once."""
        if self.whole:
            return q.dtype
        once = self.args.sinks is None and sum(len(step.blocks) for step in self.steps) <= 2
        return widened(q).dtype if once else sums_of(q)  # type: ignore[no-any-return]

    def work(self, block: Block, heads: slice, device: torch.device) -> Work:
        """A block as calls take it: the masks as its rows, of these query heads, and its keys see them."""
        key = id(self.args), id(block), heads.start, heads.stop, self.gathers, self.first_head
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= _KEPT_BLOCKS:
                self.known.clear()
            made = Work(slice(*block.q.span), slice(*block.k.span), self._placed(block, heads, device))
            found = self.known[key] = made, (self.args, block)  # kept, for their ids
        return found[0]  # type: ignore[no-any-return]

    def _placed(self, block: Block, heads: slice, device: torch.device) -> Arguments:
        args = of_heads(self.args, heads)
        positional = args.alibi_slopes is not None
        own: dict[str, Any] = {"need_lse": True, "offset": None, "q_offset": None}
        own["sinks"] = args.sinks if self.whole else None
        if block.full:
            own |= {"causal": False, "window_left": None, "window_right": None}
        else:
            positional = positional or not (args.causal is args.window_left is args.window_right is None)
        if self.packed or len(block.q.lens) > 1:
            own |= places.packed_bounds(block, device)
        else:
            rows, seen = block.places
            own |= {name: tile(getattr(args, name), rows, seen) for name in ("mask", "bias")}
            if args.q_segments is not None and args.k_segments is not None:
                own |= {"q_segments": args.q_segments[:, rows], "k_segments": args.k_segments[:, seen]}
            if args.intervals is not None:
                own |= works.lists_of(args.intervals, args.interval_rows, rows, seen)
        for name in ("kv_lens", "kv_starts"):
            if (x := getattr(args, name)) is not None:
                first, keys = places.keys_of(block, x.device, self.packed)
                x = places.of_entries(block, x) if self.packed else x
                own[name] = torch.minimum((x.long() - first).clamp(min=0), keys).int()
        aligned = args.kv_lens is None and places.is_aligned(block, self.sight)
        if positional and not aligned:
            own |= self._position(block)
        if args.dropout_p:
            own |= {"dropout_row": int(block.q.starts[0]), "dropout_key": int(block.k.starts[0])}
            own |= {"dropout_head": self.first_head + heads.start, "dropout_heads": self.num_q_heads}
        return args._replace(**own)

    def _position(self, block: Block) -> dict[str, Any]:
        """The place of rows of a block among its keys."""
        if self.sight.offsets is None and self.base is not None:
            base = places.of_entries(block, self.base) if self.packed else self.base
            place = base + places.apart(block, base.device, self.packed)
            return {"q_offset": int32_of("q_offset", place, False)}
        if self.args.cu_seqlens_q is not None:
            return {"q_offset": places.offsets(block, self.sight, self.args.cu_seqlens_q.device)}
        at = (self.sight.offsets or (0,))[0] + int(block.q.starts[0] - block.k.starts[0])
        return {"offset": max(-FAR_OFFSET, min(at, FAR_OFFSET))}

    def sources(
        self, k: Tensor, v: Tensor, what: str, agreed: Agreed, mark: Any, backward: bool = False
    ) -> Iterator[Source]:
        """The keys that rows of this rank see, the next ones on their way while one is used, the first from
        when the ranks have `agreed`. Own keys of a ring come first; in a backward pass of several steps last,
        while gradients of a step before are on their way. `mark`: see `Team.beside`."""
        own, pieces = self._gathers(k, v, what) if self.gathers else self._fetches(k, v, what, agreed)
        if self.gathers or not pieces:
            agreed()
        beside = mark if backward and pieces else None
        with self.team.beside(beside):
            arriving = pieces[0][0]() if pieces else None
        if mark is not None and not backward and not self.meets:
            mark.record()
        last = backward and not self.whole and any(step.keys.rows for step in self.steps[1:])

        def arrived(first: bool) -> list[Tensor]:
            both: list[Tensor] = arriving()  # type: ignore[misc]
            if beside is not None and first:
                self.team.join(both)
            return both

        def follow() -> Iterator[Source]:
            nonlocal arriving
            there: list[Tensor] | None = None
            if pieces and self.meets and k.device.type != "cpu":
                there = arrived(True)
            if own is not None and not last:
                yield own
            for i, (_, source) in enumerate(pieces):
                both = arrived(i == 0) if there is None else there
                there = None
                arriving = pieces[i + 1][0]() if i + 1 < len(pieces) else None
                x = source(both)
                del both  # else it would be kept while x is used
                yield x._replace(k=values_of(x.k, self.forms[0]), v=values_of(x.v, self.forms[1]))
                del x
            if own is not None and last:
                yield own

        return follow()

    def _fetches(self, k: Tensor, v: Tensor, what: str, agreed: Agreed) -> tuple[Source, list[Piece]]:
        """Own keys of a ring, and the steps that bring others."""
        steps, heads, join = self.steps, (0, k.shape[1]), self.join

        def start(t: int) -> Callable[[], list[Tensor]]:
            step = steps[t]
            into = self._rooms((k, v), step.keys.rows)
            sends = [(step.reader, places.lent(x, step.lent, self.packed)) for x in (k, v)]
            receives = [(step.owner, x) for x in into]
            if t == 1:
                agreed()
            wait = self.team.exchange(sends, receives, f"{what}, step {t}")
            return lambda: (wait(), into)[1]  # type: ignore[func-returns-value]

        def source(t: int, both: list[Tensor]) -> Source:
            if join is not None:
                k_all, v_all = (
                    places.joined(join.pieces, *x, self.packed) for x in ((k, both[0]), (v, both[1]))
                )
                return Source(k_all, v_all, join.blocks, heads, steps[t], join)
            own_k, own_v = (places.wire(x, self.packed) for x in both)
            return Source(own_k, own_v, steps[t].blocks, heads, steps[t])

        first = steps[0] if join is None else join.own
        own = [k, v]
        if first.blocks:
            own = [values_of(x[:, :, first.keys.slice], self.forms[i]) for i, x in enumerate(own)]
        pieces: list[Piece] = [(partial(start, t), partial(source, t)) for t in range(1, len(steps))]
        return Source(own[0], own[1], first.blocks, heads, first), pieces

    def _shape(self, like: Tensor, rows: int) -> tuple[int, ...]:
        """So many rows as they travel."""
        batch, heads, _, dim = like.shape
        return (batch, rows, heads, dim) if self.packed else (batch, heads, rows, dim)

    def _rooms(self, likes: Sequence[Tensor], rows: int, kind: torch.dtype | None = None) -> list[Tensor]:
        """Room for so many rows of each as they travel, side by side in memory where they start aligned."""
        kinds, shapes = [kind or x.dtype for x in likes], [self._shape(x, rows) for x in likes]
        sizes = [prod(shape) * each.itemsize for shape, each in zip(shapes, kinds, strict=True)]
        if any(size % ALIGNED for size in sizes):
            return [x.new_empty(s, dtype=t) for x, s, t in zip(likes, shapes, kinds, strict=True)]
        parts = likes[0].new_empty(sum(sizes), dtype=torch.uint8).split(sizes)
        return [x.view(t).view(shape) for x, t, shape in zip(parts, kinds, shapes, strict=True)]

    def _gathers(self, k: Tensor, v: Tensor, what: str) -> tuple[None, list[Piece]]:
        """Keys of all ranks, so many heads at a time."""
        found = schedule.blocks(self.q, Shards(self.k.lengths, 1), self.team.rank, 0, self.sight)
        missing = max(self.k.held(rank) for rank in range(self.team.size)) - k.shape[2]

        def start(heads: Span) -> Callable[[], list[Tensor]]:
            own = [x[:, slice(*heads)] for x in (k, v)]
            if missing:
                own = [torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in own]
            waits = [self.team.gather(places.wire(x, self.packed), what) for x in own]
            return lambda: [wait() for wait in waits]

        def source(heads: Span, both: list[Tensor]) -> Source:
            keys, values = (places.in_order(self.k, x.unbind(0), self.packed) for x in both)
            return Source(keys, values, found, heads)  # without padding

        return None, [(partial(start, x), partial(source, x)) for x in self.head_groups(k, v)]

    def give_back(
        self, source: Source, grads: Sequence[Sum | None], totals: Sequence[Sum | None], narrow: bool
    ) -> Callable[[], None] | None:
        """Hands gradients of keys to their owners; call the result, if there is one, for those that other
        ranks have for the keys of this one, which it adds to the totals. `narrow`: they travel as they are,
        else as float32 sums."""
        pairs = [
            (sent, total, like)
            for sent, total, like in zip(grads, totals, (source.k, source.v), strict=True)
            if sent is not None and total is not None
        ]
        what, step, owned = "returned gradients of keys", source.step, [total for _, total, _ in pairs]
        if step is None:
            waits = []
            for sent, _, like in pairs:
                parts = self._for_owners(sent, like)
                waits.append(self.team.swap(parts, [tuple(parts[self.team.rank].shape)] * len(parts), what))

            def added() -> None:
                for wait, total in zip(waits, owned, strict=True):
                    for part in wait():
                        total.add(places.wire(part, self.packed))
                    total.finish()

            return added
        if step.owner == self.team.rank:
            for sent, total, _ in pairs:
                sent.pour(total, source.heads[0], step.keys.first)
            return None
        if not pairs:
            return None
        self.known[NARROW] = self.known.get(NARROW, True) and all(sent.is_narrow for sent, _, _ in pairs)
        likes, kind = [like for _, _, like in pairs], source.k.dtype if narrow else sums_of(source.k)
        into, rooms = (self._rooms(likes, rows, kind) for rows in (step.lent.rows, step.keys.rows))
        spans = (joins.Piece(False, 0, 0, step.keys.rows),) if source.join is None else source.join.pieces
        for (sent, total, _), room in zip(pairs, rooms, strict=True):
            for own, at, first, rows in spans:
                if own:
                    sent.pour(total, 0, first, (at, at + rows))
                else:
                    sent.read(places.wire(room, self.packed)[:, :, first : first + rows], 0, at)
        sends = [(step.owner, x) for x in rooms]
        wait = self.team.exchange(sends, [(step.reader, x) for x in into], what)

        def arrived() -> None:
            wait()
            for x, total in zip(into, owned, strict=True):
                for part, row in places.returned(x, step.lent, self.k.held(self.team.rank), self.packed):
                    total.add(part, 0, row)

        return arrived

    def _for_owners(self, sent: Sum, like: Tensor) -> list[Tensor]:
        """A sum of all keys in their order, cut for those who hold them."""
        if self.packed:
            whole = places.wire(like.new_empty(self._shape(like, like.shape[2]), dtype=sums_of(like)), True)
            sent.read(whole)
            return places.of_shards(self.k, whole, True)
        parts = places.room_for(self.k, like, sums_of(like))
        for shard, part in enumerate(parts):
            for chunk in self.k.chunks(shard):
                sent.read(part[:, :, slice(*chunk.span)], 0, int(chunk.starts[0]))
        return parts

    def covers(self, source: Source, rows: int) -> bool:
        """Will each of so many rows have been written, from this source on, where none is written twice?"""
        blocks = source.blocks if self.join is None else (*self.join.own.blocks, *self.join.blocks)
        spans = [x.q.span for x in blocks]  # of packed members they may overlap
        return schedule.covers(spans[:1] if self.packed and self.gathers else spans, rows)

    def head_groups(self, k: Tensor, v: Tensor) -> list[Span]:
        """Heads of k to gather at a time: as many as `GATHERED_BYTES` has room for."""
        each = k.shape[0] * self.k.rows * (k.shape[3] + v.shape[3]) * k.element_size()
        n = max(1, GATHERED_BYTES // max(1, each))
        return [(h, min(h + n, k.shape[1])) for h in range(0, k.shape[1], n)]


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, agreed: Agreed, mark: Any) -> tuple[Tensor, Tensor]:
    """out in the dtype of q, and lse, of this rank's rows."""
    group, kind, sinks = q.shape[1] // max(1, k.shape[1]), call.kept(q), call.args.sinks
    width = v.shape[3] if call.forms[1] is None else call.forms[1].width
    sources = call.sources(k, v, "ran the forward pass", agreed, mark)
    state: tuple[Tensor, Tensor] | None = None
    begun: list[Span] = []  # rows that have results
    if sinks is not None:  # a part of its own: one logit without a value
        state = empty(q, width, kind)
        state[1].copy_(sinks[None, :, None].expand_as(state[1]))
        begun = [] if call.whole else [(0, q.shape[2])]
    for source in sources:
        heads = slice(source.heads[0] * group, source.heads[1] * group)
        begun = [] if call.gathers else begun
        for block in source.blocks:
            work = call.work(block, heads, q.device)
            rows, keys = work.rows, work.keys
            of_q, of_k, of_v = q[:, heads, rows], source.k[:, :, keys], source.v[:, :, keys]
            again = any(start < rows.stop and rows.start < end for start, end in begun)
            begun.append(block.q.span)
            alone = state is None and of_q.shape == q.shape
            if call.whole and not (again or alone):
                state = state or empty(q, width, kind, call.covers(source, q.shape[2]))
                place = state[0][:, heads, rows]
                state[1][:, heads, rows].copy_(torch_ops.call_out(of_q, of_k, of_v, place, work.args))
                continue
            if not call.whole:
                of_q, of_k, of_v = map(widened, (of_q, of_k, of_v))
            one = attend(work, of_q, of_k, of_v)
            if alone and one[0].dtype is kind:
                state = one
                continue
            state = state or empty(q, width, kind)
            _join(state[0][:, heads, rows], state[1][:, heads, rows], one, again, call.gathers)
    if mark is not None and call.meets:
        mark.record()
    out, lse = state or empty(q, width, kind)
    return out.to(q.dtype), lse


def _join(out: Tensor, lse: Tensor, one: tuple[Tensor, Tensor], again: bool, apart: bool) -> None:
    """Takes the results of a block into those of its rows; `apart`: no row has keys in two of them."""
    if not again:
        out.copy_(one[0])
        lse.copy_(one[1])
    elif apart:
        out += one[0]
        lse.copy_(torch.maximum(lse, one[1]))
    else:
        merge_into(out, lse, *one)


def backward(
    call: Call,
    given: tuple[Any, ...],
    qkv: Sequence[Tensor],
    needs: tuple[bool, ...],
    agreed: Agreed,
    mark: Any,
) -> list[Tensor | None]:
    """dq, dk, dv, dbias, dsinks; `given` are dout, dlse, out and lse of this rank's rows. dbias and dsinks
    are the shares of these rows: their sum over ranks is the gradient."""
    q, k, v = qkv
    group, bias, sinks = q.shape[1] // max(1, k.shape[1]), call.args.bias, call.args.sinks
    likes = [x if need else None for x, need in zip((q, k, v), needs[:3], strict=True)]
    made = [None if x is None or not call.gathers else torch.empty_like(x) for x in likes]
    dbias = torch.zeros_like(bias, dtype=sums_of(bias)) if bias is not None and needs[3] else None
    arriving: Callable[[], None] | None = None
    most = MOST_PARTS if call.team.size == 2 else 0  # of many ranks parts would take more than their sum
    totals = [None if x is None else Sum(x, most) for x in likes]
    told: list[Any] = []  # what the ranks have agreed on
    sources = call.sources(k, v, "ran the backward pass", lambda: told.append(agreed()), mark, backward=True)
    for source in sources:
        heads = slice(source.heads[0] * group, source.heads[1] * group)
        if call.gathers:  # these heads are done with this source
            own = zip(made, (heads, slice(*source.heads), slice(*source.heads)), strict=True)
            totals = [None if x is None else Sum(x[:, of]) for x, of in own]
        of_keys = [Sum(x) if need else None for x, need in zip((source.k, source.v), needs[1:3], strict=True)]
        for block in source.blocks:
            parts = _of_block(call, block, heads, source, given, q, needs)
            first_head = 0 if call.gathers else heads.start
            if totals[0] is not None:
                totals[0].add(parts[0], first_head, block.q.span[0])
            for total, part in zip(of_keys, parts[1:3], strict=True):
                if total is not None:
                    total.add(part, 0, block.k.span[0])
            if dbias is not None:
                place = tile(works.heads_of(dbias, heads), *block.places)
                place += parts[3]
            del parts, part, total  # sums have them, and are not kept themselves
        if call.gathers and totals[0] is not None:
            totals[0].finish()
        if arriving is not None:
            arriving = arriving()
        narrow = bool(told and told[0]) and all(told[0][0])
        arriving = call.give_back(source, of_keys, totals[1:], narrow)
        del source, of_keys  # else they would be kept while the next keys come
    if arriving is not None:
        arriving()
    if not call.gathers:
        made = [None if total is None else total.whole() for total in totals]
    dbias = dbias if dbias is None else dbias.to(bias.dtype)  # type: ignore[union-attr]
    return [*made, dbias, works.sink_gradient(sinks, *given) if sinks is not None and needs[4] else None]


def _of_block(
    call: Call,
    block: Block,
    heads: slice,
    source: Source,
    given: tuple[Any, ...],
    q: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Any, ...]:
    """Gradients of one block, of which q has the rows and `source` the keys."""
    work = call.work(block, heads, q.device)
    dout, dlse, out, lse = (None if x is None else x[:, heads, work.rows] for x in given)
    operands = [dout, q[:, heads, work.rows], source.k[:, :, work.keys], source.v[:, :, work.keys], out]
    dout, of_q, of_k, of_v, out = map(widened, operands)
    return differentiate(work, (dout, dlse, out, lse), of_q, of_k, of_v, (*needs[:4], False))


class Attention(torch.autograd.Function):
    """The call in the graph of autograd: one node, whose backward pass is a call of all ranks too."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        call: Call,
        agreed: Agreed,
        number: int,
    ) -> tuple[Tensor, Tensor]:
        """`number` is that of the call, said in its handshake; 0: there was none."""
        # With hooks, K and V of the backward pass are made anew.
        mark = call.team.new_mark(k) if saved_hooks(False) is None else None
        out, lse = forward(call, q, k, v, agreed, mark)
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks)
        ctx.set_materialize_grads(False)
        if not (bias is sinks is None):
            call = replace(call, args=call.args._replace(bias=None, sinks=None))
        ctx.how = call, number, mark
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bias, sinks = ctx.saved_tensors
        (call, number, mark), needs = ctx.how, ctx.needs_input_grad[:5]
        agreed: Agreed = nothing
        if number:
            asked = sum(1 << i for i, need in enumerate(needs) if need)
            said = {"function": KINDS.index("backward"), "number of the call": number, "gradients": asked}
            said["rows of q"] = int(call.known.get(NARROW, False))
            agreed = begin(call.team, words_of(said))
        if not (bias is sinks is None):
            call = replace(call, args=call.args._replace(bias=bias, sinks=sinks))
        dout = torch.zeros_like(out) if dout is None else dout
        return (*backward(call, (dout, dlse, out, lse), (q, k, v), needs, agreed, mark), None, None, None)
