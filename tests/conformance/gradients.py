"""Gradients under test: how a test calls one backward row, what it is compared with, and the identities.

    R = autograd through the float64 oracle      T = the worst of eager autograd in the storage dtype and
    three eager passes that recompute the weights from lse, as every flash backward does, one of them with a
    Σ dO·O that is off by half a unit of its sum of magnitudes

Packed problems (cu_seqlens in the options) go through `attention_varlen`; R is then the packed oracle's, T
that of each member alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import backends
from polyflash.reference import attention_reference
from polyflash.spec import Phase
from tests import device
from tests.conformance.rows import ROUNDING, digest
from tests.references import varlen_reference
from tests.tolerance import compare, dropped, eager, masked_scores, members, near, same_bits

BACKWARD = tuple(
    row
    for row in backends.TABLE
    if row.phase is Phase.BACKWARD and device.here().name.startswith(row.targets)
)
NAMED = ("q", "k", "v", "bias", "sinks")
IDENTITY_BOUND = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-14}
CENTRED_BOUND = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float64: 1e-14}
# Backends that make all gradients anew, with other last bits, where a kernel meets what is not finite.
REMAKES = frozenset({"gluon"})
Found = dict[str, Tensor]


def keeps_bits(backend: str, got: Tensor, want: Tensor, label: str = "", *, finite: bool = False) -> None:
    """Nothing of a gradient changes for values that it does not depend on; `finite`: all of these are."""
    if finite or backend not in REMAKES:
        same_bits(got, want, label)
    else:
        near(got, want, ROUNDING[want.dtype], label)


def wide_kind(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def cotangents(
    q: Tensor, v: Tensor, *, seed: int = 5, packed: bool = False, dlse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Normal dout in q's dtype and dlse in the dtype of lse."""
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn((*q.shape[:-1], v.shape[-1]), generator=generator).to(q.dtype)
    shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    return dout, torch.randn(shape, generator=generator).to(wide_kind(q.dtype)) if dlse else None


def leaves(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], wide: bool = False) -> Found:
    given = {"q": q, "k": k, "v": v, **{n: options[n] for n in NAMED[3:] if options.get(n) is not None}}
    return {
        n: (x.detach().double() if wide else x.detach().clone()).requires_grad_() for n, x in given.items()
    }


def refusal(q: Tensor, k: Tensor, v: Tensor, *, backend: str | None, **options: Any) -> str:
    """Why this backend does not run the call and its gradients, or ""."""
    given = leaves(q, k, v, options)
    rest = {**options, **{n: x for n, x in given.items() if n in NAMED[3:]}}
    plan = polyflash.explain(given["q"], given["k"], given["v"], backend=backend, return_lse=True, **rest)
    assert plan.backward is not None
    for pass_ in (plan, plan.backward):
        if pass_.chosen is None or backend not in (None, pass_.backend):
            own = [x for x in pass_.verdicts if backend in (None, x.row.backend)]
            return "; ".join(f"{x.row.name}: {', '.join(x.reasons)}" for x in own) or "no such row"
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    function: Any = polyflash.attention_varlen if "cu_seqlens_q" in options else polyflash.attention
    return function(q, k, v, return_lse=True, **options)


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    backend: str | None = None,
    needs: tuple[str, ...] = NAMED,
    as_given: bool = False,
    **options: Any,
) -> Found:
    """Gradients of one backend by name, with the results as "out" and "lse"; a refusal skips the test in the
    row's own words. `as_given` keeps the strides of q, k and v."""
    why = refusal(q, k, v, backend=backend, **options)
    if why:
        pytest.skip(why)
    given = leaves(q, k, v, options)
    if as_given:
        given.update(zip("qkv", (x.detach().requires_grad_() for x in (q, k, v)), strict=True))
    for name, x in given.items():
        x.requires_grad_(name in needs)
    rest = {**options, **{n: x for n, x in given.items() if n in NAMED[3:]}}
    out, lse = attend(given["q"], given["k"], given["v"], backend=backend, **rest)
    outputs, directions = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    wanted = {n: x for n, x in given.items() if x.requires_grad}
    grads = torch.autograd.grad(outputs, tuple(wanted.values()), directions, allow_unused=True)
    for name, g in zip(wanted, grads, strict=True):
        assert g is not None, f"no gradient of {name}"
        assert g.shape == wanted[name].shape and g.dtype is wanted[name].dtype, name
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}


def total(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """The scalar whose gradients are those of these cotangents."""
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        loss = loss + torch.where(torch.isfinite(lse), lse * dlse.to(lse.dtype), 0).sum()
    return loss


def right_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: dict[str, Any]
) -> Found:
    """R: the oracle's gradients in float64."""
    raised = leaves(q, k, v, options, wide=True)
    rest = {n: x for n, x in options.items() if not n.startswith("max_seqlen")}
    rest |= {n: x for n, x in raised.items() if n in NAMED[3:]}
    oracle = varlen_reference if "cu_seqlens_q" in options else attention_reference
    out, lse = oracle(raised["q"], raised["k"], raised["v"], **rest)
    found = torch.autograd.grad(
        total(out, lse, dout, dlse), tuple(raised.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(raised, found, strict=True))


def plain_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: dict[str, Any], wide: bool
) -> Found:
    """Autograd through eager ops: T in the storage dtype; `wide`, a second way to the oracle's gradient."""
    given = leaves(q, k, v, options)
    raised = {n: x.double() if wide else x for n, x in given.items()}
    rest = {**options, **{n: x for n, x in raised.items() if n in NAMED[3:]}}
    out, lse = eager(raised["q"], raised["k"], raised["v"], **rest)
    grads = torch.autograd.grad(total(out, lse, dout, dlse), tuple(raised.values()))
    return {n: g.double() for n, g in zip(given, grads, strict=True)}


def recomputed_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: dict[str, Any], order: str
) -> Found:
    """The other eager T: p = exp(s - lse) and dS = p·(dP - Σ dO·O), as any pass that stores no probabilities
    must, from a stored result in the storage dtype. A constant row leaves a residue here, where autograd
    leaves none."""
    kind, blurred = wide_kind(q.dtype), order == "blurred"
    order = "chain" if blurred else order
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
    terms = dout * out.to(q.dtype).to(kind)
    centre = terms.sum(-1, keepdim=True)
    if blurred:  # few rows are few draws of rounding, and where one key is seen their order is all there is
        centre = centre + 0.5 * torch.finfo(kind).eps * terms.abs().sum(-1, keepdim=True)
    if dlse is not None:
        centre = centre - (dlse.to(kind) * (lse > -math.inf))[..., None]
    ds = p * (dropped(dout @ wide.mT, options) - centre)
    differentiable = [n for n in given if n not in ("v", "sinks")]
    found = dict(
        zip(differentiable, torch.autograd.grad(s, [given[n] for n in differentiable], ds), strict=True)
    )
    found["v"] = (dropped(p, options).mT @ dout).unflatten(1, (-1, group)).sum(2).to(q.dtype)
    if "sinks" in given:
        weight = (given["sinks"].detach().to(kind)[None, :, None, None] - shift).exp()
        found["sinks"] = -(weight * centre).sum((0, 2, 3))
    return {n: found[n].double() for n in given}


def in_all_members(
    derive: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: Any, how: Any
) -> Found:
    """Gradients of each member alone, in their places; those of the sinks summed."""
    found = {n: torch.zeros(x.shape, dtype=torch.float64) for n, x in (("q", q), ("k", k), ("v", v))}
    if options.get("sinks") is not None:
        found["sinks"] = torch.zeros(options["sinks"].shape, dtype=torch.float64)
    for at, of, (one_q, one_k, one_v, own) in members(q, k, v, options):
        one_dout, one_dlse = dout[at].transpose(0, 1)[None], None if dlse is None else dlse[None, :, at]
        if at.start == at.stop:
            continue
        if of.start == of.stop:
            if "sinks" in found and one_dlse is not None:
                found["sinks"] += one_dlse.double().sum((0, 2))
            continue
        one = derive(one_q, one_k, one_v, one_dout, one_dlse, own, how)
        for n, part in (("q", at), ("k", of), ("v", of)):
            found[n][part] = one[n][0].transpose(0, 1)
        if "sinks" in found:
            found["sinks"] += one["sinks"]
    return found


_wanted: OrderedDict[bytes, tuple[Found, list[Found]]] = OrderedDict()


def wanted(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: dict[str, Any]
) -> tuple[Found, list[Found]]:
    """R and the samples of T, remembered for the next row."""
    key = digest({"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, **options})
    if key in _wanted:
        return _wanted[key]
    right = right_gradients(q, k, v, dout, dlse, options)
    given = (q, k, v, dout, dlse, options)
    orders = ("chain", "turned", "blurred")
    how = ((plain_gradients, False), *((recomputed_gradients, order) for order in orders))
    if "cu_seqlens_q" in options:
        theirs = [in_all_members(derive, *given, way) for derive, way in how]
    elif q.numel() and k.numel():
        theirs = [derive(*given, way) for derive, way in how]
    else:
        theirs = [right]
    _wanted[key] = right, theirs
    if len(_wanted) > 100:
        _wanted.popitem(last=False)
    return right, theirs


def hold(
    got: Found,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
    label: str,
) -> None:
    """The relative rule: r = 3, 2 where no heads are grouped, one more with softcap, ALiBi or a bias. Weights
    are e^(s - lse) of a rounded lse: where few terms are summed that is all there is, and T may be lucky. So
    it may be where every row has the same dout: n nearly equal terms of dV round to one side, to n·eps/4."""
    right, theirs = wanted(q, k, v, dout, dlse, options)
    loose = bool(options.get("softcap")) or any(options.get(n) is not None for n in ("alibi_slopes", "bias"))
    heads = 0 if "cu_seqlens_q" in options else 1
    kind, lse = wide_kind(q.dtype), torch.where(got["lse"].isfinite(), got["lse"].abs(), 0).double()
    rounded = torch.finfo(kind).eps * max(1.0, float(lse.max()) if lse.numel() else 0.0)
    rows = dout.shape[1 + heads] if heads else dout.shape[0]
    equal = rows > 1 and dout.stride(1 + heads if heads else 0) == 0
    drift = torch.finfo(kind).eps * rows * (q.shape[1] // max(1, k.shape[1])) / 4 if equal else 0.0
    ratio = (2 if q.shape[1] == k.shape[1] else 3) + loose if heads else 3 + loose
    for name in right:
        if name in got:
            samples = [found[name] for found in theirs]
            compare(
                got[name], right[name], samples, got[name].dtype, ratio=ratio, label=f"{label} d{name}",
                own=rounded + (drift if name == "v" else 0.0),
            )  # fmt: skip


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str | None,
    label: str = "",
    dlse: bool = True,
    seed: int = 5,
    **options: Any,
) -> Found:
    """Gradients of drawn cotangents, held to the rule and to the identities."""
    packed = "cu_seqlens_q" in options
    dout, dl = cotangents(q, v, seed=seed, packed=packed, dlse=dlse)
    got = gradients(q, k, v, dout, dl, backend=backend, **options)
    hold(got, q, k, v, dout, dl, options, label)
    check_identities(got, q, k, v, dout, dl, options, label)
    return got


def check_identities(
    got: Found,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
    label: str = "",
) -> None:
    """What any right gradient obeys, per batch entry and key/value head, whatever the mask and the size:

        G1  Σ_j dV_j = Σ_i (1 - p_sink,i)·dO_i                           not with dropout
        G2  Σ_j dK_j = scale·Σ_i t_i·q_i     Σ dBias = Σ t               the first not with softcap
        G3  ⟨Q, dQ⟩ = ⟨K, dK⟩                G4  ⟨V, dV⟩ = ⟨O, dO⟩
        dSink = -Σ_i p_sink,i·(δ_i - dlse_i)

    with δ = Σ dO·O, p_sink = e^(sink - lse) and t = Σ_j dS_ij = p_sink·δ + (1 - p_sink)·dlse, which is 0 of a
    plain row: shifting all of its scores changes only its lse. Bounds are relative to the sums of magnitudes;
    a stored O is rounded, which moves δ by half a unit of Σ|dO·O|, and where terms cancel already within a
    gradient, the accumulator's unit of what was summed is left."""
    dtype, scale = q.dtype, options.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if "cu_seqlens_q" in options:
        q, k, v, dout = (x.transpose(0, 1)[None] for x in (q, k, v, dout))
        got = {n: x.transpose(0, 1)[None] if n in ("q", "k", "v", "out") else x for n, x in got.items()}
        got["lse"], dlse = got["lse"][None], None if dlse is None else dlse[None]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    kinds, got = {n: x.dtype for n, x in got.items()}, {n: x.double() for n, x in got.items()}
    if not q.numel() or not k.numel():
        return
    group, eps, live = q.shape[1] // k.shape[1], torch.finfo(dtype).eps, got["lse"] > -math.inf
    fine = torch.finfo(wide_kind(dtype)).eps
    high = float(torch.where(live, got["lse"].abs(), 0).max())  # weights are e^(s - lse), and lse is rounded
    bound = IDENTITY_BOUND[dtype] + fine * high
    centred = 4 * CENTRED_BOUND[dtype] + fine * high
    dlse = torch.zeros_like(got["lse"]) if dlse is None else torch.where(live, dlse.double(), 0)
    sink = torch.zeros_like(got["lse"])
    if options.get("sinks") is not None:
        sinks = options["sinks"].detach().double()[None, :, None]
        sink = torch.where(live, (sinks - torch.where(live, got["lse"], 0)).exp(), 0)
    delta, blur = (dout * got["out"]).sum(-1), 0.5 * eps * (dout * got["out"]).abs().sum(-1)
    top_v, top_k = (x.abs().amax(2, keepdim=True).repeat_interleave(group, 1) for x in (v, k))
    size = (dout.abs() * top_v).sum(-1)  # no dP of a row is larger
    blur = blur + 8 * fine * size + 4 * fine * (dout * got["out"]).abs().sum(-1)
    shifted = torch.where(live, sink * delta + (1 - sink) * dlse, 0)

    def grouped(x: Tensor) -> Tensor:
        """Σ over rows and heads of each key/value head, (batch, Hkv, ...)."""
        return x.unflatten(1, (-1, group)).sum((2, 3))

    def least(name: str, factor: Tensor | None = None) -> Any:
        """What rounding below the smallest normal number can do to a sum over a gradient, times a factor."""
        unit = torch.finfo(kinds[name]).smallest_normal * torch.finfo(kinds[name]).eps
        return unit * (got[name].shape[2] if factor is None else factor.abs().sum((2, 3)).max())

    def close(a: Tensor, b: Tensor, scale_of: Tensor, limit: float, name: str, slack: Any = 0.0) -> None:
        excess = (a - b).abs() - limit * scale_of - slack
        assert float(excess.max()) <= 0, f"{label} {name}: off by {float((a - b).abs().max()):.3g}"

    if "v" in got:
        if not options.get("dropout_p"):
            kept = dout * (live * (1 - sink))[..., None]
            close(
                got["v"].sum(2),
                grouped(kept),
                got["v"].abs().sum(2) + grouped(kept.abs()),
                bound,
                "G1",
                least("v"),
            )
        a, b = (v * got["v"]).sum((2, 3)), grouped(got["out"] * dout).sum(-1)
        magnitude = (v * got["v"]).abs().sum((2, 3)) + grouped((got["out"] * dout).abs()).sum(-1)
        close(a, b, magnitude, bound, "G4", least("v", v))
    if "k" in got and not options.get("softcap"):
        term = (shifted[..., None] * q) * scale
        magnitude = got["k"].abs().sum(2) + grouped(term.abs())
        slack = abs(scale) * grouped(blur[..., None] * q.abs()) + least("k")
        close(got["k"].sum(2), grouped(term), magnitude, centred, "G2", slack)
    if "k" in got and "q" in got:
        a, b = grouped(q * got["q"]).sum(-1), (k * got["k"]).sum((2, 3))
        magnitude = grouped((q * got["q"]).abs()).sum(-1) + (k * got["k"]).abs().sum((2, 3))
        summed = (2 * size + dlse.abs())[..., None] * q.abs() * top_k * abs(scale)
        slack = 4 * fine * grouped(summed).sum(-1) + least("k", k) + least("q", q)
        close(a, b, magnitude, bound, "G3", slack)
    if "bias" in got:
        magnitude = got["bias"].abs().sum() + shifted.abs().sum()
        slack = blur.sum() + torch.finfo(kinds["bias"]).eps * got["bias"].abs().sum()
        close(got["bias"].sum(), shifted.sum(), magnitude, centred, "G2 of bias", slack)
    if "sinks" in got:
        share = sink * (delta - dlse)
        info = torch.finfo(kinds["sinks"])
        slack = (sink * blur).sum((0, 2)) + info.eps * (got["sinks"].abs() + info.smallest_normal)
        slack = slack + info.eps * info.smallest_normal * (delta - dlse).abs().sum((0, 2))  # tiny shares
        close(
            got["sinks"], -share.sum((0, 2)), share.abs().sum((0, 2)), 4 * bound + 1e-6 * high, "sinks", slack
        )
