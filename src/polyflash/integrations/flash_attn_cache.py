"""flash-attn 2's `flash_attn_with_kvcache`: append to a cache in place, rotate, attend to what is live.

A cache is contiguous, or in pages that `block_table` names: `flash_attn_pages.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyflash.api import attention
from polyflash.errors import UnsupportedError, spec_error
from polyflash.integrations import flash_attn_pages as pages
from polyflash.kvcache.rope import Rope

_INT32 = "an int or an int32 tensor (batch,)"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q over the live keys of a cache, after k and v were written behind them. No gradients.

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
        cache_seqlens: live keys before k is written, int or int32 (batch,); None is all, and not with k.
        cache_batch_idx: int (batch,): the cache's row of each request, which is copied if given; all differ
            where k is given.
        cache_leftpad: int32 (batch,): first live key. Not with rotary.
        block_table: int32 (batch, max_blocks): the pages of each request. Entries of pages without a key that
            is seen or written may be anything. Not with cache_batch_idx.
        num_splits: ignored; splits change no result.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), or (out, softmax_lse (batch, num_heads, seqlen_q)).

    Raises:
        UnsupportedError: rotary with `cache_leftpad`.
        SpecError: k or rotary_cos without its other half; k, v, cache_batch_idx or block_table are not the
            cache's; keys do not fit behind those in the cache; two tokens would be written to one slot; or
            what `polyflash.attention` refuses. What is refused for k, v, rotary, cache_batch_idx or
            block_table is so before the cache is written. Contents of tensors are checked on a CPU; on a
            device what has no page is not written, and hidden.
    """
    if rotary_cos is not None and cache_leftpad is not None:
        raise UnsupportedError("cache_leftpad: not with rotary_cos here. Rotate q and k before the call")
    _check_halves(k, v, rotary_cos, rotary_sin)
    window = window_sides(window_size)
    with torch.no_grad():
        if block_table is None:
            _check_rows(q, k_cache, v_cache, cache_batch_idx)
            room = k_cache.shape[1] if k_cache.ndim > 1 else 0
        else:
            room = pages.room(q, k_cache, v_cache, block_table, cache_batch_idx)
        lens = _lens(q, room, cache_seqlens)
        if k is not None and v is not None:
            if cache_seqlens is None:
                change = "Say how many keys the cache holds; 0 for none."
                raise spec_error("cache_seqlens", got="None", wanted=f"{_INT32} with k", change=change)
            seqlen_new = k.shape[1] if k.ndim > 1 else 0
            _check_new("k", k, k_cache, q.shape[0], seqlen_new)
            _check_new("v", v, v_cache, q.shape[0], seqlen_new)
            _check_room(lens, room, seqlen_new)
            if rotary_cos is not None and rotary_sin is not None:
                stand = lens.long()[:, None]
                along = causal or window != (None, None)
                rows = torch.arange(q.shape[1], device=q.device) if along else stand.new_zeros(q.shape[1])
                q = _rotated(q, stand + rows, rotary_cos, rotary_sin, rotary_interleaved)
                new = torch.arange(k.shape[1], device=q.device)
                k = _rotated(k, stand + new, rotary_cos, rotary_sin, rotary_interleaved)
            at = lens.long()[:, None] + torch.arange(seqlen_new, device=k.device)
            lens = lens + seqlen_new
            if block_table is None:
                _append(k_cache, v_cache, k, v, at, cache_batch_idx)
            else:
                pages.check_seen(q, k_cache, block_table, lens, cache_leftpad, causal, window)
                pages.append(k_cache, v_cache, k, v, at, block_table)
        options: dict[str, Any] = {
            "causal": causal, "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes,
            "scale": softmax_scale, "kv_starts": cache_leftpad,
        }  # fmt: skip
        if block_table is not None:
            out, lse = pages.attend(q, k_cache, v_cache, block_table, lens, options)
        else:
            keys, values = k_cache, v_cache
            if cache_batch_idx is not None:
                keys, values = keys[cache_batch_idx.long()], values[cache_batch_idx.long()]
            out, lse = attention(q, keys, values, layout="bshd", kv_lens=lens, return_lse=True, **options)
    return (out, lse) if return_softmax_lse else out


def window_sides(window_size: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """flash-attn's (left, right) as polyflash has it: a negative side is unbounded."""
    left, right = window_size
    return (None if left is None or left < 0 else left), (None if right is None or right < 0 else right)


def _check_halves(k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> None:
    """What is given in pairs."""
    for names, pair, change in (
        (("k", "v"), (k, v), "Pass both to write to the caches, or neither."),
        (("rotary_cos", "rotary_sin"), (cos, sin), "Pass both tables, or neither."),
    ):
        given = [name for name, x in zip(names, pair, strict=True) if x is not None]
        if len(given) == 1:
            raise spec_error(", ".join(names), got=f"{given[0]} alone", wanted="both", change=change)
    if k is None and cos is not None:
        change = "Rotary applies to the keys that are written."
        raise spec_error("k, v", got="neither, with rotary_cos", wanted="both", change=change)


def _check_new(name: str, new: Tensor, cache: Tensor, batch: int, seqlen: int) -> None:
    """That `new` can be written to `cache` as it is: assignment would broadcast and cast."""
    shape = (batch, seqlen, *cache.shape[2:])
    if (*new.shape,) != shape or new.dtype is not cache.dtype or new.device != cache.device:
        got = f"{new.dtype} {tuple(new.shape)} on {new.device}"
        wanted = f"{cache.dtype} {shape} on {cache.device}: (batch, seqlen_new, num_kv_heads, channels)"
        raise spec_error(name, got=got, wanted=wanted, change=f"Give {name} what {name}_cache has.")


def _check_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch_idx: Tensor | None) -> None:
    """That every request has a row of both caches."""
    if k_cache.ndim != 4 or v_cache.ndim != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        got, change = f"{(*k_cache.shape,)} and {(*v_cache.shape,)}", "Only head_dim may differ."
        wanted = "two of (batch_cache, seqlen_cache, num_kv_heads, head_dim)"
        raise spec_error("k_cache, v_cache", got=got, wanted=wanted, change=change)
    rows, batch = k_cache.shape[0], q.shape[0]
    if batch_idx is None:
        if rows != batch:
            change = "Pass cache_batch_idx, or a view of the caches' rows."
            raise spec_error("k_cache", got=f"{rows} rows", wanted=f"{batch}, as q has", change=change)
        return
    if batch_idx.shape != (batch,) or batch_idx.dtype not in (torch.int32, torch.int64):
        got = f"{batch_idx.dtype} {tuple(batch_idx.shape)}"
        change = "One row number per request."
        raise spec_error("cache_batch_idx", got=got, wanted=f"int32 or int64 ({batch},)", change=change)
    if (
        batch_idx.device.type == "cpu"
        and batch
        and not 0 <= int(batch_idx.min()) <= int(batch_idx.max()) < rows
    ):
        got = f"rows {int(batch_idx.min())} to {int(batch_idx.max())}"
        change = "Number the rows of k_cache."
        raise spec_error("cache_batch_idx", got=got, wanted=f"0 to {rows - 1}", change=change)


def _lens(q: Tensor, room: int, cache_seqlens: int | Tensor | None) -> Tensor:
    """int32 (batch,); all that a request has room for if nothing is said."""
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.shape != (q.shape[0],) or cache_seqlens.dtype is not torch.int32:
            got = f"{cache_seqlens.dtype} {tuple(cache_seqlens.shape)}"
            raise spec_error("cache_seqlens", got=got, wanted=_INT32, change="Use .to(torch.int32).")
        return cache_seqlens
    whole = room if cache_seqlens is None else cache_seqlens
    return torch.full((q.shape[0],), whole, dtype=torch.int32, device=q.device)


def _check_room(lens: Tensor, room: int, new: int) -> None:
    """That `new` keys of each request fit behind those it has."""
    if lens.device.type != "cpu" or not lens.numel():
        return
    low, high = int(lens.min()), int(lens.max())
    if not 0 <= low <= high <= room - new:
        got, change = f"{low} to {high} keys, and {new} more", "Make the caches longer."
        raise spec_error("cache_seqlens", got=got, wanted=f"at most {room} together", change=change)


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, at: Tensor, batch_idx: Tensor | None
) -> None:
    """k and v into the caches, at the positions `at`, int64 (batch, seqlen_new), of each request."""
    requests = torch.arange(k.shape[0], device=k.device) if batch_idx is None else batch_idx.long()
    k_cache[requests[:, None], at] = k
    v_cache[requests[:, None], at] = v


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (batch, seqlen, heads, head_dim) turned by `positions`, int64 (batch, seqlen); channels beyond
    rotary_dim stay. Pairs are neighbours if `interleaved`, else half of rotary_dim apart."""
    half = cos.shape[-1]
    last = int(positions.max()) if positions.device.type == "cpu" and positions.numel() else -1
    if 2 * half > x.shape[-1] or last >= cos.shape[0]:
        got = f"{tuple(cos.shape)} for head_dim {x.shape[-1]}"
        got += f" and positions up to {last}" if last >= 0 else ""
        wanted = "(positions, rotary_dim / 2), rotary_dim <= head_dim"
        raise spec_error("rotary_cos", got=got, wanted=wanted, change="Make the tables longer.")
    rope = Rope(rotary_dim=2 * half, interleaved=interleaved, cos=cos, sin=sin)
    return rope.rotate(x.flatten(0, 1), positions.flatten()).view(x.shape)
