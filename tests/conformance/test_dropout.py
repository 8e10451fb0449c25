"""Dropout on every forward row: the mask of the Philox rule, whatever else a call does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import Mask, backends
from polyflash.reference import dropout_keep
from tests.conformance.rows import DTYPES, Runner, ints, qkv
from tests.conformance.test_varlen import packed
from tests.tolerance import near, same_bits

SEED = -(1 << 45) + 77
DROP: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": SEED}


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (40, 7), "q_offset": 30},
    "mask": {"mask": noise(2, 1, 70, 150) > -0.5},
    "lists": {"mask": Mask.blocks(noise(5, 3) > -0.5, rows=16, keys=64)},
    "segments": {
        "mask": Mask.segments(
            (torch.arange(70) // 20).int().expand(2, -1), (torch.arange(150) // 33).int().expand(2, -1)
        )
    },
    "bias": {"bias": noise(4, 70, 150), "softcap": 4.0, "alibi_slopes": noise(4).abs()},
    "sinks": {"sinks": noise(4), "causal": True},
    "lens": {"kv_lens": ints(77, 150), "kv_starts": ints(3, 64)},
    "bshd": {"layout": "bshd"},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_dropout_joins_every_feature(run: Runner, name: str, dtype: torch.dtype):
    options = CASES[name]
    q, k, v = qkv(2, (4, 2), 70, 150, 40, 56, dtype=dtype)
    if options.get("layout") == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    got = run.checked(q, k, v, **DROP, **options)
    whole = run(q, k, v, **options).lse  # the denominator is that of all weights
    if run.row.backend == "triton":  # whose tiles and techniques are others without dropout
        near(got.lse, whole, 1e-6)
    else:
        same_bits(got.lse, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_of_packed_members(run: Runner, dtype: torch.dtype):
    """A member's own indices: its number for the batch, its first row and key are 0."""
    q, k, v, bounds = packed((33, 0, 70, 5), (41, 30, 150, 260), dtype=dtype)
    run.checked(q, k, v, causal=True, **DROP, **bounds)


@pytest.mark.parametrize("rows", (1, 16, 17, 65, 200))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mask_is_the_rule_s(run: Runner, dtype: torch.dtype, rows: int):
    check_mask(run, dtype, rows, 64)


@pytest.mark.slow
@pytest.mark.parametrize("rows", (1, 16, 17, 65, 200))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mask_of_a_wide_kernel_is_the_rule_s(run: Runner, dtype: torch.dtype, rows: int):
    check_mask(run, dtype, rows, 130)


def check_mask(run: Runner, dtype: torch.dtype, rows: int, width: int) -> None:
    """With V the identity, `width` columns at a time, an output row shows which of its weights were kept."""
    keys = 130
    q, k, _ = qkv(2, (3, 1), rows, keys, 16, dtype=dtype)
    columns = torch.eye(keys, dtype=dtype).expand(2, 1, keys, keys).split(width, -1)
    for p, seed in ((0.1, 0), (0.5, SEED), (0.875, (1 << 63) - 1)):
        outs = [run(q, k, v.contiguous(), dropout_p=p, dropout_seed=seed).out for v in columns]
        kept = dropout_keep((2, 3, rows, keys), p, seed)
        assert torch.equal(torch.cat(outs, -1) != 0, torch.from_numpy(kept))


def test_the_mask_does_not_depend_on_tiles(run: Runner):
    """Bits of one tile size differ from another's by rounding alone, as without dropout."""
    if run.row.backend != "cpu":
        pytest.skip("the CPU engine's tiles")
    from polyflash.backends.cpu.configs import Config

    run.skip_unless_here()
    q, k, v = qkv(2, (4, 2), 100, 300, 32)
    wide = run(q, k, v, **DROP, causal=True)
    for block_n, panels in ((16, 1), (48, 2), (256, 8)):
        config = Config(block_n, panels, wide_compute(q), isa_of(q))
        got = run(q, k, v, **DROP, causal=True, config=config)
        torch.testing.assert_close(got.out, wide.out, atol=2e-6, rtol=0)


def isa_of(q: Tensor) -> str:
    return polyflash.explain(q, q, q, backend="cpu").config.isa


def wide_compute(q: Tensor) -> str:
    return polyflash.explain(q, q, q, backend="cpu").config.compute


def test_values_that_are_not_finite_reach_the_rows_that_see_them(run: Runner):
    """A dropped weight hides nothing, as 0·inf is no number either; masked stays absent."""
    q, k, v = qkv(1, 2, 40, 60, 16)
    v[0, 0, 50], v[0, 1, 33, 4] = math.inf, math.nan
    got = run(q, k, v, dropout_p=0.6, dropout_seed=5, causal=True).out
    bad = ~torch.isfinite(got)
    want = torch.zeros_like(bad)
    want[0, 0, 30:], want[0, 1, 13:, 4] = True, True  # row i sees keys up to i + 20
    assert torch.equal(bad, want)


def test_rows_share_one_mask():
    """Every row of the table that has dropout, on one problem."""
    q, k, v = qkv(2, (4, 2), 50, 90, 24)
    outs = []
    for name in dict.fromkeys(row.backend for row in backends.TABLE):
        if polyflash.explain(q, k, v, backend=name, **DROP).chosen is not None:
            outs.append(polyflash.attention(q, k, v, backend=name, **DROP))
    for other in outs[1:]:
        torch.testing.assert_close(other, outs[0], atol=3e-6, rtol=0)


def test_share_of_kept_weights(run: Runner):
    """The mean over seeds of a row's kept share is 1 - p, and so O's mean is what it is without dropout."""
    q, k, v = qkv(1, 8, 128, 512, 16)
    plain, ones = run(q, k, v).out, torch.ones_like(v)
    got = run(q, k, ones, dropout_p=0.25, dropout_seed=3).out
    assert abs(float(got.mean()) - 1.0) < 0.01 and float(got.std()) > 0.01
    outs = [run(q, k, v, dropout_p=0.25, dropout_seed=s).out for s in range(16)]
    error = (torch.stack(outs).mean(0) - plain).norm() / plain.norm()
    single = (outs[0] - plain).norm() / plain.norm()
    assert error < 0.4 * single  # a quarter, were it exact
