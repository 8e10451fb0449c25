"""flash-attn 2's `flash_attn_with_kvcache`: append to a cache in place, rotate, attend to what is live.

A cache is contiguous, or in pages that `block_table` names: `flash_attn_pages.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyflash.api import attention
from polyflash.errors import described, spec_error
from polyflash.integrations import flash_attn_pages as pages
from polyflash.integrations.flash_attn_arguments import facade, flag, lengths, options
from polyflash.integrations.flash_attn_rotary import rotated
from polyflash.kvcache.handles import is_ints

_LENS = "an int, or int32 or int64 (batch,)"
# Their errors concern a cache then, not the new k and v.
_NAMES = {"k": "k_cache", "v": "v_cache", "kv_lens": "cache_seqlens", "kv_starts": "cache_leftpad"}
_attention = facade(_NAMES)(attention)
_rotated = facade({"cos": "rotary_cos", "sin": "rotary_sin"})(rotated)


@facade({})
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
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
            page_size, num_kv_heads, head_dim), any page_size; written in place if k is given.
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
    given["kv_starts"] = lengths(cache_leftpad)
    wants_lse = flag("return_softmax_lse", return_softmax_lse)
    interleaved = flag("rotary_interleaved", rotary_interleaved)
    block_table = pages.one_table(block_table, page_table)
    with torch.no_grad():
        if block_table is None:
            _check_rows(q, k_cache, v_cache, cache_batch_idx)
            room = k_cache.shape[1]
        else:
            room = pages.room(q, k_cache, v_cache, block_table, cache_batch_idx)
        lens = _lens("cache_seqlens", q, room if cache_seqlens is None else cache_seqlens)
        if k is not None and v is not None:
            if cache_seqlens is None:
                change = "Say how many keys the cache holds; 0 for none."
                raise spec_error("cache_seqlens", "None", f"{_LENS} with k", change)
            seqlen_new = k.shape[1]
            _check_new("k", k, k_cache, q.shape[0], seqlen_new)
            _check_new("v", v, v_cache, q.shape[0], seqlen_new)
            _check_room(lens, room, seqlen_new)
            new = torch.arange(seqlen_new, device=k.device)
            if rotary_cos is not None and rotary_sin is not None:
                stand = lens if rotary_seqlens is None else _lens("rotary_seqlens", q, rotary_seqlens)
                stand = stand.long()[:, None]
                ordered = given["causal"] or given["window"] != (None, None)
                rows = torch.arange(q.shape[1], device=q.device) if ordered else stand.new_zeros(q.shape[1])
                q = _rotated(q, stand + rows, rotary_cos, rotary_sin, interleaved)
                k = _rotated(k, stand + new, rotary_cos, rotary_sin, interleaved)
            at = lens.long()[:, None] + new
            lens = lens + seqlen_new
            if block_table is None:
                _append(k_cache, v_cache, k, v, at, cache_batch_idx)
            else:
                pages.check_seen(q, k_cache, block_table, lens, given)
                pages.append(k_cache, v_cache, k, v, at, block_table)
        if block_table is not None:
            out, lse = pages.attend(q, k_cache, v_cache, block_table, lens, given)
        else:
            keys, values = k_cache, v_cache
            if cache_batch_idx is not None:
                keys, values = keys[cache_batch_idx.long()], values[cache_batch_idx.long()]
            out, lse = _attention(q, keys, values, layout="bshd", kv_lens=lens, return_lse=True, **given)
    return (out, lse) if wants_lse else out


def _check_tensors(**given: Any) -> None:
    for name, x in given.items():
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


def _check_new(name: str, new: Tensor, cache: Tensor, batch: int, seqlen: int) -> None:
    """Checks that `new` can be written to `cache` as it is: assignment would broadcast and cast."""
    shape = (batch, seqlen, *cache.shape[2:])
    if (*new.shape,) != shape or new.dtype is not cache.dtype or new.device != cache.device:
        wanted = f"{cache.dtype} {shape} on {cache.device}: (batch, seqlen_new, num_kv_heads, channels)"
        change = f"Give {name} what {name}_cache has."
        raise spec_error(name, f"{new.dtype} {tuple(new.shape)} on {new.device}", wanted, change)


def _check_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch_idx: Tensor | None) -> None:
    """Checks that every request has a row of both caches."""
    pages.check_alike(k_cache, v_cache, "(batch_cache, seqlen_cache, num_kv_heads, head_dim)")
    rows, batch = k_cache.shape[0], q.shape[0]
    if batch_idx is None:
        if rows != batch:
            change = "Pass cache_batch_idx, or a view of the caches' rows."
            raise spec_error("k_cache", f"{rows} rows", f"{batch}, as q has", change)
        return
    if not is_ints(batch_idx, (batch,)):
        change = "One row number per request."
        raise spec_error("cache_batch_idx", described(batch_idx), f"int32 or int64 ({batch},)", change)
    if batch_idx.device.type == "cpu" and batch:
        low, high = int(batch_idx.min()), int(batch_idx.max())
        if not 0 <= low <= high < rows:
            change = "Number the rows of k_cache."
            raise spec_error("cache_batch_idx", f"rows {low} to {high}", f"0 to {rows - 1}", change)


def _lens(name: str, q: Tensor, given: Any) -> Tensor:
    """Makes int32 (batch,) of one number for all requests, or of one for each."""
    if is_ints(given):
        if given.ndim == 0 or given.shape == (q.shape[0],):
            at = q.device if given.ndim == 0 else given.device
            return lengths(given).to(at).expand(q.shape[0]).contiguous()
    elif not isinstance(given, (bool, Tensor)) and hasattr(given, "__index__"):
        return lengths(torch.full((q.shape[0],), given, dtype=torch.int64, device=q.device))
    raise spec_error(name, described(given), _LENS, "One length per request, or one for all.")


def _check_room(lens: Tensor, room: int, new: int) -> None:
    """Checks that `new` keys of each request fit behind those it has."""
    if lens.device.type != "cpu" or not lens.numel():
        return
    low, high = int(lens.min()), int(lens.max())
    if not 0 <= low <= high <= room - new:
        got = f"{low} to {high} keys, and {new} more"
        raise spec_error("cache_seqlens", got, f"at most {room} together", "Make the caches longer.")


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, at: Tensor, batch_idx: Tensor | None
) -> None:
    """Writes k and v to the caches, at the positions `at`, int64 (batch, seqlen_new), of each request."""
    requests = torch.arange(k.shape[0], device=k.device) if batch_idx is None else batch_idx.long()
    k_cache[requests[:, None], at] = k
    v_cache[requests[:, None], at] = v
