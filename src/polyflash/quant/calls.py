"""Calls over codes. Where a kernel reads codes in its walk, they are operands of the op; any other call has
them decoded once, into q's dtype, and is then one like all others: every feature, backend and gradient. A
graph holds the op over codes, which decides within: `in_op`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyflash import backends, plan, routes, validate
from polyflash import target as targets
from polyflash.quant import codec
from polyflash.quant.scheme import Codes, Scheme, codes_of
from polyflash.quant.tensor import KV, QuantizedTensor
from polyflash.routes import any_requires_grad, class_of, requested_backend, spec_of, without_gradients
from polyflash.spec import (
    CODE_TABLES,
    MANY_KEYS,
    MOST_SHARED_ROWS,
    Arguments,
    Feature,
    is_decode,
    length_class,
)
from polyflash.storages import check_storages
from polyflash.target import Target


class Opened(NamedTuple):
    """A call over codes as one of tensors. `rotated`: its result must be rotated back; `note`: for people."""

    q: Tensor
    k: Tensor
    v: Tensor
    args: Arguments
    rotated: bool
    note: str


def opened(q: Tensor, k: KV, v: KV, args: Arguments, device: str | Target | None = None) -> Opened:
    """The call of tensors that a call with codes (batch or pages, heads, seqlen, ...) as k or v becomes, on
    `device` or on that of q."""
    coded = _with_codes(k, v, args)
    codes_k, codes_v = (x.codes if isinstance(x, QuantizedTensor) else x for x in (k, v))
    channels = codes_k.shape[-1] * (k.form.packed if isinstance(k, QuantizedTensor) else 1)
    alike = q.ndim == 4 and q.is_floating_point() and q.device == codes_k.device == codes_v.device
    if not alike or q.shape[3] != channels:  # the op says the rest
        validate.check_shapes(q, codes_k, codes_v, args.page_table is not None, coded.codes)
    if _rotates(k):
        if not torch.compiler.is_compiling() and routes.is_plain(q):
            check_storages({"q": q})
        q = codec.rotate(q)
    if _in_walk(q, codes_k, codes_v, coded, k, v, device):
        return Opened(q, codes_k, codes_v, coded, _rotates(v), f"codes: {coded.codes}, read in the walk")
    if not torch.compiler.is_compiling() and routes.is_plain(codes_k) and routes.is_plain(codes_v):
        check_storages({"k": codes_k, "v": codes_v, **{name: getattr(coded, name) for name in CODE_TABLES}})
    multiplied = _multiplied(q, k, v, args, device)
    table = args.page_table
    if table is not None:
        table, k, v = _gathered(table, args.kv_lens, k, v)
    k_values = k if multiplied or not isinstance(k, QuantizedTensor) else k.values(q.dtype)
    v_values = v.values(q.dtype) if isinstance(v, QuantizedTensor) else v
    note = "" if torch.compiler.is_compiling() else _note(q, (k, k_values), (v, v_values), codes=coded.codes)
    args = args._replace(page_table=table)
    if isinstance(k_values, QuantizedTensor):
        args, k_values = _with_codes(k_values, v_values, args), k_values.codes
    return Opened(q, k_values, v_values, args, _rotates(v), note)


@dataclass(frozen=True, slots=True, eq=False)
class _OfOp(QuantizedTensor):
    """Codes as the op has them, which knows their form and not the scheme that made them."""

    form: Codes = Scheme().codes  # type: ignore[misc]
    text: str = ""  # type: ignore[misc]


def in_op(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, Tensor, Arguments, Any]:
    """k, v and arguments of a call of the op, and these as a route's key has them; decodes what no row
    reads."""
    args = Arguments(*rest)
    forms = codes_of(args.codes) if args.codes else (None, None)
    if forms == (None, None):
        return k, v, args, rest
    validate.check_shapes(q, k, v, args.page_table is not None, args.codes)
    validate.check_operands(q, k, args)
    if _in_walk(q, k, v, args, k, v, None):  # whose route checks the rest
        return k, v, args, rest
    validate.check_layouts(q, k, v, args)
    validate.check_tables(k, v, args)
    tables = (args.k_scale, args.k_shift), (args.v_scale, args.v_shift)
    of_op: Any = partial(_OfOp, scheme=Scheme(), dtype=q.dtype)
    parts = zip((k, v), tables, forms, strict=True)
    k_codes, v_codes = (x if f is None else of_op(x, *t, form=f, text=str(f)) for x, t, f in parts)
    _, k, v, args, *_ = opened(q, k_codes, v_codes, args._replace(**_WITHOUT))
    return k, v, args, args


def as_decoded(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor, Arguments]:
    """k, v and arguments of a call over codes as `in_op` would decode them, but without keys."""
    pairs = zip((k, v), codes_of(args.codes), strict=True)
    k, v = (x if f is None else q.new_empty((*x.shape[:2], 0, x.shape[3] * f.packed)) for x, f in pairs)
    return k, v, args._replace(**_WITHOUT)


_WITHOUT: dict[str, Any] = {"codes": "", **dict.fromkeys(CODE_TABLES)}


def _multiplied(q: Tensor, k: KV, v: KV, args: Arguments, device: Any) -> bool:
    """Does a kernel multiply the codes of K, if those of V are decoded?"""
    if not (isinstance(k, QuantizedTensor) and isinstance(v, QuantizedTensor) and k.form.compute != "float"):
        return False
    shape = *v.codes.shape[:3], v.codes.shape[3] * v.form.packed
    values = torch.empty(shape, dtype=q.dtype, device="meta")
    return _in_walk(q, k.codes, values, _with_codes(k, values, args), k, v, device)


def _note(q: Tensor, *pairs: tuple[KV, KV], codes: str) -> str:
    """Words on k and v, each as it came and as it goes on."""
    how = "k multiplied as it is, v " if isinstance(pairs[0][1], QuantizedTensor) else ""
    size = sum(x.numel() * x.element_size() for y, x in pairs if isinstance(x, Tensor) and x is not y)
    kind = str(q.dtype).removeprefix("torch.")
    return f"codes: {codes}, {how}decoded to {kind} before the kernel: {size / 1e6:.3g} MB"


def _rotates(x: KV) -> bool:
    return isinstance(x, QuantizedTensor) and x.scheme.rotation != "none"


def _with_codes(k: KV, v: KV, args: Arguments) -> Arguments:
    """`args` of a call whose kernel reads the codes."""
    k_text, k_scale, k_shift = _tables(k)
    v_text, v_scale, v_shift = _tables(v)
    tables: dict[str, Any] = {"k_scale": k_scale, "k_shift": k_shift, "v_scale": v_scale, "v_shift": v_shift}
    return args._replace(codes=f"{k_text},{v_text}", **tables)


def _tables(x: KV) -> tuple[str, Tensor | None, Tensor | None]:
    return (x.text, x.scale, x.shift) if isinstance(x, QuantizedTensor) else ("-", None, None)


def _in_walk(q: Tensor, codes_k: Tensor, codes_v: Tensor, args: Arguments, k: KV, v: KV, device: Any) -> bool:
    """Does a kernel read these codes in its walk? Never for gradients. In a graph yes, and the op asks again
    when it runs."""
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    differentiated = k.requires_grad or v.requires_grad or any_requires_grad(q, codes_k, codes_v, args)
    wanted = differentiated and torch.is_grad_enabled()
    if compiling or wanted:
        return not wanted
    backend = requested_backend(args)
    (_, heads, rows, head_dim), (_, kv_heads, keys, _), table = q.shape, codes_v.shape, args.page_table
    page_size, keys = (0, keys) if table is None else (keys, keys * table.shape[1])
    few = is_decode(heads, kv_heads, rows, keys, args.row_bounds is not None, q.device.type)
    lengths = few, page_size, min(rows, MOST_SHARED_ROWS + 1), length_class(rows), keys >= MANY_KEYS
    sizes = heads, head_dim, kv_heads, codes_v.shape[3], lengths
    key = (q.dtype, q.device, device, backend, sizes, *map(class_of, args))
    if key not in _readers:
        if len(_readers) >= _KEPT:
            _readers.clear()
        spec = without_gradients(spec_of(q, codes_k, codes_v, args))
        candidates = plan.candidates(backends.TABLE, spec, backend)
        here, named = targets.of(q, device), bool(backend)
        _readers[key] = any(
            Feature.CODES in row.features and row.accepts(spec, here, by_name=named) for row in candidates
        )
    return _readers[key]


_KEPT = 1024
_readers: dict[tuple[Any, ...], bool] = {}  # by class of problem, as routes are


def _gathered(table: Tensor, lens: Tensor | None, *pools: KV) -> tuple[Any, ...]:
    """A table that names the pages of each request one after the other, and pools of these pages alone: a
    call decodes what its requests hold, and not the pool."""
    pool = pools[0].codes if isinstance(pools[0], QuantizedTensor) else pools[0]
    num_pages, _, size, _ = pool.shape
    if lens is not None and lens.device.type == "cpu" and lens.numel():
        table = table[:, : max(1, -(-int(lens.max()) // max(1, size)))]
    known = (table >= 0) & (table < num_pages)
    at = torch.where(known, table, 0).flatten().long()
    order = torch.arange(at.numel(), dtype=torch.int32, device=table.device).view_as(table)
    taken = (x.pages(at) if isinstance(x, QuantizedTensor) else x[at] for x in pools)
    return torch.where(known, order, -1), *taken
