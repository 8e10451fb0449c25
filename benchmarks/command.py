"""`polyflash bench`: runs the chosen rows and prints them, as tables for people, as one JSON document for
programs. A row is interleaved after its results were compared; here, or beside a peer in the peer's own
process."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import calls, cases, plot, tables
from benchmarks.cases import CODES, DECODE, FORWARD, STEPS, Case
from benchmarks.decode import problems as decode
from benchmarks.decode import stream
from benchmarks.peers import PEERS, Answer, Child, Peer, why
from benchmarks.problem import AFTER, PLAIN, Problem, Row, build
from polyflash.bench import suite as plain
from polyflash.bench.command import SCHEMA, calibrated, target_of
from polyflash.bench.peak import Calibration, GpuCalibration, calibrate, kind_of, usable_cpus
from polyflash.bench.suite import ALONE, OURS, selected
from polyflash.bench.timing import QUIET, Arm, Comparison, compared
from polyflash.errors import SpecError
from polyflash.options import device_here

_START, _PER_ROW = 120.0, 60.0  # seconds a peer may take to start, and for a row beyond its timing


def run(options: argparse.Namespace, out: Console, err: Console) -> int:
    """This machine against torch SDPA and the other attention implementations found on it."""
    _check(options)
    if options.sources:
        content = tables.merged([tables.read(file) for file in options.sources])
        if options.list:
            print("\n".join(r["name"] for r in content["rows"] if r["marks"]))
            return 0
        if not options.quiet:
            for title, some in tables.by_section(content["rows"]).items():
                _say(out, *tables.table(some, title))
            _say(out, *tables.absences(content["absent"]), *tables.notes(content["rows"]))
    elif options.list:
        print("\n".join(case.name for case in _chosen(options)))
        return 0
    else:
        content = _measured(options, out)
    stopped = content.pop("stopped", None)
    if options.json and (content.get("rows") or not stopped):
        Path(options.json).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if stopped:
        kept = options.json if options.json and content["rows"] else "no file"
        raise stopped(f": {len(content['rows'])} rows were measured and are in {kept}")
    if options.page:
        file = Path(options.page)
        file.write_text(tables.page_of(content, tables.written(file)), encoding="utf-8")
    if options.plot:
        plot.draw(content, options.plot)
    return 1 if any("mismatch" in r["marks"] for r in content.get("rows", ())) else 0


def _is_gpu(options: argparse.Namespace) -> bool:
    return bool(options.device) and options.device != "cpu"


def _check(options: argparse.Namespace) -> None:
    """Refuses before a long measurement what would lose it, and what a GPU does not measure."""
    if _is_gpu(options) and not options.sources:
        device_here(options.device)
        if options.calls or options.plot:
            name = "calls" if options.calls else "plot"
            raise SpecError(f"{name}: got --{name} on a GPU, wanted it on a CPU. See `make bench-gpu`")
    if options.page and options.calls:
        raise SpecError("page: got --calls, whose stages have no page. Use --json, or leave --calls out")
    if options.plot:
        plot.check_possible(None if options.sources else () if options.calls else _chosen(options))


def _chosen(options: argparse.Namespace) -> Sequence[Case]:
    suites = options.suite or ([cases.PEER_SUITE] if options.peers else [])
    here = [s for s in cases.SUITES if not _is_gpu(options) or s not in cases.OF_CPUS]
    suites = here if "all" in suites else list(dict.fromkeys(suites))
    if absent := [s for s in suites if s in cases.SUITES and s not in here]:
        wanted = f"some of {', '.join(here)}. `make bench-gpu` has decode and peers of GPUs"
        raise SpecError(f"suite: got {', '.join(absent)} on a GPU, wanted {wanted}")
    if options.peers and cases.PEER_SUITE not in suites:
        suites = [*suites, cases.PEER_SUITE]
    every = cases.rows(suites, size=options.size, peers=options.peers)
    return selected(every, names=options.rows, words=" ".join(options.filter))


def _command(options: argparse.Namespace) -> str:
    """The command that measures this again; files, which say nothing about the figures, left out."""
    words = {
        f"--device {options.device}": _is_gpu(options),
        f"--suite {','.join(options.suite)}": options.suite,
        f"--peers {','.join(options.peers)}": options.peers,
        f"--rows {options.rows}": options.rows,
        f"--filter {' '.join(options.filter)}": options.filter,
        f"--{options.size}": options.size,
        f"--seconds {options.seconds or 0:g}": options.seconds,
    }
    return " ".join(("polyflash bench", *(text for text, given in words.items() if given)))


def _measured(options: argparse.Namespace, out: Console) -> dict[str, Any]:
    """The document of a measurement made now."""
    chosen, device = _chosen(options), device_here(options.device)
    seconds = options.seconds or (0.5 if options.size == "quick" else 2.0)
    about, calibration = calibrated(device, [] if options.calls else [c.workload.dtype for c in chosen])
    if not options.quiet:
        _print_machine(out, about)
    if options.calls:
        speed = calibration.speed if calibration else None
        return {**calls.document(seconds, speed), "machine": about}
    content = _rows(out, chosen, options.quiet, seconds=seconds, calibration=calibration, device=device)
    return {**content, "commands": [_command(options)], "machine": about}


def _print_machine(console: Console, about: dict[str, Any]) -> None:
    """The head of a measurement: what runs against what, and the scale of its figures."""
    console.print(f"polyflash {about['polyflash']} against torch SDPA {about['torch']}")
    for name, text in tables.conditions(about).items():
        console.print(f"  {name}: {text}", markup=False, soft_wrap=True)
    if any(p["gflops_together"] < QUIET * p["gflops_per_thread"] * p["cores"] for p in about["peaks"]):
        console.print("  cores are away: fewer threads' worth of work was done than there are")
    elif not about["peaks"] and "gpu" not in about:
        console.print("  contended windows go unmarked")
    console.print()


def _rows(console: Console, chosen: Sequence[Case], quiet: bool, **how: Any) -> dict[str, Any]:
    """Measures the rows and prints each table as soon as it is whole; progress on a terminal only. Returns
    every row, and every row that a peer has not, with its reason; "stopped" is what ended it early: Ctrl-C,
    or a reader that left."""
    rows: list[Row] = []
    absent: list[Row] = []
    made: dict[str, Any] = {"schema": SCHEMA, "rows": rows, "absent": absent}
    printed = 0
    try:
        for title, some in tables.grouped(chosen, lambda case: case.section).items():
            had, peer = len(absent), some[0].peer
            if some[0].suite == cases.PEER_SUITE:  # in the peer's own process
                told = answers(peer, some, seconds=how["seconds"])
            else:
                told = ({"row": measure(case, **how)} for case in some)
            for answer in told:
                (rows if "row" in answer else absent).append({"section": title, **answer.get("row", answer)})
                if console.is_terminal and not quiet:
                    console.print(f"{len(rows) + len(absent)}/{len(chosen)} {title:<60}", end="\r")
            new, printed = rows[printed:], len(rows)
            _say(console, *(tables.table(new, title) if new else ()), *tables.absences(absent[had:]))
        _say(console, *tables.notes(rows))
    except (KeyboardInterrupt, BrokenPipeError) as stop:
        made["stopped"] = type(stop)
        if isinstance(stop, KeyboardInterrupt):
            for title, part in tables.by_section(rows[printed:]).items():
                _say(console, *tables.table(part, title))
    return made


def _say(console: Console, *lines: str) -> None:
    """The lines as they are, and an empty one; nothing of none."""
    if lines:
        console.print(*lines, "", sep="\n", markup=False, highlight=False, soft_wrap=True)


def measure(
    case: Case,
    *,
    seconds: float,
    calibration: Calibration | GpuCalibration | None,
    peer: Callable[[Problem], Callable[[], Tensor]] | None = None,
    device: str = "cpu",
) -> Row:
    """Times one row and checks it: every row of the results against the peer's (against our torch row where
    there is no peer), a sample against float64. `peer` makes the call that torch SDPA's stands for else, of a
    row that is timed forward. On a GPU `calibration` is its own, and threads do not count."""
    with torch.set_grad_enabled(case.timed != FORWARD):
        is_decode = case.suite == DECODE
        problem = None if is_decode else build(case, device)
        theirs = peer(problem) if peer and problem else None
        timed = problem.timed(case.timed, case.peer, theirs) if problem else decode.build(case)
        difference, error, other = timed.check()
        threads = torch.get_num_threads() if device == "cpu" else 1
        arms = [Arm(name, call) for name, call in timed.arms.items()]
        ours = arms[0].call
        if device == "cpu" and (not is_decode or case.part in (STEPS, CODES)):
            others = [a for a in arms[1:] if case.part == CODES or a.name in decode.READERS]
            arms.append(Arm(AFTER, ours, before=_operators()))
            arms += [Arm(decode.between(a.name), a.call, before=_operators()) for a in others]
        if threads > 1:
            arms.append(Arm(ALONE, ours, threads=1))
        speed, peak = calibration.speed if calibration else None, None
        if calibration and not timed.bytes:
            peak = calibration.peak(kind_of(case.workload.dtype, target_of(device)))
        elif isinstance(calibration, Calibration):
            speed = stream.MemorySpeed(calibration) if stream.available() else None
        found = compared(arms, device, seconds, speed)
    checked, work = (difference, error, other), (timed.flops, timed.plain_flops)
    return row(
        case, timed.backend, found, *checked, *work, peak, threads, bytes=timed.bytes, chosen=timed.chosen
    )


@lru_cache(maxsize=1)
def _operators() -> Callable[[], object]:
    """What torch does between the steps of a model: a matrix product and elementwise work, on its threads."""
    x, w, y = torch.randn(256, 1024), torch.randn(1024, 1024), torch.randn(256, 1024)
    return lambda: torch.nn.functional.silu(x @ w) * y


def row(
    case: Case, backend: str, found: Comparison, difference: float, ours: Any, theirs: Any, flops: float,
    plain_flops: float, peak: Any, threads: int, *, bytes: int = 0, chosen: dict[str, Any] | None = None,
) -> Row:  # fmt: skip
    """The whole measurement as plain data; `ours` and `theirs` are errors against float64."""
    checked = difference, ours, theirs, flops, peak, threads
    made = plain.row_of(case, backend, found, *checked, peer=case.peer, reads=bytes > 0)
    over = found.ratio(OURS, PLAIN) if case.plain and "mismatch" not in made["marks"] else None
    made |= {"timed": case.timed, "part": case.part, "over_plain": over}
    made["rate_of_plain"] = over and flops / plain_flops / over
    made["after_torch"] = found.ratio(AFTER, OURS) if AFTER in found.rounds[0].seconds else None
    if case.suite != DECODE:
        return made
    names = ("laid", "page_size", "private", "ranks", "rank")
    return made | {name: getattr(case, name) for name in names} | {"bytes": bytes, **(chosen or {})}


def answers(name: str, some: Sequence[Case], *, seconds: float, peer: Peer | None = None) -> Iterator[dict]:
    """What the peer's process says of each case, in order: {"row": …}, or {"name": …, "reason": …}. Never
    raises: a peer that is absent, refuses, crashes or hangs gives reasons."""
    peer = peer or PEERS[name]
    if peer.absent:
        yield from ({"name": case.name, "reason": peer.absent} for case in some)
        return
    child = Child(_measuring, (peer.prepare, seconds, torch.get_num_threads()), _START)
    try:
        for case in some:
            yield {"name": case.name, **child.ask(case, _PER_ROW + 2 * seconds)}
    finally:
        child.end()


def _measuring(adapter: str, seconds: float, threads: int) -> Answer:
    """The child: what measures a case, on as many CPUs as threads: some peers take their thread count from
    nothing else."""
    cpus = usable_cpus()
    torch.set_num_threads(threads)
    if threads < len(cpus) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus[:threads])
    module, _, function = adapter.partition(":")
    prepare = getattr(import_module(module), function)
    calibration = calibrate(target_of("cpu"))

    def peer(problem: Any) -> Any:
        q, k, v, options = problem.ours.q, problem.ours.k, problem.ours.v, problem.ours.options
        return prepare(q, k, v, bool(options.get("causal")), threads)

    def answer(case: Case) -> dict[str, Any]:
        try:
            return {"row": measure(case, seconds=seconds, calibration=calibration, peer=peer)}
        except Exception as error:  # whatever a peer raises is why it has no row
            return {"reason": why(error)}

    return answer
