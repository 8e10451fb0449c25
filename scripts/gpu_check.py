"""Checks that only a GPU can make, in about a minute: same bits every time, offsets beyond 2³¹ elements, CUDA
graphs, streams, a second device, and a small set under compute-sanitizer.

    python scripts/gpu_check.py                      # every check, in processes that are killed if they hang
    python scripts/gpu_check.py graph streams        # these
    python scripts/gpu_check.py --device cpu --backend torch --quick    # the script itself, on any machine

Prints one line per check: ok, FAIL or skip, and why. Returns 1 if one failed.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import Tensor

import polyflash

KILLED_AFTER = 150.0  # seconds of a check, most of them a compiler's
WORKERS = 4  # checks at a time
REPEATS = 100
TOLERANCE = 1.2e-2  # relative L2 of bfloat16 results against float64
FLOAT32_TOLERANCE = 2e-5
PAST = 1 << 31  # elements


class Skip(Exception):
    """The check has no place here; its text says why."""


class Bench:
    """What the checks run on."""

    def __init__(self, device: str, backend: str, quick: bool) -> None:
        self.device, self.backend, self.quick = device, backend, quick
        self.is_cuda = torch.device(device).type == "cuda"

    def tensors(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        rows: int,
        keys: int,
        dim: int,
        *,
        seed: int = 0,
        device: str = "",
    ) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(device or self.device).manual_seed(seed)
        kind = torch.bfloat16 if self.is_cuda else torch.float32

        def drawn(h: int, n: int) -> Tensor:
            shape = (batch, h, n, dim)
            return torch.randn(shape, generator=generator, device=device or self.device).to(kind)

        return drawn(heads, rows), drawn(kv_heads, keys), drawn(kv_heads, keys)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        return polyflash.attention(q, k, v, causal=causal, backend=self.backend)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """float64 attention of (batch, heads, seqlen, head_dim), heads grouped."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(k.shape[2] - q.shape[2] + 1), -math.inf)
    return scores.softmax(-1) @ v


def near(what: str, found: Tensor, wanted: Tensor) -> None:
    error = float(((found.double() - wanted).norm() / wanted.norm()).detach())
    most = FLOAT32_TOLERANCE if found.dtype == torch.float32 else TOLERANCE
    if not error <= most:
        raise ArithmeticError(f"{what}: relative error {error:.1e}, at most {most:.1e}")


def same(what: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            count = int((a != b).sum())
            raise ArithmeticError(f"{what}: {count} of {a.numel()} elements have other bits")


def right(b: Bench) -> str:
    """Outputs of shapes that fill no tile, and gradients, are those of float64."""
    count = 0
    shapes = [(2, 4, 2, 77, 131, 64), (1, 8, 8, 200, 200, 128), (1, 2, 1, 1, 300, 80)]
    shapes += [] if b.quick else [(1, 4, 4, 129, 513, 256), (1, 4, 2, 300, 300, 96), (3, 2, 2, 64, 1000, 16)]
    for shape in shapes:
        for causal in (False, True):
            q, k, v = (x.requires_grad_() for x in b.tensors(*shape))
            out, wanted = b.attention(q, k, v, causal), exact(q, k, v, causal)
            near(f"{shape} causal={causal}", out, wanted)
            dout = torch.randn_like(out)
            found = torch.autograd.grad(out, (q, k, v), dout)
            for name, x, y in zip(
                "qkv", found, torch.autograd.grad(wanted, (q, k, v), dout.double()), strict=True
            ):
                near(f"d{name} of {shape} causal={causal}", x, y.double())
            count += 1
    return f"{count} calls and their gradients"


def repeatable(b: Bench) -> str:
    """Forward, decode and backward give the same bits every time."""
    n = 5 if b.quick else REPEATS
    sizes = (1, 4, 2, 96, 96, 64) if b.quick else (2, 16, 4, 2048, 2048, 128)
    q, k, v = (x.requires_grad_() for x in b.tensors(*sizes))
    dout = torch.randn_like(q)
    step = b.tensors(2, 16, 4, 1, 333 if b.quick else 30_000, 128)

    def once() -> tuple[Tensor, ...]:
        out = b.attention(q, k, v, True)
        return out, *torch.autograd.grad(out, (q, k, v), dout), b.attention(*step)

    first = once()
    for _ in range(n):
        same(f"of {n} runs", once(), first)
    return f"{n} runs, forward, three gradients and a decode step"


def far(b: Bench) -> str:
    """Elements beyond 2³¹ of q, k, v and of gradients are the ones that are read and written."""
    count = PAST if not b.quick else 1 << 16
    if b.is_cuda:
        free, _ = torch.cuda.mem_get_info(b.device)
        if free < 30 << 30:
            raise Skip(f"{free / 2**30:.0f} GiB free, wants 30")
    dim, rows, keys = 128, 64, 8192 if not b.quick else 64
    heads = count // (keys * dim) + 8
    k, v = (torch.empty(1, heads, keys, dim, device=b.device, dtype=torch.bfloat16) for _ in range(2))
    for x in (k, v):
        x.normal_()
    q = torch.randn(1, heads, rows, dim, device=b.device).bfloat16()
    out = b.attention(q, k, v)
    step = b.attention(q[:, :, :1], k, v)
    for h in (0, heads - 9, heads - 1):  # before and behind the border
        part = slice(h, h + 1)
        near(f"head {h}", out[:, part], exact(q[:, part], k[:, part], v[:, part]))
        near(f"decode, head {h}", step[:, part], exact(q[:, part, :1], k[:, part], v[:, part]))
    del q, k, v, out, step
    q = torch.empty(1, heads, keys, dim, device=b.device, dtype=torch.bfloat16).normal_()
    few = torch.randn(1, heads, rows, dim, device=b.device).bfloat16()
    out = b.attention(q, few, few)
    near("last row of q", out[:, -1:, -rows:], exact(q[:, -1:, -rows:], few[:, -1:], few[:, -1:]))
    return f"{heads * keys * dim / 2**31:.2f} · 2³¹ elements of k, v, q and out"


def far_gradients(b: Bench) -> str:
    """Gradients with elements beyond 2³¹."""
    if b.is_cuda:
        free, _ = torch.cuda.mem_get_info(b.device)
        if free < 60 << 30:
            raise Skip(f"{free / 2**30:.0f} GiB free, wants 60")
    dim, keys = (128, 2048) if not b.quick else (16, 64)
    heads = (PAST if not b.quick else 1 << 13) // (keys * dim) + 4
    q, k, v = (
        torch.empty(1, heads, keys, dim, device=b.device, dtype=torch.bfloat16).normal_().requires_grad_()
        for _ in range(3)
    )
    out = b.attention(q, k, v, True)
    dout = torch.empty_like(out).normal_()
    found = torch.autograd.grad(out, (q, k, v), dout)
    for h in (0, heads - 1):
        one = [x.detach()[:, h : h + 1].double().requires_grad_() for x in (q, k, v)]
        wanted = torch.autograd.grad(exact(*one, True), one, dout[:, h : h + 1].double())
        for name, x, y in zip("qkv", found, wanted, strict=True):
            near(f"d{name} of head {h}", x[:, h : h + 1], y)
    return f"{heads} heads of {keys} × {dim}"


def graph(b: Bench) -> str:
    """A graph captured after one warm-up computes on new contents of its inputs."""
    if not b.is_cuda:
        raise Skip("wants a CUDA device")
    done = []
    for sizes, causal in (((2, 8, 2, 512, 512, 128), True), ((4, 32, 8, 1, 4096, 128), False)):
        q, k, v = b.tensors(*sizes)
        b.attention(q, k, v, causal)
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            out = b.attention(q, k, v, causal)
        for seed in (1, 2):
            for x, y in zip((q, k, v), b.tensors(*sizes, seed=seed), strict=True):
                x.copy_(y)
            recorded.replay()
            torch.cuda.synchronize()
            near(f"replay of {sizes}", out, exact(q, k, v, causal))
            same(f"replay of {sizes} and a call", [out], [b.attention(q, k, v, causal)])
        done.append(f"{sizes[3]} rows")
    return f"{', '.join(done)}; two replays each"


def streams(b: Bench) -> str:
    """Kernels go to the current stream: behind what waits there, not beside it."""
    if not b.is_cuda:
        raise Skip("wants a CUDA device")
    sizes = (2, 8, 8, 1024, 1024, 128)
    q, k, v = b.tensors(*sizes)
    later = b.tensors(*sizes, seed=1)
    b.attention(q, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second: whoever runs beside it reads the old values
        for x, y in zip((q, k, v), later, strict=True):
            x.copy_(y)
        out = b.attention(q, k, v)
    if torch.cuda.current_stream().query() and side.query():
        raise ArithmeticError("the side stream was idle already: the host waited for the call")
    side.synchronize()
    near("behind a copy on the stream", out, exact(*later))
    return "a call behind a slow stream; the host did not wait"


def devices(b: Bench) -> str:
    """Tensors of another device than the current one."""
    if not b.is_cuda or torch.cuda.device_count() < 2:
        raise Skip(f"{torch.cuda.device_count()} devices")
    other = f"cuda:{torch.cuda.device_count() - 1}"
    torch.cuda.set_device(0)
    for name in (other, "cuda:0", other):
        q, k, v = (x.requires_grad_() for x in b.tensors(1, 4, 2, 300, 300, 128, device=name))
        out = b.attention(q, k, v, True)
        near(name, out, exact(q, k, v, True))
        if any(str(x.device) != name for x in (out, *torch.autograd.grad(out.sum(), (q, k, v)))):
            raise ArithmeticError(f"a result left {name}")
    return f"{other} while cuda:0 is current"


def sanitizer(b: Bench) -> str:
    """The check `right` --quick under compute-sanitizer, which sees reads and writes outside of tensors."""
    tool = shutil.which("compute-sanitizer")
    if not b.is_cuda or tool is None:
        raise Skip("no compute-sanitizer" if b.is_cuda else "wants a CUDA device")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "99", "--launch-timeout", "60"]
    command += [
        sys.executable,
        __file__,
        "--inside",
        "--quick",
        "--device",
        b.device,
        "--backend",
        b.backend,
        "right",
    ]
    # torch's allocator hands out pieces of large blocks, in which a read beside a tensor is no error.
    command = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=KILLED_AFTER - 10)
    except subprocess.TimeoutExpired:
        raise Skip(f"not through in {KILLED_AFTER - 10:.0f} s") from None
    if done.returncode:
        lines = [x for x in (done.stdout + done.stderr).splitlines() if "=========" in x or "Error" in x]
        raise ArithmeticError(f"code {done.returncode}: {' '.join(lines[:3])[:300]}")
    return "memcheck saw nothing"


CHECKS: dict[str, Callable[[Bench], str]] = {
    "sanitizer": sanitizer,  # the longest
    "right": right,
    "repeatable": repeatable,
    "graph": graph,
    "streams": streams,
    "devices": devices,
    "far": far,
    "far-gradients": far_gradients,
}


def inside(b: Bench, name: str) -> int:
    """One check in this process: 0 ok, 1 failed, 2 skipped; its line is printed."""
    try:
        print(CHECKS[name](b))
        return 0
    except Skip as reason:
        print(reason)
        return 2
    except Exception as error:  # whatever a kernel raises is the check's answer
        text = str(error).strip().splitlines()
        print(f"{type(error).__name__}: {text[0][:300] if text else ''}")
        return 1


def answer(name: str, options: argparse.Namespace) -> tuple[str, int, str, float]:
    """(check, code as in `inside`, what it said, seconds), from a process of its own."""
    words = ["--inside", "--device", options.device, "--backend", options.backend]
    words += ["--quick"] if options.quick else []
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words, name], capture_output=True, text=True, timeout=KILLED_AFTER
        )
    except subprocess.TimeoutExpired:
        return name, 1, f"hung: no end in {KILLED_AFTER:.0f} s", time.monotonic() - began
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    code = done.returncode if done.returncode in (0, 1, 2) and done.stdout.strip() else 1
    return name, code, lines[-1][:300] if lines else f"code {done.returncode}", time.monotonic() - began


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; all")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--quick", action="store_true", help="small shapes, few repetitions")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.checks) - set(CHECKS)
    if unknown:
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if options.inside:
        return inside(Bench(options.device, options.backend, options.quick), options.checks[0])
    failed = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for done in as_completed(pool.submit(answer, name, options) for name in options.checks or CHECKS):
            name, code, said, seconds = done.result()
            failed += code == 1
            print(f"{('ok', 'FAIL', 'skip')[code]:<5}{name:<15}{seconds:5.1f} s  {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
