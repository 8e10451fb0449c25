"""The example with a Llama and a diffusion transformer over codes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("diffusers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "quantised_models.py"
SMALL = {
    "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 32, "tokens": 24, "generated": 4, "image": 8,
    "steps": 2, "seeds": 2, "seconds": 0.01,
}  # fmt: skip


def test_drift_of_both_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for name, x in SMALL.items() for word in (f"--{name}", str(x))]
    main = runpy.run_path(str(EXAMPLE))["main"]
    assert main([*words, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text("utf-8"))["rows"]
    drifts = {(row["model"], row["arm"], row["seed"]): row["drift"] for row in rows}
    assert len(drifts) == len(rows) == 2 * 6 * 2
    for kind in ("Llama", "diffusion transformer"):
        for seed in (0, 1):
            assert drifts[kind, "exact", seed] == 0 and drifts[kind, "torch", seed] < 1e-4
            assert 0 < drifts[kind, "int8", seed] < 0.05 and 0 < drifts[kind, "int8 products", seed] < 0.1
            assert drifts[kind, "int8", seed] < drifts[kind, "int4", seed] < 1
    printed = capsys.readouterr().out
    codes = "int4/64x1+64x1:bfloat16,int4/1x32+1x32:bfloat16"
    assert "int4: " in printed and f"codes: {codes}, decoded" in " ".join(printed.split())


def test_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    with pytest.raises(SystemExit):
        main(["--heads", "3", "--kv-heads", "2"])
    assert "kv-heads divides heads" in capsys.readouterr().err
