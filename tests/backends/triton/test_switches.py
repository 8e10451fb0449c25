"""Every named technique of the Triton forward and decode gives the same result: the same bits where it
changes no arithmetic, else within rounding."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from polyflash import env
from polyflash.workloads import Workload, make, with_dtype
from tests import device
from tests.tolerance import near, same_bits

if not env.TRITON_INTERPRET.is_set() and device.DEVICE.type == "cpu":
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

from polyflash.backends.triton.configs import UNSPLIT, DecodeConfig, ForwardConfig
from polyflash.backends.triton.interpreter import INTERPRET
from tests.backends.triton.direct import Config, call

FORWARD = ForwardConfig(16, 64, 4, 2)
DECODE = DecodeConfig(16, 32, 4, 2, 64)
SAME_BITS: tuple[dict[str, Any], ...] = (
    *({"split_exp": 2}, {"split_exp": 4}, {"num_stages": 4}, {"num_stages": 3}),
    *({"hold_q": True}, {"loads": "descriptor"}, {"cache_kv": ".ca"}, {"cache_kv": ".cg"}),
    *({"persistent": True}, {"order": "heavy_first"}, {"mask_by": "add"}, {"max_registers": 168}),
    {"split_exp": 2, "hold_q": True, "loads": "descriptor", "persistent": True, "order": "heavy_first"},
)
ROUNDED: tuple[dict[str, Any], ...] = (
    *({"base2": False}, {"pack_gqa": True}, {"block_m": 32}, {"block_n": 32}, {"num_warps": 8}),
)
DECODE_SAME_BITS: tuple[dict[str, Any], ...] = (
    *({"num_stages": 3}, {"loads": "descriptor"}, {"cache_kv": ".ca"}, {"cache_kv": ".cg"}),
)
DECODE_ROUNDED: tuple[dict[str, Any], ...] = (
    *({"base2": False}, {"pack_gqa": False}, {"block_m": 32}, {"block_n": 16}, {"num_warps": 1}),
    *({"split_keys": 32}, {"split_keys": 128}, {"split_keys": UNSPLIT}),
)
ROUNDING = {"float32": 1e-6, "bfloat16": 8e-3}
_ANY = frozenset[str]()
_MEMBERS = ((18, 40), (0, 7), (3, 70), (1, 9))
PROBLEMS = {
    "window-lens": Workload(
        "", _ANY, 2, 4, 2, 20, 90, 24, causal=True, window=(50, None), kv_lens=(90, 31), kv_starts=(3, 0)
    ),
    "changed": Workload("", _ANY, 1, 4, 2, 20, 70, 40, 24, alibi="h", softcap=8.0, sinks=True, mask="b1qk"),
    "packed": Workload("", _ANY, 1, 4, 2, 25, 130, 24, members=_MEMBERS, causal=True),
    "paged": Workload("", _ANY, 3, 4, 2, 1, 80, 24, kv_lens=(80, 0, 33), page_size=8),
    "dropout": Workload("", _ANY, 1, 4, 2, 20, 70, 24, causal=True),
}
STEPS = {
    "step": Workload("", _ANY, 2, 6, 2, 2, 150, 24, causal=True, kv_lens=(150, 70), sinks=True),
    "paged": Workload("", _ANY, 3, 4, 2, 1, 150, 24, kv_lens=(150, 0, 33), page_size=8),
}
DROPOUT = {"dropout_p": 0.3, "dropout_seed": 5}


@pytest.fixture(autouse=True)
def one_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products are numpy's, which sum in another order where an operand is transposed or
    strided in memory; copies that are not have one order."""
    if not INTERPRET:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    product = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        for x in (a, b):
            x.data = np.ascontiguousarray(x.data)
        return product(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def results(config: Config, w: Workload, problem: str, dtype: str) -> dict[str, torch.Tensor]:
    q, k, v, options = make(with_dtype(w, dtype), seed=2)
    if problem == "dropout":
        options |= DROPOUT
    return dict(zip(("out", "lse"), call(config, q, k, v, batch_invariant=True, **options), strict=True))


def cases(problems: dict[str, Workload], switches: tuple[dict[str, Any], ...]) -> list[Any]:
    """Every switch with every problem and dtype; by default each with one problem in its turn."""
    names = [(problem, dtype) for dtype in ROUNDING for problem in problems]
    found = []
    for turn, switch in enumerate(switches):
        word = "-".join(f"{name}={value}" for name, value in switch.items())
        for place, (problem, dtype) in enumerate(names):
            marks = [] if place == turn % len(names) else [pytest.mark.slow]
            found.append(pytest.param(switch, problem, dtype, id=f"{word}-{problem}-{dtype}", marks=marks))
    return found


@pytest.mark.parametrize(("switch", "problem", "dtype"), cases(PROBLEMS, SAME_BITS))
def test_the_forward_keeps_its_bits(switch: dict[str, Any], problem: str, dtype: str):
    got, want = (
        results(config, PROBLEMS[problem], problem, dtype) for config in (replace(FORWARD, **switch), FORWARD)
    )
    for name in want:
        if "loads" in switch and not INTERPRET:  # warps may share the columns of a sum otherwise
            near(got[name], want[name], ROUNDING[dtype], name)
        else:
            same_bits(got[name], want[name], name)


@pytest.mark.parametrize(("switch", "problem", "dtype"), cases(STEPS, DECODE_SAME_BITS))
def test_decode_keeps_its_bits(switch: dict[str, Any], problem: str, dtype: str):
    got, want = (
        results(config, STEPS[problem], problem, dtype) for config in (replace(DECODE, **switch), DECODE)
    )
    for name in want:
        same_bits(got[name], want[name], name)


@pytest.mark.parametrize(("switch", "problem", "dtype"), cases(PROBLEMS, ROUNDED))
def test_the_forward_differs_by_rounding_alone(switch: dict[str, Any], problem: str, dtype: str):
    _rounded(replace(FORWARD, **switch), FORWARD, PROBLEMS[problem], problem, dtype)


@pytest.mark.parametrize(("switch", "problem", "dtype"), cases(STEPS, DECODE_ROUNDED))
def test_decode_differs_by_rounding_alone(switch: dict[str, Any], problem: str, dtype: str):
    _rounded(replace(DECODE, **switch), DECODE, STEPS[problem], problem, dtype)


def _rounded(config: Config, plain: Config, w: Workload, problem: str, dtype: str) -> None:
    got, want = (results(c, w, problem, dtype) for c in (config, plain))
    empty = want["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, empty)
    near(got["out"], want["out"], ROUNDING[dtype], "out")
    near(got["lse"].masked_fill(empty, 0), want["lse"].masked_fill(empty, 0), 1e-6, "lse")


def test_every_technique_is_switched():
    tried = {kind: {name for switch in switches for name in switch} for kind, switches in (
        (ForwardConfig, SAME_BITS + ROUNDED), (DecodeConfig, DECODE_SAME_BITS + DECODE_ROUNDED)
    )}  # fmt: skip
    for kind, names in tried.items():
        assert names == {field.name for field in fields(kind)}, kind.__name__
