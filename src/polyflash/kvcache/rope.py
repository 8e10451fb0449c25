"""Rotary position embedding: pairs of channels, turned by an angle that grows with the position.

    angle(p, i) = p · base^(-2i / rotary_dim)        i = 0 … rotary_dim/2 - 1
    first'  = first · cos - second · sin
    second' = second · cos + first · sin

The pairs (first, second) are channels (i, i + rotary_dim/2), the halves of GPT-NeoX and of Llama in
transformers, or neighbours (2i, 2i + 1) of GPT-J with `interleaved`. Channels from rotary_dim on stay. Angles
and products are fp32 (fp64 for fp64 tensors), and the result is rounded once. The gradient is the turn by the
opposite angle.

Source: Su et al., RoFormer (2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyflash.errors import described, spec_error
from polyflash.kvcache.handles import is_ints
from polyflash.mask import is_strided


@dataclass(frozen=True, eq=False)
class Rope:
    """A rotation by `base`, or by tables `cos` and `sin`, float (positions, rotary_dim / 2) each.

    `rotary_dim` is the head_dim if it is None and there are no tables. transformers' tables repeat their
    columns: pass cos[:, : rotary_dim // 2]."""

    base: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    cos: Tensor | None = None
    sin: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.cos is None) != (self.sin is None):
            given = "cos alone" if self.sin is None else "sin alone"
            raise spec_error("cos, sin", given, "both or neither", "Pass both tables.")
        if self.cos is not None and self.sin is not None:
            for name, x in (("cos", self.cos), ("sin", self.sin)):
                if not isinstance(x, Tensor) or not is_strided(x) or x.ndim != 2 or not x.is_floating_point():
                    change = "Drop the batch axis."
                    raise spec_error(name, described(x), "float (positions, rotary_dim / 2)", change)
            if self.cos.shape != self.sin.shape or self.rotary_dim not in (None, 2 * self.cos.shape[1]):
                got = f"{tuple(self.cos.shape)}, {tuple(self.sin.shape)} for rotary_dim {self.rotary_dim}"
                change = "Half as many columns as channels are rotated."
                raise spec_error("cos, sin", got, "two of one shape", change)
        elif not isinstance(self.base, (int, float)) or isinstance(self.base, bool) or not self.base > 0:
            change = "Llama 2 has 10000, Llama 3 500000."
            raise spec_error("base", described(self.base), "a number above 0", change)
        width = self.rotary_dim
        if width is not None and (not isinstance(width, int) or width < 0 or width % 2):
            change = "Channels are rotated in pairs."
            raise spec_error("rotary_dim", described(width), "an even number", change)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (tokens, heads, head_dim) of any float dtype, turned by `positions`, int32 or int64 (tokens,).

        Raises:
            SpecError: shapes, dtypes or devices do not fit, head_dim is too small, or (looked at on a CPU
                only) a position is negative or beyond the tables."""
        return self.turned(x, *self.factors(x, positions))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (tokens, heads, head_dim) turned by its `factors`, rounded once to its dtype."""
        cos, sin = cos[:, None], sin[:, None]
        width = 2 * cos.shape[-1]
        turned, rest = x[..., :width].to(cos.dtype), x[..., width:]
        if self.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, -1)
        parts = (first * cos - second * sin, second * cos + first * sin)
        whole = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        return torch.cat((whole.to(x.dtype), rest), -1)

    def factors(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (tokens, rotary_dim / 2), that turn x: fp32, or fp64 for fp64 tensors. Raises what
        `rotate` does."""
        self._check(x, positions)
        exact = torch.float64 if x.dtype is torch.float64 else torch.float32
        if self.cos is not None and self.sin is not None:
            at = positions.long()
            return self.cos[at].to(exact), self.sin[at].to(exact)
        width = self._width(x.shape[-1])
        steps = torch.arange(0, width, 2, dtype=exact, device=positions.device)
        angles = positions.to(exact)[:, None] * (1.0 / self.base ** (steps / max(1, width)))
        return angles.cos(), angles.sin()

    def _width(self, head_dim: int) -> int:
        if self.cos is not None:
            return 2 * self.cos.shape[1]
        return head_dim if self.rotary_dim is None else self.rotary_dim

    def _check(self, x: Tensor, positions: Tensor) -> None:
        if not isinstance(x, Tensor) or x.ndim != 3 or not x.is_floating_point():
            change = "Use flatten(0, 1) on a batch."
            raise spec_error("x", described(x), "floats (tokens, heads, head_dim)", change)
        if not is_ints(positions, x.shape[:1], x.device):
            wanted = f"int32 or int64 ({x.shape[0]},) on {x.device}"
            raise spec_error("positions", described(positions), wanted, "One position per token.")
        width = self._width(x.shape[-1])
        if width > x.shape[-1] or width % 2:
            wanted = f"an even rotary_dim of at most head_dim {x.shape[-1]}"
            raise spec_error("rotary_dim", width, wanted, "Rotate fewer channels.")
        if self.cos is not None and self.cos.device != x.device:
            change = "Move the tables with .to()."
            raise spec_error("cos device", self.cos.device, f"{x.device}, as x", change)
        if positions.device.type != "cpu" or not positions.numel():
            return
        last = self.cos.shape[0] - 1 if self.cos is not None else 2**31 - 1
        if not 0 <= int(positions.min()) <= int(positions.max()) <= last:
            raise spec_error("positions", "one elsewhere", f"0 to {last}", "Make the tables longer.")
