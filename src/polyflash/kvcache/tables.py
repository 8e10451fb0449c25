"""Conversion of other libraries' page tables to and from (page_table, kv_lens).

FlashInfer lists the pages of all requests in one vector: request b has pages
indices[indptr[b] : indptr[b+1]], the last of which holds last_page_len[b] tokens, from 1 to page_size. vLLM
and flash-attn have a table like ours (`block_table`, `seq_lens`), which needs no conversion."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyflash.errors import described, spec_error
from polyflash.kvcache.handles import checked_count, is_ints


class FlashInferTable(NamedTuple):
    """int32 `indptr` (batch + 1,), `indices` (pages in use,) and `last_page_len` (batch,)."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class PageTable(NamedTuple):
    """int32 `page_table` (batch, max_pages), -1 beyond a request's pages, and `kv_lens` (batch,)."""

    page_table: Tensor
    kv_lens: Tensor


def from_flashinfer(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> PageTable:
    """Makes the table that attention_paged() takes, on the device of `indptr`; synchronises there.

    A request without pages has length 0, whatever its last_page_len. Entries of `indices` beyond indptr[-1]
    belong to nobody.

    Raises:
        SpecError: other dtypes or shapes, an indptr that does not start at 0, falls or ends beyond the
            indices, or a last page with fewer than 1 or more than page_size tokens."""
    for name, x in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        _check_vector(name, x, indptr)
    batch = last_page_len.shape[0]
    checked_count("page_size", page_size, 1, 2**31 - 1)
    if indptr.shape != (batch + 1,):
        change = "One bound more than last_page_len has requests."
        raise spec_error("indptr", described(indptr), f"int32 ({batch + 1},)", change)
    bounds, last = indptr.long(), last_page_len.long()
    counts = bounds.diff()
    if int(bounds[0]) or bool((counts < 0).any()) or int(bounds[-1]) > indices.shape[0]:
        wanted = "0, then never falling, to the last index"
        change = "indptr[b] is where the pages of request b start."
        raise spec_error("indptr", f"other bounds over {indices.shape[0]} indices", wanted, change)
    used = counts > 0
    if bool((used & ((last < 1) | (last > page_size))).any()):
        change = "It counts the tokens of the last page."
        raise spec_error("last_page_len", "others", f"1 to {page_size}", change)
    kv_lens = torch.where(used, (counts - 1) * page_size + last, 0)
    columns = torch.arange(int(counts.max()) if batch else 0, device=indptr.device)
    inside = columns < counts[:, None]
    page_table = torch.full(inside.shape, -1, dtype=torch.int32, device=indptr.device)
    page_table[inside] = indices[: int(bounds[-1])].int()
    return PageTable(page_table, kv_lens.int())


def to_flashinfer(page_table: Tensor, kv_lens: Tensor, page_size: int) -> FlashInferTable:
    """Makes what FlashInfer's plan() takes, on the device of `page_table`; synchronises there. A request of
    length 0 has no pages and a last_page_len of 0.

    Raises:
        SpecError: other dtypes or shapes, or a length that is negative or beyond the table."""
    if not is_ints(page_table) or page_table.ndim != 2:
        change = "One row of pages per request."
        raise spec_error("page_table", described(page_table), "int32 (batch, max_pages)", change)
    _check_vector("kv_lens", kv_lens, page_table)
    checked_count("page_size", page_size, 1, 2**31 - 1)
    batch, max_pages = page_table.shape
    if kv_lens.shape != (batch,):
        change = "One length per row of the table."
        raise spec_error("kv_lens", described(kv_lens), f"int32 ({batch},)", change)
    lens = kv_lens.long()
    if batch and not 0 <= int(lens.min()) <= int(lens.max()) <= max_pages * page_size:
        wanted = f"0 to {max_pages * page_size}, which {max_pages} pages hold"
        raise spec_error("kv_lens", "others", wanted, "Widen the table.")
    counts = (lens + page_size - 1) // page_size
    inside = torch.arange(max_pages, device=page_table.device) < counts[:, None]
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    last = torch.where(counts > 0, lens - (counts - 1) * page_size, 0)
    return FlashInferTable(indptr.int(), page_table[inside].int(), last.int())


def _check_vector(name: str, x: Tensor, beside: Tensor) -> None:
    if not is_ints(x, device=getattr(beside, "device", None)) or x.ndim != 1:
        raise spec_error(name, described(x), "an int32 or int64 vector", "All on one device.")
