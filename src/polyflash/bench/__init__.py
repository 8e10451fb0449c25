"""Measuring: interleaved comparisons in one process, the machine's peak, the suite of `polyflash bench`."""

from polyflash.bench.peak import Calibration, Peak, calibrate, kind_of
from polyflash.bench.timing import Arm, Comparison, Round, Summary, compare, median

__all__ = ["Arm", "Calibration", "Comparison", "Peak", "Round", "Summary"]
__all__ += ["calibrate", "compare", "kind_of", "median"]
