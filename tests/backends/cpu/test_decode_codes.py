"""Decode over codes: the kernel is the scheme, and what a row does not see changes no bit."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

import polyflash
from polyflash.backends.cpu import capabilities, decode_codes_configs, decode_configs
from polyflash.backends.cpu.decode_configs import SHORT
from polyflash.plan import Launch
from polyflash.quant import NAMED, QuantizedTensor, Scheme, quantize
from polyflash.reference import attention_reference
from polyflash.spec import Arguments, AttentionSpec, Phase
from tests.backends.cpu.integer_emulator import expected_of_few_rows
from tests.backends.cpu.test_forward_kernel import HERE, randn
from tests.backends.cpu.test_paged_kernel import ints, paged
from tests.chosen import in_turn
from tests.tolerance import Expected, check, eager, same_bits

pytestmark = pytest.mark.skipif(HERE.arch != "avx512", reason="the kernels are tested with AVX-512")
ROW = next(row for row in capabilities.CAPABILITIES if row.phase is Phase.DECODE)
SCHEMES = {
    **{name: NAMED[name] for name in ("int8", "int8-smooth", "int8-channel", "int4", "int4-token")},
    "int8-affine": (Scheme(granularity="channel", symmetric=False), Scheme(symmetric=False)),
    "mixed": (Scheme(dtype="int4", granularity="channel", tokens=32), Scheme(granularity="tensor")),
    "int8-blocks": (Scheme(smoothing="block_mean"), Scheme(channels=32)),
}
# Fewer keys share scales of channels than a block has.
RUNS = {"int8-runs": (Scheme(granularity="channel", tokens=32), Scheme())}
# The same codes, which ask for products of bytes.
BYTES = {f"{name}*": tuple(replace(s, compute="int8") for s in SCHEMES[name]) for name in SCHEMES}
NEEDS_VNNI = pytest.mark.skipif("avx512_vnni" not in HERE.features, reason="needs avx512_vnni")


def spec_of(q, k: QuantizedTensor, v: QuantizedTensor, page_size=0, keys=0) -> AttentionSpec:
    keys = keys or k.codes.shape[2]
    sizes = (q.shape[0], q.shape[1], k.codes.shape[1], q.shape[2], keys, q.shape[3])
    dtype, codes = str(q.dtype).removeprefix("torch."), f"{k.form},{v.form}"
    head_dim_v = v.codes.shape[3] * v.form.packed
    spec = AttentionSpec(Phase.DECODE, dtype, "cpu", *sizes, head_dim_v, frozenset(), codes=codes)
    return replace(spec, page_size=page_size)


def decode(
    q, k: QuantizedTensor, v: QuantizedTensor, *, split=None, block_n=None, isa=None, target=HERE, **options
):
    """(out, lse) of the kernel itself."""
    from polyflash.backends.cpu import decode

    table = options.get("page_table")
    spec = spec_of(q, k, v, 0 if table is None else k.codes.shape[2])
    assert not decode_codes_configs.refuses(spec, HERE)
    tables = {"k_scale": k.scale, "k_shift": k.shift, "v_scale": v.scale, "v_shift": v.shift}
    args = Arguments(need_lse=True, codes=spec.codes, **tables, **options)
    config = decode_configs.choose(spec, target)
    config = replace(config, split_keys=split or config.split_keys, block_n=block_n or config.block_n)
    if isa not in (None, config.isa):
        config = replace(config, isa=isa, compute="f32")
    out = torch.full((*q.shape[:3], spec.head_dim_v), math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], math.nan)
    launch = Launch(ROW, config, "heuristic", target, spec)
    return decode.run(launch, q, k.codes, v.codes, out, lse, args)


def coded(name, *shape, dims_v=None, bias=True, lens=None):
    *more, dims = shape
    k, v = randn(*shape, seed=1), randn(*more, dims_v or dims, seed=2)
    k = k + torch.linspace(-1.0, 3.0, dims) if bias else k
    return tuple(quantize(x, s, lens=lens) for x, s in zip((k, v), {**SCHEMES, **BYTES}[name], strict=True))


def level_a(got, q, k, v, label, block_n=0, **options):
    """By testing.md §3.1: against float64 of the values that the codes stand for; if products are of bytes,
    of those that their emulation makes."""
    if k.form.compute == "int8":
        block_n = block_n or decode_configs.choose(spec_of(q, k, v), HERE).block_n
        check(*got, expected_of_few_rows(q, k, v, block_n, **options)[0], label=label, options=options)
        return
    values = [x.values(torch.float64) for x in (k, v)]
    oracle = attention_reference(q, *values, **options)
    theirs = eager(q, *(x.to(q.dtype) for x in values), **options)
    sample = tuple(x.double() for x in theirs)
    check(*got, Expected(oracle.out, oracle.lse, (sample,), q.dtype), label=label, options=options)


SHAPES = ((4, 4, 1, 128, 128), (4, 2, 1, 64, 96), (8, 2, 1, 128, 128), (2, 1, 4, 80, 48), (3, 1, 1, 192, 256))


@pytest.mark.parametrize("name, heads, kv_heads, rows, dims, dims_v", in_turn(SCHEMES, SHAPES, of=3))
def test_the_kernel_is_the_scheme(name, heads, kv_heads, rows, dims, dims_v):
    k, v = coded(name, 2, kv_heads, 333, dims, dims_v=dims_v)
    for dtype, sharp in ((torch.bfloat16, 1), (torch.bfloat16, 6)):
        q = (randn(2, heads, rows, dims) * sharp).to(dtype)
        for options in ({}, {"causal": True, "kv_lens": ints(333, 140)}, {"softcap": 4.0, "scale": -0.2}):
            got = decode(q, k, v, split=128, **options)
            level_a(got, q, k, v, f"{name} {dtype} x{sharp} {options}", **options)


@pytest.mark.parametrize("name, rows", (("int8", 5), ("int4", 9), ("int4-token*", 6), ("int8-blocks", 31)))
def test_rows_of_several_tiles_have_the_bits_of_their_tiles(name, rows):
    if "*" in name and "avx512_vnni" not in HERE.features:
        pytest.skip("needs avx512_vnni")
    k, v = coded(name, 2, 2, 333, 64)
    q = randn(2, 8, rows, 64).to(torch.bfloat16)
    for options in ({"causal": True, "kv_lens": ints(333, 140)}, {"softcap": 4.0, "window": (70, 9)}):
        got = polyflash.attention(q, k, v, return_lse=True, **options)
        level_a((got.out, got.lse), q, k, v, f"{name} {options}", **options)
    found, packed = decode(q, k, v, split=128), q.reshape(2, 2, 4 * rows, 64)
    for first in range(0, 4 * rows - 4, 8):  # fewer have another kernel
        tile = slice(first, first + 8)
        alone = decode(packed[:, :, tile].reshape(2, -1, 1, 64), k, v, split=128)
        for many, few in zip(found, alone, strict=True):
            same_bits(many.reshape(2, 2, 4 * rows, -1)[:, :, tile].flatten(), few.flatten(), f"from {first}")


@NEEDS_VNNI
@pytest.mark.parametrize(
    "name, heads, kv_heads, rows, dims, dims_v",
    (
        *((f"{name}*", 8, 2, 1, 128, 128) for name in SCHEMES),
        *((f"{name}*", 2, 1, 4, 80, 48) for name in ("int8-smooth", "int4")),
        *(("int4*", *shape) for shape in ((4, 2, 1, 64, 96), (8, 1, 1, 192, 256))),
        ("int8*", 4, 2, 1, 64, 96),
    ),
)
def test_products_of_bytes_are_their_emulation(name, heads, kv_heads, rows, dims, dims_v):
    """V's scales of both signs and 0 too."""
    k, v = coded(name, 2, kv_heads, 333, dims, dims_v=dims_v)
    q = randn(2, heads, rows, dims).to(torch.bfloat16)
    window = {"causal": True, "window": (70, None), "kv_starts": ints(5, 40)}
    sinks = {"sinks": torch.linspace(-1.0, 2.0, heads), "softcap": 4.0, "scale": -0.2}
    for options in ({}, {"causal": True, "kv_lens": ints(333, 140)}):
        level_a(decode(q, k, v, split=128, **options), q, k, v, f"{name} {options}", **options)
    for options in (window, sinks):
        got = polyflash.attention(q, k, v, return_lse=True, **options)
        level_a((got.out, got.lse), q, k, v, f"{name} {options}", **options)
    if v.form.scale.tokens:
        v.scale[:, :, ::3] *= -1
        v.scale[:, :, 5::7] = 0
        level_a(decode(q, k, v, split=128), q, k, v, f"{name} signs")


@NEEDS_VNNI
@pytest.mark.parametrize("name", ("int8*", "int8-blocks*"))
@pytest.mark.parametrize("block_n", (64, 128))
def test_blocks_whose_v_is_walked_once_or_twice_are_their_emulation(name, block_n):
    k, v = coded(name, 2, 2, 333, 128)
    q = randn(2, 8, 1, 128).to(torch.bfloat16)
    level_a(decode(q, k, v, split=128, block_n=block_n), q, k, v, f"{name} {block_n}", block_n)


@NEEDS_VNNI
@pytest.mark.parametrize(
    "name, group, dtype",
    in_turn(
        ("int8", "int8-affine", "int8-blocks", "int4", "int4-token", "mixed"),
        (1, 2, 4, 8),
        (torch.bfloat16, torch.float32),
        of=4,
    ),
    ids=str,
)
def test_two_bytes_are_16_bits(name, group, dtype):
    """The sums are the same integers; V's scales of both signs and 0 too."""
    k, v = coded(name, 2, 2, 333, 128, dims_v=96)
    if v.form.scale.tokens:
        v.scale[:, :, ::3] *= -1
        v.scale[:, :, 5::7] = 0
    q = randn(2, 2 * group, 1, 128).to(dtype)
    without = replace(HERE, features=HERE.features - {"avx512_vnni"})
    for options in ({}, {"causal": True, "kv_starts": ints(5, 40), "kv_lens": ints(333, 140)}):
        got, wanted = (decode(q, k, v, split=128, target=x, **options) for x in (HERE, without))
        for x, y in zip(got, wanted, strict=True):
            same_bits(x, y, f"{name} {group} {options}")


@NEEDS_VNNI
def test_float32_is_not_rounded_to_bytes():
    k, v = coded("int4*", 1, 2, 333, 128)
    q = randn(1, 8, 1, 128)
    got = decode(q, k, v, split=128)
    level_a(got, q, *(replace(x, scheme=replace(x.scheme, compute="float")) for x in (k, v)), "int4*")
    assert "16 bits, twice" in str(polyflash.explain(q, k, v))


@NEEDS_VNNI
@pytest.mark.parametrize("mutant", ("signs", "middle", "shift", "runs"))
def test_the_emulation_is_not_vacuous(mutant):
    k, v = coded("int4*", 1, 2, 333, 128)
    q = randn(1, 8, 1, 128, dtype=torch.bfloat16)
    v.scale[:, :, ::3] *= -1
    got = decode(q, k, v)
    if mutant == "signs":
        v = replace(v, scale=v.scale.abs())
    elif mutant == "middle":
        v = replace(v, codes=v.codes ^ 0x11)
    elif mutant == "shift":
        k = replace(k, shift=k.shift.roll(1, 2))
    else:
        k = replace(k, scale=k.scale.roll(1, 2))
    with pytest.raises(AssertionError):
        level_a(got, q, k, v, mutant)


@NEEDS_VNNI
def test_few_bytes_are_good_enough():
    """Level B: the error on normal values stays near that of the codes."""
    q, (k, v) = randn(1, 32, 1, 128, dtype=torch.bfloat16), (randn(1, 8, 2048, 128, seed=n) for n in (1, 2))
    want = attention_reference(q, k, v).out
    for name, bound in (("int8*", 1.6e-2), ("int8-channel*", 1.6e-2), ("int4*", 0.14), ("int4-token*", 0.15)):
        out, _ = decode(q, *(quantize(x, s) for x, s in zip((k, v), BYTES[name], strict=True)))
        assert (out - want).norm() <= bound * want.norm(), name


@pytest.mark.parametrize(
    "name, heads, dims, dims_v, isa",
    (
        *(("int8", 2, 128, 128, isa) for isa in ("avx512", "avx2")),
        *(("int4", 8, 64, 256, isa) for isa in ("avx512", "avx2")),
        ("int8-affine", 4, 72, 100, "avx512"),
        ("int8-blocks", 16, 256, 32, "avx512"),
        ("int4-token", 4, 80, 48, "avx2"),
    ),
)
def test_float32_is_as_exact_as_over_values(name, heads, dims, dims_v, isa):
    """What a step of 32767 leaves of q and of the weights is multiplied too; sums of values that cancel."""
    k, v = coded(name, 1, 2, 700, dims, dims_v=dims_v)
    v.scale[:, :, ::3] *= -1
    for sharp in (1, 6):
        q = randn(1, heads, 1, dims) * sharp
        level_a(decode(q, k, v, isa=isa), q, k, v, f"{name} {heads} {dims} x{sharp}")
        few = decode(q, k, v, isa=isa, kv_lens=ints(1))
        level_a(few, q, k, v, f"{name} one key", kv_lens=ints(1))
    assert "16 bits, twice" in str(polyflash.explain(q, k, v))


def test_float32_of_every_size():
    """From a part of a step to infinity, and none at all."""
    k, v = coded("int8", 1, 2, 300, 128)
    q = randn(1, 2, 1, 128)
    for size in (0.0, 1e-36, 1e-30, 1e-3, 1e4):
        level_a(decode(q * size, k, v), q * size, k, v, f"q x {size}")
    for size in (0.0, 1e-26, 1e30):
        w = replace(v, scale=v.scale * size)
        level_a(decode(q, k, w), q, k, w, f"v x {size}")
    spread = q * torch.logspace(-6, 1, 128)
    level_a(decode(spread, k, v), spread, k, v, "spread")
    q = q.clamp(-0.9, 0.9)
    for largest in (2 - 2**-20, 2**-20 - 2):  # would be 2^15 steps of a power of two
        q[..., 5] = largest
        level_a(decode(q, k, v), q, k, v, f"largest {largest}")
    for bad in (math.inf, math.nan):
        q[0, 0, 0, 3] = bad
        out, _ = decode(q, k, v)
        assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()


@pytest.mark.parametrize("name", ("int8", "int4"))
def test_float16(name):
    k, v = coded(name, 1, 2, 700, 128)
    q = randn(1, 8, 1, 128, dtype=torch.float16)
    level_a(decode(q, k, v), q, k, v, name)


def test_splits_of_codes_are_longer_where_heads_share_out_the_threads():
    """The size decides bits: it hangs on neither the batch nor the number of keys."""
    for heads, coded_keys in ((8, 2048), (4, 2048), (2, 1024)):
        for batch, keys in ((1, 100), (3, 70_000)):
            sizes = batch, 8, heads, 1, keys, 64, 64
            spec = AttentionSpec(Phase.DECODE, "bfloat16", "cpu", *sizes, frozenset())
            assert decode_configs.choose(spec, HERE).split_keys == 1024
            spec = replace(spec, codes="int8/1x0,int8/1x0")
            assert decode_configs.choose(spec, HERE).split_keys == coded_keys


@pytest.mark.parametrize(
    "heads, name",
    (
        *itertools.product((2, 8), ("int8-smooth", "int8-channel", "int4", "int4-token")),
        *(pytest.param(8, name, marks=NEEDS_VNNI) for name in ("int8-smooth*", "int4-token*")),
    ),
)
def test_pages_splits_and_heads_change_no_bit(monkeypatch, heads, name):
    """Tables lie by pages, as the codes; what no key stands in is garbage, its scales NaN."""
    keys, size = 700, 64
    seen = {"kv_lens": ints(keys, 391), "kv_starts": ints(0, 5)}
    schemes = {**SCHEMES, **BYTES}[name]
    plain = tuple(s if s.smoothing != "mean" else replace(s, smoothing="block_mean") for s in schemes)
    k, v = (quantize(randn(2, 2, keys, 128, seed=n), s) for n, s in enumerate(plain))
    q = randn(2, heads, 1, 128, dtype=torch.bfloat16)
    made, table = in_pages(k, v, size)
    for block_n in (size, 2 * size):  # of one page; of two, and too long to be read by turns
        call = functools.partial(decode, q, split=256, block_n=block_n, **seen)
        want = call(k, v)
        check_items(monkeypatch, name, want, functools.partial(call, *made, page_table=table))
        check_items(monkeypatch, name, want, functools.partial(call, k, v))


def in_pages(k, v, size):
    """The same codes in pools, their tables by pages, and the page table. A page has one entry of a table, or
    one of every key."""
    made, keys = [], k.codes.shape[2]
    for x in (k, v):
        codes, table = paged(x.codes, size, unused=77)
        tables = []
        for entries in (x.scale, x.shift):
            if entries is None:
                tables.append(None)
                continue
            tokens = size // -(-keys // entries.shape[2])  # entries of a page
            tables.append(paged(entries, tokens)[0] if tokens > 1 else _by_page(entries, table))
        made.append(replace(x, codes=codes, scale=tables[0], shift=tables[1]))
    return made, table


@pytest.mark.parametrize("channels, block_n", ((128, SHORT), (64, SHORT), (96, 32)))
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.bfloat16) for name in ("int8", "int8-affine", "int8-blocks", "int8-runs")),
        ("int8-channel", torch.float16),
    ],
)
def test_reading_by_turns_changes_no_bit(monkeypatch, name, dtype, channels, block_n):
    """Of whole tensors K and V are read by turns, across splits too, of pages block after block."""
    keys, sizes = 1100, {"split": 256, "block_n": block_n}
    q = randn(2, 3, 1, channels, dtype=dtype)
    schemes = {**SCHEMES, **RUNS}[name]
    k, v = (quantize(randn(2, 3, keys, channels, seed=n), s) for n, s in enumerate(schemes))
    made, table = in_pages(k, v, 32 if name in RUNS else 64)
    for seen in (
        {},
        {"window_left": 700, "window_right": 0},
        {"kv_lens": ints(1090, 513), "softcap": 3.0},
        {"kv_starts": ints(45, 300), "scale": -0.2},
    ):
        seen = {"kv_lens": ints(keys, keys), **seen}
        want = decode(q, *made, page_table=table, **sizes, **seen)
        check_items(monkeypatch, f"{name}, {seen}", want, lambda seen=seen: decode(q, k, v, **sizes, **seen))


def check_items(monkeypatch, name, want, call):
    """What splits and heads an item has changes no bit of a call."""
    from polyflash.backends.cpu import decode as host

    for most, together in ((4, 1), (1, 2), (4, 2)):
        monkeypatch.setattr(host, "_heads_per_item", lambda *_, heads=together: heads)
        monkeypatch.setattr(host, "MOST_SPLITS", most)
        monkeypatch.setattr(host, "ITEMS_PER_THREAD", 0.01)
        for x, y, part in zip(call(), want, ("out", "lse"), strict=True):
            same_bits(x, y, f"{part} of {name}, {most} splits")


def _by_page(entries, table):
    shape = int(table.max()) + 1, entries.shape[1], 1, entries.shape[3]
    pool = torch.full(shape, math.nan, dtype=entries.dtype)
    for b in range(table.shape[0]):
        pool[table[b].long(), :, 0] = entries[b].transpose(0, 1)[: table.shape[1]]
    return pool


@pytest.mark.parametrize(
    "rows, name",
    (
        *itertools.product((1, 4), ("int8", "int4")),
        *(pytest.param(4, x, marks=NEEDS_VNNI) for x in ("int8*", "int4*")),
    ),
)
def test_what_no_row_sees_changes_no_bit(name, rows):
    q = randn(1, 2, rows, 128, dtype=torch.bfloat16)
    k, v = coded(name, 1, 2, 640, 128)
    starts, lens = ints(192), ints(448)  # whole groups of 64 tokens
    want = decode(q, k, v, kv_lens=lens, kv_starts=starts)
    for x in (k, v):
        for at in (slice(0, 192), slice(448, 640)):
            x.codes[:, :, at] = 99
            tokens = -(-640 // x.scale.shape[2])
            own = slice(at.start // tokens, at.stop // tokens)
            for table in (x.scale, x.shift):
                if table is not None:
                    table[:, :, own] = math.nan
    got = decode(q, k, v, kv_lens=lens, kv_starts=starts)
    for x, y, part in zip(got, want, ("out", "lse"), strict=True):
        same_bits(x, y, part)


@pytest.mark.parametrize("name", ("int8", pytest.param("int8*", marks=NEEDS_VNNI)))
@pytest.mark.parametrize(
    "which, value",
    (
        *itertools.product(("k_scale", "v_scale"), (math.nan, -math.nan)),
        *(("v_scale", x) for x in (math.inf, -math.inf)),
    ),
)
def test_scales_that_are_not_finite_reach_the_rows_that_see_them(which, value, name):
    q = randn(1, 2, 4, 128, dtype=torch.bfloat16)
    k, v = coded(name, 1, 2, 300, 128)
    (k if which == "k_scale" else v).scale[0, 1, 298] = value  # of rows 2 and 3 of the second head
    out, _ = decode(q, k, v, causal=True)
    assert out[:, 0].isfinite().all() and out[:, 1, :2].isfinite().all()
    assert out[:, 1, 2:].isnan().all()


@pytest.mark.parametrize("compute", ("float", pytest.param("int8", marks=NEEDS_VNNI)))
def test_extreme_scales(compute):
    """Zeros, tiny and large tensors keep their digits: integers are relative to the largest of a row."""
    q = randn(1, 8, 1, 64, dtype=torch.bfloat16)
    for k_size, v_size in ((0.0, 1.0), (1e-30, 1e-30), (1e3, 6e4), (1.0, 0.0)):
        k = quantize(
            randn(1, 2, 200, 64, seed=1) * k_size, replace(SCHEMES["int8-channel"][0], compute=compute)
        )
        v = quantize(randn(1, 2, 200, 64, seed=2) * v_size, replace(SCHEMES["int8"][1], compute=compute))
        got, _ = decode(q, k, v)
        if compute == "int8":
            level_a((got, None), q, k, v, f"{k_size} {v_size}")
            continue
        want = attention_reference(q, *(x.values(torch.float64) for x in (k, v))).out
        assert torch.allclose(got.double(), want, rtol=2e-2, atol=2e-2 * max(v_size, 1e-38)), (k_size, v_size)


@pytest.mark.parametrize("isa", ("avx2", "generic"))
@pytest.mark.parametrize("name", ("int8", "int4"))
def test_narrow_vectors(isa, name):
    k, v = coded(name, 1, 2, 300, 64)
    q = randn(1, 8, 1, 64, dtype=torch.bfloat16)
    level_a(decode(q, k, v, isa=isa), q, k, v, f"{isa} {name}")


@pytest.mark.parametrize("name", ("int4", "int8-channel", "int8-smooth*"))
def test_pages_of_any_size_one_after_the_other(name):
    """Groups of tokens that a page cuts, and pages that share a route with others before."""
    table, schemes = (
        torch.randperm(8, generator=torch.Generator().manual_seed(1))[None].int(),
        {**SCHEMES, **BYTES},
    )
    for page, invariant in itertools.product((64, 16, 12, 80), (False, True)):
        k, v = (
            quantize(randn(8, page, 1, 64, seed=i), s, layout="bshd") for i, s in enumerate(schemes[name])
        )
        q, lens = randn(1, 16, 64), ints(8 * page - 3)
        got = polyflash.attention_paged(q, k, v, table, lens, batch_invariant=invariant)
        values = (x.values(torch.float64).transpose(1, 2) for x in (k, v))
        want = polyflash.attention_paged(q.double(), *values, table, lens)
        assert torch.allclose(got.double(), want, rtol=0, atol=1e-5 if "*" not in name else 0.1), (
            page,
            invariant,
        )


def test_public_calls_say_that_codes_are_read_in_the_walk():
    q, (k, v) = randn(1, 8, 1, 128, dtype=torch.bfloat16), coded("int4", 1, 2, 300, 128)
    assert "read in the walk" in str(polyflash.explain(q, k, v))
    level_a((polyflash.attention(q, k, v), None), q, k, v, "attention")
    for name, heads, words in (
        ("int4*", 8, "products of bytes"),
        ("int8*", 8, "products of bytes"),
        ("int8*", 2, "a single row is as quick"),
        ("int4", 8, "16 bits: q or the weights"),
    ):
        plan = str(polyflash.explain(q[:, :heads], *coded(name, 1, 2, 300, 128)))
        assert words in plan or "avx512_vnni" not in HERE.features, plan
    mixed = (coded("int4*", 1, 2, 300, 128)[0], v)
    assert "to be asked for by k and v" in str(polyflash.explain(q, *mixed))
    many, keys = randn(1, 2, 9, 128, dtype=torch.bfloat16), coded("int4", 1, 2, 72, 128)
    for some, words in ((keys, "decoded to"), ((k, v), "in the walk"), (keys, "decoded to")):
        level_a((polyflash.attention(many, *some), None), many, *some, words)
        assert words in polyflash.explain(many, *some).notes[-1]
    assert "9 rows of a kv head in tiles of 8" in str(polyflash.explain(many, k, v))


@pytest.mark.parametrize(
    "change, words",
    (
        ({"seqlen_q": 129}, "up to 128 rows"),
        ({"seqlen_q": 33, "codes": "fp8_e4m3/1x0,fp8_e4m3/1x0"}, "up to 32 rows"),
        ({"seqlen_q": 17, "codes": "int8/1x0*int8,int8/1x0*int8"}, "integer products"),
        ({"head_dim": 320}, "up to 256"),
        ({"codes": "int8/1x0,-"}, "both"),
    ),
)
def test_words_of_what_is_left_to_be_decoded_first(change, words):
    sizes = (1, 1, 1, 1, 512, 128, 128)
    spec = AttentionSpec(Phase.DECODE, "bfloat16", "cpu", *sizes, frozenset(), codes="int8/1x0,int8/1x0")
    assert decode_codes_configs.refuses(spec, HERE) == ""
    assert words in decode_codes_configs.refuses(replace(spec, **change), HERE)
