"""Tile sizes of the torch backend, and when a call is handed over to torch's own SDPA."""

from __future__ import annotations

from dataclasses import dataclass

from polyflash.errors import spec_error
from polyflash.spec import SMALL_ROWS, AttentionSpec, Feature, Phase
from polyflash.target import Target

_CPU_SCORES = 1 << 20  # elements of a score tile: 4 MB, and long enough to hide ~30 op calls
_DEVICE_SCORES = 1 << 25
_HANDOVER_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Config:
    """A score tile is (batch entries, num_q_heads, block_m, block_n): as many entries as fit `max_scores`
    elements, at least one. `sdpa`: plain calls with finite scores go to torch SDPA whole."""

    block_m: int
    block_n: int
    max_scores: int = _CPU_SCORES
    sdpa: bool = False

    def __post_init__(self) -> None:
        for name, value, top in (("block_m", self.block_m, 4096), ("block_n", self.block_n, 2048)):
            if not (4 <= value <= top and value & (value - 1) == 0):
                raise spec_error(
                    name, got=value, wanted=f"a power of two from 4 to {top}", change="Round it."
                )
        if self.max_scores < 1:
            raise spec_error(
                "max_scores", got=self.max_scores, wanted="1 or more", change="Count elements, not bytes."
            )

    def notes(self, spec: AttentionSpec) -> tuple[str, ...]:
        if self.sdpa:
            return (
                "handed over to torch SDPA: dense, or causal with as many rows as keys or one row, so equal"
                " by definition (tiled where lengths differ, a last dimension is strided, or a row could see"
                " a score that is infinite or NaN)",
            )
        return (f"tiled: {', '.join(sorted(f.value for f in spec.features)) or 'plain'}",)


def choose(spec: AttentionSpec, target: Target) -> Config:
    """Depends on no exact length, and with batch_invariant on none at all: a row's bits must not, either."""
    budget = _CPU_SCORES if target.kind == "cpu" else _DEVICE_SCORES
    if Feature.BATCH_INVARIANT in spec.features:
        return Config(32, 512, budget)
    per_row = budget // max(1, spec.num_q_heads)
    if spec.seqlen_q <= SMALL_ROWS:
        block_n = _power(per_row // SMALL_ROWS, 256, 2048)
        return Config(SMALL_ROWS, block_n, budget, sdpa=hands_over(spec, target))
    block_n = 512 if target.kind == "cpu" else 2048
    return Config(_power(per_row // block_n, 32, 512), block_n, budget, sdpa=hands_over(spec, target))


def candidates(spec: AttentionSpec, target: Target) -> tuple[Config, ...]:
    """Configs that a tuner may try."""
    first = choose(spec, target)
    if Feature.BATCH_INVARIANT in spec.features:
        return (first,)
    sizes = [(m, n) for m in (64, 128, 256) for n in (256, 512, 1024)]
    others = (Config(m, n, first.max_scores) for m, n in sizes)
    return tuple(dict.fromkeys((first, *others)))


def hands_over(spec: AttentionSpec, target: Target) -> bool:
    """Says whether the call is dense or causal, and free of every operand that torch SDPA reads
    differently."""
    return (
        target.kind == "cpu"  # the one kind of device on which equality was tested
        and spec.phase is Phase.FORWARD
        and spec.features <= {Feature.GQA, Feature.CAUSAL}
        and not spec.needs_grad
        and spec.dtype in _HANDOVER_DTYPES
        and (spec.scale is None or spec.scale > 0)
    )


def _power(n: int, low: int, high: int) -> int:
    """The largest power of two up to n, within [low, high]."""
    return min(high, max(low, 1 << max(0, n.bit_length() - 1)))
