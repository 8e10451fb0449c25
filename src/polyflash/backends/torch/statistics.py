"""Sums and extremes of the weights in tiled eager torch ops: the forward's tiles without V.

    p = exp(s - lse)      column_sums_j = Σ_i p_ij      entropy_i = Σ_j p_ij·(lse_i - s_ij)      max_j s_ij

A sink is one more outcome of its rows' distributions. Every feature, any device, memory of a few score tiles.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyflash.backends.torch.configs import Config
from polyflash.backends.torch.forward import (
    Part,
    apply_mask,
    batches,
    key_tiles,
    load_tile,
    lse_tile,
    row_tiles,
    score_tile,
    store_rows,
)
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from polyflash.plan import Launch
    from polyflash.results import Room

_INF = math.inf


def surprise(b_p: Tensor, b_s: Tensor, b_lse: Tensor) -> Tensor:
    """-p·ln p; 0 where p is 0, whatever the score."""
    return (b_p * (b_lse - b_s)).masked_fill_(b_p == 0.0, 0.0)


def add_columns(sums: Tensor, b_p: Tensor, j0: int) -> None:
    """Adds a tile's sums over rows to keys j0.. of (b, Hkv, G, Sk); keys outside are dropped."""
    keys = min(b_p.shape[-1], sums.shape[-1] - j0)
    sums[..., j0 : j0 + keys] += b_p.sum(-2)[..., :keys]


def measure(part: Part, lse: Tensor, room: Room, config: Config) -> None:
    """The statistics of one part, written in place: column_sums (B, Hq, Sk) is added to."""
    (column_sums, entropy, max_logit), (entries, num_kv_heads) = room, part.k.shape[:2]
    for i0, rows in row_tiles(part, config):
        state = (entries, num_kv_heads, part.group, rows, 1)
        b_q = load_tile(part.q, i0, rows, part.kind).flatten(2, 3)
        b_lse, _ = lse_tile(part, lse, i0, rows)
        top, h_i = part.q.new_full(state, -_INF, dtype=part.kind), part.q.new_zeros(state, dtype=part.kind)
        for j0, keys in key_tiles(part, i0, rows, config):
            b_k = load_tile(part.k, j0, keys, part.kind)
            b_s, visible, _ = score_tile(part, b_q, b_k, i0, rows, j0, keys)
            b_p = apply_mask(torch.exp(b_s - b_lse), visible, 0.0)
            if column_sums is not None:
                add_columns(part.of(column_sums), b_p, j0)
            if entropy is not None:
                h_i += surprise(b_p, b_s, b_lse).sum(-1, keepdim=True)
                top = torch.maximum(top, b_s.amax(-1, keepdim=True))
        if entropy is not None and max_logit is not None:
            if part.sinks is not None:
                b_sink = part.sinks.expand(state)
                h_i += surprise(torch.exp(b_sink - b_lse), b_sink, b_lse)
            store_rows(part.of(entropy.unsqueeze(-1)), h_i.clamp_(min=0.0), i0)
            store_rows(part.of(max_logit.unsqueeze(-1)), top, i0)


def run(launch: Launch, q: Tensor, k: Tensor, lse: Tensor, room: Room, args: Arguments) -> None:
    """Fills column_sums (B, Hq, Sk), or entropy and max_logit (B, Hq, Sq), from q (B, Hq, Sq, D),
    k (B, Hkv, Sk, D) and lse (B, Hq, Sq); any strides. What belongs to no packed member is 0, and -inf."""
    config: Config = launch.config
    for x, value in zip(room, (0.0, 0.0, -_INF), strict=True):
        if x is not None:
            x.fill_(value)
    with torch.no_grad():
        for part, rows, keys in batches(q, k, k, args, config):
            views = zip((keys, rows, rows), room, strict=True)
            sums, entropy, top = (None if x is None else own(x) for own, x in views)
            measure(part, rows(lse), (sums, entropy, top), config)
