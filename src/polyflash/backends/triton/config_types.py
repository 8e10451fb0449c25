"""The configs of the Triton engine, one class per phase, checked when they are made. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyflash.backends.triton.tiles import HEAVY, LEAST, split_dim
from polyflash.errors import described, spec_error
from polyflash.spec import Feature

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

PRECISIONS = ("ieee", "tf32x3", "bf16x6")
_CHANGE = "Take explain(...).config."


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
    what float32 loses where a block's output is added to those before. split_keys: keys of a split where a
    launch splits them, see `split_size`; 0: it never does."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    loads: str = "pointer"
    pack_gqa: bool = False
    base2: bool = True
    split_exp: int = 1
    hold_q: bool = False
    cache_kv: str = ""
    mask_by: str = "compare"
    order: str = "plain"
    persistent: bool = False
    max_registers: int = 0
    lazy_rescale: bool = False
    late_sum: bool = False
    precision: str = "ieee"
    compensate: bool = True
    split_keys: int = 0

    def __post_init__(self) -> None:
        _check_tile(self, ("block_m", "block_n"), ("num_warps",), ("num_stages",))
        _check_one_of(self, "max_registers", (0, *range(64, 256, 8)))
        _check_one_of(self, "precision", PRECISIONS)
        _check_flags(
            self, "pack_gqa", "base2", "hold_q", "persistent", "lazy_rescale", "late_sum", "compensate"
        )
        _check_one_of(self, "loads", ("pointer", "descriptor"))
        _check_one_of(self, "split_exp", (1, 2, 4, 8))
        _check_one_of(self, "cache_kv", ("", ".ca", ".cg"))
        _check_one_of(self, "mask_by", ("compare", "add"))
        _check_one_of(self, "order", ("plain", "heavy_first"))
        if self.block_n // self.split_exp < LEAST:
            wanted = f"chunks of {LEAST} keys or more of block_n {self.block_n}"
            raise spec_error("split_exp", got=self.split_exp, wanted=wanted, change="Take 1.")
        if self.split_keys != 0 or type(self.split_keys) is not int:
            _check_splits(self)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What a plan says about this choice beside its numbers."""
        packed = f"{spec.group} query heads of a kv head share a tile" if self.pack_gqa else ""
        heavy = sorted(f.value for f in spec.features & HEAVY)
        smaller = f"smaller tiles for {', '.join(heavy)}" if heavy else ""
        held = "queries stay in registers" if self.hold_q else ""
        lazy = "sums are scaled only when the maximum has grown by 2^8" if self.lazy_rescale else ""
        first = "tiles with the most keys start first" if self.order == "heavy_first" else ""
        split = "keys are split where few tiles would leave cores idle" if self.split_keys else ""
        product = _product_note(self, spec)
        return tuple(
            n for n in (_channel_note(spec), product, packed, smaller, held, lazy, first, split) if n
        )


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """block_m: rows of a tile, of all query heads of a kv head. block_n: keys of a block. split_keys: keys of
    a split, wherever it lies; unless fixed_splits, `split_size` says when a launch may take another. The rest
    as the forward's."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_keys: int
    loads: str = "pointer"
    base2: bool = True
    cache_kv: str = ""
    pack_gqa: bool = True
    precision: str = "ieee"
    fixed_splits: bool = False

    def __post_init__(self) -> None:
        _check_tile(self, ("block_m", "block_n"), ("num_warps",), ("num_stages",))
        _check_flags(self, "base2", "pack_gqa", "fixed_splits")
        _check_one_of(self, "precision", PRECISIONS)
        _check_one_of(self, "loads", ("pointer", "descriptor"))
        _check_one_of(self, "cache_kv", ("", ".ca", ".cg"))
        _check_splits(self)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What a plan says about this choice beside its numbers."""
        rows = spec.group * spec.seqlen_q if self.pack_gqa else spec.seqlen_q
        sizes = f"splits of {self.split_keys} keys wherever they lie, merged in order"
        if not (self.fixed_splits or Feature.BATCH_INVARIANT in spec.features):
            sizes += "; larger or smaller where batch and length ask for it"
        shared = f"{rows} rows of a kv head share one walk over its keys"
        return tuple(n for n in (_channel_note(spec), _product_note(self, spec), shared, sizes) if n)


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """The dK/dV kernel: a program owns block_n keys and walks the rows by block_m. The dQ kernel: a program
    owns dq_block_m rows and walks the keys by dq_block_n. fused: one pass, dQ by atomic sums, so not
    repeatable: for `ablate`, never chosen."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    dq_block_m: int
    dq_block_n: int
    dq_num_warps: int
    dq_num_stages: int
    base2: bool = True
    fused: bool = False
    precision: str = "ieee"

    def __post_init__(self) -> None:
        blocks = ("block_m", "block_n", "dq_block_m", "dq_block_n")
        _check_tile(self, blocks, ("num_warps", "dq_num_warps"), ("num_stages", "dq_num_stages"))
        _check_flags(self, "base2", "fused")
        _check_one_of(self, "precision", PRECISIONS)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What a plan says about this choice beside its numbers."""
        how = "dK, dV and dQ in two kernels without atomics: bits repeat"
        if self.fused:
            how = "one pass, dQ by atomic sums: bits differ from run to run"
        return tuple(n for n in (_channel_note(spec), _product_note(self, spec), how) if n)


@dataclass(frozen=True, slots=True)
class StatisticsConfig:
    """block_m: rows of a tile; block_n: keys of a block."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"

    def __post_init__(self) -> None:
        _check_tile(self, ("block_m", "block_n"), ("num_warps",), ("num_stages",))
        _check_one_of(self, "precision", PRECISIONS)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What a plan says about this choice beside its numbers."""
        return tuple(n for n in (_channel_note(spec), _product_note(self, spec)) if n)


Config = ForwardConfig | DecodeConfig | BackwardConfig | StatisticsConfig


def product_of(config: Config, spec: AttentionSpec, target: Target) -> str:
    """How kernels multiply: PRODUCT of `blocks.product`. A config keeps float32 exact; one TF32 product is
    taken where torch's own switch asks for it."""
    if spec.dtype != "float32":
        return "ieee"
    if spec.tf32 and target.kind == "cuda":
        return "tf32"
    if config.precision == "tf32x3" and target.kind == "hip":
        raise spec_error("precision", got="tf32x3", wanted=f"ieee or bf16x6 on {target.name}", change=_CHANGE)
    return config.precision


def _product_note(config: Config, spec: AttentionSpec) -> str:
    if spec.dtype != "float32":
        return ""
    if spec.tf32:
        return "float32 is multiplied as TF32, which torch.backends.cuda.matmul.fp32_precision asks for"
    exact = {"ieee": "multiply-adds", "tf32x3": "three TF32 products", "bf16x6": "six bfloat16 products"}
    return f"float32 is multiplied exactly, by {exact[config.precision]}"


def _check_tile(
    config: Any, blocks: tuple[str, ...], warps: tuple[str, ...], stages: tuple[str, ...]
) -> None:
    """SpecError unless sizes are powers of two that a matrix instruction and a program can have."""
    for names, low, high in ((blocks, LEAST, 256), (warps, 1, 16)):
        for name in names:
            n = getattr(config, name)
            if type(n) is not int or not low <= n <= high or n & (n - 1):
                wanted = f"a power of two from {low} to {high}"
                raise spec_error(name, got=described(n), wanted=wanted, change=_CHANGE)
    for name in stages:
        n = getattr(config, name)
        if type(n) is not int or not 1 <= n <= 8:
            raise spec_error(name, got=described(n), wanted="an int from 1 to 8", change=_CHANGE)


def _check_splits(config: Any) -> None:
    keys = config.split_keys
    if type(keys) is not int or keys < config.block_n or keys & (keys - 1):
        wanted = f"a power of two from block_n ({config.block_n}) on"
        raise spec_error("split_keys", got=described(keys), wanted=wanted, change=_CHANGE)


def _check_flags(config: Any, *names: str) -> None:
    for name in names:
        if type(getattr(config, name)) is not bool:
            got = described(getattr(config, name))
            raise spec_error(name, got=got, wanted="True or False", change=_CHANGE)


def _check_one_of(config: Any, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(config, name)
    if type(value) is not type(allowed[0]) or value not in allowed:
        wanted = " or ".join(map(repr, allowed))
        raise spec_error(name, got=described(value), wanted=wanted, change=_CHANGE)


def _channel_note(spec: AttentionSpec) -> str:
    blocks = ["+".join(str(n) for n in split_dim(d) if n) for d in (spec.head_dim, spec.head_dim_v)]
    return f"channels in blocks of {blocks[0]}, of V {blocks[1]}"
