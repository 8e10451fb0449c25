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
from tempfile import TemporaryFile
from typing import Any

from polyflash import env, target
from polyflash.quant.scheme import NAMED, Scheme

_INT8 = Scheme(compute="int8")
_FP8 = Scheme(dtype="fp8_e4m3", granularity="head", compute="fp8")
SCHEMES = NAMED | {"int8-products": (_INT8, _INT8), "fp8-products": (_FP8, _FP8)}
FEATURES: dict[str, dict[str, Any]] = {"causal": {"causal": True}, "window": {"window": (255, None)}}
FEATURES |= {"mask": {"mask": "b1qk"}, "bias": {"bias": "hqk"}, "alibi": {"alibi": "h"}}
FEATURES |= {"softcap": {"softcap": 30.0}, "sinks": {"sinks": True}, "segments": {"segments": 3}}
FEATURES |= {"kv_lens": {}, "paged": {"page_size": 16}, "dropout": {}}
FEATURES |= {name: {} for name in SCHEMES}  # k and v as such codes
CODES_PAGE = 64  # tokens, that all schemes' groups fit
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
    # A pipe that nobody reads yet would fill up, and the process wait for ever.
    with (
        TemporaryFile("w+", errors="replace") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as process,
    ):
        for line in process.stdout or ():
            said = json.loads(line)
            if "error" in said:
                errors.append(said["error"])
            else:
                print(f"{said['seconds']:7.1f} s  {said['kernel']}", flush=True)
                count += 1
        process.wait()
        complaints.seek(0)
        complaint = complaints.read().strip()
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
    from polyflash.workloads import Workload, make

    changes: dict[str, Any] = {}
    quants = [name for name in job["features"] if name in SCHEMES]
    paged = "paged" in job["features"]
    for name in job["features"]:
        changes |= FEATURES[name]
    if "kv_lens" in job["features"] or paged:
        changes["kv_lens"] = (keys,)
    if paged and rows > 1:
        changes["members"] = ((rows, keys),)
    if paged and quants:  # a cache makes the pages
        changes |= {"page_size": 0, "kv_lens": None, "members": ()}
    (heads, kv_heads), (head_dim, head_dim_v) = job["heads"], job["head_dim"]
    workload = Workload(
        "warmup", frozenset(), 1, heads, kv_heads, rows, keys, head_dim, head_dim_v, job["dtype"], **changes
    )
    q, k, v, options = make(workload, device=job["device"])
    if "dropout" in job["features"]:
        options |= {"dropout_p": 0.1, "dropout_seed": 0}
    if paged and quants:
        for name in quants:
            _attend_cache(name, q, k, v, options)
        return
    for name in quants or ("",):
        _attend(name, q, k, v, options, paged=paged, grad=job["grad"] and rows == keys)


def _attend(name: str, q: Any, k: Any, v: Any, options: dict[str, Any], *, paged: bool, grad: bool) -> None:
    """One call, over codes if a scheme is named; with `grad` one more and its gradients."""
    import polyflash

    function: Any = polyflash.attention_paged if paged else polyflash.attention

    def call(q: Any, *kv: Any) -> Any:
        pairs = zip(kv, SCHEMES[name], strict=True) if name else ()
        return function(q, *([polyflash.quantize(*pair) for pair in pairs] or kv), **options)

    call(q, k, v)
    if grad:
        call(*(x.detach().requires_grad_() for x in (q, k, v))).sum().backward()


def _attend_cache(name: str, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """Append keys to a cache of codes, as many as precede the rows, then those of the rows, and attend."""
    import polyflash
    from polyflash.kvcache import KVCache

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    rows, (keys, heads, width) = len(q), k.shape
    size = {"head_dim_v": v.shape[2], "dtype": k.dtype, "device": k.device, "quant": SCHEMES[name]}
    cache = KVCache(-(-keys // CODES_PAGE), CODES_PAGE, heads, width, **size)
    request = cache.add()
    for some in (slice(0, keys - rows), slice(keys - rows, keys)):
        cache.append(request, k[some], v[some], counts=len(k[some]))
    options |= {"page_table": cache.page_table(request), "kv_lens": cache.kv_lens(request)}
    if rows > 1:
        options["cu_seqlens_q"] = cache.kv_lens(request).new_tensor([0, rows])
    polyflash.attention_paged(q, *cache.pools(0), **options)


if __name__ == "__main__":
    for _line in _make(json.loads(sys.argv[1])):
        print(json.dumps(_line), flush=True)
