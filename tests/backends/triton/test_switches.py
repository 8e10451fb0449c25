"""Every named technique of the Triton forward and decode gives the same result: the same bits where it
changes no arithmetic, else within rounding."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from polyflash import env
from polyflash.reference import attention_reference
from polyflash.workloads import Workload, make
from tests import device
from tests.catalogue import with_dtype
from tests.tolerance import near, same_bits

if not env.TRITON_INTERPRET.is_set() and device.DEVICE.type == "cpu":
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

from polyflash.backends.gpu.launch import UNSPLIT
from polyflash.backends.triton.configs import DecodeConfig, ForwardConfig
from polyflash.backends.triton.interpreter import INTERPRET
from tests.backends.triton.direct import Config, call

FORWARD = ForwardConfig(16, 64, 4, 2)
DECODE = DecodeConfig(16, 32, 4, 2, 64)
SAME_BITS: tuple[dict[str, Any], ...] = (
    *({"split_exp": 2}, {"split_exp": 4}, {"num_stages": 4}, {"num_stages": 3}),
    *({"hold_q": True}, {"loads": "descriptor"}, {"cache_kv": ".ca"}, {"cache_kv": ".cg"}),
    *({"persistent": True}, {"order": "heavy_first"}, {"mask_by": "add"}, {"max_registers": 168}),
    {"level": 0},
    {"split_exp": 2, "hold_q": True, "loads": "descriptor", "persistent": True, "order": "heavy_first"},
)
ROUNDED: tuple[dict[str, Any], ...] = (
    *({"base2": False}, {"pack_gqa": True}, {"block_m": 32}, {"block_n": 32}, {"num_warps": 8}),
    *({"lazy_rescale": True}, {"late_sum": True}, {"lazy_rescale": True, "late_sum": True, "base2": False}),
    *({"precision": "bf16x6"}, {"precision": "bf16x6", "compensate": False}, {"split_keys": 64}),
    {"split_keys": 64, "pack_gqa": True, "hold_q": True, "loads": "descriptor", "persistent": True},
)
DECODE_SAME_BITS: tuple[dict[str, Any], ...] = (
    *(
        {"num_stages": 3},
        {"loads": "descriptor"},
        {"cache_kv": ".ca"},
        {"cache_kv": ".cg"},
        {"max_registers": 168},
    ),
)
DECODE_ROUNDED: tuple[dict[str, Any], ...] = (
    *({"base2": False}, {"pack_gqa": False}, {"block_m": 32}, {"block_n": 16}, {"num_warps": 1}),
    *({"split_keys": 32}, {"split_keys": 128}, {"split_keys": UNSPLIT}, {"fixed_splits": True}),
    {"precision": "bf16x6"},
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


class TestALazyMaximum:
    """m lies up to 2^8 below a row's maximum, and follows in one row of a tile when it need not in others."""

    LAZY = replace(FORWARD, block_n=16, lazy_rescale=True, late_sum=True)

    def problem(self, step: float, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        """Row i's scores grow by step·i from one block of 16 keys to the next, in powers of two."""
        torch.manual_seed(7)
        rows, keys = torch.arange(12.0), torch.arange(160) // 16
        q, k, v = torch.zeros(1, 1, 12, 16), torch.zeros(1, 1, 160, 16), torch.randn(1, 1, 160, 16)
        q[0, 0, :, 0], k[0, 0, :, 0] = rows * step, keys
        q[..., 1], k[..., 1] = 1.0, torch.randn(1, 1, 160)
        return tuple(x.to(device.DEVICE, dtype) for x in (q, k, v))

    @pytest.mark.parametrize("base2", (True, False))
    @pytest.mark.parametrize("step", (0.25, 1.0, 4.0, -1.0))
    def test_is_right_while_scores_grow(self, step: float, base2: bool):
        q, k, v = self.problem(step)
        config = replace(self.LAZY, base2=base2)
        out, lse = call(config, q, k, v, scale=math.log(2))
        want, want_lse = attention_reference(q.cpu(), k.cpu(), v.cpu(), scale=math.log(2))
        near(out, want.to(out.dtype), ROUNDING["bfloat16"], "out")
        near(lse, want_lse.to(lse.dtype), 1e-5, "lse")

    def test_is_lazy(self):
        """Weights are rounded in other units, so some results are rounded otherwise."""
        q, k, v = self.problem(0.25)
        eager = replace(self.LAZY, lazy_rescale=False)
        outs = [call(config, q, k, v, scale=math.log(2))[0] for config in (self.LAZY, eager)]
        near(*outs, ROUNDING["bfloat16"], "out")
        assert not torch.equal(*outs)

    def test_leaves_the_bits_of_a_row_to_the_row(self):
        q, k, v = self.problem(1.0)
        out, lse = call(self.LAZY, q, k, v, scale=math.log(2))
        for i in range(q.shape[2]):
            alone = q.clone()
            alone[:, :, :i], alone[:, :, i + 1 :] = alone[:, :, i : i + 1], alone[:, :, i : i + 1]
            got, got_lse = call(self.LAZY, alone, k, v, scale=math.log(2))
            same_bits(got[:, :, i], out[:, :, i], f"row {i}")
            same_bits(got_lse[:, :, i], lse[:, :, i], f"lse of row {i}")

    def test_follows_at_once_where_scores_are_too_large_for_one_multiply_add(self):
        q, k, v = self.problem(1.0)
        scale = 2.0**27  # a maximum one block behind would be a weight of infinity
        out, lse = call(self.LAZY, q, k, v, scale=scale)
        want, want_lse = attention_reference(q.cpu(), k.cpu(), v.cpu(), scale=scale)
        near(out, want.to(out.dtype), ROUNDING["bfloat16"], "out")
        near(lse, want_lse.to(lse.dtype), 1e-5, "lse")
