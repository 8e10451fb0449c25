"""FlashInfer's tables there and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyflash import SpecError
from polyflash.kvcache import from_flashinfer, to_flashinfer
from tests.kvcache.plain import Tokens, cache_of, filled


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_example_of_flashinfers_own_pages():
    """Requests of 3, 0, 2 and 1 pages of 16 tokens."""
    page_table, kv_lens = from_flashinfer(
        ints(0, 3, 3, 5, 6), ints(7, 2, 9, 4, 0, 5, 99), ints(4, 0, 16, 1), 16
    )
    assert kv_lens.tolist() == [36, 0, 32, 1] and kv_lens.dtype is page_table.dtype is torch.int32
    assert page_table.tolist() == [[7, 2, 9], [-1, -1, -1], [4, 0, -1], [5, -1, -1]]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_there_and_back(page_size: int):
    cache = cache_of(60, page_size)
    requests = list(filled(cache, Tokens(), 5, 0, page_size, 3 * page_size, 3 * page_size + 1))
    table = cache.page_table(requests), cache.kv_lens(requests)
    theirs = to_flashinfer(*table, page_size)
    assert all(x.dtype is torch.int32 for x in theirs)
    assert (theirs.last_page_len <= page_size).all() and theirs.indptr[-1] == theirs.indices.numel()
    for widths in (torch.int32, torch.int64):
        back = from_flashinfer(*(x.to(widths) for x in theirs), page_size)
        assert torch.equal(back.page_table, table[0]) and torch.equal(back.kv_lens, table[1])


def test_nobody_is_a_batch_too():
    page_table, kv_lens = from_flashinfer(ints(0), ints(), ints(), 16)
    assert page_table.shape == (0, 0) and kv_lens.shape == (0,)
    theirs = to_flashinfer(page_table, kv_lens, 16)
    assert theirs.indptr.tolist() == [0] and theirs.indices.numel() == theirs.last_page_len.numel() == 0


def test_what_does_not_fit_is_refused():
    bounds, pages, last = ints(0, 2, 3), ints(4, 5, 6), ints(1, 3)
    table, lens = ints(4, 5, 6, 7).view(2, 2), ints(7, 3)
    from_flashinfer(bounds, pages, last, 4)
    to_flashinfer(table, lens, 4)
    for wrong in (
        (bounds.float(), pages, last, 4), (bounds, pages[None], last, 4), (bounds, pages, last.short(), 4),
        (bounds[:2], pages, last, 4), (bounds + 1, pages, last, 4), (ints(0, 3, 2), pages, last, 4),
        (ints(0, 2, 4), pages, last, 4), (bounds, pages, ints(0, 3), 4), (bounds, pages, ints(1, 5), 4),
        (bounds, pages, last, 0), (bounds, pages, last, True), (bounds, pages.to("meta"), last, 4),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            from_flashinfer(*wrong)
    for wrong_table in (
        (table.float(), lens, 4), (table[0], lens, 4), (table, lens.float(), 4), (table, lens[:1], 4),
        (table, ints(9, 3), 4), (table, ints(-1, 3), 4), (table, lens, 0.5),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            to_flashinfer(*wrong_table)
