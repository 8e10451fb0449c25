"""The planted defects of scripts/mutants.toml, without running one: each still has its place and tests."""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from scripts import mutants

import polyflash
from tests.catalogue import CATALOGUE, DTYPES
from tests.chosen import of_each

ROOT = Path(__file__).resolve().parent.parent.parent


TABLE = mutants.table()


@of_each(TABLE)
def test_a_mutant_has_its_place(mutant):
    """Exactly one, and a module it becomes is Python; a stale entry fails here and not in the long sweep."""
    text = (Path(polyflash.__file__).parent / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(text)
    assert changed != text and mutant.stands_for
    if mutant.file.endswith(".py"):
        ast.parse(changed)


def test_ids_and_tests_exist():
    assert len({m.id for m in TABLE}) == len(TABLE) >= 60
    names = {w.name for w in CATALOGUE}
    for mutant in TABLE:
        assert mutant.selection(), mutant.id
        interpreted = {bool(mutants.INTERPRETED.match(node)) for node in mutant.selection()}
        assert interpreted == {mutant.interpreted}, f"{mutant.id}: tests of the interpreter and others"
        for workload in (*mutant.workloads, *mutant.gradients):
            name, _, dtype = workload.partition("/")
            assert name in names and dtype in ("", *DTYPES), f"{mutant.id}: {workload}"
        for node in mutant.tests:
            path, _, test = node.partition("[")[0].partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            for name in filter(None, test.split("::")):
                assert re.search(rf"(def|class) {name}\b", text), f"{mutant.id}: {node}"


def test_a_stale_or_ambiguous_place_is_refused():
    mutant = mutants.Mutant("x", "plan.py", "a mistake", "one", "two")
    for text in ("", "one one"):
        with pytest.raises(ValueError, match="occurs"):
            mutant.applied(text)
    assert mutant.applied("an one") == "an two"


@pytest.mark.parametrize(
    "case, want",
    [
        ('<failure message="AssertionError: x"/>', "killed"),
        ('<failure message="assert 1 == 2"/>', "killed"),
        ('<failure message="Failed: DID NOT RAISE"/>', "killed"),
        ('<failure message="TypeError: x"/>', "error"),
        ('<error message="collection failure"/>', "error"),
        ('<skipped message="no"/>', "error"),
        ("", "passed"),
    ],
)
def test_only_an_assertion_kills(case, want):
    report = ET.fromstring(
        f'<testsuites><testsuite><testcase name="t">{case}</testcase></testsuite></testsuites>'
    )
    assert mutants.outcome(report).startswith(want)


def test_tests_are_known_by_file_class_and_name():
    cases = {
        "tests.null.test_mask": "tests/null/test_mask.py::test_x[1]",
        "tests.api.test_odd_tensors.TestOut": "tests/api/test_odd_tensors.py::TestOut::test_x[1]",
    }
    for classname, whole in cases.items():
        name = mutants._plain_name(ET.fromstring(f'<testcase classname="{classname}" name="test_x[1]"/>'))
        assert name == whole
        file = whole.partition("::")[0]
        for node in (whole, whole.partition("[")[0], file, whole.rpartition("::")[0]):
            assert mutants._runs(node, {name}), node
        assert not mutants._runs("tests/null/test_mas", {name})
