"""How the Gluon engine is cut up, and which calls it is for. Pure arithmetic, no DSL.

Provenance of `FORWARD`: up to 192 channels what was quickest of this kernel on an H100, at 256 of a
prototype on an H200, in bfloat16 at 1k to 16k keys; `apart` on an H100 at 1k to 8k; of `SHORT_CAUSAL_64` and
`SHORT_64`: on an H100, at 1k, 2k and 4k; of `BACKWARD` and `BOUNDED_64`: of those that were tried on an H200.
`LEAST_KEYS`, `FEW_CAUSAL` and `LEAST_KEYS_OF` are from races with the Triton rows:
docs/results/2026-11-26-h100-gluon.md, docs/results/2026-11-25-h100-gluon.md,
docs/results/2026-11-24-h200-gluon.md; offsets per request from docs/results/2026-11-26-h100-groups.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polyflash.backends.gpu.configs import CHANGE, check, flag, option, varied
from polyflash.errors import spec_error
from polyflash.quant.scheme import Block, Codes, codes_of
from polyflash.spec import LONG_ROWS, MANY_KEYS, SMALL_ROWS, Feature, Phase
from polyflash.target import release

if TYPE_CHECKING:
    from polyflash.spec import AttentionSpec
    from polyflash.target import Target

CHECKED = ((3, 6),)  # Tritons whose Gluon compiles these kernels as recorded; it is no stable language
HEAD_DIMS = (64, 128, 192, 256)  # what is multiplied; a head dim between has the next, filled with 0
PARTS = {192: (128, 64)}  # boxes and products have powers of two
LEAST_CHANNELS = 8  # 16 bytes, of which TMA takes multiples
MOST_PADDING = 0.4  # of a box: at 80 of 128 channels still ahead of the Triton row, which takes two blocks
_F = Feature
BOUNDS = frozenset({_F.CAUSAL, _F.Q_OFFSET, _F.WINDOW, _F.KV_LENS, _F.KV_STARTS, _F.VARLEN})
CHANGES = frozenset({_F.SOFTCAP, _F.SINKS, _F.ALIBI})
ROWS = 64  # of a consumer
MOST_AHEAD = 128  # head dim with room for the rows of two tiles
# By channels of a box: below, it is behind the Triton row, or nobody has measured.
LEAST_KEYS = {64: 1024, 128: 1024, 192: 1024, 256: 1024}
FEW_CAUSAL = {64: (2048, 3)}  # under so many keys it takes so many tiles a core
# The same of features, for packed members by their mean; what is not here is behind, or was not timed.
LEAST_KEYS_OF: dict[tuple[Phase, int], dict[Feature, int]] = {
    (Phase.FORWARD, 64): {_F.ALIBI: 1024},
    (Phase.FORWARD, 128): {_F.WINDOW: 1024, _F.ALIBI: 1024, _F.SINKS: 1024, _F.VARLEN: 1024}
    | {_F.KV_LENS: 2048, _F.SOFTCAP: 4096, _F.Q_OFFSET: 32768},
    # sinks change nothing but lse
    (Phase.BACKWARD, 64): {_F.WINDOW: 1024, _F.SINKS: 0, _F.VARLEN: 2048, _F.KV_LENS: 4096}
    | {_F.SOFTCAP: 1024, _F.ALIBI: 1024},
    (Phase.BACKWARD, 128): {_F.WINDOW: 1024, _F.SINKS: 0, _F.VARLEN: 1024, _F.KV_LENS: 4096}
    | {_F.SOFTCAP: 1024, _F.ALIBI: 1024},
}
TIMED_CAUSAL = {_F.SOFTCAP, _F.ALIBI}  # of gradients, with a causal mask alone


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """consumers: warpgroups of 64 rows that share a tile, beside the warp that loads. block_n: keys of a
    block. num_stages: slots of K and of V. order: "counter" gives a program that has none left the next tile
    from a counter in memory, "zigzag" walks a fixed list from alternate ends, "tiles" starts a program for
    each. heads: so many heads' tiles are started side by side, see `side_by_side`. turns: consumers take
    turns to issue products, for which four leave no barriers.
    pinned: the rows' maxima, or all of the softmax, are complete before the product that runs beside it is
    waited for. late_sum and lazy_rescale as the Triton engine's. shared_out: the output leaves through the
    memory of Q. apart: tiles with marks are mended in a launch of its own. rows_ahead: Q of the next tile has
    memory of its own, so it comes while this one is multiplied."""

    consumers: int = option(2, 3, 4, switched=())
    block_n: int = option(64, 128, switched=())
    num_stages: int = option(2, 3, 4, default=2, switched=())
    order: str = option("counter", "zigzag", "tiles", default="counter", tuned=("counter", "zigzag", "tiles"))
    heads: int = option(1, 2, 4, 8, 32, default=4, tuned=(1, 4, 8))
    turns: bool = flag(True, tuned=(True, False), needs=lambda config, turns, *_: config.consumers < 4)
    pinned: str = option("", "maxima", "softmax", default="", tuned=("", "maxima", "softmax"))
    late_sum: bool = flag(True, tuned=(True, False))
    lazy_rescale: bool = flag(False, tuned=(True, False))
    shared_out: bool = flag(False)
    apart: bool = flag(False, tuned=(True, False))
    rows_ahead: bool = flag(
        False,
        tuned=(True, False),
        needs=lambda config, ahead, spec, _: spec.head_dim <= MOST_AHEAD and spec.phase is Phase.FORWARD,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.consumers == 4 and (self.turns or self.block_n > ROWS):
            wanted = "block_n 64 and no turns with 4, whose registers and barriers do not suffice otherwise"
            raise spec_error("consumers", got=4, wanted=wanted, change=CHANGE)

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return ROWS * self.consumers

    @property
    def num_warps(self) -> int:
        """Warps that work, the one that loads among them."""
        return 4 * self.consumers + 1

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        how = {
            "counter": "the longest tiles first, the next one by a counter in memory",
            "zigzag": "programs walk a fixed list of tiles from alternate ends",
            "tiles": "a program per tile",
        }[self.order]
        copies = "operands are copied first whose strides TMA does not take, and q where scale <= 0"
        lazy = ("sums are scaled only when the maximum has grown by 2^8",) if self.lazy_rescale else ()
        either = FORWARD[64, False], SHORT_64
        tiles = " or ".join(f"{_tiles(c, spec)} tiles of {c.block_m} rows" for c in either)
        sizes = (f"the quicker by rounds of all cores: {tiles}",) if by_sizes(spec) and self in either else ()
        return *sizes, how, *lazy, copies


# (channels of a box, causal) -> config
FORWARD: dict[tuple[int, bool], ForwardConfig] = {
    (64, False): ForwardConfig(3, 128, 3, pinned="maxima", lazy_rescale=True, apart=True),
    (64, True): ForwardConfig(3, 128, 3, turns=False, pinned="maxima", lazy_rescale=True, apart=True),
    (128, False): ForwardConfig(2, 128, order="zigzag", heads=8, pinned="maxima"),
    (128, True): ForwardConfig(2, 128, heads=8, late_sum=False, lazy_rescale=True),
    (192, False): ForwardConfig(
        2, 64, 3, order="zigzag", heads=8, lazy_rescale=True, shared_out=True, apart=True
    ),
    (192, True): ForwardConfig(2, 64, 3, heads=8, pinned="maxima", lazy_rescale=True, shared_out=True),
    (256, False): ForwardConfig(2, 64, heads=8, lazy_rescale=True, pinned="softmax", shared_out=True),
    (256, True): ForwardConfig(2, 64, heads=8, lazy_rescale=True, pinned="softmax", shared_out=True),
}


# Four consumers have registers for blocks of 64 keys; their tiles of 256 rows are as many as 1,024 rows fill.
_FOUR: dict[str, Any] = {
    "consumers": 4,
    "block_n": 64,
    "num_stages": 4,
    "turns": False,
    "apart": False,
    "rows_ahead": True,
}
SHORT_CAUSAL_64 = replace(FORWARD[64, True], heads=32, **_FOUR)  # of fewer rows than LONG_ROWS
SHORT_64 = replace(FORWARD[64, False], **_FOUR)  # where that takes less time
COST_OF_FOUR = 1.1  # of a row, where all cores are busy, for 1 of three consumers
BOUNDED_64 = ForwardConfig(2, 128, apart=True)  # where registers of three consumers do not suffice


@dataclass(frozen=True, slots=True)
class Fp8Config(ForwardConfig):
    """level: so many blocks are added up in tensor cores, before their sums are in float32; 0: all."""

    level: int = option(0, 1, 4, 8, 16, default=8, tuned=(4, 8, 16))

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        keys = self.level * self.block_n
        sums = f"of {keys} keys in tensor cores, then in float32" if keys else "in tensor cores"
        return "q, a scale per row, and the weights are rounded to e4m3", f"sums {sums}"


FP8 = {
    128: Fp8Config(2, 64, order="zigzag", heads=8, level=1),
    192: Fp8Config(2, 64, order="zigzag", heads=8, lazy_rescale=True, level=8),
    256: Fp8Config(2, 64, order="zigzag", heads=8, lazy_rescale=True, level=8),
}


def choose_fp8(spec: AttentionSpec, target: Target) -> Fp8Config:
    """The table's; tiles that differ in length come from the counter."""
    config = FP8[box_of(spec.head_dim)]
    differ = spec.causal or not spec.features.isdisjoint({_F.WINDOW, _F.KV_LENS, _F.KV_STARTS})
    stages = 3 if config.level == 1 else 2  # as many as fit
    return replace(config, order="counter", num_stages=stages) if differ else config


def refuses_fp8(spec: AttentionSpec, target: Target) -> str:
    """Why products of 8 bits are not for a call of listed features; "" if they are."""
    form = Codes("fp8_e4m3", Block(), None, "fp8")
    if not spec.codes or codes_of(spec.codes) != (form, form):
        return f"codes: has {form}, asked for {spec.codes or 'none'}"
    if spec.phase is not Phase.FORWARD:
        return "few rows leave a tile of 128 empty"
    if box_of(spec.head_dim) not in FP8 or spec.head_dim % (2 * LEAST_CHANNELS):
        known = ", ".join(map(str, FP8))
        return f"head_dim: has multiples of 16 of blocks of {known}, asked for {spec.head_dim}"
    return refuses(spec, target)


def box_of(head_dim: int) -> int:
    """Channels of the box that holds so many."""
    return next((d for d in HEAD_DIMS if head_dim <= d), HEAD_DIMS[-1])


def parts_of(head_dim: int) -> tuple[int, ...]:
    """The box, or the two boxes that it is made of."""
    box = box_of(head_dim)
    return PARTS.get(box, (box,))


def choose_forward(spec: AttentionSpec, target: Target) -> ForwardConfig:
    """The table's, or four consumers instead where they take less time: cores make tiles in rounds, and the
    last one may be of few."""
    config, cores = _of_table(spec), max(1, target.cores)
    three, four = (-(-_tiles(c, spec) // cores) * c.block_m for c in (config, SHORT_64))
    return SHORT_64 if by_sizes(spec) and COST_OF_FOUR * four < three else config


def by_sizes(spec: AttentionSpec) -> bool:
    """Is it a call without a mask for which batch and rows decide between three and four consumers?"""
    return box_of(spec.head_dim) == 64 and not (spec.causal or _special(spec) or spec.seqlen_q >= LONG_ROWS)


def _tiles(config: ForwardConfig, spec: AttentionSpec) -> int:
    return spec.batch * spec.num_q_heads * -(-spec.seqlen_q // config.block_m)


def _of_table(spec: AttentionSpec) -> ForwardConfig:
    """By the box that holds the head dim; what needs as many registers is as a causal mask. Tiles of requests
    that have lengths of their own come from the counter."""
    box, like_causal = box_of(spec.head_dim), {_F.WINDOW, _F.KV_STARTS, _F.ALIBI}
    like_causal |= {_F.VARLEN} if box == 64 else set()
    config = FORWARD[box, spec.causal or not spec.features.isdisjoint(like_causal)]
    if box == 64 and not spec.features.isdisjoint(like_causal | {_F.SOFTCAP}):
        config = BOUNDED_64
    elif box == 64 and spec.causal and spec.seqlen_q < LONG_ROWS and not _special(spec):
        config = SHORT_CAUSAL_64
    counted = not spec.features.isdisjoint({_F.KV_LENS, _F.VARLEN}) and config.order == "zigzag"
    return replace(config, order="counter") if counted else config


def side_by_side(config: ForwardConfig, keys: int) -> int:
    """Heads whose tiles are started side by side. Of many the keys have to stay in the L2 cache, so there are
    as many up to 1,024 keys, and fewer of more."""
    if config.heads <= 8 or keys <= 1024:
        return config.heads
    return 1 << max(3, ((config.heads << 10) // keys).bit_length() - 1)


def refuses(spec: AttentionSpec, target: Target) -> str:
    """Why a call of listed features is not for these kernels; "" if it is."""
    version = dict(target.packages).get("triton", "")
    if version and release(version) not in CHECKED:
        known = ", ".join(".".join(map(str, v)) for v in CHECKED)
        return f"packages: Gluon of triton {version} is not checked, that of {known} is"
    if spec.head_dim % LEAST_CHANNELS:
        return f"head_dim: has multiples of {LEAST_CHANNELS}, asked for {spec.head_dim}"
    return ""


def leaves(spec: AttentionSpec, target: Target) -> str:
    """Why a call is left to other rows unless gluon is asked for by name; "" if it is not. Of lengths it
    knows what a route knows."""
    return _no_work(spec) or _too_padded(spec) or _behind(spec)


def _no_work(spec: AttentionSpec) -> str:
    if spec.seqlen_q > 2 * SMALL_ROWS and spec.seqlen_k >= MANY_KEYS:
        return ""
    few = f"up to {2 * SMALL_ROWS} rows, or fewer than {MANY_KEYS} keys"
    return f"{few}, are no work for whole warpgroups"


def _special(spec: AttentionSpec) -> frozenset[Feature]:
    """Features, beside causal order, whose calls differ enough to be timed by themselves."""
    moved = {Feature.Q_OFFSET} if spec.offset is None else set()
    return spec.features & ((BOUNDS - {Feature.CAUSAL, Feature.Q_OFFSET}) | CHANGES | moved)


def _behind(spec: AttentionSpec) -> str:
    ahead = set(LEAST_KEYS_OF.get((spec.phase, box_of(spec.head_dim)), {}))
    if spec.phase is Phase.BACKWARD and not spec.causal:
        ahead -= TIMED_CAUSAL
    behind = sorted(f.value for f in _special(spec) - ahead)
    return f"{', '.join(behind)}: not known to be quicker on Hopper" if behind else ""


def _too_few_keys(spec: AttentionSpec, seqlen_k: int, otherwise: int) -> str:
    ahead = LEAST_KEYS_OF.get((spec.phase, box_of(spec.head_dim)), {})
    least = max((ahead.get(f, 0) for f in _special(spec)), default=otherwise)
    if seqlen_k >= least:
        return ""
    return f"under {least} keys of head_dim {spec.head_dim} it is not known to be quicker on Hopper"


def _too_padded(spec: AttentionSpec) -> str:
    box = box_of(spec.head_dim)
    if spec.head_dim < HEAD_DIMS[0] or 1.0 - spec.head_dim / box > MOST_PADDING:
        return f"head_dim {spec.head_dim} costs as much as {box}: not known to be quicker on Hopper"
    return ""


def leaves_sizes(spec: AttentionSpec, target: Target, sizes: tuple[int, int, int]) -> str:
    """Why a call of this batch, seqlen_q and seqlen_k is left; "" if it fills the device with this kernel."""
    batch, seqlen_q, seqlen_k = sizes
    box = box_of(spec.head_dim)
    if few := _too_few_keys(spec, seqlen_k, LEAST_KEYS[box]):
        return few
    rows = _of_table(replace(spec, seqlen_q=seqlen_q)).block_m
    tiles = batch * spec.num_q_heads * -(-seqlen_q // rows)
    keys, share = FEW_CAUSAL.get(box, (0, 1)) if spec.causal else (0, 1)
    if tiles < target.cores * (share if seqlen_k < keys else 1):
        return f"{tiles} tiles of {rows} rows leave some of {target.cores} cores idle"
    return ""


def has_table(spec: AttentionSpec, target: Target) -> bool:
    """Was its like timed?"""
    return spec.head_dim in HEAD_DIMS and not _behind(spec)


def candidates(spec: AttentionSpec, target: Target) -> tuple[Any, ...]:
    """Configs worth timing for `spec`, the chosen one first."""
    chosen = CHOOSE[spec.phase](spec, target)
    return (chosen, *varied(chosen, spec, target, "tuned"))


def switches(spec: AttentionSpec, target: Target) -> tuple[Any, ...]:
    """The chosen config with one named technique changed at a time: what `ablate` measures."""
    return tuple(varied(CHOOSE[spec.phase](spec, target), spec, target, "switched"))


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """num_stages: slots of Q and of dO. ahead: scores and dp of the next block of rows are made beside dk and
    dv of this one. ordered: programs add to dq in the order of their keys; else as they come, and its bits
    vary. turns: MiB of rows whose heads take turns in starting programs."""

    num_stages: int = option(2, 3, default=2, switched=())
    ahead: bool = flag(False, tuned=(True, False))
    ordered: bool = flag(True)
    turns: int = option(0, 8, 16, 32, 64, default=32, switched=(), tuned=(0, 8, 16, 32, 64))

    def __post_init__(self) -> None:
        check(self)

    block_m = ROWS  # rows of a block, keys of a program, and its warps
    block_n = 2 * ROWS
    num_warps = 11

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Notes of a plan about this choice, beside its numbers."""
        if self.ordered:
            return ("programs add to dq in the order of their keys: its bits repeat",)
        return ("programs add to dq as they come: its bits vary from call to call",)


# (head dim, causal) -> config
BACKWARD = {
    (64, False): BackwardConfig(num_stages=3, ahead=True, turns=16),
    (64, True): BackwardConfig(num_stages=3, ahead=True, turns=64),
    (128, False): BackwardConfig(turns=32),
    (128, True): BackwardConfig(turns=64),
}
MOST_BACKWARD = 128  # head dim
# By box, tiles of keys for each core; else 1. Of 132 cores 64 to 128 tiles of 32/8 heads took 0.57 to 0.73 of
# the Triton row's time without a mask, and 0.64 to 0.98 with a causal one.
LEAST_TILES = {128: 0.5}


def choose_backward(spec: AttentionSpec, target: Target) -> BackwardConfig:
    """The table's, by the box that holds the head dim."""
    bounded = spec.causal or Feature.WINDOW in spec.features
    return BACKWARD[min(box_of(spec.head_dim), MOST_BACKWARD), bounded]


def turns(rows: int, channels: int, config: BackwardConfig) -> int:
    """Key/value heads that take turns in starting programs, as many as the L2 cache holds the Q, dO and
    float32 dq of, each of so many rows."""
    return max(1, (config.turns << 20) // (rows * channels * 8))


def leaves_backward(spec: AttentionSpec, target: Target) -> str:
    """Why gradients are left to other rows unless gluon is asked for by name; "" if they are not."""
    return _no_work(spec) or _too_padded(spec) or _behind(spec)


def leaves_backward_sizes(spec: AttentionSpec, target: Target, sizes: tuple[int, int, int]) -> str:
    """Why gradients of this batch, seqlen_q and seqlen_k are left; "" if they fill the device."""
    batch, _, seqlen_k = sizes
    if few := _too_few_keys(spec, seqlen_k, 0):
        return few
    keys = BackwardConfig.block_n
    tiles = batch * spec.num_kv_heads * -(-seqlen_k // keys)
    share = LEAST_TILES.get(box_of(spec.head_dim), 1.0)
    if tiles < share * target.cores:
        return f"{tiles} tiles of {keys} keys leave too many of {target.cores} cores idle"
    return ""


CHOOSE = {Phase.FORWARD: choose_forward, Phase.BACKWARD: choose_backward}
