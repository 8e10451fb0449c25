"""The table of kernels: every row of every backend. Rows are data; a kernel is imported when a call chooses
it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from polyflash.backends.cpu.capabilities import CAPABILITIES as CPU
from polyflash.backends.gluon.capabilities import CAPABILITIES as GLUON
from polyflash.backends.torch.capabilities import CAPABILITIES as TORCH
from polyflash.backends.triton.capabilities import CAPABILITIES as TRITON

TABLE = (*CPU, *GLUON, *TRITON, *TORCH)
BACKENDS = tuple(dict.fromkeys(row.backend for row in TABLE))

if TYPE_CHECKING:
    from polyflash.advice import Report


def report_of(backend: str) -> Report:
    """A backend's report on itself: its module `report`, imported when somebody asks."""
    return cast("Report", import_module(f"{__name__}.{backend}.report"))
