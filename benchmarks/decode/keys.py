"""Keys and values of the suite "decode": sets that no cache holds, contiguous and in pages, and the loops
that read them.

A decode step reads memory that the rest of the model has long driven out of every cache. So each call takes
the next of several sets, which together are `SPILL` times as large as the last cache (tiny ones: `MOST`
sets).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from benchmarks.decode import stream
from polyflash.kvcache.layout import empty_pool
from polyflash.workloads import Workload

SPILL, MOST = 4, 64
IN_ORDER, PLACES = "read, in order", f"read, {stream.PLACES} places at once"
AMAX = "torch.amax of keys and values"
READERS = (IN_ORDER, PLACES, AMAX)  # each reads every byte of a key set once
PAGES = "read, page by page"
T = TypeVar("T")


def between(reader: str) -> str:
    """The arm of a reader that runs where `suite.AFTER` does."""
    return f"{reader}, right after a torch operation"


class Turn(Generic[T]):
    """Each call gives the next of the things, shared by all arms: whoever comes next finds it in no cache."""

    def __init__(self, things: list[T]) -> None:
        self.things, self._at = things, 0

    def __call__(self) -> T:
        self._at = (self._at + 1) % len(self.things)
        return self.things[self._at]

    def each(self, call: Callable[[T], object]) -> Callable[[], object]:
        """An arm: the call on the next thing."""
        return lambda: call(self())


@dataclass(frozen=True)
class KeySet:
    """k, v (batch, num_kv_heads, seqlen_k, head_dim), contiguous, and what reads both by the names of its
    arms: our loops, where there is a compiler, and torch's."""

    k: Tensor
    v: Tensor
    reads: dict[str, Callable[[], object]]

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def read(self, name: str) -> None:
        self.reads[name]()


def key_set(k: Tensor, v: Tensor) -> KeySet:
    reads: dict[str, Callable[[], object]] = {AMAX: lambda: (torch.amax(k), torch.amax(v))}
    if stream.available():
        reads |= {IN_ORDER: stream.Read([k, v]), PLACES: stream.Read([k, v], stream.PLACES)}
    return KeySet(k, v, reads)


def readers(turn: Turn[KeySet]) -> dict[str, Callable[[], object]]:
    """The arms that only read the next set, by name."""
    return {n: turn.each(partial(KeySet.read, name=n)) for n in READERS if n in turn.things[0].reads}


def key_sets(w: Workload) -> list[KeySet]:
    """Enough of them; all hold the same values, so that any output can be checked. The last ones made are
    kept, as neighbouring rows share them."""
    return _key_sets(w.dtype, w.batch, w.kv_heads, w.seqlen_k, w.head_dim)


@lru_cache(maxsize=1)
def _key_sets(dtype: str, *shape: int) -> list[KeySet]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in "kv")
    count = copies(k.nbytes + v.nbytes)
    return [key_set(k, v), *(key_set(k.clone(), v.clone()) for _ in range(count - 1))]


def copies(size: int) -> int:
    """How many sets of `size` bytes no cache holds."""
    return min(MOST, -(-SPILL * stream.last_level_bytes() // size))


@dataclass(frozen=True)
class Pool:
    """k, v (num_pages, page_size, num_kv_heads, head_dim), and a table (batch, pages of the longest)."""

    k: Tensor
    v: Tensor
    table: Tensor


def pool(k: Tensor, v: Tensor, page_size: int, *, heads_outer: bool = False, in_order: bool = False) -> Pool:
    """One request's keys, k and v (1, num_kv_heads, seqlen_k, head_dim), in pages that are shuffled unless
    `in_order`. With `heads_outer` the tokens of one head lie together inside a page."""
    pages = k.shape[2] // page_size
    shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    order = torch.arange(pages) if in_order else shuffled

    def paged(x: Tensor) -> Tensor:
        whole = x[0].unflatten(1, (pages, page_size))  # heads, pages, tokens, channels
        dims = (1, 0, 2, 3) if heads_outer else (1, 2, 0, 3)
        placed = empty_pool([whole.shape[d] for d in dims], x.dtype, "cpu")
        placed[order] = whole.permute(dims)
        return placed.transpose(1, 2) if heads_outer else placed

    return Pool(paged(k), paged(v), order.int()[None])


def page_reads(p: Pool) -> dict[str, stream.Read]:
    """What reads one request's pages in the order of its table, K and V by turns, each at several places at
    once; none without a compiler."""
    if not stream.available():
        return {}
    dense = [x if x.is_contiguous() else x.transpose(1, 2) for x in (p.k, p.v)]
    return {PAGES: stream.Read([x[page] for page in p.table[0].tolist() for x in dense], stream.PLACES)}


def random_pool(w: Workload, pages: int, page_size: int) -> list[Tensor]:
    """k and v pages of random values; a block of them is drawn and repeated, as drawing is slow."""
    generator = torch.Generator().manual_seed(0)
    drawn = min(pages, max(1, (1 << 23) // (page_size * w.kv_heads * w.head_dim)))
    made = []
    for _ in "kv":
        block = torch.randn(drawn, page_size, w.kv_heads, w.head_dim, generator=generator)
        whole = empty_pool((pages, *block.shape[1:]), getattr(torch, w.dtype), "cpu")
        for start in range(0, pages, drawn):
            whole[start : start + drawn] = block[: pages - start]
        made.append(whole)
    return made


def gathered(x: Tensor, table: Tensor, length: int) -> Tensor:
    """What a request sees of the pages, (1, num_kv_heads, length, head_dim)."""
    pages = table[: -(-length // x.shape[1])].long()
    return x[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
