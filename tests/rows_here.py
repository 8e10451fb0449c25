"""Which backends run a plain float32 call on the device under test: the CPU engine's kernels need AVX-512."""

from __future__ import annotations

import pytest
import torch

from polyflash import explain
from polyflash.backends import BACKENDS

_Q = torch.empty(1, 1, 2, 8)
HERE = [name for name in BACKENDS if explain(_Q, _Q, _Q, backend=name).backend == name]
FREE = explain(_Q, _Q, _Q).backend  # what runs it if nobody asks
needs_engine = pytest.mark.skipif(FREE == "torch", reason="no engine has a kernel for this machine")
needs_cpu_engine = pytest.mark.skipif(
    "cpu" not in HERE, reason="the CPU engine has no kernel for this machine"
)
