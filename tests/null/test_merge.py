"""merge(): identity, commutativity, stability, split invariance and gradients."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from polyflash.errors import SpecError
from polyflash.merging import AttentionOutput, merge, merge_into, merge_rows
from polyflash.reference import attention_reference
from tests.tolerance import same_bits

INF, NAN = math.inf, math.nan


def state(seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 3.0) -> AttentionOutput:
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(2, 3, 7, 5, generator=g, dtype=torch.float64)
    lse = torch.randn(2, 3, 7, generator=g, dtype=torch.float64) * spread
    return AttentionOutput(out.to(dtype), lse.to(torch.float64 if dtype is torch.float64 else torch.float32))


def empty() -> AttentionOutput:
    return AttentionOutput(torch.zeros(2, 3, 7, 5), torch.full((2, 3, 7), -INF))


def test_formula_in_float64() -> None:
    a, b = state(0, torch.float64), state(1, torch.float64)
    out, lse = merge(*a, *b)
    wa, wb = a.lse.exp(), b.lse.exp()
    torch.testing.assert_close(lse, (wa + wb).log(), rtol=1e-13, atol=1e-13)
    want = (a.out * wa[..., None] + b.out * wb[..., None]) / (wa + wb)[..., None]
    torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_result_dtype(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    result = merge(*state(0, dtype), *state(1, dtype))
    assert result.out.dtype is wide and result.lse.dtype is wide
    assert merge(*state(0), *state(1, torch.float64)).out.dtype is torch.float64


@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
def test_an_empty_state_is_the_identity(garbage: float) -> None:
    """B-msk-09: bits unchanged, -0.0 included, whatever the empty side's out holds."""
    a, none = state(), empty()
    a.out[0, 0, 0, 0] = -0.0
    none.out.fill_(garbage)
    for result in (merge(*a, *none), merge(*none, *a)):
        same_bits(result.out, a.out)
        same_bits(result.lse, a.lse)
    both = merge(*none, *none)
    same_bits(both.out, torch.zeros_like(both.out))
    assert (both.lse == -INF).all()


def test_commutes_bitwise() -> None:
    for spread in (1.0, 50.0, 1e4):
        a, b = state(0, spread=spread), state(1, spread=spread)
        a.lse[0, 0, :2], b.lse[0, 0, 1:3] = -INF, -INF
        for x, y in zip(merge(*a, *b), merge(*b, *a), strict=True):
            same_bits(x, y)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("gone", ((), ("a",), ("a", "b")), ids=str)
def test_rows_of_results_are_merged_to_the_same_bits(gone: tuple[str, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (
        AttentionOutput(
            torch.randn(7, 3, 5, generator=generator).to(dtype),
            8 * torch.randn(3, 7, generator=generator),
        )
        for _ in range(2)
    )
    for name, state in (("a", a), ("b", b)):
        if name in gone:
            state.lse[1, 4] = -torch.inf
            state.out[4, 1] = torch.nan
    got, want = merge_rows(a, b), merge(a.out, a.lse, b.out, b.lse, layout="thd")
    for x, y in zip(got, want, strict=True):
        same_bits(x, y)


@pytest.mark.parametrize("distance", [90.0, -90.0, 1e4, -1e4, 3e38, -3e38])
def test_distant_logarithms(distance: float) -> None:
    """B-spl-07: ln(1 + e^d) overflows at 89."""
    a, b = state(0), state(1)
    b = AttentionOutput(b.out, a.lse + distance)
    out, lse = merge(*a, *b)
    winner = b if distance > 0 else a
    assert torch.equal(lse, winner.lse) and torch.equal(out, winner.out)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    a, b = state(0), state(1)
    clean = merge(*a, *b)
    a.lse[0, 0, 0], a.out[0, 0, 0] = NAN, NAN
    b.lse[0, 0, 1] = INF
    a.out[0, 0, 2, 0] = INF
    out, lse = merge(*a, *b)
    assert out[0, 0, 0].isnan().all() and lse[0, 0, 0].isnan()
    assert torch.equal(out[0, 0, 1], b.out[0, 0, 1]) and lse[0, 0, 1] == INF
    assert out[0, 0, 2, 0] == INF and torch.equal(out[0, 0, 2, 1:], clean.out[0, 0, 2, 1:])
    assert torch.equal(out[0, 0, 3:], clean.out[0, 0, 3:]) and torch.equal(out[1], clean.out[1])


@pytest.mark.parametrize("far", [80.0, 200.0, 2000.0])
def test_an_infinity_that_weighs_nothing_stays(far: float) -> None:
    a, b = state(0), state(1)
    a.out[0, 0, 0, 0], b.out[0, 1, 2, 3] = INF, -INF
    for one, other in ((a, b), (b, a)):
        one = AttentionOutput(one.out, one.lse + far)
        into = AttentionOutput(one.out.float().clone(), one.lse.float().clone())
        merge_into(*into, other.out, other.lse)
        rows = (AttentionOutput(x.out[0].transpose(0, 1), x.lse[0]) for x in (one, other))
        for got in (merge(*one, *other).out, into.out, merge_rows(*rows)[0].transpose(0, 1)[None]):
            assert got[0, 0, 0, 0] == INF and got[0, 1, 2, 3] == -INF and not got.isnan().any()


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_layouts(layout: str) -> None:
    a, b = state(0), state(1)
    a.lse[0, 1, 3] = -INF
    want = merge(*a, *b)

    def to_layout(x: AttentionOutput) -> AttentionOutput:
        if layout == "bshd":
            return AttentionOutput(x.out.transpose(1, 2), x.lse)
        return AttentionOutput(x.out.transpose(1, 2).flatten(0, 1), x.lse.transpose(0, 1).flatten(1))

    got = merge(*to_layout(a), *to_layout(b), layout=layout)
    for x, y in zip(got, to_layout(want), strict=True):
        same_bits(x.contiguous(), y.contiguous())


def split(parts: list[tuple[int, int]], dtype: torch.dtype) -> tuple[AttentionOutput, list[AttentionOutput]]:
    """Attention over all keys and over each range of them; the last entry sees 12 keys only."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, n, d, generator=g).double() * 3 for n, d in ((9, 8), (40, 8), (40, 6)))
    seen = (torch.arange(40) < torch.tensor([40, 12]).view(2, 1, 1, 1)).expand(2, 2, 9, 40)
    whole = attention_reference(q, k, v, mask=seen)
    pieces = [attention_reference(q, k[:, :, a:b], v[:, :, a:b], mask=seen[..., a:b]) for a, b in parts]
    return whole, [AttentionOutput(x.out.to(dtype), x.lse.to(dtype)) for x in pieces]


@pytest.mark.parametrize("cuts", [(20,), (0, 20), (1, 2, 3), (13, 13, 39), tuple(range(1, 40)), (12, 40)])
def test_any_split_in_any_order_and_tree(cuts: tuple[int, ...]) -> None:
    """M22, empty parts and parts of one key included."""
    bounds = (0, *cuts, 40)
    whole, pieces = split(list(itertools.pairwise(bounds)), torch.float32)
    rng = random.Random(0)
    for _ in range(4):
        todo = list(pieces)
        while len(todo) > 1:
            a, b = (todo.pop(rng.randrange(len(todo))) for _ in range(2))
            todo.append(merge(*a, *b))
        (got,) = todo
        error = (got.out.double() - whole.out).norm() / whole.out.norm()
        assert error <= 2e-6
        torch.testing.assert_close(got.lse.double(), whole.lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_a_list_of_parts_is_merged_from_left_to_right(layout: str) -> None:
    parts = [state(seed) for seed in range(4)]
    parts[2].lse[0, 1], parts[2].out[0, 1] = -INF, NAN
    if layout == "bshd":
        parts = [AttentionOutput(x.out.transpose(1, 2), x.lse) for x in parts]
    elif layout == "thd":
        parts = [AttentionOutput(x.out[0].transpose(0, 1), x.lse[0]) for x in parts]
    want = parts[0]
    for part in parts[1:]:
        want = merge(*want, *part, layout=layout)
    for given in (parts, [tuple(x) for x in parts], [list(x) for x in parts], tuple(parts)):
        for x, y in zip(merge(given, layout=layout), want, strict=True):
            same_bits(x, y)


def test_one_part_is_itself() -> None:
    a = state(0, torch.bfloat16)
    a.lse[0, 0, :2], a.out[0, 0, :2] = -INF, NAN
    a.out[0, 1, 0, 0] = NAN
    out, lse = merge([a])
    assert out.dtype is torch.float32 and torch.equal(lse, a.lse) and (out[0, 0, :2] == 0).all()
    same_bits(out[1], a.out[1].float())
    assert out[0, 1, 0, 0].isnan() and merge([a, state(0, torch.float64)]).out.dtype is torch.float64


def test_gradients_of_a_list() -> None:
    def call(*x: Tensor) -> Tensor:
        result = merge(list(zip(x[::2], x[1::2], strict=True)))
        return torch.cat([result.out, result.lse.unsqueeze(-1)], -1)

    states = [
        AttentionOutput(x.out[:, :1, :2], x.lse[:, :1, :2])
        for x in (state(n, torch.float64) for n in range(3))
    ]
    inputs = [x.detach().requires_grad_() for part in states for x in part]
    assert torch.autograd.gradcheck(call, inputs)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    same_bits(compiled(*inputs), call(*inputs))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a, b: merge([]), "parts: got list of 0, wanted one pair"),
        (lambda a, b: merge(a), "parts: got AttentionOutput of 2, wanted one pair"),
        (lambda a, b: merge(a, b), "parts: got AttentionOutput of 2 and more arguments, wanted one pair"),
        (lambda a, b: merge([a, b.out]), "parts: got list of 2, wanted one pair"),
        (lambda a, b: merge([a, (b.out, None)]), r"parts\[1\].lse: got None, wanted a tensor"),
        (lambda a, b: merge([a, (b.out, b.out)]), r"parts\[1\].lse: got \(2, 3, 7, 5\), wanted \(2, 3, 7\)"),
        (lambda a, b: merge([a, (b.lse, b.lse)]), r"parts\[1\].out: got \(2, 3, 7\), wanted \(2, 3, 7, 5\)"),
    ],
)  # fmt: skip
def test_a_list_of_others_is_refused(call, words: str) -> None:
    with pytest.raises(SpecError, match=f"^{words}"):
        call(state(0), state(1))


def test_gradients() -> None:
    def call(*x: Tensor) -> Tensor:
        result = merge(*x)
        return torch.cat([result.out, result.lse.unsqueeze(-1)], -1)

    inputs = [x.requires_grad_() for x in (*state(0, torch.float64), *state(1, torch.float64))]
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("garbage", [0.0, NAN])
def test_gradients_beside_empty_rows_are_finite(garbage: float) -> None:
    a, b = state(0), state(1)
    a.lse[0, 0, :2], b.lse[0, 0, 1:3] = -INF, -INF
    a.out[0, 0, :2], b.out[0, 0, 1:3] = garbage, garbage
    leaves = [x.requires_grad_() for x in (*a, *b)]
    out, lse = merge(*leaves)
    (out.sum() + torch.where(lse > -INF, lse, 0.0).sum()).backward()
    out_a, lse_a, out_b, lse_b = (x.grad for x in leaves)
    assert all(g.isfinite().all() for g in (out_a, lse_a, out_b, lse_b))
    assert (out_b[0, 0, 0] == 1).all() and lse_b[0, 0, 0] == 1 and (out_a[0, 0, :2] == 0).all()
    assert (out_a[0, 0, 2] == 1).all() and lse_a[0, 0, 2] == 1 and lse_a[0, 0, 1] == lse_b[0, 0, 1] == 0


def test_split_gradient_equals_whole_gradient() -> None:
    """out and lse gradients of both parts, so a merge of partial attention trains like the whole."""
    g = torch.Generator().manual_seed(5)
    x = [torch.randn(1, 2, n, 4, generator=g, dtype=torch.float64) for n in (5, 9, 9)]
    grads = []
    for cut in (None, 4):
        q, k, v = (t.clone().requires_grad_() for t in x)
        if cut is None:
            out = attention_reference(q, k, v).out
        else:
            first = attention_reference(q, k[:, :, :cut], v[:, :, :cut])
            out = merge(*first, *attention_reference(q, k[:, :, cut:], v[:, :, cut:])).out
        grads.append(torch.autograd.grad(out.sin().sum(), (q, k, v)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("change", "layout", "word"),
    [
        ({}, "sbhd", "layout"),
        ({}, "thd", "out_a"),
        ({}, "bshd", "lse_a"),
        ({"out_b": torch.zeros(2, 3, 7, 4)}, "bhsd", "out_b"),
        ({"lse_b": torch.zeros(2, 7, 3)}, "bhsd", "lse_b"),
        ({"lse_a": torch.zeros(2, 3, 7, 1)}, "bhsd", "lse_a"),
    ],
)
def test_refusals_teach(change: dict[str, Tensor], layout: str, word: str) -> None:
    (out_a, lse_a), (out_b, lse_b) = state(0), state(1)
    args = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b} | change
    with pytest.raises(SpecError, match=rf"^{word}: got .*, wanted "):
        merge(args["out_a"], args["lse_a"], args["out_b"], args["lse_b"], layout=layout)


@pytest.mark.parametrize("which", range(4))
def test_partial_results_of_two_devices_are_refused(which: int) -> None:
    parts = [*state(0), *state(1)]
    parts[which] = parts[which].to("meta")
    name = ("lse_a", "lse_a", "out_b", "lse_b")[which]
    with pytest.raises(SpecError, match=rf"^{name} device: got .*, wanted .*, as out_a\. Move it"):
        merge(*parts)
    for x in merge(*(x.to("meta") for x in parts)):
        assert x.is_meta


@pytest.mark.parametrize(
    "bad",
    [
        None,
        3,
        torch.zeros(1, 2, 3).to_sparse(),
        torch.zeros(1, 2, 3, dtype=torch.int32),
        torch.zeros(1, 2, 3, dtype=torch.cfloat),
    ],
)
@pytest.mark.parametrize("which", range(4))
def test_only_float_tensors_are_merged(which, bad):
    parts = [torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)] * 2
    parts[which] = bad
    with pytest.raises(ValueError, match="wanted a tensor of floats"):
        merge(*parts)
    with pytest.raises(ValueError, match="layout"):
        merge(*[torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)] * 2, layout=["bhsd"])
    with pytest.raises(ValueError, match=r"layout: got torch.float32 \(2,\), wanted"):
        merge(*[torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)] * 2, layout=torch.ones(2))
