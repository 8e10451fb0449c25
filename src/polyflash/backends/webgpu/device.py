"""The device: which adapter, what it can do, its pipelines, memory and queue.

One device per process, opened at the first call. A launch is recorded and sent at once, or, within `batch()`,
at the batch's end; nothing waits until somebody reads. What a launch needs beside its tensors is bound once,
as a `Command`, and so are groups of buffers: little is left to do of a call like one before it. Results are
read where they stand if the device maps such buffers and is no graphics card, else through staging buffers of
its own, as wgpu's `read_buffer` makes a new one per call."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from polyflash import env
from polyflash.backends.webgpu.configs import UNROLLED, UNROLLED_BY_NAME, Limits
from polyflash.backends.webgpu.render import DAWN, NAGA, WITH_SUBGROUPS, Buffer, Kernel

_ORDER = {"DiscreteGPU": "discrete", "IntegratedGPU": "integrated", "CPU": "cpu"}
_WANTED = ("subgroup", "shader-f16", "timestamp-query")
_MAPS = "mappable-primary-buffers"  # that kernels use; a card would keep such in the host's memory
_KEPT_CALLS = 512
_LEAST_BYTES = 256  # of a pooled buffer
_KEPT_STAGING, _KEPT_UNIFORMS, _KEPT_GROUPS = 4, 1024, 1024
ALIGNMENT = 256  # of an offset into a buffer, on any device
_PROBE = """
@group(0) @binding(0) var<storage, read_write> found: array<vec2<u32>>;
@compute @workgroup_size(64)
fn probe(
  @builtin(local_invocation_index) t: u32, @builtin(subgroup_size) size: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) { found[t] = vec2<u32>(size, lane); }
"""


class DeviceError(RuntimeError):
    """A device refused work or was lost; says in which kernels."""


def allows_cpu() -> bool:
    return env.WEBGPU_CPU.is_set()


@lru_cache(maxsize=1)
def adapters() -> tuple[Any, ...]:
    """Every adapter but those of OpenGL, which lacks what kernels need; graphics cards first."""
    import wgpu

    found = [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] != "OpenGL"]
    order = list(_ORDER)
    kinds = {id(a): a.info["adapter_type"] for a in found}
    return tuple(sorted(found, key=lambda a: order.index(kinds[id(a)]) if kinds[id(a)] in order else 9))


def usable() -> tuple[Any, ...]:
    """Adapters that may be chosen: a CPU that executes shaders only where it is asked for."""
    named = env.WEBGPU_ADAPTER.read().lower()
    return tuple(
        a
        for a in adapters()
        if (allows_cpu() or a.info["adapter_type"] != "CPU") and named in a.summary.lower()
    )


def described() -> str:
    """The adapter that is chosen, its driver, and the version that compiles for it; "none" without one."""
    import wgpu

    for adapter in usable()[:1]:
        return f"{adapter.summary}, {adapter.info['description']}, wgpu {wgpu.__version__}"
    return "none"


def why_none() -> str:
    """Why no device can be opened here; "" if one can."""
    try:
        if usable():
            return ""
        names = ", ".join(dict.fromkeys(a.summary for a in adapters()))
    except (ImportError, OSError, RuntimeError) as error:
        return f"device: wgpu does not start ({type(error).__name__}: {error})"
    if not names:
        return "device: no Vulkan, Metal or D3D12 driver is here. `polyflash doctor` says how to get one"
    if env.WEBGPU_ADAPTER.read():
        return f"device: {env.WEBGPU_ADAPTER.name}={env.WEBGPU_ADAPTER.read()} names none of {names}"
    return f"device: {names} alone, a CPU that executes shaders: {env.WEBGPU_CPU.name}=1 allows it"


class Block:
    """Room on the device. It goes back to the pool when nobody holds it any more: the queue runs in order, so
    what uses it next comes later. A copy to the device does not wait for the commands of an open batch: what
    those use goes to kernels alone until they are sent."""

    __slots__ = ("batch", "buffer", "device", "nbytes", "offset", "size")

    def __init__(self, device: Device, buffer: Any, size: int, nbytes: int, offset: int = 0) -> None:
        self.device, self.buffer, self.size = device, buffer, size
        self.nbytes, self.offset = nbytes, offset
        self.batch = 0  # the last one that used it

    def __del__(self) -> None:
        device = self.device
        pool = device.unsent if self.batch == device.batches else device.free
        pool[self.size].append(self.buffer)


class Pipeline(NamedTuple):
    """A compiled kernel."""

    name: str
    compiled: Any
    layout: Any


class Command(NamedTuple):
    """A launch without its tensors."""

    pipeline: Pipeline
    uniform: Any
    nbytes: int  # of the uniform
    grid: tuple[int, int, int]


class Device:
    """An open device."""

    def __init__(self, adapter: Any) -> None:
        self.name: str = adapter.summary
        self.dialect = (
            DAWN if adapter.info["backend_type"] == "WebGPU" else NAGA
        )  # a browser's, or wgpu-native
        self.lock = threading.RLock()
        self.free: dict[int, list[Any]] = defaultdict(list)
        self.unsent: dict[int, list[Any]] = defaultdict(list)  # free for kernels of the open batch alone
        self.groups: dict[Any, Any] = {}  # bind groups
        self.uniforms: dict[bytes, Any] = {}  # by content, so that none is ever written again
        self.calls: dict[Any, Any] = {}  # what launchers keep of calls without tensors beside q, k, v
        self.pipelines: dict[tuple[Kernel, bool], Pipeline] = {}
        self.trusted: dict[Any, bool] = {}  # variants, by what the self-test found
        self.staging: list[Any] = []
        self.encoder: Any = None  # of a batch
        self.compute: Any = None  # its open pass, and the pipeline that is set there
        self.current: Any = None
        self.depth = 0
        self.batches = 1  # this one's number
        self.unchecked = True  # modules, see `_module`
        self.unread: list[str] = []  # kernels that were launched since somebody waited
        self.waits = self.launches = 0
        self.repeats = 1  # of a command, where a search is to see kernels and not the copies around them
        features = [f for f in _WANTED if f in adapter.features]
        self.maps = _MAPS in adapter.features and adapter.info["adapter_type"] != "DiscreteGPU"
        features += [_MAPS] * self.maps
        try:
            self.wgpu = adapter.request_device_sync(required_features=features)
        except Exception as error:  # wgpu raises errors of many kinds
            raise DeviceError(f"{self.name}: {error}") from error
        self.queue = self.wgpu.queue
        self.limits = self._limits(adapter, features)

    def _limits(self, adapter: Any, features: Sequence[str]) -> Limits:
        told, kind = self.wgpu.limits, _ORDER.get(adapter.info["adapter_type"], "integrated")
        named = [most for name, most in UNROLLED_BY_NAME.items() if name in self.name]
        return Limits(
            workgroup_bytes=told["max-compute-workgroup-storage-size"],
            invocations=told["max-compute-invocations-per-workgroup"],
            binding_bytes=min(told["max-storage-buffer-binding-size"], told["max-buffer-size"]),
            workgroups=told["max-compute-workgroups-per-dimension"],
            subgroup=self._subgroup() if "subgroup" in features else 0,
            float16="shader-f16" in features,
            kind=kind,
            unrolled=min(named, default=UNROLLED[kind]),
        )

    def _subgroup(self) -> int:
        """Lanes of a subgroup as a shader sees them; 0 unless they are constant and follow the threads, which
        no specification promises. The range that an adapter reports says little."""
        import wgpu

        found = self.empty(64 * 8)
        module = self.wgpu.create_shader_module(code=WITH_SUBGROUPS[self.dialect] + _PROBE, label="probe")
        pipeline = self.wgpu.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "probe"}
        )
        group = self.wgpu.create_bind_group(
            layout=pipeline.get_bind_group_layout(0),
            entries=[{"binding": 0, "resource": {"buffer": found.buffer, "offset": 0, "size": 64 * 8}}],
        )
        try:
            self._dispatch("probe", pipeline, group, (1, 1, 1))
            sizes, lanes = self.read(found).view(np.uint32).reshape(64, 2).T
        except (DeviceError, wgpu.GPUError):
            return 0
        size = int(sizes[0])
        ordered = (sizes == size).all() and size > 0 and (lanes == np.arange(64) % size).all()
        return size if ordered and size & (size - 1) == 0 else 0

    def empty(self, nbytes: int, kernels_alone: bool = False) -> Block:
        """Room for so many bytes, of any content; `kernels_alone` will write it."""
        size = _LEAST_BYTES
        while size < nbytes:
            size *= 2
        size = min(size, -(-nbytes // ALIGNMENT) * ALIGNMENT) if size > 1 << 26 else size
        with self.lock:
            pool = self.unsent if kernels_alone and self.unsent[size] else self.free
            buffer = pool[size].pop() if pool[size] else self._buffer(size)
        return Block(self, buffer, size, nbytes)

    def _buffer(self, size: int) -> Any:
        from wgpu import BufferUsage as Usage

        with self._named(f"room for {size} bytes"):
            usage = Usage.STORAGE | Usage.COPY_SRC | Usage.COPY_DST | Usage.MAP_READ * self.maps
            return self.wgpu.create_buffer(size=size, usage=usage)

    def upload(self, array: np.ndarray) -> Block:
        """A copy of a contiguous array on the device."""
        block = self.empty(max(4, array.nbytes))
        self.write(block, array)
        return block

    def write(self, block: Block, array: np.ndarray) -> None:
        """Writes a block that no command of an open batch uses: those are sent later, and would see it."""
        data = array.reshape(-1).view(np.uint8)
        if data.nbytes % 4:
            data = np.concatenate((data, np.zeros(-data.nbytes % 4, np.uint8)))
        if data.nbytes:
            self.put(block.buffer, block.offset, data)

    def put(self, buffer: Any, offset: int, data: Any) -> None:
        with self.lock, self._named("a copy to the device"):
            self.queue.write_buffer(buffer, offset, data)

    def launch(
        self, kernel: Kernel, params: bytes, blocks: Sequence[Block], grid: tuple[int, int, int]
    ) -> None:
        """Records a kernel over `blocks`: `words`, then its buffers in order."""
        self.record(self.command(kernel, params, grid), blocks)

    def command(self, kernel: Kernel, params: bytes, grid: tuple[int, int, int]) -> Command:
        with self.lock:
            return Command(self._pipeline(kernel), self._uniform(params), len(params), grid)

    def record(self, command: Command, blocks: Sequence[Block]) -> None:
        """Records a command over `blocks`, as `launch` does."""
        with self.lock:
            pipeline, uniform, nbytes, grid = command
            key = (id(pipeline), id(uniform), *[(id(x.buffer), x.offset, x.nbytes) for x in blocks])
            group = self.groups.get(key)
            if group is None:
                group = self._group(pipeline, uniform, nbytes, blocks)
                if len(self.groups) >= _KEPT_GROUPS:
                    self.groups.clear()
                self.groups[key] = group
            for block in blocks:
                block.batch = self.batches
            self._dispatch(pipeline.name, pipeline.compiled, group[0], grid)

    def _group(self, pipeline: Pipeline, uniform: Any, nbytes: int, blocks: Sequence[Block]) -> Any:
        """A bind group, and what must live as long as its key."""
        entries = [{"binding": 0, "resource": {"buffer": uniform, "offset": 0, "size": nbytes}}]
        for place, block in enumerate(blocks, 1):
            size = -(-max(4, block.nbytes) // 4) * 4
            resource = {"buffer": block.buffer, "offset": block.offset, "size": size}
            entries.append({"binding": place, "resource": resource})
        given: dict[str, Any] = {"layout": pipeline.layout, "entries": entries, "label": pipeline.name}
        made = self._checked(pipeline.name, self.wgpu.create_bind_group, **given)
        return made, pipeline, uniform, [block.buffer for block in blocks]

    def keep(self, key: Any, bound: Any) -> None:
        """Keeps what was bound for calls of a key."""
        if len(self.calls) >= _KEPT_CALLS:
            self.calls.clear()
        self.calls[key] = bound

    def _uniform(self, params: bytes) -> Any:
        from wgpu import BufferUsage as Usage

        uniform = self.uniforms.get(params)
        if uniform is None:
            if len(self.uniforms) >= _KEPT_UNIFORMS:
                self.uniforms.clear()
            uniform = self.wgpu.create_buffer(size=_LEAST_BYTES, usage=Usage.UNIFORM | Usage.COPY_DST)
            self.put(uniform, 0, params)
            self.uniforms[params] = uniform
        return uniform

    def _dispatch(self, name: str, compiled: Any, group: Any, grid: tuple[int, int, int]) -> None:
        try:
            encoder = self.encoder or self.wgpu.create_command_encoder(label=name)
            if self.compute is None:
                self.compute, self.current = encoder.begin_compute_pass(label=name), None
            if self.current is not compiled:
                self.compute.set_pipeline(compiled)
                self.current = compiled
            self.compute.set_bind_group(0, group)
            for _ in range(self.repeats):
                self.compute.dispatch_workgroups(*grid)
            if self.encoder is None:
                self.end_pass()
        except Exception as error:
            raise self._failure(name, error) from error
        self.launches += 1
        self.unread.append(name)
        if self.encoder is None:
            self._submit(encoder)

    def end_pass(self) -> None:
        """Ends the open pass; commands of other kinds follow."""
        if self.compute is not None:
            compute, self.compute = self.compute, None
            compute.end()

    def _submit(self, encoder: Any) -> None:
        with self._named(""):
            self.queue.submit([encoder.finish()])
        self.batches += 1
        sent, self.unsent = self.unsent, defaultdict(list)  # other threads may drop blocks meanwhile
        for size, buffers in list(sent.items()):
            self.free[size] += buffers

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except DeviceError:
            raise
        except Exception as error:
            raise self._failure(name, error) from error

    def _failure(self, name: str, error: Exception) -> DeviceError:
        """Errors of the queue come when they come: they say which kernels are on their way."""
        running = ", ".join(dict.fromkeys(filter(None, (*self.unread, name)))) or "no kernel"
        self.unread.clear()
        self.compute = None
        lost = "lost" in str(error).lower()
        if lost:
            close()
        what = "the device was lost, the next call opens another" if lost else "refused"
        return DeviceError(f"{self.name}: {what} ({running}): {error}")

    def _checked(self, name: str, make: Any, **given: Any) -> Any:
        with self._named(name):
            return make(**given)

    def _module(self, code: str, label: str) -> Any:
        """A shader module, without naga's checks of indices and loops where wgpu-native can leave them out:
        kernels do not need them. wgpu-py has no public way to say so, and a later one may have another."""
        if self.unchecked:
            try:
                from wgpu.backends.wgpu_native import _api, ffi, lib

                create = _api.libf.wgpuDeviceCreateShaderModuleTrusted

                given = _api.new_struct_p("WGPUShaderSourceWGSL *", code=_api.to_c_string_view(code))
                given[0].chain.next, given[0].chain.sType = ffi.NULL, lib.WGPUSType_ShaderSourceWGSL
                chain, name = ffi.cast("WGPUChainedStruct *", given), _api.to_c_string_view(label)
                said = _api.new_struct_p("WGPUShaderModuleDescriptor *", nextInChain=chain, label=name)
                return _api.GPUShaderModule(label, create(self.wgpu._internal, said, 0), self.wgpu)
            except (ImportError, AttributeError):
                self.unchecked = False
        return self.wgpu.create_shader_module(code=code, label=label)

    def _pipeline(self, kernel: Kernel) -> Pipeline:
        made = self.pipelines.get((kernel, self.unchecked))
        if made is None:
            import wgpu

            kinds = ["uniform", "read-only-storage", *map(_access, kernel.buffers)]
            stage = wgpu.ShaderStage.COMPUTE
            entries = [
                {"binding": i, "visibility": stage, "buffer": {"type": kind}} for i, kind in enumerate(kinds)
            ]
            layout = self._checked(kernel.name, self.wgpu.create_bind_group_layout, entries=entries)
            over = self.wgpu.create_pipeline_layout(bind_group_layouts=[layout])
            code = kernel.text(self.dialect)
            module = self._checked(kernel.name, self._module, code=code, label=kernel.name)
            compute = {"module": module, "entry_point": kernel.name}
            pipeline = self._checked(
                kernel.name, self.wgpu.create_compute_pipeline, layout=over, compute=compute
            )
            made = self.pipelines[kernel, self.unchecked] = Pipeline(kernel.name, pipeline, layout)
        return made

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Commands within are sent together at the end, in one submission."""
        with self.lock:
            if self.depth == 0:
                self.encoder = self.wgpu.create_command_encoder(label="batch")
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.flush()
                    self.encoder = None

    def flush(self) -> None:
        """Sends the commands of an open batch, which goes on with a fresh encoder."""
        if self.encoder is not None:
            encoder, self.encoder = self.encoder, None
            with self._named(""):
                self.end_pass()
            self._submit(encoder)
            self.encoder = self.wgpu.create_command_encoder(label="batch")

    def read(self, block: Block, out: np.ndarray | None = None) -> np.ndarray:
        """The bytes of a block, once everything before is done, in `out` (bytes, contiguous) if given."""
        import wgpu

        nbytes = -(-max(4, block.nbytes) // 4) * 4
        with self.lock, self._named(""):
            self.flush()
            held, at = (block.buffer, block.offset) if self.maps else (self._staged(block, nbytes), 0)
            held.map_sync(wgpu.MapMode.READ, at, nbytes)
            view = np.frombuffer(held.read_mapped(at, nbytes, copy=False), np.uint8)[: block.nbytes]
            out = np.empty(block.nbytes, np.uint8) if out is None else out
            np.copyto(out, view)
            del view
            held.unmap()
            if not self.maps:
                self.staging = [held, *self.staging][:_KEPT_STAGING]
            self.unread.clear()
            self.waits += 1
        return out

    def _staged(self, block: Block, nbytes: int) -> Any:
        """A copy of a block in a buffer that may be mapped."""
        import wgpu

        at = next((i for i, s in enumerate(self.staging) if s.size >= nbytes), None)
        staging = self.staging.pop(at) if at is not None else None
        if staging is None:
            usage = wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.MAP_READ
            staging = self.wgpu.create_buffer(size=max(nbytes, 1 << 16), usage=usage)
        encoder = self.wgpu.create_command_encoder(label="read")
        encoder.copy_buffer_to_buffer(block.buffer, block.offset, staging, 0, nbytes)
        self.queue.submit([encoder.finish()])
        return staging


def _access(buffer: Buffer) -> str:
    return "storage" if buffer.written else "read-only-storage"


_opened: list[tuple[int, Device]] = []  # with the process it was opened in
_opening = threading.Lock()


def current() -> Device:
    """The device of this process, opened now if it is not."""
    with _opening:
        if not _opened:
            found = usable()
            if not found:
                raise DeviceError(why_none())
            _opened.append((os.getpid(), Device(found[0])))
        pid, opened = _opened[0]
        if pid != os.getpid():
            what = "a process that forks takes no GPU along: use multiprocessing's spawn"
            raise DeviceError(f"{opened.name}: {what}")
        return opened


def close() -> None:
    """Forgets the device: the next call opens one."""
    _opened.clear()
