"""`polyflash ablate`: one change at a time, outputs compared before a clock starts, losses in the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polyflash
from benchmarks import group_trial
from polyflash.bench.timing import FEWEST, Arm, Comparison, GpuSpeed, Summary, compared, queued_rounds
from polyflash.cli import main
from polyflash.spec import Phase
from polyflash.tuning import ablation
from polyflash.tuning.trial import Trial, trial
from tests.catalogue import named

SHAPE = ("--seqlen", "40/70", "--heads", "4/2", "--dtype", "float32", "--seconds", "0.001")


@pytest.fixture
def clock(monkeypatch):
    """Races without a clock, in the order the arms are given: 4 ms, 5 ms, 6 ms, ..."""
    raced: list[tuple[str, ...]] = []

    def timed(arms: Mapping[str, Callable[[], Any]], device: str, seconds: float) -> SimpleNamespace:
        raced.append(tuple(arms))
        found = {name: Summary((4 + i) * 1e-3, 1e-4, 5, 5) for i, name in enumerate(arms)}
        return SimpleNamespace(summaries=lambda: found)

    monkeypatch.setattr(ablation, "compared", timed)
    return raced


def cpu() -> Trial:
    return trial(named("causal-tall"), Phase.FORWARD, "cpu")


def differs_in(field: str, config: Any, chosen: Any) -> bool:
    return config != chosen and replace(chosen, **{field: getattr(config, field)}) == config


def test_a_document_has_every_switch_with_its_ratio_and_its_difference(clock):
    one = cpu()
    row = ablation.measured(one, "cpu", 0.01)
    names = [s["name"] for s in row["switches"]]
    assert names == list(one.switches())
    alone = {f for f in ("block_n", "panels") for c in one.candidates() if differs_in(f, c, one.untuned)}
    assert {n.partition("=")[0] for n in names} == alone and "panels" in alone
    assert clock == [(ablation.CHOSEN, *names)]  # all in one race
    assert [s["ratio"] for s in row["switches"]] == pytest.approx([(5 + i) / 4 for i in range(len(names))])
    for switch in row["switches"]:
        assert switch["mark"] == "" and switch["difference"] <= one.tolerance >= switch["error"]
        assert ("panels" in switch["name"]) is (switch["difference"] == 0)  # a panel decides no sum


@pytest.mark.parametrize("groups", (2, 4))
def test_groups_are_walked_together_and_one_by_one(groups, clock, tmp_path, capsys):
    file = tmp_path / "a.json"
    assert main(["ablate", *SHAPE, "--backend", "cpu", "--groups", str(groups), "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    (switch,) = row["switches"]
    other = "off" if row["config"]["fused_groups"] else "on"
    assert switch["name"] == f"fused_groups={other}" and switch["mark"] == ""
    assert switch["error"] <= 2e-5 and row["error"] <= 2e-5 and row["row"].startswith("cpu/")
    assert row["problem"].startswith(f"{groups} groups of {40 // groups} rows")
    assert clock == [(ablation.CHOSEN, switch["name"])]


def test_groups_that_lose_a_group_differ(clock, monkeypatch):
    made = group_trial.group_trial(named("causal-tall"), 3, "cpu")

    def fewer(self, config):
        return lambda: tuple(x * (0.0 if config.fused_groups else 1.0) for x in made.reference)

    monkeypatch.setattr(group_trial.GroupTrial, "run", fewer)
    (switch,) = ablation.measured(replace(made, untuned=group_trial.Fusion(False)), "cpu", 0.01)["switches"]
    assert switch["mark"] == "differs by more than rounding"


@pytest.mark.parametrize(
    ("words", "name"),
    (
        *((("--groups", n), "groups") for n in ("1", "3", "41")),
        (("--groups", "2", "--phase", "backward"), "phase"),
        (("--groups", "2", "--causal", "top_left"), "problem"),
    ),
)
def test_groups_that_would_lose_something_are_refused(words, name, capsys):
    assert main(["ablate", *SHAPE, *words]) == 1
    assert f"{name}: got" in capsys.readouterr().err


def test_only_the_switches_asked_for_run(clock):
    row = ablation.measured(cpu(), "cpu", 0.01, ["panels"])
    assert row["switches"] and all(s["name"].startswith("panels=") for s in row["switches"])


def test_one_value_of_a_switch_may_be_named(clock):
    names = list(cpu().switches())
    row = ablation.measured(cpu(), "cpu", 0.01, [names[-1]])
    assert [s["name"] for s in row["switches"]] == [names[-1]]


def test_an_interrupted_ablation_leaves_what_ran(clock, monkeypatch, tmp_path, capsys):
    measured, done = ablation.measured, []

    def stop(*args: Any) -> dict[str, Any]:
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt
        return measured(*args)

    monkeypatch.setattr(ablation, "measured", stop)
    file = tmp_path / "a.json"
    words = ["ablate", "--backend", "cpu", *SHAPE, "--phase", "forward,statistics", "--json", str(file)]
    assert main(words) == 130
    assert len(json.loads(file.read_text(encoding="utf-8"))["rows"]) == 1
    assert capsys.readouterr().err == f"interrupted: 1 problems were measured and are in {file}\n"


@pytest.mark.parametrize("kind", ("wrong", "nan", "fails"))
def test_a_switch_that_changes_the_result_or_fails_has_no_time(clock, monkeypatch, kind: str):
    run = Trial.run

    def spoilt(self: Trial, config: Any) -> Callable[[], Any]:
        if config.panels != 2:
            return run(self, config)

        def call() -> Any:
            if kind == "fails":
                raise RuntimeError("ptxas: too much shared data\nmore")
            out, lse = run(self, config)()
            return out * (1.01 if kind == "wrong" else torch.nan), lse

        return call

    monkeypatch.setattr(Trial, "run", spoilt)
    row = ablation.measured(cpu(), "cpu", 0.01)
    (switch,) = (s for s in row["switches"] if s["name"] == "panels=2")
    wanted = "fails: RuntimeError: ptxas: too much shared data" if kind == "fails" else "differs"
    assert switch["mark"].startswith(wanted) and switch["ratio"] is None
    assert "panels=2" not in clock[0] and len(clock[0]) > 1
    page = ablation.markdown({"target": "cpu:avx512", "rows": [row]})
    assert switch["mark"] in page
    json.dumps(row, allow_nan=False)


def test_a_wrong_switch_makes_the_command_fail(clock, monkeypatch, capsys):
    monkeypatch.setattr(Trial, "error", lambda self, results: 1.0)
    assert main(["ablate", "--backend", "cpu", *SHAPE]) == 1
    assert "differs by more than rounding" in capsys.readouterr().out


def test_what_helps_comes_first_and_losses_stay(clock, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("a.json", "a.md")]
    assert main(["ablate", "--backend", "cpu", *SHAPE, "--json", files[0], "--page", files[1]]) == 0
    content = json.loads(Path(files[0]).read_text(encoding="utf-8"))
    assert content["schema"] == ablation.SCHEMA and len(content["rows"]) == 1
    page = Path(files[1]).read_text(encoding="utf-8")
    names = [s["name"] for s in content["rows"][0]["switches"]]
    assert all(f"| {name} |" in page for name in names)
    order = sorted(names, key=lambda name: page.index(f"| {name} |"))
    assert order == names  # the clock above makes each slower than the one before
    assert "×1.250" in page and "×1.250" in capsys.readouterr().out


@pytest.mark.parametrize("phase", ("backward", "statistics"))
def test_other_phases(clock, phase: str, capsys):
    backend = "torch" if phase == "backward" else "cpu"
    assert main(["ablate", "--backend", backend, "--phase", phase, *SHAPE, "--quiet"]) == 0


def test_a_race_takes_turns():
    order: list[str] = []
    arms = {name: (lambda name=name: order.append(name)) for name in ("a", "b", "c")}
    found = compared(arms, "cpu", 0.0).summaries()
    assert set(found) == set(arms) and all(s.of >= FEWEST and s.median > 0 for s in found.values())
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert any(turns[i : i + 4] == ["c", "b", "a", "b"] for i in range(len(turns)))  # it turns round


def gpu(speeds: Iterator[float]) -> Comparison:
    """Two arms by a clock that says 1 ms and 2 ms a call, on a machine of these speeds."""
    time = {"a": 1e-3, "b": 2e-3}
    arms = [Arm(name, lambda name=name: name) for name in time]
    return queued_rounds(arms, 0.3, lambda call, repeats: time[call()], lambda: next(speeds))


def test_rounds_of_a_gpu_end_in_time_and_know_contention():
    quiet = gpu(repeat(1.0))
    assert (quiet.summary("a").median, quiet.summary("b").median) == (1e-3, 2e-3)
    assert len(quiet.rounds) == 15 and not quiet.contended  # 10 ms of calls to each sample of each arm
    busy = gpu(repeat(0.5))
    assert len(busy.rounds) == 30 and busy.contended
    assert gpu(chain([0.5] * 3, repeat(1.0))).quiet == 12


def test_the_speed_of_a_gpu_is_that_of_its_best_copy():
    times = iter([1.0, 2e-3, 1e-3, 2e-3])  # the first warms it up
    speed = GpuSpeed("cpu", lambda call, repeats: next(times))
    assert [speed() for _ in range(3)] == [1.0, 1.0, 0.5]


@pytest.mark.slow
def test_techniques_of_the_triton_kernels_change_no_result_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "a.json"
    words = ["ablate", "--backend", "triton", "--device", "cpu", "--seqlen", "20/40", "--heads", "2/1"]
    words += ["--dtype", "float32", "--seconds", "0.0001", "--quiet", "--json", str(file)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "polyflash", *words], env=env, capture_output=True, text=True, timeout=600
    )
    if "invalid choice: 'triton'" in done.stderr:
        pytest.skip("the Triton rows are not in the table")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert {s["name"].partition("=")[0] for s in row["switches"]} >= {
        "base2", "split_exp", "num_stages", "hold_q", "loads", "cache_kv", "pack_gqa", "mask_by", "order",
        "persistent",
    }  # fmt: skip
    assert not [s for s in row["switches"] if s["mark"]]
    assert all(s["error"] <= 2e-5 for s in row["switches"])


def test_a_plan_is_not_changed_by_an_ablation(clock):
    q = torch.randn(1, 4, 40, 64)
    before = polyflash.explain(q, q, q, backend="cpu")
    ablation.measured(trial(replace(named("self"), seqlen_q=40), Phase.FORWARD, "cpu"), "cpu", 0.01)
    after = polyflash.explain(q, q, q, backend="cpu")
    assert (before.config, before.rung) == (after.config, after.rung)
