"""Times of dispatches by timestamp queries, and what their results should be."""

from __future__ import annotations

import math
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
LEAST = 0.02  # seconds of a batch
ROUNDS = 5
SAMPLES = 24  # rows, or keys, of two heads that are compared


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
        """Seconds of one `work`: the median of batches, once the device is warm."""
        count, began = 1, time.perf_counter()
        spent = self.of(work)
        while spent < LEAST and count < 512:
            count = min(512, max(2 * count, int(1.2 * count * LEAST / max(spent, 1e-6))))
            spent = self.of(work, count)
        while time.perf_counter() - began < WARM:
            self.of(work, count)
        return statistics.median([self.of(work, count) for _ in range(ROUNDS)]) / count


def _rows(length: int) -> np.ndarray:
    return np.unique(np.linspace(0, length - 1, SAMPLES).astype(int))


def wrong(got: np.ndarray, want: np.ndarray) -> float:
    """Error relative to the size of a result; infinite for a NaN."""
    error = float(np.linalg.norm(got.astype(np.float64) - want)) / max(1e-30, float(np.linalg.norm(want)))
    return error if math.isfinite(error) else math.inf


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # q, k, v


def forward_error(given: Arrays, out: np.ndarray, lse: np.ndarray | None, causal: bool) -> float:
    """Of some rows of the first and the last head, against float64."""
    q, k, v = given
    worst, group, rows = 0.0, q.shape[1] // k.shape[1], _rows(q.shape[2])
    for b, h in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
        scores = q[b, h, rows].astype(np.float64) @ k[b, h // group].T.astype(np.float64)
        scores /= math.sqrt(q.shape[3])
        if causal:
            hidden = np.arange(k.shape[2])[None] > rows[:, None] + k.shape[2] - q.shape[2]
            scores = np.where(hidden, -np.inf, scores)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        worst = max(worst, wrong(out[b, h, rows], weights @ v[b, h // group] / total))
        if lse is not None:
            worst = max(worst, wrong(lse[b, h, rows], (top + np.log(total))[:, 0]))
    return worst


def gradient_errors(
    given: Arrays,
    dout: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    causal: bool,
    got: dict[str, np.ndarray],
) -> float:
    """The largest of dq, dk and dv, at some rows and keys of the last head; `out` and `lse` are given."""
    q, k, v = given
    b, h, scale = q.shape[0] - 1, q.shape[1] - 1, 1 / math.sqrt(q.shape[3])
    rows, keys = _rows(q.shape[2]), _rows(k.shape[2])
    one = {n: x[b, h].astype(np.float64) for n, x in {"q": q, "k": k, "v": v, "do": dout, "o": out}.items()}
    delta, sums = (one["do"] * one["o"]).sum(-1), lse[b, h].astype(np.float64)

    def pairs(i: np.ndarray, j: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p = np.exp(one["q"][i] @ one["k"][j].T * scale - sums[i, None])
        if causal:
            p = np.where(np.arange(len(one["k"]))[j][None] > np.arange(len(sums))[i][:, None], 0.0, p)
        return p, p * (one["do"][i] @ one["v"][j].T - delta[i, None])

    every, all_keys = np.arange(len(sums)), np.arange(len(one["k"]))
    p, ds = pairs(every, keys)
    errors = [wrong(got["dv"][b, h, keys], p.T @ one["do"])]
    errors.append(wrong(got["dk"][b, h, keys], ds.T @ one["q"] * scale))
    errors.append(wrong(got["dq"][b, h, rows], pairs(rows, all_keys)[1] @ one["k"] * scale))
    return max(errors)
