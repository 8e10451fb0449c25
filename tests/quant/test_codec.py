"""Codes, scales and shifts of every scheme, against rules written out by hand in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyflash.errors import SpecError
from polyflash.quant import NAMED, QuantizedTensor, Scheme, dequantize, quantize
from polyflash.quant.scheme import KINDS, NF4, TABLES, Block, codes_of

GENERATOR = torch.Generator().manual_seed(0)
SCHEMES = {
    f"{name}-{side}": s for name, pair in NAMED.items() for side, s in zip("kv", pair, strict=True)
} | {
    "int8-affine": Scheme(symmetric=False),
    "int8-affine-narrow": Scheme(symmetric=False, tables="bfloat16"),
    "int8-narrow": Scheme(tables="bfloat16"),
    "int4-wide": replace(NAMED["int4"][0], tables="float32"),
    "int8-tensor": Scheme(granularity="tensor"),
    "int8-head": Scheme(granularity="head"),
    "int4-block": Scheme(dtype="int4", granularity="block", tokens=16, channels=8),
    "int8-block-mean": Scheme(smoothing="block_mean"),
    "fp8-e5m2": Scheme(dtype="fp8_e5m2", granularity="channel"),
    "int8-rotated": Scheme(rotation="hadamard"),
    "int8-compute": Scheme(compute="int8", smoothing="mean"),
}
# Relative L2 of the round trip on normal values, 64 channels: at most.
BOUNDS = {"int8": 0.013, "int4": 0.17, "fp8_e4m3": 0.03, "fp8_e5m2": 0.06, "nf4": 0.11, "mxfp4": 0.13}


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def halves(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()


@pytest.mark.parametrize("name", SCHEMES)
def test_round_trip_is_within_its_step(name: str):
    scheme, x = SCHEMES[name], values(2, 3, 150, 64)
    made = quantize(x, scheme)
    assert isinstance(made, QuantizedTensor) and made.shape == x.shape and made.dtype is x.dtype
    error = (dequantize(made) - x).norm() / x.norm()
    assert error <= BOUNDS[scheme.dtype]
    assert made.codes.dtype is getattr(torch, KINDS[scheme.dtype].storage)
    assert made.nbytes * 8 <= math.ceil(scheme.bits_per_value(150, 64) * x.numel())


def test_int8_by_hand():
    x = values(1, 2, 5, 8)
    made = quantize(x, Scheme())
    scale = x.abs().amax(-1, keepdim=True) / 127
    assert torch.equal(made.scale, scale) and made.shift is None
    assert torch.equal(made.codes, (x / scale).round().to(torch.int8))
    assert torch.equal(dequantize(made), made.codes * scale)


def test_affine_int4_by_hand():
    """A float zero point: the range may lie anywhere."""
    x = values(1, 1, 128, 6) + 50
    made = quantize(x, SCHEMES["int4-wide"])
    groups = x.unflatten(2, (2, 64))
    lo, hi = groups.amin(3), groups.amax(3)
    scale = (hi - lo) / 15.25
    assert torch.equal(made.scale, scale)
    assert made.shift is not None and torch.equal(made.shift, lo + 8 * scale + scale / 8)
    steps = ((groups - lo[..., None, :]) / scale[..., None, :] - 0.125).round().clamp(0, 15).flatten(2, 3)
    assert torch.equal(halves(made.codes), steps.long())
    assert (dequantize(made) - x).abs().max() <= scale.max() * 0.51


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0, 1e4])
def test_narrow_tables_by_hand(dtype: str, mean: float):
    """A scale and a zero point that are bfloat16, and codes in their steps: no error beyond half of one."""
    x = values(1, 2, 128, 6) + mean
    scheme = Scheme(dtype=dtype, granularity="channel", tokens=64, symmetric=False, tables="bfloat16")
    made, groups, half = quantize(x, scheme), x.unflatten(2, (2, 64)), 8 if dtype == "int4" else 128
    lo, hi = groups.amin(3), groups.amax(3)
    step = (hi - lo) / (2 * half - 0.75)
    assert made.shift is not None and made.shift.dtype is made.scale.dtype is torch.bfloat16
    scale, shift = made.scale.float(), made.shift.float()
    middle = lo.double() + (hi - lo).double() / 2 + step / 2
    assert bool(((shift - middle).abs() <= middle.abs() / 256 + step / 200).all())
    least = torch.stack((step, (shift - lo) / (half + 0.5), (hi - shift) / (half - 0.5))).amax(0)
    assert bool((scale >= least).all()) and bool((scale <= least * (1 + 2.0**-7)).all())
    units = (groups - shift[..., None, :]) / scale[..., None, :]
    sizes = ((units + 0.5).abs() - 0.5).round().clamp(0, half - 1)  # alike on both sides of the middle
    codes = torch.where(units + 0.5 < 0, -1 - sizes, sizes).flatten(2, 3)
    found = halves(made.codes) - 8 if dtype == "int4" else made.codes
    assert torch.equal(found, codes.to(found.dtype))
    error = (dequantize(made, torch.float64) - x).unflatten(2, (2, 64)).abs()
    assert bool((error <= 0.5001 * scale[..., None, :]).all())


def test_errors_of_narrow_tables_have_no_sign():
    """Values of 16 bits often lie on the border between two codes: rounded up or down there, the error of
    all would have a mean, which sums over many keys do not lose."""
    x = values(1, 4, 32768, 64).bfloat16()
    for scheme in (NAMED["int4-token"][1], NAMED["int4"][1]):
        error = dequantize(quantize(x, scheme), torch.float64) - x
        assert error.mean().abs() <= 4 * error.std() / error.numel() ** 0.5, scheme


def test_narrow_scales_are_rounded_up():
    x = values(2, 3, 50, 32)
    for dtype, most in (("int8", 127), ("nf4", 1), ("fp8_e4m3", 448)):
        scale = quantize(x, Scheme(dtype=dtype, tables="bfloat16")).scale.float()
        exact = x.abs().amax(-1, keepdim=True) / most
        assert bool((scale >= exact).all()) and bool((scale <= exact * (1 + 2.0**-7)).all())
    wide, narrow = (quantize(x, replace(NAMED["mxfp4"][0], tables=t)) for t in ("float32", "bfloat16"))
    assert torch.equal(wide.codes, narrow.codes) and torch.equal(wide.scale, narrow.scale.float())


def test_every_packed_byte_is_decoded():
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256)
    ones = torch.ones(1, 1, 1, 1)
    for dtype in ("int4", "nf4", "mxfp4"):
        scheme = NAMED["mxfp4"][0] if dtype == "mxfp4" else Scheme(dtype=dtype)
        tables = torch.ones(1, 1, 1, 16).bfloat16() if dtype == "mxfp4" else ones
        found = dequantize(QuantizedTensor(every, tables, None, scheme, torch.float32)).flatten()
        low, high = (torch.arange(256) & 15).tolist(), (torch.arange(256) >> 4).tolist()
        meant = TABLES.get(dtype, range(-8, 8))
        pairs = [float(meant[code]) for pair in zip(low, high, strict=True) for code in pair]
        assert found.tolist() == torch.tensor(pairs).tolist(), dtype


def test_nf4_and_mxfp4_take_the_nearest_value():
    x = torch.linspace(-1, 1, 257).view(1, 1, 1, -1)[..., :256]
    found = dequantize(quantize(x, Scheme(dtype="nf4"))).flatten()
    nearest = torch.tensor(NF4)[(x.flatten()[:, None] - torch.tensor(NF4)).abs().argmin(1)]
    assert torch.equal(found, nearest * x.abs().amax())
    x = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 0.25, 0.75, -1.25] * 4).view(1, 1, 1, 32)
    rounded = [6.0, 4.0, 4.0, 2.0, 2.0, 0.0, 1.0, -1.0]  # ties to even codes
    assert dequantize(quantize(x, NAMED["mxfp4"][0])).flatten().tolist() == rounded * 4


def test_scales_of_mxfp4_are_powers_of_two_from_below():
    for power in range(-20, 20):
        below = torch.full((1, 1, 1, 32), 2.0**power * (1 - 2.0**-24))
        assert quantize(below, NAMED["mxfp4"][0]).scale.item() == 2.0 ** (power - 3)
        assert quantize(below.nextafter(2 * below), NAMED["mxfp4"][0]).scale.item() == 2.0 ** (power - 2)


def test_padding_enters_no_scale_and_no_mean():
    x, lens = values(2, 2, 100, 16), torch.tensor([70, 100])
    spoilt = x.clone()
    spoilt[0, :, 70:] = 1e30
    for scheme in SCHEMES.values():
        if scheme.dtype == "mxfp4":
            continue
        kept, other = (quantize(y, scheme, lens=lens) for y in (x, spoilt))
        assert torch.equal(dequantize(kept)[0, :, :70], dequantize(other)[0, :, :70]), scheme
        assert torch.equal(dequantize(kept)[1], dequantize(other)[1]), scheme


@pytest.mark.parametrize("value", [0.0, 3.0, -6e4, 1e-30])
def test_constant_tensors(value: float):
    x = torch.full((1, 2, 70, 32), value)
    for scheme in SCHEMES.values():
        found = dequantize(quantize(x, scheme))
        assert bool(found.isfinite().all()), scheme
        if scheme.dtype in ("int8", "int4") and scheme.rotation == "none":
            exact = scheme.tables == "float32" or (not scheme.symmetric and value in (0.0, 3.0))
            steps = 2 / 255 if scheme.symmetric else 2 / 256 / 7  # of the bfloat16 that tables hold
            assert torch.allclose(found, x, rtol=1e-6 if exact else steps, atol=0), scheme


def test_what_is_not_finite_stays_in_its_block():
    x = values(1, 1, 4, 8)
    x[0, 0, 1, 3] = torch.nan
    found = dequantize(quantize(x, Scheme()))
    assert bool(found[0, 0, 1].isnan().all()) and bool(found[0, 0, [0, 2, 3]].isfinite().all())


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_range_beyond_float32_is_nan_in_its_block(dtype: str):
    """Steps from the least value to the greatest are then no float32; of symmetric codes they are."""
    x = values(1, 1, 4, 8)
    x[0, 0, 1, :2] = torch.tensor([3.2e38, -3.2e38])
    found = dequantize(quantize(x, Scheme(dtype=dtype, symmetric=False)))
    assert bool(found[0, 0, 1].isnan().all()) and bool(found[0, 0, [0, 2, 3]].isfinite().all())
    x[0, 0, 1, 1] = 0.0  # a range within it
    for symmetric in (True, False):
        found = dequantize(quantize(x, Scheme(dtype=dtype, symmetric=symmetric)))
        assert bool(found.isfinite().all()) and float(found[0, 0, 1, 0]) > 2.9e38


def test_rotation_is_its_own_inverse_and_keeps_products():
    q, k = values(1, 1, 5, 80), values(1, 1, 7, 80)
    from polyflash.quant.codec import rotate

    assert torch.allclose(rotate(rotate(q)), q, atol=1e-6)
    assert torch.allclose(rotate(q) @ rotate(k).mT, q @ k.mT, atol=1e-4)
    assert not torch.allclose(rotate(q), q, atol=1e-2)


def test_layouts_share_one_form():
    x = values(2, 3, 33, 8)
    for layout, y in (("bshd", x.transpose(1, 2)), ("bhsd", x)):
        made = quantize(y, NAMED["int4"][0], layout=layout)
        assert made.shape == y.shape and torch.equal(made.codes, quantize(x, NAMED["int4"][0]).codes)
        assert dequantize(made).shape == y.shape
    packed = quantize(x[0].transpose(0, 1), Scheme(), layout="thd")
    assert packed.shape == (33, 3, 8) and torch.equal(packed.codes[0], quantize(x, Scheme()).codes[0])


def test_text_and_back():
    for scheme in SCHEMES.values():
        assert codes_of(f"{scheme.codes},-") == (scheme.codes, None)
    assert Block(64, 1).counts(130, 8) == (3, 8) and Block().counts(130, 8) == (1, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "int3"}, "Scheme.dtype"),
        ({"tokens": 0, "granularity": "channel"}, "1 or more"),
        ({"tokens": 8}, "None"),
        ({"symmetric": False, "dtype": "fp8_e4m3"}, "zero point"),
        ({"symmetric": False, "smoothing": "mean"}, "zero point"),
        ({"tables": "bfloat16", "smoothing": "mean"}, "exact in float32"),
        ({"tables": "float16"}, "float32, bfloat16"),
        ({"dtype": "mxfp4"}, "32 channels"),
        ({"dtype": "nf4", "compute": "int8"}, "int8 and int4"),
        ({"compute": "fp8"}, "fp8_e4m3"),
    ],
)
def test_a_scheme_without_a_meaning(change: dict, words: str):
    with pytest.raises(SpecError, match=words):
        Scheme(**change)


def test_wrong_calls_of_quantize():
    x = values(1, 1, 4, 8)
    for wrong, words in (
        (lambda: quantize(x, "int4"), r"NAMED\['int4'\] is a pair"),
        (lambda: quantize(x, Scheme(), layout="hbsd"), "layout"),
        (lambda: quantize(x.long(), Scheme()), "float tensor"),
        (lambda: quantize(x[0], Scheme()), "dimensions"),
        (lambda: quantize(x, Scheme(), lens=torch.ones(3)), "lens"),
        (lambda: quantize(x[..., :7], Scheme(dtype="int4")), "even"),
        (lambda: dequantize(x), "QuantizedTensor"),
        (lambda: codes_of("int9/1x0,-"), "codes"),
        (lambda: replace(quantize(x, Scheme()), codes=x.to(torch.uint8)), "codes"),
        (lambda: replace(quantize(x, Scheme()), codes=x[0].to(torch.int8)), "codes"),
        (lambda: replace(quantize(x, Scheme()), shift=x[..., :1]), "shift"),
        (lambda: replace(quantize(x, Scheme(symmetric=False)), shift=None), "shift"),
        (lambda: replace(quantize(x, Scheme()), scale=x[..., :2]), "scale"),
        (lambda: replace(quantize(x, Scheme()), scale=x[..., :1].double()), "scale"),
    ):
        with pytest.raises(SpecError, match=words):
            wrong()
