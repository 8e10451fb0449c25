"""Dropout of a part of a call: rows, keys and heads of it drop what they drop in the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyflash import UnsupportedError
from polyflash.reference import attention_reference, dropout_keep
from polyflash.spec import Arguments

_forward = torch.ops.polyflash.attention.default
_backward = torch.ops.polyflash.attention_backward.default
P, SEED, HEADS, ROWS, KEYS = 0.4, 2**40 + 77, 4, 70, 90


def parts() -> list[tuple[slice, slice, slice]]:
    """Heads, rows and keys: corners, and some of which nothing is a multiple of 4."""
    return [
        (slice(0, 4), slice(0, 33), slice(0, 40)),
        (slice(0, 4), slice(33, 70), slice(41, 90)),
        (slice(2, 4), slice(0, 70), slice(0, 90)),
        (slice(2, 4), slice(5, 38), slice(3, 70)),
    ]


def wanted(operands: list[Tensor], heads: slice, rows: slice, keys: slice) -> list[Tensor]:
    """out, dq, dk, dv of the part, in float64."""
    q, k, v, dout = operands
    keep = torch.from_numpy(dropout_keep((2, HEADS, ROWS, KEYS), P, SEED))[:, heads, rows, keys]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].mT / q.shape[3] ** 0.5
    out = torch.where(keep, s.softmax(-1) / (1 - P), 0.0) @ leaves[2]
    out.backward(dout.double())
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("part", parts(), ids=str)
def test_a_part_drops_what_the_whole_drops(part: tuple[slice, slice, slice]):
    check("torch", part, torch.device("cpu"))


def check(backend: str, part: tuple[slice, slice, slice], device: torch.device) -> None:
    """Results of a part by a backend, beside the oracle."""
    heads, rows, keys = part
    draw = torch.Generator().manual_seed(1)
    shapes = ((ROWS, rows), (KEYS, keys), (KEYS, keys), (ROWS, rows))
    operands = [torch.randn(2, HEADS, n, 16, generator=draw)[:, heads, at] for n, at in shapes]
    q, k, v, dout = (x.to(device) for x in operands)
    args = Arguments(
        need_lse=True, dropout_p=P, dropout_seed=torch.tensor(SEED), backend=backend, dropout_row=rows.start,
        dropout_key=keys.start, dropout_head=heads.start, dropout_heads=HEADS,
    )  # fmt: skip
    out, lse = _forward(q, k, v, *args)
    grads = _backward(dout, None, q, k, v, out, lse, [True] * 3 + [False] * 2, *args)
    for got, want in zip((out, *grads[:3]), wanted(operands, *part), strict=True):
        torch.testing.assert_close(got.double().cpu(), want, atol=2e-6, rtol=1e-4)


def test_the_reference_agrees_with_itself():
    q, k, v = (torch.randn(2, HEADS, n, 16) for n in (ROWS, KEYS, KEYS))
    whole = attention_reference(q, k, v, dropout_p=P, dropout_seed=SEED)
    part = wanted([q, k, v, torch.zeros_like(q)], slice(None), slice(None), slice(None))
    torch.testing.assert_close(whole.out, part[0])


def test_rows_that_count_from_0_refuse():
    q = torch.randn(1, 2, 8, 16)
    args = Arguments(dropout_p=P, dropout_seed=torch.tensor(1), dropout_row=3, backend="cpu")
    with pytest.raises(UnsupportedError, match="dropout of a part"):
        _forward(q, q, q, *args)
