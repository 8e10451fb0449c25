"""Calls like one before them: what was checked and decided for it holds, so they go straight to its kernel.

A step of generation makes the same few calls again and again, each behind megabytes of keys that drove
Python itself out of every cache. There a line of Python costs ten times what it costs in a loop, and to
understand a call of 2 ms took a fifth of it. Only plain calls of few rows on a CPU are known: no gradient, no
mode, no operand but pages and lengths. Lengths are no part of what is known, so a growing cache adds nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from polyflash import torch_ops
from polyflash.counting import Tally
from polyflash.routes import backend_in_use
from polyflash.spec import DECODE_ROWS, MANY_KEYS, MOST_POSITIONS, Arguments


class Repeat(Protocol):
    """Runs calls like one before them; None: these lengths need the whole way, or its error."""

    tally: Tally

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, Tensor] | None: ...


Key = tuple[Any, ...]

_KEPT = 1024
_MOST_KEYS = MOST_POSITIONS - DECODE_ROWS
_known: dict[Key, Repeat | None] = {}
_keys_of, _plain = torch._C._dispatch_keys, frozenset(torch_ops.plain_keys("cpu"))
_included, _excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set


def of_keys(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Key | None:
    """What tells calls of `attention` apart whose other arguments are defaults, or None if they are not to be
    known. Tensors are (batch, heads, seqlen, head_dim)."""
    kinds = _kinds(q, k, v)
    if kinds is None or not q.ndim == k.ndim == v.ndim == 4:
        return None
    batch, num_kv_heads, seqlen_k, head_dim = k.shape
    batch_v, num_v_heads, seqlen_v, head_dim_v = v.shape
    if q.shape[2] > DECODE_ROWS or seqlen_k != seqlen_v or not 0 < seqlen_k <= _MOST_KEYS:
        return None
    _, k_head, *k_last = k.stride()
    _, v_head, *v_last = v.stride()
    sizes = q.shape, batch, num_kv_heads, head_dim, batch_v, num_v_heads, head_dim_v
    order = k_head >= k_last[0], v_head >= v_last[0], *k_last, *v_last
    return (*kinds, sizes, _keys_class(seqlen_k), order, options)


def of_pages(q: Tensor, k: Tensor, v: Tensor, table: Any, lens: Any, *options: Any) -> Key | None:
    """As `of_keys`, of one token per request over pages: q (batch, heads, head_dim), pools (num_pages,
    page_size, heads, head_dim)."""
    kinds = _kinds(q, k, v, table, lens)
    if kinds is None or q.ndim != 3 or k.ndim != 4 or table.ndim != 2:
        return None
    requests, columns = table.shape
    most = k.shape[1] * columns
    if not (requests and 0 < most <= _MOST_KEYS):
        return None
    fixed = q.shape, k.shape, k.stride(), v.shape, v.stride(), requests, lens.shape
    return (*kinds, *fixed, _keys_class(most), options)


def _keys_class(seqlen_k: int) -> bool:
    """What a route of few rows depends on besides: see `torch_ops._route`."""
    return seqlen_k >= MANY_KEYS


def _kinds(*tensors: Any) -> Key | None:
    """dtypes, modes (functorch, dispatch modes, tracing, autocast) and the backend in use; None if a tensor
    is no plain one of a CPU, or anybody would look at the call."""
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
    ):
        return None
    for x in tensors:
        if type(x) is not Tensor or x.requires_grad or _keys_of(x).raw_repr() not in _plain:
            return None
    if not tensors[0].is_contiguous():
        return None
    modes = _included().raw_repr(), _excluded().raw_repr()
    return (*(x.dtype for x in tensors), *modes, backend_in_use.get())


def call(key: Key | None, *tensors: Any) -> tuple[Tensor, Tensor] | None:
    """The results of a call whose like is known."""
    repeat = None if key is None else _known.get(key)
    if repeat is None:
        return None
    found = repeat(*tensors)
    if found is not None:
        repeat.tally.count()
    return found


def learn(key: Key | None, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> None:
    """A call with this key has been made; q, k, v are those of the op."""
    if key is None or key in _known:
        return
    if len(_known) >= _KEPT:
        _known.clear()
    launch = torch_ops.launch_of(q, k, v, args)
    maker = None if launch is None else getattr(import_module(launch.row.module), "repeat", None)
    repeat = None if launch is None or maker is None else maker(launch, q, k, v, args)
    if launch is not None and repeat is not None:
        repeat.tally = launch.tally
    _known[key] = repeat
