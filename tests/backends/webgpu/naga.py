"""The engine without a driver: its WGSL is translated into Metal's language, and the Metal engine's shim
compiles that and runs it, threads as fibers. There are two routes: naga, as wgpu does it on a Mac, and naga
to SPIR-V and spirv-cross from there, as Vulkan does it on a Mac.

naga leaves out the entry point of a kernel whose bindings it is not told. So the kernel's body becomes a
function of its own, which naga gives every buffer and every variable of workgroup memory as an argument."""

from __future__ import annotations

import base64
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

from polyflash.backends.webgpu.configs import NAMED, UNROLLED, Limits
from polyflash.backends.webgpu.device import Block, Device
from polyflash.backends.webgpu.render import Kernel
from tests.backends.metal import shim

FOLDER = Path("build/naga/node_modules/wgsl-wasm-transpiler-bundler")  # scripts/naga.sh fills it
SPIRV_CROSS = "spirv-cross"
ENTRY = re.compile(r"@compute @workgroup_size\((\w+)\)\s*fn (\w+)\(\s*(@builtin.*?),?\s*\) \{", re.DOTALL)
PARAMETER = re.compile(r"@builtin\((\w+)\) (\w+): ([\w<>]+)")
BODY = re.compile(r"^void \w+_body\(\n(.*?)\n\) \{$", re.MULTILINE | re.DOTALL)
BUILT_IN = {
    "workgroup_id": "threadgroup_position_in_grid",
    "local_invocation_index": "thread_index_in_threadgroup",
    "subgroup_invocation_id": "thread_index_in_simdgroup",
    "global_invocation_id": "thread_position_in_grid",
}
FLOAT = re.compile(r"(?<![\w.])(\d+\.\d*(?:e[+-]?\d+)?)(?![\w.])")
# What naga 25.0 does not know, and 29.0 in wgpu does.
DOT = """
fn dot4I8Packed(a: u32, b: u32) -> i32 {
  var sum = 0;
  for (var at = 0u; at < 32u; at += 8u) {
    sum += (bitcast<i32>(a << (24u - at)) >> 24u) * (bitcast<i32>(b << (24u - at)) >> 24u);
  }
  return sum;
}
"""
# The first word of naga's SPIR-V after its mark says 1.0; operations of subgroups came with 1.3.
SPIRV_1_3 = bytes((0, 3, 1, 0))


def why_not(route: str) -> str:
    """Why nothing can be translated or run here; "" if it can."""
    if not (FOLDER / "package.json").exists() or not shutil.which("node"):
        return "no naga: `sh scripts/naga.sh` installs it"
    if route == SPIRV_CROSS and not shutil.which(SPIRV_CROSS):
        return "no spirv-cross: `sh scripts/drivers.sh spirv-cross` installs it on Debian"
    return "" if shim.compiler() else f"no C++ compiler: {', '.join(shim.COMPILERS)}"


def translated(wgsl: str, language: str) -> str:
    """Metal's language, or SPIR-V in base64, by naga."""
    command = ("node", "tests/backends/webgpu/naga.mjs", str(FOLDER.resolve()), language)
    return _said(command, (wgsl + DOT * ("dot4I8Packed" in wgsl)).encode())


def _said(command: Sequence[str], given: bytes) -> str:
    made = subprocess.run(command, input=given, capture_output=True, check=False)
    assert made.returncode == 0, made.stderr.decode()[:2000]
    return made.stdout.decode()


class Library:
    """One kernel, compiled."""

    def __init__(self, kernel: Kernel, route: str) -> None:
        self.name = kernel.name
        entry = ENTRY.search(kernel.text())
        assert entry and entry[2] == kernel.name, kernel.name
        sizes = dict(kernel.constants)
        self.threads = sizes[entry[1]] if entry[1] in sizes else int(entry[1])
        self.text = ROUTES[route](kernel, entry)
        self.built = shim.built(self.text)

    def __call__(self, addresses: Sequence[int], grid: tuple[int, int, int]) -> None:
        buffers = (ctypes.c_void_p * len(addresses))(*addresses)
        ctypes.c_int.in_dll(self.built, "reversed").value = shim.order.reversed
        ctypes.c_int.in_dll(self.built, "deleted").value = shim.order.deleted
        wrong = getattr(self.built, f"run_{self.name}")(buffers, *grid, self.threads)
        assert not wrong, f"{self.name}: {shim.WRONG[wrong]}"

    @property
    def barriers(self) -> int:
        return self.text.count("shim::threadgroup_barrier(")


def _in_cpp(msl: str) -> str:
    """The text with what C++ has otherwise: numbers are floats, and parts of vectors are calls."""
    text = FLOAT.sub(r"\1f", msl.replace("#include <simd/simd.h>\n", ""))
    return re.sub(r"\.(xy|zw)\b", r".\1()", text)


def _by_spirv_cross(kernel: Kernel, _: re.Match[str]) -> str:
    """What spirv-cross makes of naga's SPIR-V, in C++."""
    spirv = bytearray(base64.b64decode(translated(kernel.text(), "spirv")))
    spirv[4:8] = SPIRV_1_3
    # an array of its own has an operator for each address space, of which C++ has one
    options = ("--msl-version", "20400", "--msl-decoration-binding", "--msl-force-native-arrays")
    command = (SPIRV_CROSS, "-", "--msl", *options)
    return shim.translated(_in_cpp(_said(command, spirv)))[0]


def _by_naga(kernel: Kernel, entry: re.Match[str]) -> str:
    """naga's text as the shim takes it, and a function that runs it over a grid."""
    wgsl, name, given = kernel.text(), kernel.name, PARAMETER.findall(entry[3])
    parameters = ", ".join(f"{own}: {kind}" for _, own, kind in given)
    names = ", ".join(own for _, own, _ in given)
    wgsl = f"{wgsl[: entry.start()]}fn {name}_body({parameters}) {{{wgsl[entry.end() :]}"
    text = _in_cpp(translated(f"{wgsl}{entry[0]} {name}_body({names}); }}\n", "metal"))
    text = re.sub(r"^(typedef .*)\[1\];$", r"\1[1 << 20];", text, flags=re.MULTILINE)  # of no known length
    text = shim.numbered(text.replace("metal::threadgroup_barrier(metal::", "threadgroup_barrier("))
    found = BODY.search(text)
    assert found, name
    lines = [line.strip().rstrip(",").rpartition(" ") for line in found[1].splitlines()]
    arguments, shared = [shim.BUILT_IN[BUILT_IN[what]] for what, *_ in given], []
    slots = ["n", "words", *(buffer.name for buffer in kernel.buffers)]
    for kind, _, own in lines[len(given) :]:
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
    return text + shim.over_a_grid(name, f"{sizes} {' '.join(shared)} {name}_body({', '.join(arguments)});")


ROUTES = {"naga": _by_naga, SPIRV_CROSS: _by_spirv_cross}
library = cache(Library)


class FiberDevice(Device):
    """A device whose memory is numpy's, full of NaN at first; its subgroups are the shim's simdgroups."""

    def __init__(self, route: str) -> None:
        self.route = route
        self.name, self.lock = "fibers", threading.RLock()
        self.free, self.unsent = defaultdict(list), defaultdict(list)
        self.batches = self.repeats = 1
        self.calls, self.trusted = {}, {variant.name: True for variant in NAMED.values()}
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
        library(kernel, self.route)([held.ctypes.data, *addresses], grid)
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
