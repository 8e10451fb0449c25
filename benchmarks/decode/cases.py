"""The rows of the suite "decode": few query rows over long keys, in the shapes that generation has.

Its tables (`Case.part`): the plain step; a few rows over few keys and many; pages against a contiguous cache;
a batch of many lengths against one long request; a shared prefix; query groups over one key/value set; what
bits that depend on nothing cost.
"""

from __future__ import annotations

from benchmarks.cases import DECODE, Case
from polyflash.bench.suite import SDPA
from polyflash.workloads import Workload

STEPS, FEW_ROWS, PAGED, RAGGED, CASCADE, GROUPS, INVARIANCE = (
    "", "few rows", "pages", "ragged", "shared prefix", "groups", "invariance",
)  # fmt: skip
TOKENS_OUTER, HEADS_OUTER = "by token", "by head"  # what is outermost inside a page
IN_ORDER = ", in order"  # pages as an empty pool gives them to its first request; else they are shuffled
EVEN, GEOMETRIC = "even", "geometric"  # how the lengths of a ragged batch lie between 1 and the longest
ZIGZAG, CHUNKS = "zigzag", "chunks"  # the two chunks of one rank; those of all ranks
HEADS = {"mha": (8, 8), "gqa": (32, 8)}  # query heads, key/value heads
PAGE = 16

_TAG = frozenset({"bench"})
_DTYPES = ("bfloat16", "float16", "float32")
_PRECISE = ("bfloat16", "float32")
_REQUESTS = 32
_GROUP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_FEW_KEYS = (64, 128, 256, 512, 1000, 1024, 4096)
_FEW_ROWS = (1, 2, 4, 8, 9, 12, 16, 24, 32, 40, 64, 72, 96, 128)
_RANKS = (2, 4, 8, 16)
_BATCHES = ((1, 4096), (1, 16384), (1, 65536), (4, 4096), (32, 1024))  # requests, keys of each
_QUICK_BATCHES = ((1, 512), (3, 256))


def rows(size: str = "") -> list[Case]:
    """Every row; with "quick" of at most 512 keys. Those with the same keys and values stand together."""
    quick = size == "quick"
    return [
        *_steps(quick),
        *_few_rows(quick),
        *_paged(quick),
        *_ragged(quick),
        *_cascade(quick),
        *_groups(quick),
        *_invariance(quick),
    ]


def _workload(
    name: str, dtype: str, kind: str, batch: int, seqlen_q: int, seqlen_k: int, head_dim: int = 128
) -> Workload:
    heads, kv_heads = HEADS[kind]
    return Workload(
        name, _TAG, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype=dtype, causal=seqlen_q > 1
    )


def _steps(quick: bool) -> list[Case]:
    made = []
    for dtype in _DTYPES:
        for head_dim in (64, 128):
            for seqlen in (256, 512) if quick else (4096, 16384, 65536):
                for kind in HEADS:
                    for seqlen_q in (1, 2, 4, 8):
                        name = f"decode-{kind}-{dtype}-q{seqlen_q}-{seqlen}-d{head_dim}"
                        w = _workload(name, dtype, kind, 1, seqlen_q, seqlen, head_dim)
                        made.append(Case(DECODE, kind, w, peer=SDPA))
    return made


def _few_rows(quick: bool) -> list[Case]:
    """So that a step in time shows, wherever one kernel takes over from another."""
    made = []
    for dtype in _PRECISE[-1:] if quick else _PRECISE:
        for group in (1, 4, 8):
            for seqlen in (64, 100) if quick else _FEW_KEYS:
                for count in (8, 16) if quick else _FEW_ROWS:
                    tokens = count // group
                    if tokens * group == count and tokens <= seqlen:
                        name = f"rows-{dtype}-g{group}-{seqlen}-r{count}"
                        w = Workload(
                            name, _TAG, 1, 8 * group, 8, tokens, seqlen, 128, dtype=dtype, causal=tokens > 1
                        )
                        made.append(Case(DECODE, "", w, peer=SDPA, part=FEW_ROWS))
    return made


def _paged(quick: bool) -> list[Case]:
    made = []
    for dtype in _PRECISE:
        for seqlen in (512,) if quick else (16384, 65536):
            for kind in HEADS:
                for order, short in ((TOKENS_OUTER, "tokens"), (HEADS_OUTER, "heads")):
                    for seqlen_q, lie in ((1, ""), (1, IN_ORDER), (4, "")):
                        name = f"paged-{kind}-{dtype}-q{seqlen_q}-{seqlen}-{short}{'-ordered' if lie else ''}"
                        w = _workload(name, dtype, kind, 1, seqlen_q, seqlen)
                        made.append(Case(DECODE, kind, w, order + lie, "", True, part=PAGED, page_size=PAGE))
    return made


def _ragged(quick: bool) -> list[Case]:
    made = []
    for spacing in (GEOMETRIC, EVEN):
        for dtype in _PRECISE if spacing == GEOMETRIC else _PRECISE[:1]:
            for kind in HEADS:
                requests, longest = (4, 256) if quick else (_REQUESTS, 32768)
                name = f"ragged-{spacing}-{kind}-{dtype}-{longest}"
                w = _workload(name, dtype, kind, requests, 1, longest)
                made.append(Case(DECODE, kind, w, spacing, "", True, part=RAGGED, page_size=PAGE))
    return made


def _cascade(quick: bool) -> list[Case]:
    made = []
    requests, prefix, private = (4, 256, 32) if quick else (_REQUESTS, 8192, 256)
    for dtype in _PRECISE:
        for kind in HEADS:
            name = f"cascade-{kind}-{dtype}-{requests}x{prefix}"
            w = _workload(name, dtype, kind, requests, 1, prefix + private)
            made.append(Case(DECODE, kind, w, "", "", True, part=CASCADE, page_size=PAGE, private=private))
    return made


def _groups(quick: bool) -> list[Case]:
    """Each group's rows are the last ones of its chunk, so that the keys do not grow with the rows. The rank
    in the middle saves about the mean of what all ranks save."""
    made = []
    seqlen = 512 if quick else 16384
    counts = (1, 16) if quick else _GROUP_ROWS
    for dtype in _PRECISE:
        for laid in (ZIGZAG, CHUNKS):
            for ranks in (2,) if quick else _RANKS if laid == ZIGZAG else (2, 8):
                for count in counts if laid == ZIGZAG or quick else _GROUP_ROWS[::2]:
                    name = f"groups-{laid}-{dtype}-w{ranks}-r{count}"
                    w = _workload(name, dtype, "mha", 1, count, seqlen)
                    made.append(
                        Case(DECODE, laid, w, laid, "", True, part=GROUPS, ranks=ranks, rank=ranks // 2)
                    )
    return made


def _invariance(quick: bool) -> list[Case]:
    made = []
    for dtype in _PRECISE:
        for batch, seqlen in _QUICK_BATCHES if quick else _BATCHES:
            for kind in HEADS:
                for seqlen_q in (1, 4):
                    name = f"invariance-{kind}-{dtype}-b{batch}-q{seqlen_q}-{seqlen}"
                    w = _workload(name, dtype, kind, batch, seqlen_q, seqlen)
                    made.append(Case(DECODE, kind, w, "", "", part=INVARIANCE))
    return made
