"""The laboratory: suites of problems against peers, clocks and checks, written as JSON lines and as pages.

Built on `polyflash.bench` (clocks, peaks, checks, the plain cases) and no part of the wheel.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
