"""How the CPU backward engine is cut up: kernel keys, tiles, key chunks and scratch. Pure arithmetic, no DSL.

An item is one kv head and a range of its keys: its dK and dV belong to it alone. dQ is summed over chunks of
keys whose size follows from the length, in rising order, whether one item walks them all or several items
write one each: no bit depends on the number of threads or on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import BUCKETS, ISAS, LINE, KernelKey
from polyflash.errors import spec_error
from polyflash.spec import Feature

if TYPE_CHECKING:
    from typing import Any

    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

ITEM_WORDS = 48
CHUNK_KEYS = 256  # least keys of a chunk of dQ
MOST_CHUNKS = 8  # as many partial sums of dQ are held at once when a head's keys are shared out
ENOUGH_ITEMS = 4  # per thread: with fewer, the keys of a head are shared out


class BackwardKey(KernelKey):
    """The key of one compiled backward kernel; fields as the forward's."""

    __slots__ = ()
    kind = "backward"
    builder = "polyflash.backends.cpu.kernels.backward"


class BiasGradientKey(configs.StageKey):
    """The key of the code that adds a tile to the gradient of a bias."""

    __slots__ = ()
    kind = "bias_gradient"
    builder = "polyflash.backends.cpu.bias_gradient"


class BackwardScratch(NamedTuple):
    """Byte offsets of a thread's private tiles, those of the forward first, and their total size. A span is
    `row_panels` panels of one query head."""

    q: int  # Q^T of a span
    o: int  # dQ^T of a span
    k: int
    v: int
    s: int  # S^T, then P^T
    p: int  # P^T as bfloat16 rows; float32: s
    stage: int
    stats: int  # lse and delta of every panel
    limits: int
    block: int  # what the pass over scores takes for maxima
    zero: int
    gather: int
    bad: int  # one byte per panel: some of its dO is not finite
    seen: int
    item: int
    kinds: int
    q_ids: int
    k_ids: int
    staged: int
    do: int  # dO^T of a span
    q_rows: int  # rows of Q and dO of a span
    do_rows: int
    out_stage: int  # a vector of rows of out, then one of float32
    dp: int  # dP^T, then dS^T
    ds: int  # dS^T as bfloat16 rows; float32: dp
    ds_pairs: int  # dS^T as bfloat16 pairs of keys; float32: dp
    k_rows: int  # K with zeros for what is not finite
    dk: int
    dv: int
    factor: int  # 1 - tanh² of every score
    keep: int  # the bits that dropout keeps of every score
    total: int


@lru_cache(maxsize=256)
def scratch(key: KernelKey, row_panels: int, block_n: int) -> BackwardScratch:
    """The layout for spans of `row_panels` panels and key blocks of `block_n`."""
    rows, dot = key.panel_rows, key.pack > 1
    scores = block_n * rows * 4
    wide_row = key.bucket * 4 + LINE
    natural = row_panels * -(-rows // key.pack) * key.v_row_bytes
    tile = block_n * key.v_row_bytes
    sizes = (
        row_panels * key.q_panel_bytes,
        row_panels * key.o_panel_bytes,
        block_n * key.k_row_bytes,
        block_n * key.k_row_bytes,
        scores,
        scores // 2 if dot else 0,
        max(key.lanes * key.k_row_bytes, wide_row),
        row_panels * rows * 8,
        row_panels * rows * 8,
        rows * 8,
        wide_row,
        2 * wide_row,
        row_panels,
        rows,
        ITEM_WORDS * 8,
        row_panels,
        row_panels * rows * 4,
        block_n * 4,
        key.lanes * block_n * 5,
        row_panels * key.q_panel_bytes,
        natural,
        natural,
        max(key.lanes * key.k_row_bytes, wide_row),
        scores,
        scores // 2 if dot else 0,
        scores // 2 if dot else 0,
        block_n // key.pack * key.v_row_bytes,
        tile,
        tile,
        scores,
        scores,
    )
    tiles = BackwardScratch._make(configs.placed(sizes))
    return tiles if dot else tiles._replace(p=tiles.s, ds=tiles.dp, ds_pairs=tiles.dp)


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """block_n: keys per block. row_panels: most query panels of a span, held packed while the keys pass by.
    compute, isa: as in the forward's Config."""

    block_n: int
    row_panels: int
    compute: str = "f32"
    isa: str = "avx512"

    def __post_init__(self) -> None:
        configs.check_ints(self, "block_n", "row_panels", change="Take 64 and 16.")
        if self.block_n not in (16, 32, 64, 128):
            raise spec_error("block_n", got=self.block_n, wanted="16, 32, 64 or 128", change="Take 64.")
        if not 1 <= self.row_panels <= 1024:
            raise spec_error("row_panels", got=self.row_panels, wanted="1 to 1024", change="Take 16.")
        configs.check_compute(self.compute, self.isa)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        key = key_for(self, spec, configs.panel_vectors(self.isa, spec.seqlen_q))
        return (
            f"kernel {key.name}: five products per tile, {key.panel_rows} query rows per panel",
            f"dq is summed over chunks of {chunk_keys(spec.seqlen_k)} keys in a fixed order",
        )


def key_for(config: BackwardConfig, spec: AttentionSpec, nv: int) -> BackwardKey:
    """The kernel for a call with panels of `nv` vectors."""
    return configs.key_of(BackwardKey, config, spec.dtype, max(spec.head_dim, spec.head_dim_v), nv)


def all_keys(target: Target) -> Iterator[KernelKey | configs.StageKey]:
    """Every backward kernel that can run on `target`."""
    return configs.keys_of(target, BackwardKey, BiasGradientKey)


SPAN_ROWS, SPAN_ELEMENTS = 1024, 1 << 17  # most query rows held packed while the keys pass by, and elements


def choose(spec: AttentionSpec, target: Target) -> BackwardConfig:
    """Blocks of keys whose tiles, with one panel, take at most three quarters of a core's L2 cache; spans
    that leave a thread's scratch small enough to be kept between calls."""
    isa, compute, dtype = configs.native(spec, target)
    widest = min(max(spec.head_dim, spec.head_dim_v), BUCKETS[-1])
    bucket = next(b for b in BUCKETS if widest <= b)
    key = BackwardKey(isa, compute, dtype, max(ISAS[isa].group_keys), bucket)
    room = target.l2_bytes * 3 // 4
    block_n = next((n for n in (128, 64, 32) if scratch(key, 1, n).total <= room), 16)
    if spec.features & {Feature.MASK, Feature.SEGMENTS}:
        block_n = min(block_n, 64)  # finer tiles, so that more of them are skipped
    rows = min(SPAN_ROWS, SPAN_ELEMENTS // bucket)
    return BackwardConfig(block_n, max(1, rows // key.panel_rows), compute, isa)


def chunk_keys(seqlen_k: int) -> int:
    """Keys of one chunk of dQ: a multiple of every block."""
    return max(CHUNK_KEYS, -(-seqlen_k // (MOST_CHUNKS * 128)) * 128)


def entry_table(
    lens_q: Any, lens_k: Any, heads: int, threads: int, at_once: int | None = None
) -> tuple[Any, int]:
    """int32 (entries, 5): batch entry, first and end key, number of the partial dQ it writes and keys per
    chunk; the most work first. And how many partials there are: 1, or one per chunk where the threads would
    run short of items. `heads` items per entry; `at_once` entries run together (None: all)."""
    chunk = np.maximum(CHUNK_KEYS, -(-lens_k // (MOST_CHUNKS * 128)) * 128)
    pieces = ((lens_q > 0) & (lens_k > 0)).astype(np.int64)
    together = int(pieces.sum()) if at_once is None else at_once
    if threads > 1 and together * heads < ENOUGH_ITEMS * threads:
        pieces *= -(-lens_k // chunk)
    entry = np.repeat(np.arange(len(lens_q)), pieces)
    number = np.arange(len(entry)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    split = pieces[entry] > 1
    begin = np.where(split, number * chunk[entry], 0)
    end = np.where(split, np.minimum(begin + chunk[entry], lens_k[entry]), lens_k[entry])
    order = np.argsort(-((end - begin) * lens_q[entry]), kind="stable")
    table = np.stack([entry, begin, end, np.where(split, number, 0), chunk[entry]], 1)
    return np.ascontiguousarray(table[order].astype(np.int32)), int(pieces.max(initial=1))
