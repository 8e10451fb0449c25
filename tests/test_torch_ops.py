"""The op under the API: schema, fake tensors, autograd, compile counts, and the route cache."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

from polyflash import Mask, attention, torch_ops
from polyflash.spec import Arguments

OP = torch.ops.polyflash.attention.default


def qkv(seqlen_q=9, seqlen_k=9, head_dim=8, head_dim_v=8, heads=2, kv_heads=2, dtype=torch.float32):
    torch.manual_seed(0)
    return (
        torch.randn(2, heads, seqlen_q, head_dim, dtype=dtype),
        torch.randn(2, kv_heads, seqlen_k, head_dim, dtype=dtype),
        torch.randn(2, kv_heads, seqlen_k, head_dim_v, dtype=dtype),
    )


LENS = torch.tensor([9, 4], dtype=torch.int32)
CASES = {
    "plain": {},
    "lse": {"need_lse": True},
    "causal scaled": {"causal": True, "scale": 0.3, "need_lse": True},
    "window and lengths": {"window_left": 3, "kv_lens": LENS, "need_lse": True},
    "mask": {"mask": torch.ones(9, 9, dtype=torch.bool).tril(), "need_lse": True},
    "bias and sinks": {"bias": torch.randn(1, 2, 1, 9), "sinks": torch.randn(2), "need_lse": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor(7), "need_lse": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_opcheck(case, dtype):
    opcheck(OP, (*qkv(dtype=dtype), *Arguments(**CASES[case])))


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded", "last dim strided"])
def test_opcheck_layouts(view):
    q, k, v = qkv(head_dim_v=5, heads=4)
    change = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
        "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
        "last dim strided": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    }[view]
    opcheck(OP, (*map(change, (q, k, v)), True, None, True))


@pytest.mark.parametrize("case", ["causal scaled", "mask", "bias and sinks"])
def test_opcheck_with_gradients(case):
    q, k, v = (x.requires_grad_() for x in qkv())
    opcheck(OP, (q, k, v, *Arguments(**CASES[case])))


def test_opcheck_out_and_backward():
    q, k, v = qkv()
    opcheck(torch.ops.polyflash.attention_out.default, (q, k, v, torch.empty_like(q), True, None, True))
    out, lse = OP(q, k, v, True, None, True)
    needs = [True, False, True, False, False]
    opcheck(
        torch.ops.polyflash.attention_backward.default, (q, lse, q, k, v, out, lse, needs, True, None, True)
    )


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
    q, k, v = qkv(40, 400)
    attention(q, k, v, causal=True)
    before = len(torch_ops._routes)
    for n in range(100, 400):
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
        with pytest.raises(RuntimeError, match=r"once_differentiable|first derivatives"):
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
