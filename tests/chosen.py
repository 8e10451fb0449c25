"""Which values of one parameter run by default."""

from __future__ import annotations

from collections.abc import Iterable
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
