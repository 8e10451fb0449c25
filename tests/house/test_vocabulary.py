"""One set of names for the stages of a kernel, in every backend that compiles its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polyflash

BACKENDS = Path(polyflash.__file__).parent / "backends"
STAGES = {
    "load_tile", "row_limits", "block_range", "apply_mask", "online_softmax", "rescale", "accumulate",
    "finalize",
}  # fmt: skip


def defined(backend: str) -> list[str]:
    """The names of all functions of a backend, once for each definition."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (BACKENDS / backend).rglob("*.py"))
    return [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("backend", ("cpu", "triton"))
def test_stages_have_the_same_names(backend: str):
    missing = STAGES - set(defined(backend))
    assert not missing, f"{backend} has no {', '.join(sorted(missing))}"


def test_the_walk_is_said_once():
    names = defined("cpu")
    walk = ("block_range", "block_keys", "key_span", "begin_block", "interval", "interval_list")
    assert {name: names.count(name) for name in walk} == dict.fromkeys(walk, 1)
