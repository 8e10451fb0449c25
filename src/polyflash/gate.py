"""Gate of the short ways: ordinary tensors, in a call that nobody but a kernel would see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _dispatch_keys
from torch.autograd import forward_ad, profiler

from polyflash.routes import backend_in_use, takes_tf32

_compiling, _tracing = torch.compiler.is_compiling, torch._C._get_tracing_state
_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_autocasting, _strided = torch.is_autocast_enabled, torch.strided
_KINDS = (Tensor, torch.nn.Parameter)


def unobserved() -> bool:
    """Would nobody but a kernel see an op now: no mode, profiler or trace?"""
    return not (_modes() or profiler._is_profiler_enabled) and _tracing() is None


def quiet(q: Tensor, *others: Any) -> tuple[Any, ...] | None:
    """dtypes, device and backend in use of a call that is neither seen, compiled, transformed, cast nor
    differentiated, and whose tensors are ordinary ones of one CPU or GPU, as far as their attributes tell;
    else None. Whoever runs a kernel for the first time asks `is_plain` too, which takes longer."""
    if (
        _compiling() or _tracing() is not None or _transform() is not None or _modes()
        or profiler._is_profiler_enabled or forward_ad._current_level >= 0 or q.requires_grad
    ):  # fmt: skip
        return None
    device = q.device
    if _autocasting("cpu") if q.is_cpu else not q.is_cuda or _autocasting("cuda"):
        return None
    kinds: list[Any] = [device, backend_in_use.get(), takes_tf32(q)]
    for x in (q, *others):
        if (
            type(x) is not Tensor or x.requires_grad or x.layout is not _strided or x.is_nested or x.is_neg()
            or x._is_zerotensor() or x.device != device
        ):  # fmt: skip
            return None
        kinds.append(x.dtype)
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
