"""The peak rate of a device: of a GPU a large product; of a CPU register-only multiply-add loops, per thread
and on all threads at once.

The loops read no memory, so their rate is the ceiling of any kernel of that arithmetic. They are emitted as
LLVM text and compiled by llvmlite in milliseconds. A burst lasts about 0.1 ms, less than a scheduler's
slice, so the best of many finds the core's true rate even on a busy machine; that best is the absolute scale
that later calibrations are held against."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from polyflash.bench.timing import Clock, GpuSpeed, median, queued
from polyflash.target import Target, usable_cpus
from polyflash.tuning.store import gpu_driver

VECTOR_BITS = {"avx512": 512, "avx2": 256}  # any other: 128
_CHAINS = {512: 16, 256: 12, 128: 16}  # independent accumulators: hides the latency, fits the registers
_BURST = 100e-6  # seconds
_CALIBRATION = 400e-6  # seconds, on all threads: starting them costs some 25 µs of it
_LEAST_CLOCK = 0.75  # of one core's clock alone, when all of them compute
_DATA = bytes.fromhex("803a") * 2048  # a small positive number read as float, double or bfloat16
_KINDS = {  # element, FLOPs per 32-bit lane and instruction, intrinsic
    "fp32": ("float", 2.0, "llvm.fmuladd.v{n}f32"),
    "fp64": ("double", 1.0, "llvm.fmuladd.v{n}f64"),
    "bf16": ("float", 4.0, "llvm.x86.avx512bf16.dpbf16ps.512"),
}


@dataclass(frozen=True)
class Peak:
    """GFLOP/s of one thread alone, of all threads in the best burst seen, and how many threads those were."""

    kind: str
    per_thread: float
    together: float
    threads: int
    cores: int  # that the threads run on: fewer if two of them share one

    @property
    def total(self) -> float:
        """The ceiling that percentages refer to: all cores at the rate of one alone."""
        return self.per_thread * self.cores

    @property
    def scaling(self) -> float:
        """How many threads' worth of work all threads did."""
        return self.together / self.per_thread


def kind_of(dtype: str, target: Target) -> str:
    """The arithmetic whose peak bounds attention on `dtype` here: "bf16" only where the CPU has the dot
    product; of a GPU, that of its matrix units."""
    if target.kind != "cpu":
        return dtype
    if dtype == "bfloat16" and target.arch == "avx512" and "avx512_bf16" in target.features:
        return "bf16"
    return "fp64" if dtype == "float64" else "fp32"


def calibrate(target: Target) -> Calibration | None:
    """The machine's calibration; None where llvmlite is not installed."""
    return Calibration(target) if importlib.util.find_spec("llvmlite") else None


class Calibration:
    """The peaks of this machine, and its present speed as a fraction of the best this process saw."""

    def __init__(self, target: Target, threads: int = 0) -> None:
        self.threads = threads or torch.get_num_threads()
        self._target = target
        cpus = usable_cpus()
        # Left to itself, the system may wake two of these threads on one core and leave them there.
        seats = itertools.cycle(cpus) if self.threads >= len(cpus) else None
        self._pool = ThreadPoolExecutor(self.threads, "polyflash-peak", initializer=_sit, initargs=(seats,))
        self._peaks: dict[str, Peak] = {}
        self._best = 0.0
        self.peak("fp32")

    @property
    def measured(self) -> tuple[Peak, ...]:
        return tuple(self._peaks.values())

    def peak(self, kind: str) -> Peak:
        """Measured once per kind and kept; about 0.1 s."""
        if kind not in self._peaks:
            loop = _loop(kind, VECTOR_BITS.get(self._target.arch, 128))
            short = loop.turns_in(_BURST)
            alone = max(loop.rate(short) for _ in range(200))
            long = loop.turns_in(_CALIBRATION)
            together = max(self._together(loop, long) for _ in range(60))
            self._peaks[kind] = Peak(kind, alone, together, self.threads, min(self.threads, physical_cores()))
        return self._peaks[kind]

    def speed(self) -> float:
        """One calibration on all threads against full speed: 1 is all of it, 0.5 says half the cores are
        away.

        Full speed is the best ever seen, but at least `_LEAST_CLOCK` of every core at the rate of one alone:
        a process that starts in a bad window must not take it for normal. The better of two calibrations
        counts: the first may meet another pool's threads that still spin."""
        loop = _loop("fp32", VECTOR_BITS.get(self._target.arch, 128))
        turns = loop.turns_in(_CALIBRATION)
        rate = max(self._together(loop, turns) for _ in range(2))
        fp32 = self._peaks["fp32"]
        self._best = max(self._best, rate, fp32.together, _LEAST_CLOCK * fp32.total)
        return rate / self._best

    def _together(self, loop: _Loop, turns: int) -> float:
        """GFLOP/s of all threads, from the first start to the last end."""
        bursts = [self._pool.submit(loop.run, turns) for _ in range(self.threads)]
        spans = [burst.result() for burst in bursts]
        wall = max(end for _, end in spans) - min(start for start, _ in spans)
        return self.threads * turns * loop.flops / wall / 1e9


def physical_cores() -> int:
    """Cores this process may use, two hardware threads of one core counted once (where the system tells)."""
    cores = set()
    for cpu in usable_cpus():
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            cores.add(siblings.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _sit(seats: Iterator[int] | None) -> None:
    """Keeps the calling thread on the next seat, where the system lets it."""
    if seats is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {next(seats)})


class _Loop:
    """A compiled loop of `flops` per turn."""

    def __init__(self, kind: str, bits: int) -> None:
        self._engine = engine_of(_text(kind, bits))  # owns the code
        address = self._engine.get_function_address("burst")
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(address)
        self.flops = _KINDS[kind][1] * (bits // 32) * _CHAINS[bits]

    def run(self, turns: int) -> tuple[float, float]:
        """Start and end of one burst; ctypes releases the GIL for it."""
        data = ctypes.create_string_buffer(_DATA)
        start = time.perf_counter()
        self._call(turns, data)
        return start, time.perf_counter()

    def rate(self, turns: int) -> float:
        start, end = self.run(turns)
        return turns * self.flops / (end - start) / 1e9

    def turns_in(self, seconds: float) -> int:
        return max(1, int(max(self.rate(2000) for _ in range(20)) * 1e9 * seconds / self.flops))


_loop = lru_cache(maxsize=8)(_Loop)


def engine_of(text: str) -> Any:
    """LLVM text compiled for this CPU: an engine that owns the code."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def _text(kind: str, bits: int) -> str:
    """`burst(turns, data)`: one multiply-add per accumulator and turn, operands loaded once, sums stored at
    the end."""
    element, _, intrinsic = _KINDS[kind]
    lanes, dot = bits // (64 if kind == "fp64" else 32), kind == "bf16"
    vector, name = f"<{lanes} x {element}>", intrinsic.format(n=lanes)
    operand = f"<{2 * lanes} x bfloat>" if dot else vector
    sums = steps = stores = ""
    for c in range(_CHAINS[bits]):
        factors, added = f"{operand} %a, {operand} %b", f"{vector} %c{c}"
        given = f"{added}, {factors}" if dot else f"{factors}, {added}"
        sums += f"  %c{c} = phi {vector} [zeroinitializer, %entry], [%d{c}, %loop]\n"
        steps += f"  %d{c} = call {vector} @{name}({given})\n"
        stores += f"  %p{c} = getelementptr i8, ptr %data, i64 {128 + 64 * c}\n"
        stores += f"  store {vector} %d{c}, ptr %p{c}, align 4\n"
    kinds = f"{vector}, {operand}, {operand}" if dot else f"{operand}, {operand}, {vector}"
    return f"""\
declare {vector} @{name}({kinds})
define void @burst(i64 %turns, ptr %data) {{
entry:
  %a = load {operand}, ptr %data, align 4
  %next = getelementptr i8, ptr %data, i64 64
  %b = load {operand}, ptr %next, align 4
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%j, %loop]
{sums}{steps}  %j = add i64 %i, 1
  %more = icmp ult i64 %j, %turns
  br i1 %more, label %loop, label %done
done:
{stores}  ret void
}}"""


class GpuCalibration:
    """The counterpart of `Calibration` on a GPU: the rate of a large product, and the present speed."""

    def __init__(self, device: str) -> None:
        self.device, self.ceilings, self.speed = device, ceilings(device), GpuSpeed(device)

    def peak(self, kind: str) -> Peak | None:
        """The rate of 16-bit products; others have none."""
        rate = self.ceilings["matmul_tflops"] * 1e3
        return Peak(kind, rate, rate, 1, 1) if kind in ("bfloat16", "float16") else None

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts to quote beside every figure of this GPU."""
        cuda = torch.version.cuda or torch.version.hip
        name = torch.cuda.get_device_name(self.device)
        return {"gpu": name, "driver": gpu_driver(), "cuda": cuda, "ceilings": self.ceilings}


def ceilings(device: str, clock: Clock = queued) -> dict[str, float]:
    """`matmul_tflops`: a product of 8192³ on normal bfloat16 values. `copy_gbs`: a copy of 2 GiB, bytes read
    and written. Medians of five; small ones on a CPU, to try the rest."""
    is_cuda = torch.device(device).type == "cuda"
    n, size = (8192, 1 << 31) if is_cuda else (256, 1 << 20)
    kind = torch.bfloat16 if is_cuda else torch.float32
    a, b, out = (torch.randn(n, n, device=device).to(kind) for _ in range(3))
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def rate(work: float, call: Callable[[], object]) -> float:
        clock(call, 5)
        return work / median([clock(call, 10) for _ in range(5)])

    product = rate(2 * n**3 / 1e12, lambda: torch.mm(a, b, out=out))
    return {"matmul_tflops": product, "copy_gbs": rate(2 * size / 1e9, lambda: target.copy_(source))}
