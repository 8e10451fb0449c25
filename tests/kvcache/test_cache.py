"""`KVCache`: writing, reading, attending; what a step promises; pools of others; swapping."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import SpecError, UnsupportedError, storages
from polyflash.kvcache import KVCache, OutOfPages, Request, Rope, write_tokens
from polyflash.kvcache import cache as module
from polyflash.kvcache.code_writes import Turn
from polyflash.kvcache.layout import slots_of
from tests.kvcache.plain import (
    DIM,
    DIM_V,
    GROUP,
    HEADS,
    Token,
    Tokens,
    append,
    cache_of,
    expected,
    filled,
    hold,
    layer_of,
    same,
)


class Fault(Exception):
    pass


def attended(cache: KVCache, q: Tensor, requests: Any, **options: Any) -> Any:
    return cache.attend(q, requests, return_lse=True, **options)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layers", [1, 3])
def test_PF10_tokens_stand_where_they_were_put(page_size: int, layers: int):
    """Appends of no token, of one, over page borders and of more than a page, ragged."""
    cache, tokens = cache_of(64, page_size, layers), Tokens(layers)
    held: dict[Request, list[Token]] = {request: [] for request in cache.add(3)}
    for counts in ((0, 1, 2), (5, 0, 1), (1, 1, 1), (page_size, page_size + 1, 0), (0, 0, 0)):
        added = {request: tokens.make(n) for request, n in zip(held, counts, strict=True)}
        append(cache, added)
        for request, new in added.items():
            held[request] += new
        same(cache, held)
    q = tokens.queries(3)
    for layer in range(layers):
        hold(attended(cache, q, list(held), layer=layer), expected(q, [*held.values()], [1] * 3, layer))


def test_B_pag_17_append_of_one_layer_writes_bit_for_bit():
    cache, tokens = cache_of(), Tokens()
    (a, b) = cache.add(2)
    new = tokens.make(7)
    k, v = layer_of(new, 0)
    strided = torch.randn(7, DIM, HEADS).transpose(1, 2)
    strided.copy_(k)
    assert cache.append([a, b], strided, v, counts=[5, 2]) is None
    same(cache, {a: new[:5], b: new[5:]})
    (token,) = tokens.make(1)
    cache.append(b, token.k, token.v)
    same(cache, {a: new[:5], b: [*new[5:], token]})
    slots = cache.slot_mapping([a, b], [3, 0])
    flat_k, flat_v = (pool[0].flatten(0, 1)[slots] for pool in (cache.k_pages, cache.v_pages))
    assert torch.equal(flat_k, torch.cat((k[3:], token.k))) and torch.equal(
        flat_v, torch.cat((v[3:], token.v))
    )


@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 1, 6), (0, 3, 0), (9, 9, 2)])
def test_rows_stand_at_the_last_tokens(counts: tuple[int, ...]):
    """Decode, chunks of prefill and both at once; rows behind the first see their elders."""
    cache, tokens = cache_of(page_size=3), Tokens()
    held = filled(cache, tokens, 9, 10, 6)
    q = tokens.queries(sum(counts))
    for options in ({}, {"causal": False}, {"window": (2, 0)}, {"softcap": 3.0, "scale": 0.2}):
        got = attended(cache, q, list(held), counts=list(counts), **options)
        hold(got, expected(q, [*held.values()], counts, **options), label=options)
    sinks = torch.randn(HEADS * GROUP)
    got = attended(cache, q, list(held), counts=list(counts), sinks=sinks)
    hold(got, expected(q, [*held.values()], counts, sinks=sinks))
    out = torch.full((sum(counts), HEADS * GROUP, DIM_V), math.nan)
    assert cache.attend(q, list(held), counts=list(counts), sinks=sinks, out=out) is out
    assert torch.equal(out, got.out)


def test_lengths_and_offsets_of_the_caller():
    """Padding at either end, rows that stand elsewhere; no length reaches what a request does not have."""
    cache, tokens = cache_of(page_size=3), Tokens()
    held = filled(cache, tokens, 7, 8, 4)
    starts, lens, offset = (torch.tensor(x, dtype=torch.int32) for x in ((2, 0, 1), (7, 5, 99), (3, 1, 2)))
    q = tokens.queries(6)
    got = attended(cache, q, list(held), counts=2, kv_starts=starts, kv_lens=lens, q_offset=offset)
    for b, tokens_of in enumerate(held.values()):
        rows = slice(2 * b, 2 * b + 2)
        options = {"kv_starts": starts[b : b + 1], "kv_lens": lens[b : b + 1].clamp(max=len(tokens_of))}
        want = expected(q[rows], [tokens_of], [2], q_offset=offset[b : b + 1], **options)
        hold(polyflash.AttentionOutput(got.out[rows], got.lse[:, rows]), want, label=b)
    for name, value in (("kv_lens", lens), ("q_offset", 3)):
        plan = cache.explain_attend(list(held), cascade=True, **{name: value})
        assert not plan.cascade
    for wrong in (lens[:1], lens.short(), 7):
        with pytest.raises(SpecError):
            cache.attend(q, list(held), counts=2, kv_lens=wrong)  # type: ignore[arg-type]


def test_prefill_in_chunks_is_prefill():
    tokens = Tokens()
    new, q = tokens.make(11), tokens.queries(11)
    want = expected(q, [new], [11])
    for sizes in ((11,), (4, 4, 3), (1,) * 11, (10, 1)):
        cache, first = cache_of(page_size=4), 0
        (request,) = cache.add()
        for size in sizes:
            with cache.reserve(request, size) as step:
                step.write(*layer_of(new[first : first + size], 0))
                got = attended(cache, q[first : first + size], step)
            rows = slice(first, first + size)
            hold(got, polyflash.AttentionOutput(want.out[rows], want.lse[:, rows]), label=sizes)
            first += size


def test_a_step_is_one_token_for_all_layers():
    """Lengths move once, at the end; each layer sees the new tokens as soon as it has written them."""
    cache, tokens = cache_of(layers=3), Tokens(3)
    held = filled(cache, tokens, 4, 6)
    new = tokens.make(3)
    after = [[*old, *more] for old, more in zip(held.values(), (new[:1], new[1:]), strict=True)]
    q = tokens.queries(3)
    with cache.reserve(list(held), [1, 2]) as step:
        assert step.positions.tolist() == [4, 6, 7] and step.counts == (1, 2) and step.open
        for layer in (2, 0, 1):
            with pytest.raises(SpecError, match=f"layer {layer} has not written"):
                cache.attend(q, step, layer=layer)
            step.write(*layer_of(new, layer), layer=layer)
            hold(attended(cache, q, step, layer=layer), expected(q, after, (1, 2), layer))
            hold(attended(cache, q[:2], step, layer=layer, counts=1), expected(q[:2], after, (1, 1), layer))
        assert [cache.length(r) for r in held] == [4, 6] and cache.kv_lens(list(held)).tolist() == [4, 6]
        old = [*held.values()]
        hold(attended(cache, q[:2], list(held), layer=1), expected(q[:2], old, (1, 1), 1))
    same(cache, dict(zip(held, after, strict=True)))
    with pytest.raises(SpecError, match="ended"):
        cache.attend(q, step)
    with pytest.raises(SpecError, match="ended"), step:
        pass
    for late in (step.commit, lambda: step.write(*layer_of(new, 0))):
        with pytest.raises(SpecError, match="ended"):
            late()
    step.rollback()  # of an ended step: nothing
    same(cache, dict(zip(held, after, strict=True)))


def test_B_pag_17_a_step_that_a_layer_left_out_is_no_step():
    cache, tokens = cache_of(layers=2), Tokens(2)
    held = filled(cache, tokens, 4)
    free = cache.num_free_pages
    with pytest.raises(SpecError, match="nothing from layer 1"), cache.reserve(list(held)) as step:
        step.write(*layer_of(tokens.make(1), 0), layer=0)
    assert not step.open and cache.num_free_pages == free
    same(cache, held)
    with cache.reserve(list(held), 0) as step:  # no tokens: nothing to write
        assert step.open
    same(cache, held)


@pytest.mark.parametrize("where", ["copy of shared pages", "k", "v", "second layer", "user", "rope"])
def test_PF12_after_any_exception_the_cache_is_as_before(where: str, monkeypatch: pytest.MonkeyPatch):
    cache, tokens = cache_of(12, layers=2), Tokens(2)
    held = filled(cache, tokens, 6, 3)
    parent = next(iter(held))
    (child,) = cache.fork(parent)
    held[child] = [*held[parent]]
    before, free = cache.page_table(list(held)), cache.num_free_pages
    calls = {"copy of shared pages": 2, "k": 1, "v": 2, "second layer": 3}.get(where, 99)

    def failing(original: Any) -> Any:
        left = [calls]

        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Fault
            return original(*args)

        return call

    if where == "copy of shared pages":
        monkeypatch.setattr(module, "copy_pages", failing(module.copy_pages))
    else:
        monkeypatch.setattr(module, "write_slots", failing(module.write_slots))
    if where == "rope":
        monkeypatch.setattr(Turn, "of", failing(lambda *_: None) if calls == 1 else _raise)
    with pytest.raises(Fault), cache.reserve(list(held), [3, 7, 2]) as step:
        new = tokens.make(12)
        for layer in range(2):
            step.write(*layer_of(new, layer), layer=layer, rope=Rope() if where == "rope" else None)
        if where == "user":
            raise Fault
    monkeypatch.undo()
    assert torch.equal(cache.page_table(list(held)), before) and cache.num_free_pages == free
    same(cache, held)
    more = {request: tokens.make(2) for request in held}
    append(cache, more)
    same(cache, {request: [*old, *more[request]] for request, old in held.items()})


def _raise(*_: Any) -> None:
    raise Fault


def test_PF11_B_pag_10_no_partial_append():
    cache, tokens = cache_of(5), Tokens()
    held = filled(cache, tokens, 4, 4, 7)
    before = cache.k_pages[0].clone(), cache.v_pages[0].clone()
    k, v = layer_of(tokens.make(6), 0)
    with pytest.raises(OutOfPages, match="Nothing was changed") as caught:
        cache.append(list(held), k, v, counts=[1, 4, 1])
    assert (caught.value.needed, caught.value.free) == (2, 1)
    for was, pool in zip(before, (cache.k_pages[0], cache.v_pages[0]), strict=True):
        assert torch.equal(was.view(torch.int32), pool.view(torch.int32))  # NaN of free pages too
    same(cache, held)
    append(cache, {request: tokens.make(1) for request in [*held][2:]})
    append(cache, {request: tokens.make(4) for request in [*held][:1]})  # exactly at capacity
    assert cache.num_free_pages == 0
    with pytest.raises(ValueError):
        cache.append([*held][:1], k[:1], v[:1])


@pytest.mark.parametrize("shared", [6, 8])
def test_PF13_B_pag_13_B_pag_18_children_of_a_fork_write_tokens_of_their_own(shared: int):
    """Forked in the middle of a page and at its border; each child and the parent go on differently."""
    cache, tokens = cache_of(24, layers=2), Tokens(2)
    held = filled(cache, tokens, shared)
    (parent,) = held
    children = cache.fork(parent, 3)
    held |= {child: [*held[parent]] for child in children}
    shared_pages = cache.page_table(parent)[0, : shared // 4].tolist()
    for turn in range(7):
        who = [*children[:2], parent] if turn % 2 else [children[turn % 3]]
        added = {request: tokens.make(1 + turn % 3) for request in who}
        append(cache, added)
        for request, new in added.items():
            held[request] = [*held[request], *new]
        same(cache, held)
    assert all(cache.page_table(r)[0, : shared // 4].tolist() == shared_pages for r in held)
    q = tokens.queries(4)
    hold(attended(cache, q, list(held), layer=1), expected(q, [*held.values()], [1] * 4, 1))


def test_PF14_use_after_free_is_an_error_everywhere():
    cache, tokens = cache_of(), Tokens()
    held = filled(cache, tokens, 5, 5)
    (a, b) = held
    (child,) = cache.fork(a)
    cache.free(a)
    same(cache, {b: held[b], child: held[a]})
    q, (token,) = tokens.queries(1), tokens.make(1)
    for call in (
        lambda: cache.free(a), lambda: cache.free([b, b]), lambda: cache.append(a, token.k, token.v),
        lambda: cache.attend(q, a), lambda: cache.fork(a), lambda: cache.truncate(a, 0),
        lambda: cache.page_table([b, a]), lambda: cache.kv_lens(a), lambda: cache.read(a),
        lambda: cache.slot_mapping(a), lambda: cache.swap_out([b, a]), lambda: cache.length(a),
        lambda: cache.explain_attend(a), lambda: cache.attend(q, 3), lambda: cache.free("ab"),
        lambda: cache_of().length(b),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            call()
    same(cache, {b: held[b], child: held[a]})
    cache.free([b, child])
    assert cache.num_free_pages == cache.num_pages


def test_PF16_rejected_tokens_are_never_seen_again():
    """Speculation over a page border, cut back, and other tokens in its place; stale ones turned to NaN."""
    cache, tokens = cache_of(), Tokens()
    held = filled(cache, tokens, 6, 5)
    (a, b) = held
    append(cache, {a: tokens.make(5), b: tokens.make(1)})
    held[b].append(Token(*(x[-1:] for x in cache.read(b))))
    stale = cache.slot_mapping(a, 6)
    cache.truncate(a, 6)
    same(cache, held)
    for pool in (cache.k_pages[0], cache.v_pages[0]):
        pool.flatten(0, 1)[stale] = math.nan
    q = tokens.queries(2)
    hold(attended(cache, q, [a, b]), expected(q, [*held.values()], [1, 1]))
    more = {b: tokens.make(7), a: tokens.make(1)}
    append(cache, more)
    held = {r: [*old, *more[r]] for r, old in held.items()}
    same(cache, held)
    cache.truncate([a, b], [0, 4])
    same(cache, {a: [], b: held[b][:4]})


def test_PF15_swapped_out_and_in_again_attends_to_the_same_bits():
    cache, tokens = cache_of(20, layers=2), Tokens(2)
    held = filled(cache, tokens, 9, 5, 0, 7)
    (a, b, c, d) = held
    (child,) = cache.fork(a)
    q = tokens.queries(3)
    before = attended(cache, q, [a, b, c], layer=1)
    pages = cache.page_table([a, b, c])
    swapped = cache.swap_out([a, b, c])
    assert [x.length for x in swapped] == [9, 5, 0] and swapped[0].k.shape == (2, 9, HEADS, DIM)
    same(cache, {d: held[d], child: held[a]})
    filled(cache, tokens, 5)  # somebody else takes the pages
    back = cache.swap_in(swapped)
    assert not torch.equal(cache.page_table(back), pages)
    after = attended(cache, q, back, layer=1)
    assert torch.equal(before.out, after.out) and torch.equal(before.lse, after.lse)
    cache.check()
    requests, free = cache.requests(), cache.num_free_pages
    filled(cache, tokens, 4 * free)
    with pytest.raises(OutOfPages):
        cache.swap_in(swapped)
    assert set(requests) < set(cache.requests()) and len(cache.requests()) == len(requests) + 1
    with pytest.raises(SpecError, match="layers"):
        cache_of().swap_in(swapped)
    assert cache.swap_in([]) == ()


def test_a_snapshot_brings_back_the_same_bits():
    cache, tokens = cache_of(16, layers=2), Tokens(2)
    held = filled(cache, tokens, 6, 5)
    (a, b) = held
    snapshot = cache.snapshot()
    append(cache, {a: tokens.make(3), b: tokens.make(2)})
    cache.free(b)
    filled(cache, tokens, 9)
    cache.restore(snapshot)
    same(cache, held)
    cache.truncate(a, 1)
    append(cache, {a: tokens.make(5)})
    cache.restore(snapshot)
    cache.release(snapshot)
    same(cache, held)
    assert cache.num_free_pages == 12


def test_scrubbed_pages_are_zero():
    """S6; off by default, and attention cannot see them then."""
    cache, tokens = cache_of(8, layers=2, scrub=True), Tokens(2)
    for pool in (*cache.k_pages, *cache.v_pages):
        pool.fill_(7.0)
    held = filled(cache, tokens, 10, 6)
    (a, b) = held
    (child,) = cache.fork(a)
    pages = cache.page_table([a, b])
    cache.free(a)
    held[child] = held.pop(a)
    same(cache, held)
    cache.truncate(child, 4)
    cache.free(b)
    for pool in (*cache.k_pages, *cache.v_pages):
        assert (pool[[*pages[0, 1:3].tolist(), *pages[1, :2].tolist()]] == 0).all()
    same(cache, {child: held[child][:4]})
    step = cache.reserve(child, 2)
    for layer in range(2):
        step.write(*layer_of(tokens.make(2), layer), layer=layer)
    page = step.tables.host_table[0, 1]
    step.rollback()
    assert all((pool[page] == 0).all() for pool in (*cache.k_pages, *cache.v_pages))
    lazy = cache_of(4)
    filled(lazy, tokens, 4)
    lazy.free(lazy.requests())
    assert not (lazy.k_pages[0][0] == 0).any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_append_rotates_keys_as_it_writes_them(interleaved: bool):
    cache, tokens = cache_of(page_size=3), Tokens()
    held = filled(cache, tokens, 4, 7)
    rope = Rope(100.0, 6, interleaved)
    k, v = layer_of(tokens.make(5), 0)
    q = tokens.queries(5)
    positions = torch.tensor([4, 5, 7, 8, 9])
    turned = cache.append(list(held), k, v, counts=[2, 3], rope=rope, q=q)
    assert turned is not None and torch.equal(turned, rope.rotate(q, positions))
    whole = [cache.read(r) for r in held]
    assert torch.equal(torch.cat((whole[0][0][4:], whole[1][0][7:])), rope.rotate(k, positions))
    assert torch.equal(torch.cat((whole[0][1][4:], whole[1][1][7:])), v)
    padded = positions - 3
    turned = cache.append(list(held), k, v, counts=[2, 3], rope=rope, q=q, positions=padded)
    assert torch.equal(turned, rope.rotate(q, padded))  # type: ignore[arg-type]
    assert torch.equal(cache.read(next(iter(held)))[0][6:], rope.rotate(k, padded)[:2])
    assert cache.append(list(held), k, v, counts=[2, 3], q=q) is q
    with pytest.raises(SpecError, match="Rope"):
        cache.append(list(held), k, v, counts=[2, 3], rope=10000.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["NHD", "HND", "vLLM", "FlashInfer", "FlashInfer HND", "padded", "layers"])
def test_PF9_B_pag_20_pools_of_others(form: str):
    """Foreign layouts through views, with padding between pages: read and written in place."""
    tokens, pages, size, dim = Tokens(), 12, 4, DIM
    options: dict[str, Any] = {}
    if form == "HND":
        k, v = (torch.randn(pages, HEADS, size, dim) for _ in range(2))
        options["layout"] = "HND"
    elif form == "vLLM":
        k, v = torch.randn(2, pages, size, HEADS, dim)
    elif form == "FlashInfer":
        both = torch.randn(pages, 2, size, HEADS, dim)
        k, v = both[:, 0], both[:, 1]
    elif form == "FlashInfer HND":
        both = torch.randn(pages, 2, HEADS, size, dim)
        k, v, options["layout"] = both[:, 0], both[:, 1], "HND"
    elif form == "padded":
        k, v = (torch.full((pages, size * HEADS * dim + 5), math.nan) for _ in range(2))
        guards = k, v
        k, v = (x[:, :-5].unflatten(1, (size, HEADS, dim)) for x in (k, v))
    elif form == "layers":
        k, v = torch.randn(2, 1, pages, size, HEADS, dim)
    else:
        k, v = (torch.randn(pages, size, HEADS, dim) for _ in range(2))
    cache = KVCache.over(k, v, **options)
    assert (cache.num_pages, cache.page_size, cache.num_layers) == (pages, size, 1)
    assert cache.k_pages[0].untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    held = {r: [Token(t.k, tokens.normal(1, HEADS, dim)) for t in tokens.make(n)]
            for r, n in zip(cache.add(3), (9, 4, 6), strict=True)}  # fmt: skip
    append(cache, held)
    (first, *_) = held
    (child,) = cache.fork(first)
    held[child] = [*held[first], Token(held[first][0].k, held[first][0].v)]
    append(cache, {child: held[child][-1:]})
    same(cache, held)
    q = tokens.queries(4)
    hold(attended(cache, q, list(held)), expected(q, [*held.values()], [1] * 4))
    if form == "padded":
        assert all(x[:, -5:].isnan().all() for x in guards)


def test_over_refuses_pools_that_do_not_fit():
    pool = torch.zeros(4, 2, 2, 8)
    for k, v, options in (
        (pool, pool[:3], {}), (pool, pool.half(), {}), (pool, pool[:, :1], {}), (pool, pool[:, :, :1], {}),
        (pool, [pool, pool], {}), ([], [], {}), (pool[0], pool[0], {}), (pool.long(), pool.long(), {}),
        (pool, [None], {}), (pool, pool.to("meta"), {}),
        (pool[:1].expand(4, 2, 2, 8), pool, {}), (pool, pool, {"layout": "HDN"}),
        (pool, pool, {"layout": 3}), (pool[..., :0], pool[..., :0], {}),
        ([pool, pool[..., :4].clone()], [pool, pool], {}), (pool.clone().requires_grad_(), pool, {}),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            KVCache.over(k, v, **options)
    for sizes in ((-1, 4, 2, 8), (4, 0, 2, 8), (4, 4, 0, 8), (4, 4, 2, 0)):
        with pytest.raises(SpecError):
            KVCache(*sizes)
    with pytest.raises(SpecError):
        KVCache(4, 4, 2, 8, num_layers=0)
    assert KVCache(4, 4, 2, 8, dtype=torch.float16).v_pages[0].shape == (4, 4, 2, 8)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    cache, tokens = cache_of(), Tokens()
    held = filled(cache, tokens, 5, 5)
    requests = list(held)
    k, v = layer_of(tokens.make(2), 0)
    q = tokens.queries(2)
    for wrong in (
        lambda: cache.append(requests, k[:1], v), lambda: cache.append(requests, k, v[:1]),
        lambda: cache.append(requests, k.double(), v), lambda: cache.append(requests, k, v.half()),
        lambda: cache.append(requests, k[:, :1], v), lambda: cache.append(requests, v, k),
        lambda: cache.append(requests, k.to("meta"), v), lambda: cache.append(requests, None, v),
        lambda: cache.append(requests, k, v, counts=[1]),
        lambda: cache.append(requests, k, v, counts=[3, -1]),
        lambda: cache.append(requests, k, v, counts=1.0), lambda: cache.append(requests, k, v, counts=[2, 2]),
        lambda: cache.append([requests[0]] * 2, k, v), lambda: cache.append(requests, k.to_sparse(), v),
        lambda: cache.append(requests, k, v, rope=Rope(rotary_dim=10)),
        lambda: cache_of(layers=2).append((), k[:0], v[:0]), lambda: cache.reserve(requests, [1, 2.5]),
        lambda: cache.attend(q[:1], requests), lambda: cache.attend(q[None], requests),
        lambda: cache.attend(q, requests, counts=[1, 2]), lambda: cache.attend(q, requests, counts=[3, -1]),
        lambda: cache.attend(q, requests, layer=1), lambda: cache.attend(q, requests, layer=-1),
        lambda: cache.attend(None, requests), lambda: cache.slot_mapping(requests, [6, 0]),
        lambda: cache.truncate(requests, [4]), lambda: cache.truncate(requests, 6),
        lambda: cache.attend(q, cache_of().reserve((), 0)),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            wrong()
        same(cache, held)


def test_B_pag_05_B_pag_06_PF19_every_call_is_checked_by_itself():
    """There is no plan that could belong to another batch, dtype or page size."""
    cache, tokens = cache_of(), Tokens()
    held = filled(cache, tokens, 5, 5, 3)
    q = tokens.queries(3)
    for wrong in (q.bfloat16(), q.double(), q[:, :5], q[..., :4], q[:2]):
        with pytest.raises(SpecError):
            cache.attend(wrong, list(held))
    for size in (3, 1, 2):
        requests = [*held][:size]
        hold(attended(cache, q[:size], requests), expected(q[:size], [held[r] for r in requests], [1] * size))


def test_PF20_a_table_once_given_stays():
    cache, tokens = cache_of(), Tokens()
    held = filled(cache, tokens, 5)
    table, lens = cache.page_table(list(held)), cache.kv_lens(list(held))
    before = table.clone(), lens.clone()
    table_again = cache.page_table(list(held))
    append(cache, {request: tokens.make(9) for request in held})
    cache.free(list(held))
    filled(cache, tokens, 20)
    assert torch.equal(table, before[0]) and torch.equal(lens, before[1])
    table_again.fill_(99)
    assert torch.equal(table, before[0])
    (other,) = cache.requests()
    own = cache.page_table(other)
    own.fill_(-5)
    assert (cache.page_table(other) >= 0).all()


def test_PF23_a_pool_changed_behind_the_cache_is_noticed():
    k, v = (torch.zeros(4, 2, HEADS, DIM) for _ in range(2))
    cache, tokens = KVCache.over(k, v), Tokens()
    (a,) = cache.add()
    token = tokens.normal(1, HEADS, DIM)
    cache.append(a, token, token)
    for pool, damage in ((k, k[:2]), (v, v[:2]), (k, k.half()), (v, v.half())):
        good = pool.data
        pool.data = damage
        for call in (lambda: cache.append(a, token, token), lambda: cache.attend(tokens.queries(1), a)):
            with pytest.raises(SpecError, match="Make a new cache"):
                call()
        pool.data = good
    with pytest.raises(RuntimeError):  # torch itself forbids another device
        k.data = k.to("meta")
    with pytest.raises(AttributeError):
        cache.k_pages = (k.half(),)  # type: ignore[misc]
    assert cache.length(a) == 1
    cache.check()


def test_it_is_for_inference():
    cache, tokens = cache_of(), Tokens()
    held = filled(cache, tokens, 5)
    k, v = layer_of(tokens.make(1), 0)
    q = tokens.queries(1)
    for name in ("k", "v", "q"):
        given = {"k": k, "v": v, "q": q}
        given[name] = given[name].clone().requires_grad_()
        with pytest.raises(UnsupportedError, match="no_grad"):
            cache.append(list(held), **given, rope=Rope())
        same(cache, held)
        with torch.no_grad():
            cache.append(list(held), **given, rope=Rope())
        cache.truncate(list(held), 5)


def test_B_pag_12_B_pag_11_a_slot_of_minus_one_is_skipped():
    """Padding and bad pages are never written: neither to the last page nor to a trash slot."""
    tokens = Tokens()
    k_pages, v_pages = torch.zeros(3, 2, HEADS, DIM), torch.zeros(3, 2, HEADS, DIM_V)
    k, v = layer_of(tokens.make(5), 0)
    for kind in (torch.int32, torch.int64):
        k_pages.zero_(), v_pages.zero_()
        write_tokens(k_pages, v_pages, k, v, torch.tensor([3, -1, 0, -1, 4], dtype=kind))
        for pool, new in ((k_pages, k), (v_pages, v)):
            flat = pool.flatten(0, 1)
            assert torch.equal(flat[[3, 0, 4]], new[[0, 2, 4]]) and (flat[[1, 2, 5]] == 0).all()
    write_tokens(k_pages, v_pages, k, v, torch.full((5,), -1))
    before = k_pages.clone(), v_pages.clone()
    bad = torch.tensor([0, 1, 2, 3, 4])
    for wrong in (
        (k, v, bad + 2), (k, v, bad - 2), (k, v, bad * 0), (k, v, bad[:4]), (k, v, bad.float()), (k, v, None),
        (k[:4], v, bad), (k, v.half(), bad), (v, k, bad), (k, v, bad.to("meta")), (k[0, 0, 0], v, bad),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            write_tokens(k_pages, v_pages, *wrong)
        assert torch.equal(k_pages, before[0]) and torch.equal(v_pages, before[1])
    with pytest.raises(SpecError):
        write_tokens(k_pages[0], v_pages, k, v, bad)


def test_layers_may_be_many_and_requests_none():
    cache = cache_of(4, layers=2)
    with cache.reserve((), ()) as step:
        step.write(torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS, DIM_V), layer=1)
        assert cache.attend(torch.zeros(0, HEADS * GROUP, DIM), step).shape == (0, HEADS * GROUP, DIM_V)
    (a,) = cache.add()
    got = attended(cache, torch.randn(1, HEADS * GROUP, DIM), a)
    assert (got.out == 0).all() and (got.lse == -math.inf).all()
    assert cache.page_table(a).shape == (1, 0) and cache.kv_lens(()).shape == (0,)
    assert cache.add(0) == () and cache.fork(a, 0) == ()
    assert (cache.dtype, cache.device) == (torch.float32, torch.empty(0).device)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no system that gives huge pages to who asks")
def test_pools_may_be_huge_pages_of_memory(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(storages, "_may_be_huge", lambda *x: asked.append(x))
    cache = KVCache(1000, 16, 2, 64, head_dim_v=128)  # 8 and 16 MiB
    for pools, (start, size) in zip((cache.k_pages, cache.v_pages), asked, strict=True):
        first, end = pools[0].data_ptr(), pools[0].data_ptr() + pools[0].nbytes
        assert start % storages._HUGE == size % storages._HUGE == 0 and first <= start < start + size <= end
        assert start - first < storages._HUGE and end - start - size < storages._HUGE
    asked.clear()
    KVCache(4, 16, 2, 64)
    KVCache(1000, 16, 2, 64, device="meta")
    assert not asked
    monkeypatch.undo()
    storages._may_be_huge(0, 1 << 21)  # refused: nothing is there
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert storages.empty_of_keys((1 << 22,), torch.float32, "cpu").shape == (1 << 22,)


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (0, 1), ()])
def test_slots_are_64_bit_numbers(counts: tuple[int, ...]) -> None:
    """Of one token each, and of several."""
    table = np.array([[7, 2**28], [2**28 + 1, 5]], np.int32)[: len(counts)]
    starts = (19, 3)[: len(counts)]
    with np.errstate(over="ignore"):
        got = slots_of(table, 16, starts, counts)
    places = [
        (row, at + i) for row, at, n in zip(table.tolist(), starts, counts, strict=True) for i in range(n)
    ]
    want = [row[at // 16] * 16 + at % 16 for row, at in places], [at for _, at in places]
    assert [x.tolist() for x in got] == [*want]
    assert all(x.dtype is torch.int64 for x in got)


def test_a_pool_whose_storage_shrank_is_not_written_beyond_it():
    k, v = torch.zeros(8, 16, 2, 64), torch.zeros(8, 16, 2, 64)
    cache = KVCache.over(k, v)
    (request,) = cache.add()
    token = torch.randn(1, 2, 64)
    for _ in range(3):
        cache.append([request], token, token)
    v.untyped_storage().resize_(2048)
    with pytest.raises((SpecError, RuntimeError), match="storage"):
        cache.append([request], token, token)


def test_known_writes_pass_by_a_pool_that_needs_a_gradient_by_now():
    cache = KVCache(4, 16, num_kv_heads=2, head_dim=8)
    (request,) = cache.add()
    cache.k_pages[0].requires_grad_()
    for _ in range(3):
        cache.append([request], torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    assert cache.k_pages[0].is_leaf
