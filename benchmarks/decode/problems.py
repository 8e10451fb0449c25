"""What a row of the suite "decode" times: the arms of each of its tables, on keys that no cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.decode import stream
from benchmarks.decode.keys import (
    KeySet,
    Pool,
    Turn,
    gathered,
    key_set,
    key_sets,
    page_reads,
    pool,
    random_pool,
    readers,
)  # fmt: skip
from benchmarks.problem import PLAIN, Sample, Timed
from polyflash.bench.suite import OURS, SDPA
from polyflash.bench.timing import Arm, compare
from polyflash.groups import explain_groups
from polyflash.kvcache import KVCache, Request
from polyflash.spec import Phase
from polyflash.work import flops_per_pair
from polyflash.workloads import Workload

FOLDED = "torch SDPA, query heads as rows"
OWN_COPIES = "polyflash, a prefix of each request's own"
ONE_PAGE = "polyflash, one page for all keys"
BEST_SPLIT, INVARIANT = "polyflash, the best split", "polyflash, batch_invariant=True"
SPLITS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)


def build(case: Case) -> Timed:
    return _BUILDERS[case.part](case)


def _queries(w: Workload, *shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return drawn.to(getattr(torch, w.dtype))


def _timed(
    case: Case, arms: dict[str, Any], outputs: Sequence[Callable[[], Tensor]],
    samples: Sequence[Sample], size: int, keys: int, plan: Any, **chosen: Any,
) -> Timed:  # fmt: skip
    """`keys` are seen by every row of one request; what causal hides of the last few is not worth
    it. `size`: bytes that our call reads at least; `plan`: of our call."""
    w = case.workload
    flops = flops_per_pair(Phase.FORWARD, w.head_dim, w.dim_v) * w.heads * w.seqlen_q * keys
    name = plan.chosen.name if plan.chosen else ""
    return Timed(arms, tuple(outputs), tuple(samples), flops, flops, name, size, chosen)


def _whole(
    case: Case, q: Tensor, turn: Turn[KeySet], calls: dict[str, Callable[[KeySet], Tensor]], **chosen: Any
) -> Timed:
    """Calls on whole key sets, beside what only reads those."""
    w, first, causal = case.workload, turn.things[0], q.shape[2] > 1
    return _timed(
        case, {**{name: turn.each(call) for name, call in calls.items()}, **readers(turn)},
        [partial(call, first) for call in calls.values()],
        [Sample(q, first.k, first.v, {"causal": causal})], first.bytes, w.batch * w.seqlen_k,
        polyflash.explain(q, first.k, first.v, causal=causal), **chosen,
    )  # fmt: skip


def _step(case: Case) -> Timed:
    """Against torch SDPA, and against SDPA that gets the query heads of a kv head as rows, which spares its
    keys the repetition."""
    w = case.workload
    q = _queries(w, w.batch, w.heads, w.seqlen_q, w.head_dim)
    group, causal = w.heads // w.kv_heads, w.seqlen_q > 1
    seen = torch.ones(w.seqlen_q, w.seqlen_k, dtype=torch.bool).tril(w.seqlen_k - w.seqlen_q)
    mask, repeated = (seen, seen.repeat(group, 1)) if causal else (None, None)
    folded = q.view(w.batch, w.kv_heads, group * w.seqlen_q, w.head_dim)
    calls: dict[str, Callable[[KeySet], Tensor]] = {
        OURS: lambda s: polyflash.attention(q, s.k, s.v, causal=causal),
        SDPA: lambda s: scaled_dot_product_attention(q, s.k, s.v, attn_mask=mask, enable_gqa=group > 1),
    }
    if group > 1:
        calls[FOLDED] = lambda s: scaled_dot_product_attention(folded, s.k, s.v, attn_mask=repeated).view_as(
            q
        )
    return _whole(case, q, Turn(key_sets(w)), calls)


def _few_rows(case: Case) -> Timed:
    """A step with nothing beside it but torch."""
    made = _step(case)
    return replace(made, arms={name: made.arms[name] for name in (OURS, SDPA)})


def _paged(case: Case) -> Timed:
    """Pages, shuffled unless said otherwise, against the same keys in one piece."""
    w, sets = case.workload, key_sets(case.workload)
    turn, causal = Turn(sets), w.seqlen_q > 1
    outer, ordered = case.laid.startswith(cases.HEADS_OUTER), case.laid.endswith(cases.IN_ORDER)
    pools, large = (
        [pool(s.k, s.v, size, heads_outer=outer, in_order=ordered) for s in sets]
        for size in (case.page_size, w.seqlen_k)
    )
    pages = Turn([page_reads(p) for p in pools])
    q = _queries(w, 1, w.heads, w.seqlen_q, w.head_dim)
    packed = q[0].transpose(0, 1).contiguous()  # rows, heads, channels
    options: dict[str, Any] = {"kv_lens": torch.tensor([w.seqlen_k], dtype=torch.int32)}
    if causal:
        bounds = torch.tensor([0, w.seqlen_q], dtype=torch.int32)
        options |= {"cu_seqlens_q": bounds, "max_seqlen_q": w.seqlen_q, "causal": True}

    def paged(p: Pool) -> Tensor:
        return polyflash.attention_paged(packed, p.k, p.v, p.table, **options)

    def plain(s: KeySet) -> Tensor:
        return polyflash.attention(q, s.k, s.v, causal=causal)

    def dense(p: Pool) -> Tensor:
        return paged(p).transpose(0, 1)[None]

    first = sets[0]
    arms = {OURS: Turn(pools).each(paged), PLAIN: turn.each(plain), ONE_PAGE: Turn(large).each(paged)}
    arms |= readers(turn) | {n: pages.each(partial(_read, n)) for n in pages.things[0]}
    plan = polyflash.explain(packed, pools[0].k, pools[0].v, page_table=pools[0].table, **options)
    outputs = (partial(dense, pools[0]), partial(plain, first), partial(dense, large[0]))
    return _timed(
        case, arms, outputs, [Sample(q, first.k, first.v, {"causal": causal})], first.bytes, w.seqlen_k, plan
    )


def _read(name: str, reads: dict[str, stream.Read]) -> None:
    reads[name]()


def lengths(case: Case) -> list[int]:
    """Of a ragged batch, 1 to the longest, in no order."""
    w = case.workload
    if case.laid == cases.EVEN:
        spaced = torch.linspace(1, w.seqlen_k, w.batch)
    else:
        spaced = torch.logspace(0, torch.tensor(float(w.seqlen_k)).log2(), w.batch, base=2.0)
    order = torch.randperm(w.batch, generator=torch.Generator().manual_seed(3))
    return spaced.round().int()[order].tolist()


def page_tables(sizes: Sequence[int], page_size: int) -> tuple[Tensor, int]:
    """Shuffled pages for requests of these lengths, (requests, pages of the longest), and how many there are
    in all."""
    counts = [-(-n // page_size) for n in sizes]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(4)).int()
    table = torch.zeros(len(sizes), max(counts), dtype=torch.int32)
    for row, ids in zip(table, order.split(counts), strict=True):
        row[: len(ids)] = ids
    return table, sum(counts)


def _one(q: Tensor, b: int, pages: Sequence[Tensor], table: Tensor, length: int) -> Sample:
    """Request `b` of queries (batch, heads, channels)."""
    k, v = (gathered(x, table[b], length) for x in pages)
    return Sample(q[b : b + 1, :, None], k, v, {}, lambda out: out[b : b + 1, :, None])


def _ragged(case: Case) -> Timed:
    """Many requests of very different lengths, against one that has the tokens of all."""
    w, sizes = case.workload, lengths(case)
    table, pages = page_tables(sizes, case.page_size)
    k, v = random_pool(w, pages, case.page_size)
    whole = torch.randperm(pages, generator=torch.Generator().manual_seed(5)).int()[None]
    q = _queries(w, w.batch, w.heads, w.head_dim)
    kv_lens, total = (torch.tensor(n, dtype=torch.int32) for n in (sizes, [sum(sizes)]))
    order = sorted(range(w.batch), key=sizes.__getitem__)

    def alone() -> Tensor:
        """Each request by itself."""
        each = [slice(b, b + 1) for b in range(w.batch)]
        return torch.cat([polyflash.attention_paged(q[b], k, v, table[b], kv_lens[b]) for b in each])

    ragged = partial(polyflash.attention_paged, q, k, v, table, kv_lens)
    one_request = partial(polyflash.attention_paged, q[:1], k, v, whole, total)
    arms = {OURS: ragged, PLAIN: one_request, **readers(Turn([key_set(k, v)]))}
    used = sum(sizes) * w.kv_heads * (w.head_dim + w.dim_v) * k.element_size()
    samples = [_one(q, b, (k, v), table, sizes[b]) for b in (order[at] for at in (0, w.batch // 2, -1))]
    plan = polyflash.explain(q, k, v, page_table=table, kv_lens=kv_lens)
    return _timed(case, arms, (ragged, alone), samples, used, sum(sizes), plan)


def _cascade(case: Case) -> Timed:
    """Requests that share a prefix, walked once for all, against each of them walking its own table: one that
    names the shared pages, or pages of its own with the same tokens."""
    w = case.workload
    cache, requests = _forked(case)
    (k, v), table, kv_lens = cache.pools(0), cache.page_table(requests), cache.kv_lens(requests)
    q = _queries(w, w.batch, w.heads, w.head_dim)
    copied_k, copied_v = (x[table.long().flatten()] for x in (k, v))
    copied = torch.arange(table.numel(), dtype=torch.int32).view_as(table)
    together, each = (partial(cache.attend, q, requests, cascade=cascade) for cascade in (True, False))
    copies = partial(polyflash.attention_paged, q, copied_k, copied_v, copied, kv_lens)
    samples = [_one(q, b, (k, v), table, w.seqlen_k) for b in (0, w.batch - 1)]
    plan = polyflash.explain(q, k, v, page_table=table, kv_lens=kv_lens)
    return _timed(
        case, {OURS: together, PLAIN: each, OWN_COPIES: copies}, (together, copies, each), samples,
        k.nbytes + v.nbytes, w.batch * w.seqlen_k, plan,
    )  # fmt: skip


def _forked(case: Case) -> tuple[KVCache, tuple[Request, ...]]:
    """Requests that share their first pages, in a cache that has no page more than they need."""
    w, prefix = case.workload, case.workload.seqlen_k - case.private
    dtype, size = getattr(torch, w.dtype), case.page_size
    pages = (prefix + w.batch * case.private) // size
    cache = KVCache(pages, size, w.kv_heads, w.head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(0)

    def drawn(tokens: int) -> Tensor:
        return torch.randn(tokens, w.kv_heads, w.head_dim, generator=generator).to(dtype)

    (first,) = cache.add()
    cache.append(first, drawn(prefix), drawn(prefix), counts=prefix)
    requests = (first, *cache.fork(first, w.batch - 1))
    for request in requests:
        cache.append(request, drawn(case.private), drawn(case.private), counts=case.private)
    return cache, requests


def group_ends(case: Case) -> list[int]:
    """Where the chunk of each query group ends: of rank `rank` of `ranks` in the zigzag layout, or of all."""
    keys, chunks = case.workload.seqlen_k, 2 * case.ranks
    if case.laid == cases.ZIGZAG:
        return [(case.rank + 1) * keys // chunks, (chunks - case.rank) * keys // chunks]
    return [(i + 1) * keys // chunks for i in range(chunks)]


def _groups(case: Case) -> Timed:
    """Query groups that see prefixes of one key/value set: one walk over it, against a call per group."""
    w, n = case.workload, case.workload.seqlen_q
    turn, ends = Turn(key_sets(w)), group_ends(case)
    first = turn.things[0]
    queries = [_queries(w, 1, w.heads, n, w.head_dim) * (1 - i / 64) for i in range(len(ends))]
    options: dict[str, Any] = {"q_offsets": [end - n for end in ends], "kv_lens": ends}

    def groups(fused: bool, s: KeySet) -> list[Tensor]:
        return polyflash.attention_groups(queries, s.k, s.v, fused=fused, **options)

    def joined(fused: bool) -> Tensor:
        return torch.cat(groups(fused, first), 2)

    def sample(i: int) -> Sample:
        k, v = (x[:, :, : ends[i]] for x in (first.k, first.v))
        return Sample(queries[i], k, v, {"causal": True}, lambda out: out.narrow(2, i * n, n))

    explained = partial(explain_groups, queries, first.k, first.v, **options)
    return _timed(
        case, {OURS: turn.each(partial(groups, True)), PLAIN: turn.each(partial(groups, False))},
        [partial(joined, True), partial(joined, False)],
        [sample(i) for i in sorted({0, len(ends) - 1})], first.bytes * max(ends) // w.seqlen_k, sum(ends),
        explained(fused=True).plans[0], fuses=explained().fused,
    )  # fmt: skip


def _invariance(case: Case) -> Timed:
    """Splits of one size whatever the call, against the split size that is best for this very call, and
    against the prefill kernel, whose bits do not depend on chunking either."""
    w = case.workload
    turn, causal = Turn(key_sets(w)), w.seqlen_q > 1
    q, first = _queries(w, w.batch, w.heads, w.seqlen_q, w.head_dim), turn.things[0]

    def call(**options: Any) -> Callable[[KeySet], Tensor]:
        return lambda s: polyflash.attention(q, s.k, s.v, causal=causal, **options)

    best = polyflash.explain(q, first.k, first.v, causal=causal).config
    if hasattr(best, "split_keys"):
        tried = {str(n): replace(best, split_keys=n) for n in SPLITS if n % best.block_n == 0}
        arms = [Arm(n, turn.each(call(config=config))) for n, config in tried.items()]
        times = compare(arms, seconds=0.2, settle=0.0)
        best = tried[min(tried, key=lambda n: times.summary(n).median)]
    calls = {OURS: call(), BEST_SPLIT: call(config=best), INVARIANT: call(batch_invariant=True)}
    return _whole(case, q, turn, calls, split_keys=getattr(best, "split_keys", None))


_BUILDERS: dict[str, Callable[[Case], Timed]] = {
    cases.STEPS: _step,
    cases.FEW_ROWS: _few_rows,
    cases.PAGED: _paged,
    cases.RAGGED: _ragged,
    cases.CASCADE: _cascade,
    cases.GROUPS: _groups,
    cases.INVARIANCE: _invariance,
}
