"""The CPU's quantiser: the bits of the codec, for every scheme, dtype and shape that it takes."""

from __future__ import annotations

import math
import mmap
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyflash import target
from polyflash.backends.cpu import quantize, quantize_configs
from polyflash.errors import UnsupportedError
from polyflash.quant import NAMED, Scheme, codec
from polyflash.quant import quantize as public
from tests.backends.cpu import keys as every

pytest.importorskip("numba")
SCHEMES = {
    **{f"{name}-{side}": s for name, pair in NAMED.items() for side, s in zip("kv", pair, strict=True)},
    "int8-affine": Scheme(symmetric=False),
    "int8-narrow": Scheme(tables="bfloat16"),
    "int8-affine-narrow": Scheme(symmetric=False, tables="bfloat16"),
    "int4-wide": replace(NAMED["int4"][0], tables="float32"),
    "int8-groups-affine": Scheme(granularity="channel", tokens=16, symmetric=False),
    "int4-symmetric": Scheme(dtype="int4"),
    "int4-blocks": Scheme(dtype="int4", granularity="block", tokens=16, channels=8),
    "int8-head": Scheme(granularity="head"),
    "e5m2-channel": Scheme(dtype="fp8_e5m2", granularity="channel"),
    "int8-rotated": Scheme(rotation="hadamard"),
    "int4-rotated": replace(NAMED["int4"][0], rotation="hadamard"),
    "int8-smooth-rotated": Scheme(smoothing="mean", rotation="hadamard"),
}
LEFT = (
    Scheme(granularity="tensor"),
    Scheme(smoothing="block_mean"),
    Scheme(dtype="int4", granularity="token", channels=3),
)


def by_torch(x: Tensor, scheme: Scheme, lens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The codec's own operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_KERNELS", {})
        return codec.encode(x, scheme, lens)


def bits(x: Tensor | None) -> Tensor | None:
    """Of codes; of a table the values, -0 for 0 and one NaN like another."""
    if x is None or x.dtype not in (torch.float32, torch.bfloat16):
        return None if x is None else x.contiguous().view(torch.uint8)
    return torch.nan_to_num(x.float(), nan=7e7)


def assert_same(x: Tensor, scheme: Scheme, lens: Tensor | None = None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_extremes", None)  # what only the codec's own operations call
        found = codec.encode(x, scheme, lens)
    for a, b in zip(found, by_torch(x, scheme, lens), strict=True):
        a, b = bits(a), bits(b)
        assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def families(tokens: int, dim: int) -> Tensor:
    """(2, 3, tokens, dim): normal, and every value that a codec could stumble over."""
    x = torch.randn(2, 3, tokens, dim, generator=torch.Generator().manual_seed(dim)) * 3 + 1
    x[0, 0, 5], x[1, 0, 6], x[1, 2], x[0, 2, :64] = 0, 1e-30, 3.0, 0
    x[0, 0, 20:24], x[0, 0, 30], x[0, 0, 31] = 6e4, torch.linspace(-8, 8, dim), 1e-40
    x[0, 1, 9, min(2, dim - 1)], x[1, 1, 7, min(3, dim - 1)] = torch.inf, torch.nan
    x[1, 0, 70, :2] = torch.tensor([3.2e38, -3.2e38])  # a range beyond float32
    x[1, 1, 50], x[1, 1, 60] = -x[1, 1, 50].abs(), torch.tensor(2.0**-20) * (1 - 2.0**-24)
    return x


@pytest.mark.parametrize("name", SCHEMES)
def test_bits_of_the_codec(name: str):
    scheme = SCHEMES[name]
    for dim in (128, 80, 40, 6):
        x = families(100, dim).to(torch.bfloat16)
        for lens in (None, torch.tensor([60, 100]), torch.tensor([0, 1])):
            assert_same(x, scheme, lens)
        assert_same(x.transpose(1, 2).contiguous().transpose(1, 2), scheme)
    assert_same(families(100, 96)[:, :, 7:8].to(torch.bfloat16), scheme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["int8-k", "int4-k", "fp8-v", "mxfp4-k"])
def test_bits_of_every_dtype(name: str, dtype: torch.dtype):
    for dim in (128, 48):
        assert_same(families(100, dim).to(dtype), SCHEMES[name])


def test_values_are_read_where_they_lie():
    x = families(100, 64).to(torch.bfloat16)
    wide = torch.empty(2, 3, 100, 64, 3, dtype=x.dtype)
    wide[..., 1] = x
    far = x[:1].as_strided((1, 3, 100, 64), (1 << 62, *x.stride()[1:]))
    for y in (far, x[:, :, ::2], x.expand(2, 3, 100, 64)[:, 1:], wide[..., 1], x[:1].expand(2, 3, 100, 64)):
        assert_same(y, SCHEMES["int4-v"])


def test_parts_of_a_long_tensor_are_those_of_the_whole():
    """Many units and items, on several threads; the last part is short."""
    x = torch.randn(1, 3, 4111, 64).to(torch.bfloat16)
    for name in ("int8-k", "int4-k"):
        assert_same(x, SCHEMES[name])


def test_what_no_kernel_reads_goes_to_the_codec():
    x = families(100, 48)
    for scheme in LEFT:
        assert quantize.encode(x, None, scheme, None) is None
        public(x, scheme)
    scheme = Scheme()
    negated = torch._neg_view(x)
    assert quantize.encode(negated, None, scheme, None) is None
    assert torch.equal(public(negated, scheme).codes, by_torch(-x, scheme)[0])
    with torch._subclasses.FakeTensorMode() as mode:
        fake = public(mode.from_tensor(x), scheme)
    assert fake.codes.shape == x.shape and fake.scale.shape == (2, 3, 100, 1)
    mapped = torch.func.vmap(lambda y: public(y, scheme).scale)(x[:, None])
    assert torch.equal(bits(mapped[:, 0]), bits(by_torch(x, scheme)[1]))


VALUES = {
    "int8-v": ((128, torch.bfloat16), (40, torch.float16)),
    "int8-smooth-k": ((80, torch.bfloat16),),
    "int4-k": ((128, torch.bfloat16),),
    "int4-v": ((96, torch.float16),),
    "fp8-v": ((12, torch.float32),),
    "nf4-k": ((24, torch.bfloat16),),
    "mxfp4-k": ((64, torch.float16),),
    "e5m2-channel": ((64, torch.bfloat16),),
    "int4-blocks": ((40, torch.float32),),
}


@pytest.mark.parametrize("name", [*VALUES, "means", "tensor"])
def test_values_of_codes_have_the_bits_of_the_codec(name: str, monkeypatch):
    """Of what is not finite too, and of codes that lie as (batch, seqlen, heads, head_dim)."""
    scheme = {"means": LEFT[1], "tensor": LEFT[0]}.get(name) or SCHEMES[name]
    for channels, dtype in VALUES.get(name, ((32, torch.bfloat16),)):
        x = torch.randn(2, 3, 457, channels, generator=torch.Generator().manual_seed(1))
        x[0, 1, 7] = 0
        x[1, 2, 200, 3], x[1, 0, 9, 1] = math.nan, math.inf
        made, scale, shift = codec.encode(x, scheme)
        for codes in (made, made.transpose(1, 2).contiguous().transpose(1, 2)):
            monkeypatch.setattr(codec, "_MANY", 1 << 60)
            wanted = codec.decode(codes, scale, shift, scheme.codes, dtype)
            monkeypatch.setattr(codec, "_MANY", 1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(codec, "spread", None)  # what only the codec's own operations call
                found = codec.decode(codes, scale, shift, scheme.codes, dtype)
            assert found.dtype is wanted.dtype is dtype
            assert torch.equal(bits(found.float()), bits(wanted.float())), (channels, dtype)


def test_values_that_no_kernel_makes_are_the_codecs(monkeypatch):
    monkeypatch.setattr(codec, "_MANY", 1)
    codes, scale, _ = codec.encode(torch.randn(1, 2, 40, 16), Scheme())
    right = codes.double() * scale.double()
    assert torch.equal(codec.decode(codes, scale, None, Scheme().codes, torch.float64), right)
    for some in (codes.mT.contiguous().mT, torch.cat((codes, codes), 3)[..., ::2]):
        found = codec.decode(some, scale, None, Scheme().codes)
        assert torch.equal(found, some.float() * scale)
    wide = torch.ones(1, 1, 3, 300, dtype=torch.int8)
    assert torch.equal(codec.decode(wide, scale[:, :1, :3], None, Scheme().codes), wide * scale[:, :1, :3])


def test_without_a_compiler_that_imports_the_codec_does_it(monkeypatch):
    def refuses(key: object) -> int:
        raise UnsupportedError("numba")

    quantize.kernel_for.cache_clear()
    monkeypatch.setattr(quantize.runtime, "load", refuses)
    x = families(100, 48)
    assert quantize.encode(x, None, Scheme(), None) is None
    assert torch.equal(public(x, Scheme()).codes, by_torch(x, Scheme())[0])
    quantize.kernel_for.cache_clear()


def test_keys_are_listed():
    for known in target.KNOWN:
        keys = list(every.quantize(known))
        assert len(set(keys)) == len({key.name for key in keys}) == len(keys) <= 183
        assert all(re.fullmatch("[a-z0-9_]+", key.name) for key in keys)
        for scheme in SCHEMES.values() if keys else ():
            assert quantize_configs.key_for(scheme, "bfloat16", known) in keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [128, 96, 80, 12, 3, 1])
def test_few_rows_are_rotated_with_the_bits_of_the_codec(channels: int, dtype: torch.dtype):
    x = torch.randn(3, 2, 1, channels, generator=torch.Generator().manual_seed(channels)).to(dtype)
    negative, endless = -torch.zeros_like(x), x.clone()
    endless[1, 1] = float("inf")
    for rows in (x, negative, endless):
        got, want = (torch.nan_to_num(f(rows).float(), nan=7e7) for f in (quantize.rotate, codec.rotate))
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def asks_for_huge_pages(address: int) -> bool:
    """Does the mapping of an address stand for huge pages, by what the system says of it?"""
    found = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no mapping at {address:#x}")


_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(encoding="utf-8"), reason="no huge pages here"
)
def test_large_codes_and_tables_are_asked_for_on_huge_pages():
    scheme = Scheme(channels=4, symmetric=False)  # 4 MiB of each, and no more than one page at their start
    made = public(torch.zeros(1, 4, 8192, 128, dtype=torch.bfloat16), scheme)
    for x in (made.codes, made.scale, made.shift):
        assert x is not None and asks_for_huge_pages(x.data_ptr() + (2 << 20))
        assert x.data_ptr() % mmap.PAGESIZE == 0 and x.is_contiguous()
    other = torch.frombuffer(mmap.mmap(-1, 8 << 20), dtype=torch.uint8)
    assert not asks_for_huge_pages(other.data_ptr()), "all memory does, so this test sees nothing"
