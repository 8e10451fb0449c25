"""The names under which transformers finds polyflash: an attention function and a mask function each."""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from polyflash.errors import spec_error
from polyflash.integrations.transformers.batch_mask import _mask_of_batch
from polyflash.integrations.transformers.layer import _attention_forward
from polyflash.integrations.transformers.shards import _attention_of_shard, _mask_of_shard
from polyflash.parallel.api import Method, Order

_PARSED = ("flash", "sdpa", "flex_attention", "paged", "eager", "/", "|", "@", ":")


def register(
    name: str = "poly", *, mesh: Any = None, order: Order = "zigzag", method: Method | None = None
) -> str:
    """Make `attn_implementation=name` run polyflash in every model loaded from now on; returns the name.
    Calls with a `PagedCache` read its pages.

    With `mesh`, models of this name train and prefill with their sequence spread over it, as
    `polyflash.parallel.attention` does with `order` and `method`: give them rows of `parallel.split`, and
    `position_ids` too, (1, rows), which split the same way.

    Raises:
        SpecError: transformers gives the name, or a part of it, a meaning of its own."""
    if not name or any(part in name for part in _PARSED):
        change = "Choose a plain one, such as 'poly'."
        raise spec_error("name", repr(name), f"a word with none of {' '.join(_PARSED)} in it", change)
    of_shards = {"mesh": mesh, "order": order, "method": method}
    AttentionInterface.register(name, _attention_forward if mesh is None else _attention_of_shard(of_shards))
    AttentionMaskInterface.register(name, _mask_of_batch if mesh is None else _mask_of_shard)
    return name
