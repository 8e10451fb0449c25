"""Decode in Triton: few query rows against many keys. All query heads of a key/value head are rows of one
tile, so that keys are read once. The rest is the forward's, which cuts the keys into splits; codes have a
kernel of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyflash.backends.triton import codes, forward
from polyflash.backends.triton.forward import repeat as repeat

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments


def run(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor]:
    return (codes.run if args.codes else forward.run)(launch, q, k, v, out, lse, args)
