"""What runs kernels is collected in Triton's interpreter and for a GPU, what compiles them elsewhere."""

from __future__ import annotations

from polyflash import env
from tests import device

RUN_KERNELS = [
    "test_codes.py",
    "test_dropout_start.py",
    "test_small_workloads.py",
    "test_quantize.py",
    "test_merge.py",
]
COMPILE_KERNELS = ["test_codegen.py"]

if env.TRITON_INTERPRET.is_set():
    collect_ignore = COMPILE_KERNELS
elif device.DEVICE.type == "cpu":
    collect_ignore = RUN_KERNELS
