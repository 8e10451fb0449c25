"""Times the Gluon rows beside cuDNN and the Triton rows, interleaved in one process.

python -m tests.backends.gluon.race [--dims 64,128,256] [--lengths 1024,...] [--variants] [--rounds 7]
    [--gradients] [--group 4] [--kernels]
    [--kinds full,causal,window,alibi-causal,capped-causal,sinks-causal,lens,lens-causal,packed,packed-causal]

cuDNN has the first two. A window is causal, of 1024 keys, a cap 30. Of `lens` requests have from few keys to
all; packed members half as many tokens and half as many more by turns. With --gradients the backward pass
alone is timed, of a graph that is kept. --group: query heads per key/value head. --kernels: also prints the
microseconds of each kernel of a call of the Gluon row, by torch's profiler.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyflash
from polyflash.bench.timing import queued
from polyflash.mask import visible_pairs

TOKENS, CHANNELS = 16384, 2048


def options_of(kind: str, length: int, heads: int) -> tuple[dict[str, Any], int]:
    """Options of a call, and how many pairs of its batch see one another."""
    batch, causal = TOKENS // length, kind == "window" or kind.endswith("causal")
    options: dict[str, Any] = {"causal": causal}
    lens = [length] * batch
    if kind == "window":
        options["window"] = (1023, None)
    elif kind.startswith("capped"):
        options["softcap"] = 30.0
    elif kind.startswith("alibi"):
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, heads, device="cuda")
    elif kind.startswith("sinks"):
        options["sinks"] = torch.zeros(heads, device="cuda")
    elif kind.startswith("lens"):
        lens = [max(1, length * (i + 1) // batch) for i in range(batch)]
        options |= {"kv_lens": torch.tensor(lens, dtype=torch.int32, device="cuda")}
    elif kind.startswith("packed"):
        lens = [length // 2 * (1 + 2 * (i % 2)) for i in range(batch)]
        bounds = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device="cuda")
        options |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        return options, sum(visible_pairs(n, n, offset=0, causal=causal) for n in lens)
    window = options.get("window", (None, None))
    pairs = (visible_pairs(length, n, offset=n - length, causal=causal, window=window) for n in lens)
    return options, sum(pairs)


def arms_of(q, k, v, options: dict[str, Any], variants: bool) -> dict[str, Callable[[], torch.Tensor]]:
    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            more = {"is_causal": options["causal"], "enable_gqa": q.shape[1] != k.shape[1]}
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)

    def ours(**more):
        if "cu_seqlens_q" in options:
            tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
            return lambda: polyflash.attention_varlen(*tokens, **options, **more)
        return lambda: polyflash.attention(q, k, v, **options, **more)

    arms = {"triton": ours(backend="triton"), "gluon": ours(backend="gluon"), "free": ours()}
    if len(options) == 1:
        arms["cudnn"] = cudnn
    if variants and len(options) == 1:
        chosen = polyflash.explain(q, k, v, **options, backend="gluon").config
        tried = {
            "zigzag1": {"order": "zigzag", "heads": 1}, "zigzag8": {"order": "zigzag", "heads": 8},
            "tiles4": {"order": "tiles", "heads": 4}, "counter4": {"order": "counter", "heads": 4},
            "counter8": {"order": "counter", "heads": 8}, "turns": {"turns": not chosen.turns},
            "maxima": {"pinned": "maxima"}, "softmax": {"pinned": "softmax"}, "unpinned": {"pinned": ""},
            "late": {"late_sum": not chosen.late_sum}, "lazy": {"lazy_rescale": not chosen.lazy_rescale},
        }  # fmt: skip
        for name, change in tried.items():
            if (config := replace(chosen, **change)) != chosen:
                arms[name] = ours(backend="gluon", config=config)
    return arms


def flat(results: Any) -> torch.Tensor:
    return results if isinstance(results, torch.Tensor) else torch.cat([x.flatten() for x in results])


def of_gradients(
    arms: dict[str, Callable[[], torch.Tensor]], leaves: tuple[torch.Tensor, ...]
) -> dict[str, Callable[[], Any]]:
    """The backward pass of each arm."""

    def backward(arm: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        out = arm()
        dout = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        dout = dout.to(out.dtype)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return {name: backward(arm) for name, arm in arms.items()}


def of_kernels(arm: Callable[[], Any], times: int = 20) -> str:
    """Microseconds of each kernel of a call, from the longest on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            arm()
        torch.cuda.synchronize()
    found = {x.key: x.device_time_total / times for x in profile.key_averages()}
    return ", ".join(f"{n[:40]} {us:.1f}" for n, us in sorted(found.items(), key=lambda x: -x[1]) if us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384")
    parser.add_argument("--kinds", default="full,causal")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--kernels", action="store_true")
    asked = parser.parse_args()
    for dims in map(int, asked.dims.split(",")):
        for kind in asked.kinds.split(","):
            for length in map(int, asked.lengths.split(",")):
                heads = CHANNELS // dims
                kv_heads = heads // asked.group
                q, k, v = (
                    torch.randn(TOKENS // length, h, length, dims, device="cuda", dtype=torch.bfloat16)
                    for h in (heads, kv_heads, kv_heads)
                )
                options, pairs = options_of(kind, length, heads)
                if asked.gradients:
                    q, k, v = (x.requires_grad_() for x in (q, k, v))
                arms = arms_of(q, k, v, options, asked.variants)
                if asked.gradients:
                    arms = of_gradients(arms, (q, k, v))
                results = {name: flat(arm()) for name, arm in arms.items() for _ in range(3)}
                base = results["triton"].float()
                errors = {n: float((x.float() - base).norm() / base.norm()) for n, x in results.items()}
                work = (10 if asked.gradients else 4) * heads * dims * pairs
                times = max(3, int(0.02 / (work / 5e14)))
                found: dict[str, list[float]] = {name: [] for name in arms}
                for _ in range(asked.rounds):
                    for name in random.sample(sorted(arms), len(arms)):
                        found[name].append(queued(arms[name], times))
                rates = {name: work / statistics.median(x) / 1e12 for name, x in found.items()}
                told = " ".join(f"{n} {r:.0f}" for n, r in rates.items())
                gluon, cudnn = rates["gluon"], rates.get("cudnn", math.nan)
                over = f"{gluon / cudnn:.2f} of cudnn, {gluon / rates['triton']:.2f}"
                wrong = max(errors.values())
                mark = "" if wrong < 1e-2 else f"  WRONG {errors}"
                print(
                    f"D{dims} {kind} {length}: {told} | {over} of triton | differ by {wrong:.1e}{mark}",
                    flush=True,
                )
                if asked.kernels:
                    print(f"    {of_kernels(arms['gluon'])}", flush=True)


if __name__ == "__main__":
    main()
