"""flash-attn 2's functions with `block_table`: results of contiguous caches, and what a refusal leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyflash import SpecError, quantize
from polyflash.integrations import flash_attn as fa
from polyflash.integrations import flash_attn_cache
from polyflash.kvcache import KVCache, Rope
from polyflash.quant import NAMED, Scheme, codec
from polyflash.quant.tensor import values_of
from tests.chosen import in_turn
from tests.integrations.test_flash_attn import CALLS, ENDS_K, ENDS_Q, LENGTHS_K, SLOPES, turned, x
from tests.rows_here import HERE
from tests.tolerance import BACKSTOP, near


def in_pages(
    k: Tensor, v: Tensor, lens: tuple[int, ...], page_size: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The first lens[b] keys of (batch, seqlen, heads, .) in shuffled pages, `columns` of them a request; NaN
    in all other slots."""
    batch = len(lens)
    table = torch.randperm(batch * columns + 3)[: batch * columns].view(batch, columns).int()
    pools = [t.new_full((batch * columns + 3, page_size, *t.shape[2:]), float("nan")) for t in (k, v)]
    for b, n in enumerate(lens):
        for j in range(n):
            for pool, t in zip(pools, (k, v), strict=True):
                pool[table[b, j // page_size].long(), j % page_size] = t[b, j]
    return pools[0], pools[1], table


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", CALLS)
def test_a_cache_in_pages_is_a_contiguous_one(name: str, page_size: int, ran: list[tuple[str, str]]) -> None:
    """Read, and written to: the result, the keys, and every slot that is not theirs."""
    asked = {n: t for n, t in CALLS[name][0].items() if n != "deterministic"}
    before = torch.tensor([0, 5, 19], dtype=torch.int32)
    if "alibi_slopes" in asked and asked["alibi_slopes"].ndim == 2:
        asked["alibi_slopes"] = torch.stack((SLOPES, SLOPES * 2, SLOPES * 3))
    for seqlen_q in (1, 2, 4):
        q, k, v = x(3, seqlen_q, 4, 12), x(3, 4, 2, 12), x(3, 4, 2, 8)
        k_cache, v_cache = x(3, 24, 2, 12), x(3, 24, 2, 8)
        k_pages, v_pages, table = in_pages(k_cache, v_cache, (0, 5, 19), page_size, -(-24 // page_size))
        befores = k_pages.clone(), v_pages.clone()
        options: dict[str, Any] = {"cache_seqlens": before, "return_softmax_lse": True, **asked}
        want = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
        got = fa.flash_attn_with_kvcache(q, k_pages, v_pages, k, v, block_table=table, **options)
        assert got[0].shape == want[0].shape and got[1].shape == want[1].shape
        near(got[0], want[0].double(), BACKSTOP[torch.float32], name)
        near(got[1], want[1].double(), 1e-6, name)
        own = torch.zeros(k_pages.shape[:2], dtype=torch.bool)
        for b, n in enumerate(before.tolist()):
            for j in range(n, n + 4):
                page, slot = int(table[b, j // page_size]), j % page_size
                own[page, slot] = True
                assert torch.equal(k_pages[page, slot], k[b, j - n])
                assert torch.equal(v_pages[page, slot], v[b, j - n])
        for now, then in zip((k_pages, v_pages), befores, strict=True):
            assert torch.equal(torch.nan_to_num(now[~own]), torch.nan_to_num(then[~own]))
        options["cache_seqlens"] = before + 4
        again = fa.flash_attn_with_kvcache(q, k_pages, v_pages, block_table=table, **options)
        assert torch.equal(again[0], got[0])
    assert {backend for _, backend in ran} == {HERE[0]}


def test_keys_are_rotated_as_those_of_a_contiguous_cache() -> None:
    q, k, v = x(2, 2, 4, 12), x(2, 2, 2, 12), x(2, 2, 2, 8)
    k_cache, v_cache = x(2, 9, 2, 12), x(2, 9, 2, 8)
    angles = torch.arange(9)[:, None] * torch.tensor([1.0, 0.3])
    k_pages, v_pages, table = in_pages(k_cache, v_cache, (3, 7), 4, 3)
    lens = torch.tensor([3, 7], dtype=torch.int32)
    for causal in (True, False):
        options: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": causal}
        options["cache_seqlens"] = lens
        want = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
        got = fa.flash_attn_with_kvcache(q, k_pages, v_pages, k, v, block_table=table, **options)
        near(got, want.double(), BACKSTOP[torch.float32])
        assert torch.equal(k_pages[table[1, 2].long(), 0], k_cache[1, 8])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("batch, new", [(2, 0), (0, 2), (0, 0)])
def test_rotary_and_nothing_to_rotate(batch: int, new: int, paged: bool) -> None:
    """No new keys: q alone turns. No requests: an empty result."""
    q, k, v = x(batch, 2, 4, 8), x(batch, new, 2, 8), x(batch, new, 2, 6)
    k_cache, v_cache = x(batch, 12, 2, 8), x(batch, 12, 2, 6)
    angles = torch.arange(12)[:, None] * torch.tensor([1.0, 0.3])
    options: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": 5}
    if paged:
        pools = k_cache.reshape(batch * 3, 4, 2, 8), v_cache.reshape(batch * 3, 4, 2, 6)
        table = torch.arange(batch * 3, dtype=torch.int32).view(batch, 3)
        got = fa.flash_attn_with_kvcache(q, *pools, k, v, block_table=table, **options)
    else:
        got = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
    assert got.shape == (batch, 2, 4, 6)
    still = q if new else turned(q, torch.full((batch, 2), 5), angles.cos(), angles.sin(), True).float()
    near(got, fa.flash_attn_func(still, k_cache[:, :5], v_cache[:, :5]).double(), BACKSTOP[torch.float32])


def test_a_shared_prefix_is_read_by_all() -> None:
    q, k, v = x(2, 1, 4, 8), x(2, 1, 2, 8), x(2, 1, 2, 8)
    k_cache, v_cache = x(2, 12, 2, 8), x(2, 12, 2, 8)
    k_cache[1, :8], v_cache[1, :8] = k_cache[0, :8], v_cache[0, :8]
    k_pages, v_pages, table = in_pages(k_cache, v_cache, (10, 9), 4, 3)
    table[1, :2] = table[0, :2]
    lens, pads = torch.tensor([10, 9], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    for options in ({}, {"cache_leftpad": pads}):
        want = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, **options)
        got = fa.flash_attn_with_kvcache(
            q, k_pages, v_pages, k, v, cache_seqlens=lens, block_table=table, **options
        )
        near(got, want.double(), BACKSTOP[torch.float32])


PER_TOKEN = Scheme()
CODED = {
    "int8": NAMED["int8"],
    "rotated": (Scheme(rotation="hadamard"), Scheme(dtype="fp8_e4m3", rotation="hadamard")),
    "int4": (Scheme(dtype="int4", symmetric=False), Scheme(dtype="int4", channels=16, symmetric=False)),
    "mxfp4": (Scheme(), NAMED["mxfp4"][1]),
}
TABLE = torch.tensor([[3, 1, 0], [4, 2, 5]], dtype=torch.int32)  # pages of 4


def mapped(request: int, column: int, page: int) -> Tensor:
    table = TABLE.clone()
    table[request, column] = page
    return table


@pytest.mark.parametrize(
    "change, words",
    [
        ({"cache_seqlens": torch.tensor([10, 2]).int()}, "cache_seqlens: got 2 to 10 keys, and 3 more"),
        ({"cache_seqlens": torch.tensor([-1, 2]).int()}, "cache_seqlens: got -1 to 2"),
        ({"cache_seqlens": 10}, "cache_seqlens: got 10 to 10"),
        ({"cache_seqlens": None}, "cache_seqlens: got None"),
        ({"block_table": mapped(1, 1, -1)}, "block_table: got page -1 for request 1 in column 1"),
        ({"block_table": mapped(0, 0, 6)}, "block_table: got page 6 for request 0 in column 0"),
        ({"block_table": mapped(1, 1, -1), "window_size": (0, 0), "cache_seqlens": 6}, "-1 for request 1"),
        ({"block_table": mapped(1, 1, 1), "cache_seqlens": 5}, "block_table: got two tokens for one slot"),
        ({"block_table": mapped(0, 1, 3), "cache_seqlens": 0, "k": x(2, 5, 2, 8), "v": x(2, 5, 2, 6)},
         "two tokens for one slot"),
        ({"block_table": TABLE.long()}, r"block_table: got torch\.int64"),
        ({"block_table": TABLE.tolist()}, r"block_table: got list of 2, wanted int32 \(2, max_blocks\)"),
        ({"block_table": TABLE[:1]}, r"block_table: got .*\(1, 3\), wanted int32 \(2, max_blocks\)"),
        ({"block_table": TABLE.flatten()}, r"block_table: got .*\(6,\)"),
        ({"block_table": TABLE.to("meta")}, "block_table device: got meta"),
        ({"cache_batch_idx": torch.tensor([0, 1])}, "cache_batch_idx: got one, wanted none"),
        ({"v_cache": x(6, 5, 2, 6)}, r"k_cache, v_cache: got \(6, 4, 2, 8\) and \(6, 5, 2, 6\)"),
        ({"k": x(2, 3, 2, 9)}, r"k: got .*\(2, 3, 2, 9\)"),
        ({"v": None}, "k, v: got k alone"),
    ],
)  # fmt: skip
def test_a_refused_call_leaves_the_pages_alone(change: dict[str, Any], words: str) -> None:
    """B-pag-01, B-pag-10, B-pag-12, B-pag-13: lengths beyond the table, entries outside the pool, tokens
    without a slot of their own: before a write."""
    for coded in (False, True):
        k_cache, v_cache = x(6, 4, 2, 8), x(6, 4, 2, 6)
        if coded:
            k_cache, v_cache = (quantize(pool, PER_TOKEN, layout="bshd") for pool in (k_cache, v_cache))
        before = [values_of(pool).clone() for pool in (k_cache, v_cache)]
        _refused(k_cache, v_cache, change, words)
        for pool, then in zip((k_cache, v_cache), before, strict=True):
            assert torch.equal(values_of(pool), then)


def _refused(k_cache: Any, v_cache: Any, change: dict[str, Any], words: str) -> None:
    call = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": x(2, 3, 2, 8),
        "v": x(2, 3, 2, 6),
        "cache_seqlens": torch.tensor([6, 4], dtype=torch.int32),
        "block_table": TABLE,
    }
    with pytest.raises(SpecError, match=words):
        fa.flash_attn_with_kvcache(x(2, 1, 4, 8), **call | change)


@pytest.mark.parametrize("name, dtype", in_turn(CODED, [torch.float32, torch.bfloat16], of=2), ids=str)
def test_new_keys_become_the_codes_that_a_kvcache_makes(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in pages and in chosen rows that lie head by head, and so is the output; by the codec's
    own operations too."""
    schemes, (cos, sin) = CODED[name], torch.randn(2, 40, 4)
    empty = [torch.zeros(3, 40, 2, width, dtype=dtype) for width in (16, 32)]
    k_rows, v_rows = (quantize(e, s, layout="bshd") for e, s in zip(empty, schemes, strict=True))
    cache, pages = (KVCache(10, 8, 2, 16, head_dim_v=32, dtype=dtype, quant=schemes) for _ in range(2))
    requests, rope = cache.add(2), Rope(interleaved=True, cos=cos, sin=sin)
    table = torch.tensor([[3, 1, 4, 0, 5], [9, 7, 2, 6, 8]], dtype=torch.int32)
    rows, lens = torch.tensor([2, 0]), torch.tensor([0, 0])
    for count in (5, 1, 9, 0):
        q, k, v = (x(2, count or 1, h, d).to(dtype) for h, d in ((4, 16), (2, 16), (2, 32)))
        k, v = k[:, :count], v[:, :count]
        if count == 9:
            monkeypatch.setattr(codec, "_KERNELS", {})
        options = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": lens, "causal": True}
        in_rows = fa.flash_attn_with_kvcache(q, k_rows, v_rows, k, v, cache_batch_idx=rows, **options)
        pools = pages.pools(0)
        in_pages = fa.flash_attn_with_kvcache(q, *pools, k, v, block_table=table, **options)
        if count:
            new = [y.flatten(0, 1) for y in (k, v, q)]
            turned = cache.append(requests, *new[:2], counts=count, rope=rope, q=new[2])
            want = cache.attend(turned, requests, counts=count).view_as(in_rows)
            assert torch.equal(in_pages, want)
            near(in_rows, want.double(), BACKSTOP[dtype], name)
        lens = lens + count
        for b, request in enumerate(requests):
            n = int(lens[b])
            for row, pool, held in zip((k_rows, v_rows), pools, cache.read_codes(request), strict=True):
                of_pages = pool.pages(table[b].long())
                for part in ("codes", "scale", "shift")[: 2 + (held.shift is not None)]:
                    kept = getattr(held, part)[0]
                    assert torch.equal(getattr(row, part)[rows[b], :, :n], kept)
                    assert torch.equal(getattr(of_pages, part).transpose(0, 1).flatten(1, 2)[:, :n], kept)


def test_codes_that_tokens_share_are_not_written() -> None:
    """In the caller's names, before anything is; and codes in another layout are not a cache."""
    q, k = x(2, 1, 4, 8), x(2, 1, 2, 8)
    rows = x(2, 64, 2, 8)
    good = quantize(rows, PER_TOKEN, layout="bshd")
    for name in ("int4", "int8-smooth"):
        shared = quantize(rows, NAMED[name][0], layout="bshd")
        assert fa.flash_attn_with_kvcache(q, shared, good, cache_seqlens=9).shape == q.shape
        for caches, word in (((shared, good), "k_cache"), ((good, shared), "v_cache")):
            with pytest.raises(SpecError, match=f"{word}: got codes of int.*Append to a .*KVCache"):
                fa.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=3)
    other = quantize(rows.transpose(1, 2), PER_TOKEN)
    with pytest.raises(SpecError, match="v_cache: got codes of layout 'bhsd', wanted 'bshd'"):
        fa.flash_attn_with_kvcache(q, good, other)
    assert torch.equal(good.codes, quantize(rows, PER_TOKEN, layout="bshd").codes)


def test_pages_at_capacity_and_those_that_nobody_needs() -> None:
    """The table filled to its last slot; -1 where a window sees nothing and where no key is yet."""
    k_cache, v_cache = x(6, 4, 2, 8), x(6, 4, 2, 6)
    q, k, v = x(2, 1, 4, 8), x(2, 3, 2, 8), x(2, 3, 2, 6)
    lens = torch.tensor([9, 5], dtype=torch.int32)
    table = mapped(1, 2, -1)
    whole = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table)
    assert torch.isfinite(whole).all() and torch.equal(k_cache[0, 3], k[0, 2])
    gone = table.clone()
    gone[0, 0] = -1
    near_by: dict[str, Any] = {"cache_seqlens": lens + 3, "causal": True, "window_size": (6, 0)}
    seen = fa.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table, **near_by)
    assert torch.equal(fa.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=gone, **near_by), seen)
    with pytest.raises(SpecError, match="page -1 for request 0 in column 0"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens + 3, block_table=gone)
    every = fa.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=TABLE)
    named = fa.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=TABLE, cache_seqlens=12)
    assert torch.equal(every, named)


class Waiting(TorchDispatchMode):
    """Keeps the ops for whose answer the host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        reads = any(
            word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.")
        )
        picks = "aten.index" in name and any(
            isinstance(i, Tensor) and i.dtype is torch.bool for i in (args[1] if len(args) > 1 else ()) or ()
        )
        self.ops += [name] * (reads or picks)
        return func(*args, **(kwargs or {}))


def test_a_token_without_a_page_is_not_written_on_a_device() -> None:
    """B-pag-12. What other devices do, on the CPU: nothing is refused by contents; -1 is no last page."""

    class Elsewhere(Tensor):
        @property
        def device(self) -> Any:
            return torch.device("meta")

    k_cache, v_cache = x(6, 4, 2, 8), x(6, 4, 2, 6)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    k, v = x(2, 3, 2, 8), x(2, 3, 2, 6)
    coded = [quantize(pool, PER_TOKEN, layout="bshd") for pool in (k_cache, v_cache)]
    at = torch.tensor([[2, 3, 4], [10, 11, 12]])
    with Waiting() as waiting:
        flash_attn_cache.append(k_cache, v_cache, k, v, at, mapped(0, 1, -1).as_subclass(Elsewhere))
        flash_attn_cache.append(*coded, k, v, at, mapped(0, 1, -1).as_subclass(Elsewhere))
    assert not waiting.ops
    for pool, now in zip(coded, (k_cache, v_cache), strict=True):
        want = quantize(now, PER_TOKEN, layout="bshd")
        assert torch.equal(pool.codes, want.codes) and torch.equal(pool.scale, want.scale)
    assert torch.equal(k_cache[3, 2:], k[0, :2]) and torch.equal(v_cache[5, 2:], v[1, :2])
    others = torch.ones(6, 4, dtype=torch.bool)
    others[3, 2:], others[5, 2:] = False, False
    assert torch.equal(k_cache[others], k_before[others]) and torch.equal(v_cache[others], v_before[others])
    k_before, v_before = k_cache.clone(), v_cache.clone()
    nowhere = torch.tensor([[-1, 99, -1]] * 2, dtype=torch.int32).as_subclass(Elsewhere)
    flash_attn_cache.append(k_cache, v_cache, -k, -v, at, nowhere)
    flash_attn_cache.append(k_cache[:0], v_cache[:0], -k, -v, at, nowhere)
    assert torch.equal(k_cache, k_before) and torch.equal(v_cache, v_before)


@pytest.mark.parametrize("name", [name for name in CALLS if "per request" not in name])
def test_packed_rows_over_pages(name: str, ran: list[tuple[str, str]]) -> None:
    asked = CALLS[name][0]
    q, k, v = (x(n, heads, 16) for n, heads in ((9, 4), (11, 2), (11, 2)))
    ends = (ENDS_Q, ENDS_K, 5, 5)
    want, want_lse, _ = fa.flash_attn_varlen_func(q, k, v, *ends, return_attn_probs=True, **asked)
    wide_k, wide_v = (x(4, 5, 2, 16) for _ in range(2))
    for b, n in enumerate(LENGTHS_K):
        wide_k[b, :n], wide_v[b, :n] = (t[int(ENDS_K[b]) : int(ENDS_K[b + 1])] for t in (k, v))
    for page_size in (1, 2, 16):
        k_pages, v_pages, table = in_pages(wide_k, wide_v, LENGTHS_K, page_size, -(-5 // page_size))
        paged = {"block_table": table, **asked}
        got, lse, none = fa.flash_attn_varlen_func(
            q, k_pages, v_pages, *ends, return_attn_probs=True, **paged
        )
        assert none is None and lse.shape == (4, 9)
        near(got, want.double(), BACKSTOP[torch.float32], name)
        near(lse, want_lse.double(), 1e-6, name)
        assert torch.equal(fa.flash_attn_varlen_func(q, k_pages, v_pages, *ends, **paged), got)
    assert {backend for _, backend in ran} == {HERE[0]}
