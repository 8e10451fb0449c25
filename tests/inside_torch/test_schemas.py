"""The ops' schemas against stored ones: programs exported earlier must still run.

To extend an op, append arguments with defaults, then add the new line to the stored file; a line that is
there never changes. `python -m tests.inside_torch.test_schemas` prints today's lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polyflash.torch_ops  # noqa: F401  (defines the ops)

STORED = Path(__file__).parents[1] / "data" / "op_schemas.txt"


def current() -> dict[str, torch._C.FunctionSchema]:
    """Every op of the namespace, by name."""
    schemas = torch._C._jit_get_all_schemas()
    return {s.name: s for s in schemas if s.name.startswith("polyflash::")}


def compatible(old: str, new: torch._C.FunctionSchema) -> bool:
    """Does whoever was written for `old` still work?"""
    return new.is_backward_compatible_with(torch._C.parse_schema(old))


LINES = [line for line in STORED.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0])
def test_a_stored_schema_still_works(line):
    name = line.partition("(")[0]
    now = current()
    assert name in now, f"{name} is gone"
    assert compatible(line, now[name]), f"was {line}\nis  {now[name]}"


def test_every_op_is_stored_as_it_is():
    for schema in current().values():
        assert str(schema) in LINES, f"add this line to {STORED.name}: {schema}"


def test_incompatible_changes_are_noticed():
    schema = current()["polyflash::attention"]
    now = str(schema)
    for old, new in (
        ("bool causal=False", "bool is_causal=False"),
        ("float? scale=None, bool need_lse=False", "bool need_lse=False, float? scale=None"),
        ("Tensor? sinks=None, ", ""),
        ("SymInt dropout_heads=0)", "SymInt dropout_heads=0, *, int more)"),
        ("float softcap=0.", "int softcap=0"),
        ("-> (Tensor out, Tensor lse)", "-> Tensor out"),
    ):
        assert old in now
        assert not compatible(now, torch._C.parse_schema(now.replace(old, new))), new
    assert compatible(
        now, torch._C.parse_schema(now.replace("dropout_heads=0)", "dropout_heads=0, int more=0)"))
    )


if __name__ == "__main__":
    print(*sorted(str(schema) for schema in current().values()), sep="\n")
