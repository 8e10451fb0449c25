"""Equal bits, again and again: other allocations between, another thread at work, one thread and two."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.gradients import cotangents, gradients
from tests.conformance.rows import DTYPES, Runner, ints, qkv
from tests.conformance.test_varlen import packed
from tests.tolerance import same_bits

SMOKE, WHOLE = 10, 100
CASES: dict[str, tuple[tuple[int, tuple[int, int], int, int], dict[str, Any]]] = {
    "full": ((2, (4, 4), 70, 130), {}),
    "causal": ((1, (4, 2), 130, 130), {"causal": True}),
    "window": ((1, (2, 1), 130, 200), {"window": (40, 9)}),
    "grouped": ((1, (6, 1), 40, 70), {"causal": True}),
    "few heads": ((1, (1, 1), 70, 1500), {}),
    "one row": ((3, (8, 2), 1, 700), {"causal": True}),
    "lens": ((3, (4, 2), 40, 129), {"kv_lens": ints(0, 77, 129)}),
    "bias": ((2, (4, 2), 65, 130), {"bias": "1h1k", "sinks": True, "causal": True}),
    "members": ((1, (6, 2), 0, 0), {"causal": True}),
}


def problem(name: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v, dout, dlse and options."""
    (batch, heads, rows, keys), options = CASES[name]
    generator = torch.Generator().manual_seed(3)
    if name == "members":
        q, k, v, bounds = packed((17, 64, 1, 0, 100), (40, 64, 130, 9, 90), heads=heads, dtype=dtype)
        options = {**options, **bounds}
    else:
        q, k, v = qkv(batch, heads, rows, keys, 32, dtype=dtype)
    if name == "bias":
        bias, sinks = torch.randn(1, 4, 1, keys, generator=generator), torch.randn(4, generator=generator)
        options = {**options, "bias": bias.to(dtype), "sinks": sinks}
    return [q, k, v, *cotangents(q, v, packed=name == "members")], options


@contextmanager
def busy() -> Iterator[None]:
    """Another Python thread multiplies matrices and allocates meanwhile."""
    stop = threading.Event()

    def work() -> None:
        x = torch.randn(96, 96)
        for n in itertools.cycle((96, 40, 7)):
            if stop.is_set():
                return
            x[:n, :n] @ x[:n, :n]
            torch.empty(n * 1000).fill_(float("nan"))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def repeat(call: Any, times: int, label: str) -> None:
    """`call()` gives a dict of tensors: the same bits every time, with garbage allocated between."""
    want = call()
    sizes = torch.Generator().manual_seed(0)
    with busy():
        for turn in range(times):
            litter = torch.full((int(torch.randint(1, 200_000, (), generator=sizes)),), float("nan"))
            torch.set_num_threads(1 + turn % 2)
            got = call()
            for name, x in want.items():
                same_bits(got[name], x, f"{label}, turn {turn}: {name}")
            del litter


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients(backend: str, name: str, dtype: torch.dtype):
    """B-grad-15, P15: 10 times here, 100 times below; one thread and two take turns."""
    operands, options = problem(name, dtype)
    repeat(lambda: gradients(*operands, backend=backend, **options), SMOKE, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward(run: Runner, name: str, dtype: torch.dtype):
    (q, k, v, *_), options = problem(name, dtype)
    repeat(lambda: run(q, k, v, **options)._asdict(), SMOKE, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_a_hundred_times(backend: str, name: str, dtype: torch.dtype):
    operands, options = problem(name, dtype)
    repeat(lambda: gradients(*operands, backend=backend, **options), WHOLE, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward_a_hundred_times(run: Runner, name: str, dtype: torch.dtype):
    (q, k, v, *_), options = problem(name, dtype)
    repeat(lambda: run(q, k, v, **options)._asdict(), WHOLE, name)


@pytest.mark.slow
def test_many_small_items(backend: str):
    """Race amplification: 60 entries of small tiles, 250 times, two threads."""
    torch.set_num_threads(2)
    q, k, v = qkv(60, (2, 1), 33, 40, 16)
    dout, dlse = cotangents(q, v)
    repeat(lambda: gradients(q, k, v, dout, dlse, backend=backend, causal=True), 250, "small items")


def test_two_python_threads(backend: str):
    """B-cpu-01, B-str-20: two threads, other problems each, the bits of one alone."""
    problems = [problem(name, torch.float32) for name in ("causal", "few heads")]
    want = [gradients(*operands, backend=backend, **options) for operands, options in problems]
    wrong: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(SMOKE):
                got = gradients(*problems[i][0], backend=backend, **problems[i][1])
                for name, x in want[i].items():
                    same_bits(got[name], x, name)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
