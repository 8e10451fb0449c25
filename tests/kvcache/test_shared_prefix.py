"""Cascade: what all requests share is read once, and the result is that of reading it for each."""

from __future__ import annotations

import pytest
import torch

from polyflash.errors import SpecError
from polyflash.kvcache import KVCache, Request, shared_prefix
from tests.device import DEVICE
from tests.kvcache.plain import GROUP, HEADS, Token, Tokens, append, cache_of, expected, filled, hold

Held = dict[Request, list[Token]]


def family(prefix: int, own: tuple[int, ...], *, page_size: int = 4, seed: int = 0) -> tuple[KVCache, Held]:
    """Requests that share `prefix` tokens and have `own` ones each."""
    cache, tokens = cache_of(64, page_size), Tokens(seed=seed)
    held = filled(cache, tokens, prefix)
    (parent,) = held
    held = {child: [*held[parent]] for child in cache.fork(parent, len(own))}
    cache.free(parent)
    added = {request: tokens.make(n) for request, n in zip(held, own, strict=True)}
    append(cache, added)
    return cache, {request: [*held[request], *added[request]] for request in held}


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 1, 2)])
@pytest.mark.parametrize("prefix, own", [(8, (3, 5, 6)), (9, (3, 5, 4)), (23, (4, 9, 3)), (12, (3, 3, 3))])
def test_H8_shared_pages_are_read_once_and_results_are_equal(
    prefix: int, own: tuple[int, ...], counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    cache, held = family(prefix, own)
    requests, counts = list(held), list(counts)
    q = Tokens(seed=9).queries(sum(counts))
    calls = []
    original = shared_prefix.attention_paged

    def spy(q, k_pages, v_pages, page_table, kv_lens, **options):
        calls.append((q.shape[0], page_table.shape, kv_lens.tolist()))
        return original(q, k_pages, v_pages, page_table, kv_lens, **options)

    monkeypatch.setattr(shared_prefix, "attention_paged", spy)
    for causal in (True, False):
        for sinks in (None, torch.randn(HEADS * GROUP)):
            options = {"causal": causal, "sinks": sinks, "softcap": 2.0, "scale": 0.5}
            del calls[:]
            got = cache.attend(q, requests, counts=counts, cascade=True, return_lse=True, **options)
            hold(got, expected(q, [*held.values()], counts, **options))
            pages = prefix // 4
            assert calls[0][1:] == ((1, pages), [4 * pages]) and len(calls) == 2
            assert calls[1][2] == [prefix + n - 4 * pages for n in own]
    plan = cache.explain_attend(requests, counts=counts, cascade=True)
    total = sum(len(x) for x in held.values())
    assert (plan.cascade, plan.shared_pages, plan.shared_keys) == (True, prefix // 4, prefix // 4 * 4)
    assert plan.keys == total - 2 * plan.shared_keys and plan.rows == len(q)
    assert "cascade" in str(plan) and f"first {pages} pages" in str(plan)
    out = torch.empty_like(got.out)
    assert cache.attend(q, requests, counts=counts, cascade=True, out=out, **options) is out
    assert torch.equal(out, got.out)


def test_B_pag_07_it_says_when_nothing_is_shared_and_leaves_no_trace():
    cache, held = family(8, (3, 5))
    requests = list(held)
    q = Tokens().queries(2)
    plain = cache.attend(q, requests)
    cases = {
        "not asked for": (requests, {"cascade": False}),
        "Fewer than two": (requests[:1], {}),
        "window": (requests, {"window": (3, 0)}),
        "alibi_slopes": (requests, {"alibi_slopes": torch.rand(HEADS * GROUP)}),
        "kv_starts": (requests, {"kv_starts": torch.tensor([1, 2], dtype=torch.int32)}),
    }
    for reason, (who, options) in cases.items():
        plan = cache.explain_attend(who, **{"cascade": True, **options})
        assert not plan.cascade and plan.shared_pages == 0 and reason in plan.reason, reason
        assert str(plan).startswith("one call") and plan.keys == sum(len(held[r]) for r in who)
        if "kv_starts" not in options:
            got = cache.attend(q[: len(who)], who, return_lse=True, **{"cascade": True, **options})
            options.pop("cascade", None)
            hold(
                got, expected(q[: len(who)], [held[r] for r in who], [1] * len(who), **options), label=reason
            )
        assert torch.equal(cache.attend(q, requests), plain)
    (stranger,) = (other := filled(cache, Tokens(seed=5), 9))
    assert "No full page" in cache.explain_attend([*requests, stranger], cascade=True).reason
    q = Tokens().queries(3)
    got = cache.attend(q, [*requests, stranger], cascade=True, return_lse=True)
    hold(got, expected(q, [*held.values(), other[stranger]], [1] * 3))


def test_rows_that_do_not_see_the_whole_prefix_keep_it_from_being_shared():
    """A causal row within the shared tokens: only pages that it sees whole are shared."""
    cache, held = family(13, (0, 0))
    requests = list(held)
    for rows, pages in ((1, 3), (2, 3), (3, 2), (6, 2), (7, 1), (12, 0)):
        q = Tokens(seed=rows).queries(2 * rows)
        plan = cache.explain_attend(requests, counts=rows, cascade=True)
        assert plan.shared_pages == pages, rows
        got = cache.attend(q, requests, counts=rows, cascade=True, return_lse=True)
        hold(got, expected(q, [*held.values()], [rows] * 2), label=rows)
        all_see = cache.explain_attend(requests, counts=rows, cascade=True, causal=False)
        assert all_see.shared_pages == 3


def test_a_request_that_is_all_prefix():
    """Its own part has no key: the identity of the merge, beside others that go on."""
    cache, held = family(8, (0, 3, 0))
    requests, sinks = list(held), torch.randn(HEADS * GROUP)
    q = Tokens().queries(3)
    for given in (None, sinks):
        got = cache.attend(q, requests, cascade=True, return_lse=True, sinks=given)
        hold(got, expected(q, [*held.values()], [1] * 3, sinks=given))
    cache, held = family(8, (0, 0))
    got = cache.attend(q[:2], list(held), cascade=True, return_lse=True)
    assert cache.explain_attend(list(held), cascade=True).shared_pages == 2
    hold(got, expected(q[:2], [*held.values()], [1] * 2))


def test_pages_shared_elsewhere_than_at_the_front_do_not_count():
    """The same pages behind different first ones."""
    cache, held = family(8, (4, 4))
    requests = list(held)
    tables = cache._tables(requests)
    assert tables.common_pages == 2
    tables.host_table[1, 0] = 63
    other = shared_prefix.Tables(tables.host_table, tables.lengths, 4, tables.device)
    assert other.common_pages == 0
    other.host_table[1, 0] = other.host_table[0, 0]
    other.host_table[1, 2] = other.host_table[0, 2]
    assert shared_prefix.Tables(other.host_table, (12, 12), 4, tables.device).common_pages == 3
    assert shared_prefix.Tables(other.host_table, (12, 5), 4, tables.device).common_pages == 2
    assert shared_prefix.Tables(other.host_table[:0], (), 4, tables.device).common_pages == 0


def test_a_step_cascades_too():
    cache, held = family(8, (2, 3))
    tokens = Tokens(seed=4)
    new = tokens.make(2)
    q = tokens.queries(2)
    with cache.reserve(list(held)) as step:
        step.write(torch.stack([t.k[0] for t in new]), torch.stack([t.v[0] for t in new]))
        got = cache.attend(q, step, cascade=True, return_lse=True)
        assert cache.explain_attend(step, cascade=True).shared_keys == 8
    hold(got, expected(q, [[*old, t] for old, t in zip(held.values(), new, strict=True)], [1, 1]))


@pytest.mark.parametrize("rows", [1, 10, 11, 40])
def test_few_rows_are_heads_of_one_token_and_many_are_rows(rows: int):
    """Up to 64 rows of a key/value head, with the group; both ways agree with float64, lse too."""
    cache, held = family(40, (50, 45))
    q = Tokens(seed=rows).queries(2 * rows)
    got = cache.attend(q, list(held), counts=rows, cascade=True, return_lse=True)
    hold(got, expected(q, [*held.values()], [rows] * 2))
    assert got.out.shape[0] * GROUP > 64 or rows <= 10


def test_rows_aligned_with_the_first_key_share_nothing():
    cache, held = family(8, (3, 5))
    q, requests = Tokens(seed=3).queries(4), list(held)
    got = cache.attend(q, requests, counts=2, cascade=True, causal="top_left")
    assert torch.equal(got, cache.attend(q, requests, counts=2, causal="top_left"))
    assert "top_left" in cache.explain_attend(requests, counts=2, cascade=True, causal="top_left").reason
    for wrong in ("botom", 1, None):
        for call in (cache.explain_attend, lambda *a, **o: cache.attend(q, *a, **o)):
            with pytest.raises(SpecError, match="causal"):
                call(requests, counts=2, cascade=True, causal=wrong)


def test_an_unbounded_window_is_none():
    cache, held = family(8, (3, 5))
    assert cache.explain_attend(list(held), cascade=True, window=(None, None)).cascade


def test_the_place_of_a_cascade_is_checked_and_has_the_order_of_q():
    cache, held = family(8, (3, 5))
    requests, q = list(held), Tokens(seed=3).queries(2)
    for wrong in (torch.empty_like(q, dtype=torch.float64), q.new_empty(2, 1, *q.shape[1:]), q[:1], 3):
        with pytest.raises(SpecError, match="out"):
            cache.attend(q, requests, cascade=True, out=wrong)
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert cache.attend(turned, requests, cascade=True).stride() == cache.attend(turned, requests).stride()


@pytest.mark.parametrize("turned", [False, True])
def test_a_cascade_gives_what_one_call_does_in_strides_and_dtype(turned: bool):
    cache, held = family(12, (3, 5, 6))
    q = Tokens(seed=3).queries(3)
    if turned:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    plain, cascade = (cache.attend(q, list(held), cascade=on) for on in (False, True))
    assert cascade.stride() == plain.stride() and cascade.dtype is plain.dtype
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        plain, cascade = (cache.attend(q, list(held), cascade=on) for on in (False, True))
    assert cascade.stride() == plain.stride() and cascade.dtype is plain.dtype
