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

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyflash import torch_ops
from polyflash.merging import merge_into
from polyflash.parallel import works
from polyflash.parallel.exchange import NARROW, Call, Source
from polyflash.parallel.handshake import KINDS, Agreed, begin, nothing, words_of
from polyflash.parallel.schedule import Block, Span
from polyflash.parallel.sums import MOST_PARTS, Sum, sums_of
from polyflash.parallel.works import attend, differentiate, empty, tile, widened
from polyflash.routes import saved_hooks


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, agreed: Agreed, mark: Any, kept: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """out in the dtype of q, and lse, of this rank's rows. `kept` gets joined keys that stay."""
    group, kind, sinks = q.shape[1] // max(1, k.shape[1]), call.kept(q), call.args.sinks
    width = v.shape[3] if call.forms[1] is None else call.forms[1].width
    keeps = call.keeps(q, k)
    sources = call.sources(k, v, "ran the forward pass", agreed, mark)
    state: tuple[Tensor, Tensor] | None = None
    begun: list[Span] = []  # rows that have results
    if sinks is not None:  # a part of its own: one logit without a value
        state = empty(q, width, kind)
        state[1].copy_(sinks[None, :, None].expand_as(state[1]))
        begun = [] if call.whole else [(0, q.shape[2])]
    for source in sources:
        if keeps and source.join is not None:
            kept += source.k, source.v
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
    there, held = call.keeps(q, k), call.k.held(call.team.rank)
    held_ones = [x.new_empty(()).expand(*x.shape[:2], held, x.shape[3]) if there else x for x in (k, v)]
    inputs = zip((q, *held_ones), needs[:3], strict=True)
    likes = [x if need else None for x, need in inputs]
    made = [None if x is None or not call.gathers else torch.empty_like(x) for x in likes]
    dbias = torch.zeros_like(bias, dtype=sums_of(bias)) if bias is not None and needs[3] else None
    arriving: Callable[[], None] | None = None
    most = MOST_PARTS if call.team.size == 2 else 0  # of many ranks parts would take more than their sum
    totals = [None if x is None else Sum(x, most) for x in likes]
    told: list[Any] = []  # what the ranks have agreed on
    sources = call.sources(k, v, "ran the backward pass", lambda: told.append(agreed()), mark, there)
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
        if not told and (source.step is None or source.step.owner != call.team.rank):
            told.append(agreed())  # before the first message
        narrow = bool(told and told[0]) and all(told[0][2])
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
        kept: list[Tensor] = []
        out, lse = forward(call, q, k, v, agreed, mark, kept)
        ctx.save_for_backward(q, *(kept or (k, v)), out, lse, bias, sinks)
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
            said["parts of 16 bits"] = int(call.known.get(NARROW, False))  # each rank its own
            agreed = begin(call.team, words_of(said))
        if not (bias is sinks is None):
            call = replace(call, args=call.args._replace(bias=bias, sinks=sinks))
        dout = torch.zeros_like(out) if dout is None else dout
        return (*backward(call, (dout, dlse, out, lse), (q, k, v), needs, agreed, mark), None, None, None)
