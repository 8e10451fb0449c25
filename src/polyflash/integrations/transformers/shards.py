"""transformers models whose sequence is spread over ranks.

    from polyflash.integrations.transformers.shards import register

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=register(mesh=mesh))

A rank's model sees its rows alone, so lengths that transformers counts are those of a shard. Only what a
pattern says of order and distance is taken from its masks; positions come from the order of the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from polyflash import parallel
from polyflash.errors import UnsupportedError
from polyflash.integrations import transformers as whole
from polyflash.integrations.transformers.batch_mask import BatchMask
from polyflash.integrations.transformers.layer import _refuse_unknown
from polyflash.integrations.transformers.pattern import read
from polyflash.parallel.api import Method, Order

__all__ = ("register",)


def register(
    name: str = "poly_cp", *, mesh: Any, order: Order = "zigzag", method: Method | None = None
) -> str:
    """Make `attn_implementation=name` spread sequences over a DeviceMesh in every model loaded from now on;
    returns the name. Models train and prefill with rows of `polyflash.parallel.split(..., order=order)`:
    tokens, labels, and `position_ids` (1, rows), which are to be given. `order` and `method` are those of
    `polyflash.parallel.attention`.

    Raises:
        SpecError: transformers gives the name, or a part of it, a meaning of its own."""
    whole.register(name)
    how = {"mesh": mesh, "order": order, "method": method}
    AttentionInterface.register(name, _attention_of_shard(how))
    AttentionMaskInterface.register(name, _mask_of_shard)
    return name


def _mask_of_shard(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> BatchMask:
    """A `BatchMask` with the order and the window of a layer, whatever rows are here.

    Raises:
        UnsupportedError: padding, chunks, or a pattern that is not read."""
    if attention_mask is not None and not (torch.compiler.is_compiling() or bool(attention_mask.all())):
        raise UnsupportedError(
            "attention_mask: padding is not in shards. Pack documents, or pad labels alone"
        )
    pattern = read(mask_function)
    if pattern is None or pattern.chunk is not None:
        text = "the mask of a layer: over shards causal ones and windows are known, this one is not"
        raise UnsupportedError(f"{text}. Call polyflash.parallel.attention() with a Mask")
    shape = (batch_size, 1, q_length, kv_length)
    sides: dict[str, Any] = {"left": pattern.left, "right": pattern.right, "q_ids": pattern.documents}
    return BatchMask(shape, torch.device(device), pattern.causal, 0, **sides)


def _attention_of_shard(how: dict[str, Any]) -> Callable[..., tuple[Tensor, None]]:
    """The attention function; `how` goes to `polyflash.parallel.attention`."""

    def _forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Runs `_attention_forward` of rows that `polyflash.parallel.split` gave this rank."""
        _refuse_unknown(kwargs)
        if query.shape[2] != key.shape[2]:
            text = f"past_key_values: {query.shape[2]} rows over {key.shape[2]} keys"
            raise UnsupportedError(f"{text}. Over shards a model trains or prefills: pass use_cache=False")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        left, right = None if sliding_window is None else sliding_window - 1, None
        if attention_mask is not None:
            if not isinstance(attention_mask, BatchMask):
                raise UnsupportedError(
                    "attention_mask: a dense one is of one device. Let the model build its own"
                )
            causal, left, right = attention_mask.causal, attention_mask.left, attention_mask.right
            _refuse_documents(attention_mask, position_ids, how["order"])
        window = None if left is right is None else (left, right)
        settings: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
        out = parallel.attention(
            query, key, value, causal=causal, window=window, dropout_p=dropout, **settings, **how
        )
        return out.transpose(1, 2).contiguous(), None  # type: ignore[union-attr]

    return _forward


def _refuse_documents(mask: BatchMask, position_ids: Tensor | None, order: str) -> None:
    """Positions of packed documents restart; those of zigzag shards jump forward, which transformers takes
    for another document too, so that only positions tell them apart."""
    if position_ids is not None:
        if bool((position_ids.diff(dim=1) <= 0).any()):
            text = "position_ids: over shards they rise, those of packed documents restart"
            raise UnsupportedError(f"{text}. Call polyflash.parallel.attention_varlen() for them")
    elif order == "zigzag" or mask.q_ids is not None:
        text = "position_ids: this model hands none to its attention, where a jump could be a document's"
        raise UnsupportedError(f"{text}. Use register(order='contiguous'), split by it, and pack nothing")
