"""Times small and split calls on a CUDA device, in us under a CUDA graph, and prints Markdown tables.

python -m benchmarks.gpu.curve rows      rows 1 to 512 x keys 64 to 4096 x groups 1, 4, 8: is there a step?
python -m benchmarks.gpu.curve splits    decode with splits that follow the call, against splits of one size
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import polyflash
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
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(times: int) -> float:
        first.record()
        for _ in range(times):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / times

    times = max(3, min(100, int(seconds * 1e3 / max(timed(1), 0.05))))
    return sorted(timed(times) for _ in range(3))[1] * 1e3


def drawn(batch: int, heads: int, rows: int) -> Tensor:
    return torch.randn(batch, heads, rows, HEAD_DIM, device="cuda", dtype=torch.bfloat16)


def rows_table() -> None:
    """bfloat16, causal, one request; D behind a time: the decode row ran, else the forward row."""
    line(["group", "keys", *map(str, ROWS)])
    line(["---"] * (2 + len(ROWS)))
    for group in GROUPS:
        for keys in KEYS:
            cells = []
            for rows in ROWS:
                q, k, v = drawn(1, KV_HEADS * group, rows), drawn(1, KV_HEADS, keys), drawn(1, KV_HEADS, keys)
                decodes = isinstance(polyflash.explain(q, k, v, causal=True).config, DecodeConfig)
                args: dict[str, Any] = {"causal": True, "backend": "triton"}
                time = microseconds(partial(polyflash.attention, q, k, v, **args), 0.004)
                cells.append(f"{time:.1f}{' D' if decodes else ''}")
            line([str(group), str(keys), *cells])


def splits_table() -> None:
    """bfloat16, one token per request: the time of the default, and how many times as long others take."""
    line(["requests", "keys", "heads", "default, µs", *(f"{n} keys" for n in SIZES)])
    line(["---"] * (4 + len(SIZES)))
    for batch, keys in STEPS:
        for heads in (32, 8):
            copies = max(1, min(16, int(_COLD_BYTES / (4 * batch * keys * KV_HEADS * HEAD_DIM)) + 1))
            sets = [
                (drawn(batch, heads, 1), drawn(batch, KV_HEADS, keys), drawn(batch, KV_HEADS, keys))
                for _ in range(copies)
            ]
            chosen = polyflash.explain(*sets[0], backend="triton").config
            fixed = [replace(chosen, fixed_splits=True, split_keys=n) for n in SIZES]

            def rotate(config: Any, sets: Sequence[tuple[Tensor, ...]] = sets) -> None:
                for x in sets:
                    polyflash.attention(*x, backend="triton", config=config)

            first, *others = (
                microseconds(partial(rotate, config), 0.015) / copies for config in (chosen, *fixed)
            )
            ratios = [f"{t / first:.2f}" for t in others]
            line([str(batch), str(keys), f"{heads}/{KV_HEADS}", f"{first:.1f}", *ratios])


def line(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    tables = {"rows": rows_table, "splits": splits_table}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", choices=tables)
    with torch.no_grad():
        tables[parser.parse_args().table]()
