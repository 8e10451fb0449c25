"""polyflash: one attention function, exact semantics everywhere, the fastest kernel for the device at
hand."""

from polyflash import env

if not env.only_reports():  # `polyflash env` and `doctor` run where torch does not
    from polyflash.api import attention, attention_varlen, explain, use_backend
    from polyflash.counting import counters, watch
    from polyflash.errors import SpecError, UnsupportedError
    from polyflash.groups import GroupsPlan, attention_groups, explain_groups
    from polyflash.mask import Mask
    from polyflash.merge import AttentionOutput, merge
    from polyflash.paged import attention_paged
    from polyflash.plan import Plan
    from polyflash.statistics import RowStats, column_sums, row_stats

__version__ = "0.1.0"

__all__ = [
    "AttentionOutput",
    "GroupsPlan",
    "Mask",
    "Plan",
    "RowStats",
    "SpecError",
    "UnsupportedError",
    "attention",
    "attention_groups",
    "attention_paged",
    "attention_varlen",
    "column_sums",
    "counters",
    "explain",
    "explain_groups",
    "merge",
    "row_stats",
    "use_backend",
    "watch",
]
