"""PF22: several threads on one cache, each with requests of its own, and all of them over shared pages."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from polyflash import SpecError
from polyflash.kvcache import KVCache, OutOfPages
from tests.kvcache.plain import Tokens, append, cache_of, expected, filled, hold, layer_of, same

THREADS, TURNS = 4, 40


def together(work: Callable[[int], None], count: int = THREADS) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            gate.wait(10)
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("shared", [0, 6])
def test_PF22_threads_append_fork_attend_and_free(shared: int):
    """Every thread goes on from one prefix with tokens of its own."""
    cache, tokens = cache_of(200, layers=2), Tokens(2)
    held = filled(cache, tokens, shared)
    (parent,) = held
    kept = {}

    def work(index: int) -> None:
        own = Tokens(2, seed=index + 1)
        mine = {request: [*held[parent]] for request in cache.fork(parent, 2)}
        for turn in range(TURNS):
            added = {request: own.make((turn + i) % 3) for i, request in enumerate(mine)}
            append(cache, added)
            mine = {request: [*mine[request], *added[request]] for request in mine}
            if turn % 8 == 3:
                (child,) = cache.fork(next(iter(mine)))
                append(cache, {child: own.make(5)})
                cache.free(child)
            if turn % 8 == 5:
                request = next(iter(mine))
                mine[request] = mine[request][: len(mine[request]) // 2]
                cache.truncate(request, len(mine[request]))
            if turn % 10 == 0 and min(map(len, mine.values())):
                q = own.queries(2)
                got = cache.attend(q, list(mine), layer=1, return_lse=True, cascade=turn % 20 == 0)
                hold(got, expected(q, [*mine.values()], [1, 1], 1))
            if turn % 10 == 7:
                (out,) = cache.swap_out(request := next(iter(mine)))
                tokens_of = mine.pop(request)
                mine[cache.swap_in([out])[0]] = tokens_of
        kept.update(mine)

    together(work)
    same(cache, held | kept)
    assert len(kept) == 2 * THREADS
    cache.free(list(kept))
    cache.free(parent)
    assert cache.num_free_pages == 200


def test_a_scarce_pool_gives_no_page_twice():
    cache = cache_of(7, 1)
    counts = [0] * THREADS

    def work(index: int) -> None:
        own = Tokens(seed=index)
        for _ in range(200):
            (request,) = cache.add()
            new = own.make(2)
            try:
                append(cache, {request: new})
            except OutOfPages:
                cache.free(request)
                continue
            counts[index] += 1
            assert torch.equal(cache.read(request)[0], layer_of(new, 0)[0])
            cache.free(request)

    together(work)
    cache.check()
    assert cache.num_free_pages == 7 and sum(counts) > 100


def test_two_threads_on_one_request_take_turns():
    """A step of one keeps the other out; tokens are of one or the other, none torn, none lost."""
    cache = cache_of(400, 4)
    (request,) = cache.add()
    done: list[float] = []

    def work(index: int) -> None:
        for turn in range(60):
            value = float(1000 * index + turn + 1)
            k, v = torch.full((3, 2, 8), value), torch.full((3, 2, 6), value)
            while True:
                try:
                    cache.append(request, k, v, counts=3)
                    break
                except SpecError as error:
                    assert "step open" in str(error)
            done.append(value)

    together(work, 2)
    k, v = cache.read(request)
    assert sorted(k[::3, 0, 0].tolist()) == sorted(done) and len(done) == 120
    assert (k.view(120, 3, -1) == k.view(120, 3, -1)[:, :1, :1]).all() and torch.equal(k[..., 0], v[..., 0])


def test_snapshots_are_taken_between_steps_of_others():
    cache: KVCache = cache_of(100, 4)
    tokens = Tokens()
    held = filled(cache, tokens, 5)
    (base,) = held

    def work(index: int) -> None:
        own = Tokens(seed=index)
        for _ in range(20):
            if index == 0:
                snapshot = cache.snapshot()
                cache.check()
                cache.release(snapshot)
            else:
                (child,) = cache.fork(base)
                append(cache, {child: own.make(3)})
                cache.free(child)

    together(work)
    same(cache, held)
