"""Times the Gluon forward row beside cuDNN and the Triton row, interleaved in one process.

python -m tests.backends.gluon.race [--dims 64,128,256] [--lengths 1024,...] [--variants] [--rounds 7]
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyflash
from polyflash.backends.gluon import configs
from polyflash.bench.timing import queued

TOKENS, CHANNELS = 16384, 2048


def arms_of(q, k, v, causal: bool, variants: bool) -> dict[str, Callable[[], torch.Tensor]]:
    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def ours(**more):
        return lambda: polyflash.attention(q, k, v, causal=causal, **more)

    arms = {"cudnn": cudnn, "triton": ours(backend="triton"), "gluon": ours(backend="gluon"), "free": ours()}
    if variants:
        chosen = configs.FORWARD[configs.box_of(q.shape[3]), causal]
        tried = {
            "zigzag1": {"order": "zigzag", "heads": 1}, "zigzag8": {"order": "zigzag", "heads": 8},
            "tiles4": {"order": "tiles", "heads": 4}, "counter4": {"order": "counter", "heads": 4},
            "counter8": {"order": "counter", "heads": 8}, "turns": {"turns": not chosen.turns},
            "pinned": {"pinned": not chosen.pinned}, "late": {"late_sum": not chosen.late_sum},
            "lazy": {"lazy_rescale": not chosen.lazy_rescale},
        }  # fmt: skip
        for name, change in tried.items():
            if (config := replace(chosen, **change)) != chosen:
                arms[name] = ours(backend="gluon", config=config)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384")
    parser.add_argument("--kinds", default="full,causal")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variants", action="store_true")
    asked = parser.parse_args()
    for dims in map(int, asked.dims.split(",")):
        for kind in asked.kinds.split(","):
            for length in map(int, asked.lengths.split(",")):
                causal, heads = kind == "causal", CHANNELS // dims
                shape = (TOKENS // length, heads, length, dims)
                q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                arms = arms_of(q, k, v, causal, asked.variants)
                results = {name: arm() for name, arm in arms.items() for _ in range(3)}
                base = results["triton"].float()
                errors = {n: float((x.float() - base).norm() / base.norm()) for n, x in results.items()}
                work = 4 * TOKENS * heads * length * dims / (2 if causal else 1)
                times = max(3, int(0.02 / (work / 5e14)))
                found: dict[str, list[float]] = {name: [] for name in arms}
                for _ in range(asked.rounds):
                    for name in random.sample(sorted(arms), len(arms)):
                        found[name].append(queued(arms[name], times))
                rates = {name: work / statistics.median(x) / 1e12 for name, x in found.items()}
                told = " ".join(f"{n} {r:.0f}" for n, r in rates.items())
                over = (
                    f"{rates['gluon'] / rates['cudnn']:.2f} of cudnn, {rates['gluon'] / rates['triton']:.2f}"
                )
                wrong = max(errors.values())
                mark = "" if wrong < 1e-2 else f"  WRONG {errors}"
                print(
                    f"D{dims} {kind} {length}: {told} | {over} of triton | differ by {wrong:.1e}{mark}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
