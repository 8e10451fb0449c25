"""torch.func over the op: gradients at every level, and vmap of every operand against a loop."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from polyflash import Mask, SpecError, attention, attention_varlen, use_backend
from polyflash.spec import Arguments
from tests.rows_here import HERE

OP = torch.ops.polyflash.attention.default
N = 3
BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 6, 7, 8


def random(*shape):
    return torch.randn(shape)


def lengths(*shape):
    return torch.randint(1, KEYS + 1, shape, dtype=torch.int32)


def segments(length):
    return lambda *shape: torch.randint(0, 2, (*shape, length), dtype=torch.int32)


def blocks(*shape):
    bounds = Mask.blocks(torch.rand(*shape, 3, 4) < 0.6, rows=2, keys=2).bounds
    return torch.nn.functional.pad(bounds, (0, 0, 0, 2 - bounds.shape[-2]))


# One sample of each operand by name: a maker, and the shapes that it may have.
SCORES = (
    *((ROWS, KEYS), (HEADS, 1, KEYS), (1, 1, ROWS, 1)),
    *((BATCH, 1, 1, KEYS), (BATCH, HEADS, ROWS, KEYS), (1, HEADS, 1, KEYS)),
)
OPERANDS = {
    "bias": (random, SCORES),
    "mask": (lambda *shape: torch.rand(shape) < 0.7, SCORES),
    "sinks": (random, ((HEADS,),)),
    "alibi_slopes": (torch.rand, ((HEADS,), (BATCH, HEADS))),
    "kv_lens": (lengths, ((BATCH,),)),
    "kv_starts": (lambda *shape: lengths(*shape) // 2, ((BATCH,),)),
    "q_offset": (lengths, ((BATCH,),)),
    "intervals": (blocks, ((1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS))),
}
CASES = [(name, shape) for name, (_, shapes) in OPERANDS.items() for shape in shapes]


def qkv(*front, batch=BATCH):
    torch.manual_seed(0)
    shapes = ((HEADS, ROWS), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    return [torch.randn(*front, batch, heads, length, DIM) for heads, length in shapes]


def call(q, k, v, name=None, x=None, **options):
    """attention with one more operand by name."""
    if name == "intervals":
        options["mask"] = Mask(bounds=x, rows=2)
    elif name == "segments":
        options["mask"] = Mask.segments(x[..., :ROWS], x[..., ROWS:])
    elif name is not None:
        options[name] = x
    return attention(q, k, v, causal=True, **options)


def loop(function, in_dims, inputs):
    """vmap as a loop."""
    samples = [
        [x if dim is None else x.select(dim, n) for x, dim in zip(inputs, in_dims, strict=True)]
        for n in range(N)
    ]
    results = [function(*sample) for sample in samples]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(column) for column in zip(*results, strict=True))
    return torch.stack(results)


def assert_mapped(function, in_dims, inputs, exact=True):
    got = vmap(function, in_dims=tuple(in_dims))(*inputs)
    want = loop(function, in_dims, inputs)
    compare = torch.testing.assert_close
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        if exact:
            compare(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            compare(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(
    "which", [w for w in itertools.product([0, None], repeat=3) if any(x == 0 for x in w)]
)
def test_vmap_of_some_of_q_k_v(backend, which):
    inputs = [a if dim == 0 else b for a, b, dim in zip(qkv(N), qkv(), which, strict=True)]
    assert_mapped(
        lambda *x: tuple(call(*x, return_lse=True, backend=backend)), which, inputs, exact=backend == "cpu"
    )


@pytest.mark.parametrize("dims", [(0, 1, 2), (4, 3, 0), (-1, -2, -5)])
def test_vmap_of_any_dimension(dims):
    inputs = [x.movedim(0, dim) for x, dim in zip(qkv(N), dims, strict=True)]
    assert_mapped(lambda *x: call(*x), dims, inputs, exact="cpu" in HERE)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(("alone", "dim"), [(False, 0), (False, -1), (False, None), (True, 0), (True, -1)])
@pytest.mark.parametrize(("name", "shape"), [*CASES, ("segments", (BATCH,))])
def test_vmap_of_operands(name, shape, dim, alone, backend):
    """Mapped with q, alone, or shared by all samples while q is mapped."""
    q, k, v = qkv() if alone else qkv(N)
    make = segments(ROWS + KEYS) if name == "segments" else OPERANDS[name][0]
    x = make(*shape) if dim is None else torch.stack([make(*shape) for _ in range(N)]).movedim(0, dim)
    first = None if alone else 0
    assert_mapped(
        lambda q, k, v, x: tuple(call(q, k, v, name, x, return_lse=True, backend=backend)),
        (first, first, first, dim),
        (q, k, v, x),
        exact=backend == "cpu",
    )


@pytest.mark.parametrize("batch", [0, 1])
def test_vmap_of_no_and_of_one_request(batch):
    bias, lens = torch.randn(N, HEADS, 1, KEYS), lengths(N, batch)
    assert_mapped(
        lambda q, k, v, bias, lens: call(q, k, v, bias=bias, kv_lens=lens),
        (0,) * 5,
        (*qkv(N, batch=batch), bias, lens),
        exact="cpu" in HERE,
    )


def test_vmap_of_no_samples():
    q, k, v = (x[:0] for x in qkv(N))
    for dropout in (0.0, 0.5):
        function = partial(attention, return_lse=True, dropout_p=dropout, dropout_seed=3)
        out, lse = vmap(lambda *x, function=function: tuple(function(*x)))(q, k, v)
        assert out.shape == q.shape and lse.shape == q.shape[:4]


def test_vmap_in_vmap():
    many = [torch.stack((x, x.flip(0))) for x in qkv(N)]
    bias = torch.randn(2, KEYS)
    got = vmap(vmap(call, in_dims=(0, 0, 0)), in_dims=(0, 0, 0))(*many)
    want = torch.stack([torch.stack([call(*(x[i, n] for x in many)) for n in range(N)]) for i in range(2)])
    torch.testing.assert_close(got, want)
    nested = vmap(lambda b, *x: vmap(lambda *y: call(*y, bias=b))(*x))(bias, *many)
    want = [torch.stack([call(*(x[i, n] for x in many), bias=bias[i]) for n in range(N)]) for i in range(2)]
    torch.testing.assert_close(nested, torch.stack(want))


def packed(*front):
    torch.manual_seed(1)
    shapes = ((9, HEADS, DIM), (11, KV_HEADS, DIM), (11, KV_HEADS, DIM))
    return [torch.randn(*front, *shape) for shape in shapes]


@pytest.mark.parametrize("mapped", ["q", "bounds", "both", "lengths"])
def test_vmap_of_packed_members(mapped):
    bounds = [torch.tensor([0, n, 9], dtype=torch.int32) for n in (2, 0, 9)]
    cu, dims = bounds[0], [0, 0, 0, None]
    if mapped in ("bounds", "both"):
        cu, dims = torch.stack(bounds), [0, 0, 0, 0] if mapped == "both" else [None, None, None, 0]
    inputs = (*packed(*(() if mapped == "bounds" else (N,))), cu)

    def function(q, k, v, cu, lens=None):
        return tuple(attention_varlen(q, k, v, cu, cu, causal=True, kv_lens=lens, return_lse=True))

    if mapped == "lengths":
        inputs, dims = (*inputs, torch.tensor([[2, 1], [0, 7], [1, 2]], dtype=torch.int32)), [*dims, 0]
    assert_mapped(function, dims, inputs)


class TestDropout:
    def test_a_seed_that_is_given_is_the_same_for_all(self):
        q, k, v = (x[:1].expand_as(x) for x in qkv(N))
        got = vmap(lambda *x: call(*x, dropout_p=0.5, dropout_seed=7))(q, k, v)
        assert torch.equal(got[0], got[1]) and torch.equal(
            got[0], call(q[0], k[0], v[0], dropout_p=0.5, dropout_seed=7)
        )

    def test_seeds_may_be_mapped(self):
        seeds = torch.tensor([1, 2, 3])
        q, k, v = qkv()
        got = vmap(lambda s: call(q, k, v, dropout_p=0.5, dropout_seed=s))(seeds)
        want = [call(q, k, v, dropout_p=0.5, dropout_seed=s) for s in (1, 2, 3)]
        assert torch.equal(got, torch.stack(want))

    def test_a_seed_that_is_drawn_obeys_randomness(self):
        q, k, v = (x[:1].expand_as(x) for x in qkv(N))
        function = lambda *x: call(*x, dropout_p=0.5)  # noqa: E731
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(function)(q, k, v)
        same = vmap(function, randomness="same")(q, k, v)
        different = vmap(function, randomness="different")(q, k, v)
        assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])

    def test_the_mask_of_the_gradient_is_that_of_the_result(self):
        q, k, v = qkv(N)
        function = lambda v, q, k: call(q, k, v, dropout_p=0.5, dropout_seed=7).square().sum()  # noqa: E731
        got = vmap(grad(function))(v, q, k)
        assert torch.equal(got, torch.stack([grad(function)(v[n], q[n], k[n]) for n in range(N)]))


class TestGradients:
    """Against autograd, bit by bit."""

    def autograd(self, function, inputs, count):
        leaves = [x.detach().clone().requires_grad_(i < count) for i, x in enumerate(inputs)]
        return torch.autograd.grad(function(*leaves), leaves[:count])

    @pytest.mark.parametrize("backend", HERE)
    def test_grad_of_every_operand(self, backend):
        bias, sinks = torch.randn(1, HEADS, 1, KEYS), torch.randn(HEADS)

        def function(q, k, v, bias, sinks):
            out, lse = call(q, k, v, bias=bias, sinks=sinks, return_lse=True, backend=backend)
            return out.square().sum() + lse.sum()

        inputs = (*qkv(), bias, sinks)
        got = grad(function, argnums=tuple(range(5)))(*inputs)
        for a, b in zip(got, self.autograd(function, inputs, 5), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(grad(function, argnums=3)(*inputs), got[3])

    @pytest.mark.parametrize("with_lse", [False, True])
    def test_vjp_after_its_level_has_ended(self, with_lse):
        q, k, v = qkv()

        def function(*x):
            out, lse = call(*x, return_lse=True)
            return (out, lse) if with_lse else out

        results, pull = vjp(function, q, k, v)
        given = torch.ones_like(q), torch.ones(q.shape[:3])
        got = pull(given if with_lse else given[0])
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        call_results = call(*leaves, return_lse=True)
        want = torch.autograd.grad(call_results[: 1 + with_lse], leaves, given[: 1 + with_lse])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(results[0] if with_lse else results, call_results.out)

    @pytest.mark.parametrize("argnum", range(5))
    @pytest.mark.parametrize("chunk", [None, 3])
    def test_jacrev(self, argnum, chunk):
        inputs = (*qkv(), torch.randn(HEADS, 1, KEYS), torch.randn(HEADS))

        def function(q, k, v, bias, sinks):
            return call(q, k, v, bias=bias, sinks=sinks).sum((0, 3))

        got = jacrev(function, argnums=argnum, chunk_size=chunk)(*inputs)
        want = torch.autograd.functional.jacobian(
            lambda x: function(*inputs[:argnum], x, *inputs[argnum + 1 :]), inputs[argnum]
        )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("name", ["bias", "sinks"])
    @pytest.mark.parametrize("mapped", [False, True])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_per_sample_gradients_of_small_operands(self, name, mapped, batch):
        """One gradient per sample, also of an operand that all samples share."""
        shapes = (HEADS, 1, KEYS), (batch, 1, ROWS, 1), (1, HEADS, 1, KEYS), (KEYS,)
        for shape in shapes if name == "bias" else ((HEADS,),):
            x = torch.randn(N, *shape) if mapped else torch.randn(*shape)

            def function(x, q, k, v):
                return call(q, k, v, name, x).square().sum()

            dims = (0 if mapped else None, 0, 0, 0)
            assert_mapped(grad(function, argnums=(0, 1, 3)), dims, (x, *qkv(N, batch=batch)), exact=False)

    @pytest.mark.parametrize(("name", "shape"), CASES)
    def test_per_sample_gradients_beside_operands(self, name, shape):
        x = torch.stack([OPERANDS[name][0](*shape) for _ in range(N)])

        def function(q, k, v, x):
            return call(q, k, v, name, x).square().sum()

        assert_mapped(grad(function, argnums=(0, 1, 2)), (0,) * 4, (*qkv(N), x), exact=False)

    def test_packed(self):
        cu = torch.tensor([0, 4, 9], dtype=torch.int32)
        function = lambda *x: attention_varlen(*x, cu, cu, causal=True).square().sum()  # noqa: E731
        for a, b in zip(
            grad(function, (0, 1, 2))(*packed()), self.autograd(function, packed(), 3), strict=True
        ):
            assert torch.equal(a, b)
        assert_mapped(grad(function, (0, 1, 2)), (0, 0, 0), packed(N))

    def test_grad_of_vmap_and_autograd_outside(self):
        inputs = qkv(N)
        bias = torch.randn(HEADS, 1, KEYS)

        def function(q, k, v, bias):
            return vmap(lambda *x: call(*x, bias=bias).square().sum())(q, k, v).sum()

        def unmapped(q, k, v, bias):
            return sum(call(q[n], k[n], v[n], bias=bias).square().sum() for n in range(N))

        want = self.autograd(unmapped, (*inputs, bias), 4)
        for got in (
            grad(function, argnums=(0, 1, 2, 3))(*inputs, bias),
            self.autograd(function, (*inputs, bias), 4),
        ):
            torch.testing.assert_close(got, tuple(want), rtol=1e-5, atol=1e-6)

    def test_a_module_per_sample(self):
        """An ensemble: every sample with its own weights."""

        class Module(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.project = torch.nn.Linear(DIM, 3 * DIM)

            def forward(self, x):
                q, k, v = self.project(x).chunk(3, -1)
                return attention(q, k, v, causal=True).sum()

        modules = [Module() for _ in range(N)]
        weights, buffers = stack_module_state(modules)
        x = torch.randn(BATCH, HEADS, ROWS, DIM)
        got = vmap(grad(lambda w, b: functional_call(modules[0], (w, b), (x,))))(weights, buffers)
        for n, module in enumerate(modules):
            module(x).backward()
            torch.testing.assert_close(got["project.weight"][n], module.project.weight.grad)

    @pytest.mark.parametrize("backend", HERE)
    def test_the_backend_asked_for_makes_the_gradients_too(self, backend):
        q, k, v = qkv()
        function = lambda *x: call(*x).square().sum()  # noqa: E731
        with use_backend(backend):
            got = grad(function)(q, k, v)
        want = grad(lambda *x: call(*x, backend=backend).square().sum())(q, k, v)
        assert torch.equal(got, want)


class TestCompiled:
    @pytest.mark.parametrize("kind", ["vmap", "grad", "vmap of grad", "grad of vmap", "lse"])
    def test_transforms_inside_a_graph(self, kind):
        torch._dynamo.reset()
        q, k, v = qkv() if kind == "grad" else qkv(N)
        loss = lambda *x: call(*x).square().sum()  # noqa: E731
        function = {
            "vmap": lambda *x: vmap(call)(*x),
            "grad": lambda *x: grad(loss, argnums=(0, 2))(*x),
            "vmap of grad": lambda *x: vmap(grad(loss, argnums=1))(*x),
            "grad of vmap": lambda *x: grad(lambda *y: vmap(loss)(*y).sum())(*x),
            "lse": lambda *x: vmap(lambda *y: tuple(call(*y, return_lse=True)))(*x),
        }[kind]
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
        torch.testing.assert_close(got, function(q, k, v), rtol=0, atol=0)

    def test_forward_mode_is_refused(self):
        torch._dynamo.reset()
        q, k, v = qkv()
        with pytest.raises(Exception, match="forward-mode"):
            torch.compile(lambda q: jvp(lambda q: call(q, k, v), (q,), (q,)), backend="aot_eager")(q)


class TestRefused:
    @pytest.mark.parametrize("which", range(3))
    def test_forward_mode(self, which):
        """github.com/pytorch/pytorch/issues/128971"""
        inputs = qkv()
        function = lambda x: call(*inputs[:which], x, *inputs[which + 1 :]).sum()  # noqa: E731
        x = inputs[which]
        for use in (
            lambda: jvp(function, (x,), (x,)),
            lambda: jacfwd(function)(x),
            lambda: hessian(function)(x),
            lambda: linearize(function, x),
            lambda: vmap(lambda t: jvp(function, (x,), (t,)))(torch.stack([x, x])),
        ):
            with pytest.raises(NotImplementedError, match="forward-mode"):
                use()

    def test_tangents_of_something_else_pass(self):
        q, k, v = qkv()
        value, tangent = jvp(lambda x: x * call(q, k, v).sum(), (torch.tensor(2.0),), (torch.tensor(1.0),))
        torch.testing.assert_close(value, 2 * tangent)

    def test_second_derivatives(self):
        """github.com/pytorch/pytorch/issues/116350"""
        q, k, v = qkv()
        loss = lambda q: call(q, k, v).square().sum()  # noqa: E731
        for use in (
            lambda: grad(lambda q: grad(loss)(q).sum())(q),
            lambda: jacrev(lambda q: grad(loss)(q).sum((2, 3)))(q),
            lambda: vmap(grad(lambda q: grad(loss)(q).sum()))(torch.stack([q, q])),
        ):
            with pytest.raises(NotImplementedError, match="second derivatives"):
                use()
        leaf = q.clone().requires_grad_()
        gradient = grad(loss)(leaf)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            gradient.sum().backward()

    def test_slopes_have_no_gradient(self):
        """Mapped slopes do not show that they need one."""
        q, k, v = qkv()
        slopes = torch.rand(N, HEADS)
        loss = lambda s: call(q, k, v, alibi_slopes=s).sum()  # noqa: E731
        for use in (
            lambda: grad(loss)(slopes[0]),
            lambda: vmap(grad(loss))(slopes),
            lambda: grad(lambda s: vmap(loss)(s).sum())(slopes),
            lambda: vmap(loss)(slopes.clone().requires_grad_()),
            lambda: OP(q, k, v, *Arguments(alibi_slopes=slopes[0].clone().requires_grad_())),
        ):
            with pytest.raises(SpecError, match="alibi_slopes: got requires_grad=True"):
                use()
        assert not vmap(loss)(slopes).requires_grad

    def test_a_place_for_the_result(self):
        q, k, v = qkv(N)
        with pytest.raises(SpecError, match=r"out: got a call under torch\.func"):
            vmap(lambda *x: attention(*x, out=torch.empty_like(x[0])))(q, k, v)

    def test_mistakes_are_those_of_one_sample(self):
        q, k, v = qkv(N)
        with pytest.raises(SpecError, match=r"k head_dim: got 4, wanted 8"):
            vmap(attention)(q, k[..., :4], v)
        with pytest.raises(SpecError, match=r"bias shape: got \(3, 5\)"):
            vmap(lambda *x: attention(*x[:3], bias=x[3]))(q, k, v, torch.zeros(N, 3, 5))
        with pytest.raises(SpecError, match="kv_lens"):
            vmap(lambda *x: attention(*x[:3], kv_lens=x[3]))(q, k, v, lengths(N, BATCH) + KEYS)


class TestOps:
    """The ops themselves have the same rules."""

    @pytest.mark.parametrize("need_lse", [False, True])
    def test_vmap(self, need_lse):
        q, k, v = qkv(N)
        for more in ({}, {"sinks": torch.randn(HEADS), "dropout_p": 0.3, "dropout_seed": torch.tensor(1)}):
            args = Arguments(causal=True, need_lse=need_lse, **more)
            assert_mapped(lambda *x, args=args: OP(*x, *args), (0, 0, 0), (q, k, v), exact="cpu" in HERE)

    @pytest.mark.parametrize("need_lse", [False, True])
    def test_gradients_without_an_lse(self, need_lse):
        q, k, v = qkv()
        got = grad(lambda *x: OP(*x, True, None, need_lse)[0].square().sum())(q, k, v)
        leaf = q.clone().requires_grad_()
        OP(leaf, k, v, True, None, need_lse)[0].square().sum().backward()
        want = grad(lambda *x: call(*x).square().sum())(q, k, v)
        assert torch.equal(got, want) and torch.equal(leaf.grad, want)
