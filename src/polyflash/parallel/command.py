"""`polyflash parallel-plan`: costs of one sequence over many ranks, from given rates of links and devices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from polyflash.dtypes import BY_NAME
from polyflash.parallel.cost import Link, Problem, both_passes
from polyflash.parallel.schedule import Shards, Sight

METHODS = ("ring", "all_gather", "ulysses", "ulysses+ring")
ASSUMED = """\
One attention layer, batch 1, forward and backward, zigzag order; nothing below was measured.
Compute runs at the given rate whatever the sizes, exchange at the full rate of its link, beside it.
In a ring the keys of a step travel while the step before is computed, gradients likewise.
Gathered keys come to a node once, over the links of all its ranks; what Ulysses exchanges crosses for itself.
ulysses+ring: heads within a node, a ring of one rank of each node. Memory: q, k, v, dout and what both passes
hold beside them. Of more than 64 ranks four stand for all. * is the quickest that
fits, ! has no room."""


class Line(NamedTuple):
    """One exchange for one number of tokens and ranks. Seconds, FLOPs and bytes of both passes, of the
    busiest rank."""

    tokens: int
    ranks: int
    method: str
    seconds: float
    computing: float
    sent: int
    memory: int
    fits: bool
    chosen: bool = False
    refused: str = ""


def plan(options: argparse.Namespace, out: Console, err: Console) -> int:
    """Time, memory and bytes of every exchange that can be, for the tokens and ranks asked for."""
    lines = list(planned(options))
    if options.json:
        out.print_json(json.dumps([line._asdict() for line in lines]))
        return 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("tokens", "ranks", "exchange", "seconds", "computing", "sent GB", "memory GB"):
        table.add_column(name, justify="left" if name == "exchange" else "right", no_wrap=True)
    for line in lines:
        if line.refused:
            continue
        numbers = _number(line.seconds), f"{line.computing / line.seconds:.0%}", _number(line.sent / 1e9)
        memory = f"{_number(line.memory / 1e9)} {' ' if line.fits else '!'}"
        names = f"{line.tokens / 1e6:g}M", str(line.ranks), line.method + " *" * line.chosen
        table.add_row(*names, *numbers, memory)
    out.print(table)
    refused = dict.fromkeys(f"{line.method}: {line.refused}." for line in lines if line.refused)
    if not options.quiet:
        print(*refused, _rates(options), ASSUMED, sep="\n", file=out.file)
    return 0


def _rates(options: argparse.Namespace) -> str:
    rates = " within a node, ".join(f"{rate / 1e9:g} GB/s" for rate in options.link)
    nodes = f" between nodes of {options.node} ranks" if len(options.link) > 1 else ""
    return f"{options.tflops:g} TFLOP/s per rank; {rates}{nodes}; {options.latency:g} s per exchange."


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def planned(options: argparse.Namespace) -> Iterator[Line]:
    """The lines of all sizes; of each, the quickest exchange that fits is marked."""
    for tokens, ranks in product(_powers(options.tokens, 10), _powers(options.ranks, 8)):
        every = [_line(options, tokens, ranks, method) for method in METHODS]
        lines = [line for line in every if line is not None]
        fitting = [line for line in lines if line.fits and not line.refused]
        best = min(fitting, key=lambda line: line.seconds, default=None)
        for line in lines:
            yield line._replace(chosen=line is best)


def _powers(ends: tuple[float, float], base: int) -> list[int]:
    """From the first end on, each `base` times the one before, and the last end."""
    found = [int(ends[0])]
    while found[-1] * base < ends[1]:
        found.append(found[-1] * base)
    return found if found[-1] == int(ends[1]) else [*found, int(ends[1])]


def _line(options: argparse.Namespace, tokens: int, ranks: int, method: str) -> Line | None:
    """None where a ring of nodes would be a ring, or no ring."""
    node = options.node if len(options.link) > 1 and ranks > options.node else 0
    pieces = 1
    if method == "ulysses+ring":
        if not node or ranks % node:
            return None
        pieces = node
    sharing = {"ulysses": ranks, "ulysses+ring": pieces}.get(method, 1)
    empty = Line(tokens, ranks, method, 0.0, 0.0, 0, 0, False)
    if options.heads[0] % sharing:
        return empty._replace(refused=f"{options.heads[0]} heads do not divide by {sharing} ranks")
    shards = Shards((tokens,), ranks // pieces, "zigzag", pieces)
    link = Link(options.link[0], options.latency, options.tflops * 1e12, options.link[-1], node)
    sight = Sight(options.window, None if options.full and options.window is None else 0)
    sizes: dict[str, Any] = {"head_dim": options.head_dim[0], "head_dim_v": options.head_dim[1]}
    sizes |= {"num_q_heads": options.heads[0], "num_kv_heads": options.heads[1], "batch": 1}
    problem = Problem(shards, shards, sight, itemsize=BY_NAME[options.dtype], link=link, **sizes)
    passes = both_passes(problem, method)
    held = max(shards.held(rank * pieces) for rank in problem.shards)
    of_q = problem.num_q_heads * (problem.head_dim + problem.head_dim_v) * problem.itemsize
    memory = held * (of_q + problem.bytes_per_key) + passes[0].working_bytes
    return empty._replace(
        seconds=sum(x.seconds for x in passes),
        computing=sum(max(x.flops) for x in passes) / link.flops,
        sent=sum(max(x.bytes_sent) for x in passes),
        memory=memory,
        fits=memory <= options.memory * 1e9,
    )
