"""How the CPU forward engine is cut up: kernel keys, tiles, work items and scratch. Pure arithmetic, no DSL.

A kernel key holds what generated code depends on; lengths, strides and the exact head_dim are run-time
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

from polyflash.errors import spec_error
from polyflash.spec import DECODE_ROWS, MOST_SHARED_ROWS, AttentionSpec, Feature, Phase
from polyflash.target import Target

LINE = 64  # bytes of a cache line
STEP = 16  # keys and channels are padded to it: a multiple of every vector and of every group of keys
BUCKETS = (64, 128, 256, 512, 576)
STORAGE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PACKS = {"f32": 1, "bf16dot": 2, "int8dot": 4}  # elements of an atom by compute
_RUNS = {
    "avx512": ("avx512", "avx2", "generic"),
    "avx2": ("avx2", "generic"),
    "neon": ("neon", "generic"),
    "generic": ("generic",),
}  # instruction sets a target runs, its own first
# What the pass over scores does.
PASS_FEATURES = {Feature.MASK, Feature.BIAS, Feature.ALIBI, Feature.SOFTCAP, Feature.SEGMENTS}


class Isa(NamedTuple):
    """32-bit lanes of a vector; and, per panel width in vectors, the keys (channels of V) of one microkernel
    step: their product, the accumulators, a row of vectors and a broadcast fill the registers."""

    lanes: int
    group_keys: dict[int, int]
    registers: int


ISAS = {
    "avx512": Isa(16, {1: 16, 2: 8, 4: 4}, 32),
    "avx2": Isa(8, {1: 8, 2: 4, 3: 4}, 16),
    "neon": Isa(4, {1: 16, 2: 8, 5: 4}, 32),
    "generic": Isa(4, {1: 8, 2: 4, 3: 4}, 16),
}


class Panels:
    """The panels of a key of compiled code. `kind` begins its name, `builder` is the module whose
    `build(key)` compiles it."""

    __slots__ = ()
    kind: ClassVar[str]
    builder: ClassVar[str]
    isa: str
    nv: int

    def __post_init__(self) -> None:
        if self.isa not in ISAS:
            change = "Plan for a target that has a kernel."
            raise spec_error("isa", got=self.isa, wanted=" or ".join(ISAS), change=change)
        if self.nv not in ISAS[self.isa].group_keys:
            wanted = f"one of {tuple(ISAS[self.isa].group_keys)}"
            raise spec_error("nv", got=self.nv, wanted=wanted, change="Round up.")

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.isa}_nv{self.nv}"

    @property
    def lanes(self) -> int:
        return ISAS[self.isa].lanes

    @property
    def panel_rows(self) -> int:
        """Query rows of one panel: one per lane."""
        return self.nv * self.lanes

    @property
    def group_keys(self) -> int:
        """Keys (and channels of V) per microkernel step."""
        return ISAS[self.isa].group_keys[self.nv]


@dataclass(frozen=True, slots=True)
class KernelKey(Panels):
    """The key of one compiled forward kernel.

    isa: instruction set. compute: "f32" (fused multiply-add), "bf16dot" (pairs of bfloat16 into fp32) or
    "int8dot" (fours of int8 into int32: k and v are codes). storage: dtype of q, k, v and out. nv: vectors of
    query lanes per panel. bucket: row stride of the scratch tiles in elements, at least max(head_dim,
    head_dim_v). What changes scores is another kernel: scores.py.
    """

    kind = "forward"
    builder = "polyflash.backends.cpu.kernels.forward"
    isa: str
    compute: str
    storage: str
    nv: int
    bucket: int

    def __post_init__(self) -> None:
        Panels.__post_init__(self)
        if self.storage not in STORAGE_BYTES:
            raise spec_error(
                "storage", got=self.storage, wanted=" or ".join(STORAGE_BYTES), change="Convert the tensors."
            )
        allowed = ["f32"]
        if self.isa == "avx512":
            allowed += ["bf16dot", "int8dot"] if self.storage == "bfloat16" else ["int8dot"]
        if self.compute not in allowed:
            change = "Only bfloat16 and codes on AVX-512 have a dot."
            raise spec_error("compute", got=self.compute, wanted=" or ".join(allowed), change=change)
        if self.bucket not in BUCKETS:
            raise spec_error("bucket", got=self.bucket, wanted=f"one of {BUCKETS}", change="Round up.")

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.isa}_{self.compute}_{self.storage}_nv{self.nv}_d{self.bucket}"

    @property
    def pack(self) -> int:
        """Elements per 32-bit atom of a product."""
        return _PACKS[self.compute]

    @property
    def integer(self) -> bool:
        """Whether k and v are codes that are multiplied as such."""
        return self.compute == "int8dot"

    @property
    def q_panel_bytes(self) -> int:
        """Bytes of Q^T of a panel; with int8dot, whose Q^T are codes, rows of four numbers lie behind."""
        return (self.bucket // self.pack + (4 if self.integer else 0)) * self.panel_rows * 4

    @property
    def o_panel_bytes(self) -> int:
        return self.bucket * self.panel_rows * 4

    @property
    def k_row_bytes(self) -> int:
        """One line more than the elements need: rows a power of two apart share few sets of the L1 cache."""
        return self.bucket * 4 // self.pack + LINE

    @property
    def loaded_row_bytes(self) -> int:
        """Bytes of one row as `load_rows` leaves it: K, or with int8dot Q, which is no codes yet."""
        return self.v_row_bytes if self.integer else self.k_row_bytes

    @property
    def v_row_bytes(self) -> int:
        """Bytes of one row of V atoms: as many keys as stand in an atom."""
        return self.bucket * 4 + LINE


@dataclass(frozen=True, slots=True)
class StageKey(Panels):
    """Code of its own that every kernel of this isa and width calls if it must: dtype and head_dim have no
    part in it."""

    isa: str
    nv: int


class ScoreKey(StageKey):
    """The pass over one panel's scores."""

    __slots__ = ()
    kind = "scores"
    builder = "polyflash.backends.cpu.scores"


class DropoutKey(StageKey):
    """The key of the code that drops weights of one panel's tile."""

    __slots__ = ()
    kind = "dropout"
    builder = "polyflash.backends.cpu.dropout"


class Scratch(NamedTuple):
    """Byte offsets of a thread's private tiles, and their total size."""

    q: int
    o: int
    k: int
    v: int
    s: int
    p: int
    stage: int  # a vector of rows of Q before their transpose, or one row of V
    stats: int  # m_i and l_i of every panel
    limits: int  # first key and number of keys of every row, for one interval
    block: int  # of the key block at hand: alpha of every row, then the maximum of every row
    zero: int  # a row of zeros
    gather: int  # two rows gathered from a last dimension with a stride
    bad: int  # one byte per key: V is not finite there; with int8dot the scale of every key's V behind
    seen: int  # one byte per row of a panel: it sees the bad key at hand
    item: int  # what the pass over scores must know of an item
    kinds: int  # one byte per panel: how the key block at hand touches it
    q_ids: int  # segment of every row
    k_ids: int  # segment of every key of a block, or its pages
    pass_stage: int  # of the pass, for a vector of rows and block_n keys: bias as float32, then mask bytes
    total: int


def placed(sizes: Iterable[int]) -> Iterator[int]:
    """Places of tiles of these sizes, each at a cache line, and their total size in whole pages of memory."""
    at = 0
    for size in sizes:
        yield at
        at += (size + LINE - 1) // LINE * LINE
    yield (at + 4095) // 4096 * 4096


ITEM_WORDS = 40


def tile_bytes(key: KernelKey, heads: int, row_panels: int, block_n: int) -> dict[str, int]:
    """Sizes of the tiles of `Scratch`, for items of `heads` x `row_panels` panels and key blocks of
    `block_n`."""
    panels, rows = heads * row_panels, key.panel_rows
    scores = block_n * rows * 4
    wide_row = key.bucket * 4 + LINE
    return {
        "q": panels
        * (key.q_panel_bytes + (key.o_panel_bytes if key.integer else 0)),  # Q^T as float32 behind
        "o": panels * key.o_panel_bytes,
        "k": block_n * key.k_row_bytes,
        "v": block_n // key.pack * key.v_row_bytes,
        "s": scores,
        "p": scores // key.pack if key.pack > 1 else 0,
        "stage": max(key.lanes * key.loaded_row_bytes, wide_row),
        "stats": panels * rows * 8,
        "limits": row_panels * rows * 8,
        "block": rows * 8,
        "zero": wide_row,
        "gather": 2 * wide_row,
        "bad": block_n * (7 if key.integer else 1),
        "seen": rows,
        "item": ITEM_WORDS * 8,
        "kinds": panels,
        "q_ids": row_panels * rows * 4,
        "k_ids": block_n * 4,
        "pass_stage": key.lanes * block_n * 5,
    }


@lru_cache(maxsize=256)
def scratch(key: KernelKey, heads: int, row_panels: int, block_n: int) -> Scratch:
    """The layout of the tiles of `tile_bytes`."""
    tiles = Scratch._make(placed(tile_bytes(key, heads, row_panels, block_n).values()))
    return tiles if key.pack > 1 else tiles._replace(p=tiles.s)  # fp32 probabilities replace the scores


@dataclass(frozen=True, slots=True)
class Config:
    """block_n: keys per block. panels: most query panels per work item, all sharing one copy of each block.
    compute: "f32", or "bf16dot" where the target has it and the tensors are bfloat16, or "int8dot" where k
    and v are codes. isa: of the kernel."""

    block_n: int
    panels: int
    compute: str = "f32"
    isa: str = "avx512"

    def __post_init__(self) -> None:
        check_ints(self, "block_n", "panels", change="Take 64 and 4.")
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise spec_error(
                "block_n", got=self.block_n, wanted="a multiple of 16 up to 256", change="Take 64 or 128."
            )
        if not 1 <= self.panels <= 64:
            raise spec_error("panels", got=self.panels, wanted="1 to 64", change="Take 4.")
        check_compute(self.compute, self.isa)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        nv = panel_vectors(self.isa, spec.seqlen_q)
        key = key_for(self, spec.dtype, max(spec.head_dim, spec.head_dim_v), nv)
        notes = [
            f"kernel {key.name}: {key.panel_rows} query rows per panel, scratch rows of {key.bucket} elements"
        ]
        changing = sorted(f.value for f in spec.features & PASS_FEATURES)
        if changing:
            notes.append(
                f"pass {ScoreKey(self.isa, nv).name} over each tile of scores: {', '.join(changing)}"
            )
        if spec.members and decodes_members(spec):
            limits = f"at most {DECODE_ROWS} rows per kv head, or {MOST_SHARED_ROWS} of many more keys"
            notes.append(f"packed members of {limits}: the decode kernels")
        if self.compute == "int8dot":
            notes.append("products of codes: q and the weights are made int8, sums are int32 (avx512_vnni)")
        elif self.compute == "bf16dot":
            notes.append("bfloat16 pairs are multiplied as they are, sums are float32 (avx512_bf16)")
        elif spec.dtype != "float32":
            notes.append(f"{spec.dtype} is converted to float32 as each key block is copied")
        return tuple(notes)


def check_ints(config: Any, *names: str, change: str) -> None:
    """SpecError unless these fields are ints."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int:
            raise spec_error(name, got=repr(value), wanted="an int", change=change)


def check_compute(compute: str, isa: str) -> None:
    """SpecError unless a config may name them."""
    change = "Take explain(...).config."
    if compute not in _PACKS:
        raise spec_error("compute", got=compute, wanted=" or ".join(_PACKS), change=change)
    if isa not in ISAS:
        raise spec_error("isa", got=isa, wanted=" or ".join(ISAS), change=change)


NOT_DECODED = frozenset((Feature.ALIBI, Feature.DROPOUT, Feature.BATCH_INVARIANT, Feature.CODES))


def decodes_members(spec: AttentionSpec) -> bool:
    """Whether packed members of few rows go to the decode kernels."""
    return not (spec.needs_grad or spec.features & NOT_DECODED)


class Partition(NamedTuple):
    """How a call is cut into items of `heads` query heads x `row_panels` panels of one kv head."""

    heads: int
    chunks: int
    row_panels: int
    row_blocks: int
    items: int


def panel_vectors(isa: str, seqlen_q: int) -> int:
    """The narrowest panel that holds all rows, else the widest."""
    lanes, widths = ISAS[isa].lanes, ISAS[isa].group_keys
    return next((nv for nv in widths if seqlen_q <= nv * lanes), max(widths))


def compute_for(dtype: str, target: Target) -> str:
    """bf16dot where it is faster: twice the rate of float32 on Zen 4, half on an Intel CPU with AMX."""
    dot = "avx512_bf16" in target.features and "amx_bf16" not in target.features
    return "bf16dot" if dtype == "bfloat16" and dot else "f32"


AnyKey = TypeVar("AnyKey", bound=KernelKey)


def key_of(cls: type[AnyKey], config: Any, dtype: str, widest: int, nv: int) -> AnyKey:
    """The kernel of this class for a call; `widest` is the larger head dimension."""
    bucket = next((b for b in BUCKETS if widest <= b), 0)
    return cls(config.isa, config.compute, dtype, nv, bucket)


def key_for(config: Config, dtype: str, widest: int, nv: int) -> KernelKey:
    """The forward kernel for a call."""
    return key_of(KernelKey, config, dtype, widest, nv)


def native(spec: AttentionSpec, target: Target) -> tuple[str, str, str]:
    """isa, compute and dtype of the kernels for `spec`, or of those nearest to it."""
    isa = target.arch if target.arch in ISAS else "generic"
    dtype = spec.dtype if spec.dtype in STORAGE_BYTES else "float32"
    return isa, _compute_of(spec, dtype, target) if isa == "avx512" else "f32", dtype


def _compute_of(spec: AttentionSpec, dtype: str, target: Target) -> str:
    """Those of "int8dot" that few rows do not round to bytes are multiplied as two bytes."""
    if not spec.codes:
        return compute_for(dtype, target)
    if spec.phase is not Phase.DECODE:
        return "int8dot"
    return "int8dot" if "avx512_vnni" in target.features else "f32"


def check_fits(config: Any, spec: AttentionSpec, target: Target) -> None:
    """SpecError unless `config` is one that this target can run for this dtype."""
    change = "Take explain(...).config."
    isas = _RUNS.get(target.arch, ())
    if config.isa not in isas:
        raise spec_error("config.isa", got=config.isa, wanted=" or ".join(isas), change=change)
    compute = _compute_of(spec, spec.dtype, target) if config.isa == "avx512" else "f32"
    if config.compute != compute:
        raise spec_error("config.compute", got=config.compute, wanted=compute, change=change)


@lru_cache(maxsize=512)
def partition(
    batch: int,
    num_kv_heads: int,
    group: int,
    seqlen_q: int,
    panel_rows: int,
    panels: int,
    threads: int,
    *,
    own_lists: bool = False,
) -> Partition:
    """Splits into items of as many panels as allowed, fewer when the threads would run short of items; one
    head if each has interval lists of its own."""
    chunks = group if own_lists else -(-group // panels)
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


ITEM_ROWS = 512  # query rows that share a copy of each key block, if the cache has room
# (block_n, by how much to divide ITEM_ROWS), the best first
_TILES = ((128, 1), (128, 2), (64, 2), (64, 4), (64, 8), (32, 8), (16, 8))


def choose(spec: AttentionSpec, target: Target) -> Config:
    """Tiles for three quarters of a core's L2 cache, whatever the length: a row's sums are cut at key blocks,
    so its bits would depend on how its request is chunked.

    Measured on Zen 4 (1 MB): flat within 2 % from 64 to 256 keys; 512 rows are 1 % faster than 256, as each
    key block is copied half as often."""
    isa, compute, dtype = native(spec, target)
    widest = min(max(spec.head_dim, spec.head_dim_v), BUCKETS[-1])
    key = key_for(Config(16, 1, compute, isa), dtype, widest, max(ISAS[isa].group_keys))
    room = target.l2_bytes * 3 // 4
    most = ITEM_ROWS // key.panel_rows
    tiles = [(block_n, max(1, most // parts)) for block_n, parts in _TILES]
    block_n, panels = next((x for x in tiles if scratch(key, x[1], 1, x[0]).total <= room), tiles[-1])
    if spec.features & {Feature.MASK, Feature.SEGMENTS}:
        block_n = min(block_n, 64)  # finer tiles, so that more of them are skipped
    return Config(block_n, panels, compute, isa)


def candidates(spec: AttentionSpec, target: Target) -> tuple[Config, ...]:
    """Configs worth timing for `spec`, the chosen one first."""
    chosen = choose(spec, target)
    others = (replace(chosen, block_n=n, panels=p) for n in (64, 128) for p in (1, 2, 4, 8))
    return tuple(dict.fromkeys((chosen, *others)))
