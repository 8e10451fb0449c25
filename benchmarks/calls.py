"""Where the time of one tiny call goes: S = 16, one head, no gradient, stage by stage beside its budget.

Each stage is a difference of two nested entry points timed in the same rounds, so the stages add up to the
total.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from polyflash import torch_ops
from polyflash.bench.timing import Arm, Comparison, compare
from polyflash.spec import Arguments, Phase

SEQLEN, HEAD_DIM = 16, 64
TOTAL, PEER = "total", "torch SDPA"
ALLOWANCE = 15.0  # microseconds a tiny call may take beyond torch's own
BUDGET = {  # microseconds, on a 3.65 GHz Zen 4 core
    "argument normalisation": 2.0,
    "op dispatch": 5.0,
    "route cache": 2.0,
    "outputs": 2.0,
    "argument block": 1.0,
    "kernel": 5.0,
}


@dataclass(frozen=True)
class Stage:
    """One line of the table, in microseconds; `budget` is None where there is none."""

    name: str
    microseconds: float
    budget: float | None = None


def stages(*, seconds: float, speed: Callable[[], float] | None = None) -> tuple[list[Stage], Comparison]:
    """The stages of a call, then `TOTAL` and `PEER`; and the rounds they come from."""
    q, k, v = (torch.randn(1, 1, SEQLEN, HEAD_DIM) for _ in range(3))
    args = Arguments()
    with torch.no_grad():
        polyflash.attention(q, k, v)
        launch = torch_ops._route(Phase.FORWARD, q, k, v, args, ())
        out, lse = torch_ops._outputs(q, v, False)

        def run() -> object:
            return launch.run(launch, q, k, v, out, lse, args)  # type: ignore[misc]

        arms = [
            Arm(TOTAL, lambda: polyflash.attention(q, k, v)),
            Arm("op", lambda: torch_ops.call(q, k, v, args)),
            Arm("route", lambda: torch_ops._route(Phase.FORWARD, q, k, v, args, ())),
            Arm("outputs", lambda: torch_ops._outputs(q, v, False)),
            Arm("run", run),
            Arm(PEER, lambda: scaled_dot_product_attention(q, k, v)),
        ]
        rounds = _with_kernel(launch, arms, run, seconds, speed)
    at = {arm: rounds.summary(arm).median * 1e6 for arm in rounds.rounds[0].seconds}
    kernel = at.get("kernel", at["run"])
    op = at["op"] - at["route"] - at["outputs"] - at["run"]
    taken = (at[TOTAL] - at["op"], op, at["route"], at["outputs"], at["run"] - kernel, kernel)
    made = [Stage(name, us, budget) for (name, budget), us in zip(BUDGET.items(), taken, strict=True)]
    return [*made, Stage(TOTAL, at[TOTAL], at[PEER] + ALLOWANCE), Stage(PEER, at[PEER])], rounds


def _with_kernel(
    launch: Any,
    arms: list[Arm],
    call: Callable[[], object],
    seconds: float,
    speed: Callable[[], float] | None,
) -> Comparison:
    """The rounds, with an arm for the native call alone if the backend makes it through a pool: it is timed
    from inside one `run`, while that call's argument block is alive."""
    pool = getattr(import_module(launch.row.module), "pool", None)
    if pool is None:
        return compare(arms, seconds=seconds, speed=speed)
    native, measured = pool.run, []

    def measuring(*block: Any) -> None:
        pool.run = native
        native(*block)
        measured.append(compare([*arms, Arm("kernel", lambda: native(*block))], seconds=seconds, speed=speed))

    pool.run = measuring
    try:
        call()
    finally:
        pool.run = native
    return measured[0]
