"""Decode over codes that become floats: in registers, or row by row before the walk. Nothing but float32
rounds, on every instruction set of this machine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import polyflash
from polyflash.backends.cpu import decode_codes_configs as configs
from polyflash.backends.cpu.decode_codes_configs import CodesKey, DecodedKey, FloatsKey
from polyflash.quant import NAMED, QuantizedTensor, Scheme, quantize
from polyflash.quant.scheme import KINDS
from polyflash.spec import AttentionSpec, Phase
from tests.backends.cpu.test_decode_codes import check_items, decode, level_a, spec_of
from tests.backends.cpu.test_forward_kernel import HERE, randn
from tests.backends.cpu.test_paged_kernel import ints, paged
from tests.chosen import in_turn
from tests.tolerance import same_bits

pytestmark = pytest.mark.skipif(
    HERE.arch not in ("avx512", "avx2"), reason="has no instruction set to choose"
)
CHOSEN = "avx512" if HERE.arch == "avx512" else "avx2"
ISAS = (CHOSEN, "generic") if CHOSEN == "avx2" else (CHOSEN, "avx2", "generic")
E4M3, E5M2 = Scheme(dtype="fp8_e4m3"), Scheme(dtype="fp8_e5m2")
# Read in registers: the named ones, other scales and shifts of K, and two dtypes at once.
FLOATS = {
    **{name: NAMED[name] for name in ("fp8", "nf4", "mxfp4")},
    "e5m2": (replace(E5M2, tables="bfloat16"), E5M2),
    "smooth": (replace(E4M3, smoothing="block_mean"), replace(E4M3, granularity="head")),
    "channel": (replace(E4M3, granularity="channel", tokens=32), NAMED["nf4"][1]),
    "tensor": (replace(NAMED["nf4"][0], granularity="tensor", tokens=None), E4M3),
}
# Decoded first: scales that neither scores nor weights take, and codes of integers beside floats.
ROWS = {
    "blocks": (Scheme(granularity="block", tokens=8, channels=24), Scheme(dtype="int4", channels=20)),
    "fp8-blocks": (replace(E4M3, channels=24), replace(E5M2, granularity="block", tokens=24, channels=8)),
    "mixed": (E4M3, Scheme(symmetric=False, tables="bfloat16")),
    "values": (NAMED["nf4"][0], replace(NAMED["nf4"][0], tokens=8)),
    "mx-values": (NAMED["mxfp4"][0], Scheme(smoothing="mean")),
    "affine": (Scheme(dtype="int4", symmetric=False, channels=32, tables="bfloat16"), NAMED["mxfp4"][1]),
}
KINDS_OF_KEYS = {**dict.fromkeys(FLOATS, FloatsKey), **dict.fromkeys(ROWS, DecodedKey)}
SCHEMES = FLOATS | ROWS
KINDS_OF_FLOATS = "fp8_e4m3", "fp8_e5m2", "nf4", "mxfp4"
FEW = ("fp8", "mxfp4", "blocks")  # of which all is tried: a kernel is compiled for every shape and dtype
SHAPES = ((4, 4, 1, 128, 128), (3, 1, 2, 40, 72), (4, 2, 1, 64, 96), (8, 2, 1, 128, 128), (6, 1, 1, 192, 256))


def coded(name, batch, heads, keys, dims, dims_v=None):
    k, v = randn(batch, heads, keys, dims, seed=1), randn(batch, heads, keys, dims_v or dims, seed=2)
    k = k + torch.linspace(-1.0, 3.0, dims)
    return tuple(quantize(x, scheme) for x, scheme in zip((k, v), SCHEMES[name], strict=True))


@pytest.mark.parametrize(
    "isa, name, heads, kv_heads, rows, dims, dims_v",
    [
        *in_turn((CHOSEN,), SCHEMES, SHAPES[:2], of=2),
        *in_turn((CHOSEN,), FEW, SHAPES[2:], of=3),
        *((isa, name, *SHAPES[1]) for isa in ISAS[1:] for name in FEW),
    ],
)
def test_the_kernel_is_the_scheme(isa, name, heads, kv_heads, rows, dims, dims_v):
    """float32 is as exact as over values, of which 16 bits lose what their own rounding loses."""
    k, v = coded(name, 2, kv_heads, 333, dims, dims_v=dims_v)
    q = randn(2, heads, rows, dims)
    spec = spec_of(q, k, v)
    assert type(configs.key_for(decode_configs_of(spec), spec, 1)) is KINDS_OF_KEYS[name]
    for options in ({}, {"causal": True, "kv_lens": ints(333, 140)}, {"softcap": 4.0, "scale": -0.2}):
        level_a(decode(q, k, v, split=128, isa=isa, **options), q, k, v, f"{name} {options}", **options)
    for dtype in (torch.bfloat16, torch.float16) if name in FEW and heads == 4 else ():
        x = (6 * q).to(dtype)
        level_a(decode(x, k, v, split=128, isa=isa), x, k, v, f"{name} {dtype}")


def decode_configs_of(spec):
    from polyflash.backends.cpu import decode_configs

    return decode_configs.choose(spec, HERE)


@pytest.mark.parametrize(
    "isa, decoded, dtype",
    [
        *in_turn((CHOSEN,), (False,), KINDS_OF_FLOATS, of=1),
        *in_turn(ISAS[1:-1], (False,), KINDS_OF_FLOATS, of=2),
        *(("generic", False, dtype) for dtype in ("fp8_e4m3", "mxfp4")),
        *in_turn((CHOSEN,), (True,), KINDS_OF_FLOATS, of=2),
    ],
)
def test_every_code_has_its_value(isa, decoded, dtype):
    """Subnormal values, infinities and NaN too: one key alone is the result, and its product with a one the
    score. `decoded`: by a kernel that decodes rows, as scales are those of 8 channels."""
    packed = 2 if KINDS[dtype].bits == 4 else 1
    codes = torch.arange(256, dtype=torch.uint8)
    if packed == 1:
        codes = codes.view(getattr(torch, KINDS[dtype].storage)).view(2, 1, 1, 128).repeat(1, 2, 1, 1)
    else:
        codes = codes.view(4, 1, 1, 64).repeat(1, 2, 1, 1)
    batch, channels = len(codes), 128
    width = 32 if dtype == "mxfp4" else None
    scheme = Scheme(dtype=dtype, channels=8 if decoded and dtype != "mxfp4" else width)
    blocks = channels // scheme.channels if scheme.channels else 1
    x = QuantizedTensor(codes, torch.full((batch, 2, 1, blocks), 3.0), None, scheme, torch.float32)
    q, want = torch.zeros(batch, 2, 1, channels), x.values(torch.float32)
    other = replace(x, codes=torch.zeros_like(codes))  # of the same kernel
    if decoded and dtype == "mxfp4":
        other = quantize(torch.zeros(batch, 2, 1, channels), Scheme())
    out, _ = decode(q, other, x, isa=isa)
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(), want.nan_to_num())
    for channel in range(0, channels, 5):
        q.zero_()
        q[..., channel] = 1.0
        _, lse = decode(q, x, other, isa=isa, scale=1.0)
        for entry in range(batch):
            if want[entry].isfinite().all():  # nothing beside it makes it NaN
                assert torch.equal(lse[entry, :, 0], want[entry, :, 0, channel]), (entry, channel)


@pytest.mark.parametrize(
    "heads, name",
    (*((2, name) for name in ("fp8", "nf4", "mxfp4", "smooth", "fp8-blocks")), (8, "fp8"), (8, "values")),
)
def test_pages_splits_and_heads_change_no_bit(monkeypatch, heads, name):
    """Tables lie by pages, as the codes; what no key stands in is garbage, its scales NaN."""
    keys, size = (624, 48) if name in ("values", "fp8-blocks") else (640, 64)
    lens = ints(keys, 391)
    k, v = (quantize(randn(2, 2, keys, 128, seed=n), s) for n, s in enumerate(_in_pages(name, size)))
    q = randn(2, heads, 1, 128, dtype=torch.bfloat16)
    want = decode(q, k, v, split=256, kv_lens=lens)
    made = []
    for x in (k, v):
        codes, table = paged(x.codes.view(torch.uint8), size, unused=0x7F)
        tables = [y if y is None else _by_page(y, table, len(codes)) for y in (x.scale, x.shift)]
        made.append(replace(x, codes=codes.view(x.codes.dtype), scale=tables[0], shift=tables[1]))
    paging = {"kv_lens": lens, "page_table": table}
    check_items(monkeypatch, name, want, lambda: decode(q, *made, split=256, **paging))
    check_items(monkeypatch, name, want, lambda: decode(q, k, v, split=256, kv_lens=lens))


def _by_page(entries, table, pages):
    """Entries of blocks of tokens, as many of every page, as a pool of pages."""
    each = entries.shape[2] // table.shape[1]
    pool = torch.full((pages, entries.shape[1], each, entries.shape[3]), math.nan)
    for b, row in enumerate(table.long()):
        pool[row] = entries[b].unflatten(1, (-1, each)).transpose(0, 1).float()
    return pool.to(entries.dtype)


def _in_pages(name, size):
    """A scheme's, but for blocks of which a page has no whole number."""
    return tuple(
        replace(s, tokens=size)
        if s.tokens and size % s.tokens
        else replace(s, granularity="token")
        if s.granularity in ("head", "tensor")
        else s
        for s in SCHEMES[name]
    )


@pytest.mark.parametrize(
    "rows, name", ((1, "fp8"), *((4, name) for name in ("fp8", "e5m2", "mixed", "fp8-blocks", "mxfp4")))
)
def test_what_a_row_does_not_see_is_not_in_it(rows, name):
    """Codes that are no numbers, and scales of tokens, of keys that other rows see."""
    k, v = coded(name, 1, 2, 640, 128)
    q = randn(1, 4, rows, 128, dtype=torch.bfloat16)
    options = {"causal": True, "kv_lens": ints(600), "kv_starts": ints(192)}
    want = decode(q, k, v, **options)
    last = 600 - rows + 1  # what the first row does not see any more
    for x in (k, v):
        bits = x.codes.view(torch.uint8)
        for at in (slice(0, 192), slice(last, 640)):
            bits[:, :, at] = 0x7F
            if x.scale.shape[2] == 640:
                x.scale[:, :, at] = math.nan
    got = decode(q, k, v, **options)
    for x, y, part in zip(got, want, ("out", "lse"), strict=True):
        same_bits(x[:, :, 0], y[:, :, 0], part)
    if rows > 1 and name in ("fp8", "mxfp4"):
        assert got[0][:, :, 1:].isnan().all()


@pytest.mark.parametrize("name", ROWS)
def test_decoded_rows_have_the_bits_of_a_call_over_values(name):
    k, v = coded(name, 2, 2, 333, 96, dims_v=72)
    q = randn(2, 4, 1, 96)
    options = {"causal": True, "kv_lens": ints(333, 140)}
    want = polyflash.attention(q, *(x.values(torch.float32) for x in (k, v)), **options)
    same_bits(polyflash.attention(q, k, v, **options), want, name)
    if name in FEW:
        rounded = q.to(torch.bfloat16)
        want = polyflash.attention(rounded.float(), *(x.values(torch.float32) for x in (k, v)), **options)
        same_bits(polyflash.attention(rounded, k, v, **options), want.to(torch.bfloat16), name)


@pytest.mark.parametrize("name", FEW)
def test_extreme_scales(name):
    """From subnormal values to those that no product with a constant beside them would hold."""
    q = randn(1, 2, 1, 128)
    for k_size, v_size in ((0.0, 1.0), (1e-30, 1e-30), (1e3, 6e4), (1.0, 0.0), (1e-3, 1e35)):
        k, v = (
            quantize(randn(1, 2, 200, 128, seed=n) * x, SCHEMES[name][n])
            for n, x in enumerate((k_size, v_size))
        )
        level_a(decode(q, k, v), q, k, v, f"{name} {k_size} {v_size}")


def test_what_reads_which_codes():
    """The named schemes in registers, and a plan says how."""
    q = randn(1, 8, 1, 128, dtype=torch.bfloat16)
    for name, words in (
        ("fp8", "float32 in registers"),
        ("blocks", "float32 as they are read"),
        ("mxfp4", "registers"),
    ):
        k, v = coded(name, 1, 2, 300, 128)
        plan = str(polyflash.explain(q, k, v))
        assert words in plan and "read in the walk" in plan, plan
    sizes = (1, 1, 1, 1, 512, 128, 128)
    spec = AttentionSpec(Phase.DECODE, "bfloat16", "cpu", *sizes, frozenset())
    for codes, page_size, kind in (
        ("int8/1x0,int4/1x32+1x32", 0, CodesKey),
        ("fp8_e4m3/1x0*fp8,fp8_e5m2/0x0", 0, FloatsKey),
        ("nf4/64x1,mxfp4/1x32", 0, FloatsKey),
        ("mxfp4/1x32,fp8_e4m3/1x0", 16, FloatsKey),
        ("fp8_e4m3/1x32,fp8_e4m3/1x0", 0, DecodedKey),
        ("fp8_e4m3/1x0,int8/1x0", 0, DecodedKey),
        ("fp8_e4m3/1x0,fp8_e4m3/1x0+0x1", 0, DecodedKey),
        ("int8/1x32,int8/1x0", 0, DecodedKey),
        ("int8/8x1,int8/1x0", 0, DecodedKey),
        ("int8/0x1,int8/1x0", 0, CodesKey),
        ("int8/0x1,int8/1x0", 8, DecodedKey),
        ("int8/1x0,int8/64x1", 0, DecodedKey),
        ("int8/1x0*int8,int8/1x0+0x1*int8", 0, DecodedKey),
    ):
        call = replace(spec, codes=codes, page_size=page_size)
        key = configs.key_for(decode_configs_of(call), call, 4)
        assert type(key) is kind and configs.refuses(call, HERE) == "", codes
