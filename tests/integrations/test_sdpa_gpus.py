"""torch's SDPA call sites on GPUs, without one: meta tensors and fakes stand for those of a device."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from polyflash import UnsupportedError, attention, target
from polyflash.integrations import flash_registry, sdpa

HOPPER = target.parse("cuda:sm90")
WITHOUT = replace(HOPPER, packages=(("numba", "0.62"), ("triton", "")))


@pytest.fixture
def meta_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes meta tensors those of a device; returns what reached polyflash's attention."""

    def become(device: target.Target) -> list[tuple[torch.dtype, int]]:
        reached: list[tuple[torch.dtype, int]] = []

        def noted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            reached.append((q.dtype, v.shape[-1]))
            return q.new_empty(*q.shape[:-1], v.shape[-1])

        monkeypatch.setattr(sdpa, "detect", lambda kind, index: device)
        monkeypatch.setattr(sdpa, "_known_kernels", functools.cache(sdpa._kernels_of))
        monkeypatch.setattr(sdpa, "attention", noted)
        return reached

    return become


def x(head_dim: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(1, 2, 4, head_dim, device="meta", dtype=dtype)


def test_what_runs_on_a_device_is_read_off_the_table(meta_is: Any) -> None:
    reached = meta_is(HOPPER)
    halves = (torch.float32, torch.bfloat16, torch.float16)
    with sdpa.enabled(strict=True):
        for dtype in halves:
            F.scaled_dot_product_attention(x(16, dtype), x(16, dtype), x(576, dtype))
        assert reached == [(dtype, 576) for dtype in halves]
        with pytest.raises(UnsupportedError, match="no kernel for torch"):
            F.scaled_dot_product_attention(*(x(16, torch.float64),) * 3)
        with pytest.raises(UnsupportedError, match="head_dim: kernels for this meta take up to 576"):
            F.scaled_dot_product_attention(x(), x(), x(577))
    with sdpa.enabled():
        assert F.scaled_dot_product_attention(x(), x(), x(577)).shape[-1] == 577
    assert len(reached) == 3


def test_a_device_without_its_compiler_is_torchs(meta_is: Any) -> None:
    reached = meta_is(WITHOUT)
    with sdpa.enabled(strict=True), pytest.raises(UnsupportedError, match="no kernel"):
        F.scaled_dot_product_attention(x(), x(), x())
    assert not reached


def test_a_kernel_that_yields_whatever_is_asked_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is for those who name it."""
    from polyflash.capability import Yield

    (row,) = [r for r in sdpa.TABLE if r.name == "triton/forward"]
    monkeypatch.setattr(sdpa, "detect", lambda kind, index: HOPPER)
    monkeypatch.setattr(sdpa, "TABLE", (row,))
    assert sdpa._kernels_of("cuda", 0)[torch.float16] == row.max_head_dim
    slow = replace(row, yields=(Yield("", row.dtypes, row.features, "slow"),))
    monkeypatch.setattr(sdpa, "TABLE", (slow,))
    assert sdpa._kernels_of("cuda", 0) == {}


def test_tensors_on_several_devices_are_torchs() -> None:
    q = torch.zeros(1, 2, 4, 16)
    with sdpa.enabled(strict=True), pytest.raises((UnsupportedError, RuntimeError)) as error:
        F.scaled_dot_product_attention(q, q, q, torch.zeros(4, 4, device="meta"))
    assert sdpa._refusal(q, q, q, x(4)[0, 0], 0.0, False, None).startswith("device")
    assert error.value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which is asked")
def test_fake_tensors_of_a_device_that_is_not_here_are_torchs() -> None:
    with FakeTensorMode(), sdpa.enabled():
        q = torch.empty(1, 2, 4, 16, device="cuda")
        assert F.scaled_dot_product_attention(q, q, q).device.type == "cuda"


OPS = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no registry"
)


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch with a GPU on which cuDNN stands before flash attention."""
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sdpa, "detect", lambda kind, index: HOPPER)
    put = flash_registry.put_flash_first
    monkeypatch.setattr(flash_registry, "put_flash_first", lambda device: put("cpu"))
    yield
    sdpa.deactivate()
    torch._C._set_sdp_priority_order(before)


def has_kernels(key: str) -> list[bool]:
    return [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key) for op in OPS]


@needs_registry
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has kernels of its own under this key")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_the_registry_takes_gpus_and_puts_flash_attention_first(as_on_hopper: None) -> None:
    for _ in range(2):
        assert has_kernels("CUDA") == [False, False]
        sdpa.activate()
        assert has_kernels("CUDA") == [True, True]
        assert torch._C._get_sdp_priority_order() == [1, 3, 2, 0, 4]
        sdpa.deactivate()
        assert torch._C._get_sdp_priority_order() == [3, 1, 2, 0, 4]


@needs_registry
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_without_a_kernel_for_them_the_registry_leaves_gpus_alone(
    as_on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "detect", lambda kind, index: WITHOUT)
    before = has_kernels("CUDA")
    sdpa.activate()
    assert has_kernels("CUDA") == before and torch._C._get_sdp_priority_order()[0] == 3


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_what_torch_calls_on_a_gpu(causal: bool, dropout_p: float) -> None:
    """The bodies of torch's two ops, with its arguments, on any device."""
    q, k, v, dout = (torch.randn(2, heads, 9, 16, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    torch.manual_seed(7)
    out, lse, *lengths, state, _, debug = flash_registry._gpu_forward(
        q, k, v, dropout_p, causal, False, scale=0.3
    )
    assert lengths == [None, None, 9, 9] and state.shape == (2,) and not debug.numel()
    grads = flash_registry._gpu_backward(
        dout, q, k, v, out, lse, None, None, 9, 9, dropout_p, causal, state, None, scale=0.3
    )
    seed = state.view(torch.int64)[0] if dropout_p else None
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    want = attention(*inputs, causal=causal, scale=0.3, dropout_p=dropout_p, dropout_seed=seed)
    assert torch.equal(out, want)
    for ours, right in zip(grads, torch.autograd.grad(want, inputs, dout), strict=True):
        assert torch.equal(ours, right)
    torch.manual_seed(7)
    again = flash_registry._gpu_forward(q, k, v, dropout_p, causal, False, scale=0.3)[0]
    assert torch.equal(again, out) and bool(dropout_p) == bool(state.view(torch.int64).any())


def test_the_matrix_of_weights_is_not_made() -> None:
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(UnsupportedError, match="return_debug_mask"):
        flash_registry._gpu_forward(q, q, q, 0.5, False, True)


@pytest.mark.slow
def test_the_script_that_looks_behind_the_doors() -> None:
    """On a GPU it asks for kernels by name; here for the op, and it skips what a CPU has not."""
    root = Path(__file__).parents[2]
    if not (root / "scripts" / "gpu_doors.py").exists():
        pytest.skip("needs a checkout")
    words = [str(root / "scripts" / "gpu_doors.py"), "--device", "cpu", "kvcache", "graphs"]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=200, env=environment
    )
    verdicts = [line.split()[:2] for line in done.stdout.splitlines() if "default device" not in line]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [v[0] for v in verdicts if v[0] in ("ok", "skip")] == ["ok", "skip"], done.stdout
