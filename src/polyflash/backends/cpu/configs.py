"""How the CPU forward engine is cut up: kernel keys, tiles, work items and scratch. Pure arithmetic, no DSL.

A kernel key holds what generated code depends on; lengths, strides and the exact head_dim are run-time
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from polyflash.errors import spec_error
from polyflash.spec import Feature

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

LANES = 16  # 32-bit lanes of one AVX-512 vector
LINE = 64  # bytes of a cache line and of one vector
BUCKETS = (64, 128, 256)
STORAGE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KernelKey:
    """What one compiled forward kernel is made for.

    isa: instruction set. compute: "f32" (fused multiply-add) or "bf16dot" (pairs of bfloat16 into fp32).
    storage: dtype of q, k, v and out. nv: vectors of query lanes per panel. bucket: row stride of the scratch
    tiles in elements, at least max(head_dim, head_dim_v). masked: a bool mask is present.
    """

    isa: str
    compute: str
    storage: str
    nv: int
    bucket: int
    masked: bool

    def __post_init__(self) -> None:
        if self.isa != "avx512":
            raise spec_error(
                "isa", got=self.isa, wanted="avx512", change="Plan for a target that has a kernel."
            )
        if self.storage not in STORAGE_BYTES:
            raise spec_error(
                "storage", got=self.storage, wanted=" or ".join(STORAGE_BYTES), change="Convert the tensors."
            )
        allowed = ("f32", "bf16dot") if self.storage == "bfloat16" else ("f32",)
        if self.compute not in allowed:
            raise spec_error(
                "compute", got=self.compute, wanted=" or ".join(allowed), change="Only bfloat16 has a dot."
            )
        if self.nv not in (1, 2, 4) or self.bucket not in BUCKETS:
            raise spec_error(
                "nv, bucket",
                got=(self.nv, self.bucket),
                wanted=f"one of (1, 2, 4) and of {BUCKETS}",
                change="Round up.",
            )

    @property
    def name(self) -> str:
        mask = "mask" if self.masked else "nomask"
        return f"forward_{self.isa}_{self.compute}_{self.storage}_nv{self.nv}_d{self.bucket}_{mask}"

    @property
    def panel_rows(self) -> int:
        """Query rows of one panel: one per lane."""
        return self.nv * LANES

    @property
    def group_keys(self) -> int:
        """Keys (and channels of V) per microkernel step: 16 accumulators whatever the panel's width."""
        return LANES // self.nv

    @property
    def pack(self) -> int:
        """Elements per 32-bit atom of a product."""
        return 2 if self.compute == "bf16dot" else 1

    @property
    def q_panel_bytes(self) -> int:
        return self.bucket // self.pack * self.panel_rows * 4

    @property
    def o_panel_bytes(self) -> int:
        return self.bucket * self.panel_rows * 4

    @property
    def k_row_bytes(self) -> int:
        """One line more than the elements need: rows a power of two apart share few sets of the L1 cache."""
        return self.bucket * 4 // self.pack + LINE

    @property
    def v_row_bytes(self) -> int:
        """Bytes of one row of V atoms: a key, or with bf16dot a pair of keys."""
        return self.bucket * 4 + LINE


class Scratch(NamedTuple):
    """Byte offsets of a thread's private tiles, and their total size."""

    q: int
    o: int
    k: int
    v: int
    s: int
    p: int
    stage: int  # 16 rows: q before its transpose
    stats: int  # m_i and l_i of every panel
    limits: int  # first key and number of keys of every row
    block: int  # alpha and the running maximum of one key block
    zero: int  # a row of zeros
    gather: int  # two rows gathered from a last dimension with a stride
    bad: int  # one byte per key: V is not finite there
    mask: int  # transposed bytes of the bool mask
    total: int


@lru_cache(maxsize=256)
def scratch(key: KernelKey, heads: int, row_panels: int, block_n: int) -> Scratch:
    """The layout for items of `heads` x `row_panels` panels and key blocks of `block_n`."""
    panels, lanes = heads * row_panels, key.panel_rows
    scores = block_n * lanes * 4
    wide_row = key.bucket * 4 + LINE
    sizes = (
        panels * key.q_panel_bytes,
        panels * key.o_panel_bytes,
        block_n * key.k_row_bytes,
        block_n // key.pack * key.v_row_bytes,
        scores,
        scores // key.pack if key.pack > 1 else 0,
        LANES * key.k_row_bytes,
        panels * lanes * 8,
        row_panels * lanes * 8,
        lanes * 8,
        wide_row,
        2 * wide_row,
        block_n,
        block_n * lanes if key.masked else 0,
    )
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += (size + LINE - 1) // LINE * LINE
    if key.pack == 1:
        offsets[5] = offsets[4]  # fp32 probabilities replace the scores
    return Scratch._make((*offsets, (at + 4095) // 4096 * 4096))


@dataclass(frozen=True, slots=True)
class Config:
    """block_n: keys per block. panels: most query panels per work item, all sharing one copy of each block.
    compute: "f32", or "bf16dot" where the target has it and the tensors are bfloat16."""

    block_n: int
    panels: int
    compute: str = "f32"

    def __post_init__(self) -> None:
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise spec_error(
                "block_n", got=self.block_n, wanted="a multiple of 16 up to 256", change="Take 64 or 128."
            )
        if not 1 <= self.panels <= 8:
            raise spec_error("panels", got=self.panels, wanted="1 to 8", change="Take 4.")
        if self.compute not in ("f32", "bf16dot"):
            raise spec_error(
                "compute", got=self.compute, wanted="f32 or bf16dot", change="Take explain(...).config."
            )

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What a plan says about this choice beside its numbers."""
        widest = max(spec.head_dim, spec.head_dim_v)
        key = key_for(spec.dtype, spec.seqlen_q, widest, Feature.MASK in spec.features, self.compute)
        notes = [
            f"kernel {key.name}: {key.panel_rows} query rows per panel, scratch rows of {key.bucket} elements"
        ]
        if self.compute == "bf16dot":
            notes.append("bfloat16 pairs are multiplied as they are, sums are float32 (avx512_bf16)")
        elif spec.dtype != "float32":
            notes.append(f"{spec.dtype} is converted to float32 as each key block is copied")
        return tuple(notes)


class Partition(NamedTuple):
    """How a call is cut into items of `heads` query heads x `row_panels` panels of one kv head."""

    heads: int
    chunks: int
    row_panels: int
    row_blocks: int
    items: int


def panel_vectors(seqlen_q: int) -> int:
    return 1 if seqlen_q <= LANES else 2 if seqlen_q <= 2 * LANES else 4


def compute_for(dtype: str, target: Target) -> str:
    return "bf16dot" if dtype == "bfloat16" and "avx512_bf16" in target.features else "f32"


def key_for(dtype: str, seqlen_q: int, widest: int, masked: bool, compute: str) -> KernelKey:
    """The kernel for a call; `widest` is the larger head dimension."""
    bucket = next((b for b in BUCKETS if widest <= b), 0)
    return KernelKey("avx512", compute, dtype, panel_vectors(seqlen_q), bucket, masked)


def all_keys(target: Target) -> Iterator[KernelKey]:
    """Every kernel that can run on `target`."""
    if target.arch != "avx512":
        return
    for dtype in STORAGE_BYTES:
        compute = compute_for(dtype, target)
        for nv in (1, 2, 4):
            for bucket in BUCKETS:
                for masked in (False, True):
                    yield KernelKey("avx512", compute, dtype, nv, bucket, masked)


@lru_cache(maxsize=512)
def partition(
    batch: int, num_kv_heads: int, group: int, seqlen_q: int, panel_rows: int, panels: int, threads: int
) -> Partition:
    """As many panels per item as allowed, fewer when the threads would run short of items."""
    chunks = -(-group // panels)
    heads = -(-group // chunks)
    chunks = -(-group // heads)
    all_rows = -(-seqlen_q // panel_rows)
    row_panels = min(max(1, panels // heads), all_rows)
    wanted = 8 * threads if threads > 1 else 1  # so that the last items to finish leave little idle
    while row_panels > 1 and batch * num_kv_heads * chunks * -(-all_rows // row_panels) < wanted:
        row_panels -= 1
    while heads > 1 and batch * num_kv_heads * chunks * -(-all_rows // row_panels) < threads:
        heads -= 1
        chunks = -(-group // heads)
    row_blocks = -(-all_rows // row_panels)
    row_panels = -(-all_rows // row_blocks)
    return Partition(heads, chunks, row_panels, row_blocks, batch * num_kv_heads * chunks * row_blocks)


def choose(spec: AttentionSpec, target: Target) -> Config:
    """Tiles for two thirds of a core's L2 cache. Measured on Zen 4 (1 MB): flat within 2 % from 64 to 256
    keys; 8 panels are 1 % faster than 4, as each key block is copied half as often."""
    wide = max(spec.head_dim, spec.head_dim_v) > 128
    panels = 4 if wide else 8
    small = target.l2_bytes < 1 << 20
    block_n = 64 if wide or small else 128
    return Config(block_n, max(1, panels // 2) if small else panels, compute_for(spec.dtype, target))


def candidates(spec: AttentionSpec, target: Target) -> tuple[Config, ...]:
    """Configs worth timing for `spec`."""
    compute = compute_for(spec.dtype, target)
    return tuple(Config(block_n, panels, compute) for block_n in (64, 128) for panels in (1, 2, 4, 8))
