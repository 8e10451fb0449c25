"""polyflash is registered with transformers, where that is installed."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    pytest.importorskip("transformers")
    from polyflash.integrations.transformers import register

    register()
