"""One decode step over 16 bits and over codes: polyflash beside what only reads them, ggml and onnxruntime.

    python -m benchmarks.decode.codes [--ggml FOLDER]

FOLDER holds libggml-base.so and libggml-cpu.so, built as llama.cpp builds them (CMake, Release, GGML_NATIVE).
Arms take turns in one process with as many threads as torch has; each has several sets of keys and values,
together larger than the last cache, so that every call finds its own in memory. *between* is the same step
right behind a product and a SiLU of torch. *read* reads the bytes of bfloat16 keys and values once, as
`benchmarks.decode.stream` does. Errors are from float64 over the keys and values that were encoded, so they
are those of the codes and of the kernel together; an arm that is further off than its codes explain ends the
run before any time is taken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import polyflash
from benchmarks import peers
from benchmarks.decode import ggml, stream
from benchmarks.decode.problems import Turn, copies
from polyflash import target
from polyflash.bench import Arm, calibrate, compare
from polyflash.bench.command import huge_pages
from polyflash.quant import NAMED, quantize

BASE, READ = "bfloat16", "read"
SCHEMES = ("int8", "int8-smooth", "int8-channel", "int4-token", "int4")
# Relative L2 of the output, by bits of a value; ggml sums float16 values in float16.
ALLOWED: dict[int | str, float] = {16: 2e-2, 8: 4e-2, 4: 0.3, "ggml f16": 3e-2}


@dataclass(frozen=True)
class Source:
    """q (1, heads, 1, head_dim), k and v (1, num_kv_heads, seqlen_k, head_dim), float32."""

    q: Tensor
    k: Tensor
    v: Tensor

    def error(self, out: Tensor) -> float:
        """Relative L2, from float64."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        right = sdpa(q, k, v, enable_gqa=True)
        return float((out.double() - right).norm() / right.norm())


@dataclass(frozen=True)
class Contender:
    """`prepare` makes a call on a set of its own; `bytes` are those of one set's keys and values."""

    name: str
    bits: int
    bytes: int
    prepare: Callable[[], Callable[[], Any]]


def contenders(source: Source, library: Any) -> Iterator[Contender]:
    """Every arm that can run here; who cannot is named on stderr."""
    threads = torch.get_num_threads()

    def ours(q: Tensor, k: Any, v: Any) -> Callable[[], Tensor]:
        return partial(polyflash.attention, q, k, v)

    def copied(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        return ours(q, k.clone(), v.clone())

    def coded(name: str) -> Callable[[], Tensor]:
        return ours(q, *map(quantize, (k, v), NAMED[name]))

    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (x.to(dtype) for x in (source.q, source.k, source.v))
        yield Contender(str(dtype)[6:], 16, k.nbytes + v.nbytes, partial(copied, q, k, v))
    for name in SCHEMES:
        pair = [quantize(x, scheme) for x, scheme in zip((k, v), NAMED[name], strict=True)]
        size, bits = sum(x.nbytes for x in pair), 8 // pair[0].form.packed
        yield Contender(name, bits, size, partial(coded, name))
    if stream.available():
        yield Contender(
            READ, 0, k.nbytes + v.nbytes, lambda: stream.Read([k.clone(), v.clone()], stream.PLACES)
        )
    for kind, bits in (("f16", 16), ("q8_0", 8), ("q4_0", 4)) if library else ():
        step = partial(ggml.Step, library, source.q, source.k, source.v, kind, threads)
        yield Contender(f"ggml {kind}", bits, step().bytes, step)
    if absent := peers.PEERS["onnxruntime-attention"].absent:
        print(f"no onnxruntime: {absent}", file=sys.stderr)
        return
    for bits in (16, 8, 4):
        size = source.k.numel() * 2 * (bits if bits < 16 else 32) // 8
        name = "float32" if bits == 16 else f"int{bits}"
        call = partial(onnxruntime_codes, source, bits, threads)
        yield Contender(f"onnxruntime {name}", bits, size, call)


def onnxruntime_codes(source: Source, bits: int, threads: int) -> Callable[[], Tensor]:
    """com.microsoft.GroupQueryAttention over a cache with one scale per channel, in float32 with 16 bits. It
    always writes the newest token; here it writes the last one again."""
    heads, head_dim = source.q.shape[1], source.q.shape[3]
    caches, scales, newest = zip(*(_encoded(x, bits) for x in (source.k, source.v)), strict=True)
    tokens = caches[0].shape[2]
    options = {"domain": peers.MICROSOFT, "num_heads": heads, "kv_num_heads": caches[0].shape[1]}
    inputs: dict[str, Tensor | None] = {"q": source.q.reshape(1, 1, -1), "k": newest[0], "v": newest[1]}
    inputs |= {"past_k": caches[0], "past_v": caches[1], "lens": torch.tensor([tokens - 1]).int()}
    inputs |= {"total": torch.tensor(tokens).int()}
    if bits < 16:
        inputs |= dict.fromkeys(("cosines", "sines", "positions", "bias", "sinks"))
        inputs |= {"k_scale": scales[0], "v_scale": scales[1]}
        options |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
        options["kv_cache_bit_width"] = bits
    outputs = {"out": torch.empty(1, 1, heads * head_dim), "present_k": caches[0], "present_v": caches[1]}
    run = peers.onnx_node("GroupQueryAttention", options, inputs, outputs, threads)
    return lambda: run().view(1, heads, 1, head_dim)


def _encoded(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as onnxruntime keeps them, a scale per head and channel, and the newest token
    (1, 1, ·)."""
    newest = x[:, :, -1].reshape(1, 1, -1).contiguous()
    if bits == 16:
        return x.clone(), x.new_ones(()), newest
    top = (1 << bits - 1) - 1
    scale = x.abs().amax(2, keepdim=True) / top
    codes = (x / scale).round().clamp(-top - 1, top)
    if bits == 4:
        low, high = (codes + 8).byte().unflatten(3, (-1, 2)).unbind(4)
        return (low | high << 4).contiguous(), scale.flatten(), newest
    return codes.to(torch.int8), scale.flatten(), newest


def rows(source: Source, library: Any, seconds: float) -> Iterator[str]:
    """A line per arm: time, rate and ratio to our own bfloat16 step, alone and between torch's operators."""
    weight = torch.randn(512, 512)
    x, arms, about = torch.randn(64, 512), [], {}

    def model() -> None:
        torch.nn.functional.silu(x @ weight)

    for c in contenders(source, library):
        turn: Turn[Callable[[], Any]] = Turn([c.prepare() for _ in range(copies(c.bytes))])
        out, error = turn.things[0](), ""
        if c.bits:
            allowed = ALLOWED.get(c.name, ALLOWED[c.bits])
            out = turn.things[0].output() if isinstance(turn.things[0], ggml.Step) else out
            error = f"{(off := source.error(out)):.1e}"
            if not off <= allowed:
                raise SystemExit(f"{c.name}: got a relative error of {off:.1e}, wanted {allowed:.0e}")
        call = turn.each(lambda step: step())
        arms += [Arm(c.name, call), Arm(f"{c.name}, between", call, before=model)]
        about[c.name] = (c.bytes, error)
    calibration = calibrate(target.detect("cpu"))
    found = compare(arms, seconds=seconds, speed=calibration.speed if calibration else None)
    for name, (size, error) in about.items():
        cells = [name, f"{size / 1e6:.1f}", error]
        for behind in ("", ", between"):
            median = found.summary(name + behind).median
            base = found.summary(BASE + behind).median
            cells += [f"{median * 1e6:.0f}", f"{size / median / 1e9:.1f}", f"{base / median:.2f}"]
        yield f"| {' | '.join(cells)} |"
    if found.contended:
        yield "contended: too few quiet rounds"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ggml", type=Path, help="folder of libggml-base.so, libggml-cpu.so")
    add("--heads", default="8/8,32/8", help="query heads/kv heads, several with commas")
    add("--keys", default="4096,16384,65536", help="several with commas")
    add("--head-dim", type=int, default=128)
    add("--seconds", type=float, default=8.0, help="per table")
    options = parser.parse_args()
    library = ggml.load(options.ggml) if options.ggml else None
    print(
        f"{target.cpu_name()}, {torch.get_num_threads()} threads, huge pages: {huge_pages() or 'unknown'};"
        f" polyflash {polyflash.__version__}, torch {torch.__version__}"
        + (f", ggml {library.version().decode()}" if library else "")
    )
    for pair in options.heads.split(","):
        for keys in map(int, options.keys.split(",")):
            heads, kv_heads = map(int, pair.split("/"))
            draw = torch.Generator().manual_seed(0)
            shapes = ((heads, 1), (kv_heads, keys), (kv_heads, keys))
            source = Source(*(torch.randn(1, *shape, options.head_dim, generator=draw) for shape in shapes))
            print(f"\n{pair} heads, {keys} keys, head_dim {options.head_dim}\n")
            print("| arm | MB | error | alone, us | GB/s | of bfloat16 | between, us | GB/s | of bfloat16 |")
            print("|---|---|---|---|---|---|---|---|---|")
            with torch.no_grad():
                for line in rows(source, library, options.seconds):
                    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
