"""The quantiser in one pass: the bits of the codec, scheme by scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyflash.backends.triton import quantize
from polyflash.quant import NAMED, Scheme, codec
from tests import device

SCHEMES = {
    **{f"{name}-{side}": s for name, pair in NAMED.items() for side, s in zip("kv", pair, strict=True)},
    "int8-affine": Scheme(symmetric=False),
    "int4-symmetric": Scheme(dtype="int4"),
    "e5m2-groups": Scheme(dtype="fp8_e5m2", granularity="channel", tokens=48),
    "int8-groups-affine": Scheme(granularity="channel", tokens=16, symmetric=False),
    "int8-rotated": Scheme(rotation="hadamard"),
    "int4-rotated": replace(NAMED["int4"][0], rotation="hadamard"),
    "e4m3-rotated-blocks": Scheme(dtype="fp8_e4m3", channels=16, rotation="hadamard"),
}
LEFT = ("nf4-k", "nf4-v", "mxfp4-k", "mxfp4-v")  # to the codec


def same(found: Tensor | None, wanted: Tensor | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    wanted = wanted.contiguous()
    if found.dtype is torch.float32:
        return torch.equal(torch.nan_to_num(found, 7e7).cpu(), torch.nan_to_num(wanted, 7e7).cpu())
    return torch.equal(found.contiguous().view(torch.uint8).cpu(), wanted.view(torch.uint8).cpu())


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("name", SCHEMES)
def test_bits_of_the_codec(name: str, dim: int):
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(0)
    if scheme.dtype == "mxfp4" and dim % 32:
        pytest.skip("blocks of 32 channels")
    x = (torch.randn(2, 2, 100, dim, generator=generator) * 3 + 1).to(torch.bfloat16)
    x[0, 0, 5], x[1, 0, 6], x[0, 1, 9, 2], x[1, 1, 7, 3] = 0, 1e-30, torch.inf, torch.nan
    for lens in (None, torch.tensor([60, 100])):
        wanted = codec.encode(x, scheme, lens)
        dead = None if lens is None else ~(torch.arange(100) < lens.view(-1, 1))[:, None, :, None]
        mean = None if scheme.smoothing == "none" else codec._mean(x.float(), scheme.smoothing, dead)
        there = (y if y is None else y.to(device.DEVICE) for y in (x, mean))
        found = quantize.encode(*there, scheme, lens)
        assert (found is None) is (name in LEFT)
        if found is not None:
            assert [same(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * 3


def test_another_layout_is_read_where_it_is():
    x = torch.randn(2, 33, 3, 64).transpose(1, 2).to(device.DEVICE)
    found, wanted = quantize.encode(x, None, Scheme(), None), codec.encode(x.cpu(), Scheme())
    assert found is not None and same(found[0], wanted[0]) and same(found[1], wanted[1])
