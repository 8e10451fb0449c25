"""Gradients and options of query groups: each group as one call of the float64 oracle, sums over all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from polyflash import Mask, SpecError, UnsupportedError, attention, attention_groups, explain_groups
from polyflash.reference import attention_reference
from polyflash.spec import Feature
from tests.chosen import in_turn
from tests.device import generator
from tests.rows_here import FREE, HERE

MODES = (True, False)
ROWS, KEYS = (5, 1, 0, 12), 40
OFFSETS, LENS = [3, 39, 7, 20], [9, 40, 12, 33]
EPS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Problem:
    """Groups, keys and what their results are multiplied by; leaves in `dtype`, and the same in float64."""

    def __init__(self, rows=ROWS, heads=4, kv_heads=2, dtype=torch.float32, keys=KEYS, dims=(16, 24)):
        drawn = generator(sum(rows) + heads)
        shapes = [(heads, n, dims[0]) for n in rows] + [(kv_heads, keys, d) for d in dims]
        self.leaves = [torch.randn(2, *shape, generator=drawn).to(dtype).requires_grad_() for shape in shapes]
        self.sinks = torch.randn(heads, generator=drawn).to(dtype).requires_grad_()
        self.of_out = [torch.randn(2, heads, n, dims[1], generator=drawn).to(dtype) for n in rows]
        self.of_lse = [torch.randn(2, heads, n, generator=drawn) for n in rows]
        self.rows, self.dtype, self.heads, self.keys = rows, dtype, heads, keys

    def ran(self, *, sinks=False, bias=None, lse=True, offsets=OFFSETS, lens=LENS, **options):
        """Results, and gradients of all groups, k, v, sinks and biases."""
        *groups, k, v = self.leaves
        options |= {"sinks": self.sinks} if sinks else {}
        options |= {} if bias is None else {"bias": bias}
        made = attention_groups(groups, k, v, q_offsets=offsets, kv_lens=lens, return_lse=True, **options)
        return made, self.gradients(made, self.leaves, self.sinks if sinks else None, bias, lse)

    def wanted(self, *, sinks=False, bias=None, lse=True, offsets=OFFSETS, lens=LENS, **options):
        """The same of the oracle."""
        leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        own_sinks = self.sinks.detach().double().requires_grad_() if sinks else None
        own_bias = bias and [x if x is None else x.detach().double().requires_grad_() for x in bias]
        *groups, k, v = leaves
        shared = {"causal": True, "sinks": own_sinks} | options
        made = []
        for g, (q, offset, n) in enumerate(zip(groups, offsets, lens, strict=True)):
            own = {name: x[g] if isinstance(x, list) else x for name, x in shared.items()}
            if own_bias and own_bias[g] is not None:
                own["bias"] = own_bias[g] if own_bias[g].shape[-1] == 1 else own_bias[g][..., :n]
            own["mask"] = first_keys(own.get("mask"), n)
            made.append(attention_reference(q, k[:, :, :n], v[:, :, :n], q_offset=offset, **own))
        return made, self.gradients(made, leaves, own_sinks, own_bias, lse)

    def gradients(self, made, leaves, sinks, bias, lse):
        of = [(one.out, g.to(one.out.dtype)) for one, g in zip(made, self.of_out, strict=True)]
        if lse:
            seen = [one.lse.detach().isfinite() for one in made]
            of += [
                (torch.where(m, one.lse, 0.0), torch.where(m, g, 0.0).to(one.lse.dtype))
                for one, g, m in zip(made, self.of_lse, seen, strict=True)
            ]
        inputs = [*leaves, *([] if sinks is None else [sinks]), *[x for x in bias or [] if x is not None]]
        return torch.autograd.grad([x for x, _ in of], inputs, [g for _, g in of])


def first_keys(mask, n):
    """A mask of all keys as one of the first n."""
    if isinstance(mask, Mask) and mask.k_ids is not None:
        return Mask.segments(mask.q_ids, mask.k_ids[:, :n])
    return mask[..., :n] if isinstance(mask, torch.Tensor) and mask.shape[-1] > 1 else mask


def close(got, want, tolerance):
    for one, other in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(one.out.double(), other.out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(one.lse.double(), other.lse, rtol=tolerance, atol=tolerance)
    for one, other in zip(got[1], want[1], strict=True):
        error = (one.double() - other).abs().max() if one.numel() else 0.0
        assert error <= 2 * tolerance * max(1.0, float(other.abs().max()) if one.numel() else 0.0)


def ids(rows, keys=KEYS):
    """Documents of 7 keys; a row belongs to that of its key."""
    k_ids = (torch.arange(keys) // 7).int().expand(2, keys).contiguous()
    return [
        Mask.segments(((torch.arange(n) + at) // 7).int().expand(2, n).contiguous(), k_ids)
        for n, at in zip(rows, OFFSETS, strict=True)
    ]


def masks(rows):
    drawn = generator(3)
    shapes = [(1, 1, rows[0], KEYS), (2, 4, 1, KEYS), None, (1, 4, rows[3], 1)]
    return [None if s is None else torch.rand(s, generator=drawn) < 0.7 for s in shapes]


def biases(dtype=torch.float32, rows=ROWS):
    drawn = generator(4)
    shapes = [(1, 1, rows[0], KEYS), (2, 4, 1, KEYS), None, (1, 4, rows[3], 1)]
    return [s if s is None else torch.randn(s, generator=drawn).to(dtype).requires_grad_() for s in shapes]


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "sinks": {"sinks": True},
    "not causal": {"causal": False},
    "windows of their own": {"window": [(6, None), None, (0, 0), (3, 2)], "sinks": True},
    "softcap and scale": {"softcap": 1.5, "scale": -0.7},
    "a group sees no key": {"lens": [0, 40, 12, 0], "sinks": True},
    "before and behind the keys": {"offsets": [-100, 100, 0, -6]},
}
OWN_WALK: dict[str, dict[str, Any]] = {
    "segments": {"mask": ids(ROWS), "sinks": True},
    "bool masks": {"mask": masks(ROWS)},
    "one mask": {"mask": torch.arange(KEYS) % 3 > 0},
    "lists": {
        "causal": False,
        "mask": Mask.lengths(torch.tensor([30, 11]).int(), torch.tensor([2, 0]).int()),
    },
    "bias": {"bias": biases()},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.3, 0.0, 0.7])},
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("name", [*OPTIONS, *OWN_WALK])
def test_results_and_gradients_are_those_of_the_oracle(name, backend):
    problem = Problem()
    own = OPTIONS.get(name) or OWN_WALK.get(name, {})
    want = problem.wanted(**own)
    for fused in MODES if name in OPTIONS else (False,):
        close(problem.ran(fused=fused, backend=backend, **own), want, EPS[torch.float32])


@pytest.mark.parametrize(
    "heads, kv_heads, dtype, fused",
    in_turn([(2, 2), (6, 2), (5, 1)], [torch.float64, torch.bfloat16, torch.float16], MODES, of=3),
    ids=str,
)
def test_dtypes_and_heads(heads, kv_heads, dtype, fused):
    problem = Problem(heads=heads, kv_heads=kv_heads, dtype=dtype)
    got = problem.ran(fused=fused, sinks=True)
    close(got, problem.wanted(sinks=True), EPS[dtype])
    assert all(x.dtype is dtype for x in got[1])


def test_bias_of_16_bits_and_free_choice():
    problem, bias = Problem(dtype=torch.bfloat16), biases(torch.bfloat16)
    close(problem.ran(bias=bias), problem.wanted(bias=bias), EPS[torch.bfloat16])


@pytest.mark.parametrize("backend", HERE)
def test_sums_over_groups_are_rounded_once(backend):
    """Ten groups: their dk and dv rounded to bfloat16 each would be 2.6 times as wrong as one rounding is."""
    problem = Problem(rows=(3,) * 10, dtype=torch.bfloat16, heads=2)
    options = {"offsets": [35 + i % 3 for i in range(10)], "lens": [40] * 10, "sinks": True}
    for fused in MODES:
        got = problem.ran(fused=fused, backend=backend, **options)[1]
        wide = Problem(rows=(3,) * 10, dtype=torch.bfloat16, heads=2)
        want = wide.wanted(**options)[1]
        for x, y, rounding in zip(got[-3:], want[-3:], (2.0, 2.0, 4.0), strict=True):
            error = (x.double() - y).norm() / y.norm()
            assert error < rounding * (y.bfloat16().double() - y).norm() / y.norm()


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("fused", MODES)
def test_bits_repeat(fused, backend):
    problem = Problem(dtype=torch.bfloat16 if backend != "torch" else torch.float32)
    first, again = (problem.ran(fused=fused, sinks=True, backend=backend) for _ in range(2))
    assert all(torch.equal(a.out, b.out) for a, b in zip(first[0], again[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


@pytest.mark.parametrize("fused", MODES)
def test_one_group_has_the_gradients_of_attention(fused):
    problem = Problem(rows=(20,))
    q, k, v = problem.leaves
    out = attention_groups([q], k, v, q_offsets=[20], kv_lens=[38], fused=fused)[0]
    got = torch.autograd.grad(out, (q, k, v), problem.of_out[0])
    want = attention(q, k[:, :, :38], v[:, :, :38], causal=True, q_offset=20)
    for x, y in zip(got, torch.autograd.grad(want, (q, k, v), problem.of_out[0]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", MODES)
def test_some_results_and_some_inputs(fused):
    """Gradients of one group alone, through its lse alone, and of those inputs that ask for one."""
    problem = Problem()
    *groups, k, v = problem.leaves
    fixed = [x.detach() for x in groups[:3]]
    made = attention_groups(
        [*fixed, groups[3]], k, v.detach(), q_offsets=OFFSETS, kv_lens=LENS, fused=fused, return_lse=True
    )
    got = torch.autograd.grad(made[3].lse.sum(), (groups[3], k), retain_graph=True)
    want = attention(groups[3], k[:, :, :33], v[:, :, :33], causal=True, q_offset=20, return_lse=True)
    for x, y in zip(got, torch.autograd.grad(want.lse.sum(), (groups[3], k)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    (of_k,) = torch.autograd.grad(made[2].out.sum() + made[0].out.sum(), (k,))
    assert of_k[:, :, 9:].abs().max() == 0.0 < of_k.abs().max()


@pytest.mark.parametrize("fused", MODES)
def test_zigzag_ranks_sum_to_the_gradients_of_full_causal_attention(fused):
    ranks, rows = 3, 5
    problem = Problem(rows=(rows,) * 2 * ranks, keys=2 * ranks * rows)
    *pieces, k, v = problem.leaves
    want = attention_reference(*(torch.cat(x, 2).double() for x in (pieces, [k], [v])), causal=True)
    want = torch.autograd.grad(want.out, (*pieces, k, v), torch.cat(problem.of_out, 2).double())
    of_keys, of_rows = [0.0, 0.0], {}
    for rank in range(ranks):
        own = (rank, 2 * ranks - 1 - rank)
        outs = attention_groups(
            [pieces[i] for i in own], k, v, q_offsets=[i * rows for i in own],
            kv_lens=[(i + 1) * rows for i in own], fused=fused,
        )  # fmt: skip
        got = torch.autograd.grad(outs, (*(pieces[i] for i in own), k, v), [problem.of_out[i] for i in own])
        of_rows |= dict(zip(own, got[:2], strict=True))
        of_keys = [total + x for total, x in zip(of_keys, got[2:], strict=True)]
    for x, y in zip([*(of_rows[i] for i in range(2 * ranks)), *of_keys], want, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", MODES)
def test_checkpointing_compilation_and_layouts(fused):
    problem = Problem()
    want = problem.ran(fused=fused, sinks=True, lse=False)[1]

    def call(*leaves):
        *groups, k, v, sinks = leaves
        return attention_groups(groups, k, v, q_offsets=OFFSETS, kv_lens=LENS, fused=fused, sinks=sinks)

    def turned(*leaves):
        *groups, k, v = [x.transpose(1, 2) for x in leaves[:-1]]
        sinks, places = leaves[-1], {"q_offsets": OFFSETS, "kv_lens": LENS}
        made = attention_groups(groups, k, v, fused=fused, sinks=sinks, layout="bshd", **places)
        return [x.transpose(1, 2) for x in made]

    torch._dynamo.reset()
    leaves = (*problem.leaves, problem.sinks)
    for run in (
        lambda *x: checkpoint(call, *x, use_reentrant=False),
        torch.compile(call, fullgraph=True, backend="aot_eager"),
        turned,
    ):
        got = torch.autograd.grad(run(*leaves), leaves, problem.of_out)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_transforms():
    problem = Problem(rows=(4, 6))
    a, b, k, v = (x.detach() for x in problem.leaves)

    def loss(a, b, k, v):
        first, second = attention_groups([a, b], k, v, q_offsets=[5, 30], kv_lens=[20, 40], fused=False)
        return first.sum() + (second * second).sum()

    got = torch.func.grad(loss, argnums=(0, 1, 2, 3))(a, b, k, v)
    leaves = [x.clone().requires_grad_() for x in (a, b, k, v)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    with pytest.raises(UnsupportedError, match="second derivatives"):
        (first,) = torch.autograd.grad(loss(*leaves), leaves[:1], create_graph=True)
        first.sum().backward()


def test_codes_of_keys_give_gradients_of_rows():
    import polyflash

    problem = Problem()
    *groups, k, v = problem.leaves
    codes = polyflash.quantize(k.detach(), polyflash.quant.Scheme(dtype="int8", granularity="token"))
    outs = attention_groups(groups, codes, v, q_offsets=OFFSETS, kv_lens=LENS)
    values = polyflash.dequantize(codes)
    want = attention_groups(groups, values, v, q_offsets=OFFSETS, kv_lens=LENS)
    leaves = (*groups, v)
    for x, y in zip(*(torch.autograd.grad(o, leaves, problem.of_out) for o in (outs, want)), strict=True):
        assert torch.equal(x, y)


def test_explain_tells_of_gradients():
    problem = Problem()
    *groups, k, v = problem.leaves
    plan = explain_groups(groups, k, v, q_offsets=OFFSETS, kv_lens=LENS, fused=True)
    assert plan.fused and len(plan.plans) == 1 and len(plan.backward) == 4
    assert all(Feature.WIDE_GRADIENTS in p.spec.features and p.backend == FREE for p in plan.backward)
    assert "gradients: a call per group" in str(plan)
    plan = explain_groups(groups, k, v, q_offsets=OFFSETS, kv_lens=LENS, bias=biases())
    assert not plan.fused and plan.why.startswith("group 0 has bias, and one walk")
    with torch.no_grad():
        assert explain_groups(groups, k, v, q_offsets=OFFSETS, kv_lens=LENS).backward == ()
    meta = [x.to("meta") for x in problem.leaves]
    plan = explain_groups(meta[:-2], *meta[-2:], q_offsets=OFFSETS, kv_lens=LENS, target="cuda:sm90")
    assert all(p.backend == "triton" for p in plan.backward)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"fused": True, "bias": biases()}, UnsupportedError, "fused=True: group 0 has bias"),
        (
            {"window": [None, (1, 2)]},
            SpecError,
            "window: got list of 2, wanted one for all groups, or a list",
        ),
        ({"window": [None, (-1, 2), None, None]}, SpecError, r"window\[1\] left: got -1"),
        ({"mask": [None, torch.ones(KEYS), None, None]}, SpecError, r"mask\[1\].*bool"),
        ({"mask": torch.ones(9, dtype=torch.bool)}, SpecError, "mask keys: got 9, wanted 40"),
        ({"mask": ids((4, 1, 0, 12))}, SpecError, "mask of group 0: q_segments"),
        ({"bias": [None, None, None, torch.ones(4, 11, KEYS)]}, SpecError, r"bias\[3\]"),
        ({"bias": [None]}, SpecError, "bias: got list of 1"),
        ({"alibi_slopes": torch.ones(3)}, SpecError, "alibi_slopes: got"),
    ],
)
def test_wrong_options_are_refused_by_name(change, error, words):
    problem = Problem()
    *groups, k, v = problem.leaves
    with pytest.raises(error, match=words):
        attention_groups(groups, k, v, q_offsets=OFFSETS, kv_lens=LENS, **change)
    with pytest.raises(error, match=words):
        explain_groups(groups, k, v, q_offsets=OFFSETS, kv_lens=LENS, **change)


def test_a_backend_without_such_gradients_refuses_before_it_runs():
    problem = Problem(dtype=torch.float64)
    *groups, k, v = problem.leaves
    with pytest.raises(UnsupportedError, match="float64"):
        attention_groups(groups, k, v, q_offsets=OFFSETS, kv_lens=LENS, backend="cpu")
