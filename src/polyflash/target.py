"""Devices as plain data, so that plans for any device can be made on any machine.

`detect()` is the only function in the package that looks at hardware."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import subprocess
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from polyflash import env
from polyflash.errors import described, spec_error

# Oldest version whose code generation is tested.
MINIMUM_PACKAGES = {"numba": (0, 62), "triton": (3, 6), "wgpu": (0, 32)}
# Builds for other hardware and nightlies: the same import under another name.
_OTHER_NAMES = {"triton": ("pytorch-triton-rocm", "triton-rocm", "pytorch-triton", "triton-windows")}

CPU_FEATURES = frozenset(("avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16"))
_AVX2 = frozenset(("avx2", "fma", "f16c"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def remedy(package: str) -> str:
    """The command to type where a package is missing or too old; "" for a package that is not ours."""
    oldest = ".".join(map(str, MINIMUM_PACKAGES.get(package, ())))
    return f"pip install '{package}>={oldest}'" if oldest else ""


@dataclass(frozen=True, slots=True)
class Target:
    """A device: `name` such as "cpu:avx512" or "cuda:sm90", what it can do, and its limits."""

    name: str
    features: frozenset[str] = frozenset()
    cores: int = 1
    l2_bytes: int = 1 << 20
    shared_bytes: int = 0  # memory that a GPU's thread block may share, at most
    packages: tuple[tuple[str, str], ...] = field(default=())  # importable package, its version or why not

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return "+".join((self.name, *sorted(self.features)))

    @property
    def kind(self) -> str:
        """The torch device type: cpu, cuda, ..."""
        return self.name.partition(":")[0]

    @property
    def arch(self) -> str:
        return self.name.partition(":")[2]

    @property
    def warp_size(self) -> int:
        """Threads that run in step: 64 on AMD's gfx9, 32 on other GPUs, 1 elsewhere."""
        if self.kind not in ("cuda", "hip"):
            return 1
        return 64 if self.arch.startswith("gfx9") else 32

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
        if release(version) < wanted:
            return f"{version} is older than {'.'.join(map(str, wanted))}"
        return ""


# Multiprocessors, and L2 and shared memory per block in KiB, of a typical device as its driver reports them:
# for plans of what is not here, and for what a torch does not say. RDNA counts pairs of compute units; L2 of
# CDNA 3 and 4 is that of one die.
_GPUS = (
    ("cuda:sm80", 108, 40 << 10, 163),  # A100
    ("cuda:sm86", 84, 6 << 10, 99),  # RTX A6000
    ("cuda:sm89", 128, 72 << 10, 99),  # RTX 4090
    ("cuda:sm90", 132, 50 << 10, 227),  # H100
    ("cuda:sm100", 148, 126 << 10, 227),  # B200
    ("cuda:sm120", 170, 96 << 10, 99),  # RTX 5090
    ("hip:gfx90a", 104, 8 << 10, 64),  # MI250, one of its two dies
    ("hip:gfx942", 304, 4 << 10, 64),  # MI300X
    ("hip:gfx950", 256, 4 << 10, 160),  # MI355X
    ("hip:gfx1100", 48, 6 << 10, 64),  # RX 7900 XTX
    ("hip:gfx1201", 32, 8 << 10, 64),  # RX 9070 XT
)
# Cores of the GPU of the plain chip, which a Pro, Max or Ultra has more of.
_APPLE_GPUS = (("m1", 8), ("m2", 10), ("m3", 10), ("m4", 10), ("m5", 10))
_LEAST_SHARED_BYTES = 48 << 10  # every GPU has that much

KNOWN = (
    Target("cpu:avx512", cores=8),
    Target("cpu:avx2", cores=8, l2_bytes=512 << 10),
    Target("cpu:neon", cores=8),
    Target("cpu:generic", cores=4),
    *(
        Target(name, cores=cores, l2_bytes=l2_kib << 10, shared_bytes=shared_kib << 10)
        for name, cores, l2_kib, shared_kib in _GPUS
    ),
    Target("webgpu", cores=32, shared_bytes=16 << 10),  # any GPU with a driver for it: the least there is
    *(Target(f"metal:{chip}", cores=n, shared_bytes=32 << 10) for chip, n in _APPLE_GPUS),
)


def parse(text: str) -> Target:
    """A target by name, for planning on a machine that lacks it: "cuda:sm90", "cpu:avx512+avx512_bf16"."""
    name, *features = text.split("+") if isinstance(text, str) else ("",)
    known = [t for t in KNOWN if t.name == name]
    if not known or not CPU_FEATURES.issuperset(features):
        names = ", ".join(dict.fromkeys(t.name for t in KNOWN))
        change = f"Add CPU features with '+': {', '.join(sorted(CPU_FEATURES))}."
        raise spec_error("target", described(text), f"one of {names}", change)
    return replace(known[-1], features=frozenset(features))


@lru_cache(maxsize=16)
def detect(device_type: str, index: int = 0) -> Target:
    """The device of this machine that tensors of `device_type` live on."""
    packages = tuple((name, _version(name)) for name in MINIMUM_PACKAGES)
    if device_type == "cpu":
        arch, features = host_arch(), cpu_flags() & CPU_FEATURES
        if forced := env.CPU_ISA.read():
            chosen = parse(f"cpu:{forced}")
            arch, features = chosen.arch, chosen.features
        return Target(f"cpu:{arch}", features, len(usable_cpus()), _l2_bytes(), packages=packages)
    if device_type == "cuda":
        import torch

        return _gpu(torch.cuda.get_device_properties(index), bool(torch.version.hip), packages)
    if device_type == "mps":
        return _apple_gpu(packages)
    return Target(f"{device_type}:generic", packages=packages)


def _apple_gpu(packages: tuple[tuple[str, str], ...]) -> Target:
    """The GPU of this Mac, by its CPU's name: both are one chip. An unknown one is taken for the first."""
    found = re.search(r"apple (m\d+)", _sysctl("machdep.cpu.brand_string").lower())
    name = f"metal:{found[1] if found else 'generic'}"
    like = next((known for known in KNOWN if known.name == name), parse("metal:m1"))
    return replace(like, name=name, packages=packages)


def _sysctl(name: str) -> str:
    """A Mac's answer about itself; "" elsewhere."""
    try:
        asked = subprocess.run(("/usr/sbin/sysctl", "-n", name), capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()


def of(x: Any, asked: str | Target | None = None) -> Target:
    """The target `asked` for, or that of a tensor's device; a CPU for tensors without data."""
    if asked is None:
        return detect("cpu" if x.device.type == "meta" else x.device.type, x.device.index or 0)
    return asked if isinstance(asked, Target) else parse(asked)


def _gpu(properties: object, is_hip: bool, packages: tuple[tuple[str, str], ...]) -> Target:
    """Describes a device by what torch says of it. What this torch does not say is that of a known device
    like it, of an unknown one the least there is."""

    def said(name: str) -> int:
        return int(getattr(properties, name, 0) or 0)

    if is_hip:
        name = f"hip:{getattr(properties, 'gcnArchName', '').partition(':')[0]}"
    else:
        name = f"cuda:sm{said('major')}{said('minor')}"
    least = Target(name, shared_bytes=_LEAST_SHARED_BYTES)
    like = next((known for known in KNOWN if known.name == name), least)
    return Target(
        name,
        cores=said("multi_processor_count") or like.cores,
        l2_bytes=said("L2_cache_size") or like.l2_bytes,
        shared_bytes=said("shared_memory_per_block_optin")
        or max(like.shared_bytes, said("shared_memory_per_block")),
        packages=packages,
    )


@lru_cache(maxsize=1)
def host_arch() -> str:
    """The instruction set of this machine's CPU, whatever is simulated."""
    flags = cpu_flags()
    if flags.issuperset(_AVX512):
        return "avx512"
    if flags.issuperset(_AVX2):
        return "avx2"
    return "neon" if platform.machine().lower() in ("arm64", "aarch64") else "generic"


def usable_cpus() -> list[int]:
    """The hardware threads this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Instruction set flags in Linux's spelling, read without a compiler: a first call must be quick."""
    if flags := _cpuinfo("flags", "Features"):
        return frozenset(flags.split())
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
    return installed_version(package) or "0" if importlib.util.find_spec(package) else ""


def installed_version(package: str) -> str:
    """The version that metadata gives a package under any of its names, "" if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    for name in (package, *_OTHER_NAMES.get(package, ())):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])


def cpu_model() -> str:
    """The CPU's own name for itself, "" where the system does not tell."""
    return _cpuinfo("model name")


def cpu_name() -> str:
    """The CPU's own name for itself, as far as the system tells."""
    return cpu_model() or platform.processor() or platform.machine()


def _cpuinfo(*names: str) -> str:
    """The value of the first line with one of these names in Linux's list of CPUs; "" without one."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""
