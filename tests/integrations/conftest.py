"""polyflash is registered with transformers, where that is installed; and which rows of the table ran."""

from __future__ import annotations

from typing import Any

import pytest

from polyflash import torch_ops


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    try:
        from polyflash.integrations.transformers import register
    except ImportError:
        return  # the other plug-ins need no transformers
    register()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(phase, backend) of every launch from here on."""
    launches: list[tuple[str, str]] = []
    route = torch_ops._route

    def spy(*args: Any) -> Any:
        launch = route(*args)
        launches.append((launch.row.phase.value, launch.row.backend))
        return launch

    monkeypatch.setattr(torch_ops, "_route", spy)
    return launches
