"""`polyflash warmup`: the calls it makes, what it says, and that nothing is left to compile after it."""

from __future__ import annotations

import re
import threading

import pytest
import torch

import polyflash
from polyflash import cli, compilation, target, warmup
from polyflash.quant import NAMED
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


@pytest.mark.parametrize("features", [["paged"], []], ids=["cache", "tensors"])
def test_codes_are_what_attention_gets(features, monkeypatch):
    """Of whole tensors by `quantize`, in pages by a cache that appends them in two pieces."""
    seen = []
    for function in ("attention", "attention_paged"):
        monkeypatch.setattr(polyflash, function, lambda q, k, v, **options: seen.append((k, v, options)))
    names = [name for name in NAMED if not (features and name == "int8-smooth")]
    for rows in (1, 5, 70):
        warmup._call({**JOB, "features": [*features, "causal", *names]}, rows, 70)
    assert [(k.scheme, v.scheme) for k, v, _ in seen] == [NAMED[name] for name in names] * 3
    for k, v, options in seen:
        assert [x.layout for x in (k, v)] == [("bshd" if features else "bhsd")] * 2 and options["causal"]
        if features:
            assert options["kv_lens"].tolist() == [70] and options["page_table"].shape == (1, 2)


def test_codes_that_no_cache_keeps_are_an_error():
    said = list(warmup._make({**JOB, "features": ["paged", "int8-smooth"]}))
    assert len(said) == 1 and "smoothing='mean'" in said[0]["error"]


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


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_complains_at_length_is_read_to_its_end(code, capsys, monkeypatch, tmp_path):
    """More on stderr than a pipe holds, before anything is said on stdout."""
    child = tmp_path / "child"
    said = """echo '{"kernel": "k", "seconds": 1}'"""
    child.write_text(f"#!/bin/sh\nyes complaint | head -c 1000000 >&2\n{said}\necho end >&2\nexit {code}\n")
    child.chmod(0o755)
    monkeypatch.setattr(warmup.sys, "executable", str(child))
    found = []
    reader = threading.Thread(target=lambda: found.append(warmup._printed("{}")), daemon=True)
    reader.start()
    reader.join(20)
    assert found == [[1, "end"] if code else [1]]
    assert capsys.readouterr().out == "    1.0 s  k\n"


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
    assert code == 2 and "pip install 'numba>=0.62'" in err


@needs_cpu_engine
@pytest.mark.slow
def test_what_was_compiled_is_there_the_next_time(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("POLYFLASH_CACHE_DIR", str(tmp_path / "kernels"))
    argv = ("--dtype", "bf16", "--head-dim", "16", "--heads", "2", "--features", "causal,paged,int8,int4")
    code, out, err = say(capsys, *argv)
    assert (code, err) == (0, "")
    for kind in ("forward_", "quantize_", r"decode_\w+_r1_d16_16_int8_", r"decode_\w+_r1_d16_16_int4_"):
        assert re.search(rf"^ +\d+\.\d s  {kind}\S+ for cpu:", out, re.M), kind
    code, out, err = say(capsys, *argv)
    assert (code, err) == (0, "") and out.startswith("nothing to compile, ")
