"""Pairwise sampling: which cases of a grid run by default. The others are `slow`: `make test-all` runs them.

A grid is a test of capability × dtype × something more (a workload, a family of inputs, a head_dim ...). Half
of it runs: the squares of one colour on a chess board, so that any two of a case's three values still meet.
float64 runs whole, since one capability alone takes it. So does a case that a mutant of scripts/mutants.toml
names: the default run kills them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
from scripts import mutants

FIXTURES = ("run", "step", "backend")  # of tests/conformance/conftest.py: the capability under test


def left_out(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of grids that are in no sample."""
    grids: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if is_in_grid(getattr(getattr(item, "callspec", None), "params", {})):
            grids[item.location[0], item.originalname].append(item)
    kept = {node for mutant in mutants.table() for node in mutant.selection()}
    for grid in grids.values():
        places: dict[str, list[str]] = defaultdict(list)  # the values of each parameter, in order
        for item in grid:
            colour = 0
            for name, value in item.callspec.params.items():
                if repr(value) not in places[name]:
                    places[name].append(repr(value))
                colour += places[name].index(repr(value))
            if colour % 2 and item.nodeid not in kept:
                yield item


def is_in_grid(params: dict[str, object]) -> bool:
    has_capability = any(name in params for name in FIXTURES)
    return has_capability and "dtype" in params and len(params) >= 3 and "float64" not in str(params["dtype"])
