"""Context parallelism: attention of one sequence that is spread over the ranks of a process group."""

from polyflash.parallel.api import attention, attention_varlen, explain, merge, restore, split
from polyflash.parallel.cost import Explanation

__all__ = ["Explanation", "attention", "attention_varlen", "explain", "merge", "restore", "split"]
