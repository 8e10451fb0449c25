"""Report of the CPU engine: cores, its cache of compiled kernels, and what keeps threads from their cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyflash import env
from polyflash.advice import Advice
from polyflash.backends.cpu import cores, store


def facts() -> dict[str, Callable[[], dict[str, Any]]]:
    return {"cores": _cores, "cache": _cache}


def kernel_cache() -> tuple[Any, bytes]:
    from polyflash.backends.cpu import runtime

    try:
        return store, runtime.origin()
    except ImportError:  # no compiler says what it would make
        return store, b""


def _cores() -> dict[str, Any]:
    most = cores.quota_threads()
    return {
        "present": cores.present(),
        "allowed": cores.allowed(),
        "quota": cores.quota(),
        "threads the quota lets run": most if most < cores.UNLIMITED else None,
    }


def _cache() -> dict[str, Any]:
    info = store.info()
    return {"path": info.path, "entries": info.entries, "bytes": info.bytes, "refusal": info.refusal}


def advice(probed: Mapping[str, Any]) -> Iterator[Advice]:
    """A cache that is not used, and settings that make torch's threads stall or keep cores from ours."""
    info = None if env.NO_CACHE.is_set() else store.info()
    if info is None:
        yield Advice("every process compiles its kernels anew", f"unset {env.NO_CACHE.name}")
    elif info.refusal:
        remedy = f"chmod go-w {info.path}, or set {env.CACHE_DIR.name} to a folder of your own"
        yield Advice(f"the kernel cache is not used: {info.refusal}", remedy)
    elif trouble := store.trouble():
        remedy = f"set {env.CACHE_DIR.name} to a folder you can write to"
        yield Advice(f"the kernel cache cannot be written: {trouble}", remedy)
    threads = int(probed.get("threads", 1))
    limits = (("the CPU quota", cores.quota_threads()), ("the affinity mask", cores.allowed()))
    for name, most in [limit for limit in limits if threads > limit[1]][:1]:
        what = f"torch runs {threads} threads where {name} has room for {most}: its own operations stall"
        yield Advice(what, f"set OMP_NUM_THREADS={most}, or torch.set_num_threads({most})")
    if env.OMP_WAIT_POLICY.read().lower() == "active":
        what = "idle threads of torch keep their cores busy (OMP_WAIT_POLICY=active)"
        yield Advice(what, "unset OMP_WAIT_POLICY")
    if tied := [v.name for v in (env.OMP_PROC_BIND, env.GOMP_CPU_AFFINITY) if v.is_set()]:
        what = f"{' and '.join(tied)} ties the calling thread to one core, and the CPU engine with it"
        yield Advice(what, f"unset {' '.join(tied)}")
