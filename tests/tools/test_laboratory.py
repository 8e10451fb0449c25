"""Every script of the laboratory that has no tests of its own, on sizes whose figures mean nothing; and what
they check results with."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks import Shape, exact
from tests import processes

ROOT = Path(__file__).parents[2]
HAS = {name: importlib.util.find_spec(name) is not None for name in ("triton", "wgpu")}
COMMANDS = ("codegen", "gpu", "parallel", "webgpu")
WANTS = {"codegen": "triton", "webgpu": "wgpu"}


def begun(*words: str, **more: str):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}
    return processes.begun(["-m", *words], env=env, cwd=ROOT, timeout=300)


def test_every_command_says_what_it_does():
    """Those that the documents name, each with its module's first words."""
    assert set(COMMANDS) == {p.parent.name for p in (ROOT / "benchmarks").glob("*/__main__.py")}
    for name in (c for c in COMMANDS if HAS.get(WANTS.get(c, ""), True)):
        done = begun(f"benchmarks.{name}", "--help")
        assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr


def test_problems_are_named_by_their_sizes():
    for text in ("4x32/8x8192x128", "1x8x64x64"):
        assert str(Shape.of(text)) == text
    assert Shape.of("2x8x64x16") == (2, 8, 8, 64, 16)
    with pytest.raises(ValueError, match="'8x64', wanted batch x heads"):
        Shape.of("8x64")


@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_those_of_a_slice(causal: bool):
    q, k, v = (torch.randn(2, h, 200, 16, requires_grad=True) for h in (4, 2, 2))
    out = sdpa(q, k, v, is_causal=causal, enable_gqa=True)
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    scores = scores.masked_fill(torch.ones(200, 200).triu(1).bool(), -math.inf) if causal else scores
    dout, lse = torch.randn_like(out), scores.logsumexp(-1).detach()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    out = out.detach()
    assert exact.forward_error((q, k, v), out, causal, lse) < 1e-6
    assert exact.gradient_error((q, k, v), dout, gradients, causal) < 1e-6
    for at, wrong in (((0, 0, 0), 1.01), ((1, 3, 199), 1.01), ((1, 0, 0), math.nan)):
        spoiled = out.clone()
        spoiled[at] *= wrong
        assert exact.forward_error((q, k, v), spoiled, causal) > 1e-4
    assert exact.forward_error((q, k, v), out, not causal) > 0.1
    assert exact.forward_error((q, k, v), out, causal, lse + 0.1) > 1e-3
    for i in range(3):
        spoiled = [1.01 * x if i == j else x for j, x in enumerate(gradients)]
        assert exact.gradient_error((q, k, v), dout, spoiled, causal) == pytest.approx(0.01, rel=0.01)


def test_rows_behind_earlier_keys_see_them():
    q, k, v = (torch.randn(1, 2, n, 16) for n in (8, 40, 40))
    seen = torch.ones(8, 40).tril(32).bool()
    assert exact.forward_error((q, k, v), sdpa(q, k, v, attn_mask=seen), True) < 1e-6


@pytest.fixture
def adapter() -> None:
    from polyflash.backends.webgpu import device

    if not HAS["wgpu"] or (why := device.why_none()):
        pytest.skip("wgpu has no adapter" if HAS["wgpu"] and why else "wants wgpu")


def test_webgpu_variants_and_mappings(adapter, tmp_path, monkeypatch):
    """One variant of each kernel, the copy, and the mappings that are quick enough without a GPU."""
    from benchmarks.webgpu import __main__ as suite
    from benchmarks.webgpu import mappings, worker

    monkeypatch.setattr(worker, "WARM", 0.0)
    monkeypatch.setattr(worker, "ROUNDS", 1)
    monkeypatch.setattr(suite, "Child", Here)
    for table, name in ((worker.FORWARD, "row 8x8 128t 32k"), (worker.BACKWARD, "row 8x4 128t 32k")):
        for other in [x for x in table if x != name]:
            monkeypatch.delitem(table, other)
    for other in [x for x in mappings.MAPPINGS if "element" in x or "256" in x]:
        monkeypatch.delitem(mappings.MAPPINGS, other)
    what, file = "copy,forward,backward,mappings", tmp_path / "w.json"
    assert suite.main(["--what", what, "--sizes", "1x2x64x64", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    figures = [row for row in rows if "reason" not in row]
    assert {row["what"] for row in figures} >= {"copy", "forward", "backward", "mappings"}
    assert all(row["error"] <= row.get("allowed", 1e-4) and row["ms"] > 0 for row in figures)
    assert {row["variant"] for row in figures if row["what"] == "mappings"} == set(mappings.MAPPINGS)


class Here:
    """What a child process answers, in this one."""

    alive = True

    def __init__(self, prepare, *_) -> None:
        self._answer = prepare()

    def ask(self, request, _):
        return self._answer(request)

    def end(self) -> None:
        pass


@pytest.mark.slow
def test_ranks_on_this_cpu(tmp_path):
    done = begun("benchmarks.parallel", "--device", "cpu", "--json", str(tmp_path / "p.jsonl"))
    assert done.returncode == 0 and " 0 wrong or lost" in done.stdout, done.stdout + done.stderr
