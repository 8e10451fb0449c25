"""How the CPU backward engine is cut up: kernel keys, tiles, key chunks and scratch. Pure arithmetic, no DSL.

An item is one kv head and a range of its keys: its dK and dV belong to it alone. dQ is summed over chunks of
keys whose size follows from the length, in rising order, whether one item walks them all or several items
write one each: no bit depends on the number of threads or on the rest of the batch.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import BUCKETS, ISAS, KernelKey
from polyflash.backends.cpu.packing import numbered
from polyflash.errors import spec_error
from polyflash.spec import AttentionSpec, Feature
from polyflash.target import Target

ITEM_WORDS = 48
CHUNK_KEYS = 256  # least keys of a chunk of dQ
MOST_CHUNKS = 8  # as many partial sums of dQ are held at once when a head's keys are shared out
ENOUGH_ITEMS = 4  # per thread: with fewer, the keys of a head are shared out if threads would be idle
MOST_IDLE = 0.1  # share of their time, about what zeroing and adding partial sums of dQ takes


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


# Byte offsets of a thread's private tiles, those of the forward first, and their total size. A span is
# `row_panels` panels of one query head. Of the forward's tiles, o holds dQ^T of the span, s S^T and then P^T,
# p P^T as bfloat16 rows (float32: s), stats lse and delta, bad whether some of a panel's dO is not finite.
BackwardScratch = namedtuple(
    "BackwardScratch",
    """
    q o k v s p stage stats limits block zero gather bad seen item kinds q_ids k_ids pass_stage
    do q_rows do_rows out_stage dp ds ds_pairs k_rows dk dv factor keep total
    """,
)


@lru_cache(maxsize=256)
def scratch(key: KernelKey, row_panels: int, block_n: int) -> BackwardScratch:
    """The layout for spans of `row_panels` panels and key blocks of `block_n`."""
    forward = configs.tile_bytes(key, 1, row_panels, block_n)
    dot, scores = key.pack > 1, forward["s"]
    narrow = scores // 2 if dot else 0
    rows_of_span = row_panels * -(-key.panel_rows // key.pack) * key.v_row_bytes
    sizes = forward | {
        "v": forward["k"],
        "bad": row_panels,
        "item": ITEM_WORDS * 8,
        "do": forward["q"],  # dO^T of a span
        "q_rows": rows_of_span,  # of Q, as rows
        "do_rows": rows_of_span,
        "out_stage": forward["stage"],  # a vector of rows of out, then one of float32
        "dp": scores,  # dP^T, then dS^T
        "ds": narrow,  # dS^T as bfloat16 rows; float32: dp
        "ds_pairs": narrow,  # dS^T as bfloat16 pairs of keys; float32: dp
        "k_rows": block_n // key.pack * key.v_row_bytes,  # K with zeros for what is not finite
        "dk": block_n * key.v_row_bytes,
        "dv": block_n * key.v_row_bytes,
        "factor": scores,  # 1 - tanh² of every score
        "keep": scores,  # the bits that dropout keeps of every score
    }
    tiles = BackwardScratch._make(configs.placed(sizes.values()))
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


SPAN_ROWS, SPAN_ELEMENTS = 1024, 1 << 17  # most query rows held packed while the keys pass by, and elements


def choose(spec: AttentionSpec, target: Target) -> BackwardConfig:
    """Blocks of keys whose tiles, with one panel, take at most three quarters of a core's L2 cache; spans
    that leave a thread's scratch small enough to be kept between calls."""
    isa, compute, dtype = configs.native(spec, target)
    widest = min(max(spec.head_dim, spec.head_dim_v), BUCKETS[-1])
    least = BackwardConfig(16, 1, compute, isa)
    key = configs.key_of(BackwardKey, least, dtype, widest, max(ISAS[isa].group_keys))
    room = target.l2_bytes * 3 // 4
    block_n = next((n for n in (128, 64, 32) if scratch(key, 1, n).total <= room), 16)
    if spec.features & {Feature.MASK, Feature.SEGMENTS}:
        block_n = min(block_n, 64)  # finer tiles, so that more of them are skipped
    rows = min(SPAN_ROWS, SPAN_ELEMENTS // key.bucket)
    return BackwardConfig(block_n, max(1, rows // key.panel_rows), compute, isa)


def chunk_keys(seqlen_k: int) -> int:
    """Keys of one chunk of dQ: a multiple of every block."""
    return max(CHUNK_KEYS, -(-seqlen_k // (MOST_CHUNKS * 128)) * 128)


def _idle_share(work: Any, threads: int) -> float:
    """The share of their time that threads wait for the last item, if each takes the longest that is left."""
    busy = [0] * threads
    for item in sorted(map(int, work), reverse=True):
        busy[busy.index(min(busy))] += item
    return 1.0 - sum(busy) / (threads * max(*busy, 1))


def entry_table(
    lens_q: Any, lens_k: Any, heads: int, threads: int, at_once: int | None = None
) -> tuple[Any, int]:
    """int32 (entries, 5): batch entry, first and end key, number of the partial dQ it writes and keys per
    chunk; the most work first. And how many partials there are: 1, or one per chunk where threads would be
    idle. `heads` items per entry; `at_once` entries run together (None: all)."""
    chunk = np.maximum(CHUNK_KEYS, -(-lens_k // (MOST_CHUNKS * 128)) * 128)
    pieces = ((lens_q > 0) & (lens_k > 0)).astype(np.int64)
    together = int(pieces.sum()) if at_once is None else at_once
    if threads > 1 and together * heads < ENOUGH_ITEMS * threads:
        work = np.repeat((lens_q * lens_k)[pieces > 0][:together], heads)
        if _idle_share(work, threads) > MOST_IDLE:
            pieces *= -(-lens_k // chunk)
    entry, number = numbered(pieces)
    split = pieces[entry] > 1
    begin = np.where(split, number * chunk[entry], 0)
    end = np.where(split, np.minimum(begin + chunk[entry], lens_k[entry]), lens_k[entry])
    order = np.argsort(-((end - begin) * lens_q[entry]), kind="stable")
    table = np.stack([entry, begin, end, np.where(split, number, 0), chunk[entry]], 1)
    return np.ascontiguousarray(table[order].astype(np.int32)), int(pieces.max(initial=1))
