"""A row's verdict and its reasons say the same, and every reason is given by the cause it names."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import polyflash
from polyflash import Mask, plan, target
from polyflash.backends.cpu.packing import members_of_few_rows
from polyflash.backends.torch import configs as torch_configs
from polyflash.capability import Capability, Yield
from polyflash.spec import (
    DECODE_ROWS,
    MANY_KEYS,
    MOST_SHARED_ROWS,
    PACKED_ROWS,
    AttentionSpec,
    Feature,
    Phase,
    is_decode,
)
from polyflash.target import Target

SPEC = AttentionSpec(Phase.FORWARD, "float32", "cpu", 1, 2, 2, 5, 7, 64, 64, frozenset())
ROW = Capability(
    backend="made",
    phase=Phase.FORWARD,
    module="",
    targets=("cpu:avx512", "cpu:avx2"),
    dtypes=frozenset({"float32", "bfloat16"}),
    max_head_dim=128,
    features=frozenset({Feature.CAUSAL, Feature.GQA}),
    priority=1,
    choose=lambda spec, target: None,
    needs=("numba",),
    yields=(Yield("amx_bf16", frozenset({"bfloat16"}), frozenset({Feature.GQA}), "another is faster"),),
    max_positions=20,
)
HERE = target.parse("cpu:avx512")
CAUSES: dict[str, tuple[AttentionSpec, Target, str]] = {
    "phase": (replace(SPEC, phase=Phase.BACKWARD), HERE, "phase: row is forward, asked for backward"),
    "target": (SPEC, target.parse("cuda:sm90"), "target: needs cpu:avx512 or cpu:avx2, is cuda:sm90"),
    "dtype": (replace(SPEC, dtype="float64"), HERE, "dtype: has bfloat16, float32, asked for float64"),
    "head_dim": (replace(SPEC, head_dim=129), HERE, "head_dim: up to 128, asked for 129"),
    "head_dim_v": (replace(SPEC, head_dim_v=200), HERE, "head_dim: up to 128, asked for 200"),
    "positions": (
        replace(SPEC, seqlen_q=14),
        HERE,
        "positions: up to 20 rows and keys together, asked for 21",
    ),
    "features": (
        replace(SPEC, features=frozenset({Feature.SINKS, Feature.BIAS, Feature.CAUSAL})),
        HERE,
        "features: has no bias, no sinks",
    ),
    "yields": (
        replace(SPEC, dtype="bfloat16", features=frozenset({Feature.GQA})),
        target.parse("cpu:avx512+amx_bf16"),
        "yields: another is faster",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_its_reason(cause: str):
    spec, where, reason = CAUSES[cause]
    assert ROW.reasons_against(spec, where, by_name=False) == (reason,)
    assert not ROW.accepts(spec, where, by_name=False)


def test_a_missing_package_is_a_reason():
    row = replace(ROW, needs=("no_such_package",))
    here = replace(HERE, packages=(("numba", "0.62"),))
    assert row.reasons_against(SPEC, here, by_name=True) == ("packages: no_such_package (not installed)",)
    assert not row.accepts(SPEC, here, by_name=True) and ROW.accepts(SPEC, here, by_name=True)


def test_at_its_limits_a_row_runs():
    """128 channels, 20 positions, and what it yields only to those who did not name it."""
    spec = replace(SPEC, head_dim=128, head_dim_v=128, seqlen_q=13, seqlen_k=7)
    assert ROW.accepts(spec, HERE, by_name=False) and not ROW.reasons_against(spec, HERE, by_name=False)
    yielded, amx, _ = CAUSES["yields"]
    assert ROW.accepts(yielded, amx, by_name=True) and not ROW.reasons_against(yielded, amx, by_name=True)
    others = replace(yielded, features=frozenset({Feature.CAUSAL}))
    assert ROW.accepts(others, amx, by_name=False)


def test_a_yield_that_names_no_feature_is_one_on_every_target():
    row = replace(ROW, yields=(Yield("", ROW.dtypes, ROW.features, "it is slow"),))
    for where in (HERE, target.parse("cpu:avx2")):
        assert row.reasons_against(SPEC, where, by_name=False) == ("yields: it is slow",)
        assert row.accepts(SPEC, where, by_name=True) and not row.accepts(SPEC, where, by_name=False)


def test_verdict_and_reasons_agree():
    """Over every pair of causes, by name and not."""
    for (one, where, _), (two, other, _) in itertools.product(CAUSES.values(), repeat=2):
        for by_name in (False, True):
            mixed = replace(one, features=one.features | two.features, dtype=two.dtype)
            for spec, at in ((mixed, where), (mixed, other)):
                reasons = ROW.reasons_against(spec, at, by_name=by_name)
                assert ROW.accepts(spec, at, by_name=by_name) is (not reasons), (spec, at, reasons)


def test_a_feature_of_hosts_is_refused_elsewhere():
    """Matrix products of torch on a GPU follow the batch, so its row cannot promise bits that do not."""
    for row in (row for row in polyflash.backends.TABLE if row.backend == "torch"):
        spec = replace(SPEC, phase=row.phase, features=frozenset({Feature.BATCH_INVARIANT}))
        gpu = target.parse("cuda:sm90")
        assert row.reasons_against(spec, gpu, by_name=True) == (
            "features: has batch_invariant on a CPU alone",
        )
        assert not row.accepts(spec, gpu, by_name=True) and row.accepts(spec, HERE, by_name=True)
        assert row.accepts(replace(spec, features=frozenset()), gpu, by_name=True)


def test_what_stands_beside_a_mask_object_counts():
    """window= and kv_lens= are joined to a Mask, the narrower side of two windows winning."""
    q = torch.empty(1, 1, 9, 8, device="meta")
    spec = polyflash.explain(q, q, q, mask=Mask.window(5, 1), window=(3, None)).spec
    assert spec.window == (3, 1)


def test_an_explicit_config_is_the_one_that_runs():
    q = torch.empty(1, 1, 99, 8, device="meta")
    given = torch_configs.Config(32, 256)
    plan = polyflash.explain(q, q, q, backend="torch", config=given)
    assert plan.config == given != polyflash.explain(q, q, q, backend="torch").config


DECODES = replace(ROW, phase=Phase.DECODE, features=ROW.features - {Feature.GQA}, priority=0)


def test_forward_rows_serve_decode_problems_and_no_others_do():
    spec = replace(SPEC, phase=Phase.DECODE)
    for row, phase in itertools.product((ROW, DECODES, replace(ROW, phase=Phase.BACKWARD)), Phase):
        served = phase is row.phase or (row.phase, phase) == (Phase.FORWARD, Phase.DECODE)
        given = replace(spec, phase=phase)
        assert row.accepts(given, HERE, by_name=True) is served
        assert row.reasons_against(given, HERE, by_name=True) == (
            () if served else (f"phase: row is {row.phase.value}, asked for {phase.value}",)
        )


def test_decode_rows_come_before_forward_ones_of_higher_priority():
    spec = replace(SPEC, phase=Phase.DECODE)
    forward = replace(ROW, backend="other")
    assert plan.candidates((forward, DECODES), spec, "") == [DECODES, forward]
    assert plan.candidates((forward, DECODES), SPEC, "") == [forward]
    assert plan.candidates((forward, DECODES), spec, "other") == [forward]
    grouped = replace(spec, features=frozenset({Feature.GQA}))
    for given, row in ((spec, DECODES), (grouped, forward)):
        launch = plan.select(given, HERE, (forward, DECODES), backend="", config="")
        explained = plan.explain(given, HERE, (forward, DECODES))
        assert launch.row is explained.chosen is row and len(explained.verdicts) == 2
        assert launch.spec == replace(given, phase=row.phase), "a row sees a spec of its own phase"
        assert explained.spec.phase is Phase.DECODE and "attention decode" in str(explained)


def test_a_forward_row_chooses_the_config_of_a_forward_problem():
    seen = []
    row = replace(ROW, choose=lambda spec, target: seen.append(spec.phase))
    plan.select(replace(SPEC, phase=Phase.DECODE), HERE, (row,), backend="", config="")
    assert seen == [Phase.FORWARD]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "keys", "decode"),
    [
        (8, 8, DECODE_ROWS, 1, True),
        (8, 8, DECODE_ROWS + 1, 1, False),
        (8, 8, DECODE_ROWS + 1, MANY_KEYS - 1, False),
        (8, 8, DECODE_ROWS + 1, MANY_KEYS, True),
        (8, 2, DECODE_ROWS // 4, 1, True),
        (8, 2, DECODE_ROWS // 4 + 1, 1, False),
        (8, 2, PACKED_ROWS // 4, MANY_KEYS, True),
        (8, 2, PACKED_ROWS // 4 + 1, MANY_KEYS, False),
        (0, 0, 1, MANY_KEYS, False),
        (0, 2, 1, MANY_KEYS, False),
    ],
)
def test_which_problems_are_decode(heads: int, kv_heads: int, rows: int, keys: int, decode: bool):
    assert is_decode(heads, kv_heads, rows, keys) is decode
    assert is_decode(heads, kv_heads, rows, keys, bounded=True) is bool(heads)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("rows", [9, 12, 16, 24, 40, 64, 72, 128])
def test_on_a_cpu_few_rows_are_decode_from_a_few_times_as_many_keys_on(group: int, rows: int):
    tokens = max(2, -(-rows // group))
    rows = tokens * group

    def decode(keys: int) -> bool:
        return is_decode(8 * group, 8, tokens, keys, device="cpu")

    first = next(keys for keys in range(1, 4097) if decode(keys))
    assert first == {1: 8 * rows + 1, 4: 2 * rows + 1, 8: rows}[group]  # no step at 1024 keys
    assert all(decode(keys) for keys in range(first, 4097))
    assert is_decode(8 * group, 8, 1, 1, device="cpu")
    assert not is_decode(8 * group, 8, MOST_SHARED_ROWS // group + 1, 4096, device="cpu")


@pytest.mark.parametrize("keys", [1000, MANY_KEYS])
def test_three_tokens_of_grouped_heads_take_one_walk(keys: int):
    q, k = torch.empty(1, 32, 3, 128), torch.empty(1, 8, keys, 128)
    plan = polyflash.explain(q, k, k, causal=True)
    assert plan.spec.phase is Phase.DECODE
    spec = replace(SPEC, num_q_heads=32, num_kv_heads=8)
    assert len(members_of_few_rows(spec, np.array([3]), np.array([keys]))) == 1


def test_explain_plans_the_phase_that_runs():
    q, k = torch.empty(1, 8, 1, 64, device="meta"), torch.empty(1, 8, 4096, 64, device="meta")
    assert polyflash.explain(q, k, k).spec.phase is Phase.DECODE
    assert polyflash.explain(k, k, k).spec.phase is Phase.FORWARD
    needs_grad = polyflash.explain(q.requires_grad_(), k, k)
    assert needs_grad.spec.phase is Phase.FORWARD and needs_grad.backward
    rows, cu = torch.empty(1, 8, 64, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    packed = polyflash.explain(rows, rows, rows, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert packed.spec.phase is Phase.FORWARD
