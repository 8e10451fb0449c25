"""The one torch op under every public function: schema, fake tensors, autograd, and the route cache.

    call() -> polyflash::attention -> [ route cache -> spec -> plan -> run ] -> (out, lse)

The plan is made inside the op, so torch.compile sees one opaque call and never a length-dependent choice. A
route is kept per class of problem (dtypes, heads, dims, which operands, length classes), not per length. A
plain eager call runs the op's body without the dispatcher in between."""

from __future__ import annotations

import struct
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._C import _dispatch_keys
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from polyflash import backends, counting, plan, target, transforms, validate
from polyflash.errors import spec_error
from polyflash.operands import DIFFERENTIABLE, OPERANDS, differentiable
from polyflash.plan import Launch
from polyflash.quant.calls import as_decoded, in_op
from polyflash.results import NO_LSE, apart, empty_gradients, no_gradients, no_keys, settled, without_pages
from polyflash.results import outputs as _outputs
from polyflash.routes import (
    ANY,
    PLAIN_KEYS,
    any_requires_grad,
    class_of,
    head_dim_v_of,
    is_plain,
    longest_class,
    members_of,
    requested_backend,
    saved_hooks,
    spec_of,
    takes_tf32,
    unobserved,
)
from polyflash.routes import backend_in_use as backend_in_use
from polyflash.spec import MANY_KEYS, MOST_POSITIONS, Arguments, Phase, is_decode, length_class
from polyflash.storages import check_storages, near, stored

ARGUMENTS = ", ".join(operand.schema for operand in OPERANDS)
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in ("q", "k", "v", *DIFFERENTIABLE))
_LIB = torch.library.Library("polyflash", "DEF")
_LIB.define(f"attention(Tensor q, Tensor k, Tensor v, {ARGUMENTS}) -> (Tensor out, Tensor lse)")
_LIB.define(f"attention_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {ARGUMENTS}) -> Tensor lse")
_LIB.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"bool[] needs, {ARGUMENTS}) -> ({_GRADIENTS})"
)
_attention = torch.ops.polyflash.attention.default
_attention_out = torch.ops.polyflash.attention_out.default
_attention_backward = torch.ops.polyflash.attention_backward.default

_N_PLAIN = 3  # causal, scale, need_lse: all that a plain call passes
_DEFAULT_OPERANDS = tuple(Arguments())[_N_PLAIN:]

_KEPT_ROUTES = 4096
_routes: dict[tuple[Any, ...], Launch] = {}
_FORWARD, _DECODE = Phase.FORWARD, Phase.DECODE


class InGraph:
    """The choice of `use_backend` within a graph that is being traced, which sets no context variable."""

    def __init__(self) -> None:
        self.backend: str | None = None  # of the instance: Dynamo guards one of the class anew


in_graph = InGraph()


def call(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """The op, entered the cheapest way the moment allows. q, k, v are (batch, heads, seqlen, head_dim)."""
    needs_grad = torch.is_grad_enabled() and any_requires_grad(q, k, v, args)
    compiling = torch.compiler.is_compiling()
    if compiling or torch._C._functorch.peek_interpreter_stack() is not None:
        if not compiling:
            check(q, k, v, args)
        elif needs_grad:
            args = args._replace(need_lse=True)
        if needs_grad and args.cu_seqlens_q is not None:  # the op will not know what it is called for
            args = args._replace(batch_invariant=True)
        return _attention(q, k, v, *as_asked(args))
    if forward_ad._current_level >= 0:
        transforms.refuse_tangents(differentiable(q, k, v, args))
    if needs_grad:
        transforms.refuse_inference_only(args)
    if not needs_grad or saved_hooks(False) is None:
        plain = call_plain(q, k, v, args)
        if plain is not None:
            return plain[1]
    validate.check_layouts(q, k, v, args)
    if not needs_grad:
        with torch._C._AutoDispatchBelowAutograd():
            return _attention(q, k, v, *_without_defaults(args))
    args = _chosen_here(args)
    if args.backend:
        refuse_gradients(q, k, v, args)
    return _attention(q, k, v, *args._replace(backend=args.backend or ANY))


def as_asked(args: Arguments) -> Arguments:
    """`args` with the backend that is asked for here, for the op where it will know of no context."""
    if torch.compiler.is_compiling():
        backend = args.backend or ("" if in_graph.backend is None else in_graph.backend or ANY)
    else:
        backend = requested_backend(args) or ANY
    return args._replace(backend=backend)


def refuse_gradients(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> None:
    """Raises what the backward op would raise of a call, as far as its sizes do not matter."""
    check(q, k, v, args)
    _refuse_statically(Phase.BACKWARD, q, k, v, args)


def _chosen_here(args: Arguments) -> Arguments:
    """`args` with the backend that is asked for now, which the gradients follow."""
    backend = requested_backend(args)
    return args if backend == args.backend else args._replace(backend=backend)


def _with_node(
    q: Tensor, k: Tensor, v: Tensor, args: Arguments, rest: tuple[Any, ...]
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """Launch and results of a call below the dispatcher, its node in the graph. Without `need_lse` the lse is
    kept for the gradients alone."""
    wanted = args.need_lse
    if not wanted:
        args = Arguments(rest[0], rest[1], True, *rest[_N_PLAIN:])
        rest = args[:_N_PLAIN] if len(rest) == _N_PLAIN else args
    launch = _route(_FORWARD, q, k, v, args, rest)
    plain, backward = len(rest) == _N_PLAIN, _backward_of(launch, q, k, v, args)
    results = _apply(q, k, v, args.bias, args.sinks, (args, launch, backward, plain, wanted))
    return launch, results if wanted else (results, NO_LSE)


def _backward_of(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Launch:
    """The launch of the gradients of a call."""
    if launch.backward is None:
        launch.backward = _plan(Phase.BACKWARD, q, k, v, args._replace(config=""), args.backend)
    if launch.backward.by_sizes is None:
        return launch.backward
    return launch.backward.of_sizes(q.shape[0], q.shape[2], k.shape[2], *members_of(args))


def trained(repeat: Any, launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Any:
    """Repeats a call of q, k and v alone that is differentiated: `repeat` within a node, whose class knows
    what its calls share."""
    wanted, args = args.need_lse, _chosen_here(args)._replace(need_lse=True)
    gradients = _backward_of(launch, q, k, v, args)

    class Known(_SingleLevelFunction):
        launch = gradients

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
            made = repeat(q, k, v)
            if made is None:
                return None
            ctx.save_for_backward(q, k, v, *made)
            if wanted:
                ctx.set_materialize_grads(False)
            return made if wanted else made[0]

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
            needs = ctx.needs_input_grad
            if gradients.again is not None and dout is not None and all(needs):
                made = gradients.again(ctx.saved_tensors, dout, dlse, args)
                if made is not None:
                    gradients.tally.count()
                    return made
            return _gradients_of(ctx, args, gradients, (*needs, False, False), dout, dlse)[:3]

    apply: Any = Known.apply  # type: ignore[attr-defined]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        results = apply(q, k, v)
        return results if wanted or results is None else (results, NO_LSE)

    return call


def _skips_dispatcher(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> bool:
    if not (type(q) is type(k) is type(v) is Tensor and unobserved()):
        return False  # unrolled: three calls of `is_plain` would be seen in the time of a small call
    plain = _dispatch_keys(q).raw_repr() in PLAIN_KEYS or is_plain(q)
    plain = plain and (_dispatch_keys(k).raw_repr() in PLAIN_KEYS or is_plain(k))
    plain = plain and (_dispatch_keys(v).raw_repr() in PLAIN_KEYS or is_plain(v))
    if not plain or len(rest) == _N_PLAIN:
        return plain
    return all(is_plain(x) for x in rest if x is not None and isinstance(x, Tensor))


def _without_defaults(args: Arguments) -> tuple[Any, ...]:
    """The arguments of a plain call alone, if it is one: each more costs the dispatcher time."""
    places = args.kv_lens is args.kv_starts is args.q_offset is args.cu_seqlens_q is args.page_table is None
    scores = args.mask is args.bias is args.alibi_slopes is args.sinks is args.intervals is None
    if not (places and scores and args.dropout_seed is None and args.codes == ""):
        return args  # to compare a tensor with None takes as long as a small kernel
    return args[:_N_PLAIN] if args[_N_PLAIN:] == _DEFAULT_OPERANDS else args


def check(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> None:
    """The refusals of the op itself, without the op; q, k, v may be meta tensors."""
    _check_inputs(q, k, v, args)
    validate.check_operands(q, k, args)
    if args.codes:
        validate.check_tables(k, v, args)


def call_out(q: Tensor, k: Tensor, v: Tensor, out: Tensor, args: Arguments) -> Tensor:
    """The op with a caller's output (batch, num_q_heads, seqlen_q, head_dim_v); returns the lse."""
    rest: tuple[Any, ...] = args
    if not torch.compiler.is_compiling():
        if torch._C._functorch.peek_interpreter_stack() is not None:
            change = "Let the call allocate its result."
            raise spec_error("out", "a call under torch.func", "no transform", change)
        rest = _without_defaults(args)
        validate.check_layouts(q, k, v, rest, out)
        transforms.refuse_tangents(differentiable(q, k, v, args))
        torch.autograd.graph.increment_version(out)
        if _skips_dispatcher(q, k, v, rest) and is_plain(out) and not torch.is_grad_enabled():
            return _forward_out(q, k, v, out, *rest)
    return _attention_out(q, k, v, out, *rest)


def autocasting(device_type: str) -> bool:
    """Is torch.autocast on for this device type? Not every type knows it: meta does not."""
    return device_type in _AUTOCAST and torch.is_autocast_enabled(device_type)


_AUTOCAST = frozenset(d for d in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(d))


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> None:
    validate.check_shapes(q, k, v, args.page_table is not None, args.codes)
    validate.check_layouts(q, k, v, args)


def _route(phase: Phase, q: Tensor, k: Tensor, v: Tensor, args: Arguments, rest: tuple[Any, ...]) -> Launch:
    """The prepared launch of a call. Everything static was validated when its route was made, so a call
    compares batch and lengths only, and looks at operands if it has any; `rest` is without trailing
    defaults. Every call without gradients asks for `Phase.DECODE`; one of many rows is a forward one."""
    try:
        batch, num_q_heads, seqlen_q, head_dim = q.shape
        batch_k, num_kv_heads, seqlen_k, head_dim_k = k.shape
        batch_v, num_v_heads, seqlen_v, head_dim_v = v.shape
    except ValueError:
        validate.check_shapes(q, k, v)
        raise
    strided = q.layout is k.layout is v.layout is torch.strided
    paged = args.page_table is not None
    if not (strided and (batch == batch_k or paged) and batch_k == batch_v and seqlen_k == seqlen_v):
        validate.check_shapes(q, k, v, paged, args.codes)
    if not (stored(q, k, v) and (len(rest) == _N_PLAIN or stored(*rest))):
        pools = {"k_pages": k, "v_pages": v} if paged else {"k": k, "v": v}
        check_storages({"q": q, **pools, **args._asdict()})
    if len(rest) > _N_PLAIN or args.scale is not None:
        seqlen_k = validate.check_operands(q, k, args)
        if args.codes:
            validate.check_tables(k, v, args)
    asked = phase  # decides whether the spec needs gradients: tensors may require some where none are made
    if phase is _DECODE and not (
        args.cu_seqlens_q is None
        and is_decode(
            num_q_heads, num_kv_heads, seqlen_q, seqlen_k, args.row_bounds is not None, q.device.type
        )
    ):
        phase = _FORWARD
    backend = requested_backend(args)
    heads, dims = (num_q_heads, num_kv_heads, num_v_heads), (head_dim, head_dim_k, head_dim_v)
    kinds = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, args.codes and paged and k.shape[2]
    lengths = length_class(seqlen_q), seqlen_k >= MANY_KEYS, seqlen_q + seqlen_k > MOST_POSITIONS
    key = (phase, asked, backend, kinds, heads, dims, lengths, takes_tf32(q), *map(class_of, rest))
    if args.max_seqlen_q is not None or args.max_seqlen_k is not None:
        key += longest_class(args)
    launch = _routes.get(key)
    if launch is None:
        if len(_routes) >= _KEPT_ROUTES:
            _routes.clear()
        _check_inputs(q, k, v, args)
        launch = _routes[key] = _plan(phase, q, k, v, args, backend, needs_grad=asked is not _DECODE)
    if launch.by_sizes is None:
        return launch
    return launch.of_sizes(batch, seqlen_q, seqlen_k, *members_of(args))


def call_plain(
    q: Tensor, k: Tensor, v: Tensor, args: Arguments
) -> tuple[Launch, tuple[Tensor, Tensor]] | None:
    """Launch and results of a call of plain tensors without a mode, trace or profiler, or None if it needs
    the dispatcher, whose way from Python to Python takes 8 us, as long as a small call of torch's."""
    needs_grad = torch.is_grad_enabled() and any_requires_grad(q, k, v, args)
    args = _chosen_here(args) if needs_grad else args
    rest = _without_defaults(args)
    if not _skips_dispatcher(q, k, v, rest):
        return None
    return _with_node(q, k, v, args, rest) if needs_grad else _attend(q, k, v, args, rest, _DECODE)


def _plan(
    phase: Phase, q: Tensor, k: Tensor, v: Tensor, args: Arguments, backend: str, *, needs_grad: bool = True
) -> Launch:
    spec = replace(spec_of(q, k, v, args, phase=phase), needs_grad=needs_grad)
    device = target.detect(q.device.type, q.device.index or 0)
    launch = plan.select(spec, device, backends.TABLE, backend=backend, config=args.config)
    for made in (launch, launch.instead):
        if made is not None:
            made.run = import_module(made.row.module).run
            made.tally = counting.tally_of(made, backend)
            made.contents = validate.has_contents(args)
    return launch


def _refuse_statically(phase: Phase, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> None:
    """The refusals of a plan without a plan: reads no length, so that tracing puts no guard on one."""
    lengths_free = spec_of(q[:, :, :0], k[:, :, :0], v[:, :, :0], args, phase=phase)
    device = target.detect(q.device.type, q.device.index or 0)
    backend = requested_backend(args)
    rows = plan.candidates(backends.TABLE, lengths_free, backend)
    if not any(row.accepts(lengths_free, device, by_name=bool(backend)) for row in rows):
        if args.codes and phase is not Phase.BACKWARD:
            return _refuse_statically(phase, q, *as_decoded(q, k, v, args))
        raise plan.unsupported(lengths_free, device, backends.TABLE, backend)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    k, v, args, rest = in_op(q, k, v, rest)
    differentiated = args.need_lse and any_requires_grad(q, k, v, args)  # as far as a tensor tells
    out, lse = _attend(q, k, v, args, rest, _FORWARD if differentiated else _DECODE)[1]
    return out, q.new_empty(0) if lse is NO_LSE else lse  # an op's results are its own


def _attend(
    q: Tensor, k: Tensor, v: Tensor, args: Arguments, rest: tuple[Any, ...], phase: Phase
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    launch = _route(phase, q, k, v, args, rest)
    return launch, _run(launch, q, k, v, *_outputs(q, head_dim_v_of(v, args), args.need_lse), args)


def _forward_out(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> Tensor:
    k, v, args, rest = in_op(q, k, v, rest)
    launch = _route(_DECODE, q, k, v, args, rest)
    validate.check_out(out, q, head_dim_v_of(v, args))
    check_storages({"out": out})
    fresh, lse = _outputs(q, head_dim_v_of(v, args), args.need_lse)
    place = near(out) if out.stride(3) == 1 and apart(out, (q, k, v, *rest)) else fresh
    result, lse = _run(launch, q, k, v, place, lse, args)
    if place is fresh or result is not place:
        out.copy_(result)
    return q.new_empty(0) if lse is NO_LSE else lse


def _run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    if launch.contents:
        args = validate.checked_contents(args, q, k)
    if out.numel() == 0 or k.shape[2] == 0 or (args.page_table is not None and without_pages(k, args)):
        return no_keys(out, lse, args)
    return launched(launch, q, k, v, out, lse, args)


def launched(launch: Launch, *operands: Any) -> Any:
    """The result of the row's `run`, counted, with autocast off and the GPU of the first operand current."""
    device = launch.spec.device
    if device == "cuda" and operands[0].device.index != torch.cuda.current_device():
        with torch.cuda.device(operands[0].device):
            return launched(launch, *operands)
    if autocasting(device):
        with torch.autocast(device, enabled=False):
            return launched(launch, *operands)
    launch.tally.count()
    try:
        return launch.run(launch, *operands)
    except (OverflowError, struct.error):  # a stride fits no word, which shows before anything runs
        return launch.run(launch, *map(near, operands))


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    needs, args = rest[0], Arguments(*rest[1:])._replace(config="")
    launch = _route(Phase.BACKWARD, q, k, v, args, tuple(args))
    validate.check_results(q, v, {"dout": dout, "dlse": dlse, "out": out, "lse": lse})
    check_storages({"dout": dout, "dlse": dlse, "out": out, "lse": lse})
    if launch.contents:
        args = validate.checked_contents(args, q, k)
    likes = differentiable(q, k, v, args)
    if out.numel() == 0 or k.shape[2] == 0:
        return no_gradients(likes, dlse, args, needs)
    made = _differentiate(launch, dout, dlse, q, k, v, out, lse, args, tuple(needs))
    return settled(made, likes, args, needs)


def _differentiate(
    launch: Launch, dout: Tensor, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    return launched(launch, dout, dlse, *rest)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    args = Arguments(*rest)
    check(q, k, v, args)
    _refuse_statically(_FORWARD if args.row_bounds is None else _DECODE, q, k, v, args)
    out, lse = _outputs(q, head_dim_v_of(v, args), args.need_lse)
    return out, lse if args.need_lse else q.new_empty(0)


def _fake_forward_out(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> Tensor:
    validate.check_out(out, q, head_dim_v_of(v, Arguments(*rest)))
    return _fake_forward(q, k, v, *rest)[1]


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    needs, args = rest[0], Arguments(*rest[1:])
    refuse_gradients(q, k, v, args)
    validate.check_results(q, v, {"dout": dout, "dlse": dlse, "out": out, "lse": lse})
    return empty_gradients(differentiable(q, k, v, args), args, needs)


class _Attention(_SingleLevelFunction):
    """The op's node in the graph of one level of torch.func, or of plain autograd. The inputs are the
    differentiable operands, and `how`: the `Arguments`, the launches of both phases (or the op below
    autograd, and None), whether there are no operands beside q, k, v, and whether the lse is a result."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any, how: tuple[Any, ...]
    ) -> Tensor | tuple[Tensor, Tensor]:
        args, launch, ctx.launch, plain, wanted = how
        if isinstance(launch, Launch):
            out, lse = _run(launch, q, k, v, *_outputs(q, head_dim_v_of(v, args), True), args)
        else:
            with torch.enable_grad():  # the level below has a graph of its own
                out, lse = launch(q, k, v, *args)
        if plain:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, *(x for x in args if isinstance(x, Tensor)))
            args = Arguments._make(_SAVED if isinstance(x, Tensor) else x for x in args)
        ctx.set_materialize_grads(False)
        ctx.args = args
        return (out, lse) if wanted else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return (*_gradients_of(ctx, ctx.args, ctx.launch, ctx.needs_input_grad[:5], dout, dlse), None)


def _gradients_of(
    ctx: Any, args: Arguments, launch: Any, needs: tuple[bool, ...], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the five differentiable operands, None where there `needs` to be none."""
    q, k, v, out, lse, *others = ctx.saved_tensors
    if others:
        kept = iter(others)
        args = Arguments._make(next(kept) if x is _SAVED else x for x in args)
    if dout is None:
        dout = torch.zeros_like(out)
    direct = launch is not None and is_plain(dout) and (dlse is None or is_plain(dlse)) and unobserved()
    direct = direct and not torch.is_grad_enabled() and out.numel() and k.shape[2]
    if direct and stored(dout, dlse, q, k, v, out, lse, *others):
        if launch.contents:
            args = validate.checked_contents(args, q, k)
        return _differentiate(launch, dout, dlse, q, k, v, out, lse, args, needs)
    if launch is not None:  # the context of the forward pass had its say
        args = args._replace(backend=args.backend or ANY)
    results = _attention_backward(dout, dlse, q, k, v, out, lse, needs, *args)
    return tuple(x if need else None for x, need in zip(results, needs, strict=True))


_SAVED = object()  # stands for a tensor that autograd keeps
_apply: Any = _Attention.apply  # type: ignore[attr-defined]


for _name, _body, _fake in (
    ("attention", _forward, _fake_forward),
    ("attention_out", _forward_out, _fake_forward_out),
    ("attention_backward", _backward, _fake_backward),
):
    _LIB.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"polyflash::{_name}", _fake, lib=_LIB)
_LIB.impl("attention", transforms.node_of_forward(_attention, _Attention), "Autograd", with_keyset=True)
_LIB.impl(
    "attention_backward", transforms.node_of_backward(_attention_backward), "Autograd", with_keyset=True
)
torch.library.register_vmap("polyflash::attention", transforms.map_forward, lib=_LIB)
torch.library.register_vmap("polyflash::attention_backward", transforms.map_backward, lib=_LIB)
