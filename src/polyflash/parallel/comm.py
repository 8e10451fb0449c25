"""Bytes between the ranks of a group: torch.distributed's collectives, and one clear error when they fail.

Tensors travel as bytes, so that every dtype does on every backend; sums are made by whoever receives, in
float32 and in the order of ranks, so that bits repeat. On NCCL waiting holds the current stream, not the
host; there a watchdog of torch ends processes whose peers are gone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from polyflash.errors import SpecError, described, spec_error

ONE_MESSAGE, ALIGNED = 1 << 24, 16  # bytes
Sent = Sequence[tuple[int, Tensor]]  # peers, and what goes there
Shape = tuple[int, ...]


class Team:
    """The ranks of one process group. `sent` counts the bytes that this rank has sent to others."""

    def __init__(self, group: Any) -> None:
        self._group, self.rank, self.size = ref(group), dist.get_rank(group), dist.get_world_size(group)
        self.sent = self.calls = 0
        kinds = {x.type for x in getattr(group, "_device_types", ())}
        self.device = torch.device("cpu")  # of what the host reads
        if "cpu" not in kinds and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.meets = "nccl" in str(dist.get_backend_config(group))

    @property
    def group(self) -> Any:
        return self._group()

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, what goes to `device` or comes from it does not wait for what is computed there."""
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream(_aside))

    def _stream(self, of: WeakKeyDictionary[Team, torch.cuda.Stream]) -> torch.cuda.Stream:
        if self not in of:
            of[self] = torch.cuda.Stream()
        return of[self]

    def new_mark(self, x: Tensor) -> Any:
        """An event to record where `x` is there; None where nothing waits for a stream."""
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        return torch.cuda.Event() if x.is_cuda and not captured else None

    def beside(self, mark: Any) -> contextlib.AbstractContextManager[Any]:
        """Within it, exchanges wait for what was launched before `mark` was recorded, and not for what came
        later. `join` what they brought before it is read."""
        if mark is None:
            return contextlib.nullcontext()
        stream = self._stream(_beside)
        stream.wait_event(mark)
        return torch.cuda.stream(stream)

    def join(self, brought: Sequence[Tensor]) -> None:
        """Once the current stream has waited for an exchange: memory of both streams is not used again before
        the other one is done with it."""
        stream = torch.cuda.current_stream()
        _beside[self].wait_stream(stream)
        for x in brought:
            x.record_stream(stream)

    def exchange(self, sends: Sent, receives: Sequence[tuple[int, Tensor]], what: str) -> Callable[[], None]:
        """Starts sending, and receiving into given contiguous tensors; call the result to wait for all of
        it. Every pair of ranks names its tensors in the same order."""
        if self.meets:  # NCCL wants every rank in the first call of a group, and not all may send
            self.meets = False
            self.gather(torch.zeros(1, device="cuda"), what)()
        ops, kept, apart = [], [], []
        for verb, pairs in ((dist.isend, sends), (dist.irecv, receives)):
            made = [(peer, x) for peer, x in pairs if x.numel()]
            if _is_one_message(made):
                whole = flat([x for _, x in made])
                if verb is dist.irecv and whole.data_ptr() != made[0][1].data_ptr():
                    apart = list(
                        zip([x for _, x in made], whole.split([x.numel() for _, x in made]), strict=True)
                    )
                made = [(made[0][0], whole)]
            for peer, x in ((peer, _bytes(x)) for peer, x in made):
                kept.append(x)
                ops.append(dist.P2POp(verb, x, dist.get_global_rank(self.group, peer), self.group))
                self.sent += x.numel() if verb is dist.isend else 0
        with self._named(what):
            works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> None:
            with self._named(what):
                for work in works:
                    work.wait()
            for x, part in apart:
                x.copy_(part.view(x.shape))
            kept.clear()  # what is under way keeps its memory till here

        return wait

    def gather(self, x: Tensor, what: str) -> Callable[[], Tensor]:
        """Starts collecting tensors of one shape; call the result for (ranks, *x.shape)."""
        own = _bytes(x)
        whole = torch.empty(self.size * own.numel(), dtype=torch.uint8, device=x.device)
        self.sent += own.numel() * (self.size - 1)
        with self._named(what):
            work = _all_gather(whole, own, self.group, async_op=True)

        def wait() -> Tensor:
            with self._named(what):
                work.wait()
            return _shaped(whole, (self.size, *x.shape), x.dtype)

        return wait

    def swap(self, parts: Sequence[Tensor], shapes: Sequence[Shape], what: str) -> Callable[[], list[Tensor]]:
        """Starts sending part s to rank s; call the result for what each rank sent here, of given shapes."""
        kind, sizes = parts[0].dtype, [x.numel() * x.element_size() for x in parts]
        counts = [math.prod(shape) * kind.itemsize for shape in shapes]
        into = torch.empty(sum(counts), dtype=torch.uint8, device=parts[0].device)
        self.sent += sum(sizes) - sizes[self.rank]
        whole = flat(parts).view(torch.uint8)
        with self._named(what):
            work = dist.all_to_all_single(into, whole, counts, sizes, self.group, async_op=True)

        def wait() -> list[Tensor]:
            with self._named(what):
                work.wait()
            return [_shaped(x, shape, kind) for x, shape in zip(into.split(counts), shapes, strict=True)]

        return wait

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            why = str(error).strip().partition("\n")[0]
            text = (
                f"polyflash.parallel: rank {self.rank} of {self.size} got no answer while it {what}. Another "
                f"rank ended, hangs or made another call, and this group is of no more use. It said: {why}"
            )
            raise RuntimeError(text) from error


# The newer name, where torch has it: the older one warns there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def _bytes(x: Tensor) -> Tensor:
    x = x.detach()
    x = x if x.is_contiguous() else in_words([x])[0].contiguous()
    return x.view(-1).view(torch.uint8)


def _is_one_message(made: Sequence[tuple[int, Tensor]]) -> bool:
    """Do bytes for peers, or from them, go as one message, which costs the host one operation? Both ends see
    the same sizes, and so decide alike."""
    sizes = [x.numel() * x.element_size() for _, x in made]
    alike = len(made) > 1 and len({(peer, x.dtype) for peer, x in made}) == 1
    return alike and sum(sizes) <= ONE_MESSAGE and not any(n % ALIGNED for n in sizes)


def flat(parts: Sequence[Tensor]) -> Tensor:
    """The elements of tensors one behind the other, copied unless they lie so."""
    first, end = parts[0], parts[0].storage_offset()
    lies = all(x.is_contiguous() for x in parts)
    for x in parts if lies else ():
        lies = lies and x.storage_offset() == end
        lies = lies and x.untyped_storage()._cdata == first.untyped_storage()._cdata
        end += x.numel()
    if lies:
        return first.detach().as_strided((end - first.storage_offset(),), (1,))
    whole = first.new_empty(sum(x.numel() for x in parts))
    for x, place in zip(parts, whole.split([x.numel() for x in parts]), strict=True):
        into, given = in_words([place.view(x.shape), x.detach()])
        into.copy_(given)
    return whole


def in_words(parts: Sequence[Tensor]) -> list[Tensor]:
    """Tensors whose last dimension is as long, as elements of 16 bytes where all are made of such: a GPU
    copies those of rows that are not side by side twice as fast."""
    for x in parts:
        size, width = x.element_size(), x.shape[-1] if x.ndim else 0
        least = ALIGNED // size if size < ALIGNED else 0
        fits = least and width and not width % least and x.stride(-1) == 1 and not x.is_complex()
        if not fits or x.storage_offset() % least or any(n % least for n in x.stride()[:-1]):
            return list(parts)
    return [x.view(torch.complex128) for x in parts]


def _shaped(x: Tensor, shape: Shape, kind: torch.dtype) -> Tensor:
    if x.storage_offset() % kind.itemsize:  # a view of wider elements starts at a multiple of their size
        x = x.clone()
    return x.view(kind).view(shape)


_aside: WeakKeyDictionary[Team, torch.cuda.Stream] = WeakKeyDictionary()  # of what the host reads
_beside: WeakKeyDictionary[Team, torch.cuda.Stream] = WeakKeyDictionary()
_teams: WeakKeyDictionary[Any, Team] = WeakKeyDictionary()


def teams_of(group: Any, mesh: Any) -> tuple[Team, Team | None]:
    """The ranks that share the sequence, and those that share the heads of each of its shards, if `mesh` has
    two dimensions."""
    if group is not None and mesh is not None:
        raise spec_error("mesh", "a mesh and a group", "one of both", "Drop group=.")
    if isinstance(group, Team):
        return group, None
    if isinstance(group, tuple) and all(isinstance(x, Team) for x in group):
        return group  # type: ignore[return-value]
    if not (dist.is_available() and dist.is_initialized()):
        raise SpecError("group: torch.distributed is not initialised. Call init_process_group() first")
    if mesh is not None:
        if getattr(mesh, "ndim", 0) not in (1, 2):
            wanted = "a DeviceMesh of 1 dimension, or of 2: (ranks of the ring, ranks that share heads)"
            raise spec_error("mesh", described(mesh), wanted, "Use mesh['cp'].")
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    else:
        groups = [dist.group.WORLD if group is None else group]
    if not all(isinstance(x, dist.ProcessGroup) for x in groups):
        change = "Every rank that calls belongs to it."
        raise spec_error("group", described(group), "a ProcessGroup that this rank is in", change)
    for x in groups:
        if x not in _teams:
            _teams[x] = Team(x)
    return _teams[groups[0]], _teams[groups[1]] if len(groups) == 2 else None
