"""Ranks as threads of one process: `Team` over queues, for any number of them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyflash.parallel.comm import Team

TIMEOUT_S, POLL_S = 60.0, 0.5


class Wires:
    """Queues between `size` ranks, one per pair and direction, and a log of what went where."""

    def __init__(self, size: int, failed: threading.Event) -> None:
        self.failed = failed
        pairs = itertools.product(range(size), range(size), ("pair", "gather", "swap"))
        self.queues: dict[Any, queue.SimpleQueue[Tensor]] = {pair: queue.SimpleQueue() for pair in pairs}
        self.log: list[tuple[int, int, str, int]] = []


class Simulated(Team):
    """One rank of `size` threads."""

    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self.wires, self.rank, self.size, self.sent, self.calls = wires, rank, size, 0, 0
        self.device = torch.device("cpu")

    def _send(self, kind: str, peer: int, x: Tensor, what: str) -> None:
        x = x.detach().clone()
        if peer != self.rank:
            self.sent += x.numel() * x.element_size()
            self.wires.log.append((self.rank, peer, what, x.numel() * x.element_size()))
        self.wires.queues[self.rank, peer, kind].put(x)

    def _receive(self, kind: str, peer: int) -> Tensor:
        for _ in range(int(TIMEOUT_S / POLL_S)):
            if self.wires.failed.is_set():
                break
            with contextlib.suppress(queue.Empty):
                return self.wires.queues[peer, self.rank, kind].get(timeout=POLL_S)
        raise queue.Empty

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], what: str
    ) -> Callable[[], None]:
        for peer, x in sends:
            if x.numel():
                self._send("pair", peer, x, what)

        def wait() -> None:
            for peer, into in receives:
                if into.numel():
                    into.copy_(self._receive("pair", peer))

        return wait

    def gather(self, x: Tensor, what: str) -> Callable[[], Tensor]:
        for peer in range(self.size):
            self._send("gather", peer, x, what)
        return lambda: torch.stack([self._receive("gather", peer) for peer in range(self.size)])

    def swap(
        self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], what: str
    ) -> Callable[[], list[Tensor]]:
        for peer, part in enumerate(parts):
            self._send("swap", peer, part, what)
        return lambda: [self._receive("swap", peer).reshape(shape) for peer, shape in enumerate(shapes)]


def simulate(size: int | tuple[int, int], body: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    """body(group) on every rank, each a thread; its results, and the groups. An exception of a rank is
    raised here."""
    rings, sharing = (size, 1) if isinstance(size, int) else size
    failed = threading.Event()
    across = [Wires(rings, failed) for _ in range(sharing)]
    within = [Wires(sharing, failed) for _ in range(rings)]
    groups: list[Any] = []
    for i in range(rings):
        for j in range(sharing):
            ring = Simulated(across[j], i, rings)
            groups.append(ring if isinstance(size, int) else (ring, Simulated(within[i], j, sharing)))
    results: list[Any] = [None] * len(groups)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        torch.set_num_threads(1)  # OpenMP's own threads would be as many per rank as there are cores
        try:
            results[rank] = body(groups[rank])
        except BaseException as error:
            errors.append(error)
            failed.set()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, queue.Empty)), errors[0])
    return results, groups
