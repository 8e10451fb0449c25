"""flash-attn 2's names: argument order, layouts, return shapes, windows, and caches that grow in place."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from polyflash import SpecError, UnsupportedError
from polyflash.integrations import flash_attn as fa
from polyflash.reference import attention_reference
from tests.rows_here import HERE
from tests.tolerance import BACKSTOP, GRADIENT_BACKSTOP, near

LAST = (
    *("dropout_p=0.0", "softmax_scale=None", "causal=False", "window_size=(-1, -1)", "softcap=0.0"),
    *("alibi_slopes=None", "deterministic=False", "return_attn_probs=False"),
)
MEMBERS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {
    "flash_attn_func": ("q", "k", "v", *LAST),
    "flash_attn_qkvpacked_func": ("qkv", *LAST),
    "flash_attn_kvpacked_func": ("q", "kv", *LAST),
    "flash_attn_varlen_func": ("q", "k", "v", *MEMBERS, *LAST, "block_table=None"),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen", *LAST),
    "flash_attn_varlen_kvpacked_func": ("q", "kv", *MEMBERS, *LAST),
    "flash_attn_with_kvcache": (
        *("q", "k_cache", "v_cache", "k=None", "v=None", "rotary_cos=None", "rotary_sin=None"),
        *("cache_seqlens=None", "cache_batch_idx=None", "cache_leftpad=None", "block_table=None"),
        *("softmax_scale=None", "causal=False", "window_size=(-1, -1)", "softcap=0.0"),
        *("rotary_interleaved=True", "alibi_slopes=None", "num_splits=0", "return_softmax_lse=False"),
    ),
}


FLASH_ATTN_3 = {  # by keyword alone: its order differs
    "flash_attn_varlen_func": ("seqused_k=None", "page_table=None"),
    "flash_attn_with_kvcache": ("page_table=None", "rotary_seqlens=None"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn(name: str) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    said = {p.kind: () for p in parameters}
    for p in parameters:
        said[p.kind] += (p.name if p.default is p.empty else f"{p.name}={p.default!r}",)
    assert said.pop(inspect.Parameter.POSITIONAL_OR_KEYWORD) == SIGNATURES[name]
    assert said.pop(inspect.Parameter.KEYWORD_ONLY, ()) == FLASH_ATTN_3.get(name, ()) and not said


def x(*shape: int) -> Tensor:
    return torch.randn(*shape)


def truth(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(batch, seqlen, heads, head_dim) through the float64 reference."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    if options.get("alibi_slopes") is not None:
        options["alibi_slopes"] = options["alibi_slopes"].double()
    result = attention_reference(q, k, v, **options)
    return result[0].transpose(1, 2), result[1]


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
# As flash-attn is asked, and as `attention` is.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "window": ({"window_size": (2, 3)}, {"window": (2, 3)}),
    "window, left": ({"window_size": (2, -1)}, {"window": (2, None)}),
    "window, right": ({"window_size": (-1, 1)}, {"window": (None, 1)}),
    "window, causal": ({"window_size": (2, 0), "causal": True}, {"window": (2, 0), "causal": True}),
    "window, causal, right": ({"window_size": (3, 2), "causal": True}, {"window": (3, 0), "causal": True}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, {"alibi_slopes": SLOPES, "causal": True}),
    "alibi per request": (
        {"alibi_slopes": torch.stack((SLOPES, SLOPES * 2))},
        {"alibi_slopes": torch.stack((SLOPES, SLOPES * 2))},
    ),
    "deterministic": ({"deterministic": True}, {}),
}


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name: str, lengths: tuple[int, int], ran: list[tuple[str, str]]) -> None:
    """Causal with more queries than keys leaves rows that see nothing: out 0, lse -inf, as said."""
    asked, meant = CALLS[name]
    seqlen_q, seqlen_k = lengths
    q, k, v = x(2, seqlen_q, 4, 16), x(2, seqlen_k, 2, 16), x(2, seqlen_k, 2, 16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out, lse, probs = fa.flash_attn_func(q, k, v, return_attn_probs=True, **asked)
    right, right_lse = truth(*wide, **meant)
    assert probs is None and out.shape == (2, seqlen_q, 4, 16) and out.is_contiguous()
    assert lse.shape == (2, 4, seqlen_q) and lse.dtype is torch.float32
    near(out.detach(), right.detach(), BACKSTOP[torch.float32], name)
    near(lse.detach(), right_lse.detach(), 1e-6, name)
    weights = x(*out.shape)
    got = torch.autograd.grad(out, leaves, weights)
    for ours, theirs in zip(got, torch.autograd.grad(right, wide, weights.double()), strict=True):
        near(ours, theirs, GRADIENT_BACKSTOP[torch.float32], name)
    assert [phase for phase, _ in ran] == ["forward", "backward"] and ran[0][1] == HERE[0]
    assert torch.equal(fa.flash_attn_func(q, k, v, **asked), out), "without lse it is the tensor alone"


def test_half_precision() -> None:
    q, k, v = (x(2, 40, heads, 64).bfloat16() for heads in (4, 2, 2))
    got = fa.flash_attn_func(q, k, v, causal=True)
    assert got.dtype is torch.bfloat16
    near(got, truth(q, k, v, causal=True)[0], BACKSTOP[torch.bfloat16])


def test_packed_forms() -> None:
    qkv = x(2, 7, 3, 4, 8).requires_grad_()
    q, k, v = qkv.unbind(2)
    want = fa.flash_attn_func(q, k, v, 0.0, 0.4, True, (3, -1), 2.0, SLOPES)
    got, lse, none = fa.flash_attn_qkvpacked_func(qkv, 0.0, 0.4, True, (3, -1), 2.0, SLOPES, False, True)
    assert torch.equal(got, want) and lse.shape == (2, 4, 7) and none is None
    assert torch.autograd.grad(got.sum(), qkv)[0].shape == qkv.shape
    kv = x(2, 9, 2, 2, 8)
    want = fa.flash_attn_func(q, *kv.unbind(2), causal=True)
    assert torch.equal(fa.flash_attn_kvpacked_func(q, kv, causal=True), want)
    for wrong in (qkv[:, :, :2], qkv[0]):
        with pytest.raises(SpecError, match="qkv: got"):
            fa.flash_attn_qkvpacked_func(wrong)
    with pytest.raises(SpecError, match="kv: got"):
        fa.flash_attn_kvpacked_func(q, qkv)


LENGTHS_Q, LENGTHS_K = (3, 0, 5, 1), (4, 2, 5, 0)
ENDS_Q, ENDS_K = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS_Q, LENGTHS_K))


@pytest.mark.parametrize("name", [name for name in CALLS if "per request" not in name])
def test_members(name: str, ran: list[tuple[str, str]]) -> None:
    asked, meant = CALLS[name]
    q, k, v = (x(n, heads, 16).requires_grad_() for n, heads in ((9, 4), (11, 2), (11, 2)))
    out, lse, none = fa.flash_attn_varlen_func(q, k, v, ENDS_Q, ENDS_K, 5, 5, return_attn_probs=True, **asked)
    assert out.shape == (9, 4, 16) and lse.shape == (4, 9) and none is None
    weights = x(9, 4, 16)
    got = torch.autograd.grad(out, (q, k, v), weights)
    assert ran[0] == ("forward", HERE[0])
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    parts = [t.split(lengths) for t, lengths in zip(wide, (LENGTHS_Q, LENGTHS_K, LENGTHS_K), strict=True)]
    right = torch.cat(
        [truth(*(t[None] for t in member), **meant)[0][0] for member in zip(*parts, strict=True)]
    )
    near(out.detach(), right.detach(), BACKSTOP[torch.float32], name)
    for ours, theirs in zip(got, torch.autograd.grad(right, wide, weights.double()), strict=True):
        near(ours, theirs, GRADIENT_BACKSTOP[torch.float32], name)


def test_packed_members() -> None:
    qkv = x(9, 3, 4, 8)
    q, k, v = qkv.unbind(1)
    want = fa.flash_attn_varlen_func(q, k, v, ENDS_Q, ENDS_Q, 5, 5, causal=True)
    assert torch.equal(fa.flash_attn_varlen_qkvpacked_func(qkv, ENDS_Q, 5, causal=True), want)
    kv = x(11, 2, 2, 8)
    want = fa.flash_attn_varlen_func(q, *kv.unbind(1), ENDS_Q, ENDS_K, 5, 5, 0.0, 0.3)
    got = fa.flash_attn_varlen_kvpacked_func(q, kv, ENDS_Q, ENDS_K, 5, 5, 0.0, 0.3)
    assert torch.equal(got, want)
    with pytest.raises(SpecError, match="qkv: got"):
        fa.flash_attn_varlen_qkvpacked_func(kv, ENDS_Q, 5)


def test_dropout_obeys_the_generator() -> None:
    q = torch.ones(1, 64, 4, 64)
    torch.manual_seed(2)
    a, b = fa.flash_attn_func(q, q, q, 0.25), fa.flash_attn_func(q, q, q, 0.25)
    torch.manual_seed(2)
    assert torch.equal(a, fa.flash_attn_func(q, q, q, 0.25)) and not torch.equal(a, b)
    assert abs(float(a.mean()) - 1) < 0.01


def test_what_is_refused() -> None:
    q, table = x(4, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    cache = x(1, 8, 2, 8)
    paged = {"block_table": table}
    with pytest.raises(UnsupportedError, match="dropout_p"):
        fa.flash_attn_varlen_func(q, cache, cache, ends, ends, 4, 4, 0.1, **paged)
    with pytest.raises(SpecError, match=r"cu_seqlens_k: got torch\.int16"):
        fa.flash_attn_varlen_func(q, cache, cache, ends, ends.short(), 4, 4, **paged)
    with pytest.raises(SpecError, match="cache_seqlens: got None"):
        fa.flash_attn_with_kvcache(q[None], cache, cache, q[None], q[None])
    with pytest.raises(SpecError, match="cache_seqlens: got 5 to 5 keys, and 4 more"):
        fa.flash_attn_with_kvcache(q[None], cache, cache, q[None], q[None], cache_seqlens=5)
    with pytest.raises(SpecError, match=r"cache_seqlens: got torch\.int16"):
        fa.flash_attn_with_kvcache(q[None], cache, cache, cache_seqlens=torch.tensor([3]).short())
    with pytest.raises(SpecError, match="k, v: got k alone"):
        fa.flash_attn_with_kvcache(q[None], cache, cache, q[None], cache_seqlens=2)
    short = {"rotary_cos": torch.ones(5, 4), "rotary_sin": torch.zeros(5, 4)}
    with pytest.raises(SpecError, match="rotary_cos"):
        fa.flash_attn_with_kvcache(q[None], cache, cache, q[None], q[None], **short, cache_seqlens=3)


CACHE = {"rotary_cos": torch.ones(16, 4), "rotary_sin": torch.zeros(16, 4)}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"k": None}, "k, v: got v alone"),
        ({"v": None}, "k, v: got k alone"),
        ({"rotary_cos": CACHE["rotary_cos"]}, "rotary_cos, rotary_sin: got rotary_cos alone"),
        ({"rotary_sin": CACHE["rotary_sin"]}, "rotary_cos, rotary_sin: got rotary_sin alone"),
        ({"k": None, "v": None, **CACHE}, "k, v: got neither, with rotary_cos"),
        ({"k": x(1, 3, 2, 8)}, r"k: got \(1, 3, 2, 8\) .* on cpu, wanted \(2, 3, 2, 8\) torch\.float32"),
        ({"k": x(3)}, r"k: got .*\(3,\)"),
        ({"k": x(2, 3, 1, 8)}, r"k: got .*\(2, 3, 1, 8\)"),
        ({"k": x(2, 3, 2, 1), **CACHE}, r"k: got .*\(2, 3, 2, 1\)"),
        ({"k": x(3, 2, 8)}, r"k: got .*\(3, 2, 8\)"),
        ({"v": x(2, 1, 2, 6)}, r"v: got .*\(2, 1, 2, 6\)"),
        ({"v": x(2, 3, 2, 1)}, r"v: got .*\(2, 3, 2, 1\)"),
        ({"v": x(2, 3, 2, 6).half()}, r"v: got .* torch\.float16"),
        ({"v": x(2, 3, 2, 6).to("meta")}, "v: got .* on meta"),
        ({"cache_batch_idx": torch.tensor([0, 4])}, "cache_batch_idx: got rows 0 to 4, wanted 0 to 3"),
        ({"cache_batch_idx": torch.tensor([-1, 2])}, "cache_batch_idx: got rows -1 to 2"),
        ({"cache_batch_idx": torch.tensor([1])}, r"cache_batch_idx: got torch\.int64 \(1,\)"),
        ({"cache_batch_idx": torch.tensor([0.0, 1.0])}, r"cache_batch_idx: got torch\.float32"),
        ({"cache_batch_idx": None}, "k_cache: got 4 rows, wanted 2"),
        ({"v_cache": x(3, 9, 2, 6)}, r"k_cache, v_cache: got \(4, 9, 2, 8\) and \(3, 9, 2, 6\)"),
        ({"cache_seqlens": 7}, "cache_seqlens"),
    ],
)  # fmt: skip
def test_a_refused_call_leaves_the_cache_alone(change: dict[str, Any], words: str) -> None:
    k_cache, v_cache = x(4, 9, 2, 8), x(4, 9, 2, 6)
    before = k_cache.clone(), v_cache.clone()
    call = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": x(2, 3, 2, 8),
        "v": x(2, 3, 2, 6),
        "cache_seqlens": 2,
        "cache_batch_idx": torch.tensor([3, 1]),
    }
    with pytest.raises(SpecError, match=words):
        fa.flash_attn_with_kvcache(x(2, 1, 4, 8), **call | change)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


def turned(t: Tensor, at: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Each pair of channels as a complex number times cos + i·sin, position by position."""
    t, half = t.double().clone(), cos.shape[1]
    for b in range(t.shape[0]):
        for i in range(t.shape[1]):
            for c in range(half):
                low, high = (2 * c, 2 * c + 1) if interleaved else (c, c + half)
                pair = torch.complex(t[b, i, :, low], t[b, i, :, high])
                pair = pair * torch.complex(cos[at[b, i], c].double(), sin[at[b, i], c].double())
                t[b, i, :, low], t[b, i, :, high] = pair.real, pair.imag
    return t


@pytest.mark.parametrize("rotary", [None, True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("lens", [3, (0, 5, 2)], ids=str)
def test_a_cache_grows_in_place(rotary: bool | None, causal: bool, indexed: bool, lens: Any) -> None:
    q, k, v = x(3, 2, 4, 12), x(3, 2, 2, 12), x(3, 2, 2, 8)
    k_cache, v_cache = x(5, 9, 2, 12), x(5, 9, 2, 8)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    before = torch.tensor(lens if isinstance(lens, tuple) else (lens,) * 3, dtype=torch.int32)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32) if indexed else torch.arange(3).int()
    angles = torch.arange(9)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.05])
    options: dict[str, Any] = {"causal": causal, "cache_batch_idx": rows if indexed else None}
    right_q, right_k = q, k
    if rotary is not None:
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": rotary}
        at = before.long()[:, None] + torch.arange(2)
        right_q = turned(
            q, at if causal else before.long()[:, None].expand(3, 2), angles.cos(), angles.sin(), rotary
        )
        right_k = turned(k, at, angles.cos(), angles.sin(), rotary)
    got, lse = fa.flash_attn_with_kvcache(
        q, k_cache if indexed else k_cache[:3], v_cache if indexed else v_cache[:3], k, v,
        cache_seqlens=before if isinstance(lens, tuple) else lens, return_softmax_lse=True, **options,
    )  # fmt: skip
    for b, row in enumerate(rows.tolist()):
        n = int(before[b])
        keys = torch.cat((k_before[row, :n].double(), right_k[b].double()))
        values = torch.cat((v_before[row, :n], v[b]))
        right, right_lse = truth(right_q[b][None], keys[None], values[None], causal=causal)
        near(got[b], right[0], BACKSTOP[torch.float32])
        near(lse[b], right_lse[0], 1e-6)
        near(k_cache[row, n : n + 2], right_k[b].double(), 1e-6)
        assert torch.equal(v_cache[row, n : n + 2], v[b])
        for now, then in ((k_cache, k_before), (v_cache, v_before)):
            assert torch.equal(now[row, :n], then[row, :n]) and torch.equal(
                now[row, n + 2 :], then[row, n + 2 :]
            )
    others = [row for row in range(5) if row not in rows.tolist()]
    assert torch.equal(k_cache[others], k_before[others])


def test_a_cache_is_read_where_it_is_live() -> None:
    q, k_cache, v_cache = x(2, 1, 4, 8), x(2, 9, 2, 8), x(2, 9, 2, 8)
    lens, pads = torch.tensor([4, 9], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
    options = {"window_size": (4, -1), "softcap": 2.0, "alibi_slopes": SLOPES, "softmax_scale": 0.3}
    got = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lens, cache_leftpad=pads, num_splits=2, **options
    )
    for b in range(2):
        live = slice(int(pads[b]), int(lens[b]))
        keys, values = k_cache[b : b + 1, live], v_cache[b : b + 1, live]
        want = fa.flash_attn_func(q[b : b + 1], keys, values, **options)
        near(got[b], want[0].double(), BACKSTOP[torch.float32])
    whole = fa.flash_attn_with_kvcache(q, k_cache, v_cache)
    assert torch.equal(whole, fa.flash_attn_func(q, k_cache, v_cache))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_padding_and_back(dtype: torch.dtype) -> None:
    hidden = x(3, 5, 4, 2).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).to(dtype)
    packed, indices, ends, longest, used = fa.unpad_input(hidden, mask)
    assert ends.tolist() == [0, 3, 3, 7] and ends.dtype is torch.int32 and longest == 4
    assert used.tolist() == [3, 0, 4] and used.dtype is torch.int32
    assert torch.equal(packed, hidden[mask.bool()]) and indices.tolist() == [0, 1, 2, 11, 12, 13, 14]
    back = fa.pad_input(packed, indices, 3, 5)
    assert torch.equal(back, hidden * mask[..., None, None])
    weights = x(3, 5, 4, 2)
    (gradient,) = torch.autograd.grad(back, hidden, weights)
    assert torch.equal(gradient, weights * mask[..., None, None])
    rows = fa.index_first_axis(hidden.flatten(0, 1), indices)
    assert torch.equal(rows, packed)


def test_unused_tokens_are_kept_and_not_counted() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0]])
    packed, indices, ends, longest, used = fa.unpad_input(x(2, 4, 3), mask, unused)
    assert len(packed) == 5 and ends.tolist() == [0, 3, 5] and longest == 3 and used.tolist() == [2, 1]
    assert indices.tolist() == [0, 1, 2, 4, 5]


def test_a_padded_batch_runs_packed() -> None:
    """The way transformers and many trainings call flash-attn."""
    q, k, v = (x(3, 6, heads, 8) for heads in (4, 2, 2))
    mask = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    (q_packed, indices, ends, longest, _), (k_packed, *_), (v_packed, *_) = (
        fa.unpad_input(t, mask) for t in (q, k, v)
    )
    packed = fa.flash_attn_varlen_func(
        q_packed, k_packed, v_packed, ends, ends, longest, longest, causal=True
    )
    got = fa.pad_input(packed, indices, 3, 6)
    for b, n in enumerate((6, 2, 4)):
        near(got[b, :n], truth(q[b : b + 1, :n], k[b : b + 1, :n], v[b : b + 1, :n], causal=True)[0][0], 2e-6)
        assert not got[b, n:].any()
