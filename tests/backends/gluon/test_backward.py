"""Gradients of the Gluon engine without a GPU: which calls they take, and the schedule, by the very functions
that the kernel runs."""

from __future__ import annotations

import heapq
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import polyflash
from polyflash.backends.gluon import configs, schedule
from polyflash.backends.gluon.capabilities import CAPABILITIES

_, ROW = CAPABILITIES
KEYS, ROWS, CORES = schedule.KEYS.value, schedule.ROWS.value, 132
row_blocks, tile_of = schedule.row_blocks.fn, schedule.tile_of.fn


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
    assert "no window" in why(window=(8, 0))
    assert "no kv_lens" in why(kv_lens=torch.ones(4, dtype=torch.int32, device="meta"))
    assert "dtype" in why(dtype=torch.float32)
    offsets = torch.zeros(4, dtype=torch.int32, device="meta")
    assert "as an int" in why(causal=True, q_offset=offsets)
    assert "costs as much as 128" in why(dims=72)
    assert "128 tiles of 128 keys leave some of 132 cores idle" in why(batch=1)
    assert gradients(batch=1, keys=4096 + 128).backend == "gluon"  # 4 heads of 33
    assert gradients(batch=1, heads=8).backend == "gluon"


def test_a_call_follows_its_sizes():
    """One route, whose gradients are those of either row."""
    for batch, backend in ((1, "triton"), (2, "gluon")):
        assert gradients(batch=batch).backend == backend


@pytest.mark.parametrize("offset", [0, 1, 63, 64, 100, -1, -64, -100, -300, 500])
@pytest.mark.parametrize("rows, keys", [(1, 1), (64, 128), (65, 129), (300, 200), (200, 700), (640, 640)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_visible_pair_is_in_a_block(rows: int, keys: int, offset: int, causal: bool):
    """And every pair of a block from `whole` on is visible; a row block has its keys' tiles from the first on
    without a gap, so each knows how many add to it before."""
    offset = min(max(offset, -rows), keys)
    n = SimpleNamespace(seqlen_q=rows, seqlen_k=keys, offset=offset)
    c = SimpleNamespace(HAS_RIGHT=causal)
    ends = [min(keys, i + offset + 1) if causal else keys for i in range(rows)]  # of what a row sees
    adders: dict[int, list[int]] = {}
    for i_n in range(-(-keys // KEYS)):
        start, whole, end = row_blocks(i_n * KEYS, n, c)
        assert 0 <= start <= whole <= end == -(-rows // ROWS)
        sees = {i // ROWS for i, limit in enumerate(ends) if limit > i_n * KEYS}
        assert sees <= set(range(start, end))
        assert all(limit >= (i_n + 1) * KEYS for limit in ends[whole * ROWS :])
        for i_m in range(start, end):
            adders.setdefault(i_m, []).append(i_n)
    assert all(tiles == list(range(len(tiles))) for tiles in adders.values())
    # `finish_dq` reads what these rows have, and 0 of others
    assert {i // ROWS for i in range(rows) if not causal or i + offset >= 0} <= set(adders)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("length, planes", [(300, 40), (2048, 20), (4096, 9)])
def test_programs_wait_for_earlier_ones_alone(length: int, planes: int, heads: int, causal: bool):
    """As many as cores run; each adds to its row blocks, and waits for those of earlier keys. All end, every
    tile is made once, and heads that take turns keep cores from waiting."""
    n = SimpleNamespace(seqlen_q=length, seqlen_k=length, offset=0)
    c = SimpleNamespace(HAS_RIGHT=causal)
    tiles = -(-length // KEYS)
    cores, added, made, work = [0.0] * CORES, {}, set(), 0
    for i_t in range(planes * tiles):  # the order in which they start
        plane, i_n = tile_of(i_t, tiles, planes, heads, False)
        assert 0 <= plane < planes and (plane, i_n) not in made
        made.add((plane, i_n))
        start, _, end = row_blocks(i_n * KEYS, n, c)
        now = heapq.heappop(cores)
        for i_m in reversed(range(start, end)):
            count, since = added.get((plane, i_m), (0, 0.0))
            assert count == i_n, "waits for a program that has not started"
            now = max(now + 1.0, since)
            added[plane, i_m] = count + 1, now
        work += end - start
        heapq.heappush(cores, now)
    assert heads == 1 or work / CORES / max(cores) > 0.5
