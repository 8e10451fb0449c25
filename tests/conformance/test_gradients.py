"""Gradients through the public API: the relative rule with r = 3, identities G1 to G12, autograd
behaviour."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash.spec import Phase
from polyflash.workloads import make, named, with_dtype
from tests.conformance.rows import DTYPES, ints, qkv
from tests.tolerance import GRADIENT_BACKSTOP, compare, eager, masked_scores, near, relative_l2, same_bits

NAMED = ("q", "k", "v", "bias", "sinks")
WORKLOADS = (
    "self", "tall", "decode", "chunk", "causal-tall", "causal-top-left", "offset-per-request", "window",
    "window-causal", "window-tall", "lens-causal", "ragged-window", "mask-dense", "mask-keys", "mask-causal",
    "bias-dense", "bias-shared", "bias-keys-causal", "alibi-per-request", "softcap", "sinks",
    "segments-causal",
    "everything", "dim-v-smaller", "dim-v-larger", "scale-given",
)  # fmt: skip
IDENTITY_BOUND = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-14}
CENTRED_BOUND = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float64: 1e-14}


@pytest.fixture(params=(None, "torch"), ids=("auto", "torch"))
def backend(request: pytest.FixtureRequest) -> str | None:
    """The forward row by free choice and the torch row by name; the backward row is the table's."""
    return request.param


def leaves(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    named = {"q": q, "k": k, "v": v, **{n: options[n] for n in NAMED[3:] if options.get(n) is not None}}
    return {name: x.detach().clone().requires_grad_() for name, x in named.items()}


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    backend: str | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Gradients of polyflash by name, with the results as "out" and "lse"."""
    given = leaves(q, k, v, options)
    rest = {**options, **{n: x for n, x in given.items() if n in NAMED[3:]}}
    plan = polyflash.explain(given["q"], given["k"], given["v"], backend=backend, return_lse=True, **rest)
    assert (
        plan.chosen is not None and plan.backward is not None and plan.backward.chosen.phase is Phase.BACKWARD
    )
    assert backend in (None, plan.backend)
    out, lse = polyflash.attention(
        given["q"], given["k"], given["v"], backend=backend, return_lse=True, **rest
    )
    outputs, cotangents = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    grads = torch.autograd.grad(outputs, tuple(given.values()), cotangents)
    for x, g in zip(given.values(), grads, strict=True):
        assert g.shape == x.shape and g.dtype is x.dtype
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(given, grads, strict=True))}


def plain_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: dict[str, Any], wide: bool
) -> dict[str, Tensor]:
    """Autograd through eager ops: in float64 it is the oracle's gradient, in the storage dtype it is T's."""
    given = leaves(q, k, v, options)
    raised = {n: x.double() if wide else x for n, x in given.items()}
    rest = {**options, **{n: x for n, x in raised.items() if n in NAMED[3:]}}
    out, lse = eager(raised["q"], raised["k"], raised["v"], **rest)
    total = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        total = total + (torch.where(torch.isfinite(lse), lse, 0) * dlse.to(lse.dtype)).sum()
    return {
        n: g.double() for n, g in zip(given, torch.autograd.grad(total, tuple(raised.values())), strict=True)
    }


def recomputed_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: dict[str, Any], order: str
) -> dict[str, Tensor]:
    """The other eager T: p = exp(s - lse) and dS = p·(dP - Σ dO·O), as any pass that stores no probabilities
    must,
    from a stored result in the storage dtype. A constant row leaves a residue here, where autograd leaves
    none."""
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    given = leaves(q, k, v, options)
    raised = {n: x.to(kind) for n, x in given.items()}
    rest = {**options, **{n: x for n, x in raised.items() if n in NAMED[3:]}}
    s = masked_scores(raised["q"], raised["k"], order, rest)
    out, lse = (x.detach() for x in eager(raised["q"], raised["k"], raised["v"], order=order, **rest))
    group = q.shape[1] // max(1, k.shape[1])
    wide = v.detach().to(kind).repeat_interleave(group, 1)
    shift = torch.where(lse == -math.inf, 0, lse)[..., None]
    p = (s.detach() - shift).exp()
    dout = dout.to(kind)
    centre = (dout * out.to(q.dtype).to(kind)).sum(-1, keepdim=True)
    if dlse is not None:
        centre = centre - (dlse.to(kind) * (lse > -math.inf))[..., None]
    ds = p * (dout @ wide.mT - centre)
    differentiable = [n for n in given if n not in ("v", "sinks")]
    found = dict(
        zip(differentiable, torch.autograd.grad(s, [given[n] for n in differentiable], ds), strict=True)
    )
    found["v"] = (p.mT @ dout).unflatten(1, (-1, group)).sum(2).to(q.dtype)
    if "sinks" in given:
        weight = (given["sinks"].detach().to(kind)[None, :, None, None] - shift).exp()
        found["sinks"] = -(weight * centre).sum((0, 2, 3))
    return {n: found[n].double() for n in given}


def hold(
    got: dict[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
    label: str,
) -> None:
    """The relative rule, r = 3 (4 with softcap, ALiBi or a bias); T is the worse of both eager
    derivations."""
    right = plain_gradients(q, k, v, dout, dlse, options, wide=True)
    theirs = plain_gradients(q, k, v, dout, dlse, options, wide=False)
    again = [recomputed_gradients(q, k, v, dout, dlse, options, order) for order in ("chain", "turned")]
    loose = bool(options.get("softcap")) or any(options.get(n) is not None for n in ("alibi_slopes", "bias"))
    for name in right:
        samples = [theirs[name], *(found[name] for found in again)]
        compare(
            got[name],
            right[name],
            samples,
            got[name].dtype,
            ratio=4 if loose else 3,
            label=f"{label} d{name}",
        )


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16", "float64"))
@pytest.mark.parametrize("name", WORKLOADS)
def test_gradients(backend: str | None, name: str, dtype: str):
    """Every differentiable operand, also through lse (G12), against float64."""
    for family in ("normal", "kbias") if dtype == "float32" else ("normal",):
        q, k, v, options = make(with_dtype(named(name), dtype), seed=4, family=family)
        generator = torch.Generator().manual_seed(5)
        dout = torch.randn((*q.shape[:3], v.shape[-1]), generator=generator).to(q.dtype)
        dlse = torch.randn(q.shape[:3], generator=generator).to(
            torch.float64 if dtype == "float64" else torch.float32
        )
        for dl in (None, dlse):
            got = gradients(q, k, v, dout, dl, backend=backend, **options)
            hold(
                got, q, k, v, dout, dl, options, f"{name} {dtype} {family} {'lse' if dl is not None else ''}"
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_backstop(backend: str | None, dtype: torch.dtype):
    q, k, v = qkv(1, (2, 1), 130, 130, 64, dtype=dtype)
    dout = torch.randn_like(q)
    for causal in (False, True):
        got = gradients(q, k, v, dout, backend=backend, causal=causal)
        right = plain_gradients(q, k, v, dout, None, {"causal": causal}, wide=True)
        for name in ("q", "k", "v"):
            error = relative_l2(got[name], right[name])
            assert error <= GRADIENT_BACKSTOP[dtype], f"d{name}: {error:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ("cross", "tall", "causal-tall", "window-causal", "lens-causal", "mask-dense", "everything")
)
def test_identities(backend: str | None, name: str, dtype: torch.dtype):
    """G1 ΣdV = ΣdO, G2 ΣdK = 0, G3 ⟨Q,dQ⟩ = ⟨K,dK⟩, G4 ⟨V,dV⟩ = ⟨O,dO⟩; relative to the sum of magnitudes."""
    q, k, v, options = make(with_dtype(named(name), str(dtype).removeprefix("torch.")), seed=6)
    sinks, softcap = options.get("sinks") is not None, bool(options.get("softcap"))
    dout = torch.randn((*q.shape[:3], v.shape[-1]), generator=torch.Generator().manual_seed(0)).to(dtype)
    got = {n: x.double() for n, x in gradients(q, k, v, dout, backend=backend, **options).items()}
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    bound = IDENTITY_BOUND[dtype]

    def close(a: Tensor, b: Tensor, scale: Tensor, limit: float, label: str) -> None:
        error, whole = float((a - b).abs().max()), float(scale.max().clamp(min=1e-30))
        assert error <= limit * whole, f"{label}: {error:.3g} of {whole:.3g}"

    live = (got["lse"] > -math.inf)[..., None]
    if not sinks:
        per_group = (dout * live).view(q.shape[0], k.shape[1], group, *dout.shape[2:])
        close(got["v"].sum(2), per_group.sum((2, 3)), per_group.abs().sum((2, 3)), bound, "G1")
        if not softcap:
            close(got["k"].sum(2), torch.zeros(()), got["k"].abs().sum(2), CENTRED_BOUND[dtype] * 4, "G2")
    a, b = q * got["q"], k * got["k"]
    close(a.sum(), b.sum(), a.abs().sum() + b.abs().sum(), bound, "G3")
    a, b = v * got["v"], got["out"] * dout
    close(a.sum(), b.sum(), a.abs().sum() + b.abs().sum(), bound, "G4")


def test_G5_equal_values(backend: str | None):
    q, k, v = qkv(1, (4, 2), 40, 70, 32)
    v = v[:, :, :1].expand_as(v)
    dout = torch.randn_like(q)
    got = gradients(q, k, v, dout, backend=backend, causal=True)
    limit = 2e-6 * 32**-0.5 * float(dout.norm() * v[:, :, 0].norm() * k.norm())
    assert float(got["q"].abs().max()) <= limit and float(got["k"].abs().max()) <= limit


def test_G6_linear_in_dout(backend: str | None):
    q, k, v = qkv(1, (4, 2), 40, 70, 32)
    one, two = torch.randn_like(q), torch.randn_like(q)
    a, b = (gradients(q, k, v, d, backend=backend, causal=True) for d in (one, two))
    both, scaled = (gradients(q, k, v, d, backend=backend, causal=True) for d in (one + two, 4 * one))
    for name in ("q", "k", "v"):
        same_bits(4 * a[name], scaled[name], name)
        near(a[name] + b[name], both[name], 2e-6, name)


def test_G7_G8_locality(backend: str | None):
    """dK, dV of key j see only rows i >= j - (N - M); dQ of row i sees only dO of row i."""
    q, k, v = qkv(1, (4, 2), 40, 70, 32)
    dout = torch.randn_like(q)
    full = gradients(q, k, v, dout, backend=backend, causal=True)
    late = dout.clone()
    late[:, :, :20] = 0
    part = gradients(q, k, v, late, backend=backend, causal=True)
    for name in ("k", "v"):
        same_bits(full[name][:, :, 50:], part[name][:, :, 50:], name)
    same_bits(full["q"][:, :, 20:], part["q"][:, :, 20:])
    assert (part["q"][:, :, :20] == 0).all()


def test_G9_batch_additivity(backend: str | None):
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
def test_G10_single_key(backend: str | None, dtype: torch.dtype):
    """B-grad-11, B-msk-06: one visible key means a constant softmax: dQ = dK = 0, dV = ΣdO."""
    for options in ({}, {"causal": True}):
        q, k, v = (3 * x for x in qkv(1, 2, 1, 1, 16, dtype=dtype))
        got = gradients(q, k, v, torch.ones_like(q), backend=backend, **options)
        limit = 1e-6 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
        for name in ("q", "k"):
            assert float(got[name].abs().max()) <= limit * float(k.norm()), name
        near(got["v"], torch.ones_like(v), 1e-5)


def test_G11_directional_derivative():
    """float64, torch row: (L(x + εu) - L(x - εu)) / 2ε = ⟨grad, u⟩."""
    q, k, v = (x.double() for x in qkv(1, (6, 2), 9, 14, 8, 5))
    dout, direction = torch.randn(1, 6, 9, 5, dtype=torch.float64), [torch.randn_like(x) for x in (q, k, v)]
    for options in ({"causal": True}, {"window": (3, 1)}, {"softcap": 2.0}, {"kv_lens": ints(6)}):
        got = gradients(q, k, v, dout, backend="torch", **options)

        def loss(step: float, options=options) -> float:
            moved = [x + step * u for x, u in zip((q, k, v), direction, strict=True)]
            return float((polyflash.attention(*moved, backend="torch", **options) * dout).sum())

        numeric = (loss(1e-5) - loss(-1e-5)) / 2e-5
        exact = sum(float((got[n] * u).sum()) for n, u in zip("qkv", direction, strict=True))
        assert abs(numeric - exact) <= 1e-7 * max(1.0, abs(exact)), options


def test_gradcheck_float64():
    """B-grad-04: torch's own finite differences, on empty rows, D_v ≠ D, groups and windows."""
    q, k, v = (x.double().requires_grad_() for x in qkv(1, (3, 1), 4, 3, 2, 3))
    for options in ({"causal": True}, {"window": (1, 1)}, {"kv_lens": ints(2)}):

        def call(q, k, v, options=options):
            out, lse = polyflash.attention(q, k, v, return_lse=True, **options)
            return out, torch.where(torch.isfinite(lse), lse, 0)

        assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_rows_give_zero(backend: str | None, dtype: torch.dtype):
    """B-msk-02, B-cau-03, P3, P7: gradients of empty rows and unseen keys are exactly 0."""
    q, k, v = qkv(2, (4, 2), 40, 30, 16, dtype=dtype)
    dout = torch.randn_like(q)
    got = gradients(q, k, v, dout, backend=backend, causal=True)
    assert (got["q"][:, :, :10] == 0).all()
    hold(got, q, k, v, dout, None, {"causal": True}, "causal M > N")
    mask = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 30)
    got = gradients(q, k, v, dout, backend=backend, mask=mask)
    assert all((got[n][1] == 0).all() for n in "qkv")
    got = gradients(q, k, v, dout, backend=backend, kv_lens=ints(30, 7), kv_starts=ints(0, 3))
    assert all((got[n][1, :, 7:] == 0).all() and (got[n][1, :, :3] == 0).all() for n in "kv")
    hidden = k.clone(), v.clone()
    for x in hidden:
        x[1, :, 7:] = math.nan
    spoiled = gradients(q, *hidden, dout, backend=backend, kv_lens=ints(30, 7), kv_starts=ints(0, 3))
    for name in "qkv":
        same_bits(spoiled[name], got[name], f"invisible NaN reached d{name}")


def test_zero_sizes(backend: str | None):
    """B-emp-02, B-emp-05: no queries leaves dK = dV = 0; no keys leaves dQ = 0; no batch leaves nothing."""
    for shape in ((2, 2, 0, 7), (2, 2, 5, 0), (0, 2, 5, 7)):
        batch, heads, rows, keys = shape
        q, k, v = qkv(batch, heads, rows, keys, 8)
        for causal in (False, True):
            got = gradients(q, k, v, torch.ones_like(q), backend=backend, causal=causal)
            for name, x in zip("qkv", (q, k, v), strict=True):
                assert got[name].shape == x.shape and (got[name] == 0).all()


@pytest.mark.parametrize("needed", ("q", "k", "v", "bias", "sinks", "qv", "kv"))
def test_subsets(needed: str):
    """B-grad-03: any one operand may be the only one that needs a gradient."""
    q, k, v = qkv(1, 2, 20, 30, 16)
    extra = {"bias": torch.randn(1, 2, 1, 30), "sinks": torch.randn(2)}
    wanted = [needed] if needed in extra else list(needed)
    tensors = {"q": q, "k": k, "v": v, **extra}
    for name in wanted:
        tensors[name].requires_grad_()
    out = polyflash.attention(**tensors)
    out.sum().backward()
    for name, x in tensors.items():
        assert (x.grad is not None) == (name in wanted), name


@pytest.mark.parametrize(
    "shape", [(1, 4, 1, 30), (2, 1, 20, 30), (20, 30), (30,), (1, 1, 1, 1), (2, 4, 20, 1), ()], ids=str
)
def test_broadcast_bias(shape: tuple[int, ...]):
    """B-grad-05, B-grad-06: the gradient of a broadcast bias sums over the broadcast dimensions."""
    q, k, v = qkv(2, (4, 2), 20, 30, 16)
    options = {"bias": torch.randn(shape), "causal": True}
    dout = torch.randn_like(q)
    hold(gradients(q, k, v, dout, **options), q, k, v, dout, None, options, f"bias {shape}")


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_gradient(dtype: torch.dtype):
    """B-grad-14: the backward mask is the forward mask: V = identity shows the forward one, dV the backward
    one."""
    n = 24
    q, k, _ = qkv(2, 2, n, n, 16, dtype=dtype)
    v = torch.eye(n, dtype=dtype).expand(2, 2, n, n).clone().requires_grad_()
    seed = torch.tensor(1234, dtype=torch.int64)
    weights = polyflash.attention(q, k, v, dropout_p=0.4, dropout_seed=seed)
    (dv,) = torch.autograd.grad(weights, v, torch.eye(n, dtype=dtype).expand(2, 2, n, n))
    assert torch.equal(dv.transpose(2, 3) != 0, weights != 0)
    near(dv.transpose(2, 3), weights.detach(), 4 * torch.finfo(dtype).eps)
    rate = float((weights == 0).float().mean())
    assert abs(rate - 0.4) < 0.05
    again = polyflash.attention(q, k, v, dropout_p=0.4, dropout_seed=1234)
    same_bits(again, weights)
    assert not torch.equal(weights[0] != 0, weights[1] != 0) and not torch.equal(
        weights[0, 0] != 0, weights[0, 1] != 0
    )
