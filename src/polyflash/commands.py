"""`polyflash run` and `polyflash explain`: the public functions on files and on imagined problems."""

from __future__ import annotations

import argparse
import functools
import json
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

import polyflash
from polyflash import target
from polyflash.mask import Mask
from polyflash.merging import AttentionOutput
from polyflash.operands import BATCH, HEADS, KEYS, OPERANDS, ROWS
from polyflash.options import UsageError, device_here
from polyflash.plan import Plan
from polyflash.quant import NAMED, quantize
from polyflash.tensor_files import output_paths, read_qkv, write_output

_MASKS = ("mask", "segments", "intervals")  # features that are all the one argument mask=
_SCALARS = {"need_lse": True, "batch_invariant": True, "softcap": 30.0, "dropout_p": 0.1}
_ROWS = 64  # query rows of a row block that `explain` imagines
_TIMED = 2.0  # seconds that `run` spends on timing, at least 3 calls


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """Attention on Q, K, V from files: output and lse, with plan, time and error."""
    from polyflash.bench.check import sampled_error
    from polyflash.compare import TOLERANCE, finite

    names, found = read_qkv(options.files, q=options.q, k=options.k, v=options.v, layout=options.layout)
    paths = output_paths(options.output, options.files) if options.output else []
    device = device_here(options.device)
    had_batch = found[0].ndim == 4
    dtype = getattr(torch, options.dtype) if options.dtype else None
    q, k, v = (x.to(device, dtype) if had_batch else x[None].to(device, dtype) for x in found)
    asked: dict[str, Any] = {"causal": options.causal or False, "window": options.window}
    asked["scale"] = options.scale
    placed = {**asked, "layout": options.layout, "backend": options.backend}
    plan = polyflash.explain(q, k, v, return_lse=True, **placed)

    def call() -> AttentionOutput:
        return polyflash.attention(q, k, v, return_lse=True, **placed)

    with torch.no_grad():
        result, seconds = _timed(call, device)
    views = [x.transpose(1, 2) if options.layout == "bshd" else x for x in (q, k, v, result.out)]
    accuracy = sampled_error(views[0], views[1], views[2], views[3], result.lse, asked)
    tolerance = TOLERANCE[plan.spec.dtype]
    correct = accuracy.weighted <= tolerance
    if paths:
        saved = [x.cpu() if had_batch else x[0].cpu() for x in result]
        about = {"layout": options.layout, "made_by": f"polyflash {polyflash.__version__}"}
        write_output(paths, saved[0], saved[1], metadata=about)
    error = {"relative_l2": finite(accuracy.relative), "weighted": finite(accuracy.weighted)}
    error |= {"largest": finite(accuracy.largest), "lse": finite(accuracy.lse), "tolerance": tolerance}
    error |= {"heads": accuracy.heads, "rows": accuracy.rows, "ok": correct}
    facts = {
        "inputs": {name: _shape(x) for name, x in zip(names, (q, k, v), strict=True)},
        "seconds": seconds,
        "gflops": plan.work.flops / seconds["median"] / 1e9,
        "peak_gflops": _peak(plan),
        "error": error,
        "written": [str(path) for path in paths],
    }
    if options.json:
        print(_json({"schema": "polyflash.run/1", **facts, "plan": _plan(plan)}))
    elif not options.quiet:
        _print_run(out, plan, facts)
    if not correct:
        text = f"the error is above {tolerance:.0e}, which rounding does not explain"
        err.print(f"[bold red]mismatch[/] {text}", soft_wrap=True)
    return 0 if correct else 1


def _print_run(out: Console, plan: Plan, found: dict[str, Any]) -> None:
    seconds, error = found["seconds"], found["error"]
    chosen = f"{plan.chosen.name} {plan.config} \\[{plan.rung}]" if plan.chosen else ""
    rate = f"{found['gflops']:.3g} GFLOP/s"
    if found["peak_gflops"]:
        rate += f", {found['gflops'] / found['peak_gflops']:.0%} of this machine's {found['peak_gflops']:.0f}"
    ok, first = "[green]ok[/]" if error["ok"] else "[bold red]mismatch[/]", _time(seconds["first"])
    lines = [
        *((escape(name), shape) for name, shape in found["inputs"].items()),
        ("plan", f"{chosen} on {plan.target.name}"),
        *(("", note) for note in plan.notes),
        ("time", f"{_time(seconds['median'])}, median of {seconds['calls']}; first call {first}"),
        ("rate", rate),
        ("error", f"{_rounded(error['relative_l2'])} relative L2 in the worst row: {ok}"),
        (
            "",
            f"lse {_rounded(error['lse'])}; against float64, {error['rows']} rows of {error['heads']} heads",
        ),
    ]
    out.print(_pairs(lines))
    width = max(len(name) for name, _ in lines)
    for path in found["written"]:
        out.print(f"[bold]{'wrote':<{width}}[/]  {escape(path)}", soft_wrap=True)


def explain(options: argparse.Namespace, out: Console, err: Console) -> int:
    """The kernel that would run a problem given by its sizes alone, on a device that need not be here."""
    if options.device and options.target:
        got = f"{options.device} and --target {options.target}"
        raise UsageError(f"--device: got {got}, wanted one of them: --device is here, --target need not be")
    place = device_here(options.device).split(":")
    here = target.detect(place[0], int(place[-1])) if place[0] == "cuda" else options.target
    try:
        q, k, v, asked = _imagined(options)
    except (RuntimeError, OverflowError) as error:  # more elements than torch can number
        raise UsageError(f"sizes: got {str(error).splitlines()[0]}, wanted smaller ones") from None
    plan = polyflash.explain(q, k, v, **asked, backend=options.backend, target=here)
    if options.json:
        print(_json({"schema": "polyflash.explain/1", **_plan(plan)}))
    else:
        told = Text(str(plan))
        told.highlight_regex(r"\bchosen\b", "bold green")
        told.highlight_regex(r"\brefused\b", "yellow")
        out.print(told)
    return 0 if plan.chosen and (plan.backward is None or plan.backward.chosen) else 1


def _imagined(options: argparse.Namespace) -> tuple[Tensor, Any, Any, dict[str, Any]]:
    """Meta tensors of a problem, and the arguments of `explain` that its features stand for."""
    batch, (heads, kv_heads) = options.batch, options.heads
    (rows, keys), (dim, dim_v) = options.seqlen, options.head_dim
    dtype = getattr(torch, options.dtype)

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    sizes = ((heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v))
    packed = "varlen" in options.features
    tensors: Any = (meta(batch * n, h, d) if packed else meta(batch, h, n, d) for h, n, d in sizes)
    q, k, v = tensors
    for x in (q, k, v) if options.grad else ():
        x.requires_grad_()
    layout: Any = "thd" if packed else "bhsd"
    if options.quant:
        k, v = (quantize(x, s, layout=layout) for x, s in zip((k, v), NAMED[options.quant], strict=True))
    axes = {BATCH: batch, HEADS: heads, ROWS: rows, KEYS: keys, "members + 1": batch + 1, 2: 2}
    axes |= {"row_blocks": -(-rows // _ROWS), "intervals": 1}
    kinds = {"bool": torch.bool, "int32": torch.int32}
    asked: dict[str, Any] = {}
    for operand in OPERANDS:
        if operand.feature is not None and operand.feature.name.lower() in options.features:
            shape = [axes[n] for n in operand.axes]
            if shape:
                asked[operand.name] = meta(*shape, dtype=kinds.get(operand.dtype, dtype))
            elif operand.name in _SCALARS:
                asked[operand.name] = _SCALARS[operand.name]
    masks = []
    if "q_segments" in asked:
        masks.append(Mask.segments(asked.pop("q_segments"), asked.pop("k_segments")))
    if "intervals" in asked:
        masks.append(Mask(bounds=asked.pop("intervals"), rows=_ROWS))
    if "mask" in asked and masks:
        got = " and ".join(name for name in _MASKS if name in options.features)
        raise UsageError(f"--features: got {got}, wanted mask without the others: all are the argument mask=")
    if masks:
        asked["mask"] = functools.reduce(operator.and_, masks)
    if packed:
        asked |= {"max_seqlen_q": rows, "max_seqlen_k": keys}
    asked |= {"return_lse": asked.pop("need_lse", False), "causal": options.causal or False}
    return q, k, v, {**asked, "window": options.window}


def _plan(plan: Plan) -> dict[str, Any]:
    """A plan as plain data."""
    spec = {f.name: getattr(plan.spec, f.name) for f in fields(plan.spec)}
    spec.update(phase=plan.spec.phase.value, features=sorted(f.value for f in plan.spec.features))
    rows = [{"row": v.row.name, "priority": v.row.priority, "reasons": [*v.reasons]} for v in plan.verdicts]
    facts: dict[str, Any] = {"problem": spec, "target": str(plan.target)}
    facts |= {"chosen": plan.chosen.name if plan.chosen else None}
    facts |= {"config": asdict(plan.config) if plan.config else None, "rung": plan.rung}
    facts |= {"flops": plan.work.flops, "bytes": plan.work.bytes, "notes": list(plan.notes), "rows": rows}
    return facts | {"backward": _plan(plan.backward) if plan.backward else None}


def _timed(call: Callable[[], AttentionOutput], device: str) -> tuple[AttentionOutput, dict[str, Any]]:
    """The result of the first call; seconds of it, and the median of at least 3 others in about 2 s. Calls on
    a GPU are queued between events of its own clock."""
    from polyflash.bench.timing import median, queued

    began = time.perf_counter()
    result = call()
    if device != "cpu":
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    times: list[float] = []
    while len(times) < 3 or (len(times) < 20 and sum(times) < _TIMED):
        if device == "cpu":
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        else:
            times.append(queued(call, 10))
    return result, {"first": first, "median": median(times), "calls": len(times)}


def _peak(plan: Plan) -> float | None:
    """GFLOP/s that this CPU can reach; None of a GPU, or where it cannot be measured."""
    from polyflash.bench import calibrate, kind_of

    calibration = calibrate(plan.target) if plan.target.kind == "cpu" else None
    return calibration.peak(kind_of(plan.spec.dtype, plan.target)).total if calibration else None


def _pairs(lines: Sequence[tuple[str, str]]) -> Table:
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in lines:
        made.add_row(name, text)
    return made


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {'×'.join(map(str, x.shape))}"


def _time(seconds: float) -> str:
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {unit}"


def _rounded(x: float | None) -> str:
    return "not finite" if x is None else f"{x:.1e}"


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False)
