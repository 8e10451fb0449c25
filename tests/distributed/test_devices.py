"""What the host of a device does in a call. Meta tensors stand for those of a GPU: the host cannot read them,
and no CPU tensor may stand beside them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyflash import parallel
from polyflash.parallel import calls, cost, exchange, ring, works
from polyflash.parallel.comm import Team, flat
from polyflash.parallel.schedule import Shards

ROWS, RANKS, MEMBERS = 4096, 4, (1024, 16, 0, 3056)


class Mute(Team):
    """One rank of several that get nothing from one another; what is under way keeps its memory."""

    def __init__(self, rank: int, size: int = RANKS) -> None:
        self.rank, self.size, self.sent, self.calls = rank, size, 0, 0
        self.device = torch.device("cpu")

    def exchange(self, sends: Any, receives: Any, what: str) -> Callable[[], None]:
        kept = [x.contiguous() for _, x in sends]
        return kept.clear

    def gather(self, x: Tensor, what: str) -> Callable[[], Tensor]:
        kept, whole = [x.contiguous()], x.new_empty((self.size, *x.shape))
        return lambda: (kept.clear(), whole)[1]  # type: ignore[func-returns-value]

    def swap(self, parts: Any, shapes: Any, what: str) -> Callable[[], list[Tensor]]:
        kept, into = [flat(parts)], [parts[0].new_empty(shape) for shape in shapes]
        return lambda: (kept.clear(), into)[1]  # type: ignore[func-returns-value]


class Crossings(TorchDispatchMode):
    """Names of the operations whose operands or results are on two devices, or that read one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        tensors = [x for x in (*args, out) if isinstance(x, Tensor) and (x.ndim or "copy" in str(func))]
        if len({x.device.type for x in tensors}) > 1 or "local_scalar" in str(func):
            self.found.append(str(func))
        return out


class Traffic(TorchDispatchMode):
    """Bytes that operations other than attention's read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        name = str(func)
        if not ("polyflash" in name or "empty" in name or (func.is_view and "copy" not in name)):
            given = (*args, *(kwargs or {}).values(), out)
            flat = [x for y in given for x in (y if isinstance(y, (list, tuple)) else (y,))]
            self.bytes += sum(x.numel() * x.element_size() for x in flat if isinstance(x, Tensor))
        return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "method, most", [("ring", (9.5, 12.5)), ("all_gather", (7.0, 20.0)), ("ulysses", (16.5, 16.0))]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_results_of_two_ranks_pass_through_memory_few_times(
    method: str, most: tuple[float, float], rank: int, packed: bool, monkeypatch: pytest.MonkeyPatch
):
    """Forward and backward, in sizes of q, of which k and v are a quarter each: no float32 copy of a result
    or of a gradient of q is made."""
    monkeypatch.setattr(works, "launch_of", lambda q, k, v, args: (None, args))
    monkeypatch.setattr(calls, "bounded", lambda bounds: MEMBERS)
    bounds = torch.empty(len(MEMBERS) + 1, dtype=torch.int32, device="meta")
    how: dict[str, Any] = {"group": Mute(rank, 2), "method": method, "handshake": False, "causal": True}
    for _ in range(2):
        shapes = [(ROWS // 2, h, 128) if packed else (1, h, ROWS // 2, 128) for h in (8, 2, 2)]
        q, k, v = (torch.empty(x, dtype=torch.bfloat16, device="meta", requires_grad=True) for x in shapes)
        moved = Traffic(), Traffic()
        with moved[0]:
            if packed:
                out = parallel.attention_varlen(q, k, v, bounds, bounds, **how)
            else:
                out = parallel.attention(q, k, v, seqlens=(ROWS, ROWS), **how)
        dout = torch.empty_like(out)
        with moved[1]:
            out.backward(dout)  # type: ignore[no-untyped-call]
    for x, limit in zip(moved, most, strict=True):
        assert x.bytes <= limit * q.numel() * q.element_size(), x.bytes / (q.numel() * q.element_size())


class Room(TorchDispatchMode):
    """Bytes of tensors that are there at a time beside given ones: now, and at most."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.known: dict[int, Any] = {x.untyped_storage()._cdata: None for x in given}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in self.known:
                size = x.untyped_storage().nbytes()
                self.known[key] = weakref.ref(x.untyped_storage(), partial(self._gone, key, size))
                self.now += size
                self.most = max(self.most, self.now)
        return out

    def _gone(self, key: int, size: int, of: Any) -> None:
        del self.known[key]
        self.now -= size


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("packed", [False, True])
def test_both_passes_hold_what_the_plan_says(
    method: str, ranks: int, heads: tuple[int, int], packed: bool, monkeypatch: pytest.MonkeyPatch
):
    """Beside q, k, v and dout, with dq as a kernel of a GPU sums it; two heads are gathered at a time."""

    def differentiate(work: Any, results: Any, q: Tensor, k: Tensor, v: Tensor, needs: Any) -> Any:
        made = tuple(map(torch.empty_like, (q, k, v)))
        q.new_empty(q.shape[1] * q.shape[2] * (q.shape[3] * 4 + 16), dtype=torch.uint8)
        return *made, None, None

    members = tuple(16 * n for n in MEMBERS)
    monkeypatch.setattr(ring, "differentiate", differentiate)
    monkeypatch.setattr(ring, "merge_into", lambda *given: None)
    monkeypatch.setattr(calls, "bounded", lambda bounds: members)
    for of in (exchange, cost):
        monkeypatch.setattr(of, "GATHERED_BYTES", 2 * 16 * ROWS * 128 * 4)
    bounds = torch.empty(len(members) + 1, dtype=torch.int32, device="meta")
    cu = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds} if packed else {}
    rows, taken, plan = 16 * ROWS, [], 0
    for rank in range(ranks):
        held = Shards(members if packed else (rows,), ranks).held(rank)
        q, k, v, dout = (
            torch.empty((held, h, 128) if packed else (1, h, held, 128), dtype=torch.bfloat16, device="meta")
            for h in (*heads, heads[1], heads[0])
        )
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        how: Any = {"group": Mute(rank, ranks), "method": method, "handshake": False, "causal": True, **cu}
        with Room(q, k, v, dout) as room:
            if packed:
                parallel.attention_varlen(q, k, v, **how).backward(dout)  # type: ignore[union-attr]
            else:
                parallel.attention(q, k, v, seqlens=(rows, rows), **how).backward(dout)  # type: ignore[union-attr]
        taken.append(room.most)
        if rank == 0:
            plan = parallel.explain(q, k, v, ranks=ranks, method=method, causal=True, **cu).working_bytes  # type: ignore[arg-type]
    assert 0.9 * plan <= max(taken) <= 1.1 * plan, (taken, plan)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_a_second_call_neither_reads_a_device_nor_sends_it_tables(
    method: str, packed: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(works, "launch_of", lambda q, k, v, args: (None, args))  # no row plans for meta
    monkeypatch.setattr(calls, "bounded", lambda bounds: MEMBERS)
    bounds = torch.empty(len(MEMBERS) + 1, dtype=torch.int32, device="meta")
    for mask in ({"causal": True}, {"causal": True, "window": (100, 0)}, {}):
        how: Any = {"group": Mute(1), "method": method, "handshake": False, **mask}
        shapes = [(ROWS // RANKS, h, 64) if packed else (1, h, ROWS // RANKS, 64) for h in (8, 2, 2)]
        for call in range(2):
            q, k, v = (
                torch.empty(x, dtype=torch.bfloat16, device="meta", requires_grad=True) for x in shapes
            )
            with Crossings() as crossings:
                if packed:
                    out = parallel.attention_varlen(q, k, v, bounds, bounds, **how)
                else:
                    out = parallel.attention(q, k, v, seqlens=(ROWS, ROWS), **how)
                out.sum().backward()
            assert q.grad is not None and out.is_meta
            assert not (call and crossings.found), (mask, crossings.found)
