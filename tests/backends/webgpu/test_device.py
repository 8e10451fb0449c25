"""The device: limits that are mocked, memory, batches, and what happens when something breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import polyflash
from polyflash import SpecError, UnsupportedError, env, webgpu
from polyflash.backends.webgpu import device, forward, render, report
from polyflash.backends.webgpu.configs import FLOOR, TILE, Config
from polyflash.backends.webgpu.device import Device, DeviceError
from polyflash.webgpu import GpuTensor
from tests.backends.webgpu.call import off, qkv


def limit(on: Device, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """The device with other limits, and nothing remembered of calls before."""
    monkeypatch.setattr(on, "limits", on.limits._replace(**limits))
    monkeypatch.setattr(on, "calls", {})
    monkeypatch.setattr(on, "trusted", {})


def call(tensors: tuple[torch.Tensor, ...], **options: Any) -> Any:
    return polyflash.attention(*tensors, backend="webgpu", **options)


@pytest.mark.parametrize("dims", ((64, 64), (128, 128)), ids=str)
def test_the_least_device_there_is(on: Device, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """16 KiB, 256 threads, no subgroups, no float16."""
    limit(on, monkeypatch, **FLOOR._replace(kind=on.limits.kind, unrolled=on.limits.unrolled)._asdict())
    for dtype, bound in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
        tensors = qkv(40, 70, dims=dims, dtype=dtype)
        assert off(call(tensors, causal=True), tensors, causal=True) < bound
        assert "tile-subgroup" not in on.trusted
    with pytest.raises(SpecError, match="config"):
        call(qkv(), config=Config(TILE, subgroups=True))


def test_a_tensor_above_the_binding_limit(on: Device, monkeypatch: pytest.MonkeyPatch):
    tensors = qkv(dims=(64, 64))
    mask = torch.rand(2, 4, 77, 131) > 0.5
    lens = torch.tensor([131, 60], dtype=torch.int32)
    options = {"mask": mask, "kv_lens": lens, "alibi_slopes": torch.rand(2, 4), "return_lse": True}
    options |= {"dropout_p": 0.2, "dropout_seed": 5}
    whole, before = call(tensors, **options), on.launches
    limit(on, monkeypatch, binding_bytes=77 * 4 * 64 * 2)
    parts = call(tensors, **options)
    assert on.launches - before >= 4
    assert torch.equal(parts.out, whole.out) and torch.equal(parts.lse, whole.lse)
    limit(on, monkeypatch, binding_bytes=1 << 10)
    with pytest.raises(UnsupportedError, match="larger than the 1024 bytes of a binding"):
        call(tensors)


def test_long_grids_are_cut(on: Device, monkeypatch: pytest.MonkeyPatch):
    tensors = qkv(200, 131, dims=(16, 16))
    whole = call(tensors, causal=True)
    limit(on, monkeypatch, workgroups=2)
    with pytest.raises(UnsupportedError):  # heads do not fit two at a time, entries and tiles do
        call(qkv(5, 7, heads=6), causal=True)
    assert torch.equal(call(tensors, causal=True), whole)


def test_a_broken_kernel_names_itself(on: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(on, "pipelines", {})
    monkeypatch.setattr(render, "text_of", lambda kernel, dialect: "fn forward_tile( {")
    with pytest.raises(DeviceError, match=r"refused \(.*forward_"):
        call(qkv(), config=Config(TILE))


def test_a_wrong_template_is_left_with_one_warning(on: Device, monkeypatch: pytest.MonkeyPatch):
    """tile-subgroup -> tile-shared -> row."""
    limit(on, monkeypatch)
    right, tensors = forward._passes, qkv()
    monkeypatch.setattr(forward, "_passes", lambda on, v: v.name == "row" and right(on, v))
    with pytest.warns(RuntimeWarning, match=r"row-subgroup.*not used; row is right"):
        assert off(call(tensors), tensors) < 2e-6
    assert off(call(tensors, causal=True), tensors, causal=True) < 2e-6  # and is quiet from then on
    limit(on, monkeypatch)
    monkeypatch.setattr(forward, "_passes", lambda *_: False)
    with pytest.raises(DeviceError, match="no kernel passed"):
        call(tensors)


def test_a_lost_device_is_replaced(on: Device):
    tensors = qkv()
    want = call(tensors)
    lost = device.current()
    lost.wgpu.destroy()
    with pytest.raises(DeviceError, match="lost, the next call opens another"):
        call(tensors)
    assert torch.equal(call(tensors), want) and device.current() is not lost


def test_a_chain_never_waits(on: Device):
    q, k, v = (GpuTensor.of(x) for x in qkv(16, 16, dims=(16, 16)))
    on = device.current()  # another, if the one before was lost
    webgpu.attention(q, k, v, causal=True)  # a first call tests the device
    waits, launches, x = on.waits, on.launches, q
    with webgpu.batch():
        for _ in range(50):
            x = webgpu.attention(x, k, v, causal=True)
    for _ in range(50):
        x = webgpu.attention(x, k, v, causal=True)
    assert on.launches - launches == 100 and on.waits == waits
    got = x.torch()
    assert on.waits == waits + 1
    want = q.torch()
    for _ in range(100):
        want = polyflash.attention(want, k.torch(), v.torch(), causal=True)
    assert torch.allclose(got, want, atol=1e-5)


def test_a_batch_uses_its_memory_again(on: Device, monkeypatch: pytest.MonkeyPatch):
    """A chain needs a few buffers, however long it is; a copy to the device gets none that unsent commands
    read or write."""
    tensors = qkv(16, 16, heads=2, dims=(16, 16))
    q, k, v = (GpuTensor.of(x) for x in tensors)
    on, made = device.current(), []
    want = webgpu.attention(webgpu.attention(q, k, v), k, v).torch()
    monkeypatch.setattr(on, "free", type(on.free)(list))
    allocate = on._buffer
    monkeypatch.setattr(on, "_buffer", lambda size: made.append(size) or allocate(size))
    nan = torch.full(q.shape, float("nan"))
    with webgpu.batch():
        x = q
        for _ in range(50):
            x = webgpu.attention(x, k, v)
        assert len(made) <= 3
        other = GpuTensor.of(tensors[0])
        x = webgpu.attention(other, k, v)
        del other
        copies = [GpuTensor.of(nan) for _ in range(4)]
        y = webgpu.attention(x, k, v)
        del x
        copies += [GpuTensor.of(nan) for _ in range(4)]
    assert torch.equal(y.torch(), want)
    assert all(copy.torch().isnan().all() for copy in copies)


def test_equal_calls_are_bound_once(on: Device):
    """By types too: 1 is no flag. Of tensors beside q, k, v by their values."""
    q, k, v = (GpuTensor.of(x) for x in qkv(16, 16, dims=(16, 16)))
    on = device.current()
    webgpu.attention(q, k, v, causal=True)
    kept = len(on.calls)
    webgpu.attention(q, k, v, causal=True)
    assert len(on.calls) == kept
    with pytest.raises(SpecError, match="causal"):
        webgpu.attention(q, k, v, causal=1)
    offset = torch.tensor([0, 0], dtype=torch.int32)
    first = webgpu.attention(q, k, v, causal=True, q_offset=offset).torch()
    kept = len(on.calls)
    assert torch.equal(webgpu.attention(q, k, v, causal=True, q_offset=offset.clone()).torch(), first)
    assert len(on.calls) == kept
    offset += 5
    assert not torch.equal(webgpu.attention(q, k, v, causal=True, q_offset=offset).torch(), first)


@pytest.mark.parametrize("staged", (False, True), ids=("as the device reads", "staged"))
def test_tensors_there_and_back(on: Device, staged: bool, monkeypatch: pytest.MonkeyPatch):
    if staged:
        monkeypatch.setattr(on, "maps", False)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in ((2, 3, 5, 7), (1, 1, 1, 64), (0, 2, 3, 4), (3, 5)):
            x = torch.randn(shape).to(dtype)
            there = GpuTensor.of(x)
            assert torch.equal(there.torch(), x) and there.shape == shape and there.dtype is dtype
    strided = torch.randn(2, 6, 3, 8).transpose(1, 2)
    assert torch.equal(GpuTensor.of(strided).torch(), strided)
    array = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    assert (GpuTensor.of(array).numpy() == array).all() and "GpuTensor(shape=" in repr(GpuTensor.of(array))
    for wrong in (torch.zeros(2, dtype=torch.int64), [1.0], torch.empty(2, device="meta")):
        with pytest.raises(SpecError):
            GpuTensor.of(wrong)


def test_a_growing_cache(on: Device):
    """Rows written between calls are seen by later calls alone, within a batch too."""
    q, k, v = qkv(1, 40, dims=(24, 24))
    cache = GpuTensor.of(torch.zeros_like(k)), GpuTensor.of(torch.zeros_like(v))
    there, results = GpuTensor.of(q), []
    with webgpu.batch():
        for n in range(0, 40, 10):
            for room, rows in zip(cache, (k, v), strict=True):
                room.write_rows(n, rows[:, :, n : n + 10])
            lens = torch.full((2,), n + 10, dtype=torch.int32)
            results.append(webgpu.attention(there, *cache, kv_lens=lens))
    for i, result in enumerate(results, 1):
        want = polyflash.attention(q, k[:, :, : 10 * i], v[:, :, : 10 * i])
        assert torch.allclose(result.torch(), want, atol=1e-5)
    with pytest.raises(SpecError, match="rows"):
        cache[0].write_rows(35, k[:, :, :10])


def test_calls_on_the_device_are_refused_as_others_are(on: Device):
    q, k, v = (GpuTensor.of(x) for x in qkv())
    with pytest.raises(SpecError, match="GpuTensor"):
        webgpu.attention(q.torch(), k, v)
    with pytest.raises(SpecError, match="softcap"):
        webgpu.attention(q, k, v, softcap=-1.0)
    out, lse = webgpu.attention(q, k, v, return_lse=True)
    want = polyflash.attention(q.torch(), k.torch(), v.torch(), return_lse=True)
    assert torch.allclose(out.torch(), want.out, atol=1e-5)
    assert torch.allclose(lse.torch(), want.lse, atol=1e-5)


def test_the_size_of_a_subgroup_is_measured(on: Device):
    size = on.limits.subgroup
    assert size == 0 or size & (size - 1) == 0


class Adapter:
    """As much of wgpu's adapter as choosing one takes."""

    def __init__(self, kind: str, backend: str = "Vulkan") -> None:
        self.info, self.summary = {"adapter_type": kind, "backend_type": backend}, f"{kind} of {backend}"


def choose_among(monkeypatch: pytest.MonkeyPatch, *kinds: str, **variables: str) -> None:
    monkeypatch.setattr(device, "adapters", lambda: tuple(map(Adapter, kinds)))
    for variable in (env.WEBGPU_CPU, env.WEBGPU_ADAPTER):
        monkeypatch.delenv(variable.name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_which_adapter(monkeypatch: pytest.MonkeyPatch):
    choose_among(monkeypatch, "CPU")
    assert not device.usable() and "POLYFLASH_WEBGPU_CPU=1 allows it" in device.why_none()
    choose_among(monkeypatch, "DiscreteGPU", "CPU")
    assert [a.summary for a in device.usable()] == ["DiscreteGPU of Vulkan"] and not device.why_none()
    choose_among(monkeypatch, "DiscreteGPU", "CPU", POLYFLASH_WEBGPU_CPU="1", POLYFLASH_ADAPTER="cpu")
    assert [a.summary for a in device.usable()] == ["CPU of Vulkan"]
    choose_among(monkeypatch, "DiscreteGPU", POLYFLASH_ADAPTER="radeon")
    assert "names none of DiscreteGPU" in device.why_none()
    choose_among(monkeypatch)
    assert "no Vulkan, Metal or D3D12 driver" in device.why_none()


def advice(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> str:
    monkeypatch.setattr(report.target, "installed_version", lambda name: version)
    return "\n".join(f"{a.what} -> {a.remedy}" for a in report.advice({}))


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    assert advice(monkeypatch, "") == ""
    assert "pip install 'wgpu>=0.32'" in advice(monkeypatch, "0.31.0")
    choose_among(monkeypatch, "DiscreteGPU")
    assert advice(monkeypatch) == ""
    choose_among(monkeypatch)
    monkeypatch.setattr(report.platform, "system", lambda: "Linux")
    assert "apt install mesa-vulkan-drivers" in advice(monkeypatch)
    monkeypatch.setattr(report.platform, "system", lambda: "Darwin")
    assert "update the driver" in advice(monkeypatch)
    choose_among(monkeypatch, "CPU")
    assert "set POLYFLASH_WEBGPU_CPU=1 for tests" in advice(monkeypatch)
    choose_among(monkeypatch, "DiscreteGPU", POLYFLASH_ADAPTER="radeon")
    assert "unset POLYFLASH_ADAPTER" in advice(monkeypatch)
