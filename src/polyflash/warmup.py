"""`polyflash warmup`: compiles ahead what calls of one shape need, so that none waits for a compiler.

Calls of each kind are made once, on tensors of that shape, by processes of their own: kernels compile side by
side, and stay in the caches of compiled kernels. Standard library only until a call is made."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from polyflash import env, target

FEATURES: dict[str, dict[str, Any]] = {"causal": {"causal": True}, "window": {"window": (255, None)}}
FEATURES |= {"mask": {"mask": "b1qk"}, "bias": {"bias": "hqk"}, "alibi": {"alibi": "h"}}
FEATURES |= {"softcap": {"softcap": 30.0}, "sinks": {"sinks": True}, "segments": {"segments": 3}}
FEATURES |= {"kv_lens": {}, "paged": {"page_size": 16}, "dropout": {}}
# (rows, keys) of the calls that one process makes. On a GPU, lengths decide which config is taken.
_ON_CPU = (((300, 300),), ((1, 300), (1, 2048), (16, 300)))
_ON_GPU = (
    *(((300, 300),), ((2048, 2048),), ((4096, 4096),), ((8192, 8192),), ((128, 4096),)),
    *(((1, 300), (1, 2048), (1, 32768)), ((16, 300), (16, 2048))),
)


def run(options: argparse.Namespace, *_: object) -> int:
    """Makes the calls of the shape that `options` name. Returns 1 if one of them failed."""
    from polyflash.options import UsageError, device_here

    options.device = device_here(options.device)
    if options.jobs == 0 or not (all(options.heads) and all(options.head_dim)):
        raise UsageError("--jobs, --heads, --head-dim: got 0, wanted 1 or more")
    refusal = "" if options.device != "cpu" else _refusal()
    if refusal:
        raise UsageError(refusal)
    began, compiled, errors = time.perf_counter(), 0, []
    jobs = [_job(options, calls) for calls in (_ON_CPU if options.device == "cpu" else _ON_GPU)]
    most = min(options.jobs or len(target.usable_cpus()), len(jobs))
    with ThreadPoolExecutor(most) as threads:
        for count, *complaints in threads.map(_printed, jobs):
            compiled += count
            errors += complaints
    for error in dict.fromkeys(errors):
        print(f"error: {error}", file=sys.stderr)
    told = f"{compiled} kernels compiled" if compiled else "nothing to compile"
    print(f"{told}, {time.perf_counter() - began:.1f} s, {most} processes at once")
    return 1 if errors else 0


def _refusal() -> str:
    """Why nothing can be compiled for this CPU, or nothing kept."""
    if env.NO_CACHE.is_set():
        return f"{env.NO_CACHE.name} is set, so nothing would be kept. Unset it"
    why = target.detect("cpu").why_no_package("numba")
    if why:
        return f"the CPU engine has no compiler: numba {why}. {target.remedy('numba')}"
    from polyflash.backends.cpu import store

    trouble = store.trouble()
    return f"the kernel cache cannot be written, so nothing would be kept: {trouble}" if trouble else ""


def _job(options: argparse.Namespace, calls: tuple[tuple[int, int], ...]) -> str:
    names = ("dtype", "head_dim", "heads", "features", "grad", "device")
    return json.dumps({"calls": calls, **{name: getattr(options, name) for name in names}})


def _printed(job: str) -> list[Any]:
    """Runs a job in a process and prints what it compiles, as it does; how much that was, and its errors."""
    command = [sys.executable, "-m", "polyflash.warmup", job]
    count, errors = 0, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            said = json.loads(line)
            if "error" in said:
                errors.append(said["error"])
            else:
                print(f"{said['seconds']:7.1f} s  {said['kernel']}", flush=True)
                count += 1
        complaint = process.stderr.read().strip() if process.stderr else ""
    if process.returncode and not errors:
        errors.append(complaint.splitlines()[-1] if complaint else f"exit code {process.returncode}")
    return [count, *errors]


def _make(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Makes the calls of a job; yields each kernel when the call that compiled it has ended."""
    import torch

    from polyflash import compilation
    from polyflash.errors import SpecError, UnsupportedError

    torch.set_num_threads(1)
    said: set[str] = set()
    for rows, keys in job["calls"]:
        try:
            _call(job, rows, keys)
        except (SpecError, UnsupportedError) as error:
            yield {"error": str(error)}
            return
        for kernel, seconds in list(compilation.compiled.items()):
            if kernel not in said:
                said.add(kernel)
                yield {"kernel": kernel, "seconds": seconds}


def _call(job: dict[str, Any], rows: int, keys: int) -> None:
    import polyflash
    from polyflash.workloads import Workload, make

    changes: dict[str, Any] = {}
    for name in job["features"]:
        changes |= FEATURES[name]
    if "kv_lens" in job["features"] or "paged" in job["features"]:
        changes["kv_lens"] = (keys,)
    if "paged" in job["features"] and rows > 1:
        changes["members"] = ((rows, keys),)
    (heads, kv_heads), (head_dim, head_dim_v) = job["heads"], job["head_dim"]
    workload = Workload(
        "warmup", frozenset(), 1, heads, kv_heads, rows, keys, head_dim, head_dim_v, job["dtype"], **changes
    )
    q, k, v, options = make(workload, device=job["device"])
    if "dropout" in job["features"]:
        options |= {"dropout_p": 0.1, "dropout_seed": 0}
    function: Any = polyflash.attention_paged if "paged" in job["features"] else polyflash.attention
    function(q, k, v, **options)
    if job["grad"] and rows == keys:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        function(q, k, v, **options).sum().backward()


if __name__ == "__main__":
    for _line in _make(json.loads(sys.argv[1])):
        print(json.dumps(_line), flush=True)
