"""The op under the API: fake tensors, autograd, compile counts, and the route cache. What torch checks of an
op itself is in test_opcheck.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from polyflash import (
    Mask,
    UnsupportedError,
    attention,
    attention_varlen,
    backends,
    explain,
    target,
    torch_ops,
)
from polyflash.backends.torch.configs import candidates, choose
from polyflash.reference import attention_reference
from polyflash.spec import MANY_KEYS, MOST_POSITIONS, Arguments, AttentionSpec, Feature, Phase
from tests.rows_here import needs_cpu_engine

OP = torch.ops.polyflash.attention.default


def qkv(seqlen_q=9, seqlen_k=9, head_dim=8, head_dim_v=8, heads=2, kv_heads=2, dtype=torch.float32):
    torch.manual_seed(0)
    return (
        torch.randn(2, heads, seqlen_q, head_dim, dtype=dtype),
        torch.randn(2, kv_heads, seqlen_k, head_dim, dtype=dtype),
        torch.randn(2, kv_heads, seqlen_k, head_dim_v, dtype=dtype),
    )


LENS = torch.tensor([9, 4], dtype=torch.int32)


def packed(rows=(3, 0, 9, 6), keys=(7, 2, 0, 9), heads=4, head_dim_v=6, tail=2):
    """Packed q, k, v with a tail that belongs to nobody, and their bounds."""
    generator = torch.Generator().manual_seed(sum(rows))
    shapes = ((sum(rows) + tail, heads, 8), (sum(keys) + tail, 2, 8), (sum(keys) + tail, 2, head_dim_v))
    bounds = (torch.tensor((0, *n)).cumsum(0).int() for n in (rows, keys))
    return *(torch.randn(shape, generator=generator) for shape in shapes), *bounds


def views(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    """The op's arguments of a packed call."""
    args = Arguments(need_lse=True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    return (*(x.transpose(0, 1)[None] for x in (q, k, v)), *args)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("longest", [False, True])
def test_packed_lengths_compile_at_most_twice(grad, longest):
    """Contents, totals and max_seqlen of the members change; the graph does not."""
    torch._dynamo.reset()
    counter = CompileCounter()

    def call(q, k, v, cu_q, cu_k, max_q, max_k):
        options = {"max_seqlen_q": max_q, "max_seqlen_k": max_k} if longest else {}
        return attention_varlen(q, k, v, cu_q, cu_k, causal=True, **options) * 2

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in range(8):
        rows, keys = (3 + n, 9 - n, 10 + n), (7, 2 + n, 9 + n)
        q, k, v, *bounds = packed(rows, keys)
        inputs = (q.requires_grad_(grad), k, v, *bounds, max(rows), max(keys))
        assert torch.equal(compiled(*inputs), call(*inputs))
    assert counter.frame_count <= 2


def test_compiled_packed_gradients_equal_eager_ones():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: attention_varlen(*x, causal=True), fullgraph=True, backend="aot_eager"
    )
    for rows, keys in (((3, 0, 9), (7, 2, 0)), ((1, 1, 1), (9, 5, 30)), ((40, 2, 0), (5, 5, 5))):
        *inputs, cu_q, cu_k = packed(rows, keys)
        eager = [x.requires_grad_() for x in inputs]
        traced = [x.detach().clone().requires_grad_() for x in eager]
        attention_varlen(*eager, cu_q, cu_k, causal=True).square().sum().backward()
        compiled(*traced, cu_q, cu_k).square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(eager, traced, strict=True))


def test_compiled_intervals_are_not_constants():
    """Lists made outside and grids turned into lists within the graph."""
    torch._dynamo.reset()
    q, k, v = qkv(40, 60)

    def call(grid):
        return attention(q, k, v, mask=Mask.blocks(grid, rows=8, keys=16) & Mask.causal())

    def listed(starts, ends):
        return attention(q, k, v, mask=Mask.intervals(starts, ends, rows=8))

    compiled, compiled_lists = (torch.compile(f, fullgraph=True, backend="eager") for f in (call, listed))
    for seed in range(3):
        torch.manual_seed(seed)
        grid = torch.rand(2, 1, 5, 4) < 0.5
        torch.testing.assert_close(compiled(grid), call(grid))
        bounds = Mask.blocks(grid, rows=8, keys=16).bounds.unbind(-1)
        torch.testing.assert_close(compiled_lists(*bounds), listed(*bounds))


def test_packed_contents_are_not_read_while_tracing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, cu = torch.randn(9, 4, 8), torch.randn(11, 2, 8), torch.zeros(4, dtype=torch.int32)
        out, lse = attention_varlen(q, k, k, cu, cu, max_seqlen_q=3, kv_lens=cu[1:], return_lse=True)
        assert out.shape == (9, 4, 8) and lse.shape == (4, 9)
        with pytest.raises(ValueError, match="members"):
            attention_varlen(q, k, k, cu, cu[1:])
        grid = torch.zeros(3, 3, dtype=torch.bool)
        x = torch.randn(1, 2, 9, 8)
        assert attention(x, x, x, mask=Mask.blocks(grid, rows=3, keys=3)).shape == x.shape


def test_vmap_over_packed_members_is_a_loop():
    q, k, v, cu_q, cu_k = packed()
    many = [torch.stack((x, x.flip(0), x + 1)) for x in (q, k, v)]
    got = torch.vmap(lambda *x: attention_varlen(*x, cu_q, cu_k, causal=True))(*many)
    for i in range(3):
        want = attention_varlen(*(x[i] for x in many), cu_q, cu_k, causal=True)
        torch.testing.assert_close(got[i], want)


def test_a_packed_decode_loop_adds_no_route():
    """Totals, lengths and members change from step to step; what a route depends on does not."""
    before = None
    for n in range(60):
        q, k, v, cu_q, cu_k = packed((1,) * (20 + n % 7), (40 + n,) * (20 + n % 7), tail=0)
        attention_varlen(q, k, v, cu_q, cu_k, causal=True, max_seqlen_q=1, max_seqlen_k=40 + n)
        before = len(torch_ops._routes) if n == 6 else before
    assert len(torch_ops._routes) == before


def test_packed_chunks_add_no_route():
    before = None
    for n in range(20):
        inputs = packed((40 + n, 35), (80 + n, 90 - n))
        attention_varlen(*inputs, causal=True, max_seqlen_q=40 + n, max_seqlen_k=1100 + n)
        before = len(torch_ops._routes) if n == 0 else before
    assert len(torch_ops._routes) == before


def test_a_route_remembers_neither_members_nor_lists():
    """Packed, listed and plain calls of equal shapes never share a route."""
    q, k, v = (x[:1] for x in qkv())
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    plain = attention(q, k, v, backend="torch")
    packed_out = attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), bounds, bounds, backend="torch")
    listed = attention(q, k, v, mask=Mask.blocks(torch.eye(3).bool(), rows=3, keys=3), backend="torch")
    for other in (packed_out.transpose(0, 1)[None], listed):
        assert not torch.equal(other, plain)
        assert torch.equal(attention(q, k, v, backend="torch"), plain)
    for first, second in ((4, 9), (7, 9), (0, 9)):
        bounds = torch.tensor([0, first, second], dtype=torch.int32)
        got = attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), bounds, bounds)
        want = [attention(*(x[:, :, part] for x in (q, k, v))) for part in (slice(first), slice(first, 9))]
        torch.testing.assert_close(got.transpose(0, 1)[None], torch.cat(want, 2))


def test_explain_reads_no_contents():
    q, k, v, cu_q, cu_k = packed()
    plan = explain(q, k, v, cu_seqlens_q=cu_q * 0 - 5, cu_seqlens_k=cu_k * 0 + 99)
    assert plan.backend and plan.spec.members == 4


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_sixteen_lengths_compile_at_most_twice(grad, layout):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True, layout=layout) * 2, fullgraph=True, backend=counter
    )
    for seqlen in range(17, 33):
        q = torch.randn(1, 2, seqlen, 8) if layout == "bhsd" else torch.randn(1, seqlen, 2, 8)
        q.requires_grad_(grad)
        got = compiled(q, q.detach(), q.detach())
        assert torch.equal(got, attention(q, q, q, causal=True, layout=layout) * 2)
    assert counter.frame_count <= 2


def test_decode_steps_compile_at_most_twice():
    torch._dynamo.reset()
    counter = CompileCounter()
    cache = torch.randn(1, 2, 64, 8)
    compiled = torch.compile(
        lambda q, k, offset: attention(q, k, k, causal=True, q_offset=offset), backend=counter
    )
    for n in range(20, 40):
        compiled(torch.randn(1, 2, 1, 8), cache[:, :, :n], n - 1)
    assert counter.frame_count <= 2


def test_compiled_gradients_equal_eager_ones():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attention(*x, causal=True), fullgraph=True, backend="aot_eager")
    for seqlen in (9, 17, 30):
        eager = [x.requires_grad_() for x in qkv(seqlen, seqlen, heads=4)]
        traced = [x.detach().clone().requires_grad_() for x in eager]
        attention(*eager, causal=True).square().sum().backward()
        compiled(*traced).square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(eager, traced, strict=True))


def test_compiled_lengths_are_not_constants():
    """Tensor lengths, masks and offsets of a compiled call are read at run time, not captured."""
    torch._dynamo.reset()
    q, k, v = qkv()
    compiled = torch.compile(
        lambda lens: attention(q, k, v, mask=Mask.lengths(lens)), fullgraph=True, backend="eager"
    )
    for lens in ([9, 4], [1, 9], [0, 0]):
        lens = torch.tensor(lens, dtype=torch.int32)
        assert torch.equal(compiled(lens), attention(q, k, v, kv_lens=lens))


def test_compile_under_inference_mode():
    torch._dynamo.reset()
    q, k, v = qkv()
    compiled = torch.compile(lambda: attention(q, k, v), backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(), attention(q, k, v))


def test_static_refusals_are_raised_while_tracing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.randn(1, 2, 8, 8, dtype=torch.float64)
        with pytest.raises(NotImplementedError, match="float64"):
            attention(q, q, q, backend="cpu")
        with pytest.raises(ValueError, match="head_dim"):
            attention(q, q[..., :4], q)


def test_a_thousand_lengths_make_one_route():
    q, k, v = qkv(40, 1000)
    attention(q, k, v, causal=True)
    before = len(torch_ops._routes)
    for n in range(MANY_KEYS, 1000):  # enough for the rows to share a walk
        attention(q, k[:, :, :n], v[:, :, :n], causal=True)
    assert len(torch_ops._routes) == before


def test_a_route_hides_no_later_mistake():
    q, k, v = qkv()
    attention(q, k, v)
    for bad in ((q, k, v[:, :, :8]), (q, k[:1], v[:1]), (q[0], k, v), (q, k, v.half()), (q, k[..., :4], v)):
        with pytest.raises(ValueError):
            attention(*bad)


def test_optional_operands_never_share_a_route():
    """Every operand on, then off again: a cached route must not remember it (peers' B-cch-01, B-cch-02)."""
    q, k, v = qkv()
    plain = attention(q, k, v)
    operands = {
        "causal": True,
        "window": (1, 1),
        "softcap": 0.7,
        "scale": 2.0,
        "kv_lens": LENS,
        "kv_starts": LENS - 4,
        "q_offset": 3,
        "mask": torch.eye(9, dtype=torch.bool),
        "bias": torch.randn(9, 9),
        "alibi_slopes": torch.ones(2),
        "sinks": torch.ones(2),
    }
    for name, value in operands.items():
        extra = {"causal": True} if name == "q_offset" else {}
        changed = attention(q, k, v, **{name: value}, **extra)
        assert not torch.equal(changed, plain), name
        assert torch.equal(attention(q, k, v), plain), name
    for softcap in (0.7, 3.0, 0.7):
        want = attention(q, k, v, softcap=softcap, bias=torch.zeros(1))
        torch.testing.assert_close(attention(q, k, v, softcap=softcap), want)


FAR = 2**31 + 100


def far_call():
    """Nine queries over 2**31 + 100 keys that are one number in memory; a window sees the last ones."""
    k = torch.ones(()).expand(1, 2, FAR, 8)
    return torch.ones(1, 2, 9, 8), k, torch.tensor(3.0).expand_as(k)


@needs_cpu_engine
def test_positions_beyond_32_bits_are_refused_by_a_row_that_has_no_more():
    q, k, v = far_call()
    attention(q, k[:, :, :2048], v[:, :, :2048], window=(9, 0), return_lse=True, backend="cpu")
    for more in ({}, {"alibi_slopes": torch.ones(2)}):
        with pytest.raises(UnsupportedError, match=f"positions: up to .*asked for {FAR + 9}"):
            attention(q, k, v, window=(9, 0), return_lse=True, backend="cpu", **more)


def test_positions_beyond_32_bits_make_a_route_of_their_own():
    q, k, v = far_call()
    short = attention(q, k[:, :, :2048], v[:, :, :2048], window=(9, 0), return_lse=True)
    out, lse = attention(q, k, v, window=(9, 0), return_lse=True)
    assert explain(q, k, v, window=(9, 0)).backend == "torch"
    torch.testing.assert_close(
        (out, lse), (torch.full_like(q, 3.0), torch.full_like(lse, math.sqrt(8) + math.log(10)))
    )
    torch.testing.assert_close((out, lse), tuple(short))


def test_the_limit_of_positions_is_that_of_routes():
    for row in backends.TABLE:
        assert row.max_positions in (None, MOST_POSITIONS)
        if row.max_positions is None or row.backend != "cpu":
            continue
        for keys, refused in ((MOST_POSITIONS - 7, False), (MOST_POSITIONS - 6, True)):
            spec = AttentionSpec(row.phase, "float32", "cpu", 1, 1, 1, 7, keys, 8, 8, frozenset())
            said = row.reasons_against(spec, target.parse("cpu:avx512"), by_name=True)
            assert any("positions" in reason for reason in said) == refused
            assert not refused or not row.accepts(spec, target.parse("cpu:avx512"), by_name=True)


class TestTorchRow:
    """Finite operands stay finite in float32."""

    def check(self, q, k, v, **options):
        got = attention(q, k, v, return_lse=True, backend="torch", **options)
        want = attention_reference(q, k, v, **options)
        top = torch.finfo(torch.float32).max
        torch.testing.assert_close(got.out, want.out.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.lse, want.lse.clamp(-top, top).float(), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("softcap", [1e-300, 1e-46, 1e-40, 1e-20, 1e20, 1e36, 1e39, 1e300])
    def test_softcap(self, softcap):
        q, k, v = qkv()
        self.check(q, k, v, softcap=softcap)
        q = (q * 1e-3).requires_grad_()
        got = torch.autograd.grad(attention(q, k, v, softcap=softcap, backend="torch").square().sum(), q)[0]
        want = torch.autograd.grad(attention_reference(q, k, v, softcap=softcap).out.square().sum(), q)[0]
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("value", [1e300, -1e300, 1e39, -1e39])
    def test_bias(self, value):
        q, k, v = qkv()
        bias = torch.full((9, 9), value, dtype=torch.float64)
        self.check(q * 0, k, v, bias=bias)
        bias[:, 3] = 0.0
        self.check(q, k, v, bias=bias)

    @pytest.mark.parametrize("value", [1e300, -1e300, 1e39, -1e39])
    @pytest.mark.parametrize("keys", [0, 9])
    def test_sinks(self, value, keys):
        q, k, v = qkv(9, keys)
        sinks = torch.tensor([value, 0.5], dtype=torch.float64)
        self.check(q, k, v, sinks=sinks)
        if keys:
            self.check(q, k, v, sinks=sinks, kv_lens=torch.tensor([0, 4], dtype=torch.int32))

    def test_infinities_stay(self):
        q, k, v = qkv()
        bias = torch.zeros(9, 9, dtype=torch.float64)
        bias[2], bias[3, 4] = -torch.inf, torch.nan
        self_out, lse = attention(q, k, v, bias=bias, return_lse=True, backend="torch")
        assert (self_out[:, :, 2] == 0).all() and (lse[:, :, 2] == -torch.inf).all()
        assert self_out[:, :, 3].isnan().all() and self_out[:, :, 4:].isfinite().all()

    def test_candidates_are_distinct(self):
        for heads in (1, 4, 8, 16, 64):
            for features in (frozenset(), frozenset({Feature.CAUSAL}), frozenset({Feature.BATCH_INVARIANT})):
                for rows, keys in ((1, 70), (70, 130), (1000, 1000)):
                    spec = AttentionSpec(
                        Phase.FORWARD, "float32", "cpu", 1, heads, heads, rows, keys, 64, 64, features
                    )
                    found = candidates(spec, target.parse("cpu:avx512"))
                    assert len(set(found)) == len(found) and found[0] == choose(
                        spec, target.parse("cpu:avx512")
                    )


class TestAutograd:
    def test_only_what_is_asked_for_is_differentiated(self):
        for wanted in range(3):
            inputs = list(qkv())
            inputs[wanted].requires_grad_()
            attention(*inputs, causal=True).sum().backward()
            assert [x.grad is not None for x in inputs] == [i == wanted for i in range(3)]

    def test_small_operands_alone(self):
        q, k, v = qkv()
        bias, sinks = torch.randn(1, 2, 1, 9, requires_grad=True), torch.randn(2, requires_grad=True)
        attention(q, k, v, bias=bias, sinks=sinks).sum().backward()
        assert bias.grad.shape == bias.shape and sinks.grad.shape == sinks.shape

    def test_the_lse_is_differentiable(self):
        q, k, v = (x.double().requires_grad_() for x in qkv(4, 5))
        torch.autograd.gradcheck(lambda *x: tuple(attention(*x, causal=True, return_lse=True)), (q, k, v))

    def test_double_backward_is_refused_clearly(self):
        q, k, v = qkv()
        q.requires_grad_()
        (g,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match=r"first ones only"):
            g.sum().backward()

    def test_forward_mode_is_refused_clearly(self):
        q, k, v = qkv()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(NotImplementedError, match="forward-mode"):
                attention(dual, k, v)

    def test_nothing_is_saved_without_gradients(self):
        q, k, v = qkv()
        q.requires_grad_()
        with torch.no_grad():
            assert attention(q, k, v).grad_fn is None
        with torch.inference_mode():
            assert attention(q, k, v).is_inference()

    @pytest.mark.parametrize("form", ["expanded", "strided", "transposed"])
    def test_any_strides_of_dout(self, form):
        q, k, v = (x.requires_grad_() for x in qkv())
        out = attention(q, k, v, causal=True)
        dout = {
            "expanded": torch.ones(()).expand(out.shape),
            "strided": torch.randn(2, 2, 9, 16)[..., ::2],
            "transposed": torch.randn(2, 2, 8, 9).transpose(2, 3),
        }[form]
        got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        want = torch.autograd.grad(out, (q, k, v), dout.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def test_zero_sizes_have_zero_gradients(self):
        for seqlen_q, seqlen_k in ((0, 5), (5, 0), (0, 0)):
            inputs = [x.requires_grad_() for x in qkv(seqlen_q, seqlen_k)]
            attention(*inputs, causal=True).sum().backward()
            assert all(x.grad.shape == x.shape and not x.grad.any() for x in inputs)
