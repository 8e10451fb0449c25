"""`polyflash tune`: looks for quicker configs on this device and keeps them for later calls."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from polyflash import backends, env, plan
from polyflash.bench.command import target_of
from polyflash.bench.peak import calibrate
from polyflash.bench.timing import QUIET, Comparison, GpuSpeed, compared
from polyflash.errors import SpecError, UnsupportedError
from polyflash.options import device_here
from polyflash.spec import Phase
from polyflash.tuning import search, store
from polyflash.tuning.search import CONTENDED, QUICKER, ContendedError, Step
from polyflash.tuning.trial import Trial, switches_of, trial
from polyflash.workloads import Workload, workloads

MOST_SPREAD = 0.25  # a middle half wider than this share of the median decides nothing


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """Times the configs of a kernel row on this device, each checked first and held against the best so far,
    and keeps the quickest for later calls. Ctrl-C keeps what is known; the next run goes on from there."""
    chosen = problems(options)
    if options.list:
        print("\n".join(w.name for w in chosen))
        return 0
    device = device_of(options)
    if env.NO_CACHE.is_set():
        raise UnsupportedError(f"{env.NO_CACHE.name} is set, so nothing would be kept. Unset it")
    if options.forget:
        here = target_of(device)
        print(f"removed {store.file_of(here)}" if store.forget(here) else "nothing was tuned")
        return 0
    done: list[dict[str, Any]] = []
    stopped = False
    try:
        race = _race(device, options.seconds)
        for phase in options.phase:
            found = [trial(w, Phase(phase), options.backend or "", device=device) for w in chosen]
            for key, group in _by_entry(found):
                done.append(_tuned(key, group, options, race, out))
                if not (options.quiet or options.json):
                    _print(out, done[-1])
    except KeyboardInterrupt:
        stopped = True
    except ContendedError as busy:
        err.print(f"[bold red]contended[/] {escape(str(busy))}: nothing is kept. Try again", soft_wrap=True)
        return 1
    except ArithmeticError as error:
        err.print(f"[bold red]mismatch[/] {escape(str(error))}", soft_wrap=True)
        return 1
    if options.json:
        print(json.dumps({"schema": "polyflash.tune/1", "entries": done}, indent=1, allow_nan=False))
    if stopped:
        err.print("interrupted: what was found is kept, and the next run goes on from there")
        return 130
    return 0


def _by_entry(found: Sequence[Trial]) -> list[tuple[str, list[Trial]]]:
    """Problems that share an entry, and hence candidates."""
    keyed = sorted(((store.key_of(t.launch.row, t.spec), t) for t in found), key=lambda pair: pair[0])
    return [(key, [t for _, t in group]) for key, group in groupby(keyed, key=lambda pair: pair[0])]


def _tuned(
    key: str, group: list[Trial], options: argparse.Namespace, race: search.Race, out: Console
) -> dict[str, Any]:
    here = group[0].device
    start = None if options.again else store.read(here).entries.get(key)
    resumed = start.tried if start is not None else 0
    quiet = options.quiet or options.json
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, disable=quiet, transient=True) as progress:
        task = progress.add_task(escape(key), total=None)
        contended: list[str] = []

        def tell(step: Step) -> None:
            if step.outcome.startswith(CONTENDED):
                contended.append(step.name)
            ratio = "" if math.isnan(step.ratio) else f" ×{1 / step.ratio:.2f}"
            progress.update(task, completed=step.number, total=step.of)
            if step.outcome == QUICKER or step.outcome.startswith(("wrong", "fails", CONTENDED)):
                progress.console.print(escape(f"  {step.name}: {step.outcome}{ratio}"), soft_wrap=True)

        if start is not None and start.of == start.tried:
            entry = start
        else:
            entry = search.tune(
                group, race, start=start, keep=lambda entry: store.keep(here, {key: entry}), tell=tell
            )
    row = group[0].launch.row.name
    return {"key": key, "row": row, "resumed_at": resumed, "contended": contended, **asdict(entry)}


def _race(device: str, seconds: float) -> search.Race:
    if device == "cpu":
        calibration = calibrate(target_of(device))
        speed = calibration.speed if calibration else None
    else:
        speed = GpuSpeed(device)

    def timed(arms: Mapping[str, Callable[[], object]], length: float) -> dict[str, float]:
        return decided(compared(arms, device, seconds * length, speed))

    return timed


def decided(found: Comparison) -> dict[str, float]:
    """The medians of a race; ContendedError if it says nothing."""
    if found.contended:
        slow = f"{len(found.rounds) - found.quiet} of {len(found.rounds)} rounds"
        raise ContendedError(f"{slow} ran below {QUIET:.0%} of the machine's speed")
    summaries = found.summaries()
    widest = max(s.spread for s in summaries.values())
    if widest > MOST_SPREAD:
        raise ContendedError(f"times of one config spread by {widest:.0%} of their median")
    return {name: s.median for name, s in summaries.items()}


def _print(out: Console, entry: dict[str, Any]) -> None:
    gain = entry["untuned_seconds"] / entry["seconds"]
    values = ", ".join(f"{name}={value}" for name, value in entry["values"].items())
    told = f"×{gain:.2f} of the untuned config" if gain > 1 else "the untuned config is best"
    told = f"{told}, {entry['tried']} tried"
    out.print(f"[bold]{escape(entry['key'])}[/]  {told}\n  {escape(values)}", soft_wrap=True)
    if entry["contended"]:
        count = f"{len(entry['contended'])} of {entry['of']} races"
        told = f"{count} were contended, and their winners are not kept: the next run holds them again"
        out.print(f"  {told}", soft_wrap=True)


def problems(options: argparse.Namespace) -> tuple[Workload, ...]:
    """The one problem given by sizes, else those of the catalogue with the tag "tune"."""
    if options.seqlen:
        (rows, keys), (heads, kv_heads), (dim, dim_v) = options.seqlen, options.heads, options.head_dim
        name = f"{'causal' if options.causal else 'full'}-{options.dtype}-{rows}x{keys}-d{dim}"
        causal = "top_left" if options.causal == "top_left" else bool(options.causal)
        sizes = (options.batch, heads, kv_heads, rows, keys, dim, dim_v)
        return (Workload(name, frozenset(), *sizes, options.dtype, causal),)
    asked = options.batch, options.heads, options.head_dim, options.dtype, options.causal
    if asked != (1, (8, 8), (64, 64), "bfloat16", None):
        told = "got one without --seqlen, wanted both: they are of one problem. See --filter for listed ones"
        raise SpecError(f"--batch, --heads, --head-dim, --dtype, --causal: {told}")
    words = " ".join(options.filter).lower().replace(",", " ").split()
    found = tuple(w for w in workloads("tune") if all(word in w.name.split("-") for word in words))
    if not found:
        raise SpecError(f"filter: got {' '.join(words)!r}, which no problem has. See --list")
    return found


def device_of(options: argparse.Namespace) -> str:
    """The torch device asked for, else a GPU if there is one and the backend may run there."""
    has_gpu = torch.cuda.is_available() and options.backend != "cpu"
    chosen = device_here(options.device or ("cuda" if has_gpu else "cpu"))
    here = target_of(chosen)
    rows = [row for row in backends.TABLE if options.backend in (None, row.backend)]
    if not any(here.name.startswith(row.targets) for row in rows):
        wanted = ", ".join(dict.fromkeys(t for row in rows for t in row.targets))
        raise UnsupportedError(f"{options.backend}: its kernels need {wanted} and this is {here.name}")
    return chosen


def switches_of_problems(chosen: Sequence[Workload], options: argparse.Namespace, device: str) -> set[str]:
    """The switches of these problems' kernels: "base2", and "base2=off"."""
    here = target_of(device)
    found: set[str] = set()
    phases = [Phase(name) for name in options.phase]
    for phase in (*phases, *([Phase.DECODE] if Phase.FORWARD in phases else [])):
        for workload in chosen:
            spec = workload.spec(phase=phase, device=torch.device(device).type)
            with contextlib.suppress(UnsupportedError):
                launch = plan.select(spec, here, backends.TABLE, backend=options.backend or "", config="")
                found.update(switches_of(launch))
    return found | {name.partition("=")[0] for name in found}
