"""Prefill over int8 codes by integer products, beside the same attention over floats: `python -m
benchmarks.integer_products`. Arms take turns in one process, in a drawn order; medians and their ratios."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import polyflash
from polyflash.quant import Scheme, quantize

HEADS, SEQLEN, ROUNDS = 8, 2048, 21
CODED = Scheme(compute="int8")
OURS = "int8"


def arms(head_dim: int, causal: bool) -> tuple[dict[str, Callable[[], Tensor]], float]:
    """Calls by name, and the error of ours beside attention in float64 without codes, as relative L2. The
    peers get the values of the codes, decoded ahead."""
    q, k, v = (torch.randn(1, HEADS, SEQLEN, head_dim) for _ in range(3))
    coded = quantize(k, CODED), quantize(v, CODED)
    wide: Any = (q, *(x.values(torch.float32) for x in coded))
    half = tuple(x.bfloat16() for x in wide)
    found = {
        OURS: lambda: polyflash.attention(q, *coded, causal=causal),
        "int8, q bf16": lambda: polyflash.attention(half[0], *coded, causal=causal),
        "torch fp32": lambda: sdpa(wide[0], wide[1], wide[2], is_causal=causal),
        "torch bf16": lambda: sdpa(half[0], half[1], half[2], is_causal=causal),
        "ours fp32": lambda: polyflash.attention(*wide, causal=causal),
        "ours bf16": lambda: polyflash.attention(*half, causal=causal),
    }
    right = sdpa(q.double(), k.double(), v.double(), is_causal=causal)
    return found, float((found[OURS]() - right).norm() / right.norm())


def main() -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    for head_dim in (64, 128):
        for causal in (False, True):
            with torch.no_grad():
                calls, error = arms(head_dim, causal)
                for call in (*calls.values(), *calls.values()):
                    call()
                times: dict[str, list[float]] = {name: [] for name in calls}
                for _ in range(ROUNDS):
                    for name in draw.sample(list(calls), len(calls)):
                        start = time.perf_counter()
                        calls[name]()
                        times[name].append(time.perf_counter() - start)
            medians = {name: statistics.median(x) for name, x in times.items()}
            ratios = (f"{name} {x * 1e3:.2f} ms ({x / medians[OURS]:.2f})" for name, x in medians.items())
            least = min(times["torch fp32"]) / min(times[OURS])
            print(
                f"d{head_dim} {'causal' if causal else 'full'}: error {error:.2e}; {'; '.join(ratios)}",
                end="",
            )
            print(f"; least times, torch fp32 over int8: {least:.2f}", flush=True)


if __name__ == "__main__":
    main()
