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
from functools import reduce
from itertools import chain, islice
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from polyflash.backends.triton import runtime
from polyflash.likeness import alike, unwatched
from polyflash.results import NO_LSE, empty_of, outputs
from polyflash.spec import CODE_TABLES
from polyflash.storages import hold, span

if TYPE_CHECKING:
    from torch import Tensor

    from polyflash.plan import Launch
    from polyflash.spec import Arguments

# which tensor of a forward call an address is of; words of the stream and scratch come behind
Q, K, V, TABLE, LENS, *CODED, OUT, LSE = range(11)
_NAMES = {
    **dict.fromkeys(("q", "q0", "q1"), Q),
    **dict.fromkeys(("k", "k0", "k1"), K),
    **dict.fromkeys(("v", "v_view", "v0", "v1"), V),
    **{"out": OUT, "out_view": OUT, "lse": LSE, "page_table": TABLE, "kv_lens": LENS},
    **{"cu_seqlens_q": TABLE, "cu_seqlens_k": LENS},  # members have neither pages nor lengths
    **dict(zip(CODE_TABLES, CODED, strict=True)),
}
_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f"}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 128  # of a CUtensorMap
_KEPT_MAPS = 64
_SCRATCH_UNIT = 256  # bytes
_MOST_ROOM = 32 << 20  # bytes that a stream keeps for calls to come
_KEPT_ROOMS = 16
_KEPT_CALLS = 256  # backward, of a route
_KEPT_CHECKS = 4  # of these sizes
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

    def encode(self, address: int) -> bytes:
        if len(self.encoded) >= _KEPT_MAPS:
            self.encoded.clear()
        made = self.encoded[address] = _encoded(address, *self.encoding)
        return made


class NotReplayable(Exception):
    """A launch has something that another call cannot take over."""


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


def _config(made: runtime.Started) -> _Config:
    m = made.compiled.metadata
    odd = m.global_scratch_size or m.profile_scratch_size or m.launch_pdl or m.launch_cooperative_grid
    if odd or m.num_ctas != 1:
        raise NotReplayable
    return _Config(*made.grid, 32 * m.num_warps, 1, 1, m.shared)


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


class Launches:
    """All launches of a call of one size: their parameters in memory, and what the call needs between them.
    Launches share tensor maps and addresses, which come first, so that one write reaches all that changes."""

    def __init__(self, log: runtime.Log, sources: dict[int, int], tensors: Sequence[Any]) -> None:
        """`sources`: places among `tensors`, of which the words and scratch of `log` are the last."""
        self._compiled = [x.compiled for x in log.started]  # keeps the kernels loaded
        self._words = log.words is not None  # does it take the words of its stream?
        zeros, self._size, self._offsets = [], 0, []  # bytes, and where scratch tensors are in them
        for i, x in enumerate(log.scratch):
            zeros += [(self._size, x.nbytes)] if i in log.zeros else []
            self._offsets.append(self._size)
            self._size += -(-x.nbytes // _SCRATCH_UNIT) * _SCRATCH_UNIT
        self._zeros = tuple(zeros)  # offset and bytes of what is 0 at first
        self._writing = _launching if 0 < self._size <= _MOST_ROOM else threading.Lock()
        self._configs = tuple(map(_config, log.started))
        self._stream = 0
        leaves = [[*_leaves(x, sources, tensors), *[_Leaf("i64", 0, None)] * 2] for x in log.started]
        functions = (ctypes.c_void_p(x.function) for x in self._compiled)
        places = self._lay_out(leaves, tensors)
        self._launches = tuple(zip(map(ctypes.byref, self._configs), functions, places, strict=True))

    def _lay_out(self, launches: list[list[_Leaf]], tensors: Sequence[Any]) -> list[Any]:
        """Lays all parameters out: the places of those of each launch."""
        leaves = list(chain(*launches))
        maps = [x for i, x in enumerate(leaves) if x.kind == "map" and x not in leaves[:i]]
        numbers = sum(x.source is None for x in leaves)
        end = _MAP_BYTES * len(maps) + 8 * (len(tensors) + numbers)
        self._memory = ctypes.create_string_buffer(end + _MAP_ALIGNMENT)
        base = ctypes.addressof(self._memory)
        self._first = -base % _MAP_ALIGNMENT
        addresses = self._first + _MAP_BYTES * len(maps)
        number, places = addresses + 8 * len(tensors), []
        for x in leaves:
            if x.source is None:
                struct.pack_into(f"={_FORMATS[x.kind]}", self._memory, number, x.value)
                places.append(base + number)
                number += 8
            else:
                at = self._first + _MAP_BYTES * maps.index(x) if x.kind == "map" else addresses + 8 * x.source
                places.append(base + at)
        self._write = struct.Struct(f"={f'{_MAP_BYTES}s' * len(maps)}{len(tensors)}Q").pack_into
        kept = [_Map(x.source or 0, x.value, {}) for x in maps]
        for m in kept:  # a Triton whose encoder is another one shows itself here, not in a call
            m.encode(tensors[m.source].data_ptr())
        self._maps = tuple((m.source, m.encoded.get, m.encode) for m in kept)
        left = iter(places)
        return [(ctypes.c_void_p * len(x))(*islice(left, len(x))) for x in launches]

    def start(self, addresses: list[int], device: torch.device) -> bool:
        """Are they on their way? `addresses` are those of the call's operands and results."""
        index: int = device.index  # type: ignore[assignment]
        stream = torch._C._cuda_getCurrentRawStream(index)
        # the default stream (0), which is never captured, is not asked: that takes as long as ten lines
        capturing = stream != 0 and torch._C._cuda_isCurrentStreamCapturing()
        if self._words:
            words = None if capturing else runtime.words_of.get((index, stream))
            words = runtime.words(device) if words is None else words  # kept: what follows must not take them
            addresses.append(words.data_ptr())
        else:
            addresses.append(0)
        with self._writing:
            if self._size:
                room = None if capturing else _rooms.get((index, stream))
                if room is None or room.nbytes < self._size:
                    room = torch.empty(self._size, dtype=torch.uint8, device=device)
                    if not (capturing or self._size > _MOST_ROOM):
                        if len(_rooms) >= _KEPT_ROOMS:
                            _rooms.clear()  # goes to later allocations of its stream alone
                        _rooms[index, stream] = room
                first = room.data_ptr()
                addresses += [first + offset for offset in self._offsets]
            maps = [known(addresses[i]) or encode(addresses[i]) for i, known, encode in self._maps]
            self._write(self._memory, self._first, *maps, *addresses)
            if stream != self._stream:
                self._stream = stream
                for config in self._configs:
                    config.stream = stream
            for offset, size in self._zeros:
                if _fill(first + offset, 0, size, stream):
                    return False
            for config_at, function, places in self._launches:
                if _driver(config_at, function, places, None):
                    return False
        return True


class Replay:
    """The launches of a forward call, and room for its results."""

    def __init__(self, launches: Launches, out: Tensor, lse: Tensor | None) -> None:
        """The results of a call, `lse` if it is wanted."""
        self.launches, self.start = launches, launches.start
        self.empty = empty_of(out.device)
        self.place, self.rows = _kind_of(out), None if lse is None else _kind_of(lse)

    def __call__(
        self, tensors: tuple[Tensor, ...], device: torch.device, coded: Sequence[int] = (0, 0, 0, 0)
    ) -> Any:
        """(out, lse), or None where the driver does not start a kernel. `coded`: addresses of tables."""
        q, k, v = tensors[:3]
        table, lens = (tensors[TABLE].data_ptr(), tensors[LENS].data_ptr()) if len(tensors) > 3 else (0, 0)
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), table, lens]
        odd = (addresses[Q] | addresses[K] | addresses[V] | table | lens) & _ALIGNED
        if odd or not all(addresses[: len(tensors)]):  # 0: of a tensor around another one
            return None
        addresses += coded
        out = self.empty(*self.place)
        lse = NO_LSE if self.rows is None else self.empty(*self.rows)
        addresses += out.data_ptr(), lse.data_ptr()
        return (out, lse) if self.start(addresses, device) else None


def _kind_of(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.stride(), x.dtype


class Repeat:
    """Calls that differ in addresses alone. The first took the whole way, the second is recorded, the others
    are replayed."""

    def __init__(self, launch: Launch, args: Arguments) -> None:
        self.packed = args.cu_seqlens_q is not None
        none: Any = dict.fromkeys(("page_table", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", *CODE_TABLES))
        self.launch, self.args = launch, args._replace(**none)
        self.plain = 3 if args.page_table is None and not self.packed else 5  # tensors that are no tables
        self.tables = [args.codes and getattr(args, name) is not None for name in CODE_TABLES]
        self.replay: Replay | None = None
        self.recorded = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, Tensor] | None:
        """(out, lse) of q, k, v, and of a page table and lengths if k and v are pools, of bounds if members
        are packed, of tables if they are codes; None if the call needs the whole way."""
        device = tensors[Q].device
        if device.index != torch._C._cuda_getDevice() or runtime.hooked():
            return None
        if self.replay is None:
            return self.record(tensors) if not self.recorded and all(x.data_ptr() for x in tensors) else None
        if not self.args.codes:
            return self.replay(tensors, device)
        at = [x.data_ptr() for x in tensors[self.plain :]]
        odd = 0 in at or reduce(or_, at) & _ALIGNED
        return None if odd else self.replay(tensors[: self.plain], device, self._placed(at, 0))

    def _placed(self, given: Sequence[Any], absent: Any) -> list[Any]:
        """Something of each table that there is, and what stands for those that are not."""
        left = iter(given)
        return [next(left) if there else absent for there in self.tables]

    def record(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Makes the call as its row does, and keeps what it launched."""
        coded: Any = self._placed(tensors[self.plain :], None)
        args, (q, k, v, *others) = self.args._replace(**dict(zip(CODE_TABLES, coded, strict=True))), tensors
        others = others[: self.plain - 3]
        if self.packed:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            args = args._replace(cu_seqlens_q=others[0], cu_seqlens_k=others[1])
        elif others:
            k, v = (k, v) if args.codes else (k.transpose(1, 2), v.transpose(1, 2))
            q, args = q.unsqueeze(2), args._replace(page_table=others[0], kv_lens=others[1])
        channels = self.launch.spec.head_dim_v if args.codes else v.shape[3]
        out, lse = outputs(q, channels, args.need_lse)
        with runtime.recorded() as log:
            self.launch.run(self.launch, q, k, v, out, lse, args)  # type: ignore[misc]
        if self.packed:
            out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0) if args.need_lse else lse
        elif others:
            out, lse = out.squeeze(2), lse.squeeze(2) if args.need_lse else lse
        rows = lse if args.need_lse else None
        launches = _launches(log, (*tensors[:TABLE], *(others or (None, None)), *coded, out, rows), {})
        if launches is not None:
            self.replay = Replay(launches, out, rows)
        self.recorded = _aligned(tensors)
        return out, lse


def _launches(log: runtime.Log, tensors: tuple[Any, ...], sources: dict[int, int]) -> Launches | None:
    """Launches in `log` of a call with these operands and results; None if another call cannot take them
    over. `sources`: places of tensors, by identity or address; none is another's."""
    if torch.version.hip or not (log.started and log.complete and _aligned(tensors)):
        return None
    sources[id(log.words)] = len(tensors)
    for i, x in enumerate(log.scratch, len(tensors) + 1):
        sources[id(x)] = sources[x.data_ptr()] = i
    try:
        return Launches(log, sources, (*tensors, log.words, *log.scratch))
    except NotReplayable:
        return None


def _aligned(tensors: Sequence[Any]) -> bool:
    """Can what is recorded of these tensors, or None, be replayed for others?"""
    return all(x is None or x.data_ptr() & _ALIGNED == 0 for x in tensors)


def _is_current(device: torch.device) -> bool:
    return device.type == "cuda" and device.index == torch._C._cuda_getDevice()


class Found:
    """The launches of a backward call, and room for what it makes."""

    def __init__(self, launches: Launches, made: tuple[Tensor | None, ...]) -> None:
        self.launches = launches
        self.places = tuple(x if x is None else (empty_of(x.device), *_kind_of(x)) for x in made)

    def __call__(self, given: tuple[Tensor | None, ...], device: torch.device) -> Any:
        """Starts them; what the call makes, or None where the driver starts no kernel."""
        made = tuple([x and x[0](*x[1:]) for x in self.places])
        addresses = [0 if x is None else x.data_ptr() for x in (*given, *made)]
        odd = reduce(or_, addresses) & _ALIGNED
        return None if odd or not self.launches.start(addresses, device) else made


class Calls:
    """Calls of a route that differ in addresses alone. The first of its kind takes the whole way, the second
    is recorded, the others are replayed."""

    def __init__(self) -> None:
        self.known: dict[Any, Found | None] = {}
        self.seen: dict[Any, tuple[Any, ...]] = {}  # by sizes: what tells a call without its key
        self.met: set[Any] = set()
        # by sizes, the last arguments without a tensor, and their part of keys
        self.last: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def again(self, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, args: Arguments) -> Any:
        """dq, dk and dv of a call like one of the last, all three wanted, for whom torch compares in one go
        what `torch_ops` and a key ask; None if it is to be made as others. `saved`: q, k, v, out, lse."""
        q, k, v, out, lse = saved
        given = (q, k, v, out, dout, lse) if dlse is None else (q, k, v, out, dout, lse, dlse)
        for check, known, reaches, found in self.seen.get((q.shape, k.shape, dlse is None), ()):
            if known is args and check(*given):
                device = q.device
                if not _is_current(device) or runtime.hooked() or torch.is_grad_enabled() or not unwatched():
                    return None
                return found((*given, None)[:7], device) if hold(given, reaches) else None
        return None

    def __call__(
        self, given: tuple[Any, ...], args: Any, make: Callable[[], Any], needs: Sequence[bool] = ()
    ) -> Any:
        """Tensors, or None, in a tuple: what `make` returns, all of it made of `given`, `args`, `needs`. Of
        `given`, whose first are q and k, the dtypes are the route's and shapes follow from those two; some
        may be written to. Those of gradients, which alone have `needs`, are q, k, v, out, dout, lse, dlse."""
        q, k, *_ = given
        device = q.device
        if not _is_current(device) or runtime.hooked() or runtime.recording():
            return make()
        sizes = q.shape, k.shape, given[-1] is None
        last, numbers = self.last.get(sizes, (None, ()))
        if args is not last:
            tensors = tuple(x for x in args if isinstance(x, torch.Tensor))
            numbers = tuple((x.dtype, x.shape) if isinstance(x, torch.Tensor) else x for x in args)
            given += tensors
            if not tensors:
                self.last[sizes] = args, numbers
        names = [id(x) for x in given if x is not None]  # one tensor twice: another call may have it as two
        same = () if len(set(names)) == len(names) else tuple(map(names.index, names))
        key = numbers, tuple(needs), sizes, same, *[x if x is None else x.stride() for x in given]
        found = self.known.get(key)
        if found is not None and args is last and needs and all(needs[:3]) and not any(needs[3:]):
            self._see(sizes, args, [x for x in given if x is not None], found)
        return self._made(key, given, make)

    def by(self, key: Any, given: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The same by a key of the caller's, which tells all of `given` but addresses."""
        if not _is_current(given[0].device) or runtime.hooked() or runtime.recording():
            return make()
        return self._made(key, given, make)

    def _made(self, key: Any, given: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.known:
            return self._meet(key, given, make)
        found = self.known[key]
        made = None if found is None else found(given, given[0].device)
        return make() if made is None else made

    def _see(self, sizes: Any, args: Any, given: list[Tensor], found: Found) -> None:
        """Has calls like this one, which came again, found by `again`."""
        others = self.seen.get(sizes, ())
        if any(known is args and made is found for _, known, _, made in others):
            return
        check = alike(*given)
        if check is not None:
            self.seen[sizes] = ((check, args, tuple(map(span, given)), found), *others[: _KEPT_CHECKS - 1])

    def _meet(self, key: Any, given: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.met:
            if len(self.met) >= _KEPT_CALLS:
                for kept in (self.met, self.known, self.seen, self.last):
                    kept.clear()
            self.met.add(key)
            return make()
        with runtime.recorded() as log:
            made = make()
        tensors = (*given, *made)
        sources = {id(x): i for i, x in enumerate(tensors) if x is not None}
        launches = _launches(log, tensors, sources)
        if _aligned(tensors):  # else a later call is recorded
            self.known[key] = None if launches is None else Found(launches, made)
        return made
