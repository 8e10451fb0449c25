"""Input families: (q, k, v, storage dtype, generator) -> (q, k, v), in the dtype they are drawn in.

They matter as much as shapes: several published defects are invisible on normal inputs. Six of them are
the package's own, for the errors of quantised keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from polyflash import workloads
from polyflash.quant import families

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Triple = tuple[Tensor, Tensor, Tensor]
    Family = Callable[[Tensor, Tensor, Tensor, torch.dtype, torch.Generator], Triple]


def _of(six: families.Family) -> Family:
    return lambda q, k, v, dtype, generator: six(q, k, v, generator)


def _scaled(factor: float) -> Family:
    return lambda q, k, v, dtype, generator: (q * factor, k * factor, v * factor)


def _vbias(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    return q, k, v + 5


def _sink(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    """The first key scores 4 more than it would, for every row."""
    q[..., 0] = 1
    k[..., :1, 0] += 4 * q.shape[-1] ** 0.5
    return q, k, v


def _slope(sign: int) -> Family:
    """Scores that rise (or fall) by 6 per 64 keys, so that the row maximum moves at every block (or at
    none)."""

    def family(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
        q[..., 0] = 1
        steps = torch.arange(k.shape[-2], dtype=k.dtype) * (6 / 64)
        k[..., 0] = sign * steps * q.shape[-1] ** 0.5
        return q, k, v

    return family


def _equal(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    return q, k[..., :1, :].expand_as(k).clone(), v


def _zeros(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _onehot(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    def hot(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-2]) % x.shape[-1]
        return torch.zeros_like(x).scatter_(-1, at.view(-1, 1).expand(*x.shape[:-1], 1), 8.0)

    return hot(q), hot(k), v


def _huge(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    """The largest magnitudes with a finite answer: powers of two, so that equal scores tie exactly in
    float32.

    A kernel that divides by the row sum last holds a sum of seqlen_k values, so V leaves that room below the
    maximum of the accumulator (float16 accumulates in float32 and needs none)."""
    narrow = dtype is torch.float16
    size = 2.0**15 if narrow else 2.0**60
    room = 1 if narrow else 4 * max(1, k.shape[-2])
    return q.sign() * size, k.sign() * size, v.sign() * (torch.finfo(dtype).max / room)


def _subnormal(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    tiny = torch.finfo(dtype).smallest_normal / 4
    return q * tiny, k * tiny, v * tiny


def _alternating(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    sign = (1 - 2 * (torch.arange(k.shape[-2]) % 2)).to(k.dtype)[:, None]
    return q, sign * k.abs(), sign * v.abs()


def _nanrow(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Triple:
    """One value row is NaN: exactly the query rows that see it must be."""
    if v.numel():
        v[0, 0, v.shape[2] // 2] = torch.nan
    return q, k, v


SIX = {name: _of(family) for name, family in families.FAMILIES.items()}
FAMILIES: dict[str, Family] = {
    "normal": SIX["normal"],
    "x4": _scaled(4),
    "x10": _scaled(10),
    **SIX,
    "vbias": _vbias,
    "sink": _sink,
    "rising": _slope(1),
    "falling": _slope(-1),
    "equal": _equal,
    "zeros": _zeros,
    "onehot": _onehot,
    "huge": _huge,
    "subnormal": _subnormal,
    "alternating": _alternating,
    "nanrow": _nanrow,
}


def make(
    workload: workloads.Workload, *, seed: int = 0, family: str = "normal", device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """`polyflash.workloads.make` on inputs of a family."""
    return workloads.make(workload, seed=seed, device=device, family=FAMILIES[family])
