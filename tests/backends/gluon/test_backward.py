"""Gradients of the Gluon engine without a GPU: which calls they take, and the schedule, by the very functions
that the kernel runs."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import polyflash
from polyflash.backends.gluon import backward_sm90, configs, places, schedule
from polyflash.backends.gluon.capabilities import CAPABILITIES
from polyflash.backends.gpu.launch import tile_count
from tests.backends.gluon.bounds import Case, Memory, cases, divided, in_python, launched, packed_calls

ROW = CAPABILITIES[-1]
KEYS, ROWS, CORES = schedule.KEYS.value, schedule.ROWS.value, 132
row_blocks, first_tile, tile_of = schedule.row_blocks.fn, schedule.first_tile.fn, schedule.tile_of.fn


def gradients(dims: int = 128, *, batch: int = 4, heads: int = 4, keys: int = 4096, **options):
    """The plan of the gradients."""
    dtype = options.pop("dtype", torch.bfloat16)
    q = torch.empty(batch, 16, 4096, dims, device="meta", dtype=dtype, requires_grad=True)
    k = torch.empty(batch, heads, keys, dims, device="meta", dtype=dtype)
    return polyflash.explain(q, k, k, target="cuda:sm90", **options).backward


def why(**options) -> str:
    found = gradients(**options)
    assert found.backend == "triton"
    return next("; ".join(v.reasons) for v in found.verdicts if v.row is ROW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [64, 80, 128])
def test_what_it_takes(dims: int, dtype: torch.dtype):
    for options in ({}, {"causal": True}, {"causal": True, "q_offset": 7}):
        found = gradients(dims, dtype=dtype, **options)
        assert found.backend == "gluon"
        assert found.config == configs.BACKWARD[configs.box_of(dims), bool(options)]
        assert "its bits repeat" in str(found)


def test_what_it_refuses_or_leaves_in_words():
    assert "has 128, asked for 256" in why(dims=256) or "head_dim" in why(dims=256)
    ints = torch.ones(4, dtype=torch.int32, device="meta")
    assert "no dropout" in why(dropout_p=0.1)
    slopes = torch.ones(16, device="meta")
    for more in ({"softcap": 3.0}, {"alibi_slopes": slopes}, {"softcap": 3.0, "sinks": slopes}):
        assert gradients(**more, causal=True).backend == gradients(64, **more, causal=True).backend == "gluon"
        assert "under 1024 keys" in why(**more, causal=True, keys=1023)
        assert "not known to be quicker" in why(**more)
    assert "kv_starts: not known" in why(kv_starts=ints)
    assert "under 4096 keys" in why(kv_lens=ints, keys=4095)
    assert gradients(kv_lens=ints).backend == gradients(window=(8, 0), keys=1152).backend == "gluon"
    assert "dtype" in why(dtype=torch.float32)
    assert "q_offset: not known" in why(causal=True, q_offset=ints)
    assert "costs as much as 128" in why(dims=72)
    assert "128 tiles of 128 keys leave too many of 132 cores idle" in why(batch=1, dims=64)
    assert gradients(batch=1, dims=64, keys=4096 + 128).backend == "gluon"  # 4 heads of 33
    assert "64 tiles of 128 keys leave too many of 132 cores idle" in why(batch=1, dims=128, keys=2048)
    assert gradients(batch=1, dims=128, keys=2048 + 128).backend == "gluon"  # 4 heads of 17
    assert gradients(batch=1, heads=8).backend == "gluon"


@pytest.mark.parametrize(
    "members, longest, backend",
    [
        (4, None, "gluon"),
        (16, None, "gluon"),
        (17, None, "triton"),
        (17, 4095, "triton"),
        (17, 4096, "gluon"),
    ],
)
def test_packed_members_count_by_their_mean(members: int, longest: int | None, backend: str):
    """Over members, or over keys as far as the longest tells: 4,096 of 16,384 make it 1,024."""
    q = torch.empty(16384, 16, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    bounds = torch.zeros(members + 1, dtype=torch.int32, device="meta")
    how = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_k": longest}
    found = polyflash.explain(q, q, q, **how, target="cuda:sm90")
    assert found.backend == found.backward.backend == backend


def test_a_call_follows_its_sizes():
    """One route, whose gradients are those of either row."""
    for batch, backend in ((1, "triton"), (2, "gluon")):
        assert gradients(batch=batch, heads=2).backend == backend


@pytest.fixture(scope="module", autouse=True)
def kernels_in_python() -> Iterator[None]:
    with in_python(), pytest.MonkeyPatch.context() as patch:
        for name in ("tile_of", "find_member", "find_rows", "span", "stand", "row_blocks"):
            patch.setattr(backward_sm90, name, getattr(backward_sm90, name).fn)
        yield


def test_every_visible_pair_is_in_a_block():
    """And every pair of a block from `whole` to `bare` is visible; a row block has its keys' tiles from
    `first_tile` on without a gap, so each knows how many add to it before."""
    for case in cases():
        t, n, c = launched(case, ROWS, KEYS)
        own = places.stand(0, 0, 0, t, n, c)
        sees = [case.interval(i) for i in range(case.rows)]
        adders: dict[int, list[int]] = {}
        for i_n in range(-(-case.keys // KEYS)):
            lo, hi = i_n * KEYS, (i_n + 1) * KEYS
            start, whole, bare, end = row_blocks(lo, own, c)
            assert 0 <= start <= end <= -(-case.rows // ROWS), case
            assert start <= whole <= bare <= end or start == end, case
            seeing = {i // ROWS for i, (first, last) in enumerate(sees) if max(first, lo) < min(last, hi)}
            assert seeing <= set(range(start, end)), case
            assert all(first <= lo and hi <= last for first, last in sees[whole * ROWS : bare * ROWS]), case
            if whole == bare and end - start > 4:  # all are masked: for a reason
                few = (
                    case.window != (None, None) and sum(max(x or 0, 0) for x in case.window) < KEYS + 2 * ROWS
                )
                assert few or not own.start <= lo <= hi <= own.live, case
            for i_m in range(start, end):
                adders.setdefault(i_m, []).append(i_n)
        for i_m, tiles in adders.items():
            first = first_tile(i_m, own, c)
            assert tiles == list(range(first, first + len(tiles))), (case, i_m)


def test_heads_of_a_group_are_walked_side_by_side():
    """Every head of every row block once, from the last block on: a head that ended for one program and not
    for the next would have it wait."""
    place, n = SimpleNamespace(i_h=2, start=3, end=8), SimpleNamespace(group=4)
    for group in (1, 4):
        n.group, c = group, SimpleNamespace(GROUPED=group > 1)
        walked = [backward_sm90.find_rows(i, place, n, c) for i in range(5 * group)]
        heads = range(2 * group, 3 * group)
        assert walked == [(i_h, i_m) for i_m in reversed(range(3, 8)) for i_h in heads]


def test_packed_tiles_hold_every_key_once():
    """Of every member and of nobody, whose blocks of rows are where `center` puts them."""
    for (rows, _, at_q, at_k, total_q, total_k), _ in packed_calls():
        t = SimpleNamespace(kv_lens=None, kv_starts=None, q_offset=None)
        t.cu_seqlens_q, t.cu_seqlens_k = Memory(*at_q), Memory(*at_k)
        n = divided(
            tile_count(total_k, KEYS, len(rows), True)[0], num_kv_heads=3, heads=1, seqlen_q=total_q,
            seqlen_k=total_k, offset=0, left=None, members=len(rows),
        )  # fmt: skip
        c = SimpleNamespace(
            PACKED=True, SHORT=True, OWN=True, HAS_RIGHT=True, HAS_LEFT=False, BELOW=False, ALIBI=False
        )
        found, blocks = set(), {}
        for i_t in range(n.num_tiles):
            place = backward_sm90.find_place.fn(i_t, t, n, c)
            first = place.own.first_k
            stored = range(first + place.j_0, first + min(place.j_0 + KEYS, place.keys))
            assert found.isdisjoint(stored)
            found |= set(stored)
            for i_m in range(place.start, place.end):
                row = place.own.first_q + i_m * ROWS
                assert row < place.own.first_q + place.own.rows
                assert blocks.setdefault(place.i_w + i_m, row) == row, "two blocks of rows in one place"
        assert found == set(range(total_k))
        assert max(blocks, default=0) < tile_count(total_q, ROWS, len(rows), True)[0]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("length, planes", [(300, 40), (2048, 20), (4096, 9)])
def test_programs_wait_for_earlier_ones_alone(length: int, planes: int, heads: int, kind: str, group: int):
    """As many as cores run; each adds to its row blocks, and waits for those of earlier keys. All end, every
    tile is made once, and heads that take turns keep cores from waiting."""
    case = Case(length, length, causal=kind != "full", window=(600 if kind == "window" else None, None))
    t, n, c = launched(case, ROWS, KEYS)
    own = places.stand(0, 0, 0, t, n, c)
    tiles = -(-length // KEYS)
    heads = schedule.heads_of(planes, heads)
    cores, added, made, work = [0.0] * CORES, {}, set(), 0
    for i_t in range(planes * tiles):  # the order in which they start
        plane, i_n = tile_of(i_t, divided(tiles), heads, False)
        assert 0 <= plane < planes and (plane, i_n) not in made
        made.add((plane, i_n))
        start, _, _, end = row_blocks(i_n * KEYS, own, c)
        now = heapq.heappop(cores)
        for i_m, head in product(reversed(range(start, end)), range(group)):
            count, since = added.get((plane, i_m, head), (0, 0.0))
            assert count == i_n - first_tile(i_m, own, c), "waits for a program that has not started"
            now = max(now + 1.0, since)
            added[plane, i_m, head] = count + 1, now
        work += (end - start) * group
        heapq.heappush(cores, now)
    assert heads == 1 or work / CORES / max(cores) > 0.5
