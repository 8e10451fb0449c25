"""polyflash is registered with transformers, where that is installed; and which rows of the table ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from polyflash import repeats, torch_ops
from polyflash.plan import Launch


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    try:
        from polyflash.integrations.transformers import register
    except ImportError:
        return  # the other plug-ins need no transformers
    register()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every run of a kernel from here on: its row, its spec."""
    runs: list[Launch] = []
    plan = torch_ops._plan

    def spy(*args: Any, **options: Any) -> Launch:
        launch = plan(*args, **options)
        run = launch.run

        def noted(launch: Launch, *operands: Any) -> Any:
            runs.append(launch)
            return run(launch, *operands)

        launch.run = noted
        return launch

    monkeypatch.setattr(torch_ops, "_routes", {})  # those of other tests have no spy
    monkeypatch.setattr(repeats, "_known", {})
    monkeypatch.setattr(repeats, "learn", lambda *x: None)  # each call is launched by its route
    monkeypatch.setattr(torch_ops, "_plan", spy)
    return runs


class Ran(Sequence[tuple[str, str]]):
    """(phase, backend) of every launch."""

    def __init__(self, launches: list[Launch]) -> None:
        self.launches = launches

    def __len__(self) -> int:
        return len(self.launches)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [(x.row.phase.value, x.row.backend) for x in self.launches[index]]
        return self[index : index + 1 or None][0]

    def __delitem__(self, index: Any) -> None:
        del self.launches[index]


@pytest.fixture
def ran(launched: list[Launch]) -> Ran:
    return Ran(launched)
