"""Pages and row bounds of the torch row, at its own door: the bits of contiguous keys, tile by tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyflash.backends.torch import forward
from polyflash.backends.torch.configs import Config
from polyflash.backends.torch.packed import runs
from polyflash.backends.torch.paged import Pages
from polyflash.reference import attention_reference
from polyflash.spec import Arguments
from tests.backends.torch.test_torch_rows import INF, MERGED, NAN, SMALL, arguments, ints, launch, qkv, randn
from tests.references import varlen_reference
from tests.tolerance import same_bits

LENS = (53, 0, 1, 31)
PAGE_SIZES = (1, 3, 16, 64)


def paged(
    x: Tensor, lens: tuple[int, ...], page_size: int, seed: int = 0, spare: int = 3
) -> tuple[Tensor, Tensor]:
    """Keys (batch, heads, seqlen, channels) in shuffled pages (num_pages, heads, page_size, channels) with
    NaN in all other slots, and the table, whose entries beyond the live keys are far outside."""
    wide = -(-x.shape[2] // page_size)
    needed = [-(-n // page_size) for n in lens]
    ids = torch.randperm(sum(needed) + spare, generator=torch.Generator().manual_seed(seed))
    pool = x.new_full((len(ids), x.shape[1], page_size, x.shape[3]), NAN)
    table = torch.full((len(lens), wide), -(2**31), dtype=torch.int32)
    at = 0
    for b, (n, pages) in enumerate(zip(lens, needed, strict=True)):
        table[b, :pages] = ids[at : at + pages].int()
        for j in range(n):
            pool[table[b, j // page_size].long(), :, j % page_size] = x[b, :, j]
        at += pages
    return pool, table


def run(q: Tensor, k: Tensor, v: Tensor, args: Arguments, config: Config = SMALL) -> tuple[Tensor, Tensor]:
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = q.new_full((*q.shape[:3], v.shape[3]), NAN)
    return forward.run(launch(config), q, k, v, out, q.new_full(q.shape[:3], NAN, dtype=kind), args)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (9, None)},
    "starts": {"kv_starts": ints(5, 0, 1, 30), "causal": True},
    "offset": {"causal": True, "q_offset": ints(40, 3, -1, 7)},
    "softcap": {"softcap": 0.8, "scale": -0.7},
    "sinks": {"sinks": randn(6, seed=6)},
    "alibi": {"alibi_slopes": randn(4, 6, seed=7).abs(), "causal": True},
    "invariant": {"batch_invariant": True, "causal": True},
}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_pages_have_the_bits_of_contiguous_keys(name: str, page_size: int) -> None:
    """At every page size, since a tile of gathered keys is the contiguous tile; and float64 is the oracle."""
    for rows, dtype in ((1, torch.float64), (5, torch.float64), (5, torch.bfloat16)):
        q, k, v = qkv(4, (6, 2), (rows, 53), (8, 5), dtype)
        options = CASES[name] | {"kv_lens": ints(*LENS)}
        args = arguments(options)
        want = run(q, k, v, args)
        (k_pool, table), (v_pool, _) = (paged(x, LENS, page_size) for x in (k, v))
        got = run(q, k_pool, v_pool, args._replace(page_table=table))
        for a, b in zip(got, want, strict=True):
            same_bits(a, b, f"{name} {rows} rows {dtype}")
        if dtype is torch.float64:
            options.pop("batch_invariant", None)
            right = attention_reference(q, k, v, **options)
            torch.testing.assert_close(got[0], right.out, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(got[1], right.lse, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_over_pages(causal: bool) -> None:
    """Members of unequal and of equal rows, one of them without rows, one without keys, a tail of nobody."""
    rows = (1, 5, 5, 0, 37, 1)
    lens = (53, 31, 31, 9, 0, 1)
    q = randn(1, 6, sum(rows) + 3, 8, seed=1)
    _, k, v = qkv(6, (6, 2), (1, 53), (8, 5))
    cu_q = torch.tensor((0, *rows)).cumsum(0).int()
    packed_k, packed_v = (torch.cat([x[b, :, :n] for b, n in enumerate(lens)], 1) for x in (k, v))
    right = varlen_reference(
        q[0].transpose(0, 1), packed_k.transpose(0, 1), packed_v.transpose(0, 1), cu_q,
        torch.tensor((0, *lens)).cumsum(0).int(), causal=causal,
    )  # fmt: skip
    for page_size in PAGE_SIZES:
        (k_pool, table), (v_pool, _) = (paged(x, lens, page_size) for x in (k, v))
        args = Arguments(causal, None, True, kv_lens=ints(*lens), cu_seqlens_q=cu_q, page_table=table)
        out, lse = run(q, k_pool, v_pool, args)
        torch.testing.assert_close(out[0].transpose(0, 1), right.out, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(lse[0], right.lse, rtol=1e-11, atol=1e-12)


def test_equal_members_keep_their_own_lines_of_the_table() -> None:
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    args = Arguments(cu_seqlens_q=ints(0, 2, 4, 5, 5), kv_lens=ints(3, 2, 1, 1), page_table=table)
    found = [(r.first, r.members, r.rows) for r in runs(args, 5, 4)]
    assert found == [(0, 2, 2), (2, 1, 1)]


@pytest.mark.parametrize("wrong", [-1, 9, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("config", [SMALL, MERGED], ids=["small", "merged"])
def test_an_entry_outside_the_pool_hides_its_keys(wrong: int, config: Config) -> None:
    q, k, v = qkv(3, (6, 2), (5, 40), (8, 5))
    lens = (40, 40, 17)
    (k_pool, table), (v_pool, _) = (paged(x, lens, 8, spare=0) for x in (k, v))
    mask = torch.ones(3, 1, 1, 40, dtype=torch.bool)
    for b, page in ((0, 1), (1, 0), (1, 4), (2, 2)):
        table[b, page] = max(wrong, len(k_pool)) if wrong > 0 else wrong
        mask[b, ..., page * 8 : page * 8 + 8] = False
    args = Arguments(True, None, True, kv_lens=ints(*lens), page_table=table)
    got = run(q, k_pool, v_pool, args, config)
    right = attention_reference(q, k, v, causal=True, kv_lens=ints(*lens), mask=mask)
    torch.testing.assert_close(got[0], right.out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(got[1], right.lse, rtol=1e-11, atol=1e-12)
    empty = run(q, k_pool[:0], v_pool[:0], args, config)
    assert (empty[0] == 0).all() and (empty[1] == -INF).all()


def test_lengths_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices run, on the CPU: no length is read back, entries that nobody needs are clamped."""
    q, k, v = qkv(4, (6, 2), (5, 53), (8, 5))

    def on_device(x: Tensor | None, first: int, entries: int, default: Any) -> Any:
        return default if x is None else x[first : first + entries].long().view(-1, 1, 1, 1, 1)

    want = {n: run(q, k, v, arguments(o | {"kv_lens": ints(*LENS)}), MERGED) for n, o in CASES.items()}
    monkeypatch.setattr(forward, "_value", on_device)
    for name, options in CASES.items():
        (k_pool, table), (v_pool, _) = (paged(x, LENS, 16) for x in (k, v))
        args = arguments(options | {"kv_lens": ints(*LENS)})._replace(page_table=table)
        got = run(q, k_pool, v_pool, args, MERGED)
        torch.testing.assert_close(got, want[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", ["token-major", "fused", "padded", "one page for all", "stride 2"])
def test_pools_of_any_strides(form: str) -> None:
    q, k, v = qkv(4, (6, 2), (5, 53), (8, 8), torch.float32)
    (k_pool, table), (v_pool, _) = (paged(x, LENS, 16) for x in (k, v))
    if form == "one page for all":
        k_pool, v_pool = (x[table[0, 0]].expand_as(x) for x in (k_pool, v_pool))
    args = Arguments(True, None, True, kv_lens=ints(*LENS), page_table=table)
    want = run(q, k_pool.contiguous(), v_pool.contiguous(), args)
    if form == "token-major":
        k_pool, v_pool = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_pool, v_pool))
    elif form == "fused":
        k_pool, v_pool = torch.stack((k_pool, v_pool), 1).unbind(1)
    elif form == "padded":
        k_pool, v_pool = (torch.cat((x, x * 0 + 7), 2)[:, :, :16] for x in (k_pool, v_pool))
    elif form == "stride 2":
        k_pool, v_pool = (torch.stack((x, x * NAN), -1)[..., 0] for x in (k_pool, v_pool))
    table = torch.stack((table, table * 0 - 7), -1)[..., 0]
    for a, b in zip(run(q, k_pool, v_pool, args._replace(page_table=table)), want, strict=True):
        same_bits(a, b, form)


class Largest(TorchDispatchMode):
    """The largest number of elements that an op of this thread returned in memory of its own."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_memory_is_that_of_a_tile() -> None:
    """A pool, a table and live keys that grow make no larger tensor than a few of a tile."""
    sizes = []
    for pages, live in ((64, 1000), (4096, 1000), (4096, 65_000)):
        pool = torch.zeros(1, 2, 16, 8).expand(pages, 2, 16, 8)
        table = torch.arange(pages, dtype=torch.int32)[None]
        args = Arguments(kv_lens=ints(live), page_table=table)
        with Largest() as seen:
            run(torch.zeros(1, 4, 1, 8), pool, pool, args, Config(16, 512))
        sizes.append(seen.elements)
    assert sizes[0] == sizes[1] == sizes[2] <= 2 * 512 * 8 * 2, sizes


def bounded(bounds: Tensor, seqlen_k: int) -> Tensor:
    j = torch.arange(seqlen_k)
    return (j >= bounds[:, :1]) & (j < bounds[:, 1:])


@pytest.mark.parametrize("config", [SMALL, MERGED], ids=["small", "merged"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (9, 3)}, {"batch_invariant": True}], ids=str
)
def test_row_bounds(options: dict[str, Any], config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to a bool mask that says the same; tiles that no row sees are not visited."""
    q, k, v = qkv()
    generator = torch.Generator().manual_seed(4)
    bounds = torch.randint(-9, 70, (37, 2), generator=generator).int().sort(1).values
    bounds[3], bounds[5], bounds[8:16] = ints(20, 10), ints(60, 99), ints(17, 17)
    bounds[16:24, 0], bounds[16:24, 1] = 0, 53
    visited = []
    score_tile = forward.score_tile

    def spy(part: Any, b_q: Tensor, b_k: Tensor, i0: int, rows: int, j0: int, keys: int) -> Any:
        visited.append((i0, j0))
        return score_tile(part, b_q, b_k, i0, rows, j0, keys)

    monkeypatch.setattr(forward, "score_tile", spy)
    own = arguments(options | {"kv_lens": ints(53, 40)})
    got = run(q, k, v, own._replace(row_bounds=bounds), config)
    seen = bounded(bounds, 53)
    options = {n: x for n, x in options.items() if n != "batch_invariant"}
    right = attention_reference(q, k, v, mask=seen, kv_lens=ints(53, 40), **options)
    torch.testing.assert_close(got[0], right.out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(got[1], right.lse, rtol=1e-11, atol=1e-12)
    if config is SMALL and not options and not own.batch_invariant:
        assert not any(i0 == 8 for i0, _ in visited)
        for i0, j0 in set(visited):
            tile = bounds[i0 : i0 + 8].clamp(0, 53)
            tile = tile[tile[:, 0] < tile[:, 1]]
            assert int(tile[:, 0].min()) < j0 + 16 and int(tile[:, 1].max()) > j0


def test_row_bounds_make_no_matrix() -> None:
    rows = 4096
    q = torch.zeros(1, 1, rows, 8)
    bounds = torch.stack((torch.arange(rows) - 99, torch.arange(rows) + 1), 1).int()
    with Largest() as seen:
        run(q, q, q, Arguments(row_bounds=bounds), Config(64, 256))
    assert seen.elements <= max(64 * 256, rows * 8)


def test_pages_stand_for_a_tensor() -> None:
    pages = Pages(torch.arange(24.0).view(3, 1, 4, 2), ints(2, 0, 1, 1).view(2, 2))
    assert pages.shape == (2, 1, 8, 2)
    whole = pages.tile(0, 8, torch.float64)
    assert whole[0, 0, :, 0].tolist() == [16, 18, 20, 22, 0, 2, 4, 6] and whole.dtype is torch.float64
    part = pages.of(1, 1, 6).tile(3, 9, torch.float32)
    assert part[0, 0, :, 1].tolist() == [15, 9, 11, 0, 0, 0, 0, 0, 0] and part.is_contiguous()
    assert pages.of(1, 1, 0).tile(0, 4, torch.float32).eq(0).all()
    assert pages.mapped(0, 8) is None
    outside = Pages(pages.pool, ints(2, 3, -1, 1).view(2, 2))
    seen = outside.mapped(2, 5)
    assert seen is not None and seen[:, 0, 0, 0].tolist() == [
        [True] * 2 + [False] * 3,
        [False] * 2 + [True] * 3,
    ]
    assert outside.of(0, 1, 4).mapped(0, 8) is None
