"""torch's own `scaled_dot_product_attention` call sites on polyflash, with exactly torch's meaning.

    from polyflash.integrations import sdpa

    with sdpa.enabled():
        model(x)                # F.scaled_dot_product_attention in here, and nn.MultiheadAttention

    sdpa.activate()             # or process-wide, through torch's registry of flash implementations
    sdpa.deactivate()

`is_causal` is aligned top-left here, as torch has it: row i sees keys 0 to i. A call that polyflash does not
run goes to torch's own function, arguments that torch refuses included, so the errors are torch's too."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyflash import counting, torch_ops
from polyflash.api import attention
from polyflash.arguments import Causal
from polyflash.backends import TABLE
from polyflash.errors import UnsupportedError
from polyflash.integrations import flash_registry, multi_head
from polyflash.spec import Phase
from polyflash.target import detect

__all__ = ("activate", "deactivate", "enabled", "scaled_dot_product_attention")

_TORCHS_OWN = functional.scaled_dot_product_attention
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


@torch.compiler.assume_constant_result
def _largest_head_dim(kind: str, index: int, dtype: torch.dtype) -> int:
    """The largest head_dim of `dtype` that a kernel takes on a device; 0 if none does. What only the torch
    backend could run is left to torch, which is faster."""
    return _known_kernels(kind, index).get(dtype, 0)


def _kernels_of(kind: str, index: int) -> dict[torch.dtype, int]:
    """The largest head_dim that the kernels for a device of this machine take, by dtype."""
    try:
        here = detect(kind, index)
    except (AssertionError, RuntimeError):  # a fake tensor's device need not be here
        return {}
    rows = [row for row in TABLE if row.phase is Phase.FORWARD and row.backend != "torch"]
    found: dict[torch.dtype, int] = {}
    for row in rows:
        yields = any(not y.target_feature and row.features <= y.features for y in row.yields)
        if here.name.startswith(row.targets) and all(map(here.has_package, row.needs)) and not yields:
            for dtype in (getattr(torch, name) for name in row.dtypes):
                found[dtype] = max(found.get(dtype, 0), row.max_head_dim)
    return found


_known_kernels = cache(_kernels_of)


def enabled(*, strict: bool = False) -> TorchFunctionMode:
    """A context in which `torch.nn.functional.scaled_dot_product_attention` runs polyflash.

    The context covers this thread alone. It nests, and may stand inside or around a `torch.compile`d
    function, which is compiled once for each. `F.multi_head_attention_forward` (`nn.MultiheadAttention`,
    `nn.Transformer*Layer`) is covered by itself, since torch hides the attention inside it from function
    modes.

    Args:
        strict: raise `UnsupportedError`, with the reason, for a legal call that goes to torch's own function.
    """
    return Override(partial(_replaced, strict))


class Override(TorchFunctionMode):
    """Calls of `scaled_dot_product_attention` go to `attend`, those within `nn.MultiheadAttention` too."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _TORCHS_OWN:
            return self.attend(*args, **kwargs)
        if func is Tensor.unflatten:
            return torch.unflatten(*args, **kwargs)  # torch.compile cannot trace the method from here
        if func in _ENGINE and not torch.compiler.is_compiling():
            with self:
                return _ENGINE[func](*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            out = multi_head.forward(self.attend, *args, **kwargs)
            if isinstance(out, Tensor):
                return out, None
            result = func(*args, **kwargs)
            counting.leave("multi_head_attention", out)  # torch may have refused it
            return result
        return func(*args, **kwargs)


def _through(function: Any) -> Any:
    """Copies an autograd function so that it does not hand itself over to function modes, which can then see
    what checkpoints recompute inside it."""
    code = function.__code__
    asked = [name for name in code.co_names if name.startswith("has_torch_function")]
    others = {**function.__globals__, **dict.fromkeys(asked, lambda _: False)}
    return FunctionType(code, others, function.__name__, function.__defaults__, function.__closure__)


_ENGINE = {f: _through(f) for f in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)}


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.scaled_dot_product_attention` by name and meaning, run by polyflash where it can.

    Args:
        query: (..., num_q_heads, seqlen_q, head_dim), two dimensions or more; batch and heads broadcast.
        key: (..., num_kv_heads, seqlen_k, head_dim).
        value: (..., num_kv_heads, seqlen_k, head_dim_v).
        attn_mask: bool, True = attend, or float32 or dtype of query, added; broadcastable to the scores.
        dropout_p: weights are dropped by polyflash's rule, by a seed drawn from torch's default generator.
        is_causal: row i sees keys 0 to i.
        enable_gqa: num_q_heads is a multiple of num_kv_heads, as in `attention`.

    Returns:
        (..., num_q_heads, seqlen_q, head_dim_v). A row that sees no key is 0.

    Raises:
        TypeError, RuntimeError, IndexError: torch's own, from torch's own function."""
    return _replaced(False, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _replaced(
    strict: bool, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0,
    is_causal: Any = False, scale: Any = None, enable_gqa: Any = False, by: str = "sdpa",
) -> Tensor:  # fmt: skip
    why = _refusal(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if not why:
        views = _four_dimensions(query, key, value, attn_mask, bool(enable_gqa))
        if views is None:
            why = "shapes: torch refuses them, or its function has a meaning of its own for them"
        else:
            try:
                return _attend(views, dropout_p, is_causal, scale)
            except UnsupportedError as error:
                why = str(error)
    out = _TORCHS_OWN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    counting.leave(by, why)
    if strict:
        raise UnsupportedError(f"scaled_dot_product_attention: torch's own function ran this call. {why}")
    return out


def _attend(views: tuple[Any, ...], dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    q, k, v, fitted, lead = views
    mask, bias = (fitted, None) if fitted is not None and fitted.dtype is torch.bool else (None, fitted)
    causal: Causal = "top_left" if is_causal else False
    out = attention(q, k, v, causal=causal, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    return out if lead is None else out.reshape(*lead, *out.shape[-2:])


def _refusal(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any
) -> str:
    """Says why a call is left to torch, shapes aside; empty if it is not."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    for x in tensors:
        if type(x) not in _PLAIN or x.layout is not torch.strided or x.is_nested:
            return "arguments: one is not a plain dense tensor"
        if x.device != query.device:
            return "device: tensors are on several"
    if type(is_causal) is not bool or type(dropout_p) not in (float, int):
        return "is_causal, dropout_p: not a bool and a number"
    if attn_mask is not None and is_causal:
        return "attn_mask: given beside is_causal, which torch allows for some shapes only"
    if not 0 <= dropout_p < 1:
        return "dropout_p: outside [0, 1)"
    if type(scale) in (float, int):
        if not math.isfinite(scale):
            return "scale: not finite"
    elif scale is not None and not isinstance(scale, torch.SymFloat):
        return "scale: not a number"
    named = False
    if not torch.compiler.is_compiling():  # none can be traced
        if not torch._C._get_flash_sdp_enabled():
            return "sdpa_kernel: it allows no flash attention"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "torch.func: a transform is active"
        named = bool(torch_ops.backend_in_use.get())
    return _refused_by_table(query, key, value, attn_mask, named)


def _refused_by_table(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, named: bool
) -> str:
    q, k, v, device = query.dtype, key.dtype, value.dtype, query.device
    allowed: tuple[torch.dtype, ...] = (torch.bool, torch.float32, q)
    if torch_ops.autocasting(device.type):
        cast = torch.get_autocast_dtype(device.type)
        narrow = (torch.float32, torch.bfloat16, torch.float16)
        q, k, v = (cast if kind in narrow else kind for kind in (q, k, v))
        allowed = (torch.bool, *narrow)
    if q is not k or q is not v:
        return "dtype: query, key and value differ"
    if attn_mask is not None and attn_mask.dtype not in allowed:
        return "dtype: of attn_mask"
    if named:
        return ""
    most = _largest_head_dim(device.type, device.index or 0, q)
    faster = "torch's own is faster than the torch row"
    if not most:
        return f"dtype: no kernel for {q} on this device, {device.type}; {faster}"
    if query.ndim and value.ndim and max(query.shape[-1], value.shape[-1]) > most:
        return f"head_dim: kernels for this {device.type} take up to {most}; {faster}"
    return ""


def _four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Any, ...] | None:
    """Makes query, key, value and the mask what `attention` takes, and adds the shape before the result's
    last two dimensions, None where it is right already. Returns None if the shapes are not for polyflash."""
    if attn_mask is None and _are_plain(query.shape, key.shape, value.shape, enable_gqa):
        return query, key, value, None, None
    if min(query.ndim, key.ndim, value.ndim) < (3 if enable_gqa else 2):
        return None
    scores = max(query.ndim, key.ndim)
    ndim = max(scores, value.ndim)
    q, k, v = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or not q.shape[-1] or not v.shape[-1]:
        return None
    heads = _heads(q, k, v, enable_gqa)
    lead = _broadcast(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if heads is None or lead is None:
        return None
    if attn_mask is not None:
        of_scores = (*(_broadcast(q.shape[:-3], k.shape[:-3]) or ()), heads[3], q.shape[-2], k.shape[-2])
        if not 2 <= attn_mask.ndim <= scores or _broadcast(attn_mask.shape, of_scores) != of_scores:
            return None
    q, k, v = (_flat(x, lead, n) for x, n in zip((q, k, v), heads[:3], strict=True))
    shape = None if ndim == 4 else (*lead, heads[0])[: None if ndim > 2 else 0]
    return q, k, v, _flat_mask(attn_mask, lead), shape


def _are_plain(q: torch.Size, k: torch.Size, v: torch.Size, enable_gqa: bool) -> bool:
    """Recognises the usual case: four dimensions, and nothing to broadcast."""
    if not len(q) == len(k) == len(v) == 4 or k[:3] != v[:3]:
        return False
    heads = q[1] == k[1] or (enable_gqa and k[1] > 0 and q[1] % k[1] == 0)
    return heads and q[0] == k[0] and q[3] == k[3] and q[1] > 0 and q[3] > 0 and v[3] > 0


def _heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[int, int, int, int] | None:
    """Heads to expand q, k and v to, and those of the scores."""
    of_q, of_k, of_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if not (of_q and of_k and of_v):
        return None
    if enable_gqa:
        return (of_q, of_k, of_k, of_q) if of_k == of_v and of_q % of_k == 0 else None
    scores, every = _broadcast((of_q,), (of_k,)), _broadcast((of_q,), (of_k,), (of_v,))
    if scores is None or every is None:
        return None
    shared = of_k if of_k == of_v else every[0]  # one head for all queries is a group
    return every[0], shared, shared, scores[0]


def _broadcast(*shapes: Any) -> tuple[int, ...] | None:
    """Finds the shape that all broadcast to, or None."""
    ndim = max(map(len, shapes))
    whole = []
    for sizes in zip(*((1,) * (ndim - len(s)) + tuple(s) for s in shapes), strict=True):
        size = 1
        for n in sizes:
            if n != 1:
                if size != 1 and n != size:
                    return None
                size = n
        whole.append(size)
    return tuple(whole)


def _flat(x: Tensor, lead: tuple[int, ...], heads: int) -> Tensor:
    """(batch, heads, seqlen, channels): leading dimensions broadcast and joined."""
    if x.shape[:-2] != (*lead, heads):
        x = x.expand(*lead, heads, *x.shape[-2:])
    return x if len(lead) == 1 else x.reshape(math.prod(lead), *x.shape[-3:])


def _flat_mask(mask: Tensor | None, lead: tuple[int, ...]) -> Tensor | None:
    if mask is None or mask.ndim <= 3 or len(lead) == 1:
        return mask
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*lead, *mask.shape[-3:]).reshape(math.prod(lead), *mask.shape[-3:])


def activate() -> None:
    """Make polyflash torch's flash attention, on CPUs and on GPUs, for the whole process, until
    `deactivate()`.

    Goes through `torch.nn.attention.activate_flash_attention_impl`, and so ends any other implementation's
    activation. Costs nothing elsewhere, and reaches every thread and the fused modules. torch still decides
    which calls are for flash attention: four dimensions and no gradient of a mask; on a CPU no dropout; on a
    GPU float16 or bfloat16, no mask, and a head_dim up to 256, the same for all three. On a GPU flash
    attention then stands first in torch's order of kernels, where cuDNN may stand otherwise.

    Raises:
        UnsupportedError: this torch has no such registry."""
    on_gpus = torch.cuda.is_available() and bool(_kernels_of("cuda", torch.cuda.current_device()))
    registry = flash_registry.registry()
    name = flash_registry.NAME
    registry.register_flash_attention_impl(name, register_fn=lambda: flash_registry.register(on_gpus))
    registry.activate_flash_attention_impl(name)


def deactivate() -> None:
    """Undo `activate()`; nothing happens if another implementation, or none, is active."""
    registry = flash_registry.registry()
    if registry.current_flash_attention_impl() == flash_registry.NAME:
        registry.restore_flash_attention_impl()
