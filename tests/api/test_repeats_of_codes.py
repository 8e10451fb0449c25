"""Calls over codes like one before them: what `test_repeats` demands of calls over tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyflash import SpecError, attention, attention_paged, quantize, repeats
from polyflash.kvcache import KVCache
from polyflash.quant import NAMED, QuantizedTensor, Scheme
from polyflash.quant.tensor import dequantize
from tests.api.test_repeats import nothing_known, planned, same, whole_way  # noqa: F401

pytest.importorskip("numba")
HEADS, KV_HEADS, DIM = 4, 2, 64
READ = ("int8", "int4")


def coded(
    name: str, seqlen: int, rows: int = 1, seed: int = 0
) -> tuple[Tensor, QuantizedTensor, QuantizedTensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, HEADS, rows, DIM, generator=g).to(torch.bfloat16)
    k, v = (torch.randn(2, KV_HEADS, seqlen, DIM, generator=g).to(torch.bfloat16) for _ in "kv")
    k_scheme, v_scheme = NAMED[name]
    return q, quantize(k, k_scheme), quantize(v, v_scheme)


@pytest.mark.parametrize("name", READ)
def test_known_calls_over_codes_give_the_same(planned, name):  # noqa: F811
    attention(*coded(name, 1100), causal=True, return_lse=True)
    for seqlen in (1100, 1200, 1077):  # of a growing cache the length is no part of what is known
        call = coded(name, seqlen, seed=seqlen)
        planned.clear()
        got = attention(*call, causal=True, return_lse=True)
        assert not planned and len(repeats._known) == 1
        same(got, whole_way(lambda: attention(*call, causal=True, return_lse=True)))  # noqa: B023
        assert planned


def test_a_known_call_reads_the_strides_of_its_own_codes(planned):  # noqa: F811
    q, k, v = coded("int4", 640)
    attention(q, k, v)
    planned.clear()

    def apart(x: Tensor) -> Tensor:
        return torch.stack([x, x, x], 2)[:, :, 1]

    other = [replace(x, codes=apart(x.codes), scale=apart(x.scale), shift=apart(x.shift)) for x in (k, v)]
    got = attention(q, *other)
    assert not planned
    assert torch.equal(got, whole_way(lambda: attention(q, k, v)))
    columns = [replace(x, scale=x.scale.transpose(2, 3).contiguous().transpose(2, 3)) for x in (k, v)]
    assert torch.equal(attention(q, *columns), got) and planned  # which are copied first


@pytest.mark.parametrize("name", READ)
def test_known_steps_of_a_cache_give_the_same(planned, name):  # noqa: F811
    cache = KVCache(24, 64, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16, quant=name)
    requests, g = cache.add(2), torch.Generator().manual_seed(1)
    for n in (70, *[1] * 4):
        k, v = (torch.randn(2 * n, KV_HEADS, DIM, generator=g).to(torch.bfloat16) for _ in "kv")
        with cache.reserve(requests, n) as step:
            step.write(k, v)
        q = torch.randn(2, HEADS, DIM, generator=g).to(torch.bfloat16)
        planned.clear()
        got = cache.attend(q, requests, return_lse=True)
        assert bool(planned) is (n == 70)
        same(got, whole_way(lambda: cache.attend(q, requests, return_lse=True)))  # noqa: B023


def test_lengths_may_be_int64_and_are_checked(planned):  # noqa: F811
    q, k, v = paged("int8")
    table, lens = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([70, 128])
    want = attention_paged(q, k, v, table, lens)
    planned.clear()
    assert torch.equal(attention_paged(q, k, v, table, lens), want) and not planned
    for wrong in (torch.tensor([70, 129]), torch.tensor([-1, 4])):
        with pytest.raises(SpecError, match="kv_lens"):
            attention_paged(q, k, v, table, wrong)
    with pytest.raises(SpecError, match="page_table"):
        attention_paged(q, k, v, table + 1, lens)


def paged(name: str) -> tuple[Tensor, QuantizedTensor, QuantizedTensor]:
    x = torch.randn(4, 64, KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    k, v = (quantize(x, scheme, layout="bshd") for scheme in NAMED[name])
    return torch.randn(2, HEADS, DIM).to(torch.bfloat16), k, v


def test_a_known_call_refuses_what_a_first_one_does():
    def of_pages(q: Tensor, k: QuantizedTensor, v: QuantizedTensor) -> Tensor:
        table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
        return attention_paged(q, k, v, table, torch.tensor([70, 128], dtype=torch.int32))

    for call, (q, k, v) in ((attention, coded("int4", 640)), (of_pages, paged("int4"))):
        for _ in range(2):
            call(q, k, v)
        wrong_layout = "bshd" if call is attention else "bhsd"
        with pytest.raises(SpecError, match="layout"):
            call(q, replace(k, layout=wrong_layout), v)
        for name in ("codes", "scale", "shift"):
            x = getattr(v, name).clone()
            short = replace(v, **{name: x})
            call(q, k, short)
            x.untyped_storage().resize_(x.untyped_storage().nbytes() - 4)
            with pytest.raises(SpecError, match="storage"):
                call(q, k, short)


def test_schemes_are_part_of_what_is_known():
    x = torch.randn(2, KV_HEADS, 640, DIM)
    k, q = quantize(x, Scheme(dtype="int4")), x[:, :, :1].to(torch.bfloat16)
    twin = replace(k, scheme=Scheme(dtype="nf4"))  # codes and tables of the same form
    assert repeats.of_codes(q, k, k, ())[0] != repeats.of_codes(q, twin, k, ())[0]
    q, k, v = coded("int4", 640)
    want = attention(q, k, v)
    halves = NAMED["nf4"][0]
    other = replace(k, scheme=halves, shift=None)
    assert not torch.equal(attention(q, other, v), want)
    assert torch.equal(attention(q, other, v), whole_way(lambda: attention(q, other, v)))
    k, v = (quantize(dequantize(x), Scheme(rotation="hadamard")) for x in (k, v))
    for _ in range(2):
        assert torch.equal(attention(q, k, v), whole_way(lambda: attention(q, k, v)))


@pytest.mark.parametrize("pages", [False, True])
def test_known_calls_over_rotated_keys_rotate_their_queries(planned, pages):  # noqa: F811
    schemes, layout = (Scheme(rotation="hadamard"), Scheme(dtype="int4")), "bshd" if pages else "bhsd"
    x = torch.randn(4, 64, KV_HEADS, DIM) if pages else torch.randn(2, KV_HEADS, 640, DIM)
    k, v = (quantize(x.to(torch.bfloat16), scheme, layout=layout) for scheme in schemes)
    table, lens = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([70, 128])

    def call(q: Tensor, k: QuantizedTensor) -> Tensor:
        return attention_paged(q, k, v, table, lens) if pages else attention(q, k, v)

    queries = torch.randn(3, 2, HEADS, *[1] * (not pages), DIM).to(torch.bfloat16)
    call(queries[0], k)
    for q in queries:
        planned.clear()
        given, got = q.clone(), call(q, k)
        assert not planned and torch.equal(q, given)
        assert torch.equal(got, whole_way(lambda: call(q, k)))  # noqa: B023
        assert not torch.equal(got, call(q, replace(k, scheme=Scheme())))
    around = torch._to_functional_tensor(queries[0])  # which has no address
    assert torch.equal(call(around, k), call(queries[0], k))
    short = queries[0].clone()
    short.untyped_storage().resize_(short.nbytes - 4)
    with pytest.raises(SpecError, match="storage"):
        call(short, k)


def test_gradients_are_not_lost():
    q, k, v = coded("int8", 640)
    attention(q, k, v)
    q.requires_grad_()
    assert attention(q, k, v).requires_grad
    source = torch.randn(2, KV_HEADS, 640, DIM, dtype=torch.bfloat16, requires_grad=True)
    k = quantize(source, NAMED["int8"][0])
    assert attention(q.detach(), k, v).requires_grad
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
