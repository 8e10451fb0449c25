"""Products of 8 bits on a Hopper device, in child processes that are killed when they hang.

python -m tests.backends.gluon.codes [NAMES]       right, alone: against an emulator, float64 and odd values
python -m tests.backends.gluon.codes --contend 8   the same bits in processes that preempt one another

The emulator takes q and the weights to e4m3 where the kernel does, in the kernel's order of blocks, and is
exact elsewhere. So what is left between the two is the rounding of the result, of sums in tensor cores, and
of the few weights on which the two do not agree.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import polyflash
from polyflash.backends.gluon import configs
from polyflash.quant import QuantizedTensor, Scheme, quantize
from tests.backends.gluon.guarded import SECONDS, Case, in_child, right, seen, sinks_of, tensors
from tests.integers import operands, with_coded_weights

SCHEME = Scheme(dtype="fp8_e4m3", granularity="head", compute="fp8")
LEVEL_A, LEVEL_B, LSE = 1e-2, 6.5e-2, 6e-2  # relative L2, and of lse the largest difference


def coded(
    case: Case, seed: int = 0, scheme: Scheme = SCHEME
) -> tuple[Tensor, QuantizedTensor, QuantizedTensor]:
    q, k, v = tensors(case, seed)
    return q, *(quantize(x, scheme, layout=case.layout) for x in (k, v))


def call(case: Case, q: Tensor, k: Any, v: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """out and lse as (batch, heads, rows, ...), of the kernel with products of 8 bits and no other."""
    options: dict[str, Any] = {"causal": case.causal, "layout": case.layout, "backend": "gluon"} | more
    if case.sinks:
        options["sinks"] = sinks_of(case)
    if case.window is not None:
        options["window"] = case.window
    for name, x in (("q_offset", case.offset), ("kv_lens", case.lens), ("kv_starts", case.starts)):
        if x is not None:
            options[name] = x if isinstance(x, int) else torch.tensor(x, dtype=torch.int32, device="cuda")
    result = polyflash.attention(q, k, v, return_lse=True, **options)
    return result.out if case.layout == "bhsd" else result.out.transpose(1, 2), result.lse


def emulated(
    case: Case,
    q: Tensor,
    k: QuantizedTensor,
    v: QuantizedTensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse in float64, weights rounded block by block from the last on."""
    config = configs.FP8[configs.box_of(case.dims)]
    if case.layout == "bshd":
        q = q.transpose(1, 2)
    left, right = operands(q, k)
    scores = left @ right.repeat_interleave(case.heads // case.kv_heads, 1).mT
    scores *= case.dims**-0.5 if scale is None else scale
    how: dict[str, Any] = {"block": config.block_n, "slack": 2.0 * config.lazy_rescale, "rising": False}
    sinks = sinks_of(case) if case.sinks else None
    return with_coded_weights(scores.masked_fill(~seen(case), -math.inf), v, sinks=sinks, **how)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def check(case: Case, scale: float | None = None) -> None:
    q, k, v = coded(case)
    more = {} if scale is None else {"scale": scale}
    out, lse = call(case, q, k, v, **more)
    again, _ = call(case, q, k, v, **more)
    wanted, wanted_lse = emulated(case, q, k, v, scale)
    exact, _ = right(case, *tensors(case))
    empty = wanted_lse == -math.inf
    blind = ~seen(case).any(-1).expand(empty.shape)
    off = float((lse.double() - wanted_lse)[~empty].abs().max()) if not bool(empty.all()) else 0.0
    a, b = distance(out, wanted), distance(out, exact)
    print(f"A {a:.2e} B {b:.2e} lse {off:.1e} {case} {scale}", flush=True)
    assert torch.equal(out, again), f"{case}: bits differ from call to call"
    assert bool(out.isfinite().all()), f"{case}: not finite"
    assert torch.equal(lse == -math.inf, empty) and not out[blind].any(), f"{case}: rows that see nothing"
    more_of = max(1.0, abs(scale or 0.0) * case.dims**0.5)  # of errors of scores
    assert a < LEVEL_A * more_of, f"{case}: {a} from the emulator"
    assert b < LEVEL_B or scale is not None, f"{case}: {b} from attention over what was coded"
    assert off < LSE * more_of, f"{case}: lse off by {off}"


def shapes(dims: int, causal: bool) -> Iterator[Case]:
    for rows, keys in ((64, 64), (64, 200), (200, 32), (127, 129), (333, 777), (1000, 1000), (777, 130)):
        yield Case(dims, causal, rows, keys)
    yield Case(dims, causal, 257, 511, layout="bshd", batch=2)
    yield Case(dims, causal, 257, 511, dtype=torch.float16, heads=3, kv_heads=1, batch=3)
    yield Case(dims, causal, 300, 5000, heads=2)
    yield Case(dims, causal, 3840, 3840, heads=16, kv_heads=16)
    if causal:
        for offset in (0, -100, 50, 5000, -5000):
            yield Case(dims, causal, 300, 400, offset=offset)
    for rows, keys in ((200, 700), (700, 200), (130, 5000)):
        for window in ((63, None), (None, 5), (128, 17), (5000, 5000)):
            yield Case(dims, causal, rows, keys, window=window)
        yield Case(dims, causal, rows, keys, batch=4, lens=(0, keys // 3, 1, keys))
        yield Case(dims, causal, rows, keys, batch=3, starts=(0, keys // 2, keys))
        yield Case(dims, causal, rows, keys, batch=2, offset=(0, -50), window=(100, None))
        yield Case(dims, causal, rows, keys, batch=3, sinks=True, lens=(0, keys // 2, keys))


def odd_values(dims: int, causal: bool) -> None:
    """What is hidden changes no bit, what is NaN shows where it is seen and nowhere else, scales of any sign
    are right, and V = 1 gives 1."""
    for scale in (-0.2, 0.0):
        check(Case(dims, causal, 200, 333), scale)
    case = Case(dims, causal, 384, 384, batch=2, lens=None if causal else (300, 200))
    q, k, v = coded(case)
    clean, _ = call(case, q, k, v)
    sees = seen(case).expand(case.batch, 1, case.rows, case.keys)
    for which, at in itertools.product((k, v), (0, 150, 299, 300, 383)):
        kept = which.codes[:, :, at].clone()
        which.codes.view(torch.uint8)[:, :, at, 3::7] = 0x7F
        out, _ = call(case, q, k, v)
        rows = sees[..., at].expand(case.batch, case.heads, case.rows)
        assert torch.equal(out[~rows], clean[~rows]), f"{case}: hidden NaN of key {at} shows"
        shows = out[rows].isnan()
        wanted = torch.zeros_like(shows)
        wanted[:, slice(3, None, 7) if which is v else slice(None)] = True
        assert torch.equal(shows, wanted), f"{case}: NaN of key {at} shows elsewhere, or not"
        which.codes[:, :, at] = kept
    rest, _ = call(case, q[:, :, 128:].contiguous(), k, v, **({"q_offset": 128} if causal else {}))
    assert torch.equal(rest, clean[:, :, 128:]), f"{case}: a row's bits depend on other rows"
    again, _ = call(case, q, k, v)
    assert torch.equal(again, clean), f"{case}: a call leaves something behind"
    case = Case(dims, causal, 256, 16384 if causal else 65536, heads=2)
    q, k, v = coded(case)
    ones = quantize(torch.ones_like(tensors(case)[2]), SCHEME)
    out, _ = call(case, q, k, ones)
    off = float((out.double() - 1).abs().max())
    print(f"V = 1: off by {off:.1e}", flush=True)
    assert off < 1.5e-2, f"{case}: V = 1 gives 1 to {off}"


def contended(name: str, seconds: float, queued: int = 60) -> None:
    """Calls queued ahead, each held to the first."""
    dims, causal = int(name.split("-")[0]), "causal" in name
    case = Case(dims, causal, 3840, 3840, batch=2, heads=16, kv_heads=16)
    q, k, v = coded(case, seed=5)
    first, _ = call(case, q, k, v)
    torch.cuda.synchronize()
    began, runs, bad = time.monotonic(), 0, 0
    while time.monotonic() - began < seconds:
        differs = torch.zeros(queued, dtype=torch.int64, device="cuda")
        for i in range(queued):
            differs[i] = (call(case, q, k, v)[0] != first).sum()
        runs, bad = runs + queued, bad + int((differs > 0).sum())
    print(f"{name}: {runs} runs, {bad} bad", flush=True)
    assert not bad, f"{name}: {bad} of {runs} runs differ"


KINDS = [f"{dims}-{kind}" for dims in (128, 256) for kind in ("full", "causal")]
ALONE = [f"{kind}-{what}" for kind in KINDS for what in ("shapes", "odd")]
ALONE += [f"{dims}-{kind}-shapes" for dims in (80, 192) for kind in ("full", "causal")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(ALONE)}")
    parser.add_argument("--width", type=int, default=4, help="processes at once")
    parser.add_argument("--contend", type=int, default=0, metavar="N", help="N processes at once")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        dims, causal = int(asked.child.split("-")[0]), "causal" in asked.child
        if asked.contend:
            contended(asked.child, asked.seconds)
        elif asked.child.endswith("odd"):
            odd_values(dims, causal)
        else:
            for case in shapes(dims, causal):
                check(case)
        sys.stdout.flush()
        os._exit(0)
    names, more, width, seconds = asked.names or ALONE, [], asked.width, float(SECONDS)
    if asked.contend:
        names = [f"{KINDS[i % len(KINDS)]}-{i}" for i in range(asked.contend)]
        more, width = ["--contend", "1", "--seconds", str(asked.seconds)], asked.contend
        seconds += asked.seconds
    return int(in_child(names, seconds, width, more, module=__spec__.name) > 0)


if __name__ == "__main__":
    sys.exit(main())
