"""How the Triton engine is cut up: tiles, warps, stages and named techniques. Pure arithmetic, no DSL.

Choices are functions of the problem and the target: of lengths they know what a route knows (the class of the
row count, and whether keys are many), of the batch nothing. So one compiled kernel serves all calls of a
route, and a row's bits depend on no neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from polyflash.backends.gpu.launch import LEAST_SPLIT, UNSPLIT
from polyflash.backends.triton import tables
from polyflash.backends.triton.config_types import (
    PRECISIONS,
    BackwardConfig,
    Config,
    DecodeConfig,
    ForwardConfig,
    StatisticsConfig,
)
from polyflash.backends.triton.tables import Tile
from polyflash.backends.triton.tiles import (
    ELEMENT_BYTES,
    HEAVY,
    LEAST,
    backward_shared_bytes,
    can_add_late,
    can_scale_lazily,
    compensates,
    defers,
    entry_key,
    exact_product,
    fitted,
    fitted_backward,
    holds_rows,
    least_stages,
    long_tile,
    neighbours,
    power,
    shared_bytes,
    shared_limit,
)
from polyflash.backends.triton.tiles import split_dim as split_dim
from polyflash.spec import MANY_KEYS, PACKED_ROWS, SMALL_ROWS, Feature, Phase

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

PACKED_GAIN = 0.9  # pack query heads where a tile of one head is filled worse than this share of a packed one
MOST_SPLIT = 4096  # keys of a split
SPLIT_LENGTH = 8192  # one request of so many keys fills the device twice
THREE_PROGRAMS = 168  # registers of a thread with which a core of NVIDIA runs three programs of 4 warps


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
        lazy_rescale=deferred, late_sum=deferred, precision=exact_product(spec, target),
        compensate=compensates(spec, target),
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
    exact, block = exact_product(spec, target), tables.DECODE[kind, size][head]
    if exact != "ieee":
        block = tables.EXACT_DECODE.get(head, block)
    tile = fitted(Tile(rows, *block), spec, target)
    keys = max(tile.block_n, _split_keys(spec, target, tile.block_m))
    return DecodeConfig(*tile, split_keys=keys, precision=exact)


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
    return BackwardConfig(*dkv, *dq, precision=exact_product(spec, target))


def choose_statistics(spec: AttentionSpec, target: Target) -> StatisticsConfig:
    """The forward's tile with at most 64 keys, as there is no V to read; weights are summed both ways."""
    tile = _narrowed(_forward_tile(spec, target), most_rows(spec))
    tile = tile._replace(block_n=min(64, tile.block_n))
    return StatisticsConfig(*tile, precision=exact_product(spec, target))


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
        yield StatisticsConfig(*tile, precision=chosen.precision)


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
    chosen, least = choose(spec, target), least_stages(target)
    varied: list[Config]
    if isinstance(chosen, ForwardConfig):
        varied = list(_forward_switches(chosen, spec, target))
    elif isinstance(chosen, DecodeConfig):
        varied = list(_decode_switches(chosen, least))
    elif isinstance(chosen, BackwardConfig):
        varied = [replace(chosen, base2=not chosen.base2), replace(chosen, fused=not chosen.fused)]
        varied += [replace(chosen, num_stages=n) for n in range(least, 4) if n != chosen.num_stages]
        varied += [replace(chosen, dq_num_stages=n) for n in range(least, 4) if n != chosen.dq_num_stages]
    else:
        varied = [replace(chosen, num_stages=n) for n in range(least, 4) if n != chosen.num_stages]
    if spec.dtype == "float32":
        others = (p for p in PRECISIONS if p != chosen.precision)
        varied += [replace(chosen, precision=p) for p in others if p != "tf32x3" or target.kind != "hip"]
        if isinstance(chosen, ForwardConfig):
            varied.append(replace(chosen, compensate=not chosen.compensate))
    return tuple(varied)


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
    if chosen.split_keys:
        yield replace(chosen, split_keys=0)


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
    yield replace(chosen, fixed_splits=not chosen.fixed_splits)
    yield replace(chosen, pack_gqa=not chosen.pack_gqa)
