"""How public functions enter the op: `bind` makes one call of tensors and options, `attend` runs it,
`explained` plans it, and `Bound.returned` gives the results the form of the inputs."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyflash import backends, plan, torch_ops, validate
from polyflash import target as targets
from polyflash.arguments import Options, normalise
from polyflash.errors import SpecError, described, spec_error
from polyflash.merging import AttentionOutput
from polyflash.plan import Plan
from polyflash.quant import codec
from polyflash.quant.calls import Opened, opened
from polyflash.quant.tensor import QuantizedTensor
from polyflash.routes import any_requires_grad, requested_backend, spec_of, without_gradients
from polyflash.spec import Arguments, Phase
from polyflash.storages import check_storages
from polyflash.target import Target


class Form(Enum):
    """The meaning of the dimensions of a caller's q, k and v."""

    BHSD = "(batch, heads, seqlen, head_dim)"
    BSHD = "(batch, seqlen, heads, head_dim)"
    PACKED = "(total, heads, head_dim)"
    PAGED = "q (batch, heads, head_dim), one token per request, over pools of pages"
    PAGED_ROWS = "q (total_q, heads, head_dim) over pools (num_pages, page_size, heads, head_dim)"


def form_of(layout: Any) -> Form:
    if isinstance(layout, str) and layout in ("bhsd", "bshd"):
        return Form[layout.upper()]
    raise spec_error("layout", described(layout), "'bhsd' or 'bshd'", "It is never guessed from shapes.")


class Bound(NamedTuple):
    """One call of the op: q, k, v (batch, heads, seqlen, head_dim), a place for the result or None,
    arguments, and the form of the caller's tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    args: Arguments
    form: Form = Form.BHSD

    def returned(self, result: Tensor, lse: Tensor, out: Tensor | None = None) -> Tensor | AttentionOutput:
        """The results of `attend` on packed or paged rows as their caller gets them."""
        one_token = self.form is Form.PAGED
        if out is None:
            out = result.squeeze(2) if one_token else result.squeeze(0).transpose(0, 1)
        if not self.args.need_lse:
            return out
        return AttentionOutput(out, lse[:, :, 0].transpose(0, 1) if one_token else lse[0])


def bind(
    q: Tensor, k: Any, v: Any, options: Options, form: Form = Form.BHSD, out: Tensor | None = None
) -> Bound:
    """One call, checked as far as it can be without the sizes of its tensors; `form` says what their
    dimensions are."""
    if form is not Form.BHSD:
        q, k, v, out = views_of(form, q, k, v, out)
        if form in _OVER_PAGES:
            _check_table(form, q, options.page_table)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        if not isinstance(q, Tensor) or any(type(x) not in (Tensor, QuantizedTensor) for x in (k, v)):
            validate.check_shapes(q, k, v)
        k, v = (_coded(Form.BHSD, n, x) if type(x) is QuantizedTensor else x for n, x in (("k", k), ("v", v)))
    return Bound(q, k, v, out, normalise(options), form)


def attend(bound: Bound) -> tuple[Tensor, Tensor]:
    """The op on (batch, heads, seqlen, head_dim), into `out` if there is one."""
    q, k, v, out, args, _ = bound
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
        return attend_coded(bound, opened_of(bound))
    q, k, v = autocast(q, k, v, args)
    if out is None:
        return torch_ops.call(q, k, v, args)
    if not isinstance(out, Tensor):
        raise spec_error("out", type(out).__name__, "a torch.Tensor", "Use torch.empty().")
    needs_grad = out.requires_grad or any_requires_grad(q, k, v, args)
    if torch.is_grad_enabled() and needs_grad:
        change = "Use torch.no_grad(), or let the call allocate its result."
        raise spec_error("out", "tensors that need gradients", "inference", change)
    return out, torch_ops.call_out(q, k, v, out, args)


def opened_of(bound: Bound, target: str | Target | None = None) -> Opened:
    """A call over codes as one of tensors. Under autocast q is cast first, as codes become its dtype."""
    q = _cast(bound.q) if torch_ops.autocasting(bound.q.device.type) else bound.q
    return opened(q, bound.k, bound.v, bound.args, target)


def read_in_walk(bound: Bound, call: Opened) -> Bound | None:
    """A call over codes as one of tensors, if a kernel reads them in its walk and nothing follows."""
    if call.rotated or not call.args.codes:
        return None
    return bound._replace(q=call.q, k=call.k, v=call.v, args=call.args)


def attend_coded(bound: Bound, call: Opened) -> tuple[Tensor, Tensor]:
    """`attend` where k or v are codes."""
    out = None if call.rotated else bound.out
    result, lse = attend(Bound(call.q, call.k, call.v, out, call.args))
    if call.rotated:
        result = codec.rotate(result)
        result = result if bound.out is None else bound.out.copy_(result)
    return result, lse


def explained(bound: Bound, target: str | Target | None) -> Plan:
    """The plan of a call that `attend` would make, on `target` or on the device of q."""
    q, k, v, _, args, _ = bound
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
        call = opened_of(bound, target)
        found = explained(Bound(call.q, call.k, call.v, None, call.args), target)
        return replace(found, notes=(*found.notes, call.note))
    q, k, v = autocast(q, k, v, args)
    torch_ops.check(q, k, v, args)
    target = targets.of(q, target)
    needs_grad = torch.is_grad_enabled() and any_requires_grad(q, k, v, args)
    args = args._replace(need_lse=args.need_lse or needs_grad)
    backend = requested_backend(args)
    backward = None
    if needs_grad:
        backward = explained_backward(bound._replace(q=q, k=k, v=v), target)
    spec = spec_of(q, k, v, args)
    if not needs_grad:
        spec = without_gradients(spec)
    forward = plan.explain(spec, target, backends.TABLE, backend=backend, config=args.config)
    return replace(forward, backward=backward)


def explained_backward(bound: Bound, target: str | Target | None) -> Plan:
    """The plan of the gradients of a call whose q, k and v are tensors in one dtype."""
    q, k, v, _, args, _ = bound
    torch_ops.check(q, k, v, args)
    spec = spec_of(q, k, v, args, phase=Phase.BACKWARD)
    return plan.explain(spec, targets.of(q, target), backends.TABLE, backend=requested_backend(args))


_OVER_PAGES = (Form.PAGED, Form.PAGED_ROWS)


def views_of(form: Form, q: Any, k: Any, v: Any, out: Any = None) -> list[Any]:
    """Views of the caller's tensors as (batch, heads, seqlen, head_dim). Packed ones have a batch of 1; the
    batch of a pool is its pages."""
    paged = form in _OVER_PAGES
    names = ("q", "k_pages", "v_pages", "out") if paged else ("q", "k", "v", "out")
    views: list[Any] = []
    for name, x in zip(names, (q, k, v, out), strict=True):
        if isinstance(x, QuantizedTensor):
            views.append(_coded(form, name, x))
            continue
        if not isinstance(x, Tensor):
            if paged and name != "out":
                raise spec_error(name, described(x), "a torch.Tensor", "Use torch.as_tensor().")
            if form is Form.BSHD and x is not None and getattr(x, "ndim", 4) != 4:
                raise _wrong_rank(form, name, x)
            views.append(x)
            continue
        validate.check_layout(name, x)
        shape = Form.BSHD if name.endswith("_pages") else form
        if x.ndim != (4 if shape is Form.BSHD else 3):
            raise _wrong_rank(form, name, x)
        views.append(_view(shape, name, x))
    return views


def _coded(form: Form, name: str, x: QuantizedTensor) -> QuantizedTensor:
    """Codes as (batch, heads, seqlen, ...). They were made in the layout of the call: pages in "bshd", packed
    members in "thd"."""
    wanted = {Form.BHSD: "bhsd", Form.PACKED: "thd"}.get(form, "bshd")
    if x.layout != wanted:
        change = f"Quantise it with layout={wanted!r}: scales follow the axes."
        raise spec_error(f"{name} layout", x.layout, wanted, change)
    return x if x.layout == "bhsd" else replace(x, layout="bhsd")


def _view(form: Form, name: str, x: Tensor) -> Tensor:
    """A view, which torch makes of no tensor that its storage is too small for."""
    try:
        if form is Form.BSHD:
            return x.transpose(1, 2)
        return x.unsqueeze(2) if form is Form.PAGED else x.transpose(0, 1).unsqueeze(0)
    except RuntimeError:
        check_storages({name: x})
        raise


def _wrong_rank(form: Form, name: str, x: Any) -> SpecError:
    """The refusal of a tensor with more or fewer dimensions than its form has."""
    if form is Form.BSHD:
        wanted = "4: (batch, seqlen, heads, head_dim)"
        return SpecError(f"{name}: got {x.ndim} dimensions, wanted {wanted}. Use view()")
    wanted = "3: (total, heads, head_dim), with members concatenated"
    change = "Use flatten(0, 1) on a padded batch."
    if name.endswith("_pages"):
        wanted = "4: (num_pages, page_size, num_kv_heads, head_dim)"
        change = "Use transpose(1, 2) if heads come before slots, select() on a tensor of both pools."
    elif form is not Form.PACKED:
        wanted = "3: (batch, heads, head_dim), one token per request; or (total_q, heads, head_dim)"
        change = "Use flatten(0, 1), and cu_seqlens_q to say which rows are whose."
    return spec_error(name, f"{x.ndim} dimensions {tuple(x.shape)}", wanted, change)


def _check_table(form: Form, q: Tensor, page_table: Any) -> None:
    """A page table is a tensor, with a row for each token (batch, num_q_heads, 1, head_dim) of q."""
    if not isinstance(page_table, Tensor):
        change = "Use torch.tensor(rows, dtype=torch.int32)."
        raise spec_error("page_table", described(page_table), "int32 tensor (batch, max_pages)", change)
    validate.check_layout("page_table", page_table)
    if form is Form.PAGED and page_table.ndim == 2 and q.shape[0] != page_table.shape[0]:
        wanted = f"{page_table.shape[0]}, one token per request of page_table"
        raise spec_error("q rows", q.shape[0], wanted, "Say with cu_seqlens_q which rows are whose.")


def autocast(q: Tensor, k: Tensor, v: Tensor, args: Arguments | None = None) -> tuple[Tensor, ...]:
    """Under torch.autocast q, k, v are cast as for torch SDPA: every float but float64, to the autocast
    dtype. Pools are not, as each call would copy them: q is cast to their dtype."""
    if not torch_ops.autocasting(q.device.type):
        return q, k, v
    if args is not None and args.page_table is not None:
        return q.to(k.dtype) if q.is_floating_point() and k.is_floating_point() else q, k, v
    return tuple(map(_cast, (q, k, v)))


def _cast(x: Tensor) -> Tensor:
    """A tensor in the dtype of an autocast that is on."""
    casts = x.is_floating_point() and x.dtype is not torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if casts else x
