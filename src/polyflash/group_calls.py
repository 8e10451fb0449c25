"""The calls behind `attention_groups`, one walk over the keys or one per group, and the gradients of both.

Gradients are made group by group from the results, whichever walk these are of: those of a group's own rows
and bias as one call makes them, those of k, v and sinks as float32 sums, which are added in the order of the
groups and rounded once. Every sum has one owner, so bits repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from polyflash import torch_ops
from polyflash.entry import Bound
from polyflash.operands import DIFFERENTIABLE
from polyflash.routes import any_requires_grad
from polyflash.spec import Arguments

# Tensors that a group has for itself, beside its rows. A group that has one walks the keys alone.
OWN = ("kv_lens", "kv_starts", "mask", "bias", "alibi_slopes", "q_segments", "k_segments", "intervals")
SEPARATE, ROWS, REQUESTS = "", "rows", "requests"  # how groups are run
_SLOTS = 1 + len(OWN)
_N_FIRST = 4  # inputs of `_Groups` before k, v and sinks

Results = Sequence[tuple[Tensor, Tensor]]
_backward_op = torch.ops.polyflash.attention_backward.default


def one_walk(calls: Sequence[Bound]) -> Bound:
    """All groups as the rows of one call, each row with bounds of its own."""
    end = max(call.k.shape[2] for call in calls)
    k, v = next((call.k, call.v) for call in calls if call.k.shape[2] == end)
    free: dict[str, Any] = {"causal": False, "window_left": None, "window_right": None, "offset": None}
    args = calls[0].args._replace(**free, row_bounds=_row_bounds(calls))
    return Bound(torch.cat([call.q for call in calls], 2), k, v, None, args)


def are_alike(calls: Sequence[Bound]) -> bool:
    """Could groups be the requests of one batch: do they differ in their places alone, which 32 bits hold,
    and are no batches?"""
    first, shape = calls[0].args._replace(offset=None), calls[0].q.shape
    same = all(x.args._replace(offset=None) == first and x.q.shape == shape for x in calls[1:])
    return same and shape[0] == 1 and all(abs(x.args.offset or 0) < 1 << 31 for x in calls)


def as_requests(calls: Sequence[Bound]) -> Bound:
    """Groups that are alike as the entries of one batch, whose keys are one memory again and again."""
    ends = [call.k.shape[2] for call in calls]
    widest = calls[ends.index(max(ends))]
    k, v = (x.expand(len(calls), -1, -1, -1) for x in (widest.k, widest.v))
    args = calls[0].args._replace(offset=None, kv_lens=_of_each(ends, k))
    if calls[0].args.offset is not None:
        args = args._replace(q_offset=_of_each([call.args.offset or 0 for call in calls], k))
    return Bound(torch.cat([call.q for call in calls]), k, v, None, args)


def _of_each(numbers: Sequence[int], like: Tensor) -> Tensor:
    """int32 numbers where `like` is, filled in there: a copy from the host could not be captured."""
    return torch.cat([torch.full((1,), n, dtype=torch.int32, device=like.device) for n in numbers])


def _row_bounds(calls: Sequence[Bound]) -> Tensor:
    """Keys [lo, hi) that each row of all groups sees, int32 (rows, 2)."""
    bounds = []
    for q, k, _, _, args, _ in calls:
        end, left, right = k.shape[2], args.window_left, 0 if args.causal else args.window_right
        at = torch.arange(q.shape[2], device=q.device) + (args.offset or 0)
        lo = torch.zeros_like(at) if left is None else (at - left).clamp(min=0, max=end)
        hi = torch.full_like(at, end) if right is None else (at + right + 1).clamp(min=0, max=end)
        bounds.append(torch.stack((lo, hi), 1))
    return torch.cat(bounds).to(torch.int32)


def attend_groups(calls: list[Bound], k: Tensor, v: Tensor, how: str) -> Results:
    """out and lse of each call; their k and v are the first keys of these. `how`: see `joined`."""
    if not calls:
        return []
    if torch.is_grad_enabled() and any(any_requires_grad(x.q, x.k, x.v, x.args) for x in calls):
        calls = [_with_gradients(call) for call in calls]
        without: dict[str, Any] = dict.fromkeys((*OWN, "sinks"))
        statics = tuple(call.args._replace(**without) for call in calls)
        slots = [x for call in calls for x in (call.q, *(getattr(call.args, name) for name in OWN))]
        ends = tuple(call.k.shape[2] for call in calls)
        made = _Groups.apply(how, statics, ends, len(calls), k, v, calls[0].args.sinks, *slots)
    else:
        made = _run(calls, how)
    return list(_by_group(made, [call.q.shape[2] for call in calls]))


def _with_gradients(call: Bound) -> Bound:
    """A call as its gradients need it. Its refusals come before anything runs."""
    q, k, v, _, args, _ = call
    args = torch_ops.as_asked(args)._replace(need_lse=True)
    if not torch.compiler.is_compiling():
        torch_ops.refuse_gradients(q, k, v, args._replace(wide_gradients=True))
    return call._replace(args=args)


def joined(calls: Sequence[Bound], how: str) -> list[Bound]:
    """The calls as they are run: SEPARATE; or one, all groups being its ROWS, or its REQUESTS."""
    if how == SEPARATE:
        return [*calls]
    return [one_walk(calls) if how == ROWS else as_requests(calls)]


def _run(calls: Sequence[Bound], how: str) -> tuple[Tensor, ...]:
    """out and lse of all groups together, or of each, one after the other."""
    made: list[Tensor] = []
    for q, k, v, _, args, _ in joined(calls, how):
        made.extend(torch_ops.call(q, k, v, args))
    if how == REQUESTS:
        out, lse = made
        lses = lse.split(1) if lse.ndim == 3 else [lse] * len(calls)
        made = [x for both in zip(out.split(1), lses, strict=True) for x in both]
    return tuple(made)


def _by_group(made: Sequence[Any], rows: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """out and lse of each group (or their gradients, or None) from what `_run` gives."""
    if len(made) == 2 * len(rows):
        yield from zip(made[::2], made[1::2], strict=True)
        return
    of = [[x] * len(rows) if x is None or x.ndim < 3 else x.split(rows, 2) for x in made]
    yield from zip(*of, strict=True)


def _calls(statics: Sequence[Arguments], ends: Sequence[int], given: Sequence[Any]) -> list[Bound]:
    """The calls again, from k, v, sinks, and the slots of each."""
    k, v, sinks, *slots = given
    calls = []
    for i, (args, end) in enumerate(zip(statics, ends, strict=True)):
        q, *own = slots[i * _SLOTS : (i + 1) * _SLOTS]
        args = args._replace(sinks=sinks, **dict(zip(OWN, own, strict=True)))
        calls.append(Bound(q, k[:, :, :end], v[:, :, :end], None, args))
    return calls


class _Groups(torch.autograd.Function):
    """The node of all groups. Inputs: how they are run, the arguments of each without tensors, its keys and
    their number, then k, v, sinks, and per group its rows and the tensors named in `OWN`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(how: str, statics: Any, ends: Any, _: int, *given: Any) -> tuple[Tensor, ...]:
        return _run(_calls(statics, ends, given), how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.statics, ctx.ends, ctx.count, *given = inputs
        ctx.n_given = len(given)
        ctx.save_for_backward(*given, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[_N_FIRST:]
        given, made = saved[: ctx.n_given], saved[ctx.n_given :]
        calls = _calls(ctx.statics, ctx.ends, given)
        rows = [call.q.shape[2] for call in calls]
        found: list[Tensor | None] = [None] * ctx.n_given
        pairs = zip(_by_group(made, rows), _by_group(gradients, rows), strict=True)
        for i, (call, (results, of_results)) in enumerate(zip(calls, pairs, strict=True)):
            if all(x is None for x in of_results):
                continue
            places = 3 + i * _SLOTS, 0, 1, *(_place(name, i) for name in DIFFERENTIABLE)
            needs = [needed[place] for place in places]
            for place, need, x in zip(
                places, needs, _differentiate(call, results, of_results, needs), strict=True
            ):
                if need:
                    like = given[place]
                    found[place] = x.to(like.dtype) if place > 2 else _added(found[place], x, like)
        for place in range(3):
            total = found[place]
            found[place] = None if total is None else total.to(given[place].dtype)
        return (*(None,) * _N_FIRST, *found)


def _place(name: str, i: int) -> int:
    """The place of an operand of group i among the tensors of `_Groups`."""
    return 2 if name == "sinks" else 3 + i * _SLOTS + 1 + OWN.index(name)


def _differentiate(
    call: Bound, results: tuple[Any, Any], of_results: tuple[Any, Any], needs: list[bool]
) -> tuple[Tensor, ...]:
    """The gradients of one group; those of k, v and sinks as the sums they are."""
    (out, lse), (dout, dlse), args = results, of_results, call.args._replace(wide_gradients=True)
    dout = torch.zeros_like(out) if dout is None else dout
    made: tuple[Tensor, ...] = _backward_op(dout, dlse, call.q, call.k, call.v, out, lse, needs, *args)
    return made


def _added(total: Tensor | None, x: Tensor, like: Tensor) -> Tensor:
    """The sum so far, of sinks or of all keys, and one of sinks or of the first keys."""
    missing = like.shape[2] - x.shape[2] if like.ndim == 4 else 0
    if total is None:
        return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    if not torch.compiler.is_compiling() and peek_interpreter_stack() is not None:  # may be mapped, one alone
        return total + torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else total + x
    place = total[:, :, : x.shape[2]] if missing else total
    place += x
    return total
