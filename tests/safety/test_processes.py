"""The library in processes that fork, are interrupted, end, run threads or `python -OO`: right, and no hang.

Each test is a process of its own with a time limit, so that a hang is a failure. The pool by itself, without
torch, is in backends/cpu/test_pool.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import polyflash
from tests import processes
from tests.chosen import chosen

PRELUDE = """
import os, signal, sys, threading, time
import torch, polyflash
from polyflash.reference import attention_reference
torch.manual_seed(0)
torch.set_num_threads(2)
q, k, v = torch.randn(3, 2, 4, 100, 32)
want = attention_reference(q, k, v, causal=True).out
def right(result=None):
    got = polyflash.attention(q, k, v, causal=True) if result is None else result
    return bool((got.double() - want).abs().max() < 1e-5)
assert right()
"""


def process(
    code: str,
    *options: str,
    timeout: float = 120,
    stderr: str = "",
    prelude: str = PRELUDE,
    torch_may_abort: bool = False,
    imported: bool = True,
) -> str:
    """Runs `code` in a new process, which must end by itself with exit code 0; returns what it printed. Not
    `imported`: in an interpreter that has not imported torch."""
    environment = {**os.environ, "PYTHONPATH": str(Path(polyflash.__file__).parents[1])}
    command = [*options, "-c", prelude + textwrap.dedent(code)]
    if imported:
        done = processes.begun(command, timeout=timeout, env=environment)
    else:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=timeout, env=environment
        )
    if torch_may_abort and done.stderr == "terminate called without an active exception\n":
        return done.stdout
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert stderr in done.stderr and ("Traceback" in done.stderr) is ("Traceback" in stderr), done.stderr
    return done.stdout


def test_concurrent_callers_and_nested_pools():
    """B-cpu-01, B-cpu-02: two threads of 100 calls each, with torch operations between; a pool of Python
    threads; a backward thread of autograd that calls attention; all at once and all right."""
    process("""
        from concurrent.futures import ThreadPoolExecutor
        failed = []
        def caller(threads):
            for turn in range(100):
                if turn % 10 == 0:
                    torch.randn(300, 300) @ torch.randn(300, 300)
                    torch.set_num_threads(1 + (turn // 10 + threads) % 3)
                if not right():
                    failed.append(turn)
        class Nested(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()
            @staticmethod
            def backward(ctx, g):
                return g if right() else g * float("nan")
        threads = [threading.Thread(target=caller, args=(n,)) for n in (0, 1)]
        for thread in threads: thread.start()
        x = torch.ones(3, requires_grad=True)
        for _ in range(10):
            Nested.apply(x).sum().backward()
        with ThreadPoolExecutor(4) as executor:
            assert all(executor.map(lambda _: right(), range(40)))
        for thread in threads: thread.join()
        assert not failed and bool(x.grad.isfinite().all())
    """)


def test_bits_do_not_depend_on_what_else_runs():
    """B-cpu-02, P18: alone, beside another caller and with other thread counts: the same bits."""
    process("""
        first = polyflash.attention(q, k, v, causal=True)
        stop = threading.Event()
        def noise():
            while not stop.is_set():
                polyflash.attention(k, v, q)
        thread = threading.Thread(target=noise)
        thread.start()
        for turn in range(60):
            torch.set_num_threads(1 + turn % 4)
            assert torch.equal(polyflash.attention(q, k, v, causal=True), first), turn
        stop.set()
        thread.join()
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_after_first_use():
    """DF24's like: children of a process that has a pool, and worker processes of a DataLoader."""
    process("""
        import warnings
        warnings.simplefilter("ignore")
        torch.randn(1 << 18).exp_()  # torch's own team is awake
        for _ in range(4):
            child = os.fork()
            if not child:
                os._exit(0 if all(right() for _ in range(20)) else 1)
            assert right()
            assert os.waitpid(child, 0)[1] == 0
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return float(right())
        loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
        assert sum(float(batch.sum()) for batch in loader) == 8
        assert right()
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_runs_torch_where_only_we_used_openmp():
    """The parent's first team of threads is one that a call of ours made; its child's operators need one."""
    process(
        """
        import os, sys, threading
        import torch, polyflash
        torch.set_num_threads(2)
        x = torch.ones(1, 4, 128, 32)  # so small that torch's own operators use one thread
        def works():
            return bool(((polyflash.attention(x, x, x, causal=True) - 1).abs() < 1e-5).all())
        def forked():
            assert works()
            child = os.fork()
            if not child:
                total = torch.ones(1 << 21).exp_().sum() + (torch.ones(400, 400) @ torch.ones(400, 400)).sum()
                os._exit(0 if bool(total.isfinite()) and works() else 1)
            assert os.waitpid(child, 0)[1] == 0
        for _ in range(3):
            forked()
        thread = threading.Thread(target=forked)
        thread.start()
        thread.join()
        forked()
        assert bool(torch.ones(1 << 21).exp_().isfinite().all()) and works()
        """,
        prelude="",
        timeout=60,
    )


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
def test_signals_during_calls():
    """A handler that runs thousands of times (EINTR in every wait), then SIGINT: KeyboardInterrupt, once."""
    out = process("""
        ticks = []
        signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        big = torch.randn(1, 8, 600, 64)
        expected = attention_reference(big, big, big).out
        for _ in range(60):
            got = polyflash.attention(big, big, big)
            assert bool((got.double() - expected).abs().max() < 1e-5) and right()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert len(ticks) > 20, len(ticks)
        caught = 0
        for _ in range(8):
            try:
                threading.Timer(0.002, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                for _ in range(2000):
                    polyflash.attention(big, big, big)
            except KeyboardInterrupt:
                caught += 1
            assert right()
        print(caught)
    """)
    assert out == "8\n"


def test_optimised_python_validates_all_the_same():
    """PYTHONOPTIMIZE=2 drops assert and docstrings; no check may be one and no text may need one."""
    out = process(
        """
        if not right():
            raise SystemExit("wrong")
        bad = [
            lambda: polyflash.attention(q, k[:, :3], v),
            lambda: polyflash.attention(q, k, v, kv_lens=torch.tensor([100, 101], dtype=torch.int32)),
            lambda: polyflash.attention(q, k, v, mask=torch.ones(99, dtype=torch.bool)),
            lambda: polyflash.attention(q, k, v, window=(-1, 0)),
            lambda: polyflash.attention(q, k, v, backend="none"),
        ]
        for call in bad:
            try:
                call()
                print("accepted")
            except polyflash.SpecError as error:
                print("wanted" in str(error))
        from polyflash import cli
        print(cli.main(["explain", "--quiet"]), cli.main(["cache", "path"]))
        """,
        "-OO",
        imported=False,
    )
    lines = out.splitlines()
    assert lines[:5] == ["True"] * 5 and lines[-1] == "0 0"


@pytest.mark.parametrize("ending", chosen(["pass", "os._exit(0)"], "os._exit(0)"))
def test_interpreter_shutdown(ending):
    """With a live graph, a call in `atexit`, a call in a finaliser, and a daemon thread in mid-call.

    Python before 3.14 ends daemon threads where they ask for the GIL; within an operation of torch, which is
    C++, that aborts, with torch alone too."""
    process(
        f"""
        import atexit
        x = q.clone().requires_grad_()
        graph = polyflash.attention(x, k, v, causal=True)
        class Late:
            def __del__(self, attention=polyflash.attention):
                attention(q, k, v)
        late = Late()
        atexit.register(lambda: right() or os._exit(7))
        def endless():
            while True:
                polyflash.attention(q, k, v)
        threading.Thread(target=endless, daemon=True).start()
        time.sleep(0.05)
        {ending}
    """,
        torch_may_abort=True,
        imported=False,
    )


def test_first_import_and_first_call_in_a_thread():
    process(
        """
        import threading
        failed = []
        def first():
            try:
                import torch, polyflash
                q = torch.randn(1, 2, 9, 8)
                out = polyflash.attention(q, q, q)
                assert out.shape == q.shape
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=first) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not failed, failed
        """,
        prelude="",
        imported=False,
    )


def test_long_runs_keep_no_memory():
    """B-cch-03, B-cch-06: 1000 calls of 50 lengths compile no more than a few kernels and keep no entries."""
    process("""
        import resource
        from polyflash import torch_ops
        from polyflash.backends.cpu import runtime
        def call(length):
            x = torch.randn(1, 2, length, 16)
            polyflash.attention(x, x, x, causal=True, scale=0.1 + 0.001 * (length % 7))
        for length in range(1, 300, 6):
            call(length)
        kernels, before = len(runtime._addresses), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert kernels <= 8, sorted(key.name for key in runtime._addresses)
        for turn in range(1000):
            call(1 + 6 * (turn % 50))
        assert len(runtime._addresses) == kernels
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 16 << 10, grown
    """)
