"""Launching a kernel: on the tensors' device and its current stream, as cheaply as the Triton at hand allows.

Triton's own way costs about 10 us of host time per launch, most of it to find out what it compiled for. What
that depends on is known here (dtypes and presence are the route's; strides and alignment are the key's), so a
compiled kernel is remembered with its key and started directly.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from polyflash import compilation, target
from polyflash.backends.triton.interpreter import INTERPRET

if TYPE_CHECKING:
    from torch import Tensor

# Versions whose CompiledKernel.run was seen to take these arguments; others launch by compiled[grid].
_DIRECT = tuple(int(x) for x in triton.__version__.split(".")[:2]) in ((3, 6), (3, 9))
_runtime = triton.knobs.runtime
_ALIGNED = 16  # bytes: what Triton compiles for
_ROWS = ("q", "k", "v", "out", "dout")  # of which rows of channels are loaded
_ANY_INT = 3  # neither 1 nor a multiple of 16
_KEPT_KERNELS = 256  # per route
_KEPT_STREAMS = 64
_CLOCK_S = 0.02  # by as much a file may look older than it is
_WORDS = {"HAS_RIGHT": "causal", "HAS_LEFT": "window", "SOFTCAP": "softcap", "DROPOUT": "dropout"}
# Triton loads a kernel where its launcher is asked for first, and sets the launcher before it has the
# function: to another thread the function is None meanwhile.
_loading = threading.Lock()


class Started(NamedTuple):
    """A kernel that was started, where, and with which arguments."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class Log:
    """Launches and allocations of a call while it is recorded."""

    __slots__ = ("complete", "scratch", "started", "words", "zeros")

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.scratch: list[Tensor] = []
        self.zeros: set[int] = set()  # places among them of what is 0 at first
        self.words: Tensor | None = None
        self.complete = True  # no launch went another way


class _Recorder(threading.local):
    log: Log | None = None


_recorder = _Recorder()
words_of: dict[tuple[int, int], Tensor] = {}  # by device and stream


def recording() -> bool:
    """Does this thread keep what it launches?"""
    return _recorder.log is not None


@contextlib.contextmanager
def recorded() -> Iterator[Log]:
    """Keeps what this thread launches inside."""
    log = _recorder.log = Log()
    try:
        yield log
    finally:
        _recorder.log = None


def scratch(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32, zero: bool = False
) -> Tensor:
    """Memory for one call's own use, not initialised unless it is to be `zero`."""
    made = (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device)
    log = _recorder.log
    if log is not None:
        if zero:
            log.zeros.add(len(log.scratch))
        log.scratch.append(made)
    return made


def words(device: torch.device) -> Tensor:
    """Four int32 of the current stream, whose calls follow one another: 0, and kernels leave them so. A call
    that is captured has its own, as its graph may run beside anything."""
    if device.type != "cuda":
        made = torch.zeros(4, dtype=torch.int32, device=device)
    else:
        index = device.index or 0
        key = index, torch._C._cuda_getCurrentRawStream(index)
        made = words_of.get(key)  # type: ignore[assignment]
        if torch._C._cuda_isCurrentStreamCapturing():
            made = torch.zeros(4, dtype=torch.int32, device=device)
        elif made is None:
            if len(words_of) >= _KEPT_STREAMS:
                words_of.clear()  # goes to later allocations of its stream alone
            made = words_of[key] = torch.zeros(4, dtype=torch.int32, device=device)
    if _recorder.log is not None:
        _recorder.log.words = made
    return made


class Kernels:
    """The compiled kernels of a route, by what they were compiled for."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: Any, options: Any, key: Any, device: torch.device
    ) -> None:
        """`grid` has one or three dimensions; `arguments` are t, n, c (by `compiled_in`) and others; `key`
        tells everything of them that Triton would compile anew for."""
        if 0 in grid:
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)
        if INTERPRET:
            if _recorder.log is not None:
                _recorder.log.complete = False
            t, n, c, *others = arguments
            kernel[x, y, z](t, n, spaced(c, t), *others)
            return
        index = device.index or 0
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self._start(kernel, (x, y, z), arguments, options, key, index)
        else:
            self._start(kernel, (x, y, z), arguments, options, key, index)

    def _start(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Any, options: Any, key: Any, index: int
    ) -> None:
        ready = self.found.get(key)
        if ready is None:
            began = time.time()
            compiled = compile(kernel, arguments, options)
            note(kernel, compiled, arguments, index, began)
            if len(self.found) >= _KEPT_KERNELS:
                self.found.clear()
            with _loading:
                run, function = compiled.run, compiled.function
            ready = self.found[key] = (run, function, compiled.packed_metadata, compiled)
        run, function, packed, compiled = ready
        if _DIRECT:
            t, n, _, *others = arguments
            arguments = (*t, *n, *others)
        if not _DIRECT or hooked():
            if _recorder.log is not None:
                _recorder.log.complete = False
            compiled[grid](*arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        if _recorder.log is not None:
            _recorder.log.started.append(Started(compiled, grid, arguments))
        run(*grid, stream, function, packed, None, None, None, *arguments)


def compiled_in(c: Any) -> Any:
    """The leaves of a tuple as constants of a kernel."""
    return type(c)(*map(tl.constexpr, c))


def unknown(n: Any) -> Any:
    """Numbers of which Triton, which looks at those in tuples, learns nothing but their types."""
    return type(n)(*(_ANY_INT if type(x) is int else x for x in n))


def compile(kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """The kernel for `t` and `c`, and any numbers. Triton 3.6 forgets the constants of a tuple in a tuple
    where a branch or loop ends, unless a constant of the outer one follows: hence a None at their ends."""
    t, n, c, *others = arguments
    c = spaced(c, t)._replace(LAYOUT=tl.constexpr(zlib.crc32(repr(_names((t, n, c))).encode())))
    compiled = kernel.warmup(t, unknown(n), c, *others, grid=(1,), **options)
    if _DIRECT:
        with _loading:
            _spread(compiled.src.signature, t, n)
    return compiled


def spaced(c: Any, t: Any) -> Any:
    """The constants `c` of a kernel that has any use for it with the elements, ALIGNED, that divide all
    distances between rows of `t`; 1 where 16 divide those of some tensor, which Triton sees by itself, and
    which a hint would hide."""
    if not hasattr(c, "ALIGNED"):
        return c
    names = "kv" if c.K_CODES.value else _ROWS if getattr(t, "dout", None) is not None else "qkv"
    views = [x for name in names if (x := getattr(t, name, None)) is not None]
    sizes = [math.gcd(_ALIGNED, x.b, x.h, x.s) for x in views]
    return c._replace(ALIGNED=tl.constexpr(1 if _ALIGNED in sizes else math.gcd(0, *sizes) or 1))


def _names(x: Any) -> Any:
    """The fields of tuples: kernels in Triton's cache know them by their places alone."""
    return [getattr(x, "_fields", ()), *map(_names, x)] if isinstance(x, tuple) else None


def _spread(signature: dict[str, Any], t: Any, n: Any) -> None:
    """Has the launcher, which Triton makes of the signature, take the fields of t and n one by one, and not
    c: it is slow to look into tuples."""
    if "t" in signature:
        kinds = dict(signature)
        signature.clear()
        signature.update(zip(t._fields, kinds.pop("t"), strict=True))
        signature.update(zip(n._fields, kinds.pop("n"), strict=True))
        del kinds["c"]
        signature.update(kinds)


def note(kernel: Any, compiled: Any, arguments: tuple[Any, ...], index: int, began: float) -> None:
    """Says what Triton compiled since `began`; of what its cache had, the files are older."""
    newest = 0.0
    for path in (getattr(compiled, "metadata_group", None) or {}).values():
        with contextlib.suppress(OSError):
            newest = max(newest, os.stat(path).st_mtime)
    if newest + _CLOCK_S >= began:
        name = described(kernel, arguments)
        compilation.note(name, target.detect("cuda", index).name, time.time() - began)


def described(kernel: Any, arguments: tuple[Any, ...]) -> str:
    """A compiled kernel in a few words: attend bf16 d128 causal."""
    t, _, c, *others = arguments
    first = t[0][0] if isinstance(t[0], tuple) else t[0]
    first = getattr(others[0], "base", first) if others else first
    words = [getattr(kernel, "__name__", "kernel"), str(getattr(first, "dtype", "")).removeprefix("torch.")]
    words.append(f"d{getattr(c, 'CHANNELS', c.D).value or c.DV.value}")
    words += [word for flag, word in _WORDS.items() if getattr(getattr(c, flag, None), "value", False)]
    return " ".join(words)


def hooked() -> bool:
    """Does a profiler wait for launches? A chain of hooks is true even if it is empty."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def aligned(*tensors: Tensor | None) -> int:
    """Bits that tell which tensors start at a multiple of 16 bytes."""
    bits = 0
    for x in tensors:
        bits = 2 * bits + (x is not None and x.data_ptr() % _ALIGNED == 0)
    return bits


def kind(n: int) -> tuple[bool, int, bool]:
    """Properties of an int that is compiled for: 1, the largest power of two up to 16 that divides it, more
    than 32 bits."""
    return n == 1, (n | _ALIGNED) & -(n | _ALIGNED), not -(2**31) <= n < 2**31


def signature(x: Any) -> Any:
    """Properties of operands that Triton compiles for: presence, kinds of strides, dtype and alignment."""
    if x is None:
        return x
    if isinstance(x, int):
        return kind(x)
    if isinstance(x, tuple):
        return tuple(map(signature, x))
    return x.dtype, x.data_ptr() % _ALIGNED == 0
