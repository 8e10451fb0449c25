"""The cache as anyone would write it first: a list of tokens per request, attended to in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyflash.kvcache import KVCache, Request
from polyflash.merging import AttentionOutput
from polyflash.reference import attention_reference
from tests.device import generator

HEADS, DIM, DIM_V, GROUP = 2, 8, 6, 3


class Token(NamedTuple):
    """k (num_layers, num_kv_heads, head_dim), v likewise."""

    k: Tensor
    v: Tensor


class Tokens:
    """Random tokens, no two of them alike."""

    def __init__(self, layers: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.layers, self.dtype = layers, dtype
        self.generator = generator(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def make(self, count: int) -> list[Token]:
        k, v = (self.normal(count, self.layers, HEADS, width) for width in (DIM, DIM_V))
        return [Token(k[i], v[i]) for i in range(count)]

    def queries(self, rows: int) -> Tensor:
        return self.normal(rows, HEADS * GROUP, DIM)


def layer_of(
    tokens: Sequence[Token], layer: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """k (tokens, num_kv_heads, head_dim) and v of one layer."""
    if not tokens:
        return torch.zeros(0, HEADS, DIM, dtype=dtype), torch.zeros(0, HEADS, DIM_V, dtype=dtype)
    return torch.stack([t.k[layer] for t in tokens]), torch.stack([t.v[layer] for t in tokens])


def cache_of(num_pages: int = 16, page_size: int = 4, layers: int = 1, **options: Any) -> KVCache:
    return KVCache(num_pages, page_size, HEADS, DIM, head_dim_v=DIM_V, num_layers=layers, **options)


def append(cache: KVCache, added: dict[Request, list[Token]]) -> None:
    """Tokens for several requests in one step, through every layer."""
    whole = [token for tokens in added.values() for token in tokens]
    with cache.reserve(list(added), [len(tokens) for tokens in added.values()]) as step:
        for layer in range(cache.num_layers):
            step.write(*layer_of(whole, layer, cache.dtype), layer=layer)


def filled(cache: KVCache, tokens: Tokens, *counts: int) -> dict[Request, list[Token]]:
    """New requests with so many tokens each."""
    held = {request: tokens.make(n) for request, n in zip(cache.add(len(counts)), counts, strict=True)}
    append(cache, held)
    return held


def expected(
    q: Tensor, held: Sequence[Sequence[Token]], counts: Sequence[int], layer: int = 0, **options: Any
) -> AttentionOutput:
    """Float64 out (rows, num_q_heads, head_dim_v) and lse (num_q_heads, rows) of each request by itself."""
    outs, lses, first = [], [], 0
    for tokens, rows in zip(held, counts, strict=True):
        k, v = layer_of(tokens, layer)
        given = {"causal": True, **options}
        one = attention_reference(q[None, first : first + rows], k[None], v[None], layout="bshd", **given)
        outs.append(one.out[0])
        lses.append(one.lse[0])
        first += rows
    return AttentionOutput(torch.cat(outs), torch.cat(lses, 1))


def hold(got: Any, want: AttentionOutput, tolerance: float = 2e-5, label: object = "") -> None:
    """`got` is an `AttentionOutput` of float32 that is as near to float64 as float32 is."""
    assert got.out.shape == want.out.shape and got.lse.shape == want.lse.shape, label
    assert torch.equal(got.lse == -torch.inf, want.lse == -torch.inf), label
    for one, other in ((got.out, want.out), (got.lse, want.lse)):
        live = other != -torch.inf
        error = (one.double()[live] - other[live]).abs()
        assert error.numel() == 0 or float(error.max()) <= tolerance, f"{label}: {float(error.max())}"


def same(cache: KVCache, held: dict[Request, list[Token]]) -> None:
    """Every request holds its tokens, bit for bit, but those it gave back; and no invariant is broken."""
    cache.check()
    assert set(cache.requests()) == set(held)
    for request, tokens in held.items():
        assert cache.length(request) == len(tokens)
        for layer in range(cache.num_layers):
            start = cache.start(request)
            got = cache.read(request, layer=layer, start=start)
            for x, want in zip(got, layer_of(tokens, layer, cache.dtype), strict=True):
                assert torch.equal(x, want[start:]), (request, layer)
