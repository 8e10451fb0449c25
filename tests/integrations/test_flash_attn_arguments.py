"""flash-attn's functions as people call them: numbers of any library, lengths of either width, flash-attn 3's
keywords, and refusals in the names that were called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyflash import SpecError, UnsupportedError
from polyflash.integrations import flash_attn as fa
from tests.integrations.test_flash_attn import ENDS_K, ENDS_Q, SLOPES, truth, turned, x
from tests.tolerance import BACKSTOP, near

PAGES = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


def dense(**options: Any) -> Any:
    torch.manual_seed(1)
    return fa.flash_attn_func(x(2, 5, 4, 8), x(2, 7, 2, 8), x(2, 7, 2, 8), **options)


def varlen(**options: Any) -> Any:
    torch.manual_seed(1)
    call = {"cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K, "max_seqlen_q": 5, "max_seqlen_k": 5} | options
    return fa.flash_attn_varlen_func(x(9, 4, 8), x(11, 2, 8), x(11, 2, 8), **call)


def paged(**options: Any) -> Any:
    torch.manual_seed(1)
    call: dict[str, Any] = {"cu_seqlens_k": torch.tensor([0, 7, 10]).int(), "max_seqlen_k": 7}
    call |= {"cu_seqlens_q": torch.tensor([0, 4, 9]).int(), "max_seqlen_q": 5, "block_table": PAGES}
    return fa.flash_attn_varlen_func(x(9, 4, 8), x(4, 4, 2, 8), x(4, 4, 2, 8), **call | options)


def cached(**options: Any) -> Any:
    torch.manual_seed(1)
    call = {"k": x(2, 3, 2, 8), "v": x(2, 3, 2, 8), "cache_seqlens": 4} | options
    return fa.flash_attn_with_kvcache(x(2, 3, 4, 8), x(2, 8, 2, 8), x(2, 8, 2, 8), **call)


def cached_pages(**options: Any) -> Any:
    torch.manual_seed(1)
    call = {"k": x(2, 3, 2, 8), "v": x(2, 3, 2, 8), "cache_seqlens": 4, "block_table": PAGES} | options
    return fa.flash_attn_with_kvcache(x(2, 3, 4, 8), x(4, 4, 2, 8), x(4, 4, 2, 8), **call)


EVERY = (dense, varlen, paged, cached, cached_pages)
TRUE = (1, np.bool_(True), np.int64(1), np.array(True), torch.tensor(True), torch.tensor(1))


@pytest.mark.parametrize("call", EVERY)
def test_numbers_and_flags_of_any_library(call: Callable[..., Any]) -> None:
    plain = {"causal": True, "softmax_scale": 0.25, "softcap": 2.0, "window_size": (2, -1)}
    want = call(**plain)
    for true in TRUE:
        assert torch.equal(call(**plain | {"causal": true}), want)
    kinds: tuple[Callable[[float], Any], ...] = (np.float32, np.float64, np.array, torch.tensor)
    for kind in kinds:
        assert torch.equal(call(**plain | {"softmax_scale": kind(0.25), "softcap": kind(2.0)}), want)
    assert torch.equal(call(**plain | {"softcap": 2}), want)
    windows = (
        *(torch.tensor([2, -1]), torch.tensor([2, -1], dtype=torch.int32), np.array([2, -1]), [2, -1]),
        *((np.int32(2), torch.tensor(-1)), (2, None), (2, -7), (2, 2**70)),
    )
    for window in windows:
        assert torch.equal(call(**plain | {"window_size": window}), want), window


def test_flags_and_numbers_of_some_functions() -> None:
    for true in TRUE:
        assert isinstance(dense(return_attn_probs=true), tuple)
        assert isinstance(varlen(return_attn_probs=true), tuple)
        assert isinstance(cached(return_softmax_lse=true), tuple)
    torch.manual_seed(3)
    q = x(1, 9, 2, 8)
    results = []
    for p in (0.5, np.float32(0.5), torch.tensor(0.5)):
        torch.manual_seed(5)
        results.append(fa.flash_attn_func(q, q, q, p))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    tables = {"rotary_cos": x(9, 2), "rotary_sin": x(9, 2)}
    for true in TRUE:
        for flag in (true, true == 0):
            want = cached(**tables, rotary_interleaved=bool(flag))
            assert torch.equal(cached(**tables, rotary_interleaved=flag), want)
    assert not torch.equal(cached(**tables, rotary_interleaved=False), cached(**tables))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lengths_of_either_width(dtype: torch.dtype) -> None:
    lens = torch.tensor([4, 4], dtype=dtype)
    pads = torch.tensor([1, 2], dtype=dtype)
    for call in (cached, cached_pages):
        want = call()
        for same in (lens, torch.tensor(4, dtype=dtype), np.int32(4), 4):
            assert torch.equal(call(cache_seqlens=same), want)
        assert torch.equal(call(cache_leftpad=pads), call(cache_leftpad=pads.int()))
    ends = {"cu_seqlens_q": ENDS_Q.to(dtype), "cu_seqlens_k": ENDS_K.to(dtype)}
    longest = {"max_seqlen_q": torch.tensor(5, dtype=dtype), "max_seqlen_k": np.int64(5)}
    assert torch.equal(varlen(**ends, **longest), varlen())
    ends = {name: torch.tensor(values, dtype=dtype) for name, values in
            (("cu_seqlens_q", [0, 4, 9]), ("cu_seqlens_k", [0, 7, 10]))}  # fmt: skip
    assert torch.equal(paged(**ends, max_seqlen_q=torch.tensor(5)), paged())
    with pytest.raises(SpecError, match="cache_seqlens: got 4294967300, wanted"):
        cached(cache_seqlens=torch.tensor([4, 2**32 + 4]))


def test_pages_and_inputs_that_need_gradients() -> None:
    """As `flash_attn_with_kvcache`: the result has none, and none is asked for."""
    torch.manual_seed(1)
    q, pages = x(9, 4, 8).requires_grad_(), [x(4, 4, 2, 8).requires_grad_() for _ in range(2)]
    ends = torch.tensor([0, 4, 9]).int(), torch.tensor([0, 7, 10]).int()
    got = fa.flash_attn_varlen_func(q, *pages, *ends, 5, 7, causal=True, block_table=PAGES)
    assert not got.requires_grad and torch.equal(got, paged(causal=True))
    step = fa.flash_attn_with_kvcache(q[None, :2].expand(2, 2, 4, 8), *pages, block_table=PAGES)
    assert not step.requires_grad


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("in_pages", [False, True])
def test_rotary_with_padding_on_the_left(causal: bool, in_pages: bool) -> None:
    """Positions count from the first slot of the cache, hidden or not, as in flash-attn's kernels."""
    q, k, v = x(2, 3, 4, 12), x(2, 3, 2, 12), x(2, 3, 2, 8)
    k_cache, v_cache = x(2, 12, 2, 12), x(2, 12, 2, 8)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    lens, pads = torch.tensor([4, 6], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    angles = torch.arange(12)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.05])
    at = lens.long()[:, None] + torch.arange(3)
    right_k = turned(k, at, angles.cos(), angles.sin(), True)
    right_q = turned(q, at if causal else lens.long()[:, None].expand(2, 3), angles.cos(), angles.sin(), True)
    options: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": causal}
    options |= {"cache_seqlens": lens, "cache_leftpad": pads}
    if in_pages:
        options["block_table"] = torch.arange(8, dtype=torch.int32).view(2, 4)
        k_cache, v_cache = k_cache.view(8, 3, 2, 12), v_cache.view(8, 3, 2, 8)
    got = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
    for b in range(2):
        n, pad = int(lens[b]), int(pads[b])
        keys = torch.cat((k_before[b, pad:n].double(), right_k[b].double()))
        values = torch.cat((v_before[b, pad:n], v[b]))
        near(
            got[b],
            truth(right_q[b][None], keys[None], values[None], causal=causal)[0][0],
            BACKSTOP[torch.float32],
        )
        near(k_cache.view(2, 12, 2, 12)[b, n : n + 3], right_k[b].double(), 1e-6)


# flash-attn 3


def test_hints_change_nothing() -> None:
    hints = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8, "qv": None, "q_descale": None}
    for call in EVERY:
        assert torch.equal(call(**hints, attention_chunk=0), call())
    assert torch.equal(cached(scheduler_metadata=None, cu_seqlens_q=None), cached())


def test_names_of_flash_attn_3() -> None:
    assert torch.equal(cached_pages(block_table=None, page_table=PAGES), cached_pages())
    assert torch.equal(paged(block_table=None, page_table=PAGES), paged())
    lens = torch.tensor([7, 3])
    assert torch.equal(paged(cu_seqlens_k=None, seqused_k=lens), paged())
    assert torch.equal(paged(cu_seqlens_k=torch.tensor([0, 8, 16]), seqused_k=lens), paged())
    with pytest.raises(SpecError, match="block_table: got two tables"):
        paged(page_table=PAGES)


def test_members_that_use_some_of_their_keys() -> None:
    """Lengths, and the alignment of `causal`, are of the keys that are used."""
    used = torch.tensor([2, 0, 4, 0])
    got, lse, _ = varlen(seqused_k=used, causal=True, return_attn_probs=True)
    torch.manual_seed(1)
    q, k, v = x(9, 4, 8), x(11, 2, 8), x(11, 2, 8)
    for b, n in enumerate(used.tolist()):
        rows, keys = slice(int(ENDS_Q[b]), int(ENDS_Q[b + 1])), slice(int(ENDS_K[b]), int(ENDS_K[b]) + n)
        right, right_lse = truth(q[None, rows], k[None, keys], v[None, keys], causal=True)
        near(got[rows], right[0], BACKSTOP[torch.float32])
        near(lse[:, rows], right_lse[0], 1e-6)


def test_where_rotary_begins_to_count() -> None:
    tables = {"rotary_cos": x(20, 2), "rotary_sin": x(20, 2)}
    want = cached(**tables)
    same = cached(**tables, rotary_seqlens=torch.tensor([4, 4]))
    shifted = {name: torch.cat((torch.zeros(5, 2), t)) for name, t in tables.items()}
    assert torch.equal(same, want)
    assert torch.equal(cached(**shifted, rotary_seqlens=torch.tensor([9, 9])), want)
    with pytest.raises(SpecError, match="rotary_seqlens: got one, wanted none without rotary_cos"):
        cached(rotary_seqlens=torch.tensor([9, 9]))


@pytest.mark.parametrize("call", EVERY)
@pytest.mark.parametrize(
    "name, value",
    [
        ("qv", torch.zeros(1)),
        ("q_descale", torch.zeros(1)),
        ("k_descale", torch.zeros(1)),
        ("v_descale", torch.zeros(1)),
        ("attention_chunk", 4),
        ("scheduler_metadata", torch.zeros(1)),
        ("num_heads_q", 4),
        ("seqused_q", torch.zeros(1)),
        ("cu_seqlens_k_new", torch.zeros(1)),
    ],
)
def test_what_nothing_serves_is_refused_in_words(call: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name}: got .*, wanted None: not here\. [A-Z]"):
        call(**{name: value})


def test_what_another_function_serves_and_what_nobody_knows() -> None:
    with pytest.raises(UnsupportedError, match=r"seqused_k: .* flash_attn_varlen_func takes it"):
        dense(seqused_k=torch.tensor([1, 2]))
    with pytest.raises(UnsupportedError, match=r"cu_seqlens_q: .* flash_attn_varlen_func takes packed rows"):
        cached(cu_seqlens_q=torch.tensor([0, 3]))
    with pytest.raises(TypeError, match="soft_cap"):
        dense(soft_cap=1.0)


# Refusals

OURS = (
    *("kv_lens", "kv_starts", "page_table", "k_pages", "v_pages", "q_offset", "scale", "window", "bias"),
    *("mask", "attention", "attention_varlen", "attention_paged", "layout", "num_q_heads", "num_pages"),
    *("Mask", "bhsd", "bshd"),
)
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (dense, {"causal": 2}, "causal: got 2, wanted True or False"),
    (dense, {"causal": "top_left"}, "causal: got 'top_left', wanted True or False"),
    (dense, {"causal": None}, "causal: got None"),
    (dense, {"causal": torch.tensor([True])}, r"causal: got torch\.bool \(1,\)"),
    (dense, {"dropout_p": True}, "dropout_p: got True, wanted a number. Flags come later"),
    (dense, {"dropout_p": 1.0}, "dropout_p: got 1.0"),
    (dense, {"softmax_scale": False}, "softmax_scale: got False, wanted a number"),
    (dense, {"softmax_scale": float("nan")}, "softmax_scale: got nan, wanted a finite number"),
    (dense, {"softmax_scale": "large"}, "softmax_scale: got str, wanted a number"),
    (dense, {"softmax_scale": torch.ones(2)}, "softmax_scale: got Tensor, wanted a number"),
    (dense, {"softmax_scale": torch.tensor(0.5, requires_grad=True)}, "softmax_scale: got requires_grad"),
    (dense, {"softcap": -1.0}, "softcap: got -1.0"),
    (dense, {"window_size": 3}, r"window_size: got 3, wanted \(left, right\)"),
    (dense, {"window_size": None}, r"window_size: got None, .* \(-1, -1\) is unbounded"),
    (dense, {"window_size": (3, 0, 0)}, "window_size: got tuple of 3"),
    (dense, {"window_size": torch.tensor([3.0, 0.0])}, "window_size: got 3.0, wanted two ints"),
    (dense, {"window_size": torch.ones(2, 2).int()}, r"window_size: got torch\.int32 \(2, 2\)"),
    (dense, {"window_size": (True, 0)}, "window_size: got True"),
    (dense, {"alibi_slopes": SLOPES.clone().requires_grad_()}, "alibi_slopes: .* Use .detach"),
    (dense, {"alibi_slopes": [0.5] * 4}, "alibi_slopes: got list"),
    (varlen, {"cu_seqlens_q": None}, "cu_seqlens: got None"),
    (varlen, {"cu_seqlens_q": [0, 9]}, "cu_seqlens_q: got list"),
    (varlen, {"cu_seqlens_k": ENDS_K[:3]}, "cu_seqlens_k: got 2 members"),
    (varlen, {"max_seqlen_q": 2.0}, "max_seqlen_q: got float"),
    (varlen, {"max_seqlen_k": 1}, "max_seqlen_k: got 1, wanted 5 or more"),
    (varlen, {"seqused_k": torch.tensor([5, 0, 0, 0])}, "seqused_k: got 5 for request 0"),
    (varlen, {"seqused_k": torch.tensor([5])}, r"seqused_k: got \(1,\)"),
    (paged, {"cu_seqlens_k": torch.tensor([0, 9, 10])}, "cu_seqlens_k: got 9 for request 0"),
    (paged, {"cu_seqlens_k": None}, "cu_seqlens_k: got None, .* or pass seqused_k"),
    (paged, {"seqused_k": torch.tensor([9, 1])}, "seqused_k: got 9 for request 0"),
    (paged, {"block_table": PAGES + 2}, "block_table: got page 4 for request 1 in column 0"),
    (paged, {"block_table": PAGES.tolist()}, "block_table: got list of 2, wanted int32"),
    (paged, {"block_table": PAGES[:1]}, "block_table rows: got 1"),
    (paged, {"block_table": PAGES.long()}, "block_table: got torch.int64"),
    (cached, {"k": None, "v": None, "cache_seqlens": 9}, "cache_seqlens: got 9 for request 0"),
    (cached, {"cache_seqlens": torch.tensor([1, 2, 3])}, r"cache_seqlens: got torch\.int64 \(3,\)"),
    (cached, {"cache_seqlens": 2.5}, "cache_seqlens: got 2.5"),
    (cached, {"cache_seqlens": [4, 4]}, "cache_seqlens: got list of 2"),
    (cached, {"cache_seqlens": np.array([4, 4])}, r"cache_seqlens: got numpy int64 \(2,\), wanted an int"),
    (cached, {"cache_leftpad": torch.tensor([9, 0])}, "cache_leftpad: got 9 for request 0"),
    (cached, {"cache_leftpad": 3}, "cache_leftpad: got int"),
    (cached, {"cache_leftpad": torch.tensor([1])}, r"cache_leftpad: got \(1,\)"),
    (cached, {"cache_batch_idx": [0, 1]}, "cache_batch_idx: got list of 2"),
    (cached, {"rotary_cos": x(3, 2), "rotary_sin": x(3, 2)}, "rotary_cos: got 3 rows, wanted one for each"),
    (cached, {"rotary_cos": x(9, 2), "rotary_sin": x(9, 3)}, "rotary_cos, rotary_sin: got"),
    (cached, {"rotary_cos": x(9, 8), "rotary_sin": x(9, 8)}, r"rotary_cos: got \(9, 8\), .* fewer channels"),
    (cached, {"rotary_cos": [1.0], "rotary_sin": [1.0]}, "rotary_cos: got list of 1"),
    (cached, {"rotary_interleaved": 3}, "rotary_interleaved: got 3"),
    (cached_pages, {"k": None, "v": None, "cache_seqlens": 9}, "cache_seqlens: got 9 for request 0"),
    (cached_pages, {"k": None, "v": None, "block_table": PAGES + 4}, "block_table: got page 4 for request 0"),
    (cached_pages, {"cache_leftpad": torch.tensor([9, 0])}, "cache_leftpad: got 9 for request 0"),
]  # fmt: skip


@pytest.mark.parametrize("call, change, words", REFUSED, ids=[words for _, _, words in REFUSED])
def test_refusals_speak_of_what_was_called(
    call: Callable[..., Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=f"^{words}") as refused:
        call(**change)
    said = set(re.findall(r"\w+", str(refused.value)))
    assert not said & set(OURS), str(refused.value)


def test_refusals_of_tensors_speak_of_what_was_called() -> None:
    q, kv, cache = x(2, 3, 4, 8), x(2, 3, 2, 2, 8), x(2, 8, 2, 8)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: fa.flash_attn_func(q, cache, cache[:, :5]), "v seqlen: got 5, wanted 8, as k"),
        (lambda: fa.flash_attn_func(q, cache.half(), cache), "k dtype: got torch.float16"),
        (lambda: fa.flash_attn_func(q[0], cache, cache), "q: got 3 dimensions"),
        (lambda: fa.flash_attn_func(q.numpy(), cache, cache), "q: got ndarray, wanted a torch.Tensor"),
        (lambda: fa.flash_attn_qkvpacked_func(x(2, 3, 3, 2, 8).int()), "qkv dtype: got torch.int32"),
        (lambda: fa.flash_attn_qkvpacked_func([1.0]), "qkv: got list of 1"),
        (lambda: fa.flash_attn_kvpacked_func(q, kv.half()), "kv dtype: got torch.float16"),
        (
            lambda: fa.flash_attn_varlen_qkvpacked_func(x(9, 3, 2, 8), ENDS_Q + 1, 5),
            "cu_seqlens: got 1 first",
        ),
        (lambda: fa.flash_attn_varlen_qkvpacked_func(x(9, 3, 2, 8), ENDS_Q, 2), "max_seqlen: got 2"),
        (lambda: fa.flash_attn_with_kvcache(q, cache.half(), cache.half()), "k_cache dtype: got"),
        (lambda: fa.flash_attn_with_kvcache(q, cache, cache[..., 0]), r"v_cache: got .* \(2, 8, 2\)"),
        (lambda: fa.flash_attn_with_kvcache(q[0], cache, cache), r"q: got torch.float32 \(3, 4, 8\)"),
        (lambda: fa.flash_attn_with_kvcache(q[..., :7], cache, cache), "k_cache head_dim: got 8"),
        (lambda: fa.flash_attn_with_kvcache(q[:, :, :3], cache, cache), "heads: got 3 query heads"),
    ]  # fmt: skip
    for call, words in calls:
        with pytest.raises(SpecError, match=f"^{words}") as refused:
            call()
        assert not set(re.findall(r"\w+", str(refused.value))) & set(OURS), str(refused.value)


# Rotary embedding

ANGLES = torch.arange(12)[:, None] * torch.tensor([1.0, 0.3, 0.1])
COS, SIN = ANGLES.cos(), ANGLES.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([5, 0]), torch.tensor(3), np.int64(2)], ids=str)
def test_rotary_embedding(interleaved: bool, offsets: Any) -> None:
    t = x(2, 7, 3, 10).requires_grad_()
    at = torch.as_tensor(offsets).reshape(-1, 1) + torch.arange(7)
    at = at.expand(2, 7)
    want = turned(t.detach(), at, COS, SIN, interleaved)
    got = fa.apply_rotary_emb(t, COS, SIN, interleaved, seqlen_offsets=offsets)
    near(got.detach(), want, 1e-6)
    weights = x(*t.shape)
    (gradient,) = torch.autograd.grad(got, t, weights)
    near(gradient, turned(weights, at, COS, -SIN, interleaved), 1e-6)
    place = t.detach().clone()
    assert fa.apply_rotary_emb(place, COS, SIN, interleaved, True, offsets) is place
    assert torch.equal(place, got)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rotary_embedding_of_packed_requests(interleaved: bool, dtype: torch.dtype) -> None:
    t = x(13, 3, 10).requires_grad_()
    ends = torch.tensor([0, 4, 4, 9], dtype=dtype)  # the last four belong to nobody
    offsets = torch.tensor([2, 0, 6], dtype=dtype)
    cos, sin = COS[1:], SIN[1:]  # whose first position turns a token, too
    got = fa.apply_rotary_emb(t, cos, sin, interleaved, False, offsets, ends, 5)
    at = torch.cat((torch.arange(4) + 2, torch.arange(5) + 6))
    near(got[None, :9].detach(), turned(t[None, :9].detach(), at[None], cos, sin, interleaved), 1e-6)
    assert torch.equal(got[9:], t[9:])
    (gradient,) = torch.autograd.grad(got.sum(), t)
    assert torch.equal(gradient[9:], torch.ones(4, 3, 10))
    place = t.detach().clone()
    assert fa.apply_rotary_emb(place, cos, sin, interleaved, 1, offsets, cu_seqlens=ends) is place
    assert torch.equal(place, got)
    nobody = fa.apply_rotary_emb(t, cos, sin, cu_seqlens=torch.tensor([0], dtype=dtype))
    assert torch.equal(nobody, t)


def test_rotary_embedding_rounds_once() -> None:
    t = x(2, 7, 3, 10).bfloat16().requires_grad_()
    got = fa.apply_rotary_emb(t, COS, SIN)
    assert got.dtype is torch.bfloat16
    wide = fa.apply_rotary_emb(t.detach().float(), COS, SIN)
    assert torch.equal(got, wide.bfloat16())


def test_rotary_embedding_without_tokens() -> None:
    for shape in ((0, 7, 3, 10), (2, 0, 3, 10)):
        assert fa.apply_rotary_emb(x(*shape), COS, SIN).shape == shape


@pytest.mark.parametrize(
    "change, words",
    [
        ({"seqlen_offsets": 6}, "cos: got 12 rows, wanted one for each position, 6 to 12"),
        ({"seqlen_offsets": -1}, "cos: got 12 rows, wanted one for each position, -1 to 5. Positions count"),
        ({"seqlen_offsets": 1.5}, "seqlen_offsets: got 1.5"),
        ({"seqlen_offsets": torch.tensor([1, 2, 3])}, r"seqlen_offsets: got torch.int64 \(3,\)"),
        ({"cos": COS[:, :2]}, r"cos, sin: got \(12, 2\)"),
        ({"cos": COS.repeat(1, 2), "sin": SIN.repeat(1, 2)}, r"cos: got \(12, 6\)"),
        ({"cos": COS[None]}, "cos: got .*, wanted float"),
        ({"x": x(7, 3, 10)}, r"x: got torch.float32 \(7, 3, 10\)"),
        ({"x": torch.ones(2, 7, 3, 10).int()}, "x: got torch.int32"),
        ({"interleaved": "yes"}, "interleaved: got 'yes'"),
        ({"inplace": 2}, "inplace: got 2"),
        ({"x": x(7, 3, 10), "cu_seqlens": torch.tensor([0.0, 7.0])}, "cu_seqlens: got torch.float32"),
        ({"x": x(7, 3, 10), "cu_seqlens": [0, 7]}, "cu_seqlens: got list of 2"),
        ({"x": x(7, 3, 10), "cu_seqlens": torch.tensor([0, 8])}, "cu_seqlens: got 8 last"),
        ({"x": x(7, 3, 10), "cu_seqlens": torch.tensor([0, 7]), "max_seqlen": 3}, "max_seqlen: got 3"),
    ],
)
def test_rotary_embedding_refuses(change: dict[str, Any], words: str) -> None:
    call = {"x": x(2, 7, 3, 10)[..., :10], "cos": COS, "sin": SIN, "inplace": True} | change
    given: Tensor = call["x"]
    before = given.clone()
    with pytest.raises(SpecError, match=f"^{words}"):
        fa.apply_rotary_emb(**call)
    assert torch.equal(given, before)


def test_tokens_beyond_the_tables_stay_on_a_device() -> None:
    """Contents are not read there: nothing is refused, and no memory beyond the tables is touched."""
    got = fa.apply_rotary_emb(x(2, 7, 3, 10).to("meta"), COS.to("meta"), SIN.to("meta"), seqlen_offsets=9)
    assert got.shape == (2, 7, 3, 10) and got.is_meta
