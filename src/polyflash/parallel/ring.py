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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyflash import torch_ops
from polyflash.arguments import int32_of
from polyflash.mask import FAR_OFFSET
from polyflash.merging import merge_into
from polyflash.parallel import places, schedule
from polyflash.parallel.comm import Team
from polyflash.parallel.cost import GATHERED_BYTES
from polyflash.parallel.handshake import KINDS, agree
from polyflash.parallel.schedule import Block, Shards, Sight, Span, Step
from polyflash.spec import Arguments

_backward_op = torch.ops.polyflash.attention_backward.default


class Source(NamedTuple):
    """Keys that are there: of `heads`, from key `first` of their shard on, and the blocks that read them."""

    k: Tensor
    v: Tensor
    first: int
    blocks: tuple[Block, ...]
    heads: Span
    step: Step | None = None

    def within(self, block: Block) -> slice:
        """The keys of a block."""
        start, end = block.k.span
        return slice(start - self.first, end - self.first)

    def zeros(self, needs: tuple[bool, ...]) -> list[Tensor | None]:
        """Room for sums of gradients."""
        return [_zeros(self.k, needs[1]), _zeros(self.v, needs[2])]


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
    said: dict[str, int] | None = None  # in the handshake of the forward pass; None: there was none

    def placed(self, block: Block, heads: slice) -> Arguments:
        """The arguments of a block: the masks as its rows, of these query heads, and its keys see them."""
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
        for name in ("kv_lens", "kv_starts"):
            if (x := getattr(args, name)) is not None:
                first, keys = places.keys_of(block, x.device)
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
            place = self.base + places.apart(block, self.base.device)
            return {"q_offset": int32_of("q_offset", place, False)}
        if self.args.cu_seqlens_q is not None:
            return {"q_offset": places.offsets(block, self.sight, self.args.cu_seqlens_q.device)}
        at = (self.sight.offsets or (0,))[0] + int(block.q.starts[0] - block.k.starts[0])
        return {"offset": max(-FAR_OFFSET, min(at, FAR_OFFSET))}

    def sources(self, k: Tensor, v: Tensor, what: str, backward: bool = False) -> Iterator[Source]:
        """The keys that rows of this rank see, the next ones on their way while one is used."""
        return self._gathered(k, v, what) if self.gathers else self._stepwise(k, v, what, backward)

    def _stepwise(self, k: Tensor, v: Tensor, what: str, backward: bool) -> Iterator[Source]:
        """The keys of this rank first; in a backward pass those of half its heads last, while gradients of
        the step before are on their way."""
        steps, heads = schedule.steps(self.q, self.k, self.team.rank, self.sight), (0, k.shape[1])
        first = heads if not backward or len(steps) == 1 else (0, k.shape[1] // 2)
        arrived = None
        for t, step in enumerate(steps):
            own: list[Tensor] = arrived() if arrived is not None else []
            if t + 1 < len(steps):
                arrived = self._fetch(k, v, steps[t + 1], f"{what}, step {t + 1}")
            if own:
                yield Source(own[0], own[1], step.keys[0], step.blocks, heads, step)
            elif first[1]:
                yield self._own(k, v, step, first)
        if first[1] < heads[1]:
            yield self._own(k, v, steps[0], (first[1], heads[1]))

    def _own(self, k: Tensor, v: Tensor, step: Step, heads: Span) -> Source:
        """Keys that this rank holds."""
        k, v = (x[:, slice(*heads), slice(*step.keys)] for x in (k, v))
        return Source(k, v, step.keys[0], step.blocks, heads, step)

    def _fetch(self, k: Tensor, v: Tensor, step: Step, what: str) -> Callable[[], list[Tensor]]:
        """Starts the exchange of a step."""
        lent, (lo, hi) = slice(*step.lent), step.keys
        into = [x.new_empty((*x.shape[:2], hi - lo, x.shape[3])) for x in (k, v)]
        sends = [(step.reader, x[:, :, lent]) for x in (k, v)]
        wait = self.team.exchange(sends, [(step.owner, x) for x in into], what)

        def arrived() -> list[Tensor]:
            wait()
            return into

        return arrived

    def _gathered(self, k: Tensor, v: Tensor, what: str) -> Iterator[Source]:
        found = schedule.blocks(self.q, Shards(self.k.lengths, 1), self.team.rank, 0, self.sight)
        missing = max(self.k.held(rank) for rank in range(self.team.size)) - k.shape[2]
        groups = self.head_groups(k, v)

        def start(heads: Span) -> list[Callable[[], Tensor]]:
            room = [x[:, slice(*heads)] for x in (k, v)]
            if missing:
                room = [torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in room]
            return [self.team.gather(x, what) for x in room]

        arriving = start(groups[0])
        for i, heads in enumerate(groups):
            both = [places.in_order(self.k, list(wait())) for wait in arriving]  # padding ends here
            if i + 1 < len(groups):
                arriving = start(groups[i + 1])
            yield Source(both[0], both[1], 0, found, heads)

    def give_back(
        self, source: Source, grads: Sequence[Tensor | None], totals: Sequence[Tensor | None]
    ) -> Callable[[], None] | None:
        """Adds gradients of keys to the totals of their owners; call the result, if there is one, for those
        that other ranks have for the keys of this one."""
        pairs = [
            (x, total) for x, total in zip(grads, totals, strict=True) if x is not None and total is not None
        ]
        what, step = "returned gradients of keys", source.step
        if step is None:
            ranks, heads, waits = range(self.team.size), slice(*source.heads), []
            for x, total in pairs:
                parts, shape = (
                    [places.of_shard(self.k, x.to(total.dtype), rank) for rank in ranks],
                    total[:, heads].shape,
                )
                waits.append(self.team.swap(parts, [shape] * len(ranks), what))

            def added() -> None:
                for wait, (_, total) in zip(waits, pairs, strict=True):
                    place = total[:, heads]
                    for part in wait():
                        place += part

            return added
        if step.owner == self.team.rank:
            for x, total in pairs:
                total[:, slice(*source.heads), slice(*step.keys)] += x
            return None
        lent = slice(*step.lent)
        into = [torch.empty_like(x[:, :, lent], memory_format=torch.contiguous_format) for _, x in pairs]
        sends = [(step.owner, x.to(total.dtype)) for x, total in pairs]
        receives = [(step.reader, x) for x in into]
        wait = self.team.exchange(sends, receives, what)

        def arrived() -> None:
            wait()
            for x, (_, total) in zip(into, pairs, strict=True):
                total[:, :, lent] += x

        return arrived

    def head_groups(self, k: Tensor, v: Tensor) -> list[Span]:
        """Heads of k to gather at a time: as many as `GATHERED_BYTES` has room for."""
        each = k.shape[0] * self.k.rows * (k.shape[3] + v.shape[3]) * k.element_size()
        n = max(1, GATHERED_BYTES // max(1, each))
        return [(h, min(h + n, k.shape[1])) for h in range(0, k.shape[1], n)]


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out in the dtype of q, and lse, of this rank's rows."""
    group, sums, sinks = q.shape[1] // max(1, k.shape[1]), sums_of(q), call.args.sinks
    sources = call.sources(k, v, "ran the forward pass")
    first = next(sources)  # the next keys are on their way before a kernel fills the device
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype if call.gathers else sums)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=sums)
    begun: list[Span] = []  # rows that have results
    if sinks is not None:  # a part of its own: one logit without a value
        lse.copy_(sinks[None, :, None].expand_as(lse))
        begun = [(0, q.shape[2])]
    for source in chain((first,), sources):
        heads = slice(source.heads[0] * group, source.heads[1] * group)
        for block in source.blocks:
            rows, keys = slice(*block.q.span), source.within(block)
            of_q, of_k, of_v = q[:, heads, rows], source.k[:, :, keys], source.v[:, :, keys]
            args, place = call.placed(block, heads), (out[:, heads, rows], lse[:, heads, rows])
            if call.gathers:  # each row is in one block
                place[1].copy_(torch_ops.call_out(of_q, of_k, of_v, place[0], args))
                continue
            one = torch_ops.call(_widened(of_q), _widened(of_k), _widened(of_v), args)
            if any(start < rows.stop and rows.start < end for start, end in begun):
                merge_into(*place, *one)
            else:
                for x, result in zip(place, one, strict=True):
                    x.copy_(result)
            begun.append(block.q.span)
    return out.to(q.dtype), lse


def backward(
    call: Call, given: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """dq, dk, dv, dbias, dsinks; `given` are dout, dlse, out and lse of this rank's rows. dbias and dsinks
    are the shares of these rows: their sum over ranks is the gradient."""
    group, bias = q.shape[1] // max(1, k.shape[1]), call.args.bias
    sources = call.sources(k, v, "ran the backward pass", backward=True)
    first = next(sources)  # as in the forward pass
    totals = [_zeros(q, needs[0]), _zeros(k, needs[1]), _zeros(v, needs[2]), _zeros(bias, needs[3])]
    asked = (*needs[:4], False)
    arriving: Callable[[], None] | None = None
    for source in chain((first,), sources):
        heads = slice(source.heads[0] * group, source.heads[1] * group)
        all_keys = source.first, source.first + source.k.shape[2]
        alone = [block.k.span for block in source.blocks] == [all_keys]  # its gradients are the sums
        sums = [None, None] if alone else source.zeros(needs)
        for block in source.blocks:
            rows, keys = slice(*block.q.span), source.within(block)
            dout, dlse, out, lse = (None if x is None else x[:, heads, rows] for x in given)
            operands = [dout, q[:, heads, rows], source.k[:, :, keys], source.v[:, :, keys], out]
            dout, of_q, of_k, of_v, out = map(_widened, operands)
            args = call.placed(block, heads)._replace(sinks=None)
            args = args._replace(wide_gradients=torch_ops.has_wide_gradients(of_q, of_k, of_v, args))
            parts = _backward_op(dout, dlse, of_q, of_k, of_v, out, lse, asked, *args)
            into = [_at(totals[0], heads, rows), *(_at(x, keys) for x in sums)]
            if (total := totals[3]) is not None:
                into.append(tile(_heads_of(total, heads), *block.places))
            for place, part in zip(into, parts, strict=False):
                if place is not None:
                    place += part
            if alone:
                sums = [x if need else None for x, need in zip(parts[1:3], needs[1:3], strict=True)]
        if arriving is not None:
            arriving()
        arriving = call.give_back(source, sums, totals[1:3])
    if arriving is not None:
        arriving()
    likes = (q, k, v, bias)
    results = [
        x if x is None or like is None else x.to(like.dtype) for x, like in zip(totals, likes, strict=True)
    ]
    sinks = call.args.sinks
    return [*results, _sink_gradient(sinks, *given) if sinks is not None and needs[4] else None]


class Attention(torch.autograd.Function):
    """The call in the graph of autograd: one node, whose backward pass is a call of all ranks too."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(call, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks)
        ctx.set_materialize_grads(False)
        ctx.call = replace(call, args=call.args._replace(bias=None, sinks=None))
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bias, sinks = ctx.saved_tensors
        call, needs = ctx.call, ctx.needs_input_grad[:5]
        if call.said is not None:
            asked = sum(1 << i for i, need in enumerate(needs) if need)
            agree(call.team, call.said | {"function": KINDS.index("backward"), "gradients": asked})
        call = replace(call, args=call.args._replace(bias=bias, sinks=sinks))
        dout = torch.zeros_like(out) if dout is None else dout
        return (*backward(call, (dout, dlse, out, lse), q, k, v, needs), None)


def sums_of(q: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _widened(x: Any) -> Any:
    """An operand of a block whose result is one of several to be added up."""
    return x.float() if x.device.type == "cpu" and x.element_size() < 4 else x


def _zeros(like: Tensor | None, need: bool) -> Tensor | None:
    """Room for a sum."""
    if like is None or not need:
        return None
    return torch.zeros_like(like, dtype=sums_of(like), memory_format=torch.contiguous_format)


def _at(x: Tensor | None, *where: slice) -> Tensor | None:
    """Rows of a sum, of all heads or of some."""
    return x if x is None else x[:, where[0], where[1]] if len(where) == 2 else x[:, :, where[0]]


def _heads_of(x: Tensor, heads: slice) -> Tensor:
    """A mask or a bias of some heads."""
    return x if x.ndim < 3 or x.shape[-3] == 1 else x[..., heads, :, :]


def tile(x: Any, rows: slice, keys: slice) -> Any:
    """A mask or a bias of some rows and keys, where it does not broadcast."""
    if x is not None and x.ndim and x.shape[-1] > 1:
        x = x[..., keys]
    return x[..., rows, :] if x is not None and x.ndim > 1 and x.shape[-2] > 1 else x


def of_heads(args: Arguments, heads: slice) -> Arguments:
    """The arguments of a call of some query heads."""
    own: dict[str, Any] = {
        n: _heads_of(x, heads) for n in ("mask", "bias") if (x := getattr(args, n)) is not None
    }
    own |= {n: x[..., heads] for n in ("alibi_slopes", "sinks") if (x := getattr(args, n)) is not None}
    return args._replace(**own) if own else args


def _sink_gradient(sinks: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """-Σ exp(sink - lse)·delta over batch entries and rows, delta = Σ dout·out - dlse."""
    kind = lse.dtype
    delta = (dout.to(kind) * out.to(kind)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    weight = torch.exp(sinks.to(kind)[None, :, None] - lse)
    return -torch.where(lse == -torch.inf, 0.0, weight * delta).sum((0, 2)).to(sinks.dtype)
