"""How the Metal engine is cut up: tiles, stages and named techniques, and the threadgroup memory they take.
Pure arithmetic.

No tile here was chosen by a measurement: they are those that MLX's attention kernel takes (32 rows; 32 keys,
or 16 from 128 channels on), as far as 32 KiB of threadgroup memory hold them in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from polyflash.backends.gpu.configs import CHANGE, check, flag, notes, option, power_of_two, varied
from polyflash.backends.gpu.launch import UNSPLIT, streaming_size
from polyflash.errors import described, spec_error
from polyflash.quant.scheme import codes_of
from polyflash.spec import DECODE_ROWS, Phase

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

THREADGROUP_BYTES = 32 << 10  # of every Apple GPU; nothing says so before a pipeline is refused
PAD = 4  # floats behind each row of a tile, as tiles.metal has it
ROWS = 8  # of a simdgroup, as of its matrices
MOST_CHANNELS, MOST_BACKWARD_CHANNELS = 256, 192
_FLOAT = 4
_block, _group = partial(power_of_two, ROWS, 64), partial(power_of_two, ROWS, 64)


def padded(channels: int) -> int:
    """Channels that a tile is compiled for: the next multiple of 16, from 128 on of 32."""
    step = 16 if channels <= 128 else 32
    return -(-channels // step) * step


def _split_exp() -> Any:
    fits = lambda config, parts, *_: config.block_n // parts >= ROWS  # noqa: E731
    return option(1, 2, 4, 8, default=1, tuned=(2, 4), needs=fits, note="the exponential is taken in parts")


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """block_m: rows of a tile, 8 of each simdgroup. block_n: keys of a block. Techniques: stages 2 reads the
    next block of K and V while one is used; split_exp takes the exponential in so many parts, under one
    maximum of the whole block, the product with V of each part behind it; base2 keeps scores in units of
    log2 e, scale folded in; skip visits only blocks of which some row sees a key."""

    block_m: int = _block()
    block_n: int = _block()
    stages: int = option(1, 2, default=1, tuned=(1, 2), note="the next block of K and V is read ahead")
    split_exp: int = _split_exp()
    base2: bool = flag(True)
    skip: bool = flag(True, note="blocks that no row sees are masked, not skipped")
    pack_gqa: bool = flag(False, needs=lambda config, packed, spec, _: spec.group > 1)
    split_keys: int = option(default=0, switched=())

    def __post_init__(self) -> None:
        check(self)
        _check_parts(self)
        if self.split_keys != 0:
            change = "Only a DecodeConfig has splits."
            raise spec_error("split_keys", got=described(self.split_keys), wanted="0", change=change)

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Threadgroup memory of the kernel."""
        return _forward_bytes(self, spec)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        return _told(self, spec)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Fields are those of the forward. block_m: rows of a tile, of all query heads of a kv head.
    split_keys: keys of a split; a launch takes more or fewer where its batch asks for it."""

    block_m: int = _block()
    block_n: int = _block()
    split_keys: int = option(switched=(UNSPLIT,))
    stages: int = option(1, 2, default=1, tuned=(1, 2), note="the next block of K and V is read ahead")
    split_exp: int = _split_exp()
    base2: bool = flag(True)
    skip: bool = flag(True, note="blocks that no row sees are masked, not skipped")
    pack_gqa: bool = flag(True)

    def __post_init__(self) -> None:
        check(self)
        _check_parts(self)
        keys = self.split_keys
        if type(keys) is not int or keys < self.block_n or keys & (keys - 1):
            wanted = f"a power of two from block_n ({self.block_n}) on"
            raise spec_error("split_keys", got=described(keys), wanted=wanted, change=CHANGE)

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Threadgroup memory of the kernel."""
        return _forward_bytes(self, spec)

    def split_size(self, walks: int, keys: int, cores: int, uneven: bool = False) -> int:
        """Keys per split at launch."""
        return UNSPLIT if self.split_keys == UNSPLIT else streaming_size(self, walks, keys, cores, uneven)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        rows = spec.seqlen_q * (spec.group if self.pack_gqa else 1)
        return (f"{rows} rows of a kv head share one walk over its keys", *_told(self, spec))


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """The dK/dV kernel: a threadgroup owns block_n keys and walks the rows by block_m. The dQ kernel: one
    owns dq_block_m rows and walks the keys by dq_block_n. The rest as the forward's."""

    block_m: int = _block()
    block_n: int = _block()
    dq_block_m: int = _block()
    dq_block_n: int = _block()
    base2: bool = flag(True)
    skip: bool = flag(True, note="blocks that no row sees are masked, not skipped")

    def __post_init__(self) -> None:
        check(self)

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Threadgroup memory of the larger kernel."""
        pairs = (self.block_n, self.block_m), (self.dq_block_m, self.dq_block_n)
        return max(_backward_bytes(own, walk, spec) for own, walk in pairs)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        return ("dK, dV and dQ in two kernels without atomics: bits repeat", *_told(self, spec))


Config = ForwardConfig | DecodeConfig | BackwardConfig


def _check_parts(config: ForwardConfig | DecodeConfig) -> None:
    if config.block_n // config.split_exp < ROWS:
        wanted = f"parts of {ROWS} keys or more of block_n {config.block_n}"
        raise spec_error("split_exp", got=config.split_exp, wanted=wanted, change="Take 1.")


def _told(config: Config, spec: AttentionSpec) -> tuple[str, ...]:
    kept = f"{config.shared_bytes(spec)} bytes of threadgroup memory, of {THREADGROUP_BYTES}"
    return (kept, "tiles not measured on a Mac", *notes(config))


def _tile(rows: int, spec: AttentionSpec) -> int:
    """Floats of rows of both kinds."""
    return rows * (padded(spec.head_dim) + padded(spec.head_dim_v) + 2 * PAD)


def _forward_bytes(config: ForwardConfig | DecodeConfig, spec: AttentionSpec) -> int:
    strips = config.block_m * (config.block_n + PAD) + config.block_m // ROWS
    return _FLOAT * (config.stages * _tile(config.block_n, spec) + strips)


def _backward_bytes(own: int, walk: int, spec: AttentionSpec) -> int:
    return _FLOAT * (_tile(own + walk, spec) + own * (walk + PAD) + own // ROWS)


def check_memory(config: Config, spec: AttentionSpec) -> None:
    """SpecError if the config's tiles do not fit: a pipeline would be refused in the middle of a call."""
    size = config.shared_bytes(spec)
    if size > THREADGROUP_BYTES:
        wanted = f"tiles that fit {THREADGROUP_BYTES} bytes of threadgroup memory"
        change = "Take smaller blocks, fewer stages, or explain(...).config."
        raise spec_error("config", got=f"{config} of {size} bytes", wanted=wanted, change=change)


def refuses(spec: AttentionSpec, target: Target) -> str:
    """Why no kernel reads the codes of a call; "" if one does, or if there are none."""
    kinds = {x.dtype for x in codes_of(spec.codes) if x is not None} if spec.codes else set()
    if kinds - {"int8", "int4"}:
        return f"codes: int8 and int4, got {spec.codes}"
    return ""


def fits(config: Config, spec: AttentionSpec) -> bool:
    return config.shared_bytes(spec) <= THREADGROUP_BYTES


_KEYS = 32, 16, 8  # of a block: MLX has 32 below 128 channels, else 16


def choose_forward(spec: AttentionSpec, target: Target) -> ForwardConfig:
    """32 rows, fewer where a call has fewer, by as many keys as memory holds."""
    rows = 32 if spec.seqlen_q > 16 else 16 if spec.seqlen_q > 8 else 8
    return next(config for n in _KEYS if fits(config := ForwardConfig(rows, n), spec))


def choose_decode(spec: AttentionSpec, target: Target) -> DecodeConfig:
    """The rows of a kv head in one tile, up to 32, and splits of 256 keys."""
    heads = spec.group * max(1, spec.seqlen_q)
    rows = 8 if heads <= DECODE_ROWS else 16 if heads <= 16 else 32
    return next(config for n in _KEYS if fits(config := DecodeConfig(rows, n, 256), spec))


def choose_backward(spec: AttentionSpec, target: Target) -> BackwardConfig:
    """The largest tiles that fit: a simdgroup's matrices are loaded once for all columns of a strip."""
    for own, walk in ((32, 16), (16, 16), (16, 8)):
        config = BackwardConfig(walk, own, own, walk)
        if fits(config, spec):
            return config
    return BackwardConfig(8, 8, 8, 8)


def candidates(spec: AttentionSpec, target: Target) -> Iterator[Config]:
    """Configs to try for a problem, the chosen one first."""
    chosen: Config
    sizes: list[Config]
    if spec.phase is Phase.BACKWARD:
        chosen = choose_backward(spec, target)
        sizes = [BackwardConfig(m, n, n, m) for n in (8, 16, 32) for m in (8, 16, 32)]
    elif spec.phase is Phase.DECODE:
        chosen = choose_decode(spec, target)
        sizes = [replace(chosen, block_n=n, split_keys=s) for n in (8, 16, 32) for s in (128, 256, 1024)]
    else:
        chosen = choose_forward(spec, target)
        sizes = [replace(chosen, block_m=m, block_n=n) for m in (16, 32, 64) for n in (8, 16, 32, 64)]
    yield chosen
    for other in (*sizes, *varied(chosen, spec, target, "tuned")):
        if other != chosen and fits(other, spec):
            yield other
