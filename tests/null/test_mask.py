"""mask.py against brute force: intervals, block bounds, pair counts, conjunctions."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyflash
from polyflash.errors import SpecError
from polyflash.mask import Mask, block_range, checked_window, row_interval, visible_pairs
from polyflash.reference import attention_reference
from tests.tolerance import same_bits

sides = st.one_of(st.none(), st.integers(0, 14))
lengths = st.integers(0, 12)


def seen(i: int, j: int, live: int, start: int, offset: int, causal: bool, window: Any) -> bool:
    """api.md's table, one pair."""
    left, right = window
    at = i + offset
    return (
        start <= j < live
        and (not causal or j <= at)
        and (left is None or j >= at - left)
        and (right is None or j <= at + right)
    )


@given(lengths, lengths, st.integers(-15, 15), st.booleans(), sides, sides, st.integers(0, 12))
def test_row_interval(sq: int, sk: int, offset: int, causal: bool, left: Any, right: Any, start: int) -> None:
    for i in range(sq):
        lo, hi = row_interval(
            i, seqlen_k=sk, offset=offset, causal=causal, window=(left, right), kv_start=start
        )
        assert lo >= 0 and hi >= 0
        for j in range(-3, sk + 3):
            assert (lo <= j < hi) == seen(i, j, sk, start, offset, causal, (left, right))


@given(
    st.integers(1, 12),
    lengths,
    st.integers(-15, 15),
    st.booleans(),
    sides,
    sides,
    st.integers(0, 12),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_block_range_is_the_hull_of_what_is_seen(
    sq: int, sk: int, offset: int, causal: bool, left: Any, right: Any, start: int, block_m: int, block_n: int
) -> None:
    """No block before the first visible key or after the last one; none at all if the rows see nothing."""
    rule = (sk, start, offset, causal, (left, right))
    bounds: dict[str, Any] = {"seqlen_k": sk, "offset": offset, "causal": causal, "window": (left, right)}
    interval = partial(row_interval, **bounds, kv_start=start)
    for first in range(0, sq, block_m):
        last = min(first + block_m, sq) - 1
        lo, hi = block_range(first, last, block_n, interval)
        keys = [j for i in range(first, last + 1) for j in range(sk) if seen(i, j, *rule)]
        if keys:
            assert (lo, hi) == (min(keys) // block_n, max(keys) // block_n + 1)
        else:
            assert hi <= lo


@given(lengths, lengths, st.integers(-15, 15), st.booleans(), sides, sides)
def test_visible_pairs(sq: int, sk: int, offset: int, causal: bool, left: Any, right: Any) -> None:
    want = sum(seen(i, j, sk, 0, offset, causal, (left, right)) for i in range(sq) for j in range(sk))
    assert visible_pairs(sq, sk, offset=offset, causal=causal, window=(left, right)) == want


def test_visible_pairs_of_a_million_rows() -> None:
    n = 1 << 20
    assert visible_pairs(n, n, offset=0, causal=True) == n * (n + 1) // 2
    assert visible_pairs(n, n, offset=0, causal=True, window=(255, None)) == 256 * n - 255 * 256 // 2


SEQLEN = ((1, 1), (4, 4), (2, 7), (7, 2), (5, 6))
STARTS, LENS = torch.tensor([1, 0]), torch.tensor([2, 1])
MASKS = {
    "causal": Mask.causal(),
    "top_left": Mask.causal("top_left"),
    "window": Mask.window(1, 2),
    "window 0": Mask.window(0, 0),
    "causal window": Mask.causal() & Mask.window(2, None),
    "lengths": Mask.lengths(LENS, STARTS) & Mask.causal(),
    "segments": Mask.segments(torch.arange(14).view(2, 7) // 2, torch.arange(14).view(2, 7) // 3),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", SEQLEN)
def test_visible_agrees_with_the_oracle(name: str, shape: tuple[int, int]) -> None:
    """Two independent readings of the same rule: `visible()` here, tensors in reference.py."""
    mask, (sq, sk) = MASKS[name], shape
    if name == "segments":
        mask = Mask.segments(mask.q_ids[:, :sq], mask.k_ids[:, :sk])
    q, k = torch.zeros(2, 1, sq, 1), torch.zeros(2, 1, sk, 1)
    weights = attention_reference(q, k, torch.eye(sk).expand(2, 1, sk, sk), mask=mask).out[:, 0]
    for b, i, j in itertools.product(range(2), range(sq), range(sk)):
        assert mask.visible(i, j, seqlen_q=sq, seqlen_k=sk, batch=b) == bool(weights[b, i, j] > 0)


def test_window_counts_neighbours_and_not_the_row_itself() -> None:
    """B-cau-07: a table a reader can check by eye."""
    tables = {
        (0, 0): ["x...", ".x..", "..x.", "...x"],
        (1, 0): ["x...", "xx..", ".xx.", "..xx"],
        (0, 2): ["xxx.", ".xxx", "..xx", "...x"],
        (3, 0): ["x...", "xx..", "xxx.", "xxxx"],
        (None, None): ["xxxx"] * 4,
    }
    for window, table in tables.items():
        for i, j in itertools.product(range(4), repeat=2):
            assert Mask.window(*window).visible(i, j, seqlen_q=4, seqlen_k=4) == (table[i][j] == "x")


def test_conjunction() -> None:
    both = Mask.causal() & Mask.window(5, None) & Mask.window(3, 4)
    assert (both.alignment, both.window_sides) == ("bottom_right", (3, 4))
    lens = torch.tensor([1])
    assert (Mask.lengths(lens) & Mask.lengths(lens)).kv_lens is lens
    with pytest.raises(SpecError, match="alignment"):
        Mask.causal() & Mask.causal("top_left")
    with pytest.raises(SpecError, match="kv_lens"):
        Mask.lengths(lens) & Mask.lengths(torch.tensor([1]))
    with pytest.raises(SpecError):
        Mask.causal() & True  # type: ignore[operator]


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (1.5, 0), (True, 0), (1,), (1, 2, 3), 4, "ab", None])
def test_bad_windows_are_refused(window: Any) -> None:
    with pytest.raises(SpecError, match=r"window.*got .*wanted .*None for"):
        checked_window(window)


def test_good_windows_pass() -> None:
    assert checked_window([None, 0]) == (None, 0) and checked_window((7, None)) == (7, None)


def test_bad_alignment_is_refused() -> None:
    with pytest.raises(SpecError, match="bottom_right"):
        Mask.causal("lower")


def test_copies_and_pickles() -> None:
    """B-grad-09."""
    mask = Mask.causal() & Mask.window(3, None) & Mask.lengths(LENS)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert (other.alignment, other.window_sides) == (mask.alignment, mask.window_sides)
        assert torch.equal(other.kv_lens, LENS)


def whole_mask() -> Mask:
    """One of everything; both segment ids are one tensor."""
    ids = torch.tensor([[0, 0, 1], [0, 1, 1]], dtype=torch.int32)
    bounds = torch.tensor([[[[[0, 2]]]]], dtype=torch.int32)
    return Mask("top_left", 3, 4, LENS.int(), STARTS.int(), ids, ids, bounds, 3)


def test_to_moves_every_tensor_and_nothing_else() -> None:
    """B-grad-09; meta stands for another device."""
    mask = whole_mask()
    for device in ("meta", torch.device("meta")):
        moved = mask.to(device, non_blocking=True)
        for field in dataclasses.fields(Mask):
            old, new = getattr(mask, field.name), getattr(moved, field.name)
            if isinstance(old, torch.Tensor):
                assert new.is_meta and new.shape == old.shape and new.dtype is torch.int32, field.name
                assert not old.is_meta
            else:
                assert old is not None and new == old, field.name
        assert moved.k_ids is moved.q_ids
    other = dataclasses.replace(mask, k_ids=torch.zeros(2, 7, dtype=torch.int32)).to("meta")
    assert other.q_ids.shape == (2, 3) and other.k_ids.shape == (2, 7)


def test_to_copies_nothing_that_is_there() -> None:
    mask = whole_mask()
    same = mask.to("cpu") & mask  # a conjunction of one tensor with itself
    for name in ("kv_lens", "kv_starts", "q_ids", "k_ids", "bounds"):
        assert getattr(same, name) is getattr(mask, name)
    assert Mask.causal().to("meta").alignment == "bottom_right"


@pytest.mark.parametrize("device", [None, "nowhere", 1.5, torch.float32, torch.ones(2)])
def test_to_takes_devices_only(device: Any) -> None:
    with pytest.raises(SpecError, match=r"^device: got .*, wanted a torch device\. Name a device"):
        whole_mask().to(device)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_a_copy_has_every_field_and_masks_alike(copied: Any) -> None:
    mask = whole_mask()
    other = copied(mask)
    for field in dataclasses.fields(Mask):
        old, new = getattr(mask, field.name), getattr(other, field.name)
        assert torch.equal(new, old) if isinstance(old, torch.Tensor) else new == old, field.name
    assert other.q_ids is other.k_ids
    q = torch.randn(2, 2, 3, 4)
    for x in (other, other.to("cpu")):
        same_bits(polyflash.attention(q, q, q, mask=x), polyflash.attention(q, q, q, mask=mask))


def test_a_mask_on_another_device_is_told_how_to_move() -> None:
    q = torch.randn(2, 2, 3, 4)
    with pytest.raises(SpecError, match=r"wanted \(2,\) on cpu\. Use \.to\(\), or Mask\.to\(\)"):
        polyflash.attention(q, q, q, mask=Mask.lengths(LENS.int()).to("meta"))
    with pytest.raises(SpecError, match=r"intervals device: got meta, wanted cpu, as q\. Use Mask\.to\(\)"):
        polyflash.attention(q, q, q, mask=Mask.blocks(torch.ones(1, 1).bool(), rows=3, keys=3).to("meta"))


@pytest.mark.parametrize("sides", [(-1, None), (None, 1.5), (torch.ones(2), 0), (0, True), (10**5000, 0)])
def test_a_mask_made_by_hand_is_checked_too(sides: Any) -> None:
    with pytest.raises(SpecError, match=r"^window (left|right): got .*, wanted "):
        Mask(left=sides[0], right=sides[1])


grids = st.tuples(
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 7), st.integers(1, 9), st.integers(0, 99)
)


@given(grids)
def test_blocks_become_the_lists_of_their_runs(drawn: tuple[int, ...]) -> None:
    """Pair by pair, holes kept; lists rise, are disjoint and joined, and spare places are empty."""
    row_blocks, key_blocks, rows, keys, seed = drawn
    grid = torch.rand(2, 3, row_blocks, key_blocks, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = Mask.blocks(grid, rows=rows, keys=keys)
    assert mask.bounds.dtype is torch.int32 and mask.bounds.shape[:3] == (2, 3, row_blocks)
    for b, h, r in itertools.product(range(2), range(3), range(row_blocks)):
        pairs = [(start, end) for start, end in mask.bounds[b, h, r].tolist() if start < end]
        assert all(one[1] < two[0] for one, two in itertools.pairwise(pairs))
        listed = [any(start <= j < end for start, end in pairs) for j in range(key_blocks * keys)]
        assert listed == grid[b, h, r].repeat_interleave(keys).tolist()
        for j in range(key_blocks * keys):
            assert listed[j] == mask.visible(
                r * rows, j, seqlen_q=row_blocks * rows, seqlen_k=key_blocks * keys, batch=b, head=h
            )


@pytest.mark.parametrize("keys", (2**30, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1))
def test_blocks_may_end_beyond_every_key(keys: int) -> None:
    """An end overhangs: what lies beyond 32 bits is the last 32-bit number."""
    grid = torch.tensor([[True, True, True, True], [False, True, True, False], [True, False, False, True]])
    far = 2**31 - 1
    want = [[0, far, 0, 0], [min(keys, far), far, 0, 0], [0, min(keys, far), min(3 * keys, far), far]]
    for row, pairs in zip(grid, want, strict=True):
        got = Mask.blocks(row[None], rows=8, keys=keys).bounds.flatten().tolist()
        assert got == [min(x, far) for x in pairs][: len(got)]
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    out = polyflash.attention(q, k, v, mask=Mask.blocks(grid[:1], rows=8, keys=keys))
    torch.testing.assert_close(out, polyflash.attention(q, k, v))


def test_lists_broadcast_from_fewer_dimensions() -> None:
    """(row_blocks, n), (batch, row_blocks, n), (batch, heads, row_blocks, n); blocks alike."""
    starts = torch.zeros(2, 3, 5, 4, dtype=torch.int32)
    for part, shape in ((starts[0, 0], (1, 1)), (starts[:, 0], (2, 1)), (starts, (2, 3))):
        assert Mask.intervals(part, part, rows=8).bounds.shape == (*shape, 5, 4, 2)
        assert Mask.blocks(part.bool(), rows=8, keys=4).bounds.shape == (*shape, 5, 1, 2)
    none = starts[0, 0, :, :0]
    assert Mask.intervals(none, none, rows=8).bounds.tolist() == [[[[[0, 0]]] * 5]]


def test_lists_are_anded_with_the_other_rules() -> None:
    listed = Mask.intervals(*(torch.tensor(x).int()[:, None] for x in ((0, 2), (3, 6))), rows=2)
    mask = Mask.causal() & listed & Mask.lengths(torch.tensor([5], dtype=torch.int32))
    q, k, v = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 6, 2), torch.eye(6)[None, None]
    seen = attention_reference(q, k, v, mask=mask).out[0, 0] > 0
    for i, j in itertools.product(range(4), range(6)):
        own = mask.visible(i, j, seqlen_q=4, seqlen_k=6)
        assert own == bool(seen[i, j]) == (j < 5 and j <= i + 1 and (j < 3 if i < 2 else 2 <= j < 6)), (i, j)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(other.bounds, mask.bounds) and other.rows == 2


def test_two_lists_in_one_conjunction_are_refused() -> None:
    a, b = (Mask.blocks(torch.ones(2, 2, dtype=torch.bool), rows=2, keys=3) for _ in range(2))
    with pytest.raises(SpecError, match="two different bounds"):
        a & b
    with pytest.raises(SpecError, match="two different rows"):
        a & Mask(bounds=a.bounds, rows=3)


def test_a_mask_shows_its_parts_and_no_contents():
    ids = torch.zeros(2, 5000, dtype=torch.int32)
    whole = Mask.causal("top_left") & Mask.window(128, None) & Mask.segments(ids, ids)
    assert (
        repr(whole)
        == "Mask.causal('top_left') & Mask.window(128, None) & Mask.segments([2, 5000], [2, 5000])"
    )
    blocks = Mask.blocks(torch.ones(3, 3, dtype=torch.bool), rows=4, keys=4) & Mask.causal()
    assert repr(blocks) == "Mask.causal() & Mask.intervals([1, 1, 3, 1, 2], rows=4)"
    assert repr(Mask.lengths(kv_starts=ids[0])) == "Mask.lengths(None, [5000])" and repr(Mask()) == "Mask()"
