"""What a row times and what its results are held to; the forward pass of ours, our plain one and torch's.

Where a structured operand of ours has no form in torch (block lists, segments, packed members), torch gets
the same problem as its users write it: a bool tensor, or padding and a key mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks.cases import Case
from polyflash.bench.check import Accuracy, sampled_error
from polyflash.bench.suite import OURS, band
from polyflash.compare import worst_row
from polyflash.mask import Mask, visible_pairs
from polyflash.spec import Phase
from polyflash.work import flops_per_pair
from polyflash.workloads import Workload, make

PLAIN = "polyflash, plain"
_BLOCKS = 16  # block rows and block columns of a block-sparse mask
_SEEN_BLOCKS = 4  # of them per block row: a density of 25 %
_DOCUMENTS = 8
_DROPOUT = {"dropout_p": 0.1, "dropout_seed": 7}


@dataclass(frozen=True)
class Call:
    """polyflash on given tensors: `attention`, or `attention_varlen` if `options` hold packed lengths."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    def __call__(self) -> Tensor:
        run = polyflash.attention_varlen if "cu_seqlens_q" in self.options else polyflash.attention
        return run(self.q, self.k, self.v, **self.options)

    def on(self, backend: str) -> Call:
        """The same call on a backend by name."""
        return replace(self, options={**self.options, "backend": backend})

    @property
    def backend(self) -> str:
        """Who runs it."""
        return polyflash.explain(self.q, self.k, self.v, **self.options).backend or ""


@dataclass(frozen=True)
class Sdpa:
    """torch SDPA on given tensors; a float `mask` is a bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    grouped: bool

    def __call__(self) -> Tensor:
        return scaled_dot_product_attention(
            self.q, self.k, self.v, attn_mask=self.mask, is_causal=self.causal, enable_gqa=self.grouped
        )


@dataclass(frozen=True)
class Sample:
    """A dense problem that float64 looks at; `of` picks its part of a tensor in the shape of ours, as (batch,
    heads, seqlen, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Mapping[str, Any]
    of: Callable[[Tensor], Tensor] = lambda x: x


def error_of(samples: tuple[Sample, ...], out: Tensor) -> Accuracy:
    """The error of an output in the shape of ours against float64."""
    return reduce(or_, (sampled_error(s.q, s.k, s.v, s.of(out), None, s.options) for s in samples))


@dataclass(frozen=True)
class Timed:
    """`arms` by name, ours first; `outputs` give the same numbers in one shape, ours first. FLOPs, and the
    bytes that our call reads at least if it is held against memory, are those of our arm; `chosen` is what it
    was found to use."""

    arms: dict[str, Callable[[], object]]
    outputs: tuple[Callable[[], Tensor], ...]
    samples: tuple[Sample, ...]
    flops: float
    plain_flops: float
    backend: str
    bytes: int = 0
    chosen: dict[str, Any] = field(default_factory=dict)

    def check(self) -> tuple[float, Accuracy, Accuracy]:
        """The worst row's relative difference between our output and any other; errors of ours and of the
        last other one against float64."""
        ours, *others = outputs = [call() for call in self.outputs]
        difference = max((worst_row(ours, other) for other in others), default=0.0)
        return difference, error_of(self.samples, ours), error_of(self.samples, outputs[-1])


@dataclass(frozen=True)
class Problem:
    """`torch` is None where torch SDPA has no such operand; `packed` brings its tensors into the shape of
    ours, `padded` ours into the shape of torch's. FLOPs are those of visible pairs, forward."""

    ours: Call
    plain: Call | None
    torch: Sdpa | None
    samples: tuple[Sample, ...]
    flops: float
    plain_flops: float
    packed: Callable[[Tensor], Tensor] = lambda x: x
    padded: Callable[[Tensor], Tensor] = lambda x: x

    def error(self, out: Tensor) -> Accuracy:
        return error_of(self.samples, out)

    def timed(self, peer: str, theirs: Callable[[], Tensor] | None = None) -> Timed:
        """Against `theirs`, the peer's call if it is not torch SDPA's; checked against our torch row if there
        is no peer."""
        call = theirs or self.torch
        other = (lambda: self.packed(call())) if call else self.ours.on("torch")
        arms = arms_of(self.ours, peer, call, self.plain)
        return Timed(arms, (self.ours, other), self.samples, self.flops, self.plain_flops, self.ours.backend)


def arms_of(ours: Any, peer: str, theirs: Any, plain: Any) -> dict[str, Callable[[], object]]:
    return {name: call for name, call in ((OURS, ours), (peer, theirs), (PLAIN, plain)) if call}


def moved(x: Any, device: str) -> Any:
    """The same value with all its tensors on a device."""
    if isinstance(x, (Tensor, Mask)):
        return x.to(device)
    if isinstance(x, dict):
        return {name: moved(y, device) for name, y in x.items()}
    if isinstance(x, tuple):
        return tuple(moved(y, device) for y in x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: moved(getattr(x, f.name), device) for f in fields(x)})
    return x


def build(case: Case) -> Problem:
    """Random tensors from a fixed seed."""
    if case.laid == "packed":
        return _packed(case)
    w = case.workload
    q, k, v, options = make(w)
    if case.laid == "dropout":
        options |= _DROPOUT
    dense, given = options, options
    if case.laid in LAID:
        structured, seen = LAID[case.laid](w)
        given, dense = {**options, "mask": structured}, {**options, "mask": seen}
    plain = None
    if case.dense:
        plain = Call(*make(case.dense))
    elif case.plain:
        plain = Call(q, k, v, {"causal": w.causal} if w.causal else {})
    per_pair = flops_per_pair(Phase.FORWARD, w.head_dim, w.dim_v)
    has_peer = not {"alibi_slopes", "softcap", "sinks", "dropout_p"} & options.keys()
    return Problem(
        ours=Call(q, k, v, given),
        plain=plain,
        torch=sdpa(q, k, v, dense) if has_peer else None,
        samples=(Sample(q, k, v, dense),),
        flops=per_pair * _pairs(w, dense.get("mask")),
        plain_flops=per_pair * _pairs(case.dense or replace(w, window=None), None),
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Sdpa:
    """torch SDPA on the same call; a window, and causal beside a mask or bias, are part of its mask there."""
    causal, mask, bias = options.get("causal", False), options.get("mask"), options.get("bias")
    if options.get("window") or (causal and (mask is not None or bias is not None)):
        seen = band(q.shape[2], k.shape[2], bool(causal), options.get("window"))
        mask = seen if mask is None else mask & seen
        causal = False
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    return Sdpa(q, k, v, mask, bool(causal), q.shape[1] != k.shape[1])


def _pairs(w: Workload, mask: Tensor | None) -> int:
    """Visible (query, key) pairs over all heads and the batch."""
    if mask is None:
        n, m = w.seqlen_q, w.seqlen_k
        seen = visible_pairs(n, m, offset=m - n, causal=bool(w.causal), window=w.window or (None, None))
        return w.batch * w.heads * seen
    if w.causal:
        mask = mask & band(w.seqlen_q, w.seqlen_k, True, None)
    return int(mask.expand(w.batch, w.heads, w.seqlen_q, w.seqlen_k).sum())


def _blocks(w: Workload) -> tuple[Tensor, int, Tensor]:
    """A block grid (1, 1, row blocks, key blocks) of which each row sees its own block and three others, the
    elements of a block's side, and the same mask as a bool tensor."""
    side = -(-w.seqlen_q // _BLOCKS)
    count = -(-w.seqlen_q // side)
    score = torch.rand(count, count, generator=torch.Generator().manual_seed(0))
    score.fill_diagonal_(2.0)
    seen = score.topk(min(_SEEN_BLOCKS, count), -1).indices
    grid = torch.zeros(1, 1, count, count, dtype=torch.bool).scatter_(-1, seen[None, None], True)
    whole = grid.repeat_interleave(side, -2).repeat_interleave(side, -1)
    return grid, side, whole[..., : w.seqlen_q, : w.seqlen_k].contiguous()


def _laid_blocks(w: Workload) -> tuple[Mask, Tensor]:
    grid, side, whole = _blocks(w)
    return Mask.blocks(grid, rows=side, keys=side), whole


def _laid_documents(w: Workload) -> tuple[Mask, Tensor]:
    """Documents of random lengths, end to end."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_DOCUMENTS, (w.batch, w.seqlen_q), generator=generator).int().sort(-1).values
    return Mask.segments(ids, ids), (ids[:, None, :, None] == ids[:, None, None, :])


# What may lie over a workload -> (the operand as polyflash takes it, the same as a bool tensor)
LAID: dict[str, Callable[[Workload], tuple[Any, Tensor]]] = {
    "blocks": _laid_blocks,
    "blocks as bool": lambda w: (_blocks(w)[2],) * 2,
    "documents": _laid_documents,
}


def lengths(w: Workload) -> Tensor:
    """Members of a packed batch, from 1/64 of the longest to the longest, in no order."""
    even = torch.linspace(max(1, w.seqlen_q // 64), w.seqlen_q, w.batch).round().int()
    return even[torch.randperm(w.batch, generator=torch.Generator().manual_seed(0))]


def _packed(case: Case) -> Problem:
    """Members of many lengths end to end; torch has them padded to the longest (padding is not timed), with a
    key mask unless causal hides the padding by itself. The plain call is dense: members of the longest
    length, as many as make about the same work."""
    w = case.workload
    sizes = lengths(w)
    q, k, v, options = make(w)
    live = torch.arange(w.seqlen_q) < sizes[:, None]

    def packed(x: Tensor) -> Tensor:
        """(members, heads, longest, dim) -> (total, heads, dim)."""
        return x.transpose(1, 2)[live]

    def padded(x: Tensor) -> Tensor:
        """(total, heads, dim) -> (members, heads, longest, dim), 0 in the padding."""
        whole = x.new_zeros(w.batch, w.seqlen_q, *x.shape[1:])
        whole[live] = x
        return whole.transpose(1, 2).contiguous()

    bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    given = {
        **options, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds,
        "max_seqlen_q": w.seqlen_q, "max_seqlen_k": w.seqlen_k,
    }  # fmt: skip
    one = replace(w, batch=1)
    pairs = sum(_pairs(replace(one, seqlen_q=n, seqlen_k=n), None) for n in sizes.tolist())
    members = min(w.batch, max(1, round(pairs / _pairs(one, None))))
    per_pair = flops_per_pair(Phase.FORWARD, w.head_dim, w.dim_v)

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
        plain_flops=per_pair * members * _pairs(one, None),
        packed=packed,
        padded=padded,
    )
