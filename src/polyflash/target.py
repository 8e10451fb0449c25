"""What a device is, as plain data, so that plans for any device can be made on any machine.

`detect()` is the only function in the package that looks at hardware.
"""

from __future__ import annotations

import importlib.util
import platform
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache

from polyflash import env
from polyflash.errors import described, spec_error

MINIMUM_PACKAGES = {"numba": (0, 60)}  # oldest version whose code generation is tested

CPU_FEATURES = frozenset(("avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16"))
_AVX2 = frozenset(("avx2", "fma", "f16c"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Target:
    """A device: `name` such as "cpu:avx512" or "cuda:sm90", what it can do, and its limits (bytes,
    counts)."""

    name: str
    features: frozenset[str] = frozenset()
    cores: int = 1
    l2_bytes: int = 1 << 20
    packages: tuple[tuple[str, str], ...] = field(default=())  # importable package, its version or why not

    @property
    def kind(self) -> str:
        """The torch device type: cpu, cuda, ..."""
        return self.name.partition(":")[0]

    @property
    def arch(self) -> str:
        return self.name.partition(":")[2]

    def has_package(self, name: str) -> bool:
        return not self.why_no_package(name)

    def why_no_package(self, name: str) -> str:
        """Why `name` cannot be used here; empty if it can. A simulated target has every package."""
        if not self.packages:
            return ""
        version = dict(self.packages).get(name, "")
        if not version:
            return "not installed"
        wanted = MINIMUM_PACKAGES.get(name, ())
        if tuple(int(x) for x in re.findall(r"\d+", version)[:2]) < wanted:
            return f"{version} is older than {'.'.join(map(str, wanted))}"
        return ""


KNOWN = (
    Target("cpu:avx512", cores=8),
    Target("cpu:avx2", cores=8, l2_bytes=512 << 10),
    Target("cpu:neon", cores=8),
    Target("cpu:generic", cores=4),
    Target("cuda:sm80", cores=108),
    Target("cuda:sm89", cores=128),
    Target("cuda:sm90", cores=132),
    Target("cuda:sm100", cores=148),
    Target("hip:gfx942", cores=304),
    Target("mps:apple", cores=10),
)


def parse(text: str) -> Target:
    """A target by name, for planning on a machine that lacks it: "cuda:sm90", "cpu:avx512+avx512_bf16"."""
    name, *features = text.split("+") if isinstance(text, str) else ("",)
    known = [t for t in KNOWN if t.name == name]
    if not known or not CPU_FEATURES.issuperset(features):
        names = ", ".join(dict.fromkeys(t.name for t in KNOWN))
        change = f"Add CPU features with '+': {', '.join(sorted(CPU_FEATURES))}."
        raise spec_error("target", got=described(text), wanted=f"one of {names}", change=change)
    return replace(known[-1], features=frozenset(features))


@lru_cache(maxsize=16)
def detect(device_type: str, index: int = 0) -> Target:
    """The device of this machine that tensors of `device_type` live on."""
    packages = tuple((name, _version(name)) for name in ("numba", "triton"))
    if device_type == "cpu":
        return replace(_detect_cpu(), packages=packages)
    if device_type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(index)
        arch = getattr(properties, "gcnArchName", "").partition(":")[0]
        name = f"hip:{arch}" if torch.version.hip else f"cuda:sm{properties.major}{properties.minor}"
        return Target(name, cores=properties.multi_processor_count, packages=packages)
    return Target(f"{device_type}:generic", packages=packages)


@lru_cache(maxsize=1)
def host_arch() -> str:
    """The instruction set of this machine's CPU, whatever is simulated."""
    flags = cpu_flags()
    if flags.issuperset(_AVX512):
        return "avx512"
    if flags.issuperset(_AVX2):
        return "avx2"
    return "neon" if platform.machine().lower() in ("arm64", "aarch64") else "generic"


def _detect_cpu() -> Target:
    import os

    arch, features = host_arch(), cpu_flags() & CPU_FEATURES
    forced = env.CPU_ISA.read()
    if forced:
        chosen = parse(f"cpu:{forced}")
        arch, features = chosen.arch, chosen.features
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Target(f"cpu:{arch}", features, cores, _l2_bytes())


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Instruction set flags in Linux's spelling; read without importing a compiler, as a first call must be
    quick."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    try:
        import llvmlite.binding as llvm

        spelled = {"avx512bf16": "avx512_bf16", "amx-bf16": "amx_bf16"}
        return frozenset(spelled.get(k, k) for k, on in llvm.get_host_cpu_features().items() if on)
    except (ImportError, RuntimeError):
        return frozenset()


def _l2_bytes() -> int:
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index2/size", encoding="ascii") as file:
            return int(file.read().strip().rstrip("K")) << 10
    except (OSError, ValueError):
        return 1 << 20


def _version(package: str) -> str:
    """The installed version, "" if absent. Reads metadata: importing numba would cost a first call 0.2 s."""
    if importlib.util.find_spec(package) is None:
        return ""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "0"
