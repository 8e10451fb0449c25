"""The configs of the Triton engine, one class per phase, checked when they are made. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from polyflash.backends.gpu.configs import CHANGE, check, flag, notes, option, power_of_two
from polyflash.backends.gpu.launch import UNSPLIT, filling_size, streaming_size
from polyflash.backends.triton.tiles import (
    HEAVY,
    LEAST,
    can_add_late,
    can_scale_lazily,
    least_stages,
    multiplies_values,
    split_dim,
)
from polyflash.errors import described, spec_error
from polyflash.quant.scheme import codes_of
from polyflash.spec import Feature

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

PRECISIONS = ("ieee", "tf32x3", "bf16x6")
_LAZY = "sums are scaled only when the maximum has grown by 2^8"
# Over codes whose products are turned: a merge of more parts takes longer than up to so many blocks each.
# H100, one request of 4k to 16k keys: 0.84 to 0.95 of the time.
MOST_PARTS, LEAST_BLOCKS = 32, 8
THREE_PROGRAMS = 168  # registers of a thread with which a core of NVIDIA runs three programs of 4 warps
# Each use of these makes a field.
_block, _warps = partial(power_of_two, LEAST, 256), partial(power_of_two, 1, 16)
_loads = partial(option, "pointer", "descriptor", default="pointer")
_cache = partial(option, "", ".ca", ".cg", default="")


def _stages(most: int) -> Any:
    def can_have(_: Any, stages: int, spec: AttentionSpec, target: Target) -> bool:
        return stages >= least_stages(target)

    tried = tuple(range(1, most + 1))
    return option(*range(1, 9), wanted="an int from 1 to 8", switched=tried, needs=can_have)


def _precision() -> Any:
    def can_have(_: Any, precision: str, spec: AttentionSpec, target: Target) -> bool:
        return spec.dtype == "float32" and not (precision == "tf32x3" and target.kind == "hip")

    return option(*PRECISIONS, default="ieee", needs=can_have)


def _pack_gqa() -> Any:
    def can_have(_: Any, packed: bool, spec: AttentionSpec, target: Target) -> bool:
        return spec.group > 1 and Feature.INTERVALS not in spec.features

    return flag(False, tuned=(True, False), needs=can_have)


def _max_registers() -> Any:
    def can_have(config: ForwardConfig, most: int, spec: AttentionSpec, target: Target) -> bool:
        return target.kind == "cuda" and 0 in (most, config.max_registers)

    tried = 0, THREE_PROGRAMS
    return option(0, *range(64, 256, 8), default=0, switched=tried, tuned=tried, needs=can_have)


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """block_m: rows of a tile (with pack_gqa of all query heads of a kv head). block_n: keys of a block.
    num_stages: depth of the K/V pipeline. Techniques: loads by "pointer" or tensor "descriptor"; base2 keeps
    scores in units of log2 e; split_exp takes the exponential in so many column chunks; hold_q keeps Q in
    registers, as FlagAttention's product with an identity does; cache_kv is the cache modifier of K/V loads;
    mask_by "compare" selects, "add" adds -inf (to finite scores: a hidden NaN would stay); order
    "heavy_first" starts the longest rows first; persistent has as many programs as the device runs at once;
    max_registers (NVIDIA) is what the compiler may give a thread, 0 for as many as it likes; lazy_rescale
    scales older sums only once the maximum has grown by 2^8, as FlashAttention-4 does (not with bias, ALiBi,
    softcap or dropout); late_sum adds up the weights of a row across threads behind the last block, not in
    each. In float32 both do nothing. precision is how float32 is multiplied, exactly in every case: by "ieee"
    multiply-adds, or on matrix units as products of parts, "tf32x3" (NVIDIA) or "bf16x6". compensate keeps
    what float32 loses where a block's output is added to those before. split_keys: the least
    keys of a split, where few tiles would leave cores idle; 0: never split. level, over codes of V: 1 gives
    each block a sum of its own, added up in float32; 0 leaves all sums to tensor cores, which lose bits."""

    block_m: int = _block()
    block_n: int = _block()
    num_warps: int = _warps()
    num_stages: int = _stages(4)
    loads: str = _loads()
    pack_gqa: bool = _pack_gqa()
    base2: bool = flag(True)
    split_exp: int = option(
        1, 2, 4, 8, default=1, tuned=(2, 4), needs=lambda config, n, *_: config.block_n // n >= LEAST
    )
    hold_q: bool = flag(False, note="queries stay in registers")
    cache_kv: str = _cache()
    mask_by: str = option("compare", "add", default="compare")
    order: str = option("plain", "heavy_first", default="plain", note="tiles with the most keys start first")
    persistent: bool = flag(False, tuned=(True, False))
    max_registers: int = _max_registers()
    lazy_rescale: bool = flag(False, needs=lambda config, lazy, spec, _: can_scale_lazily(spec), note=_LAZY)
    late_sum: bool = flag(False, needs=lambda config, late, spec, _: can_add_late(spec))
    precision: str = _precision()
    compensate: bool = flag(True, needs=lambda config, lost, spec, _: spec.dtype == "float32")
    split_keys: int = option(
        default=0, switched=(0,), note="keys are split where few tiles would leave cores idle"
    )
    level: int = option(0, 1, default=1, needs=lambda config, level, spec, _: multiplies_values(spec))

    def __post_init__(self) -> None:
        check(self)
        if self.block_n // self.split_exp < LEAST:
            wanted = f"chunks of {LEAST} keys or more of block_n {self.block_n}"
            raise spec_error("split_exp", got=self.split_exp, wanted=wanted, change="Take 1.")
        if self.split_keys != 0 or type(self.split_keys) is not int:
            _check_splits(self)

    def split_size(self, walks: int, keys: int, cores: int, uneven: bool = False) -> int:
        """Keys per split at launch."""
        return filling_size(self, walks, keys, cores)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        packed = f"{spec.group} query heads of a kv head share a tile" if self.pack_gqa else ""
        heavy = sorted(f.value for f in spec.features & HEAVY)
        k, v = codes_of(spec.codes) if spec.codes else (None, None)
        codes = ""
        if k is not None and k.compute == "int8":
            codes = "q is rounded to int8, a scale per row; int32 sums with k: slower than 16 bits on an H100"
        elif k is not None:
            codes = "q, a scale per row, is rounded to e4m3"
        if v is not None:
            kept = (
                f"of {self.block_n} keys in tensor cores, then in float32"
                if self.level
                else "in tensor cores"
            )
            codes = f"q, a scale per row, and the weights are rounded to e4m3; sums {kept}"
        return _told(self, spec, codes, packed, f"smaller tiles for {', '.join(heavy)}" if heavy else "")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """block_m: rows of a tile, of all query heads of a kv head; below 16 only over codes, whose products are
    then turned. block_n: keys of a block. split_keys: keys of a split, wherever it lies; unless fixed_splits,
    `streaming_size` says when a launch takes another. The rest as the forward's."""

    block_m: int = power_of_two(4, 256)
    block_n: int = _block()
    num_warps: int = _warps()
    num_stages: int = _stages(4)
    split_keys: int = option(switched=(UNSPLIT,))
    loads: str = _loads()
    base2: bool = flag(True)
    cache_kv: str = _cache()
    pack_gqa: bool = flag(True)
    precision: str = _precision()
    fixed_splits: bool = flag(False)
    max_registers: int = _max_registers()

    def __post_init__(self) -> None:
        check(self)
        _check_splits(self)

    def split_size(self, walks: int, keys: int, cores: int, uneven: bool = False) -> int:
        """Keys per split at launch."""
        if self.fixed_splits or self.split_keys == UNSPLIT:
            return self.split_keys
        size = streaming_size(self, walks, keys, cores, uneven)
        if self.block_m < LEAST and keys > MOST_PARTS * size:
            blocks = -(-keys // (MOST_PARTS * self.block_n))
            size = max(size, min(LEAST_BLOCKS, blocks) * self.block_n)
        return size

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        rows = spec.group * spec.seqlen_q if self.pack_gqa else spec.seqlen_q
        sizes = f"splits of {self.split_keys} keys wherever they lie, merged in order"
        if not self.fixed_splits:
            sizes += "; larger or smaller where batch and length ask for it"
        return _told(self, spec, f"{rows} rows of a kv head share one walk over its keys", sizes)


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """The dK/dV kernel: a program owns block_n keys and walks the rows by block_m. The dQ kernel: a program
    owns dq_block_m rows and walks the keys by dq_block_n. apart: dK and dV in a pass each, where registers do
    not hold the sums of both, that of dV with so many times the keys and warps; 0: one pass. fused: one pass,
    dQ by atomic sums, so not repeatable: for `ablate`, never chosen."""

    block_m: int = _block()
    block_n: int = _block()
    num_warps: int = _warps()
    num_stages: int = _stages(3)
    dq_block_m: int = _block()
    dq_block_n: int = _block()
    dq_num_warps: int = _warps()
    dq_num_stages: int = _stages(3)
    base2: bool = flag(True)
    fused: bool = flag(False)
    precision: str = _precision()
    apart: int = option(0, 1, 2, default=0)

    def __post_init__(self) -> None:
        check(self)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        how = "dK, dV and dQ in two kernels without atomics: bits repeat"
        if self.fused:
            how = "one pass, dQ by atomic sums: bits differ from run to run"
        return _told(self, spec, how)


@dataclass(frozen=True, slots=True)
class StatisticsConfig:
    """block_m: rows of a tile; block_n: keys of a block."""

    block_m: int = _block()
    block_n: int = _block()
    num_warps: int = _warps()
    num_stages: int = _stages(3)
    precision: str = _precision()

    def __post_init__(self) -> None:
        check(self)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        return _told(self, spec)


Config = ForwardConfig | DecodeConfig | BackwardConfig | StatisticsConfig


def product_of(config: Config, spec: AttentionSpec, target: Target) -> str:
    """How kernels multiply: PRODUCT of `blocks.product`. A config keeps float32 exact; one TF32 product is
    taken where torch's own switch asks for it."""
    if spec.dtype != "float32":
        return "ieee"
    if spec.tf32 and target.kind == "cuda":
        return "tf32"
    if config.precision == "tf32x3" and target.kind == "hip":
        raise spec_error("precision", got="tf32x3", wanted=f"ieee or bf16x6 on {target.name}", change=CHANGE)
    return config.precision


def _product_note(config: Config, spec: AttentionSpec) -> str:
    if spec.dtype != "float32":
        return ""
    if spec.tf32:
        return "float32 is multiplied as TF32, which torch.backends.cuda.matmul.fp32_precision asks for"
    exact = {"ieee": "multiply-adds", "tf32x3": "three TF32 products", "bf16x6": "six bfloat16 products"}
    return f"float32 is multiplied exactly, by {exact[config.precision]}"


def _check_splits(config: Any) -> None:
    keys = config.split_keys
    if type(keys) is not int or keys < config.block_n or keys & (keys - 1):
        wanted = f"a power of two from block_n ({config.block_n}) on"
        raise spec_error("split_keys", got=described(keys), wanted=wanted, change=CHANGE)


def _told(config: Config, spec: AttentionSpec, *others: str) -> tuple[str, ...]:
    blocks = ["+".join(str(n) for n in split_dim(d) if n) for d in (spec.head_dim, spec.head_dim_v)]
    first = f"channels in blocks of {blocks[0]}, of V {blocks[1]}", _product_note(config, spec)
    return tuple(n for n in (*first, *others, *notes(config)) if n)
