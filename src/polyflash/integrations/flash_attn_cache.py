"""flash-attn's caches: append in place, rotate, attend to what is live.

A cache is contiguous, (batch_cache, seqlen_cache, heads, head_dim), or in pages that `block_table` names,
(num_blocks, page_size, heads, head_dim)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyflash import validate
from polyflash.api import attention, attention_paged
from polyflash.errors import UnsupportedError, described, spec_error
from polyflash.integrations.flash_attn_arguments import facade, flag, options, per_request
from polyflash.integrations.flash_attn_rotary import rotated
from polyflash.kvcache.code_pools import CodePools
from polyflash.kvcache.code_writes import written_at_once
from polyflash.kvcache.handles import is_ints
from polyflash.quant.tensor import KV, QuantizedTensor
from polyflash.spec import Arguments

# Errors about k and v concern a cache, not the new k and v.
_NAMES = {"k": "k_cache", "v": "v_cache", "kv_lens": "cache_seqlens", "kv_starts": "cache_leftpad"}
_OF_PAGES = _NAMES | {"k_pages": "k_cache", "v_pages": "v_cache", "page_table": "block_table"}
_attention = facade(_NAMES)(attention)
_attention_paged = facade(_OF_PAGES)(attention_paged)
_check_contents = facade(_OF_PAGES)(validate.check_contents)
_rotated = facade({"cos": "rotary_cos", "sin": "rotary_sin"})(rotated)
_PACKED: dict[str, Any] = {n: facade({"kv_lens": n})(attention_paged) for n in ("seqused_k", "cu_seqlens_k")}


@facade({})
def flash_attn_with_kvcache(
    q: Tensor, k_cache: KV, v_cache: KV, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False, *, page_table: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Writes k and v behind the live keys of a cache, and attends to all of them. No gradients.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k_cache: (batch_cache, seqlen_cache, num_kv_heads, head_dim), or with block_table (num_blocks,
            page_size, num_kv_heads, head_dim), any page_size; written in place if k is given. Or a
            `QuantizedTensor` with layout "bshd": any to be read; one that is written has scales for each
            token, and gets the codes that `polyflash.quantize` and a `KVCache` make of k.
        v_cache: likewise, with head_dim_v.
        k: (batch, seqlen_new, num_kv_heads, head_dim) to be written at [cache_seqlens, ...) of each request.
        v: (batch, seqlen_new, num_kv_heads, head_dim_v), given if k is.
        rotary_cos: (positions, rotary_dim / 2), with k only. k is rotated by the positions it is written to;
            so is q, row by row, with `causal` or a window, and all of it by `cache_seqlens` otherwise.
        rotary_sin: likewise, given if rotary_cos is.
        cache_seqlens: live keys before k is written, int, int32 or int64 (batch,); None is all, and not with
            k.
        cache_batch_idx: int (batch,): the cache's row of each request, which is copied if given; all differ
            where k is given.
        cache_leftpad: int32 or int64 (batch,): first live key. Positions count from the cache's first all the
            same, those of rotary too.
        block_table: int32 (batch, max_blocks): the pages of each request. Entries of pages without a key that
            is seen or written may be anything. Not with cache_batch_idx.
        num_splits: ignored; splits change no result. So are flash-attn 3's `pack_gqa` and `sm_margin`.
        page_table: flash-attn 3's name of block_table.
        rotary_seqlens: (batch,): where rotary begins to count, if not at cache_seqlens.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), or (out, softmax_lse (batch, num_heads, seqlen_q)).

    Raises:
        UnsupportedError: a keyword of flash-attn 3 that nothing here serves, with what to do instead.
        SpecError: k or rotary_cos without its other half; k, v, cache_batch_idx or block_table are not the
            cache's; keys do not fit behind those in the cache; two tokens would be written to one slot; or
            what `polyflash.attention` refuses. What is refused for k, v, rotary, cache_batch_idx or
            block_table is so before the cache is written. Contents of tensors are checked on a CPU; on a
            device what has no page is not written, and hidden."""
    _check_halves(k, v, rotary_cos, rotary_sin)
    if rotary_seqlens is not None and rotary_cos is None:
        change = "Pass rotary_cos and rotary_sin, or drop it."
        raise spec_error("rotary_seqlens", "one", "none without rotary_cos", change)
    _check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    given = options(causal, window_size, softcap, alibi_slopes, softmax_scale)
    given["kv_starts"] = cache_leftpad
    wants_lse = flag("return_softmax_lse", return_softmax_lse)
    interleaved = flag("rotary_interleaved", rotary_interleaved)
    table = one_table(block_table, page_table)
    with torch.no_grad():
        _check_caches(q, k_cache, v_cache, table, cache_batch_idx)
        room = k_cache.shape[1] * (1 if table is None else table.shape[1])
        asked = room if cache_seqlens is None else cache_seqlens
        lens = per_request("cache_seqlens", asked, q.shape[0], q.device)
        if k is not None and v is not None:
            if cache_seqlens is None:
                change = "Say how many keys the cache holds; 0 for none."
                raise spec_error("cache_seqlens", "None", "an int, or int32 or int64 (batch,) with k", change)
            _check_new("k", k, k_cache, q.shape[0], k.shape[1])
            _check_new("v", v, v_cache, q.shape[0], k.shape[1])
            lens = lens.clone() if lens.device.type == "cpu" else lens  # another thread may write to it
            _check_room(lens, room, k.shape[1])
            new = torch.arange(k.shape[1], device=k.device)
            if rotary_cos is not None and rotary_sin is not None:
                stand = lens if rotary_seqlens is None else rotary_seqlens
                stand = per_request("rotary_seqlens", stand, q.shape[0], q.device).long()[:, None]
                ordered = given["causal"] or given["window"] != (None, None)
                rows = torch.arange(q.shape[1], device=q.device) if ordered else stand.new_zeros(q.shape[1])
                q = _rotated(q, stand + rows, rotary_cos, rotary_sin, interleaved)
                k = _rotated(k, stand + new, rotary_cos, rotary_sin, interleaved)
            at, lens = lens.long()[:, None] + new, lens + k.shape[1]
            if table is None:
                row = torch.arange(len(q), device=k.device) if cache_batch_idx is None else cache_batch_idx
                for cache, new in ((k_cache, k), (v_cache, v)):
                    _put(cache, new, row.long()[:, None].expand_as(at), at)
            else:
                _check_seen(q, k_cache, table, lens, given)
                append(k_cache, v_cache, k, v, at, table)
        if table is not None:
            out, lse = _attend_pages(q, k_cache, v_cache, table, lens, given)
        else:
            keys, values = k_cache, v_cache
            if cache_batch_idx is not None:
                at = cache_batch_idx.long()
                keys, values = (
                    x.pages(at) if isinstance(x, QuantizedTensor) else x[at] for x in (keys, values)
                )
            out, lse = _attention(q, keys, values, layout="bshd", kv_lens=lens, return_lse=True, **given)
    return (out, lse) if wants_lse else out


def one_table(block_table: Tensor | None, page_table: Tensor | None) -> Tensor | None:
    """Returns the table under either of its names, flash-attn 2's or flash-attn 3's."""
    if block_table is not None and page_table is not None:
        change = "flash-attn 3 calls it otherwise; pass it by one of its names."
        raise spec_error("block_table", "two tables", "one", change)
    return page_table if block_table is None else block_table


def _check_tensors(**given: Any) -> None:
    for name, x in given.items():
        if isinstance(x, QuantizedTensor) and name.endswith("_cache"):
            if x.layout != "bshd":
                change = 'Quantise (batch, seqlen, heads, head_dim) by quantize(x, scheme, layout="bshd").'
                raise spec_error(name, f"codes of layout {x.layout!r}", "'bshd'", change)
            continue
        if x is not None and (not isinstance(x, Tensor) or x.ndim != 4):
            change = "Use unsqueeze() for a single token; caches may have a page where others have a request."
            raise spec_error(name, described(x), "a tensor (batch, seqlen, heads, head_dim)", change)


def _check_halves(k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> None:
    """Checks arguments that come in pairs."""
    for names, pair, change in (
        (("k", "v"), (k, v), "Pass both to write to the caches, or neither."),
        (("rotary_cos", "rotary_sin"), (cos, sin), "Pass both tables, or neither."),
    ):
        given = [name for name, x in zip(names, pair, strict=True) if x is not None]
        if len(given) == 1:
            raise spec_error(", ".join(names), f"{given[0]} alone", "both", change)
    if k is None and cos is not None:
        change = "Rotary applies to the keys that are written."
        raise spec_error("k, v", "neither, with rotary_cos", "both", change)


def _check_new(name: str, new: Tensor, cache: KV, batch: int, seqlen: int) -> None:
    """Checks that `new` can be written to `cache` as it is: assignment would broadcast and cast."""
    if isinstance(cache, QuantizedTensor):
        form = cache.form
        if form.scale.tokens != 1 or (form.shift is not None and form.shift.tokens != 1):
            got = f"codes of {form}, whose tokens share scales or means, to write {name} to"
            change = "Append to a polyflash.kvcache.KVCache: it keeps the values of a group until it is full."
            raise spec_error(f"{name}_cache", got, "scales of its own for each token", change)
    change = f"It is (batch, seqlen_new, num_kv_heads, channels): give {name} what {name}_cache has."
    validate.check_like(name, new, (batch, seqlen, *cache.shape[2:]), cache.dtype, cache, change)


def _check_caches(
    q: Tensor, k_cache: KV, v_cache: KV, table: Tensor | None, batch_idx: Tensor | None
) -> None:
    """Checks that the caches differ in head_dim at most, and have a row or pages for every request."""
    batch, rows = q.shape[0], k_cache.shape[0]
    if k_cache.shape[:3] != v_cache.shape[:3]:
        sizes = "batch_cache, seqlen_cache" if table is None else "num_blocks, page_size"
        wanted = f"two of ({sizes}, num_kv_heads, head_dim)"
        got = f"{(*k_cache.shape,)} and {(*v_cache.shape,)}"
        raise spec_error("k_cache, v_cache", got, wanted, "Only head_dim may differ.")
    if table is not None:
        if batch_idx is not None:
            change = "Pass the rows of block_table that you mean: block_table[cache_batch_idx]."
            raise spec_error("cache_batch_idx", "one", "none beside block_table", change)
        whole = isinstance(table, Tensor) and table.dtype is torch.int32 and table.ndim == 2
        if not whole or table.shape[0] != batch:
            change = "Give each request a row of page numbers, by .to(torch.int32)."
            raise spec_error("block_table", described(table), f"int32 ({batch}, max_blocks)", change)
        if table.device != k_cache.device:
            wanted = f"{k_cache.device}, as k_cache"
            raise spec_error("block_table device", table.device, wanted, "Move it with .to().")
    elif batch_idx is None:
        if rows != batch:
            change = "Pass cache_batch_idx, or a view of the caches' rows."
            raise spec_error("k_cache", f"{rows} rows", f"{batch}, as q has", change)
    elif not is_ints(batch_idx, (batch,)):
        change = "One row number per request."
        raise spec_error("cache_batch_idx", described(batch_idx), f"int32 or int64 ({batch},)", change)
    elif batch_idx.device.type == "cpu" and batch:
        low, high = int(batch_idx.min()), int(batch_idx.max())
        if not 0 <= low <= high < rows:
            change = "Number the rows of k_cache."
            raise spec_error("cache_batch_idx", f"rows {low} to {high}", f"0 to {rows - 1}", change)


def _check_room(lens: Tensor, room: int, new: int) -> None:
    """Checks that `new` keys of each request fit behind those it has."""
    if lens.device.type != "cpu" or not lens.numel():
        return
    low, high = int(lens.min()), int(lens.max())
    if not 0 <= low <= high <= room - new:
        got = f"{low} to {high} keys, and {new} more"
        raise spec_error("cache_seqlens", got, f"at most {room} together", "Make the caches longer.")


def _check_seen(q: Tensor, k_cache: KV, table: Tensor, lens: Tensor, options: dict[str, Any]) -> None:
    """Makes `attention_paged`'s checks of lengths and table entries before anything is written."""
    if lens.device.type != "cpu":
        return
    left, right = options["window"]
    args = Arguments(options["causal"], window_left=left, window_right=right, page_table=table)
    args = args._replace(kv_lens=lens, kv_starts=options["kv_starts"])
    keys = k_cache.codes if isinstance(k_cache, QuantizedTensor) else k_cache.transpose(1, 2)
    _check_contents(args, q.shape[1], keys)


def append(k_cache: KV, v_cache: KV, k: Tensor, v: Tensor, at: Tensor, table: Tensor) -> None:
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
        _put(k_cache, k, blocks, slots)
        _put(v_cache, v, blocks, slots)
        return
    if not (mapped.numel() and num_blocks):
        return
    # The host must not wait for the device, so no token can be left out: one without a page writes what
    # another with a page writes, to the same place; if no token has a page, it writes what is there already.
    some = mapped.flatten().int().argmax(0, keepdim=True)
    place = (blocks * page_size + slots).clamp(0, num_blocks * page_size - 1)
    place = torch.where(mapped, place, place.flatten()[some])
    place, live, any_live = place.flatten(), mapped.flatten(), mapped.any()
    blocks, slots = place // page_size, place % page_size
    for cache, new in ((k_cache, k), (v_cache, v)):
        new, stores = new.flatten(0, 1), list[tuple[Tensor, Tensor]]()
        if isinstance(cache, Tensor):
            stores.append((cache, new))
        elif not written_at_once(CodePools.over(cache), torch.where(live, place, -1), new):
            stores += CodePools.over(cache).placed(new)
        for store, part in stores:
            held = torch.where(any_live, part[some], store[blocks, slots])
            store[blocks, slots] = torch.where(live.view(-1, *[1] * (part.ndim - 1)), part, held)


def _put(cache: KV, new: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Writes `new` (batch, seqlen_new, num_kv_heads, channels) to `slots` of pages or of entries of the
    batch, int64 (batch, seqlen_new) each."""
    if isinstance(cache, QuantizedTensor):
        CodePools.over(cache).write_tokens(rows.flatten(), slots.flatten(), new.flatten(0, 1))
    else:
        cache[rows, slots] = new


def _attend_pages(
    q: Tensor, k_cache: KV, v_cache: KV, table: Tensor, lens: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns out (batch, seqlen_q, num_heads, head_dim_v) and lse (batch, num_heads, seqlen_q); `options`
    are arguments of `attention_paged`."""
    batch, rows, heads, _ = q.shape
    if rows == 1:
        out, lse = _attention_paged(q[:, 0], k_cache, v_cache, table, lens, **options, return_lse=True)
        return out[:, None], lse.transpose(0, 1)[:, :, None]
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * rows
    options = options | {"cu_seqlens_q": bounds, "max_seqlen_q": rows, "return_lse": True}
    out, lse = _attention_paged(q.flatten(0, 1), k_cache, v_cache, table, lens, **options)
    return out.unflatten(0, (batch, rows)), lse.view(heads, batch, rows).transpose(0, 1).contiguous()


def attend_packed(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Any, bounds: Any, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attends packed rows to pages: out (total_q, num_heads, head_dim_v), lse (num_heads, total_q). `lens`,
    the caller's seqused_k, or `bounds`, his cu_seqlens_k, both ints, say how many keys each member has, and
    the table where they stand. No gradients, as with a cache."""
    if given.pop("dropout_p"):
        raise UnsupportedError("dropout_p: not with block_table, which is for inference. Set it to 0")
    name = "seqused_k"
    if lens is None:
        name = "cu_seqlens_k"
        if not is_ints(bounds) or bounds.ndim != 1:
            change = "Put a 0 before torch.cumsum(lengths, 0), or pass seqused_k, the keys of each request."
            raise spec_error(name, described(bounds), "int32 (batch + 1,)", change)
        lens = bounds.diff()
    with torch.no_grad():
        return _PACKED[name](q, k_cache, v_cache, table, lens, return_lse=True, **given)
