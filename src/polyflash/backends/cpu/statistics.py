"""Sums and extremes of the weights on the CPU: column sums, or entropy and largest score of every row.

    p = exp(S - lse)      column_sums_j = Σ_i p_ij      entropy_i = -Σ_j p_ij·ln p_ij      max_j S_ij

One more pass over the tiles of scores, without V. One work item is a query head and a range of its rows,
which pass over the keys in spans; all sums are float32 in an order that no thread changes.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyflash.backends.cpu import arguments, configs, packing, pool, runtime, statistics_configs
from polyflash.backends.cpu.configs import Config, Scratch
from polyflash.backends.cpu.statistics_configs import StatisticsKey
from polyflash.backends.cpu.words import Cut, Statistics
from polyflash.results import Room
from polyflash.spec import Arguments

if TYPE_CHECKING:
    from polyflash.plan import Launch


@lru_cache(maxsize=64)
def _kernel(config: Config, dtype: str, head_dim: int, nv: int, row_panels: int) -> tuple[int, Scratch]:
    """The kernel with panels of `nv` vectors, and its scratch for spans of `row_panels`."""
    key = configs.key_of(StatisticsKey, config, dtype, head_dim, nv)
    return runtime.load(key), statistics_configs.scratch(key, row_panels, config.block_n)


def run(launch: Launch, q: Tensor, k: Tensor, lse: Tensor, room: Room, args: Arguments) -> None:
    """Fills column_sums (B, Hq, Sk), or entropy and max_logit (B, Hq, Sq), all contiguous, from
    q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and lse (B, Hq, Sq). What belongs to no packed member is 0, and
    -inf."""
    config, (column_sums, entropy, max_logit) = launch.config, room
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    if launch.prepared is None:
        configs.check_fits(config, launch.spec, launch.target)
        launch.prepared = True
    if args.cu_seqlens_q is None:
        lens_q = np.full(batch, seqlen_q)
    else:
        lens_q, _ = packing.member_lengths(args)
        for x, value in ((entropy, 0.0), (max_logit, -torch.inf)):
            if x is not None:
                x.fill_(value)
    nv = configs.panel_vectors(config.isa, int(lens_q.max(initial=1)))
    rows = nv * configs.ISAS[config.isa].lanes
    row_panels = min(config.panels, max(1, -(-int(lens_q.max(initial=1)) // rows)))
    kernel, tiles = _kernel(config, launch.spec.dtype, head_dim, nv, row_panels)
    entries, copies = statistics_configs.ranges(lens_q, rows)
    sums = None if column_sums is None else _zeros(copies, column_sums)
    lse = lse.contiguous()
    work_us = arguments.estimated_us(q.shape, k.shape[2], head_dim, args)
    kept: list[Any] = []
    threads = arguments.threads_for(work_us)
    # There is no V and no out.
    front = arguments.front(config.isa, nv, (q, k, k, q), lse.data_ptr(), k.shape[2], args, kept, 0)
    words = array("q", front)
    columns = (0,) * 4 if sums is None else (sums.data_ptr(), *(4 * s for s in sums.stride()[:3]))
    results = (0 if x is None else x.data_ptr() for x in (entropy, max_logit))
    words.extend((*Cut(config.block_n, 1, 1, row_panels, 1, 1, zero=0), *tiles[:-1]))
    words.extend(Statistics(entries.ctypes.data, *columns, *results))
    items = len(entries) * num_q_heads
    if items:
        address = words.buffer_info()[0]
        pool.run(kernel, address, items, threads, tiles.total, work_us >= arguments.WAKE_FROM_US)
    if column_sums is not None and sums is not None:
        for copy in sums[1:]:
            sums[0] += copy
        column_sums.copy_(sums[0])


def _zeros(copies: int, like: Tensor) -> Tensor:
    return like.new_zeros((copies, *like.shape))
