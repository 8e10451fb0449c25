"""Keys, scratch and limits of the decode kernels that read codes. Pure arithmetic, no DSL.

Head dims and schemes are part of a key, so a kernel knows its loads; one is compiled when it is first needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from polyflash.backends.cpu import configs
from polyflash.backends.cpu.configs import ISAS, LINE, STEP, STORAGE_BYTES, Scratch
from polyflash.backends.cpu.decode_configs import MOST_HEADS, MOST_ROWS, DecodeConfig, DecodeKey
from polyflash.quant.scheme import KINDS, Codes, codes_of, per_word, text_of
from polyflash.spec import DECODE_ROWS, AttentionSpec
from polyflash.target import Target

READ = ("int8", "int4")  # codes that become 16-bit integers in registers
MOST_CHANNELS = 256
STATS = 4  # vectors behind the planes of Q: scale, sum of shifts, what the middle of codes adds, of a row; by
# whole steps, then by parts of one
BLOCK_CHANNELS = 32  # of V that share a scale, unless all do: whole 128-bit lanes


@dataclass(frozen=True, slots=True)
class CodesKey(DecodeKey):
    """The key of a kernel whose K and V are the codes that `codes` names; `storage` is that of q and out."""

    head_dim: int
    head_dim_v: int
    codes: str

    @property
    def name(self) -> str:
        dims = f"r{self.rows}_d{self.head_dim}_{self.head_dim_v}"
        return re.sub(r"\W", "_", f"decode_{self.isa}_{self.storage}_{dims}_{self.codes}")

    @property
    def k(self) -> Codes:
        return _both(self.codes)[0]

    @property
    def v(self) -> Codes:
        return _both(self.codes)[1]

    @property
    def unit(self) -> int:
        """Channels of a vector of codes of V."""
        return self.unit_of(self.v)

    def unit_of(self, codes: Codes) -> int:
        return 2 * self.lanes * per_word(codes)

    @property
    def by_turns(self) -> bool:
        return False

    @property
    def bytes(self) -> bool:
        """Whether the products are of bytes."""
        return "*" in self.codes

    @property
    def joined(self) -> int:
        """Keys whose weights lie side by side in 32 bits."""
        return 4 if self.bytes else 2

    @property
    def query_row(self) -> int:
        """Bytes of a row of Q as float32, up to a whole unit of K."""
        unit = self.unit_of(self.k)
        return -(-self.head_dim // unit) * unit * 4

    @property
    def planes(self) -> int:
        """Bytes before the planes of Q in its tile: 16-bit integers, as many bytes as half its rows."""
        return self.rows * self.query_row

    @property
    def split(self) -> bool:
        """Whether q and weights are two integers each, steps of a scale and parts of one, so that products of
        codes with float32 are as exact as its own."""
        return self.storage == "float32"

    @property
    def finer(self) -> int:
        """Bytes of the planes of Q, behind which are those of parts of a step."""
        return self.rows * self.query_row // self.joined * (4 if self.by_fours else 1)

    @property
    def query_stats(self) -> int:
        return self.planes + self.finer * (2 if self.split else 1)

    @property
    def by_fours(self) -> bool:
        """Whether scores are made of four keys at once, whose columns are transposed: of fewer rows the sum
        over a key's lanes costs less."""
        return self.rows >= 4

    @property
    def run(self) -> int:
        """Keys that share what is folded into Q; 0: those of a page, or all."""
        tables = [block.tokens for block in (self.k.scale, self.k.shift) if block and block.channels == 1]
        return min((n for n in tables if n), default=0)

    @property
    def lent(self) -> int:
        """Rows of V per STEP keys of products of bytes that are prefetched with the scores: what is neither
        with the weights, one per vector, nor in the walk over V, which is too quick for more than half. The
        more evenly over a block, the less memory waits, and the less loads wait behind prefetches."""
        return STEP // 2 - self.rows if self.bytes else 0

    @property
    def value_groups(self) -> int:
        """Scales of a key of V, of as many channels as fill whole units if they are several."""
        channels = self.v.scale.channels
        return self.units(self.head_dim_v) * self.unit // channels if channels else 1

    @property
    def live_groups(self) -> int:
        """Those of channels that there are."""
        channels = self.v.scale.channels
        return -(-self.head_dim_v // channels) if channels else 1

    @property
    def value_stats(self) -> int:
        """Vectors that a block leaves of a scale of V's channels: steps of its weights, and what is added."""
        return 3 if KINDS[self.v.dtype].bits == 4 and not self.bytes else 4


def _both(codes: str) -> tuple[Codes, Codes]:
    """Parse K's and V's; a call in which one is none is refused."""
    return codes_of(codes)  # type: ignore[return-value]


def key_for(config: DecodeConfig, spec: AttentionSpec, rows: int) -> CodesKey:
    """The kernel for tiles of `rows` rows, or of as many as one tile holds."""
    held = min(max(1, rows), MOST_ROWS[config.isa], ISAS[config.isa].lanes // 2)  # a vector has two keys
    rows = 1 << (held - 1).bit_length()
    codes = spec.codes
    if config.compute != "int8dot" or rows == 1:  # which waits for memory: bytes gained nothing
        codes = text_of(*(x and x._replace(compute="float") for x in codes_of(codes)))
    return CodesKey(config.isa, "f32", spec.dtype, rows, spec.head_dim, spec.head_dim_v, codes)


def note(config: DecodeConfig, spec: AttentionSpec) -> str:
    """Words of a plan about the products of codes."""
    key = key_for(config, spec, spec.group * spec.seqlen_q)
    how = "16 bits: q or the weights are rounded to 32767ths of their largest"
    if key.split:
        how = "16 bits, twice: what is left of q and of the weights is rounded to parts of a 32767th"
    elif key.bytes:
        how = "bytes: q, a scale per row, and the weights, one per row and block, are rounded to 8 bits"
    elif "*int8" in spec.codes:
        why = "bytes need avx512_vnni, and to be asked for by k and v"
        how = f"16 bits: {'a single row waits for memory' if key.rows == 1 else why}"
    return f"kernel {key.name}: products of {how}"


@lru_cache(maxsize=256)
def scratch(key: CodesKey, block_n: int) -> Scratch:
    """The layout for one tile. `stage` holds the scales of keys, then scales and shifts of V by groups of
    channels; `addresses` weights as floats, `p` as integers, `block` alpha and, from its third vector on, the
    steps of weights and what is added."""
    groups, live, vector = key.value_groups, key.live_groups, key.lanes * 4
    row = max(key.head_dim, key.head_dim_v) * max(4, STORAGE_BYTES[key.storage]) + LINE
    sizes = dict.fromkeys(Scratch._fields[:-1], 0) | {
        "q": MOST_HEADS * (key.query_stats + STATS * vector),
        "o": key.partial_bytes(key.head_dim_v),
        "k": 2 * (block_n + key.lanes) * 8,
        "v": 2 * (block_n + key.lanes) * 8,
        "s": block_n * key.rows * 4,
        "p": groups * block_n * key.rows * 2,
        "stage": (1 + 2 * live) * block_n * 4,
        "stats": 2 * vector,
        "limits": 2 * vector,
        "block": (2 + key.value_stats * live) * vector,
        "zero": row,
        "gather": row,
        "item": configs.ITEM_WORDS * 8,
        "pass_stage": live * block_n * key.rows * 4,
    }
    return Scratch._make(configs.placed(sizes.values()))


def refuses(spec: AttentionSpec, target: Target) -> str:
    """Why no kernel reads the codes of a call in its walk; "" if one does, or if there are none."""
    if not spec.codes:
        return ""
    k, v = codes_of(spec.codes)
    if k is None or v is None or {k.dtype, v.dtype} - set(READ):
        return f"codes: K and V both of {' or '.join(READ)}, got {spec.codes}"
    if (rows := spec.group * spec.seqlen_q) > DECODE_ROWS:
        return f"codes: up to {DECODE_ROWS} rows of a kv head, asked for {rows}"
    if max(spec.head_dim, spec.head_dim_v) > MOST_CHANNELS:
        return f"codes: head_dim up to {MOST_CHANNELS}"
    return _why_not_keys(k, spec.page_size) or _why_not_values(v)


def _why_not_keys(k: Codes, page_size: int) -> str:
    tables = [block for block in (k.scale, k.shift) if block is not None and block.channels == 1]
    tokens = [block.tokens or page_size for block in tables]
    runs = [n for n in tokens if n]
    token_scale = k.scale.channels == 0 and k.scale.tokens <= 1
    known = token_scale or k.scale.channels == 1
    aligned = all(n % STEP == 0 and n % min(runs) == 0 for n in runs)
    if known and aligned and (k.shift is None or k.shift.channels == 1):
        return ""
    return (
        f"codes: scales of K per token or per channel of {STEP} tokens or more, shifts per channel, got {k}"
    )


def _why_not_values(v: Codes) -> str:
    if v.scale.tokens <= 1 and v.scale.channels in (0, BLOCK_CHANNELS) and v.shift in (None, v.scale):
        return ""
    return f"codes: scales of V per token or {BLOCK_CHANNELS} of its channels, shifts of the same, got {v}"
