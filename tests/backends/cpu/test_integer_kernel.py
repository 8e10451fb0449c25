"""Integer products of codes: Level A against their emulation, Level B against attention without codes, and
what no other row may change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import target
from polyflash.backends.cpu.configs import Config
from polyflash.quant import QuantizedTensor, Scheme, quantize
from polyflash.reference import attention_reference
from polyflash.spec import Phase
from tests.backends.cpu import keys as every
from tests.backends.cpu.integer_emulator import expected
from tests.tolerance import Expected, check, same_bits, same_pattern

HERE = target.detect("cpu")
pytestmark = pytest.mark.skipif(not list(every.integer(HERE)), reason="needs avx512_vnni")


def scheme(**options: Any) -> Scheme:
    return Scheme(compute="int8", **options)


TOKEN = scheme()
PAIRS = {
    "token": (TOKEN, TOKEN),
    "mean": (scheme(smoothing="mean"), scheme(granularity="channel")),
    "block-mean": (scheme(smoothing="block_mean"), TOKEN),
    "head": (scheme(granularity="head"), scheme(granularity="tensor")),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (40, None)},
    "lens": {"kv_lens": torch.tensor([290, 33], dtype=torch.int32), "kv_starts": torch.tensor([3, 30])},
    "offset": {"causal": True, "q_offset": 160, "scale": -0.3},
    "cap": {"softcap": 4.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0]), "causal": True},
    "mask": {"mask": torch.rand(2, 1, 150, 333, generator=torch.Generator().manual_seed(9)) < 0.6},
    "bias": {"bias": torch.randn(4, 150, 333, generator=torch.Generator().manual_seed(8))},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "causal": True},
}


def problem(
    pair: str, dtype: torch.dtype, rows: int = 150, keys: int = 333, dims: tuple[int, int] = (64, 64)
) -> tuple[Tensor, QuantizedTensor, QuantizedTensor]:
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = (2, 4, rows, dims[0]), (2, 2, keys, dims[0]), (2, 2, keys, dims[1])
    q, k, v = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    k[..., ::11] += 3
    return q, *(quantize(x, s) for x, s in zip((k, v), PAIRS[pair], strict=True))


def attend(q: Tensor, k: QuantizedTensor, v: QuantizedTensor, **options: Any) -> Any:
    """(out, lse), by integer products."""
    if options.get("page_table") is None and "cu_seqlens_q" not in options:
        plan = polyflash.explain(q, k, v, return_lse=True, **options)
        assert plan.config.compute == "int8dot", str(plan)
    return polyflash.attention(q, k, v, return_lse=True, **options)


def held(q: Tensor, k: QuantizedTensor, v: QuantizedTensor, label: str, **options: Any) -> None:
    """Level A."""
    found = attend(q, k, v, **options)
    block_n = polyflash.explain(q, k, v, **options).config.block_n
    options.pop("batch_invariant", None)
    agree(found, expected(q, k, v, block_n, **options)[0], label, options)


def agree(found: Any, want: Expected, label: str = "", options: dict[str, Any] | None = None) -> None:
    """One code in a thousand may be off by one, or an exponent by a 64th: float32 alone can show it, the
    log-sum-exp in one row of fifty."""
    same_pattern(found.lse, want.lse, label)
    error = ((found.lse - want.lse).abs() / want.lse.abs().clamp(min=1))[want.lse.isfinite()]
    assert (error > 1e-5).double().mean() <= 0.02 and error.max() <= 1 / 90, label
    if found.out.dtype is torch.float32:
        assert (found.out - want.out).norm() <= 2e-4 * want.out.norm(), label
    else:
        check(found.out, None, want, label=label, options=options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_level_a(pair: str, dtype: torch.dtype):
    for name in ("full", "causal", "cap"):
        held(*problem(pair, dtype), f"{pair} {name}", **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_features(name: str):
    for pair in ("token", "block-mean"):
        held(*problem(pair, torch.bfloat16), f"{pair} {name}", **OPTIONS[name])


@pytest.mark.parametrize("dims", [(40, 40), (80, 96), (96, 33), (192, 128)])
def test_any_head_dim(dims: tuple[int, int]):
    for pair in ("mean", "block-mean"):
        held(*problem(pair, torch.bfloat16, dims=dims), f"{pair} {dims}", causal=True)


def test_any_number_of_keys_and_rows():
    for keys in (1, 2, 15, 17, 63, 65, 127, 129, 257, 600):
        for rows in (120, 257):
            held(*problem("block-mean", torch.bfloat16, rows, keys), f"{rows}x{keys}")


def test_narrow_panels():
    """Rows that fill fewer vectors, which batch_invariant leaves to this kernel."""
    for rows in (1, 15, 17, 33):
        problems = problem("block-mean", torch.bfloat16, rows)
        held(*problems, f"{rows} rows", causal=True, batch_invariant=True)


@pytest.mark.parametrize("family", ["normal", "kbias"])
@pytest.mark.parametrize("causal", [False, True])
def test_level_b(family: str, causal: bool):
    """Of q, k, v and weights in int8, and a smoothed k: testing's bound; the worst row three times it."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, 2048, 64, generator=generator) for _ in range(3))
    if family == "kbias":
        k[..., ::11] += 10
    want = attention_reference(q, k, v, causal=causal)
    for smoothing in ("mean", "block_mean"):
        coded = quantize(k, scheme(smoothing=smoothing)), quantize(v, TOKEN)
        found = attend(q, *coded, causal=causal)
        error = found.out - want.out
        assert error.norm() <= 2.7e-2 * want.out.norm(), smoothing
        assert (error.norm(dim=-1) / want.out.norm(dim=-1)).max() <= 3 * 2.7e-2, smoothing
        assert (found.lse - want.lse).abs().max() <= 2e-2, smoothing


@pytest.mark.parametrize("name", ["lens", "causal"])
def test_hidden_codes_change_no_bit(name: str):
    """Any code, a scale that is NaN or huge: of keys beyond a length, or behind the last row."""
    q, k, v = problem("token", torch.bfloat16)
    options: dict[str, Any] = dict(OPTIONS["lens"])
    if name == "causal":
        options = {"causal": True, "q_offset": 100}
    last = 250 if name == "causal" else 290
    want = attend(q, k, v, **options)
    for scale in (torch.nan, 1e30):
        for x in (k, v):
            x.codes[:, :, last:] = -128
            x.scale[:, :, last:] = scale
        found = attend(q, k, v, **options)
        same_bits(found.out, want.out)
        same_bits(found.lse, want.lse)


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -0.5, 1e30])
def test_a_scale_reaches_the_rows_that_see_its_key(scale: float):
    """Key 180 of V: rows before it keep every bit, in blocks and panels that others share with them."""
    q, k, v = problem("token", torch.bfloat16, 300, 300)
    want = attend(q, k, v, causal=True)
    v.scale[:, :, 180] = scale
    found = attend(q, k, v, causal=True)
    same_bits(found.out[:, :, :180], want.out[:, :, :180])
    same_bits(found.lse[:, :, :180], want.lse[:, :, :180])
    assert (found.lse - want.lse).abs().max() <= (1e-4 if scale == 1e30 else 1e-5)  # 2**-92 joins exponents
    if scale == -0.5:
        exact, _ = polyflash.attention(
            q.double(), k.values(torch.float64), v.values(torch.float64), causal=True, return_lse=True
        )
        assert (found.out - exact).norm() <= 2.5e-2 * exact.norm()
    elif scale < 1e30 or scale != scale:
        assert not found.out[:, :, 180:].isfinite().any()


def test_a_nan_reaches_its_rows():
    q, k, v = problem("token", torch.float32)
    want = attend(q, k, v, causal=True)
    q[0, 1, 7, 3] = torch.nan
    k.scale[1, 0, 300] = torch.nan
    found = attend(q, k, v, causal=True)
    hit = torch.zeros(2, 4, 150, dtype=torch.bool)
    hit[0, 1, 7] = True
    hit[1, :2, 300 - 183 :] = True
    assert torch.equal(found.out.isnan().any(-1), hit) and torch.equal(found.lse.isnan(), hit)
    same_bits(found.out[~hit], want.out[~hit])


def test_rows_beside_change_no_bit():
    q, k, v = problem("block-mean", torch.bfloat16, 300)
    whole = attend(q, k, v, causal=True)
    for first, last in ((0, 1), (5, 21), (70, 100), (100, 300)):
        options = {"causal": True, "q_offset": first + 33, "batch_invariant": True}
        part = attend(q[:, :, first:last], k, v, **options)
        same_bits(part.out, whole.out[:, :, first:last])
        same_bits(part.lse, whole.lse[:, :, first:last])


def test_packed_members_are_calls_of_their_own():
    """Members of few rows too; scales per token, and means of the whole tensor."""
    lens_q, lens_k = (70, 3, 0, 150), (100, 257, 9, 150)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, h, 64, generator=generator) for n, h in ((sum(lens_q), 4), (sum(lens_k), 2), (516, 2))
    )
    cu = [torch.tensor((0, *x)).cumsum(0).int() for x in (lens_q, lens_k)]
    for pair in ("token", "mean"):
        coded = [quantize(x, s, layout="thd") for x, s in zip((k, v), PAIRS[pair], strict=True)]
        found = polyflash.attention_varlen(q, *coded, *cu, causal=True, return_lse=True)
        for i in range(4):
            at, of = (slice(int(x[i]), int(x[i + 1])) for x in cu)
            if at.start == at.stop:
                continue
            own = [part(x, of) for x in coded]
            rows = q[at].transpose(0, 1)[None]
            want = attend(rows, *own, causal=True, batch_invariant=True)
            same_bits(found.out[at], want.out[0].transpose(0, 1))
            same_bits(found.lse[:, at], want.lse[0])


def part(x: QuantizedTensor, of: slice) -> QuantizedTensor:
    """Some tokens of packed codes, as a batch of one."""
    per_token = x.scale.shape[2] > 1
    scale = x.scale[:, :, of] if per_token else x.scale
    return replace(x, codes=x.codes[:, :, of], scale=scale, layout="bhsd")


@pytest.mark.parametrize("size", [1, 3, 16, 48, 64])
def test_pages_change_no_bit(size: int):
    """Shuffled pages, in which scales lie as keys do; and a mean per page of 16 keys or more."""
    q, k, v = (torch.randn(2, n, h, 64) for n, h in ((150, 4), (192, 2), (192, 2)))
    lens, per = torch.tensor([192, 161], dtype=torch.int32), 192 // size
    order = torch.randperm(2 * per, generator=torch.Generator().manual_seed(1))
    table = order.view(2, per).int()
    cu = torch.tensor([0, 150, 300], dtype=torch.int32)
    pairs = {"token": (TOKEN, TOKEN)}
    if size % 16 == 0:
        pairs["mean"] = (scheme(smoothing="mean"), TOKEN)
    for name, schemes in pairs.items():
        pools = []
        for x in (k, v):
            pool = torch.empty(2 * per, size, 2, 64)
            pool[order] = x.reshape(2 * per, size, 2, 64)
            pools.append(pool)
        coded = [quantize(x, s, layout="bshd") for x, s in zip(pools, schemes, strict=True)]
        options = {"page_table": table, "kv_lens": lens, "causal": True, "return_lse": True}
        found = polyflash.attention_paged(q.flatten(0, 1), *coded, cu_seqlens_q=cu, **options)
        if name == "token":
            dense = [unpaged(x, table) for x in coded]
            want = attend(q.transpose(1, 2), *dense, causal=True, kv_lens=lens)
            same_bits(found.out, want.out.transpose(1, 2).flatten(0, 1))
            continue
        values = (x.values(torch.float64)[table.long()].transpose(1, 2).flatten(2, 3) for x in coded)
        exact = attention_reference(q.transpose(1, 2), *values, causal=True, kv_lens=lens)
        error = found.out - exact.out.transpose(1, 2).flatten(0, 1)
        assert error.norm() <= 2e-2 * exact.out.norm()


def unpaged(x: QuantizedTensor, table: Tensor) -> QuantizedTensor:
    codes, scale = (y[table.long()].transpose(1, 2).flatten(2, 3) for y in (x.codes, x.scale))
    return replace(x, codes=codes, scale=scale, layout="bhsd")


@pytest.mark.parametrize("mutant", ["scales", "mean", "channels", "weights"])
def test_level_a_is_not_vacuous(mutant: str):
    """It fails if K's scales are their mean, a mean is lost, V's channels are scaled by their neighbours, or
    the weights have the scales of V's neighbours."""
    pair = {"scales": "token", "mean": "block-mean", "channels": "mean", "weights": "token"}[mutant]
    q, k, v = problem(pair, torch.bfloat16)
    want, _ = expected(q, k, v, 128)
    if mutant == "weights":
        v = replace(v, scale=v.scale.roll(1, 2))
    if mutant == "scales":
        k = replace(k, scale=k.scale.mean(2, keepdim=True).expand_as(k.scale))
    elif mutant == "mean":
        assert k.shift is not None
        k = replace(k, shift=k.shift.roll(1, 2))
    elif mutant == "channels":
        v = replace(v, scale=v.scale.roll(1, 3))
    found = attend(q, k, v)
    with pytest.raises(AssertionError):
        agree(found, want)


REFUSED = {
    "of floats": ({}, (Scheme(), Scheme())),
    "of one alone": ({}, (TOKEN, Scheme())),
    "of blocks": ({}, (scheme(granularity="block", tokens=16, channels=32), TOKEN)),
    "of four bits": ({}, (scheme(dtype="int4"), scheme(dtype="int4"))),
    "of steps": ({}, (scheme(granularity="head", symmetric=False), TOKEN)),
    "of a v with a mean": ({}, (TOKEN, scheme(smoothing="mean"))),
    "dropped": ({"dropout_p": 0.1, "dropout_seed": 1}, (TOKEN, TOKEN)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_codes_are_decoded(name: str):
    options, schemes = REFUSED[name]
    q, k, v = (torch.randn(1, 2, 130, 64) for _ in range(3))
    coded = [quantize(x, s) for x, s in zip((k, v), schemes, strict=True)]
    plan = polyflash.explain(q, *coded, **options)
    assert plan.config.compute != "int8dot" and "decoded" in plan.notes[-1]
    found = polyflash.attention(q, *coded, **options)
    want = polyflash.attention(q, *(x.values(torch.float32) for x in coded), **options)
    assert torch.equal(found, want)


def test_few_rows_and_gradients_are_decoded():
    q, k, v = (torch.randn(1, 2, 130, 64) for _ in range(3))
    coded = quantize(k, TOKEN), quantize(v, TOKEN)
    plan = polyflash.explain(q[:, :, :1], *coded)
    assert plan.spec.phase is Phase.DECODE and not isinstance(plan.config, Config)
    assert polyflash.explain(q.requires_grad_(), *coded).config.compute != "int8dot"
    plan = polyflash.explain(q.detach(), *coded, target="cpu:avx512")
    assert plan.config.compute != "int8dot"


def test_keys_are_bounded():
    keys = list(every.integer(HERE))
    assert len({key.name for key in keys}) == len(keys) <= 64
    assert not {key.name for key in keys} & {key.name for key in every.forward(HERE)}
