"""`run`: one forward row of the table, as a callable. `step`: one that runs decode problems. `backend`: the
name of one that has gradients."""

from __future__ import annotations

import pytest

from tests.conformance.gradients import BACKWARD
from tests.conformance.rows import FORWARD, STEPS, Runner


@pytest.fixture(params=FORWARD, ids=lambda row: row.name.replace("/", "-"))
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


@pytest.fixture(params=STEPS, ids=lambda row: row.name.replace("/", "-"))
def step(request: pytest.FixtureRequest) -> Runner:
    """One row that runs decode problems, forward rows among them."""
    return Runner(request.param)


@pytest.fixture(params=BACKWARD, ids=lambda row: row.name.replace("/", "-"))
def backend(request: pytest.FixtureRequest) -> str:
    """Forward and gradients of one backend; what one of its two rows refuses is skipped."""
    return request.param.backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One test's rows side by side, so that the second finds the oracle's answer of the first."""
    first: dict[object, int] = {}
    places = []
    for place, item in enumerate(items):
        params = getattr(getattr(item, "callspec", None), "params", {})
        if not {"run", "step", "backend"} & set(params):
            places.append(place)
            continue
        key = (
            item.location[0],
            item.originalname,
            tuple((n, repr(x)) for n, x in params.items() if n not in ("run", "step", "backend")),
        )
        places.append(first.setdefault(key, place))
    items[:] = [items[i] for i in sorted(range(len(items)), key=lambda i: places[i])]
