"""The dtypes of keys and values by torch's names, widest first, with their bytes."""

from __future__ import annotations

BY_NAME = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
