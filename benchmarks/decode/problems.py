"""What a row of the suite "decode" times: the arms of each of its tables, on keys that no cache holds.

A decode step reads memory that the rest of the model has long driven out of every cache. So each call takes
the next of several sets of keys and values, which together are `SPILL` times as large as the last cache (tiny
ones: `MOST` sets).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks import cases, ggml, peers
from benchmarks.cases import Case
from benchmarks.decode import stream
from benchmarks.exact import relative
from benchmarks.problem import PLAIN, Sample, Timed
from polyflash.bench.suite import OURS, SDPA
from polyflash.bench.timing import Arm, compare
from polyflash.compare import TOLERANCE
from polyflash.groups import explain_groups
from polyflash.kvcache import KVCache
from polyflash.quant import NAMED, Scheme, quantize
from polyflash.spec import Phase
from polyflash.storages import empty_of_keys
from polyflash.work import flops_per_pair
from polyflash.workloads import Workload

SPILL, MOST = 4, 64
IN_ORDER, PLACES = "read, in order", f"read, {stream.PLACES} places at once"
AMAX = "torch.amax of keys and values"
READERS = (IN_ORDER, PLACES, AMAX)  # each reads every byte of a key set once
PAGES = "read, page by page"
FOLDED = "torch SDPA, query heads as rows"
OWN_COPIES, ONE_PAGE = "polyflash, a prefix of each request's own", "polyflash, one page for all keys"
GGML, ONNX = "ggml", "onnxruntime"
BEST_SPLIT, INVARIANT = "polyflash, the best split", "polyflash, batch_invariant=True"
SPLITS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
CODED: dict[str, tuple[Scheme, ...]] = {**NAMED}
CODED |= {f"{n}-bytes": tuple(replace(s, compute="int8") for s in NAMED[n]) for n in ("int8", "int4-token")}
OFF = 6e-2  # by which rows of results over codes may be off where q and the weights are in 8 bits too
T = TypeVar("T")


def between(reader: str) -> str:
    """The arm of a reader that runs where `AFTER` does."""
    return f"{reader}, right after a torch operation"


class Turn(Generic[T]):
    """Each call gives the next of the things, shared by all arms: whoever comes next finds it in no cache."""

    def __init__(self, things: Sequence[T]) -> None:
        self.things, self._at = things, 0

    def __call__(self) -> T:
        self._at = (self._at + 1) % len(self.things)
        return self.things[self._at]

    def each(self, call: Callable[[T], object]) -> Callable[[], object]:
        """An arm: the call on the next thing."""
        return lambda: call(self())


@dataclass(frozen=True)
class KeySet:
    """k, v (batch, num_kv_heads, seqlen_k, head_dim), contiguous, or as codes."""

    k: Any
    v: Any

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def readers(turn: Turn[KeySet]) -> dict[str, Callable[[], object]]:
    """What only reads the next set, by the names of its arms: our loops, where there is a compiler, and
    torch's."""
    made = {AMAX: turn.each(lambda s: (torch.amax(s.k), torch.amax(s.v)))}
    if stream.available():
        for name, places in ((IN_ORDER, 1), (PLACES, stream.PLACES)):
            reads = {id(s): stream.Read([s.k, s.v], places) for s in turn.things}
            made[name] = turn.each(lambda s, reads=reads: reads[id(s)]())  # type: ignore[misc]
    return {name: made[name] for name in READERS if name in made}


def key_sets(w: Workload) -> list[KeySet]:
    """Enough of them; all hold the same values, so that any output can be checked. The last ones made are
    kept, as neighbouring rows share them."""
    return _key_sets(w.dtype, w.batch, w.kv_heads, w.seqlen_k, w.head_dim)


@lru_cache(maxsize=1)
def _key_sets(dtype: str, *shape: int) -> list[KeySet]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in "kv")
    return [KeySet(k, v), *(KeySet(k.clone(), v.clone()) for _ in range(copies(k.nbytes + v.nbytes) - 1))]


def copies(size: int) -> int:
    """How many sets of `size` bytes no cache holds."""
    return min(MOST, -(-SPILL * stream.last_level_bytes() // size))


@dataclass(frozen=True)
class Pool:
    """k, v (num_pages, page_size, num_kv_heads, head_dim), and a table (batch, pages of the longest)."""

    k: Tensor
    v: Tensor
    table: Tensor

    def reader(self) -> stream.Read:
        """What reads the pages of one request in the order of its table, K and V by turns, each at several
        places at once."""
        dense = [x if x.is_contiguous() else x.transpose(1, 2) for x in (self.k, self.v)]
        return stream.Read([x[page] for page in self.table[0].tolist() for x in dense], stream.PLACES)


def pool(k: Tensor, v: Tensor, page_size: int, *, heads_outer: bool = False, in_order: bool = False) -> Pool:
    """One request's keys, k and v (1, num_kv_heads, seqlen_k, head_dim), in pages that are shuffled unless
    `in_order`. With `heads_outer` the tokens of one head lie together inside a page."""
    pages, dims = k.shape[2] // page_size, (1, 0, 2, 3) if heads_outer else (1, 2, 0, 3)
    order = torch.arange(pages) if in_order else _shuffled(pages, 1)

    def paged(x: Tensor) -> Tensor:
        whole = x[0].unflatten(1, (pages, page_size))  # heads, pages, tokens, channels
        placed = empty_of_keys([whole.shape[d] for d in dims], x.dtype, "cpu")
        placed[order] = whole.permute(dims)
        return placed.transpose(1, 2) if heads_outer else placed

    return Pool(paged(k), paged(v), order.int()[None])


def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def gathered(x: Tensor, table: Tensor, length: int) -> Tensor:
    """What a request sees of the pages, (1, num_kv_heads, length, head_dim)."""
    pages = table[: -(-length // x.shape[1])].long()
    return x[pages].flatten(0, 1)[:length].transpose(0, 1)[None]


def build(case: Case) -> Timed:
    return _BUILDERS[case.part](case)


def queries(w: Workload, *shape: int) -> Tensor:
    """In the shape of the workload, or another."""
    shape = shape or (w.batch, w.heads, w.seqlen_q, w.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(getattr(torch, w.dtype))


def _timed(
    case: Case, arms: dict[str, Any], outputs: Sequence[Any], samples: Sequence[Sample], size: int, keys: int,
    plan: Any, **chosen: Any,
) -> Timed:  # fmt: skip
    """`keys` are seen by every row of one request; what causal hides of the last few is not worth
    it. `size`: bytes that our call reads at least; `plan`: of our call."""
    w = case.workload
    flops = flops_per_pair(Phase.FORWARD, w.head_dim, w.dim_v) * w.heads * w.seqlen_q * keys
    name = plan.chosen.name if plan.chosen else ""
    return Timed(arms, tuple(outputs), tuple(samples), flops, flops, name, size, chosen)


def _whole(case: Case, q: Tensor, turn: Turn[KeySet], calls: dict[str, Any], **chosen: Any) -> Timed:
    """Calls on whole key sets, beside what only reads those."""
    w, first, causal = case.workload, turn.things[0], q.shape[2] > 1
    arms = {name: turn.each(call) for name, call in calls.items()} | readers(turn)
    outputs = [partial(call, first) for call in calls.values()]
    sample = Sample(q, first.k, first.v, {"causal": causal})
    plan = polyflash.explain(q, first.k, first.v, causal=causal)
    return _timed(case, arms, outputs, [sample], first.bytes, w.batch * w.seqlen_k, plan, **chosen)


def _step(case: Case) -> Timed:
    """Against torch SDPA, and against SDPA that gets the query heads of a kv head as rows, which spares its
    keys the repetition; few rows have nothing beside them but torch."""
    w, q = case.workload, queries(case.workload)
    group, causal = w.heads // w.kv_heads, w.seqlen_q > 1
    seen = torch.ones(w.seqlen_q, w.seqlen_k, dtype=torch.bool).tril(w.seqlen_k - w.seqlen_q)
    mask, repeated = (seen, seen.repeat(group, 1)) if causal else (None, None)
    rows = q.view(w.batch, w.kv_heads, group * w.seqlen_q, w.head_dim)
    calls: dict[str, Callable[[KeySet], Tensor]] = {
        OURS: lambda s: polyflash.attention(q, s.k, s.v, causal=causal),
        SDPA: lambda s: scaled_dot_product_attention(q, s.k, s.v, attn_mask=mask, enable_gqa=group > 1),
        FOLDED: lambda s: scaled_dot_product_attention(rows, s.k, s.v, attn_mask=repeated).view_as(q),
    }
    if group == 1:
        del calls[FOLDED]
    made = _whole(case, q, Turn(key_sets(w)), calls)
    few = case.part == cases.FEW_ROWS
    return replace(made, arms={name: made.arms[name] for name in (OURS, SDPA)}) if few else made


def _paged(case: Case) -> Timed:
    """Pages, shuffled unless said otherwise, against the same keys in one piece."""
    w, sets, causal = case.workload, key_sets(case.workload), case.workload.seqlen_q > 1
    turn, first = Turn(sets), sets[0]
    heads_outer, in_order = case.laid.startswith(cases.HEADS_OUTER), case.laid.endswith(cases.IN_ORDER)
    paging = partial(pool, heads_outer=heads_outer, in_order=in_order)
    pools, large = ([paging(s.k, s.v, n) for s in sets] for n in (case.page_size, w.seqlen_k))
    q = queries(w)
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

    arms = {OURS: Turn(pools).each(paged), PLAIN: turn.each(plain), ONE_PAGE: Turn(large).each(paged)}
    arms |= readers(turn)
    if stream.available():
        arms[PAGES] = Turn([p.reader() for p in pools]).each(lambda read: read())
    plan = polyflash.explain(packed, pools[0].k, pools[0].v, page_table=pools[0].table, **options)
    outputs = (partial(dense, pools[0]), partial(plain, first), partial(dense, large[0]))
    sample = Sample(q, first.k, first.v, {"causal": causal})
    return _timed(case, arms, outputs, [sample], first.bytes, w.seqlen_k, plan)


def lengths(case: Case) -> list[int]:
    """Of a ragged batch, 1 to the longest, in no order."""
    n, count = case.workload.seqlen_k, case.workload.batch
    equal_factors = torch.logspace(0, torch.tensor(float(n)).log2(), count, base=2.0)
    spaced = torch.linspace(1, n, count) if case.laid == cases.EVEN else equal_factors
    return spaced.round().int()[_shuffled(count, 3)].tolist()


def page_tables(sizes: Sequence[int], page_size: int) -> tuple[Tensor, int]:
    """Shuffled pages for requests of these lengths, (requests, pages of the longest), and how many there are
    in all."""
    counts = [-(-n // page_size) for n in sizes]
    table = torch.zeros(len(sizes), max(counts), dtype=torch.int32)
    for row, ids in zip(table, _shuffled(sum(counts), 4).int().split(counts), strict=True):
        row[: len(ids)] = ids
    return table, sum(counts)


def _one(q: Tensor, b: int, pages: Sequence[Tensor], table: Tensor, length: int) -> Sample:
    """Request `b` of queries (batch, heads, channels)."""
    k, v = (gathered(x, table[b], length) for x in pages)
    return Sample(q[b : b + 1, :, None], k, v, {}, lambda out: out[b : b + 1, :, None])


def _random_pool(w: Workload, pages: int, page_size: int) -> list[Tensor]:
    """k and v pages of random values; a block of them is drawn and repeated, as drawing is slow."""
    generator, made = torch.Generator().manual_seed(0), []
    drawn = min(pages, max(1, (1 << 23) // (page_size * w.kv_heads * w.head_dim)))
    for _ in "kv":
        block = torch.randn(drawn, page_size, w.kv_heads, w.head_dim, generator=generator)
        whole = empty_of_keys((pages, *block.shape[1:]), getattr(torch, w.dtype), "cpu")
        for start in range(0, pages, drawn):
            whole[start : start + drawn] = block[: pages - start]
        made.append(whole)
    return made


def _ragged(case: Case) -> Timed:
    """Many requests of very different lengths, against one that has the tokens of all."""
    w, sizes = case.workload, lengths(case)
    table, pages = page_tables(sizes, case.page_size)
    k, v = _random_pool(w, pages, case.page_size)
    whole, q = _shuffled(pages, 5).int()[None], queries(w, w.batch, w.heads, w.head_dim)
    kv_lens, total = (torch.tensor(n, dtype=torch.int32) for n in (sizes, [sum(sizes)]))
    order = sorted(range(w.batch), key=sizes.__getitem__)

    def alone() -> Tensor:
        """Each request by itself."""
        each = [slice(b, b + 1) for b in range(w.batch)]
        return torch.cat([polyflash.attention_paged(q[b], k, v, table[b], kv_lens[b]) for b in each])

    ragged = partial(polyflash.attention_paged, q, k, v, table, kv_lens)
    one_request = partial(polyflash.attention_paged, q[:1], k, v, whole, total)
    arms = {OURS: ragged, PLAIN: one_request, **readers(Turn([KeySet(k, v)]))}
    used = sum(sizes) * w.kv_heads * (w.head_dim + w.dim_v) * k.element_size()
    samples = [_one(q, b, (k, v), table, sizes[b]) for b in (order[at] for at in (0, w.batch // 2, -1))]
    plan = polyflash.explain(q, k, v, page_table=table, kv_lens=kv_lens)
    return _timed(case, arms, (ragged, alone), samples, used, sum(sizes), plan)


def _cascade(case: Case) -> Timed:
    """Requests that share a prefix, walked once for all, against each of them walking its own table: one that
    names the shared pages, or pages of its own with the same tokens. The cache has no page more than they
    need."""
    w, dtype = case.workload, getattr(torch, case.workload.dtype)
    prefix = w.seqlen_k - case.private
    pages = (prefix + w.batch * case.private) // case.page_size
    cache = KVCache(pages, case.page_size, w.kv_heads, w.head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(0)

    def append(request: Any, tokens: int) -> None:
        k, v = (torch.randn(tokens, w.kv_heads, w.head_dim, generator=generator).to(dtype) for _ in "kv")
        cache.append(request, k, v, counts=tokens)

    (first,) = cache.add()
    append(first, prefix)
    requests = (first, *cache.fork(first, w.batch - 1))
    for request in requests:
        append(request, case.private)
    (k, v), table, kv_lens = cache.pools(0), cache.page_table(requests), cache.kv_lens(requests)
    q, own = queries(w, w.batch, w.heads, w.head_dim), [x[table.long().flatten()] for x in cache.pools(0)]
    copied = torch.arange(table.numel(), dtype=torch.int32).view_as(table)
    together, each = (partial(cache.attend, q, requests, cascade=cascade) for cascade in (True, False))
    copies = partial(polyflash.attention_paged, q, *own, copied, kv_lens)
    arms = {OURS: together, PLAIN: each, OWN_COPIES: copies}
    samples = [_one(q, b, (k, v), table, w.seqlen_k) for b in (0, w.batch - 1)]
    plan, size = polyflash.explain(q, k, v, page_table=table, kv_lens=kv_lens), k.nbytes + v.nbytes
    return _timed(case, arms, (together, copies, each), samples, size, w.batch * w.seqlen_k, plan)


def group_ends(case: Case) -> list[int]:
    """Where the chunk of each query group ends: of rank `rank` of `ranks` in the zigzag layout, or of all."""
    keys, chunks = case.workload.seqlen_k, 2 * case.ranks
    mine = (case.rank, chunks - 1 - case.rank) if case.laid == cases.ZIGZAG else range(chunks)
    return [(i + 1) * keys // chunks for i in mine]


def _groups(case: Case) -> Timed:
    """Query groups that see prefixes of one key/value set: one walk over it, against a call per group."""
    w, n, ends = case.workload, case.workload.seqlen_q, group_ends(case)
    turn = Turn(key_sets(w))
    first = turn.things[0]
    parts = [queries(w) * (1 - i / 64) for i in range(len(ends))]
    options: dict[str, Any] = {"q_offsets": [end - n for end in ends], "kv_lens": ends}

    def groups(fused: bool, s: KeySet) -> list[Tensor]:
        return polyflash.attention_groups(parts, s.k, s.v, fused=fused, **options)

    def joined(fused: bool) -> Tensor:
        return torch.cat(groups(fused, first), 2)

    def sample(i: int) -> Sample:
        k, v = (x[:, :, : ends[i]] for x in (first.k, first.v))
        return Sample(parts[i], k, v, {"causal": True}, lambda out: out.narrow(2, i * n, n))

    arms = {OURS: turn.each(partial(groups, True)), PLAIN: turn.each(partial(groups, False))}
    samples, size = [sample(i) for i in sorted({0, len(ends) - 1})], first.bytes * max(ends) // w.seqlen_k
    explained = partial(explain_groups, parts, first.k, first.v, **options)
    outputs, plan = (partial(joined, True), partial(joined, False)), explained(fused=True).plans[0]
    return _timed(case, arms, outputs, samples, size, sum(ends), plan, fuses=explained().fused)


def _invariance(case: Case) -> Timed:
    """Splits of one size whatever the call, against the split size that is best for this very call, and
    against the prefill kernel, whose bits do not depend on chunking either."""
    w, q, turn = case.workload, queries(case.workload), Turn(key_sets(case.workload))
    first, causal = turn.things[0], w.seqlen_q > 1

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


def _codes(case: Case) -> Timed:
    """A step over codes beside one over 16 bits, what reads those, and what others keep in as many bits; or a
    prefill by integer products beside floats, which get the values of the codes."""
    w, q, sets = case.workload, queries(case.workload), key_sets(case.workload)
    causal, rows, threads = bool(w.causal), w.seqlen_q, torch.get_num_threads()
    schemes, first, dtype = CODED.get(case.laid), sets[0], q.dtype
    coded = [KeySet(*map(quantize, (s.k, s.v), schemes)) for s in sets] if schemes else sets
    k, v = (x.values(torch.float32) if schemes else x for x in (coded[0].k, coded[0].v))
    decoded = KeySet(k.to(dtype), v.to(dtype))

    def attend(s: KeySet, backend: str | None = None) -> Tensor:
        return polyflash.attention(q, s.k, s.v, causal=causal, backend=backend)

    arms: dict[str, Any] = {OURS: Turn(coded).each(attend)}
    found = {OURS: attend(coded[0])}
    if rows > 1:
        arms[SDPA] = partial(scaled_dot_product_attention, q, decoded.k, decoded.v, is_causal=causal)
        arms[PLAIN] = partial(attend, decoded)
    else:
        arms |= {PLAIN: Turn(sets).each(attend)} if schemes else {}
        bits = 8 // coded[0].k.form.packed if schemes else 16
        for name, steps in others([(q.float(), s.k.float(), s.v.float()) for s in sets], bits, threads):
            found[name] = steps[0]()
            arms[name] = Turn(steps).each(lambda step: step())
        arms |= readers(Turn(sets))
    q64, k64, v64 = (x.double() for x in (q, first.k, first.v))
    right = scaled_dot_product_attention(q64, k64, v64, is_causal=causal, enable_gqa=True)
    errors = {name: relative(out, right) for name, out in found.items()}  # of the codes and of the kernel
    sample = Sample(q, k, v, {"causal": causal})
    outputs = [partial(attend, coded[0], x) for x in (None, "torch")]
    plan, keys = polyflash.explain(q, coded[0].k, coded[0].v, causal=causal), w.seqlen_k
    keys = (keys + 1) // 2 if causal else keys
    made = _timed(case, arms, outputs, [sample], coded[0].bytes, keys, plan, errors=errors)
    return replace(made, slack=OFF / TOLERANCE[w.dtype]) if schemes else made


def others(
    sets: Sequence[tuple[Tensor, Tensor, Tensor]], bits: int, threads: int
) -> Iterator[tuple[str, list[Callable[[], Tensor]]]]:
    """One step per set by each other implementation that is here, over keys and values of so many bits."""
    if folder := os.environ.get("GGML_LIBRARIES"):
        library, kind = ggml.load(Path(folder)), {16: "f16", 8: "q8_0", 4: "q4_0"}[bits]
        yield GGML, [ggml.Step(library, *s, kind, threads) for s in sets]
    if not peers.PEERS["onnxruntime-attention"].absent:
        yield ONNX, [peers.onnxruntime_codes(*s, bits, threads) for s in sets]


_BUILDERS: dict[str, Callable[[Case], Timed]] = {
    **{cases.STEPS: _step, cases.FEW_ROWS: _step, cases.PAGED: _paged, cases.RAGGED: _ragged},
    **{cases.CASCADE: _cascade, cases.GROUPS: _groups, cases.INVARIANCE: _invariance},
    **{cases.CODES: _codes, cases.PREFILL: _codes},
}
