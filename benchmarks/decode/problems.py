"""One row of the suite "decode" measured: the arms of each of its tables, interleaved and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks.cases import Case
from benchmarks.decode import cases as rows
from benchmarks.decode import stream
from benchmarks.decode.keys import (
    READERS,
    KeySet,
    Pool,
    Turn,
    between,
    gathered,
    key_set,
    key_sets,
    page_reads,
    pool,
    random_pool,
    readers,
)
from benchmarks.suite import AFTER, PLAIN, Result
from polyflash.bench.check import Accuracy, sampled_error
from polyflash.bench.peak import Calibration
from polyflash.bench.suite import ALONE, OURS, SDPA
from polyflash.bench.timing import Arm, compare
from polyflash.compare import worst_row
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

Out = Callable[[], Tensor]


@dataclass(frozen=True)
class Sample:
    """Rows that float64 looks at: q (1, heads, rows, dim) over all keys of k, v, bottom-right causal or not;
    `out` picks the same rows of an output of ours."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    out: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DecodeProblem:
    """`arms` by name, ours first; `outputs` give the same numbers on one set of keys, ours first, in one
    shape; bytes and FLOPs are those of our arm."""

    arms: dict[str, Callable[[], object]]
    outputs: tuple[Out, ...]
    samples: tuple[Sample, ...]
    bytes: int
    flops: float
    backend: str
    chosen: dict[str, Any] = field(default_factory=dict)  # what the row was found to use

    def check(self) -> tuple[float, Accuracy, Accuracy]:
        """The worst row's relative difference between our output and any other; errors of ours and of the
        last other one against float64."""
        outputs = [call() for call in self.outputs]
        ours, others = outputs[0], outputs[1:]
        difference = max((worst_row(ours, other) for other in others), default=0.0)
        return difference, self._error(ours), self._error(outputs[-1])

    def _error(self, out: Tensor) -> Accuracy:
        found = [sampled_error(s.q, s.k, s.v, s.out(out), None, {"causal": s.causal}) for s in self.samples]
        worst = found[0]
        for other in found[1:]:
            worst = worst | other
        return worst


def measure(case: Case, *, seconds: float, calibration: Calibration | None) -> Result:
    """Times one row and checks it before."""
    with torch.no_grad():
        problem = build(case)
        difference, error, other = problem.check()
        threads = torch.get_num_threads()
        arms = [Arm(name, call) for name, call in problem.arms.items()]
        ours = arms[0].call
        if case.part == rows.STEPS:
            arms.append(Arm(AFTER, ours, before=_operators()))
            arms += [
                Arm(between(arm.name), arm.call, before=_operators()) for arm in arms if arm.name in READERS
            ]
        if threads > 1:
            arms.append(Arm(ALONE, ours, threads=1))
        speed = MemorySpeed(calibration) if calibration and stream.available() else None
        comparison = compare(arms, seconds=seconds, speed=speed)
    return Result(
        case, problem.backend, comparison, difference, error, other, problem.flops, problem.flops, None,
        threads, bytes=problem.bytes, chosen=problem.chosen,
    )  # fmt: skip


def _operators() -> Callable[[], object]:
    """What torch does between the steps of a model: a matrix product and elementwise work, on its threads."""
    x, w, y = torch.randn(256, 1024), torch.randn(1024, 1024), torch.randn(256, 1024)
    return lambda: torch.nn.functional.silu(x @ w) * y


class MemorySpeed:
    """The machine's present speed as a fraction of the best it has shown for this row: that of its
    arithmetic, or of a read that no cache serves, whichever is lower. Time slices of the host are longer than
    a burst of arithmetic, and other machines on it take memory's rate without taking a core."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._best = calibration, 0.0

    def __call__(self) -> float:
        rate = max(_read_rate() for _ in range(2))  # the first may meet threads of torch that still spin
        self._best = max(self._best, rate)
        return min(self._calibration.speed(), rate / self._best)


def _read_rate() -> float:
    """Bytes per second."""
    read = _large_read()
    start = time.perf_counter()
    read()
    return read.bytes / (time.perf_counter() - start)


@lru_cache(maxsize=1)
def _large_read() -> stream.Read:
    return stream.Read([torch.ones(2 * stream.last_level_bytes(), dtype=torch.int8)])


def build(case: Case) -> DecodeProblem:
    return _BUILDERS[case.part](case)


def _queries(w: Workload, *shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return drawn.to(getattr(torch, w.dtype))


def _flops(w: Workload, keys: int) -> float:
    """Of `keys` keys seen by every row of one request; what causal hides of the last few is not worth it."""
    return flops_per_pair(Phase.FORWARD, w.head_dim, w.dim_v) * w.heads * w.seqlen_q * keys


def _row(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """The kernel row that runs a call."""
    chosen = polyflash.explain(q, k, v, **options).chosen
    return chosen.name if chosen else ""


def _step(case: Case) -> DecodeProblem:
    """Against torch SDPA, and against SDPA that gets the query heads of a kv head as rows, which spares its
    keys the repetition."""
    w = case.workload
    turn = Turn(key_sets(w))
    q = _queries(w, w.batch, w.heads, w.seqlen_q, w.head_dim)
    group = w.heads // w.kv_heads
    mask = None
    if w.seqlen_q > 1:
        mask = torch.ones(w.seqlen_q, w.seqlen_k, dtype=torch.bool).tril(w.seqlen_k - w.seqlen_q)
    folded = q.view(w.batch, w.kv_heads, group * w.seqlen_q, w.head_dim)
    repeated = None if mask is None else mask.repeat(group, 1)

    def ours(s: KeySet) -> Tensor:
        return polyflash.attention(q, s.k, s.v, causal=w.seqlen_q > 1)

    def sdpa(s: KeySet) -> Tensor:
        return scaled_dot_product_attention(q, s.k, s.v, attn_mask=mask, enable_gqa=group > 1)

    def sdpa_folded(s: KeySet) -> Tensor:
        return scaled_dot_product_attention(folded, s.k, s.v, attn_mask=repeated).view_as(q)

    calls = {OURS: ours, SDPA: sdpa, **({FOLDED: sdpa_folded} if group > 1 else {})}
    first = turn.things[0]
    return DecodeProblem(
        arms={**{name: _turning(call, turn) for name, call in calls.items()}, **readers(turn)},
        outputs=tuple(partial(call, first) for call in calls.values()),
        samples=(Sample(q, first.k, first.v, w.seqlen_q > 1, lambda out: out),),
        bytes=first.bytes,
        flops=w.batch * _flops(w, w.seqlen_k),
        backend=_row(q, first.k, first.v, causal=w.seqlen_q > 1),
    )


def _few_rows(case: Case) -> DecodeProblem:
    """A step with nothing beside it but torch."""
    made = _step(case)
    return replace(made, arms={name: made.arms[name] for name in (OURS, SDPA)})


def _turning(call: Callable[[Any], Tensor | None], turn: Turn[Any]) -> Callable[[], object]:
    return lambda: call(turn())


def _paged(case: Case) -> DecodeProblem:
    """Pages, shuffled unless said otherwise, against the same keys in one piece."""
    w = case.workload
    sets = key_sets(w)
    turn = Turn(sets)
    lie = {
        "heads_outer": case.laid.startswith(rows.HEADS_OUTER), "in_order": case.laid.endswith(rows.IN_ORDER)
    }  # fmt: skip
    pools = [pool(s.k, s.v, case.page_size, **lie) for s in sets]
    paged_turn = Turn(pools)
    large_turn = Turn([pool(s.k, s.v, w.seqlen_k, **lie) for s in sets])
    page_turn = Turn([page_reads(p) for p in pools])
    q = _queries(w, 1, w.heads, w.seqlen_q, w.head_dim)
    packed = q[0].transpose(0, 1).contiguous()  # rows, heads, channels
    options: dict[str, Any] = {"kv_lens": torch.tensor([w.seqlen_k], dtype=torch.int32)}
    if w.seqlen_q > 1:
        bounds = torch.tensor([0, w.seqlen_q], dtype=torch.int32)
        options |= {"cu_seqlens_q": bounds, "max_seqlen_q": w.seqlen_q, "causal": True}

    def paged(p: Pool) -> Tensor:
        return polyflash.attention_paged(packed, p.k, p.v, p.table, **options)

    def plain(s: KeySet) -> Tensor:
        return polyflash.attention(q, s.k, s.v, causal=w.seqlen_q > 1)

    first = sets[0]
    return DecodeProblem(
        arms={
            OURS: _turning(paged, paged_turn),
            PLAIN: _turning(plain, turn),
            ONE_PAGE: _turning(paged, large_turn),
            **readers(turn),
            **{name: _turning(partial(_read, name), page_turn) for name in page_turn.things[0]},
        },
        outputs=(
            lambda: paged(pools[0]).transpose(0, 1)[None],
            partial(plain, first),
            lambda: paged(large_turn.things[0]).transpose(0, 1)[None],
        ),
        samples=(Sample(q, first.k, first.v, w.seqlen_q > 1, lambda out: out),),
        bytes=first.bytes,
        flops=_flops(w, w.seqlen_k),
        backend=_row(packed, pools[0].k, pools[0].v, page_table=pools[0].table, **options),
    )


def _read(name: str, reads: dict[str, stream.Read]) -> None:
    reads[name]()


def lengths(case: Case) -> list[int]:
    """Of a ragged batch, 1 to the longest, in no order."""
    w = case.workload
    if case.laid == rows.EVEN:
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
    start = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[start : start + count]
        start += count
    return table, start


def _one(q: Tensor, b: int, k: Tensor, v: Tensor) -> Sample:
    """Request `b` of queries (batch, heads, channels)."""
    return Sample(q[b : b + 1, :, None], k, v, False, lambda out: out[b : b + 1, :, None])


def _ragged(case: Case) -> DecodeProblem:
    """Many requests of very different lengths, against one that has the tokens of all."""
    w = case.workload
    sizes = lengths(case)
    table, pages = page_tables(sizes, case.page_size)
    k, v = random_pool(w, pages, case.page_size)
    whole = torch.randperm(pages, generator=torch.Generator().manual_seed(5)).int()[None]
    q = _queries(w, w.batch, w.heads, w.head_dim)
    kv_lens = torch.tensor(sizes, dtype=torch.int32)
    total = torch.tensor([sum(sizes)], dtype=torch.int32)
    order = sorted(range(w.batch), key=sizes.__getitem__)

    def sample(b: int) -> Sample:
        return _one(q, b, gathered(k, table[b], sizes[b]), gathered(v, table[b], sizes[b]))

    def alone() -> Tensor:
        """Each request by itself."""
        parts = [
            polyflash.attention_paged(q[b : b + 1], k, v, table[b : b + 1], kv_lens[b : b + 1])
            for b in range(w.batch)
        ]
        return torch.cat(parts)

    def ragged() -> Tensor:
        return polyflash.attention_paged(q, k, v, table, kv_lens)

    turn = Turn([key_set(k, v)])
    used = sum(sizes) * w.kv_heads * (w.head_dim + w.dim_v) * k.element_size()
    return DecodeProblem(
        arms={
            OURS: ragged,
            PLAIN: lambda: polyflash.attention_paged(q[:1], k, v, whole, total),
            **readers(turn),
        },
        outputs=(ragged, alone),
        samples=tuple(sample(order[at]) for at in (0, w.batch // 2, -1)),
        bytes=used,
        flops=_flops(w, sum(sizes)),
        backend=_row(q, k, v, page_table=table, kv_lens=kv_lens),
    )


def _cascade(case: Case) -> DecodeProblem:
    """Requests that share a prefix, walked once for all, against each of them walking its own table: one that
    names the shared pages, or pages of its own with the same tokens."""
    w = case.workload
    cache, requests = _forked(case)
    (k, v), table, kv_lens = cache.pools(0), cache.page_table(requests), cache.kv_lens(requests)
    q = _queries(w, w.batch, w.heads, w.head_dim)
    copied_k, copied_v = (x[table.long().flatten()] for x in (k, v))
    copied = torch.arange(table.numel(), dtype=torch.int32).view_as(table)

    def attend(cascade: bool) -> Tensor:
        return cache.attend(q, requests, cascade=cascade)

    def own_copies() -> Tensor:
        return polyflash.attention_paged(q, copied_k, copied_v, copied, kv_lens)

    def sample(b: int) -> Sample:
        return _one(q, b, gathered(k, table[b], w.seqlen_k), gathered(v, table[b], w.seqlen_k))

    return DecodeProblem(
        arms={OURS: partial(attend, True), PLAIN: partial(attend, False), OWN_COPIES: own_copies},
        outputs=(partial(attend, True), own_copies, partial(attend, False)),
        samples=(sample(0), sample(w.batch - 1)),
        bytes=k.nbytes + v.nbytes,
        flops=w.batch * _flops(w, w.seqlen_k),
        backend=_row(q, k, v, page_table=table, kv_lens=kv_lens),
    )


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
    if case.laid == rows.ZIGZAG:
        return [(case.rank + 1) * keys // chunks, (chunks - case.rank) * keys // chunks]
    return [(i + 1) * keys // chunks for i in range(chunks)]


def _groups(case: Case) -> DecodeProblem:
    """Query groups that see prefixes of one key/value set: one walk over it, against a call per group."""
    w = case.workload
    turn = Turn(key_sets(w))
    ends = group_ends(case)
    queries = [_queries(w, 1, w.heads, w.seqlen_q, w.head_dim) * (1 - i / 64) for i in range(len(ends))]
    options: dict[str, Any] = {"q_offsets": [end - w.seqlen_q for end in ends], "kv_lens": ends}

    def groups(s: KeySet, fused: bool | None) -> list[Tensor]:
        return polyflash.attention_groups(queries, s.k, s.v, fused=fused, **options)

    def joined(fused: bool) -> Tensor:
        return torch.cat(groups(turn.things[0], fused), 2)

    first = turn.things[0]
    explained = partial(explain_groups, queries, first.k, first.v, **options)
    chosen = explained(fused=True).plans[0].chosen
    return DecodeProblem(
        arms={
            OURS: lambda: groups(turn(), True),
            PLAIN: lambda: groups(turn(), False),
        },
        outputs=(partial(joined, True), partial(joined, False)),
        samples=tuple(_group_samples(queries, first, ends)),
        bytes=first.bytes * max(ends) // w.seqlen_k,
        flops=sum(_flops(w, end) for end in ends),
        backend=chosen.name if chosen else "",
        chosen={"fuses": explained().fused},
    )


def _group_samples(queries: list[Tensor], keys: KeySet, ends: list[int]) -> Iterator[Sample]:
    for index in {0, len(ends) - 1}:
        q, end = queries[index], ends[index]
        start = index * q.shape[2]
        yield Sample(q, keys.k[:, :, :end], keys.v[:, :, :end], True, partial(_narrowed, start, q.shape[2]))


def _narrowed(start: int, count: int, out: Tensor) -> Tensor:
    return out.narrow(2, start, count)


def _invariance(case: Case) -> DecodeProblem:
    """Splits of one size whatever the call, against the split size that is best for this very call, and
    against the prefill kernel, whose bits do not depend on chunking either."""
    w = case.workload
    turn = Turn(key_sets(w))
    q = _queries(w, w.batch, w.heads, w.seqlen_q, w.head_dim)
    causal = w.seqlen_q > 1
    first = turn.things[0]
    default = polyflash.explain(q, first.k, first.v, causal=causal).config
    best = _best_split(q, turn, causal, default)

    def ours(s: KeySet) -> Tensor:
        return polyflash.attention(q, s.k, s.v, causal=causal)

    def adapted(s: KeySet) -> Tensor:
        return polyflash.attention(q, s.k, s.v, causal=causal, config=best)

    def invariant(s: KeySet) -> Tensor:
        return polyflash.attention(q, s.k, s.v, causal=causal, batch_invariant=True)

    calls = {OURS: ours, BEST_SPLIT: adapted, INVARIANT: invariant}
    return DecodeProblem(
        arms={**{name: _turning(call, turn) for name, call in calls.items()}, **readers(turn)},
        outputs=tuple(partial(call, first) for call in calls.values()),
        samples=(Sample(q, first.k, first.v, causal, lambda out: out),),
        bytes=first.bytes,
        flops=w.batch * _flops(w, w.seqlen_k),
        backend=_row(q, first.k, first.v, causal=causal),
        chosen={"split_keys": getattr(best, "split_keys", None)},
    )


def _best_split(q: Tensor, turn: Turn[KeySet], causal: bool, default: Any) -> Any:
    """The default config with the split size that is quickest here; itself if it has none."""
    if not hasattr(default, "split_keys"):
        return default
    tried = {n: replace(default, split_keys=n) for n in SPLITS if n % default.block_n == 0}

    def call(config: Any) -> Callable[[KeySet], Tensor]:
        return lambda s: polyflash.attention(q, s.k, s.v, causal=causal, config=config)

    arms = [Arm(str(n), _turning(call(config), turn)) for n, config in tried.items()]
    found = compare(arms, seconds=0.2, settle=0.0)
    return tried[min(tried, key=lambda n: found.summary(str(n)).median)]


_BUILDERS: dict[str, Callable[[Case], DecodeProblem]] = {
    rows.STEPS: _step,
    rows.FEW_ROWS: _few_rows,
    rows.PAGED: _paged,
    rows.RAGGED: _ragged,
    rows.CASCADE: _cascade,
    rows.GROUPS: _groups,
    rows.INVARIANCE: _invariance,
}
