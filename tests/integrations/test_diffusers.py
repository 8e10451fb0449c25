"""A tiny Flux transformer, random weights: forward and gradients on polyflash, through diffusers' dispatcher
and through the SDPA override."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch  # noqa: E402
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn  # noqa: E402

from polyflash import SpecError, UnsupportedError, use_backend  # noqa: E402
from polyflash.integrations import sdpa  # noqa: E402
from polyflash.integrations.diffusers import register, unregister  # noqa: E402
from tests.device import generator  # noqa: E402
from tests.rows_here import FREE, HERE  # noqa: E402
from tests.tolerance import compare  # noqa: E402

CONFIG = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}


def build() -> Any:
    """Weights large enough that attention is far from uniform."""
    torch.manual_seed(7)
    model = diffusers.FluxTransformer2DModel(**CONFIG)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("weight") and weight.ndim == 2:
                weight.normal_(std=0.2)
    return model


@cache
def inputs() -> dict[str, Tensor]:
    drawn = generator(1)
    places = torch.arange(16)
    return {
        "hidden_states": torch.randn(2, 16, 4, generator=drawn),
        "encoder_hidden_states": torch.randn(2, 7, 32, generator=drawn),
        "pooled_projections": torch.randn(2, 32, generator=drawn),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.stack((torch.zeros(16), places // 4, places % 4), 1),
        "txt_ids": torch.zeros(7, 3),
    }


def trained(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The result of one step and the gradient of every parameter."""
    model.zero_grad()
    out = model(**{name: x.to(dtype) for name, x in inputs().items()}).sample
    out.square().mean().backward()
    return {"": out.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@cache
def truth() -> dict[str, Tensor]:
    return trained(build().double(), torch.float64)


@cache
def plain() -> list[dict[str, Tensor]]:
    found = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel):
            found.append({name: x.double() for name, x in trained(build()).items()})
    return found


def assert_within_the_rule(got: dict[str, Tensor]) -> None:
    right = truth()
    assert got.keys() == right.keys() and len(right) > 40
    for name, x in got.items():
        samples = [each[name] for each in plain()]
        compare(x, right[name], samples, torch.float32, ratio=2, label=name or "result")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with use_backend(None if FREE != "torch" else "torch"):
        yield
    if "poly" in attention_dispatch.AttentionBackendName._value2member_map_:
        unregister()


def by_context(model: Any) -> AbstractContextManager[Any]:
    return attention_backend(register())


def by_model(model: Any) -> AbstractContextManager[Any]:
    model.set_attention_backend(register())
    return nullcontext()


def by_override(model: Any) -> AbstractContextManager[Any]:
    return sdpa.enabled(strict=True)


@pytest.mark.parametrize("way", [by_context, by_model, by_override])
def test_gradients_are_within_the_rule(way: Any, ran: list[tuple[str, str]]) -> None:
    truth(), plain()
    model = build()
    assert not ran
    with way(model):
        got = trained(model)
    assert_within_the_rule(got)
    assert ran[:2] == [("forward", HERE[0])] * 2 and [phase for phase, _ in ran[2:]] == ["backward"] * 2


@pytest.mark.parametrize("way", [by_context, by_override])
def test_gradient_checkpointing_changes_nothing(way: Any, ran: list[tuple[str, str]]) -> None:
    model = build()
    with way(model):
        want = trained(model)
        model.train().enable_gradient_checkpointing()
        got = trained(model)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert [phase for phase, _ in ran].count("forward") == 6


@pytest.mark.parametrize("way", [by_model, pytest.param(by_override, marks=pytest.mark.slow)])
def test_compiled_in_one_graph(way: Any, ran: list[tuple[str, str]]) -> None:
    torch._dynamo.reset()
    model = build()
    with way(model), use_backend(None):
        want = trained(model)
        del ran[:]
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        model.zero_grad()
        out = compiled(**inputs()).sample
        out.square().mean().backward()
    assert [phase for phase, _ in ran if phase == "forward"] == ["forward"] * 2
    torch.testing.assert_close(out, want[""], atol=1e-5, rtol=1e-4)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, want[name], atol=1e-5, rtol=1e-3)
    torch._dynamo.reset()


def test_a_unet_asks_no_backend_and_is_reached_by_the_override(ran: list[tuple[str, str]]) -> None:
    torch.manual_seed(3)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    noisy, states = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 16)
    gradients = []
    for way in (nullcontext, sdpa.enabled):
        model.zero_grad()
        with way():
            model(noisy, torch.tensor(7), states).sample.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert [phase for phase, _ in ran].count("backward") == len(ran) / 2 > 3
    for got, want in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5 * float(want.abs().max()) + 1e-7, rtol=1e-3)


MASKS = {
    "none": None,
    "keys": torch.arange(7) < torch.tensor([7, 4])[:, None],
    "bool": torch.arange(35).view(5, 7) % 3 < 2,
    "float": torch.arange(35.0).view(1, 1, 5, 7).sin(),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_dispatcher_means_the_same(mask: str, causal: bool) -> None:
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    options = {
        "attn_mask": MASKS[mask],
        "is_causal": causal and mask == "none",
        "scale": 0.4,
        "enable_gqa": True,
    }
    want = dispatch_attention_fn(q, k, k, **options)
    with attention_backend(register()):
        got = dispatch_attention_fn(q, k, k, **options)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert got.shape == (2, 5, 4, 8)


def test_what_is_refused() -> None:
    q = torch.randn(1, 3, 2, 8)
    with attention_backend(register()):
        with pytest.raises(UnsupportedError, match="parallel_config"):
            dispatch_attention_fn(q, q, q, parallel_config=object())
        with pytest.raises(UnsupportedError, match="return_lse"):
            dispatch_attention_fn(q, q, q, attention_kwargs={"return_lse": True})
    for bad in ("native", "flash", "two words", "Poly", ""):
        with pytest.raises(SpecError, match="name: got"):
            register(bad)
    with pytest.raises(SpecError, match="name: got 'other'"):
        unregister("other")


def test_registration_is_undone() -> None:
    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry

    def state() -> Any:
        tables = (registry._backends, registry._constraints, registry._supported_arg_names)
        return list(names), dict(names.__members__), registry._active_backend, [dict(t) for t in tables]

    before = state()
    assert register() == register() == "poly" and names("poly").value == "poly"
    assert register("other") == "other"
    model = build()
    model.set_attention_backend("poly")
    assert registry._active_backend == "poly", "diffusers sets it for the whole process"
    unregister("other")
    unregister()
    assert state() == before
    with pytest.raises(ValueError, match="poly"):
        model.set_attention_backend("poly")
    with pytest.raises(SpecError):
        unregister()
