"""The rows of the GPU suite, the most telling first: a run that is cut short has measured what matters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from polyflash.spec import AttentionSpec, Phase
from polyflash.work import Work, work_of

FORWARD, BACKWARD, DECODE, GRAPH, HOST = "forward", "backward", "decode", "graph", "host"
PARTS = (FORWARD, BACKWARD, DECODE, GRAPH, HOST)
TOKENS, WIDTH = 16384, 2048  # batch·seqlen and heads·head_dim of the table of the FlashAttention-3 paper
_KEYS = 1 << 21  # most keys of a decode batch: 8.6 GiB of keys and values at 8 heads of 128 in 16 bits
_PHASES = {BACKWARD: Phase.BACKWARD, DECODE: Phase.DECODE, GRAPH: Phase.DECODE}
_EITHER = (False, True)


@dataclass(frozen=True)
class GpuCase:
    """One problem and what is timed of it. `tier`: 0 is measured first. `table`: where its row is printed."""

    part: str
    table: str
    tier: int
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False

    @property
    def name(self) -> str:
        """Of a row in files, tables and `--filter`."""
        kind = f"{self.part}-{'causal' if self.causal else 'full'}-{self.dtype}-d{self.head_dim}"
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}.{self.kv_heads}"
        return f"{kind}-b{self.batch}-h{heads}-q{self.seqlen_q}-k{self.seqlen_k}"

    @property
    def work(self) -> Work:
        """FLOPs of visible pairs; bytes of inputs and outputs."""
        return work_of(AttentionSpec(
            _PHASES.get(self.part, Phase.FORWARD), self.dtype, "cuda", self.batch, self.heads, self.kv_heads,
            self.seqlen_q, self.seqlen_k, self.head_dim, self.head_dim, frozenset(), causal=self.causal,
        ))  # fmt: skip

    @property
    def key_bytes(self) -> int:
        """Of keys and values, read once: what a decode step has to fetch."""
        size = 4 if self.dtype == "float32" else 2
        return 2 * self.batch * self.kv_heads * self.seqlen_k * self.head_dim * size

    def plain(self) -> dict[str, Any]:
        """What `GpuCase(**…)` makes the case of again."""
        return asdict(self)


def rows() -> list[GpuCase]:
    """Every row once, by tier; within a tier as listed here."""
    listed = [*_forward(), *_backward(), *_decode(), *_small(), *_float32()]
    first: dict[str, GpuCase] = {}
    for case in sorted(listed, key=lambda case: case.tier):
        first.setdefault(case.name, case)
    return list(first.values())


def tiny() -> list[GpuCase]:
    """One small row of every part: the whole program on any machine, with figures that mean nothing."""
    return [
        _square(FORWARD, "tiny forward", 0, "float32", 1, 2, 64, 16, False),
        _square(FORWARD, "tiny forward", 0, "float32", 1, 2, 64, 16, True),
        _square(BACKWARD, "tiny backward", 0, "float32", 1, 2, 64, 16, True),
        GpuCase(DECODE, "tiny decode", 1, "float32", 2, 4, 2, 1, 96, 16),
        GpuCase(GRAPH, "tiny graph", 1, "float32", 1, 2, 2, 1, 64, 16),
        _square(HOST, "tiny host", 1, "float32", 1, 2, 32, 16, False),
    ]


def selected(
    every: Sequence[GpuCase], *, words: Sequence[str] = (), parts: Sequence[str] = ()
) -> list[GpuCase]:
    """Rows whose name has every word as one of its dash-separated pieces, of the given parts (none: all)."""
    chosen = [c for c in every if not parts or c.part in parts]
    return [c for c in chosen if set(words) <= set(c.name.split("-"))]


def _square(
    part: str, table: str, tier: int, dtype: str, batch: int, heads: int, seqlen: int, dim: int, causal: bool
) -> GpuCase:
    return GpuCase(part, table, tier, dtype, batch, heads, heads, seqlen, seqlen, dim, causal)


def _paper(part: str, tier: int, dim: int, seqlen: int, causal: bool, dtype: str = "bfloat16") -> GpuCase:
    """A cell of the paper's table: as many requests as make its tokens, as many heads as make its width."""
    table = f"{part}, {dtype}, {TOKENS // 1024}k tokens, {WIDTH} channels"
    return _square(part, table, tier, dtype, max(1, TOKENS // seqlen), WIDTH // dim, seqlen, dim, causal)


def _wide(part: str, tier: int, lengths: Sequence[int]) -> Iterator[GpuCase]:
    for seqlen, causal in product(lengths, _EITHER):
        yield _square(part, f"{part}, batch 4, 48 heads", tier, "bfloat16", 4, 48, seqlen, 128, causal)


def _forward() -> Iterator[GpuCase]:
    for tier, dim, lengths in (
        (0, 128, (8192, 4096, 1024, 16384, 2048)),
        (1, 64, (8192, 1024, 16384, 4096, 2048)),
        (3, 256, (8192, 1024, 4096, 16384, 2048)),
    ):
        yield from (_paper(FORWARD, tier, dim, *x) for x in product(lengths, _EITHER))
    yield from _wide(FORWARD, 4, (4096, 8192, 1024, 2048))
    for seqlen, dim, causal in product((1024, 4096, 16384, 2048, 8192), (128, 64), _EITHER):
        tier, table = (
            3 if seqlen in (1024, 4096) else 5,
            "forward, float16, the shapes of the Triton tutorial",
        )
        yield _square(FORWARD, table, tier, "float16", 4, 32, seqlen, dim, causal)
    for x in product((2048, 8192), _EITHER):  # 8 query heads share a key/value head
        yield replace(_paper(FORWARD, 4, 128, *x), kv_heads=2, table="forward, bfloat16, 16 heads over 2")


def _backward() -> Iterator[GpuCase]:
    for tier, dim, lengths in (
        (0, 128, (8192, 2048)),
        (1, 64, (8192, 2048)),
        (2, 128, (1024, 4096, 16384)),
        (3, 64, (1024, 4096, 16384)),
    ):
        yield from (_paper(BACKWARD, tier, dim, *x) for x in product(lengths, _EITHER))
    yield from _wide(BACKWARD, 5, (4096, 1024))
    yield _paper(BACKWARD, 5, 128, 4096, True, "float16")


def _step(tier: int, heads: int, batch: int, keys: int, dtype: str = "bfloat16", table: str = "") -> GpuCase:
    table = table or f"decode, {heads} heads over 8"
    return GpuCase(DECODE, table, tier, dtype, batch, heads, 8, 1, keys, 128)


def _decode() -> Iterator[GpuCase]:
    for tier, batches, lengths in (
        (1, (8, 64), (8192, 32768)),
        (2, (1, 16, 128), (1024, 8192)),
        (3, (1, 8), (65536, 262144)),
        (4, (1, 4, 16, 64), (1024, 4096, 16384, 131072)),
    ):
        for batch, seqlen, heads in product(batches, lengths, (32, 8)):
            if batch * seqlen <= _KEYS:
                yield _step(tier, heads, batch, seqlen)


def _small() -> Iterator[GpuCase]:
    for batch, heads in product((1, 4), (32, 8)):
        yield replace(_step(1, heads, batch, 1024, table="small decode steps in a CUDA graph"), part=GRAPH)
    yield GpuCase(HOST, "host time of a call", 1, "bfloat16", 1, 8, 8, 128, 128, 64)
    yield GpuCase(HOST, "host time of a call", 2, "bfloat16", 1, 32, 8, 1, 128, 128)
    yield GpuCase(HOST, "host time of a call", 2, "bfloat16", 1, 32, 8, 1, 4096, 128)  # two launches
    yield GpuCase(HOST, "host time of a call", 2, "bfloat16", 1, 8, 8, 128, 4096, 128)  # two launches too


def _float32() -> Iterator[GpuCase]:
    """Products that keep 24 bits."""
    for (heads, seqlen), dim, causal, part in product(
        ((8, 2048), (16, 8192)), (64, 128), _EITHER, (FORWARD, BACKWARD)
    ):
        yield _square(part, f"{part}, float32", 2, "float32", 1, heads, seqlen, dim, causal)
    for heads, (batch, seqlen) in product((32, 8), ((8, 8192), (1, 8192), (64, 1024))):
        yield _step(2, heads, batch, seqlen, "float32", "decode, float32")
