"""The demonstration of `make demo`: a model, a comparison, and the reasons."""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich.console import Console
from rich.rule import Rule

import long_context
import polyflash
import semantic_search


def why(console: Console) -> None:
    """Plans for this machine and for another; nothing is launched, so the tensors hold no data."""
    q = torch.empty(1, 8, 8192, 64, dtype=torch.bfloat16, device="meta")
    console.print("The longest causal call above, on this machine:", style="bold")
    console.print(str(polyflash.explain(q, q, q, causal=True)), markup=False, highlight=False)
    console.print("\nThe same call on an H100 or H200 that need not be here:", style="bold")
    console.print(
        str(polyflash.explain(q, q, q, causal=True, target="cuda:sm90")), markup=False, highlight=False
    )


def main() -> int:
    console = Console()
    start = time.perf_counter()
    console.print(long_context.about(), highlight=False)
    console.print(Rule("1. a sentence-embedding model, padded batches", align="left"))
    equal = semantic_search.main(console)
    console.print(Rule("2. long contexts, torch SDPA and polyflash in turns", align="left"))
    equal = long_context.main(console) and equal
    console.print(Rule("3. which kernel ran, and why", align="left"))
    why(console)
    console.print(
        f"\n{'all results equal' if equal else 'RESULTS DIFFER'}, {time.perf_counter() - start:.0f} s"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(main())
