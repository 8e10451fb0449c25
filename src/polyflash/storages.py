"""The part of a storage that a tensor reaches, for strides of any size and storages made smaller later."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor

from polyflash.errors import spec_error
from polyflash.spec import Arguments

_HUGE = 2 << 20  # bytes of a huge page
_dispatching, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_transform = torch._C._functorch.peek_interpreter_stack


def span(x: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    if x.is_contiguous() or x.numel() == 0:
        return x.numel() * x.itemsize
    strides = x.stride()
    reach = sum(map(mul, x.shape, strides)) - sum(strides)  # Σ (size - 1)·stride
    return (reach + 1) * x.itemsize


_FAR = 1 << 56  # no two elements lie so many apart, so a stride of as many steps over nothing


def near(x: Any) -> Any:
    """A tensor, or `Arguments` of them, with 0 for the strides of size-1 dimensions that 64 bits cannot hold
    in bytes; anything else as it is."""
    if isinstance(x, Arguments):
        return Arguments(*map(near, x))
    if not isinstance(x, Tensor) or max(x.stride(), default=0) < _FAR:
        return x
    return x.as_strided(x.shape, [0 if s >= _FAR else s for s in x.stride()])


def stored(*tensors: Any) -> bool:
    """Does the storage of each tensor reach to its last element? One made smaller later (FSDP frees those of
    parameters) does not, and torch says nothing. What is no tensor has none."""
    for x in tensors:
        if x is None or not isinstance(x, Tensor):  # None is told apart much faster
            continue
        if not x.storage_offset() and x.is_contiguous():
            if x.numel() * x.itemsize > x.untyped_storage().nbytes():  # `nbytes` knows no symbolic sizes
                return False
        elif not holds(x, span(x)) and x.numel():
            return False
    return True


def is_readable(x: Any) -> bool:
    """Is x a tensor of memory that a kernel may read, in a call that nobody sees?"""
    if type(x) is not Tensor or _dispatching() or _transform() is not None or _tracing() is not None:
        return False
    return not (x.is_neg() or x._is_zerotensor()) and stored(x)


def holds(x: Tensor, size: int) -> bool:
    """Does the storage of `x` reach so many bytes from its first element on?"""
    return x.storage_offset() * x.itemsize + size <= x.untyped_storage().nbytes()


def hold(tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Does the storage of each tensor reach so many bytes from its first element on?"""
    for x, size in zip(tensors, sizes, strict=False):
        first = x.storage_offset()
        if (first and first * x.itemsize) + size > x.untyped_storage().nbytes():
            return False
    return True


def check_storages(tensors: dict[str, Any]) -> None:
    """Refuses what is not `stored`, by name, before anything reads it."""
    for name, x in tensors.items():
        if not stored(x):
            room, needed = x.untyped_storage().nbytes(), x.storage_offset() * x.itemsize + span(x)
            wanted = f"{needed}, as far as its shape and strides reach"
            change = "Resize it back before the call; FSDP frees what it does not use: unshard it."
            raise spec_error(name, f"a storage of {room} bytes", wanted, change)


def empty_of_keys(
    shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | str | None
) -> Tensor:
    """An uninitialised tensor. On a Linux CPU a large one begins with a page, and not 64 bytes behind as
    torch's do: rows of 128 bytes then are what the machine reads at once. Its memory may consist of huge
    pages, where the system grants them on request: keys are then read a few percent faster."""
    like = torch.empty(0, dtype=dtype, device=device)
    size = prod(shape) * like.itemsize
    plain = type(like) is Tensor and like.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")
    if not plain or size < _HUGE:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    room = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8, device=device)
    first = -room.data_ptr() % mmap.PAGESIZE
    x = room[first : first + size].view(like.dtype).view(tuple(shape))
    start, end = -(-x.data_ptr() // _HUGE) * _HUGE, (x.data_ptr() + size) // _HUGE * _HUGE
    if start < end:
        _may_be_huge(start, end - start)
    return x


def _may_be_huge(address: int, size: int) -> None:
    """Asks for huge pages behind untouched memory. Where the system refuses, nothing is lost."""
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
