"""Which values of one parameter run by default, and rules that are one test for all values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def chosen(values: Iterable[Any], *slow: Any) -> list[Any]:
    """The values as parameters of a test, a tuple for several; those in `slow` are for `make test-all`."""
    values = list(values)
    assert all(x in values for x in slow), slow
    marked = (x if isinstance(x, tuple) else (x,) for x in values)
    return [
        pytest.param(*given, marks=pytest.mark.slow if x in slow else ())
        for x, given in zip(values, marked, strict=True)
    ]


def in_turn(*parameters: Iterable[Any], of: int) -> list[Any]:
    """All combinations of the values of several parameters, of which those run by default whose places there
    add up to a multiple of `of`, the others by `make test-all`. A value that is a tuple is several."""
    combinations = []
    for numbered in itertools.product(*(enumerate(values) for values in parameters)):
        places, values = zip(*numbered, strict=True)
        given = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in values)
        combinations.append(pytest.param(*given, marks=pytest.mark.slow if sum(places) % of else ()))
    return combinations


def of_each(values: Iterable[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Makes a rule about one value a test of all of them, which says where it is broken. For hundreds of
    checks that take less time than a test does by being one. `rule` of the test is the rule."""

    cases = tuple(values)

    def test_of(rule: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for value in cases:
                try:
                    rule(value)
                except AssertionError as error:
                    broken.append(f"{value}: {error}")
            assert not broken, "\n".join(broken)

        test.__doc__, test.rule = rule.__doc__, rule  # type: ignore[attr-defined]
        return test

    return test_of
