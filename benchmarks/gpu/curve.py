"""Times small and split calls on a CUDA device, in us under a CUDA graph, and prints Markdown tables.

python -m benchmarks.gpu.curve rows      rows 1 to 512 x keys 64 to 4096 x groups 1, 4, 8: is there a step?
python -m benchmarks.gpu.curve splits    decode with splits that follow the call, against splits of one size
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import polyflash
from benchmarks.gpu.device import Device
from polyflash.backends.triton.configs import DecodeConfig

KV_HEADS, HEAD_DIM = 8, 128
GROUPS, KEYS = (1, 4, 8), (64, 256, 400, 512, 1000, 1024, 2048, 4096)
ROWS = (1, 2, 3, 4, 8, 9, 16, 32, 63, 64, 65, 128, 256, 512)
SIZES = (128, 256, 512, 1024, 2048)
STEPS = (
    *((b, 1024) for b in (1, 4, 16, 64, 128)), *((b, 4096) for b in (1, 16, 64)),
    *((b, 8192) for b in (1, 8, 64, 128)), *((b, 16384) for b in (1, 16)), (8, 32768), (64, 32768),
    (1, 65536), (8, 65536), (1, 131072), (16, 131072), (1, 262144),
)  # fmt: skip
_COLD_BYTES = 150e6  # inputs are rotated, so that together they are beyond the L2


def microseconds(call: Callable[[], Any], seconds: float) -> float:
    """Of one replay of a graph of the call: the median of three rounds."""
    device = Device("cuda")
    graph = [device.graphed([call], 1)]
    graph[0]()
    times = max(3, min(100, int(seconds / max(device.seconds(graph, 1), 5e-5))))
    return sorted(device.seconds(graph, times) for _ in range(3))[1] * 1e6


def drawn(batch: int, heads: int, rows: int) -> Tensor:
    return torch.randn(batch, heads, rows, HEAD_DIM, device="cuda", dtype=torch.bfloat16)


def rows_table() -> None:
    """bfloat16, causal, one request; D behind a time: the decode row ran, else the forward row."""
    line("group", "keys", *map(str, ROWS))
    line(*["---"] * (len(ROWS) + 2))
    for group, keys in product(GROUPS, KEYS):
        cells = []
        for rows in ROWS:
            q, k, v = drawn(1, KV_HEADS * group, rows), drawn(1, KV_HEADS, keys), drawn(1, KV_HEADS, keys)
            decodes = isinstance(polyflash.explain(q, k, v, causal=True).config, DecodeConfig)
            call = partial(polyflash.attention, q, k, v, causal=True, backend="triton")
            cells.append(f"{microseconds(call, 0.004):.1f}{' D' if decodes else ''}")
        line(str(group), str(keys), *cells)


def splits_table() -> None:
    """bfloat16, one token per request: the time of the default, and how many times as long others take."""
    line("requests", "keys", "heads", "default, µs", *(f"{n} keys" for n in SIZES))
    line(*["---"] * (len(SIZES) + 4))
    for (batch, keys), heads in product(STEPS, (32, 8)):
        copies = max(1, min(16, int(_COLD_BYTES / (4 * batch * keys * KV_HEADS * HEAD_DIM)) + 1))
        shapes = ((heads, 1), (KV_HEADS, keys), (KV_HEADS, keys))
        sets = [[drawn(batch, *shape) for shape in shapes] for _ in range(copies)]
        chosen = polyflash.explain(*sets[0], backend="triton").config
        fixed = [replace(chosen, fixed_splits=True, split_keys=n) for n in SIZES]

        def rotate(config: Any, sets: Sequence[Sequence[Tensor]] = sets) -> None:
            for q, k, v in sets:
                polyflash.attention(q, k, v, backend="triton", config=config)

        first, *others = (microseconds(partial(rotate, c), 0.015) / copies for c in (chosen, *fixed))
        ratios = (f"{t / first:.2f}" for t in others)
        line(str(batch), str(keys), f"{heads}/{KV_HEADS}", f"{first:.1f}", *ratios)


def line(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    tables = {"rows": rows_table, "splits": splits_table}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", choices=tables)
    table = tables[parser.parse_args().table]
    if not torch.cuda.is_available():
        sys.exit(f"no CUDA device that torch {torch.__version__} can use")
    with torch.no_grad():
        table()
