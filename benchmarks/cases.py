"""The rows of the benchmark, as data: a suite is a list of problems, each with what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.peers import PEERS
from polyflash.bench.suite import SDPA, cases
from polyflash.bench.suite import SUITES as DEFAULT  # and a few rows of "backward"
from polyflash.errors import SpecError
from polyflash.workloads import Workload, workloads

PEER_SUITE = "peers"
DECODE = "decode"
SUITES = (*DEFAULT, "masks", "bias", "varlen", "backward", DECODE, PEER_SUITE)
OF_CPUS = (DECODE, PEER_SUITE)  # their scale is a CPU's memory; their peers run there
FORWARD, BACKWARD, STEP = "forward", "backward", "step"  # what is timed; a step: forward, then backward
DENSE, SHARES, OPERANDS = "", "heads and members", "operands"  # tables of the suite "backward"

_LONGEST_BACKWARD = {"quick": 512, "": 2048, "long": 4096}
_TAG = frozenset({"bench"})
# kind: what its `Workload` has beyond the plain problem, and what is laid over it (`problem.LAID`)
_MASKS: dict[str, tuple[dict, str]] = {
    "mask": ({"mask": "11qk"}, ""),
    "mask-heads": ({"mask": "1hqk"}, ""),
    "mask-blocks": ({}, "blocks as bool"),
    "blocks": ({}, "blocks"),
    "docs": ({}, "documents"),
    "docs-causal": ({"causal": True}, "documents"),
}
_BIAS: dict[str, tuple[dict, str]] = {
    "bias": ({"bias": "11qk"}, ""),
    "bias-heads": ({"bias": "1hqk"}, ""),
    "alibi": ({"alibi": "h"}, ""),
    "alibi-causal": ({"alibi": "h", "causal": True}, ""),
    "softcap": ({"softcap": 30.0}, ""),
    "sinks": ({"sinks": True}, ""),
}
_VARLEN: dict[str, tuple[dict, str]] = {
    "varlen": ({}, "packed"),
    "varlen-causal": ({"causal": True}, "packed"),
}
_MEMBERS, _LONGEST_MEMBER = 32, 1024
_HEADS = 8
_GRADIENTS: dict[str, tuple[dict, str]] = {
    "mask": ({"mask": "11qk"}, ""),
    "docs-causal": ({"causal": True}, "documents"),
    "window": ({"window": (127, None), "causal": True}, ""),
    "bias": ({"bias": "11qk"}, ""),
    "bias-heads": ({"bias": "1hqk"}, ""),
    "alibi-causal": ({"alibi": "h", "causal": True}, ""),
    "softcap": ({"softcap": 30.0}, ""),
    "sinks-causal": ({"sinks": True, "causal": True}, ""),
}
_DROPOUT: dict[str, tuple[dict, str]] = {"dropout": ({}, "dropout")}  # short: its check draws in torch ops
_STEPS = (16, 64, 128)  # lengths at which a training step is mostly the cost of its calls


@dataclass(frozen=True)
class Case:
    """One row: a problem, what is laid over it, which pass is timed, who its ratio is made with, and whether
    our own call without its mask or bias is timed beside it. `part` names its table among those of its
    suite. The last fields are of the suite "decode" alone (`decode_cases.py`)."""

    suite: str
    kind: str
    workload: Workload
    laid: str = ""  # a key of `problem.LAID`; "": the workload is all
    peer: str = SDPA  # or a key of `PEERS`, timed in a process of its own; "": nobody else has it
    plain: bool = False
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
        first = [c for c in rows(("backward",), size=size) if _is_first(c)]
        return (*rows(DEFAULT, size=size), *first)
    unknown = [s for s in suites if s not in SUITES]
    if unknown:
        raise SpecError(f"suite: got {', '.join(unknown)}, wanted some of {', '.join(SUITES)}, or all")
    quick, head_dims, dtypes = size == "quick", (64, 128), ("float32", "bfloat16")
    chosen: list[Case] = []
    for suite in suites:
        if suite in DEFAULT:
            chosen += [Case(c.suite, c.kind, c.workload, plain=c.plain) for c in cases(suite, size)]
        elif suite == PEER_SUITE:
            chosen += _peers(peers or tuple(PEERS), 512 if quick else 2048)
        elif suite == "backward":
            chosen += _backward(size)
        elif suite == DECODE:
            from benchmarks.decode import cases as decode_cases

            chosen += decode_cases.rows(size)
        elif suite == "varlen":
            chosen += _grid(suite, _VARLEN, dtypes, head_dims, *_members(quick))
        else:
            kinds = _MASKS if suite == "masks" else _BIAS
            chosen += _grid(suite, kinds, dtypes, head_dims, 1, 256 if quick else 2048)
    return tuple(chosen)


def _is_first(case: Case) -> bool:
    """Does a row of "backward" belong to the default: the plain problem in two dtypes, and steps?"""
    w = case.workload
    return w.dtype != "float16" and w.head_dim == 64 and w.seqlen_q <= 2048 and case.part == DENSE


def _members(quick: bool) -> tuple[int, int]:
    """How many members are packed, and the length of the longest."""
    return (8, 64) if quick else (_MEMBERS, _LONGEST_MEMBER)


def _grid(
    suite: str,
    kinds: dict[str, tuple[dict, str]],
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    batch: int,
    seqlen: int,
) -> list[Case]:
    """Every kind with every dtype and head_dim; 8 heads. torch SDPA is a peer where it has the operand."""
    made = []
    for dtype in dtypes:
        for head_dim in head_dims:
            for kind, (beyond, laid) in kinds.items():
                name = f"{kind}-{dtype}-{seqlen}-d{head_dim}"
                w = Workload(name, _TAG, batch, 8, 8, seqlen, seqlen, head_dim, dtype=dtype, **beyond)
                peer = "" if w.alibi or w.softcap or w.sinks or laid == "dropout" else SDPA
                made.append(Case(suite, kind, w, laid, peer, plain=True))
    return made


def _backward(size: str) -> list[Case]:
    """Gradients of the plain problem, of heads and members that divide badly, and of every operand; steps."""
    lengths = [n for n in (512, 2048, 4096) if n <= _LONGEST_BACKWARD[size]]
    made: list[Case] = []
    for dtype in ("float32", "bfloat16", "float16"):
        for seqlen in lengths:
            for head_dim in (64, 128):
                made += [_gradient(_square(dtype, _HEADS, seqlen, head_dim, c)) for c in (False, True)]
    quick = size == "quick"
    for dtype in ("float32", "bfloat16"):
        for w in _shared(dtype, 512 if quick else 2048):
            dense = replace(w, heads=_HEADS, kv_heads=_HEADS)
            if w.heads != _HEADS:  # the work of a problem is about heads·seqlen²
                seqlen = round(w.seqlen_q * (w.heads / _HEADS) ** 0.5)
                dense = replace(dense, seqlen_q=seqlen, seqlen_k=seqlen)
            made.append(replace(_gradient(w), part=SHARES, plain=True, dense=dense))
    head_dims = (64, 128) if size == "long" else (64,)
    for part, kinds, batch, seqlen in (
        (SHARES, _VARLEN, *_members(quick)),
        (OPERANDS, _GRADIENTS, 1, 256 if quick else 2048),
        (OPERANDS, _DROPOUT, 1, 256 if quick else 512),
    ):
        for case in _grid("backward", kinds, ("float32", "bfloat16"), head_dims, batch, seqlen):
            named = replace(case.workload, name=f"backward-{case.name}")
            made.append(replace(case, workload=named, timed=BACKWARD, part=part))
    for dtype in ("float32", "bfloat16"):
        for seqlen in _STEPS:
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
    for causal in (False, True):
        for head_dim in (64, 128):
            w = _square(dtype, _HEADS, seqlen, head_dim, causal)
            made.append(replace(w, name=f"{w.name}-gqa", kv_heads=2))
            for heads in (2, 1) if head_dim == 64 else (2,):
                few = _square(dtype, heads, 2 * seqlen, head_dim, causal)
                made.append(replace(few, name=f"{few.name}-h{heads}"))
    return made


def _peers(names: Sequence[str], seqlen: int) -> list[Case]:
    unknown = [n for n in names if n not in PEERS]
    if unknown:
        raise SpecError(f"peers: got {', '.join(unknown)}, wanted some of {', '.join(PEERS)}")
    made = []
    for name in names:
        for w in workloads("bench"):
            if w.seqlen_q == seqlen and w.head_dim == 128 and w.window is None and w.kv_heads == w.heads:
                kind = "causal" if w.causal else "full"
                made.append(Case(PEER_SUITE, kind, replace(w, name=f"{name}-{w.name}"), peer=name))
    return made
