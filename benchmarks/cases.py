"""The rows of the benchmark, as data: a suite is a list of problems, each with what it is compared with.

The suite "decode" has few query rows over long keys, in the shapes of generation. Its tables (`Case.part`):
the plain step; few rows over few keys and many; pages against a contiguous cache; a batch of many lengths
against one long request; a shared prefix; query groups over one key/value set; what bits that depend on
nothing cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks.peers import PEERS
from polyflash.bench import suite as plain
from polyflash.bench.suite import SDPA, cases
from polyflash.bench.suite import SUITES as DEFAULT  # and a few rows of "backward"
from polyflash.errors import SpecError
from polyflash.workloads import Workload, workloads

PEER_SUITE, DECODE = "peers", "decode"
SUITES = (*DEFAULT, "masks", "bias", "varlen", "backward", DECODE, PEER_SUITE)
OF_CPUS = (DECODE, PEER_SUITE)  # their scale is a CPU's memory; their peers run there
FORWARD, BACKWARD, STEP = "forward", "backward", "step"  # what is timed; a step: forward, then backward
DENSE, SHARES, OPERANDS = "", "heads and members", "operands"  # tables of the suite "backward"
STEPS, FEW_ROWS, PAGED, RAGGED, CASCADE, GROUPS, INVARIANCE = (
    "", "few rows", "pages", "ragged", "shared prefix", "groups", "invariance",
)  # fmt: skip
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


def rows(suites: Sequence[str] = (), *, size: str = "", peers: Sequence[str] = ()) -> tuple[Case, ...]:
    """The rows of `suites`; of none, those of the default. `size` is "quick", "" or "long"; `peers` names
    those of the peer suite, all of them if it is empty."""
    if not suites:
        return (*rows(DEFAULT, size=size), *filter(_is_first, _backward(size)))
    if unknown := [s for s in suites if s not in SUITES]:
        raise SpecError(f"suite: got {', '.join(unknown)}, wanted some of {', '.join(SUITES)}, or all")
    quick = size == "quick"
    made: dict[str, Callable[[], list[Case]]] = {
        "masks": lambda: _grid("masks", _MASKS, 1, 256 if quick else 2048),
        "bias": lambda: _grid("bias", _BIAS, 1, 256 if quick else 2048),
        "varlen": lambda: _grid("varlen", _VARLEN, *_members(quick)),
        "backward": lambda: _backward(size),
        DECODE: lambda: decode(size),
        PEER_SUITE: lambda: _peers(peers or tuple(PEERS), 512 if quick else 2048),
    }
    for suite in DEFAULT:
        made[suite] = partial(_plain, suite, size)
    return tuple(case for suite in suites for case in made[suite]())


def _plain(suite: str, size: str) -> list[Case]:
    return [Case(**vars(case)) for case in cases(suite, size)]


def _is_first(case: Case) -> bool:
    """Does a row of "backward" belong to the default: the plain problem in two dtypes, and steps?"""
    w = case.workload
    return w.dtype != "float16" and w.head_dim == 64 and w.seqlen_q <= 2048 and case.part == DENSE


def _members(quick: bool) -> tuple[int, int]:
    """How many members are packed, and the length of the longest."""
    return (8, 64) if quick else (32, 1024)


def _grid(
    suite: str, kinds: _Kinds, batch: int, seqlen: int, head_dims: Sequence[int] = (64, 128)
) -> list[Case]:
    """Every kind with every dtype and head_dim; 8 heads. torch SDPA is a peer where it has the operand."""
    made = []
    for dtype, head_dim, (kind, (beyond, laid)) in product(_DTYPES[:2], head_dims, kinds.items()):
        name = f"{kind}-{dtype}-{seqlen}-d{head_dim}"
        w = Workload(name, _TAG, batch, _HEADS, _HEADS, seqlen, seqlen, head_dim, dtype=dtype, **beyond)
        peer = "" if w.alibi or w.softcap or w.sinks or laid == "dropout" else SDPA
        made.append(Case(suite, kind, w, laid=laid, peer=peer, plain=True))
    return made


def _backward(size: str) -> list[Case]:
    """Gradients of the plain problem, of heads and members that divide badly, and of every operand; steps."""
    quick, lengths = size == "quick", [n for n in (512, 2048, 4096) if n <= _LONGEST_BACKWARD[size]]
    squares = product(_DTYPES, lengths, (64, 128), (False, True))
    made = [_gradient(_square(dtype, _HEADS, n, dim, causal)) for dtype, n, dim, causal in squares]
    for dtype in _DTYPES[:2]:
        for w in _shared(dtype, 512 if quick else 2048):
            seqlen = round(w.seqlen_q * (w.heads / _HEADS) ** 0.5)  # the work is about heads·seqlen²
            dense = replace(w, heads=_HEADS, kv_heads=_HEADS, seqlen_q=seqlen, seqlen_k=seqlen)
            made.append(replace(_gradient(w), part=SHARES, plain=True, dense=dense))
    head_dims = (64, 128) if size == "long" else (64,)
    for part, kinds, batch, seqlen in (
        (SHARES, _VARLEN, *_members(quick)),
        (OPERANDS, _GRADIENTS, 1, 256 if quick else 2048),
        (OPERANDS, _DROPOUT, 1, 256 if quick else 512),
    ):
        for case in _grid("backward", kinds, batch, seqlen, head_dims):
            named = replace(case.workload, name=f"backward-{case.name}")
            made.append(replace(case, workload=named, timed=BACKWARD, part=part))
    for dtype, seqlen in product(_DTYPES[:2], _CALL_LENGTHS):
        w = _square(dtype, _HEADS, seqlen, 64, False)
        named = replace(w, name=w.name.replace("backward", "step"))
        made.append(Case("backward", "full", named, timed=STEP))
    return made


def _square(dtype: str, heads: int, seqlen: int, head_dim: int, causal: bool) -> Workload:
    name = f"backward-{'causal' if causal else 'full'}-{dtype}-{seqlen}-d{head_dim}"
    return Workload(name, _TAG, 1, heads, heads, seqlen, seqlen, head_dim, dtype=dtype, causal=causal)


def _gradient(w: Workload) -> Case:
    return Case("backward", "causal" if w.causal else "full", w, timed=BACKWARD)


def _shared(dtype: str, seqlen: int) -> list[Workload]:
    """8 heads over 2 key/value heads, and 2 or 1 heads of twice the length: few items for many threads."""
    made = []
    for causal, head_dim in product((False, True), (64, 128)):
        w = _square(dtype, _HEADS, seqlen, head_dim, causal)
        made.append(replace(w, name=f"{w.name}-gqa", kv_heads=2))
        for heads in (2, 1) if head_dim == 64 else (2,):
            few = _square(dtype, heads, 2 * seqlen, head_dim, causal)
            made.append(replace(few, name=f"{few.name}-h{heads}"))
    return made


def _peers(names: Sequence[str], seqlen: int) -> list[Case]:
    if unknown := [n for n in names if n not in PEERS]:
        raise SpecError(f"peers: got {', '.join(unknown)}, wanted some of {', '.join(PEERS)}")
    listed = [w for w in workloads("bench") if (w.seqlen_q, w.head_dim, w.window) == (seqlen, 128, None)]
    return [
        Case(PEER_SUITE, "causal" if w.causal else "full", replace(w, name=f"{name}-{w.name}"), peer=name)
        for name, w in product(names, listed)
        if w.kv_heads == w.heads
    ]


def decode(size: str = "") -> list[Case]:
    """Every row; with "quick" of at most 512 keys. Those with the same keys and values stand together."""
    parts = (_steps, _few_rows, _paged, _ragged, _cascade, _groups, _invariance)
    return [case for part in parts for case in part(size == "quick")]


def _few(
    part: str, kind: str, name: str, dtype: str, batch: int, seqlen_q: int, seqlen_k: int, *,
    heads: int = 0, head_dim: int = 128, **fields: Any,
) -> Case:  # fmt: skip
    """A case of "decode"; causal if it has several rows."""
    heads, given = heads or _KINDS[kind], {"peer": "", "plain": True, **fields}
    w = Workload(
        name, _TAG, batch, heads, _KV_HEADS, seqlen_q, seqlen_k, head_dim, dtype=dtype, causal=seqlen_q > 1
    )
    return Case(DECODE, kind, w, part=part, **given)


def _steps(quick: bool) -> list[Case]:
    keys = (256, 512) if quick else (4096, 16384, 65536)
    return [
        _few(STEPS, kind, f"decode-{kind}-{dtype}-q{rows}-{n}-d{dim}", dtype, 1, rows, n,
             head_dim=dim, peer=SDPA, plain=False)
        for dtype, dim, n, kind, rows in product(
            ("bfloat16", "float16", "float32"), (64, 128), keys, _KINDS, (1, 2, 4, 8)
        )
    ]  # fmt: skip


def _few_rows(quick: bool) -> list[Case]:
    """So that a step in time shows, wherever one kernel takes over from another."""
    keys, counts = ((64, 100), (8, 16)) if quick else (_FEW_KEYS, _FEW_ROWS)
    return [
        _few(FEW_ROWS, "", f"rows-{dtype}-g{group}-{n}-r{count}", dtype, 1, count // group, n,
             heads=8 * group, peer=SDPA, plain=False)
        for dtype, group, n, count in product(_PRECISE[-1:] if quick else _PRECISE, (1, 4, 8), keys, counts)
        if count % group == 0 and 0 < count // group <= n
    ]  # fmt: skip


def _paged(quick: bool) -> list[Case]:
    orders = ((TOKENS_OUTER, "tokens"), (HEADS_OUTER, "heads"))
    return [
        _few(PAGED, kind, f"paged-{kind}-{dtype}-q{rows}-{n}-{short}{'-ordered' if lie else ''}", dtype,
             1, rows, n, laid=order + lie, page_size=_PAGE)
        for dtype, n, kind, (order, short), (rows, lie) in product(
            _PRECISE, (512,) if quick else (16384, 65536), _KINDS, orders, ((1, ""), (1, IN_ORDER), (4, ""))
        )
    ]  # fmt: skip


def _ragged(quick: bool) -> list[Case]:
    requests, longest = (4, 256) if quick else (_REQUESTS, 32768)
    return [
        _few(RAGGED, kind, f"ragged-{spacing}-{kind}-{dtype}-{longest}", dtype, requests, 1, longest,
             laid=spacing, page_size=_PAGE)
        for spacing, dtypes in ((GEOMETRIC, _PRECISE), (EVEN, _PRECISE[:1]))
        for dtype, kind in product(dtypes, _KINDS)
    ]  # fmt: skip


def _cascade(quick: bool) -> list[Case]:
    requests, prefix, private = (4, 256, 32) if quick else (_REQUESTS, 8192, 256)
    return [
        _few(CASCADE, kind, f"cascade-{kind}-{dtype}-{requests}x{prefix}", dtype, requests, 1,
             prefix + private, page_size=_PAGE, private=private)
        for dtype, kind in product(_PRECISE, _KINDS)
    ]  # fmt: skip


def _groups(quick: bool) -> list[Case]:
    """Each group's rows are the last ones of its chunk, so that the keys do not grow with the rows. The rank
    in the middle saves about the mean of what all ranks save."""
    counts = [2**n for n in range(10)]
    layouts: Sequence[tuple[str, Sequence[int], list[int]]]
    layouts = ((ZIGZAG, (2, 4, 8, 16), counts), (CHUNKS, (2, 8), counts[::2]))
    if quick:
        layouts = ((ZIGZAG, (2,), [1, 16]), (CHUNKS, (2,), [1, 16]))
    return [
        _few(GROUPS, laid, f"groups-{laid}-{dtype}-w{ranks}-r{rows}", dtype, 1, rows,
             512 if quick else 16384, heads=_HEADS, laid=laid, ranks=ranks, rank=ranks // 2)
        for dtype, (laid, worlds, counts) in product(_PRECISE, layouts)
        for ranks, rows in product(worlds, counts)
    ]  # fmt: skip


def _invariance(quick: bool) -> list[Case]:
    return [
        _few(INVARIANCE, kind, f"invariance-{kind}-{dtype}-b{batch}-q{rows}-{n}", dtype, batch, rows, n,
             plain=False)
        for dtype, (batch, n), kind, rows in product(
            _PRECISE, ((1, 512), (3, 256)) if quick else _BATCHES, _KINDS, (1, 4)
        )
    ]  # fmt: skip


def section(case: Case) -> str:
    """The title of the table a row stands in."""
    if case.suite == PEER_SUITE:
        peer = PEERS[case.peer]
        return peer.title if peer.absent else f"{peer.title} {peer.version}"
    title = {"dense": "", "small": "small calls, "}.get(case.suite, f"{case.suite}, ")
    title = "forward + backward, " if case.timed == STEP else title
    return title + (f"{case.part}, " if case.part else "") + case.workload.dtype
