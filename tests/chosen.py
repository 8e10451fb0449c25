"""Which values of one parameter run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def chosen(values: Iterable[Any], *slow: Any) -> list[Any]:
    """The values as parameters of a test; those in `slow` are for `make test-all`."""
    values = list(values)
    assert all(x in values for x in slow), slow
    return [pytest.param(x, marks=pytest.mark.slow) if x in slow else x for x in values]
