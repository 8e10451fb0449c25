"""The thread pool: every item runs once, whoever runs it, and nobody waits for a thread."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import polyflash
from polyflash.backends.cpu import pool, runtime

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="the pool needs pthreads")

ITEM = 64  # byte offset of the words of item 0; three words for each item
LIVE = 0x600DDA7A


@dataclass(frozen=True)
class Key:
    """One of the kernels that `build` makes. Other processes load it from the cache, without numba."""

    name: str
    builder: str = "tests.backends.cpu.test_pool"


def build(key: Key) -> Any:
    from numba import cfunc

    from polyflash.backends.cpu.pool_kernel import add, load, pause, poke

    def record(args, item, scratch):
        """Per item: how often it ran, when (a ticket), and on whose scratch."""
        ticket = add(args, 1)
        add(args + ITEM + item * 24, 1)
        poke(args + ITEM + item * 24 + 8, ticket)
        poke(args + ITEM + item * 24 + 16, scratch)

    def hold(args, _item, _scratch):
        """Counts itself in, and does not return before word 1 is set."""
        add(args, 1)
        while load(args + 8) == 0:
            pause()

    def check(args, _item, _scratch):
        """Counts the items that saw live arguments (word 1), and those that did not (word 2)."""
        if load(args) == LIVE:
            add(args + 8, 1)
        else:
            add(args + 16, 1)

    def meet(args, item, _scratch):
        """Two items that wait for each other, hence run on two threads; the second dawdles for word 2 steps.
        Then 100 · 1e-310 · 1e308 by way of a denormal: 1, or 0 if this thread flushes it."""
        add(args, 1)
        while load(args) < 2:
            pause()
        for _ in range(item * load(args + 16)):
            pause()
        poke(args + ITEM + item * 24, int(float(load(args + 8)) * 1e-310 * 1e308 + 0.5))

    def own(args, item, scratch):
        """Fills its scratch (word 1: bytes) with a mark of this call (word 0), dawdles, counts others."""
        for at in range(0, load(args + 8), 64):
            poke(scratch + at, load(args) + item)
        for _ in range(200):
            pause()
        for at in range(0, load(args + 8), 64):
            if load(scratch + at) != load(args) + item:
                add(args + 16, 1)

    def work(args, _item, _scratch):
        """Word 0 steps of arithmetic that no compiler removes."""
        x = load(args)
        for step in range(load(args)):
            x = (x * 3) ^ step
        poke(args + 8, x)

    kernels = {f.__name__: f for f in (record, hold, check, meet, own, work)}
    return cfunc("void(int64, int64, int64)", forceinline=True)(kernels[key.name])


class Words:
    """Zeroed int64 words that kernels read and write."""

    def __init__(self, count: int, *start: int) -> None:
        self.array = (ctypes.c_int64 * count)(*start)
        self.address = ctypes.addressof(self.array)

    def __getitem__(self, index: int) -> int:
        return self.array[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.array[index] = value

    def of_item(self, item: int) -> tuple[int, int, int]:
        start = ITEM // 8 + 3 * item
        return tuple(self.array[start : start + 3])  # type: ignore[return-value]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels in a cache of this session's own, so that processes a test starts need not compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFLASH_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "pool-kernels"))
        patch.delenv("POLYFLASH_NO_CACHE", raising=False)
        patch.setattr(runtime, "_addresses", {})
        for key in (
            pool.PoolKey(),
            *(Key(name) for name in ("record", "hold", "check", "meet", "own", "work")),
        ):
            runtime.load(key)
        yield


@pytest.fixture(autouse=True)
def own_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No lending to torch's team here (test_team.py has that), whatever ran just before."""
    monkeypatch.setattr(pool, "_openmp", lambda: (0, 0))
    pool._caller.team = None
    crowd()
    yield
    crowd(False)
    pool._caller.team = None


def crowd(on: bool = True) -> None:
    """Lets calls have more threads than there are cores: that is where races show."""
    pool._load()
    ctypes.c_int64.from_address(pool._grow(0).control + pool.CAPPED).value = not on


@pytest.fixture
def kernel(cache) -> Callable[[str], int]:
    return lambda name: runtime.load(Key(name))


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)


def run_recorded(kernel: int, items: int, threads: int, scratch_bytes: int = 100) -> Words:
    """Runs `record` and checks what holds for every job: once each, issued in order, scratch of its own."""
    words = Words(8 + 3 * items)
    pool.run(kernel, words.address, items, threads, scratch_bytes)
    ran = [words.of_item(item) for item in range(items)]
    assert [count for count, _, _ in ran] == [1] * items
    assert sorted(ticket for _, ticket, _ in ran) == list(range(items))
    participants = max(1, min(threads, items))
    # Whoever runs item i, at most the other participants hold an earlier item that has no ticket yet.
    assert all(ticket >= item - (participants - 1) for item, (_, ticket, _) in enumerate(ran))
    for scratch in {scratch for _, _, scratch in ran}:
        tickets = [ticket for _, ticket, place in ran if place == scratch]
        assert tickets == sorted(tickets)
        assert scratch % pool.PAGE == 0
    assert len({scratch for _, _, scratch in ran}) <= participants
    return words


@pytest.mark.parametrize("threads", [-1, 0, 1, 2, 3, 5])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 1000])
def test_every_item_once_in_order(kernel, items, threads):
    for _ in range(20):
        words = run_recorded(kernel("record"), items, threads)
    if threads <= 1:
        assert [words.of_item(item)[1] for item in range(items)] == list(range(items))


def test_thread_count_changes_between_calls(kernel):
    generator = random.Random(0)
    for _ in range(400):
        run_recorded(kernel("record"), generator.randrange(1, 40), generator.randrange(1, 7))
    assert pool.num_workers() >= 5


def test_scratch_is_apart_and_bounded(kernel):
    for size in (0, 1, 4096, 5000, 100_000):
        words = Words(8, 1 << 40, size)
        for mark in range(30):
            words[0] = mark << 32
            pool.run(kernel("own"), words.address, 12, 3, size)
        assert words[2] == 0
    kept = pool._caller.scratch
    large = pool.KEPT_SCRATCH + 1
    words = Words(8, 1 << 40, large)
    pool.run(kernel("own"), words.address, 3, 3, large)
    assert words[2] == 0 and pool._caller.scratch is kept
    seen = []
    thread = threading.Thread(target=lambda: seen.append(pool._scratch(4096, 1).address))
    thread.start()
    thread.join()
    assert seen[0] != kept.address


def test_failed_allocation_leaves_the_pool_usable(kernel):
    with pytest.raises((OSError, MemoryError, OverflowError, ValueError)):
        pool.run(kernel("record"), 0, 4, 2, 1 << 60)
    run_recorded(kernel("record"), 50, 2)


def test_busy_worker_delays_nobody(kernel):
    """With the only worker stuck in another caller's item, calls complete, on their callers alone."""
    stuck = Words(8)
    other = threading.Thread(target=pool.run, args=(kernel("hold"), stuck.address, 2, 2, 64))
    other.start()
    try:
        wait_until(lambda: stuck[0] == 2)  # the other caller and worker 1 are both inside an item
        start = time.monotonic()
        for _ in range(200):
            words = run_recorded(kernel("record"), 20, 2)
            assert len({words.of_item(item)[2] for item in range(20)}) == 1
        assert time.monotonic() - start < 5
    finally:
        stuck[1] = 1
    other.join(10)
    assert not other.is_alive()


def test_more_callers_than_slots(kernel):
    """Callers that find no slot run alone; those that did keep theirs."""
    stuck = Words(8)
    threads = [
        threading.Thread(target=pool.run, args=(kernel("hold"), stuck.address, 2, 2, 64))
        for _ in range(pool.SLOTS + 3)
    ]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: stuck[0] >= len(threads))
        run_recorded(kernel("record"), 100, 4)
    finally:
        stuck[1] = 1
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert stuck[0] == 2 * len(threads)
    run_recorded(kernel("record"), 100, 4)


def test_late_workers_never_see_finished_arguments(kernel):
    """Jobs of three items in quick succession; their arguments die when the call returns."""
    words = [Words(8) for _ in range(3)]
    for turn in range(30_000):
        mine = words[turn % 3]
        mine[0] = LIVE
        pool.run(kernel("check"), mine.address, 3, 4, 0)
        mine[0] = 0
    assert [w[2] for w in words] == [0, 0, 0]
    assert [w[1] for w in words] == [30_000] * 3


def test_returns_only_when_all_is_done(kernel):
    """The worker's item lasts longer than the caller's."""
    for _ in range(30):
        words = Words(16, 0, 100, 50_000)
        pool.run(kernel("meet"), words.address, 2, 2, 0)
        assert [words.of_item(item)[0] for item in range(2)] == [1, 1]


def test_each_job_of_a_slot_has_a_generation_of_its_own(kernel):
    """What makes the claim of a late worker fail, even if the newer job has as many items left."""
    run_recorded(kernel("record"), 5, 2)
    claim = ctypes.c_int64.from_address(pool._workers.control + pool.FIRST_SLOT + pool.CLAIM)
    for _ in range(3):
        before = claim.value
        run_recorded(kernel("record"), 5, 2)
        assert claim.value == before + (1 << 32) and claim.value & 0xFFFFFFFF == 0


def test_workers_take_over_the_float_mode(kernel):
    """Denormals flush on every thread or on none: the result must not depend on who ran an item."""
    assert torch.set_flush_denormal(True) or pytest.skip("this CPU cannot flush denormals")
    try:
        for flush in (True, False, True):
            torch.set_flush_denormal(flush)
            words = Words(16, 0, 100)
            pool.run(kernel("meet"), words.address, 2, 2, 0)
            assert [words.of_item(item)[0] for item in range(2)] == [0 if flush else 1] * 2
    finally:
        torch.set_flush_denormal(False)


def test_workers_take_no_signals(kernel):
    run_recorded(kernel("record"), 10, 2)
    if not Path("/proc/self/task").is_dir():
        pytest.skip("no /proc to read signal masks from")
    interrupt = 1 << (signal.SIGINT - 1)
    assert pool.num_workers() >= 1
    for number in range(1, pool.num_workers() + 1):
        worker = pool._workers.control + pool.FIRST_WORKER + number * pool.WORKER_BYTES
        thread = ctypes.c_int64.from_address(worker + pool.THREAD)
        wait_until(lambda thread=thread: thread.value != 0)
        status = Path(f"/proc/self/task/{thread.value}/status").read_text()
        assert int(re.search(r"SigBlk:\s*(\w+)", status).group(1), 16) & interrupt
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


SOURCE = str(Path(polyflash.__file__).parent)

# A process with the pool and the test kernels, but without torch and numba.
PRELUDE = f"""
import ctypes, os, sys, threading, time, types
for name in ("polyflash", "polyflash.backends", "polyflash.backends.cpu"):
    module = types.ModuleType(name)
    module.__path__ = [{SOURCE!r} + name.replace(".", "/").removeprefix("polyflash")]
    sys.modules[name] = module
sys.modules["polyflash"].__version__ = {polyflash.__version__!r}
from polyflash.backends.cpu import pool, runtime

class Key:
    builder = {Key("").builder!r}
    def __init__(self, name):
        self.name = name

def words(count, *start):
    array = (ctypes.c_int64 * count)(*start)
    return array, ctypes.addressof(array)

def check(times, threads=2):
    array, address = words(8)
    for turn in range(times):
        array[0] = {LIVE}
        pool.run(runtime_check, address, 5, threads, 64)
        array[0] = 0
    assert list(array[1:3]) == [5 * times, 0], list(array)

def crowd(on=True):
    pool._load()
    ctypes.c_int64.from_address(pool._grow(0).control + pool.CAPPED).value = not on

crowd()
runtime_check = runtime.load(Key("check"))
assert "numba" not in sys.modules
"""


def python(code: str, timeout: float = 30) -> str:
    """Runs `code` after the prelude in a new process, which must end by itself, without error or a word."""
    quiet = [
        "-W",
        "ignore::DeprecationWarning",
    ]  # from 3.12 on every fork beside threads warns; here it is tested
    process = subprocess.Popen(
        [sys.executable, *quiet, "-c", PRELUDE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0 and not err, (process.returncode, err)
    return out


def test_callers_alone_start_no_thread():
    python(
        """
        check(3, threads=1)
        array, address = words(8, {live})
        pool.run(runtime_check, address, 1, 16, 64)
        assert pool.num_workers() == 0 and threading.active_count() == 1
        assert not os.path.isdir("/proc/self/task") or len(os.listdir("/proc/self/task")) == 1
        check(3)
        assert pool.num_workers() == 1
    """.replace("{live}", str(LIVE))
    )


def test_threads_racing_for_tiny_items():
    """Long enough for all threads to be there: claims collide thousands of times, and no item runs twice."""
    python("""
        record, items = runtime.load(Key("record")), 100_000
        for _ in range(5):
            array, address = words(8 + 3 * items)
            pool.run(record, address, items, 4, 0)
            assert array[0] == items
            assert set(array[8::3]) == {1}
    """)


def test_workers_beyond_the_number_asked_for_stay_out():
    """Four workers are awake, two threads are asked for: nobody uses scratch that this call does not have."""
    python("""
        record, items = runtime.load(Key("record")), 50_000
        array, address = words(8 + 3 * items)
        for _ in range(5):
            pool.run(record, address, items, 5, 4096)
            pool.run(record, address, items, 2, 4096)
            base = pool._caller.scratch.address
            assert set(array[10::3]) <= {base, base + 4096}
        assert pool.num_workers() == 4
    """)


@pytest.mark.parametrize("callers", [2, 12])
def test_many_python_threads(callers):
    python(f"""
        failed = []
        def caller():
            try:
                check(100, threads=3)
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=caller) for _ in range({callers})]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not failed, failed
    """)


def test_fork_after_use():
    """The child has a pool and scratch of its own, the parent keeps its own; grandchildren too."""
    python("""
        own = runtime.load(Key("own"))
        def marks(mark):
            array, address = words(8, mark, 65536)
            for _ in range(200):
                pool.run(own, address, 8, 2, 65536)
            assert array[2] == 0, "scratch is shared with a relative"
        check(50)
        marks(98 << 32)
        def child(depth):
            pid = os.fork()
            if pid:
                return pid
            try:
                assert pool.num_workers() == 0
                check(50)
                assert pool.num_workers() == 1
                deeper = child(depth - 1) if depth else 0
                marks(depth << 32)
                code = os.waitpid(deeper, 0)[1] if deeper else 0
            except BaseException:
                code = 1
            os._exit(1 if code else 0)
        pid = child(1)
        marks(99 << 32)
        assert os.waitpid(pid, 0)[1] == 0
        check(50)
    """)


def test_fork_while_other_threads_call():
    """Whatever the other threads hold or run at that moment: neither side hangs."""
    python("""
        stop = threading.Event()
        def caller():
            while not stop.is_set():
                check(20, threads=3)
        threads = [threading.Thread(target=caller) for _ in range(2)]
        for thread in threads: thread.start()
        for _ in range(15):
            pid = os.fork()
            if not pid:
                check(20, threads=3)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        stop.set()
        for thread in threads: thread.join()
    """)


def test_fork_while_a_lock_is_held():
    python("""
        runtime.FORK_PATIENCE_S = 0.05
        taken, done = threading.Event(), threading.Event()
        def holder():
            with pool._lock, runtime._lock:
                taken.set()
                done.wait()
        thread = threading.Thread(target=holder)
        thread.start()
        taken.wait()
        pid = os.fork()
        if not pid:
            runtime.load(Key("record"))
            check(20)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        done.set()
        thread.join()
        check(20)
    """)


@pytest.mark.alone
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot confine a process to a core")
def test_one_core_for_two_threads_does_not_stall():
    """As under a quota or with a core gone: a call of 8 items costs at most 2 ms above the caller alone."""
    python("""
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        work = runtime.load(Key("work"))
        array, address = words(8, 60_000)
        crowd(False)
        def median(threads):
            times = []
            for _ in range(40):
                start = time.perf_counter()
                pool.run(work, address, 8, threads, 0)
                times.append(time.perf_counter() - start)
            return sorted(times)[len(times) // 2]
        alone, shared = median(1), median(2)
        assert shared < alone + 0.002, (alone, shared)
    """)


@pytest.mark.alone
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot confine a process to a core")
def test_a_busy_neighbour_on_one_core_does_not_stall():
    """Another process has taken one of two cores: a call of 8 items costs at most 2 ms more than alone."""
    python("""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            sys.exit()
        crowd(False)
        work = runtime.load(Key("work"))
        array, address = words(8, 60_000)
        neighbour = os.fork()
        if not neighbour:
            os.sched_setaffinity(0, {cores[1]})
            end = time.monotonic() + 20
            while time.monotonic() < end:
                pass
            os._exit(0)
        def median(threads):
            times = []
            for _ in range(60):
                start = time.perf_counter()
                pool.run(work, address, 8, threads, 0)
                times.append(time.perf_counter() - start)
            return sorted(times)[len(times) // 2]
        try:
            alone, shared = median(1), median(2)
            assert pool.num_workers() == 1
            assert shared < alone + 0.002, (alone, shared)
        finally:
            os.kill(neighbour, 9)
            os.waitpid(neighbour, 0)
    """)


@pytest.mark.parametrize("ending", ["pass", "sys.exit()", "time.sleep(0.01)"])
def test_exit_with_parked_and_spinning_workers(ending):
    start = time.monotonic()
    python(f"check(10, threads=4)\n{ending}")
    assert time.monotonic() - start < 10


def test_exit_while_a_daemon_thread_is_inside_a_kernel():
    python("""
        hold = runtime.load(Key("hold"))
        array, address = words(8)
        threading.Thread(target=pool.run, args=(hold, address, 4, 3, 1 << 20), daemon=True).start()
        while array[0] < 3:
            time.sleep(0.001)
    """)


def test_threads_that_cannot_start_are_done_without():
    """A limit on processes must not stop a call."""
    python("""
        real = pool._Workers._start
        pool._Workers._start = lambda self, libc, number, entry: number < 2 and real(self, libc, 1, entry)
        check(50, threads=4)
        assert pool.num_workers() == 1
    """)
