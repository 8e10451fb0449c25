"""The public functions of `polyflash.parallel`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Never

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyflash import merging
from polyflash.arguments import Causal, Layout, Options, WindowSides
from polyflash.dtypes import BY_NAME
from polyflash.entry import Bound, Form, form_of
from polyflash.errors import UnsupportedError, described, spec_error
from polyflash.hints import answering, unexpected
from polyflash.mask import Mask
from polyflash.merging import AttentionOutput
from polyflash.parallel import calls, ulysses
from polyflash.parallel.calls import Ranks, Where
from polyflash.parallel.comm import Team, teams_of
from polyflash.parallel.cost import Explanation, explained
from polyflash.parallel.dtensors import local_of
from polyflash.parallel.handshake import KINDS, words_of
from polyflash.parallel.schedule import ORDERS, Shards
from polyflash.parallel.sums import sums_of

Order = Literal["zigzag", "contiguous"]
Method = Literal["all_gather", "ring", "ulysses", "ulysses+ring"]


@answering
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, mesh: Any = None, method: Method | None = None,
    order: Order = "zigzag", seqlens: tuple[int, int] | None = None, handshake: bool = True,
    causal: Causal = False, window: WindowSides | None = None, mask: Tensor | Mask | None = None,
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, scale: float | None = None, kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None, q_offset: int | Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None, layout: Layout = "bhsd", return_lse: bool = False,
    batch_invariant: bool | None = None, backend: str | None = None, **unknown: Never,
) -> Tensor | AttentionOutput:  # fmt: skip
    """`polyflash.attention` of a sequence that is spread over the ranks of a process group.

    Every rank calls it with its own rows of q, k and v, as `split` gives them, and gets the results of its
    rows. DTensors that are sharded along their rows over one mesh dimension do as well: a rank's rows are its
    local ones, dealt in `order`, the mesh is theirs, and results are DTensors sharded likewise.

    All other arguments are those of the whole call, the same on every rank: masks, lengths and positions
    count rows and keys of the whole sequence. Differentiable: dq, dk and dv are those of this rank's rows and
    keys; gradients of `bias` and `sinks` are the shares of its rows, whose sum over ranks is the gradient, as
    for every parameter that ranks share. The backward pass is a call of all ranks too. Arguments not listed
    are those of `polyflash.attention`.

    Args:
        q: (batch, num_q_heads, rows, head_dim), or (batch, rows, num_q_heads, head_dim) with layout="bshd".
        k: (batch, num_kv_heads, keys, head_dim); the whole sequence may have another length than q's.
        v: (batch, num_kv_heads, keys, head_dim_v).
        group: a torch.distributed process group; None is the default one. gloo and NCCL.
        mesh: instead, a DeviceMesh of one dimension, or of two, (ranks of the ring, ranks that share heads).
        method: "ring": keys travel step by step, those that no row of the receiver sees not at all;
            "all_gather": all keys at once, some heads at a time; "ulysses": each rank gets all rows of some
            heads; "ulysses+ring", for a mesh of two dimensions. None takes what suits the call (`explain`).
        order: as the rows were cut by `split`. "zigzag" gives all ranks the same work under a causal mask.
        seqlens: rows of q and of k on all ranks together; None asks the other ranks in the handshake.
        handshake: compare the call with those of the other ranks by one small message before anything is
            sent, forward and backward. On a group without a CPU backend this synchronises with the device.
        mask: a `Mask`, whose ids or lists are those of the whole sequence, or a bool tensor
            that broadcasts to the scores of the whole call, of which each rank cuts what it needs.
        bias: likewise.
        dropout_seed: the same on every rank; None draws one from torch's default generator, which then must
            stand alike on all. The weights that one device drops are dropped, whatever the method and order.

    Returns:
        (batch, num_q_heads, rows, head_dim_v) in `layout`, in q's dtype; with return_lse=True an
        `AttentionOutput(out, lse)`, lse (batch, num_q_heads, rows). Bits repeat for a fixed number of ranks.

    Raises:
        SpecError: as `polyflash.attention`; ranks that disagree, on every rank alike; rows that `split` does
            not give. Where one rank refuses its arguments, the others say so.
        UnsupportedError: as `polyflash.attention`; gradients beside codes.
        RuntimeError: another rank ended, hung beyond the group's timeout, or made another call.

    Source: Liu et al., Ring Attention with Blockwise Transformers (2023); Dubey et al., The Llama 3 Herd of
    Models (2024), section 3.3; Jacobs et al., DeepSpeed Ulysses (2023)."""
    if unknown:
        raise unexpected(attention, unknown)
    options = Options(
        causal=causal,
        window=window,
        mask=mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        kv_lens=kv_lens,
        kv_starts=kv_starts,
        q_offset=q_offset,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    form = form_of(layout)
    q, k, v, mesh, wrap = local_of(q, k, v, 1 if form is Form.BSHD else 2, mesh, group)
    ranks, where = Ranks(*teams_of(group, mesh)), Where(method, order, seqlens, handshake)
    _, out, lse = _run(q, k, v, options, form, ranks, where)
    out = out.transpose(1, 2) if form is Form.BSHD else out
    if wrap is not None:
        out, lse = wrap(out, 1 if form is Form.BSHD else 2), wrap(lse, 2) if return_lse else lse
    return AttentionOutput(out, lse) if return_lse else out


@answering
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    group: Any = None,
    mesh: Any = None,
    method: Method | None = None,
    order: Order = "zigzag",
    handshake: bool = True,
    causal: Causal = False,
    window: WindowSides | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    batch_invariant: bool | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | AttentionOutput:
    """`polyflash.attention_varlen` of packed members that are spread over the ranks of a process group: long
    ones over all of them, others whole on one rank each, so that all have as many rows and as much work.

    cu_seqlens_q and cu_seqlens_k are those of the whole batch, the same on every rank, and their last bounds
    are its rows and keys. This rank's rows are what `split(x, cu_seqlens=...)` gives. The host reads the
    bounds. Arguments not listed are those of `polyflash.parallel.attention` and of
    `polyflash.attention_varlen`, whose lengths and positions count within a whole member.

    Args:
        q: (rows, num_q_heads, head_dim).
        k: (keys, num_kv_heads, head_dim).
        v: (keys, num_kv_heads, head_dim_v).
        cu_seqlens_q: int32 or int64 (members + 1,), of the whole batch.
        cu_seqlens_k: likewise.

    Returns:
        (rows, num_q_heads, head_dim_v); with return_lse=True an `AttentionOutput(out, lse)`, lse
        (num_q_heads, rows).

    Raises:
        SpecError, UnsupportedError, RuntimeError: as `polyflash.parallel.attention`. dropout_p is refused."""
    if unknown:
        raise unexpected(attention_varlen, unknown)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        change = "polyflash.parallel.attention() takes unpacked batches."
        raise spec_error("cu_seqlens", "None", "two int32 tensors", change)
    options = Options(
        causal=causal,
        window=window,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        kv_lens=kv_lens,
        kv_starts=kv_starts,
        q_offset=q_offset,
        dropout_p=dropout_p,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        backend=backend,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    q, k, v, mesh, wrap = local_of(q, k, v, 0, mesh, group)
    ranks, where = Ranks(*teams_of(group, mesh)), Where(method, order, None, handshake)
    bound, out, lse = _run(q, k, v, options, Form.PACKED, ranks, where)
    returned = bound.returned(out, lse)
    if wrap is None:
        return returned
    if isinstance(returned, Tensor):
        return wrap(returned, 0)
    return AttentionOutput(wrap(returned.out, 0), wrap(returned.lse, 1))


def _run(*given: Any) -> tuple[Bound, Tensor, Tensor]:
    """`calls.run`. Dynamo cannot trace collectives that are chosen by lengths: a compiled model breaks its
    graph here. Others do not wait for Dynamo's import."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(calls.run)(*given)  # type: ignore[no-any-return]
    return calls.run(*given)


class _Elsewhere(Team):
    """Ranks that need not be here: a size alone."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.calls = size, 0, 0


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: int | tuple[int, int],
    method: Method | None = None,
    order: Order = "zigzag",
    seqlens: tuple[int, int] | None = None,
    causal: Causal = False,
    window: WindowSides | None = None,
    mask: Tensor | Mask | None = None,
    q_offset: int | None = None,
    layout: Layout = "bhsd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Explanation:
    """The exchange that `polyflash.parallel.attention(...)` would take on `ranks` ranks, and why; what every
    rank sends and computes. Sends nothing and needs no process group.

    Args:
        q: the rows of rank 0, or those of any rank if all hold as many; k and v likewise. All may be meta
            tensors.
        ranks: how many there are, or (ranks of the ring, ranks that share heads).
        seqlens: rows of q and of k on all ranks together; None: as many on every rank as here.

    The result prints itself. Its times are of a model, by rates of two H100, whatever the GPU."""
    sizes = (ranks, 1) if isinstance(ranks, int) else tuple(ranks)
    if len(sizes) != 2 or any(type(n) is not int or n < 1 for n in sizes):
        raise spec_error("ranks", described(ranks), "an int, or two ints, 1 or more", "A mesh has two.")
    there = Ranks(_Elsewhere(sizes[0]), None if isinstance(ranks, int) else _Elsewhere(sizes[1]))
    where = Where(method, order, seqlens, False)
    calls.checked(where, there)
    given: dict[str, Any] = {"causal": causal, "window": window, "mask": mask, "q_offset": q_offset}
    options = Options(**given, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    part = calls.part_of(q, k, v, options, form_of(layout) if cu_seqlens_q is None else Form.PACKED)
    bound = part.bound
    everyone = sizes[0] * sizes[1]
    rows = seqlens or (bound.q.shape[2] * everyone, bound.k.shape[2] * everyone)
    call = calls.whole_call(part, there, where._replace(seqlens=rows), None)
    chosen, why = (method, "asked for by method=") if method else calls.method_of(bound, call)
    notes = []
    if chosen.startswith("ulysses"):
        sharing = sizes[1] if there.heads else sizes[0]
        copies = ulysses.deal(bound.q.shape[1], bound.k.shape[1], sharing)[1]
        count = sum(map(len, copies))
        if count > bound.k.shape[1]:
            notes.append(
                f"{bound.k.shape[1]} key heads go to {sharing} ranks as {count}: some are sent twice"
            )
    if q.element_size() < 4 and q.device.type != "cpu" and "ring" in chosen:
        notes.append(f"kernels round the result of each step to {q.dtype} before it is merged in float32")
    if "ring" in chosen and call.keeps(bound.q, bound.k):
        notes.append("keys of both ranks stay for the backward pass, which sends none")
    if call.sight.offsets is None:
        notes.append("positions differ between requests or are on a device: no step is left out for them")
    return explained(calls.problem_of(bound, call), chosen, why, tuple(notes))


def split(
    x: Tensor,
    *,
    group: Any = None,
    mesh: Any = None,
    dim: int = 2,
    order: Order = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """This rank's rows of a whole tensor, along `dim`: q, k, v, ids, positions, labels alike.

    Any number of rows: ranks differ by two rows at most, and of few rows some get none. With `cu_seqlens`,
    int (members + 1,), of packed members: who holds which follows from their lengths alone, and order
    "contiguous" cuts every one of them. Differentiable; sends nothing.

    Raises:
        SpecError: no such dimension; bounds that do not end at the rows of x."""
    ranks = Ranks(*teams_of(group, mesh))
    dim = _dim(x, dim)
    shards = _shards(ranks, order, x.shape[dim], cu_seqlens)
    return x.index_select(dim, torch.from_numpy(shards.positions(ranks.rank)).to(x.device))


def restore(
    x: Tensor,
    *,
    group: Any = None,
    mesh: Any = None,
    dim: int = 2,
    order: Order = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The rows of all ranks in their order, on every rank: the way back from `split`.

    Differentiable: a rank's gradient is the sum, in the order of ranks, of what all ranks did with its rows.
    A loss that every rank computes of the whole result therefore counts once per rank.

    Raises:
        SpecError: ranks that disagree, on every rank alike; rows that `split` does not give."""
    ranks = Ranks(*teams_of(group, mesh))
    dim = _dim(x, dim)
    calls.check_order(order)
    rows, tracked = x.shape[dim], torch.is_grad_enabled() and x.requires_grad
    said = {"function": KINDS.index("restore"), "order": ORDERS.index(order), "rows of q": rows}
    said |= {"head_dim": math.prod(x.shape[:dim] + x.shape[dim + 1 :]), "gradients": int(tracked)}
    shards = _shards(ranks, order, sum(ranks.meet(words_of(said))()[0]), cu_seqlens)
    if rows != shards.held(ranks.rank):
        wanted = f"{shards.held(ranks.rank)}, what split() gives rank {ranks.rank} of {shards.rows}"
        raise spec_error("x rows", rows, wanted, "Pass the order= and cu_seqlens= of split().")
    return _Restore.apply(x.movedim(dim, 0), ranks, shards).movedim(0, dim)  # type: ignore[no-any-return]


def merge(
    out: Tensor, lse: Tensor, *, group: Any = None, mesh: Any = None, layout: str = "bhsd"
) -> AttentionOutput:
    """`polyflash.merge` of what every rank has for the same rows over its own keys: decode over a cache whose
    keys are spread over ranks, dense, in pages or as codes. For inference.

        parallel.merge(*polyflash.attention_paged(q, *own_pages, return_lse=True), layout="thd")

    Args:
        out: as a call with return_lse=True gave it; the rows are the same on every rank, the keys are not.
        lse: likewise. Sinks are given to the call of one rank.
        layout: that of `polyflash.merge`.

    Returns:
        An `AttentionOutput` in float32 (float64 of float64), bitwise the same on every rank.

    Raises:
        SpecError: as `polyflash.merge`; ranks that disagree. UnsupportedError: an input needs a gradient."""
    ranks = Ranks(*teams_of(group, mesh))
    if torch.is_grad_enabled() and (out.requires_grad or lse.requires_grad):
        text = "parallel.merge has no gradients: it is for inference"
        raise UnsupportedError(f"{text}. Use torch.no_grad(), or parallel.attention() to train")
    sizes = dict(zip(("batch", "num_q_heads", "head_dim", "head_dim_v"), (*out.shape, 1)[:4], strict=True))
    kind = list(BY_NAME).index(str(out.dtype).removeprefix("torch."))
    ranks.meet(words_of({"function": KINDS.index("merge"), "dtype": kind, **sizes}))()
    parts = [(out, lse)]
    for team in (ranks.heads, ranks.ring):
        if team is not None:
            waits = [team.gather(x, "merged results") for x in parts[0]]
            parts = [merging.merge(list(zip(*(wait() for wait in waits), strict=True)), layout=layout)]
    return AttentionOutput(*parts[0])


def _dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
        wanted = f"a dimension of x, {described(x)}"
        raise spec_error("dim", dim, wanted, "It is that of the rows: 2 of (batch, heads, rows, head_dim).")
    return dim % x.ndim


def _shards(ranks: Ranks, order: str, rows: int, cu_seqlens: Tensor | None) -> Shards:
    calls.check_order(order)
    lengths = (rows,) if cu_seqlens is None else calls.read_once(calls.bounded, cu_seqlens)
    if sum(lengths) != rows:
        wanted = f"{rows}, the rows of all ranks"
        raise spec_error("cu_seqlens", f"{sum(lengths)} last", wanted, "Cut x where the last member ends.")
    return Shards(lengths, ranks.ring.size, order, ranks.pieces)


class _Restore(torch.autograd.Function):
    """(rows, ...) of every rank, in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, shards: Shards) -> Tensor:
        ctx.how = ranks, shards
        everyone = range(shards.count * shards.pieces)
        whole = x.new_zeros((max(map(shards.held, everyone)), *x.shape[1:]))
        whole[: x.shape[0]] = x
        for team in (ranks.heads, ranks.ring):
            if team is not None:
                whole = team.gather(whole, "restored rows")()
        who, at = (torch.from_numpy(i).to(x.device) for i in shards.natural())
        return whole.flatten(0, 1)[who, at] if ranks.heads else whole[who, at]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ranks, shards = ctx.how
        own = replace(shards, pieces=1)
        parts = [grad[torch.from_numpy(own.positions(i)).to(grad.device)] for i in range(own.count)]
        total = _summed(ranks.ring, parts)
        if ranks.heads is not None:
            first = ranks.ring.rank * shards.pieces
            total = _summed(ranks.heads, total.split([shards.held(first + i) for i in range(shards.pieces)]))
        return total.to(grad.dtype), None, None


def _summed(team: Team, parts: Sequence[Tensor]) -> Tensor:
    """The sum of what all ranks have for this one, in the order of ranks."""
    own = parts[team.rank]
    total = torch.zeros_like(own, dtype=sums_of(own))
    for part in team.swap(parts, [tuple(own.shape)] * team.size, "returned gradients of restored rows")():
        total += part
    return total
