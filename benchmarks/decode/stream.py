"""How fast this machine reads memory: plain vector loads over given tensors, on our own thread pool.

What a decode step cannot beat, and the scale of its figures. The loop adds what it reads, so that a test can
see that nothing is left out; it is emitted as LLVM text like the loops of `peak.py`. The tensors are cut in
pieces, which are items of the pool, handed out in order like those of a kernel. A thread reads its piece from
the first byte to the last, or at several places of it by turns, which occupies more of the hardware's
prefetchers: on small pages that is faster, and it is what a kernel may reach that reads several heads at
once.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyflash.bench.peak import VECTOR_BITS, Calibration, engine_of
from polyflash.errors import SpecError
from polyflash.target import detect

LOADS = 8  # vectors per turn, each with a sum of its own
PIECE = 1 << 20  # bytes of one item; of 64 KiB, 5 % slower here
PLACES = 4  # of a piece, read by turns: 1 to 8 were tried
_WORDS = 2  # of the table, per item: address, turns
_LAST_LEVEL = 32 << 20  # bytes of the last cache where the system does not say


class Read:
    """A call that reads every byte of `tensors` once, on as many threads as torch has, every piece at
    `places` of it by turns.

    A tensor must be dense, and its bytes a multiple of one turn's (512 with AVX-512).
    """

    def __init__(self, tensors: Sequence[Tensor], places: int = 1) -> None:
        bits = VECTOR_BITS.get(detect("cpu").arch, 128)
        turn = LOADS * bits // 8
        table: list[int] = []
        for x in tensors:
            if not x.is_contiguous() or x.nbytes % turn:
                got = f"a tensor of {x.nbytes} bytes and strides {x.stride()}"
                raise SpecError(f"stream: got {got}, wanted contiguous ones of a multiple of {turn} bytes")
            for start in range(0, x.nbytes, PIECE):
                table += [x.data_ptr() + start, min(PIECE, x.nbytes - start) // turn]
        self.bytes = sum(x.nbytes for x in tensors)
        self._items = len(table) // _WORDS
        self._tensors = tuple(tensors)  # kept alive: the table holds their addresses
        self._table = torch.tensor(table, dtype=torch.int64)
        self._sums = torch.zeros(self._items, LOADS * bits // 32, dtype=torch.int32)
        self._arguments = torch.tensor([self._table.data_ptr(), self._sums.data_ptr()], dtype=torch.int64)
        self._address = _engine(bits, places).get_function_address("read")

    def __call__(self) -> None:
        from polyflash.backends.cpu import pool

        pool.run(self._address, self._arguments.data_ptr(), self._items, torch.get_num_threads(), 0)

    @property
    def total(self) -> int:
        """The sum of all that was read last, as 32-bit words, modulo 2³²."""
        return int(self._sums.sum(dtype=torch.int64)) % (1 << 32)


class MemorySpeed:
    """The machine's present speed as a fraction of the best it has shown for this row: that of its
    arithmetic, or of a read that no cache serves, whichever is lower. Time slices of the host are longer than
    a burst of arithmetic, and other machines on it take memory's rate without taking a core."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._best = calibration, 0.0

    def __call__(self) -> float:
        rate = max(_read_rate() for _ in range(2))  # the first may meet threads of torch that still spin
        self._best = max(self._best, rate)
        return min(self._calibration.speed(), rate / self._best)


def _read_rate() -> float:
    """Bytes per second."""
    read, start = _large_read(), time.perf_counter()
    read()
    return read.bytes / (time.perf_counter() - start)


@lru_cache(maxsize=1)
def _large_read() -> Read:
    return Read([torch.ones(2 * last_level_bytes(), dtype=torch.int8)])


def available() -> bool:
    """Is there what the loop and the pool are compiled with?"""
    return all(importlib.util.find_spec(name) is not None for name in ("llvmlite", "numba"))


def last_level_bytes() -> int:
    """Of the largest cache of the first core."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    texts = [file.read_text(encoding="ascii").strip() for file in files]
    sizes = [int(text[:-1]) << 10 for text in texts if text.endswith("K") and text[:-1].isdigit()]
    return max(sizes, default=_LAST_LEVEL)


@lru_cache(maxsize=4)
def _engine(bits: int, places: int) -> Any:
    return engine_of(_text(bits, places))


def _text(bits: int, places: int) -> str:
    """`read(arguments, item, scratch)`: `LOADS` loads per turn, `LOADS // places` at each place, as one wide
    vector that the compiler takes apart."""
    vector, side = f"<{LOADS // places * bits // 32} x i32>", LOADS // places * bits // 8
    spread = sums = reads = stores = ""
    for n in range(places):
        spread += f"  %place{n} = mul i64 %turns, {n * side}\n"
        sums += f"  %s{n} = phi {vector} [zeroinitializer, %entry], [%t{n}, %loop]\n"
        reads += f"  %p{n} = getelementptr i8, ptr %p, i64 %place{n}\n"
        reads += f"  %x{n} = load {vector}, ptr %p{n}, align 4\n  %t{n} = add {vector} %s{n}, %x{n}\n"
        stores += f"  %q{n} = getelementptr i8, ptr %sum, i64 {n * side}\n"
        stores += f"  store {vector} %t{n}, ptr %q{n}, align 4\n"
    return f"""\
define void @read(i64 %arguments, i64 %item, i64 %scratch) {{
entry:
  %block = inttoptr i64 %arguments to ptr
  %table = load ptr, ptr %block, align 8
  %second = getelementptr i64, ptr %block, i64 1
  %sums = load ptr, ptr %second, align 8
  %at = mul i64 %item, {_WORDS}
  %first = getelementptr i64, ptr %table, i64 %at
  %start = load ptr, ptr %first, align 8
  %length = getelementptr i64, ptr %first, i64 1
  %turns = load i64, ptr %length, align 8
  %offset = mul i64 %item, {LOADS * bits // 8}
  %sum = getelementptr i8, ptr %sums, i64 %offset
{spread}  br label %loop
loop:
  %i = phi i64 [0, %entry], [%j, %loop]
  %p = phi ptr [%start, %entry], [%q, %loop]
{sums}{reads}  %q = getelementptr i8, ptr %p, i64 {side}
  %j = add i64 %i, 1
  %more = icmp ult i64 %j, %turns
  br i1 %more, label %loop, label %done
done:
{stores}  ret void
}}"""
