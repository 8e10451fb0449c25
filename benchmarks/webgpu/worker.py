"""The measuring process: one request, one answer, times by timestamp queries. It is killed if a compiler does
not come back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import wgpu

from benchmarks import Shape
from benchmarks.exact import forward_error, gradient_error
from benchmarks.webgpu.mappings import MAPPINGS, Text
from polyflash import webgpu
from polyflash.backends.webgpu import configs, device, forward
from polyflash.backends.webgpu.backward import kernels_of, walk
from polyflash.backends.webgpu.calls import PARAMS, Sizes, call_of
from polyflash.backends.webgpu.configs import TILE, Config, Variant, fours, lanes
from polyflash.backends.webgpu.render import Buffer
from polyflash.backends.webgpu.tensor import GpuTensor
from polyflash.spec import Arguments

COPY_BYTES = 1 << 28
# Seconds of work before anything is timed: an idle card has low clocks, and an H100 reads new gigabytes at a
# third of its rate for the first 150 ms, after gradients in the same process.
WARM = 0.6
LEAST, LONG = 0.02, 0.4  # seconds of a batch; of work that is timed once
ROUNDS = 5

STEPS = {
    "large": [Shape(4, 32, 8, 32768, 128), Shape(4, 32, 8, 32768, 64), Shape(1, 32, 8, 8192, 128)],
    "tiny": [Shape(1, 8, 2, 1024, 64)],
}


def _by_lanes(*tried: tuple[int, int, int, int]) -> dict[str, Variant]:
    """`row` variants by lanes, rows of a thread, threads, keys of a block / 4."""
    return {configs.title(v): v for v in (lanes(*each) for each in tried)}


def _tiles() -> dict[str, Variant]:
    sizes = ((8, 8, 4, 1), (8, 8, 8, 2), (8, 16, 4, 2), (16, 8, 8, 1), (16, 16, 4, 1), (16, 8, 2, 1))
    each = (Variant(TILE, *size, shuffled) for size in sizes for shuffled in (True, False))
    return {configs.title(v): v for v in each}


FORWARD = {
    **_by_lanes((1, 1, 64, 4), (2, 1, 64, 4), (2, 2, 128, 8), (4, 2, 128, 8), (4, 4, 64, 8), (4, 4, 128, 8)),
    **_by_lanes((4, 4, 128, 16), (4, 4, 256, 8), (8, 4, 128, 8), (8, 8, 128, 8), (8, 8, 256, 8)),
    **_by_lanes((16, 4, 128, 4), (16, 8, 64, 4), (16, 8, 128, 4), (16, 8, 128, 8), (16, 8, 256, 4)),
    **_by_lanes((16, 8, 256, 8), (32, 8, 128, 4), (32, 8, 256, 4), (8, 4, 256, 8)),
    **_tiles(),
}
SPLITS = (2, 4)  # of calls with few tiles, beside none
BACKWARD = _by_lanes(
    *((1, 1, 64, 4), (2, 1, 128, 8), (4, 2, 256, 8), (8, 2, 128, 8), (8, 4, 64, 8), (8, 4, 128, 4)),
    *((8, 4, 128, 8), (8, 4, 256, 8), (16, 4, 128, 4), (16, 4, 128, 8), (16, 4, 256, 4), (16, 4, 256, 8)),
    *((16, 8, 128, 8), (32, 4, 128, 4), (32, 8, 128, 4), (32, 8, 256, 4)),
)
DECODE = _by_lanes(
    *((32, 4, 32, 2), (32, 2, 64, 2), (32, 1, 128, 2), (16, 2, 32, 1), (16, 2, 32, 2), (16, 2, 32, 4)),
    *((16, 1, 64, 2), (16, 1, 64, 4), (8, 1, 32, 2), (8, 1, 32, 4)),
)
GROUPS = (1024, 2048, 4096)  # workgroups that few rows are cut into
_COPY = """
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(0) var<uniform> n: vec4<u32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
  let first = group.x * 1024u + t;
  let a = x[first]; let b = x[first + 256u]; let c = x[first + 512u]; let d = x[first + 768u];
  y[first] = a; y[first + 256u] = b; y[first + 512u] = c; y[first + 768u] = d;
}
"""


class Clock:
    """Seconds of the device between two places of a batch."""

    def __init__(self, on: device.Device) -> None:
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


class Refused(Exception):
    """Why a request has no figure."""


def measuring() -> Callable[[dict[str, Any]], dict[str, Any]]:
    return Worker().answer


class Worker:
    def __init__(self) -> None:
        self.on = device.current()
        self.clock = Clock(self.on)
        self.held: tuple[Any, ...] = ()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["what"] == "about":
            return {"adapter": device.described(), "limits": str(self.on.limits)}
        try:
            shape = Shape(*request["shape"])
            self.on.unchecked = request["trusted"]
            return getattr(self, request["what"])(shape, request["causal"], request["variant"])
        except Refused as why:
            return {"reason": str(why)}
        except Exception as error:  # one that failed leaves the others
            return {"reason": f"{type(error).__name__}: {error}"}

    def tensors(self, shape: Shape, rows: int) -> tuple[Any, Any]:
        if not self.held or self.held[0] != (shape, rows):
            self.held = ()
            random = np.random.default_rng(0)
            sizes = ((shape.heads, rows), (shape.kv_heads, shape.seqlen), (shape.kv_heads, shape.seqlen))
            made = [random.standard_normal((shape.batch, *x, shape.head_dim), np.float32) for x in sizes]
            self.held = (shape, rows), [*map(torch.from_numpy, made)], [*map(GpuTensor.of, made)]
        return self.held[1], self.held[2]

    def timed(
        self, work: Callable[[], Any], amount: float, error: float, unit: str = "TFLOP/s", **more: Any
    ) -> dict[str, Any]:
        """The answer: the time of `work`, and its rate if it is so many FLOPs, or bytes."""
        seconds = self.clock.median(work)
        scale = 1e12 if unit == "TFLOP/s" else 1e9
        return {"ms": seconds * 1e3, unit: amount / seconds / scale, "error": error, **more}

    def legal(self, variant: Variant, shape: Shape) -> Variant:
        d4 = fours(shape.head_dim)
        why = configs.why_illegal(variant, d4, d4, self.on.limits)
        if why:
            raise Refused(why)
        return variant

    def planned(self, shape: Shape, sizes: Sizes, table: Any, name: str, few: bool) -> forward.Plan:
        """The plan of "variant / splits", or "variant / workgroups" of few rows; "" is the engine's own."""
        if not name:
            return forward.plan_of(self.on, sizes, Arguments(), Config(), few)
        called, _, parts = name.partition(" / ")
        variant = self.legal(table[called], shape)
        if few:
            group = shape.heads // shape.kv_heads
            tiles = shape.batch * shape.kv_heads * -(-group // variant.rows)
            return forward.Plan(variant, True, configs.splits(tiles, shape.seqlen, int(parts)))
        return forward.Plan(variant, False, int(parts or 1))

    def forward(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        arrays, (q, k, v) = self.tensors(shape, shape.seqlen)
        sizes, args = forward.sizes_of(q, k, v), Arguments(causal=causal, need_lse=True)
        plan = self.planned(shape, sizes, FORWARD, name, False)
        began = time.perf_counter()
        prepared = forward.prepare(self.on, sizes, q.dtype, args, plan)

        def work() -> tuple[GpuTensor, Any]:
            return forward.launch_forward(q, k, v, prepared)

        out, lse = work()
        got = out.numpy()
        built = time.perf_counter() - began
        error = forward_error(arrays, torch.from_numpy(got), causal, torch.from_numpy(lse.numpy()))
        note = "" if name else f"{configs.title(plan.variant)} / {plan.num_splits}"
        return self.timed(work, flops(shape, causal, 4), error, built=built, note=note)

    def backward(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        on, dims = self.on, (fours(shape.head_dim), fours(shape.head_dim))
        variants = configs.gradient_variants(dims, on.limits, Config())
        if name:
            variants = 2 * (self.legal(BACKWARD[name], shape),)
        arrays, (q, k, v) = self.tensors(shape, shape.seqlen)
        dout = np.random.default_rng(1).standard_normal(q.shape, np.float32)
        args, like = Arguments(causal=causal, need_lse=True), GpuTensor.of(dout)
        out, lse = forward.attend(q, k, v, args, Config())
        assert lse is not None
        sizes, sums = forward.sizes_of(q, k, v), lse.numpy()
        call = call_of(sizes, args)
        kernels = kernels_of(sizes, call.flags, "float32", on.limits, variants)
        words, before = on.upload(call.words), on.upload(np.stack((sums, np.zeros_like(sums)), -1))
        rows = on.empty(before.nbytes)
        made = [GpuTensor.empty(x.shape) for x in (q, k, v)]
        blocks = [words, q.block, k.block, v.block, like.block, rows]
        grid, stride = forward.flat_grid(on, call.numbers["rows_total"])
        own = [words, out.block, like.block, before, rows]
        parts: list[Callable[[], None]] = [
            lambda: on.launch(kernels[0], call.params({"stride_y": stride}), own, grid),
            lambda: walk(kernels[1], shape.seqlen, shape.heads, [*blocks, made[0].block], sizes, call),
            lambda: walk(
                kernels[2], shape.seqlen, shape.kv_heads, [*blocks, made[1].block, made[2].block], sizes, call
            ),
        ]

        def work() -> None:
            for part in parts:
                part()

        began = time.perf_counter()
        work()
        got = [torch.from_numpy(x.numpy()) for x in made]
        built = time.perf_counter() - began
        error = gradient_error(arrays, torch.from_numpy(dout), got, causal)
        note = f"dq {self.clock.median(parts[1]) * 1e3:.3f}, dkv {self.clock.median(parts[2]) * 1e3:.3f} ms"
        return self.timed(work, flops(shape, causal, 10), error, built=built, note=note)

    def decode(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        arrays, (q, k, v) = self.tensors(shape, 1)
        on, sizes = self.on, forward.sizes_of(q, k, v)
        plan = self.planned(shape, sizes, DECODE, name, True)
        prepared = forward.prepare(on, sizes, q.dtype, Arguments(), plan)

        def work() -> GpuTensor:
            return forward.launch_forward(q, k, v, prepared)[0]

        error = forward_error(arrays, torch.from_numpy(work().numpy()), False)
        note = f"{configs.title(plan.variant)}, {plan.num_splits} splits"
        return self.timed(work, k.nbytes + v.nbytes, error, "GB/s", note=note)

    def mappings(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        """Full rows by a mapping of `MAPPINGS`; its wall time beside the device's."""
        on, mapping = self.on, MAPPINGS[name]
        if mapping.lacks(on.limits):
            raise Refused("the adapter lacks float16 or subgroups")
        arrays, kind = self.tensors(shape, shape.seqlen)[0], np.float16 if mapping.half else np.float32
        blocks = [on.upload(x.numpy().astype(kind)) for x in arrays]
        blocks.append(on.empty(blocks[0].nbytes))
        kernel, (params, grid) = mapping.kernel(), mapping.launch(shape)

        def work() -> None:
            on.launch(kernel, params, blocks, grid)

        work()
        out = on.read(blocks[-1]).view(kind).reshape(arrays[0].shape)
        began = time.perf_counter()
        work()
        on.read(blocks[-1])
        wall = time.perf_counter() - began
        error = forward_error(arrays, torch.from_numpy(out.astype(np.float32)), False)
        allowed = 5e-3 if mapping.half else 1e-5
        note = f"{wall * 1e3:.1f} ms on the wall, with the reading"
        return self.timed(work, flops(shape, False, 4), error, note=note) | {"allowed": allowed}

    def copy(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        on = self.on
        size = COPY_BYTES if on.limits.kind != "cpu" else COPY_BYTES >> 4
        size = min(size, on.limits.binding_bytes)
        x, y = on.upload(np.ones(size // 4, np.float32)), on.empty(size)
        kernel = Text("main", (_COPY,), (Buffer("y", "vec4<f32>", True),), (), PARAMS)
        work = partial(on.launch, kernel, b"\0" * 16, (x, y), (size // 16384, 1, 1))
        work()
        same = bool((on.read(y).view(np.float32) == 1).all())
        return self.timed(work, 2 * size, 0.0 if same else 1.0, "GB/s")

    def host(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        """Seconds of this process per batched call, waits left out; and reading 64 MiB back."""
        small = Shape(1, 1, 1, 16, 16)
        _, (q, k, v) = self.tensors(small, 16)
        webgpu.attention(q, k, v, causal=True).numpy()
        best = 1e9
        for _ in range(5):
            began = time.perf_counter()
            with webgpu.batch():
                x = q
                for _ in range(100):
                    x = webgpu.attention(x, k, v, causal=True)
            spent = time.perf_counter() - began
            x.numpy()
            best = min(best, spent)
        big = self.on.upload(np.ones(1 << 24, np.float32))
        into, ours, theirs = np.empty(1 << 26, np.uint8), 1e9, 1e9
        for _ in range(4):
            began = time.perf_counter()
            self.on.read(big, into)
            ours = min(ours, time.perf_counter() - began)
            began = time.perf_counter()
            self.on.queue.read_buffer(big.buffer, 0, 1 << 26)
            theirs = min(theirs, time.perf_counter() - began)
        back = f"64 MiB back {ours * 1e3:.1f} ms, read_buffer {theirs * 1e3:.1f}"
        note = f"per batched call {best * 1e4:.1f} us; {back}"
        return {"ms": best * 10, "note": note}


def flops(shape: Shape, causal: bool, each: int) -> float:
    """Of visible pairs, `each` times head_dim for one."""
    pairs = shape.seqlen * (shape.seqlen + 1) / 2 if causal else shape.seqlen**2
    return each * shape.batch * shape.heads * pairs * shape.head_dim
