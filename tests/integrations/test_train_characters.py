"""The example that trains, with tiny numbers, in a process of its own."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests import processes

pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_characters.py"
TINY = ("--steps", "6", "--seqlen", "48", "--batch", "2", "--width", "32", "--heads", "2", "--layers", "1")
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="needs a checkout")


def run(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    files = ["--plot", str(folder / "curves.png"), "--json", str(folder / "results.json")]
    done = processes.begun([str(EXAMPLE), *TINY, *words, *files], timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text(encoding="utf-8")), done.stdout


def test_both_arms_learn_the_same(tmp_path: Path) -> None:
    results, said = run(tmp_path, "--no-peak")
    ours, theirs = results["polyflash"], results["torch"]
    assert len(ours["losses"]) == len(theirs["losses"]) == len(ours["seconds"]) == 6
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-4)
    assert abs(theirs["losses"][0] - math.log(100)) < 1 and len(set(theirs["losses"])) == 6
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "ms per step" in said and "/forward and " in said


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_repeats_and_measures_memory(dtype: str, tmp_path: Path) -> None:
    first, _ = run(tmp_path, "--dtype", dtype, "--seed", "3")
    again, _ = run(tmp_path, "--dtype", dtype, "--seed", "3", "--no-peak")
    for arm in ("torch", "polyflash"):
        assert first[arm]["losses"] == again[arm]["losses"]
        assert first[arm]["peak_mib"] is None or 0 <= first[arm]["peak_mib"] < 1000
    assert first["torch"]["losses"] == pytest.approx(first["polyflash"]["losses"], abs=0.05)


@pytest.mark.parametrize("words", [("--heads", "3", "--width", "32"), ("--steps", "0"), ("--dtype", "int8")])
def test_wrong_numbers_are_told_in_a_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    with pytest.raises(SystemExit) as ended:
        example["arguments"]([*words])
    assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1].count("error: ") == 1
