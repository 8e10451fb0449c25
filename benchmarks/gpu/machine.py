"""The machine under the GPU suite: what it is, its clock and power while it works, and its two ceilings."""

from __future__ import annotations

import contextlib
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import polyflash
from benchmarks.gpu.timing import Device
from polyflash.bench.timing import median

_PACKAGES = ("torch", "triton", "numpy", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "sageattention")
_QUERY = "clocks.sm,power.draw,temperature.gpu"


def facts(device: Device) -> dict[str, Any]:
    """Everything a figure must be quoted with."""
    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "polyflash": polyflash.__version__,
        "commit": commit(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    if device.is_cuda:
        p = torch.cuda.get_device_properties(device.name)
        found |= {
            "device": p.name,
            "arch": f"sm{p.major}{p.minor}",
            "cores": p.multi_processor_count,
            "memory_bytes": p.total_memory,
            "l2_bytes": getattr(p, "L2_cache_size", 0),
            "devices": torch.cuda.device_count(),
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _smi("driver_version"),
        }
    return found


def commit() -> str:
    """Of the checkout this runs from, with a + if files differ; "" without git or outside a checkout."""
    root = Path(polyflash.__file__).parents[2]
    if shutil.which("git") is None or not (root / ".git").exists():
        return ""
    git = ["git", "-c", f"safe.directory={root}", "-C", str(root)]
    head = _said([*git, "rev-parse", "--short", "HEAD"])
    return head + ("+" if head and _said([*git, "status", "--porcelain", "-uno"]) else "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _said(command: list[str]) -> str:
    """The output of a program, without its last newline; "" if it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _smi(fields: str) -> str:
    lines = _said(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    return lines.splitlines()[0].strip() if lines else ""


@dataclass
class Sensors:
    """SM clock (MHz), power (W) and temperature (°C), read while work is queued: through NVML if Python has
    it, else nvidia-smi, else nothing."""

    handle: Any = None
    nvml: Any = None
    readings: list[tuple[float, float, float]] = field(default_factory=list)

    @staticmethod
    def of(device: Device) -> Sensors:
        if not device.is_cuda:
            return Sensors()
        try:
            import pynvml

            pynvml.nvmlInit()
            unique = str(getattr(torch.cuda.get_device_properties(device.name), "uuid", ""))
            with contextlib.suppress(pynvml.NVMLError):
                return Sensors(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{unique}".encode()), pynvml)
            return Sensors(pynvml.nvmlDeviceGetHandleByIndex(0), pynvml)
        except Exception:  # a driver library may be absent, broken or forbidden: figures go without
            return Sensors(handle="nvidia-smi") if shutil.which("nvidia-smi") else Sensors()

    def read(self) -> None:
        if self.nvml is not None:
            with contextlib.suppress(self.nvml.NVMLError):
                self.readings.append(
                    (
                        float(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)),
                        self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3,
                        float(self.nvml.nvmlDeviceGetTemperature(self.handle, 0)),
                    )
                )
        elif self.handle and not self.readings:  # a program of its own takes a tenth of a second
            with contextlib.suppress(ValueError):
                clock, watts, degrees = (float(x) for x in _smi(_QUERY).split(","))
                self.readings.append((clock, watts, degrees))

    def taken(self) -> dict[str, float]:
        """Medians since the last call of this; {} without readings."""
        found, self.readings = self.readings, []
        names = ("sm_mhz", "watts", "celsius")
        return {n: median([r[i] for r in found]) for i, n in enumerate(names)} if found else {}


def command_line() -> str:
    """As typed, without the clock time that a supervisor gives to a measuring process."""
    words = sys.argv[1:]
    if "--until" in words:
        words = words[: words.index("--until")]
    return shlex.join(["python", "-m", "benchmarks.gpu", *words])
