"""Every environment variable that polyflash reads. No other module touches `os.environ`."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, its value when unset, and what it does."""

    name: str
    doc: str
    default: str = ""

    def read(self) -> str:
        return os.environ.get(self.name, self.default)

    def is_set(self) -> bool:
        return self.read().lower() not in ("", "0", "false", "no")


BACKEND = Variable("POLYFLASH_BACKEND", "backend to use when neither backend= nor use_backend() names one")
CACHE_DIR = Variable("POLYFLASH_CACHE_DIR", "folder of compiled kernels (default: the user's cache folder)")
NO_CACHE = Variable("POLYFLASH_NO_CACHE", "1: compile in every process, read and write no kernel cache")
CPU_ISA = Variable(
    "POLYFLASH_CPU_ISA", "instruction set to plan and compile for, such as avx512 or avx512+avx512_bf16"
)
TRITON_INTERPRET = Variable(
    "TRITON_INTERPRET", "1: Triton kernels run in its interpreter, on CPU tensors too (Triton's own name)"
)
WEBGPU_CPU = Variable(
    "POLYFLASH_WEBGPU_CPU", "1: the WebGPU engine may run on a CPU that executes shaders (Mesa's lavapipe)"
)
WEBGPU_ADAPTER = Variable("POLYFLASH_ADAPTER", "part of the name of the GPU that the WebGPU engine takes")
LOG = Variable(
    "POLYFLASH_LOG", "1: say on stderr which kernel is compiled and how long it took, as on a terminal"
)
NO_COLOR = Variable("NO_COLOR", "any value: no colour on the command line (no-color.org)")

XDG_CACHE_HOME = Variable("XDG_CACHE_HOME", "folder of this user's caches (default: ~/.cache)")
LOCALAPPDATA = Variable("LOCALAPPDATA", "the same on Windows (default: the home folder)")

_ENGINES = (CPU_ISA, TRITON_INTERPRET, WEBGPU_CPU, WEBGPU_ADAPTER)
ALL = (BACKEND, CACHE_DIR, NO_CACHE, *_ENGINES, LOG, NO_COLOR, XDG_CACHE_HOME, LOCALAPPDATA)

# Read by `polyflash env` and `polyflash doctor` alone, to say what they do to torch's threads and to Triton.
OMP_NUM_THREADS = Variable("OMP_NUM_THREADS", "threads of torch, hence of the CPU engine")
OMP_WAIT_POLICY = Variable("OMP_WAIT_POLICY", "active: idle threads of torch keep their cores busy")
OMP_PROC_BIND = Variable("OMP_PROC_BIND", "true, close, spread: threads of torch are tied to cores")
GOMP_CPU_AFFINITY = Variable("GOMP_CPU_AFFINITY", "cores that threads of torch are tied to")
CC = Variable("CC", "C compiler with which Triton builds its launchers (default: gcc, else clang)")
TRITON_LIBCUDA_PATH = Variable("TRITON_LIBCUDA_PATH", "folder in which Triton finds libcuda.so.1")
PYTORCH_MPS_FAST_MATH = Variable("PYTORCH_MPS_FAST_MATH", "1: torch compiles Metal in fast math")
_OF_TORCH = (OMP_NUM_THREADS, OMP_WAIT_POLICY, OMP_PROC_BIND, GOMP_CPU_AFFINITY)
OF_OTHERS = (*_OF_TORCH, CC, TRITON_LIBCUDA_PATH, PYTORCH_MPS_FAST_MATH)


def user_cache_home() -> str:
    """The folder below which this user's caches live, by the platform's convention."""
    if os.name == "nt":
        return LOCALAPPDATA.read() or os.path.expanduser("~")
    return XDG_CACHE_HOME.read() or os.path.join(os.path.expanduser("~"), ".cache")
