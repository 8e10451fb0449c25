"""Report of the Metal engine: what a Mac's torch would miss before it compiles a kernel."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyflash import env, target
from polyflash.advice import Advice


def facts() -> dict[str, Callable[[], dict[str, Any]]]:
    return {"metal": _metal} if platform.system() == "Darwin" else {}


def kernel_cache() -> None:
    """torch keeps compiled libraries for as long as a process lives."""


def _metal() -> dict[str, Any]:
    return {"macos": platform.mac_ver()[0], "target": target.detect("mps").name}


def advice(probed: Mapping[str, Any]) -> Iterator[Advice]:
    if platform.system() != "Darwin" or platform.machine() != "arm64" or "error" in probed:
        return
    if not probed.get("mps_built"):
        yield Advice("torch is built without MPS, so nothing runs on this Mac's GPU", "pip install torch")
    elif not probed.get("mps"):
        yield Advice(
            "torch sees no MPS device: it needs macOS 14", "update macOS, or run outside a container"
        )
    if env.PYTORCH_MPS_FAST_MATH.is_set():
        what = f"{env.PYTORCH_MPS_FAST_MATH.name} lets compilers drop NaN and infinities before macOS 15"
        yield Advice(what, f"unset {env.PYTORCH_MPS_FAST_MATH.name}")
