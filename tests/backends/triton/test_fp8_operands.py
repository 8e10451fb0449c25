"""The operands of products of 8 bits, for which the Gluon engine has Triton kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyflash.backends.gpu.views import View
from polyflash.backends.triton import fp8_operands, runtime
from polyflash.backends.triton.interpreter import INTERPRET
from tests import device

pytestmark = pytest.mark.skipif(
    not INTERPRET and device.DEVICE.type == "cpu", reason="runs in the interpreter or on a GPU"
)


def view(x: Tensor) -> View:
    return View(x, *x.stride())


def rounded(q: Tensor, k_scale: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    (batch, heads, rows, channels), made = q.shape, torch.empty(q.shape, dtype=torch.float8_e4m3fn)
    codes, factors = made.to(q.device), torch.empty(q.shape[:3], device=q.device)
    tiles = -(-rows // fp8_operands.ROWS.value)
    n = fp8_operands.Numbers(heads, heads // k_scale.shape[1], rows, tiles, None, scale)
    c = runtime.compiled_in(fp8_operands.Constants(128, channels))
    t = fp8_operands.Tensors(view(q), codes, view(k_scale), factors)
    fp8_operands.round_rows[(batch * heads * tiles,)](t, n, c)
    return codes.float(), factors[..., None]


def test_rows_have_a_factor_each():
    """Whose products with codes are scores in the exponent of 2, whatever the sign of a scale."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 77, 80, generator=generator).bfloat16()
    q[0, 0, 3], q[1, 1, 6], q[1, 5, 70] = 0, 1e-38, 1e37
    k_scale = torch.rand(2, 3, 1, 1, generator=generator) + 0.1
    k_scale[1, 2] *= -1
    q, k_scale = q.to(device.DEVICE), k_scale.to(device.DEVICE)
    codes, factors = rounded(q, k_scale, 0.3)
    wanted = q.float() * k_scale.repeat_interleave(2, 1) * 0.3
    step = (wanted.abs() / 8).maximum(wanted.abs().amax(-1, keepdim=True) / 448 / 500)
    wanted[1, 1, 6] = 0  # too small for a factor
    right = (codes * factors - wanted).abs() <= step
    assert bool(right.all())
    assert bool((factors > 0).all()) and float(codes[0, 1].abs().amax(-1).min()) > 400
    zero, ones = rounded(q, k_scale, 0.0)
    assert not zero.any() and bool((ones == 1).all())


def test_values_are_turned():
    """Channels as rows, of 32 keys those side by side that a thread of a product has; NaNs are 0 and told."""
    v = torch.randint(0, 256, (2, 3, 77, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    nan = (v & 0x7F) == 0x7F
    v[0, 1] = torch.where(nan[0, 1], 1, v[0, 1])
    words, odd = v.to(device.DEVICE).view(torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    made, odd = torch.full((2, 3, 80, 24), -1, dtype=torch.int32).to(device.DEVICE), odd.to(device.DEVICE)
    n = fp8_operands.Numbers(3, None, 77, 1, 24, None)
    c = runtime.compiled_in(fp8_operands.Constants(128, 80))
    fp8_operands.turn_values[(6,)](fp8_operands.Tensors(view(words), made, odd=odd), n, c)
    wanted = torch.zeros(2, 3, 96, 80, dtype=torch.uint8)
    wanted[:, :, :77] = torch.where((v & 0x7F) == 0x7F, 0, v)
    wanted = wanted.mT.reshape(2, 3, 80, 3, 2, 2, 4, 2).transpose(-3, -2).reshape(2, 3, 80, 96)
    assert torch.equal(made.cpu().view(torch.uint8), wanted)
    assert odd.tolist() == [[1, 0, 1], [1, 1, 1]]
