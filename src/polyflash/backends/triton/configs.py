"""How the Triton engine is cut up: tiles, warps, stages and named techniques. Pure arithmetic, no DSL.

Choices are functions of the problem and the target: of lengths they know what a route knows (the class of the
row count, and whether keys are many), of the batch nothing. So one compiled kernel serves all calls of a
route, and a row's bits depend on no neighbour, unless a launch splits its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polyflash.backends.gpu.configs import varied
from polyflash.backends.gpu.launch import LEAST_SPLIT
from polyflash.backends.triton import tables
from polyflash.backends.triton.config_types import (
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
    LEAST_CODED,
    backward_shared_bytes,
    coded_tile,
    compensates,
    defers,
    entry_key,
    exact_product,
    fitted,
    fitted_backward,
    holds_rows,
    least_stages,
    long_tile,
    multiplies_values,
    neighbours,
    power,
    shared_bytes,
    shared_limit,
)
from polyflash.backends.triton.tiles import split_dim as split_dim
from polyflash.quant.scheme import KINDS, Block, Codes, codes_of, per_word
from polyflash.spec import MANY_KEYS, PACKED_ROWS, SMALL_ROWS, Feature, Phase

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

PACKED_GAIN = 0.9  # pack query heads where a tile of one head is filled worse than this share of a packed one
MOST_SPLIT = 4096  # keys of a split
SPLIT_LENGTH = 8192  # one request of so many keys fills the device twice
MOST_CODED_ROWS = 32  # whose products take their operands from registers, where codes are unpacked
TURNED_ROWS = 8  # columns of the right operand of NVIDIA's matrix instructions
MOST_CODED_DIM = 256
LONG_FIELDS = ("num_warps", "num_stages", "split_keys", "max_registers")  # of `tables.ManyKeys`, in configs
FP8_VALUES = Codes("fp8_e4m3", Block(), None, "fp8")
# No matrix unit of e4m3; gfx942 has one of other codes, and Triton 3.6 ends when it compiles for gfx1201.
WITHOUT_FP8 = ("sm80", "sm86", "gfx90a", "gfx942", "gfx1100", "gfx1201")
SPLIT_BYTES = 1 << 17  # of K and V in a split of the forward: what pays for its partial outputs


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
    tile, registers = coded_tile(spec, target) or (None, 0)
    tile = tile or long_tile(spec, target) or _forward_tile(spec, target)
    if multiplies_values(spec):
        tile = tile._replace(block_n=max(tile.block_n, LEAST_CODED))
    packed = packs(spec, tile.block_m)
    tile = _narrowed(tile, most_rows(spec) * (spec.group if packed else 1))
    order = "heavy_first" if spec.causal else "plain"
    arch = tables.ARCHS.get(target.arch)
    described = arch is not None and (arch.family, ELEMENT_BYTES.get(spec.dtype)) in tables.DESCRIBED
    described = described and Feature.PAGED not in spec.features
    loads = "descriptor" if described else "pointer"
    deferred = defers(spec, target)
    rest: dict[str, Any] = {"hold_q": holds_rows(spec, target, tile.block_m)}
    lazy = deferred and not multiplies_values(spec)
    rest |= {"lazy_rescale": lazy, "late_sum": deferred, "precision": exact_product(spec, target)}
    rest |= {"compensate": compensates(spec, target), "max_registers": registers}
    rest |= {"split_keys": _forward_split(spec, target, tile.block_n)}
    return ForwardConfig(*tile, loads=loads, pack_gqa=packed, order=order, **rest)


def _forward_split(spec: AttentionSpec, target: Target, block_n: int) -> int:
    """The least keys of a split; 0 where other calls may not change a row's bits."""
    if target.kind == "cpu" or spec.features & {Feature.BATCH_INVARIANT, Feature.VARLEN}:
        return 0
    bytes_per_key = (spec.head_dim + spec.head_dim_v) * ELEMENT_BYTES.get(spec.dtype, 4)
    return max(block_n, LEAST_SPLIT, power(SPLIT_BYTES // bytes_per_key))


def choose_decode(spec: AttentionSpec, target: Target) -> DecodeConfig:
    """One tile holds the rows of a kv head, up to PACKED_ROWS; blocks of keys as the pipeline has room."""
    rows = min(PACKED_ROWS, power(max(1, most_rows(spec)) * spec.group))
    if Feature.BATCH_INVARIANT in spec.features or spec.seqlen_q > 2 * SMALL_ROWS:
        rows = PACKED_ROWS  # rows of any number are walked by tiles of this many
    if spec.codes:
        rows = _turned_rows(spec, target) or min(rows, _most_coded_rows(spec))
    if target.kind == "cpu":
        return DecodeConfig(rows, LEAST, 4, 1, 4 * LEAST)  # few keys make several splits
    if spec.codes:
        return _choose_coded(spec, target, rows)
    size, widest = ELEMENT_BYTES.get(spec.dtype, 4), max(spec.head_dim, spec.head_dim_v)
    head = next((c for c in tables.CLASSES if widest <= c), tables.CLASSES[-1])
    kind = "hip" if target.kind == "hip" else "cuda"
    exact, block = exact_product(spec, target), tables.DECODE[kind, size][head]
    if exact != "ieee":
        block = tables.EXACT_DECODE.get(head, block)
    tile = fitted(Tile(rows, *block), spec, target)
    keys = max(tile.block_n, _split_keys(spec, target, tile.block_m))
    return DecodeConfig(*tile, split_keys=keys, precision=exact)


def refuses_products(spec: AttentionSpec, target: Target) -> str:
    """Why the forward does not multiply codes of K as they are; "" if it does, or there are none."""
    if not spec.codes:
        return ""
    k, v = codes_of(spec.codes)
    eights = k is not None and k.compute == "fp8"
    values = (None, FP8_VALUES) if eights else (None,)
    if k is None or k.compute == "float" or k.dtype == "int4" or v not in values or k.tables != "float32":
        wanted = (
            "compute of k in 8 bits, with v decoded, or of fp8 with scales per head or tensor, in float32"
        )
        return f"codes: needs {wanted}; asked for {spec.codes}"
    if eights and target.arch in WITHOUT_FP8:
        return f"codes: no products of e4m3 on {target.name}"
    apart = spec.features & {Feature.DROPOUT, Feature.PAGED, Feature.VARLEN}
    if v is not None and (apart or spec.head_dim_v % 4 or spec.head_dim_v > MOST_CODED_DIM):
        dims = f"of head_dim that is no multiple of 4 or above {MOST_CODED_DIM}"
        return f"codes: v is decoded over pages, in packed members, with dropout, {dims}"
    if spec.phase is Phase.DECODE and Feature.BATCH_INVARIANT not in spec.features:
        return "codes: few rows gain nothing from integer products"
    if k.scale.channels or (k.shift is not None and (k.shift != Block(0, 1) or spec.page_size)):
        wanted = "scales per token, block of tokens, head or tensor, and a mean over all tokens, not of pages"
        return f"codes: has {wanted}; asked for {spec.codes}"
    return ""


def refuses(spec: AttentionSpec, target: Target) -> str:
    """Why decode does not read these codes; "" if it does."""
    if not spec.codes:
        return ""
    k, v = codes_of(spec.codes)
    if k is None or v is None:
        return "codes: reads K and V as codes, not one of them alone"
    if "nf4" in (k.dtype, v.dtype):
        return "codes: nf4 is decoded apart"
    if max(spec.head_dim, spec.head_dim_v) > MOST_CODED_DIM:
        return f"codes: head_dim up to {MOST_CODED_DIM}"
    for codes, dim in ((k, spec.head_dim), (v, spec.head_dim_v)):
        if dim % per_word(codes):
            return f"codes: reads words of {per_word(codes)} channels, head_dim is {dim}"
    return ""


def _turned_rows(spec: AttentionSpec, target: Target) -> int:
    """Rows of turned products over codes, 0 where they are not turned. Codes of 8 bits with scales of keys
    are, if rows are half of the columns and channels of v keep four warps busy."""
    rows, channels = most_rows(spec) * spec.group, scales_channels(spec.codes)
    if target.kind == "hip" or spec.dtype == "float32" or rows > TURNED_ROWS:
        return 0
    if 0 < rows <= TURNED_ROWS // 2 and (channels or spec.head_dim_v > 64):
        return TURNED_ROWS // 2
    return TURNED_ROWS if channels else 0


def scales_channels(codes: str) -> bool:
    """Do channels of K or V have scales?"""
    return any(x is not None and x.scale.channels > 0 for x in codes_of(codes))


def _choose_coded(spec: AttentionSpec, target: Target, rows: int) -> DecodeConfig:
    """Blocks of keys that share the scales of channels, as far as such blocks go."""
    codes = [x for x in codes_of(spec.codes) if x is not None]
    blocks = [b for x in codes for b in (x.scale, x.shift) if b is not None and b.channels == 1 and b.tokens]
    block_n, warps, stages, registers = _coded_tile(spec, target, rows)
    block_n = max(LEAST, min(block_n, *(b.tokens & -b.tokens for b in blocks), block_n))
    bits = sum(
        KINDS[x.dtype].bits * dim for x, dim in zip(codes, (spec.head_dim, spec.head_dim_v), strict=False)
    )
    least = TURNED_ROWS if scales_channels(spec.codes) else LEAST  # of parts, as were measured
    keys = max(block_n, _split_keys(spec, target, max(rows, least), bits // 8))
    return DecodeConfig(rows, block_n, warps, stages, keys, max_registers=registers)


def coded_kind(spec: AttentionSpec, rows: int) -> str:
    """The key of tables of tiles over codes."""
    alone, what = most_rows(spec) == 1, "channels" if scales_channels(spec.codes) else "keys"
    bits = max(KINDS[x.dtype].bits for x in codes_of(spec.codes) if x is not None)
    # Registers of six programs per core hold too little of wide heads in two parts.
    if alone and bits == 4 and rows < LEAST and (spec.dtype != "float16" or _widest(spec) <= 128):
        return "nibbles1"
    if alone and (what == "keys" or rows < TURNED_ROWS):
        return f"{what}1"
    return f"float32 {what}" if spec.dtype == "float32" else f"{what}{rows}"


def _widest(spec: AttentionSpec) -> int:
    return max(spec.head_dim, spec.head_dim_v)


def _coded_tile(spec: AttentionSpec, target: Target, rows: int) -> tuple[int, int, int, int]:
    if target.kind == "hip":
        return tables.CODED_AMD
    return next(tile for dim, tile in tables.CODED[coded_kind(spec, rows)].items() if _widest(spec) <= dim)


def _most_coded_rows(spec: AttentionSpec) -> int:
    """Rows of one tile, see `tables.CODED`."""
    plain = spec.dtype == "bfloat16" and not scales_channels(spec.codes)
    return MOST_CODED_ROWS if plain and 64 < _widest(spec) <= 128 else LEAST


def few_coded(config: DecodeConfig, spec: AttentionSpec, target: Target) -> list[DecodeConfig]:
    """The configs over codes of launches that have no more rows of a kv head than these tiles, fewest first;
    by a spec of several query rows, which says no more of how many they are."""
    if spec.dtype == "float32" or most_rows(spec) == 1 or not _may_differ(config, spec, target):
        return []
    return [_choose_coded(spec, target, n) for n in (TURNED_ROWS, LEAST) if n < config.block_m]


def short_coded(config: DecodeConfig, spec: AttentionSpec, target: Target) -> DecodeConfig | None:
    """The config over codes of launches of few blocks; None if they have that of all, as where bits may
    follow no length, or a config was asked for."""
    kind = coded_kind(spec, config.block_m)
    tile = tables.CODED_SHORT.get(kind)
    if tile is None or not _may_differ(config, spec, target):
        return None
    block_n, warps, stages, *_ = tile
    if kind != "keys1" and _widest(spec) <= 64:
        warps = 2  # where the tile of all has one
    block_n = min(block_n, config.block_n)
    made = replace(config, block_n=block_n, num_warps=warps, num_stages=stages, max_registers=0)
    return None if made == config else made  # which would have a short one of its own, and so on


def long_coded(config: DecodeConfig, spec: AttentionSpec, target: Target) -> DecodeConfig | None:
    """The config over codes of launches of many keys, where another was measured to be quicker."""
    tile, dims = tables.CODED_LONG.get(long_key(spec, target)), (spec.head_dim, spec.head_dim_v)
    if tile is None or dims != (128, 128) or config.block_m != 4 or not _may_differ(config, spec, target):
        return None
    block_n, *_ = _coded_tile(spec, target, config.block_m)
    if config.block_n != block_n:
        return None
    return replace(config, **{name: getattr(tile, name) for name in LONG_FIELDS})


def long_key(spec: AttentionSpec, target: Target) -> tuple[str, str, bool]:
    """The key of `tables.CODED_LONG`; no key is of K and V in two dtypes."""
    dtypes = {x.dtype if x else "" for x in codes_of(spec.codes)}
    return target.arch, "+".join(sorted(dtypes)), scales_channels(spec.codes)


def _may_differ(config: DecodeConfig, spec: AttentionSpec, target: Target) -> bool:
    """May launches over codes have another config by their rows and keys? Not one that was asked for."""
    kept = target.kind != "cuda" or spec.dtype == "float32" or Feature.BATCH_INVARIANT in spec.features
    return not kept and config == choose_decode(spec, target)


def _split_keys(spec: AttentionSpec, target: Target, rows: int, bytes_per_key: int = 0) -> int:
    """Keys of a split, of heads, dims and target alone: small enough that one request of SPLIT_LENGTH keys
    fills the device twice, large enough that writing and reading its partial outputs is an eighth of reading
    its keys at most."""
    wanted = SPLIT_LENGTH * max(1, spec.num_kv_heads) // (2 * max(1, target.cores))
    size = ELEMENT_BYTES.get(spec.dtype, 4)
    partial = 2 * rows * spec.head_dim_v * 4  # bytes, written and read
    least = 8 * partial // (bytes_per_key or (spec.head_dim + spec.head_dim_v) * size)
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
        dkv = dkv._replace(block_m=min(dkv.block_m, pair.heavy_walk))
        dq = dq._replace(block_n=min(dq.block_n, pair.heavy_walk))
        dkv, dq = (
            t._replace(num_warps=max(t.num_warps, pair.heavy_warps if t.block_m * t.block_n >= 2048 else 1))
            for t in (dkv, dq)
        )
    return BackwardConfig(*dkv, *dq, precision=exact_product(spec, target), apart=pair.apart)


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
    """Configs worth timing for `spec`, the chosen one first: every tile near it, then one technique at a time
    beside it. All fit the shared memory."""
    chosen = choose(spec, target)
    if isinstance(chosen, BackwardConfig):  # one kernel after the other, as their times add up
        changes = [c for dq in (False, True) for c in _backward_tiles(chosen, dq, spec, target)]
    elif isinstance(chosen, DecodeConfig):  # the rows stay: they are what a kv head has
        changes = [
            {**tile, "split_keys": keys}
            for tile in _tiles(chosen, "", chosen.block_m, spec, target)
            for keys in (chosen.split_keys // 2, chosen.split_keys, chosen.split_keys * 2)
            if tile["block_m"] == chosen.block_m and keys >= tile["block_n"]
        ]
    else:
        most = chosen.block_m if isinstance(chosen, ForwardConfig) and most_rows(spec) else 256
        changes = list(_tiles(chosen, "", most, spec, target))
        if isinstance(chosen, ForwardConfig):
            changes = [{**tile, "max_registers": 0} for tile in changes]
    near: list[Config] = [replace(chosen, **change) for change in changes]
    return tuple(dict.fromkeys((chosen, *near, *varied(chosen, spec, target, "tuned"))))


def _tiles(
    config: Config, kernel: str, most_rows: int, spec: AttentionSpec, target: Target
) -> Iterator[dict[str, Any]]:
    """The fields of tiles near the config's."""
    names = [kernel + name for name in Tile._fields]
    tile = Tile(*(getattr(config, name) for name in names))
    return (dict(zip(names, near, strict=True)) for near in neighbours(tile, most_rows, spec, target))


def _backward_tiles(
    config: BackwardConfig, dq: bool, spec: AttentionSpec, target: Target
) -> Iterator[dict[str, Any]]:
    for tile in _tiles(config, "dq_" if dq else "", 128, spec, target):
        if backward_shared_bytes(Tile(*tile.values()), dq, spec, target) <= shared_limit(target):
            yield tile


def switches(spec: AttentionSpec, target: Target) -> tuple[Config, ...]:
    """The chosen config with one named technique changed at a time: what `ablate` measures."""
    return tuple(varied(choose(spec, target), spec, target, "switched"))
