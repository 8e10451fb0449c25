"""Attention problems as plain data, shared by tests, benchmarks ("bench") and tuning ("tune").

A `Workload` is a frozen description without tensors; `make()` builds its tensors from a seed and an input
family.
"""

from __future__ import annotations

from polyflash.workloads.catalogue import CATALOGUE, workloads
from polyflash.workloads.families import FAMILIES
from polyflash.workloads.problem import (
    DTYPES,
    Workload,
    in_pages,
    make,
    random_intervals,
    random_mask,
    with_dtype,
)

__all__ = (
    "CATALOGUE",
    "DTYPES",
    "FAMILIES",
    "Workload",
    "in_pages",
    "make",
    "random_intervals",
    "random_mask",
    "with_dtype",
    "workloads",
)
