"""Gradients of rows in which one key has nearly all the weight: small differences of large numbers. Eager ops
subtract equal numbers there, passes that store no weights subtract rounded ones."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.gradients import cotangents, gradients, plain_gradients, right_gradients
from tests.tolerance import unit

SHAPES = ((33, 5), (17, 2), (3, 70), (33, 70))


@pytest.mark.parametrize("std", (10, 20, 40))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
def test_saturated_rows(backend: str, dtype: torch.dtype, std: int):
    """At most three times the error of eager ops, plus what rounding leaves of Σ dO·O, of a stored result,
    and of e^(s - lse), of a float32 lse."""
    wide = torch.finfo(torch.float32).eps
    for number, (rows, keys) in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(number)
        q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (rows, keys, keys))
        q, k, v = (x.to(dtype) for x in (q * std, k * std, v))
        dout, _ = cotangents(q, v, dlse=False)
        right = right_gradients(q, k, v, dout, None, {})
        theirs = plain_gradients(q, k, v, dout, None, {}, False)
        got = gradients(q, k, v, dout, backend=backend)
        size = float((dout.double().abs() * v.double().abs().amax(2, keepdim=True)).sum(-1).max()) / 8
        left = torch.finfo(dtype).eps + wide * (4 + float(got["lse"].abs().max()))
        for name, other in (("q", k), ("k", q)):
            error, eager = (float((x[name].double() - right[name]).abs().max()) for x in (got, theirs))
            terms = 1 if name == "q" else rows
            top = float(other.double().abs().max())
            allowed = 3 * eager + unit(float(right[name].abs().max()), dtype) + left * size * top * terms**0.5
            assert error <= allowed, f"d{name} of {rows} rows, {keys} keys: {error:.3g} > {allowed:.3g}"
