"""Fixtures of the whole suite: poisoned memory, reproducible fuzzing, one `run` per forward capability
row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.memory import poisoned
from tests.refusals import Refusals

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=200,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "nightly",
    derandomize=False,
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refusals", action="store_true", help="fail if a refusal was produced by no test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--refusals"):
        config.pluginmanager.register(Refusals().__enter__(), "refusals")


@pytest.fixture(scope="session", autouse=True)
def poison():
    """Uninitialised memory is NaN in every test: an output element nobody wrote cannot pass."""
    with poisoned():
        yield


@pytest.fixture(autouse=True)
def seeded():
    """One thread by default: small problems run faster, and the thread tests show that bits do not depend on
    it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
