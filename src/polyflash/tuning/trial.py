"""One problem on one kernel row, with any of its configs: what `tune` and `ablate` run and compare.

The row's `run` is called directly, with a launch of its own for every config: gradients and statistics can be
tried like the forward pass, and no route of the process changes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from polyflash import backends, counting, plan, target, torch_ops
from polyflash.arguments import Options, normalise
from polyflash.compare import TOLERANCE, worst_row
from polyflash.errors import spec_error
from polyflash.plan import Launch
from polyflash.results import outputs
from polyflash.routes import spec_of, without_gradients
from polyflash.spec import Arguments, AttentionSpec, Feature, Phase
from polyflash.target import Target
from polyflash.workloads import Workload, make

Results = tuple[Tensor, ...]
Run = Callable[[], Results]
OFF_ROW = 0.01  # of the largest row: what cancels in a row is rounded at the size of what cancelled
_ALL = 1 << 30  # as a size: no limit


@dataclass(frozen=True)
class Trial:
    """A problem's tensors, and the launch that selection gives it, on the device of its tensors."""

    workload: Workload
    launch: Launch
    q: Tensor
    k: Tensor
    v: Tensor
    args: Arguments
    reference: Results  # of the torch row: out and lse, gradients, or column sums
    saved: Results = ()  # dout, out and lse, which gradients and statistics start from

    @property
    def spec(self) -> AttentionSpec:
        return self.launch.spec

    @property
    def device(self) -> Target:
        return self.launch.target

    @property
    def row_name(self) -> str:
        return self.launch.row.name

    @property
    def untuned(self) -> Any:
        """The row's own choice."""
        return self.launch.row.choose(self.spec, self.device)

    def candidates(self) -> tuple[Any, ...]:
        """The configs worth timing, the row's own choice first."""
        return (self.untuned, *(c for c in _beside(self.launch, "candidates") if c != self.untuned))

    def switches(self) -> dict[str, Any]:
        """Configs that differ from the row's choice in one technique or size, by what differs."""
        return switches_of(self.launch)

    def run(self, config: Any) -> Run:
        """A call of the kernel under `config`: (out, lse), (dq, dk, dv) or column sums."""
        launch = replace(self.launch, config=config, rung="explicit", prepared=None)
        return _run(launch, self.q, self.k, self.v, self.args, self.saved)

    def error(self, results: Results) -> float:
        """The worst row's difference from the reference."""
        return max(worst_row(a, b, floor=OFF_ROW) for a, b in zip(results, self.reference, strict=True))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.spec.dtype]


def attempt(trial: Any, config: Any) -> tuple[Results, float, str]:
    """The results under `config` and their error; or why there are none."""
    try:
        results = trial.run(config)()
        return results, trial.error(results), ""
    except Exception as raised:  # a compiler's or a driver's, of any class: this config is out
        text = str(raised).strip().partition("\n")[0]
        return (), math.inf, f"fails: {type(raised).__name__}: {text[:160]}"


def switches_of(launch: Launch) -> dict[str, Any]:
    """`Trial.switches` of a launch, which needs no tensors."""
    untuned = launch.row.choose(launch.spec, launch.target)
    found = _beside(launch, "switches") or _beside(launch, "candidates")
    named = {difference_of(untuned, config): config for config in found}
    return {name: config for name, config in named.items() if name and "," not in name}


def _beside(launch: Launch, name: str) -> tuple[Any, ...]:
    """The answer of a function beside `choose` for configs of the same class; () without one."""
    listed = getattr(import_module(launch.row.choose.__module__), name, None)
    kind = type(launch.row.choose(launch.spec, launch.target))
    return tuple(c for c in listed(launch.spec, launch.target) if type(c) is kind) if listed else ()


def trial(workload: Workload, phase: Phase, backend: str, *, device: str = "cpu") -> Trial:
    """The problem on `backend`'s row of `phase`; UnsupportedError with the reasons if it has none for it.

    Args:
        workload: neither packed nor paged. phase: FORWARD stands for DECODE too where rows are few."""
    if workload.members or workload.page_size:
        change = "Tune the dense problem of its lengths."
        raise spec_error("workload", workload.name, "neither packed nor paged", change)
    q, k, v, options = make(workload, device=device)
    args = normalise(Options(**options))
    if phase is not Phase.FORWARD:
        args = args._replace(need_lse=True)
    here = target.detect(q.device.type, q.device.index or 0)

    def launch(phase: Phase, backend: str) -> Launch:
        spec = spec_of(q, k, k if phase is Phase.STATISTICS else v, args, phase=phase)
        if phase is Phase.FORWARD:
            spec = without_gradients(spec)
            spec = replace(spec, features=spec.features - {Feature.LSE})
        made = plan.select(spec, here, backends.TABLE, backend=backend, config="")
        made = made.of_sizes(spec.batch, spec.seqlen_q, spec.seqlen_k, spec.members)
        made.run = import_module(made.row.module).run
        made.tally = counting.tally_of(made, backend)
        return made

    chosen, plain = launch(phase, backend), launch(phase, "torch")
    saved: Results = ()
    if phase in (Phase.BACKWARD, Phase.STATISTICS):
        out, lse = _run(launch(Phase.FORWARD, "torch"), q, k, v, args, ())()
        with torch.device("cpu"):
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
        saved = (dout.to(out.dtype).to(device), out, lse)
    return Trial(workload, chosen, q, k, v, args, _run(plain, q, k, v, args, saved)(), saved)


def _run(launch: Launch, q: Tensor, k: Tensor, v: Tensor, args: Arguments, saved: Results) -> Run:
    wanted, needs = args._replace(need_lse=True), (True, True, True, False, False)

    within = getattr(import_module(launch.row.module), "tried", contextlib.nullcontext)

    def run() -> Results:
        with within():
            return results_of()

    def results_of() -> Results:
        if launch.spec.phase is Phase.BACKWARD:
            dout, *results = saved
            return tuple(torch_ops.launched(launch, dout, None, q, k, v, *results, args, needs)[:3])
        if launch.spec.phase is Phase.STATISTICS:
            sums = saved[2].new_empty((*saved[2].shape[:2], k.shape[2]))
            torch_ops.launched(launch, q, k, saved[2], (sums, None, None), args)
            return (sums,)
        return tuple(torch_ops.launched(launch, q, k, v, *outputs(q, v.shape[3], True), wanted)[:2])

    return run


def difference_of(default: Any, config: Any) -> str:
    """The fields of `config` that differ from `default`: "block_n=128", "base2=off", several with commas."""
    changed = [f.name for f in fields(default) if getattr(config, f.name) != getattr(default, f.name)]
    return ", ".join(f"{name}={_said(getattr(config, name))}" for name in changed)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "all" if value == _ALL else str(value) or "none"
