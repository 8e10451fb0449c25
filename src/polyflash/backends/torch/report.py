"""Report of the torch engine: it needs nothing but torch, whose absence `doctor` tells before it asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyflash.advice import Advice


def facts() -> dict[str, Any]:
    return {}


def kernel_cache() -> None:
    """It compiles nothing."""


def advice(probed: Mapping[str, Any]) -> tuple[Advice, ...]:
    return ()
