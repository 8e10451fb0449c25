"""How the WebGPU engine is cut up: which template, with how many threads, and what of it fits a device.

Whether a variant is legal is a function of the device's limits alone. Workgroup memory is counted here, and a
variant that needs more is refused here: wgpu-native checks nothing. Rankings are a table with provenance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from polyflash.backends.gpu.configs import check, option
from polyflash.errors import spec_error
from polyflash.spec import Phase

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

AUTO, TILE, ROW = "auto", "tile", "row"
MAX_HEAD_DIM, MAX_GRADIENT_DIM = 512, 480  # of four keys in the least workgroup memory
LEAST_SPLIT = 256  # keys
MOST_SPLITS = 64
MOST_KEYS = 32  # of a block of `row`


class Limits(NamedTuple):
    """Facts about a device that decide which variants are legal, and what is tried first."""

    workgroup_bytes: int = 16 << 10
    invocations: int = 256
    binding_bytes: int = 128 << 20
    workgroups: int = 65535  # per dimension
    subgroup: int = 0  # lanes, if a probe found them constant and in order; 0: not used
    float16: bool = False
    kind: str = "discrete"  # discrete, integrated or cpu


FLOOR = Limits()  # what every WebGPU device has


class Variant(NamedTuple):
    """One way to run a kernel. `tile`: TX x TY threads, each with RM rows and 4 * RN4 keys of a block.
    `row`: TX threads, of which each `lanes` share RM rows, and blocks of at most 4 * RN4 keys."""

    template: str
    tx: int
    ty: int = 1
    rm: int = 1
    rn4: int = 1
    subgroups: bool = False
    lanes: int = 1
    early: bool = False

    @property
    def name(self) -> str:
        return (
            f"{self.template}-{'subgroup' if self.subgroups else 'shared'}".removeprefix("row-shared") or ROW
        )

    @property
    def threads(self) -> int:
        return self.tx * self.ty

    @property
    def rows(self) -> int:
        """Query rows of a workgroup."""
        return self.ty * self.rm if self.template == TILE else self.tx // self.lanes * self.rm

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return 4 * self.rn4 * (self.tx if self.template == TILE else 1)


def title(v: Variant) -> str:
    """A variant in words, as tables name it."""
    how = " subgroup" if v.subgroups else ""
    if v.template == TILE:
        return f"tile {v.tx}x{v.ty} {v.rm}x{4 * v.rn4}{how}"
    return f"row {v.lanes}x{v.rm} {v.tx}t {v.keys}k{' early' if v.early else ''}"


def lanes(count: int, rows: int, threads: int, rn4: int, early: bool = False) -> Variant:
    """A `row` variant whose rows `count` threads share."""
    return Variant(ROW, threads, rm=rows, rn4=rn4, subgroups=count > 1, lanes=count, early=early)


# First choices by kind of device, each followed by the rest. "cpu": measured with 1 x 8 x 512 x {64, 128} fp32
# on Mesa 22.3 lavapipe, whose subgroups have 8 lanes (docs/webgpu.md). "integrated": not measured.
_TILES = (
    Variant(TILE, 4, 8, 4, 2),
    Variant(TILE, 8, 8, 4, 1),
    Variant(TILE, 4, 8, 4, 1),
    Variant(TILE, 4, 8, 2, 1),
    Variant(TILE, 4, 8, 1, 1),
)
_ROWS = (lanes(1, 1, 64, 4),)
_SHARED_ROWS = (lanes(8, 8, 64, 4), lanes(4, 4, 64, 4), lanes(2, 2, 64, 4))
# A register array that is indexed in a loop is memory. On a CPU that costs nothing, while the long text of an
# unrolled one takes seconds to compile (lavapipe, head_dim 128: 7 s against 0.2 s, and 0.8 of the speed).
UNROLLED = {"discrete": 32, "integrated": 32, "cpu": 8}
RANKING = {
    "discrete": (*_SHARED_ROWS, *_ROWS, *_TILES),
    "integrated": (*_TILES, *_ROWS),
    "cpu": (*_SHARED_ROWS, *_TILES, *_ROWS),
}
# Of dq, and of dk and dv.
GRADIENTS = {kind: ((*_SHARED_ROWS, *_ROWS), (*_SHARED_ROWS, *_ROWS)) for kind in RANKING}
# Few rows per kv head: as many keys side by side as fit.
_FEW = (
    Variant(TILE, 8, 4, 1, 1),
    Variant(TILE, 8, 8, 1, 1),
    Variant(TILE, 4, 8, 1, 1),
    Variant(TILE, 4, 4, 1, 1),
    *_ROWS,
)
FEW_ROWS = {kind: _FEW for kind in RANKING}


def _both(variant: Variant) -> tuple[Variant, ...]:
    """A tile by subgroups and without; others as they are."""
    return (variant._replace(subgroups=True), variant) if variant.template == TILE else (variant,)


NAMED = {
    title(each): each
    for table in (*RANKING.values(), *FEW_ROWS.values(), *itertools.chain(*GRADIENTS.values()))
    for variant in table
    for each in _both(variant)
}


@dataclass(frozen=True, slots=True)
class Config:
    """`auto`: the first variant of the device's ranking that is legal, which is known when a device is.
    `variant` names one instead, of gradients that of dq, and `of_keys` that of dk and dv."""

    template: str = option(AUTO, TILE, ROW, default=AUTO, switched=(TILE, ROW), tuned=(TILE, ROW))
    subgroups: bool = option(False, True, default=False)
    variant: str = option("", *NAMED, default="", wanted="a variant's name", switched=())
    of_keys: str = option("", *NAMED, default="", wanted="a variant's name", switched=())

    def __post_init__(self) -> None:
        check(self)

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        copied = (
            "CPU tensors are copied to the device and the result back; polyflash.webgpu.GpuTensor stays there"
        )
        chosen = "the template is chosen by the device's limits" if self.template == AUTO else self.template
        how = self.variant or chosen
        return (copied, how) if spec.device == "cpu" else (how,)


def choose(spec: AttentionSpec, target: Target) -> Config:
    return Config()


def candidates(spec: AttentionSpec, target: Target) -> tuple[Config, ...]:
    """Configs worth timing; those that a device cannot run say so when they are tried."""
    if spec.phase is Phase.BACKWARD:
        tables = [dict.fromkeys(itertools.chain(*(pair[i] for pair in GRADIENTS.values()))) for i in (0, 1)]
        pairs = itertools.product(*(map(title, table) for table in tables))
        return tuple(Config(variant=rows, of_keys=keys) for rows, keys in pairs)
    ranked = (FEW_ROWS if spec.phase is Phase.DECODE else RANKING).values()
    each = itertools.chain(*map(_both, dict.fromkeys(itertools.chain(*ranked))))
    return tuple(Config(variant=title(variant)) for variant in each)


def fours(channels: int) -> int:
    """Vectors of four channels that hold a row."""
    return -(-channels // 4)


def key_vectors(d4: int) -> int:
    """Vectors that a key of `tile` takes in workgroup memory, so that keys side by side begin in different
    banks: a multiple of eight is permuted, others are made odd."""
    return d4 if d4 % 8 == 0 else d4 | 1


def workgroup_bytes(variant: Variant, d4: int, dv4: int) -> int:
    """Bytes of workgroup memory of a forward kernel, d4 and dv4 vectors to a row of K and V."""
    if variant.template == ROW:
        return variant.keys * (d4 + dv4) * 16
    rows, keys = variant.rows, variant.keys
    reduction = 0 if variant.subgroups else rows * variant.tx * 4
    return rows * d4 * 16 + keys * max(key_vectors(d4), dv4) * 16 + rows * keys * 4 + reduction


def why_illegal(variant: Variant, d4: int, dv4: int, limits: Limits) -> str:
    """Why a device cannot run a variant; "" if it can."""
    if variant.threads > limits.invocations:
        return f"{variant.threads} threads, a workgroup has at most {limits.invocations}"
    lanes = variant.tx if variant.template == TILE else variant.lanes
    if variant.subgroups and lanes > limits.subgroup:
        return f"rows of {lanes} lanes, a subgroup has {limits.subgroup or 'none that may be used'}"
    if variant.template == ROW and (d4 % lanes or dv4 % lanes):
        return f"{lanes} lanes share no row of {d4} and {dv4} vectors"
    needed = workgroup_bytes(variant, d4, dv4)
    if needed > limits.workgroup_bytes:
        return f"{needed} bytes of workgroup memory, there are {limits.workgroup_bytes}"
    return ""


def fitted_row(variant: Variant, d4: int, dv4: int, limits: Limits) -> Variant:
    """A `row` variant with as many keys to a block as there is room for; others as they are."""
    if variant.template != ROW:
        return variant
    group = 4 * (d4 + dv4) * 16  # bytes
    return variant._replace(rn4=max(1, min(variant.rn4, limits.workgroup_bytes // group)))


def row_constants(variant: Variant, d4: int, dv4: int) -> dict[str, int]:
    """Constants of kernels that keep rows in registers."""
    lanes, rm = variant.lanes, variant.rm
    steps = [x for x in (1, 2, 3) if (1 << x) <= min(lanes, rm)]
    halves = {f"HALF{x}": rm >> x if x in steps else 0 for x in (1, 2, 3)}
    halves |= {f"FAR{x}": lanes >> x for x in steps}
    own = rm >> len(steps)
    return {
        **{"LANES": lanes, "OWN": own, "OWNERS": max(1, lanes // rm), "EARLY": int(variant.early)},
        **{"WIDTH": d4 // lanes, "WIDTH_V": dv4 // lanes, "ALIKE": lanes >> len(steps) + 1, **halves},
    }


def tile_constants(variant: Variant, d4: int, dv4: int) -> dict[str, int]:
    """Constants of kernels with tiles of rows and keys."""
    return {
        **{"TX": variant.tx, "TY": variant.ty, "RN4": variant.rn4, "BN4": variant.keys // 4},
        **{"DC": -(-dv4 // variant.tx), "WIDEST4": max(key_vectors(d4), dv4), "KEY4": key_vectors(d4)},
        **{"SWIRL": 0 if d4 % 8 else 7, "SHARED": int(not variant.subgroups)},
    }


def constants(variant: Variant, d4: int, dv4: int) -> dict[str, int]:
    """Constants of a kernel's text that follow from its variant and its dims."""
    threads, keys = variant.threads, variant.keys
    own = (row_constants if variant.template == ROW else tile_constants)(variant, d4, dv4)
    return {
        **{"D4": d4, "DV4": dv4, "NT": threads, "BM": variant.rows, "BN": keys, "RM": variant.rm, "FOUR": 4},
        **{"K_TURNS": -(-keys * d4 // threads), "V_TURNS": -(-keys * dv4 // threads)},
        **{"SUBGROUPS": int(variant.subgroups), **own},
    }


def variants(dims: tuple[int, int], limits: Limits, few_rows: bool = False) -> Iterator[Variant]:
    """The legal variants for (d4, dv4), best first. `row` fits every device and is among them."""
    for variant in (FEW_ROWS if few_rows else RANKING)[limits.kind]:
        for each in _both(fitted_row(variant, *dims, limits)):
            if not why_illegal(each, *dims, limits):
                yield each


def resolve(config: Config, dims: tuple[int, int], limits: Limits, few_rows: bool = False) -> Variant:
    """The variant of a config on a device; SpecError if it has none."""
    if config.variant:
        return _named(config.variant, dims, limits)
    legal = list(variants(dims, limits, few_rows))
    if config.template == AUTO:
        return legal[0]
    for variant in legal:
        if variant.template == config.template and variant.subgroups is config.subgroups:
            return variant
    wanted = ", ".join(dict.fromkeys(v.name for v in legal))
    got = replace(config)
    raise spec_error("config", f"{got.template}, subgroups={got.subgroups}", wanted, "Drop the config.")


def _named(name: str, dims: tuple[int, int], limits: Limits) -> Variant:
    variant = fitted_row(NAMED[name], *dims, limits)
    if why := why_illegal(variant, *dims, limits):
        raise spec_error("config", f"{name} ({why})", "a variant for this device", "Drop the config.")
    return variant


def gradient_variants(dims: tuple[int, int], limits: Limits, config: Config) -> tuple[Variant, Variant]:
    """The variants of dq, which keeps rows, and of dk and dv, which keep keys: the first legal ones."""
    # two numbers of each row are beside a tile
    room = limits._replace(workgroup_bytes=limits.workgroup_bytes - 8 * MOST_KEYS)
    asked = zip(GRADIENTS[limits.kind], (config.variant, config.of_keys), strict=True)
    of_dq, of_dkv = (
        _named(name, dims, room) if name else next(_legal(table, dims, room)) for table, name in asked
    )
    return of_dq, of_dkv


def _legal(table: tuple[Variant, ...], dims: tuple[int, int], limits: Limits) -> Iterator[Variant]:
    for variant in table:
        fitted = fitted_row(variant, *dims, limits)
        if not why_illegal(fitted, *dims, limits):
            yield fitted


def splits(rows_of_tiles: int, keys: int, block: int, cores: int) -> tuple[int, int]:
    """Keys of a split, a multiple of `block`, and how many: enough for four workgroups per core."""
    wanted = max(1, min(MOST_SPLITS, -(-4 * cores // max(1, rows_of_tiles)), keys // LEAST_SPLIT))
    size = -(-keys // (wanted * block)) * block
    return size, -(-keys // size)
