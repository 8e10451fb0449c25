"""Launching a kernel: on the tensors' device and its current stream, as cheaply as the Triton at hand allows.

Triton's own way costs about 10 us of host time per launch, most of it to find out what it compiled for. What
that depends on is known here (dtypes and presence are the route's; strides and alignment are the key's), so a
compiled kernel is remembered with its key and started directly.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from polyflash import compilation, target
from polyflash.backends.triton.interpreter import INTERPRET

if TYPE_CHECKING:
    from torch import Tensor

# Versions whose CompiledKernel.run was seen to take these arguments; others launch by kernel[grid].
_DIRECT = tuple(int(x) for x in triton.__version__.split(".")[:2]) in ((3, 6), (3, 9))
_runtime = triton.knobs.runtime
_ALIGNED = 16  # bytes: what Triton compiles for
_KEPT_KERNELS = 256  # per route
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
    """What a call launched and allocated for itself, while it is recorded."""

    __slots__ = ("complete", "scratch", "started")

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.scratch: list[Tensor] = []
        self.complete = True  # no launch went another way


class _Recorder(threading.local):
    log: Log | None = None


_recorder = _Recorder()


@contextlib.contextmanager
def recorded() -> Iterator[Log]:
    """Keeps what this thread launches inside."""
    log = _recorder.log = Log()
    try:
        yield log
    finally:
        _recorder.log = None


def scratch(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Float32 memory for one call's own use, not initialised."""
    made = torch.empty(shape, dtype=torch.float32, device=device)
    if _recorder.log is not None:
        _recorder.log.scratch.append(made)
    return made


class Kernels:
    """The compiled kernels of a route, by what they were compiled for."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Mapping[str, Any],
        key: tuple[Any, ...], device: torch.device,
    ) -> None:  # fmt: skip
        """`grid` has one or three dimensions; `constants` are constexprs and options; `key` tells everything
        that Triton would compile anew for."""
        if 0 in grid:
            return
        if INTERPRET or not _DIRECT or hooked():
            if _recorder.log is not None:
                _recorder.log.complete = False
            with torch.cuda.device(device) if device.type == "cuda" else _nowhere:
                began, known = time.time(), INTERPRET or key in self.found
                compiled = kernel[grid](*arguments, **constants)
            if not known:
                self.found.setdefault(key, None)
                note(kernel, compiled, arguments, constants, device.index or 0, began)
            return
        index = device.index or 0
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self._start(kernel, grid, arguments, constants, key, index)
        else:
            self._start(kernel, grid, arguments, constants, key, index)

    def _start(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Mapping[str, Any],
        key: tuple[Any, ...], index: int,
    ) -> None:  # fmt: skip
        ready = self.found.get(key)
        if ready is None:
            began = time.time()
            compiled = kernel.warmup(*arguments, grid=(1,), **constants)
            note(kernel, compiled, arguments, constants, index, began)
            places = (None,) * (len(kernel.arg_names) - len(arguments))
            if len(self.found) >= _KEPT_KERNELS:
                self.found.clear()
            with _loading:
                run, function = compiled.run, compiled.function
            ready = self.found[key] = (run, function, compiled.packed_metadata, places, compiled)
        run, function, packed, places, compiled = ready
        stream = torch._C._cuda_getCurrentRawStream(index)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)
        if _recorder.log is not None:
            _recorder.log.started.append(Started(compiled, (x, y, z), arguments))
        run(x, y, z, stream, function, packed, None, None, None, *arguments, *places)


def note(
    kernel: Any, compiled: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any], index: int,
    began: float,
) -> None:  # fmt: skip
    """Says what Triton compiled since `began`; of what its cache had, the files are older."""
    newest = 0.0
    for path in (getattr(compiled, "metadata_group", None) or {}).values():
        with contextlib.suppress(OSError):
            newest = max(newest, os.stat(path).st_mtime)
    if newest + _CLOCK_S >= began:
        name = described(kernel, arguments, constants)
        compilation.note(name, target.detect("cuda", index).name, time.time() - began)


def described(kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> str:
    """A compiled kernel in a few words: attend bf16 d128 causal."""
    first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
    words = [getattr(kernel, "__name__", "kernel"), str(getattr(first, "dtype", "")).removeprefix("torch.")]
    words += [f"d{constants[name]}" for name in ("D", "DV") if name in constants][:1]
    words += [word for flag, word in _WORDS.items() if constants.get(flag)]
    return " ".join(words)


class _Nowhere:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_nowhere = _Nowhere()


def hooked() -> bool:
    """Does a profiler wait for launches? A chain of hooks is true even if it is empty."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def aligned(*tensors: Tensor | None) -> int:
    """Which of the tensors start at a multiple of 16 bytes, as bits."""
    bits = 0
    for x in tensors:
        bits = 2 * bits + (x is not None and x.data_ptr() % _ALIGNED == 0)
    return bits


def kind(n: int) -> tuple[bool, bool, bool]:
    """What of an int Triton compiles for: 1, a multiple of 16, more than 32 bits."""
    return n == 1, n % _ALIGNED == 0, not -(2**31) <= n < 2**31


def signature(x: Any) -> Any:
    """What Triton compiles operands for: presence, kinds of strides, dtype and alignment of tensors."""
    if x is None:
        return x
    if isinstance(x, int):
        return kind(x)
    if isinstance(x, tuple):
        return tuple(map(signature, x))
    return x.dtype, x.data_ptr() % _ALIGNED == 0
