"""flash-attn 2's `flash_attn_with_kvcache`: append to a cache in place, rotate, attend to what is live."""

from __future__ import annotations

import torch
from torch import Tensor

from polyflash.api import attention
from polyflash.errors import UnsupportedError, spec_error

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
        k_cache: (batch_cache, seqlen_cache, num_kv_heads, head_dim), written in place if k is given.
        v_cache: (batch_cache, seqlen_cache, num_kv_heads, head_dim_v), likewise.
        k: (batch, seqlen_new, num_kv_heads, head_dim) to be written at [cache_seqlens, ...) of each request.
        v: (batch, seqlen_new, num_kv_heads, head_dim_v), given if k is.
        rotary_cos: (positions, rotary_dim / 2), with k only. k is rotated by the positions it is written to;
            so is q, row by row, with `causal` or a window, and all of it by `cache_seqlens` otherwise.
        rotary_sin: likewise.
        cache_seqlens: live keys before k is written, int or int32 (batch,); None is all, and not with k.
        cache_batch_idx: int (batch,): the cache's row of each request, which is copied if given; all differ
            where k is given.
        cache_leftpad: int32 (batch,): first live key. Not with rotary.
        num_splits: ignored; splits change no result.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), or (out, softmax_lse (batch, num_heads, seqlen_q)).

    Raises:
        UnsupportedError: `block_table`, or rotary with `cache_leftpad`.
        SpecError: keys do not fit behind those in the cache, or what `polyflash.attention` refuses.
    """
    if block_table is not None:
        raise UnsupportedError("block_table: polyflash has no paged attention. Pass a contiguous cache")
    if rotary_cos is not None and cache_leftpad is not None:
        raise UnsupportedError("cache_leftpad: not with rotary_cos here. Rotate q and k before the call")
    window = window_sides(window_size)
    with torch.no_grad():
        lens = _lens(q, k_cache, cache_seqlens)
        if k is not None and v is not None:
            if cache_seqlens is None:
                change = "Say how many keys the cache holds; 0 for none."
                raise spec_error("cache_seqlens", got="None", wanted=f"{_INT32} with k", change=change)
            if rotary_cos is not None and rotary_sin is not None:
                stand = lens.long()[:, None]
                along = causal or window != (None, None)
                rows = torch.arange(q.shape[1], device=q.device) if along else stand.new_zeros(q.shape[1])
                q = _rotated(q, stand + rows, rotary_cos, rotary_sin, rotary_interleaved)
                new = torch.arange(k.shape[1], device=q.device)
                k = _rotated(k, stand + new, rotary_cos, rotary_sin, rotary_interleaved)
            _append(k_cache, v_cache, k, v, lens, cache_batch_idx)
            lens = lens + k.shape[1]
        elif not (k is v is rotary_cos is rotary_sin is None):
            change = "Rotary applies to the keys that are written."
            raise spec_error(
                "k, v", got="one alone, or neither with rotary_cos", wanted="both", change=change
            )
        keys, values = k_cache, v_cache
        if cache_batch_idx is not None:
            keys, values = keys[cache_batch_idx.long()], values[cache_batch_idx.long()]
        out, lse = attention(
            q, keys, values, layout="bshd", causal=causal, window=window, softcap=softcap,
            alibi_slopes=alibi_slopes, scale=softmax_scale, kv_lens=lens, kv_starts=cache_leftpad,
            return_lse=True,
        )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def window_sides(window_size: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """flash-attn's (left, right) as polyflash has it: a negative side is unbounded."""
    left, right = window_size
    return (None if left is None or left < 0 else left), (None if right is None or right < 0 else right)


def _lens(q: Tensor, k_cache: Tensor, cache_seqlens: int | Tensor | None) -> Tensor:
    """int32 (batch,)."""
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.shape != (q.shape[0],) or cache_seqlens.dtype is not torch.int32:
            got = f"{cache_seqlens.dtype} {tuple(cache_seqlens.shape)}"
            raise spec_error("cache_seqlens", got=got, wanted=_INT32, change="Use .to(torch.int32).")
        return cache_seqlens
    whole = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    return torch.full((q.shape[0],), whole, dtype=torch.int32, device=q.device)


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lens: Tensor, batch_idx: Tensor | None
) -> None:
    """k and v into the caches, behind `lens` keys of each request."""
    room, new = k_cache.shape[1], k.shape[1]
    if (
        lens.device.type == "cpu"
        and lens.numel()
        and not 0 <= int(lens.min()) <= int(lens.max()) <= room - new
    ):
        got = f"{int(lens.min())} to {int(lens.max())} keys, and {new} more"
        change = "Make the caches longer."
        raise spec_error("cache_seqlens", got=got, wanted=f"at most {room} together", change=change)
    requests = torch.arange(k.shape[0], device=k.device) if batch_idx is None else batch_idx.long()
    at = lens.long()[:, None] + torch.arange(new, device=k.device)
    k_cache[requests[:, None], at] = k
    v_cache[requests[:, None], at] = v


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (batch, seqlen, heads, head_dim) turned by `positions`, int64 (batch, seqlen); channels beyond
    rotary_dim stay. Pairs are neighbours if `interleaved`, else half of rotary_dim apart. In fp32."""
    half = cos.shape[-1]
    if 2 * half > x.shape[-1] or (positions.device.type == "cpu" and int(positions.max()) >= cos.shape[0]):
        got = f"{tuple(cos.shape)} for head_dim {x.shape[-1]} and positions up to {int(positions.max())}"
        wanted = "(positions, rotary_dim / 2), rotary_dim <= head_dim"
        raise spec_error("rotary_cos", got=got, wanted=wanted, change="Make the tables longer.")
    c, s = cos[positions][:, :, None].float(), sin[positions][:, :, None].float()
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    first, second = a * c - b * s, a * s + b * c
    whole = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((whole.to(x.dtype), rest), -1)
