"""`polyflash doctor`: is every kernel of this machine right, and is anything around them in the way?

Each backend is examined in a process of its own: a dozen tiny cases against float64. So one that crashes or
hangs is reported like any other fault. What may be in the way of a backend, its own report says."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from polyflash import env, reports, target
from polyflash.advice import Advice

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.capability import Capability
    from polyflash.workloads import Workload

EXAMINE_SECONDS = 300.0  # of one backend, kernels compiled included
_LAST_WORDS_SECONDS = 10.0  # for a process that was killed
LSE_TOLERANCE = 1e-4
OFF_ROW = 1e-3  # of the largest row: what a row may be off by beside its own size
OK, FAILED, REFUSED = "ok", "failed", "refused"


def run(options: argparse.Namespace, *_: object) -> int:
    """A dozen tiny cases on every row against float64, each row printed as it ends, and remedies for what is
    missing. Returns 1 if a case fails or nothing can run."""
    began = time.perf_counter()
    probed = reports.probe_torch()
    advice = surroundings(probed)
    rows = []
    for row in () if "error" in probed else examine_all():
        rows.append(row)
        if not options.json:
            _print_row(row)
    failed = sum(case["state"] == FAILED for row in rows for case in row["cases"])
    bad, seconds = bool(failed) or any(a.fatal for a in advice), time.perf_counter() - began
    if options.json:
        content = {"schema": "polyflash.doctor/1", "ok": not bad, "seconds": round(seconds, 3)}
        print(json.dumps({**content, "rows": rows, "advice": list(map(asdict, advice))}, indent=1))
        return int(bad)
    for a in advice:
        print(f"{'error' if a.fatal else 'note'}: {a.what}\n  remedy: {a.remedy}")
    verdict = f"{failed} cases failed" if failed else "nothing can run" if bad else "all well"
    print(f"{verdict}, {seconds:.1f} s")
    return int(bad)


def examine_all() -> Iterator[dict[str, Any]]:
    """Every row's verdict as it ends, from one process per backend, all at once."""
    from polyflash import backends

    verdicts: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    children: list[subprocess.Popen[str]] = []
    for name in backends.BACKENDS:
        threading.Thread(target=_follow, args=(name, verdicts.put, children), daemon=True).start()
    end, running = time.monotonic() + EXAMINE_SECONDS + _LAST_WORDS_SECONDS, len(backends.BACKENDS)
    try:
        while running:
            verdict = verdicts.get(timeout=max(0.0, end - time.monotonic()))
            if verdict is not None:
                yield verdict
            running -= verdict is None
    except queue.Empty:  # a process that does not even end when killed
        return
    finally:
        for child in children:
            child.kill()


def _follow(
    backend: str, put: Callable[[dict[str, Any] | None], None], children: list[subprocess.Popen[str]]
) -> None:
    """Examines the rows of a backend in a process, which prints each verdict as a line of JSON. Puts the
    verdicts as they come, then one for each row that has none, then None."""
    from polyflash import backends

    owed = [reports.label(row) for row in backends.TABLE if row.backend == backend]
    command = [sys.executable, "-m", "polyflash.doctor", backend]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        children.append(child)
        alarm = threading.Timer(EXAMINE_SECONDS, child.kill)
        alarm.daemon = True
        alarm.start()
        for line in child.stdout or ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # whatever else a row printed
                verdict = json.loads(line)
                owed.remove(verdict["row"])
                put(verdict)
        code = child.wait()
        errors.seek(0)
        why = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
        if code < 0:
            late = f"no result after {EXAMINE_SECONDS:.0f} s"
            why = f"its process ended by signal {-code}" if alarm.is_alive() else late
        alarm.cancel()
    for row in owed:
        put({"row": row, "cases": [{"case": "its process", "state": FAILED, "why": why}]})
    put(None)


def examine(row: Capability) -> dict[str, Any]:
    """One row's cases, in this process: each ok, failed, or refused in the row's own words."""
    from polyflash.spec import Phase

    place = _place(row)
    here = target.detect(place)
    verdicts = []
    for workload in cases():
        if (workload.name == "gradient") is not (row.phase is Phase.BACKWARD):
            continue
        if row.phase is Phase.DECODE:
            workload = replace(workload, seqlen_q=2)  # what is planned as a decode step
        spec = workload.spec(phase=row.phase, need_lse=True)
        refusals = row.reasons_against(spec, here, by_name=True)
        why = "; ".join(refusals)
        if not refusals:
            try:
                why = _fault(row.backend, workload, place)
            except Exception as error:  # whatever a broken row raises is its verdict
                why = f"{type(error).__name__}: {error}".splitlines()[0]
        state = REFUSED if refusals else FAILED if why else OK
        verdicts.append({"case": workload.name, "state": state, "why": why})
    return {"row": reports.label(row), "cases": verdicts}


def _place(row: Capability) -> str:
    """The device type to examine a row on: the CPU, if it runs there."""
    import torch

    on_cpu = target.detect("cpu").name.startswith(row.targets)
    kind, there = ("mps", torch.backends.mps) if "metal:" in row.targets else ("cuda", torch.cuda)
    return "cpu" if on_cpu or not there.is_available() else kind


def cases() -> tuple[Workload, ...]:
    """A dozen problems of a few hundred scores; none is square, and lengths end within a tile."""
    from polyflash.workloads import Workload

    plain = Workload("plain", frozenset(), 2, 2, 2, 19, 37, 24)
    return (
        plain,
        replace(plain, name="causal, more keys than rows", causal=True),
        replace(plain, name="grouped heads", heads=6),
        replace(plain, name="bool mask", mask="b1qk"),
        replace(plain, name="bias", bias="hqk"),
        replace(plain, name="softcap", softcap=5.0),
        replace(plain, name="sinks", sinks=True),
        replace(plain, name="window", causal=True, window=(5, 0)),
        replace(plain, name="key lengths", kv_lens=(0, 30)),
        replace(plain, name="bfloat16", dtype="bfloat16", causal=True),
        replace(plain, name="float16", dtype="float16", causal=True),
        replace(plain, name="rows that see no key", seqlen_q=37, seqlen_k=19, causal=True),
        replace(plain, name="gradient", causal=True, heads=4),
    )


def _fault(backend: str, workload: Workload, place: str) -> str:
    """The fault in the result of a case; empty if there is none."""
    import polyflash
    from polyflash.compare import largest
    from polyflash.reference import attention_reference
    from polyflash.workloads import make

    q, k, v, options = make(workload)
    there_q, there_k, there_v, there = make(workload, device=place)
    if workload.name == "gradient":
        return _gradient_fault(backend, (q, k, v), options, place)
    got = polyflash.attention(there_q, there_k, there_v, return_lse=True, backend=backend, **there)
    got = polyflash.AttentionOutput(got.out.cpu(), got.lse.cpu())
    want = attention_reference(q, k, v, **options)
    empty = want.lse == -math.inf
    if bool((got.out[empty] != 0).any()):
        return "a row that sees no key is not 0"
    apart = largest((got.lse.double() - want.lse)[~empty])
    if not bool((got.lse[empty] == -math.inf).all()) or not apart <= LSE_TOLERANCE:
        return f"lse is off by {apart:.1e}, {LSE_TOLERANCE:.0e} is allowed"
    return _off("output", got.out, want.out, workload.dtype)


def _gradient_fault(backend: str, inputs: tuple[Tensor, ...], options: dict[str, Any], place: str) -> str:
    import polyflash
    from polyflash.reference import attention_reference

    ours = [x.detach().clone().to(place).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = polyflash.attention(*ours, backend=backend, **options)
    weights = inputs[0].new_tensor(range(out.numel())).sin().view_as(out)
    (out * weights.to(place)).sum().backward()
    (attention_reference(*exact, **options).out * weights.double()).sum().backward()
    for name, x, y in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        if x.grad is None or y.grad is None:
            return f"{name} is missing"
        if why := _off(name, x.grad.cpu(), y.grad, "float32"):
            return why
    return ""


def _off(name: str, got: Tensor, want: Tensor, dtype: str) -> str:
    """Complains about the worst row; a NaN is no small error."""
    from polyflash.compare import TOLERANCE, worst_row

    worst, most = worst_row(got, want, floor=OFF_ROW), TOLERANCE[dtype]
    return "" if worst <= most else f"{name} is off by {worst:.1e} in its worst row, {most:.0e} is allowed"


def surroundings(probed: dict[str, Any]) -> list[Advice]:
    """Obstacles on this machine; `probed` is what `reports.probe_torch` found."""
    advice = [*_packages(probed), *_isa()]
    try:
        advice += _tuned()
        for report in reports.of_backends():
            advice += report.advice(probed)
    except ImportError as error:
        what = f"modules of polyflash do not import: {error}"
        advice.append(Advice(what, "pip install --force-reinstall numpy", fatal=True))
    return advice


def _packages(probed: dict[str, Any]) -> Iterator[Advice]:
    for name, wanted in reports.PACKAGES.items():
        version = target.installed_version(name)
        if name in ("torch", "numpy", "numba") and (
            not version or target.release(version) < target.release(wanted)
        ):
            what = f"{name} {version} is older than {wanted}" if version else f"{name} is not installed"
            if name == "numba":
                what += ", so the CPU engine has no compiler and calls run on the torch row"
            yield Advice(what, f"pip install '{name}>={wanted}'", fatal=name == "torch")
    if "error" in probed and target.installed_version("torch"):
        remedy = "reinstall torch: pip install --force-reinstall torch"
        yield Advice(f"torch does not import: {probed['error']}", remedy, fatal=True)


def _isa() -> Iterator[Advice]:
    try:
        device = target.detect("cpu")
    except ValueError as error:
        yield Advice(f"POLYFLASH_CPU_ISA: {error}", "unset POLYFLASH_CPU_ISA", fatal=True)
        return
    absent = sorted(device.features - target.cpu_flags())
    if env.CPU_ISA.read() and absent:
        what = f"POLYFLASH_CPU_ISA asks for {', '.join(absent)}, which this CPU lacks: calls end in a crash"
        yield Advice(what, "unset POLYFLASH_CPU_ISA")


def _tuned() -> Iterator[Advice]:
    """Tells of a tuned file of this CPU that is there and not believed."""
    from polyflash.tuning import store

    with contextlib.suppress(ValueError):  # of the instruction set, which `_isa` tells
        said = store.report(target.detect("cpu"))
        if "ignored" in said or "of other versions" in said:
            yield Advice(said, "polyflash tune again, or remove the file")


def _print_row(row: dict[str, Any]) -> None:
    states = [case["state"] for case in row["cases"]]
    if set(states) == {REFUSED}:
        print(f"{row['row']}: not for this machine, {row['cases'][0]['why']}", flush=True)
        return
    counts = ", ".join(f"{states.count(s)} {s}" for s in (OK, FAILED, REFUSED) if s in states)
    print(f"{row['row']}: {counts}")
    for case in row["cases"]:
        print(f"  {case['state']:<8} {case['case']}" + (f": {case['why']}" if case["why"] else ""))
    sys.stdout.flush()


if __name__ == "__main__":
    from polyflash.backends import TABLE

    for row in TABLE:
        if row.backend == sys.argv[1]:
            print(json.dumps(examine(row)), flush=True)
