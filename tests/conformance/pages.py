"""Paged problems as problems over contiguous keys, and what no request sees in them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from polyflash.workloads import in_pages
from tests.memory import hidden_members, nanify

Problem = tuple[Tensor, Tensor, Tensor, dict[str, Any]]


def live_pages(options: dict[str, Any], page_size: int) -> list[tuple[Tensor, int]]:
    """Of each request: the numbers of the pages it needs, int64, and its live keys."""
    lens = options["kv_lens"].tolist()
    return [(row[: -(-n // page_size)].long(), n) for row, n in zip(options["page_table"], lens, strict=True)]


def contiguous(q: Tensor, k_pages: Tensor, v_pages: Tensor, options: dict[str, Any]) -> Problem:
    """The same problem for `attention_varlen`: the live keys of one request behind those of another."""
    pages = live_pages(options, k_pages.shape[1])
    k, v = (torch.cat([x[own].flatten(0, 1)[:n] for own, n in pages]) for x in (k_pages, v_pages))
    rest = {n: x for n, x in options.items() if n not in ("page_table", "kv_lens")}
    rest.setdefault("cu_seqlens_q", torch.arange(len(q) + 1, dtype=torch.int32))
    rest["cu_seqlens_k"] = torch.tensor([0, *(n for _, n in pages)]).cumsum(0).int()
    return q, k, v, rest


def padded(q: Tensor, k_pages: Tensor, v_pages: Tensor, options: dict[str, Any]) -> Problem:
    """One token per request: the same problem for `attention`, with NaN behind the live keys."""
    pages = live_pages(options, k_pages.shape[1])
    wide = max(1, *(n for _, n in pages))
    wide_k, wide_v = (
        x.new_full((len(pages), x.shape[2], wide, x.shape[3]), math.nan) for x in (k_pages, v_pages)
    )
    for b, (own, n) in enumerate(pages):
        for x, pool in ((wide_k, k_pages), (wide_v, v_pages)):
            x[b, :, :n] = pool[own].flatten(0, 1)[:n].transpose(0, 1)
    return q[:, :, None], wide_k, wide_v, {n: x for n, x in options.items() if n != "page_table"}


def repaged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, options: dict[str, Any], page_size: int, seed: int = 7
) -> Problem:
    """The same problem in other pages, of another size, in another order."""
    _, k, v, rest = contiguous(q, k_pages, v_pages, options)
    bounds = rest["cu_seqlens_k"].tolist()
    lens = [end - start for start, end in itertools.pairwise(bounds)]
    wide = [x.new_zeros(len(lens), x.shape[1], max(1, *lens), x.shape[2]) for x in (k, v)]
    for b, n in enumerate(lens):
        for x, flat in zip(wide, (k, v), strict=True):
            x[b, :, :n] = flat[bounds[b] : bounds[b] + n].transpose(0, 1)
    pools = in_pages(wide[0], wide[1], lens, page_size, torch.Generator().manual_seed(seed))
    return q, pools[0], pools[1], {**options, "page_table": pools[2]}


def hidden_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, options: dict[str, Any], fill: str) -> Problem:
    """The problem with everything invisible filled: rows of nobody, keys that no row of their request sees,
    free slots and pages. No page may be shared."""
    flat = contiguous(q, k_pages, v_pages, options)
    q, k, v = hidden_members(*flat, fill)
    generator = torch.Generator().manual_seed(1)
    pools = []
    for pool, keys in ((k_pages, k), (v_pages, v)):
        pool = nanify(pool, torch.tensor(True), fill, generator)
        at = 0
        for own, n in live_pages(options, pool.shape[1]):
            slots = pool[own].flatten(0, 1)
            slots[:n] = keys[at : at + n]
            pool[own] = slots.unflatten(0, (len(own), pool.shape[1]))
            at += n
        pools.append(pool)
    return q, pools[0], pools[1], options
