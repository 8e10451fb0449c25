"""Room in the cache: what is in use, what a step will take, windows, evicted tokens, remembered prefixes."""

from __future__ import annotations

import pytest
import torch

from polyflash import SpecError, column_sums
from polyflash.kvcache import KVCache, OutOfPages, Pages, Rope, heavy_hitters
from polyflash.reference import attention_reference
from tests import device
from tests.kvcache.plain import (
    DIM,
    DIM_V,
    HEADS,
    Tokens,
    append,
    cache_of,
    expected,
    filled,
    hold,
    layer_of,
    same,
)


def test_what_prints_is_short():
    cache = cache_of(8, 4, 2)
    (request,) = filled(cache, Tokens(2), 6)
    assert repr(cache) == (
        "KVCache(8 pages of 4 tokens, 2 layers, 2 kv heads, head_dim 8 and 6, torch.float32, "
        f"{cache.device}, 224 bytes per token; 1 requests, 6 pages free)"
    )
    snapshot = cache.snapshot()
    assert repr(snapshot) == "Snapshot(1 requests, 2 pages, held)"
    cache.release(snapshot)
    assert (
        repr(cache.swap_out(request)[0])
        == "SwappedRequest(6 tokens, 2 layers, 2 kv heads, head_dim 8, torch.float32)"
    )


def test_stats_count_pages_tokens_and_bytes():
    cache = cache_of(16, 4, 2)
    tokens = Tokens(2)
    a, b = filled(cache, tokens, 10, 4)
    (c,) = cache.fork(a)
    append(cache, {c: tokens.make(1)})  # a copy of a's last page, and a token in it
    stats = cache.stats()
    assert (stats.requests, stats.tokens, stats.stored_tokens) == (3, 25, 10 + 4 + 3)
    assert (stats.pages, stats.used_pages, stats.shared_pages, stats.free_pages) == (16, 5, 2, 11)
    whole = 16 * 4 * 2 * HEADS * (DIM + DIM_V) * 4
    assert stats.num_bytes == whole and stats.used_bytes == whole // 16 * 5
    assert stats.fragmentation == pytest.approx(1 - 17 / 20) and stats.evictions == 0
    empty = cache_of(0, 4).stats()
    assert empty.fragmentation == 0.0 and empty.used_bytes == 0
    cache.free([a, b, c])
    assert cache.stats().used_pages == cache.stats().stored_tokens == 0


def test_pages_needed_is_what_a_step_takes():
    cache = cache_of(16, 4)
    a, b = filled(cache, Tokens(), 6, 8)
    (c,) = cache.fork(a)
    for requests, counts, want in (
        (a, 1, 1),
        ([a, c], 1, 1),
        ([a, c], [2, 3], 2),
        (b, 1, 1),
        (b, 0, 0),
        ([], 1, 0),
    ):
        assert cache.pages_needed(requests, counts) == want
        free = cache.num_free_pages
        step = cache.reserve(requests, counts)
        assert free - cache.num_free_pages == want
        step.rollback()
    assert cache.pages_needed(new=[1, 4, 5]) == 4 and cache.pages_needed(b, 1, new=[9]) == 4
    for wrong in ({"counts": -1}, {"new": [-1]}, {"new": [2**40]}):
        with pytest.raises(SpecError):
            cache.pages_needed(a, **wrong)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_window_slides_in_bounded_room(page_size: int):
    """300 tokens through a window of 20, in a pool for 48: the same numbers as with all of them."""
    left, tokens, held = 20, Tokens(), []
    cache = cache_of(-(-48 // page_size) + 1, page_size)
    (request,) = cache.add()
    for step in range(60):
        new, q = tokens.make(5), tokens.queries(5)
        held += new
        with cache.reserve(request, 5) as open_step:
            open_step.write(*layer_of(new, 0))
            got = cache.attend(q, open_step, window=(left, 0), return_lse=True)
        hold(got, expected(q, [held], [5], window=(left, 0)), label=step)
        cache.free_left(request, left)
        cache.check()
        assert cache.start(request) == max(0, len(held) - 1 - left) // page_size * page_size
        assert cache.length(request) == cache.position(request) == len(held)
    same(cache, {request: held})
    table = cache.page_table(request)[0]
    assert (table[: cache.start(request) // page_size] == -1).all() and (
        table >= 0
    ).sum() <= left // page_size + 2


def test_no_row_sees_what_was_given_back():
    cache, tokens = cache_of(16, 4), Tokens()
    (request,) = held = filled(cache, tokens, 30)
    q = tokens.queries(1)
    cache.free_left(request, 5)  # the last row sees 24 to 29
    assert cache.start(request) == 24
    hold(
        cache.attend(q, request, window=(5, None), return_lse=True),
        expected(q, [held[request]], [1], window=(5, None)),
    )
    for wrong, words in (
        ({}, "window: got None, wanted at most 5 neighbours on the left. free_left"),
        ({"window": (6, 0)}, "window: got 6, wanted at most 5"),
        ({"window": (5, 0), "q_offset": 29}, "q_offset: got one"),
        ({"window": (5, 0), "kv_lens": torch.tensor([9])}, "kv_lens: got one"),
        ({"window": (5, 0), "causal": "top_left"}, "causal: got one"),
    ):
        for call in (
            lambda **x: cache.attend(q, request, **x),
            lambda **x: cache.explain_attend(request, **x),
        ):
            with pytest.raises(SpecError, match=f"^{words}"):
                call(**wrong)
    with pytest.raises(SpecError, match="starts"):
        cache.read(request)
    with pytest.raises(SpecError, match="0, or 24 or more"):
        cache.truncate(request, 23)
    (child,) = cache.fork(request)
    (out,) = cache.swap_out(request)
    assert (out.start, out.length) == (24, 30) and out.k.shape[1] == 6
    (back,) = cache.swap_in([out])
    same(cache, {child: held[request], back: held[request]})
    with pytest.raises(SpecError, match="whole pages of 5 tokens"):
        cache_of(16, 5).swap_in([out])
    cache.truncate(back, 24)
    append(cache, {back: held[request][24:26]})
    same(cache, {child: held[request], back: held[request][:26]})
    cache.truncate([back, child], 0)
    append(cache, {back: held[request][:3]})
    assert cache.start(back) == 0
    same(cache, {child: [], back: held[request][:3]})


def test_heavy_hitters_are_those_that_received_attention():
    """H2O over a model's own sums: the output of what was kept is attention over the kept keys."""
    cache, tokens = cache_of(16, 4), Tokens()
    (request,) = filled(cache, tokens, 24)
    q = tokens.queries(6)
    k, v = cache.read(request)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k)]
    lse = cache.attend(q, request, counts=6, return_lse=True).lse
    sums = column_sums(*heads_first, lse[None], causal=True)[0].unflatten(0, (HEADS, -1)).sum(1)
    keep = heavy_hitters(sums, 10, recent=4)
    assert (
        keep.shape == (HEADS, 10) and (keep.diff() > 0).all() and (keep[:, 6:] == torch.arange(20, 24)).all()
    )
    for head in range(HEADS):
        others = [n for n in range(20) if n not in keep[head].tolist()]
        assert sums[head, others].max() <= sums[head, keep[head, :6]].min()
    cache.evict(request, keep[None])
    assert cache.length(request) == 10 and cache.position(request) == 24 and cache.stats().used_pages == 3
    one = tokens.queries(1)
    got = cache.attend(one, request, return_lse=True)
    kept = [x.gather(0, keep.T[..., None].expand(-1, -1, x.shape[2])) for x in (k, v)]
    want = attention_reference(one[None], kept[0][None], kept[1][None], layout="bshd")
    hold(got, type(got)(want.out[0], want.lse[0]))
    assert heavy_hitters(torch.ones(2, 5), 3, recent=1).tolist() == [[0, 1, 4]] * 2
    for wrong in ({"keep": 25}, {"recent": 11}, {"sums": [1.0]}):
        with pytest.raises(SpecError):
            heavy_hitters(**({"sums": sums, "keep": 10, "recent": 4} | wrong))


def test_evicted_tokens_leave_the_others_as_they_are():
    cache, tokens = cache_of(9, 4, 2), Tokens(2)
    (request,) = held = filled(cache, tokens, 18)
    (child,) = cache.fork(request)
    snapshot = cache.snapshot()
    cache.evict(request, torch.tensor([0, 1, 2, 3, 4, 5, 17]))  # its first page stays shared
    after = [held[request][n] for n in (0, 1, 2, 3, 4, 5, 17)]
    same(cache, {request: after, child: held[request]})
    assert cache.page_table(request)[0, 0] == cache.page_table(child)[0, 0] and cache.num_free_pages == 3
    with pytest.raises(SpecError, match="0, or 7 or more"):
        cache.truncate(request, 6)
    (out,) = cache.swap_out(request)
    (back,) = cache.swap_in([out])
    assert cache.position(back) == 18 and cache.length(back) == 7
    append(cache, {back: held[request][:1]})
    cache.truncate(back, 7)
    with pytest.raises(SpecError, match="0, or 7 or more"):
        cache.truncate(back, 6)
    cache.restore(snapshot)
    same(cache, {request: held[request], child: held[request]})
    cache.release(snapshot)
    filled(cache, tokens, 16)
    with pytest.raises(OutOfPages):  # every page is the child's too, and none is free
        cache.evict(request, torch.arange(1, 18))
    cache.check()
    cache.free(child)
    cache.evict(request, torch.arange(1, 18))  # in place now
    assert cache.length(request) == 17
    cache.truncate(request, 0)
    assert cache.position(request) == 0
    for wrong in (
        torch.tensor([0.5]),
        torch.tensor([[0]] * 3),
        [0],
        torch.tensor([1]),
        torch.zeros((), dtype=torch.int64),
    ):
        with pytest.raises(SpecError, match=r"^keep: got"):
            cache.evict(request, wrong)  # type: ignore[arg-type]
    step = cache.reserve(request, 1)
    with pytest.raises(SpecError, match="step open"):
        cache.evict(request, torch.tensor([], dtype=torch.int64))
    step.rollback()


def test_tokens_after_an_eviction_are_rotated_to_their_own_positions():
    """As if all tokens were there, and the evicted ones hidden by a mask."""
    rope, tokens = Rope(100.0), Tokens()
    cache = KVCache(16, 4, HEADS, DIM, head_dim_v=DIM_V)
    (request,) = cache.add()
    made = tokens.make(22)
    k, v = layer_of(made, 0)
    cache.append(request, k[:20], v[:20], counts=20, rope=rope)
    keep = torch.tensor([0, 3, 7, 15, 18, 19])
    cache.evict(request, keep)
    q = cache.append(request, k[20:], v[20:], counts=2, rope=rope, q=tokens.queries(2))
    seen = torch.cat((keep, torch.tensor([20, 21])))
    rotated = rope.rotate(k, torch.arange(22))[seen]
    want = attention_reference(q[None], rotated[None], v[seen][None], causal=True, layout="bshd")
    got = cache.attend(q, request, counts=2, return_lse=True)
    hold(got, type(got)(want.out[0], want.lse[0]))
    assert torch.equal(cache.read(request)[0], rotated) and cache.position(request) == 22


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 3, (count,), generator=device.generator(seed)).tolist()


def test_a_remembered_prefix_is_found_in_full_pages():
    cache, tokens = cache_of(12, 4), Tokens()
    (a,) = held = filled(cache, tokens, 11)
    prompt = ids(11)
    assert cache.remember(a, prompt) == 8 and cache.cached_tokens(prompt) == 8
    cache.free(a)
    stats = cache.stats()
    assert (stats.used_pages, stats.remembered_pages, stats.free_pages) == (
        0,
        2,
        10,
    ) and cache.num_free_pages == 12
    same(cache, {})
    b = cache.begin([*prompt, 5, 6])
    assert cache.length(b) == 8 and cache.num_free_pages == 10
    same(cache, {b: held[a][:8]})
    for other, found in (
        (prompt[:9], 8), (prompt[:8], 4), (prompt[:4], 0), ([], 0),  # the last token's row is to be computed
        ([*prompt[:4], 9, *prompt[5:]], 4), ([9, *prompt[1:]], 0), (prompt[4:], 0),
        (torch.tensor(prompt), 8), (tuple(prompt), 8),
    ):  # fmt: skip
        assert cache.cached_tokens(other) == found, other
    assert cache.cached_tokens(prompt, key="adapter") == 0
    cache.forget()
    assert cache.cached_tokens(prompt) == 0
    same(cache, {b: held[a][:8]})
    cache.free(b)
    assert cache.stats().free_pages == 12
    for wrong in ("abc", [1.0], 3, torch.ones(2, 2).long()):
        with pytest.raises(SpecError, match=r"^tokens: got"):
            cache.begin(wrong)  # type: ignore[arg-type]


def test_tokens_that_hash_alike_are_told_apart():
    """hash(-1) == hash(-2) in Python, and so do tuples of them."""
    cache = cache_of(12, 2)
    (a,) = filled(cache, Tokens(), 6)
    assert hash((-1, -1)) == hash((-2, -2))
    cache.remember(a, [-1, -1, -2, -2, -1, -2])
    assert cache.cached_tokens([-1, -1, -2, -2, -1, -2, 0]) == 6
    assert cache.cached_tokens([-2, -2, -2, -2, 0]) == cache.cached_tokens([-2, -2, 0]) == 0
    assert cache.cached_tokens([-1, -1, -1, -1, 0]) == 2


def test_steps_take_what_was_unused_for_longest():
    cache, tokens = cache_of(6, 4, scrub=True), Tokens()
    a, b = held = filled(cache, tokens, 8, 8)
    first, second = ids(9, 1), ids(9, 2)
    cache.remember(a, first[:8]), cache.remember(b, second[:8])
    cache.free(a)
    cache.free(b)
    assert cache.num_free_pages == 6 and cache.pages_needed(new=[24]) == 6
    cache.free(cache.begin(first))  # used again: b's are older now
    (c,) = cache.add()
    append(cache, {c: tokens.make(9)})  # two free pages, and the end of b
    assert (
        cache.cached_tokens(second) == 4 and cache.cached_tokens(first) == 8 and cache.stats().evictions == 1
    )
    with pytest.raises(OutOfPages) as caught:
        cache.reserve(c, 16)
    assert (caught.value.needed, caught.value.free) == (4, 3) and cache.cached_tokens(second) == 4
    d = cache.begin(first)
    with pytest.raises(OutOfPages):  # what a request has is not taken
        cache.reserve(c, 8)
    same(cache, {c: cache_tokens(cache, c), d: held[a][:8]})
    with cache.reserve(c, 4) as step:  # a page that was remembered comes without its bits
        page = int(step.tables.page_table[0, -1])
        assert not cache.k_pages[0][page].any() and cache.cached_tokens(second) == 0
        step.write(*layer_of(tokens.make(4), 0))
    cache.check()


def cache_tokens(cache, request):
    return [type("T", (), {"k": k[None], "v": v[None]}) for k, v in zip(*cache.read(request), strict=True)]


def test_who_begins_alike_writes_to_a_copy():
    cache, tokens = cache_of(12, 4), Tokens()
    (a,) = held = filled(cache, tokens, 8)
    prompt = ids(9)
    cache.remember(a, prompt[:8])
    cache.truncate(a, 6)
    append(cache, {a: tokens.make(2)})
    b = cache.begin(prompt)
    same(cache, {a: [*held[a][:6], *cache_tokens(cache, a)[6:]], b: held[a]})
    assert cache.remember(a, [*prompt[:6], 7, 7]) == 8 and cache.cached_tokens([*prompt[:6], 7, 7, 7]) == 8
    assert cache.cached_tokens(prompt) == 8
    for request, words in ((a, "9 for 8"), (b, "evicted or given back")):
        if request is b:
            cache.evict(b, torch.arange(4))
        with pytest.raises(SpecError, match=words):
            cache.remember(request, prompt)
    cache.check()


def test_what_followed_a_forgotten_page_is_not_found():
    pages = Pages(3, 1)
    (a,) = pages.add()
    pages.commit(pages.reserve([a], [3]))
    pages.remember(a, [1, 2, 3], None)
    (b,) = pages.fork(a)
    pages.free_left([a, b], 0)  # only the last page is still owned
    pages.check()
    (c,) = pages.add()
    pages.commit(pages.reserve([c], [2]))
    assert pages.found([1, 2, 3, 4], None) == [] and pages.num_free == 0
    pages.remember(c, [1, 5], None)
    assert pages.found([1, 5, 3, 4], None) == pages.pages(c).tolist()
    pages.free([a, b])
    assert pages.num_free == 1
    pages.check()
