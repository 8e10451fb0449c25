"""How public functions enter the op: views of the user's tensors, casts under autocast, a caller's place for
the result, a plan in the place of a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyflash import backends, plan, torch_ops
from polyflash import target as targets
from polyflash.errors import SpecError, described, spec_error
from polyflash.plan import Plan
from polyflash.routes import any_requires_grad, requested_backend, spec_of, without_gradients
from polyflash.spec import Arguments, Phase
from polyflash.storages import check_storages
from polyflash.target import Target


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, args: Arguments) -> tuple[Tensor, Tensor]:
    """The op on (batch, heads, seqlen, head_dim), into `out` if there is one."""
    if torch_ops.autocasting(q.device.type):
        q, k, v = autocast(q, k, v, args)
    if out is None:
        return torch_ops.call(q, k, v, args)
    if not isinstance(out, Tensor):
        raise spec_error("out", got=type(out).__name__, wanted="a torch.Tensor", change="Use torch.empty().")
    needs_grad = out.requires_grad or any_requires_grad(q, k, v, args)
    if torch.is_grad_enabled() and needs_grad:
        change = "Use torch.no_grad(), or let the call allocate its result."
        raise spec_error("out", got="tensors that need gradients", wanted="inference", change=change)
    return out, torch_ops.call_out(q, k, v, out, args)


def explained(q: Tensor, k: Tensor, v: Tensor, args: Arguments, target: str | Target | None) -> Plan:
    """The plan of a call that `attend` would make, on `target` or on the device of q."""
    if torch_ops.autocasting(q.device.type):
        q, k, v = autocast(q, k, v, args)
    torch_ops.check(q, k, v, args)
    if target is None:
        kind = "cpu" if q.device.type == "meta" else q.device.type
        target = targets.detect(kind, q.device.index or 0)
    elif not isinstance(target, Target):
        target = targets.parse(target)
    needs_grad = torch.is_grad_enabled() and any_requires_grad(q, k, v, args)
    args = args._replace(need_lse=args.need_lse or needs_grad)
    backend = requested_backend(args)
    backward = None
    if needs_grad:
        spec = spec_of(q, k, v, args, phase=Phase.BACKWARD)
        backward = plan.explain(spec, target, backends.TABLE, backend=backend)
    spec = spec_of(q, k, v, args)
    if not needs_grad:
        spec = without_gradients(spec)
    return plan.explain(spec, target, backends.TABLE, backend=backend, config=args.config, backward=backward)


def bhsd_views(layout: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> tuple[Any, ...]:
    """Views of (batch, seqlen, heads, head_dim) tensors as (batch, heads, seqlen, head_dim)."""
    if not isinstance(layout, str) or layout != "bshd":
        change = "It is never guessed from shapes."
        raise spec_error("layout", got=described(layout), wanted="'bhsd' or 'bshd'", change=change)
    views = []
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if x is not None and getattr(x, "ndim", 4) != 4:
            raise SpecError(
                f"{name}: got {x.ndim} dimensions, wanted 4: (batch, seqlen, heads, head_dim). Use view()"
            )
        views.append(_view(name, x, lambda x: x.transpose(1, 2)) if isinstance(x, Tensor) else x)
    return tuple(views)


def packed_views(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> tuple[Any, ...]:
    """Views of (total, heads, head_dim) tensors as (1, heads, total, head_dim)."""
    views = []
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if isinstance(x, Tensor) and x.ndim != 3:
            wanted = "3: (total, heads, head_dim), with members one behind the other"
            got = f"{x.ndim} dimensions {tuple(x.shape)}"
            raise spec_error(name, got=got, wanted=wanted, change="Use flatten(0, 1) on a padded batch.")
        views.append(_view(name, x, _row_of_heads) if isinstance(x, Tensor) else x)
    return tuple(views)


def _row_of_heads(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _view(name: str, x: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
    """A view, which torch makes of no tensor that its storage is too small for."""
    try:
        return made(x)
    except RuntimeError:
        check_storages({name: x})
        raise


def paged_views(q: Any, k_pages: Any, v_pages: Any, packed: bool, out: Any = None) -> tuple[Any, ...]:
    """Views of q (batch, heads, head_dim), packed (total_q, heads, head_dim), and of pools (num_pages,
    page_size, heads, head_dim) as (batch, heads, 1, head_dim), (1, heads, total_q, head_dim) and (num_pages,
    heads, page_size, head_dim); of `out` as of q."""
    views: list[Any] = []
    for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages), ("out", out)):
        if not isinstance(x, Tensor):
            if name != "out":
                change = "Use torch.as_tensor()."
                raise spec_error(name, got=described(x), wanted="a torch.Tensor", change=change)
            views.append(x)
            continue
        pool = name.endswith("_pages")
        if x.ndim != (4 if pool else 3):
            wanted = "4: (num_pages, page_size, num_kv_heads, head_dim)"
            change = "Use transpose(1, 2) if heads come before slots, select() on a tensor of both pools."
            if not pool:
                wanted = "3: (batch, heads, head_dim), one token per request; or (total_q, heads, head_dim)"
                change = "Use flatten(0, 1), and cu_seqlens_q to say which rows are whose."
            raise spec_error(name, got=f"{x.ndim} dimensions {tuple(x.shape)}", wanted=wanted, change=change)
        if pool:
            views.append(_view(name, x, lambda x: x.transpose(1, 2)))
        else:
            views.append(_view(name, x, _row_of_heads if packed else lambda x: x.unsqueeze(2)))
    return tuple(views)


def autocast(q: Tensor, k: Tensor, v: Tensor, args: Arguments | None = None) -> tuple[Tensor, ...]:
    """Under torch.autocast q, k, v are cast as for torch SDPA: every float but float64, to the autocast
    dtype. Pools are not, as each call would copy them: q is cast to their dtype."""
    if args is not None and args.page_table is not None:
        return q.to(k.dtype) if q.is_floating_point() and k.is_floating_point() else q, k, v
    kind = torch.get_autocast_dtype(q.device.type)
    return tuple(
        x.to(kind) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in (q, k, v)
    )
