"""Pairwise sampling of the conformance grids, without running a case; rules that are one test."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import mutants

from tests.chosen import of_each
from tests.conformance import sampled

CAPABILITIES, DTYPES = ("cpu/forward", "torch/forward"), ("float32", "bfloat16", "float16")


def case(test: str, **params: Any) -> Any:
    values = "-".join(str(value).replace("/", "-") for value in params.values())
    file = f"tests/conformance/{test.partition('::')[0]}"
    return SimpleNamespace(
        location=(file, 0, ""),
        originalname=test.partition("::")[2],
        nodeid=f"tests/conformance/{test}[{values}]",
        callspec=SimpleNamespace(params=params),
    )


def test_any_two_values_still_meet():
    whole = [
        case("test_new.py::test_grid", run=capability, name=name, dtype=dtype)
        for capability, name, dtype in product(CAPABILITIES, "abcde", DTYPES)
    ]
    left_out = list(sampled.left_out(whole))
    assert 2 * len(left_out) == len(whole)
    kept = [item.callspec.params for item in whole if item not in left_out]
    for one, other in combinations(("run", "name", "dtype"), 2):
        pairs = {(params[one], params[other]) for params in kept}
        assert len(pairs) == len({params[one] for params in kept}) * len({params[other] for params in kept})


def test_values_that_are_given_together_meet_both_capabilities():
    dims = list(product((32, 64, 96), DTYPES))
    whole = [
        case("test_new.py::test_joint", backend=backend, dim=dim, dtype=dtype)
        for (dim, dtype), backend in product(dims, ("cpu", "torch"))
    ]
    left_out = list(sampled.left_out(whole))
    assert {item.callspec.params["backend"] for item in left_out} == {"cpu", "torch"}


def test_what_runs_whole():
    """float64, tests without a capability, and what a mutant names."""
    for params in ({"name": "a", "dtype": "float32"}, {"run": 1, "dtype": "float32"}):
        assert not sampled.is_in_grid(params)
    assert not sampled.is_in_grid({"run": 1, "dtype": "float64", "name": "a"})
    named = [mutant for mutant in mutants.table() if mutant.workloads]
    for mutant in named:
        for workload in mutant.workloads:
            name, _, dtype = workload.partition("/")
            file, test = ("varlen", "members") if name.startswith("packed") else ("accuracy", "workload")
            grid = [
                case(f"test_{file}.py::test_{test}", run=row, name=name, dtype=dtype or "float32")
                for row in ("torch/forward", "cpu/forward")
            ]
            assert grid[1] not in sampled.left_out(grid), mutant.id


def test_a_rule_of_many_values_names_those_that_break_it():
    def is_odd(x: int) -> None:
        assert x % 2, "even"

    of_each((1, 3))(is_odd)()
    with pytest.raises(AssertionError) as broken:
        of_each(range(5))(is_odd)()
    told = [line for line in str(broken.value).splitlines() if ": even" in line]
    assert [line[:1] for line in told] == ["0", "2", "4"]
