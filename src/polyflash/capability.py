"""One row of the table of kernels: what it runs, where, and why it would refuse a spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from polyflash.spec import AttentionSpec, Feature, Phase
from polyflash.target import Target, remedy

# What a kernel has unless its capability takes it away. A new feature does not belong here: every kernel
# refuses it until its capability adds it.
USUAL_FEATURES = frozenset(
    {
        *(Feature.CAUSAL, Feature.WINDOW, Feature.Q_OFFSET, Feature.KV_LENS, Feature.KV_STARTS),
        *(Feature.MASK, Feature.BIAS, Feature.ALIBI, Feature.SOFTCAP, Feature.SINKS, Feature.SEGMENTS),
        *(Feature.INTERVALS, Feature.VARLEN, Feature.PAGED, Feature.ROW_BOUNDS, Feature.DROPOUT),
        *(Feature.GQA, Feature.HEAD_DIM_V, Feature.LSE, Feature.BATCH_INVARIANT),
    }
)


@dataclass(frozen=True, slots=True)
class Yield:
    """A case a row can run but leaves to a lower row when nobody asked for it by name, and the reason: on a
    target with this feature ("" is any), for these dtypes, if the call needs no other features than these.
    `least_keys`: a number by which routes differ."""

    target_feature: str
    dtypes: frozenset[str]
    features: frozenset[Feature]
    why: str
    least_keys: int = 0


@dataclass(frozen=True, slots=True)
class Capability:
    """A kernel in one phase. `module` holds its `run`; `targets` are prefixes of `Target.name`, "" of any."""

    backend: str
    phase: Phase
    module: str
    targets: tuple[str, ...]
    dtypes: frozenset[str]
    max_head_dim: int
    features: frozenset[Feature]
    priority: int
    choose: Callable[[AttentionSpec, Target], Any]
    needs: tuple[str, ...] = ()  # packages that must be importable
    yields: tuple[Yield, ...] = ()
    tabled: Callable[[AttentionSpec, Target], bool] | None = None  # is it in the table of `choose`?
    host_features: frozenset[Feature] = frozenset()  # of `features`, those that hold on a CPU alone
    max_positions: int | None = None  # seqlen_q + seqlen_k; None or MOST_POSITIONS, by which routes differ
    # Why it does not run a call that passes all else, and why it leaves one to lower rows when nobody asked
    # for it by name; "" if neither. Of lengths they know what a route knows.
    refuses: Callable[[AttentionSpec, Target], str] | None = None
    leaves: Callable[[AttentionSpec, Target], str] | None = None
    # Why it leaves one of this (batch, seqlen_q, seqlen_k), which may differ within a route; "" if not.
    leaves_sizes: Callable[[AttentionSpec, Target, tuple[int, int, int]], str] | None = None
    # Why no device of this machine runs it; looked at where it is asked for by name, as that takes a while.
    absent: Callable[[Target], str] | None = None
    # Does `choose` look at batch and exact lengths of such a call, by which calls of a route may differ?
    by_sizes: Callable[[AttentionSpec], bool] | None = None
    # The device that runs it, where the target does not say: a part of the keys of tuned configs.
    runs_on: Callable[[], str] | None = None
    label: str = ""  # instead of the phase, of a second row of a backend in it

    @property
    def name(self) -> str:
        return f"{self.backend}/{self.label or self.phase.value}"

    def serves(self, phase: Phase) -> bool:
        """Forward rows run decode problems too."""
        return phase is self.phase or (phase is Phase.DECODE and self.phase is Phase.FORWARD)

    def accepts(self, spec: AttentionSpec, target: Target, *, by_name: bool) -> bool:
        """Does this row run `spec` on `target`? Makes no strings if it does."""
        return next(self._reasons(spec, target, by_name), None) is None

    def reasons_against(self, spec: AttentionSpec, target: Target, *, by_name: bool) -> tuple[str, ...]:
        """Every reason why this row does not run `spec` on `target`; empty if it does."""
        return tuple(self._reasons(spec, target, by_name))

    def _reasons(self, spec: AttentionSpec, target: Target, by_name: bool) -> Iterator[str]:
        if not self.serves(spec.phase):
            yield f"phase: row is {self.phase.value}, asked for {spec.phase.value}"
        if not target.name.startswith(self.targets):
            yield f"target: needs {' or '.join(self.targets)}, is {target.name}"
        if spec.dtype not in self.dtypes:
            yield f"dtype: has {', '.join(sorted(self.dtypes))}, asked for {spec.dtype}"
        if max(spec.head_dim, spec.head_dim_v) > self.max_head_dim:
            yield f"head_dim: up to {self.max_head_dim}, asked for {max(spec.head_dim, spec.head_dim_v)}"
        asked, most = spec.seqlen_q + spec.seqlen_k, self.max_positions
        if most is not None and asked > most:
            yield f"positions: up to {most} rows and keys together, asked for {asked}"
        if missing := spec.features - self.features:
            yield f"features: has no {', no '.join(sorted(f.value for f in missing))}"
        if (elsewhere := spec.features & self.host_features) and target.kind != "cpu":
            yield f"features: has {', '.join(sorted(f.value for f in elsewhere))} on a CPU alone"
        for name in self.needs:
            if not target.has_package(name):
                yield f"packages: {name} ({target.why_no_package(name)}): {remedy(name)}".removesuffix(": ")
        if self.refuses is not None and (why := self.refuses(spec, target)):
            yield why
        if self.absent is not None and by_name and target.packages and (why := self.absent(target)):
            yield why
        if self.leaves is not None and not by_name and (why := self.leaves(spec, target)):
            yield f"yields: {why}"
        for case in self.yields if not by_name else ():
            on_target = not case.target_feature or case.target_feature in target.features
            fits = spec.features <= case.features and spec.seqlen_k >= case.least_keys
            if on_target and spec.dtype in case.dtypes and fits:
                yield f"yields: {case.why}"
