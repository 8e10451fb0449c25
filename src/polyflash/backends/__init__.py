"""The table of kernels: every row of every backend. Rows are data; a kernel is imported when a call chooses
it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import cast

from polyflash.advice import Report
from polyflash.backends.cpu.capabilities import CAPABILITIES as CPU
from polyflash.backends.gluon.capabilities import CAPABILITIES as GLUON
from polyflash.backends.metal.capabilities import CAPABILITIES as METAL
from polyflash.backends.torch.capabilities import CAPABILITIES as TORCH
from polyflash.backends.triton.capabilities import CAPABILITIES as TRITON
from polyflash.backends.webgpu.capabilities import CAPABILITIES as WEBGPU

TABLE = (*CPU, *GLUON, *TRITON, *WEBGPU, *METAL, *TORCH)
BACKENDS = tuple(dict.fromkeys(row.backend for row in TABLE))


def report_of(backend: str) -> Report:
    """A backend's report on itself: its module `report`, if it has one, imported when somebody asks."""
    module = f"{__name__}.{backend}.report"
    return cast("Report", import_module(module)) if find_spec(module) else Report()
