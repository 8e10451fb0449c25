"""Real defects of other implementations: gradients and autograd. Named by id."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import polyflash
from polyflash import Mask
from tests.conformance.rows import ints, qkv
from tests.conformance.test_gradients import backend, gradients, hold, plain_gradients
from tests.tolerance import relative_l2, same_bits

__all__ = ["backend"]


def test_B_grad_06_bias_lengths():
    for keys in range(1, 18):
        q, k, v = qkv(1, 1, 5, keys, 8)
        options = {"bias": torch.randn(1, 1, 5, keys)}
        dout = torch.randn_like(q)
        got = gradients(q, k, v, dout, **options)
        hold(got, q, k, v, dout, None, options, f"{keys} keys")
        total = got["bias"].double().sum(-1).abs().max() / got["bias"].abs().sum().clamp(min=1e-30)
        assert float(total) <= 1e-6


def test_B_msk_05_mostly_empty_rows(backend: str | None):
    """M ≫ N causal, D = 32, ×3: dQ finite, 0 on empty rows."""
    for rows, keys in ((76, 1), (34, 1), (146, 2)):
        q, k, v = (3 * x for x in qkv(1, 2, rows, keys, 32, dtype=torch.float16))
        dout = torch.ones_like(q)
        got = gradients(q, k, v, dout, backend=backend, causal=True)
        assert all(torch.isfinite(got[n]).all() for n in "qkv")
        assert (got["q"][:, :, : rows - keys] == 0).all()
        hold(got, q, k, v, dout, None, {"causal": True}, f"{rows}x{keys}")


def test_B_msk_07_large_fp16(backend: str | None):
    q, k, v = (3 * x for x in qkv(1, 1, 512, 512, 128, dtype=torch.float16))
    dout = torch.randn_like(q)
    got = gradients(q, k, v, dout, backend=backend, causal=True)
    hold(got, q, k, v, dout, None, {"causal": True}, "×3")


def test_B_dim_05_B_dim_07_dim_v(backend: str | None):
    for heads in ((2, 2), (6, 2)):
        q, k, v = qkv(1, heads, 40, 60, 128, 96)
        dout = torch.randn(1, heads[0], 40, 96)
        got = gradients(q, k, v, dout, backend=backend, causal=True)
        hold(got, q, k, v, dout, None, {"causal": True}, f"{heads}")


def test_B_grad_12_short_lengths_odd_dim(backend: str | None):
    for n in (15, 85, 200):
        q, k, v = qkv(1, 2, n, n, 100)
        dout = torch.randn_like(q)
        for causal in (False, True):
            got = gradients(q, k, v, dout, backend=backend, causal=causal)
            hold(got, q, k, v, dout, None, {"causal": causal}, f"{n}")


def test_B_grad_13_fp32_is_ieee(backend: str | None):
    q, k, v = qkv(1, 2, 128, 128, 64)
    dout = torch.randn_like(q)
    got = gradients(q, k, v, dout, backend=backend)
    right = plain_gradients(q, k, v, dout, None, {}, wide=True)
    assert all(relative_l2(got[n], right[n]) <= 3e-6 for n in "qkv")


def test_B_str_14_strided_dout(backend: str | None):
    """dO of any strides: every second column, transposed, and the expanded scalar of sum().backward()."""
    q, k, v = qkv(2, (4, 2), 20, 30, 16)
    wide = torch.randn(2, 4, 20, 32)
    cases = (
        wide[..., ::2],
        torch.randn(2, 20, 4, 16).transpose(1, 2),
        torch.tensor(0.3).expand(2, 4, 20, 16),
    )
    for dout in cases:
        got, want = (gradients(q, k, v, d, backend=backend, causal=True) for d in (dout, dout.contiguous()))
        for name in "qkv":
            same_bits(got[name], want[name])


def test_B_str_08_gradients_do_not_depend_on_layout(backend: str | None):
    q, k, v = qkv(2, (4, 2), 20, 30, 16)
    dout = torch.randn_like(q)
    want = gradients(q, k, v, dout, backend=backend, causal=True)
    views = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    out = polyflash.attention(*views, causal=True, layout="bshd", backend=backend)
    grads = torch.autograd.grad(out, views, dout.transpose(1, 2))
    for name, grad in zip("qkv", grads, strict=True):
        same_bits(grad.transpose(1, 2), want[name], name)


def test_B_grad_01_double_backward():
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 4, 4, 8))
    out = polyflash.attention(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.autograd.grad(dq.sum(), q)


def test_B_grad_02_forward_mode():
    from torch.autograd import forward_ad

    q, k, v = qkv(1, 1, 4, 4, 8)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        polyflash.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_B_grad_07_autocast(backend: str | None):
    """Under autocast: compute and result in the autocast dtype, gradients in the inputs' own."""
    q, k, v = qkv(1, 2, 20, 30, 16)
    q.requires_grad_()
    k, v = k.bfloat16().requires_grad_(), v.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = polyflash.attention(q, k, v, backend=backend)
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype is torch.float32 and k.grad.dtype is torch.bfloat16


def test_B_grad_08_inference_tensors():
    with torch.inference_mode():
        q, k, v = qkv(1, 1, 4, 4, 8)
        polyflash.attention(q, k, v)
    parameter = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(RuntimeError):
        polyflash.attention(parameter, k, v).sum().backward()


def test_B_grad_09_copy_and_pickle_masks():
    mask = Mask.causal() & Mask.window(3, None) & Mask.lengths(ints(4, 5))
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.alignment == "bottom_right" and other.window_sides == (3, None)
        assert torch.equal(other.kv_lens, mask.kv_lens)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (9, 4)}, {"kv_lens": ints(70, 20)}], ids=str
)
def test_B_grad_15_deterministic(backend: str | None, options: dict[str, Any]):
    q, k, v = qkv(2, (4, 2), 40, 70, 32)
    dout = torch.randn_like(q)
    want = gradients(q, k, v, dout, backend=backend, **options)
    for _ in range(10):
        noise = torch.empty(int(torch.randint(1, 100_000, ())))
        got = gradients(q, k, v, dout, backend=backend, **options)
        for name in "qkv":
            same_bits(got[name], want[name])
        del noise
