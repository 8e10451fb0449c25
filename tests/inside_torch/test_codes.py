"""Codes in graphs: one op over them for every length, read in the walk where a kernel reads them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import polyflash
from polyflash.kvcache import KVCache
from polyflash.quant import NAMED, Scheme, codec
from tests.tolerance import same_bits

HADAMARD = Scheme(rotation="hadamard"), Scheme(rotation="hadamard")


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes(schemes, keys, **changes):
    values = (randn(1, 2, keys, 64, seed=seed) for seed in (1, 2))
    return [polyflash.quantize(x, replace(s, **changes)) for x, s in zip(values, schemes, strict=True)]


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


def refused(*_):
    raise AssertionError("codes were decoded")


@pytest.mark.parametrize("rows", (1, 40))
@pytest.mark.parametrize("name", ("int8", "int4", "mxfp4", "rotated"))
def test_compiled_bits_are_those_of_eager(name, rows):
    """Many rows over most codes have them decoded, within the op; few rows have not."""
    k, v = codes(HADAMARD if name == "rotated" else NAMED[name], 300)
    q = randn(1, 4, rows, 64)

    def call(q, k, v):
        return polyflash.attention(q, k, v, causal=True, return_lse=True)

    for got, want in zip(compiled(call, fullgraph=True)(q, k, v), call(q, k, v), strict=True):
        same_bits(got, want, f"{name}, {rows} rows")


def test_a_graph_reads_codes_in_the_walk_at_every_length(monkeypatch):
    monkeypatch.setattr(codec, "decode", refused)
    counter = CompileCounter()
    call = torch.compile(polyflash.attention, dynamic=True, backend=counter)
    for keys in (600, 700, 2000):  # fewer may be decoded
        q, (k, v) = randn(1, 4, 1, 64), codes(NAMED["int4-token"], keys)
        same_bits(call(q, k, v), polyflash.attention(q, k, v), f"{keys} keys")
    assert counter.frame_count == 1  # nor does a graph break


def test_a_named_backend_without_codes_decodes_within_the_op():
    q, (k, v) = randn(1, 4, 1, 64), codes(NAMED["int8"], 300)

    def call(q):
        return polyflash.attention(q, k, v, backend="torch")

    same_bits(compiled(call, fullgraph=True)(q), call(q), "the torch row")


@pytest.mark.parametrize("rows", (2, 24))
def test_into_a_callers_output(rows):
    q, (k, v) = randn(1, 4, rows, 64), codes(NAMED["int4"], 300, compute="int8")

    def call(q, out):
        return polyflash.attention(q, k, v, out=out)

    got = compiled(call)(q, torch.empty_like(q))
    same_bits(got, polyflash.attention(q, k, v), f"{rows} rows")


def test_gradients_of_a_graph_are_those_of_eager():
    q, (k, v) = randn(1, 4, 3, 64).requires_grad_(), codes(NAMED["int8"], 300)

    def loss(q):
        return polyflash.attention(q, k, v).square().sum()

    calls = compiled(loss, dynamic=True), loss
    same_bits(*(torch.autograd.grad(f(q), q)[0] for f in calls), "dq")


def test_gradients_that_no_trace_knows_of():
    """Of torch.func in a graph, and of an exported program: the op's node decodes."""
    q, (k, v) = randn(1, 4, 3, 64), codes(NAMED["int8"], 600)

    def loss(q):
        return polyflash.attention(q, k, v).square().sum()

    class Model(torch.nn.Module):
        def forward(self, q):
            return polyflash.attention(q, k, v)

    grad = torch.func.grad(loss)
    same_bits(compiled(grad, fullgraph=True)(q), grad(q), "torch.func.grad")
    program, q = torch.export.export(Model(), (q,)).module(), q.clone().requires_grad_()
    got, want = (torch.autograd.grad(f(q).square().sum(), q)[0] for f in (program, Model()))
    same_bits(got, want, "an exported program")


WAYS = {
    "grad": lambda grad, loss: grad,
    "compiled": lambda grad, loss: compiled(grad, fullgraph=True),
    "vmap": lambda grad, loss: mapped(torch.func.vmap(grad)),
    "compiled-vmap": lambda grad, loss: mapped(compiled(torch.func.vmap(grad), fullgraph=True)),
    "of-a-vmap": lambda grad, loss: mapped(
        torch.func.grad(lambda *pairs: torch.func.vmap(loss)(*pairs).sum(), argnums=(0, 1))
    ),
}


def maps_views():
    """Of another dtype, as rounding to tables of bfloat16 makes them; torch 2.11 does not."""
    try:
        torch.func.vmap(lambda x: x.view(torch.int32))(torch.zeros(1, 1))
    except RuntimeError:
        return False
    return True


def mapped(call):
    """The first of two samples of a call that takes both."""
    return lambda *tensors: [x[0] for x in call(*(torch.stack((x, x.roll(1, 2))) for x in tensors))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ("int4", "rotated"))
def test_codes_made_under_torch_func_pass_gradients_on(name, way):
    """torch 2.13's Dynamo drops the backward of a Function there, and says nothing."""
    if name == "int4" and "vmap" in way and not maps_views():
        pytest.skip("torch maps no view of another dtype")
    schemes = HADAMARD if name == "rotated" else NAMED[name]
    q, *keys = randn(1, 4, 24, 64), *(randn(1, 2, 300, 64, seed=seed) for seed in (1, 2))

    def loss(k, v):
        codes = (polyflash.quantize(x, scheme) for x, scheme in zip((k, v), schemes, strict=True))
        return polyflash.attention(q, *codes).square().sum()

    leaves = [x.clone().requires_grad_() for x in keys]
    want = torch.autograd.grad(loss(*leaves), leaves)
    got = WAYS[way](torch.func.grad(loss, argnums=(0, 1)), loss)(*keys)
    for got_one, want_one, of in zip(got, want, "kv", strict=True):
        same_bits(got_one, want_one, f"d{of}")


@pytest.mark.parametrize("way", (lambda f: f, compiled), ids=("eager", "compiled"))
def test_what_dead_tokens_hold_is_in_no_value(way):
    k, lens = randn(1, 2, 100, 64), torch.tensor([77])
    k[:, :, 77:], k[:, :, 99] = math.nan, math.inf

    def loss(k):
        codes = polyflash.quantize(k, NAMED["int8"][0], lens=lens)
        return polyflash.dequantize(codes).square().sum()

    gradient, value = way(torch.func.grad_and_value(loss))(k)
    leaf = k.clone().requires_grad_()
    same_bits(value, loss(k), "value")
    same_bits(gradient, torch.autograd.grad(loss(leaf), leaf)[0], "gradient")
    same_bits(way(torch.func.jvp)(loss, (k,), (torch.ones_like(k),))[1], gradient.sum(), "jvp")
    same_bits(torch.func.functionalize(loss)(k), value, "functionalize")


def test_gradients_around_transforms():
    """Codes of constants have none; a leaf outside gets its own. Attention has no forward mode."""
    q, k = randn(1, 4, 24, 64), randn(1, 2, 100, 64)
    codes, leaf = [], k.clone().requires_grad_()

    def loss(q, k):
        codes.append(polyflash.quantize(k, NAMED["int8"][0]))
        return polyflash.attention(q, codes[-1], k).square().sum()

    torch.func.grad(loss)(q, k)
    assert not codes[0].requires_grad
    mapped = torch.func.vmap(loss, in_dims=(0, None))(q[None], leaf)
    same_bits(*(torch.autograd.grad(x, leaf)[0] for x in (mapped, loss(q, leaf))), "a leaf outside")
    with pytest.raises(polyflash.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda k: loss(q, k), (k,), (k,))


@pytest.mark.parametrize("way", ("eager", "compiled"))
def test_freed_codes_are_refused_before_they_are_decoded(way):
    q, (k, v) = randn(1, 4, 40, 64), codes(NAMED["int8"], 300)
    k.codes.untyped_storage().resize_(16)
    call = polyflash.attention if way == "eager" else compiled(polyflash.attention)
    with pytest.raises(polyflash.SpecError, match="k: got a storage of 16 bytes"):
        call(q, k, v)


def test_a_backend_that_takes_none_of_both_is_refused_when_a_graph_is_made():
    q, (k, v) = randn(1, 4, 1, 64), codes(NAMED["int8"], 300)

    class Model(torch.nn.Module):
        def forward(self, q):
            return polyflash.attention(q, k, v, backend="gluon")

    with pytest.raises(Exception, match="gluon"):
        torch.export.export(Model(), (q,))


def test_a_compiled_map_has_the_bits_of_a_loop():
    q, (k, v) = randn(3, 1, 4, 1, 64), codes(NAMED["int8"], 300)

    def call(q):
        return polyflash.attention(q, k, v)

    want = torch.stack([call(x) for x in q])
    same_bits(compiled(torch.vmap(call), fullgraph=True)(q), want, "a map")


def test_an_exported_program_holds_the_op_over_codes():
    q, (k, v) = randn(1, 4, 1, 64), codes(NAMED["int8"], 300)

    class Model(torch.nn.Module):
        def forward(self, q):
            return polyflash.attention(q, k, v)

    program = torch.export.export(Model(), (q,))
    (node,) = (x for x in program.graph.nodes if x.target is torch.ops.polyflash.attention.default)
    assert "int8/1x0,int8/1x0" in node.args
    same_bits(program.module()(q), Model()(q), "exported")


@pytest.mark.filterwarnings("ignore")  # Dynamo's, of what it cannot trace
def test_steps_of_a_cache_within_a_compiled_function(monkeypatch):
    def cached():
        cache = KVCache(16, 64, num_kv_heads=2, head_dim=64, dtype=torch.float32, quant="int8")
        (request,) = cache.add()
        cache.append(request, *(randn(700, 2, 64, seed=seed) for seed in (1, 2)), counts=700)
        return cache, request

    def step(cache, request, k, v, q):
        cache.append(request, k, v)
        return cache.attend(q, request) * 2

    calls, held = (compiled(step, dynamic=True), step), (cached(), cached())
    monkeypatch.setattr(codec, "decode", refused)
    for n in range(3):
        k, v, q = (randn(1, heads, 64, seed=10 * n + heads) for heads in (2, 3, 4))
        got, want = (call(*x, k, v[:, :2], q) for call, x in zip(calls, held, strict=True))
        same_bits(got, want, f"step {n}")
