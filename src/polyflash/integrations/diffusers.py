"""polyflash as an attention backend of Hugging Face diffusers models.

    from polyflash.integrations.diffusers import register

    model.set_attention_backend(register())

Backends of diffusers have names from a closed enumeration, so `register()` adds a member to it, and
`unregister()` takes it out again. Attention that diffusers computes by torch's SDPA itself (UNets) asks no
backend: `polyflash.integrations.sdpa.enabled()` reaches it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    from diffusers.models import attention_dispatch as theirs
except ImportError as error:
    raise ImportError("this module needs diffusers: pip install 'polyflash[hf]'") from error

from polyflash.errors import UnsupportedError, spec_error
from polyflash.integrations import sdpa

__all__ = ("register", "unregister")

_OURS: set[str] = set()


def register(name: str = "poly") -> str:
    """Make `model.set_attention_backend(name)` and `attention_backend(name)` run polyflash; returns the name.

    Raises:
        SpecError: diffusers has a backend of that name."""
    names = theirs.AttentionBackendName
    if name in _OURS:
        return name
    taken = name in names._value2member_map_ or name.upper() in names.__members__
    if taken or not name.isidentifier() or name != name.lower():
        change = "'poly' is one."
        raise spec_error("name", repr(name), "a lower-case word that names no backend of diffusers", change)
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_map_[member._name_] = member
    names._value2member_map_[name] = member
    names._member_names_.append(member._name_)
    theirs._AttentionBackendRegistry.register(member)(_attention)
    _OURS.add(name)
    return name


def unregister(name: str = "poly") -> None:
    """Undo `register(name)`. Models that were set to it need another backend; if it is diffusers' active one,
    as after `set_attention_backend`, then "native" is from now on.

    Raises:
        SpecError: the name was not registered here."""
    names, registry = theirs.AttentionBackendName, theirs._AttentionBackendRegistry
    if name not in _OURS:
        raise spec_error("name", repr(name), "a name given to register()", "Others are not ours to take out.")
    if registry._active_backend == name:
        registry.set_active_backend(names.NATIVE)
    member = names._value2member_map_.pop(name)
    del names._member_map_[member.name]
    names._member_names_.remove(member.name)
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(member)
    _OURS.discard(name)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:  # fmt: skip
    """Computes what diffusers' native backend does: q, k, v (batch, seqlen, heads, head_dim); `attn_mask`
    bool, True = see, or float; (batch, seqlen_k), or broadcastable to (batch, heads, seqlen_q, seqlen_k)."""
    if return_lse or _parallel_config is not None:
        told = "polyflash takes part in no context parallelism. Use another backend"
        raise UnsupportedError(f"return_lse, parallel_config: {told}")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    given = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return sdpa._replaced(False, q, k, v, *given, by="diffusers").transpose(1, 2)
