"""The gate of the short ways, the key of a call's route, and the spec that is planned when a route is made.

A key is the backend asked for, and classes of sizes and operands, never a length. The gate tells ordinary
tensors, in a call that nobody but a kernel would see."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _dispatch_keys
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_hooks
from torch.autograd import forward_ad, profiler

from polyflash import backends, env
from polyflash.errors import spec_error
from polyflash.operands import DIFFERENTIABLE, features_of
from polyflash.quant.scheme import codes_of
from polyflash.spec import MANY_KEYS, Arguments, AttentionSpec, Feature, Phase, is_decode, length_class

# Read inside the op, so that a compiled graph obeys it at run time and has nothing to trace.
_DEFAULT_BACKEND = env.BACKEND.read()
backend_in_use: ContextVar[str] = ContextVar("polyflash_backend", default=_DEFAULT_BACKEND)
ANY = "any"  # as a backend of the op: a free choice, whatever the context says


def requested_backend(args: Arguments) -> str:
    """The backend asked for by name: by the call, else by `use_backend`, else by the environment; or ""."""
    backend = args.backend or backend_in_use.get()
    if backend == ANY:
        return ""
    if backend and backend not in backends.BACKENDS:
        change = "Set it to one of these, or unset it."
        raise spec_error(env.BACKEND.name, repr(backend), ", ".join(backends.BACKENDS), change)
    return backend


def takes_tf32(q: Tensor) -> bool:
    """Whether torch's switch lets float32 products of a GPU be rounded to TF32
    (`torch.set_float32_matmul_precision`). It may change between calls: every one that it is for reads it."""
    if q.dtype is not torch.float32 or not q.is_cuda:
        return False
    read = getattr(torch._C, "_get_fp32_precision_getter", None)  # from torch 2.9 on
    if read is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(read("cuda", "matmul") == "tf32")


def any_requires_grad(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> bool:
    """Does a differentiable operand require a gradient?"""
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    for name in DIFFERENTIABLE:
        x = getattr(args, name)
        if x is not None and x.requires_grad:
            return True
    return False


def head_dim_v_of(v: Tensor, args: Arguments) -> int:
    """Channels of the result: those of v, which codes may hold two to an element."""
    codes = codes_of(args.codes)[1] if args.codes else None
    return v.shape[3] if codes is None else v.shape[3] * codes.packed


def members_of(args: Arguments) -> tuple[int, int | None]:
    """How many packed members a call has, 0 if they are not packed, and the keys of the longest, if known."""
    return 0 if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0] - 1, args.max_seqlen_k


def spec_of(
    q: Tensor, k: Tensor, v: Tensor, args: Arguments, *, phase: Phase = Phase.FORWARD
) -> AttentionSpec:
    """The spec of a call; q, k, v may be meta tensors."""
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    _, num_kv_heads, seqlen_k, _ = v.shape
    members = members_of(args)[0]
    page_size = 0
    if args.page_table is not None:
        page_size, seqlen_k = seqlen_k, args.page_table.shape[1] * seqlen_k
    sizes = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes["head_dim_v"] = head_dim_v_of(v, args)
    known: dict[str, Any] = {"dtype": str(q.dtype).removeprefix("torch."), "device": q.device.type}
    known |= {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **sizes}
    known |= {"causal": args.causal, "window": (args.window_left, args.window_right), "offset": args.offset}
    known |= {"scale": args.scale, "tf32": takes_tf32(q), "members": members, "page_size": page_size}
    known |= {"codes": args.codes, "max_seqlen_q": args.max_seqlen_q, "max_seqlen_k": args.max_seqlen_k}
    needs_grad = any_requires_grad(q, k, v, args)
    return AttentionSpec(phase, features=features_of(args, **sizes), needs_grad=needs_grad, **known)


def without_gradients(spec: AttentionSpec) -> AttentionSpec:
    """The forward spec of a call that needs none, in the phase it is planned for."""
    s, bounded = spec, Feature.ROW_BOUNDS in spec.features
    if Feature.VARLEN in s.features or not is_decode(
        s.num_q_heads, s.num_kv_heads, s.seqlen_q, s.seqlen_k, bounded, s.device
    ):
        return spec
    return replace(spec, phase=Phase.DECODE)


def class_of(x: Any) -> Any:
    """The class of an argument for a route: presence and dtype of tensors, zero or not of floats, never
    a length."""
    if x is None or x is True or x is False:
        return x
    kind = type(x)
    return x if kind is str else x != 0.0 if kind is float else x.dtype if isinstance(x, Tensor) else int


def longest_class(args: Arguments) -> tuple[int | None, bool | None]:
    """The length classes of packed members, as `length_class` and MANY_KEYS give them for a batch."""
    longest_q, longest_k = args.max_seqlen_q, args.max_seqlen_k
    rows = None if longest_q is None else length_class(longest_q)
    return rows, None if longest_k is None else longest_k >= MANY_KEYS


# The gate

compiling, tracing = torch.compiler.is_compiling, torch._C._get_tracing_state
_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_included, _EARLY = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
_autocasting, _strided = torch.is_autocast_enabled, torch.strided
_KINDS = (Tensor, torch.nn.Parameter)


def unobserved() -> bool:
    """Would nobody but a kernel see an op now: no mode, profiler or trace?"""
    return not (_modes() or _included(_EARLY) or profiler._is_profiler_enabled) and tracing() is None


def quiet(q: Tensor, *others: Any, trained: bool = False) -> tuple[Any, ...] | None:
    """dtypes, device and backend in use of a call that is neither seen, compiled, transformed, cast nor, but
    with `trained`, differentiated, and whose tensors are ordinary ones of one CPU or GPU, as far as their
    attributes tell; else None. At its end is True if the call is differentiated. Whoever runs a kernel for
    the first time asks `is_plain` too, which takes longer."""
    if compiling() or tracing() is not None or _transform() is not None or _modes():
        return None
    if _included(_EARLY) or profiler._is_profiler_enabled or forward_ad._current_level >= 0:
        return None
    device = q.device
    if _autocasting("cpu") if q.is_cpu else not q.is_cuda or _autocasting():  # CUDA's without a name
        return None
    kinds: list[Any] = [device, backend_in_use.get(), q.dtype is torch.float32 and takes_tf32(q)]
    differentiated = False
    for x in (q, *others):
        if type(x) is not Tensor or x.layout is not _strided or x.device != device:
            return None
        if x.is_nested or x.is_neg() or x._is_zerotensor():
            return None
        if x.requires_grad:
            differentiated = True
        kinds.append(x.dtype)
    if differentiated:
        if not (trained and torch.is_grad_enabled()) or saved_hooks(False) is not None:
            return None
        kinds.append(True)
    return tuple(kinds)


def is_plain(x: Any) -> bool:
    """Is `x` an ordinary tensor of a CPU or a GPU: not negated, zero, sparse, nested or wrapped?"""
    return type(x) in _KINDS and (_dispatch_keys(x).raw_repr() in PLAIN_KEYS or _is_first_of_its_device(x))


def plain_keys(device: str | torch.device) -> set[int]:
    """Dispatch keys of an ordinary tensor of a device; a negated, zero, sparse or wrapped one has others."""
    with torch.inference_mode():
        unrecorded = torch.empty(0, device=device)
    with torch.inference_mode(False):
        return {_dispatch_keys(x).raw_repr() for x in (torch.empty(0, device=device), unrecorded)}


PLAIN_KEYS = plain_keys("cpu")
_UNSEEN = {"cuda"}  # device types whose keys their first tensor tells: to ask at import would start the GPU


def _is_first_of_its_device(x: Tensor) -> bool:
    """Is `x` an ordinary tensor, the first of its device type?"""
    if x.device.type not in _UNSEEN:
        return False
    PLAIN_KEYS.update(plain_keys(x.device))
    _UNSEEN.remove(x.device.type)
    return _dispatch_keys(x).raw_repr() in PLAIN_KEYS
