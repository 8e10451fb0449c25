"""Schedules of the Gluon engine, by the very functions that its kernels run: every tile once, every visible
key in a block that is walked, every block that hides keys masked."""

from __future__ import annotations

import random
from itertools import product
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon")

from polyflash.backends.gluon import schedule

CORES = 132
tile_of, fixed_tile, key_blocks = (f.fn for f in (schedule.tile_of, schedule.fixed_tile, schedule.key_blocks))


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
    total = planes * num_tiles
    wanted = sorted(product(range(planes), range(num_tiles)))
    for programs, heads, causal in product({min(total, cores), total}, (1, 2, 4, 8), (False, True)):
        for walks in (fixed(total, programs), counted(total, programs, heads)):
            tiles = [tile_of(i_t, num_tiles, planes, heads, causal) for walk in walks for i_t in walk]
            assert sorted(tiles) == wanted, (programs, heads, causal)


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_the_longest_tiles_of_a_group_come_first(heads: int):
    planes, num_tiles = 10, 9
    for first in range(0, planes, heads):
        start = first * num_tiles
        end = start + min(heads, planes - first) * num_tiles
        places = [tile_of(i, num_tiles, planes, heads, True) for i in range(start, end)]
        assert {plane for plane, _ in places} == set(range(first, min(first + heads, planes)))
        rows = [i_m for _, i_m in places]
        assert rows == sorted(rows, reverse=True)


def test_a_zigzag_ends_together():
    """Two rounds of one head's rows: a program's long tile and its short one are as long as any other's."""
    walks = fixed(2 * CORES, CORES)
    assert {sum(walk) for walk in walks} == {2 * CORES - 1}


@pytest.mark.parametrize("offset", [-200, -64, -1, 0, 1, 63, 150, 400])
@pytest.mark.parametrize("seqlen_k", [1, 64, 65, 128, 200, 384])
@pytest.mark.parametrize("block_m, block_n", [(128, 128), (192, 128), (128, 64)])
def test_blocks_hold_what_rows_see(block_m: int, block_n: int, seqlen_k: int, offset: int):
    seqlen_q = 200
    offset = min(max(offset, -seqlen_q), seqlen_k)
    n = SimpleNamespace(seqlen_k=seqlen_k, offset=offset)
    for causal in (False, True):
        c = SimpleNamespace(BLOCK_M=block_m, BLOCK_N=block_n, HAS_RIGHT=causal)
        for i_m in range(-(-seqlen_q // block_m)):
            count, masked = key_blocks(i_m, n, c)
            assert 1 <= masked <= count <= -(-seqlen_k // block_n)
            rows = range(i_m * block_m, (i_m + 1) * block_m)
            ends = [min(seqlen_k, max(0, i + offset + 1)) if causal else seqlen_k for i in rows]
            assert max(ends) <= count * block_n
            assert count == 1 or max(ends) > (count - 1) * block_n, "a block that nobody sees"
            whole = count - masked  # the blocks behind the masked ones, walked last
            assert min(ends) >= whole * block_n
            assert masked == 1 or min(ends) < (whole + 1) * block_n, "a block that needs no mask"
