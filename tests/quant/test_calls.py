"""Attention over codes is attention over their values: every form of a call, gradients, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import attention, attention_groups, attention_paged, attention_varlen, dequantize, quantize
from polyflash.errors import SpecError
from polyflash.quant import NAMED, Scheme

GENERATOR = torch.Generator().manual_seed(1)
ROTATED = Scheme(rotation="hadamard")
PAIRS = {**NAMED, "rotated": (ROTATED, ROTATED)}


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def tensors(rows: int = 5, keys: int = 90) -> tuple[Tensor, Tensor, Tensor]:
    return values(2, 4, rows, 32), values(2, 2, keys, 32), values(2, 2, keys, 32)


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype is wanted.dtype
    assert torch.allclose(found, wanted, rtol=2e-5, atol=2e-5), (found - wanted).abs().max()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("rows", [1, 40])
def test_dense(name: str, rows: int):
    q, k, v = tensors(rows)
    kq, vq = (quantize(x, s) for x, s in zip((k, v), PAIRS[name], strict=True))
    options = {"causal": True, "softcap": 5.0, "sinks": values(4), "kv_lens": torch.tensor([90, 61])}
    found = attention(q, kq, vq, return_lse=True, **options)
    wanted = attention(q, dequantize(kq), dequantize(vq), return_lse=True, **options)
    close(found.out, wanted.out)
    close(found.lse, wanted.lse)


def test_only_one_of_them():
    q, k, v = tensors()
    kq = quantize(k, Scheme(smoothing="mean"))
    close(attention(q, kq, v), attention(q, dequantize(kq), v))
    close(attention(q, k, quantize(v, Scheme())), attention(q, k, dequantize(quantize(v, Scheme()))))


def test_another_layout_and_a_place_for_the_result():
    q, k, v = (x.transpose(1, 2) for x in tensors())
    kq, vq = (quantize(x, ROTATED, layout="bshd") for x in (k, v))
    out = torch.empty_like(q)
    found = attention(q, kq, vq, layout="bshd", out=out)
    close(found, attention(q, dequantize(kq), dequantize(vq), layout="bshd"))
    assert found.data_ptr() == out.data_ptr()


def test_packed_members():
    q, k, v = values(12, 4, 16), values(50, 2, 16), values(50, 2, 16)
    cu_q, cu_k = torch.tensor([0, 5, 12]), torch.tensor([0, 20, 50])
    kq, vq = (quantize(x, s, layout="thd") for x, s in zip((k, v), NAMED["int4"], strict=True))
    found = attention_varlen(q, kq, vq, cu_q, cu_k, causal=True)
    close(found, attention_varlen(q, dequantize(kq), dequantize(vq), cu_q, cu_k, causal=True))


def test_pages_decode_those_that_are_held():
    """A page that nobody holds may be NaN, and a table may name pages that are not there."""
    q, pool = values(2, 4, 32), values(9, 16, 2, 32)
    kq = quantize(pool, Scheme(granularity="channel", tokens=16), layout="bshd")
    vq = quantize(values(9, 16, 2, 32), Scheme(), layout="bshd")
    vq.scale[8] = torch.nan
    table, lens = torch.tensor([[3, 0, 1, 99], [2, 7, 4, -5]], dtype=torch.int32), torch.tensor([40, 48])
    found = attention_paged(q, kq, vq, table, lens)
    close(found, attention_paged(q, dequantize(kq), dequantize(vq), table, lens))
    with pytest.raises(SpecError, match="k_pages layout"):
        attention_paged(q, quantize(pool, Scheme()), vq, table, lens)


def test_groups_and_statistics():
    q, k, v = tensors(8)
    kq, vq = quantize(k, ROTATED), quantize(v, Scheme())
    for found, wanted in zip(
        attention_groups([q[:, :, :3], q[:, :, 3:]], kq, vq, q_offsets=[0, 40]),
        attention_groups([q[:, :, :3], q[:, :, 3:]], dequantize(kq), dequantize(vq), q_offsets=[0, 40]),
        strict=True,
    ):
        close(found, wanted)
    lse = attention(q, kq, vq, return_lse=True).lse
    close(polyflash.column_sums(q, kq, lse), polyflash.column_sums(q, dequantize(kq), lse))


@pytest.mark.parametrize("name", ["int8-smooth", "int4", "rotated"])
def test_gradients_go_straight_through(name: str):
    """They are those of attention over the saved values, and reach what was quantised."""
    leaves = [x.requires_grad_() for x in tensors()]
    q, k, v = leaves
    kq, vq = (quantize(x, s) for x, s in zip((k, v), PAIRS[name], strict=True))
    assert kq.requires_grad and "requires" not in repr(kq)
    result = attention(q, kq, vq, causal=True, return_lse=True)
    (result.out.square().sum() + result.lse.sum()).backward()
    others = [x.detach().requires_grad_() for x in (q, dequantize(kq), dequantize(vq))]
    result = attention(*others, causal=True, return_lse=True)
    (result.out.square().sum() + result.lse.sum()).backward()
    for found, wanted in zip(leaves, others, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert torch.allclose(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)


def test_a_constant_value_comes_back_whole():
    """V = 1 gives 1: the denominator is summed from no code."""
    q, k, _ = tensors()
    ones = torch.ones(2, 2, 90, 32)
    for k_scheme, v_scheme in PAIRS.values():
        if v_scheme.rotation == "none":
            found = attention(q, quantize(k, k_scheme), quantize(ones, v_scheme))
            assert torch.allclose(found, torch.ones_like(found), rtol=0, atol=1e-6), v_scheme


def test_a_mean_costs_no_range():
    """K and V far from zero: asymmetric and smoothed schemes keep their error."""
    q, k, v = tensors()
    for far in (1.0, 10.0, 100.0):
        for scheme in (Scheme(symmetric=False), Scheme(smoothing="mean")):
            found = attention(q, quantize(k + far, scheme), quantize(v + far, scheme)) - far
            wanted = attention(q, k + far, v + far) - far
            assert (found - wanted).norm() / wanted.norm() <= 0.02, (far, scheme)


def test_explain_says_how_codes_are_read():
    q, k, v = tensors()
    plan = polyflash.explain(q, quantize(k, NAMED["int8"][0]), v)
    assert any(note.startswith("codes: int8/1x0,-, decoded") for note in plan.notes)


def test_refusals():
    q, k, v = tensors()
    with pytest.raises(SpecError, match="k head_dim"):
        attention(q, quantize(k[..., :16], Scheme()), v)
    with pytest.raises(SpecError, match="device"):
        attention(q, quantize(k.to("meta"), Scheme()), v)
    with pytest.raises(SpecError, match="q: got 3 dimensions"):
        attention(q[0], quantize(k, Scheme()), quantize(v, Scheme()))
    with pytest.raises(SpecError, match="q dtype: got"):
        attention(q.int(), quantize(k, Scheme()), quantize(v, Scheme()))


@pytest.mark.parametrize("name", ["int8", "int8-smooth"])
@pytest.mark.parametrize("bias", [0.0, 10.0])
def test_level_b(name: str, bias: float):
    """Error of the scheme: relative L2 of the output against unquantised attention in float64."""
    q, k, v = values(1, 4, 64, 128), values(1, 4, 1024, 128), values(1, 4, 1024, 128)
    k[..., ::21] += bias
    found = attention(q, *(quantize(x, s) for x, s in zip((k, v), NAMED[name], strict=True)))
    wanted = attention(q.double(), k.double(), v.double())
    error = ((found - wanted).norm() / wanted.norm()).item()
    assert error <= (0.0100 if name == "int8-smooth" or not bias else 0.045)
