"""Every public door under another default device: nothing that is made on the way forgets where it belongs.

A constructor without `device=` makes a meta tensor here, which has no values, so that the call fails or gives
something else; on a GPU it would make one there, for a call on the CPU, or the other way around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import polyflash
from polyflash import Mask, kvcache, merge
from polyflash.integrations import flash_attn, sdpa
from tests.rows_here import HERE

HEADS, KV_HEADS, ROWS, KEYS, DIM = 4, 2, 9, 20, 16


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cpu")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def dense(**options: Any) -> Callable[[], Any]:
    """A call and its gradients; options may be functions that make them."""

    def call() -> Any:
        q, k, v = normal(2, HEADS, ROWS, DIM), normal(2, KV_HEADS, KEYS, DIM), normal(2, KV_HEADS, KEYS, DIM)
        given = {name: x() if callable(x) else x for name, x in options.items()}
        inputs = [q, k, v, *(x for x in given.values() if isinstance(x, Tensor) and x.is_floating_point())]
        for x in inputs:
            x.requires_grad_()
        out, lse = polyflash.attention(q, k, v, return_lse=True, **given)
        return out, lse, torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), inputs)

    return call


def packed() -> Any:
    inputs = [normal(24, heads, DIM).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    bounds = ints(0, 7, 7, 20)
    out = polyflash.attention_varlen(*inputs, bounds, bounds, causal=True, kv_lens=ints(5, 0, 13))
    return out, torch.autograd.grad(out.sum(), inputs)


def pages() -> tuple[Tensor, ...]:
    pools = normal(9, 4, KV_HEADS, DIM), normal(9, 4, KV_HEADS, DIM)
    return *pools, ints(3, 1, 8, 2, 0, 7).view(2, 3), ints(11, 5)


def paged() -> Any:
    k, v, table, lens = pages()
    few = polyflash.attention_paged(normal(2, HEADS, DIM), k, v, table, lens)
    rows = normal(6, HEADS, DIM)
    return few, polyflash.attention_paged(rows, k, v, table, lens, cu_seqlens_q=ints(0, 2, 6), causal=True)


def groups() -> Any:
    k, v = normal(2, KV_HEADS, KEYS, DIM), normal(2, KV_HEADS, KEYS, DIM)
    parts = [normal(2, HEADS, n, DIM) for n in (2, 1, 3)]
    places = {"q_offsets": [3, 9, 7], "kv_lens": [9, 20, 12]}
    return [
        polyflash.attention_groups(parts, k, v, causal=True, fused=fused, **places) for fused in (True, False)
    ]


def statistics() -> Any:
    q, k, v = normal(2, HEADS, ROWS, DIM), normal(2, KV_HEADS, KEYS, DIM), normal(2, KV_HEADS, KEYS, DIM)
    out, lse = polyflash.attention(q, k, v, return_lse=True)
    parts = merge(out, lse, out, lse), merge(*polyflash.attention(q, k, v, return_lse=True), out, lse)
    return polyflash.column_sums(q, k, lse), polyflash.row_stats(q, k, lse), parts


def masks() -> Any:
    starts, ends = ints(*range(3)).view(1, 1, 3, 1), ints(4, 9, 20).view(1, 1, 3, 1)
    blocks = torch.ones(3, 5, dtype=torch.bool, device="cpu")
    blocks[0, 2] = False
    both = Mask.segments(ints(*(0, 1) * ROWS).view(2, ROWS).sort().values, ints(*(0, 1) * KEYS).view(2, KEYS))
    made = [
        Mask.intervals(starts, ends, rows=4), Mask.blocks(blocks, rows=4, keys=4), both,
        Mask.window(3, 1) & Mask.lengths(ints(9, 20)), Mask.causal("top_left"),
    ]  # fmt: skip
    return [dense(mask=mask)()[0] for mask in made]


def cached() -> Any:
    """A cache of two layers through all it does to requests."""
    cache = kvcache.KVCache(32, 4, KV_HEADS, DIM, num_layers=2, device="cpu", scrub=True)
    a, b = cache.add(2)
    rope, found = kvcache.Rope(), []
    for counts in ([9, 6], [1, 1], [1, 1]):
        with cache.reserve([a, b], counts) as step:
            for layer in range(2):
                k, v, q = (normal(sum(counts), heads, DIM) for heads in (KV_HEADS, KV_HEADS, HEADS))
                q = step.write(k, v, layer=layer, rope=rope, q=q)
                found.append(cache.attend(q, step, layer=layer))
    (c,) = cache.fork(a)
    snapshot = cache.snapshot()
    with cache.reserve([a, c], [2, 1]) as step:
        for layer in range(2):
            step.write(normal(3, KV_HEADS, DIM), normal(3, KV_HEADS, DIM), layer=layer)
    for counts in (1, 40):
        rows = normal(2 * counts, HEADS, DIM)
        found.append(cache.attend(rows, [a, c], counts=counts, cascade=True, causal=counts == 1))
    (a,) = cache.swap_in(cache.swap_out(a))
    found += [cache.page_table([a, c]), cache.slot_mapping(c, 3), *cache.read(a, layer=1)]
    cache.truncate(a, 2)
    cache.restore(snapshot)
    cache.release(snapshot)
    cache.free(c)
    cache.check()
    return found


def tables() -> Any:
    k, v, table, lens = pages()
    kvcache.write_tokens(k, v, normal(3, KV_HEADS, DIM), normal(3, KV_HEADS, DIM), ints(3, -1, 9))
    listed = kvcache.to_flashinfer(table, lens, 4)
    return k, v, listed, kvcache.from_flashinfer(*listed, 4)


def torchs() -> Any:
    q, k = normal(2, 4, ROWS, DIM).requires_grad_(), normal(2, 4, KEYS, DIM)
    seen = torch.ones(ROWS, KEYS, dtype=torch.bool, device="cpu").tril()
    own = torch.nn.MultiheadAttention(32, 4, batch_first=True, device="cpu")
    for p in own.parameters():
        p.data = normal(*p.shape)
    x, padding = normal(2, 5, 32), torch.zeros(2, 5, dtype=torch.bool, device="cpu")
    with sdpa.enabled(strict=True):
        outs = [
            F.scaled_dot_product_attention(q, k, k, **o) for o in ({"attn_mask": seen}, {"dropout_p": 0.5})
        ]
        outs.append(own(x, x, x, key_padding_mask=padding, need_weights=False)[0])
    return outs, torch.autograd.grad(outs[0].sum(), q)


def flash() -> Any:
    cache_k, cache_v = normal(2, 16, KV_HEADS, DIM), normal(2, 16, KV_HEADS, DIM)
    q, new = normal(2, 1, HEADS, DIM), normal(2, 1, KV_HEADS, DIM)
    cos, sin = normal(20, DIM // 2), normal(20, DIM // 2)
    call = flash_attn.flash_attn_with_kvcache
    whole = call(q, cache_k, cache_v, new, new, cos, sin, cache_seqlens=ints(4, 15), causal=True)
    k, v, table, _ = pages()
    of_pages = call(q, k, v, new, new, cache_seqlens=ints(4, 7), block_table=table)
    dense = normal(2, ROWS, HEADS, DIM)
    live = torch.ones(2, ROWS, dtype=torch.bool, device="cpu").tril(3)
    rows, at, bounds, longest, _ = flash_attn.unpad_input(dense, live)
    out = flash_attn.flash_attn_varlen_func(rows, rows, rows, bounds, bounds, longest, longest, causal=True)
    padded = flash_attn.pad_input(out, at, 2, ROWS)
    return whole, of_pages, padded, flash_attn.flash_attn_func(dense, dense, dense, 0.2, window_size=(3, 0))


BIASES = ((2, HEADS, ROWS, KEYS), (1, 1, ROWS, KEYS), (2, 1, 1, KEYS), (HEADS, ROWS, 1), (KEYS,))
DOORS: dict[str, Callable[[], Any]] = {
    "plain": dense(), "causal": dense(causal=True, kv_lens=lambda: ints(5, 20), kv_starts=lambda: ints(1, 0)),
    "dropout": dense(dropout_p=0.4), "seed": dense(dropout_p=0.4, dropout_seed=7),
    "softcap": dense(softcap=2.0, q_offset=lambda: ints(3, 9), causal=True, window=(4, None)),
    "sinks": dense(sinks=lambda: normal(HEADS)),
    **{f"bias {shape}": dense(bias=lambda shape=shape: normal(*shape)) for shape in BIASES},
    "bias, strided": dense(bias=lambda: normal(2, HEADS, KEYS, ROWS).mT),
    "packed": packed, "paged": paged, "groups": groups, "statistics": statistics, "masks": masks,
    "cache": cached, "tables": tables, "torch": torchs, "flash-attn": flash,
}  # fmt: skip


def flat(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [y for part in x for y in flat(part)]


@pytest.mark.parametrize(
    "backend", [HERE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in HERE[1:])]
)
@pytest.mark.parametrize("name", DOORS)
def test_a_door_forgets_no_device(name: str, backend: str) -> None:
    results = []
    for default in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(default), polyflash.use_backend(backend):
            results.append(flat(DOORS[name]()))
    for one, other in zip(*results, strict=True):
        assert other.device.type == "cpu" and torch.equal(one, other), name


def test_a_cache_is_made_where_tensors_are() -> None:
    """None asks torch for its default device, as torch's own constructors do."""
    assert kvcache.KVCache(2, 4, 1, 8).device.type == "cpu"
    with torch.device("meta"):
        assert kvcache.KVCache(2, 4, 1, 8).device.type == "meta"
        assert kvcache.KVCache(2, 4, 1, 8, device="cpu").device.type == "cpu"


def test_problems_are_the_same_under_any_default_device() -> None:
    from polyflash.workloads import make
    from tests.catalogue import CATALOGUE

    with torch.device("meta"):
        q, _, _, options = make(next(iter(CATALOGUE)))
    assert q.device.type == "cpu" and all(
        x.device.type == "cpu" for x in options.values() if isinstance(x, Tensor)
    )
