"""`run`: one forward row of the table, as a callable. `step`: one that runs decode problems. `backend`: the
name of one that has gradients. And which of their tests run where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polyflash import env
from polyflash.capability import Capability
from tests import device
from tests.conformance import interpreted, sampled, shaded
from tests.conformance.gradients import BACKWARD
from tests.conformance.rows import FORWARD, STEPS, Runner

ASKED_FOR = {"webgpu"}
OF_ROWS = ("run", "step", "backend", "reader")
HERE = Path(__file__).parent
ON_A_GPU = {
    "test_out_may_overlap_an_input_of_another_storage": "numpy's memory is a CPU's",
    "test_fork_after_use": "a process that has used a GPU cannot fork",
    "test_lists_and_a_bool_mask": "its tensors go to the op below the public functions",
}
INTERPRETED = {
    "test_B_cpu_01_two_python_threads": "Triton's interpreter takes one thread at a time",
    "test_two_python_threads": "Triton's interpreter takes one thread at a time",
}

IN_FIBERS = {"test_fork_after_use": "its process knows nothing of the shim"}


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


def row_of(item: pytest.Item) -> Capability | None:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return next((params[name] for name in OF_ROWS if name in params), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == HERE]
    wanted = config.getoption("--rows")
    # A CPU that executes shaders takes minutes: its rows run where they are asked for.
    left = {item for item in mine if getattr(row_of(item), "backend", "") in ASKED_FOR - {wanted}}
    if wanted:
        left |= {item for item in mine if getattr(row_of(item), "backend", "") != wanted}
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    if device.NAME == "cpu" and not env.TRITON_INTERPRET.is_set() and wanted not in ASKED_FOR:
        for item in sampled.left_out(mine):
            item.add_marker(pytest.mark.slow)
    for item in mine:
        row = row_of(item)
        if row is not None and row.backend in _emulated():
            _interpret(item, row)
        elif row is not None and row.backend in ASKED_FOR:
            _leave_slow(item, row, shaded.by_default)
        if device.NAME != "cpu":
            _skip_on_a_gpu(item, row)
    _rows_side_by_side(items)


def _emulated() -> tuple[str, ...]:
    """Backends whose kernels something slow runs here, in the place of a GPU."""
    return ("triton",) * env.TRITON_INTERPRET.is_set() + ("metal",) * device.ON_A_CPU


def _interpret(item: pytest.Function, row: Capability) -> None:
    """Marks what takes long in Triton's interpreter or in fibers, and what the former cannot run."""
    for word, why in (INTERPRETED if row.backend == "triton" else IN_FIBERS).items():
        if word in item.name:
            item.add_marker(pytest.mark.skip(reason=why))
    _leave_slow(item, row, interpreted.by_default)


def _leave_slow(item: pytest.Function, row: Capability, by_default: Callable[[str, str, str], bool]) -> None:
    case = item.callspec.id.removeprefix(row.name.replace("/", "-")).strip("-")
    if not by_default(item.path.stem, item.originalname, case):
        item.add_marker(pytest.mark.slow)


def _skip_on_a_gpu(item: pytest.Item, row: Capability | None) -> None:
    if row is None:
        item.add_marker(pytest.mark.skip(reason="no row is under test: a CPU proves it"))
    for word, why in ON_A_GPU.items():
        if word in item.name:
            item.add_marker(pytest.mark.skip(reason=why))


def _rows_side_by_side(items: list[pytest.Item]) -> None:
    """One test's rows, so that the second finds the oracle's answer of the first."""
    first: dict[object, int] = {}
    places = []
    for place, item in enumerate(items):
        params = getattr(getattr(item, "callspec", None), "params", {})
        if not set(OF_ROWS) & set(params):
            places.append(place)
            continue
        key = (
            item.location[0],
            item.originalname,
            tuple((n, repr(x)) for n, x in params.items() if n not in OF_ROWS),
        )
        places.append(first.setdefault(key, place))
    items[:] = [items[i] for i in sorted(range(len(items)), key=lambda i: places[i])]
