"""PF25: hundreds of random operations on the cache, each followed on a plain list of tokens per request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from polyflash.kvcache import OutOfPages, Request, Snapshot, SwappedRequest
from tests.kvcache.plain import Token, Tokens, append, cache_of, expected, hold, layer_of, same

LAYERS, PAGES, MOST = 2, 20, 6
STEPS: dict[str, int] = {}
Held = dict[Request, list[Token]]


def counted(run: Callable[..., None]) -> Callable[..., None]:
    def step(self: Any, **drawn: Any) -> None:
        STEPS[run.__name__] = STEPS.get(run.__name__, 0) + 1
        run(self, **drawn)

    step.__name__ = run.__name__
    return step


class CacheMachine(RuleBasedStateMachine):
    """`held` is the model: the tokens of every living request."""

    @initialize(page_size=st.sampled_from((1, 3, 4, 8)), scrub=st.booleans(), seed=st.integers(0, 999))
    def start(self, page_size: int, scrub: bool, seed: int) -> None:
        self.cache = cache_of(PAGES, page_size, LAYERS, scrub=scrub)
        self.tokens = Tokens(LAYERS, seed)
        self.held: Held = {}
        self.swapped: list[tuple[SwappedRequest, list[Token]]] = []
        self.snapshot: tuple[Snapshot, Held] | None = None
        self.freed: list[Request] = []

    def some(self, data: Any, least: int = 1) -> list[Request]:
        size = st.integers(least, len(self.held))
        return data.draw(st.permutations(list(self.held)))[: data.draw(size)]

    def pages_for(self, added: dict[Request, int]) -> int:
        """New pages of an append as the lengths say it, without copies."""
        size = self.cache.page_size
        return sum(
            -(-(len(self.held[r]) + n) // size) + (-len(self.held[r]) // size) for r, n in added.items()
        )

    @precondition(lambda self: len(self.held) < MOST)
    @rule(count=st.integers(1, 2))
    @counted
    def add(self, count: int) -> None:
        self.held |= {request: [] for request in self.cache.add(count)}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    @counted
    def append(self, data: Any) -> None:
        counts = {request: data.draw(st.integers(0, 9)) for request in self.some(data)}
        added = {request: self.tokens.make(n) for request, n in counts.items()}
        room, free = self.cache.num_free_pages, self.pages_for(counts)
        try:
            append(self.cache, added)
        except OutOfPages as error:
            assert error.needed > error.free == room
            assert free + len(counts) >= error.needed >= free  # at most one copy each
            return
        assert free <= room
        for request, new in added.items():
            self.held[request] = [*self.held[request], *new]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), layers=st.integers(0, LAYERS))
    @counted
    def fail_to_append(self, data: Any, layers: int) -> None:
        """An exception after some layers wrote their tokens."""
        requests, before = self.some(data), self.cache.num_free_pages
        try:
            with self.cache.reserve(requests, 3) as step:
                for layer in range(layers):
                    step.write(*layer_of(self.tokens.make(3 * len(requests)), layer), layer=layer)
                raise InterruptedError
        except (InterruptedError, OutOfPages):
            assert self.cache.num_free_pages == before

    @precondition(lambda self: self.held and len(self.held) < MOST)
    @rule(data=st.data(), count=st.integers(1, 2))
    @counted
    def fork(self, data: Any, count: int) -> None:
        parent = data.draw(st.sampled_from(list(self.held)))
        self.held |= {child: [*self.held[parent]] for child in self.cache.fork(parent, count)}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    @counted
    def truncate(self, data: Any) -> None:
        kept = {r: data.draw(st.integers(0, len(self.held[r]))) for r in self.some(data)}
        self.cache.truncate(list(kept), list(kept.values()))
        for request, n in kept.items():
            self.held[request] = self.held[request][:n]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    @counted
    def free(self, data: Any) -> None:
        gone = self.some(data)[:2]
        self.cache.free(gone)
        self.freed += gone
        for request in gone:
            del self.held[request]

    @precondition(lambda self: any(request not in self.held for request in self.freed))
    @rule(data=st.data())
    @counted
    def use_after_free(self, data: Any) -> None:
        gone = data.draw(st.sampled_from([r for r in self.freed if r not in self.held]))
        for call in (self.cache.free, self.cache.fork, self.cache.read, self.cache.reserve):
            try:
                call(gone)
            except ValueError as error:
                assert "freed" in str(error)
            else:
                raise AssertionError(f"{call.__name__} of a freed request")

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    @counted
    def swap_out(self, data: Any) -> None:
        gone = self.some(data)[:2]
        for request, out in zip(gone, self.cache.swap_out(gone), strict=True):
            self.swapped.append((out, self.held.pop(request)))
            self.freed.append(request)

    @precondition(lambda self: self.swapped and len(self.held) < MOST)
    @rule()
    @counted
    def swap_in(self) -> None:
        out, tokens = self.swapped[-1]
        try:
            (request,) = self.cache.swap_in([out])
        except OutOfPages:
            return
        self.swapped.pop()
        self.held[request] = tokens

    @precondition(lambda self: self.snapshot is None)
    @rule()
    @counted
    def take_snapshot(self) -> None:
        self.snapshot = self.cache.snapshot(), {request: [*tokens] for request, tokens in self.held.items()}

    @precondition(lambda self: self.snapshot is not None)
    @rule(back=st.booleans())
    @counted
    def end_snapshot(self, back: bool) -> None:
        assert self.snapshot is not None
        snapshot, held = self.snapshot
        if back:
            self.cache.restore(snapshot)
            self.freed += [request for request in self.held if request not in held]
            self.held = held
        self.cache.release(snapshot)
        self.snapshot = None

    @precondition(lambda self: self.held)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1), cascade=st.booleans(), sinks=st.booleans())
    @counted
    def attend(self, data: Any, layer: int, cascade: bool, sinks: bool) -> None:
        requests = self.some(data)
        counts = [data.draw(st.integers(0, min(4, len(self.held[r])))) for r in requests]
        if data.draw(st.booleans()):
            counts = [1] * len(requests)
        q = self.tokens.queries(sum(counts))
        given = torch.linspace(-1, 1, q.shape[1]) if sinks else None
        held = [self.held[request] for request in requests]
        got = self.cache.attend(
            q, requests, counts=counts, layer=layer, cascade=cascade, sinks=given, return_lse=True
        )
        hold(got, expected(q, held, counts, layer, sinks=given))

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        same(self.cache, self.held)
        if self.snapshot is None:
            owned = {p for r in self.held for p in self.cache.page_table(r)[0].tolist()}
            assert self.cache.num_free_pages == PAGES - len(owned)


def test_PF25_the_cache_is_a_list_of_tokens_per_request() -> None:
    STEPS.clear()
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=24, stateful_step_count=40))
    assert sum(STEPS.values()) >= 500, STEPS
    assert len(STEPS) == 12 and min(STEPS.values()) >= 10, STEPS


def test_the_machine_can_fail(monkeypatch: Any) -> None:
    """Without copies before the first write it ends within its steps."""
    from polyflash.kvcache.pages import Pages

    monkeypatch.setattr(Pages, "_to_copy", lambda self, entries, counts: set())
    try:
        run_state_machine_as_test(
            CacheMachine, settings=settings(max_examples=24, stateful_step_count=40, phases=[Phase.generate])
        )
    except AssertionError:
        return
    raise AssertionError("unnoticed")
