"""A persistent pool of native threads that completes by work items, never by threads.

`run(kernel, arguments, num_items, ...)` executes `void kernel(int64 arguments, int64 item, int64 scratch)`
for each item. The caller works too and returns when every item is done, so a worker that is late, or whose
core is away, delays nothing: it finds no items. Workers are native threads that never enter Python; they
spin for some microseconds after work and then park. What they run is in `pool_kernel.py`; this module owns
their memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

from polyflash.backends.cpu import runtime

# Byte offsets in the words a caller passes, and what the first of them may be.
ROLE, CONTROL = 0, 8
CALLER_KERNEL, CALLER_ARGUMENTS, CALLER_ITEMS, CALLER_THREADS, CALLER_SCRATCH, CALLER_STRIDE = range(
    16, 64, 8
)
ROLE_SERIAL, ROLE_CALLER, ROLE_WORKER = 0, 1, 2

# The control memory: two words that change, on cache line pairs of their own, then constants, slots, workers.
EPOCH, PARKED = 0, 128
_CONSTANTS = 256
LOCK, TRYLOCK, UNLOCK, WAIT, SIGNAL, YIELD, SLEEP, CLOCK, CLOCK_ID = range(_CONSTANTS, _CONSTANTS + 72, 8)
_FUNCTIONS = (
    "pthread_mutex_lock",
    "pthread_mutex_trylock",
    "pthread_mutex_unlock",
    "pthread_cond_wait",
    "pthread_cond_signal",
    "sched_yield",
    "nanosleep",
    "clock_gettime",
)

# A job slot. More callers at once than slots run alone, as their cores are busy anyway.
FIRST_SLOT, SLOT_BYTES, SLOTS = 1024, 512, 8
CLAIM, DONE, BUSY = 0, 128, 256
KERNEL, ARGUMENTS, ITEMS, THREADS, SCRATCH, STRIDE, FLOAT_MODE = range(264, 320, 8)

# A worker: role and control as in a caller's words, its number, what it parks on (room for any libc's).
FIRST_WORKER, WORKER_BYTES = 8192, 512
NUMBER, ASLEEP, MUTEX, CONDITION = 16, 24, 128, 256
MAX_WORKERS = 511

PAGE = 4096
KEPT_SCRATCH = 4 << 20  # bytes per participant that a calling thread keeps between calls
_MAX_ITEMS = 1 << 31
_POSIX = os.name == "posix"  # elsewhere there are no pthreads, and callers work alone

_pack = struct.Struct("8q").pack


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Names the pool's own compiled object in the kernel cache."""

    name: str = "pool"
    builder: str = "polyflash.backends.cpu.pool_kernel"


class _Scratch:
    """Private, page-aligned memory of one calling thread; a forked child gets a copy, never a share."""

    __slots__ = ("_memory", "address", "size")

    def __init__(self, size: int) -> None:
        size = max(PAGE, size)
        if _POSIX:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._memory = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.size = size


class _Workers:
    """The control memory and the threads that live on it. Both last until the process ends."""

    def __init__(self) -> None:
        libc = _libc()
        size = FIRST_WORKER + (MAX_WORKERS + 1) * WORKER_BYTES
        place = ctypes.c_void_p()
        if (
            libc.posix_memalign(ctypes.byref(place), ctypes.c_size_t(PAGE), ctypes.c_size_t(size))
            or not place.value
        ):
            raise MemoryError(f"no {size} bytes for the thread pool")
        self.control = place.value
        self.count = 0
        self.limit = MAX_WORKERS
        ctypes.memset(self.control, 0, size)
        for index, name in enumerate(_FUNCTIONS):
            self._put(_CONSTANTS + 8 * index, ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0)
        self._put(CLOCK_ID, time.CLOCK_MONOTONIC)

    def grow(self, wanted: int, entry: int) -> None:
        """Starts threads until there are `wanted`, or as many as the system grants."""
        libc = _libc()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while self.count < min(wanted, self.limit):
                if not self._start(libc, self.count + 1, entry):
                    self.limit = self.count
                    return
                self.count += 1
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _start(self, libc: ctypes.CDLL, number: int, entry: int) -> bool:
        offset = FIRST_WORKER + number * WORKER_BYTES
        worker = ctypes.c_void_p(self.control + offset)
        for word, value in ((ROLE, ROLE_WORKER), (CONTROL, self.control), (NUMBER, number)):
            self._put(offset + word, value)
        libc.pthread_mutex_init(ctypes.c_void_p(self.control + offset + MUTEX), None)
        libc.pthread_cond_init(ctypes.c_void_p(self.control + offset + CONDITION), None)
        thread = ctypes.c_void_p()
        if libc.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(entry), worker):
            return False
        libc.pthread_detach(thread)
        return True

    def _put(self, offset: int, value: int) -> None:
        ctypes.c_int64.from_address(self.control + offset).value = value


class _Caller(threading.local):
    scratch: _Scratch | None = None


_caller = _Caller()
_lock = threading.RLock()
_workers: _Workers | None = None
_participate: Any = None
_entry = 0


def run(kernel: int, arguments: int, num_items: int, num_threads: int, scratch_bytes: int) -> None:
    """Runs `kernel(arguments, item, scratch)` for items 0 .. num_items-1, issued in that order; then returns.

    `kernel` is a native address, `arguments` any word it understands. Each of at most `num_threads` threads
    has `scratch_bytes` of its own, page-aligned, with undefined contents. One thread or one item stays on the
    calling thread. The GIL is released throughout; any number of Python threads may call at once.
    """
    participate = _participate or _load()
    threads = min(num_threads, num_items, MAX_WORKERS + 1)
    if threads <= 1 or num_items >= _MAX_ITEMS or not _POSIX:
        scratch = _scratch(scratch_bytes, 1)
        participate(_pack(ROLE_SERIAL, 0, kernel, arguments, num_items, 1, scratch.address, 0))
        return
    workers = _workers
    if workers is None or workers.count < min(threads - 1, workers.limit):
        workers = _grow(threads - 1)
    stride = (scratch_bytes + PAGE - 1) & -PAGE
    scratch = _scratch(stride, threads)
    participate(
        _pack(ROLE_CALLER, workers.control, kernel, arguments, num_items, threads, scratch.address, stride)
    )


def num_workers() -> int:
    """Threads started so far in this process; 0 until a call asks for more than one."""
    return _workers.count if _workers else 0


def _scratch(stride: int, threads: int) -> _Scratch:
    """Memory for `threads` participants. The caller of this function holds it while the kernel runs."""
    size = stride * threads
    kept = _caller.scratch
    if kept is not None and kept.size >= size:
        return kept
    scratch = _Scratch(size)
    if stride <= KEPT_SCRATCH:
        _caller.scratch = scratch
    return scratch


def _load() -> Any:
    global _participate, _entry
    with _lock:
        if _participate is None:
            _entry = runtime.load(PoolKey())
            _participate = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_entry)
        return _participate


def _grow(wanted: int) -> _Workers:
    global _workers
    with _lock:
        if _workers is None:
            _workers = _Workers()
        _workers.grow(wanted, _entry)
        return _workers


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _before_fork() -> None:
    _lock.acquire(timeout=runtime.FORK_PATIENCE_S)


def _after_fork_in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # not ours: the patience ran out
        _lock.release()


def _after_fork_in_child() -> None:
    """Threads do not survive a fork: the child starts its own when it needs them, on memory of its own."""
    global _lock, _workers
    _lock = threading.RLock()
    _workers = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
