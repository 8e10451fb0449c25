"""`polyflash quant report`: what every scheme costs, on the six families and on tensors of a file."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyflash.api import attention
from polyflash.bench.timing import compared
from polyflash.compare import finite
from polyflash.errors import SpecError
from polyflash.quant.choosing import REPORTED, Error, bits_of, error_of, recommend_scheme, sample_of, text_of
from polyflash.quant.families import FAMILIES, Triple, drawn
from polyflash.quant.tensor import quantize
from polyflash.tensor_files import read_qkv

_SIZES = (2, 256, 2048, 128)  # heads, rows, keys, head_dim of the families
_STEP_HEADS, _STEP_SECONDS = 8, 5.0  # of a decode step that is timed
_EXACT = "bfloat16"


class Line(NamedTuple):
    """Error of one scheme on one kind of inputs, and its bits per value of k and v there."""

    inputs: str
    scheme: str
    bits: float
    error: Error


def report(options: argparse.Namespace, out: Console, err: Console) -> int:
    """Errors of the output of attention over the values of codes, in float64, against attention over k and v
    as they are: a kernel's rounding comes on top."""
    if options.output and importlib.util.find_spec("matplotlib") is None:
        raise SpecError("-o: matplotlib is not installed. Use pip install 'polyflash[bench]'")
    inputs = {name: drawn(name, *_SIZES, options.seed) for name in FAMILIES}
    if options.data:
        names, tensors = read_qkv([options.data], q=options.q, k=options.k, v=options.v, layout="bhsd")
        q, k, v = (x if x.ndim == 4 else x[None] for x in tensors)
        inputs[names[0].rpartition(".")[0] or "data"] = q, k, v
    lines = list(measured(inputs, options.causal or False))
    advice = {}
    for name, (q, k, v) in inputs.items() if options.error else ():
        advice[name] = recommend_scheme(q, k, v, options.error, causal=options.causal or False).reason
    times = step_times(options.speed) if options.speed else {}
    if options.output:
        _draw(lines, list(inputs), options.output, times)
    if options.json:
        schemes = {name: text_of(pair) for name, pair in REPORTED.items()}
        errors = [
            {**x._asdict(), "error": {n: finite(e) for n, e in x.error._asdict().items()}} for x in lines
        ]
        facts: dict[str, object] = {
            "schema": "polyflash.quant/1",
            "seed": options.seed,
            "sizes": _SIZES,
            "schemes": schemes,
        }
        if times:
            facts |= {"speed": {"keys": options.speed, "microseconds": times}}
        print(json.dumps({**facts, "errors": errors, "advice": advice}, indent=1, allow_nan=False))
        return 0
    out.print(_table(lines, list(inputs), options.measure, times))
    if not options.quiet:
        out.print(f"{options.measure} of the output against float64; bits per value of k and v together")
        if times:
            heads = f"{_STEP_HEADS} heads, head_dim {_SIZES[3]}, {options.speed} keys"
            out.print(f"speed: a step over bfloat16, {times[_EXACT]:.0f} us, in one over codes; cpu, {heads}")
    for name, reason in advice.items():
        out.print(f"[bold]{escape(name)}[/] {escape(reason)}")
    return 0


def measured(inputs: Mapping[str, Triple], causal: bool | str, rows: int = _SIZES[1]) -> Iterable[Line]:
    """The error of every scheme on each of these q, k, v, of so many rows of a head."""
    for name, (q, k, v) in inputs.items():
        sample = sample_of(q, k, v, causal, rows=rows)
        exact = sample.attend()
        for scheme, pair in REPORTED.items():
            bits = bits_of(pair, k.shape, v.shape)
            yield Line(name, scheme, bits, error_of(sample.attend(*pair), exact))


def step_times(keys: int) -> dict[str, float]:
    """Microseconds of attention of one token over so many keys in bfloat16, and over the codes of every
    scheme, by turns on this CPU: what no kernel reads is decoded in every step."""
    draw = torch.Generator("cpu").manual_seed(0)
    sizes = ((1, _STEP_HEADS, n, _SIZES[3]) for n in (1, keys, keys))
    q, k, v = (torch.randn(x, generator=draw, device="cpu").to(torch.bfloat16) for x in sizes)
    calls = {_EXACT: partial(attention, q, k, v)}
    for name, (of_k, of_v) in REPORTED.items():
        calls[name] = partial(attention, q, quantize(k, of_k), quantize(v, of_v))
    found = compared(calls, "cpu", _STEP_SECONDS)
    return {name: found.summary(name).median * 1e6 for name in calls}


def _table(lines: list[Line], inputs: list[str], measure: str, times: Mapping[str, float]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, header_style="", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in ("scheme", "bits", *["speed"] * bool(times), *map(escape, inputs)):
        made.add_column(column, justify="left" if column == "scheme" else "right", no_wrap=True)
    for scheme in REPORTED:
        of_scheme = [x for x in lines if x.scheme == scheme]
        cells = (in_short(getattr(x.error, measure), measure) for x in of_scheme)
        speed = [f"{times[_EXACT] / times[scheme]:.2f}"] if times else []
        made.add_row(scheme, f"{of_scheme[0].bits:.2f}", *speed, *cells)
    return made


def in_short(x: float, measure: str = "relative") -> str:
    """Two digits of an error, five of a cosine."""
    return f"{x:.5f}" if measure == "cosine" else f"{x:.1e}".replace("e-0", "e-").replace("e+00", "")


def _draw(lines: list[Line], inputs: list[str], file: str, times: Mapping[str, float]) -> None:
    """Error against bits per value, or against speed where that was measured; a panel for each kind of
    inputs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    high, wide = -(-len(inputs) // 4), min(4, len(inputs))
    figure = pyplot.figure(figsize=(2 + 2.4 * wide, 1 + 2.4 * high), layout="constrained")
    axes = figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False)
    for axis, name in zip(axes.flat, inputs, strict=False):
        axis.set_title(name, loc="left", fontsize=9)
        axis.set_yscale("log")
        axis.grid(color="#e6e6e6")
        for x, marker in zip((x for x in lines if x.inputs == name), cycle("osD^v<>PX*d"), strict=False):
            place = times[_EXACT] / times[x.scheme] if times else x.bits
            axis.plot(place, x.error.relative, marker, markersize=5, alpha=0.8, label=x.scheme)
    for unused in axes.flat[len(inputs) :]:
        unused.remove()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    label = "speed of a decode step, of bfloat16's" if times else "bits per value of k and v"
    figure.supxlabel(label, fontsize=9)
    figure.supylabel("relative L2 error of the output", fontsize=9)
    figure.savefig(file, dpi=150)
