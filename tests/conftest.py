"""Fixtures of the whole suite: poisoned memory, reproducible fuzzing, one `run` per forward capability
row."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import HealthCheck, settings
from scripts import mutants

from polyflash import env
from polyflash.tuning import store
from tests import device, interpreter
from tests.backends.metal import shim
from tests.browser import adapter
from tests.memory import poisoned
from tests.refusals import Refusals

if device.ROWS == "metal" and device.ON_A_CPU:
    shim.install()  # before test modules list rows
if device.ADAPTER == "chromium":
    adapter.install()
if device.ISA == "avx512":
    from tests.backends.cpu import avx512  # which needs llvmlite

    avx512.install()
if env.TRITON_INTERPRET.is_set():
    interpreter.hasten()

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
    parser.addoption("--device", help="run the rows of the conformance suite there, such as cuda")
    parser.addoption("--default-device", help="make all tensors there, such as cuda: of models and caches")
    parser.addoption(
        "--rows", metavar="BACKEND", help="of the conformance suite, the rows of this backend alone"
    )
    parser.addoption(
        "--isa", choices=["avx512"], help="emulate what this CPU lacks of its kernels' instructions"
    )
    parser.addoption("--adapter", choices=["chromium"], help="run the WebGPU rows in a headless browser")


def pytest_configure(config: pytest.Config) -> None:
    asked = config.getoption("--default-device") or config.getoption("--device")
    if asked not in (None, device.NAME):
        raise pytest.UsageError(f"--device {asked} came too late: give it on the command line")
    device.install()
    if config.getoption("--refusals"):
        config.pluginmanager.register(Refusals().__enter__(), "refusals")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    device.skip_elsewhere(items)
    named = {node for mutant in mutants.table() for node in mutant.selection()}
    late = [item.nodeid for item in items if item.nodeid in named and item.get_closest_marker("slow")]
    if late and device.NAME == "cpu":
        raise pytest.UsageError(f"named by scripts/mutants.toml, so not to be slow: {late}")


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector need not walk it again for every kernel that is compiled."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def poison():
    """Uninitialised memory is NaN in every test: an output element nobody wrote cannot pass."""
    with poisoned():
        yield


@pytest.fixture(scope="session", autouse=True)
def untuned(tmp_path_factory: pytest.TempPathFactory):
    """What a developer has tuned on this machine decides nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        none = tmp_path_factory.getbasetemp() / "no-tuned-files"
        patch.setattr(store, "folder", lambda: str(none))
        yield


@pytest.fixture(autouse=True)
def seeded():
    """One thread by default: small problems run faster, and the thread tests show that bits do not depend on
    it. A CPU's generator alone where no other is used: to seed those of all devices takes a millisecond."""
    (torch.default_generator if device.ON_A_CPU else torch).manual_seed(0)
    torch.set_num_threads(1)
