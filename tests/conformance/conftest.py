"""`run`: one forward row of the table, as a callable."""

from __future__ import annotations

import pytest

from tests.conformance.rows import FORWARD, Runner


@pytest.fixture(params=FORWARD, ids=lambda row: row.name.replace("/", "-"))
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One test's rows side by side, so that the second finds the oracle's answer of the first."""
    first: dict[object, int] = {}
    places = []
    for place, item in enumerate(items):
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "run" not in params:
            places.append(place)
            continue
        key = (
            item.location[0],
            item.originalname,
            tuple((n, repr(x)) for n, x in params.items() if n != "run"),
        )
        places.append(first.setdefault(key, place))
    items[:] = [items[i] for i in sorted(range(len(items)), key=lambda i: places[i])]
