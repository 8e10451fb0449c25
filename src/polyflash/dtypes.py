"""Meaning of a storage dtype: its width, its accumulation type, its rounding unit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """A storage dtype by its torch name, with the dtype of its scores, statistics and accumulators."""

    name: str
    bytes: int
    accumulate: str
    eps: float


FLOAT64 = DType("float64", 8, "float64", 2.0**-52)
FLOAT32 = DType("float32", 4, "float32", 2.0**-23)
FLOAT16 = DType("float16", 2, "float32", 2.0**-10)
BFLOAT16 = DType("bfloat16", 2, "float32", 2.0**-7)

BY_NAME = {d.name: d for d in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)}
