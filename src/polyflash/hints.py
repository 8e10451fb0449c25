"""Answers to names that other libraries give the arguments of attention.

Python refuses an unknown keyword before a function runs, so a function that shall answer has to let it in:
`**unknown: Never`, which its first statement refuses by `unexpected`. Nothing gets past, type checkers refuse
every name, and `answering` keeps it out of the signature. It costs a call 20 ns; a function around the
function costs 110 to 240 ns, and a hidden parameter for each foreign name 17 ns."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ADDED = "A bool mask (True = attend) is mask=, floats that are added to scores are bias=."
_TOP_LEFT = "True aligns the last row with the last key; is_causal of torch SDPA is causal='top_left'."
_PADDING = "Or mask=~key_padding_mask[:, None, None]: True means attend. Padding at the left is kv_starts=."
_SCALES = "Codes bring their scales: pass quantize(k, Scheme(...)), or a QuantizedTensor of codes you have."
# name elsewhere -> (name here, what else there is to know)
_NAMES: dict[str, tuple[str, str]] = {
    "is_causal": ("causal", _TOP_LEFT),
    "attn_mask": ("mask", _ADDED),
    "attention_mask": ("mask", _ADDED),
    "key_padding_mask": ("kv_lens", _PADDING),
    "mask_mod": ("mask", "It takes a bool tensor or a polyflash.Mask."),
    "block_mask": ("mask", "Mask.blocks(visible, rows=..., keys=...) skips hidden blocks."),
    "score_mod": ("bias", "No function is called per score: bias=, alibi_slopes=, softcap= change scores."),
    "attn_bias": ("bias", ""),
    "enable_gqa": ("", "Drop it: query heads are grouped over fewer heads of k and v by themselves."),
    "need_weights": ("", "Weights are never stored: column_sums() and row_stats() say what they were like."),
    "dropout": ("dropout_p", ""),
    "dropout_rate": ("dropout_p", ""),
    "softmax_scale": ("scale", ""),
    "sm_scale": ("scale", ""),
    "window_size": ("window", "A side without bound is None, where others say -1."),
    "sliding_window": ("window", "Neighbours do not count the row itself: (size - 1, None) if causal."),
    "soft_cap": ("softcap", ""),
    "logits_soft_cap": ("softcap", ""),
    "s_aux": ("sinks", ""),
    "cu_seqlens": ("cu_seqlens_q", "Keys have their own: cu_seqlens_k."),
    "cache_seqlens": ("kv_lens", ""),
    "seqused_k": ("kv_lens", ""),
    "context_lens": ("kv_lens", ""),
    "cache_leftpad": ("kv_starts", ""),
    "block_table": ("page_table", ""),
    "block_tables": ("page_table", ""),
    "tensor_layout": ("layout", "It is 'bhsd' or 'bshd'."),
    **dict.fromkeys(("k_scale", "v_scale", "k_descale", "v_descale"), ("", _SCALES)),
    "kv_cache_dtype": ("", _SCALES),
    "return_softmax_lse": ("return_lse", ""),
}
_TAKEN_BY = {
    **dict.fromkeys(("mask", "bias", "layout", "kv_lens"), "attention"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "dropout_p", "dropout_seed"), "attention_varlen"),
    **dict.fromkeys(("page_table", "kv_starts"), "attention_paged"),
}


def answering(function: F) -> F:
    """The same function; its signature does not show `**unknown`."""
    full = inspect.signature(function)
    shown = [p for p in full.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = full.replace(parameters=shown)  # type: ignore[attr-defined]
    function.__annotations__.pop("unknown", None)
    return function


def unexpected(function: Callable[..., Any], unknown: Mapping[str, Any]) -> TypeError:
    """Python's own error of an unknown keyword, with what the name is here, or which one was meant."""
    name = next((x for x in unknown if x in _NAMES), next(iter(unknown)))
    takes = inspect.signature(function).parameters
    ours, words = _NAMES.get(name, ("", ""))
    if not ours and not words:
        near = [name] if name in _TAKEN_BY else difflib.get_close_matches(name, takes, 1, 0.7)
        ours = near[0] if near else ""
    if ours and ours not in takes:
        words = f"{function.__name__}() takes no {ours}=; {_TAKEN_BY.get(ours, 'attention')}() does."
    elif ours:
        words = f"Use {ours}=. {words}".strip()
    return TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}. {words}".strip())
