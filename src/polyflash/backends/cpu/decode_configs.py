"""How the CPU decode engine is cut up: kernel keys, splits, items and scratch. Pure arithmetic, no DSL.

The rows of a tile are all query heads of one kv head times all query rows, so K and V are read once for all
of them. A split is `split_keys` keys wherever it lies, so a request's bits depend on neither its neighbours
nor the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import ISAS, ITEM_WORDS, LINE, STEP, STORAGE_BYTES, KernelKey, Scratch
from polyflash.errors import spec_error
from polyflash.spec import DECODE_ROWS, AttentionSpec
from polyflash.target import Target

KEYS_PER_GROUP = 8  # keys whose weighted V are added in registers
BLOCK_BYTES = 8192  # of K in a block, if it has 32 keys: with as much V, half of a first-level cache
MOST_HEADS = 8  # kv heads that an item walks side by side
WIDTH, MOST_TURN_ROWS = 128, 4  # channels, and rows of a tile, of heads whose keys are read side by side
NARROW = 64  # channels, of a head whose keys are read by turns too, by one row
SHORT = 64  # keys of a block of 8-bit codes: one row is read by turns, of four V in two walks
LISTED, SCORED = 1, 2  # what the keys are that a kernel walks next
MOST_ROWS = {"avx512": 8, "avx2": 4, "neon": 4, "generic": 4}  # of one tile: what fills the registers


@dataclass(frozen=True, slots=True)
class DecodeKey:
    """The key of one compiled decode kernel for at most `rows` rows (a power of two) is made for; the other
    fields as the forward's."""

    isa: str
    compute: str
    storage: str
    rows: int

    def __post_init__(self) -> None:
        key = self.row_key  # checks isa, compute and storage
        if self.rows not in (1, 2, 4, 8) or self.rows > MOST_ROWS[key.isa]:
            wanted = f"1, 2, 4 or 8, at most {MOST_ROWS[key.isa]}"
            raise spec_error("rows", got=self.rows, wanted=wanted, change="Cut the rows into tiles.")

    @property
    def row_key(self) -> KernelKey:
        """The forward kernel's key whose narrowest stages this one shares."""
        return KernelKey(self.isa, self.compute, self.storage, 1, configs.BUCKETS[0])

    @property
    def builder(self) -> str:
        return "polyflash.backends.cpu.decode_few"

    @property
    def name(self) -> str:
        return f"decode_{self.isa}_{self.compute}_{self.storage}_r{self.rows}"

    @property
    def lanes(self) -> int:
        return ISAS[self.isa].lanes

    @property
    def registers(self) -> int:
        return ISAS[self.isa].registers

    @property
    def pack(self) -> int:
        """Keys whose weights stand side by side in one 32-bit atom. One row has float32 weights: its V are
        read key by key."""
        return 1 if self.rows == 1 else self.row_key.pack

    @property
    def unit(self) -> int:
        """Channels that one load brings."""
        return self.lanes * (2 if self.storage == "bfloat16" else 1)

    @property
    def by_turns(self) -> bool:
        """Whether V of a block and K of the next are read by turns, see decode_row.py. It is quicker on Zen 4
        for float32 (docs/results/2026-11-26-epyc-zen4-2core-decode.md) and several rows of bfloat16
        (docs/results/2026-11-29-epyc-zen4-2core-decode-turns.md), on Zen 5 for 16 bits
        (docs/results/2026-11-23-epyc-zen5-2core-decode.md), on Intel for several rows of bfloat16
        (docs/results/2026-11-28-xeon-bfloat16-decode.md); 8 rows are of 16 bits
        (docs/results/2026-11-30-decode-eight-rows.md)."""
        return self.isa == "avx512" and (self.rows <= MOST_TURN_ROWS or self.storage != "float32")

    @property
    def bytes_ahead(self) -> tuple[int, int]:
        """Bytes by which K and V are each prefetched by turns, and by which they are once more, into the
        first cache; 0 if they are not. The quickest on Zen 4
        (docs/results/2026-11-27-epyc-zen4-2core-decode.md; several rows of bfloat16:
        docs/results/2026-11-29-epyc-zen4-2core-decode-turns.md), and of
        bfloat16 without a dot on Intel (docs/results/2026-11-29-xeon-decode-third-request.md). Where there is
        none the machine's own prefetchers were quicker alone
        (docs/results/2026-11-29-epyc-zen4-2core-codes-turns.md)."""
        if self.storage == "float32":
            return 4096 if self.rows == 4 else 2048, 0
        if self.storage == "float16":
            return 4096 if self.rows > 1 else 0, 0
        if self.compute == "bf16dot":
            return {4: (0, 0), 8: (8192, 3072)}.get(self.rows, (1024, 0))
        return 8192, 4096 if self.rows == 1 else 2048

    @property
    def bytes_early(self) -> int:
        """Bytes of those that are asked for at once behind each turn of K: four rows of float32 read V twice,
        and memory would have nothing to do the second time."""
        return 2048 if self.storage == "float32" and self.rows == 4 else 0

    def units(self, channels: int) -> int:
        return -(-channels // self.unit)

    def o_bytes(self, head_dim_v: int) -> int:
        """Bytes of the outputs of one tile, float32."""
        return self.units(head_dim_v) * self.unit * self.rows * 4

    def partial_bytes(self, head_dim_v: int) -> int:
        """Bytes that one split leaves: m, l and O of its rows."""
        return (8 * self.lanes + self.o_bytes(head_dim_v) + LINE - 1) // LINE * LINE


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """split_keys: keys of one partial result. block_n: keys whose scores are made before any of their values
    is read; at most 8 rows of a kv head take fewer where heads are wide, see BLOCK_BYTES. compute, isa: as
    the forward's."""

    split_keys: int
    block_n: int
    compute: str = "f32"
    isa: str = "avx512"

    def __post_init__(self) -> None:
        configs.check_ints(self, "split_keys", "block_n", change="Take 1024 and 128.")
        if self.block_n % STEP or not STEP <= self.block_n <= 256:
            change = "Take 128."
            raise spec_error("block_n", got=self.block_n, wanted="a multiple of 16 up to 256", change=change)
        if self.split_keys % self.block_n or self.split_keys <= 0:
            wanted = f"a positive multiple of block_n ({self.block_n})"
            raise spec_error("split_keys", got=self.split_keys, wanted=wanted, change="Take 1024.")
        configs.check_compute(self.compute, self.isa)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        rows = spec.group * spec.seqlen_q
        walk = "share one walk over its keys"
        if spec.codes:
            from polyflash.backends.cpu import decode_codes_configs  # which needs this module

            kernel = decode_codes_configs.note(self, spec)
            if rows > (held := decode_codes_configs.key_for(self, spec, rows).rows):
                walk = f"in tiles of {held}, each of which walks over its keys"
        elif rows > DECODE_ROWS:
            kernel = "lanes over rows"
        else:
            key = key_for(self, spec.dtype, rows)
            kernel = f"kernel {key.name}: lanes over channels, K and V read in place"
        return (
            f"{kernel}; {rows} rows of a kv head {walk}",
            f"splits of {self.split_keys} keys wherever they lie, merged in order: bits depend on neither "
            "neighbours nor threads",
        )


def key_for(config: DecodeConfig, dtype: str, rows: int) -> DecodeKey:
    """The kernel for tiles of `rows` rows, or of as many as one tile holds."""
    held = min(max(1, rows), MOST_ROWS[config.isa])
    return DecodeKey(config.isa, config.compute, dtype, 1 << (held - 1).bit_length())


@lru_cache(maxsize=256)
def scratch(key: DecodeKey, head_dim: int, head_dim_v: int, block_n: int) -> Scratch:
    """The layout for one tile and key blocks of `block_n`. `k` and `v` hold addresses of rows; `stage` holds
    the rows themselves where their channels have a stride."""
    width = STORAGE_BYTES[key.storage]
    row = (max(head_dim, head_dim_v) * width + LINE - 1) // LINE * LINE + LINE
    sizes = dict.fromkeys(Scratch._fields[:-1], 0) | {
        "q": MOST_HEADS * (key.units(head_dim) * key.unit * key.rows * 4),
        "o": key.partial_bytes(head_dim_v),
        "k": (block_n + key.lanes) * 8,
        "v": (block_n + key.lanes) * 8,
        "s": (1 + 2 * MOST_HEADS) * block_n * key.rows * 4,
        "p": MOST_HEADS * key.lanes * key.lanes * 4,
        "stage": 2 * block_n * row,
        "stats": 2 * key.lanes * 4,
        "limits": 2 * key.lanes * 4,
        "block": (2 + 2 * MOST_HEADS) * key.lanes * 4,
        "zero": MOST_HEADS * row,
        "gather": row,
        "item": ITEM_WORDS * 8,
        "pass_stage": 4 * (block_n + key.lanes) * 8,
    }
    return Scratch._make(configs.placed(sizes.values()))


def choose(spec: AttentionSpec, target: Target) -> DecodeConfig:
    """Splits of 1024 keys, whatever the call: the size decides bits. Of codes, whose keys have half or a
    third of the bytes, 2048 where several heads give the threads their items. Blocks of wide keys of 8 bits
    are half as long where that is quicker: docs/results/2026-11-29-epyc-zen4-2core-decode-turns.md."""
    isa, compute, _ = configs.native(spec, target)
    longer = spec.codes and spec.num_kv_heads >= 4
    wide = spec.codes.count("int8/") == 2 and spec.head_dim >= WIDTH and spec.dtype != "float32"
    short = wide and configs.compute_for("bfloat16", target) == "bf16dot"  # Zen 4 and 5
    return DecodeConfig(2048 if longer else 1024, SHORT if short else 128, compute, isa)
