"""A persistent pool of native threads that completes by work items, never by threads.

`run(kernel, arguments, num_items, ...)` executes `void kernel(int64 arguments, int64 item, int64 scratch)`
for each item. The caller works too and returns when every item is done, so a worker that is late, or whose
core is away, delays nothing: it finds no items. Workers are native threads that never enter Python; they
spin for some microseconds after work and then park. What they run is in `pool_kernel.py`; this module owns
their memory.

After a parallel torch operation the threads of torch's own OpenMP team spin for milliseconds, on the very
cores that our workers would need. While they do, a call is lent to that team; a spinning thread is there at
once, and only then is the team's join harmless. `_Team` knows the team's threads by their CPU clocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from polyflash.backends.cpu import cores, runtime

# Byte offsets in the words a caller passes, and what the first of them may be.
ROLE, CONTROL = 0, 8
CALLER_KERNEL, CALLER_ARGUMENTS, CALLER_ITEMS, CALLER_THREADS, CALLER_SCRATCH, CALLER_STRIDE = range(
    16, 64, 8
)
ROLE_SERIAL, ROLE_CALLER, ROLE_WORKER, ROLE_TEAM, ROLE_MEMBER, ROLE_ROLL_CALL, ROLE_ANSWER = range(7)

# What a caller that has a team passes besides, in a page behind its scratch. TEAM_WORD is whether to wake
# workers, and gettid in a roll call.
TEAM_PARALLEL, TEAM_ENTRY, TEAM_WORD, TEAM_CLOCKS, TEAM_NUM_CLOCKS, TEAM_SIZE, TEAM_FLOAT_MODE = range(
    64, 120, 8
)
TEAM_NEXT, TEAM_NUMBERS, TEAM_THREADS = 128, 192, 256
MAX_TEAM = 256

# And what a job that runs again adds: what tells how many threads torch wants, the answer that it was made
# for, how many words are to be 0 and where, role and threads, which a team overwrites; its arguments.
AGAIN_ASK, AGAIN_WANTED, AGAIN_NUM_ZEROS, AGAIN_ZEROS, AGAIN_ROLE, AGAIN_THREADS = range(256, 304, 8)
AGAIN_FURTHER, MOST_FURTHER = 304, 6  # further addresses: their places among the arguments
AGAIN_ARGUMENTS = 384
WATCHED_CLOCKS = 4  # of a larger team these stand for all

# The control memory: two words that change, on cache line pairs of their own, then constants, slots, workers.
EPOCH, PARKED = 0, 128
_CONSTANTS = 256
LOCK, TRYLOCK, UNLOCK, WAIT, SIGNAL, YIELD, SLEEP, CLOCK, CLOCK_ID = range(_CONSTANTS, _CONSTANTS + 72, 8)
GETCPU, GETAFFINITY, SETAFFINITY, GETTID = range(_CONSTANTS + 72, _CONSTANTS + 104, 8)
CAPPED = _CONSTANTS + 104  # 1: no more threads than cores the caller may run on
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
_LINUX_FUNCTIONS = ("sched_getcpu", "sched_getaffinity", "sched_setaffinity", "gettid")

# A job slot. More callers at once than slots run alone, as their cores are busy anyway.
FIRST_SLOT, SLOT_BYTES, SLOTS = 1024, 512, 8
CLAIM, DONE, BUSY = 0, 128, 256
KERNEL, ARGUMENTS, ITEMS, THREADS, SCRATCH, STRIDE, FLOAT_MODE = range(264, 320, 8)

# A worker: role and control as in a caller's words, its number, what it parks on (room for any libc's).
FIRST_WORKER, WORKER_BYTES = 8192, 640
NUMBER, ASLEEP, THREAD, MUTEX, CONDITION, CPUS, SENT = 16, 24, 32, 128, 256, 384, 512
CPU_BYTES = 128  # a set of 1024 cores: those that a worker is to have, and those it was sent to
MAX_WORKERS = 511

PAGE = 4096
KEPT_SCRATCH = 4 << 20  # bytes per participant that a calling thread keeps between calls
_KEPT_JOBS = 8  # of a calling thread
_MAX_ITEMS = 1 << 31
_POSIX = os.name == "posix"  # elsewhere there are no pthreads, and callers work alone

_pack = struct.Struct("8q").pack
_pack_team = struct.Struct("14q").pack
_pack_team_bytes = 14 * 8


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Names the pool's own compiled object in the kernel cache."""

    name: str = "pool"
    builder: str = "polyflash.backends.cpu.pool_kernel"


@dataclass(frozen=True, slots=True)
class AgainKey:
    """Names what runs a job again."""

    name: str = "again"
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
        if all(hasattr(libc, name) for name in _LINUX_FUNCTIONS):
            for index, name in enumerate(_LINUX_FUNCTIONS):
                self._put(GETCPU + 8 * index, ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0)
            self._put(CAPPED, 1)

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


class _Team:
    """The OpenMP team that torch runs on when this Python thread calls it; each calling thread has its own.

    `parallel` is the address of GOMP_parallel in the library torch itself is linked to; 0 if it has another.
    """

    __slots__ = ("_ids", "clocks", "num_clocks", "parallel", "size")

    def __init__(self, size: int, participate_at: Any) -> None:
        self.size = size
        self.num_clocks = self.clocks = 0
        self.parallel, gettid = _openmp() if size <= MAX_TEAM and not _forked else (0, 0)
        if not (self.parallel and gettid):
            self.parallel = 0
            return
        page = _Scratch(PAGE)
        words = (ROLE_ROLL_CALL, 0, 0, 0, 0, size, 0, 0, self.parallel, _entry, gettid, 0, 0, size)
        ctypes.memmove(page.address, _pack_team(*words), _pack_team_bytes)
        participate_at(page.address)
        here = threading.get_native_id()
        threads = (ctypes.c_int64 * size).from_address(page.address + TEAM_THREADS)
        others = [thread for thread in threads if thread not in (0, here)][:WATCHED_CLOCKS]
        self._ids = (ctypes.c_int64 * WATCHED_CLOCKS)(
            *((~thread << 3) | _THREAD_CPU_CLOCK for thread in others)
        )
        self.clocks, self.num_clocks = ctypes.addressof(self._ids), len(others)


_THREAD_CPU_CLOCK = 6  # Linux: clock id of thread t is (~t << 3) | 6


Job = tuple[int, Any]  # its address, and what lives as long


class _Caller(threading.local):
    scratch: _Scratch | None = None
    team: _Team | None = None

    def __init__(self) -> None:
        self.jobs: dict[Any, Job] = {}  # by what they are of


caller = _caller = _Caller()
_lock = runtime.lock_across_forks()
_workers: _Workers | None = None
_participate: Any = None
_participate_at: Any = None
_entry = 0
_forked = False
_most = 1  # threads that the CPU quota lets run


def run(
    kernel: int, arguments: int, num_items: int, num_threads: int, scratch_bytes: int, wake: bool = True
) -> None:
    """Runs `kernel(arguments, item, scratch)` for items 0 .. num_items-1, issued in that order; then returns.

    `kernel` is a native address, `arguments` any word it understands. Each of at most `num_threads` threads
    has `scratch_bytes` of its own, page-aligned, with undefined contents; there are never more threads than
    the CPU quota or the affinity mask of the calling thread has cores. One thread or one item stays on the
    calling thread; with `wake` False so does all that no spinning team is there to share. The GIL is released
    throughout; any number of Python threads may call at once.
    """
    participate = _participate or _load()
    words, team, (scratch, _) = _laid(kernel, arguments, num_items, num_threads, scratch_bytes, wake)
    if words[0] != ROLE_TEAM:
        participate(_pack(*words))
        return
    block = scratch.address + words[5] * words[7]
    ctypes.memmove(block, _pack_team(*words, *team), _pack_team_bytes)
    _participate_at(block)


def _laid(
    kernel: int, arguments: int, num_items: int, num_threads: int, scratch_bytes: int, wake: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[_Scratch, _Team | None]]:
    """The words of a caller, those that a team adds, and what they lead to."""
    threads = min(num_threads, num_items, _most)
    team = None
    if threads > 1:
        team = _caller.team
        if team is None or team.size != num_threads:
            team = _caller.team = _Team(num_threads, _participate_at)
            _caller.jobs = {}  # of the team before
    if team is None or (team.num_clocks == 0 and not wake) or num_items >= _MAX_ITEMS or not _POSIX:
        scratch = _scratch(scratch_bytes, 1)
        words = ROLE_SERIAL, 0, kernel, arguments, num_items, 1, scratch.address, 0
        return words, (0, _entry, 0, 0, 0, 0), (scratch, None)
    workers = _workers
    if workers is None or workers.count < min(threads - 1, workers.limit):
        workers = _grow(threads - 1)
    stride = (scratch_bytes + PAGE - 1) & -PAGE
    scratch = _scratch(stride, threads)
    role = ROLE_TEAM if team.num_clocks else ROLE_CALLER
    words = role, workers.control, kernel, arguments, num_items, threads, scratch.address, stride
    return words, (team.parallel, _entry, wake, team.clocks, team.num_clocks, team.size), (scratch, team)


def room(size: int) -> tuple[int, _Scratch]:
    """Memory for a job with so many bytes of arguments, and where they go."""
    memory = _Scratch(AGAIN_ARGUMENTS + size)
    return memory.address + AGAIN_ARGUMENTS, memory


def job(memory: _Scratch, wanted: int, num_zeros: int, zeros: int, further: Sequence[int], *call: Any) -> Job:
    """Lays out in its `room` what `run(*call)` would run now, for `again()`, as long as torch wants so many
    threads. When it begins, `num_zeros` words from address `zeros` on are 0. `further`: the numbers of the
    words of its arguments that further addresses become."""
    if _participate is None:
        _load()
    words, team, kept = _laid(*call)
    while len(_caller.jobs) >= _KEPT_JOBS:
        _caller.jobs.pop(next(iter(_caller.jobs)))
    ctypes.memmove(memory.address, _pack_team(*words, *team), _pack_team_bytes)
    places = [8 * word for word in further] + [0] * (MOST_FURTHER - len(further))
    rest = array("q", (_torch_threads(), wanted, num_zeros, zeros, words[0], words[5], *places))
    ctypes.memmove(memory.address + AGAIN_ASK, rest.tobytes(), 8 * len(rest))
    return memory.address, (memory, kept)


@lru_cache(maxsize=1)
def again() -> Any:
    """(job, four addresses, which become the first words of its arguments, MOST_FURTHER further ones, 0 where
    it has fewer) -> 0, or 1 if it has not run, as torch wants another number of threads by now. None where
    that cannot be asked."""
    if not (_POSIX and _torch_threads()):
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * (5 + MOST_FURTHER))(runtime.load(AgainKey()))


@lru_cache(maxsize=1)
def _torch_threads() -> int:
    """The address of at::get_num_threads, or 0."""
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.cast(_torch_library()._ZN2at15get_num_threadsEv, ctypes.c_void_p).value or 0
    return 0


def num_workers() -> int:
    """Threads started so far in this process; 0 until a call asks for more than one."""
    return _workers.count if _workers else 0


def _scratch(stride: int, threads: int) -> _Scratch:
    """Memory for `threads` participants and a page of words. The caller of this function holds it while the
    kernel runs."""
    size = stride * threads + PAGE
    kept = _caller.scratch
    if kept is not None and kept.size >= size:
        return kept
    scratch = _Scratch(size)
    if stride <= KEPT_SCRATCH:
        _caller.scratch = scratch
    return scratch


def _load() -> Any:
    global _participate, _participate_at, _entry, _most
    with _lock:
        if _participate is None:
            _most = min(cores.quota_threads(), MAX_WORKERS + 1)
            _entry = runtime.load(PoolKey())
            _participate_at = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_entry)
            _participate = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_entry)
        return _participate


def _grow(wanted: int) -> _Workers:
    global _workers
    with _lock:
        if _workers is None:
            _workers = _Workers()
        _workers.grow(wanted, _entry)
        return _workers


def _openmp() -> tuple[int, int]:
    """Addresses of GOMP_parallel, as torch itself finds it, and of gettid; 0 where one of them is missing, or
    what ends a team."""
    if "torch" not in sys.modules or sys.platform != "linux":
        return 0, 0
    try:
        functions = _torch_library().GOMP_parallel, _libc().gettid, _torch_library().omp_pause_resource_all
    except (OSError, AttributeError):
        return 0, 0
    parallel, gettid, _ = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions)
    return parallel, gettid


def _torch_library() -> ctypes.CDLL:
    folder = os.path.dirname(sys.modules["torch"].__file__ or "")
    return ctypes.CDLL(os.path.join(folder, "lib", "libtorch_cpu.so"))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


_PAUSE_SOFT = 1  # of OpenMP 5.0: threads end, settings stay


def _before_fork() -> None:
    """A child has none of libgomp's threads, and libgomp does not know: the first parallel operator of torch
    would wait for them for ever. The team of this thread, which a roll call may have started, ends here; the
    next call starts another."""
    team, _caller.team, _caller.jobs = _caller.team, None, {}
    if team is not None and team.parallel:
        _torch_library().omp_pause_resource_all(_PAUSE_SOFT)


def _after_fork_in_child() -> None:
    """Threads do not survive a fork: the child starts its own when it needs them, on memory of its own.
    Where torch alone has used OpenMP before, libgomp does not know that its team is gone, so the child never
    calls it."""
    global _workers, _forked
    _workers, _forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
