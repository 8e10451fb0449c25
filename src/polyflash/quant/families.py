"""The six families of inputs on which errors of schemes are stated: normal ones hide several defects."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

Triple = tuple[Tensor, Tensor, Tensor]
Family = Callable[[Tensor, Tensor, Tensor, Generator], Triple]


def _channels(x: Tensor, count: int) -> Tensor:
    """`count` channels spread over the head dim, the same in every head."""
    return torch.arange(min(count, x.shape[-1])) * max(1, x.shape[-1] // count) % x.shape[-1]


def _biased(x: Tensor, least: float, most: float) -> Tensor:
    at = _channels(x, 6)
    x[..., at] += (torch.linspace(least, most, len(at)) * (1 - 2 * (torch.arange(len(at)) % 2))).to(x.dtype)
    return x


def _widened(x: Tensor) -> Tensor:
    x[..., _channels(x, 4)] *= 8
    return x


def _spiked(x: Tensor, generator: Generator) -> Tensor:
    hit = torch.rand(x.shape, generator=generator) < 0.001
    return x + 10 * torch.randn(x.shape, generator=generator).to(x.dtype) * hit


FAMILIES: dict[str, Family] = {
    "normal": lambda q, k, v, generator: (q, k, v),
    "kbias": lambda q, k, v, generator: (q, _biased(k, 8, 12), v),
    "qkbias": lambda q, k, v, generator: (_biased(q, 2, 5), _biased(k, 8, 12), v),
    "kscale": lambda q, k, v, generator: (q, _widened(k), v),
    "sparse": lambda q, k, v, g: (_spiked(q, g), _spiked(k, g), _spiked(v, g)),
    "sharp": lambda q, k, v, generator: (3 * q, k, v),
}


def drawn(family: str, heads: int, rows: int, keys: int, head_dim: int, seed: int = 0) -> Triple:
    """q (1, heads, rows, head_dim), k and v (1, heads, keys, head_dim) of a family, float32."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, head_dim, generator=generator) for n in (rows, keys, keys))
    return FAMILIES[family](q, k, v, generator)
