"""Kernels of the WebGPU engine on this machine's adapter: rates by timestamp queries, results checked.

    python -m benchmarks.webgpu --json build/webgpu.json

Each variant is compiled and timed by a child process, which is killed if a driver's compiler takes longer
than PATIENCE seconds, as one did with a tile of 16 x 16 threads. What torch and our Triton kernel make of the
same sizes on a CUDA device tells `python -m benchmarks.gpu --filter float32`. The ladder, other mappings of
work to threads from a thread per output element on, and what each of their steps brings:

    python -m benchmarks.webgpu --what mappings,forward --sizes 1x8x2048x64
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import Shape
from benchmarks.peers import Child
from benchmarks.webgpu.mappings import DIM, MAPPINGS
from benchmarks.webgpu.worker import BACKWARD, DECODE, FORWARD, GROUPS, SPLITS, STEPS, measuring

PATIENCE, START = 45.0, 60.0  # seconds
KEPT = 5
MANY_ROWS = 1 << 15  # of all heads: fewer leave cores of a large card idle
SIZES = {"512": "1x8x512", "2k": "1x8x2048", "2k wide": "2x32x2048", "8k": "1x16x8192", "tiny": "1x2x128"}


def shapes(size: str) -> list[Shape]:
    """Of a name in SIZES, with two head dims; or the one that is written out."""
    return [Shape.of(f"{SIZES[size]}x{d}") for d in (64, 128)] if size in SIZES else [Shape.of(size)]


class Request(NamedTuple):
    """One line of the table."""

    what: str  # forward, backward, decode, copy, host or mappings
    shape: Shape = Shape(1, 1, 1, 1, 64)
    causal: bool = False
    variant: str = ""
    trusted: bool = True

    @property
    def name(self) -> str:
        kind = "causal" if self.causal else "full"
        return (
            f"{self.what:9s}{self.shape!s:16s}{kind:7s}{self.variant}{'' if self.trusted else ' (checked)'}"
        )


def requests(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[Request]:
    """What to measure, the most telling first: every variant at the first size; of causal rows and of other
    sizes those that were fastest there."""
    sizes = [size.strip() for size in options.sizes.split(",")]
    wanted = options.what.split(",")
    for what in ("copy", "host"):
        if what in wanted:
            yield Request(what)
    for size in sizes:
        for shape in shapes(size):
            for causal in (False, True):
                if "mappings" in wanted and shape.head_dim == DIM and not causal:
                    yield from (
                        Request("mappings", shape, False, name) for name in MAPPINGS if options.filter in name
                    )
                for what, table in (("forward", FORWARD), ("backward", BACKWARD)):
                    tried = [name for name in table if options.filter in name]
                    if causal or size != sizes[0]:
                        tried = fastest(rows, what, shapes(sizes[0]), shape.head_dim)
                    for name in ("", *tried) if what in wanted else ():
                        yield Request(what, shape, causal, name)
                    if what == "forward" in wanted and shape.batch * shape.heads * shape.seqlen < MANY_ROWS:
                        best = fastest(rows, what, [shape], shape.head_dim)[:3]
                        for name, parts in itertools.product(best, SPLITS):
                            yield Request(what, shape, causal, f"{name} / {parts}")
        if size == sizes[0] and "decode" in wanted:
            for shape in STEPS["tiny" if size == "tiny" else "large"]:
                for name in ("", *DECODE) if not options.filter else ("",):
                    for groups in GROUPS if name else ("",):
                        yield Request("decode", shape, False, f"{name} / {groups}" if name else "")
    for shape in shapes(sizes[0]) if options.checked else ():
        for what in {"forward", "backward"} & set(wanted):
            for name in fastest(rows, what, [shape], shape.head_dim)[:3]:
                yield Request(what, shape, False, name, trusted=False)


def fastest(rows: list[dict[str, Any]], what: str, shapes: list[Shape], head_dim: int) -> list[str]:
    """Variants by their rate with full rows of the first size, the best `KEPT`."""
    timed = [
        row
        for row in rows
        if row["what"] == what and row["shape"] in [*map(tuple, shapes)] and row["shape"][4] == head_dim
        if "TFLOP/s" in row and not row["causal"] and row["trusted"]
        if row["variant"] and " / " not in row["variant"]
    ]
    return [row["variant"] for row in sorted(timed, key=lambda row: -row["TFLOP/s"])[:KEPT]]


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = made.add_argument
    add("--json", type=Path, default=Path("build/webgpu.json"), metavar="FILE")
    add("--sizes", default="2k,2k wide,8k,512", help=f"of {', '.join(SIZES)}, or 1x8x2048x64")
    add(
        "--what",
        default="copy,host,forward,backward,decode",
        metavar="NAME,NAME",
        help="these, or mappings",
    )
    add("--filter", default="", help="variants with this in their name")
    add("--checked", action="store_true", help="the fastest again, with the compiler's bounds checks")
    add("--budget", type=float, default=540.0, metavar="SECONDS")
    options = made.parse_args(argv)
    until = time.monotonic() + options.budget
    rows: list[dict[str, Any]] = []
    child, about = None, {}
    slow: set[str] = set()  # variants that a compiler did not finish
    for request in requests(options, rows):
        if time.monotonic() > until:
            print("out of time", flush=True)
            break
        compiled = f"{request.what} {request.variant} {request.shape.head_dim} {request.trusted}"
        if compiled in slow:
            continue
        if child is None or not child.alive:
            child = Child(measuring, (), START)
            about = child.ask({"what": "about"}, START)
            print(about, flush=True)
        answer = child.ask({**request._asdict(), "shape": tuple(request.shape)}, PATIENCE)
        if not child.alive:
            slow.add(compiled)
        rows.append({**request._asdict(), "shape": tuple(request.shape), **answer})
        print(f"{request.name:60s}{said(answer)}", flush=True)
    if child:
        child.end()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1), encoding="utf-8")
    return int(not rows or any(row.get("error", 0) > row.get("allowed", 1e-4) for row in rows))


def said(answer: dict[str, Any]) -> str:
    if "reason" in answer:
        return f"- {answer['reason'][:150]}"
    words = [f"{answer['ms']:10.3f} ms"]
    words += [f"{answer[unit]:9.4g} {unit}" for unit in ("TFLOP/s", "GB/s") if unit in answer]
    words += [f"error {answer['error']:.1e}"] if "error" in answer else []
    words += [f"built in {answer['built']:.1f} s"] if answer.get("built", 0) > 1 else []
    return "  ".join([*words, *([answer["note"]] if "note" in answer else [])])


if __name__ == "__main__":
    sys.exit(main())
