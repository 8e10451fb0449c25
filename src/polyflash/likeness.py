"""One check of torch's that tells a call like an earlier one, where the device or the keys in memory wait for
Python: `routes.py: quiet` and a key ask for each of these things by itself, which takes twice as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as modes
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_hooks
from torch.autograd import forward_ad, profiler

from polyflash.storages import hold, is_readable, span


def unwatched() -> bool:
    """Does nobody see a call of tensors that are `alike`? Modes and casts show in their dispatch keys."""
    seen = profiler._is_profiler_enabled or forward_ad._current_level >= 0 or modes() > 0  # torch's own too
    return not seen and saved_hooks(False) is None


def alike(*tensors: Tensor) -> Callable[..., bool] | None:
    """Tells whether as many tensors have type, dtype, device, sizes, strides and `requires_grad` of these,
    and would be dispatched as they: to the same kernels, through the same modes and casts of their thread. It
    is what guards compiled graphs; None if this torch has it not, or one tensor is there twice."""
    if len(set(map(id, tensors))) < len(tensors):
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        check = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (AttributeError, TypeError):
        return None

    def told(*given: Any) -> bool:
        for x in given:
            if isinstance(x, Tensor) and x.is_nested:  # has no strides: torch ends the process
                return False
        return check(*given)  # type: ignore[no-any-return]

    return told


class Likeness:
    """The last tensors that were found to be plain ones, for others like them."""

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = None, None, ()

    def told(self, count: int, *tensors: Any) -> bool:
        """Are these like the last, which were kept for such a count?"""
        known, check, reaches = self._last
        if known != (count, len(tensors)) or torch.compiler.is_compiling():
            return False
        return check(*tensors) and hold(tensors, reaches)

    def keep(self, count: int, *tensors: Tensor) -> None:
        """Keeps them, if nobody sees a call of theirs."""
        if all(map(is_readable, tensors)) and not any(x.requires_grad for x in tensors):
            check = alike(*tensors)
            if check is not None:
                self._last = (count, len(tensors)), check, tuple(map(span, tensors))
