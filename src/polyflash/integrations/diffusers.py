"""polyflash as an attention backend of Hugging Face diffusers models.

    from polyflash.integrations.diffusers import register

    model.set_attention_backend(register())

Backends of diffusers have names from a closed enumeration, so `register()` adds a member to it, and
`unregister()` takes it out again. Under diffusers' context parallelism (`enable_parallelism`) its rows are
spread over the ranks, and attention is that of `polyflash.parallel`. Attention that diffusers computes by
torch's SDPA itself (UNets) asks no backend: `polyflash.integrations.sdpa.enabled()` reaches it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    from diffusers.models import attention_dispatch as theirs
except ImportError as error:
    raise ImportError("this module needs diffusers: pip install 'polyflash[hf]'") from error

from polyflash.errors import UnsupportedError, spec_error
from polyflash.integrations import sdpa
from polyflash.integrations.context_parallel import over_ranks

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
    registry = theirs._AttentionBackendRegistry
    registry.register(member)(_attention)
    sharing: set[str] = getattr(registry, "_supports_context_parallel", set())
    sharing.add(name)
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
    getattr(registry, "_supports_context_parallel", set()).discard(name)
    _OURS.discard(name)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:  # fmt: skip
    """Computes what diffusers' native backend does: q, k, v (batch, seqlen, heads, head_dim); `attn_mask`
    bool, True = see, or float; (batch, seqlen_k), or broadcastable to (batch, heads, seqlen_q, seqlen_k)."""
    if return_lse:
        told = "exchanges of diffusers' own ask for it, which this backend takes no part in"
        raise UnsupportedError(f"return_lse: {told}. Leave it out")
    shared = getattr(_parallel_config, "context_parallel_config", None)
    if _parallel_config is not None and shared is None:
        told = "it has no context_parallel_config, and polyflash knows no other"
        raise UnsupportedError(f"parallel_config: {told}. Leave it out")
    if shared is not None and shared.ring_degree * shared.ulysses_degree > 1:
        if attn_mask is not None or is_causal:
            told = "rows of text and image are spread each for itself, and their places are not known here"
            raise UnsupportedError(
                f"attn_mask, is_causal: {told}. Run this model without context parallelism"
            )
        return _over_ranks(shared, query, key, value, dropout_p, scale, enable_gqa)
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    given = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return sdpa._replaced(False, q, k, v, *given, by="diffusers").transpose(1, 2)


def _over_ranks(
    shared: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None, gqa: bool
) -> Tensor:
    """Attention of rows that diffusers has spread evenly; without masks their order does not matter. Its mesh
    is (ring, ulysses), as ours."""
    how: dict[str, Any] = {"mesh": shared._mesh, "method": "ulysses+ring"}
    if shared.ulysses_degree == 1:
        how = {"mesh": shared._ring_mesh, "method": "ring"}
    elif shared.ring_degree == 1:
        how = {"mesh": shared._ulysses_mesh, "method": "ulysses"}
    how |= {"order": "contiguous", "layout": "bshd", "scale": scale, "dropout_p": dropout_p}
    return over_ranks(query, key, value, gqa, how)
