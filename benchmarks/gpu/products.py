"""Times products of codes on a GPU, of int8 and of e4m3, beside cuDNN and our rows of 16 bits, interleaved in
one process, with the error of each against float64; and that error against the number of keys.

python -m benchmarks.gpu.products [--dims 64,128,256] [--lengths 2048,...] [--kinds full,causal]
    [--arms NAMES] [--group 4] [--rounds 7] [--variants NAMES]
python -m benchmarks.gpu.products --keys 1024,...,262144

Calls are captured as graphs, so that the GPU's time is told; one of codes has in it what it does to q and v.
Arms: "bf16" is our free choice, "triton" in the kernel which most others run in; "int8" decodes V, "int8-k"
has V in 16 bits, "int8-head" a scale of K per head; "fp8-gluon" and "fp8-triton" multiply codes of both.
--variants: other configs of these. --keys: errors of the last two alone, with sums of all keys in tensor
cores and with sums of blocks, for values around 0 and around 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyflash
from polyflash.bench.timing import queued
from polyflash.mask import visible_pairs
from polyflash.quant import Scheme, quantize

TOKENS, CHANNELS = 16384, 2048
TOKEN = Scheme(compute="int8")
EIGHTS = Scheme(dtype="fp8_e4m3", granularity="head", compute="fp8")
# Of K, of V, and whose kernel.
FORMS: dict[str, tuple[Scheme | None, Scheme | None, str | None]] = {
    "bf16": (None, None, None),
    "triton": (None, None, "triton"),
    "int8": (TOKEN, TOKEN, "triton"),
    "int8-k": (TOKEN, None, "triton"),
    "int8-head": (replace(TOKEN, granularity="head"), None, "triton"),
    "fp8-gluon": (EIGHTS, EIGHTS, "gluon"),
    "fp8-triton": (EIGHTS, EIGHTS, "triton"),
}
WORST = {"int8": 2.5e-2, "fp8": 8e-2}  # errors of arms whose names begin so; of others 8e-3
TILES = (
    *({"max_registers": 0}, {"max_registers": 168}, {"max_registers": 128}, {"late_sum": False}),
    *({"block_n": 32, "num_stages": 3}, {"block_n": 64, "num_stages": 2}, {"block_n": 64, "num_stages": 3}),
    *({"block_n": 128, "num_stages": 2}, {"block_n": 128, "num_stages": 2, "max_registers": 168}),
    {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 2},
)
SCHEDULES = (
    *({"pinned": "maxima"}, {"pinned": "softmax"}, {"turns": False}, {"late_sum": False}, {"level": 0}),
    *({"level": 8}, {"block_n": 128, "level": 8}, {"num_stages": 3}, {"order": "counter"}),
)
TRIED: dict[str, tuple[dict[str, Any], ...]] = {
    "int8-k": (*TILES, {"lazy_rescale": False}),
    "int8-head": TILES,
    "fp8-gluon": SCHEDULES,
    "fp8-triton": (*TILES, {"level": 0}, {"loads": "pointer"}),
}


def drawn(length: int, dims: int, group: int) -> tuple[Tensor, ...]:
    draw = torch.Generator("cuda").manual_seed(0)
    batch, heads = TOKENS // length, CHANNELS // dims
    shapes = ((batch, h, length, dims) for h in (heads, heads // group, heads // group))
    return tuple(torch.randn(shape, generator=draw, device="cuda").bfloat16() for shape in shapes)


def arms_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, asked: Any) -> dict[str, Callable[[], Tensor]]:
    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            more: dict[str, Any] = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)

    arms: dict[str, Callable[[], Tensor]] = {"cudnn": cudnn}
    for name, (*schemes, backend) in FORMS.items():
        if asked.arms and name not in asked.arms.split(","):
            continue
        kv = [x if s is None else quantize(x, s) for x, s in zip((k, v), schemes, strict=True)]
        plan = polyflash.explain(q, *kv, causal=causal, backend=backend)
        if name.startswith("fp8") and "in the walk" not in plan.notes[-1]:
            continue

        def ours(kv: list[Any] = kv, **more: Any) -> Callable[[], Tensor]:
            return lambda: polyflash.attention(q, *kv, causal=causal, **more)

        arms[name] = ours(backend=backend)
        for change in TRIED.get(name, ()) if name in asked.variants.split(",") else ():
            if (config := replace(plan.config, **change)) != plan.config:
                arms[f"{name} {change}"] = ours(backend=backend, config=config)
    return arms


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, rows: slice) -> Tensor:
    """These rows in float64."""
    group, place = q.shape[1] // k.shape[1], torch.arange(q.shape[2], device="cuda")[rows]
    out = []
    for h in range(q.shape[1]):
        s = q[:, h, rows].double() @ k[:, h // group].double().mT * q.shape[3] ** -0.5
        if causal:
            s.masked_fill_(torch.arange(k.shape[2], device="cuda") > place[:, None], -torch.inf)
        out.append(s.softmax(-1) @ v[:, h // group].double())
    return torch.stack(out, 1)


def captured(arm: Callable[[], Tensor]) -> Callable[[], None]:
    """Its launches as a graph, which does not keep what they read: hence the arm beside it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        arm()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm()
    return partial(_replay, graph, arm)


def _replay(graph: torch.cuda.CUDAGraph, _: Callable[[], Tensor]) -> None:
    graph.replay()


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def race(length: int, dims: int, causal: bool, asked: argparse.Namespace) -> None:
    q, k, v = drawn(length, dims, asked.group)
    rows = slice(0, None, max(1, length // 128))
    wanted, errors, graphs = exact(q, k, v, causal, rows), {}, {}
    for name, arm in arms_of(q, k, v, causal, asked).items():
        try:
            errors[name] = distance(arm()[:, :, rows], wanted)
            graphs[name] = captured(arm)
        except Exception as error:  # a tile that does not fit
            print(f"    {name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        worst = WORST.get(name.partition("-")[0].partition(" ")[0], 8e-3)
        if not errors[name] < worst:
            print(f"    {name}: WRONG, error {errors[name]:.1e}", flush=True)
    pairs = visible_pairs(length, length, offset=0, causal=causal)
    work = 4 * CHANNELS * TOKENS // length * pairs
    times = max(3, int(0.015 / (work / 5e14)))
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(asked.rounds):
        for name in random.sample(sorted(graphs), len(graphs)):
            seconds[name].append(queued(graphs[name], times))
    rates = {name: work / statistics.median(x) / 1e12 for name, x in seconds.items()}
    beside = rates.get("cudnn", float("nan"))
    told = "\n    ".join(
        f"{name}: {rate:.0f} TFLOP/s, {rate / beside:.2f} of cudnn's, error {errors[name]:.1e}"
        for name, rate in rates.items()
    )
    print(f"D{dims} {'causal' if causal else 'full'} {length} group {asked.group}\n    {told}", flush=True)


def errors_by_keys(keys: int, dims: int) -> None:
    """128 rows of 2 heads: relative L2 against float64 over the codes' values, and the mean of the signed
    error over the mean of the result, where values lie around 1."""
    draw = torch.Generator("cuda").manual_seed(keys)
    q = torch.randn(1, 2, 128, dims, generator=draw, device="cuda").bfloat16()
    k, v = torch.randn(2, 1, 2, keys, dims, generator=draw, device="cuda").bfloat16()
    for mean in (0.0, 1.0):
        codes = [quantize(x, EIGHTS) for x in (k, v + mean)]
        wanted = exact(q, codes[0].values(torch.float32), codes[1].values(torch.float32), False, slice(None))
        for name in ("fp8-gluon", "fp8-triton"):
            plan = polyflash.explain(q, *codes, backend=FORMS[name][2])
            if "in the walk" not in plan.notes[-1]:
                continue
            for level in sorted({0, plan.config.level}):
                config = replace(plan.config, level=level)
                if name == "fp8-triton":  # splits add up in float32 too
                    config = replace(config, split_keys=0)
                found = polyflash.attention(q, *codes, backend=FORMS[name][2], config=config)
                bias = float((found.double() - wanted).mean() / wanted.mean()) if mean else 0.0
                told = f"error {distance(found, wanted):.2e}" + (f", bias {bias:+.1e}" if mean else "")
                print(f"D{dims} {keys} keys {name} level {level} V around {mean:.0f}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--lengths", default="2048,4096,8192,16384")
    parser.add_argument("--kinds", default="full,causal")
    parser.add_argument("--arms", default="", help=f"some of {', '.join(FORMS)}; cudnn is always there")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--variants", default="", help="arms that have other configs too")
    parser.add_argument("--keys", default="")
    asked = parser.parse_args()
    for dims in map(int, asked.dims.split(",")):
        if asked.keys:
            for keys in map(int, asked.keys.split(",")):
                errors_by_keys(keys, dims)
            continue
        for kind in asked.kinds.split(","):
            for length in map(int, asked.lengths.split(",")):
                race(length, dims, kind == "causal", asked)


if __name__ == "__main__":
    main()
