"""Report of the Gluon engine: what it would miss is what the Triton engine misses, which tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyflash.advice import Advice


def facts() -> dict[str, Any]:
    return {}


def kernel_cache() -> None:
    """Triton keeps its kernels in a cache of its own."""


def advice(probed: Mapping[str, Any]) -> tuple[Advice, ...]:
    return ()
