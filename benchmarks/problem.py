"""What a row times and what its results are held to: the forward pass of ours, our plain one and torch's;
their gradients, which is the backward pass of an output made once, or a whole step, forward and backward.

Where a structured operand of ours has no form in torch (block lists, segments, packed members), torch gets
the same problem as its users write it: a bool tensor, or padding and a key mask. Gradients of sampled heads
are held to autograd through the float64 oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import polyflash
from benchmarks.cases import BACKWARD, FORWARD, STEP, Case
from polyflash.bench.check import Accuracy, part_of, sampled_error
from polyflash.bench.suite import OURS, band
from polyflash.compare import TOLERANCE, largest, worst_row
from polyflash.mask import Mask, visible_pairs
from polyflash.reference import attention_reference
from polyflash.spec import Phase
from polyflash.work import flops_per_pair
from polyflash.workloads import Workload, make

PLAIN, AFTER = "polyflash, plain", "polyflash, right after a torch operation"
Row = dict[str, Any]  # a measured one
_BLOCKS = 16  # block rows and block columns of a block-sparse mask
_SEEN_BLOCKS = 4  # of them per block row: a density of 25 %
_DOCUMENTS = 8
_DROPOUT = {"dropout_p": 0.1, "dropout_seed": 7}
_OURS_ALONE = frozenset(("alibi_slopes", "softcap", "sinks", "dropout_p"))  # torch SDPA has no such operand
_SEED = 1
_HALVES = 4  # half units of Σ|dO·O| by which sums of float32 products are off
_OPERANDS = ("bias", "sinks")  # of our call: what has a gradient beside q, k and v
_BLOCK_SCORES = 1 << 22  # scores that the oracle stores for one block of rows
Found = dict[str, Tensor]  # by operand


@dataclass(frozen=True)
class Call:
    """polyflash or torch SDPA on given tensors: `attention`, `attention_varlen` if `options` hold packed
    lengths, torch's if they hold its mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    def __call__(self) -> Tensor:
        run: Any = polyflash.attention_varlen if "cu_seqlens_q" in self.options else polyflash.attention
        run = scaled_dot_product_attention if "attn_mask" in self.options else run
        out: Tensor = run(self.q, self.k, self.v, **self.options)
        return out

    def on(self, backend: str) -> Call:
        """The same call on a backend by name."""
        return replace(self, options={**self.options, "backend": backend})

    @property
    def backend(self) -> str:
        """Who runs it."""
        return polyflash.explain(self.q, self.k, self.v, **self.options).backend or ""


@dataclass(frozen=True)
class Sample(Call):
    """A dense call that float64 looks at; `of` picks its part of a tensor in the shape of ours, as (batch,
    heads, seqlen, head_dim)."""

    of: Callable[[Tensor], Tensor] = lambda x: x


def error_of(samples: tuple[Sample, ...], out: Tensor) -> Accuracy:
    """The error of an output in the shape of ours against float64."""
    return reduce(or_, (sampled_error(s.q, s.k, s.v, s.of(out), None, s.options) for s in samples))


@dataclass(frozen=True)
class Timed:
    """`arms` by name, ours first; `outputs` give the same numbers in one shape, ours first. FLOPs, and the
    bytes that our call reads at least if it is held against memory, are those of our arm; `chosen` is what it
    was found to use; `slack` times the tolerance may outputs differ and be off."""

    arms: dict[str, Callable[[], object]]
    outputs: tuple[Callable[[], Tensor], ...]
    samples: tuple[Sample, ...]
    flops: float
    plain_flops: float
    backend: str
    bytes: int = 0
    chosen: dict[str, Any] = field(default_factory=dict)
    slack: float = 1.0

    def check(self) -> tuple[float, Accuracy, Accuracy]:
        """The worst row's relative difference between our output and any other, over the slack it has; errors
        of ours, weighted over that too, and of the last other one against float64."""
        ours, *others = outputs = [call() for call in self.outputs]
        difference = max((worst_row(ours, other) for other in others), default=0.0)
        mine, theirs = (error_of(self.samples, out) for out in (ours, outputs[-1]))
        return difference / self.slack, replace(mine, weighted=mine.weighted / self.slack), theirs


@dataclass(frozen=True)
class Problem:
    """`torch` is None where torch SDPA has no such operand; `packed` brings its tensors into the shape of
    ours, `padded` ours into the shape of torch's. FLOPs are those of visible pairs, forward."""

    ours: Call
    plain: Call | None
    torch: Call | None
    samples: tuple[Sample, ...]
    flops: float
    plain_flops: float
    packed: Callable[[Tensor], Tensor] = lambda x: x
    padded: Callable[[Tensor], Tensor] = lambda x: x

    def timed(self, what: str, peer: str, theirs: Callable[[], Tensor] | None = None) -> Timed:
        """The forward pass or, of `what`, gradients, against `theirs`, the peer's call if it is not torch
        SDPA's; checked against our torch row if there is no peer."""
        if what != FORWARD:
            return differentiated(self, what, peer)
        call = theirs or self.torch
        other = (lambda: self.packed(call())) if call else self.ours.on("torch")
        arms = arms_of(self.ours, peer, call, self.plain)
        return Timed(arms, (self.ours, other), self.samples, self.flops, self.plain_flops, self.ours.backend)


def arms_of(ours: Any, peer: str, theirs: Any, plain: Any) -> dict[str, Callable[[], object]]:
    return {name: call for name, call in ((OURS, ours), (peer, theirs), (PLAIN, plain)) if call}


def build(case: Case, device: str = "cpu") -> Problem:
    """Random tensors from a fixed seed."""
    w = case.workload
    q, k, v, options = make(w, device=device)
    per_pair = flops_per_pair(Phase.FORWARD, w.head_dim, w.dim_v)
    if case.laid == "packed":
        return _packed(w, q, k, v, options, per_pair)
    if case.laid == "dropout":
        options |= _DROPOUT
    dense, given = options, options
    if case.laid in LAID:
        structured, seen = (x.to(device) for x in LAID[case.laid](w))
        given, dense = {**options, "mask": structured}, {**options, "mask": seen}
    plain = Call(q, k, v, {"causal": w.causal} if w.causal else {}) if case.plain else None
    return Problem(
        ours=Call(q, k, v, given),
        plain=Call(*make(case.dense, device=device)) if case.dense else plain,
        torch=None if _OURS_ALONE & options.keys() else sdpa(q, k, v, dense),
        samples=(Sample(q, k, v, dense),),
        flops=per_pair * _pairs(w, dense.get("mask")),
        plain_flops=per_pair * _pairs(case.dense or replace(w, window=None)),
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Call:
    """torch SDPA on the same call; a window, and causal beside a mask or bias, are part of its mask there,
    which is a bias if it is a float one."""
    causal, mask, bias = options.get("causal", False), options.get("mask"), options.get("bias")
    if options.get("window") or (causal and (mask is not None or bias is not None)):
        seen = band(q.shape[2], k.shape[2], bool(causal), options.get("window")).to(q.device)
        mask = seen if mask is None else mask & seen
        causal = False
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    grouped = q.shape[1] != k.shape[1]
    return Call(q, k, v, {"attn_mask": mask, "is_causal": bool(causal), "enable_gqa": grouped})


def _pairs(w: Workload, mask: Tensor | None = None) -> int:
    """Visible (query, key) pairs over all heads and the batch."""
    n, m = w.seqlen_q, w.seqlen_k
    if mask is None:
        seen = visible_pairs(n, m, offset=m - n, causal=bool(w.causal), window=w.window or (None, None))
        return w.batch * w.heads * seen
    mask = mask & band(n, m, True, None).to(mask.device) if w.causal else mask
    return int(mask.expand(w.batch, w.heads, n, m).sum())


def _blocks(w: Workload) -> tuple[Mask, Tensor]:
    """Lists of blocks of a grid of which each row of blocks sees its own and three others, and the same mask
    as a bool tensor."""
    side = -(-w.seqlen_q // _BLOCKS)
    count = -(-w.seqlen_q // side)
    score = torch.rand(count, count, generator=torch.Generator().manual_seed(0))
    seen = score.fill_diagonal_(2.0).topk(min(_SEEN_BLOCKS, count), -1).indices
    grid = torch.zeros(1, 1, count, count, dtype=torch.bool).scatter_(-1, seen[None, None], True)
    whole = grid.repeat_interleave(side, -2).repeat_interleave(side, -1)[..., : w.seqlen_q, : w.seqlen_k]
    return Mask.blocks(grid, rows=side, keys=side), whole.contiguous()


def _documents(w: Workload) -> tuple[Mask, Tensor]:
    """Documents of random lengths, end to end."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_DOCUMENTS, (w.batch, w.seqlen_q), generator=generator).int().sort(-1).values
    return Mask.segments(ids, ids), (ids[:, None, :, None] == ids[:, None, None, :])


# What may lie over a workload -> (the operand as polyflash takes it, the same as a bool tensor)
LAID: dict[str, Callable[[Workload], tuple[Any, Tensor]]] = {
    "blocks": _blocks,
    "blocks as bool": lambda w: (_blocks(w)[1],) * 2,
    "documents": _documents,
}


def lengths(w: Workload) -> Tensor:
    """Members of a packed batch, from 1/64 of the longest to the longest, in no order."""
    even = torch.linspace(max(1, w.seqlen_q // 64), w.seqlen_q, w.batch).round().int()
    return even[torch.randperm(w.batch, generator=torch.Generator().manual_seed(0))]


def _packed(
    w: Workload, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], per_pair: float
) -> Problem:
    """Members of many lengths end to end; torch has them padded to the longest (padding is not timed), with a
    key mask unless causal hides the padding by itself. The plain call is dense: members of the longest
    length, as many as make about the same work."""
    sizes, one = lengths(w), replace(w, batch=1)
    live = (torch.arange(w.seqlen_q) < sizes[:, None]).to(q.device)

    def packed(x: Tensor) -> Tensor:
        """(members, heads, longest, dim) -> (total, heads, dim)."""
        return x.transpose(1, 2)[live]

    def padded(x: Tensor) -> Tensor:
        """(total, heads, dim) -> (members, heads, longest, dim), 0 in the padding."""
        whole = x.new_zeros(w.batch, w.seqlen_q, *x.shape[1:])
        whole[live] = x
        return whole.transpose(1, 2).contiguous()

    bounds = pad(sizes.cumsum(0), (1, 0)).int().to(q.device)
    given = {**options, "max_seqlen_q": w.seqlen_q, "max_seqlen_k": w.seqlen_k}
    given |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    pairs = sum(_pairs(replace(one, seqlen_q=n, seqlen_k=n)) for n in sizes.tolist())
    members = min(w.batch, max(1, round(pairs / _pairs(one))))

    def sample(member: int) -> Sample:
        n, first = int(sizes[member]), int(bounds[member])
        a, b, c = (x[member : member + 1, :, :n] for x in (q, k, v))
        return Sample(a, b, c, options, lambda x: x[first : first + n].transpose(0, 1)[None])

    order = sizes.argsort().tolist()
    return Problem(
        ours=Call(packed(q), packed(k), packed(v), given),
        plain=Call(q[:members], k[:members], v[:members], options),
        torch=sdpa(q, k, v, options if w.causal else {**options, "mask": live[:, None, None, :]}),
        samples=tuple(map(sample, (order[0], order[len(order) // 2], order[-1]))),
        flops=per_pair * pairs,
        plain_flops=per_pair * members * _pairs(one),
        packed=packed,
        padded=padded,
    )


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


@dataclass(frozen=True)
class Gradient:
    """One arm: the gradients of `call` in the direction `dout`. `out` is its output, made once, if the
    backward pass alone is timed; None: each call makes its own."""

    call: Call
    leaves: Found
    dout: Tensor
    out: Tensor | None = None

    @staticmethod
    def of(call: Call, dout: Tensor, timed: str) -> Gradient:
        """The arm on operands of its own graph, which share the memory of those given."""
        named = {**{name: name for name in _OPERANDS}, "attn_mask": "bias"}
        has = {
            n: x for n, x in call.options.items() if n in named and x is not None and x.is_floating_point()
        }
        given, of = {n: _leaf(x) for n, x in has.items()}, {n: _leaf(getattr(call, n)) for n in "qkv"}
        call = replace(call, **of, options={**call.options, **given})
        with torch.enable_grad():
            out = call() if timed == BACKWARD else None
        return Gradient(call, of | {named[n]: x for n, x in given.items()}, dout, out)

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
        plan = polyflash.explain(self.call.q, self.call.k, self.call.v, **self.call.options)
        last = plan.backward.backend if plan.backward else None
        both = (last,) if self.out is not None else (plan.backend, last)
        return "/".join(dict.fromkeys(name or "" for name in both))


@dataclass(frozen=True, kw_only=True)
class Gradients(Timed):
    """Timed gradients. `torch` is None where torch SDPA has no such operand."""

    problem: Problem
    ours: Gradient
    torch: Gradient | None

    def check(self) -> tuple[float, Accuracy, Accuracy]:
        """The worst row's relative difference between any of our gradients and the peer's (those of our torch
        row if there is no peer), and the errors of both."""
        other = self.torch or Gradient.of(self.problem.ours.on("torch"), self.ours.dout, STEP)
        packed = self.problem.packed if self.torch else lambda x: x
        found, room = self.ours.found, self.room()
        expected = {n: x if n in _OPERANDS else packed(x) for n, x in other.found.items()}
        difference = max(worst_row(found[name], expected[name], room[name]) for name in found)
        errors = []
        for s in self.problem.samples:
            sides = (room, found, expected)
            parts = [{n: x if n in _OPERANDS else s.of(x) for n, x in of.items()} for of in sides]
            errors.append(sampled_gradients(s, s.of(self.ours.dout), parts[0], parts[1:]))
        ours, theirs = (reduce(or_, of) for of in zip(*errors, strict=True))
        return difference, ours, theirs

    def room(self) -> Found:
        """By how much gradients may be off beside their own size, over the tolerance. Every pass that stores
        no weights takes Σ dO·O of an output rounded by up to half a unit and shares that error out by weight
        P, Σ_j P·k to dq and Σ_i P·q to dk: made by what is not under test, attention over k in place of v,
        and the gradient of that. It is all there is of dq where a query sees one key. Where sums are no wider
        than the output, their order adds to it. Of a bias it is the error times P itself, over the scale."""
        call, peer, packed = self.ours.call, self.problem.torch, self.problem.packed
        with torch.enable_grad():
            out = (call() if self.ours.out is None else self.ours.out).detach()
            scale, sums = call.q.shape[-1] ** -0.5, torch.promote_types(out.dtype, torch.float32)
            halves = _HALVES if out.dtype is sums else 1
            tolerance = TOLERANCE[str(out.dtype).removeprefix("torch.")]
            unit = 0.5 * halves * torch.finfo(out.dtype).eps / tolerance
            blur = unit * scale * (self.ours.dout * out).abs().to(sums).sum(-1, keepdim=True)
            direction = (blur * self.problem.ours.q).to(out.dtype)
            if peer:
                over, direction = peer, self.problem.padded(direction)
            else:
                over = self.problem.ours.on("torch")
                over.options["dropout_p"] = 0.0
            k = _leaf(over.k)
            mixed = replace(over, v=k)()
            (of_k,) = torch.autograd.grad(mixed, k, direction)
        rooms = {"q": blur * packed(mixed.detach()), "k": packed(of_k)}
        mask = peer.options["attn_mask"] if peer else None
        if peer and mask is not None and mask.is_floating_point():
            p = (scale * (peer.q.to(sums) @ peer.k.to(sums).mT) + mask).softmax(-1)
            rooms["bias"] = (p.mul_(blur) / scale).sum_to_size(mask.shape)
        return {n: rooms.get(n, torch.zeros_like(x)) for n, x in self.ours.leaves.items()}


def differentiated(problem: Problem, timed: str, peer: str = "") -> Gradients:
    """The problem's gradients, `timed` BACKWARD or STEP."""
    dims = problem.ours.q.shape[-1], problem.ours.v.shape[-1]
    forward, backward = (flops_per_pair(phase, *dims) for phase in (Phase.FORWARD, Phase.BACKWARD))
    factor = (backward if timed == BACKWARD else forward + backward) / forward

    def arm(call: Call) -> Gradient:
        shape, generator = (*call.q.shape[:-1], call.v.shape[-1]), torch.Generator().manual_seed(_SEED)
        dout = torch.randn(shape, generator=generator, dtype=torch.float64).to(call.q)
        return Gradient.of(call, dout, timed)

    ours, plain = arm(problem.ours), problem.plain and arm(problem.plain)
    other = problem.torch and Gradient.of(problem.torch, problem.padded(ours.dout), timed)
    arms, flops = arms_of(ours, peer, other, plain), (factor * problem.flops, factor * problem.plain_flops)
    about: dict[str, Any] = {"problem": problem, "ours": ours, "torch": other}
    return Gradients(arms, (), problem.samples, *flops, ours.backend, **about)


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
        relative = furthest = 0.0
        for name, right in exact.items():
            place = (entries, kv) if name in ("k", "v") else at
            got, slack = (
                x[name][at[1]] if name == "sinks" else part_of(x[name], *place) for x in (gradients, room)
            )
            relative = max(relative, worst_row(got.double(), right, slack))
            furthest = max(furthest, largest(got - right))
        errors.append(Accuracy(relative, relative, furthest, 0.0, at[1].stop - at[1].start, q.shape[2]))
    return errors


def _oracle(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: dict[str, Any]) -> Found:
    """Float64 gradients of the oracle, block by block of rows, so that memory is bounded at any length; of
    all rows at once with dropout, whose counter begins at the first one."""
    given = {"q": q, "k": k, "v": v} | {n: options[n] for n in _OPERANDS if n in options}
    leaves = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    rest = {n: x for n, x in options.items() if n not in ("mask", *_OPERANDS)}
    rest |= {"sinks": leaves["sinks"]} if "sinks" in leaves else {}
    offset, scores = k.shape[2] - q.shape[2], q.shape[0] * q.shape[1] * k.shape[2]
    rows = q.shape[2] if "dropout_p" in options else max(1, _BLOCK_SCORES // scores)
    totals = {name: torch.zeros_like(x) for name, x in leaves.items()}
    laid = {"mask": options.get("mask"), "bias": leaves.get("bias")}
    for start in range(0, q.shape[2], rows):
        block = slice(None), slice(None), slice(start, start + rows)
        seen = rest | {n: part_of(x, *block) for n, x in laid.items() if x is not None}
        out, _ = attention_reference(
            leaves["q"][block], leaves["k"], leaves["v"], q_offset=offset + start, **seen
        )
        parts = torch.autograd.grad(out, tuple(leaves.values()), dout[block].double())
        for total, part in zip(totals.values(), parts, strict=True):
            total += part
    return totals
