"""Guard bands, invisible memory, visible NaN and Inf."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from polyflash.workloads import make
from tests.catalogue import named, with_dtype
from tests.chosen import in_turn
from tests.conformance.rows import DTYPES, NAMES, ROUNDING, Runner, ints, qkv
from tests.memory import FILLS, check_guarded, check_hidden, nanify
from tests.tolerance import near, same_bits, visible

GUARDED = (
    "self", "cross", "tall", "long", "decode", "chunk", "causal-tall", "window", "window-tall", "lens-causal",
    "ragged-window", "mask-dense", "mask-keys", "mask-causal", "bias-dense", "alibi", "sinks", "everything",
    "dim-v-larger",
)  # fmt: skip
HIDDEN = (
    "causal-tall", "causal-top-left", "offset", "offset-negative", "offset-per-request", "window",
    "window-self",
    "window-tall", "window-offset", "lens", "lens-causal", "starts", "ragged-window", "mask-dense",
    "mask-keys",
    "mask-rows", "mask-causal", "mask-lens-window", "bias-keys-causal", "sinks", "segments", "everything",
)  # fmt: skip


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("name", GUARDED)
def test_guard_bands(run: Runner, name: str, dtype: str):
    workload = with_dtype(named(name), dtype)
    run.skip_unless(workload)
    q, k, v, options = make(workload, seed=1)
    check_guarded(run, q, k, v, options)


@pytest.mark.parametrize("head_dim, dtype", in_turn((1, 3, 40, 59, 111, 256), DTYPES, of=2), ids=str)
def test_guard_bands_odd_dims(run: Runner, head_dim: int, dtype: torch.dtype):
    """B-dim-02: a padded head dim must not leak its neighbour; B-gqa-03: no read beyond the kv heads."""
    for rows in (1, 17, 70):
        q, k, v = qkv(2, (4, 2), rows, 67, head_dim, dtype=dtype)
        check_guarded(run, q, k, v, {"causal": True})


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("name", HIDDEN)
def test_invisible_bits(run: Runner, name: str, dtype: str):
    """P5, B-msk-03, M16: NaN, Inf, 65504 and random bits at everything invisible change no bit."""
    workload = with_dtype(named(name), dtype)
    run.skip_unless(workload)
    q, k, v, options = make(workload, seed=2)
    check_hidden(run, q, k, v, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invisible_to_some_rows(run: Runner, dtype: torch.dtype):
    """A key hidden from some rows: those rows keep their bits whatever it holds, the others see it."""
    q, k, v = qkv(2, (4, 2), 70, 130, 32, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    cases = (
        {"causal": True},
        {"causal": "top_left"},
        {"window": (20, 10)},
        {"mask": torch.rand(2, 4, 70, 130, generator=generator) < 0.5},
        {"kv_lens": ints(130, 70), "causal": True},
    )
    for options in cases:
        want = run(q, k, v, **options)
        seen = visible(q, k, **options)
        for key in (0, 15, 64, 129):
            at = torch.zeros(130, dtype=torch.bool)
            at[key] = True
            rows = seen[..., key]
            for fill in FILLS:
                k2, v2 = (nanify(x, at[:, None], fill, generator) for x in (k, v))
                got = run(q, k2, v2, **options)
                same_bits(got.out[~rows], want.out[~rows], f"{options.keys()} key {key} {fill}")
                same_bits(got.lse[~rows], want.lse[~rows], f"{options.keys()} key {key} {fill}")
                if fill == "nan":
                    assert got.out[rows].isnan().all() and got.lse[rows].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_nonfinite_values(run: Runner, dtype: torch.dtype):
    """P6: NaN and ±Inf of V reach exactly the rows and the channel that see them; lse stays."""
    for keys in (20, 130):
        q, k, v = qkv(1, 2, 40, keys, 32, dtype=dtype)
        clean = run(q, k, v, causal=True)
        for value, test in ((math.nan, torch.isnan), (math.inf, torch.isposinf), (-math.inf, torch.isneginf)):
            spoiled = v.clone()
            spoiled[0, 1, keys // 2, 5] = value
            got = run.checked(q, k, spoiled, causal=True, label=f"{value}")
            rows = visible(q, k, causal=True)[0, 1, :, keys // 2]
            assert test(got.out[0, 1, rows, 5]).all()
            hit = torch.zeros(1, 2, 40, dtype=torch.bool)
            hit[0, 1] = rows
            same_bits(got.out[~hit], clean.out[~hit], f"{value} reached a row that does not see it")
            others = torch.arange(32) != 5
            near(got.out[hit][:, others], clean.out[hit][:, others], ROUNDING[dtype])
            same_bits(got.lse, clean.lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_nonfinite_scores(run: Runner, dtype: torch.dtype):
    """NaN in a query reaches its row; NaN or Inf in a key reaches the rows that see it (Inf - Inf is NaN)."""
    q, k, v = qkv(1, 2, 40, 70, 32, dtype=dtype)
    clean = run(q, k, v, causal=True)
    bad = q.clone()
    bad[0, 0, 11, 3] = math.nan
    got = run.checked(bad, k, v, causal=True, label="nan query")
    hit = torch.zeros(1, 2, 40, dtype=torch.bool)
    hit[0, 0, 11] = True
    assert got.out[hit].isnan().all() and got.lse[hit].isnan().all()
    same_bits(got.out[~hit], clean.out[~hit])
    for value in (math.nan, math.inf, -math.inf):
        bad = k.clone()
        bad[0, 1, 35, 3] = value
        run.checked(q, bad, v, causal=True, label=f"{value} key")


def test_all_scores_minus_infinity_by_value(run: Runner):
    """A visible key whose score is -inf weighs nothing; a row of such keys only has no weight to share
    out."""
    q, k, v = torch.ones(1, 1, 3, 8), torch.zeros(1, 1, 40, 8), torch.randn(1, 1, 40, 8)
    k[:, :, 1:] = -math.inf
    got = run(q, k, v)
    same_bits(got.out, v[:, :, :1].expand(1, 1, 3, 8).contiguous())


def test_larger_call_first(run: Runner):
    """§3.5.4, "passes alone, fails in sequence": reused scratch of a larger call holds NaN."""
    for dtype in DTYPES:
        small = qkv(1, (2, 1), 17, 33, 24, dtype=dtype)
        want = run(*small, causal=True)
        large = qkv(2, (8, 2), 200, 300, 128, dtype=dtype)
        run(*(torch.full_like(x, math.nan) for x in large))
        got = run(*small, causal=True)
        same_bits(got.out, want.out)
        same_bits(got.lse, want.lse)


def test_every_output_written(run: Runner):
    """P3, B-msk-10: poisoned output memory; rows that see nothing are written too."""
    for name in ("causal-tall", "lens-causal", "window-tall", "offset-negative"):
        for dtype in NAMES:
            workload = replace(named(name), dtype=dtype)
            run.skip_unless(workload)
            q, k, v, options = make(workload)
            out = torch.full((*q.shape[:3], v.shape[-1]), math.nan, dtype=q.dtype)
            got = run(q, k, v, out=out, **options)
            assert not got.out.isnan().any() and not got.lse.isnan().any(), name
