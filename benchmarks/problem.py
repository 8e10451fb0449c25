"""The tensors of one row of the benchmark and the calls on them: ours, our plain one, torch's.

Where a structured operand of ours has no form in torch (block lists, segments, packed members), torch gets
the same problem as its users write it: a bool tensor, or padding and a key mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks.cases import Case
from polyflash.bench.check import Accuracy, sampled_error
from polyflash.bench.suite import band
from polyflash.compare import worst_row
from polyflash.mask import Mask, visible_pairs
from polyflash.spec import Phase
from polyflash.work import flops_per_pair
from polyflash.workloads import Workload, make

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

    def to(self, device: str) -> Call:
        return Call(self.q.to(device), self.k.to(device), self.v.to(device), _moved(self.options, device))

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

    def to(self, device: str) -> Sdpa:
        mask = None if self.mask is None else self.mask.to(device)
        q, k, v = (x.to(device) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, mask=mask)

    def __call__(self) -> Tensor:
        return scaled_dot_product_attention(
            self.q, self.k, self.v, attn_mask=self.mask, is_causal=self.causal, enable_gqa=self.grouped
        )


@dataclass(frozen=True)
class Sample:
    """A dense problem that float64 looks at, and the rows it has in packed tensors of ours."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    rows: slice | None = None

    def to(self, device: str) -> Sample:
        q, k, v = (x.to(device) for x in (self.q, self.k, self.v))
        return Sample(q, k, v, _moved(self.options, device), self.rows)

    def of(self, x: Tensor) -> Tensor:
        """Its part of a tensor in the shape of ours, as (batch, heads, seqlen, head_dim)."""
        return x if self.rows is None else x[self.rows].transpose(0, 1)[None]


@dataclass(frozen=True)
class Problem:
    """`torch` is None where torch SDPA has no such operand; `packed` brings its tensors into the shape of
    ours, `padded` ours into the shape of torch's. FLOPs are those of visible pairs, forward."""

    ours: Call
    plain: Call | None
    torch: Callable[[], Tensor] | None  # or another peer
    samples: tuple[Sample, ...]
    flops: float
    plain_flops: float
    packed: Callable[[Tensor], Tensor] = lambda x: x
    padded: Callable[[Tensor], Tensor] = lambda x: x

    def to(self, device: str) -> Problem:
        """The same problem with all its tensors on a device, before a peer other than SDPA took its place."""
        if device == "cpu":
            return self
        return replace(
            self,
            ours=self.ours.to(device),
            plain=self.plain and self.plain.to(device),
            torch=self.torch.to(device) if isinstance(self.torch, Sdpa) else None,
            samples=tuple(s.to(device) for s in self.samples),
        )

    def error(self, out: Tensor) -> Accuracy:
        """Of an output in the shape of ours, against float64."""
        found = (sampled_error(s.q, s.k, s.v, s.of(out), None, s.options) for s in self.samples)
        return reduce(or_, found)

    def check(self) -> tuple[float, Accuracy, Accuracy]:
        """The worst row's relative difference between our output and the peer's (that of our torch row if
        there is no peer), and the errors of both."""
        out, expected = self.ours(), self.packed(self.torch()) if self.torch else self.ours.on("torch")()
        return worst_row(out, expected), self.error(out), self.error(expected)


def _moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    return {n: x.to(device) if isinstance(x, (Tensor, Mask)) else x for n, x in options.items()}


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
    grouped = q.shape[1] != k.shape[1]
    causal, mask, bias = options.get("causal", False), options.get("mask"), options.get("bias")
    if options.get("window") or (causal and (mask is not None or bias is not None)):
        seen = band(q.shape[2], k.shape[2], bool(causal), options.get("window"))
        mask = seen if mask is None else mask & seen
        causal = False
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    return Sdpa(q, k, v, mask, bool(causal), grouped)


def _pairs(w: Workload, mask: Tensor | None) -> int:
    """Visible (query, key) pairs over all heads and the batch."""
    whole = w.batch * w.heads
    if mask is None:
        offset = w.seqlen_k - w.seqlen_q
        pairs = visible_pairs(
            w.seqlen_q, w.seqlen_k, offset=offset, causal=bool(w.causal), window=w.window or (None, None)
        )
        return whole * pairs
    if w.causal:
        mask = mask & band(w.seqlen_q, w.seqlen_k, True, None)
    return int(mask.expand(w.batch, w.heads, w.seqlen_q, w.seqlen_k).sum())


def _blocks(w: Workload) -> tuple[Tensor, int]:
    """A block grid (1, 1, row blocks, key blocks) of which each row sees its own block and three others, and
    the elements of a block's side."""
    side = -(-w.seqlen_q // _BLOCKS)
    count = -(-w.seqlen_q // side)
    score = torch.rand(count, count, generator=torch.Generator().manual_seed(0))
    score.fill_diagonal_(2.0)
    seen = score.topk(min(_SEEN_BLOCKS, count), -1).indices
    return torch.zeros(1, 1, count, count, dtype=torch.bool).scatter_(-1, seen[None, None], True), side


def _as_bool(w: Workload, grid: Tensor, side: int) -> Tensor:
    whole = grid.repeat_interleave(side, -2).repeat_interleave(side, -1)
    return whole[..., : w.seqlen_q, : w.seqlen_k].contiguous()


def _laid_blocks(w: Workload) -> tuple[Mask, Tensor]:
    grid, side = _blocks(w)
    return Mask.blocks(grid, rows=side, keys=side), _as_bool(w, grid, side)


def _laid_bool(w: Workload) -> tuple[Tensor, Tensor]:
    whole = _as_bool(w, *_blocks(w))
    return whole, whole


def _laid_documents(w: Workload) -> tuple[Mask, Tensor]:
    """Documents of random lengths, end to end."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_DOCUMENTS, (w.batch, w.seqlen_q), generator=generator).int().sort(-1).values
    return Mask.segments(ids, ids), (ids[:, None, :, None] == ids[:, None, None, :])


# What may lie over a workload -> (the operand as polyflash takes it, the same as a bool tensor)
LAID: dict[str, Callable[[Workload], tuple[Any, Tensor]]] = {
    "blocks": _laid_blocks,
    "blocks as bool": _laid_bool,
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
        return Sample(a, b, c, options, slice(first, first + n))

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
