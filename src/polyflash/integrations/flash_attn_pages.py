"""What flash-attn 2's functions do with `block_table`: caches (num_blocks, page_size, heads, head_dim)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyflash import validate
from polyflash.errors import UnsupportedError, described, spec_error
from polyflash.paged import attention_paged
from polyflash.spec import Arguments

Window = tuple[int | None, int | None]


def room(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, batch_idx: Tensor | None) -> int:
    """Keys that the table has pages for, per request; raises where caches or table are no such."""
    if batch_idx is not None:
        change = "Pass the rows of block_table that you mean: block_table[cache_batch_idx]."
        raise spec_error("cache_batch_idx", got="one", wanted="none beside block_table", change=change)
    if k_cache.ndim != 4 or v_cache.ndim != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        got, change = f"{(*k_cache.shape,)} and {(*v_cache.shape,)}", "Only head_dim may differ."
        wanted = "two of (num_blocks, page_size, num_kv_heads, head_dim)"
        raise spec_error("k_cache, v_cache", got=got, wanted=wanted, change=change)
    whole = isinstance(table, Tensor) and table.dtype is torch.int32 and table.ndim == 2
    if not whole or table.shape[0] != q.shape[0]:
        got, change = described(table), "Give each request a row of page numbers, by .to(torch.int32)."
        raise spec_error("block_table", got=got, wanted=f"int32 ({q.shape[0]}, max_blocks)", change=change)
    if table.device != k_cache.device:
        wanted = f"{k_cache.device}, as k_cache"
        raise spec_error("block_table device", got=table.device, wanted=wanted, change="Move it with .to().")
    return table.shape[1] * k_cache.shape[1]


def check_seen(
    q: Tensor,
    k_cache: Tensor,
    table: Tensor,
    lens: Tensor,
    starts: Tensor | None,
    causal: bool,
    window: Window,
) -> None:
    """What `attention_paged` says of lengths and table entries, said before anything is written."""
    if lens.device.type != "cpu":
        return
    rows = q.shape[1]
    args = Arguments(
        causal=causal, window_left=window[0], window_right=window[1], kv_lens=lens, kv_starts=starts,
        page_table=table,
    )  # fmt: skip
    validate.check_contents(args, rows, k_cache.transpose(1, 2))


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, at: Tensor, table: Tensor) -> None:
    """k and v into the pages, at the positions `at`, int64 (batch, seqlen_new), of each request. On a device
    a token without a page is skipped."""
    page_size, num_blocks = k_cache.shape[1], k_cache.shape[0]
    slots = at % page_size
    columns = (at // page_size).clamp(0, max(0, table.shape[1] - 1))
    blocks = table.gather(1, columns).long()
    mapped = (blocks >= 0) & (blocks < num_blocks) & (at // page_size == columns)
    if table.device.type == "cpu":
        if not bool(mapped.all()):
            request, token = (~mapped).nonzero()[0].tolist()
            block, column = int(blocks[request, token]), int(columns[request, token])
            got = f"{block} for request {request} in column {column}"
            change = "Give the request a page before it grows into it."
            wanted = f"a page in [0, {num_blocks}) for every new key"
            raise spec_error("block_table", got=got, wanted=wanted, change=change)
        places = (blocks * page_size + slots).flatten()
        if places.unique().numel() != places.numel():
            change = "Copy a shared page before its requests write to it."
            wanted = "a slot of its own for every new key"
            raise spec_error("block_table", got="two tokens for one slot", wanted=wanted, change=change)
        k_cache[blocks, slots] = k
        v_cache[blocks, slots] = v
        return
    k_cache[blocks[mapped], slots[mapped]] = k[mapped]
    v_cache[blocks[mapped], slots[mapped]] = v[mapped]


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, num_heads, head_dim_v) and lse (batch, num_heads, seqlen_q); `options` are those
    of `attention_paged`."""
    batch, rows, heads, _ = q.shape
    if rows == 1:
        out, lse = attention_paged(q[:, 0], k_cache, v_cache, table, lens, **options, return_lse=True)
        return out[:, None], lse.transpose(0, 1)[:, :, None]
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * rows
    out, lse = attention_paged(
        q.flatten(0, 1), k_cache, v_cache, table, lens, cu_seqlens_q=bounds, max_seqlen_q=rows, **options,
        return_lse=True,
    )  # fmt: skip
    return out.unflatten(0, (batch, rows)), lse.view(heads, batch, rows).transpose(0, 1).contiguous()


def attend_packed(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    table: Tensor,
    dropout_p: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Packed rows over pages: out (total_q, num_heads, head_dim_v), lse (num_heads, total_q). cu_seqlens_k,
    int32 (batch + 1,), says how many keys each member has; where they stand says the table."""
    if dropout_p:
        raise UnsupportedError("dropout_p: not with block_table, which is for inference. Set it to 0")
    if cu_seqlens_k.dtype is not torch.int32 or cu_seqlens_k.ndim != 1:
        got = f"{cu_seqlens_k.dtype} {(*cu_seqlens_k.shape,)}"
        change = "Put a 0 before torch.cumsum(lengths, 0, dtype=torch.int32)."
        raise spec_error("cu_seqlens_k", got=got, wanted="int32 (batch + 1,)", change=change)
    return attention_paged(
        q, k_cache, v_cache, table, cu_seqlens_k.diff(), cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        return_lse=True, **options,
    )  # fmt: skip
