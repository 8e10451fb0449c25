"""The laboratory: suites of problems against peers, clocks and checks, written as JSON lines and as pages.

Built on `polyflash.bench` (clocks, peaks, checks, the plain cases) and no part of the wheel.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """The environment of a process that imports the laboratory."""
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), path)))}
