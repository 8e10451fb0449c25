"""flash-attn 2's functions on polyflash: its names, argument order, defaults, layouts and return shapes.
flash-attn 3's keywords work where they mean something here, and are refused with a reason elsewhere.

    from polyflash.integrations.flash_attn import flash_attn_func

Tensors are (batch, seqlen, heads, head_dim), packed ones (total, heads, head_dim). Causal and windows are
aligned bottom-right. `window_size` counts neighbours on the left and right, -1 is unbounded. Any float dtype,
head_dim and device that `polyflash.attention` takes is taken here. `deterministic` changes nothing: gradients
always are. Nor do flash-attn 3's `num_splits`, `pack_gqa` and `sm_margin`, which say how to run. Numbers and
flags may be numpy's or tensors without dimensions, lengths and bounds int32 or int64.

`return_attn_probs=True` returns (out, softmax_lse, None): no matrix of weights is ever made. softmax_lse
is (batch, num_heads, seqlen_q) or (num_heads, total_q), fp32. A row that sees no key has -inf there, out 0.

`flash_attn_with_kvcache` is in `polyflash.integrations.flash_attn_cache`, `apply_rotary_emb` in
`.flash_attn_rotary`; both are found here too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyflash.api import attention, attention_varlen
from polyflash.errors import described, spec_error
from polyflash.integrations.flash_attn_arguments import facade, flag, number, options, scalar
from polyflash.integrations.flash_attn_cache import attend_packed, flash_attn_with_kvcache, one_table
from polyflash.integrations.flash_attn_rotary import apply_rotary_emb

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]
__all__ += ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]
__all__ += ["apply_rotary_emb", "flash_attn_with_kvcache", "index_first_axis", "pad_input", "unpad_input"]

Result = Tensor | tuple[Tensor, Tensor, None]


@facade({})
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention of q (batch, seqlen_q, num_heads, head_dim) over k and v (batch, seqlen_k, num_kv_heads, .).

    `alibi_slopes`: (num_heads,) or (batch, num_heads). Gradients reach q, k and v.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), or (out, softmax_lse, None).

    Raises:
        SpecError, UnsupportedError: as `polyflash.attention`."""
    given = options(causal, window_size, softcap, alibi_slopes, softmax_scale)
    given |= {"layout": "bshd", "dropout_p": number("dropout_p", dropout_p)}
    if flag("return_attn_probs", return_attn_probs):
        return (*attention(q, k, v, **given, return_lse=True), None)
    return attention(q, k, v, **given)


@facade({"q": "qkv", "k": "qkv", "v": "qkv"})
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of qkv (batch, seqlen, 3, num_heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    given = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, dropout_p, *given)


@facade({"k": "kv", "v": "kv"})
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of q and kv (batch, seqlen_k, 2, num_kv_heads, head_dim)."""
    k, v = _unpacked("kv", kv, 2, 5)
    given = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, dropout_p, *given)


@facade({"k_pages": "k", "v_pages": "v", "page_table": "block_table", "kv_lens": "seqused_k"})
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention within each member of a packed batch: rows [cu_seqlens_q[b], cu_seqlens_q[b+1]) of
    q (total_q, num_heads, head_dim) over keys [cu_seqlens_k[b], ...) of k and v (total_k, num_kv_heads, .).
    With `block_table`, int32 (batch, max_blocks), k and v are pages (num_blocks, page_size, num_kv_heads, .),
    any page_size, and cu_seqlens_k says how many keys each member has in its pages; no gradients then, as in
    `flash_attn_with_kvcache`. `seqused_k`, (batch,), says how many of its keys each member uses; beside a
    `block_table` cu_seqlens_k may be None then. `page_table` is another name of `block_table`.

    Returns:
        out (total_q, num_heads, head_dim_v), or (out, softmax_lse, None).

    Raises:
        SpecError, UnsupportedError: as `polyflash.attention_varlen`, or `polyflash.attention_paged`."""
    given = options(causal, window_size, softcap, alibi_slopes, softmax_scale)
    wants_lse, dropout_p = flag("return_attn_probs", return_attn_probs), number("dropout_p", dropout_p)
    max_seqlen_q = scalar("max_seqlen_q", max_seqlen_q)
    block_table = one_table(block_table, page_table)
    if block_table is not None:
        given |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "dropout_p": dropout_p}
        out, lse = attend_packed(q, k, v, block_table, seqused_k, cu_seqlens_k, given)
        return (out, lse, None) if wants_lse else out
    given |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": scalar("max_seqlen_k", max_seqlen_k)}
    given |= {"dropout_p": dropout_p, "kv_lens": seqused_k}
    if wants_lse:
        return (*attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **given, return_lse=True), None)
    return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **given)


_OF_BOTH = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@facade({"q": "qkv", "k": "qkv", "v": "qkv"} | {name: name[:-2] for name in _OF_BOTH})
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of qkv (total, 3, num_heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *given, deterministic, return_attn_probs
    )


@facade({"k": "kv", "v": "kv"})
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of q and kv (total_k, 2, num_kv_heads, head_dim)."""
    k, v = _unpacked("kv", kv, 2, 4)
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    given: Any = (*bounds, *scores, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *given)


def _unpacked(name: str, x: Tensor, parts: int, ndim: int) -> tuple[Tensor, ...]:
    if not isinstance(x, Tensor) or x.ndim != ndim or x.shape[-3] != parts:
        lead = "batch, seqlen" if ndim == 5 else "total"
        change = "Use torch.stack(..., dim=-3)."
        raise spec_error(name, described(x), f"({lead}, {parts}, heads, head_dim)", change)
    return x.unbind(-3)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the live tokens of a padded batch, request after request (flash_attn.bert_padding).

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: bool or int (batch, seqlen), 1 = live.
        unused_mask: likewise: tokens to keep in the packed batch that are not counted as live.

    Returns:
        packed (total, ...), indices int64 (total,) into batch * seqlen, cu_seqlens int32 (batch + 1,), the
        longest request, and live tokens per request int32 (batch,)."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Unpacks (total, ...) to (batch, seqlen, ...): zero wherever `indices` does not point."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Selects the rows `indices`, int64 (total,), of x (rows, ...)."""
    return x.index_select(0, indices)
