"""The exchange loops, forward and backward: keys of all ranks step by step, or gathered heads by heads.

    ring:        in step t rank r reads keys of rank r - t, sent while it computed step t - 1; partial
                 results of the steps are merged by their lse. Gradients of keys return to their owner.
    all_gather:  whole K and V of some heads at a time, one call per chunk of rows; gradients of keys go to
                 their owners, who add them in the order of ranks.

Both passes compute a block of rows and keys as one call of the op, whose masks are moved to where the block
stands. The backward pass asks for the keys again, and gives every block the final out and lse of its rows, so
that weights are those of the whole softmax. All sums are float32 (float64 for float64 inputs), in an order
that no timing changes. A kernel rounds a block's result to its operands' dtype: on a CPU operands of 16 bits
are widened wherever results of blocks are added up, so that this rounding happens once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyflash import torch_ops
from polyflash.arguments import int32_of
from polyflash.mask import FAR_OFFSET
from polyflash.merging import merge_into
from polyflash.parallel import places, schedule
from polyflash.parallel.coded import Rows, values_of
from polyflash.parallel.comm import Team
from polyflash.parallel.cost import GATHERED_BYTES
from polyflash.parallel.gradients import differentiate
from polyflash.parallel.handshake import KINDS, begin
from polyflash.parallel.schedule import Block, Shards, Sight, Span, Step
from polyflash.parallel.sums import MOST_PARTS, Sum, sums_of
from polyflash.results import empty_in_order_of
from polyflash.routes import saved_hooks
from polyflash.spec import Arguments

_KEPT_BLOCKS = 256


class Source(NamedTuple):
    """Keys that are there, of `heads`, and the blocks that read them."""

    k: Tensor
    v: Tensor
    blocks: tuple[Block, ...]
    heads: Span
    step: Step | None = None


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
    forms: tuple[Rows | None, Rows | None] = (None, None)  # of codes that travel
    said: dict[str, int] | None = None  # in the handshake of the forward pass; None: there was none
    mark: Any = None  # is recorded in a forward pass when K and V are there: see `Team.beside`
    known: dict[Any, Any] = field(default_factory=dict, compare=False)  # arguments of blocks

    @property
    def packed(self) -> bool:
        """Are there packed members?"""
        return self.args.cu_seqlens_q is not None

    def kept(self, q: Tensor) -> torch.dtype:
        """The dtype in which results are kept until they are whole: that of sums where any may be merged more
        than once."""
        if self.gathers:
            return q.dtype
        steps = schedule.steps(self.q, self.k, self.team.rank, self.sight)
        once = self.args.sinks is None and sum(len(step.blocks) for step in steps) <= 2
        return _widened(q).dtype if once else sums_of(q)  # type: ignore[no-any-return]

    def placed(self, block: Block, heads: slice) -> Arguments:
        """The arguments of a block: the masks as its rows, of these query heads, and its keys see them."""
        key = id(self.args), id(block), heads.start, heads.stop, self.gathers, self.first_head
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= _KEPT_BLOCKS:
                self.known.clear()
            found = self.known[key] = self._placed(block, heads), (self.args, block)  # kept, for their ids
        return found[0]  # type: ignore[no-any-return]

    def _placed(self, block: Block, heads: slice) -> Arguments:
        args = of_heads(self.args, heads)
        positional = args.alibi_slopes is not None
        own: dict[str, Any] = {"need_lse": True, "offset": None, "q_offset": None}
        own["sinks"] = args.sinks if self.gathers else None
        if block.full:
            own |= {"causal": False, "window_left": None, "window_right": None}
        else:
            positional = positional or not (args.causal is args.window_left is args.window_right is None)
        if args.cu_seqlens_q is not None:
            own |= places.packed_bounds(block, args.cu_seqlens_q.device)
        else:
            rows, seen = block.places
            own |= {name: tile(getattr(args, name), rows, seen) for name in ("mask", "bias")}
            if args.q_segments is not None and args.k_segments is not None:
                own |= {"q_segments": args.q_segments[:, rows], "k_segments": args.k_segments[:, seen]}
            if args.intervals is not None:
                own |= _lists_of(args.intervals, args.interval_rows, rows, seen)
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

    def sources(self, k: Tensor, v: Tensor, what: str, backward: bool = False) -> Iterator[Source]:
        """The keys that rows of this rank see, the next ones on their way while one is used, the first from
        now on. Own keys of a ring come first; in a backward pass last, while gradients of a step before are
        on their way."""
        own, pieces = self._gathers(k, v, what) if self.gathers else self._fetches(k, v, what)
        mark = self.mark if backward and pieces else None
        with self.team.beside(mark):
            arriving = pieces[0][0]() if pieces else None
        if self.mark is not None and not backward:
            self.mark.record()

        def follow() -> Iterator[Source]:
            nonlocal arriving
            if own is not None and not backward:
                yield own
            for i, (_, source) in enumerate(pieces):
                both = arriving()  # type: ignore[misc]
                if mark is not None and i == 0:
                    self.team.join(both)
                arriving = pieces[i + 1][0]() if i + 1 < len(pieces) else None
                x = source(both)
                del both  # else it would be kept while x is used
                yield x._replace(k=values_of(x.k, self.forms[0]), v=values_of(x.v, self.forms[1]))
                del x
            if own is not None and backward:
                yield own

        return follow()

    def _fetches(self, k: Tensor, v: Tensor, what: str) -> tuple[Source, list[Piece]]:
        """Own keys of a ring, and the steps that bring others."""
        steps, heads = schedule.steps(self.q, self.k, self.team.rank, self.sight), (0, k.shape[1])

        def start(t: int) -> Callable[[], list[Tensor]]:
            step = steps[t]
            into = [self._room(x, step.keys.rows, x.dtype) for x in (k, v)]
            sends = [(step.reader, places.lent(x, step.lent, self.packed)) for x in (k, v)]
            receives = [(step.owner, x) for x in into]
            wait = self.team.exchange(sends, receives, f"{what}, step {t}")
            return lambda: (wait(), into)[1]  # type: ignore[func-returns-value]

        def source(t: int, both: list[Tensor]) -> Source:
            own_k, own_v = (places.wire(x, self.packed) for x in both)
            return Source(own_k, own_v, steps[t].blocks, heads, steps[t])

        own = [values_of(x[:, :, steps[0].keys.slice], self.forms[i]) for i, x in enumerate((k, v))]
        pieces: list[Piece] = [(partial(start, t), partial(source, t)) for t in range(1, len(steps))]
        return Source(own[0], own[1], steps[0].blocks, heads, steps[0]), pieces

    def _room(self, like: Tensor, rows: int, kind: torch.dtype) -> Tensor:
        """Room for so many rows as they travel."""
        batch, heads, _, dim = like.shape
        shape = (batch, rows, heads, dim) if self.packed else (batch, heads, rows, dim)
        return like.new_empty(shape, dtype=kind)

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
        self, source: Source, grads: Sequence[Sum | None], totals: Sequence[Sum | None]
    ) -> Callable[[], None] | None:
        """Hands gradients of keys to their owners; call the result, if there is one, for those that other
        ranks have for the keys of this one, which it adds to the totals."""
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
        sends, into = [], [self._room(like, step.lent.rows, sums_of(like)) for _, _, like in pairs]
        for sent, _, like in pairs:
            sends.append((step.owner, self._room(like, step.keys.rows, sums_of(like))))
            sent.read(places.wire(sends[-1][1], self.packed))
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
            whole = places.wire(self._room(like, like.shape[2], sums_of(like)), True)
            sent.read(whole)
            return places.of_shards(self.k, whole, True)
        parts = places.room_for(self.k, like, sums_of(like))
        for shard, part in enumerate(parts):
            for chunk in self.k.chunks(shard):
                sent.read(part[:, :, slice(*chunk.span)], 0, int(chunk.starts[0]))
        return parts

    def head_groups(self, k: Tensor, v: Tensor) -> list[Span]:
        """Heads of k to gather at a time: as many as `GATHERED_BYTES` has room for."""
        each = k.shape[0] * self.k.rows * (k.shape[3] + v.shape[3]) * k.element_size()
        n = max(1, GATHERED_BYTES // max(1, each))
        return [(h, min(h + n, k.shape[1])) for h in range(0, k.shape[1], n)]


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out in the dtype of q, and lse, of this rank's rows."""
    group, kind, sinks = q.shape[1] // max(1, k.shape[1]), call.kept(q), call.args.sinks
    width = v.shape[3] if call.forms[1] is None else call.forms[1].width
    sources = call.sources(k, v, "ran the forward pass")
    state: tuple[Tensor, Tensor] | None = None
    begun: list[Span] = []  # rows that have results
    if sinks is not None:  # a part of its own: one logit without a value
        state = _empty(q, width, kind)
        state[1].copy_(sinks[None, :, None].expand_as(state[1]))
        begun = [(0, q.shape[2])]
    for source in sources:
        heads = slice(source.heads[0] * group, source.heads[1] * group)
        begun = [] if call.gathers else begun
        for block in source.blocks:
            rows, keys = slice(*block.q.span), slice(*block.k.span)
            of_q, of_k, of_v = q[:, heads, rows], source.k[:, :, keys], source.v[:, :, keys]
            args = call.placed(block, heads)
            again = any(start < rows.stop and rows.start < end for start, end in begun)
            begun.append(block.q.span)
            if call.gathers and not again:
                spans = [x.q.span for x in source.blocks]  # of packed members they may overlap
                whole = schedule.covers(spans[:1] if call.packed else spans, q.shape[2])
                state = state or _empty(q, width, kind, whole)
                place = state[0][:, heads, rows]
                state[1][:, heads, rows].copy_(torch_ops.call_out(of_q, of_k, of_v, place, args))
                continue
            if not call.gathers:
                of_q, of_k, of_v = map(_widened, (of_q, of_k, of_v))
            one = torch_ops.call(of_q, of_k, of_v, args)
            if state is None and one[0].dtype is kind and one[0].shape[:3] == q.shape[:3]:
                state = one
                continue
            state = state or _empty(q, width, kind)
            _join(state[0][:, heads, rows], state[1][:, heads, rows], one, again, call.gathers)
    out, lse = state or _empty(q, width, kind)
    return out.to(q.dtype), lse


def _empty(q: Tensor, width: int, kind: torch.dtype, written: bool = False) -> tuple[Tensor, Tensor]:
    """The results of rows without keys, or room for those of all rows if each will be written."""
    out, lse = empty_in_order_of(q, width, kind), q.new_empty(q.shape[:3], dtype=sums_of(q))
    return (out, lse) if written else (out.zero_(), lse.fill_(-torch.inf))


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
    call: Call, given: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """dq, dk, dv, dbias, dsinks; `given` are dout, dlse, out and lse of this rank's rows. dbias and dsinks
    are the shares of these rows: their sum over ranks is the gradient."""
    group, bias, sinks = q.shape[1] // max(1, k.shape[1]), call.args.bias, call.args.sinks
    sources = call.sources(k, v, "ran the backward pass", backward=True)
    likes = [x if need else None for x, need in zip((q, k, v), needs[:3], strict=True)]
    made = [None if x is None or not call.gathers else torch.empty_like(x) for x in likes]
    dbias = torch.zeros_like(bias, dtype=sums_of(bias)) if bias is not None and needs[3] else None
    arriving: Callable[[], None] | None = None
    most = MOST_PARTS if call.team.size == 2 else 0  # of many ranks parts would take more than their sum
    totals = [None if x is None else Sum(x, most) for x in likes]
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
                place = tile(_heads_of(dbias, heads), *block.places)
                place += parts[3]
            del parts, part, total  # sums have them, and are not kept themselves
        if call.gathers and totals[0] is not None:
            totals[0].finish()
        if arriving is not None:
            arriving = arriving()
        arriving = call.give_back(source, of_keys, totals[1:])
        del source, of_keys  # else they would be kept while the next keys come
    if arriving is not None:
        arriving()
    if not call.gathers:
        made = [None if total is None else total.whole() for total in totals]
    dbias = dbias if dbias is None else dbias.to(bias.dtype)  # type: ignore[union-attr]
    return [*made, dbias, _sink_gradient(sinks, *given) if sinks is not None and needs[4] else None]


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
    rows, keys = slice(*block.q.span), slice(*block.k.span)
    dout, dlse, out, lse = (None if x is None else x[:, heads, rows] for x in given)
    operands = [dout, q[:, heads, rows], source.k[:, :, keys], source.v[:, :, keys], out]
    dout, of_q, of_k, of_v, out = map(_widened, operands)
    args = call.placed(block, heads)._replace(sinks=None)
    return differentiate((dout, dlse, out, lse), of_q, of_k, of_v, args, (*needs[:4], False))


class Attention(torch.autograd.Function):
    """The call in the graph of autograd: one node, whose backward pass is a call of all ranks too."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        if saved_hooks(False) is None:  # else K and V of the backward pass are made anew
            call = replace(call, mark=call.team.new_mark(k))
        out, lse = forward(call, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks)
        ctx.set_materialize_grads(False)
        if not (bias is sinks is None):
            call = replace(call, args=call.args._replace(bias=None, sinks=None))
        ctx.call = call
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bias, sinks = ctx.saved_tensors
        call, needs = ctx.call, ctx.needs_input_grad[:5]
        if call.said is not None:
            asked = sum(1 << i for i, need in enumerate(needs) if need)
            begin(call.team, call.said | {"function": KINDS.index("backward"), "gradients": asked})()
        if not (bias is sinks is None):
            call = replace(call, args=call.args._replace(bias=bias, sinks=sinks))
        dout = torch.zeros_like(out) if dout is None else dout
        return (*backward(call, (dout, dlse, out, lse), q, k, v, needs), None)


def _widened(x: Any) -> Any:
    """An operand of a block whose result is one of several to be added up."""
    return x.float() if x.device.type == "cpu" and x.element_size() < 4 else x


def _heads_of(x: Tensor, heads: slice) -> Tensor:
    """A mask or a bias of some heads."""
    return x if x.ndim < 3 or x.shape[-3] == 1 else x[..., heads, :, :]


def tile(x: Any, rows: slice, keys: slice) -> Any:
    """A mask or a bias of some rows and keys, where it does not broadcast."""
    if x is not None and x.ndim and x.shape[-1] > 1:
        x = x[..., keys]
    return x[..., rows, :] if x is not None and x.ndim > 1 and x.shape[-2] > 1 else x


def _lists_of(x: Tensor, each: int, rows: slice, keys: slice) -> dict[str, Any]:
    """Interval lists of some rows and keys; where a list is of rows before these too, all become shorter."""
    few = math.gcd(each, rows.start)
    count = -(-(rows.stop - rows.start) // few)
    own = x[:, :, rows.start // each :][:, :, :count]
    if few < each:
        at = (torch.arange(count, device=x.device) * few + rows.start) // each
        own = x.index_select(2, at)
    return {"intervals": (own - keys.start).clamp(0, keys.stop - keys.start), "interval_rows": few}


def of_heads(args: Arguments, heads: slice) -> Arguments:
    """The arguments of a call of some query heads."""
    own: dict[str, Any] = {
        n: _heads_of(x, heads) for n in ("mask", "bias") if (x := getattr(args, n)) is not None
    }
    own |= {n: x[..., heads] for n in ("alibi_slopes", "sinks") if (x := getattr(args, n)) is not None}
    if args.intervals is not None and args.intervals.shape[1] > 1:
        own["intervals"] = args.intervals[:, heads]
    return args._replace(**own) if own else args


def _sink_gradient(sinks: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """-Σ exp(sink - lse)·delta over batch entries and rows, delta = Σ dout·out - dlse."""
    kind = lse.dtype
    delta = (dout.to(kind) * out.to(kind)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    weight = torch.exp(sinks.to(kind)[None, :, None] - lse)
    return -torch.where(lse == -torch.inf, 0.0, weight * delta).sum((0, 2)).to(sinks.dtype)
