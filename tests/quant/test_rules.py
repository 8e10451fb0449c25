"""What holds exactly of quantised attention, and what a scheme's error is bounded by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyflash import attention, merge, quantize
from polyflash.quant import NAMED, Scheme
from polyflash.reference import attention_reference

SMOOTH = Scheme(smoothing="mean")
# Relative L2 of the output, on normal values and on keys with a channel bias: at most; None promises nothing.
BOUNDS: dict[str, tuple[float, float | None]] = {
    "int8": (1.0e-2, 3.8e-2),
    "int8-smooth": (1.0e-2, 1.0e-2),
    "int8-channel": (1.4e-2, 1.6e-2),
    "int4": (0.12, 0.14),
    "int4-token": (0.14, 0.14),
    "fp8": (5.0e-2, 9.0e-2),
    "nf4": (0.14, None),
    "mxfp4": (0.2, None),
}


def problem(family: str = "normal", keys: int = 2048, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 4, n, 128, generator=generator) for n in (64, keys, keys))
    if family == "kbias":
        k[..., ::21] += torch.tensor([8.0, -8.8, 9.6, -10.4, 11.2, -12.0, 12.0])
    return q, k, v


def error(found: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> float:
    right = attention_reference(q, k, v, **options).out
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("family", ["normal", "kbias"])
@pytest.mark.parametrize("name", BOUNDS)
def test_level_b(name: str, family: str):
    """The scheme is good enough: worst row too, at three times the bound."""
    bound = BOUNDS[name][family == "kbias"]
    if bound is None:
        pytest.skip("no bound is promised")
    q, k, v = problem(family)
    found = attention(q, *(quantize(x, s) for x, s in zip((k, v), NAMED[name], strict=True)))
    right = attention_reference(q, k, v).out
    rows = (found - right).norm(dim=-1) / right.norm(dim=-1)
    assert error(found, q, k, v) <= bound and float(rows.max()) <= 3 * bound


def test_a_rotation_helps_where_channels_stand_out():
    q, k, v = problem("kbias")
    plain, turned = (
        error(attention(q, quantize(k, Scheme(dtype="int4", rotation=r)), v), q, k, v)
        for r in ("none", "hadamard")
    )
    assert turned <= 0.6 * plain


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("far", [0.0, 10.0, 100.0])
def test_scores_are_whole(far: float, softcap: float):
    """A mean that was taken off comes back: in the LSE, under a cap, and beside a sink."""
    q, k, v = (x.double() for x in problem(keys=200))
    k = k + far
    options: dict[str, Any] = {"softcap": softcap, "sinks": torch.tensor([0.0, 1.0, -2.0, 30.0])}
    for scheme in (SMOOTH, Scheme(symmetric=False), Scheme(smoothing="block_mean")):
        coded = quantize(k, scheme)
        found = attention(q, coded, v, return_lse=True, **options)
        right = attention_reference(q, coded.values(torch.float64), v, **options)
        assert torch.allclose(found.lse, right.lse, rtol=1e-6, atol=1e-6)
        assert torch.allclose(found.out, right.out, rtol=1e-6, atol=1e-6)
        exact = attention_reference(q, k, v, **options)
        assert (found.lse - exact.lse).abs().max() <= 0.01 * max(1.0, far / 10)


def test_shards_with_means_of_their_own_merge():
    q, k, v = problem("kbias", keys=400)
    k[:, :, 200:] -= 7
    parts = [
        attention(q, quantize(k[:, :, part], SMOOTH), v[:, :, part], return_lse=True)
        for part in (slice(0, 200), slice(200, None))
    ]
    assert error(merge(parts).out, q, k, v) <= 1.2e-2


def test_the_mean_of_v_comes_back_on_rows_that_see_something():
    q, k, v = problem(keys=64)
    v = v + 100
    coded = quantize(v, SMOOTH)
    found = attention(q, k, coded, causal=True, q_offset=-2)
    assert bool((found[:, :, :2] == 0).all()), "rows that see no key are 0"
    assert error(found[:, :, 2:] - 100, q[:, :, 2:], k, v - 100, causal=True, q_offset=0) <= 0.02


def test_dropout_drops_values_with_their_mean():
    q, k, v = problem(keys=64)
    v = v + 10
    coded = quantize(v, SMOOTH)
    options: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 3}
    found = attention(q, k, coded, **options)
    assert error(found, q, k, coded.values(torch.float32), **options) <= 1e-5


@pytest.mark.parametrize("dim", [40, 48, 80, 96])
def test_no_lane_of_padding_enters_a_range(dim: int):
    """Channels far from zero, in 4 bits: a lane of zeros would take most of the steps."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(1, 2, 70, dim, generator=generator) + 40
    for scheme in NAMED["int4-token"]:
        values = quantize(x, scheme).values(torch.float32)
        assert (values - x).abs().max() <= 0.3
