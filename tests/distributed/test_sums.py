"""Sums of parts of 16 bits: every element is rounded once, whatever parts cover it."""

from __future__ import annotations

import pytest
import torch

from polyflash.merging import merge, merge_into
from polyflash.parallel.sums import MOST_PARTS, Sum


@pytest.mark.parametrize("count", [1, 2, 3, MOST_PARTS + 3])
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float32])
def test_parts_are_added_up_in_float32_and_rounded_once(count: int, into: torch.dtype):
    """Parts of all heads and rows, of half the heads, of the late rows, by turns."""
    draw = torch.Generator().manual_seed(count)
    total, made = torch.zeros(2, 4, 10, 8), Sum(torch.empty(2, 4, 10, 8, dtype=torch.bfloat16))
    for i in range(count):
        head, row = ((0, 4), (2, 0), (0, 0))[i % 3]
        part = torch.randn(2, 4 - head, 9 - row, 8, generator=draw).bfloat16()
        made.add(part, head, row)
        total[:, head:, row : row + part.shape[2]] += part.float()
    for head, row, heads, rows in ((0, 0, 4, 10), (1, 3, 2, 4)):
        found = torch.full((2, heads, rows, 8), torch.nan, dtype=into)
        made.read(found, head, row)
        assert torch.equal(found, total[:, head : head + heads, row : row + rows].to(into))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_part_that_is_whole_becomes_the_sum(kind: torch.dtype):
    """In whichever turn it comes, beside none, one or two others that are not."""
    draw = torch.Generator().manual_seed(0)
    for count in (0, 1, 2):
        parts = [torch.randn(1, 2, 9, 8, generator=draw).to(kind)]
        parts += [torch.randn(1, 2, 5, 8, generator=draw) for _ in range(count)]
        right = parts[0].float().clone()
        made = Sum(torch.empty_like(parts[0]))
        for part in reversed(parts):
            made.add(part, 0, 9 - part.shape[2])
            if part.shape[2] < 9:
                right[:, :, 4:] += part
        found = made.whole()
        assert found is parts[0]
        torch.testing.assert_close(
            found, right.to(kind), rtol=1e-6 if kind is torch.float32 else 2.0**-8, atol=0
        )


def test_a_state_of_16_bits_is_merged_in_float32():
    draw = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(1, 2, 9, 8, generator=draw).bfloat16(), torch.randn(1, 2, 9, generator=draw))
        for _ in range(2)
    ]
    right = merge(parts)
    out, lse = (x.clone() for x in parts[0])
    merge_into(out, lse, *parts[1])
    torch.testing.assert_close(lse, right.lse)
    assert (
        (out.float() - right.out).abs() <= right.out.abs() * 2.0**-8
    ).all() and out.dtype is torch.bfloat16


def test_rows_of_a_part_are_the_sum_where_no_other_meets_them():
    """Of a wider dtype, or of some heads, they are not."""
    like = torch.empty(1, 2, 8, 4, dtype=torch.bfloat16)
    made, part = Sum(like), torch.ones(1, 2, 6, 4, dtype=torch.bfloat16)
    made.add(part)
    found = made.part(1, 3)
    assert found is not None and found.data_ptr() == part[:, :, 1:].data_ptr() and found.shape[2] == 3
    assert made.part(4, 3) is None
    made.add(torch.ones(1, 1, 2, 4, dtype=torch.bfloat16), 1, 6)
    assert made.part(6, 2) is None
    made.add(torch.ones(1, 2, 1, 4, dtype=torch.bfloat16), 0, 2)
    assert made.part(1, 3) is None and made.part(3, 3) is not None
    wide = Sum(like)
    wide.add(torch.ones(1, 2, 8, 4))
    assert wide.part(0, 4) is None
