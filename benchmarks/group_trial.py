"""Query groups of one K/V set as `ablate` runs them: one walk over the keys for all, or a call for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from polyflash.bench.command import target_of
from polyflash.compare import TOLERANCE, worst_row
from polyflash.errors import spec_error
from polyflash.groups import attention_groups, explain_groups
from polyflash.target import Target
from polyflash.tuning.trial import OFF_ROW, Results, Run
from polyflash.workloads import Workload, make


@dataclass(frozen=True)
class Fusion:
    """The one switch of groups, which is an argument and no field of a kernel's config."""

    fused_groups: bool


@dataclass(frozen=True)
class GroupTrial:
    """As much of `Trial` as an ablation asks for."""

    workload: Workload
    row_name: str
    device: Target
    untuned: Fusion
    walk: Callable[[bool], Results]
    reference: Results

    def switches(self) -> dict[str, Fusion]:
        other = not self.untuned.fused_groups
        return {f"fused_groups={'on' if other else 'off'}": Fusion(other)}

    def run(self, config: Fusion) -> Run:
        return partial(self.walk, config.fused_groups)

    def error(self, results: Results) -> float:
        return max(worst_row(a, b, floor=OFF_ROW) for a, b in zip(results, self.reference, strict=True))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.workload.dtype]


def group_trial(workload: Workload, groups: int, backend: str, *, device: str = "cpu") -> GroupTrial:
    """The rows of a problem in `groups` equal chunks, the ends of which are evenly spaced over its keys, as
    the ranks of context parallelism have them. SpecError for operands beside q, k and v."""
    if groups < 2 or workload.seqlen_q % groups or workload.seqlen_k < groups:
        wanted = f"2 or more that divide {workload.seqlen_q} rows, and no more than keys"
        raise spec_error("groups", got=groups, wanted=wanted, change="Change --groups or --seqlen.")
    q, k, v, options = make(workload, device=device)
    causal = options.pop("causal", False)
    if options or type(causal) is not bool:
        change = "Name a plain one by --seqlen."
        raise spec_error("problem", got=workload.name, wanted="one that is full or causal", change=change)
    rows, keys = workload.seqlen_q // groups, workload.seqlen_k
    parts, ends = q.split(rows, 2), [(g + 1) * keys // groups for g in range(groups)]
    given: dict[str, Any] = {"q_offsets": [n - rows for n in ends], "kv_lens": ends, "causal": causal}

    def walk(fused: bool, where: str = backend) -> Results:
        return tuple(attention_groups(parts, k, v, **given, fused=fused, backend=where or None))

    plan = explain_groups(parts, k, v, **given, backend=backend or None)
    chosen, here = plan.plans[0].chosen, target_of(str(q.device))
    named = replace(workload, name=f"{groups} groups of {rows} rows, {workload.name}")
    name, reference = chosen.name if chosen else "", walk(False, "torch")
    return GroupTrial(named, name, here, Fusion(plan.fused), walk, reference)
