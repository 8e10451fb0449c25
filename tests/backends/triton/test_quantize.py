"""The quantiser in one pass: the bits of the codec, scheme by scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyflash.backends.triton import quantize
from polyflash.kvcache import Rope
from polyflash.quant import NAMED, Scheme, codec
from polyflash.quant import quantize as codec_quantize
from polyflash.quant.scheme import BORDERS, E2M1
from tests import device

SCHEMES = {
    **{f"{name}-{side}": s for name, pair in NAMED.items() for side, s in zip("kv", pair, strict=True)},
    "int8-affine": Scheme(symmetric=False),
    "int8-narrow": Scheme(tables="bfloat16"),
    "int8-affine-narrow": Scheme(symmetric=False, tables="bfloat16"),
    "int4-wide": replace(NAMED["int4"][1], tables="float32"),
    "int4-symmetric": Scheme(dtype="int4"),
    "e5m2-groups": Scheme(dtype="fp8_e5m2", granularity="channel", tokens=48),
    "int8-groups-affine": Scheme(granularity="channel", tokens=16, symmetric=False),
    "int8-rotated": Scheme(rotation="hadamard"),
    "int4-rotated": replace(NAMED["int4"][0], rotation="hadamard"),
    "e4m3-rotated-blocks": Scheme(dtype="fp8_e4m3", channels=16, rotation="hadamard"),
}


ROTATED = ("int8-rotated", "e4m3-rotated-blocks")


def same(found: Tensor | None, wanted: Tensor | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    wanted = wanted.contiguous()
    if found.dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.nan_to_num(x.float(), 7e7).cpu() for x in (found, wanted))
        return found.dtype is wanted.dtype and torch.equal(a, b)
    return torch.equal(found.contiguous().view(torch.uint8).cpu(), wanted.view(torch.uint8).cpu())


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("name", SCHEMES)
def test_bits_of_the_codec(name: str, dim: int):
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(0)
    if scheme.dtype == "mxfp4" and dim % 32:
        pytest.skip("blocks of 32 channels")
    x = (torch.randn(2, 2, 100, dim, generator=generator) * 3 + 1).to(torch.bfloat16)
    x[0, 0, 5], x[1, 0, 6], x[0, 1, 9, 2], x[1, 1, 7, 3] = 0, 1e-30, torch.inf, torch.nan
    x[1, 0, 70, :2] = torch.tensor([3.2e38, -3.2e38])  # a range beyond float32
    x[0, 0, 71, :16] = torch.tensor([*E2M1, *(-x for x in BORDERS["mxfp4"]), -6.0])  # scale 1, halfway
    for lens in (None, torch.tensor([60, 100])):
        wanted = codec.encode(x, scheme, lens)
        dead = None if lens is None else ~(torch.arange(100) < lens.view(-1, 1))[:, None, :, None]
        mean = None if scheme.smoothing == "none" else codec._mean(x.float(), scheme.smoothing, dead)
        there = (y if y is None else y.to(device.DEVICE) for y in (x, mean))
        found = quantize.encode(*there, scheme, lens)
        assert found is not None
        assert [same(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * 3


def test_another_layout_is_read_where_it_is():
    x = torch.randn(2, 33, 3, 64).transpose(1, 2).to(device.DEVICE)
    found, wanted = quantize.encode(x, None, Scheme(), None), codec.encode(x.cpu(), Scheme())
    assert found is not None and same(found[0], wanted[0]) and same(found[1], wanted[1])


def test_a_negated_view_is_left_to_the_codec():
    x = torch.randn(1, 2, 5, 64, device=device.DEVICE)
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg() and quantize.encode(negated, None, Scheme(), None) is None
    for a, b in zip(codec.encode(negated, Scheme())[:2], codec.encode(-x, Scheme())[:2], strict=True):
        assert same(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["int8-k", "int4-v", "int8-rotated", "e4m3-rotated-blocks", "nf4-v", "mxfp4-k"]
)
def test_keys_are_turned_rotated_coded_and_stored_at_once(name: str, dtype: torch.dtype):
    """In slots of pages, those of no slot nowhere; bits of `Rope.rotate` and of the codec."""
    scheme, dim = SCHEMES[name], 96 if SCHEMES[name].channels == 32 else 80
    x = (torch.randn(21, 3, dim) * 3 + 1).to(dtype)
    slots = torch.randperm(40)[:21]
    slots[[4, 20]] = -1
    at, live = torch.arange(5, 26), slots >= 0
    tables = torch.randn(2, 40, 10)
    ropes = None, Rope(), Rope(500.0, interleaved=True), Rope(rotary_dim=12)
    for rope in (*ropes, Rope(cos=tables[0], sin=tables[1])):
        pages = torch.zeros(5, 8, 3, dim, dtype=dtype)
        cache = codec_quantize(pages, scheme, layout="bshd")
        there = cache.to(device.DEVICE)
        turn = None
        if rope is not None:
            cos, sin = (y.to(device.DEVICE) for y in rope.factors(x, at))
            turn = cos, sin, rope.interleaved
        wide = torch.cat((x, x), -1).to(device.DEVICE)[..., :dim]
        assert quantize.write(wide, there, slots.to(device.DEVICE), turn)
        y = x if rope is None else rope.rotate(x, at)
        pages[slots[live] // 8, slots[live] % 8] = y[live]
        want = codec_quantize(pages, scheme, layout="bshd")
        for part in ("codes", "scale", "shift"):
            assert same(getattr(there, part), getattr(want, part))


def test_schemes_of_groups_are_not_written_by_token():
    x, slots = torch.randn(3, 2, 64, device=device.DEVICE), torch.arange(3, device=device.DEVICE)
    for name in ("int8-channel-k", "nf4-k", "int8-smooth-k"):
        cache = codec_quantize(torch.zeros(2, 64, 2, 64, device=device.DEVICE), SCHEMES[name], layout="bshd")
        assert not quantize.write(x, cache, slots, None)
