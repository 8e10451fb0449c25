"""How the WebGPU engine is cut up: which template, with how many threads, and what of it fits a device.

Whether a variant is legal is a function of the device's limits alone. Workgroup memory is counted here, and a
variant that needs more is refused here: wgpu-native checks nothing. Rankings are a table with provenance."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from polyflash.backends.gpu.configs import check, option
from polyflash.errors import spec_error
from polyflash.quant.scheme import Block, codes_of
from polyflash.spec import Phase

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

AUTO, TILE, ROW = "auto", "tile", "row"
MAX_HEAD_DIM, MAX_GRADIENT_DIM = 512, 480  # of four keys in the least workgroup memory
LEAST_SPLIT = 256  # keys
MOST_SPLITS, MOST_FILLING = 64, 4
MOST_KEYS = 32  # of a block of `row`
STRETCH = 64  # keys of one sum: of 128, the same row of V for all keys comes out 1e-6 off


class Limits(NamedTuple):
    """Facts about a device that decide which variants are legal, and what is tried first."""

    workgroup_bytes: int = 16 << 10
    invocations: int = 256
    binding_bytes: int = 128 << 20
    workgroups: int = 65535  # per dimension
    subgroup: int = 0  # lanes, if a probe found them constant and in order; 0: not used
    float16: bool = False
    kind: str = "discrete"  # discrete, integrated or cpu
    unrolled: int = 32  # repetitions that are written out; of more a loop is made


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
    return f"row {v.lanes}x{v.rm} {v.tx}t {v.keys}k"


def lanes(count: int, rows: int, threads: int, rn4: int) -> Variant:
    """A `row` variant whose rows `count` threads share."""
    return Variant(ROW, threads, rm=rows, rn4=rn4, subgroups=count > 1, lanes=count)


# What is tried first by kind of device; those that need more registers than there are come last. "discrete":
# measured on an H100 through Vulkan, "cpu" on Mesa 22.3 lavapipe, whose subgroups have 8 lanes, both with
# float32 (docs/webgpu.md); "integrated" is not measured.
_TILES = (
    Variant(TILE, 4, 8, 4, 2),
    Variant(TILE, 8, 8, 4, 1),
    Variant(TILE, 4, 8, 4, 1),
    Variant(TILE, 4, 8, 2, 1),
    Variant(TILE, 4, 8, 1, 1),
)
_ROWS = (lanes(1, 1, 64, 4),)
_CPU_ROWS = (lanes(8, 8, 64, 4), lanes(4, 4, 64, 4))
_GPU_ROWS = (
    *(lanes(4, 4, 128, 8), lanes(16, 8, 128, 4), lanes(32, 8, 128, 4), lanes(8, 4, 128, 8)),
    *(lanes(4, 2, 128, 8), lanes(2, 2, 64, 4), lanes(2, 1, 64, 4)),
)
RANKING = {
    "discrete": (*_GPU_ROWS, *_ROWS, Variant(TILE, 16, 8, 2, 1), *_TILES),
    "integrated": (*_TILES, *_ROWS),
    "cpu": (*_CPU_ROWS, *_TILES, *_ROWS),
}
# Of dq, and of dk and dv.
_GPU_GRADIENTS = (
    *(lanes(8, 4, 128, 8), lanes(16, 4, 128, 4), lanes(32, 4, 128, 4), lanes(8, 2, 64, 4)),
    *(lanes(4, 2, 64, 4), lanes(4, 1, 64, 4), lanes(2, 1, 64, 4), *_ROWS),
)
GRADIENTS = {
    "discrete": (_GPU_GRADIENTS, _GPU_GRADIENTS),
    "integrated": (_ROWS, _ROWS),
    "cpu": ((*_CPU_ROWS, *_ROWS), (*_CPU_ROWS, *_ROWS)),
}
# Few rows per kv head: the first with the fewest rows to a workgroup that has them all.
_FEW_TILES = (Variant(TILE, 8, 4, 1, 1), Variant(TILE, 8, 8, 1, 1), Variant(TILE, 4, 4, 1, 1))
_GPU_FEW = (
    *(
        lanes(32, 1, 32, 4),
        lanes(16, 1, 32, 4),
        lanes(16, 2, 32, 1),
        lanes(16, 4, 32, 2),
        lanes(16, 8, 32, 2),
    ),
    *(lanes(8, 1, 32, 4), lanes(4, 1, 32, 4)),
)
FEW_ROWS = {
    "discrete": (*_GPU_FEW, *_FEW_TILES, *_ROWS),
    "integrated": (*_FEW_TILES, *_ROWS),
    "cpu": (*_FEW_TILES, *_ROWS),
}
# Numbers that a thread keeps of its rows: beside them it needs up to 100 registers, and there are 255.
REGISTERS = {"discrete": 128, "integrated": 128, "cpu": 1 << 20}
# A register array that is indexed in a loop is memory. On a CPU that costs nothing, while the long text of an
# unrolled one takes seconds to compile (lavapipe, head_dim 128: 7 s against 0.2 s, and 0.8 of the speed).
# SwiftShader is at an unrolled tile of head_dim 64 for minutes, at loops for half a second.
UNROLLED = {"discrete": 32, "integrated": 32, "cpu": 8}
UNROLLED_BY_NAME = {"SwiftShader": 1}
# Workgroups of a call that leave no core idle: keys are cut into splits until there are so many. Of few rows,
# those with keys of up to SHORT vectors, which ask for less memory at a time, and others.
FEW_GROUPS = {"discrete": (2048, 1024), "integrated": (256, 256), "cpu": (16, 16)}
SHORT = 16
GROUPS = {"discrete": 512, "integrated": 0, "cpu": 0}


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
        if spec.phase is Phase.FORWARD and multiplies(spec.codes, spec.page_size):
            how += "; where it is `row`, q is made int8 and products q·k are integers"
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


def multiplies(codes: str, page_size: int) -> bool:
    """May q·k be sums of integers? Both sides ask for it, and a row of q meets scales of keys alone, and one
    shift."""
    k, v = codes_of(codes) if codes else (None, None)
    if k is None or v is None or not k.compute == v.compute == k.dtype == "int8" or k.scale.channels:
        return False
    return k.shift is None or (k.shift == Block(0, 1) and not page_size)


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
        **{"LANES": lanes, "OWN": own, "OWNERS": max(1, lanes // rm)},
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
        **{"K_FOURS": d4, "V_FOURS": dv4},
        **{"K_TURNS": -(-keys * d4 // threads), "V_TURNS": -(-keys * dv4 // threads)},
        **{"SUBGROUPS": int(variant.subgroups), "STRETCH": max(1, STRETCH // keys) * keys, **own},
    }


def kept(variant: Variant, d4: int, dv4: int, of: str = "forward") -> int:
    """Numbers that a thread of `row` keeps: q and out; of dq dout too; k, v, dk and dv of dkv."""
    vectors = {"forward": d4 + dv4, "dq": 2 * d4 + dv4, "dkv": 2 * (d4 + dv4)}[of]
    return 4 * variant.rm * vectors // variant.lanes if variant.template == ROW else 0


def _legal(
    table: tuple[Variant, ...], dims: tuple[int, int], limits: Limits, of: str = "forward"
) -> list[Variant]:
    """The legal variants of a table, in its order, those last that would spill registers."""
    fitted = [each for v in table for each in _both(fitted_row(v, *dims, limits))]
    legal = [v for v in fitted if not why_illegal(v, *dims, limits)]
    return sorted(legal, key=lambda v: kept(v, *dims, of) > REGISTERS[limits.kind])


def variants(dims: tuple[int, int], limits: Limits, few_rows: int = 0) -> list[Variant]:
    """The legal variants for (d4, dv4), best first, of calls with so few rows per kv head if that is not 0.
    `row` with one lane fits every device and is among them."""
    legal = _legal((FEW_ROWS if few_rows else RANKING)[limits.kind], dims, limits)
    return sorted(legal, key=lambda v: (v.rows < few_rows, v.rows)) if few_rows else legal


def resolve(config: Config, dims: tuple[int, int], limits: Limits, few_rows: int = 0) -> Variant:
    """The variant of a config on a device; SpecError if it has none."""
    if config.variant:
        return _named(config.variant, dims, limits)
    legal = variants(dims, limits, few_rows)
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
    (rows, keys), asked = GRADIENTS[limits.kind], (config.variant, config.of_keys)
    of_dq = _named(asked[0], dims, room) if asked[0] else _legal(rows, dims, room, "dq")[0]
    return of_dq, _named(asked[1], dims, room) if asked[1] else _legal(keys, dims, room, "dkv")[0]


def splits(tiles: int, keys: int, groups: int) -> int:
    """Splits of calls of few rows, for about `groups` workgroups of so many tiles."""
    return max(1, min(MOST_SPLITS, -(-groups // max(1, tiles)), keys // LEAST_SPLIT))


def filling(tiles: int, keys: int, kind: str) -> int:
    """The same of a call of many rows: few, as each costs a pass over partial outputs."""
    return max(1, min(MOST_FILLING, GROUPS[kind] // max(1, tiles), keys // (LEAST_SPLIT // 2)))
