"""Checks and measures the Metal engine on a Mac, and writes a page of results: `make bench-metal`.

    python scripts/metal_check.py [--page build/metal.md] [--seconds 2] [--quick]

First every row against float64 (what `polyflash doctor` tries), then each switch of a config; only if all is
right are calls timed, beside torch SDPA, interleaved. Exit status 1: something is wrong, or no MPS device is
here. Rates count visible pairs alone; TFLOP/s of gradients count them all, TB/s of decode what must be read.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import polyflash
from polyflash import backends, doctor, plan, target
from polyflash.backends.gpu.configs import varied
from polyflash.backends.metal.configs import fits
from polyflash.bench.timing import Arm, compare
from polyflash.reference import attention_reference
from polyflash.spec import Phase
from polyflash.work import work_of
from polyflash.workloads import Workload, make

ROWS = [row for row in backends.TABLE if row.backend == "metal"]
WRONG_BY = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of the largest value
OURS, SDPA = "polyflash", "torch SDPA"


@dataclass(frozen=True)
class Timed:
    """One line of the tables: a workload, in one phase."""

    phase: Phase
    workload: Workload

    @property
    def name(self) -> str:
        w = self.workload
        causal = " causal" if w.causal else ""
        return (
            f"{self.phase.value}{causal} {w.dtype} {w.batch} x {w.heads}/{w.kv_heads} x "
            f"{w.seqlen_q} x {w.seqlen_k}, head_dim {w.head_dim}"
        )


def timed_cases(quick: bool) -> Iterator[Timed]:
    """Prefill, gradients and decode at two head dims; with `quick` one small case of each."""
    base = Workload("timed", frozenset(), 1, 8, 8, 64, 64, 64)
    if quick:
        yield from (Timed(phase, base) for phase in (Phase.FORWARD, Phase.BACKWARD))
        yield Timed(Phase.DECODE, replace(base, seqlen_q=1))
        return
    for dtype, head_dim, causal in itertools.product(("float16", "float32"), (64, 128), (False, True)):
        sizes = replace(base, dtype=dtype, head_dim=head_dim, causal=causal, seqlen_q=2048, seqlen_k=2048)
        yield from (Timed(phase, sizes) for phase in (Phase.FORWARD, Phase.BACKWARD))
    for keys, batch in ((4096, 1), (32768, 1), (4096, 16)):
        sizes = replace(base, dtype="float16", head_dim=128, heads=32, batch=batch, seqlen_q=1, seqlen_k=keys)
        yield Timed(Phase.DECODE, sizes)


def call_of(case: Timed, device: str, config: Any = None) -> Callable[[], Any]:
    """Our call; of gradients the backward pass alone."""
    q, k, v, options = make(case.workload, device=device)
    return _call(case, q, k, v, lambda *x: polyflash.attention(*x, backend="metal", config=config, **options))


def sdpa_of(case: Timed, device: str) -> Callable[[], Any]:
    q, k, v, _ = make(case.workload, device=device)
    group = case.workload.heads != case.workload.kv_heads
    causal = bool(case.workload.causal)
    return _call(
        case, q, k, v, lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal, enable_gqa=group)
    )


def _call(case: Timed, q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Callable[[], Any]:
    if case.phase is not Phase.BACKWARD:
        return lambda: attend(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    dout = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def wrong_rows() -> Iterator[str]:
    """Cases of `polyflash doctor` that fail."""
    for row in ROWS:
        for case in doctor.examine(row)["cases"]:
            if case["state"] == doctor.FAILED:
                yield f"{row.name}, {case['case']}: {case['why']}"


def configs_of(case: Timed, device: str) -> Iterator[tuple[str, Any]]:
    """The chosen config and those with one switch changed, by name."""
    (row,) = (row for row in ROWS if row.phase is case.phase)
    spec = case.workload.spec(phase=case.phase, device=device)
    here = target.detect(device)
    chosen = plan.choose_config(row, spec, here, "")[0]
    yield "as chosen", chosen
    for config in varied(chosen, spec, here, "switched"):
        changed = [n for n in config.__dataclass_fields__ if getattr(config, n) != getattr(chosen, n)]
        name = f"{changed[0]}={getattr(config, changed[0])}"
        if not fits(config, spec):  # two stages of the chosen block seldom do
            config = replace(config, block_n=config.block_n // 2)
            name += f" with block_n={config.block_n}"
        if fits(config, spec):
            yield name, config


def wrong_switches(device: str) -> Iterator[str]:
    """Switches with which a call is not what float64 says."""
    base = Workload("switch", frozenset(), 1, 4, 2, 37, 75, 64, causal=True)
    for phase, dtype in itertools.product((Phase.FORWARD, Phase.DECODE), WRONG_BY):
        case = Timed(phase, replace(base, dtype=dtype, seqlen_q=37 if phase is Phase.FORWARD else 1))
        q, k, v, options = make(case.workload)
        want = attention_reference(q, k, v, **options).out
        for name, config in configs_of(case, device):
            off = (call_of(case, device, config)().cpu().double() - want).abs().max() / want.abs().max()
            if not float(off) <= WRONG_BY[dtype]:
                yield f"{phase.value} {dtype}, {name}: off by {float(off):.1e}"


def measured(arms: dict[str, Callable[[], Any]], device: str, seconds: float) -> dict[str, float]:
    """Median seconds per call of each arm."""

    def finished(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            call()
            if device == "mps":
                torch.mps.synchronize()

        return run

    found = compare([Arm(name, finished(call)) for name, call in arms.items()], seconds=seconds, settle=0.0)
    return {name: found.summary(name).median for name in arms}


def rate(case: Timed, device: str, seconds: float) -> str:
    work = work_of(case.workload.spec(phase=case.phase, device=device))
    if case.phase is Phase.DECODE:
        return f"{work.bytes / seconds / 1e12:.3f} TB/s"
    return f"{work.flops / seconds / 1e12:.2f} TFLOP/s"


def page_of(device: str, quick: bool, seconds: float) -> Iterator[str]:
    """Lines of the page, times only."""
    here = target.detect(device)
    yield f"# The Metal engine on {target.cpu_name()}"
    yield ""
    yield f"{platform.platform()}, {here.name}, torch {torch.__version__}, polyflash {polyflash.__version__}."
    yield "Medians of interleaved rounds; each call ends with a synchronisation. Results were checked first."
    yield ""
    yield "| call | ours | rate | torch SDPA | theirs over ours |"
    yield "|---|---|---|---|---|"
    for case in timed_cases(quick):
        times = measured({OURS: call_of(case, device), SDPA: sdpa_of(case, device)}, device, seconds)
        ours, theirs = times[OURS], times[SDPA]
        told = f"{ours * 1e3:.3f} ms | {rate(case, device, ours)} | {theirs * 1e3:.3f} ms"
        yield f"| {case.name} | {told} | {theirs / ours:.2f} |"
    yield ""
    yield "## Switches, one at a time: time over that of the chosen config"
    yield ""
    yield "| call | switch | times |"
    yield "|---|---|---|"
    for case in timed_cases(quick):
        if case.phase is Phase.BACKWARD:
            continue  # a call's config is that of its forward pass
        arms = {name: call_of(case, device, config) for name, config in configs_of(case, device)}
        times = measured(arms, device, seconds)
        for name in list(arms)[1:]:
            yield f"| {case.name} | {name} | {times[name] / times['as chosen']:.2f} |"


def main(arguments: list[str], device: str = "mps") -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--page", type=Path, default=Path("build/metal.md"))
    options.add_argument("--seconds", type=float, default=2.0, help="per line of the tables")
    options.add_argument("--quick", action="store_true", help="small cases, to see that all works")
    given = options.parse_args(arguments)
    if device == "mps" and not torch.backends.mps.is_available():
        print("no MPS device is here; `polyflash doctor` says why", file=sys.stderr)
        return 1
    wrong = [*wrong_rows(), *wrong_switches(device)]
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    if wrong:
        return 1
    lines = []
    for line in page_of(device, given.quick, given.seconds):
        print(line, flush=True)
        lines.append(line)
    given.page.parent.mkdir(parents=True, exist_ok=True)
    given.page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nwritten to {given.page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
