"""Arguments of flash-attn's functions: numbers of any library, flash-attn 3's keywords, and errors in the
caller's names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from polyflash.arguments import int32_of
from polyflash.errors import SpecError, UnsupportedError, described, spec_error
from polyflash.kvcache.handles import is_ints
from polyflash.mask import integer

P = ParamSpec("P")
R = TypeVar("R")

# flash-attn 3's keywords: hints how to run, which change no result; and what no kernel has, with advice.
_HINTS = frozenset({"num_splits", "pack_gqa", "sm_margin"})
_DESCALE = "Multiply the tensor by it; or pass a polyflash.QuantizedTensor, which has its scales with it"
_ABSENT = {
    "qv": "Pass torch.cat((q, qv), -1) as q and torch.cat((k, v), -1) as k",
    "q_descale": "Multiply q by it: no kernel here reads float8",
    "k_descale": _DESCALE,
    "v_descale": _DESCALE,
    "attention_chunk": "Make each chunk a sequence of flash_attn_varlen_func",
    "scheduler_metadata": "Drop it: it was made for flash-attn's own kernels",
    "num_heads_q": "Split qkv, and call flash_attn_func",
    "seqused_q": "Pack the rows that are used: cu_seqlens_q says where they are",
    "seqused_k": "flash_attn_varlen_func takes it",
    "page_table": "flash_attn_varlen_func and flash_attn_with_kvcache take it",
    "cu_seqlens_q": "flash_attn_varlen_func takes packed rows over pages",
    "cu_seqlens_k_new": "Write packed keys to the caches before the call",
    "max_seqlen_q": "flash_attn_varlen_func takes packed rows over pages",
}
# Advice of `polyflash.attention` that names what flash-attn's functions lack or call otherwise.
_ADVICE = {
    "; mask unused keys with kv_lens": "",
    "attention_varlen()": "flash_attn_varlen_func()",
    "attention()": "flash_attn_func()",
    ", or train a bias": "",
    "Use .to(), or Mask.to() for a mask.": "Move it with .to().",
    "num_q_heads": "num_heads",
    "num_pages": "num_blocks",
    "max_pages": "max_blocks",
}


def facade(names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function of flash-attn, or one that it calls: a `SpecError` speaks of `names[x]` instead of
    x, and flash-attn 3's keywords that the function lacks are refused with a reason."""
    names = {"scale": "softmax_scale", "window": "window_size", **names}
    word = re.compile(rf"\b({'|'.join(names)})\b")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code = function.__code__
        own = {*(function.__kwdefaults__ or ()), *code.co_varnames[: code.co_argcount]}

        @functools.wraps(function)
        def _call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in [name for name in kwargs if name not in own]:  # a copy: kwargs shrinks meanwhile
                if name in _HINTS or (name in _ABSENT and _is_absent(name, kwargs[name])):
                    del kwargs[name]
            try:
                return function(*args, **kwargs)
            except SpecError as error:
                text = str(error)
                for ours, theirs in _ADVICE.items():
                    text = text.replace(ours, theirs)
                raise SpecError(word.sub(lambda match: names[match[0]], text)) from None

        return _call

    return decorate


def _is_absent(name: str, value: Any) -> bool:
    if value is None or (name == "attention_chunk" and scalar(name, value) == 0):
        return True
    raise UnsupportedError(f"{name}: got {described(value)}, wanted None: not here. {_ABSENT[name]}")


def scalar(name: str, value: Any) -> Any:
    """Converts a tensor, array or scalar without dimensions to a Python value. All else stays."""
    if getattr(value, "ndim", None) != 0:
        return value
    if isinstance(value, Tensor) and value.requires_grad:
        change = "Scale q where a gradient is needed, and use .detach() here."
        raise spec_error(name, "requires_grad=True", "a constant", change)
    return value.item()


def number(name: str, value: Any) -> Any:
    """Converts a number; None and what is no number stay for the call to judge."""
    value = scalar(name, value)
    if isinstance(value, bool):
        raise spec_error(name, value, "a number", "Flags come later: name them, as in causal=True.")
    return value


def flag(name: str, value: Any) -> bool:
    """Converts a flag to True or False; 1 and 0 are flags too."""
    value = scalar(name, value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise spec_error(name, described(value), "True or False", "It is the same for all rows.")


def options(
    causal: Any, window_size: Any, softcap: Any, alibi_slopes: Tensor | None, softmax_scale: Any
) -> dict[str, Any]:
    """The arguments that all of flash-attn's functions share, as polyflash takes them."""
    return {
        "causal": flag("causal", causal),
        "window": window_sides(window_size),
        "softcap": number("softcap", softcap),
        "alibi_slopes": alibi_slopes,
        "scale": number("softmax_scale", softmax_scale),
    }


def per_request(name: str, given: Any, batch: int, device: torch.device) -> Tensor:
    """Makes int32 (batch,) on `device` of one number for all requests, never read, or of one for each."""
    if isinstance(given, Tensor):
        given = given.to(device).expand(batch).contiguous() if given.ndim == 0 else given
    elif hasattr(given, "__index__") and not isinstance(given, bool) and not getattr(given, "ndim", 0):
        given = torch.full((batch,), given, dtype=torch.int64, device=device)
    if is_ints(given, (batch,), device):
        return int32_of(name, given, False)
    wanted = f"an int, or int32 or int64 ({batch},) on {device}"
    raise spec_error(name, described(given), wanted, "One per request, or one for all.")


def window_sides(window_size: Any) -> tuple[int | None, int | None]:
    """Converts flash-attn's (left, right) to polyflash's: a negative side, or None, is unbounded."""
    sides = window_size.tolist() if getattr(window_size, "ndim", 0) == 1 else window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        change = "(-1, -1) is unbounded; the token itself is not counted."
        raise spec_error("window_size", described(window_size), "(left, right)", change)
    return _side(sides[0]), _side(sides[1])


def _side(value: Any) -> int | None:
    value = scalar("window_size", value)
    if value is None:
        return None
    number = integer(value)
    if number is None:
        raise spec_error("window_size", described(value), "two ints", "-1 is unbounded.")
    return None if number < 0 else min(number, 2**62)
