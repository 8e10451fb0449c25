"""Times of both passes over ranks beside one device's, of exchange and computation alone, and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import polyflash
from polyflash import parallel
from polyflash.parallel.comm import Team

METHODS = ("ring", "all_gather", "ulysses")
# Of an arm before it is measured, and measured: a GPU that has rested is up to 8 % faster for half a second.
WARM_S, SPAN_S = 0.4, 0.3
Attend = Callable[..., Any]


class Listening(Team):
    """A team that notes what it exchanges; with `silent`, it exchanges nothing."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__(dist.group.WORLD)
        self.silent = silent
        self.noise: dict[Any, Tensor] = {}
        self.noted: list[tuple[str, Any]] = []

    def exchange(self, sends: Any, receives: Any, what: str) -> Callable[[], None]:
        if self.silent:
            for _, x in receives:
                x.copy_(self._instead(x, x.shape))
            return lambda: None
        self.noted.append(("exchange", ([_like(p) for p in sends], [_like(p) for p in receives])))
        return super().exchange(sends, receives, what)

    def gather(self, x: Tensor, what: str) -> Callable[[], Tensor]:
        if self.silent:
            return lambda: self._instead(x, (self.size, *x.shape))
        self.noted.append(("gather", (x.shape, x.dtype)))
        return super().gather(x, what)

    def swap(self, parts: Any, shapes: Any, what: str) -> Callable[[], list[Tensor]]:
        if self.silent:
            return lambda: [self._instead(parts[0], shape) for shape in shapes]
        self.noted.append(("swap", ([(x.shape, x.dtype) for x in parts], list(shapes))))
        return super().swap(parts, shapes, what)

    def _instead(self, like: Tensor, shape: Any) -> Tensor:
        """What might have come: a GPU multiplies zeros at other clocks than numbers."""
        key = *shape, like.dtype
        if key not in self.noise:
            self.noise[key] = torch.randn(shape, dtype=like.dtype, device=like.device)
        return self.noise[key]

    def again(self, device: torch.device) -> Callable[[], None]:
        """What was noted, each exchange waited for: communication alone."""
        team = Team(dist.group.WORLD)
        made: list[tuple[Any, Any]] = []
        for kind, given in self.noted:
            if kind == "gather":
                made.append((team.gather, (_zeros(given, device),)))
            elif kind == "swap":
                made.append((team.swap, ([_zeros(x, device) for x in given[0]], given[1])))
            else:
                pairs = [[(peer, _zeros(x, device)) for peer, x in side] for side in given]
                made.append((team.exchange, tuple(pairs)))

        def run() -> None:
            for verb, given in made:
                verb(*given, "timed")()

        return run


def _like(pair: tuple[int, Tensor]) -> tuple[int, Any]:
    return pair[0], (pair[1].shape, pair[1].dtype)


def _zeros(like: Any, device: torch.device) -> Tensor:
    return torch.zeros(like[0], dtype=like[1], device=device)


class Call:
    """Both passes of one call on this rank, or of the whole of it on one device."""

    def __init__(self, sizes: dict[str, Any], device: torch.device, whole: bool) -> None:
        rows, heads, dim = sizes["rows"], sizes["heads"], sizes["head_dim"]
        self.bounds: Any = None
        if sizes.get("members"):
            self.bounds = torch.tensor([0, *sizes["members"]]).cumsum(0).int().to(device)
        self.device, self.rows = device, rows
        held = rows
        if not whole:
            at = torch.arange(rows, device=device)
            held = len(parallel.split(at, dim=0, cu_seqlens=self.bounds))
        draw = torch.Generator(device).manual_seed(dist.get_rank())
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        counts = (heads[0], heads[1], heads[1], heads[0])
        shapes = [(held, h, dim) if self.bounds is not None else (1, h, held, dim) for h in counts]
        made = [torch.randn(x, generator=draw, device=device, dtype=kind) for x in shapes]
        self.q, self.k, self.v = (x.requires_grad_() for x in made[:3])
        self.dout = made[3]

    def alone(self) -> Attend:
        if self.bounds is None:
            return lambda q, k, v: polyflash.attention(q, k, v, causal=True)
        longest = int(self.bounds.diff().max())
        how: Any = {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": True}
        return lambda q, k, v: polyflash.attention_varlen(q, k, v, self.bounds, self.bounds, **how)

    def shared(self, method: str, team: Team | None = None, handshake: bool = True) -> Attend:
        how: Any = {"method": method, "group": team, "causal": True, "handshake": handshake}
        if self.bounds is None:
            how["seqlens"] = (self.rows, self.rows)
            return lambda q, k, v: parallel.attention(q, k, v, **how)
        return lambda q, k, v: parallel.attention_varlen(q, k, v, self.bounds, self.bounds, **how)

    def both(self, attend: Attend) -> Callable[[], None]:
        def run() -> None:
            self.q.grad = self.k.grad = self.v.grad = None
            attend(self.q, self.k, self.v).backward(self.dout)

        return run


def seconds(run: Callable[[], Any], device: torch.device, times: int, before: int = 0) -> float:
    """Of one run, `times` of which follow one another, and as many as `before` go ahead of them."""
    for _ in range(before):
        run()
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - started) / times
    if not before:
        torch.cuda.synchronize()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    ends[0].record()
    for _ in range(times):
        run()
    ends[1].record()
    torch.cuda.synchronize()
    return ends[0].elapsed_time(ends[1]) / 1e3 / times


def heated(run: Callable[[], Any], device: torch.device, times: int) -> float:
    """Seconds of one run, on every rank at once, of GPUs that have been at it for a while."""
    if device.type != "cuda":
        return seconds(run, device, times)
    took = slowest(seconds(run, device, 1))
    return seconds(run, device, max(times, round(SPAN_S / took)), max(1, round(WARM_S / took)))


def slowest(found: float) -> float:
    """The largest of all ranks."""
    told = torch.tensor([found], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def _each(found: float) -> list[float]:
    """That of each rank."""
    told = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    told[dist.get_rank()] = found
    dist.all_reduce(told)
    return told.tolist()  # type: ignore[no-any-return]


def _peak(run: Callable[[], None], device: torch.device) -> int:
    """Bytes that a run takes at most beside what was there."""
    if device.type != "cuda":
        run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def rows(
    name: str, sizes: dict[str, Any], device: torch.device, rounds: int, methods: Sequence[str] = METHODS
) -> Iterator[dict[str, Any]]:
    """One row per method; times are medians of `rounds`, arms by turns. One device's is the mean of all, and
    `share_of_slower` is by the time of the slowest, whom the others wait for."""
    own, ranks = Call(sizes, device, False), dist.get_world_size()
    arms: dict[str, Callable[[], None]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for method in methods:
        if method == "ulysses" and sizes["heads"][0] % ranks:
            continue
        listening = Listening()
        with_team = own.both(own.shared(method, listening, False))
        with_team()  # compiles
        own.q.grad = own.k.grad = own.v.grad = None
        peak, sent = _peak(with_team, device), listening.sent // 2
        listening.noted = listening.noted[len(listening.noted) // 2 :]
        arms[method] = own.both(own.shared(method))
        arms[f"{method}, no handshake"] = own.both(own.shared(method, None, False))
        arms[f"{method} computes"] = own.both(own.shared(method, Listening(silent=True), False))
        arms[f"{method} sends"] = listening.again(device)
        cut: Any = {"cu_seqlens_q": own.bounds, "cu_seqlens_k": own.bounds} if own.bounds is not None else {}
        cut["method"] = method
        plan = parallel.explain(own.q, own.k, own.v, ranks=ranks, causal=True, **cut)
        worst = int(slowest(peak))
        rows[method] = {"peak": worst, "formula": plan.working_bytes, "sent": sent}
        yield {"kind": "memory", "name": f"{name} {method}", **rows[method]}
    whole = Call(sizes, device, True)  # on every rank: what the others do moves no clock between arms
    arms["one device"] = whole.both(whole.alone())
    found: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        # A GPU rests while it only sends: such arms are timed once, behind all others.
        for arm in sorted(arms, key=lambda arm: arm.endswith("sends")):
            slowest(0.0)  # all begin together
            if not turn:  # compiles
                seconds(arms[arm], device, 1)
            elif turn == rounds or not arm.endswith("sends"):
                found[arm].append(_each(heated(arms[arm], device, sizes.get("times", 2))))
    ones = [statistics.median(x) for x in zip(*found["one device"], strict=True)]
    one = statistics.mean(ones)
    last = {arm: [max(x) for x in each] for arm, each in found.items()}
    for method, row in rows.items():
        quiet = statistics.median(last[f"{method}, no handshake"])
        both = statistics.median(last[method])
        sends, computes = (statistics.median(last[f"{method} {x}"]) for x in ("sends", "computes"))
        hidden = (computes + sends - quiet) / sends if sends else 1.0
        yield {
            "kind": "time", "name": f"{name} {method}", "one_s": one, "ranks_s": both, "quiet_s": quiet,
            "computes_s": computes, "sends_s": sends, "share": one / ranks / both,
            "quiet_share": one / ranks / quiet, "share_of_slower": max(ones) / ranks / both, "hidden": hidden,
            **row, "all": last[method], "ones": ones,
        }  # fmt: skip
