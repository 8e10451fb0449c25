"""column_sums and row_stats on every row of the table that has them, against the float64 oracle."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import polyflash
from polyflash import Mask, SpecError, UnsupportedError, attention, attention_varlen, column_sums, row_stats
from polyflash.backends import TABLE
from polyflash.reference import attention_reference
from polyflash.spec import Phase
from tests.conformance.rows import qkv
from tests.integrations.mask_memory import forget_peak, peak, resident
from tests.references import statistics_reference
from tests.rows_here import HERE

ROWS = [row.backend for row in TABLE if row.phase is Phase.STATISTICS and row.backend in HERE]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = {"rows": 77, "keys": 150}
# Rows of the widest panel of a CPU; by `make test-all` those of the narrower ones too, kernels of their own.
PANELS = pytest.mark.parametrize("rows", (70, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, 8))))


@pytest.fixture(params=ROWS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ids(n: int, each: int) -> Tensor:
    return (torch.arange(n) // each).int().expand(2, -1)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (20, 5), "q_offset": 40},
    "per request": {"causal": True, "q_offset": ints(-3, 90)},
    "lens": {"kv_lens": ints(77, 150), "kv_starts": ints(3, 64), "causal": True},
    "mask": {"mask": noise(2, 1, 77, 150) > 0.5},
    "masked rows": {"mask": (noise(77, 1) > 0) & (noise(1, 150) > 0)},
    "lists": {"mask": Mask.blocks(noise(5, 3) > -0.5, rows=16, keys=64)},
    "segments": {"mask": Mask.segments(ids(77, 20), ids(150, 33))},
    "bias": {"bias": noise(6, 77, 150) * 3},
    "half bias": {"bias": torch.where(noise(150) > 1, -math.inf, noise(150)).half(), "softcap": 2.0},
    "alibi": {"alibi_slopes": noise(2, 6).abs(), "causal": True},
    "negative scale": {"scale": -0.3},
    "no scale": {"scale": 0.0},
    "large scale": {"scale": 4.0},
    "bshd": {"layout": "bshd", "causal": True},
}


def lse_of(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """The exact lse, rounded to float32 (float64 for float64 q)."""
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    return attention_reference(q, k, k, **options).lse.to(kind)


def close(got: Tensor, want: Tensor, scale: float = 1.0, kind: torch.dtype = torch.float32) -> None:
    """Equal within a few units of `kind` at `scale`; NaN and infinities in the same places."""
    bound = scale * {torch.float32: 4e-6, torch.float64: 1e-13}[kind]
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, atol=bound, rtol=bound, equal_nan=True)


def hold(backend: str, q: Tensor, k: Tensor, options: dict[str, Any]) -> None:
    """Both functions against the oracle. Errors of lse and scores grow with their size."""
    sinks = options.get("sinks")
    lse = lse_of(q, k, options)
    rest = {name: x for name, x in options.items() if name != "sinks"}
    sums = column_sums(q, k, lse, backend=backend, **rest)
    stats = row_stats(q, k, lse, backend=backend, sinks=sinks, **rest)
    want = statistics_reference(q, k, **options)
    finite = want[2][want[2].isfinite()]
    size = 1.0 + (float(finite.abs().max()) if finite.numel() else 0.0)
    kind = lse.dtype
    assert sums.dtype is stats.entropy.dtype is stats.max_logit.dtype is kind
    close(sums, want[0], size, kind)
    close(stats.entropy, want[1], size, kind)
    close(stats.max_logit, want[2], size, kind)
    unseen = want[0] == 0.0
    assert (sums[unseen] == 0.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_statistics(backend: str, name: str, dtype: torch.dtype):
    q, k, _ = qkv(2, (6, 2), 77, 150, 40, dtype=dtype)
    options = CASES[name]
    if options.get("layout") == "bshd":
        q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
    hold(backend, q, k, options)


@pytest.mark.parametrize(
    "rows, keys, dim", [(1, 1, 1), (1, 300, 64), (5, 17, 3), (600, 33, 8), (33, 1100, 64)]
)
def test_shapes(backend: str, rows: int, keys: int, dim: int):
    q, k, _ = qkv(1, (4, 4), rows, keys, dim)
    hold(backend, q, k, {"causal": True})
    hold(backend, q, k, {})


@pytest.mark.parametrize("rows", (3, 530, 9000))
def test_sums_of_many_rows(backend: str, rows: int):
    """Row blocks and the copies of sums they add to."""
    q, k, _ = qkv(1, (2, 1), rows, 40, 8)
    hold(backend, q, k, {"q_offset": 0, "window": (None, 20)})


def test_sinks_are_one_outcome_more(backend: str):
    q, k, _ = qkv(2, (6, 2), 20, 30, 16)
    hold(backend, q, k, {"sinks": noise(6) * 2, "causal": True, "q_offset": -5})


def test_float64_stays_float64():
    q, k, _ = qkv(2, (4, 2), 30, 50, 16, dtype=torch.float64)
    hold("torch", q, k, {"causal": True})


def test_identities(backend: str):
    """Sums over keys are the rows that see some; entropy of equal weights is the logarithm of their number,
    of one weight 0."""
    q, k, v = qkv(2, (4, 2), 50, 90, 16)
    for options in ({"causal": True}, {"causal": True, "q_offset": -20}, {"mask": noise(50, 90) > 2.4}):
        lse = attention(q, k, v, return_lse=True, backend=backend, **options).lse
        sums = column_sums(q, k, lse, backend=backend, **options)
        alive = torch.isfinite(lse).sum(-1).double()
        torch.testing.assert_close(sums.double().sum(-1), alive, atol=1e-4, rtol=1e-5)
        mean = attention(q, k, torch.ones_like(v), backend=backend, **options)[..., 0].sum(-1)
        torch.testing.assert_close(mean.double(), alive, atol=1e-4, rtol=1e-5)
    lse = attention(q * 0, k, v, return_lse=True, causal=True, backend=backend).lse
    got = row_stats(q * 0, k, lse, causal=True, backend=backend)
    want = torch.log(torch.arange(41, 91.0)).expand(2, 4, 50)
    torch.testing.assert_close(got.entropy, want, atol=4e-6, rtol=0)
    assert (got.max_logit == 0).all()
    lse = attention(q, k, v, return_lse=True, window=(0, 0), backend=backend).lse
    assert (row_stats(q, k, lse, window=(0, 0), backend=backend).entropy <= 2e-6).all()


def test_empty_rows_and_keys(backend: str):
    q, k, v = qkv(1, 2, 6, 9, 8)
    mask = torch.zeros(6, 9, dtype=torch.bool)
    mask[2, 4] = True
    lse = attention(q, k, v, mask=mask, return_lse=True, backend=backend).lse
    sums = column_sums(q, k, lse, mask=mask, backend=backend)
    want = torch.zeros(1, 2, 9)
    want[..., 4] = 1.0
    torch.testing.assert_close(sums, want, atol=1e-6, rtol=0)
    assert (sums[want == 0] == 0).all()
    stats = row_stats(q, k, lse, mask=mask, backend=backend)
    empty = torch.arange(6) != 2
    assert (stats.entropy[..., empty] == 0).all() and torch.isneginf(stats.max_logit[..., empty]).all()
    assert torch.isfinite(stats.max_logit[..., 2]).all()


def test_masked_is_absent_and_visible_is_seen(backend: str):
    """Bits at positions nobody sees change no bit; NaN that a row sees reaches that row and its keys only."""
    q, k, v = qkv(1, 2, 40, 60, 16)
    options = {"causal": True, "kv_lens": ints(50), "backend": backend}
    lse = attention(q, k, v, return_lse=True, **options).lse
    sums, stats = column_sums(q, k, lse, **options), row_stats(q, k, lse, **options)
    bad = k.clone()
    bad[:, :, 50:] = math.nan
    for got, want in (
        (column_sums(q, bad, lse, **options), sums),
        *zip(row_stats(q, bad, lse, **options), stats, strict=True),
    ):
        assert torch.equal(got, want)
    bad = k.clone()
    bad[0, 0, 30] = math.nan  # rows see keys up to i + 10
    lse = attention(q, bad, v, return_lse=True, **options).lse
    got = row_stats(q, bad, lse, **options)
    hit = torch.zeros(1, 2, 40, dtype=torch.bool)
    hit[0, 0, 20:] = True
    assert torch.equal(got.entropy.isnan(), hit) and torch.equal(got.max_logit.isnan(), hit)
    assert torch.equal(got.entropy[~hit], stats.entropy[~hit])
    got = column_sums(q, bad, lse, **options)
    assert got[0, 0, :50].isnan().all() and (got[0, :, 50:] == 0).all() and torch.equal(got[0, 1], sums[0, 1])


def test_infinite_scores_are_the_maximum(backend: str):
    q, k, v = qkv(1, 1, 4, 20, 8)
    bias = torch.zeros(4, 20)
    bias[1, 7] = math.inf
    lse = attention(q, k, v, bias=bias, return_lse=True, backend=backend).lse
    got = row_stats(q, k, lse, bias=bias, backend=backend)
    assert got.max_logit[0, 0, 1] == math.inf and torch.isfinite(got.max_logit[0, 0, [0, 2, 3]]).all()
    assert got.entropy[0, 0, 1].isnan() and torch.isfinite(got.entropy[0, 0, [0, 2, 3]]).all()


@PANELS
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_row_of_the_least_bias_has_numbers(backend: str, dtype: torch.dtype, rows: int):
    """Its scores are equal: every key weighs exp(S - lse) = 1, with no surprise. Other rows never notice."""
    least, (q, k, v) = torch.finfo(torch.float32).min, qkv(1, 2, rows, 24, 16, dtype=dtype)
    bias = torch.zeros(rows, 24)
    bias[4:7] = least
    lse = attention(q, k, v, bias=bias, return_lse=True, backend=backend).lse
    assert (lse[..., 4:7] == least).all()
    sums = column_sums(q, k, lse, bias=bias, backend=backend)
    got = row_stats(q, k, lse, bias=bias, backend=backend)
    rest = [*range(4), *range(7, rows)]
    want = statistics_reference(q[:, :, rest], k)
    close(sums, want[0] + 3.0, 8.0)
    assert (got.entropy[..., 4:7] == 0).all() and (got.max_logit[..., 4:7] == least).all()
    close(got.entropy[..., rest], want[1], 8.0)
    close(got.max_logit[..., rest], want[2], 8.0)


@pytest.mark.parametrize("causal", (False, True))
def test_packed_members(backend: str, causal: bool):
    rows, keys = [0, 9, 9, 80, 81], [0, 20, 25, 140, 141]
    bounds = {"cu_seqlens_q": ints(*rows), "cu_seqlens_k": ints(*keys)}
    q, k = noise(90, 4, 16), noise(150, 2, 16, seed=4)
    options: dict[str, Any] = {"causal": causal, "kv_lens": ints(15, 5, 115, 0), "alibi_slopes": noise(4, 4)}
    lse = attention_varlen(q, k, k, *bounds.values(), return_lse=True, backend=backend, **options).lse
    sums = column_sums(q, k, lse, backend=backend, **bounds, **options)
    stats = row_stats(q, k, lse, backend=backend, **bounds, **options)
    assert sums.shape == (4, 150) and stats.entropy.shape == stats.max_logit.shape == (4, 90)
    assert (sums[:, 141:] == 0).all() and (stats.entropy[:, 81:] == 0).all()
    assert torch.isneginf(stats.max_logit[:, 81:]).all() and (sums[:, 20:25] == 0).all()
    for b in range(4):
        at, of = slice(rows[b], rows[b + 1]), slice(keys[b], keys[b + 1])
        if at.start == at.stop:
            continue
        one_q, one_k = q[None, at], k[None, of]
        own = {"causal": causal, "kv_lens": options["kv_lens"][b : b + 1]}
        own["alibi_slopes"] = options["alibi_slopes"][b]
        want = statistics_reference(one_q, one_k, layout="bshd", **own)
        close(sums[:, of], want[0][0], 20.0)
        close(stats.entropy[:, at], want[1][0], 20.0)
        close(stats.max_logit[:, at], want[2][0], 20.0)


def test_parts_of_the_keys_add_up(backend: str):
    """With the lse of the whole, sums and entropy of two key sets are those of their union."""
    q, k, v = qkv(1, 2, 30, 80, 16)
    lse = attention(q, k, v, return_lse=True, backend=backend).lse
    whole, parts = column_sums(q, k, lse, backend=backend), (k[:, :, :33], k[:, :, 33:])
    split = torch.cat([column_sums(q, x, lse, backend=backend) for x in parts], -1)
    torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-5)
    entropy = sum(row_stats(q, x, lse, backend=backend).entropy for x in parts)
    torch.testing.assert_close(entropy, row_stats(q, k, lse, backend=backend).entropy, atol=1e-5, rtol=1e-5)


def test_strides_and_zero_sizes(backend: str):
    q, k, v = qkv(2, 3, 40, 50, 16)
    lse = attention(q, k, v, return_lse=True).lse
    want = column_sums(q, k, lse, backend=backend), *row_stats(q, k, lse, backend=backend)
    odd_q, odd_k = (x.mT.contiguous().mT for x in (q, k))
    odd_lse = torch.stack((lse, lse), -1)[..., 0]
    got = (
        column_sums(odd_q, odd_k, odd_lse, backend=backend),
        *row_stats(odd_q, odd_k, odd_lse, backend=backend),
    )
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    none = column_sums(q[:, :, :0], k, lse[..., :0], backend=backend)
    assert none.shape == (2, 3, 50) and (none == 0).all()
    empty = lse.new_full((2, 3, 40), -math.inf)
    assert column_sums(q, k[:, :, :0], empty, backend=backend).shape == (2, 3, 0)
    stats = row_stats(q, k[:, :, :0], empty, backend=backend)
    assert (stats.entropy == 0).all() and torch.isneginf(stats.max_logit).all()
    assert row_stats(q[:0], k[:0], lse[:0], backend=backend).entropy.shape == (0, 3, 40)


def test_bits_repeat_whatever_the_threads(backend: str):
    q, k, v = qkv(1, (4, 2), 700, 520, 32)
    lse = attention(q, k, v, return_lse=True, causal=True).lse

    def all_bits() -> tuple[Tensor, ...]:
        options = {"causal": True, "backend": backend}
        return column_sums(q, k, lse, **options), *row_stats(q, k, lse, **options)

    first, threads = all_bits(), torch.get_num_threads()
    try:
        for n in (1, 2, 3) if backend == "cpu" else (threads,):
            torch.set_num_threads(n)
            for a, b in zip(all_bits(), first, strict=True):
                assert torch.equal(a, b), n
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_linear(backend: str):
    """Far less than the scores of one head, 256 MB."""
    q, k, _ = qkv(1, 1, 8192, 8192, 16)
    lse = torch.zeros(1, 1, 8192)
    for function in (column_sums, row_stats):
        function(q[:, :, :600], k[:, :, :600], lse[..., :600], backend=backend)
        forget_peak()
        before = resident()
        function(q, k, lse, backend=backend)
        assert peak() - before < 2**26


@PANELS
def test_no_gradient_flows(backend: str, rows: int):
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, rows, 9, 8))
    lse = attention(q, k, v, return_lse=True).lse
    slopes = torch.ones(2, requires_grad=True)
    sums = column_sums(q, k, lse, alibi_slopes=slopes, backend=backend)
    assert not sums.requires_grad and not row_stats(q, k, lse, backend=backend).entropy.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        cast = attention(q, k, v, return_lse=True).lse
        sums = column_sums(q, k, cast, backend=backend)
    assert sums.dtype is torch.float32
    close(sums, column_sums(q.bfloat16(), k.bfloat16(), cast, backend=backend).double(), 0.0)


def test_compiled_without_a_break(backend: str):
    q, k, v = qkv(1, 2, 20, 30, 8)
    lse = attention(q, k, v, return_lse=True).lse

    def both(q: Tensor, k: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return column_sums(q, k, lse, causal=True, backend=backend), *row_stats(
            q, k, lse, causal=True, backend=backend
        )

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, lse), both(q, k, lse), strict=True):
        assert torch.equal(a, b)


def test_ops_hold_what_their_schemas_say():
    q, k, v = qkv(1, 2, 5, 7, 4)
    lse = attention(q, k, v, return_lse=True).lse
    for name in ("column_sums", "row_stats"):
        torch.library.opcheck(getattr(torch.ops.polyflash, name).default, (q, k, lse))


Q, K = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 6, 8)
LSE = torch.zeros(1, 2, 4)


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        ((Q, K, None), {}, "lse: got NoneType, wanted a torch.Tensor"),
        ((Q, K, LSE[0]), {}, r"wanted \(1, 2, 4\) torch.float32"),
        ((Q, K, LSE.double()), {}, "got .* torch.float64"),
        ((Q, K, LSE.to_sparse()), {}, "lse layout: got torch.sparse_coo"),
        ((Q, K[..., :4], LSE), {}, "k head_dim: got 4"),
        ((Q, None, LSE), {}, "k: got NoneType"),
        ((Q, K, LSE), {"kv_lens": ints(7)}, "kv_lens: got 7 for request 0"),
        ((Q, K, LSE), {"layout": "sbhd"}, "layout: got 'sbhd'"),
        ((Q, K, LSE), {"mask": torch.ones(3, 6, dtype=torch.bool)}, "mask shape"),
        (
            (Q[0], K[0], LSE),
            {"cu_seqlens_q": ints(0, 2), "cu_seqlens_k": ints(0, 2)},
            "lse: got 3 dimensions",
        ),
        ((Q, K, LSE), {"cu_seqlens_q": ints(0, 2), "layout": "bshd"}, "layout: got 'bshd'"),
    ],
)
def test_refusals_teach(arguments: tuple[Any, ...], options: dict[str, Any], words: str):
    for function in (column_sums, row_stats):
        with pytest.raises(SpecError, match=words):
            function(*arguments, **options)


def test_refusals_of_rows():
    with pytest.raises(UnsupportedError, match="no statistics kernel of backend 'cpu'"):
        column_sums(Q.double(), K.double(), LSE.double(), backend="cpu")
    with pytest.raises(UnsupportedError, match="features: has no dropout"):
        torch.ops.polyflash.column_sums(Q, K, LSE, dropout_p=0.5, dropout_seed=torch.tensor(1))
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.vmap(column_sums)(Q[None], K[None], LSE[None])
    with polyflash.use_backend("cpu"), pytest.raises(UnsupportedError, match="statistics"):
        row_stats(Q.double(), K.double(), LSE.double())
