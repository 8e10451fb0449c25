"""The table of kernels: every row of every backend. Rows are data; a kernel is imported when a call chooses
it."""

from __future__ import annotations

from polyflash.backends.cpu.capabilities import CAPABILITIES as CPU
from polyflash.backends.torch.capabilities import CAPABILITIES as TORCH
from polyflash.backends.triton.capabilities import CAPABILITIES as TRITON

TABLE = (*CPU, *TRITON, *TORCH)
BACKENDS = tuple(dict.fromkeys(row.backend for row in TABLE))
