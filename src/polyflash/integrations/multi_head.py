"""`torch.nn.functional.multi_head_attention_forward` around an attention function of the caller's.

torch hands this function over to a function mode as a whole, so that a mode never sees the attention in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def forward(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int,
    num_heads: int, in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None,
    bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor,
    out_proj_bias: Tensor | None, training: bool = True, key_padding_mask: Tensor | None = None,
    need_weights: bool = True, attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None, static_k: Tensor | None = None, static_v: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> Tensor | str:  # fmt: skip
    """The first result of torch's function, with `attend` for its scaled_dot_product_attention; or why the
    call is for torch's own, which calls no attention or raises: weights wanted, added or given keys,
    arguments that torch refuses.

    `query` (seqlen_q, batch, embed_dim) or unbatched (seqlen_q, embed_dim)."""
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else (in_proj_weight,)
    if not (bias_k is bias_v is static_k is static_v is None) or add_zero_attn:
        return "bias_k, bias_v, static_k, static_v, add_zero_attn: keys are added or given"
    if need_weights:
        return "need_weights: the weights are wanted"
    if not (
        all(w is not None for w in weights)
        and _fit(query, key, value, embed_dim_to_check, num_heads, use_separate_proj_weight)
        and _masks_fit(query, key, num_heads, key_padding_mask, attn_mask, is_causal)
    ):
        return "shapes, masks: torch refuses them, or its function has a meaning of its own for them"
    if is_causal and key_padding_mask is None:
        attn_mask = None  # the flag says the same
    else:
        is_causal = False
    projected = _projected(query, key, value, weights, in_proj_bias)
    batched = query.ndim == 3
    batch = query.shape[1] if batched else 1
    q, k, v = (
        x.reshape(x.shape[0], batch, num_heads, embed_dim_to_check // num_heads).permute(1, 2, 0, 3)
        for x in projected
    )
    mask = _seen(attn_mask, key_padding_mask, batch, num_heads)
    out = attend(q, k, v, mask, dropout_p if training else 0.0, is_causal)
    out = out.permute(2, 0, 1, 3).reshape(query.shape[0], batch, embed_dim_to_check)
    out = functional.linear(out, out_proj_weight, out_proj_bias)
    return out if batched else out.squeeze(1)


def _fit(query: Any, key: Any, value: Any, embed_dim: Any, num_heads: int, separate: bool) -> bool:
    if not (isinstance(embed_dim, int) and query.ndim == key.ndim == value.ndim in (2, 3)):
        return False
    same = key.shape[:-1] == value.shape[:-1] and (separate or key.shape == value.shape)
    batch = query.ndim == 2 or query.shape[1] == key.shape[1]
    return same and batch and query.shape[-1] == embed_dim and embed_dim % num_heads == 0


def _masks_fit(
    query: Tensor, key: Tensor, num_heads: int, padding: Tensor | None, attn_mask: Tensor | None, causal: bool
) -> bool:
    batch = () if query.ndim == 2 else (query.shape[1],)
    rows, keys = query.shape[0], key.shape[0]
    for mask in (padding, attn_mask):
        if mask is not None and mask.dtype is not torch.bool and not mask.is_floating_point():
            return False
    if padding is not None and padding.shape != (*batch, keys):
        return False
    if attn_mask is None:
        return not causal
    wanted = (rows, keys) if attn_mask.ndim == 2 else ((batch[0] if batch else 1) * num_heads, rows, keys)
    same = padding is None or padding.dtype is attn_mask.dtype  # torch warns if they differ
    return attn_mask.shape == wanted and same


def _projected(
    query: Tensor, key: Tensor, value: Tensor, weights: tuple[Any, ...], bias: Tensor | None
) -> tuple[Tensor, ...]:
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    if len(weights) == 1:
        if query is key is value:
            return functional.linear(query, weights[0], bias).chunk(3, -1)
        weights = weights[0].chunk(3)
    inputs = zip((query, key, value), weights, biases, strict=True)
    return tuple(functional.linear(x, w, b) for x, w, b in inputs)


def _seen(attn_mask: Tensor | None, padding: Tensor | None, batch: int, num_heads: int) -> Tensor | None:
    """Both masks as one of scaled_dot_product_attention. A bool one is True where a key is *hidden* here."""
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.reshape(batch, num_heads, *attn_mask.shape[1:])
    if padding is not None:
        padding = padding.reshape(batch, 1, 1, -1)
    if attn_mask is None or padding is None:
        one = padding if attn_mask is None else attn_mask
        return ~one if one is not None and one.dtype is torch.bool else one
    return ~(attn_mask | padding) if attn_mask.dtype is torch.bool else attn_mask + padding
