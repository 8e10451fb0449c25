"""The security checklist, as far as a CPU can express it; each test names its row.

Where the other rows are: S7 (poisoned memory) in conformance/test_memory.py; S13 to S16, S18, S19 and S24 in
backends/cpu/test_runtime.py, and S24 again, for control groups, in backends/cpu/test_cores.py.
"""

from __future__ import annotations

import ast
import dataclasses
import mmap
import os
import re
from pathlib import Path

import pytest
import torch

import polyflash
from polyflash import SpecError, backends, env, explain, target, torch_ops
from tests import processes
from tests.backends.cpu import keys as every
from tests.rows_here import HERE

PACKAGE = Path(polyflash.__file__).parent
PAGE = 1 << 16
FILES = sorted(PACKAGE.rglob("*.py"))


def small(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 2, 9, 8))


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("values", [(-1, 3), (10, 3), (2**31 - 1, 1), (-(2**31), 1)])
def test_lengths_from_elsewhere_are_checked_not_clamped(backend, values):
    """S1, S2, S4: a length out of range is refused in words, before a kernel reads by it."""
    q = small()
    with pytest.raises(SpecError, match="kv_lens"):
        polyflash.attention(q, q, q, kv_lens=lens(*values), backend=backend)
    with pytest.raises(SpecError, match="kv_starts"):
        polyflash.attention(q, q, q, kv_starts=lens(*values), backend=backend)


@pytest.mark.parametrize("cu", [(0, 5, 3, 9), (1, 5, 9), (0, 5, 10), (0, -1, 9), (0, 2**31 - 1), (0, 9, 4)])
def test_packed_offsets_are_checked(cu):
    """S1, S4: offsets that fall, begin late or end beyond the tensor."""
    q = small(9, 2, 8)
    with pytest.raises(SpecError, match="cu_seqlens"):
        polyflash.attention_varlen(q, q, q, lens(*cu), lens(*cu), max_seqlen_q=9, max_seqlen_k=9)


@pytest.mark.parametrize("backend", HERE)
def test_offsets_beyond_32_bits(backend):
    """S3: strides whose products pass 2^31 bytes are computed in 64 bits. None between is touched."""
    stride = 3 << 28  # elements
    place = mmap.mmap(-1, 8 * stride + PAGE)
    k = torch.as_strided(torch.frombuffer(place, dtype=torch.float32), (1, 1, 3, 8), (0, 0, stride, 1))
    q = small(1, 1, 3, 8)
    k.copy_(q)
    got = polyflash.attention(q, k, k, backend=backend)
    assert torch.equal(got, polyflash.attention(q, k.contiguous(), k.contiguous(), backend=backend))


@pytest.mark.parametrize("backend", HERE)
def test_sizes_beyond_memory_are_an_error_at_once(backend):
    """S8, S23: expanded inputs whose result no machine can hold: an exception, and the next call works."""
    q = torch.zeros(1, 1, 1, 8).expand(1 << 20, 1 << 12, 1 << 12, 8)
    k = torch.zeros(1, 1, 1, 8).expand(1 << 20, 1 << 12, 3, 8)
    with pytest.raises((RuntimeError, MemoryError, ValueError)):
        polyflash.attention(q, k, k, backend=backend)
    small_one = small()
    assert polyflash.attention(small_one, small_one, small_one, backend=backend).isfinite().all()


def test_no_code_or_object_is_loaded_from_data():
    """S9, S10: no unpickling, no eval, no marshal, and no collective that pickles."""
    banned = re.compile(
        r"\b(pickle|marshal|shelve|dill|cloudpickle|eval|exec|torch\.load|yaml\.load|broadcast_object_list|"
        r"all_gather_object|scatter_object_list)\s*[.(]|^\s*(import|from)\s+(pickle|marshal|shelve)",
        re.MULTILINE,
    )
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = text.replace(node.value, "") if len(node.value) > 40 else text
        assert not banned.search(text), f"{path.name}: {banned.search(text)}"
    for bad in ("import pickle", "x = pickle.loads(y)", "eval(text)", "dist.all_gather_object(a, b)"):
        assert banned.search(bad)


def test_values_of_the_environment_are_taken_from_lists(monkeypatch):
    """S11: a value that is not one of those known is an error, never part of a name, path or command."""
    q = small()
    token = torch_ops.backend_in_use.set("cpu; id")  # where POLYFLASH_BACKEND is kept from import on
    try:
        with pytest.raises(SpecError, match="POLYFLASH_BACKEND"):
            polyflash.attention(q, q, q)
    finally:
        torch_ops.backend_in_use.reset(token)
    monkeypatch.setenv("POLYFLASH_CPU_ISA", "avx512+$(id)")
    target.detect.cache_clear()
    try:
        with pytest.raises(SpecError, match="wanted one of"):
            target.detect("cpu")
    finally:
        target.detect.cache_clear()


def test_processes_are_started_from_lists_without_a_shell():
    """S11: every subprocess call passes a list, and never shell=True."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
                kind = ast.unparse(node.func)
                if kind in ("subprocess.run", "subprocess.Popen", "subprocess.check_output"):
                    assert not isinstance(node.args[0], (ast.Constant, ast.JoinedStr)), (
                        f"{path.name}:{node.lineno}"
                    )
                assert all(k.arg != "shell" for k in node.keywords), f"{path.name}:{node.lineno}"


def test_a_config_from_elsewhere_cannot_reach_generated_code():
    """S12, S17: fields of a config are checked by type and range, and text never becomes a kernel's name."""
    q = small()
    plan = explain(q, q, q)
    if plan.backend != "cpu":
        pytest.skip("the CPU engine has no kernel for this machine")
    good = plan.config
    for field in dataclasses.fields(good):
        value = getattr(good, field.name)
        for bad in ("x; ret void }", -1, 1 << 40, 0.5, None):
            if bad == value or (value is None and bad is None):
                continue
            with pytest.raises((SpecError, ValueError, TypeError, polyflash.UnsupportedError)):
                dataclasses.replace(good, **{field.name: bad})
                polyflash.attention(
                    q, q, q, backend="cpu", config=dataclasses.replace(good, **{field.name: bad})
                )
    for known in target.KNOWN:
        if known.kind == "cpu":
            assert all(re.fullmatch(r"[a-z0-9_]+", key.name) for key in every.forward(known))


def test_no_network_and_no_file_outside_the_cache():
    """S20, S21: import and use open no socket, start no process, and write below the cache folder alone."""
    code = """
import sys
import torch
written, told = [], []
def audit(event, args):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.fork")):
        told.append(event)
    elif event == "open" and isinstance(args[2], int) and args[2] & 3 and isinstance(args[0], str):
        written.append(args[0])
sys.addaudithook(audit)
import polyflash
assert not written, written
q = torch.randn(1, 2, 9, 8)
polyflash.attention(q, q, q)
polyflash.attention(q, q, q.requires_grad_()).sum().backward()
polyflash.explain(q, q, q)
assert not told, told
print([name for name in written if "__pycache__" not in name])
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = processes.begun(["-c", code], env=environment)
    assert done.returncode == 0, done.stderr
    outside = [
        name for name in ast.literal_eval(done.stdout) if not name.startswith((".", "/dev/", "/proc/"))
    ]
    assert not outside, outside  # entries are opened by a name relative to the folder's descriptor


def test_errors_carry_no_contents():
    """S22: shapes, dtypes and bounds, but never a value of a tensor that holds data."""
    secret = 123456.75
    q = torch.full((2, 2, 9, 8), secret)
    calls = [
        lambda: polyflash.attention(q, q[:, :, :, :7], q),
        lambda: polyflash.attention(q, q, q[:, :1].double()),
        lambda: polyflash.attention(q, q, q, bias=torch.full((5, 5), secret)),
        lambda: polyflash.attention(q, q, q, sinks=torch.full((3,), secret)),
        lambda: polyflash.attention(q, q, q, alibi_slopes=torch.full((3,), secret)),
        lambda: polyflash.attention(q.double(), q.double(), q.double(), backend="cpu"),
        lambda: polyflash.merge(q, q, q, q),
    ]
    for call in calls:
        with pytest.raises((ValueError, NotImplementedError, TypeError)) as caught:
            call()
        assert "123456" not in str(caught.value) and "tensor(" not in str(caught.value), str(caught.value)


def test_all_variables_and_rows_are_known():
    """S11, S16: what changes generated code is listed, so that reports and keys can name it."""
    assert env.CPU_ISA in env.ALL and env.NO_CACHE in env.ALL and env.CACHE_DIR in env.ALL
    assert {row.backend for row in backends.TABLE} == set(backends.BACKENDS)
