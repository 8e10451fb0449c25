"""The attention function: translates one layer's call by transformers to `attention()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from polyflash.api import attention, attention_varlen
from polyflash.errors import UnsupportedError, spec_error
from polyflash.integrations.transformers.batch_mask import BatchMask
from polyflash.quant.tensor import QuantizedTensor, dequantize

if TYPE_CHECKING:
    from polyflash.integrations.transformers_cache import PagedCache

# Arguments that describe the call and change no result. Every other one that is not named in the signature of
# `_attention_forward` is refused unless it is None or False.
_OUTPUTS = {"output_hidden_states", "output_router_logits", "return_dict"}
DESCRIPTIVE = frozenset({"cache_position", "deterministic", "num_items_in_batch", "use_cache"} | _OUTPUTS)


class PagedStates(Tensor):
    """Keys (or values) of one layer, (batch, num_kv_heads, tokens, head_dim), that stand in pages.

    Every torch operation on it sees `dense()`, a copy."""

    pages: PagedCache
    layer: int
    kind: int

    @staticmethod
    def __new__(cls, pages: PagedCache, layer: int, kind: int, tokens: int) -> PagedStates:
        """`kind` is 0 for keys and 1 for values."""
        pool = pages.cache.pools(layer)[kind]
        shape = (len(pages.requests), pool.shape[2], tokens, pool.shape[3])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=pool.dtype, device=pool.device)
        made.pages, made.layer, made.kind = pages, layer, kind
        return made

    def dense(self) -> Tensor:
        """(batch, num_kv_heads, tokens, head_dim), gathered."""
        pool = self.pages.cache.pools(self.layer)[self.kind]
        table = self.pages.page_table().long()
        if isinstance(pool, QuantizedTensor):
            at = dequantize(pool.pages(table.flatten())).unflatten(0, table.shape)
        else:
            at = pool[table]
        return at.flatten(1, 2)[:, : self.shape[2]].transpose(1, 2)

    def attend(self, query: Tensor, options: dict[str, Any]) -> Tensor:
        """`KVCache.attend` of q over the pages of the layer: (batch, seqlen_q, num_q_heads, head_dim_v)."""
        batch, heads, rows, _ = query.shape
        packed, pages = query.transpose(1, 2).flatten(0, 1), self.pages
        options |= {"layer": self.layer, "counts": rows, "cascade": pages.cascade}
        out: Tensor = pages.cache.attend(packed, pages.source, **options)
        return out.view(batch, rows, heads, -1)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedStates({tuple(self.shape)}, {self.dtype}, layer {self.layer})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _pytree.tree_map_only(PagedStates, PagedStates.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def _dense(*states: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.dense() if isinstance(x, PagedStates) else x for x in states)


def _attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | BatchMask | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None,
    max_length_k: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function: q (batch, num_q_heads, seqlen_q, head_dim), k and v with heads of their own.

    As in transformers' own SDPA function, a mask says everything, and `is_causal` (of the call, else of the
    layer) counts only without one. `softcap`, `s_aux` (sinks, (num_q_heads,)), `position_bias` (broadcastable
    to the scores) are passed on. Causal queries whose `position_ids` (batch or 1, seqlen_q) restart are
    packed documents that do not see each other, unless there is padding or a dense mask. `cu_seq_lens_*`, int
    (documents + 1,), say the same for a batch of one; `max_length_*` are hints.

    Returns:
        (batch, seqlen_q, num_q_heads, head_dim_v), contiguous, and None for the weights.

    Raises:
        UnsupportedError: an argument would change the result and is not supported; it is never ignored.
        SpecError: a mask has another shape than transformers gives, or is for other lengths."""
    _refuse_unknown(kwargs)
    if attention_mask is None and is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask = _mask_of_call(query, key, attention_mask, bool(is_causal))
    settings: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    settings["dropout_p"] = dropout
    if isinstance(mask, Tensor):
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            told = "got a dense mask too, which says everything. Pass one only"
            raise UnsupportedError(f"cu_seq_lens_q: {told}")
        key, value = _dense(key, value)
        if mask.dtype is torch.bool:
            out = attention(query, key, value, mask=mask, bias=position_bias, **settings)
        else:
            bias = mask if position_bias is None else position_bias + mask
            out = attention(query, key, value, bias=bias, **settings)
        return out.transpose(1, 2).contiguous(), None
    if sliding_window is not None and mask.left is None and key.shape[2] > sliding_window:
        raise UnsupportedError(
            f"sliding_window: got {sliding_window} over {key.shape[2]} keys, and a mask without the window. "
            "Build the mask by transformers' create_sliding_window_causal_mask"
        )
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        if mask.causal and mask.cu_seqlens is None and position_ids is not None:
            mask = _kept_apart(mask, position_ids)
        cu_q = cu_k = mask.cu_seqlens
    else:
        mask, cu_q, cu_k = _packed(mask, cu_seq_lens_q, cu_seq_lens_k, position_bias)
    if cu_q is not None and cu_k is not None and position_bias is None:
        q, k, v = (x[0].transpose(0, 1) for x in _dense(query, key, value))
        window = None if mask.left is mask.right is None else (mask.left, mask.right)
        hints: dict[str, Any] = {"max_seqlen_q": max_length_q, "max_seqlen_k": max_length_k}
        out = attention_varlen(q, k, v, cu_q, cu_k, causal=mask.causal, window=window, **hints, **settings)
        return out.unsqueeze(0).contiguous(), None
    options = mask.options(query.shape[2], key.shape[2])
    if isinstance(key, PagedStates) and "mask" not in options and position_bias is None and not dropout:
        del settings["dropout_p"]
        return key.attend(query, options | settings), None
    key, value = _dense(key, value)
    out = attention(query, key, value, bias=position_bias, **options, **settings)
    return out.transpose(1, 2).contiguous(), None


def _mask_of_call(
    query: Tensor, key: Tensor, attention_mask: Tensor | BatchMask | None, is_causal: bool
) -> BatchMask | Tensor:
    """Describes the mask of a call: no mask means a causal one from the top left, or none at all."""
    if attention_mask is None:
        # A static cache hands over its unwritten end too: aligned top-left, no row sees it.
        shape = (query.shape[0], 1, query.shape[2], key.shape[2])
        return BatchMask(shape, query.device, is_causal and query.shape[2] > 1, 0)
    if attention_mask.ndim != 4:
        wanted = "4: (batch, heads or 1, seqlen_q, seqlen_k)"
        change = "Build it by the functions of transformers.masking_utils."
        raise spec_error("attention_mask", f"{attention_mask.ndim} dimensions", wanted, change)
    return attention_mask


def _kept_apart(mask: BatchMask, position_ids: Tensor) -> BatchMask:
    """Adds documents to `mask` if positions restart. transformers looks for that only without a cache."""
    seqlen_q = mask.shape[2]
    if seqlen_q == 1 or position_ids.ndim != 2 or position_ids.shape[1] != seqlen_q:
        return mask
    if mask.padded is True or position_ids.shape[0] not in (1, mask.shape[0]):
        return mask
    restarts = position_ids.diff(dim=1) <= 0
    if not torch.compiler.is_compiling() and not bool(restarts.any()):
        return mask
    return mask.within(torch.nn.functional.pad(restarts.cumsum(1), (1, 0)))


def _packed(
    mask: BatchMask, cu_q: Tensor | None, cu_k: Tensor | None, position_bias: Tensor | None
) -> tuple[BatchMask, Tensor | None, Tensor | None]:
    """Translates cumulative lengths to members of a varlen call, or to ids beside what `mask` says."""
    if cu_q is None or cu_k is None or mask.shape[0] != 1:
        raise UnsupportedError("cu_seq_lens_q: wanted with cu_seq_lens_k and a batch of one. Pass both")
    if mask.q_ids is mask.kv_lens is position_bias is None:
        return mask, cu_q.int(), cu_k.int()
    seqlen_q, seqlen_k = mask.shape[2:]
    equal = seqlen_q == seqlen_k and (cu_q is cu_k or not torch.compiler.is_compiling())
    if not (equal and (cu_q is cu_k or torch.equal(cu_q, cu_k))):
        raise UnsupportedError(
            "cu_seq_lens_k: got other lengths than cu_seq_lens_q, and a mask or a bias beside them. "
            "Pass whole documents, or neither mask nor bias"
        )
    tokens = torch.arange(seqlen_q, device=cu_q.device, dtype=cu_q.dtype)
    documents = torch.bucketize(tokens, cu_q[1:].contiguous(), right=True)[None]
    return mask.within(documents), None, None


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in DESCRIPTIVE:
            raise UnsupportedError(f"{name}: {_WHY.get(name, _UNKNOWN)}")


_UNKNOWN = "unknown to polyflash, and may change the result. Load the model with attn_implementation='sdpa'"
_WHY = {
    "output_attentions": "no matrix of weights is ever made. Load the model with attn_implementation='eager'",
    "cache": "paged continuous batching is not supported. Use generate() with a dynamic cache",
}
