"""How the Triton engine is cut up: tiles, warps, stages and named techniques. Pure arithmetic, no DSL.

Choices are functions of the problem and the target: of lengths they know what a route knows (the class of the
row count, and whether keys are many), of the batch nothing. So one compiled kernel serves all calls of a
route, and a row's bits depend on no neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polyflash.backends.triton import tables
from polyflash.backends.triton.tables import Tile
from polyflash.backends.triton.tiles import (
    ELEMENT_BYTES,
    HEAVY,
    LEAST,
    backward_shared_bytes,
    can_add_late,
    can_scale_lazily,
    defers,
    entry_key,
    fitted,
    fitted_backward,
    holds_rows,
    least_stages,
    long_tile,
    neighbours,
    power,
    shared_bytes,
    shared_limit,
    split_dim,
)
from polyflash.errors import described, spec_error
from polyflash.spec import MANY_KEYS, PACKED_ROWS, SMALL_ROWS, Feature, Phase

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

PACKED_GAIN = 0.9  # pack query heads where a tile of one head is filled worse than this share of a packed one
LEAST_SPLIT, MOST_SPLIT = 128, 4096  # keys of a split
UNSPLIT = 1 << 30  # as split_keys: all keys of a request in one program, however many (for `ablate`)
SPLIT_LENGTH = 8192  # one request of so many keys fills the device twice
THREE_PROGRAMS = 168  # registers of a thread with which a core of NVIDIA runs three programs of 4 warps
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
    each. In float32 both do nothing."""

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

    def __post_init__(self) -> None:
        _check_tile(self, ("block_m", "block_n"), ("num_warps",), ("num_stages",))
        _check_one_of(self, "max_registers", (0, *range(64, 256, 8)))
        _check_flags(self, "pack_gqa", "base2", "hold_q", "persistent", "lazy_rescale", "late_sum")
        _check_one_of(self, "loads", ("pointer", "descriptor"))
        _check_one_of(self, "split_exp", (1, 2, 4, 8))
        _check_one_of(self, "cache_kv", ("", ".ca", ".cg"))
        _check_one_of(self, "mask_by", ("compare", "add"))
        _check_one_of(self, "order", ("plain", "heavy_first"))
        if self.block_n // self.split_exp < LEAST:
            wanted = f"chunks of {LEAST} keys or more of block_n {self.block_n}"
            raise spec_error("split_exp", got=self.split_exp, wanted=wanted, change="Take 1.")

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What a plan says about this choice beside its numbers."""
        packed = f"{spec.group} query heads of a kv head share a tile" if self.pack_gqa else ""
        heavy = sorted(f.value for f in spec.features & HEAVY)
        smaller = f"smaller tiles for {', '.join(heavy)}" if heavy else ""
        held = "queries stay in registers" if self.hold_q else ""
        lazy = "sums are scaled only when the maximum has grown by 2^8" if self.lazy_rescale else ""
        first = "tiles with the most keys start first" if self.order == "heavy_first" else ""
        return tuple(note for note in (_channel_note(spec), packed, smaller, held, lazy, first) if note)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """block_m: rows of a tile, of all query heads of a kv head. block_n: keys of a block. split_keys: keys of
    a split, wherever it lies; `split_size` says when a launch may take another. The rest as the forward's."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_keys: int
    loads: str = "pointer"
    base2: bool = True
    cache_kv: str = ""
    pack_gqa: bool = True

    def __post_init__(self) -> None:
        _check_tile(self, ("block_m", "block_n"), ("num_warps",), ("num_stages",))
        _check_flags(self, "base2", "pack_gqa")
        _check_one_of(self, "loads", ("pointer", "descriptor"))
        _check_one_of(self, "cache_kv", ("", ".ca", ".cg"))
        keys = self.split_keys
        if type(keys) is not int or keys < self.block_n or keys & (keys - 1):
            wanted = f"a power of two from block_n ({self.block_n}) on"
            raise spec_error("split_keys", got=described(keys), wanted=wanted, change=_CHANGE)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What a plan says about this choice beside its numbers."""
        rows = spec.group * spec.seqlen_q if self.pack_gqa else spec.seqlen_q
        sizes = f"splits of {self.split_keys} keys wherever they lie, merged in order"
        if Feature.BATCH_INVARIANT not in spec.features:
            sizes += "; larger or smaller where batch and length ask for it"
        return _channel_note(spec), f"{rows} rows of a kv head share one walk over its keys", sizes


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

    def __post_init__(self) -> None:
        blocks = ("block_m", "block_n", "dq_block_m", "dq_block_n")
        _check_tile(self, blocks, ("num_warps", "dq_num_warps"), ("num_stages", "dq_num_stages"))
        _check_flags(self, "base2", "fused")

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What a plan says about this choice beside its numbers."""
        how = "dK, dV and dQ in two kernels without atomics: bits repeat"
        if self.fused:
            how = "one pass, dQ by atomic sums: bits differ from run to run"
        return _channel_note(spec), how


@dataclass(frozen=True, slots=True)
class StatisticsConfig:
    """block_m: rows of a tile; block_n: keys of a block."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        _check_tile(self, ("block_m", "block_n"), ("num_warps",), ("num_stages",))

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What a plan says about this choice beside its numbers."""
        return (_channel_note(spec),)


Config = ForwardConfig | DecodeConfig | BackwardConfig | StatisticsConfig


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


def most_rows(spec: AttentionSpec) -> int:
    """The most query rows of a request in the spec's route class; 0: no bound. Calls whose bits no length may
    change have none, nor have packed members of unknown lengths."""
    if Feature.BATCH_INVARIANT in spec.features:
        return 0
    n = spec.seqlen_q
    if Feature.VARLEN in spec.features:
        if spec.max_seqlen_q is None:
            return 0
        n = spec.max_seqlen_q
    return n if n <= 1 else SMALL_ROWS if n <= SMALL_ROWS else 2 * SMALL_ROWS if n <= 2 * SMALL_ROWS else 0


def packs(spec: AttentionSpec, block_m: int) -> bool:
    """Whether all query heads of a kv head share a tile: where rows of one head fill a tile of their own
    worse than PACKED_GAIN of what a shared one is filled. Of lengths without a bound the shortest counts."""
    if spec.group == 1 or Feature.INTERVALS in spec.features:  # heads may have lists of their own
        return False
    if Feature.VARLEN in spec.features or Feature.BATCH_INVARIANT in spec.features:
        return True
    shortest = MANY_KEYS if spec.seqlen_k >= MANY_KEYS else 2 * SMALL_ROWS + 1
    rows = most_rows(spec) or shortest
    return _filled(rows, block_m) < PACKED_GAIN * _filled(rows * spec.group, block_m)


def _filled(rows: int, block_m: int) -> float:
    return rows / (-(-max(1, rows) // block_m) * block_m)


def _narrowed(tile: Tile, rows: int) -> Tile:
    """The tile for at most `rows` rows (0: any number): 16 or 32 rows keep no more than 4 warps busy."""
    if not rows or power(rows) >= tile.block_m:
        return tile
    block_m = power(rows)
    return tile._replace(block_m=block_m, num_warps=min(tile.num_warps, 4 if block_m <= 64 else 8))


def _forward_tile(spec: AttentionSpec, target: Target) -> Tile:
    if target.kind == "cpu":
        return Tile(32, 32, 4, 1) if max(spec.head_dim, spec.head_dim_v) <= 128 else Tile(LEAST, LEAST, 4, 1)
    key = entry_key(spec, target)
    if key is None:
        return _safe(spec, target)
    found = tables.FORWARD[key[0]][key[1]]
    return fitted(found.heavy if spec.features & HEAVY else found.plain, spec, target)


def _safe(spec: AttentionSpec, target: Target) -> Tile:
    """The largest of the safe tiles that fits."""
    room = shared_limit(target)
    tile = next((t for t in tables.SAFE if shared_bytes(t, spec, target) <= room), tables.SAFE[-1])
    return tile._replace(num_stages=max(tile.num_stages, least_stages(target)))


def choose_forward(spec: AttentionSpec, target: Target) -> ForwardConfig:
    """The table's tile, narrower for few rows; heads packed where that fills tiles; rows of a causal mask
    longest first, so that the short ones fill the last wave."""
    tile = long_tile(spec, target) or _forward_tile(spec, target)
    packed = packs(spec, tile.block_m)
    tile = _narrowed(tile, most_rows(spec) * (spec.group if packed else 1))
    order = "heavy_first" if spec.causal else "plain"
    arch = tables.ARCHS.get(target.arch)
    described = arch is not None and (arch.family, ELEMENT_BYTES.get(spec.dtype)) in tables.DESCRIBED
    described = described and Feature.PAGED not in spec.features
    loads = "descriptor" if described else "pointer"
    deferred = defers(spec, target)
    return ForwardConfig(
        *tile, loads=loads, pack_gqa=packed, order=order, hold_q=holds_rows(spec, target, tile.block_m),
        lazy_rescale=deferred, late_sum=deferred,
    )  # fmt: skip


def choose_decode(spec: AttentionSpec, target: Target) -> DecodeConfig:
    """One tile holds the rows of a kv head, up to PACKED_ROWS; blocks of keys as the pipeline has room."""
    rows = min(PACKED_ROWS, power(max(1, most_rows(spec)) * spec.group))
    if Feature.BATCH_INVARIANT in spec.features or spec.seqlen_q > 2 * SMALL_ROWS:
        rows = PACKED_ROWS  # rows of any number are walked by tiles of this many
    if target.kind == "cpu":
        return DecodeConfig(rows, LEAST, 4, 1, 4 * LEAST)  # few keys make several splits
    size, widest = ELEMENT_BYTES.get(spec.dtype, 4), max(spec.head_dim, spec.head_dim_v)
    head = next((c for c in tables.CLASSES if widest <= c), tables.CLASSES[-1])
    kind = "hip" if target.kind == "hip" else "cuda"
    tile = fitted(Tile(rows, *tables.DECODE[kind, size][head]), spec, target)
    return DecodeConfig(*tile, split_keys=max(tile.block_n, _split_keys(spec, target, tile.block_m)))


def _split_keys(spec: AttentionSpec, target: Target, rows: int) -> int:
    """Keys of a split, of heads, dims and target alone: small enough that one request of SPLIT_LENGTH keys
    fills the device twice, large enough that writing and reading its partial outputs is an eighth of reading
    its keys at most."""
    wanted = SPLIT_LENGTH * max(1, spec.num_kv_heads) // (2 * max(1, target.cores))
    size = ELEMENT_BYTES.get(spec.dtype, 4)
    partial = 2 * rows * spec.head_dim_v * 4  # bytes, written and read
    least = 8 * partial // ((spec.head_dim + spec.head_dim_v) * size)
    # the power of two below: rather too many splits than too few
    floor = 1 << max(0, wanted.bit_length() - 1)
    return min(MOST_SPLIT, max(LEAST_SPLIT, floor, power(least)))


def split_size(config: DecodeConfig, heads: int, keys: int, cores: int, *, fixed: bool) -> int:
    """Keys per split at launch, for `heads` = batch * kv heads * row tiles walks over `keys` keys each.

    fixed (batch_invariant) or UNSPLIT: config.split_keys, whatever the batch. Else half as many while the
    device has idle cores, down to two blocks; twice as many while there are four programs per core, as each
    costs a start and a merge.
    """
    size = config.split_keys
    if fixed or size == UNSPLIT:
        return size
    least = max(2 * config.block_n, LEAST_SPLIT // 2)
    while size // 2 >= least and heads * -(-keys // size) < cores:
        size //= 2
    while size < keys and heads * -(-keys // (2 * size)) >= 4 * cores:
        size *= 2
    return size


def choose_backward(spec: AttentionSpec, target: Target) -> BackwardConfig:
    """The table's two tiles, cut to fit; with planes beside the scores twice the warps."""
    if target.kind == "cpu":
        n = 32 if max(spec.head_dim, spec.head_dim_v) <= 128 else LEAST
        return BackwardConfig(n, n, 4, 1, n, n, 4, 1)
    key = entry_key(spec, target)
    small = Tile(32, 32, 4, 1)
    pair = tables.BACKWARD[key[0]][key[1]] if key else tables.BackwardPair(small, small)
    dkv, dq = (t._replace(num_stages=max(t.num_stages, least_stages(target))) for t in pair[:2])
    dkv, dq = fitted_backward(dkv, False, spec, target), fitted_backward(dq, True, spec, target)
    if spec.features & HEAVY:
        dkv, dq = (
            t._replace(num_warps=max(t.num_warps, pair.heavy_warps if t.block_m * t.block_n >= 2048 else 1))
            for t in (dkv, dq)
        )
    return BackwardConfig(*dkv, *dq)


def choose_statistics(spec: AttentionSpec, target: Target) -> StatisticsConfig:
    """The forward's tile with at most 64 keys, as there is no V to read; weights are summed both ways."""
    tile = _narrowed(_forward_tile(spec, target), most_rows(spec))
    return StatisticsConfig(*tile._replace(block_n=min(64, tile.block_n)))


_CHOICE: dict[Phase, Callable[[AttentionSpec, Target], Config]] = {
    Phase.FORWARD: choose_forward,
    Phase.DECODE: choose_decode,
    Phase.BACKWARD: choose_backward,
    Phase.STATISTICS: choose_statistics,
}


def choose(spec: AttentionSpec, target: Target) -> Config:
    """The config of the spec's phase."""
    return _CHOICE[spec.phase](spec, target)


def candidates(spec: AttentionSpec, target: Target) -> tuple[Config, ...]:
    """Configs worth timing for `spec`, the chosen one first; all fit the shared memory."""
    chosen = choose(spec, target)
    varied: Iterator[Config]
    if isinstance(chosen, ForwardConfig):
        varied = _forward_candidates(chosen, spec, target)
    elif isinstance(chosen, DecodeConfig):
        varied = _decode_candidates(chosen, spec, target)
    elif isinstance(chosen, BackwardConfig):
        varied = _backward_candidates(chosen, spec, target)
    else:
        varied = _statistics_candidates(chosen, spec, target)
    return tuple(dict.fromkeys((chosen, *varied)))


def _tile_of(config: ForwardConfig | DecodeConfig | StatisticsConfig) -> Tile:
    return Tile(config.block_m, config.block_n, config.num_warps, config.num_stages)


def _forward_candidates(
    chosen: ForwardConfig, spec: AttentionSpec, target: Target
) -> Iterator[ForwardConfig]:
    """Every tile near the chosen one, then one technique at a time beside it."""
    most = chosen.block_m if most_rows(spec) else 256
    for m, n, warps, stages in neighbours(_tile_of(chosen), most, spec, target):
        yield replace(chosen, block_m=m, block_n=n, num_warps=warps, num_stages=stages, max_registers=0)
    if target.kind == "cuda":
        yield replace(chosen, max_registers=0 if chosen.max_registers else THREE_PROGRAMS)
    if spec.group > 1 and Feature.INTERVALS not in spec.features:
        yield replace(chosen, pack_gqa=not chosen.pack_gqa)
    for split_exp in (2, 4):
        if chosen.block_n // split_exp >= LEAST:
            yield replace(chosen, split_exp=split_exp)
    yield replace(chosen, persistent=not chosen.persistent)


def _decode_candidates(chosen: DecodeConfig, spec: AttentionSpec, target: Target) -> Iterator[DecodeConfig]:
    """The rows stay: they are what a kv head has."""
    for m, n, warps, stages in neighbours(_tile_of(chosen), chosen.block_m, spec, target):
        for keys in (chosen.split_keys // 2, chosen.split_keys, chosen.split_keys * 2):
            if m == chosen.block_m and keys >= n:
                tile = replace(chosen, block_n=n, num_warps=warps, num_stages=stages, split_keys=max(n, keys))
                yield tile


def _statistics_candidates(
    chosen: StatisticsConfig, spec: AttentionSpec, target: Target
) -> Iterator[StatisticsConfig]:
    for tile in neighbours(_tile_of(chosen), 256, spec, target):
        yield StatisticsConfig(*tile)


def _backward_candidates(
    chosen: BackwardConfig, spec: AttentionSpec, target: Target
) -> Iterator[BackwardConfig]:
    """The two kernels are varied one after the other, as their times add up."""
    room = shared_limit(target)
    dkv = Tile(chosen.block_m, chosen.block_n, chosen.num_warps, chosen.num_stages)
    for near in neighbours(dkv, 128, spec, target):
        if backward_shared_bytes(near, False, spec, target) <= room:
            m, n, warps, stages = near
            yield replace(chosen, block_m=m, block_n=n, num_warps=warps, num_stages=stages)
    dq = Tile(chosen.dq_block_m, chosen.dq_block_n, chosen.dq_num_warps, chosen.dq_num_stages)
    for near in neighbours(dq, 128, spec, target):
        if backward_shared_bytes(near, True, spec, target) <= room:
            m, n, warps, stages = near
            yield replace(chosen, dq_block_m=m, dq_block_n=n, dq_num_warps=warps, dq_num_stages=stages)


def switches(spec: AttentionSpec, target: Target) -> tuple[Config, ...]:
    """The chosen config with one named technique changed at a time: what `ablate` measures."""
    chosen = choose(spec, target)
    if isinstance(chosen, ForwardConfig):
        return tuple(_forward_switches(chosen, spec, target))
    if isinstance(chosen, DecodeConfig):
        return tuple(_decode_switches(chosen, least_stages(target)))
    if isinstance(chosen, BackwardConfig):
        some = range(least_stages(target), 4)
        staged = [replace(chosen, num_stages=n) for n in some if n != chosen.num_stages]
        staged += [replace(chosen, dq_num_stages=n) for n in some if n != chosen.dq_num_stages]
        return (replace(chosen, base2=not chosen.base2), replace(chosen, fused=not chosen.fused), *staged)
    return tuple(
        replace(chosen, num_stages=n) for n in range(least_stages(target), 4) if n != chosen.num_stages
    )


def _forward_switches(chosen: ForwardConfig, spec: AttentionSpec, target: Target) -> Iterator[ForwardConfig]:
    yield replace(chosen, base2=not chosen.base2)
    for n in (1, 2, 4, 8):
        if n != chosen.split_exp and chosen.block_n // n >= LEAST:
            yield replace(chosen, split_exp=n)
    for n in range(least_stages(target), 5):
        if n != chosen.num_stages:
            yield replace(chosen, num_stages=n)
    yield replace(chosen, hold_q=not chosen.hold_q)
    if can_scale_lazily(spec):
        yield replace(chosen, lazy_rescale=not chosen.lazy_rescale)
    if can_add_late(spec):
        yield replace(chosen, late_sum=not chosen.late_sum)
    if target.kind == "cuda":
        yield replace(chosen, max_registers=0 if chosen.max_registers else THREE_PROGRAMS)
    yield replace(chosen, loads="descriptor" if chosen.loads == "pointer" else "pointer")
    for modifier in ("", ".ca", ".cg"):
        if modifier != chosen.cache_kv:
            yield replace(chosen, cache_kv=modifier)
    yield replace(chosen, mask_by="add" if chosen.mask_by == "compare" else "compare")
    yield replace(chosen, order="plain" if chosen.order == "heavy_first" else "heavy_first")
    yield replace(chosen, persistent=not chosen.persistent)
    if spec.group > 1:
        yield replace(chosen, pack_gqa=not chosen.pack_gqa)


def _decode_switches(chosen: DecodeConfig, least: int) -> Iterator[DecodeConfig]:
    yield replace(chosen, base2=not chosen.base2)
    for n in range(least, 5):
        if n != chosen.num_stages:
            yield replace(chosen, num_stages=n)
    yield replace(chosen, loads="descriptor" if chosen.loads == "pointer" else "pointer")
    for modifier in ("", ".ca", ".cg"):
        if modifier != chosen.cache_kv:
            yield replace(chosen, cache_kv=modifier)
    yield replace(chosen, split_keys=UNSPLIT)
    yield replace(chosen, pack_gqa=not chosen.pack_gqa)
