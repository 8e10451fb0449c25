"""Guards: what they count and compare, and what they do when the budget is spent."""

from __future__ import annotations

import math
import warnings
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyflash import api, attention, quantize
from polyflash.errors import SpecError
from polyflash.quant import NAMED, ErrorBudgetExceeded, Guard, Scheme
from polyflash.quant.families import drawn

HARSH = (Scheme(dtype="mxfp4", channels=32), Scheme(dtype="mxfp4", channels=32))


def tensors(family: str = "normal", rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(family, 2, rows, 96, 32)


def test_within_the_budget_it_only_counts():
    guard = Guard("int8", error=2e-2, every=4)
    q, k, v = tensors()
    coded = [quantize(x, s) for x, s in zip((k, v), NAMED["int8"], strict=True)]
    wanted = attention(q, *coded, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            assert torch.equal(guard(q, k, v, causal=True), wanted)
    assert (guard.calls, guard.compared, guard.breaches, guard.unknown, guard.exact) == (9, 3, 0, 0, 0)
    assert 0 < guard.error <= guard.allowed and guard.worst_row >= guard.error
    assert str(guard).startswith("Guard: 9 calls, 3 compared, 0 unknown, 0 exact, 0 breaches; error ")


def test_calls_between_samples_attend_once():
    guard = Guard(every=3, rows=8)
    q, k, v = tensors()
    sizes = []
    with mock.patch.object(
        api, "attention", lambda q, *a, **b: sizes.append(q.shape[2]) or attention(q, *a, **b)
    ):
        for _ in range(5):
            guard(q, k, v)
    assert sizes == [40, 8, 40, 40, 40, 8, 40]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left", "scale": 0.3},
        {"causal": True, "window": (20, None), "softcap": 5.0},
        {"sinks": torch.tensor([0.5, -1.0])},
        {"causal": True, "kv_lens": torch.tensor([96, 50])},
        {"mask": torch.arange(96) % 3 > 0, "return_lse": True},
        {"layout": "bshd", "causal": True},
        {"q_offset": 30, "causal": True},
    ],
    ids=lambda x: "-".join(x) or "plain",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_compared_with_the_same_rows(options: dict, dtype: torch.dtype):
    """Without codes the difference is rounding: rows, requests and positions are the right ones."""
    q, k, v = (torch.cat([x, x.flip(1)]).to(dtype) for x in tensors())
    if options.get("layout") == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    for rows in (1, 7, 1000):
        guard = Guard(error=2e-2 if dtype is torch.bfloat16 else 1e-5, every=1, rows=rows)
        with mock.patch("polyflash.quant.guard.quantize", lambda x, *a, **b: x):
            for _ in range(4):
                guard(q, k, v, **options)
        assert guard.compared == 4 and guard.breaches == 0, guard
        # The rows of another request would be as far off as they are large.
        assert guard.worst_row < 0.1


def test_it_sees_what_only_some_rows_lose():
    """A later request is sampled in its turn."""
    q, k, v = (torch.cat([x, x]) for x in tensors())
    k[1, :, :, ::9] += 40
    guard = Guard("int8", error=2e-2, every=1)
    with pytest.warns(UserWarning, match="more than the 2.0e-02 allowed; calls go on"):
        guard(q, k, v)
        guard(q, k, v)
    assert guard.breaches == 1


def test_warns_once():
    guard = Guard(HARSH, error=1e-2, every=2)
    q, k, v = tensors()
    with pytest.warns(UserWarning, match=r"Guard: quantised k and v cost \d") as caught:
        for _ in range(6):
            guard(q, k, v)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert guard.breaches == guard.compared == 3


def test_raises():
    guard = Guard(HARSH, error=1e-2, on_breach="raise")
    with pytest.raises(ErrorBudgetExceeded, match="Guard: 1 calls, 1 compared"):
        guard(*tensors())


def test_falls_back_openly():
    guard = Guard(HARSH, error=1e-2, every=3, on_breach="exact")
    q, k, v = tensors()
    exact = attention(q, k, v)
    with pytest.warns(UserWarning, match="read as they are from now on") as caught:
        results = [guard(q, k, v) for _ in range(5)]
    assert len(caught) == 1 and all(torch.equal(x, exact) for x in results)
    assert (guard.exact, guard.compared, guard.breaches) == (5, 1, 1)
    with pytest.raises(ErrorBudgetExceeded, match="exact: got None, wanted k and v as they are"):
        guard(q, *(quantize(x, s) for x, s in zip((k, v), HARSH, strict=True)))


def test_codes_alone_do_not_tell():
    q, k, v = tensors()
    coded = [quantize(x, Scheme()) for x in (k, v)]
    guard = Guard(every=1)
    with pytest.warns(UserWarning, match="cannot be compared") as caught:
        guard(q, *coded)
        guard(q, k, v, dropout_p=0.1, dropout_seed=1)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert (guard.unknown, guard.compared) == (2, 0)
    guard(q, *coded, exact=(k, v))
    assert guard.compared == 1 and 0 < guard.error < 1e-2


def test_results_of_other_functions():
    guard = Guard(error=1e-2, every=2, on_breach="raise")
    x = torch.randn(3, 5)
    assert [guard.due() for _ in range(4)] == [True, False, True, False]
    assert guard.check(x, x) and guard.error == 0
    holes = x.clone()
    holes[0] = torch.nan
    assert guard.check(holes, holes) and guard.check(x[:0], x[:0])
    with pytest.raises(ErrorBudgetExceeded):
        guard.check(holes, x)


def test_the_latest_samples_weigh_most():
    """A change of the data shows within ten samples, and is forgiven within twenty."""
    guard = Guard(error=1e-2, on_breach="warn")
    x = torch.ones(4, 4)
    for _ in range(50):
        assert guard.check(x, x)
    with pytest.warns(UserWarning):
        assert not all([guard.check(x * 1.012, x) for _ in range(10)])
    assert [guard.check(x, x) for _ in range(20)][-1] and guard.error < 3e-3


def test_gradients_pass_through():
    q, k, v = (x.requires_grad_() for x in tensors())
    Guard(every=1)(q, k, v).sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scheme": "int3"}, "scheme: got 'int3', wanted a pair of schemes, or one of int8"),
        ({"scheme": Scheme()}, "scheme"),
        ({"error": 0.0}, "error"),
        ({"error": math.nan}, "error"),
        ({"every": 1.5}, "every"),
        ({"rows": 0}, "rows"),
        ({"on_breach": "ignore"}, "on_breach: got 'ignore', wanted warn, raise, exact"),
    ],
)
def test_refusals(wrong: dict, words: str):
    with pytest.raises(SpecError, match=words):
        Guard(**wrong)
