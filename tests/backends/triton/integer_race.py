"""Checks and times products of integers on a GPU: of int8 codes of K and rows of q rounded in the kernel.

python -m tests.backends.triton.integer_race --check
python -m tests.backends.triton.integer_race [--dims 64,128] [--lengths 2048,8192] [--kinds full,causal]
    [--group 1] [--rounds 7] [--tiles]

--check: against the scheme in float64, each group of calls in a process of its own that 60 seconds end.
Otherwise medians beside cuDNN and our rows of 16 bits, interleaved in one process, with the error of each
against float64. Arms: "int8" decodes V in its time, "int8-k" has V in 16 bits, "int8-head" a scale of K per
head, "triton" is bfloat16 in the same kernel. --tiles: other configs too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyflash
from polyflash.bench.timing import queued
from polyflash.mask import visible_pairs
from polyflash.quant import Scheme, quantize
from polyflash.reference import attention_reference
from tests.backends.gluon.codes_race import captured, distance, drawn, exact
from tests.backends.gluon.race import CHANNELS, TOKENS
from tests.integers import operands

TOKEN, HEAD = Scheme(compute="int8"), Scheme(compute="int8", granularity="head")
MEAN, BLOCKS = (
    Scheme(compute="int8", smoothing="mean"),
    Scheme(compute="int8", granularity="block", tokens=64),
)
SECONDS = 60
LEVEL_A = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 5e-6}
TILES = (
    {"max_registers": 168},
    {"block_n": 128, "num_stages": 2},
    {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2},
    {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 2},
    {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 2, "lazy_rescale": False},
)


def held(dim: int, rows: int, keys: int, scheme: Scheme, dtype: torch.dtype, **options: Any) -> None:
    """One call against the scheme, twice."""
    draw = torch.Generator("cuda").manual_seed(rows + keys + dim)
    shapes = (2, 8, rows, dim), (2, 2, keys, dim), (2, 2, keys, dim)
    q, k, v = (torch.randn(s, generator=draw, device="cuda").to(dtype) for s in shapes)
    k[..., ::11] += 3
    k, v = quantize(k, scheme), quantize(v, TOKEN)
    plan = polyflash.explain(q, k, v, backend="triton", **options)
    assert plan.chosen is not None and "multiplied as it is" in plan.notes[-1], str(plan)
    found = polyflash.attention(q, k, v, backend="triton", return_lse=True, **options)
    again = polyflash.attention(q, k, v, backend="triton", return_lse=True, **options)
    told = {"scale": dim**-0.5, **options}
    want = attention_reference(*operands(q, k), v.values(dtype).double(), **told)
    a = distance(found.out, want.out)
    lse = float((found.lse - want.lse).abs().nan_to_num().max())
    case = f"{scheme.codes} {dtype} d{dim} {rows}x{keys} {options}"
    print(f"A {a:.1e} lse {lse:.1e} {case}", flush=True)
    assert a < LEVEL_A[dtype] and lse < 1e-3, case
    assert torch.equal(found.out, again.out) and torch.equal(found.lse, again.lse), f"bits differ: {case}"


def check(dim: int) -> None:
    for scheme in (TOKEN, HEAD, MEAN, BLOCKS):
        for causal in (False, True):
            held(dim, 512, 512, scheme, torch.bfloat16, causal=causal)
            held(dim, 333, 777, scheme, torch.float16, causal=causal)
    lens = torch.tensor([700, 33], dtype=torch.int32, device="cuda")
    held(dim, 200, 777, MEAN, torch.bfloat16, kv_lens=lens)
    held(dim, 200, 777, TOKEN, torch.bfloat16, causal=True, window=(100, None))
    held(dim, 200, 777, MEAN, torch.bfloat16, causal=True, softcap=4.0)
    held(dim, 200, 777, MEAN, torch.float32, causal=True)
    held(dim, 4096, 4096, MEAN, torch.bfloat16, causal=True)


def arms_of(q: Any, k: Any, v: Any, causal: bool, tiles: bool) -> dict[str, Any]:
    coded, head, values = quantize(k, TOKEN), quantize(k, HEAD), quantize(v, TOKEN)

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            more = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)

    def ours(*kv: Any, **more: Any) -> Any:
        return lambda: polyflash.attention(q, *kv, causal=causal, **more)

    arms = {"cudnn": cudnn, "bf16": ours(k, v), "triton": ours(k, v, backend="triton")}
    arms |= {"int8": ours(coded, values), "int8-k": ours(coded, v), "int8-head": ours(head, v)}
    chosen = polyflash.explain(q, coded, v, causal=causal, backend="triton").config
    for change in TILES if tiles else ():
        arms[f"int8-k {change}"] = ours(coded, v, config=replace(chosen, **change))
    return arms


def race(length: int, dims: int, causal: bool, asked: argparse.Namespace) -> None:
    q, k, v = drawn(length, dims, asked.group)
    arms, rows = arms_of(q, k, v, causal, asked.tiles), slice(0, None, max(1, length // 128))
    wanted, errors = exact(q, k, v, causal, rows), {}
    for name, arm in arms.items():
        errors[name] = distance(arm()[:, :, rows], wanted)
        assert errors[name] < (2.5e-2 if "int8" in name else 8e-3), f"{name}: {errors[name]}"
    pairs = visible_pairs(length, length, offset=0, causal=causal)
    work = 4 * CHANNELS // dims * dims * TOKENS // length * pairs
    times = max(3, int(0.015 / (work / 5e14)))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    graphs = {name: captured(arm) for name, arm in arms.items()}
    for _ in range(asked.rounds):
        for name in random.sample(sorted(arms), len(arms)):
            seconds[name].append(queued(graphs[name], times))
    rates = {name: work / statistics.median(x) / 1e12 for name, x in seconds.items()}
    told = "\n    ".join(
        f"{name}: {rate:.0f} TFLOP/s, {rate / rates['bf16']:.2f} of bf16's,"
        f" {rate / rates['cudnn']:.2f} of cudnn's, error {errors[name]:.1e}"
        for name, rate in rates.items()
    )
    print(f"D{dims} {'causal' if causal else 'full'} {length} group {asked.group}\n    {told}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--kinds", default="full,causal")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--group", type=int, default=1)
    for name in ("check", "tiles"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        check(asked.child)
        return 0
    if asked.check:
        command = [sys.executable, "-m", "tests.backends.triton.integer_race", "--child"]
        codes = []
        for dim in (64, 80, 128):
            try:
                codes.append(subprocess.run([*command, str(dim)], timeout=SECONDS).returncode)
            except subprocess.TimeoutExpired:
                print(f"d{dim}: killed after {SECONDS} s", flush=True)
                codes.append(1)
        return max(codes)
    for dims in map(int, asked.dims.split(",")):
        for kind in asked.kinds.split(","):
            for length in map(int, asked.lengths.split(",")):
                race(length, dims, kind == "causal", asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
