"""Attention over codes of keys and values on this CPU, beside 16 bits and other implementations.

    python -m benchmarks.codes decode [--ggml FOLDER]    one token, beside what only reads, ggml, onnxruntime
    python -m benchmarks.codes prefill                   as many rows as keys, integer products beside floats

FOLDER holds libggml-base.so and libggml-cpu.so, built as llama.cpp builds them (CMake, Release, GGML_NATIVE).
Arms take turns in one process with as many threads as torch has. Of a decode step each has several sets of
keys and values, together larger than the last cache, so that every call finds its own in memory; *between* is
the same step right behind a product and a SiLU of torch, and *read* reads the bytes of bfloat16 keys and
values once, as `benchmarks.decode.stream` does. In a prefill, floats are the values of the codes, decoded
ahead. Errors are from float64 over the keys and values that were encoded, so they are those of the codes and
of the kernel together; an arm that is further off than its codes explain ends the run before any time is
taken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import polyflash
from benchmarks import Shape, ggml, peers
from benchmarks.decode import stream
from benchmarks.decode.problems import Turn, copies
from polyflash import target
from polyflash.bench import Arm, calibrate, compare
from polyflash.bench.command import huge_pages
from polyflash.quant import NAMED, Scheme, quantize

READ = "read"
SCHEMES = ("int8", "int8-smooth", "int8-channel", "int4-token", "int4")
# Relative L2 of the output, by bits of a value; ggml sums float16 values in float16.
ALLOWED: dict[int | str, float] = {16: 2e-2, 8: 4e-2, 4: 0.3, "ggml f16": 3e-2}


@dataclass(frozen=True)
class Source:
    """q (1, heads, rows, head_dim), k and v (1, num_kv_heads, seqlen_k, head_dim), float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False

    @staticmethod
    def of(shape: Shape, rows: int, causal: bool = False) -> Source:
        """Normal values from a seed."""
        draw = torch.Generator().manual_seed(0)
        counts = (shape.heads, rows), *[(shape.kv_heads, shape.seqlen)] * 2
        q, k, v = (torch.randn(shape.batch, *x, shape.head_dim, generator=draw) for x in counts)
        return Source(q, k, v, causal)

    def error(self, out: Tensor) -> float:
        """Relative L2, from float64."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        right = sdpa(q, k, v, is_causal=self.causal, enable_gqa=True)
        return float((out.double() - right).norm() / right.norm())


@dataclass(frozen=True)
class Contender:
    """`prepare` makes a call on a set of its own; `bytes` are those of one set's keys and values."""

    name: str
    bits: int
    bytes: int
    prepare: Callable[[], Callable[[], Any]]


def prefill(source: Source) -> Iterator[Contender]:
    """Products of int8 codes, then floats of the same values."""
    codes: Any = [quantize(x, Scheme(compute="int8")) for x in (source.k, source.v)]
    wide: Any = [source.q, *(x.values(torch.float32) for x in codes)]
    half: Any = [x.bfloat16() for x in wide]
    ours: Any = partial(polyflash.attention, causal=source.causal)
    theirs: Any = partial(sdpa, is_causal=source.causal)
    calls = {"int8": partial(ours, source.q, *codes), "int8, q bf16": partial(ours, half[0], *codes)}
    for name, given in (("fp32", wide), ("bf16", half)):
        calls |= {f"ours {name}": partial(ours, *given), f"torch {name}": partial(theirs, *given)}
    for name, call in calls.items():
        yield Contender(name, 8, sum(x.nbytes for x in call.args[1:]), partial(lambda call: call, call))


def decode(source: Source, library: Any) -> Iterator[Contender]:
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


def lines(source: Source, every: Sequence[Contender], base: str, seconds: float) -> Iterator[str]:
    """A line per arm: error, time, rate and ratio to the base's time; of a decode step also between torch's
    operators."""
    weight = torch.randn(512, 512)
    x, arms, about = torch.randn(64, 512), [], {}
    places = ("", ", between") if source.q.shape[2] == 1 else ("",)

    def model() -> None:
        torch.nn.functional.silu(x @ weight)

    for c in every:
        count = copies(c.bytes) if len(places) > 1 else 1
        turn: Turn[Callable[[], Any]] = Turn([c.prepare() for _ in range(count)])
        out, error = turn.things[0](), ""
        if c.bits:
            allowed = ALLOWED.get(c.name, ALLOWED[c.bits])
            out = turn.things[0].output() if isinstance(turn.things[0], ggml.Step) else out
            error = f"{(off := source.error(out)):.1e}"
            if not off <= allowed:
                raise SystemExit(f"{c.name}: got a relative error of {off:.1e}, wanted {allowed:.0e}")
        call = turn.each(lambda step: step())
        arms += [Arm(c.name + place, call, before=model if place else None) for place in places]
        about[c.name] = (c.bytes, error)
    calibration = calibrate(target.detect("cpu"))
    found = compare(arms, seconds=seconds, speed=calibration.speed if calibration else None)
    heads = [f"{place.strip(', ') or 'alone'}, µs | GB/s | of {base}" for place in places]
    yield f"| arm | MB | error | {' | '.join(heads)} |"
    yield "|---" * (3 + 3 * len(places)) + "|"
    for name, (size, error) in about.items():
        cells = [name, f"{size / 1e6:.1f}", error]
        for place in places:
            median = found.summary(name + place).median
            ratio = found.summary(base + place).median / median
            cells += [f"{median * 1e6:.0f}", f"{size / median / 1e9:.1f}", f"{ratio:.2f}"]
        yield f"| {' | '.join(cells)} |"
    if found.contended:
        yield "contended: too few quiet rounds"


PROBLEMS = {
    "decode": ",".join(f"1x{heads}x{n}x128" for heads in ("8", "32/8") for n in (4096, 16384, 65536)),
    "prefill": "1x8x2048x64,1x8x2048x128",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=PROBLEMS)
    add("--ggml", type=Path, help="folder of libggml-base.so, libggml-cpu.so")
    add("--problems", help="1x32/8x4096x128, batch 1 x heads/kv heads x keys x head_dim; several with commas")
    add("--seconds", type=float, default=8.0, help="per table")
    options = parser.parse_args(argv)
    library = ggml.load(options.ggml) if options.ggml else None
    print(
        f"{target.cpu_name()}, {torch.get_num_threads()} threads, huge pages: {huge_pages() or 'unknown'};"
        f" polyflash {polyflash.__version__}, torch {torch.__version__}"
        + (f", ggml {library.version().decode()}" if library else "")
    )
    for shape in map(Shape.of, (options.problems or PROBLEMS[options.what]).split(",")):
        for causal in (False, True) if options.what == "prefill" else (False,):
            if options.what == "prefill":
                source, base = Source.of(shape, shape.seqlen, causal), "int8"
                every = [*prefill(source)]
            else:
                source, base = Source.of(shape, 1), "bfloat16"
                every = [*decode(source, library)]
            print(f"\n{shape}{', causal' if causal else ''}\n")
            with torch.no_grad():
                for line in lines(source, every, base, options.seconds):
                    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
