"""A browser's WebGPU with the names of wgpu, as far as the engine uses them.

`--adapter chromium` runs the suite on it, that is, on Dawn. Commands collect here and travel when something
waits for them."""

from __future__ import annotations

import atexit
import base64
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium

_LIMITS = (
    *("maxComputeWorkgroupStorageSize", "maxComputeInvocationsPerWorkgroup", "maxStorageBufferBindingSize"),
    *("maxBufferSize", "maxComputeWorkgroupsPerDimension"),
)
_FEATURES = {"subgroups": "subgroup"}  # what wgpu calls them


def _kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name)


class Remote:
    """Adapter, device and queue."""

    def __init__(self, browser: chromium.Browser) -> None:
        self.browser, self.queue, self.count = browser, self, 0
        self.waiting: list[Sequence[Any]] = []
        self.lost = False
        found = self._open()
        self.features = {_FEATURES.get(name, name) for name in found["features"]}
        self.limits = {_kebab(name): value for name, value in found["limits"].items()}
        self.info = {"adapter_type": "CPU", "backend_type": "WebGPU", "description": "Chromium"}
        self.summary = "SwiftShader (CPU) via Dawn"
        assert "swiftshader" in found["name"], found["name"]

    def _open(self) -> Any:
        return self.browser.evaluate(f"remote.open({json.dumps(_LIMITS)})")

    def request_device_sync(self, **_: Any) -> Remote:
        if self.lost:
            self._open()
            self.lost = False
        return self

    def destroy(self) -> None:
        self.ask("destroy")
        self.lost = True

    def tell(self, name: str, *given: Any) -> None:
        self.waiting.append((name, *given))

    def ask(self, name: str, *given: Any) -> Any:
        """The answer to a command, after those that wait."""
        commands, self.waiting = [*self.waiting, (name, *given)], []
        return self.browser.evaluate(f"remote.run({json.dumps(commands)})")

    def create_buffer(self, size: int, usage: int, **_: Any) -> Buffer:
        made = Buffer(self)
        self.tell("buffer", made.id, size, int(usage))
        made.size = size
        return made

    def create_shader_module(self, code: str, label: str = "") -> Object:
        made = Object(self)
        self.ask("module", made.id, code, label)
        return made

    def create_bind_group_layout(self, entries: Sequence[dict[str, Any]]) -> Object:
        made = Object(self)
        self.tell("group_layout", made.id, [{**x, "visibility": int(x["visibility"])} for x in entries])
        return made

    def create_pipeline_layout(self, bind_group_layouts: Sequence[Object]) -> Object:
        made = Object(self)
        self.tell("layout", made.id, [x.id for x in bind_group_layouts])
        return made

    def create_compute_pipeline(self, layout: Any, compute: dict[str, Any]) -> Pipeline:
        made = Pipeline(self)
        layout = layout if layout == "auto" else layout.id
        self.ask("pipeline", made.id, layout, compute["module"].id, compute["entry_point"])
        return made

    def create_bind_group(self, layout: Object, entries: Sequence[dict[str, Any]], **_: Any) -> Object:
        made = Object(self)
        bound = [(x["binding"], x["resource"]) for x in entries]
        rows = [(i, x["buffer"].id, x["offset"], x["size"]) for i, x in bound]
        self.tell("group", made.id, layout.id, rows)
        return made

    def create_command_encoder(self, **_: Any) -> Encoder:
        return Encoder()

    def write_buffer(self, buffer: Object, offset: int, data: Any) -> None:
        text = base64.b64encode(memoryview(data).cast("B")).decode()
        self.tell("write", buffer.id, offset, text)

    def submit(self, recorded: Sequence[list[Any]]) -> None:
        for commands in recorded:
            self.tell("submit", commands)


class Object:
    """Something in the browser, which forgets it when this is gone."""

    def __init__(self, remote: Remote) -> None:
        remote.count += 1
        self.remote, self.id = remote, remote.count

    def __del__(self) -> None:
        self.remote.tell("forget", self.id)


class Buffer(Object):
    size = 0
    mapped = b""

    def map_sync(self, _: Any, offset: int, size: int) -> None:
        self.mapped = base64.b64decode(self.remote.ask("read", self.id, offset, size))

    def read_mapped(self, *_: Any, **__: Any) -> bytes:
        return self.mapped

    def unmap(self) -> None:
        self.mapped = b""


class Pipeline(Object):
    def get_bind_group_layout(self, _: int) -> Object:
        made = Object(self.remote)
        self.remote.tell("layout_of", made.id, self.id)
        return made


class Encoder:
    """A command encoder and its passes. What is bound lives until it is sent."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.pipeline: Any = None
        self.group: Any = None
        self.held: list[Any] = []

    def begin_compute_pass(self, **_: Any) -> Encoder:
        return self

    def set_pipeline(self, pipeline: Object) -> None:
        self.pipeline = pipeline

    def set_bind_group(self, _: int, group: Object) -> None:
        self.group = group

    def dispatch_workgroups(self, *grid: int) -> None:
        self.held += (self.pipeline, self.group)
        self.recorded.append(("dispatch", self.pipeline.id, self.group.id, grid))

    def copy_buffer_to_buffer(self, source: Object, start: int, to: Object, end: int, size: int) -> None:
        self.held += (source, to)
        self.recorded.append(("copy", source.id, start, to.id, end, size))

    def end(self) -> None: ...

    def finish(self) -> list[Any]:
        return self.recorded


@lru_cache(maxsize=1)
def opened() -> Remote:
    """The adapter of this process's own browser, which ends with it."""
    stack = ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    Path(folder, "index.html").write_text("<!doctype html><title>remote</title>", encoding="ascii")
    server = stack.enter_context(chromium.served(Path(folder)))
    browser = stack.enter_context(chromium.browser())
    atexit.register(stack.close)
    browser.open(server.url)
    browser.evaluate(Path(__file__).with_name("remote.js").read_text(encoding="utf-8"))
    return Remote(browser)


def install() -> None:
    """From now on the engine's only adapter is the browser's."""
    from polyflash.backends.webgpu import device

    if chromium.executable() is None:
        raise pytest.UsageError("--adapter chromium: there is no Chromium here")
    device.adapters = lambda: (opened(),)
