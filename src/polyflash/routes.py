"""The key of a call's route: the backend asked for, and classes of its sizes and operands, never a
length. And the spec that is planned when a route is made."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyflash import backends, env
from polyflash.errors import spec_error
from polyflash.operands import DIFFERENTIABLE, features_of
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


def spec_of(
    q: Tensor, k: Tensor, v: Tensor, args: Arguments, *, phase: Phase = Phase.FORWARD
) -> AttentionSpec:
    """The spec of a call; q, k, v may be meta tensors."""
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    _, num_kv_heads, seqlen_k, head_dim_v = v.shape
    members = 0 if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0] - 1
    page_size = 0
    if args.page_table is not None:
        page_size, seqlen_k = seqlen_k, args.page_table.shape[1] * seqlen_k
    sizes = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes["head_dim_v"] = head_dim_v
    return AttentionSpec(
        phase=phase, dtype=str(q.dtype).removeprefix("torch."), device=q.device.type, batch=batch,
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes, features=features_of(args, **sizes),
        causal=args.causal, window=(args.window_left, args.window_right), offset=args.offset,
        scale=args.scale, tf32=takes_tf32(q), needs_grad=any_requires_grad(q, k, v, args), members=members,
        max_seqlen_q=args.max_seqlen_q, max_seqlen_k=args.max_seqlen_k, page_size=page_size,
    )  # fmt: skip


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
