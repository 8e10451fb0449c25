"""Level A of quantised keys and values: given the codes, the output is attention over their values in
float64, within the rule of the dtype of q. Of every row that reads codes in its walk, and of calls that
decode them before the kernel."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash.capability import Capability
from polyflash.mask import Mask
from polyflash.quant import NAMED, QuantizedTensor, Scheme, codec, dequantize, quantize
from polyflash.quant.codec import spread
from polyflash.reference import attention_reference
from polyflash.spec import Feature, Phase
from tests import device
from tests.chosen import in_turn
from tests.conformance.rows import ALL_OF, DTYPES, HERE, ints, qkv
from tests.integers import operands, scattered, with_coded_weights
from tests.tolerance import Expected, check, expect, masked_scores, same_bits

READERS = (*(row for row in HERE if Feature.CODES in row.features), None)
# What a row for few query rows that reads codes promises: one that loses a feature must fail here.
PROMISED = {
    *(Feature.CAUSAL, Feature.WINDOW, Feature.Q_OFFSET, Feature.KV_LENS, Feature.KV_STARTS, Feature.SOFTCAP),
    *(Feature.SINKS, Feature.GQA, Feature.LSE, Feature.PAGED, Feature.CODES, Feature.HEAD_DIM_V),
}
SCHEMES = {
    **NAMED,
    "int8-block": (Scheme(granularity="block", tokens=16, channels=32), Scheme(smoothing="mean")),
    "int8-head": (Scheme(granularity="head"), Scheme(granularity="channel")),
    "int8-affine": (Scheme(symmetric=False), Scheme(symmetric=False)),
    "int8-means": (Scheme(smoothing="block_mean"), Scheme(granularity="tensor", smoothing="mean")),
    "int4-mixed": (NAMED["int4"][0], replace(NAMED["int4"][1], tables="float32")),
    "int8-narrow": (Scheme(tables="bfloat16"), replace(NAMED["int8-channel"][0], tables="bfloat16")),
    "int8-k": (Scheme(), None),
    "int4-v": (None, Scheme(dtype="int4", symmetric=False)),
    "fp8-e5m2": (Scheme(dtype="fp8_e5m2"), Scheme(dtype="fp8_e5m2", granularity="head")),
    "rotated": (Scheme(dtype="int4", rotation="hadamard"), Scheme(rotation="hadamard")),
}
# K whose codes a row for many rows may multiply with those of q, and V.
PRODUCTS = {
    "token": (Scheme(compute="int8"), Scheme(compute="int8")),
    "mean": (Scheme(compute="int8", smoothing="mean"), None),
    "head": (Scheme(compute="int8", granularity="head"), Scheme(compute="int8", granularity="channel")),
    "blocks": (Scheme(compute="int8", granularity="block", tokens=48), Scheme(dtype="int4")),
}
EVERY: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (40, None)},
    "lens": {"kv_lens": ints(290, 33), "kv_starts": ints(3, 30)},
    "offset": {"causal": True, "q_offset": 200, "scale": -0.3},
    "cap": {"softcap": 4.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
}
SCORED: dict[str, dict[str, Any]] = {
    "mask": {"mask": torch.rand(2, 1, 70, 290, generator=torch.Generator().manual_seed(9)) < 0.6},
    "bias": {"bias": torch.randn(4, 70, 290, generator=torch.Generator().manual_seed(8))},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "causal": True},
    "segments": {
        "mask": Mask.segments(
            (torch.arange(70) // 9).expand(2, -1).int(), (torch.arange(290) // 90).expand(2, -1).int()
        )
    },
}
Coded = Tensor | QuantizedTensor


@pytest.fixture(params=READERS, ids=lambda row: "decoded" if row is None else row.name.replace("/", "-"))
def reader(request: pytest.FixtureRequest) -> Capability | None:
    return request.param


def coded(x: Tensor, scheme: Scheme | None, layout: Any = "bhsd") -> Coded:
    return x if scheme is None else quantize(x, scheme, layout=layout)


def run(reader: Capability | None, q: Tensor, k: Coded, v: Coded, **options: Any) -> Any:
    """The call on the row under test, which reads the codes itself; a refusal skips the test."""
    if reader is None:
        options["backend"] = "torch"
    else:
        options["backend"] = reader.backend
        plan = polyflash.explain(q, k, v, return_lse=True, **options)
        if plan.chosen is not reader or Feature.CODES not in plan.spec.features:
            words = [verdict.reasons for verdict in plan.verdicts if verdict.row is reader]
            pytest.skip(f"{reader.name}: {'; '.join(words[0]) if words else ''} {plan.notes[-1]}")
    function = polyflash.attention_varlen if "cu_seqlens_q" in options else polyflash.attention
    function = polyflash.attention_paged if "page_table" in options else function
    with torch.no_grad():
        return function(q, k, v, return_lse=True, **options)


def expected(reader: Capability | None, q: Tensor, k: Coded, v: Coded, **options: Any) -> Expected:
    """R over the values of the codes, T over those in q's dtype; in which R reads them too where they are
    decoded before the kernel. Rotated operands meet a rotated q of its dtype."""
    if _rotated(k):
        q = codec.rotate(q)
    kind = q.dtype if reader is None else torch.float64
    right = attention_reference(q.double(), values(k, kind).double(), values(v, kind).double(), **options)
    others = expect(q, values(k, q.dtype), values(v, q.dtype), **options).eager
    turned = codec.rotate if _rotated(v) else lambda x: x
    return Expected(turned(right.out), right.lse, tuple((turned(a), b) for a, b in others), q.dtype)


def _rotated(x: Coded) -> bool:
    return isinstance(x, QuantizedTensor) and x.scheme.rotation != "none"


def values(x: Coded, kind: torch.dtype) -> Tensor:
    return x.to(kind) if isinstance(x, Tensor) else x.values(kind)


def check_call(reader: Capability | None, q: Tensor, k: Coded, v: Coded, label: str, **options: Any) -> Any:
    found, want = run(reader, q, k, v, **options), expected(reader, q, k, v, **options)
    check(found.out, found.lse if reader is None else None, want, label=label, options=options)
    if reader is not None:  # q in 16 bits: T's error of a row may be small by chance, and counts as the worst
        right = want.lse.nan_to_num(neginf=0.0)
        theirs = max(float((lse.nan_to_num(neginf=0.0) - right).abs().max()) for _, lse in want.eager)
        error = float((found.lse.double().nan_to_num(neginf=0.0) - right).abs().max())
        assert torch.equal(found.lse == -torch.inf, want.lse == -torch.inf), label
        assert error <= 2 * theirs + 1e-5 * max(1.0, float(right.abs().max())), (
            f"{label}: lse off by {error:.3g}"
        )
    return found


@pytest.mark.parametrize("name, dtype", in_turn(SCHEMES, DTYPES, of=3), ids=str)
def test_scheme(reader: Capability | None, name: str, dtype: torch.dtype):
    for rows, heads, keys, dim in ((1, (4, 4), 300, 64), (1, (4, 1), 1030, 128), (2, (4, 2), 77, 128)):
        q, k, v = qkv(2, heads, rows, keys, dim, dtype=dtype, seed=rows + keys)
        k, v = (coded(x, s) for x, s in zip((k, v), SCHEMES[name], strict=True))
        check_call(reader, q, k, v, f"{name} {dtype} {heads} {keys}x{dim}", causal=True)


@pytest.mark.parametrize("features", EVERY)
@pytest.mark.parametrize("name", ["int8", "int8-channel", "int4", "int4-token", "fp8"])
def test_features(reader: Capability | None, name: str, features: str):
    for dtype, rows in ((torch.float32, 1), (torch.bfloat16, 2)):
        q, k, v = qkv(2, (4, 2), rows, 300, 64, 64, dtype=dtype, seed=rows)
        k, v = (coded(x, s) for x, s in zip((k, v), NAMED[name], strict=True))
        check_call(reader, q, k, v, f"{name} {features} {dtype}", **EVERY[features])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_any_number_of_keys(reader: Capability | None, name: str):
    for keys in (1, 2, 15, 17, 63, 64, 65, 127, 129, 255, 257, 1023, 1025, 3001):
        q, k, v = qkv(1, (4, 1), 1, keys, 64, dtype=torch.bfloat16, seed=keys)
        k, v = (coded(x, s) for x, s in zip((k, v), NAMED[name], strict=True))
        check_call(reader, q, k, v, f"{name} {keys} keys")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int8-channel", "int4", "int4-token", "fp8", "mxfp4"])
def test_more_blocks_than_cores(reader: Capability | None, name: str):
    """GPUs have another tile for fewer blocks of keys."""
    q, k, v = qkv(8, (16, 4), 1, 700, 64, dtype=torch.bfloat16, seed=4)
    k, v = (coded(x, s) for x, s in zip((k, v), NAMED[name], strict=True))
    check_call(reader, q, k, v, f"{name} of 8 requests", kv_lens=ints(700, 1, 64, 699, 300, 65, 128, 512))


@pytest.mark.parametrize(
    "dim, dim_v, name",
    in_turn([(40, 40), (80, 96), (96, 80), (48, 128), (192, 128)], ("int8", "int4-token"), of=2),
)
def test_any_head_dim(reader: Capability | None, dim: int, dim_v: int, name: str):
    """No lane of padding enters a range, and none a sum."""
    q, k, v = qkv(1, (4, 2), 1, 150, dim, dim_v, dtype=torch.bfloat16, seed=dim)
    k, v = (coded(x, s) for x, s in zip((k, v), NAMED[name], strict=True))
    check_call(reader, q, k, v, f"{name} {dim} {dim_v}")


@pytest.mark.parametrize("family", ["kbias", "sharp", "sparse", "kscale", "zero", "constant", "huge", "tiny"])
def test_families(reader: Capability | None, family: str):
    q, k, v = qkv(1, (4, 2), 1, 260, 64, dtype=torch.bfloat16, seed=3)
    k[..., ::11] += 10 if family == "kbias" else 0
    k[..., 3] *= 8 if family == "kscale" else 1
    q = q * (3 if family == "sharp" else 1)
    if family == "sparse":
        k[..., 7, :] *= 30
        v[..., 9, :] *= 30
    if family in ("zero", "constant", "huge", "tiny"):
        k, v = (
            torch.full_like(x, {"zero": 0, "constant": 3, "huge": 6e4, "tiny": 1e-30}[family]) for x in (k, v)
        )
    for name in ("int8", "int8-smooth", "int4", "fp8"):
        coded_k, coded_v = (coded(x, s) for x, s in zip((k, v), NAMED[name], strict=True))
        found = check_call(reader, q, coded_k, coded_v, f"{name} {family}")
        assert bool(found.out.isfinite().all())


def test_the_largest_of_q(reader: Capability | None):
    """Just below a power of two, where 16 bits end if a step is one."""
    for dtype, largest in itertools.product(("int8", "int4"), (2 - 2**-20, 2**-20 - 2)):
        q, k, v = qkv(1, (4, 2), 1, 300, 128, dtype=torch.float32, seed=5)
        q = q.clamp(-0.9, 0.9)
        q[..., 5] = largest
        k, v = (coded(x, Scheme(dtype=dtype)) for x in (k, v))  # scales per token
        check_call(reader, q, k, v, f"{dtype} {largest}")


@pytest.mark.parametrize("name", ["int8", "int4", "int4-token", "mxfp4"])
def test_tables_lie_anywhere(reader: Capability | None, name: str):
    """From an odd entry on, an odd number from row to row, among NaNs."""
    q, *both = qkv(2, (4, 2), 1, 200, 64, dtype=torch.bfloat16)
    k, v = (coded(x, s) for x, s in zip(both, NAMED[name], strict=True))

    want = run(reader, q, k, v, causal=True)
    for step in (1, 2):
        found = run(reader, q, scattered(k, step), scattered(v, step), causal=True)
        same_bits(found.out, want.out, f"{name} with steps of {step}")


@pytest.mark.parametrize("name", ["int8", "int4-token", "fp8"])
def test_hidden_codes_change_no_bit(reader: Capability | None, name: str):
    """P5: keys beyond a length hold any code, and scales and shifts that are NaN."""
    q, k, v = qkv(2, (4, 2), 1, 200, 64, dtype=torch.bfloat16)
    lens = ints(130, 77)
    pair = [replace(s, granularity="token", tokens=None) for s in NAMED[name]]
    k, v = (quantize(x, s) for x, s in zip((k, v), pair, strict=True))
    want = run(reader, q, k, v, kv_lens=lens)
    for b, n in enumerate(lens.tolist()):
        for x in (k, v):
            x.codes.view(torch.uint8)[b, :, n:] = 0xFF
            for table in (x.scale, x.shift):
                if table is not None and table.shape[2] > 1:
                    table[b, :, n:] = torch.nan
    found = run(reader, q, k, v, kv_lens=lens)
    same_bits(found.out, want.out)
    same_bits(found.lse, want.lse)


@pytest.mark.parametrize("name", ["int8", "int8-channel", "int4", "fp8"])
def test_pages(reader: Capability | None, name: str):
    """A page table changes where codes are read from and nothing else."""
    q, k, v = qkv(2, (4, 2), 1, 256, 64, dtype=torch.bfloat16)
    lens, order = ints(250, 70), torch.randperm(8, generator=torch.Generator().manual_seed(0))
    dense = [coded(x, s) for x, s in zip((k, v), NAMED[name], strict=True)]
    table = order.view(2, 4).int()
    pools = []
    for x, scheme in zip((k, v), NAMED[name], strict=True):
        pool = torch.empty(8, 64, 2, 64, dtype=x.dtype)
        pool[order] = x.unflatten(2, (4, 64)).transpose(1, 2).flatten(0, 1).transpose(1, 2)
        pools.append(quantize(pool, scheme, layout="bshd"))
    found = run(reader, q[:, :, 0], *pools, page_table=table, kv_lens=lens)
    want = expected(reader, q, *dense, kv_lens=lens)
    check(found.out[:, :, None], found.lse.transpose(0, 1)[..., None].contiguous(), want, label=name)


@pytest.mark.parametrize("name", ["int8", "int8-channel", "int4", "fp8"])
def test_many_rows(reader: Capability | None, name: str):
    for dtype, options in ((torch.float32, {"causal": True}), (torch.bfloat16, EVERY["lens"])):
        q, k, v = qkv(2, (4, 2), 70, 290, 64, 50, dtype=dtype, seed=5)
        k, v = (coded(x, s) for x, s in zip((k, v), NAMED[name], strict=True))
        check_call(reader, q, k, v, f"{name} {dtype}", **options)


def of_products(q: Tensor, k: QuantizedTensor, v: Coded, **options: Any) -> Expected:
    """R where q is codes too, and T as far from it as from attention over the values."""
    plain = expect(q, values(k, q.dtype), values(v, q.dtype), **options)
    options = {"scale": q.shape[3] ** -0.5, **options}
    right = attention_reference(*operands(q, k), values(v, q.dtype).double(), **options)
    eager = tuple((right.out + a - plain.out, right.lse + b - plain.lse) for a, b in plain.eager)
    return Expected(right.out, right.lse, eager, q.dtype)


def run_products(reader: Capability | None, q: Tensor, k: Coded, v: Coded, **options: Any) -> Any:
    if reader is None or reader.phase is not Phase.FORWARD or reader.backend != "triton":
        pytest.skip(
            "multiplies floats, or weights as integers too: tests/backends/cpu/test_integer_kernel.py"
        )
    return run(reader, q, k, v, **options)


@pytest.mark.parametrize("features", [*EVERY, *SCORED])
@pytest.mark.parametrize("name", PRODUCTS)
def test_integer_products(reader: Capability | None, name: str, features: str):
    """Of codes of q, a scale per row, and those of K; V is decoded."""
    options = {**EVERY, **SCORED}[features]
    dtype, dim = (torch.float32, 40) if name in ("token", "head") else (torch.bfloat16, 64)
    q, k, v = qkv(2, (4, 2), 70, 290, dim, 50, dtype=dtype, seed=dim)
    k[..., ::11] += 3
    k, v = (coded(x, s) for x, s in zip((k, v), PRODUCTS[name], strict=True))
    found = run_products(reader, q, k, v, **options)
    check(found.out, found.lse, of_products(q, k, v, **options), label=f"{name} {features}")


EIGHTS = Scheme(dtype="fp8_e4m3", granularity="head", compute="fp8")


@pytest.mark.parametrize("features", [*EVERY, *SCORED])
def test_products_of_8_bits(reader: Capability | None, features: str):
    """Where q and the weights are codes too: against the scheme that rounds them where the kernel does. What
    is left is rounding of the result, of sums in tensor cores, and of weights on which the two differ."""
    if reader is None or reader.phase is not Phase.FORWARD or reader.backend not in ("triton", "gluon"):
        pytest.skip("multiplies floats, or integers")
    options = {**EVERY, **SCORED}[features]
    exact = device.DEVICE.type == "cpu"  # in the interpreter
    dim = 32 if exact else 128
    q, k, v = qkv(2, (4, 2), 70, 290, dim, dtype=torch.bfloat16, seed=4)
    k[..., ::11] += 3
    k, v = (quantize(x, EIGHTS) for x in (k, v))
    k.scale[:, 0] *= -1
    if features == "offset":
        v.codes.view(torch.uint8)[:, :, 230, 7] = 0x7F  # NaN, for the rows that see it
    given = {"backend": reader.backend, **options}
    config = polyflash.explain(q, k, v, **given).config
    if hasattr(config, "split_keys"):  # a split begins anew
        given["config"] = replace(config, split_keys=0)
    found = run(reader, q, k, v, **given)
    scores = masked_scores(*operands(q, k), "", {"scale": dim**-0.5, **options})
    rising, slack = reader.backend == "triton", 2.0 * (reader.backend == "gluon" and config.lazy_rescale)
    how = {"block": config.block_n, "rising": rising, "slack": slack, "sinks": options.get("sinks")}
    out, lse = with_coded_weights(scores, v, **how)
    assert torch.equal(found.lse.isinf(), lse.isinf()) and torch.equal(found.out.isnan(), out.isnan())
    off = (found.out.double() - out).nan_to_num().norm() / out.nan_to_num().norm()
    assert off < (5e-3 if exact else 1e-2), f"{features}: {off}"
    most = float((found.lse - lse).nan_to_num().abs().max())
    assert most < (2e-5 if exact else 6e-2), f"{features}: lse off by {most}"


@pytest.mark.parametrize("name", PRODUCTS)
def test_integer_products_of_packed_members(reader: Capability | None, name: str):
    bounds = {"cu_seqlens_q": ints(0, 20, 20, 75), "cu_seqlens_k": ints(0, 90, 97, 290), "causal": True}
    q, k, v = qkv(1, (4, 2), 75, 290, 64, seed=6)
    pair = [coded(x[0].transpose(0, 1), s, "thd") for x, s in zip((k, v), PRODUCTS[name], strict=True)]
    found = run_products(reader, q[0].transpose(0, 1), *pair, **bounds)
    q, k = (x[0].transpose(0, 1).float() for x in operands(q, pair[0]))
    v = pair[1] if isinstance(pair[1], Tensor) else dequantize(pair[1])
    check(found.out, found.lse, expect(q, k, v, scale=0.125, **bounds), label=name)


@pytest.mark.parametrize("name", ["token", "head", "blocks"])
def test_integer_products_over_pages(reader: Capability | None, name: str):
    """Scales per page where they are of a head."""
    q, k, v = qkv(2, (4, 2), 40, 256, 64, dtype=torch.bfloat16)
    order, lens = torch.randperm(8, generator=torch.Generator().manual_seed(0)), ints(250, 70)
    pools = []
    for x, scheme in zip((k, v), PRODUCTS[name], strict=True):
        pool = torch.empty(8, 64, 2, 64, dtype=x.dtype)
        pool[order] = x.unflatten(2, (4, 64)).transpose(1, 2).flatten(0, 1).transpose(1, 2)
        pools.append(coded(pool, scheme, "bshd"))
    table = order.view(2, 4).int()
    paged = {"page_table": table, "cu_seqlens_q": ints(0, 40, 80), "kv_lens": lens, "causal": True}
    packed = q.transpose(1, 2).flatten(0, 1)
    found = run_products(reader, packed, *pools, **paged)
    k, v = pools
    scale = spread(k.scale, k.form.scale, k.codes.shape).expand(-1, -1, 64, -1)
    codes, scale = (x[table.long()].transpose(1, 2).flatten(2, 3) for x in (k.codes, scale))
    dense = QuantizedTensor(codes, scale, None, Scheme(compute="int8"), k.dtype)
    values_v = v.values(q.dtype)[table.long()].transpose(1, 2).flatten(2, 3)
    want = of_products(q, dense, values_v, kv_lens=lens, causal=True)
    out = found.out.unflatten(0, (2, 40)).transpose(1, 2)
    check(out, found.lse.unflatten(1, (2, 40)).transpose(0, 1).contiguous(), want, label=name)


@pytest.mark.parametrize("name", ["int8", "int8-channel", "int4"])
def test_packed_members(reader: Capability | None, name: str):
    """Groups of tokens count from the first token of all, wherever a member begins."""
    bounds = {"cu_seqlens_q": ints(0, 20, 20, 75), "cu_seqlens_k": ints(0, 90, 97, 290)}
    q, k, v = (x[0].transpose(0, 1) for x in qkv(1, (4, 2), 75, 290, 64, seed=6))
    pair = [quantize(x, s, layout="thd") for x, s in zip((k, v), NAMED[name], strict=True)]
    found = run(reader, q, *pair, causal=True, **bounds)
    of = expect(q, *(dequantize(x) for x in pair), causal=True, **bounds)
    check(found.out, found.lse, of, label=name)


@pytest.mark.parametrize("name", ["int8-smooth", "int4", "rotated"])
def test_gradients_go_straight_through(backend: str, name: str):
    """They are those of attention over the values, and reach the tensor that was quantised."""
    q, k, v = (x.requires_grad_() for x in qkv(1, (4, 2), 40, 70, 64, seed=7))
    pair = [quantize(x, s) for x, s in zip((k, v), SCHEMES[name], strict=True)]
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    polyflash.attention(q, *pair, causal=True, backend=backend).backward(dout)
    exact = [x.detach().double().requires_grad_() for x in (q, *(dequantize(x) for x in pair))]
    attention_reference(*exact, causal=True).out.backward(dout.double())
    for x, y in zip((q, k, v), exact, strict=True):
        assert float((x.grad.double() - y.grad).norm() / y.grad.norm()) < 1e-5


def test_a_row_has_what_it_promises():
    for row in READERS[:-1]:
        assert row is not None
        meant = PROMISED & ALL_OF.get((row.backend, row.phase), frozenset(Feature))
        assert row.features >= meant or row.phase is not Phase.DECODE, row.name


@pytest.mark.parametrize("mutant", ["scales", "shift", "nibbles", "group"])
def test_level_a_is_not_vacuous(mutant: str):
    """The rule fails if scales are their mean, a shift is lost, halves of a byte are exchanged, or scales are
    those of the neighbouring group."""
    q, k, v = qkv(1, (4, 2), 1, 256, 64, dtype=torch.bfloat16)
    k = quantize(k, NAMED["int4"][0])
    v = quantize(v, NAMED["int4"][1])
    want = expected(None, q, k, v)
    wrong = {
        "scales": lambda: replace(k, scale=k.scale.mean().expand_as(k.scale)),
        "shift": lambda: replace(k, shift=torch.zeros_like(k.shift)),
        "nibbles": lambda: replace(k, codes=(k.codes >> 4) | (k.codes << 4)),
        "group": lambda: replace(k, scale=k.scale.roll(1, 2), shift=k.shift.roll(1, 2)),
    }[mutant]()
    found = run(None, q, wrong, v)
    with pytest.raises(AssertionError):
        check(found.out, None, want)
