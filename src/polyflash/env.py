"""Every environment variable polyflash reads. Nothing else in the package touches `os.environ`."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, its value when unset, and what it does."""

    name: str
    default: str
    doc: str

    def read(self) -> str:
        return os.environ.get(self.name, self.default)

    def is_set(self) -> bool:
        return self.read().lower() not in ("", "0", "false", "no")


BACKEND = Variable(
    "POLYFLASH_BACKEND", "", "backend to use when neither backend= nor use_backend() names one"
)
CACHE_DIR = Variable(
    "POLYFLASH_CACHE_DIR", "", "folder of compiled kernels (default: the user's cache folder)"
)
NO_CACHE = Variable("POLYFLASH_NO_CACHE", "", "1: compile in every process, read and write no kernel cache")
CPU_ISA = Variable(
    "POLYFLASH_CPU_ISA", "", "instruction set to plan and compile for, such as avx512 or avx512+avx512_bf16"
)
NO_COLOR = Variable("NO_COLOR", "", "any value: no colour on the command line (no-color.org)")

ALL = (BACKEND, CACHE_DIR, NO_CACHE, CPU_ISA, NO_COLOR)


def user_cache_home() -> str:
    """The folder below which this user's caches live, by the platform's convention."""
    if os.name == "nt":
        return os.environ.get("LOCALAPPDATA", os.path.expanduser("~"))
    return os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
