"""Decode in WGSL: few query rows against many keys. The rows of all query heads of a kv head share a tile, so
that keys are read once, and the keys are cut into splits, which `merge` adds up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyflash.backends.webgpu import forward
from polyflash.backends.webgpu.forward import tried

__all__ = ("run", "tried")

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    return forward.run(launch, q, k, v, out, lse, args, few=True)
