"""CPU quotas and affinity masks: how many threads a call gets, and that none of its calls stands still."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import polyflash
from polyflash.backends.cpu import cores, pool
from tests.backends.cpu.test_pool import Words, cache, kernel, python
from tests.rows_here import needs_cpu_engine

__all__ = ["cache", "kernel"]

pytest.importorskip("numba")


class Tree:
    """A made-up /proc/self and the mounted control groups that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups: list[str] = []
        self.mounts = ["21 1 0:20 / /proc rw - proc proc rw", "22 1 0:21 / / rw - ext4 /dev/vda rw,cpu"]

    def mount(self, name: str, kind: str, options: str = "rw", root: str = "/") -> Path:
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        escaped = str(place).replace(" ", r"\040")
        self.mounts.append(f"31 22 0:26 {root} {escaped} rw,nosuid shared:9 - {kind} {kind} {options}")
        return place

    def limit(self, place: Path, text: str) -> None:
        """ "quota period" in microseconds, as the version of the mount spells it."""
        place.mkdir(parents=True, exist_ok=True)
        if "v2" in str(place):
            (place / "cpu.max").write_text(text + "\n")
            return
        for name, value in zip(("quota", "period"), text.replace("max", "-1").split(), strict=True):
            (place / f"cpu.cfs_{name}_us").write_text(value + "\n")

    def quota(self) -> float | None:
        proc = self.folder / "proc"
        proc.mkdir(exist_ok=True)
        (proc / "cgroup").write_text("\n".join(self.groups) + "\n")
        (proc / "mountinfo").write_text("\n".join(self.mounts) + "\n")
        return cores.quota(str(proc))


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@pytest.mark.parametrize("text, found", [("150000 100000", 1.5), ("max 100000", None), ("50000 100000", 0.5)])
def test_version_2(tree, text, found):
    tree.groups = ["0::/a/b"]
    tree.limit(tree.mount("v2", "cgroup2") / "a" / "b", text)
    assert tree.quota() == found


def test_the_least_of_all_groups_above_counts(tree):
    tree.groups = ["0::/a/b/c"]
    top = tree.mount("v2", "cgroup2")
    tree.limit(top / "a", "200000 100000")
    tree.limit(top / "a/b", "900000 100000")
    tree.limit(top / "a/b/c", "max 100000")
    tree.limit(top / "other", "1000 100000")
    assert tree.quota() == 2.0
    tree.limit(top, "100000 100000")
    assert tree.quota() == 1.0


def test_version_1_and_both_at_once(tree):
    tree.groups = ["4:memory:/m", "3:cpuacct,cpu:/job", "2:cpuset:/s", "0::/unified"]
    cpu = tree.mount("v1 cpu", "cgroup", "rw,cpuacct,cpu")
    tree.limit(tree.mount("v1 cpuset", "cgroup", "rw,cpuset") / "s", "10000 100000")
    tree.limit(cpu / "job", "250000 100000")
    tree.mount("v2", "cgroup2")
    assert tree.quota() == 2.5
    tree.limit(cpu / "job", "max 100000")
    assert tree.quota() is None


def test_a_container_sees_its_own_group_at_the_top_of_the_mount(tree):
    tree.groups = ["0::/docker/abc/inner"]
    top = tree.mount("v2", "cgroup2", root="/docker/abc")
    tree.limit(top / "inner", "300000 100000")
    tree.limit(top, "400000 100000")
    assert tree.quota() == 3.0
    tree.groups = ["0::/docker/abcd"]  # a neighbour whose name begins alike
    tree.limit(top / "d", "100 100000")
    assert tree.quota() == 4.0
    tree.groups = [
        "0::/../elsewhere"
    ]  # a group outside the namespace: the mount's own limit is what is known
    assert tree.quota() == 4.0


@pytest.mark.parametrize("text", ["", "nonsense", "0 0", "100000 0", "-1 100000", "1 2 3", "\x00 1"])
def test_nonsense_is_no_limit(tree, text):
    """S24: what a broken container shows there must not stop a call."""
    tree.groups = ["0::/"]
    top = tree.mount("v2", "cgroup2")
    (top / "cpu.max").write_text(text)
    assert tree.quota() is None
    assert cores.quota("/nowhere") is None
    tree.groups = ["neither", "", "::"]
    tree.mounts = ["", "1 2 3 - cgroup2", "-", "x - "]
    assert tree.quota() is None


def test_a_quota_is_rounded_down(monkeypatch):
    """Above its quota a process stands still for tens of milliseconds; 1.5 cores are one thread."""
    for quota, threads in ((0.3, 1), (1.0, 1), (1.99, 1), (2.0, 2), (7.5, 7), (None, cores.UNLIMITED)):
        monkeypatch.setattr(cores, "quota", lambda quota=quota: quota)
        cores.quota_threads.cache_clear()
        assert cores.quota_threads() == threads
    cores.quota_threads.cache_clear()


@pytest.fixture
def own_workers(monkeypatch):
    monkeypatch.setattr(pool, "_openmp", lambda: (0, 0))
    pool._caller.team = None
    yield
    pool._caller.team = None


def participants(record: int, threads: int) -> int:
    """Threads that took part in a job of 64 items."""
    seen = Words(8 + 3 * 64)
    pool.run(record, seen.address, 64, threads, 64)
    return len({seen.of_item(item)[2] for item in range(64)})


def test_quota_and_mask_bound_the_threads_of_a_call(kernel, own_workers, monkeypatch):
    """Under a quota of one core nobody is woken and no thread is started."""
    pool._load()
    monkeypatch.setattr(pool, "_most", 1)
    before = pool.num_workers()
    for _ in range(50):
        assert participants(kernel("record"), 4) == 1
    assert pool.num_workers() == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_the_mask_of_the_moment_counts():
    """Confined to one core, a call stays on its caller; freed again, the worker is back."""
    python("""
        if len(os.sched_getaffinity(0)) < 2:
            sys.exit()
        crowd(False)
        whole = os.sched_getaffinity(0)
        record = runtime.load(Key("record"))
        def scratches(items=20_000):
            array, address = words(8 + 3 * items)
            pool.run(record, address, items, 2, 64)
            assert set(array[8::3]) == {1}
            return len(set(array[10::3]))
        for turn in range(3):
            os.sched_setaffinity(0, whole)
            assert max(scratches() for _ in range(50)) == 2
            os.sched_setaffinity(0, {max(whole)})
            assert {scratches() for _ in range(50)} == {1}
    """)


@contextlib.contextmanager
def quota_of_one_core() -> Iterator[Path]:
    """A control group of 100 ms per 100 ms, where this process may make one."""
    top = Path("/sys/fs/cgroup/cpu")
    group = top / f"polyflash_test_{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"cannot make a control group: {error}")
    try:
        yield group
    finally:
        group.rmdir()


@pytest.mark.alone
@needs_cpu_engine
def test_a_real_quota_of_one_core_never_stops_a_call():
    """Two torch threads, two cores, a quota of one: the group is throttled at most in passing."""
    script = """
        import sys, time, torch, polyflash
        from pathlib import Path
        from polyflash.backends.cpu import pool
        group = Path(sys.argv[1])
        (group / "cgroup.procs").write_text("0")
        torch.set_num_threads(2)
        q = torch.randn(1, 8, 256, 64)
        polyflash.attention(q, q, q)
        if sys.argv[2] == "without":
            pool._most = 2
        time.sleep(0.2)
        def throttled():
            lines = (group / "cpu.stat").read_text().splitlines()
            return int(dict(line.split() for line in lines)["nr_throttled"])
        before, end = throttled(), time.perf_counter() + 1.2
        while time.perf_counter() < end:
            polyflash.attention(q, q, q)
        print(throttled() - before)
    """
    if cores.allowed() < 2:
        pytest.skip("needs two cores")
    environment = {**os.environ, "PYTHONPATH": str(Path(polyflash.__file__).parents[1])}

    def periods(how: str) -> int:
        with quota_of_one_core() as group:
            command = [sys.executable, "-c", textwrap.dedent(script), str(group), how]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert any(periods("with") <= 2 for _ in range(2))
    if all(periods("without") <= 2 for _ in range(3)):
        pytest.skip("this machine is too busy for two threads to use up a quota of one core")


def test_report_of_the_limits():
    assert cores.quota() is None or cores.quota() > 0
    assert 1 <= cores.allowed() <= cores.present()
    assert torch.get_num_threads() >= 1
