"""Ranks as threads of this process: results for up to 64 of them, bytes, bits, and errors beside one
device's."""

from __future__ import annotations

import contextlib
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import Mask, SpecError, UnsupportedError, parallel
from polyflash.parallel import calls, exchange, ring
from polyflash.reference import attention_reference
from tests.distributed import cases
from tests.distributed.cases import Case
from tests.distributed.simulated import Simulated, simulate
from tests.references import varlen_reference

METHODS = ("ring", "all_gather", "ulysses")
MANY = [
    Case(mask, method, order, (4, 2), torch.float32, rows, rows)
    for mask, order, rows in (
        ("causal", "zigzag", 131),
        ("sinks-window", "contiguous", 131),
        ("segments", "zigzag", 70),
        ("none", "zigzag", 3),
    )
    for method in ("ring", "all_gather")
]


def checked(case: Case, size: int | tuple[int, int]) -> None:
    ranks = size if isinstance(size, int) else size[0] * size[1]
    results, _ = simulate(size, lambda group: cases.run(case, ranks, group=group))
    assert cases.ranks_agree([one[:5] for one in results])
    shared = [sum(one[i] for one in results) for i in range(5, len(results[0]))]
    assert not (wrong := cases.judge(case, ranks, [*results[0][:5], *shared])), wrong


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_every_case(method: str, ranks: int):
    """Of five ranks every fourth: processes run those of one to four."""
    for case in itertools.islice(cases.cases(ranks, (method,)), 0, None, 1 if ranks == 2 else 4):
        checked(case, ranks)


@pytest.mark.parametrize("size", [(2, 2), (1, 3), pytest.param((3, 2), marks=pytest.mark.slow)])
def test_heads_shared_within_a_ring(size: tuple[int, int]):
    for case in cases.cases(size[0] * size[1], ("ulysses+ring",)):
        if case.mask in ("causal", "sinks-window", "dense", "segments"):
            checked(case, size)


@pytest.mark.parametrize("ranks", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_many_ranks(ranks: int):
    for case in MANY[:2] if ranks == 64 else MANY:
        checked(case, ranks)


def whole_of(rows: int, dtype: torch.dtype = torch.float32, heads: int = 2, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, rows, 16, generator=draw).to(dtype) for _ in range(4)]


def trained(group: Any, whole: list[Tensor], **how: Any) -> list[Tensor]:
    """out, dq, dk, dv of this rank."""
    cut: Any = {"group": group, "order": how.get("order", "zigzag")}
    q, k, v, dout = (parallel.split(x, **cut) for x in whole)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = parallel.attention(*leaves, group=group, **how)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_bits_repeat(method: str, ranks: int):
    whole = whole_of(67, heads=8)
    runs = [simulate(ranks, lambda g: trained(g, whole, method=method, causal=True))[0] for _ in range(2)]
    for one in runs[1:]:
        assert all(
            torch.equal(a, b) for x, y in zip(one, runs[0], strict=True) for a, b in zip(x, y, strict=True)
        )


@pytest.mark.parametrize("ranks", [2, 3])  # two have a way of their own
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_bits_do_not_follow_the_batch(method: str, kind: torch.dtype, ranks: int):
    """Outputs and gradients of a request are those that it has alone, beside whatever else."""
    draw = torch.Generator().manual_seed(3)
    whole = [torch.randn(3, h, 43, 16, generator=draw).to(kind) for h in (12, 6, 6, 12)]
    how: dict[str, Any] = {"method": method, "causal": True}
    together = simulate(ranks, lambda g: trained(g, whole, **how))[0]
    alone = simulate(ranks, lambda g: trained(g, [x[1:2] for x in whole], **how))[0]
    for a, b in zip(together, alone, strict=True):
        assert all(torch.equal(x[1:2], y) for x, y in zip(a, b, strict=True))


def mean_errors(whole: list[Tensor], results: list[Tensor], **how: Any) -> list[float]:
    """Mean errors of out, dq, dk and dv against the oracle, as shares of one device's."""
    exact = [x.double().requires_grad_() for x in whole[:3]]
    one = [x.clone().requires_grad_() for x in whole[:3]]
    right, near = attention_reference(*exact, **how).out, polyflash.attention(*one, **how)
    right.backward(whole[3].double())
    near.backward(whole[3])
    rows = zip(
        results,
        (near.detach(), *(x.grad for x in one)),
        (right.detach(), *(x.grad for x in exact)),
        strict=True,
    )
    return [
        float((got.double() - c).abs().mean()) / float((a.double() - c).abs().mean()) for got, a, c in rows
    ]


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_errors_are_those_of_one_device(ranks: int, method: str):
    """Mean errors of out and gradients in bfloat16 do not grow with the ranks: parts are float32."""
    whole = whole_of(512, torch.bfloat16, heads=4)
    results, _ = simulate(
        ranks, lambda g: [parallel.restore(x, group=g) for x in trained(g, whole, method=method)]
    )
    assert max(mean_errors(whole, results[0])) <= 1.02


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_kernels_that_keep_16_bits_hand_over_sums(method: str, monkeypatch: pytest.MonkeyPatch):
    """As on GPUs, where operands are not widened: gradients are those of one device, outputs rounded once a
    step."""
    for of in (ring, exchange):
        monkeypatch.setattr(of, "widened", lambda x: x)
    whole = whole_of(512, torch.bfloat16, heads=4)
    how: dict[str, Any] = {"method": method, "causal": True}
    results, _ = simulate(4, lambda g: [parallel.restore(x, group=g) for x in trained(g, whole, **how)])
    of_out, *of_gradients = mean_errors(whole, results[0], causal=True)
    config = polyflash.explain(*whole[:3], causal=True).config
    alike = getattr(config, "compute", "") == "bf16dot"  # else one device multiplies in float32
    assert max(of_gradients) <= (1.02 if alike else 1.05) and of_out <= (1.3 if alike else 1.4)


@pytest.mark.parametrize("right", [{"causal": True}, {"causal": True, "q_offset": 3}, {"window": (None, 9)}])
def test_rows_joined_in_a_call_see_what_they_saw_apart(right: dict[str, Any]):
    """The chunks of a shard are one call where no row of the early one sees beyond its own keys; two ranks
    have a way of their own."""
    whole = whole_of(64)
    results, _ = simulate(
        3, lambda g: [parallel.restore(x, group=g) for x in trained(g, whole, method="ring", **right)]
    )
    leaves = [x.double().requires_grad_() for x in whole[:3]]
    out = attention_reference(*leaves, **right).out
    out.backward(whole[3].double())
    for got, want in zip(results[0], (out, *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)


def test_bytes_are_those_of_the_plan():
    """A causal ring of 4, and a window, whose ranks talk to neighbours alone."""
    whole = whole_of(256)
    masks: list[dict[str, Any]] = [{"causal": True}, {"causal": True, "window": (9, 0)}, {}]
    for mask, method in itertools.product(masks, ("ring", "all_gather")):
        call: Any = {"method": method, "handshake": False, "seqlens": (256, 256), **mask}
        _, groups = simulate(4, functools.partial(forward, whole=whole, **call))
        plan = parallel.explain(*(x[:, :, :64] for x in whole[:3]), ranks=4, method=method, **mask)
        assert tuple(g.sent for g in groups) == plan.bytes_sent, (mask, method)


def forward(group: Any, whole: list[Tensor], **how: Any) -> Tensor:
    return parallel.attention(*(parallel.split(x, group=group) for x in whole[:3]), group=group, **how)


def test_a_window_is_sent_to_neighbours_alone():
    whole = whole_of(64 * 16)
    how: Any = {
        "causal": True,
        "window": (15, 0),
        "method": "ring",
        "handshake": False,
        "seqlens": (1024, 1024),
    }
    _, groups = simulate(32, lambda g: trained(g, whole, **how))
    talked = {(a, b) for g in groups[:1] for a, b, _, _ in g.wires.log}
    assert talked and all(abs(a - b) == 1 for a, b in talked)


def test_lists_send_nothing_beyond_what_they_name():
    """Every 32 rows see 32 keys of their own rank, but the last ones, which see the first 5 keys."""
    starts = torch.arange(0, 256, 32)[:, None].int()
    ends = starts + 32
    starts[-1], ends[-1] = 0, 5
    how: Any = {"mask": Mask.intervals(starts, ends, rows=32), "method": "ring", "order": "contiguous"}
    _, groups = simulate(4, lambda g: trained(g, whole_of(256), handshake=False, seqlens=(256, 256), **how))
    values, gradients = 5 * 2 * 2 * 16 * 4, 5 * 2 * 2 * 16 * 4
    assert [group.sent for group in groups] == [2 * values, 0, 0, gradients]


def test_rows_that_see_nan_are_nan_and_no_others():
    whole = whole_of(24)
    whole[1][:, :, 13] = torch.nan
    results, _ = simulate(
        3, lambda g: parallel.restore(forward(g, whole, causal=True, method="ring"), group=g)
    )
    bad = results[0].isnan().any(-1).any(1)[0]
    assert bad.tolist() == [row >= 13 for row in range(24)]


def test_heads_are_gathered_in_turn(monkeypatch: pytest.MonkeyPatch):
    """With room for the keys of one head at a time, results are the same."""
    monkeypatch.setattr(exchange, "GATHERED_BYTES", 1)
    for mask in ("sinks", "dense", "alibi"):
        checked(Case(mask, "all_gather", "zigzag", (6, 3), torch.float32, 23, 23), 3)


def test_restore_is_differentiable_and_split_its_inverse():
    x = torch.randn(2, 3, 11, 5)

    def body(group: Any) -> tuple[Tensor, Tensor]:
        own = parallel.split(x, group=group).requires_grad_()
        whole = parallel.restore(own, group=group)
        (whole * torch.arange(11.0)[:, None]).sum().backward()
        return whole.detach(), parallel.restore(own.grad, group=group)

    for size in (4, (2, 3)):
        for whole, grad in simulate(size, body)[0]:
            assert torch.equal(whole, x)
            ranks = size if isinstance(size, int) else 6
            assert torch.equal(grad, (ranks * torch.arange(11.0)[:, None]).expand_as(grad))


@pytest.mark.parametrize("size", [1, 3, (2, 2)])
def test_a_cache_spread_over_ranks_is_read_as_one(size: Any):
    """Decode: each rank has some keys of each request, of one request maybe none."""
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    ranks = size if isinstance(size, int) else size[0] * size[1]
    sinks = torch.linspace(-1, 1, 4)
    lens = torch.tensor([40, 40 // ranks - 1 if ranks > 1 else 40])

    def body(group: Any) -> Any:
        rank = group.rank if isinstance(size, int) else group[0].rank * size[1] + group[1].rank
        own = slice(40 * rank // ranks, 40 * (rank + 1) // ranks)
        live = (lens - own.start).clamp(0, own.stop - own.start)
        one = polyflash.attention(
            q, k[:, :, own], v[:, :, own], kv_lens=live, sinks=None if rank else sinks, return_lse=True
        )
        return parallel.merge(*one, group=group)

    results, _ = simulate(size, body)
    right = attention_reference(q, k, v, kv_lens=lens, sinks=sinks)
    for out, lse in results:
        torch.testing.assert_close(out.double(), right.out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse.double(), right.lse, atol=2e-6, rtol=1e-5)
        assert torch.equal(out, results[0].out)
    with pytest.raises(UnsupportedError, match="inference"):
        simulate(1, lambda g: parallel.merge(q.requires_grad_(), q[..., 0], group=g))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_some_inputs_alone(method: str):
    whole, how = whole_of(21), {"causal": True, "method": method}
    full = simulate(2, lambda g: trained(g, whole, **how))[0]
    for wanted in ((0,), (2,), (0, 1)):

        def body(group: Any, wanted: tuple[int, ...] = wanted) -> list[Any]:
            q, k, v, dout = (parallel.split(x, group=group) for x in whole)
            leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
            parallel.attention(*leaves, group=group, **how).backward(dout)
            return [x.grad for x in leaves]

        for got, all_of in zip(simulate(2, body)[0], full, strict=True):
            for i, grad in enumerate(got):
                assert grad is None if i not in wanted else torch.equal(grad, all_of[1 + i])


def test_autocast_casts_what_is_sent():
    whole = whole_of(32)

    def body(group: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(group, whole, causal=True, method="ring")

    results, groups = simulate(2, body)
    cast = [x.bfloat16() for x in whole]
    expected = simulate(2, lambda g: forward(g, cast, causal=True, method="ring"))[0]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert results[0].dtype is torch.bfloat16 and groups[0].sent < 32 * 2 * 16 * 2 * 4


def packed_and_trained(group: Any, whole: list[Tensor], cu: Tensor, **how: Any) -> list[Tensor]:
    """out, dq, dk, dv of this rank, rows and keys packed alike."""
    q, k, v, dout = (
        parallel.split(x[0].transpose(0, 1), group=group, dim=0, cu_seqlens=cu).requires_grad_()
        for x in whole
    )
    out = parallel.attention_varlen(q, k, v, cu, cu, group=group, **how)
    out.backward(dout.detach())
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "method, mask, expected",
    [
        ("ring", {"causal": True}, (16, 16)),  # a call a step
        ("ring", {}, (16, 16)),
        ("all_gather", {"causal": True}, (7, 7)),  # the chunks of the last rank are neighbours
        ("ulysses", {"causal": True}, (4, 4)),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_backend_by_name_runs_every_block(method: str, mask: Any, expected: Any, packed: bool):
    """In a call a step of a ring, packed members together, however many there are."""
    whole, cu = whole_of(67, heads=4), torch.tensor([0, 30, 30, 31, 50, 67])
    how: dict[str, Any] = {"method": method, "backend": "torch", **mask}
    before = polyflash.counters()["calls"]
    simulate(4, lambda g: packed_and_trained(g, whole, cu, **how) if packed else trained(g, whole, **how))
    after = polyflash.counters()["calls"]
    ran = {row: n - before.get(row, 0) for row, n in after.items() if n != before.get(row, 0)}
    assert ran == dict(zip(("torch/forward", "torch/backward"), expected, strict=True))


def test_early_chunks_of_packed_members_are_sent_alone():
    """To ranks behind; those before get both chunks, as the plan says."""
    whole, cu = whole_of(256), torch.tensor([0, 64, 64, 256])
    q, k, v = (x[0].transpose(0, 1) for x in whole[:3])
    how: dict[str, Any] = {"method": "ring", "causal": True}

    def body(group: Any) -> Tensor:
        own = [parallel.split(x, group=group, dim=0, cu_seqlens=cu) for x in (q, k, v)]
        return parallel.attention_varlen(*own, cu, cu, group=group, handshake=False, **how)

    _, groups = simulate(4, body)
    plan = parallel.explain(q[:64], k[:64], v[:64], ranks=4, cu_seqlens_q=cu, cu_seqlens_k=cu, **how)
    both = 64 * 2 * 2 * 16 * 4  # bytes of all keys of a rank
    sent = [rank * both + (3 - rank) * both // 2 for rank in range(4)]
    assert [group.sent for group in groups] == sent == list(plan.bytes_sent)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("name", ["kv_lens", "kv_starts"])
def test_one_packed_member_after_a_dense_call_of_its_length(method: str, name: str):
    """Their shards are cut alike, and what a device needs of a block is not."""
    q, k, v = (x[:1] for x in whole_of(64)[:3])
    cu, how = torch.tensor([0, 64], dtype=torch.int32), {name: torch.tensor([30], dtype=torch.int32)}

    def body(group: Any) -> list[Tensor]:
        own = [parallel.split(x, group=group, dim=2) for x in (q, k, v)]
        dense = parallel.attention(*own, group=group, method=method, **how)
        own = [parallel.split(x[0].transpose(0, 1), group=group, dim=0, cu_seqlens=cu) for x in (q, k, v)]
        packed = parallel.attention_varlen(*own, cu, cu, group=group, method=method, **how)
        packed = parallel.restore(packed, group=group, dim=0, cu_seqlens=cu)
        return [parallel.restore(dense, group=group, dim=2), packed.transpose(0, 1)[None]]

    for _ in range(2):
        for got in simulate(3, body)[0][0]:
            torch.testing.assert_close(got, polyflash.attention(q, k, v, **how), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("name", ["mask", "alibi_slopes"])
def test_gradients_are_refused_beside_an_operand_that_was_changed(method: str, name: str):
    q, k, v = whole_of(16)[:3]

    def body(group: Any) -> None:
        operand = {"mask": torch.ones(16, 16, dtype=torch.bool), "alibi_slopes": torch.ones(q.shape[1])}[name]
        own = [parallel.split(x, group=group, dim=2).requires_grad_() for x in (q, k, v)]
        out = parallel.attention(*own, group=group, method=method, **{name: operand})
        operand.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    simulate(2, body)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_keys_of_a_backward_pass_come_beside_what_is_computed(method: str, monkeypatch: pytest.MonkeyPatch):
    """Its first exchange waits for a mark that was set when K and V were on their way in the forward pass,
    and is joined before it is read; no other does, and none where hooks make other K and V."""
    said: list[str] = []  # by rank 0

    def told(name: str, body: Any) -> Any:
        return lambda self, *given: (self.rank == 0 and said.append(name), body(self, *given))[1]

    @contextlib.contextmanager
    def beside(self: Any, mark: Any) -> Any:
        if self.rank == 0 and mark is not None:
            said.append("beside")
        yield

    def marked(self: Any, x: Tensor) -> Any:
        return SimpleNamespace(record=lambda: self.rank == 0 and said.append("mark"))

    for name in ("exchange", "gather", "swap"):
        monkeypatch.setattr(Simulated, name, told(name, getattr(Simulated, name)))
    monkeypatch.setattr(Simulated, "new_mark", marked)
    monkeypatch.setattr(Simulated, "beside", beside)
    monkeypatch.setattr(Simulated, "join", told("join", lambda self, brought: None))
    how: dict[str, Any] = {"method": method, "causal": True, "handshake": False, "seqlens": (16, 16)}
    whole = whole_of(16)
    brought, returned = (["exchange"], ["exchange"]) if method == "ring" else (["gather"] * 2, ["swap"] * 2)
    simulate(2, lambda g: trained(g, whole, **how))
    assert said == [*brought, "mark", "beside", *brought, "join", *returned]
    said.clear()

    def hooked(group: Any) -> None:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            trained(group, whole, **how)

    simulate(2, hooked)
    assert said == [*brought, *brought, *returned]


def test_a_call_like_an_earlier_one_has_its_plan(monkeypatch: pytest.MonkeyPatch):
    """And ends as all others do where one rank makes another call."""
    whole, said = whole_of(16), []
    planned, began = calls.whole_call, calls.begin

    def begin(*given: Any) -> Any:
        wait = began(*given)
        return lambda: (said.append("compared"), wait())[1]  # type: ignore[func-returns-value]

    def plan(*given: Any) -> Any:
        said.append("planned")
        return planned(*given)

    monkeypatch.setattr(calls, "whole_call", plan)
    monkeypatch.setattr(calls, "begin", begin)
    how: dict[str, Any] = {"causal": True, "method": "ring"}

    def body(group: Any) -> str:
        for _ in range(2):
            forward(group, whole, **how)
        try:
            forward(group, whole, **(how | {"window": (3, 0)} if group.rank else how))
        except SpecError as error:
            return str(error)
        return "no error"

    simulate(1, body)
    assert said == ["compared", "planned", "compared", "compared"]
    results, _ = simulate(2, body)
    assert results[0] == results[1] and "window left" in results[0]


@pytest.mark.parametrize("method", METHODS)
def test_shards_of_others_may_have_other_rows_than_before(method: str):
    """The second of two ranks holds 8 of 16 rows and 8 of 15, and a call of the latter is like the former to
    it."""
    how: dict[str, Any] = {"causal": True, "method": method, "order": "contiguous"}
    lengths = (16, 16, 15, 16)

    def body(group: Any) -> list[Tensor]:
        with contextlib.suppress(RuntimeError):  # of messages of other sizes
            return [trained(group, whole_of(rows), **how)[0] for rows in lengths]
        return []

    results, _ = simulate(2, body)
    assert list(map(len, results)) == [len(lengths)] * 2
    for rows, *parts in zip(lengths, *results, strict=True):
        one = polyflash.attention(*whole_of(rows)[:3], causal=True)
        assert torch.allclose(torch.cat(parts, 2), one, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_lengths_and_offsets_of_packed_members(method: str):
    """They count within whole members, whose rows and keys may differ in number."""
    rows, keys = torch.tensor([3, 17, 0, 9]), torch.tensor([8, 17, 4, 5])
    q, k, v = torch.randn(29, 4, 16), torch.randn(34, 2, 16), torch.randn(34, 2, 16)
    cu = [torch.cat((torch.zeros(1), n.cumsum(0))).int() for n in (rows, keys)]
    lens = {"kv_lens": torch.tensor([8, 11, 2, 0]), "kv_starts": torch.tensor([2, 0, 0, 0])}
    places = {"q_offset": torch.tensor([0, 3, 1, 2]), "causal": True, "window": (6, 2)}
    for options in (lens, places, {**lens, "causal": True}, {**lens, **places}):

        def body(group: Any, options: dict[str, Any] = options) -> list[Tensor]:
            own = [
                parallel.split(x, group=group, dim=0, cu_seqlens=c)
                for x, c in zip((q, k, v), (cu[0], cu[1], cu[1]), strict=True)
            ]
            leaves = [x.clone().requires_grad_() for x in own]
            out = parallel.attention_varlen(*leaves, *cu, group=group, method=method, **options)
            (out * out).sum().backward()
            got = [out.detach(), *(x.grad for x in leaves)]
            return [parallel.restore(x, group=group, dim=0, cu_seqlens=cu[i > 1]) for i, x in enumerate(got)]

        results = simulate(2, body)[0]
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        out = varlen_reference(*leaves, *cu, **options).out
        (out * out).sum().backward()
        for got, right in zip(results[0], (out, *(x.grad for x in leaves)), strict=True):
            torch.testing.assert_close(got.double(), right, atol=1e-5, rtol=1e-4)


def refusal(expected: type[Exception], **how: Any) -> str:
    whole = whole_of(16)
    with pytest.raises(expected) as error:
        simulate(2, lambda g: forward(g, whole, **how))
    return str(error.value)


def test_refusals_name_arguments_and_a_way_out():
    with pytest.raises(UnsupportedError, match="dropout_p"):
        cu = torch.tensor([0, 16])
        rows = [x[0].transpose(0, 1) for x in whole_of(16)[:3]]
        simulate(1, lambda g: parallel.attention_varlen(*rows, cu, cu, dropout_p=0.5, group=g))
    assert "method: got 'tree'" in refusal(SpecError, method="tree")
    assert "mesh of two" in refusal(SpecError, method="ulysses+ring")
    assert "order" in refusal(SpecError, order="striped")
    assert "seqlens" in refusal(SpecError, handshake=False)
    assert "split()" in refusal(SpecError, handshake=False, seqlens=(17, 17))
    assert "mask shape" in refusal(SpecError, mask=torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(SpecError, match="q heads"):
        simulate(3, lambda g: forward(g, whole_of(16), method="ulysses"))
    with pytest.raises(SpecError, match="init_process_group"):
        parallel.attention(*whole_of(16)[:3])
    with pytest.raises(TypeError, match="causal"):
        parallel.attention(*whole_of(16)[:3], is_causal=True)


def test_explanations_print_themselves_and_say_what_is_sent_twice():
    q, k = torch.empty(1, 8, 128, 64, device="meta"), torch.empty(1, 2, 128, 64, device="meta")
    plan = parallel.explain(q, k, k, ranks=4, method="ulysses", causal=True)
    assert "some are sent twice" in str(plan) and plan.imbalance == 1.0
    assert parallel.explain(q, k, k, ranks=(2, 2)).method == "ulysses+ring"
    chosen = parallel.explain(q, k, k, ranks=8, causal=True, window=(31, 0))
    assert chosen.method == "ring" and "%" in chosen.why


SCHEMES = {
    "int8": polyflash.quant.Scheme(dtype="int8"),
    "int8 of a head": polyflash.quant.Scheme(dtype="int8", granularity="head", smoothing="mean"),
    "int4": polyflash.quant.Scheme(dtype="int4", channels=8, symmetric=False),
    "rotated": polyflash.quant.Scheme(dtype="int8", rotation="hadamard"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_travel_as_they_are(name: str, method: str, packed: bool):
    """Results are those of the values, bit for bit; bytes are those of the plan, fewer than half."""
    cu, scheme, mask = torch.tensor([0, 9, 9, 24]), SCHEMES[name], {"causal": True, "window": (9, 0)}
    whole = [x[0].transpose(0, 1) if packed else x for x in whole_of(24, heads=6)[:3]]
    cut: dict[str, Any] = {"dim": 0, "cu_seqlens": cu} if packed else {}
    how: dict[str, Any] = {"method": method, "handshake": False, "return_lse": True, **mask}
    how |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {"seqlens": (24, 24)}
    attend: Any = parallel.attention_varlen if packed else parallel.attention
    layout: Any = "thd" if packed else "bhsd"

    def body(group: Any) -> tuple[Any, ...]:
        q, k, v = (parallel.split(x, group=group, **cut) for x in whole)
        k, v = (polyflash.quantize(x, scheme, layout=layout) for x in (k, v))
        before = group.sent
        one = attend(q, k, v, group=group, **how)
        sent = group.sent - before
        values = [polyflash.dequantize(x).to(q.dtype) for x in (k, v)]
        with pytest.raises(UnsupportedError, match="inference"):
            attend(q.clone().requires_grad_(), k, v, group=group, **how)
        return one, attend(q, *values, group=group, **how), sent, group.sent - before - sent, (q, k, v)

    for one, other, sent, of_values, given in simulate(3, body)[0]:
        close = {"atol": 2e-6, "rtol": 1e-5} if name == "rotated" else {"atol": 0.0, "rtol": 0.0}
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, **close)
        if method != "ulysses":
            assert sent < of_values / 2 or (name == "int8 of a head" and sent == of_values)
            bounds = {x: how[x] for x in how if x.startswith("cu")}
            plan = parallel.explain(
                *given, ranks=3, method=method, seqlens=how.get("seqlens"), **mask, **bounds
            )
            assert sent in plan.bytes_sent
