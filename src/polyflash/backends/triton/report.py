"""Report of the Triton engine: what its first launch on a GPU would miss, as it builds launchers in C."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from ctypes.util import find_library
from typing import Any

from polyflash import env, target
from polyflash.advice import Advice

_AMD_DRIVER, _NVIDIA_DRIVER = "/dev/kfd", "/proc/driver/nvidia/version"


def facts() -> dict[str, Callable[[], dict[str, Any]]]:
    return {"triton": _triton}


def kernel_cache() -> None:
    """Triton keeps its kernels in a cache of its own."""


def _triton() -> dict[str, Any]:
    return {
        "version": target.installed_version("triton"),
        "interpreted": env.TRITON_INTERPRET.is_set(),
        "compiler": _compiler(),
    }


def _compiler() -> str:
    named = env.CC.read()
    return next(filter(None, map(shutil.which, (named,) if named else ("gcc", "clang"))), "")


def advice(probed: Mapping[str, Any]) -> Iterator[Advice]:
    if not probed.get("cuda"):
        return
    if not probed.get("gpus"):
        yield from _hidden_gpu(probed)
        return
    version, wanted = target.installed_version("triton"), target.MINIMUM_PACKAGES["triton"]
    if not version or target.release(version) < wanted:
        oldest = ".".join(map(str, wanted))
        what = f"triton {version} is older than {oldest}" if version else "triton is not installed"
        yield Advice(f"{what}, so calls on a GPU run on the torch row", target.remedy("triton"))
        return
    if not _compiler():
        named = env.CC.read()
        what = f"CC={named} is no program" if named else "no C compiler is here (gcc, clang)"
        remedy = "unset CC" if named and shutil.which("gcc") else "apt install gcc (Fedora: dnf install gcc)"
        yield Advice(f"{what}, and Triton builds its launchers with one", remedy)
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        what = f"{header} is not here, and Triton's launchers include it"
        yield Advice(what, "apt install python3-dev (Fedora: dnf install python3-devel)")
    if not probed.get("hip") and not env.TRITON_LIBCUDA_PATH.read() and not find_library("cuda"):
        what = "the loader's cache has no libcuda.so.1, where Triton looks for it"
        yield Advice(what, "sudo ldconfig, or set TRITON_LIBCUDA_PATH to the folder it lies in")


def _hidden_gpu(probed: Mapping[str, Any]) -> Iterator[Advice]:
    """A GPU's driver is here, and torch, which is built for one, sees none."""
    built = f"torch is built for {'ROCm' if probed.get('hip') else 'CUDA'} {probed['cuda']} and sees no GPU"
    if probed.get("hip") and os.path.exists(_AMD_DRIVER):
        remedy = "sudo usermod -aG render,video $USER, and log in again"
        yield Advice(f"{built}, though {_AMD_DRIVER} is here", remedy)
    if not probed.get("hip") and os.path.exists(_NVIDIA_DRIVER):
        remedy = "update the driver, or install a torch for the CUDA that nvidia-smi names"
        yield Advice(f"{built}, though {_NVIDIA_DRIVER} is here", remedy)
