"""One block of rows and keys as calls of the op: its arguments, and both passes, entered the cheapest way the
moment allows. What was chosen for a block is kept with it: all layers of a model make the same calls."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyflash import torch_ops, validate
from polyflash.parallel.sums import sums_of
from polyflash.plan import Launch
from polyflash.results import empty_in_order_of, outputs
from polyflash.routes import is_plain
from polyflash.spec import Arguments, Feature, Phase
from polyflash.storages import stored

_backward_op = torch.ops.polyflash.attention_backward.default


class Work:
    """A block as a call takes it: slices of rows and of keys, arguments, launches of earlier calls."""

    __slots__ = ("args", "backward", "forward", "keys", "rows")

    def __init__(self, rows: slice, keys: slice, args: Arguments) -> None:
        self.rows, self.keys, self.args = rows, keys, args
        self.forward: Launch | None = None
        self.backward: tuple[Launch, Arguments] | None = None


def attend(work: Work, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse."""
    if work.forward is not None and torch_ops._skips_dispatcher(q, k, v, ()) and stored(q, k, v):
        return torch_ops._run(work.forward, q, k, v, *outputs(q, v.shape[3], True), work.args)
    made = None if torch.is_grad_enabled() else torch_ops.call_plain(q, k, v, work.args)
    if made is None:
        return torch_ops.call(q, k, v, work.args)
    if _stays(q):
        work.forward = made[0]
    return made[1]


def launch_of(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Launch, Arguments]:
    """Launch that differentiates a call, and its arguments: gradients of 16-bit operands are float32 sums
    where the row hands over such."""
    launch = torch_ops._route(Phase.BACKWARD, q, k, v, args, args)
    if q.element_size() > 2 or Feature.WIDE_GRADIENTS not in launch.row.features:
        return launch, args
    args = args._replace(wide_gradients=True)
    return torch_ops._route(Phase.BACKWARD, q, k, v, args, args), args


def differentiate(
    work: Work, results: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, needs: tuple[bool, ...]
) -> tuple[Any, ...]:
    """Gradients of q, k, v and bias; `results` are dout, dlse, out and lse. The dispatcher is left out where
    it would do nothing: to hand it fifty arguments takes longer than a small call."""
    dout, dlse, out, lse = results
    known = work.backward
    launch, args = known or launch_of(q, k, v, work.args._replace(sinks=None))
    if known is None and _stays(q):
        work.backward = launch, args
    plain = torch_ops._skips_dispatcher(q, k, v, args if known is None else ())
    plain = plain and not torch.is_grad_enabled() and stored(*results, q, k, v)
    if not (plain and all(x is None or is_plain(x) for x in results) and out.numel() and k.shape[2]):
        return _backward_op(dout, dlse, q, k, v, out, lse, needs, *args)  # type: ignore[no-any-return]
    if launch.contents:
        args = validate.checked_contents(args, q, k)
    return torch_ops._differentiate(launch, dout, dlse, q, k, v, out, lse, args, needs)


def _stays(q: Tensor) -> bool:
    """Does what was chosen for a call hold for others of its sizes? Not where torch's switch of TF32 has a
    say."""
    return not (q.is_cuda and q.dtype is torch.float32)


def empty(q: Tensor, width: int, kind: torch.dtype, written: bool = False) -> tuple[Tensor, Tensor]:
    """The results of rows without keys, or room for those of all rows if each will be written."""
    out, lse = empty_in_order_of(q, width, kind), q.new_empty(q.shape[:3], dtype=sums_of(q))
    return (out, lse) if written else (out.zero_(), lse.fill_(-torch.inf))


def widened(x: Any) -> Any:
    """An operand of a block whose result is one of several to be added up."""
    return x.float() if x.device.type == "cpu" and x.element_size() < 4 else x


def sink_gradient(sinks: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """-Σ exp(sink - lse)·delta over batch entries and rows, delta = Σ dout·out - dlse."""
    kind = lse.dtype
    delta = (dout.to(kind) * out.to(kind)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    weight = torch.exp(sinks.to(kind)[None, :, None] - lse)
    return -torch.where(lse == -torch.inf, 0.0, weight * delta).sum((0, 2)).to(sinks.dtype)


def heads_of(x: Tensor, heads: slice) -> Tensor:
    """A mask or a bias of some heads."""
    return x if x.ndim < 3 or x.shape[-3] == 1 else x[..., heads, :, :]


def tile(x: Any, rows: slice, keys: slice) -> Any:
    """A mask or a bias of some rows and keys, where it does not broadcast."""
    if x is not None and x.ndim and x.shape[-1] > 1:
        x = x[..., keys]
    return x[..., rows, :] if x is not None and x.ndim > 1 and x.shape[-2] > 1 else x


def lists_of(x: Tensor, each: int, rows: slice, keys: slice) -> dict[str, Any]:
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
        n: heads_of(x, heads) for n in ("mask", "bias") if (x := getattr(args, n)) is not None
    }
    own |= {n: x[..., heads] for n in ("alibi_slopes", "sinks") if (x := getattr(args, n)) is not None}
    if args.intervals is not None and args.intervals.shape[1] > 1:
        own["intervals"] = args.intervals[:, heads]
    return args._replace(**own) if own else args
