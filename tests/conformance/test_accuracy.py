"""Every row × workload × dtype against the float64 oracle, on at least three input families each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import polyflash
from polyflash.spec import Feature
from polyflash.workloads import FAMILIES, make, named, with_dtype, workloads
from tests.conformance.rows import NAMES, Runner
from tests.tolerance import check, check_backstop, expect

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


def test_fp16_inputs_in_float32(run: Runner):
    """M34: float16-representable inputs, once in float16 and once in float32."""
    q, k, v, options = make(with_dtype(named("causal"), "float16"), seed=1)
    low, high = run(q, k, v, **options), run(q.float(), k.float(), v.float(), **options)
    want = expect(q, k, v, **options)
    check(low.out, low.lse, want, label="float16")
    check(high.out.half(), high.lse, want, label="float32 rounded")


def test_row_has_its_features(run: Runner):
    missing = CPU_FEATURES - run.row.features if run.row.backend == "cpu" else set(Feature) - run.row.features
    assert not missing - {Feature.BATCH_INVARIANT}, f"{run.row.name} lost {missing}"


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

    from polyflash import torch_ops

    run.skip_unless_here()
    module = import_module(run.row.module)
    calls = []
    original = module.run

    def spied(launch, *args):
        calls.append(launch.row)
        return original(launch, *args)

    monkeypatch.setattr(module, "run", spied)
    monkeypatch.setattr(torch_ops, "_routes", {})
    q, k, v, _ = make(named("self"))
    run(q, k, v)
    run(q, k, v)
    assert calls == [run.row, run.row]
    assert torch.isfinite(run(q, k, v).out).all()
