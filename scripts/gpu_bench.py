"""Runs the GPU suite of `polyflash.bench.gpu`, with the peer kernels of this folder.

python scripts/gpu_bench.py --budget 540 --json build/gpu.jsonl --page build/gpu.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from polyflash.bench.gpu import main

if __name__ == "__main__":
    sys.exit(main(program=__file__, path=[str(Path(__file__).resolve().parent)]))
