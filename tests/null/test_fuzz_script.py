"""The fuzzer itself: it finds what fails, makes it small, stores it, survives its child, and what it stores
is replayed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from scripts import fuzz

from tests.conformance import calls, draws
from tests.conformance.draws import Draw

ROOT = Path(__file__).resolve().parent.parent.parent


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of every problem with more than 16 rows and causal."""

    def check(drawn: Draw) -> None:
        assert drawn.workload.seqlen_q <= 16 or not drawn.workload.causal, "planted"

    found = {"forward": (draws.forward_draws(draws.problems()), check)}
    monkeypatch.setattr(fuzz, "strategies", lambda: found)


def test_a_defect_is_found_made_small_and_stored(monkeypatch, tmp_path, capsys):
    plant(monkeypatch)
    end = time.time() + 60
    assert fuzz.draw_until(end, 3, ["forward"], tmp_path / "draw", tmp_path / "draws") == 0
    (path,) = (tmp_path / "draws").iterdir()
    assert path.stem.startswith("forward-") and "planted" in capsys.readouterr().out
    drawn = Draw.read(path.read_text(encoding="utf-8"))
    assert drawn.workload.seqlen_q == 17 and drawn.workload.causal and drawn.workload.batch <= 1
    draws.replay(path)  # the package itself has no such defect


def test_time_is_a_bound(monkeypatch, tmp_path):
    plant(monkeypatch)
    assert fuzz.one_round("forward", 1, time.time() - 1, tmp_path / "draw") == (0, "", "")


@pytest.mark.parametrize("how", ("os._exit(3)", "os.kill(os.getpid(), 9)"))
def test_a_draw_that_kills_the_process_is_stored(tmp_path, how):
    current, text = tmp_path / "draw", calls.Call("attention", (("q", "none"),)).text()
    lines = ("import os", f"open({str(current)!r}, 'w').write('calls\\n' + {text!r})")
    code = "\n".join((*lines, "print('drawn 7', flush=True)", how))
    drawn, failed = fuzz.watch([sys.executable, "-c", code], time.time() + 60, current, tmp_path)
    assert drawn == 7 and len(failed) == 1 and "status" in failed[0]
    (path,) = tmp_path.glob("calls-*.json")
    assert path.read_text(encoding="utf-8") == text
    calls.replay(path)


def test_names_follow_from_the_draw(tmp_path):
    assert fuzz.store("calls", "{}", tmp_path) == fuzz.store("calls", "{}", tmp_path)


def test_every_target_draws(tmp_path):
    for target in fuzz.TARGETS:
        assert target in fuzz.strategies()
