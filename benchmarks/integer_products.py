"""Prefill over int8 codes by integer products, beside the same attention over floats: `python -m
benchmarks.integer_products`. Arms take turns in one process; medians and their ratios."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import polyflash
from polyflash.bench import Arm, compare
from polyflash.quant import Scheme, quantize

HEADS, SEQLEN, SECONDS = 8, 2048, 12.0
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
    for head_dim, causal in product((64, 128), (False, True)):
        with torch.no_grad():
            calls, error = arms(head_dim, causal)
            found = compare([Arm(name, call) for name, call in calls.items()], seconds=SECONDS)
        times = ", ".join(
            f"{name} {1e3 * x.median:.2f} ms ({found.ratio(name, OURS):.2f})"
            for name, x in found.summaries().items()
        )
        least = {name: min(r.seconds[name] for r in found.rounds) for name in calls}
        print(f"d{head_dim} {'causal' if causal else 'full'}: error {error:.2e}; {times}", end="; ")
        print(f"least times, torch fp32 over int8: {least['torch fp32'] / least[OURS]:.2f}", flush=True)


if __name__ == "__main__":
    main()
