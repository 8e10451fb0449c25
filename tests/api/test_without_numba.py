"""Where numba is missing, plain calls run on torch SDPA, and that is said once, with the remedy."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import polyflash
from polyflash import UnsupportedError, attention, counting, repeats, target, torch_ops
from polyflash.reference import attention_reference
from tests import processes

REMEDY = "pip install 'numba>=0.62'"


@pytest.fixture(autouse=True, params=[("numba", ""), ("numba", "0.50.1")], ids=["absent", "old"])
def without_numba(request, monkeypatch):
    here = replace(target.detect("cpu"), packages=(request.param, ("triton", "")))
    for cache in (torch_ops._routes, repeats._known):
        cache.clear()
    monkeypatch.setattr(target, "detect", lambda *_: here)
    monkeypatch.setattr(counting, "_warned", set())
    yield
    for cache in (torch_ops._routes, repeats._known):
        cache.clear()


@pytest.fixture
def handed(monkeypatch):
    calls, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: calls.append(1) or sdpa(*a, **o))
    return calls


def qkv(rows: int, keys: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, heads, n, 32) for heads, n in ((4, rows), (2, keys), (2, keys)))


@pytest.mark.filterwarnings("ignore:numba")
@pytest.mark.parametrize(
    ("rows", "keys", "causal"), [(40, 90, False), (40, 40, True), (1, 90, True), (1, 90, False)]
)
def test_plain_calls_run_on_torch_sdpa(rows, keys, causal, handed):
    q, k, v = qkv(rows, keys)
    out = attention(q, k, v, causal=causal)
    assert len(handed) == 1
    torch.testing.assert_close(
        out.double(), attention_reference(q, k, v, causal=causal).out, rtol=1e-4, atol=1e-5
    )
    plan = polyflash.explain(q, k, v, causal=causal)
    assert plan.backend == "torch" and any("handed over to torch SDPA" in note for note in plan.notes)


@pytest.mark.filterwarnings("ignore:numba")
def test_calls_of_another_meaning_do_not(handed):
    q, k, v = qkv(40, 90)
    attention(q, k, v, causal=True)  # aligned bottom-right
    attention(q, k, v, return_lse=True)
    attention(q, k, v, window=(5, 5))
    leaf = q.clone().requires_grad_()
    attention(leaf, k, v).sum().backward()
    assert not handed and leaf.grad is not None


def test_it_is_said_once_with_the_remedy():
    q, k, v = qkv(5, 9)
    with pytest.warns(RuntimeWarning, match="numba: .* Remedy: pip install"):
        attention(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, softcap=5.0)
        counting._warned.clear()
        attention(q, k, v, backend="torch")  # asked for by name
        attention(q.double(), k.double(), v.double(), backend="torch")


@pytest.mark.filterwarnings("ignore:numba")
def test_the_engine_by_name_says_what_to_install():
    q, k, v = qkv(5, 9)
    with pytest.raises(UnsupportedError) as error:
        attention(q, k, v, backend="cpu")
    assert REMEDY in str(error.value)
    with polyflash.watch(quiet=True) as w:
        attention(q, k, v)
    assert all(REMEDY in why for why in w.counters()["left_to_torch"]["polyflash"])


def test_a_numba_that_does_not_import_is_one_answer(tmp_path):
    """As beside a numpy that is newer than it knows: it is there, and that it is no use shows late."""
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.2 or less')")
    code = "import torch, polyflash; x = torch.ones(1, 1, 40, 8); polyflash.attention(x, x, x)"
    path = os.pathsep.join((str(tmp_path), str(Path(polyflash.__file__).parents[1])))
    env = {**os.environ, "PYTHONPATH": path, "POLYFLASH_NO_CACHE": "1"}
    done = processes.begun(["-c", code], env=env)
    said = "UnsupportedError: numba: got Numba needs NumPy 2.2 or less, wanted a compiler that imports. pip "
    assert said in done.stderr.splitlines()[-1]
