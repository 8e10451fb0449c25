"""What gradients of the Gluon engine make of scores, by the functions that their kernel runs, on torch's
operations: weights, and what dp is multiplied with, as the Triton engine's kernels have them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from polyflash.backends.gluon import backward, backward_scores, scores, shim
from polyflash.backends.gluon.forward import position_of
from polyflash.spec import Arguments
from tests.backends.gluon.test_scores import LANGUAGE

LOG2E = 1.4426950408889634


def lower_by_distance(b_x: Tensor, b_steps: Tensor, slope: float) -> Tensor:
    """What the instructions of each thread make of its 32 values, which stand where products leave them."""
    lane, warp = torch.arange(128) % 32, torch.arange(128) // 32

    def place(i: int) -> tuple[Tensor, Tensor]:
        return 16 * warp + lane // 4 + i // 2 % 2 * 8, lane % 4 * 2 + i // 4 * 8 + i % 2

    line = r"add\.f32 d, \$(\d+), (\d+)\.0; abs\.f32 d, d; fma\.rn\.f32 \$(\d+), d, \$96, \$(\d+);"
    found, done = b_x.clone(), []
    for base, further, result, given in re.findall(line, shim._lower.fn(32)):
        assert result == given and 64 <= int(base) < 96, "x comes in the register that it leaves by"
        far = (b_steps[place(int(base) - 64)] + float(further)).abs()
        found[place(int(result))] = b_x[place(int(result))] + slope * far
        done.append(int(result))
    assert done == list(range(32))
    return found


@pytest.fixture(autouse=True)
def in_torch() -> Iterator[None]:
    language = SimpleNamespace(**vars(LANGUAGE), arange=lambda a, b, layout: torch.arange(a, b))
    language.SliceLayout, language.int64 = lambda *given: None, torch.int64
    with pytest.MonkeyPatch.context() as patch:
        for module in (scores, backward_scores):
            patch.setattr(module, "gl", language)
            patch.setattr(module, "LOG2E", LOG2E)
            patch.setattr(module, "reciprocal", torch.reciprocal)
            patch.setattr(module, "tanh", scores.tanh.fn if module is scores else patched_tanh)
        patch.setattr(backward_scores, "ROWS", 64)
        patch.setattr(backward_scores, "accumulator", lambda columns: None)
        patch.setattr(backward_scores, "lower_by_distance", lower_by_distance)
        yield


def patched_tanh(b_x: Tensor) -> Tensor:
    return scores.tanh(b_x)


@pytest.mark.parametrize("position", [None, -90, 300, 1 << 20, -5000])
@pytest.mark.parametrize("slope", [0.0, 0.3])
@pytest.mark.parametrize("cap", [0.0, 0.01, 1.0, 50.0, 256.0, 257.0, 1e30])
def test_weights_and_what_dp_is_multiplied_with(cap: float, slope: float, position: int | None):
    """The fourth block of rows beside keys from 128 on, near float64."""
    rows, keys, scale = 400, 512, 0.125
    args = Arguments(softcap=cap, offset=position, alibi_slopes=torch.tensor([slope]) if slope else None)
    near, rest = position_of(rows, keys, args)
    n = SimpleNamespace(**backward.factors_of(scale, args))
    c = SimpleNamespace(SOFTCAP=cap != 0.0, LARGE_CAP=cap > backward._LARGE_CAP, ALIBI=slope != 0.0)
    s = torch.randn(64, 64) * 40
    o_m, o_n = 3 * 64 + torch.arange(64), 128 + torch.arange(64)
    wanted = s.double() * scale
    beside = torch.ones_like(wanted)
    if cap:
        part = (wanted / cap).tanh()
        wanted, beside = part * cap, 1.0 - part * part
    far = (o_m + (keys - rows if position is None else position) - o_n[:, None]).abs()
    wanted = wanted - slope * far
    lse = wanted.logsumexp(0)
    step, own = SimpleNamespace(i_m=3, slope=slope * LOG2E), SimpleNamespace(position=near, rest=rest)
    less = (-lse * LOG2E).float()
    x, part = backward_scores.change_scores.fn(s, less, 128, step, own, n, c)
    p = x.exp2()
    exact = (wanted - lse).exp()
    near_cap = 0.0 if c.LARGE_CAP else cap
    rounding = 2e-6 * max(1.0, float(lse.abs().max()), float(wanted.abs().max()), near_cap)
    assert float(((p - exact) / exact.clamp(min=1e-30))[exact > 1e-12].abs().max()) < rounding
    times = backward_scores.through_cap.fn(torch.ones_like(s), part, c)
    assert float((times - beside).abs().max()) < 1e-6


def test_scores_beyond_every_cap():
    """Weights of infinite scores are those of the cap, and dp does not pass; NaN stays."""
    s = torch.tensor([[math.inf, -math.inf, math.nan]])
    for cap in (30.0, 1000.0):
        n = SimpleNamespace(**backward.factors_of(1.0, Arguments(softcap=cap)))
        c = SimpleNamespace(SOFTCAP=True, LARGE_CAP=cap > backward._LARGE_CAP, ALIBI=False)
        x, part = backward_scores.change_scores.fn(s, torch.zeros(3), 0, None, None, n, c)
        assert torch.allclose(x[0, :2], torch.tensor([cap, -cap]) * LOG2E) and bool(x[0, 2].isnan())
        times = backward_scores.through_cap.fn(torch.ones_like(s), part, c)
        assert not times[0, :2].any() and bool(times[0, 2].isnan())


def test_calls_without_either_are_left_alone():
    s, less = torch.randn(2, 64, 64)[0], torch.randn(64)
    n, c = SimpleNamespace(factor=0.25), SimpleNamespace(SOFTCAP=False, LARGE_CAP=False, ALIBI=False)
    x, _ = backward_scores.change_scores.fn(s, less, 0, None, None, n, c)
    assert torch.equal(x, s * 0.25 + less)
    assert backward_scores.through_cap.fn(s, None, c) is s
    assert backward_scores.slope_of.fn(0, None, None, None, c) == 0.0
