"""Published defects and faults of paged caches (testing method §5.8 and §8.1), by id, over a cache's tables.

Those of the allocator, of appends, forks and swaps are in the files beside this one. `NOT_HERE` says why a
cache on a CPU cannot express some.
"""

from __future__ import annotations

import math
import mmap
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyflash import SpecError
from polyflash.api import attention_paged
from polyflash.kvcache import KVCache, Request
from tests.device import CONTENTS, ON_A_CPU
from tests.kvcache.plain import DIM, DIM_V, GROUP, HEADS, Token, Tokens, cache_of, expected, filled, hold
from tests.tolerance import same_bits

NOT_HERE = {
    "PF17": "no quantised pages yet: they come with quantisation",
    "PF18": "no scales yet",
    "PF21": "one CPU has no streams; the docstring of KVCache says who orders them",
    "PF26": "nothing of a cache is kept on disk",
    "B-pag-19": "no scales yet",
}
Held = dict[Request, list[Token]]


def scattered(page_size: int, *counts: int, seed: int = 0, num_pages: int = 0) -> tuple[KVCache, Held]:
    """Requests whose pages stand in any order over a pool of garbage, most of them with strangers between."""
    tokens = Tokens(seed=seed)
    cache = cache_of(num_pages or sum(-(-n // page_size) for n in counts) + 7, page_size)
    order = torch.randperm(cache.num_pages, generator=tokens.generator).tolist()
    cache._pages._free[:] = order
    for pool in (cache.k_pages[0], cache.v_pages[0]):
        pool.fill_(math.nan)
    return cache, filled(cache, tokens, *counts)


def operands(cache: KVCache, held: Held) -> tuple[Tensor, ...]:
    q = Tokens(seed=3).queries(len(held))
    return q, cache.k_pages[0], cache.v_pages[0], cache.page_table(list(held)), cache.kv_lens(list(held))


def paged(*given: Tensor, **options: Any) -> Any:
    """Contents on a device are read where a call asks for it."""
    return attention_paged(*given, causal=True, return_lse=True, **{"checked": not ON_A_CPU, **options})


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 48, 64, 128, 256])
def test_B_pag_04_B_pag_16_pages_of_any_size_in_any_order(page_size: int):
    """A tile of keys that spans small pages reads each of them, and not the neighbours of the first."""
    cache, held = scattered(page_size, 300, 1, 17, 129)
    requests, counts = list(held), [1, 1, 5, 40]
    q = Tokens(seed=1).queries(sum(counts))
    hold(cache.attend(q, requests, counts=counts, return_lse=True), expected(q, [*held.values()], counts))
    q = q[: len(requests)]
    hold(cache.attend(q, requests, return_lse=True), expected(q, [*held.values()], [1] * 4))
    whole = cache.page_table(requests)
    if page_size < 128:
        assert not torch.equal(whole[0], whole[0].sort().values)


@pytest.mark.parametrize("fill", [math.nan, math.inf, 65504.0, -3.0])
def test_PF8_B_pag_03_what_no_length_reaches_changes_no_bit(fill: float):
    """Free pages and the tails of last pages, and the columns of the table behind them."""
    cache, held = scattered(16, 37, 5, 64)
    given = operands(cache, held)
    want = paged(*given)
    live = cache.slot_mapping(list(held))
    for pool in (cache.k_pages[0], cache.v_pages[0]):
        flat = pool.flatten(0, 1)
        keep = flat[live]
        flat.fill_(fill)
        flat[live] = keep
    q, k, v, table, lens = given
    columns = torch.arange(table.shape[1]) >= (lens[:, None] + 15) // 16
    for entry in (-1, 0, 2**31 - 1, -(2**31)):
        got = paged(q, k, v, table.masked_fill(columns, entry), lens)
        same_bits(got.out, want.out, f"{entry}")
        same_bits(got.lse, want.lse, f"{entry}")
    assert torch.isfinite(want.out).all()


@pytest.mark.parametrize("entry", [-1, 23, 2**31 - 1, -(2**31)])
def test_PF1_PF2_P25_an_entry_outside_the_pool_is_an_error(entry: int):
    cache, held = scattered(4, 9, 6, num_pages=23)
    given = list(operands(cache, held))
    for place in ((0, 0), (0, 2), (1, 1)):
        table = given[3].clone()
        table[place] = entry
        for checked in CONTENTS:
            with pytest.raises(SpecError):
                paged(*given[:3], table, given[4], checked=checked)
    hold(paged(*given), expected(given[0], [*held.values()], [1, 1]))


def test_PF3_the_same_page_twice_is_read_twice():
    cache, held = scattered(4, 8, 8)
    q, k, v, table, lens = operands(cache, held)
    tokens = [*held.values()]
    table[0, 1] = table[0, 0]
    table[1, 0] = table[0, 0]
    hold(
        paged(q, k, v, table, lens),
        expected(q, [tokens[0][:4] * 2, [*tokens[0][:4], *tokens[1][4:]]], [1, 1]),
    )


def test_PF5_B_pag_01_B_pag_10_capacity():
    """Exactly what a table and a pool hold works; one token more is an error, and nothing is written."""
    cache, held = scattered(4, 12, 8, num_pages=5)
    q, k, v, table, lens = operands(cache, held)
    assert cache.num_free_pages == 0 and int(lens.max()) == table.shape[1] * 4
    hold(paged(q, k, v, table, lens), expected(q, [*held.values()], [1, 1]))
    with pytest.raises(SpecError):
        paged(q, k, v, table, lens + torch.tensor([1, 0], dtype=torch.int32))
    with pytest.raises(SpecError):
        paged(q, k, v, table[:, :2], lens)
    before = k.clone(), v.clone()
    with pytest.raises(ValueError):
        cache.append(list(held), torch.zeros(2, HEADS, DIM), torch.zeros(2, HEADS, DIM_V))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


def test_PF6_B_pag_09_lengths_and_tables_of_another_kind():
    cache, held = scattered(4, 9, 6)
    q, k, v, table, lens = operands(cache, held)
    for wrong in (
        lens.short(),
        lens.float(),
        lens.to("meta"),
        lens[:1],
        lens * 0 - 1,
        lens * 0 + 2**31 - 1,
    ):
        with pytest.raises((SpecError, TypeError)):
            paged(q, k, v, table, wrong)
    for wrong in (table.long(), table.float(), table[0], table[:1], table.to("meta")):
        with pytest.raises((SpecError, TypeError)):
            paged(q, k, v, wrong, lens)


def test_PF7_B_pag_02_tables_of_any_strides_between_guards():
    cache, held = scattered(4, 9, 9)
    q, k, v, table, lens = operands(cache, held)
    want = paged(q, k, v, table, lens)
    for guard in (0, -1, 2**31 - 1):
        wide = torch.full((7, 2 * table.shape[1] + 3), guard, dtype=torch.int32)
        views = (wide[2:4, 1 : 1 + table.shape[1]], wide[1:5:2, 3::2], wide[4:6].flip(0)[:, : table.shape[1]])
        for view in (*views, wide.T[2 : 2 + table.shape[1], 1:3].T):
            view = view[:, : table.shape[1]]
            view.copy_(table)
            same_bits(paged(q, k, v, view, lens).out, want.out)
            view.fill_(guard)
    one = paged(q, k, v, table[:1].expand(2, -1), lens)
    hold(one, expected(q, [next(iter(held.values()))] * 2, [1, 1]))


@pytest.mark.parametrize("lengths", [(70, 3, 20), (3, 70, 20), (3, 20, 70)])
def test_B_pag_08_the_longest_request_stands_anywhere(lengths: tuple[int, ...]):
    cache, held = scattered(16, *lengths)
    counts = [min(n, 40) for n in lengths]
    q = Tokens(seed=2).queries(sum(counts))
    got = cache.attend(q, list(held), counts=counts, return_lse=True)
    hold(got, expected(q, [*held.values()], counts))


def test_B_pag_15_bounds_that_fall_or_leave_the_rows():
    cache, held = scattered(4, 9, 6)
    _, k, v, table, lens = operands(cache, held)
    q = Tokens().queries(5)
    for bounds in ((0, 3, 2), (1, 2, 5), (0, 2, 6), (0, 5)):
        with pytest.raises(SpecError):
            paged(q, k, v, table, lens, cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("stride", [1, 3])
def test_PF9_a_pool_twice_as_big_and_permuted(stride: int):
    """The same pages elsewhere: the same bits."""
    cache, held = scattered(16, 90, 33)
    q, k, v, table, lens = operands(cache, held)
    want = paged(q, k, v, table, lens)
    big = [torch.full((2 * stride * x.shape[0], *x.shape[1:]), math.nan)[::stride] for x in (k, v)]
    order = torch.randperm(big[0].shape[0])[: k.shape[0]]
    for into, pool in zip(big, (k, v), strict=True):
        into[order] = pool
    moved = torch.where(table >= 0, order[table.long().clamp(0)], -1).int()
    got = paged(q, *big, moved, lens)
    same_bits(got.out, want.out)
    same_bits(got.lse, want.lse)


def test_PF24_pools_beyond_31_bit_offsets():
    """2^31 elements and more, of which the system gives only the pages that are touched."""
    heads, dim, page_size = 32, 64, 256
    pages = 2**31 // (heads * dim * page_size) + 4
    try:
        memory = mmap.mmap(
            -1, 4 * pages * page_size * heads * dim, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
        )
    except (OSError, ValueError, AttributeError):
        pytest.skip("no 8 GiB of addresses here")
    k = torch.frombuffer(memory, dtype=torch.float32).view(pages, page_size, heads, dim)
    v = torch.zeros(pages, page_size, heads, 1, dtype=torch.float32)
    cache = KVCache.over(k, v)
    assert k.numel() > 2**31
    cache._pages._free.sort()  # the last pages first
    (request,) = cache.add()
    new_k, new_v = torch.randn(300, heads, dim), torch.randn(300, heads, 1)
    cache.append(request, new_k, new_v, counts=300)
    assert cache.page_table(request).tolist() == [[pages - 1, pages - 2]]
    got = cache.read(request)
    assert (
        torch.equal(got[0], new_k)
        and torch.equal(got[1], new_v)
        and int(cache.slot_mapping(request).max()) > 2**20
    )
    q = torch.randn(1, heads, dim)
    low = KVCache(2, page_size, heads, dim, head_dim_v=1, dtype=torch.float32)
    (same,) = low.add()
    low.append(same, new_k, new_v, counts=300)
    same_bits(cache.attend(q, request), low.attend(q, same))


def test_every_id_has_a_test_or_a_reason():
    folder = Path(__file__).parent
    named = " ".join(
        re.findall(r"def (test_\w+)", " ".join(p.read_text("utf-8") for p in folder.glob("test_*.py")))
    )
    wanted = [f"PF{n}" for n in range(1, 27)] + [f"B-pag-{n:02}" for n in range(1, 21)]
    for name in wanted:
        assert re.search(rf"_{name.replace('-', '_')}(_|\b)", named) or name in NOT_HERE, name


def test_rows_of_grouped_heads_read_their_own_head():
    """Guards the model itself: heads whose keys are other heads' would show."""
    cache, held = scattered(4, 9)
    q = Tokens(seed=8).queries(1)
    got = cache.attend(q, list(held), return_lse=True)
    swapped = [Token(t.k.flip(1), t.v.flip(1)) for t in next(iter(held.values()))]
    want = expected(q, [swapped], [1])
    assert float((got.out - want.out).abs().max()) > 1e-2 and q.shape[1] == HEADS * GROUP
