"""Which calls the Gluon engine takes, which it leaves, and why: without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import polyflash
from polyflash import SpecError, plan
from polyflash.backends import TABLE
from polyflash.backends.gluon import configs
from polyflash.backends.gluon.capabilities import CAPABILITIES
from polyflash.spec import MANY_KEYS, AttentionSpec, Feature, Phase
from polyflash.target import parse

HOPPER = parse("cuda:sm90")
(ROW,) = CAPABILITIES
SPEC = AttentionSpec(Phase.FORWARD, "bfloat16", "cuda", 4, 16, 16, 4096, 4096, 128, 128, frozenset())


def explained(dims: int = 128, *, rows: int = 4096, keys: int = 4096, dtype=torch.bfloat16, **options):
    q = torch.empty(4, 16, rows, dims, device="meta", dtype=dtype)
    k = torch.empty(4, 4, keys, dims, device="meta", dtype=dtype)
    return polyflash.explain(q, k, k, target=options.pop("target", "cuda:sm90"), **options)


def why(**options) -> str:
    found = explained(**options)
    assert found.backend != "gluon"
    return next("; ".join(v.reasons) for v in found.verdicts if v.row is ROW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", configs.HEAD_DIMS)
def test_what_it_takes(dims: int, dtype: torch.dtype):
    for options in ({}, {"causal": True}, {"causal": True, "q_offset": 7}):
        found = explained(dims, dtype=dtype, **options)
        assert found.backend == "gluon" and found.rung == "table"
        assert found.config == configs.FORWARD[dims, bool(options)]
        assert "TMA" in str(found)


def test_what_it_refuses_in_words():
    assert "has 64, 128, 256, asked for 96" in why(dims=96)
    assert "no window" in why(window=(8, 0))
    assert "no softcap" in why(softcap=3.0)
    assert "dtype" in why(dtype=torch.float32)
    assert "needs cuda:sm90" in why(target="cuda:sm100")
    offsets = torch.zeros(4, dtype=torch.int32, device="meta")
    assert "as an int" in why(causal=True, q_offset=offsets)


def test_what_it_leaves_unless_asked_by_name():
    for few in ({"rows": 32}, {"keys": MANY_KEYS - 1}):
        assert "whole warpgroups" in why(**few)
        assert explained(**few, backend="gluon").backend == "gluon"


@pytest.mark.parametrize(
    "version, taken", [("3.6.0", True), ("3.9.1", True), ("3.7.1", False), ("3.10.0", False)]
)
def test_another_triton_turns_it_off(version: str, taken: bool):
    here = replace(HOPPER, packages=(("triton", version),))
    launch = plan.select(SPEC, here, TABLE, backend="", config="")
    assert launch.row.backend == ("gluon" if taken else "triton")
    (reason, *_) = ROW.reasons_against(SPEC, here, by_name=True) or ("",)
    assert taken or (version in reason and "is not checked" in reason)


def test_gradients_are_the_triton_rows():
    features = frozenset({Feature.LSE})
    launch = plan.select(
        replace(SPEC, needs_grad=True, features=features), HOPPER, TABLE, backend="", config=""
    )
    assert launch.row is ROW and not launch.named
    back = plan.select(replace(SPEC, phase=Phase.BACKWARD), HOPPER, TABLE, backend="", config="")
    assert back.row.backend == "triton"


def test_a_call_that_is_named_is_known_as_such():
    assert plan.select(SPEC, HOPPER, TABLE, backend="gluon", config="").named
    config = plan.encode_config(replace(configs.FORWARD[128, False], heads=1))
    launch = plan.select(SPEC, HOPPER, TABLE, backend="", config=config)
    assert launch.named and launch.row is ROW and launch.config.heads == 1


def test_calls_that_leave_cores_idle():
    config = configs.FORWARD[128, True]
    assert configs.is_worth(config, 16, 1088, 1088, 132)
    assert not configs.is_worth(config, 16, 1024, 1024, 132)  # 128 tiles
    assert not configs.is_worth(config, 64, 1024, configs.LEAST_KEYS - 1, 132)


def test_configs_are_checked():
    with pytest.raises(SpecError, match="consumers"):
        configs.ForwardConfig(4, 128)
    for (head_dim, causal), config in configs.FORWARD.items():
        spec = replace(SPEC, head_dim=head_dim, causal=causal)
        chosen, *others = configs.candidates(spec, HOPPER)
        assert chosen is config and others and config not in others
        assert len(set(configs.switches(spec, HOPPER))) > 5
        assert config.notes(spec)
