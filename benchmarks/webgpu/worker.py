"""The measuring process: one request, one answer. It is killed if a compiler does not come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.webgpu.timing import Clock, forward_error, gradient_errors
from polyflash import webgpu
from polyflash.backends.webgpu import configs, device, forward
from polyflash.backends.webgpu.backward import kernels_of, walk
from polyflash.backends.webgpu.calls import PARAMS, Sizes, call_of
from polyflash.backends.webgpu.configs import TILE, Config, Variant, fours, lanes
from polyflash.backends.webgpu.render import NAGA, Buffer, Kernel
from polyflash.backends.webgpu.tensor import GpuTensor
from polyflash.spec import Arguments

COPY_BYTES = 1 << 28


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int


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
            arrays = tuple(
                random.standard_normal((shape.batch, *size, shape.head_dim), np.float32) for size in sizes
            )
            self.held = (shape, rows), arrays, tuple(map(GpuTensor.of, arrays))
        return self.held[1], self.held[2]

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
        error = forward_error(arrays, got, lse.numpy(), causal)
        seconds = self.clock.median(work)
        pairs = shape.seqlen * (shape.seqlen + 1) / 2 if causal else shape.seqlen**2
        rate = 4 * shape.batch * shape.heads * pairs * shape.head_dim / seconds / 1e12
        note = "" if name else f"{configs.title(plan.variant)} / {plan.num_splits}"
        return {"ms": seconds * 1e3, "TFLOP/s": rate, "error": error, "built": built, "note": note}

    def backward(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        on, dims = self.on, (fours(shape.head_dim), fours(shape.head_dim))
        variants = configs.gradient_variants(dims, on.limits, Config())
        if name:
            variants = 2 * (self.legal(BACKWARD[name], shape),)
        arrays, (q, k, v) = self.tensors(shape, shape.seqlen)
        dout = np.random.default_rng(1).standard_normal(q.shape, np.float32)
        args, like = Arguments(causal=causal, need_lse=True), GpuTensor.of(dout)
        out, lse = forward.attend(q, k, v, args, Config())
        sizes, sums = forward.sizes_of(q, k, v), lse.numpy() if lse else arrays[0]
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
        got = dict(zip(("dq", "dk", "dv"), (x.numpy() for x in made), strict=True))
        built = time.perf_counter() - began
        error = gradient_errors(arrays, dout, out.numpy(), sums, causal, got)
        seconds = self.clock.median(work)
        pairs = shape.seqlen * (shape.seqlen + 1) / 2 if causal else shape.seqlen**2
        flops = 10 * shape.batch * shape.heads * pairs * shape.head_dim
        note = f"dq {self.clock.median(parts[1]) * 1e3:.3f}, dkv {self.clock.median(parts[2]) * 1e3:.3f} ms"
        return {
            **{"ms": seconds * 1e3, "TFLOP/s": flops / seconds / 1e12, "error": error, "built": built},
            "note": note,
        }

    def decode(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        arrays, (q, k, v) = self.tensors(shape, 1)
        on, sizes = self.on, forward.sizes_of(q, k, v)
        plan = self.planned(shape, sizes, DECODE, name, True)
        prepared = forward.prepare(on, sizes, q.dtype, Arguments(), plan)

        def work() -> GpuTensor:
            return forward.launch_forward(q, k, v, prepared)[0]

        error = forward_error(arrays, work().numpy(), None, False)
        seconds = self.clock.median(work)
        rate = (k.nbytes + v.nbytes) / seconds / 1e9
        note = f"{configs.title(plan.variant)}, {plan.num_splits} splits"
        return {"ms": seconds * 1e3, "GB/s": rate, "error": error, "note": note}

    def copy(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        on = self.on
        size = COPY_BYTES if on.limits.kind != "cpu" else COPY_BYTES >> 4
        size = min(size, on.limits.binding_bytes)
        x, y = on.upload(np.ones(size // 4, np.float32)), on.empty(size)
        kernel = _Text("main", (), (Buffer("y", "vec4<f32>", True),), (), PARAMS)
        seconds = self.clock.median(lambda: on.launch(kernel, b"\0" * 16, (x, y), (size // 16384, 1, 1)))
        same = bool((on.read(y).view(np.float32) == 1).all())
        return {"ms": seconds * 1e3, "GB/s": 2 * size / seconds / 1e9, "error": 0.0 if same else 1.0}

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

    def torch(self, shape: Shape, causal: bool, name: str) -> dict[str, Any]:
        import torch
        import torch.nn.functional as F

        if not torch.cuda.is_available():
            raise Refused("torch has no CUDA device")
        import polyflash

        torch.backends.cuda.matmul.allow_tf32 = False
        size = (shape.batch, shape.heads, shape.seqlen, shape.head_dim)
        q, k, v = (torch.randn(size, device="cuda", requires_grad=True) for _ in range(3))
        do = torch.randn_like(q)
        pairs = shape.seqlen * (shape.seqlen + 1) / 2 if causal else shape.seqlen**2
        flops, notes, rate = 4 * shape.batch * shape.heads * pairs * shape.head_dim, [], 0.0
        for who, call in (
            ("torch", partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)),
            ("triton", partial(polyflash.attention, q, k, v, causal=causal)),
        ):
            with torch.no_grad():
                one = _cuda_seconds(call)
            out = call()
            back = _cuda_seconds(partial(torch.autograd.grad, out, (q, k, v), do, retain_graph=True))
            rate = rate or flops / one / 1e12
            notes.append(f"{who} {flops / one / 1e12:.1f}, backward {2.5 * flops / back / 1e12:.1f}")
        return {"ms": flops / rate / 1e9, "TFLOP/s": rate, "note": "; ".join(notes)}


def _cuda_seconds(work: Callable[[], Any]) -> float:
    import torch

    times = []
    work()
    began = time.perf_counter()
    while time.perf_counter() - began < 0.2:
        work()
        torch.cuda.synchronize()
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(3):
            work()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / 3e3)
    return sorted(times)[2]


class _Text(Kernel):
    """A kernel of its own text."""

    def text(self, dialect: str = NAGA) -> str:
        return _COPY
