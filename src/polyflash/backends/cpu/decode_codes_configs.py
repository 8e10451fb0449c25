"""Keys, scratch and limits of the decode kernels that read codes. Pure arithmetic, no DSL.

Head dims and schemes are part of a key, so a kernel knows its loads; one is compiled when it is first needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from polyflash.backends.cpu import configs, decode_configs, integer_configs
from polyflash.backends.cpu.configs import ISAS, LINE, STEP, STORAGE_BYTES, Scratch
from polyflash.backends.cpu.decode_configs import MOST_HEADS, MOST_ROWS, WIDTH, DecodeConfig, DecodeKey
from polyflash.quant.scheme import KINDS, Codes, codes_of, per_word, text_of
from polyflash.spec import MOST_SHARED_ROWS, SMALL_ROWS, AttentionSpec
from polyflash.target import Target

READ = ("int8", "int4")  # codes that become 16-bit integers in registers
MOST_CHANNELS = 256
MOST_FLOAT_ROWS = 32  # of codes that every tile makes float32 anew: decoding first is quicker from there on
# Vectors behind the planes of Q. Of a row: its step, sum of shifts, what the middle of codes adds by whole
# steps, then by parts of one; from NEXT on the step and its inverse for the next fold.
STATS, NEXT = 6, 4
BLOCK_CHANNELS = 32  # of V that share a scale, unless all do: whole 128-bit lanes


@dataclass(frozen=True, slots=True)
class CodedKey(DecodeKey):
    """The key of a kernel whose K and V are the codes that `codes` names; `storage` is that of q and out."""

    kind: ClassVar[str] = "decode"
    head_dim: int
    head_dim_v: int
    codes: str

    @property
    def name(self) -> str:
        dims = f"r{self.rows}_d{self.head_dim}_{self.head_dim_v}"
        return re.sub(r"\W", "_", f"{self.kind}_{self.isa}_{self.compute}_{self.storage}_{dims}_{self.codes}")

    @property
    def k(self) -> Codes:
        return _both(self.codes)[0]

    @property
    def v(self) -> Codes:
        return _both(self.codes)[1]

    @property
    def by_turns(self) -> bool:
        return False


class DecodedKey(CodedKey):
    """Codes are decoded into float32, a block of keys at a time."""

    __slots__ = ()
    kind: ClassVar[str] = "decode_rows"

    @property
    def walked(self) -> DecodeKey:
        """The key of a kernel over the rows that they become."""
        return DecodeKey(self.isa, "f32", "float32", self.rows)

    @property
    def unit(self) -> int:
        return self.walked.unit


class CodesKey(CodedKey):
    """Codes meet q and the weights as integers. compute: "int8dot" if the CPU has an instruction for sums of
    four products of bytes."""

    __slots__ = ()

    @property
    def row_key(self) -> configs.KernelKey:
        return configs.KernelKey(self.isa, "f32", self.storage, 1, configs.BUCKETS[0])

    @property
    def unit(self) -> int:
        """Channels of a vector of codes of V."""
        return self.unit_of(self.v)

    def unit_of(self, codes: Codes) -> int:
        return 2 * self.lanes * per_word(codes)

    @property
    def bytes(self) -> bool:
        """Whether q and the weights are rounded to bytes."""
        return "*" in self.codes

    @property
    def halves(self) -> bool:
        """Whether they are 16-bit integers that are multiplied as two bytes each: the same sums of fewer
        instructions."""
        return self.compute == "int8dot" and not self.bytes

    @property
    def rounded_bytes(self) -> int:
        """Bytes of a rounded q or weight."""
        return 1 if self.bytes else 2

    @property
    def joined(self) -> int:
        """Keys that one instruction multiplies with their weights and adds up in a lane."""
        return 4 if self.bytes or self.halves else 2

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
        return self.rows * self.query_row // 4 * self.rounded_bytes * (4 if self.by_fours else 1)

    @property
    def query_stats(self) -> int:
        return self.planes + self.finer * (2 if self.split else 1)

    @property
    def scaled(self) -> bool:
        """Whether Q is multiplied by scales of K's channels."""
        return self.k.scale.channels == 1

    @property
    def next_steps(self) -> int:
        return self.query_stats + NEXT * 4 * self.lanes

    @property
    def products(self) -> int:
        """Bytes before the float32 rows that the next fold takes: Q's own, or scaled ones behind all else."""
        return self.query_stats + STATS * 4 * self.lanes if self.scaled else 0

    @property
    def query_tile(self) -> int:
        """Bytes of the Q of a kv head, and of all that is made of it."""
        return self.products + self.planes if self.scaled else self.query_stats + STATS * 4 * self.lanes

    @property
    def by_fours(self) -> bool:
        """Whether scores are made of four keys at once, whose columns are transposed. Of two rows the sum
        over a key's lanes costs less, and of one that is wide, or float32, which meets the codes twice."""
        narrow = self.head_dim <= 2 * self.unit_of(self.k)
        return self.rows >= 4 or (self.rows == 1 and self.halves and narrow and not self.split)

    @property
    def woven(self) -> bool:
        """Whether scores of some keys are finished among the products of the next: where registers hold both.
        On Zen 4 scores take 0.75 to 0.89 of the time so, on Intel 0.98 to 1.01:
        docs/results/2026-11-30-epyc-zen4-2core-woven-scores.md."""
        return self.bytes and self.rows == 4

    @property
    def by_turns(self) -> bool:
        """Whether V of a short block and K of the next are read by turns: by one row of 8-bit codes whose
        sums over a row of V fit the registers. On Zen 4 in 0.75 to 0.95 of the time, and slower with
        requests (docs/results/2026-11-29-epyc-zen4-2core-codes-turns.md); on Intel slower either way."""
        fits = self.head_dim_v <= WIDTH and "int4" not in (self.k.dtype, self.v.dtype)
        return self.rows == 1 and self.by_fours and fits

    @property
    def key_groups(self) -> int:
        """Scales of a key of K, if it has any of its own."""
        return 1

    @property
    def run(self) -> int:
        """Keys that share what is folded into Q; 0: those of a page, or all."""
        tables = [block.tokens for block in (self.k.scale, self.k.shift) if block and block.channels == 1]
        return min((n for n in tables if n), default=0)

    @property
    def rows_weighing(self) -> int:
        """Rows of V that are prefetched with a vector of weights: a quarter of all, half of them if q has
        eight rows; none by turns, or of pairs of keys. Even requests leave memory least idle."""
        return max(1, self.lanes // (4 * self.rows)) if self.joined == 4 and not self.by_turns else 0

    @property
    def rows_later(self) -> int:
        """Rows of V that are prefetched while the values of those that are joined are added: all others."""
        return self.joined - self.joined * self.rows_weighing * self.rows // self.lanes

    @property
    def whole_rows(self) -> bool:
        """Whether a walk over V of a long block has twice as many sums, some in memory: of 8-bit codes and
        four rows one walk over 128 channels is quicker than two on Intel
        (docs/results/2026-11-29-xeon-decode-whole-rows.md), but not on Zen 4, which has short blocks if K has
        8 bits, too (docs/results/2026-11-30-epyc-zen4-2core-woven-scores.md)."""
        return self.bytes and self.rows == 4 and KINDS[self.v.dtype].bits == 8

    @property
    def near(self) -> int:
        """Rows by which lines are asked for into the first cache, too: those of 4 KiB, 8 to 32, in whole
        vectors of addresses. On Intel and Zen 4: docs/results/2026-11-29-epyc-zen4-2core-decode-turns.md."""
        rows = (self.head_dim, self.k), (self.head_dim_v, self.v)
        widest = max(channels * KINDS[codes.dtype].bits // 8 for channels, codes in rows)
        return min(32, max(8, 4096 // widest // 8 * 8)) if self.isa == "avx512" else 0

    @property
    def spare(self) -> int:
        """Entries of a list of rows behind those of a block: of rows near it, and up to a whole vector."""
        return self.near + self.lanes

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


class FloatsKey(CodesKey):
    """Codes become float32 in registers."""

    __slots__ = ()

    @property
    def split(self) -> bool:
        return False

    @property
    def by_fours(self) -> bool:
        return False

    @property
    def joined(self) -> int:
        return 1

    @property
    def near(self) -> int:
        return 0  # not timed

    @property
    def finer(self) -> int:
        return self.planes

    @property
    def key_groups(self) -> int:
        channels = self.k.scale.channels
        return -(-self.head_dim // channels) if channels > 1 else 1


def _both(codes: str) -> tuple[Codes, Codes]:
    """Parse K's and V's; a call in which one is none is refused."""
    return codes_of(codes)  # type: ignore[return-value]


def key_for(config: DecodeConfig, spec: AttentionSpec, rows: int) -> CodesKey | DecodedKey:
    """The kernel for tiles of `rows` rows, or of as many as one tile holds."""
    kind, most = _kind_of(spec), MOST_ROWS[config.isa]
    if kind is CodesKey:
        most = min(most, ISAS[config.isa].lanes // 2)  # a vector has two keys
    rows = 1 << (min(max(1, rows), most) - 1).bit_length()
    codes = spec.codes
    compute = config.compute if kind is CodesKey else "f32"
    asked = codes.count("*int8") == 2 and spec.dtype != "float32"
    if compute != "int8dot" or rows == 1 or not asked:
        # One row is as quick with 16 bits as two bytes.
        codes = text_of(*(x and x._replace(compute="float") for x in codes_of(codes)))
    return kind(config.isa, compute, spec.dtype, rows, spec.head_dim, spec.head_dim_v, codes)


def note(config: DecodeConfig, spec: AttentionSpec) -> str:
    """Words of a plan about the products of codes."""
    key = key_for(config, spec, spec.group * spec.seqlen_q)
    if isinstance(key, DecodedKey):
        return f"kernel {key.name}: codes become float32 as they are read, a block of keys at a time"
    if isinstance(key, FloatsKey):
        return f"kernel {key.name}: codes become float32 in registers"
    how = "16 bits: q or the weights are rounded to 32767ths of their largest"
    if key.split:
        how = "16 bits, twice: what is left of q and of the weights is rounded to parts of a 32767th"
    elif key.bytes:
        how = "bytes: q, a scale per row, and the weights, one per row and block, are rounded to 8 bits"
    elif "*int8" in spec.codes:
        why = "bytes need avx512_vnni, and to be asked for by k and v"
        how = f"16 bits: {'a single row is as quick' if key.rows == 1 else why}"
    by = ", multiplied as two bytes each" if key.halves else ""
    return f"kernel {key.name}: products of {how}{by}"


@lru_cache(maxsize=256)
def scratch(key: CodesKey | DecodedKey, block_n: int) -> Scratch:
    """The layout for one tile; of rows that are decoded, that of float32. `stage` holds the scales of keys,
    then scales and shifts of V by groups of channels; `addresses` weights as floats, `p` as integers, `block`
    alpha and, from its third vector on, the steps of weights and what is added."""
    if isinstance(key, DecodedKey):
        return decode_configs.scratch(key.walked, key.head_dim, key.head_dim_v, block_n)
    groups, live, vector = key.value_groups, key.live_groups, key.lanes * 4
    row = max(key.head_dim, key.head_dim_v) * max(4, STORAGE_BYTES[key.storage]) + LINE
    sizes = dict.fromkeys(Scratch._fields[:-1], 0) | {
        "q": MOST_HEADS * key.query_tile,
        "o": key.partial_bytes(key.head_dim_v),
        "k": 2 * (block_n + key.spare) * 8,
        "v": 2 * (block_n + key.spare) * 8,
        "s": block_n * key.rows * 4,
        "p": groups * block_n * key.rows * 2,
        "stage": (key.key_groups + 2 * live) * block_n * 4,
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
    if None in codes_of(spec.codes):
        return f"codes: of both K and V, got {spec.codes}"
    most = MOST_SHARED_ROWS if _kind_of(spec) is CodesKey else MOST_FLOAT_ROWS
    if (rows := spec.group * spec.seqlen_q) > most:
        return f"codes: up to {most} rows of a kv head, asked for {rows}"
    if not integer_configs.refuses(spec, target):
        return f"codes: more than {SMALL_ROWS} query rows are quicker by the integer products of the forward"
    if max(spec.head_dim, spec.head_dim_v) > MOST_CHANNELS:
        return f"codes: head_dim up to {MOST_CHANNELS}"
    return ""


def _kind_of(spec: AttentionSpec) -> type[CodesKey] | type[DecodedKey]:
    """How the codes of a call are read: in registers as integers or floats, by scales that the products or
    the weights take; of any others rows are decoded first."""
    k, v = _both(spec.codes)
    ints, floats = (all((x.dtype in READ) is wanted for x in (k, v)) for wanted in (True, False))

    def of_tokens(x: Codes) -> bool:
        block = x.scale.channels == BLOCK_CHANNELS and (ints or KINDS[x.dtype].bits == 4)
        return x.scale.tokens <= 1 and (x.scale.channels == 0 or block)

    known = _is_of_scores(k, spec.page_size) or (floats and of_tokens(k) and k.shift is None)
    if not (known and of_tokens(v) and (v.shift is None or (ints and v.shift == v.scale))):
        return DecodedKey
    return CodesKey if ints else FloatsKey if floats else DecodedKey


def _is_of_scores(k: Codes, page_size: int) -> bool:
    """Are scales of K per token, or per channel of STEP tokens or more, and shifts per channel?"""
    tables = [block for block in (k.scale, k.shift) if block is not None and block.channels == 1]
    tokens = [block.tokens or page_size for block in tables]
    runs = [n for n in tokens if n]
    token_scale = k.scale.channels == 0 and k.scale.tokens <= 1
    aligned = all(n % STEP == 0 and n % min(runs) == 0 and page_size % n == 0 for n in runs)
    known = token_scale or k.scale.channels == 1
    return known and aligned and (k.shift is None or k.shift.channels == 1)
