"""Query groups of one K/V set as `ablate` runs them: one walk over the keys for all, or a call for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from polyflash import target
from polyflash.errors import spec_error
from polyflash.groups import attention_groups, explain_groups
from polyflash.target import Target
from polyflash.tuning.trial import TOLERANCE, Results, Run, worst_row
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
    q: tuple[Tensor, ...]
    k: Tensor
    v: Tensor
    ends: tuple[int, ...]  # of the keys that a group sees; its last row stands at the last of them
    backend: str
    reference: Results

    def switches(self) -> dict[str, Fusion]:
        other = not self.untuned.fused_groups
        return {f"fused_groups={'on' if other else 'off'}": Fusion(other)}

    def run(self, config: Fusion) -> Run:
        return lambda: _walked(self.q, self.k, self.v, self.ends, self.backend, config.fused_groups)

    def error(self, results: Results) -> float:
        return max(worst_row(a, b) for a, b in zip(results, self.reference, strict=True))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.workload.dtype]


def group_trial(workload: Workload, groups: int, backend: str, *, device: str = "cpu") -> GroupTrial:
    """The rows of a problem in `groups` equal chunks, causal, the ends of which are evenly spaced over its
    keys, as the ranks of context parallelism have them."""
    rows = workload.seqlen_q // max(1, groups)
    if groups < 2 or not rows or workload.seqlen_k < groups:
        wanted = f"2 to {min(workload.seqlen_q, workload.seqlen_k)}"
        raise spec_error("groups", got=groups, wanted=wanted, change="Every group has a row.")
    q, k, v, _ = make(replace(workload, causal=True), device=device)
    parts = tuple(q[:, :, g * rows : (g + 1) * rows] for g in range(groups))
    ends = tuple((g + 1) * workload.seqlen_k // groups for g in range(groups))
    plan = explain_groups(parts, k, v, q_offsets=_offsets(parts, ends), kv_lens=ends, backend=backend or None)
    chosen = plan.plans[0].chosen
    return GroupTrial(
        workload=replace(workload, name=f"{groups} groups of {rows} rows, {workload.name}"),
        row_name=chosen.name if chosen else "",
        device=target.detect(q.device.type, q.device.index or 0),
        untuned=Fusion(plan.fused),
        q=parts,
        k=k,
        v=v,
        ends=ends,
        backend=backend,
        reference=_walked(parts, k, v, ends, "torch", False),
    )


def _offsets(q: tuple[Tensor, ...], ends: tuple[int, ...]) -> list[int]:
    return [end - x.shape[2] for x, end in zip(q, ends, strict=True)]


def _walked(
    q: tuple[Tensor, ...], k: Tensor, v: Tensor, ends: tuple[int, ...], backend: str, fused: bool
) -> Results:
    found = attention_groups(
        q, k, v, q_offsets=_offsets(q, ends), kv_lens=ends, fused=fused, backend=backend or None
    )
    return tuple(found)
