"""Replay of a call on NVIDIA, forward or backward: the launches of an earlier call like it, at the addresses
of this one.

Triton's launcher reads some seventy Python objects per kernel, and what they say is the same again: only
addresses change. So the parameters of a launch are laid out once, as Triton's ahead-of-time compiler passes
them (each parameter that is no constant, in order, then two scratch addresses), and a call writes its
addresses in and asks the driver to start the kernel.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from polyflash.backends.triton import runtime
from polyflash.results import NO_LSE, outputs

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

# which tensor of a forward call an address is of; words of the stream and scratch come behind
Q, K, V, OUT, LSE, TABLE, LENS, OPERANDS = range(8)
_NAMES = {
    **dict.fromkeys(("q", "q0", "q1"), Q),
    **dict.fromkeys(("k", "k0", "k1"), K),
    **dict.fromkeys(("v", "v_view", "v0", "v1"), V),
    **{"out": OUT, "lse": LSE, "page_table": TABLE, "kv_lens": LENS},
}
_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f"}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 128  # of a CUtensorMap
_KEPT_MAPS = 64
_SCRATCH_UNIT = 256  # bytes
_MOST_ROOM = 32 << 20  # bytes that a stream keeps for calls to come
_KEPT_ROOMS = 16
_KEPT_CALLS = 256  # backward, of a route
_ALIGNED = 15  # bits of an address for which the kernel was compiled


class _Leaf(NamedTuple):
    """One parameter of a kernel: its Triton type, its value, and which tensor it is the address of."""

    kind: str
    value: Any
    source: int | None


class _Map(NamedTuple):
    """A tensor map among the parameters: of which tensor, and how it is encoded."""

    source: int
    encoding: tuple[Any, ...]  # behind the address
    encoded: dict[int, bytes]  # by address

    def at(self, address: int) -> bytes:
        found = self.encoded.get(address)
        if found is None:
            if len(self.encoded) >= _KEPT_MAPS:
                self.encoded.clear()
            found = self.encoded[address] = _encoded(address, *self.encoding)
        return found


class NotReplayable(Exception):
    """A launch has something that another call cannot take over."""


class Packed:
    """The parameters of one launch in memory, and how this call's addresses get there."""

    def __init__(self, made: runtime.Started, sources: dict[int, int], tensors: Sequence[Any]) -> None:
        metadata = made.compiled.metadata
        if (
            metadata.num_ctas != 1
            or metadata.global_scratch_size
            or metadata.profile_scratch_size
            or metadata.launch_pdl
            or metadata.launch_cooperative_grid
        ):
            raise NotReplayable
        self._compiled = made.compiled  # keeps the kernel loaded
        self._function = ctypes.c_void_p(made.compiled.function)
        self._config = _Config(*made.grid, 32 * metadata.num_warps, 1, 1, metadata.shared)
        self._config_at = ctypes.byref(self._config)
        leaves = list(_leaves(made, sources, tensors))
        self._lay_out([*leaves, *[_Leaf("i64", 0, None)] * 2])
        for x in self._maps:  # a Triton whose encoder is another one shows itself here, not in a call
            x.at(tensors[x.source].data_ptr())
        self._writing = threading.Lock()

    def _lay_out(self, leaves: list[_Leaf]) -> None:
        """Tensor maps first, then addresses, then numbers, so that one write reaches all that changes."""
        maps = [i for i, x in enumerate(leaves) if x.kind == "map"]
        moving = [i for i, x in enumerate(leaves) if x.kind != "map" and x.source is not None]
        still = [i for i, x in enumerate(leaves) if x.kind != "map" and x.source is None]
        end = _MAP_BYTES * len(maps) + 8 * (len(moving) + len(still))
        self._memory = ctypes.create_string_buffer(end + _MAP_ALIGNMENT)
        self._first = at = -ctypes.addressof(self._memory) % _MAP_ALIGNMENT
        offsets = {}
        for i in (*maps, *moving, *still):
            offsets[i] = at
            at += _MAP_BYTES if leaves[i].kind == "map" else 8
        for i in still:
            struct.pack_into(f"={_FORMATS[leaves[i].kind]}", self._memory, offsets[i], leaves[i].value)
        base = ctypes.addressof(self._memory)
        self._places = (ctypes.c_void_p * len(leaves))(*(base + offsets[i] for i in range(len(leaves))))
        self._maps = tuple(_Map(leaves[i].source or 0, leaves[i].value, {}) for i in maps)
        self._write = struct.Struct(f"={f'{_MAP_BYTES}s' * len(maps)}{len(moving)}Q").pack_into
        self._moving = [leaves[i].source or 0 for i in moving]

    def start(self, addresses: Sequence[int], stream: int) -> int:
        """The driver's answer, 0 if the kernel is on its way."""
        changing: list[Any] = [x.at(addresses[x.source]) for x in self._maps]
        changing += [addresses[i] for i in self._moving]
        with self._writing:
            self._write(self._memory, self._first, *changing)
            self._config.stream = stream
            return _driver(self._config_at, self._function, self._places, None)


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


def _driver(*launch: Any) -> int:
    """cuLaunchKernelEx of the driver that torch has loaded, found when it is first needed."""
    global _driver
    _driver = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    return _driver(*launch)


def _fill(address: int, byte: int, size: int, stream: int) -> int:
    """cuMemsetD8Async, found likewise."""
    global _fill
    _fill = ctypes.CDLL("libcuda.so.1").cuMemsetD8Async
    _fill.argtypes = ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
    return _fill(address, byte, size, stream)


def _leaves(made: runtime.Started, sources: dict[int, int], tensors: Sequence[Any]) -> Iterator[_Leaf]:
    """The parameters of a launch in order, as the compiled kernel takes them."""
    maps = iter(getattr(made.compiled.metadata, "tensordesc_meta", None) or ())
    kinds = made.compiled.src.signature
    for name, value in zip(kinds, made.arguments, strict=False):
        yield from _flat(name, kinds[name], value, maps, sources, tensors)


def _flat(
    name: str, kind: Any, value: Any, maps: Iterator[Any], sources: dict[int, int], tensors: Sequence[Any]
) -> Iterator[_Leaf]:
    if isinstance(kind, tuple):
        for field, part, each in zip(getattr(value, "_fields", value), kind, value, strict=True):
            inner = field if name == "x" else name  # operands have names of their own
            yield from _flat(inner, part, each, maps, sources, tensors)
    elif hasattr(value, "block_shape"):  # a tensor descriptor, of Triton or of Gluon
        meta = next(maps, None)
        if meta is None or meta["fp4_padded"]:
            raise NotReplayable
        source = _source(name, value.base, sources, tensors)
        how = meta["swizzle"], meta["elem_size"], meta["elem_type"], meta["block_size"]
        shape, strides = tuple(value.shape), tuple(value.strides)
        yield _Leaf("map", (*how, shape, strides, int(value.padding == "nan")), source)
        yield from (_Leaf("i32", n, None) for n in shape)
        yield from (_Leaf("i64", n, None) for n in strides)
    elif kind == "constexpr":
        return
    elif isinstance(value, torch.Tensor):
        yield _Leaf("u64", 0, _source(name, value, sources, tensors))
    elif kind in _FORMATS:
        yield _Leaf(kind, value, None)
    else:
        raise NotReplayable


def _source(name: str, x: Tensor, sources: dict[int, int], tensors: Sequence[Any]) -> int:
    """The tensor of the call that `x` is: a known one, memory that it allocated for itself, or the operand of
    that name."""
    source = sources.get(id(x), sources.get(x.data_ptr()))
    if source is not None:
        return source
    source = _NAMES.get(name)
    operand = None if source is None else tensors[source]
    if source is None or operand is None or operand.data_ptr() != x.data_ptr():
        raise NotReplayable  # a copy, or an operand that is not replayed
    return source


def _encoded(
    address: int, swizzle: int, size: int, kind: int, box: Any, shape: Any, strides: Any, padding: int
) -> bytes:
    """The bytes of a tensor map, by Triton's own encoder."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    utils = triton.runtime.driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor", None) or getattr(utils, "fill_tma_descriptor_tiled", None)
    if encode is None:
        raise NotReplayable
    kind = TMA_DTYPE_DEVICE_TO_HOST[kind]
    made = encode(address, swizzle, size, kind, list(box), list(shape), list(strides), padding)
    if type(made).__basicsize__ != 2 * _MAP_BYTES:  # an object's head, then the map at its alignment
        raise NotReplayable
    return ctypes.string_at(id(made) + _MAP_BYTES, _MAP_BYTES)


_rooms: dict[tuple[int, int], Tensor] = {}  # by device and stream, whose calls follow one another
_launching = threading.Lock()  # the launches of a call that share a room stand together


class Launches(NamedTuple):
    """All launches of a call of one size, and the memory that it needs between them."""

    packed: tuple[Packed, ...]
    size: int  # bytes
    offsets: tuple[int, ...]  # of scratch tensors in them
    zeros: tuple[tuple[int, int], ...]  # offset and bytes of what is 0 at first
    words: bool  # does it take the words of its stream?

    def start(self, addresses: list[int], device: torch.device) -> bool:
        """Are they on their way? `addresses` are those of the call's operands and results."""
        index: int = device.index  # type: ignore[assignment]
        stream = torch._C._cuda_getCurrentRawStream(index)
        addresses.append(runtime.words(device).data_ptr() if self.words else 0)
        if not self.size:
            return self._start(addresses, 0, stream)
        if self.size > _MOST_ROOM or torch._C._cuda_isCurrentStreamCapturing():
            own = torch.empty(self.size, dtype=torch.uint8, device=device)
            return self._start(addresses, own.data_ptr(), stream)
        with _launching:
            room = _rooms.get((index, stream))
            if room is None or len(room) < self.size:
                if len(_rooms) >= _KEPT_ROOMS:
                    _rooms.clear()  # goes to later allocations of its stream alone
                room = _rooms[index, stream] = torch.empty(self.size, dtype=torch.uint8, device=device)
            return self._start(addresses, room.data_ptr(), stream)

    def _start(self, addresses: list[int], first: int, stream: int) -> bool:
        """`first`: where the call's own memory begins."""
        addresses += [first + offset for offset in self.offsets]
        for offset, size in self.zeros:
            if _fill(first + offset, 0, size, stream):
                return False
        return not any(launch.start(addresses, stream) for launch in self.packed)


class Replay(NamedTuple):
    """The launches of a forward call, and room for its results."""

    launches: Launches
    place: tuple[Any, Any] | None  # shape and strides of out; None: those of q

    def __call__(self, tensors: tuple[Tensor, ...], need_lse: bool) -> Any:
        """(out, lse), or None where the driver does not start a kernel."""
        q = tensors[Q]
        if self.place is None:
            out = torch.empty_like(q)
        else:
            out = torch.empty_strided(*self.place, dtype=q.dtype, device=q.device)
        lse = NO_LSE
        addresses = [x.data_ptr() for x in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if bits & _ALIGNED:
            return None
        addresses[OUT:OUT] = out.data_ptr(), 0
        if need_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
            addresses[LSE] = lse.data_ptr()
        if len(tensors) == OUT:
            addresses += 0, 0  # no table, no lengths
        return (out, lse) if self.launches.start(addresses, q.device) else None


class Repeat:
    """Calls that differ in addresses alone. The first took the whole way, the second is recorded, the others
    are replayed."""

    def __init__(self, launch: Launch, args: Arguments) -> None:
        self.launch, self.args = launch, args._replace(page_table=None, kv_lens=None)
        self.replay: Replay | None = None
        self.recorded = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, Tensor] | None:
        """(out, lse) of q, k, v, and of a page table and lengths if k and v are pools; None if the call needs
        the whole way."""
        index = tensors[Q].device.index
        if index != torch._C._cuda_getDevice() or runtime.hooked():
            return None
        if not self.recorded:
            return self.record(tensors)
        return None if self.replay is None else self.replay(tensors, self.args.need_lse)

    def record(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Makes the call as its row does, and keeps what it launched."""
        args = self.args
        q, k, v, *others = tensors
        if others:
            q, k, v = q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2)
            args = args._replace(page_table=others[0], kv_lens=others[1])
        out, lse = outputs(q, v, args.need_lse)
        with runtime.recorded() as log:
            self.launch.run(self.launch, q, k, v, out, lse, args)  # type: ignore[misc]
        if others:
            out, lse = out.squeeze(2), lse.squeeze(2) if args.need_lse else lse
        self.replay = _replay(log, (*tensors[:3], out, lse if args.need_lse else None, *others))
        self.recorded = True
        return out, lse


def _replay(log: runtime.Log, tensors: tuple[Any, ...]) -> Replay | None:
    q, _, _, out, *_ = tensors
    launches = _launches(log, (*tensors, *(None,) * (OPERANDS - len(tensors))), {})
    if launches is None:
        return None
    alike = q.shape == out.shape and q.is_contiguous()
    return Replay(launches, None if alike else (tuple(out.shape), out.stride()))


def _launches(log: runtime.Log, tensors: tuple[Any, ...], sources: dict[int, int]) -> Launches | None:
    """Launches in `log` of a call with these operands and results; None if another call cannot take them
    over. `sources`: places of tensors, by identity or address; none is another's."""
    aligned = all(x is None or x.data_ptr() & _ALIGNED == 0 for x in tensors)
    if torch.version.hip or not (log.started and log.complete and aligned):
        return None
    words, offsets, zeros, size = len(tensors), [], [], 0
    sources[id(log.words)] = words
    for i, x in enumerate(log.scratch):
        sources[id(x)] = sources[x.data_ptr()] = words + 1 + i
        offsets.append(size)
        if i in log.zeros:
            zeros.append((size, x.nbytes))
        size += -(-x.nbytes // _SCRATCH_UNIT) * _SCRATCH_UNIT
    tensors = (*tensors, log.words, *log.scratch)
    try:
        packed = tuple(Packed(made, sources, tensors) for made in log.started)
    except NotReplayable:
        return None
    return Launches(packed, size, tuple(offsets), tuple(zeros), log.words is not None)


def _is_current(device: torch.device) -> bool:
    return device.type == "cuda" and device.index == torch._C._cuda_getDevice()


class Gradients:
    """Backward calls of a route that differ in addresses alone. The first of its kind takes the whole way,
    the second is recorded, the others are replayed."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Launches, tuple[Any, ...]] | None] = {}
        self.met: set[Any] = set()

    def __call__(
        self, given: tuple[Tensor | None, ...], args: tuple[Any, ...], make: Callable[[], Any]
    ) -> Any:
        """Tensors, or None, in a tuple: what `make` returns, all of it made of `given` and `args`."""
        device = given[0].device  # type: ignore[union-attr]
        if not _is_current(device) or runtime.hooked():
            return make()
        given += tuple(x for x in args if isinstance(x, torch.Tensor))
        numbers = (type(x) if isinstance(x, torch.Tensor) else x for x in args)
        key = *numbers, *(x if x is None else (x.dtype, x.shape, x.stride()) for x in given)
        if key not in self.known:
            return self._meet(key, given, make)
        found = self.known[key]
        if found is None:
            return make()
        launches, places = found
        made = tuple(x and torch.empty_strided(x[0], x[1], dtype=x[2], device=device) for x in places)
        addresses = [0 if x is None else x.data_ptr() for x in (*given, *made)]
        bits = 0
        for address in addresses:
            bits |= address
        return make() if bits & _ALIGNED or not launches.start(addresses, device) else made

    def _meet(self, key: Any, given: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.met:
            if len(self.met) >= _KEPT_CALLS:
                self.met.clear()
                self.known.clear()
            self.met.add(key)
            return make()
        operands = [id(x) for x in given if x is not None]
        if len(set(operands)) < len(operands):
            return make()  # one tensor twice, which another call may have as two
        with runtime.recorded() as log:
            made = make()
        tensors = (*given, *made)
        sources = {id(x): i for i, x in enumerate(tensors) if x is not None}
        launches = _launches(log, tensors, sources)
        places = tuple(x if x is None else (x.shape, x.stride(), x.dtype) for x in made)
        self.known[key] = None if launches is None else (launches, places)
        return made
