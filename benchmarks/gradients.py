"""Gradients as they are timed: the backward pass of an output made once, or a whole step, forward and
backward; and what they are held to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

import polyflash
from benchmarks.cases import BACKWARD, STEP
from benchmarks.gradient_accuracy import sampled_gradients
from benchmarks.problem import Call, Problem, Sdpa
from polyflash.bench.check import Accuracy
from polyflash.compare import TOLERANCE, worst_row
from polyflash.spec import Phase
from polyflash.work import flops_per_pair

_SEED = 1
_HALVES = 4  # half units of Σ|dO·O| by which sums of float32 products are off
_OPERANDS = ("bias", "sinks")  # of our call: what has a gradient beside q, k and v
Found = dict[str, Tensor]  # by operand


@dataclass(frozen=True)
class Gradient:
    """One arm: the gradients of `call` in the direction `dout`. `out` is its output, made once, if the
    backward pass alone is timed; None: each call makes its own."""

    call: Call | Sdpa
    names: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    dout: Tensor
    out: Tensor | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        if self.out is None:
            return torch.autograd.grad(self.call(), self.inputs, self.dout)
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    @property
    def found(self) -> Found:
        """The gradients by the names of their operands."""
        return dict(zip(self.names, self(), strict=True))

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
    """What `Problem` is to the forward pass; FLOPs are those of what is timed."""

    problem: Problem
    ours: Gradient
    plain: Gradient | None
    torch: Gradient | None  # None where torch SDPA has no such operand
    flops: float
    plain_flops: float

    def errors(self, room: Found, *found: Found) -> list[Accuracy]:
        """Of gradients in the shapes of our operands, each against float64."""
        errors = []
        for s in self.problem.samples:
            slack, *got = (
                {n: x if n in _OPERANDS else s.of(x) for n, x in given.items()} for given in (room, *found)
            )
            errors.append(sampled_gradients(s.q, s.k, s.v, s.of(self.ours.dout), s.options, slack, got))
        return [reduce(or_, of) for of in zip(*errors, strict=True)]

    def check(self) -> tuple[float, Accuracy, Accuracy]:
        """The worst row's relative difference between any of our gradients and the peer's (those of our torch
        row if there is no peer), and the errors of both."""
        found = self.ours.found
        if self.torch:
            packed = self.problem.packed
            expected = {n: x if n in _OPERANDS else packed(x) for n, x in self.torch.found.items()}
        else:
            expected = _gradient(self.problem.ours.on("torch"), self.ours.dout, STEP).found
        room = self.room()
        difference = max(worst_row(found[name], expected[name], room[name]) for name in found)
        ours, theirs = self.errors(room, found, expected)
        return difference, ours, theirs

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
        return {
            n: rooms.get(n, torch.zeros_like(x))
            for n, x in zip(self.ours.names, self.ours.inputs, strict=True)
        }

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


def differentiated(problem: Problem, timed: str) -> GradientProblem:
    """`BACKWARD` or `STEP` of a problem, in the direction of a random dout from a fixed seed."""
    call, plain, theirs = problem.ours, problem.plain, problem.torch
    factor = _work(call, timed)
    dout = _direction(call)
    return GradientProblem(
        problem,
        ours=_gradient(call, dout, timed),
        plain=_gradient(plain, _direction(plain), timed) if plain else None,
        torch=_gradient(theirs, problem.padded(dout), timed) if isinstance(theirs, Sdpa) else None,
        flops=factor * problem.flops,
        plain_flops=factor * problem.plain_flops,
    )


def _work(call: Call, timed: str) -> float:
    """FLOPs of what is timed over those of the forward pass."""
    dims = call.q.shape[-1], call.v.shape[-1]
    forward, backward = (flops_per_pair(phase, *dims) for phase in (Phase.FORWARD, Phase.BACKWARD))
    return (backward if timed == BACKWARD else forward + backward) / forward


def _direction(call: Call) -> Tensor:
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return drawn.to(call.q)


def _gradient(call: Call | Sdpa, dout: Tensor, timed: str) -> Gradient:
    """The arm on operands of its own graph, which share the memory of those given."""
    changed: dict[str, Any] = {name: _leaf(getattr(call, name)) for name in ("q", "k", "v")}
    operands = dict(changed)
    if isinstance(call, Sdpa):
        if call.mask is not None and call.mask.is_floating_point():
            changed["mask"] = operands["bias"] = _leaf(call.mask)
    else:
        given = {name: _leaf(call.options[name]) for name in _OPERANDS if name in call.options}
        changed["options"] = {**call.options, **given}
        operands.update(given)
    call = replace(call, **changed)
    out = None
    if timed == BACKWARD:
        with torch.enable_grad():
            out = call()
    return Gradient(call, tuple(operands), tuple(operands.values()), dout, out)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
