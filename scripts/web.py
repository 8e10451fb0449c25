"""Writes examples/web/kernels.json: WGSL texts and launches of the WebGPU engine, for a page without Python.

    python scripts/web.py [--check]

The engine runs on an adapter that computes nothing and keeps what it is asked for. So a page has the kernels,
numbers and grids that `polyflash.attention(..., backend="webgpu")` would use, and states none of them again.
Buffers have the names of the kernel's text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import polyflash
from polyflash.backends.webgpu import device, forward
from polyflash.backends.webgpu.configs import FLOOR, ROW, TILE, Config

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "web"
PAGE = FOLDER / "kernels.json"
LIMITS = {  # as WebGPU names them
    "max-compute-workgroup-storage-size": FLOOR.workgroup_bytes,
    "max-compute-invocations-per-workgroup": FLOOR.invocations,
    "max-storage-buffer-binding-size": FLOOR.binding_bytes,
    "max-buffer-size": 256 << 20,
    "max-compute-workgroups-per-dimension": FLOOR.workgroups,
}
LANES = 4  # of the smallest subgroup that a kernel here is for


class Problem(NamedTuple):
    """Causal attention of (batch, heads, rows, head_dim), float32."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    head_dim: int


def trained() -> Problem:
    """Attention of the model in training.json."""
    x = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    return Problem(x["batch"], x["heads"], x["heads"], x["rows"], x["rows"], x["width"] // x["heads"])


PROBLEMS = {
    "check": Problem(2, 4, 2, 77, 131, 16),
    "check 64": Problem(1, 2, 1, 96, 160, 64),
    "speed": Problem(1, 8, 8, 512, 512, 64),
    "large": Problem(1, 8, 8, 2048, 2048, 64),
    "train": trained(),
}
TEMPLATES = {
    "row": Config(ROW),
    "row by subgroups": Config(ROW, subgroups=True),
    "tile": Config(TILE),
    "tile by subgroups": Config(TILE, subgroups=True),
}
# Adapter types and names. A CPU that executes shaders has loops where others have text.
MACHINES = {"gpu": ("DiscreteGPU", "a browser"), "cpu": ("CPU", "SwiftShader")}


class Recorded:
    """A WebGPU adapter, device, queue, encoder and pass at once: it keeps buffers and dispatches."""

    def __init__(self, machine: str, subgroups: bool) -> None:
        kind, self.summary = MACHINES[machine]
        self.features = {"subgroup"} if subgroups else set()
        self.info = {"adapter_type": kind, "backend_type": "WebGPU", "description": ""}
        self.limits, self.queue = LIMITS, self
        self.launches: list[dict[str, Any]] = []
        self.pipeline: Any = None
        self.group: Any = None

    def request_device_sync(self, **_: Any) -> Recorded:
        return self

    def create_buffer(self, size: int, **_: Any) -> Memory:
        return Memory(size)

    def write_buffer(self, buffer: Memory, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        buffer.data[offset : offset + len(view)] = view

    def create_shader_module(self, code: str, **_: Any) -> str:
        return code

    def create_compute_pipeline(self, compute: dict[str, Any], **_: Any) -> dict[str, Any]:
        return compute

    def create_bind_group(self, entries: Sequence[dict[str, Any]], **_: Any) -> Sequence[dict[str, Any]]:
        return entries

    def set_pipeline(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def set_bind_group(self, _: int, group: Any) -> None:
        self.group = group

    def dispatch_workgroups(self, *grid: int) -> None:
        code = self.pipeline["module"]
        names = dict(re.findall(r"@binding\((\d+)\) var<\w+(?:, \w+)?> (\w+):", code))
        bound = {names[str(x["binding"])]: x["resource"] for x in self.group}
        numbers, words = (bound.pop(name) for name in ("n", "words"))
        launch = {"code": code, "grid": grid, "bound": bound}
        self.launches.append(
            launch | {name: x["buffer"].words(x) for name, x in (("numbers", numbers), ("words", words))}
        )

    def _ignored(self, *_: Any, **__: Any) -> Recorded:
        return self

    create_bind_group_layout = create_pipeline_layout = create_command_encoder = _ignored
    begin_compute_pass = end = finish = submit = copy_buffer_to_buffer = _ignored


class Memory:
    """A buffer; what a kernel would write stays zero."""

    def __init__(self, size: int) -> None:
        self.size, self.data = size, bytearray(size)

    def words(self, at: dict[str, Any]) -> list[int]:
        return memoryview(self.data)[at["offset"] : at["offset"] + at["size"]].cast("I").tolist()

    def map_sync(self, *_: Any) -> None: ...

    def unmap(self) -> None: ...

    def read_mapped(self, offset: int, size: int, **_: Any) -> memoryview:
        return memoryview(self.data)[offset : offset + size]


def record(problem: Problem, config: Config, machine: str) -> dict[str, list[dict[str, Any]]]:
    """The launches of a call, and of its gradients."""
    adapter, p = Recorded(machine, config.subgroups), problem
    shapes = (p.heads, p.rows), (p.kv_heads, p.keys), (p.kv_heads, p.keys)
    tensors = [torch.zeros(p.batch, *shape, p.head_dim, requires_grad=True) for shape in shapes]
    with ExitStack() as stack:
        for what in (
            patch.object(device, "usable", lambda: (adapter,)),
            patch.object(device, "_opened", []),
            patch.object(device.Device, "_subgroup", lambda _: LANES),
            patch.object(forward, "_passes", lambda *_: True),
        ):
            stack.enter_context(what)
        out = polyflash.attention(*tensors, causal=True, return_lse=True, backend="webgpu", config=config).out
        ahead = len(adapter.launches)
        out.sum().backward()
    return {"forward": adapter.launches[:ahead], "backward": adapter.launches[ahead:]}


def named(launches: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Names every buffer of a pass, so that launches share those they share; returns their sizes. The last
    launch has the first choice: results are called as its text calls them."""
    names: dict[int, str] = {}
    sizes: dict[str, int] = {}
    for launch in reversed(launches):
        launch["buffers"] = []
        for name, x in launch["bound"].items():
            free = f"{name}_" if name in sizes else name
            own = names.setdefault(id(x["buffer"]), free)
            sizes[own] = max(sizes.get(own, 0), x["size"])
            launch["buffers"].append(own)
    return sizes


def page() -> str:
    """The contents of kernels.json."""
    kernels: dict[str, int] = {}
    calls = list(_calls(kernels))
    lines = [json.dumps({"entry": entry_of(code), "code": code}) for code in kernels]
    body = ",\n".join(json.dumps(call, separators=(",", ":")) for call in calls)
    return '{"kernels": [\n' + ",\n".join(lines) + '\n],\n"calls": [\n' + body + "\n]}\n"


def entry_of(code: str) -> str:
    return re.search(r"@compute[^{]*?fn (\w+)", code).group(1)  # type: ignore[union-attr]


def _calls(kernels: dict[str, int]) -> Iterator[dict[str, Any]]:
    for name, problem in PROBLEMS.items():
        for machine in MACHINES:
            for template, config in TEMPLATES.items():
                if (name == "train" and config != Config(ROW)) or (name == "large" and machine == "cpu"):
                    continue
                call: dict[str, Any] = {"problem": name, "machine": machine, "template": template}
                call |= problem._asdict() | {"subgroup": LANES if config.subgroups else 0, "bytes": {}}
                for which, launches in record(problem, config, machine).items():
                    call["bytes"] |= named(launches)
                    call["words"] = launches[0]["words"]
                    if any(launch["words"] != call["words"] for launch in launches):
                        raise SystemExit(f"{name}: kernels of a call do not share their words")
                    numbers = [kernels.setdefault(launch["code"], len(kernels)) for launch in launches]
                    call[which] = [
                        {"kernel": kernel, **{key: launch[key] for key in ("grid", "numbers", "buffers")}}
                        for kernel, launch in zip(numbers, launches, strict=True)
                    ]
                yield call


def main(words: list[str]) -> int:
    text = page()
    if words == ["--check"]:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
        print(f"{PAGE.name} is {'stale: run python scripts/web.py' if stale else 'current'}")
        return int(stale)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
