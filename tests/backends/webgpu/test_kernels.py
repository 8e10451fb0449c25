"""Every template by itself, between guard bands; gradients too; and planted mistakes, which must show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import polyflash
from polyflash.backends.webgpu import configs, render
from polyflash.backends.webgpu.configs import TILE, Variant
from polyflash.backends.webgpu.device import Block, Device
from polyflash.backends.webgpu.forward import Plan
from polyflash.reference import attention_reference
from polyflash.spec import Arguments
from tests.backends.webgpu.call import GRADIENTS, TEMPLATES, attend, off, qkv

DROP: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": torch.tensor(-(1 << 45) + 77)}
CALLS: dict[str, tuple[Arguments, dict[str, Any]]] = {
    "full": (Arguments(), {}),
    "causal": (Arguments(causal=True), {"causal": True}),
    "window": (Arguments(window_left=9, window_right=4), {"window": (9, 4)}),
    "softcap and dropout": (Arguments(softcap=2.0, **DROP), {"softcap": 2.0, **DROP}),
}
_TRUSTED = "wgpuDeviceCreateShaderModuleTrusted"
GUARD, FILL = 256, 0xFF  # bytes on either side; as a float of any width FILL is a NaN


class Guarded:
    """Hands out blocks that are full of NaN, with bands of it on both sides. Kernels are bound to the band
    behind a block too, so that nothing else keeps them out of it."""

    def __init__(self, on: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.blocks = on, list[Block]()
        self.empty, self.record = on.empty, on.record
        monkeypatch.setattr(on, "empty", self.guarded)
        monkeypatch.setattr(on, "record", self.recorded)
        monkeypatch.setattr(on, "calls", {})

    def guarded(self, nbytes: int, kernels_alone: bool = False) -> Block:
        held = -(-nbytes // 4) * 4
        block = self.empty(held + 2 * GUARD)
        self.on.write(block, np.full(held + 2 * GUARD, FILL, np.uint8))
        block.offset, block.nbytes = GUARD, nbytes
        self.blocks.append(block)
        return block

    def recorded(self, command: Any, blocks: Any) -> None:
        wide = [SimpleNamespace(buffer=b.buffer, offset=b.offset, nbytes=b.nbytes + GUARD) for b in blocks]
        self.record(command, wide)

    def check(self) -> None:
        for block in self.blocks:
            held = -(-block.nbytes // 4) * 4
            whole = SimpleNamespace(buffer=block.buffer, offset=0, nbytes=held + 2 * GUARD)
            data = self.on.read(whole)
            assert (data[:GUARD] == FILL).all(), "written before a block"
            assert (data[GUARD + held :] == FILL).all(), "written behind a block"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("call", CALLS)
def test_writes_every_element_and_no_other(on: Device, name: str, call: str, monkeypatch: pytest.MonkeyPatch):
    if TEMPLATES[name].subgroups and on.limits.subgroup < 4:
        pytest.skip(f"subgroups of {on.limits.subgroup} lanes")
    args, options = CALLS[call]
    guards, tensors = Guarded(on, monkeypatch), qkv()
    out, lse = attend(on, TEMPLATES[name], tensors, args)
    guards.check()
    assert off(out, tensors, **options) < 2e-6
    assert float((lse - attention_reference(*tensors, **options).lse).abs().max()) < 2e-6


@pytest.mark.parametrize("name", ("tile", "row"))
def test_hidden_values_may_be_anything(on: Device, name: str):
    q, k, v = qkv(77, 131, dims=(16, 16))
    clean = attend(on, TEMPLATES[name], (q, k, v), Arguments(causal=True))
    k[:, :, -1], v[:, :, -1] = float("nan"), float("inf")
    out, lse = attend(on, TEMPLATES[name], (q, k, v), Arguments(causal=True))
    assert torch.equal(out[:, :, :-1], clean[0][:, :, :-1])
    assert torch.equal(lse[:, :, :-1], clean[1][:, :, :-1]) and out[:, :, -1].isnan().all()


@pytest.mark.parametrize("name", ("tile", "row"))
def test_the_lse_of_a_nan(on: Device, name: str):
    """Drivers make an infinite weight of it, or a number of its logarithm."""
    q, k, v = qkv(9, 14, dims=(16, 16))
    q[0, 1, 3, 5] = float("nan")
    out, lse = attend(on, TEMPLATES[name], (q, k, v), Arguments(causal=True))
    assert lse.isnan().nonzero().tolist() == [[0, 1, 3]]
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 1, 3]]


def test_gradients_of_the_lse(on: Device):
    ours = [x.requires_grad_() for x in qkv(9, 14, dims=(8, 8))]
    polyflash.attention(*ours, causal=True, return_lse=True, backend="webgpu").lse.sum().backward()
    exact = [x.detach().double().requires_grad_() for x in ours]
    attention_reference(*exact, causal=True).lse.sum().backward()
    for x, y in zip(ours[:2], exact[:2], strict=True):
        assert float((x.grad - y.grad).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_splits_and_gradients_between_guards(on: Device, dtype: Any, monkeypatch: pytest.MonkeyPatch):
    guards = Guarded(on, monkeypatch)
    step = qkv(3, 700, dims=(59, 40), dtype=dtype)
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert off(polyflash.attention(*step, causal=True, backend="webgpu"), step, causal=True) < bound
    ours = [x.requires_grad_() for x in qkv(33, 50, dims=(24, 13), dtype=dtype)]
    polyflash.attention(*ours, causal=True, backend="webgpu").float().square().sum().backward()
    guards.check()
    exact = [x.detach().double().requires_grad_() for x in ours]
    attention_reference(*exact, causal=True).out.square().sum().backward()
    for x, y in zip(ours, exact, strict=True):
        assert float((x.grad.double() - y.grad).norm() / y.grad.norm()) < 5 * bound


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_every_template(on: Device, name: str, monkeypatch: pytest.MonkeyPatch):
    variant = GRADIENTS[name]
    if variant.lanes > max(1, on.limits.subgroup):
        pytest.skip(f"subgroups of {on.limits.subgroup} lanes")
    monkeypatch.setattr(configs, "gradient_variants", lambda *_: (variant, variant))
    guards = Guarded(on, monkeypatch)
    for options in ({}, {"causal": True}, {"window": (9, 30), "softcap": 2.0, **DROP}):
        ours = [x.requires_grad_() for x in qkv(50, 50, dims=(32, 32))]
        polyflash.attention(*ours, backend="webgpu", **options).square().sum().backward()
        exact = [x.detach().double().requires_grad_() for x in ours]
        attention_reference(*exact, **options).out.square().sum().backward()
        for x, y in zip(ours, exact, strict=True):
            assert float((x.grad.double() - y.grad).norm() / y.grad.norm()) < 2e-6
    guards.check()


@pytest.mark.parametrize("name", ("tile", "4 lanes, 2 rows"))
def test_splits_of_many_rows(on: Device, name: str):
    """As a graphics card gets them whose cores would be idle; a split may see none of a row's keys."""
    tensors, variant = qkv(90, 90, dims=(16, 16)), TEMPLATES[name]
    given = Arguments(causal=True, **DROP)
    out, lse = attend(on, variant, tensors, given, Plan(variant, False, 3))
    exact = attention_reference(*tensors, causal=True)
    assert off(out, tensors, causal=True, **DROP) < 3e-6 and float((lse - exact.lse).abs().max()) < 2e-6


def test_float16_with_and_without_the_device_s_own(on: Device, monkeypatch: pytest.MonkeyPatch):
    tensors = qkv(dtype=torch.float16)
    results = []
    for own in (False, on.limits.float16):
        monkeypatch.setattr(on, "limits", on.limits._replace(float16=own))
        results.append(attend(on, TEMPLATES["tile"], tensors, Arguments(causal=True))[0])
        assert off(results[-1], tensors, causal=True) < 2e-3
    assert torch.equal(*results)


def test_without_the_compilers_bounds_checks(on: Device, monkeypatch: pytest.MonkeyPatch):
    """The same bits from modules with and without naga's checks of indices and loops."""
    if on.dialect != render.NAGA:
        pytest.skip("Dawn reads the text, not naga")
    tensors, args = qkv(), Arguments(causal=True)
    for name in ("tile", "row", "4 lanes, 4 rows"):
        results = []
        for unchecked in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(on, "unchecked", unchecked)
                guards = Guarded(on, patch)
                results.append(attend(on, TEMPLATES[name], tensors, args))
                guards.check()
        bare, checked = results
        assert torch.equal(bare[0], checked[0]) and torch.equal(bare[1], checked[1])
    assert on.unchecked or not hasattr(pytest.importorskip("wgpu.backends.wgpu_native._api").libf, _TRUSTED)


def test_a_wgpu_without_unchecked_modules(on: Device, monkeypatch: pytest.MonkeyPatch):
    api = pytest.importorskip("wgpu.backends.wgpu_native._api")
    monkeypatch.delattr(api.libf, _TRUSTED, raising=False)
    monkeypatch.setattr(on, "pipelines", {})
    monkeypatch.setattr(on, "unchecked", True)
    tensors = qkv(20, 30, dims=(16, 16))
    assert off(attend(on, TEMPLATES["tile"], tensors, Arguments())[0], tensors) < 2e-6
    assert not on.unchecked


# file, what stands there, what a mistake makes of it, the template that has it
MISTAKES = {
    "a mask off by one": ("stages.wgsl", "j <= i + at.upper;", "j < i + at.upper;", "tile"),
    "a block more is whole": (
        "stages.wgsl", "end - 1 <= first + at.upper", "end - 1 <= last + at.upper", "row"
    ),
    "no rescale": ("forward_tile.wgsl", "acc[{i}][{c}] *= alpha;", "", "tile"),
    "no rescale of a row": (
        "forward_row.wgsl", "acc[{i}][{c}] *= factor;", "", "row"
    ),
    "no wait for keys": (
        "forward_tile.wgsl", "load_keys(at, j0, t);\n      workgroupBarrier();", "load_keys(at, j0, t);",
        "tile",
    ),
    "no wait before keys": (
        "forward_tile.wgsl", "workgroupBarrier();\n      load_keys", "load_keys", "tile"
    ),
    "no wait for maxima": (
        "forward_tile.wgsl", "workgroupBarrier();  // row maxima", "// row maxima", "tile"
    ),
    "no wait for values": (
        "forward_tile.wgsl", "load_values(at, j0, t);\n      workgroupBarrier();", "load_values(at, j0, t);",
        "tile",
    ),
    "no wait for a block": (
        "forward_row.wgsl", "store_tile(t, &part);\n      workgroupBarrier();\n//: end",
        "store_tile(t, &part);\n//: end", "row",
    ),
    "stretches of keys under different maxima": (
        "forward_row.wgsl", "whole_acc[{i}][{c}] * factor + acc", "whole_acc[{i}][{c}] + acc",
        "4 lanes, 2 rows",
    ),
    "a lane keeps the half it gave": (
        "lanes.wgsl", "return select(lower, upper, is_upper) +", "return select(upper, lower, is_upper) +",
        "4 lanes, 4 rows",
    ),
    "another row's weights": (
        "lanes.wgsl", "{ return subgroupShuffle(x, lane0 + i * LANES / RM); }\nfn number",
        "{ return subgroupShuffle(x, lane0); }\nfn number", "4 lanes, 2 rows",
    ),
    "half of a score": (
        "lanes.wgsl", "sum += subgroupShuffleXor(sum, far);", "", "4 lanes, 2 rows"
    ),
    "keys beyond the last": (
        "load_tile.wgsl", "x / D4 < (*part).count", "false", "2 lanes, 4 rows",
    ),
    "keys of a vector mixed up": (
        "forward_tile.wgsl", "key_at(j % 4u * BN4 + j / 4u,", "key_at(j,", "tile of 8 rows and keys"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(on: Device, name: str, monkeypatch: pytest.MonkeyPatch):
    if "no wait" in name and on.limits.kind != "cpu":
        pytest.skip("threads of this device may happen to be in time")
    file, old, new, template = MISTAKES[name]
    tensors, args = qkv(96, 160, dims=(64, 64)), Arguments(causal=True)
    assert off(attend(on, TEMPLATES[template], tensors, args)[0], tensors, causal=True) < 2e-6
    text = (render.FOLDER / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    sound = render.source
    monkeypatch.setattr(render, "source", lambda f: text.replace(old, new) if f == file else sound(f))
    monkeypatch.setattr(on, "pipelines", {})
    render.text_of.cache_clear()
    try:
        wrong = attend(on, TEMPLATES[template], tensors, args)[0]
    finally:
        render.text_of.cache_clear()
    assert off(wrong, tensors, causal=True) > 1e-3


def test_subgroups_that_are_too_small_give_wrong_rows(on: Device):
    """Why their size is measured: nothing complains."""
    if not 0 < on.limits.subgroup < 16:
        pytest.skip(f"subgroups of {on.limits.subgroup} lanes")
    tensors = qkv(64, 64, dims=(64, 64))
    wide = Variant(TILE, 16, 2, 4, 1, subgroups=True)
    assert off(attend(on, wide, tensors, Arguments(), Plan(wide))[0], tensors) > 1e-3
