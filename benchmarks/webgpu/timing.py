"""Times of dispatches by timestamp queries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import wgpu

from polyflash.backends.webgpu.device import Device

# Seconds of work before anything is timed: an idle card has low clocks, and an H100 reads new gigabytes at a
# third of its rate for the first 150 ms, after gradients in the same process.
WARM = 0.6
LEAST, LONG = 0.02, 0.4  # seconds of a batch; of work that is timed once
ROUNDS = 5


class Clock:
    """Seconds of the device between two places of a batch."""

    def __init__(self, on: Device) -> None:
        self.on = on
        self.queries = on.wgpu.create_query_set(type="timestamp", count=2)
        usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        self.marks = on.wgpu.create_buffer(size=256, usage=usage)

    def _mark(self, index: int) -> None:
        writes = {"query_set": self.queries, "beginning_of_pass_write_index": index}
        self.on.end_pass()
        self.on.encoder.begin_compute_pass(timestamp_writes=writes).end()

    def of(self, work: Callable[[], Any], count: int = 1) -> float:
        """Seconds of `count` times `work`, launched in one batch."""
        with self.on.batch():
            self._mark(0)
            for _ in range(count):
                work()
            self._mark(1)
            self.on.encoder.resolve_query_set(self.queries, 0, 2, self.marks, 0)
        first, last = np.frombuffer(self.on.queue.read_buffer(self.marks, 0, 16), np.uint64).astype(object)
        self.on.unread.clear()
        return float(last - first) * 1e-9

    def median(self, work: Callable[[], Any]) -> float:
        """Seconds of one `work`, which has run before: the median of batches, once the device is warm."""
        count, began = 1, time.perf_counter()
        spent = self.of(work)
        if spent > LONG:
            return spent
        while spent < LEAST and count < 512:
            count = min(512, max(2 * count, int(1.2 * count * LEAST / max(spent, 1e-6))))
            spent = self.of(work, count)
        while time.perf_counter() - began < WARM:
            self.of(work, count)
        return statistics.median([self.of(work, count) for _ in range(ROUNDS)]) / count
