"""Published defects of decoding and of paged keys, each by its id, on every row; and a thousand steps."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import polyflash
from polyflash import torch_ops
from polyflash.spec import Feature
from polyflash.workloads import make
from tests.catalogue import named, with_dtype
from tests.conformance.pages import live_pages, padded, repaged
from tests.conformance.rows import DTYPES, USUAL, Runner, ints, qkv
from tests.conformance.test_bugs_shapes import reserved
from tests.memory import check_guarded
from tests.tolerance import near, same_bits


def tokens(dtype: torch.dtype = torch.float32, name: str = "paged-16", **changes: Any) -> Any:
    workload = with_dtype(named(name), str(dtype).removeprefix("torch."))
    return make(replace(workload, **changes))


def test_B_msk_11_mean_of_exactly_the_live_values(step: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/3717: non-causal paged decode, q = 0, the tail of a page."""
    lens = (1, 15, 16, 17, 100, 127, 129, 300)
    for dtype in DTYPES:
        q, k, v, options = tokens(dtype, batch=8, kv_lens=lens)
        got = step(torch.zeros_like(q), k, v, **options)
        for b, (pages, n) in enumerate(live_pages(options, 16)):
            mean = v[pages].flatten(0, 1)[:n].double().mean(0).repeat_interleave(2, 0)
            near(got.out[b], mean, 4 * torch.finfo(dtype).eps, f"{n} keys")
            assert abs(float(got.lse[0, b]) - math.log(n)) <= 1e-6 * max(1.0, math.log(n))


def test_B_msk_20_later_maximum_is_smaller(step: Runner):
    """github.com/tile-ai/tilelang/pull/1148: scores falling, and rising, from split to split."""
    for dtype in DTYPES:
        q, k, v = qkv(1, (4, 2), 1, 1500, 32, dtype=dtype)
        q[..., 0], k[..., 0] = 4, torch.linspace(40, -40, 1500).to(dtype)
        step.checked(q, k, v, label="falling")
        step.checked(q, k.flip(2), v.flip(2), label="rising")


@pytest.mark.parametrize("first", (1024, 1999, 2000))
def test_B_msk_21_first_keys_hide_whole_splits(step: Runner, first: int):
    """xformers CHANGELOG 0.0.28: a split without a key that is seen."""
    q, k, v = qkv(2, (4, 2), 1, 2000, 16)
    got = step.checked(q, k, v, kv_starts=ints(first, 0))
    assert bool((got.out[0] == 0).all()) is (first == 2000)
    step.checked(q, k, v, causal=True, window=(70, None), kv_lens=ints(2000, 1100))
    step.checked(q, k, v, causal=True, q_offset=ints(3, 1024))


def test_B_gqa_02_values_that_name_their_head(step: Runner):
    """github.com/LMCache/LMCache/pull/3092: one row, any group; also over pages."""
    for heads, kv_heads in ((12, 2), (6, 1), (7, 7), (8, 2), (10, 2)):
        q, k, _ = qkv(1, (heads, kv_heads), 1, 700, 16)
        v = torch.arange(kv_heads).float().view(1, -1, 1, 1).expand(1, kv_heads, 700, 16)
        want = (torch.arange(heads) // (heads // kv_heads)).float().view(1, -1, 1, 1).expand(1, heads, 1, 16)
        near(step(q, k, v).out, want, 1e-6, f"{heads}/{kv_heads}")
    q, k, v, options = tokens(heads=8, kv_heads=2, kv_lens=(300, 20, 1, 193))
    v = v * 0 + torch.arange(2.0).view(1, 1, 2, 1)
    want = (torch.arange(8) // 4).float().view(1, 8, 1).expand_as(q)
    near(step(q, k, v, **options).out, want, 1e-6)


def test_B_spl_05_B_spl_09_lse_per_head_and_request(step: Runner):
    """github.com/vllm-project/flash-attention/pull/87, github.com/fla-org/flash-linear-attention/pull/1031:
    grouped heads × splits × requests, each lse in its place."""
    for dtype in DTYPES:
        q, k, v, options = tokens(dtype, heads=8, batch=3, seqlen_k=2300, kv_lens=(2300, 3, 1100))
        got = step.checked(q, k, v, **options)
        for h in (0, 3, 4, 7):
            own = {"q": q[:, h : h + 1], "k": k[:, :, h // 4 : h // 4 + 1], "v": v[:, :, h // 4 : h // 4 + 1]}
            one = step(*own.values(), **options)
            torch.testing.assert_close(one.lse[0], got.lse[h], rtol=1e-6, atol=1e-6)
            near(one.out[:, 0], got.out[:, h], 2 * torch.finfo(dtype).eps)


def test_B_spl_12_B_big_03_pages_beyond_31_bits(step: Runner):
    """github.com/vllm-project/vllm/pull/47671: page id × page stride above 2³¹ elements, and bytes."""
    q, k, v, options = tokens(torch.bfloat16, batch=2, kv_lens=(40, 17))
    want = step(q, k, v, **options)
    stride = 2**31 // (len(k) - 1) + 4099
    for dim in (0, 2):
        strides = [*k.stride()]
        strides[dim] = stride if dim == 0 else 2**31 + 5
        span = sum((n - 1) * s for n, s in zip(k.shape, strides, strict=True)) + 1
        far = [reserved(span, x.dtype).as_strided(x.shape, strides).copy_(x) for x in (k, v)]
        got = step(q, *far, **options)
        same_bits(got.out, want.out, f"dimension {dim}")


def test_B_pag_02_the_table_between_guards(step: Runner):
    """github.com/vllm-project/flash-attention/issues/42: nothing beyond the last column is fetched."""
    for columns in (19, 20):
        q, k, v, options = tokens(kv_lens=(300, 304, 1, 193), seqlen_k=304)
        check_guarded(step, q, k, v, {**options, "page_table": options["page_table"][:, :columns]})


def test_B_pag_05_tables_of_another_batch(step: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/2801: as many rows of the table as requests, or an error."""
    q, k, v, options = tokens()
    table, lens = options["page_table"], options["kv_lens"]
    for wrong in (
        {"page_table": table[:3], "kv_lens": lens[:3]},
        {"page_table": table[:3], "kv_lens": lens},
        {"page_table": table, "kv_lens": lens[:3]},
        {"page_table": table, "kv_lens": lens, "kv_starts": ints(0, 0)},
        {"page_table": table, "kv_lens": lens, "cu_seqlens_q": ints(0, 2, 4)},
    ):
        with pytest.raises(polyflash.SpecError):
            polyflash.attention_paged(q, k, v, **wrong, backend=step.row.backend)


def test_B_pag_06_pools_of_another_dtype(step: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/532."""
    q, k, v, options = tokens()
    step(q, k, v, **options)
    for a, b, c in ((q.bfloat16(), k, v), (q, k.half(), v), (q, k, v.double()), (q, k.half(), v.half())):
        with pytest.raises(polyflash.SpecError, match="dtype"):
            polyflash.attention_paged(a, b, c, **options, backend=step.row.backend)


def test_B_pag_07_B_cch_01_no_call_remembers_another(step: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/1028: one call, then others of other options, sizes and pages,
    then the first again."""
    q, k, v, options = tokens()
    first = step(q, k, v, **options)
    others: tuple[dict[str, Any], ...] = (
        {"causal": True, "window": (9, None)}, {"softcap": 3.0}, {"scale": 0.5}, {"sinks": torch.ones(4)},
        {"kv_starts": ints(9, 0, 0, 9)}, {"causal": True, "q_offset": ints(9, 0, 0, 9)},
        {"kv_lens": ints(9, 0, 1, 9)},
    )  # fmt: skip
    for other in others:
        changed = step.checked(q, k, v, **{**options, **other})
        assert not torch.equal(changed.out, first.out), other
        same_bits(step(q, k, v, **options).out, first.out, f"{other}")
    step(*(p := repaged(q, k, v, options, 3))[:3], **p[3])
    same_bits(step(q, k, v, **options).out, first.out, "pages of another size")
    options["page_table"].copy_(p[3]["page_table"][:, : options["page_table"].shape[1]].clamp(0, 9))
    assert not torch.equal(step(q, k.nan_to_num(), v.nan_to_num(), **options).out, first.out)


def test_B_pag_09_wide_metadata(step: Runner):
    """github.com/flashinfer-ai/flashinfer/pull/1492: int64 where int32 is read. Tables are refused, lengths
    read in full."""
    if not step.is_for(Feature.PAGED):
        pytest.skip(f"{step.row.name} is not for pages")
    q, k, v, options = tokens()
    call = functools.partial(polyflash.attention_paged, q, k, v, backend=step.row.backend)
    with pytest.raises(polyflash.SpecError, match=r"page_table.*int64"):
        call(**{**options, "page_table": options["page_table"].long()})
    same_bits(call(**{**options, "kv_lens": options["kv_lens"].long()}), call(**options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_B_pag_11_a_trash_page_of_nan(step: Runner, dtype: torch.dtype):
    """github.com/huggingface/transformers/pull/46765: the slot that padding is written to may be in every
    table, beyond the live keys."""
    q, k, v, options = tokens(dtype)
    want = step(q, k, v, **options)
    k, v = (torch.cat((x, torch.full_like(x[:1], value))) for x, value in ((k, math.nan), (v, math.inf)))
    table = options["page_table"].clone()
    for b, n in enumerate(options["kv_lens"].tolist()):
        table[b, -(-n // 16) :] = len(k) - 1
    same_bits(step(q, k, v, **{**options, "page_table": table}).out, want.out)


def test_B_q_17_decode_is_the_last_row_of_prefill(run: Runner):
    """github.com/Dao-AILab/flash-attention/pull/2595: bit for bit with batch_invariant=True, to rounding
    without."""
    for dtype in DTYPES:
        q, k, v = qkv(1, (4, 2), 200, 200, 64, dtype=dtype)
        how: dict[str, Any] = {"causal": True, "return_lse": True, "backend": run.row.backend}
        run.skip_unless_here()
        for invariant in (False, True):
            whole = polyflash.attention(q, k, v, batch_invariant=invariant, **how)
            last = polyflash.attention(q[:, :, -1:], k, v, batch_invariant=invariant, **how)
            if invariant:
                same_bits(last.out.contiguous(), whole.out[:, :, -1:].contiguous())
            near(last.out, whole.out[:, :, -1:], 4 * torch.finfo(dtype).eps)


def test_contiguous_caches_are_pages_of_one_size(step: Runner):
    """A cache (batch, seqlen, heads, head_dim) is a pool whose page b is request b."""
    q, k, v, options = tokens()
    wide_q, wide_k, wide_v, rest = padded(q, k, v, options)
    pools = [x.transpose(1, 2).contiguous() for x in (wide_k, wide_v)]
    table = torch.arange(4, dtype=torch.int32)[:, None]
    got = step(q, *pools, page_table=table, kv_lens=rest["kv_lens"])
    same_bits(got.out, step(wide_q, wide_k, wide_v, **rest).out[:, :, 0].contiguous())


def test_a_thousand_steps(monkeypatch: pytest.MonkeyPatch):
    """B-cch-03, B-cch-06: growing caches, contiguous, in pages and ragged, compile nothing, plan nothing
    and add no route."""
    from polyflash.backends.cpu import runtime

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 1, 32, generator=generator)
    k, v = (torch.randn(3, 2, 2100, 32, generator=generator) for _ in range(2))
    pools = [x.transpose(1, 2).reshape(3 * 2100 // 15, 15, 2, 32) for x in (k, v)]
    table = torch.arange(420, dtype=torch.int32).view(3, 140)
    rows = torch.randn(4, 4, 32, generator=generator)
    backends = [row.backend for row in USUAL]

    def step(n: int, backend: str) -> None:
        how: dict[str, Any] = {"causal": True, "backend": backend}
        lens = ints(n, max(0, n - 900), n // 2)
        polyflash.attention(q, k[:, :, :n], v[:, :, :n], **how)
        polyflash.attention(q, k, v, kv_lens=lens, **how)
        polyflash.attention_paged(q[:, :, 0], *pools, table[:, : -(-n // 15)], lens, **how)
        polyflash.attention_paged(rows, *pools, table, lens, cu_seqlens_q=ints(0, 1, 3, 4), **how)

    for n in (20, 900, 1023, 1024, 1100, 2099):
        for backend in backends:
            step(n, backend)

    def planned(*_: Any) -> Any:
        raise AssertionError("a step was planned anew")

    monkeypatch.setattr(torch_ops, "_plan", planned)
    monkeypatch.setattr(runtime, "_find_or_compile", planned)
    before = len(torch_ops._routes), len(runtime._addresses)
    for n in range(1000):
        step(25 + 2 * n, backends[n % 2])
    assert (len(torch_ops._routes), len(runtime._addresses)) == before
