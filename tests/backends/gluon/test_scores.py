"""What the Gluon engine makes of scores, by the functions that its kernels run, on torch's operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from polyflash.backends.gluon import forward, scores
from polyflash.spec import Arguments

LANGUAGE = SimpleNamespace(
    abs=torch.abs,
    exp2=torch.exp2,
    maximum=torch.maximum,
    where=torch.where,
    fma=lambda a, b, c: a * b + c,
    float32=torch.float32,
)


@pytest.fixture(autouse=True)
def in_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "gl", LANGUAGE)
        patch.setattr(scores, "LOG2E", scores.LOG2E.value)
        patch.setattr(scores, "reciprocal", torch.reciprocal)
        patch.setattr(scores, "tanh", scores.tanh.fn)
        yield


def test_tanh():
    x = torch.cat((torch.linspace(-12, 12, 100_001), torch.logspace(-37, 38, 1000), torch.zeros(1)))
    x = torch.cat((x, -x))
    want = x.double().tanh()
    got = scores.tanh(x)
    assert float(((got.double() - want).abs() / want.abs().clamp(min=1e-37)).max()) < 6e-7
    far = torch.tensor([math.inf, -math.inf, math.nan])
    assert torch.equal(scores.tanh(far).nan_to_num(7.0), torch.tensor([1.0, -1.0, 7.0]))


@pytest.mark.parametrize("cap", [0.01, 1.0, 50.0, 1e30])
def test_softcap(cap: float):
    s, scale = torch.randn(10_000) * 80, 0.125
    n = SimpleNamespace(into_cap=scale / cap, softcap=cap)
    got = scores.change_scores.fn(s, None, 0, n, SimpleNamespace(SOFTCAP=True, ALIBI=False))
    want = cap * (s.double() * scale / cap).tanh()
    assert float(((got.double() - want).abs() / want.abs().clamp(min=1e-30)).max()) < 1e-6
    assert scores.change_scores.fn(s, None, 0, n, SimpleNamespace(SOFTCAP=False, ALIBI=False)) is s


@pytest.mark.parametrize("position", [-90, 0, 300, 5000, -(2**40)])
def test_alibi(position: int):
    """The launch's numbers, in a block from key 128 on."""
    rows, keys = 200, 512
    near, rest = forward.position_of(rows, keys, Arguments(offset=position))
    seen = SimpleNamespace(at=torch.arange(64) + near, rest=rest, slope=0.25, col=torch.arange(128))
    c, n = SimpleNamespace(SOFTCAP=False, ALIBI=True), SimpleNamespace(scale=0.125)
    s = torch.randn(64, 128)
    got = scores.change_scores.fn(s, seen, 128, n, c)
    far = (torch.arange(64)[:, None] + position - 128 - torch.arange(128)).abs()
    want = s.double() * 0.125 - 0.25 * far
    assert float(((got - want) / want.abs().clamp(min=1.0)).abs().max()) < 1e-6


def test_with_sink():
    """Maximum and sum of a row give the lse with the sink's weight, the share what keys have left."""
    rows = torch.randn(2000, 7, dtype=torch.float64) * 20
    rows[:100] = -math.inf  # see no key
    sink = torch.randn(2000) * 20
    sink[::7] = -math.inf
    m = rows.amax(1).clamp(min=-3.4e38)
    l_i = (rows - m[:, None]).exp().sum(1)
    top, total, share = scores.with_sink.fn(m.float(), l_i.float(), sink)
    want = torch.cat((rows, sink[:, None].double()), 1).logsumexp(1)
    got = torch.where(total == 0.0, -math.inf, top + total.log())
    assert torch.equal(got[:100], sink[:100]), "the lse of rows without keys is the sink, to the bit"
    assert torch.equal(got == -math.inf, want == -math.inf)
    there = want > -math.inf
    assert float((got - want)[there].abs().max()) < 2e-5
    weight = (share * l_i / total)[there]
    wanted = (rows.logsumexp(1) - want)[there].exp()
    assert float((weight - wanted).abs().max()) < 1e-5 and bool((share[:100] == 0.0).all())
