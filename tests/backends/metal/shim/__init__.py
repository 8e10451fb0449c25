"""Metal without a Mac: text of kernels compiled by a C++ compiler and run on the CPU, threads as fibers.

`library(source)` is what `torch.mps.compile_shader(source)` would be: its attributes are kernels, called with
CPU tensors, numbers, `threads` and `group_size`. `install()` puts it in the place of torch's, and gives the
Metal rows CPU tensors. What it does not show: what Apple's compiler accepts, and how fast anything is.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off")
# With their warnings: a function that the shim has for integers alone must take no float.
COMPILERS = {"clang++": ("-Wno-everything", "-Werror=float-conversion"), "g++": ("-w",)}
ATTRIBUTE = re.compile(r"\s*\[\[(\w+)(?:\((\d+)\))?\]\]")
KERNEL = re.compile(r"^kernel void (\w+)\((.*?)\)\s\{$", re.MULTILINE | re.DOTALL)
SWITCH = re.compile(r"^constant constexpr bool (\w+) = (true|false);$", re.MULTILINE)
BARRIER = re.compile(r"\b(simdgroup|threadgroup)_barrier\(mem_flags::mem_threadgroup\)")
BUILT_IN = {
    "threadgroup_position_in_grid": "uint3{x, y, z}",
    "simdgroup_index_in_threadgroup": "ushort(shim::simdgroup())",
    "thread_index_in_simdgroup": "ushort(shim::lane())",
    "thread_index_in_threadgroup": "uint(shim::current)",
    "thread_position_in_grid": "uint3{x * threads + shim::current, y, z}",
}
LANES = 32
WRONG = {1: "threads wait for each other for ever", 2: "lanes of a simdgroup meet for different things"}


@cache
def compiler() -> str:
    """A C++ compiler, "" if there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), "")


def barriers(source: str) -> int:
    """How many barriers a text has."""
    return len(BARRIER.findall(source))


def translated(source: str) -> tuple[str, dict[str, bool]]:
    """The text in C++, and its switches: constants that decide no type and no size are variables there, so
    that texts that differ in them alone are compiled once."""
    switches = {name: value == "true" for name, value in SWITCH.findall(source)}
    text = SWITCH.sub(r'extern "C" { bool \1; }', source)
    operands = re.search(r"^#define OPERANDS (.*)$", text, re.MULTILINE)
    if operands:
        text = text.replace(operands[0], "").replace("(OPERANDS,", f"({operands[1]},")
    text = re.sub(r"^#define UNROLL .*$", "#define UNROLL", text, flags=re.MULTILINE)
    entries = "\n".join(_entry(name, parameters) for name, parameters in KERNEL.findall(text))
    text = ATTRIBUTE.sub("", text).replace("\nkernel void ", "\nstatic void ")
    text = re.sub(r"^( +threadgroup (\w+) (\w+)\[.*\];)$", _shared, text, flags=re.MULTILINE)
    return numbered(text) + entries, switches


def numbered(text: str) -> str:
    """The text with a number for each barrier, by which it can be deleted."""
    numbers = count()
    return BARRIER.sub(lambda found: f"shim::{found[1]}_barrier({next(numbers)})", text)


def _shared(found: re.Match[str]) -> str:
    declared, _, name = found.groups()
    declared = declared.replace("threadgroup", "static", 1)
    return f"{declared} static long {name}_born; shim::poison({name}, sizeof {name}, {name}_born);"


def _entry(name: str, parameters: str) -> str:
    """A function that runs a kernel over a grid of threadgroups."""
    arguments = []
    for parameter in re.split(r",\s*(?![^\[]*\]\])", parameters):
        attribute = ATTRIBUTE.search(parameter)
        assert attribute, parameter
        kind = ATTRIBUTE.sub("", parameter).strip().rpartition(" ")[0]
        if attribute[1] == "buffer":
            pointer = f"({kind.rstrip('&')}*)buffers[{attribute[2]}]"
            arguments.append(f"*{pointer}" if kind.endswith("&") else f"({kind})buffers[{attribute[2]}]")
        else:
            arguments.append(BUILT_IN[attribute[1]])
    return over_a_grid(name, f"{name}({', '.join(arguments)});")


def over_a_grid(name: str, call: str) -> str:
    """A function that does what `call` says for every thread of a grid of threadgroups."""
    return f"""
extern "C" int run_{name}(void** buffers, uint across, uint down, uint deep, int threads) {{
  for (uint z = 0; z < deep; ++z) for (uint y = 0; y < down; ++y) for (uint x = 0; x < across; ++x) {{
    const int wrong = shim::run(threads, [&](int) {{ {call} }});
    if (wrong) return wrong;
  }}
  return 0;
}}
"""


@cache
def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"polyflash-metal-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    return folder


@cache
def _headers() -> bytes:
    files = (path for path in sorted(HERE.iterdir()) if path.suffix in ("", ".h") and path.is_file())
    return b"".join(path.read_bytes() for path in files)


@cache
def built(text: str) -> Any:
    """The shared library of a C++ text, compiled unless this user has it."""
    command = (compiler(), *FLAGS, *COMPILERS[Path(compiler()).name])
    key = hashlib.sha256("\0".join((*command, text)).encode() + _headers()).hexdigest()[:24]
    path = _folder() / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as own:
            (Path(own) / "kernel.cpp").write_text(text, encoding="utf-8")
            made = subprocess.run(
                (*command, "-I", str(HERE), "-o", f"{own}/kernel.so", f"{own}/kernel.cpp"),
                capture_output=True,
                text=True,
            )
            assert made.returncode == 0, made.stderr[:4000]
            os.replace(f"{own}/kernel.so", path)
    return ctypes.PyDLL(str(path))  # one thread at a time: threadgroup memory is static


class Library:
    """The kernels of a text."""

    def __init__(self, source: str) -> None:
        text, self.switches = translated(source)
        self.built = built(text)

    def __getattr__(self, name: str) -> Any:
        run = getattr(self.built, f"run_{name}")

        def call(*given: Any, threads: tuple[int, ...], group_size: tuple[int, ...]) -> None:
            for switch, on in self.switches.items():
                ctypes.c_bool.in_dll(self.built, switch).value = on
            ctypes.c_int.in_dll(self.built, "reversed").value = order.reversed
            ctypes.c_int.in_dll(self.built, "deleted").value = order.deleted
            held = [_buffer(x) for x in given]
            buffers = (ctypes.c_void_p * len(held))(*(address for address, _ in held))
            assert group_size[1:] == (1, 1) and threads[0] % group_size[0] == 0
            wrong = run(buffers, threads[0] // group_size[0], *threads[1:], group_size[0])
            if wrong:
                raise RuntimeError(f"{name}: {WRONG[wrong]}")

        return call


def _buffer(x: Any) -> tuple[int, Any]:
    """Address of an argument, and what must live as long as the call."""
    if isinstance(x, torch.Tensor):
        assert x.device.type == "cpu"
        return x.data_ptr(), x
    kind = ctypes.c_long if isinstance(x[0], int) else ctypes.c_float
    array = (kind * len(x))(*x)
    return ctypes.addressof(array), array


library = cache(Library)


class Order:
    """How fibers run: whether backwards, and which barrier does nothing."""

    def __init__(self) -> None:
        self.reversed, self.deleted = 0, -1


order = Order()


@contextmanager
def running(*, reversed: bool = False, deleted: int = -1) -> Any:
    before = order.reversed, order.deleted
    order.reversed, order.deleted = int(reversed), deleted
    try:
        yield
    finally:
        order.reversed, order.deleted = before


def on_the_cpu(row: Any) -> Any:
    """The row for CPU tensors, for those who name it."""
    return replace(row, targets=(*row.targets, "cpu:")) if row.backend == "metal" else row


def install() -> None:
    """From now on the Metal rows run here."""
    from polyflash import backends
    from polyflash.backends.metal import runtime

    backends.TABLE = tuple(map(on_the_cpu, backends.TABLE))
    runtime.compiled = library
