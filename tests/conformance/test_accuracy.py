"""Every row × workload × dtype against the float64 oracle, on at least three input families each."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import polyflash
from polyflash.spec import Feature, Phase
from tests.catalogue import named, with_dtype, workloads
from tests.conformance.rows import ALL_OF, DTYPES, NAMES, Runner, qkv
from tests.families import FAMILIES, make
from tests.tolerance import check, check_backstop, expect, relative_l2

ROTATING = tuple(name for name in FAMILIES if name not in ("normal", "huge", "subnormal", "nanrow"))
CI = workloads("ci")

# What the CPU engine promises by now: a row that loses a feature must fail here instead of skipping its
# tests.
CPU_FEATURES = {
    Feature.CAUSAL, Feature.WINDOW, Feature.Q_OFFSET, Feature.KV_LENS, Feature.KV_STARTS, Feature.MASK,
    Feature.GQA,
    Feature.HEAD_DIM_V, Feature.LSE,
}  # fmt: skip


@pytest.mark.parametrize("dtype", (*NAMES, "float64"))
@pytest.mark.parametrize("number", range(len(CI)), ids=[w.name for w in CI])
def test_workload(run: Runner, number: int, dtype: str):
    workload = with_dtype(CI[number], dtype)
    run.skip_unless(workload)
    others = (ROTATING[2 * number % len(ROTATING)], ROTATING[(2 * number + 1) % len(ROTATING)])
    for family in ("normal", *others):
        q, k, v, options = make(workload, seed=number, family=family)
        run.checked(q, k, v, label=f"{workload.name} {dtype} {family}", **options)


@pytest.mark.parametrize("dtype", (*NAMES, "float64"))
@pytest.mark.parametrize("family", FAMILIES)
def test_family(run: Runner, family: str, dtype: str):
    turn = ("long", "window-causal", "lens-causal", "mask-causal")[list(FAMILIES).index(family) % 4]
    for name in ("cross", "causal", "decode", turn):
        workload = with_dtype(named(name), dtype)
        run.skip_unless(workload)
        q, k, v, options = make(workload, seed=3, family=family)
        run.checked(q, k, v, label=f"{name} {dtype} {family}", **options)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("head_dim", (64, 96, 128))
def test_backstop(run: Runner, head_dim: int, dtype: str):
    """A bad T cannot loosen the relative rule: absolute relative L2 on normal and biased channels."""
    for family in ("normal", "kbias", "qkbias"):
        for causal in (False, True):
            q, k, v, _ = make(replace(named("long"), dtype=dtype, head_dim=head_dim), seed=5, family=family)
            got = run(q, k, v, causal=causal)
            check_backstop(got.out, expect(q, k, v, causal=causal), family=family, label=f"{family} {causal}")


@pytest.mark.parametrize("rows", (1, 40))
def test_large_scores_of_one_size(step: Runner, rows: int):
    """All scores of a row are equal and large: a weight is the share of its key, however the largest score is
    rounded on its way from block to block and from split to split."""
    hidden = (torch.arange(160) % 7 != 3).expand(rows, 160)
    for dtype, size in itertools.product(DTYPES[:2], (-6400.0, 240_000.0)):
        q, k, v = qkv(1, (2, 1), rows, 160, 32, dtype=dtype)
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0], k[..., 0] = 256.0, size / 0.3 / 256
        for mask in (None, hidden):
            got = step.checked(q, k, v, scale=0.3, mask=mask, label=f"{dtype} {size}")
            want = expect(q, k, v, scale=0.3, mask=mask).out
            least = relative_l2(want.to(dtype), want) + 4e-7  # the rounding of the output alone
            assert relative_l2(got.out, want) <= 1.05 * least, f"{dtype} {size}"


def test_fp16_inputs_in_float32(run: Runner):
    """M34: float16-representable inputs, once in float16 and once in float32."""
    q, k, v, options = make(with_dtype(named("causal"), "float16"), seed=1)
    low, high = run(q, k, v, **options), run(q.float(), k.float(), v.float(), **options)
    want = expect(q, k, v, **options)
    check(low.out, low.lse, want, label="float16")
    check(high.out.half(), high.lse, want, label="float32 rounded")


def test_row_has_its_features(run: Runner):
    if (kind := (run.row.backend, run.row.phase)) in ALL_OF:
        assert run.row.features == ALL_OF[kind]
        return
    missing = CPU_FEATURES - run.row.features if run.row.backend == "cpu" else set(Feature) - run.row.features
    # test_codes.py says which rows read codes, and what these promise
    missing -= set() if run.row.phase is Phase.BACKWARD else {Feature.WIDE_GRADIENTS}
    assert not missing - {Feature.BATCH_INVARIANT, Feature.CODES}, f"{run.row.name} lost {missing}"


def test_explain_agrees_with_the_catalogue():
    """A workload names the features that the planner sees, so a skip happens exactly when the row refuses."""
    for workload in CI:
        q, k, v, options = make(workload)
        spec = polyflash.explain(q, k, v, **options).spec
        want = workload.spec()
        assert spec.features == want.features, workload.name
        assert (spec.causal, spec.window, spec.offset) == (want.causal, want.window, want.offset), (
            workload.name
        )


def test_pinned_row_refuses(run: Runner):
    """What a row lacks it refuses by name, with the reason it gives; nothing falls back."""
    run.skip_unless_here()
    for workload in CI:
        for dtype in (*NAMES, "float64"):
            q, k, v, options = make(with_dtype(workload, dtype))
            reasons = run.reasons(q, k, v, **options)
            if not reasons:
                continue
            with pytest.raises(polyflash.UnsupportedError) as caught:
                polyflash.attention(q, k, v, return_lse=True, backend=run.row.backend, **options)
            assert reasons[0] in str(caught.value)


def test_spy_sees_the_row(run: Runner, monkeypatch: pytest.MonkeyPatch):
    """The module the plan names is the one that is called: its `run`, once per call."""
    from importlib import import_module

    from polyflash import repeats, torch_ops

    run.skip_unless_here()
    module = import_module(run.row.module)
    calls = []
    original = module.run

    def spied(launch, *args):
        calls.append(launch.row)
        return original(launch, *args)

    monkeypatch.setattr(module, "run", spied)
    monkeypatch.setattr(torch_ops, "_routes", {})
    monkeypatch.setattr(repeats, "_known", {})
    monkeypatch.setattr(repeats, "learn", lambda *x: None)  # each call is run by its route
    q, k, v, _ = make(named("self"))
    run(q, k, v)
    run(q, k, v)
    assert calls == [run.row, run.row]
    assert torch.isfinite(run(q, k, v).out).all()
