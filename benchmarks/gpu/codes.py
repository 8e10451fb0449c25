"""Times decode steps over codes on a GPU beside our own of 16 bits, interleaved in one process, with the
error of each against float64 attention over what its keys and values stand for.

python -m benchmarks.gpu.codes [--sizes 64x8192,1x1024] [--heads 32/8] [--dim 128] [--schemes int8,int4]
    [--rows 1] [--rounds 7] [--try "num_warps=1 block_n=32,max_registers=128"]

A size is requests x keys. Calls are captured as graphs, each over as many sets of keys as no L2 holds, so
that the GPU's time is told. --try: other configs of every scheme, changes of one with spaces between.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import polyflash
from benchmarks.gpu.products import captured, distance, exact
from polyflash.bench.timing import queued
from polyflash.quant import NAMED, QuantizedTensor, quantize

BASE, SETS_BYTES, MOST_SETS = "bfloat16", 256 << 20, 128
WORST = 5e-3  # of relative L2, beside what the codes stand for


def pairs(size: tuple[int, int], asked: argparse.Namespace, name: str) -> Iterator[tuple[Any, Any]]:
    """Sets of K and V, together larger than an L2."""
    kv_heads = int(asked.heads.partition("/")[2])
    shape, draw = (size[0], kv_heads, size[1], asked.dim), torch.Generator("cuda").manual_seed(1)
    taken = 0
    for _ in range(MOST_SETS):
        k = torch.randn(shape, generator=draw, device="cuda").bfloat16()
        k += 2 * torch.randn(asked.dim, generator=draw, device="cuda").bfloat16()
        pair: Any = k, torch.randn(shape, generator=draw, device="cuda").bfloat16()
        if name != BASE:
            pair = tuple(quantize(x, scheme) for x, scheme in zip(pair, NAMED[name], strict=True))
        yield pair
        taken += sum(x.nbytes for x in pair)
        if taken > SETS_BYTES:
            return


def error_of(out: Tensor, q: Tensor, k: Any, v: Any) -> float:
    """Of the last request alone, which stands for all."""
    k, v = (x.values(torch.float32) if isinstance(x, QuantizedTensor) else x for x in (k, v))
    return distance(out[-1:], exact(q[-1:], k[-1:], v[-1:], False, slice(None)))


def changes(words: str) -> dict[str, int]:
    return {name: int(n) for name, _, n in (word.partition("=") for word in words.split())}


def arms(size: tuple[int, int], asked: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any], float]]:
    """Name, the step over all sets as a graph, and how many sets there are."""
    heads, draw = int(asked.heads.partition("/")[0]), torch.Generator("cuda").manual_seed(0)
    q = torch.randn(size[0], heads, asked.rows, asked.dim, generator=draw, device="cuda").bfloat16()
    for name in (BASE, *asked.schemes.split(",")):
        sets = list(pairs(size, asked, name))
        chosen = polyflash.explain(q, *sets[0]).config
        for words in ("", *(asked.tried.split(",") if asked.tried and name != BASE else ())):
            config = replace(chosen, **changes(words)) if words else None

            def step(sets: list[Any] = sets, config: Any = config) -> Tensor:
                return [polyflash.attention(q, k, v, config=config) for k, v in sets][-1]

            label = f"{name} {words}".strip()
            try:
                error = error_of(step(), q, *sets[-1])
                if not error < WORST:
                    print(f"    {label}: WRONG, error {error:.1e}", flush=True)
                yield label, captured(step), len(sets)
            except Exception as problem:  # a tile that does not fit
                print(
                    f"    {label}: {type(problem).__name__}: {str(problem).splitlines()[0][:150]}", flush=True
                )


def race(size: tuple[int, int], asked: argparse.Namespace) -> None:
    graphs = {name: (graph, sets) for name, graph, sets in arms(size, asked)}
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(asked.rounds):
        for name in random.sample(sorted(graphs), len(graphs)):
            graph, sets = graphs[name]
            seconds[name].append(queued(graph, 3) / sets)
    base = statistics.median(seconds[BASE])
    print(f"{size[0]} x {size[1]}, {asked.heads} heads, D{asked.dim}, {asked.rows} rows", flush=True)
    for name, taken in seconds.items():
        median = statistics.median(taken)
        spread = max(taken) / min(taken)
        print(f"    {name}: {median * 1e6:.1f} us, {median / base:.3f}, spread {spread:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--sizes", default="64x8192,16x8192,1x65536,1x1024")
    add("--heads", default="32/8", help="query heads/kv heads")
    add("--dim", type=int, default=128)
    add("--rows", type=int, default=1)
    add("--schemes", default="int8,fp8,int8-channel,int4-token,int4")
    add("--rounds", type=int, default=7)
    add("--try", dest="tried", default="")
    asked = parser.parse_args()
    with torch.no_grad():
        for size in asked.sizes.split(","):
            requests, _, keys = size.partition("x")
            race((int(requests), int(keys)), asked)


if __name__ == "__main__":
    main()
