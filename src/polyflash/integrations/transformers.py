"""polyflash as the attention of Hugging Face transformers models.

    from polyflash.integrations.transformers import register

    model = AutoModel.from_pretrained(folder, attn_implementation=register())

`register()` registers two functions under one name: the attention function, and a mask function that says
padding and causality by lengths and offsets, so that no (batch, 1, seqlen_q, seqlen_k) tensor is built for
them. Both are needed: without a mask function of the same name transformers passes no mask at all, and padded
keys take part in the attention without a warning.

transformers parses the name. "flash" in it starts an import of flash-attn, "sdpa" and "flex_attention" start
checks of their own, "/" makes it a repository on the hub and "|" a prefix. So it is "poly", not "polyflash".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyflash.api import attention
from polyflash.errors import UnsupportedError, spec_error

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError("this module needs transformers 5: pip install 'polyflash[hf]'") from error

PARSED_NAMES = ("flash", "sdpa", "flex_attention", "paged", "eager", "/", "|", "@", ":")

# Arguments that describe the call and change no result. Every other one that is not named in the signature of
# `_attention_forward` is refused unless it is None or False.
DESCRIPTIVE = frozenset(
    (
        "cache_position",
        "deterministic",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)


def register(name: str = "poly") -> str:
    """Make `attn_implementation=name` run polyflash in every model loaded from now on; returns the name.

    Raises:
        SpecError: transformers gives the name, or a part of it, a meaning of its own.
    """
    parsed = [part for part in PARSED_NAMES if part in name]
    if parsed or not name:
        wanted = f"a word with none of {' '.join(PARSED_NAMES)} in it"
        raise spec_error("name", got=repr(name), wanted=wanted, change="Choose a plain one, such as 'poly'.")
    AttentionInterface.register(name, _attention_forward)
    AttentionMaskInterface.register(name, _mask_of_batch)
    return name


@dataclass(frozen=True, eq=False)
class BatchMask:
    """Which keys the queries of a batch see, where transformers wants a bool (batch, 1, seqlen_q, seqlen_k).

    Query i of request b sees key j iff kv_starts[b] <= j < kv_lens[b] and, when causal, j <= i + q_offset.
    `kv_lens` and `kv_starts` are int32 (batch,), or None if every key is live; `q_offset` is an int or an
    int32 (batch,).
    """

    shape: tuple[int, int, int, int]
    device: torch.device
    causal: bool
    q_offset: int | Tensor
    kv_lens: Tensor | None = None
    kv_starts: Tensor | None = None

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    def to(
        self, device: Any = None, dtype: Any = None, non_blocking: bool = False, copy: bool = False
    ) -> BatchMask:
        """The same mask on another device, with the signature of `Tensor.to`; a dtype alone is no change."""
        device = dtype if isinstance(device, torch.dtype) else getattr(device, "device", device)
        if device is None or isinstance(device, torch.dtype) or torch.device(device) == self.device:
            return self
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=non_blocking)
            for name in ("kv_lens", "kv_starts", "q_offset")
            if isinstance(x := getattr(self, name), Tensor)
        }
        return replace(self, device=torch.device(device), **moved)

    def contiguous(self) -> BatchMask:
        return self

    def dense(self) -> Tensor:
        """The bool (batch, 1, seqlen_q, seqlen_k) tensor that this mask stands for; True = attend."""
        batch, _, seqlen_q, seqlen_k = self.shape
        i = torch.arange(seqlen_q, device=self.device)[:, None]
        j = torch.arange(seqlen_k, device=self.device)
        seen = torch.ones(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=self.device)
        if self.causal:
            offset = self.q_offset.view(-1, 1, 1, 1) if isinstance(self.q_offset, Tensor) else self.q_offset
            seen = seen & (j <= i + offset)
        if self.kv_lens is not None:
            seen = seen & (j < self.kv_lens.view(-1, 1, 1, 1))
        if self.kv_starts is not None:
            seen = seen & (j >= self.kv_starts.view(-1, 1, 1, 1))
        return seen


def _mask_of_batch(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | BatchMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | BatchMask | None:
    """The mask function: a `BatchMask` for causal and bidirectional attention, padded at the ends or not.

    None stands for causal attention over equal lengths without padding, where transformers lets the layer's
    `is_causal` decide. Any other pattern (sliding window, chunks, packed documents, padding with holes, an
    overlay) becomes the dense bool tensor that torch SDPA gets, True = attend. `attention_mask` is bool
    (batch, seen keys).
    """
    if isinstance(attention_mask, BatchMask):
        return attention_mask
    causal = mask_function is causal_mask_function
    skip = allow_is_causal_skip if causal else allow_is_bidirectional_skip
    plain = (causal or mask_function is bidirectional_mask_function) and not use_vmap and skip
    ends = _padding_ends(attention_mask, batch_size, kv_length, kv_offset) if plain else None
    if ends is None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]  # a tensor with a static cache
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
    kv_starts, kv_lens = ends
    offset = q_offset - kv_offset
    if isinstance(offset, Tensor):
        offset = offset.to(device=device, dtype=torch.int32).reshape(-1).expand(batch_size).contiguous()
    elif causal and offset == kv_length - q_length and q_length in (1, kv_length):
        if kv_lens is None and kv_starts is None:
            return None
        causal = q_length > 1  # one row at the last position sees every live key
    shape = (batch_size, 1, q_length, kv_length)
    return BatchMask(shape, torch.device(device), causal, offset, kv_lens, kv_starts)


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BatchMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: q (batch, num_q_heads, seqlen_q, head_dim), k and v with heads of their own.

    As in transformers' own SDPA function, a mask says everything, and `is_causal` (of the call, else of the
    layer) counts only without one. `softcap`, `s_aux` (sinks, (num_q_heads,)), `position_bias` are passed on.

    Returns:
        (batch, seqlen_q, num_q_heads, head_dim_v), contiguous, and None for the weights.

    Raises:
        UnsupportedError: an argument would change the result and is not supported; it is never ignored.
    """
    _refuse_unknown(kwargs)
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if attention_mask is None and is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if sliding_window is not None and seqlen_k > sliding_window and not isinstance(attention_mask, Tensor):
        raise UnsupportedError(
            f"sliding_window: got {sliding_window} over {seqlen_k} keys, and a mask without the window. "
            "Build the mask by transformers' create_sliding_window_causal_mask"
        )
    structured: dict[str, Any] = {}
    if attention_mask is None:
        # A static cache hands over its unwritten end too: aligned top-left, no row sees it.
        structured["causal"] = "top_left" if is_causal and seqlen_q > 1 else False
    elif isinstance(attention_mask, BatchMask):
        structured = _structured(attention_mask, seqlen_q, seqlen_k)
    elif attention_mask.dtype is torch.bool:
        structured["mask"] = attention_mask
    else:
        position_bias = attention_mask if position_bias is None else position_bias + attention_mask
    out = attention(
        query,
        key,
        value,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
        bias=position_bias,
        dropout_p=dropout,
        **structured,
    )
    return out.transpose(1, 2).contiguous(), None


def _structured(mask: BatchMask, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    """The arguments of `attention()` that say what `mask` says."""
    if mask.shape[2:] != (seqlen_q, seqlen_k):
        got, wanted = f"{mask.shape[2]} queries x {mask.shape[3]} keys", f"{seqlen_q} x {seqlen_k}"
        change = "Build the mask for this layer's own cache."
        raise spec_error("attention_mask", got=got, wanted=wanted, change=change)
    said: dict[str, Any] = {"kv_lens": mask.kv_lens, "kv_starts": mask.kv_starts}
    if mask.causal:
        said["causal"] = True
        said["q_offset"] = mask.q_offset
    return said


def _padding_ends(
    attention_mask: Tensor | None, batch_size: int, kv_length: int, kv_offset: int
) -> tuple[Tensor | None, Tensor | None] | None:
    """(kv_starts, kv_lens), None for "every key"; or None if the live keys of a request have a hole.

    `attention_mask` is bool (batch, seen keys); keys beyond its end are dead. It is read, so not under
    torch.compile, where a read would break the graph.
    """
    if attention_mask is None:
        return None, None
    if torch.compiler.is_compiling() or attention_mask.shape[0] != batch_size:
        return None
    live = attention_mask[:, kv_offset : kv_offset + kv_length]
    if live.shape[1] == kv_length and bool(live.all()):
        return None, None
    if live.shape[1] == 0:
        return None
    count = live.sum(1, dtype=torch.int32)
    starts = live.int().argmax(1).to(torch.int32)  # the first live key; 0 if there is none
    lens = starts + count
    j = torch.arange(live.shape[1], device=live.device)
    if not torch.equal(live, (j >= starts[:, None]) & (j < lens[:, None])):
        return None
    return starts if bool(starts.any()) else None, lens


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in DESCRIPTIVE:
            raise UnsupportedError(f"{name}: {_WHY.get(name, _UNKNOWN)}")


_UNKNOWN = "unknown to polyflash, and may change the result. Load the model with attn_implementation='sdpa'"
_PACKED = (
    "packed sequences by cumulative lengths are not read here. Pass position_ids that restart at every "
    "document, no attention_mask and use_cache=False: then the mask keeps documents apart"
)
_WHY = {
    "output_attentions": "no matrix of weights is ever made. Load the model with attn_implementation='eager'",
    "cache": "paged continuous batching is not supported. Use generate() with a dynamic cache",
    "cu_seq_lens_q": _PACKED,
    "cu_seq_lens_k": _PACKED,
    "max_length_q": _PACKED,
    "max_length_k": _PACKED,
}
