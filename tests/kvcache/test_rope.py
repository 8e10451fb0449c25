"""Rotary embedding: against complex numbers, against transformers, by tables and by base."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polyflash import SpecError
from polyflash.kvcache import KVCache, Rope


def by_complex_numbers(x: Tensor, positions: Tensor, base: float, width: int, interleaved: bool) -> Tensor:
    """(first + i·second)·e^(i·p·θ), float64."""
    x = x.double()
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        pairs = torch.complex(turned[..., ::2].contiguous(), turned[..., 1::2].contiguous())
    else:
        pairs = torch.complex(turned[..., : width // 2].contiguous(), turned[..., width // 2 :].contiguous())
    theta = base ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
    turn = torch.polar(torch.ones_like(theta), positions[:, None] * theta)
    pairs = pairs * turn[:, None]
    whole = torch.view_as_real(pairs).flatten(-2) if interleaved else torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((whole, rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 6, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_turns_pairs_of_channels(interleaved: bool, width: int, dtype: torch.dtype):
    x = torch.randn(7, 3, 10).to(dtype)
    positions = torch.tensor([0, 1, 2, 5, 100, 3, 4000])
    got = Rope(500.0, width, interleaved).rotate(x, positions)
    want = by_complex_numbers(x, positions, 500.0, width, interleaved)
    unit = {torch.float32: 2e-3, torch.float64: 1e-11, torch.bfloat16: 4e-2}[dtype]  # 4000 turns in fp32
    assert got.dtype is dtype and float((got.double() - want).abs().max()) <= unit
    assert torch.equal(got[..., width:], x[..., width:]) and torch.equal(got[0], x[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_and_base_say_the_same(interleaved: bool):
    x, positions = torch.randn(9, 2, 8), torch.randint(0, 50, (9,), dtype=torch.int32)
    angles = torch.arange(50.0)[:, None] * (1.0 / 10000.0 ** (torch.arange(0, 6, 2.0) / 6))
    tables = Rope(cos=angles.cos(), sin=angles.sin(), interleaved=interleaved)
    assert torch.equal(
        tables.rotate(x, positions), Rope(rotary_dim=6, interleaved=interleaved).rotate(x, positions)
    )


def test_scores_depend_on_distance_only():
    q, k = torch.randn(1, 1, 16).double(), torch.randn(1, 1, 16).double()

    def score(i: int, j: int) -> float:
        a, b = (Rope().rotate(x, torch.tensor([p])) for x, p in ((q, i), (k, j)))
        return float((a * b).sum())

    assert score(30, 13) == pytest.approx(score(117, 100), abs=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_H11_the_gradient_is_the_turn_back(interleaved: bool):
    x = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True)
    positions, rope = torch.arange(5), Rope(100.0, 6, interleaved)
    assert torch.autograd.gradcheck(lambda y: rope.rotate(y, positions), (x,))
    dout = torch.randn(5, 2, 8, dtype=torch.float64)
    (dx,) = torch.autograd.grad(rope.rotate(x, positions), x, dout)
    angles = positions[:, None] * 100.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    back = Rope(cos=angles.cos(), sin=-angles.sin(), interleaved=interleaved)
    assert torch.allclose(dx, back.rotate(dout, positions), atol=1e-12)


def test_half_precision_is_rounded_once():
    x, positions = torch.randn(200, 2, 32).bfloat16(), torch.arange(200)
    assert torch.equal(Rope().rotate(x, positions), Rope().rotate(x.float(), positions).bfloat16())


def test_what_does_not_fit_is_refused():
    x, at = torch.randn(3, 2, 8), torch.arange(3)
    cos = torch.ones(4, 4)
    for wrong in (
        lambda: Rope(cos=cos), lambda: Rope(cos=cos, sin=cos[:3]), lambda: Rope(cos=cos, sin=cos[0]),
        lambda: Rope(cos=cos, sin=cos, rotary_dim=6), lambda: Rope(base=0.0), lambda: Rope(base=-1),
        lambda: Rope(base=math.nan), lambda: Rope(rotary_dim=5), lambda: Rope(rotary_dim=-2),
        lambda: Rope().rotate(x[0], at), lambda: Rope().rotate(x.long(), at),
        lambda: Rope().rotate(x, at.float()), lambda: Rope().rotate(x, at[:2]),
        lambda: Rope().rotate(x, at.to("meta")), lambda: Rope(rotary_dim=10).rotate(x, at),
        lambda: Rope().rotate(x[..., :7], at), lambda: Rope(cos=cos, sin=cos).rotate(x, at + 2),
        lambda: Rope().rotate(x, at - 1), lambda: Rope(cos=cos.to("meta"), sin=cos).rotate(x, at),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            wrong()
    assert Rope().rotate(x[:0], at[:0]).shape == (0, 2, 8)


def test_factors_of_a_step_are_those_of_each_width():
    """A step makes cosines once for all layers, of each kind of rows that it turns."""
    cache = KVCache(4, 8, 2, 8, num_layers=2, dtype=torch.float32)
    (request,), rope = cache.add(), Rope()
    k, wide = torch.randn(3, 2, 8), torch.randn(3, 4, 16)
    with cache.reserve(request, 3) as step:
        assert step.write(k, k, layer=0, rope=rope, q=k) is not None
        turned = step.write(k, k, layer=1, rope=rope, q=wide)
        assert turned is not None and torch.equal(turned, rope.rotate(wide, torch.arange(3)))
        for wrong in (wide[:2], wide[0], wide.long(), "q"):
            with pytest.raises(SpecError):
                step.write(k, k, layer=1, rope=rope, q=wrong)  # type: ignore[arg-type]
    assert torch.equal(cache.read(request, layer=1)[0], rope.rotate(k, torch.arange(3)))


def test_a_cache_takes_no_gradients_of_tables():
    angles = torch.randn(50, 4)
    rope = Rope(cos=angles.cos().requires_grad_(), sin=angles.sin().requires_grad_())
    cache = KVCache(4, 16, num_kv_heads=2, head_dim=8)
    (request,) = cache.add()
    for _ in range(3):  # the last ones like those before
        k, v, q = (torch.randn(1, 2, 8) for _ in "kvq")
        turned = cache.append([request], k, v, rope=rope, q=q)
        assert turned is not None and not turned.requires_grad
    assert not cache.k_pages[0].requires_grad
