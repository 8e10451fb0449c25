"""How a call fills the words of the decode kernels' argument block that follow those of the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyflash.backends.cpu.arguments import float_bits
from polyflash.backends.cpu.words import DOES_SOFTCAP, DOES_TINY_SCALE

if TYPE_CHECKING:
    from polyflash.spec import Arguments


def scaling(args: Arguments, scale: float, does: int) -> tuple[int, int]:
    """score_factor and score_cap of a call whose scores leave unscaled unless `does` says so."""
    if does & DOES_SOFTCAP:
        # A softcap that no float32 holds is the least one, as 0 is none.
        return 1 << 32 | float_bits(abs(scale) / args.softcap), max(1, float_bits(args.softcap))
    return (1 << 32 | float_bits(abs(scale)), 0) if does & DOES_TINY_SCALE else (0, 0)
