"""Where the time of one tiny call goes: S = 16, one head, no gradient, stage by stage beside its budget.

Each stage is a difference of two nested entry points timed in the same rounds, so the stages add up to the
total.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import polyflash
from benchmarks import tables
from polyflash import torch_ops
from polyflash.bench.suite import MARKS
from polyflash.bench.timing import Arm, Comparison, Speed, compare
from polyflash.spec import Arguments, Phase

SCHEMA = "polyflash.calls/1"
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


def document(seconds: float, speed: Speed | None) -> dict[str, Any]:
    """Measures and prints the stages of a call, then `TOTAL` and `PEER`, in microseconds; the same as plain
    data."""
    q, k, v = (torch.randn(1, 1, SEQLEN, HEAD_DIM) for _ in range(3))
    args = Arguments()
    with torch.no_grad():
        polyflash.attention(q, k, v)
        launch = torch_ops._route(Phase.FORWARD, q, k, v, args, ())
        out, lse = torch_ops._outputs(q, v.shape[3], False)

        def run() -> object:
            return launch.run(launch, q, k, v, out, lse, args)  # type: ignore[misc]

        calls: dict[str, Callable[[], object]] = {
            TOTAL: lambda: polyflash.attention(q, k, v),
            "op": lambda: torch_ops.call(q, k, v, args),
            "route": lambda: torch_ops._route(Phase.FORWARD, q, k, v, args, ()),
            "outputs": lambda: torch_ops._outputs(q, v.shape[3], False),
            "run": run,
            PEER: lambda: scaled_dot_product_attention(q, k, v),
        }
        rounds = _with_kernel(launch, calls, seconds, speed)
    at = {arm: rounds.summary(arm).median * 1e6 for arm in rounds.rounds[0].seconds}
    kernel, op = at.get("kernel", at["run"]), at["op"] - at["route"] - at["outputs"] - at["run"]
    taken = (at[TOTAL] - at["op"], op, at["route"], at["outputs"], at["run"] - kernel, kernel)
    lines: list[tuple[str, float, float | None]] = []  # stage, time, budget
    lines += [(name, us, budget) for (name, budget), us in zip(BUDGET.items(), taken, strict=True)]
    lines += [(TOTAL, at[TOTAL], at[PEER] + ALLOWANCE), (PEER, at[PEER], None)]
    shown = [(name, f"{us:.1f}", "" if budget is None else f"{budget:.0f}") for name, us, budget in lines]
    print(
        "\n".join(("S = 16, one head, no gradient", *tables.aligned([("stage", "µs", "budget"), *shown]), ""))
    )
    if rounds.contended:
        print(MARKS["contended"])
    stages = [dict(zip(("name", "microseconds", "budget"), line, strict=True)) for line in lines]
    about = {"schema": SCHEMA, "contended": rounds.contended, "rounds": len(rounds.rounds)}
    return {**about, "stages": stages}


def _with_kernel(
    launch: Any, calls: dict[str, Callable[[], object]], seconds: float, speed: Speed | None
) -> Comparison:
    """The rounds, with an arm for the native call alone if the backend makes it through a pool: it is timed
    from inside one `run`, while that call's argument block is alive."""
    arms, pool = [Arm(*x) for x in calls.items()], getattr(import_module(launch.row.module), "pool", None)
    if pool is None:
        return compare(arms, seconds=seconds, speed=speed)
    native, measured = pool.run, []

    def measuring(*block: Any) -> None:
        pool.run = native
        native(*block)
        measured.append(compare([*arms, Arm("kernel", lambda: native(*block))], seconds=seconds, speed=speed))

    pool.run = measuring
    try:
        calls["run"]()
    finally:
        pool.run = native
    return measured[0]
