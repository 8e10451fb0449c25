"""PF25: hundreds of random operations on the cache, each followed on a plain list of tokens per request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import Phase, seed, settings
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
from tests.kvcache.plain import (
    DIM,
    DIM_V,
    HEADS,
    Token,
    Tokens,
    append,
    cache_of,
    expected,
    hold,
    layer_of,
    same,
)

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
    """`held` is the model: the tokens of every living request, those of pages given back too."""

    @initialize(page_size=st.sampled_from((1, 3, 4, 8)), scrub=st.booleans(), seed=st.integers(0, 999))
    def start(self, page_size: int, scrub: bool, seed: int) -> None:
        self.cache = cache_of(PAGES, page_size, LAYERS, scrub=scrub)
        self.tokens = Tokens(LAYERS, seed)
        self.held: Held = {}
        self.kept: dict[Request, int] = {}  # tokens that the last eviction left
        self.swapped: list[tuple[SwappedRequest, list[Token]]] = []
        self.snapshot: tuple[Snapshot, Held] | None = None
        self.freed: list[Request] = []
        self.remembered: list[list[Token]] = []
        self.all: list[Token] = []  # a token's id is its place here

    def some(self, data: Any, least: int = 1) -> list[Request]:
        size = st.integers(least, len(self.held))
        return data.draw(st.permutations(list(self.held)))[: data.draw(size)]

    def ids(self, tokens: list[Token]) -> list[int]:
        known = {id(token.k): n for n, token in enumerate(self.all)}
        for token in tokens:
            if id(token.k) not in known:
                known[id(token.k)] = len(self.all)
                self.all.append(token)
        return [known[id(token.k)] for token in tokens]

    def whole(self) -> list[Request]:
        """Those whose tokens are all there, at the places of their positions."""
        return [
            r
            for r, held in self.held.items()
            if not self.cache.start(r) and self.cache.position(r) == len(held)
        ]

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
        needed = self.cache.pages_needed(list(counts), list(counts.values()))
        try:
            append(self.cache, added)
        except OutOfPages as error:
            assert needed == error.needed > error.free == room
            assert free + len(counts) >= error.needed >= free  # at most one copy each
            return
        assert free <= needed <= room and self.cache.num_free_pages <= room - free
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
        children = self.cache.fork(parent, count)
        self.held |= {child: [*self.held[parent]] for child in children}
        self.kept |= {child: self.kept.get(parent, 0) for child in children}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    @counted
    def truncate(self, data: Any) -> None:
        kept = {r: data.draw(st.integers(0, len(self.held[r]))) for r in self.some(data)}
        for request, n in kept.items():
            least = max(self.cache.start(request), self.kept.get(request, 0))
            kept[request] = n if n >= least else data.draw(st.sampled_from((0, least)))
        self.cache.truncate(list(kept), list(kept.values()))
        for request, n in kept.items():
            self.held[request] = self.held[request][:n]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), left=st.integers(0, 12))
    @counted
    def free_left(self, data: Any, left: int) -> None:
        """Pages wholly left of the window go, and what is seen through it stays."""
        requests = self.some(data)
        self.cache.free_left(requests, left)
        size = self.cache.page_size
        for request in requests:
            length, start = len(self.held[request]), self.cache.start(request)
            assert start % size == 0 and start >= (length - 1 - left) // size * size
            if length and start > 0:
                q = self.tokens.queries(1)
                try:
                    self.cache.attend(q, request)
                except ValueError as error:
                    assert "free_left" in str(error)
                else:
                    raise AssertionError("rows saw what was given back")

    @precondition(lambda self: self.held)
    @rule(data=st.data(), forms=st.sampled_from((1, 2, 3)))
    @counted
    def evict(self, data: Any, forms: int) -> None:
        request = data.draw(st.sampled_from(list(self.held)))
        held, start, position = self.held[request], self.cache.start(request), self.cache.position(request)
        n = data.draw(st.integers(0, len(held) - start))
        shape = (LAYERS, HEADS)[: forms - 1]
        rows = [
            sorted(data.draw(st.permutations(range(start, len(held))))[:n]) for _ in range(math.prod(shape))
        ]
        keep = torch.tensor(rows, dtype=torch.int64).view(*shape, n)
        try:
            self.cache.evict(request, keep)
        except OutOfPages:
            return
        of = keep.view(*shape, *(1,) * (2 - len(shape)), n).expand(LAYERS, HEADS, n)
        k, v = (
            torch.stack(x) if held else torch.zeros(0, LAYERS, HEADS, w)
            for x, w in (([t.k for t in held], DIM), ([t.v for t in held], DIM_V))
        )
        k, v = (x.gather(0, of.permute(2, 0, 1)[..., None].expand(-1, -1, -1, x.shape[3])) for x in (k, v))
        self.held[request] = [Token(k[i], v[i]) for i in range(n)]
        self.kept[request] = n
        assert self.cache.start(request) == 0 and self.cache.position(request) == position

    @precondition(lambda self: self.whole())
    @rule(data=st.data())
    @counted
    def remember(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.whole()))
        tokens = self.held[request][: data.draw(st.integers(0, len(self.held[request])))]
        size = self.cache.page_size
        assert self.cache.remember(request, self.ids(tokens)) == len(tokens) // size * size
        assert self.cache.cached_tokens([*self.ids(tokens), -1]) == len(tokens) // size * size
        self.remembered.append(tokens)

    @precondition(lambda self: self.remembered and len(self.held) < MOST)
    @rule(data=st.data())
    @counted
    def begin(self, data: Any) -> None:
        """What is found is a prefix of full pages, of the same tokens."""
        tokens = data.draw(st.sampled_from(self.remembered))
        tokens = [*tokens[: data.draw(st.integers(0, len(tokens)))], *self.tokens.make(1)]
        found = self.cache.cached_tokens(self.ids(tokens))
        request = self.cache.begin(self.ids(tokens))
        assert self.cache.length(request) == found <= len(tokens) - 1
        self.held[request] = tokens[:found]

    @precondition(lambda self: self.remembered)
    @rule()
    @counted
    def forget(self) -> None:
        self.cache.forget()
        assert all(not self.cache.cached_tokens([*self.ids(x), -1]) for x in self.remembered)
        self.remembered = []

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
            assert out.length == len(self.swapped[-1][1])
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
        self.kept[request] = out.kept

    @precondition(lambda self: self.snapshot is None)
    @rule()
    @counted
    def take_snapshot(self) -> None:
        self.snapshot = self.cache.snapshot(), {request: [*tokens] for request, tokens in self.held.items()}
        self.kept_then = dict(self.kept)

    @precondition(lambda self: self.snapshot is not None)
    @rule(back=st.booleans())
    @counted
    def end_snapshot(self, back: bool) -> None:
        assert self.snapshot is not None
        snapshot, held = self.snapshot
        if back:
            self.cache.restore(snapshot)
            self.freed += [request for request in self.held if request not in held]
            self.held, self.kept = held, {**self.kept, **self.kept_then}
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
        options: dict[str, Any] = {"sinks": given}
        sides = [
            len(x) - n - self.cache.start(r) for r, x, n in zip(requests, held, counts, strict=True) if n
        ]
        if any(self.cache.start(request) for request in requests):
            if min(sides, default=0) < 0:
                return  # rows before the window that pages were given back for
            options["window"] = (min(sides, default=0), None)
        got = self.cache.attend(
            q, requests, counts=counts, layer=layer, cascade=cascade, return_lse=True, **options
        )
        hold(got, expected(q, held, counts, layer, **options))

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        same(self.cache, self.held)
        if self.snapshot is None:
            owned = {p for r in self.held for p in self.cache.page_table(r)[0].tolist() if p >= 0}
            assert self.cache.num_free_pages == PAGES - len(owned)
        stats = self.cache.stats()
        assert stats.free_pages + stats.remembered_pages == self.cache.num_free_pages
        assert stats.used_pages == PAGES - self.cache.num_free_pages and 0 <= stats.fragmentation < 1
        assert stats.tokens == sum(len(x) - self.cache.start(r) for r, x in self.held.items())


def test_PF25_the_cache_is_a_list_of_tokens_per_request() -> None:
    """Until every operation has been drawn often: what is drawn follows the constants of modules that happen
    to be loaded, and hypothesis knows local ones by their path."""
    STEPS.clear()
    for turn in range(5):
        machine = seed(turn)(CacheMachine)
        run_state_machine_as_test(machine, settings=settings(max_examples=24, stateful_step_count=40))
        if len(STEPS) == 17 and min(STEPS.values()) >= 10:
            break
    assert sum(STEPS.values()) >= 500, STEPS
    assert len(STEPS) == 17 and min(STEPS.values()) >= 10, STEPS


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
