"""Calls that take turns on one device: short comparisons for `tune` and `ablate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from polyflash.bench.timing import Arm, Summary, compare, iqr, median

ROUNDS = 5
_SAMPLE = 10e-3  # seconds of calls between two events of a GPU


def race(arms: Mapping[str, Callable[[], object]], device: str, seconds: float) -> dict[str, Summary]:
    """Median and spread of every arm, each once per round in an order that turns round; for about `seconds`,
    ROUNDS rounds if they take no more than twice as long, and FEWEST of `timing` in any case. A GPU's calls
    are queued between events, so launches overlap as in a model."""
    if torch.device(device).type == "cuda":
        return _on_gpu(arms, device, seconds)
    found = compare(
        [Arm(name, call, torch.get_num_threads()) for name, call in arms.items()],
        seconds=seconds,
        fewest=ROUNDS,
    )
    return {name: found.summary(name) for name in arms}


def _on_gpu(arms: Mapping[str, Callable[[], object]], device: str, seconds: float) -> dict[str, Summary]:
    samples: dict[str, list[float]] = {name: [] for name in arms}
    with torch.cuda.device(device):
        repeats = {name: _repeats(call) for name, call in arms.items()}
        order, spent = list(arms), 0.0
        while spent < seconds or len(samples[order[0]]) < ROUNDS:
            for name in order:
                taken = queued(arms[name], repeats[name])
                samples[name].append(taken)
                spent += taken * repeats[name]
            order.reverse()
    return {name: Summary(median(x), iqr(x), len(x), len(x)) for name, x in samples.items()}


def _repeats(call: Callable[[], object]) -> int:
    """Calls that take _SAMPLE together, after one that compiles."""
    call()
    once = min(queued(call, 1) for _ in range(3))
    return max(1, min(200, round(_SAMPLE / max(once, 1e-7))))


def queued(call: Callable[[], object], repeats: int) -> float:
    """Seconds per call by the device's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats / 1e3
