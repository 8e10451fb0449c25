"""The page that a Mac owner makes: run here by the shim, at small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import metal_check

from polyflash import backends, doctor, torch_ops
from polyflash.backends.metal import runtime
from tests.backends.metal import shim

pytestmark = pytest.mark.skipif(not shim.compiler(), reason=f"no C++ compiler: {', '.join(shim.COMPILERS)}")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "compiled", shim.library)
    monkeypatch.setattr(runtime, "_libraries", {})
    monkeypatch.setattr(torch_ops, "_routes", {})
    monkeypatch.setattr(backends, "TABLE", tuple(map(shim.on_the_cpu, backends.TABLE)))
    monkeypatch.setattr(metal_check, "ROWS", [row for row in backends.TABLE if row.backend == "metal"])


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    few = doctor.cases()
    monkeypatch.setattr(doctor, "cases", lambda: (few[0], few[-1]))
    monkeypatch.setattr(metal_check, "WRONG_BY", {"float32": 1e-5})
    page = tmp_path / "metal.md"
    assert metal_check.main(["--quick", "--seconds", "0.01", "--page", str(page)], device="cpu") == 0
    text = page.read_text(encoding="utf-8")
    assert all(f"| {phase}" in text for phase in ("forward", "backward", "decode")) and "stages=2" in text


def test_nothing_is_timed_where_a_row_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(metal_check, "wrong_rows", lambda: iter(["metal/forward, plain: off"]))
    monkeypatch.setattr(metal_check, "wrong_switches", lambda device: iter(()))
    assert metal_check.main(["--quick"], device="cpu") == 1
    assert "wrong: metal/forward, plain: off" in capsys.readouterr().err


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this is a Mac")
def test_without_a_mac_it_says_so(capsys):
    assert metal_check.main([]) == 1 and "no MPS device" in capsys.readouterr().err
