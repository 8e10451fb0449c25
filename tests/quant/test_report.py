"""`polyflash quant report`: what it prints, writes and draws; the acceptance bounds of schemes; the page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from polyflash import cli
from polyflash.quant import command
from polyflash.quant.choosing import REPORTED
from polyflash.quant.families import FAMILIES, drawn

SLICE = Path(__file__).parents[1] / "data" / "minilm_qkv_slice.safetensors"


@pytest.fixture
def report(capsys, monkeypatch):
    monkeypatch.setattr(command, "_SIZES", (2, 16, 128, 32))
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: object) -> tuple[int, str, str]:
        code = cli.main(["quant", "report", *map(str, words)])
        return code, *capsys.readouterr()

    return call


def test_table_and_advice(report):
    pytest.importorskip("safetensors")
    code, out, err = report("--data", SLICE, "--error", "0.05", "--causal")
    assert (code, err) == (0, "")
    head = next(line for line in out.splitlines() if line.startswith("scheme"))
    assert head.split() == ["scheme", "bits", *FAMILIES, "layer3"]
    lines = [line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0] in REPORTED]
    assert [line[0] for line in lines] == [*REPORTED] and {len(line) for line in lines} == {9}
    assert "layer3 K int" in out and "of 32 rows against float64" in " ".join(out.split())


def test_json_has_every_figure_and_repeats(report, tmp_path):
    arrays = dict(zip("qkv", (x.numpy()[0] for x in drawn("normal", 2, 4, 64, 16)), strict=True))
    np.savez(tmp_path / "mine.npz", **arrays)
    words = ("--json", "--seed", 3, "--data", tmp_path / "mine.npz")
    code, out, _ = report(*words)
    found = json.loads(out)
    assert code == 0 and found["schema"] == "polyflash.quant/1" and found["seed"] == 3
    assert found["schemes"]["int8"] == "K int8/1x0, V int8/1x0"
    assert {(x["inputs"], x["scheme"]) for x in found["errors"]} == {
        (i, s) for i in (*FAMILIES, "data") for s in REPORTED
    }
    for x in found["errors"]:
        assert set(x["error"]) == {"relative", "centred", "worst_row", "cosine", "largest"}
        assert x["error"]["relative"] <= 1.01 * x["error"]["worst_row"] and x["error"]["cosine"] <= 1 + 1e-12
    assert report(*words)[1] == out
    assert json.loads(report("--json")[1])["errors"][0] != found["errors"][0]


@pytest.mark.parametrize("measure", ["worst_row", "cosine", "largest", "centred"])
def test_other_measures(report, measure: str):
    code, out, _ = report("--measure", measure)
    assert code == 0 and f"{measure} of the output" in out


def test_picture(report, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    code, _, _ = report("-o", tmp_path / "errors.png", "--quiet")
    assert code == 0 and (tmp_path / "errors.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    code, _, err = report("-o", tmp_path / "other.png")
    assert code == 1 and "pip install 'polyflash[bench]'" in err and not (tmp_path / "other.png").exists()


def test_speed_is_measured_when_asked_for(report, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "REPORTED", {name: REPORTED[name] for name in ("nf4", "fp8")})
    monkeypatch.setattr(command, "_STEP_SECONDS", 0.0)
    plots = [tmp_path / "bits.png", tmp_path / "speed.png"]
    report("-o", plots[0])
    code, out, _ = report("--speed", 64, "-o", plots[1])
    assert code == 0 and "speed: a step over bfloat16" in " ".join(out.split())
    assert plots[0].read_bytes() != plots[1].read_bytes()
    row = next(line.split() for line in out.splitlines() if line.startswith("fp8"))
    assert len(row) == 3 + len(FAMILIES) and float(row[2]) > 0
    found = json.loads(report("--speed", 64, "--json")[1])["speed"]
    assert found["keys"] == 64 and set(found["microseconds"]) == {"bfloat16", "nf4", "fp8"}
    assert min(found["microseconds"].values()) > 0


def test_wrong_words(report, tmp_path):
    assert report("--data", tmp_path / "none.npz")[0] == 1
    assert report("--error", "-1")[0] == 2 and report("--measure", "mean")[0] == 2


def test_rotation_on_real_activations():
    safetensors = pytest.importorskip("safetensors.torch")
    real = safetensors.load_file(SLICE)
    inputs = {"real": tuple(real[f"layer3.{x}"].float() for x in "qkv")}
    errors = {line.scheme: line.error.relative for line in command.measured(inputs, False)}
    assert errors["int4-rotated"] <= 0.09 and errors["int8-smooth"] <= 1e-2
