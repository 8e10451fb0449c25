"""Gradients as they are timed: the backward pass of an output made once, or a whole step, forward and
backward; and what they are held to: those of sampled heads against autograd through the float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

import polyflash
from benchmarks.cases import BACKWARD, STEP
from benchmarks.problem import Call, Problem, Sample, Sdpa, arms_of
from polyflash.bench.check import Accuracy, part_of
from polyflash.compare import TOLERANCE, worst_row
from polyflash.reference import attention_reference
from polyflash.spec import Phase
from polyflash.work import flops_per_pair

_SEED = 1
_HALVES = 4  # half units of Σ|dO·O| by which sums of float32 products are off
_OPERANDS = ("bias", "sinks")  # of our call: what has a gradient beside q, k and v
_BLOCK_SCORES = 1 << 22  # scores that the oracle stores for one block of rows
Found = dict[str, Tensor]  # by operand


@dataclass(frozen=True)
class Gradient:
    """One arm: the gradients of `call` in the direction `dout`. `out` is its output, made once, if the
    backward pass alone is timed; None: each call makes its own."""

    call: Call | Sdpa
    leaves: Found
    dout: Tensor
    out: Tensor | None = None

    @staticmethod
    def of(call: Call | Sdpa, dout: Tensor, timed: str) -> Gradient:
        """The arm on operands of its own graph, which share the memory of those given."""
        changed: dict[str, Any] = {name: _leaf(getattr(call, name)) for name in ("q", "k", "v")}
        leaves = dict(changed)
        if isinstance(call, Sdpa):
            if call.mask is not None and call.mask.is_floating_point():
                changed["mask"] = leaves["bias"] = _leaf(call.mask)
        else:
            given = {name: _leaf(call.options[name]) for name in _OPERANDS if name in call.options}
            changed["options"] = {**call.options, **given}
            leaves |= given
        call = replace(call, **changed)
        with torch.enable_grad():
            return Gradient(call, leaves, dout, call() if timed == BACKWARD else None)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(self.leaves.values())

    def __call__(self) -> tuple[Tensor, ...]:
        if self.out is None:
            return torch.autograd.grad(self.call(), self.inputs, self.dout)
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    @property
    def found(self) -> Found:
        """The gradients by the names of their operands."""
        return dict(zip(self.leaves, self(), strict=True))

    @property
    def backend(self) -> str:
        """Who runs it; both, if a step is forward on one and backward on another."""
        call = self.call
        if isinstance(call, Sdpa):
            return ""
        plan = polyflash.explain(call.q, call.k, call.v, **call.options)
        last = plan.backward.backend if plan.backward else None
        both = (last,) if self.out is not None else (plan.backend, last)
        return "/".join(dict.fromkeys(name or "" for name in both))


@dataclass(frozen=True)
class GradientProblem:
    """What `Problem.timed` is to the forward pass; FLOPs are those of what is timed."""

    problem: Problem
    peer: str
    ours: Gradient
    plain: Gradient | None
    torch: Gradient | None  # None where torch SDPA has no such operand
    flops: float
    plain_flops: float
    bytes: int = 0
    chosen: dict[str, Any] = field(default_factory=dict)

    @property
    def arms(self) -> dict[str, Any]:
        return arms_of(self.ours, self.peer, self.torch, self.plain)

    @property
    def backend(self) -> str:
        return self.ours.backend

    def check(self) -> tuple[float, Accuracy, Accuracy]:
        """The worst row's relative difference between any of our gradients and the peer's (those of our torch
        row if there is no peer), and the errors of both."""
        found = self.ours.found
        if self.torch:
            packed = self.problem.packed
            expected = {n: x if n in _OPERANDS else packed(x) for n, x in self.torch.found.items()}
        else:
            expected = Gradient.of(self.problem.ours.on("torch"), self.ours.dout, STEP).found
        room = self.room()
        difference = max(worst_row(found[name], expected[name], room[name]) for name in found)
        errors = [self._errors(s, room, found, expected) for s in self.problem.samples]
        ours, theirs = (reduce(or_, of) for of in zip(*errors, strict=True))
        return difference, ours, theirs

    def _errors(self, s: Sample, *given: Found) -> list[Accuracy]:
        """Errors of gradients in the shapes of our operands against float64; given first is their room."""
        room, *found = ({n: x if n in _OPERANDS else s.of(x) for n, x in g.items()} for g in given)
        return sampled_gradients(s, s.of(self.ours.dout), room, found)

    def room(self) -> Found:
        """By how much gradients may be off beside their own size, over the tolerance. Every pass that stores
        no weights takes Σ dO·O of an output rounded by up to half a unit and shares that error out by weight
        P, Σ_j P·k to dq and Σ_i P·q to dk. It is all there is of dq where a query sees one key. Where sums
        are no wider than the output, their order adds to it."""
        with torch.enable_grad():
            call, out = self.ours.call, self.ours.out
            out = (call() if out is None else out).detach()
            scale = call.q.shape[-1] ** -0.5
            info, sums = torch.finfo(out.dtype), torch.promote_types(out.dtype, torch.float32)
            halves = _HALVES if out.dtype is sums else 1
            unit = 0.5 * halves * info.eps / TOLERANCE[str(out.dtype).removeprefix("torch.")]
            blur = unit * scale * (self.ours.dout * out).abs().to(sums).sum(-1, keepdim=True)
            rooms = self._weighted(blur)
        return {n: rooms.get(n, torch.zeros_like(x)) for n, x in self.ours.leaves.items()}

    def _weighted(self, blur: Tensor) -> Found:
        """Σ_j blur_i·P_ij·k_j and Σ_i blur_i·P_ij·q_i by what is not under test: attention over k in place of
        v, and the gradient of that. Of a bias blur·P itself, over the scale."""
        peer, packed, q = self.problem.torch, self.problem.packed, self.problem.ours.q
        direction = (blur * q).to(q.dtype)
        if isinstance(peer, Sdpa):
            k = _leaf(peer.k)
            mixed, direction = replace(peer, v=k)(), self.problem.padded(direction)
        else:
            ours = self.problem.ours.on("torch")
            k = _leaf(ours.k)
            mixed = replace(ours, v=k, options={**ours.options, "dropout_p": 0.0})()
        (of_k,) = torch.autograd.grad(mixed, k, direction)
        rooms = {"q": blur * packed(mixed.detach()), "k": packed(of_k)}
        if isinstance(peer, Sdpa) and peer.mask is not None and peer.mask.is_floating_point():
            scale = q.shape[-1] ** -0.5
            p = (scale * (peer.q.to(blur.dtype) @ peer.k.to(blur.dtype).mT) + peer.mask).softmax(-1)
            rooms["bias"] = (p.mul_(blur) / scale).sum_to_size(peer.mask.shape)
        return rooms


def differentiated(problem: Problem, timed: str, peer: str = "") -> GradientProblem:
    """The problem's gradients, `timed` BACKWARD or STEP."""
    call, plain, theirs = problem.ours, problem.plain, problem.torch
    dims = call.q.shape[-1], call.v.shape[-1]
    forward, backward = (flops_per_pair(phase, *dims) for phase in (Phase.FORWARD, Phase.BACKWARD))
    factor = (backward if timed == BACKWARD else forward + backward) / forward
    dout = _direction(call)
    return GradientProblem(
        problem,
        peer,
        ours=Gradient.of(call, dout, timed),
        plain=Gradient.of(plain, _direction(plain), timed) if plain else None,
        torch=Gradient.of(theirs, problem.padded(dout), timed) if isinstance(theirs, Sdpa) else None,
        flops=factor * problem.flops,
        plain_flops=factor * problem.plain_flops,
    )


def _direction(call: Call) -> Tensor:
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return drawn.to(call.q)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def sampled_gradients(s: Sample, dout: Tensor, room: Found, found: Sequence[Found]) -> list[Accuracy]:
    """Errors of each of `found` for one key/value head and the query heads that share it, or for all heads if
    a bias broadcasts over them; relative to their rows and those of `room`. All are (batch, heads, seqlen,
    head_dim)."""
    q, k, v, options = s.q, s.k, s.v, s.options
    batch, num_kv_heads, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    bias, dropout = options.get("bias"), options.get("dropout_p", 0.0)
    whole = bias is not None and bias[(None,) * (4 - bias.ndim)].shape[:2] != q.shape[:2]
    # The counter of dropout begins at the first entry and head.
    last = 0 if dropout else num_kv_heads - 1
    entries = slice(0, batch) if whole else slice(0, 1) if dropout else slice(batch - 1, batch)
    kv = slice(0, num_kv_heads) if whole else slice(last, last + 1)
    at = entries, slice(kv.start * group, kv.stop * group)
    seen = {n: part_of(x, *at) if n in ("mask", "bias") else x for n, x in options.items()}
    seen |= {n: x[at[1]] for n, x in options.items() if n in ("alibi_slopes", "sinks")}
    exact = _oracle(q[at], k[entries, kv], v[entries, kv], dout[at], seen)
    errors = []
    for gradients in found:
        relative = largest = 0.0
        for name, right in exact.items():
            place = (entries, kv) if name in ("k", "v") else at
            got, slack = (
                x[name][at[1]] if name == "sinks" else part_of(x[name], *place) for x in (gradients, room)
            )
            relative = max(relative, worst_row(got.double(), right, slack))
            wrong = (got - right).abs().nan_to_num(torch.inf, torch.inf, torch.inf)
            largest = max(largest, float(wrong.max()))
        heads = at[1].stop - at[1].start
        errors.append(Accuracy(relative, relative, largest, 0.0, heads, q.shape[2]))
    return errors


def _oracle(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: dict[str, Any]) -> Found:
    """Float64 gradients of the oracle, block by block of rows, so that memory is bounded at any length; of
    all rows at once with dropout, whose counter begins at the first one."""
    given = {"q": q, "k": k, "v": v} | {n: options[n] for n in _OPERANDS if n in options}
    leaves = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    rest = {n: x for n, x in options.items() if n not in ("mask", *_OPERANDS)}
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    scores = q.shape[0] * q.shape[1] * seqlen_k
    rows = seqlen_q if "dropout_p" in options else max(1, _BLOCK_SCORES // scores)
    totals = {name: torch.zeros_like(x) for name, x in leaves.items()}
    laid: dict[str, Any] = {"mask": options.get("mask"), "bias": leaves.get("bias")}
    every = slice(None)
    for start in range(0, seqlen_q, rows):
        block = slice(start, start + rows)
        seen = rest | {n: part_of(x, every, every, block) for n, x in laid.items() if x is not None}
        out, _ = attention_reference(
            leaves["q"][:, :, block], leaves["k"], leaves["v"], q_offset=seqlen_k - seqlen_q + start,
            sinks=leaves.get("sinks"), **seen,
        )  # fmt: skip
        parts = torch.autograd.grad(out, tuple(leaves.values()), dout[:, :, block].double())
        for total, part in zip(totals.values(), parts, strict=True):
            total += part
    return totals
