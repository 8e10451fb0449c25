"""Statistics of the weights of an attention call, without storing them: sums per key, entropy and largest
score per row. One extra pass over q and k each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyflash import routes, torch_ops, validate
from polyflash.arguments import Causal, Layout, Options, WindowSides
from polyflash.entry import Form, autocast, bind, form_of
from polyflash.errors import UnsupportedError, described, spec_error
from polyflash.mask import Mask
from polyflash.quant.tensor import KV, values_of
from polyflash.results import Room
from polyflash.spec import Arguments, Phase
from polyflash.storages import check_storages


class RowStats(NamedTuple):
    """Per row, (batch, num_q_heads, seqlen_q), packed (num_q_heads, total_q); float32, float64 for float64 q.

    entropy: -Σ p·ln p of a row's weights in nats, 0 for a row that sees no key. max_logit: the largest of its
    scores, as they enter the softmax; -inf for such a row."""

    entropy: Tensor
    max_logit: Tensor


def column_sums(
    q: Tensor, k: KV, lse: Tensor, *, causal: Causal = False, window: WindowSides | None = None,
    mask: Tensor | Mask | None = None, bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    softcap: float = 0.0, scale: float | None = None, kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None, q_offset: int | Tensor | None = None, layout: Layout = "bhsd",
    backend: str | None = None, config: Any = None, checked: bool = False, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
) -> Tensor:  # fmt: skip
    """How much attention each key received: Σ over query rows of exp(score - lse), per query head.

    The arguments are those of the `attention` call that returned `lse`, or with cu_seqlens those of
    `attention_varlen`. A sink is in `lse` already, so it takes none; dropout is not applied. Rows that see no
    key add nothing; keys that no row sees get exactly 0. With the lse of a `merge` over several key sets,
    each set's sums are their shares of the whole. Never differentiable: the result requires no gradient.

    Args:
        q: (batch, num_q_heads, seqlen_q, head_dim), in `layout`; with cu_seqlens (total_q, num_q_heads,
            head_dim).
        k: (batch, num_kv_heads, seqlen_k, head_dim), likewise.
        lse: (batch, num_q_heads, seqlen_q) in either layout, with cu_seqlens (num_q_heads, total_q).

    Returns:
        (batch, num_q_heads, seqlen_k), with cu_seqlens (num_q_heads, total_k); float32, float64 for float64
        q. For one sum per kv head: `.unflatten(1, (num_kv_heads, -1)).sum(2)`.

    Raises:
        SpecError, UnsupportedError: as `attention`."""
    options = Options(
        causal=causal, window=window, mask=mask, bias=bias, alibi_slopes=alibi_slopes, softcap=softcap,
        scale=scale, kv_lens=kv_lens, kv_starts=kv_starts, q_offset=q_offset, backend=backend,
        config=config, checked=checked, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return _results("column_sums", q, k, lse, layout, options)[0]


def row_stats(
    q: Tensor, k: KV, lse: Tensor, *, causal: Causal = False, window: WindowSides | None = None,
    mask: Tensor | Mask | None = None, bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, scale: float | None = None,
    kv_lens: Tensor | None = None, kv_starts: Tensor | None = None, q_offset: int | Tensor | None = None,
    layout: Layout = "bhsd", backend: str | None = None, config: Any = None, checked: bool = False,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> RowStats:  # fmt: skip
    """Entropy of each row's weights, in nats, and the largest of its scores.

    The arguments are those of the `attention` call that returned `lse`, as in `column_sums`. A score is what
    enters the softmax: scaled, soft-capped, with bias and ALiBi. With `sinks` a row's distribution has one
    outcome more, the sink's, whose term is in the entropy; it is no score and never the maximum. Never
    differentiable.

    Args:
        q, k, lse: as in `column_sums`.
        sinks: (num_q_heads,), those of the attention call.

    Returns:
        `RowStats(entropy, max_logit)`, each shaped as lse.

    Raises:
        SpecError, UnsupportedError: as `attention`."""
    options = Options(
        causal=causal, window=window, mask=mask, bias=bias, alibi_slopes=alibi_slopes, softcap=softcap,
        sinks=sinks, scale=scale, kv_lens=kv_lens, kv_starts=kv_starts, q_offset=q_offset, backend=backend,
        config=config, checked=checked, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return RowStats(*_results("row_stats", q, k, lse, layout, options))


def _results(
    name: str, q: Tensor, k: Any, lse: Tensor, layout: Layout, options: Options
) -> tuple[Tensor, ...]:
    """The results of the op `name`; q and k are cast as `attention` casts them under torch.autocast."""
    if not isinstance(lse, Tensor):
        change = "Pass the lse of attention(..., return_lse=True)."
        raise spec_error("lse", type(lse).__name__, "a torch.Tensor", change)
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(f"polyflash.{name} has no rule for torch.func: call it outside the transform")
    form, packed = Form.PACKED, not (options.cu_seqlens_q is options.cu_seqlens_k is None)
    if not packed:
        form = form_of(layout)
    elif not isinstance(layout, str) or layout != "bhsd":
        change = "Drop it: packed q and k are (total, heads, head_dim)."
        raise spec_error("layout", described(layout), "none beside cu_seqlens", change)
    elif lse.ndim != 2:
        change = "Pass the lse of attention_varlen()."
        raise spec_error("lse", f"{lse.ndim} dimensions", "2: (num_q_heads, total_q)", change)
    k = values_of(k)
    q, k, _, _, args, _ = bind(q, k, k, options, form)
    q, k, _ = autocast(q, k, k)
    op = getattr(torch.ops.polyflash, name).default
    with torch.no_grad():
        results = op(q, k, lse.unsqueeze(0) if packed else lse, *args)
    results = (results,) if isinstance(results, Tensor) else results
    return tuple(x[0] for x in results) if packed else results


# The ops, as `torch_ops` has them for attention: they make the weights again from the lse, tile by tile.
_LIB = torch.library.Library("polyflash", "FRAGMENT")
_INPUTS = f"Tensor q, Tensor k, Tensor lse, {torch_ops.ARGUMENTS}"
_LIB.define(f"column_sums({_INPUTS}) -> Tensor")
_LIB.define(f"row_stats({_INPUTS}) -> (Tensor entropy, Tensor max_logit)")


# The value of each result of a call without rows or keys: sums, entropy, largest score; None: not asked for.
_EMPTY = {"column_sums": (0.0, None, None), "row_stats": (None, 0.0, -torch.inf)}


def _room(name: str, k: Tensor, lse: Tensor) -> Room:
    shapes = (*lse.shape[:2], k.shape[2]), lse.shape, lse.shape
    pairs = zip(shapes, _EMPTY[name], strict=True)
    sums, entropy, top = (None if empty is None else lse.new_empty(shape) for shape, empty in pairs)
    return sums, entropy, top


def _asked(room: Room) -> Any:
    """Sums, (batch, num_q_heads, seqlen_k), or entropy and largest score, both shaped as lse."""
    sums, *of_rows = room
    return tuple(of_rows) if sums is None else sums


def _kernel(name: str) -> Callable[..., Any]:
    def kernel(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> Any:
        args = Arguments(*rest)
        args = args._replace(backend=routes.requested_backend(args))
        launch = torch_ops._route(Phase.STATISTICS, q, k, k, args, tuple(args))
        validate.check_results(q, k, {"lse": lse})
        check_storages({"lse": lse})
        args = validate.checked_contents(args, q, k) if launch.contents else args
        room = _room(name, k, lse)
        if lse.numel() and k.shape[2]:
            torch_ops.launched(launch, q, k, lse, room, args)
        else:
            for x, empty in zip(room, _EMPTY[name], strict=True):
                if x is not None and empty is not None:
                    x.fill_(empty)
        return _asked(room)

    return kernel


def _fake(name: str) -> Callable[..., Any]:
    def fake(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> Any:
        args = Arguments(*rest)
        torch_ops.check(q, k, k, args)
        torch_ops._refuse_statically(Phase.STATISTICS, q, k, k, args)
        validate.check_results(q, k, {"lse": lse})
        return _asked(_room(name, k, lse))

    return fake


for _name in _EMPTY:
    _LIB.impl(_name, _kernel(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"polyflash::{_name}", _fake(_name), lib=_LIB)
