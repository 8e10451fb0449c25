"""Tiles of the Triton engine per architecture: data, read by configs.py.

Provenance. "compiled": Triton 3.6.0 made the forward kernel of this engine for that tile offline without a
spill, bfloat16, causal (heavy: with a bool mask); registers in brackets, those of the heavy tile behind a
comma, "-" where that was not compiled. "model": chosen by shared memory and accumulator size, and by
neighbours that were compiled. "H200": the fastest of a sweep of ten tiles there, bfloat16,
causal and full, 1k to 16k (2026-11-20, Triton 3.6.0), with descriptor loads. **No other entry has been
timed**: what is measured goes to the tuned file of a device (docs/tuning.md), and from there into this table.
The entries of hopper for head dims 64, 128 and 256 are of later sweeps there (2026-11-21).

Forward products with int8 codes of K take the plain tiles too, but for those of `LONG`: compiled without a
spill for every architecture here, bfloat16 at 64 and 128, causal with a mean [190 on sm_90]. No others
were timed.
"""

from __future__ import annotations

from typing import NamedTuple

from polyflash.spec import LONG_ROWS, LONGEST_ROWS

KIB = 1024
CLASSES = (32, 64, 128, 192, 256, 576)  # head dims up to; 96 and 80 share tiles with 128


class Tile(NamedTuple):
    """Rows and keys of a score tile, warps of a program, stages of the K/V pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Arch(NamedTuple):
    """A family of devices that share tiles, and the shared memory of one program."""

    family: str
    shared_bytes: int


class Tiles(NamedTuple):
    """Tiles of plain problems, and of those that read or make a plane of elements beside the scores (mask,
    bias, segments, dropout), which needs registers."""

    plain: Tile
    heavy: Tile


class LongTile(NamedTuple):
    """The tile of calls of `rows` query rows and more."""

    rows: int
    tile: Tile


class Held(NamedTuple):
    """Head-dim classes of which plain problems keep Q in registers."""

    whole: frozenset[int]  # where every row sees every key
    hiding: frozenset[int]  # where some does not


ARCHS = {
    "sm80": Arch("ampere", 163 * KIB),
    "sm86": Arch("ada", 99 * KIB),
    "sm89": Arch("ada", 99 * KIB),
    "sm90": Arch("hopper", 227 * KIB),
    "sm100": Arch("blackwell", 227 * KIB),
    "sm120": Arch("geforce", 99 * KIB),
    "gfx90a": Arch("cdna", 64 * KIB),
    "gfx942": Arch("cdna", 64 * KIB),
    "gfx950": Arch("cdna4", 160 * KIB),
    "gfx1100": Arch("rdna3", 64 * KIB),
    "gfx1201": Arch("rdna4", 64 * KIB),
}

# (family, bytes of an element) whose forward loads K and V by tensor descriptor: on an H200 6 to 16 % ahead
# of pointers. In float32 the kernel spills with it.
DESCRIBED = frozenset({("hopper", 2)})
# (family, bytes of an element) -> head-dim class -> tiles of the forward kernel
FORWARD: dict[tuple[str, int], dict[int, Tiles]] = {
    ("ampere", 2): {
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2)),  # compiled [253, -]
        64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),  # compiled [183, 245]; 4 warps spill 64 B
        128: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),  # compiled [182, 203]; 64 keys spill 756 B
        192: Tiles(Tile(64, 16, 8, 2), Tile(32, 32, 8, 2)),  # compiled [243, -]; 32 keys spill 432 B
        256: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),  # compiled [254, -]
        576: Tiles(Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),  # compiled [255, -]
    },
    ("ada", 2): {
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2)),  # model
        64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),  # compiled [183, -]; 4 warps spill 72 B
        128: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),  # compiled [182, -]
        192: Tiles(Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),  # compiled [183, -]
        256: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),  # compiled [251, -]
        576: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),  # compiled [168, -]
    },
    ("hopper", 2): {
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2)),  # model
        64: Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 2)),  # H200
        128: Tiles(Tile(64, 64, 4, 3), Tile(128, 32, 8, 2)),  # H200
        192: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),  # compiled [226, -]; 64 keys spill 220 B
        256: Tiles(Tile(64, 32, 4, 3), Tile(64, 32, 8, 2)),  # H200
        576: Tiles(Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),  # compiled [255, -]; 64x32 spills 1668 B
    },
    ("blackwell", 2): {
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2)),  # model
        64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),  # compiled [181, -]
        128: Tiles(Tile(128, 64, 8, 3), Tile(128, 32, 8, 2)),  # compiled [236, -]
        192: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),  # compiled [194, -]
        256: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),  # model
        576: Tiles(Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),  # model
    },
    ("geforce", 2): {
        32: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2)),  # model
        64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),  # compiled [187, -]; 4 warps spill 264 B
        128: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),  # compiled [186, -]
        192: Tiles(Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),  # model
        256: Tiles(Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),  # model; 64 rows spill 104 B
        576: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),  # model
    },
    # More than one stage only raises registers on CDNA.
    ("cdna", 2): {
        32: Tiles(Tile(128, 64, 4, 1), Tile(128, 64, 8, 1)),  # compiled [198, -]
        64: Tiles(Tile(128, 64, 8, 1), Tile(128, 32, 8, 1)),  # compiled [173, 139]; 4 warps need 326
        128: Tiles(Tile(128, 32, 8, 1), Tile(64, 32, 8, 1)),  # compiled [185, -]; 64 keys spill 47 registers
        192: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),  # compiled [207, -]
        256: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),  # compiled [227, -]
        576: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),  # compiled [228, -]; 32 keys spill 191 registers
    },
    ("cdna4", 2): {
        32: Tiles(Tile(128, 64, 4, 1), Tile(128, 64, 8, 1)),  # model
        64: Tiles(Tile(128, 64, 8, 1), Tile(128, 32, 8, 1)),  # compiled [175, -]
        128: Tiles(Tile(128, 32, 8, 1), Tile(64, 32, 8, 1)),  # compiled [193, -]; 64 keys spill 15 registers
        192: Tiles(Tile(128, 32, 8, 1), Tile(64, 32, 8, 1)),  # compiled [245, -]
        256: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),  # compiled [223, -]
        576: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),  # compiled [218, -]
    },
    # One stage, and at most 16 rows per wave from head dim 128 on.
    ("rdna3", 2): {
        32: Tiles(Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),  # compiled [225, -]
        64: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 8, 1)),  # compiled [243, -]; 64 keys spill 149 registers
        128: Tiles(Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),  # compiled [223, -]; 64 rows spill 59
        192: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),  # compiled [244, -]
        256: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),  # compiled [240, -]
        576: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),  # spills 339 registers: the least that was found
    },
    ("rdna4", 2): {
        32: Tiles(Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),  # compiled [207, -]
        64: Tiles(Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),  # compiled [237, -]
        128: Tiles(Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),  # compiled [168, -]; 64 rows spill 8
        192: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),  # compiled [182, -]
        256: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),  # compiled [207, -]
        576: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),  # model
    },
}

# (family, bytes of an element) -> (head-dim class, is a key hidden) -> tile of plain problems of so many rows
# and more, which run a device into its power limit: what moves less is then quicker, most so with many heads.
# H200, 128 rows against 64: whole ones 5 % behind to 2 % ahead at 4k, 1 % behind to 7 % ahead at 8k and 16k;
# causal ones 6 % behind to 1 % ahead at 4k, 6 % behind to 7 % ahead at 8k and 16k.
LONG: dict[tuple[str, int], dict[tuple[int, bool], LongTile]] = {
    ("hopper", 2): {  # H200
        (128, False): LongTile(LONG_ROWS, Tile(128, 64, 4, 2)),
        (128, True): LongTile(LONGEST_ROWS, Tile(128, 64, 4, 2)),
    },
}

# ((family, bytes of an element of q), head-dim class, is a key hidden) -> tile of plain products with e4m3
# codes of K and V, and the most registers of a thread; others have that of 16 bits. H100 (2026-11-26), 8k
# keys: at 64 618 TFLOP/s, of blocks of 64 keys 535; at 128 765, with all registers 687.
EIGHTS: dict[tuple[tuple[str, int], int, bool], tuple[Tile, int]] = {
    (("hopper", 2), 64, False): (Tile(64, 128, 4, 2), 0),
    (("hopper", 2), 128, False): (Tile(64, 64, 4, 3), 168),  # spills 96 B
    (("hopper", 2), 256, False): (Tile(64, 64, 4, 2), 0),  # spills 160 B
    (("hopper", 2), 256, True): (Tile(64, 32, 4, 3), 0),  # spills 16 B, 64 keys 2768
    (("blackwell", 2), 256, True): (Tile(64, 64, 8, 2), 0),  # compiled [225]; 128 rows spill 1076 B
    (("blackwell", 2), 256, False): (Tile(64, 64, 8, 2), 0),
}

# (family, bytes of an element) -> head-dim classes whose plain problems scale older sums lazily and add up
# rows late. H200, both against neither: 9 to 17 % ahead at head dim 256 (lazy scaling alone 4 to 11 %), 4 %
# behind to 10 % ahead at 128 (median 2 %), up to 3 % ahead at 64.
DEFERRED: dict[tuple[str, int], frozenset[int]] = {("hopper", 2): frozenset({64, 128, 256})}

# (family, bytes of an element) -> what is held, but for tiles of `LONG`. H200: Q out of shared memory takes
# as much of its rate as the keys do. Held rows are up to 15 % ahead at 64 and 256, up to 8 % at 128, but
# there 1 to 2 % behind with code that hides keys.
HELD: dict[tuple[str, int], Held] = {
    ("hopper", 2): Held(whole=frozenset({64, 128, 256}), hiding=frozenset({64, 256})),
}

# head-dim class -> the Tritons that hold it: the ptxas of 3.9 serialises such products at 64 (C7513).
HELD_BY: dict[int, tuple[str, ...]] = {64: ("3.6",)}

# family -> how it multiplies float32, exactly: IEEE multiply-adds where nothing is said. Six bfloat16
# products of three parts leave out less than those round, and run on matrix units: 3 to 10 times the rate on
# an H200, where three TF32 products ("tf32x3") had 0.4 to 1.0 of theirs.
EXACT: dict[str, str] = {"hopper": "bf16x6"}
EXACT_DIMS = 256  # head dims up to: beyond, parts of Q alone fill the registers
# head dims above this add outputs of blocks without keeping what float32 loses, where that is EXACT: a
# second accumulator spills. H200: 71 TFLOP/s against 51 (head dim 128).
UNCOMPENSATED = 64

# As IEEE float32: on NVIDIA and RDNA without matrix instructions. Model unless said.
_CUDA_FLOAT32 = {
    32: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
    64: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),  # compiled [108]; 4 warps spill 1028 B
    128: Tiles(Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),  # compiled [220]; 4 warps spill 920 B
    192: Tiles(Tile(32, 32, 8, 1), Tile(32, 16, 8, 1)),
    256: Tiles(Tile(32, 32, 8, 1), Tile(32, 16, 8, 1)),
    576: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
_ROOMY_FLOAT32 = {
    **_CUDA_FLOAT32,
    192: Tiles(Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    256: Tiles(Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    576: Tiles(Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
}
_HOPPER_FLOAT32 = {  # by matrix units, see EXACT
    **_ROOMY_FLOAT32,
    32: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),  # model
    64: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),  # H200
    128: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),  # H200
}
_CDNA_FLOAT32 = {
    **_CUDA_FLOAT32,
    32: Tiles(Tile(64, 32, 4, 1), Tile(64, 32, 8, 1)),
    64: Tiles(Tile(64, 32, 4, 1), Tile(64, 32, 8, 1)),
    128: Tiles(Tile(64, 32, 8, 1), Tile(64, 16, 8, 1)),
}
_RDNA_FLOAT32 = {
    32: Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 4, 1)),
    64: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),  # compiled [256]; 32 keys spill 72 registers
    128: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),  # compiled [256]; 32 keys spill 199
    192: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    256: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    576: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
FORWARD.update({(f, 4): _CUDA_FLOAT32 for f in ("ampere", "ada", "geforce")})
FORWARD.update({("hopper", 4): _HOPPER_FLOAT32, ("blackwell", 4): _ROOMY_FLOAT32})
FORWARD.update({("cdna", 4): _CDNA_FLOAT32, ("cdna4", 4): _CDNA_FLOAT32})
FORWARD.update({("rdna3", 4): _RDNA_FLOAT32, ("rdna4", 4): _RDNA_FLOAT32})


class BackwardPair(NamedTuple):
    """Tiles of the dK/dV kernel (a program owns block_n keys) and of the dQ kernel (it owns block_m rows).
    With a plane of elements beside the scores both have at least so many warps, and walk so much at most."""

    dkv: Tile
    dq: Tile
    heavy_warps: int = 8
    heavy_walk: int = 256
    apart: int = 0  # dK and dV in a pass each


_ROOMY_BACKWARD = {  # model, but for what hopper says below
    32: BackwardPair(Tile(64, 128, 4, 2), Tile(128, 64, 4, 2)),
    64: BackwardPair(Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    128: BackwardPair(Tile(32, 128, 8, 2), Tile(128, 32, 8, 2)),
    192: BackwardPair(Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    256: BackwardPair(Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
    576: BackwardPair(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
_TIGHT_BACKWARD = {  # model: 99 KiB of shared memory
    32: BackwardPair(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    64: BackwardPair(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: BackwardPair(Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    192: BackwardPair(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: BackwardPair(Tile(16, 32, 8, 1), Tile(32, 32, 8, 1)),
    576: BackwardPair(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
_AMPERE_BACKWARD = {
    32: BackwardPair(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),  # compiled [217; dQ 168]
    64: BackwardPair(Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),  # compiled [239; -]; 64 rows spill 76 B
    128: BackwardPair(Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)),  # compiled [214; -]; 32 x 128 spill 2776 B
    192: BackwardPair(Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),  # compiled [183; dQ 163]; 64 keys spill 15 kB
    256: BackwardPair(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),  # compiled [183; dQ 190]
    576: BackwardPair(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),  # model
}
_HOPPER_BACKWARD = {
    **_ROOMY_BACKWARD,
    32: BackwardPair(Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),  # compiled [231; dQ 165]
    # H200: two or three programs of 4 warps per core, 15 to 25 % ahead of one of 8 warps and twice the tile;
    # with dropout 4 to 10 %, with a mask level for dK/dV and 14 % for dQ
    64: BackwardPair(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), heavy_warps=4),
    128: BackwardPair(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), heavy_warps=4),
    256: BackwardPair(Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),  # model
}
_AMD_BACKWARD = {  # model: one stage, 64 KiB
    32: BackwardPair(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    64: BackwardPair(Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
    128: BackwardPair(Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
    192: BackwardPair(Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)),
    256: BackwardPair(Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)),
    576: BackwardPair(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
_LEAST_BACKWARD = {  # model: RDNA, and float32 by multiply-adds
    32: BackwardPair(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    64: BackwardPair(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: BackwardPair(Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)),
    192: BackwardPair(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    256: BackwardPair(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    576: BackwardPair(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
_HOPPER_FLOAT32_BACKWARD = {  # in parts, of which shared memory holds six bytes a value
    **_LEAST_BACKWARD,
    32: BackwardPair(Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), heavy_walk=32),  # model
    64: BackwardPair(Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), heavy_walk=32),  # compiled [255; dQ 174]
    128: BackwardPair(Tile(32, 64, 4, 2), Tile(64, 32, 4, 2), heavy_warps=4, apart=2),  # [250; dQ 246]
    192: BackwardPair(Tile(16, 32, 8, 2), Tile(32, 16, 8, 2), apart=1),  # compiled; dK and dQ spill 24 B
}
BACKWARD: dict[tuple[str, int], dict[int, BackwardPair]] = {
    ("ampere", 2): _AMPERE_BACKWARD,
    ("ada", 2): _TIGHT_BACKWARD,
    ("hopper", 2): _HOPPER_BACKWARD,
    ("blackwell", 2): _ROOMY_BACKWARD,
    ("geforce", 2): _TIGHT_BACKWARD,
    ("cdna", 2): _AMD_BACKWARD,
    ("cdna4", 2): _AMD_BACKWARD,
    ("rdna3", 2): _LEAST_BACKWARD,
    ("rdna4", 2): _LEAST_BACKWARD,
    **{(arch.family, 4): _LEAST_BACKWARD for arch in ARCHS.values()},
    ("hopper", 4): _HOPPER_FLOAT32_BACKWARD,
}


def _of_classes(*tiles: tuple[int, int, int]) -> dict[int, tuple[int, int, int]]:
    return dict(zip(CLASSES, tiles, strict=True))


# vendor -> head-dim class -> (keys of a block, warps, stages) of the decode kernel: all model. Its rows are
# few, so blocks are as long as the pipeline has room for: reading at full rate needs bytes in flight.
DECODE: dict[tuple[str, int], dict[int, tuple[int, int, int]]] = {
    ("cuda", 2): _of_classes((128, 4, 3), (128, 4, 3), (64, 4, 3), (64, 4, 2), (32, 4, 2), (16, 8, 2)),
    ("hip", 2): _of_classes((64, 4, 1), (64, 4, 1), (64, 4, 1), (32, 4, 1), (32, 4, 1), (16, 8, 1)),
    ("cuda", 4): _of_classes((64, 4, 2), (64, 4, 2), (32, 4, 2), (32, 4, 2), (16, 4, 2), (16, 8, 2)),
    ("hip", 4): _of_classes((64, 4, 1), (32, 4, 1), (32, 4, 1), (16, 4, 1), (16, 4, 1), (16, 8, 1)),
}
# head-dim class -> likewise where float32 is EXACT by matrix units. H200: 2525 GB/s, of 32 keys 2022.
EXACT_DECODE = {128: (64, 4, 2)}
# What has scales, keys or channels, and rows of a tile, 1 for all tiles of one query row (there nibbles are
# codes of 4 bits) -> head dims up to -> likewise over codes, and registers, on NVIDIA. 4 rows of int4 took
# 0.57 of the time with 2 warps that they took with 4, and 0.83 with registers for six programs per core of
# that with those for four (H100, head_dim 128). Other head dims and numbers of rows, on an H200:
# docs/results/2026-11-30-h200-rows-of-codes.md, ...-h200-codes-of-other-dims.md.
CODED: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "keys1": {128: (128, 4, 3, 0), 256: (64, 4, 3, 0)},
    "keys8": {128: (64, 2, 3, 0), 256: (64, 4, 3, 0)},
    "keys16": {128: (64, 2, 3, 0), 256: (64, 4, 3, 0)},
    "keys32": {128: (128, 4, 3, 0)},
    "channels1": {64: (64, 1, 2, 0), 128: (64, 2, 2, 168), 256: (64, 4, 3, 0)},
    "channels8": {64: (64, 1, 3, 0), 128: (64, 2, 3, 0), 256: (64, 4, 3, 0)},
    "channels16": {64: (64, 1, 2, 0), 128: (64, 2, 2, 0), 256: (64, 4, 2, 0)},
    "nibbles1": {96: (64, 1, 2, 0), 256: (64, 2, 3, 168)},
    "float32 keys": {256: (64, 4, 3, 0)},  # these products are in three parts; not timed
    "float32 channels": {256: (32, 4, 2, 0)},
}
CODED_AMD = (64, 4, 1, 0)
# likewise -> keys of a block, warps, stages on NVIDIA of launches whose programs, at most so many per core
# (the last), have at most so many blocks each: the time of one short request is that of its blocks one behind
# the other. H100, head_dim 128, 1k keys: 0.88 to 0.97 of the time that the tiles above had; turned int8, 1 to
# 4 requests of 1k to 8k keys: 0.92 to 0.97.
CODED_SHORT: dict[str, tuple[int, int, int, int, int]] = {
    "keys1": (64, 4, 3, 1, 1),
    "channels1": (64, 4, 2, 4, 2),
    "channels8": (64, 4, 2, 4, 2),
    "nibbles1": (64, 4, 2, 1, 1),
}


class ManyKeys(NamedTuple):
    """Launches over codes that have at least so many walks, or keys of all walks, per core."""

    num_warps: int
    num_stages: int
    split_keys: int
    max_registers: int
    programs: float  # per core
    walks: float
    keys: float = float("inf")


# chip, codes, whether channels have scales -> of head_dim 128, up to 4 rows. A program of one warp waits for
# no other; eight of a core are held, and of 132 cores 1,024 programs, as batches are powers of two. H200:
# docs/results/2026-11-30-h200-int4-one-warp.md, ...-h200-long-splits.md
CODED_LONG: dict[tuple[str, str, bool], ManyKeys] = {
    ("sm90", "int4", True): ManyKeys(1, 2, 4096, 0, 7.76, walks=3, keys=12288),
    ("sm90", "mxfp4", True): ManyKeys(2, 3, 1024, 168, 4, walks=3, keys=12288),
    ("sm90", "int8", True): ManyKeys(2, 3, 1024, 168, 4, walks=7, keys=12288),
    ("sm90", "int8", False): ManyKeys(4, 3, 1024, 0, 1, walks=3),
}
# Likewise: programs per core that few walks are cut into, as unpacking takes turns with waiting. H100: int8
# against 64k keys had 0.81 of the time with 1 that it had with 3, int4 0.89 to 1.01 with 4 of that with 6
CODED_PROGRAMS = {False: 1, True: 4}
# What fits anything, largest first, where an architecture has no table: (tile, head dims up to).
SAFE = (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))
SAFE_SHARED_BYTES = 48 * KIB  # what every GPU of the last ten years gives a program
