"""Arguments at the ends of their ranges, where a kernel in float32 could leave the definition."""

from __future__ import annotations

import math

import pytest
import torch

import polyflash
from polyflash.backends.cpu.configs import Config
from polyflash.reference import attention_reference
from tests.rows_here import needs_cpu_engine

pytestmark = needs_cpu_engine
SETS = {"native": None, "avx2": Config(64, 4, isa="avx2")}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(q, k, v, **options):
    return polyflash.attention(q, k, v, return_lse=True, backend="cpu", **options)


def close(q, k, v, bound: float = 2e-6, **options) -> None:
    """Out and lse against float64, NaN and infinities in the same places."""
    out, lse = call(q, k, v, **options)
    want, want_lse = attention_reference(q, k, v, **{k: v for k, v in options.items() if k != "config"})
    torch.testing.assert_close(out.double(), want, rtol=bound, atol=bound, equal_nan=True)
    torch.testing.assert_close(lse.double(), want_lse, rtol=bound, atol=bound, equal_nan=True)


Q, K, V = randn(1, 2, 40, 64), randn(1, 2, 70, 64, seed=1), randn(1, 2, 70, 64, seed=2)


@pytest.mark.parametrize("softcap", [1e-40, 1e-3, 50.0, 1e30, 1e35, 1e38, 1e39, 1e300])
@pytest.mark.parametrize("scale", [None, 1e-3])
def test_softcaps_of_any_size(softcap, scale):
    close(Q, K, V, softcap=softcap, scale=scale)


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 1e-38, -1e-40])
def test_scales_near_zero(scale):
    close(Q, K, V, scale=scale)
    large = K.clone()
    large[0, 0, 3] = 1e30
    close(Q, large, V, scale=scale)


def test_scale_zero_lets_infinite_keys_reach_the_rows_that_see_them():
    bad = K.clone()
    bad[0, 1, 69] = math.inf
    out, _ = call(Q, bad, V, scale=0.0, causal=True)
    assert bool(out[0, 0].isfinite().all()) and bool(out[0, 1, :39].isfinite().all())
    assert bool(out[0, 1, 39].isnan().all())


@pytest.mark.parametrize("value", [torch.finfo(torch.float64).min, -1e300, 1e300, -1e39])
def test_float64_bias_beyond_float32_stays_finite(value):
    bias = torch.full((40, 70), value, dtype=torch.float64)
    out, lse = call(Q, K, V, bias=bias)
    torch.testing.assert_close(out, V.mean(2, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)
    assert bool(lse.isfinite().all())
    bias[:, 5:] = -math.inf
    assert bool(call(Q, K, V, bias=bias)[1].isfinite().all())


@pytest.mark.parametrize("value", [1e300, -1e300, math.inf, -math.inf])
def test_float64_sinks_beyond_float32(value):
    sinks = torch.tensor([value, 0.0], dtype=torch.float64)
    out, lse = call(Q, K, V, sinks=sinks)
    want, _ = attention_reference(Q, K, V, sinks=sinks)
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert bool(lse[:, 1].isfinite().all())


@pytest.mark.parametrize("offset", [2**20, 2**29, 2**30, -(2**30)])
def test_alibi_far_from_the_keys(offset):
    slopes = torch.tensor([2.0**-20, 2.0**-24])
    q, k, v = Q[:, :, :3], K[:, :, :5], V[:, :, :5]
    _, lse = call(q, k, v, alibi_slopes=slopes, q_offset=offset)
    _, want = attention_reference(q, k, v, alibi_slopes=slopes, q_offset=offset)
    torch.testing.assert_close(lse.double(), want, rtol=1e-6, atol=1e-4)


def test_alibi_counts_from_far_keys():
    """Distances are short where positions are beyond 2^29: they must not be held before the key is taken."""
    keys = 2**29 + 100
    k = torch.ones(1, 1, 1, 1).expand(1, 1, keys, 1)
    out, lse = call(torch.zeros(1, 1, 1, 1), k, k, alibi_slopes=torch.ones(1), window=(9, 0))
    want = math.log(sum(math.exp(-d) for d in range(10)))
    assert out.item() == pytest.approx(1.0) and lse.item() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_asking_for_the_lse_changes_no_output(sign):
    """The maximum times the scale leaves float32; the weights do not."""
    q = torch.full((1, 1, 1, 1), 1e19)
    k = sign * torch.tensor([1e19, 0.5e19]).view(1, 1, 2, 1)
    v = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    alone = polyflash.attention(q, k, v, scale=10.0, backend="cpu")
    out, lse = call(q, k, v, scale=10.0)
    assert torch.equal(out, alone) and out.item() == (1.0 if sign > 0 else 2.0)
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("config", SETS.values(), ids=SETS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_weight_too_small_to_keep_is_still_a_weight(config, value):
    k, v = torch.zeros(1, 1, 4, 8), randn(1, 1, 4, 8)
    k[..., 2, :] = -60.0
    v[..., 2, 3] = value
    out, _ = call(torch.ones(1, 1, 2, 8), k, v, scale=0.125, config=config)
    torch.testing.assert_close(out[..., 3], torch.full((1, 1, 2), value), equal_nan=True)
    assert bool(out[..., :3].isfinite().all()) and bool(out[..., 4:].isfinite().all())


@pytest.mark.parametrize("rows_seen", [0, 13, 40])
def test_a_mask_broadcast_over_keys(rows_seen):
    mask = (torch.arange(40) < rows_seen)[:, None]
    close(Q, K, V, mask=mask)
