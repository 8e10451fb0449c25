"""The `block_table` of flash-attn 2's functions: caches (num_blocks, page_size, heads, head_dim)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyflash import validate
from polyflash.api import attention_paged
from polyflash.errors import UnsupportedError, described, spec_error
from polyflash.integrations.flash_attn_arguments import facade
from polyflash.spec import Arguments

_NAMES = {"k": "k_cache", "v": "v_cache", "k_pages": "k_cache", "v_pages": "v_cache"}
_NAMES |= {"page_table": "block_table", "kv_lens": "cache_seqlens", "kv_starts": "cache_leftpad"}
_attention_paged = facade(_NAMES)(attention_paged)
_LENS = ("seqused_k", "cu_seqlens_k")
_PACKED: dict[str, Any] = {name: facade({"kv_lens": name})(attention_paged) for name in _LENS}
_check_contents = facade(_NAMES)(validate.check_contents)


def one_table(block_table: Tensor | None, page_table: Tensor | None) -> Tensor | None:
    """Returns the table under either of its names, flash-attn 2's or flash-attn 3's."""
    if block_table is not None and page_table is not None:
        change = "flash-attn 3 calls it otherwise; pass it by one of its names."
        raise spec_error("block_table", "two tables", "one", change)
    return page_table if block_table is None else block_table


def check_alike(k_cache: Tensor, v_cache: Tensor, shape: str) -> None:
    """Checks that the caches differ in head_dim at most."""
    if k_cache.shape[:3] != v_cache.shape[:3]:
        got = f"{(*k_cache.shape,)} and {(*v_cache.shape,)}"
        raise spec_error("k_cache, v_cache", got, f"two of {shape}", "Only head_dim may differ.")


def room(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, batch_idx: Tensor | None) -> int:
    """Counts the keys that the table has pages for, per request; raises where caches or table do not fit."""
    if batch_idx is not None:
        change = "Pass the rows of block_table that you mean: block_table[cache_batch_idx]."
        raise spec_error("cache_batch_idx", "one", "none beside block_table", change)
    check_alike(k_cache, v_cache, "(num_blocks, page_size, num_kv_heads, head_dim)")
    whole = isinstance(table, Tensor) and table.dtype is torch.int32 and table.ndim == 2
    if not whole or table.shape[0] != q.shape[0]:
        change = "Give each request a row of page numbers, by .to(torch.int32)."
        raise spec_error("block_table", described(table), f"int32 ({q.shape[0]}, max_blocks)", change)
    if table.device != k_cache.device:
        change = "Move it with .to()."
        raise spec_error("block_table device", table.device, f"{k_cache.device}, as k_cache", change)
    return table.shape[1] * k_cache.shape[1]


def check_seen(q: Tensor, k_cache: Tensor, table: Tensor, lens: Tensor, options: dict[str, Any]) -> None:
    """Makes `attention_paged`'s checks of lengths and table entries before anything is written."""
    if lens.device.type != "cpu":
        return
    left, right = options["window"]
    args = Arguments(
        causal=options["causal"], window_left=left, window_right=right, kv_lens=lens,
        kv_starts=options["kv_starts"], page_table=table,
    )  # fmt: skip
    _check_contents(args, q.shape[1], k_cache.transpose(1, 2))


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, at: Tensor, table: Tensor) -> None:
    """Writes k and v to the pages, at the positions `at`, int64 (batch, seqlen_new), of each request. On a
    device a token without a page is skipped."""
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
            raise spec_error("block_table", got, f"a page in [0, {num_blocks}) for every new key", change)
        places = (blocks * page_size + slots).flatten()
        if places.unique().numel() != places.numel():
            got, change = "two tokens for one slot", "Copy a shared page before its requests write to it."
            raise spec_error("block_table", got, "a slot of its own for every new key", change)
        k_cache[blocks, slots] = k
        v_cache[blocks, slots] = v
        return
    if not (mapped.numel() and num_blocks):
        return
    # The host must not wait for the device, so no token can be left out: one without a page writes what
    # another with a page writes, to the same place; if no token has a page, it writes what is there already.
    some = mapped.flatten().int().argmax(0, keepdim=True)
    place = (blocks * page_size + slots).clamp(0, num_blocks * page_size - 1)
    place = torch.where(mapped, place, place.flatten()[some])
    blocks, slots = place // page_size, place % page_size
    live, any_live = mapped[..., None, None], mapped.any()
    for cache, new in ((k_cache, k), (v_cache, v)):
        held = torch.where(any_live, new.flatten(0, 1)[some], cache[blocks, slots])
        cache[blocks, slots] = torch.where(live, new, held)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns out (batch, seqlen_q, num_heads, head_dim_v) and lse (batch, num_heads, seqlen_q); `options`
    are arguments of `attention_paged`."""
    batch, rows, heads, _ = q.shape
    if rows == 1:
        out, lse = _attention_paged(q[:, 0], k_cache, v_cache, table, lens, **options, return_lse=True)
        return out[:, None], lse.transpose(0, 1)[:, :, None]
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * rows
    out, lse = _attention_paged(
        q.flatten(0, 1), k_cache, v_cache, table, lens, cu_seqlens_q=bounds, max_seqlen_q=rows, **options,
        return_lse=True,
    )  # fmt: skip
    return out.unflatten(0, (batch, rows)), lse.view(heads, batch, rows).transpose(0, 1).contiguous()


def attend_packed(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, seqused_k: Tensor | None, table: Tensor, dropout_p: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attends packed rows to pages: out (total_q, num_heads, head_dim_v), lse (num_heads, total_q). seqused_k
    or cu_seqlens_k, both int32, says how many keys each member has, and the table where they stand. No
    gradients, as with a cache."""
    if dropout_p:
        raise UnsupportedError("dropout_p: not with block_table, which is for inference. Set it to 0")
    name, lens = "seqused_k", seqused_k
    if lens is None:
        name, bounds = "cu_seqlens_k", cu_seqlens_k
        if not isinstance(bounds, Tensor) or bounds.dtype is not torch.int32 or bounds.ndim != 1:
            change = "Put a 0 before torch.cumsum(lengths, 0), or pass seqused_k, the keys of each request."
            raise spec_error(name, described(bounds), "int32 (batch + 1,)", change)
        lens = bounds.diff()
    with torch.no_grad():
        return _PACKED[name](
            q, k_cache, v_cache, table, lens, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            return_lse=True, **options,
        )  # fmt: skip
