"""Decode over codes in Triton, small enough for its interpreter; tests/conformance/test_codes.py is whole."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash.backends.triton import codes, configs, merge
from polyflash.backends.triton.config_types import DecodeConfig
from polyflash.backends.webgpu.configs import multiplies
from polyflash.quant import NAMED, QuantizedTensor, Scheme, quantize
from polyflash.reference import attention_reference
from polyflash.spec import Arguments, AttentionSpec, Feature, Phase
from polyflash.target import parse
from tests.device import ON_A_CPU
from tests.integers import operands, scattered, with_coded_weights
from tests.tolerance import Expected, check, expect, masked_scores

SCHEMES = {
    **{name: NAMED[name] for name in ("int8", "int8-smooth", "int4", "int4-token", "fp8", "mxfp4")},
    "int8-channel": (Scheme(granularity="channel", tokens=64), Scheme(granularity="channel", tokens=16)),
    "int4-blocks": (Scheme(dtype="int4", granularity="block", tokens=8, channels=16), Scheme(dtype="int4")),
    "fp8-e5m2": (Scheme(dtype="fp8_e5m2"), Scheme(dtype="fp8_e5m2", granularity="channel")),
    "affine": (Scheme(symmetric=False), Scheme(symmetric=False)),
    "means": (Scheme(smoothing="block_mean"), Scheme(smoothing="mean")),
}


def qkv(rows: int, keys: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + keys + dim)
    shapes = (2, 4, rows, dim), (2, 2, keys, dim), (2, 2, keys, dim)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k + 2 * torch.randn(dim, generator=generator).to(dtype), v


def run(q: Tensor, k: QuantizedTensor, v: QuantizedTensor, **options: Any) -> Any:
    plan = polyflash.explain(q, k, v, backend="triton", **options)
    assert plan.chosen.phase is Phase.DECODE and "in the walk" in plan.notes[-1], plan.notes[-1]
    return polyflash.attention(q, k, v, return_lse=True, backend="triton", **options)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.slow if (i + j) % 3 else ())
        for i, name in enumerate(SCHEMES)
        for j, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32))
    ],
)
def test_scheme(name: str, dtype: torch.dtype):
    """By default each in one dtype, by turns."""
    rows, dim = {torch.bfloat16: (1, 40), torch.float16: (2, 32), torch.float32: (1, 32)}[dtype]
    if "mxfp4" in name and dim % 32:
        dim = 64
    q, k, v = qkv(rows, 75, dim, dtype)
    k, v = (quantize(x, scheme) for x, scheme in zip((k, v), SCHEMES[name], strict=True))
    found = run(q, k, v, causal=True)
    values = [x.values(torch.float64) for x in (k, v)]
    right = attention_reference(q.double(), *values, causal=True)
    want = expect(q, *(x.values(dtype) for x in (k, v)), causal=True)
    check(found.out, found.lse, replace(want, out=right.out, lse=right.lse), label=f"{name} {dtype}")


@pytest.mark.parametrize("rows", (1, 6))
def test_a_scaled_q_is_not_rounded(rows: int):
    """What were rounded of it would be the same for all keys of a channel, and show in their sum."""
    q, k, v = qkv(rows, 64, 32, torch.bfloat16)
    k, v = (quantize(x, s) for x, s in zip((k + 8, v), SCHEMES["int8-channel"], strict=True))
    right = attention_reference(q.double(), *(x.values(torch.float64) for x in (k, v)))
    assert float((run(q, k, v).lse - right.lse).abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("name", "dtype", "group", "rows"),
    [
        ("int4", torch.bfloat16, 4, 1),
        ("int4", torch.float16, 4, 1),
        ("int4", torch.float16, 8, 1),
        ("mxfp4", torch.float16, 8, 1),
        ("int4", torch.float16, 2, 3),
        ("int4-blocks", torch.float16, 2, 3),
    ],
)
def test_blocks_of_values_share_scales(name: str, dtype: torch.dtype, group: int, rows: int):
    """Products are of as many parts as hold what float16 does."""
    q, k, v = qkv(rows, 75, 128, dtype)
    q = torch.cat([q[:, :2] * (0.5 + i) for i in range(group)], 1)
    k, v = (quantize(x, s) for x, s in zip((k, v), SCHEMES[name], strict=True))
    found = run(q, k, v)
    values = [x.values(torch.float64) for x in (k, v)]
    right = attention_reference(q.double(), *values)
    want = expect(q, *(x.values(dtype) for x in (k, v)))
    check(found.out, found.lse, replace(want, out=right.out, lse=right.lse), label=f"{name} {dtype}")
    if dtype == torch.float16:
        assert (found.out - right.out).norm() < 4e-4 * right.out.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinite_codes_in_blocks(dtype: torch.dtype):
    """A key that is -inf in one channel has scores of either infinity, and V that is inf stays it."""
    block = Scheme(dtype="fp8_e5m2", granularity="block", tokens=8, channels=16)
    q, k, v = qkv(1, 60, 128, dtype)
    q = q.abs()
    k, v = quantize(k, block), quantize(v, block)
    k.codes[0, 0, 7, 3], v.codes[:, :, 9, 5] = -torch.inf, torch.inf
    right = attention_reference(q.double(), *(x.values(torch.float64) for x in (k, v)))
    found = run(q, k, v)
    assert not found.out.isnan().any() and torch.equal(found.out.isinf(), right.out.isinf())
    there = right.out.isfinite()
    assert (found.out - right.out)[there].norm() < 1e-2 * right.out[there].norm()


@pytest.mark.parametrize("name", ["int4", "int4-token", "mxfp4"])
def test_tables_of_16_bits_lie_anywhere(name: str):
    q, k, v = qkv(1, 75, 64, torch.bfloat16)
    k, v = (quantize(x, scheme) for x, scheme in zip((k, v), NAMED[name], strict=True))
    want = run(q, k, v)
    for step in (1, 2):
        apart = scattered(k, step), scattered(v, step)
        assert all(codes.in_words(x.scale).data_ptr() % 4 == 0 for x in apart)
        found = run(q, *apart)
        assert torch.equal(found.out, want.out) and torch.equal(found.lse, want.lse)


@pytest.mark.parametrize("name", ["int8", "int4", "int4-token", "fp8"])
def test_what_no_row_sees_changes_no_bit(name: str):
    """Keys behind each row's window have NaN scales, codes of NaN, or both; of one that only the first of
    two rows sees, the second row's bits stay."""
    for rows in (1, 2):
        q, k, v = qkv(rows, 60, 32, torch.bfloat16)
        k, v = (
            quantize(x, replace(s, tokens=None, granularity="token"))
            for x, s in zip((k, v), NAMED[name], strict=True)
        )
        options: dict[str, Any] = {"causal": True, "window": (20, None)}
        want = run(q, k, v, **options)
        last = 60 - rows - 20 + 1  # the first key that the first row sees
        for x in (k, v):
            x.codes.view(torch.uint8)[:, :, : last - 1] = 0xFF
            x.scale[:, :, : last - 1] = torch.nan
        found = run(q, k, v, **options)
        assert torch.equal(found.out, want.out) and torch.equal(found.lse, want.lse)
        v.codes.view(torch.uint8)[:, :, last - 1 : last] = 0x7F
        v.scale[:, :, last - 1 : last] = torch.nan
        found = run(q, k, v, **options)
        assert found.out[:, :, 0].isnan().all()
        if rows == 2:
            assert torch.equal(found.out[:, :, 1], want.out[:, :, 1])


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_hidden_values_of_large_scale_cost_no_bits(name: str):
    """Of a key that one of two rows, or none, sees: float16 weights are kept in range by what is seen."""
    q, k, v = qkv(2, 60, 32, torch.bfloat16)
    seen = torch.ones(2, 1, 2, 60, dtype=torch.bool)
    seen[..., 59] = False
    k, v = (quantize(x, scheme) for x, scheme in zip((k, v), NAMED[name], strict=True))
    cases: tuple[dict[str, Any], ...] = ({"causal": True}, {"mask": seen}, {"mask": seen[:, :, :1]})
    for options in cases:
        some = q[:, :, :1] if options.get("mask", seen).shape[2] == 1 else q
        want = run(some, k, v, **options)
        large = replace(v, scale=v.scale.clone())
        large.scale[:, :, 59] = 1e20
        found = run(some, k, large, **options)
        assert torch.equal(found.out[:, :, 0], want.out[:, :, 0])


WIDE = {
    **{name: NAMED[name] for name in ("int8", "fp8", "int4", "int4-token", "mxfp4", "int8-channel")},
    "fp8-mean": (Scheme(dtype="fp8_e4m3"), Scheme(dtype="fp8_e4m3", smoothing="mean")),
    "int8-groups": (Scheme(), Scheme(channels=32)),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dim", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_sizes_that_float16_does_not_hold(name: str, dim: int):
    """Rows of q and tokens of v from tiny to large, and tokens of 0: four rows of a kv head, whose products
    are of float16 with codes of 8 bits, and whose weights have the scales of groups of channels."""
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(1, n, s, dim, generator=generator) for n, s in ((8, 1), (2, 120), (2, 120)))
    q *= torch.tensor([1e-30, 1e-6, 1.0, 2.0, 1.0, 1e-9, 0.0, 1.0])[None, :, None, None]
    v[:, :, :40] *= 0.0
    v[:, 0, 40:60] *= 1e-8
    v[:, 1, 40:60] *= 1e9
    v[:, 0, 90:] *= 3e4
    q, k, v = (x.bfloat16() for x in (q, k, v))
    for factor in (1.0, 2.0**-60, 2.0**60):
        codes = [quantize(x, s) for x, s in zip((k, v * factor), WIDE[name], strict=True)]
        found = run(q * (1 if factor == 1.0 else 2.0**-3), *codes)
        values = [x.values(torch.float64) for x in codes]
        right = attention_reference(q.double() * (1 if factor == 1.0 else 2.0**-3), *values)
        error = (found.out.double() - right.out).norm(dim=-1) / right.out.norm(dim=-1)
        assert error.max() < 8e-3, (factor, error.flatten())
        two = dim == 256 and codes[0].scheme.granularity == "channel"  # q times its scales: two bfloat16
        assert (found.lse.double() - right.lse).abs().max() < (2e-4 if two else 1e-4)


def test_codes_of_nan_reach_their_channel():
    q, k, v = qkv(2, 40, 32, torch.bfloat16)
    k, v = (quantize(x, scheme) for x, scheme in zip((k, v), NAMED["fp8"], strict=True))
    v.codes.view(torch.uint8)[:, :, 39, 5] = 0x7F  # the last key, which the last row alone sees
    found = run(q, k, v, causal=True).out.isnan()
    assert found[:, :, 1, 5].all() and int(found.sum()) == 2 * 4


def test_what_is_decoded_apart_is_said():
    q, k, v = qkv(1, 20, 32, torch.bfloat16)
    for pair in (NAMED["nf4"], (Scheme(), None)):
        coded = [x if s is None else quantize(x, s) for x, s in zip((k, v), pair, strict=True)]
        plan = polyflash.explain(q, *coded, backend="triton")
        assert "before the kernel" in plan.notes[-1]


def test_blocks_share_the_scales_of_channels():
    q, k, v = qkv(1, 64, 32, torch.bfloat16)
    k, v = (quantize(x, Scheme(granularity="channel", tokens=n)) for x, n in ((k, 32), (v, 96)))
    spec = polyflash.explain(q, k, v, backend="triton").spec
    spec = replace(spec, codes=f"{k.form},{v.form}")
    assert configs.choose_decode(spec, parse("cuda:sm90")).block_n == 32


def test_few_blocks_have_a_tile_of_their_own():
    """Of no call whose bits may follow no length, nor of a config that was asked for."""
    q, k, v = qkv(1, 64, 128, torch.bfloat16)
    for name, blocks in (("int4", (64, 4, 0)), ("int8", (64, 4, 0))):
        pair = [quantize(x, s) for x, s in zip((k, v), NAMED[name], strict=True)]
        spec = polyflash.explain(q, *pair, backend="triton").spec
        spec, target = replace(spec, codes=f"{pair[0].form},{pair[1].form}"), parse("cuda:sm90")
        chosen = configs.choose_decode(spec, target)
        short = configs.short_coded(chosen, spec, target)
        assert (short.block_n, short.num_warps, short.max_registers) == blocks
        assert configs.short_coded(replace(chosen, num_stages=4), spec, target) is None
        invariant = replace(spec, features=spec.features | {Feature.BATCH_INVARIANT})
        chosen = configs.choose_decode(invariant, target)
        assert configs.short_coded(chosen, invariant, target) is None


def test_a_tile_that_all_have_is_no_other_for_few_blocks():
    """A launch's short one has none of its own, or there would be no end of them."""
    q, k, v = qkv(1, 64, 64, torch.bfloat16)
    pair = [quantize(x, s) for x, s in zip((k, v), SCHEMES["means"], strict=True)]
    spec, target = polyflash.explain(q, *pair, backend="triton").spec, parse("cuda:sm90")
    spec = replace(spec, codes=f"{pair[0].form},{pair[1].form}")
    chosen = configs.choose_decode(spec, target)
    assert (chosen.block_n, configs.short_coded(chosen, spec, target)) == (64, None)
    about = {"spec": spec, "target": target, "prepared": None}
    assert codes.Prepared(SimpleNamespace(config=chosen, **about)).short is None


@pytest.mark.parametrize(("name", "most"), [("int8", 1024), ("int4", 1024), ("int8-channel", 8192)])
def test_few_blocks_are_those_of_one_short_request(name: str, most: int):
    q, *kv = qkv(1, 64, 128, torch.bfloat16)
    pair = [quantize(x, s) for x, s in zip(kv, NAMED[name], strict=True)]
    spec = polyflash.explain(q, *pair, backend="triton").spec
    target = replace(parse("cuda:sm90"), cores=132)
    spec = replace(spec, codes=f"{pair[0].form},{pair[1].form}")
    about = {"spec": spec, "target": target, "prepared": None}
    prepared = codes.Prepared(SimpleNamespace(config=configs.choose_decode(spec, target), **about))
    for batch, keys in ((1, 300), (1, most), (1, 2 * most), (8, most), (64, 8192)):
        q, k = (torch.empty(batch, heads, n, 128, device="meta") for heads, n in ((32, 1), (8, keys)))
        assert prepared.is_short(q, k, Arguments()) == (batch * keys <= most)
        assert not prepared.is_short(q, k, Arguments(cu_seqlens_q=torch.zeros(2)))
    narrow = replace(spec, head_dim=64, head_dim_v=64)
    config = configs.choose_decode(narrow, target)
    short = configs.short_coded(config, narrow, target)
    assert (config.num_warps, short.num_warps) == ((4, 4) if name == "int8" else (1, 2))


def test_many_keys_of_codes_have_a_tile_of_their_own(monkeypatch):
    """On the chip where it was measured, of whole tensors, and of no call whose bits may follow no length."""
    monkeypatch.setattr(codes.forward, "run", lambda launch, *rest: launch.config)
    q, *kv = qkv(1, 64, 128, torch.bfloat16)
    int4 = (1, 2, 4096, 0), {8192: 4096, 2000: 4096, 4096: 2048}
    mxfp4 = (2, 3, 1024, 168), {8192: 1024, 2000: 1024, 4096: 1024}
    channel = (2, 3, 1024, 168), {8192: 1024, 2000: 1024, 4096: 1024}
    int8 = (4, 3, 1024, 0), {8192: 4096, 2000: 2048, 4096: 2048}
    walks, wide = {(128, 300), (256, 1024), (64, 8192)}, {(16, 32768), (64, 8192), (256, 1024)}
    some = {(64, 100)} | walks
    for name, arch, made, long in (
        ("int4", "sm90", int4, some | wide), ("int4-token", "sm90", int4, some | wide),
        ("mxfp4", "sm90", mxfp4, some | wide), ("int8-channel", "sm90", channel, walks | wide),
        ("int8", "sm90", int8, some), ("fp8", "sm90", None, set()), ("int4", "sm100", None, set()),
    ):  # fmt: skip
        pair = [quantize(x, s) for x, s in zip(kv, NAMED[name], strict=True)]
        spec = polyflash.explain(q, *pair, backend="triton").spec
        target = replace(parse(f"cuda:{arch}"), cores=132)
        spec = replace(spec, codes=f"{pair[0].form},{pair[1].form}", num_q_heads=4 * spec.num_kv_heads)
        about = {"spec": spec, "target": target, "prepared": None}
        chosen = configs.choose_decode(spec, target)
        launch = SimpleNamespace(config=chosen, **about)
        prepared = launch.prepared = codes.Prepared(launch)
        assert (prepared.long is not None) == bool(made), name
        for batch, keys in {(1, 8192), (16, 8192)} | some | wide if made else ():
            q_, k_ = (torch.empty(batch, h, n, 128, device="meta") for h, n in ((32, 1), (8, keys)))
            config = codes.run(launch, q_, k_, None, None, None, Arguments())
            assert (config == prepared.long.config) == ((batch, keys) in long), (name, batch, keys)
            assert not prepared.is_long(q_, k_, Arguments(page_table=torch.zeros(1, 1)))
        if made:
            config = prepared.long.config
            assert tuple(getattr(config, n) for n in configs.LONG_FIELDS) == made[0], name
            assert all(getattr(config, n) == getattr(chosen, n) for n in ("block_m", "block_n", "base2"))
            invariant = replace(spec, features=spec.features | {Feature.BATCH_INVARIANT})
            assert configs.long_coded(configs.choose_decode(invariant, target), invariant, target) is None
            sizes = {n: prepared.long.prepared.config.split_size(w, n, prepared.long.prepared.cores)
                     for w, n in ((512, 8192), (1024, 2000), (512, 4096))}  # fmt: skip
            assert sizes == made[1], (name, sizes)


def test_few_rows_of_codes_have_a_tile_of_their_own(monkeypatch):
    """Routes know 2 to 16 query rows as one; of 8 rows of a kv head or fewer products are turned."""
    monkeypatch.setattr(codes.forward, "run", lambda launch, *rest: launch.config)
    q, *kv = qkv(2, 64, 128, torch.bfloat16)
    target = replace(parse("cuda:sm90"), cores=132)
    channels = {128: ((8, 64, 2, 3), *2 * [(16, 64, 2, 2)]), 64: ((8, 64, 1, 3), *2 * [(16, 64, 1, 2)])}
    channels[256] = (8, 64, 4, 3), *2 * [(16, 64, 4, 2)]
    keys = {128: ((8, 64, 2, 3), (16, 64, 2, 3), (32, 128, 4, 3)), 64: ((8, 64, 2, 3), *2 * [(16, 64, 2, 3)])}
    names, dtypes = ("int4", "mxfp4", "int8-channel"), ("bfloat16", "float16")
    plain = ("int8", 128, "bfloat16"), ("int8", 64, "bfloat16"), ("fp8", 64, "float16")
    for name, dim, dtype in (*itertools.product(names, channels, dtypes), *plain):
        few, some, many = (keys if name in ("int8", "fp8") else channels)[dim]
        pair = [quantize(x, s) for x, s in zip(kv, NAMED[name], strict=True)]
        spec = polyflash.explain(q, *pair, backend="triton").spec
        spec = replace(spec, codes=f"{pair[0].form},{pair[1].form}", num_q_heads=4 * spec.num_kv_heads)
        spec = replace(spec, dtype=dtype, head_dim=dim, head_dim_v=dim)
        launch = SimpleNamespace(
            config=configs.choose_decode(spec, target), spec=spec, target=target, prepared=None
        )
        for rows, heads, wanted in ((2, 32, few), (8, 8, few), (3, 32, some), (9, 8, some), (16, 32, many)):
            q_, k_ = (torch.empty(64, h, n, 128, device="meta") for h, n in ((heads, rows), (8, 8192)))
            config = codes.run(launch, q_, k_, None, None, None, Arguments())
            tile = config.block_m, config.block_n, config.num_warps, config.num_stages
            assert tile == wanted, (name, rows, heads, tile)
            packed = codes.run(launch, q_, k_, None, None, None, Arguments(cu_seqlens_q=torch.zeros(2)))
            assert packed == launch.config
        for other in (
            replace(spec, dtype="float32"),
            replace(spec, features={Feature.BATCH_INVARIANT}),
            replace(spec, seqlen_q=1, num_q_heads=16 * spec.num_kv_heads),
        ):
            assert configs.few_coded(configs.choose_decode(other, target), other, target) == []


@pytest.mark.parametrize("name", ["int8", "int4", "int8-channel", "fp8", "mxfp4"])
def test_few_rows_are_turned(name: str):
    """As launches of few rows on NVIDIA: rows of several positions, which see different keys."""
    q, k, v = qkv(3, 75, 64, torch.bfloat16)
    k, v = (quantize(x, s) for x, s in zip((k, v), SCHEMES[name], strict=True))
    found = run(q, k, v, causal=True, config=DecodeConfig(8, 16, 2, 1, 64))
    values = [x.values(torch.float64) for x in (k, v)]
    right = attention_reference(q.double(), *values, causal=True)
    want = expect(q, *(x.values(torch.bfloat16) for x in (k, v)), causal=True)
    check(found.out, found.lse, replace(want, out=right.out, lse=right.lse), label=name)


def test_many_parts_of_turned_codes_are_merged_by_more():
    turned, plain = DecodeConfig(8, 64, 2, 3, 256), DecodeConfig(16, 64, 2, 3, 256)
    for config, parts, wanted in ((turned, 16, 16), (turned, 17, 32), (plain, 17, 16)):
        assert merge.how_of(config, parts, Arguments())[0] == wanted
        assert merge.how_of(config, parts, Arguments(batch_invariant=True))[0] == 16


PRODUCTS = {
    "token": (Scheme(compute="int8"), {"causal": True}),
    "mean": (Scheme(compute="int8", smoothing="mean"), {"softcap": 4.0}),
    "head": (Scheme(compute="int8", granularity="head"), {"scale": -0.3}),
    "blocks": (Scheme(compute="int8", granularity="block", tokens=24), {"window": (40, 3)}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_integer_products(name: str):
    """Few rows of batch_invariant are the forward's, which multiplies codes of K with those of q."""
    scheme, options = PRODUCTS[name]
    for dtype, dim in ((torch.float32, 40), (torch.bfloat16, 64)):
        q, k, v = qkv(5, 75, dim, dtype)
        k = quantize(k, scheme)
        k.scale[:, 0] *= -1
        found = products(q, k, quantize(v, Scheme()), **options)
        told = {"scale": dim**-0.5, **options}
        v = quantize(v, Scheme()).values(dtype)
        right = attention_reference(*operands(q, k), v.double(), **told)
        plain = expect(q, k.values(dtype), v, **options)
        eager = tuple((right.out + a - plain.out, right.lse + b - plain.lse) for a, b in plain.eager)
        want = Expected(right.out, right.lse, eager, dtype)
        check(found.out, found.lse, want, label=f"{name} {dtype}", options=options)


def products(q: Tensor, k: QuantizedTensor, v: Any, **options: Any) -> Any:
    options |= {"backend": "triton", "batch_invariant": True}
    plan = polyflash.explain(q, k, v, **options)
    assert plan.chosen.phase is Phase.FORWARD and "before the kernel" in plan.notes[-1], plan.notes[-1]
    assert any("int32" in note for note in plan.notes)
    return polyflash.attention(q, k, v, return_lse=True, **options)


def test_integer_products_of_odd_values():
    """Hidden scales that are NaN change no bit; a NaN in q reaches its row; what is zero, or has a scale that
    float32 does not hold, weighs all keys alike."""
    q, k, v = qkv(5, 60, 32, torch.bfloat16)
    k, v = quantize(k, Scheme(compute="int8")), quantize(v, Scheme())
    want = products(q, k, v, causal=True)
    k.codes[:, :, 59], k.scale[:, :, 59] = -128, torch.nan
    q[0, 1, 2, 7] = torch.nan
    found = products(q, k, v, causal=True)
    odd = torch.zeros(2, 4, 5, dtype=torch.bool)
    odd[:, :, 4] = odd[0, 1, 2] = True
    assert found.out[odd].isnan().all() and torch.equal(found.out[~odd], want.out[~odd])
    assert torch.equal(found.lse[~odd], want.lse[~odd])
    q, k, v = qkv(5, 60, 32, torch.float16)
    for k_of, scheme, scale in ((k * 0, "head", 0.2), (k, "token", 1e-30), (k * 0, "token", 0.2)):
        coded = quantize(k_of, Scheme(compute="int8", granularity=scheme))
        found = products(q * (scheme == "head"), coded, quantize(v, Scheme()), causal=True, scale=scale)
        assert bool(found.out.isfinite().all()) and float(found.lse.exp().max()) < 60.1


@pytest.mark.parametrize("form", ("int4/1x0*int8", "int8/0x0+0x0*int8", "int8/1x0+1x0*int8"))
def test_products_are_not_of_four_bits_or_zero_points(form: str):
    """On WebGPU neither."""
    sizes = (1, 2, 2, 64, 64, 64, 64)
    spec = AttentionSpec(Phase.FORWARD, "bfloat16", "cuda", *sizes, frozenset(), codes=f"{form},-")
    assert not configs.refuses_products(replace(spec, codes="int8/1x0*int8,-"), parse("cuda:sm90"))
    assert "codes: " in configs.refuses_products(spec, parse("cuda:sm90"))
    assert not multiplies(f"{form},{form}", 0) and multiplies("int8/1x0*int8,int8/1x0*int8", 0)


EIGHTS = Scheme(dtype="fp8_e4m3", granularity="head", compute="fp8")
BOTH: dict[str, tuple[Scheme, dict[str, Any]]] = {
    "plain": (EIGHTS, {}),
    "causal": (EIGHTS, {"causal": True, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}),
    "negative": (replace(EIGHTS, granularity="tensor"), {"scale": -0.3, "window": (40, 3)}),
    "cap": (replace(EIGHTS, granularity="token"), {"softcap": 4.0}),
    "mean": (replace(EIGHTS, smoothing="mean"), {"kv_lens": torch.tensor([75, 33]).int()}),
}


@pytest.mark.skipif(not ON_A_CPU, reason="the bounds are the interpreter's: see conformance")
@pytest.mark.parametrize("name", BOTH)
def test_products_of_8_bits(name: str):
    """Against the scheme with q and the weights rounded where the kernel does: what is left is rounding of
    the result, and of the few weights on which the two do not agree."""
    scheme, options = BOTH[name]
    for dtype, dim in ((torch.float32, 40), (torch.bfloat16, 64)):
        q, k, v = qkv(5, 75, dim, dtype)
        k, v = quantize(k, scheme), quantize(v, EIGHTS)
        if scheme.granularity == "head":
            k.scale[:, 0] *= -1
        if name == "causal":  # NaN, of a key that the last rows see
            v.codes.view(torch.uint8)[:, :, 72, 3] = 0x7F
        found, config = multiplied(q, k, v, **options)
        if name == "plain":
            other, _ = multiplied(q, k, v, config=replace(config, level=0))
            assert float((found.out - other.out).norm() / found.out.norm()) < 4e-3
        told = {"scale": dim**-0.5, **options}
        scores = masked_scores(*operands(q, k), "", told)
        right = with_coded_weights(scores, v, block=config.block_n, sinks=options.get("sinks"))
        assert torch.equal(found.out.isnan(), right[0].isnan())
        off = float((found.out.double() - right[0]).nan_to_num().norm() / right[0].nan_to_num().norm())
        assert off < (4e-3 if dtype is torch.bfloat16 else 2e-3), f"{name} {dtype}: {off}"
        assert torch.equal(found.lse.isinf(), right[1].isinf())
        assert float((found.lse - right[1]).nan_to_num().abs().max()) < 1e-5


def multiplied(q: Tensor, k: Any, v: Any, **options: Any) -> Any:
    """The result of the kernel that multiplies codes of both, and its config."""
    options |= {"backend": "triton", "batch_invariant": True}
    plan = polyflash.explain(q, k, v, **options)
    assert plan.chosen.phase is Phase.FORWARD and "in the walk" in plan.notes[-1], plan.notes[-1]
    assert any("rounded to e4m3; sums" in note for note in plan.notes)
    if q.dtype is torch.float32:  # whose parts are none of codes
        options["config"] = replace(options.get("config", plan.config), precision="bf16x6")
    return polyflash.attention(q, k, v, return_lse=True, **options), plan.config
