"""Shards and steps on paper: every row has one place, every visible pair is in one block, and what no row
sees is in none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from polyflash.parallel import places, schedule
from polyflash.parallel.cost import Link, Problem, chosen, explained
from polyflash.parallel.schedule import Segments, Shards, Sight

SIGHTS = {
    "all": Sight(),
    "causal": Sight(None, 0),
    "window": Sight(3, 0),
    "both sides": Sight(2, 5),
    "ahead": Sight(None, 4, (-2,)),
    "offset": Sight(1, 1, (7,)),
}


def lengths(ranks: int) -> set[int]:
    return {0, 1, 2, ranks - 1, ranks + 1, 2 * ranks - 1, 2 * ranks + 1, 97 * ranks + 3}


@pytest.mark.parametrize("order", schedule.ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
def test_every_row_has_one_place(ranks: int, order: str):
    packed = (ranks - 1, 0, 1, 2 * ranks + 1, 5)
    for members, pieces in itertools.product([*((n,) for n in lengths(ranks)), packed], (1, 3)):
        shards = Shards(members, ranks, order, pieces)
        rows = [shards.positions(rank) for rank in range(ranks * pieces)]
        assert [len(x) for x in rows] == [shards.held(rank) for rank in range(ranks * pieces)]
        assert sorted(np.concatenate(rows).tolist()) == list(range(sum(members)))
        who, at = shards.natural()
        assert all(rows[r][i] == n for n, (r, i) in enumerate(zip(who, at, strict=True)))
        if len(members) == 1:
            sizes = [sum(map(len, rows[r * pieces : (r + 1) * pieces])) for r in range(ranks)]
            assert max(sizes) - min(sizes) <= 2


def test_zigzag_holds_an_early_and_a_late_chunk():
    assert Shards((16,), 2).positions(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert Shards((16,), 2).positions(1).tolist() == list(range(4, 12))
    assert Shards((4, 8), 2).positions(1).tolist() == [
        1,
        2,
        6,
        7,
        8,
        9,
    ]  # both chunks of a member, then the next


def seen(sight: Sight, rows: int, keys: int) -> np.ndarray:
    """Which row sees which key, bool (rows, keys)."""
    at, j = np.arange(rows)[:, None] + sight.offsets[0], np.arange(keys)
    visible = np.ones((rows, keys), bool)
    if sight.left is not None:
        visible &= j >= at - sight.left
    if sight.right is not None:
        visible &= j <= at + sight.right
    if sight.segments is not None:
        visible &= sight.segments.q_ids[0][:, None] == sight.segments.k_ids[0]
    return visible


@pytest.mark.parametrize("order", schedule.ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [*SIGHTS, "segments"])
def test_every_visible_pair_is_in_one_block(name: str, ranks: int, order: str):
    for rows, extra in itertools.product({1, 2, ranks + 1, 2 * ranks + 1, 11 * ranks + 3}, (0, 4)):
        ids = np.arange(rows + extra) // 4
        documents = Sight(None, 0, (0,), Segments(ids[None, :rows], ids[None]))
        sight = documents if name == "segments" else SIGHTS[name]
        q, k = Shards((rows,), ranks, order), Shards((rows + extra,), ranks, order)
        visible, counted, pairs = seen(sight, rows, rows + extra), np.zeros((rows, rows + extra), int), 0
        for rank in range(ranks):
            for step in schedule.steps(q, k, rank, sight):
                theirs = schedule.steps(q, k, step.reader, sight)[(step.reader - rank) % ranks]
                assert theirs.owner == rank
                pair = (theirs.keys, step.lent)
                assert all(np.array_equal(*(getattr(x, n) for x in pair)) for n in ("starts", "ends"))
                assert bool(step.blocks) == bool(step.keys.rows) and step.keys.slice is not None
                for block in step.blocks:
                    own, of = (
                        q.positions(rank)[slice(*block.q.span)],
                        k.positions(step.owner)[step.keys.slice][slice(*block.k.span)],
                    )
                    counted[np.ix_(own, of)] += 1
                    assert block.k.span[1] <= step.keys.rows
                    assert visible[np.ix_(own, of)].any()
                    if block.full:
                        assert visible[np.ix_(own, of)].all()
                pairs += schedule.pairs_of(step.blocks, sight)
        assert counted.max() <= 1 and (counted >= visible).all()
        if name != "segments":
            assert pairs == visible.sum()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SIGHTS)
def test_every_visible_pair_of_packed_members_is_in_one_block(name: str, ranks: int):
    """Blocks are packed calls whose entries are rows and keys of one member, or rows or keys alone."""
    sight = SIGHTS[name]
    members = (ranks - 1, 0, 1, 5 * ranks + 2, 2 * ranks + 1)
    bases = np.cumsum((0, *members))
    sight = sight._replace(offsets=sight.offsets * len(members))
    shards = Shards(members, ranks)
    counted = np.zeros((bases[-1], bases[-1]), int)
    for rank in range(ranks):
        for step in schedule.steps(shards, shards, rank, sight):
            theirs = schedule.rows_of(step.keys.starts, step.keys.ends - step.keys.starts)
            sent = shards.positions(step.owner)[theirs]
            for block in step.blocks:
                rows = np.split(
                    shards.positions(rank)[slice(*block.q.span)],
                    np.cumsum(places.entries_of(block).q_lens)[:-1],
                )
                keys = np.split(sent[slice(*block.k.span)], np.cumsum(places.entries_of(block).k_lens)[:-1])
                for member, own, of in zip(places.entries_of(block).member, rows, keys, strict=True):
                    counted[np.ix_(own, of)] += 1
                    assert member >= 0 or not (len(own) and len(of))
                    assert all(bases[member] <= x < bases[member + 1] for x in (*own, *of) if member >= 0)
    for start, end in itertools.pairwise(bases):
        visible = seen(sight, end - start, end - start)
        assert (counted[start:end, start:end] >= visible).all()
        counted[start:end, start:end] *= -1
    assert counted.max() <= 0 and counted.min() >= -1


def test_packed_members_of_a_causal_ring_are_one_call_a_step_without_places():
    """Own keys under causal order, others' entirely seen: what every row of a call sees is aligned, and keys
    are sent alone of which a row behind them is the reader's."""
    members = (64, 16, 0, 1, 43)
    shards, sight = Shards(members, 4), Sight(None, 0, (0,) * 5)
    of_member = np.repeat(np.arange(5), members)
    for rank in range(4):
        rows = shards.positions(rank)
        for t, step in enumerate(schedule.steps(shards, shards, rank, sight)):
            (block,) = step.blocks
            assert block.full == (t > 0) and (block.full or places.is_aligned(block, sight))
            keys = shards.positions(step.owner)
            behind = (of_member[rows][:, None] == of_member[keys]) & (rows[:, None] >= keys)
            assert step.keys.rows == behind.any(0).sum()


MIXED = (1024, 512, 512, *(128,) * 8, *(32,) * 32)  # the first one is more than half of all work


@pytest.mark.parametrize(
    "members, ranks, most", [(MIXED, 2, 1), (MIXED, 4, 4), ((7,) * 9, 3, 0), ((64, 64, 64), 2, 1)]
)
def test_packed_members_are_dealt_whole_but_for_few(members: tuple[int, ...], ranks: int, most: int):
    """All ranks hold as many rows and have as much causal work, and of `most` members more than one rank."""
    shards, bases = Shards(members, ranks), np.cumsum((0, *members))
    work, cut = np.zeros(ranks), np.zeros(len(members), int)
    held = [shards.positions(rank) for rank in range(ranks)]
    for rank, rows in enumerate(held):
        of = np.searchsorted(bases, rows, "right") - 1
        work[rank] = (rows - bases[of] + 1).sum()
        cut[np.unique(of)] += 1
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert work.max() <= schedule.MOST_WORK * work.mean() and (cut > 1).sum() <= most


def test_a_causal_zigzag_gives_every_rank_the_same_work():
    shards = Shards((64 * 16,), 8)
    problem = Problem(shards, shards, Sight(None, 0), 1, 8, 2, 64, 64, 2)
    assert explained(problem, "ring", "").imbalance == 1.0
    plain = Shards(shards.lengths, 8, "contiguous")
    assert explained(replace(problem, q=plain, k=plain), "ring", "").imbalance > 1.8


def test_a_window_talks_to_its_neighbours_alone():
    """A window of 4k over a million tokens: each step but two is empty, and a neighbour sends 4k keys."""
    shards = Shards((1 << 20,), 16)
    for rank in range(16):
        steps = schedule.steps(shards, shards, rank, Sight(4095, 0))
        partners = {step.owner for step in steps if step.blocks} - {rank}
        assert partners <= {rank - 1, rank + 1}
        sent = sum(step.lent.rows for step in steps[1:])
        assert sent <= 2 * 4095


def test_documents_send_nothing_beyond_themselves():
    ids = np.repeat(np.arange(8), 64)[None]
    shards = Shards((512,), 4, "contiguous")
    for rank in range(4):
        steps = schedule.steps(shards, shards, rank, Sight(None, 0, (0,), Segments(ids, ids)))
        assert all(step.lent.rows == step.keys.rows == 0 for step in steps[1:])


def test_the_planner_follows_links_windows_and_memory():

    link = Link(300e9, 1e-5, 4e14)

    def problem(sight: Sight, rows: int = 1 << 17) -> Problem:
        own = Shards((rows,), 8)
        return Problem(own, own, sight, 1, 32, 8, 128, 128, 2, link)

    assert chosen(problem(Sight(4096, 0)))[0] == "ring"
    assert chosen(problem(Sight(None, 0), 1 << 10))[0] == "all_gather"
    assert chosen(problem(Sight(None, 0), 1 << 24))[0] == "ring"  # one head's keys of all ranks have no room
    assert (
        chosen(Problem(Shards((64,), 1), Shards((64,), 1), Sight(), 1, 1, 1, 8, 8, 4))[1]
        == "there is one rank"
    )


def test_a_thousand_ranks_are_planned_at_once():
    shards = Shards((1 << 24,), 1024)
    problem = Problem(shards, shards, Sight(4095, 0), 1, 32, 8, 128, 128, 2)
    plan = explained(problem, *chosen(problem))
    assert plan.method == "ring" and len(plan.flops) == 4
    assert max(plan.bytes_sent) == 2 * 4095 * problem.bytes_per_key
