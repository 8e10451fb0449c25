"""What the host of a device does in a call. Meta tensors stand for those of a GPU: the host cannot read them,
and no CPU tensor may stand beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyflash import parallel
from polyflash.parallel import calls, gradients
from polyflash.parallel.comm import Team

ROWS, RANKS, MEMBERS = 4096, 4, (1024, 16, 0, 3056)


class Mute(Team):
    """One rank of several that get nothing from one another."""

    def __init__(self, rank: int, size: int = RANKS) -> None:
        self.rank, self.size, self.sent, self.calls = rank, size, 0, 0
        self.device = torch.device("cpu")

    def exchange(self, sends: Any, receives: Any, what: str) -> Callable[[], None]:
        return lambda: None

    def gather(self, x: Tensor, what: str) -> Callable[[], Tensor]:
        return lambda: x.new_empty((self.size, *x.shape))

    def swap(self, parts: Any, shapes: Any, what: str) -> Callable[[], list[Tensor]]:
        return lambda: [parts[0].new_empty(shape) for shape in shapes]


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
    "method, most", [("ring", (9.5, 9.0)), ("all_gather", (7.0, 20.0)), ("ulysses", (12.0, 11.5))]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_results_of_two_ranks_pass_through_memory_few_times(
    method: str, most: tuple[float, float], rank: int, packed: bool, monkeypatch: pytest.MonkeyPatch
):
    """Forward and backward, in sizes of q, of which k and v are a quarter each: no float32 copy of a result
    or of a gradient of q is made."""
    monkeypatch.setattr(gradients, "launch_of", lambda q, k, v, args: (None, args))
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_a_second_call_neither_reads_a_device_nor_sends_it_tables(
    method: str, packed: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gradients, "launch_of", lambda q, k, v, args: (None, args))  # no row plans for meta
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
