"""Times products of 8 bits beside cuDNN and the Gluon rows of 16 bits, interleaved in one process, with the
error of each against float64; and that error against the number of keys.

python -m tests.backends.gluon.codes_race [--dims 128,256] [--lengths 2048,...] [--kinds full,causal]
    [--group 4] [--rounds 7] [--variants] [--kernels] [--once]
python -m tests.backends.gluon.codes_race --keys 2048,...,262144

The call of codes has its launches for q and V in its time. Calls are captured as graphs, so that the GPU's
time is told. --variants: other configs too. --kernels: prints the microseconds of each kernel, and those
that a call of codes takes of the host. --once: runs everything once, which compiles it. --keys: errors
alone, with sums of all keys in tensor cores and with sums of blocks, for values around 0 and around 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyflash
from polyflash.bench.timing import queued
from polyflash.mask import visible_pairs
from polyflash.quant import quantize
from tests.backends.gluon.codes import SCHEME
from tests.backends.gluon.race import CHANNELS, TOKENS, of_kernels

VARIANTS = (
    {"pinned": "maxima"}, {"pinned": "softmax"}, {"turns": False}, {"late_sum": False}, {"level": 0},
    {"level": 8}, {"block_n": 128, "level": 8}, {"num_stages": 3}, {"order": "counter"},
)  # fmt: skip
Arms = dict[str, Callable[[], Tensor]]


def drawn(length: int, dims: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(seed)
    batch, heads = TOKENS // length, CHANNELS // dims
    shapes = ((batch, h, length, dims) for h in (heads, heads // group, heads // group))
    q, k, v = (torch.randn(shape, generator=draw, device="cuda").bfloat16() for shape in shapes)
    return q, k, v


def arms_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, variants: bool) -> Arms:
    codes = [quantize(x, SCHEME) for x in (k, v)]

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            more = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)

    def ours(*kv, **more) -> Callable[[], Tensor]:
        return lambda: polyflash.attention(q, *kv, causal=causal, backend="gluon", **more)

    arms: Arms = {"cudnn": cudnn, "bf16": ours(k, v), "fp8": ours(*codes)}
    chosen = polyflash.explain(q, *codes, causal=causal, backend="gluon").config
    for change in VARIANTS if variants else ():
        config = replace(chosen, **change)
        wide = q.shape[3] > 128 and (config.block_n, config.num_stages) != (64, 2)  # too much memory
        if config != chosen and not wide:
            arms[str(change)] = ours(*codes, config=config)
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
    """Its launches as a graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        arm()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm()
    return graph.replay


def host_time(arm: Callable[[], Tensor], times: int = 100) -> float:
    """Microseconds that a call takes of the host."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        arm()
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / times * 1e6


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def race(length: int, dims: int, kind: str, asked: argparse.Namespace) -> None:
    causal, heads = kind == "causal", CHANNELS // dims
    q, k, v = drawn(length, dims, asked.group)
    arms = arms_of(q, k, v, causal, asked.variants)
    rows = slice(0, None, max(1, length // 128))
    wanted = None if asked.once else exact(q, k, v, causal, rows)
    errors = {}
    for name, arm in arms.items():
        found = arm()
        errors[name] = 0.0 if wanted is None else distance(found[:, :, rows], wanted)
    if asked.once:
        torch.cuda.synchronize()
        return
    work = 4 * heads * dims * TOKENS // length * visible_pairs(length, length, offset=0, causal=causal)
    times = max(3, int(0.015 / (work / 5e14)))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    graphs = {name: captured(arm) for name, arm in arms.items()}
    for _ in range(asked.rounds):
        for name in random.sample(sorted(arms), len(arms)):
            seconds[name].append(queued(graphs[name], times))
    rates = {name: work / statistics.median(x) / 1e12 for name, x in seconds.items()}
    told = " ".join(f"{name} {rate:.0f} ({errors[name]:.1e})" for name, rate in rates.items())
    over = f"{rates['fp8'] / rates['cudnn']:.2f} of cudnn, {rates['fp8'] / rates['bf16']:.2f} of bf16"
    print(f"D{dims} {kind} {length} group {asked.group}: {told} | {over}", flush=True)
    if asked.kernels:
        print(f"    host {host_time(arms['fp8']):.0f}, {of_kernels(arms['fp8'])}", flush=True)


def errors_by_keys(keys: int, dims: int) -> None:
    """128 rows of 2 heads: relative L2 against float64 over the codes' values, and the mean of the signed
    error over the mean of the result, where values lie around 1."""
    draw = torch.Generator("cuda").manual_seed(keys)
    q = torch.randn(1, 2, 128, dims, generator=draw, device="cuda").bfloat16()
    k, v = torch.randn(2, 1, 2, keys, dims, generator=draw, device="cuda").bfloat16()
    told = []
    for mean in (0.0, 1.0):
        codes = [quantize(x, SCHEME) for x in (k, v + mean)]
        wanted = exact(q, *(x.values(torch.float32) for x in codes), False, slice(None))
        chosen = polyflash.explain(q, *codes, backend="gluon").config
        for level in (0, chosen.level):
            config = replace(chosen, level=level)
            found = polyflash.attention(q, *codes, backend="gluon", config=config)
            bias = float((found.double() - wanted).mean() / wanted.mean()) if mean else 0.0
            told.append(f"{mean:.0f}/{level}: {distance(found, wanted):.2e} bias {bias:+.1e}")
    print(f"D{dims} {keys} keys: {', '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dims", default="128,256")
    parser.add_argument("--lengths", default="2048,4096,8192,16384")
    parser.add_argument("--kinds", default="full,causal")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--group", type=int, default=1)
    for name in ("variants", "kernels", "once"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--keys", default="")
    asked = parser.parse_args()
    for dims in map(int, asked.dims.split(",")):
        if asked.keys:
            for keys in map(int, asked.keys.split(",")):
                errors_by_keys(keys, dims)
            continue
        for kind in asked.kinds.split(","):
            for length in map(int, asked.lengths.split(",")):
                race(length, dims, kind, asked)


if __name__ == "__main__":
    main()
