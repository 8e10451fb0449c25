"""Tensors and contexts that must not take the short way to a kernel: the dispatcher has to see them."""

from __future__ import annotations

import sys

import pytest
import torch

from polyflash import SpecError, UnsupportedError, attention, explain, use_backend
from polyflash.reference import attention_reference
from tests.rows_here import HERE


def qkv(seqlen=9, requires_grad=False):
    torch.manual_seed(0)
    return tuple(torch.randn(1, 2, seqlen, 8, requires_grad=requires_grad) for _ in range(3))


def negated(x: torch.Tensor) -> torch.Tensor:
    """-x as a lazy view: its memory holds x."""
    view = torch.complex(x, x).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize("which", range(3))
def test_negated_views_are_read_with_their_sign(which):
    inputs = list(qkv())
    want = attention_reference(*(-x if i == which else x for i, x in enumerate(inputs))).out
    inputs[which] = negated(inputs[which])
    torch.testing.assert_close(attention(*inputs).double(), want, rtol=1e-5, atol=1e-6)


def test_negated_keys_of_a_call_with_gradients():
    q, k, v = qkv()
    q.requires_grad_()
    want = attention(q, -k, v)
    torch.testing.assert_close(attention(q, negated(k), v), want)


@pytest.mark.parametrize("which", range(3))
def test_zero_tensors_have_no_memory(which):
    inputs = list(qkv())
    inputs[which] = torch._efficientzerotensor((1, 2, 9, 8))
    want = attention_reference(
        *(torch.zeros(1, 2, 9, 8) if i == which else x for i, x in enumerate(inputs))
    ).out
    torch.testing.assert_close(attention(*inputs).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mask", "bias", "kv_lens", "q_offset"])
def test_operands_without_memory(name):
    shape, dtype = ((9, 9), {"mask": torch.bool}.get(name, torch.float32))
    if name in ("kv_lens", "q_offset"):
        shape, dtype = (1,), torch.int32
    q, k, v = qkv()
    got = attention(q, k, v, causal=True, **{name: torch._efficientzerotensor(shape, dtype=dtype)})
    assert torch.equal(got, attention(q, k, v, causal=True, **{name: torch.zeros(shape, dtype=dtype)}))


@pytest.mark.parametrize("ask", [attention, explain])
def test_sparse_tensors_are_refused_by_plans_too(ask):
    q, k, v = qkv()
    with pytest.raises(SpecError, match="layout"):
        ask(q, k.to_sparse(), v)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_holds_the_op():
    q, k, v = qkv()
    traced = torch.jit.trace(lambda a: attention(a, k, v), q, check_trace=False)
    assert torch.equal(traced(2 * q), attention(2 * q, k, v))


def test_a_profiler_sees_the_op():
    q, k, v = qkv()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(q, k, v)
    assert any(event.key == "polyflash::attention" for event in profile.key_averages())


def test_a_dispatch_mode_sees_the_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        attention(*qkv())
    assert "polyflash.attention.default" in seen


def test_meta_tensors_give_shapes():
    q, k, v = (x.to("meta") for x in qkv())
    out, lse = attention(q, k, v, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == q.shape[:3]


@pytest.mark.parametrize("which", range(3))
def test_sparse_tensors_are_refused(which):
    inputs = list(qkv())
    inputs[which] = inputs[which].to_sparse()
    with pytest.raises(SpecError, match="layout"):
        attention(*inputs)


def test_tangents_of_small_operands_are_not_dropped():
    q, k, v = qkv()
    for name, shape in (("bias", (9, 9)), ("sinks", (2,))):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.zeros(shape), torch.ones(shape))
            with pytest.raises(UnsupportedError, match="forward-mode"):
                attention(q, k, v, **{name: dual})
            with pytest.raises(UnsupportedError, match="forward-mode"):
                attention(q, k, v, out=torch.empty_like(q), **{name: dual})


class TestOut:
    def test_a_write_is_counted_so_that_autograd_notices(self):
        q, k, v = qkv()
        buffer = torch.randn_like(q)
        a = torch.randn_like(q, requires_grad=True)
        y = (buffer * a).sum()
        attention(q, k, v, out=buffer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    def test_a_place_that_needs_gradients_is_refused(self):
        q, k, v = qkv()
        with pytest.raises(SpecError, match="out"):
            attention(q, k, v, out=torch.empty_like(q).requires_grad_())

    @pytest.mark.parametrize("backend", HERE)
    @pytest.mark.parametrize("which", range(3))
    def test_it_may_be_an_input(self, backend, which):
        inputs = [torch.randn(1, 4, 700, 64) for _ in range(3)]
        want = attention(*inputs, backend=backend)
        assert torch.equal(attention(*inputs, out=inputs[which], backend=backend), want)

    def test_elements_that_share_memory_are_refused(self):
        q, k, v = qkv()
        for strides in ((144, 72, 8, 0), (1, 1, 1, 1), (144, 72, 7, 1)):
            with pytest.raises(SpecError, match="share memory"):
                attention(q, k, v, out=torch.empty(400).as_strided((1, 2, 9, 8), strides))

    def test_it_is_what_comes_back_in_either_layout(self):
        q, k, v = (x.transpose(1, 2) for x in qkv())
        out = torch.empty_like(q)
        assert attention(q, k, v, out=out, layout="bshd") is out


class TestFarValues:
    """Bounds beyond every key are no bounds, however far."""

    @pytest.mark.parametrize("backend", HERE)
    @pytest.mark.parametrize("far", [2**31, 2**40, sys.maxsize])
    def test_windows_and_offsets(self, backend, far):
        q, k, v = qkv()
        everything = attention(q, k, v, backend=backend)
        for options in (
            {"window": (far, far)},
            {"window": (None, far)},
            {"causal": True, "q_offset": far},
        ):
            got = attention(q, k, v, backend=backend, **options)
            torch.testing.assert_close(got, everything)
        ahead = attention(q, k, v, window=(0, far), backend=backend)
        torch.testing.assert_close(ahead, attention(q, k, v, window=(0, None), backend=backend))
        assert not attention(q, k, v, causal=True, q_offset=-far, backend=backend).any()

    @pytest.mark.parametrize("options", [{"window": (2**70, None)}, {"q_offset": 2**70}])
    def test_numbers_beyond_64_bits_are_refused(self, options):
        with pytest.raises(SpecError):
            attention(*qkv(), **options)


def test_gradients_follow_the_choice_of_the_forward_pass():
    q, k, v = qkv(requires_grad=True)
    out = attention(q, k, v)
    with use_backend("cpu"):
        out.sum().backward()
    assert q.grad is not None


def test_an_unknown_backend_in_the_environment_is_named(monkeypatch):
    from polyflash import torch_ops

    token = torch_ops.backend_in_use.set("bogus")
    try:
        with pytest.raises(SpecError, match="POLYFLASH_BACKEND"):
            attention(*qkv())
    finally:
        torch_ops.backend_in_use.reset(token)


def test_explain_sees_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(q, k, v).spec.dtype == "bfloat16"


@pytest.mark.parametrize("target", ["cpu:avx512+avx512_bf61", 3, "cpu"])
def test_targets_nobody_knows_are_refused(target):
    with pytest.raises(SpecError, match="target"):
        explain(*qkv(), target=target)


def test_a_plan_is_no_config():
    plan = explain(*qkv())
    with pytest.raises(SpecError, match=r"explain\(\.\.\.\)\.config"):
        attention(*qkv(), config=plan)
