"""Two ranks put keys in order: their calls, what they send in either pass, and when they wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import parallel, torch_ops
from polyflash.parallel import calls, exchange, joins, ring, schedule, works
from polyflash.parallel.comm import flat, in_words
from polyflash.parallel.schedule import Shards
from polyflash.spec import Phase
from tests.distributed import simulated
from tests.distributed.simulated import Simulated, simulate
from tests.distributed.test_devices import Mute

SHORT = (64, 32, 32, *(8,) * 8, *(2,) * 32)  # of 256 rows: the longest is cut, and few keys go one way
LONG = tuple(16 * n for n in (2, 8, 1, 4, 16, 3, 2, 1, 12, 4, 2, 6, 1, 2))


def tensors(shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw).to(kind) for _ in range(4)]


def both_passes(call: Any, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = call(*leaves)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[list-item]


@pytest.mark.parametrize("batch, expected", [(1, 2), (2, 3)])
def test_a_rank_takes_one_call_for_both_chunks(batch: int, expected: int):
    """Of one batch entry: its rows are packed members then; results are those of two calls."""
    whole = tensors((batch, 2, 67, 16))
    how: dict[str, Any] = {"method": "ring", "causal": True, "backend": "torch"}

    def body(group: Any) -> list[Tensor]:
        *qkv, dout = (parallel.split(x, group=group) for x in whole)
        found = both_passes(lambda *x: parallel.attention(*x, group=group, **how), qkv, dout)
        return [parallel.restore(x, group=group) for x in found]

    before = polyflash.counters()["calls"]
    results, _ = simulate(2, body)
    ran = {row: n - before.get(row, 0) for row, n in polyflash.counters()["calls"].items()}
    assert (ran["torch/forward"], ran["torch/backward"]) == (expected, expected)
    near = both_passes(lambda *x: polyflash.attention(*x, causal=True), whole[:3], whole[3])
    for got, want in zip(results[0], near, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def packed(group: Any, whole: list[Tensor], bounds: Tensor, times: int = 1) -> list[Tensor]:
    cut: dict[str, Any] = {"group": group, "dim": 0, "cu_seqlens": bounds}
    *qkv, dout = (parallel.split(x, **cut) for x in whole)
    how: dict[str, Any] = {"group": group, "method": "ring", "causal": True}
    for _ in range(times):
        found = both_passes(lambda *x: parallel.attention_varlen(*x, bounds, bounds, **how), qkv, dout)
    return [parallel.restore(x, **cut) for x in found]


@pytest.mark.parametrize("most", [1 / 3, 0])
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("members", [None, SHORT])
def test_few_keys_that_arrive_stay_for_the_backward_pass(
    members: tuple[int, ...] | None, heads: int, most: float, monkeypatch: pytest.MonkeyPatch
):
    """Few beside q, out and own keys: their gradients return, they do not come again; else they do."""
    joins.stay.cache_clear()
    monkeypatch.setattr(joins, "MOST_KEPT", most)
    monkeypatch.setattr(calls, "_plans", {})
    bounds = None if members is None else torch.tensor([0, *members]).cumsum(0).int()
    draw = torch.Generator().manual_seed(2)
    shapes = [(256, h, 16) if members else (1, h, 256, 16) for h in (heads, 2, 2, heads)]
    whole = [torch.randn(shape, generator=draw) for shape in shapes]

    def body(group: Any) -> list[Tensor]:
        if bounds is not None:
            return packed(group, whole, bounds)
        *qkv, dout = (parallel.split(x, group=group) for x in whole)
        how: dict[str, Any] = {"group": group, "method": "ring", "causal": True}
        found = both_passes(lambda *x: parallel.attention(*x, **how), qkv, dout)
        return [parallel.restore(x, group=group) for x in found]

    results, groups = simulate(2, body)
    said = [what for _, _, what, _ in groups[0].wires.log if "step" in what or "returned" in what]
    joins.stay.cache_clear()
    again = [] if most and (heads == 8 or members is not None) else ["ran the backward pass, step 1"]
    assert list(dict.fromkeys(said)) == ["ran the forward pass, step 1", *again, "returned gradients of keys"]
    if bounds is not None:
        one = lambda *x: polyflash.attention_varlen(*x, bounds, bounds, causal=True)  # noqa: E731
    else:
        one = lambda *x: polyflash.attention(*x, causal=True)  # noqa: E731
    for got, want in zip(results[0], both_passes(one, whole[:3], whole[3]), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_one_part_travel_as_they_are(ranks: int, monkeypatch: pytest.MonkeyPatch):
    """From the second of calls alike on, where all ranks have such: half the bytes, the same bits. Here
    kernels round each part, as those of Hopper do."""
    for of in (ring, exchange):
        monkeypatch.setattr(of, "widened", lambda x: x)
    monkeypatch.setattr(calls, "_plans", {})  # full ones are emptied, and what they know is lost
    monkeypatch.setattr(
        works, "launch_of", lambda *given: (torch_ops._route(Phase.BACKWARD, *given, given[3]), given[3])
    )
    whole = tensors((1, 2, 256, 16), torch.bfloat16)
    how: dict[str, Any] = {"method": "ring", "causal": True}

    def body(group: Any) -> list[list[Tensor]]:
        *qkv, dout = (parallel.split(x, group=group) for x in whole)
        attend = lambda *x: parallel.attention(*x, group=group, **how)  # noqa: E731
        return [both_passes(attend, qkv, dout) for _ in range(3)]

    results, groups = simulate(ranks, body)
    log = groups[0].wires.log
    for rank, turns in enumerate(results):
        assert all(torch.equal(a, b) for turn in turns[1:] for a, b in zip(turns[0], turn, strict=True))
        sent = [n for who, _, what, n in log if who == rank and "returned" in what]
        each = len(sent) // 3
        wide, *narrow = (sum(sent[i * each : (i + 1) * each]) for i in range(3))
        assert narrow == [wide // 2] * 2


def test_gradients_leave_from_where_they_were_made(monkeypatch: pytest.MonkeyPatch):
    """On a device, of many keys that arrived: what is sent is a part of what the kernel wrote."""
    for of in (ring, exchange):
        monkeypatch.setattr(of, "widened", lambda x: x)
    monkeypatch.setattr(calls, "_plans", {})
    monkeypatch.setattr(exchange.Call, "waits", lambda call, k: call.meets)
    monkeypatch.setattr(
        works, "launch_of", lambda *given: (torch_ops._route(Phase.BACKWARD, *given, given[3]), given[3])
    )
    made: list[Tensor] = []  # kept, for their addresses
    inner, sent = ring.differentiate, []

    def differentiate(*given: Any) -> Any:
        found = inner(*given)
        made.extend(found[1:3])
        return found

    class Seen(Simulated):
        def exchange(self, sends: Any, receives: Any, what: str) -> Any:
            if "returned" in what:
                places = [x.untyped_storage().data_ptr() for x in made]
                sent.append([x.untyped_storage().data_ptr() in places for _, x in sends])
                assert all(x.is_contiguous() for _, x in sends)
            return super().exchange(sends, receives, what)

    monkeypatch.setattr(ring, "differentiate", differentiate)
    monkeypatch.setattr(simulated, "Simulated", Seen)
    whole = tensors((1, 2, 256, 16), torch.bfloat16)

    def body(group: Any) -> list[Tensor]:
        *qkv, dout = (parallel.split(x, group=group) for x in whole)
        attend = lambda *x: parallel.attention(*x, group=group, method="ring", causal=True)  # noqa: E731
        both_passes(attend, qkv, dout)
        return [parallel.restore(x, group=group) for x in both_passes(attend, qkv, dout)]

    near, _ = simulate(2, body)
    assert not any(any(x) for x in sent)
    sent.clear()
    monkeypatch.setattr(calls, "_plans", {})
    monkeypatch.setattr(exchange, "ONE_MESSAGE", 0)
    found, _ = simulate(2, body)
    assert sorted(sent) == [[False, False]] * 2 + [[True, True]] * 2  # narrow from the second call on
    assert all(torch.equal(a, b) for a, b in zip(near[0], found[0], strict=True))


def test_gradients_of_two_parts_are_summed_before_they_travel():
    """Here of two calls for the same keys, of which no half is rounded on the way."""
    made = exchange.Sum(torch.empty(1, 1, 8, 4, dtype=torch.bfloat16))
    made.add(torch.ones(1, 1, 4, 4, dtype=torch.bfloat16))
    made.add(torch.ones(1, 1, 4, 4, dtype=torch.bfloat16), 0, 4)
    assert made.is_narrow
    made.add(torch.ones(1, 1, 2, 4, dtype=torch.bfloat16), 0, 3)
    assert not made.is_narrow
    wide = exchange.Sum(torch.empty(1, 1, 8, 4, dtype=torch.bfloat16))
    wide.add(torch.ones(1, 1, 8, 4))
    assert not wide.is_narrow


@pytest.mark.parametrize("members", [None, LONG, SHORT])
@pytest.mark.parametrize("rank", [0, 1])
def test_on_a_device_keys_are_exchanged_before_anything_is_computed(
    members: tuple[int, ...] | None, rank: int, monkeypatch: pytest.MonkeyPatch
):
    """By the rank that gets none, too: its kernels would leave no room for its half of the exchange."""
    said: list[str] = []

    class Told(Mute):
        def exchange(self, sends: Any, receives: Any, what: str) -> Any:
            wait = super().exchange(sends, receives, what)
            return lambda: (said.append("waited"), wait())[1]

    def told(name: str, body: Any) -> Any:
        return lambda *given: (said.append(name), body(*given))[1]

    rows = sum(members or (512,))
    shards = Shards(members or (rows,), 2)
    bounds = torch.empty(len(shards.lengths) + 1, dtype=torch.int32, device="meta")
    monkeypatch.setattr(calls, "bounded", lambda bounds: shards.lengths)
    monkeypatch.setattr(works, "launch_of", lambda q, k, v, args: (None, args))
    monkeypatch.setattr(ring, "attend", told("forward", ring.attend))
    monkeypatch.setattr(ring, "differentiate", told("backward", ring.differentiate))
    held = shards.held(rank)
    shape = (held, 2, 64) if members else (1, 2, held, 64)
    leaves = [torch.empty(shape, device="meta", requires_grad=True) for _ in range(3)]
    how: dict[str, Any] = {"group": Told(rank, 2), "method": "ring", "causal": True, "handshake": False}
    if members:
        out = parallel.attention_varlen(*leaves, bounds, bounds, **how)  # type: ignore[misc]
    else:
        out = parallel.attention(*leaves, seqlens=(rows, rows), **how)
    out.sum().backward()
    again = [] if members else ["waited"]
    assert said == ["waited", "forward", *again, "backward", "waited"]


@pytest.mark.parametrize("members", [SHORT, LONG, tuple(8 * n for n in SHORT)])
def test_work_of_two_ranks_is_nearly_the_same(members: tuple[int, ...]):
    """A member's first part takes a few rows more or less than sixteenths of it."""
    lengths = tuple(64 * n for n in members)
    shards, sight = Shards(lengths, 2), schedule.Sight(None, 0, (0,) * len(lengths))
    work = [
        sum(schedule.pairs_of(step.blocks, sight) for step in schedule.steps(shards, shards, rank, sight))
        for rank in range(2)
    ]
    assert max(work) <= 1.005 * sum(work) / 2


def test_words_are_views_where_all_parts_are_made_of_such():
    whole = torch.randn(2, 6, 16, dtype=torch.float64).bfloat16()
    parts = [whole[:, 1:3], whole[:, 3:]]
    words = in_words(parts)
    assert all(x.dtype is torch.complex128 for x in words)
    assert torch.equal(torch.cat(words, 1).view(torch.bfloat16), torch.cat(parts, 1))
    for odd in (whole[:, :, 1:9], whole[:, :, :12], whole.transpose(0, 2), whole.new_empty(0)[0:]):
        assert in_words([parts[0], odd])[1] is odd
    ends = whole[:, :2], whole[:, 3:]
    assert torch.equal(flat(ends), torch.cat([x.flatten() for x in ends]))


@pytest.mark.parametrize("members", [None, SHORT, LONG, (67,)])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("most", [0, 1 << 24])
def test_results_do_not_depend_on_when_ranks_wait(
    members: tuple[int, ...] | None, batch: int, most: int, monkeypatch: pytest.MonkeyPatch
):
    """On a device own keys are put in their places before others have arrived; of one entry, or packed, many
    of them arrive where they are read."""
    rows = sum(members or (67,))
    bounds = None if members is None else torch.tensor([0, *members]).cumsum(0).int()
    whole = tensors((rows, 2, 16) if members else (batch, 2, rows, 16))

    def body(group: Any) -> list[Tensor]:
        if bounds is not None:
            return packed(group, whole, bounds)
        *qkv, dout = (parallel.split(x, group=group) for x in whole)
        how: dict[str, Any] = {"group": group, "method": "ring", "causal": True}
        return both_passes(lambda *x: parallel.attention(*x, **how), qkv, dout)

    near, _ = simulate(2, body)
    monkeypatch.setattr(exchange.Call, "waits", lambda call, k: call.meets)
    monkeypatch.setattr(exchange, "ONE_MESSAGE", most)
    joined, laid = exchange.places.joined, []
    monkeypatch.setattr(exchange.places, "joined", lambda *given: (laid.append(0), joined(*given))[1])
    found, _ = simulate(2, body)
    in_place = not most and (batch == 1 or members is not None)
    assert bool(laid) is not in_place
    assert all(
        torch.equal(a, b)
        for one, other in zip(near, found, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("members", [SHORT, (256,)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_backward_pass_is_compared_before_its_first_message(
    members: tuple[int, ...], rank: int, monkeypatch: pytest.MonkeyPatch
):
    """Behind what it computes, where it has keys; once in either case."""
    said: list[str] = []

    class Told(Mute):
        def exchange(self, sends: Any, receives: Any, what: str) -> Any:
            said.append(what)
            return super().exchange(sends, receives, what)

    def begin(*given: Any) -> Any:
        said.append("begun")
        return lambda: said.append("compared")

    shards = Shards(members, 2)
    bounds = torch.empty(len(members) + 1, dtype=torch.int32, device="meta")
    monkeypatch.setattr(calls, "bounded", lambda bounds: shards.lengths)
    held = [shards.held(i) for i in range(2)]
    monkeypatch.setattr(calls.Ranks, "meet", lambda *given: lambda: [held, held])
    monkeypatch.setattr(ring, "begin", begin)
    monkeypatch.setattr(works, "launch_of", lambda q, k, v, args: (None, args))
    inner = ring.differentiate
    monkeypatch.setattr(ring, "differentiate", lambda *given: (said.append("computed"), inner(*given))[1])
    leaves = [torch.empty(shards.held(rank), 2, 64, device="meta", requires_grad=True) for _ in range(3)]
    team = Told(rank, 2)
    team.calls = 1  # as a handshake counts them
    how: dict[str, Any] = {"group": team, "method": "ring", "causal": True}
    out: Any = parallel.attention_varlen(*leaves, bounds, bounds, **how)
    out.sum().backward()
    back = said[said.index("begun") :]
    if members is SHORT:
        assert back == ["begun", "computed", "compared", "returned gradients of keys"]
    else:
        again = "ran the backward pass, step 1"
        assert back == ["begun", "compared", again, "computed", "returned gradients of keys"]
