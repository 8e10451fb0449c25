"""`polyflash doctor`: is every row of this machine right, and is anything around them in the way?

Each backend is examined in a process of its own: a dozen tiny cases against float64. So one that crashes or
hangs is reported like any other fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polyflash import env, reports, target

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.capability import Capability
    from polyflash.workloads import Workload

EXAMINE_SECONDS = 300.0  # of one backend, kernels compiled included
_LAST_WORDS_SECONDS = 10.0  # for a process that was killed
# Error of a row of the output, relative to that row and, at 1/1000, to the largest; of lse, absolute.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
LSE_TOLERANCE = 1e-4
_AMD_DRIVER, _NVIDIA_DRIVER = "/dev/kfd", "/proc/driver/nvidia/version"
OK, FAILED, REFUSED = "ok", "failed", "refused"


@dataclass(frozen=True, slots=True)
class Advice:
    """Something in the way of calls, and the one thing to do about it. `fatal`: nothing runs until then."""

    what: str
    remedy: str
    fatal: bool = False


def add(commands: Any) -> None:
    """Adds the command to the subparsers `commands`."""
    made = commands.add_parser(
        "doctor", help="does every kernel of this machine compute what it should", description=run.__doc__
    )
    made.add_argument("--json", action="store_true", help="print JSON instead")
    made.set_defaults(command=run)


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
    failed = any(case["state"] == FAILED for row in rows for case in row["cases"])
    bad = failed or any(a.fatal for a in advice)
    if options.json:
        content = {
            "schema": "polyflash.doctor/1",
            "ok": not bad,
            "seconds": round(time.perf_counter() - began, 3),
            "rows": rows,
            "advice": [{"what": a.what, "remedy": a.remedy, "fatal": a.fatal} for a in advice],
        }
        print(json.dumps(content, indent=1))
    else:
        _print_end(rows, advice, time.perf_counter() - began)
    return 1 if bad else 0


def examine_all() -> Iterator[dict[str, Any]]:
    """Every row's verdict as it ends, from one process per backend, all at once."""
    from polyflash import backends

    children = [_Child(name) for name in backends.BACKENDS]
    verdicts: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    for child in children:
        threading.Thread(target=child.follow, args=(verdicts.put,), daemon=True).start()
    end, running, late = time.monotonic() + EXAMINE_SECONDS, len(children), False
    try:
        while running:
            try:
                verdict = verdicts.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                if late:  # a process that does not even end when killed
                    break
                end, late = time.monotonic() + _LAST_WORDS_SECONDS, True
                for child in children:
                    child.stop()
                continue
            if verdict is None:
                running -= 1
            else:
                yield verdict
    finally:
        for child in children:
            child.process.kill()


class _Child:
    """A process that examines the rows of one backend and prints each verdict as a line of JSON."""

    def __init__(self, backend: str) -> None:
        self.backend, self.stopped = backend, False
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # outlives this function
        command = [sys.executable, "-m", "polyflash.doctor", backend]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)

    def stop(self) -> None:
        self.stopped = True
        self.process.kill()

    def follow(self, put: Callable[[dict[str, Any] | None], None]) -> None:
        """Puts the verdicts as they come, then one for each row that has none, then None."""
        from polyflash import backends

        owed = [reports.label(row) for row in backends.TABLE if row.backend == self.backend]
        for line in self.process.stdout or ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # whatever else a row printed
                verdict = json.loads(line)
                owed.remove(verdict["row"])
                put(verdict)
        self.process.wait()
        for row in owed:
            put({"row": row, "cases": [{"case": "its process", "state": FAILED, "why": self._end()}]})
        put(None)

    def _end(self) -> str:
        """What ended the process."""
        code = self.process.returncode
        if self.stopped:
            return f"no result after {EXAMINE_SECONDS:.0f} s"
        if code < 0:
            return f"its process ended by signal {-code}"
        self.errors.seek(0)
        return (self.errors.read().strip().splitlines() or [f"exit code {code}"])[-1]


def examine(row: Capability) -> dict[str, Any]:
    """One row's cases, in this process: each ok, failed, or refused in the row's own words."""
    from polyflash.spec import Phase

    place = _place(row)
    here = target.detect(place)
    found = []
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
        found.append({"case": workload.name, "state": state, "why": why})
    return {"row": reports.label(row), "cases": found}


def _place(row: Capability) -> str:
    """The device type to examine a row on: the CPU, if it runs there."""
    import torch

    on_cpu = target.detect("cpu").name.startswith(row.targets)
    return "cpu" if on_cpu or not torch.cuda.is_available() else "cuda"


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
    """What is wrong with the result of a case; empty if nothing is."""
    import polyflash
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
    apart = (got.lse.double() - want.lse)[~empty]
    if not bool((got.lse[empty] == -math.inf).all()) or not _largest(apart.abs()) <= LSE_TOLERANCE:
        return f"lse is off by {_largest(apart.abs()):.1e}, {LSE_TOLERANCE:.0e} is allowed"
    return _off("output", got.out, want.out, TOLERANCE[workload.dtype])


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
        why = _off(name, x.grad.cpu(), y.grad, TOLERANCE["float32"])
        if why:
            return why
    return ""


def _off(name: str, got: Tensor, want: Tensor, tolerance: float) -> str:
    """Complains about the worst row; a NaN is no small error."""
    norm = want.norm(dim=-1)
    error = (got.double() - want).norm(dim=-1) / (norm + 1e-3 * norm.max())
    worst = _largest(error)
    return (
        ""
        if worst <= tolerance
        else f"{name} is off by {worst:.1e} in its worst row, {tolerance:.0e} is allowed"
    )


def _largest(x: Tensor) -> float:
    return float(x.nan_to_num(math.inf).max()) if x.numel() else 0.0


def surroundings(probed: dict[str, Any]) -> list[Advice]:
    """What is missing or in the way on this machine; `probed` is what `reports.probe_torch` found."""
    found = [*_packages(probed), *_isa()]
    try:
        found += [*_cache(), *_tuned()]
        found += _threads(int(probed.get("threads", 1)))
        found += _triton(probed)
    except ImportError as error:
        what = f"modules of polyflash do not import: {error}"
        found.append(Advice(what, "pip install --force-reinstall numpy", fatal=True))
    return found


def _packages(probed: dict[str, Any]) -> list[Advice]:
    found = []
    for name, wanted in reports.PACKAGES.items():
        version = reports.version_of(name)
        if name in ("torch", "numpy", "numba") and (not version or _older(version, wanted)):
            what = f"{name} {version} is older than {wanted}" if version else f"{name} is not installed"
            if name == "numba":
                what += ", so the CPU engine has no compiler and calls run on the torch row"
            found.append(Advice(what, f"pip install '{name}>={wanted}'", fatal=name == "torch"))
    if "error" in probed and reports.version_of("torch"):
        remedy = "reinstall torch: pip install --force-reinstall torch"
        found.append(Advice(f"torch does not import: {probed['error']}", remedy, fatal=True))
    return found


def _isa() -> list[Advice]:
    try:
        device = target.detect("cpu")
    except ValueError as error:
        return [Advice(f"POLYFLASH_CPU_ISA: {error}", "unset POLYFLASH_CPU_ISA", fatal=True)]
    absent = sorted(device.features - target.cpu_flags())
    if env.CPU_ISA.read() and absent:
        what = f"POLYFLASH_CPU_ISA asks for {', '.join(absent)}, which this CPU lacks: calls end in a crash"
        return [Advice(what, "unset POLYFLASH_CPU_ISA")]
    return []


def _cache() -> list[Advice]:
    if env.NO_CACHE.is_set():
        return [Advice("every process compiles its kernels anew", f"unset {env.NO_CACHE.name}")]
    from polyflash.backends.cpu import store

    info = store.info()
    if info.refusal:
        remedy = f"chmod go-w {info.path}, or set {env.CACHE_DIR.name} to a folder of your own"
        return [Advice(f"the kernel cache is not used: {info.refusal}", remedy)]
    trouble = store.trouble()
    if trouble:
        remedy = f"set {env.CACHE_DIR.name} to a folder you can write to"
        return [Advice(f"the kernel cache cannot be written: {trouble}", remedy)]
    return []


def _tuned() -> list[Advice]:
    """A tuned file of this CPU that is there and not believed."""
    from polyflash.tuning import store

    try:
        said = store.report(target.detect("cpu"))
    except ValueError:  # of the instruction set, which `_isa` tells
        return []
    remedy = "polyflash tune again, or remove the file"
    return [Advice(said, remedy)] if "ignored" in said or "of other versions" in said else []


def _threads(threads: int) -> list[Advice]:
    """Settings that make torch's threads stall, or keep cores from ours."""
    from polyflash.backends.cpu import cores

    found = []
    limits = (("the CPU quota", cores.quota_threads()), ("the affinity mask", cores.allowed()))
    for name, most in limits:
        if threads > most:
            what = f"torch runs {threads} threads where {name} has room for {most}: its own operations stall"
            found.append(Advice(what, f"set OMP_NUM_THREADS={most}, or torch.set_num_threads({most})"))
            break
    if env.OMP_WAIT_POLICY.read().lower() == "active":
        what = "idle threads of torch keep their cores busy (OMP_WAIT_POLICY=active)"
        found.append(Advice(what, "unset OMP_WAIT_POLICY"))
    tied = [v.name for v in (env.OMP_PROC_BIND, env.GOMP_CPU_AFFINITY) if v.is_set()]
    if tied:
        what = f"{' and '.join(tied)} ties the calling thread to one core, and the CPU engine with it"
        found.append(Advice(what, f"unset {' '.join(tied)}"))
    return found


def _triton(probed: dict[str, Any]) -> list[Advice]:
    """What its first launch on a GPU would miss: Triton builds launchers with a C compiler."""
    if not probed.get("cuda"):
        return []
    if not probed.get("gpus"):
        return _hidden_gpu(probed)
    version, wanted = reports.version_of("triton"), reports.PACKAGES["triton"]
    if not version or _older(version, wanted):
        what = f"triton {version} is older than {wanted}" if version else "triton is not installed"
        return [Advice(f"{what}, so calls on a GPU run on the torch row", f"pip install 'triton>={wanted}'")]
    found, compiler = [], env.CC.read()
    if not any(map(shutil.which, (compiler,) if compiler else ("gcc", "clang"))):
        what = f"CC={compiler} is no program" if compiler else "no C compiler is here (gcc, clang)"
        remedy = (
            "unset CC" if compiler and shutil.which("gcc") else "apt install gcc (Fedora: dnf install gcc)"
        )
        found.append(Advice(f"{what}, and Triton builds its launchers with one", remedy))
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        what = f"{header} is not here, and Triton's launchers include it"
        found.append(Advice(what, "apt install python3-dev (Fedora: dnf install python3-devel)"))
    if not probed.get("hip") and not env.TRITON_LIBCUDA_PATH.read() and not find_library("cuda"):
        what = "the loader's cache has no libcuda.so.1, where Triton looks for it"
        found.append(Advice(what, "sudo ldconfig, or set TRITON_LIBCUDA_PATH to the folder it lies in"))
    return found


def _hidden_gpu(probed: dict[str, Any]) -> list[Advice]:
    """A GPU's driver is here, and torch, which is built for one, sees none."""
    built = f"torch is built for {'ROCm' if probed.get('hip') else 'CUDA'} {probed['cuda']} and sees no GPU"
    if probed.get("hip") and os.path.exists(_AMD_DRIVER):
        remedy = "sudo usermod -aG render,video $USER, and log in again"
        return [Advice(f"{built}, though {_AMD_DRIVER} is here", remedy)]
    if not probed.get("hip") and os.path.exists(_NVIDIA_DRIVER):
        remedy = "update the driver, or install a torch for the CUDA that nvidia-smi names"
        return [Advice(f"{built}, though {_NVIDIA_DRIVER} is here", remedy)]
    return []


def _older(version: str, wanted: str) -> bool:
    numbers = [[int(n) for n in re.findall(r"\d+", text)[:2]] for text in (version, wanted)]
    return numbers[0] < numbers[1]


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


def _print_end(rows: list[dict[str, Any]], advice: list[Advice], seconds: float) -> None:
    for a in advice:
        print(f"{'error' if a.fatal else 'note'}: {a.what}\n  remedy: {a.remedy}")
    failed = sum(case["state"] == FAILED for row in rows for case in row["cases"])
    fit = not failed and not any(a.fatal for a in advice)
    print(
        f"{'all well' if fit else f'{failed} cases failed' if failed else 'nothing can run'}, {seconds:.1f} s"
    )


if __name__ == "__main__":
    from polyflash.backends import TABLE

    for row in TABLE:
        if row.backend == sys.argv[1]:
            print(json.dumps(examine(row)), flush=True)
