"""The engine without a driver: naga translates its WGSL into Metal's language, as wgpu does on a Mac, and the
Metal engine's shim compiles that and runs it, threads as fibers.

naga leaves out the entry point of a kernel whose bindings it is not told. So the kernel's body becomes a
function of its own, which naga gives every buffer and every variable of workgroup memory as an argument."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from polyflash.backends.webgpu.configs import UNROLLED, Limits
from polyflash.backends.webgpu.device import Block, Device
from polyflash.backends.webgpu.render import Kernel
from tests.backends.metal import shim

FOLDER = Path("build/naga/node_modules/wgsl-wasm-transpiler-bundler")  # scripts/naga.sh fills it
ENTRY = re.compile(r"@compute @workgroup_size\((\w+)\)\s*fn (\w+)\(\s*(@builtin.*?),?\s*\) \{", re.DOTALL)
PARAMETER = re.compile(r"@builtin\((\w+)\) (\w+): ([\w<>]+)")
BODY = re.compile(r"^void \w+_body\(\n(.*?)\n\) \{$", re.MULTILINE | re.DOTALL)
BUILT_IN = {
    "workgroup_id": "metal::uint3(x, y, z)",
    "local_invocation_index": "uint(shim::current)",
    "subgroup_invocation_id": "uint(shim::lane())",
    "global_invocation_id": "metal::uint3(x * threads + shim::current, y, z)",
}


def why_not() -> str:
    """Why nothing can be translated or run here; "" if it can."""
    if not (FOLDER / "package.json").exists() or not shutil.which("node"):
        return "no naga: `sh scripts/naga.sh` installs it"
    return "" if shim.compiler() else f"no C++ compiler: {', '.join(shim.COMPILERS)}"


@cache
def translated(wgsl: str) -> str:
    """Metal's language by naga."""
    command = ("node", "tests/backends/webgpu/naga.mjs", str(FOLDER.resolve()))
    made = subprocess.run(command, input=wgsl, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[:2000]
    return made.stdout


class Library:
    """One kernel, compiled."""

    def __init__(self, kernel: Kernel) -> None:
        wgsl, self.name = kernel.text(), kernel.name
        entry = ENTRY.search(wgsl)
        assert entry and entry[2] == kernel.name, kernel.name
        given = PARAMETER.findall(entry[3])
        parameters = ", ".join(f"{name}: {kind}" for _, name, kind in given)
        names = ", ".join(name for _, name, _ in given)
        body = f"fn {kernel.name}_body({parameters}) {{"
        wgsl = wgsl[: entry.start()] + body + wgsl[entry.end() :]
        wgsl += f"{entry[0]} {kernel.name}_body({names}); }}\n"
        sizes = dict(kernel.constants)
        self.threads = sizes[entry[1]] if entry[1] in sizes else int(entry[1])
        slots = ["n", "words", *(buffer.name for buffer in kernel.buffers)]
        self.text = _in_cpp(translated(wgsl), kernel.name, [BUILT_IN[what] for what, *_ in given], slots)
        self.built = shim.built(self.text)

    def __call__(self, addresses: Sequence[int], grid: tuple[int, int, int]) -> None:
        buffers = (ctypes.c_void_p * len(addresses))(*addresses)
        ctypes.c_int.in_dll(self.built, "reversed").value = shim.order.reversed
        ctypes.c_int.in_dll(self.built, "deleted").value = shim.order.deleted
        wrong = self.built.run(buffers, *grid, self.threads)
        if wrong:
            raise RuntimeError(f"{self.name}: {shim.WRONG[wrong]}")


def barriers(text: str) -> int:
    """How many barriers a translated text has."""
    return text.count("shim::threadgroup_barrier(")


def _in_cpp(msl: str, name: str, built_in: list[str], slots: list[str]) -> str:
    """naga's text as the shim takes it, and a function that runs it over a grid."""
    text = msl.replace("#include <simd/simd.h>", '#include "metal_vectors"')
    text = re.sub(r"^(typedef .*)\[1\];$", r"\1[1 << 20];", text, flags=re.MULTILINE)  # of no known length
    text = re.sub(r"\.(xy|zw)\b", r".\1()", text)
    numbers = iter(range(text.count("threadgroup_barrier(")))
    barrier = r"metal::threadgroup_barrier\(metal::mem_flags::mem_threadgroup\)"
    text = re.sub(barrier, lambda _: f"shim::threadgroup_barrier({next(numbers)})", text)
    found = BODY.search(text)
    assert found, name
    parameters = [line.strip().rstrip(",").rpartition(" ") for line in found[1].splitlines()]
    arguments, shared = list(built_in), []
    for kind, _, own in parameters[len(built_in) :]:
        plain = kind.replace("const&", "").rstrip("&").split()
        if plain[0] == "threadgroup":
            shared.append(f"static {plain[1]} {own}; static long {own}_born;")
            shared.append(f"shim::poison(&{own}, sizeof {own}, {own}_born);")
            arguments.append(own)
        elif own == "_buffer_sizes":
            arguments.append("sizes")
        else:
            (slot,) = (i for i, s in enumerate(slots) if re.fullmatch(rf"{s}(_\d*)?", own))
            arguments.append(f"*({plain[1]}*)buffers[{slot}]")
    sizes = "static _mslBufferSizes sizes;" if "_mslBufferSizes" in text else ""
    return f"""{text}
extern "C" int run(void** buffers, uint across, uint down, uint deep, int threads) {{
  {sizes}
  for (uint z = 0; z < deep; ++z) for (uint y = 0; y < down; ++y) for (uint x = 0; x < across; ++x) {{
    const int wrong = shim::run(threads, [&](int) {{
      {" ".join(shared)}
      {name}_body({", ".join(arguments)});
    }});
    if (wrong) return wrong;
  }}
  return 0;
}}
"""


library = cache(Library)


class FiberDevice(Device):
    """A device whose memory is numpy's, full of NaN at first; its subgroups are the shim's simdgroups."""

    def __init__(self) -> None:
        self.name, self.lock = "fibers", threading.RLock()
        self.free, self.unsent = defaultdict(list), defaultdict(list)
        self.batches = self.repeats = 1
        self.calls, self.trusted = {}, {}
        self.waits = self.launches = 0
        self.limits = Limits(
            32 << 10, subgroup=shim.LANES, float16=True, kind="cpu", unrolled=UNROLLED["cpu"]
        )

    def _buffer(self, size: int) -> Any:
        return np.full(size, 0xFF, np.uint8)

    def put(self, buffer: Any, offset: int, data: Any) -> None:
        held = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        buffer[offset : offset + held.nbytes] = held

    def command(self, kernel: Kernel, params: bytes, grid: tuple[int, int, int]) -> Any:
        return kernel, np.frombuffer(params, np.uint8), grid

    def record(self, command: Any, blocks: Sequence[Block]) -> None:
        kernel, held, grid = command
        addresses = [block.buffer.ctypes.data + block.offset for block in blocks]
        library(kernel)([held.ctypes.data, *addresses], grid)
        self.launches += 1

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        yield

    def flush(self) -> None:
        """Everything is done."""

    def read(self, block: Block, out: np.ndarray | None = None) -> np.ndarray:
        data = block.buffer[block.offset : block.offset + block.nbytes]
        out = np.empty(block.nbytes, np.uint8) if out is None else out
        np.copyto(out, data)
        return out
