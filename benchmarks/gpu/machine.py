"""The machine under the GPU suite: what it is, and its clock and power while it works."""

from __future__ import annotations

import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

import polyflash
from benchmarks import ROOT
from benchmarks.gpu.rows import Device
from polyflash.bench.timing import median

_PACKAGES = ("torch", "triton", "numpy", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "sageattention")


def facts(device: Device) -> dict[str, Any]:
    """Everything a figure must be quoted with."""
    found: dict[str, Any] = {
        **{"device": platform.processor() or platform.machine(), "python": platform.python_version()},
        **{"system": f"{platform.system()} {platform.machine()}", "polyflash": polyflash.__version__},
        **{"commit": commit(), "packages": {n: version for n in _PACKAGES if (version := _version(n))}},
    }
    if device.is_cuda:
        p, cuda = torch.cuda.get_device_properties(device.name), torch.version.cuda or torch.version.hip
        found |= {"device": p.name, "arch": f"sm{p.major}{p.minor}", "cores": p.multi_processor_count}
        found |= {"memory_bytes": p.total_memory, "l2_bytes": getattr(p, "L2_cache_size", 0), "cuda": cuda}
        found |= {"devices": torch.cuda.device_count(), "cudnn": torch.backends.cudnn.version()}
        found["driver"] = _smi("driver_version")
    return found


def commit() -> str:
    """Of the checkout this runs from, with a + if files differ; "" without git or outside a checkout."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return ""
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    head = _said([*git, "rev-parse", "--short", "HEAD"])
    return head + ("+" if head and _said([*git, "status", "--porcelain", "-uno"]) else "")


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _said(command: list[str]) -> str:
    """The output of a program, without its last newline; "" if it fails or hangs."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _smi(fields: str) -> str:
    lines = _said(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    return lines.partition("\n")[0].strip()


@dataclass
class Sensors:
    """SM clock (MHz), power (W) and temperature (°C), read while work is queued: through torch if Python has
    NVML, else nvidia-smi, else nothing."""

    device: Any = None
    readings: list[tuple[float, ...]] = field(default_factory=list)
    _smi_alone: bool = False

    @staticmethod
    def of(device: Device) -> Sensors:
        return Sensors(torch.device(device.name) if device.is_cuda else None)

    def read(self) -> None:
        if self.device is None or (self._smi_alone and self.readings):
            return  # a program of its own takes a tenth of a second: once a row
        try:
            if not self._smi_alone:
                cuda, at = torch.cuda, self.device
                found = cuda.clock_rate(at), cuda.power_draw(at) / 1e3, cuda.temperature(at)
                self.readings.append(tuple(map(float, found)))
        except Exception:  # NVML may be absent, broken or forbidden
            self._smi_alone = True
        if self._smi_alone:
            with suppress(ValueError):
                clock, watts, degrees = map(float, _smi("clocks.sm,power.draw,temperature.gpu").split(","))
                self.readings.append((clock, watts, degrees))

    def taken(self) -> dict[str, float]:
        """Medians since the last call of this; {} without readings."""
        found, self.readings = self.readings, []
        names = ("sm_mhz", "watts", "celsius")
        return {n: median([r[i] for r in found]) for i, n in enumerate(names)} if found else {}
