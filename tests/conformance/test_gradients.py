"""Gradients through the public API: every backward row on the catalogue, G5 to G12, empty and zero sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

import polyflash
from polyflash import torch_ops
from polyflash.spec import Phase
from tests.catalogue import named, with_dtype, workloads
from tests.conformance.gradients import (
    BACKWARD,
    checked,
    cotangents,
    gradients,
    hold,
    keeps_bits,
    plain_gradients,
    right_gradients,
)
from tests.conformance.rows import DTYPES, NAMES, ints, qkv
from tests.families import make
from tests.tolerance import GRADIENT_BACKSTOP, near, relative_l2, same_bits

WORKLOADS = tuple(w.name for w in workloads("ci") if not w.intervals)  # those are in test_intervals.py
FAMILIES = ("kbias", "qkbias", "x4", "sharp", "sparse", "vbias", "rising", "falling", "equal", "alternating")


@pytest.mark.parametrize("dtype", (*NAMES, "float64"))
@pytest.mark.parametrize("name", WORKLOADS)
def test_gradients(backend: str, name: str, dtype: str):
    """Every differentiable operand, also through lse, against float64; G1 to G4."""
    q, k, v, options = make(with_dtype(named(name), dtype), seed=4)
    for dlse in (False, True) if name in ("self", "causal-tall", "everything", "sinks") else (True,):
        checked(q, k, v, backend=backend, label=f"{name} {dtype} {dlse}", dlse=dlse, **options)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(backend: str, family: str, dtype: str):
    """§3.10: what is invisible on normal inputs."""
    for name in ("cross", "lens-causal"):
        q, k, v, options = make(with_dtype(named(name), dtype), seed=8, family=family)
        checked(q, k, v, backend=backend, label=f"{name} {family}", **options)


def test_the_free_choice():
    """Forward and backward rows may come from two backends: what nobody named is right too."""
    for name in ("self", "causal-tall", "everything", "packed-everything", "intervals-heads"):
        q, k, v, options = make(named(name), seed=4)
        checked(q, k, v, backend=None, label=name, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_backstop(backend: str, dtype: torch.dtype):
    q, k, v = qkv(1, (2, 1), 130, 130, 64, dtype=dtype)
    dout, _ = cotangents(q, v, dlse=False)
    for causal in (False, True):
        got = gradients(q, k, v, dout, backend=backend, causal=causal)
        right = right_gradients(q, k, v, dout, None, {"causal": causal})
        for name in ("q", "k", "v"):
            error = relative_l2(got[name], right[name])
            assert error <= GRADIENT_BACKSTOP[dtype], f"d{name}: {error:.3g}"


def test_two_ways_to_the_right_gradient():
    """The oracle and eager ops in float64 agree where both speak."""
    for name in ("causal-tall", "lens-causal", "bias-keys-causal", "softcap", "sinks", "everything"):
        q, k, v, options = make(with_dtype(named(name), "float64"), seed=3)
        given = (q, k, v, *cotangents(q, v), options)
        one, two = right_gradients(*given), plain_gradients(*given, wide=True)
        for n in one:
            assert relative_l2(one[n], two[n]) < (1e-6 if n == "sinks" else 1e-12), f"{name} d{n}"


def test_G5_equal_values(backend: str):
    q, k, v = qkv(1, (4, 2), 40, 70, 32)
    v = v[:, :, :1].expand_as(v)
    dout = torch.randn_like(q)
    got = gradients(q, k, v, dout, backend=backend, causal=True)
    limit = 2e-6 * 32**-0.5 * float(dout.norm() * v[:, :, 0].norm() * k.norm())
    assert float(got["q"].abs().max()) <= limit and float(got["k"].abs().max()) <= limit


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_G6_linear_in_dout(backend: str, dtype: torch.dtype):
    q, k, v = qkv(1, (4, 2), 40, 70, 32, dtype=dtype)
    one, two = torch.randn_like(q), torch.randn_like(q)
    a, b = (gradients(q, k, v, d, backend=backend, causal=True) for d in (one, two))
    both, scaled = (gradients(q, k, v, d, backend=backend, causal=True) for d in (one + two, 4 * one))
    for name in ("q", "k", "v"):
        same_bits(4 * a[name], scaled[name], name)
        near(a[name] + b[name], both[name], 2e-6 if dtype is torch.float32 else 2e-2, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_G7_G8_locality(backend: str, dtype: torch.dtype):
    """dK, dV of key j see only rows i >= j - (N - M); dQ of row i sees only dO and dlse of row i."""
    q, k, v = qkv(1, (4, 2), 40, 70, 32, dtype=dtype)
    dout, dlse = cotangents(q, v)
    full = gradients(q, k, v, dout, dlse, backend=backend, causal=True)
    for fill in (0.0, math.nan):
        late, late_lse = dout.clone(), dlse.clone()
        late[:, :, :20], late_lse[:, :, :20] = fill, fill
        part = gradients(q, k, v, late, late_lse, backend=backend, causal=True)
        for name in ("k", "v"):
            keeps_bits(backend, full[name][:, :, 50:], part[name][:, :, 50:], name, finite=fill == 0.0)
        keeps_bits(backend, full["q"][:, :, 20:], part["q"][:, :, 20:], "q", finite=fill == 0.0)
        assert fill or (part["q"][:, :, :20] == 0).all()


def test_G9_batch_additivity(backend: str):
    q, k, v = qkv(3, (4, 2), 40, 70, 32)
    dout = torch.randn_like(q)
    whole = gradients(q, k, v, dout, backend=backend, causal=True)
    for b in range(3):
        one = gradients(
            q[b : b + 1], k[b : b + 1], v[b : b + 1], dout[b : b + 1], backend=backend, causal=True
        )
        for name in ("q", "k", "v"):
            near(whole[name][b : b + 1], one[name], 1e-6)
    shared = gradients(q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1), dout, backend=backend)
    k1, v1 = k[:1].clone().requires_grad_(), v[:1].clone().requires_grad_()
    out = polyflash.attention(q, k1.expand(3, -1, -1, -1), v1.expand(3, -1, -1, -1), backend=backend)
    dk, dv = torch.autograd.grad(out, (k1, v1), dout)
    near(shared["k"].sum(0, keepdim=True), dk, 1e-6)
    near(shared["v"].sum(0, keepdim=True), dv, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_G10_single_key(backend: str, dtype: torch.dtype):
    """B-grad-11, B-msk-06: one visible key means a constant softmax: dQ = dK = 0, dV = ΣdO."""
    cases: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (1, 1, {}),
        (1, 1, {"causal": True}),
        (40, 40, {"window": (0, 0)}),
        (17, 70, {"mask": torch.arange(70) == 66}),
    )
    for rows, keys, options in cases:
        q, k, v = (3 * x for x in qkv(1, 2, rows, keys, 16, dtype=dtype))
        dout = torch.ones_like(q)
        got = gradients(q, k, v, dout, backend=backend, **options)
        # p is e^(s - lse): 1 up to a unit of the largest score, times Σ|dO·V| of the centre's own rounding.
        size = 3e-6 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
        for name, other in (("q", k), ("k", q)):
            limit = size * float(other.abs().max() * v.abs().sum(-1).max()) / 4
            assert float(got[name].abs().max()) <= limit, f"{options} d{name}"
        right = right_gradients(q, k, v, dout, None, options)["v"]
        near(got["v"], right, 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps)


def test_G11_directional_derivative():
    """float64, torch row: (L(x + εu) - L(x - εu)) / 2ε = ⟨grad, u⟩."""
    q, k, v = (x.double() for x in qkv(1, (6, 2), 9, 14, 8, 5))
    dout, direction = torch.randn(1, 6, 9, 5, dtype=torch.float64), [torch.randn_like(x) for x in (q, k, v)]
    dropping = {"dropout_p": 0.3, "dropout_seed": 3}
    for options in ({"causal": True}, {"window": (3, 1)}, {"softcap": 2.0}, {"kv_lens": ints(6)}, dropping):
        got = gradients(q, k, v, dout, backend="torch", **options)

        def loss(step: float, options=options) -> float:
            moved = [x + step * u for x, u in zip((q, k, v), direction, strict=True)]
            return float((polyflash.attention(*moved, backend="torch", **options) * dout).sum())

        numeric = (loss(1e-5) - loss(-1e-5)) / 2e-5
        exact = sum(float((got[n] * u).sum()) for n, u in zip("qkv", direction, strict=True))
        assert abs(numeric - exact) <= 1e-7 * max(1.0, abs(exact)), options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_G12_through_lse_alone(backend: str, dtype: torch.dtype):
    """dO = 0: dV is exactly 0 and dS = dlse·P."""
    for name in ("cross", "causal-tall", "lens-causal", "sinks", "softcap"):
        q, k, v, options = make(with_dtype(named(name), str(dtype).removeprefix("torch.")), seed=2)
        _, dlse = cotangents(q, v)
        dout = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        got = gradients(q, k, v, dout, dlse, backend=backend, **options)
        assert (got["v"] == 0).all(), name
        hold(got, q, k, v, dout, dlse, options, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_rows_give_zero(backend: str, dtype: torch.dtype):
    """B-msk-02, B-cau-03, P3, P7: gradients of empty rows and unseen keys are exactly 0."""
    q, k, v = qkv(2, (4, 2), 40, 30, 16, dtype=dtype)
    got = checked(q, k, v, backend=backend, causal=True)
    assert (got["q"][:, :, :10] == 0).all()
    mask = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 30)
    got = checked(q, k, v, backend=backend, mask=mask)
    assert all((got[n][1] == 0).all() for n in "qkv")
    got = checked(q, k, v, backend=backend, kv_lens=ints(30, 7), kv_starts=ints(0, 3))
    assert all((got[n][1, :, 7:] == 0).all() and (got[n][1, :, :3] == 0).all() for n in "kv")


def test_zero_sizes(backend: str):
    """B-emp-02, B-emp-05: no queries leaves dK = dV = 0; no keys leaves dQ = 0; no batch leaves nothing."""
    for shape in ((2, 2, 0, 7), (2, 2, 5, 0), (0, 2, 5, 7)):
        batch, heads, rows, keys = shape
        q, k, v = qkv(batch, heads, rows, keys, 8)
        for causal in (False, True):
            got = gradients(q, k, v, torch.ones_like(q), backend=backend, causal=causal)
            for name, x in zip("qkv", (q, k, v), strict=True):
                assert got[name].shape == x.shape and (got[name] == 0).all()


@pytest.mark.parametrize("needed", ("q", "k", "v", "bias", "sinks", "qk", "qv", "kv"))
def test_subsets(backend: str, needed: str):
    """B-grad-03: any operands may be the only ones that need gradients; their bits stay."""
    workload = replace(named("everything"), head_dim_v=0)
    q, k, v, options = make(workload, seed=6)
    dout, dlse = cotangents(q, v)
    all_of_them = gradients(q, k, v, dout, dlse, backend=backend, **options)
    wanted = (needed,) if needed in options else tuple(needed)
    got = gradients(q, k, v, dout, dlse, backend=backend, needs=wanted, **options)
    assert set(got) == {"out", "lse", *wanted}
    for name in wanted:
        same_bits(got[name], all_of_them[name], name)


def test_spy_sees_the_row(backend: str, monkeypatch: pytest.MonkeyPatch):
    """The row named for the forward pass makes the gradients, and no other row does."""
    ran: list[str] = []
    for row in BACKWARD:
        module = import_module(row.module)

        def spied(launch, *args, original=module.run):
            ran.append(launch.row.backend)
            return original(launch, *args)

        monkeypatch.setattr(module, "run", spied)
    monkeypatch.setattr(torch_ops, "_routes", {})
    q, k, v = qkv(1, (4, 2), 20, 30, 16)
    gradients(q, k, v, torch.ones_like(q), backend=backend)
    leaf = q.clone().requires_grad_()
    with polyflash.use_backend(backend):
        out = polyflash.attention(leaf, k, v)
    out.sum().backward()
    assert ran == [backend, backend]


def test_saves_nothing_without_need():
    q, k, v = qkv(1, 1, 4, 4, 8)
    parameter = q.clone().requires_grad_()
    assert polyflash.attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert polyflash.attention(parameter, k, v).grad_fn is None
    assert polyflash.attention(parameter, k, v).grad_fn is not None


def test_backend_without_gradients_refuses():
    """B-grad-06, P17: a row by name that has no backward raises instead of leaving a gradient out."""
    from polyflash.backends import TABLE

    have = {row.backend for row in TABLE if row.phase is Phase.BACKWARD}
    q, k, v = qkv(1, 1, 4, 4, 8)
    q.requires_grad_()
    for name in {row.backend for row in TABLE} - have:
        with pytest.raises(polyflash.UnsupportedError):
            polyflash.attention(q, k, v, backend=name)
