"""`polyflash warmup`: the calls it makes, what it says, and that nothing is left to compile after it."""

from __future__ import annotations

import re

import pytest
import torch

import polyflash
from polyflash import cli, compilation, target, warmup
from tests.rows_here import needs_cpu_engine

JOB = {
    "calls": [[5, 40]],
    "dtype": "float32",
    "head_dim": [16, 16],
    "heads": [4, 2],
    "features": [],
    "grad": False,
    "device": "cpu",
}


def say(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["warmup", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("feature", warmup.FEATURES)
def test_every_feature_is_a_call_that_runs(feature):
    with polyflash.use_backend("torch"), polyflash.watch(quiet=True) as w:
        for rows in (1, 5):
            warmup._call({**JOB, "features": [feature]}, rows, 40)
    assert w.counters()["calls"] == {"torch/forward": 2}


def test_gradients_are_made_where_asked_for():
    for grad in (False, True):
        with polyflash.use_backend("torch"), polyflash.watch(quiet=True) as w:
            warmup._call({**JOB, "features": ["causal"], "grad": grad}, 40, 40)
        assert ("torch/backward" in w.counters()["calls"]) is grad


def test_each_kernel_is_said_once_and_an_error_ends_the_job(monkeypatch):
    def call(job, rows, keys):
        if rows == 3:
            raise polyflash.UnsupportedError("no such kernel")
        compilation.compiled[f"kernel {rows}"] = 1.5

    monkeypatch.setattr(compilation, "compiled", {})
    monkeypatch.setattr(warmup, "_call", call)
    found = list(warmup._make({**JOB, "calls": [[1, 1], [2, 1], [3, 1], [4, 1]]}))
    kernels = [{"kernel": f"kernel {n}", "seconds": 1.5} for n in (1, 2)]
    assert found == [*kernels, {"error": "no such kernel"}]


def test_wrong_values_are_refused_with_the_choices(capsys):
    for argv, word in (
        (("--dtype", "fp8"), "bf16"),
        (("--heads", "8/x"), "as in 8/2"),
        (("--heads", "0"), "wanted 1 or more"),
        (("--features", "causal,holes"), "got holes, wanted some of causal, window"),
        (("--jobs", "0"), "wanted 1 or more"),
    ):
        code, _, err = say(capsys, *argv)
        assert code == 2 and word in err, argv


def test_a_gpu_that_is_absent_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = say(capsys, "--device", "cuda")
    assert (code, out) == (2, "") and "finds no GPU here" in err


def test_without_a_compiler_or_a_cache_nothing_is_tried(capsys, monkeypatch):
    monkeypatch.setenv("POLYFLASH_NO_CACHE", "1")
    assert say(capsys)[0] == 2
    monkeypatch.delenv("POLYFLASH_NO_CACHE")
    monkeypatch.setattr(target, "detect", lambda *_: target.Target("cpu:avx2", packages=(("numba", ""),)))
    code, _, err = say(capsys)
    assert code == 2 and "pip install 'numba>=0.60'" in err


@needs_cpu_engine
@pytest.mark.slow
def test_what_was_compiled_is_there_the_next_time(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("POLYFLASH_CACHE_DIR", str(tmp_path / "kernels"))
    argv = ("--dtype", "fp32", "--head-dim", "16", "--heads", "2", "--features", "causal")
    code, out, err = say(capsys, *argv)
    assert (code, err) == (0, "") and re.search(r"^ +\d+\.\d s  forward_\S+ for cpu:", out, re.M)
    code, out, err = say(capsys, *argv)
    assert (code, err) == (0, "") and out.startswith("nothing to compile, ")
