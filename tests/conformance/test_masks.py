"""Causal alignments, offsets, windows, lengths, bool masks in every broadcast form, Mask objects."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

import polyflash
from polyflash import Mask
from polyflash.mask import block_range, row_interval
from polyflash.workloads import random_mask
from tests import device
from tests.conformance.rows import DTYPES, Runner, ints, qkv
from tests.tolerance import Figures, near, same_bits, visible

ROWS_AND_KEYS = ((1, 40), (17, 40), (40, 40), (70, 40), (65, 130), (130, 65))


def explicit(run: Runner, q: Any, k: Any, v: Any, label: str, **options: Any) -> Any:
    """The structured form against the oracle and against the same row with its mask written out (M35)."""
    got = run.checked(q, k, v, label=label, **options)
    dense = run(q, k, v, mask=visible(q, k, **options))
    assert torch.equal(got.lse == -torch.inf, dense.lse == -torch.inf), label
    near(got.out, dense.out, 2e-6, label)
    return got


@pytest.mark.parametrize("causal", (True, "bottom_right", "top_left"))
def test_causal(run: Runner, causal: bool | str):
    for rows, keys in ROWS_AND_KEYS:
        q, k, v = qkv(1, 2, rows, keys, 16)
        explicit(run, q, k, v, f"{rows}x{keys}", causal=causal)


def test_bottom_right_is_the_default_and_exact(run: Runner):
    """P2, B-cau-02: j <= i + (N - M), read off one-hot values."""
    for rows, keys in ((3, 5), (5, 3), (4, 4), (1, 6)):
        q, k = torch.zeros(1, 1, rows, 8), torch.zeros(1, 1, keys, 8)
        v = torch.eye(keys)[None, None]
        for causal, offset in ((True, keys - rows), ("bottom_right", keys - rows), ("top_left", 0)):
            out, _ = run(q, k, v, causal=causal)
            want = torch.arange(keys) <= torch.arange(rows)[:, None] + offset
            assert torch.equal(out[0, 0] > 0, want), (rows, keys, causal)


@pytest.mark.parametrize("offset", (-70, -3, 0, 1, 39, 64, 200, 2**31 - 1, -(2**31)))
def test_offset_int_and_tensor(run: Runner, offset: int):
    q, k, v = qkv(2, 2, 20, 130, 16)
    one = explicit(run, q, k, v, f"int {offset}", causal=True, q_offset=offset)
    many = run.checked(q, k, v, causal=True, q_offset=ints(offset, offset))
    near(one.out, many.out, 1e-6)
    mixed = run.checked(q, k, v, causal=True, q_offset=ints(5, offset))
    near(mixed.out[1], many.out[1], 1e-6)
    windowed = run.checked(q, k, v, window=(7, 2), q_offset=ints(5, offset))
    assert torch.isfinite(windowed.out).all()


def test_offset_overrides_alignment(run: Runner):
    q, k, v = qkv(1, 2, 20, 50, 16)
    for causal in (True, "top_left"):
        run.checked(q, k, v, causal=causal, q_offset=11)
        same_bits(run(q, k, v, causal=causal, q_offset=11).out, run(q, k, v, causal=True, q_offset=11).out)


@pytest.mark.parametrize("left", (None, 0, 1, 2, 15, 16, 63, 64, 65, 300))
def test_window(run: Runner, left: int | None):
    """B-cau-07, B-cau-10: neighbours, self not counted, after alignment; with and without causal."""
    pool = Figures()
    for right in (None, 0, 1, 2, 30):
        for rows, keys in ((1, 130), (7, 130), (65, 130), (130, 65), (100, 100)):
            q, k, v = qkv(1, 1, rows, keys, 16, seed=rows)
            for causal in (False, True):
                label = f"{left},{right} {rows}x{keys} {causal}"
                run.checked(q, k, v, causal=causal, window=(left, right), label=label, pool=pool)
    pool.hold(torch.float32, f"windows of {left}")


def test_window_table(run: Runner):
    """B-cau-07: w neighbours and oneself. The table is written out."""
    tables = {
        (0, 0): ["1000", "0100", "0010", "0001"],
        (1, 0): ["1000", "1100", "0110", "0011"],
        (2, 0): ["1000", "1100", "1110", "0111"],
        (0, 1): ["1100", "0110", "0011", "0001"],
        (1, 1): ["1100", "1110", "0111", "0011"],
        (0, None): ["1111", "0111", "0011", "0001"],
        (None, 0): ["1000", "1100", "1110", "1111"],
        (None, None): ["1111"] * 4,
    }
    q = torch.zeros(1, 1, 4, 8)
    for window, table in tables.items():
        out, _ = run(q, q, torch.eye(4)[None, None], window=window)
        assert ["".join("01"[int(x > 0)] for x in row) for row in out[0, 0]] == table, window


def test_negative_window_teaches():
    q, k, v = qkv(1, 1, 4, 4, 8)
    for window in ((-1, 0), (0, -1), (-1, -1), (1,), 5):
        with pytest.raises(polyflash.SpecError, match="None"):
            polyflash.attention(q, k, v, window=window)


@pytest.mark.parametrize("causal", (False, True, "top_left"))
def test_lengths_per_request(run: Runner, causal: bool | str):
    """Live lengths 0, 1, below the rows, at tile edges, at the end; B-cau-12: alignment by the live
    length."""
    lens = ints(0, 1, 15, 16, 63, 64, 65, 130)
    starts = ints(0, 0, 3, 16, 0, 63, 64, 129)
    for rows in (1, 20, 70):
        q, k, v = qkv(8, (2, 1), rows, 130, 16)
        run.checked(q, k, v, causal=causal, kv_lens=lens, label=f"lens {rows}")
        run.checked(q, k, v, causal=causal, kv_starts=starts, label=f"starts {rows}")
        run.checked(q, k, v, causal=causal, kv_lens=lens, kv_starts=starts, label=f"both {rows}")
        run.checked(
            q, k, v, causal=causal, kv_lens=lens, kv_starts=starts, window=(20, 4), label=f"window {rows}"
        )


def test_lens_equal_slices(run: Runner):
    """A live length is what slicing the keys gives, and moves the diagonal; a start moves nothing."""
    q, k, v = qkv(3, 2, 30, 100, 16)
    got = run(q, k, v, causal=True, kv_lens=ints(100, 64, 31))
    for b, n in enumerate((100, 64, 31)):
        one = run(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], causal=True)
        near(got.out[b : b + 1], one.out, 1e-6)
    hidden = run(q, k, v, causal=True, kv_starts=ints(0, 40, 90))
    keep = torch.arange(100) >= torch.tensor((0, 40, 90)).view(3, 1, 1, 1)
    near(hidden.out, run(q, k, v, causal=True, mask=keep).out, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bool_mask_every_form(run: Runner, dtype: torch.dtype):
    """All 16 subsets of broadcast dimensions, fewer dimensions, with and without causal; never expanded."""
    batch, heads, rows, keys = 2, 4, 35, 70
    q, k, v = qkv(batch, (heads, 2), rows, keys, 16, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    pool = Figures()
    for kept in itertools.product((False, True), repeat=4):
        shape = tuple(n if keep else 1 for n, keep in zip((batch, heads, rows, keys), kept, strict=True))
        mask = random_mask(shape, generator)
        for causal in (False, True):
            run.checked(q, k, v, mask=mask, causal=causal, label=f"mask {shape}", pool=pool)
    for shape in ((keys,), (rows, keys), (rows, 1), (heads, rows, keys), (heads, 1, 1), ()):
        run.checked(q, k, v, mask=random_mask(shape, generator), label=f"mask {shape}", pool=pool)
    pool.hold(dtype, "masks")


def test_bool_mask_strides(run: Runner):
    """B-str-10: transposed, expanded and sliced masks equal their contiguous copies."""
    q, k, v = qkv(2, 2, 35, 70, 16)
    generator = torch.Generator().manual_seed(0)
    base = random_mask((2, 2, 70, 35), generator)
    forms = {
        "transposed": base.transpose(2, 3),
        "expanded": random_mask((35, 70), generator).expand(2, 2, 35, 70),
        "sliced": random_mask((2, 2, 35, 150), generator)[..., 3:143:2],
        "rows of one": random_mask((1, 1, 1, 70), generator).expand(2, 1, 35, 70),
        "offset": random_mask((2, 2, 36, 71), generator)[:, :, 1:, 1:],
    }
    for name, mask in forms.items():
        got = run.checked(q, k, v, mask=mask, label=name)
        if device.DEVICE.type == "cpu":  # elsewhere other strides are another kernel, with sums of its own
            same_bits(got.out, run(q, k, v, mask=mask.contiguous()).out, name)


def test_mask_objects(run: Runner):
    """A Mask is the keyword arguments it stands for, alone and combined with them."""
    q, k, v = qkv(2, 2, 40, 90, 16)
    lens, starts = ints(90, 33), ints(2, 0)
    pairs = (
        (Mask.causal(), {"causal": True}),
        (Mask.causal("top_left"), {"causal": "top_left"}),
        (Mask.window(5, 9), {"window": (5, 9)}),
        (Mask.causal() & Mask.window(5, None), {"causal": True, "window": (5, None)}),
        (Mask.lengths(lens, starts), {"kv_lens": lens, "kv_starts": starts}),
        (
            Mask.causal() & Mask.lengths(lens) & Mask.window(20, 20),
            {"causal": True, "kv_lens": lens, "window": (20, 20)},
        ),
    )
    for mask, options in pairs:
        one, two = run.checked(q, k, v, mask=mask), run(q, k, v, **options)
        same_bits(one.out, two.out)
        same_bits(one.lse, two.lse)
    mixed = run.checked(q, k, v, mask=Mask.window(5, None), causal=True, kv_lens=lens)
    same_bits(mixed.out, run(q, k, v, window=(5, None), causal=True, kv_lens=lens).out)


def test_segments(run: Runner):
    """Packed documents: equal ids see each other, alone and with causal."""
    ids = torch.tensor([[0] * 13 + [1] * 27 + [2] * 30, [0] * 35 + [5] * 34 + [9]], dtype=torch.int32)
    q, k, v = qkv(2, 2, 70, 70, 16)
    packed = run.checked(q, k, v, mask=Mask.segments(ids, ids) & Mask.causal())
    for start, stop in ((0, 13), (13, 40), (40, 70)):
        part = slice(start, stop)
        one = run(q[:1, :, part], k[:1, :, part], v[:1, :, part], causal=True)
        near(packed.out[:1, :, part], one.out, 1e-6)
    run.checked(q, k, v, mask=Mask.segments(ids, ids.flip(0)))


def test_everything_at_once(run: Runner):
    q, k, v = qkv(3, (6, 2), 50, 200, 32)
    options = {
        "causal": True,
        "window": (60, None),
        "kv_lens": ints(200, 120, 49),
        "kv_starts": ints(0, 40, 12),
        "mask": random_mask((3, 1, 50, 200), torch.Generator().manual_seed(0)),
    }
    run.checked(q, k, v, **options)
    run.checked(q, k, v, **options, q_offset=ints(150, 0, 60))


def test_block_range_covers_exactly():
    """Bounds and element masks agree: no visible key outside the visited blocks, no wholly empty block at
    the ends."""
    generator = torch.Generator().manual_seed(0)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    for _ in range(400):
        keys, offset, window = (
            pick(1, 16, 65, 130),
            pick(-40, 0, 7, 100),
            (pick(None, 0, 3, 40), pick(None, 0, 3, 40)),
        )
        shape = {
            "seqlen_k": keys,
            "offset": offset,
            "causal": pick(False, True),
            "window": window,
            "kv_start": pick(0, 0, 20),
        }
        first, block = pick(0, 5, 64), pick(16, 64, 128)
        last = first + pick(0, 3, 63)
        interval = partial(row_interval, **shape)
        lo, hi = block_range(first, last, block, interval)
        seen = {j for i in range(first, last + 1) for j in range(*interval(i))}
        assert all(lo <= j // block < hi for j in seen)
        if hi > lo and seen:
            assert min(seen) // block == lo and max(seen) // block == hi - 1
