"""`polyflash run | explain | bench | tune | ablate | doctor | env | cache`: the public functions on files, on
imagined problems and against torch SDPA, and kernels against themselves; `reports.py` and `doctor.py` hold
the commands that need no torch.

Exit codes: 0 done; 1 an error, a refusal or a mismatch; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import operator
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import polyflash
from polyflash import backends, doctor, env, reports, target
from polyflash.bench import ablation
from polyflash.bench import command as bench_command
from polyflash.dtypes import BY_NAME
from polyflash.errors import SpecError, UnsupportedError
from polyflash.mask import Mask
from polyflash.plan import Plan
from polyflash.spec import Feature
from polyflash.tensor_files import read_qkv, write_output
from polyflash.tuning import command as tuning_command

ALIGNMENTS = ("bottom_right", "top_left")
FEATURES = (
    "alibi", "batch_invariant", "bias", "dropout", "intervals", "kv_lens", "kv_starts", "lse", "mask",
    "q_offset", "segments", "sinks", "softcap", "varlen",
)  # fmt: skip
_MASKS = ("mask", "segments", "intervals")  # features that are all the one argument mask=
_ROWS = 64  # query rows of a row block that `explain` imagines
_TIMED = 2.0  # seconds that `run` spends on timing, at least 3 calls


class _Usage(Exception):
    """Arguments that make no sense together."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = _parser()
    try:
        options = parser.parse_args(_with_alignment(sys.argv[1:] if argv is None else argv))
    except SystemExit as stop:  # argparse has printed its message
        return stop.code if isinstance(stop.code, int) else 2
    if not hasattr(options, "command"):
        parser.print_help()
        return 2
    colourless = env.NO_COLOR.read() != ""
    out = Console(no_color=colourless, highlight=False)
    err = Console(no_color=colourless, highlight=False, stderr=True)
    try:
        return options.command(options, out, err)
    except _Usage as error:
        err.print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except (SpecError, UnsupportedError, OSError) as error:
        text = (
            f"{error.filename}: {error.strerror}"
            if isinstance(error, OSError) and error.filename
            else str(error)
        )
        err.print(f"[bold red]error[/] {escape(text)}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        err.print("interrupted")
        return 130


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """Attention on Q, K, V from files: output and lse, with plan, time and error."""
    from polyflash.bench import calibrate, kind_of, median
    from polyflash.bench.suite import TOLERANCE, sampled_error

    names, found = read_qkv(options.files, q=options.q, k=options.k, v=options.v, layout=options.layout)
    had_batch = found[0].ndim == 4
    if options.dtype:
        found = [x.to(getattr(torch, options.dtype)) for x in found]
    q, k, v = found if had_batch else (x[None] for x in found)
    asked: dict[str, Any] = {
        "causal": options.causal or False,
        "window": options.window,
        "scale": options.scale,
    }
    placed: dict[str, Any] = {**asked, "layout": options.layout, "backend": options.backend}
    plan = polyflash.explain(q, k, v, return_lse=True, **placed)
    with torch.no_grad():
        began = time.perf_counter()
        result = polyflash.attention(q, k, v, return_lse=True, **placed)
        first = time.perf_counter() - began
        times = _times(lambda: polyflash.attention(q, k, v, return_lse=True, **placed))
    device = target.detect("cpu")
    calibration = calibrate(device)
    peak = calibration.peak(kind_of(plan.spec.dtype, device)).total if calibration else None
    views = [x.transpose(1, 2) if options.layout == "bshd" else x for x in (q, k, v, result.out)]
    accuracy = sampled_error(views[0], views[1], views[2], views[3], result.lse, **asked)
    tolerance = TOLERANCE[plan.spec.dtype]
    correct = accuracy.weighted <= tolerance
    written = []
    if options.output:
        saved = result if had_batch else (result.out[0], result.lse[0])
        about = {"layout": options.layout, "made_by": f"polyflash {polyflash.__version__}"}
        written = write_output(Path(options.output), options.files, *saved, metadata=about)
    facts = {
        "inputs": {name: _shape(x) for name, x in zip(names, (q, k, v), strict=True)},
        "seconds": {"first": first, "median": median(times), "calls": len(times)},
        "gflops": plan.work.flops / median(times) / 1e9,
        "peak_gflops": peak,
        "error": {
            "relative_l2": _number(accuracy.relative),
            "weighted": _number(accuracy.weighted),
            "largest": _number(accuracy.largest),
            "lse": _number(accuracy.lse),
            "tolerance": tolerance,
            "heads": accuracy.heads,
            "rows": accuracy.rows,
            "ok": correct,
        },
        "written": [str(path) for path in written],
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
    ok = "[green]ok[/]" if error["ok"] else "[bold red]mismatch[/]"
    lines = [
        *((escape(name), shape) for name, shape in found["inputs"].items()),
        ("plan", f"{chosen} on {plan.target.name}"),
        *(("", note) for note in plan.notes),
        (
            "time",
            f"{_time(seconds['median'])}, median of {seconds['calls']}; first call {_time(seconds['first'])}",
        ),
        ("rate", rate),
        (
            "error",
            f"{_rounded(error['relative_l2'])} relative L2 in the worst row: {ok}",
        ),
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
    """Who would run a problem that exists only as sizes, on a device that need not be here."""
    try:
        q, k, v, asked = _imagined(options)
    except (RuntimeError, OverflowError) as error:  # more elements than torch can number
        raise _Usage(f"sizes: got {str(error).splitlines()[0]}, wanted smaller ones") from None
    plan = polyflash.explain(q, k, v, **asked, backend=options.backend, target=options.target)
    if options.json:
        print(_json({"schema": "polyflash.explain/1", **_plan(plan)}))
    else:
        _print_plan(out, plan)
    return 0 if plan.chosen and (plan.backward is None or plan.backward.chosen) else 1


def _print_plan(out: Console, plan: Plan) -> None:
    s = plan.spec
    kind = "causal" if s.causal else "full"
    packed = Feature.VARLEN in s.features
    batch, lengths = (f"members {s.members}", "total") if packed else (f"batch {s.batch}", "seqlen")
    out.print(
        f"[bold]{s.phase.value}[/], {kind}, {s.dtype}, {batch},"
        f" heads {s.num_q_heads}/{s.num_kv_heads},"
        f" {lengths} {s.seqlen_q}×{s.seqlen_k}, head_dim {s.head_dim}/{s.head_dim_v}"
    )
    features = ", ".join(sorted(f.value for f in s.features))
    work = f"{plan.work.flops / 1e9:.3g} GFLOP, {plan.work.bytes / 1e6:.3g} MB"
    out.print(f"needs {features or 'no features'}; {work}; on {_target(plan)}")
    made = Table(box=box.SIMPLE_HEAD, header_style="", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    made.add_column("row", no_wrap=True)
    made.add_column("verdict", no_wrap=True)
    made.add_column("why", overflow="fold")
    for v in plan.verdicts:
        if v.row is plan.chosen:
            made.add_row(v.row.name, "[bold green]chosen[/]", f"{plan.config} \\[{plan.rung}]")
        elif not v.reasons:
            made.add_row(v.row.name, "could run", f"priority {v.row.priority}")
        else:
            made.add_row(v.row.name, "[yellow]refused[/]", escape("\n".join(v.reasons)))
    out.print("", made, "")
    for note in plan.notes:
        out.print(f"note: {note}")
    if plan.backward is not None:
        out.print()
        _print_plan(out, plan.backward)


def _imagined(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Meta tensors of a problem, and the arguments of `explain` that its features stand for."""
    batch, (heads, kv_heads) = options.batch, options.heads
    (rows, keys), (dim, dim_v) = options.seqlen, options.head_dim
    dtype = getattr(torch, options.dtype or "float32")

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def int32(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.int32)

    sizes = ((heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v))
    packed = "varlen" in options.features
    q, k, v = (meta(batch * n, h, d) if packed else meta(batch, h, n, d) for h, n, d in sizes)
    whole: dict[str, tuple[str, Any]] = {
        "alibi": ("alibi_slopes", meta(heads, dtype=torch.float32)),
        "batch_invariant": ("batch_invariant", True),
        "bias": ("bias", meta(1, heads, rows, keys)),
        "dropout": ("dropout_p", 0.1),
        "kv_lens": ("kv_lens", int32(batch)),
        "kv_starts": ("kv_starts", int32(batch)),
        "lse": ("return_lse", True),
        "mask": ("mask", meta(batch, 1, rows, keys, dtype=torch.bool)),
        "q_offset": ("q_offset", int32(batch)),
        "sinks": ("sinks", meta(heads)),
        "softcap": ("softcap", 30.0),
    }
    lists = int32(-(-rows // _ROWS), 1)
    masks = {
        "segments": Mask.segments(int32(batch, rows), int32(batch, keys)),
        "intervals": Mask.intervals(lists, lists, rows=_ROWS),
    }
    structured = [mask for name, mask in masks.items() if name in options.features]
    if "mask" in options.features and structured:
        got = " and ".join(name for name in _MASKS if name in options.features)
        raise _Usage(f"--features: got {got}, wanted mask without the others: all are the argument mask=")
    for x in (q, k, v) if options.grad else ():
        x.requires_grad_()
    asked = dict(whole[name] for name in options.features if name in whole)
    if structured:
        asked["mask"] = functools.reduce(operator.and_, structured)
    if packed:
        asked |= {f"cu_seqlens_{side}": int32(batch + 1) for side in "qk"}
        asked |= {"max_seqlen_q": rows, "max_seqlen_k": keys}
    return q, k, v, {**asked, "causal": options.causal or False, "window": options.window}


def _plan(plan: Plan) -> dict[str, Any]:
    """A plan as plain data."""
    spec = {f.name: getattr(plan.spec, f.name) for f in fields(plan.spec)}
    spec.update(phase=plan.spec.phase.value, features=sorted(f.value for f in plan.spec.features))
    return {
        "problem": spec,
        "target": _target(plan),
        "chosen": plan.chosen.name if plan.chosen else None,
        "config": asdict(plan.config) if plan.config else None,
        "rung": plan.rung,
        "flops": plan.work.flops,
        "bytes": plan.work.bytes,
        "notes": list(plan.notes),
        "rows": [
            {"row": v.row.name, "priority": v.row.priority, "reasons": list(v.reasons)} for v in plan.verdicts
        ],
        "backward": _plan(plan.backward) if plan.backward else None,
    }


def _target(plan: Plan) -> str:
    return "+".join((plan.target.name, *sorted(plan.target.features)))


def _times(call: Callable[[], object]) -> list[float]:
    """Seconds of at least 3 calls, at most 20, for about 2 s."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < 20 and sum(times) < _TIMED):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


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


def _number(x: float) -> float | None:
    """JSON has no infinity."""
    return x if math.isfinite(x) else None


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False)


def _with_alignment(argv: Sequence[str]) -> list[str]:
    """`--causal` alone is `--causal=bottom_right`; without this, argparse would take a following file name
    for it."""
    after = [*argv, ""][1:]
    return [
        "--causal=bottom_right" if word == "--causal" and follower not in ALIGNMENTS else word
        for word, follower in zip(argv, after, strict=True)
    ]


def _size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number")
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    """'8/2' -> (8, 2); '8' -> (8, 8)."""
    first, _, second = text.partition("/")
    if not first.isdecimal() or not (second or "0").isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number, or two as in 8/2")
    return int(first), int(second or first)


def _window(text: str) -> tuple[int | None, int | None]:
    sides = text.split(",")
    try:
        left, right = (None if side.strip().lower() in ("", "none") else int(side) for side in sides)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted LEFT,RIGHT such as 255,0 or 255,none"
        ) from None
    return left, right


def _features(text: str) -> list[str]:
    wanted = [name for name in text.split(",") if name]
    unknown = [name for name in wanted if name not in FEATURES]
    if unknown:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}, wanted some of {', '.join(FEATURES)}")
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="polyflash", description="Exact attention on every device.")
    parser.add_argument("--version", action="version", version=f"polyflash {polyflash.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="results only: no progress, no commentary")
    masks = argparse.ArgumentParser(add_help=False)
    masks.add_argument(
        "--causal", choices=ALIGNMENTS, metavar="top_left", help="causal; alone, it is bottom_right"
    )
    masks.add_argument(
        "--window",
        type=_window,
        metavar="L,R",
        help="neighbours each side, self not counted; none is unbounded",
    )
    masks.add_argument("--dtype", choices=tuple(BY_NAME), help="dtype of q, k and v, converted if need be")
    masks.add_argument("--backend", choices=backends.BACKENDS, help="this backend and no other")
    masks.add_argument("--json", action="store_true", help="print JSON instead")
    _add_run(commands, [common, masks])
    _add_explain(commands, [common, masks])
    bench_command.add(commands, [common])
    tuning_command.add(commands, [common])
    ablation.add(commands, [common])
    doctor.add(commands)
    reports.add(commands)
    return parser


def _add_run(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    add = commands.add_parser(
        "run", parents=parents, help="attention on Q, K, V from files", description=run.__doc__
    )
    add.add_argument(
        "files", nargs="+", metavar="FILE", help="one .safetensors or .npz, or three .npy: q, k, v"
    )
    for role in ("q", "k", "v"):
        add.add_argument(f"--{role}", metavar="NAME", help=f"tensor to take for {role}")
    add.add_argument(
        "--layout", choices=("bhsd", "bshd"), default="bhsd", help="axis order; the batch may be missing"
    )
    add.add_argument("--scale", type=float, help="multiplies q·k; 1/sqrt(head_dim) unless given")
    add.add_argument("-o", "--output", metavar="OUT", help="write output and lse here")
    add.set_defaults(command=run)


def _add_explain(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    add = commands.add_parser(
        "explain",
        parents=parents,
        help="which kernel would run, and why no other",
        description=explain.__doc__,
    )
    add.add_argument("--batch", type=_size, default=1)
    add.add_argument(
        "--heads",
        type=_pair,
        default=(8, 8),
        metavar="Q/KV",
        help="8/2: 8 query heads over 2 key/value heads",
    )
    add.add_argument("--seqlen", type=_pair, default=(2048, 2048), metavar="Q/K")
    add.add_argument("--head-dim", type=_pair, default=(64, 64), metavar="QK/V")
    add.add_argument("--features", type=_features, default=[], metavar="A,B", help=", ".join(FEATURES))
    add.add_argument("--grad", action="store_true", help="plan the gradients too")
    add.add_argument(
        "--target",
        metavar="NAME",
        help="a device such as cuda:sm90 or cpu:avx512+amx_bf16; this machine unless given",
    )
    add.set_defaults(command=explain)


if __name__ == "__main__":
    sys.exit(main())
