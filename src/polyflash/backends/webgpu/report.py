"""Report of the WebGPU engine: which adapters are here, and what is missing where none is."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyflash import env, target
from polyflash.advice import Advice
from polyflash.backends.webgpu import device

_LAVAPIPE = (
    "apt install mesa-vulkan-drivers libvulkan1 (Fedora: dnf install mesa-vulkan-drivers vulkan-loader)"
)


def facts() -> dict[str, Callable[[], dict[str, Any]]]:
    return {"webgpu": _webgpu}


def kernel_cache() -> None:
    """Drivers keep compiled shaders in caches of their own."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what drivers write to stderr, while they are looked for, out of a report."""
    try:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is no stderr
        yield
        return
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _webgpu() -> dict[str, Any]:
    if not target.installed_version("wgpu"):
        return {"version": "", "adapters": [], "chosen": ""}
    with _quiet():
        usable = [adapter.summary for adapter in device.usable()]
    return {
        "version": target.installed_version("wgpu"),
        "adapters": [f"{adapter.summary};" for adapter in device.adapters()],
        "chosen": usable[0] if usable else device.why_none(),
    }


def advice(probed: Mapping[str, Any]) -> Iterator[Advice]:
    """Obstacles for those who have installed wgpu; in the way of others is nothing."""
    version = target.installed_version("wgpu")
    if not version:
        return
    if target.release(version) < target.MINIMUM_PACKAGES["wgpu"]:
        yield Advice(
            f"wgpu {version} is older than 0.32, so the webgpu rows do not run", target.remedy("wgpu")
        )
        return
    with _quiet():
        why = device.why_none()
    if not why:
        return
    if env.WEBGPU_ADAPTER.read():
        yield Advice(f"webgpu: {why}", f"unset {env.WEBGPU_ADAPTER.name}, or name another adapter")
    elif "a CPU that executes shaders" in why:
        yield Advice(
            f"webgpu: {why}", f"install the driver of a GPU, or set {env.WEBGPU_CPU.name}=1 for tests"
        )
    elif platform.system() == "Linux":
        remedy = f"install the driver of your GPU; for tests without one, Mesa's lavapipe: {_LAVAPIPE}"
        yield Advice(f"webgpu: {why.replace(' `polyflash doctor` says how to get one', '')}", remedy)
    else:
        yield Advice(f"webgpu: {why}", "update the driver of the graphics card")
