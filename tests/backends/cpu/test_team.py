"""Lending a call to torch's OpenMP team while its threads spin, and only then."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import polyflash
from polyflash.backends.cpu import pool, runtime
from tests.backends.cpu.test_pool import Key, Words, cache, run_recorded
from tests.rows_here import needs_cpu_engine

__all__ = ["cache"]

pytest.importorskip("numba")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="thread CPU clocks are Linux's"),
    pytest.mark.skipif(not pool._openmp()[0], reason="torch's OpenMP library is not libgomp"),
]


@pytest.fixture(autouse=True)
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    pool._caller.team = None
    yield
    torch.set_num_threads(threads)
    pool._caller.team = None


def make_team_spin() -> None:
    torch.randn(1 << 16).exp_()


def role_of(words_of_call) -> int:
    """The first word of the block of the last call: MEMBER if it was lent, TEAM if not."""
    return ctypes.c_int64.from_address(words_of_call).value


def last_role(items: int, threads: int, scratch_bytes: int = 100) -> int:
    stride = (scratch_bytes + pool.PAGE - 1) & -pool.PAGE
    return role_of(pool._caller.scratch.address + stride * min(items, threads))


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_a_spinning_team_gets_the_items_and_each_runs_once():
    kernel, lent = runtime.load(Key("record")), 0
    end = time.monotonic() + 20  # on a busy machine the team is seldom on a core at the right moment
    while lent < 10 and time.monotonic() < end:
        make_team_spin()
        run_recorded(kernel, 9, 2)
        lent += last_role(9, 2) == pool.ROLE_MEMBER
    assert lent > 0
    for _ in range(20):  # a lent call leaves the team spinning for the next one
        run_recorded(kernel, 1000, 2)


def test_a_sleeping_team_is_left_alone():
    kernel = runtime.load(Key("record"))
    run_recorded(kernel, 9, 2)
    time.sleep(0.05)
    run_recorded(kernel, 9, 2)
    assert last_role(9, 2) == pool.ROLE_TEAM


def test_without_waking_a_sleeping_team_means_the_caller_alone():
    kernel = runtime.load(Key("record"))
    run_recorded(kernel, 9, 2)
    time.sleep(0.05)
    words = Words(8 + 27)
    pool.run(kernel, words.address, 9, 2, 100, False)
    assert [words.of_item(item)[1] for item in range(9)] == list(range(9))
    assert len({words.of_item(item)[2] for item in range(9)}) == 1


def test_a_dead_team_is_not_waited_for():
    kernel = runtime.load(Key("record"))
    run_recorded(kernel, 9, 2)
    team = pool._caller.team
    nobody = (~(2**22 - 1) << 3) | pool._THREAD_CPU_CLOCK
    ctypes.c_int64.from_address(team.clocks).value = nobody
    make_team_spin()
    run_recorded(kernel, 9, 2)
    assert last_role(9, 2) == pool.ROLE_TEAM


def test_thread_count_of_torch_is_followed():
    kernel = runtime.load(Key("record"))
    for threads in (2, 3, 2, 4):
        torch.set_num_threads(threads)
        make_team_spin()
        run_recorded(kernel, 50, threads)
        assert pool._caller.team.size == threads


def test_every_python_thread_has_its_own_team():
    kernel, errors = runtime.load(Key("record")), []

    def work() -> None:
        try:
            for _ in range(50):
                make_team_spin()
                run_recorded(kernel, 20, 2)
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_members_take_the_callers_float_mode_and_give_back_their_own():
    """`meet` makes 1 of a denormal, or 0 where it is flushed; both items see the caller's mode."""
    kernel = runtime.load(Key("meet"))
    for flush, expected in ((True, 0), (False, 1)):
        torch.set_flush_denormal(flush)
        try:
            make_team_spin()
            words = Words(32, 0, 100, 0)
            pool.run(kernel, words.address, 2, 2, 0)
        finally:
            torch.set_flush_denormal(False)
        assert [words.of_item(item)[0] for item in range(2)] == [expected] * 2


@needs_cpu_engine
def test_a_forked_child_never_calls_the_team():
    """libgomp hangs in a child whose parent used it."""
    script = """
        import os, torch, polyflash
        from polyflash.backends.cpu import pool
        torch.set_num_threads(2)
        q = torch.randn(1, 8, 256, 64)
        want = polyflash.attention(q, q, q)
        torch.randn(1 << 16).exp_()
        want = polyflash.attention(q, q, q)
        child = os.fork()
        if child == 0:
            same = (polyflash.attention(q, q, q).numpy() == want.numpy()).all()  # torch itself would hang
            os._exit(0 if same and pool._caller.team.num_clocks == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        print("done")
    """
    environment = dict(os.environ, PYTHONPATH=str(Path(polyflash.__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.stdout == "done\n", done.stderr


def test_bits_do_not_depend_on_who_ran_the_items():
    q = torch.randn(1, 8, 512, 64)
    alone = polyflash.attention(q, q, q, causal=True)
    make_team_spin()
    lent = polyflash.attention(q, q, q, causal=True)
    time.sleep(0.05)
    own = polyflash.attention(q, q, q, causal=True)
    assert torch.equal(alone, lent) and torch.equal(lent, own)
