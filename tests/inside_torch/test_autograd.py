"""Gradients as torch's autograd asks for them: what is saved, what is computed, what is refused, and that
hooks, modes, checkpoints and autocast change no bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from polyflash import Mask, attention, attention_varlen, torch_ops, use_backend
from polyflash.spec import Arguments, Phase
from tests.rows_here import HERE

OP = torch.ops.polyflash.attention.default
BACKWARD = torch.ops.polyflash.attention_backward.default
NAMES = ("q", "k", "v", "bias", "sinks")


def operands(seqlen_q=9, seqlen_k=12, heads=4, kv_heads=2, head_dim=8, head_dim_v=8, dtype=torch.float32):
    """q, k, v, a bias that broadcasts and sinks; without requires_grad."""
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (2, heads, seqlen_q, head_dim),
        (2, kv_heads, seqlen_k, head_dim),
        (2, kv_heads, seqlen_k, head_dim_v),
        (1, heads, 1, seqlen_k),
        (heads,),
    )
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def call(q, k, v, bias=None, sinks=None, **options):
    return attention(q, k, v, bias=bias, sinks=sinks, causal=True, **options)


def gradients_of(function, inputs, dout=None):
    """Gradients of fresh leaves with these values, and the result."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(torch.ones_like(out) if dout is None else dout)
    return out.detach(), [x.grad for x in leaves]


def assert_same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def spy_on_backward(monkeypatch):
    """The `needs` of every launch of a backward row from now on."""
    seen = []
    differentiate = torch_ops._differentiate

    def watched(launch, dout, dlse, q, k, v, out, lse, args, needs):
        seen.append(tuple(needs))
        return differentiate(launch, dout, dlse, q, k, v, out, lse, args, needs)

    monkeypatch.setattr(torch_ops, "_differentiate", watched)
    return seen


def count_forwards(monkeypatch):
    """The launches of a forward row from now on."""
    seen = []
    run = torch_ops._run
    monkeypatch.setattr(torch_ops, "_run", lambda *x: seen.append(x[0].row.name) or run(*x))
    return seen


class TestOnlyWhatIsAskedFor:
    """github.com/AMD-AGI/Primus-Turbo/pull/458: one small input alone."""

    @pytest.mark.parametrize("backend", HERE)
    @pytest.mark.parametrize("profiled", [False, True])
    @pytest.mark.parametrize("wanted", [{0}, {1}, {2}, {3}, {4}, {0, 3}, {1, 2, 4}, {0, 1, 2, 3, 4}])
    def test_needs_reach_the_row(self, monkeypatch, backend, profiled, wanted):
        seen = spy_on_backward(monkeypatch)
        inputs = [x.requires_grad_(i in wanted) for i, x in enumerate(operands())]
        with torch.profiler.profile() if profiled else contextlib.nullcontext():
            call(*inputs, backend=backend).square().sum().backward()
        assert seen == [tuple(i in wanted for i in range(5))]
        assert [x.grad is not None for x in inputs] == [i in wanted for i in range(5)]
        _, all_of_them = gradients_of(lambda *x: call(*x, backend=backend).square().sum(), operands())
        for i in wanted:
            torch.testing.assert_close(inputs[i].grad, all_of_them[i], rtol=1e-5, atol=1e-6)

    def test_compiled(self, monkeypatch):
        seen = spy_on_backward(monkeypatch)
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for wanted in ({1}, {0, 4}):
            inputs = [x.requires_grad_(i in wanted) for i, x in enumerate(operands())]
            compiled(*inputs).sum().backward()
            assert seen.pop() == tuple(i in wanted for i in range(5)) and not seen


class TestSaved:
    def packed(self, function):
        """Addresses of the tensors a call saves."""
        seen = []

        def pack(x):
            seen.append(x.data_ptr())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            function()
        return seen

    def test_operands_and_results_are_saved_once_and_not_copied(self):
        inputs = [x.requires_grad_() for x in operands()]
        lens = torch.tensor([12, 5], dtype=torch.int32)
        results = []
        saved = self.packed(lambda: results.extend(call(*inputs, kv_lens=lens, return_lse=True)))
        assert sorted(saved) == sorted(x.data_ptr() for x in (*inputs, *results, lens))
        saved = self.packed(lambda: results.append(attention(*inputs[:3])))
        assert len(saved) == 5 and {x.data_ptr() for x in (*inputs[:3], results[-1])} < set(saved)

    @pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
    def test_nothing_without_gradients(self, quiet):
        inputs = [x.requires_grad_() for x in operands()]
        with quiet():
            assert self.packed(lambda: call(*inputs)) == []
        assert self.packed(lambda: call(*(x.detach() for x in inputs))) == []

    @pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
    def test_inference_keeps_no_operand_alive(self, quiet):
        gc.disable()
        try:
            q, k, v = (x.requires_grad_() for x in operands()[:3])
            with quiet():
                out = attention(q, k, v, causal=True)
            kept = [weakref.ref(x) for x in (q, k, v)]
            del q, k, v
            assert [x() for x in kept] == [None] * 3 and out.grad_fn is None
        finally:
            gc.enable()

    def test_a_graph_frees_what_it_saved_without_the_collector(self):
        gc.disable()
        try:
            q, k, v = (x.requires_grad_() for x in operands()[:3])
            out = attention(q, k, v, bias=torch.zeros(12), causal=True)
            node = weakref.ref(out.grad_fn)
            out.sum().backward()
            del out
            assert node() is None
        finally:
            gc.enable()

    def test_a_change_in_place_is_noticed(self):
        """All operands, masks and lengths too: the backward pass reads them again."""
        for which in range(6):
            mask = torch.ones(9, 12, dtype=torch.bool)
            inputs = [x.requires_grad_(i == 0) for i, x in enumerate(operands())]
            out = call(*inputs, mask=mask)
            with torch.no_grad():
                (*inputs, mask)[which].logical_not_() if which == 5 else inputs[which].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()

    def test_hooks_may_move_and_convert_what_is_saved(self):
        _, want = gradients_of(call, operands())
        for hooks in (
            torch.autograd.graph.save_on_cpu(),
            torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True), torch.from_numpy),
            torch.autograd.graph.saved_tensors_hooks(lambda x: (x,), lambda x: x[0].clone()),
            torch.autograd.graph.saved_tensors_hooks(lambda x: -x, lambda x: torch._neg_view(x)),
        ):
            with hooks:
                _, got = gradients_of(call, operands())
            assert_same(got, want)


class TestRefused:
    @pytest.mark.parametrize("profiled", [False, True])
    @pytest.mark.parametrize("quadratic", [False, True])
    def test_second_derivatives(self, profiled, quadratic):
        """github.com/pytorch/pytorch/issues/116350: an error, also where torch's own once_differentiable
        would give a constant: a gradient penalty beside another loss."""
        q, k, v = (x.requires_grad_() for x in operands()[:3])
        with torch.profiler.profile() if profiled else contextlib.nullcontext():
            out = attention(q, k, v)
            (g,) = torch.autograd.grad((out.square() if quadratic else out).sum(), q, create_graph=True)
        assert g.requires_grad
        with pytest.raises(NotImplementedError, match="second derivatives"):
            (g.square().sum() + q.sum()).backward()

    def test_second_derivatives_of_the_ops(self):
        q, k, v = (x.requires_grad_() for x in operands(kv_heads=4)[:3])
        out, lse = OP(q, k, v, False, None, True)
        (g,) = torch.autograd.grad(out.sum() + lse.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            g.sum().backward()

    @pytest.mark.parametrize("fake", [False, True])
    def test_the_backward_op_takes_what_the_forward_op_gave(self, fake):
        """A kernel reads them without looking."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() if fake else contextlib.nullcontext():
            q, k, v = torch.ones(2, 4, 9, 8), torch.ones(2, 2, 12, 8), torch.ones(2, 2, 12, 6)
            out, lse = torch.ones(2, 4, 9, 6), torch.ones(2, 4, 9)
            right = {"dout": out, "dlse": lse, "q": q, "k": k, "v": v, "out": out, "lse": lse}
            for name, wrong in (
                *(("dout", out[:, :, :8]), ("dout", out.double()), ("out", q), ("dlse", lse[..., None])),
                *(("lse", lse[:1]), ("lse", lse.new_empty(0)), ("lse", lse.bfloat16()), ("k", k[..., :4])),
            ):
                with pytest.raises(ValueError, match=f"{name} ?.*: got"):
                    BACKWARD(**{**right, name: wrong}, needs=[True, True, True, False, False])
            BACKWARD(**right, needs=[True, True, True, False, False])

    def test_a_gradient_with_create_graph_is_the_gradient(self):
        q, k, v = (x.requires_grad_() for x in operands()[:3])
        want = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
        assert_same(
            torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v), create_graph=True), want
        )

    @pytest.mark.parametrize("which", range(5))
    @pytest.mark.parametrize("entry", ["attention", "op", "out"])
    def test_forward_mode(self, which, entry):
        """github.com/pytorch/pytorch/issues/128971"""
        inputs = operands(kv_heads=4)
        with torch.autograd.forward_ad.dual_level():
            inputs[which] = torch.autograd.forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
            with pytest.raises(NotImplementedError, match="forward-mode"):
                if entry == "op":
                    OP(*inputs[:3], *Arguments(bias=inputs[3], sinks=inputs[4]))
                elif entry == "out":
                    call(*inputs, out=torch.empty_like(operands()[0]))
                else:
                    call(*inputs)

    def test_tensors_of_inference_mode_are_torchs_own_error(self):
        """github.com/state-spaces/s4/issues/169"""
        with torch.inference_mode():
            q, k, v = operands()[:3]
        with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
            attention(q * 1, k, v.clone().requires_grad_())

    def test_a_graph_is_used_once(self):
        q, k, v = (x.requires_grad_() for x in operands()[:3])
        out = attention(q, k, v)
        out.sum().backward(retain_graph=True)
        first = q.grad.clone()
        out.sum().backward()
        assert torch.equal(q.grad, 2 * first)
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


DOUTS = {
    "expanded": lambda shape: torch.ones(()).expand(shape),
    "one row for all": lambda shape: torch.randn(shape[3]).expand(shape),
    "every second": lambda shape: torch.randn(*shape[:3], 2 * shape[3])[..., ::2],
    "transposed": lambda shape: torch.randn(*shape[:2], shape[3], shape[2]).transpose(2, 3),
    "other order": lambda shape: torch.randn(shape[2], shape[0], shape[3], shape[1]).permute(1, 3, 0, 2),
    "overlapping": lambda shape: torch.randn(2000).as_strided(shape, (7, 5, 3, 1)),
    "shifted": lambda shape: torch.randn(torch.Size(shape).numel() + 1)[1:].view(shape),
    "negated": lambda shape: torch.complex(*2 * (torch.randn(shape),)).conj().imag,
    "zero": lambda shape: torch._efficientzerotensor(shape),
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", DOUTS)
def test_any_dout(backend, kind):
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in operands()]
    out, lse = call(*inputs, return_lse=True, backend=backend)
    dout, dlse = DOUTS[kind](out.shape), DOUTS[kind]((*lse.shape, 1))[..., 0]
    plain = [torch.empty(x.shape).copy_(x) for x in (dout, dlse)]
    for results, given, like in (((out, lse), (dout, dlse), plain), ((out,), (dout,), plain[:1])):
        got = torch.autograd.grad(results, inputs, given, retain_graph=True)
        want = torch.autograd.grad(results, inputs, like, retain_graph=True)
        assert_same(got[:4], want[:4])
        torch.testing.assert_close(got[4], want[4])  # a sum over rows in the order of their strides


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
def test_gradients_of_shuffled_operands(backend, order):
    """In eager mode and under a dispatch mode: the same bits in the operand's own order."""
    back = [order.index(i) for i in range(4)]
    inputs = [x.permute(order).contiguous().permute(back) for x in operands()[:3]]

    def function(*x):
        return attention(*x, causal=True, backend=backend)

    _, want = gradients_of(function, operands()[:3])
    _, got = gradients_of(function, inputs)
    with Watch() as watch:
        _, seen = gradients_of(function, inputs)
    assert {"attention.default", "attention_backward.default"} <= set(watch.names)
    assert_same(got, want)
    assert_same(seen, want)
    assert [x.stride() for x in got] == [x.stride() for x in inputs]


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function).removeprefix("polyflash."))
        return function(*args, **(kwargs or {}))


def test_plain_gradients_skip_the_dispatcher(monkeypatch):
    """A call of torch's dispatcher from Python to Python costs as much as a small kernel."""

    def refuse(*x):
        raise AssertionError("through the dispatcher")

    monkeypatch.setattr(torch_ops, "_attention", refuse)
    monkeypatch.setattr(torch_ops, "_attention_backward", refuse)
    gradients_of(call, operands())
    gradients_of(lambda *x: attention(*x, return_lse=True).out, operands()[:3])
    q, k, v, *small = operands()
    bias, sinks = (torch.nn.Parameter(x) for x in small)
    call(q, k, v, bias, sinks).sum().backward()
    assert bias.grad.shape == bias.shape and sinks.grad.shape == sinks.shape


def test_a_profiler_and_a_mode_see_the_backward_op():
    q, k, v = (x.requires_grad_() for x in operands()[:3])
    out = attention(q, k, v)
    with torch.profiler.profile() as profile:
        out.sum().backward(retain_graph=True)
    assert any(event.key == "polyflash::attention_backward" for event in profile.key_averages())
    with Watch() as watch:
        out.sum().backward()
    assert "attention_backward.default" in watch.names


def test_a_route_of_gradients_follows_its_forward_route():
    """Another backend, dtype or operand takes another plan of the backward pass, however often they
    alternate."""
    for _ in range(2):
        for backend in HERE:
            for dtype in (torch.float32, torch.bfloat16):
                for extra in (0, 2):
                    inputs = [x.requires_grad_() for x in operands(dtype=dtype)[: 3 + extra]]
                    with use_backend(backend):
                        out = call(*inputs)
                    node = out.grad_fn
                    known = hasattr(node._forward_cls, "launch")
                    launch = node._forward_cls.launch if known else node.launch
                    assert launch.row.phase is Phase.BACKWARD and launch.row.backend == backend
                    assert launch.spec.dtype == str(dtype).removeprefix("torch.")
                    assert launch.spec.features >= ({"bias", "sinks"} if extra else set())
                    out.sum().backward()


def test_the_lse_alone():
    q, k, v = (x.requires_grad_() for x in operands()[:3])
    lse = attention(q, k, v, return_lse=True).lse
    lse.sum().backward()
    assert not v.grad.any() and q.grad.any()
    out, lse = attention(q.detach(), k, v, return_lse=True)
    (out.sum() * 0 + lse.sum()).backward()


@pytest.mark.parametrize("batched", ["dout", "both"])
def test_gradients_of_many_losses_at_once(batched):
    """torch.autograd.grad(is_grads_batched=True) maps over the backward pass of an eager graph."""
    inputs = [x.requires_grad_() for x in operands()]
    out, lse = call(*inputs, return_lse=True)
    douts, dlses = torch.randn(3, *out.shape), torch.randn(3, *lse.shape)
    results, given = ((out,), (douts,)) if batched == "dout" else ((out, lse), (douts, dlses))
    got = torch.autograd.grad(results, inputs, given, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        want = torch.autograd.grad(results, inputs, [x[n] for x in given], retain_graph=True)
        torch.testing.assert_close([x[n] for x in got], list(want), rtol=1e-5, atol=1e-6)


class TestAutocast:
    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_a_call_is_cast_as_a_whole(self, kind, layout):
        """github.com/pytorch/pytorch/issues/141774: parameters in float32, keys in half precision."""
        q, k, v = (x.contiguous() for x in operands(9, 9, kv_heads=4)[:3])
        mixed = (q, k.to(kind), v)

        def mixed_call(*x):
            with torch.autocast("cpu", dtype=kind):
                out = attention(*x, causal=True, layout=layout)
            assert out.dtype is kind
            return out

        out, got = gradients_of(mixed_call, mixed)
        want_out, want = gradients_of(
            lambda *x: attention(*(y.to(kind) for y in x), causal=True, layout=layout), mixed
        )
        assert torch.equal(out, want_out) and [x.dtype for x in got] == [x.dtype for x in mixed]
        assert_same(got, want)

    @pytest.mark.parametrize("profiled", [False, True])
    def test_a_backward_pass_under_autocast_is_the_same(self, profiled):
        inputs = operands(dtype=torch.float32)
        _, want = gradients_of(lambda *x: call(*x, backend="torch"), inputs)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = call(*leaves, backend="torch")
        with (
            torch.profiler.profile() if profiled else contextlib.nullcontext(),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            out.backward(torch.ones_like(out))
        assert_same([x.grad for x in leaves], want)

    def test_compiled_under_autocast(self):
        torch._dynamo.reset()

        def mixed_call(*x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return attention(*x, causal=True)

        out, want = gradients_of(mixed_call, operands()[:3])
        compiled_out, got = gradients_of(
            torch.compile(mixed_call, fullgraph=True, backend="aot_eager"), operands()[:3]
        )
        assert torch.equal(out, compiled_out)
        assert_same(got, want)


class Block(torch.nn.Module):
    """Attention between two projections, with a structured mask and maybe dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.mask = Mask.causal() & Mask.window(5, None)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
        out = attention(q, k, v, mask=self.mask, dropout_p=self.dropout, layout="bshd")
        return x + self.out(out.flatten(2))


def step(module, x, wrap=lambda module, x: module(x)):
    """Loss and gradients of one step, dropout drawn from the same state each time."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    loss = wrap(module, x).square().sum()
    loss.backward()
    return loss.detach(), [x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
class TestCheckpoints:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputed_gradients_are_the_same_bits(self, monkeypatch, dropout, reentrant):
        """The seed of dropout is drawn again, and is the same: github.com/pytorch/pytorch/pull/197563"""
        module, x = Block(dropout), torch.randn(2, 9, 32)
        loss, want = step(module, x)
        forwards = count_forwards(monkeypatch)
        again, got = step(module, x, lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
        assert len(forwards) == 2 and torch.equal(loss, again)
        assert_same(got, want)

    @pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
    def test_a_policy_can_keep_attention(self, monkeypatch, dropout, policy):
        module, x = Block(dropout), torch.randn(2, 9, 32)
        loss, want = step(module, x)
        forwards = count_forwards(monkeypatch)

        def choose(context, op, *args, **kwargs):
            return policy if op is OP else CheckpointPolicy.PREFER_RECOMPUTE

        def wrap(m, x):
            return checkpoint(
                m, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(choose)
            )

        again, got = step(module, x, wrap)
        assert len(forwards) == (1 if policy is CheckpointPolicy.MUST_SAVE else 2)
        assert torch.equal(loss, again)
        assert_same(got, want)


def test_modules_copy_and_pickle():
    module, x = Block(), torch.randn(2, 9, 32)
    loss, want = step(module, x)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        again, got = step(other, x)
        assert torch.equal(loss, again) and other.mask.left == 5
        assert_same(got, want)


@pytest.mark.parametrize("packed", [False, True])
def test_three_lengths_compile_at_most_twice_backward_too(packed):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(bounds, q, k, v):
        if packed:
            return attention_varlen(
                *(x.flatten(0, 1) for x in (q, k, v)), bounds, bounds, causal=True
            ).unflatten(0, (2, -1))
        return attention(q, k, v, causal=True, layout="bshd")

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in (9, 17, 40):
        bounds = torch.tensor([0, seqlen, 2 * seqlen], dtype=torch.int32)
        inputs = [torch.randn(2, seqlen, 4, 8) for _ in range(3)]
        out, want = gradients_of(partial(function, bounds), inputs)
        compiled_out, got = gradients_of(partial(compiled, bounds), inputs)
        assert torch.equal(out, compiled_out)
        assert_same(got, want)
    assert counter.frame_count <= 2
