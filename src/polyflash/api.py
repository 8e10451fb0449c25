"""The public functions: arguments as users write them, normalised to the primitives of the one op."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from numbers import Real
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from polyflash import backends, plan, torch_ops, validate
from polyflash import target as targets
from polyflash.errors import SpecError, spec_error
from polyflash.mask import FAR_OFFSET, Mask, checked_window
from polyflash.merge import AttentionOutput
from polyflash.plan import Plan
from polyflash.spec import Arguments, Phase
from polyflash.target import Target

Layout = Literal["bhsd", "bshd"]
Causal = bool | Literal["bottom_right", "top_left"]
WindowSides = tuple[int | None, int | None]


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., window: WindowSides | None = ...,
    mask: Tensor | Mask | None = ..., bias: Tensor | None = ..., alibi_slopes: Tensor | None = ...,
    softcap: float = ..., sinks: Tensor | None = ..., scale: float | None = ..., kv_lens: Tensor | None = ...,
    kv_starts: Tensor | None = ..., q_offset: int | Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ..., layout: Layout = ..., return_lse: Literal[False] = ...,
    out: Tensor | None = ..., batch_invariant: bool | None = ..., backend: str | None = ...,
    config: Any = ..., checked: bool = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., window: WindowSides | None = ...,
    mask: Tensor | Mask | None = ..., bias: Tensor | None = ..., alibi_slopes: Tensor | None = ...,
    softcap: float = ..., sinks: Tensor | None = ..., scale: float | None = ..., kv_lens: Tensor | None = ...,
    kv_starts: Tensor | None = ..., q_offset: int | Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ..., layout: Layout = ..., return_lse: Literal[True],
    out: Tensor | None = ..., batch_invariant: bool | None = ..., backend: str | None = ...,
    config: Any = ..., checked: bool = ...,
) -> AttentionOutput: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: WindowSides | None = None,
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    out: Tensor | None = None,
    batch_invariant: bool | None = None,
    backend: str | None = None,
    config: Any = None,
    checked: bool = False,
) -> Tensor | AttentionOutput:
    """softmax(softcap(scale·q·kᵀ) + bias + ALiBi, mask)·v, in exactly this order on every backend.

    Args:
        q: (batch, num_q_heads, seqlen_q, head_dim), or (batch, seqlen_q, num_q_heads, head_dim) with
            layout="bshd"; float32, bfloat16, float16 or float64; any strides.
        k: (batch, num_kv_heads, seqlen_k, head_dim), dtype of q; num_q_heads is a multiple of num_kv_heads,
            and query head h reads kv head h // (num_q_heads / num_kv_heads).
        v: (batch, num_kv_heads, seqlen_k, head_dim_v), dtype of q.
        causal: True or "bottom_right": key j is visible to row i iff j <= i + (seqlen_k - seqlen_q).
            "top_left": iff j <= i. With `q_offset`: iff j <= i + q_offset.
        window: (left, right) neighbours of a row's position, itself not counted; None is unbounded.
        mask: bool, True = attend, broadcastable to (batch, num_q_heads, seqlen_q, seqlen_k) and never
            expanded; or a `Mask`.
        bias: any float dtype, broadcastable like mask; added to the scaled, soft-capped score; -inf masks.
        alibi_slopes: (num_q_heads,) or (batch, num_q_heads); adds -slope·|i + offset - j|.
        softcap: softcap·tanh(s / softcap) on scaled scores; 0 is off.
        sinks: (num_q_heads,) logits that join the denominator only.
        scale: multiplies q·k; any finite number, default 1/sqrt(head_dim).
        kv_lens: int32 (batch,): live keys of each request; keys beyond are not read.
        kv_starts: int32 (batch,): first live key (left padding); hides keys, moves no position.
        q_offset: position of row 0, int or int32 (batch,); default seqlen_k (live) - seqlen_q, or 0 for
            "top_left".
        dropout_p: probability of dropping a weight; Philox4x32-10 by (seed, batch, head, query, key).
        dropout_seed: int or int64 tensor; None draws one from torch's default generator.
        layout: axis order of q, k, v and the result; never guessed from shapes.
        return_lse: also return the natural-log softmax denominator, (batch, num_q_heads, seqlen_q), fp32
            (fp64 for fp64 inputs), -inf for a row that sees no key.
        out: write the result here; inference only.
        batch_invariant: a request's bits depend on neither its neighbours nor chunking.
        backend: run this backend or raise; None takes the best row for the call.
        config: a backend's Config, as in `explain(...).config`; refused by the others.
        checked: also read and check the contents of length tensors that live on a device (synchronises).

    Returns:
        (batch, num_q_heads, seqlen_q, head_dim_v) in `layout`, dtype and dense stride order of q; with
        return_lse=True an `AttentionOutput(out, lse)`. A row that sees no key is exactly 0.

    Raises:
        SpecError: a shape, dtype, ratio, length or option is wrong; names got, wanted and what to change.
        UnsupportedError: no kernel, or not the requested backend, runs this call; lists every reason.

    Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023); Milakov and Gimelshein, online
    softmax (2018)."""
    given = out
    if layout != "bhsd":
        q, k, v, out = _to_bhsd(layout, q, k, v, out)
    args = _arguments(
        q, k, v, causal, window, mask, bias, alibi_slopes, softcap, sinks, scale, kv_lens, kv_starts,
        q_offset, dropout_p, dropout_seed, return_lse, batch_invariant, backend, config, checked,
    )  # fmt: skip
    if torch_ops.autocasting(q.device.type):
        q, k, v = _autocast(q, k, v)
    if out is None:
        result, lse = torch_ops.call(q, k, v, args)
        if layout != "bhsd":
            result = result.transpose(1, 2)
    else:
        if not isinstance(out, Tensor):
            raise spec_error(
                "out", got=type(out).__name__, wanted="a torch.Tensor", change="Use torch.empty()."
            )
        needs_grad = out.requires_grad or torch_ops.any_requires_grad(q, k, v, args)
        if torch.is_grad_enabled() and needs_grad:
            change = "Use torch.no_grad(), or let the call allocate its result."
            raise spec_error("out", got="tensors that need gradients", wanted="inference", change=change)
        lse = torch_ops.call_out(q, k, v, out, args)
        result = cast(Tensor, given)
    return AttentionOutput(result, lse) if return_lse else result


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: WindowSides | None = None,
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    batch_invariant: bool | None = None,
    backend: str | None = None,
    config: Any = None,
    target: str | Target | None = None,
) -> Plan:
    """Who would run `attention(...)` with these arguments, with which config, and why every other row would
    not.

    Launches nothing and reads no tensor contents: all may be meta tensors. `target` plans for a device
    that need not be here: "cuda:sm90", "cpu:avx512+amx_bf16", or a `Target`. If an input needs a gradient,
    the plan of the backward pass is its `.backward`. The result prints itself.
    """
    if layout != "bhsd":
        q, k, v, _ = _to_bhsd(layout, q, k, v, None)
    args = _arguments(
        q, k, v, causal, window, mask, bias, alibi_slopes, softcap, sinks, scale, kv_lens, kv_starts,
        q_offset, dropout_p, 0 if dropout_seed is None else dropout_seed, return_lse, batch_invariant,
        backend, config, False,
    )  # fmt: skip
    if torch_ops.autocasting(q.device.type):
        q, k, v = _autocast(q, k, v)
    torch_ops.check(q, k, v, args)
    if target is None:
        kind = "cpu" if q.device.type == "meta" else q.device.type
        target = targets.detect(kind, q.device.index or 0)
    elif not isinstance(target, Target):
        target = targets.parse(target)
    return _explained(q, k, v, args, target)


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within this context, calls without `backend=` run on backend `name` or raise; None: free choice again.

    Compiled functions obey it when they are called within it; it cannot itself stand inside `torch.compile`.
    Threads started within it do not inherit it.
    """
    token = torch_ops.backend_in_use.set(_known_backend(name))
    try:
        yield
    finally:
        torch_ops.backend_in_use.reset(token)


def _explained(q: Tensor, k: Tensor, v: Tensor, args: Arguments, target: Target) -> Plan:
    needs_grad = torch.is_grad_enabled() and torch_ops.any_requires_grad(q, k, v, args)
    args = args._replace(need_lse=args.need_lse or needs_grad)
    backend = torch_ops.requested_backend(args)
    backward = None
    if needs_grad:
        spec = torch_ops.spec_of(q, k, v, args, phase=Phase.BACKWARD)
        backward = plan.explain(spec, target, backends.TABLE, backend=backend)
    spec = torch_ops.spec_of(q, k, v, args)
    return plan.explain(spec, target, backends.TABLE, backend=backend, config=args.config, backward=backward)


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    window: WindowSides | None,
    mask: Tensor | Mask | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    scale: float | None,
    kv_lens: Tensor | None,
    kv_starts: Tensor | None,
    q_offset: int | Tensor | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    return_lse: bool,
    batch_invariant: bool | None,
    backend: str | None,
    config: Any,
    checked: bool,
) -> Arguments:
    """The user's arguments as the op's primitives; what needs no tensor is checked here."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise validate.explain_shapes(q, k, v)
    q_segments = k_segments = None
    if mask is not None and not isinstance(mask, Tensor):
        structured = _conjunction(mask, causal, window, kv_lens, kv_starts)
        causal = cast(Causal, structured.alignment or False)
        window = structured.window_sides
        kv_lens, kv_starts = structured.kv_lens, structured.kv_starts
        q_segments, k_segments = structured.q_ids, structured.k_ids
        mask = None
    offset = None
    if causal is not False and causal is not True:
        offset = _offset_of(causal)
        causal = True
    if q_offset is not None:
        if isinstance(q_offset, Tensor):
            offset = None
        else:
            offset, q_offset = _checked_int("q_offset", q_offset), None
            offset = max(-FAR_OFFSET, min(offset, FAR_OFFSET))
    operands = (kv_lens, kv_starts, q_offset, mask, bias, alibi_slopes, sinks, q_segments, k_segments)
    if operands.count(None) != len(operands):
        _check_tensors(operands)
    left, right = (None, None) if window is None else checked_window(window)
    dropout_p = _number("dropout_p", dropout_p)
    dropout_seed = _seed(dropout_seed) if dropout_p else None
    backend = _known_backend(backend)
    if config is not None:
        config = plan.encode_config(config)
    return Arguments(
        causal, scale if scale is None else _number("scale", scale), return_lse, left, right, offset, kv_lens,
        kv_starts, q_offset, mask, bias, alibi_slopes, sinks, q_segments, k_segments,
        _number("softcap", softcap), dropout_p, dropout_seed, bool(batch_invariant), bool(checked),
        backend, config or "",
    )  # fmt: skip


_OPERANDS = (
    *("kv_lens", "kv_starts", "q_offset", "mask", "bias", "alibi_slopes", "sinks"),
    *("q_segments", "k_segments"),
)


def _check_tensors(operands: tuple[Any, ...]) -> None:
    for name, x in zip(_OPERANDS, operands, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise spec_error(
                name, got=type(x).__name__, wanted="a torch.Tensor", change="Use torch.tensor()."
            )


def _conjunction(
    mask: Any, causal: Causal, window: Any, kv_lens: Tensor | None, kv_starts: Tensor | None
) -> Mask:
    """A `Mask` argument and the keyword arguments that say the same things, as one `Mask`."""
    if not isinstance(mask, Mask):
        change = "True = attend."
        raise spec_error(
            "mask", got=type(mask).__name__, wanted="a bool tensor or a polyflash.Mask", change=change
        )
    whole = mask & Mask.lengths(kv_lens, kv_starts)
    if causal is not False:
        whole = whole & Mask.causal("bottom_right" if causal is True else causal)
    return whole if window is None else whole & Mask.window(*checked_window(window))


def _offset_of(causal: Any) -> int | None:
    if causal == "bottom_right":
        return None
    if causal == "top_left":
        return 0
    wanted = "False, True, 'bottom_right' or 'top_left'"
    raise spec_error("causal", got=repr(causal), wanted=wanted, change="True means 'bottom_right'.")


def _checked_int(name: str, value: Any) -> Any:
    if isinstance(value, (int, torch.SymInt)) and torch.compiler.is_compiling():
        return value  # an int that may change is not to become a constant
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        wanted = "an int or an int32 tensor (batch,)"
        raise spec_error(name, got=type(value).__name__, wanted=wanted, change="Use int().")
    value = operator.index(value)
    if not -(2**63) <= value < 2**63:
        raise spec_error(name, got=value, wanted="a 64-bit int", change="Far positions are all alike.")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymFloat)):
        raise spec_error(name, got=type(value).__name__, wanted="a number", change="Use float().")
    return float(value)


def _seed(seed: int | Tensor | None) -> Tensor:
    """An int64 scalar tensor on the CPU; drawn from torch's default generator if not given."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    if isinstance(seed, Tensor):
        if seed.dtype is not torch.int64 or seed.numel() != 1:
            got = f"{seed.dtype} {tuple(seed.shape)}"
            raise spec_error("dropout_seed", got=got, wanted="one int64", change="Use torch.tensor(seed).")
        return seed.reshape(())
    return torch.tensor(_checked_int("dropout_seed", seed), dtype=torch.int64)


def _known_backend(name: str | None) -> str:
    if name is None or name == "":
        return ""
    if name not in backends.BACKENDS:
        wanted = f"one of {', '.join(backends.BACKENDS)}, or None"
        raise spec_error(
            "backend", got=repr(name), wanted=wanted, change="None takes the best row for the call."
        )
    return name


def _to_bhsd(layout: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> tuple[Any, ...]:
    """Views of (batch, seqlen, heads, head_dim) tensors as (batch, heads, seqlen, head_dim)."""
    if layout != "bshd":
        change = "It is never guessed from shapes."
        raise spec_error("layout", got=repr(layout), wanted="'bhsd' or 'bshd'", change=change)
    views = []
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if x is not None and getattr(x, "ndim", 4) != 4:
            raise SpecError(
                f"{name}: got {x.ndim} dimensions, wanted 4: (batch, seqlen, heads, head_dim). Use view()"
            )
        views.append(x.transpose(1, 2) if isinstance(x, Tensor) else x)
    return tuple(views)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast q, k, v are cast as for torch SDPA: every float but float64, to the autocast
    dtype."""
    kind = torch.get_autocast_dtype(q.device.type)
    return tuple(
        x.to(kind) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in (q, k, v)
    )
