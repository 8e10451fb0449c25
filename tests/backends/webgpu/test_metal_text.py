"""Every kernel translated into Metal's language and run by the shim, in both of its orders: by naga, which is
what wgpu would give a Mac, and by spirv-cross, which is what Vulkan would."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash.backends.webgpu import configs, device, forward, render
from polyflash.backends.webgpu.calls import call_of, sizes_of
from polyflash.backends.webgpu.codes import held_on_device, without_tables
from polyflash.backends.webgpu.configs import NAMED, ROW, TILE, Variant
from polyflash.backends.webgpu.device import Device
from polyflash.backends.webgpu.forward import Plan, launch_forward, prepare
from polyflash.backends.webgpu.tensor import GpuTensor
from polyflash.quant import NAMED as SCHEMES
from polyflash.quant import quantize
from polyflash.quant.calls import opened
from polyflash.reference import attention_reference
from polyflash.spec import Arguments
from tests.backends.metal import shim
from tests.backends.webgpu import naga
from tests.backends.webgpu.call import TEMPLATES, off, qkv
from tests.backends.webgpu.test_codes import MULTIPLIED, launched
from tests.backends.webgpu.test_text import KERNELS, VARIANTS

pytestmark = pytest.mark.slow  # each text is compiled for seconds
ORDERS = pytest.mark.parametrize("reversed", (False, True), ids=("forward", "reverse"))
BOUNDS = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True, params=naga.ROUTES)
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> naga.FiberDevice:
    if why := naga.why_not(request.param):
        pytest.skip(why)
    fibers = naga.FiberDevice(request.param)
    monkeypatch.setattr(device, "current", lambda: fibers)
    monkeypatch.setattr(device, "why_none", lambda: "")
    return fibers


def small(rows: int = 21, dtype: Any = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(rows, 45, dims=(30, 14), dtype=dtype)


def options_of(everything: bool, rows: int = 21) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands of a call as the kernels take them, and as the oracle does."""
    if not everything:
        return {"causal": True}, {"causal": True}
    generator = torch.Generator().manual_seed(3)
    ids = torch.arange(rows).gt(9).int().expand(2, rows), torch.arange(45).gt(20).int().expand(2, 45)
    seen = torch.rand(2, 1, rows, 45, generator=generator) < 0.8
    shared: dict[str, Any] = {
        "bias": torch.randn(4, rows, 45, generator=generator),
        "softcap": 3.0,
        "alibi_slopes": torch.tensor((0.1, 0.2, -0.1, 0.3)),
        "sinks": torch.tensor((0.5, -1.0, 2.0, 0.0)),
        **{"dropout_p": 0.3, "dropout_seed": torch.tensor(7)},
    }
    mine = {**shared, "mask": seen, "q_segments": ids[0], "k_segments": ids[1]}
    return mine, {**shared, "mask": seen & (ids[0][:, None, :, None] == ids[1][:, None, None, :])}


def attend(on: Device, plan: Plan, tensors: Any, args: Arguments) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    held = GpuTensor.of(q), *held_on_device(k, v, args)
    args = without_tables(args)._replace(need_lse=True)
    out, lse = launch_forward(*held, prepare(on, sizes_of(*held), q.dtype, args, plan))
    return out.torch(), lse.torch()


@ORDERS
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("everything", (False, True), ids=("plain", "every feature"))
@pytest.mark.parametrize("name", VARIANTS)
def test_forward(on: Device, name: str, everything: bool, dtype: Any, reversed: bool):
    plan = VARIANTS[name]
    plan = plan._replace(num_splits=2) if plan.num_splits > 1 else plan
    rows = 3 if plan.packed else 21
    given, right = options_of(everything, rows)
    tensors = small(rows, dtype)
    with shim.running(reversed=reversed):
        out, lse = attend(on, plan, tensors, Arguments(**given))
    assert off(out, tensors, **right) < BOUNDS[dtype]
    want = attention_reference(*tensors, **right).lse
    seen = want > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    assert float((lse.double() - want)[seen].abs().max()) < BOUNDS[dtype]


@ORDERS
@pytest.mark.parametrize("name", ("int8-smooth", "int4", "nf4"))
def test_codes(on: Device, name: str, reversed: bool):
    q, k, v = small()
    coded = [quantize(x, s) for x, s in zip((k, v), SCHEMES[name], strict=True)]
    call = opened(q, *coded, Arguments(causal=True, backend="webgpu"))
    assert call.args.codes
    exact = (q, *(x.values(torch.float64).float() for x in coded))
    for plan in (Plan(Variant(ROW, 64, rn4=4)), Plan(Variant(TILE, 8, 8, 1, 1), True, 2)):
        with shim.running(reversed=reversed):
            out, _ = attend(on, plan, (q, call.k, call.v), call.args)
        assert off(out, exact, causal=True) < 4e-6


@ORDERS
@pytest.mark.parametrize("name", MULTIPLIED)
def test_products_of_integers(on: Device, name: str, reversed: bool):
    q, k, v = qkv(21, 45, dims=(16, 16))
    coded = [quantize(x, s) for x, s in zip((k, v), MULTIPLIED[name], strict=True)]
    steps = (q * (127 / q.abs().amax(-1, keepdim=True))).round() / 32  # q in 8 bits loses nothing
    exact = (steps, *(x.values(torch.float64).float() for x in coded))
    for variant in (TEMPLATES["row"], TEMPLATES["4 lanes, 4 rows"]):
        with shim.running(reversed=reversed):
            out, _ = (x.torch() for x in launched(on, steps, coded, Plan(variant)))
        assert off(out, exact, causal=True) < 4e-6


@pytest.mark.parametrize("name", NAMED)
def test_every_variant_that_ships(on: Device, name: str):
    variant, args = NAMED[name], Arguments(causal=True)
    tensors = qkv(rows=21, keys=45, dims=(4 * max(4, variant.lanes),) * 2)
    for reversed in (False, True):
        with shim.running(reversed=reversed):
            out, _ = attend(on, Plan(variant), tensors, args)
        assert off(out, tensors, causal=True) < 4e-6


OF_ROWS = {name: v for name, v in NAMED.items() if any(v in t for p in configs.GRADIENTS.values() for t in p)}


@ORDERS
@pytest.mark.parametrize("name", OF_ROWS)
def test_gradients(on: Device, name: str, reversed: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(configs, "gradient_variants", lambda *_: (OF_ROWS[name],) * 2)
    dims = (4 * max(4, OF_ROWS[name].lanes),) * 2
    for everything, dtype, bound in ((False, torch.float16, 1e-2), (True, torch.float32, 1e-5)):
        given = options_of(everything)[1]
        ours = [x.requires_grad_() for x in (*qkv(21, 45, dims=dims, dtype=dtype), *learned(given))]
        with shim.running(reversed=reversed):
            out = polyflash.attention(*ours[:3], backend="webgpu", **given | named(ours))
            out.float().square().sum().backward()
        exact = [x.detach().double().requires_grad_() for x in ours]
        attention_reference(*exact[:3], **given | named(exact)).out.square().sum().backward()
        for x, y in zip(ours, exact, strict=True):
            assert float((x.grad.double() - y.grad).norm() / y.grad.norm()) < bound
    assert on.launches == 9


def learned(given: dict[str, Any]) -> list[Tensor]:
    return [given[name].clone() for name in ("bias", "sinks") if name in given]


def named(tensors: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("bias", "sinks"), tensors[3:], strict=False))


@pytest.mark.parametrize("name", KERNELS)
def test_every_shipped_text_is_taken(on: naga.FiberDevice, name: str):
    """By the translators, and by a C++ compiler."""
    assert naga.library(KERNELS[name], on.route).threads % shim.LANES == 0


@pytest.mark.parametrize("name", ("tile", "tile of subgroups", "row"))
def test_every_deleted_barrier_shows(on: naga.FiberDevice, name: str):
    tensors, args = small(70), Arguments(causal=True)
    sizes = sizes_of(*(GpuTensor.of(x) for x in tensors))
    kernel = forward.kernel_of(sizes, call_of(sizes, args).flags, VARIANTS[name], "float32", True, 8)
    unseen = set()
    for number in (-1, *range(naga.library(kernel, on.route).barriers)):
        worst = 0.0
        for reversed in (False, True):
            with shim.running(reversed=reversed, deleted=number):
                worst = max(worst, off(attend(on, VARIANTS[name], tensors, args)[0], tensors, causal=True))
        if worst < 1e-5:
            unseen.add(number)
    assert unseen == {-1}


@pytest.mark.parametrize("deleted", (0, 1))
def test_every_deleted_barrier_of_gradients_shows(on: naga.FiberDevice, deleted: int):
    """Of dq and of dk and dv, which have two each."""
    ours = [x.requires_grad_() for x in small(70)]
    wrong: dict[str, bool] = {}
    for reversed in (False, True):
        out = polyflash.attention(*ours, causal=True, backend="webgpu")
        right = torch.autograd.grad(out.sum(), ours, retain_graph=True)
        with shim.running(reversed=reversed, deleted=deleted):
            found = torch.autograd.grad(out.sum(), ours)
        for name, x, y in zip(("dq", "dk", "dv"), found, right, strict=True):
            wrong[name] = wrong.get(name, False) or not torch.allclose(x, y, rtol=1e-3, atol=1e-3)
    assert wrong == {"dq": True, "dk": True, "dv": True}


def test_a_mask_off_by_one_shows(on: Device, monkeypatch: pytest.MonkeyPatch):
    sound = render.source
    wrong = lambda f: sound(f).replace("j <= i + at.upper;", "j < i + at.upper;")  # noqa: E731
    monkeypatch.setattr(render, "source", wrong)
    monkeypatch.setattr(naga, "library", naga.Library)
    render.text_of.cache_clear()
    try:
        out, _ = attend(on, VARIANTS["row"], small(), Arguments(causal=True))
    finally:
        render.text_of.cache_clear()
    assert off(out, small(), causal=True) > 1e-2
