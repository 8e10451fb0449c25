"""The rows of the benchmark, as data: a suite is a list of problems, each with what it is compared with.

The suite "decode" has few query rows over long keys, in the shapes of generation. Its tables (`Case.part`):
the plain step; few rows over few keys and many; pages against a contiguous cache; a batch of many lengths
against one long request; a shared prefix; query groups over one key/value set; what bits that depend on
nothing cost; codes of keys and values, whose prefill by integer products stands there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.peers import PEERS
from polyflash.bench import suite as plain
from polyflash.bench.suite import SDPA
from polyflash.bench.suite import SUITES as DEFAULT  # and a few rows of "backward"
from polyflash.errors import SpecError
from polyflash.workloads import Workload, workloads

PEER_SUITE, DECODE = "peers", "decode"
SUITES = (*DEFAULT, "masks", "bias", "varlen", "backward", DECODE, PEER_SUITE)
OF_CPUS = (DECODE, PEER_SUITE)  # their scale is a CPU's memory; their peers run there
FORWARD, BACKWARD, STEP = "forward", "backward", "step"  # what is timed; a step: forward, then backward
DENSE, SHARES, OPERANDS = "", "heads and members", "operands"  # tables of the suite "backward"
STEPS, FEW_ROWS, PAGED, RAGGED = "", "few rows", "pages", "ragged"  # tables of the suite "decode"
CASCADE, GROUPS, INVARIANCE = "shared prefix", "groups", "invariance"
CODES, PREFILL = "codes", "codes, prefill"
TOKENS_OUTER, HEADS_OUTER = "by token", "by head"  # what is outermost inside a page
IN_ORDER = ", in order"  # pages as an empty pool gives them to its first request; else they are shuffled
EVEN, GEOMETRIC = "even", "geometric"  # how the lengths of a ragged batch lie between 1 and the longest
ZIGZAG, CHUNKS = "zigzag", "chunks"  # the two chunks of one rank; those of all ranks

_TAG = frozenset({"bench"})
_DTYPES, _PRECISE = ("float32", "bfloat16", "float16"), ("bfloat16", "float32")
_HEADS, _KV_HEADS, _PAGE, _REQUESTS = 8, 8, 16, 32
_KINDS = {"mha": 8, "gqa": 32}  # query heads
_LONGEST_BACKWARD = {"quick": 512, "": 2048, "long": 4096}
_CALL_LENGTHS = (16, 64, 128)  # lengths at which a training step is mostly the cost of its calls
_FEW_KEYS = (64, 128, 256, 512, 1000, 1024, 4096)
_FEW_ROWS = (1, 2, 4, 8, 9, 12, 16, 24, 32, 40, 64, 72, 96, 128)
_BYTES = ("int8-bytes", "int4-token-bytes")  # with compute="int8"
_SCHEMES = ("bfloat16", "int8", "int8-smooth", "int8-channel", "int4-token", "int4", *_BYTES)
_BATCHES = ((1, 4096), (1, 16384), (1, 65536), (4, 4096), (32, 1024))  # requests, keys of each
# kind: what its `Workload` has beyond the plain problem, and what is laid over it (`problem.LAID`)
_Kinds = dict[str, tuple[dict[str, Any], str]]
_MASKS: _Kinds = {
    "mask": ({"mask": "11qk"}, ""),
    "mask-heads": ({"mask": "1hqk"}, ""),
    "mask-blocks": ({}, "blocks as bool"),
    "blocks": ({}, "blocks"),
    "docs": ({}, "documents"),
    "docs-causal": ({"causal": True}, "documents"),
}
_BIAS: _Kinds = {
    "bias": ({"bias": "11qk"}, ""),
    "bias-heads": ({"bias": "1hqk"}, ""),
    "alibi": ({"alibi": "h"}, ""),
    "alibi-causal": ({"alibi": "h", "causal": True}, ""),
    "softcap": ({"softcap": 30.0}, ""),
    "sinks": ({"sinks": True}, ""),
}
_VARLEN: _Kinds = {"varlen": ({}, "packed"), "varlen-causal": ({"causal": True}, "packed")}
_GRADIENTS: _Kinds = {
    **{kind: (_MASKS | _BIAS)[kind] for kind in ("mask", "docs-causal")},
    "window": ({"window": (127, None), "causal": True}, ""),
    **{kind: _BIAS[kind] for kind in ("bias", "bias-heads", "alibi-causal", "softcap")},
    "sinks-causal": ({"sinks": True, "causal": True}, ""),
}
_DROPOUT: _Kinds = {"dropout": ({}, "dropout")}  # short: its check draws in torch ops


@dataclass(frozen=True)
class Case(plain.Case):
    """One row: a problem, what is laid over it, which pass is timed, who its ratio is made with, and whether
    our own call without its mask or bias is timed beside it. `part` names its table among those of its
    suite. The last fields are of the suite "decode" alone."""

    laid: str = ""  # a key of `problem.LAID`; "": the workload is all
    peer: str = SDPA  # or a key of `PEERS`, timed in a process of its own; "": nobody else has it
    dense: Workload | None = None  # the plain call's problem, if it is another: of about the same work
    timed: str = FORWARD
    part: str = ""
    page_size: int = 0
    private: int = 0  # keys of each request behind the prefix that all share
    ranks: int = 0  # of a zigzag layout, whose ranks have two chunks of rows each
    rank: int = 0

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def section(self) -> str:
        """The title of the table it stands in."""
        if self.suite == PEER_SUITE:
            peer = PEERS[self.peer]
            return peer.title if peer.absent else f"{peer.title} {peer.version}"
        title = {"dense": "", "small": "small calls, "}.get(self.suite, f"{self.suite}, ")
        title = "forward + backward, " if self.timed == STEP else title
        return title + (f"{self.part}, " if self.part else "") + self.workload.dtype


def rows(suites: Sequence[str] = (), *, size: str = "", peers: Sequence[str] = ()) -> tuple[Case, ...]:
    """The rows of `suites`; of none, those of the default: with the plain gradients of two dtypes, and steps.
    `size` is "quick", "" or "long"; `peers` names those of the peer suite, all of them if it is empty."""
    if not suites:
        few = (c for c in _backward(size) if c.part == DENSE and c.workload.dtype != "float16")
        few = (c for c in few if c.workload.head_dim == 64 and c.workload.seqlen_q <= 2048)
        return (*rows(DEFAULT, size=size), *few)
    if unknown := [s for s in suites if s not in SUITES]:
        raise SpecError(f"suite: got {', '.join(unknown)}, wanted some of {', '.join(SUITES)}, or all")
    if unknown := [n for n in peers if n not in PEERS]:
        raise SpecError(f"peers: got {', '.join(unknown)}, wanted some of {', '.join(PEERS)}")
    return tuple(case for suite in suites for case in _rows(suite, size, peers or tuple(PEERS)))


def _rows(suite: str, size: str, peers: Sequence[str]) -> Iterator[Case]:
    n = 256 if size == "quick" else 2048
    if suite in DEFAULT:
        yield from (Case(**vars(case)) for case in plain.cases(suite, size))
    elif suite == PEER_SUITE:
        plainly = 512 if size == "quick" else 2048, 128, None, False
        for name, w in product(peers, workloads("bench")):
            if (w.seqlen_q, w.head_dim, w.window, w.kv_heads != w.heads) == plainly:
                kind = "causal" if w.causal else "full"
                yield Case(PEER_SUITE, kind, replace(w, name=f"{name}-{w.name}"), peer=name)
    elif suite in ("backward", DECODE):
        yield from _backward(size) if suite == "backward" else decode(size)
    else:
        given = {"masks": (_MASKS, 1, n), "bias": (_BIAS, 1, n), "varlen": (_VARLEN, *_members(size))}
        yield from _grid(suite, *given[suite])


def _members(size: str) -> tuple[int, int]:
    """How many members are packed, and the length of the longest."""
    return (8, 64) if size == "quick" else (32, 1024)


def _grid(
    suite: str, kinds: _Kinds, batch: int, n: int, head_dims: Sequence[int] = (64, 128)
) -> Iterator[Case]:
    """Every kind with every dtype and head_dim; 8 heads. torch SDPA is a peer where it has the operand."""
    for dtype, head_dim, (kind, (beyond, laid)) in product(_DTYPES[:2], head_dims, kinds.items()):
        name, sizes = f"{kind}-{dtype}-{n}-d{head_dim}", (batch, _HEADS, _HEADS, n, n, head_dim)
        w = Workload(name, _TAG, *sizes, dtype=dtype, **beyond)
        peer = "" if w.alibi or w.softcap or w.sinks or laid == "dropout" else SDPA
        yield Case(suite, kind, w, laid=laid, peer=peer, plain=True)


def _backward(size: str) -> Iterator[Case]:
    """Gradients of the plain problem, of heads and members that divide badly, and of every operand; steps."""
    longest, shared = _LONGEST_BACKWARD[size], 512 if size == "quick" else 2048

    def square(
        dtype: str, heads: int, n: int, dim: int, causal: bool, *, also: str = "", **more: Any
    ) -> Case:
        """Gradients of one problem, named after it; `more` are fields of the case, and `kv_heads`."""
        kind, sizes = "causal" if causal else "full", (1, heads, more.pop("kv_heads", heads), n, n, dim)
        w = Workload(f"backward-{kind}-{dtype}-{n}-d{dim}{also}", _TAG, *sizes, dtype=dtype, causal=causal)
        return Case("backward", kind, w, **{"timed": BACKWARD, **more})

    lengths = [n for n in (512, 2048, 4096) if n <= longest]
    for dtype, n, dim, causal in product(_DTYPES, lengths, (64, 128), (False, True)):
        yield square(dtype, _HEADS, n, dim, causal)
    # 8 heads over 2 key/value heads, and 2 or 1 heads of twice the length: few items for many threads
    for dtype, causal, dim in product(_DTYPES[:2], (False, True), (64, 128)):
        few = [square(dtype, _HEADS, shared, dim, causal, also="-gqa", kv_heads=2)]
        for heads in (2, 1) if dim == 64 else (2,):
            few.append(square(dtype, heads, 2 * shared, dim, causal, also=f"-h{heads}"))
        for case in few:
            w = case.workload
            n = round(w.seqlen_q * (w.heads / _HEADS) ** 0.5)  # the work is about heads·seqlen²
            dense = replace(w, heads=_HEADS, kv_heads=_HEADS, seqlen_q=n, seqlen_k=n)
            yield replace(case, part=SHARES, plain=True, dense=dense)
    for part, kinds, batch, n in (
        (SHARES, _VARLEN, *_members(size)),
        (OPERANDS, _GRADIENTS, 1, 256 if size == "quick" else 2048),
        (OPERANDS, _DROPOUT, 1, 256 if size == "quick" else 512),
    ):
        for case in _grid("backward", kinds, batch, n, (64, 128) if size == "long" else (64,)):
            named = replace(case.workload, name=f"backward-{case.name}")
            yield replace(case, workload=named, timed=BACKWARD, part=part)
    for dtype, n in product(_DTYPES[:2], _CALL_LENGTHS):
        case = square(dtype, _HEADS, n, 64, False, timed=STEP)
        yield replace(case, workload=replace(case.workload, name=case.name.replace("backward", "step")))


def decode(size: str = "") -> list[Case]:
    """Every row; with "quick" of at most 512 keys. Those with the same keys and values stand together."""
    made, quick = [], size == "quick"

    def add(part: str, kind: str, name: str, dtype: str, batch: int, n: int, keys: int, **more: Any) -> None:
        """One row, causal if it has several query rows; `more` are fields of the case, and two of its
        workload."""
        heads, dim = more.pop("heads", 0) or _KINDS[kind], more.pop("head_dim", 128)
        causal = more.pop("causal", n > 1)
        w = Workload(name, _TAG, batch, heads, _KV_HEADS, n, keys, dim, dtype=dtype, causal=causal)
        made.append(Case(DECODE, kind, w, part=part, **{"peer": "", "plain": True, **more}))

    for dtype, dim, n, kind, rows in product(
        ("bfloat16", "float16", "float32"),
        (64, 128),
        (256, 512) if quick else (4096, 16384, 65536),
        _KINDS,
        (1, 2, 4, 8),
    ):
        name = f"decode-{kind}-{dtype}-q{rows}-{n}-d{dim}"
        add(STEPS, kind, name, dtype, 1, rows, n, head_dim=dim, peer=SDPA, plain=False)
    # so that a step in time shows, wherever one kernel takes over from another
    some = (_PRECISE[-1:], (64, 100), (8, 16)) if quick else (_PRECISE, _FEW_KEYS, _FEW_ROWS)
    for dtype, group, n, count in product(some[0], (1, 4, 8), *some[1:]):
        if count % group == 0 and 0 < count // group <= n:
            name = f"rows-{dtype}-g{group}-{n}-r{count}"
            add(FEW_ROWS, "", name, dtype, 1, count // group, n, heads=8 * group, peer=SDPA, plain=False)
    orders = ((TOKENS_OUTER, "tokens"), (HEADS_OUTER, "heads"))
    for dtype, n, kind, (order, short), (rows, lie) in product(
        _PRECISE, (512,) if quick else (16384, 65536), _KINDS, orders, ((1, ""), (1, IN_ORDER), (4, ""))
    ):
        name = f"paged-{kind}-{dtype}-q{rows}-{n}-{short}{'-ordered' if lie else ''}"
        add(PAGED, kind, name, dtype, 1, rows, n, laid=order + lie, page_size=_PAGE)
    batch, longest = (4, 256) if quick else (_REQUESTS, 32768)
    spacings = [(GEOMETRIC, dtype) for dtype in _PRECISE] + [(EVEN, _PRECISE[0])]
    for (spacing, dtype), kind in product(spacings, _KINDS):
        name = f"ragged-{spacing}-{kind}-{dtype}-{longest}"
        add(RAGGED, kind, name, dtype, batch, 1, longest, laid=spacing, page_size=_PAGE)
    prefix, own = (256, 32) if quick else (8192, 256)
    for dtype, kind in product(_PRECISE, _KINDS):
        name = f"cascade-{kind}-{dtype}-{batch}x{prefix}"
        add(CASCADE, kind, name, dtype, batch, 1, prefix + own, page_size=_PAGE, private=own)
    # Each group's rows are the last ones of its chunk, so that the keys do not grow with the rows. The rank
    # in the middle saves about the mean of what all ranks save.
    counts, n = ([1, 16], 512) if quick else ([2**n for n in range(10)], 16384)
    zigzag, chunks = ((2,), (2,)) if quick else ((2, 4, 8, 16), (2, 8))
    layouts = ((ZIGZAG, zigzag, counts), (CHUNKS, chunks, counts if quick else counts[::2]))
    for dtype, (laid, worlds, counts) in product(_PRECISE, layouts):
        for ranks, rows in product(worlds, counts):
            where = {"heads": _HEADS, "laid": laid, "ranks": ranks, "rank": ranks // 2}
            add(GROUPS, laid, f"groups-{laid}-{dtype}-w{ranks}-r{rows}", dtype, 1, rows, n, **where)
    batches = ((1, 512), (3, 256)) if quick else _BATCHES
    for dtype, (batch, n), kind, rows in product(_PRECISE, batches, _KINDS, (1, 4)):
        name = f"invariance-{kind}-{dtype}-b{batch}-q{rows}-{n}"
        add(INVARIANCE, kind, name, dtype, batch, rows, n, plain=False)
    for kind, n, scheme in product(_KINDS, (256,) if quick else (4096, 16384, 65536), _SCHEMES):
        name, plain = f"codes-{kind}-{n}-{scheme}", scheme != "bfloat16"
        if kind == "gqa" or scheme not in _BYTES:  # a single row has its products in 16 bits
            add(CODES, kind, name, "bfloat16", 1, 1, n, laid=scheme, plain=plain)
    n = 128 if quick else 2048
    for dtype, dim, causal in product(_PRECISE, (64, 128), (False, True)):
        kind = "causal" if causal else "full"
        name, more = f"codes-{kind}-{dtype}-{n}-d{dim}", {"head_dim": dim, "heads": 8, "causal": causal}
        add(PREFILL, kind, name, dtype, 1, n, n, laid="int8-bytes", peer=SDPA, **more)
    return made
