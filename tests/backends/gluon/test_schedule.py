"""Schedules of the Gluon engine, by the very functions that its kernels run: every tile once, every visible
key in a block that is walked, every block that hides keys masked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon")

from polyflash.backends.gluon import mending, places, schedule
from polyflash.backends.gluon.places import Place
from polyflash.backends.gpu.launch import tile_count
from tests.backends.gluon.bounds import Memory, cases, divided, in_python, launched, packed_calls
from tests.chosen import chosen

CORES = 132
tile_of, fixed_tile = schedule.tile_of.fn, schedule.fixed_tile.fn
key_blocks = schedule.key_blocks.fn


def fixed(total: int, programs: int) -> list[list[int]]:
    """The tiles of each program without a counter."""
    found = []
    for i_p in range(programs):
        mine, i_round, i_t = [], 0, i_p
        while i_t < total:
            mine.append(i_t)
            i_t = fixed_tile(i_round + 1, i_p, programs)
            i_round += 1
        found.append(mine)
    return found


def counted(total: int, programs: int, seed: int) -> list[list[int]]:
    """With one: programs ask for their next tile in any order, and put the counter back."""
    draw, counter, left = random.Random(seed), 0, 0
    found: list[list[int]] = [[] for _ in range(programs)]
    at = dict(enumerate(range(programs)))
    while at:
        i_p = draw.choice(sorted(at))
        if at[i_p] < total:
            found[i_p].append(at[i_p])
            at[i_p], counter = counter + programs, counter + 1
        else:
            del at[i_p]
            left += 1
    assert left == programs and counter == total
    return found


@pytest.mark.parametrize("cores", [1, 3, CORES])
@pytest.mark.parametrize("num_tiles", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("planes", [1, 2, 5, 16, 41])
def test_every_tile_is_walked_once(planes: int, num_tiles: int, cores: int):
    total, n = planes * num_tiles, divided(num_tiles)
    wanted = sorted(product(range(planes), range(num_tiles)))
    for programs, most, causal in product({min(total, cores), total}, (1, 2, 4, 8), (False, True)):
        heads = schedule.heads_of(planes, most)
        for walks in (fixed(total, programs), counted(total, programs, most)):
            tiles = [tile_of(i_t, n, heads, causal) for walk in walks for i_t in walk]
            assert sorted(tiles) == wanted, (programs, most, causal)


@pytest.mark.parametrize("planes, most, heads", [(10, 1, 1), (10, 4, 2), (12, 8, 6), (16, 8, 8), (7, 8, 7)])
def test_the_longest_tiles_of_a_group_come_first(planes: int, most: int, heads: int):
    num_tiles, n = 9, divided(9)
    assert schedule.heads_of(planes, most) == heads
    for first in range(0, planes, heads):
        start = first * num_tiles
        places = [tile_of(i, n, heads, True) for i in range(start, start + heads * num_tiles)]
        assert {plane for plane, _ in places} == set(range(first, first + heads))
        rows = [i_m for _, i_m in places]
        assert rows == sorted(rows, reverse=True)


def test_marked_tiles_are_found_on_the_way_back(monkeypatch):
    """Each of a program's own, once, by what its producer keeps: of a tile the one before it."""
    total, draw = 300, random.Random(0)
    marked = set(draw.sample(range(total), 100))
    monkeypatch.setattr(mending, "gl", SimpleNamespace(load=Memory.load))
    monkeypatch.setattr(mending, "is_marked", lambda i_t, t, n, c: i_t in marked)
    find, n = mending.find_marked.fn, SimpleNamespace(total=total)
    for walks in (fixed(total, 16), counted(total, 16, 0), fixed(total, total)):
        own, last = [0] * total, [total] * len(walks)
        for i_p, walk in enumerate(walks):
            for i_t in walk:
                own[i_t], last[i_p] = last[i_p], i_t
        t, found = SimpleNamespace(own=Memory(*own)), []
        for i_t in last:
            i_t = find(i_t, t, n, None)
            while i_t < total:
                found.append(i_t)
                i_t = find(own[i_t], t, n, None)
        assert len(found) == 100 and set(found) == marked


def test_a_zigzag_ends_together():
    """Two rounds of one head's rows: a program's long tile and its short one are as long as any other's."""
    walks = fixed(2 * CORES, CORES)
    assert {sum(walk) for walk in walks} == {2 * CORES - 1}


def test_a_factor_divides():
    """What is below 2^30; both numbers are an int32."""
    draw = random.Random(0)
    for by in (
        1,
        2,
        3,
        7,
        1000,
        2**20 - 1,
        2**20 + 1,
        2**29,
        *(draw.randrange(1, 2**30) for _ in range(500)),
    ):
        inverse, shift = schedule.inverse_of(by)
        assert inverse < 2**31 and shift < 62
        for x in (
            0,
            by - 1,
            by,
            2**30 // by * by - 1,
            2**30 - 1,
            *(draw.randrange(2**30) for _ in range(20)),
        ):
            assert x * inverse >> shift == x // by, (x, by)


@pytest.fixture(scope="module", autouse=True)
def place_of() -> Iterator[Callable[..., Place]]:
    """The kernel's own, in Python."""
    with in_python():
        yield places.place_of.fn


@pytest.mark.parametrize("block_m, block_n", chosen([(128, 128), (192, 128), (128, 64)], (128, 128)))
def test_blocks_hold_what_rows_see(place_of, block_m: int, block_n: int):
    """Every visible key in one block that is walked; what a block hides is masked, at that end; and no block
    is walked or masked for nothing."""
    for case in cases():
        t, n, c = launched(case, block_m, block_n)
        for i_m in range(-(-case.rows // block_m)):
            place = place_of(0, i_m, t, n, c)
            assert place.i_m == i_m and place.rows == case.rows and place.first_q == place.first_k == 0
            assert not c.OWN or place.position + place.rest == case.position
            assert max(abs(x) for x in (n.offset, n.left or 0, place.low, place.high)) < 2**31
            tile = key_blocks(i_m * block_m, 0, place, c, block_m)
            hold_blocks(case, place, c, range(i_m * block_m, (i_m + 1) * block_m), tile)
            least = tile[0] - tile[1]
            for first in range(i_m * block_m, (i_m + 1) * block_m, 64):  # rows of a consumer
                own = key_blocks(first, least, place, c, 64)
                assert own[0] <= tile[0] and own[0] - own[1] >= least, (case, "a block that nobody loads")
                hold_blocks(case, place, c, range(first, first + 64), own)


def hold_blocks(case, place, c, rows: range, blocks: tuple[int, int, int, int]) -> None:
    """Blocks that these rows walk hold what they see."""
    end, count, masked, bare = blocks
    block_n = c.BLOCK_N
    assert 1 <= masked <= bare <= count <= end <= max(-(-case.keys // block_n), 1), case
    found = [seen_by(i, place, c) for i in rows]
    there = found[: max(case.rows - rows.start, 0)]
    for i, (lo, hi) in zip(rows, there, strict=False):
        wanted = case.interval(i)
        assert (lo, hi) == wanted or (lo >= hi and wanted[0] >= wanted[1]), (case, i)
        assert lo >= hi or ((end - count) * block_n <= lo and hi <= end * block_n), (case, i)
        for place_in_walk in range(masked, count):
            j = end - 1 - place_in_walk
            assert hi >= (j + 1) * block_n, (case, i, "hides keys at its end")
            assert place_in_walk >= bare or lo <= j * block_n, (case, i, "hides keys at its start")
    some = [(lo, hi) for lo, hi in found if lo < hi]
    if count > 1:
        assert max((hi for _, hi in some), default=0) > (end - 1) * block_n, (case, "nobody sees it")
        assert min(lo for lo, _ in some) < (end - count + 1) * block_n, (case, "nobody sees it")
    if masked > 1:
        j = end - masked
        hidden = any(lo > j * block_n or hi < (j + 1) * block_n for lo, hi in found)
        assert hidden, (case, "a block that needs no mask")
    if bare < count:
        assert any(lo > (end - 1 - bare) * block_n for lo, _ in found), (case, "needs no mask")


def seen_by(i: int, place: Place, c: SimpleNamespace) -> tuple[int, int]:
    """Keys of a row as `rows_seen` has them."""
    lo = max(place.start if c.BELOW else 0, i + place.low if c.HAS_LEFT else 0, 0)
    hi = min(place.live, i + place.high + 1) if c.HAS_RIGHT else place.live
    return lo, max(hi, 0)


@pytest.mark.parametrize("block_m", [128, 192])
def test_packed_tiles_hold_every_row_once(place_of, block_m: int):
    """Of every member and of nobody; the keys are the member's own, none where a tile has no rows."""
    for (rows, keys, at_q, at_k, total_q, total_k), draw in packed_calls():
        lens = [draw.randrange(n + 1) for n in keys]
        t = SimpleNamespace(
            cu_seqlens_q=Memory(*at_q), cu_seqlens_k=Memory(*at_k), kv_lens=Memory(*lens), kv_starts=None,
            q_offset=None,
        )  # fmt: skip
        n = SimpleNamespace(
            num_heads=3, seqlen_q=total_q, seqlen_k=total_k, offset=0, left=None, members=len(rows)
        )
        c = SimpleNamespace(
            BLOCK_M=block_m, BLOCK_N=128, PACKED=True, SHORT=True, OWN=True, HAS_RIGHT=True, HAS_LEFT=False,
            BELOW=False, ALIBI=False, HEADS=1,
        )  # fmt: skip
        found: dict[int, tuple[int, int, int]] = {}
        tiles, _ = tile_count(total_q, block_m, len(rows), True)
        n = SimpleNamespace(**vars(n), **vars(divided(tiles)))
        for i_t in range(tiles):
            place = place_of(2, i_t, t, n, c)
            member = places.member_of.fn(tiles - 1 - i_t, t, n, c)  # the last rows come first
            assert places.place_in.fn(i_t, member, t, n, c) == place
            for i in range(place.i_m * block_m, min((place.i_m + 1) * block_m, place.rows)):
                assert place.first_q + i not in found
                found[place.first_q + i] = place.first_k, place.live, i + place.high + 1
            end, count, _, _ = key_blocks(place.i_m * block_m, 0, place, c, block_m)
            assert (end, count) == (1, 1) or place.i_m * block_m < place.rows
        wanted = {}
        for b, (first, size) in enumerate(zip(at_q, rows, strict=False)):
            for i in range(size):
                wanted[first + i] = at_k[b], lens[b], i + lens[b] - size + 1
        nobody = range(at_q[-1], total_q)
        assert sorted(found) == list(range(total_q)) and all(found[i][1] == 0 for i in nobody)
        assert all(found[i] == x for i, x in wanted.items())
